/* The gradients of a scan with a decay for each key (delta_scan_keys.cuh), of one chunk a block,
 * from the states before and after it (S, dS'), Z and R, sub-block by sub-block: with S_b the state
 * before sub-block b and G_b the gradient of the state behind it,
 *
 *     d[q; w](p) = D_c(p) [dy; r](p) S_b + products in the sub-block
 *     d[u; k](j) = D_c(j) [z; v](j) G_b + products in the sub-block
 *
 * [dy; r] S_b come from S by a sub-block after the other: times the decays of one, by key, plus
 * what it wrote: products on tensor cores, sums in registers; [z; v] G_b likewise from dS' back. In
 * a sub-block a thread has a key: the decay of position t is in every path from a position j < t
 * (or S_b) to a state n >= t (or G_b), as D(n, t) a_t D(t-1, j); with C(n, j) the products without
 * decays
 *
 *     da_t = sum_n D(n, t) g_t(n),     g_t(n) = a_{t-1} g_{t-1}(n) + C(n, t-1)
 *
 * Nothing is divided by a decay. <S_b, G_b> by key comes from those of whole sub-blocks. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY delta_scan_keys_grad
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
#define V_AT 2
#define V_OFFSET(batch) ((batch)*1048576LL)
#define V_STEP 128LL
#define DY_AT 7
#define DY_OFFSET(batch) ((batch)*1048576LL)
#define DY_STEP 128LL
#define DQ_AT 8
#define DQ_OFFSET(batch) ((batch)*1048576LL)
#define DQ_STEP 128LL
#define DV_AT 13
#define DV_OFFSET(batch) ((batch)*1048576LL)
#define DV_STEP 128LL
#define DK_AT 9
#define DK_OFFSET(batch) ((batch)*1048576LL)
#define DK_STEP 128LL
#define DU_AT 10
#define DU_OFFSET(batch) ((batch)*1048576LL)
#define DU_STEP 128LL
#define DW_AT 11
#define DW_OFFSET(batch) ((batch)*1048576LL)
#define DW_STEP 128LL
#define DA_AT 12
#define DA_TYPE float
#define DA_STORE
#define DA_OFFSET(batch) ((batch)*8192LL)
#define DA_STEP 128LL
#define DA_KEY 1LL
#define Z_WORK 0LL
#define R_WORK 0LL
#define STATES_WORK 0LL /* S and dS' of each chunk, values x keys */
#define SLOPES_WORK 0LL
#define F_WORK 0LL
#define B_WORK 0LL
#define KD_WORK 0LL /* k with the decays to the chunk's end */
#endif
#include "delta_scan_keys.cuh"

enum {
    ROWS = 2 * CHUNK, /* of tiles of two operands */
    TILE = CHUNK * KEYS * 2,
    VALUE_TILE = ROWS * VALUES * 2,
    STATE_TILE = VALUES * KEYS * 2,
    /* at first: dY, R; V, Z; S; dS'; K; F, B */
    RIGHT_VALUES = VALUE_TILE,
    STATE_SHARED = 2 * VALUE_TILE,
    SLOPE_SHARED = STATE_SHARED + STATE_TILE,
    KEPT_SHARED = SLOPE_SHARED + STATE_TILE,
    SCORE_SHARED = KEPT_SHARED + TILE,
    FIRST_BYTES = SCORE_SHARED + ROWS * LINE,
    /* then: q, w, u, k; the same with decays, later sums; decays */
    SCALED_SHARED = 4 * TILE,
    DECAYS_SHARED = 8 * TILE,
    THEN_BYTES = DECAYS_SHARED + CHUNK * KEYS * 4,
    /* P = [dY; R] [V; Z]^T below the diagonal; in sub-blocks, four of each pair, f32 */
    P_SHARED = FIRST_BYTES > THEN_BYTES ? FIRST_BYTES : THEN_BYTES,
    PAIRS_SHARED = P_SHARED + ROWS * ROWS * 2,
    BLOCKS_SHARED = PAIRS_SHARED + SUBS * SUB * SUB * 16,
    CORNERS_SHARED = BLOCKS_SHARED + SUBS * KEYS * 4, /* <S_b, G_b>; at first parts of <S, dS'> */
    READ_SHARED = CORNERS_SHARED + SUBS * KEYS * 4, /* sums over rows: q and w, by two sub-blocks */
    WRITE_SHARED = READ_SHARED + 2 * 6 * KEYS * 4   /* k and u, by sub-block */
};

