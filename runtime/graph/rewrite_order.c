/* An order in which a pass visits nodes when some have to wait for more than their sources. */
#include "runtime/graph/rewrite.h"

typedef struct {
    ml_ref *heap; /* the least on top */
    uint32_t count;
} ready_heap;

static void heap_push(ready_heap *h, ml_ref n) {
    uint32_t at = h->count++;
    for (; at > 0 && h->heap[(at - 1) / 2] > n; at = (at - 1) / 2)
        h->heap[at] = h->heap[(at - 1) / 2];
    h->heap[at] = n;
}

static ml_ref heap_pop(ready_heap *h) {
    ml_ref top = h->heap[0], last = h->heap[--h->count];
    uint32_t at = 0;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= h->count) break;
        if (child + 1 < h->count && h->heap[child + 1] < h->heap[child]) child++;
        if (h->heap[child] >= last) break;
        h->heap[at] = h->heap[child];
        at = child;
    }
    h->heap[at] = last;
    return top;
}

typedef struct {
    uint32_t *waits; /* by node: sources not yet visited */
    uint32_t *first; /* by node: its first edge in `users`; count + 1 entries */
    uint32_t *filled;
    ml_ref *users;
} edge_lists;

static void count_edge(void *edges, ml_ref source, ml_ref user) {
    edge_lists *e = edges;
    e->waits[user]++;
    e->first[source + 1]++;
}

static void fill_edge(void *edges, ml_ref source, ml_ref user) {
    edge_lists *e = edges;
    e->users[e->first[source] + e->filled[source]++] = user;
}

static void graph_edges(const rewrite *r, rewrite_edge *edge, edge_lists *edges) {
    for (ml_ref n = 1; n < r->count; n++) {
        if (!r->users[n]) continue;
        int count = ml_graph_node(r->from, n)->source_count;
        for (int i = 0; i < count; i++) edge(edges, ml_graph_source(r->from, n, i), n);
    }
}

bool rewrite_order(rewrite *r, void (*extra)(void *context, rewrite_edge *edge, void *edges),
                   void *context) {
    ml_arena *arena = r->scratch;
    uint32_t live = 0, visited = 0;
    edge_lists e = {.waits = ML_NEW_ARRAY(arena, uint32_t, r->count),
                    .first = ML_NEW_ARRAY(arena, uint32_t, r->count + 1),
                    .filled = ML_NEW_ARRAY(arena, uint32_t, r->count)};
    graph_edges(r, count_edge, &e);
    extra(context, count_edge, &e);
    for (uint32_t i = 0; i < r->count; i++) e.first[i + 1] += e.first[i];
    e.users = ML_NEW_ARRAY(arena, ml_ref, e.first[r->count] + 1);
    graph_edges(r, fill_edge, &e);
    extra(context, fill_edge, &e);
    ml_ref *order = ML_NEW_ARRAY(arena, ml_ref, r->count);
    ready_heap ready = {.heap = ML_NEW_ARRAY(arena, ml_ref, r->count)};
    for (ml_ref n = 1; n < r->count; n++) {
        if (!r->users[n]) continue;
        live++;
        if (!e.waits[n]) heap_push(&ready, n);
    }
    while (ready.count) {
        ml_ref n = order[visited++] = heap_pop(&ready);
        for (uint32_t i = e.first[n]; i < e.first[n + 1]; i++)
            if (--e.waits[e.users[i]] == 0) heap_push(&ready, e.users[i]);
    }
    r->order = order;
    r->order_count = visited;
    return visited == live;
}
