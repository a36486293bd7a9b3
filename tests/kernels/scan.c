/* Kernels of CUMSUM, SORT, TOP_K and SCATTER_ADD against the reference. */
#include <math.h>
#include <string.h>

#include "tests/kernels/support.h"

static void label(fixture *f, const char *text) {
    strncpy(f->label, text, sizeof f->label - 1);
}

static ml_ref along(fixture *f, ml_op op, ml_ref x, const char *axis, int64_t a, ml_axis b) {
    int64_t args[] = {fixture_axis(f, axis), a, b};
    return ml_graph_add(f->g, op, &x, 1, args, op == ML_OP_TOP_K ? 3 : 2, NULL);
}

static void cumsum(fixture *f, ml_dtype dtype, const char *axes, const char *axis, bool from_end) {
    label(f, axes);
    bool whole = ml_dtypes[dtype].kind == ML_KIND_INT;
    ml_ref x = whole ? fixture_index(f, axes, 1000) : fixture_input(f, dtype, axes, -1, 1);
    if (dtype == ML_I64) x = ml_cast(f->g, x, dtype);
    template_check(f, along(f, ML_OP_CUMSUM, x, axis, from_end, 0), dtype == ML_BF16 ? 4e-3 : 1e-6);
}

static void cumsums(fixture *f) {
    cumsum(f, ML_F32, "a3 b200", "b", false);
    cumsum(f, ML_F32, "a3 b200", "b", true);
    cumsum(f, ML_F32, "a3 b70 c128", "b", false);
    cumsum(f, ML_F32, "a3 b7 c33", "b", true);
    cumsum(f, ML_BF16, "a3 b50 c4", "b", false);
    cumsum(f, ML_F64, "a5 b6", "a", false);
    cumsum(f, ML_I32, "a3 b300", "b", false);
    cumsum(f, ML_I64, "a3 b300", "b", true);
    cumsum(f, ML_F32, "a1", "a", false);
}
TEST(kernels, cumsum) {
    fixture_run(cumsums, 1);
}

static void sort(fixture *f, ml_dtype dtype, const char *axes, const char *axis, bool descending) {
    label(f, axes);
    bool whole = ml_dtypes[dtype].kind == ML_KIND_INT;
    ml_ref x = whole ? fixture_index(f, axes, 20) : fixture_input(f, ML_F64, axes, -1, 1);
    ml_type type = *ml_graph_type(f->g, x);
    double *values = f->inputs[f->input_count - 1];
    if (!whole) /* equal elements, zeros of both signs, NaN and infinities */
        for (int64_t i = 0; i < ml_type_elements(&type); i++) {
            values[i] = round(values[i] * 50) / 16;
            if (i % 13 == 5) values[i] = -0.0;
            if (i % 31 == 7) values[i] = INFINITY;
        }
    x = ml_cast(f->g, x, dtype);
    template_check(f, along(f, ML_OP_SORT, x, axis, descending, 0), 0);
}

static void sorts(fixture *f) {
    sort(f, ML_F32, "a4 b100", "b", false);
    sort(f, ML_F32, "a4 b100", "b", true);
    sort(f, ML_F32, "a40 b3 c5", "a", false);
    sort(f, ML_BF16, "a4 b33", "b", true);
    sort(f, ML_F64, "a2 b77", "b", true);
    sort(f, ML_I32, "a2 b77", "b", true);
    sort(f, ML_I64, "a2 b3000", "b", false);
    sort(f, ML_F32, "a2 b5000", "b", true);
    sort(f, ML_F32, "a2 b20000", "b", false);
    sort(f, ML_I64, "a1 b34000", "b", true);
    sort(f, ML_F32, "a3 b1", "b", true);
}
TEST(kernels, sort) {
    fixture_run(sorts, 2);
}

/* Experts that tokens chose, and the way back. */
static void sort_chosen(fixture *f, const char *axes, int64_t k, bool descending) {
    label(f, axes);
    ml_axis top = fixture_axis(f, "top"), rows = fixture_axis(f, "r");
    ml_ref x = fixture_input(f, ML_F32, axes, -1, 1);
    x = ml_graph_add(f->g, ML_OP_TOP_K, &x, 1, (int64_t[]){fixture_axis(f, "e"), k, top}, 3, NULL);
    x = ml_out(f->g, x, 1);
    ml_ref picked = ml_graph_add(f->g, ML_OP_MERGE, &x, 1,
                                 (int64_t[]){fixture_axis(f, "t"), top, rows}, 3, NULL);
    ml_ref sorted = along(f, ML_OP_SORT, picked, "r", descending, 0);
    template_check(f, sorted, 0);
    template_check(f, along(f, ML_OP_SORT, ml_out(f->g, sorted, 1), "r", descending, 0), 0);
}

