/* A pass over the chunks of delta_scan.cuh, in order, or for the gradient (BACKWARD) from the last
 * to the first with q for k, w for u and dy for v. A block has one state, or some of its
 * values, transposed in registers: a warpgroup owns 64 values, rows of its accumulators, and needs
 * nothing of others. Rounded to bf16 they are the left operand of the products with T W and Q, and
 * Z^T is that of the products with U, E. Operands of the next chunk are copied meanwhile.
 *
 * With SAVED the states before each chunk (by values) and Z are written for delta_scan_grad.cu.
 *
 * Where each key has a decay (PER_KEY, delta_scan_keys.cuh), operands have their decays already,
 * and the factors are those of the chunk, by key. Without a low-rank part (RANK 0) there is no Z.
 */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY delta_scan_state
#define BACKWARD 0
#define PER_KEY 0
#define RANK 1
#define WITH_Y 1
#define SAVED 0
#define TILES 1 /* of VALUES columns of v; a block has one */
#define SLOTS 2 /* chunks whose operands are in shared memory */
#define Q_AT 0
#define Q_OFFSET(batch) ((batch)*1048576LL)
#define Q_STEP 128LL
#define K_AT 1
#define K_OFFSET(batch) ((batch)*1048576LL)
#define K_STEP 128LL
#define U_AT 5
#define U_OFFSET(batch) ((batch)*1048576LL)
#define U_STEP 128LL
#define V_AT 2
#define V_OFFSET(batch) ((batch)*1048576LL)
#define V_STEP 128LL
#define Y_AT 7
#define Y_OFFSET(batch) ((batch)*1048576LL)
#define Y_STEP 128LL
#define Y_WIDE 0   /* f32 */
#define FIRST_AT 4 /* state before the pass, f32 */
#define FIRST_OFFSET(batch) ((batch)*16384LL)
#define FIRST_KEY 128LL
#define FIRST_VALUE 1LL
#define LAST_AT 8 /* after it; -1: not wanted */
#define LAST_OFFSET(batch) ((batch)*16384LL)
#define LAST_KEY 128LL
#define LAST_VALUE 1LL
#define WORK_AT 9       /* what delta_scan_prepare.cu wrote: */
#define LEFT_WORK 0LL   /* T W; T^T U */
#define Z_OF_V_WORK 0LL /* T B; E T transposed */
#define Y_OF_Z_WORK 0LL /* E */
#define Y_OF_V_WORK 0LL /* F */
#define FACTORS_WORK 0LL
#define Y_FACTOR 0 /* which factors: of Q's rows, of U's, of K's */
#define U_FACTOR 2
#define K_FACTOR 2
#define STATES_WORK 0LL
#define Z_WORK 0LL
#endif
#include "delta_scan.cuh"

enum {
    THREADS = VALUES * 2,
    KEY_TILE = KEYS * LINE,
    VALUE_TILE = VALUES * LINE,
    U_SHARED = KEY_TILE,
    K_SHARED = 2 * KEY_TILE,
    V_SHARED = 3 * KEY_TILE,
    Z_OF_V_SHARED = V_SHARED + VALUE_TILE,
    FACTORS_SHARED = Z_OF_V_SHARED + BLOCK,
    Q_SHARED = FACTORS_SHARED + 1024,
    Y_OF_Z_SHARED = Q_SHARED + KEY_TILE,
    Y_OF_V_SHARED = Y_OF_Z_SHARED + BLOCK,
    SLOT_BYTES = WITH_Y ? Y_OF_V_SHARED + BLOCK : Q_SHARED
};

/* 64 columns, which are rows of the tile, or its columns; all keys, columns of the tile. */
WGMMA_RS(product_rows, 64, 32, 32, 33, 34, 35, 36, 37, 0)
WGMMA_RS(product_columns, 64, 32, 32, 33, 34, 35, 36, 37, 1)
#if KEYS == 64
WGMMA_RS(product_keys, 64, 32, 32, 33, 34, 35, 36, 37, 1)
#else
WGMMA_RS(product_keys, 128, 64, 64, 65, 66, 67, 68, 69, 1)
#endif

