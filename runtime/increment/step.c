/* The step of a recurrence on rows: the same functions of values that have the axis of rows in the
 * place of the batch. Scans, attention and convolutions within the step are along axes of their
 * own, and become the same ops on rows. */
#include "runtime/increment/internal.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/conv/conv.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/recurrence/recurrence.h"

enum { QKV = 3 };

typedef struct {
    increment *inc;
    ml_ref owner; /* of the whole program: whose step it is */
    const lifting *by;
    const ml_ref *leaves; /* by parameter */
    ml_ref *copies;       /* by node */
} step_copy;

static _Noreturn void refuse(step_copy *c, ml_ref n) {
    increment_refuse(c->inc, c->owner, "compute it outside of the step",
                     "%s in the step of a scan has no increment yet",
                     ml_ops[ml_graph_node(c->inc->g, n)->op].name);
}

/* Source i of n on rows. */
static ml_ref on_rows(step_copy *c, ml_ref n, int i, ml_ref value) {
    ml_graph *g = c->inc->g;
    ml_type type = increment_lifted_type(ml_graph_type(g, ml_graph_source(g, n, i)), c->by);
    return ml_broadcast(g, value, &type);
}

static ml_ref copy_linear_scan(step_copy *c, ml_ref n, ml_ref *sources) {
    ml_linear_scan scan;
    ml_linear_scan_read(c->inc->g, n, &scan);
    sources[LINEAR_SCAN_STATE] = on_rows(c, n, LINEAR_SCAN_STATE, sources[LINEAR_SCAN_STATE]);
    return ml_linear_scan_new(c->inc->g, sources, &scan);
}

static ml_ref copy_conv(step_copy *c, ml_ref n, ml_ref *sources) {
    ml_graph *g = c->inc->g;
    conv_window windows[CONV_WINDOWS];
    int count = conv_read(g, n, windows);
    if (conv_gives_taps(g, n)) refuse(c, n);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), c->by);
    return ml_conv(g, on_rows(c, n, 0, sources[0]), sources[1], windows, count, &type);
}

static ml_ref copy_attention(step_copy *c, ml_ref n, ml_ref *sources) {
    ml_graph *g = c->inc->g;
    ml_attention_args args;
    int count = ml_graph_node(g, n)->source_count;
    ml_attention_read(g, n, &args);
    if (args.pieces) refuse(c, n);
    for (int i = 0; i < QKV; i++) sources[i] = on_rows(c, n, i, sources[i]);
    args.score = increment_score_function(c->inc, n, sources, count, &args);
    return ml_attention(g, sources, count, &args);
}

/* The parameter of the step within for input i, whose value becomes {axis, row, ...}. */
static ml_recurrence_pair inner_input(step_copy *c, ml_ref n, const ml_recurrence *r, int i,
                                      ml_ref value) {
    ml_graph *g = c->inc->g;
    ml_type slice = increment_lifted_type(ml_graph_type(g, ml_graph_source(g, n, i)), c->by);
    slice = increment_without(&slice, r->axis, 0);
    ml_type type = increment_plain((ml_dtype)slice.dtype);
    increment_push(&type, r->axis, r->length);
    for (int k = 0; k < slice.rank; k++) increment_push(&type, slice.axis[k], slice.size[k]);
    return (ml_recurrence_pair){ml_recurrence_parameter(g, &slice), ml_broadcast(g, value, &type)};
}

