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

/* As a place of what is computed of it. */
static place taken(const place *s) {
    place p = *s;
    p.over = 0;
    return p;
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
    const ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    const char *axis = ml_axis_name(inc->g, p->axis);
    bool moves = ml_ops[op].op_class == ML_CLASS_MOVE && op != ML_OP_GATHER;
    bool keyed = op == ML_OP_SORT && ml_graph_type(inc->g, n)->dtype == ML_I32;
    if (increment_names(inc->g, n, p->axis) && !moves && !keyed)
        increment_refuse(inc, n, "split the axis into positions and the rest first",
                         "%s over \"%s\" reads all positions, later ones too", ml_ops[op].name,
                         axis);
    increment_refuse(inc, n, "split the axis into positions and the rest first",
                     "%s over \"%s\", %lld elements a position, has no increment yet",
                     ml_ops[op].name, axis, (long long)p->inner);
}

/* ---- Places ---------------------------------------------------------------------------------- */

/* The axis of positions and one within it, as one: several elements a position. */
static bool merge_within(increment *inc, ml_ref n, place *p) {
    const int64_t *args = ml_graph_args(inc->g, n);
    const place *s = increment_source_place(inc, n, 0);
    if (s->kind != ROWS_OF_POSITIONS || s->other || s->chunk ||
        (args[0] != s->axis && args[1] != s->axis))
        return false;
    int64_t other =
        increment_size_along(inc, ml_graph_source(inc->g, n, 0), args[args[0] == s->axis]);
    bool within = args[0] == s->axis && other > 1;
    if (!within && !(s->inner && other == 1)) return false;
    if (s->lead < 0) increment_refuse_ahead(inc, ml_graph_source(inc->g, n, 0));
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
    const place *s = increment_source_place(inc, n, 0);
    *p = taken(s);
    if (s->inner % args[4]) refuse_rows(inc, n, s);
    p->axis = (ml_axis)args[1];
    p->inner = s->inner == args[4] ? 0 : s->inner / args[4];
}

static bool sort_place(increment *inc, ml_ref n, place *p) {
    const place *s = increment_source_place(inc, n, 0);
    ml_ref keys = ml_graph_source(inc->g, n, 0);
    const int64_t *args = ml_graph_args(inc->g, n);
    bool keyed = ml_graph_type(inc->g, keys)->dtype == ML_I32 && increment_is_index(inc, keys);
    if (args[0] != s->axis || !increment_of_positions(s) || args[1] || !keyed) return false;
    *p = taken(s);
    p->kind = ROWS_SORTED;
    p->since = n;
    return true;
}

/* How many rows have each key: n has an axis of groups, and those that rows share. */
static bool count_place(increment *inc, ml_ref n, place *p) {
    const place *s = increment_source_place(inc, n, 0);
    ml_axis groups = 0;
    ml_ref keys = increment_counted_keys(inc, n, &groups);
    const ml_type *t = ml_graph_type(inc->g, n);
    if (!keys || !increment_of_positions(s) || !increment_names(inc->g, n, s->axis) ||
        ml_type_find(t, groups) < 0)
        return false;
    *p = (place){.fed = true, .batch = s->batch, .kind = ROWS_COUNTED, .groups = groups};
    p->since = n;
    p->keys = keys;
    return true;
}

/* Rows of a table over positions, chosen by the order of a sort. */
static bool gather_rows(increment *inc, ml_ref n, place *p) {
    const place *table = increment_source_place(inc, n, 0),
                *index = increment_source_place(inc, n, 1), *sort = &inc->places[index->since];
    int64_t rows = increment_size_along(inc, index->since, sort->axis);
    ml_axis axis = (ml_axis)ml_graph_args(inc->g, n)[0];
    if (!increment_of_positions(table) || axis != table->axis ||
        increment_each(table) * index->divisor != increment_each(sort) ||
        increment_size_along(inc, ml_graph_source(inc->g, n, 0), axis) * index->divisor != rows)
        return false;
    *p = taken(index);
    p->kind = index->kind == ROWS_ORDER ? ROWS_SORTED : ROWS_PLACED;
    return true;
}

