/* Attention on CUDA: which kernels serve, and the general ones: any dtype, strides and head size,
 * one multiply-add at a time from tiles in shared memory. The fast ones are in template_mma.c.
 *
 * The backward pass sums without atomics: a first kernel gives dq by query blocks (and delta, the
 * row sums of do o, for the second), a second dk and dv by key blocks over the group's heads. */
#include "codegen/kernels/attention.h"
#include "codegen/lower/library.h"

/* A block is 16 x 16 threads; thread (ty, tx) holds rows ty + 16 i and columns tx + 16 j. Tiles are
 * ${edge} x ${edge}; rows of shared tiles have odd lengths, so that columns lie in distinct banks.
 */
static const char common_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
static __device__ __forceinline__ void ${e}_load(
    ${real} *tile, int width, const ${memory} *from, long long row_stride, long long column_stride,
    int rows, int columns, ${real} factor) {
    for (int i = threadIdx.x; i < ${edge} * columns; i += 256) {
        int r = i / columns, c = i % columns;
        tile[r * width + c] =
            r < rows ? (${real})${load}(from[r * row_stride + c * column_stride]) * factor : 0;
    }
}
/* sum[i][j] += a(row, k) b(column, k) with the strides given. */
template <int ROWS, int COLUMNS>
static __device__ __forceinline__ void ${e}_product(
    ${real} (&sum)[ROWS][COLUMNS], const ${real} *a, int a_row, int a_k, const ${real} *b,
    int b_column, int b_k, int columns, int depth) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    for (int k = 0; k < depth; k++) {
        ${real} x[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) x[i] = a[(ty + 16 * i) * a_row + k * a_k];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            ${real} y = tx + 16 * j < columns ? b[(tx + 16 * j) * b_column + k * b_k] : 0;
#pragma unroll
            for (int i = 0; i < ROWS; i++) sum[i][j] += x[i] * y;
        }
    }
}
/* Over the 16 threads of a row. */
static __device__ __forceinline__ ${real} ${e}_row_sum(${real} x) {
    for (int d = 8; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}
static __device__ __forceinline__ ${real} ${e}_row_max(${real} x) {
    for (int d = 8; d > 0; d /= 2) {
        ${real} y = __shfl_xor_sync(~0u, x, d);
        x = y > x ? y : x;
    }
    return x;
}
)";

