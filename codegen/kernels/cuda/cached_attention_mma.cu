/* CACHED_ATTENTION in bf16 on tensor cores (mma.sync, sm_80 and later), for many queries of a head
 * of keys: chunks of a prompt, and the heads of large groups. A warp owns WARP_TILES * 16 queries,
 * which may be of several heads. Keys and values are copied row by row as the table says, one tile
 * ahead. Shared memory: queries, then two slots of keys and values. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY cached_attention
#define POINTERS 8
#define HEAD_WIDTH 128 /* columns of tiles, in multiples of 16, or 32 above 128 */
#define VALUE_WIDTH 128
#define WARP_TILES 2 /* of 16 queries, that a warp owns; QUERIES is 64 times as many */
#define KEYS 64      /* rows of a tile of keys */
#endif
#include "attention_mma_tiles.cuh"
#include "cached_attention_work.cuh"

#define HEAD_ROW (HEAD_WIDTH + 8) /* elements from row to row of a tile */
#define VALUE_ROW (VALUE_WIDTH + 8)
#define SLOT_BYTES (KEYS * (HEAD_ROW + VALUE_ROW) * 2)
#define LOG2E 1.44269504f

struct arguments {
    char *p[POINTERS];
};

static __device__ __forceinline__ void load_queries(const arguments &a, const work &w,
                                                    unsigned tile) {
    for (int at = threadIdx.x; at < QUERIES * (HEAD_WIDTH / 8); at += 128) {
        const int c = at / (HEAD_WIDTH / 8), d = at % (HEAD_WIDTH / 8) * 8, query = w.first + c;
        const int head = w.kv_head * GROUP + query % GROUP, i = query / GROUP;
        const bool valid = query < ALL_QUERIES && d < HEAD_DIM;
        const ml_bf16 *q = (const ml_bf16 *)a.p[0];
        copy_async(tile + (c * HEAD_ROW + d) * 2, valid ? q + Q_OF(w.row, head, i) + d : q,
                   valid ? 16 : 0);
    }
}
/* Rows key .. key + KEYS - 1 of a pool, zeros behind the block's last key. */
static __device__ __forceinline__ void load_rows(const arguments &a, const work &w, int key,
                                                 const ml_bf16 *pool, long long row_stride,
                                                 int columns, int width, unsigned tile) {
    for (int at = threadIdx.x; at < KEYS * (width / 8); at += 128) {
        const int j = at / (width / 8), d = at % (width / 8) * 8;
        const bool valid = key + j < w.end && d < columns;
        const ml_bf16 *from = valid ? pool + row_of_key(a.p, w, key + j) * row_stride + d : pool;
        copy_async(tile + (j * (width + 8) + d) * 2, from, valid ? 16 : 0);
    }
}
static __device__ __forceinline__ void load_slot(const arguments &a, const work &w, int key,
                                                 unsigned slot) {
    load_rows(a, w, key, (const ml_bf16 *)a.p[1] + w.kv_head * K_HEAD, K_POOL, HEAD_DIM, HEAD_WIDTH,
              slot);
    load_rows(a, w, key, (const ml_bf16 *)a.p[2] + w.kv_head * V_HEAD, V_POOL, VALUE_DIM,
              VALUE_WIDTH, slot + KEYS * HEAD_ROW * 2);
    copies_commit();
}
/* The score of a query and a key; LOWEST where it does not see it. */
static __device__ __forceinline__ float score_key(const arguments &a, const work &w, int query,
                                                  int kv, float x) {
    const int i = query / GROUP, head = w.kv_head * GROUP + query % GROUP, row = w.row;
    const int position = w.start + i;
    (void)head, (void)row, (void)position, (void)a;
    if (kv >= w.end || query >= ALL_QUERIES || !VISIBLE(position, kv)) return LOWEST;
    if (SCORED) {
        const int pool_row = row_of_key(a.p, w, kv);
        (void)pool_row;
        SCORE;
        x = x < LOWEST ? LOWEST : x;
    }
    return x;
}
/* One tile: scores to probabilities, statistics of the queries, and the factor for what was summed.
 */
