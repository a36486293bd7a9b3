/* A product of few rows, C[m, n] = A[m, k] B[k, n] (* scale[n]) (+ bias[n]) (+ addend[m, n]), A in
 * bf16, B in bf16, int8 or E4M3, with f32 sums: its time is that of reading B.
 *
 * A block has 64 columns of B and one of SPLIT equal ranges of the depth; the blocks of a cluster
 * have the ranges of one tile, and add up their sums in a fixed order through shared memory. A ring
 * of SLOTS slots of DEEP deep is filled by cp.async. On tensor cores the columns of B are the 16
 * rows of an mma, 8 rows of A its columns. Elements of 8 bits become bf16 in registers.
 *
 * By groups of rows (GROUPS), each of which has a matrix of its own, block row y has the rows of
 * the y-th group that has any, and the last one clears rows of no group.
 *
 * B that no step writes (CONSTANT) is loaded from before the steps ahead have ended: memory is busy
 * while these, which are small, run. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY few_rows
#define POINTERS 3
#define ROWS 1 /* of A, at most ROOM */
#define ROOM 8 /* for rows: as many columns as some mma have */
#define COLUMNS 4096LL
#define DEPTH 4096LL
#define A_ROW 4096LL
#define A_COL 1LL
#define A_PACKS 1 /* rows of A are packs of 8 elements */
#define B_BYTES 2 /* of an element */
#define B_FP8 0   /* of 8 bits: E4M3, not int8 */
#define B_DEEP 0  /* B is contiguous along the depth, not along columns */
#define B_STRIDE 4096LL
#define C_ROW 4096LL
#define C_COL 1LL
#define GROUPS 0 /* pointers 2 and 3: where the rows of each begin and end */
#define START_STRIDE 1LL
#define END_STRIDE 1LL
#define B_GROUP 4096LL
#define SPLIT 4
#define SLOTS 6
#define CONSTANT 1
#define SCALE_AT 0 /* pointers; 0: none */
#define BIAS_AT 0
#define ADDEND_AT 0
#define C_AT 2
#define RESULT float
#define STORE
#define LOAD
#endif
#include "mma_ptx.cuh"

#define TILE 64
#define EIGHTS (ROOM / 8)
#define DEEP (B_BYTES == 1 ? 128 : 64)
/* Bytes of a slot's lines: 16 more than they hold, so that lines lie in different banks. */
#define B_WIDTH ((B_DEEP ? DEEP : TILE) * B_BYTES)
#define B_LINES (B_DEEP ? TILE : DEEP)
#define B_LINE (B_WIDTH + 16)
#define A_LINE (DEEP * 2 + (B_BYTES == 1 && B_DEEP ? 32 : 16))
#define A_BEGIN (B_LINES * B_LINE)
#define SLOT_BYTES (A_BEGIN + ROOM * A_LINE)
#define STEPS ((int)((DEPTH + DEEP - 1) / DEEP))
#define SUM_ROW (TILE + 4)

struct arguments {
    char *p[POINTERS];
};

#if SPLIT > 1 && !defined(MLUA_EMULATED) && !defined(MLUA_NO_CLUSTERS)
static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
/* Of the block `rank` of the cluster, what lies in its shared memory at `at`. */
static __device__ __forceinline__ float load_of_block(unsigned at, int rank) {
    float x;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; "
                 "ld.shared::cluster.f32 %0, [there]; }"
                 : "=f"(x)
                 : "r"(at), "r"(rank)
                 : "memory");
    return x;
}
#define RANKS SPLIT
#else /* the first block of a tile has all of the depth */
#define cluster_sync() __syncthreads()
#define load_of_block(at, rank) sums[((at)-shared_address(sums)) / 4]
#define RANKS 1
#endif

