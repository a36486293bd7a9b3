#define _GNU_SOURCE /* sched_getaffinity */
#include "runtime/base/pool.h"

#include "runtime/base/cgroup.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/memory.h"
#include "runtime/base/process.h"

/* `ticket` packs the run's number (high half) and the ranges not yet taken (low half). Only a
 * thread that took a range by compare-and-swap reads the run's fields: they cannot change before
 * that range is done, so a thread that wakes up late can never mix two runs. */
typedef struct {
    ml_job *job;
    void *context;
    int64_t units;
    uint32_t parts;
} run_fields;

typedef struct {
    struct ml_pool *pool;
    pthread_t thread;
    int number;
} worker;

struct ml_pool {
    int threads; /* with the caller */
    bool spins;
    run_fields run;
    _Atomic uint64_t ticket;
    atomic_uint pending; /* ranges not yet done */
    atomic_int sleepers; /* workers that wait for `work` */
    atomic_bool caller_sleeps, stop;
    pthread_mutex_t mutex;
    pthread_cond_t work, done;
    pthread_mutex_t error_mutex;
    int64_t failed_range; /* the first that failed; -1 is none */
    ml_error error;
    worker workers[];
};

/* Longer than a step of decoding waits for the script, which takes 24 us to read it and feed the
 * next. */
#define SPIN_SECONDS 60e-6

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool work_waits(ml_pool *pool) {
    return (uint32_t)atomic_load(&pool->ticket) || atomic_load(&pool->stop);
}
static bool all_done(ml_pool *pool) {
    return atomic_load(&pool->pending) == 0;
}

/* Kernels are launched back to back: looking for the next one for a moment is cheaper than a
 * sleep and a wake-up. */
static bool spin_until(ml_pool *pool, bool (*ready)(ml_pool *)) {
    if (ready(pool)) return true;
    if (!pool->spins) return false;
    double end = ml_clock_now() + SPIN_SECONDS;
    do
        for (int i = 0; i < 64; i++) {
            if (ready(pool)) return true;
            relax();
        }
    while (ml_clock_now() < end);
    return false;
}

typedef struct {
    const run_fields *run;
    uint32_t range;
    int thread;
} range_call;

static void call_range(void *argument) {
    const range_call *call = argument;
    const run_fields *run = call->run;
    int64_t whole = run->units / run->parts, rest = run->units % run->parts;
    int64_t begin = whole * call->range + (call->range < rest ? call->range : rest);
    int64_t end = begin + whole + (call->range < rest);
    run->job(run->context, begin, end, call->thread);
}

static void store_error(ml_pool *pool, int64_t range) {
    pthread_mutex_lock(&pool->error_mutex);
    if (pool->failed_range < 0 || range < pool->failed_range) {
        pool->failed_range = range;
        pool->error = *ml_error_last();
    }
    pthread_mutex_unlock(&pool->error_mutex);
}

/* Take ranges until none is left. */
static void work(ml_pool *pool, int thread) {
    uint64_t ticket = atomic_load(&pool->ticket);
    while ((uint32_t)ticket) {
        if (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket - 1)) continue;
        uint32_t range = pool->run.parts - (uint32_t)ticket;
        range_call call = {&pool->run, range, thread};
        if (ml_protect(call_range, &call) != ML_OK) store_error(pool, range);
        if (atomic_fetch_sub(&pool->pending, 1) == 1 && atomic_load(&pool->caller_sleeps)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->mutex);
        }
        ticket = atomic_load(&pool->ticket);
    }
}

static void *worker_main(void *argument) {
    worker *self = argument;
    ml_pool *pool = self->pool;
    for (;;) {
        if (!spin_until(pool, work_waits)) {
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->sleepers, 1);
            while (!work_waits(pool)) pthread_cond_wait(&pool->work, &pool->mutex);
            atomic_fetch_sub(&pool->sleepers, 1);
            pthread_mutex_unlock(&pool->mutex);
        }
        if (atomic_load(&pool->stop)) return NULL;
        work(pool, self->number);
    }
}

/* Signals belong to the thread that runs the script. */
static void start_workers(ml_pool *pool, int threads) {
    for (int i = 1; i < threads; i++) {
        worker *w = &pool->workers[i - 1];
        w->pool = pool;
        w->number = i;
        if (ml_process_thread(&w->thread, worker_main, w)) break; /* fewer will do */
        pool->threads++;
    }
}

ml_pool *ml_pool_new(int threads) {
    if (threads < 1) threads = 1;
    ml_pool *pool = ml_alloc(sizeof *pool + sizeof(worker) * (size_t)(threads - 1));
    if (!pool) return NULL;
    pool->threads = 1;
    pool->spins = ml_cpu_count() > 1;
    pool->failed_range = -1;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_mutex_init(&pool->error_mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    start_workers(pool, threads);
    return pool;
}

void ml_pool_free(ml_pool *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->stop, true);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 1; i < pool->threads; i++) pthread_join(pool->workers[i - 1].thread, NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->error_mutex);
    pthread_mutex_destroy(&pool->mutex);
    ml_free(pool);
}

int ml_pool_threads(const ml_pool *pool) {
    return pool->threads;
}

static void wake_workers(ml_pool *pool, uint32_t wanted) {
    int sleeping = atomic_load(&pool->sleepers);
    if (!sleeping) return;
    pthread_mutex_lock(&pool->mutex);
    if ((uint32_t)sleeping <= wanted)
        pthread_cond_broadcast(&pool->work);
    else
        for (uint32_t i = 0; i < wanted; i++) pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
}

static void wait_for_end(ml_pool *pool) {
    if (spin_until(pool, all_done)) return;
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->caller_sleeps, true);
    while (!all_done(pool)) pthread_cond_wait(&pool->done, &pool->mutex);
    atomic_store(&pool->caller_sleeps, false);
    pthread_mutex_unlock(&pool->mutex);
}

ml_status ml_pool_run(ml_pool *pool, int64_t units, int64_t parts, ml_job *job, void *context) {
    if (units <= 0) return ML_OK;
    if (parts > units) parts = units;
    if (parts < 1) parts = 1;
    if (parts > UINT32_MAX) parts = UINT32_MAX;
    pool->run = (run_fields){job, context, units, (uint32_t)parts};
    atomic_store(&pool->pending, (unsigned)parts);
    uint64_t number = (atomic_load(&pool->ticket) >> 32) + 1;
    atomic_store(&pool->ticket, number << 32 | (uint32_t)parts);
    if (parts > 1) wake_workers(pool, (uint32_t)parts - 1);
    work(pool, 0);
    wait_for_end(pool);
    if (pool->failed_range < 0) return ML_OK;
    *ml_error_last() = pool->error;
    pool->failed_range = -1;
    return pool->error.status;
}

int ml_cpu_count(void) {
    cpu_set_t set;
    CPU_ZERO(&set);
    int cores = sched_getaffinity(0, sizeof set, &set) == 0
                    ? CPU_COUNT(&set)
                    : (int)sysconf(_SC_NPROCESSORS_ONLN); /* more than the set can hold */
    int quota = ml_cgroup_cores("");
    if (quota && quota < cores) cores = quota;
    return cores > 0 ? cores : 1;
}
