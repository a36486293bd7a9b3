/* The CUDA driver, opened with dlopen on first use.
 *
 * `cuda.cuName(...)` calls the driver; every name in CUDA_CALLS is resolved by cuda_driver_open or
 * the open fails; those in CUDA_OPTIONAL_CALLS may be missing. CUDA_TRY turns a failed call into a
 * stored ml_error that names the call, the driver's error and what the device was doing
 * (cuda_doing). */
#ifndef ML_CUDA_DRIVER_H
#define ML_CUDA_DRIVER_H
#ifdef MLUA_CUDA

#include <cuda.h>

#include "runtime/base/status.h"

/* clang-format off */
#define CUDA_CALLS(X)                                                                              \
    X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString)                          \
    X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetAttribute)                  \
    X(cuDeviceTotalMem) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease)                   \
    X(cuCtxSetCurrent) X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree) X(cuMemAllocHost)                \
    X(cuMemFreeHost) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync)                \
    X(cuMemcpy2DAsync)                                                                             \
    X(cuMemsetD8Async) X(cuMemsetD2D8Async) X(cuStreamCreate) X(cuStreamCreateWithPriority)        \
    X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamQuery) X(cuStreamWaitEvent)                \
    X(cuStreamBeginCapture) X(cuStreamEndCapture) X(cuEventCreate) X(cuEventDestroy)               \
    X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize) X(cuEventElapsedTime)                   \
    X(cuModuleLoadData) X(cuModuleUnload) X(cuModuleGetFunction) X(cuFuncSetAttribute)             \
    X(cuLaunchKernel) X(cuLaunchCooperativeKernel) X(cuGraphInstantiate) X(cuGraphUpload)          \
    X(cuGraphLaunch) X(cuGraphDestroy) X(cuGraphExecDestroy)
/* clang-format on */

/* NULL in drivers that lack them. */
/* clang-format off */
#define CUDA_OPTIONAL_CALLS(X)                                                                     \
    X(cuTensorMapEncodeTiled) X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle)    \
    X(cuMemGetAddressRange) X(cuStreamWriteValue32) X(cuStreamWaitValue32) X(cuStreamBatchMemOp)   \
    X(cuDeviceGetP2PAttribute) X(cuLaunchKernelEx) X(cuEventRecordWithFlags)
/* clang-format on */

typedef struct {
#define CUDA_DECLARE(name) __typeof__(name) *name;
    CUDA_CALLS(CUDA_DECLARE) CUDA_OPTIONAL_CALLS(CUDA_DECLARE)
#undef CUDA_DECLARE
} cuda_driver;
extern cuda_driver cuda;

/* Open libcuda and start it; later calls return the first call's outcome. Fails with ML_DEVICE and
 * says whether the driver, its version or the GPU is what is missing. */
ml_status cuda_driver_open(int *device_count);
/* Whether the driver has the calls by which processes open one another's memory. */
bool cuda_driver_shares(void);

/* What this thread is about to do, for messages: "step 12 (sum+mul), gpt.lua:41"; not copied. */
void cuda_doing(const char *what);
const char *cuda_doing_now(void);

/* Store the error of a failed driver call: its status is ML_DEVICE. */
ml_status cuda_fail(CUresult result, const char *call);
#define CUDA_OK(call) cuda_check(cuda.call, #call)
#define CUDA_TRY(call)                                                                             \
    do {                                                                                           \
        if (CUDA_OK(call) != ML_OK) return ml_error_last()->status;                                \
    } while (0)
static inline ml_status cuda_check(CUresult result, const char *call) {
    return result == CUDA_SUCCESS ? ML_OK : cuda_fail(result, call);
}

#endif
#endif
