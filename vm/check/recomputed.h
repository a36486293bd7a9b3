/* What a report says of the values of the forward pass that the backward pass computes again or
 * finds in host memory: which operators of which modules and lines. */
#ifndef ML_CHECK_RECOMPUTED_H
#define ML_CHECK_RECOMPUTED_H

#include <jansson.h>

#include "vm/vm.h"

/* [{"module":"blocks.*","op":"dot","file":...,"line":65,"values":12}, ...] in the order of the
 * graph; numbers of a module's path are "*", so that layers are one. Elementwise operators of a
 * module, which cost little, are one entry without a line; views and scalars are none. */
json_t *recomputed_json(const ml_plan *plan);
/* The same of what waits for the backward pass in host memory, all with lines, and its bytes:
 * [{"module":"blocks.*","op":"dot","file":...,"line":65,"values":12,"bytes":...}, ...]. */
json_t *offloaded_json(const ml_plan *plan);

#endif
