/* The scan of a matrix state, S_t = a_t S_{t-1} + k_t v_t^T (keys x values), y_t = q_t^T S_t (or of
 * S_{t-1} where not AFTER), on Hopper's warpgroup products: what its kernels share.
 *
 * A block takes the positions of one batch index, and of one tile of values, in chunks of 64, with
 * the state in registers in f32. D(p, j), the product of the decays from behind position j up to p,
 * comes from sub-blocks of 16 positions: products in one, and of whole sub-blocks between two. No
 * decay is divided by, and none has a logarithm, so that 0, negative ones and those above 1 are as
 * exact as in a loop.
 *
 * Two warpgroups compute; each has half of the columns of every product. A third one copies
 * operands and computes decays, a chunk ahead. Tiles are lines of 128 bytes, 64 columns, swizzled
 * by the row modulo 8; a tile with more columns is several such blocks. Columns behind KEYS and
 * VALUES are zeros, and so are rows behind the last position. */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY linear_scan
#define POINTERS 20
#define LENGTH 8192
#define REVERSE 0
#define AFTER 1 /* is y of the state behind the position? */
#define KEYS 128
#define VALUES 128
#define TILE_VALUES 128 /* 64 or 128: columns of v of a block */
#define SLOTS 2         /* chunks of operands in shared memory */
#define BLOCKS_PER_SM 1
#define FEWER_REGISTERS 40 /* of a thread that helps */
#define K_AT 1
#define K_BATCH(batch) (batch / 32 * 33554432LL + batch % 32 * 128LL)
#define K_SEQ 4096LL
#define V_AT 2
#define V_BATCH(batch) (batch / 32 * 33554432LL + batch % 32 * 128LL)
#define V_SEQ 4096LL
#define A_AT 3
#define A_BATCH(batch) (batch / 32 * 262144LL + batch % 32 * 1LL)
#define A_SEQ 32LL
#define A_ELEMENT float
#define A_LOAD(x) (x)
#define S_AT 4 /* the initial state */
#define S_BATCH(batch) (batch * 16384LL)
#define S_KEY 128LL
#define S_VALUE 1LL
#endif
#include "wgmma.cuh"

#define CHUNK 64
#define COMPUTING 256 /* threads of the two warpgroups that compute */
#define HELPING 128   /* of a third one, in some kernels: it copies, and computes decays */
#define THREADS (COMPUTING + HELPING)
#define CHUNKS ((LENGTH + CHUNK - 1) / CHUNK)
#define TILES ((VALUES + TILE_VALUES - 1) / TILE_VALUES)
#define KEY_WIDTH ((KEYS + 63) / 64 * 64)
#define KEY_BLOCKS (KEY_WIDTH / 64)
#define KEY_HALF (KEY_WIDTH / 2) /* columns of a warpgroup */
#define VALUE_HALF (TILE_VALUES / 2)
#define KEY_TILE (CHUNK * KEY_WIDTH * 2) /* bytes */
#define VALUE_TILE (CHUNK * TILE_VALUES * 2)
#define STATE_TILE (KEY_WIDTH * TILE_VALUES * 2)
#define BLOCK (CHUNK * 128) /* bytes of 64 columns of a chunk */
#define STATE_BLOCK (KEY_WIDTH * 128)

/* A block begins with as many registers a thread as fit (attention_wgmma.cuh). */
#define MORE_REGISTERS                                                                             \
    ((65536 / (THREADS * BLOCKS_PER_SM) / 8 * 8 * 3 - FEWER_REGISTERS) / 2 / 8 * 8)

struct arguments {
    char *p[POINTERS];
};
#define OPERAND(type, X) ((type *)a.p[X##_AT] + X##_BATCH(batch))

