/* What goes into the blocks of attention's gradient on warpgroup products, and dq out of them (see
 * template_attention_wgmma_grad.c): two warps bring operands by 16-byte copies, with a message for
 * each tile of queries that says what it is; two more add tiles of dq to sums in memory, each tile
 * in turn. */
#include "codegen/kernels/attention.h"

/* Between the marks: what tests replace to run without a GPU. */
const char attention_grad_bulk[] = R"(
/* BULK */
static __device__ __forceinline__ void ${e}_send(float *to, unsigned from, int bytes, bool add) {
    asm volatile("fence.proxy.async;" ::: "memory");
    if (add)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::
                         "l"(to), "r"(from), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                     "r"(from), "r"(bytes)
                     : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_sent() { /* shared memory is free */
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_added() { /* others may add */
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_await_turn(const unsigned *at, unsigned turn) {
    unsigned now;
    do
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
    while (now != turn);
}
static __device__ __forceinline__ void ${e}_pass_turn(unsigned *at, unsigned turn) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(turn) : "memory");
}
static __device__ __forceinline__ void ${e}_meet_suppliers() {
    __syncwarp();
    asm volatile("bar.sync 5, 64;" ::: "memory");
}
/* end of BULK */
)";

/* Shared memory: slots of keys and values; stages of queries and do; two tiles of slopes; two of
 * dq; statistics and messages of the stages; notes for those who add dq; tickets; barriers. */
const char attention_grad_parts[] = R"(
struct __align__(16) ${e}_message {
    int batch, head, query, key; /* batch < 0: there is no more */
    int tile, rank;              /* of dq: which one, and how many add to it before; or none: -1 */
    int last, states;            /* of an item; of its two blocks of 64 keys: see below */
};
enum {
    ${e}_stages_at = ${slots} * 2 * ${row_bytes},
    ${e}_slopes_at = ${e}_stages_at + ${stages} * 2 * ${tile_bytes},
    ${e}_sums_at = ${e}_slopes_at + 2 * ${rows} * 128,
    ${e}_sum_bytes = 256 * ${dim},
    ${e}_rows_at = ${e}_sums_at + 2 * ${e}_sum_bytes,
    ${e}_messages_at = ${e}_rows_at + ${stages} * 8 * ${tile},
    ${e}_notes_at = ${e}_messages_at + ${stages} * 32,
    ${e}_tickets_at = ${e}_notes_at + 16,
    ${e}_full = ${e}_tickets_at + 16, /* barriers, of 8 bytes: of each stage */
    ${e}_empty = ${e}_full + ${stages} * 8,
    ${e}_free = ${e}_empty + ${stages} * 8, /* of each slot */
    ${e}_shown = ${e}_free + ${slots} * 8,  /* a tile of slopes, by both warpgroups */
    ${e}_given = ${e}_shown + 8,            /* a tile of dq: two */
    ${e}_taken = ${e}_given + 16,
};
static __device__ __forceinline__ void ${e}_make_barriers(unsigned at) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < ${stages}; i++) {
            ${e}_barrier(at + ${e}_full + i * 8, 64); /* threads that bring */
            ${e}_barrier(at + ${e}_empty + i * 8, 256);
        }
        for (int i = 0; i < ${slots}; i++) ${e}_barrier(at + ${e}_free + i * 8, 256);
        ${e}_barrier(at + ${e}_shown, 8); /* warps */
        for (int i = 0; i < 2; i++) {
            ${e}_barrier(at + ${e}_given + i * 8, 8);
            ${e}_barrier(at + ${e}_taken + i * 8, 1);
        }
    }
    __syncthreads();
}
static __device__ __forceinline__ void ${e}_signal(unsigned barrier) { /* a warp's */
    __syncwarp();
    if (threadIdx.x % 32 == 0) ${e}_arrive(barrier);
}
/* This thread has read what others replace next; each tells for itself (template_attention_wgmma.c,
 * ${e}_release). */
static __device__ __forceinline__ void ${e}_leave(unsigned barrier) {
    __syncwarp();
    ${e}_arrive(barrier);
}
)";

/* The two warps that bring. A stage is told to be full once later ones are under way, and at the
 * latest before a wait. */
const char attention_grad_supply[] = R"(
struct ${e}_supply {
    unsigned at, count; /* of tiles so far */
    int untold;
    template <int LATER> __device__ __forceinline__ void tell() {
        ${e}_landed<LATER>();
        for (; untold > LATER; untold--)
            ${e}_arrive(at + ${e}_full + (count - untold) % ${stages} * 8);
    }
    __device__ __forceinline__ void await_free(unsigned barrier, unsigned parity) {
        /* A warp stays together: barriers behind count on it. */
        if (__ballot_sync(~0u, !${e}_ended(barrier, parity)) == 0) return;
        tell<0>();
        ${e}_await(barrier, parity);
        __syncwarp();
    }
    __device__ __forceinline__ int free_stage() {
        int stage = count % ${stages};
        await_free(at + ${e}_empty + stage * 8, count / ${stages} % 2 ^ 1);
        return stage;
    }
    __device__ __forceinline__ void give() {
        ${e}_commit();
        count++;
        if (++untold > 2) tell<2>();
    }
};
/* This thread's number, and what depends on it, anew each time: no registers are left for it. */
static __device__ __forceinline__ int ${e}_supplier() {
    unsigned thread[1] = {threadIdx.x % 64};
    ${e}_hold(thread);
    return thread[0];
}
/* A thread's pieces lie below each other, and every other one in steps of whole swizzles, so that
 * only two places are computed: these warps are to take few of the others' instructions. */