static __device__ __forceinline__ void load_b(char *slot, const char *b, int n0, int k0) {
#pragma unroll
    for (int i = threadIdx.x; i < B_LINES * B_WIDTH / 16; i += 128) {
        const int line = i / (B_WIDTH / 16), byte = i % (B_WIDTH / 16) * 16, part = byte / B_BYTES;
        const long long n = n0 + (B_DEEP ? line : part), k = k0 + (B_DEEP ? part : line);
        const bool valid = n < COLUMNS && k < DEPTH;
        const long long at = valid ? B_DEEP ? n * B_STRIDE + k : k * B_STRIDE + n : 0;
        copy_async(shared_address(slot) + line * B_LINE + byte, b + at * B_BYTES, valid ? 16 : 0);
    }
}
static __device__ __forceinline__ void load_a(char *slot, const ml_bf16 *a, int k0, int rows) {
    char *to = slot + A_BEGIN;
#if A_PACKS
#pragma unroll
    for (int i = threadIdx.x; i < ROOM * DEEP / 8; i += 128) {
        const int row = i / (DEEP / 8);
        const long long k = k0 + i % (DEEP / 8) * 8;
        const bool valid = row < rows && k < DEPTH;
        copy_async(shared_address(to) + row * A_LINE + i % (DEEP / 8) * 16,
                   a + (valid ? row * A_ROW + k : 0), valid ? 16 : 0);
    }
#else
    for (int i = threadIdx.x; i < ROOM * DEEP; i += 128) {
        const int row = i / DEEP, k = k0 + i % DEEP;
        ml_bf16 x = {0};
        if (row < rows && k < DEPTH) x = a[row * A_ROW + k * A_COL];
        ((ml_bf16 *)(to + row * A_LINE))[i % DEEP] = x;
    }
#endif
}
#if B_BYTES == 2
/* Of the warp's 16 columns with all rows. */
static __device__ __forceinline__ void multiply(float (&sum)[EIGHTS][4], const char *slot) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    const unsigned b_at =
        shared_address(slot) +
        (B_DEEP ? (first + lane % 16) * B_LINE + lane / 16 * 16
                : (lane / 16 * 8 + lane % 8) * B_LINE + (first + lane / 8 % 2 * 8) * 2);
    const unsigned a_at = shared_address(slot) + A_BEGIN + lane % 8 * A_LINE + lane / 8 * 16;
    unsigned x[DEEP / 16][4], y[4];
#pragma unroll
    for (int k = 0; k < DEEP; k += 16) {
        if (B_DEEP)
            load_matrices(x[k / 16], b_at + k * 2);
        else
            load_matrices_transposed(x[k / 16], b_at + k * B_LINE);
    }
#pragma unroll
    for (int k = 0; k < DEEP; k += 32) /* four matrices: two steps of 16 deep */
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            load_matrices(y, a_at + i * 8 * A_LINE + k * 2);
            mma(sum[i], x[k / 16], y[0], y[1]);
            mma(sum[i], x[k / 16 + 1], y[2], y[3]);
        }
}
#define COLUMN_OF(lane, i) ((lane) / 4 + (i) / 2 * 8)
#else
/* Two bytes of a word as bf16, which holds their values exactly. An int8 b is (128 + its lower 7
 * bits) - (128 or, where it is negative, 256), and bf16 has the integers from 128 to 256. E4M3's
 * bits are those of a bf16 of the value times 2^-120. */
template <int FIRST, int SECOND>
static __device__ __forceinline__ unsigned pair_of_bytes(unsigned word) {
#if B_FP8
    const unsigned x = permute_bytes(word, 0, 4 | FIRST << 4 | 4 << 8 | SECOND << 12);
    return fma_bf16_pair((x & 0x80008000u) | (x & 0x7f007f00u) >> 4, 0x7b807b80u, 0x80008000u);
#else
    const unsigned order = FIRST | 4 << 4 | SECOND << 8 | 4 << 12;
    return fma_bf16_pair(permute_bytes(word & 0x7f7f7f7fu, 0x43434343u, order), 0x3f803f80u,
                         permute_bytes(word & 0x80808080u, 0xc3c3c3c3u, order));
#endif
}
/* Of the warp's 16 columns with all rows. ldmatrix moves pairs of bytes: along the depth a thread
 * gets 4 neighbouring elements, two steps' worth for which A is read in the same order; along
 * columns, 2 neighbouring columns, which are lines l and l + 8 of the mma. */
