/* What both sides of the rendezvous share: proofs, and sockets with deadlines. */
#define _GNU_SOURCE
#include "runtime/comm/join_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

const char JOIN_MAGIC[8] = "mlua.j2\n";
const char *join_boot;
/* For all ranks of a job to come: big jobs start slowly. */
static const double JOIN_SECONDS = 180;

/* ---- Proofs -----------------------------------------------------------------------------------
 */

void join_random(void *bytes, size_t size) {
    uint8_t *at = bytes;
    while (size) {
        ssize_t count = getrandom(at, size, 0);
        if (count > 0) {
            at += count;
            size -= (size_t)count;
        }
    }
}

void join_random_hex(char *text, size_t digits) {
    join_random(text, digits);
    for (size_t i = 0; i < digits; i++) text[i] = "0123456789abcdef"[text[i] & 15];
    text[digits] = 0;
}

static void copy_line(const char *path, char *text, size_t size) {
    FILE *file = fopen(path, "re");
    if (file && fgets(text, (int)size, file)) text[strcspn(text, "\n")] = 0;
    if (file) fclose(file);
}

void join_who_fill(const ml_launch *launch, join_who *who) {
    const int hosts = launch->options.hosts;
    memset(who, 0, sizeof *who);
    if (join_boot)
        snprintf(who->boot, sizeof who->boot, "%s", join_boot);
    else
        copy_line("/proc/sys/kernel/random/boot_id", who->boot, sizeof who->boot);
    gethostname(who->host, sizeof who->host - 1);
    if (hosts > 1 &&
        launch->world > 1) { /* ranks in a row are on one host, as launchers put them */
        int host = (int)((int64_t)launch->rank * hosts / launch->world);
        size_t length = strnlen(who->boot, 24);
        snprintf(who->boot + length, sizeof who->boot - length, " host %d", host);
    }
    who->pid = (uint32_t)getpid();
}

uint64_t join_host(const ml_launch *launch) {
    join_who who;
    join_who_fill(launch, &who);
    const char *name = *who.boot ? who.boot : who.host;
    return ml_hash(name, strlen(name), 0);
}

static void prove(const join_job *job, const char *side, const join_hello *hello,
                  const uint8_t nonce[DIGEST_BYTES], const void *more, size_t size,
                  uint8_t proof[DIGEST_BYTES]) {
    keyed_digest k;
    keyed_start(&k, job->key, sizeof job->key);
    keyed_add(&k, side, strlen(side) + 1);
    keyed_add(&k, hello, sizeof *hello);
    keyed_add(&k, nonce, DIGEST_BYTES);
    keyed_add(&k, more, size);
    keyed_end(&k, proof);
}

void join_prove_server(const join_job *job, const join_hello *hello,
                       const uint8_t nonce[DIGEST_BYTES], uint8_t proof[DIGEST_BYTES]) {
    prove(job, "server", hello, nonce, NULL, 0, proof);
}

void join_prove_client(const join_job *job, const join_hello *hello,
                       const uint8_t nonce[DIGEST_BYTES], const join_who *who,
                       uint8_t proof[DIGEST_BYTES]) {
    prove(job, "client", hello, nonce, who, sizeof *who, proof);
}

void join_prove_welcome(const join_job *job, const join_hello *hello,
                        const uint8_t nonce[DIGEST_BYTES], const join_welcome *welcome,
                        uint8_t proof[DIGEST_BYTES]) {
    prove(job, "welcome", hello, nonce, welcome, offsetof(join_welcome, proof), proof);
}

void join_key(const join_job *job, const char *direction, const join_hello *hello,
              const uint8_t nonce[DIGEST_BYTES], uint8_t key[DIGEST_BYTES]) {
    prove(job, direction, hello, nonce, NULL, 0, key);
}

/* ---- Sockets ----------------------------------------------------------------------------------
 */

bool join_wait(int fd, short events, double deadline) {
    for (;;) {
        double left = deadline - comm_now();
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

/* ---- The job ----------------------------------------------------------------------------------
 */

/* host:port, or [host]:port */
static bool split_address(const char *address, join_job *job) {
    const char *colon = strrchr(address, ':');
    if (!colon || colon == address) return false;
    size_t length = (size_t)(colon - address);
    bool brackets = address[0] == '[' && colon[-1] == ']';
    if (brackets) address++, length -= 2;
    if (length == 0 || length >= sizeof job->host) return false;
    memcpy(job->host, address, length);
    job->host[length] = 0;
    char *end;
    long port = strtol(colon + 1, &end, 10);
    job->port = (int)port;
    job->ports = job->launch->fixed_port ? 1 : JOIN_PORTS;
    return !*end && port > 0 && port + job->ports <= 65536;
}

static void make_key(join_job *job, const char *secret) {
    keyed_digest k;
    keyed_start(&k, secret, strlen(secret));
    keyed_add(&k, job->launch->job, strlen(job->launch->job) + 1);
    keyed_end(&k, job->key);
}

ml_status comm_join(ml_comm *comm, const ml_launch *launch) {
    char secret[65 + 256];
    const int timeout = launch->options.timeout;
    join_job job = {.launch = launch};
    job.deadline = comm_now() + (timeout > 0 ? timeout : JOIN_SECONDS);
    if (!split_address(launch->address, &job)) {
        ml_fail(ML_INVALID, "%s does not say where rank 0 is%s%s", launch->source,
                *launch->address ? ": " : "", launch->address);
        return ml_help("set MASTER_ADDR to the name of rank 0's host, and MASTER_PORT");
    }
    ml_status status = comm_secret(launch, secret);
    if (status != ML_OK) return status;
    make_key(&job, secret);
    return launch->rank == 0 ? join_serve(comm, &job) : join_enter(comm, &job);
}
