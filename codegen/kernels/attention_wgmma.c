/* Attention for Hopper (sm_90a): bf16, heads of up to 128 (forward 256), on warpgroup products
 * (wgmma).
 *
 * A block owns 64 rows a warpgroup, whose operands stay in shared memory, and walks over tiles that
 * one more warpgroup brings: copies of 16 bytes (cp.async, so that operands may have any strides
 * and need no tensor maps made on the host) into a ring of stages, each with two barriers
 * (mbarrier): full, and empty again. The others wait for nobody but it, so that one's softmax runs
 * beside another's products; in a warpgroup the scores of the next tile and the products of this
 * one's probabilities are under way together.
 *
 * Tiles lie in blocks of 64 columns; in a block each row is a line of 128 bytes, whose 16-byte
 * pieces are exchanged by the row modulo 8, as wgmma's 128-byte mode expects: read with columns as
 * depth (queries by keys) or with rows as depth (probabilities by values). Accumulators are
 * registers: lane l of warp w of a warpgroup holds rows 16 w + l / 4 and the eighth after it,
 * columns 2 (l % 4), the next, and so on in steps of eight; rounded to bf16 they are the left
 * operand of the next product as they are.
 *
 * Cycles of an SM for 128 queries x 128 keys: products 2,048 with heads of 128 and 1,024 with 64;
 * exponentials 1,024 on a unit of 16 lanes, and as many for a soft cap's tanh; five instructions an
 * element on four schedulers, 640, which the copies must not crowd: they take 100. Measured on an
 * H200, causal, TFLOP/s: heads of 128, 4,096 tokens: 600 plain, 475 with a soft cap, 570 with
 * slopes (ALiBi), 1,500 for documents of 700 tokens; heads of 64, 1,024 tokens: 320, 226, 284, 314
 * (all counted as if nothing but the causal mask were skipped); heads of 192 and of 256 525 and 560
 * plain. Other sizes are the next ones' with columns of zeros. Tried, and no faster: a stage for
 * each copying warp, rescaling only where the largest score grew by 2^8, three warpgroups. */
#include <string.h>

#include "codegen/kernels/attention.h"
#include "runtime/base/knobs.h"

