/* Places of groups: a mixture of experts with a capacity puts the first rows of each group, in the
 * order of positions, into a tensor {groups, places}, which products multiply by a matrix a group,
 * and takes each row's result from the place (its key, how many rows before it have that key).
 * Only what is within the capacity has one; the results of other rows are multiplied by 0.
 *
 * The running count is that of earlier positions. Increments therefore need no places: the new rows
 * are dispatched as without a capacity, and return by the order of their sort. */
#include "runtime/increment/internal.h"

static bool constant(const increment *inc, ml_ref n, double *value) {
    return ml_graph_constant(inc->g, n, value);
}

/* Operand i or the other of n is a constant: gives the one that is none, 0 where both or neither.
 */
static ml_ref beside_constant(const increment *inc, ml_ref n, double *value) {
    for (int i = 0; i < 2; i++)
        if (constant(inc, ml_graph_source(inc->g, n, i), value))
            return ml_graph_source(inc->g, n, 1 - i);
    return 0;
}

static bool is_number(const increment *inc, ml_ref n, double wanted) {
    double value;
    return constant(inc, n, &value) && value == wanted;
}

/* ---- The places ------------------------------------------------------------------------------ */

/* n is an index along an axis of places beside those of `p`. */
static bool index_of_places(const increment *inc, ml_ref n, const place *p, ml_axis *places) {
    n = increment_without_broadcast(inc, n);
    if (!increment_is(inc, n, ML_OP_IOTA)) return false;
    *places = (ml_axis)ml_graph_args(inc->g, n)[0];
    return *places != p->groups && (!p->places || p->places == *places);
}

/* Which places are taken: those below the counts. */
static bool taken_place(const increment *inc, ml_ref n, place *p) {
    const place *counts = increment_source_place(inc, n, 1);
    *p = *counts;
    p->kind = ROWS_TAKEN;
    return increment_is(inc, n, ML_OP_LT) && counts->kind == ROWS_COUNTED &&
           index_of_places(inc, ml_graph_source(inc->g, n, 0), counts, &p->places);
}

/* Of each place the index among all rows, sorted: the group's start and the place. */
static bool index_place(const increment *inc, ml_ref n, place *p) {
    for (int i = 0; i < 2 && increment_is(inc, n, ML_OP_ADD); i++) {
        const place *starts = increment_source_place(inc, n, i);
        *p = *starts;
        p->kind = ROWS_INDEX;
        if (starts->kind == ROWS_STARTS &&
            index_of_places(inc, ml_graph_source(inc->g, n, 1 - i), starts, &p->places))
            return true;
    }
    return false;
}

/* Of what is in places that are not taken nothing is read. */
static bool masked_place(const increment *inc, ml_ref n, place *p) {
    const place *test = increment_source_place(inc, n, 0),
                *value = increment_source_place(inc, n, 1);
    *p = *value;
    return test->kind == ROWS_TAKEN && (value->kind == ROWS_INDEX || value->kind == ROWS_PLACED) &&
           !increment_source_place(inc, n, 2)->fed && test->groups == value->groups &&
           test->places == value->places;
}

static bool gather_place(increment *inc, ml_ref n, place *p) {
    const place *order = increment_source_place(inc, n, 0), *at = increment_source_place(inc, n, 1);
    *p = *at;
    p->kind = ROWS_PLACED_ORDER;
    p->since = order->since;
    p->counts = at->since;
    p->divisor = order->divisor;
    p->capacity = ml_type_size(ml_graph_type(inc->g, n), at->places);
    return order->kind == ROWS_ORDER && at->kind == ROWS_INDEX &&
           (ml_axis)ml_graph_args(inc->g, n)[0] == order->axis &&
           increment_same_keys(inc, at, order);
}

/* Splits and merges of places with axes of size 1, such as the batch; groups and places as one. */
static bool regroup_place(const increment *inc, ml_ref n, place *p) {
    const int64_t *args = ml_graph_args(inc->g, n);
    const place *s = increment_source_place(inc, n, 0);
    ml_ref from = ml_graph_source(inc->g, n, 0);
    *p = *s;
    if (increment_is(inc, n, ML_OP_SPLIT)) {
        if (args[0] != s->places || !s->groups || (args[2] != 1 && args[4] != 1)) return false;
        p->places = (ml_axis)args[args[2] == 1 ? 3 : 1];
        return true;
    }
    ml_axis other = (ml_axis)args[args[0] == s->places];
    if (args[0] != s->places && args[1] != s->places) return false;
    p->places = (ml_axis)args[2];
    if (!s->groups || increment_size_along(inc, from, other) == 1) return s->groups != 0;
    p->groups = 0;
    return args[0] == s->groups;
}

