/* The gradient of attention on Hopper's warpgroup products in one pass over the scores: dq, dk, dv.
 *
 * A block takes one item after another, 128 keys of a head; its first two warpgroups own 64 keys
 * each and compute everything transposed: rows of their accumulators are keys, so that
 * probabilities and slopes are left operands as they are. Slopes also go through shared memory, in
 * which a row is a key, and are read with rows as depth for dq, of which each warpgroup has half
 * the columns. Four more warps bring operands and add tiles of dq to sums in memory
 * (template_attention_wgmma_supply.c).
 *
 * Results repeat: a tile of dq is added up in the order of rising keys. Items are handed out in
 * that order within a head too (a counter in memory, asked when an item is begun), so that whoever
 * is waited for runs already. They are handed out for groups of heads, the first keys of all heads
 * of a group first: with a causal mask most queries see these, so that short items come last and no
 * multiprocessor is idle for long, and the items of a head begin at different times and hardly wait
 * for each other. An item begins with the last queries, of all heads that share its keys. Who adds
 * first stores, so that nobody clears sums. A kernel before gives row statistics, one behind turns
 * sums into dq.
 *
 * Tiles that masks of the score function hide are nobody's: those who bring skip them, by a table
 * that the kernel before makes from the states of blocks (template_attention_score.c). It also has
 * each tile's turn, as those who never come must not be waited for.
 *
 * A sum's elements lie as threads hold them: [tile of 64 queries][half][4 sums of a thread][thread]
 * [4].
 *
 * Cycles of an SM for 128 queries x 128 keys: products 2,560 with heads of 64 and 5,120 with 128;
 * exponentials 1,024 and as many for a tanh; 5 to 12 other instructions an element, 128 each.
 * Measured on an H200 (causal, TFLOP/s; plain, soft cap, slopes (ALiBi), documents of 700 tokens):
 * heads of 64, 1,024 tokens: 292, 265, 289, 366; heads of 128, 4,096 tokens: 469, 428, -, 1,300;
 * before items came in this order 281, 259, 279, 354 and 460, 413, 463, 1,273. With halves of tiles
 * left out and more items of a head at once documents went from 370 and 1,257 to 374 and 1,319 in
 * one run, others stayed. The order took 24 heads on 8, 2 x 4,096 tokens, from 1,367 us to 1,088 (a
 * step of llama-3b: 322.8 to 317.6 ms), 16 on 8, 4 x 4,096, from 1,620 to 1,450; with a loop that
 * was 4 % slower 16 on 2, 16,384 tokens, from 321 TFLOP/s to 468; 16 of 2,048 tokens from 242 to
 * 312. Of 1.0 ms with heads of 64 the kernel before takes 6 % and the one behind 8, adding up dq in
 * order 6; masks take 2 %.
 *
 * What takes time is neither products nor shared memory: in a loop in which products are under way
 * beside everything else nobody waits for them, and a tile of 64 queries takes as long with heads
 * of 64 (3,640 cycles: exponentials 1,230, slopes 515, issuing products 590, where products from
 * registers stop a warp and operands were made anew for each, giving dq away 530, an item's end
 * 350). Two warps on a scheduler, at the same point, do not hide each other's latencies.
 *
 * Tried, and no faster (H200, normal operands): the next tile's scores issued before a tile's last
 * products (2 % slower); dp awaited when half of the scores are probabilities (the same, 1 % slower
 * with heads of 128); products always under way (14 % slower with heads of 128); anything between
 * the wait for scores and the loads that follow it, which ptxas moves up: 4 to 11 %.
 *
 * Where masks leave short items (documents of 700 tokens of 4,096, heads of 128: 7.5 tiles an item,
 * 1.69 million cycles of an SM before halves of tiles were left out), an item's end takes 5,100
 * cycles and the wait for the next one's first tile 7,500, a quarter of all time; a tile of which
 * masks hide a part takes 1,200 more than another, 7 %; the kernels around this one take 18 %. No
 * faster there: the next item's queries, values and keys brought as soon as each one's place is
 * free (equal, 3 % slower with less care), fetching them to L2 sooner (10 % slower), dq in any
 * order (equal), masks worked out beside the products for scores (equal; in a loop 8 % slower). */
