/* What the files of plan/ offer the compiler (runtime/compile.c), in the order in which it calls
 * them: passes rewrite a graph, which, is lowered to steps, these are put in order, joined where
 * kernels are alike, states get their updates, temporaries their offsets. All raise. */
#ifndef ML_PLAN_INTERNAL_H
#define ML_PLAN_INTERNAL_H

#include "runtime/plan/arena_offsets.h"
#include "runtime/plan/plan.h"

/* ---- plan.c */
/* An empty plan with an arena. */
ml_plan *plan_empty(void);
/* A plan of a part of `whole`: its layout, target and options. The graph becomes the part's (*graph
 * NULL); *part is set before anything can fail. */
ml_plan *plan_of_part(const ml_plan *whole, ml_graph **graph, const ml_roots *roots,
                      ml_plan **part);
/* Free a plan that has no pipeline. */
void plan_free(ml_plan *plan);
/* Copy roots into the plan, or into an arena. */
void plan_roots(ml_plan *plan, const ml_roots *from);
ml_roots plan_roots_copy(ml_arena *arena, const ml_roots *from);
/* The type that a state has on this rank. */
ml_type plan_state(const ml_plan *plan, uint32_t state);
/* Add what plan->retry needs beyond the plan, whose own accounts have just been filled in. */
void plan_retry_account(ml_plan *plan);
void plan_print(const ml_plan *plan, ml_text *out); /* of one with steps */

/* ---- pass_run.c */
/* The plan owns `graph`, instead of the one that it has. */
void plan_graph_set(ml_plan *plan, ml_graph *graph);
/* The same after pass `name`, which built it: verify and print it, where that is asked for. */
void pass_done(ml_plan *plan, ml_graph *graph, const char *name);

/* ---- step_seconds.c */
/* Whether the ranks along a mesh axis are on one host. */
bool plan_within_host(const ml_layout *layout, const ml_target *target, int axis);
/* The layout to whose mesh axis these ranks belong: of a group's program, or, as an all-gather of
 * what all ranks hold parts of, of the update. */
const ml_layout *plan_layout_along(const ml_plan *plan, int axis, int64_t ranks);
/* Bytes a second that a rank sends over a mesh axis. */
double plan_link_speed(const ml_layout *layout, const ml_target *target, int axis);
/* What a GPU would take for step t alone, by these guesses. */
double plan_step_seconds(const ml_schedule *s, const ml_layout *layout, uint32_t t);

/* ---- reduce_in_place.c */
/* Of a program that applies sums of gradients: ranks add these up in the states' own memory, which
 * nothing reads after it; where collectives run beside computation, they may lead (lower.h). */
void plan_reduce_in_place(ml_plan *plan, bool overlap);

/* ---- prefetch.c */
/* What rebuilds a parameter cache of `program`, on GPUs: its order, its updates
 * (plan_update_states), and all-gathers that continue beside the programs that follow. Kernels that
 * are alike are joined after it, as their results have their memory then. */
void plan_prefetch(ml_plan *rebuild, const ml_graph *program);

/* ---- overlap.c */
/* Put the steps in an order in which collectives run beside computation (lower.h: tickets). */
void plan_overlap(ml_plan *plan);

/* ---- state_updates.c */
/* Write every update to its state: in place where that is safe, else by a copy at the end. */
void plan_update_states(ml_plan *plan);
/* One more written value of a step, of so many bytes. */
void plan_add_workspace(ml_schedule *s, ml_step *step, int64_t bytes);
/* Of a task: write every output to its saved value, or copy it there at the end. */
void plan_export_outputs(ml_plan *plan);

/* ---- memory.c */
/* Whether the value is all of its storage. */
bool value_is_whole(const ml_schedule *s, const ml_value *value);
/* The storages that a step reads, by read: found once for the step that was asked for last, as one
 * of many members has many results. */
typedef struct {
    const ml_step *step;
    ML_VEC(uint32_t) storages;
} memory_reads;
const uint32_t *memory_read_storages(const ml_schedule *schedule, const ml_step *step,
                                     memory_reads *reads, ml_arena *scratch);
/* Whether write `write` of the step may use the very memory of `storage`, as far as the step's own
 * reads of that storage are concerned. */
bool memory_may_overwrite(const ml_schedule *schedule, const ml_step *step,
                          const uint32_t *storages, int write, uint32_t storage);
/* Fill in the byte counts of the plan once the temporaries are placed. */
void memory_account(ml_plan *plan);

#endif
