/* Sums of scaled terms (passes.h): sum(a r + b s), where r and s do not change along the summed
 * axes, becomes r sum(a) + s sum(b). A norm's gradient sums what it has scaled by another sum: as
 * it stands that takes a pass of its own over the row, and with its terms apart none. */
#include "runtime/graph/rewrite.h"
#include "runtime/optimize/optimize.h"

typedef struct {
    ml_ref what[2], scale[2]; /* by term */
    ml_axis summed[ML_MAX_AXES];
    int count;
} split;

/* Whether n is constant along the summed axes. */
static bool is_even(const ml_graph *g, ml_ref n, const split *s) {
    const ml_type *type = ml_graph_type(g, n);
    for (int i = 0; i < s->count; i++)
        if (ml_type_find(type, s->summed[i]) >= 0) return false;
    return true;
}

/* A product of something that changes along all of the axes, and of something that does not. */
static bool is_scaled(const ml_graph *g, ml_ref n, const split *s, ml_ref *what, ml_ref *scale) {
    if (ml_graph_node(g, n)->op != ML_OP_MUL) return false;
    for (int side = 0; side < 2; side++) {
        *what = ml_graph_source(g, n, side);
        *scale = ml_graph_source(g, n, 1 - side);
        bool whole = ml_type_equal(ml_graph_type(g, *what), ml_graph_type(g, n));
        if (whole && ml_graph_type(g, *scale)->rank > 0 && is_even(g, *scale, s)) return true;
    }
    return false;
}

static bool splits(const ml_graph *g, ml_ref n, split *s) {
    const ml_node *node = ml_graph_node(g, n);
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, n)->dtype;
    if (node->op != ML_OP_SUM || (dtype != ML_F32 && dtype != ML_F64)) return false;
    ml_ref term = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, term)->op != ML_OP_ADD) return false;
    s->count = node->arg_count;
    for (int i = 0; i < s->count; i++) s->summed[i] = (ml_axis)ml_graph_args(g, n)[i];
    for (int i = 0; i < 2; i++) {
        ml_ref part = ml_graph_source(g, term, i);
        if (!ml_type_equal(ml_graph_type(g, part), ml_graph_type(g, term)) ||
            !is_scaled(g, part, s, &s->what[i], &s->scale[i]))
            return false;
    }
    return true;
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    const ml_type type = *ml_graph_type(r->from, n);
    split s;
    ml_ref sum = 0;
    if (!splits(r->from, n, &s)) return rewrite_copy(r, n, sources);
    for (int i = 0; i < 2; i++) {
        ml_ref part = ml_reduce(r->to, ML_OP_SUM, r->map[s.what[i]], s.summed, s.count);
        part = ml_map2(r->to, ML_OP_MUL, part, r->map[s.scale[i]]);
        sum = sum ? ml_map2(r->to, ML_OP_ADD, sum, part) : part;
    }
    return ml_permute(r->to, sum, &type);
}

bool ml_split_scaled_sums_applies(const ml_graph *g) {
    split s;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (splits(g, n, &s)) return true;
    return false;
}

ml_graph *ml_split_scaled_sums(const ml_graph *from, ml_roots *roots) {
    return rewrite_run(from, roots, NULL, rule, NULL);
}
