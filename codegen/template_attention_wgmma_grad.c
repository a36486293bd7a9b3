/* The gradient of attention on Hopper's warpgroup products (see template_attention_wgmma.c).
 *
 * Without atomics, so that results repeat: one kernel by blocks of queries gives delta (row sums of
 * do o) and dq, the next by blocks of keys dk and dv. The second computes everything transposed:
 * rows of its accumulators are keys, so that probabilities and slopes are left operands as they
 * are. That is 7 products for the 5 that are counted.
 *
 * Predicted (cycles of an SM for 128 queries x 128 keys, heads of 128): 7,168 for products; slopes
 * twice, of 12 instructions (1,600 each) or 30 with a soft cap (3,900 each). Overlapped to two
 * thirds: 430 TFLOP/s plain, 300-340 with a soft cap; heads of 64: 270 and 190. Registers: dk + dv
 * + scores + slopes = 64 + 64 + 32 + 32 of 232 with heads of 128 and tiles of 64 queries. */
#include "codegen/template_attention.h"
#include "runtime/base/knobs.h"

/* One tile of the scores: s to probabilities and dp to the gradients of the scaled products.
 * ROWS_ARE_KEYS: rows of the accumulators are keys, columns queries, and lse (in units of log2) and
 * delta are by query of the tile; else they are those of this thread's two rows. */
static const char slopes_text[] = R"(
template <bool ROWS_ARE_KEYS>
static __device__ __forceinline__ void ${e}_slopes(const ${e}_arguments &a, int batch, int head,
                                                   int row, int column, bool masked,
                                                   const float *lse, const float *delta,
                                                   float (&s)[${tile} / 2],
                                                   float (&dp)[${tile} / 2]) {
    int lane = threadIdx.x % 32;
    row += threadIdx.x / 32 % 4 * 16 + lane / 4;
    ${captures}
    ${places}
#pragma unroll
    for (int i = 0; i < ${tile} / 2; i++) {
        int r = i / 2 % 2, c = i / 4 * 8 + lane % 4 * 2 + i % 2, at = ROWS_ARE_KEYS ? c : r;
        int qi = ROWS_ARE_KEYS ? column + c : row + r * 8;
        int kv = ROWS_ARE_KEYS ? row + r * 8 : column + c;
        bool hidden = masked && !(kv < ${kv_seq} && (${visible}));
        float x = s[i], raw = x * ${scale}, slope;
        (void)raw, (void)qi, (void)kv;
        if (${scored}) {
            ${clamp_query}
            ${clamp_key}
            x = raw;
            ${score}
            x = ${e}_exp2(x * ${unit} - lse[at]);
            x = hidden ? 0 : x;
            slope = x * (dp[i] - delta[at]);
            ${derivative}
            slope = hidden ? 0 : slope;
        } else {
            x = ${e}_exp2(x * ${unit} - lse[at]);
            x = hidden ? 0 : x;
            slope = x * (dp[i] - delta[at]);
        }
        s[i] = x;
        dp[i] = slope;
    }
}
)";

/* Shared memory: queries, do, stages of keys or values (keys 0, values 0, keys 1, ...), barriers,
 * lse, delta. */
static const char queries_text[] = R"(
static __device__ __forceinline__ void ${e}_produce(const ml_bf16 *k, const ml_bf16 *v, int first,
                                                    int end, unsigned stages, unsigned barriers) {
    ${e}_feed feed = {barriers};
    for (int key = first; key < end; key += ${tile}) {
        unsigned to = stages + feed.free_stage() * ${tile_bytes};
        ${e}_fill(to, ${tile}, 0, ${tile}, k + key * ${k_seq}, ${k_seq}, ${kv_seq} - key);
        feed.give();
        to = stages + feed.free_stage() * ${tile_bytes};
        ${e}_fill(to, ${tile}, 0, ${tile}, v + key * ${v_seq}, ${v_seq}, ${kv_seq} - key);
        feed.give();
    }
    feed.flush();
}
/* lse and delta of a warpgroup's rows, `own` of the block's on, from do in shared memory and o;
 * rows without keys get a large lse. */
