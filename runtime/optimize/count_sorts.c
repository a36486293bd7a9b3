/* Sorts and running sums of few elements as sums of comparisons.
 *
 * A step of decoding sends few rows to experts. Sorting them, counting and summing up the counts
 * are kernels that wait for one another and have next to nothing to do. Of keys that are one axis,
 *   place[i] = sum over j of (key[j] < key[i], or key[j] = key[i] and j < i)
 * is where element i lies in their order, which is the permutation that sorting the order gives;
 *   order[p] = sum over i of i where place[i] = p
 * is the order, and sums of x[j] where j <= i are running sums. Each is one reduction, which also
 * computes what its operand is made of. */
#include "runtime/graph/rewrite.h"
#include "runtime/optimize/optimize.h"

enum { MOST_ELEMENTS = 128 }; /* whose comparisons, of all with all, are less than a launch */

/* Integers along one axis, few; others have one element, and there is room for one more. */
static bool is_short(const ml_graph *g, ml_ref n) {
    const ml_type *type = ml_graph_type(g, ml_graph_source(g, n, 0));
    const int op = ml_graph_node(g, n)->op,
              at = ml_type_find(type, (ml_axis)ml_graph_args(g, n)[0]);
    const bool reversed = ml_graph_args(g, n)[1] != 0;
    return (op == ML_OP_SORT || op == ML_OP_CUMSUM) && !reversed && type->dtype == ML_I32 &&
           type->rank < ML_MAX_AXES && type->size[at] <= MOST_ELEMENTS &&
           ml_type_elements(type) == type->size[at];
}

/* What there is of `n` along the axis, and the same along another one. */
typedef struct {
    ml_graph *g;
    ml_axis axis, other;
    int64_t size;
    ml_type both; /* of the operand, then `other` */
} comparison;

static comparison compare_along(ml_graph *g, ml_ref operand, ml_axis axis) {
    comparison c = {.g = g, .axis = axis, .both = *ml_graph_type(g, operand)};
    c.size = ml_type_size(&c.both, axis);
    c.other = ml_axis_fresh(g, "other");
    c.both.axis[c.both.rank] = c.other;
    c.both.size[c.both.rank++] = c.size;
    return c;
}

static ml_ref across(const comparison *c, ml_ref n) {
    ml_type type = c->both;
    type.dtype = ml_graph_type(c->g, n)->dtype;
    return ml_broadcast(c->g, n, &type);
}

/* The sum over the other elements of `n` where `test`. */
static ml_ref sum_where(const comparison *c, ml_ref test, ml_ref n) {
    ml_ref zero = across(c, ml_const_int(c->g, ML_I32, 0));
    return ml_reduce(c->g, ML_OP_SUM, ml_where(c->g, test, n, zero), &c->other, 1);
}

static ml_ref place_of(ml_graph *g, ml_ref keys, ml_axis axis) {
    const comparison c = compare_along(g, keys, axis);
    ml_ref own = across(&c, keys), key = across(&c, ml_rename(g, keys, axis, c.other));
    ml_ref at = across(&c, ml_iota(g, axis, c.size)), j = across(&c, ml_iota(g, c.other, c.size));
    ml_ref before =
        ml_map2(g, ML_OP_AND, ml_map2(g, ML_OP_EQ, key, own), ml_map2(g, ML_OP_LT, j, at));
    ml_ref test = ml_map2(g, ML_OP_OR, ml_map2(g, ML_OP_LT, key, own), before);
    return sum_where(&c, test, across(&c, ml_const_int(g, ML_I32, 1)));
}

/* Which element lies at each place. */
static ml_ref order_of(ml_graph *g, ml_ref place, ml_axis axis) {
    const comparison c = compare_along(g, place, axis);
    ml_ref of_other = across(&c, ml_rename(g, place, axis, c.other));
    ml_ref test = ml_map2(g, ML_OP_EQ, of_other, across(&c, ml_iota(g, axis, c.size)));
    return sum_where(&c, test, across(&c, ml_iota(g, c.other, c.size)));
}

static ml_ref running_sum(ml_graph *g, ml_ref n, ml_axis axis) {
    const comparison c = compare_along(g, n, axis);
    ml_ref j = across(&c, ml_iota(g, c.other, c.size)), at = across(&c, ml_iota(g, axis, c.size));
    ml_ref test = ml_map2(g, ML_OP_GE, at, j);
    return sum_where(&c, test, across(&c, ml_rename(g, n, axis, c.other)));
}

/* By node of the old graph: the places of what a sort ordered, in the new one. */
typedef struct {
    ml_ref *place;
} work;

static void begin(rewrite *r) {
    work *w = r->context;
    w->place = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    work *w = r->context;
    const int op = ml_graph_node(r->from, n)->op;
    if ((op != ML_OP_SORT && op != ML_OP_CUMSUM) || !is_short(r->from, n))
        return rewrite_copy(r, n, sources);
    ml_graph *g = r->to;
    const ml_axis axis = (ml_axis)ml_graph_args(r->from, n)[0];
    if (op == ML_OP_CUMSUM) return running_sum(g, sources[0], axis);
    ml_ref from = ml_graph_source(r->from, n, 0), order;
    const bool orders = ml_graph_node(r->from, from)->op == ML_OP_OUT &&
                        w->place[ml_graph_source(r->from, from, 0)] != 0;
    if (orders) { /* the inverse of an order */
        order = w->place[ml_graph_source(r->from, from, 0)];
    } else {
        w->place[n] = place_of(g, sources[0], axis);
        order = order_of(g, w->place[n], axis);
    }
    ml_ref *outputs = r->outputs[n] = ML_NEW_ARRAY(r->scratch, ml_ref, ML_MAX_OUTPUTS);
    outputs[1] = order;
    return outputs[0] = ml_gather(g, sources[0], order, axis);
}

bool ml_count_sorts_applies(const ml_graph *g) {
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        const int op = ml_graph_node(g, n)->op;
        if ((op == ML_OP_SORT || op == ML_OP_CUMSUM) && is_short(g, n)) return true;
    }
    return false;
}

ml_graph *ml_count_sorts(const ml_graph *from, ml_roots *roots) {
    work w = {0};
    return rewrite_run(from, roots, begin, rule, &w);
}