/* The products of each group's rows with its matrix. */
static bool product_place(const increment *inc, ml_ref n, place *p) {
    int at = increment_source_place(inc, n, 0)->kind != ROWS_PLACED;
    const place *rows = increment_source_place(inc, n, at);
    const ml_type *t = ml_graph_type(inc->g, ml_graph_source(inc->g, n, at));
    const ml_type *w = ml_graph_type(inc->g, ml_graph_source(inc->g, n, 1 - at));
    ml_axis reduced = (ml_axis)ml_graph_args(inc->g, n)[0];
    *p = *rows;
    if (rows->kind != ROWS_PLACED || increment_source_place(inc, n, 1 - at)->fed) return false;
    ml_type rest = increment_without(t, rows->groups, rows->places);
    rest = increment_without(&rest, rows->batch, 0);
    return rows->groups && ml_graph_node(inc->g, n)->arg_count == 1 && w->rank == 3 &&
           rest.rank == 1 && rest.axis[0] == reduced && ml_type_find(w, rows->groups) >= 0 &&
           ml_type_find(w, rows->places) < 0;
}

/* Elementwise, beside constants: each place by itself. */
static bool elementwise_place(const increment *inc, ml_ref n, place *p) {
    const ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    bool found = false;
    if (!ml_op_is_map(op) || op == ML_OP_RANDOM) return false;
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        ml_ref s = ml_graph_source(inc->g, n, i);
        const place *from = &inc->places[s];
        if (!from->fed && ml_graph_type(inc->g, s)->rank) return false;
        if (!from->fed) continue;
        if (from->kind != ROWS_PLACED ||
            (found && (from->since != p->since || from->counts != p->counts ||
                       from->groups != p->groups || from->places != p->places)))
            return false;
        *p = *from;
        found = true;
    }
    return found;
}

/* ---- Back to rows ---------------------------------------------------------------------------- */

/* n is how many earlier rows have a row's key: the keys, 0 where it is none. */
static ml_ref rank_among(const increment *inc, ml_ref n, ml_axis rows) {
    if (!increment_is(inc, n, ML_OP_SUM)) return 0;
    ml_ref product = ml_graph_source(inc->g, n, 0);
    for (int i = 0; i < 2 && increment_is(inc, product, ML_OP_MUL); i++) {
        ml_ref hits = ml_graph_source(inc->g, product, i), less, sums;
        less = ml_graph_source(inc->g, product, 1 - i);
        if (!increment_is(inc, less, ML_OP_SUB)) continue;
        sums = ml_graph_source(inc->g, less, 0);
        if (!is_number(inc, ml_graph_source(inc->g, less, 1), 1)) continue;
        if (!increment_is(inc, sums, ML_OP_CUMSUM) || ml_graph_source(inc->g, sums, 0) != hits)
            continue;
        const int64_t *along = ml_graph_args(inc->g, sums);
        ml_axis groups = 0;
        ml_ref keys = increment_counted_keys(inc, hits, &groups);
        bool each = keys && !along[1] && (ml_axis)along[0] == rows &&
                    ml_graph_type(inc->g, hits)->rank == ml_graph_type(inc->g, keys)->rank + 1 &&
                    ml_graph_node(inc->g, n)->arg_count == 1;
        if (each && (ml_axis)ml_graph_args(inc->g, n)[0] == groups) return keys;
    }
    return 0;
}