static __device__ __forceinline__ void ${e}_statistics(const ${e}_arguments &a, int batch, int head,
                                                       int query, int own, const char *outs,
                                                       float *lse, float *delta) {
    const ml_bf16 *o = (const ml_bf16 *)a.p[3] + ${o_batch} + head * ${o_head};
    const float *from = (const float *)a.p[4] + ${lse_batch} + head * ${lse_head};
    float *deltas = (float *)a.p[${delta_at}] + ((long long)batch * ${heads} + head) * ${seq};
#pragma unroll 4
    for (int r = own + threadIdx.x % 128 / 16; r < own + 64; r += 8) {
        int qi = query + r, piece = threadIdx.x % 16;
        float sum = 0;
        if (qi < ${seq} && piece < ${dim} / 8) {
            union { uint4 all; ml_bf16 x[8]; } left, right;
            left.all = *(const uint4 *)(o + qi * ${o_seq} + piece * 8);
            right.all = *(const uint4 *)(outs + ${e}_place(${rows}, r, piece));
#pragma unroll
            for (int i = 0; i < 8; i++) sum += ml_load_bf16(left.x[i]) * ml_load_bf16(right.x[i]);
        }
#pragma unroll
        for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x % 16) continue;
        float x = qi < ${seq} ? from[qi * ${lse_seq}] : 0;
        lse[r] = x == -ML_INF ? 3e38f : x * 1.44269504f;
        delta[r] = sum;
        if (qi < ${seq}) deltas[qi] = sum;
    }
}
/* What a warpgroup sums over all tiles. The products of one tile's slopes are under way beside the
 * next tile's scores. */
static __device__ __forceinline__ void ${e}_consume(
    const ${e}_arguments &a, int batch, int head, int query, int first, int end,
    unsigned queries_at, unsigned outs_at, unsigned stages, unsigned barriers, const float *lse,
    const float *delta, float (&out)[${dim} / 2]) {
    float s[${tile} / 2], dp[${tile} / 2];
    unsigned p[${tile} / 4];
    int before = 0, last_query = query + 63, keys = ${tile};
    (void)last_query, (void)keys;
    ${places}
    ${e}_ring ring = {};
    for (int key = first; key < end; key += ${tile}) {
        int keys_stage = ring.stage;
        ${e}_await(barriers + ring.stage * 8, ring.parity);
        ring.next();
        ${e}_begin();
        ${e}_scores(s, queries_at, stages + keys_stage * ${tile_bytes});
        int values_stage = ring.stage;
        ${e}_await(barriers + ring.stage * 8, ring.parity);
        ring.next();
        ${e}_scores(dp, outs_at, stages + values_stage * ${tile_bytes});
        ${e}_end();
        ${e}_finish<0>();
        ${e}_hold(s);
        ${e}_hold(dp);
        ${e}_hold(p);
        ${e}_hold(out);
        if (key > first) ${e}_release(barriers, before);
        ${e}_release(barriers, values_stage);
        bool masked = key + ${tile} > ${kv_seq} || (${crosses});
        ${e}_slopes<false>(a, batch, head, query, key, masked, lse, delta, s, dp);
        ${e}_round(p, dp);
        ${e}_begin();
        ${e}_chain(out, p, stages + keys_stage * ${tile_bytes});
        ${e}_end();
        before = keys_stage;
    }
    ${e}_finish<0>();
    ${e}_hold(out);
}
extern "C" __global__ void __launch_bounds__(${threads}, ${resident}) ${e}(${e}_arguments a) {
    extern __shared__ uint4 ${e}_shared[]; ${places}
    unsigned before = (1024 - ${e}_address(${e}_shared) % 1024) % 1024;
    char *query_tile = (char *)${e}_shared + before, *out_tile = query_tile + ${row_bytes};
    unsigned queries_at = ${e}_address(query_tile), outs_at = queries_at + ${row_bytes};
    unsigned stages = outs_at + ${row_bytes}, barriers = stages + ${stages} * ${tile_bytes};
    float *lse = (float *)(out_tile + (barriers - outs_at) + 16 * ${stages});
    float *delta = lse + ${rows};
    int block = blockIdx.x % ${q_blocks}, head = blockIdx.x / ${q_blocks} % ${heads};
    int batch = blockIdx.x / (${q_blocks} * ${heads});
    int query = (${q_blocks} - 1 - block) * ${rows}; /* the longest causal rows first */
    int kv_head = head / ${group}, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int last_query = query + ${rows} - 1 < ${seq} ? query + ${rows} - 1 : ${seq} - 1;
    (void)last_query;
    int first = ${first_key}, end = ${end_key};
    first = first / ${tile} * ${tile};
    ${e}_make_ring(barriers);
    if (warp >= ${groups} * 4) {
        ${e}_fewer_registers<${fewer}>();
        ${e}_produce((const ml_bf16 *)a.p[1] + ${k_batch} + kv_head * ${k_head},
                     (const ml_bf16 *)a.p[2] + ${v_batch} + kv_head * ${v_head}, first, end, stages,
                     barriers);
    } else {
        ${e}_more_registers<${more}>();
        int own = warp / 4 * 64, row = warp * 16; /* rows of the warpgroup, of the warp */
        ${e}_fill(queries_at, ${rows}, own, 64, (const ml_bf16 *)a.p[0] + ${q_batch} +
                  head * ${q_head} + (query + own) * ${q_seq}, ${q_seq}, ${seq} - query - own);
        ${e}_fill(outs_at, ${rows}, own, 64, (const ml_bf16 *)a.p[5] + ${g_batch} +
                  head * ${g_head} + (query + own) * ${g_seq}, ${g_seq}, ${seq} - query - own);
        ${e}_commit();
        ${e}_landed<0>();
        ${e}_meet(warp / 4);
        ${e}_statistics(a, batch, head, query, own, out_tile, lse, delta);
        ${e}_meet(warp / 4);
        float out[${dim} / 2] = {};
        float lses[2] = {lse[row + lane / 4], lse[row + lane / 4 + 8]};
        float deltas[2] = {delta[row + lane / 4], delta[row + lane / 4 + 8]};
        ${e}_consume(a, batch, head, query + own, first, end, queries_at + own * 128,
                     outs_at + own * 128, stages, barriers, lses, deltas, out);
        ${e}_meet(warp / 4); /* nobody reads queries any more */
        query += row;
        ${e}_spill(query_tile, row, out, ${scale}, (ml_bf16 *)a.p[${dq_at}] + ${dq_batch} +
                   head * ${dq_head} + query * ${dq_seq}, ${dq_seq}, ${seq} - query);
    }
}
)";

