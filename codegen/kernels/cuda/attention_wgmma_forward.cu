/* Forward on warpgroup products.
 *
 * A thread block serves several blocks of queries of a head, a long and a short one in turn where
 * the mask is causal, so that the copies for the next one are under way while one ends. Shared
 * memory: queries, of two blocks if there are more; slots of keys or values; barriers; lists of
 * tiles. Tiles are copied in the order in which they are needed: keys 0, keys 1, values 0, keys 2,
 * values 1, ..., the last values; the queries with keys 0.
 *
 * Cycles of an SM for 128 queries x 128 keys: products 2,048 with heads of 128 and 1,024 with 64;
 * exponentials 1,024 on a unit of 16 lanes, and as many for a soft cap's tanh; five instructions an
 * element on four schedulers, 640, which the copies must not crowd: they take 100. Measured on an
 * H200, causal, TFLOP/s: heads of 128, 4,096 tokens: 600 plain, 475 with a soft cap, 570 with
 * slopes (ALiBi), 1,500 for documents of 700 tokens; heads of 64, 1,024 tokens: 320, 226, 284, 314
 * (all counted as if nothing but the causal mask were skipped); heads of 192 and of 256 525 and 560
 * plain. Other sizes are the next ones' with columns of zeros. Tried, and no faster: a slot for
 * each copying warp, rescaling only where the largest score grew by 2^8, three warpgroups. */
#ifndef MLUA_EMBEDDED
#define WORKS 4           /* blocks of queries that a thread block serves */
#define BLOCKS_PER_HEAD 8 /* thread blocks of a head */
#define TAKE_TURNS 1      /* warpgroups issue their products in turns */
#endif
#include "attention_blocks.cuh"
#include "attention_wgmma.cuh"

#define QUERY_BLOCKS ((SEQ + ROWS - 1) / ROWS)
#if WORKS > 1
#define BUFFERS 2 /* of queries */
#else
#define BUFFERS 1
#endif
#define LIST_SIZE ((KV_SEQ + TILE - 1) / TILE + 1)

struct work_item {
    int query, first, blocks;
};
/* Of two pieces the later one of all heads first: its queries see more keys, and the last blocks
 * are to be short. */
static __device__ __forceinline__ void order_of_pieces(const arguments &a, int &head, int &batch) {
#if PIECES == 2
    POSITIONS;
    int units = gridDim.x / BLOCKS_PER_HEAD, unit = batch * HEADS + head;
    bool second = (unit < units / 2) == (apart > 0);
    unit %= units / 2;
    batch = unit / (HEADS / 2), head = unit % (HEADS / 2) * 2 + second;
#endif
}
/* The j-th block of queries of this thread block, and which tiles of keys it needs. Where it needs
 * none, one behind the last key is taken: zeros. */
static __device__ __forceinline__ bool find_work(const arguments &a, int head, int j,
                                                 work_item &work) {
    POSITIONS;
    int i = blockIdx.x % BLOCKS_PER_HEAD + j / 2 * BLOCKS_PER_HEAD, block = QUERY_BLOCKS - 1 - i;
    if (WORKS > 1 && i > block) return false;
    if (j % 2) {
        if (i == block) return false;
        block = i;
    }
    int query = block * ROWS;
    int last_query = query + ROWS - 1 < SEQ ? query + ROWS - 1 : SEQ - 1;
    (void)last_query, (void)head;
    int first = FIRST_KEY(query), end = END_KEY(last_query);
    first = first / TILE * TILE;
    int blocks = end > first ? (end - first + TILE - 1) / TILE : 0;
    if (blocks == 0) first = (KV_SEQ + TILE - 1) / TILE * TILE, blocks = 1;
    work.query = query, work.first = first, work.blocks = blocks;
    return true;
}
/* The first key of the i-th tile: of those listed, if there is a list. */
static __device__ __forceinline__ int tile_key(int first, int i, const int *list) {
    return LISTED ? (list[i] >> 8) * TILE : first + i * TILE;
}
#if LISTED
/* The tiles of which masks show something to some warpgroup, and after `part` of which something is
 * hidden from this one. An entry is the tile's number and a bit for each warpgroup; the count is
 * stored before the first. */