#define COPY(tile, rows, first, width, X)                                                          \
    copy_rows<width, rows, 256>(                                                                   \
        tile, first, (const ml_bf16 *)a.p[X##_AT] + X##_OFFSET(batch) + chunk * CHUNK * X##_STEP,  \
        X##_STEP, there)
static __device__ __forceinline__ void load_values(const arguments &a, unsigned at, long long batch,
                                                   int chunk, long long number) {
    const int there = THERE(chunk);
    COPY(at, ROWS, 0, VALUES, DY);
    COPY(at + RIGHT_VALUES, ROWS, 0, VALUES, V);
    copy_matrix<KEYS, VALUES, 256>(at + STATE_SHARED,
                                   work_of(a, STATES_WORK, number, VALUES * KEYS));
    copy_matrix<KEYS, VALUES, 256>(at + SLOPE_SHARED,
                                   work_of(a, SLOPES_WORK, number, VALUES * KEYS));
    copy_matrix<KEYS, CHUNK, 256>(at + KEPT_SHARED, work_of(a, KD_WORK, number, CHUNK * KEYS));
    copy_rows<CHUNK, ROWS, 256>(at + SCORE_SHARED, 0, work_of(a, F_WORK, number, CHUNK * CHUNK),
                                CHUNK, CHUNK);
#if RANK
    copy_rows<CHUNK, ROWS, 256>(at + SCORE_SHARED, CHUNK, work_of(a, B_WORK, number, CHUNK * CHUNK),
                                CHUNK, CHUNK);
    copy_rows<VALUES, ROWS, 256>(at, CHUNK, work_of(a, R_WORK, number, CHUNK * VALUES), VALUES,
                                 CHUNK);
    copy_rows<VALUES, ROWS, 256>(at + RIGHT_VALUES, CHUNK,
                                 work_of(a, Z_WORK, number, CHUNK * VALUES), VALUES, CHUNK);
#endif
    copies_commit();
    copies_wait();
    __syncthreads();
}
static __device__ __forceinline__ void load_keys(const arguments &a, char *base, long long batch,
                                                 int chunk) {
    const unsigned at = shared_address(base);
    const int there = THERE(chunk);
    COPY(at, CHUNK, 0, KEYS, Q);
    COPY(at + 3 * TILE, CHUNK, 0, KEYS, K);
#if RANK
    COPY(at + TILE, CHUNK, 0, KEYS, W);
    COPY(at + 2 * TILE, CHUNK, 0, KEYS, U);
#endif
    copies_commit();
    load_decays((float *)(base + DECAYS_SHARED), a, batch, chunk);
    copies_wait();
    __syncthreads();
}
/* A warp's 16 rows of P: below the diagonal as bf16, on it in f32: dy v, dy z, r v, r z. */
static __device__ __forceinline__ void find_products(char *base, int block, int second) {
    const unsigned at = shared_address(base);
    float p[16][4] = {};
#pragma unroll
    for (int depth = 0; depth < VALUES; depth += 16) {
        unsigned left[4], right[4];
        left_of_tile<ROWS>(left, at, second * CHUNK + block * SUB, depth);
#pragma unroll
        for (int n = 0; n < 4 * (RANK + 1); n++) {
            if (n % 4 > block) continue;
            right_of_rows<ROWS>(right, at + RIGHT_VALUES, n * SUB, depth);
            mma(p[2 * n], left, right[0], right[1]);
            mma(p[2 * n + 1], left, right[2], right[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < 8 * (RANK + 1); n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = block * SUB + lane_row() + r * 8, column = n * 8 + lane_column();
            if (n / 2 % 4 < block)
                *(unsigned *)(base + P_SHARED + swizzled<ROWS>(second * CHUNK + row, n) +
                              lane_column() * 2) = pack_bf16(p[n][2 * r], p[n][2 * r + 1]);
            if (n / 2 % 4 != block) continue;
            float *to = (float *)(base + PAIRS_SHARED) + (row * SUB + column % SUB) * 4 +
                        second * 2 + column / CHUNK;
            to[0] = p[n][2 * r], to[4] = p[n][2 * r + 1];
        }
}
/* sum = a warp's 16 rows of values by the state, values x keys. */
static __device__ __forceinline__ void multiply_state(float (&sum)[KEYS / 8][4], unsigned tile,
                                                      int row, unsigned state) {
#pragma unroll
    for (int depth = 0; depth < VALUES; depth += 16) {
        unsigned left[4], right[4];
        left_of_tile<ROWS>(left, tile, row, depth);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2) {
            right_of_tile<VALUES>(right, state, depth, n * 8);
            mma(sum[n], left, right[0], right[1]);
            mma(sum[n + 1], left, right[2], right[3]);
        }
    }
}
/* dV = [F; B]^T [dY; R] + K dS'^T: 16 positions and half of the values a warp. */
static __device__ __forceinline__ void find_values(const arguments &a, char *base, long long batch,
                                                   int chunk, int block, int half) {
    const unsigned at = shared_address(base);
    const int first = half * (VALUES / 2), row = chunk * CHUNK + block * SUB;
    float sum[VALUES / 16][4] = {};
    unsigned left[4], right[4];
#pragma unroll
    for (int n = 0; n < 4 * (RANK + 1); n++) {
        if (n % 4 < block) continue;
        left_of_columns<ROWS>(left, at + SCORE_SHARED, n * SUB, block * SUB);
#pragma unroll
        for (int i = 0; i < VALUES / 16; i += 2) {
            right_of_tile<ROWS>(right, at, n * SUB, first + i * 8);
            mma(sum[i], left, right[0], right[1]);
            mma(sum[i + 1], left, right[2], right[3]);
        }
    }
#pragma unroll
    for (int depth = 0; depth < KEYS; depth += 16) {
        left_of_tile(left, at + KEPT_SHARED, block * SUB, depth);
#pragma unroll
        for (int i = 0; i < VALUES / 16; i += 2) {
            right_of_rows<VALUES>(right, at + SLOPE_SHARED, first + i * 8, depth);
            mma(sum[i], left, right[0], right[1]);
            mma(sum[i + 1], left, right[2], right[3]);
        }
    }
    store_rows<VALUES / 4>(*(const float(*)[VALUES / 4]) sum,
                           (ml_bf16 *)a.p[DV_AT] + DV_OFFSET(batch) + row * DV_STEP + first,
                           DV_STEP, THERE(chunk) - block * SUB);
}
/* <S, dS'> by key, of a part of the values each. */
static __device__ __forceinline__ void find_corners(char *base) {
    enum { PARTS = 512 / KEYS };
    const int key = threadIdx.x % (KEYS / 2) * 2, part = threadIdx.x / (KEYS / 2);
    float low = 0, high = 0;
    for (int v = part; v < VALUES; v += PARTS) {
        const unsigned where = swizzled<VALUES>(v, key / 8) + key % 8 * 2;
        const unsigned x = *(const unsigned *)(base + STATE_SHARED + where);
        const unsigned y = *(const unsigned *)(base + SLOPE_SHARED + where);
        low += __uint_as_float(x << 16) * __uint_as_float(y << 16);
        high += __uint_as_float(x & 0xffff0000u) * __uint_as_float(y & 0xffff0000u);
    }
    float *to = (float *)(base + READ_SHARED) + part * KEYS + key;
    to[0] = low, to[1] = high;
    __syncthreads();
    float *corners = (float *)(base + CORNERS_SHARED), sum = 0;
    if (threadIdx.x >= KEYS) return;
    for (int i = 0; i < PARTS; i++) sum += ((float *)(base + READ_SHARED))[i * KEYS + threadIdx.x];
    corners[threadIdx.x] = sum;
}
/* Of each key the sum over a warp's 16 rows of sums times a tile's elements. */
static __device__ __forceinline__ void sum_rows(float *to, const float (&sum)[KEYS / 8][4],
                                                const char *tile, int row) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
        float both[2] = {};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const unsigned x = *(const unsigned *)(tile + lane_column() * 2 +
                                                   swizzled<CHUNK>(row + lane_row() + r * 8, n));
            both[0] += sum[n][2 * r] * __uint_as_float(x << 16);
            both[1] += sum[n][2 * r + 1] * __uint_as_float(x & 0xffff0000u);
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
            both[0] += __shfl_xor_sync(~0u, both[0], step);
            both[1] += __shfl_xor_sync(~0u, both[1], step);
        }
        if (lane_row() == 0) {
            to[n * 8 + lane_column()] = both[0];
            to[n * 8 + lane_column() + 1] = both[1];
        }
    }
}
static __device__ __forceinline__ void scale_columns(float (&sum)[KEYS / 8][4], const float *by) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
        const float2 factor = *(const float2 *)(by + n * 8 + lane_column());
#pragma unroll
        for (int r = 0; r < 2; r++) sum[n][2 * r] *= factor.x, sum[n][2 * r + 1] *= factor.y;
    }
}
static __device__ __forceinline__ void
add_products(float (&sum)[KEYS / 8][4], const unsigned (&left)[4], unsigned tile, int row) {
    unsigned right[4];
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) {
        right_of_tile(right, tile, row, n * 8);
        mma(sum[n], left, right[0], right[1]);
        mma(sum[n + 1], left, right[2], right[3]);
    }
}
/* [dy; r] S becomes [dy; r] S_b: 16 rows a warp. */
static __device__ __forceinline__ void advance_read(float (&sum)[KEYS / 8][4], char *base,
                                                    int block, int second) {
    const unsigned at = shared_address(base), scaled = at + SCALED_SHARED;
    const float *blocks = (const float *)(base + BLOCKS_SHARED);
    float *to = (float *)(base + READ_SHARED) + (second * 6 + block * (block - 1) / 2) * KEYS;
    for (int n = 0; n < block; n++) {
        unsigned left[4];
        sum_rows(to + n * KEYS, sum, base + SCALED_SHARED + second * TILE, block * SUB);
        scale_columns(sum, blocks + n * KEYS);
        left_of_tile<ROWS>(left, at + P_SHARED, second * CHUNK + block * SUB, n * SUB);
        add_products(sum, left, scaled + 3 * TILE, n * SUB);
        if (!RANK) continue;
        left_of_tile<ROWS>(left, at + P_SHARED, second * CHUNK + block * SUB, CHUNK + n * SUB);
        add_products(sum, left, scaled + 2 * TILE, n * SUB);
    }
}
/* [v; z] dS' becomes [v; z] G_b. */
static __device__ __forceinline__ void advance_written(float (&sum)[KEYS / 8][4], char *base,
                                                       int block, int second) {
    const unsigned at = shared_address(base), scaled = at + SCALED_SHARED;
    const float *blocks = (const float *)(base + BLOCKS_SHARED);
    float *to = (float *)(base + WRITE_SHARED) + (second * SUBS + block) * KEYS;
    sum_rows(to, sum, base + SCALED_SHARED + (3 - second) * TILE, block * SUB);
    for (int n = SUBS - 1; n > block; n--) {
        unsigned left[4];
        const int column = second * CHUNK + block * SUB;
        scale_columns(sum, blocks + n * KEYS);
        left_of_columns<ROWS>(left, at + P_SHARED, n * SUB, column);
        add_products(sum, left, scaled, n * SUB);
        if (!RANK) continue;
        left_of_columns<ROWS>(left, at + P_SHARED, CHUNK + n * SUB, column);
        add_products(sum, left, scaled + TILE, n * SUB);
    }
}
/* <S_b, G_b> by key, from <S, dS'>. */
static __device__ __forceinline__ void advance_corners(char *base) {
    const int key = threadIdx.x;
    const float *blocks = (const float *)(base + BLOCKS_SHARED) + key;
    const float *read = (const float *)(base + READ_SHARED) + key;
    const float *written = (const float *)(base + WRITE_SHARED) + key;
    float *corners = (float *)(base + CORNERS_SHARED) + key, now = corners[0];
    if (key >= KEYS) return;
    for (int b = 0; b < SUBS; b++) {
        float sum = 0, between = 1;
        for (int n = b + 1; n < SUBS; n++) {
            const int at = n * (n - 1) / 2 + b;
            sum += between * (read[at * KEYS] + (RANK ? read[(6 + at) * KEYS] : 0));
            between *= blocks[n * KEYS];
        }
        corners[b * KEYS] = sum + between * now;
        now = blocks[b * KEYS] * now + written[b * KEYS] + (RANK ? written[(SUBS + b) * KEYS] : 0);
    }
}
static __device__ __forceinline__ void keep_sums(char *tile, const float (&sum)[KEYS / 8][4],
                                                 int row) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(unsigned *)(tile + swizzled<CHUNK>(row + lane_row() + r * 8, n) + lane_column() * 2) =
                pack_bf16(sum[n][2 * r], sum[n][2 * r + 1]);
}

