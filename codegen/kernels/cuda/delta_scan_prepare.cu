/* What passes over the chunks need of each chunk (delta_scan.cuh), all chunks at once, as bf16: for
 * the pass forward T W (W times its decays), T B, E and F; for the gradient's T W, T B, T^T U and E
 * T. And factors in f32: D(p, 0) for q, D(p-1, 0), D(64, j), D(64, 0). */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY delta_scan_prepare
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
#define F_WORK 0LL  /* likewise */
#define TU_WORK 0LL /* 64 x keys, for the gradient */
#define ET_WORK 0LL
#define FACTORS_WORK 0LL /* 512: 256 f32 */
#endif
#include "delta_scan_products.cuh"

enum {
    TILE = CHUNK * KEYS * 2, /* Q, W, U, K */
    B_SHARED = 3 * TILE,     /* B in place of K behind the scores; for E T then T as bf16 */
    DECAYS_SHARED = 4 * TILE,
    FACTORS_SHARED = DECAYS_SHARED + (sizeof(chunk_decays) + 15) / 16 * 16,
    T_SHARED = KEYS == 64 ? FACTORS_SHARED + 1024 : 0 /* A, T; in place of Q where they fit */
};
#include "delta_scan_inverse.cuh"

/* A warp's 16 rows of scores, q or w by u or k, of blocks on and below the diagonal; zeros above.
 */
static __device__ __forceinline__ void find_scores(float (&x)[8][4], unsigned rows,
                                                   unsigned columns, int block) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[n][i] = 0;
#pragma unroll
    for (int depth = 0; depth < KEYS; depth += 16) {
        unsigned left[4], right[4];
        left_of_tile(left, rows, block * 16, depth);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n > block) continue;
            right_of_rows(right, columns, n * 16, depth);
            mma(x[2 * n], left, right[0], right[1]);
            mma(x[2 * n + 1], left, right[2], right[3]);
        }
    }
}
/* Times their decays (decay_between), zeros above the diagonal; rows come behind `later` more
 * decays than their number. */
static __device__ __forceinline__ void decay_scores(float (&x)[8][4], const chunk_decays &d,
                                                    int block, int later) {
    const int first = block * 16 + lane_row() + later;
    const float logs[2] = {d.logs[first], d.logs[first + 8]};
    const unsigned counts[2] = {d.counts[first], d.counts[first + 8]};
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const int column = n * 8 + lane_column() + 1;
        if (n / 2 > block) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int after = first + i / 2 * 8, before = column + i % 2;
            const float product = exp2_approx(logs[i / 2] - d.logs[before]);
            const unsigned count = counts[i / 2] - d.counts[before];
            const float decay = count >> 16 ? 0 : count & 1 ? -product : product;
            x[n][i] = before <= after ? x[n][i] * decay : 0;
        }
    }
}
static __device__ __forceinline__ void round_scores(unsigned (&to)[16], const float (&x)[8][4]) {
    round_bf16<32>(to, *(const float(*)[32])x);
}
/* Operands of the chunk; factors. */
static __device__ __forceinline__ void load_chunk(const arguments &a, char *base, long long batch,
                                                  int chunk) {
    unsigned at = shared_address(base);
    int first = chunk * CHUNK, there = THERE(chunk);
    copy_rows<KEYS, CHUNK, 256>(
        at, 0, (const ml_bf16 *)a.p[Q_AT] + Q_OFFSET(batch) + first * Q_STEP, Q_STEP, there);
    copy_rows<KEYS, CHUNK, 256>(
        at + TILE, 0, (const ml_bf16 *)a.p[W_AT] + W_OFFSET(batch) + first * W_STEP, W_STEP, there);
    copy_rows<KEYS, CHUNK, 256>(at + 2 * TILE, 0,
                                (const ml_bf16 *)a.p[U_AT] + U_OFFSET(batch) + first * U_STEP,
                                U_STEP, there);
    copy_rows<KEYS, CHUNK, 256>(at + 3 * TILE, 0,
                                (const ml_bf16 *)a.p[K_AT] + K_OFFSET(batch) + first * K_STEP,
                                K_STEP, there);
    copies_commit();
    chunk_decays &d = *(chunk_decays *)(base + DECAYS_SHARED);
    float *factors = (float *)(base + FACTORS_SHARED);
    if (threadIdx.x < 32) find_decays(d, a, batch, chunk);
    __syncthreads();
    float *to = (float *)((ml_bf16 *)a.p[WORK_AT] + FACTORS_WORK) + (batch * CHUNKS + chunk) * 256;
    int n = threadIdx.x % CHUNK, which = threadIdx.x / CHUNK;
    factors[threadIdx.x] = to[threadIdx.x] = which == 0   ? decay_between(d, n + AFTER, 0)
                                             : which == 1 ? decay_between(d, n, 0)
                                             : which == 2 ? decay_between(d, CHUNK, n + 1)
                                                          : decay_between(d, CHUNK, 0);
    copies_wait();
    __syncthreads();
}
extern "C" __global__ void __launch_bounds__(256, 3) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    char *base = (char *)shared;
    const unsigned at = shared_address(base);
    const int chunk = blockIdx.x % CHUNKS, warp = threadIdx.x / 32, block = warp % 4;
    const long long batch = blockIdx.x / CHUNKS, number = blockIdx.x, rows = block * 16 * CHUNK;
    const bool of_q = warp < 4;
    const chunk_decays &d = *(const chunk_decays *)(base + DECAYS_SHARED);
    const float *factors = (const float *)(base + FACTORS_SHARED);
    float score[8][4];
    unsigned pairs[16];
    load_chunk(a, base, batch, chunk);
    if (!GRADIENT || !of_q) { /* F; B */
        find_scores(score, at + warp / 4 * TILE, at + 3 * TILE, block);
        decay_scores(score, d, block, of_q ? AFTER : 0);
        round_scores(pairs, score);
        if (of_q) store_pairs(pairs, work_of(a, F_WORK, number, CHUNK * CHUNK) + rows, CHUNK, 16);
    }
    find_scores(score, at + warp / 4 * TILE, at + 2 * TILE, block); /* E; A */
    decay_scores(score, d, block, of_q ? AFTER : 0);
    __syncthreads(); /* Q and K are read no more */
    if (of_q) {
        round_scores(pairs, score);
        if (!GRADIENT)
            store_pairs(pairs, work_of(a, E_WORK, number, CHUNK * CHUNK) + rows, CHUNK, 16);
    } else {
        put_scores(base, score, pairs, block);
        invert_triangle<1>((float *)(base + T_SHARED));
    }
    __syncthreads();
    multiply_by_inverse(a, base, number, factors + CHUNK, factors + 2 * CHUNK, pairs);
}