template <int ROWS>
static __device__ __forceinline__ void ${e}_bring(unsigned tile, const ml_bf16 *from,
                                                  long long stride, int there) {
    const int pieces = ${dim} / 8, step = 64 / pieces;
    int thread = ${e}_supplier(), row = thread / pieces, piece = thread % pieces;
    const bool exists = ${head_dim} == ${dim} || piece < ${head_dim} / 8;
    const ml_bf16 *own = exists ? from + row * stride + piece * 8 : from;
    unsigned even = tile + ${e}_place(ROWS, row, piece);
    unsigned odd = tile + ${e}_place(ROWS, row + step, piece);
    if (there >= ROWS) {
#pragma unroll 4
        for (int r = 0; r < ROWS; r += 2 * step) {
            ${e}_copy(even + r * 128, own + r * stride, exists ? 16 : 0);
            ${e}_copy(odd + r * 128, own + (r + step) * stride, exists ? 16 : 0);
        }
    } else
#pragma unroll 2
        for (int r = 0; r < ROWS; r += 2 * step) {
            bool valid = row + r < there && exists, next = row + r + step < there && exists;
            ${e}_copy(even + r * 128, valid ? own + r * stride : from, valid ? 16 : 0);
            ${e}_copy(odd + r * 128, next ? own + (r + step) * stride : from, next ? 16 : 0);
        }
}
/* The tiles of queries that an item's keys are for, in the heads that share these: the last queries
 * first, of all heads. Looked up 32 at a time: each lane knows what one of them is, -1 or how many
 * add to its dq before, and in the last four bits what the first 64 keys, and the others, are to it
 * (template_attention.h). */
struct ${e}_tiles {
    int batch, kv_head, key, end, next, count, found;
    unsigned left;
    __device__ __forceinline__ ${e}_tiles(const ${e}_arguments &a, int batch, int kv_head, int key)
        : batch(batch), kv_head(kv_head), key(key), next(0), left(0) {
        ${places}
        int last_key = key + ${rows} - 1 < ${kv_seq} ? key + ${rows} - 1 : ${kv_seq} - 1;
        (void)last_key;
        int first = ${first_query} / ${tile};
        end = (${end_query} + ${tile} - 1) / ${tile}, count = (end - first) * ${group};
    }
    __device__ __forceinline__ void place(int i, int &head, int &query) const {
        head = kv_head * ${group} + i % ${group}, query = (end - 1 - i / ${group}) * ${tile};
    }
    __device__ __forceinline__ bool more(const ${e}_arguments &a) {
        while (!left) {
            if (next >= count) return false;
            int i = next + threadIdx.x % 32, head, query;
            next += 32, found = -1;
            if (i < count) {
                ${places}
                place(i, head, query);
                found = ${entry};
            }
            left = __ballot_sync(~0u, found >= 0);
        }
        return true;
    }
    __device__ __forceinline__ int take(int &head, int &query) {
        int lane = __popc(~left & (left - 1)); /* the first bit */
        left &= left - 1;
        place(next + lane - 32, head, query);
        return __shfl_sync(~0u, found, lane);
    }
};
/* All tiles of an item; where there are none, one that hides everything. */
static __device__ __forceinline__ void ${e}_bring_item(const ${e}_arguments &a, char *base,
                                                       ${e}_supply &supply, ${e}_tiles &tiles) {
    int batch = tiles.batch;
    for (bool more = tiles.more(a), none = !more; more || none; none = false) {
        int stage = supply.free_stage(), query = 0, there = 0, thread = ${e}_supplier();
        int head = tiles.kv_head * ${group}, entry = -16; /* nobody's, all hidden */
        if (more) entry = tiles.take(head, query), there = ${seq} - query;
        int tile = (batch * ${heads} + head) * ${q_tiles} + query / ${tile};
        ${e}_message *message = (${e}_message *)(base + ${e}_messages_at) + stage;
        if (thread == 0)
            *message = ${e}_message{batch, head, query, tiles.key, tile, entry >> 4, 1, entry & 15};
        float *rows = (float *)(base + ${e}_rows_at) + stage * (2 * ${tile});
        if (!none && thread < 32)
            ${e}_copy(${e}_address(rows) + thread * 16,
                      (const float *)a.p[${delta_at}] + tile * 128LL + thread * 4, 16);
        unsigned to = supply.at + ${e}_stages_at + stage * (2 * ${tile_bytes});
        ${e}_bring<${tile}>(to, (const ml_bf16 *)a.p[0] + ${q_batch} + head * ${q_head} +
                   query * ${q_seq}, ${q_seq}, there);
        ${e}_bring<${tile}>(to + ${tile_bytes}, (const ml_bf16 *)a.p[5] + ${g_batch} +
                   head * ${g_head} + query * ${g_seq}, ${g_seq}, there);
        more = more && tiles.more(a);
        if (more && thread == 0) message->last = 0;
        supply.give();
    }
}
static __device__ __forceinline__ void ${e}_bring_all(const ${e}_arguments &a, char *base,
                                                      unsigned at) {
    unsigned *counter = (unsigned *)((float *)a.p[${delta_at}] + ${counter_at});
    int thread = threadIdx.x % 64;
    ${e}_supply supply = {at};
    for (unsigned number = 0;; number++) {
        int *ticket = (int *)(base + ${e}_tickets_at) + number % 2, slot = number % ${slots};
        /* No sooner than it is begun: others wait for it. */
        if (thread == 0) *ticket = (int)atomicAdd(counter, 1u);
        ${e}_meet_suppliers();
        int item = *ticket, first = 0, heads = ${first_heads};
        if (item >= ${items}) break;
        if (item >= ${first_heads} * ${k_blocks}) {
            item -= ${first_heads} * ${k_blocks};
            first = item / (${together} * ${k_blocks}), heads = ${together};
            item -= first * (${together} * ${k_blocks});
            first = ${first_heads} + first * ${together};
        }
        int unit = first + item % heads, key = item / heads * ${rows};
        int kv_head = unit % ${kv_heads}, batch = unit / ${kv_heads};
        supply.await_free(at + ${e}_free + slot * 8, number / ${slots} % 2 ^ 1);
        unsigned to = at + slot * (2 * ${row_bytes});
        ${e}_bring<${rows}>(to, (const ml_bf16 *)a.p[1] + ${k_batch} + kv_head * ${k_head} +
                   key * ${k_seq}, ${k_seq}, ${kv_seq} - key);
        ${e}_bring<${rows}>(to + ${row_bytes}, (const ml_bf16 *)a.p[2] + ${v_batch} +
                   kv_head * ${v_head} + key * ${v_seq}, ${v_seq}, ${kv_seq} - key);
        ${e}_tiles tiles(a, batch, kv_head, key);
        ${e}_bring_item(a, base, supply, tiles);
    }
    int stage = supply.free_stage();
    if (thread == 0) ((${e}_message *)(base + ${e}_messages_at))[stage].batch = -1;
    supply.give();
    supply.tell<0>();
}
)";