/* ---- A key of a sub-block, by one thread */

struct column {
    char *base;
    int key, first;
    const float4 *pairs; /* of row p and column j: dy v, dy z, r v, r z */
    __device__ __forceinline__ ml_bf16 *at(int tile, int p) const {
        return element_of(base + tile * TILE, first + p, key);
    }
    __device__ __forceinline__ float get(int tile, int p) const {
        return ml_load_bf16(*at(tile, p));
    }
    __device__ __forceinline__ float decay(int p) const {
        return ((const float *)(base + DECAYS_SHARED))[(first + p) * KEYS + key];
    }
};
enum { Q_TILE, W_TILE, U_TILE, K_TILE, SUMS }; /* sums of q, w, u, k are tiles SUMS and up */

/* C(n, j) of the state behind position n, from what reads it there; of the position before j. */
static __device__ __forceinline__ float path(const column &x, const float (&q)[SUB],
                                             const float (&w)[SUB], int n, int j, float k,
                                             float u) {
    float c = 0;
    if (AFTER || n + 1 < SUB) {
        const int row = AFTER ? n : n + 1;
        const float4 pair = x.pairs[row * SUB + j];
        c = q[row] * (pair.x * k + (RANK ? pair.y * u : 0));
    }
    if (RANK && n + 1 < SUB) {
        const float4 pair = x.pairs[(n + 1) * SUB + j];
        c += w[n + 1] * (pair.z * k + pair.w * u);
    }
    return c;
}
/* Of the positions from T to T + 3; g[n] is of the states behind them, n >= t. A loop, as code for
 * each position takes too long to compile; n >= t is asked where it is not certain. */