/* Shared memory: keys, values, stages of queries and do, barriers, lse and delta of the stages. */
static const char keys_text[] = R"(
static __device__ __forceinline__ void ${e}_produce(const ${e}_arguments &a, int batch, int kv_head,
                                                    int first, int end, unsigned stages,
                                                    unsigned barriers, float *rows) {
    ${e}_feed feed = {barriers};
    for (int head = kv_head * ${group}; head < (kv_head + 1) * ${group}; head++) {
        const ml_bf16 *q = (const ml_bf16 *)a.p[0] + ${q_batch} + head * ${q_head};
        const ml_bf16 *g = (const ml_bf16 *)a.p[5] + ${g_batch} + head * ${g_head};
        const float *lse = (const float *)a.p[4] + ${lse_batch} + head * ${lse_head};
        const float *delta = (const float *)a.p[${delta_at}] +
                             ((long long)batch * ${heads} + head) * ${seq};
        for (int query = first; query < end; query += ${tile}) {
            int stage = feed.free_stage(), queries = ${seq} - query, r = threadIdx.x % 128;
            unsigned to = stages + stage * (2 * ${tile_bytes});
            ${e}_fill(to, ${tile}, 0, ${tile}, q + query * ${q_seq}, ${q_seq}, queries);
            ${e}_fill(to + ${tile_bytes}, ${tile}, 0, ${tile}, g + query * ${g_seq}, ${g_seq},
                      queries);
            if (r < ${tile}) { /* rows that do not exist, or see nothing: probabilities 0 */
                float x = r < queries ? lse[(query + r) * ${lse_seq}] : -ML_INF;
                rows[stage * (2 * ${tile}) + r] = x == -ML_INF ? 3e38f : x * 1.44269504f;
                rows[stage * (2 * ${tile}) + ${tile} + r] = r < queries ? delta[query + r] : 0;
            }
            feed.give();
        }
    }
    feed.flush();
}
${gather}static __device__ __forceinline__ void ${e}_consume(
    const ${e}_arguments &a, int batch, int kv_head, int key, int first, int end, unsigned keys_at,
    unsigned values_at, unsigned stages, unsigned barriers, const float *rows, char *slope_tiles,
    unsigned key_tile, float (&dk)[${dim} / 2], float (&dv)[${dim} / 2]) {
    float s[${tile} / 2], dp[${tile} / 2];
    unsigned p[${tile} / 4], slopes[${tile} / 4];
    int before = -1, keys = 64, odd = 0;
    (void)keys, (void)odd;
    ${places}
    ${e}_ring ring = {};
    for (int head = kv_head * ${group}; head < (kv_head + 1) * ${group}; head++)
        for (int query = first; query < end; query += ${tile}) {
            int stage = ring.stage, last_query = query + ${tile} - 1;
            (void)last_query;
            unsigned queries_at = stages + stage * (2 * ${tile_bytes});
            unsigned outs_at = queries_at + ${tile_bytes};
            const float *lse = rows + stage * (2 * ${tile});
            ${e}_await(barriers + stage * 8, ring.parity);
            ring.next();
            ${e}_begin();
            ${e}_scores(s, keys_at, queries_at);
            ${e}_scores(dp, values_at, outs_at);
            ${e}_end();
            ${e}_finish<0>();
            ${e}_hold(s);
            ${e}_hold(dp);
            if (${deferred}) { /* what the tile before gives was under way too */
                ${e}_hold(p);
                ${e}_hold(slopes);
                ${e}_hold(dk);
                ${e}_hold(dv);
                if (before >= 0) ${e}_release(barriers, before);
            }
            bool masked = ${crosses};
            ${e}_slopes<true>(a, batch, head, key, query, masked, lse, lse + ${tile}, s, dp);
            ${e}_round(p, s);
            ${e}_round(slopes, dp);
            ${show_slopes}
            ${e}_begin();
            ${e}_chain(dv, p, outs_at);
            ${e}_chain(dk, slopes, queries_at);
            ${e}_end();
            if (${fused} && ${dim} == 128) { /* registers for sums of dq */
                ${e}_finish<0>();
                ${e}_hold(p);
                ${e}_hold(slopes);
                ${e}_hold(dk);
                ${e}_hold(dv);
            }
            ${gather_call}
            before = stage;
            if (!${deferred}) {
                ${e}_finish<0>();
                ${e}_hold(p);
                ${e}_hold(slopes);
                ${e}_hold(dk);
                ${e}_hold(dv);
                ${e}_release(barriers, stage);
            }
        }
    ${e}_finish<0>();
    ${e}_hold(dk);
    ${e}_hold(dv);
}
extern "C" __global__ void __launch_bounds__(${threads}, ${resident}) ${e}(${e}_arguments a) {
    extern __shared__ uint4 ${e}_shared[]; ${places}
    unsigned skipped = (1024 - ${e}_address(${e}_shared) % 1024) % 1024;
    char *key_tile = (char *)${e}_shared + skipped, *value_tile = key_tile + ${row_bytes};
    unsigned keys_at = ${e}_address(key_tile), values_at = keys_at + ${row_bytes};
    unsigned stages = values_at + ${row_bytes}, barriers = stages + ${stages} * 2 * ${tile_bytes};
    float *rows = (float *)(value_tile + (barriers - values_at) + 16 * ${stages});
    char *slope_tiles = value_tile + (barriers - values_at) + ${statistics};
    (void)slope_tiles;
    int key = blockIdx.x % ${k_blocks} * ${rows}, kv_head = blockIdx.x / ${k_blocks} % ${kv_heads};
    int batch = blockIdx.x / (${k_blocks} * ${kv_heads}), warp = threadIdx.x / 32;
    int last_key = key + ${rows} - 1 < ${kv_seq} ? key + ${rows} - 1 : ${kv_seq} - 1;
    (void)last_key;
    int first = ${first_query}, end = ${end_query};
    first = first / ${tile} * ${tile};
    ${e}_make_ring(barriers);
    if (warp >= ${groups} * 4) {
        ${e}_fewer_registers<${fewer}>();
        ${e}_produce(a, batch, kv_head, first, end, stages, barriers, rows);
    } else {
        ${e}_more_registers<${more}>();
        int own = warp / 4 * 64, row = warp * 16; /* rows of the warpgroup, of the warp */
        ${e}_fill(keys_at, ${rows}, own, 64, (const ml_bf16 *)a.p[1] + ${k_batch} +
                  kv_head * ${k_head} + (key + own) * ${k_seq}, ${k_seq}, ${kv_seq} - key - own);
        ${e}_fill(values_at, ${rows}, own, 64, (const ml_bf16 *)a.p[2] + ${v_batch} +
                  kv_head * ${v_head} + (key + own) * ${v_seq}, ${v_seq}, ${kv_seq} - key - own);
        ${e}_commit();
        ${e}_landed<0>();
        ${e}_meet(warp / 4);
        float dk[${dim} / 2] = {}, dv[${dim} / 2] = {};
        ${e}_consume(a, batch, kv_head, key + own, first, end, keys_at + own * 128,
                     values_at + own * 128, stages, barriers, rows, slope_tiles, keys_at, dk, dv);
        if (${fused}) /* nobody reads keys and values any more: for dq, others did too */
            ${e}_meet_all<${groups} * 128>();
        else
            ${e}_meet(warp / 4);
        key += row;
        ${e}_spill(key_tile, row, dk, ${scale}, (ml_bf16 *)a.p[${dk_at}] + ${dk_batch} +
                   kv_head * ${dk_head} + key * ${dk_seq}, ${dk_seq}, ${kv_seq} - key);
        ${e}_spill(value_tile, row, dv, 1.0f, (ml_bf16 *)a.p[${dv_at}] + ${dv_batch} +
                   kv_head * ${dv_head} + key * ${dv_seq}, ${dv_seq}, ${kv_seq} - key);
    }
}
)";

