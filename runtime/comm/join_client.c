/* The other ranks' side of the rendezvous. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/wire_internal.h"

static const double CONNECT_SECONDS = 1, PROOF_SECONDS = 5, LAST_WORD_SECONDS = 5;

typedef struct {
    const join_job *job;
    join_hello hello;
    uint8_t nonce[DIGEST_BYTES]; /* of rank 0 */
    join_welcome welcome;
    bool met_stranger; /* something answered, but not with the secret */
} visit;

static double sooner(double a, double b) {
    return a < b ? a : b;
}

/* Handshake on a connected socket, up to the welcome. False: this is not rank 0, or it has ended.
 */
static bool shake_hands(visit *v, int fd) {
    join_challenge challenge;
    join_answer answer;
    uint8_t proof[DIGEST_BYTES];
    double deadline = sooner(ml_clock_now() + PROOF_SECONDS, v->job->deadline);
    join_random(v->hello.nonce, sizeof v->hello.nonce);
    if (!join_write(fd, &v->hello, sizeof v->hello, deadline) ||
        !join_read(fd, &challenge, sizeof challenge, deadline))
        return false;
    memcpy(v->nonce, challenge.nonce, sizeof v->nonce);
    join_prove_server(v->job, &v->hello, v->nonce, proof);
    if (!digest_equal(proof, challenge.proof, sizeof proof)) {
        v->met_stranger = true;
        return false;
    }
    join_who_fill(v->job->launch, &answer.who);
    join_prove_client(v->job, &v->hello, v->nonce, &answer.who, answer.proof);
    if (!join_write(fd, &answer, sizeof answer, deadline) ||
        !join_read(fd, &v->welcome, sizeof v->welcome, v->job->deadline + LAST_WORD_SECONDS))
        return false;
    join_prove_welcome(v->job, &v->hello, v->nonce, &v->welcome, proof);
    v->welcome.text[sizeof v->welcome.text - 1] = 0;
    v->welcome.who.host[sizeof v->welcome.who.host - 1] = 0;
    return digest_equal(proof, v->welcome.proof, sizeof proof);
}

/* Rank 0 may be near (it listens on loopback by default), or at the job's address, at
 * one of several ports. A socket that has been welcomed, or -1. */
static int try_all(visit *v) {
    const char *hosts[] = {"127.0.0.1", v->job->host};
    int count = strcmp(hosts[0], hosts[1]) == 0 ? 1 : 2;
    for (int host = 0; host < count; host++)
        for (int i = 0; i < v->job->ports; i++) {
            double deadline = sooner(ml_clock_now() + CONNECT_SECONDS, v->job->deadline);
            int fd = join_address(hosts[host], v->job->port + i, false, deadline);
            if (fd < 0) continue;
            if (shake_hands(v, fd)) return fd;
            join_close(&fd);
        }
    return -1;
}

static int receive_descriptor(int socket) {
    char byte;
    struct iovec part = {&byte, 1};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    int fd = -1;
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1) return -1;
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
        c->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(&fd, CMSG_DATA(c), sizeof fd);
    return fd;
}

static ml_status fetch_segment(ml_comm *comm, visit *v) {
    join_request request = {.rank = (uint32_t)comm->rank};
    memcpy(request.ticket, v->welcome.ticket, sizeof request.ticket);
    int socket = join_local(v->welcome.name, false);
    if (socket >= 0 &&
        join_write(socket, &request, sizeof request, ml_clock_now() + PROOF_SECONDS) &&
        join_wait(socket, POLLIN, ml_clock_now() + PROOF_SECONDS))
        comm->fd = receive_descriptor(socket);
    join_close(&socket);
    if (comm->fd >= 0) return ML_OK;
    return ml_fail(ML_DEVICE, "rank %d cannot fetch the shared memory from rank 0: %s", comm->rank,
                   strerror(errno));
}

static ml_status keep_wire(ml_comm *comm, visit *v, int *fd) {
    comm->wire = wire_new(1);
    if (!comm->wire) return ml_fail(ML_NO_MEMORY, "no memory for a connection");
    join_no_delay(*fd);
    wire_end *end = &comm->wire->ends[0];
    end->fd = *fd;
    end->who = v->welcome.who;
    join_key(v->job, "to rank 0", &v->hello, v->nonce, end->out.key);
    join_key(v->job, "from rank 0", &v->hello, v->nonce, end->in.key);
    *fd = -1;
    return ML_OK;
}

static ml_status follow(ml_comm *comm, visit *v, int *fd) {
    switch (v->welcome.verdict) {
    case JOIN_SHARED: return fetch_segment(comm, v);
    case JOIN_HOSTS: return keep_wire(comm, v, fd);
    default:
        return ml_fail(ML_DEVICE, "rank 0 does not let rank %d join: %s", comm->rank,
                       v->welcome.text);
    }
}

ml_status join_enter(ml_comm *comm, const join_job *job) {
    visit v = {.job = job};
    memcpy(v.hello.magic, JOIN_MAGIC, sizeof v.hello.magic);
    v.hello.rank = (uint32_t)job->launch->rank;
    v.hello.world = (uint32_t)job->launch->world;
    while (ml_clock_now() < job->deadline) {
        int fd = try_all(&v);
        if (fd < 0) {
            usleep(50000);
            continue;
        }
        ml_status status = follow(comm, &v, &fd);
        join_close(&fd);
        return status;
    }
    char last[16] = "";
    if (job->ports > 1) snprintf(last, sizeof last, " to %d", job->port + job->ports - 1);
    ml_fail(ML_DEVICE, "rank %d finds no rank 0 of its job at %s, port%s %d%s", comm->rank,
            job->host, *last ? "s" : "", job->port, last);
    return v.met_stranger
               ? ml_help("something there does not know this job's secret: MLUA_SECRET, or the "
                         "file in ~/.config/mlua, must be the same for all ranks")
               : ml_help("is rank 0 running? On another host it needs MLUA_BIND=0.0.0.0, or the "
                         "address that others reach it at");
}
