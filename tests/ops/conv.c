/* Convolutions, their gradients and the gradients of these on a device: along one axis and two,
 * depthwise, with channels mixed and in groups, with every kind of padding, strides and dilations,
 * shorter than their windows too. The interpreter's is the definition by loops (conv.h). */
#include "runtime/ops/conv/conv.h"

#include <stdio.h>
#include <string.h>

#include "tests/ops/support.h"

static uint64_t drawn(ops_case *c, uint64_t below) {
    c->random = c->random * 6364136223846793005u + 1442695040888963407u;
    return (c->random >> 33) % below;
}

typedef struct {
    int64_t size, taps, stride, dilation, before, steps;
} extent;

/* Zeros before and after as m.conv pads: causal, the same length, none, and some of each. */
static extent draw_extent(ops_case *c, int padding) {
    extent e = {.size = 1 + (int64_t)drawn(c, 9), .taps = 1 + (int64_t)drawn(c, 4)};
    e.stride = 1 + (int64_t)drawn(c, 3), e.dilation = 1 + (int64_t)drawn(c, 2);
    int64_t reach = e.dilation * (e.taps - 1), after = 0;
    if (padding == 0) e.before = reach;
    if (padding == 1) e.before = reach / 2, after = reach - reach / 2;
    if (padding == 3) e.before = (int64_t)drawn(c, 4), after = (int64_t)drawn(c, 4);
    if (e.before + e.size + after <= reach) e.size = reach + 1 + (int64_t)drawn(c, 4);
    if (drawn(c, 4) == 0) /* side by side */
        e = (extent){.size = 3 * e.taps, .taps = e.taps, .stride = e.taps, .dilation = 1},
        reach = e.taps - 1, after = 0;
    e.steps = (e.before + e.size + after - reach - 1) / e.stride + 1;
    return e;
}

/* `mixing`: 0 depthwise, 1 full, 2 in groups, 3 several results for each channel. */
static ml_ref draw_conv(ops_case *c, ml_dtype dtype, int mixing, int padding, int axes,
                        ml_ref wrt[2], char *label, size_t room) {
    static const char *const x_channels[] = {"c8", "i5", "g2 i3", "c5"};
    static const char *const w_channels[] = {"c8", "i5 o4", "g2 i3 o2", "c5 o2"};
    static const char *const y_channels[] = {"c8", "o4", "g2 o2", "c5 o2"};
    extent e = draw_extent(c, padding), f = draw_extent(c, padding);
    char a[96], b[96], y[96], second[3][32] = {"", "", ""};
    if (axes == 2) {
        snprintf(second[0], sizeof second[0], "t%d", (int)f.size);
        snprintf(second[1], sizeof second[1], "l%d", (int)f.taps);
        snprintf(second[2], sizeof second[2], "t%d", (int)f.steps);
    }
    bool outer = drawn(c, 2); /* the channels before the windows, or after them */
    const char *in = x_channels[mixing], *out = y_channels[mixing];
    snprintf(a, sizeof a, "b2 %s s%d %s %s", outer ? in : "", (int)e.size, second[0],
             outer ? "" : in);
    snprintf(b, sizeof b, "%s k%d %s %s", outer ? w_channels[mixing] : "", (int)e.taps, second[1],
             outer ? "" : w_channels[mixing]);
    snprintf(y, sizeof y, "b2 %s s%d %s %s", outer ? out : "", (int)e.steps, second[2],
             outer ? "" : out);
    conv_window w[2] = {{ops_axis(c, "s"), ops_axis(c, "k"), 1, e.stride, e.dilation, e.before},
                        {ops_axis(c, "t"), ops_axis(c, "l"), 1, f.stride, f.dilation, f.before}};
    ml_type type = ops_type(c, dtype, y);
    wrt[0] = ops_input(c, dtype, a, -2, 2);
    wrt[1] = ops_input(c, dtype, b, -2, 2);
    snprintf(label, room, "%s: %s by %s, stride %d dilation %d before %d", ml_dtypes[dtype].name, a,
             b, (int)e.stride, (int)e.dilation, (int)e.before);
    return ml_conv(c->g, wrt[0], wrt[1], w, axes, &type);
}

static ml_dtype dtype_drawn;
static int axes_drawn;

static void build_drawn(ops_case *c) {
    double tolerance = ops_tolerance(dtype_drawn);
    for (int mixing = 0; mixing < 4; mixing++)
        for (int padding = 0; padding < 4; padding++) {
            ml_ref wrt[2];
            char text[256];
            ml_ref y =
                draw_conv(c, dtype_drawn, mixing, padding, axes_drawn, wrt, text, sizeof text);
            char *label = ml_arena_copy(c->arena, text, strlen(text));
            ops_output(c, y, tolerance, "%s", label);
            ops_gradients(c, y, wrt, 2, tolerance, label);
        }
}

static void run_drawn(ml_dtype dtype, int axes, uint64_t seed) {
    dtype_drawn = dtype, axes_drawn = axes;
    ops_run(build_drawn, seed, 0);
}

OPS_TEST(convolutions) {
    run_drawn(ML_F32, 1, 41);
    run_drawn(ML_F64, 1, 42);
}
OPS_TEST(convolutions_bf16) {
    run_drawn(ML_BF16, 1, 43);
}
OPS_TEST(convolutions_of_images) {
    run_drawn(ML_F32, 2, 44);
}

/* Gradients of the sum of squared gradients: with respect to what is convolved and to the filter.
 */
static void build_twice(ops_case *c) {
    for (int mixing = 0; mixing < 3; mixing++)
        for (int operand = 0; operand < 2; operand++) {
            ml_ref wrt[2], first[2];
            char text[256];
            ml_ref y = draw_conv(c, ML_F64, mixing, 1 + operand, 1, wrt, text, sizeof text);
            char *label = ml_arena_copy(c->arena, text, strlen(text));
            ml_autodiff(c->g, ops_loss(c, ml_map2(c->g, ML_OP_MUL, y, y)), wrt, 2, first);
            ops_gradients(c, first[operand], wrt, 2, ops_tolerance(ML_F64), label);
        }
}
OPS_TEST(convolutions_twice) {
    ops_run(build_twice, 45, 0);
}

/* As models have it, long enough for every thread: short, causal, depthwise, in bf16. */
static void build_short(ops_case *c) {
    ml_type type = ops_type(c, ML_BF16, "b2 s300 c72");
    ml_ref wrt[3] = {ops_input(c, ML_BF16, "b2 s300 c72", -2, 2),
                     ops_input(c, ML_BF16, "k4 c72", -2, 2), ops_input(c, ML_BF16, "c72", -2, 2)};
    conv_window w = {ops_axis(c, "s"), ops_axis(c, "k"), 1, 1, 1, 3};
    ml_ref y = ml_map2(c->g, ML_OP_ADD, ml_conv(c->g, wrt[0], wrt[1], &w, 1, &type), wrt[2]);
    y = ml_map2(c->g, ML_OP_MUL, y, ml_map1(c->g, ML_OP_SIGMOID, y));
    ops_output(c, y, 2 * ops_tolerance(ML_BF16), "short convolution");
    ops_gradients(c, y, wrt, 3, 2 * ops_tolerance(ML_BF16), "short convolution");
}
OPS_TEST(short_convolution) {
    ops_run(build_short, 46, OPS_UNFUSED);
}
