/* Pipeline schedules: in which order each rank runs its tasks for all microbatches of a step.
 *
 * A task is a piece of one virtual stage's program: it has received all it needs, runs, and sends.
 * Tasks of a microbatch form an acyclic graph; the tasks of a stage are in the order of their
 * levels (forward, backward; the last stage has both in one). A `late` task is weight-gradient work
 * that nobody waits for. All ranks make the same schedule from the same problem: a simulation of
 * every rank, in whole time units, that follows the rule of the kind:
 *   1F1B         (Narayanan et al. 2019) a rank at coordinate r holds at most ranks - r micro-
 *                batches between first and last task; later tasks of a stage go before earlier
 *                ones; late tasks follow at once
 *   interleaved  (Narayanan et al. 2021) several virtual stages a rank, forward in groups of
 *                `ranks` microbatches for each chunk; its warm-up of
 *                2(ranks - r - 1) + (chunks - 1) ranks
 *   zero-bubble  (Qi et al. 2023, ZB-H1) 1F1B with late tasks moved to where the rank would wait,
 *                within 1F1B's memory
 * Order on a rank never waits in a circle: it is the order of the simulation. */
#ifndef ML_PIPELINE_H
#define ML_PIPELINE_H

#include "runtime/shard/layout.h"

typedef struct {
    int stage;    /* virtual */
    int64_t cost; /* time units, at least 1 */
    bool late;
} ml_task;
typedef struct {
    int from, to; /* tasks of one microbatch */
} ml_task_edge;
typedef struct {
    ml_stage_schedule kind;
    int ranks, chunks, microbatches;
    int task_count, edge_count;
    const ml_task *tasks;       /* a stage's ascending by level, late after what it was cut from */
    const ml_task_edge *edges; /* sources before users; a late one has its stage's task as source */
} ml_pipeline_problem;

typedef struct {
    int task, microbatch;
    int64_t start, end; /* simulated */
} ml_action;
typedef struct {
    ml_action **actions; /* [ranks], in order */
    int *action_count;
    int64_t length;  /* of the whole step */
    double bubble;   /* idle share of all ranks' time until the last one is done */
    int *held;       /* [stages]: most microbatches at once between a stage's first and last task */
} ml_pipeline;

/* Raises ML_INVALID for interleaved with microbatches that are no multiple of ranks (the help names
 * the nearest that are). In `arena`. Near-linear in tasks x microbatches. */
void ml_pipeline_make(const ml_pipeline_problem *problem, ml_arena *arena, ml_pipeline *out);
/* One line a rank: "F0 F1 B0 W0 .", for MLUA_DEBUG and golden tests: tasks by their place in the
 * stage (F first, B second, W late; chunk letter a, b, ... where there are several). */
void ml_pipeline_print(const ml_pipeline_problem *problem, const ml_pipeline *p, ml_text *out);

#endif
