/* Collectives between ranks, and the life of a job of several processes.
 *
 * A communicator joins all ranks of a job; groups are the ranks that differ only along one mesh
 * axis. Every rank calls the same collectives in the same order; collectives of different groups
 * may come from different threads, those of one group from one thread at a time. Buffers are
 * contiguous. Between CPU ranks of one host: a shared memory segment (a memfd: it has no name and
 * ends with the last process) and sleeping waits (futex), so that 8 ranks make progress on 2 cores.
 * Sums are in a fixed order (by rank), so results do not depend on timing and are the same on every
 * rank, to the bit; bf16 is added up in f32. MAX and MIN give NaN where any rank has one; a SUM of
 * booleans is "any". A wait longer than the timeout, or a rank that died, fails with ML_DEVICE
 * naming the rank, what it was last seen doing, and the collective that waits for it; every other
 * rank then fails too, and ends with ML_EXIT_PEER. A collective that ranks call with different
 * sizes, dtypes or kinds fails with ML_INVALID on every rank.
 * Once a communicator has failed, all that follows on it fails in the same way at once. */
#ifndef ML_COMM_H
#define ML_COMM_H

#include "runtime/graph/collectives.h"

typedef struct ml_comm ml_comm;
typedef struct ml_group ml_group;     /* of one mesh axis */
typedef struct ml_channel ml_channel; /* from one rank to another, one way */

/* What the user asks of jobs of several ranks (base/knobs.h): read once, with the launch. */
typedef struct {
    int hosts;          /* the ranks of this host take themselves for those of so many */
    int timeout;        /* seconds until a silent rank is given up; 0: as in watch.c */
    const char *bind;   /* where rank 0's rendezvous listens; NULL: this host, or all where the
                           ranks are on several */
    const char *secret; /* what ranks prove to one another that they know; NULL: a file's */
} ml_comm_options;

/* How this process was started: by `mlua run -n`, Slurm, torchrun-style or Open MPI variables. */
typedef struct {
    int rank, world, local_rank; /* local: among those of this host */
    char address[256]; /* of rank 0's rendezvous: host:port, or fd:N, the inherited segment */
    char secret[65];   /* hex; "" where the launcher gave none: see MLUA_SECRET */
    char job[128];     /* distinguishes this job's rendezvous from others' of the same user */
    char source[32];   /* "mlua run -n", "Slurm", ... */
    char wrong[80];    /* a variable that is not a number, as NAME=text; "" where all are */
    bool several;      /* the launcher says that the ranks are on several hosts */
    bool fixed_port;   /* the user or the launcher chose the address's port: no other will do */
    bool threads;      /* the ranks are threads of one process */
    ml_comm_options options;
} ml_launch;
/* false: one process. Call it once, early and before threads: it takes what `mlua run -n` left in
 * the environment out of it, so that programs that a rank starts are not taken for ranks. */
bool ml_launch_detect(ml_launch *launch);
/* Start `ranks` copies of this program (argv) on this host, pass on their output (rank 0's as it
 * is; others' stderr with "[rank N]"), wait, clean up whatever dies. The value is the exit code. */
int ml_launch_local(int ranks, const ml_comm_options *options, char **argv);

/* How a rank ends that a signal stopped and whose run is saved: as sysexits.h's EX_TEMPFAIL, which
 * schedulers take for "start it again"; one that stopped only because another one failed; and the
 * first rank whose script ended, but whose run's end could not be saved: EX_CANTCREAT. */
enum { ML_EXIT_UNSAVED = 73, ML_EXIT_REQUEUE = 75, ML_EXIT_PEER = 76 };

/* Returns once all ranks are there. A launch of one rank needs nothing and never waits. */
ml_status ml_comm_open(const ml_launch *launch, ml_comm **comm);
/* This rank is done: others that still wait for it fail. NULL is allowed. */
void ml_comm_close(ml_comm *comm);
/* This rank cannot continue because of `text`: informs the others, unless another rank failed
 * before. Whether this rank should report it to the user (print the error): once for each failure,
 * never where the launcher reports it. */
bool ml_comm_fail(ml_comm *comm, const char *text);
/* Whether rank 0 is at work: it has not ended, and waits for no rank. */
bool ml_comm_first_works(const ml_comm *comm);
/* ML_OK, or the failure of another rank: for waits that are not this module's. */
ml_status ml_comm_check(ml_comm *comm);
/* Whether this process must end with ML_EXIT_PEER: another rank failed first. */
bool ml_comm_peer_failed(void);
/* For waits that are not this module's (for a GPU): call it several times a second meanwhile with
 * the seconds since the last call, 0 at first, and ml_comm_waited at the end. Fails once another
 * rank has failed; accuses a rank for which the others wait, as collectives do. */
