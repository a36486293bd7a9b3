/* Products by their very shape, as they were timed on this machine (timed.c). */
#ifndef ML_TIMED_H
#define ML_TIMED_H

#include "runtime/predict/predict.h"
#include "vm/vm.h"

/* This process plans, perhaps for this machine's CPU: none times meanwhile. */
void timed_plan(const vm_options *options);
/* Those of one of `ranks` that share the cores of this machine's CPU. Of a product that was not
 * timed rates say how long it takes, and timed_missing times it. NULL where there is no device
 * or no memory. */
predict_products *timed_products(lua_State *L, int64_t ranks);
/* Times what was asked for and is not known, all at once; false: there was nothing, or it fails. */
bool timed_missing(predict_products *products);

#endif