#include "codegen/kernels/attention.h"

/* One tile of the scores: s to probabilities and dp to the gradients of the scaled products. Rows
 * are keys, columns queries, whose lse (in units of log2) and delta are in shared memory. What the
 * score function adds along both, such as slope[h] (k - q), comes from a row's first query on. */
static const char slopes_text[] = R"(
template <bool MASKED>
static __device__ __forceinline__ void ${e}_slopes(const ${e}_arguments &a, int batch, int head,
                                                   int query, int key, const float *lse,
                                                   float (&s)[${tile} / 2],
                                                   float (&dp)[${tile} / 2]) {
    int lane = threadIdx.x % 32;
    key += threadIdx.x / 32 % 4 * 16 + lane / 4;
    ${captures}
    ${places}
    ${lines}
#pragma unroll
    for (int row = 0; row < 2; row++) {
        int kv = key + row * 8, qi = query + lane % 4 * 2;
        ${clamp_query}
        ${clamp_key}
        (void)kv, (void)qi;
        ${line_rows}
    }
#pragma unroll
    for (int u = 0; u < ${tile} / 8; u++) {
        int column = u * 8 + lane % 4 * 2;
        float2 base = *(const float2 *)(lse + column);
        float2 delta = *(const float2 *)(lse + ${tile} + column);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int qi = query + column + j % 2, kv = key + j / 2 * 8, i = u * 4 + j;
            bool hidden = MASKED && !(kv < ${kv_seq} && (${visible}));
            const int row = j / 2;
            const float step = u * 8 + j % 2;
            float x = s[i], raw = x * ${scale}, slope;
            (void)raw, (void)qi, (void)kv, (void)row, (void)step;
            if (${scored} || MASKED) {
                ${clamp_query}
                ${clamp_key}
            }
            if (MASKED) {
                ${hide}
            }
            if (${scored}) {
                x = raw;
                ${score}
            }
            x = ${e}_exp2(x * ${unit} - (j % 2 ? base.y : base.x));
            x = hidden ? 0 : x;
            slope = x * (dp[i] - (j % 2 ? delta.y : delta.x));
            if (${scored}) {
                ${derivative}
                slope = hidden ? 0 : slope;
            }
            s[i] = x;
            dp[i] = slope;
        }
    }
}
)";

/* A warp's 16 rows of an accumulator to memory, of which `there` exist. The four threads of a row
 * have two columns each of eight: they trade, so that each writes eight of its own, 16 bytes. */
static const char store_text[] = R"(
static __device__ __forceinline__ void ${e}_trade(unsigned (&x)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            bool high = threadIdx.x & step;
            unsigned other = __shfl_xor_sync(~0u, high ? x[i] : x[i + step], step);
            if (high)
                x[i] = other;
            else
                x[i + step] = other;
        }
}
template <int N>
static __device__ __forceinline__ void ${e}_store_rows(const float (&sum)[N], float factor,
                                                       ml_bf16 *to, long long stride, int there) {
    int lane = threadIdx.x % 32;
    to += lane / 4 * stride + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < N / 4; i += 4)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            unsigned x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float *pair = sum + (i + k) * 4 + r * 2;
                x[k] = ${e}_pack(pair[0] * factor, pair[1] * factor);
            }
            ${e}_trade(x);
            if (lane / 4 + r * 8 < there && lane % 4 * 8 + i * 8 < ${head_dim})
                *(uint4 *)(to + r * 8 * stride + i * 8) = uint4{x[0], x[1], x[2], x[3]};
        }
}
)";

/* Operands are computed once and added to, and the warpgroup is one lane's, so that compilers know
 * that it is the same for all: a third of the instructions between products. */
