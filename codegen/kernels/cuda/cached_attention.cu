/* CACHED_ATTENTION, for few queries (decoding), and in any dtype and strides: a block has up to
 * QUERIES queries that read one head of keys, and one of SPLITS parts of these; its warps take KEYS
 * keys in turn.
 *
 * A warp reads a key, and a value, with all lanes: lane l has columns (32 step + l) VEC + 0 ..
 * VEC-1. Its KEYS * QUERIES = 32 sums of products are exchanged so that each lane ends up with one
 * whole score, of key l / QUERIES and query l % QUERIES: score function, mask and exponential are
 * computed once each. At last the block adds up what its warps have. Where registers have room
 * (AHEAD), the values of keys are loaded with them, and the next keys before these values are
 * used. Where the blocks of all parts are a cluster (CLUSTER), they add up what they have, too.
 *
 * With FRESH the key and value of each row's one new position lie in no pool yet: they are read
 * where they are, and the block of the last part writes them to the pools. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY cached_attention
#define POINTERS 8
#define EXP ml_exp_f32
#define K_VEC 4 /* elements that a lane loads at once */
#define V_VEC 4
#define WARPS 4
#define CLUSTER 1 /* or SPLITS */
#define FRESH 0
#define INPUTS 0     /* no step writes the table and the positions of the queries */
#define INDEX_K_AT 0 /* pointers: the pools' rows for the new position, its key and value */
#define FRESH_K_AT 0
#define INDEX_V_AT 0
#define FRESH_V_AT 0
#define INDEX_K_ROW 0LL
#define INDEX_V_ROW 0LL
#define FRESH_K_ROW 0LL
#define FRESH_K_HEAD 0LL
#define FRESH_V_ROW 0LL
#define FRESH_V_HEAD 0LL
#endif
#include "cluster.cuh"
#if CLUSTER > 1
#define KEY_PARTS RANKS
#endif
#include "cached_attention_work.cuh"

#define KEYS (32 / QUERIES)
#define K_STEPS ((HEAD_DIM + 32 * K_VEC - 1) / (32 * K_VEC))
#define V_STEPS ((VALUE_DIM + 32 * V_VEC - 1) / (32 * V_VEC))
#define ALL 0xffffffffu
#define AHEAD                                                                                      \
    (KEYS * (K_STEPS * K_VEC + V_STEPS * V_VEC) * (int)sizeof(ELEMENT) <= 64 * 4 && K_VEC > 1 &&   \
     V_VEC > 1)

struct arguments {
    char *p[POINTERS];
};
template <int N> struct alignas(N * sizeof(ELEMENT)) pack { ELEMENT at[N]; };

