/* How fast a decoding step reads cached keys and values, at context 4,096 in bf16, 24 heads of 128
 * with 8 of keys, for 1 and 32 sequences; and a chunk of 512 positions:
 *   BENCH=1 build/test --gpu -j 0 gpu_cached_attention/times
 * BENCH=tiny: to try that test alone, on an emulated GPU too. */
#include "runtime/ops/cached_attention/cached_attention.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/profile.h"
#include "tests/gpu/bench.h"
#include "tests/ops/support.h"

enum { BLOCK = 16 };
typedef struct {
    int64_t rows, fresh, heads, kv_heads, dim, context;
} size;
static const size WHOLE[] = {
    {1, 1, 24, 8, 128, 4096}, {32, 1, 24, 8, 128, 4096}, {1, 512, 24, 8, 128, 4096}};
static const size TINY[] = {{2, 1, 4, 2, 64, 64}, {1, 20, 4, 2, 64, 64}};

typedef struct {
    gpu_bench base;
    const size *size;
    int runs;
    double seconds[GPU_BENCH_RUNS];
} bench;

static ml_type type_of(bench *b, ml_dtype dtype, const char *axes) {
    static const char names[] = "rshkdpc";
    const size *s = b->size;
    const int64_t sizes[] = {
        s->rows, s->fresh, s->heads, s->kv_heads, s->dim, s->rows * s->context, s->context / BLOCK};
    ml_type type = {.dtype = (uint8_t)dtype};
    for (; *axes; axes++) {
        type.axis[type.rank] = ml_axis_named(b->base.g, (char[]){*axes, 0});
        type.size[type.rank++] = sizes[strchr(names, *axes) - names];
    }
    return type;
}

/* Both kernels of a step are one event. */
static void take_times(void *context, const ml_profile *profile) {
    bench *b = context;
    for (uint32_t i = 0; i < profile->events.count; i++) {
        const ml_profile_event *e = &profile->events.at[i];
        if (e->at >= ML_EVENT_HOST || b->runs == GPU_BENCH_RUNS) continue;
        if (strstr(e->program->steps[e->at].name, "cached_attention"))
            b->seconds[b->runs++] = e->end - e->begin;
    }
}

/* Blocks in an order that is none of memory's: 7 i modulo their number, which 7 does not divide. */
static ml_ref make_table(bench *b, const ml_type *type) {
    ml_graph *g = b->base.g;
    int64_t columns = type->size[1];
    ml_ref row = ml_broadcast(g, ml_iota(g, type->axis[0], type->size[0]), type);
    ml_ref column = ml_broadcast(g, ml_iota(g, type->axis[1], columns), type);
    ml_ref at = ml_map2(g, ML_OP_MUL, column, ml_const_int(g, ML_I32, 7));
    at = ml_map2(g, ML_OP_MOD, at, ml_const_int(g, ML_I32, columns));
    return ml_map2(g, ML_OP_ADD, at, ml_map2(g, ML_OP_MUL, row, ml_const_int(g, ML_I32, columns)));
}

static void bench_body(void *context) {
    bench *b = context;
    ml_graph *g = b->base.g;
    ml_type q = type_of(b, ML_BF16, "rshd"), pool = type_of(b, ML_BF16, "kpd");
    ml_type table = type_of(b, ML_I32, "rc"), row = type_of(b, ML_I32, "r");
    ml_ref length = ml_broadcast(g, ml_const_int(g, ML_I32, b->size->context), &row);
    ml_ref fresh = ml_const_int(g, ML_I32, b->size->fresh);
    ml_ref sources[] = {gpu_bench_operand(&b->base, &q, 0),
                        gpu_bench_operand(&b->base, &pool, 0),
                        gpu_bench_operand(&b->base, &pool, 0),
                        gpu_bench_operand(&b->base, &table, make_table(b, &table)),
                        ml_map2(g, ML_OP_SUB, length, fresh),
                        length};
    ml_cached_attention_args args = {.seq = q.axis[1],
                                     .pool = pool.axis[1],
                                     .columns = table.axis[1],
                                     .heads = q.axis[2],
                                     .kv_heads = pool.axis[0],
                                     .head_dim = q.axis[3],
                                     .kv_seq = ml_axis_named(g, "t"),
                                     .causal = true,
                                     .block = BLOCK,
                                     .scale = 0.088};
    ml_ref y = ml_cached_attention(g, sources, CACHED_CAPTURED, &args);
    ml_update update = {gpu_bench_state(&b->base, &q, 0), y};
    gpu_bench_run(&b->base, &update, 1, take_times, b);
}

static int by_size(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void time_size(const size *s) {
    bench b = {.size = s};
    ml_status status = gpu_bench_time(&b.base, bench_body, &b);
    EXPECT(status == ML_OK, "%s", ml_error_last()->text);
    if (status == ML_OK) EXPECT(b.runs > 0, "no kernel ran");
    if (!b.runs) return;
    qsort(b.seconds, (size_t)b.runs, sizeof(double), by_size);
    double median = b.seconds[b.runs / 2], keys = (double)(s->rows * s->context * s->kv_heads);
    double pairs = (double)(s->rows * s->heads * s->fresh) * (double)(s->context - s->fresh / 2);
    printf("cached attention %d x %d of %d heads (%d) of %d, context %d: %.1f us, %.2f TB/s, "
           "%.0f TFLOP/s\n",
           (int)s->rows, (int)s->fresh, (int)s->heads, (int)s->kv_heads, (int)s->dim,
           (int)s->context, median * 1e6, keys * (double)s->dim * 4 / median * 1e-12,
           4 * pairs * (double)s->dim / median * 1e-12);
}

GPU_TEST(cached_attention, times) {
    const char *wanted = getenv("BENCH");
    if (!wanted) test_skip("it measures: BENCH=1");
    bool tiny = strcmp(wanted, "tiny") == 0;
    int count = tiny ? sizeof TINY / sizeof *TINY : sizeof WHOLE / sizeof *WHOLE;
    for (int i = 0; i < count; i++) time_size(tiny ? &TINY[i] : &WHOLE[i]);
}
