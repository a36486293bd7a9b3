/* LINEAR_SCAN of rank 1 on tensor cores: S_t = a_t S_{t-1} + u_t (w_t^T S_{t-1}) + k_t v_t^T, a_t a
 * number, y_t = q_t^T S_t, over chunks of 64 positions. With D(n, m) the product of the decays m +
 * 1
 * .. n of a chunk, positions from 1, in the state before the chunk S and z_p = w_p^T S_{p-1}:
 *
 *     A(p, j) = w_p u_j D(p-1, j), B(p, j) = w_p k_j D(p-1, j)       j < p
 *     E(p, j) = q_p u_j D(p, j),   F(p, j) = q_p k_j D(p, j)         j <= p
 *     (I - A) Z = D(p-1, 0) W S + B V
 *     Y = D(p, 0) Q S + E Z + F V
 *     S' = D(64, 0) S + (D(64, j) U)^T Z + (D(64, j) K)^T V
 *
 * and the gradient, with dS' of the state after the chunk and T = (I - A)^-1:
 *
 *     R = T^T (E^T dY + D(64, j) U dS')
 *     dS = D(64, 0) dS' + (D(p, 0) Q)^T dY + (D(p-1, 0) W)^T R
 *     dV = F^T dY + B^T R + D(64, j) K dS'
 *
 * R and dS are the same pass in the other direction with q for k, w for u and dy for v. Where y
 * reads the state before its position (AFTER 0), p - 1 is in place of p in E, F and Q's factor.
 *
 * delta_scan_prepare.cu computes T and its products for all chunks at once, delta_scan_state.cu
 * walks over the chunks with S^T in registers, delta_scan_grad.cu computes the gradients of each
 * chunk from the states and from Z and R that passes of delta_scan_state.cu wrote.
 *
 * Tiles are blocks of 64 columns; a row of a block is a line of 128 bytes, whose 16-byte parts are
 * swizzled by the row modulo 8 (wgmma's 128-byte swizzle; ldmatrix meets no bank twice). */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define POINTERS 16
#define LENGTH 8192
#define KEYS 128
#define VALUES 128
#define AFTER 1
#define A_AT 3 /* the decay, f32 or bf16 */
#define A_TYPE float
#define A_LOAD
#define A_OFFSET(batch) ((batch)*8192LL)
#define A_STEP 1LL
#endif
#include "wgmma.cuh"

#define CHUNK 64
#define CHUNKS ((LENGTH + CHUNK - 1) / CHUNK)
#define LINE 128             /* bytes of a row of a block */
#define BLOCK (CHUNK * LINE) /* of 64 rows */
#define THERE(chunk) (LENGTH - (chunk)*CHUNK < CHUNK ? LENGTH - (chunk)*CHUNK : CHUNK)

struct arguments {
    char *p[POINTERS];
};

/* Byte offset of a 16-byte part of a row in a tile whose blocks have ROWS rows. */
template <int ROWS> static __device__ __forceinline__ unsigned swizzled(int row, int part) {
    return part / 8 * (ROWS * LINE) + row * LINE + (part % 8 ^ row % 8) * 16;
}
/* THREADS threads start to copy 64 rows, of which `there` exist, to rows FIRST and up of a tile. */
template <int WIDTH, int ROWS, int THREADS>
static __device__ __forceinline__ void copy_rows(unsigned tile, int first, const ml_bf16 *from,
                                                 long long step, int there) {
    const int parts = WIDTH / 8;
#pragma unroll
    for (int i = 0; i < CHUNK * parts / THREADS; i++) {
        int row = (i * THREADS + threadIdx.x) / parts, part = (i * THREADS + threadIdx.x) % parts;
        bool valid = row < there;
        copy_async(tile + swizzled<ROWS>(first + row, part),
                   valid ? from + row * step + part * 8 : from, valid ? 16 : 0);
    }
}
/* The same of ROWS rows that are contiguous in memory. */
template <int WIDTH, int ROWS, int THREADS>
static __device__ __forceinline__ void copy_matrix(unsigned tile, const ml_bf16 *from) {
    const int parts = WIDTH / 8;
#pragma unroll
    for (int i = 0; i < ROWS * parts / THREADS; i++) {
        int row = (i * THREADS + threadIdx.x) / parts, part = (i * THREADS + threadIdx.x) % parts;
        copy_async(tile + swizzled<ROWS>(row, part), from + row * WIDTH + part * 8, 16);
    }
}
/* Four threads of a row, with four times two columns of eight each, exchange: each gets eight. */
static __device__ __forceinline__ void transpose_quad(unsigned (&x)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            bool high = threadIdx.x & step;
            unsigned other = __shfl_xor_sync(~0u, high ? x[i] : x[i + step], step);
            if (high)
                x[i] = other;
            else
                x[i + step] = other;
        }
}
/* Accumulators of a warp's 16 rows, as bf16, to memory, 16 bytes a thread, of which `there` rows
 * exist. */
