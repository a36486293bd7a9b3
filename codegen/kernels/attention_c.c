/* Attention on the CPU. Forward: a unit is a block of query rows of one head; scores are held
 * transposed, [key][query], so that a vector holds query rows: softmax needs no sums across lanes,
 * and keys and values are read as they lie. Backward: tiles are [query][key], K and V are
 * transposed once for each key block, and the gradients of one (batch, K/V head) are summed by one
 * unit, or in two passes (dk and dv by key blocks, dq by query blocks) where units are few or the
 * gradients are not of the compute type. All products run through one register-blocked kernel. */
#include "codegen/kernels/attention.h"

#include <stdlib.h>

/* product: c[row][column] (+)= sum over k of a(row, k) b[k][column], a(row, k) =
 * a[row a_row + k a_k]; rows is a multiple of ${mr}, width of ${lanes}; b and c are aligned and
 * have `width` columns. pack: rows x columns of a strided matrix, times factor, into
 * tile[tile_rows][width] with zeros around. */
static const char common_text[] = R"(
#define ML_${e}_ALIGNED __attribute__((aligned(64)))
#define ML_${e}_INLINE static inline __attribute__((always_inline, unused))
typedef ${real} ${e}_vec __attribute__((vector_size(${vector_bytes}), may_alias));
#ifdef __clang__
#define ML_${e}_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef ${lane_integer} ${e}_lanes __attribute__((vector_size(${vector_bytes})));
#define ML_${e}_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (${e}_lanes){__VA_ARGS__})
#endif
ML_${e}_INLINE void ${e}_micro(
    const ${real} *a, long a_row, long a_k, const ${real} *b, ${real} *c, long width, long depth,
    const int vectors, const int accumulate) {
    ${e}_vec sum[${mr}][2];
    for (int r = 0; r < ${mr}; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = accumulate ? ((${e}_vec *)(c + r * width))[v] : (${e}_vec){0};
    for (long k = 0; k < depth; k++) {
        const ${e}_vec *row = (const ${e}_vec *)(b + k * width);
        ${e}_vec b0 = row[0], b1 = vectors > 1 ? row[1] : b0;
#pragma GCC unroll 8
        for (int r = 0; r < ${mr}; r++) {
            ${real} x = a[r * a_row + k * a_k];
            sum[r][0] += x * b0;
            if (vectors > 1) sum[r][1] += x * b1;
        }
    }
    for (int r = 0; r < ${mr}; r++)
        for (int v = 0; v < vectors; v++) ((${e}_vec *)(c + r * width))[v] = sum[r][v];
}
/* Causal tiles skip what the mask hides: query i of a tile sees key j where j <= i - offset.
 * `shape` says what rows, columns and depth are: 0 anything (nothing is skipped), 1 keys, queries
 * and dimensions, 2 dimensions, queries and keys, 3 queries, keys and dimensions, 4 keys,
 * dimensions and queries, 5 queries, dimensions and keys. */
ML_${e}_INLINE void ${e}_product(
    const ${real} *a, long a_row, long a_k, const ${real} *b, ${real} *c, long rows, long width,
    long depth, const int accumulate, const int shape, long offset) {
    for (long column = 0; column < width; column += 2 * ${lanes}) {
        long first = 0, last = rows, begin = 0, end = depth, seen = column + 2 * ${lanes} - offset;
        if (shape == 1 && seen < last) last = seen;
        if (shape == 2 && seen < end) end = seen;
        if (shape == 3 && column + offset > 0) first = (column + offset) / ${mr} * ${mr};
        for (long r = first; r < last; r += ${mr}) {
            if (shape == 4) begin = r + offset > 0 ? r + offset : 0;
            if (shape == 5) end = r + ${mr} - offset < depth ? r + ${mr} - offset : depth;
            const ${real} *from = a + r * a_row + begin * a_k;
            const ${real} *with = b + begin * width + column;
            if (width % (2 * ${lanes}) == 0 || column + ${lanes} < width)
                ${e}_micro(from, a_row, a_k, with, c + r * width + column, width, end - begin, 2,
                           accumulate);
            else
                ${e}_micro(from, a_row, a_k, with, c + r * width + column, width, end - begin, 1,
                           accumulate);
        }
    }
}
ML_${e}_INLINE void ${e}_pack(
    const ${memory} *from, long row_stride, long column_stride, long rows, long columns,
    ${real} *to, long tile_rows, long width, ${real} factor) {
    for (long r = 0; r < tile_rows; r++, from += row_stride, to += width) {
        long full = r < rows ? columns : 0;
        for (long c = 0; c < full; c++) to[c] = ${load}(from[c * column_stride]) * factor;
        for (long c = full; c < width; c++) to[c] = 0;
    }
}
/* A row-major tile transposed; sizes are multiples of ${lanes}. Rounds of interleaving: with
 * log2(${lanes}) of them element (i, j) of a square gets to (j, i). */
ML_${e}_INLINE void ${e}_transpose(const ${real} *from, long rows, long columns, ${real} *to) {
    for (long r = 0; r < rows; r += ${lanes})
        for (long c = 0; c < columns; c += ${lanes}) {
            ${e}_vec x[${lanes}], y[${lanes}];
            for (int i = 0; i < ${lanes}; i++)
                x[i] = *(const ${e}_vec *)(from + (r + i) * columns + c);
#pragma GCC unroll 4
            for (int round = 1; round < ${lanes}; round *= 2) {
                for (int i = 0; i < ${lanes} / 2; i++) {
                    y[2 * i] = ML_${e}_SHUFFLE(x[i], x[i + ${lanes} / 2], ${low_lanes});
                    y[2 * i + 1] = ML_${e}_SHUFFLE(x[i], x[i + ${lanes} / 2], ${high_lanes});
                }
                for (int i = 0; i < ${lanes}; i++) x[i] = y[i];
            }
            for (int i = 0; i < ${lanes}; i++) *(${e}_vec *)(to + (c + i) * rows + r) = x[i];
        }
}
)";

