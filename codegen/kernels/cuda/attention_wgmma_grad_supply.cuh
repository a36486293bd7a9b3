/* What is copied into the blocks of the gradient, and dq out of them: two warps copy operands, 16
 * bytes a thread, with a message for each tile of queries that says what it is; two more add tiles
 * of dq to sums in memory, each tile in turn. Shared memory: slots of keys and values; slots of
 * queries and dO; two tiles of dS; two of dq; statistics and messages of the slots; notes for
 * those who add dq; tickets; barriers. */
#pragma once
#ifndef MLUA_EMBEDDED
#define KEY_SLOTS 1
#define ITEMS 1000
#define FIRST_HEADS 4 /* in the first group */
#define TOGETHER 4    /* heads in the other groups */
#endif
#include "attention_wgmma_grad.cuh"

/* What a tile of queries is to a block of keys: -1, or how many blocks add to its dq before, and in
 * the last four bits the states of the block's two halves. */
#if LISTED
#define SHOWN_ENTRY                                                                                \
    ((const int *)((const float *)a.p[DELTA_AT] + ENTRIES_AT))                                     \
        [(((long long)batch * MASK_HEADS + MASK_HEAD) * KEY_BLOCKS + key / ROWS) * QUERY_TILES +   \
         query / TILE]
#else
#define SHOWN_ENTRY ((key / ROWS - FIRST_KEY(query) / ROWS) * 16 + SHOWN_WHOLE * 5)
#endif
#if PIECES == 2 /* one piece of the queries may see these keys, and not the other */
#define TILE_ENTRY (HIDDEN(query, query + TILE - 1, key, ROWS) ? -1 : SHOWN_ENTRY)
#else
#define TILE_ENTRY SHOWN_ENTRY
#endif

