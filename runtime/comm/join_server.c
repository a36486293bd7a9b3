/* Rank 0's side of the rendezvous. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/knobs.h"
#include "runtime/comm/wire_internal.h"

enum { PENDING = 64 }; /* connections that have not proved themselves */
static const double PROOF_SECONDS = 5, HAND_OUT_SECONDS = 15, REQUEST_SECONDS = 2;

typedef struct {
    int fd; /* -1: free */
    bool challenged;
    double since;
    size_t used;
    join_hello hello;
    join_answer answer;
    uint8_t nonce[DIGEST_BYTES];
} guest;

typedef struct {
    const join_job *job;
    int listener, world, joined, refused, port;
    guest pending[PENDING];
    guest *ranks; /* [world] those that have proved themselves */
    struct pollfd *polled;
} server;

/* ---- Handshakes ------------------------------------------------------------------------------ */

static void welcome(server *s, guest *g, join_welcome *w) {
    join_who_fill(s->job->launch, &w->who);
    join_prove_welcome(s->job, &g->hello, g->nonce, w, w->proof);
    join_write(g->fd, w, sizeof *w, ml_clock_now() + 1);
}

static void refuse(server *s, guest *g, const char *text) {
    join_welcome w = {.verdict = JOIN_REFUSED};
    snprintf(w.text, sizeof w.text, "%s", text);
    welcome(s, g, &w);
    join_close(&g->fd);
}

static void drop(server *s, guest *g, const char *why) {
    s->refused++;
    ml_debug(1, "rendezvous: a connection is refused: %s", why);
    join_close(&g->fd);
}

static void challenge(server *s, guest *g) {
    join_challenge c;
    if (memcmp(g->hello.magic, JOIN_MAGIC, sizeof g->hello.magic) != 0) {
        drop(s, g, "not one of ours");
        return;
    }
    join_random(g->nonce, sizeof g->nonce);
    memcpy(c.nonce, g->nonce, sizeof c.nonce);
    join_prove_server(s->job, &g->hello, g->nonce, c.proof);
    g->challenged = true;
    g->used = 0;
    if (send(g->fd, &c, sizeof c, MSG_NOSIGNAL) != (ssize_t)sizeof c) drop(s, g, "it has left");
}

static void admit(server *s, guest *g) {
    uint8_t proof[DIGEST_BYTES];
    char text[JOIN_TEXT_BYTES];
    join_prove_client(s->job, &g->hello, g->nonce, &g->answer.who, proof);
    if (!digest_equal(proof, g->answer.proof, sizeof proof)) {
        drop(s, g, "it does not know the secret");
        return;
    }
    g->answer.who.boot[sizeof g->answer.who.boot - 1] = 0;
    g->answer.who.host[sizeof g->answer.who.host - 1] = 0;
    uint32_t rank = g->hello.rank;
    if (g->hello.world != (uint32_t)s->world || rank == 0 || rank >= (uint32_t)s->world) {
        snprintf(text, sizeof text, "it says it is rank %u of %u, but this job has %d ranks", rank,
                 g->hello.world, s->world);
        refuse(s, g, text);
    } else if (s->ranks[rank].fd >= 0) {
        snprintf(text, sizeof text, "rank %u has joined already, as process %u on %.40s", rank,
                 s->ranks[rank].answer.who.pid, s->ranks[rank].answer.who.host);
        refuse(s, g, text);
    } else {
        s->ranks[rank] = *g;
        s->joined++;
        g->fd = -1;
    }
}

static void read_guest(server *s, guest *g) {
    char *into = g->challenged ? (char *)&g->answer : (char *)&g->hello;
    size_t size = g->challenged ? sizeof g->answer : sizeof g->hello;
    ssize_t count = recv(g->fd, into + g->used, size - g->used, 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count <= 0) {
        drop(s, g, "it has left");
        return;
    }
    g->used += (size_t)count;
    if (g->used < size) return;
    if (g->challenged)
        admit(s, g);
    else
        challenge(s, g);
}

/* A new connection takes the place of the oldest where there are too many. */
static void accept_guest(server *s) {
    int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    guest *place = &s->pending[0];
    for (int i = 0; i < PENDING && place->fd >= 0; i++)
        if (s->pending[i].fd < 0 || s->pending[i].since < place->since) place = &s->pending[i];
    if (place->fd >= 0) drop(s, place, "too many at once");
    *place = (guest){.fd = fd, .since = ml_clock_now()};
}

