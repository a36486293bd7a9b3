/* What the tests of ops on a device share: graphs over random inputs whose outputs must equal the
 * reference interpreter's, fused and unfused, with the same bits at each run. OPS_TEST(name) is a
 * test "ops/name" on the CPU and another "gpu_ops/name" on the GPU, where four runs take a program
 * through its eager run and the capture and replays of its CUDA graph. Where there is no GPU, the
 * latter say so and pass; MLUA_TEST_DEVICE names another device for them, to try the tests alone.
 *
 * Inputs are multiples of 1/64 from -2 to 2, which every float dtype holds exactly, so that
 * comparisons, floors and sorts see the same numbers everywhere. Temporary memory is filled with
 * NaN patterns before each run: a kernel that reads what was not written is found. Bits may differ
 * between runs with MLUA_DETERMINISTIC=0. */
#ifndef OPS_SUPPORT_H
#define OPS_SUPPORT_H

#include "runtime/exec/program.h"
#include "runtime/passes/passes.h"
#include "tests/test.h"

enum { OPS_INPUTS = 64, OPS_OUTPUTS = 512 };

typedef struct {
    ml_session *session;
    ml_graph *g;
    ml_arena *arena;
    double *inputs[OPS_INPUTS]; /* by input id */
    int input_count;
    ml_ref outputs[OPS_OUTPUTS];
    const char *labels[OPS_OUTPUTS];
    double tolerances[OPS_OUTPUTS];
    double units[OPS_OUTPUTS]; /* where by_units: of the last place of each element */
    bool by_units[OPS_OUTPUTS];
    unsigned loose[OPS_OUTPUTS];
    int output_count;
    uint64_t random;
} ops_case;

/* The device of the running test; false where this machine has none (which is printed once). */
bool ops_begin(const char *device);
/* Tests for both devices, or for the GPU alone, in the area "gpu_" #area. */
#define OPS_TEST(name)                                                                             \
    static void ops_test_##name(void);                                                             \
    static void ops_start_##name(const void *device) {                                             \
        if (ops_begin(device)) ops_test_##name();                                                  \
    }                                                                                              \
    __attribute__((constructor)) static void ops_register_##name(void) {                           \
        test_register("ops/" #name, ops_start_##name, "cpu");                                      \
        test_register("gpu_ops/" #name, ops_start_##name, "cuda");                                 \
    }                                                                                              \
    static void ops_test_##name(void)
#define GPU_TEST(area, name)                                                                       \
    static void gpu_test_##area##_##name(void);                                                    \
    static void gpu_start_##area##_##name(const void *device) {                                    \
        if (ops_begin(device)) gpu_test_##area##_##name();                                         \
    }                                                                                              \
    __attribute__((constructor)) static void gpu_register_##area##_##name(void) {                  \
        test_register("gpu_" #area "/" #name, gpu_start_##area##_##name, "cuda");                  \
    }                                                                                              \
    static void gpu_test_##area##_##name(void)

typedef void ops_body(ops_case *c);
enum { OPS_UNFUSED = 1 /* run it with one kernel for each op as well */ };
/* Build the outputs with `body` in a new session on the test's device, then run and compare. */
void ops_run(ops_body *body, uint64_t seed, int flags);

/* Axes are written "b3 s4". */
ml_type ops_type(ops_case *c, ml_dtype dtype, const char *axes);
ml_axis ops_axis(ops_case *c, const char *name);
ml_ref ops_input(ops_case *c, ml_dtype dtype, const char *axes, double low, double high);
ml_ref ops_index(ops_case *c, const char *axes, int64_t bound); /* i32, 0 .. bound-1 */
/* A value to be checked; differences are relative to the largest element of the tensor. */
void ops_output(ops_case *c, ml_ref n, double tolerance, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* One whose elements are compared one by one, in units of the last place, zeros with their signs.
 */
enum {
    OPS_ANY_ZERO = 1 /* signs of zeros are free */,
    OPS_FLUSHED = 2 /* 0 for subnormal results */
};
void ops_output_units(ops_case *c, ml_ref n, double units, unsigned loose, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
bool ops_is_gpu(const ops_case *c);
/* What a few roundings to this dtype may make. */
double ops_tolerance(ml_dtype dtype);
/* sum(y * w) with random weights: its gradient sees every element. */
ml_ref ops_loss(ops_case *c, ml_ref y);
/* The gradients of ops_loss(y) with respect to these nodes as outputs. */
void ops_gradients(ops_case *c, ml_ref y, const ml_ref *wrt, int count, double tolerance,
                   const char *label);

double ops_fetch(ml_dtype dtype, const void *from, int64_t i);
void ops_store(ml_dtype dtype, void *to, int64_t i, double value);

#endif
