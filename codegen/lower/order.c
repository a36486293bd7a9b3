/* The order of the steps: that of the graph's nodes, except that what is cheap to make early or
 * late (copies for a product, recomputed values, casts of states) is computed just before its first
 * use. Found backwards, from the last step to the first. */
#include "codegen/lower/lower_internal.h"

typedef struct {
    lowering *l;
    uint32_t *first; /* the groups that group i reads from: edges first[i] .. first[i + 1] */
    ML_VEC(uint32_t) edges;
    uint32_t *waiting; /* groups that read it and are not placed yet */
    uint32_t *heap, *key;
    ml_ref *updated; /* by node: the STATE that it is the new value of */
    uint32_t heap_count;
} ordering;

static void add_edge(void *context, uint32_t group) {
    ordering *o = context;
    if (group == 0) return;
    *ML_PUSH(o->l->scratch, &o->edges) = group;
    o->waiting[group]++;
}

static bool just_in_time(lowering *l, const lower_group *group) {
    if (group->opaque) return group->turns;
    if (ml_graph_node(l->g, group->node)->flags & ML_NODE_COPY) return true;
    if (group->roots.at[0].kind == LOWER_ROOT_PACK && group->roots.count == 1) return true;
    for (uint32_t a = 0; a < group->accesses.count; a++)
        if (group->accesses.at[a].partial || l->info[group->accesses.at[a].node].role != LOWER_LEAF)
            return false;
    return true;
}

/* Whether a kernel does nothing but give states new values that are computed of their old ones,
 * which nothing else reads, such as sums over microbatches: as soon as it can, so that what it
 * reads dies. */
static bool updates_in_place(const ordering *o, const lower_group *group) {
    for (uint32_t r = 0; r < group->roots.count; r++) {
        const lower_root *root = &group->roots.at[r];
        ml_ref state = o->updated[root->node];
        bool reads = false;
        for (uint32_t a = 0; a < group->accesses.count; a++)
            reads = reads || group->accesses.at[a].node == state;
        if (root->kind != LOWER_ROOT_VALUE || !state || !reads) return false;
        if (o->l->first_user[state + 1] - o->l->first_user[state] != 1) return false;
    }
    return !group->opaque && group->roots.count > 0;
}

/* Which STATE each new value is assigned to; 0 for other nodes. */
static void find_updates(ordering *o) {
    const lowering *l = o->l;
    ml_ref *states = ML_NEW_ARRAY(l->scratch, ml_ref, ml_graph_state_count(l->g) + 1);
    o->updated = ML_NEW_ARRAY(l->scratch, ml_ref, l->count + 1);
    for (ml_ref n = 1; n < l->count; n++)
        if (ml_graph_node(l->g, n)->op == ML_OP_STATE) states[ml_graph_args(l->g, n)[0]] = n;
    for (int i = 0; i < l->roots->update_count; i++)
        o->updated[l->roots->updates[i].value] = states[l->roots->updates[i].state];
}

static uint32_t latest_source(const ordering *o, uint32_t group) {
    uint32_t latest = 0;
    for (uint32_t e = o->first[group]; e < o->first[group + 1]; e++)
        if (o->key[o->edges.at[e]] != UINT32_MAX && o->key[o->edges.at[e]] > latest)
            latest = o->key[o->edges.at[e]];
    return latest > 0 ? latest : o->key[group];
}

static void push(ordering *o, uint32_t group) {
    uint32_t at = o->heap_count++;
    for (; at > 0 && o->key[o->heap[(at - 1) / 2]] < o->key[group]; at = (at - 1) / 2)
        o->heap[at] = o->heap[(at - 1) / 2];
    o->heap[at] = group;
}

static uint32_t pop(ordering *o) {
    uint32_t top = o->heap[0], last = o->heap[--o->heap_count], at = 0;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= o->heap_count) break;
        if (child + 1 < o->heap_count && o->key[o->heap[child + 1]] > o->key[o->heap[child]])
            child++;
        if (o->key[o->heap[child]] <= o->key[last]) break;
        o->heap[at] = o->heap[child];
        at = child;
    }
    o->heap[at] = last;
    return top;
}

uint32_t *lower_order(lowering *l, uint32_t *count) {
    uint32_t groups = l->groups.count;
    ordering o = {.l = l};
    o.first = ML_NEW_ARRAY(l->scratch, uint32_t, groups + 1);
    o.waiting = ML_NEW_ARRAY(l->scratch, uint32_t, groups + 1);
    o.key = ML_NEW_ARRAY(l->scratch, uint32_t, groups + 1);
    o.heap = ML_NEW_ARRAY(l->scratch, uint32_t, groups + 1);
    ML_VEC_RESERVE(l->scratch, &o.edges, 4 * groups);
    for (uint32_t i = 1; i < groups; i++) {
        o.first[i] = o.edges.count;
        fuse_group_dependencies(l, i, add_edge, &o);
    }
    o.first[groups] = o.edges.count;
    for (uint32_t i = 1; i < groups; i++) {
        const lower_group *group = &l->groups.at[i];
        o.key[i] = group->node;
        for (uint32_t r = 0; r < group->roots.count; r++)
            if (group->roots.at[r].node > o.key[i]) o.key[i] = group->roots.at[r].node;
        if (just_in_time(l, group)) o.key[i] = UINT32_MAX;
    }
    find_updates(&o);
    for (uint32_t i = 1; i < groups; i++) {
        if (o.waiting[i] != 0) continue;
        if (updates_in_place(&o, &l->groups.at[i])) o.key[i] = latest_source(&o, i);
        push(&o, i);
    }
    uint32_t *order = ML_NEW_ARRAY(l->scratch, uint32_t, groups + 1), left = groups - 1;
    while (o.heap_count > 0) {
        uint32_t group = pop(&o);
        order[--left] = group;
        for (uint32_t e = o.first[group]; e < o.first[group + 1]; e++)
            if (--o.waiting[o.edges.at[e]] == 0) push(&o, o.edges.at[e]);
    }
    if (left != 0) ml_raise(ML_INTERNAL, "lowering: %u steps wait for one another", left);
    *count = groups - 1;
    return order;
}