static const char products_text[] = R"(
static __device__ __forceinline__ int ${e}_group() {
    return __shfl_sync(~0u, threadIdx.x / 128, 0);
}
static __device__ __forceinline__ unsigned long long ${e}_further(unsigned long long operand,
                                                                  unsigned bytes) {
    return operand >> 32 << 32 | ((unsigned)operand + bytes / 16);
}
static __device__ __forceinline__ void ${e}_show_slopes(char *tile,
                                                        const unsigned (&p)[${tile} / 4]) {
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < ${tile} / 4; i++)
        *(unsigned *)(tile + ${e}_place(${rows}, row + i % 2 * 8, i / 2) + threadIdx.x % 4 * 4) =
            p[i];
    ${e}_show();
}
static __device__ __forceinline__ void ${e}_gather_queries(float (&sum)[${dim} / 4],
                                                           unsigned slopes, unsigned keys) {
    /* 64 columns are a block, 32 are half of its lines */
    keys += ${e}_group() * (${dim} == 128 ? ${rows} * 128 : 64);
    unsigned long long l = ${e}_operand(slopes, ${rows} * 128);
    unsigned long long r = ${e}_operand(keys, ${rows} * 128);
#pragma unroll
    for (int k = 0; k < ${rows} / 16; k++)
        ${e}_gather(sum, ${e}_further(l, k * 2048), ${e}_further(r, k * 2048), k > 0);
}
static __device__ __forceinline__ void ${e}_two_scores(float (&s)[${tile} / 2],
                                                       float (&dp)[${tile} / 2], unsigned at,
                                                       int slot, int stage) {
    unsigned long long l = ${e}_operand(at + slot * (2 * ${row_bytes}) + ${e}_group() * 8192, 16);
    unsigned long long r = ${e}_operand(at + ${e}_stages_at + stage * (2 * ${tile_bytes}), 16);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int k = 0; k < ${depth} / 16; k++) {
            unsigned keys = k / 4 * ${rows} * 128 + k % 4 * 32;
            unsigned queries = k / 4 * ${tile} * 128 + k % 4 * 32;
            ${e}_score(i ? dp : s, ${e}_further(l, i * ${row_bytes} + keys),
                       ${e}_further(r, i * ${tile_bytes} + queries), k > 0);
        }
}
static __device__ __forceinline__ void ${e}_two_chains(
    float (&dk)[${dim} / 2], float (&dv)[${dim} / 2], const unsigned (&slopes)[${tile} / 4],
    const unsigned (&p)[${tile} / 4], unsigned at, int stage) {
    unsigned queries = at + ${e}_stages_at + stage * (2 * ${tile_bytes});
    ${e}_chain(dv, p, queries + ${tile_bytes});
    ${e}_chain(dk, slopes, queries);
}
template <bool MASKED>
static __device__ __forceinline__ void ${e}_tile_slopes(const ${e}_arguments &a, const char *base,
                                                        const ${e}_message &m, int stage,
                                                        float (&s)[${tile} / 2],
                                                        float (&dp)[${tile} / 2]) {
    ${places}
    const float *rows = (const float *)(base + ${e}_rows_at) + stage * (2 * ${tile});
    int key = m.key + threadIdx.x / 128 * 64, query = m.query;
    int keys = 64, last_query = query + ${tile} - 1;
    bool part = (m.states >> threadIdx.x / 128 * 2 & 3) != ${whole_state};
    (void)keys, (void)last_query;
    if (MASKED || part || key + 64 > ${kv_seq} || (${crosses}))
        ${e}_slopes<true>(a, m.batch, m.head, query, key, rows, s, dp);
    else
        ${e}_slopes<false>(a, m.batch, m.head, query, key, rows, s, dp);
}
/* Does no query of this tile see any of this warpgroup's keys? */
static __device__ __forceinline__ bool ${e}_hidden(const ${e}_arguments &a, const ${e}_message &m) {
    ${places}
    int key = m.key + ${e}_group() * 64, query = m.query;
    int keys = 64, last_query = query + ${tile} - 1;
    (void)keys, (void)last_query, (void)query;
    return (m.states >> ${e}_group() * 2 & 3) == 0 || key >= ${kv_seq} || (${hides});
}
/* dk and dv of an item. */
static __device__ __forceinline__ void ${e}_finish_item(const ${e}_arguments &a,
                                                        const ${e}_message &m,
                                                        float (&dk)[${dim} / 2],
                                                        float (&dv)[${dim} / 2]) {
    int batch = m.batch, kv_head = m.head / ${group}, key = m.key + threadIdx.x / 32 * 16;
    (void)batch;
    ${e}_store_rows<${dim} / 2>(dk, ${scale}, (ml_bf16 *)a.p[${dk_at}] + ${dk_batch} +
                                kv_head * ${dk_head} + key * ${dk_seq}, ${dk_seq}, ${kv_seq} - key);
    ${e}_store_rows<${dim} / 2>(dv, 1.0f, (ml_bf16 *)a.p[${dv_at}] + ${dv_batch} +
                                kv_head * ${dv_head} + key * ${dv_seq}, ${dv_seq}, ${kv_seq} - key);
#pragma unroll
    for (int i = 0; i < ${dim} / 2; i++) dk[i] = dv[i] = 0;
    ${e}_hold(dk); /* before more products begin */
    ${e}_hold(dv);
}
)";

