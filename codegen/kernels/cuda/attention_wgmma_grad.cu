/* The gradient of attention on warpgroup products in one pass over the scores: dq, dk, dv.
 *
 * A persistent block takes one work tile after another, 128 keys of a head. Its first two
 * warpgroups own 64 keys each and compute everything transposed: rows of their accumulators are
 * keys, so that P and dS (d loss / d score) are left operands without a shuffle. dS is also
 * written to shared memory, row by key, and read with rows as depth for dq, of which each
 * warpgroup computes half of the columns. Two more warps copy operands and two add tiles of dq to
 * sums in memory (attention_wgmma_grad_supply.cuh).
 *
 * Results repeat: a tile of dq is summed in the order of rising keys. Work tiles of a head are
 * begun in that order too (a counter in memory, read when a work tile is begun), so that a work
 * tile that others wait for is running already. Work tiles are ordered by groups of heads, the
 * first keys of all heads of a group first: with a causal mask most queries see these, so that
 * short work tiles come last, few multiprocessors are idle, and the work tiles of a head begin at
 * different times and hardly wait for each other. A work tile begins with the last queries, of all
 * heads that share its keys. The first to add stores instead, so that sums need not be cleared.
 * attention_wgmma_grad_begin.cu writes the rows' statistics before, attention_wgmma_grad_dq.cu
 * converts the sums to dq after.
 *
 * Tiles that the masks of the score function hide are skipped by the copying warps, by a table
 * that the kernel before computes from the states of blocks (attention_blocks.cuh). The table also
 * has each tile's turn, as turns that are skipped must not be waited for.
 *
 * Cycles of an SM for 128 queries x 128 keys: products 2,560 with heads of 64 and 5,120 with 128;
 * exponentials 1,024 and as many for a tanh; 5 to 12 other instructions an element, 128 each.
 * Measured on an H200 (causal, TFLOP/s; plain, soft cap, slopes (ALiBi), documents of 700 tokens):
 * heads of 64, 1,024 tokens: 292, 265, 289, 366; heads of 128, 4,096 tokens: 469, 428, -, 1,300;
 * before work tiles came in this order 281, 259, 279, 354 and 460, 413, 463, 1,273. With halves of
 * tiles left out and more work tiles of a head at once documents rose from 370 and 1,257 to 374
 * and 1,319 in one run, others stayed. The order took 24 heads on 8, 2 x 4,096 tokens, from 1,367
 * us to 1,088 (a step of llama-3b: 322.8 to 317.6 ms), 16 on 8, 4 x 4,096, from 1,620 to 1,450;
 * with a loop that was 4 % slower 16 on 2, 16,384 tokens, from 321 TFLOP/s to 468; 16 of 2,048
 * tokens from 242 to 312. Of 1.0 ms with heads of 64 the kernel before takes 6 % and the one after
 * 8, adding up dq in order 6; masks take 2 %.
 *
 * The time is neither products nor shared memory: in a loop in which products are in flight beside
 * everything else no warp waits for them, and a tile of 64 queries takes as long with heads of 64
 * (3,640 cycles: exponentials 1,230, dS 515, issuing products 590, where products from registers
 * stop a warp and descriptors were recomputed for each, handing dq over 530, a work tile's end
 * 350). Two warps on a scheduler, at the same point, do not hide each other's latencies.
 *
 * Tried, and no faster (H200, normal operands): the next tile's scores issued before a tile's last
 * products (2 % slower); dp awaited when half of the scores are probabilities (the same, 1 %
 * slower with heads of 128); products always in flight (14 % slower with heads of 128); anything
 * between the wait for scores and the loads that follow it, which ptxas moves up: 4 to 11 %.
 *
 * Where masks leave short work tiles (documents of 700 tokens of 4,096, heads of 128: 7.5 tiles a
 * work tile, 1.69 million cycles of an SM before halves of tiles were left out), a work tile's end
 * takes 5,100 cycles and the wait for the next one's first tile 7,500, a quarter of all time; a
 * tile of which masks hide a part takes 1,200 more than another, 7 %; the kernels around this one
 * take 18 %. No faster there: the next work tile's queries, values and keys copied as soon as each
 * one's slot is free (equal, 3 % slower with less care), prefetched to L2 (10 % slower), dq in any
 * order (equal), masks computed beside the products for scores (equal; in a loop 8 % slower). */
#include "attention_wgmma_grad_supply.cuh"

/* dq: dS by keys, of which each warpgroup has half of the columns. */
#if DIM == 64
WGMMA_SS(product_queries, 32, 16, 16, 17, 18, 1, 1)
#else
WGMMA_SS(product_queries, 64, 32, 32, 33, 34, 1, 1)
#endif

/* One tile of the scores: s to probabilities and dp to dS, the gradients of the scaled
 * products. Rows are keys, columns queries, whose lse (in units of log2) and delta are in shared
 * memory. What the score function adds along both, such as slope[h] (k - q), comes from a row's
 * first query on. */
