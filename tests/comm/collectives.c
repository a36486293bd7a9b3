/* Every collective, dtype and group shape against plain loops; real processes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/graph/convert.h"
#include "tests/comm/support.h"
#include "tests/test.h"

/* ---- Values that every rank can work out for every other --------------------------------------
 */

static int value_of(int rank, int64_t i, ml_dtype dtype) {
    int value = (int)((uint64_t)(i * 7 + rank * 13 + i / 11) % 17) - 8;
    return dtype == ML_BOOL ? value > 5 : value;
}

static void put(void *at, int64_t i, ml_dtype dtype, int64_t value) {
    ml_set_element(dtype, at, i, (double)value); /* exact: small */
}

static int64_t reduced(const int *ranks, int count, int64_t i, ml_dtype dtype, ml_combine op) {
    int64_t result = value_of(ranks[0], i, dtype);
    for (int k = 1; k < count; k++) {
        int64_t value = value_of(ranks[k], i, dtype);
        if (op == ML_COMBINE_SUM) result = dtype == ML_BOOL ? (result | value) : result + value;
        if (op == ML_COMBINE_MAX && value > result) result = value;
        if (op == ML_COMBINE_MIN && value < result) result = value;
    }
    return result;
}

typedef struct {
    ml_group *g;
    const int *ranks; /* of the group */
    int size, me;     /* this rank's place in it */
    int64_t count;
    ml_dtype dtype;
    char *in, *out, *expected;
} shape;

static bool same(const shape *s, const char *what, int64_t elements) {
    size_t bytes = (size_t)(elements * ml_dtypes[s->dtype].bytes);
    if (!bytes || memcmp(s->out, s->expected, bytes) == 0) return true;
    fprintf(stderr, "  %s of %lld %s, place %d of %d: wrong\n", what, (long long)s->count,
            ml_dtypes[s->dtype].name, s->me, s->size);
    return false;
}

static bool check_all_reduce(const shape *s, ml_combine op, bool in_place) {
    char *in = in_place ? s->out : s->in;
    for (int64_t i = 0; i < s->count; i++) {
        put(in, i, s->dtype, value_of(s->ranks[s->me], i, s->dtype));
        put(s->expected, i, s->dtype, reduced(s->ranks, s->size, i, s->dtype, op));
    }
    return ml_comm_collect(s->g, ML_COLLECTIVE_ALL_REDUCE, in, s->out, s->count, s->dtype, op) ==
               ML_OK &&
           same(s, "all-reduce", s->count);
}

static bool check_reduce_scatter(const shape *s, ml_combine op) {
    for (int64_t i = 0; i < s->count * s->size; i++)
        put(s->in, i, s->dtype, value_of(s->ranks[s->me], i, s->dtype));
    for (int64_t i = 0; i < s->count; i++)
        put(s->expected, i, s->dtype,
            reduced(s->ranks, s->size, s->me * s->count + i, s->dtype, op));
    return ml_comm_collect(s->g, ML_COLLECTIVE_REDUCE_SCATTER, s->in, s->out, s->count, s->dtype,
                           op) == ML_OK &&
           same(s, "reduce-scatter", s->count);
}

