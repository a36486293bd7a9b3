/* A record of how a program was compiled, for mlua check --explain: what each pass and each later
 * step of the compiler left, in order. Recording lowers every intermediate graph, so it takes many
 * times as long as compiling. */
#ifndef ML_COMPILE_LOG_H
#define ML_COMPILE_LOG_H

#include "runtime/plan/plan.h"

typedef enum {
    ML_LOG_ATTEMPT, /* begins; `text` says how it saves memory */
    ML_LOG_PART,    /* a stage or a task begins; `text` names it */
    ML_LOG_PASS,    /* ended: the graph is another by now */
    ML_LOG_STEPS,   /* the same of what works on steps: lower, overlap, ... */
    ML_LOG_PEAK,    /* an attempt ended with `bytes`; `text`: whether that fits */
} ml_log_kind;
typedef struct {
    ml_log_kind kind;
    const char *name, *text;
    uint32_t nodes, steps; /* steps: kernels, products, collectives, copies; 0: not known, for the
                              graph is still global */
    double bytes;          /* that the steps read and write; of ML_LOG_PEAK: of memory */
    double seconds;        /* that a GPU would take for the steps one after the other, estimated;
                              0: not known */
    double took;           /* seconds that the compiler took */
} ml_log_event;

struct ml_compile_log {
    ml_arena *arena;
    ML_VEC(ml_log_event) events;
    double clock; /* when the last event was recorded */
};

ml_compile_log *ml_compile_log_new(void); /* NULL: out of memory */
void ml_compile_log_free(ml_compile_log *log);

/* Each does nothing where plan->options has no log. */
void log_pass(const ml_plan *plan, const char *name);
void log_steps(const ml_plan *plan, const char *name, const char *text);
__attribute__((format(printf, 3, 4))) void log_text(const ml_plan *plan, ml_log_kind kind,
                                                    const char *format, ...);

#endif
