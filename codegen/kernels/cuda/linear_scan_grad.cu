/* The gradient of the scan of a matrix state (linear_scan.cuh), from the last chunk to the first,
 * with G, the gradient of the state behind the chunk, in registers, and S, the state before it,
 * from memory (linear_scan_states.cu):
 *     dq = (dy v^T * D) k + d dy S^T       dk = (dy v^T * D)^T q + tail v G^T
 *     dv = (q k^T * D)^T dy + tail k G     G = d_C G + (q * d)^T dy
 *
 * The gradient of decay t is <gradient of S_t, S_{t-1}>. Of output p that is D(p, t) H(p, t), with
 * H(p, 0) = q_p^T S dy_p and H(p, t + 1) = a_t H(p, t) + (q_p k_t)(dy_p v_t); and so of G, with <G,
 * S> and k_t^T G v_t. A thread a row p, then sums over rows: nothing is divided by a decay. */
#ifndef MLUA_EMBEDDED
#define Q_AT 0
#define Q_BATCH(batch) (batch / 32 * 33554432LL + batch % 32 * 128LL)
#define Q_SEQ 4096LL
#define DY_AT 5
#define DY_BATCH(batch) (batch / 32 * 33554432LL + batch % 32 * 128LL)
#define DY_SEQ 4096LL
#define DLAST_AT 6 /* the gradient of the last state */
#define DLAST_BATCH(batch) (batch * 16384LL)
#define DLAST_KEY 128LL
#define DLAST_VALUE 1LL
#define DQ_AT 7
#define DQ_BATCH(batch) (batch / 32 * 33554432LL + batch % 32 * 128LL)
#define DQ_SEQ 4096LL
#define DK_AT 8
#define DK_BATCH(batch) (batch / 32 * 33554432LL + batch % 32 * 128LL)
#define DK_SEQ 4096LL
#define DV_AT 9
#define DV_BATCH(batch) (batch / 32 * 33554432LL + batch % 32 * 128LL)
#define DV_SEQ 4096LL
#define DA_AT 10
#define DA_BATCH(batch) (batch / 32 * 262144LL + batch % 32 * 1LL)
#define DA_SEQ 32LL
#define DS_AT 11 /* of the initial state */
#define DS_BATCH(batch) (batch * 16384LL)
#define DS_KEY 128LL
#define DS_VALUE 1LL
#define SUM_ELEMENT                                                                                \
    ml_bf16                 /* of dq and dk; of several tiles of values float, which are added up  \
                             */
#define DECAY_ELEMENT float /* of da */
#define DECAY_STORE(x) (x)
#define DQ_TILE 0LL /* from one tile of values to the next */
#define DK_TILE 0LL
#define DA_TILE 0LL
#define STATES_AT 12
#endif
#include "linear_scan.cuh"

#if KEY_HALF == 32
WGMMA_SS(product_slopes, 32, 16, 16, 17, 18, 0, 0)  /* both by columns */
WGMMA_SS(product_queries, 32, 16, 16, 17, 18, 0, 1) /* left by columns, right by rows */
WGMMA_SS(product_keys, 32, 16, 16, 17, 18, 1, 1)    /* both by rows */
#else
WGMMA_SS(product_slopes, 64, 32, 32, 33, 34, 0, 0)
WGMMA_SS(product_queries, 64, 32, 32, 33, 34, 0, 1)
WGMMA_SS(product_keys, 64, 32, 32, 33, 34, 1, 1)
#endif
#if VALUE_HALF == 32
WGMMA_SS(product_transposed, 32, 16, 16, 17, 18, 1, 1)
#else
WGMMA_SS(product_transposed, 64, 32, 32, 33, 34, 1, 1)
#endif

#define SLOT (2 * KEY_TILE + 2 * VALUE_TILE)
/* H, with 64 rows and 64 columns, is where v was if that is large enough. */
#define H_BYTES (CHUNK * CHUNK * 4)
#define H_IN_SLOT (VALUE_TILE >= H_BYTES)

struct memory {
    char slots[2][SLOT]; /* q, k, v, dy */
    char before[STATE_TILE], state[STATE_TILE];
    char scores[BLOCK], slopes[BLOCK];
    decay_table tables[2];
    float decays[4 * CHUNK];
    float query_sums[2][CHUNK], key_sums[2][CHUNK]; /* of each warpgroup's columns */
    float state_sums[COMPUTING / 32];
    float last_row[CHUNK];                           /* of H: G's */
    float row_sums[2][CHUNK], column_sums[4][CHUNK]; /* of a warpgroup, a warp: decay_both */
#if !H_IN_SLOT
    float h[CHUNK * CHUNK];
#endif
};

