/* How long a collective takes among ranks of this host, and how long they wait for one another at
 * it; they are threads of this process here, which share a segment as processes do, each by a
 * mapping of its own. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/process.h"
#include "runtime/comm/comm_internal.h"

enum { MOST = 8, RUNS = 41, UNCOUNTED = 4 };

typedef struct measured {
    ml_launch launch;
    ml_status (*times)(ml_comm *comm, float *memory, struct measured *m);
    int64_t count;
    int64_t rounds, meetings; /* of work before each meeting; of meetings */
    double seconds, worked;   /* worked: what all work made, so that none is left out */
    ml_status status;
    ml_error error;
} measured;

static ml_status time_sums(ml_comm *comm, float *memory, measured *m) {
    double seconds[RUNS];
    for (int run = -UNCOUNTED; run < RUNS; run++) {
        double begin = ml_clock_now();
        ML_TRY(ml_comm_collect(ml_comm_everyone(comm), ML_COLLECTIVE_ALL_REDUCE, memory, memory,
                               m->count, ML_F32, ML_COMBINE_SUM));
        if (run >= 0) seconds[run] = ml_clock_now() - begin;
    }
    m->seconds = ml_clock_median(seconds, RUNS);
    return ML_OK;
}

/* Work of one core: each round waits for the one before, and the first for what earlier work made,
 * so that a compiler can neither move it nor do it once for several. */
static double work(double x, int64_t rounds) {
    for (int64_t i = 0; i < rounds; i++) x = x * 0.75 + 0.25;
    return x;
}

/* As many rounds as a core does in so many seconds when nothing delays it. */
static int64_t rounds_in(double seconds, double *worked) {
    enum { TIMED = 1 << 18, TIMES = 5 };
    double fastest = 1;
    for (int i = 0; i < TIMES; i++) {
        double begin = ml_clock_now();
        *worked = work(*worked, TIMED);
        double took = ml_clock_now() - begin;
        fastest = took < fastest ? took : fastest;
    }
    return (int64_t)(seconds / fastest * TIMED);
}

/* Of the time between a rank's work and its next one, the mean. */
static ml_status time_waits(ml_comm *comm, float *memory, measured *m) {
    double waited = 0;
    for (int64_t run = -UNCOUNTED; run < m->meetings; run++) {
        m->worked = work(m->worked, m->rounds);
        double begin = ml_clock_now();
        ML_TRY(ml_comm_collect(ml_comm_everyone(comm), ML_COLLECTIVE_ALL_REDUCE, memory, memory,
                               m->count, ML_F32, ML_COMBINE_SUM));
        if (run >= 0) waited += ml_clock_now() - begin;
    }
    m->seconds = waited / (double)m->meetings;
    return ML_OK;
}

static void *be_rank(void *argument) {
    measured *m = argument;
    ml_comm *comm = NULL;
    float *memory = ml_alloc((size_t)m->count * sizeof *memory); /* zeros */
    m->status = memory ? ml_comm_open(&m->launch, &comm)
                       : ml_fail(ML_NO_MEMORY, "no memory to measure all-reduces");
    if (m->status == ML_OK) m->status = m->times(comm, memory, m);
    m->error = *ml_error_last();
    ml_comm_close(comm);
    ml_free(memory);
    return NULL;
}

/* The others fail with a rank that cannot start. */
static bool start(int segment_fd, comm_segment *segment, measured *m, pthread_t *thread) {
    int fd = fcntl(segment_fd, F_DUPFD_CLOEXEC, 0);
    snprintf(m->launch.address, sizeof m->launch.address, "fd:%d", fd);
    if (fd >= 0 && ml_process_thread(thread, be_rank, m) == 0) return true;
    if (fd >= 0) close(fd);
    m->status = ml_fail(ML_NO_MEMORY, "cannot start a thread to measure all-reduces");
    m->error = *ml_error_last();
    comm_failure_set(segment, m->launch.rank, m->error.text);
    return false;
}

static ml_status measure(int fd, comm_segment *segment, int ranks, measured m[MOST]) {
    pthread_t threads[MOST];
    int started = 0;
    while (started < ranks && start(fd, segment, &m[started], &threads[started])) started++;
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    int failed = started < ranks ? started : 0;
    while (failed < ranks && m[failed].status == ML_OK) failed++;
    if (failed == ranks) return ML_OK;
    *ml_error_last() = m[failed].error;
    return m[failed].status;
}

/* Ranks that all measure as `like` says; what each found is in m. */
static ml_status measure_ranks(int ranks, const measured *like, measured m[MOST]) {
    comm_segment *segment = NULL;
    size_t mapped = 0;
    if (ranks < 2 || ranks > MOST || like->count < 1)
        return ml_fail(ML_INTERNAL, "measuring collectives of %d ranks", ranks);
    for (int i = 0; i < ranks; i++) {
        m[i] = *like;
        m[i].launch = (ml_launch){.rank = i, .world = ranks, .local_rank = i, .threads = true};
    }
    int fd = comm_segment_new(ranks);
    if (fd < 0) return ml_error_last()->status;
    ml_status status = comm_segment_map(fd, &segment, &mapped);
    if (status == ML_OK) status = measure(fd, segment, ranks, m);
    if (segment) munmap(segment, mapped);
    close(fd);
    return status;
}

ml_status ml_comm_measure_sum(int ranks, int64_t count, double *seconds) {
    measured m[MOST];
    ML_TRY(measure_ranks(ranks, &(measured){.times = time_sums, .count = count}, m));
    *seconds = m[0].seconds;
    return ML_OK;
}

ml_status ml_comm_measure_wait(int ranks, double work_seconds, double *seconds) {
    enum { FEW = 16, LEAST = 16 };
    static const double long_enough = 0.06;
    measured m[MOST], like = {.times = time_waits, .count = FEW};
    like.rounds = rounds_in(work_seconds, &like.worked);
    like.meetings = LEAST + (int64_t)(long_enough / work_seconds);
    ML_TRY(measure_ranks(ranks, &like, m));
    *seconds = 0;
    for (int i = 0; i < ranks; i++) *seconds += m[i].seconds / ranks;
    return ML_OK;
}
