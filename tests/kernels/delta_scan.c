/* Linear scans of rank 1, or with a decay for each key, as kernels for Hopper, in the emulator,
 * against the reference's loop. */
#include <stdio.h>
#include <string.h>

#include "runtime/ops/linear_scan/linear_scan.h"
#include "tests/kernels/support.h"

typedef struct {
    const char *q, *k, *v, *a, *state, *u, *w;
    bool after, reverse;
    ml_dtype dtype, wide; /* of y; of u and w */
    double low, high;     /* decays */
    int resets;           /* every how many positions; 0: none */
} shape;

static const shape shapes[] = {
    /* two chunks and a part of one; what heads share */
    {"s150 h2 k128", "s150 h2 k128", "s150 h2 v128", "s150 h2", "h2 k128 v128", "s150 h2 k128",
     "s150 k128", true, false, ML_BF16, ML_BF16, 0.8, 1, 0},
    /* decays of all kinds */
    {"b1 s70 k64", "b1 s70 k64", "b1 h2 s70 v64", "b1 s70 h2", "b1 h2 k64 v64", "b1 h2 s70 k64",
     "b1 h2 s70 k64", true, true, ML_F32, ML_F32, -0.5, 1.1, 9},
    /* y reads the states before; one head has two chunks */
    {"s128 k64", "s128 k64", "s128 v128", "s128", "k64 v128", "s128 k64", "s128 k64", false, false,
     ML_BF16, ML_BF16, 0, 1, 17},
    {"s65 k128", "s65 k128", "s65 v64", "s65", "v64 k128", "s65 k128", "s65 k128", false, true,
     ML_F32, ML_BF16, -1e-9, 1e-9, 0},
    /* one position */
    {"h1 s1 k64", "h1 s1 k64", "h1 s1 v64", "h1 s1", "h1 k64 v64", "h1 s1 k64", "h1 s1 k64", true,
     false, ML_BF16, ML_BF16, -1, 1, 0},
    /* tiles of values, as an operand of segments has */
    {"s70 k64", "s70 k64", "s70 v192", "s70", "k64 v192", "s70 k64", "s70 k64", true, false,
     ML_BF16, ML_BF16, 0.5, 1, 0},
    /* a decay for each key */
    {"s100 k128", "s100 k128", "s100 v128", "s100 k128", "k128 v128", "s100 k128", "s100 k128",
     true, false, ML_BF16, ML_BF16, 0.8, 1, 0},
    {"b1 s70 k64", "b1 s70 k64", "b1 h2 s70 v64", "k64 b1 s70 h2", "b1 h2 k64 v64", "b1 h2 s70 k64",
     "b1 h2 s70 k64", true, true, ML_F32, ML_F32, -0.5, 1.1, 9},
    {"s129 k64", "s129 k64", "s129 v64", "s129 k64", "k64 v64", "s129 k64", "s129 k64", false,
     false, ML_BF16, ML_BF16, 0, 1, 17},
    {"s65 k128", "s65 k128", "s65 v64", "s65 k128", "v64 k128", "s65 k128", "s65 k128", false, true,
     ML_F32, ML_BF16, -1e-9, 1e-9, 0},
    {"h1 s1 k64", "h1 s1 k64", "h1 s1 v64", "h1 s1 k64", "h1 k64 v64", "h1 s1 k64", "h1 s1 k64",
     true, false, ML_BF16, ML_BF16, -1, 1, 0},
    /* and no low-rank part */
    {"s70 h2 k128", "s70 h2 k128", "s70 h2 v128", "s70 k128", "h2 k128 v128", NULL, NULL, true,
     false, ML_BF16, ML_BF16, 0.8, 1, 0},
    {"b1 s70 k64", "b1 s70 k64", "b1 h2 s70 v64", "b1 s70 h2 k64", "b1 h2 k64 v64", NULL, NULL,
     false, true, ML_F32, ML_F32, -0.5, 1.1, 9},
    {"s70 k64", "s70 k64", "s70 v192", "s70 k64", "k64 v192", NULL, NULL, true, false, ML_BF16,
     ML_BF16, 0.5, 1, 3},
};
enum { SHAPES = sizeof shapes / sizeof *shapes, SCALAR = 6, LOW_RANK = 11 };
static const shape *current;
static bool transposed; /* keys and values are not innermost */

static ml_ref operand(fixture *f, ml_dtype dtype, const char *axes, double most) {
    char turned[64];
    const char *last = strrchr(axes, ' ');
    REQUIRE(last);
    snprintf(turned, sizeof turned, "%s %.*s", last + 1, (int)(last - axes), axes);
    return fixture_input(f, dtype, transposed ? turned : axes, -most, most);
}

