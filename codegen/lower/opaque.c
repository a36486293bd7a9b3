/* Steps that are not loops of ours: products, scatter_add, scans, collectives, routines. */
#include "codegen/lower/lower_internal.h"

#include <string.h>

#include "runtime/graph/op_interface.h"

/* The type of output i >= 1, which the graph may not name. It is the same as where it is named,
 * with axes in the same order: strides decide which library serves the step, and so its bits, and
 * of a step that is computed again the output may be named the second time alone. */
static void lower_output_type(lowering *l, ml_ref n, int i, ml_type *out) {
    const ml_op op = (ml_op)ml_graph_node(l->g, n)->op;
    if (ml_op_interfaces[op])
        ml_op_interfaces[op]->output_type(l->g, n, i, out);
    else
        out->dtype = ML_I32; /* the indices of SORT and TOP_K */
}

/* `missing`: its type where the graph does not name it. */
static uint32_t output_value(lowering *l, ml_ref n, int i, const ml_type *missing) {
    ml_ref out = views_output_node(l, n, i);
    if (out != 0) return views_value(l, out);
    return views_temporary(l, 0, missing);
}

ml_step *lower_routine_step(lowering *l, ml_step_kind kind, ml_ref n) {
    int reads = ml_graph_node(l->g, n)->source_count, writes = ml_op_outputs(l->g, n);
    uint32_t values[ML_MAX_OPERANDS];
    if (reads + writes > ML_MAX_OPERANDS)
        ml_raise(ML_INVALID, "%s with more than %d operands",
                 ml_ops[ml_graph_node(l->g, n)->op].name, ML_MAX_OPERANDS);
    for (int i = 0; i < reads; i++) values[i] = views_value(l, ml_graph_source(l->g, n, i));
    for (int i = 0; i < writes; i++) {
        ml_type type = *ml_graph_type(l->g, n);
        if (i > 0) lower_output_type(l, n, i, &type);
        values[reads + i] = output_value(l, n, i, &type);
    }
    return lower_step(l, kind, n, values, reads, values + reads, writes);
}

static void collective_step(lowering *l, ml_ref n) {
    const ml_node *node = ml_graph_node(l->g, n);
    const int64_t *args = ml_graph_args(l->g, n);
    ml_step *step = lower_routine_step(l, ML_STEP_COLLECTIVE, n);
    ml_collective_step *c = ML_NEW(l->arena, ml_collective_step);
    const ml_type *from = ml_graph_type(l->g, ml_graph_source(l->g, n, 0));
    const ml_type *to = ml_graph_type(l->g, n);
    c->kind = ml_collective_of((ml_op)node->op);
    const ml_collective_info *info = &ml_collectives[c->kind];
    c->mesh_axis = (int)args[0];
    c->ranks = args[1];
    c->dtype = (ml_dtype)to->dtype;
    c->count = ml_type_elements(info->result == ML_RESULT_SCATTERED ? to : from);
    if (info->combines) c->combine = (ml_combine)args[2];
    step->collective = c;
    step->may_alias = ML_NEW(l->arena, uint64_t);
    if (info->combines && info->result == ML_RESULT_SAME) step->may_alias[0] = 1;
}

static void scatter_step(lowering *l, const lower_group *group) {
    uint32_t reads[3], write = views_value(l, group->result);
    int count = group->addend ? 3 : 2;
    for (int i = 0; i < 2; i++) reads[i] = views_value(l, ml_graph_source(l->g, group->node, i));
    if (group->addend) reads[2] = views_value(l, group->addend);
    ml_step *step = lower_step(l, ML_STEP_KERNEL, group->node, reads, count, &write, 1);
    step->may_alias = ML_NEW(l->arena, uint64_t);
    if (group->addend) step->may_alias[0] = 1 << 2;
    ml_template_scatter_add(l->s, step);
}

static void reset_step(lowering *l, ml_ref n) {
    uint32_t reads[2], write = views_value(l, n);
    reads[0] = views_value(l, ml_graph_source(l->g, n, 0));
    reads[1] = views_value(l, ml_graph_source(l->g, n, 2));
    ml_step *step = lower_step(l, ML_STEP_KERNEL, n, reads, 2, &write, 1);
    step->may_alias = ML_NEW(l->arena, uint64_t);
    step->may_alias[0] = 1 << 1;
    ml_template_reset(l->s, step);
}

/* In place where it may be: the result is contiguous, and so must be the cache. */
static void write_rows_step(lowering *l, ml_ref n) {
    ml_step *step = lower_routine_step(l, ML_STEP_KERNEL, n);
    step->may_alias = ML_NEW(l->arena, uint64_t);
    const ml_value *cache = &l->s->values.at[step->values[0]];
    if (views_contiguous(&cache->type, cache->stride) &&
        ml_type_equal(&cache->type, ml_graph_type(l->g, n)))
        step->may_alias[0] = 1;
    step->bytes = 2 * ml_type_bytes(ml_graph_type(l->g, ml_graph_source(l->g, n, 2)));
    ml_template_write_rows(l->s, step);
}

static void transpose_step(lowering *l, const lower_group *group) {
    uint32_t read = views_value(l, group->node);
    ml_step *step = lower_step(l, ML_STEP_KERNEL, group->node, &read, 1, group->packed, 1);
    step->bytes = 2 * ml_type_bytes(&l->s->values.at[read].type);
    ml_template_transpose(l->s, step);
}

void lower_opaque_step(lowering *l, lower_group *group) {
    ml_ref n = group->node;
    if (group->turns) {
        transpose_step(l, group);
        return;
    }
    ml_op op = ml_graph_node(l->g, n)->op;
    ml_op_class op_class = ml_ops[op].op_class;
    if (op_class == ML_CLASS_COLLECTIVE)
        collective_step(l, n);
    else if (op_class == ML_CLASS_SCAN)
        ml_template_scan(l->s, lower_routine_step(l, ML_STEP_KERNEL, n));
    else if (op == ML_OP_DOT)
        gemm_step(l, group);
    else if (op == ML_OP_SCATTER_ADD)
        scatter_step(l, group);
    else if (op == ML_OP_WRITE_ROWS)
        write_rows_step(l, n);
    else if (lower_routines[op].step)
        lower_routines[op].step(l, n);
    else if (op == ML_OP_WHERE)
        reset_step(l, n);
    else
        ml_raise(ML_INTERNAL, "lowering: no step is known for %s", ml_ops[op].name);
}
