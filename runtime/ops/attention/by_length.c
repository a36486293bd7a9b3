/* Whether two traces of a loss, of rows of two lengths, compute alike. */
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/attention/by_sequence.h"

typedef struct {
    ml_ref one, other;
    ml_ref user; /* what reads `one`: a refusal names it */
} pair;

typedef struct {
    const ml_graph *g;
    const ml_apart *apart;
    int apart_count;
    ml_arena *arena;
    bool *visited; /* of nodes of the first trace */
    bool *data;    /* by node: it follows from inputs, states or draws, not from numbers alone */
    ML_VEC(pair) stack;
} walk;

static void visit(walk *w, ml_ref one, ml_ref other, ml_ref user) {
    if (one == other || one == 0 || other == 0 || w->visited[one]) return;
    w->visited[one] = true;
    *ML_PUSH(w->arena, &w->stack) = (pair){one, other, user};
}

static bool keeps_apart(const walk *w, ml_ref n) {
    for (int i = 0; i < w->apart_count; i++)
        if (n >= w->apart[i].first && n < w->apart[i].end) return true;
    return false;
}

static void find_data(walk *w) {
    for (ml_ref n = 1; n < ml_graph_count(w->g); n++) {
        const ml_node *node = ml_graph_node(w->g, n);
        const bool leaf = ml_ops[node->op].op_class == ML_CLASS_LEAF;
        w->data[n] =
            node->op == ML_OP_RANDOM || (leaf && node->op != ML_OP_CONST && node->op != ML_OP_IOTA);
        for (int i = 0; i < node->source_count; i++)
            w->data[n] = w->data[n] || w->data[ml_graph_source(w->g, n, i)];
    }
}

/* Whether a is of numbers alone, as many as a row is long: a sum of ones, the last of an index. */
static bool is_length(const walk *w, ml_ref a, ml_ref b) {
    if (w->data[a] || ml_ops[ml_graph_node(w->g, a)->op].op_class != ML_CLASS_REDUCE) return false;
    return ml_type_elements(ml_graph_type(w->g, ml_graph_source(w->g, a, 0))) !=
               ml_type_elements(ml_graph_type(w->g, ml_graph_source(w->g, b, 0))) &&
           ml_type_elements(ml_graph_type(w->g, a)) == ml_type_elements(ml_graph_type(w->g, b));
}

static bool alike(const walk *w, ml_ref a, ml_ref b) {
    const ml_graph *g = w->g;
    const ml_node *one = ml_graph_node(g, a), *other = ml_graph_node(g, b);
    if (one->op != other->op || one->source_count != other->source_count) return false;
    if (is_length(w, a, b)) return false;
    return one->op != ML_OP_CONST || ml_graph_args(g, a)[0] == ml_graph_args(g, b)[0];
}

static void visit_sources(walk *w, const pair *p) {
    const int count = ml_graph_node(w->g, p->one)->source_count;
    for (int i = 0; i < count; i++)
        visit(w, ml_graph_source(w->g, p->one, i), ml_graph_source(w->g, p->other, i), p->one);
    if (ml_graph_node(w->g, p->one)->op != ML_OP_ATTENTION) return;
    ml_attention_args one, other;
    ml_attention_read(w->g, p->one, &one);
    ml_attention_read(w->g, p->other, &other);
    visit(w, one.score, other.score, p->one);
}

ml_ref ml_find_by_length(const ml_graph *g, const ml_ref *one, const ml_ref *other, int count,
                         const ml_apart *apart, int apart_count) {
    walk w = {.g = g, .apart = apart, .apart_count = apart_count, .arena = ml_arena_new()};
    if (!w.arena) ml_raise(ML_NO_MEMORY, "out of memory while a loss is looked at");
    w.visited = ML_NEW_ARRAY(w.arena, bool, ml_graph_count(g) + 1);
    w.data = ML_NEW_ARRAY(w.arena, bool, ml_graph_count(g) + 1);
    find_data(&w);
    ml_ref found = 0;
    for (int i = 0; i < count; i++) visit(&w, one[i], other[i], one[i]);
    while (w.stack.count > 0 && !found) {
        const pair p = w.stack.at[--w.stack.count];
        const bool same = alike(&w, p.one, p.other);
        if (same)
            visit_sources(&w, &p);
        else if (!keeps_apart(&w, p.one))
            found = p.user;
    }
    ml_arena_free(w.arena);
    return found;
}
