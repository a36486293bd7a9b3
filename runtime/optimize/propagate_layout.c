/* Propagating layouts (passes.h). Collectives split and concatenate along the outermost axis, so
 * sharding permutes their operands and permutes their results back to the order of the script. Here
 * permutations move from operands to results, past products, routines and elementwise ops, until
 * they meet and cancel; those that are left are views, or are written by a kernel.
 *
 * Where no collective comes before what they would have to meet, as where sequences are split, rows
 * of tables that are gathered (embeddings) may come in the collectives' order from the beginning:
 * their indices are permuted, which are few. */
#include "runtime/graph/rewrite.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/optimize/optimize.h"
#include "runtime/passes/passes.h"

static ml_op op_of(const ml_graph *g, ml_ref n) {
    return (ml_op)ml_graph_node(g, n)->op;
}

enum { FEW_AXES = 2 }; /* of what has so few the order hardly matters */

/* Whether rows of the innermost axis of one type are rows of the other. */
static bool same_rows(const ml_type *a, const ml_type *b) {
    return a->rank <= FEW_AXES || a->axis[a->rank - 1] == b->axis[b->rank - 1];
}

/* The source of n where n is a permutation that keeps rows; else n. */
static ml_ref unpermuted(const ml_graph *g, ml_ref n) {
    if (op_of(g, n) != ML_OP_PERMUTE) return n;
    ml_ref source = ml_graph_source(g, n, 0);
    return same_rows(ml_graph_type(g, source), ml_graph_type(g, n)) ? source : n;
}

/* n over other sources, whose axes may have another order than those of n's own. */
static ml_ref operate(rewrite *r, ml_ref n, const ml_ref *sources, const ml_type *type) {
    const ml_node *node = ml_graph_node(r->from, n);
    return ml_graph_add(r->to, (ml_op)node->op, sources, node->source_count,
                        ml_graph_args(r->from, n), node->arg_count, type);
}

/* Elementwise: in the order of the first operand of all axes that is permuted. */
static ml_ref move_past_map(rewrite *r, ml_ref n, const ml_ref *sources) {
    ml_type type = *ml_graph_type(r->from, n), order = type;
    ml_ref moved[3];
    int count = ml_graph_node(r->from, n)->source_count;
    bool found = false;
    for (int i = 0; i < count && !found; i++) {
        ml_ref before = unpermuted(r->to, sources[i]);
        found = before != sources[i] && ml_graph_type(r->to, before)->rank == type.rank;
        if (found) order = *ml_graph_type(r->to, before);
    }
    if (!found) return rewrite_copy(r, n, sources);
    order.dtype = type.dtype;
    for (int i = 0; i < count; i++) {
        bool all = ml_graph_type(r->to, sources[i])->rank == type.rank;
        moved[i] = all ? ml_permute(r->to, sources[i], &order) : sources[i];
    }
    return ml_permute(r->to, operate(r, n, moved, &order), &type);
}

/* Of two operands all that can be moved: the innermost axis of a product's result is that of an
 * operand whose own innermost one is summed over, and attention reads its rows. */
static ml_ref move_past_operands(rewrite *r, ml_ref n, const ml_ref *sources) {
    static const bool moves[][2] = {{true, true}, {true, false}, {false, true}};
    int count = ml_graph_node(r->from, n)->source_count;
    bool any = false;
    for (int k = 0; k < count && k < 2; k++)
        any = any || unpermuted(r->to, sources[k]) != sources[k];
    for (int i = 0; any && i < 3; i++) {
        ml_ref moved[3]; /* the third is a scale */
        for (int k = 0; k < count; k++)
            moved[k] = k < 2 && moves[i][k] ? unpermuted(r->to, sources[k]) : sources[k];
        ml_ref made = operate(r, n, moved, ml_graph_type(r->from, n));
        if (same_rows(ml_graph_type(r->to, made), ml_graph_type(r->from, n)))
            return ml_permute(r->to, made, ml_graph_type(r->from, n));
    }
    return rewrite_copy(r, n, sources);
}