/* Columns of a row of a pool; zeros behind the last one. */
template <int N, int WIDTH>
static __device__ __forceinline__ void load(const ELEMENT *row, long long stride, int column,
                                            float (&to)[N]) {
    if (column >= WIDTH) {
        for (int i = 0; i < N; i++) to[i] = 0;
    } else if (N > 1) {
        const pack<N> x = *(const pack<N> *)(row + column);
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = LOAD(x.at[i]);
    } else
        to[0] = LOAD(row[column * stride]);
}
/* Where a key or value lies: in the row of the pool, or, FRESH_ROW, where the new one is. */
#define FRESH_ROW (-1)
static __device__ __forceinline__ const ELEMENT *row_at(const ELEMENT *pool, const ELEMENT *fresh,
                                                        long long stride, int pool_row) {
    return FRESH && pool_row == FRESH_ROW ? fresh : pool + pool_row * stride;
}
static __device__ __forceinline__ int find_row(char *const *p, const work &w, int kv) {
    return FRESH && kv == w.start && kv < w.end ? FRESH_ROW : row_of_key(p, w, kv);
}
static __device__ __forceinline__ const ELEMENT *fresh_key(const arguments &a, const work &w) {
    return (const ELEMENT *)a.p[FRESH_K_AT] + w.row * FRESH_K_ROW + w.kv_head * FRESH_K_HEAD;
}
static __device__ __forceinline__ const ELEMENT *fresh_value(const arguments &a, const work &w) {
    return (const ELEMENT *)a.p[FRESH_V_AT] + w.row * FRESH_V_ROW + w.kv_head * FRESH_V_HEAD;
}
#if FRESH
/* The block of the last part: a row out of the pool is that of no position. */
static __device__ __forceinline__ void write_fresh(const arguments &a, const work &w) {
    const int k_row = ((const int *)a.p[INDEX_K_AT])[w.row * INDEX_K_ROW];
    const int v_row = ((const int *)a.p[INDEX_V_AT])[w.row * INDEX_V_ROW];
    ELEMENT *k = (ELEMENT *)a.p[1] + w.kv_head * K_HEAD + k_row * K_POOL;
    ELEMENT *v = (ELEMENT *)a.p[2] + w.kv_head * V_HEAD + v_row * V_POOL;
    for (int d = threadIdx.x; d < HEAD_DIM && k_row >= 0 && k_row < POOL; d += 32 * WARPS)
        k[d * K_DIM] = fresh_key(a, w)[d];
    for (int d = threadIdx.x; d < VALUE_DIM && v_row >= 0 && v_row < POOL; d += 32 * WARPS)
        v[d * V_DIM] = fresh_value(a, w)[d];
}
#endif
/* The same of KEYS rows of a pool, as they are in memory: each lane has the number of one. */
template <int N, int STEPS, int WIDTH>
static __device__ __forceinline__ void fetch(const ELEMENT *pool, const ELEMENT *fresh,
                                             long long stride, int pool_row,
                                             pack<N> (&to)[KEYS][STEPS]) {
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const ELEMENT *row = row_at(pool, fresh, stride, __shfl_sync(ALL, pool_row, j * QUERIES));
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int column = (step * 32 + threadIdx.x % 32) * N;
            if (column < WIDTH) to[j][step] = *(const pack<N> *)(row + column);
        }
    }
}
/* Of the keys that were fetched the new one, which was not there yet. */
template <int N, int STEPS, int WIDTH>
static __device__ __forceinline__ void replace_fresh(const ELEMENT *fresh, int pool_row,
                                                     pack<N> (&to)[KEYS][STEPS]) {
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        if (__shfl_sync(ALL, pool_row, j * QUERIES) != FRESH_ROW) continue;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int column = (step * 32 + threadIdx.x % 32) * N;
            if (column < WIDTH) to[j][step] = *(const pack<N> *)(fresh + column);
        }
    }
}
template <int N, int WIDTH>
static __device__ __forceinline__ void widen(const pack<N> &from, int column, float (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = column < WIDTH ? LOAD(from.at[i]) : 0;
}
static __device__ __forceinline__ void load_queries(const arguments &a, const work &w,
                                                    float (&q)[QUERIES][K_STEPS][K_VEC]) {
    const int lane = threadIdx.x % 32;
    for (int c = 0; c < QUERIES; c++) {
        const int query = w.first + c, i = query / GROUP, head = w.kv_head * GROUP + query % GROUP;
        const QUERY *from = (const QUERY *)a.p[0] + Q_OF(w.row, head, i);
        for (int step = 0; step < K_STEPS; step++)
            for (int e = 0; e < K_VEC; e++) {
                const int d = (step * 32 + lane) * K_VEC + e;
                q[c][step][e] =
                    query < ALL_QUERIES && d < HEAD_DIM ? QUERY_LOAD(from[d * Q_DIM]) * SCALE : 0;
            }
    }
}
/* With a constant width: no compiler unrolls a loop that halves it, and then sums lie in memory. */
template <int WIDTH> static __device__ __forceinline__ void exchange_halves(float (&sum)[32]) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const bool upper = threadIdx.x & WIDTH;
        const float mine = upper ? sum[i + WIDTH] : sum[i];
        const float other = upper ? sum[i] : sum[i + WIDTH];
        sum[i] = mine + __shfl_xor_sync(ALL, other, WIDTH);
    }
}
/* Lane l gets the sum over all lanes of sum[l]. */
static __device__ __forceinline__ float exchange(float (&sum)[32]) {
    exchange_halves<16>(sum);
    exchange_halves<8>(sum);
    exchange_halves<4>(sum);
    exchange_halves<2>(sum);
    exchange_halves<1>(sum);
    return sum[0];
}
/* The score of this lane: LOWEST where its query does not see its key. */
static __device__ __forceinline__ float score_key(const arguments &a, const work &w, int key,
                                                  int pool_row, float x) {
    const int lane = threadIdx.x % 32, query = w.first + lane % QUERIES, row = w.row;
    const int kv = key + lane / QUERIES, i = query / GROUP, position = w.start + i;
    const int head = w.kv_head * GROUP + query % GROUP;
    (void)a, (void)pool_row, (void)row, (void)head, (void)position;
    if (kv >= w.end || query >= ALL_QUERIES || !VISIBLE(position, kv)) return LOWEST;
    SCORE;
    return x < LOWEST ? LOWEST : x;
}
static __device__ __forceinline__ float scores(const arguments &a, const work &w, int key,
                                               int pool_row,
                                               const pack<K_VEC> (&fetched)[KEYS][K_STEPS],
                                               const float (&q)[QUERIES][K_STEPS][K_VEC]) {
    const ELEMENT *k = (const ELEMENT *)a.p[1] + w.kv_head * K_HEAD;
    const int lane = threadIdx.x % 32;
    float sum[32];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const ELEMENT *from =
            row_at(k, fresh_key(a, w), K_POOL, __shfl_sync(ALL, pool_row, j * QUERIES));
#pragma unroll
        for (int c = 0; c < QUERIES; c++) sum[j * QUERIES + c] = 0;
#pragma unroll
        for (int step = 0; step < K_STEPS; step++) {
            float x[K_VEC];
            if (AHEAD)
                widen<K_VEC, HEAD_DIM>(fetched[j][step], (step * 32 + lane) * K_VEC, x);
            else
                load<K_VEC, HEAD_DIM>(from, K_DIM, (step * 32 + lane) * K_VEC, x);
#pragma unroll
            for (int c = 0; c < QUERIES; c++)
#pragma unroll
                for (int e = 0; e < K_VEC; e++) sum[j * QUERIES + c] += q[c][step][e] * x[e];
        }
    }
    return score_key(a, w, key, pool_row, exchange(sum));
}
static __device__ __forceinline__ void add_values(const arguments &a, const work &w, int key,
                                                  int pool_row, float weight,
                                                  const pack<V_VEC> (&fetched)[KEYS][V_STEPS],
                                                  float (&out)[QUERIES][V_STEPS][V_VEC]) {
    const ELEMENT *v = (const ELEMENT *)a.p[2] + w.kv_head * V_HEAD;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const ELEMENT *from =
            row_at(v, fresh_value(a, w), V_POOL, __shfl_sync(ALL, pool_row, j * QUERIES));
        float each[QUERIES];
#pragma unroll
        for (int c = 0; c < QUERIES; c++) each[c] = __shfl_sync(ALL, weight, j * QUERIES + c);
        if (key + j >= w.end) continue; /* what lies there may be anything */
#pragma unroll
        for (int step = 0; step < V_STEPS; step++) {
            float x[V_VEC];
            if (AHEAD)
                widen<V_VEC, VALUE_DIM>(fetched[j][step], (step * 32 + lane) * V_VEC, x);
            else
                load<V_VEC, VALUE_DIM>(from, V_DIM, (step * 32 + lane) * V_VEC, x);
#pragma unroll
            for (int c = 0; c < QUERIES; c++)
#pragma unroll
                for (int e = 0; e < V_VEC; e++) out[c][step][e] += each[c] * x[e];
        }
    }
}
/* Over the lanes of one query. */
static __device__ __forceinline__ float largest_of(float x) {
    for (int d = QUERIES; d < 32; d *= 2) {
        const float y = __shfl_xor_sync(ALL, x, d);
        x = y > x ? y : x;
    }
    return x;
}
static __device__ __forceinline__ float sum_of(float x) {
    for (int d = QUERIES; d < 32; d *= 2) x += __shfl_xor_sync(ALL, x, d);
    return x;
}
#define QUERY_OF(w, c, query, head, i)                                                             \
    const int query = w.first + c, head = w.kv_head * GROUP + query % GROUP, i = query / GROUP