/* The index key * capacity + minimum(rank, capacity - 1): gives the rank, 0 where n is another. */
static ml_ref rank_of_index(const increment *inc, ml_ref n, const place *placed) {
    ml_ref sorted = ml_graph_source(inc->g, placed->since, 0);
    for (int i = 0; i < 2 && increment_is(inc, n, ML_OP_ADD); i++) {
        ml_ref scaled = ml_graph_source(inc->g, n, i), within = ml_graph_source(inc->g, n, 1 - i);
        double by = 0, most = 0;
        bool one = placed->capacity == 1; /* then by 1 and minimum with 0, as they are */
        ml_ref key = increment_is(inc, scaled, ML_OP_MUL) ? beside_constant(inc, scaled, &by) : 0;
        if (!key && one) key = scaled, by = 1;
        if (!key || !increment_is(inc, within, ML_OP_MINIMUM)) continue;
        ml_ref rank = beside_constant(inc, within, &most);
        if (!rank || by != (double)placed->capacity || most != by - 1) continue;
        ml_ref keys = rank_among(inc, rank, inc->places[placed->since].axis);
        if (keys &&
            increment_without_order(inc, keys, false) ==
                increment_without_order(inc, sorted, false) &&
            increment_without_order(inc, key, false) == increment_without_order(inc, keys, false))
            return rank;
    }
    return 0;
}

/* Each row's result, and another row's where it has no place. */
static bool return_place(const increment *inc, ml_ref n, place *p) {
    const place *placed = increment_source_place(inc, n, 0),
                *index = increment_source_place(inc, n, 1);
    if (placed->kind != ROWS_PLACED || placed->groups || !index->fed ||
        index->kind != ROWS_OF_POSITIONS || (ml_axis)ml_graph_args(inc->g, n)[0] != placed->places)
        return false;
    *p = *index;
    p->over = 0;
    p->kind = ROWS_RETURNED;
    p->since = placed->since;
    p->capacity = placed->capacity;
    p->rank = rank_of_index(inc, ml_graph_source(inc->g, n, 1), placed);
    return p->rank && index->axis == inc->places[placed->since].axis;
}

/* n is 0 for rows whose rank is not below the capacity. */
static bool is_masked(const increment *inc, ml_ref n, const place *p) {
    n = increment_without_broadcast(inc, n);
    if (!increment_is(inc, n, ML_OP_WHERE)) return false;
    ml_ref test = increment_without_broadcast(inc, ml_graph_source(inc->g, n, 0));
    return increment_is(inc, test, ML_OP_LT) && ml_graph_source(inc->g, test, 0) == p->rank &&
           is_number(inc, ml_graph_source(inc->g, test, 1), (double)p->capacity) &&
           is_number(inc, ml_graph_source(inc->g, n, 2), 0);
}

static bool weighted_place(const increment *inc, ml_ref n, place *p) {
    for (int i = 0; i < 2 && increment_is(inc, n, ML_OP_MUL); i++) {
        const place *s = increment_source_place(inc, n, i),
                    *w = increment_source_place(inc, n, 1 - i);
        if (s->kind != ROWS_RETURNED || !increment_of_positions(w)) continue;
        *p = (place){.fed = true, .axis = s->axis, .batch = s->batch, .inner = s->inner};
        return w->axis == s->axis && w->inner == s->inner &&
               is_masked(inc, ml_graph_source(inc->g, n, 1 - i), s);
    }
    return false;
}

/* ---- All ------------------------------------------------------------------------------------- */

bool increment_find_capacity(increment *inc, ml_ref n, place *p) {
    const ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    const place *first = increment_source_place(inc, n, 0);
    if (op == ML_OP_LT && taken_place(inc, n, p)) return true;
    if (op == ML_OP_WHERE && masked_place(inc, n, p)) return true;
    if (op == ML_OP_GATHER && gather_place(inc, n, p)) return true;
    if (op == ML_OP_GATHER && return_place(inc, n, p)) return true;
    if (op == ML_OP_ADD && index_place(inc, n, p)) return true;
    if (op == ML_OP_MUL && weighted_place(inc, n, p)) return true;
    if (op == ML_OP_DOT) return product_place(inc, n, p);
    *p = *first;
    if (op == ML_OP_PERMUTE) return first->kind >= ROWS_TAKEN;
    if (op == ML_OP_BROADCAST) return first->kind == ROWS_TAKEN;
    if (op == ML_OP_SPLIT || op == ML_OP_MERGE)
        return first->kind == ROWS_PLACED && regroup_place(inc, n, p);
    return elementwise_place(inc, n, p);
}