static const char forward_text[] = R"(
static __device__ __forceinline__ void ${e}_scores(const ${e}_arguments &a, int batch, int head,
                                                   int query, int key, int keys,
                                                   ${real} (&score)[${rows}][${rows}]) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    ${captures}
    ${places}
    for (int i = 0; i < ${rows}; i++)
        for (int j = 0; j < ${rows}; j++) {
            int qi = query + ty + 16 * i, kv = key + tx + 16 * j;
            ${real} x = score[i][j];
            if (kv < key + keys && qi < ${seq} && (${visible})) {
                ${score}
                x = x < ${lowest} ? ${lowest} : x;
            } else x = ${lowest};
            score[i][j] = x;
        }
}
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    extern __shared__ ${real} ${e}_shared[]; ${places}
    ${real} *queries_tile = ${e}_shared, *keys_tile = queries_tile + ${edge} * ${head_odd};
    ${real} *values_tile = keys_tile + ${edge} * ${head_odd};
    ${real} *chances = values_tile + ${edge} * ${value_odd};
    int block = blockIdx.x % ${q_blocks}, head = blockIdx.x / ${q_blocks} % ${heads};
    int batch = blockIdx.x / (${q_blocks} * ${heads}), kv_head = head / ${group};
    int query = (${q_blocks} - 1 - block) * ${edge}; /* the longest causal rows first */
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    int queries = ${seq} - query < ${edge} ? ${seq} - query : ${edge};
    int last_query = query + queries - 1, end = ${end_key};
    (void)last_query;
    const ${memory} *k = (const ${memory} *)a.p[1] + ${k_batch} + kv_head * ${k_head};
    const ${memory} *v = (const ${memory} *)a.p[2] + ${v_batch} + kv_head * ${v_head};
    ${e}_load(queries_tile, ${head_odd}, (const ${memory} *)a.p[0] + ${q_batch} + head * ${q_head} +
              query * ${q_seq}, ${q_seq}, ${q_dim}, queries, ${head_dim}, (${real})${scale});
    ${real} out[${rows}][${value_columns}] = {}, largest[${rows}], total[${rows}];
    for (int i = 0; i < ${rows}; i++) largest[i] = ${lowest}, total[i] = 0;
    for (int key = ${first_key}; key < end; key += ${edge}) {
        int keys = end - key < ${edge} ? end - key : ${edge};
        __syncthreads();
        ${e}_load(keys_tile, ${head_odd}, k + key * ${k_seq}, ${k_seq}, ${k_dim}, keys,
                  ${head_dim}, 1);
        ${e}_load(values_tile, ${value_odd}, v + key * ${v_seq}, ${v_seq}, ${v_dim}, keys,
                  ${value_dim}, 1);
        __syncthreads();
        ${real} score[${rows}][${rows}] = {};
        ${e}_product(score, queries_tile, ${head_odd}, 1, keys_tile, ${head_odd}, 1, ${edge},
                     ${head_dim});
        ${e}_scores(a, batch, head, query, key, keys, score);
        for (int i = 0; i < ${rows}; i++) {
            ${real} next = largest[i], sum = 0;
            for (int j = 0; j < ${rows}; j++) next = score[i][j] > next ? score[i][j] : next;
            next = ${e}_row_max(next);
            ${real} base = next <= ${lowest} ? 0 : next; /* a row without keys so far */
            ${real} shrink = ml_exp_${suffix}(largest[i] - base);
            largest[i] = next;
            for (int j = 0; j < ${rows}; j++) {
                ${real} x = ml_exp_${suffix}(score[i][j] - base);
                chances[(ty + 16 * i) * ${edge_odd} + tx + 16 * j] = x;
                sum += x;
            }
            total[i] = total[i] * shrink + ${e}_row_sum(sum);
            for (int j = 0; j < ${value_columns}; j++) out[i][j] *= shrink;
        }
        __syncwarp();
        ${e}_product(out, chances, ${edge_odd}, 1, values_tile, 1, ${value_odd}, ${value_dim},
                     keys);
    }
    for (int i = 0; i < ${rows}; i++) {
        int qi = query + ty + 16 * i;
        ${memory} *o = (${memory} *)a.p[${o_at}] + ${o_batch} + head * ${o_head} + qi * ${o_seq};
        ${real} inverse = total[i] == 0 ? 0 : 1 / total[i];
        for (int j = 0; j < ${value_columns}; j++)
            if (qi < ${seq} && tx + 16 * j < ${value_dim})
                o[(tx + 16 * j) * ${o_dim}] = ${store}(out[i][j] * inverse);
        if (tx == 0 && qi < ${seq})
            ((${lse_memory} *)a.p[${lse_at}])[${lse_batch} + head * ${lse_head} + qi * ${lse_seq}] =
                total[i] == 0 ? -ML_INF : largest[i] + ml_log_${suffix}(total[i]);
    }
}
)";

