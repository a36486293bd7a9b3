/* dq by blocks of queries, and delta, the row sums of dO o, for the next kernel. Shared memory:
 * queries, dO, two slots of keys and values, statistics. */
#include "attention_mma_grad.cuh"
#include "attention_mma_keys.cuh"

/* delta of the block's rows, from do in shared memory and o; rows without keys get a large lse. */
static __device__ __forceinline__ void load_statistics(const arguments &a, int batch, int head,
                                                       int query, const ml_bf16 *grad_out,
                                                       float *lse, float *delta) {
    const ml_bf16 *o = HEAD_OF(const ml_bf16, O, head);
    const float *from = HEAD_OF(const float, LSE, head);
    float *deltas = (float *)a.p[DELTA_AT] + ((long long)batch * HEADS + head) * SEQ;
    for (int r = threadIdx.x / 16; r < QUERIES; r += 8) {
        int qi = query + r;
        float sum = 0;
        for (int c = threadIdx.x % 16 * 8; qi < SEQ && c < VALUE_DIM; c += 128) {
            union {
                uint4 all;
                ml_bf16 x[8];
            } left, right;
            left.all = *(const uint4 *)(o + qi * O_SEQ + c);
            right.all = *(const uint4 *)(grad_out + r * VALUE_ROW + c);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += ml_load_bf16(left.x[i]) * ml_load_bf16(right.x[i]);
        }
#pragma unroll
        for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x % 16) continue;
        float x = qi < SEQ ? from[qi * LSE_SEQ] : 0;
        lse[r] = x == -ML_INF ? 3e38f : x * 1.44269504f;
        delta[r] = sum;
        if (qi < SEQ) deltas[qi] = sum;
    }
}
extern "C" __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    POSITIONS;
    ml_bf16 *query_tile = (ml_bf16 *)shared, *grad_out_tile = query_tile + QUERIES * HEAD_ROW;
    unsigned queries_at = shared_address(query_tile),
             grad_outs_at = queries_at + QUERIES * HEAD_ROW * 2;
    unsigned slots_at = grad_outs_at + QUERIES * VALUE_ROW * 2;
    float *lse = (float *)(grad_out_tile + QUERIES * VALUE_ROW + 2 * SLOT_BYTES / 2);
    float *delta = lse + QUERIES;
    int block = blockIdx.x % QUERY_BLOCKS, head = blockIdx.x / QUERY_BLOCKS % HEADS;
    int batch = blockIdx.x / (QUERY_BLOCKS * HEADS);
    int query = (QUERY_BLOCKS - 1 - block) * QUERIES; /* the longest causal rows first */
    int kv_head = head / GROUP, warp = threadIdx.x / 32;
    int last_query = query + QUERIES - 1 < SEQ ? query + QUERIES - 1 : SEQ - 1, keys = KEYS;
    (void)last_query, (void)keys;
    int first = FIRST_KEY(query), end = END_KEY(last_query);
    first = first / KEYS * KEYS;
    const ml_bf16 *k = HEAD_OF(const ml_bf16, K, kv_head);
    const ml_bf16 *v = HEAD_OF(const ml_bf16, V, kv_head);
    load_tile(queries_at, HEAD_ROW, ROW_OF(const ml_bf16, Q, head, query), Q_SEQ, SEQ - query,
              HEAD_DIM, QUERIES, HEAD_WIDTH);
    load_tile(grad_outs_at, VALUE_ROW, ROW_OF(const ml_bf16, G, head, query), G_SEQ, SEQ - query,
              VALUE_DIM, QUERIES, VALUE_WIDTH);
    load_slot(slots_at, k, v, first);
    copies_wait();
    __syncthreads();
    load_statistics(a, batch, head, query, grad_out_tile, lse, delta);
    float out[WARP_TILES][HEAD_WIDTH / 8][4] = {};
    int slot = 0;
    for (int key = first; key < end; key += KEYS, slot ^= 1) {
        copies_wait();
        __syncthreads();
        unsigned keys_at = slots_at + slot * SLOT_BYTES;
        if (key + KEYS < end) load_slot(slots_at + (slot ^ 1) * SLOT_BYTES, k, v, key + KEYS);
        float s[WARP_TILES][KEYS / 8][4] = {}, dp[WARP_TILES][KEYS / 8][4] = {};
        multiply(s, queries_at + warp * (WARP_TILES * 16) * HEAD_ROW * 2, HEAD_ROW, keys_at,
                 HEAD_ROW, HEAD_WIDTH);
        int own = warp * (WARP_TILES * 16); /* rows of the warp */
        multiply(dp, grad_outs_at + own * VALUE_ROW * 2, VALUE_ROW, keys_at + KEYS * HEAD_ROW * 2,
                 VALUE_ROW, VALUE_WIDTH);
        bool masked = key + KEYS > KV_SEQ || NEEDS_MASK(query, last_query, key, keys);
        slopes_of_tile<WARP_TILES, KEYS / 8, false>(a, batch, head, query + own, key, masked,
                                                    lse + own, delta + own, s, dp);
        multiply_accumulators(out, dp, keys_at, HEAD_ROW);
    }
    __syncthreads();
    ml_bf16 *rows = query_tile + warp * (WARP_TILES * 16) * HEAD_ROW;
    spill_bf16(rows, HEAD_ROW, out, SCALE);
    __syncwarp();
    query += warp * (WARP_TILES * 16);
    store_rows(ROW_OF(ml_bf16, DQ, head, query), DQ_SEQ, rows, HEAD_ROW, SEQ - query, HEAD_DIM,
               WARP_TILES * 16);
}
