/* Sums of squares of products by groups of rows (passes.h, ragged.h): the norm of the experts'
 * gradients without reading them again. */
#include "runtime/graph/rewrite.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/passes/passes.h"

typedef struct {
    ml_ref outer;
    int64_t start, stop; /* of its last axis */
} part;

/* Whether n is the sum of the squares of all of a RAGGED_OUTER in f32, or of whole blocks of its
 * columns. */
static bool is_norm(const ml_graph *g, ml_ref n, part *found) {
    const ml_node *node = ml_graph_node(g, n);
    if (node->op != ML_OP_SUM || ml_graph_type(g, n)->rank > 0) return false;
    ml_ref square = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, square)->op != ML_OP_MUL) return false;
    ml_ref x = ml_graph_source(g, square, 0);
    if (x != ml_graph_source(g, square, 1)) return false;
    ml_axis sliced = 0;
    for (;; x = ml_graph_source(g, x, 0)) {
        const int64_t *args = ml_graph_args(g, x);
        int op = ml_graph_node(g, x)->op;
        if (op == ML_OP_SLICE && !sliced)
            sliced = (ml_axis)args[0], found->start = args[1], found->stop = args[2];
        else if ((op != ML_OP_RENAME && op != ML_OP_PERMUTE) || sliced)
            break;
    }
    const ml_type *type = ml_graph_type(g, x);
    if (ml_graph_node(g, x)->op != ML_OP_RAGGED_OUTER || type->dtype != ML_F32) return false;
    found->outer = x;
    if (!sliced) found->start = 0, found->stop = type->size[2];
    return (!sliced || sliced == type->axis[2]) && found->start % RAGGED_SQUARE_COLUMNS == 0 &&
           (found->stop % RAGGED_SQUARE_COLUMNS == 0 || found->stop == type->size[2]);
}

static void begin(rewrite *r) {
    bool *wanted = r->context = ML_NEW_ARRAY(r->scratch, bool, r->count);
    part found;
    for (ml_ref n = 1; n < r->count; n++)
        if (r->users[n] && is_norm(r->from, n, &found)) wanted[found.outer] = true;
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    const bool *wanted = r->context;
    part found;
    if (wanted[n]) {
        const int64_t *args = ml_graph_args(r->from, n);
        int64_t with_squares[] = {args[0], args[1], 1};
        return ml_graph_add(r->to, ML_OP_RAGGED_OUTER, sources,
                            ml_graph_node(r->from, n)->source_count, with_squares, 3,
                            &(ml_type){.dtype = ML_F32});
    }
    if (!is_norm(r->from, n, &found)) return rewrite_copy(r, n, sources);
    ml_ref squares = ml_out(r->to, r->map[found.outer], 1);
    const ml_type type = *ml_graph_type(r->to, squares);
    int64_t start = found.start / RAGGED_SQUARE_COLUMNS;
    int64_t stop = ragged_blocks(found.stop, RAGGED_SQUARE_COLUMNS);
    if (stop - start < type.size[2]) squares = ml_slice(r->to, squares, type.axis[2], start, stop);
    return ml_reduce(r->to, ML_OP_SUM, squares, type.axis, type.rank);
}

bool ml_fuse_expert_norms_applies(const ml_graph *g) {
    part found;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (is_norm(g, n, &found)) return true;
    return false;
}

ml_graph *ml_fuse_expert_norms(const ml_graph *from, ml_roots *roots) {
    return rewrite_run(from, roots, begin, rule, NULL);
}
