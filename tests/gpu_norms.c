/* Norms and the gradients of biases on the GPU at the sizes of models/gpt.lua's and
 * models/llama.lua's presets: how near they are to the bandwidth of a copy, counting the bytes that
 * must move. BENCH=1 build/test --gpu -v -j 0 gpu_norms/times fails where one of them is below
 * LEAST of it. BENCH=tiny: to try the test alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/profile.h"
#include "runtime/exec/bench.h"
#include "tests/gpu_bench.h"
#include "tests/ops_support.h"

enum { LARGE = 32 << 20 }; /* bytes: kernels that move less are mostly starting and ending */
static const double LEAST = 0.85;

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
static const shape tiny = {"tiny", 300, 136, false, true};

typedef struct {
    gpu_bench base;
    const shape *shape;
    const char *part;
    int widths; /* of the shape's columns that a row has */
    ml_axis r, c;
    double copy; /* bytes a second */
    int timed, slow;
    uint32_t seen; /* events */
} bench;

static ml_type type_of(const bench *b, ml_dtype dtype, const char *axes) {
    ml_type type = {.dtype = (uint8_t)dtype};
    for (; *axes; axes++) {
        type.axis[type.rank] = *axes == 'r' ? b->r : b->c;
        type.size[type.rank++] = *axes == 'r' ? b->shape->rows : b->widths * b->shape->columns;
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
        if (step->bytes < LARGE && b->shape != &tiny) continue;
        double share = (double)step->bytes / best / b->copy;
        printf("%-10s %-8s %-32s %6.1f us %5.1f %% of a copy\n", b->shape->name, b->part,
               step->name, best * 1e6, 100 * share);
        b->timed++;
        b->slow += share < LEAST;
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

/* The gradients of the biases of layers so many widths wide. */
static void bias_sums(bench *b) {
    static const struct {
        const char *part;
        int widths;
    } layers[] = {{"sum", 1}, {"sum of 3", 3}, {"sum of 4", 4}};
    for (int i = 0; i < (int)(sizeof layers / sizeof *layers); i++) {
        b->widths = layers[i].widths;
        ml_ref sum = over_rows(b, operand(b, ML_BF16, "rc"));
        run(b, layers[i].part, &sum, 1);
    }
    b->widths = 1;
}

static void bench_body(void *context) {
    bench *b = context;
    b->r = ml_axis_named(b->base.g, "r");
    b->c = ml_axis_named(b->base.g, "c");
    b->widths = 1;
    forward(b);
    backward(b);
    if (b->shape->adds) bias_sums(b);
}

GPU_TEST(norms, times) {
    const char *size = getenv("BENCH");
    bool small = size && strcmp(size, "tiny") == 0;
    ml_ceilings ceilings = {.copy_bytes = 1e30};
    if (size && !small && ml_bench("cuda", 0, false, &ceilings) != ML_OK)
        test_fail("the copy's bandwidth: %s", ml_error_last()->text);
    for (int i = 0; size && i < (small ? 1 : (int)(sizeof shapes / sizeof *shapes)); i++) {
        bench b = {.shape = small ? &tiny : &shapes[i], .copy = ceilings.copy_bytes};
        ml_status status = gpu_bench_time(&b.base, bench_body, &b);
        if (status != ML_OK) test_fail("%s: %s", b.shape->name, ml_error_last()->text);
        if (!small && (b.timed < 2 || b.slow > 0))
            test_fail("%s: %d of %d kernels are below %.0f %% of a copy", b.shape->name, b.slow,
                      b.timed, 100 * LEAST);
    }
}
