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
    TILE = CHUNK * KEYS * 2,
    A_SHARED = 4 * TILE,
    T_SHARED = A_SHARED + CHUNK * LD * 4,
    B_SHARED = T_SHARED + CHUNK * LD * 4,
    DECAYS_SHARED = B_SHARED + BLOCK,
    FACTORS_SHARED = DECAYS_SHARED + (sizeof(chunk_decays) + 15) / 16 * 16
};
#include "delta_scan_inverse.cuh"

/* A warp's 16 rows of scores, q or w by u and k, of blocks on and below the diagonal. */
static __device__ __forceinline__ void find_scores(float (&by_u)[8][4], float (&by_k)[8][4],
                                                   unsigned rows, unsigned u, unsigned k, int block,
                                                   bool with_k) {
#pragma unroll
    for (int depth = 0; depth < KEYS; depth += 16) {
        unsigned left[4], right[4];
        left_of_tile(left, rows, block * 16, depth);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n > block) continue;
            right_of_rows(right, u, n * 16, depth);
            mma(by_u[2 * n], left, right[0], right[1]);
            mma(by_u[2 * n + 1], left, right[2], right[3]);
            if (!with_k) continue;
            right_of_rows(right, k, n * 16, depth);
            mma(by_k[2 * n], left, right[0], right[1]);
            mma(by_k[2 * n + 1], left, right[2], right[3]);
        }
    }
}
/* Times their decays, zeros above the diagonal; rows come behind `later` more decays than their
 * number. */
static __device__ __forceinline__ void decay_scores(float (&by_u)[8][4], float (&by_k)[8][4],
                                                    const chunk_decays &d, int block, int later) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        if (n / 2 > block) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int after = block * 16 + lane_row() + i / 2 * 8 + later;
            int before = n * 8 + lane_column() + i % 2 + 1;
            float decay = before <= after ? decay_between(d, after, before) : 0;
            by_u[n][i] = before <= after ? by_u[n][i] * decay : 0;
            by_k[n][i] = before <= after ? by_k[n][i] * decay : 0;
        }
    }
}
/* Operands of the chunk; factors; T begins as zeros. */
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
    float *factors = (float *)(base + FACTORS_SHARED), *t = (float *)(base + T_SHARED);
    for (int i = threadIdx.x; i < CHUNK * LD; i += 256) t[i] = 0;
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
extern "C" __global__ void __launch_bounds__(256, 2) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    char *base = (char *)shared;
    unsigned at = shared_address(base);
    int chunk = blockIdx.x % CHUNKS, warp = threadIdx.x / 32, block = warp % 4;
    long long batch = blockIdx.x / CHUNKS, number = blockIdx.x;
    const chunk_decays &d = *(const chunk_decays *)(base + DECAYS_SHARED);
    float *score = (float *)(base + A_SHARED), *t = (float *)(base + T_SHARED);
    load_chunk(a, base, batch, chunk);
    float by_u[8][4] = {}, by_k[8][4] = {};
    find_scores(by_u, by_k, at + warp / 4 * TILE, at + 2 * TILE, at + 3 * TILE, block,
                !GRADIENT || warp >= 4);
    decay_scores(by_u, by_k, d, block, warp < 4 ? AFTER : 0);
    long long rows = block * 16 * CHUNK;
    if (warp < 4) {
        if (!GRADIENT) {
            store_scores(by_k, work_of(a, F_WORK, number, CHUNK * CHUNK) + rows, CHUNK);
            store_scores(by_u, work_of(a, E_WORK, number, CHUNK * CHUNK) + rows, CHUNK);
        }
    } else {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = block * 16 + lane_row() + r * 8;
                *(float2 *)(score + row * LD + n * 8 + lane_column()) =
                    float2{by_u[n][2 * r], by_u[n][2 * r + 1]};
                *(unsigned *)(base + B_SHARED + swizzled<CHUNK>(row, n) + lane_column() * 2) =
                    pack_bf16(by_k[n][2 * r], by_k[n][2 * r + 1]);
            }
    }
    __syncthreads();
    if (warp / 2 == 2) invert_diagonal(score, t, threadIdx.x - 128);
    __syncthreads();
    if (warp >= 4 && warp < 7) invert_below(score, t, warp - 4);
    __syncthreads();
    const float *factors = (const float *)(base + FACTORS_SHARED);
    multiply_by_inverse(a, base, number, factors + CHUNK, factors + 2 * CHUNK, by_u);
}
