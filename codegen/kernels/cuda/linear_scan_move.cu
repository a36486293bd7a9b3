/* An operand of a linear scan to a layout that its kernels take, or a result from one: elements i
 * of one as those of another; of several parts, in f32, the sum. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY linear_scan_move
#define POINTERS 2
#define ELEMENTS 1000LL
#define PARTS 2
#define PART 1000LL /* elements from one part to the next */
#define FROM_AT 0
#define FROM_ELEMENT float
#define FROM_LOAD(x) (x)
#define FROM(i) (i)
#define TO_AT 1
#define TO_ELEMENT ml_bf16
#define TO_STORE(x) ml_store_bf16(x)
#define TO(i) (i)
#endif

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    const long long i = blockIdx.x * 256LL + threadIdx.x;
    if (i >= ELEMENTS) return;
    const FROM_ELEMENT *from = (const FROM_ELEMENT *)a.p[FROM_AT] + FROM(i);
    float sum = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) sum += FROM_LOAD(from[part * PART]);
    ((TO_ELEMENT *)a.p[TO_AT])[TO(i)] = TO_STORE(sum);
}
