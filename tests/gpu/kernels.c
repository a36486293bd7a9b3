/* Generated kernels on the GPU against the interpreter of tests/emit/ir.c, straight through the
 * driver. */
#include <stdio.h>

#include "runtime/device/cuda/cuda_driver.h"
#include "tests/emit/cases.h"
#include "tests/gpu/bench.h"
#include "tests/test.h"

#ifdef MLUA_CUDA

enum { MAX_CASES = 96 };

typedef struct {
    ir_kernel *k;
    CUfunction function;
} gpu_run;

static int64_t operand_bytes(const ir_kernel *k, int operand) {
    return k->elements[operand] * ml_dtypes[k->ir.operand[operand].dtype].bytes;
}

/* Upload every operand, launch, download what was written. */
static void run_gpu(void *context, const ml_kernel *kernel, char **pointers,
                    const long long *scalars) {
    const gpu_run *run = context;
    const ir_kernel *k = run->k;
    CUdeviceptr memory[ML_MAX_OPERANDS] = {0};
    uint64_t arguments[ML_MAX_OPERANDS + ML_MAX_SCALARS];
    int count = 0;
    for (int i = 0; i < kernel->pointer_count; i++) {
        REQUIRE(CUDA_OK(cuMemAlloc(&memory[i], (size_t)operand_bytes(k, i) + 64)) == ML_OK);
        CUDA_OK(cuMemcpyHtoDAsync(memory[i], k->memory[i], (size_t)operand_bytes(k, i), NULL));
        arguments[count++] = memory[i] + (uint64_t)(pointers[i] - (char *)k->memory[i]);
    }
    for (int i = 0; i < kernel->scalar_count; i++) arguments[count++] = (uint64_t)scalars[i];
    size_t size = sizeof *arguments * (size_t)count;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, arguments, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                     CU_LAUNCH_PARAM_END};
    if (kernel->shared_bytes > 0)
        CHECK(CUDA_OK(cuFuncSetAttribute(run->function,
                                         CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                         (int)kernel->shared_bytes)) == ML_OK);
    CHECK(CUDA_OK(cuLaunchKernel(run->function, kernel->grid[0], kernel->grid[1], kernel->grid[2],
                                 kernel->block, 1, 1, kernel->shared_bytes, NULL, NULL, extra)) ==
          ML_OK);
    for (int i = 0; i < kernel->pointer_count; i++)
        if (k->ir.operand[i].written)
            CUDA_OK(cuMemcpyDtoHAsync(k->memory[i], memory[i], (size_t)operand_bytes(k, i), NULL));
    CHECK(CUDA_OK(cuStreamSynchronize(NULL)) == ML_OK);
    for (int i = 0; i < kernel->pointer_count; i++) CUDA_OK(cuMemFree(memory[i]));
}

static int emit_all(ml_arena *arena, int arch, ml_kernel **kernels) {
    ml_target target = {.kind = ML_TARGET_CUDA, .arch = arch, .multiprocessors = 132};
    double tolerance;
    ir_kernel k;
    int count = 0;
    for (; count < MAX_CASES && emit_case(&k, count, &tolerance) != NULL; count++) {
        kernels[count] = ML_NEW(arena, ml_kernel);
        ml_emit(&k.ir, &target, arena, kernels[count]);
        ir_free(&k);
    }
    CHECK(count < MAX_CASES); /* else cases may be left out */
    return count;
}

static void check_case(int i, const ml_kernel *kernel, const void *image) {
    ir_kernel k;
    double tolerance;
    const char *name = emit_case(&k, i, &tolerance);
    CUmodule module;
    gpu_run run = {.k = &k};
    REQUIRE(CUDA_OK(cuModuleLoadData(&module, image)) == ML_OK);
    REQUIRE(CUDA_OK(cuModuleGetFunction(&run.function, module, kernel->entry)) == ML_OK);
    double worst = ir_compare(&k, kernel, run_gpu, &run);
    if (!(worst <= tolerance)) fprintf(stderr, "%s: off by %g\n", name, worst);
    CHECK(worst <= tolerance);
    CUDA_OK(cuModuleUnload(module));
    ir_free(&k);
}

TEST(gpu, generated_kernels) {
    int devices = 0, major, minor;
    CUcontext context;
    CUdevice device;
    if (cuda_driver_open(&devices) != ML_OK) test_skip("%s", ml_error_last()->text);
    gpu_need(1);
    REQUIRE(CUDA_OK(cuDeviceGet(&device, 0)) == ML_OK);
    REQUIRE(CUDA_OK(cuDevicePrimaryCtxRetain(&context, device)) == ML_OK);
    REQUIRE(CUDA_OK(cuCtxSetCurrent(context)) == ML_OK);
    CUDA_OK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    CUDA_OK(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    ml_arena *arena = ml_arena_new();
    ml_kernel *kernels[MAX_CASES];
    const void *images[MAX_CASES];
    int64_t sizes[MAX_CASES];
    int arch = major * 10 + minor, count = emit_all(arena, arch, kernels);
    ml_pool *pool = ml_pool_new(4);
    ml_jit_cuda *jit;
    ml_status status = ml_jit_cuda_compile(kernels, count, arch, pool, &jit, images, sizes);
    CHECK_TEXT(status == ML_OK ? "" : ml_error_last()->text, "");
    for (int i = 0; i < count && status == ML_OK; i++) check_case(i, kernels[i], images[i]);
    ml_jit_cuda_free(jit);
    ml_pool_free(pool);
    ml_arena_free(arena);
    CUDA_OK(cuDevicePrimaryCtxRelease(device));
}

#else
TEST(gpu, generated_kernels) {
    test_skip("built without the CUDA toolkit's headers");
}
#endif
