/* Pipeline schedules: the order in which each rank runs its tasks for all microbatches of a step.
 *
 * A task is a part of a virtual stage's program: it receives its messages, runs and sends. The
 * tasks of a microbatch form an acyclic graph. The tasks of a stage are in ascending order of waves
 * (forward, backward; the last stage runs both in one task); a weight-gradient task follows the
 * task from which it was split, and no message waits for it.
 *
 * All ranks compute the same schedule from the same problem, by simulating every rank in integer
 * time units under the rules of one row of schedules.def. The order of a rank's tasks is that of
 * the simulation, so ranks never wait for each other in a circle, whatever their tasks really
 * take. Each task takes its microbatches in ascending order, so messages between two tasks are
 * received in the order in which they are sent. */
#ifndef ML_PIPELINE_SCHEDULE_H
#define ML_PIPELINE_SCHEDULE_H

#include "runtime/shard/layout.h"

typedef enum {
#define ML_SCHEDULE(ident, ...) ML_SCHEDULE_##ident,
#include "runtime/pipeline/schedules.def"
#undef ML_SCHEDULE
    ML_SCHEDULE_COUNT
} ml_schedule_kind;

typedef struct {
    int stage;    /* virtual */
    int64_t cost; /* time units, at least 1 */
    bool weight_grad;
} ml_task;
typedef struct {
    int from, to;  /* tasks of one microbatch */
    int64_t delay; /* time units from the end of the one to where the other may begin */
} ml_task_edge;
typedef struct {
    ml_schedule_kind kind;
    int ranks, chunks, microbatches;
    int task_count, edge_count;
    const ml_task *tasks;      /* of a stage in ascending wave, then its weight gradients */
    const ml_task_edge *edges; /* in any order; a stage's own order of tasks needs none */
} ml_pipeline_problem;

typedef struct {
    int task, microbatch;
    int64_t start, end; /* simulated */
} ml_action;
typedef struct {
    ml_action **actions; /* [ranks], in order */
    int *action_count;
    int64_t length; /* of the whole step */
    double bubble;  /* idle share of all ranks' time until the last one is done */
    int *held;      /* [stages]: most microbatches at once between a stage's first and last task,
                       weight gradients included */
    int *in_flight; /* [edges]: most messages at once that are sent and not yet received. A channel
                       with room for so many never makes a sender wait in a circle */
} ml_pipeline_schedule;

typedef struct {
    const char *name, *doc;
    bool virtual_stages, splits_weight_grad;
    int (*open_limit)(const ml_pipeline_problem *problem, int rank);
    const struct schedule_order *orders;
    int order_count;
} ml_schedule_rules;
extern const ml_schedule_rules ml_schedules[ML_SCHEDULE_COUNT];

/* Raises ML_INVALID for several virtual stages a rank with microbatches that are no multiple of
 * ranks (the help names the nearest that are). In `arena`. Near-linear in tasks x microbatches. */
void ml_pipeline_schedule_build(const ml_pipeline_problem *problem, ml_arena *arena,
                                ml_pipeline_schedule *out);
/* The schedule by order `number` of its kind alone (below order_count); without an arena only its
 * length. The problem was checked before. */
void ml_pipeline_schedule_by_order(const ml_pipeline_problem *problem, int number, ml_arena *arena,
                                   ml_pipeline_schedule *out);
/* One line a rank: "F0 F1 . B0 W0", for MLUA_DEBUG and golden tests: tasks by their index in the
 * stage (F first, B second, W weight gradients; the last stage's only task is an F; chunk letter a,
 * b, ... where there are several); a dot is a wait. */
void ml_pipeline_schedule_print(const ml_pipeline_problem *problem, const ml_pipeline_schedule *p,
                                ml_text *out);

#endif
