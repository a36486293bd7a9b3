/* Forward: a warp owns WARP_TILES * 16 queries of a head. Shared memory: queries, then two slots of
 * keys and values. */
#include "attention_mma_keys.cuh"

#if HEAD_WIDTH > VALUE_WIDTH
#define WIDEST_ROW HEAD_ROW
#else
#define WIDEST_ROW VALUE_ROW
#endif

/* One tile: scores to probabilities, statistics of the rows, and the factor for what was summed. */
static __device__ __forceinline__ void
softmax_tile(const arguments &a, int batch, int head, int query, int key,
             float (&s)[WARP_TILES][KEYS / 8][4], float (&row_max)[WARP_TILES][2],
             float (&row_sum)[WARP_TILES][2], float (&rescale)[WARP_TILES][2]) {
    int lane = threadIdx.x % 32, last_query = query + QUERIES - 1, keys = KEYS;
    (void)last_query, (void)keys;
    POSITIONS;
    bool masked = key + KEYS > KV_SEQ || NEEDS_MASK(query, last_query, key, keys);
    query += threadIdx.x / 32 * (WARP_TILES * 16) + lane / 4;
    key += lane % 4 * 2;
    CAPTURES;
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int qi = query + m * 16 + r * 8;
            qi = qi < SEQ ? qi : SEQ - 1;
            if (SCORED) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        int kv = key + n * 8 + c;
                        CLAMP_KEY;
                        float x = s[m][n][2 * r + c] * SCALE;
                        SCORE;
                        s[m][n][2 * r + c] = x < LOWEST ? LOWEST : x;
                    }
            }
            if (masked) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        int kv = key + n * 8 + c;
                        if (!(kv < KV_SEQ && VISIBLE(qi, kv))) s[m][n][2 * r + c] = LOWEST;
                    }
            }
            float next = row_max[m][r];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
                next = fmaxf(next, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
            next = fmaxf(next, __shfl_xor_sync(~0u, next, 1));
            next = fmaxf(next, __shfl_xor_sync(~0u, next, 2));
            float base = next * SCORE_LOG2 < NO_KEY ? 0.0f : next * SCORE_LOG2;
            rescale[m][r] = exp2_approx(row_max[m][r] * SCORE_LOG2 - base);
            row_max[m][r] = next;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float x = exp2_approx(s[m][n][2 * r + c] * SCORE_LOG2 - base);
                    s[m][n][2 * r + c] = x;
                    sum += x;
                }
            row_sum[m][r] = row_sum[m][r] * rescale[m][r] + sum;
        }
}
extern "C" __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    POSITIONS;
    ml_bf16 *query_tile = (ml_bf16 *)shared;
    unsigned queries_at = shared_address(query_tile),
             slots_at = queries_at + QUERIES * WIDEST_ROW * 2;
    int block = blockIdx.x % QUERY_BLOCKS, head = blockIdx.x / QUERY_BLOCKS % HEADS;
    int batch = blockIdx.x / (QUERY_BLOCKS * HEADS);
    int query = (QUERY_BLOCKS - 1 - block) * QUERIES; /* the longest causal rows first */
    int kv_head = head / GROUP, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int last_query = query + QUERIES - 1 < SEQ ? query + QUERIES - 1 : SEQ - 1;
    (void)last_query;
    int first = FIRST_KEY(query), end = END_KEY(last_query);
    first = first / KEYS * KEYS;
    const ml_bf16 *k = HEAD_OF(const ml_bf16, K, kv_head);
    const ml_bf16 *v = HEAD_OF(const ml_bf16, V, kv_head);
    load_tile(queries_at, WIDEST_ROW, ROW_OF(const ml_bf16, Q, head, query), Q_SEQ, SEQ - query,
              HEAD_DIM, QUERIES, HEAD_WIDTH);
    load_slot(slots_at, k, v, first);
    float out[WARP_TILES][VALUE_WIDTH / 8][4] = {}, row_max[WARP_TILES][2],
                                        row_sum[WARP_TILES][2] = {}, rescale[WARP_TILES][2];
    for (int i = 0; i < 2 * WARP_TILES; i++) row_max[i / 2][i % 2] = LOWEST;
    int slot = 0;
    for (int key = first; key < end; key += KEYS, slot ^= 1) {
        copies_wait();
        __syncthreads();
        unsigned keys_at = slots_at + slot * SLOT_BYTES;
        if (key + KEYS < end) load_slot(slots_at + (slot ^ 1) * SLOT_BYTES, k, v, key + KEYS);
        float s[WARP_TILES][KEYS / 8][4] = {};
        multiply(s, queries_at + warp * (WARP_TILES * 16) * WIDEST_ROW * 2, WIDEST_ROW, keys_at,
                 HEAD_ROW, HEAD_WIDTH);
        softmax_tile(a, batch, head, query, key, s, row_max, row_sum, rescale);
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
            for (int n = 0; n < VALUE_WIDTH / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[m][n][i] *= rescale[m][i / 2];
        multiply_accumulators(out, s, keys_at + KEYS * HEAD_ROW * 2, VALUE_ROW);
    }
    copies_wait(); /* where there was no key */
    __syncthreads();
    float *lse = HEAD_OF(float, LSE, head);
#pragma unroll
    for (int i = 0; i < 2 * WARP_TILES; i++) {
        float sum = row_sum[i / 2][i % 2];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        float inverse = sum == 0 ? 0 : 1 / sum;
        int qi = query + warp * (WARP_TILES * 16) + i / 2 * 16 + i % 2 * 8 + lane / 4;
        if (lane % 4 == 0 && qi < SEQ)
            lse[qi * LSE_SEQ] = sum == 0 ? -ML_INF : row_max[i / 2][i % 2] * SCORE_LN + logf(sum);
#pragma unroll
        for (int n = 0; n < VALUE_WIDTH / 8; n++)
            out[i / 2][n][i % 2 * 2] *= inverse, out[i / 2][n][i % 2 * 2 + 1] *= inverse;
    }
    ml_bf16 *rows = query_tile + warp * (WARP_TILES * 16) * WIDEST_ROW;
    spill_bf16(rows, WIDEST_ROW, out, 1.0f);
    __syncwarp();
    query += warp * (WARP_TILES * 16);
    store_rows(ROW_OF(ml_bf16, O, head, query), O_SEQ, rows, WIDEST_ROW, SEQ - query, VALUE_DIM,
               WARP_TILES * 16);
}
