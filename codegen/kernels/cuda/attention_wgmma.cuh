/* Attention for Hopper (sm_90a) on warpgroup products (wgmma): bf16, heads of up to 128 (forward
 * 256).
 *
 * Warp specialization: each consumer warpgroup owns 64 rows, whose operands stay in shared memory,
 * and walks over tiles; one more warpgroup, the producer, copies tiles into a ring of slots, 16
 * bytes at a time (cp.async, so that operands may have any strides and need no tensor maps). A slot
 * has two barriers (mbarrier): full, and empty again. Consumers wait for the producer alone, so
 * that the softmax of one runs beside the products of another; within a warpgroup the scores of the
 * next tile and the products of this tile's probabilities are in flight together.
 *
 * A tile is blocks of 64 columns; a row of a block is a line of 128 bytes, whose 16-byte chunks are
 * swizzled by the row modulo 8 (wgmma's 128-byte swizzle), and is read with columns as depth
 * (queries by keys) or with rows as depth (probabilities by values). Accumulators are registers:
 * lane l of warp w of a warpgroup holds rows 16 w + l / 4 and the eighth after it, columns 2 (l %
 * 4), the next, and so on in steps of eight; rounded to bf16 they are the left operand of the next
 * product without a shuffle.
 *
 * With masks in the score function, hidden tiles are skipped, by the states of blocks of 64 by 64
 * that attention_blocks.cu writes (LISTED). */
#pragma once
#ifndef MLUA_EMBEDDED
#define GROUPS 2 /* warpgroups of 64 rows */
#define TILE 128 /* rows of a tile of the ring */
#define SLOTS 4  /* of the ring */
#define BLOCKS_PER_SM 1
#define FEWER_REGISTERS 40 /* of a producer's thread */
#define LISTED 0
#define SHOWN const bool shown = true /* does the score function show query qi key kv? */
#define LINES     /* declarations; LINE_ROWS: statements for row `row`, at its first key, */
#define LINE_ROWS /* from where SCORE steps by `step` keys; in gradients rows are keys */
#endif
#include "attention.cuh"
#include "attention_units.cuh"
#include "hopper.cuh"

#define DIM ((HEAD_DIM + 63) / 64 * 64)   /* columns of tiles: zeros behind the head's */
#define DEPTH ((HEAD_DIM + 15) / 16 * 16) /* those that scores need */
#define ROWS (GROUPS * 64)
#define ROW_BYTES (ROWS * DIM * 2)
#define TILE_BYTES (TILE * DIM * 2)
#define THREADS ((GROUPS + 1) * 128)
/* A block begins with as many registers a thread as fit; the producer leaves most of its own to the
 * others. setmaxnreg would wait forever for more than there are. */
#define MORE_REGISTERS                                                                             \
    ((65536 / (THREADS * BLOCKS_PER_SM) / 8 * 8 * (GROUPS + 1) - FEWER_REGISTERS) / GROUPS / 8 * 8)

/* Scores: 64 rows of queries by the rows of a tile of keys. */
#if TILE == 64
WGMMA_SS(product_scores, 64, 32, 32, 33, 34, 0, 0)
#else
WGMMA_SS(product_scores, 128, 64, 64, 65, 66, 0, 0)
#endif
/* Probabilities, in registers, by a tile of values, whose rows are the depth. */
#if DIM == 64
WGMMA_RS(product_values, 64, 32, 32, 33, 34, 35, 36, 37, 1)
#elif DIM == 128
WGMMA_RS(product_values, 128, 64, 64, 65, 66, 67, 68, 69, 1)
#elif DIM == 192
WGMMA_RS(product_values, 192, 96, 96, 97, 98, 99, 100, 101, 1)
#else
WGMMA_RS(product_values, 256, 128, 128, 129, 130, 131, 132, 133, 1)
#endif

/* Byte offset of a 16-byte chunk of a row in a tile. */
static __device__ __forceinline__ unsigned swizzled(int tile_rows, int row, int chunk) {
    return chunk / 8 * tile_rows * 128 + row * 128 + (chunk % 8 ^ row % 8) * 16;
}
/* Descriptor of an operand in shared memory; `block` bytes from one block of columns to the next.
 */
static __device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned block) {
    return 1ull << 62 | 1024ull >> 4 << 32 | (unsigned long long)(block >> 4) << 16 |
           (address & 0x3ffffu) >> 4;
}
/* A warpgroup starts to copy `rows` rows, of which `there` exist, to a tile from row `first` on;
 * columns behind the last one are zeros. The chunks of a thread are in one column, whole swizzles
 * apart, so that it computes the address of the first alone: the producer shares the schedulers
 * with the consumers and must issue few instructions. */