static const char forward_text[] = R"(
/* Scores of a tile: scaled already; score function, mask, largest of each query. */
ML_${e}_INLINE void ${e}_scores(char *const *p, int batch, int head, int query, int queries,
                                int key, int keys, ${real} *scores, ${real} *next,
                                const int masked) {
    ${captures}
    ${places}
    (void)p, (void)batch, (void)head, (void)queries;
    for (int i = 0; i < keys; i++) {
        ${real} *row = scores + i * ${bq};
        int kv = key + i;
#pragma GCC ivdep
        for (int j = 0; j < ${used_queries}; j++) {
            int qi = query + j;
            ${real} x = row[j];
            (void)qi, (void)kv;
            ${score}
            x = x < ${lowest} ? ${lowest} : x;
            if (masked) x = (${visible}) ? x : ${lowest};
            row[j] = x;
            next[j] = x > next[j] ? x : next[j];
        }
    }
}
static __attribute__((noinline)) void ${e}_keys(
    char *const *p, int batch, int head, int query, int queries, int key, int keys,
    const ${real} *query_tile, const ${real} *key_tile, const ${real} *value_tile,
    ${real} *scores, ${real} *largest, ${real} *total, ${real} *out) {
    ${places}
    ${real} next[${bq}] ML_${e}_ALIGNED, shrink[${bq}] ML_${e}_ALIGNED;
    int last_query = query + queries - 1;
    (void)last_query;
    ${e}_product(key_tile, ${head_width}, 1, query_tile, scores, (keys + ${mr} - 1) / ${mr} * ${mr},
                 ${bq}, ${head_dim}, 0, ${causal} * 1, key - ${shift} - query);
    for (int j = 0; j < ${bq}; j++) next[j] = largest[j];
    if (${crosses})
        ${e}_scores(p, batch, head, query, queries, key, keys, scores, next, 1);
    else
        ${e}_scores(p, batch, head, query, queries, key, keys, scores, next, 0);
    for (int j = 0; j < ${bq}; j++) {
        ${real} base = next[j] <= ${lowest} ? 0 : next[j]; /* a row without keys so far */
        shrink[j] = ml_exp_${suffix}(largest[j] - base);
        largest[j] = next[j];
        next[j] = base;
        total[j] *= shrink[j];
    }
    for (int i = 0; i < keys; i++) {
        ${real} *row = scores + i * ${bq};
#pragma GCC ivdep
        for (int j = 0; j < ${bq}; j++) {
            ${real} x = ml_exp_${suffix}(row[j] - next[j]);
            row[j] = x;
            total[j] += x;
        }
    }
    for (int d = 0; d < ${value_dim}; d++)
        for (int j = 0; j < ${bq}; j++) out[d * ${bq} + j] *= shrink[j];
    ${e}_product(value_tile, 1, ${value_width}, scores, out, ${value_width}, ${bq}, keys, 1,
                 ${causal} * 2, key - ${shift} - query);
}
static void ${e}_block(char *const *p, int batch, int head, int query) {
    ${places}
    ${real} query_tile[${head_width} * ${bq}] ML_${e}_ALIGNED;
    ${real} key_tile[${bk} * ${head_width}] ML_${e}_ALIGNED;
    ${real} value_tile[${bk} * ${value_width}] ML_${e}_ALIGNED;
    ${real} scores[${bk} * ${bq}] ML_${e}_ALIGNED, out[${value_width} * ${bq}] ML_${e}_ALIGNED;
    ${real} largest[${bq}] ML_${e}_ALIGNED, total[${bq}] ML_${e}_ALIGNED;
    ${real} rows[${bq} * ${row_width}] ML_${e}_ALIGNED; /* q as it lies; at last o */
    int queries = ${seq} - query < ${bq} ? ${seq} - query : ${bq};
    int kv_head = head / ${group};
    const ${memory} *q = (const ${memory} *)p[0] + ${q_batch} + head * ${q_head} + query * ${q_seq};
    const ${memory} *k = (const ${memory} *)p[1] + ${k_batch} + kv_head * ${k_head};
    const ${memory} *v = (const ${memory} *)p[2] + ${v_batch} + kv_head * ${v_head};
    ${memory} *o = (${memory} *)p[${o_at}] + ${o_batch} + head * ${o_head} + query * ${o_seq};
    ${lse_memory} *lse = (${lse_memory} *)p[${lse_at}] + ${lse_batch} + head * ${lse_head} +
                         query * ${lse_seq};
    ${e}_pack(q, ${q_seq}, ${q_dim}, queries, ${head_dim}, rows, ${bq}, ${head_width}, ${scale});
    ${e}_transpose(rows, ${bq}, ${head_width}, query_tile);
    for (int j = 0; j < ${bq}; j++) largest[j] = ${lowest}, total[j] = 0;
    for (int i = 0; i < ${value_width} * ${bq}; i++) out[i] = 0;
    int last_query = query + queries - 1;
    int first_key = ${first_key}, end_key = ${end_key};
    for (int key = first_key; key < end_key; key += ${bk}) {
        int keys = end_key - key < ${bk} ? end_key - key : ${bk};
        ${e}_pack(k + key * ${k_seq}, ${k_seq}, ${k_dim}, keys, ${head_dim}, key_tile,
                  (keys + ${mr} - 1) / ${mr} * ${mr}, ${head_width}, 1);
        ${e}_pack(v + key * ${v_seq}, ${v_seq}, ${v_dim}, keys, ${value_dim}, value_tile, keys,
                  ${value_width}, 1);
        ${e}_keys(p, batch, head, query, queries, key, keys, query_tile, key_tile, value_tile,
                  scores, largest, total, out);
    }
    ${e}_transpose(out, ${value_width}, ${bq}, rows);
    for (int j = 0; j < queries; j++) {
        /* a row without keys gives 0 and a logsumexp of -infinity; NaN stays NaN */
        ${real} inverse = total[j] == 0 ? 0 : 1 / total[j];
        for (int d = 0; d < ${value_dim}; d++)
            o[j * ${o_seq} + d * ${o_dim}] = ${store}(rows[j * ${value_width} + d] * inverse);
        lse[j * ${lse_seq}] =
            total[j] == 0 ? -__builtin_inff() : largest[j] + ml_log_${suffix}(total[j]);
    }
    (void)last_query;
}
void ${e}(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        int block = (int)(unit % ${q_blocks}), head = (int)(unit / ${q_blocks} % ${heads});
        ${e}_block(p, (int)(unit / (${q_blocks}LL * ${heads})), head, block * ${bq});
    }
}
)";

