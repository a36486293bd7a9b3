/* Logits in f32 (runtime/graph/wide.h): which nodes are computed in f32, and their values. */
#include <math.h>

#include "runtime/graph/wide.h"
#include "tests/passes/support.h"

/* Behind a soft cap: a product with f32 sums below, and nothing rounded on the way. */
static void capped_logits(fixture *f) {
    ml_graph *g = f->g;
    ml_ref x = fixture_input(f, ML_BF16, "r3 k8", -1, 1),
           w = fixture_input(f, ML_BF16, "v5 k8", -1, 1);
    ml_axis k = fixture_axis(f, "k");
    ml_ref y = ml_dot(g, x, w, &k, 1, ML_BF16), half = ml_const(g, ML_BF16, 0.5);
    ml_ref capped = ml_map1(g, ML_OP_TANH, ml_map2(g, ML_OP_MUL, y, half));
    ml_ref wide = ml_wide(g, capped);
    CHECK_EQ_INT(ml_graph_type(g, capped)->dtype, ML_BF16);
    CHECK_EQ_INT(ml_graph_type(g, wide)->dtype, ML_F32);
    ml_ref at = wide;
    while (ml_graph_node(g, at)->op != ML_OP_DOT) {
        CHECK(ml_graph_node(g, at)->op != ML_OP_CAST);
        at = ml_graph_source(g, at, 0);
        REQUIRE(at != 0);
    }
    CHECK_EQ_INT(ml_graph_type(g, at)->dtype, ML_F32);
    CHECK_EQ_INT(ml_graph_source(g, at, 0), x);
    const double *sums = fixture_value(f, g, at), *values = fixture_value(f, g, wide);
    for (int i = 0; i < 15; i++) CHECK_NEAR(values[i], tanh(sums[i] / 2), 1e-6);
    CHECK_EQ_INT(ml_wide(g, wide), wide); /* it is f32 already */
    CHECK_EQ_INT(ml_graph_node(g, ml_wide(g, x))->op, ML_OP_CAST);
}

TEST(graph, wide) {
    fixture_run(capped_logits, 1);
}
