/* How the routines of runtime/ops become steps: a row of the table for each. */
#include "codegen/lower/lower_internal.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/cached_attention/cached_attention.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/ragged/ragged.h"

/* ---- Attention ------------------------------------------------------------------------------- */

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
    ml_step *step = lower_routine_step(l, ML_STEP_ATTENTION, n);
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

/* Tensor cores' kernels of attention read whole rows: other operands are copied. */
static void require_rows(lowering *l, ml_ref n) {
    if (l->target->kind != ML_TARGET_CUDA) return;
    ml_attention_args args;
    ml_attention_read(l->g, n, &args);
    bool gradient = ml_graph_node(l->g, n)->op == ML_OP_ATTENTION_GRAD;
    for (int i = 0; i < (gradient ? 6 : 3); i++) {
        ml_ref source = ml_graph_source(l->g, n, i);
        const ml_type *type = ml_graph_type(l->g, source);
        int at = ml_type_find(type, args.head_dim); /* sums of exponentials have none */
        if (at < 0 || type->size[at] % 8 != 0 || type->dtype != ML_BF16) continue;
        bool moves = ml_ops[ml_graph_node(l->g, source)->op].op_class == ML_CLASS_MOVE;
        if (moves && !lower_in_memory(l, source) && !fuse_has_rows(l, source, args.head_dim))
            l->info[source].role = LOWER_ROOT;
    }
}

/* Reads of the pools what the table lists at most. */
static void cached_attention_step(lowering *l, ml_ref n) {
    ml_step *step = lower_routine_step(l, ML_STEP_KERNEL, n);
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

/* ---- Others ---------------------------------------------------------------------------------- */

static void linear_scan_step(lowering *l, ml_ref n) {
    ml_linear_scan scan;
    ml_linear_scan_read(l->g, n, &scan);
    ml_step *step = lower_routine_step(l, ML_STEP_KERNEL, n);
    if (ml_linear_scan_is_scalar(&scan))
        ml_template_linear_scan(l->s, step);
    else
        ml_template_delta_scan(l->s, step);
}

static void ragged_step(lowering *l, ml_ref n) {
    ml_template_ragged(l->s, lower_routine_step(l, ML_STEP_KERNEL, n));
}

const lower_routine lower_routines[ML_OP_COUNT] = {
    [ML_OP_ATTENTION] = {attention_step, require_rows, .any_strides = true},
    [ML_OP_ATTENTION_GRAD] = {attention_step, require_rows, .any_strides = true},
    [ML_OP_CACHED_ATTENTION] = {cached_attention_step},
    [ML_OP_RAGGED_DOT] = {ragged_step},
    [ML_OP_RAGGED_OUTER] = {ragged_step},
    [ML_OP_LINEAR_SCAN] = {linear_scan_step},
    [ML_OP_LINEAR_SCAN_GRAD] = {linear_scan_step},
    [ML_OP_RECURRENCE] = {lower_recurrence_step, .by_position = true},
};
