/* What passes over the chunks need of each chunk of a scan with a decay for each key
 * (delta_scan_keys.cuh), all chunks at once, as bf16: T W, T B, E and F; for the gradient T W, T B,
 * T^T U, E T, and F and B; q, w, u and k with their decays from the chunk's beginning or to its
 * end. And in f32 the decay of the chunk by key. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY delta_scan_keys_prepare
#define GRADIENT 0
#define Q_AT 0
#define Q_OFFSET(batch) ((batch)*1048576LL)
#define Q_STEP 128LL
#define K_AT 1
#define K_OFFSET(batch) ((batch)*1048576LL)
#define K_STEP 128LL
#define U_AT 5
#define U_OFFSET(batch) ((batch)*1048576LL)
#define U_STEP 128LL
#define W_AT 6
#define W_OFFSET(batch) ((batch)*1048576LL)
#define W_STEP 128LL
#define TW_WORK 0LL /* where matrices of all chunks begin: 64 x keys */
#define TB_WORK 0LL /* 64 x 64, and those that follow */
#define E_WORK 0LL  /* not for the gradient */
#define F_WORK 0LL
#define B_WORK 0LL  /* for the gradient */
#define TU_WORK 0LL /* 64 x keys, likewise */
#define ET_WORK 0LL
#define QD_WORK 0LL /* with decays, 64 x keys */
#define WD_WORK 0LL /* for the gradient */
#define UD_WORK 0LL
#define KD_WORK 0LL
#define FACTORS_WORK 0LL /* 512: as f32 the chunk's decays by key */
#endif
#include "delta_scan_keys.cuh"

enum {
    TILE = CHUNK * KEYS * 2,
    DECAYS_SHARED = RANK ? 4 * TILE : TILE, /* f32, rows by position; in place of W and U */
    BLOCKS_SHARED = RANK ? DECAYS_SHARED + CHUNK * KEYS * 4 : 4 * TILE,
    PAIRS_SHARED = BLOCKS_SHARED + SUBS * KEYS * 4,
    PAIRS = SUBS * (SUB * (SUB + 1) / 2), /* f32, of one of A, B, E, F, in sub-blocks */
    T_SHARED = DECAYS_SHARED,             /* A, T: decays are read no more */
    B_SHARED = KEYS == 64 ? PAIRS_SHARED + 4 * PAIRS * 4 : T_SHARED + 14 * 1024,
    PARTS = RANK ? 2 : 4 /* of the keys, in products by elements */
};
#include "delta_scan_inverse.cuh"

/* Where an element on or below the diagonal of a sub-block is among its pairs. */
static __device__ __forceinline__ int pair_at(int row, int column) {
    return row * (row + 1) / 2 + column;
}
/* Products in sub-blocks by elements: q or w by u and k, of parts of the keys. A thread has a
 * column j; results in `pairs` are by u, then by k, of q, then of w. Rows before the column add
 * nothing; without branches all loads of a key are on their way at once. */