/* One tile: chances and slopes [query][key], from tiles of q (scaled), k, v and do. */
static const char tile_text[] = R"(
static __device__ __forceinline__ void ${e}_tile(
    const ${e}_arguments &a, int batch, int head, int query, int key, int keys,
    const ${real} *queries_tile, const ${real} *outs_tile, const ${real} *keys_tile,
    const ${real} *values_tile, const ${real} *lse, const ${real} *delta, ${real} *chances,
    ${real} *slopes) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    ${captures}
    ${places}
    ${real} score[${rows}][${rows}] = {}, grad[${rows}][${rows}] = {};
    ${e}_product(score, queries_tile, ${head_odd}, 1, keys_tile, ${head_odd}, 1,
                 ${edge}, ${head_dim});
    ${e}_product(grad, outs_tile, ${value_odd}, 1, values_tile, ${value_odd}, 1,
                 ${edge}, ${value_dim});
    for (int i = 0; i < ${rows}; i++)
        for (int j = 0; j < ${rows}; j++) {
            int qi = query + ty + 16 * i, kv = key + tx + 16 * j;
            ${real} x = score[i][j], raw = x, slope = 0;
            (void)raw;
            if (kv < key + keys && qi < ${seq} && (${visible})) {
                ${score}
                x = ml_exp_${suffix}(x - lse[ty + 16 * i]);
                slope = x * (grad[i][j] - delta[ty + 16 * i]);
                ${derivative}
            } else x = 0;
            int at = (ty + 16 * i) * ${edge_odd} + tx + 16 * j;
            chances[at] = x;
            slopes[at] = slope;
        }
}
/* q, do and statistics of a query block; a row without keys gets a large lse. */
static __device__ __forceinline__ void ${e}_queries(const ${e}_arguments &a, int batch, int head,
                                                    int query, ${real} *queries_tile,
                                                    ${real} *outs_tile, ${real} *lse) {
    int queries = ${seq} - query < ${edge} ? ${seq} - query : ${edge};
    ${e}_load(queries_tile, ${head_odd}, (const ${memory} *)a.p[0] + ${q_batch} + head * ${q_head} +
              query * ${q_seq}, ${q_seq}, ${q_dim}, queries, ${head_dim}, (${real})${scale});
    ${e}_load(outs_tile, ${value_odd}, (const ${memory} *)a.p[5] + ${g_batch} + head * ${g_head} +
              query * ${g_seq}, ${g_seq}, ${g_dim}, queries, ${value_dim}, 1);
    if (threadIdx.x < ${edge}) {
        ${real} x = 0;
        if ((int)threadIdx.x < queries)
            x = ((const ${lse_memory} *)a.p[4])[${lse_batch} + head * ${lse_head} +
                                                (query + threadIdx.x) * ${lse_seq}];
        lse[threadIdx.x] = x == -ML_INF ? -(${lowest}) : x;
    }
}
)";

static const char queries_text[] = R"(
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    extern __shared__ ${real} ${e}_shared[]; ${places}
    ${real} *queries_tile = ${e}_shared, *keys_tile = queries_tile + ${edge} * ${head_odd};
    ${real} *values_tile = keys_tile + ${edge} * ${head_odd};
    ${real} *outs_tile = values_tile + ${edge} * ${value_odd};
    ${real} *chances = outs_tile + ${edge} * ${value_odd};
    ${real} *slopes = chances + ${edge} * ${edge_odd};
    ${real} *lse = slopes + ${edge} * ${edge_odd}, *delta = lse + ${edge};
    int block = blockIdx.x % ${q_blocks}, head = blockIdx.x / ${q_blocks} % ${heads};
    int batch = blockIdx.x / (${q_blocks} * ${heads});
    int query = (${q_blocks} - 1 - block) * ${edge}; /* the longest causal rows first */
    int kv_head = head / ${group}, ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    int queries = ${seq} - query < ${edge} ? ${seq} - query : ${edge};
    int last_query = query + queries - 1, end = ${end_key};
    (void)last_query;
    const ${memory} *k = (const ${memory} *)a.p[1] + ${k_batch} + kv_head * ${k_head};
    const ${memory} *v = (const ${memory} *)a.p[2] + ${v_batch} + kv_head * ${v_head};
    const ${memory} *o = (const ${memory} *)a.p[3] + ${o_batch} + head * ${o_head};
    ${real} *deltas = (${real} *)a.p[${delta_at}] + ((long long)batch * ${heads} + head) * ${seq};
    ${e}_queries(a, batch, head, query, queries_tile, outs_tile, lse);
    __syncthreads();
    for (int i = ty; i < ${edge}; i += 16) {
        ${real} sum = 0;
        for (int d = tx; d < ${value_dim}; d += 16)
            if (i < queries)
                sum += (${real})${load}(o[(query + i) * ${o_seq} + d * ${o_dim}]) *
                       outs_tile[i * ${value_odd} + d];
        sum = ${e}_row_sum(sum);
        if (tx) continue;
        delta[i] = sum;
        if (i < queries) deltas[query + i] = sum;
    }
    ${real} out[${rows}][${head_columns}] = {};
    for (int key = ${first_key}; key < end; key += ${edge}) {
        int keys = end - key < ${edge} ? end - key : ${edge};
        __syncthreads();
        ${e}_load(keys_tile, ${head_odd}, k + key * ${k_seq}, ${k_seq}, ${k_dim}, keys,
                  ${head_dim}, 1);
        ${e}_load(values_tile, ${value_odd}, v + key * ${v_seq}, ${v_seq}, ${v_dim}, keys,
                  ${value_dim}, 1);
        __syncthreads();
        ${e}_tile(a, batch, head, query, key, keys, queries_tile, outs_tile, keys_tile, values_tile,
                  lse, delta, chances, slopes);
        __syncwarp();
        ${e}_product(out, slopes, ${edge_odd}, 1, keys_tile, 1, ${head_odd}, ${head_dim}, keys);
    }
    for (int i = 0; i < ${rows}; i++) {
        int qi = query + ty + 16 * i;
        ${memory} *dq = (${memory} *)a.p[${dq_at}] + ${dq_batch} + head * ${dq_head};
        dq += qi * ${dq_seq};
        for (int j = 0; j < ${head_columns}; j++)
            if (qi < ${seq} && tx + 16 * j < ${head_dim})
                dq[(tx + 16 * j) * ${dq_dim}] = ${store}(out[i][j] * (${real})${scale});
    }
}
)";

