/* A hash of a graph, by which ranks check that they compile the same program. */
#include <string.h>

#include "runtime/graph/infer.h"

/* By its name, for the ranks of pipeline stages plan different graphs before and give axes other
 * ids; the number of a fresh name ("stem'N") differs then too. */
static uint64_t hash_axis(const ml_graph *g, int64_t axis, uint64_t seed) {
    const char *name = axis != 0 ? ml_axis_name(g, (ml_axis)axis) : "";
    const char *mark = strchr(name, '\'');
    bool fresh = mark != NULL && mark[1 + strspn(mark + 1, "0123456789")] == '\0';
    return ml_hash(name, fresh ? (size_t)(mark - name) : strlen(name), seed);
}

static uint64_t hash_args(const ml_graph *g, ml_ref n, uint64_t seed) {
    const ml_node *node = ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    if (node->op == ML_OP_INPUT) { /* their ids differ likewise */
        const char *name = ml_graph_input(g, (uint32_t)args[0])->name;
        return ml_hash(name, strlen(name), seed);
    }
    for (int i = 0; i < node->arg_count; i++) {
        ml_arg_kind kind = ml_op_arg_of(node->op, i)->kind;
        seed = ml_arg_is_axis(kind) || kind == ML_ARG_AXIS_OR_0
                   ? hash_axis(g, args[i], seed)
                   : ml_hash(&args[i], sizeof args[i], seed);
    }
    return seed;
}

uint64_t ml_graph_hash(const ml_graph *g, uint64_t seed) {
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        const ml_node *node = ml_graph_node(g, n);
        const ml_type *type = ml_graph_type(g, n);
        uint32_t head[4] = {node->op, node->source_count, node->arg_count, type->dtype};
        seed = ml_hash(head, sizeof head, seed);
        seed = ml_hash(ml_graph_sources(g, n), node->source_count * sizeof(ml_ref), seed);
        seed = hash_args(g, n, seed);
        for (int i = 0; i < type->rank; i++) seed = hash_axis(g, type->axis[i], seed);
        seed = ml_hash(type->size, type->rank * sizeof(int64_t), seed);
    }
    return seed;
}
