/* Timing single ops on the GPU: a session whose device keeps the time of every step. */
#ifndef GPU_BENCH_H
#define GPU_BENCH_H

#include "runtime/exec/session.h"

enum { GPU_BENCH_RUNS = 12 };

typedef struct {
    ml_session *session;
    ml_graph *g;
    int states;
    bool hopper; /* the program ran kernels of Hopper's own, and did not fall back from them */
    bool maps;   /* it ran kernels on the copy engine */
} gpu_bench;

/* Open the session, run body(context) under ml_protect and close; the status of what failed. */
ml_status gpu_bench_time(gpu_bench *b, void (*body)(void *), void *context);
/* A state's id; it begins as `initial`, or as normal numbers. */
uint32_t gpu_bench_state(gpu_bench *b, const ml_type *type, ml_ref initial);
/* What a new state holds. */
ml_ref gpu_bench_operand(gpu_bench *b, const ml_type *type, ml_ref initial);
/* Run a program of these updates GPU_BENCH_RUNS times and hand the times to `take`. Raises. */
void gpu_bench_run(gpu_bench *b, ml_update *updates, int count,
                   void (*take)(void *context, const ml_profile *profile), void *context);

/* The test is skipped where fewer GPUs are present, and where they are no emulated ones. */
void gpu_need(int count);
void gpu_need_emulator(void);

#endif
