/* What the files of plan/ share: a plan is made by plan_global, plan_local and plan_lower
 * (passes.c), plan_overlap (overlap.c), plan_assign and plan_export (assign.c), ml_memory_place
 * and memory_account (memory.c), in this order; between the first two, programs are cut into
 * stages (staged.c), which then are plans of their own. All raise. */
#ifndef ML_PLAN_PARTS_H
#define ML_PLAN_PARTS_H

#include "runtime/plan/plan.h"

/* An empty plan with an arena. */
ml_plan *plan_empty(void);
/* Copy roots into the plan, or into an arena. */
void plan_roots(ml_plan *plan, const ml_roots *from);
ml_roots plan_roots_copy(ml_arena *arena, const ml_roots *from);
/* The passes over the global program, up to where stages are cut: sets plan->graph and roots. */
void plan_global(ml_plan *plan, const ml_graph *from, const ml_roots *roots);
/* What the backward pass computes again rather than keep. */
typedef enum {
    RECOMPUTE_FREE, /* what costs next to no time, where MLUA_RECOMPUTE does not say otherwise */
    RECOMPUTE_FREE_NOT_LATE, /* the same; nothing where weight gradients are put off, by which time
                                it would be computed alone */
    RECOMPUTE_ALL,           /* all that saves memory */
} plan_recompute;
/* What plans of a program share that differ in what they do to save memory (ladder.c): the first
 * one makes it, and the one that is taken owns it. */
typedef struct {
    ml_graph *graph; /* of one rank, before the passes that such plans differ in; NULL: not yet */
    ml_roots roots;
    ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS];
} plan_part;
struct plan_base {
    ml_arena *arena;
    bool keeps;       /* another plan may follow: parts are kept */
    plan_part *parts; /* of a program that is cut by stage, else one */
    int part_count;
    ml_graph *global; /* of a program that is cut: every plan's graph, and its roots */
    ml_roots roots;
    struct ml_pipeline_plan *pipeline; /* what all its plans begin with: cut, schedule, slots */
    uint64_t hash;
};
void plan_base_free(struct plan_base *base);
/* Those over the program of one rank, from sharding on: sets plan->traffic. plan->layout is set.
 * `part` keeps what the first ones make, or has it from an earlier plan, instead of plan->graph and
 * roots; base->arena owns what it keeps. `overlap`: steps will be put in an order in which
 * collectives go on beside others; `late`: weight gradients are put off, and inputs are received at
 * these levels; NULL where they are not. */
void plan_local(ml_plan *plan, const ml_target *target, plan_recompute recompute, bool overlap,
                const int *late, struct plan_base *base, plan_part *part);
/* Cut base->global (simplified) into stages: what all plans share of them. */
void pipeline_partition(struct plan_base *base, const ml_layout *layout, const ml_cut *cut);
/* Plan the stages of base->staged of coordinate cut->coordinate, or all of them; with `copies` they
 * may have steady pieces. Sets the staged plan, the parts and the accounts of *plan, whose graph is
 * base->global. Raises. */
void pipeline_plan_stages(ml_plan *plan, const ml_target *target, const ml_cut *cut,
                 plan_recompute recompute, bool overlap, bool copies);
/* Keep what the program casts parameters to for its products from step to step, as states that are
 * set with the parameters: sets plan->refresh. */
void plan_copies(ml_plan *plan, const ml_target *target);
/* The plan goes on with `graph`, which pass `name` made from the one it has. */
void pass_done(ml_plan *plan, ml_graph *graph, const char *name);
/* To steps: sets plan->schedule and flops. */
void plan_lower(ml_plan *plan, const ml_target *target);
/* Let the halves of the batch take turns, where that hides collectives (halves.c). */
void plan_halves(ml_plan *plan, const ml_target *target, bool overlap);
/* Guesses about a current GPU: FLOPs a second of products, bytes a second that a rank sends over a
 * mesh axis. */
#define PLAN_FLOPS 600e12
double plan_link_speed(const ml_layout *layout, const ml_target *target, int axis);
/* Put the steps in an order in which collectives go on beside computation (lower.h: tickets). */
void plan_overlap(ml_plan *plan);
/* plan_lower and all that follows: assignment, places, accounts, hash. */
void plan_steps(ml_plan *plan, const ml_target *target, bool overlap);
/* The type that a state has on this rank. */
ml_type plan_state(const ml_plan *plan, uint32_t state);
/* Let every update end up in its state: in place where that is safe, else by a copy at the end. */
void plan_assign(ml_plan *plan);
/* Of a piece: let every output end up in its cell, or copy it there at the end. */
void plan_export(ml_plan *plan);
/* Join kernels that are alike: before memory is assigned, and after all that orders steps. */
void plan_batch(ml_plan *plan);
/* Fill in the byte counts of the plan once the temporaries are placed. */
void memory_account(ml_plan *plan);
int64_t memory_padded(int64_t bytes);
/* Add what plan->fallback needs beyond the plan, whose own accounts have just been filled in. */
void plan_fallback_account(ml_plan *plan);

/* Whether write `write` of the step may use the very memory of `storage`, as far as the step's own
 * reads of that storage are concerned. */
bool memory_may_overwrite(const ml_schedule *schedule, const ml_step *step, int write,
                          uint32_t storage);

#endif