/* One tile of the backward pass. In: tiles q (scaled), do [query][dim], k and v transposed. Out:
 * probabilities in `scores` and the gradients of the scaled products in `grads`, [query][key]. */
static const char tile_text[] = R"(
ML_${e}_INLINE void ${e}_slopes(char *const *p, int batch, int head, int query, int queries,
                                int key, int keys, const ${real} *lse, const ${real} *delta,
                                ${real} *scores, ${real} *grads, const int masked) {
    ${captures}
    ${places}
    (void)p, (void)batch, (void)head, (void)keys;
    for (int i = 0; i < queries; i++) {
        ${real} *row = scores + i * ${bk}, *grad = grads + i * ${bk};
        ${real} base = lse[i], mean = delta[i];
        int qi = query + i;
#pragma GCC ivdep
        for (int j = 0; j < ${used_keys}; j++) {
            int kv = key + j;
            ${real} x = row[j], raw = x;
            (void)qi, (void)kv, (void)raw;
            ${score}
            x = ml_exp_${suffix}(x - base);
            if (masked) x = (${visible}) ? x : 0;
            ${real} slope = x * (grad[j] - mean);
            row[j] = x;
            ${derivative}
            if (masked) slope = (${visible}) ? slope : 0; /* what was skipped is anything */
            grad[j] = slope;
        }
    }
}
static __attribute__((noinline)) void ${e}_tile(
    char *const *p, int batch, int head, int query, int queries, int key, int keys,
    const ${real} *query_tile, const ${real} *out_tile, const ${real} *keys_t,
    const ${real} *values_t, const ${real} *lse, const ${real} *delta, ${real} *scores,
    ${real} *grads) {
    ${places}
    long rows = (queries + ${mr} - 1) / ${mr} * ${mr}, offset = key - ${shift} - query;
    ${e}_product(query_tile, ${head_width}, 1, keys_t, scores, rows, ${bk}, ${head_dim}, 0,
                 ${causal} * 3, offset);
    ${e}_product(out_tile, ${value_width}, 1, values_t, grads, rows, ${bk}, ${value_dim}, 0,
                 ${causal} * 3, offset);
    int last_query = query + queries - 1;
    (void)last_query;
    if (${crosses})
        ${e}_slopes(p, batch, head, query, queries, key, keys, lse, delta, scores, grads, 1);
    else
        ${e}_slopes(p, batch, head, query, queries, key, keys, lse, delta, scores, grads, 0);
}
/* Load the tiles of a query block; delta = rowsum(do o); a row without keys gets a large lse. */
static void ${e}_queries(char *const *p, int batch, int head, int query, int queries,
                         ${real} *query_tile, ${real} *out_tile, ${real} *lse, ${real} *delta) {
    const ${memory} *q = (const ${memory} *)p[0] + ${q_batch} + head * ${q_head} + query * ${q_seq};
    const ${memory} *o = (const ${memory} *)p[3] + ${o_batch} + head * ${o_head} + query * ${o_seq};
    const ${memory} *g = (const ${memory} *)p[5] + ${g_batch} + head * ${g_head} + query * ${g_seq};
    const ${lse_memory} *from = (const ${lse_memory} *)p[4] + ${lse_batch} + head * ${lse_head} +
                                query * ${lse_seq};
    long rows = (queries + ${mr} - 1) / ${mr} * ${mr};
    ${e}_pack(q, ${q_seq}, ${q_dim}, queries, ${head_dim}, query_tile, rows, ${head_width},
              ${scale});
    ${e}_pack(g, ${g_seq}, ${g_dim}, queries, ${value_dim}, out_tile, rows, ${value_width}, 1);
    ${real} parts[${bq} * ${lanes}] ML_${e}_ALIGNED, turned[${bq} * ${lanes}] ML_${e}_ALIGNED;
    for (int i = 0; i < queries; i++) {
        ${e}_vec sum = {0};
        ${real} row[${value_width}] ML_${e}_ALIGNED;
        ${e}_pack(o + i * ${o_seq}, 0, ${o_dim}, 1, ${value_dim}, row, 1, ${value_width}, 1);
        for (int d = 0; d < ${value_width}; d += ${lanes})
            sum += *(${e}_vec *)(row + d) * *(const ${e}_vec *)(out_tile + i * ${value_width} + d);
        *(${e}_vec *)(parts + i * ${lanes}) = sum;
    }
    for (int i = queries * ${lanes}; i < ${bq} * ${lanes}; i++) parts[i] = 0;
    ${e}_transpose(parts, ${bq}, ${lanes}, turned);
    for (int i = 0; i < ${bq}; i++) delta[i] = 0;
    for (int d = 0; d < ${lanes}; d++)
        for (int i = 0; i < ${bq}; i++) delta[i] += turned[d * ${bq} + i];
    for (int i = 0; i < queries; i++) {
        lse[i] = from[i * ${lse_seq}];
        if (lse[i] == -__builtin_inff()) lse[i] = 3e38f;
    }
}
)";

