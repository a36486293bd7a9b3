/* Values of rows and of what is dispatched: the new positions of all sequences together. */
#include "runtime/increment/internal.h"
#include "runtime/ops/ragged/ragged.h"

enum { NO_GROUP = INT32_MAX };

/* Dispatched: the new rows, of all sequences, as one axis. */
static lifting dispatch_by(const increment *inc, const place *p, at_positions at) {
    lifting by = {p->axis, p->batch, p->outer, increment_plain(ML_I32)};
    increment_push(&by.by, p->axis, inc->rows * inc->size[at] * increment_each(p));
    return by;
}

/* bool {row, new} */
static ml_ref valid_at(increment *inc, at_positions at) {
    ml_type type = *ml_graph_type(inc->g, inc->position[at]);
    type.dtype = ML_BOOL;
    return at == AT_NEW ? inc->valid : ml_broadcast(inc->g, inc->active, &type);
}

/* {row, new, ...} of s, whose rows are those of positions: {axis, ...}. */
static ml_ref joined(increment *inc, ml_ref s, ml_ref value, at_positions at) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[s];
    lifting by = increment_by(inc, &inc->places[s], at);
    ml_type type = increment_lifted_type(ml_graph_type(g, s), &by);
    value = ml_broadcast(g, value, &type);
    value = ml_merge(g, value, inc->row, inc->fresh, inc->row);
    if (p->inner) return ml_merge(g, value, inc->row, p->axis, p->axis);
    return ml_rename(g, value, inc->row, p->axis);
}

/* {axis, ...} of n: {row, new, ...}. */
static ml_ref parted(increment *inc, ml_ref n, ml_ref value, at_positions at) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[n];
    lifting by = increment_by(inc, &inc->places[n], at);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
    int64_t size = inc->size[at];
    value = ml_split(g, value, p->axis, inc->row, inc->rows, inc->past, size * increment_each(p));
    if (p->inner)
        value = ml_split(g, value, inc->past, inc->fresh, size, p->axis, p->inner);
    else
        value = ml_rename(g, value, inc->past, inc->fresh);
    return ml_broadcast(g, value, &type);
}

static ml_ref sorted_value(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    ml_ref keys = ml_graph_source(g, n, 0);
    ml_ref value =
        ml_where(g, valid_at(inc, at), inc->values[at][keys], ml_const_int(g, ML_I32, NO_GROUP));
    value = joined(inc, keys, value, at);
    return ml_graph_add(g, ML_OP_SORT, &value, 1, ml_graph_args(g, n), 2, NULL);
}

/* How many of the new rows that are valid have each key. */
static ml_ref counted_value(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    ml_ref s = ml_graph_source(g, n, 0);
    const ml_node node = *ml_graph_node(g, n);
    const place *p = &inc->places[s];
    ml_axis axes[ML_MAX_AXES + 2] = {inc->row, inc->fresh};
    int count = 2;
    for (int i = 0; i < node.arg_count; i++) {
        ml_axis axis = (ml_axis)ml_graph_args(g, n)[i];
        if (axis != p->batch && (axis != p->axis || p->inner)) axes[count++] = axis;
    }
    ml_ref none = ml_const(g, (ml_dtype)ml_graph_type(g, n)->dtype, 0);
    ml_ref value = ml_where(g, valid_at(inc, at), inc->values[at][s], none);
    return ml_reduce(g, ML_OP_SUM, value, axes, count);
}

static ml_ref scattered_value(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[n];
    lifting by = dispatch_by(inc, p, at);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
    ml_ref index = increment_operand(inc, n, 0, at), value = increment_operand(inc, n, 1, at);
    return parted(inc, n, ml_scatter_add(g, index, value, p->axis, &type), at);
}

/* Splits and merges of an axis of several elements a position. */
static ml_ref regrouped_value(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    const int64_t *args = ml_graph_args(g, n);
    ml_ref s = ml_graph_source(g, n, 0), value = inc->values[at][s];
    const place *from = &inc->places[s], *to = &inc->places[n];
    if (increment_is(inc, n, ML_OP_SPLIT)) {
        if (!to->inner) return ml_rename(g, value, from->axis, (ml_axis)args[3]);
        return ml_split(g, value, from->axis, to->axis, to->inner, (ml_axis)args[3], args[4]);
    }
    ml_axis other = (ml_axis)args[args[0] == from->axis];
    lifting by = increment_by(inc, &inc->places[s], at);
    ml_type type = increment_lifted_type(ml_graph_type(g, s), &by);
    if (!from->inner) return ml_rename(g, value, other, to->axis);
    if (ml_type_find(&type, other) < 0) return ml_rename(g, value, from->axis, to->axis);
    value = ml_broadcast(g, value, &type);
    return ml_merge(g, value, from->axis, other, to->axis);
}