/* Between the marks: what tests replace to run without a GPU. */
static const char async_text[] = R"(
/* ASYNC */
/* All of this thread's copies but those of the LATER latest groups: visible to products. */
template <int LATER> static __device__ __forceinline__ void ${e}_landed() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LATER> static __device__ __forceinline__ void ${e}_finish() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}
static __device__ __forceinline__ void ${e}_barrier(unsigned at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
static __device__ __forceinline__ void ${e}_arrive(unsigned at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
static __device__ __forceinline__ bool ${e}_ended(unsigned at, unsigned parity) { /* at once */
    unsigned done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; "
                 "selp.b32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
    return done;
}
static __device__ __forceinline__ void ${e}_await(unsigned at, unsigned parity) {
    unsigned done;
    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.b32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
    while (!done);
}
/* A warpgroup's threads meet. Named by a constant: a kernel with any barrier takes all of them. */
static __device__ __forceinline__ void ${e}_meet(int group) {
    if (group == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
    if (group == 1) asm volatile("bar.sync 2, 128;" ::: "memory");
    if (group == 2) asm volatile("bar.sync 3, 128;" ::: "memory");
}
/* Warpgroups issue products in turns, so that one's softmax runs beside another's products. */
static __device__ __forceinline__ void ${e}_turn(int group) {
    if (group == 0) asm volatile("bar.sync 5, 256;" ::: "memory");
    if (group == 1) asm volatile("bar.sync 6, 256;" ::: "memory");
    if (group == 2) asm volatile("bar.sync 7, 256;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_pass(int group) {
    if (group == 0) asm volatile("bar.arrive 5, 256;" ::: "memory");
    if (group == 1) asm volatile("bar.arrive 6, 256;" ::: "memory");
    if (group == 2) asm volatile("bar.arrive 7, 256;" ::: "memory");
}
template <int THREADS> static __device__ __forceinline__ void ${e}_meet_all() {
    asm volatile("bar.sync 4, %0;" ::"n"(THREADS) : "memory");
}
/* What this thread wrote to shared memory: visible to products once threads met. */
static __device__ __forceinline__ void ${e}_show() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
template <int COUNT> static __device__ __forceinline__ void ${e}_fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void ${e}_more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
/* What products wrote, or read, may be touched from here on: not before, for the compiler too. */
template <int N> static __device__ __forceinline__ void ${e}_hold(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> static __device__ __forceinline__ void ${e}_hold(unsigned (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}
/* end of ASYNC */
)";

static const char common_text[] = R"(
/* Where a 16-byte piece of a row lies in a tile. */
static __device__ __forceinline__ unsigned ${e}_place(int tile_rows, int row, int piece) {
    return piece / 8 * tile_rows * 128 + row * 128 + (piece % 8 ^ row % 8) * 16;
}
/* An operand of products in shared memory; `block` bytes from one block of columns to the next. */
static __device__ __forceinline__ unsigned long long ${e}_operand(unsigned address,
                                                                  unsigned block) {
    return 1ull << 62 | 1024ull >> 4 << 32 | (unsigned long long)(block >> 4) << 16 |
           (address & 0x3ffffu) >> 4;
}
/* A warpgroup starts to copy `rows` rows, of which `there` exist, to a tile from row `first` on;
 * columns behind the last one are zeros. A thread's pieces lie below each other, in steps of whole
 * swizzles, so that it computes only the first one's places: the copying warpgroup is to take few
 * of the others' instructions. */
static __device__ __forceinline__ void ${e}_fill(unsigned tile, int tile_rows, int first, int rows,
                                                 const ml_bf16 *from, long long stride,
                                                 int there) {
    const int pieces = ${dim} % 128 ? 8 : 16, step = 128 / pieces;
    int row = threadIdx.x % 128 / pieces, piece = threadIdx.x % pieces;
    const ml_bf16 *own = from + row * stride + piece * 8;
    tile += ${e}_place(tile_rows, first + row, piece);
#pragma unroll
    for (int c = 0; c < ${dim} / 8; c += pieces) {
        const bool exists = c * 8 + pieces * 8 <= ${head_dim} || c + piece < ${head_dim} / 8;
        const unsigned to = tile + c / 8 * tile_rows * 128;
        const ml_bf16 *piece_from = exists ? own + c * 8 : from;
        if (there >= rows) {
#pragma unroll
            for (int r = 0; r < rows; r += step)
                ${e}_copy(to + r * 128, piece_from + r * stride, exists ? 16 : 0);
        } else {
#pragma unroll 4
            for (int r = 0; r < rows; r += step) {
                bool valid = row + r < there && exists;
                ${e}_copy(to + r * 128, valid ? piece_from + r * stride : from, valid ? 16 : 0);
            }
        }
    }
}
/* s = 64 rows of the left tile by all of the right one, columns as depth. */
static __device__ __forceinline__ void ${e}_scores(float (&s)[${tile} / 2], unsigned left,
                                                   unsigned right) {
#pragma unroll
    for (int k = 0; k < ${depth} / 16; k++)
        ${e}_score(s, ${e}_operand(left + k / 4 * ${rows} * 128 + k % 4 * 32, 16),
                   ${e}_operand(right + k / 4 * ${tile} * 128 + k % 4 * 32, 16), k > 0);
}
/* sum += p by the right tile, its rows as depth. */
static __device__ __forceinline__ void ${e}_chain(float (&sum)[${dim} / 2],
                                                  const unsigned (&p)[${tile} / 4],
                                                  unsigned right) {
#pragma unroll
    for (int k = 0; k < ${tile} / 16; k++)
        ${e}_weigh(sum, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                   ${e}_operand(right + k * 2048, ${tile} * 128), 1);
}
static __device__ __forceinline__ void ${e}_round(unsigned (&p)[${tile} / 4],
                                                  const float (&s)[${tile} / 2]) {
#pragma unroll
    for (int i = 0; i < ${tile} / 4; i++) p[i] = ${e}_pack(s[2 * i], s[2 * i + 1]);
}
/* A warp's 16 rows of a sum through its rows of a tile, which nobody needs any more, to memory. */
static __device__ __forceinline__ void ${e}_spill(char *tile, int row,
                                                  const float (&sum)[${dim} / 2], float factor,
                                                  ml_bf16 *to, long long stride, int there) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < ${dim} / 8; u++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(unsigned *)(tile + ${e}_place(${rows}, row + r * 8 + lane / 4, u) + lane % 4 * 4) =
                ${e}_pack(sum[u * 4 + 2 * r] * factor, sum[u * 4 + 2 * r + 1] * factor);
    __syncwarp();
    for (int i = lane; i < 16 * (${head_dim} / 8); i += 32) {
        int r = i / (${head_dim} / 8), piece = i % (${head_dim} / 8);
        if (r < there)
            *(uint4 *)(to + r * stride + piece * 8) =
                *(const uint4 *)(tile + ${e}_place(${rows}, row + r, piece));
    }
}
/* The place in the ring of stages; a stage's barriers are 8 bytes: all full, then all empty. */
struct ${e}_ring {
    int stage;
    unsigned parity;
    __device__ __forceinline__ void next() {
        if (++stage == ${stages}) stage = 0, parity ^= 1;
    }
};
static __device__ __forceinline__ void ${e}_make_ring(unsigned barriers) {
    if (threadIdx.x == 0)
        for (int i = 0; i < ${stages}; i++) {
            ${e}_barrier(barriers + i * 8, 128); /* copying threads */
            ${e}_barrier(barriers + (${stages} + i) * 8, ${groups} * 128); /* the others */
        }
    __syncthreads();
}
/* This thread is done with a stage. One that tells it for its warp, behind __syncwarp, made the
 * gradient with heads of 64 slower by a tenth (H200), and is no synchronization to racecheck. */
static __device__ __forceinline__ void ${e}_release(unsigned barriers, int stage) {
    __syncwarp(); /* a warp's arrivals come together */
    ${e}_arrive(barriers + (${stages} + stage) * 8);
}
/* The copying warpgroup's side. A stage is told to be full once later ones are under way, and at
 * the latest before a wait: nobody waits for what is not told yet. */
struct ${e}_feed {
    unsigned barriers;
    int untold;
    ${e}_ring ahead, behind;
    template <int LATER> __device__ __forceinline__ void tell() {
        ${e}_landed<LATER>();
        for (; untold > LATER; untold--, behind.next()) ${e}_arrive(barriers + behind.stage * 8);
    }
    __device__ __forceinline__ int free_stage() {
        await(barriers + (${stages} + ahead.stage) * 8, ahead.parity ^ 1);
        return ahead.stage;
    }
    __device__ __forceinline__ void give() {
        ${e}_commit();
        ahead.next();
        if (++untold > 2) tell<2>();
    }
    /* Until a barrier that the others arrive at, which may need all stages for that. */
    __device__ __forceinline__ void await(unsigned barrier, unsigned parity) {
        if (${e}_ended(barrier, parity)) return;
        tell<0>();
        ${e}_await(barrier, parity);
    }
    __device__ __forceinline__ void flush() { tell<0>(); }
};
)";

/* A thread block serves several blocks of queries of a head, a long and a short one in turn where
 * the mask is causal, so that the copies for the next one are under way while one ends. Shared
 * memory: queries, of two blocks if there are more; stages of keys or values; barriers; lists of
 * tiles. Tiles come in the order in which they are needed: keys 0, keys 1, values 0, keys 2,
 * values 1, ..., the last values; the queries come with keys 0. */
static const char forward_text[] = R"(
struct ${e}_work { int query, first, blocks; };
/* The j-th block of queries of this thread block, and which tiles of keys it needs. Where it needs
 * none, one is taken that lies behind the last key: zeros. */
static __device__ __forceinline__ bool ${e}_find(const ${e}_arguments &a, int j, ${e}_work &work) {
    ${places}
    int i = blockIdx.x % ${chunks} + j / 2 * ${chunks}, block = ${q_blocks} - 1 - i;
    if (${works} > 1 && i > block) return false;
    if (j % 2) {
        if (i == block) return false;
        block = i;
    }
    int query = block * ${rows};
    int last_query = query + ${rows} - 1 < ${seq} ? query + ${rows} - 1 : ${seq} - 1;
    (void)last_query;
    int first = ${first_key}, end = ${end_key};
    first = first / ${tile} * ${tile};
    int blocks = end > first ? (end - first + ${tile} - 1) / ${tile} : 0;
    if (blocks == 0) first = (${kv_seq} + ${tile} - 1) / ${tile} * ${tile}, blocks = 1;
    work.query = query, work.first = first, work.blocks = blocks;
    return true;
}
/* The first key of the i-th tile: of those listed, if there is a list. */
static __device__ __forceinline__ int ${e}_key(int first, int i, const int *list) {
    return ${listed} ? (list[i] >> 8) * ${tile} : first + i * ${tile};
}
${make_list}
static __device__ __forceinline__ void ${e}_produce(const ${e}_arguments &a, int batch, int head,
                                                    unsigned queries_at, unsigned stages,
                                                    unsigned barriers, int *lists) {
    int kv_head = head / ${group};
    const ml_bf16 *q = (const ml_bf16 *)a.p[0] + ${q_batch} + head * ${q_head};
    const ml_bf16 *k = (const ml_bf16 *)a.p[1] + ${k_batch} + kv_head * ${k_head};
    const ml_bf16 *v = (const ml_bf16 *)a.p[2] + ${v_batch} + kv_head * ${v_head};
    ${e}_feed feed = {barriers};
    for (int j = 0, turn = 0; j < ${works}; j++) {
        ${e}_work work;
        if (!${e}_find(a, j, work)) continue;
        int buffer = turn % 2, *list = lists + buffer * ${list_size} + 1;
        if (turn > 1) feed.await(barriers + (2 * ${stages} + buffer) * 8, (turn / 2 & 1) ^ 1);
        turn++;
        if (${listed}) {
            if (threadIdx.x / 32 == ${groups} * 4) ${e}_make_list(a, batch, head, work, list);
            ${e}_meet_all<128>();
            work.blocks = list[-1];
        }
        ${e}_fill(queries_at + buffer * ${row_bytes}, ${rows}, 0, ${rows},
                  q + work.query * ${q_seq}, ${q_seq}, ${seq} - work.query);
        for (int t = 0; t < 2 * work.blocks; t++) {
            bool last = t == 2 * work.blocks - 1, keys = !last && (t == 0 || t % 2);
            int i = last ? work.blocks - 1 : keys ? (t + 1) / 2 : t / 2 - 1;
            int key = ${e}_key(work.first, i, list);
            unsigned to = stages + feed.free_stage() * ${tile_bytes};
            if (keys)
                ${e}_fill(to, ${tile}, 0, ${tile}, k + key * ${k_seq}, ${k_seq}, ${kv_seq} - key);
            else
                ${e}_fill(to, ${tile}, 0, ${tile}, v + key * ${v_seq}, ${v_seq}, ${kv_seq} - key);
            feed.give();
        }
    }
    feed.flush();
}
/* One tile: scores to probabilities, statistics of the rows, and the factor for what was summed.
 * `query` is the warpgroup's first one. */
static __device__ __forceinline__ void ${e}_softmax(const ${e}_arguments &a, int batch, int head,
                                                    int query, int key, bool part,
                                                    float (&s)[${tile} / 2], float (&largest)[2],
                                                    float (&total)[2], float (&shrink)[2]) {
    int lane = threadIdx.x % 32, last_query = query + 63, keys = ${tile};
    (void)last_query, (void)keys;
    ${places}
    bool masked = key + ${tile} > ${kv_seq} || (${crosses});
    query += threadIdx.x / 32 % 4 * 16 + lane / 4;
    key += lane % 4 * 2;
    ${captures}
    if (${scored}) {
        ${lines}
#pragma unroll
        for (int row = 0; row < 2; row++) {
            int kv = key, qi = query + row * 8;
            (void)kv, (void)qi;
            ${clamp_query}
            ${line_rows}
        }
#pragma unroll
        for (int i = 0; i < ${tile} / 2; i++) {
            int kv = key + i / 4 * 8 + i % 2, row = i / 2 % 2, qi = query + row * 8;
            float step = i / 4 * 8 + i % 2;
            (void)step;
            ${clamp_query}
            ${clamp_key}
            (void)kv, (void)qi;
            float x = s[i] * ${scale};
            ${score}
            s[i] = x;
        }
    }
    if (masked) {
#pragma unroll
        for (int i = 0; i < ${tile} / 2; i++) {
            int kv = key + i / 4 * 8 + i % 2, qi = query + i / 2 % 2 * 8;
            if (!(kv < ${kv_seq} && (${visible}))) s[i] = ${lowest};
        }
    }
    ${hide}
    /* Several chains of each row, or each step would wait for the one before. */
    float most[2][4], base[2], sum[2][2] = {};
#pragma unroll
    for (int n = 0; n < ${tile} / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = fmaxf(s[n * 4 + 2 * r], s[n * 4 + 2 * r + 1]);
            most[r][n % 4] = n < 4 ? x : fmaxf(most[r][n % 4], x);
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float next = fmaxf(fmaxf(most[r][0], most[r][1]), fmaxf(most[r][2], most[r][3]));
        next = fmaxf(largest[r], next);
        next = fmaxf(next, __shfl_xor_sync(~0u, next, 1));
        next = fmaxf(next, __shfl_xor_sync(~0u, next, 2));
        base[r] = next * ${unit} < ${no_key} ? 0.0f : next * ${unit};
        shrink[r] = ${e}_exp2(largest[r] * ${unit} - base[r]);
        largest[r] = next;
    }
#pragma unroll
    for (int i = 0; i < ${tile} / 2; i++) {
        int r = i / 2 % 2;
        s[i] = ${e}_exp2(s[i] * ${unit} - base[r]);
        sum[r][i % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) total[r] = total[r] * shrink[r] + (sum[r][0] + sum[r][1]);
}
/* What a warpgroup sums over all tiles. */
static __device__ __forceinline__ void ${e}_consume(const ${e}_arguments &a, int batch, int head,
                                                    int query, int first, int blocks,
                                                    const int *list, unsigned queries_at,
                                                    unsigned stages, unsigned barriers,
                                                    ${e}_ring &ring, float (&out)[${dim} / 2],
                                                    float (&largest)[2], float (&total)[2]) {
    float s[${tile} / 2], shrink[2];
    unsigned p[${tile} / 4];
    ${e}_await(barriers + ring.stage * 8, ring.parity);
    if (${listed}) blocks = list[-1];
    ${e}_begin();
    ${e}_scores(s, queries_at, stages + ring.stage * ${tile_bytes});
    ${e}_end();
    ${e}_finish<0>();
    ${e}_hold(s);
    ${e}_release(barriers, ring.stage);
    ring.next();
    ${e}_softmax(a, batch, head, query, ${e}_key(first, 0, list), ${e}_part(list, 0), s, largest,
                 total, shrink);
    ${e}_round(p, s);
    for (int block = 1; block < blocks; block++) {
        int keys_stage = ring.stage;
        if (${turns}) ${e}_turn(threadIdx.x / 128);
        ${e}_await(barriers + ring.stage * 8, ring.parity);
        ring.next();
        ${e}_begin();
        ${e}_scores(s, queries_at, stages + keys_stage * ${tile_bytes});
        ${e}_end();
        int values_stage = ring.stage;
        ${e}_await(barriers + ring.stage * 8, ring.parity);
        ring.next();
        ${e}_begin();
        ${e}_chain(out, p, stages + values_stage * ${tile_bytes});
        ${e}_end();
        if (${turns}) ${e}_pass((threadIdx.x / 128 + 1) % ${groups});
        ${e}_finish<1>();
        ${e}_hold(s);
        ${e}_release(barriers, keys_stage);
        ${e}_softmax(a, batch, head, query, ${e}_key(first, block, list), ${e}_part(list, block), s,
                     largest, total, shrink);
        /* ptxas waits before the exponentials; made to wait behind them, it is slower by 3 to 5%
         * (H200): the other warpgroup's products fill that time. */
        ${e}_hold(s);
        ${e}_finish<0>();
        ${e}_hold(out);
        ${e}_hold(p);
        ${e}_release(barriers, values_stage);
#pragma unroll
        for (int i = 0; i < ${dim} / 2; i++) out[i] *= shrink[i / 2 % 2];
        ${e}_round(p, s);
    }
    ${e}_await(barriers + ring.stage * 8, ring.parity);
    ${e}_begin();
    ${e}_chain(out, p, stages + ring.stage * ${tile_bytes});
    ${e}_end();
    ${e}_finish<0>();
    ${e}_hold(out);
    ${e}_release(barriers, ring.stage);
    ring.next();
}
/* What was summed, to memory, through the warpgroup's queries, which nobody reads any more. */
static __device__ __forceinline__ void ${e}_settle(const ${e}_arguments &a, int batch, int head,
                                                   int query, char *query_tile,
                                                   float (&out)[${dim} / 2],
                                                   const float (&largest)[2],
                                                   const float (&total)[2]) {
    int row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    float *lse = (float *)a.p[${lse_at}] + ${lse_batch} + head * ${lse_head};
    ${e}_meet(threadIdx.x / 128);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = total[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        float inverse = sum == 0 ? 0 : 1 / sum;
        int qi = query + row + r * 8 + lane / 4;
        if (lane % 4 == 0 && qi < ${seq})
            lse[qi * ${lse_seq}] = sum == 0 ? -ML_INF : largest[r] * ${natural} + logf(sum);
#pragma unroll
        for (int n = 0; n < ${dim} / 8; n++)
            out[n * 4 + 2 * r] *= inverse, out[n * 4 + 2 * r + 1] *= inverse;
    }
    query += row;
    ${e}_spill(query_tile, row, out, 1.0f, (ml_bf16 *)a.p[${o_at}] + ${o_batch} + head * ${o_head} +
               query * ${o_seq}, ${o_seq}, ${seq} - query);
}
extern "C" __global__ void __launch_bounds__(${threads}, ${resident}) ${e}(${e}_arguments a) {
    extern __shared__ uint4 ${e}_shared[];
    unsigned before = (1024 - ${e}_address(${e}_shared) % 1024) % 1024;
    char *query_tiles = (char *)${e}_shared + before;
    unsigned queries_at = ${e}_address(query_tiles);
    unsigned stages = queries_at + ${buffers} * ${row_bytes};
    unsigned barriers = stages + ${stages} * ${tile_bytes};
    int *lists = (int *)(query_tiles + (barriers - queries_at) + 16 * ${stages} + 16);
    int head = blockIdx.x / ${chunks} % ${heads}, batch = blockIdx.x / (${chunks} * ${heads});
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) /* the queries' are empty again */
            ${e}_barrier(barriers + (2 * ${stages} + i) * 8, ${groups} * 128);
    ${e}_make_ring(barriers);
    if (threadIdx.x >= ${groups} * 128) {
        ${e}_fewer_registers<${fewer}>();
        ${e}_produce(a, batch, head, queries_at, stages, barriers, lists);
    } else {
        ${e}_more_registers<${more}>();
        int own = threadIdx.x / 128 * 64; /* rows of the warpgroup */
        ${e}_ring ring = {};
        if (${turns} && threadIdx.x / 128 == ${groups} - 1) ${e}_pass(0);
        for (int j = 0, turn = 0; j < ${works}; j++) {
            ${e}_work work;
            if (!${e}_find(a, j, work)) continue;
            int buffer = turn++ % 2;
            float out[${dim} / 2] = {}, largest[2] = {${lowest}, ${lowest}}, total[2] = {};
            ${e}_consume(a, batch, head, work.query + own, work.first, work.blocks,
                         lists + buffer * ${list_size} + 1,
                         queries_at + buffer * ${row_bytes} + own * 128, stages, barriers, ring,
                         out, largest, total);
            ${e}_settle(a, batch, head, work.query, query_tiles + buffer * ${row_bytes}, out,
                        largest, total);
            ${e}_release(barriers, ${stages} + buffer);
        }
    }
}
)";

/* What may be tuned on the card: MLUA_WGMMA=N takes variant N of the forward kernel (from 1). */
static const attention_tile forward_tiles[4][ATTENTION_VARIANTS] = {
    /* heads of 64 */
    {{.groups = 2, .tile = 128, .stages = 6, .resident = 1, .works = 8, .turns = true},
     {.groups = 1, .tile = 128, .stages = 4, .resident = 2},
     {.groups = 1, .tile = 64, .stages = 4, .resident = 3}},
    /* heads of 128 */
    {{.groups = 2, .tile = 128, .stages = 4, .resident = 1, .works = 4, .turns = true},
     {.groups = 2, .tile = 64, .stages = 6, .resident = 1},
     {.groups = 3, .tile = 64, .stages = 5, .resident = 1, .turns = true}},
    /* heads of 192 */
    {{.groups = 2, .tile = 128, .stages = 3, .resident = 1, .turns = true},
     {.groups = 2, .tile = 64, .stages = 6, .resident = 1, .turns = true},
     {.groups = 2, .tile = 64, .stages = 6, .resident = 1}},
    /* heads of 256 */
    {{.groups = 2, .tile = 64, .stages = 4, .resident = 1, .turns = true},
     {.groups = 2, .tile = 64, .stages = 4, .resident = 1},
     {.groups = 2, .tile = 64, .stages = 4, .resident = 1}},
};

enum { MOST_SHARED = 227 * 1024 }; /* bytes of a multiprocessor */

/* A product of 64 x columns x 16: its left operand from shared memory (registers: from 4 of them),
 * with depth innermost unless it is flat. The mark tells tests what to put in its place. */
static void add_product(ml_text *out, const char *name, int columns, bool registers, bool left_flat,
                        bool right_flat) {
    int sums = columns / 2, after = sums + (registers ? 5 : 2);
    ml_text_add(out, "/* PRODUCT %s %d %d %d %d */\n", name, columns, registers, left_flat,
                right_flat);
    ml_text_add(out, "static __device__ __forceinline__ void ${e}_%s(float (&c)[%d], ", name, sums);
    ml_text_add(out, registers ? "unsigned a0, unsigned a1, unsigned a2, unsigned a3, "
                               : "unsigned long long left, ");
    ml_text_add(out,
                "unsigned long long right, int add) {\n"
                "    asm volatile(\"{ .reg .pred p; setp.ne.b32 p, %%%d, 0; \"\n"
                "                 \"wgmma.mma_async.sync.aligned.m64n%dk16.f32.bf16.bf16 {",
                after, columns);
    for (int i = 0; i < sums; i++) ml_text_add(out, "%s%%%d", i ? ", " : "", i);
    if (registers)
        ml_text_add(out, "}, {%%%d, %%%d, %%%d, %%%d}, %%%d, p, 1, 1, %d; }\"\n", sums, sums + 1,
                    sums + 2, sums + 3, sums + 4, right_flat);
    else
        ml_text_add(out, "}, %%%d, %%%d, p, 1, 1, %d, %d; }\"\n", sums, sums + 1, left_flat,
                    right_flat);
    ml_text_add(out, "                 : ");
    for (int i = 0; i < sums; i++) ml_text_add(out, "%s\"+f\"(c[%d])", i ? ", " : "", i);
    ml_text_add(out, "\n                 : %s\"l\"(right), \"r\"(add));\n}\n/* end of PRODUCT */\n",
                registers ? "\"r\"(a0), \"r\"(a1), \"r\"(a2), \"r\"(a3), " : "\"l\"(left), ");
}

ml_kernel *attention_wgmma_kernel(attention_printer *p, const attention_tile *tile,
                                  const char *const *bodies, int count, const char *label) {
    ml_template *t = &p->text;
    int dim = (int)attention_width(p);
    /* A block begins with as many registers a thread as fit; the copying warpgroup leaves most of
     * its own to the others. More than there are would be waited for for ever. */
    int threads = (tile->groups + 1) * 128, each = 65536 / (threads * tile->resident) / 8 * 8;
    int fewer = tile->fewer ? tile->fewer : tile->groups * tile->resident == 2 ? 40 : 32;
    int more = (each * (tile->groups + 1) - fewer) / tile->groups / 8 * 8;
    ml_text products = {.arena = t->arena};
    const struct {
        const char *name;
        int value;
    } sizes[] = {
        {"groups", tile->groups}, {"rows", tile->groups * 64},
        {"tile", tile->tile},     {"tile_bytes", tile->tile * dim * 2},
        {"stages", tile->stages}, {"resident", tile->resident},
        {"threads", threads},     {"row_bytes", tile->groups * 64 * dim * 2},
        {"fewer", fewer},         {"more", more},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        template_set(t, sizes[i].name, "%d", sizes[i].value);
    add_product(&products, "score", tile->tile, false, false, false);
    add_product(&products, "weigh", dim, true, false, true);
    if (tile->gradient) add_product(&products, "gather", dim / 2, false, true, true);
    const char *const before[] = {template_mma_ptx, async_text, products.text, common_text};
    enum { BEFORE = sizeof before / sizeof *before };
    const char **all = ML_NEW_ARRAY(t->arena, const char *, BEFORE + count);
    memcpy(all, before, sizeof before);
    memcpy(all + BEFORE, bodies, sizeof *bodies * (size_t)count);
    return template_kernel_of(t, all, BEFORE + count, label,
                              p->step->read_count + p->step->write_count);
}

/* Blocks of queries of a thread block: fewer than the tile's where multiprocessors would be idle.
 */
static int works_of_block(const attention_printer *p, const attention_tile *tile, int64_t blocks) {
    int64_t all = blocks * p->a->heads * p->batches, works = tile->works > 0 ? tile->works : 1;
    int64_t at_once = (int64_t)p->schedule->target->multiprocessors * tile->resident;
    while (works > 1 && (works > blocks || all / works < 4 * at_once)) works /= 2;
    return (int)works;
}

static void print_forward(attention_printer *p, int variant) {
    const ml_attention_step *a = p->a;
    const attention_tile *tile = &forward_tiles[attention_width(p) / 64 - 1][variant];
    template_set(&p->text, "turns", "%d", tile->turns);
    int64_t rows = tile->groups * 64, blocks = (a->seq + rows - 1) / rows;
    int works = works_of_block(p, tile, blocks), buffers = works > 1 ? 2 : 1;
    int64_t pairs = (works + 1) / 2;
    int64_t chunks = works > 1 ? ((blocks + 1) / 2 + pairs - 1) / pairs : blocks;
    template_set(&p->text, "works", "%d", works);
    template_set(&p->text, "buffers", "%d", buffers);
    template_set(&p->text, "chunks", "%lld", (long long)chunks);
    template_set(&p->text, "q_blocks", "%lld", (long long)blocks);
    int64_t tiles = (a->kv_seq + tile->tile - 1) / tile->tile;
    int64_t list_bytes = 4 * buffers * (tiles + 1);
    int64_t bytes = 1024 + (buffers * rows + tile->stages * tile->tile) * attention_width(p) * 2 +
                    16 * tile->stages + 16;
    bool listed = p->masks > 0 && bytes + list_bytes <= MOST_SHARED / tile->resident;
    template_set(&p->text, "list_size", "%lld", (long long)tiles + 1);
    template_set(&p->text, "listed", "%d", listed);
    template_set_text(&p->text, "make_list", listed ? attention_list_text : attention_no_list_text);
    template_set_text(&p->text, "hide", listed ? attention_hide_text : "(void)part;");
    template_set_text(&p->text, "lines", "");
    template_set_text(&p->text, "line_rows", "");
    if (a->args.score && listed == (p->masks > 0)) attention_open_score(p);
    if (listed) bytes += list_bytes;
    const char *const bodies[] = {forward_text};
    ml_kernel *kernel = attention_wgmma_kernel(p, tile, bodies, 1, "attention");
    template_launch(kernel, chunks * a->heads * p->batches, 1, 1,
                    (uint32_t)(tile->groups + 1) * 128, bytes);
    p->step->kernel = listed ? attention_states_kernel(p) : kernel;
    if (listed) p->step->kernel->next = kernel;
}

void attention_wgmma_reserve(attention_printer *p, ml_schedule *s) {
    if (p->masks > 0 && attention_wgmma_serves(p)) attention_reserve_states(p, s);
}

/* Columns of tiles: heads' sizes in whole blocks, as zeros where there are no more. */
int64_t attention_width(const attention_printer *p) {
    return attention_round_up(p->a->head_dim, 64);
}

bool attention_wgmma_serves(const attention_printer *p) {
    enum { HOPPER = 90 };
    const ml_attention_step *a = p->a;
    return p->schedule->target->arch == HOPPER && ml_knobs()->wgmma &&
           a->head_dim <= (a->backward ? 128 : 256) && a->value_dim == a->head_dim &&
           attention_aligned(p);
}

bool template_attention_wgmma(attention_printer *p) {
    if (!attention_wgmma_serves(p)) return false;
    int variant = ml_knobs()->wgmma - 1;
    if (variant >= ATTENTION_VARIANTS) variant = 0;
    attention_set_units(p);
    template_set(&p->text, "dim", "%d", (int)attention_width(p));
    template_set(&p->text, "part_state", "%d", ATTENTION_PARTLY_SHOWN);
    template_set(&p->text, "whole_state", "%d", ATTENTION_SHOWN);
    template_set(&p->text, "depth", "%d", (int)attention_round_up(p->a->head_dim, 16));
    if (p->a->backward)
        attention_wgmma_gradient(p);
    else
        print_forward(p, variant);
    return true;
}