static __device__ __forceinline__ void list_tiles(const arguments &a, int batch, int head,
                                                  const work_item &work, int *list) {
    const char *states = a.p[STATES_AT] + ((long long)batch * MASK_HEADS + MASK_HEAD) *
                                              (QUERY_PARTS * (long long)KEY_PARTS);
    int lane = threadIdx.x % 32, count = 0;
    (void)head;
    for (int start = 0; start < work.blocks; start += 32) {
        int tile = work.first / TILE + start + lane, shown = 0, parts = 0;
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
            for (int j = 0; j < TILE / 64; j++) {
                int q = work.query / 64 + i, k = tile * (TILE / 64) + j;
                if (q >= QUERY_PARTS || k >= KEY_PARTS || start + lane >= work.blocks) continue;
                int state = states[q * (long long)KEY_PARTS + k];
                shown |= state;
                if (state != SHOWN_WHOLE) parts |= 1 << i;
            }
        unsigned all = __ballot_sync(~0u, shown != 0);
        if (shown) list[count + __popc(all & ((1u << lane) - 1))] = tile << 8 | parts;
        count += __popc(all);
    }
    if (lane) return;
    if (count == 0) list[count++] = (KV_SEQ + TILE - 1) / TILE << 8;
    list[-1] = count;
}
static __device__ __forceinline__ bool partly_hidden(const int *list, int i) {
    return list[i] >> threadIdx.x / 128 & 1;
}
#else
static __device__ __forceinline__ void list_tiles(const arguments &a, int batch, int head,
                                                  const work_item &work, int *list) {}
static __device__ __forceinline__ bool partly_hidden(const int *list, int i) { return false; }
#endif
static __device__ __forceinline__ void produce(const arguments &a, int batch, int head,
                                               unsigned queries_at, unsigned slots,
                                               unsigned barriers, int *lists) {
    int kv_head = head / GROUP;
    const ml_bf16 *q = HEAD_OF(const ml_bf16, Q, head);
    const ml_bf16 *k = HEAD_OF(const ml_bf16, K, kv_head);
    const ml_bf16 *v = HEAD_OF(const ml_bf16, V, kv_head);
    tile_producer producer = {barriers};
    for (int j = 0, number = 0; j < WORKS; j++) {
        work_item work;
        if (!find_work(a, head, j, work)) continue;
        int buffer = number % 2, *list = lists + buffer * LIST_SIZE + 1;
        if (number > 1) producer.await(barriers + (2 * SLOTS + buffer) * 8, (number / 2 & 1) ^ 1);
        number++;
        if (LISTED) {
            if (threadIdx.x / 32 == GROUPS * 4) list_tiles(a, batch, head, work, list);
            sync_producers<128>();
            work.blocks = list[-1];
        }
        copy_tile(queries_at + buffer * ROW_BYTES, ROWS, 0, ROWS, q + work.query * Q_SEQ, Q_SEQ,
                  SEQ - work.query);
        for (int t = 0; t < 2 * work.blocks; t++) {
            bool last = t == 2 * work.blocks - 1, keys = !last && (t == 0 || t % 2);
            int i = last ? work.blocks - 1 : keys ? (t + 1) / 2 : t / 2 - 1;
            int key = tile_key(work.first, i, list);
            unsigned to = slots + producer.wait_free() * TILE_BYTES;
#pragma unroll
            for (int r = 0; r < TILE; r += RUN_OF(TILE))
                if (keys)
                    copy_tile(to, TILE, r, RUN_OF(TILE), k + KEY_ROW(key + r) * K_SEQ, K_SEQ,
                              KV_SEQ - key - r);
                else
                    copy_tile(to, TILE, r, RUN_OF(TILE), v + KEY_ROW(key + r) * V_SEQ, V_SEQ,
                              KV_SEQ - key - r);
            producer.commit();
        }
    }
    producer.flush();
}
/* One tile: scores to probabilities, statistics of the rows, and the factor for what was summed.
 * `query` is the warpgroup's first one. */
