/* The plan of a program that is cut into pipeline stages (runtime/pipeline/stage.h).
 *
 * Each virtual stage has pieces (pieces.h), each with a plan of its own; a task of the schedule
 * (runtime/pipeline/schedule.h) is a piece with a microbatch. A stage keeps the cells of a
 * microbatch in a block, and has as many blocks (`slots`) as are in use there at once: from the
 * action before the first, when messages may come already, to the last, and to when all that was
 * sent from it has found its place. A message is one tensor of a transfer: `lanes` are what stage
 * `from` sends to stage `to` at one level; messages of a lane go in the order of the microbatches.
 */
#ifndef ML_PIPELINE_PLAN_H
#define ML_PIPELINE_PLAN_H

#include "runtime/pipeline/split_tasks.h"
#include "runtime/pipeline/task_times.h"
#include "runtime/pipeline/stage.h"
#include "runtime/plan/plan.h"

typedef struct {
    int channel;
    int saved_from, saved_to; /* of the blocks of its stages; -1 where that stage is not planned */
    int64_t bytes;
} pipeline_message;

typedef struct {
    int from, to;           /* virtual stages */
    int from_task, to_task; /* after which it is sent, before which it must be there */
    int64_t bytes;          /* of all its messages, on one rank */
    bool local;             /* both stages are of one rank: a copy, no message */
} pipeline_channel;

typedef struct {
    bool planned;
    int representative; /* the stage whose plan tells what this one needs: itself, or in a check
                 that of the first rank whose stages plan alike; -1: it is another rank's */
    int first_task, task_count;
    task_waves waves;
    task_programs programs;
    ml_plan *local;  /* the whole stage: its traffic */
    ml_plan **plans; /* by piece, that which runs once a step last */
    int plan_count;
    int *outputs; /* by output of the program: its cell, or -1 */
    int *output_task;
    int overflow_flags; /* exchanges that may leave rows without a place (ml_roots) */
    int overflow_saved; /* of what they came to, f32 over them, and the piece after which it is
                         * there
                         */
    int overflow_task;
    int slots;
    int *slot_of;     /* by microbatch */
    uint32_t *states; /* in a check: which ones it reads or assigns, some twice */
    int state_count;
} pipeline_stage;

struct ml_pipeline_plan {
    int count, microbatches, ranks; /* virtual stages; ranks of the mesh axis */
    const ml_stage_map *map;
    uint32_t
        script_inputs; /* INPUT ids below are the script's; above, what stages receive and keep */
    ml_stage_graphs
        cut;         /* of the plan's base (parts.h), as all that a program's plans have alike */
    int *input_wave; /* by INPUT id; 0: one of the program */
    pipeline_stage *stages;
    int task_count, channel_count, message_count;
    ml_task *tasks;
    pipeline_channel *channels;
    pipeline_message *messages; /* those of a lane follow one another, lanes ascending */
    int *message_of;            /* by transfer */
    ml_traffic *sent;           /* by rank: its messages to others */
    double flops;               /* of all stages, as they were dealt */
    ml_pipeline_problem problem;
    ml_pipeline_schedule schedule;
    int64_t until;              /* pipeline_overflow_time */
    struct state_reads *begins; /* by state: pipeline_saved_state.c; NULL until it is asked */
    int coordinate; /* whose plan it is; in a check, the one that needs the most memory */
};

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

/* The plan of a stage's steady piece, of a stage of `coordinate`; NULL where it has none. */
const ml_plan *pipeline_once_per_step(const struct ml_pipeline_plan *pipeline, int stage);
void pipeline_plan_free(struct ml_pipeline_plan *pipeline);
/* Slots, memory and work (pipeline_memory.c): of `coordinate`, or (-1) of the one that needs most.
 * A plan of all stages may be asked again, for another coordinate. */
void pipeline_memory(ml_plan *plan, int coordinate);
/* Raise ML_INVALID where stages of a rank share a state that one of them assigns too early
 * (staged_states.c). */
void pipeline_states_check(const ml_plan *plan, int rank);
/* A state of one rank that must be as it was before the step, should the step be done again.
 * pipeline_saved_state.c finds them: those that the step assigns. */
typedef struct {
    uint32_t state;
    int64_t bytes; /* of this rank's part */
    bool begins; /* not where `input`, a boolean of the program, is `when` at the first microbatch:
                    then the step does not read what the state held */
    bool when;
    uint32_t input;
} pipeline_saved_state;
typedef ML_VEC(pipeline_saved_state) pipeline_saved_list;
/* What the stages of `rank` assign in actions that begin before `until`. */
void pipeline_saved_find(const ml_plan *plan, int rank, int64_t until, ml_arena *arena,
                         pipeline_saved_list *out);
/* Until when a step may turn out to have left rows without a place, by the stages that are planned:
 * of one microbatch to the end of the last task that watches exchanges, of several to the step's
 * end (INT64_MAX): ranks wait for one another to find out, which must not keep microbatches
 * waiting. 0: nothing is watched. */
int64_t pipeline_overflow_time(const struct ml_pipeline_plan *pipeline);
/* From a step that ran (pipeline_retime.c). */
typedef struct {
    ml_pipeline_times times;
    int64_t length; /* of a step with these times, in nanoseconds */
    double bubble;
    bool reordered; /* the actions have another order from now on: `length` and `bubble` are its */
    int64_t length_before;
} pipeline_forecast;
/* ran[rank][i]: when the i-th action of each rank began and ended. Tells how a step goes on from
 * now, and takes a better order of actions where one fits the blocks that there are. All ranks call
 * it with the same times. Results stay, to the bit: each task has its microbatches in ascending
 * order. Raises. */
void pipeline_retime(ml_plan *plan, const ml_task_time *const *ran, ml_arena *arena,
                     pipeline_forecast *out);
/* A line for each task and each lane. */
void pipeline_times_print(const ml_plan *plan, const pipeline_forecast *forecast, ml_text *out);
/* Microbatches whose blocks a stage has, and the slot of each: from the schedule. */
void pipeline_slots_assign(struct ml_pipeline_plan *pipeline, int stage, ml_arena *arena);

#endif
