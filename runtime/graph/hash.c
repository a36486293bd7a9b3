/* A hash of a graph, by which ranks check that they compile the same program. */
#include <string.h>

#include "runtime/graph/infer.h"

/* Names and types are hashed once each. */
typedef struct {
    const ml_graph *g;
    uint64_t *axes, *types; /* by id; 0: not yet */
} hasher;

/* By its name, for the ranks of pipeline stages plan different graphs before and give axes other
 * ids; the number of a fresh name ("stem'N") differs then too. */
static uint64_t hash_axis(hasher *h, int64_t axis) {
    uint64_t *known = &h->axes[axis];
    if (*known != 0) return *known;
    const char *name = axis != 0 ? ml_axis_name(h->g, (ml_axis)axis) : "";
    const char *mark = strchr(name, '\'');
    bool fresh = mark != NULL && mark[1 + strspn(mark + 1, "0123456789")] == '\0';
    *known = ml_hash(name, fresh ? (size_t)(mark - name) : strlen(name), 0) | 1;
    return *known;
}

static uint64_t hash_type(hasher *h, uint32_t type) {
    uint64_t *known = &h->types[type];
    if (*known != 0) return *known;
    const ml_type *t = h->g->tables->types.at[type];
    uint64_t hash = ml_mix(t->dtype, t->rank);
    for (int i = 0; i < t->rank; i++) hash = ml_mix(hash, hash_axis(h, t->axis[i]));
    *known = ml_hash(t->size, t->rank * sizeof *t->size, hash) | 1;
    return *known;
}

static uint64_t hash_args(hasher *h, ml_ref n, uint64_t seed) {
    const ml_node *node = ml_graph_node(h->g, n);
    const int64_t *args = ml_graph_args(h->g, n);
    if (node->op == ML_OP_INPUT) { /* their ids differ likewise */
        const char *name = ml_graph_input(h->g, (uint32_t)args[0])->name;
        return ml_hash(name, strlen(name), seed);
    }
    for (int i = 0; i < node->arg_count; i++) {
        ml_arg_kind kind = ml_op_arg_of(node->op, i)->kind;
        bool axis = ml_arg_is_axis(kind) || kind == ML_ARG_AXIS_OR_0;
        seed = ml_mix(seed, axis ? hash_axis(h, args[i]) : (uint64_t)args[i]);
    }
    return seed;
}

static uint64_t hash_nodes(hasher *h, uint64_t seed) {
    const ml_graph *g = h->g;
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        const ml_node *node = ml_graph_node(g, n);
        const ml_ref *sources = ml_graph_sources(g, n);
        seed = ml_mix(seed, node->op | (uint64_t)node->source_count << 16 |
                                (uint64_t)node->arg_count << 32);
        for (int i = 0; i < node->source_count; i++) seed = ml_mix(seed, sources[i]);
        seed = ml_mix(hash_args(h, n, seed), hash_type(h, node->type));
    }
    return seed;
}

uint64_t ml_graph_hash(const ml_graph *g, uint64_t seed) {
    const uint32_t axes = g->tables->axes.count, types = g->tables->types.count;
    hasher h = {g, ml_alloc(axes * sizeof *h.axes), ml_alloc(types * sizeof *h.types)};
    bool enough = h.axes != NULL && h.types != NULL;
    if (enough) seed = hash_nodes(&h, seed);
    ml_free(h.axes);
    ml_free(h.types);
    if (!enough) ml_raise(ML_NO_MEMORY, "out of memory: a graph cannot be hashed");
    return seed;
}