/* Results have the orders of q, k and v. */
static ml_ref move_past_attention(rewrite *r, ml_ref n, const ml_ref *sources) {
    enum { Q, K, V, ORDERED };
    const ml_node *node = ml_graph_node(r->from, n);
    bool grad = node->op == ML_OP_ATTENTION_GRAD;
    ml_attention_args args;
    ml_attention_read(r->from, n, &args);
    if (args.score || args.derivative || unpermuted(r->to, sources[Q]) == sources[Q])
        return rewrite_copy(r, n, sources);
    ml_ref *moved = ML_NEW_ARRAY(r->scratch, ml_ref, node->source_count);
    for (int i = 0; i < node->source_count; i++)
        moved[i] = i < ORDERED ? unpermuted(r->to, sources[i]) : sources[i];
    ml_ref made = grad ? ml_attention_grad(r->to, moved, node->source_count, &args)
                       : ml_attention(r->to, moved, node->source_count, &args);
    ml_ref *outputs = r->outputs[n] = ML_NEW_ARRAY(r->scratch, ml_ref, ML_MAX_OUTPUTS);
    outputs[0] = ml_permute(r->to, made, ml_graph_type(r->from, n));
    ml_type logsumexp; /* of the scores, but for the last axis */
    ml_attention_score_type(r->from, ml_graph_source(r->from, n, Q), ml_graph_source(r->from, n, K),
                            &args, &logsumexp);
    logsumexp.rank--;
    for (int i = 1; i < ml_op_outputs(r->to, made); i++) {
        const ml_type *order = /* dk and dv are in the orders of k and v */
            grad ? ml_graph_type(r->from, ml_graph_source(r->from, n, i)) : &logsumexp;
        outputs[i] = ml_permute(r->to, ml_out(r->to, made, i), order);
    }
    return outputs[0];
}

/* Rows are added up in the order that they have; the indices are permuted, which are fewer. */
static ml_ref move_past_scatter(rewrite *r, ml_ref n, const ml_ref *sources) {
    ml_ref rows = unpermuted(r->to, sources[1]);
    if (rows == sources[1]) return rewrite_copy(r, n, sources);
    const ml_type *order = ml_graph_type(r->to, rows), *index = ml_graph_type(r->to, sources[0]);
    ml_type type = {.dtype = index->dtype};
    for (int i = 0; i < order->rank; i++) {
        int at = ml_type_find(index, order->axis[i]);
        if (at < 0) continue;
        type.axis[type.rank] = order->axis[i];
        type.size[type.rank++] = index->size[at];
    }
    if (type.rank != index->rank) return rewrite_copy(r, n, sources);
    ml_ref moved[] = {ml_permute(r->to, sources[0], &type), rows};
    return operate(r, n, moved, ml_graph_type(r->from, n));
}

/* In the order that all operands have where it is one. */
static ml_ref move_past_concat(rewrite *r, ml_ref n, const ml_ref *sources) {
    int count = ml_graph_node(r->from, n)->source_count;
    ml_ref *moved = ML_NEW_ARRAY(r->scratch, ml_ref, count);
    const ml_type *first = ml_graph_type(r->to, moved[0] = unpermuted(r->to, sources[0]));
    if (moved[0] == sources[0]) return rewrite_copy(r, n, sources);
    for (int i = 1; i < count; i++) {
        moved[i] = unpermuted(r->to, sources[i]);
        const ml_type *type = ml_graph_type(r->to, moved[i]);
        for (int k = 0; k < type->rank; k++)
            if (type->axis[k] != first->axis[k]) return rewrite_copy(r, n, sources);
    }
    return ml_permute(r->to, operate(r, n, moved, ml_graph_type(r->from, n)),
                      ml_graph_type(r->from, n));
}

/* Results have the order of the state. */
static ml_ref move_past_scan(rewrite *r, ml_ref n, const ml_ref *sources) {
    int count = ml_graph_node(r->from, n)->source_count;
    ml_ref *moved = ML_NEW_ARRAY(r->scratch, ml_ref, count);
    for (int i = 0; i < count; i++)
        moved[i] = i == LINEAR_SCAN_STATE ? sources[i] : unpermuted(r->to, sources[i]);
    return rewrite_copy(r, n, moved);
}

/* Ops that take their operands in any order and give their result in one that follows from it. */
static bool follows(ml_op op) {
    return op == ML_OP_DOT || op == ML_OP_SUM || op == ML_OP_MAX || op == ML_OP_MIN ||
           op == ML_OP_SLICE || op == ML_OP_PAD || op == ML_OP_SPLIT || op == ML_OP_RENAME ||
           op == ML_OP_ALL_REDUCE || op == ML_OP_SHIFT || op == ML_OP_REVERSE;
}

