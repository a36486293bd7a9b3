/* The CPU device's parts: GEMM over a BLAS found at run time (cpu_blas.c) or the blocked kernel of
 * cpu_gemm.c, and the comparison of steps with the reference interpreter (check.c). */
#ifndef ML_CPU_INTERNAL_H
#define ML_CPU_INTERNAL_H

#include "runtime/base/pool.h"
#include "runtime/device/device.h"

/* Fortran's GEMM: column-major, C = alpha op(A) op(B) + beta C; the last two are the lengths of
 * the two texts. Both types come from one library. */
typedef void cpu_sgemm(const char *trans_a, const char *trans_b, const int *m, const int *n,
                       const int *k, const float *alpha, const float *a, const int *lda,
                       const float *b, const int *ldb, const float *beta, float *c, const int *ldc,
                       size_t length_a, size_t length_b);
typedef void cpu_dgemm(const char *trans_a, const char *trans_b, const int *m, const int *n,
                       const int *k, const double *alpha, const double *a, const int *lda,
                       const double *b, const int *ldb, const double *beta, double *c,
                       const int *ldc, size_t length_a, size_t length_b);
typedef struct {
    cpu_sgemm *sgemm;
    cpu_dgemm *dgemm;
    char description[256]; /* "OpenBLAS 0.3.21 SkylakeX (libopenblas.so.0)" */
} cpu_blas;

/* The process's BLAS, opened on first use with one thread of its own; NULL where none is found or
 * the built-in kernels are faster (cpu_blas_choose decides otherwise). */
const cpu_blas *cpu_blas_find(void);
/* `blas` of ml_device_options; before the first use. */
void cpu_blas_choose(int choice);
void cpu_blas_describe(char *out, int size); /* what serves, for `mlua doctor` */

/* To whole cache lines. */
static inline int64_t cpu_aligned(int64_t bytes) {
    return (bytes + 63) & ~(int64_t)63;
}

/* One gemm over the pool. `scratch` is cpu_gemm_scratch(...) bytes, 64-byte aligned. Operands are
 * as lower.h says; `bias` is NULL without that epilogue. */
int64_t cpu_gemm_scratch(const ml_gemm *gemm, int threads);
ml_status cpu_gemm_run(const ml_gemm *gemm, const void *a, const void *b, void *c, const void *bias,
                       void *scratch, ml_pool *pool);

/* Many products as one job of the pool: its units are blocks of their results, which depend on
 * shapes alone. Of one item and without epilogue; cpu_gemm_direct says whether the operands are
 * read where they are, as all that follows asks. `products` is by how many times the job is larger
 * than this product. */
typedef struct {
    int64_t row, rows, col, cols;
} cpu_gemm_block;
bool cpu_gemm_direct(const ml_gemm *gemm);
int64_t cpu_gemm_blocks(const ml_gemm *gemm, int64_t products);
cpu_gemm_block cpu_gemm_block_at(const ml_gemm *gemm, int64_t products, int64_t i);
/* A whole product by the calling thread; `packing` is cpu_gemm_packing(...) bytes, 64-byte aligned,
 * of this product or of one that is as large in each dimension. */
int64_t cpu_gemm_packing(const ml_gemm *gemm);
void cpu_gemm_compute(const ml_gemm *gemm, const void *a, const void *b, void *c, void *packing);

/* A step of kind ML_STEP_RAGGED; operands: a, b, starts, ends, c. */
int64_t cpu_ragged_scratch(const ml_ragged *ragged, int threads);
ml_status cpu_ragged_run(const ml_ragged *ragged, char *const *operands, void *scratch,
                         ml_pool *pool);

/* time_products of ml_device_ops (cpu_time.c). */
ml_status cpu_time_products(ml_device *device, const ml_product *products, int count, int ranks,
                            int threads, double *seconds);

#endif
