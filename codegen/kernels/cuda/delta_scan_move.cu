/* An operand of delta_scan.cuh as its kernels take it, or a result as it is wanted: elements i. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY delta_scan_move
#define POINTERS 2
#define ELEMENTS 1000LL
#define FROM_AT 0
#define FROM_TYPE float
#define FROM_LOAD
#define FROM_OFFSET(i) (i)
#define TO_AT 1
#define TO_TYPE ml_bf16
#define TO_STORE ml_store_bf16
#define TO_OFFSET(i) (i)
#endif

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    const long long i = blockIdx.x * 256LL + threadIdx.x;
    if (i < ELEMENTS)
        ((TO_TYPE *)a.p[TO_AT])[TO_OFFSET(i)] =
            TO_STORE(FROM_LOAD(((const FROM_TYPE *)a.p[FROM_AT])[FROM_OFFSET(i)]));
}