ML_INLINE float low(unsigned pair) { return __uint_as_float(pair << 16); }
ML_INLINE float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

/* Of each row the sum of x times a tile's elements at the same places. */
ML_INLINE void dot_rows(float *sums, const float (&x)[KEY_HALF / 2], const char *tile, int group) {
    const unsigned self = own_thread();
    int lane = self % 32, warp = self / 32 % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = warp * 16 + r * 8 + lane / 4;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < KEY_HALF / 8; n++) {
            unsigned pair =
                *(const unsigned *)(tile + swizzled(CHUNK, row, group * (KEY_HALF / 8) + n) +
                                    lane % 4 * 4);
            sum += x[n * 4 + r * 2] * low(pair) + x[n * 4 + r * 2 + 1] * high(pair);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) sums[group * CHUNK + row] = sum;
    }
}
/* Of each warp the sum of the products of two tiles' elements: <G, S>. While products are under way
 * registers that earlier ones wrote cannot be read without waiting. */
ML_INLINE void dot_states(float *sums, const char *left, const char *right) {
    const unsigned self = own_thread();
    float sum = 0;
#pragma unroll 4
    for (int i = self * 16; i < STATE_TILE; i += COMPUTING * 16) {
        uint4 x = *(const uint4 *)(left + i), y = *(const uint4 *)(right + i);
        sum += low(x.x) * low(y.x) + high(x.x) * high(y.x);
        sum += low(x.y) * low(y.y) + high(x.y) * high(y.y);
        sum += low(x.z) * low(y.z) + high(x.z) * high(y.z);
        sum += low(x.w) * low(y.w) + high(x.w) * high(y.w);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (self % 32 == 0) sums[self / 32] = sum;
}
template <int N> ML_INLINE void scale_rows(float (&x)[N], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= i / 2 % 2 ? lower : upper;
}
/* Eight numbers of each of the eight threads of a column of lanes: their sums, one a thread. */
ML_INLINE float sum_eight(float (&x)[8]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 4; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < step; i++) {
            bool upper = lane / 4 & step;
            float other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step * 4);
            x[i] = (upper ? x[i + step] : x[i]) + other;
        }
    return x[0];
}
/* s = q k^T and ds = dy v^T, times the decays between positions, as bf16 to tiles; ds becomes the
 * products of both without them, and the sums of the products with them, but of a position with
 * itself, are stored by row and by column. */
ML_INLINE void decay_both(memory &m, const float (&s)[16], float (&ds)[16], const decay_table &t,
                          int group) {
    const unsigned self = own_thread();
    int lane = self % 32, warp = self / 32 % 4;
    float rows[2] = {}, columns[8] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int block = group * 2 + half;
        float between = decay_of_blocks(t, block + 1, warp);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = r * 8 + lane / 4, column = n * 8 + lane % 4 * 2;
                int i = half * 8 + n * 4 + r * 2;
                float x = 0, y = 0;
                if (block == warp) {
                    x = t.diagonal[block][row * 17 + column];
                    y = t.diagonal[block][row * 17 + column + 1];
                } else if (block < warp) {
                    float f = t.row[warp * 16 + row] * between;
                    x = f * t.end[block * 16 + column];
                    y = f * t.end[block * 16 + column + 1];
                }
                unsigned at = swizzled(CHUNK, warp * 16 + row, block * 2 + n) + lane % 4 * 4;
                *(unsigned *)(m.scores + at) = pack_bf16(s[i] * x, s[i + 1] * y);
                *(unsigned *)(m.slopes + at) = pack_bf16(ds[i] * x, ds[i + 1] * y);
                ds[i] *= s[i], ds[i + 1] *= s[i + 1];
                if (block == warp && row == column) x = 0;
                if (block == warp && row == column + 1) y = 0;
                x *= block <= warp ? ds[i] : 0, y *= block <= warp ? ds[i + 1] : 0;
                rows[r] += x + y;
                columns[half * 4 + n * 2] += x, columns[half * 4 + n * 2 + 1] += y;
            }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows[r] += __shfl_xor_sync(~0u, rows[r], 1);
        rows[r] += __shfl_xor_sync(~0u, rows[r], 2);
        if (lane % 4 == 0) m.row_sums[group][warp * 16 + r * 8 + lane / 4] = rows[r];
    }
    int own = lane / 4; /* of columns: half, n and which of two */
    float sum = sum_eight(columns);
    m.column_sums[warp][group * 32 + own / 2 * 8 + lane % 4 * 2 + own % 2] = sum;
}
/* The gradients of a chunk's decays where all may be divided by: a_t times that of decay t is, from
 * the sums over pairs of positions around t, d_C <G, S> and what ends behind t and begins before
 * it: a sum from t on. By one warp, two positions a lane. */