/* ---- Rows of tables -------------------------------------------------------------------------- */

typedef struct {
    ml_axis axis[ML_MAX_AXES];
    int count;
} axes;

static bool has_axis(const axes *a, ml_axis axis) {
    for (int i = 0; i < a->count; i++)
        if (a->axis[i] == axis) return true;
    return false;
}

/* The axes that are permuted to be outermost for collectives, under all their names. */
static axes axes_of_collectives(const ml_graph *g) {
    axes found = {0};
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        if (ml_ops[op_of(g, n)].op_class != ML_CLASS_COLLECTIVE) continue;
        ml_ref source = ml_graph_source(g, n, 0);
        ml_axis axis = ml_graph_type(g, source)->axis[0];
        if (op_of(g, source) != ML_OP_PERMUTE || has_axis(&found, axis)) continue;
        if (found.count < ML_MAX_AXES) found.axis[found.count++] = axis;
    }
    return found;
}

/* Rows that are gathered come in the order in which such an axis is outermost. */
static ml_ref gather_in_order(rewrite *r, ml_ref n, const ml_ref *sources) {
    if (op_of(r->from, n) != ML_OP_GATHER) return rewrite_copy(r, n, sources);
    ml_type type = *ml_graph_type(r->from, n), order = *ml_graph_type(r->to, sources[1]);
    int at = order.rank - 1;
    while (at > 0 && !has_axis(r->context, order.axis[at])) at--;
    if (at <= 0 || type.rank != order.rank + 1) return rewrite_copy(r, n, sources);
    ml_axis axis = order.axis[at];
    int64_t size = order.size[at];
    for (; at > 0; at--) order.axis[at] = order.axis[at - 1], order.size[at] = order.size[at - 1];
    order.axis[0] = axis, order.size[0] = size;
    ml_ref moved[] = {sources[0], ml_permute(r->to, sources[1], &order)};
    ml_ref made = ml_graph_add(r->to, ML_OP_GATHER, moved, 2, ml_graph_args(r->from, n),
                               ml_graph_node(r->from, n)->arg_count, NULL);
    return ml_permute(r->to, made, &type);
}

ml_graph *ml_gather_in_order(const ml_graph *from, ml_roots *roots) {
    axes of_collectives = axes_of_collectives(from);
    return of_collectives.count ? rewrite_run(from, roots, NULL, gather_in_order, &of_collectives)
                                : NULL;
}

/* ---- All of it ------------------------------------------------------------------------------- */

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    ml_op op = op_of(r->from, n);
    if (ml_op_attends(op)) return move_past_attention(r, n, sources);
    if (ml_op_is_linear_scan(op)) return move_past_scan(r, n, sources);
    if (op == ML_OP_CONCAT) return move_past_concat(r, n, sources);
    if (op == ML_OP_SCATTER_ADD) return move_past_scatter(r, n, sources);
    if (follows(op)) return move_past_operands(r, n, sources);
    if (ml_op_is_function(op)) return move_past_map(r, n, sources);
    return rewrite_copy(r, n, sources);
}

/* What is read to compute n: what elementwise ops make of smaller tensors is in no memory. */
static int64_t read_bytes(const ml_graph *g, ml_ref n, int depth) {
    int64_t own = ml_type_bytes(ml_graph_type(g, n)), sum = 0;
    ml_op op = op_of(g, n);
    if (op == ML_OP_CONST || op == ML_OP_IOTA) return 0;
    if (depth == 0 || !(ml_op_is_function(op) || op == ML_OP_BROADCAST)) return own;
    for (int i = 0; i < ml_graph_node(g, n)->source_count && sum < own; i++)
        sum += read_bytes(g, ml_graph_source(g, n, i), depth - 1);
    return sum < own ? sum : own;
}

int64_t ml_permuted_bytes(const ml_graph *g, const uint32_t *times) {
    enum { DEPTH = 4 };
    int64_t bytes = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (op_of(g, n) == ML_OP_PERMUTE)
            bytes += read_bytes(g, ml_graph_source(g, n, 0), DEPTH) * (times ? times[n] : 1);
    return bytes;
}

ml_graph *ml_propagate_layout(const ml_graph *from, ml_roots *roots) {
    ml_graph *sunk = rewrite_run(from, roots, NULL, rule, NULL);
    ml_graph *simple = ml_simplify(sunk, roots); /* where they cancel */
    ml_graph_free(sunk);
    return simple;
}