/* Sums of 64 rows by a warpgroup's columns of the values; left rows or registers, right by rows. */
#if VALUE_HALF == 32
WGMMA_SS(product_values, 32, 16, 16, 17, 18, 0, 1)
WGMMA_RS(product_state, 32, 16, 16, 17, 18, 19, 20, 21, 1)
#else
WGMMA_SS(product_values, 64, 32, 32, 33, 34, 0, 1)
WGMMA_RS(product_state, 64, 32, 32, 33, 34, 35, 36, 37, 1)
#endif
/* 64 positions by 32. */
WGMMA_SS(product_scores, 32, 16, 16, 17, 18, 0, 0)

/* Byte offset of a 16-byte part of a row in a tile of so many rows. */
ML_INLINE unsigned swizzled(int rows, int row, int part) {
    return part / 8 * rows * 128 + row * 128 + (part % 8 ^ row % 8) * 16;
}
/* Descriptor of an operand in shared memory; `block` bytes from one block of columns to the next.
 */
ML_INLINE unsigned long long descriptor(unsigned address, unsigned block) {
    return 1ull << 62 | 1024ull >> 4 << 32 | (unsigned long long)(block >> 4) << 16 |
           (address & 0x3ffffu) >> 4;
}
/* The same, so many bytes on: bases are computed once. */
ML_INLINE unsigned long long advance(unsigned long long operand, unsigned bytes) {
    return operand >> 32 << 32 | ((unsigned)operand + bytes / 16);
}
/* Depth as columns: the k-th 16 of them, of rows from `row` on. */
ML_INLINE unsigned long long by_columns(unsigned tile, unsigned block, int row, int k) {
    return advance(descriptor(tile + row * 128, 16), k / 4 * block + k % 4 * 32);
}
/* Depth as rows: the k-th 16 of them, of columns from `column` on (a multiple of 32). */
ML_INLINE unsigned long long by_rows(unsigned tile, unsigned block, int column, int k) {
    return advance(descriptor(tile + column / 64 * block + column % 64 * 2, block), k * 2048);
}
/* Which thread this is, computed anew at each use: what follows from it, such as places in tiles,
 * is not kept in registers over the loop of chunks, where sums leave none. */
ML_INLINE unsigned own_thread() {
    unsigned own[1] = {threadIdx.x};
    keep_in_registers(own);
    return own[0];
}
ML_INLINE int warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

/* ---- Operands to shared memory */

/* Where position i is: from `first` in steps, in the order of the scan. */
template <typename T> struct positions {
    T *first;
    long long step;
    __device__ __forceinline__ T *at(int i) const { return first + i * step; }
};
template <typename T> ML_INLINE positions<T> in_order(T *from, long long stride) {
    return {from + (REVERSE ? (LENGTH - 1) * stride : 0), REVERSE ? -stride : stride};
}
/* COPIERS threads begin to copy a chunk: `columns` of WIDTH exist. */
template <int WIDTH, int COPIERS>
ML_INLINE void copy_chunk(unsigned tile, const positions<const ml_bf16> &from, int chunk,
                          int columns) {
    const unsigned self = own_thread();
    const int parts = WIDTH / 8, step = COPIERS / parts;
    const int thread = self % COPIERS, part = thread % parts;
    int row = thread / parts;
    const ml_bf16 *source = from.at(chunk * CHUNK + row) + part * 8;
    tile += swizzled(CHUNK, row, part);
#pragma unroll 4
    for (int i = 0; i < CHUNK / step; i++, row += step) {
        bool there = chunk * CHUNK + row < LENGTH && part * 8 < columns;
        copy_async(tile + i * step * 128, there ? source + i * step * from.step : from.first,
                   there ? 16 : 0);
    }
}

/* ---- Decays */

