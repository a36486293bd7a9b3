/* How fast attention is on the GPU, forward and backward, causal: cuDNN, the kernels on mma.sync,
 * and each variant of those on warpgroup products, with score functions that a model may have.
 *   BENCH=1 build/test --gpu -j 0 gpu_attention/times
 * One line each, medians; TFLOP/s count causal attention at one half, whatever else a mask hides,
 * and a window as what it shows. BENCH=shapes: other head sizes and lengths. BENCH=tiny: to try the
 * test alone.
 * ONLY="D64 alibi wgmma_2, cudnn": lines with all words of one of these. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/device/profile.h"
#include "runtime/ops/attention/attention.h"
#include "tests/gpu/bench.h"
#include "tests/ops/support.h"

enum { VARIANTS = 3, RUNS = GPU_BENCH_RUNS };
typedef enum { PLAIN, SOFT_CAP, ALIBI, DOCUMENTS, SCORES } score_kind;
static const char *const score_names[SCORES] = {"plain", "soft cap", "alibi", "documents"};
typedef struct {
    int batch, heads, kv_heads, seq, dim, window;
} shape;
static const shape shapes[] = {{64, 12, 12, 1024, 64}, {8, 16, 16, 4096, 128}};
static const shape tiny[] = {{1, 2, 2, 160, 64}, {1, 1, 1, 160, 128}};
static const shape others[] = {
    {8, 16, 16, 4096, 32},      {8, 16, 16, 4096, 80},  {8, 16, 16, 4096, 96},
    {8, 8, 8, 4096, 192},       {8, 8, 8, 4096, 256},   {8, 32, 4, 4096, 64},
    {4, 32, 8, 4096, 128},      {1, 16, 2, 16384, 128}, {1, 16, 16, 32768, 128},
    {1, 32, 4, 32768, 64},      {1, 16, 16, 2048, 128}, {1, 16, 16, 16384, 128, 1024},
    {8, 16, 4, 8192, 128, 512},
};

typedef struct {
    gpu_bench base;
    const shape *shape;
    score_kind score;
    int runs[2]; /* forward, backward */
    double seconds[2][RUNS];
} bench;

static ml_type type_of(bench *b, ml_dtype dtype, const char *axes) {
    const shape *s = b->shape;
    ml_type type = {.dtype = dtype};
    for (; *axes; axes++) {
        char name[2] = {*axes, 0};
        type.axis[type.rank] = ml_axis_named(b->base.g, name);
        type.size[type.rank++] = *axes == 'b'   ? s->batch
                                 : *axes == 'h' ? s->heads
                                 : *axes == 'g' ? s->kv_heads
                                 : *axes == 'd' ? s->dim
                                                : s->seq;
    }
    return type;
}

static ml_ref parameter(bench *b, int64_t i, const ml_type *type) {
    return ml_graph_add(b->base.g, ML_OP_PARAM, NULL, 0, &i, 1, type);
}

/* Which document each token is in: of 700 tokens. */
static ml_ref documents(bench *b, const char *axes) {
    ml_type type = type_of(b, ML_I32, axes), wide = type;
    wide.dtype = ML_F32;
    ml_ref at = ml_cast(b->base.g, ml_iota(b->base.g, type.axis[1], type.size[1]), ML_F32);
    at = ml_map2(b->base.g, ML_OP_MUL, at, ml_const(b->base.g, ML_F32, 1.0 / 700));
    at = ml_broadcast(b->base.g, ml_map1(b->base.g, ML_OP_FLOOR, at), &wide);
    return gpu_bench_operand(&b->base, &type, at);
}

/* An i32 tensor with all axes of the scores, as vm/bindings/attention.c makes indices. */
static ml_ref widened(bench *b, ml_ref x, ml_ref index) {
    ml_ref odd = ml_cast(b->base.g, ml_map2(b->base.g, ML_OP_NE, x, x), ML_I32);
    ml_ref sources[3] = {ml_const_int(b->base.g, ML_BOOL, 1), index, odd};
    return ml_graph_add(b->base.g, ML_OP_WHERE, sources, 3, NULL, 0, NULL);
}

