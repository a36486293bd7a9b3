/* Joining collectives (optimize.h), after products were merged. Two patterns, which together are
 * what keys and values become where queries are cut:
 *
 *   all_gather(slice 1 of x), all_gather(slice 2 of x), ...   which together are x
 *             -> slices of all_gather(x)
 *   concat(reduce_scatter(a), reduce_scatter(b), ...)
 *             -> reduce_scatter(concat(a, b, ...)), sliced for other users
 *
 * A collective works on contiguous memory: slices of a merged product would be copied out of it one
 * by one before they are sent, and the parts of a merged gradient into it. Splits, merges and
 * renamed axes between them may be anything that leaves the outermost axis, which collectives cut,
 * alone. */
#include "runtime/graph/rewrite.h"
#include "runtime/optimize/optimize.h"

#include <string.h>

enum { MOST_JOINED = 8, LONGEST_CHAIN = 8, TURNED = 1 << 7 };

typedef struct {
    ml_ref members[MOST_JOINED]; /* collectives, in the order of their slices or parts */
    int count;
    ml_ref whole; /* what is gathered; or the CONCAT */
    ml_axis axis; /* along which they lie one after another */
    int64_t size; /* of those that were found so far */
    ml_ref made;  /* in the new graph: what is gathered or scattered */
} group;

typedef struct {
    rewrite *r;
    ML_VEC(group) groups;
    uint32_t *group_of; /* by node: 1 + the group of a member, or of a CONCAT; 0: none */
    uint32_t *slices;   /* by node: 1 + the group of its gathered slices */
} state;

static const ml_node *node_of(const state *s, ml_ref n) {
    return ml_graph_node(s->r->from, n);
}
static const int64_t *args_of(const state *s, ml_ref n) {
    return ml_graph_args(s->r->from, n);
}
static const ml_type *type_of(const state *s, ml_ref n) {
    return ml_graph_type(s->r->from, n);
}
static ml_ref source_of(const state *s, ml_ref n) {
    return ml_graph_source(s->r->from, n, 0);
}

/* A movement of the axes within those that collectives cut. */
static bool moves_within(const state *s, ml_ref n) {
    ml_op op = (ml_op)node_of(s, n)->op;
    if (op == ML_OP_SPLIT || op == ML_OP_MERGE)
        return args_of(s, n)[0] != type_of(s, source_of(s, n))->axis[0];
    return op == ML_OP_RENAME;
}

/* From n up to what such movements are made of: they are in `chain`, the last one first. */
static ml_ref chain_of(const state *s, ml_ref n, ml_ref *chain, int *count) {
    for (*count = 0; *count < LONGEST_CHAIN && moves_within(s, n); n = source_of(s, n))
        chain[(*count)++] = n;
    return n;
}

/* x moved as n moves its source, or back. */
static ml_ref move_as(const state *s, ml_ref n, ml_ref x, bool back) {
    ml_graph *g = s->r->to;
    const int64_t *args = args_of(s, n);
    const ml_type *before = type_of(s, source_of(s, n));
    ml_op op = (ml_op)node_of(s, n)->op;
    if (op == ML_OP_RENAME)
        return ml_rename(g, x, (ml_axis)args[back ? 1 : 0], (ml_axis)args[back ? 0 : 1]);
    if (op == ML_OP_SPLIT)
        return back ? ml_merge(g, x, (ml_axis)args[1], (ml_axis)args[3], (ml_axis)args[0])
                    : ml_split(g, x, (ml_axis)args[0], (ml_axis)args[1], args[2], (ml_axis)args[3],
                               args[4]);
    ml_axis outer = (ml_axis)args[0], inner = (ml_axis)args[1], merged = (ml_axis)args[2];
    return back ? ml_split(g, x, merged, outer, ml_type_size(before, outer), inner,
                           ml_type_size(before, inner))
                : ml_merge(g, x, outer, inner, merged);
}

static bool alike(const state *s, ml_ref a, ml_ref b) {
    const ml_node *x = node_of(s, a), *y = node_of(s, b);
    return x->op == y->op && x->flags == y->flags && x->arg_count == y->arg_count &&
           type_of(s, a)->dtype == type_of(s, b)->dtype &&
           memcmp(args_of(s, a), args_of(s, b), sizeof(int64_t) * x->arg_count) == 0;
}

