/* The passes of the compiler, in the order in which they run: rows of tables in compile_passes.c.
 * MLUA_DUMP prints the graph after each, MLUA_VERIFY verifies it, mlua check --explain lists them.
 */
#ifndef ML_COMPILE_PASSES_H
#define ML_COMPILE_PASSES_H

#include "runtime/plan/fit_memory.h"
#include "runtime/plan/plan.h"

/* What a pass sees. Its plan has the graph and the roots, which the pass rewrites. */
typedef struct {
    ml_plan *plan;
    plan_choice choice;
    const int *input_wave; /* by INPUT id, where weight-gradient tasks are deferred: the wave of
                              tasks in which it is received; else NULL */
    bool param_cache;      /* of a program that is one part */
    ml_axis half_axis;     /* along which the batch is halved, and its size; 0: it is not */
    int64_t half_size;
    bool chunked;
} pass_context;

typedef enum {
    PASSES_GLOBAL, /* over the global graph; then a program is divided into pipeline stages */
    PASSES_RANK, /* over the graph of one rank, from sharding on, whatever is done to save memory */
    PASSES_CHOICE, /* over that too, depending on the choices by which attempts differ */
    PASS_LISTS
} pass_list;
void passes_run(pass_context *c, pass_list list);
/* What MLUA_DUMP calls the graph of a task of a pipeline stage. */
extern const char PASS_TASK[];
/* Name and purpose of pass i, in the order in which they run; false past the last. */
bool ml_compile_pass(int i, const char **name, const char **purpose);
/* Report a name in options->dump that is no pass; once. */
void passes_check_dump(const ml_compile_options *options);

#endif
