/* Products by groups on the GPU, as large as warpgroup products want them: against the reference,
 * and how fast they are at the sizes of models/gpt_moe.lua's presets.
 *   BENCH=1 build/test --gpu -j 0 gpu_ragged/times
 * BENCH=all: the kernels that serve elsewhere, too; BENCH=tiny: to try the test alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/device/profile.h"
#include "runtime/ops/ragged/ragged.h"
#include "tests/gpu/bench.h"
#include "tests/ops/support.h"

/* ---- Against the reference --------------------------------------------------------------------
 */
/* Two sequences whose groups are of odd lengths; the second group has no rows. */
static ml_ref bound(ops_case *c, bool end) {
    ml_type type = ops_type(c, ML_I32, "b2 e4"), wide = type;
    wide.dtype = ML_F32;
    ml_ref b = ml_broadcast(c->g, ml_cast(c->g, ml_iota(c->g, ops_axis(c, "b"), 2), ML_F32), &wide);
    ml_ref e = ml_broadcast(c->g, ml_cast(c->g, ml_iota(c->g, ops_axis(c, "e"), 4), ML_F32), &wide);
    /* 3 + b, then 77 rows for each group but the second one */
    ml_ref past = ml_map2(c->g, end ? ML_OP_GE : ML_OP_GT, e, ml_const(c->g, ML_F32, 1));
    ml_ref groups = ml_map2(c->g, ML_OP_SUB, e, ml_cast(c->g, past, ML_F32));
    if (end) groups = ml_map2(c->g, ML_OP_ADD, groups, ml_const(c->g, ML_F32, 1));
    ml_ref at = ml_map2(c->g, ML_OP_MUL, groups, ml_const(c->g, ML_F32, 77));
    at = ml_map2(c->g, ML_OP_ADD, at, ml_map2(c->g, ML_OP_ADD, b, ml_const(c->g, ML_F32, 3)));
    return ml_cast(c->g, at, ML_I32);
}

/* `turned`: the matrices' depth is innermost. */
static void add_bound(ops_case *c, bool turned) {
    ml_ref sources[4] = {ops_input(c, ML_BF16, "b2 r240 k200", -1, 1),
                         ops_input(c, ML_BF16, turned ? "e4 n264 k200" : "e4 k200 n264", -1, 1),
                         bound(c, false), bound(c, true)};
    ml_ref y = ml_ragged_dot(c->g, sources, ops_axis(c, "r"), ops_axis(c, "k"), ML_BF16);
    ops_output(c, y, ops_tolerance(ML_BF16), "product%s", turned ? ", turned" : "");
    ops_gradients(c, y, sources, 2, 4 * ops_tolerance(ML_BF16), "product");
}
static void build(ops_case *c) {
    add_bound(c, false);
    add_bound(c, true);
}

/* The copy engine, cp.async, and mma.sync: what each falls back on. */
enum { KERNELS = 3 };
static const char *choose(ml_knobs_values *knobs, int kernels) {
    static const char *const names[KERNELS] = {"tma", "cp.async", "mma.sync"};
    knobs->tma = kernels == 0, knobs->wgmma = kernels < 2;
    return names[kernels];
}

static void with_each(void (*body)(ops_case *), uint64_t seed) {
    ml_knobs_values *knobs = (ml_knobs_values *)ml_knobs();
    const ml_knobs_values kept = *knobs;
    for (int i = 0; i < KERNELS; i++) {
        choose(knobs, i);
        ops_run(body, seed, 0);
    }
    *knobs = kept;
}

GPU_TEST(ragged, wide) {
    with_each(build, 70);
}

/* Of 8 bits, with values whose sums Hopper's adder holds: forward by matrices with either side
 * contiguous, by gradients (E5M2), and outer products, whose squares are wanted too; sizes that no
 * kernel takes. */
