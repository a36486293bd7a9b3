/* What the GPU's tests share: a small graph over random inputs, run on the device and compared with
 * the reference interpreter.
 *
 * gpu_check runs the program four times, which takes it through its eager run, the capture and the
 * replay of its CUDA graph, with all temporary memory filled with NaN patterns before each run: a
 * kernel that reads what nobody wrote is found. All runs must give the same bits.
 * MLUA_TEST_DEVICE names another device than cuda, to try the tests themselves. Where there is no
 * GPU a test says so and passes. */
#ifndef GPU_SUPPORT_H
#define GPU_SUPPORT_H

#include "runtime/exec/program.h"
#include "runtime/graph/passes.h"
#include "tests/test.h"

enum { GPU_INPUTS = 32, GPU_OUTPUTS = 16 };

typedef struct {
    ml_session *session;
    ml_graph *g;
    ml_arena *arena;
    double *inputs[GPU_INPUTS]; /* by input id; rounded to the input's dtype */
    ml_ref nodes[GPU_INPUTS];
    int input_count;
    uint64_t random;
    char label[160]; /* what is being checked, for messages */
} gpu_case;

typedef void gpu_body(gpu_case *c);
/* Run a body on a new session of the device; skips where there is none. */
void gpu_run(gpu_body *body, uint64_t seed);
void gpu_label(gpu_case *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Axes are written "b3 s4". Uniform numbers, or integers from low to high - 1. */
ml_type gpu_type(gpu_case *c, ml_dtype dtype, const char *axes);
ml_axis gpu_axis(gpu_case *c, const char *name);
ml_ref gpu_input(gpu_case *c, ml_dtype dtype, const char *axes, double low, double high);
ml_ref gpu_integers(gpu_case *c, ml_dtype dtype, const char *axes, int64_t low, int64_t high);

/* Run the program with these outputs and compare them: per output, the root mean square of the
 * differences relative to that of the values must be at most `tolerance` (integers and truths:
 * equal), and no element may be off by more than 8 times the tolerance of the largest value. */
void gpu_check(gpu_case *c, const ml_ref *outputs, int count, double tolerance);
/* sum(y * w) with random weights, in f32: its gradient sees every element. */
ml_ref gpu_loss(gpu_case *c, ml_ref y);
/* The relative error that a chain of a few roundings to this dtype may make. */
double gpu_tolerance(ml_dtype dtype);

#endif
