/* The predicted time of a step, for `mlua check` and `mlua tune` (predicted.c). */
#ifndef ML_PREDICTED_H
#define ML_PREDICTED_H

#include <jansson.h>

#include "runtime/predict/predict.h"
#include "vm/vm.h"

typedef struct {
    ml_prediction step;
    bool known;                 /* the device's rates are */
    ml_rates rates;             /* of a rank */
    predict_products *products; /* that were timed; NULL: none */
    const ml_plan *microbatch;  /* whose runs were added last; NULL: none's */
    double peak_flops;          /* of the device's data sheet, a second; 0: unknown */
    const char *source;  /* of the rates: "the table of an h200", "measured here 2026-11-26" */
    const char *lengths; /* which documents attention is predicted by, in words; NULL: none */
} vm_predicted;

/* The rates of the device that is planned for, of one rank of `ranks`. Raises. */
bool predicted_rates(lua_State *L, int64_t ranks, vm_predicted *p);
/* A program that runs `times` times a step. Raises. */
void predicted_add(lua_State *L, vm_predicted *p, const ml_plan *plan, double times);
/* Runs that the option `runs` of the table at index 2 lists: {program =, documents = a host array
 * of rows, or false: none, so that attention takes no time; times =}; without times as often as
 * given, a pipeline once. Takes `lengths`, too.
 * False: no runs are listed. Raises. */
bool predicted_runs(lua_State *L, vm_predicted *p, double times);
/* The next rebuild of the parameter cache, from `rebuild` on, that comes before the microbatches of
 * each step: one of these programs, the first of the list at index 1, sets what it reads and not
 * what it computes. NULL: no more. */
const ml_plan *predicted_rebuild(lua_State *L, int64_t programs, const ml_plan *rebuild);
/* tokens: of a step, of all ranks; flops: of one rank. */
void predicted_print(const vm_predicted *p, double tokens, bool samples, double flops);
void predicted_json(const vm_predicted *p, double tokens, double flops, json_t *object);

#endif