/* dk and dv of one key block, summed over the group's heads; with ${whole}, dq too, which the
 * units' key blocks add to in order. */
static const char keys_text[] = R"(
static void ${e}_block(char *const *p, int batch, int kv_head, int key) {
    ${places}
    ${real} keys_t[${head_width} * ${bk}] ML_${e}_ALIGNED;
    ${real} values_t[${value_width} * ${bk}] ML_${e}_ALIGNED;
    ${real} key_tile[${bk} * ${head_width}] ML_${e}_ALIGNED;
    ${real} query_tile[${bq} * ${head_width}] ML_${e}_ALIGNED;
    ${real} out_tile[${bq} * ${value_width}] ML_${e}_ALIGNED;
    ${real} scores[${bq} * ${bk}] ML_${e}_ALIGNED, grads[${bq} * ${bk}] ML_${e}_ALIGNED;
    ${real} dk_tile[${bk} * ${head_width}] ML_${e}_ALIGNED;
    ${real} dv_tile[${bk} * ${value_width}] ML_${e}_ALIGNED;
    ${real} dq_tile[${bq} * ${head_width}] ML_${e}_ALIGNED, lse[${bq}] ML_${e}_ALIGNED;
    ${real} delta[${bq}] ML_${e}_ALIGNED;
    int keys = ${kv_seq} - key < ${bk} ? ${kv_seq} - key : ${bk};
    const ${memory} *k = (const ${memory} *)p[1] + ${k_batch} + kv_head * ${k_head};
    const ${memory} *v = (const ${memory} *)p[2] + ${v_batch} + kv_head * ${v_head};
    k += key * ${k_seq}, v += key * ${v_seq};
    ${memory} *dk = (${memory} *)p[${dk_at}] + ${dk_batch} + kv_head * ${dk_head} + key * ${dk_seq};
    ${memory} *dv = (${memory} *)p[${dv_at}] + ${dv_batch} + kv_head * ${dv_head} + key * ${dv_seq};
    ${e}_pack(v, ${v_seq}, ${v_dim}, keys, ${value_dim}, dv_tile, ${bk}, ${value_width}, 1);
    ${e}_transpose(dv_tile, ${bk}, ${value_width}, values_t);
    ${e}_pack(k, ${k_seq}, ${k_dim}, keys, ${head_dim}, key_tile, ${bk}, ${head_width}, 1);
    ${e}_transpose(key_tile, ${bk}, ${head_width}, keys_t);
    for (int i = 0; i < ${bk} * ${head_width}; i++) dk_tile[i] = 0;
    for (int i = 0; i < ${bk} * ${value_width}; i++) dv_tile[i] = 0;
    int last_key = key + keys - 1;
    int first_query = ${first_query}, end_query = ${end_query};
    for (int head = kv_head * ${group}; head < (kv_head + 1) * ${group}; head++)
        for (int query = first_query; query < end_query; query += ${bq}) {
            int queries = ${seq} - query < ${bq} ? ${seq} - query : ${bq};
            long offset = key - ${shift} - query;
            ${e}_queries(p, batch, head, query, queries, query_tile, out_tile, lse, delta);
            ${e}_tile(p, batch, head, query, queries, key, keys, query_tile, out_tile, keys_t,
                      values_t, lse, delta, scores, grads);
            ${e}_product(scores, 1, ${bk}, out_tile, dv_tile, ${bk}, ${value_width}, queries, 1,
                         ${causal} * 4, offset);
            ${e}_product(grads, 1, ${bk}, query_tile, dk_tile, ${bk}, ${head_width}, queries,
                         1, ${causal} * 4, offset);
            if (!${whole}) continue;
            ${e}_product(grads, ${bk}, 1, key_tile, dq_tile, (queries + ${mr} - 1) / ${mr} * ${mr},
                         ${head_width}, keys, 0, ${causal} * 5, offset);
            ${memory} *dq = (${memory} *)p[${dq_at}] + ${dq_batch} + head * ${dq_head} +
                            query * ${dq_seq};
            for (int i = 0; i < queries; i++)
                for (int d = 0; d < ${head_dim}; d++)
                    dq[i * ${dq_seq} + d * ${dq_dim}] += dq_tile[i * ${head_width} + d] * ${scale};
        }
    for (int i = 0; i < keys; i++) {
        for (int d = 0; d < ${head_dim}; d++)
            dk[i * ${dk_seq} + d * ${dk_dim}] = ${store}(dk_tile[i * ${head_width} + d]);
        for (int d = 0; d < ${value_dim}; d++)
            dv[i * ${dv_seq} + d * ${dv_dim}] = ${store}(dv_tile[i * ${value_width} + d]);
    }
    (void)last_key;
}
)";

