/* Collectives between ranks, and what keeps a job of several processes together.
 *
 * A communicator joins all ranks of a job; groups are the ranks that differ only along one mesh
 * axis. Every rank calls the same collectives in the same order. Buffers are contiguous.
 * Between CPU ranks of one host: a shared memory segment and sleeping waits (futex), so that 8
 * ranks make progress on 2 cores. Sums are in a fixed order (by rank), so results do not depend on
 * timing and are the same on every rank, to the bit. A wait longer than the timeout, or a rank that
 * died, fails with ML_DEVICE naming the rank, what it was last seen doing, and the collective with
 * its Lua line; every other rank then fails too. */
#ifndef ML_COMM_H
#define ML_COMM_H

#include "runtime/graph/graph.h"

typedef struct ml_comm ml_comm;
typedef struct ml_group ml_group; /* of one mesh axis */

/* How this process was started: by `mlua run -n`, Slurm, torchrun-style or Open MPI variables. */
typedef struct {
    int rank, world, local_rank;
    char address[256]; /* of rank 0's rendezvous: host:port, or the name of the local segment */
    char secret[65];   /* hex; "" where the launcher gave none */
    char source[32];   /* "mlua run -n", "Slurm", ... */
} ml_launch;
bool ml_launch_detect(ml_launch *launch); /* false: one process */
/* Start `ranks` copies of this program (argv) on this host, pass on their output (rank 0's as it
 * is; others' stderr with "[rank N]"), wait, clean up whatever dies. The value is the exit code. */
int ml_launch_local(int ranks, char **argv);

ml_status ml_comm_open(const ml_launch *launch, ml_comm **comm);
void ml_comm_close(ml_comm *comm);
int ml_comm_rank(const ml_comm *comm);
int ml_comm_world(const ml_comm *comm);
/* ranks[0..count) in order; collective over all ranks of the job, each for its own group. */
ml_status ml_comm_group(ml_comm *comm, const int *ranks, int count, ml_group **group);
/* What this rank is doing, for other ranks' messages: "step 12, all-gather of blocks.3 gpt.lua:41".
 */
void ml_comm_note(ml_comm *comm, const char *text);

typedef enum { ML_REDUCE_SUM, ML_REDUCE_MAX, ML_REDUCE_MIN } ml_reduce_op;
/* count elements of dtype on each rank; in and out may be the same memory for all_reduce. */
ml_status ml_comm_all_reduce(ml_group *g, const void *in, void *out, int64_t count, ml_dtype dtype,
                             ml_reduce_op op);
ml_status ml_comm_all_gather(ml_group *g, const void *in, void *out, int64_t count,
                             ml_dtype dtype); /* out: size * count, by rank */
ml_status ml_comm_reduce_scatter(ml_group *g, const void *in, void *out, int64_t count,
                                 ml_dtype dtype, ml_reduce_op op); /* in: size * count */
ml_status ml_comm_all_to_all(ml_group *g, const void *in, void *out, int64_t count,
                             ml_dtype dtype); /* count for each peer */
ml_status ml_comm_shift(ml_group *g, const void *in, void *out, int64_t count,
                        ml_dtype dtype); /* to the next rank of the ring, from the one before */
ml_status ml_comm_barrier(ml_comm *comm);
/* Fails with ML_INVALID, naming a rank that differs and `what`, unless every rank has this value.
 */
ml_status ml_comm_agree(ml_comm *comm, uint64_t value, const char *what);

#endif
