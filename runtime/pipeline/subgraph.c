/* Building a part of a graph (subgraph.h). */
#include "runtime/pipeline/subgraph.h"

#include <string.h>

ml_ref subgraph_copy(subgraph *part, const ml_graph *whole, ml_ref n, subgraph_source *source_of,
                     void *context) {
    int count = ml_graph_node(whole, n)->source_count;
    ml_ref few[8], *sources = few;
    if (count > 8) sources = ML_NEW_ARRAY(part->arena, ml_ref, count);
    for (int i = 0; i < count; i++) sources[i] = source_of(context, ml_graph_source(whole, n, i));
    return ml_graph_copy(part->graph, whole, n, sources);
}

ml_ref subgraph_import(subgraph *part, const ml_graph *whole, ml_ref n, int64_t id) {
    ml_graph_set_origin(part->graph, ml_graph_origin(whole, n));
    return ml_graph_add(part->graph, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
}

int subgraph_export(subgraph *part, ml_ref x) {
    *ML_PUSH(part->arena, &part->exports) = x;
    return (int)part->exports.count - 1;
}

void subgraph_update(subgraph *part, uint32_t state, ml_ref value) {
    *ML_PUSH(part->arena, &part->updates) = (ml_update){state, value};
}

ml_roots subgraph_roots(const subgraph *part, const char *name, const ml_ref *outputs, int count) {
    int exports = (int)part->exports.count;
    ml_roots roots = {.name = name,
                      .kept = exports,
                      .output_count = count + exports,
                      .updates = part->updates.at,
                      .update_count = (int)part->updates.count};
    roots.outputs = ML_NEW_ARRAY(part->arena, ml_ref, (size_t)(count + exports) + 1);
    if (count > 0) memcpy(roots.outputs, outputs, sizeof *outputs * (size_t)count);
    if (exports > 0)
        memcpy(roots.outputs + count, part->exports.at, sizeof *outputs * (size_t)exports);
    return roots;
}
