/* Norms, short convolutions, the gradients of biases and losses on the GPU at the sizes of
 * models/gpt.lua's and models/llama.lua's presets: how near they are to the bandwidth of a copy,
 * counting the bytes that must move. BENCH=1 build/test --gpu -v -j 0 gpu_norms fails where one of
 * them is below LEAST of it. BENCH=tiny: to try the tests alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/profile.h"
#include "runtime/ops/conv/conv.h"
#include "runtime/passes/passes.h"
#include "tests/gpu/bench.h"
#include "tests/ops/support.h"
#include "vm/check/bench.h"

/* Bytes. Kernels that move less than the first are mostly starting and ending, which takes some 4
 * us of any, a copy too: below the second, those are judged beside a copy of as many bytes. */
enum { LARGE = 32 << 20, LONG = 96 << 20 };
static const double LEAST = 0.85, LEAST_CONVOLUTION = 0.6;

typedef struct {
    const char *name;
    int rows, columns;
    bool rms, adds; /* RMSNorm; the norm's input is a sum with a bias, which is written, too */
} shape;
static const shape shapes[] = {{"gpt2-124m", 65536, 768, false, true},
                               {"gpt2-1.5b", 16384, 1600, false, true},
                               {"gpt-1.3b", 16384, 2048, false, true},
                               {"llama-1b", 16384, 2048, true, false},
                               {"llama-3b", 8192, 3072, true, false}};
static const shape convolved[] = {{"mamba-1.3b", 32768, 4352}, {"deltanet", 32768, 2048}};
static const shape tiny = {"tiny", 300, 136, false, true};
/* Of the logits of a chunk of tokens. */
static const shape losses[] = {
    {"gpt2", 8192, 50304}, {"llama-3", 4096, 128256}, {"llama-2", 8192, 32000}};
static const shape tiny_loss = {"tiny loss", 40, 20000};

typedef struct bench {
    gpu_bench base;
    const shape *shape;
    const char *part;
    void (*body)(struct bench *b);
    int rows, widths; /* widths: of the shape's columns that a row has */
    ml_axis r, c;
    double copy;       /* bytes a second */
    double short_copy; /* of as many bytes as the next kernels move; 0: not known */
    bool copies;       /* what runs is that copy */
    int64_t least;     /* bytes of kernels that are judged */
    double least_share;
    int timed, slow;
    uint32_t seen; /* events */
} bench;

static ml_type type_of(const bench *b, ml_dtype dtype, const char *axes) {
    ml_type type = {.dtype = (uint8_t)dtype};
    for (; *axes; axes++) {
        type.axis[type.rank] = *axes == 'r' ? b->r : b->c;
        type.size[type.rank++] = *axes == 'r' ? b->rows : b->widths * b->shape->columns;
    }
    return type;
}

static ml_ref operand(bench *b, ml_dtype dtype, const char *axes) {
    ml_type type = type_of(b, dtype, axes);
    return gpu_bench_operand(&b->base, &type, 0);
}

/* As f32, to every element. */
static ml_ref wide(const bench *b, ml_ref a) {
    ml_type type = type_of(b, ML_F32, "rc");
    return ml_broadcast(b->base.g, ml_cast(b->base.g, a, ML_F32), &type);
}

static ml_ref times(const bench *b, ml_ref x, ml_ref y) {
    return ml_map2(b->base.g, ML_OP_MUL, wide(b, x), wide(b, y));
}

static ml_ref plus(const bench *b, ml_ref x, ml_ref y) {
    return ml_map2(b->base.g, ML_OP_ADD, wide(b, x), wide(b, y));
}

static ml_ref minus(const bench *b, ml_ref x, ml_ref y) {
    return ml_map2(b->base.g, ML_OP_SUB, wide(b, x), wide(b, y));
}

static ml_ref mean(const bench *b, ml_ref x) {
    ml_ref sum = ml_reduce(b->base.g, ML_OP_SUM, x, &b->c, 1);
    return ml_map2(b->base.g, ML_OP_MUL, sum, ml_const(b->base.g, ML_F32, 1.0 / b->shape->columns));
}

static ml_ref over_rows(const bench *b, ml_ref x) {
    return ml_reduce(b->base.g, ML_OP_SUM, ml_cast(b->base.g, x, ML_F32), &b->r, 1);
}

static ml_ref narrow(const bench *b, ml_ref x) {
    return ml_cast(b->base.g, x, ML_BF16);
}