static bool join(const state *s, group *g, ml_ref n, int64_t size) {
    bool joins =
        g->count < MOST_JOINED && !s->group_of[n] && (g->count == 0 || alike(s, g->members[0], n));
    for (int i = 0; i < g->count; i++) joins = joins && g->members[i] != n;
    if (!joins) return false;
    g->members[g->count++] = n;
    g->size += size;
    return true;
}

/* That the gradient of the left operand is a sum of one more product must take less than copies of
 * the slices: the product is wide beside what it sums over. */
static bool is_wide(const ml_graph *g, ml_ref product) {
    const ml_node *node = ml_graph_node(g, product);
    const ml_type *weight = ml_graph_type(g, ml_graph_source(g, product, 1));
    double depth = 1;
    if (node->op != ML_OP_DOT) return false;
    for (int i = 0; i < node->arg_count; i++)
        depth *= (double)ml_type_size(weight, (ml_axis)ml_graph_args(g, product)[i]);
    return 2 * (double)ml_type_elements(weight) > depth * depth;
}

void ml_find_sent(const ml_graph *g, uint8_t *sent) {
    for (ml_ref n = ml_graph_count(g); n-- > 1;) {
        const ml_node *node = ml_graph_node(g, n);
        if (node->op == ML_OP_ALL_GATHER) sent[n] = (uint8_t)(1 + ml_graph_args(g, n)[0]);
        if (sent[n] && ml_op_is(node->op, ML_PRODUCT) && !is_wide(g, n)) sent[n] = 0;
        const bool turns =
            node->op == ML_OP_MUL || node->op == ML_OP_SUB || node->op == ML_OP_NEG; /* RoPE */
        const bool passes_on = turns || node->op == ML_OP_ALL_GATHER || node->op == ML_OP_ADD ||
                               node->op == ML_OP_CAST || ml_ops[node->op].op_class == ML_CLASS_MOVE;
        for (int i = 0; i < node->source_count && passes_on && sent[n]; i++) {
            uint8_t *source = &sent[ml_graph_source(g, n, i)];
            if (*source == 0 || !(sent[n] & TURNED)) *source = sent[n] | (turns ? TURNED : 0);
        }
    }
}

/* ---- Gathered slices ------------------------------------------------------------------------- */

/* The slice that gather n is of; 0: of none. */
static ml_ref slice_of(const state *s, ml_ref n) {
    ml_ref chain[LONGEST_CHAIN];
    int count;
    if (!s->r->users[n] || node_of(s, n)->op != ML_OP_ALL_GATHER) return 0;
    ml_ref slice = chain_of(s, source_of(s, n), chain, &count);
    if (node_of(s, slice)->op != ML_OP_SLICE) return 0;
    const ml_type *whole = type_of(s, source_of(s, slice));
    return args_of(s, slice)[0] != whole->axis[0] ? slice : 0;
}

/* Slices come in order: of a merged product, the members' order. */
static void find_slices(state *s) {
    for (ml_ref n = 1; n < s->r->count; n++) {
        ml_ref slice = slice_of(s, n);
        if (!slice) continue;
        ml_ref whole = source_of(s, slice);
        const int64_t *args = args_of(s, slice);
        if (!s->slices[whole]) {
            *ML_PUSH(s->r->scratch, &s->groups) = (group){.whole = whole, .axis = (ml_axis)args[0]};
            s->slices[whole] = s->groups.count;
        }
        group *g = &s->groups.at[s->slices[whole] - 1];
        if (args[0] == g->axis && args[1] == g->size) (void)join(s, g, n, args[2] - args[1]);
    }
    for (uint32_t i = 0; i < s->groups.count; i++) {
        group *g = &s->groups.at[i];
        if (g->count < 2 || g->size != ml_type_size(type_of(s, g->whole), g->axis)) continue;
        for (int k = 0; k < g->count; k++) s->group_of[g->members[k]] = i + 1;
    }
}

static ml_ref build_slice(state *s, group *g, ml_ref n) {
    ml_ref chain[LONGEST_CHAIN];
    int count;
    ml_ref slice = chain_of(s, source_of(s, n), chain, &count);
    const int64_t *args = args_of(s, slice);
    if (!g->made)
        g->made = ml_graph_add(s->r->to, ML_OP_ALL_GATHER, &s->r->map[g->whole], 1, args_of(s, n),
                               node_of(s, n)->arg_count, NULL);
    ml_ref x = ml_slice(s->r->to, g->made, g->axis, args[1], args[2]);
    while (count > 0) x = move_as(s, chain[--count], x, false);
    return x;
}

