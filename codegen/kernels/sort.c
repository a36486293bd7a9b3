/* Sorts on CUDA of integers that the graph says are few kinds or a permutation: nothing is
 * compared. Numbers that TOP_K or ARGMAX chose (a token's experts) are counted
 * (cuda/sort_counted.cu); sorting the indices that a SORT gave gives the inverse permutation
 * (cuda/sort_inverse.cu). */
#include "codegen/kernels/template.h"

enum { THREADS = 1024, MOST_KINDS = 256, MOST_HELD = 32 };

/* What has the same elements in another order or shape. */
static ml_ref unmoved(const ml_graph *g, ml_ref n) {
    while (ml_op_is(ml_graph_node(g, n)->op, ML_VIEW)) n = ml_graph_source(g, n, 0);
    return n;
}

/* All elements are at least 0 and less than this; 0 where that is not known. */
static int64_t kinds_of(const ml_graph *g, ml_ref n) {
    n = unmoved(g, n);
    bool chosen = ml_graph_node(g, n)->op == ML_OP_OUT; /* of several: TOP_K's indices */
    if (chosen) n = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, n)->op != (chosen ? ML_OP_TOP_K : ML_OP_ARGMAX)) return 0;
    const ml_type *from = ml_graph_type(g, ml_graph_source(g, n, 0));
    return from->size[ml_type_find(from, (ml_axis)ml_graph_args(g, n)[0])];
}

/* The indices of a sort along the same axis. */
static bool is_permutation(const ml_graph *g, ml_ref n, ml_axis axis) {
    while (ml_graph_node(g, n)->op == ML_OP_PERMUTE) n = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, n)->op != ML_OP_OUT) return false;
    ml_ref sort = ml_graph_source(g, n, 0);
    return ml_graph_node(g, sort)->op == ML_OP_SORT && (ml_axis)ml_graph_args(g, sort)[0] == axis;
}

const char *template_sort_known(ml_template *t, const ml_graph *g, ml_ref sort, int64_t size,
                                template_sort_grid *grid) {
    enum { PART = 256 };
    ml_ref x = ml_graph_source(g, sort, 0);
    if (ml_graph_node(g, sort)->op != ML_OP_SORT || ml_graph_type(g, x)->dtype != ML_I32)
        return NULL;
    *grid = (template_sort_grid){(size + PART - 1) / PART, PART};
    template_set(t, "PARTS", "%lld", (long long)grid->blocks);
    if (is_permutation(g, x, (ml_axis)ml_graph_args(g, sort)[0])) return "sort_inverse.cu";
    int64_t kinds = kinds_of(g, x), held = (size + THREADS - 1) / THREADS;
    if (kinds == 0 || kinds > MOST_KINDS || held > MOST_HELD) return NULL;
    *grid = (template_sort_grid){1, THREADS};
    template_set(t, "KINDS", "%lld", (long long)kinds);
    template_set(t, "HELD", "%lld", (long long)held);
    return "sort_counted.cu";
}