static __device__ __forceinline__ void
multiply_state(float (&sum)[32], const unsigned (&state)[KEYS / 4], unsigned tile) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        product_rows(sum, state[4 * k], state[4 * k + 1], state[4 * k + 2], state[4 * k + 3],
                     descriptor(tile + k / 4 * BLOCK + k % 4 * 32, 16), k > 0);
}
static __device__ __forceinline__ void multiply_matrix(float (&sum)[32], const unsigned (&x)[16],
                                                       unsigned tile) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (BACKWARD)
            product_columns(sum, x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3],
                            descriptor(tile + k * 2048, BLOCK), 1);
        else
            product_rows(sum, x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3],
                         descriptor(tile + k * 32, 16), 1);
    }
}
static __device__ __forceinline__ void add_outer(float (&state)[KEYS / 2], const unsigned (&x)[16],
                                                 unsigned tile) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        product_keys(state, x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3],
                     descriptor(tile + k * 2048, BLOCK), 1);
}
/* Pair i of a row of 64 positions is of position pair_position(i) and the next. */
static __device__ __forceinline__ int pair_position(int i) {
    return i / 2 * 8 + threadIdx.x % 4 * 2;
}
static __device__ __forceinline__ const ml_bf16 *matrix(const arguments &a, long long begin,
                                                        long long number, int elements) {
    return (const ml_bf16 *)a.p[WORK_AT] + begin + number * elements;
}
/* The first value of the block's tile. */
static __device__ __forceinline__ int first_value() {
    return TILES > 1 ? blockIdx.x % TILES * VALUES : 0;
}
static __device__ __forceinline__ void load_slot(const arguments &a, unsigned at, long long batch,
                                                 int chunk) {
    int first = chunk * CHUNK, there = THERE(chunk);
    long long number = batch * CHUNKS + chunk;
    if (RANK) copy_matrix<KEYS, CHUNK, THREADS>(at, matrix(a, LEFT_WORK, number, CHUNK * KEYS));
    copy_rows<VALUES, CHUNK, THREADS>(at + V_SHARED, 0,
                                      (const ml_bf16 *)a.p[V_AT] + V_OFFSET(batch) +
                                          first * V_STEP + first_value(),
                                      V_STEP, there);
    if (RANK)
        copy_matrix<CHUNK, CHUNK, THREADS>(at + Z_OF_V_SHARED,
                                           matrix(a, Z_OF_V_WORK, number, CHUNK * CHUNK));
    if (threadIdx.x < 64)
        copy_async(at + FACTORS_SHARED + threadIdx.x * 16,
                   matrix(a, FACTORS_WORK, number, 512) + threadIdx.x * 8, 16);
    if (RANK)
        copy_rows<KEYS, CHUNK, THREADS>(
            at + U_SHARED, 0, (const ml_bf16 *)a.p[U_AT] + U_OFFSET(batch) + first * U_STEP, U_STEP,
            there);
    copy_rows<KEYS, CHUNK, THREADS>(at + K_SHARED, 0,
                                    (const ml_bf16 *)a.p[K_AT] + K_OFFSET(batch) + first * K_STEP,
                                    K_STEP, there);
    if (WITH_Y) {
        copy_rows<KEYS, CHUNK, THREADS>(
            at + Q_SHARED, 0, (const ml_bf16 *)a.p[Q_AT] + Q_OFFSET(batch) + first * Q_STEP, Q_STEP,
            there);
        if (RANK)
            copy_matrix<CHUNK, CHUNK, THREADS>(at + Y_OF_Z_SHARED,
                                               matrix(a, Y_OF_Z_WORK, number, CHUNK * CHUNK));
        copy_matrix<CHUNK, CHUNK, THREADS>(at + Y_OF_V_SHARED,
                                           matrix(a, Y_OF_V_WORK, number, CHUNK * CHUNK));
    }
}
/* V^T as left operands, and times factors of its positions. */
static __device__ __forceinline__ void load_values(unsigned (&v)[16], unsigned tile) {
    int lane = threadIdx.x % 32, part = threadIdx.x / 32 * 2 + lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned x[4];
        load_matrices_transposed(x,
                                 tile + swizzled<CHUNK>(k * 16 + lane / 16 * 8 + lane % 8, part));
#pragma unroll
        for (int i = 0; i < 4; i++) v[4 * k + i] = x[i];
    }
}
static __device__ __forceinline__ void scale_pairs(unsigned (&to)[16], const unsigned (&from)[16],
                                                   const float *factors) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float2 factor = *(const float2 *)(factors + pair_position(i));
        to[i] = pack_bf16(__uint_as_float(from[i] << 16) * factor.x,
                          __uint_as_float(from[i] & 0xffff0000u) * factor.y);
    }
}
static __device__ __forceinline__ void scale_sums(float (&x)[32], const float *factors) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float2 factor = *(const float2 *)(factors + pair_position(i));
        x[2 * i] *= factor.x;
        x[2 * i + 1] *= factor.y;
    }
}
/* A warp's 16 values of 64 positions, a position a row, through its columns of the tile of V. */
static __device__ __forceinline__ void store_positions(char *base, unsigned at,
                                                       const unsigned (&x)[16], ml_bf16 *to,
                                                       long long step, int there) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 4)
        store_matrices_transposed(
            at + V_SHARED +
                swizzled<CHUNK>((i / 2 + lane / 16) * 8 + lane % 8, warp * 2 + lane / 8 % 2),
            x[i], x[i + 1], x[i + 2], x[i + 3]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = i * 16 + lane / 2, part = warp * 2 + lane % 2;
        if (row < there)
            *(uint4 *)(to + row * step + part * 8) =
                *(const uint4 *)(base + V_SHARED + swizzled<CHUNK>(row, part));
    }
}
static __device__ __forceinline__ void store_y(const arguments &a, char *base, unsigned at,
                                               const float (&y)[32], long long batch, int chunk) {
    int there = THERE(chunk);
    long long first = Y_OFFSET(batch) + chunk * CHUNK * Y_STEP + first_value();
    if (!Y_WIDE) {
        unsigned pairs[16];
        round_bf16<32>(pairs, y);
        store_positions(base, at, pairs, (ml_bf16 *)a.p[Y_AT] + first, Y_STEP, there);
        return;
    }
    float *to = (float *)a.p[Y_AT] + first + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int position = pair_position(i / 2) + i % 2;
        if (position < there) to[position * Y_STEP + i / 2 % 2 * 8] = y[i];
    }
}
/* Element i of a thread's part of the state. */
static __device__ __forceinline__ long long state_offset(int i, long long key, long long value) {
    int k = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    int v = first_value() + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
    return k * key + v * value;
}
/* The decays of a chunk: here, as ptxas would wait for products in flight. */
static __device__ __forceinline__ void scale_state(float (&state)[KEYS / 2], const float *factors) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 2) {
        const float2 by = *(const float2 *)(factors + i / 4 * 8 + threadIdx.x % 4 * 2);
        state[i] *= PER_KEY ? by.x : factors[3 * CHUNK];
        state[i + 1] *= PER_KEY ? by.y : factors[3 * CHUNK];
    }
}
static __device__ __forceinline__ void pass_chunk(const arguments &a, char *base, unsigned at,
                                                  float (&state)[KEYS / 2], long long batch,
                                                  int chunk, unsigned ahead_at, int ahead) {
    const float *factors = (const float *)(base + FACTORS_SHARED);
    long long number = batch * CHUNKS + chunk;
    float z[32], y[32];
    unsigned held[KEYS / 4], v[16], pairs[16], scaled[16], z_scaled[16];
    round_bf16<KEYS / 2>(held, state);
    scale_state(state, factors);
    load_values(v, at + V_SHARED);
    wgmma_begin();
    if (RANK) {
        multiply_state(z, held, at);
        multiply_matrix(z, v, at + Z_OF_V_SHARED);
        wgmma_commit();
    }
    if (WITH_Y) {
        multiply_state(y, held, at + Q_SHARED);
        wgmma_commit();
    }
    if (ahead >= 0 && ahead < CHUNKS) load_slot(a, ahead_at, batch, ahead);
    copies_commit();
    if (SAVED)
        store_pairs(held,
                    (ml_bf16 *)matrix(a, STATES_WORK, number, TILES * VALUES * KEYS) +
                        (first_value() + threadIdx.x / 32 * 16) * KEYS,
                    KEYS, 16);
    if (!PER_KEY) scale_pairs(scaled, v, factors + K_FACTOR * CHUNK);
    if (RANK) {
        wgmma_wait<WITH_Y>();
        keep_in_registers(z);
        round_bf16<32>(pairs, z);
        if (!PER_KEY) {
            scale_sums(z, factors + U_FACTOR * CHUNK);
            round_bf16<32>(z_scaled, z);
        }
    }
    wgmma_begin();
    if (RANK) add_outer(state, PER_KEY ? pairs : z_scaled, at + U_SHARED);
    add_outer(state, PER_KEY ? v : scaled, at + K_SHARED);
    wgmma_commit();
    if (WITH_Y) {
        wgmma_wait<1>();
        keep_in_registers(y);
        keep_in_registers(held);
        if (!PER_KEY) scale_sums(y, factors + Y_FACTOR * CHUNK);
        wgmma_begin();
        if (RANK) multiply_matrix(y, pairs, at + Y_OF_Z_SHARED);
        multiply_matrix(y, v, at + Y_OF_V_SHARED);
        wgmma_commit();
    }
    if (SAVED && RANK)
        store_positions(base, at, pairs,
                        (ml_bf16 *)matrix(a, Z_WORK, number, CHUNK * TILES * VALUES) +
                            first_value(),
                        TILES * VALUES, CHUNK);
    wgmma_wait<0>();
    keep_in_registers(state);
    keep_in_registers(v);
    if (RANK) keep_in_registers(pairs);
    if (!PER_KEY) keep_in_registers(scaled);
    if (!PER_KEY && RANK) keep_in_registers(z_scaled);
    if (WITH_Y) {
        keep_in_registers(y);
        store_y(a, base, at, y, batch, chunk);
    }
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    unsigned skipped = (1024 - shared_address(shared) % 1024) % 1024;
    char *base = (char *)shared + skipped;
    unsigned at = shared_address(base);
    long long batch = blockIdx.x / TILES;
    for (int n = 0; n < SLOTS - 1; n++) {
        if (n < CHUNKS) load_slot(a, at + n * SLOT_BYTES, batch, BACKWARD ? CHUNKS - 1 - n : n);
        copies_commit();
    }
    float state[KEYS / 2];
    const float *from = (const float *)a.p[FIRST_AT] + FIRST_OFFSET(batch);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) state[i] = from[state_offset(i, FIRST_KEY, FIRST_VALUE)];
    int slot = 0, free = (SLOTS - 1) * SLOT_BYTES;
    for (int n = 0; n < CHUNKS; n++) {
        const int ahead = n + SLOTS - 1;
        copies_landed<SLOTS - 2>();
        __syncthreads();
        pass_chunk(a, base + slot, at + slot, state, batch, BACKWARD ? CHUNKS - 1 - n : n,
                   at + free, BACKWARD ? CHUNKS - 1 - ahead : ahead);
        free = slot;
        slot = slot == (SLOTS - 1) * SLOT_BYTES ? 0 : slot + SLOT_BYTES;
    }
    if (LAST_AT < 0) return;
    float *to = (float *)a.p[LAST_AT < 0 ? 0 : LAST_AT] + LAST_OFFSET(batch);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) to[state_offset(i, LAST_KEY, LAST_VALUE)] = state[i];
}
