#include "vm/serve/guard.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "runtime/comm/digest.h"

enum { BACKLOG = 1024 };

static bool is_loopback(const struct sockaddr *address) {
    if (address->sa_family == AF_INET) {
        uint32_t ip = ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr);
        return ip >> 24 == 127;
    }
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

static int port_of(int listener) {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } address;
    socklen_t size = sizeof address;
    if (getsockname(listener, &address.any, &size) != 0) return 0;
    return ntohs(address.any.sa_family == AF_INET ? address.v4.sin_port : address.v6.sin6_port);
}

/* A socket, or -1 with errno. */
static int listen_on(const struct addrinfo *a) {
    int s = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), yes = 1;
    if (s < 0) return -1;
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(s, a->ai_addr, a->ai_addrlen) == 0 && listen(s, BACKLOG) == 0) return s;
    int problem = errno;
    close(s);
    errno = problem;
    return -1;
}

static struct addrinfo *find_address(const char *host, int port, int family) {
    struct addrinfo hints = {
        .ai_family = family, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *found = NULL;
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    return getaddrinfo(host, service, &hints, &found) == 0 ? found : NULL;
}

ml_status guard_listen(const char *host, int port, int *listener, int *bound, bool *loopback) {
    struct addrinfo *found = find_address(host, port, AF_INET);
    if (!found) found = find_address(host, port, AF_INET6);
    if (!found) return ml_fail(ML_INVALID, "--host %s is no address of this machine", host);
    *loopback = is_loopback(found->ai_addr);
    *listener = listen_on(found);
    int problem = errno;
    freeaddrinfo(found);
    if (*listener < 0) {
        ml_fail(ML_IO, "cannot listen on %s, port %d: %s", host, port, strerror(problem));
        return problem == EADDRINUSE
                   ? ml_help("another program does: --port takes another, 0 one that is free")
                   : ML_IO;
    }
    *bound = port_of(*listener);
    return ML_OK;
}

static void digest(const char *text, uint8_t result[DIGEST_BYTES]) {
    keyed_digest k;
    keyed_start(&k, text, strlen(text));
    keyed_end(&k, result);
}

bool guard_token(const char *header, const char *token) {
    static const char scheme[] = "Bearer ";
    bool named = header && strncasecmp(header, scheme, sizeof scheme - 1) == 0;
    uint8_t given[DIGEST_BYTES], wanted[DIGEST_BYTES];
    digest(named ? header + sizeof scheme - 1 : "", given);
    digest(token, wanted);
    return digest_equal(given, wanted, DIGEST_BYTES) && named;
}

bool guard_is_local(const char *header) {
    if (!header) return true;
    const char *slashes = strstr(header, "://");
    const char *name = slashes ? slashes + 3 : header;
    size_t length = *name == '[' ? strcspn(name, "]") + 1 : strcspn(name, ":/");
    char host[64];
    if (length == 0 || length >= sizeof host) return false;
    snprintf(host, sizeof host, "%.*s", (int)length, name);
    struct in_addr ip;
    if (inet_pton(AF_INET, host, &ip) == 1) return ntohl(ip.s_addr) >> 24 == 127;
    return strcasecmp(host, "localhost") == 0 || strcmp(host, "[::1]") == 0;
}