static ml_ref bytes(ops_case *c, ml_dtype dtype, const char *axes) {
    ml_ref x = ml_map1(c->g, ML_OP_ROUND, ops_input(c, ML_F32, axes, -3, 3));
    return ml_cast(c->g, ml_map2(c->g, ML_OP_MUL, x, ml_const(c->g, ML_F32, 2)), dtype);
}
static void add_bytes(ops_case *c, const char *x, const char *w, const char *y, ml_dtype left) {
    const ml_ref starts = bound(c, false), ends = bound(c, true);
    const ml_ref scale = ops_input(c, ML_F32, "", 0.5, 2);
    const ml_axis r = ops_axis(c, "r"), k = ops_axis(c, "k");
    ml_ref sources[5] = {bytes(c, left, x), bytes(c, ML_E4M3, w), starts, ends, scale};
    ops_output(c, ml_ragged_dot(c->g, sources, r, k, ML_BF16), ops_tolerance(ML_BF16),
               "%s %s of %s by E4M3", x, w, ml_dtypes[left].name);
    for (int i = 0; i < 2; i++) {
        sources[0] = bytes(c, ML_E4M3, x), sources[1] = bytes(c, i ? ML_E4M3 : ML_E5M2, y);
        ml_ref outer = ml_ragged_outer(c->g, sources, r, i ? ML_BF16 : ML_F32);
        ops_output(c, outer, ops_tolerance(i ? ML_BF16 : ML_F32), "%s outer %s, %d", x, y, i);
        if (i) continue;
        ml_type type = *ml_graph_type(c->g, outer);
        outer = ml_reduce(c->g, ML_OP_SUM, ml_map2(c->g, ML_OP_MUL, outer, outer), type.axis,
                          type.rank);
        ops_output(c, outer, 4 * ops_tolerance(ML_F32), "its squares");
    }
}
static void build_bytes(ops_case *c) {
    add_bytes(c, "b2 r240 k208", "e4 k208 n272", "b2 r240 n272", ML_E4M3);
    add_bytes(c, "b2 r240 k208", "e4 n272 k208", "b2 r240 n272", ML_E5M2);
    add_bytes(c, "b2 r240 k208", "e4 k208 n48", "b2 r240 n48", ML_E5M2);
    add_bytes(c, "b2 r240 k41", "e4 k41 n24", "b2 r240 n24", ML_E5M2);
}

GPU_TEST(ragged, bytes) {
    with_each(build_bytes, 75);
}

/* Rows sorted by groups drawn at random, one of them never: few rows each, and many. */
static void draw(ops_case *c, const char *x_axes, const char *w_axes, const char *ids_axes,
                 const char *both_axes, int64_t groups) {
    ml_graph *g = c->g;
    ml_axis r = ops_axis(c, "r"), e = ops_axis(c, "e");
    ml_ref ids = ops_index(c, ids_axes, groups - 1);
    ml_ref sorted = ml_graph_add(g, ML_OP_SORT, &ids, 1, (int64_t[]){r, 0}, 2, NULL);
    ml_type both = ops_type(c, ML_I32, both_axes);
    ml_ref group = ml_broadcast(g, ml_iota(g, e, groups), &both);
    ml_ref hit = ml_map2(g, ML_OP_EQ, ml_broadcast(g, sorted, &both), group);
    ml_ref counts = ml_reduce(g, ML_OP_SUM, ml_cast(g, hit, ML_I32), &r, 1);
    ml_ref ends = ml_graph_add(g, ML_OP_CUMSUM, &counts, 1, (int64_t[]){e, 0}, 2, NULL);
    ml_ref sources[4] = {ops_input(c, ML_BF16, x_axes, -1, 1), ops_input(c, ML_BF16, w_axes, -1, 1),
                         ml_map2(g, ML_OP_SUB, ends, counts), ends};
    ml_ref y = ml_ragged_dot(g, sources, r, ops_axis(c, "k"), ML_F32);
    ops_output(c, y, ops_tolerance(ML_F32) * 10, "product");
    ml_ref norm = ml_ragged_outer(
        g, (ml_ref[]){sources[0], ml_cast(g, y, ML_BF16), sources[2], sources[3]}, r, ML_F32);
    norm = ml_map2(g, ML_OP_MUL, norm, norm);
    ml_type type = *ml_graph_type(g, norm);
    ops_output(c, ml_reduce(g, ML_OP_SUM, norm, type.axis, type.rank), ops_tolerance(ML_BF16),
               "sum of squares");
    ml_ref outer[4] = {sources[0], ml_cast(g, y, ML_BF16), sources[2], sources[3]};
    for (int i = 0; i < 2; i++) {
        ml_dtype dtype = i ? ML_BF16 : ML_F32;
        ops_output(c, ml_ragged_outer(g, outer, r, dtype), 2 * ops_tolerance(ML_BF16),
                   "outer product, %s", ml_dtypes[dtype].name);
    }
}
static void build_drawn(ops_case *c) {
    draw(c, "b3 r50 k136", "e40 k136 n264", "b3 r50", "b3 e40 r50", 40);
    draw(c, "b3 r50 k136", "e40 n264 k136", "b3 r50", "b3 e40 r50", 40);
    draw(c, "r700 k72", "e4 k72 n136", "r700", "e4 r700", 4);
    draw(c, "r700 k40", "e4 n136 k40", "r700", "e4 r700", 4);
}

