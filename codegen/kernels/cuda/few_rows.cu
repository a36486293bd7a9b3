/* Products of few rows, C[m, n] = A[m, k] B[k, n] (* scale[n]) (+ bias[n]) (+ addend[m, n]), A in
 * bf16, B in bf16, int8 or E4M3, with f32 sums: its time is that of reading B.
 *
 * A block has TILE columns of B and one of SPLIT equal ranges of the depth; the blocks of a cluster
 * have the ranges of one tile, and add up their sums in a fixed order through shared memory. Each
 * warp has a quarter of a step of DEEP deep, or of the columns where B is contiguous along the
 * depth, and a ring of its own of SLOTS slots, filled by cp.async: warps wait for no other, so that
 * some always load. On tensor cores the columns of B are the 16 rows of an mma, the rows of A its 8
 * columns. Elements of 8 bits become bf16 in registers.
 *
 * Several products of one A (queries, keys and values) are one kernel. A lies in shared memory, of
 * the whole range. Where it is computed of other tensors, row by row
 * (COMPUTE_ROW: a norm, a gate), each block does so: a kernel of its own would take longer.
 *
 * By groups of rows (GROUPS), each of which has a matrix of its own, block row y has the rows of
 * the y-th group that has any, and the last one clears rows of no group.
 *
 * B that no step writes (CONSTANT) is loaded from before the steps ahead have ended, and the next
 * kernel begins when the last of it is asked for (with weights of 8 bits at once): so memory is
 * busy between kernels. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY few_rows
#define POINTERS 3
#define ROWS 1 /* of A, at most ROOM */
#define DEPTH 4096LL
#define A_ROW 4096LL
#define A_COL 1LL
#define A_PACKS 1  /* rows of A are packs of 8 elements */
#define COMPUTED 0 /* A is computed: statements for row `row` by a team of threads (emit_rows) */
#define COMPUTE_ROW
#define ASK_ROW   /* statements: what of column k all rows read alike will be read */
#define B_BYTES 2 /* of an element */
#define B_FP8 0   /* of 8 bits: E4M3, not int8 */
#define B_DEEP 0  /* B is contiguous along the depth, not along columns */
#define GROUPS 0  /* pointers 2 and 3: where the rows of each begin and end */
#define START_STRIDE 1LL
#define END_STRIDE 1LL
#define B_GROUP 4096LL
#define SPLIT 4
#define SLOTS 6
#define CONSTANT 1
#define BLOCKS 4 /* of a multiprocessor */
#define SCALED 0
#define BIAS 0
#define ADDENDS 0
/* Statements: return the product of a tile (see `product`), tiles of the first product first. */
#define PICK return {a.p[1], 0, 0, 0, a.p[2], 4096LL, 4096LL, 4096LL, 1LL, tile * TILE};
#define RESULT float
#define STORE
#define LOAD
#endif
#define CLUSTER SPLIT
#include "cluster.cuh"

#define TILE (B_BYTES == 1 && !B_DEEP ? 128 : 64)
#define ROOM 8 /* for rows of A: the columns of an mma */
#define DEEP (B_BYTES == 1 && B_DEEP ? 128 : 64)
/* Lines of 128 bytes in shared memory, of which pieces of 16 bytes are exchanged by the number of
 * the line, so that pieces of one place in eight lines lie in different banks. */
#define LINE 128
#define B_LINES ((B_DEEP ? TILE : DEEP) / 4) /* of a warp, in a slot */
#define PIECE(line, piece) ((line)*LINE + (((piece) ^ (line)) & 7) * 16)
#define SLOT_BYTES (B_LINES * LINE)
#define STEPS ((int)((DEPTH + DEEP - 1) / DEEP))
#define A_LINE ((STEPS + SPLIT - 1) / SPLIT * DEEP * 2 + (B_BYTES == 1 && B_DEEP ? 32 : 16))
#define A_BEGIN (4 * SLOTS * SLOT_BYTES)
#define A_ROW_OF(row) ((row) < ROWS ? (row) : (int)ROWS - 1) /* of an mma: what is there */
#define TILES (TILE / 16)
#define SUM_ROW (TILE + 4)
#define SUMS (ROOM * SUM_ROW) /* of a warp */
/* Elements that a block of a cluster adds up and writes, at least a warp's; a thread's. */
#define OWN ((int)(ROWS * TILE / RANKS < 32 ? 32 : ROWS * TILE / RANKS + (ROWS * TILE % RANKS > 0)))
#define EACH ((OWN + 127) / 128)
#define RECEIVED_AT (A_BEGIN + (int)ROWS * A_LINE)

struct arguments {
    char *p[POINTERS];
};
/* One of the products of A: B, what there is of scales of columns, a bias and an addend, C, the
 * columns, strides of B and C, and the first column of this block's tile. */