static __device__ __forceinline__ void multiply(float (&sum)[EIGHTS][4], const char *slot) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    const char *a = slot + A_BEGIN;
#pragma unroll
    for (int k = 0; k < DEEP; k += 32) {
        unsigned w[4], y[4];
#if B_DEEP
        load_matrices(w, shared_address(slot) + (first + lane % 16) * B_LINE + lane / 16 * 16 + k);
        const unsigned x[2][4] = {{pair_of_bytes<0, 1>(w[0]), pair_of_bytes<0, 1>(w[1]),
                                   pair_of_bytes<2, 3>(w[0]), pair_of_bytes<2, 3>(w[1])},
                                  {pair_of_bytes<0, 1>(w[2]), pair_of_bytes<0, 1>(w[3]),
                                   pair_of_bytes<2, 3>(w[2]), pair_of_bytes<2, 3>(w[3])}};
#else
        load_matrices_transposed(w, shared_address(slot) + (k + lane) * B_LINE + first);
        const unsigned x[2][4] = {{pair_of_bytes<0, 2>(w[0]), pair_of_bytes<1, 3>(w[0]),
                                   pair_of_bytes<0, 2>(w[1]), pair_of_bytes<1, 3>(w[1])},
                                  {pair_of_bytes<0, 2>(w[2]), pair_of_bytes<1, 3>(w[2]),
                                   pair_of_bytes<0, 2>(w[3]), pair_of_bytes<1, 3>(w[3])}};
#endif
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const char *rows = a + i * 8 * A_LINE;
#if B_DEEP
            const char *row = rows + lane / 4 * A_LINE + (k + lane % 4 * 4) * 2;
            const uint2 low = *(const uint2 *)row, high = *(const uint2 *)(row + 32);
            y[0] = low.x, y[1] = low.y, y[2] = high.x, y[3] = high.y;
#else
            load_matrices(y, shared_address(rows) + lane % 8 * A_LINE + lane / 8 * 16 + k * 2);
#endif
            mma(sum[i], x[0], y[0], y[1]);
            mma(sum[i], x[1], y[2], y[3]);
        }
    }
}
#define COLUMN_OF(lane, i) (B_DEEP ? (lane) / 4 + (i) / 2 * 8 : (lane) / 4 * 2 + (i) / 2)
#endif
#if GROUPS
struct group_rows {
    int group, first, count;
};
/* Rows first to last - 1 of a group. */
static __device__ __forceinline__ void bounds_of(const arguments &a, int group, int &first,
                                                 int &last) {
    first = group < GROUPS ? ((const int *)a.p[2])[group * START_STRIDE] : 0;
    last = group < GROUPS ? ((const int *)a.p[3])[group * END_STRIDE] : 0;
    first = first < 0 ? 0 : first, last = last > ROWS ? (int)ROWS : last;
}
/* The `which`-th group that has rows; where there is none, it has no rows. */
static __device__ __forceinline__ group_rows find_group(const arguments &a, int which) {
    group_rows found = {0, 0, 0};
    for (int base = 0; base < GROUPS; base += 32) {
        int first, last;
        bounds_of(a, base + threadIdx.x % 32, first, last);
        for (int lane = 0; lane < 32 && base + lane < GROUPS; lane++) {
            const int begin = __shfl_sync(~0u, first, lane), end = __shfl_sync(~0u, last, lane);
            if (end > begin && which-- == 0) found = {base + lane, begin, end - begin};
        }
    }
    return found;
}
static __device__ __forceinline__ void clear_rows(const arguments &a, int n0) {
    for (int row = 0; row < ROWS; row++) {
        bool taken = false;
        for (int group = 0; group < GROUPS; group++) {
            int first, last;
            bounds_of(a, group, first, last);
            taken = taken || (row >= first && row < last);
        }
        const int n = n0 + threadIdx.x;
        if (!taken && threadIdx.x < TILE && n < COLUMNS)
            ((RESULT *)a.p[C_AT])[row * C_ROW + n * C_COL] = STORE(0.0f);
    }
}
#endif
static __device__ __forceinline__ void write(const arguments &a, int n0, int rank, int first,
                                             int rows, const float *sums) {
    for (int i = rank * 128 + threadIdx.x; i < rows * TILE; i += RANKS * 128) {
        const int row = i / TILE, column = i % TILE, n = n0 + column;
        const unsigned at = shared_address(sums) + (row * SUM_ROW + column) * 4;
        if (n >= COLUMNS) continue;
        float x = 0;
#pragma unroll
        for (int r = 0; r < RANKS; r++) x += load_of_block(at, r);
        const long long to = (first + row) * C_ROW + n * C_COL;
#if SCALE_AT
        x *= ((const float *)a.p[SCALE_AT])[n];
#endif
#if BIAS_AT
        x += LOAD(((const RESULT *)a.p[BIAS_AT])[n]);
#endif
#if ADDEND_AT
        x += LOAD(((const RESULT *)a.p[ADDEND_AT])[to]);
#endif
        ((RESULT *)a.p[C_AT])[to] = STORE(x);
    }
}
#if SPLIT > 1 && !defined(MLUA_EMULATED) && !defined(MLUA_NO_CLUSTERS)
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif
extern "C" CLUSTER __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    float *sums = (float *)shared; /* once the ring is done */
    char *ring = (char *)shared;
    const ml_bf16 *left = (const ml_bf16 *)a.p[0];
    const char *right = a.p[1];
    int first = 0, rows = ROWS;
    const int n0 = blockIdx.x / SPLIT * TILE, rank = blockIdx.x % SPLIT;
    if (rank >= RANKS) return;
    const int begin = STEPS * rank / RANKS, end = STEPS * (rank + 1) / RANKS;
    if (!CONSTANT) kernel_begins();