static __device__ __forceinline__ void softmax_tile(const arguments &a, int batch, int head,
                                                    int query, int key, bool part,
                                                    float (&s)[TILE / 2], float (&row_max)[2],
                                                    float (&row_sum)[2], float (&rescale)[2]) {
    int lane = threadIdx.x % 32, last_query = query + 63, keys = TILE;
    (void)last_query, (void)keys;
    POSITIONS;
    bool masked = key + TILE > KV_SEQ || NEEDS_MASK(query, last_query, key, keys);
    query += threadIdx.x / 32 % 4 * 16 + lane / 4;
    key += lane % 4 * 2;
    CAPTURES;
    if (SCORED) {
        LINES;
#pragma unroll
        for (int row = 0; row < 2; row++) {
            int kv = key, qi = query + row * 8;
            (void)kv, (void)qi;
            CLAMP_QUERY;
            LINE_ROWS;
        }
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            int kv = key + i / 4 * 8 + i % 2, row = i / 2 % 2, qi = query + row * 8;
            float step = i / 4 * 8 + i % 2;
            (void)step;
            CLAMP_QUERY;
            CLAMP_KEY;
            (void)kv, (void)qi;
            float x = s[i] * SCALE;
            SCORE;
            s[i] = x;
        }
    }
    if (masked) {
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            int kv = key + i / 4 * 8 + i % 2, qi = query + i / 2 % 2 * 8;
            if (!(kv < KV_SEQ && VISIBLE(qi, kv))) s[i] = LOWEST;
        }
    }
#if LISTED
    if (part) {
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            int kv = key + i / 4 * 8 + i % 2, qi = query + i / 2 % 2 * 8;
            CLAMP_QUERY;
            CLAMP_KEY;
            (void)kv, (void)qi;
            SHOWN;
            if (!shown) s[i] = LOWEST;
        }
    }
