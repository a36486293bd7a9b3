/* What the collectives of a sharded graph move. */
#include <string.h>

#include "runtime/graph/op_interface.h"
#include "runtime/shard/shard.h"

int64_t ml_shard_sent(const ml_graph *g, ml_ref n) {
    const ml_type *operand = ml_graph_type(g, ml_graph_source(g, n, 0));
    return (int64_t)ml_collective_sent(ml_collective_of(ml_graph_node(g, n)->op),
                                       (double)ml_type_bytes(operand),
                                       (double)ml_graph_args(g, n)[1]);
}

static void add(const ml_graph *g, const ml_layout *layout, int64_t times,
                ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS]) {
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        const ml_node *node = ml_graph_node(g, n);
        if (node->flags & ML_NODE_FUNCTION) continue;
        const ml_op_interface *own = ml_op_interfaces[node->op];
        if (own && own->body) {
            int64_t length;
            ml_graph *body = own->body(g, n, &length);
            add(body, layout, times * length, traffic);
            ml_graph_free(body);
        }
        if (ml_ops[node->op].op_class != ML_CLASS_COLLECTIVE) continue;
        const int64_t *args = ml_graph_args(g, n);
        if (args[0] >= layout->count) continue;
        ml_traffic *of = &traffic[args[0]][ml_collective_of((ml_op)node->op)];
        of->count += times;
        of->bytes += ml_shard_sent(g, n) * times;
    }
}

void ml_shard_traffic(const ml_graph *g, const ml_layout *layout,
                      ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS]) {
    memset(traffic, 0, sizeof(ml_traffic[ML_COLLECTIVE_KINDS]) * ML_MAX_MESH);
    add(g, layout, 1, traffic);
}
