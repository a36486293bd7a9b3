/* Times of a pipelined step that ran: what its tasks and messages took, and how long a step with
 * such times takes in a given order. What a schedule knows beforehand is work; a message, the start
 * of a task and a task that is cut in two take more than that tells.
 *
 * All in nanoseconds, and whole numbers: every rank learns the same from the same table. */
#ifndef ML_TASK_TIMES_H
#define ML_TASK_TIMES_H

#include "runtime/pipeline/schedule.h"

typedef struct {
    int64_t begin, end; /* since the step began */
} ml_task_time;

typedef struct {
    int64_t *task;  /* [tasks] how long it works, on average */
    int64_t *pause; /* [tasks] from the end of what its rank did before, where it waits for none */
    int64_t *delay; /* [edges] from the end of a task to the begin of one that waits for it alone */
    double share;   /* pauses and delays are so much of those that were seen */
} ml_pipeline_times;

/* ran[rank][i]: of the i-th action of each rank, by clocks that may differ a little. A replay of
 * that very order takes as long as the step did. */
void ml_pipeline_times_learn(const ml_pipeline_problem *problem,
                             const ml_pipeline_schedule *schedule, const ml_task_time *const *ran,
                             ml_arena *arena, ml_pipeline_times *times);
/* The length of a step in which ranks go through the schedule's actions in their order and every
 * task begins as soon as it may; *bubble becomes the share in which ranks do not work. */
int64_t ml_pipeline_replay(const ml_pipeline_problem *problem, const ml_pipeline_schedule *schedule,
                           const ml_pipeline_times *times, ml_arena *arena, double *bubble);
/* The same problem with what tasks and messages take; tasks and edges are in `arena`. */
ml_pipeline_problem ml_pipeline_problem_timed(const ml_pipeline_problem *problem,
                                              const ml_pipeline_times *times, ml_arena *arena);

#endif