ML_INLINE void divide_sums(const memory &m, const decay_table &t, const float *decays,
                           const positions<DECAY_ELEMENT> &to, int chunk) {
    const unsigned self = own_thread();
    const int lane = self % 32, block = lane / 8;
    const float before = decay_of_blocks(t, 0, block), behind = decay_of_blocks(t, block + 1, 4);
    float row[2], column[2], ends = 0, state = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = lane * 2 + i;
        row[i] = m.row_sums[0][at] + m.row_sums[1][at] +
                 before * t.row[at] * (m.query_sums[0][at] + m.query_sums[1][at]);
        column[i] = behind * t.end[at] * (m.key_sums[0][at] + m.key_sums[1][at]);
        ends += column[i];
        for (int warp = 0; warp < 4; warp++) column[i] += m.column_sums[warp][at];
    }
    for (int i = 0; i < COMPUTING / 32; i++) state += m.state_sums[i];
    float sum = row[0] + row[1] - column[0] - column[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        float other = __shfl_sync(~0u, sum, (lane + step) % 32);
        sum += lane + step < 32 ? other : 0;
        ends += __shfl_xor_sync(~0u, ends, step);
    }
    sum += decay_of_blocks(t, 0, 4) * state + ends;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = lane * 2 + i;
        if (i == 1) sum -= row[0] - column[0];
        if (chunk * CHUNK + at < LENGTH)
            *to.at(chunk * CHUNK + at) = DECAY_STORE((AFTER ? sum : sum - row[i]) / decays[at]);
    }
}

/* Where an element of H is: neither rows nor columns are in one bank. */
ML_INLINE int h_at(int row, int column) { return row * CHUNK + (column ^ row % 32); }
ML_INLINE void store_products(float *h, const float (&x)[16], int group) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int i = 0; i < 16; i++)
        h[h_at(warp * 16 + i / 2 % 2 * 8 + lane / 4,
               group * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2)] = x[i];
}
/* Rows of H times D, in place of the products, and G's. By threads 0 to 64 of those that help. */
ML_INLINE void scan_rows(float *h, memory &m, const decay_table &t, const float *decays) {
    const unsigned self = own_thread();
    enum { STEP = 8 };
    const int p = self % HELPING, own = p / 16;
    const bool last = p == CHUNK;
    float state = 0;
    if (p > CHUNK) return;
    if (last)
        for (int i = 0; i < COMPUTING / 32; i++) state += m.state_sums[i];
    else
        state = m.query_sums[0][p] + m.query_sums[1][p];
    const float within = last ? 1 : t.row[p];
    for (int first = 0; first < CHUNK && first <= p; first += STEP) {
        const int block = first / 16;
        const float factor = within * decay_of_blocks(t, block + 1, own);
        float x[STEP], decay[STEP], next[STEP]; /* loaded before anything is stored */
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            int at = first + i;
            x[i] = last ? m.key_sums[0][at] + m.key_sums[1][at] : h[h_at(p, at)];
            next[i] = decays[at];
            decay[i] = block < own ? factor * t.end[at] : t.diagonal[block][p % 16 * 17 + at % 16];
        }
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            decay[i] *= state;
            state = state * next[i] + x[i];
        }
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            if (last)
                m.last_row[first + i] = decay[i];
            else if (first + i <= p)
                h[h_at(p, first + i)] = decay[i];
        }
    }
}
ML_INLINE void sum_columns(const float *h, const memory &m, const positions<DECAY_ELEMENT> &to,
                           int chunk) {
    const unsigned self = own_thread();
    const int lane = self % 32;
    const int column = self % HELPING / 32 * 16 + lane % 16;
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < CHUNK; i += 2) {
        int row = i + lane / 16;
        if (row >= column) sum += h[h_at(row, column)];
    }
    sum += __shfl_xor_sync(~0u, sum, 16);
    sum += m.last_row[column];
    if (lane < 16 && chunk * CHUNK + column < LENGTH)
        *to.at(chunk * CHUNK + column) = DECAY_STORE(sum);
}
ML_INLINE float *h_of(memory &m, int chunk) {
#if H_IN_SLOT
    return (float *)(m.slots[chunk % 2] + 2 * KEY_TILE);
#else
    return m.h;
#endif
}

