/* Products by groups of rows on the CPU, against plain loops: uneven, empty and overlapping groups,
 * rows of no group, any layout, by pools of 1, 2 and 5 threads. Operands are small integers, so
 * that results are exact; divided, their sums round, and the threads' results are equal to the
 * bit. */
#include <string.h>

#include "tests/device/products.h"

enum { POOLS = 3 };
static const int counts[POOLS] = {1, 2, 5};

typedef struct {
    ml_ragged r;
    int64_t sizes[3]; /* elements of a, b, c */
    char *operands[5];
} ragged_case;

static ml_ragged random_ragged(world *w, int64_t sizes[3]) {
    static const ml_dtype dtypes[] = {ML_F32, ML_F32, ML_F64, ML_BF16};
    ml_ragged r = {.outer = pick(w, 0, 1), .batch = pick(w, 1, 6), .groups = pick(w, 1, 24)};
    r.rows = pick(w, 0, 60), r.k = pick(w, 1, 40), r.n = pick(w, 1, 40);
    if (pick(w, 0, 3) == 0) r.rows = pick(w, 250, 700), r.groups = pick(w, 1, 5);
    if (pick(w, 0, 5) == 0) r.rows = pick(w, 150, 250), r.groups = pick(w, 1, 3), r.batch = 6;
    if (pick(w, 0, 2) == 0) r.k = pick(w, 64, 150), r.n = pick(w, 64, 150);
    if (pick(w, 0, 5) == 0) r.n = pick(w, 256, 600), r.k = pick(w, 1, 12);
    r.dtype = r.b_dtype = r.c_dtype = dtypes[pick(w, 0, 3)];
    if (pick(w, 0, 1) && r.dtype == ML_BF16) r.c_dtype = ML_F32;
    sizes[0] = r.batch * (r.a_batch = layout(w, r.rows, r.k, &r.a_row, &r.a_col));
    if (pick(w, 0, 7) == 0) r.a_row = 0; /* what BLAS cannot address */
    if (r.outer) {
        sizes[1] = r.batch * (r.b_batch = layout(w, r.rows, r.n, &r.b_row, &r.b_col));
        sizes[2] = r.groups * (r.c_group = layout(w, r.k, r.n, &r.c_row, &r.c_col));
    } else {
        sizes[1] = r.groups * (r.b_group = layout(w, r.k, r.n, &r.b_row, &r.b_col));
        sizes[2] = r.batch * (r.c_batch = layout(w, r.rows, r.n, &r.c_row, &r.c_col));
    }
    r.start_batch = r.end_batch = r.groups, r.start_stride = r.end_stride = 1;
    return r;
}

/* Most groups have few rows, some many or none; between some there are rows of none. */
static void random_groups(world *w, const ml_ragged *r, int32_t *starts, int32_t *ends) {
    for (int64_t b = 0; b < r->batch; b++) {
        int64_t at = 0;
        for (int64_t e = 0; e < r->groups; e++) {
            int64_t left = r->rows - at, rows = pick(w, 0, left < 9 ? left : 9);
            if (pick(w, 0, 3) == 0) rows = pick(w, left / 2, left);
            if (pick(w, 0, 3) == 0) rows = 0;
            if (pick(w, 0, 5) == 0 && rows < left) at += pick(w, 0, left - rows);
            starts[b * r->groups + e] = (int32_t)at;
            ends[b * r->groups + e] = (int32_t)(at += rows);
        }
        if (pick(w, 0, 5) > 0) continue;
        for (int64_t e = 0; e < r->groups; e++) { /* beyond the rows, and of rows of others */
            starts[b * r->groups + e] -= (int32_t)pick(w, 0, 9);
            ends[b * r->groups + e] += (int32_t)pick(w, 0, 9);
        }
    }
}

static ragged_case random_case(world *w) {
    ragged_case t;
    t.r = random_ragged(w, t.sizes);
    int64_t bounds = t.r.batch * t.r.groups;
    t.operands[0] = fill(w, t.r.dtype, t.sizes[0], false);
    t.operands[1] = fill(w, t.r.dtype, t.sizes[1], false);
    t.operands[2] = (char *)ML_NEW_ARRAY(w->arena, int32_t, (size_t)bounds);
    t.operands[3] = (char *)ML_NEW_ARRAY(w->arena, int32_t, (size_t)bounds);
    random_groups(w, &t.r, (int32_t *)t.operands[2], (int32_t *)t.operands[3]);
    return t;
}

