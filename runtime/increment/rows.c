/* Several elements a position, such as its choices of experts, which are called rows here, and the
 * dispatch of rows, in the order of their keys, to products by groups.
 *
 * A sort over positions depends on all of them. But where its keys are groups, its order chooses
 * rows and puts their results back, and groups are bounded by how many keys are theirs, the result
 * of a row depends on that row alone. The new positions of all sequences are dispatched together,
 * those that are not valid to no group. */
#include "runtime/increment/internal.h"

int64_t increment_each(const place *p) {
    return p->inner ? p->inner : 1;
}

static const place *source_place(const increment *inc, ml_ref n, int i) {
    return &inc->places[ml_graph_source(inc->g, n, i)];
}

/* As a place of what is computed of it. */
static place taken(const place *s) {
    place p = *s;
    p.over = 0;
    return p;
}

/* Elements of positions, all known. */
static bool of_positions(const place *p) {
    return p->fed && p->kind == ROWS_OF_POSITIONS && !p->other && !p->chunk && !p->lead;
}

static int64_t size_along(const increment *inc, ml_ref n, ml_axis axis) {
    return ml_type_size(ml_graph_type(inc->g, n), axis);
}

static bool has_op(const increment *inc, ml_ref n, ml_op op) {
    return (ml_op)ml_graph_node(inc->g, n)->op == op;
}

/* What is dispatched, counted or in the order of a sort is used as it is here, or refused where it
 * was sorted or counted. */
static _Noreturn void refuse_dispatch(increment *inc, ml_ref n, const place *p) {
    ml_ref since = p->since;
    const ml_origin *at = ml_graph_origin(inc->g, n);
    increment_refuse(
        inc, since, "m.moe sends each position's choices to experts by itself",
        "%s over positions has no increment yet: %s at line %d is not known to use each "
        "row by itself",
        ml_ops[ml_graph_node(inc->g, since)->op].name, ml_ops[ml_graph_node(inc->g, n)->op].name,
        at->line);
}

static _Noreturn void refuse_rows(increment *inc, ml_ref n, const place *p) {
    increment_refuse(inc, n, "split the axis into positions and the rest first",
                     "%s over \"%s\", %lld elements a position, has no increment yet",
                     ml_ops[ml_graph_node(inc->g, n)->op].name, ml_axis_name(inc->g, p->axis),
                     (long long)p->inner);
}

/* ---- Keys ------------------------------------------------------------------------------------ */

static ml_ref without_order(const increment *inc, ml_ref n, bool merges) {
    while (has_op(inc, n, ML_OP_PERMUTE) || has_op(inc, n, ML_OP_STOP_GRADIENT) ||
           (merges && (has_op(inc, n, ML_OP_MERGE) || has_op(inc, n, ML_OP_RENAME))))
        n = ml_graph_source(inc->g, n, 0);
    return n;
}

static ml_ref without_broadcast(const increment *inc, ml_ref n) {
    while (has_op(inc, n, ML_OP_BROADCAST) || has_op(inc, n, ML_OP_PERMUTE))
        n = ml_graph_source(inc->g, n, 0);
    return n;
}

