/* The gradients of delta_scan.cuh of one chunk after another, from the states before and after it
 * (S, dS'), Z and R. With P = [dY; R] [Z; V]^T, masked and times its decays as the scores are:
 *
 *     d[Q; W] = factors [dY; R] S^T + P [U; K]
 *     d[U; K] = factors [Z; V] dS'^T + P^T [Q; W]
 *
 * The decay of position p is in every path from a position j < p (0: S) to a position m >= p
 * (64: dS'), as D(m, p) a_p D(p-1, j); with C(m, j) the sum of the products without decays,
 *
 *     da_p = sum_{m >= p > j} D(m, p) C(m, j) D(p-1, j)
 *
 * by columns: H(p, j) = C(p, j) + a_{p+1} H(p+1, j), then a sum over j. Nothing is divided by a.
 * Where all decays of a chunk may be divided by, a_p da_p is a sum of C(m, j) D(m, j) over rows m
 * >= p less one over columns j >= p, which needs no C in memory.
 *
 * The first warpgroup has the rows of Q and U, the second those of W and K. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY delta_scan_grad
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
#define DA_STEP 1LL
#define WORK_AT 9
#define Z_WORK 0LL
#define R_WORK 0LL
#define STATES_WORK 0LL /* S and dS' of each chunk, values x keys */
#define SLOPES_WORK 0LL
#define ITEMS 16384LL /* chunks of all states */
#endif
#include "delta_scan.cuh"

enum {
    ROWS = 2 * CHUNK, /* of tiles: of Q and W, of U and K, ... */
    KEY_TILE = ROWS * KEYS * 2,
    VALUE_TILE = ROWS * VALUES * 2,
    STATE_TILE = VALUES * KEYS * 2,
    RIGHT_VALUES = VALUE_TILE,            /* Z, V; before them dY, R */
    LEFT_KEYS = 2 * VALUE_TILE,           /* Q, W */
    RIGHT_KEYS = LEFT_KEYS + KEY_TILE,    /* U, K */
    STATE_SHARED = RIGHT_KEYS + KEY_TILE, /* S, later C, F and B */
    C_BYTES = CHUNK * CHUNK * 4,          /* behind it F and B */
    STATE_ROOM = C_BYTES + ROWS * LINE,
    SLOPE_SHARED = STATE_SHARED + (STATE_TILE > STATE_ROOM ? STATE_TILE : STATE_ROOM),
    P_SHARED = SLOPE_SHARED + STATE_TILE,
    DECAYS_SHARED = P_SHARED + ROWS * ROWS * 2,
    C_STRIDE = CHUNK
};
enum { CORNERS = 4 * CHUNK }; /* eight, behind the dot products of rows */

/* By rows: both operands have the depth innermost. Keys: of a matrix with rows as depth, the left
 * one in memory or registers; of the left one's columns. */
WGMMA_SS(product_scores, 128, 64, 64, 65, 66, 0, 0)
WGMMA_SS(product_slopes, 64, 32, 32, 33, 34, 0, 0)
WGMMA_SS(product_values, 64, 32, 32, 33, 34, 1, 1)
#if KEYS == 64
WGMMA_SS(product_state, 64, 32, 32, 33, 34, 0, 1)
WGMMA_RS(product_held, 64, 32, 32, 33, 34, 35, 36, 37, 1)
WGMMA_SS(product_columns, 64, 32, 32, 33, 34, 1, 1)
#else
WGMMA_SS(product_state, 128, 64, 64, 65, 66, 0, 1)
WGMMA_RS(product_held, 128, 64, 64, 65, 66, 67, 68, 69, 1)
WGMMA_SS(product_columns, 128, 64, 64, 65, 66, 1, 1)
#endif