/* 30 tanh(s / 30); s + slope[h] (k - q); s where the documents are the same. */
static ml_ref score(bench *b, ml_ref *sources, int *count) {
    ml_type type = type_of(b, ML_F32, "bhst");
    ml_ref x = parameter(b, 0, &type), cap = ml_const(b->base.g, ML_F32, 30);
    if (b->score == SOFT_CAP)
        return ml_map2(
            b->base.g, ML_OP_MUL,
            ml_map1(b->base.g, ML_OP_TANH,
                    ml_map2(b->base.g, ML_OP_MUL, x, ml_const(b->base.g, ML_F32, 1.0 / 30))),
            cap);
    if (b->score == ALIBI) {
        ml_type by_head = type_of(b, ML_F32, "h");
        sources[(*count)++] = gpu_bench_operand(&b->base, &by_head, 0);
        ml_ref q = widened(b, x, ml_iota(b->base.g, type.axis[2], b->shape->seq));
        ml_ref k = widened(b, x, ml_iota(b->base.g, type.axis[3], b->shape->seq));
        ml_ref distance = ml_cast(b->base.g, ml_map2(b->base.g, ML_OP_SUB, k, q), ML_F32);
        ml_ref both[2] = {distance, parameter(b, 1, &by_head)};
        distance = ml_graph_add(b->base.g, ML_OP_MUL, both, 2, NULL, 0, NULL);
        return ml_map2(b->base.g, ML_OP_ADD, x, distance);
    }
    ml_type of_q = type_of(b, ML_I32, "bs"), of_k = type_of(b, ML_I32, "bt");
    sources[(*count)++] = documents(b, "bs");
    sources[(*count)++] = documents(b, "bt");
    ml_ref left = widened(b, x, parameter(b, 1, &of_q));
    ml_ref both[2] = {left, parameter(b, 2, &of_k)};
    ml_ref same = ml_graph_add(b->base.g, ML_OP_EQ, both, 2, NULL, 0, NULL);
    return ml_where(b->base.g, same, x, ml_const(b->base.g, ML_F32, -INFINITY));
}

/* The time of each attention step: the one with more work is the gradient. */
static void take_times(void *context, const ml_profile *profile) {
    bench *b = context;
    double most = 0;
    for (uint32_t i = 0; i < profile->events.count; i++) {
        const ml_profile_event *e = &profile->events.at[i];
        if (e->at >= ML_EVENT_HOST) continue;
        const ml_profile_step *step = &e->program->steps[e->at];
        if (step->work == ML_WORK_ATTENTION && step->flops > most) most = step->flops;
    }
    for (uint32_t i = 0; i < profile->events.count; i++) {
        const ml_profile_event *e = &profile->events.at[i];
        if (e->at >= ML_EVENT_HOST) continue;
        const ml_profile_step *step = &e->program->steps[e->at];
        if (step->work != ML_WORK_ATTENTION) continue;
        int which = step->flops > 0.9 * most;
        if (b->runs[which] < RUNS) b->seconds[which][b->runs[which]++] = e->end - e->begin;
    }
}