template <int T>
static __device__ __forceinline__ void
find_da(const arguments &a, const column &x, const float (&q)[SUB], const float (&w)[SUB],
        const float (&decay)[SUB], float (&g)[SUB], float &corner, long long batch, int chunk) {
    DA_TYPE *to = (DA_TYPE *)a.p[DA_AT] + DA_OFFSET(batch) + (chunk * CHUNK + x.first) * DA_STEP +
                  x.key * DA_KEY;
#pragma unroll 1
    for (int t = T; t < T + 4; t++) {
        const float k = x.get(K_TILE, t), u = RANK ? x.get(U_TILE, t) : 0, own = x.decay(t);
        float sum = corner;
#pragma unroll
        for (int n = SUB - 1; n >= T; n--)
            if (n >= T + 3 || n >= t) sum = g[n] + (n + 1 < SUB ? decay[n + 1] * sum : sum);
        if (chunk * CHUNK + x.first + t < LENGTH) to[t * DA_STEP] = DA_STORE(sum);
#pragma unroll
        for (int n = T + 1; n < SUB; n++)
            if (n > T + 3 || n > t) g[n] = own * g[n] + path(x, q, w, n, t, k, u);
        corner =
            own * corner + k * x.get(SUMS + K_TILE, t) + (RANK ? u * x.get(SUMS + U_TILE, t) : 0);
    }
}
static __device__ __forceinline__ void find_da(const arguments &a, const column &x, float corner,
                                               long long batch, int chunk) {
    float q[SUB], w[SUB], decay[SUB], g[SUB];
#pragma unroll
    for (int p = 0; p < SUB; p++) {
        q[p] = x.get(Q_TILE, p), decay[p] = x.decay(p);
        w[p] = RANK ? x.get(W_TILE, p) : 0;
    }
#pragma unroll
    for (int n = 0; n < SUB; n++) {
        const int row = AFTER ? n : n + 1;
        g[n] = row < SUB ? q[row] * x.get(SUMS + Q_TILE, row) : 0;
        if (RANK && n + 1 < SUB) g[n] += w[n + 1] * x.get(SUMS + W_TILE, n + 1);
    }
    find_da<0>(a, x, q, w, decay, g, corner, batch, chunk);
    find_da<4>(a, x, q, w, decay, g, corner, batch, chunk);
    find_da<8>(a, x, q, w, decay, g, corner, batch, chunk);
    find_da<12>(a, x, q, w, decay, g, corner, batch, chunk);
}
/* The other gradients, in place of the sums: what positions from P to P + 3 read. since[j] are the
 * decays behind position j, 0 where it comes later. */