template <int DEPTH>
static __device__ __forceinline__ void multiply_rows(float (&sum)[64], unsigned left,
                                                     unsigned right) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        unsigned at = k / 4 * (ROWS * LINE) + k % 4 * 32;
        product_scores(sum, descriptor(left + at, 16), descriptor(right + at, 16), k > 0);
    }
}
static __device__ __forceinline__ void multiply_state(float (&sum)[KEYS / 2], unsigned left,
                                                      unsigned state) {
#pragma unroll
    for (int k = 0; k < VALUES / 16; k++)
        product_state(sum, descriptor(left + k / 4 * (ROWS * LINE) + k % 4 * 32, 16),
                      descriptor(state + k * 2048, VALUES * LINE), k > 0);
}
static __device__ __forceinline__ void multiply_held(float (&sum)[KEYS / 2],
                                                     const unsigned (&p)[32], unsigned right) {
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++)
        product_held(sum, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                     descriptor(right + k * 2048, ROWS * LINE), 1);
}
static __device__ __forceinline__ void multiply_columns(float (&sum)[KEYS / 2], unsigned left,
                                                        unsigned right) {
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++)
        product_columns(sum, descriptor(left + k * 2048, ROWS * LINE),
                        descriptor(right + k * 2048, ROWS * LINE), 1);
}
/* The first of a thread's two rows of 64, its first column. */
static __device__ __forceinline__ int own_row() {
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
}
static __device__ __forceinline__ int own_column() { return threadIdx.x % 4 * 2; }
static __device__ __forceinline__ int warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

