/* Before the gradient: by tiles of 64 queries, lse in units of log2 and delta, the row sums of dO
 * o, side by side; rows that do not exist, or see nothing, get a large lse. No block has added
 * to their dq yet. */
#include "attention_wgmma_grad.cuh"

/* The last block of keys that queries query .. query + 63 see. */
#if CAUSAL
#define LATEST_BLOCK(query)                                                                        \
    (query + 63 + SHIFT < KV_SEQ ? (query + 63 + SHIFT) / KEYS : KEY_BLOCKS - 1)
#else
#define LATEST_BLOCK(query) (KEY_BLOCKS - 1)
#endif

extern "C" __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    int query = blockIdx.x % QUERY_TILES * 64, head = blockIdx.x / QUERY_TILES % HEADS;
    int batch = blockIdx.x / (QUERY_TILES * HEADS);
    const ml_bf16 *o = HEAD_OF(const ml_bf16, O, head);
    const ml_bf16 *g = HEAD_OF(const ml_bf16, G, head);
    const float *lse = HEAD_OF(const float, LSE, head);
    float *work = (float *)a.p[DELTA_AT], *rows = work + blockIdx.x * 128LL;
    if (threadIdx.x == 0) {
        ((unsigned *)(work + TURNS_AT))[blockIdx.x] = 0;
        if (blockIdx.x == 0) *(unsigned *)(work + COUNTER_AT) = 0;
    }
    if (threadIdx.x < 64) {
        int qi = query + threadIdx.x;
        float x = qi < SEQ ? lse[qi * LSE_SEQ] : -ML_INF;
        rows[threadIdx.x] = x == -ML_INF ? 3e38f : x * 1.44269504f;
    }
#pragma unroll
    for (int r = threadIdx.x / 16; r < 64; r += 8) {
        int qi = query + r, c = threadIdx.x % 16 * 8;
        float sum = 0;
        if (qi < SEQ && c < HEAD_DIM) {
            union {
                uint4 all;
                ml_bf16 x[8];
            } left, right;
            left.all = *(const uint4 *)(o + qi * O_SEQ + c);
            right.all = *(const uint4 *)(g + qi * G_SEQ + c);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += ml_load_bf16(left.x[i]) * ml_load_bf16(right.x[i]);
        }
#pragma unroll
        for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x % 16 == 0) rows[64 + r] = sum;
    }
#if LISTED
    if (threadIdx.x < 32 && (MASK_HEADS > 1 || head == 0)) {
        POSITIONS;
        int lane = threadIdx.x, rank = 0, latest = LATEST_BLOCK(query);
        long long mask = (long long)batch * MASK_HEADS + MASK_HEAD;
        const char *states = a.p[STATES_AT] + (mask * QUERY_PARTS + query / 64) * KEY_PARTS;
        int *entries = (int *)(work + ENTRIES_AT) + mask * (KEY_BLOCKS * QUERY_TILES);
        for (int start = FIRST_KEY(query) / KEYS; start <= latest; start += 32) {
            int block = start + lane, shown = 0;
            for (int i = 0; i < 2; i++) {
                int k = block * 2 + i;
                if (block <= latest && k < KEY_PARTS) shown |= states[k] << 2 * i;
            }
            unsigned all = __ballot_sync(~0u, shown != 0);
            int before = rank + __popc(all & ((1u << lane) - 1));
            if (block <= latest)
                entries[block * QUERY_TILES + query / 64] = shown ? before * 16 + shown : -1;
            rank += __popc(all);
        }
    }
#endif
}
