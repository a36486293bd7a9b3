/* Connections between ranks on several hosts: what they agree on before and besides NCCL. A star
 * around rank 0; small messages only.
 *
 * Every message is authenticated (seal.h): an attacker between the hosts can read it, delay it or
 * cut the connection, but not change, repeat, omit, reorder or add one; the first that does not
 * prove itself ends the job, which names the rank at the other end. Nothing is encrypted. NCCL's
 * own connections, over which tensors pass, are NCCL's: neither authenticated nor encrypted. */
#ifndef COMM_WIRE_INTERNAL_H
#define COMM_WIRE_INTERNAL_H

#include "runtime/comm/join_internal.h"
#include "runtime/comm/seal.h"

typedef struct {
    int fd, unread; /* bytes in the socket's buffer at the last look */
    double silent;  /* seconds without anything new, beats included */
    join_who who;   /* at the other end */
    seal in, out;
    bool distrusted; /* something came that is not authentic: nothing more is read */
} wire_end;

struct comm_wire {
    int count;      /* of connections: world for rank 0, else 1 */
    int other_rank; /* on another host */
    wire_end *ends; /* [count] by rank (rank 0's own has no descriptor), or the one to rank 0 */
    int ticks;      /* of the watcher, since the last beat */
    uint32_t sequence;
    uint64_t progress; /* when the last beat was sent */
    bool failure_sent; /* to the other end, or ends */
    pthread_mutex_t lock;
};

comm_wire *wire_new(int count); /* NULL: no memory */
void wire_free(ml_comm *comm);  /* says farewell */
/* One word of each rank, in order. */
ml_status wire_words(ml_comm *comm, uint64_t mine, uint64_t *words);
/* Bytes of rank 0 to all. */
ml_status wire_share(ml_comm *comm, void *bytes, size_t size);
ml_status wire_swap(ml_comm *comm, int other, const void *mine, void *theirs, size_t bytes);
/* This rank parts for the `times`th time: until all others have too, end, fail, or the deadline
 * passes. */
void wire_part(ml_comm *comm, uint32_t times, double deadline);
/* For the watcher, every `slice` seconds: beats, connections that have broken or are silent, and
 * failures that others report. */
void wire_watch(ml_comm *comm, double slice);
/* Send the failure that this process knows to the others. */
void wire_send_failure(ml_comm *comm);

#endif