static const char keys_text[] = R"(
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    extern __shared__ ${real} ${e}_shared[]; ${places}
    ${real} *queries_tile = ${e}_shared, *keys_tile = queries_tile + ${edge} * ${head_odd};
    ${real} *values_tile = keys_tile + ${edge} * ${head_odd};
    ${real} *outs_tile = values_tile + ${edge} * ${value_odd};
    ${real} *chances = outs_tile + ${edge} * ${value_odd};
    ${real} *slopes = chances + ${edge} * ${edge_odd};
    ${real} *lse = slopes + ${edge} * ${edge_odd}, *delta = lse + ${edge};
    int key = blockIdx.x % ${k_blocks} * ${edge}, kv_head = blockIdx.x / ${k_blocks} % ${kv_heads};
    int batch = blockIdx.x / (${k_blocks} * ${kv_heads});
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    int keys = ${kv_seq} - key < ${edge} ? ${kv_seq} - key : ${edge};
    int last_key = key + keys - 1, first = ${first_query}, end = ${end_query};
    (void)last_key;
    const ${memory} *k = (const ${memory} *)a.p[1] + ${k_batch} + kv_head * ${k_head};
    const ${memory} *v = (const ${memory} *)a.p[2] + ${v_batch} + kv_head * ${v_head};
    ${e}_load(keys_tile, ${head_odd}, k + key * ${k_seq}, ${k_seq}, ${k_dim}, keys,
                  ${head_dim}, 1);
    ${e}_load(values_tile, ${value_odd}, v + key * ${v_seq}, ${v_seq}, ${v_dim}, keys,
              ${value_dim}, 1);
    ${real} dk[${rows}][${head_columns}] = {}, dv[${rows}][${value_columns}] = {};
    for (int head = kv_head * ${group}; head < (kv_head + 1) * ${group}; head++)
        for (int query = first; query < end; query += ${edge}) {
            int queries = ${seq} - query < ${edge} ? ${seq} - query : ${edge};
            __syncthreads();
            ${e}_queries(a, batch, head, query, queries_tile, outs_tile, lse);
            if ((int)threadIdx.x < queries)
                delta[threadIdx.x] = ((const ${real} *)a.p[${delta_at}])
                    [((long long)batch * ${heads} + head) * ${seq} + query + threadIdx.x];
            __syncthreads();
            ${e}_tile(a, batch, head, query, key, keys, queries_tile, outs_tile, keys_tile,
                      values_tile, lse, delta, chances, slopes);
            __syncthreads();
            ${e}_product(dv, chances, 1, ${edge_odd}, outs_tile, 1, ${value_odd}, ${value_dim},
                         queries);
            ${e}_product(dk, slopes, 1, ${edge_odd}, queries_tile, 1, ${head_odd}, ${head_dim},
                         queries);
        }
    for (int i = 0; i < ${rows}; i++) {
        int kv = key + ty + 16 * i;
        ${memory} *to_k = (${memory} *)a.p[${dk_at}] + ${dk_batch} + kv_head * ${dk_head} +
                          kv * ${dk_seq};
        ${memory} *to_v = (${memory} *)a.p[${dv_at}] + ${dv_batch} + kv_head * ${dv_head} +
                          kv * ${dv_seq};
        if (kv >= ${kv_seq}) continue;
        for (int j = 0; j < ${head_columns}; j++)
            if (tx + 16 * j < ${head_dim}) to_k[(tx + 16 * j) * ${dk_dim}] = ${store}(dk[i][j]);
        for (int j = 0; j < ${value_columns}; j++)
            if (tx + 16 * j < ${value_dim}) to_v[(tx + 16 * j) * ${dv_dim}] = ${store}(dv[i][j]);
    }
}
)";

