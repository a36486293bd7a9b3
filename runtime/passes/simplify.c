/* Simplification (passes.h): one pass from sources to users, peepholes at each node, then dead
 * code. Here: the frame, and the rules that look at how often a node is used. */
#include "runtime/passes/simplify.h"
#include "runtime/passes/passes.h"

#include <assert.h>
#include <string.h>

/* ---- Making nodes ---------------------------------------------------------------------------- */

static ml_ref *better_of(simplifier *s, ml_ref n) {
    while (s->better.count <= n) ML_PUSH(s->scratch, &s->better);
    return &s->better.at[n];
}

static ml_ref rule_for(simplifier *s, ml_ref n) {
    ml_op op = ml_graph_node(s->graph, n)->op;
    ml_op_class op_class = ml_ops[op].op_class;
    if (op_class == ML_CLASS_MAP) return simplify_map(s, n);
    if (op_class == ML_CLASS_REDUCE) return simplify_reduce(s, n);
    bool moves = op_class == ML_CLASS_MOVE || op == ML_OP_SCATTER_ADD;
    return moves ? simplify_move(s, n) : 0;
}

static ml_ref simplest(simplifier *s, ml_ref n) {
    if (*better_of(s, n)) return *better_of(s, n);
    ml_ref made = rule_for(s, n);
    if (!made) made = n;
    ml_type type = *ml_graph_type(s->graph, n);
    assert(ml_graph_type(s->graph, made)->dtype == type.dtype);
    made = made == n ? n : simplify_fit(s, made, &type);
    return *better_of(s, n) = *better_of(s, made) = made;
}

ml_ref simplify_make(simplifier *s, ml_op op, const ml_ref *sources, int source_count,
                     const int64_t *args, int arg_count, const ml_type *type) {
    return simplest(s, ml_graph_add(s->graph, op, sources, source_count, args, arg_count, type));
}

ml_ref simplify_map1(simplifier *s, ml_op op, ml_ref a) {
    return simplify_make(s, op, &a, 1, NULL, 0, NULL);
}

ml_ref simplify_map2(simplifier *s, ml_op op, ml_ref a, ml_ref b) {
    return simplify_make(s, op, (ml_ref[]){a, b}, 2, NULL, 0, NULL);
}

ml_ref simplify_cast(simplifier *s, ml_ref a, ml_dtype dtype) {
    if (ml_graph_type(s->graph, a)->dtype == dtype) return a;
    return simplify_make(s, ML_OP_CAST, &a, 1, NULL, 0, &(ml_type){.dtype = dtype});
}

ml_ref simplify_fit(simplifier *s, ml_ref x, const ml_type *as) {
    ml_type type = *ml_graph_type(s->graph, x), wanted = *as;
    wanted.dtype = type.dtype;
    if (ml_type_equal(&type, &wanted)) return x;
    ml_op op = type.rank == wanted.rank ? ML_OP_PERMUTE : ML_OP_BROADCAST;
    return simplify_make(s, op, &x, 1, NULL, 0, &wanted);
}

ml_ref simplify_rename(simplifier *s, ml_ref x, const ml_type *as) {
    ml_type type = *ml_graph_type(s->graph, x);
    int64_t args[2 * ML_MAX_AXES];
    int count = 0;
    for (int i = 0; i < type.rank; i++)
        if (type.axis[i] != as->axis[i]) args[count++] = type.axis[i], args[count++] = as->axis[i];
    return count ? simplify_make(s, ML_OP_RENAME, &x, 1, args, count, NULL) : x;
}

bool simplify_constant(const ml_graph *g, ml_ref n, reference_cell *value) {
    while (ml_graph_node(g, n)->op == ML_OP_BROADCAST) n = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, n)->op != ML_OP_CONST) return false;
    memcpy(value, ml_graph_args(g, n), sizeof *value);
    return true;
}

ml_ref simplify_full(simplifier *s, const ml_type *as, reference_cell value) {
    ml_type scalar = {.dtype = as->dtype};
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return simplify_fit(s, ml_graph_add(s->graph, ML_OP_CONST, NULL, 0, &bits, 1, &scalar), as);
}

/* ---- Rules that need to know that a value has no other user ---------------------------------- */

/* Gradients of tied weights are chains of additions; longer ones stay as they are. */
enum { WIDEN_DEPTH = 64 };

/* Nodes that flow into the gradient of a state by additions and movements alone. Their f32 form is
 * stored in any case. (A product in the middle of a program is better left in bf16: half the bytes
 * to write and to read, though its next user computes in f32.) */
static void find_gradients(rewrite *r) {
    simplifier *s = r->context;
    s->gradient = ML_NEW_ARRAY(r->scratch, bool, r->count);
    for (ml_ref n = r->count; n-- > 1;) {
        if (!r->users[n]) continue;
        const ml_node *node = ml_graph_node(r->from, n);
        s->gradient[n] = s->gradient[n] || (node->flags & ML_NODE_GRADIENT);
        bool passes_on = node->op == ML_OP_ADD || ml_ops[node->op].op_class == ML_CLASS_MOVE;
        for (int i = 0; i < node->source_count && passes_on && s->gradient[n]; i++)
            s->gradient[ml_graph_source(r->from, n, i)] = true;
    }
}