struct written {
    float k[SUB], u[SUB], dk[SUB], du[SUB], since[SUB], before;
};
template <int P>
static __device__ __forceinline__ float read(const column &x, written &s, int p, float own,
                                             float sum, bool of_w) {
#pragma unroll
    for (int j = 0; j < P + 4; j++) {
        const float4 pair = x.pairs[p * SUB + j];
        const float of_v = (of_w ? pair.z : pair.x) * s.since[j];
        sum += of_v * s.k[j], s.dk[j] += of_v * own;
        if (!RANK) continue;
        const float of_z = (of_w ? pair.w : pair.y) * s.since[j];
        sum += of_z * s.u[j], s.du[j] += of_z * own;
    }
    return sum;
}
template <int P> static __device__ __forceinline__ void find_rows(const column &x, written &s) {
#pragma unroll 1
    for (int p = P; p < P + 4; p++) {
        const float q = x.get(Q_TILE, p), w = RANK ? x.get(W_TILE, p) : 0, by = x.decay(p);
        float dq = 0;
        if (RANK)
            *x.at(SUMS + W_TILE, p) =
                ml_store_bf16(read<P>(x, s, p, w, s.before * x.get(SUMS + W_TILE, p), true));
        if (!AFTER) dq = read<P>(x, s, p, q, s.before * x.get(SUMS + Q_TILE, p), false);
#pragma unroll
        for (int j = 0; j < P + 4; j++) s.since[j] = j >= P && j == p ? 1 : s.since[j] * by;
        s.before *= by;
        if (AFTER) dq = read<P>(x, s, p, q, s.before * x.get(SUMS + Q_TILE, p), false);
        *x.at(SUMS + Q_TILE, p) = ml_store_bf16(dq);
    }
}
static __device__ __forceinline__ void find_rows(const column &x) {
    written s;
    s.before = 1;
#pragma unroll
    for (int j = 0; j < SUB; j++) {
        s.k[j] = x.get(K_TILE, j), s.u[j] = RANK ? x.get(U_TILE, j) : 0;
        s.dk[j] = s.du[j] = s.since[j] = 0;
    }
    find_rows<0>(x, s);
    find_rows<4>(x, s);
    find_rows<8>(x, s);
    find_rows<12>(x, s);
#pragma unroll
    for (int j = 0; j < SUB; j++) { /* now to the sub-block's end */
        *x.at(SUMS + K_TILE, j) = ml_store_bf16(s.dk[j] + s.since[j] * x.get(SUMS + K_TILE, j));
        if (RANK)
            *x.at(SUMS + U_TILE, j) = ml_store_bf16(s.du[j] + s.since[j] * x.get(SUMS + U_TILE, j));
    }
}
#define STORE(which, X)                                                                            \
    for (int i = threadIdx.x; i < CHUNK * KEYS / 8; i += 256) {                                    \
        const int row = i / (KEYS / 8), part = i % (KEYS / 8);                                     \
        if (row < THERE(chunk))                                                                    \
            *(uint4 *)((ml_bf16 *)a.p[X##_AT] + X##_OFFSET(batch) +                                \
                       (chunk * CHUNK + row) * X##_STEP + part * 8) =                              \
                *(const uint4 *)(base + SCALED_SHARED + which * TILE +                             \
                                 swizzled<CHUNK>(row, part));                                      \
    }
extern "C" __global__ void __launch_bounds__(256, 1) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    char *base = (char *)shared;
    const unsigned at = shared_address(base);
    const int chunk = blockIdx.x % CHUNKS, block = threadIdx.x / 32 % 4, second = threadIdx.x / 128;
    const long long batch = blockIdx.x / CHUNKS, number = blockIdx.x;
    const bool works = RANK || !second;
    float read[KEYS / 8][4] = {}, written[KEYS / 8][4] = {};
    load_values(a, at, batch, chunk, number);
    if (works) {
        find_products(base, block, second);
        multiply_state(read, at, second * CHUNK + block * SUB, at + STATE_SHARED);
        multiply_state(written, at + RIGHT_VALUES, second * CHUNK + block * SUB, at + SLOPE_SHARED);
    }
    find_values(a, base, batch, chunk, block, second);
    find_corners(base);
    __syncthreads();
    load_keys(a, base, batch, chunk);
    scale_in_blocks(base + SCALED_SHARED, base, TILE, (const float *)(base + DECAYS_SHARED),
                    (float *)(base + BLOCKS_SHARED));
    __syncthreads();
    if (works) {
        advance_read(read, base, block, second);
        advance_written(written, base, block, second);
    }
    __syncthreads();
    advance_corners(base);
    if (works) {
        keep_sums(base + SCALED_SHARED + second * TILE, read, block * SUB);
        keep_sums(base + SCALED_SHARED + (3 - second) * TILE, written, block * SUB);
    }
    __syncthreads();
    for (int item = threadIdx.x; item < SUBS * KEYS; item += 256) {
        const int key = item % KEYS, sub = item / KEYS;
        const column x = {base, key, sub * SUB,
                          (const float4 *)(base + PAIRS_SHARED) + sub * SUB * SUB};
        find_da(a, x, ((const float *)(base + CORNERS_SHARED))[item], batch, chunk);
        find_rows(x);
    }
    __syncthreads();
    STORE(0, DQ)
    STORE(3, DK)
#if RANK
    STORE(1, DW)
    STORE(2, DU)
#endif
}