static __device__ __forceinline__ void find_pairs(char *base, const float *decays, float *pairs) {
    const int column = threadIdx.x % CHUNK, own = column % SUB, first = column - own;
    const int part = threadIdx.x / CHUNK % PARTS, of_w = threadIdx.x / (PARTS * CHUNK);
    const bool later = AFTER && !of_w;
    const char *rows = base + of_w * TILE, *u = base + 2 * TILE, *k = base + 3 * TILE;
    float by_u[SUB] = {}, by_k[SUB] = {};
    for (int i = 0; i < KEYS / PARTS; i += 2) {
        const int key = part * (KEYS / PARTS) + i;
        const auto pair_of = [&](const char *tile, int row) {
            return *(const unsigned *)(tile + swizzled<CHUNK>(row, key / 8) + key % 8 * 2);
        };
        const unsigned own_u = RANK ? pair_of(u, column) : 0, own_k = pair_of(k, column);
        float product[2] = {1, 1};
#pragma unroll
        for (int p = 0; p < SUB; p++) {
            const unsigned x = pair_of(rows, first + p);
            const float2 by = *(const float2 *)(decays + (first + p) * KEYS + key);
            const float before[2] = {product[0], product[1]};
            const bool adds = later ? p >= own : p > own;
            product[0] *= p > own ? by.x : 1, product[1] *= p > own ? by.y : 1;
            const float low = __uint_as_float(x << 16) * (later ? product[0] : before[0]);
            const float high = __uint_as_float(x & 0xffff0000u) * (later ? product[1] : before[1]);
            const float of_k =
                low * __uint_as_float(own_k << 16) + high * __uint_as_float(own_k & 0xffff0000u);
            by_k[p] += adds ? of_k : 0;
            if (!RANK) continue;
            const float of_u =
                low * __uint_as_float(own_u << 16) + high * __uint_as_float(own_u & 0xffff0000u);
            by_u[p] += adds ? of_u : 0;
        }
    }
    float *to = pairs + of_w * 2 * PAIRS + column / SUB * pair_at(SUB, 0);
    for (int turn = 0; turn < PARTS; turn++) {
        if (part == turn)
#pragma unroll
            for (int p = 0; p < SUB; p++) {
                if (p < own) continue;
                const int at = pair_at(p, own);
                to[at] = (turn ? to[at] : 0) + by_u[p];
                to[PAIRS + at] = (turn ? to[PAIRS + at] : 0) + by_k[p];
            }
        __syncthreads();
    }
}
/* The decays of a whole sub-block, of the columns of a left operand. */
static __device__ __forceinline__ void scale_left(unsigned (&x)[4], const float *block, int depth) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 by = *(const float2 *)(block + depth + i / 2 * 8 + lane_column());
        x[i] = pack_bf16(__uint_as_float(x[i] << 16) * by.x,
                         __uint_as_float(x[i] & 0xffff0000u) * by.y);
    }
}
/* A warp's 16 rows of scores by u and k, blocks on and below the diagonal. */
static __device__ __forceinline__ void find_scores(float (&by_u)[8][4], float (&by_k)[8][4],
                                                   unsigned rows, unsigned u, unsigned k,
                                                   const float *blocks, const float *pairs,
                                                   int block) {
#pragma unroll
    for (int depth = 0; depth < KEYS; depth += 16) {
        unsigned left[4], right[4];
        left_of_tile(left, rows, block * SUB, depth);
#pragma unroll
        for (int n = SUBS - 2; n >= 0; n--) {
            if (n >= block) continue;
            if (RANK) {
                right_of_rows(right, u, n * SUB, depth);
                mma(by_u[2 * n], left, right[0], right[1]);
                mma(by_u[2 * n + 1], left, right[2], right[3]);
            }
            right_of_rows(right, k, n * SUB, depth);
            mma(by_k[2 * n], left, right[0], right[1]);
            mma(by_k[2 * n + 1], left, right[2], right[3]);
            if (n > 0) scale_left(left, blocks + n * KEYS, depth);
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (n / 2 != block) continue;
            const int row = lane_row() + i / 2 * 8, column = n % 2 * 8 + lane_column() + i % 2;
            const float *from = pairs + block * pair_at(SUB, 0) + pair_at(row, column);
            if (column <= row) by_u[n][i] = from[0], by_k[n][i] = from[PAIRS];
        }
}
/* Rows with the decays of whole sub-blocks too: before q and w, behind u and k; and by key those of
 * the chunk. */
static __device__ __forceinline__ void scale_by_blocks(char *base, const float *blocks,
                                                       float *chunk) {
    for (int item = threadIdx.x; item < SUBS * KEYS; item += 256) {
        const int key = item % KEYS, sub = item / KEYS;
        float before = 1, behind = 1;
        for (int i = 0; i < sub; i++) before *= blocks[i * KEYS + key];
        for (int i = sub + 1; i < SUBS; i++) behind *= blocks[i * KEYS + key];
        if (sub == 0) chunk[key] = behind * blocks[key];
#pragma unroll
        for (int which = 0; which < 4; which++) {
            if (!RANK && (which == 1 || which == 2)) continue;
            float x[SUB]; /* all loaded before one is stored */
#pragma unroll
            for (int p = 0; p < SUB; p++)
                x[p] = ml_load_bf16(*element_of(base + which * TILE, sub * SUB + p, key));
#pragma unroll
            for (int p = 0; p < SUB; p++)
                *element_of(base + which * TILE, sub * SUB + p, key) =
                    ml_store_bf16(x[p] * (which < 2 ? before : behind));
        }
    }
}
static __device__ __forceinline__ void store_tile(ml_bf16 *to, const char *tile) {
    for (int i = threadIdx.x; i < CHUNK * KEYS / 8; i += 256)
        *(uint4 *)(to + i * 8) =
            *(const uint4 *)(tile + swizzled<CHUNK>(i / (KEYS / 8), i % (KEYS / 8)));
}
#define COPY(tile, X)                                                                              \
    copy_rows<KEYS, CHUNK, 256>(                                                                   \
        tile, 0, (const ml_bf16 *)a.p[X##_AT] + X##_OFFSET(batch) + chunk * CHUNK * X##_STEP,      \
        X##_STEP, there)
static __device__ __forceinline__ void load_chunk(const arguments &a, char *base, long long batch,
                                                  int chunk) {
    const unsigned at = shared_address(base);
    const int there = THERE(chunk);
    COPY(at, Q);
    COPY(at + 3 * TILE, K);
#if RANK
    COPY(at + TILE, W);
    COPY(at + 2 * TILE, U);
#endif
    copies_commit();
    load_decays((float *)(base + DECAYS_SHARED), a, batch, chunk);
    copies_wait();
    __syncthreads();
}
extern "C" __global__ void __launch_bounds__(256, 2) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    char *base = (char *)shared;
    const unsigned at = shared_address(base);
    const int chunk = blockIdx.x % CHUNKS, warp = threadIdx.x / 32, block = warp % 4;
    const long long batch = blockIdx.x / CHUNKS, number = blockIdx.x, rows = block * 16 * CHUNK;
    const float *decays = (const float *)(base + DECAYS_SHARED);
    float *blocks = (float *)(base + BLOCKS_SHARED), *pairs = (float *)(base + PAIRS_SHARED);
    float by_u[8][4] = {}, by_k[8][4] = {};
    load_chunk(a, base, batch, chunk);
    find_pairs(base, decays, pairs);
    scale_in_blocks(base, base, TILE, decays, blocks);
    __syncthreads();
    if (RANK || warp < 4)
        find_scores(by_u, by_k, at + warp / 4 * TILE, at + 2 * TILE, at + 3 * TILE, blocks,
                    pairs + warp / 4 * 2 * PAIRS, block);
    unsigned of_u[16], of_k[16];
    round_bf16<32>(of_u, *(const float(*)[32])by_u);
    round_bf16<32>(of_k, *(const float(*)[32])by_k);
    if (warp < 4) {
        store_pairs(of_k, work_of(a, F_WORK, number, CHUNK * CHUNK) + rows, CHUNK, 16);
        if (RANK && !GRADIENT)
            store_pairs(of_u, work_of(a, E_WORK, number, CHUNK * CHUNK) + rows, CHUNK, 16);
    } else if (RANK) {
        if (GRADIENT)
            store_pairs(of_k, work_of(a, B_WORK, number, CHUNK * CHUNK) + rows, CHUNK, 16);
        put_scores(base, by_u, of_k, block);
    }
    __syncthreads();
    scale_by_blocks(base, blocks, (float *)work_of(a, FACTORS_WORK, number, 512));
    __syncthreads();
    store_tile(work_of(a, QD_WORK, number, CHUNK * KEYS), base);
    store_tile(work_of(a, KD_WORK, number, CHUNK * KEYS), base + 3 * TILE);
    if (!RANK) return;
    store_tile(work_of(a, UD_WORK, number, CHUNK * KEYS), base + 2 * TILE);
    if (GRADIENT) store_tile(work_of(a, WD_WORK, number, CHUNK * KEYS), base + TILE);
    if (warp >= 4) invert_triangle<1>((float *)(base + T_SHARED));
    __syncthreads();
    multiply_by_inverse(a, base, number, nullptr, nullptr, of_u);
}