/* Where dq may be added up in any order (MLUA_DETERMINISTIC=0), the keys' kernel does that: slopes
 * go through shared memory, in which a row is a key as they are, and are read with rows as depth;
 * each of two warpgroups takes half of dq's columns. Sums of a thread lie side by side in memory:
 * [batch, head][tile of 64 queries][half][4 sums of a thread][thread][4]. A kernel before clears
 * them and gives delta, one behind turns them into dq. 5 products: 5,120 cycles, and slopes once.
 */
static const char gather_text[] = R"(
static __device__ __forceinline__ void ${e}_show_slopes(char *tile,
                                                        const unsigned (&p)[${tile} / 4]) {
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < ${tile} / 4; i++)
        *(unsigned *)(tile + ${e}_place(${rows}, row + i % 2 * 8, i / 2) + threadIdx.x % 4 * 4) =
            p[i];
    ${e}_show();
}
static __device__ __forceinline__ void ${e}_gather_queries(const ${e}_arguments &a, int batch,
                                                           int head, int query, unsigned slopes,
                                                           unsigned key_tile) {
    float sum[${dim} / 4];
    int half = threadIdx.x / 128;
    /* 64 columns are a block, 32 are half of its lines */
    unsigned keys = key_tile + half * (${dim} == 128 ? ${rows} * 128 : 64);
    ${e}_begin();
#pragma unroll
    for (int k = 0; k < ${rows} / 16; k++)
        ${e}_gather(sum, ${e}_operand(slopes + k * 2048, ${rows} * 128),
                    ${e}_operand(keys + k * 2048, ${rows} * 128), k > 0);
    ${e}_end();
    ${e}_finish<0>();
    ${e}_hold(sum);
    float *to = (float *)a.p[${delta_at}] + ${sums_at};
    to += ((((long long)batch * ${heads} + head) * ${q_tiles} + query / 64) * 2 + half) *
              (32 * ${dim}) + threadIdx.x % 128 * 4;
#pragma unroll
    for (int i = 0; i < ${dim} / 16; i++)
        ${e}_add(to + i * 512, sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
}
)";

