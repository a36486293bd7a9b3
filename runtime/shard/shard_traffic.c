/* What the collectives of a sharded graph move. */
#include <string.h>

#include "runtime/shard/shard.h"

const char *const ml_collective_names[ML_COLLECTIVE_KINDS] = {
    [ML_COLLECTIVE_ALL_REDUCE] = "all-reduce",
    [ML_COLLECTIVE_ALL_GATHER] = "all-gather",
    [ML_COLLECTIVE_REDUCE_SCATTER] = "reduce-scatter",
    [ML_COLLECTIVE_ALL_TO_ALL] = "all-to-all",
    [ML_COLLECTIVE_SHIFT] = "shift",
    [ML_COLLECTIVE_SEND] = "send",
    [ML_COLLECTIVE_MIRROR] = "mirror",
};

int64_t ml_shard_sent(const ml_graph *g, ml_ref n, int64_t ranks, ml_collective *kind) {
    int64_t in = ml_type_bytes(ml_graph_type(g, ml_graph_source(g, n, 0)));
    switch (ml_graph_node(g, n)->op) {
    case ML_OP_ALL_REDUCE: *kind = ML_COLLECTIVE_ALL_REDUCE; return 2 * in / ranks * (ranks - 1);
    case ML_OP_ALL_GATHER: *kind = ML_COLLECTIVE_ALL_GATHER; return in * (ranks - 1);
    case ML_OP_REDUCE_SCATTER:
        *kind = ML_COLLECTIVE_REDUCE_SCATTER;
        return in / ranks * (ranks - 1);
    case ML_OP_ALL_TO_ALL: *kind = ML_COLLECTIVE_ALL_TO_ALL; return in / ranks * (ranks - 1);
    case ML_OP_SHIFT: *kind = ML_COLLECTIVE_SHIFT; return in;
    default: *kind = ML_COLLECTIVE_MIRROR; return in; /* nothing, of an odd number's middle rank */
    }
}

void ml_shard_traffic(const ml_graph *g, const ml_layout *layout,
                      ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS]) {
    memset(traffic, 0, sizeof(ml_traffic[ML_COLLECTIVE_KINDS]) * ML_MAX_MESH);
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        if (ml_ops[ml_graph_node(g, n)->op].op_class != ML_CLASS_COLLECTIVE) continue;
        const int64_t *args = ml_graph_args(g, n);
        ml_collective kind;
        if (args[0] >= layout->count) continue;
        int64_t bytes = ml_shard_sent(g, n, args[1], &kind);
        traffic[args[0]][kind].count++;
        traffic[args[0]][kind].bytes += bytes;
    }
}