static __device__ __forceinline__ void softmax_tile(const arguments &a, const work &w, int key,
                                                    float (&s)[WARP_TILES][KEYS / 8][4],
                                                    float (&largest)[WARP_TILES][2],
                                                    float (&sum)[WARP_TILES][2],
                                                    float (&rescale)[WARP_TILES][2]) {
    const int lane = threadIdx.x % 32;
    const int first = w.start + w.first / GROUP, last = w.start + (w.first + QUERIES - 1) / GROUP;
    const bool masked = SCORED || key + KEYS > w.end || w.first + QUERIES > ALL_QUERIES ||
                        (CAUSAL && key + KEYS - 1 > first) || (WINDOW && last - key >= WINDOW);
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int query =
                w.first + threadIdx.x / 32 * (WARP_TILES * 16) + m * 16 + r * 8 + lane / 4;
            float next = largest[m][r];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float x = s[m][n][2 * r + c] * SCALE;
                    if (masked) x = score_key(a, w, query, key + lane % 4 * 2 + n * 8 + c, x);
                    s[m][n][2 * r + c] = x;
                    next = fmaxf(next, x);
                }
            next = fmaxf(next, __shfl_xor_sync(~0u, next, 1));
            next = fmaxf(next, __shfl_xor_sync(~0u, next, 2));
            const float base = next <= LOWEST ? 0 : next; /* a query without keys so far */
            rescale[m][r] = exp2_approx((largest[m][r] - base) * LOG2E);
            largest[m][r] = next;
            float more = 0;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    more += s[m][n][2 * r + c] = exp2_approx((s[m][n][2 * r + c] - base) * LOG2E);
            sum[m][r] = sum[m][r] * rescale[m][r] + more;
        }
}
/* The columns that a lane has of query m, r of its warp. */
static __device__ __forceinline__ void write_query(const arguments &a, const work &w, int m, int r,
                                                   float largest, float sum,
                                                   const float (&out)[VALUE_WIDTH / 8][4]) {
    const int lane = threadIdx.x % 32;
    const int query = w.first + threadIdx.x / 32 * (WARP_TILES * 16) + m * 16 + r * 8 + lane / 4;
    const int head = w.kv_head * GROUP + query % GROUP, i = query / GROUP;
    if (query >= ALL_QUERIES) return;
#if SPLITS > 1
    float *to = (float *)a.p[PARTIAL_AT] + PART_OF((long long)w.row, head, i, w.split);
    if (lane % 4 == 0) to[VALUE_DIM] = largest, to[VALUE_DIM + 1] = sum;
#else
    ml_bf16 *to = (ml_bf16 *)a.p[O_AT] + O_OF(w.row, head, i);
    const float inverse = sum == 0 ? 0 : 1 / sum;
    (void)largest;
#endif
#pragma unroll
    for (int n = 0; n < VALUE_WIDTH / 8; n++) {
        const int d = n * 8 + lane % 4 * 2;
        if (d >= VALUE_DIM) continue;
#if SPLITS > 1
        to[d] = out[n][2 * r], to[d + 1] = out[n][2 * r + 1];
#else
        *(unsigned *)(to + d) = pack_bf16(out[n][2 * r] * inverse, out[n][2 * r + 1] * inverse);
#endif
    }
}
extern "C" __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    kernel_begins();
    const work w = find_work(a.p);
    const unsigned queries_at = shared_address(shared),
                   slots_at = queries_at + QUERIES * HEAD_ROW * 2;
    const int warp = threadIdx.x / 32;
    load_queries(a, w, queries_at);
    load_slot(a, w, w.begin, slots_at);
    float out[WARP_TILES][VALUE_WIDTH / 8][4] = {}, largest[WARP_TILES][2], sum[WARP_TILES][2] = {};
    float rescale[WARP_TILES][2];
    for (int i = 0; i < 2 * WARP_TILES; i++) largest[i / 2][i % 2] = LOWEST;
    int slot = 0;
    for (int key = w.begin; key < w.end; key += KEYS, slot ^= 1) {
        copies_wait();
        __syncthreads();
        const unsigned keys_at = slots_at + slot * SLOT_BYTES;
        if (key + KEYS < w.end) load_slot(a, w, key + KEYS, slots_at + (slot ^ 1) * SLOT_BYTES);
        float s[WARP_TILES][KEYS / 8][4] = {};
        multiply(s, queries_at + warp * (WARP_TILES * 16) * HEAD_ROW * 2, HEAD_ROW, keys_at,
                 HEAD_ROW, HEAD_WIDTH);
        softmax_tile(a, w, key, s, largest, sum, rescale);
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
            for (int n = 0; n < VALUE_WIDTH / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[m][n][i] *= rescale[m][i / 2];
        multiply_accumulators(out, s, keys_at + KEYS * HEAD_ROW * 2, VALUE_ROW);
    }
    copies_wait(); /* where there was no key */
#pragma unroll
    for (int i = 0; i < 2 * WARP_TILES; i++) {
        float all = sum[i / 2][i % 2];
        all += __shfl_xor_sync(~0u, all, 1);
        all += __shfl_xor_sync(~0u, all, 2);
        write_query(a, w, i / 2, i % 2, largest[i / 2][i % 2], all, out[i / 2]);
    }
}