static __device__ __forceinline__ void write_result(const arguments &a, const work &w, int c, int d,
                                                    float sum, float out) {
    QUERY_OF(w, c, query, head, i);
    if (query < ALL_QUERIES)
        ((QUERY *)a.p[O_AT])[O_OF(w.row, head, i) + d * O_DIM] =
            QUERY_STORE(sum == 0 ? 0 : out / sum);
}
/* What the block has of a query and column, of parts in shared memory, where each warp has
 * PARTIAL_ROW numbers of each query. */
static __device__ __forceinline__ void add_warps(const float *parts, int c, int d, float &largest,
                                                 float &sum, float &out) {
    largest = LOWEST, sum = 0, out = 0;
    for (int warp = 0; warp < WARPS; warp++) {
        const float x = parts[(warp * QUERIES + c) * PARTIAL_ROW + VALUE_DIM];
        largest = x > largest ? x : largest;
    }
    for (int warp = 0; warp < WARPS; warp++) {
        const float *part = parts + (warp * QUERIES + c) * PARTIAL_ROW;
        if (part[VALUE_DIM + 1] == 0) continue; /* it has no keys */
        const float factor = EXP(part[VALUE_DIM] - largest);
        sum += part[VALUE_DIM + 1] * factor;
        out += part[d] * factor;
    }
}
#if CLUSTER > 1
/* Block r of a cluster adds up what all have of elements r * OWN, ... of its queries: they send
 * their sums, and what those are relative to, there. */