ML_INLINE void help(const arguments &a, memory &m, int batch, int tile) {
    const int first_value = tile * TILE_VALUES;
    const unsigned slots = shared_address(m.slots), before = shared_address(m.before);
    const auto q = in_order(OPERAND(const ml_bf16, Q), Q_SEQ);
    const auto k = in_order(OPERAND(const ml_bf16, K), K_SEQ);
    const auto v = in_order(OPERAND(const ml_bf16, V) + first_value, V_SEQ);
    const auto dy = in_order(OPERAND(const ml_bf16, DY) + first_value, DY_SEQ);
    const auto da = in_order(OPERAND(DECAY_ELEMENT, DA) + tile * DA_TILE, DA_SEQ);
    const char *states = a.p[STATES_AT] + (long long)blockIdx.x * CHUNKS * STATE_TILE;
    const auto copy = [&](int chunk) {
        const unsigned slot = slots + chunk % 2 * SLOT, values = slot + 2 * KEY_TILE;
        copy_chunk<KEY_WIDTH, HELPING>(slot, q, chunk, KEYS);
        copy_chunk<KEY_WIDTH, HELPING>(slot + KEY_TILE, k, chunk, KEYS);
        copy_chunk<TILE_VALUES, HELPING>(values, v, chunk, VALUES - first_value);
        copy_chunk<TILE_VALUES, HELPING>(values + VALUE_TILE, dy, chunk, VALUES - first_value);
        copies_commit();
    };
    const auto copy_state = [&](int chunk) {
        const int own = threadIdx.x % HELPING * 16;
        const char *from = states + chunk * (long long)STATE_TILE + own;
#pragma unroll 4
        for (int i = 0; i < STATE_TILE; i += HELPING * 16)
            copy_async(before + own + i, from + i, 16);
        copies_commit();
    };
    copy(CHUNKS - 1);
    copy_state(CHUNKS - 1);
    decay_ring decays = {in_order(OPERAND(const A_ELEMENT, A), A_SEQ), m.decays, 0};
    decays.begin(CHUNKS - 1, -1);
    sync_some<1, HELPING>();
    tabulate(m.tables[(CHUNKS - 1) & 1], decays.of(CHUNKS - 1));
    for (int chunk = CHUNKS - 1; chunk >= 0; chunk--) {
        copies_landed<0>();
        __syncthreads();
        if (chunk > 0) copy(chunk - 1);
        decays.next(chunk, -1);
        tabulate(m.tables[(chunk - 1) & 1], decays.of(chunk - 1));
        __syncthreads(); /* the first products are done */
        if (chunk > 0) copy_state(chunk - 1);
        const decay_table &t = m.tables[chunk & 1];
        if (t.small[0] | t.small[1]) {
            __syncthreads(); /* the products of scores and slopes are in H */
            scan_rows(h_of(m, chunk), m, t, decays.of(chunk));
            __syncwarp(); /* bar.sync takes whole warps, whose lanes end their rows unequally */
            sync_some<1, HELPING>();
            sum_columns(h_of(m, chunk), m, da, chunk);
        } else if (threadIdx.x % HELPING < 32)
            divide_sums(m, t, decays.of(chunk), da, chunk);
    }
}

ML_INLINE void compute(const arguments &a, memory &m, int batch, int tile) {
    const int first_value = tile * TILE_VALUES;
    const int group = warpgroup(), lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const unsigned slots = shared_address(m.slots), before = shared_address(m.before);
    const unsigned state_tile = shared_address(m.state);
    const unsigned scores = shared_address(m.scores), slopes = shared_address(m.slopes);
    float state[KEY_BLOCKS][VALUE_HALF / 2];
    move_state<false>(state, OPERAND(float, DLAST), DLAST_KEY, DLAST_VALUE, first_value);
    state_to_tile(m.state, state, group);
    for (int chunk = CHUNKS - 1; chunk >= 0; chunk--) {
        const unsigned q_tile = slots + chunk % 2 * SLOT, k_tile = q_tile + KEY_TILE;
        const unsigned v_tile = k_tile + KEY_TILE, dy_tile = v_tile + VALUE_TILE;
        const char *q_memory = m.slots[chunk % 2], *k_memory = q_memory + KEY_TILE;
        const decay_table &t = m.tables[chunk & 1];
        float s[16], ds[16], dq[KEY_HALF / 2], dk[KEY_HALF / 2], dv[VALUE_HALF / 2];
        unsigned left[KEY_BLOCKS][4][4];
        fence_async_proxy(); /* the state's tile */
        __syncthreads();
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < KEY_WIDTH / 16; i++)
            product_scores(s, by_columns(q_tile, BLOCK, 0, i),
                           by_columns(k_tile, BLOCK, group * 32, i), i > 0);
#pragma unroll
        for (int i = 0; i < TILE_VALUES / 16; i++)
            product_scores(ds, by_columns(dy_tile, BLOCK, 0, i),
                           by_columns(v_tile, BLOCK, group * 32, i), i > 0);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < TILE_VALUES / 16; i++)
            product_slopes(dq, by_columns(dy_tile, BLOCK, 0, i),
                           by_columns(before, STATE_BLOCK, group * KEY_HALF, i), i > 0);
