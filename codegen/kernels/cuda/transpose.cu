/* A matrix of bytes, transposed by tiles of 128 x 128 through shared memory. A thread reads 16
 * columns of 4 rows, and turns them in registers into words of 4 rows, which lie in shared memory
 * as rows of the result. Each is rotated by its number of 16 columns, so that neither side meets
 * bank conflicts. ROWS and COLUMNS are of what is read, multiples of 16. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY transpose
#define ROWS 4096LL
#define COLUMNS 2048LL
#define ROW 2048LL
#endif

struct arguments {
    char *p[2];
};

/* Words of 4 columns of rows 0 to 3, into words of 4 rows of columns 0 to 3. */
ML_INLINE void NAME(turn)(unsigned a, unsigned b, unsigned c, unsigned d, unsigned *out) {
    const unsigned low = __byte_perm(a, b, 0x5140), high = __byte_perm(c, d, 0x5140);
    const unsigned low2 = __byte_perm(a, b, 0x7362), high2 = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(low, high, 0x5410);
    out[1] = __byte_perm(low, high, 0x7632);
    out[2] = __byte_perm(low2, high2, 0x5410);
    out[3] = __byte_perm(low2, high2, 0x7632);
}

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    __shared__ __align__(16) unsigned tile[128 * 32];
    const int chunk = threadIdx.x % 8, four = threadIdx.x / 8; /* 16 columns; 4 rows */
    const long long column = blockIdx.x * 128LL + chunk * 16;
    const long long row = blockIdx.y * 128LL + four * 4;
    if (column < COLUMNS && row < ROWS) {
        const char *from = a.p[0] + row * ROW + column;
        const uint4 r0 = *(const uint4 *)from, r1 = *(const uint4 *)(from + ROW);
        const uint4 r2 = *(const uint4 *)(from + 2 * ROW), r3 = *(const uint4 *)(from + 3 * ROW);
        unsigned out[16];
        NAME(turn)(r0.x, r1.x, r2.x, r3.x, out);
        NAME(turn)(r0.y, r1.y, r2.y, r3.y, out + 4);
        NAME(turn)(r0.z, r1.z, r2.z, r3.z, out + 8);
        NAME(turn)(r0.w, r1.w, r2.w, r3.w, out + 12);
#pragma unroll
        for (int k = 0; k < 16; k++)
            tile[(chunk * 16 + k) * 32 + ((four + 4 * chunk) & 31)] = out[k];
    }
    __syncthreads();
    const long long at = blockIdx.y * 128LL + chunk * 16; /* of the result's columns */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int line = four + 32 * i;
        const long long to = blockIdx.x * 128LL + line;
        if (to < COLUMNS && at < ROWS)
            *(uint4 *)(a.p[1] + to * ROWS + at) =
                *(const uint4 *)&tile[line * 32 + ((4 * chunk + 4 * (line / 16)) & 31)];
    }
}