/* A key below 0 would stand before all groups, and move them. */
static bool is_index(const increment *inc, ml_ref n) {
    n = without_order(inc, without_broadcast(inc, n), true);
    if (has_op(inc, n, ML_OP_ARGMAX) || has_op(inc, n, ML_OP_IOTA)) return true;
    if (n == inc->in->tokens) return true;
    if (has_op(inc, n, ML_OP_OUT)) {
        ml_ref s = ml_graph_source(inc->g, n, 0);
        return has_op(inc, s, ML_OP_TOP_K) || has_op(inc, s, ML_OP_SORT);
    }
    if (!has_op(inc, n, ML_OP_MOD)) return false;
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
static bool same_keys(const increment *inc, const place *bounds, const place *sorted) {
    ml_ref a = bounds->keys, b = ml_graph_source(inc->g, sorted->since, 0);
    if (without_order(inc, a, false) == without_order(inc, b, false)) return true;
    return without_order(inc, a, true) == without_order(inc, b, true) &&
           size_beside(inc, bounds->since, bounds->groups) == 1 &&
           size_beside(inc, sorted->since, sorted->axis) == 1;
}

/* The keys that n, a sum of `eq`, counts for each element of *groups: 0 where it counts none. */
static ml_ref counted_keys(const increment *inc, ml_ref n, ml_axis *groups) {
    while (has_op(inc, n, ML_OP_CAST) || has_op(inc, n, ML_OP_PERMUTE) || has_op(inc, n, ML_OP_SUM))
        n = ml_graph_source(inc->g, n, 0);
    if (!has_op(inc, n, ML_OP_EQ)) return 0;
    for (int i = 0; i < 2; i++) {
        ml_ref index = without_broadcast(inc, ml_graph_source(inc->g, n, i));
        ml_ref keys = without_broadcast(inc, ml_graph_source(inc->g, n, 1 - i));
        if (!has_op(inc, index, ML_OP_IOTA) || !inc->places[keys].fed) continue;
        *groups = (ml_axis)ml_graph_args(inc->g, index)[0];
        const ml_type *all = ml_graph_type(inc->g, n), *own = ml_graph_type(inc->g, keys);
        if (own->dtype == ML_I32 && all->rank == own->rank + 1 && ml_type_find(own, *groups) < 0)
            return keys;
    }
    return 0;
}

/* ---- Places ---------------------------------------------------------------------------------- */

/* The axis of positions and one within it, as one: several elements a position. */
static bool merge_within(increment *inc, ml_ref n, place *p) {
    const int64_t *args = ml_graph_args(inc->g, n);
    const place *s = source_place(inc, n, 0);
    if (s->kind != ROWS_OF_POSITIONS || s->other || s->chunk ||
        (args[0] != s->axis && args[1] != s->axis))
        return false;
    int64_t other = size_along(inc, ml_graph_source(inc->g, n, 0), args[args[0] == s->axis]);
    bool within = args[0] == s->axis && other > 1;
    if (!within && !(s->inner && other == 1)) return false;
    if (s->lead)
        increment_refuse(inc, n, "merge before the shift",
                         "merge of the positions of \"%s\", which "
                         "are shifted, has no increment yet",
                         ml_axis_name(inc->g, s->axis));
    *p = taken(s);
    p->axis = (ml_axis)args[2];
    if (within) p->inner = increment_each(s) * other;
    if (args[0] == s->batch || args[1] == s->batch) p->batch = 0;
    return true;
}

static void split_within(increment *inc, ml_ref n, place *p) {
    const int64_t *args = ml_graph_args(inc->g, n);
    const place *s = source_place(inc, n, 0);
    *p = taken(s);
    if (s->inner % args[4]) refuse_rows(inc, n, s);
    p->axis = (ml_axis)args[1];
    p->inner = s->inner == args[4] ? 0 : s->inner / args[4];
}

static bool sort_place(increment *inc, ml_ref n, place *p) {
    const place *s = source_place(inc, n, 0);
    ml_ref keys = ml_graph_source(inc->g, n, 0);
    const int64_t *args = ml_graph_args(inc->g, n);
    bool keyed = ml_graph_type(inc->g, keys)->dtype == ML_I32 && is_index(inc, keys);
    if (args[0] != s->axis || !of_positions(s) || args[1] || !keyed) return false;
    *p = taken(s);
    p->kind = ROWS_SORTED;
    p->since = n;
    return true;
}

/* How many rows have each key: n has an axis of groups, and those that rows share. */
static bool count_place(increment *inc, ml_ref n, place *p) {
    const place *s = source_place(inc, n, 0);
    ml_axis groups = 0;
    ml_ref keys = counted_keys(inc, n, &groups);
    const ml_type *t = ml_graph_type(inc->g, n);
    if (!keys || !of_positions(s) || !increment_names(inc->g, n, s->axis) ||
        ml_type_find(t, groups) < 0)
        return false;
    *p = (place){.fed = true, .batch = s->batch, .kind = ROWS_COUNTED, .groups = groups};
    p->since = n;
    p->keys = keys;
    return true;
}

/* Rows of a table over positions, chosen by the order of a sort. */
static bool gather_rows(increment *inc, ml_ref n, place *p) {
    const place *table = source_place(inc, n, 0), *index = source_place(inc, n, 1);
    int64_t rows = size_along(inc, index->since, index->axis);
    ml_axis axis = (ml_axis)ml_graph_args(inc->g, n)[0];
    if (!of_positions(table) || axis != table->axis ||
        increment_each(table) * index->divisor != increment_each(index) ||
        size_along(inc, ml_graph_source(inc->g, n, 0), axis) * index->divisor != rows)
        return false;
    *p = taken(index);
    p->kind = ROWS_SORTED;
    return true;
}

/* Back to positions, by the order of the sort. */
static bool scatter_rows(increment *inc, ml_ref n, place *p) {
    const place *index = source_place(inc, n, 0), *value = source_place(inc, n, 1);
    ml_axis axis = (ml_axis)ml_graph_args(inc->g, n)[0];
    int64_t rows = size_along(inc, index->since, index->axis);
    if (index->kind != ROWS_ORDER || value->kind != ROWS_SORTED || index->since != value->since ||
        increment_each(index) % index->divisor || size_along(inc, n, axis) * index->divisor != rows)
        return false;
    int64_t inner = increment_each(index) / index->divisor;
    *p = (place){.fed = true, .axis = axis, .batch = index->batch};
    p->inner = inner > 1 ? inner : 0;
    return true;
}

static bool ragged_place(increment *inc, ml_ref n, place *p) {
    const place *rows = source_place(inc, n, 0), *starts = source_place(inc, n, 2),
                *ends = source_place(inc, n, 3);
    const int64_t *args = ml_graph_args(inc->g, n);
    if (rows->kind != ROWS_SORTED || source_place(inc, n, 1)->fed || starts->kind != ROWS_STARTS ||
        ends->kind != ROWS_ENDS || starts->since != ends->since || args[0] != rows->axis ||
        args[1] != starts->groups || args[3])
        return false;
    *p = taken(rows);
    return same_keys(inc, starts, rows);
}

/* Bounds of groups: running sums of how many rows they have, and those less the numbers. */
static bool bounds_place(increment *inc, ml_ref n, place *p) {
    const int64_t *args = ml_graph_args(inc->g, n);
    const place *a = source_place(inc, n, 0);
    *p = taken(a);
    if (has_op(inc, n, ML_OP_CUMSUM)) {
        p->kind = ROWS_ENDS;
        return a->kind == ROWS_COUNTED && args[0] == a->groups && !args[1];
    }
    if (has_op(inc, n, ML_OP_SUB)) {
        const place *b = source_place(inc, n, 1);
        p->kind = ROWS_STARTS;
        return a->kind == ROWS_ENDS && b->kind == ROWS_COUNTED && a->since == b->since;
    }
    return has_op(inc, n, ML_OP_PERMUTE);
}

static bool order_place(increment *inc, ml_ref n, place *p) {
    const place *a = source_place(inc, n, 0);
    double by;
    *p = taken(a);
    if (has_op(inc, n, ML_OP_PERMUTE)) return true;
    if (!has_op(inc, n, ML_OP_IDIV) || a->kind != ROWS_ORDER) return false;
    if (!ml_graph_constant(inc->g, ml_graph_source(inc->g, n, 1), &by) || by < 1) return false;
    p->divisor *= (int64_t)by;
    return true;
}

/* n computes each row from the same one of its operands. */
static bool by_rows(increment *inc, ml_ref n, place *p) {
    const ml_type *t = ml_graph_type(inc->g, n);
    bool moves = ml_ops[ml_graph_node(inc->g, n)->op].op_class == ML_CLASS_MOVE;
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        ml_ref s = ml_graph_source(inc->g, n, i);
        const place *from = &inc->places[s];
        if (!from->fed) continue;
        if (p->fed && (from->kind != p->kind || from->axis != p->axis || from->inner != p->inner ||
                       from->since != p->since || from->lead != p->lead || from->other))
            return false;
        ml_axis batch = p->batch ? p->batch : from->batch;
        *p = taken(from);
        p->batch = batch && ml_type_find(t, batch) >= 0 ? batch : 0;
    }
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        ml_ref s = ml_graph_source(inc->g, n, i);
        if (!inc->places[s].fed && p->kind == ROWS_SORTED &&
            ml_type_find(ml_graph_type(inc->g, s), p->axis) >= 0)
            return false;
    }
    bool of_batch = increment_names(inc->g, n, p->batch) &&
                    (moves || ml_ops[ml_graph_node(inc->g, n)->op].op_class != ML_CLASS_REDUCE);
    return increment_by_parts(inc->g, n, p->axis) && !of_batch && ml_type_find(t, p->axis) >= 0;
}