struct decay_table {
    float row[CHUNK];           /* from the sub-block's beginning to position p, or before it */
    float end[CHUNK];           /* from behind position j to the sub-block's end */
    float block[4];             /* of a sub-block */
    unsigned small[2];          /* of half of the chunk: decays that are not to be divided by */
    float diagonal[4][16 * 17]; /* D in a sub-block, rows p */
};
#define SMALL 0.015625f
/* By 128 threads, from a chunk's decays. */
ML_INLINE void tabulate(decay_table &t, const float *decays) {
    const unsigned self = own_thread();
    int at = self % 64, own = at % 16, block = at / 16;
    float a[16], product = 1;
#pragma unroll
    for (int p = 0; p < 16; p++) a[p] = decays[block * 16 + p]; /* before anything is stored */
    if (self % 128 < 64) {
#pragma unroll
        for (int p = 0; p < 16; p++) {
            float before = product;
            if (p > own) product *= a[p];
            t.diagonal[block][p * 17 + own] =
                AFTER ? (p >= own ? product : 0) : (p > own ? before : 0);
        }
        t.end[at] = product;
    } else {
        float mine = 1;
        bool small = false;
#pragma unroll
        for (int p = 0; p < 16; p++) {
            small |= p == own && !(fabsf(a[p]) >= SMALL);
            if (!AFTER && p == own) mine = product;
            product *= a[p];
            if (AFTER && p == own) mine = product;
        }
        t.row[at] = mine;
        if (own == 15) t.block[block] = product;
        unsigned all = __ballot_sync(~0u, small);
        if (at % 32 == 0) t.small[at / 32] = all;
    }
}
/* Of whole sub-blocks first .. end - 1. */
ML_INLINE float decay_of_blocks(const decay_table &t, int first, int end) {
    float product = 1;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i >= first && i < end) product *= t.block[i];
    return product;
}
/* Decays of a chunk, in the order of the scan, in a ring of four: they are stored two chunks ahead
 * and loaded three. Behind the last position they are 1. */
struct decay_ring {
    positions<const A_ELEMENT> from;
    float *ring, ahead;
    __device__ __forceinline__ float load(int chunk) const {
        int i = chunk * CHUNK + threadIdx.x % CHUNK;
        return chunk >= 0 && i < LENGTH ? A_LOAD(*from.at(i)) : 1.0f;
    }
    __device__ __forceinline__ const float *of(int chunk) const {
        return ring + (chunk & 3) * CHUNK;
    }
    __device__ __forceinline__ void store(int chunk, float x) {
        if (threadIdx.x % 128 < CHUNK) ring[(chunk & 3) * CHUNK + threadIdx.x % 128] = x;
    }
    /* The chunks are first, first + step, ... */
    __device__ __forceinline__ void begin(int first, int step) {
        store(first, load(first));
        store(first + step, load(first + step));
        ahead = load(first + 2 * step);
    }
    __device__ __forceinline__ void next(int chunk, int step) {
        store(chunk + 2 * step, ahead);
        ahead = load(chunk + 3 * step);
    }
};

/* ---- Registers */

ML_INLINE unsigned scale_pair(unsigned pair, float low, float high) {
    return pack_bf16(__uint_as_float(pair << 16) * low, __uint_as_float(pair & 0xffff0000u) * high);
}
/* The left operand of 64 columns by 16 rows, the k-th, of a tile: columns as rows, each row times
 * its factor from the table, by the sub-block's `factor`. */
ML_INLINE void load_columns(unsigned (&x)[4], unsigned tile, int block, int k, const float *factors,
                            float factor) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int row = k * 16 + lane / 16 * 8 + lane % 8;
    load_matrices_transposed(x, tile + swizzled(CHUNK, row, block * 8 + warp * 2 + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 f = *(const float2 *)(factors + k * 16 + i / 2 * 8 + lane % 4 * 2);
        x[i] = scale_pair(x[i], f.x * factor, f.y * factor);
    }
}
/* sum += left (in registers) by a chunk of values, positions as depth. */
ML_INLINE void add_outer(float (&sum)[KEY_BLOCKS][VALUE_HALF / 2],
                         const unsigned (&left)[KEY_BLOCKS][4][4], unsigned values, int group) {
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int m = 0; m < KEY_BLOCKS; m++)
            product_state(sum[m], left[m][k][0], left[m][k][1], left[m][k][2], left[m][k][3],
                          by_rows(values, BLOCK, group * VALUE_HALF, k), 1);
}
template <int N> ML_INLINE void keep_all(float (&x)[KEY_BLOCKS][N]) {
#pragma unroll
    for (int m = 0; m < KEY_BLOCKS; m++) keep_in_registers(x[m]);
}
ML_INLINE void keep_left(unsigned (&x)[KEY_BLOCKS][4][4]) {
#pragma unroll
    for (int m = 0; m < KEY_BLOCKS; m++)
#pragma unroll
        for (int k = 0; k < 4; k++) keep_in_registers(x[m][k]);
}
ML_INLINE void scale_state(float (&state)[KEY_BLOCKS][VALUE_HALF / 2], float factor) {
#pragma unroll
    for (int m = 0; m < KEY_BLOCKS; m++)
#pragma unroll
        for (int i = 0; i < VALUE_HALF / 2; i++) state[m][i] *= factor;
}
/* The state in f32, from or to memory. */
template <bool STORE>
ML_INLINE void move_state(float (&state)[KEY_BLOCKS][VALUE_HALF / 2], float *memory,
                          long long key_stride, long long value_stride, int first_value) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    first_value += warpgroup() * VALUE_HALF + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < KEY_BLOCKS; m++)
