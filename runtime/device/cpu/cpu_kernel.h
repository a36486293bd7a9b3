/* Matrix products by blocked kernels of our own, for machines on which no BLAS, or only one that
 * does not know the processor, is found. Vectors are chosen by the processor at run time. */
#ifndef ML_CPU_KERNEL_H
#define ML_CPU_KERNEL_H

#include "runtime/graph/graph.h"

/* C = A B, or C += A B: f32 or f64, element (i, j) of a matrix at [i * row + j * col]; C has
 * c_col == 1. `packing` is cpu_kernel_packing(...) bytes, 64-byte aligned, of this thread alone. */
typedef struct {
    ml_dtype dtype;
    int64_t m, n, k;
    const void *a, *b;
    void *c;
    int64_t a_row, a_col, b_row, b_col, c_row;
    bool accumulate;
    void *packing;
} cpu_kernel_call;
void cpu_kernel_product(const cpu_kernel_call *call);
int64_t cpu_kernel_packing(ml_dtype dtype, int64_t n, int64_t k);
/* Sums over k are made of parts of so many terms, each summed from 0 on, which are added in order.
 */
enum { CPU_KERNEL_DEPTH = 384 }; /* the most */
int64_t cpu_kernel_depth(int64_t k);

#endif