#endif
    /* Several chains of each row, or each step would wait for the one before. */
    float maxima[2][4], base[2], sum[2][2] = {};
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = fmaxf(s[n * 4 + 2 * r], s[n * 4 + 2 * r + 1]);
            maxima[r][n % 4] = n < 4 ? x : fmaxf(maxima[r][n % 4], x);
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float next = fmaxf(fmaxf(maxima[r][0], maxima[r][1]), fmaxf(maxima[r][2], maxima[r][3]));
        next = fmaxf(row_max[r], next);
        next = fmaxf(next, __shfl_xor_sync(~0u, next, 1));
        next = fmaxf(next, __shfl_xor_sync(~0u, next, 2));
        base[r] = next * SCORE_LOG2 < NO_KEY ? 0.0f : next * SCORE_LOG2;
        rescale[r] = exp2_approx(row_max[r] * SCORE_LOG2 - base[r]);
        row_max[r] = next;
    }
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) {
        int r = i / 2 % 2;
        s[i] = exp2_approx(s[i] * SCORE_LOG2 - base[r]);
        sum[r][i % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) row_sum[r] = row_sum[r] * rescale[r] + (sum[r][0] + sum[r][1]);
}
/* What a warpgroup sums over all tiles. */
static __device__ __forceinline__ void
consume(const arguments &a, int batch, int head, int query, int first, int blocks, const int *list,
        unsigned queries_at, unsigned slots, unsigned barriers, ring_position &ring,
        float (&out)[DIM / 2], float (&row_max)[2], float (&row_sum)[2]) {
    float s[TILE / 2], rescale[2];
    unsigned p[TILE / 4];
    barrier_wait(barriers + ring.slot * 8, ring.parity);
    if (LISTED) blocks = list[-1];
    wgmma_begin();
    multiply_scores(s, queries_at, slots + ring.slot * TILE_BYTES);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_registers(s);
    release_slot(barriers, ring.slot);
    ring.next();
    softmax_tile(a, batch, head, query, tile_key(first, 0, list), partly_hidden(list, 0), s,
                 row_max, row_sum, rescale);
    round_bf16(p, s);
    for (int block = 1; block < blocks; block++) {
        int keys_stage = ring.slot;
        if (TAKE_TURNS) wait_turn(threadIdx.x / 128);
        barrier_wait(barriers + ring.slot * 8, ring.parity);
        ring.next();
        wgmma_begin();
        multiply_scores(s, queries_at, slots + keys_stage * TILE_BYTES);
        wgmma_commit();
        int values_stage = ring.slot;
        barrier_wait(barriers + ring.slot * 8, ring.parity);
        ring.next();
        wgmma_begin();
        multiply_values(out, p, slots + values_stage * TILE_BYTES);
        wgmma_commit();
        if (TAKE_TURNS) pass_turn((threadIdx.x / 128 + 1) % GROUPS);
        wgmma_wait<1>();
        keep_in_registers(s);
        release_slot(barriers, keys_stage);
        softmax_tile(a, batch, head, query, tile_key(first, block, list),
                     partly_hidden(list, block), s, row_max, row_sum, rescale);
        /* ptxas places the wait before the exponentials; forced behind them, it is slower by 3 to
         * 5% (H200): the other warpgroup's products fill that time. */
        keep_in_registers(s);
        wgmma_wait<0>();
        keep_in_registers(out);
        keep_in_registers(p);
        release_slot(barriers, values_stage);
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) out[i] *= rescale[i / 2 % 2];
        round_bf16(p, s);
    }
    barrier_wait(barriers + ring.slot * 8, ring.parity);
    wgmma_begin();
    multiply_values(out, p, slots + ring.slot * TILE_BYTES);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_registers(out);
    release_slot(barriers, ring.slot);
    ring.next();
}
/* Normalized sums to memory through the warpgroup's queries, which are no longer read; lse. */
static __device__ __forceinline__ void
store_output(const arguments &a, int batch, int head, int query, char *query_tile,
             float (&out)[DIM / 2], const float (&row_max)[2], const float (&row_sum)[2]) {
    int row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    float *lse = HEAD_OF(float, LSE, head);
    sync_warpgroup(threadIdx.x / 128);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = row_sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        float inverse = sum == 0 ? 0 : 1 / sum;
        int qi = query + row + r * 8 + lane / 4;
        if (lane % 4 == 0 && qi < SEQ)
            lse[qi * LSE_SEQ] = sum == 0 ? -ML_INF : row_max[r] * SCORE_LN + logf(sum);
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
            out[n * 4 + 2 * r] *= inverse, out[n * 4 + 2 * r + 1] *= inverse;
    }
    query += row;
    store_through_tile(query_tile, row, out, 1.0f, ROW_OF(ml_bf16, O, head, query), O_SEQ,
                       SEQ - query);
}
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    unsigned before = (1024 - shared_address(shared) % 1024) % 1024;
    char *query_tiles = (char *)shared + before;
    unsigned queries_at = shared_address(query_tiles);
    unsigned slots = queries_at + BUFFERS * ROW_BYTES;
    unsigned barriers = slots + SLOTS * TILE_BYTES;
    int *lists = (int *)(query_tiles + (barriers - queries_at) + 16 * SLOTS + 16);
    int head = blockIdx.x / BLOCKS_PER_HEAD % HEADS, batch = blockIdx.x / (BLOCKS_PER_HEAD * HEADS);
    order_of_pieces(a, head, batch);
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) /* the queries' are empty again */
            barrier_init(barriers + (2 * SLOTS + i) * 8, GROUPS * 128);
    init_ring(barriers);
    if (threadIdx.x >= GROUPS * 128) {
        decrease_registers<FEWER_REGISTERS>();
        produce(a, batch, head, queries_at, slots, barriers, lists);
    } else {
        increase_registers<MORE_REGISTERS>();
        int own = threadIdx.x / 128 * 64; /* rows of the warpgroup */
        ring_position ring = {};
        if (TAKE_TURNS && threadIdx.x / 128 == GROUPS - 1) pass_turn(0);
        for (int j = 0, number = 0; j < WORKS; j++) {
            work_item work;
            if (!find_work(a, head, j, work)) continue;
            int buffer = number++ % 2;
            float out[DIM / 2] = {}, row_max[2] = {LOWEST, LOWEST}, row_sum[2] = {};
            consume(a, batch, head, work.query + own, work.first, work.blocks,
                    lists + buffer * LIST_SIZE + 1, queries_at + buffer * ROW_BYTES + own * 128,
                    slots, barriers, ring, out, row_max, row_sum);
            store_output(a, batch, head, work.query, query_tiles + buffer * ROW_BYTES, out, row_max,
                         row_sum);
            release_slot(barriers, SLOTS + buffer);
        }
    }
}