template <bool MASKED>
static __device__ __forceinline__ void slopes_of_rows(const arguments &a, int batch, int head,
                                                      int query, int key, const float *lse,
                                                      float (&s)[TILE / 2], float (&dp)[TILE / 2]) {
    int lane = threadIdx.x % 32;
    key += threadIdx.x / 32 % 4 * 16 + lane / 4;
    CAPTURES;
    POSITIONS;
    LINES;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        int kv = key + row * 8, qi = query + lane % 4 * 2;
        CLAMP_QUERY;
        CLAMP_KEY;
        (void)kv, (void)qi;
        LINE_ROWS;
    }
#pragma unroll
    for (int u = 0; u < TILE / 8; u++) {
        int column = u * 8 + lane % 4 * 2;
        float2 base = *(const float2 *)(lse + column);
        float2 delta = *(const float2 *)(lse + TILE + column);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int qi = query + column + j % 2, kv = key + j / 2 * 8, i = u * 4 + j;
            bool hidden = MASKED && !(kv < KV_SEQ && VISIBLE(qi, kv));
            const int row = j / 2;
            const float step = u * 8 + j % 2;
            float x = s[i], raw = x * SCALE, slope;
            (void)raw, (void)qi, (void)kv, (void)row, (void)step;
            if (SCORED || MASKED) {
                CLAMP_QUERY;
                CLAMP_KEY;
            }
            if (MASKED) {
#if LISTED
                SHOWN;
                hidden |= !shown;
#endif
            }
            if (SCORED) {
                x = raw;
                SCORE;
            }
            x = exp2_approx(x * SCORE_LOG2 - (j % 2 ? base.y : base.x));
            x = hidden ? 0 : x;
            slope = x * (dp[i] - (j % 2 ? delta.y : delta.x));
            if (SCORED) {
                DERIVATIVE;
                slope = hidden ? 0 : slope;
            }
            s[i] = x;
            dp[i] = slope;
        }
    }
}

/* Descriptors are computed once and added to, and the warpgroup is broadcast from one lane, so that
 * compilers know that it is the same for all: a third of the instructions between products. */
static __device__ __forceinline__ int warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }
static __device__ __forceinline__ unsigned long long advance(unsigned long long operand,
                                                             unsigned bytes) {
    return operand >> 32 << 32 | ((unsigned)operand + bytes / 16);
}
static __device__ __forceinline__ void store_slopes(char *tile, const unsigned (&p)[TILE / 4]) {
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < TILE / 4; i++)
        *(unsigned *)(tile + swizzled(ROWS, row + i % 2 * 8, i / 2) + threadIdx.x % 4 * 4) = p[i];
    fence_async_proxy();
}
static __device__ __forceinline__ void multiply_dq(float (&sum)[DIM / 4], unsigned slopes,
                                                   unsigned keys) {
    /* 64 columns are a block, 32 are half of its lines */
    keys += warpgroup() * (DIM == 128 ? ROWS * 128 : 64);
    unsigned long long l = descriptor(slopes, ROWS * 128);
    unsigned long long r = descriptor(keys, ROWS * 128);
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++)
        product_queries(sum, advance(l, k * 2048), advance(r, k * 2048), k > 0);
}
static __device__ __forceinline__ void multiply_scores_and_dp(float (&s)[TILE / 2],
                                                              float (&dp)[TILE / 2], unsigned at,
                                                              int key_slot, int slot) {
    unsigned long long l = descriptor(at + key_slot * (2 * ROW_BYTES) + warpgroup() * 8192, 16);
    unsigned long long r = descriptor(at + slots_at + slot * (2 * TILE_BYTES), 16);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            unsigned keys = k / 4 * ROWS * 128 + k % 4 * 32;
            unsigned queries = k / 4 * TILE * 128 + k % 4 * 32;
            product_scores(i ? dp : s, advance(l, i * ROW_BYTES + keys),
                           advance(r, i * TILE_BYTES + queries), k > 0);
        }
}
static __device__ __forceinline__ void
multiply_dk_and_dv(float (&dk)[DIM / 2], float (&dv)[DIM / 2], const unsigned (&slopes)[TILE / 4],
                   const unsigned (&p)[TILE / 4], unsigned at, int slot) {
    unsigned queries = at + slots_at + slot * (2 * TILE_BYTES);
    multiply_values(dv, p, queries + TILE_BYTES);
    multiply_values(dk, slopes, queries);
}
template <bool MASKED>
static __device__ __forceinline__ void slopes_of_tile(const arguments &a, const char *base,
                                                      const tile_message &m, int slot,
                                                      float (&s)[TILE / 2], float (&dp)[TILE / 2]) {
    POSITIONS;
    const float *rows = (const float *)(base + statistics_at) + slot * (2 * TILE);
    int key = m.key + threadIdx.x / 128 * 64, query = m.query, head = m.head;
    int keys = 64, last_query = query + TILE - 1;
    bool part = (m.states >> threadIdx.x / 128 * 2 & 3) != SHOWN_WHOLE;
    (void)keys, (void)last_query, (void)head;
    if (MASKED || part || key + 64 > KV_SEQ || NEEDS_MASK(query, last_query, key, keys))
        slopes_of_rows<true>(a, m.batch, m.head, query, key, rows, s, dp);
    else
        slopes_of_rows<false>(a, m.batch, m.head, query, key, rows, s, dp);
}
/* Does no query of this tile see any of this warpgroup's keys? */
static __device__ __forceinline__ bool all_hidden(const arguments &a, const tile_message &m) {
    POSITIONS;
    int key = m.key + warpgroup() * 64, query = m.query, head = m.head;
    int keys = 64, last_query = query + TILE - 1;
    (void)keys, (void)last_query, (void)query, (void)head;
    return (m.states >> warpgroup() * 2 & 3) == 0 || key >= KV_SEQ ||
           HIDDEN(query, last_query, key, keys);
}
/* dk and dv of a work tile. */
static __device__ __forceinline__ void store_item(const arguments &a, const tile_message &m,
                                                  float (&dk)[DIM / 2], float (&dv)[DIM / 2]) {
    int batch = m.batch, kv_head = m.head / GROUP, key = m.key + threadIdx.x / 32 * 16;
    (void)batch;
    store_rows<DIM / 2>(dk, SCALE, ROW_OF(ml_bf16, DK, kv_head, KEY_ROW(key)), DK_SEQ,
                        KV_SEQ - key);
    store_rows<DIM / 2>(dv, 1.0f, ROW_OF(ml_bf16, DV, kv_head, KEY_ROW(key)), DV_SEQ, KV_SEQ - key);
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) dk[i] = dv[i] = 0;
    keep_in_registers(dk); /* before more products begin */
    keep_in_registers(dv);
}
/* One tile after another. Where all keys of one warpgroup are hidden, a tile is the other's alone:
 * this one only has its half of dq. */