#pragma unroll
        for (int i = 0; i < VALUE_HALF / 2; i++) {
            int key = m * 64 + warp * 16 + i / 2 % 2 * 8 + lane / 4;
            int value = first_value + i / 4 * 8 + i % 2;
            bool there = key < KEYS && value < VALUES;
            float *at = memory + (there ? key * key_stride + value * value_stride : 0);
            if (STORE) {
                if (there) *at = state[m][i];
            } else
                state[m][i] = there ? *at : 0.0f;
        }
}
/* As bf16 to a tile, rows by key. */
ML_INLINE void state_to_tile(char *tile, const float (&state)[KEY_BLOCKS][VALUE_HALF / 2],
                             int group) {
    const unsigned self = own_thread();
    int lane = self % 32, warp = self / 32 % 4;
#pragma unroll
    for (int m = 0; m < KEY_BLOCKS; m++)
#pragma unroll
        for (int i = 0; i < VALUE_HALF / 2; i += 2) {
            int row = m * 64 + warp * 16 + i / 2 % 2 * 8 + lane / 4;
            int part = group * (VALUE_HALF / 8) + i / 4;
            *(unsigned *)(tile + swizzled(KEY_WIDTH, row, part) + lane % 4 * 4) =
                pack_bf16(state[m][i], state[m][i + 1]);
        }
}
/* Four threads of a row, with four times two columns of eight each, exchange: each gets eight. */
ML_INLINE void transpose_quad(unsigned (&x)[4]) {
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
/* A warpgroup's columns, from `column` on, of 64 positions of a sum to memory, 16 bytes a thread;
 * `columns` of them exist. */
template <int N>
ML_INLINE void store_chunk(const float (&sum)[N], const positions<ml_bf16> &to, int chunk,
                           int column, int columns) {
    int lane = threadIdx.x % 32, row = chunk * CHUNK + threadIdx.x / 32 % 4 * 16 + lane / 4;
    column += lane % 4 * 8;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < N / 4; i += 4) {
            unsigned x[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                x[k] = pack_bf16(sum[(i + k) * 4 + r * 2], sum[(i + k) * 4 + r * 2 + 1]);
            transpose_quad(x);
            if (row + r * 8 < LENGTH && column + i * 8 < columns)
                *(uint4 *)(to.at(row + r * 8) + column + i * 8) = uint4{x[0], x[1], x[2], x[3]};
        }
}
template <int N>
ML_INLINE void store_chunk(const float (&sum)[N], const positions<float> &to, int chunk, int column,
                           int columns) {
    int lane = threadIdx.x % 32, row = chunk * CHUNK + threadIdx.x / 32 % 4 * 16 + lane / 4;
    column += lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i += 2)
        if (row + i / 2 % 2 * 8 < LENGTH && column + i / 4 * 8 < columns)
            *(float2 *)(to.at(row + i / 2 % 2 * 8) + column + i / 4 * 8) =
                make_float2(sum[i], sum[i + 1]);
}
