/* What cuda_gemm.c and cuda_gemm_autotune.c share: cuBLASLt, opened, and a shape's descriptors.
 *
 * cuBLASLt is column-major: D[rows, columns] = op(X) op(Y). A row-major C is the column-major
 * matrix C^T = B^T A^T, so X is B and Y is A there, and the bias, one for each column of C, is one
 * for each row of D as cuBLASLt wants it. A C whose columns are contiguous is D itself. */
#ifndef ML_CUDA_GEMM_H
#define ML_CUDA_GEMM_H
#ifdef MLUA_CUDA

#include <cublasLt.h>

#include "runtime/device/cuda/cuda_internal.h"

#define CUBLASLT_CALLS(X)                                                                          \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtGetVersion) X(cublasLtGetStatusName) X(cublasLtMatmul)                               \
        X(cublasLtMatmulAlgoGetHeuristic) X(cublasLtMatmulAlgoCheck) X(cublasLtMatmulDescCreate)   \
            X(cublasLtMatmulDescDestroy) X(cublasLtMatmulDescSetAttribute)                         \
                X(cublasLtMatrixLayoutCreate) X(cublasLtMatrixLayoutDestroy)                       \
                    X(cublasLtMatrixLayoutSetAttribute) X(cublasLtMatmulPreferenceCreate)          \
                        X(cublasLtMatmulPreferenceDestroy) X(cublasLtMatmulPreferenceSetAttribute)

struct cuda_gemm_library {
#define CUBLASLT_DECLARE(name) __typeof__(name) *name;
    CUBLASLT_CALLS(CUBLASLT_DECLARE)
#undef CUBLASLT_DECLARE
    cublasLtHandle_t handle;
    size_t version;
    ml_arena *arena;
    ml_index index; /* of gemms, by hash of the shape */
    ML_VEC(cuda_gemm *) gemms;
};

typedef struct {
    int64_t size, a, b, c;
} gemm_loop; /* strides in elements */

struct cuda_gemm {
    cuda_gemm_shape shape;
    bool swapped;                     /* X is B and Y is A: C is row-major */
    bool empty;                       /* no elements, or nothing to sum up: see cuda_gemm_run */
    gemm_loop strided;                /* done by one call; size 1 where there is no batch */
    gemm_loop outer[ML_GEMM_BATCHES]; /* repeated calls */
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t x, y, d;
    cublasLtMatmulAlgo_t algorithm;
    bool chosen;
};

ml_status gemm_fail(const cuda_gemm_library *library, cublasStatus_t status, const char *call);
#define LT_TRY(library, name, ...)                                                                 \
    do {                                                                                           \
        cublasStatus_t lt_status_ = (library)->name(__VA_ARGS__);                                  \
        if (lt_status_ != CUBLAS_STATUS_SUCCESS) return gemm_fail(library, lt_status_, #name);     \
    } while (0)

/* One cuBLASLt call: the strided batch at these addresses, with `algorithm`. */
cublasStatus_t gemm_call(cuda_device *device, const cuda_gemm *gemm, void *a, void *b, void *c,
                         const cublasLtMatmulAlgo_t *algorithm);
/* The descriptor's pointers to bias and scale. */
ml_status gemm_point(const cuda_gemm_library *library, const cuda_gemm *gemm,
                     void *const *operands);
int64_t gemm_extent(const cuda_gemm *gemm, int operand); /* bytes from its first to past its last */
/* "768x50304x65536 bf16 -> f32" for messages. */
const char *gemm_describe(const cuda_gemm *gemm, char *out, int size);

#endif
#endif