/* What c holds afterwards; NaN in its padding. */
static double *expected(world *w, const ragged_case *t) {
    const ml_ragged *r = &t->r;
    double *c = ML_NEW_ARRAY(w->arena, double, (size_t)t->sizes[2]);
    for (int64_t i = 0; i < t->sizes[2]; i++) c[i] = NAN;
    for (int64_t z = 0; z < (r->outer ? r->groups : r->batch); z++)
        for (int64_t i = 0; i < (r->outer ? r->k : r->rows); i++)
            for (int64_t j = 0; j < r->n; j++)
                c[z * (r->outer ? r->c_group : r->c_batch) + i * r->c_row + j * r->c_col] = 0;
    int64_t done = 0; /* a row is of the first group that has it, of RAGGED_OUTER of each */
    for (int64_t at = 0; at < r->batch * r->groups; at++) {
        int64_t b = at / r->groups, e = at % r->groups;
        int64_t begin = ((int32_t *)t->operands[2])[at], end = ((int32_t *)t->operands[3])[at];
        if (r->outer || e == 0) done = 0;
        begin = begin < done ? done : begin;
        end = end < r->rows ? end : r->rows;
        if (begin < end) done = end;
        for (int64_t i = begin; i < end; i++)
            for (int64_t p = 0; p < r->k; p++)
                for (int64_t j = 0; j < r->n; j++) {
                    int64_t y =
                        r->outer ? b * r->b_batch + i * r->b_row : e * r->b_group + p * r->b_row;
                    int64_t z =
                        r->outer ? e * r->c_group + p * r->c_row : b * r->c_batch + i * r->c_row;
                    c[z + j * r->c_col] += ops_fetch(r->dtype, t->operands[0],
                                                     b * r->a_batch + i * r->a_row + p * r->a_col) *
                                           ops_fetch(r->dtype, t->operands[1], y + j * r->b_col);
                }
    }
    return c;
}

/* By each pool, the same bits; the value is the result. Scratch memory begins as NaN, and what
 * follows it is left alone. */
static char *run_pools(world *w, const ragged_case *t, ml_pool **pools) {
    char *results[POOLS], *operands[5], guard[64];
    memcpy(operands, t->operands, sizeof operands);
    memset(guard, 0xff, sizeof guard);
    for (int i = 0; i < POOLS; i++) {
        int64_t bytes = cpu_ragged_scratch(&t->r, counts[i]);
        char *scratch = scratch_of(w, bytes + (int64_t)sizeof guard);
        memset(scratch, 0xff, (size_t)bytes + sizeof guard);
        operands[4] = results[i] = fill(w, t->r.c_dtype, t->sizes[2], true);
        CHECK_STATUS(cpu_ragged_run(&t->r, operands, scratch, pools[i]), ML_OK);
        CHECK(memcmp(scratch + bytes, guard, sizeof guard) == 0);
        bytes = t->sizes[2] * ml_dtypes[t->r.c_dtype].bytes;
        EXPECT(memcmp(results[i], results[0], (size_t)bytes) == 0, "%d threads: other bits",
               counts[i]);
    }
    return results[0];
}

static void check_case(world *w, ml_pool **pools) {
    ragged_case t = random_case(w);
    const ml_ragged *r = &t.r;
    double *want = expected(w, &t);
    char *c = run_pools(w, &t, pools);
    /* the sum over the batch is rounded at each of its elements where it is converted */
    double tolerance = r->c_dtype != ML_BF16 ? 0 : r->outer ? 4e-2 : 4e-3;
    int64_t wrong = 0;
    for (int64_t i = 0; i < t.sizes[2]; i++) {
        double got = ops_fetch(r->c_dtype, c, i), away = fabs(got - want[i]);
        wrong += isnan(want[i]) ? !isnan(got) : !(away <= tolerance * (fabs(want[i]) + 64));
    }
    EXPECT(wrong == 0, "%lld elements of a %s product %d x %lld x %lld x %lld, %lld groups",
           (long long)wrong, ml_dtypes[r->dtype].name, (int)r->batch, (long long)r->rows,
           (long long)r->n, (long long)r->k, (long long)r->groups);
    for (int64_t i = 0; i < t.sizes[0]; i++)
        ops_store(r->dtype, t.operands[0], i, ops_fetch(r->dtype, t.operands[0], i) / 7);
    for (int64_t i = 0; i < t.sizes[1]; i++)
        ops_store(r->dtype, t.operands[1], i, ops_fetch(r->dtype, t.operands[1], i) / 11);
    run_pools(w, &t, pools);
}

static void check_cases(uint64_t random) {
    world w = {.random = random};
    ml_pool *pools[POOLS];
    for (int i = 0; i < POOLS; i++) pools[i] = ml_pool_new(counts[i]);
    for (int i = 0; i < 80; i++) {
        w.arena = ml_arena_new();
        check_case(&w, pools);
        ml_arena_free(w.arena);
    }
    for (int i = 0; i < POOLS; i++) ml_pool_free(pools[i]);
}

TEST(device, ragged) {
    check_cases(15);
}

/* By the built-in kernels, whichever BLAS there is. */
TEST(device, ragged_kernels) {
    cpu_blas_choose(0);
    check_cases(16);
}
