/* The plan of a program that is divided into pipeline stages (runtime/pipeline/README.md).
 *
 * Each virtual stage has tasks (split_tasks.h), each with a plan of its own; an action of the
 * schedule (schedule.h) is a task for one microbatch. A stage's saved values of one microbatch are
 * in a microbatch buffer. It has as many buffers (`slots`) as are in use at once: from the action
 * before the first one, when messages may arrive already, to the last one, and until every message
 * sent from the buffer has a destination. A message is one tensor of a transfer; a channel has the
 * messages from one task to another, in the order of microbatches. */
#ifndef ML_PIPELINE_PLAN_H
#define ML_PIPELINE_PLAN_H

#include "runtime/pipeline/split_tasks.h"
#include "runtime/pipeline/stage.h"
#include "runtime/pipeline/task_times.h"
#include "runtime/plan/plan.h"

typedef struct {
    int channel;
    int saved_from, saved_to; /* saved values; -1 where that stage is not planned */
    int64_t bytes;
} pipeline_message;

typedef struct {
    int from, to;           /* virtual stages */
    int from_task, to_task; /* sent after the one, received before the other */
    int64_t bytes;          /* of all its messages, on one rank */
    bool local;             /* both stages are of one rank: a copy, no message */
} pipeline_channel;

typedef struct {
    bool planned;
    int representative; /* the stage whose plan has this one's sizes: itself, or in a check that of
                           the first rank with equal stages; -1: it is another rank's */
    int first_task, task_count;
    task_waves waves;
    task_set tasks;
    ml_plan *local;  /* the whole stage: its traffic */
    ml_plan **plans; /* by task, the once-per-step task last */
    int plan_count;
    int *outputs;       /* by output of the program: its saved value, or -1 */
    int *output_task;   /* and the task that computes it */
    int overflow_flags; /* exchanges of experts' rows that may overflow (ml_roots) */
    int overflow_saved; /* the saved value with the flags, f32 for each */
    int overflow_task;  /* the task that computes it */
    int slots;
    int *slot_of;       /* by microbatch */
    int64_t host_bytes; /* of one slot's host memory: what its tasks offload */
    uint32_t *states;   /* in a check: those that it reads or assigns, some twice; NULL: in a run */
    int state_count;
} pipeline_stage;

/* The schedule of a step with another number of microbatches. */
struct pipeline_count {
    ml_pipeline_schedule schedule; /* without actions: the schedule has none for that number */
    int **slot_of;                 /* by stage; NULL where it is not planned */
};

struct ml_pipeline_plan {
    int count, microbatches, ranks; /* virtual stages; ranks of the mesh axis */
    const ml_stage_map *map;
    uint32_t script_inputs; /* INPUT ids below are the script's; above, received and saved values */
    ml_stage_graphs cut;    /* shared by all attempts at a plan, like all up to the schedule */
    int *input_wave;        /* by INPUT id; 0: one of the script */
    pipeline_stage *stages;
    int task_count, channel_count, message_count;
    ml_task *tasks;
    pipeline_channel *channels;
    pipeline_message *messages; /* by channel, ascending */
    int *message_of;            /* by transfer */
    ml_traffic *sent;           /* by rank: its messages to others */
    double flops;               /* of all stages, by the costs that balanced them */
    ml_pipeline_problem problem;
    ml_pipeline_schedule schedule;
    const struct pipeline_count *counts; /* by microbatches; NULL: their number does not vary */
    int64_t until;                       /* pipeline_overflow_time */
    struct state_reads *begins;          /* by state: saved_states.c; NULL until it is needed */
    int64_t *state_bytes; /* in a check, by state: of a rank's part, 0 until it is asked for */
    int coordinate;       /* whose plan it is; in a check, the one that needs the most memory */
};

/* The stage whose plan has the sizes of stage v. */
static inline const pipeline_stage *pipeline_representative(const struct ml_pipeline_plan *pipeline,
                                                            int v) {
    int other = pipeline->stages[v].representative;
    return &pipeline->stages[other >= 0 ? other : v];
}

