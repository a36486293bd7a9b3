/* Which way of saving memory a program is compiled with: one attempt after the other, until a plan
 * fits. */
#ifndef ML_FIT_MEMORY_H
#define ML_FIT_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/* What the backward pass computes again instead of storing it. */
typedef enum {
    RECOMPUTE_SELECTIVE, /* selective (ml_recompute_selective), unless the options choose: values
                       that cost at most one write, as the backward pass reads their inputs anyway
                     */
    RECOMPUTE_SELECTIVE_BUT_WEIGHT_GRAD, /* the same; none where weight-gradient tasks are deferred,
                                       as it would need kernels of its own there */
    RECOMPUTE_FULL,                      /* full (ml_recompute): all that saves memory */
} plan_recompute;

/* What attempts differ in. */
typedef struct {
    plan_recompute recompute;
    bool overlap;     /* collectives run beside computation */
    bool param_cache; /* parameters are stored in the products' dtype too */
} plan_choice;

typedef struct {
    int64_t peak;     /* bytes of the plan */
    int64_t moments;  /* bytes to reserve for the optimizer program (Adam's m and v) */
    bool caches;      /* it has a cache of parameters */
    bool weight_grad; /* weight-gradient tasks are deferred */
} plan_size;

typedef struct {
    /* Compile with a choice, instead of the attempt before: a large plan takes most of the
     * memory that compiling takes, so there is one at a time. */
    void (*attempt)(void *context, const plan_choice *choice, plan_size *size);
    void *context;
    int64_t limit; /* bytes */
} plan_fit;

/* The last attempt is the first that fits, from `first` on, or else the smallest. */
void plan_fit_memory(const plan_fit *fit, const plan_choice *first);

#endif