/* Each of the last two warps adds every other tile of dq. */
const char attention_grad_add[] = R"(
static __device__ __forceinline__ void ${e}_add_all(const ${e}_arguments &a, char *base,
                                                    unsigned at) {
    int which = threadIdx.x / 32 % 2;
    float *sums = (float *)a.p[${delta_at}] + ${sums_at};
    unsigned *turns = (unsigned *)((float *)a.p[${delta_at}] + ${turns_at});
    if (threadIdx.x % 32) return;
    for (unsigned parity = 0;; parity ^= 1) {
        ${e}_await(at + ${e}_given + which * 8, parity);
        int tile = ((const int *)(base + ${e}_notes_at))[which * 2];
        int rank = ((const int *)(base + ${e}_notes_at))[which * 2 + 1];
        if (tile < 0) break;
        if (rank >= 0) {
            ${e}_await_turn(turns + tile, (unsigned)rank);
            ${e}_send(sums + tile * (64LL * ${dim}), at + ${e}_sums_at + which * ${e}_sum_bytes,
                      ${e}_sum_bytes, rank > 0);
            ${e}_sent();
        }
        ${e}_arrive(at + ${e}_taken + which * 8);
        if (rank >= 0) {
            ${e}_added();
            ${e}_pass_turn(turns + tile, (unsigned)rank + 1);
        }
    }
}
/* Tile number `turn` of dq to those who add. */
static __device__ __forceinline__ void ${e}_give(char *base, unsigned at, int turn, int tile,
                                                 int rank, const float (&sum)[${dim} / 4]) {
    int which = turn % 2;
    ${e}_await(at + ${e}_taken + which * 8, turn / 2 % 2 ^ 1);
    char *to = base + ${e}_sums_at + which * ${e}_sum_bytes;
    to += threadIdx.x / 128 * (${e}_sum_bytes / 2) + threadIdx.x % 128 * 16;
#pragma unroll
    for (int i = 0; i < ${dim} / 16; i++)
        *(float4 *)(to + i * 2048) =
            float4{sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
    ${e}_show();
    int *note = (int *)(base + ${e}_notes_at) + which * 2;
    if (threadIdx.x == 0) note[0] = tile, note[1] = rank;
    ${e}_signal(at + ${e}_given + which * 8);
}
static __device__ __forceinline__ void ${e}_give_up(char *base, unsigned at, int turn) {
    for (int i = 0; i < 2; i++, turn++) {
        ${e}_await(at + ${e}_taken + turn % 2 * 8, turn / 2 % 2 ^ 1);
        if (threadIdx.x == 0) ((int *)(base + ${e}_notes_at))[turn % 2 * 2] = -1;
        ${e}_signal(at + ${e}_given + turn % 2 * 8);
    }
}
)";
