/* The short forms: what they fold and drop. */
#include <math.h>

#include "tests/graph/support.h"

static void check_constant(ml_graph *g, ml_ref n, double expected, const char *type) {
    double value;
    if (CHECK(ml_graph_constant(g, n, &value))) CHECK_NEAR(value, expected, 1e-7);
    CHECK_TEXT(graph_type_text(g, n), type);
}

static void constants_fold(ml_graph *g) {
    ml_ref two = ml_const(g, ML_F32, 2), three = ml_const(g, ML_F32, 3);
    ml_type type = graph_axes(g, ML_F32, "b2 s4");
    check_constant(g, ml_map2(g, ML_OP_ADD, two, three), 5, "f32");
    check_constant(g, ml_map2(g, ML_OP_POW, two, three), 8, "f32");
    check_constant(g, ml_map2(g, ML_OP_DIV, ml_broadcast(g, two, &type), three), 2.0 / 3,
                   "f32[b=2, s=4]");
    check_constant(g, ml_map1(g, ML_OP_EXP, two), exp(2), "f32");
    check_constant(g, ml_map2(g, ML_OP_LT, two, three), 1, "bool");
    check_constant(g, ml_map1(g, ML_OP_NOT, ml_const_int(g, ML_BOOL, 1)), 0, "bool");
    check_constant(g, ml_cast(g, ml_const(g, ML_F32, 2.75), ML_I32), 2, "i32");
    check_constant(g, ml_cast(g, ml_const(g, ML_F32, 3e9), ML_I32), INT32_MAX, "i32");
    check_constant(g, ml_cast(g, ml_const(g, ML_F64, -INFINITY), ML_I32), INT32_MIN, "i32");
    check_constant(g, ml_cast(g, ml_const(g, ML_F32, NAN), ML_I64), 0, "i64");
    check_constant(g, ml_cast(g, ml_const_int(g, ML_I64, 7), ML_BF16), 7, "bf16");
    check_constant(g,
                   ml_map2(g, ML_OP_MOD, ml_const_int(g, ML_I32, -7), ml_const_int(g, ML_I32, 3)),
                   2, "i32");
    check_constant(g,
                   ml_map2(g, ML_OP_IDIV, ml_const_int(g, ML_I32, -7), ml_const_int(g, ML_I32, 3)),
                   -3, "i32");
    check_constant(g, ml_where(g, ml_const_int(g, ML_BOOL, 0), two, ml_broadcast(g, three, &type)),
                   3, "f32[b=2, s=4]");
    double value;
    ml_ref large = ml_const_int(g, ML_I64, INT64_MAX - 1), one = ml_const_int(g, ML_I64, 1);
    CHECK(!ml_graph_constant(g, ml_map2(g, ML_OP_SUB, large, one), &value)); /* inexact */
    CHECK(!ml_graph_constant(g, ml_cast(g, ml_const(g, ML_F64, 1e30), ML_I64), &value));
    CHECK(!ml_graph_constant(g, ml_map2(g, ML_OP_MOD, one, ml_const_int(g, ML_I64, 0)), &value));
}
TEST(graph_build, constants_fold) {
    graph_run(constants_fold);
}

static void arithmetic_drops(ml_graph *g) {
    ml_ref x = graph_input(g, ML_F32, "b2 s4"), i = graph_input(g, ML_I32, "s4");
    ml_ref zero = ml_const(g, ML_F32, 0), one = ml_const(g, ML_F32, 1);
    ml_type wide = graph_axes(g, ML_F32, "n3 b2 s4");
    CHECK_EQ_INT(ml_map2(g, ML_OP_ADD, x, zero), x);
    CHECK_EQ_INT(ml_map2(g, ML_OP_ADD, zero, x), x);
    CHECK_EQ_INT(ml_map2(g, ML_OP_SUB, x, zero), x);
    CHECK_EQ_INT(ml_map2(g, ML_OP_MUL, one, x), x);
    CHECK_EQ_INT(ml_map2(g, ML_OP_DIV, x, one), x);
    CHECK_EQ_INT(ml_map2(g, ML_OP_POW, x, one), x);
    CHECK_EQ_INT(ml_graph_node(g, ml_map2(g, ML_OP_SUB, zero, x))->op, ML_OP_NEG);
    CHECK_EQ_INT(ml_graph_node(g, ml_map2(g, ML_OP_SUB, one, x))->op, ML_OP_SUB);
    CHECK_EQ_INT(ml_graph_node(g, ml_map2(g, ML_OP_MUL, x, zero))->op, ML_OP_MUL); /* NaN * 0 */
    check_constant(g, ml_map2(g, ML_OP_MUL, i, ml_const_int(g, ML_I32, 0)), 0, "i32[s=4]");
    CHECK_EQ_INT(ml_map1(g, ML_OP_NEG, ml_map1(g, ML_OP_NEG, x)), x);
    ml_ref spread = ml_map2(g, ML_OP_ADD, x, ml_broadcast(g, zero, &wide));
    CHECK_TEXT(graph_type_text(g, spread), "f32[n=3, b=2, s=4]");
    CHECK_EQ_INT(ml_graph_node(g, spread)->op, ML_OP_BROADCAST);
    /* a wider constant still promotes */
    CHECK_TEXT(graph_type_text(g, ml_map2(g, ML_OP_ADD, graph_input(g, ML_BF16, "s4"), zero)),
               "f32[s=4]");
}
TEST(graph_build, arithmetic_drops) {
    graph_run(arithmetic_drops);
}

static void movements_drop(ml_graph *g) {
    ml_ref x = graph_input(g, ML_F32, "b2 s4"), h = graph_input(g, ML_BF16, "b2 s4");
    ml_axis b = graph_axis(g, "b"), s = graph_axis(g, "s");
    ml_type same = graph_axes(g, ML_F32, "b2 s4"), turned = graph_axes(g, ML_F32, "s4 b2");
    ml_type wide = graph_axes(g, ML_F32, "n3 b2 s4"), wider = graph_axes(g, ML_F32, "m2 b2 s4 n3");
    CHECK_EQ_INT(ml_broadcast(g, x, &same), x);
    CHECK_EQ_INT(ml_permute(g, ml_permute(g, x, &turned), &same), x);
    CHECK_EQ_INT(ml_graph_node(g, ml_broadcast(g, x, &turned))->op, ML_OP_PERMUTE);
    ml_ref twice = ml_broadcast(g, ml_broadcast(g, x, &wide), &wider);
    CHECK_EQ_INT(ml_graph_source(g, twice, 0), x);
    CHECK_EQ_INT(ml_rename(g, x, b, b), x);
    CHECK_EQ_INT(ml_slice(g, x, s, 0, 4), x);
    CHECK_EQ_INT(ml_pad(g, x, s, 0, 0), x);
    CHECK_EQ_INT(ml_reduce(g, ML_OP_SUM, x, NULL, 0), x);
    CHECK_EQ_INT(ml_concat(g, &x, 1, s), x);
    CHECK_EQ_INT(ml_out(g, x, 0), x);
    CHECK_EQ_INT(ml_cast(g, x, ML_F32), x);
    CHECK_EQ_INT(ml_cast(g, ml_cast(g, h, ML_F32), ML_BF16), h);
    CHECK_EQ_INT(ml_graph_source(g, ml_cast(g, ml_cast(g, h, ML_F32), ML_F64), 0), h);
    /* through fewer bits: both stay */
    CHECK(ml_graph_source(g, ml_cast(g, ml_cast(g, x, ML_BF16), ML_F32), 0) != x);
}
TEST(graph_build, movements_drop) {
    graph_run(movements_drop);
}
