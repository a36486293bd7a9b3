/* Long sums and running sums in f32: of equal terms, whose roundings all have one sign in a while
 * and add up. */
#include <math.h>

#include "tests/ops/support.h"

static ml_ref tenths(ops_case *c, ml_dtype dtype, const char *axes) {
    ml_ref x = ops_input(c, dtype, axes, 0, 1);
    double *values = c->inputs[ml_graph_args(c->g, x)[0]];
    int64_t count = ml_type_elements(ml_graph_type(c->g, x)), bits;
    ops_store(dtype, &bits, 0, 0.1);
    for (int64_t i = 0; i < count; i++) values[i] = ops_fetch(dtype, &bits, 0);
    return x;
}

static void sum(ops_case *c, const char *axes, const char *first, const char *second,
                double tolerance) {
    ml_axis over[2] = {ops_axis(c, first), second ? ops_axis(c, second) : 0};
    ml_ref x = tenths(c, ML_F32, axes);
    ml_ref y = ml_reduce(c->g, ML_OP_SUM, x, over, second ? 2 : 1);
    ops_output(c, y, tolerance, "sum over %s %s of %s", first, second ? second : "", axes);
}

static void build_sums(ops_case *c) {
    double most = ops_is_gpu(c) ? 1e-5 : 3e-6; /* a GPU's threads add up some 1000 terms */
    sum(c, "r3 n30000", "n", NULL, most);
    sum(c, "n60000 c3", "n", NULL, most);
    sum(c, "n40000 c20", "n", NULL, most);
    sum(c, "a400 r50 c9", "a", "c", most); /* of short pieces */
    sum(c, "a4000 c70", "a", "c", most);
}

OPS_TEST(long_sums) {
    ops_run(build_sums, 31, OPS_UNFUSED);
}

/* So long that a thread of a GPU adds up thousands of terms; with few multiprocessors, so that it
 * does not take gigabytes. */
static void build_longest_sums(ops_case *c) {
    ml_session_device(c->session)->target.multiprocessors = 1;
    sum(c, "r2 n4500000", "n", NULL, 1e-6);
    sum(c, "r2 n2300000", "r", "n", 1e-6);
}

OPS_TEST(longest_sums) {
    ops_run(build_longest_sums, 32, 0);
}

static void running(ops_case *c, ml_dtype dtype, const char *axes, const char *axis,
                    bool from_end) {
    ml_ref x = tenths(c, dtype, axes);
    int64_t args[] = {ops_axis(c, axis), from_end};
    ml_ref y = ml_graph_add(c->g, ML_OP_CUMSUM, &x, 1, args, 2, NULL);
    ops_output(c, y, dtype == ML_BF16 ? 4e-3 : 1e-6, "running sums over %s of %s", axis, axes);
}

static void build_running(ops_case *c) {
    running(c, ML_F32, "n300000", "n", false);
    running(c, ML_F32, "n30000 c3", "n", true);
    running(c, ML_BF16, "r2 n100000", "n", false);
    running(c, ML_F32, "n600 c4096", "n", false); /* rows side by side */
}

OPS_TEST(running_sums) {
    ops_run(build_running, 33, 0);
}

static void build_scattered(ops_case *c) {
    ml_ref x = tenths(c, ML_F32, "t100000 c3"), index = ops_index(c, "t100000", 4);
    ml_type type = ops_type(c, ML_F32, "v5 c3");
    ml_ref y = ml_scatter_add(c->g, index, x, ops_axis(c, "v"), &type);
    ops_output(c, y, ops_is_gpu(c) ? 1e-5 : 1e-6, "many tokens a row");
}

OPS_TEST(scattered_sums) {
    ops_run(build_scattered, 35, 0);
}

/* What is infinite stays so, from there on. */
static void build_infinite(ops_case *c) {
    ml_ref x = tenths(c, ML_F32, "r2 n2000"), n = tenths(c, ML_F32, "n5000 c2");
    double *values = c->inputs[ml_graph_args(c->g, x)[0]];
    values[500] = INFINITY, values[2700] = -INFINITY, values[3900] = NAN;
    c->inputs[ml_graph_args(c->g, n)[0]][4001] = INFINITY;
    for (int from_end = 0; from_end < 2; from_end++) {
        int64_t args[] = {ops_axis(c, "n"), from_end};
        ml_ref y = ml_graph_add(c->g, ML_OP_CUMSUM, &x, 1, args, 2, NULL);
        ops_output_units(c, y, 8, 0, "running sums with infinities");
    }
    ml_axis over = ops_axis(c, "n");
    ops_output_units(c, ml_reduce(c->g, ML_OP_SUM, n, &over, 1), 64, 0, "sums with infinities");
}

OPS_TEST(infinite_sums) {
    ops_run(build_infinite, 34, 0);
}