static bool check_moves(const shape *s) {
    int before = s->ranks[(s->me + s->size - 1) % s->size];
    for (int64_t i = 0; i < s->count * s->size; i++)
        put(s->in, i, s->dtype, value_of(s->ranks[s->me], i, s->dtype));
    for (int64_t i = 0; i < s->count; i++)
        put(s->expected, i, s->dtype, value_of(before, i, s->dtype));
    if (ml_comm_collect(s->g, ML_COLLECTIVE_SHIFT, s->in, s->out, s->count, s->dtype,
                        ML_COMBINE_SUM) != ML_OK ||
        !same(s, "shift", s->count))
        return false;
    int opposite = s->ranks[s->size - 1 - s->me];
    for (int64_t i = 0; i < s->count; i++)
        put(s->expected, i, s->dtype, value_of(opposite, i, s->dtype));
    if (ml_comm_collect(s->g, ML_COLLECTIVE_REVERSE, s->in, s->out, s->count, s->dtype,
                        ML_COMBINE_SUM) != ML_OK ||
        !same(s, "reverse", s->count))
        return false;
    for (int k = 0; k < s->size; k++)
        for (int64_t i = 0; i < s->count; i++)
            put(s->expected, k * s->count + i, s->dtype, value_of(s->ranks[k], i, s->dtype));
    if (ml_comm_collect(s->g, ML_COLLECTIVE_ALL_GATHER, s->in, s->out, s->count, s->dtype,
                        ML_COMBINE_SUM) != ML_OK ||
        !same(s, "all-gather", s->count * s->size))
        return false;
    for (int k = 0; k < s->size; k++)
        for (int64_t i = 0; i < s->count; i++)
            put(s->expected, k * s->count + i, s->dtype,
                value_of(s->ranks[k], s->me * s->count + i, s->dtype));
    return ml_comm_collect(s->g, ML_COLLECTIVE_ALL_TO_ALL, s->in, s->out, s->count * s->size,
                           s->dtype, ML_COMBINE_SUM) == ML_OK &&
           same(s, "all-to-all", s->count * s->size);
}

static bool check_shape(ml_group *g, const int *ranks, int64_t count, ml_dtype dtype) {
    shape s = {.g = g,
               .ranks = ranks,
               .size = ml_group_size(g),
               .me = ml_group_rank(g),
               .count = count,
               .dtype = dtype};
    size_t bytes = (size_t)(count * s.size * ml_dtypes[dtype].bytes) + 1;
    s.in = malloc(bytes);
    s.out = malloc(bytes);
    s.expected = malloc(bytes);
    bool good = s.in && s.out && s.expected;
    for (int op = ML_COMBINE_SUM; good && op <= ML_COMBINE_MIN; op++)
        good = check_all_reduce(&s, op, false) && check_all_reduce(&s, op, true) &&
               check_reduce_scatter(&s, op);
    good = good && check_moves(&s);
    free(s.in);
    free(s.out);
    free(s.expected);
    return good;
}

/* The ranks in the same column (stride > 1) or row of a mesh. */
static int ranks_of(int rank, int size, int stride, int *ranks) {
    int first = rank / (size * stride) * (size * stride) + rank % stride;
    for (int i = 0; i < size; i++) ranks[i] = first + i * stride;
    return size;
}

typedef struct {
    int size, stride;
    int64_t large;
} mesh_axis;

static int check_axis(ml_comm *comm, void *argument) {
    const mesh_axis *axis = argument;
    const int64_t counts[] = {0, 1, 7, 1000, 5000, axis->large}; /* the last: several chunks */
    int ranks[COMM_MOST];
    ml_group *g, *again;
    int size = ranks_of(ml_comm_rank(comm), axis->size, axis->stride, ranks);
    if (ml_comm_group(comm, ranks, size, &g) != ML_OK) return 1;
    if (ml_comm_group(comm, ranks, size, &again) != ML_OK || g != again) return 2;
    for (int dtype = 0; dtype < ML_DTYPE_COUNT; dtype++)
        for (int c = 0; c < (dtype == ML_F64 || dtype == ML_BF16 ? 6 : 5); c++)
            if (!check_shape(g, ranks, counts[c], (ml_dtype)dtype)) return 4;
    return ml_comm_barrier(comm) == ML_OK ? 0 : 5;
}

TEST(comm, pairs) {
    comm_run(2, check_axis, &(mesh_axis){2, 1, 280001});
}
TEST(comm, three) {
    comm_run(3, check_axis, &(mesh_axis){3, 1, 150001});
}
TEST(comm, eight) {
    comm_run(8, check_axis, &(mesh_axis){8, 1, 140001});
}
TEST(comm, rows_of_a_mesh) {
    comm_run(8, check_axis, &(mesh_axis){4, 1, 60001});
}
TEST(comm, columns_of_a_mesh) {
    comm_run(6, check_axis, &(mesh_axis){2, 3, 140001});
}
TEST(comm, groups_of_one) {
    comm_run(2, check_axis, &(mesh_axis){1, 1, 1001});
}