/* ---- how compile.c builds one */
/* Divide `global` into stages and schedule their tasks: what all attempts at a plan begin with.
 * *out, in `arena`, is set before anything can fail; its stages' graphs are freed below. */
void pipeline_partition(ml_graph *global, const ml_roots *roots, const ml_layout *layout,
                        ml_stage_map *map, int coordinate, ml_arena *arena,
                        struct ml_pipeline_plan **out);
void pipeline_partition_free(struct ml_pipeline_plan *partition);
/* What all ranks must have alike: who sends what to whom, in which order. */
uint64_t pipeline_hash(const struct ml_pipeline_plan *partition, uint64_t seed);
/* Set plan->pipeline; then for each stage that is planned begin it, run passes over the plan that
 * this returns, split it into tasks, and compile stage->plans; then end: messages and memory. With
 * once_per_step, what is the same for all microbatches may become a task of its own. */
void pipeline_plan_begin(ml_plan *plan, const struct ml_pipeline_plan *partition);
ml_plan *pipeline_stage_begin(ml_plan *plan, int stage, bool once_per_step);
void pipeline_stage_split(ml_plan *plan, int stage);
void pipeline_plan_end(ml_plan *plan, int coordinate);

/* The steps that follow have so many microbatches: of a program whose roots are `mixed`, at most as
 * many as it was planned for. Raises where the schedule has no such step. */
void pipeline_set_microbatches(ml_plan *plan, int microbatches);

/* The plan of a stage's once-per-step task, of a stage of `coordinate`; NULL where it has none. */
const ml_plan *pipeline_once_per_step(const struct ml_pipeline_plan *pipeline, int stage);
void pipeline_plan_free(struct ml_pipeline_plan *pipeline);
/* Memory, work and traffic (plan_memory.c): of `coordinate`, or (-1) of the one that needs most
 * memory. A plan of all stages may be asked again, for another coordinate. */
void pipeline_memory(ml_plan *plan, int coordinate);

/* Where a rank's peak is more than `limit` bytes, values that its tasks save are copied to host
 * memory (offload_saved.c), then temporaries of its largest tasks (plan_offload): as few as fit,
 * where computation hides the copies, or, `exposed`, any. Of `coordinate`, or (-1) of all planned
 * stages; the plan's memory is accounted for anew. */
typedef void (*pipeline_task_offload)(ml_plan *task, int64_t limit, bool exposed);
void pipeline_offload(ml_plan *plan, int coordinate, int64_t limit, bool exposed,
                      pipeline_task_offload offload_task);

/* ---- steps that may have to be repeated (saved_states.c) */
/* A state that a step assigns, which a repeated step must find as it was before. */
typedef struct {
    uint32_t state;
    int64_t bytes; /* of this rank's part */
    bool begins;   /* needs no copy where `input`, a boolean of the program, is `when` at the first
                      microbatch: then the step does not read the state's old value */
    bool when;
    uint32_t input;
} pipeline_saved_state;
typedef ML_VEC(pipeline_saved_state) pipeline_saved_list;
/* What the stages of `rank` assign in actions that begin before `until`. */
void pipeline_saved_find(const ml_plan *plan, int rank, int64_t until, ml_arena *arena,
                         pipeline_saved_list *out);

/* ---- times of a step that ran (retime.c) */
typedef struct {
    ml_pipeline_times times;
    int64_t length; /* of a step with these times, in nanoseconds */
    double bubble;
    bool reordered; /* the actions have a new order from now on: `length` and `bubble` are its */
    int64_t length_before;
} pipeline_forecast;
/* ran[rank][i]: when the i-th action of each rank began and ended. Predicts the following steps,
 * and takes a better order of actions where one needs no more buffers and channel room than there
 * are. All ranks call it with the same times. Results are unchanged, to the bit: each task has its
 * microbatches in ascending order. Raises. */
void pipeline_retime(ml_plan *plan, const ml_task_time *const *ran, ml_arena *arena,
                     pipeline_forecast *out);
/* A line for each task and each channel. */
void pipeline_times_print(const ml_plan *plan, const pipeline_forecast *forecast, ml_text *out);

#endif