/* ---- Joined sums ----------------------------------------------------------------------------- */

static void find_sums(state *s, ml_ref n) {
    const ml_node *node = node_of(s, n);
    if (!s->r->users[n] || node->op != ML_OP_CONCAT || node->source_count < 2) return;
    group g = {.whole = n, .axis = (ml_axis)args_of(s, n)[0]};
    if (g.axis == type_of(s, n)->axis[0]) return;
    for (int i = 0; i < node->source_count; i++) {
        ml_ref chain[LONGEST_CHAIN], source = ml_graph_source(s->r->from, n, i);
        int count;
        ml_ref sum = chain_of(s, source, chain, &count);
        if (node_of(s, sum)->op != ML_OP_REDUCE_SCATTER) return;
        if (!join(s, &g, sum, ml_type_size(type_of(s, source), g.axis))) return;
    }
    *ML_PUSH(s->r->scratch, &s->groups) = g;
    s->group_of[n] = s->groups.count;
    for (int i = 0; i < g.count; i++) s->group_of[g.members[i]] = s->groups.count;
}

static void build_sums(state *s, group *g) {
    ml_ref parts[MOST_JOINED], chain[LONGEST_CHAIN];
    for (int i = 0; i < g->count; i++) {
        int count;
        (void)chain_of(s, ml_graph_source(s->r->from, g->whole, i), chain, &count);
        parts[i] = s->r->map[source_of(s, g->members[i])];
        while (count > 0) parts[i] = move_as(s, chain[--count], parts[i], false);
    }
    ml_ref whole = ml_concat(s->r->to, parts, g->count, g->axis);
    g->made = ml_graph_add(s->r->to, ML_OP_REDUCE_SCATTER, &whole, 1, args_of(s, g->members[0]),
                           node_of(s, g->members[0])->arg_count, NULL);
}

/* What a member of the group was, or the CONCAT of them. */
static ml_ref build_part(state *s, group *g, ml_ref n) {
    if (!g->made) build_sums(s, g);
    if (n == g->whole) return g->made;
    int64_t start = 0, size = 0;
    ml_ref chain[LONGEST_CHAIN];
    int count = 0, i = 0;
    for (;; i++, start += size) {
        ml_ref source = ml_graph_source(s->r->from, g->whole, i);
        size = ml_type_size(type_of(s, source), g->axis);
        if (chain_of(s, source, chain, &count) == n) break;
    }
    ml_ref x = ml_slice(s->r->to, g->made, g->axis, start, start + size);
    for (int k = 0; k < count; k++) x = move_as(s, chain[k], x, true);
    return x;
}

/* ---- The pass -------------------------------------------------------------------------------- */

static bool is_sum(const state *s, ml_ref n) {
    return s->group_of[n] && node_of(s, n)->op == ML_OP_REDUCE_SCATTER;
}

/* A joined sum waits for all of its operands. */
static void sum_edges(void *context, rewrite_edge *edge, void *edges) {
    const state *s = context;
    for (ml_ref n = 1; n < s->r->count; n++) {
        if (!is_sum(s, n)) continue;
        const group *g = &s->groups.at[s->group_of[n] - 1];
        for (int i = 0; i < g->count; i++) edge(edges, source_of(s, g->members[i]), n);
    }
}

static void begin(rewrite *r) {
    state *s = r->context;
    s->r = r;
    s->group_of = ML_NEW_ARRAY(r->scratch, uint32_t, r->count);
    s->slices = ML_NEW_ARRAY(r->scratch, uint32_t, r->count);
    find_slices(s);
    for (ml_ref n = 1; n < r->count; n++) find_sums(s, n);
    if (rewrite_order(r, sum_edges, s)) return;
    r->order = NULL; /* they wait for each other */
    for (ml_ref n = 1; n < r->count; n++)
        if (is_sum(s, n) || node_of(s, n)->op == ML_OP_CONCAT) s->group_of[n] = 0;
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    state *s = r->context;
    if (!s->group_of[n]) return rewrite_copy(r, n, sources);
    group *g = &s->groups.at[s->group_of[n] - 1];
    return node_of(s, n)->op == ML_OP_ALL_GATHER ? build_slice(s, g, n) : build_part(s, g, n);
}

ml_graph *ml_join_collectives(const ml_graph *from, ml_roots *roots) {
    state s = {0};
    return rewrite_run(from, roots, begin, rule, &s);
}