static __device__ __forceinline__ void copy_tile(unsigned tile, int tile_rows, int first, int rows,
                                                 const ml_bf16 *from, long long stride, int there) {
    const int chunks = DIM % 128 ? 8 : 16, step = 128 / chunks;
    int row = threadIdx.x % 128 / chunks, chunk = threadIdx.x % chunks;
    const ml_bf16 *own = from + row * stride + chunk * 8;
    tile += swizzled(tile_rows, first + row, chunk);
#pragma unroll
    for (int c = 0; c < DIM / 8; c += chunks) {
        const bool exists = c * 8 + chunks * 8 <= HEAD_DIM || c + chunk < HEAD_DIM / 8;
        const unsigned to = tile + c / 8 * tile_rows * 128;
        const ml_bf16 *chunk_from = exists ? own + c * 8 : from;
        if (there >= rows) {
#pragma unroll
            for (int r = 0; r < rows; r += step)
                copy_async(to + r * 128, chunk_from + r * stride, exists ? 16 : 0);
        } else {
#pragma unroll 4
            for (int r = 0; r < rows; r += step) {
                bool valid = row + r < there && exists;
                copy_async(to + r * 128, valid ? chunk_from + r * stride : from, valid ? 16 : 0);
            }
        }
    }
}
/* s = 64 rows of the left tile by all of the right one, columns as depth. */
static __device__ __forceinline__ void multiply_scores(float (&s)[TILE / 2], unsigned left,
                                                       unsigned right) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        product_scores(s, descriptor(left + k / 4 * ROWS * 128 + k % 4 * 32, 16),
                       descriptor(right + k / 4 * TILE * 128 + k % 4 * 32, 16), k > 0);
}
/* sum += p by the right tile, its rows as depth. */
static __device__ __forceinline__ void
multiply_values(float (&sum)[DIM / 2], const unsigned (&p)[TILE / 4], unsigned right) {
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
        product_values(sum, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                       descriptor(right + k * 2048, TILE * 128), 1);
}
static __device__ __forceinline__ void round_bf16(unsigned (&p)[TILE / 4],
                                                  const float (&s)[TILE / 2]) {
#pragma unroll
    for (int i = 0; i < TILE / 4; i++) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}
/* A warp's 16 rows of a sum to memory through its rows of a tile that is no longer read. */
static __device__ __forceinline__ void store_through_tile(char *tile, int row,
                                                          const float (&sum)[DIM / 2], float factor,
                                                          ml_bf16 *to, long long stride,
                                                          int there) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < DIM / 8; u++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(unsigned *)(tile + swizzled(ROWS, row + r * 8 + lane / 4, u) + lane % 4 * 4) =
                pack_bf16(sum[u * 4 + 2 * r] * factor, sum[u * 4 + 2 * r + 1] * factor);
    __syncwarp();
    for (int i = lane; i < 16 * (HEAD_DIM / 8); i += 32) {
        int r = i / (HEAD_DIM / 8), chunk = i % (HEAD_DIM / 8);
        if (r < there)
            *(uint4 *)(to + r * stride + chunk * 8) =
                *(const uint4 *)(tile + swizzled(ROWS, row + r, chunk));
    }
}
/* A position in the ring of slots. Barriers are 8 bytes: all slots' full, then all empty. */
struct ring_position {
    int slot;
    unsigned parity;
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};
static __device__ __forceinline__ void init_ring(unsigned barriers) {
    if (threadIdx.x == 0)
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(barriers + i * 8, 128);                    /* producer threads */
            barrier_init(barriers + (SLOTS + i) * 8, GROUPS * 128); /* consumer threads */
        }
    __syncthreads();
}
/* This thread no longer reads the slot. One arrival for a warp, behind __syncwarp, made the
 * gradient with heads of 64 slower by a tenth (H200), and racecheck sees no synchronization in it.
 */
static __device__ __forceinline__ void release_slot(unsigned barriers, int slot) {
    __syncwarp(); /* a warp's arrivals come together */
    barrier_arrive(barriers + (SLOTS + slot) * 8);
}
/* The producer's side. A slot is signalled full once later copies are in flight, and at the latest
 * before a wait: consumers never wait for a slot that was filled but not signalled. */
struct tile_producer {
    unsigned barriers;
    int unsignalled;
    ring_position ahead, behind;
    template <int LATER> __device__ __forceinline__ void signal() {
        copies_landed<LATER>();
        for (; unsignalled > LATER; unsignalled--, behind.next())
            barrier_arrive(barriers + behind.slot * 8);
    }
    __device__ __forceinline__ int wait_free() {
        await(barriers + (SLOTS + ahead.slot) * 8, ahead.parity ^ 1);
        return ahead.slot;
    }
    __device__ __forceinline__ void commit() {
        copies_commit();
        ahead.next();
        if (++unsignalled > 2) signal<2>();
    }
    /* For consumers, who may need all slots that are filled before they arrive. */
    __device__ __forceinline__ void await(unsigned barrier, unsigned parity) {
        if (barrier_test(barrier, parity)) return;
        signal<0>();
        barrier_wait(barrier, parity);
    }
    __device__ __forceinline__ void flush() { signal<0>(); }
};