static int by_size(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double median(bench *b, int which) {
    qsort(b->seconds[which], (size_t)b->runs[which], sizeof(double), by_size);
    return b->seconds[which][b->runs[which] / 2];
}

static void bench_body(void *context) {
    bench *b = context;
    const shape *s = b->shape;
    ml_type q_type = type_of(b, ML_BF16, "bshd");
    ml_type k_type = type_of(b, ML_BF16, s->heads == s->kv_heads ? "bthd" : "btgd");
    ml_ref sources[8] = {gpu_bench_operand(&b->base, &q_type, 0),
                         gpu_bench_operand(&b->base, &k_type, 0),
                         gpu_bench_operand(&b->base, &k_type, 0)};
    int count = 3;
    ml_attention_args args = {.seq = q_type.axis[1],
                              .kv_seq = k_type.axis[1],
                              .heads = q_type.axis[2],
                              .kv_heads = k_type.axis[2],
                              .head_dim = q_type.axis[3],
                              .causal = true,
                              .window = s->window,
                              .scale = 1 / sqrt(s->dim)};
    if (b->score != PLAIN) args.score = score(b, sources, &count);
    ml_ref o = ml_attention(b->base.g, sources, count, &args), gradients[3];
    ml_ref weighed = ml_map2(b->base.g, ML_OP_MUL, ml_cast(b->base.g, o, ML_F32),
                             ml_cast(b->base.g, gpu_bench_operand(&b->base, &q_type, 0), ML_F32));
    ml_ref loss = ml_reduce(b->base.g, ML_OP_SUM, weighed, q_type.axis, q_type.rank);
    ml_autodiff(b->base.g, loss, sources, 3, gradients);
    ml_update updates[3];
    for (int i = 0; i < 3; i++)
        updates[i] = (ml_update){gpu_bench_state(&b->base, i ? &k_type : &q_type, 0),
                                 ml_cast(b->base.g, gradients[i], ML_BF16)};
    gpu_bench_run(&b->base, updates, 3, take_times, b);
}

/* Are all words of a part of ONLY in `line`? */
static bool wanted(const char *line) {
    char only[256], *parts = NULL;
    snprintf(only, sizeof only, "%s", getenv("ONLY") ? getenv("ONLY") : " ");
    for (char *part = strtok_r(only, ",", &parts); part; part = strtok_r(NULL, ",", &parts)) {
        char *words = NULL;
        bool all = true;
        for (char *word = strtok_r(part, " ", &words); word; word = strtok_r(NULL, " ", &words)) {
            for (char *at = word; (at = strchr(at, '_')) != NULL;) *at = ' ';
            all &= strstr(line, word) != NULL;
        }
        if (all) return true;
    }
    return false;
}

/* Pairs of queries and keys that count: half of all, or what a window shows. */
static double pairs(const shape *s) {
    double n = s->seq, w = s->window;
    return w > 0 && w < n ? n * w - w * w / 2 : n * n / 2;
}

static void time_one(const shape *s, score_kind kind, const char *kernels, bool sorted) {
    char line[160], more[64] = "";
    if (s->kv_heads != s->heads) snprintf(more, sizeof more, "/%d", s->kv_heads);
    snprintf(line, sizeof line, "B%d H%d%s T%d D%d ", s->batch, s->heads, more, s->seq, s->dim);
    if (s->window) snprintf(line + strlen(line), 32, "window %d ", s->window);
    snprintf(line + strlen(line), 64, " %-9s  %-8s  %-9s", score_names[kind], kernels,
             sorted ? "" : "any order");
    if (!wanted(line)) return;
    bench b = {.shape = s, .score = kind};
    ml_status status = gpu_bench_time(&b.base, bench_body, &b);
    double flops = 4.0 * s->batch * s->heads * pairs(s) * s->dim;
    if (status != ML_OK) {
        test_fail("%s, %s: %s", score_names[kind], kernels, ml_error_last()->text);
        return;
    }
    double forward = median(&b, 0), backward = median(&b, 1);
    printf("%s%s  forward %6.0f us %4.0f TFLOP/s   backward %6.0f us %4.0f TFLOP/s\n",
           ml_knobs()->wgmma > 0 && !ml_knobs()->cudnn && !b.base.hopper ? "mma.sync: " : "", line,
           forward * 1e6, flops / forward * 1e-12, backward * 1e6, 2.5 * flops / backward * 1e-12);
    fflush(stdout);
}

/* cuDNN, the kernels on mma.sync, and each variant of those on warpgroup products. */
static void time_kernels(ml_knobs_values *knobs, const shape *s, score_kind kind, bool sorted) {
    knobs->deterministic = sorted; /* MLUA_DETERMINISTIC, for cuDNN */
    knobs->cudnn = true, knobs->wgmma = 0;
    if (kind == PLAIN) time_one(s, kind, "cudnn", sorted);
    if (!sorted) return;
    knobs->cudnn = false;
    time_one(s, kind, "mma.sync", true);
    for (knobs->wgmma = 1; knobs->wgmma <= VARIANTS; knobs->wgmma++) {
        char name[32];
        snprintf(name, sizeof name, "wgmma %d", knobs->wgmma);
        time_one(s, kind, name, true);
    }
}

GPU_TEST(attention, times) {
    ml_knobs_values *knobs = (ml_knobs_values *)ml_knobs();
    const ml_knobs_values kept = *knobs;
    const char *size = getenv("BENCH");
    const shape *all = size && strcmp(size, "tiny") == 0 ? tiny : shapes;
    int count = !size ? 0 : 2;
    if (size && strcmp(size, "shapes") == 0) all = others, count = sizeof others / sizeof *others;
    for (int i = 0; i < count; i++)
        for (int kind = PLAIN; kind < SCORES; kind++)
            for (int sorted = 1; sorted >= 0; sorted--)
                time_kernels(knobs, &all[i], (score_kind)kind, sorted);
    *knobs = kept;
}