struct __align__(16) tile_message {
    int batch, head, query, key; /* batch < 0: there is no more */
    int tile, rank;              /* of dq: which one, and how many add to it before; or none: -1 */
    int last, states;            /* of a work tile; of its two blocks of 64 keys: see below */
};
enum {
    slots_at = KEY_SLOTS * 2 * ROW_BYTES,
    slopes_at = slots_at + SLOTS * 2 * TILE_BYTES,
    dq_at = slopes_at + 2 * ROWS * 128,
    dq_bytes = 256 * DIM,
    statistics_at = dq_at + 2 * dq_bytes,
    messages_at = statistics_at + SLOTS * 8 * TILE,
    dq_notes_at = messages_at + SLOTS * 32,
    tickets_at = dq_notes_at + 16,
    slot_full_at = tickets_at + 16, /* barriers, of 8 bytes: of each slot */
    slot_empty_at = slot_full_at + SLOTS * 8,
    keys_free_at = slot_empty_at + SLOTS * 8,       /* of each key_slot */
    slopes_ready_at = keys_free_at + KEY_SLOTS * 8, /* a tile of dS, by both warpgroups */
    dq_ready_at = slopes_ready_at + 8,              /* a tile of dq: two */
    dq_taken_at = dq_ready_at + 16,
};
static __device__ __forceinline__ void init_barriers(unsigned at) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(at + slot_full_at + i * 8, 64); /* threads of the two warps that copy */
            barrier_init(at + slot_empty_at + i * 8, 256);
        }
        for (int i = 0; i < KEY_SLOTS; i++) barrier_init(at + keys_free_at + i * 8, 256);
        barrier_init(at + slopes_ready_at, 8); /* warps */
        for (int i = 0; i < 2; i++) {
            barrier_init(at + dq_ready_at + i * 8, 8);
            barrier_init(at + dq_taken_at + i * 8, 1);
        }
    }
    __syncthreads();
}
static __device__ __forceinline__ void arrive_warp(unsigned barrier) { /* a warp's */
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
/* This thread has read what others overwrite next; each thread arrives (release_slot). */
static __device__ __forceinline__ void arrive_thread(unsigned barrier) {
    __syncwarp();
    barrier_arrive(barrier);
}
/* The two warps that copy. A slot is signalled to be full once later ones are under way, and at the
 * latest before a wait. */
struct slot_producer {
    unsigned at, count; /* of tiles so far */
    int unsignalled;
    template <int LATER> __device__ __forceinline__ void signal() {
        copies_landed<LATER>();
        for (; unsignalled > LATER; unsignalled--)
            barrier_arrive(at + slot_full_at + (count - unsignalled) % SLOTS * 8);
    }
    __device__ __forceinline__ void await_free(unsigned barrier, unsigned parity) {
        /* The warp stays converged: barriers after this one count on it. */
        if (__ballot_sync(~0u, !barrier_test(barrier, parity)) == 0) return;
        signal<0>();
        barrier_wait(barrier, parity);
        __syncwarp();
    }
    __device__ __forceinline__ int wait_free() {
        int slot = count % SLOTS;
        await_free(at + slot_empty_at + slot * 8, count / SLOTS % 2 ^ 1);
        return slot;
    }
    __device__ __forceinline__ void commit() {
        copies_commit();
        count++;
        if (++unsignalled > 2) signal<2>();
    }
};
/* This thread's number among the two warps, recomputed each time: no registers are left to hold it
 * and what depends on it. */
static __device__ __forceinline__ int producer_thread() {
    unsigned thread[1] = {threadIdx.x % 64};
    keep_in_registers(thread);
    return thread[0];
}
/* `COUNT` rows of a tile from row `first` on. The chunks of a thread are in one column, every other
 * one whole swizzles apart, so that it computes two addresses alone: these warps must issue few
 * instructions. */
template <int TILE_ROWS, int COUNT>
static __device__ __forceinline__ void copy_rows(unsigned tile, int first, const ml_bf16 *from,
                                                 long long stride, int there) {
    const int chunks = DIM / 8, step = 64 / chunks;
    int thread = producer_thread(), row = thread / chunks, chunk = thread % chunks;
    const bool exists = HEAD_DIM == DIM || chunk < HEAD_DIM / 8;
    const ml_bf16 *own = exists ? from + row * stride + chunk * 8 : from;
    unsigned even = tile + swizzled(TILE_ROWS, first + row, chunk);
    unsigned odd = tile + swizzled(TILE_ROWS, first + row + step, chunk);
    if (there >= COUNT) {
#pragma unroll 4
        for (int r = 0; r < COUNT; r += 2 * step) {
            copy_async(even + r * 128, own + r * stride, exists ? 16 : 0);
            copy_async(odd + r * 128, own + (r + step) * stride, exists ? 16 : 0);
        }
    } else
#pragma unroll 2
        for (int r = 0; r < COUNT; r += 2 * step) {
            bool valid = row + r < there && exists, next = row + r + step < there && exists;
            copy_async(even + r * 128, valid ? own + r * stride : from, valid ? 16 : 0);
            copy_async(odd + r * 128, next ? own + (r + step) * stride : from, next ? 16 : 0);
        }
}
/* The tiles of queries that see a work tile's keys, in the heads that share these: the last queries
 * first, of all heads; of two pieces all of the later one before the other, as work tiles that run
 * together have different numbers of the other's tiles, and each adds to dq in turn. Looked up 32
 * at a time: each lane holds the TILE_ENTRY of one tile. */
struct query_tiles {
    int batch, kv_head, key, end, next, count, found;
    unsigned left;
#if PIECES == 2
    int later; /* which piece is */
#endif
    __device__ __forceinline__ query_tiles(const arguments &a, int batch, int kv_head, int key)
        : batch(batch), kv_head(kv_head), key(key), next(0), left(0) {
        POSITIONS;
        int last_key = key + ROWS - 1 < KV_SEQ ? key + ROWS - 1 : KV_SEQ - 1;
        (void)last_key;
        int first = EARLIEST_QUERY(key) / TILE;
#if PIECES == 2
        later = apart > 0;
#endif
        end = (LATEST_END(last_key) + TILE - 1) / TILE, count = (end - first) * GROUP;
    }
    __device__ __forceinline__ void locate(int i, int &head, int &query) const {
#if PIECES == 2
        int piece = later;
        if (i >= count / 2) i -= count / 2, piece ^= 1;
        head = kv_head * GROUP + i % (GROUP / 2) * 2 + piece;
        query = (end - 1 - i / (GROUP / 2)) * TILE;
#else
        head = kv_head * GROUP + i % GROUP, query = (end - 1 - i / GROUP) * TILE;
#endif
    }
    __device__ __forceinline__ bool more(const arguments &a) {
        while (!left) {
            if (next >= count) return false;
            int i = next + threadIdx.x % 32, head, query;
            next += 32, found = -1;
            if (i < count) {
                POSITIONS;
                locate(i, head, query);
                found = TILE_ENTRY;
            }
            left = __ballot_sync(~0u, found >= 0);
        }
        return true;
    }
    __device__ __forceinline__ int take(int &head, int &query) {
        int lane = __popc(~left & (left - 1)); /* the first bit */
        left &= left - 1;
        locate(next + lane - 32, head, query);
        return __shfl_sync(~0u, found, lane);
    }
};
/* All tiles of a work tile; where there are none, one that hides everything. */
static __device__ __forceinline__ void produce_item(const arguments &a, char *base,
                                                    slot_producer &supply, query_tiles &tiles) {
    int batch = tiles.batch;
    for (bool more = tiles.more(a), none = !more; more || none; none = false) {
        int slot = supply.wait_free(), query = 0, there = 0, thread = producer_thread();
        int head = tiles.kv_head * GROUP, entry = -16; /* adds to no dq, all hidden */
        if (more) entry = tiles.take(head, query), there = SEQ - query;
        int tile = (batch * HEADS + head) * QUERY_TILES + query / TILE;
        tile_message *message = (tile_message *)(base + messages_at) + slot;
        if (thread == 0)
            *message = tile_message{batch, head, query, tiles.key, tile, entry >> 4, 1, entry & 15};
        float *rows = (float *)(base + statistics_at) + slot * (2 * TILE);
        if (!none && thread < 32)
            copy_async(shared_address(rows) + thread * 16,
                       (const float *)a.p[DELTA_AT] + tile * 128LL + thread * 4, 16);
        unsigned to = supply.at + slots_at + slot * (2 * TILE_BYTES);
        copy_rows<TILE, TILE>(to, 0, ROW_OF(const ml_bf16, Q, head, query), Q_SEQ, there);
        copy_rows<TILE, TILE>(to + TILE_BYTES, 0, ROW_OF(const ml_bf16, G, head, query), G_SEQ,
                              there);
        more = more && tiles.more(a);
        if (more && thread == 0) message->last = 0;
        supply.commit();
    }
}
static __device__ __forceinline__ void produce(const arguments &a, char *base, unsigned at) {
    unsigned *counter = (unsigned *)((float *)a.p[DELTA_AT] + COUNTER_AT);
    int thread = threadIdx.x % 64;
    slot_producer supply = {at};
    for (unsigned number = 0;; number++) {
        int *ticket = (int *)(base + tickets_at) + number % 2, key_slot = number % KEY_SLOTS;
        /* Not before the work tile is begun: other blocks wait for its dq. */
        if (thread == 0) *ticket = (int)atomicAdd(counter, 1u);
        sync_producer_warps();
        int item = *ticket, first = 0, heads = FIRST_HEADS;
        if (item >= ITEMS) break;
        if (item >= FIRST_HEADS * KEY_BLOCKS) {
            item -= FIRST_HEADS * KEY_BLOCKS;
            first = item / (TOGETHER * KEY_BLOCKS), heads = TOGETHER;
            item -= first * (TOGETHER * KEY_BLOCKS);
            first = FIRST_HEADS + first * TOGETHER;
        }
        int unit = first + item % heads, key = item / heads * ROWS;
        int kv_head = unit % KV_HEADS, batch = unit / KV_HEADS;
        supply.await_free(at + keys_free_at + key_slot * 8, number / KEY_SLOTS % 2 ^ 1);
        unsigned to = at + key_slot * (2 * ROW_BYTES);
        for (int r = 0; r < ROWS; r += RUN_OF(ROWS)) {
            int row = KEY_ROW(key + r), there = KV_SEQ - key - r;
            copy_rows<ROWS, RUN_OF(ROWS)>(to, r, ROW_OF(const ml_bf16, K, kv_head, row), K_SEQ,
                                          there);
            copy_rows<ROWS, RUN_OF(ROWS)>(to + ROW_BYTES, r, ROW_OF(const ml_bf16, V, kv_head, row),
                                          V_SEQ, there);
        }
        query_tiles tiles(a, batch, kv_head, key);
        produce_item(a, base, supply, tiles);
    }
    int slot = supply.wait_free();
    if (thread == 0) ((tile_message *)(base + messages_at))[slot].batch = -1;
    supply.commit();
    supply.signal<0>();
}
/* Each of the last two warps adds every other tile of dq. */
static __device__ __forceinline__ void accumulate_dq(const arguments &a, char *base, unsigned at) {
    int which = threadIdx.x / 32 % 2;
    float *sums = (float *)a.p[DELTA_AT] + SUMS_AT;
    unsigned *turns = (unsigned *)((float *)a.p[DELTA_AT] + TURNS_AT);
    if (threadIdx.x % 32) return;
    for (unsigned parity = 0;; parity ^= 1) {
        barrier_wait(at + dq_ready_at + which * 8, parity);
        int tile = ((const int *)(base + dq_notes_at))[which * 2];
        int rank = ((const int *)(base + dq_notes_at))[which * 2 + 1];
        if (tile < 0) break;
        if (rank >= 0) {
            acquire_turn(turns + tile, (unsigned)rank);
            bulk_store(sums + tile * (64LL * DIM), at + dq_at + which * dq_bytes, dq_bytes,
                       rank > 0);
            bulk_wait_read();
        }
        barrier_arrive(at + dq_taken_at + which * 8);
        if (rank >= 0) {
            bulk_wait();
            release_turn(turns + tile, (unsigned)rank + 1);
        }
    }
}
/* Tile number `turn` of dq to the warps that add. */
static __device__ __forceinline__ void hand_over_dq(char *base, unsigned at, int turn, int tile,
                                                    int rank, const float (&sum)[DIM / 4]) {
    int which = turn % 2;
    barrier_wait(at + dq_taken_at + which * 8, turn / 2 % 2 ^ 1);
    char *to = base + dq_at + which * dq_bytes;
    to += threadIdx.x / 128 * (dq_bytes / 2) + threadIdx.x % 128 * 16;
#pragma unroll
    for (int i = 0; i < DIM / 16; i++)
        *(float4 *)(to + i * 2048) =
            float4{sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
    fence_async_proxy();
    int *note = (int *)(base + dq_notes_at) + which * 2;
    if (threadIdx.x == 0) note[0] = tile, note[1] = rank;
    arrive_warp(at + dq_ready_at + which * 8);
}
static __device__ __forceinline__ void end_dq(char *base, unsigned at, int turn) {
    for (int i = 0; i < 2; i++, turn++) {
        barrier_wait(at + dq_taken_at + turn % 2 * 8, turn / 2 % 2 ^ 1);
        if (threadIdx.x == 0) ((int *)(base + dq_notes_at))[turn % 2 * 2] = -1;
        arrive_warp(at + dq_ready_at + turn % 2 * 8);
    }
}
