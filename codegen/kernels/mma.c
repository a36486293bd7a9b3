/* Attention on CUDA with tensor cores: bf16, head sizes up to 256 in steps of 8.
 *
 * mma.sync m16n8k16 with f32 sums, as in FlashAttention-2: scores stay in registers, and the
 * accumulators of one product are the left operand of the next. Tiles come by cp.async one step
 * ahead; rows in shared memory are 16 bytes longer than their contents, so that ldmatrix meets no
 * bank twice. Lane l of a warp holds, of a 16 x 8 accumulator, rows l / 4 and l / 4 + 8 and columns
 * 2 (l % 4) and the next.
 *
 * Forward: a warp owns 32 queries, with heads above 128 half as many. Backward, without atomics:
 * one kernel by query blocks gives delta (row sums of do o) and dq, the next one by key blocks dk
 * and dv, where a warp owns keys and all products are of transposed tiles, so that they too stay in
 * registers; of heads above 128 a block has half of the columns. */
#include "codegen/kernels/attention.h"

const char template_mma_ptx[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
/* PTX */
${quick}static __device__ __forceinline__ unsigned ${e}_address(const void *shared) {
    return (unsigned)__cvta_generic_to_shared(shared);
}
static __device__ __forceinline__ void ${e}_copy(unsigned to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void ${e}_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_matrices(unsigned (&r)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
static __device__ __forceinline__ void ${e}_transposed(unsigned (&r)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
static __device__ __forceinline__ void ${e}_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ unsigned ${e}_pack(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
static __device__ __forceinline__ float ${e}_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* end of PTX */
)";

static const char common_text[] = R"(
/* Start to copy rows of `columns` elements to a tile of tile_rows x width, zeros around them. */
static __device__ __forceinline__ void ${e}_load(unsigned tile, int stride, const ml_bf16 *from,
                                                 long long row_stride, int rows, int columns,
                                                 int tile_rows, int width) {
    for (int i = threadIdx.x; i < tile_rows * (width / 8); i += 128) {
        int r = i / (width / 8), c = i % (width / 8) * 8;
        bool valid = r < rows && c < columns;
        ${e}_copy(tile + (r * stride + c) * 2, from + (valid ? r * row_stride + c : 0),
                  valid ? 16 : 0);
    }
}
/* A warp's rows of a tile, 16 bytes a lane, to memory. */
static __device__ __forceinline__ void ${e}_store(ml_bf16 *to, long long row_stride,
                                                  const ml_bf16 *tile, int stride, int rows,
                                                  int columns, int tile_rows) {
    for (int i = threadIdx.x % 32; i < tile_rows * (columns / 8); i += 32) {
        int r = i / (columns / 8), c = i % (columns / 8) * 8;
        if (r < rows) *(uint4 *)(to + r * row_stride + c) = *(const uint4 *)(tile + r * stride + c);
    }
}
/* sum[m][n] += a(rows of tile a) b(rows of tile b)^T: both [row][depth], depth contiguous. */
template <int M, int N>
static __device__ __forceinline__ void ${e}_product(float (&sum)[M][N][4], unsigned a, int a_stride,
                                                    unsigned b, int b_stride, int depth) {
    int lane = threadIdx.x % 32;
    a += (lane % 16 * a_stride + lane / 16 * 8) * 2;
    b += ((lane / 16 * 8 + lane % 8) * b_stride + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int k = 0; k < depth; k += 16) {
        unsigned left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) ${e}_matrices(left[m], a + (m * 16 * a_stride + k) * 2);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned right[4];
            ${e}_matrices(right, b + (n * 8 * b_stride + k) * 2);
#pragma unroll
            for (int m = 0; m < M; m++) {
                ${e}_mma(sum[m][n], left[m], right[0], right[1]);
                ${e}_mma(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}
/* sum[m][n] += p b: p accumulators of K x 8 columns (rounded to bf16), b [depth][column]. */
template <int M, int N, int K>
static __device__ __forceinline__ void ${e}_chain(float (&sum)[M][N][4], const float (&p)[M][K][4],
                                                  unsigned b, int b_stride) {
    int lane = threadIdx.x % 32;
    b += (lane % 16 * b_stride + lane / 16 * 8) * 2;
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        unsigned left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            left[m][0] = ${e}_pack(p[m][k][0], p[m][k][1]);
            left[m][1] = ${e}_pack(p[m][k][2], p[m][k][3]);
            left[m][2] = ${e}_pack(p[m][k + 1][0], p[m][k + 1][1]);
            left[m][3] = ${e}_pack(p[m][k + 1][2], p[m][k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned right[4];
            ${e}_transposed(right, b + (k * 8 * b_stride + n * 8) * 2);
#pragma unroll
            for (int m = 0; m < M; m++) {
                ${e}_mma(sum[m][n], left[m], right[0], right[1]);
                ${e}_mma(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}
/* Accumulators as bf16 into a warp's rows of a tile. */
template <int M, int N>
static __device__ __forceinline__ void ${e}_spill(ml_bf16 *tile, int stride,
                                                  const float (&x)[M][N][4], float factor) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                *(unsigned *)(tile + (m * 16 + r * 8 + lane / 4) * stride + n * 8 + lane % 4 * 2) =
                    ${e}_pack(x[m][n][2 * r] * factor, x[m][n][2 * r + 1] * factor);
}
)";

/* Shared memory: queries, then two stages of keys and values. */
static const char forward_text[] = R"(
static __device__ __forceinline__ void ${e}_stage(unsigned tiles, const ml_bf16 *k,
                                                  const ml_bf16 *v, int key) {
    int keys = ${kv_seq} - key;
    ${e}_load(tiles, ${hs}, k + key * ${k_seq}, ${k_seq}, keys, ${head_dim}, ${bn}, ${hw});
    ${e}_load(tiles + ${bn} * ${hs} * 2, ${vs}, v + key * ${v_seq}, ${v_seq}, keys, ${value_dim},
              ${bn}, ${vw});
    ${e}_commit();
}
/* One tile: scores to probabilities, statistics of the rows, and the factor for what was summed. */
static __device__ __forceinline__ void ${e}_softmax(const ${e}_arguments &a, int batch, int head,
                                                    int query, int key,
                                                    float (&s)[${qt}][${bn} / 8][4],
                                                    float (&largest)[${qt}][2],
                                                    float (&total)[${qt}][2],
                                                    float (&shrink)[${qt}][2]) {
    int lane = threadIdx.x % 32, last_query = query + ${bm} - 1, keys = ${bn};
    (void)last_query, (void)keys;
    ${places}
    bool masked = key + ${bn} > ${kv_seq} || (${crosses});
    query += threadIdx.x / 32 * (${qt} * 16) + lane / 4;
    key += lane % 4 * 2;
    ${captures}
#pragma unroll
    for (int m = 0; m < ${qt}; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int qi = query + m * 16 + r * 8;
            qi = qi < ${seq} ? qi : ${seq} - 1;
            if (${scored}) {
#pragma unroll
                for (int n = 0; n < ${bn} / 8; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        int kv = key + n * 8 + c;
                        ${clamp_key}
                        float x = s[m][n][2 * r + c] * ${scale};
                        ${score}
                        s[m][n][2 * r + c] = x < ${lowest} ? ${lowest} : x;
                    }
            }
            if (masked) {
#pragma unroll
                for (int n = 0; n < ${bn} / 8; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        int kv = key + n * 8 + c;
                        if (!(kv < ${kv_seq} && (${visible}))) s[m][n][2 * r + c] = ${lowest};
                    }
            }
            float next = largest[m][r];
#pragma unroll
            for (int n = 0; n < ${bn} / 8; n++)
                next = fmaxf(next, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
            next = fmaxf(next, __shfl_xor_sync(~0u, next, 1));
            next = fmaxf(next, __shfl_xor_sync(~0u, next, 2));
            float base = next * ${unit} < ${no_key} ? 0.0f : next * ${unit};
            shrink[m][r] = ${e}_exp2(largest[m][r] * ${unit} - base);
            largest[m][r] = next;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < ${bn} / 8; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float x = ${e}_exp2(s[m][n][2 * r + c] * ${unit} - base);
                    s[m][n][2 * r + c] = x;
                    sum += x;
                }
            total[m][r] = total[m][r] * shrink[m][r] + sum;
        }
}
extern "C" __global__ void __launch_bounds__(128) ${e}(${e}_arguments a) {
    extern __shared__ uint4 ${e}_shared[]; ${places}
    ml_bf16 *query_tile = (ml_bf16 *)${e}_shared;
    unsigned queries_at = ${e}_address(query_tile), stages_at = queries_at + ${bm} * ${ws} * 2;
    int block = blockIdx.x % ${q_blocks}, head = blockIdx.x / ${q_blocks} % ${heads};
    int batch = blockIdx.x / (${q_blocks} * ${heads});
    int query = (${q_blocks} - 1 - block) * ${bm}; /* the longest causal rows first */
    int kv_head = head / ${group}, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int last_query = query + ${bm} - 1 < ${seq} ? query + ${bm} - 1 : ${seq} - 1;
    (void)last_query;
    int first = ${first_key}, end = ${end_key};
    first = first / ${bn} * ${bn};
    const ml_bf16 *k = (const ml_bf16 *)a.p[1] + ${k_batch} + kv_head * ${k_head};
    const ml_bf16 *v = (const ml_bf16 *)a.p[2] + ${v_batch} + kv_head * ${v_head};
    ${e}_load(queries_at, ${ws}, (const ml_bf16 *)a.p[0] + ${q_batch} + head * ${q_head} +
              query * ${q_seq}, ${q_seq}, ${seq} - query, ${head_dim}, ${bm}, ${hw});
    ${e}_stage(stages_at, k, v, first);
    float out[${qt}][${vw} / 8][4] = {}, largest[${qt}][2], total[${qt}][2] = {}, shrink[${qt}][2];
    for (int i = 0; i < 2 * ${qt}; i++) largest[i / 2][i % 2] = ${lowest};
    int stage = 0;
    for (int key = first; key < end; key += ${bn}, stage ^= 1) {
        ${e}_wait();
        __syncthreads();
        unsigned keys_at = stages_at + stage * ${stage_bytes};
        if (key + ${bn} < end)
            ${e}_stage(stages_at + (stage ^ 1) * ${stage_bytes}, k, v, key + ${bn});
        float s[${qt}][${bn} / 8][4] = {};
        ${e}_product(s, queries_at + warp * (${qt} * 16) * ${ws} * 2, ${ws}, keys_at, ${hs}, ${hw});
        ${e}_softmax(a, batch, head, query, key, s, largest, total, shrink);
#pragma unroll
        for (int m = 0; m < ${qt}; m++)
#pragma unroll
            for (int n = 0; n < ${vw} / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[m][n][i] *= shrink[m][i / 2];
        ${e}_chain(out, s, keys_at + ${bn} * ${hs} * 2, ${vs});
    }
    ${e}_wait(); /* where there was no key */
    __syncthreads();
    float *lse = (float *)a.p[${lse_at}] + ${lse_batch} + head * ${lse_head};
#pragma unroll
    for (int i = 0; i < 2 * ${qt}; i++) {
        float sum = total[i / 2][i % 2];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        float inverse = sum == 0 ? 0 : 1 / sum;
        int qi = query + warp * (${qt} * 16) + i / 2 * 16 + i % 2 * 8 + lane / 4;
        if (lane % 4 == 0 && qi < ${seq})
            lse[qi * ${lse_seq}] =
                sum == 0 ? -ML_INF : largest[i / 2][i % 2] * ${natural} + logf(sum);
#pragma unroll
        for (int n = 0; n < ${vw} / 8; n++)
            out[i / 2][n][i % 2 * 2] *= inverse, out[i / 2][n][i % 2 * 2 + 1] *= inverse;
    }
    ml_bf16 *rows = query_tile + warp * (${qt} * 16) * ${ws};
    ${e}_spill(rows, ${ws}, out, 1.0f);
    __syncwarp();
    query += warp * (${qt} * 16);
    ${e}_store((ml_bf16 *)a.p[${o_at}] + ${o_batch} + head * ${o_head} + query * ${o_seq}, ${o_seq},
               rows, ${ws}, ${seq} - query, ${value_dim}, ${qt} * 16);
}
)";

/* Backward, one tile of the scores: s to probabilities and dp to the gradients of the scaled
 * products. ROWS_ARE_KEYS: rows of the accumulators are keys, columns queries. lse (in units of
 * log2) and delta by query of the tile. */
static const char slopes_text[] = R"(
template <int M, int N, bool ROWS_ARE_KEYS>
static __device__ __forceinline__ void ${e}_slopes(const ${e}_arguments &a, int batch, int head,
                                                   int row, int column, bool masked,
                                                   const float *lse, const float *delta,
                                                   float (&s)[M][N][4], float (&dp)[M][N][4]) {
    int lane = threadIdx.x % 32;
    ${captures}
    ${places}
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int r = m * 16 + i / 2 * 8 + lane / 4, c = n * 8 + lane % 4 * 2 + i % 2;
                int at = ROWS_ARE_KEYS ? c : r; /* which query of the tile */
                int qi = ROWS_ARE_KEYS ? column + c : row + r;
                int kv = ROWS_ARE_KEYS ? row + r : column + c;
                bool hidden = masked && !(kv < ${kv_seq} && (${visible}));
                float x = s[m][n][i], raw = x * ${scale}, slope;
                (void)raw, (void)qi, (void)kv;
                if (${scored}) {
                    ${clamp_query}
                    ${clamp_key}
                    x = raw;
                    ${score}
                    x = ${e}_exp2(x * ${unit} - lse[at]);
                    x = hidden ? 0 : x;
                    slope = x * (dp[m][n][i] - delta[at]);
                    ${derivative}
                    slope = hidden ? 0 : slope;
                } else {
                    x = ${e}_exp2(x * ${unit} - lse[at]);
                    x = hidden ? 0 : x;
                    slope = x * (dp[m][n][i] - delta[at]);
                }
                s[m][n][i] = x;
                dp[m][n][i] = slope;
            }
}
)";

/* Shared memory: queries, do, two stages of keys and values, lse, delta. */
static const char queries_text[] = R"(
static __device__ __forceinline__ void ${e}_stage(unsigned tiles, const ml_bf16 *k,
                                                  const ml_bf16 *v, int key) {
    int keys = ${kv_seq} - key;
    ${e}_load(tiles, ${hs}, k + key * ${k_seq}, ${k_seq}, keys, ${head_dim}, ${bn}, ${hw});
    ${e}_load(tiles + ${bn} * ${hs} * 2, ${vs}, v + key * ${v_seq}, ${v_seq}, keys, ${value_dim},
              ${bn}, ${vw});
    ${e}_commit();
}
/* delta of the block's rows, from do in shared memory and o; rows without keys get a large lse. */
static __device__ __forceinline__ void ${e}_rows(const ${e}_arguments &a, int batch, int head,
                                                 int query, const ml_bf16 *outs, float *lse,
                                                 float *delta) {
    const ml_bf16 *o = (const ml_bf16 *)a.p[3] + ${o_batch} + head * ${o_head};
    const float *from = (const float *)a.p[4] + ${lse_batch} + head * ${lse_head};
    float *deltas = (float *)a.p[${delta_at}] + ((long long)batch * ${heads} + head) * ${seq};
    for (int r = threadIdx.x / 16; r < ${bm}; r += 8) {
        int qi = query + r;
        float sum = 0;
        for (int c = threadIdx.x % 16 * 8; qi < ${seq} && c < ${value_dim}; c += 128) {
            union { uint4 all; ml_bf16 x[8]; } left, right;
            left.all = *(const uint4 *)(o + qi * ${o_seq} + c);
            right.all = *(const uint4 *)(outs + r * ${vs} + c);
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
extern "C" __global__ void __launch_bounds__(128) ${e}(${e}_arguments a) {
    extern __shared__ uint4 ${e}_shared[]; ${places}
    ml_bf16 *query_tile = (ml_bf16 *)${e}_shared, *out_tile = query_tile + ${bm} * ${hs};
    unsigned queries_at = ${e}_address(query_tile), outs_at = queries_at + ${bm} * ${hs} * 2;
    unsigned stages_at = outs_at + ${bm} * ${vs} * 2;
    float *lse = (float *)(out_tile + ${bm} * ${vs} + 2 * ${stage_bytes} / 2);
    float *delta = lse + ${bm};
    int block = blockIdx.x % ${q_blocks}, head = blockIdx.x / ${q_blocks} % ${heads};
    int batch = blockIdx.x / (${q_blocks} * ${heads});
    int query = (${q_blocks} - 1 - block) * ${bm}; /* the longest causal rows first */
    int kv_head = head / ${group}, warp = threadIdx.x / 32;
    int last_query = query + ${bm} - 1 < ${seq} ? query + ${bm} - 1 : ${seq} - 1, keys = ${bn};
    (void)last_query, (void)keys;
    int first = ${first_key}, end = ${end_key};
    first = first / ${bn} * ${bn};
    const ml_bf16 *k = (const ml_bf16 *)a.p[1] + ${k_batch} + kv_head * ${k_head};
    const ml_bf16 *v = (const ml_bf16 *)a.p[2] + ${v_batch} + kv_head * ${v_head};
    ${e}_load(queries_at, ${hs}, (const ml_bf16 *)a.p[0] + ${q_batch} + head * ${q_head} +
              query * ${q_seq}, ${q_seq}, ${seq} - query, ${head_dim}, ${bm}, ${hw});
    ${e}_load(outs_at, ${vs}, (const ml_bf16 *)a.p[5] + ${g_batch} + head * ${g_head} +
              query * ${g_seq}, ${g_seq}, ${seq} - query, ${value_dim}, ${bm}, ${vw});
    ${e}_stage(stages_at, k, v, first);
    ${e}_wait();
    __syncthreads();
    ${e}_rows(a, batch, head, query, out_tile, lse, delta);
    float out[${qt}][${hw} / 8][4] = {};
    int stage = 0;
    for (int key = first; key < end; key += ${bn}, stage ^= 1) {
        ${e}_wait();
        __syncthreads();
        unsigned keys_at = stages_at + stage * ${stage_bytes};
        if (key + ${bn} < end)
            ${e}_stage(stages_at + (stage ^ 1) * ${stage_bytes}, k, v, key + ${bn});
        float s[${qt}][${bn} / 8][4] = {}, dp[${qt}][${bn} / 8][4] = {};
        ${e}_product(s, queries_at + warp * (${qt} * 16) * ${hs} * 2, ${hs}, keys_at, ${hs}, ${hw});
        int own = warp * (${qt} * 16); /* rows of the warp */
        ${e}_product(dp, outs_at + own * ${vs} * 2, ${vs}, keys_at + ${bn} * ${hs} * 2, ${vs},
                     ${vw});
        bool masked = key + ${bn} > ${kv_seq} || (${crosses});
        ${e}_slopes<${qt}, ${bn} / 8, false>(a, batch, head, query + own, key, masked, lse + own,
                                             delta + own, s, dp);
        ${e}_chain(out, dp, keys_at, ${hs});
    }
    __syncthreads();
    ml_bf16 *rows = query_tile + warp * (${qt} * 16) * ${hs};
    ${e}_spill(rows, ${hs}, out, ${scale});
    __syncwarp();
    query += warp * (${qt} * 16);
    ${e}_store((ml_bf16 *)a.p[${dq_at}] + ${dq_batch} + head * ${dq_head} + query * ${dq_seq},
               ${dq_seq}, rows, ${hs}, ${seq} - query, ${head_dim}, ${qt} * 16);
}
)";

/* Shared memory: keys, values, two stages of queries, do, lse and delta. ${kt} row tiles of 16 keys
 * a warp, ${bq} queries a stage; of dk and dv a block has ${hp} and ${vp} columns. */
static const char keys_text[] = R"(
static __device__ __forceinline__ void ${e}_stage(const ${e}_arguments &a, unsigned tiles,
                                                  float *rows, int batch, int head, int query) {
    const ml_bf16 *q = (const ml_bf16 *)a.p[0] + ${q_batch} + head * ${q_head} + query * ${q_seq};
    const ml_bf16 *g = (const ml_bf16 *)a.p[5] + ${g_batch} + head * ${g_head} + query * ${g_seq};
    const float *lse = (const float *)a.p[4] + ${lse_batch} + head * ${lse_head};
    const float *delta = (const float *)a.p[${delta_at}];
    int queries = ${seq} - query;
    ${e}_load(tiles, ${hs}, q, ${q_seq}, queries, ${head_dim}, ${bq}, ${hw});
    ${e}_load(tiles + ${bq} * ${hs} * 2, ${vs}, g, ${g_seq}, queries, ${value_dim}, ${bq}, ${vw});
    ${e}_commit();
    if (threadIdx.x < ${bq}) { /* rows that do not exist, or see nothing, give probabilities 0 */
        int r = threadIdx.x;
        float x = r < queries ? lse[(query + r) * ${lse_seq}] : -ML_INF;
        rows[r] = x == -ML_INF ? 3e38f : x * 1.44269504f;
        rows[${bq} + r] =
            r < queries ? delta[((long long)batch * ${heads} + head) * ${seq} + query + r] : 0;
    }
}
extern "C" __global__ void __launch_bounds__(128) ${e}(${e}_arguments a) {
    extern __shared__ uint4 ${e}_shared[]; ${places}
    ml_bf16 *key_tile = (ml_bf16 *)${e}_shared, *value_tile = key_tile + ${bn} * ${hs};
    unsigned keys_at = ${e}_address(key_tile), values_at = keys_at + ${bn} * ${hs} * 2;
    unsigned stages_at = values_at + ${bn} * ${vs} * 2;
    float *rows = (float *)(value_tile + ${bn} * ${vs} + 2 * ${stage_bytes} / 2);
    int part = blockIdx.x % ${parts}, block = blockIdx.x / ${parts};
    int key = block % ${k_blocks} * ${bn}, kv_head = block / ${k_blocks} % ${kv_heads};
    int batch = block / (${k_blocks} * ${kv_heads});
    int dk_first = part * ${hp}, dv_first = part * ${vp};
    int warp = threadIdx.x / 32, own = key + warp * ${kt} * 16;
    int last_key = key + ${bn} - 1 < ${kv_seq} ? key + ${bn} - 1 : ${kv_seq} - 1, keys = ${bn};
    (void)last_key, (void)keys;
    int first = ${first_query}, end = ${end_query};
    first = first / ${bq} * ${bq};
    ${e}_load(keys_at, ${hs}, (const ml_bf16 *)a.p[1] + ${k_batch} + kv_head * ${k_head} +
              key * ${k_seq}, ${k_seq}, ${kv_seq} - key, ${head_dim}, ${bn}, ${hw});
    ${e}_load(values_at, ${vs}, (const ml_bf16 *)a.p[2] + ${v_batch} + kv_head * ${v_head} +
              key * ${v_seq}, ${v_seq}, ${kv_seq} - key, ${value_dim}, ${bn}, ${vw});
    ${e}_commit();
    int blocks = end > first ? (end - first + ${bq} - 1) / ${bq} : 0, steps = blocks * ${group};
    if (steps) ${e}_stage(a, stages_at, rows, batch, kv_head * ${group}, first);
    float dk[${kt}][${hp} / 8][4] = {}, dv[${kt}][${vp} / 8][4] = {};
    for (int step = 0; step < steps; step++) {
        ${e}_wait();
        __syncthreads();
        int head = kv_head * ${group} + step / blocks, query = first + step % blocks * ${bq};
        int stage = step % 2, other = stage ^ 1, after = step + 1;
        if (after < steps)
            ${e}_stage(a, stages_at + other * ${stage_bytes}, rows + other * 2 * ${bq}, batch,
                       kv_head * ${group} + after / blocks, first + after % blocks * ${bq});
        unsigned queries_at = stages_at + stage * ${stage_bytes};
        unsigned outs_at = queries_at + ${bq} * ${hs} * 2;
        const float *lse = rows + stage * 2 * ${bq};
        int last_query = query + ${bq} - 1;
        (void)last_query;
        float s[${kt}][${bq} / 8][4] = {}, dp[${kt}][${bq} / 8][4] = {};
        ${e}_product(s, keys_at + warp * ${kt} * 16 * ${hs} * 2, ${hs}, queries_at, ${hs}, ${hw});
        ${e}_product(dp, values_at + warp * ${kt} * 16 * ${vs} * 2, ${vs}, outs_at, ${vs}, ${vw});
        bool masked = ${crosses};
        ${e}_slopes<${kt}, ${bq} / 8, true>(a, batch, head, own, query, masked, lse, lse + ${bq}, s,
                                            dp);
        ${e}_chain(dv, s, outs_at + dv_first * 2, ${vs});
        ${e}_chain(dk, dp, queries_at + dk_first * 2, ${hs});
    }
    ${e}_wait(); /* where there was no query */
    __syncthreads();
    key_tile += warp * ${kt} * 16 * ${hs}, value_tile += warp * ${kt} * 16 * ${vs};
    ${e}_spill(key_tile, ${hs}, dk, ${scale});
    ${e}_spill(value_tile, ${vs}, dv, 1.0f);
    __syncwarp();
    int dk_columns = ${head_dim} - dk_first < ${hp} ? ${head_dim} - dk_first : ${hp};
    int dv_columns = ${value_dim} - dv_first < ${vp} ? ${value_dim} - dv_first : ${vp};
    ${e}_store((ml_bf16 *)a.p[${dk_at}] + ${dk_batch} + kv_head * ${dk_head} + own * ${dk_seq} +
               dk_first, ${dk_seq}, key_tile, ${hs}, ${kv_seq} - own, dk_columns, ${kt} * 16);
    ${e}_store((ml_bf16 *)a.p[${dv_at}] + ${dv_batch} + kv_head * ${dv_head} + own * ${dv_seq} +
               dv_first, ${dv_seq}, value_tile, ${vs}, ${kv_seq} - own, dv_columns, ${kt} * 16);
}
)";

/* 16-byte accesses: rows are contiguous and start at multiples of eight elements. */
static bool aligned(const attention_printer *p, int i, bool statistics) {
    if (statistics) return true;
    const ml_attention_strides *s = &p->a->strides[i];
    int64_t all = s->head | s->seq | s->batch[0] | s->batch[1] | s->batch[2] |
                  template_value(p->schedule, p->step, i)->offset;
    return s->dim == 1 && all % 8 == 0;
}

bool attention_aligned(const attention_printer *p) {
    const ml_attention_step *a = p->a;
    if (a->dtype != ML_BF16 || a->head_dim % 8 || a->value_dim % 8) return false;
    int reads = a->backward ? 6 : 3, writes = a->backward ? 3 : 2;
    for (int i = 0; i < reads; i++)
        if (!aligned(p, i, i == 4)) return false;
    for (int i = 0; i < writes; i++)
        if (!aligned(p, p->step->read_count + i, !a->backward && i == 1)) return false;
    return true;
}

enum { LARGE = 128, LARGEST = 256 };

static bool serves(const attention_printer *p) {
    const ml_attention_step *a = p->a;
    return p->schedule->target->arch >= 80 && a->head_dim <= LARGEST && a->value_dim <= LARGEST &&
           attention_aligned(p);
}

static void set(attention_printer *p, const char *name, int64_t value) {
    template_set(&p->text, name, "%lld", (long long)value);
}

static ml_kernel *finish(attention_printer *p, const char *const *bodies, int count,
                         const char *label) {
    return template_kernel_of(&p->text, bodies, count, label,
                              p->step->read_count + p->step->write_count);
}

/* Scores are exponentiated in base 2: `unit` turns a score into an exponent, and `natural` the
 * largest score into a logarithm. Without a score function the scale is part of both, if it keeps
 * the order. A row has had no key so far where its largest exponent is below `no_key`: what lies
 * there, such as masks of -1e30, differs from its own rounded product by too much for exp2. */
void attention_set_score_units(attention_printer *p, bool scored) {
    double log2e = 1.4426950408889634, scale = p->a->args.scale;
    scored = scored || scale < 0;
    set(p, "scored", scored);
    template_set_text(&p->text, "no_key", "-2e9f");
    template_set(&p->text, "unit", "%.9ef", scored ? log2e : scale * log2e);
    template_set(&p->text, "natural", "%.9ef", scored ? 1.0 : scale);
}

void attention_set_units(attention_printer *p) {
    ml_template *t = &p->text;
    attention_set_score_units(p, p->a->args.score != 0);
    bool clamped = p->captured > 0;
    template_set_text(t, "quick",
                      "#define ml_exp_f32 ml_quick_exp_f32\n" /* rounded to bf16 anyway */
                      "#define ml_sigmoid_f32 ml_quick_sigmoid_f32\n"
                      "#define ml_tanh_f32 ml_hardware_tanh_f32\n");
    template_set_text(t, "clamp_key", clamped ? "kv = kv < ${kv_seq} ? kv : ${kv_seq} - 1;" : "");
    template_set_text(t, "clamp_query", clamped ? "qi = qi < ${seq} ? qi : ${seq} - 1;" : "");
}

/* Whether tiles for heads of 128, 192 rows of both operands in all, are more than a block may have:
 * then those of queries in the gradient, and of keys in the forward kernel, have half of the rows.
 */
static bool lacks_room(const attention_printer *p, int64_t both_strides) {
    return 192 * both_strides * 2 + 1024 > ml_target_shared(p->schedule->target->arch);
}

/* Rows of tiles: what fits registers, and shared memory for two blocks of a multiprocessor. */
static void print_backward(attention_printer *p, int64_t head_width, int64_t value_width) {
    const ml_attention_step *a = p->a;
    int64_t hs = head_width + 8, vs = value_width + 8, widest = hs > vs ? hs - 8 : vs - 8;
    bool huge = widest > LARGE, large = widest > 64, less = large && lacks_room(p, hs + vs);
    int64_t qt = huge || less ? 1 : 2, bm = 64 * qt, q_blocks = (a->seq + bm - 1) / bm;
    set(p, "q_blocks", q_blocks);
    set(p, "qt", qt);
    set(p, "bm", bm);
    int64_t bn = huge ? 16 : large ? 32 : 64, stage = bn * (hs + vs) * 2;
    set(p, "bn", bn);
    set(p, "stage_bytes", stage);
    const char *const queries[] = {template_mma_ptx, common_text, slopes_text, queries_text};
    ml_kernel *dq = finish(p, queries, 4, "attention_grad dq");
    template_launch(dq, q_blocks * a->heads * p->batches, 1, 1, 128,
                    bm * (hs + vs) * 2 + 2 * stage + 8 * bm);
    int64_t kt = large ? 1 : 2, bq = huge ? 16 : large && !less ? 64 : 32, parts = huge ? 2 : 1;
    bn = 64 * kt;
    stage = bq * (hs + vs) * 2;
    int64_t k_blocks = (a->kv_seq + bn - 1) / bn;
    set(p, "k_blocks", k_blocks);
    set(p, "bn", bn);
    set(p, "kt", kt);
    set(p, "bq", bq);
    set(p, "parts", parts);
    set(p, "hp", head_width / parts);
    set(p, "vp", value_width / parts);
    set(p, "stage_bytes", stage);
    const char *const keys[] = {template_mma_ptx, common_text, slopes_text, keys_text};
    ml_kernel *dkv = finish(p, keys, 4, "attention_grad dk dv");
    template_launch(dkv, k_blocks * parts * a->kv_heads * p->batches, 1, 1, 128,
                    bn * (hs + vs) * 2 + 2 * stage + 4 * bq * 4);
    p->step->kernel = dq;
    dq->next = dkv;
}

bool template_attention_mma(attention_printer *p) {
    if (!serves(p)) return false;
    const ml_attention_step *a = p->a;
    bool huge = a->head_dim > LARGE || a->value_dim > LARGE;
    int64_t step = huge ? 32 : 16; /* a half is whole tiles too */
    int64_t head_width = attention_round_up(a->head_dim, step);
    int64_t value_width = attention_round_up(a->value_dim, step);
    int64_t hs = head_width + 8, vs = value_width + 8, ws = hs > vs ? hs : vs;
    attention_set_units(p);
    set(p, "hw", head_width);
    set(p, "vw", value_width);
    set(p, "hs", hs);
    set(p, "vs", vs);
    set(p, "ws", ws);
    if (a->backward) {
        print_backward(p, head_width, value_width);
        return true;
    }
    int64_t qt = huge ? 1 : 2, bm = 64 * qt, q_blocks = (a->seq + bm - 1) / bm;
    int64_t bn = huge || lacks_room(p, hs + vs) ? 32 : 64;
    set(p, "q_blocks", q_blocks);
    set(p, "qt", qt);
    set(p, "bm", bm);
    set(p, "bn", bn);
    set(p, "stage_bytes", bn * (hs + vs) * 2);
    const char *const bodies[] = {template_mma_ptx, common_text, forward_text};
    p->step->kernel = finish(p, bodies, 3, "attention");
    template_launch(p->step->kernel, q_blocks * a->heads * p->batches, 1, 1, 128,
                    bm * ws * 2 + 2 * bn * (hs + vs) * 2);
    return true;
}