TEST(comm, job_of_one) {
    ml_launch launch = {.world = 1};
    ml_comm *comm;
    REQUIRE(ml_comm_open(&launch, &comm) == ML_OK);
    CHECK_EQ_INT(check_axis(comm, &(mesh_axis){1, 1, 100}), 0);
    CHECK_STATUS(ml_comm_agree(comm, 3, "the plan"), ML_OK);
    CHECK_STATUS(ml_comm_check(comm), ML_OK);
    ml_comm_close(comm);
}

/* ---- To the bit -------------------------------------------------------------------------------
 */

static float noise(int rank, int64_t i) {
    uint64_t state = (uint64_t)rank << 40 ^ (uint64_t)i;
    return (float)test_uniform(&state, -1, 1);
}

/* Sums are those of a loop over the ranks in order, in f32, whatever the size. */
static int check_order(ml_comm *comm, void *argument) {
    int64_t count = *(int64_t *)argument;
    int world = ml_comm_world(comm);
    float *in = malloc((size_t)count * sizeof *in), *out = malloc((size_t)count * sizeof *out);
    for (int64_t i = 0; i < count; i++) in[i] = noise(ml_comm_rank(comm), i);
    bool good = ml_comm_collect(ml_comm_everyone(comm), ML_COLLECTIVE_ALL_REDUCE, in, out, count,
                                ML_F32, ML_COMBINE_SUM) == ML_OK;
    for (int64_t i = 0; good && i < count; i++) {
        float sum = noise(0, i);
        for (int k = 1; k < world; k++) sum += noise(k, i);
        good = out[i] == sum;
    }
    free(in);
    free(out);
    return good ? 0 : 1;
}

TEST(comm, sums_in_order) {
    int64_t counts[] = {1000, 1000000};
    for (int i = 0; i < 2; i++) comm_run(4, check_order, &counts[i]);
    comm_run(2, check_order, &counts[1]);
}

static int check_nan(ml_comm *comm, void *argument) {
    (void)argument;
    int rank = ml_comm_rank(comm);
    float in[3] = {rank == 1 ? NAN : 1, rank == 2 ? NAN : (float)rank, (float)rank}, out[3];
    uint16_t half[2] = {0x3f80, rank == 0 ? 0x7fc0 : 0x3f80}, sums[2]; /* 1, NaN of rank 0 */
    ml_group *g = ml_comm_everyone(comm);
    for (int op = ML_COMBINE_SUM; op <= ML_COMBINE_MIN; op++)
        if (ml_comm_collect(g, ML_COLLECTIVE_ALL_REDUCE, in, out, 3, ML_F32, op) != ML_OK ||
            !isnan(out[0]) || !isnan(out[1]) || isnan(out[2]))
            return 1;
    if (ml_comm_collect(g, ML_COLLECTIVE_ALL_REDUCE, half, sums, 2, ML_BF16, ML_COMBINE_SUM) !=
        ML_OK)
        return 2;
    return sums[0] == 0x4040 && (sums[1] & 0x7fff) > 0x7f80 ? 0 : 3;
}
TEST(comm, nan_stays) {
    comm_run(3, check_nan, NULL);
}

static int check_integers(ml_comm *comm, void *argument) {
    (void)argument;
    int32_t in = INT32_MAX, out;
    int64_t large = INT64_MAX, sum;
    ml_group *g = ml_comm_everyone(comm);
    if (ml_comm_collect(g, ML_COLLECTIVE_ALL_REDUCE, &in, &out, 1, ML_I32, ML_COMBINE_SUM) !=
            ML_OK ||
        out != -2)
        return 1;
    return ml_comm_collect(g, ML_COLLECTIVE_ALL_REDUCE, &large, &sum, 1, ML_I64, ML_COMBINE_SUM) ==
                       ML_OK &&
                   sum == -2
               ? 0
               : 2;
}
TEST(comm, integers_wrap) {
    comm_run(2, check_integers, NULL);
}

