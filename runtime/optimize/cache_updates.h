/* What a program that sets parameters writes of the parameter cache (param_cache.c). */
#ifndef ML_CACHE_UPDATES_H
#define ML_CACHE_UPDATES_H

#include "runtime/plan/plan_internal.h"

/* How a cached value follows the parameters that a step sets. */
typedef enum {
    CACHE_KEPT,    /* it is computed of others alone */
    CACHE_WRITTEN, /* the program that sets them writes it, or the parts that are of them */
    CACHE_REBUILT, /* it is computed anew: ranks exchange it, or such parts lie apart in memory */
    CACHE_CLASSES,
} cache_class;

/* Of a node of g; set[]: by state. */
cache_class cache_class_of(const ml_graph *g, ml_ref value, const bool *set);

/* The updates of cached values in a plan that sets parameters. */
typedef struct {
    ml_plan *plan; /* its graph is appended to */
    ml_arena *scratch;
    const ml_ref *new_value; /* by state; 0 where the program does not set it */
    const bool *set;         /* by state */
    bool *listed;            /* by state: its updates are in the list */
    bool *source;            /* by state: parts beside those that are written are computed of it */
    ML_VEC(ml_update) list;
} cache_updates;

/* What becomes of `cached`, a node of graph g: nothing where none of its parameters is set.
 * renewed[]: by node of g, zeros at first. */
void cache_updates_add(cache_updates *c, const ml_graph *g, const ml_update *cached,
                       ml_ref *renewed);
/* What such a program writes of the cache of microbatches whose sums it applies. */
void cache_updates_of(cache_updates *c, const ml_plan *microbatch);

#endif