struct product {
    const char *b, *scale, *bias, *addend;
    char *c;
    long long columns, stride, c_row, c_col;
    int n0;
};
static __device__ __forceinline__ product pick_product(const arguments &a, int tile) { PICK }

/* This warp's part of the step from k0 on. */
static __device__ __forceinline__ void load_b(char *slot, const product &p, int k0) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = threadIdx.x % 32; i < B_LINES * 8; i += 32) {
        const int line = warp * B_LINES + i / 8, part = i % 8 * 16 / B_BYTES;
        const long long n = p.n0 + (B_DEEP ? line : part), k = k0 + (B_DEEP ? part : line);
        const bool valid = n < p.columns && k < DEPTH;
        const long long at = valid ? B_DEEP ? n * p.stride + k : k * p.stride + n : 0;
        copy_async(shared_address(slot) + PIECE(i / 8, i % 8), p.b + at * B_BYTES, valid ? 16 : 0);
    }
}
/* What is read behind a product's weights and is not in the cache, as no step writes it. */
static __device__ __forceinline__ void ask_rest(const arguments &a, const product &p, int begin,
                                                int end) {
    const int n = p.n0 + threadIdx.x * 32;
    if (SCALED && threadIdx.x < TILE / 32 && n < p.columns) kernel_asks(p.scale + n * 4LL);
    for (int k = begin + threadIdx.x * 16; k < end && k < DEPTH; k += 128 * 16) {
        ASK_ROW
    }
}
template <typename T> struct alignas(16) row_pack { T at[8]; };
#if COMPUTED
#define TEAM (ROWS == 1 ? 128 : 32) /* threads of a row */
#define DEFINE_OF_TEAM(name, more)                                                                 \
    static __device__ __forceinline__ float name##_of_team(float x) {                              \
        for (int d = 16; d > 0; d /= 2) {                                                          \
            const float y = __shfl_xor_sync(~0u, x, d);                                            \
            x = more;                                                                              \
        }                                                                                          \
        if (TEAM == 32) return x;                                                                  \
        __shared__ float warps[4];                                                                 \
        __syncthreads(); /* what was there before is read */                                       \
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;                                    \
        __syncthreads();                                                                           \
        x = warps[0];                                                                              \
        for (int w = 1; w < 4; w++) {                                                              \
            const float y = warps[w];                                                              \
            x = more;                                                                              \
        }                                                                                          \
        return x;                                                                                  \
    }
DEFINE_OF_TEAM(sum, x + y)
DEFINE_OF_TEAM(max, y > x ? y : x)
DEFINE_OF_TEAM(min, y < x ? y : x)
#define PUT(row, k, pack) *(row_pack<ml_bf16> *)(lines + (row)*A_LINE + ((k)-begin) * 2) = pack
static __device__ __forceinline__ void make_a(const arguments &a, char *lines, int begin, int end,
                                              int, int) {
    const int lane = threadIdx.x % TEAM;
    for (int row = threadIdx.x / TEAM; row < ROWS; row += 128 / TEAM) {
        COMPUTE_ROW
    }
}
#else
/* Rows first .. first + rows - 1, from `begin` to `end` of the depth; zeros behind the last. */
static __device__ __forceinline__ void make_a(const arguments &a, char *lines, int begin, int end,
                                              int first, int rows) {
    const ml_bf16 *left = (const ml_bf16 *)a.p[0] + first * A_ROW;
    const int packs = (end - begin) / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * packs; i += 128) {
        const int row = i / packs, k = begin + i % packs * 8;
        row_pack<ml_bf16> x = {};
        if (A_PACKS) {
            if (k < DEPTH) x = *(const row_pack<ml_bf16> *)(left + row * A_ROW + k);
        } else {
            for (int e = 0; e < 8; e++)
                if (k + e < DEPTH) x.at[e] = left[row * A_ROW + (k + e) * A_COL];
        }
        *(row_pack<ml_bf16> *)(lines + row * A_LINE + i % packs * 16) = x;
    }
}
#endif
/* What lane `lane` of an mma has of 8 deep of the rows of A. */
static __device__ __forceinline__ unsigned pair_of_a(const char *a, int k) {
    const int lane = threadIdx.x % 32;
    return *(const unsigned *)(a + A_ROW_OF(lane / 4) * A_LINE + (k + lane % 4 * 2) * 2);
}
#if B_BYTES == 2
/* What the warp has of a step: sums of its columns with all rows. */
static __device__ __forceinline__ void multiply(float (&sum)[TILES][4], const char *slot,
                                                const char *a) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned x[4][4];