template <int N>
static __device__ __forceinline__ void store_pairs(const unsigned (&pairs)[N], ml_bf16 *to,
                                                   long long step, int there) {
    int lane = threadIdx.x % 32;
    to += lane / 4 * step + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < N / 2; i += 4)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            unsigned x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) x[k] = pairs[(i + k) * 2 + r];
            transpose_quad(x);
            if (lane / 4 + r * 8 < there)
                *(uint4 *)(to + r * 8 * step + i * 8) = uint4{x[0], x[1], x[2], x[3]};
        }
}
template <int N>
static __device__ __forceinline__ void round_bf16(unsigned (&pairs)[N / 2], const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) pairs[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
}
template <int N>
static __device__ __forceinline__ void store_rows(const float (&sum)[N], ml_bf16 *to,
                                                  long long step, int there) {
    unsigned pairs[N / 2];
    round_bf16<N>(pairs, sum);
    store_pairs(pairs, to, step, there);
}
/* Descriptor of an operand of wgmma; `block` bytes from one block of columns to the next. */
static __device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned block) {
    return 1ull << 62 | 1024ull >> 4 << 32 | (unsigned long long)(block >> 4) << 16 |
           (address & 0x3ffffu) >> 4;
}

/* Products of a chunk's decays, by logarithms: logs[n] of the absolute values of the first n but
 * zeros; counts[n] how many are zeros (times 65,536) and how many are negative; whether there is
 * one that is not to be divided by. */
struct chunk_decays {
    float logs[CHUNK + 1], values[CHUNK + 1];
    unsigned counts[CHUNK + 1], small;
};
#define SMALL 0.015625f
static __device__ __forceinline__ float decay_between(const chunk_decays &d, int after,
                                                      int before) {
    float product = exp2_approx(d.logs[after] - d.logs[before]);
    unsigned count = d.counts[after] - d.counts[before];
    return count >> 16 ? 0 : count & 1 ? -product : product;
}
/* By one warp. */
static __device__ __forceinline__ void find_decays(chunk_decays &d, const arguments &a,
                                                   long long batch, int chunk) {
    const A_TYPE *from = (const A_TYPE *)a.p[A_AT] + A_OFFSET(batch) + chunk * CHUNK * A_STEP;
    int lane = threadIdx.x % 32, there = THERE(chunk);
    float log[2];
    unsigned count[2];
    bool small = false;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int at = 2 * lane + i;
        float x = at < there ? A_LOAD(from[at * A_STEP]) : 1.0f;
        log[i] = x == 0 ? 0 : log2f(fabsf(x));
        count[i] = x == 0 ? 65536 : x < 0;
        small |= !(fabsf(x) >= SMALL);
        d.values[at] = x;
    }
    small = __ballot_sync(~0u, small) != 0;
    log[1] += log[0];
    count[1] += count[0];
    float log_sum = log[1];
    unsigned count_sum = count[1];
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        float other = __shfl_up_sync(~0u, log_sum, by);
        unsigned others = __shfl_up_sync(~0u, count_sum, by);
        if (lane >= by) log_sum += other, count_sum += others;
    }
    float log_before = __shfl_up_sync(~0u, log_sum, 1);
    d.logs[2 * lane + 2] = log_sum;
    d.counts[2 * lane + 2] = count_sum;
    d.logs[2 * lane + 1] = lane ? log_before + log[0] : log[0];
    d.counts[2 * lane + 1] = count_sum - count[1] + count[0];
    if (lane == 0) d.logs[0] = 0, d.counts[0] = 0, d.values[CHUNK] = 1, d.small = small;
}
