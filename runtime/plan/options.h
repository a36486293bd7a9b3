/* The options of the compiler (runtime/compile.h); zero is the default. They are read from the
 * environment once, at the border (runtime/exec/options.c), and passed in: plan, pipeline, shard
 * and passes read no knobs. Options of code generation are fields of ml_target. */
#ifndef ML_OPTIONS_H
#define ML_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ml_compile_log ml_compile_log;

/* ML_AUTO: the compiler chooses, by cost and memory. */
typedef enum { ML_AUTO, ML_NEVER, ML_ALWAYS } ml_choice;

typedef struct {
    ml_choice overlap;    /* steps ordered so that collectives run beside computation; by default on
                             GPUs */
    ml_choice half_batch; /* the halves of the batch alternate, to hide collectives */
    ml_choice recompute;  /* values computed again in the backward pass; by default as
                             the budget of memory asks; never: none because it is cheap */
    int64_t chunk_bytes;  /* larger logits are computed in chunks; 0: ML_CHUNK_BYTES;
                             INT64_MAX: never */
    bool no_param_cache;  /* each step casts f32 parameters to the products' dtype anew */
    bool no_fold;         /* passes see all layers, also of those that repeat */
    bool no_batch;        /* no kernels of several steps in one launch */
    bool verify;          /* verify the graph after every pass, and the kernel IR */
    struct ml_compile_log *log; /* where to record what is done (log.h); NULL: nowhere */
    const char *dump; /* PASS or PASS@PROGRAM: print the graph after that pass; NULL: none */
} ml_compile_options;

#define ML_CHUNK_BYTES ((int64_t)1 << 30)

#endif