#if B_DEEP
#pragma unroll
    for (int i = 0; i < 4; i++)
        load_matrices(x[i], shared_address(slot) + PIECE(lane % 16, lane / 16 + i * 2));
#pragma unroll
    for (int i = 0; i < 4; i++) mma(sum[i], x[i], pair_of_a(a, i * 16), pair_of_a(a, i * 16 + 8));
    (void)warp;
#else
#pragma unroll
    for (int i = 0; i < 4; i++)
        load_matrices_transposed(x[i], shared_address(slot) +
                                           PIECE(lane / 16 * 8 + lane % 8, i * 2 + lane / 8 % 2));
    const unsigned low = pair_of_a(a, warp * 16), high = pair_of_a(a, warp * 16 + 8);
#pragma unroll
    for (int i = 0; i < 4; i++) mma(sum[i], x[i], low, high);
#endif
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
/* What the warp has of a step. ldmatrix moves pairs of bytes: along the depth a thread gets 4
 * neighbouring elements, two mma's worth for which A is read in the same order; along columns, 2
 * neighbouring columns, which are lines l and l + 8 of the mma. */
static __device__ __forceinline__ void multiply(float (&sum)[TILES][4], const char *slot,
                                                const char *a) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned w[4];
#if B_DEEP
#pragma unroll
    for (int i = 0; i < 4; i++) {
        load_matrices(w, shared_address(slot) + PIECE(lane % 16, lane / 16 + i * 2));
        const unsigned x[2][4] = {{pair_of_bytes<0, 1>(w[0]), pair_of_bytes<0, 1>(w[1]),
                                   pair_of_bytes<2, 3>(w[0]), pair_of_bytes<2, 3>(w[1])},
                                  {pair_of_bytes<0, 1>(w[2]), pair_of_bytes<0, 1>(w[3]),
                                   pair_of_bytes<2, 3>(w[2]), pair_of_bytes<2, 3>(w[3])}};
        const char *row = a + A_ROW_OF(lane / 4) * A_LINE + (i * 32 + lane % 4 * 4) * 2;
        const uint2 low = *(const uint2 *)row, high = *(const uint2 *)(row + 32);
        mma(sum[i], x[0], low.x, low.y);
        mma(sum[i], x[1], high.x, high.y);
    }
    (void)warp;
#else
    const unsigned low = pair_of_a(a, warp * 16), high = pair_of_a(a, warp * 16 + 8);
#pragma unroll
    for (int i = 0; i < TILES; i += 2) {
        load_matrices_transposed(w, shared_address(slot) + PIECE(lane % 16, i + lane / 16));
        const unsigned x[2][4] = {{pair_of_bytes<0, 2>(w[0]), pair_of_bytes<1, 3>(w[0]),
                                   pair_of_bytes<0, 2>(w[1]), pair_of_bytes<1, 3>(w[1])},
                                  {pair_of_bytes<0, 2>(w[2]), pair_of_bytes<1, 3>(w[2]),
                                   pair_of_bytes<0, 2>(w[3]), pair_of_bytes<1, 3>(w[3])}};
        mma(sum[i], x[0], low, high);
        mma(sum[i + 1], x[1], low, high);
    }
#endif
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
static __device__ __forceinline__ void clear_rows(const arguments &a, const product &p) {
    for (int row = 0; row < ROWS; row++) {
        bool taken = false;
        for (int group = 0; group < GROUPS; group++) {
            int first, last;
            bounds_of(a, group, first, last);
            taken = taken || (row >= first && row < last);
        }
        const int n = p.n0 + threadIdx.x;
        if (!taken && threadIdx.x < TILE && n < p.columns)
            ((RESULT *)p.c)[row * p.c_row + n * p.c_col] = STORE(0.0f);
    }
}
#endif
/* Element i of the rows of a block's tile: its place in C, and what is added to its sum or scales
 * it, which is there before the sums are. */
