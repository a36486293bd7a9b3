/* Waiting for other ranks, the members of a group above all: spins, then sleep; and what is
 * said when one of them does not come. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/comm_internal.h"

/* A sleeper looks around this often. Waiting is counted in such slices, so that time in which this
 * process itself was stopped is not held against the others. */
static const double SLICE = 0.1;
enum { LEAST_SPINS = 16, WAITS = 64 };
#define NO_PROGRESS "shows no progress for %.0f s (MLUA_TIMEOUT=SECONDS waits longer)"

/* ---- Failures -------------------------------------------------------------------------------- */

static _Atomic bool peer_failed;

bool ml_comm_peer_failed(void) {
    return peer_failed;
}

ml_status comm_failure_report(ml_comm *comm) {
    char text[COMM_FAILURE_BYTES];
    if (!comm->segment || !atomic_load(&comm->segment->failed)) return ML_OK;
    int rank = comm_failure_get(comm->segment, text);
    if (rank != comm->rank) peer_failed = true;
    return ml_fail(ML_DEVICE, "%s", text);
}

bool ml_comm_first_works(const ml_comm *comm) {
    if (!comm->segment) return true;
    const comm_record *first = &comm->segment->ranks[0];
    return atomic_load(&first->state) == COMM_RUNNING && !atomic_load(&first->waiting);
}

ml_status ml_comm_check(ml_comm *comm) {
    return comm_failure_report(comm);
}

bool ml_comm_fail(ml_comm *comm, const char *text) {
    if (!comm || !comm->segment) return true;
    char whole[COMM_FAILURE_BYTES];
    snprintf(whole, sizeof whole, "rank %d (pid %d) failed: %s", comm->rank, (int)getpid(), text);
    if (comm_failure_set(comm->segment, comm->rank, whole))
        atomic_store(&comm->segment->failure_own, 1);
    if ((int)atomic_load(&comm->segment->failed) - 1 == comm->rank) {
        atomic_store(&comm->segment->reported, 1);
        return true;
    }
    peer_failed = true;
    return comm_may_report(comm->segment);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static inline void rest(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    struct timespec slice = {.tv_nsec = (long)(SLICE * 1e9)};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &slice, NULL, 0);
}

/* Between hosts rank 0 knows of all, the others of rank 0. */
static int known_ranks(const ml_comm *comm) {
    return comm->wire && comm->rank != 0 ? 1 : comm->world;
}

comm_survey comm_look(const ml_comm *comm) {
    comm_survey all = {.all_wait = true};
    for (int i = 0; i < known_ranks(comm); i++) {
        const comm_record *record = &comm->segment->ranks[i];
        all.progress += atomic_load(&record->progress);
        all.busy |= atomic_load(&record->busy) != 0;
        all.ended |= atomic_load(&record->state) == COMM_DONE;
        all.all_wait &= atomic_load(&record->waiting) != 0;
    }
    return all;
}

typedef struct {
    int rank; /* that is waited for; -1 at first */
    uint64_t progress;
    uint32_t beats;
    double silent;  /* seconds without a beat */
    double seconds; /* that it has shown no progress */
} patience;

/* One slice has passed: accuse a rank that ended, or that shows no progress for too long. One that
 * itself waits is spared as long as any rank progresses, or is busy. */
static void look_around(ml_comm *comm, const comm_wait *wait, patience *p, double slice) {
    comm_segment *segment = comm->segment;
    int rank = wait->missing(wait->argument);
    if (rank < 0) return;
    comm_record *record = &segment->ranks[rank];
    uint32_t state = atomic_load(&record->state);
    if (state == COMM_DONE && wait->missing(wait->argument) == rank) {
        comm_accuse(segment, rank, "has ended while others wait for it");
        return;
    }
    uint32_t beats = atomic_load(&record->beats);
    bool waits = atomic_load(&record->waiting) != 0, busy = atomic_load(&record->busy) != 0;
    comm_survey all = waits ? comm_look(comm) : (comm_survey){0};
    uint64_t progress = waits ? all.progress : atomic_load(&record->progress);
    if (rank != p->rank || progress != p->progress) *p = (patience){rank, progress, beats, 0, 0};
    p->seconds += slice;
    p->silent = beats == p->beats ? p->silent + slice : 0;
    p->beats = beats;
    double limit = state == COMM_STARTING ? comm_start_limit(comm->timeout)
                                          : comm_late_limit(comm, busy || all.busy);
    if (waits) limit = comm_late_waiting(limit);
    if (p->seconds < limit) return;
    bool silent = p->silent > p->seconds / 2;
    char why[128];
    snprintf(why, sizeof why,
             state == COMM_STARTING ? "has not joined the others for %.0f s"
             : silent               ? "has been stopped or frozen for %.0f s"
                                    : NO_PROGRESS,
             p->seconds);
    comm_accuse(segment, rank, why);
}