/* Blocks of 64 queries: delta, and sums of dq cleared. */
static const char prepare_text[] = R"(
extern "C" __global__ void __launch_bounds__(128) ${e}(${e}_arguments a) {
    int query = blockIdx.x % ${q_tiles} * 64, head = blockIdx.x / ${q_tiles} % ${heads};
    int batch = blockIdx.x / (${q_tiles} * ${heads});
    const ml_bf16 *o = (const ml_bf16 *)a.p[3] + ${o_batch} + head * ${o_head};
    const ml_bf16 *g = (const ml_bf16 *)a.p[5] + ${g_batch} + head * ${g_head};
    float *deltas = (float *)a.p[${delta_at}] + ((long long)batch * ${heads} + head) * ${seq};
#pragma unroll 4
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
        if (threadIdx.x % 16 == 0 && qi < ${seq}) deltas[qi] = sum;
    }
    uint4 *sums = (uint4 *)((float *)a.p[${delta_at}] + ${sums_at}) +
                  (long long)blockIdx.x * (16 * ${head_dim});
#pragma unroll 8
    for (int i = 0; i < ${head_dim} / 8; i++) sums[i * 128 + threadIdx.x] = uint4{0, 0, 0, 0};
}
)";

/* Blocks of 64 queries: what was added up, as dq. */
static const char settle_text[] = R"(
extern "C" __global__ void __launch_bounds__(128) ${e}(${e}_arguments a) {
    int query = blockIdx.x % ${q_tiles} * 64, head = blockIdx.x / ${q_tiles} % ${heads};
    int batch = blockIdx.x / (${q_tiles} * ${heads}), lane = threadIdx.x % 32;
    ml_bf16 *dq = (ml_bf16 *)a.p[${dq_at}] + ${dq_batch} + head * ${dq_head};
    const float4 *sums = (const float4 *)((const float *)a.p[${delta_at}] + ${sums_at}) +
                         (long long)blockIdx.x * (16 * ${head_dim}) + threadIdx.x;
    query += threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll 8
    for (int i = 0; i < ${head_dim} / 8; i++) {
        float4 sum = sums[i * 128];
        ml_bf16 *to = dq + query * ${dq_seq} + i * 8 + lane % 4 * 2;
        if (query < ${seq}) *(unsigned *)to = ${e}_pack(sum.x * ${scale}, sum.y * ${scale});
        if (query + 8 < ${seq})
            *(unsigned *)(to + 8 * ${dq_seq}) = ${e}_pack(sum.z * ${scale}, sum.w * ${scale});
    }
}
)";

