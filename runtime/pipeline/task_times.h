/* Times of a pipelined step that ran: what its tasks and messages took, and how long a step with
 * such times takes in a given order. The schedule knows only work beforehand; messages, the start
 * of a task and a task that is split in two cost more.
 *
 * All in integer nanoseconds: every rank computes the same from the same table. */
#ifndef ML_TASK_TIMES_H
#define ML_TASK_TIMES_H

#include "runtime/pipeline/schedule.h"

typedef struct {
    int64_t begin, end; /* since the step began */
} ml_task_time;

typedef struct {
    int64_t *task;  /* [tasks] its own time, on average */
    int64_t *pause; /* [tasks] after the previous task of its rank, where it waits for no message */
    int64_t *delay; /* [edges] from the end of a task to the start of one that waits for it alone */
    double share;   /* of the pauses and delays that were measured: what is counted */
} ml_pipeline_times;

/* ran[rank][i]: of the i-th action of each rank, by clocks that may differ a little. A replay of
 * that very order takes as long as the step did. */
void ml_pipeline_times_learn(const ml_pipeline_problem *problem,
                             const ml_pipeline_schedule *schedule, const ml_task_time *const *ran,
                             ml_arena *arena, ml_pipeline_times *times);
/* The length of a step in which ranks run the schedule's actions in order and every task begins as
 * soon as it may; *bubble becomes the share in which ranks are idle. */
int64_t ml_pipeline_replay(const ml_pipeline_problem *problem, const ml_pipeline_schedule *schedule,
                           const ml_pipeline_times *times, ml_arena *arena, double *bubble);
/* The same problem with these times as costs and delays; tasks and edges are in `arena`. */
ml_pipeline_problem ml_pipeline_problem_timed(const ml_pipeline_problem *problem,
                                              const ml_pipeline_times *times, ml_arena *arena);

#endif
