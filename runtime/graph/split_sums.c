/* Sums of scaled terms (passes.h): sum(a r + b s), where r and s do not change along the summed
 * axes, becomes r sum(a) + s sum(b). A norm's gradient sums what it has scaled by another sum: as
 * it stands that takes a pass of its own over the row, and with its terms apart none. */
#include "runtime/graph/rewrite.h"

/* Whether n is constant along the axes. */
static bool is_even(const rewrite *r, ml_ref n, const int64_t *axes, int count) {
    const ml_type *type = ml_graph_type(r->from, n);
    for (int i = 0; i < count; i++)
        if (ml_type_find(type, (ml_axis)axes[i]) >= 0) return false;
    return true;
}

/* A product of something that changes along all of the axes, and of something that does not. */
static bool is_scaled(const rewrite *r, ml_ref n, const int64_t *axes, int count, ml_ref *what,
                      ml_ref *scale) {
    if (ml_graph_node(r->from, n)->op != ML_OP_MUL) return false;
    for (int side = 0; side < 2; side++) {
        *what = ml_graph_source(r->from, n, side);
        *scale = ml_graph_source(r->from, n, 1 - side);
        const ml_type *type = ml_graph_type(r->from, *what);
        bool whole = ml_type_equal(type, ml_graph_type(r->from, n));
        if (whole && ml_graph_type(r->from, *scale)->rank > 0 && is_even(r, *scale, axes, count))
            return true;
    }
    return false;
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    const ml_node *node = ml_graph_node(r->from, n);
    const ml_type type = *ml_graph_type(r->from, n);
    ml_ref term = node->op == ML_OP_SUM ? ml_graph_source(r->from, n, 0) : 0, what[2], scale[2];
    if (!term || ml_graph_node(r->from, term)->op != ML_OP_ADD ||
        (type.dtype != ML_F32 && type.dtype != ML_F64))
        return rewrite_copy(r, n, sources);
    int64_t axes[ML_MAX_AXES];
    ml_axis summed[ML_MAX_AXES];
    for (int i = 0; i < node->arg_count; i++)
        summed[i] = (ml_axis)(axes[i] = ml_graph_args(r->from, n)[i]);
    ml_ref sum = 0;
    for (int i = 0; i < 2; i++) {
        ml_ref part = ml_graph_source(r->from, term, i);
        if (!ml_type_equal(ml_graph_type(r->from, part), ml_graph_type(r->from, term)) ||
            !is_scaled(r, part, axes, node->arg_count, &what[i], &scale[i]))
            return rewrite_copy(r, n, sources);
    }
    for (int i = 0; i < 2; i++) {
        ml_ref part = ml_reduce(r->to, ML_OP_SUM, r->map[what[i]], summed, node->arg_count);
        part = ml_map2(r->to, ML_OP_MUL, part, r->map[scale[i]]);
        sum = sum ? ml_map2(r->to, ML_OP_ADD, sum, part) : part;
    }
    return ml_permute(r->to, sum, &type);
}

ml_graph *ml_split_sums(const ml_graph *from, ml_roots *roots) {
    return rewrite_run(from, roots, NULL, rule, NULL);
}