/* Variants, by head size (64, 128). */
static const attention_tile query_tiles[2][ATTENTION_VARIANTS] = {
    {{.groups = 2, .tile = 128, .stages = 6, .resident = 1},
     {.groups = 2, .tile = 64, .stages = 8, .resident = 1},
     {.groups = 3, .tile = 64, .stages = 8, .resident = 1}},
    {{.groups = 2, .tile = 64, .stages = 8, .resident = 1},
     {.groups = 2, .tile = 64, .stages = 5, .resident = 1},
     {.groups = 3, .tile = 32, .stages = 8, .resident = 1}},
};
static const attention_tile key_tiles[2][ATTENTION_VARIANTS] = {
    {{.groups = 2, .tile = 64, .stages = 5, .resident = 1, .deferred = true},
     {.groups = 2, .tile = 64, .stages = 5, .resident = 1},
     {.groups = 3, .tile = 32, .stages = 6, .resident = 1, .deferred = true}},
    {{.groups = 2, .tile = 64, .stages = 4, .resident = 1},
     {.groups = 2, .tile = 32, .stages = 6, .resident = 1, .deferred = true},
     {.groups = 2, .tile = 32, .stages = 6, .resident = 1}},
};

static const attention_tile fused_tiles[2][ATTENTION_VARIANTS] = {
    {{.groups = 2, .tile = 64, .stages = 5, .resident = 1, .fused = true},
     {.groups = 2, .tile = 64, .stages = 3, .resident = 1, .fused = true},
     {.groups = 2, .tile = 64, .stages = 8, .resident = 1, .fused = true}},
    {{.groups = 2, .tile = 64, .stages = 3, .resident = 1, .fused = true},
     {.groups = 2, .tile = 64, .stages = 2, .resident = 1, .fused = true},
     {.groups = 2, .tile = 64, .stages = 3, .resident = 1, .fused = true}},
};