ml_status ml_comm_waiting(ml_comm *comm, double seconds);
void ml_comm_waited(ml_comm *comm);
int ml_comm_rank(const ml_comm *comm);
int ml_comm_local_rank(const ml_comm *comm);
int ml_comm_world(const ml_comm *comm);
bool ml_comm_local(const ml_comm *comm);     /* all ranks are of this host, and share memory */
int ml_comm_host_ranks(const ml_comm *comm); /* of this host */
uint64_t ml_comm_host(const ml_comm *comm);  /* the same on all ranks of a host, and on no others */
/* ranks[0..count) in order; collective over all ranks of the job, each for its own group.
 * The same ranks again give the same group. Groups live as long as the communicator. */
ml_status ml_comm_group(ml_comm *comm, const int *ranks, int count, ml_group **group);
ml_group *ml_comm_everyone(ml_comm *comm); /* the group of all ranks */
int ml_group_size(const ml_group *group);
int ml_group_rank(const ml_group *group); /* this rank's place in it */
/* What this rank is doing, for other ranks' messages: "step 12, all-gather of blocks.3 gpt.lua:41".
 */
void ml_comm_note(ml_comm *comm, const char *text);
/* The same for work that may take minutes (compilers, files): until its next note the others wait
 * longer for this rank. */
void ml_comm_busy(ml_comm *comm, const char *text);
void ml_comm_done(ml_comm *comm); /* with that: the script continues */
/* A sign of progress, as a note is. A rank that lives, shows none and is not busy is given up after
 * 24 s, or later: */
void ml_comm_progress(ml_comm *comm);
/* ... before two steps were run, after the longest that any rank may need between two signs, */
void ml_comm_expect(ml_comm *comm, double seconds);
/* and then after three median steps. A training step ends. */
void ml_comm_step(ml_comm *comm);

/* A collective of the table collectives.def (which says what each does), SEND aside: `count`
 * elements of dtype in this rank's operand, or in its result where that is SCATTERED. `combine`
 * matters to those that combine. in and out may be the same memory for ALL_REDUCE. */
ml_status ml_comm_collect(ml_group *g, ml_collective kind, const void *in, void *out, int64_t count,
                          ml_dtype dtype, ml_combine combine);
/* The median time of all-reduces of `count` f32 among 2 to 8 ranks of this host, started for it. */
ml_status ml_comm_measure_sum(int ranks, int64_t count, double *seconds);
/* The mean time in such ranks between the end of work that takes a core `work_seconds` and the end
 * of an all-reduce of a few bytes behind it: they wait for the one that was last. */
ml_status ml_comm_measure_wait(int ranks, double work_seconds, double *seconds);
/* A one-way channel between two ranks of the job. Collective over all ranks, which all name the
 * same channels in the same order; *channel is NULL on ranks that are neither end. The same pair
 * and tag again give the same channel, with more room where that is asked for; then nothing may be
 * under way. Channels live as long as the communicator. */
ml_status ml_comm_channel(ml_comm *comm, int from, int to, int tag, int64_t room,
                          ml_channel **channel);
int ml_channel_from(const ml_channel *channel);
int ml_channel_to(const ml_channel *channel);
/* Host memory. send returns once the whole message has found room: while no more than `room` bytes
 * and 256 messages are under way. One that is larger than the room waits until the other end has
 * begun to receive it. receive returns once the message is there; one of another size than expected
 * fails with ML_INVALID. From the same thread as collectives. */
ml_status ml_channel_send(ml_channel *channel, const void *memory, int64_t bytes);
ml_status ml_channel_receive(ml_channel *channel, void *memory, int64_t bytes);
ml_status ml_comm_barrier(ml_comm *comm);
/* Fails with ML_INVALID, naming a rank that differs and `what`, unless every rank has this value.
 */
ml_status ml_comm_agree(ml_comm *comm, uint64_t value, const char *what);
/* *value becomes the smallest of all ranks; works between hosts too. */
ml_status ml_comm_least(ml_comm *comm, int64_t *value);
/* All ranks at once: `words` 64-bit words of this rank to rank `other`, and that one's here; other
 * is -1 for a rank that takes no part, and theirs becomes 0. Works between hosts too. */
ml_status ml_comm_swap(ml_comm *comm, int other, const void *mine, void *theirs, int words);
/* This rank uses nothing of the others' any more: waits a moment until all others have said so too,
 * have ended or have failed. Nothing fails by it. */
void ml_comm_part(ml_comm *comm);
/* `size` bytes of rank 0 to all ranks; works between hosts too. */
ml_status ml_comm_share(ml_comm *comm, void *bytes, size_t size);

#endif