/* ---- Agreement and mistakes -------------------------------------------------------------------
 */

static int check_agree(ml_comm *comm, void *argument) {
    (void)argument;
    int rank = ml_comm_rank(comm);
    char blob[3000] = "";
    if (rank == 0) memset(blob, 'x', sizeof blob);
    if (ml_comm_share(comm, blob, sizeof blob) != ML_OK || blob[0] != 'x' || blob[2999] != 'x')
        return 1;
    if (ml_comm_agree(comm, 42, "the plan") != ML_OK) return 2;
    if (ml_comm_agree(comm, rank == 2 ? 1 : 42, "the plan") != ML_INVALID) return 3;
    return strcmp(ml_error_last()->text,
                  "the plan of rank 2 differs from rank 0's (1 of 4 ranks differ)")
               ? 4
               : 0;
}
TEST(comm, agreement) {
    comm_run(4, check_agree, NULL);
}

static int check_different(ml_comm *comm, void *argument) {
    (void)argument;
    int rank = ml_comm_rank(comm);
    float in[4] = {0}, out[16];
    ml_group *g = ml_comm_everyone(comm);
    ml_comm_note(comm, rank == 1 ? "step 3, b.lua:2" : "step 3, a.lua:1");
    ml_status status =
        rank == 1
            ? ml_comm_collect(g, ML_COLLECTIVE_ALL_GATHER, in, out, 4, ML_F32, ML_COMBINE_SUM)
            : ml_comm_collect(g, ML_COLLECTIVE_ALL_REDUCE, in, out, 4, ML_F32, ML_COMBINE_SUM);
    const char *text = ml_error_last()->text;
    if (status != ML_INVALID || !strstr(text, "all-gather of 4 f32 (step 3, b.lua:2)") ||
        !strstr(text, "all-reduce of 4 f32 (sum) (step 3, a.lua:1)"))
        return 1;
    return ml_comm_barrier(comm) == ML_DEVICE ? 0 : 2; /* it stays failed */
}
TEST(comm, different_programs) {
    comm_run(3, check_different, NULL);
}

static int check_group_mistakes(ml_comm *comm, void *argument) {
    (void)argument;
    ml_group *g;
    int rank = ml_comm_rank(comm), twice[] = {rank, rank}, without[] = {1 - rank},
        far[] = {rank, 9};
    if (ml_comm_group(comm, twice, 2, &g) != ML_INTERNAL ||
        ml_comm_group(comm, without, 1, &g) != ML_INTERNAL ||
        ml_comm_group(comm, far, 2, &g) != ML_INTERNAL)
        return 1;
    int both[] = {0, 1}, alone[] = {1};
    if (ml_comm_group(comm, rank ? alone : both, rank ? 1 : 2, &g) == ML_OK && rank == 0) return 2;
    return 0;
}
TEST(comm, group_mistakes) {
    comm_run(2, check_group_mistakes, NULL);
}

static int check_many_groups(ml_comm *comm, void *argument) {
    (void)argument;
    int orders[2][2] = {{0, 1}, {1, 0}};
    ml_group *first[2], *g;
    for (int i = 0; i < 200; i++) {
        if (ml_comm_group(comm, orders[i & 1], 2, &g) != ML_OK) return 1;
        if (i < 2) first[i] = g;
        if (g != first[i & 1]) return 2;
        if (ml_group_rank(g) != (ml_comm_rank(comm) ^ (i & 1))) return 3;
    }
    return 0;
}
TEST(comm, groups_are_shared) {
    comm_run(2, check_many_groups, NULL);
}
