/* Types of lifted nodes, and which axes an op names. */
#include "runtime/increment/internal.h"

ml_type increment_plain(ml_dtype dtype) {
    return (ml_type){.dtype = (uint8_t)dtype};
}

void increment_push(ml_type *t, ml_axis axis, int64_t size) {
    if (t->rank == ML_MAX_AXES)
        ml_raise(ML_INVALID, "an increment would have more than %d axes", ML_MAX_AXES);
    t->axis[t->rank] = axis;
    t->size[t->rank++] = size;
}

ml_type increment_without(const ml_type *t, ml_axis a, ml_axis b) {
    ml_type out = increment_plain((ml_dtype)t->dtype);
    for (int i = 0; i < t->rank; i++)
        if (t->axis[i] != a && t->axis[i] != b) increment_push(&out, t->axis[i], t->size[i]);
    return out;
}

ml_type increment_lifted_type(const ml_type *t, const lifting *by) {
    ml_type out = by->by, rest = increment_without(t, by->axis, by->batch);
    rest = increment_without(&rest, by->outer, 0);
    out.dtype = t->dtype;
    for (int i = 0; i < rest.rank; i++) increment_push(&out, rest.axis[i], rest.size[i]);
    return out;
}

bool increment_names(const ml_graph *g, ml_ref n, ml_axis axis) {
    const ml_node *node = ml_graph_node(g, n);
    for (int i = 0; i < node->arg_count && axis; i++) {
        ml_arg_kind kind = ml_op_arg_of((ml_op)node->op, i)->kind;
        if ((ml_arg_is_axis(kind) || kind == ML_ARG_AXIS_OR_0) && ml_graph_args(g, n)[i] == axis)
            return true;
    }
    return false;
}

bool increment_by_parts(const ml_graph *g, ml_ref n, ml_axis axis) {
    ml_op op = (ml_op)ml_graph_node(g, n)->op;
    if (op == ML_OP_RANDOM) return false;
    return ml_op_is(op, ML_BY_PARTS) && !increment_names(g, n, axis);
}

ml_ref increment_squeeze(ml_graph *g, ml_ref n, ml_axis axis) {
    if (!axis || ml_type_find(ml_graph_type(g, n), axis) < 0) return n;
    if (ml_graph_node(g, n)->op == ML_OP_BROADCAST) {
        ml_ref inner = ml_graph_source(g, n, 0);
        ml_type t = increment_without(ml_graph_type(g, n), axis, 0);
        if (ml_type_find(ml_graph_type(g, inner), axis) < 0) return ml_broadcast(g, inner, &t);
    }
    return ml_gather(g, n, ml_const_int(g, ML_I32, 0), axis);
}

static ml_axis other_name(const ml_graph *g, ml_ref n, ml_axis axis, int from) {
    const ml_node *node = ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    for (int i = 0; i < node->arg_count && node->op == ML_OP_RENAME; i += 2)
        if (args[i + from] == axis) return (ml_axis)args[i + 1 - from];
    return axis;
}

ml_axis increment_renamed(const ml_graph *g, ml_ref n, ml_axis axis) {
    return other_name(g, n, axis, 0);
}

ml_axis increment_before(const ml_graph *g, ml_ref n, ml_axis axis) {
    return other_name(g, n, axis, 1);
}

ml_axis increment_inner(const ml_graph *g, ml_ref n, ml_axis axis) {
    return ml_type_find(ml_graph_type(g, n), axis) < 0 ? 0 : increment_before(g, n, axis);
}

place increment_inner_place(const increment *inc, ml_ref n, const place *p) {
    place out = *p;
    if (ml_graph_node(inc->g, n)->op != ML_OP_RENAME) return out;
    out.axis = increment_inner(inc->g, n, p->axis);
    out.batch = increment_inner(inc->g, n, p->batch);
    out.outer = increment_inner(inc->g, n, p->outer);
    if (p->outer && !out.outer) out.outer = inc->past; /* which no operand has */
    return out;
}