/* Operands are rows: several elements a position, or in the order of a sort. */
static const place *rows_of(const increment *inc, ml_ref n) {
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        const place *s = source_place(inc, n, i);
        if (s->fed && (s->inner || s->kind != ROWS_OF_POSITIONS)) return s;
    }
    return NULL;
}

static bool dispatched(const place *p) {
    return p->kind != ROWS_OF_POSITIONS;
}

static bool is_order_of(const increment *inc, ml_ref n, place *p) {
    ml_ref sort = ml_graph_source(inc->g, n, 0);
    *p = taken(source_place(inc, n, 0));
    p->kind = ROWS_ORDER;
    p->divisor = 1;
    return has_op(inc, sort, ML_OP_SORT) && sort == p->since;
}

static bool place_of_dispatched(increment *inc, ml_ref n, place *p) {
    const ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    const place *first = source_place(inc, n, 0);
    if (op == ML_OP_SCATTER_ADD) return scatter_rows(inc, n, p);
    if (op == ML_OP_RAGGED_DOT) return ragged_place(inc, n, p);
    if (op == ML_OP_OUT && is_order_of(inc, n, p)) return true;
    if (op == ML_OP_GATHER && source_place(inc, n, 1)->kind == ROWS_ORDER)
        return gather_rows(inc, n, p);
    *p = (place){0};
    if (first->kind >= ROWS_COUNTED) return bounds_place(inc, n, p);
    if (first->kind == ROWS_ORDER) return order_place(inc, n, p);
    return by_rows(inc, n, p) && p->kind == ROWS_SORTED;
}