/* One round of poll. A rank that has joined says nothing more: if it does, or leaves, it is out. */
static void serve_once(server *s) {
    int count = 0;
    s->polled[count++] = (struct pollfd){.fd = s->listener, .events = POLLIN};
    for (int i = 0; i < PENDING; i++) /* those without a descriptor are passed over */
        s->polled[count++] = (struct pollfd){.fd = s->pending[i].fd, .events = POLLIN};
    for (int i = 0; i < s->world; i++)
        s->polled[count++] = (struct pollfd){.fd = s->ranks[i].fd, .events = POLLIN | POLLRDHUP};
    if (poll(s->polled, (nfds_t)count, 200) < 0) return;
    double now = ml_clock_now();
    for (int i = 0; i < PENDING; i++) {
        guest *g = &s->pending[i];
        if (g->fd >= 0 && s->polled[1 + i].revents) read_guest(s, g);
        if (g->fd >= 0 && now - g->since > PROOF_SECONDS) drop(s, g, "it is too slow");
    }
    for (int i = 0; i < s->world; i++)
        if (s->ranks[i].fd >= 0 && s->polled[1 + PENDING + i].fd == s->ranks[i].fd &&
            s->polled[1 + PENDING + i].revents) {
            join_close(&s->ranks[i].fd);
            s->joined--;
        }
    if (s->polled[0].revents) accept_guest(s);
}

/* ---- Handing out the segment ----------------------------------------------------------------- */

static bool send_descriptor(int socket, int fd) {
    char byte = 'm';
    struct iovec part = {&byte, 1};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    return sendmsg(socket, &message, MSG_NOSIGNAL) == 1;
}

/* One that asks at the Unix socket; whether it was a rank that got the segment. */
static bool hand_to(server *s, int socket, const uint8_t ticket[DIGEST_BYTES], int segment) {
    struct ucred peer = {0};
    socklen_t size = sizeof peer;
    join_request request;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid())
        return false;
    if (!join_read(socket, &request, sizeof request, ml_clock_now() + REQUEST_SECONDS) ||
        !digest_equal(request.ticket, ticket, DIGEST_BYTES) || request.rank >= (uint32_t)s->world ||
        s->ranks[request.rank].fd < 0 || !send_descriptor(socket, segment))
        return false;
    join_close(&s->ranks[request.rank].fd);
    return true;
}