struct element {
    long long to;
    float scale, bias, addend;
    bool exists;
};
static __device__ __forceinline__ element find_element(const product &p, int i, int first,
                                                       int rows) {
    const int row = i / TILE, n = p.n0 + i % TILE;
    element e = {(first + row) * p.c_row + n * p.c_col, 1, 0, 0, row < rows && n < p.columns};
    if (SCALED && e.exists) e.scale = ((const float *)p.scale)[n];
    if (BIAS && e.exists) e.bias = LOAD(((const RESULT *)p.bias)[n]);
    if (ADDENDS && e.exists) e.addend = LOAD(((const RESULT *)p.addend)[e.to]);
    return e;
}
/* The sums of a part of the depth. */
static __device__ __forceinline__ void add_part(const arguments &a, float (&sum)[TILES][4],
                                                char *shared, const product &p, int part, int first,
                                                int rows) {
    const int begin = STEPS * part / SPLIT, end = STEPS * (part + 1) / SPLIT;
    const int last = end - begin < SLOTS ? begin : end - SLOTS + 1; /* that loads, or the first */
    char *ring = shared + threadIdx.x / 32 * SLOTS * SLOT_BYTES, *lines = shared + A_BEGIN;
    if (B_BYTES == 1) kernel_lets_next(); /* few bytes: there is room for blocks of the next */
#pragma unroll
    for (int s = 0; s < SLOTS - 1; s++) {
        if (begin + s < end) load_b(ring + s * SLOT_BYTES, p, (begin + s) * DEEP);
        copies_commit();
    }
    if (CONSTANT) ask_rest(a, p, begin * DEEP, end * DEEP);
    if (CONSTANT) kernel_waits();
    make_a(a, lines, begin * DEEP, end * DEEP, first, rows);
    __syncthreads();
    int slot = 0, next = SLOTS - 1;
    for (int step = begin; step < end; step++) {
        copies_but<SLOTS - 2>();
        __syncwarp();
        if (step + SLOTS - 1 < end) load_b(ring + next * SLOT_BYTES, p, (step + SLOTS - 1) * DEEP);
        copies_commit();
        if (B_BYTES > 1 && step == last) kernel_lets_next();
        multiply(sum, ring + slot * SLOT_BYTES, lines + (step - begin) * DEEP * 2);
        slot = slot + 1 < SLOTS ? slot + 1 : 0, next = next + 1 < SLOTS ? next + 1 : 0;
    }
    copies_wait();
    __syncthreads();
}
/* The sums of the warps. */
static __device__ __forceinline__ void put_sums(float *sums, const float (&sum)[TILES][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = lane % 4 * 2 + i % 2;
#if B_DEEP
        sums[row * SUM_ROW + warp * 16 + COLUMN_OF(lane, i)] =
            (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
#else
#pragma unroll
        for (int t = 0; t < TILES; t++)
            sums[warp * SUMS + row * SUM_ROW + t * 16 + COLUMN_OF(lane, i)] = sum[t][i];
#endif
    }
    __syncthreads();
}
static __device__ __forceinline__ float sum_of_warps(const float *sums, int i) {
    const float *at = sums + i / TILE * SUM_ROW + i % TILE;
    return B_DEEP ? at[0] : (at[0] + at[SUMS]) + (at[2 * SUMS] + at[3 * SUMS]);
}
/* Block r of a cluster adds up the sums of all, in their order, of elements r * OWN, ...: they send
 * them there, to `received`. */
static __device__ __forceinline__ void write(const product &p, int rank, int first, int rows,
                                             const float *sums, float *received) {
    element own[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = e * 128 + threadIdx.x;
        own[e] = find_element(p, rank * OWN + i, first, i < OWN ? rows : 0);
    }
    if (RANKS > 1) {
        cluster_wait();
        for (int i = threadIdx.x; i < rows * TILE; i += 128)
            store_in_block(received + rank * OWN + i % OWN, i / OWN, sum_of_warps(sums, i));
        cluster_sync();
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = e * 128 + threadIdx.x;
        if (!own[e].exists) continue;
        float x = 0;
#pragma unroll
        for (int r = 0; r < RANKS; r++)
            x += RANKS > 1 ? received[r * OWN + i] : sum_of_warps(sums, i);
        if (SCALED) x *= own[e].scale;
        if (BIAS) x += own[e].bias;
        if (ADDENDS) x += own[e].addend;
        ((RESULT *)p.c)[own[e].to] = STORE(x);
    }
}
extern "C" IN_CLUSTER __global__ void __launch_bounds__(128, BLOCKS) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    float *sums = (float *)shared; /* once the rings are done */
    int first = 0, rows = ROWS;
    const int rank = blockIdx.x % SPLIT;
    product p = pick_product(a, blockIdx.x / SPLIT);
    if (rank >= RANKS) return;
    if (!CONSTANT) kernel_begins();
#if GROUPS
    if (blockIdx.y == gridDim.y - 1) {
        if (rank == 0) clear_rows(a, p);
        return;
    }
    const group_rows own = find_group(a, blockIdx.y);
    if (own.count == 0) return;
    first = own.first, rows = own.count;
    p.b += own.group * B_GROUP * B_BYTES;
#endif
    if (RANKS > 1) cluster_arrive();
    float sum[TILES][4] = {};
    for (int part = rank; part < SPLIT; part += RANKS) /* one, but in an emulator */
        add_part(a, sum, (char *)shared, p, part, first, rows);
    put_sums(sums, sum);
    write(p, rank, first, rows, sums, (float *)((char *)shared + RECEIVED_AT));
}
