/* Tensors exchanged together (optimize.h): an attention's keys and values, their two gradients, and
 * a program's inputs are alike and cross between the same ranks at the same time.
 *
 *   attention(q, all_gather(k), all_gather(v))     -> slices of all_gather(concat(k, v))
 *   reduce_scatter(dk), reduce_scatter(dv)         -> slices of reduce_scatter(concat(dk, dv))
 *   reverse(slice(input)), reverse(slice(input)) ...   -> slices of reverse(concat(slices))
 *
 * Between the attention and the collectives are movements, and rows put in another order. The
 * tensors lie side by side along an inner axis: collectives cut the outermost one, and passes to
 * come the batch. */
#include "runtime/graph/rewrite.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/optimize/optimize.h"

#include <string.h>

enum { MOST_JOINED = 8 };

typedef struct {
    ml_ref member[MOST_JOINED], made; /* made: of all, in the new graph */
    int count;
} group;

typedef struct {
    rewrite *r;
    ML_VEC(group) groups;
    uint32_t *group_of; /* by node: 1 + its group; 0: none */
} state;

static const ml_node *node_of(const state *s, ml_ref n) {
    return ml_graph_node(s->r->from, n);
}

/* From n back through movements and rows that are put in order. */
static ml_ref moved_from(const state *s, ml_ref n) {
    for (;;) {
        int op = node_of(s, n)->op;
        if (op != ML_OP_RENAME && op != ML_OP_PERMUTE && op != ML_OP_GATHER) return n;
        n = ml_graph_source(s->r->from, n, 0);
    }
}

static bool alike(const state *s, ml_ref a, ml_ref b) {
    const ml_graph *g = s->r->from;
    const ml_node *x = node_of(s, a), *y = node_of(s, b);
    return a != b && x->op == y->op && x->flags == y->flags && x->arg_count == y->arg_count &&
           ml_type_equal(ml_graph_type(g, a), ml_graph_type(g, b)) &&
           ml_graph_type(g, a)->rank > 1 &&
           memcmp(ml_graph_args(g, a), ml_graph_args(g, b), sizeof(int64_t) * x->arg_count) == 0;
}

/* b into the group of a. */
static void join(state *s, ml_ref a, ml_ref b) {
    if (!alike(s, a, b) || s->group_of[b]) return;
    if (!s->group_of[a]) {
        *ML_PUSH(s->r->scratch, &s->groups) = (group){.member = {a}, .count = 1};
        s->group_of[a] = s->groups.count;
    }
    group *to = &s->groups.at[s->group_of[a] - 1];
    if (to->count == MOST_JOINED) return;
    to->member[to->count++] = b;
    s->group_of[b] = s->group_of[a];
}

/* Of an attention. */
static void find_gathers(state *s, ml_ref n) {
    ml_ref k = moved_from(s, ml_graph_source(s->r->from, n, 1));
    ml_ref v = moved_from(s, ml_graph_source(s->r->from, n, 2));
    if (node_of(s, k)->op == ML_OP_ALL_GATHER && node_of(s, v)->op == ML_OP_ALL_GATHER)
        join(s, k, v);
}

/* first[i]: the first sum over ranks of an attention's dk, by the attention's gradient i. */
static void find_sums(state *s, ml_ref n, ml_ref *first) {
    ml_ref part = moved_from(s, ml_graph_source(s->r->from, n, 0));
    if (node_of(s, part)->op != ML_OP_OUT) return;
    ml_ref grad = ml_graph_source(s->r->from, part, 0);
    if (node_of(s, grad)->op != ML_OP_ATTENTION_GRAD) return;
    if (first[grad])
        join(s, first[grad], n);
    else
        first[grad] = n;
}

/* Of inputs alone: those of the first one's type. */
static void find_inputs(state *s, ml_ref n, ml_ref *first) {
    ml_ref slice = ml_graph_source(s->r->from, n, 0);
    if (node_of(s, slice)->op != ML_OP_SLICE) return;
    if (node_of(s, ml_graph_source(s->r->from, slice, 0))->op != ML_OP_INPUT) return;
    if (*first)
        join(s, *first, n);
    else
        *first = n;
}

/* A group waits for the operands of all. */
static void group_edges(void *context, rewrite_edge *edge, void *edges) {
    const state *s = context;
    for (uint32_t i = 0; i < s->groups.count; i++) {
        const group *g = &s->groups.at[i];
        for (int k = 0; k < g->count; k++)
            for (int j = 0; j < g->count; j++)
                if (j != k) edge(edges, ml_graph_source(s->r->from, g->member[k], 0), g->member[j]);
    }
}

static void begin(rewrite *r) {
    state *s = r->context;
    s->r = r;
    s->group_of = ML_NEW_ARRAY(r->scratch, uint32_t, r->count);
    ml_ref *first = ML_NEW_ARRAY(r->scratch, ml_ref, r->count), input = 0;
    for (ml_ref n = 1; n < r->count; n++) {
        if (!r->users[n]) continue;
        if (node_of(s, n)->op == ML_OP_ATTENTION) find_gathers(s, n);
        if (node_of(s, n)->op == ML_OP_REDUCE_SCATTER) find_sums(s, n, first);
        if (node_of(s, n)->op == ML_OP_REVERSE) find_inputs(s, n, &input);
    }
    if (rewrite_order(r, group_edges, s)) return;
    r->order = NULL; /* they wait for each other */
    memset(s->group_of, 0, sizeof *s->group_of * r->count);
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    state *s = r->context;
    if (!s->group_of[n]) return rewrite_copy(r, n, sources);
    group *g = &s->groups.at[s->group_of[n] - 1];
    const ml_type *type = ml_graph_type(r->from, n);
    const int at_axis = type->rank > 3 ? type->rank - 2 : 1; /* heads: not the batch */
    const ml_axis axis = type->axis[at_axis];
    const int64_t size = type->size[at_axis];
    if (!g->made) {
        ml_ref parts[MOST_JOINED];
        for (int i = 0; i < g->count; i++)
            parts[i] = r->map[ml_graph_source(r->from, g->member[i], 0)];
        ml_ref all = ml_concat(r->to, parts, g->count, axis);
        g->made = ml_graph_add(r->to, (ml_op)node_of(s, n)->op, &all, 1, ml_graph_args(r->from, n),
                               node_of(s, n)->arg_count, NULL);
    }
    int at = 0;
    while (g->member[at] != n) at++;
    return ml_slice(r->to, g->made, axis, at * size, (at + 1) * size);
}

bool ml_gather_together_applies(const ml_graph *g) {
    bool attends = false, gathers = false;
    for (ml_ref n = 1; n < ml_graph_count(g) && !(attends && gathers); n++) {
        attends = attends || ml_graph_node(g, n)->op == ML_OP_ATTENTION;
        gathers = gathers || ml_graph_node(g, n)->op == ML_OP_ALL_GATHER;
    }
    return attends && gathers;
}

ml_graph *ml_gather_together(const ml_graph *from, ml_roots *roots) {
    state s = {0};
    return rewrite_run(from, roots, begin, rule, &s);
}
