/* What the collectives of a sharded graph move. */
#include <string.h>

#include "runtime/shard/shard.h"

int64_t ml_shard_sent(const ml_graph *g, ml_ref n) {
    const ml_type *operand = ml_graph_type(g, ml_graph_source(g, n, 0));
    return (int64_t)ml_collective_sent(ml_collective_of(ml_graph_node(g, n)->op),
                                       (double)ml_type_bytes(operand),
                                       (double)ml_graph_args(g, n)[1]);
}

void ml_shard_traffic(const ml_graph *g, const ml_layout *layout,
                      ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS]) {
    memset(traffic, 0, sizeof(ml_traffic[ML_COLLECTIVE_KINDS]) * ML_MAX_MESH);
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        if (ml_ops[ml_graph_node(g, n)->op].op_class != ML_CLASS_COLLECTIVE) continue;
        const int64_t *args = ml_graph_args(g, n);
        if (args[0] >= layout->count) continue;
        ml_traffic *of = &traffic[args[0]][ml_collective_of(ml_graph_node(g, n)->op)];
        of->count++;
        of->bytes += ml_shard_sent(g, n);
    }
}
