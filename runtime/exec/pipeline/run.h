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
    char *buffers;               /* device memory: slots of buffer_bytes each, then once_bytes */
    char *host;                  /* pinned memory: slots of host_bytes each */
    ml_executable **executables; /* by slot and task; one for all slots where binding is cheap. The
                                    once-per-step task, where there is one, is last */
    bool *bound;
    int first_flag; /* of a microbatch's row of overflow flags: the first of this stage's */
} stage_run;

/* A copy of a state from the beginning of a step. */
typedef struct {
    pipeline_saved_state of;
    void *memory; /* NULL until it is needed */
    bool taken;   /* in this step */
} state_copy;

struct pipeline_run {
    stage_run *stages; /* by virtual stage */
    ml_channel **
        comm_channels; /* by channel; NULL where this rank is neither end; of a retry its owner's */
    int *messages;     /* those of the plan that this rank sends or receives, in order */
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
char *saved_address(const ml_program *program, int stage, int microbatch, int saved);

/* ---- run.c */

ml_status pipeline_step(ml_program *program);

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
