/* Every op under drawn layouts: results, gradients and updates of states are those of one rank.
 * Operands are inputs (placed by acts) or states (by params), as drawn. */
#include <stdio.h>

#include "tests/shard_cases.h"

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
                     op == ML_OP_ATTENTION_GRAD;
        if (!other && shard_case_find((ml_op)op) < 0) test_fail("%s has no case", ml_ops[op].name);
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
        if (ml_ops[ml_graph_node(g, n)->op].op_class == ML_CLASS_COLLECTIVE &&
            ml_type_find(ml_graph_type(g, n), fixture_axis(f, "h")) >= 0)
            test_fail("%s of something as wide as the hidden layer",
                      ml_ops[ml_graph_node(g, n)->op].name);
    ml_graph_free(g);
}
TEST(shard_ops, experts_traffic) {
    for (int i = 0; i < 8; i++) fixture_run(experts_traffic, (uint64_t)i);
}