#define COPY(tile, first, width, X)                                                                \
    copy_rows<width, ROWS, 256>(                                                                   \
        tile, first, (const ml_bf16 *)a.p[X##_AT] + X##_OFFSET(batch) + chunk * CHUNK * X##_STEP,  \
        X##_STEP, there)
/* Operands of an item, in the order in which they are wanted and their tiles become free. */
static __device__ __forceinline__ void load_values(const arguments &a, unsigned at,
                                                   long long number) {
    const int chunk = number % CHUNKS, there = THERE(chunk);
    const long long batch = number / CHUNKS;
    const ml_bf16 *work = (const ml_bf16 *)a.p[WORK_AT];
    COPY(at, 0, VALUES, DY);
    copy_rows<VALUES, ROWS, 256>(at, CHUNK, work + R_WORK + number * (CHUNK * VALUES), VALUES,
                                 CHUNK);
    copy_rows<VALUES, ROWS, 256>(at + RIGHT_VALUES, 0, work + Z_WORK + number * (CHUNK * VALUES),
                                 VALUES, CHUNK);
    COPY(at + RIGHT_VALUES, CHUNK, VALUES, V);
    copy_matrix<KEYS, VALUES, 256>(at + SLOPE_SHARED,
                                   work + SLOPES_WORK + number * (VALUES * KEYS));
}
static __device__ __forceinline__ void load_keys(const arguments &a, unsigned at,
                                                 long long number) {
    const int chunk = number % CHUNKS, there = THERE(chunk);
    const long long batch = number / CHUNKS;
    COPY(at + LEFT_KEYS, 0, KEYS, Q);
    COPY(at + LEFT_KEYS, CHUNK, KEYS, W);
    COPY(at + RIGHT_KEYS, 0, KEYS, U);
    COPY(at + RIGHT_KEYS, CHUNK, KEYS, K);
}
static __device__ __forceinline__ void load_state(const arguments &a, unsigned at,
                                                  long long number) {
    copy_matrix<KEYS, VALUES, 256>(at + STATE_SHARED, (const ml_bf16 *)a.p[WORK_AT] + STATES_WORK +
                                                          number * (VALUES * KEYS));
}
/* P and its product with the scores, of which the two halves are added; P, and the scores by K,
 * which are F and B, with decays. And sums of the products with decays, but of those without any:
 * of two rows, one of the quad's threads has; of two columns, of the warp's rows. */
struct path_sums {
    float rows[2], columns[2];
};
/* Sixteen numbers of each of the eight threads of a column of lanes: their sums, two a thread,
 * after steps of 8, 4 and 2. */
template <int STEP> static __device__ __forceinline__ void sum_columns(float (&x)[16]) {
    const bool upper = threadIdx.x % 32 / 4 & STEP / 2;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        float other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + STEP], STEP * 2);
        x[i] = (upper ? x[i + STEP] : x[i]) + other;
    }
}
static __device__ __forceinline__ path_sums decay_products(float (&p)[64], float (&score)[64],
                                                           float (&both)[32], const chunk_decays &d,
                                                           int later) {
    float columns[16] = {};
    path_sums sums = {};
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int after = own_row() + i / 2 % 2 * 8 + later;
        int before = i / 4 * 8 + own_column() + i % 2 + 1;
        float decay = before <= after ? decay_between(d, after, before) : 0;
        both[i] = before <= after ? p[i] * score[i] + p[i + 32] * score[i + 32] : 0;
        score[i + 32] = before <= after ? score[i + 32] * decay : 0;
        p[i] = before <= after ? p[i] * decay : 0;
        p[i + 32] = before <= after ? p[i + 32] * decay : 0;
        float path = before < after ? both[i] * decay : 0;
        sums.rows[i / 2 % 2] += path;
        columns[i / 4 * 2 + i % 2] += path;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sums.rows[r] += __shfl_xor_sync(~0u, sums.rows[r], 1);
        sums.rows[r] += __shfl_xor_sync(~0u, sums.rows[r], 2);
    }
    sum_columns<8>(columns);
    sum_columns<4>(columns);
    sum_columns<2>(columns);
    sums.columns[0] = columns[0], sums.columns[1] = columns[1];
    return sums;
}
template <int N>
static __device__ __forceinline__ void put_rows(char *tile, const unsigned (&p)[N]) {
    int row = threadIdx.x / 128 * CHUNK + own_row();
#pragma unroll
    for (int i = 0; i < N; i++)
        *(unsigned *)(tile + swizzled<ROWS>(row + i % 2 * 8, i / 2) + own_column() * 2) = p[i];
}
/* The dot products of a thread's two rows with rows of a tile go to `dots`, and rows are scaled. */
static __device__ __forceinline__ void take_dots(float (&sum)[KEYS / 2], const char *tile,
                                                 float *dots, float factor0, float factor1) {
    int row = own_row();
    float dot[2] = {};
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        unsigned x =
            *(const unsigned *)(tile +
                                swizzled<ROWS>(threadIdx.x / 128 * CHUNK + row + i % 2 * 8, i / 2) +
                                own_column() * 2);
        float factor = i % 2 ? factor1 : factor0;
        dot[i % 2] += sum[2 * i] * __uint_as_float(x << 16) +
                      sum[2 * i + 1] * __uint_as_float(x & 0xffff0000u);
        sum[2 * i] *= factor;
        sum[2 * i + 1] *= factor;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        dot[r] += __shfl_xor_sync(~0u, dot[r], 1);
        dot[r] += __shfl_xor_sync(~0u, dot[r], 2);
        if (threadIdx.x % 4 == 0) dots[row + r * 8] = dot[r];
    }
}
/* The sum of products of S and dS', a part a warp. */
static __device__ __forceinline__ void find_corner(const char *base, float *corners) {
    float sum = 0;
    for (int i = threadIdx.x; i < STATE_TILE / 4; i += 256) {
        unsigned x = ((const unsigned *)(base + STATE_SHARED))[i];
        unsigned y = ((const unsigned *)(base + SLOPE_SHARED))[i];
        sum += __uint_as_float(x << 16) * __uint_as_float(y << 16) +
               __uint_as_float(x & 0xffff0000u) * __uint_as_float(y & 0xffff0000u);
    }
#pragma unroll
    for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (threadIdx.x % 32 == 0) corners[threadIdx.x / 32] = sum;
}
/* C, row m - 1 and column j: one warpgroup adds after the other. */
static __device__ __forceinline__ void add_products(float *c, const float (&both)[32], int later) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int row = own_row() + i / 2 % 2 * 8 + later - 1;
        int column = i / 4 * 8 + own_column() + i % 2 + 1;
        if (column <= row) c[row * C_STRIDE + column] += both[i];
    }
}
static __device__ __forceinline__ void add_borders(float *c, const float *dots, int n) {
    const float *corners = dots + CORNERS;
    float column = n + 1 - AFTER < CHUNK ? dots[n + 1 - AFTER] : 0;
    if (n + 1 < CHUNK) column += dots[CHUNK + n + 1];
    c[n * C_STRIDE] += column;
    if (n > 0) c[(CHUNK - 1) * C_STRIDE + n] += dots[2 * CHUNK + n - 1] + dots[3 * CHUNK + n - 1];
    if (n == CHUNK - 1) {
        float corner = 0;
        for (int i = 0; i < 8; i++) corner += corners[i];
        c[n * C_STRIDE] += corner;
    }
}
/* A thread a column and a quarter of the rows; then four threads a row. */
static __device__ __forceinline__ void store_da(const arguments &a, float *c, float *carries,
                                                const chunk_decays &d, long long batch, int chunk) {
    int column = threadIdx.x % CHUNK, part = threadIdx.x / CHUNK, first = part * 16;
    float h = 0;
    for (int row = first + 15; row >= first; row--)
        h = c[row * C_STRIDE + column] + (row % 16 == 15 ? 0 : d.values[row + 1] * h);
    carries[part * CHUNK + column] = h;
    __syncthreads();
    h = 0;
    for (int later = 3; later > part; later--)
        h = carries[later * CHUNK + column] +
            (later < 3 ? decay_between(d, later * 16 + 17, later * 16 + 1) * h : 0);
    for (int row = first + 15; row >= first; row--) {
        h = c[row * C_STRIDE + column] + d.values[row + 1] * h;
        c[row * C_STRIDE + column] = column <= row ? decay_between(d, row, column) * h : 0;
    }
    __syncthreads();
    int row = threadIdx.x / 4;
    float sum = 0;
    for (int i = 0; i < CHUNK / 4; i++) sum += c[row * C_STRIDE + i * 4 + threadIdx.x % 4];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (threadIdx.x % 4 == 0 && row < THERE(chunk))
        ((DA_TYPE *)a.p[DA_AT] + DA_OFFSET(batch) + chunk * CHUNK * DA_STEP)[row * DA_STEP] =
            DA_STORE(sum);
}
/* For store_quotients: of a warpgroup's rows, of a warp's columns. */
static __device__ __forceinline__ void keep_paths(float *kept, const path_sums &sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (lane % 4 == 0) kept[warp / 4 * CHUNK + own_row() + r * 8] = sums.rows[r];
#pragma unroll
    for (int i = 0; i < 2; i++)
        kept[(2 + warp) * CHUNK + lane / 4 * 8 + own_column() + i] = sums.columns[i];
}
/* The gradients of decays that may be divided by. By one warp, two positions a lane. */
static __device__ __forceinline__ void store_quotients(const arguments &a, const float *kept,
                                                       const float *dots, const chunk_decays &d,
                                                       long long batch, int chunk) {
    const int lane = threadIdx.x % 32;
    float own[2], later[2], ends = 0, corner = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = 2 * lane + i;
        const float q = kept[at] + dots[at] * decay_between(d, at + AFTER, 0);
        const float w = kept[CHUNK + at] + dots[CHUNK + at] * decay_between(d, at, 0);
        float column =
            (dots[2 * CHUNK + at] + dots[3 * CHUNK + at]) * decay_between(d, CHUNK, at + 1);
        ends += column;
        for (int warp = 0; warp < 8; warp++) column += kept[(2 + warp) * CHUNK + at];
        own[i] = (AFTER ? q : 0) - column;
        later[i] = w + (AFTER ? 0 : q);
    }
    for (int i = 0; i < 8; i++) corner += dots[CORNERS + i];
    float sum = own[0] + later[0] + own[1] + later[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        float other = __shfl_sync(~0u, sum, (lane + step) % 32);
        sum += lane + step < 32 ? other : 0;
        ends += __shfl_xor_sync(~0u, ends, step);
    }
    ends += corner * decay_between(d, CHUNK, 0);
    DA_TYPE *to = (DA_TYPE *)a.p[DA_AT] + DA_OFFSET(batch) + chunk * CHUNK * DA_STEP;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = 2 * lane + i;
        if (i == 1) sum -= own[0] + later[0];
        if (at < THERE(chunk)) to[at * DA_STEP] = DA_STORE((sum - later[i] + ends) / d.values[at]);
    }
}
#define STORE(sum, X)                                                                              \
    store_rows<KEYS / 2>(sum,                                                                      \
                         (ml_bf16 *)a.p[X##_AT] + X##_OFFSET(batch) +                              \
                             (chunk * CHUNK + threadIdx.x / 32 % 4 * 16) * X##_STEP,               \
                         X##_STEP, THERE(chunk) - threadIdx.x / 32 % 4 * 16)
/* Rows of Q and W. */
static __device__ __forceinline__ void find_left(const arguments &a, char *base, unsigned at,
                                                 const chunk_decays &d, float *dots,
                                                 const unsigned (&p)[32], long long batch,
                                                 int chunk) {
    const int group = warpgroup(), later = group ? 0 : AFTER, half = group * CHUNK * LINE;
    float sum[KEYS / 2];
    wgmma_begin();
    multiply_state(sum, at + half, at + STATE_SHARED);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_registers(sum);
    take_dots(sum, base + LEFT_KEYS, dots + group * CHUNK, decay_between(d, own_row() + later, 0),
              decay_between(d, own_row() + 8 + later, 0));
    wgmma_begin();
    multiply_held(sum, p, at + RIGHT_KEYS);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_registers(sum);
    if (group == 0)
        STORE(sum, DQ);
    else
        STORE(sum, DW);
}
/* Rows of U and K. */
static __device__ __forceinline__ void find_right(const arguments &a, char *base, unsigned at,
                                                  const chunk_decays &d, float *dots,
                                                  long long batch, int chunk, long long next) {
    const int group = warpgroup(), half = group * CHUNK * LINE;
    float sum[KEYS / 2];
    wgmma_begin();
    multiply_state(sum, at + RIGHT_VALUES + half, at + SLOPE_SHARED);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_registers(sum);
    __syncthreads(); /* values and slopes are read no more */
    if (next < ITEMS) load_values(a, at, next);
    copies_commit();
    take_dots(sum, base + RIGHT_KEYS, dots + (2 + group) * CHUNK,
              decay_between(d, CHUNK, own_row() + 1), decay_between(d, CHUNK, own_row() + 9));
    wgmma_begin();
    multiply_columns(sum, at + P_SHARED + group * ROWS * LINE, at + LEFT_KEYS);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_registers(sum);
    if (group == 0)
        STORE(sum, DU);
    else
        STORE(sum, DK);
}
/* dV = [F; B]^T [dY; R] and what comes from dS', 64 columns a warpgroup. */
static __device__ __forceinline__ void
find_values(const arguments &a, unsigned at, const chunk_decays &d, long long batch, int chunk) {
    const int group = warpgroup(), row = threadIdx.x / 32 % 4 * 16;
    float sum[32];
    if (group * 64 >= VALUES) return;
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        product_slopes(
            sum,
            descriptor(at + RIGHT_KEYS + CHUNK * LINE + k / 4 * (ROWS * LINE) + k % 4 * 32, 16),
            descriptor(at + SLOPE_SHARED + group * BLOCK + k / 4 * (VALUES * LINE) + k % 4 * 32,
                       16),
            k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_registers(sum);
    float factor[2] = {decay_between(d, CHUNK, own_row() + 1),
                       decay_between(d, CHUNK, own_row() + 9)};
#pragma unroll
    for (int i = 0; i < 32; i++) sum[i] *= factor[i / 2 % 2];
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++)
        product_values(sum, descriptor(at + STATE_SHARED + C_BYTES + k * 2048, ROWS * LINE),
                       descriptor(at + group * (ROWS * LINE) + k * 2048, ROWS * LINE), 1);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_registers(sum);
    store_rows<32>(sum,
                   (ml_bf16 *)a.p[DV_AT] + DV_OFFSET(batch) + (chunk * CHUNK + row) * DV_STEP +
                       group * 64,
                   DV_STEP, THERE(chunk) - row);
}
static __device__ __forceinline__ path_sums find_products(char *base, unsigned at,
                                                          const chunk_decays &d, float (&both)[32],
                                                          unsigned (&pairs)[32],
                                                          unsigned (&scores)[16]) {
    const int group = warpgroup(), half = group * CHUNK * LINE;
    float p[64], score[64];
    wgmma_begin();
    multiply_rows<VALUES>(p, at + half, at + RIGHT_VALUES);
    multiply_rows<KEYS>(score, at + LEFT_KEYS + half, at + RIGHT_KEYS);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_registers(p);
    keep_in_registers(score);
    const path_sums sums = decay_products(p, score, both, d, group ? 0 : AFTER);
    round_bf16<64>(pairs, p);
#pragma unroll
    for (int i = 0; i < 16; i++) scores[i] = pack_bf16(score[2 * i + 32], score[2 * i + 33]);
    put_rows(base + P_SHARED, pairs);
    return sums;
}
/* One item; the operands of the next are copied to what is read no more. */
static __device__ __forceinline__ void find_gradients(const arguments &a, char *base, unsigned at,
                                                      long long number, long long next) {
    const int chunk = number % CHUNKS, group = warpgroup();
    const long long batch = number / CHUNKS;
    chunk_decays &d = *(chunk_decays *)(base + DECAYS_SHARED);
    float *dots = (float *)(base + DECAYS_SHARED + sizeof(chunk_decays));
    float *c = (float *)(base + STATE_SHARED);
    float both[32];
    unsigned pairs[32], scores[16];
    if (threadIdx.x < 32) find_decays(d, a, batch, chunk);
    copies_landed<1>();
    __syncthreads();
    const path_sums sums = find_products(base, at, d, both, pairs, scores);
    copies_landed<0>();
    fence_async_proxy();
    __syncthreads();
    const bool small = d.small; /* C is needed */
    find_corner(base, dots + CORNERS);
    find_left(a, base, at, d, dots, pairs, batch, chunk);
    __syncthreads(); /* S is read no more */
    put_rows(base + STATE_SHARED + C_BYTES, scores);
    if (small)
        for (int i = threadIdx.x; i < CHUNK * C_STRIDE; i += 256) c[i] = 0;
    else
        keep_paths(c, sums);
    fence_async_proxy();
    __syncthreads();
    if (small && group == 0) add_products(c, both, AFTER);
    find_values(a, at, d, batch, chunk);
    if (small) __syncthreads();
    if (small && group == 1) add_products(c, both, 0);
    find_right(a, base, at, d, dots, batch, chunk, next);
    __syncthreads(); /* keys and P are read no more */
    if (next < ITEMS) load_keys(a, at, next);
    copies_commit();
    if (small) {
        if (threadIdx.x < CHUNK) add_borders(c, dots, threadIdx.x);
        __syncthreads();
        store_da(a, c, (float *)(base + P_SHARED), d, batch, chunk);
    } else if (threadIdx.x < 32)
        store_quotients(a, c, dots, d, batch, chunk);
    __syncthreads(); /* so is C */
    if (next < ITEMS) load_state(a, at, next);
    copies_commit();
}
extern "C" __global__ void __launch_bounds__(256, 1) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    unsigned skipped = (1024 - shared_address(shared) % 1024) % 1024;
    char *base = (char *)shared + skipped;
    unsigned at = shared_address(base);
    load_values(a, at, blockIdx.x);
    load_keys(a, at, blockIdx.x);
    copies_commit();
    load_state(a, at, blockIdx.x);
    copies_commit();
    for (long long number = blockIdx.x; number < ITEMS; number += gridDim.x)
        find_gradients(a, base, at, number, number + gridDim.x);
}