/* One of the two kernels; `pairs`: a stage is two tiles and statistics. */
static ml_kernel *print_half(attention_printer *p, const attention_tile *tile, const char *text,
                             bool pairs, const char *label) {
    const ml_attention_step *a = p->a;
    int64_t rows = tile->groups * 64, stage = tile->tile * a->head_dim * 2 * (pairs ? 2 : 1);
    int64_t length = pairs ? a->kv_seq : a->seq, heads = pairs ? a->kv_heads : a->heads;
    int64_t blocks = (length + rows - 1) / rows;
    int64_t statistics = 16 * tile->stages + 2 * 4 * (pairs ? tile->stages * tile->tile : rows);
    statistics = attention_round_up(statistics, 1024);
    template_set(&p->text, pairs ? "k_blocks" : "q_blocks", "%lld", (long long)blocks);
    template_set(&p->text, "statistics", "%lld", (long long)statistics);
    const char *const bodies[] = {slopes_text, text};
    ml_kernel *kernel = attention_wgmma_kernel(p, tile, bodies, 2, label);
    template_launch(kernel, blocks * heads * p->batches, 1, 1, (uint32_t)(tile->groups + 1) * 128,
                    1024 + 2 * rows * a->head_dim * 2 + tile->stages * stage + statistics +
                        (tile->fused ? 2 * rows * 128 : 0));
    return kernel;
}

static int64_t tiles_of_queries(const attention_printer *p) {
    return (p->a->seq + 63) / 64;
}

/* Sums of dq begin at a multiple of 64 elements, behind delta. */
static int64_t sums_at(const attention_printer *p) {
    return attention_round_up(p->batches * p->a->heads * p->a->seq, 64);
}

int64_t attention_wgmma_sums(const attention_printer *p) {
    if (ml_knobs()->deterministic || !attention_wgmma_serves(p)) return 0;
    return sums_at(p) + p->batches * p->a->heads * tiles_of_queries(p) * 64 * p->a->head_dim;
}

static ml_kernel *print_simple(attention_printer *p, const char *text, const char *label) {
    const char *body = ml_arena_format(p->text.arena, "%s%s", template_mma_ptx, text);
    ml_kernel *kernel =
        template_kernel(&p->text, body, label, p->step->read_count + p->step->write_count);
    template_launch(kernel, tiles_of_queries(p) * p->a->heads * p->batches, 1, 1, 128, 0);
    return kernel;
}

static void print_fused(attention_printer *p, const attention_tile *tile) {
    ml_template *t = &p->text;
    template_set(t, "q_tiles", "%lld", (long long)tiles_of_queries(p));
    template_set(t, "sums_at", "%lldLL", (long long)sums_at(p));
    template_set_text(t, "gather", gather_text);
    template_set_text(
        t, "show_slopes",
        "odd ^= 1;\n            ${e}_show_slopes(slope_tiles + odd * (${rows} * 128), "
        "slopes);");
    template_set_text(
        t, "gather_call",
        "${e}_meet_all<${groups} * 128>();\n            ${e}_gather_queries(a, batch, "
        "head, query, ${e}_address(slope_tiles) + odd * (${rows} * 128), key_tile);");
    p->step->kernel = print_simple(p, prepare_text, "attention_grad");
    p->step->kernel->next = print_half(p, tile, keys_text, true, "attention_grad dq dk dv");
    p->step->kernel->next->next = print_simple(p, settle_text, "attention_grad dq");
}

void attention_wgmma_gradient(attention_printer *p, int variant) {
    int size = p->a->head_dim == 128;
    if (!ml_knobs()->deterministic) {
        print_fused(p, &fused_tiles[size][variant]);
        return;
    }
    template_set_text(&p->text, "gather", "");
    template_set_text(&p->text, "show_slopes", "");
    template_set_text(&p->text, "gather_call", "");
    p->step->kernel =
        print_half(p, &query_tiles[size][variant], queries_text, false, "attention_grad dq");
    p->step->kernel->next =
        print_half(p, &key_tiles[size][variant], keys_text, true, "attention_grad dk dv");
}