GPU_TEST(ragged, drawn) {
    with_each(build_drawn, 80);
}

/* An expert: its hidden tensor comes from the kernel of gate and up; the last choices of experts
 * are of none, and their rows of none. */
static void build_gated(ops_case *c) {
    ml_graph *g = c->g;
    ml_axis r = ops_axis(c, "r"), e = ops_axis(c, "e"), n = ops_axis(c, "n");
    ml_ref ids = ops_index(c, "b3 r150", 5);
    ml_ref sorted = ml_graph_add(g, ML_OP_SORT, &ids, 1, (int64_t[]){r, 0}, 2, NULL);
    ml_type both = ops_type(c, ML_I32, "b3 e4 r150");
    ml_ref hit = ml_map2(g, ML_OP_EQ, ml_broadcast(g, sorted, &both),
                         ml_broadcast(g, ml_iota(g, e, 4), &both));
    ml_ref counts = ml_reduce(g, ML_OP_SUM, ml_cast(g, hit, ML_I32), &r, 1);
    ml_ref ends = ml_graph_add(g, ML_OP_CUMSUM, &counts, 1, (int64_t[]){e, 0}, 2, NULL);
    ml_ref starts = ml_map2(g, ML_OP_SUB, ends, counts), x[2];
    ml_ref weight = ops_input(c, ML_F32, "b3 r150", 0, 1);
    ml_ref y = ml_ragged_dot(g,
                             (ml_ref[]){ops_input(c, ML_BF16, "b3 r150 k136", -1, 1),
                                        ops_input(c, ML_BF16, "e4 k136 n768", -1, 1), starts, ends},
                             r, ops_axis(c, "k"), ML_BF16);
    for (int i = 0; i < 2; i++)
        x[i] = ml_cast(g, ml_slice(g, y, n, i * 384, i * 384 + 384), ML_F32);
    ml_ref h = ml_map2(g, ML_OP_MUL, ml_map2(g, ML_OP_MUL, x[0], ml_map1(g, ML_OP_SIGMOID, x[0])),
                       ml_map2(g, ML_OP_MUL, x[1], weight));
    h = ml_cast(g, ml_map2(g, ML_OP_ADD, h, weight), ML_BF16);
    ml_ref z =
        ml_ragged_dot(g, (ml_ref[]){h, ops_input(c, ML_BF16, "e4 n384 m136", -1, 1), starts, ends},
                      r, n, ML_BF16);
    ops_output(c, y, 4 * ops_tolerance(ML_BF16), "gate and up");
    ops_output(c, h, 4 * ops_tolerance(ML_BF16), "hidden");
    ops_output(c, z, 8 * ops_tolerance(ML_BF16), "down");
}

GPU_TEST(ragged, gated) {
    with_each(build_gated, 60);
}

/* A router: products in three parts, sorts that count, and the inverse of an order. */
static void build_routes(ops_case *c) {
    ml_graph *g = c->g;
    ml_axis e = ops_axis(c, "e"), d = ops_axis(c, "d"), k = ops_axis(c, "k"), r = ops_axis(c, "r");
    ml_axis rows[] = {ops_axis(c, "b"), ops_axis(c, "s")};
    ml_ref x = ml_cast(g, ops_input(c, ML_BF16, "b3 s40 d72", -1, 1), ML_F32);
    ml_ref w = ops_input(c, ML_F32, "d72 e16", -1, 1),
           wide = ops_input(c, ML_F32, "d72 e40", -1, 1);
    w = ml_map2(g, ML_OP_MUL, w, ml_map2(g, ML_OP_MUL, w, w)); /* more bits than a bf16 has */
    wide = ml_map2(g, ML_OP_MUL, wide, ml_map2(g, ML_OP_MUL, wide, wide));
    ml_ref y = ml_dot(g, x, w, &d, 1, ML_F32);
    ops_output(c, y, ops_tolerance(ML_F32), "logits");
    ops_output(c, ml_dot(g, x, wide, &d, 1, ML_F32), ops_tolerance(ML_F32), "more logits");
    ops_output(c, ml_dot(g, x, y, rows, 2, ML_F32), 4 * ops_tolerance(ML_F32), "router's gradient");
    ops_output(c, ml_cast(g, ml_dot(g, y, w, &e, 1, ML_F32), ML_BF16), ops_tolerance(ML_BF16),
               "tokens' gradient");
    for (int descending = 0; descending < 2; descending++) {
        ml_ref scores = ops_input(c, ML_F32, descending ? "s1100 e40" : "b3 s40 e16", -1, 1);
        ml_ref n = ml_graph_add(g, ML_OP_TOP_K, &scores, 1, (int64_t[]){e, 3, k}, 3, NULL);
        n = ml_merge(g, ml_out(g, n, 1), rows[1], k, r);
        for (int inverse = 0; inverse < 2; inverse++) {
            n = ml_graph_add(g, ML_OP_SORT, &n, 1, (int64_t[]){r, descending}, 2, NULL);
            ops_output(c, n, 0, "experts in order %d %d", descending, inverse);
            n = ml_out(g, n, 1);
            ops_output(c, n, 0, "order of experts %d %d", descending, inverse);
        }
    }
}