/* Spinning that was in vain (the others have no core to run on, or are far behind) is shortened,
 * and tried in full again after so many waits: the sleeper of a machine that is quiet again wakes
 * later than a spinner sees the others. From LEAST_SPINS down *spins counts these waits. */
static bool spin(const ml_comm *comm, const comm_wait *wait, int *spins) {
    const int now = *spins > LEAST_SPINS ? *spins : LEAST_SPINS;
    for (int i = 0; i < now; i++) {
        if (atomic_load_explicit(wait->word, memory_order_acquire) != wait->value) {
            *spins = 2 * now < comm->spins ? 2 * now : comm->spins;
            return true;
        }
        rest();
    }
    if (*spins > LEAST_SPINS)
        *spins /= 2;
    else if (--*spins <= LEAST_SPINS - WAITS)
        *spins = comm->spins;
    return false;
}

ml_status comm_sleep(ml_comm *comm, const comm_wait *wait, int *spins) {
    if (spin(comm, wait, spins)) return ML_OK;
    ml_status status = ML_OK;
    patience p = {.rank = -1};
    double last = ml_clock_now();
    comm_record *record = &comm->segment->ranks[comm->rank];
    atomic_store(&record->waiting, wait->what);
    while (atomic_load(wait->word) == wait->value) {
        atomic_fetch_add(wait->sleepers, 1);
        sleep_while(wait->word, wait->value);
        atomic_fetch_sub(wait->sleepers, 1);
        if (atomic_load(wait->word) != wait->value) break;
        double now = ml_clock_now();
        if (now - last < SLICE / 2) continue; /* a signal, or a failure of futex */
        look_around(comm, wait, &p, now - last < 2 * SLICE ? now - last : 2 * SLICE);
        last = now;
        if ((status = comm_failure_report(comm)) != ML_OK) break;
    }
    atomic_store(&record->waiting, 0);
    return status;
}