static bool regroups(const increment *inc, ml_ref n) {
    if (!increment_is(inc, n, ML_OP_SPLIT) && !increment_is(inc, n, ML_OP_MERGE)) return false;
    const place *s = increment_source_place(inc, n, 0);
    return (s->inner || inc->places[n].inner) && increment_names(inc->g, n, s->axis);
}

/* Each group's rows times its matrix: n is the product over all places of groups. */
static ml_ref product_value(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[n];
    int rows = increment_source_place(inc, n, 0)->kind != ROWS_PLACED;
    ml_ref counts = inc->values[at][p->counts], ends;
    const int64_t along[2] = {p->groups, 0};
    ends = ml_graph_add(g, ML_OP_CUMSUM, &counts, 1, along, 2, NULL);
    ml_ref sources[] = {inc->values[at][ml_graph_source(g, n, rows)],
                        ml_graph_source(g, n, 1 - rows), ml_map2(g, ML_OP_SUB, ends, counts), ends};
    return ml_ragged_dot(g, sources, inc->places[p->since].axis, (ml_axis)ml_graph_args(g, n)[0],
                         (ml_dtype)ml_graph_type(g, n)->dtype);
}

/* The sorted rows, back in the order of positions. */
static ml_ref returned_value(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[n];
    lifting by = dispatch_by(inc, p, at);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
    ml_ref value = inc->values[at][ml_graph_source(g, n, 0)];
    ml_ref order = ml_out(g, inc->values[at][p->since], 1);
    return parted(inc, n, ml_scatter_add(g, order, value, p->axis, &type), at);
}

/* Of places of groups: in increments, rows in the order of their sort. 0: computed as others. */
static ml_ref placed_value(increment *inc, ml_ref n, at_positions at) {
    const ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    const place *p = &inc->places[n];
    const int first = op == ML_OP_WHERE;
    ml_ref value = inc->values[at][ml_graph_source(inc->g, n, first)];
    if (p->kind == ROWS_RETURNED) {
        bool returns = increment_source_place(inc, n, 0)->kind == ROWS_PLACED;
        return returns ? returned_value(inc, n, at) : value;
    }
    if (op == ML_OP_DOT) return product_value(inc, n, at);
    const place *mask = increment_source_place(inc, n, 0);
    bool same = op == ML_OP_PERMUTE || op == ML_OP_SPLIT || op == ML_OP_MERGE ||
                (op == ML_OP_WHERE && mask->kind == ROWS_TAKEN) ||
                (op == ML_OP_GATHER && p->kind == ROWS_PLACED_ORDER);
    return same ? value : 0;
}

bool increment_is_rows(const increment *inc, ml_ref n) {
    if (inc->places[n].kind != ROWS_OF_POSITIONS || regroups(inc, n)) return true;
    return increment_is(inc, n, ML_OP_SCATTER_ADD) &&
           increment_source_place(inc, n, 0)->kind == ROWS_ORDER;
}

ml_ref increment_rows(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const place *p = &inc->places[n];
    ml_ref sources[ML_MAX_AXES];
    if (regroups(inc, n)) return regrouped_value(inc, n, at);
    if (p->kind == ROWS_TAKEN || p->kind == ROWS_INDEX) return 0; /* not read */
    ml_ref placed = p->kind >= ROWS_PLACED_ORDER ? placed_value(inc, n, at) : 0;
    if (placed) return placed;
    if (node.op == ML_OP_SORT) return sorted_value(inc, n, at);
    if (node.op == ML_OP_SCATTER_ADD) return scattered_value(inc, n, at);
    if (p->kind == ROWS_COUNTED && node.op == ML_OP_SUM) return counted_value(inc, n, at);
    if (p->kind == ROWS_ORDER && node.op == ML_OP_OUT)
        return ml_out(g, inc->values[at][p->since], 1);
    for (int i = 0; i < node.source_count; i++) sources[i] = increment_operand(inc, n, i, at);
    if (node.op == ML_OP_GATHER && increment_source_place(inc, n, 0)->kind == ROWS_OF_POSITIONS &&
        increment_source_place(inc, n, 0)->fed)
        return ml_gather(g, joined(inc, ml_graph_source(g, n, 0), sources[0], at), sources[1],
                         (ml_axis)ml_graph_args(g, n)[0]);
    if (node.op == ML_OP_RAGGED_DOT)
        return ml_ragged_dot(g, sources, p->axis, (ml_axis)ml_graph_args(g, n)[2],
                             (ml_dtype)ml_graph_type(g, n)->dtype);
    lifting by = dispatch_by(inc, p, at);
    if (!p->axis) by.by = increment_plain(ML_I32);
    return increment_lift(inc, n, sources, &by);
}
