/* Scatter-adds by where a sort put things (passes.h).
 *
 * `order`, the indices that a SORT of n elements gives, is a permutation, and so is its inverse,
 * the indices that sorting `order` gives. With n = size * each,
 *   scatter_add(order idiv each, value)[t] = sum over j < each of value[inverse[t * each + j]]:
 * the tokens of a mixture of experts come back from the rows of their experts, and so do their
 * gradients. Gathers read in order, fuse with what follows, and need no sort of their own but the
 * inverse, which all of a layer's share. */
#include "runtime/graph/rewrite.h"
#include "runtime/optimize/optimize.h"

enum { MOST_GATHERS = 16 };

/* The indices of a sort, of all elements along an axis that they have. */
static bool is_order(const ml_graph *g, ml_ref n, ml_axis *axis) {
    if (ml_graph_node(g, n)->op != ML_OP_OUT) return false;
    ml_ref sort = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, sort)->op != ML_OP_SORT) return false;
    *axis = (ml_axis)ml_graph_args(g, sort)[0];
    return true;
}

static bool is_integer(const ml_graph *g, ml_ref n, int64_t *value) {
    while (ml_graph_node(g, n)->op == ML_OP_BROADCAST) n = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, n)->op != ML_OP_CONST) return false;
    *value = ml_graph_args(g, n)[0];
    return true;
}

typedef struct {
    ml_ref order; /* in the old graph */
    ml_axis rows; /* that it sorts */
    int64_t each;
} sorted_index;

/* Whether it is a SCATTER_ADD whose index is an order, or one divided, so that every element of the
 * result gets `each` values. */
static bool find_index(const ml_graph *g, ml_ref scatter, sorted_index *found) {
    const ml_node *node = ml_graph_node(g, scatter);
    if (node->op != ML_OP_SCATTER_ADD || node->source_count != 2) return false;
    ml_ref index = ml_graph_source(g, scatter, 0);
    ml_axis along = (ml_axis)ml_graph_args(g, scatter)[0];
    const ml_type *result = ml_graph_type(g, scatter), *indices = ml_graph_type(g, index);
    found->order = index;
    found->each = 1;
    if (ml_graph_node(g, index)->op == ML_OP_IDIV) {
        found->order = ml_graph_source(g, index, 0);
        if (!is_integer(g, ml_graph_source(g, index, 1), &found->each)) return false;
    }
    if (!is_order(g, found->order, &found->rows)) return false;
    int at = ml_type_find(indices, found->rows), to = ml_type_find(result, along);
    if (at < 0 || to < 0 || ml_graph_type(g, found->order)->rank != indices->rank) return false;
    for (int i = 0; i < indices->rank;
         i++) /* others are the result's too: nothing else is summed */
        if (i != at && (indices->axis[i] == along || ml_type_find(result, indices->axis[i]) < 0))
            return false;
    return found->each >= 1 && found->each <= MOST_GATHERS &&
           result->size[to] * found->each == indices->size[at];
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    sorted_index found;
    if (!find_index(r->from, n, &found)) return rewrite_copy(r, n, sources);
    ml_graph *g = r->to;
    const ml_type type = *ml_graph_type(r->from, n);
    ml_axis along = (ml_axis)ml_graph_args(r->from, n)[0];
    int64_t size = ml_type_size(&type, along);
    ml_ref order = r->map[found.order], sum = 0;
    ml_ref inverse =
        ml_out(g, ml_graph_add(g, ML_OP_SORT, &order, 1, (int64_t[]){found.rows, 0}, 2, NULL), 1);
    ml_dtype wide = ml_compute_dtype(type.dtype);
    for (int64_t j = 0; j < found.each; j++) {
        ml_ref at = inverse;
        if (found.each > 1 || along != found.rows) {
            at = ml_iota(g, along, size);
            at = ml_map2(g, ML_OP_MUL, at, ml_const_int(g, ML_I32, found.each));
            at = ml_map2(g, ML_OP_ADD, at, ml_const_int(g, ML_I32, j));
            at = ml_gather(g, inverse, at, found.rows);
        }
        ml_ref value = ml_cast(g, ml_gather(g, sources[1], at, found.rows), wide);
        sum = sum ? ml_map2(g, ML_OP_ADD, sum, value) : value;
    }
    return ml_permute(g, ml_cast(g, sum, (ml_dtype)type.dtype), &type);
}

bool ml_invert_permutations_applies(const ml_graph *g) {
    sorted_index found;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (find_index(g, n, &found)) return true;
    return false;
}

ml_graph *ml_invert_permutations(const ml_graph *from, ml_roots *roots) {
    return rewrite_run(from, roots, NULL, rule, NULL);
}