/* One tile after another. Where all keys of one warpgroup are hidden, a tile is the other's alone:
 * this one only has its half of dq. */
static const char consume_text[] = R"(
static __device__ __forceinline__ void ${e}_skip_tile(char *base, unsigned at, int stage,
                                                      int turn) {
    const unsigned zeros[${tile} / 4] = {};
    ${e}_leave(at + ${e}_empty + stage * 8);
    ${e}_show_slopes(base + ${e}_slopes_at + turn % 2 * (${rows} * 128), zeros);
    ${e}_signal(at + ${e}_shown);
    ${e}_await(at + ${e}_shown, turn % 2);
}
static __device__ __forceinline__ void ${e}_consume(const ${e}_arguments &a, char *base,
                                                    unsigned at) {
    float s[${tile} / 2], dp[${tile} / 2], dk[${dim} / 2] = {}, dv[${dim} / 2] = {};
    unsigned p[${tile} / 4], slopes[${tile} / 4];
    int slot = 0, turn = 0;
    ${e}_ring ring = {};
    for (;; turn++) {
        int stage = ring.stage, odd = turn % 2 * (${rows} * 128);
        ${e}_await(at + ${e}_full + stage * 8, ring.parity);
        ring.next();
        const ${e}_message m = ((const ${e}_message *)(base + ${e}_messages_at))[stage];
        if (m.batch < 0) break;
        float sum[${dim} / 4];
        if (${e}_hidden(a, m)) {
            ${e}_skip_tile(base, at, stage, turn);
            ${e}_begin();
            ${e}_gather_queries(sum, at + ${e}_slopes_at + odd, at + slot * (2 * ${row_bytes}));
            ${e}_end();
        } else {
            ${e}_begin();
            ${e}_two_scores(s, dp, at, slot, stage);
            ${e}_end();
            ${e}_finish<0>();
            ${e}_hold(s);
            ${e}_hold(dp);
            ${e}_tile_slopes<false>(a, base, m, stage, s, dp);
            ${e}_round(p, s);
            ${e}_round(slopes, dp);
            ${e}_show_slopes(base + ${e}_slopes_at + odd, slopes);
            ${e}_signal(at + ${e}_shown);
            ${e}_begin();
            ${e}_two_chains(dk, dv, slopes, p, at, stage);
            ${e}_end();
            ${e}_await(at + ${e}_shown, turn % 2);
            ${e}_begin();
            ${e}_gather_queries(sum, at + ${e}_slopes_at + odd, at + slot * (2 * ${row_bytes}));
            ${e}_end();
            ${e}_finish<1>();
            ${e}_hold(p);
            ${e}_hold(slopes);
            ${e}_hold(dk);
            ${e}_hold(dv);
            ${e}_leave(at + ${e}_empty + stage * 8);
        }
        ${e}_finish<0>();
        ${e}_hold(sum);
        if (m.last) ${e}_leave(at + ${e}_free + slot * 8);
        ${e}_give(base, at, turn, m.tile, m.rank, sum);
        if (m.last) {
            ${e}_finish_item(a, m, dk, dv);
            if (++slot == ${slots}) slot = 0;
        }
    }
    ${e}_give_up(base, at, turn);
}
)";

static const char kernel_text[] = R"(
extern "C" __global__ void __launch_bounds__(${threads}, 1) ${e}(${e}_arguments a) {
    extern __shared__ uint4 ${e}_shared[];
    unsigned skipped = (1024 - ${e}_address(${e}_shared) % 1024) % 1024;
    char *base = (char *)${e}_shared + skipped;
    unsigned at = ${e}_address(base);
    ${e}_make_barriers(at);
    int warp = threadIdx.x / 32;
    if (warp >= 8) {
        ${e}_fewer_registers<${fewer}>();
        if (warp < 10)
            ${e}_bring_all(a, base, at);
        else
            ${e}_add_all(a, base, at);
    } else {
        ${e}_more_registers<${more}>();
        ${e}_consume(a, base, at);
    }
}
)";