static const char whole_entry_text[] = R"(
void ${e}(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        int kv_head = (int)(unit % ${kv_heads}), batch = (int)(unit / ${kv_heads});
        for (int head = kv_head * ${group}; head < (kv_head + 1) * ${group}; head++) {
            ${memory} *dq = (${memory} *)p[${dq_at}] + ${dq_batch} + head * ${dq_head};
            for (int i = 0; i < ${seq}; i++)
                for (int d = 0; d < ${head_dim}; d++) dq[i * ${dq_seq} + d * ${dq_dim}] = 0;
        }
        for (int key = 0; key < ${kv_seq}; key += ${bk}) ${e}_block(p, batch, kv_head, key);
    }
}
)";

static const char keys_entry_text[] = R"(
void ${e}(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        int block = (int)(unit % ${k_blocks}), kv_head = (int)(unit / ${k_blocks} % ${kv_heads});
        ${e}_block(p, (int)(unit / (${k_blocks}LL * ${kv_heads})), kv_head, block * ${bk});
    }
}
)";

/* dq of one query block. */
static const char queries_text[] = R"(
static void ${e}_block(char *const *p, int batch, int head, int query) {
    ${places}
    ${real} keys_t[${head_width} * ${bk}] ML_${e}_ALIGNED;
    ${real} values_t[${value_width} * ${bk}] ML_${e}_ALIGNED;
    ${real} key_tile[${bk} * ${head_width}] ML_${e}_ALIGNED;
    ${real} value_tile[${bk} * ${value_width}] ML_${e}_ALIGNED;
    ${real} query_tile[${bq} * ${head_width}] ML_${e}_ALIGNED;
    ${real} out_tile[${bq} * ${value_width}] ML_${e}_ALIGNED;
    ${real} scores[${bq} * ${bk}] ML_${e}_ALIGNED, grads[${bq} * ${bk}] ML_${e}_ALIGNED;
    ${real} dq_tile[${bq} * ${head_width}] ML_${e}_ALIGNED, lse[${bq}] ML_${e}_ALIGNED;
    ${real} delta[${bq}] ML_${e}_ALIGNED;
    int queries = ${seq} - query < ${bq} ? ${seq} - query : ${bq};
    int kv_head = head / ${group}, last_query = query + queries - 1;
    const ${memory} *k = (const ${memory} *)p[1] + ${k_batch} + kv_head * ${k_head};
    const ${memory} *v = (const ${memory} *)p[2] + ${v_batch} + kv_head * ${v_head};
    ${memory} *dq = (${memory} *)p[${dq_at}] + ${dq_batch} + head * ${dq_head} + query * ${dq_seq};
    ${e}_queries(p, batch, head, query, queries, query_tile, out_tile, lse, delta);
    for (int i = 0; i < ${bq} * ${head_width}; i++) dq_tile[i] = 0;
    int first_key = ${first_key}, end_key = ${end_key};
    for (int key = first_key; key < end_key; key += ${bk}) {
        int keys = end_key - key < ${bk} ? end_key - key : ${bk};
        ${e}_pack(v + key * ${v_seq}, ${v_seq}, ${v_dim}, keys, ${value_dim}, value_tile, ${bk},
                  ${value_width}, 1);
        ${e}_transpose(value_tile, ${bk}, ${value_width}, values_t);
        ${e}_pack(k + key * ${k_seq}, ${k_seq}, ${k_dim}, keys, ${head_dim}, key_tile, ${bk},
                  ${head_width}, 1);
        ${e}_transpose(key_tile, ${bk}, ${head_width}, keys_t);
        ${e}_tile(p, batch, head, query, queries, key, keys, query_tile, out_tile, keys_t, values_t,
                  lse, delta, scores, grads);
        ${e}_product(grads, ${bk}, 1, key_tile, dq_tile, (queries + ${mr} - 1) / ${mr} * ${mr},
                     ${head_width}, keys, 1, ${causal} * 5, key - ${shift} - query);
    }
    for (int i = 0; i < queries; i++)
        for (int d = 0; d < ${head_dim}; d++)
            dq[i * ${dq_seq} + d * ${dq_dim}] =
                ${store}(dq_tile[i * ${head_width} + d] * ${scale});
    (void)last_query;
}
void ${e}(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        int block = (int)(unit % ${q_blocks}), head = (int)(unit / ${q_blocks} % ${heads});
        ${e}_block(p, (int)(unit / (${q_blocks}LL * ${heads})), head, block * ${bq});
    }
}
)";

