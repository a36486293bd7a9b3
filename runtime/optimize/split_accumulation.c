/* Sums over microbatches (passes.h): sum + (a + b + ...) becomes ((sum + a) + b) + ..., where
 * `sum` is a state or zero and the terms are products and scatter-adds, each of which can then add
 * to the state where it is. */
#include "runtime/graph/rewrite.h"
#include "runtime/optimize/optimize.h"

enum { MOST_TERMS = 256 };

static bool is_sum(const rewrite *r, ml_ref n, const ml_type *type) {
    return ml_graph_node(r->from, n)->op == ML_OP_ADD && r->users[n] == 1 &&
           ml_type_equal(ml_graph_type(r->from, n), type);
}

/* The terms of a sum, in the order in which they are computed; -1 where there are too many or one
 * is no product or scatter-add that nothing else reads. */
static int find_terms(const rewrite *r, ml_ref n, const ml_type *type, ml_ref *terms, int count) {
    int op = ml_graph_node(r->from, n)->op;
    if (count < 0 || count == MOST_TERMS) return -1;
    if (is_sum(r, n, type)) {
        count = find_terms(r, ml_graph_source(r->from, n, 0), type, terms, count);
        return find_terms(r, ml_graph_source(r->from, n, 1), type, terms, count);
    }
    if ((op != ML_OP_DOT && op != ML_OP_SCATTER_ADD) || r->users[n] != 1 ||
        !ml_type_equal(ml_graph_type(r->from, n), type))
        return -1;
    int at = count;
    for (; at > 0 && terms[at - 1] > n; at--) terms[at] = terms[at - 1];
    terms[at] = n;
    return count + 1;
}

static bool is_kept(const rewrite *r, ml_ref n) {
    const ml_node *node = ml_graph_node(r->from, n);
    return node->op == ML_OP_WHERE && r->users[n] == 1 &&
           ml_graph_node(r->from, ml_graph_source(r->from, n, 2))->op == ML_OP_STATE;
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    ml_type type = *ml_graph_type(r->from, n);
    ml_ref terms[MOST_TERMS];
    for (int i = 0; i < 2 && ml_graph_node(r->from, n)->op == ML_OP_ADD; i++) {
        ml_ref kept = ml_graph_source(r->from, n, i), sum = ml_graph_source(r->from, n, 1 - i);
        if (!is_kept(r, kept) || !is_sum(r, sum, &type)) continue;
        int count = find_terms(r, sum, &type, terms, 0);
        ml_ref total = sources[i];
        for (int t = 0; t < count; t++) total = ml_map2(r->to, ML_OP_ADD, total, r->map[terms[t]]);
        if (count > 0) return total;
    }
    return rewrite_copy(r, n, sources);
}

ml_graph *ml_split_accumulation(const ml_graph *from, ml_roots *roots) {
    return rewrite_run(from, roots, NULL, rule, NULL);
}
