/* How ranks that no launcher of ours started find each other: the others connect to rank 0 by TCP,
 * both sides prove that they know the job's secret, and rank 0 hands out the shared memory segment
 * over a Unix socket where all ranks are on one host. Ranks on several hosts keep the connections.
 *
 * The handshake, messages of fixed size:
 *     rank -> 0   hello      rank, world, nonce
 *     0 -> rank   challenge  nonce, proof = HMAC(key, "server" hello nonce)
 *     rank -> 0   answer     who it is, proof = HMAC(key, "client" hello challenge's nonce, who)
 *     0 -> rank   welcome    once all are there: what to do, proof = HMAC(key, "welcome" ...)
 * The key is HMAC(secret, job). Nonces are fresh on both sides, so nothing that was recorded
 * is of use; a rank says nothing of itself before rank 0 has proved itself. Rank 0 holds a bounded
 * number of unproved connections, each for a short time, and never waits for a single one. What
 * follows on a connection that stays open bears proofs too (wire_internal.h). */
#ifndef COMM_JOIN_INTERNAL_H
#define COMM_JOIN_INTERNAL_H

#include "runtime/comm/comm_internal.h"
#include "runtime/comm/digest.h"

enum {
    JOIN_PORTS = 8, /* tried from the job's port on, where no one chose it: some may be taken */
    JOIN_NAME_BYTES = 32,
    JOIN_TEXT_BYTES = 256,
};

typedef struct {
    char magic[8];
    uint32_t rank, world;
    uint8_t nonce[DIGEST_BYTES];
} join_hello;
typedef struct {
    uint8_t nonce[DIGEST_BYTES], proof[DIGEST_BYTES];
} join_challenge;
typedef struct {
    /* The kernel's boot id, and which one of MLUA_HOSTS hosts this rank takes itself for; the
     * host's name. */
    char boot[40], host[64];
    uint32_t pid, unused;
} join_who;
typedef struct {
    join_who who;
    uint8_t proof[DIGEST_BYTES];
} join_answer;
typedef enum { JOIN_REFUSED, JOIN_SHARED, JOIN_HOSTS } join_verdict;
typedef struct {
    uint32_t verdict, unused;
    join_who who;
    char name[JOIN_NAME_BYTES];   /* of the Unix socket, in the abstract namespace */
    uint8_t ticket[DIGEST_BYTES]; /* to show there */
    char text[JOIN_TEXT_BYTES];   /* why it is refused */
    uint8_t proof[DIGEST_BYTES];
} join_welcome;

/* What both sides know. */
typedef struct {
    const ml_launch *launch;
    uint8_t key[DIGEST_BYTES];
    char host[256];
    int port, ports; /* the first, and how many from there on rank 0 may be at */
    double deadline; /* of ml_clock_now */
} join_job;

/* secret.c */
ml_status comm_secret(const ml_launch *launch, char secret[65 + 256]);
/* join_proof.c, socket.c, join.c */
extern const char JOIN_MAGIC[8];
extern const char *join_boot; /* for tests, in place of the kernel's boot id: as on other hosts */
void join_random(void *bytes, size_t size);
void join_random_hex(char *text, size_t digits); /* and a 0 after them */
void join_who_fill(const ml_launch *launch, join_who *who);
uint64_t join_host(const ml_launch *launch); /* of this process, as ml_comm_host */
void join_prove_server(const join_job *job, const join_hello *hello,
                       const uint8_t nonce[DIGEST_BYTES], uint8_t proof[DIGEST_BYTES]);
void join_prove_client(const join_job *job, const join_hello *hello,
                       const uint8_t nonce[DIGEST_BYTES], const join_who *who,
                       uint8_t proof[DIGEST_BYTES]);
void join_prove_welcome(const join_job *job, const join_hello *hello,
                        const uint8_t nonce[DIGEST_BYTES], const join_welcome *welcome,
                        uint8_t proof[DIGEST_BYTES]);
/* Of one direction of this connection, once both sides have proved themselves: "from rank 0" or
 * "to rank 0". It follows from the secret and both nonces, and is never sent. */
void join_key(const join_job *job, const char *direction, const join_hello *hello,
              const uint8_t nonce[DIGEST_BYTES], uint8_t key[DIGEST_BYTES]);
/* Exactly `size` bytes before the deadline; false: an error, the end, or too late. */
bool join_read(int fd, void *bytes, size_t size, double deadline);
bool join_write(int fd, const void *bytes, size_t size, double deadline);
bool join_wait(int fd, short events, double deadline);
void join_close(int *fd);
void join_no_delay(int fd);
int join_address(const char *host, int port, bool listening, double deadline); /* a socket; -1 */
/* Who has this TCP port on this host: "python3 (pid 77)", "user 1001", or "another program". */
void join_port_holder(int port, char *text, size_t size);
/* The Unix socket of this name, in the abstract namespace: listening, or connected; -1. */
int join_local(const char name[JOIN_NAME_BYTES], bool listening);
/* Find the others: a segment's descriptor in comm->fd, or comm->wire. */
ml_status comm_join(ml_comm *comm, const ml_launch *launch);
/* join_server.c, join_client.c */
typedef struct { /* what a rank shows at the Unix socket to get the segment */
    uint8_t ticket[DIGEST_BYTES];
    uint32_t rank, unused;
} join_request;
ml_status join_serve(ml_comm *comm, const join_job *job);
ml_status join_enter(ml_comm *comm, const join_job *job);

#endif