/* Blocks of 64 queries: their lse in units of log2 and delta, the row sums of do o, side by side;
 * rows that do not exist, or see nothing, get a large lse. Nobody has added to their dq. */
static const char prepare_text[] = R"(
extern "C" __global__ void __launch_bounds__(128) ${e}(${e}_arguments a) {
    int query = blockIdx.x % ${q_tiles} * 64, head = blockIdx.x / ${q_tiles} % ${heads};
    int batch = blockIdx.x / (${q_tiles} * ${heads});
    const ml_bf16 *o = (const ml_bf16 *)a.p[3] + ${o_batch} + head * ${o_head};
    const ml_bf16 *g = (const ml_bf16 *)a.p[5] + ${g_batch} + head * ${g_head};
    const float *lse = (const float *)a.p[4] + ${lse_batch} + head * ${lse_head};
    float *work = (float *)a.p[${delta_at}], *rows = work + blockIdx.x * 128LL;
    if (threadIdx.x == 0) {
        ((unsigned *)(work + ${turns_at}))[blockIdx.x] = 0;
        if (blockIdx.x == 0) *(unsigned *)(work + ${counter_at}) = 0;
    }
    if (threadIdx.x < 64) {
        int qi = query + threadIdx.x;
        float x = qi < ${seq} ? lse[qi * ${lse_seq}] : -ML_INF;
        rows[threadIdx.x] = x == -ML_INF ? 3e38f : x * 1.44269504f;
    }
#pragma unroll
    for (int r = threadIdx.x / 16; r < 64; r += 8) {
        int qi = query + r, c = threadIdx.x % 16 * 8;
        float sum = 0;
        if (qi < ${seq} && c < ${head_dim}) {
            union { uint4 all; ml_bf16 x[8]; } left, right;
            left.all = *(const uint4 *)(o + qi * ${o_seq} + c);
            right.all = *(const uint4 *)(g + qi * ${g_seq} + c);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += ml_load_bf16(left.x[i]) * ml_load_bf16(right.x[i]);
        }
#pragma unroll
        for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x % 16 == 0) rows[64 + r] = sum;
    }
    ${find_entries}
}
)";
/* With masks: what a block's queries are to each block of 128 keys (${e}_tiles), from the first one
 * that they see on, by the states of blocks of 64 by 64, of which it has two. */
static const char entries_text[] = R"(
    if (threadIdx.x < 32 && (${mask_heads} > 1 || head == 0)) {
        ${places}
        int lane = threadIdx.x, rank = 0, latest = ${latest_block};
        long long mask = (long long)batch * ${mask_heads} + ${mask_head};
        const char *states = a.p[${states_at}] + (mask * ${q_parts} + query / 64) * ${k_parts};
        int *entries = (int *)(work + ${entries_at}) + mask * (${k_blocks} * ${q_tiles});
        for (int start = ${first_key} / ${keys_of_block}; start <= latest; start += 32) {
            int block = start + lane, shown = 0;
            for (int i = 0; i < 2; i++) {
                int k = block * 2 + i;
                if (block <= latest && k < ${k_parts}) shown |= states[k] << 2 * i;
            }
            unsigned all = __ballot_sync(~0u, shown != 0);
            int before = rank + __popc(all & ((1u << lane) - 1));
            if (block <= latest)
                entries[block * ${q_tiles} + query / 64] = shown ? before * 16 + shown : -1;
            rank += __popc(all);
        }
    })";
static const char entry_text[] =
    "((const int *)((const float *)a.p[${delta_at}] + ${entries_at}))"
    "[(((long long)batch * ${mask_heads} + ${mask_head}) * ${k_blocks} + key / ${rows}) * "
    "${q_tiles} + query / ${tile}]";

