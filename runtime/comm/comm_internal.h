/* What the files of comm share: the segment that all ranks of a host map, and what each rank
 * stores.
 *
 * The segment is a header with one record a rank, then MOST_GROUPS areas, one a group index; an
 * area holds one slot for each rank of the job: words to meet at, and a staging buffer. Groups of
 * one index are disjoint, so a slot belongs to one group. The file is sparse: what no group touches
 * takes no memory. Rings of channels (channel.c) come after that, as they are created: the file
 * grows.
 *
 * Meeting. A collective is a row of steps. In a step every member fills the staging buffer of that
 * step's parity, posts, and arrives at the leader's word (the group's first rank); the last one to
 * arrive starts the next step and wakes the others. Having passed step s, a member knows that all
 * have read what they wanted of step s - 1, so two buffers suffice and one meeting a chunk does. */
#ifndef ML_COMM_INTERNAL_H
#define ML_COMM_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "runtime/comm/comm.h"

enum {
    COMM_NOTE_BYTES = 256,
    COMM_FAILURE_BYTES = 2048,
    COMM_MOST_GROUPS = 64,
    COMM_MOST_RANKS = 4096,
    COMM_LINE = 64,      /* of a cache */
    COMM_CONTROL = 4096, /* bytes before a slot's buffers, or a ring */
    COMM_CHANNEL_BUCKETS = 256,
    COMM_STEP_TIMES = 15, /* of which the median is taken */
};

typedef enum { COMM_STARTING, COMM_RUNNING, COMM_DONE, COMM_DEAD } comm_state;

typedef struct {
    _Alignas(COMM_LINE) _Atomic uint32_t state;
    _Atomic int32_t pid;
    _Atomic uint32_t beats;        /* of its watcher thread */
    _Atomic uint32_t progress;     /* signs of it, counted: notes, meetings, commands */
    _Atomic uint32_t busy;         /* with something that may take minutes */
    _Atomic uint32_t parted;       /* calls of ml_comm_part */
    _Atomic uint64_t waiting;      /* the collective it waits in (comm_describe); 0: none */
    _Atomic uint32_t note_version; /* odd while the note is being written */
    char note[COMM_NOTE_BYTES];
} comm_record;

typedef struct {
    uint64_t magic;
    uint64_t bytes, slot_bytes, chunk_bytes;
    int32_t world;
    /* The first failure: claimed by the rank that sets `failed` (1 + the rank at fault), readable
     * once `failure_ready`. */
    _Atomic uint32_t failed, failure_ready;
    /* Who reports to the user: the launcher, where there is one; else the first rank that asks. */
    _Atomic uint32_t launched, reported, failure_own;
    char failure[COMM_FAILURE_BYTES];
    comm_record ranks[];
} comm_segment;

typedef struct {
    _Alignas(COMM_LINE) _Atomic uint32_t step; /* the leader's counts: all members are past it */
    _Atomic uint32_t arrived, sleepers;
    _Alignas(COMM_LINE) _Atomic uint32_t posted; /* steps that this member has reached */
    _Atomic uint64_t what[2];                    /* the collective of its step, by parity */
    _Alignas(COMM_LINE) uint64_t word[2];        /* a small value, by parity */
} comm_slot;

struct ml_group {
    ml_comm *comm;
    int index, size, rank, spins;
    uint32_t step;
    uint64_t what;
    const void **sources; /* [size] room for pointers into the members' buffers */
    int ranks[];
};

typedef struct comm_wire comm_wire; /* connections between hosts: wire_internal.h */

struct ml_comm {
    int rank, world, local_rank, fd;
    int timeout;  /* of ml_comm_options */
    bool threads; /* of ml_launch */
    uint64_t host;
    int host_ranks;
    comm_segment *segment; /* NULL for a job of one */
    size_t mapped;
    comm_wire *wire; /* where the ranks are on several hosts; then the segment is this rank's own */
    ml_group *groups[COMM_MOST_GROUPS];
    int group_count, spins; /* at most, before a wait sleeps */
    ml_channel *channels[COMM_CHANNEL_BUCKETS];
    uint64_t channels_end; /* of the segment's file; 0: there are no channels yet */
    pthread_t watcher;
    bool watched;
    pthread_mutex_t lock;
    pthread_cond_t stop;
    bool stopping;
    double step_began, step_times[COMM_STEP_TIMES];
    int steps;
    double expected;           /* seconds without a sign of progress before steps were timed */
    uint64_t outside_progress; /* of all ranks, when ml_comm_waiting last saw some */
    double outside_seconds;    /* since then */
};

