#include "tests/gpu/bench.h"

#include <math.h>
#include <stdlib.h>

#include "runtime/device/device.h"
#include "tests/test.h"

void gpu_need(int count) {
#ifdef MLUA_CUDA
    if (ml_cuda_count() >= count) return;
#endif
    test_skip("it takes %d GPU%s", count, count == 1 ? "" : "s");
}

void gpu_need_emulator(void) {
    if (!getenv("EMULATOR")) test_skip("it takes emulated GPUs: make test-emulated");
}

static ml_ref uniform(ml_graph *g, int64_t key, const ml_type *type) {
    ml_ref number = ml_const_int(g, ML_I64, key);
    return ml_graph_add(g, ML_OP_RANDOM, &number, 1, NULL, 0, type);
}

/* From the normal distribution, as PyTorch's benchmarks draw: what a GPU spends on a product, and
 * so its clock, depends on the bits. sqrt(-2 log(1 - u)) cos(2 pi v), of u and v in [0, 1). */
static ml_ref draw(ml_graph *g, int key, const ml_type *type) {
    ml_ref u = ml_map2(g, ML_OP_SUB, ml_const(g, ML_F32, 1), uniform(g, 2 * key, type));
    u = ml_map2(g, ML_OP_MUL, ml_map1(g, ML_OP_LOG, u), ml_const(g, ML_F32, -2));
    ml_ref v = uniform(g, 2 * key + 1, type);
    v = ml_map1(g, ML_OP_COS, ml_map2(g, ML_OP_MUL, v, ml_const(g, ML_F32, 2 * acos(-1))));
    return ml_map2(g, ML_OP_MUL, ml_map1(g, ML_OP_SQRT, u), v);
}

uint32_t gpu_bench_state(gpu_bench *b, const ml_type *type, ml_ref initial) {
    char *name = ml_arena_format(ml_graph_arena(b->g), "bench %d", ++b->states);
    ml_type wide = *type;
    wide.dtype = ML_F32;
    if (!initial) initial = draw(b->g, b->states, &wide);
    ml_state state = {.name = name,
                      .kind = ML_STATE_OTHER,
                      .type = *type,
                      .initial = ml_cast(b->g, initial, (ml_dtype)type->dtype)};
    return ml_graph_add_state(b->g, &state);
}

ml_ref gpu_bench_operand(gpu_bench *b, const ml_type *type, ml_ref initial) {
    int64_t id = gpu_bench_state(b, type, initial);
    return ml_graph_add(b->g, ML_OP_STATE, NULL, 0, &id, 1, type);
}

static void see_kernels(gpu_bench *b, const ml_plan *plan) {
    b->hopper = b->maps = false;
    for (uint32_t i = 0; i < plan->schedule->steps.count; i++) {
        const ml_kernel *kernel = plan->schedule->steps.at[i].kernel;
        b->hopper |= kernel != NULL && kernel->fallback != NULL;
        for (; kernel != NULL; kernel = kernel->next) b->maps |= kernel->map_count > 0;
    }
}

void gpu_bench_run(gpu_bench *b, ml_update *updates, int count,
                   void (*take)(void *context, const ml_profile *profile), void *context) {
    ml_roots roots = {.updates = updates, .update_count = count, .name = "bench"};
    ml_program *program = NULL;
    ml_device *device = ml_session_device(b->session);
    ml_status status = ml_program_new(b->session, &roots, &program);
    if (status == ML_OK) see_kernels(b, ml_program_plan(program));
    for (int run = 0; run < GPU_BENCH_RUNS && status == ML_OK; run++)
        status = ml_program_run(program, NULL, NULL);
    if (status == ML_OK) status = device->ops->wait(device);
    if (status == ML_OK) take(context, device->profile);
    ml_program_free(program);
    if (status != ML_OK) ml_raise_last();
}

ml_status gpu_bench_time(gpu_bench *b, void (*body)(void *), void *context) {
    ml_status status = ml_session_new(&b->session);
    if (status == ML_OK) status = ml_session_open(b->session, "cuda", 0);
    ml_device *device = status == ML_OK ? ml_session_device(b->session) : NULL;
    if (status == ML_OK) status = ml_device_profile(device);
    if (status == ML_OK) device->profile->stores = true;
    if (status == ML_OK) status = ml_profile_begin_step(device->profile, 1, ML_RUN_STEPS);
    if (status == ML_OK) {
        b->g = ml_session_graph(b->session);
        status = ml_protect(body, context);
    }
    ml_error first = *ml_error_last(); /* closing must not hide it */
    ml_session_free(b->session);
    *ml_error_last() = first;
    return status;
}