/* Blocks of 64 queries: what was added up, if anything was, as dq. */
static const char settle_text[] = R"(
extern "C" __global__ void __launch_bounds__(128) ${e}(${e}_arguments a) {
    int query = blockIdx.x % ${q_tiles} * 64, head = blockIdx.x / ${q_tiles} % ${heads};
    int batch = blockIdx.x / (${q_tiles} * ${heads});
    ml_bf16 *dq = (ml_bf16 *)a.p[${dq_at}] + ${dq_batch} + head * ${dq_head};
    const float *work = (const float *)a.p[${delta_at}];
    const float4 *sums = (const float4 *)(work + ${sums_at}) +
                         (long long)blockIdx.x * (16 * ${dim}) + threadIdx.x;
    bool any = ((const unsigned *)(work + ${turns_at}))[blockIdx.x] > 0;
    query += threadIdx.x / 32 * 16;
    float x[${dim} / 2];
#pragma unroll
    for (int i = 0; i < ${dim} / 8; i++) {
        float4 sum = any ? sums[i * 128] : float4{0, 0, 0, 0};
        x[4 * i] = sum.x, x[4 * i + 1] = sum.y, x[4 * i + 2] = sum.z, x[4 * i + 3] = sum.w;
    }
    ${e}_store_rows<${dim} / 2>(x, ${scale}, dq + query * ${dq_seq}, ${dq_seq},
                                     ${seq} - query);
}
)";

/* How a block is cut, with heads of 64 and of 128. Threads that copy would need 64 registers, but
 * with heads of 128 those that compute need 232: with fewer, ptxas serializes their products. */
typedef struct {
    int stages, slots, fewer;
} grad_tile;
static const grad_tile grad_tiles[2] = {{4, 2, 56}, {2, 1, 40}};
enum { QUERIES = 64, KEYS = 128 };

static int64_t tiles_of_queries(const attention_printer *p) {
    return (p->a->seq + QUERIES - 1) / QUERIES;
}

static int64_t blocks_of_keys(const attention_printer *p) {
    return (p->a->kv_seq + KEYS - 1) / KEYS;
}

/* The workspace: statistics of the rows, sums of dq, how many added to each tile of these, the
 * counter of items; with masks what tiles are to blocks of keys. In f32 elements. */
typedef struct {
    int64_t sums, turns, counter, entries, end;
} grad_room;
static grad_room lay_out(const attention_printer *p) {
    int64_t tiles = p->batches * p->a->heads * tiles_of_queries(p);
    grad_room room = {.sums = tiles * 2 * QUERIES};
    room.turns = room.sums + tiles * QUERIES * attention_width(p);
    room.counter = room.turns + tiles;
    room.entries = room.end = room.counter + 1;
    if (p->masks > 0)
        room.end += p->batches * (p->masked_by_head ? p->a->heads : 1) * tiles_of_queries(p) *
                    blocks_of_keys(p);
    return room;
}

int64_t attention_wgmma_sums(const attention_printer *p) {
    return attention_wgmma_serves(p) ? lay_out(p).end : 0;
}

static ml_kernel *print_simple(attention_printer *p, const char *text, const char *label) {
    const char *const bodies[] = {template_mma_ptx, store_text, text};
    ml_kernel *kernel =
        template_kernel_of(&p->text, bodies, 3, label, p->step->read_count + p->step->write_count);
    template_launch(kernel, tiles_of_queries(p) * p->a->heads * p->batches, 1, 1, 128, 0);
    return kernel;
}

/* The last keys that queries query .. query + 63 see; what masks hide, and from whom. */
static void set_visible(attention_printer *p, const grad_room *room) {
    ml_template *t = &p->text;
    bool listed = p->masks > 0;
    template_set(t, "latest_block",
                 p->a->args.causal ? "(query + %d + ${shift} < ${kv_seq} ? (query + %d + ${shift}) "
                                     "/ %d : ${k_blocks} - 1)"
                                   : "(${k_blocks} - 1)",
                 QUERIES - 1, QUERIES - 1, KEYS);
    template_set(t, "entries_at", "%lldLL", (long long)room->entries);
    template_set(t, "listed", "%d", listed);
    template_set_text(t, "find_entries", listed ? entries_text : "");
    template_set_text(t, "entry",
                      listed
                          ? entry_text
                          : "((key / ${rows} - ${first_key} / ${rows}) * 16 + ${whole_state} * 5)");
    template_set_text(t, "hide", listed ? "${shown} hidden |= !shown;" : "");
    template_set_text(t, "lines", "");
    template_set_text(t, "line_rows", "");
    if (p->a->args.score) attention_open_score(p);
}

