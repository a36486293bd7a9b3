/* What the files of running pipelined programs share (staged.c, staged_retry.c). */
#ifndef ML_PIPELINE_RUN_H
#define ML_PIPELINE_RUN_H

#include "runtime/exec/session.h"
#include "runtime/pipeline/plan.h"

typedef struct {
    char *buffers; /* device memory: slots of block_bytes each, then what is computed once a step */
    ml_executable **executables; /* by slot and piece; one for all slots where binding is cheap. The
                                    last one is what runs once a step, where there is that */
    bool *bound;
    int first_flag; /* of a microbatch's row of watches: the first of this stage's */
} stage_run;

/* A state that is set aside at the beginning of a step. */
typedef struct {
    pipeline_saved_state of;
    void *memory; /* NULL until it is needed */
    bool taken;   /* in this step */
} state_copy;

struct pipeline_run {
    stage_run *stages; /* by virtual stage */
    ml_edge **edges;   /* by lane; NULL where this rank is neither end; of a fallback its owner's */
    int *messages;     /* of the plan's, those that this rank sends or receives, in their order */
    int message_count;
    char *feeds;        /* host memory: this rank's parts of the inputs, by microbatch; likewise */
    int64_t feed_bytes; /* of one microbatch */
    int queued;
    bool rebinds; /* one executable serves all slots */
    bool patient; /* some messages may be expected an action ahead */
    bool fresh;   /* not all executables are ready for many messages under way */
    bubble_clock clock;
    /* Of a step that may be done again (staged_retry.c). */
    int64_t until;        /* the action's start from which on all watches of a step are known */
    int flag_count;       /* exchanges of this rank that are watched */
    float *flags, *found; /* [microbatches][watched]: on the device, and on the host */
    state_copy *copies;
    uint32_t copy_count;
    bool looked; /* this step's watches are known on all ranks: */
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

/* ---- staged_retry.c */

/* When the program's stages are loaded: memory for its watches and copies of states. */
ml_status retry_load(ml_program *program);
void retry_unload(ml_program *program);
/* A step begins: sets states aside. */
ml_status retry_begin(ml_program *program);
/* After a task of a microbatch: keep what its exchanges came to. */
ml_status retry_note(ml_program *program, int stage, int task, int microbatch);
/* Before the action that starts at `start` (INT64_MAX: after the last one): in a step of one
 * microbatch, the last moment to find out whether it stands. Where it does not, its actions run no
 * more, and only send and receive. */
ml_status retry_look(ml_program *program, int64_t start);
static inline bool retry_stands(const ml_program *program) {
    return !(program->pipeline->overflow.factor > 0);
}

#endif