#define OWN ((QUERIES * VALUE_DIM + RANKS - 1) / RANKS)
static __device__ __forceinline__ void write_block(const arguments &a, const work &w,
                                                   float *parts) {
    float *received = parts + WARPS * QUERIES * PARTIAL_ROW; /* of each block OWN times 3 */
    cluster_wait();
    for (int at = threadIdx.x; at < QUERIES * VALUE_DIM; at += 32 * WARPS) {
        float largest, sum, out;
        add_warps(parts, at / VALUE_DIM, at % VALUE_DIM, largest, sum, out);
        float *to = received + (w.split * OWN + at % OWN) * 3;
        store_in_block(to, at / OWN, largest);
        store_in_block(to + 1, at / OWN, sum);
        store_in_block(to + 2, at / OWN, out);
    }
    cluster_sync();
    for (int i = threadIdx.x; i < OWN; i += 32 * WARPS) {
        const int at = w.split * OWN + i;
        float largest = LOWEST, sum = 0, out = 0;
        if (at >= QUERIES * VALUE_DIM) continue;
#pragma unroll
        for (int r = 0; r < RANKS; r++) {
            const float x = received[(r * OWN + i) * 3];
            largest = x > largest ? x : largest;
        }
#pragma unroll
        for (int r = 0; r < RANKS; r++) { /* a part without keys has zeros */
            const float *from = received + (r * OWN + i) * 3, factor = EXP(from[0] - largest);
            sum += from[1] * factor;
            out += from[2] * factor;
        }
        write_result(a, w, at / VALUE_DIM, at % VALUE_DIM, sum, out);
    }
}
#else
static __device__ __forceinline__ void write_block(const arguments &a, const work &w,
                                                   float *parts) {
    for (int at = threadIdx.x; at < QUERIES * VALUE_DIM; at += 32 * WARPS) {
        const int c = at / VALUE_DIM, d = at % VALUE_DIM;
        float largest, sum, out;
        add_warps(parts, c, d, largest, sum, out);
#if SPLITS > 1
        QUERY_OF(w, c, query, head, i);
        if (query >= ALL_QUERIES) continue;
        float *to = (float *)a.p[PARTIAL_AT] + PART_OF((long long)w.row, head, i, w.split);
        to[d] = out;
        if (d == 0) to[VALUE_DIM] = largest, to[VALUE_DIM + 1] = sum;
#else
        write_result(a, w, c, d, sum, out);
#endif
    }
}
#endif
extern "C" IN_CLUSTER __global__ void __launch_bounds__(32 * WARPS) ENTRY(arguments a) {
    extern __shared__ float shared[];
#if CLUSTER > 1
    if (blockIdx.x % SPLITS >= RANKS) return;
    cluster_arrive();
#endif
    /* Keys before the new one lie in pools that no other kernel of the program writes: they are
     * loaded while the kernels ahead run. */
    const bool before = FRESH && INPUTS && AHEAD;
    if (!before) kernel_begins();
    work w = find_work(a.p, before);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float q[QUERIES][K_STEPS][K_VEC], out[QUERIES][V_STEPS][V_VEC] = {};
    float largest = LOWEST, sum = 0; /* of query lane % QUERIES; sums of this lane's keys */
    const ELEMENT *k = (const ELEMENT *)a.p[1] + w.kv_head * K_HEAD,
                  *v = (const ELEMENT *)a.p[2] + w.kv_head * V_HEAD;
    pack<K_VEC> keys[KEYS][K_STEPS];
    pack<V_VEC> values[KEYS][V_STEPS];
    int first = w.begin + warp * KEYS, next_row = find_row(a.p, w, first + lane / QUERIES);
    if (AHEAD && first < w.end)
        fetch<K_VEC, K_STEPS, HEAD_DIM>(k, before ? k : fresh_key(a, w), K_POOL,
                                        before && next_row == FRESH_ROW ? 0 : next_row, keys);
    if (before) {
        if (first < w.end)
            fetch<V_VEC, V_STEPS, VALUE_DIM>(v, v, V_POOL, next_row == FRESH_ROW ? 0 : next_row,
                                             values);
        kernel_begins();
        if (((const int *)a.p[5])[w.row * LENGTH_ROW] <= w.start) { /* the row has no position */
            w.begin = w.end = 0, first = 0;
        } else if (first < w.end) {
            replace_fresh<K_VEC, K_STEPS, HEAD_DIM>(fresh_key(a, w), next_row, keys);
            replace_fresh<V_VEC, V_STEPS, VALUE_DIM>(fresh_value(a, w), next_row, values);
        }
    }
    load_queries(a, w, q);
#if FRESH
    if (w.split == KEY_PARTS - 1) write_fresh(a, w);
#endif
    for (int key = first; key < w.end; key += WARPS * KEYS) {
        const int pool_row = next_row;
        if (AHEAD && !(before && key == first))
            fetch<V_VEC, V_STEPS, VALUE_DIM>(v, fresh_value(a, w), V_POOL, pool_row, values);
        next_row = find_row(a.p, w, key + WARPS * KEYS + lane / QUERIES);
        const float score = scores(a, w, key, pool_row, keys, q);
        if (AHEAD && key + WARPS * KEYS < w.end)
            fetch<K_VEC, K_STEPS, HEAD_DIM>(k, fresh_key(a, w), K_POOL, next_row, keys);
        float next = largest_of(score);
        next = next > largest ? next : largest;
        const float base = next <= LOWEST ? 0 : next; /* a query without keys so far */
        const float rescale = EXP(largest - base), weight = EXP(score - base);
        largest = next;
        sum = sum * rescale + weight;
#pragma unroll
        for (int c = 0; c < QUERIES; c++) {
            const float factor = __shfl_sync(ALL, rescale, c);
#pragma unroll
            for (int step = 0; step < V_STEPS; step++)
#pragma unroll
                for (int e = 0; e < V_VEC; e++) out[c][step][e] *= factor;
        }
        add_values(a, w, key, pool_row, weight, values, out);
    }
    sum = sum_of(sum);
    float *parts = shared + warp * QUERIES * PARTIAL_ROW;
    for (int c = 0; c < QUERIES; c++)
        for (int step = 0; step < V_STEPS; step++)
            for (int e = 0; e < V_VEC; e++) {
                const int d = (step * 32 + lane) * V_VEC + e;
                if (d < VALUE_DIM) parts[c * PARTIAL_ROW + d] = out[c][step][e];
            }
    if (lane < QUERIES) {
        parts[lane * PARTIAL_ROW + VALUE_DIM] = largest;
        parts[lane * PARTIAL_ROW + VALUE_DIM + 1] = sum;
    }
    __syncthreads();
    write_block(a, w, shared);
}