static void see_times(void *context, const ml_profile *profile) {
    bench *b = context;
    for (uint32_t i = b->seen; i < profile->events.count; i++) {
        const ml_profile_event *first = &profile->events.at[i];
        if (first->at >= ML_EVENT_HOST) continue;
        const ml_profile_step *step = &first->program->steps[first->at];
        double best = 0;
        bool seen = false;
        for (uint32_t j = b->seen; j < profile->events.count; j++) {
            const ml_profile_event *e = &profile->events.at[j];
            if (e->at != first->at || e->program != first->program) continue;
            seen |= j < i;
            double took = e->end - e->begin;
            if (best == 0 || took < best) best = took;
        }
        if (seen || strncmp(step->name, "random", 6) == 0) continue; /* that is how states begin */
        if (step->bytes < b->least) continue;
        double rate = (double)step->bytes / best, share = rate / b->copy;
        printf("%-10s %-8s %-32s %6.1f us %5.1f %% of a copy", b->shape->name, b->part, step->name,
               best * 1e6, 100 * share);
        if (b->copies) b->short_copy = rate;
        if (b->short_copy > 0 && step->bytes < LONG) {
            share = rate / b->short_copy;
            printf(", %5.1f %% of one of as many bytes", 100 * share);
        }
        printf("\n");
        b->timed += !b->copies;
        b->slow += share < b->least_share;
    }
    b->seen = profile->events.count;
    fflush(stdout);
}

static void run(bench *b, const char *part, ml_ref *values, int count) {
    ml_update updates[8];
    for (int i = 0; i < count; i++) {
        const ml_type *type = ml_graph_type(b->base.g, values[i]);
        updates[i] = (ml_update){gpu_bench_state(&b->base, type, 0), values[i]};
    }
    b->part = part;
    gpu_bench_run(&b->base, updates, count, see_times, b);
}

static void forward(bench *b) {
    ml_graph *g = b->base.g;
    ml_ref h = plus(b, operand(b, ML_BF16, "rc"), operand(b, ML_BF16, "rc")), values[4];
    if (b->shape->adds) h = plus(b, h, operand(b, ML_F32, "c"));
    int count = 0;
    values[count++] = narrow(b, h);
    ml_ref m = mean(b, h), from = b->shape->rms ? h : minus(b, h, m);
    ml_ref spread = mean(b, times(b, from, from));
    spread = ml_map2(g, ML_OP_ADD, spread, ml_const(g, ML_F32, 1e-5));
    ml_ref scale = ml_map1(g, ML_OP_RSQRT, spread);
    ml_ref y = times(b, times(b, from, scale), operand(b, ML_F32, "c"));
    if (!b->shape->rms) y = plus(b, y, operand(b, ML_F32, "c"));
    values[count++] = narrow(b, y);
    if (!b->shape->rms) values[count++] = m;
    values[count++] = scale;
    run(b, "forward", values, count);
}

/* The gradient of the norm's output arrives, and that of the residual beside the norm. */
static void backward(bench *b) {
    ml_ref dy = operand(b, ML_BF16, "rc"), h = operand(b, ML_BF16, "rc"), values[4];
    ml_ref residual = operand(b, ML_BF16, "rc"), scale = operand(b, ML_F32, "r");
    ml_ref from = b->shape->rms ? wide(b, h) : minus(b, h, operand(b, ML_F32, "r"));
    ml_ref x = times(b, from, scale), slope = times(b, dy, operand(b, ML_F32, "c"));
    ml_ref dx = minus(b, slope, times(b, x, mean(b, times(b, slope, x))));
    if (!b->shape->rms) dx = minus(b, dx, mean(b, slope));
    int count = 0;
    dx = narrow(b, plus(b, residual, narrow(b, times(b, dx, scale))));
    values[count++] = dx;
    values[count++] = over_rows(b, times(b, dy, x));
    if (!b->shape->rms) values[count++] = over_rows(b, dy);
    if (b->shape->adds) values[count++] = over_rows(b, dx);
    run(b, "backward", values, count);
}

/* As many bytes as the sums of all columns read. */
static void short_copy(bench *b) {
    b->rows /= 2;
    ml_ref negative = ml_map1(b->base.g, ML_OP_NEG, operand(b, ML_BF16, "rc"));
    b->copies = true;
    run(b, "copy", &negative, 1);
    b->copies = false;
    b->rows = b->shape->rows;
}

/* The gradients of the biases of layers so many widths wide. */
static void bias_sums(bench *b) {
    static const struct {
        const char *part;
        int widths;
    } layers[] = {{"sum", 1}, {"sum of 3", 3}, {"sum of 4", 4}};
    for (int i = 0; i < (int)(sizeof layers / sizeof *layers); i++) {
        b->widths = layers[i].widths;
        b->short_copy = 0;
        if (i == 0) short_copy(b);
        ml_ref sum = over_rows(b, operand(b, ML_BF16, "rc"));
        run(b, layers[i].part, &sum, 1);
    }
    b->widths = 1;
}