#if GROUPS
    if (blockIdx.y == gridDim.y - 1) {
        if (rank == 0) clear_rows(a, n0);
        return;
    }
    const group_rows own = find_group(a, blockIdx.y);
    if (own.count == 0) return;
    first = own.first, rows = own.count;
    left += first * A_ROW, right += own.group * B_GROUP * B_BYTES;
#endif
    for (int s = 0; s < SLOTS - 1 && begin + s < end; s++)
        load_b(ring + s * SLOT_BYTES, right, n0, (begin + s) * DEEP);
    if (CONSTANT) kernel_begins();
    for (int s = 0; s < SLOTS - 1 && begin + s < end; s++)
        load_a(ring + s * SLOT_BYTES, left, (begin + s) * DEEP, rows);
    copies_commit();
    copies_wait();
    float sum[EIGHTS][4] = {};
    int slot = 0, next = SLOTS - 1;
    for (int step = begin; step < end; step++) {
        if (step > begin + SLOTS - 2) copies_but<SLOTS - 2>();
        __syncthreads();
        if (step + SLOTS - 1 < end) {
            load_b(ring + next * SLOT_BYTES, right, n0, (step + SLOTS - 1) * DEEP);
            load_a(ring + next * SLOT_BYTES, left, (step + SLOTS - 1) * DEEP, rows);
        }
        copies_commit();
        multiply(sum, ring + slot * SLOT_BYTES);
        slot = slot + 1 < SLOTS ? slot + 1 : 0, next = next + 1 < SLOTS ? next + 1 : 0;
    }
    copies_wait();
    __syncthreads();
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * 16;
#pragma unroll
    for (int i = 0; i < 4 * EIGHTS; i++)
        sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * SUM_ROW + column + COLUMN_OF(lane, i % 4)] =
            sum[i / 4][i % 4];
    cluster_sync();
    write(a, n0, rank, first, rows, sums);
    cluster_sync(); /* blocks stay until theirs is read */
}