static ml_ref copy_recurrence(step_copy *c, ml_ref n, ml_ref *sources) {
    increment *inc = c->inc;
    ml_graph *g = inc->g;
    ml_recurrence r;
    ml_recurrence_read(g, n, &r);
    ml_recurrence_pair *pairs =
        ML_NEW_ARRAY(inc->arena, ml_recurrence_pair, r.inputs + r.states + 1);
    ml_ref *roots = ML_NEW_ARRAY(inc->arena, ml_ref, ml_recurrence_roots(&r));
    for (int i = 0; i < r.inputs + r.states; i++) {
        if (i < r.inputs)
            pairs[i] = inner_input(c, n, &r, i, sources[i]);
        else {
            ml_ref value = on_rows(c, n, i, sources[i]);
            pairs[i].parameter = ml_recurrence_parameter(g, ml_graph_type(g, value));
            pairs[i].value = value;
        }
        sources[i] = pairs[i].parameter;
    }
    increment_step(inc, c->owner, n, c->by, sources, roots);
    ml_recurrence_step step = {.axis = r.axis,
                               .reverse = r.reverse,
                               .sums_stay = true,
                               .length = r.length,
                               .inputs = pairs,
                               .states = pairs + r.inputs,
                               .next = roots,
                               .stacked = roots + r.states,
                               .summed = roots + r.states + r.stacked,
                               .input_count = r.inputs,
                               .state_count = r.states,
                               .stacked_count = r.stacked,
                               .summed_count = r.summed};
    return ml_recurrence_new(g, &step);
}

static ml_ref copy_node(step_copy *c, ml_ref n) {
    increment *inc = c->inc;
    ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    ml_op op = (ml_op)node.op;
    bool of_batch = increment_names(g, n, c->by->batch);
    if (op == ML_OP_PARAM) return c->leaves[ml_graph_args(g, n)[0]];
    if (op == ML_OP_CONST || op == ML_OP_IOTA)
        return ml_graph_add(g, op, NULL, 0, ml_graph_args(g, n), node.arg_count,
                            ml_graph_type(g, n));
    ml_ref *sources = ML_NEW_ARRAY(inc->arena, ml_ref, node.source_count);
    for (int i = 0; i < node.source_count; i++) sources[i] = c->copies[ml_graph_source(g, n, i)];
    if (op == ML_OP_OUT) return ml_out(g, sources[0], (int)ml_graph_args(g, n)[0]);
    if (op == ML_OP_LINEAR_SCAN && !of_batch) return copy_linear_scan(c, n, sources);
    if (op == ML_OP_RECURRENCE && !of_batch) return copy_recurrence(c, n, sources);
    if (op == ML_OP_ATTENTION && !of_batch) return copy_attention(c, n, sources);
    if (op == ML_OP_CONV && !of_batch) return copy_conv(c, n, sources);
    bool reduces = ml_ops[op].op_class == ML_CLASS_REDUCE || op == ML_OP_RENAME;
    if (!increment_by_parts(g, n, 0) || (of_batch && !reduces)) refuse(c, n);
    return increment_lift(inc, n, sources, c->by);
}

void increment_step(increment *inc, ml_ref owner, ml_ref n, const lifting *by, const ml_ref *leaves,
                    ml_ref *roots) {
    ml_graph *g = inc->g;
    step_copy c = {inc, owner, by, leaves, NULL};
    ml_recurrence r;
    ml_recurrence_read(g, n, &r);
    int count = ml_recurrence_roots(&r);
    ml_ref end = 0;
    for (int i = 0; i < count; i++)
        if (ml_recurrence_root(g, n, i) >= end) end = ml_recurrence_root(g, n, i) + 1;
    bool *reached = ML_NEW_ARRAY(inc->arena, bool, end);
    c.copies = ML_NEW_ARRAY(inc->arena, ml_ref, end);
    for (int i = 0; i < count; i++) reached[ml_recurrence_root(g, n, i)] = true;
    for (ml_ref k = end - 1; k > 0; k--)
        for (int i = 0; reached[k] && i < ml_graph_node(g, k)->source_count; i++)
            reached[ml_graph_source(g, k, i)] = true;
    for (ml_ref k = 1; k < end; k++)
        if (reached[k]) c.copies[k] = copy_node(&c, k);
    for (int i = 0; i < count; i++) {
        ml_ref root = ml_recurrence_root(g, n, i);
        ml_type type = increment_lifted_type(ml_graph_type(g, root), by);
        roots[i] = ml_broadcast(g, c.copies[root], &type);
    }
}