/* Registers: 2 mr sums, 2 of b, 1 of a. Tiles of 64 x 64 stay in the first two caches. */
static void set_blocking(attention_printer *p, const ml_target *target) {
    const ml_attention_step *a = p->a;
    ml_template *t = &p->text;
    int64_t bytes = target->vector_bytes ? target->vector_bytes : 16;
    int64_t lanes = bytes / (a->dtype == ML_F64 ? 8 : 4), mr = bytes == 64 ? 8 : 4;
    int64_t unit = lanes > mr ? lanes : mr, most = a->dtype == ML_F64 ? 32 : 64;
    int64_t bq = attention_round_up(a->seq < most ? a->seq : most, unit);
    int64_t bk = attention_round_up(a->kv_seq < most ? a->kv_seq : most, unit);
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {
        {"vector_bytes", bytes},
        {"lanes", lanes},
        {"mr", mr},
        {"bq", bq},
        {"bk", bk},
        {"q_blocks", (a->seq + bq - 1) / bq},
        {"k_blocks", (a->kv_seq + bk - 1) / bk},
        {"head_width", attention_round_up(a->head_dim, unit)},
        {"value_width", attention_round_up(a->value_dim, unit)},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        template_set(t, sizes[i].name, "%lld", (long long)sizes[i].value);
    template_set(t, "row_width", "%lld",
                 (long long)attention_round_up(
                     a->head_dim > a->value_dim ? a->head_dim : a->value_dim, unit));
    template_set_text(t, "lane_integer", a->dtype == ML_F64 ? "long long" : "int");
    ml_text low = {.arena = t->arena}, high = {.arena = t->arena};
    for (int64_t i = 0; i < lanes / 2; i++) {
        const char *comma = i ? ", " : "";
        ml_text_add(&low, "%s%lld, %lld", comma, (long long)i, (long long)(lanes + i));
        ml_text_add(&high, "%s%lld, %lld", comma, (long long)(lanes / 2 + i),
                    (long long)(lanes + lanes / 2 + i));
    }
    template_set_text(t, "low_lanes", low.text);
    template_set_text(t, "high_lanes", high.text);
    /* captured tensors must not be read beyond their ends */
    template_set_text(t, "used_queries", p->captured && a->seq % bq ? "queries" : "${bq}");
    template_set_text(t, "used_keys", p->captured && a->kv_seq % bk ? "keys" : "${bk}");
}

static ml_kernel *finish(attention_printer *p, const char *const *bodies, int count,
                         const char *label, int64_t units) {
    ml_kernel *k = template_kernel_of(&p->text, bodies, count, label,
                                      p->step->read_count + p->step->write_count);
    k->units = units;
    return k;
}

void template_attention_c(ml_schedule *s, ml_step *step) {
    attention_printer p;
    attention_begin(&p, s, step);
    set_blocking(&p, s->target);
    const ml_attention_step *a = p.a;
    int64_t q_blocks = strtoll(template_get(&p.text, "q_blocks"), NULL, 10);
    int64_t k_blocks = strtoll(template_get(&p.text, "k_blocks"), NULL, 10);
    if (!a->backward) {
        const char *const bodies[] = {common_text, forward_text};
        step->kernel = finish(&p, bodies, 2, "attention", p.batches * a->heads * q_blocks);
        return;
    }
    int64_t pairs = p.batches * a->kv_heads;
    bool whole = a->dtype != ML_BF16 && pairs >= 2 * s->target->threads;
    template_set_text(&p.text, "whole", whole ? "1" : "0");
    const char *const keys[] = {common_text, tile_text, keys_text,
                                whole ? whole_entry_text : keys_entry_text};
    step->kernel = finish(&p, keys, 4, "attention_grad", whole ? pairs : pairs * k_blocks);
    if (whole) return;
    const char *const queries[] = {common_text, tile_text, queries_text};
    step->kernel->next =
        finish(&p, queries, 3, "attention_grad dq", p.batches * a->heads * q_blocks);
}