#pragma unroll
        for (int i = 0; i < TILE_VALUES / 16; i++)
            product_slopes(dk, by_columns(v_tile, BLOCK, 0, i),
                           by_columns(state_tile, STATE_BLOCK, group * KEY_HALF, i), i > 0);
#pragma unroll
        for (int i = 0; i < KEY_WIDTH / 16; i++)
            product_values(dv, by_columns(k_tile, BLOCK, 0, i),
                           by_rows(state_tile, STATE_BLOCK, group * VALUE_HALF, i), i > 0);
        wgmma_commit();
        dot_states(m.state_sums, m.state, m.before);
        wgmma_wait<1>();
        keep_in_registers(s);
        keep_in_registers(ds);
        decay_both(m, s, ds, t, group);
        wgmma_wait<0>();
        keep_in_registers(dq);
        keep_in_registers(dk);
        keep_in_registers(dv);
        dot_rows(m.query_sums[0], dq, q_memory, group);
        dot_rows(m.key_sums[0], dk, k_memory, group);
        const int row = warp * 16 + lane / 4;
        float factor = decay_of_blocks(t, 0, warp);
        scale_rows(dq, factor * t.row[row], factor * t.row[row + 8]);
        factor = decay_of_blocks(t, warp + 1, 4);
        scale_rows(dk, factor * t.end[row], factor * t.end[row + 8]);
        scale_rows(dv, factor * t.end[row], factor * t.end[row + 8]);
        scale_state(state, decay_of_blocks(t, 0, 4));
        fence_async_proxy();
        __syncthreads();
        keep_in_registers(dq);
        keep_in_registers(dk);
        keep_in_registers(dv);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; i++)
            product_queries(dq, by_columns(slopes, BLOCK, 0, i),
                            by_rows(k_tile, BLOCK, group * KEY_HALF, i), 1);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 4; i++)
            product_keys(dk, by_rows(slopes, BLOCK, 0, i),
                         by_rows(q_tile, BLOCK, group * KEY_HALF, i), 1);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 4; i++)
            product_transposed(dv, by_rows(scores, BLOCK, 0, i),
                               by_rows(dy_tile, BLOCK, group * VALUE_HALF, i), 1);
        wgmma_commit();
        if (t.small[0] | t.small[1]) {
            store_products(h_of(m, chunk), ds, group);
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; b++)
                load_columns(left[b][i], q_tile, b, i, t.row, decay_of_blocks(t, 0, i));
        keep_all(state);
        keep_left(left);
        wgmma_begin();
        add_outer(state, left, dy_tile, group);
        wgmma_commit();
        wgmma_wait<3>();
        keep_in_registers(dq);
        store_chunk(dq, in_order(OPERAND(SUM_ELEMENT, DQ) + tile * DQ_TILE, DQ_SEQ), chunk,
                    group * KEY_HALF, KEYS);
        wgmma_wait<2>();
        keep_in_registers(dk);
        store_chunk(dk, in_order(OPERAND(SUM_ELEMENT, DK) + tile * DK_TILE, DK_SEQ), chunk,
                    group * KEY_HALF, KEYS);
        wgmma_wait<1>();
        keep_in_registers(dv);
        store_chunk(dv, in_order(OPERAND(ml_bf16, DV) + first_value, DV_SEQ), chunk,
                    group * VALUE_HALF, VALUES - first_value);
        wgmma_wait<0>();
        keep_all(state);
        keep_left(left);
        state_to_tile(m.state, state, group);
    }
    move_state<true>(state, OPERAND(float, DS), DS_KEY, DS_VALUE, first_value);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    memory &m = *(memory *)((char *)shared + (1024 - shared_address(shared) % 1024) % 1024);
    const int batch = blockIdx.x / TILES, tile = blockIdx.x % TILES;
    if (threadIdx.x >= COMPUTING) {
        decrease_registers<FEWER_REGISTERS>();
        help(a, m, batch, tile);
    } else {
        increase_registers<MORE_REGISTERS>();
        compute(a, m, batch, tile);
    }
}
