/* What compile.c and compile_attempts.c share. All raise. */
#ifndef ML_COMPILE_INTERNAL_H
#define ML_COMPILE_INTERNAL_H

#include "runtime/compile_few.h"
#include "runtime/compile_input.h"
#include "runtime/compile_passes.h"
#include "runtime/passes/recompute_choose.h"

/* What attempts at a plan share: the first one builds it, and the accepted one owns it. */
typedef struct {
    ml_graph *graph; /* of one rank, before the passes that depend on choices; NULL: not yet */
    ml_roots roots;
    ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS];
} rank_part;
struct compile_shared {
    ml_arena *arena;
    bool several;     /* another attempt may follow: parts are saved */
    rank_part *parts; /* of a pipeline by stage, else one */
    int part_count;
    ml_graph *global; /* of a pipeline: the graph of every attempt's plan, and its roots */
    ml_roots roots;
    bool keeps_all;                    /* an attempt computes nothing again in some part */
    recompute_curves *curves;          /* of what may be computed again */
    int64_t scan;                      /* positions of the longest scan that segments may cut */
    struct ml_pipeline_plan *pipeline; /* what all attempts begin with: stages, schedule, slots */
    uint64_t hash;
    /* What estimates are made of: programs with few of the layers, each with the present plan. */
    few_layers layers;
    bool few_alone; /* the part has no more layers than the second of them */
    struct compile_shared *few[2]; /* NULL: no estimates */
    ml_plan *few_plans[2];
};

/* ---- compile.c */
struct compile_shared *compile_shared_new(bool several);
void compile_shared_free(struct compile_shared *shared);
void compile_shared_free_parts(struct compile_shared *shared);
/* Free one of several attempts at what `shared` is for, which stays. */
void compile_attempt_free(ml_plan *plan);
/* The one part of a program without pipeline stages, and the passes before the choices: the part
 * takes the graph over, and the plan borrows it until a pass replaces it. */
void compile_begin(const ml_compile_input *in, struct compile_shared *shared, pass_context *c);
void compile_part(pass_context *c, struct compile_shared *shared, rank_part *part);
/* An attempt, whose plan has what it shares with others. */
void compile_whole(const ml_compile_input *in, ml_plan *plan, const plan_choice *choice);
void compile_pipeline(const ml_compile_input *in, ml_plan *plan, const plan_choice *choice);
/* Copy temporaries to the host as far as the choice asks for it and the peak is above `limit`. */
void compile_offload_to(ml_plan *plan, const plan_choice *choice, int64_t limit);

#endif
