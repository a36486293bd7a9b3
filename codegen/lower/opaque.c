/* Steps that are not loops of ours: products, attention, scatter_add, scans. */
#include "codegen/lower/lower_internal.h"

#include <string.h>

#include "runtime/ops/cached_attention/cached_attention.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/ragged/ragged.h"

static void remove_axis(ml_type *type, ml_axis axis) {
    int at = ml_type_find(type, axis);
    if (at < 0) return;
    type->rank--;
    for (int i = at; i < type->rank; i++) {
        type->axis[i] = type->axis[i + 1];
        type->size[i] = type->size[i + 1];
    }
}

/* The type of an output that the graph does not name. */
static ml_type missing_type(lowering *l, ml_ref n, int i) {
    int op = ml_graph_node(l->g, n)->op;
    ml_type type = *ml_graph_type(l->g, n);
    if (op == ML_OP_ATTENTION) {
        ml_attention_args args;
        ml_attention_read(l->g, n, &args);
        remove_axis(&type, args.head_dim);
        type.dtype = type.dtype == ML_F64 ? ML_F64 : ML_F32;
    } else if (op == ML_OP_ATTENTION_GRAD) {
        type = *ml_graph_type(l->g, ml_graph_source(l->g, n, i));
    } else if (ml_op_is_linear_scan((ml_op)op)) {
        ml_linear_scan_type(l->g, n, i, &type);
    } else if (op == ML_OP_RAGGED_DOT) {
        ragged_gated_type(l->g, n, &type);
    } else if (op == ML_OP_RAGGED_OUTER) {
        ragged_squares_type(l->g, n, &type);
    } else {
        type.dtype = ML_I32; /* the indices of SORT and TOP_K */
    }
    return type;
}

static uint32_t output_value(lowering *l, ml_ref n, int i) {
    ml_ref out = views_output_node(l, n, i);
    if (out != 0) return views_value(l, out);
    ml_type type = missing_type(l, n, i);
    return views_temporary(l, 0, &type);
}

static ml_step *routine_step(lowering *l, ml_step_kind kind, ml_ref n) {
    int reads = ml_graph_node(l->g, n)->source_count, writes = ml_op_outputs(l->g, n);
    uint32_t values[ML_MAX_OPERANDS];
    if (reads + writes > ML_MAX_OPERANDS)
        ml_raise(ML_INVALID, "%s with more than %d operands",
                 ml_ops[ml_graph_node(l->g, n)->op].name, ML_MAX_OPERANDS);
    for (int i = 0; i < reads; i++) values[i] = views_value(l, ml_graph_source(l->g, n, i));
    for (int i = 0; i < writes; i++) values[reads + i] = output_value(l, n, i);
    return lower_step(l, kind, n, values, reads, values + reads, writes);
}

static int64_t size_of(const ml_type *type, ml_axis axis) {
    int at = ml_type_find(type, axis);
    return at < 0 ? 1 : type->size[at];
}

static ml_attention_strides operand_strides(const ml_value *value, const ml_axis *batch,
                                            ml_axis head, ml_axis seq, ml_axis dim) {
    ml_attention_strides out;
    for (int i = 0; i < 3; i++)
        out.batch[i] = batch[i] ? views_axis_stride(&value->type, value->stride, batch[i]) : 0;
    out.head = views_axis_stride(&value->type, value->stride, head);
    out.seq = views_axis_stride(&value->type, value->stride, seq);
    out.dim = dim ? views_axis_stride(&value->type, value->stride, dim) : 0;
    return out;
}

static void attention_batch(lowering *l, const ml_type *q, ml_attention_step *a, ml_axis *batch) {
    int count = 0;
    (void)l;
    for (int i = 0; i < q->rank; i++) {
        ml_axis axis = q->axis[i];
        if (axis == a->args.seq || axis == a->args.heads || axis == a->args.head_dim) continue;
        if (count == 3) ml_raise(ML_INVALID, "attention over more than 3 batch axes");
        batch[count] = axis;
        a->batch[count++] = q->size[i];
    }
    for (; count < 3; count++) {
        batch[count] = 0;
        a->batch[count] = 1;
    }
}

