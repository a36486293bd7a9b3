/* The passes of the compiler, in the order in which they run: rows of the lists of compile_list.c.
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
    bool keeps_all;        /* what is cheap is computed again nowhere, as chosen */
    const int *input_wave; /* by INPUT id, where weight-gradient tasks are deferred: the wave of
                              tasks in which it is received; else NULL */
    bool param_cache;      /* of a program that is one part */
    bool sharded;          /* it reads parameters that lie on ranks of several groups */
    ml_axis half_axis;     /* along which the batch is halved, and its size; 0: it is not */
    int64_t half_size;
    bool chunked;
    int64_t scan;              /* positions of the longest scan that segments may cut */
    bool global;               /* of a whole program, before whose passes the global ones run */
    bool stages;               /* of a program that is divided into stages after these passes */
    struct compile_fold *fold; /* between fold_layers and unfold_layers */
    bool whole;                /* layers are not left out */
    int few_margin; /* layers that stay at each end where those that are left out are not unfolded;
                       0: they are */
    int64_t left_out; /* how many layers were left out */
    struct recompute_curves *curves; /* of attempts at the program; NULL: there are none */
} pass_context;

typedef enum {
    PASSES_GLOBAL, /* over the global graph; then a program is divided into pipeline stages */
    PASSES_RANK, /* over the graph of one rank, from sharding on, whatever is done to save memory */
    PASSES_CHOICE, /* over that too, depending on the choices by which attempts differ */
    PASS_LISTS
} pass_list;
typedef struct {
    const char *name;
    ml_graph *(*run)(const ml_graph *from, ml_roots *roots); /* one of run and run_with */
    ml_graph *(*run_with)(pass_context *c);                  /* may return the plan's own graph */
    bool (*when)(pass_context *c);                           /* NULL: always */
    const char *purpose;
} compile_pass;
typedef struct {
    const compile_pass *list;
    int count;
} compile_pass_list;
/* compile_list.c, or a shorter list of another program (tests/core/alone). */
extern const compile_pass_list compile_pass_lists[PASS_LISTS];

/* Of a GPU's plan: equal kernels of several steps become one launch. NULL: none do. */
extern void (*const compile_batch_kernels)(ml_plan *plan);
/* Of a step of decoding: before and after updates in place are chosen. */
extern void (*const compile_join_products)(ml_plan *plan);
extern void (*const compile_write_keys)(ml_plan *plan);

/* Copies temporaries of a plan, whose memory is accounted for, to host memory and back, until the
 * peak fits in `limit` bytes; `exposed`: also where computation waits for it. NULL: nothing does.
 */
extern void (*const compile_offload)(ml_plan *plan, int64_t limit, bool exposed);

/* Rows of every list: the nodes that the results need; shardings that mean nothing on one rank;
 * new values in the dtype and order of their states. */
ml_graph *pass_extract(pass_context *c);
bool pass_has_placements(pass_context *c);
ml_graph *pass_conform_updates(pass_context *c);
/* The part of one rank; ops by their definitions where no kernel serves. */
bool pass_has_layout(pass_context *c);
ml_graph *pass_shard(pass_context *c);
ml_graph *pass_decompose(pass_context *c);
/* What passes have duplicated, simplified, with its collectives counted anew. */
ml_graph *pass_simplify_parts(pass_context *c);
bool pass_recomputes(pass_context *c);
ml_graph *pass_recompute(pass_context *c);

/* compile_fold.c: passes over few of the layers that repeat. Where they cannot be unfolded,
 * pass_unfold_layers gives the graph that pass_fold_layers began with, and c->whole is set: the
 * passes between run again. pass_times: how many nodes each of g stands for; NULL: 1. */
bool pass_folds_layers(pass_context *c);
ml_graph *pass_fold_layers(pass_context *c);
const uint32_t *pass_times(pass_context *c, const ml_graph *g);
bool pass_has_folded(pass_context *c);
bool pass_has_folded_stages(pass_context *c);
bool pass_has_left_out(pass_context *c); /* to be unfolded */
ml_graph *pass_unfold_layers(pass_context *c);
void pass_fold_free(pass_context *c);

/* The lists from one to another, in order. */
void passes_run(pass_context *c, pass_list first, pass_list last);
/* What MLUA_DUMP calls the graph of a task of a pipeline stage. */
extern const char PASS_TASK[];
/* Name and purpose of pass i, in the order in which they run; false past the last. */
bool ml_compile_pass(int i, const char **name, const char **purpose);
/* Report a name in options->dump that is no pass; once. */
void passes_check_dump(const ml_compile_options *options);

#endif