void comm_wake(_Atomic uint32_t *word, _Atomic uint32_t *sleepers) {
    if (atomic_load(sleepers)) syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* ---- Meeting --------------------------------------------------------------------------------- */

/* The first member that has not reached this step; -1 where all have. */
static int first_missing(const void *argument) {
    const ml_group *g = argument;
    for (int i = 0; i < g->size; i++) {
        comm_slot *slot = comm_slot_of(g->comm->segment, g->index, g->ranks[i]);
        if (atomic_load(&slot->posted) == g->step) return g->ranks[i];
    }
    return -1;
}

ml_status comm_meet(ml_group *g) {
    comm_segment *segment = g->comm->segment;
    comm_slot *mine = comm_slot_of(segment, g->index, g->ranks[g->rank]);
    comm_slot *leader = comm_slot_of(segment, g->index, g->ranks[0]);
    atomic_store_explicit(&mine->what[g->step & 1], g->what, memory_order_relaxed);
    atomic_store(&mine->posted, g->step + 1);
    ml_comm_progress(g->comm);
    if (atomic_fetch_add(&leader->arrived, 1) + 1 == (uint32_t)g->size) {
        atomic_store(&leader->arrived, 0);
        atomic_store(&leader->step, g->step + 1);
        comm_wake(&leader->step, &leader->sleepers);
    } else {
        comm_wait wait = {&leader->step, &leader->sleepers, g->step, g->what, first_missing, g};
        ML_TRY(comm_sleep(g->comm, &wait, &g->spins));
    }
    g->step++;
    return ML_OK;
}

/* After the first step of a collective: do all members mean the same one? */
static ml_status compare(ml_group *g) {
    comm_segment *segment = g->comm->segment;
    for (int i = 0; i < g->size; i++) {
        comm_slot *slot = comm_slot_of(segment, g->index, g->ranks[i]);
        uint64_t what = atomic_load_explicit(&slot->what[(g->step - 1) & 1], memory_order_relaxed);
        if (what == g->what) continue;
        char own[128], other[128], note[COMM_NOTE_BYTES], own_note[COMM_NOTE_BYTES];
        comm_describe_text(g->what, own, sizeof own);
        comm_describe_text(what, other, sizeof other);
        comm_note_read(&segment->ranks[g->ranks[i]], note);
        comm_note_read(&segment->ranks[g->comm->rank], own_note);
        ml_fail(ML_INVALID,
                "the ranks run different programs: rank %d is in %s (%s), rank %d in %s (%s)",
                g->comm->rank, own, own_note, g->ranks[i], other, note);
        ml_comm_fail(g->comm, ml_error_last()->text);
        return ML_INVALID;
    }
    return ML_OK;
}

ml_status comm_begin(ml_group *g, uint64_t what) {
    g->what = what;
    return atomic_load(&g->comm->segment->failed) ? comm_failure_report(g->comm) : ML_OK;
}

ml_status comm_first_meet(ml_group *g) {
    ml_status status = comm_meet(g);
    return status == ML_OK ? compare(g) : status;
}

ml_status comm_words(ml_group *g, uint64_t mine, uint64_t *words) {
    comm_segment *segment = g->comm->segment;
    ml_status status = comm_begin(g, comm_describe(COMM_WORDS, 0, 0, 0));
    if (status != ML_OK) return status;
    uint32_t parity = g->step & 1;
    comm_slot_of(segment, g->index, g->ranks[g->rank])->word[parity] = mine;
    if ((status = comm_first_meet(g)) != ML_OK) return status;
    for (int i = 0; i < g->size; i++)
        words[i] = comm_slot_of(segment, g->index, g->ranks[i])->word[parity];
    return ML_OK;
}

/* ---- Waits that are not ours ----------------------------------------------------------------- */

/* For whom a rank waits whose GPU does not finish: one that has ended, or one that is not
 * waiting itself; where all wait, this one's GPU. */
static void accuse_outside(ml_comm *comm, double seconds) {
    comm_segment *segment = comm->segment;
    char why[128];
    for (int i = 0; i < known_ranks(comm); i++) {
        comm_record *record = &segment->ranks[i];
        bool done = atomic_load(&record->state) == COMM_DONE;
        if (atomic_load(&record->waiting) && !done) continue;
        snprintf(why, sizeof why, NO_PROGRESS, seconds);
        comm_accuse(segment, i, done ? "has ended while others wait for it" : why);
        return;
    }
    snprintf(why, sizeof why, "has work on its GPU that does not end for %.0f s", seconds);
    comm_accuse(segment, comm->rank, why);
}

ml_status ml_comm_waiting(ml_comm *comm, double seconds) {
    comm_segment *segment = comm->segment;
    if (!segment) return ML_OK;
    atomic_store(&segment->ranks[comm->rank].waiting, comm_describe(COMM_OUTSIDE, 0, 0, 0));
    comm_survey all = comm_look(comm);
    if (seconds == 0 || all.progress != comm->outside_progress) comm->outside_seconds = 0;
    comm->outside_progress = all.progress;
    comm->outside_seconds += seconds < 2 * SLICE ? seconds : 2 * SLICE;
    double limit = comm_late_limit(comm, all.busy);
    if (all.all_wait) limit = comm_late_waiting(limit);
    if (comm->wire && comm->rank != 0) limit += COMM_HEARD;
    if (all.ended && limit > comm_stale_limit(comm->timeout))
        limit = comm_stale_limit(comm->timeout);
    if (comm->outside_seconds > limit) accuse_outside(comm, comm->outside_seconds);
    return comm_failure_report(comm);
}

void ml_comm_waited(ml_comm *comm) {
    if (comm->segment) atomic_store(&comm->segment->ranks[comm->rank].waiting, 0);
}
