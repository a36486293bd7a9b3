/* What the files that run pipelined programs share. They are in exec and not in runtime/pipeline
 * because they run on a session, its device and its connections. */
#ifndef ML_PIPELINE_RUN_H
#define ML_PIPELINE_RUN_H

#include "runtime/exec/session.h"
#include "runtime/pipeline/plan.h"

/* bubble.c: how much of a pipelined step ranks wait: predicted from the times of some
 * steps after the first ones, and measured in the next ones. */
typedef struct {
    int64_t steps, step; /* counted so far; the present one's number, 0: it does not count */
    double began, busy;  /* seconds: when, and how long the device worked before */
    int64_t *ran;        /* [actions][2] sums over the steps that are learnt from, nanoseconds */
    int learnt;          /* how many */
    double measured[2];  /* sums over those that are measured: worked, lasted */
    ml_run_mode mode;    /* of the profile before */
    double share;        /* the bubble; negative while it is not known */
    double forecast;
} bubble_clock;
ml_status bubble_step_begin(ml_program *program, bubble_clock *clock);
/* status: how the step went; it is passed on. */
ml_status bubble_step_end(ml_program *program, bubble_clock *clock, ml_status status);

typedef struct {
    char *host;                  /* pinned memory: slots of host_bytes each */
    int64_t offset, stride;      /* of its slots in the buffers' memory, once_bytes behind them */
    ml_executable **executables; /* by slot and task; one for all slots where binding is cheap. The
                                    once-per-step task, where there is one, is last */
    int executable_count;
    bool *bound;
    ml_program **user; /* by slot: the program whose microbatch used it last; of a lead */
    int first_flag;    /* of a microbatch's row of overflow flags: the first of this stage's */
} stage_run;

/* A copy of a state from the beginning of a step. */
typedef struct {
    pipeline_saved_state of;
    void *memory; /* NULL until it is needed */
    bool taken;   /* in this step */
} state_copy;

/* A step of mixed microbatches has those of several programs, which differ in sizes alone. Its lead
 * is the one that was made first: the schedule, slots, channels and buffers of the step are its. */
struct pipeline_run {
    ml_program *lead;           /* of its steps: itself, or another program */
    ml_program **of;            /* of a lead: by microbatch of the step */
    stage_run *stages;          /* by virtual stage */
    ml_channel **comm_channels; /* by channel; NULL where this rank is neither end */
    bool own_channels;          /* no other program's, such as those of its owner or lead */
    int *messages;              /* those of the plan that this rank sends or receives, in order */
    int message_count;
    char *feeds;        /* host memory: this rank's parts of the inputs, by microbatch; likewise */
    int64_t feed_bytes; /* of one microbatch */
    int queued;
    bool rebinds; /* one executable serves all slots */
    bool patient; /* some messages may be expected an action ahead */
    bool fresh;   /* some executables are not ready for several messages in flight */
    bubble_clock clock;
    /* Of a step that may have to be repeated (retry.c). */
    int64_t until;        /* the start of the action at which all flags of a step are known */
    int flag_count;       /* flags of this rank, for one microbatch */
    float *flags, *found; /* [microbatches][flag_count]: on the device, and on the host */
    state_copy *copies;
    uint32_t copy_count;
    bool flags_known; /* this step's flags are known on all ranks: */
    exchange_overflow overflow;
};

static inline const struct ml_pipeline_plan *plan_of(const ml_program *program) {
    return program->plan->pipeline;
}
/* Whether this rank has the virtual stage. */
static inline bool mine(const ml_program *program, int stage) {
    return plan_of(program)->stages[stage].planned;
}
/* The program of a microbatch of the step. */
static inline ml_program *program_at(const ml_program *lead, int microbatch) {
    return lead->pipeline->of[microbatch];
}
/* Slots of a stage, and executables of its tasks. */
static inline int slots_of(const ml_program *program, int stage) {
    return plan_of(program->pipeline->lead)->stages[stage].slots;
}
static inline int executable_count(const ml_program *program, int stage) {
    return program->pipeline->stages[stage].executable_count;
}
static inline int slot_at(const ml_program *program, int stage, int microbatch) {
    return plan_of(program->pipeline->lead)->stages[stage].slot_of[microbatch];
}
static inline char *saved_in_slot(const ml_program *program, int stage, int slot, int saved) {
    const ml_program *lead = program->pipeline->lead;
    const ml_program *memory = lead->owner != NULL ? lead->owner : lead;
    const stage_run *at = &lead->pipeline->stages[stage];
    const saved_value *value = &plan_of(program)->stages[stage].tasks.saved[saved];
    if (value->from == SAVED_ONCE_PER_STEP) slot = slots_of(program, stage);
    return (char *)memory->microbatch_buffers + at->offset + slot * at->stride + value->offset;
}
static inline char *saved_address(const ml_program *program, int stage, int microbatch, int saved) {
    return saved_in_slot(program, stage, slot_at(program, stage, microbatch), saved);
}

/* ---- run.c */

ml_status pipeline_step(ml_program *program);

/* ---- load.c: rows of the table (session.h) */

ml_status pipeline_load(ml_program *program);
ml_status pipeline_connect(ml_program *program);
void pipeline_unload(ml_program *program);

/* ---- retry.c: rows of the table (session.h) */

ml_status pipeline_buffers_reserve(ml_program *program, int64_t bytes);
ml_status pipeline_overflow_agree(ml_program *program);
bool pipeline_plans_alike(const ml_program *program, const ml_program *retry);
ml_status pipeline_overflow(ml_program *program, exchange_overflow *found);

/* ---- retry.c: within a run */

/* When the program's stages are loaded: memory for its flags and copies of states. */
ml_status retry_load(ml_program *program);
void retry_unload(ml_program *program);
/* A step begins: copies states. */
ml_status retry_begin(ml_program *program);
/* After a task of a microbatch: store its overflow flags. */
ml_status retry_note(ml_program *program, int stage, int task, int microbatch);
/* Before the action that starts at `start` (INT64_MAX: after the last one): in a step of one
 * microbatch, ranks compare their flags once all are known. Where one has overflowed, the remaining
 * actions only send and receive. */
ml_status retry_check_flags(ml_program *program, int64_t start);
static inline bool step_is_valid(const ml_program *program) {
    return !(program->pipeline->overflow.factor > 0);
}

#endif