static void sorts_chosen(fixture *f) {
    sort_chosen(f, "a3 t40 e8", 2, false);
    sort_chosen(f, "t1100 e40", 3, false);
    sort_chosen(f, "a2 t70 e256", 2, true);
    sort_chosen(f, "a2 t70 e257", 1, false);
}
TEST(kernels, sort_chosen) {
    fixture_run(sorts_chosen, 7);
}

static void top(fixture *f, ml_dtype dtype, const char *axes, const char *axis, int64_t k) {
    label(f, axes);
    ml_ref x = ml_cast(f->g, fixture_index(f, axes, 50), dtype);
    template_check(f, along(f, ML_OP_TOP_K, x, axis, k, fixture_axis(f, "top")), 0);
}

static void tops(fixture *f) {
    top(f, ML_F32, "a70 b64", "b", 6);
    top(f, ML_BF16, "a5 b64", "b", 1);
    top(f, ML_F32, "a9 b5 c8", "a", 9);
    top(f, ML_F64, "a3 b40", "b", 5);
    top(f, ML_I32, "a3 b2000", "b", 40);
    top(f, ML_F32, "a3 b300", "b", 100);
    top(f, ML_I64, "a2 b4100", "b", 65);
}
TEST(kernels, top_k) {
    fixture_run(tops, 3);
}

/* index has these axes and bound (some indices are bad), value and result their own. */
static void scatter(fixture *f, const char *index_axes, int64_t bound, const char *value_axes,
                    ml_dtype value_dtype, const char *result_axes, ml_dtype dtype) {
    label(f, value_axes);
    ml_ref index = fixture_index(f, index_axes, bound), value;
    double *indices = f->inputs[f->input_count - 1];
    indices[0] = -1;
    if (ml_dtypes[value_dtype].kind == ML_KIND_INT) {
        value = ml_cast(f->g, fixture_index(f, value_axes, 1000), value_dtype);
    } else
        value = fixture_input(f, value_dtype, value_axes, -1, 1);
    ml_type type = fixture_type(f, dtype, result_axes);
    ml_ref y = ml_scatter_add(f->g, index, value, fixture_axis(f, "v"), &type);
    template_check(f, y, dtype == ML_BF16 || value_dtype == ML_BF16 ? 4e-3 : 1e-6);
}

static void scatters(fixture *f) {
    scatter(f, "t50", 10, "t50 e33", ML_F32, "v9 e33", ML_F32);
    scatter(f, "b4 t100", 300, "b4 t100 e256", ML_F32, "v300 e256", ML_F32);
    scatter(f, "b4 t100", 40, "b4 t100 e24", ML_BF16, "v40 e24", ML_F32);
    scatter(f, "b4 t100", 40, "b4 t100 e24", ML_BF16, "e24 v40", ML_BF16);
    scatter(f, "b4 t10", 12, "b4 t10", ML_F32, "b4 v12", ML_F32);
    scatter(f, "b4 t10", 12, "e3 b4 t10", ML_F64, "b4 e3 v12", ML_F64);
    scatter(f, "b7", 12, "b7", ML_F32, "b7 v12", ML_F32);
    scatter(f, "t500", 30, "t500 e2", ML_I32, "v30 e2", ML_I32);
    scatter(f, "t500", 30, "t500", ML_I64, "v30", ML_I64);
    scatter(f, "t3000", 3, "t3000 e300", ML_F32, "v40 e300", ML_F32);
    scatter(f, "b6 t700", 90, "b6 t700 e96", ML_F32, "b6 v90 e96", ML_F32);
}
TEST(kernels, scatter_add) {
    fixture_run(scatters, 4);
}

TEST(kernels, scans_of_views) {
    template_use_gaps(true);
    template_use_cuda(false);
    fixture_run(scatters, 5);
    fixture_run(cumsums, 5);
    fixture_run(tops, 5);
    template_use_gaps(false);
    template_use_cuda(true);
}

static void emulated(fixture *f) {
    cumsum(f, ML_F32, "a3 b300", "b", true);
    sort(f, ML_F32, "a3 b100", "b", true);
    sort(f, ML_F64, "a2 b2100", "b", false);
    sort_chosen(f, "a3 t40 e8", 2, false);
    sort_chosen(f, "t550 e40", 2, true);
    top(f, ML_F32, "a9 b64", "b", 6);
    top(f, ML_F32, "a2 b1100", "b", 5);
    scatter(f, "b4 t10", 12, "b4 t10", ML_F32, "b4 v12", ML_F32);
    scatter(f, "b3 t900", 40, "b3 t900 e132", ML_BF16, "v1300 e132", ML_F32);
    scatter(f, "t3000", 3, "t3000 e131", ML_F32, "v190 e131", ML_F32);
}
/* The CUDA kernels in the emulator. */
TEST(kernels, scans_emulated) {
    template_use_emulator(true);
    template_use_cuda(false);
    fixture_run(emulated, 6);
    template_use_emulator(false);
    template_use_cuda(true);
}