/* A rank that has joined, still needs the segment, and has ended; 0: none. */
static int who_left(const server *s) {
    char byte;
    for (int i = 1; i < s->world; i++)
        if (s->ranks[i].fd >= 0 && recv(s->ranks[i].fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
            return i;
    return 0;
}

static ml_status hand_out(server *s, int segment) {
    join_welcome w = {.verdict = JOIN_SHARED};
    char number[25];
    join_random_hex(number, sizeof number - 1);
    snprintf(w.name, sizeof w.name, "mlua-%s", number);
    join_random(w.ticket, sizeof w.ticket);
    int listener = join_local(w.name, true);
    if (listener < 0) return ml_fail(ML_IO, "cannot hand out shared memory: %s", strerror(errno));
    for (int i = 1; i < s->world; i++) welcome(s, &s->ranks[i], &w);
    double deadline = ml_clock_now() + HAND_OUT_SECONDS;
    int left = s->world - 1, ended = 0;
    while (left && !(ended = who_left(s)) && ml_clock_now() < deadline) {
        if (!join_wait(listener, POLLIN, ml_clock_now() + 0.2)) continue;
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0 && hand_to(s, fd, w.ticket, segment)) left--;
        join_close(&fd);
    }
    close(listener);
    if (!left) return ML_OK;
    while (!ended || s->ranks[ended].fd < 0) ended++;
    return ml_fail(ML_DEVICE, "rank %d (pid %u) joined but did not fetch the shared memory", ended,
                   s->ranks[ended].answer.who.pid);
}

/* ---- All are there --------------------------------------------------------------------------- */

static ml_status keep_wires(ml_comm *comm, server *s, int other) {
    comm->wire = wire_new(s->world);
    if (!comm->wire) return ml_fail(ML_NO_MEMORY, "no memory for %d connections", s->world);
    join_welcome w = {.verdict = JOIN_HOSTS};
    comm->wire->other_rank = other;
    for (int i = 1; i < s->world; i++) {
        guest *g = &s->ranks[i];
        wire_end *end = &comm->wire->ends[i];
        welcome(s, g, &w);
        join_no_delay(g->fd);
        end->fd = g->fd;
        end->who = g->answer.who;
        join_key(s->job, "from rank 0", &g->hello, g->nonce, end->out.key);
        join_key(s->job, "to rank 0", &g->hello, g->nonce, end->in.key);
        g->fd = -1;
    }
    return ML_OK;
}

static ml_status finish(ml_comm *comm, server *s) {
    join_who own;
    join_who_fill(s->job->launch, &own);
    for (int i = 1; i < s->world; i++)
        if (!*own.boot || strcmp(own.boot, s->ranks[i].answer.who.boot) != 0)
            return keep_wires(comm, s, i);
    comm->fd = comm_segment_new(s->world);
    return comm->fd < 0 ? ml_error_last()->status : hand_out(s, comm->fd);
}

/* Where others come from: MLUA_BIND, else anywhere where the launcher distributed the ranks over
 * several hosts (who does not know the secret gets nothing), else this host alone. */
static const char *where(const server *s) {
    const char *bind = s->job->launch->options.bind;
    return bind ? bind : s->job->launch->several ? "0.0.0.0" : "127.0.0.1";
}

static ml_status too_late(server *s) {
    char text[JOIN_TEXT_BYTES], list[128] = "";
    size_t used = 0;
    for (int i = 1; i < s->world && used + 16 < sizeof list; i++)
        if (s->ranks[i].fd < 0)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", used ? ", " : "", i);
    snprintf(text, sizeof text, "%d of %d ranks have not joined in time: rank %s%s",
             s->world - 1 - s->joined, s->world, list, used + 16 < sizeof list ? "" : " ...");
    for (int i = 1; i < s->world; i++)
        if (s->ranks[i].fd >= 0) refuse(s, &s->ranks[i], text);
    ml_fail(ML_DEVICE, "%s (rank 0 waited at %s:%d; %d connections were refused)", text, where(s),
            s->port, s->refused);
    return s->job->launch->options.bind || s->job->launch->several
               ? ML_DEVICE
               : ml_help("for ranks on other hosts set MLUA_BIND=0.0.0.0, or to the address of "
                         "the network that they come from");
}

static ml_status ports_taken(const server *s) {
    const join_job *job = s->job;
    char holder[128];
    join_port_holder(job->port, holder, sizeof holder);
    if (job->ports == 1) {
        ml_fail(ML_IO, "rank 0 cannot listen at %s:%d: %s has this port", where(s), job->port,
                holder);
        return ml_help("end it, or set MASTER_PORT to another port for all ranks");
    }
    ml_fail(ML_IO, "rank 0 cannot listen at %s: ports %d to %d are taken, the first by %s",
            where(s), job->port, s->port, holder);
    return ml_help("set MASTER_PORT to a free port for all ranks");
}

/* Where neither user nor launcher chose the port, rank 0 takes the first free one of those that all
 * ranks try. */
static ml_status open_port(server *s) {
    const join_job *job = s->job;
    char holder[128];
    for (int i = 0; i < job->ports && s->listener < 0; i++) {
        s->port = job->port + i;
        s->listener = join_address(where(s), s->port, true, 0);
        if (s->listener < 0 && errno != EADDRINUSE)
            return ml_fail(ML_IO, "rank 0 cannot listen at %s:%d: %s", where(s), s->port,
                           strerror(errno));
    }
    if (s->listener < 0) return ports_taken(s);
    if (s->port == job->port) return ML_OK;
    join_port_holder(job->port, holder, sizeof holder);
    fprintf(stderr, "mlua: %s has port %d: rank 0 waits at port %d\n", holder, job->port, s->port);
    return ML_OK;
}

static ml_status serve(ml_comm *comm, server *s) {
    ML_TRY(open_port(s));
    while (s->joined < s->world - 1) {
        if (ml_clock_now() > s->job->deadline) return too_late(s);
        serve_once(s);
    }
    join_close(&s->listener); /* no other rank is expected */
    return finish(comm, s);
}

ml_status join_serve(ml_comm *comm, const join_job *job) {
    int world = job->launch->world;
    server *s = ml_alloc(sizeof *s);
    guest *ranks = ml_alloc((size_t)world * sizeof *ranks);
    struct pollfd *polled = ml_alloc((size_t)(1 + PENDING + world) * sizeof *polled);
    ml_status status = ML_NO_MEMORY;
    if (s && ranks && polled) {
        *s = (server){.job = job, .listener = -1, .world = world, .ranks = ranks, .polled = polled};
        for (int i = 0; i < PENDING; i++) s->pending[i].fd = -1;
        for (int i = 0; i < world; i++) ranks[i].fd = -1;
        status = serve(comm, s);
        join_close(&s->listener);
        for (int i = 0; i < PENDING; i++) join_close(&s->pending[i].fd);
        for (int i = 0; i < world; i++) join_close(&ranks[i].fd);
    } else {
        ml_fail(ML_NO_MEMORY, "no memory to wait for %d ranks", world);
    }
    ml_free(polled);
    ml_free(ranks);
    ml_free(s);
    return status;
}