static void attention_step(lowering *l, ml_ref n) {
    const ml_graph *g = l->g;
    ml_step *step = routine_step(l, ML_STEP_ATTENTION, n);
    ml_attention_step *a = ML_NEW(l->arena, ml_attention_step);
    const ml_type *q = ml_graph_type(g, ml_graph_source(g, n, 0));
    const ml_type *k = ml_graph_type(g, ml_graph_source(g, n, 1));
    const ml_type *v = ml_graph_type(g, ml_graph_source(g, n, 2));
    ml_axis batch[3];
    ml_attention_read(g, n, &a->args);
    const ml_attention_args *args = &a->args;
    a->graph = g;
    a->node = n;
    a->backward = ml_graph_node(g, n)->op == ML_OP_ATTENTION_GRAD;
    attention_batch(l, q, a, batch);
    a->heads = size_of(q, args->heads);
    a->kv_heads = size_of(k, args->kv_heads);
    a->seq = size_of(q, args->seq);
    a->kv_seq = size_of(k, args->kv_seq);
    a->head_dim = size_of(q, args->head_dim);
    a->value_dim = size_of(v, args->head_dim);
    a->dtype = (ml_dtype)q->dtype;
    a->no_cudnn = l->target->no_cudnn;
    a->nondeterministic = l->target->nondeterministic;
    a->operand_count = step->read_count + step->write_count;
    int own = ml_attention_captured(g, n); /* what was captured comes after the others */
    for (int i = 0; i < a->operand_count; i++) {
        const ml_value *value = &l->s->values.at[step->values[i]];
        int write = i - step->read_count;
        bool keys = write >= 0 ? a->backward && write > 0 : i == 1 || i == 2;
        bool lse = write >= 0 ? !a->backward && write == 1 : a->backward && i == 4;
        bool captured = write < 0 && i >= own;
        a->strides[i] = operand_strides(value, batch, keys ? args->kv_heads : args->heads,
                                        keys ? args->kv_seq : args->seq,
                                        captured ? args->kv_seq
                                        : lse    ? 0
                                                 : args->head_dim);
    }
    step->attention = a;
    ml_template_attention(l->s, step);
}

static void linear_scan_step(lowering *l, ml_ref n) {
    ml_linear_scan scan;
    ml_linear_scan_read(l->g, n, &scan);
    ml_step *step = routine_step(l, ML_STEP_KERNEL, n);
    if (ml_linear_scan_is_scalar(&scan))
        ml_template_linear_scan(l->s, step);
    else
        ml_template_delta_scan(l->s, step);
}

static void collective_step(lowering *l, ml_ref n) {
    const ml_node *node = ml_graph_node(l->g, n);
    const int64_t *args = ml_graph_args(l->g, n);
    ml_step *step = routine_step(l, ML_STEP_COLLECTIVE, n);
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
    ml_step *step = routine_step(l, ML_STEP_KERNEL, n);
    step->may_alias = ML_NEW(l->arena, uint64_t);
    const ml_value *cache = &l->s->values.at[step->values[0]];
    if (views_contiguous(&cache->type, cache->stride) &&
        ml_type_equal(&cache->type, ml_graph_type(l->g, n)))
        step->may_alias[0] = 1;
    step->bytes = 2 * ml_type_bytes(ml_graph_type(l->g, ml_graph_source(l->g, n, 2)));
    ml_template_write_rows(l->s, step);
}

/* Reads of the pools what the table lists at most. */
static void cached_attention_step(lowering *l, ml_ref n) {
    ml_step *step = routine_step(l, ML_STEP_KERNEL, n);
    ml_cached_attention_args args;
    ml_cached_attention_read(l->g, n, &args);
    const ml_type *table = ml_graph_type(l->g, ml_graph_source(l->g, n, CACHED_TABLE));
    step->bytes = ml_type_bytes(ml_graph_type(l->g, ml_graph_source(l->g, n, CACHED_Q))) +
                  ml_type_bytes(ml_graph_type(l->g, n));
    for (int i = CACHED_K; i <= CACHED_V; i++) {
        const ml_type *pool = ml_graph_type(l->g, ml_graph_source(l->g, n, i));
        step->bytes += ml_type_bytes(pool) / ml_type_size(pool, args.pool) *
                       ml_type_elements(table) * args.block;
    }
    ml_template_cached_attention(l->s, step);
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
        ml_template_scan(l->s, routine_step(l, ML_STEP_KERNEL, n));
    else if (op == ML_OP_DOT)
        gemm_step(l, group);
    else if (op == ML_OP_SCATTER_ADD)
        scatter_step(l, group);
    else if (op == ML_OP_WRITE_ROWS)
        write_rows_step(l, n);
    else if (op == ML_OP_CACHED_ATTENTION)
        cached_attention_step(l, n);
    else if (ml_op_attends(op))
        attention_step(l, n);
    else if (ml_op_is_ragged(op))
        ml_template_ragged(l->s, routine_step(l, ML_STEP_KERNEL, n));
    else if (ml_op_is_linear_scan(op))
        linear_scan_step(l, n);
    else if (op == ML_OP_RECURRENCE)
        lower_recurrence_step(l, n);
    else if (op == ML_OP_WHERE)
        reset_step(l, n);
    else
        ml_raise(ML_INTERNAL, "lowering: no step is known for %s", ml_ops[op].name);
}
