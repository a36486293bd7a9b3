/* Measuring runs: how long each step of a program took, beside the time that it would take at best.
 *
 * A device with a profile asks it at every run how to run: as ever with only the whole of it timed
 * (on a GPU: the captured graph between two events), step by step with each step timed, or with
 * products and attention repeated alone on the operands that the run gives them, whose fastest time
 * is what the device can do for that very shape. Every kind of run computes the same.
 * What is recorded is copied out of plans, so that programs may go before the profile does. Times
 * are seconds of ml_clock_now. All calls come from the device's thread. */
#ifndef ML_PROFILE_H
#define ML_PROFILE_H

#include "runtime/plan/plan.h"

typedef enum {
    ML_RUN_PLAIN, /* untimed */
    ML_RUN_WHOLE,
    ML_RUN_STEPS,
    ML_RUN_ALONE,
} ml_run_mode;

/* What a step does, by what bounds it and who is to make it faster. */
typedef enum {
    ML_WORK_GEMM,
    ML_WORK_ATTENTION,
    ML_WORK_MAP, /* norms, activations: a pass over memory */
    ML_WORK_REDUCTION,
    ML_WORK_LOSS,
    ML_WORK_OPTIMIZER,
    ML_WORK_COPY,
    ML_WORK_COLLECTIVE,
    ML_WORKS
} ml_work;
extern const char *const ml_work_names[ML_WORKS];

/* What the module paths of losses and optimizers end with (m.scope). */
#define ML_SCOPE_LOSS "loss"
#define ML_SCOPE_OPTIMIZER "optimizer"

/* What the device was measured to do; 0 where it was not (mlua doctor --bench measures). */
typedef struct {
    double copy_bytes; /* a second, read + written */
    double gemm_flops; /* a second, of large products in the usual type */
    int64_t gemm_size; /* of the square matrices that reached it */
    /* Bytes a second between the device and pinned host memory: out, back, and each way where both
     * go on at once; 0: computation uses the host's memory itself. */
    double host_out, host_back, host_both;
} ml_ceilings;

typedef struct {
    ml_work work;
    const char *name;          /* "gemm 768x3072x8192 +=", "sum+mul" */
    const char *file, *module; /* "" where unknown */
    int line;
    double flops;
    int64_t bytes;
    uint64_t shape; /* equal for steps that take equally long alone; 0: never run alone */
} ml_profile_step;
typedef struct {
    const char *name;
    uint32_t step_count;
    ml_profile_step *steps;
} ml_profile_program;

/* Where a step runs: beside others only in another stream. */
enum {
    ML_STREAM_MAIN,
    ML_STREAM_AXIS, /* + mesh axis: its collectives, where they run apart */
    ML_STREAM_HOST = ML_STREAM_AXIS + ML_MAX_MESH, /* copies to the host; + 1: and back */
    ML_STREAMS = ML_STREAM_HOST + 2
};

enum { ML_EVENT_WHOLE = UINT32_MAX, ML_EVENT_HOST = UINT32_MAX - 1 };
typedef struct {
    const ml_profile_program *program; /* NULL for the host's */
    const char *what;                  /* the host's */
    uint32_t at;                       /* step of the program, or ML_EVENT_... */
    int stream;
    int64_t step;     /* of the training */
    ml_run_mode mode; /* of that step */
    double begin, end;
} ml_profile_event;

/* One step of the training. */
typedef struct {
    int64_t step;
    ml_run_mode mode;
    double begin, end; /* end is 0 while it runs */
    double busy;       /* seconds in which the device worked for it */
} ml_profile_interval;

typedef struct {
    uint64_t shape;
    double seconds;
} ml_profile_best;

/* From the first to the last work of a run. */
typedef struct {
    double begin, end;
} ml_profile_run;

typedef struct ml_profile {
    ml_arena *arena;
    ml_run_mode mode;
    bool prints; /* MLUA_DEBUG=2: every run is step by step and is printed */
    bool stores; /* events and intervals; where not, only `busy` grows */
    bool lists;  /* every timed run in `runs`, in their order */
    double busy;
    ml_ceilings ceilings;
    ML_VEC(ml_profile_event) events;
    ML_VEC(ml_profile_interval) intervals;
    ML_VEC(ml_profile_best) best;
    ML_VEC(ml_profile_run) runs;
    uint32_t run_first; /* event of the current run, for what is printed */
} ml_profile;