bool increment_find_rows(increment *inc, ml_ref n, place *p) {
    const ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    const place *rows = rows_of(inc, n);
    *p = (place){0};
    if (op == ML_OP_MERGE && merge_within(inc, n, p)) return true;
    if (op == ML_OP_SORT && sort_place(inc, n, p)) return true;
    if (op == ML_OP_SUM && count_place(inc, n, p)) return true;
    if (!rows || (op == ML_OP_CUMSUM && ml_graph_args(inc->g, n)[1])) return false;
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++)
        if (dispatched(source_place(inc, n, i))) rows = source_place(inc, n, i);
    if (dispatched(rows)) {
        if (!place_of_dispatched(inc, n, p)) refuse_dispatch(inc, n, rows);
        return true;
    }
    if (op == ML_OP_SPLIT && ml_graph_args(inc->g, n)[0] == rows->axis)
        split_within(inc, n, p);
    else if (increment_names(inc->g, n, rows->axis) && op == ML_OP_CUMSUM)
        *p = taken(rows); /* of earlier positions */
    else if (!by_rows(inc, n, p))
        refuse_rows(inc, n, rows);
    return true;
}

void increment_require_positions(increment *inc, ml_ref n) {
    const place *p = &inc->places[n];
    if (dispatched(p)) refuse_dispatch(inc, n, p);
    if (p->inner) refuse_rows(inc, n, p);
}
