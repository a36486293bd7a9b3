/* How long products take where steps run them: on as many threads as a rank has, with as many ranks
 * at work at once, which are threads of this process here, and on operands that others have
 * displaced from the nearest caches, as those of a step are by the steps before. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/process.h"
#include "runtime/device/cpu/cpu_exec.h"
#include "runtime/device/cpu/cpu_internal.h"

enum { MOST_RANKS = 256, MOST_SETS = 8, ROUNDS = 3, LEAST_RUNS = 2, MOST_RUNS = 15 };
enum { HUGE_PAGE = 2 << 20 };
static const double LONG_ENOUGH = 0.002;       /* seconds of a round's runs */
static const double THREAD_FLOPS = 1 << 27;    /* of a run, for each thread, at most */
static const double FEW_FLOPS = 1e6;           /* fewer are not a part of anything */
static const int64_t ROOM = (int64_t)64 << 20; /* bytes of a rank's operands, at most */

enum { LEFT, RIGHT, RESULT, BIAS, STARTS, ENDS, OPERANDS };

/* A product, or a part of it that is as fast, with its operands and how many copies of them. */
typedef struct {
    ml_product product;
    double share; /* of the whole */
    int64_t bytes[OPERANDS], set, scratch;
    int sets; /* 0: it is not timed */
} timed;

typedef struct {
    timed *list;
    int count, ranks, threads;
    int64_t room; /* bytes of a rank */
    char *memory;
    double *seconds; /* by ranks, products, rounds */
    atomic_int gate; /* 1: all ranks are there; -1: they end */
    pthread_barrier_t together;
} timing;

typedef struct {
    timing *all;
    int number;
    ml_pool *pool;
    pthread_t thread;
} timing_rank;

/* ---- Sizes ---- */
static int64_t last_of(const int64_t *sizes, const int64_t *strides, int count) {
    int64_t last = 0;
    for (int i = 0; i < count; i++) last += (sizes[i] - 1) * strides[i];
    return last;
}

static int64_t bytes_of(int64_t last, ml_dtype dtype) {
    return cpu_aligned((last + 1) * ml_dtypes[dtype].bytes);
}

static void gemm_bytes(const ml_gemm *g, int64_t bytes[OPERANDS]) {
    int64_t a = (g->m - 1) * g->a_row + (g->k - 1) * g->a_col;
    int64_t b = (g->k - 1) * g->b_row + (g->n - 1) * g->b_col;
    int64_t c = (g->m - 1) * g->c_row + (g->n - 1) * g->c_col;
    bytes[LEFT] = bytes_of(a + last_of(g->batch, g->a_batch, ML_GEMM_BATCHES), g->a_dtype);
    bytes[RIGHT] = bytes_of(b + last_of(g->batch, g->b_batch, ML_GEMM_BATCHES), g->b_dtype);
    bytes[RESULT] = bytes_of(c + last_of(g->batch, g->c_batch, ML_GEMM_BATCHES), g->c_dtype);
    if (g->epilogue == ML_EPILOGUE_BIAS) bytes[BIAS] = bytes_of(g->n - 1, g->c_dtype);
}

static void ragged_bytes(const ml_ragged *r, int64_t bytes[OPERANDS]) {
    const int64_t rows = r->rows - 1, k = r->k - 1, n = r->n - 1;
    const int64_t batch = r->batch - 1, groups = r->groups - 1;
    int64_t b = batch * r->b_batch + groups * r->b_group + n * r->b_col;
    int64_t c = batch * r->c_batch + groups * r->c_group + n * r->c_col;
    b += (r->outer ? rows : k) * r->b_row;
    c += (r->outer ? k : rows) * r->c_row;
    bytes[LEFT] = bytes_of(batch * r->a_batch + rows * r->a_row + k * r->a_col, r->dtype);
    bytes[RIGHT] = bytes_of(b, r->b_dtype);
    bytes[RESULT] = bytes_of(c, r->c_dtype);
    bytes[STARTS] = bytes_of(batch * r->start_batch + groups * r->start_stride, ML_I32);
    bytes[ENDS] = bytes_of(batch * r->end_batch + groups * r->end_stride, ML_I32);
}

static double flops_of(const ml_product *p) {
    const ml_gemm *g = &p->gemm;
    const ml_ragged *r = &p->ragged;
    if (p->grouped) return 2.0 * (double)(r->batch * p->rows) * (double)r->k * (double)r->n;
    return 2.0 * (double)g->m * (double)g->n * (double)g->k *
           (double)(g->batch[0] * g->batch[1] * g->batch[2]);
}

/* ---- A part that is as fast ---- */
/* Without gaps, in the order of the strides: the inner one stays 1. */
static void close_gaps(int64_t rows, int64_t cols, int64_t *row, int64_t *col, const int64_t *batch,
                       int64_t *batch_stride) {
    if (*col == 1 || rows == 1 || cols == 1)
        *row = cols, *col = 1;
    else
        *col = rows, *row = 1;
    int64_t item = rows * cols;
    for (int d = ML_GEMM_BATCHES - 1; d >= 0; d--) {
        if (batch_stride[d] == 0) continue;
        batch_stride[d] = item;
        item *= batch[d];
    }
}