/* Back to positions, by the order of the sort. */
static bool scatter_rows(increment *inc, ml_ref n, place *p) {
    const place *index = increment_source_place(inc, n, 0),
                *value = increment_source_place(inc, n, 1);
    ml_axis axis = (ml_axis)ml_graph_args(inc->g, n)[0];
    int64_t rows = increment_size_along(inc, index->since, index->axis);
    if (index->kind != ROWS_ORDER || value->kind != ROWS_SORTED || index->since != value->since ||
        increment_each(index) % index->divisor ||
        increment_size_along(inc, n, axis) * index->divisor != rows)
        return false;
    int64_t inner = increment_each(index) / index->divisor;
    *p = (place){.fed = true, .axis = axis, .batch = index->batch};
    p->inner = inner > 1 ? inner : 0;
    return true;
}

static bool ragged_place(increment *inc, ml_ref n, place *p) {
    const place *rows = increment_source_place(inc, n, 0),
                *starts = increment_source_place(inc, n, 2),
                *ends = increment_source_place(inc, n, 3);
    const int64_t *args = ml_graph_args(inc->g, n);
    if (rows->kind != ROWS_SORTED || increment_source_place(inc, n, 1)->fed ||
        starts->kind != ROWS_STARTS || ends->kind != ROWS_ENDS || starts->since != ends->since ||
        args[0] != rows->axis || args[1] != starts->groups || args[3])
        return false;
    *p = taken(rows);
    return increment_same_keys(inc, starts, rows);
}

/* Bounds of groups: running sums of how many rows they have, and those less the numbers. */
static bool bounds_place(increment *inc, ml_ref n, place *p) {
    const int64_t *args = ml_graph_args(inc->g, n);
    const place *a = increment_source_place(inc, n, 0);
    *p = taken(a);
    if (increment_is(inc, n, ML_OP_CUMSUM)) {
        p->kind = ROWS_ENDS;
        return a->kind == ROWS_COUNTED && args[0] == a->groups && !args[1];
    }
    if (increment_is(inc, n, ML_OP_SUB)) {
        const place *b = increment_source_place(inc, n, 1);
        p->kind = ROWS_STARTS;
        return a->kind == ROWS_ENDS && b->kind == ROWS_COUNTED && a->since == b->since;
    }
    p->kind = a->kind;
    return increment_is(inc, n, ML_OP_PERMUTE) ||
           (increment_is(inc, n, ML_OP_BROADCAST) && a->kind == ROWS_STARTS);
}

static bool order_place(increment *inc, ml_ref n, place *p) {
    const place *a = increment_source_place(inc, n, 0);
    double by;
    *p = taken(a);
    if (increment_is(inc, n, ML_OP_PERMUTE)) return true;
    if (!increment_is(inc, n, ML_OP_IDIV)) return false;
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
        if (p->fed &&
            (from->kind != p->kind || from->axis != p->axis || from->inner != p->inner ||
             from->since != p->since || from->lead != p->lead || from->other || from->chunk))
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
        const place *s = increment_source_place(inc, n, i);
        if (s->fed && (s->inner || s->kind != ROWS_OF_POSITIONS)) return s;
    }
    return NULL;
}

static bool dispatched(const place *p) {
    return p->kind != ROWS_OF_POSITIONS;
}

static bool is_order_of(const increment *inc, ml_ref n, place *p) {
    ml_ref sort = ml_graph_source(inc->g, n, 0);
    *p = taken(increment_source_place(inc, n, 0));
    p->kind = ROWS_ORDER;
    p->divisor = 1;
    return increment_is(inc, sort, ML_OP_SORT) && sort == p->since;
}

static bool is_order(const place *p) {
    return p->kind == ROWS_ORDER || p->kind == ROWS_PLACED_ORDER;
}

static bool place_of_dispatched(increment *inc, ml_ref n, place *p) {
    const ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    const place *first = increment_source_place(inc, n, 0);
    if (op == ML_OP_SCATTER_ADD) return scatter_rows(inc, n, p);
    if (op == ML_OP_RAGGED_DOT) return ragged_place(inc, n, p);
    if (op == ML_OP_OUT && is_order_of(inc, n, p)) return true;
    if (op == ML_OP_GATHER && is_order(increment_source_place(inc, n, 1)))
        return gather_rows(inc, n, p);
    if (increment_find_capacity(inc, n, p)) return true;
    *p = (place){0};
    if (first->kind >= ROWS_COUNTED && first->kind <= ROWS_STARTS) return bounds_place(inc, n, p);
    if (is_order(first)) return order_place(inc, n, p);
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
        if (dispatched(increment_source_place(inc, n, i))) rows = increment_source_place(inc, n, i);
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