static __device__ __forceinline__ void skip_tile(char *base, unsigned at, int slot, int turn) {
    const unsigned zeros[TILE / 4] = {};
    arrive_thread(at + slot_empty_at + slot * 8);
    store_slopes(base + slopes_at + turn % 2 * (ROWS * 128), zeros);
    arrive_warp(at + slopes_ready_at);
    barrier_wait(at + slopes_ready_at, turn % 2);
}
static __device__ __forceinline__ void consume(const arguments &a, char *base, unsigned at) {
    float s[TILE / 2], dp[TILE / 2], dk[DIM / 2] = {}, dv[DIM / 2] = {};
    unsigned p[TILE / 4], slopes[TILE / 4];
    int key_slot = 0, turn = 0;
    ring_position ring = {};
    for (;; turn++) {
        int slot = ring.slot, odd = turn % 2 * (ROWS * 128);
        barrier_wait(at + slot_full_at + slot * 8, ring.parity);
        ring.next();
        const tile_message m = ((const tile_message *)(base + messages_at))[slot];
        if (m.batch < 0) break;
        float sum[DIM / 4];
        if (all_hidden(a, m)) {
            skip_tile(base, at, slot, turn);
            wgmma_begin();
            multiply_dq(sum, at + slopes_at + odd, at + key_slot * (2 * ROW_BYTES));
            wgmma_commit();
        } else {
            wgmma_begin();
            multiply_scores_and_dp(s, dp, at, key_slot, slot);
            wgmma_commit();
            wgmma_wait<0>();
            keep_in_registers(s);
            keep_in_registers(dp);
            slopes_of_tile<false>(a, base, m, slot, s, dp);
            round_bf16(p, s);
            round_bf16(slopes, dp);
            store_slopes(base + slopes_at + odd, slopes);
            arrive_warp(at + slopes_ready_at);
            wgmma_begin();
            multiply_dk_and_dv(dk, dv, slopes, p, at, slot);
            wgmma_commit();
            barrier_wait(at + slopes_ready_at, turn % 2);
            wgmma_begin();
            multiply_dq(sum, at + slopes_at + odd, at + key_slot * (2 * ROW_BYTES));
            wgmma_commit();
            wgmma_wait<1>();
            keep_in_registers(p);
            keep_in_registers(slopes);
            keep_in_registers(dk);
            keep_in_registers(dv);
            arrive_thread(at + slot_empty_at + slot * 8);
        }
        wgmma_wait<0>();
        keep_in_registers(sum);
        if (m.last) arrive_thread(at + keys_free_at + key_slot * 8);
        hand_over_dq(base, at, turn, m.tile, m.rank, sum);
        if (m.last) {
            store_item(a, m, dk, dv);
            if (++key_slot == KEY_SLOTS) key_slot = 0;
        }
    }
    end_dq(base, at, turn);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    unsigned skipped = (1024 - shared_address(shared) % 1024) % 1024;
    char *base = (char *)shared + skipped;
    unsigned at = shared_address(base);
    init_barriers(at);
    int warp = threadIdx.x / 32;
    if (warp >= 8) {
        decrease_registers<FEWER_REGISTERS>();
        if (warp < 10)
            produce(a, base, at);
        else
            accumulate_dq(a, base, at);
    } else {
        increase_registers<MORE_REGISTERS>();
        consume(a, base, at);
    }
}