/* Half of it: of a long sum, which the results' blocks do not depend on, else of the items, else of
 * the longer side. */
static void halve(ml_gemm *g) {
    enum { LONG = 512 };
    int64_t *part = g->m >= g->n ? &g->m : &g->n;
    for (int d = 0; d < ML_GEMM_BATCHES; d++)
        if (g->batch[d] > 1) part = &g->batch[d];
    if (g->k > LONG) part = &g->k;
    *part = (*part + 1) / 2;
    close_gaps(g->m, g->k, &g->a_row, &g->a_col, g->batch, g->a_batch);
    close_gaps(g->k, g->n, &g->b_row, &g->b_col, g->batch, g->b_batch);
    close_gaps(g->m, g->n, &g->c_row, &g->c_col, g->batch, g->c_batch);
}

static void count_bytes(timed *t, int threads) {
    int64_t scratch = t->product.grouped ? cpu_ragged_scratch(&t->product.ragged, threads)
                                         : cpu_gemm_scratch(&t->product.gemm, threads);
    t->scratch = cpu_aligned(scratch);
    memset(t->bytes, 0, sizeof t->bytes);
    if (t->product.grouped)
        ragged_bytes(&t->product.ragged, t->bytes);
    else
        gemm_bytes(&t->product.gemm, t->bytes);
    t->set = 0;
    for (int i = 0; i < OPERANDS; i++) t->set += t->bytes[i];
}

/* Of products by groups no part is taken: large ones are not timed. */
static void prepare(timed *t, int threads, int64_t room) {
    const double whole = flops_of(&t->product), most = THREAD_FLOPS * threads;
    if (whole <= 0) return;
    for (count_bytes(t, threads); flops_of(&t->product) > most || t->scratch + 2 * t->set > room;
         count_bytes(t, threads)) {
        if (t->product.grouped || flops_of(&t->product) < FEW_FLOPS) return;
        halve(&t->product.gemm);
    }
    t->share = flops_of(&t->product) / whole;
    const int64_t sets = (room - t->scratch) / t->set;
    t->sets = sets < MOST_SETS ? (int)sets : MOST_SETS;
}

/* ---- A rank ---- */
static void find_operands(const timed *t, char *room, int set, char *operands[OPERANDS]) {
    char *at = room + t->scratch + set * t->set;
    for (int i = 0; i < OPERANDS; at += t->bytes[i++]) operands[i] = at;
}

/* All groups have as many rows, but for one. */
static void write_groups(const timed *t, char *room) {
    const ml_ragged *r = &t->product.ragged;
    const int64_t rows = t->product.rows;
    for (int set = 0; set < t->sets; set++) {
        char *operands[OPERANDS];
        find_operands(t, room, set, operands);
        int32_t *starts = (int32_t *)operands[STARTS], *ends = (int32_t *)operands[ENDS];
        for (int64_t b = 0; b < r->batch; b++)
            for (int64_t e = 0; e < r->groups; e++) {
                starts[b * r->start_batch + e * r->start_stride] = (int32_t)(e * rows / r->groups);
                ends[b * r->end_batch + e * r->end_stride] = (int32_t)((e + 1) * rows / r->groups);
            }
    }
}

static ml_status multiply(const timed *t, char *room, int set, ml_pool *pool) {
    char *operands[OPERANDS];
    find_operands(t, room, set, operands);
    if (!t->product.grouped) {
        const ml_gemm *g = &t->product.gemm;
        return cpu_gemm_run(g, operands[LEFT], operands[RIGHT], operands[RESULT],
                            t->bytes[BIAS] ? operands[BIAS] : NULL, room, pool);
    }
    char *const all[] = {operands[LEFT], operands[RIGHT], operands[STARTS], operands[ENDS],
                         operands[RESULT]};
    return cpu_ragged_run(&t->product.ragged, all, room, pool);
}

/* The median of a round's runs, in which ranks delay one another. 0: it cannot be computed. */
static double median_seconds(const timed *t, char *room, ml_pool *pool) {
    double seconds[MOST_RUNS], all = 0;
    int runs = 0;
    while (runs < LEAST_RUNS || (all < LONG_ENOUGH && runs < MOST_RUNS)) {
        double begin = ml_clock_now();
        if (multiply(t, room, runs % t->sets, pool) != ML_OK) return 0;
        seconds[runs] = ml_clock_now() - begin;
        all += seconds[runs++];
    }
    return ml_clock_median(seconds, runs) / t->share;
}

/* Numbers of about unit size in every type that is multiplied, in place of an earlier product's. */
static void fill(char *room, int64_t bytes) {
    enum { SEED = 1 << 16 };
    uint64_t state = 0x9e3779b97f4a7c15;
    for (int64_t i = 0; i < SEED && i + 2 <= bytes; i += 2) {
        state = state * 6364136223846793005 + 1442695040888963407;
        uint16_t number = (uint16_t)(0x3f00 | (state >> 63 << 15) | (state >> 40 & 0xff));
        memcpy(room + i, &number, sizeof number);
    }
    for (int64_t done = SEED; done < bytes; done += SEED)
        memcpy(room + done, room, (size_t)(bytes - done < SEED ? bytes - done : SEED));
}