static ml_kernel *finish(attention_printer *p, const char *const *bodies, int count,
                         const char *label) {
    return template_kernel_of(&p->text, bodies, count, label,
                              p->step->read_count + p->step->write_count);
}

/* Bytes of shared memory with tiles of `edge` rows. */
static int64_t shared_bytes(const attention_printer *p, int64_t edge) {
    const ml_attention_step *a = p->a;
    int64_t head = a->head_dim | 1, value = a->value_dim | 1, real = a->dtype == ML_F64 ? 8 : 4;
    if (!a->backward) return edge * (2 * head + value + edge + 1) * real;
    return edge * (2 * head + 2 * value + 2 * (edge + 1) + 2) * real;
}

static void general(attention_printer *p) {
    const ml_attention_step *a = p->a;
    ml_template *t = &p->text;
    int64_t edge = shared_bytes(p, 64) <= 98304 ? 64 : 32, bytes = shared_bytes(p, edge);
    if (bytes > 227 * 1024)
        ml_raise(ML_INVALID, "attention with head size %lld and value size %lld is too large",
                 (long long)a->head_dim, (long long)a->value_dim);
    template_set(t, "edge", "%lld", (long long)edge);
    template_set(t, "edge_odd", "%lld", (long long)edge + 1);
    template_set(t, "rows", "%lld", (long long)edge / 16);
    template_set(t, "head_odd", "%lld", (long long)a->head_dim | 1);
    template_set(t, "value_odd", "%lld", (long long)a->value_dim | 1);
    template_set(t, "head_columns", "%lld", (long long)(a->head_dim + 15) / 16);
    template_set(t, "value_columns", "%lld", (long long)(a->value_dim + 15) / 16);
    int64_t q_blocks = (a->seq + edge - 1) / edge, k_blocks = (a->kv_seq + edge - 1) / edge;
    template_set(t, "q_blocks", "%lld", (long long)q_blocks);
    template_set(t, "k_blocks", "%lld", (long long)k_blocks);
    if (!a->backward) {
        const char *const bodies[] = {common_text, forward_text};
        p->step->kernel = finish(p, bodies, 2, "attention");
        template_launch(p->step->kernel, q_blocks * a->heads * p->batches, 1, 1, 256, bytes);
        return;
    }
    const char *const queries[] = {common_text, tile_text, queries_text};
    const char *const keys[] = {common_text, tile_text, keys_text};
    p->step->kernel = finish(p, queries, 3, "attention_grad dq");
    p->step->kernel->next = finish(p, keys, 3, "attention_grad dk dv");
    template_launch(p->step->kernel, q_blocks * a->heads * p->batches, 1, 1, 256, bytes);
    template_launch(p->step->kernel->next, k_blocks * a->kv_heads * p->batches, 1, 1, 256, bytes);
}

void template_attention_cuda(ml_schedule *s, ml_step *step) {
    attention_printer p;
    attention_begin(&p, s, step);
    if (p.a->backward) {
        ml_dtype dtype = p.a->dtype == ML_F64 ? ML_F64 : ML_F32;
        int64_t deltas = p.batches * p.a->heads * p.a->seq, sums = attention_wgmma_sums(&p);
        int delta = template_workspace(s, step, dtype, sums > deltas ? sums : deltas);
        ml_storage *workspace = &s->storages.at[template_value(s, step, delta)->storage];
        int64_t library =
            ml_attention_workspace(p.a); /* in the same place: one or the other runs */
        if (library > workspace->bytes) workspace->bytes = library;
        template_set(&p.text, "delta_at", "%d", delta);
        template_set(&p.text, "pointers", "%d", step->read_count + step->write_count);
    }
    attention_wgmma_reserve(&p, s);
    if (!template_attention_mma(&p)) general(&p);
    ml_kernel *otherwise = step->kernel;
    if (template_attention_wgmma(&p)) step->kernel->otherwise = otherwise;
}
