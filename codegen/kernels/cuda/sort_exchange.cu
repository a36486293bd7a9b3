/* SORT of long rows: exchanges of width s[0] between tiles: of s[2] keys that are s[1] apart, all
 * that this width has. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY sort
#define POINTERS 4
#define ROWS 100LL
#define PADDED 8192 /* elements of a row, up to a power of two */
#define KEYS_AT 3   /* pointer of the keys */
#endif
#include "../c/sort_keys.h"

struct arguments {
    char *p[POINTERS];
    long long s[3];
};

template <int N> ML_INLINE void exchange(const arguments &a) {
    long long i = blockIdx.x * 256LL + threadIdx.x, apart = a.s[1];
    if (i >= ROWS * (PADDED / N)) return;
    long long first = (i - (i & (apart - 1))) * N + (i & (apart - 1));
    bool up = (first & a.s[0] & ((long long)PADDED - 1)) == 0;
    sort_key *keys = (sort_key *)a.p[KEYS_AT] + first, held[N];
#pragma unroll
    for (int j = 0; j < N; j++) held[j] = keys[j * apart];
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2)
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (j & half) continue;
            sort_key left = held[j], right = held[j + half];
            if (is_before(right, left) == up) held[j] = right, held[j + half] = left;
        }
#pragma unroll
    for (int j = 0; j < N; j++) keys[j * apart] = held[j];
}

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    if (a.s[2] == 2)
        exchange<2>(a);
    else if (a.s[2] == 4)
        exchange<4>(a);
    else
        exchange<8>(a);
}
