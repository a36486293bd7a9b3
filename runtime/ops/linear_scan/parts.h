/* A LINEAR_SCAN over a part of its axis is an affine map of the state before the part,
 *
 *     S -> total S + last,
 *
 * so that parts run side by side: the map of each part, a recurrence over the parts, then each part
 * from its own state. Context parallelism passes states between ranks so (linear_scan/shard.c). */
#ifndef ML_GRAPH_LINEAR_SCAN_PARTS_H
#define ML_GRAPH_LINEAR_SCAN_PARTS_H

#include "runtime/ops/linear_scan/linear_scan.h"

/* last: of the initial state's type; 0: zeros. total: the product of the decays, {batch...} with or
 * without keys; for rank > 0 a matrix {keys, keys'from, batch...}. */
typedef struct {
    ml_ref last, total;
} linear_scan_map;

/* The map of a scan with these sources, whatever its initial state. */
linear_scan_map linear_scan_map_of(ml_graph *g, const ml_ref *sources, const ml_linear_scan *scan);
/* Maps with an outermost axis `parts`, in the order of the parts: the states before each of them
 * {parts, ...} from `first` on, and the one after all. The last part comes first where the scan is
 * reversed. */
ml_ref linear_scan_chain(ml_graph *g, const linear_scan_map *maps, ml_axis parts, ml_ref first,
                         const ml_linear_scan *scan, ml_ref *final);
/* The scan that the cotangents of the states are: its initial state is the cotangent of the final
 * state, its final state that of the initial one. Fills in the sources but for the state. */
void linear_scan_adjoint(ml_graph *g, const ml_ref *sources, ml_ref dy, const ml_linear_scan *scan,
                         ml_ref *adjoint_sources, ml_linear_scan *adjoint);

#endif