/* Whether `node` (of the old graph) serves nothing but a cast to f32 and gains from being f32
 * itself: products and sums accumulate in f32 anyway, additions and movements of them follow. */
static bool widens(rewrite *r, ml_ref node, int depth) {
    simplifier *s = r->context;
    const ml_node *n = ml_graph_node(r->from, node);
    if (r->users[node] != 1 || depth == WIDEN_DEPTH ||
        !ml_is_narrow((ml_dtype)ml_graph_type(r->from, node)->dtype))
        return false;
    const ml_ref *sources = ml_graph_sources(r->from, node);
    bool sums = ml_op_is(n->op, ML_WIDENS) || n->op == ML_OP_SUM;
    bool moves = ml_op_moves(n->op) && n->op != ML_OP_BROADCAST && n->op != ML_OP_CONCAT;
    bool wide =
        sums || (n->op == ML_OP_CAST && ml_graph_type(r->from, sources[0])->dtype == ML_F32);
    for (int i = 0; (n->op == ML_OP_ADD || moves) && i < n->source_count; i++)
        wide = widens(r, sources[i], depth + 1) || wide;
    return s->wide[node] = wide;
}

static void find_wide(rewrite *r) {
    simplifier *s = r->context;
    s->wide = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->widened = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    for (ml_ref n = 1; n < r->count; n++) {
        if (!r->users[n] || ml_graph_node(r->from, n)->op != ML_OP_CAST) continue;
        ml_ref source = ml_graph_source(r->from, n, 0);
        bool sum = ml_graph_node(r->from, source)->op == ML_OP_SUM;
        if (ml_graph_type(r->from, n)->dtype == ML_F32 && (sum || s->gradient[n]))
            (void)widens(r, source, 0);
    }
}

/* The f32 form of a node marked wide, made where the node was: later it would keep its operands
 * alive. */
static ml_ref widened(rewrite *r, ml_ref node) {
    simplifier *s = r->context;
    const ml_node *n = ml_graph_node(r->from, node);
    ml_type type = *ml_graph_type(r->from, node);
    type.dtype = ML_F32;
    if (n->op == ML_OP_CAST) return r->map[ml_graph_source(r->from, node, 0)];
    ml_ref sources[4];
    bool keeps = ml_op_is(n->op, ML_WIDENS); /* narrow operands */
    for (int i = 0; i < n->source_count; i++) {
        ml_ref source = ml_graph_source(r->from, node, i);
        sources[i] = s->wide[source] ? s->widened[source] : r->map[source];
        if (!keeps) sources[i] = simplify_cast(s, sources[i], ML_F32);
    }
    return simplify_make(s, n->op, sources, n->source_count, ml_graph_args(r->from, node),
                         n->arg_count, &type);
}

/* A f32 product of narrow operands that is only rounded to their dtype afterwards. */
static ml_ref narrow(rewrite *r, ml_ref node, ml_dtype dtype) {
    const ml_node *n = ml_graph_node(r->from, node);
    if (n->op != ML_OP_DOT || r->users[node] != 1) return 0;
    const ml_ref *old = ml_graph_sources(r->from, node);
    if (ml_graph_type(r->from, old[0])->dtype != dtype) return 0;
    ml_ref made = simplify_make(r->context, ML_OP_DOT, (ml_ref[]){r->map[old[0]], r->map[old[1]]},
                                2, ml_graph_args(r->from, node), n->arg_count,
                                &(ml_type){.dtype = (uint8_t)dtype});
    ml_graph_mark(r->to, made, n->flags & ML_NODE_FP8);
    return made;
}

static ml_ref rule(rewrite *r, ml_ref node, const ml_ref *sources) {
    simplifier *s = r->context;
    ml_type type = *ml_graph_type(r->from, node);
    if (s->wide[node]) {
        s->widened[node] = widened(r, node);
        return simplify_cast(s, s->widened[node], (ml_dtype)type.dtype);
    }
    if (ml_graph_node(r->from, node)->op == ML_OP_CAST) {
        ml_ref source = ml_graph_source(r->from, node, 0);
        if (s->wide[source]) return simplify_fit(s, s->widened[source], &type);
        if (ml_graph_type(r->from, source)->dtype == ML_F32 && ml_is_narrow((ml_dtype)type.dtype)) {
            ml_ref made = narrow(r, source, (ml_dtype)type.dtype);
            if (made) return simplify_fit(s, made, &type);
        }
    }
    return simplest(s, rewrite_copy(r, node, sources));
}

static void begin(rewrite *r) {
    simplifier *s = r->context;
    s->graph = r->to;
    s->scratch = r->scratch;
    find_gradients(r);
    find_wide(r);
}

ml_graph *ml_simplify(const ml_graph *from, ml_roots *roots) {
    simplifier s = {0};
    return rewrite_run(from, roots, begin, rule, &s);
}