/* Four taps along the rows, causal, each column for itself; a bias and SiLU; and all gradients. */
static void convolutions(bench *b) {
    ml_graph *g = b->base.g;
    ml_type x_type = type_of(b, ML_BF16, "rc"), w_type = type_of(b, ML_BF16, "rc");
    conv_window window = {b->r, ml_axis_named(g, "taps"), 1, 1, 1, 3};
    w_type.axis[0] = window.taps, w_type.size[0] = 4;
    ml_ref wrt[3] = {operand(b, ML_BF16, "rc"), gpu_bench_operand(&b->base, &w_type, 0),
                     operand(b, ML_F32, "c")};
    ml_ref x = plus(b, ml_conv(g, wrt[0], wrt[1], &window, 1, &x_type), wrt[2]), values[3];
    ml_ref y = narrow(b, times(b, x, ml_map1(g, ML_OP_SIGMOID, x)));
    run(b, "forward", &y, 1);
    ml_axis all[2] = {b->r, b->c};
    ml_ref loss = ml_reduce(g, ML_OP_SUM, times(b, y, operand(b, ML_BF16, "rc")), all, 2);
    ml_autodiff(g, loss, wrt, 3, values);
    run(b, "backward", values, 3);
}

/* Of each row. */
static ml_ref log_sum(const bench *b, ml_ref x) {
    ml_graph *g = b->base.g;
    ml_ref zero = ml_const(g, ML_F32, 0), largest = ml_reduce(g, ML_OP_MAX, x, &b->c, 1);
    ml_ref shift = ml_where(g, ml_map1(g, ML_OP_IS_FINITE, largest), largest, zero);
    shift = ml_map1(g, ML_OP_STOP_GRADIENT, shift);
    ml_ref e = ml_map1(g, ML_OP_EXP, ml_map2(g, ML_OP_SUB, x, shift));
    ml_ref sum = ml_reduce(g, ML_OP_SUM, e, &b->c, 1), empty = ml_map2(g, ML_OP_EQ, sum, zero);
    ml_ref log = ml_map1(g, ML_OP_LOG, ml_where(g, empty, ml_const(g, ML_F32, 1), sum));
    return ml_map2(g, ML_OP_ADD, log, ml_where(g, empty, ml_const(g, ML_F32, -INFINITY), shift));
}

/* The sum of the rows' cross-entropies, and its gradient, as stdlib/loss.lua writes them. */
static void loss(bench *b) {
    ml_graph *g = b->base.g;
    ml_type index = type_of(b, ML_I32, "r"), all = type_of(b, ML_I32, "rc");
    ml_ref target = gpu_bench_operand(&b->base, &index, ml_iota(g, b->r, b->shape->rows));
    ml_ref logits = operand(b, ML_BF16, "rc"), x = ml_cast(g, logits, ML_F32);
    ml_ref column = ml_broadcast(g, ml_iota(g, b->c, b->shape->columns), &all);
    ml_ref zero = ml_const(g, ML_F32, 0), values[2];
    ml_ref own = ml_where(g, ml_map2(g, ML_OP_EQ, column, target), x, zero);
    ml_ref picked = ml_reduce(g, ML_OP_SUM, own, &b->c, 1);
    ml_ref lost = ml_map2(g, ML_OP_SUB, log_sum(b, x), picked);
    values[0] = ml_reduce(g, ML_OP_SUM, lost, &b->r, 1);
    ml_autodiff(g, values[0], &logits, 1, &values[1]);
    run(b, "loss", values, 2);
}

static void norms(bench *b) {
    forward(b);
    backward(b);
    if (b->shape->adds) bias_sums(b);
}

static void bench_body(void *context) {
    bench *b = context;
    b->r = ml_axis_named(b->base.g, "r");
    b->c = ml_axis_named(b->base.g, "c");
    b->rows = b->shape->rows, b->widths = 1;
    b->body(b);
}

/* Each of the shapes, of so many large kernels at least; or the tiny one, where BENCH says so. */
static void time_shapes(const shape *all, int count, const shape *small, void (*body)(bench *b),
                        int kernels, double least_share) {
    const char *size = getenv("BENCH");
    bool only = size && strcmp(size, "tiny") == 0;
    ml_ceilings ceilings = {.copy_bytes = 1e30};
    EXPECT(!(size && !only && ml_bench("cuda", 0, false, &ceilings) != ML_OK),
           "the copy's bandwidth: %s", ml_error_last()->text);
    for (int i = 0; size && i < (only ? 1 : count); i++) {
        bench b = {.shape = only ? small : &all[i], .body = body, .copy = ceilings.copy_bytes};
        b.least_share = least_share;
        b.least = only ? 0 : LARGE;
        ml_status status = gpu_bench_time(&b.base, bench_body, &b);
        EXPECT(status == ML_OK, "%s: %s", b.shape->name, ml_error_last()->text);
        EXPECT(!(b.timed < kernels || (!only && b.slow > 0)),
               "%s: %d of %d kernels are below %.0f %% of a copy", b.shape->name, b.slow, b.timed,
               100 * least_share);
    }
}

GPU_TEST(norms, times) {
    time_shapes(shapes, sizeof shapes / sizeof *shapes, &tiny, norms, 2, LEAST);
}

GPU_TEST(norms, losses) {
    time_shapes(losses, sizeof losses / sizeof *losses, &tiny_loss, loss, 1, LEAST);
}

GPU_TEST(norms, convolutions) {
    time_shapes(convolved, sizeof convolved / sizeof *convolved, &tiny, convolutions, 3,
                LEAST_CONVOLUTION);
}