GPU_TEST(ragged, routes) {
    ops_run(build_routes, 90, OPS_UNFUSED);
}

/* ---- Times -------------------------------------------------------------------------------------
 */
typedef struct {
    const char *name;
    int batch, rows, groups, depth, columns;
} shape;
static const shape shapes[] = {{"moe-8x up", 4, 8192, 8, 2048, 11264},
                               {"moe-8x down", 4, 8192, 8, 5632, 2048},
                               {"moe-64x up", 4, 24576, 64, 2048, 2816},
                               {"moe-64x down", 4, 24576, 64, 1408, 2048}};
static const shape tiny = {"tiny", 2, 100, 3, 136, 144};
typedef struct {
    gpu_bench base;
    const shape *shape;
    const char *kernels;
} bench;

static ml_type type_of(bench *b, ml_dtype dtype, const char *axes) {
    const shape *s = b->shape;
    ml_type type = {.dtype = dtype};
    for (; *axes; axes++) {
        char name[2] = {*axes, 0};
        type.axis[type.rank] = ml_axis_named(b->base.g, name);
        type.size[type.rank++] = *axes == 'b'   ? s->batch
                                 : *axes == 'r' ? s->rows
                                 : *axes == 'e' ? s->groups
                                 : *axes == 'k' ? s->depth
                                                : s->columns;
    }
    return type;
}

/* Where each group begins or, `shift` 1, ends: about as long all, but of odd lengths. */
static ml_ref bench_bound(bench *b, int shift) {
    ml_graph *g = b->base.g;
    ml_type type = type_of(b, ML_I32, "be"), wide = type;
    wide.dtype = ML_F32;
    int groups = b->shape->groups;
    double rows = b->shape->rows / groups;
    ml_ref batch = ml_cast(g, ml_iota(g, type.axis[0], b->shape->batch), ML_F32);
    ml_ref e = ml_cast(g, ml_iota(g, type.axis[1], groups), ML_F32);
    batch = ml_broadcast(g, batch, &wide), e = ml_broadcast(g, e, &wide);
    e = ml_map2(g, ML_OP_ADD, e, ml_const(g, ML_F32, shift));
    ml_ref first = ml_map2(g, ML_OP_GE, e, ml_const(g, ML_F32, 1)); /* neither 0 nor all */
    ml_ref last = ml_map2(g, ML_OP_LT, e, ml_const(g, ML_F32, groups));
    ml_ref odd = ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MUL, e, ml_const(g, ML_F32, 5)),
                         ml_map2(g, ML_OP_MUL, batch, ml_const(g, ML_F32, 11)));
    odd = ml_map2(g, ML_OP_MUL, odd, ml_cast(g, first, ML_F32));
    odd = ml_map2(g, ML_OP_MUL, odd, ml_cast(g, last, ML_F32));
    e = ml_map2(g, ML_OP_MUL, e, ml_const(g, ML_F32, rows));
    return gpu_bench_operand(&b->base, &type, ml_map2(g, ML_OP_ADD, e, odd));
}

static void print_times(void *context, const ml_profile *profile) {
    const bench *b = context;
    const char *fallback = ml_knobs()->wgmma > 0 && !b->base.hopper ? "FELL BACK to mma.sync: "
                           : ml_knobs()->tma && !b->base.maps       ? "FELL BACK to cp.async: "
                                                                    : "";
    for (uint32_t i = 0; i < profile->events.count; i++) {
        const ml_profile_event *first = &profile->events.at[i];
        if (first->at >= ML_EVENT_HOST) continue;
        const ml_profile_step *step = &first->program->steps[first->at];
        double best = 0;
        bool seen = false;
        for (uint32_t j = 0; j < profile->events.count; j++) {
            const ml_profile_event *e = &profile->events.at[j];
            if (e->at != first->at || e->program != first->program) continue;
            seen |= j < i;
            double took = e->end - e->begin;
            if (best == 0 || took < best) best = took;
        }
        if (step->work != ML_WORK_GEMM || seen) continue;
        printf("%s%-12s  %-8s  %-40s %7.0f us %5.0f TFLOP/s\n", fallback, b->shape->name,
               b->kernels, step->name, best * 1e6, step->flops / best * 1e-12);
    }
    fflush(stdout);
}

