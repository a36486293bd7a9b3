/* Linear scans of rank 0 as kernels for Hopper, in the emulator, against the reference's loop. */
#include <stdio.h>
#include <string.h>

#include "runtime/ops/linear_scan/linear_scan.h"
#include "tests/kernels/support.h"

typedef struct {
    const char *q, *k, *v, *a, *state;
    bool after, reverse;
    ml_dtype dtype;   /* of y */
    double low, high; /* decays */
    int resets;       /* every how many positions; 0: none */
} shape;

static const shape shapes[] = {
    /* two chunks and a part of one; what heads share; decays of all kinds */
    {"s150 h2 k128", "s150 h2 k128", "s150 h2 v128", "s150 h2", "h2 k128 v128", true, false,
     ML_BF16, 0.8, 1, 0},
    {"b1 s70 k64", "b1 s70 k64", "b1 h2 s70 v64", "b1 s70 h2", "b1 h2 k64 v64", true, true, ML_F32,
     -0.5, 1.1, 9},
    {"s64 k128", "s64 k128", "s64 v64", "s64", "k128 v64", false, false, ML_BF16, 0, 1, 17},
    /* tiles of values, columns that are zeros, one position */
    {"s90 k16", "s90 k16", "s90 v136", "s90", "v136 k16", false, true, ML_F32, 0.9, 1, 5},
    {"h1 s1 k96", "h1 s1 k96", "h1 s1 v40", "h1 s1", "h1 k96 v40", true, false, ML_BF16, -1, 1, 0},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };
static const shape *current;
static bool transposed; /* keys and values are not innermost */

static ml_ref operand(fixture *f, ml_dtype dtype, const char *axes, double low, double high) {
    if (!transposed) return fixture_input(f, dtype, axes, low, high);
    char turned[64];
    const char *last = strrchr(axes, ' ');
    REQUIRE(last);
    snprintf(turned, sizeof turned, "%s %.*s", last + 1, (int)(last - axes), axes);
    return fixture_input(f, dtype, turned, low, high);
}

static ml_ref decays(fixture *f, const shape *s) {
    ml_ref a = fixture_input(f, ML_F32, s->a, s->low, s->high);
    double *values = f->inputs[f->input_count - 1];
    for (int64_t i = 0; s->resets && i < ml_type_elements(ml_graph_type(f->g, a)); i++)
        if (i % s->resets == 3) values[i] = 0;
    return a;
}

static void check_shape(fixture *f) {
    enum { TOLERANCE_IN_PERCENT = 1 };
    const shape *s = current;
    const ml_target cuda = {.kind = ML_TARGET_CUDA, .arch = 90};
    snprintf(f->label, sizeof f->label, "shape %d", (int)(s - shapes));
    ml_ref sources[7] = {operand(f, ML_BF16, s->q, -1, 1), operand(f, ML_BF16, s->k, -1, 1),
                         operand(f, ML_BF16, s->v, -1, 1), decays(f, s),
                         fixture_input(f, ML_F32, s->state, -1, 1)};
    ml_linear_scan scan = {.axis = fixture_axis(f, "s"),
                           .keys = fixture_axis(f, "k"),
                           .values = fixture_axis(f, "v"),
                           .reverse = s->reverse,
                           .after = s->after,
                           .dtype = s->dtype};
    ml_ref y = ml_linear_scan_new(f->g, sources, &scan);
    CHECK(ml_linear_scan_kernel(&cuda, f->g, y));
    template_check(f, y, TOLERANCE_IN_PERCENT * 0.01);
    ml_type type = *ml_graph_type(f->g, y);
    char axes[64] = "";
    for (int i = 0; i < type.rank; i++)
        snprintf(axes + strlen(axes), sizeof axes - strlen(axes), "%s%s%d", i ? " " : "",
                 ml_axis_name(f->g, type.axis[i]), (int)type.size[i]);
    sources[5] = operand(f, s->dtype, axes, -1, 1);
    sources[6] = fixture_input(f, ML_F32, s->state, -1, 1);
    ml_ref grad = ml_linear_scan_grad(f->g, sources, &scan);
    CHECK(ml_linear_scan_kernel(&cuda, f->g, grad));
    template_check(f, grad, TOLERANCE_IN_PERCENT * 0.01);
}

static void check_some(int first, int count) {
    template_use_emulator(true);
    for (int i = first; i < first + count; i++) {
        current = &shapes[i];
        fixture_run(check_shape, (uint64_t)i + 1);
    }
    template_use_emulator(false);
}

TEST(kernels, linear_scan) {
    check_some(0, 2);
}
TEST(kernels, linear_scan_widths) {
    template_use_cuda(test_all()); /* NVRTC compiles the same files in the test above */
    check_some(2, SHAPES - 2);
    template_use_cuda(true);
}
/* What lies otherwise than kernels take it is moved through workspaces. NVRTC compiles the same
 * kernels in the tests above. */
TEST(kernels, linear_scan_layouts) {
    template_use_cuda(test_all());
    transposed = true;
    check_some(1, 1);
    transposed = false;
    template_use_gaps(true);
    check_some(3, 1);
    template_use_gaps(false);
    template_use_cuda(true);
}
