/* What a search over layouts (stdlib/tune.lua) has to know of a script, in the report of a check.
 */
#ifndef ML_SIZES_H
#define ML_SIZES_H

#include <jansson.h>

#include "vm/vm.h"

/* "axes", "mesh" and "settings": sizes by name, of settings the whole numbers; "layers" where the
 * program is cut into stages (pipeline; else NULL). */
void sizes_json(lua_State *L, const struct ml_pipeline_plan *pipeline, json_t *object);

#endif