/* The same of operands of 8 bits. */
static void bench_bytes(void *context) {
    bench *b = context;
    const ml_type x_type = type_of(b, ML_E4M3, "brk"), w_type = type_of(b, ML_E4M3, "ekn");
    const ml_type dy_type = type_of(b, ML_E5M2, "brn"), one = {.dtype = ML_F32};
    const ml_type types[] = {type_of(b, ML_BF16, "brn"), type_of(b, ML_BF16, "brk"),
                             type_of(b, ML_F32, "ekn")};
    const ml_ref starts = bench_bound(b, 0), ends = bench_bound(b, 1);
    const ml_ref scale = gpu_bench_operand(&b->base, &one, 0);
    const ml_ref x = gpu_bench_operand(&b->base, &x_type, 0);
    const ml_ref w = gpu_bench_operand(&b->base, &w_type, 0);
    const ml_ref dy = gpu_bench_operand(&b->base, &dy_type, 0);
    const ml_axis rows = x_type.axis[1];
    const ml_ref values[] = {
        ml_ragged_dot(b->base.g, (ml_ref[]){x, w, starts, ends, scale}, rows, w_type.axis[1],
                      ML_BF16),
        ml_ragged_dot(b->base.g, (ml_ref[]){dy, w, starts, ends, scale}, rows, w_type.axis[2],
                      ML_BF16),
        ml_ragged_outer(b->base.g, (ml_ref[]){x, dy, starts, ends, scale}, rows, ML_F32)};
    ml_update updates[3];
    for (int i = 0; i < 3; i++)
        updates[i] = (ml_update){gpu_bench_state(&b->base, &types[i], 0), values[i]};
    gpu_bench_run(&b->base, updates, 3, print_times, b);
}

/* y = x w, and what its gradients need: dx = dy w', dw = x' dy. */
static void bench_body(void *context) {
    bench *b = context;
    ml_type x_type = type_of(b, ML_BF16, "brk"), w_type = type_of(b, ML_BF16, "ekn");
    ml_type y_type = type_of(b, ML_BF16, "brn"), sum_type = type_of(b, ML_F32, "ekn");
    ml_ref starts = bench_bound(b, 0), ends = bench_bound(b, 1);
    ml_ref x = gpu_bench_operand(&b->base, &x_type, 0), w = gpu_bench_operand(&b->base, &w_type, 0),
           dy = gpu_bench_operand(&b->base, &y_type, 0);
    ml_axis rows = x_type.axis[1];
    ml_update updates[] = {
        {gpu_bench_state(&b->base, &y_type, 0),
         ml_ragged_dot(b->base.g, (ml_ref[]){x, w, starts, ends}, rows, w_type.axis[1], ML_BF16)},
        {gpu_bench_state(&b->base, &x_type, 0),
         ml_ragged_dot(b->base.g, (ml_ref[]){dy, w, starts, ends}, rows, w_type.axis[2], ML_BF16)},
        {gpu_bench_state(&b->base, &sum_type, 0),
         ml_ragged_outer(b->base.g, (ml_ref[]){x, dy, starts, ends}, rows, ML_F32)},
    };
    gpu_bench_run(&b->base, updates, 3, print_times, b);
}

static void time_one(const shape *s, const char *kernels, bool of_bytes) {
    bench b = {.shape = s, .kernels = of_bytes ? "8 bits" : kernels};
    ml_status status = gpu_bench_time(&b.base, of_bytes ? bench_bytes : bench_body, &b);
    EXPECT(status == ML_OK, "%s, %s: %s", s->name, kernels, ml_error_last()->text);
}

GPU_TEST(ragged, times) {
    ml_knobs_values *knobs = (ml_knobs_values *)ml_knobs();
    const ml_knobs_values kept = *knobs;
    const char *size = getenv("BENCH");
    bool small = size && strcmp(size, "tiny") == 0;
    int kernels = size && strcmp(size, "all") == 0 ? KERNELS : 1;
    for (int i = 0; size && i < (small ? 1 : 4); i++)
        for (int k = 0; k < kernels; k++)
            for (int of_bytes = 0; of_bytes < (k ? 1 : 2); of_bytes++)
                time_one(small ? &tiny : &shapes[i], choose(knobs, k), of_bytes);
    *knobs = kept;
}