static ml_ref decays(fixture *f, const shape *s) {
    ml_ref a = fixture_input(f, ML_F32, s->a, s->low, s->high);
    double *values = f->inputs[f->input_count - 1];
    for (int64_t i = 0; s->resets && i < ml_type_elements(ml_graph_type(f->g, a)); i++)
        if (i % s->resets == 3) values[i] = 0;
    return a;
}

static void check_shape(fixture *f) {
    const double tolerance = 0.01, small = 0.2; /* u w^T hardly lets the state grow */
    const shape *s = current;
    const ml_target cuda = {.kind = ML_TARGET_CUDA, .arch = 90};
    snprintf(f->label, sizeof f->label, "shape %d", (int)(s - shapes));
    ml_ref sources[9] = {operand(f, ML_BF16, s->q, 1), operand(f, ML_BF16, s->k, 1),
                         operand(f, ML_BF16, s->v, 1), decays(f, s),
                         fixture_input(f, ML_F32, s->state, -1, 1)};
    int count = LINEAR_SCAN_FIRST_PAIR;
    if (s->u) sources[count++] = operand(f, s->wide, s->u, small);
    if (s->u) sources[count++] = operand(f, s->wide, s->w, small);
    ml_linear_scan scan = {.axis = fixture_axis(f, "s"),
                           .keys = fixture_axis(f, "k"),
                           .values = fixture_axis(f, "v"),
                           .reverse = s->reverse,
                           .after = s->after,
                           .dtype = s->dtype,
                           .rank = s->u != NULL};
    ml_ref y = ml_linear_scan_new(f->g, sources, &scan);
    CHECK(ml_delta_scan_kernel(&cuda, f->g, y));
    template_check(f, y, tolerance);
    ml_type type = *ml_graph_type(f->g, y);
    char axes[64] = "";
    for (int i = 0; i < type.rank; i++)
        snprintf(axes + strlen(axes), sizeof axes - strlen(axes), "%s%s%d", i ? " " : "",
                 ml_axis_name(f->g, type.axis[i]), (int)type.size[i]);
    sources[count++] = operand(f, s->dtype, axes, 1);
    sources[count++] = fixture_input(f, ML_F32, s->state, -1, 1);
    ml_ref grad = ml_linear_scan_grad(f->g, sources, &scan);
    if (ml_type_size(ml_graph_type(f->g, sources[LINEAR_SCAN_STATE]), scan.values) > 128) {
        CHECK(!ml_delta_scan_kernel(&cuda, f->g, grad));
        return;
    }
    CHECK(ml_delta_scan_kernel(&cuda, f->g, grad));
    template_check(f, grad, tolerance);
}

static void check_some(int first, int count) {
    template_use_emulator(true);
    for (int i = first; i < first + count; i++) {
        current = &shapes[i];
        fixture_run(check_shape, (uint64_t)i + 1);
    }
    template_use_emulator(false);
}

/* On a GPU of two multiprocessors a block has 128 values and several chunks of the gradient. */
TEST(kernels, delta_scan) {
    template_use_gpu(0, 2);
    check_some(0, 2);
    template_use_gpu(0, 0);
}
/* Here and below NVRTC compiles what it has not by the test before with DIST_ALL=1 alone. */
TEST(kernels, delta_scan_sizes) {
    template_use_cuda(test_all());
    check_some(2, SCALAR - 2);
    template_use_cuda(true);
}
TEST(kernels, delta_scan_keys) {
    check_some(SCALAR, 1);
}
TEST(kernels, delta_scan_keys_of_all_kinds) {
    template_use_cuda(test_all());
    check_some(SCALAR + 1, 1);
    template_use_cuda(true);
}
TEST(kernels, delta_scan_keys_before) {
    template_use_cuda(test_all());
    check_some(SCALAR + 2, 1);
    template_use_cuda(true);
}
TEST(long, delta_scan_keys) {
    check_some(SCALAR + 3, LOW_RANK - SCALAR - 3);
}
TEST(kernels, delta_scan_keys_alone) {
    check_some(LOW_RANK, 2);
}
TEST(long, delta_scan_keys_alone) {
    check_some(LOW_RANK + 2, SHAPES - LOW_RANK - 2);
}
/* What lies otherwise than kernels take it is moved through workspaces. NVRTC compiles the same
 * kernels in the tests above. */
TEST(kernels, delta_scan_layouts) {
    template_use_cuda(test_all());
    transposed = true;
    check_some(1, 1);
    transposed = false;
    template_use_gaps(true);
    check_some(SCALAR - 2, 1);
    template_use_gaps(false);
    template_use_cuda(true);
}
TEST(long, delta_scan_keys_layouts) {
    transposed = true;
    check_some(SCALAR + 1, 1);
    check_some(LOW_RANK + 1, 1);
    transposed = false;
    template_use_gaps(true);
    check_some(LOW_RANK - 1, 1);
    template_use_gaps(false);
}