/* Rounds are apart: what delays one of them for a while does not show in the middle one. */
static void time_all(timing_rank *rank) {
    timing *all = rank->all;
    char *room = all->memory + rank->number * all->room;
    double *seconds = all->seconds + rank->number * all->count * ROUNDS;
    for (int i = 0; i < ROUNDS * all->count; i++) {
        const timed *t = &all->list[i % all->count];
        if (t->sets > 0) fill(room, t->scratch + t->sets * t->set);
        pthread_barrier_wait(&all->together);
        if (t->sets == 0) continue;
        if (t->product.grouped) write_groups(t, room);
        seconds[i % all->count * ROUNDS + i / all->count] = median_seconds(t, room, rank->pool);
    }
}

static void *be_rank(void *argument) {
    timing_rank *rank = argument;
    int gate;
    while ((gate = atomic_load(&rank->all->gate)) == 0) sched_yield();
    if (gate > 0) time_all(rank);
    return NULL;
}

/* ---- All ranks ---- */
static ml_status run_ranks(timing *all, timing_rank *ranks) {
    int started = 1;
    ranks[0] = (timing_rank){.all = all, .pool = ml_pool_new(all->threads)};
    bool whole = ranks[0].pool != NULL;
    for (; whole && started < all->ranks; started++) {
        timing_rank *rank = &ranks[started];
        *rank = (timing_rank){.all = all, .number = started, .pool = ml_pool_new(all->threads)};
        whole = rank->pool && ml_process_thread(&rank->thread, be_rank, rank) == 0;
        if (!whole) ml_pool_free(rank->pool);
        if (!whole) break;
    }
    if (whole) whole = pthread_barrier_init(&all->together, NULL, (unsigned)all->ranks) == 0;
    atomic_store(&all->gate, whole ? 1 : -1);
    if (whole) time_all(&ranks[0]);
    for (int i = 1; i < started; i++) pthread_join(ranks[i].thread, NULL);
    if (whole) pthread_barrier_destroy(&all->together);
    for (int i = 0; i < started; i++) ml_pool_free(ranks[i].pool);
    return whole ? ML_OK : ml_fail(ML_NO_MEMORY, "cannot start threads to time products");
}

static void means(const timing *all, double *seconds) {
    for (int i = 0; i < all->count; i++) {
        bool failed = false; /* on some rank */
        seconds[i] = 0;
        for (int r = 0; r < all->ranks; r++) {
            double median = ml_clock_median(all->seconds + (r * all->count + i) * ROUNDS, ROUNDS);
            if (median <= 0) failed = true;
            seconds[i] += median / all->ranks;
        }
        if (failed) seconds[i] = 0;
    }
}

/* Memory for what the largest of the products takes. */
static ml_status time_prepared(ml_device *device, timing *all, double *seconds) {
    timing_rank *ranks = ml_alloc((size_t)all->ranks * sizeof *ranks);
    void *memory = NULL;
    all->room = HUGE_PAGE;
    for (int i = 0; i < all->count; i++) {
        int64_t bytes = all->list[i].scratch + all->list[i].sets * all->list[i].set;
        if (all->list[i].sets && bytes > all->room) all->room = bytes;
    }
    all->room = (all->room + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    all->seconds = ml_alloc((size_t)(all->ranks * all->count * ROUNDS) * sizeof *all->seconds);
    ml_status status = ranks && all->seconds
                           ? device->ops->allocate(device, all->ranks * all->room, &memory)
                           : ml_fail(ML_NO_MEMORY, "no memory to time products");
    all->memory = memory;
    if (status == ML_OK) status = run_ranks(all, ranks);
    if (status == ML_OK) means(all, seconds);
    device->ops->release(device, memory);
    ml_free(all->seconds);
    ml_free(ranks);
    return status;
}

ml_status cpu_time_products(ml_device *device, const ml_product *products, int count, int ranks,
                            int threads, double *seconds) {
    timing all = {.count = count, .threads = threads < 1 ? 1 : threads};
    all.ranks = ranks < 1 ? 1 : ranks > MOST_RANKS ? MOST_RANKS : ranks;
    if (count < 1) return ML_OK;
    all.list = ml_alloc((size_t)count * sizeof *all.list);
    if (all.list == NULL) return ml_fail(ML_NO_MEMORY, "no memory to time products");
    int64_t room = device->target.memory_bytes / 8 / all.ranks;
    for (int i = 0; i < count; i++) {
        all.list[i].product = products[i];
        prepare(&all.list[i], all.threads, room < ROOM ? room : ROOM);
    }
    ml_status status = time_prepared(device, &all, seconds);
    ml_free(all.list);
    return status;
}