/* prints: each run is listed on stderr. NULL when memory is exhausted. */
ml_profile *ml_profile_new(bool prints);
void ml_profile_free(ml_profile *profile);

/* ---- For the host ---- */
/* The training's step `step` begins, and its runs go by `mode`; the one before is over. */
ml_status ml_profile_begin_step(ml_profile *profile, int64_t step, ml_run_mode mode);
void ml_profile_end_step(ml_profile *profile); /* what follows belongs to none: plain runs */
ml_status ml_profile_host(ml_profile *profile, const char *what, double begin); /* until now */

/* ---- For devices ---- */
ml_run_mode ml_profile_mode(const ml_profile *profile); /* PLAIN where it is NULL */
/* Describe a program before its first timed run; lives as long as the profile. */
ml_status ml_profile_describe(ml_profile *profile, const ml_plan *plan,
                              ml_profile_program **program);
/* A library of this name runs the step: part of its name from now on. */
ml_status ml_profile_by(ml_profile *profile, ml_profile_program *program, uint32_t step,
                        const char *library);
/* Around a run: `begin` before its events, `end` after them with the time from its first to its
 * last work. */
void ml_profile_run_begins(ml_profile *profile);
ml_status ml_profile_run_ends(ml_profile *profile, const ml_profile_program *program, double begin,
                              double end);
ml_status ml_profile_step_ran(ml_profile *profile, const ml_profile_program *program, uint32_t step,
                              int stream, double begin, double end);
/* Runs alone: whether this step is to be repeated, for how long, and what came of it. */
bool ml_profile_wants_alone(const ml_profile *profile, const ml_profile_program *program,
                            uint32_t step);
bool ml_profile_alone_enough(int runs, double seconds); /* that all runs took together */
ml_status ml_profile_alone(ml_profile *profile, const ml_profile_program *program, uint32_t step,
                           double seconds);
/* The bytes from the first to past the last element of a value, which begin at its pointer. */
int64_t ml_profile_span(const ml_value *value);
/* Whether running the step again would change what it wrote: then its writes must be put back.
 * pointers: of the step's values. */
bool ml_profile_changes(const ml_schedule *schedule, const ml_step *step, void *const *pointers);

/* ---- Results ---- */
/* The best time that is known for a step: of its shape alone, else what its bytes and FLOPs take
 * at the device's ceilings. 0 for collectives, which could be hidden behind other work, and where
 * nothing was measured. */
double ml_profile_ideal(const ml_profile *profile, const ml_profile_step *step);

typedef struct {
    const char *name;
    int64_t count; /* of steps in one step of the training, as are all sums */
    double seconds, ideal, flops, bytes;
} ml_profile_row;
typedef struct {
    int64_t first, last; /* steps that were timed step by step; 0: none */
    ml_profile_row work[ML_WORKS], total;
    ML_VEC(ml_profile_row) modules; /* "blocks.*.attn", the slowest first */
    double collective, exposed;     /* seconds of collectives; those with no other work beside */
    double wall;                    /* of one step of the training that was timed by steps */
    int64_t whole_step;             /* the last one that was only timed as a whole; 0: none */
    double whole_busy, whole_wall;
} ml_profile_sums;
void ml_profile_sum(const ml_profile *profile, ml_arena *arena, ml_profile_sums *sums); /* raises */
/* The table for people; the same as one line of JSON; the trace that Perfetto and chrome://tracing
 * open, as one line an event with the rank as the process. All raise. */
void ml_profile_table(const ml_profile *profile, const ml_profile_sums *sums, ml_text *out);
void ml_profile_json(const ml_profile *profile, const ml_profile_sums *sums, const char *device,
                     ml_text *out);
extern const char ml_trace_head[], ml_trace_tail[];
/* Between head and tail; events of several ranks are joined by ",\n". `layout` may be NULL. */
void ml_profile_trace(const ml_profile *profile, int rank, const char *device,
                      const ml_layout *layout, ml_text *out);
void ml_json_text(ml_text *out, const char *text); /* quoted and escaped; valid UTF-8 */

#endif
