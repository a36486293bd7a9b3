/* Keys by which rows are sorted and counted: which nodes hold the same ones. */
#include "runtime/increment/internal.h"

const place *increment_source_place(const increment *inc, ml_ref n, int i) {
    return &inc->places[ml_graph_source(inc->g, n, i)];
}

bool increment_of_positions(const place *p) {
    return p->fed && p->kind == ROWS_OF_POSITIONS && !p->other && !p->chunk && !p->lead;
}

bool increment_is(const increment *inc, ml_ref n, ml_op op) {
    return (ml_op)ml_graph_node(inc->g, n)->op == op;
}

int64_t increment_size_along(const increment *inc, ml_ref n, ml_axis axis) {
    return ml_type_size(ml_graph_type(inc->g, n), axis);
}

ml_ref increment_without_order(const increment *inc, ml_ref n, bool merges) {
    while (increment_is(inc, n, ML_OP_PERMUTE) || increment_is(inc, n, ML_OP_STOP_GRADIENT) ||
           (merges && (increment_is(inc, n, ML_OP_MERGE) || increment_is(inc, n, ML_OP_RENAME))))
        n = ml_graph_source(inc->g, n, 0);
    return n;
}

ml_ref increment_without_broadcast(const increment *inc, ml_ref n) {
    while (increment_is(inc, n, ML_OP_BROADCAST) || increment_is(inc, n, ML_OP_PERMUTE))
        n = ml_graph_source(inc->g, n, 0);
    return n;
}

/* A key below 0 would stand before all groups, and move them. */
bool increment_is_index(const increment *inc, ml_ref n) {
    n = increment_without_order(inc, increment_without_broadcast(inc, n), true);
    if (increment_is(inc, n, ML_OP_ARGMAX) || increment_is(inc, n, ML_OP_IOTA)) return true;
    if (n == inc->in->tokens) return true;
    if (increment_is(inc, n, ML_OP_OUT)) {
        ml_ref s = ml_graph_source(inc->g, n, 0);
        return increment_is(inc, s, ML_OP_TOP_K) || increment_is(inc, s, ML_OP_SORT);
    }
    if (!increment_is(inc, n, ML_OP_MOD)) return false;
    double by;
    return ml_graph_constant(inc->g, ml_graph_source(inc->g, n, 1), &by) && by > 0;
}

/* Elements of all axes but these. */
static int64_t size_beside(const increment *inc, ml_ref n, ml_axis a) {
    const ml_type *t = ml_graph_type(inc->g, n);
    int64_t size = 1;
    for (int i = 0; i < t->rank; i++)
        if (t->axis[i] != a) size *= t->size[i];
    return size;
}

/* The bounds are those of this sort's keys. */
bool increment_same_keys(const increment *inc, const place *bounds, const place *sorted) {
    ml_ref a = bounds->keys, b = ml_graph_source(inc->g, sorted->since, 0);
    if (increment_without_order(inc, a, false) == increment_without_order(inc, b, false))
        return true;
    return increment_without_order(inc, a, true) == increment_without_order(inc, b, true) &&
           size_beside(inc, bounds->since, bounds->groups) == 1 &&
           size_beside(inc, sorted->since, sorted->axis) == 1;
}

/* The keys that n, a sum of `eq`, counts for each element of *groups: 0 where it counts none. */
ml_ref increment_counted_keys(const increment *inc, ml_ref n, ml_axis *groups) {
    while (increment_is(inc, n, ML_OP_CAST) || increment_is(inc, n, ML_OP_PERMUTE) ||
           increment_is(inc, n, ML_OP_SUM))
        n = ml_graph_source(inc->g, n, 0);
    if (!increment_is(inc, n, ML_OP_EQ)) return 0;
    for (int i = 0; i < 2; i++) {
        ml_ref index = increment_without_broadcast(inc, ml_graph_source(inc->g, n, i));
        ml_ref keys = increment_without_broadcast(inc, ml_graph_source(inc->g, n, 1 - i));
        if (!increment_is(inc, index, ML_OP_IOTA) || !inc->places[keys].fed) continue;
        *groups = (ml_axis)ml_graph_args(inc->g, index)[0];
        const ml_type *all = ml_graph_type(inc->g, n), *own = ml_graph_type(inc->g, keys);
        if (own->dtype == ML_I32 && all->rank == own->rank + 1 && ml_type_find(own, *groups) < 0)
            return keys;
    }
    return 0;
}
