/* Pipeline schedules: in which order each rank runs its tasks for all microbatches of a step.
 *
 * A task is a piece of one virtual stage's program: it has received all it needs, runs, and sends.
 * Tasks of a microbatch form an acyclic graph; the tasks of a stage are in the order of their
 * levels (forward, backward; the last stage has both in one). A `late` task is weight-gradient work
 * that nobody waits for. All ranks make the same schedule from the same problem: a simulation of
 * every rank, in whole time units, that follows the rule of the kind:
 *   1F1B         (Narayanan et al. 2019) a rank at coordinate r has at most ranks - r microbatches
 *                open: between their first task and the last that is not late. While it may, a rank
 *                opens microbatches; else it runs later tasks of open ones. Late tasks run at once
 *   interleaved  (Narayanan et al. 2021) several virtual stages a rank; opened in groups of `ranks`
 *                microbatches for each chunk, at most 2(ranks - r - 1) + (chunks - 1) ranks + 1
 *   zero-bubble  (Qi et al. 2023, ZB-H1) the same with late tasks moved to where the rank would
 *                wait; no rank holds more microbatches, late tasks included, than the first rank
 *                has open in 1F1B, and where that is shorter each may have so many open
 * The order on a rank is that of the simulation, so ranks never wait in a circle, whatever the true
 * times of their tasks. Each task takes its microbatches in ascending order, so messages between
 * two tasks are received in the order in which they were sent. */
#ifndef ML_PIPELINE_SCHEDULE_H
#define ML_PIPELINE_SCHEDULE_H

#include "runtime/shard/layout.h"

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
    ml_stage_schedule kind;
    int ranks, chunks, microbatches;
    int task_count, edge_count;
    const ml_task *tasks; /* a stage's in ascending level, late after the one it was cut from */
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
    int *held; /* [stages]: most microbatches at once between a stage's first and last task, late
                  ones included */
    int *in_flight; /* [edges]: most messages at once that are sent and not yet taken. With room for
                       so many a sender that waits for room waits in no circle either */
} ml_pipeline_schedule;

/* Raises ML_INVALID for several chunks with microbatches that are no multiple of ranks (the help
 * names the nearest that are). In `arena`. Near-linear in tasks x microbatches. */
void ml_pipeline_schedule_build(const ml_pipeline_problem *problem, ml_arena *arena,
                                ml_pipeline_schedule *out);
/* One of the orders among which a zero-bubble schedule is chosen: late tasks at once; where nothing
 * else can run; the same with more units open; or not just before better work comes. Others have
 * one order. The problem was checked before. */
enum { ML_PIPELINE_VARIANTS = 7 };
void ml_pipeline_schedule_variant(const ml_pipeline_problem *problem, int number, ml_arena *arena,
                                  ml_pipeline_schedule *out);
/* One line a rank: "F0 F1 . B0 W0", for MLUA_DEBUG and golden tests: tasks by their place in the
 * stage (F first, B second, W late; the last stage's only task is an F; chunk letter a, b, ...
 * where there are several); a dot is a wait. */
void ml_pipeline_schedule_print(const ml_pipeline_problem *problem, const ml_pipeline_schedule *p,
                                ml_text *out);

#endif
