/* What a report says of the largest values at the peak of a program's memory: types, bytes, states
 * and lines. */
#ifndef ML_CHECK_LARGEST_H
#define ML_CHECK_LARGEST_H

#include <jansson.h>

#include "vm/vm.h"

void largest_print(lua_State *L, const ml_plan *plan);
json_t *largest_json(lua_State *L, const ml_plan *plan);

#endif