/* segment.c */
int comm_segment_new(int world); /* a descriptor; -1 with an error stored */
ml_status comm_segment_map(int fd, comm_segment **segment, size_t *bytes);
comm_segment *comm_segment_alone(int world, size_t *bytes); /* of this process; NULL: no memory */
void comm_note_read(comm_record *record, char note[COMM_NOTE_BYTES]);
/* The first failure of the job: rank `rank` is at fault. False where there was one before. */
bool comm_failure_set(comm_segment *segment, int rank, const char *text);
/* Whether this process is the one that reports another rank's failure to the user. */
bool comm_may_report(comm_segment *segment);
/* The rank at fault, or -1; with its text once it is ready. */
int comm_failure_get(comm_segment *segment, char text[COMM_FAILURE_BYTES]);
/* "rank 3 (pid 77) WHY; it was last seen in: NOTE; rank 0 waits for it in ...": set as failure. */
bool comm_accuse(comm_segment *segment, int rank, const char *why);
static inline comm_slot *comm_slot_of(comm_segment *segment, int index, int rank) {
    char *areas = (char *)segment + segment->bytes -
                  (size_t)COMM_MOST_GROUPS * (size_t)segment->world * segment->slot_bytes;
    size_t place = (size_t)index * (size_t)segment->world + (size_t)rank;
    return (comm_slot *)(areas + place * segment->slot_bytes);
}
/* Buffers of a slot: the operand, and slices of the result (half a chunk). */
static inline char *comm_buffer(comm_segment *segment, comm_slot *slot, uint32_t step) {
    return (char *)slot + COMM_CONTROL + (step & 1) * segment->chunk_bytes;
}
static inline char *comm_result(comm_segment *segment, comm_slot *slot, uint32_t step) {
    return (char *)slot + COMM_CONTROL + 2 * segment->chunk_bytes +
           (step & 1) * (segment->chunk_bytes / 2);
}

/* What a rank knows of all ranks whose records reach it. */
typedef struct {
    uint64_t progress;
    bool busy, ended, all_wait; /* any, any, all */
} comm_survey;

/* describe.c, meet.c */
typedef enum {
    COMM_NOTHING,
    COMM_COLLECTIVES, /* a collective is this kind + its ml_collective */
    COMM_BARRIER = COMM_COLLECTIVES + ML_COLLECTIVE_KINDS,
    COMM_WORDS,
    COMM_SHARE,
    COMM_OUTSIDE, /* a wait that is not comm's */
    COMM_SEND,
    COMM_RECEIVE,
} comm_kind;
comm_survey comm_look(const ml_comm *comm);
uint64_t comm_describe(comm_kind kind, ml_combine combine, ml_dtype dtype, int64_t count);
uint64_t comm_describe_message(comm_kind kind, int other, int tag, int64_t bytes);
int comm_described_rank(uint64_t what); /* the other end of a message; -1: it is a collective */
void comm_describe_text(uint64_t what, char *text, size_t size);
ml_status comm_begin(ml_group *g, uint64_t what); /* checks for failures */
/* A wait until *word is no longer `value`: spins, then sleep. `missing` names the rank that
 * is waited for, -1 where none is any more. */
typedef struct {
    _Atomic uint32_t *word, *sleepers;
    uint32_t value;
    uint64_t what; /* of this rank, for the others' messages */
    int (*missing)(const void *argument);
    const void *argument;
} comm_wait;
/* `spins`: how often to look before sleeping, which changes with success (meet.c). */
ml_status comm_sleep(ml_comm *comm, const comm_wait *wait, int *spins);
void comm_wake(_Atomic uint32_t *word, _Atomic uint32_t *sleepers); /* after *word was changed */
/* Post this member's step and wait for the others'. */
ml_status comm_meet(ml_group *g);
ml_status comm_first_meet(ml_group *g); /* and compare what each one means to do */
/* One word of each member, in the group's order. */
ml_status comm_words(ml_group *g, uint64_t mine, uint64_t *words);
/* Store the job's failure as this thread's error; ML_OK where there is none. */
ml_status comm_failure_report(ml_comm *comm);

/* reduce.c: out[i] = sources[0][from + i] op sources[1][from + i] ..., in this order; out may be
 * one of the sources' elements themselves. */
void comm_reduce(ml_dtype dtype, ml_combine combine, const void *const *sources, int count,
                 int64_t from, int64_t elements, void *out);

/* channel.c */
void comm_channels_free(ml_comm *comm);

/* watch.c, limits.c */
ml_status comm_watch_start(ml_comm *comm);
void comm_watch_stop(ml_comm *comm);
/* Seconds, by ml_comm_options.timeout: without a heartbeat, after which a rank has stopped; in
 * which a rank must open its communicator. */
double comm_stale_limit(int timeout);
double comm_start_limit(int timeout);
/* Seconds that a living rank may be waited for that shows no progress. */
double comm_late_limit(const ml_comm *comm, bool busy);
/* The same for one that itself waits, while no rank shows any: the rank for which it waits is found
 * first. */
double comm_late_waiting(double limit);
/* Seconds more where only rank 0 is connected to the others: it reports first which rank it is. */
enum { COMM_HEARD = 3 };

#endif
