/* Every op under drawn layouts: results, gradients and updates of states are those of one rank.
 * Operands are inputs (placed by acts) or states (by params), as drawn. */
#include <stdio.h>

#include "runtime/optimize/optimize.h"
#include "tests/shard/cases.h"

enum { DRAWS = 24, FEW_DRAWS = 3 /* of elementwise ops, which are many and alike */ };

static int current;

static void name_and_check(fixture *f) {
    ml_op op = shard_case_op(current);
    snprintf(f->label, sizeof f->label, "case %d, %s", current, ml_ops[op].name);
    shard_check_drawn(f, shard_case_build(f, current), "b s d h v e k g", 4);
}

TEST(shard_ops, drawn_layouts) {
    for (current = 0; current < shard_case_count(); current++) {
        int draws = ml_ops[shard_case_op(current)].op_class == ML_CLASS_MAP ? FEW_DRAWS : DRAWS;
        for (int draw = 0; draw < draws; draw++)
            fixture_run(name_and_check, (uint64_t)(draw * 1000 + current));
    }
}

/* Every op that a script can make has a case; gradients have those of attention. */
TEST(shard_ops, complete) {
    for (int op = 0; op < ML_OP_COUNT; op++) {
        bool other = ml_ops[op].op_class == ML_CLASS_COLLECTIVE || op == ML_OP_CONST ||
                     op == ML_OP_INPUT || op == ML_OP_PARAM || op == ML_OP_COORDINATE ||
                     op == ML_OP_ATTENTION_GRAD || op == ML_OP_LINEAR_SCAN_GRAD;
        EXPECT(other || shard_case_find((ml_op)op) >= 0, "%s has no case", ml_ops[op].name);
    }
}

/* Experts over ranks: no collective between their products, forward or backward. */
static void experts_traffic(fixture *f) {
    ml_ref y = shard_case_experts(f), gradients[SUPPORT_INPUTS], wrt[SUPPORT_INPUTS];
    int count = 0;
    for (int64_t i = 0; i < f->state_count; i++)
        wrt[count++] = ml_graph_add(f->g, ML_OP_STATE, NULL, 0, &i, 1, NULL);
    ml_ref loss = fixture_loss(f, y);
    ml_autodiff(f->g, loss, wrt, count, gradients);
    ml_layout layout = shard_layout(f, "ep4 acts g params g");
    ml_roots roots = {.outputs = &loss, .output_count = 1}, local;
    roots.updates = ML_NEW_ARRAY(f->arena, ml_update, count + 1);
    for (int i = 0; i < count; i++)
        roots.updates[roots.update_count++] = (ml_update){(uint32_t)i, gradients[i]};
    CHECK(shard_check(f, &layout, &roots, 1e-9, true));
    ml_graph *g = shard_program(f, &layout, &roots, &local);
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        EXPECT(!(ml_ops[ml_graph_node(g, n)->op].op_class == ML_CLASS_COLLECTIVE &&
                 ml_type_find(ml_graph_type(g, n), fixture_axis(f, "h")) >= 0),
               "%s of something as wide as the hidden layer", ml_ops[ml_graph_node(g, n)->op].name);
    ml_graph_free(g);
}
TEST(shard_ops, experts_traffic) {
    for (int i = 0; i < 8; i++) fixture_run(experts_traffic, (uint64_t)i);
}

/* Products of one operand with three weights that lie in parts: one collective gathers the weights
 * (another one the operand's gradient, an output), and one scatters their gradients. */
static void joined_weights(fixture *f) {
    ml_axis embed = fixture_axis(f, "e");
    ml_ref h = ml_map1(f->g, ML_OP_SIN, fixture_input(f, ML_F64, "b4 s3 e8", -1, 1)), y = 0;
    ml_ref wrt[4], gradients[4];
    for (int64_t i = 0; i < 3; i++) {
        wrt[i] = fixture_state(f, ML_F64, "e8 v6 d4");
        ml_ref product = ml_map1(f->g, ML_OP_SIN, ml_dot(f->g, h, wrt[i], &embed, 1, ML_F64));
        y = i == 0 ? product : ml_map2(f->g, ML_OP_MUL, y, product);
    }
    wrt[3] = f->nodes[0];
    ml_ref loss = fixture_loss(f, y);
    ml_autodiff(f->g, loss, wrt, 4, gradients);
    static const char *const layouts[] = {"dp2 acts b params e keep", "dp4 acts b flat keep"};
    for (int i = 0; i < 2; i++) {
        ml_layout layout = shard_layout(f, layouts[i]);
        ml_ref outputs[2] = {loss, gradients[3]};
        ml_update updates[3];
        for (uint32_t k = 0; k < 3; k++) updates[k] = (ml_update){k, gradients[k]};
        ml_roots local,
            roots = {.outputs = outputs, .output_count = 2, .updates = updates, .update_count = 3};
        CHECK(shard_check(f, &layout, &roots, 1e-9, true));
        ml_graph *g = shard_program(f, &layout, &roots, &local);
        ml_graph *simple = ml_simplify(g, &local), *merged = ml_merge_products(simple, &local);
        CHECK_EQ_INT(shard_count(merged, &layout, 0, ML_COLLECTIVE_ALL_GATHER), 2);
        CHECK_EQ_INT(shard_count(merged, &layout, 0, ML_COLLECTIVE_REDUCE_SCATTER), 1);
        ml_graph_free(merged);
        ml_graph_free(simple);
        ml_graph_free(g);
    }
}
TEST(shard_ops, joined_weights) {
    for (int i = 0; i < 4; i++) fixture_run(joined_weights, (uint64_t)i);
}
