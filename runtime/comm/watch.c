/* The watcher: a thread of each rank that beats, looks whether others still live and beat, and ends
 * this process when another has failed and the script does not get out of what it is doing.
 *
 * A rank holds a lock on its byte of the segment's file for as long as it lives; the kernel drops
 * it however the process ends, so a free lock of a rank that has not said goodbye is a death, in
 * any namespace and whatever process is the parent. Threads of one process share its locks, and its
 * end. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/process.h"
#include "runtime/comm/wire_internal.h"

static const double TICK = 0.2; /* seconds between beats */
static const double GRACE = 8;  /* for the script to end by itself after a failure */
enum { WATCHED = 8, DEAD_TICKS = 3 };

/* ---- The thread ------------------------------------------------------------------------------ */

/* What is known of one of the ranks after this one. */
typedef struct {
    uint32_t beats;
    double silent;
    int dead_ticks;
} sight;

static bool lock_is_free(int fd, int rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* A launcher says more about a death than can be seen from here, so it gets some ticks to do it. */
static void look_at(ml_comm *comm, int rank, sight *seen, double slice) {
    comm_record *record = &comm->segment->ranks[rank];
    bool free = !comm->threads && lock_is_free(comm->fd, rank);
    uint32_t beats = atomic_load(&record->beats);
    if (atomic_load(&record->state) != COMM_RUNNING) { /* read last: it says goodbye first */
        *seen = (sight){.beats = beats};
        return;
    }
    seen->dead_ticks = free ? seen->dead_ticks + 1 : 0;
    if (seen->dead_ticks >= DEAD_TICKS) comm_accuse(comm->segment, rank, "died");
    seen->silent = beats == seen->beats ? seen->silent + slice : 0;
    seen->beats = beats;
    if (seen->silent < comm_stale_limit(comm->timeout)) return;
    char why[64];
    snprintf(why, sizeof why, "has been stopped or frozen for %.0f s", seen->silent);
    comm_accuse(comm->segment, rank, why);
}

/* Another rank failed a while ago, and this process is still busy: in a kernel, or in a wait that
 * is not ours. */
static _Noreturn void give_up(ml_comm *comm) {
    char text[COMM_FAILURE_BYTES];
    int failed = comm_failure_get(comm->segment, text);
    bool own = failed == comm->rank;
    if (!own && comm_may_report(comm->segment))
        dprintf(STDERR_FILENO, "mlua: rank %d stops: %s\n", comm->rank, text);
    ml_process_clean();
    _exit(own ? 1 : ML_EXIT_PEER);
}

static bool tick(ml_comm *comm) {
    const struct timespec until = ml_clock_timespec(ml_clock_now() + TICK);
    pthread_mutex_lock(&comm->lock);
    if (!comm->stopping) pthread_cond_timedwait(&comm->stop, &comm->lock, &until);
    bool stopping = comm->stopping;
    pthread_mutex_unlock(&comm->lock);
    return !stopping;
}

static void *watch(void *argument) {
    ml_comm *comm = argument;
    sight seen[WATCHED] = {{0}};
    int others = comm->wire ? 0 : comm->world - 1;
    double last = ml_clock_now(), failed = 0;
    double grace =
        comm_stale_limit(comm->timeout) < GRACE ? comm_stale_limit(comm->timeout) : GRACE;
    while (tick(comm)) {
        double now = ml_clock_now(), slice = now - last < 2 * TICK ? now - last : 2 * TICK;
        last = now;
        atomic_fetch_add(&comm->segment->ranks[comm->rank].beats, 1);
        if (comm->wire) wire_watch(comm, slice);
        if (atomic_load(&comm->segment->failed)) {
            failed += slice;
            if (failed > grace) give_up(comm);
            continue;
        }
        for (int i = 0; i < others && i < WATCHED; i++)
            look_at(comm, (comm->rank + 1 + i) % comm->world, &seen[i], slice);
    }
    return NULL;
}

ml_status comm_watch_start(ml_comm *comm) {
    pthread_condattr_t attributes;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&comm->stop, &attributes);
    pthread_condattr_destroy(&attributes);
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = comm->rank, .l_len = 1};
    if (comm->fd >= 0 && fcntl(comm->fd, F_SETLK, &lock) != 0)
        return ml_fail(ML_INVALID, "rank %d runs twice: another process has its place: %s",
                       comm->rank, strerror(errno));
    int error = ml_process_thread(&comm->watcher, watch, comm);
    if (error) return ml_fail(ML_NO_MEMORY, "cannot start a thread: %s", strerror(error));
    comm->watched = true;
    return ML_OK;
}

void comm_watch_stop(ml_comm *comm) {
    if (!comm->watched) return;
    pthread_mutex_lock(&comm->lock);
    comm->stopping = true;
    pthread_cond_signal(&comm->stop);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->watcher, NULL);
    pthread_cond_destroy(&comm->stop);
    pthread_mutex_destroy(&comm->lock);
    comm->watched = false;
}
