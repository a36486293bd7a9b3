/* Sockets with deadlines. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/join_internal.h"

bool join_wait(int fd, short events, double deadline) {
    for (;;) {
        double left = deadline - ml_clock_now();
        if (left <= 0) return false;
        struct pollfd p = {.fd = fd, .events = events};
        int count = poll(&p, 1, left > 1 ? 1000 : (int)(left * 1000) + 1);
        if (count > 0) return true;
        if (count < 0 && errno != EINTR) return false;
    }
}

static bool move(int fd, char *bytes, size_t size, bool reading, double deadline) {
    while (size) {
        ssize_t count = reading ? recv(fd, bytes, size, 0) : send(fd, bytes, size, MSG_NOSIGNAL);
        if (count == 0) return false;
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
        if (count < 0 && !join_wait(fd, reading ? POLLIN : POLLOUT, deadline)) return false;
        if (count < 0) continue;
        bytes += count;
        size -= (size_t)count;
    }
    return true;
}

bool join_read(int fd, void *bytes, size_t size, double deadline) {
    return move(fd, bytes, size, true, deadline);
}

bool join_write(int fd, const void *bytes, size_t size, double deadline) {
    return move(fd, (char *)bytes, size, false, deadline);
}

void join_close(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static bool connect_or_listen(int fd, const struct addrinfo *a, bool listening, double deadline) {
    int one = 1, error = 0;
    socklen_t size = sizeof error;
    if (listening) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        return bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 256) == 0;
    }
    if (connect(fd, a->ai_addr, a->ai_addrlen) == 0) return true;
    return errno == EINPROGRESS && join_wait(fd, POLLOUT, deadline) &&
           getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

int join_address(const char *host, int port, bool listening, double deadline) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICSERV | (listening ? AI_PASSIVE : 0)},
                    *list = NULL;
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    errno = EADDRNOTAVAIL;
    if (getaddrinfo(host, service, &hints, &list) != 0) return -1;
    int fd = -1, error = errno;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd >= 0 && connect_or_listen(fd, a, listening, deadline)) break;
        error = errno;
        join_close(&fd);
    }
    freeaddrinfo(list);
    errno = error;
    return fd;
}

/* Small messages must not wait for acknowledgements of earlier ones. */
void join_no_delay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

int join_local(const char name[JOIN_NAME_BYTES], bool listening) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, name, JOIN_NAME_BYTES);
    socklen_t size = offsetof(struct sockaddr_un, sun_path) + 1 + JOIN_NAME_BYTES;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | (listening ? SOCK_NONBLOCK : 0), 0);
    bool good = fd >= 0 && (listening ? bind(fd, (struct sockaddr *)&address, size) == 0 &&
                                            listen(fd, 256) == 0
                                      : connect(fd, (struct sockaddr *)&address, size) == 0);
    if (!good) join_close(&fd);
    return fd;
}
