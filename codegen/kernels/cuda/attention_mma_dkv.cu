/* dk and dv by blocks of keys: a warp owns WARP_TILES * 16 keys, and all products are of transposed
 * tiles, so that they too stay in registers. With heads above 128 a block has one of PARTS parts of
 * their columns. Shared memory: keys, values, two slots of queries and dO, their lse and delta. */
#ifndef MLUA_EMBEDDED
#define QUERIES 64 /* rows of a slot */
#define PARTS 1
#endif
#include "attention_mma_grad.cuh"

#define KEY_BLOCKS ((KV_SEQ + KEYS - 1) / KEYS)
#define DK_WIDTH (HEAD_WIDTH / PARTS)
#define DV_WIDTH (VALUE_WIDTH / PARTS)
#define SLOT_BYTES (QUERIES * (HEAD_ROW + VALUE_ROW) * 2)

static __device__ __forceinline__ void load_slot(const arguments &a, unsigned tiles, float *rows,
                                                 int batch, int head, int query) {
    const ml_bf16 *q = ROW_OF(const ml_bf16, Q, head, query);
    const ml_bf16 *g = ROW_OF(const ml_bf16, G, head, query);
    const float *lse = HEAD_OF(const float, LSE, head);
    const float *delta = (const float *)a.p[DELTA_AT];
    int queries = SEQ - query;
    load_tile(tiles, HEAD_ROW, q, Q_SEQ, queries, HEAD_DIM, QUERIES, HEAD_WIDTH);
    load_tile(tiles + QUERIES * HEAD_ROW * 2, VALUE_ROW, g, G_SEQ, queries, VALUE_DIM, QUERIES,
              VALUE_WIDTH);
    copies_commit();
    if (threadIdx.x < QUERIES) { /* rows that do not exist, or see nothing, give probabilities 0 */
        int r = threadIdx.x;
        float x = r < queries ? lse[(query + r) * LSE_SEQ] : -ML_INF;
        rows[r] = x == -ML_INF ? 3e38f : x * 1.44269504f;
        rows[QUERIES + r] =
            r < queries ? delta[((long long)batch * HEADS + head) * SEQ + query + r] : 0;
    }
}
/* The next pair of a head and a tile of queries: of two pieces not all tiles see the keys. */
static __device__ __forceinline__ int next_step(const arguments &a, int step, int steps,
                                                int kv_head, int blocks, int first, int key) {
    step++;
#if PIECES == 2
    POSITIONS;
    int keys = KEYS;
    (void)keys;
    for (; step < steps; step++) {
        int head = kv_head * GROUP + step / blocks, query = first + step % blocks * QUERIES;
        int last_query = query + QUERIES - 1;
        (void)head, (void)last_query;
        if (!HIDDEN(query, last_query, key, keys)) break;
    }
#endif
    return step;
}
extern "C" __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    POSITIONS;
    ml_bf16 *key_tile = (ml_bf16 *)shared, *value_tile = key_tile + KEYS * HEAD_ROW;
    unsigned keys_at = shared_address(key_tile), values_at = keys_at + KEYS * HEAD_ROW * 2;
    unsigned slots_at = values_at + KEYS * VALUE_ROW * 2;
    float *rows = (float *)(value_tile + KEYS * VALUE_ROW + 2 * SLOT_BYTES / 2);
    int part = blockIdx.x % PARTS, block = blockIdx.x / PARTS;
    int key = block % KEY_BLOCKS * KEYS, kv_head = block / KEY_BLOCKS % KV_HEADS;
    int batch = block / (KEY_BLOCKS * KV_HEADS);
    int dk_first = part * DK_WIDTH, dv_first = part * DV_WIDTH;
    int warp = threadIdx.x / 32, own = key + warp * WARP_TILES * 16;
    int last_key = key + KEYS - 1 < KV_SEQ ? key + KEYS - 1 : KV_SEQ - 1, keys = KEYS;
    (void)last_key, (void)keys;
    int first = EARLIEST_QUERY(key), end = LATEST_END(last_key);
    first = first / QUERIES * QUERIES;
    for (int r = 0; r < KEYS; r += RUN_OF(KEYS)) {
        int row = KEY_ROW(key + r), there = KV_SEQ - key - r;
        load_tile(keys_at + r * HEAD_ROW * 2, HEAD_ROW, ROW_OF(const ml_bf16, K, kv_head, row),
                  K_SEQ, there, HEAD_DIM, RUN_OF(KEYS), HEAD_WIDTH);
        load_tile(values_at + r * VALUE_ROW * 2, VALUE_ROW, ROW_OF(const ml_bf16, V, kv_head, row),
                  V_SEQ, there, VALUE_DIM, RUN_OF(KEYS), VALUE_WIDTH);
    }
    copies_commit();
    int blocks = end > first ? (end - first + QUERIES - 1) / QUERIES : 0, steps = blocks * GROUP;
    int step = next_step(a, -1, steps, kv_head, blocks, first, key);
    if (step < steps)
        load_slot(a, slots_at, rows, batch, kv_head * GROUP + step / blocks,
                  first + step % blocks * QUERIES);
    float dk[WARP_TILES][DK_WIDTH / 8][4] = {}, dv[WARP_TILES][DV_WIDTH / 8][4] = {};
    for (int slot = 0, after; step < steps; step = after, slot ^= 1) {
        copies_wait();
        __syncthreads();
        int head = kv_head * GROUP + step / blocks, query = first + step % blocks * QUERIES;
        int other = slot ^ 1;
        after = next_step(a, step, steps, kv_head, blocks, first, key);
        if (after < steps)
            load_slot(a, slots_at + other * SLOT_BYTES, rows + other * 2 * QUERIES, batch,
                      kv_head * GROUP + after / blocks, first + after % blocks * QUERIES);
        unsigned queries_at = slots_at + slot * SLOT_BYTES;
        unsigned grad_outs_at = queries_at + QUERIES * HEAD_ROW * 2;
        const float *lse = rows + slot * 2 * QUERIES;
        int last_query = query + QUERIES - 1;
        (void)last_query, (void)head;
        float s[WARP_TILES][QUERIES / 8][4] = {}, dp[WARP_TILES][QUERIES / 8][4] = {};
        multiply(s, keys_at + warp * WARP_TILES * 16 * HEAD_ROW * 2, HEAD_ROW, queries_at, HEAD_ROW,
                 HEAD_WIDTH);
        multiply(dp, values_at + warp * WARP_TILES * 16 * VALUE_ROW * 2, VALUE_ROW, grad_outs_at,
                 VALUE_ROW, VALUE_WIDTH);
        bool masked = NEEDS_MASK(query, last_query, key, keys);
        slopes_of_tile<WARP_TILES, QUERIES / 8, true>(a, batch, head, own, query, masked, lse,
                                                      lse + QUERIES, s, dp);
        multiply_accumulators(dv, s, grad_outs_at + dv_first * 2, VALUE_ROW);
        multiply_accumulators(dk, dp, queries_at + dk_first * 2, HEAD_ROW);
    }
    copies_wait(); /* where there was no query */
    __syncthreads();
    key_tile += warp * WARP_TILES * 16 * HEAD_ROW, value_tile += warp * WARP_TILES * 16 * VALUE_ROW;
    spill_bf16(key_tile, HEAD_ROW, dk, SCALE);
    spill_bf16(value_tile, VALUE_ROW, dv, 1.0f);
    __syncwarp();
    int dk_columns = HEAD_DIM - dk_first < DK_WIDTH ? HEAD_DIM - dk_first : DK_WIDTH;
    int dv_columns = VALUE_DIM - dv_first < DV_WIDTH ? VALUE_DIM - dv_first : DV_WIDTH;
    store_rows(ROW_OF(ml_bf16, DK, kv_head, KEY_ROW(own)) + dk_first, DK_SEQ, key_tile, HEAD_ROW,
               KV_SEQ - own, dk_columns, WARP_TILES * 16);
    store_rows(ROW_OF(ml_bf16, DV, kv_head, KEY_ROW(own)) + dv_first, DV_SEQ, value_tile, VALUE_ROW,
               KV_SEQ - own, dv_columns, WARP_TILES * 16);
}
