/* How long a collective takes among ranks of this host, which are threads of this process here:
 * they share a segment as processes do, each by a mapping of its own. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/base/process.h"
#include "runtime/comm/comm_internal.h"

enum { MOST = 8, RUNS = 41, UNCOUNTED = 4 };

typedef struct {
    ml_launch launch;
    int64_t count;
    double seconds;
    ml_status status;
    ml_error error;
} measured;

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static ml_status time_sums(ml_comm *comm, float *memory, measured *m) {
    double seconds[RUNS];
    for (int run = -UNCOUNTED; run < RUNS; run++) {
        double begin = comm_now();
        ML_TRY(ml_comm_collect(ml_comm_everyone(comm), ML_COLLECTIVE_ALL_REDUCE, memory, memory,
                               m->count, ML_F32, ML_COMBINE_SUM));
        if (run >= 0) seconds[run] = comm_now() - begin;
    }
    qsort(seconds, RUNS, sizeof *seconds, by_size);
    m->seconds = seconds[RUNS / 2];
    return ML_OK;
}

static void *be_rank(void *argument) {
    measured *m = argument;
    ml_comm *comm = NULL;
    float *memory = ml_alloc((size_t)m->count * sizeof *memory); /* zeros */
    m->status = memory ? ml_comm_open(&m->launch, &comm)
                       : ml_fail(ML_NO_MEMORY, "no memory to measure all-reduces");
    if (m->status == ML_OK) m->status = time_sums(comm, memory, m);
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

ml_status ml_comm_measure_sum(int ranks, int64_t count, double *seconds) {
    measured m[MOST];
    comm_segment *segment = NULL;
    size_t mapped = 0;
    if (ranks < 2 || ranks > MOST || count < 1)
        return ml_fail(ML_INTERNAL, "measuring sums of %d ranks", ranks);
    for (int i = 0; i < ranks; i++)
        m[i] = (measured){.launch = {.rank = i, .world = ranks, .local_rank = i}, .count = count};
    int fd = comm_segment_new(ranks);
    if (fd < 0) return ml_error_last()->status;
    ml_status status = comm_segment_map(fd, &segment, &mapped);
    if (status == ML_OK) status = measure(fd, segment, ranks, m);
    if (segment) munmap(segment, mapped);
    close(fd);
    *seconds = m[0].seconds;
    return status;
}