/* Items in the order in which they are begun: heads in groups, the first one with what is left
 * over, and in a group the first keys of all its heads first, which most queries see: the last
 * items are short. Items of a head that begin together wait for each other's dq, tile by tile; of
 * so many heads only a few do, and few of those that a head has: with heads of 64, 1,024 tokens (8
 * items a head; 768 heads) groups of 4 took 2,640 us, of 8 1,690, 16 1,110, 66 880, 132 940, and
 * short items first, which hardly wait, 915. More at once find more of what they read and add to in
 * the L2 cache: heads of 128, 4,096 tokens, documents: one of a head 1,244 us, four 1,090, 6 to 16
 * 1,068. */
static void set_order(attention_printer *p) {
    enum { OF_A_HEAD = 8 };
    int64_t heads = p->a->kv_heads * p->batches, together = heads, at_once = blocks_of_keys(p) / 4;
    at_once = at_once < 1 ? 1 : at_once > OF_A_HEAD ? OF_A_HEAD : at_once;
    int64_t fewest = (p->schedule->target->multiprocessors + at_once - 1) / at_once;
    if (fewest > 0 && heads > fewest) together = (heads + heads / fewest - 1) / (heads / fewest);
    int64_t groups = (heads + together - 1) / together;
    template_set(&p->text, "together", "%lld", (long long)together);
    template_set(&p->text, "first_heads", "%lld", (long long)(heads - (groups - 1) * together));
}

static ml_kernel *print_items(attention_printer *p, const grad_tile *cut) {
    const ml_attention_step *a = p->a;
    const attention_tile tile = {.groups = 2,
                                 .tile = QUERIES,
                                 .stages = cut->stages,
                                 .resident = 1,
                                 .fewer = cut->fewer,
                                 .gradient = true};
    int64_t items = blocks_of_keys(p) * a->kv_heads * p->batches;
    const char *const bodies[] = {attention_grad_bulk,   slopes_text,        attention_grad_parts,
                                  attention_grad_supply, attention_grad_add, store_text,
                                  products_text,         consume_text,       kernel_text};
    template_set(&p->text, "slots", "%d", cut->slots);
    template_set(&p->text, "items", "%lld", (long long)items);
    set_order(p);
    ml_kernel *kernel = attention_wgmma_kernel(
        p, &tile, bodies, (int)(sizeof bodies / sizeof *bodies), "attention_grad dq dk dv");
    int64_t head = attention_width(p), several = p->schedule->target->multiprocessors;
    int64_t shared = cut->slots * 2 * KEYS * head * 2 + cut->stages * 2 * QUERIES * head * 2 +
                     2 * KEYS * QUERIES * 2 + 2 * QUERIES * head * 4 +
                     cut->stages * (8 * QUERIES + 32 + 16) + 32 + cut->slots * 8 + 40;
    template_launch(kernel, several > 0 && several < items ? several : items, 1, 1, 384,
                    1024 + shared);
    return kernel;
}

void attention_wgmma_gradient(attention_printer *p) {
    ml_template *t = &p->text;
    grad_room room = lay_out(p);
    template_set(t, "q_tiles", "%lld", (long long)tiles_of_queries(p));
    template_set(t, "sums_at", "%lldLL", (long long)room.sums);
    template_set(t, "turns_at", "%lldLL", (long long)room.turns);
    template_set(t, "counter_at", "%lldLL", (long long)room.counter);
    template_set(t, "keys_of_block", "%d", KEYS);
    template_set(t, "k_blocks", "%lld", (long long)blocks_of_keys(p));
    set_visible(p, &room);
    ml_kernel *prepare = print_simple(p, prepare_text, "attention_grad");
    prepare->next = print_items(p, &grad_tiles[attention_width(p) == 128]);
    prepare->next->next = print_simple(p, settle_text, "attention_grad dq");
    p->step->kernel = p->masks > 0 ? attention_states_kernel(p) : prepare;
    if (p->masks > 0) p->step->kernel->next = prepare;
}
