/* Products by groups of rows on Hopper's copy engine (TMA) and warpgroup products (wgmma), for
 * template_ragged.c.
 *
 * Blocks stay for the whole kernel and come in pairs (clusters), a pair an item at a time: two
 * tiles of 128 x 256 that share their columns, or, where a group's tiles of rows are odd in number,
 * two of the last rows that share those. What is shared each block loads half of, for both. One
 * warp loads, as far ahead as there are stages; two warpgroups multiply, 64 rows each, and write
 * results while the next item is loaded. Items go by group, then through bands of rows whose
 * columns stay in the cache.
 *
 * A stage is six boxes of 64 x 64, two of the left operand and four of the right one, in 128-byte
 * lines that are swizzled as template_wgmma.c says. Lines along the rows may come from several
 * elements of the batch: what comes from one is cut into boxes of 32, 16, ... 1 lines. Lines that a
 * sum must not see are loaded from outside of the tensor, as zeros.
 *
 * Where a RAGGED_OUTER gives sums of squares too, each warp adds up those of its 16 x 256 results
 * (others are 0) before it writes them. */
#include "codegen/kernels/template.h"

enum { HEIGHTS = 7 }; /* of boxes: 64, 32, ... 1 lines */
enum { ROWS = 128, COLUMNS = 256, DEEP = 64, STAGES = 4, THREADS = 384, CLUSTER = 2 };
enum { BOX_BYTES = DEEP * 128, STAGE_BYTES = (ROWS + COLUMNS) / DEEP * BOX_BYTES };

/* Between the marks: what tests replace to run without a GPU. */
static const char ptx_text[] = R"(
/* TMA */
${quick}struct alignas(64) ${e}_map { char bytes[128]; };
struct ${e}_arguments { ${e}_map map[${maps}]; char *p[${pointers}]; };
static __device__ __forceinline__ unsigned ${e}_address(const void *shared) {
    return (unsigned)__cvta_generic_to_shared(shared);
}
static __device__ __forceinline__ unsigned ${e}_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
static __device__ __forceinline__ void ${e}_meet() { /* all threads of the pair */
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_barrier(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
static __device__ __forceinline__ void ${e}_barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_wait(unsigned barrier, unsigned parity) {
    asm volatile("{ .reg .pred done; again: "
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
                 "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}
static __device__ __forceinline__ void ${e}_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
/* Of what products have read: with `.release.cluster` every step would wait for a fence. */
static __device__ __forceinline__ void ${e}_release(unsigned barrier, unsigned rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
                 "r"(rank) : "memory");
}
/* A box to shared memory of this block, or to the same place of both. */
static __device__ __forceinline__ void ${e}_load(const ${e}_map *map, unsigned to, int x, int y,
                                                 int z, unsigned barrier, bool both) {
    if (both)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map),
                     "r"(x), "r"(y), "r"(z), "r"(barrier), "h"((unsigned short)3) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z),
                     "r"(barrier) : "memory");
}
)";
/* Between them template_wgmma_products. */
static const char ptx_end_text[] = R"(
static __device__ __forceinline__ unsigned ${e}_pack(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
/* Registers go from the warps that load to those that multiply. */
static __device__ __forceinline__ void ${e}_give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
}
static __device__ __forceinline__ void ${e}_take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
}
/* end of TMA */
)";

/* What every thread looks up: for each group, where its rows of each element of the batch begin,
 * how many rows lie in elements before, how many there are, and how many items come before. */
static const char tables_text[] = R"(
struct ${e}_tables {
    unsigned long long full[${stages}], empty[${stages}];
    int start[${groups} * ${batches}], before[${groups} * ${batches}];
    int total[${groups}], item[${groups} + 1];
};
static __device__ __forceinline__ int ${e}_tiles(int rows) {
    return ${outer} ? (${k} + 127) / 128 : (rows + 127) / 128;
}
static __device__ __forceinline__ int ${e}_items(int rows) {
    int tiles = ${e}_tiles(rows);
    return tiles / 2 * ${n_tiles} + tiles % 2 * ((${n_tiles} + 1) / 2);
}
static __device__ __forceinline__ void ${e}_fill(const ${e}_arguments &a, ${e}_tables &t) {
    for (int e = threadIdx.x; e < ${groups}; e += ${threads}) {
        int total = 0;
#pragma unroll 4
        for (int b = 0; b < ${batches}; b++) {
            int start = ((const int *)a.p[2])[b * ${start_batch} + e * ${start_stride}];
            int end = ((const int *)a.p[3])[b * ${end_batch} + e * ${end_stride}];
            start = start < 0 ? 0 : start;
            end = end > ${rows} ? (int)${rows} : end;
            t.start[e * ${batches} + b] = start, t.before[e * ${batches} + b] = total;
            total += end > start ? end - start : 0;
        }
        t.total[e] = total;
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < ${stages}; i++) {
            ${e}_barrier(${e}_address(&t.full[i]), 1);
            ${e}_barrier(${e}_address(&t.empty[i]), 16); /* all warps of both that multiply */
        }
        ${e}_barriers_made();
    }
    __syncthreads();
    int lane = threadIdx.x, done = 0;
    for (int base = 0; lane < 32 && base < ${groups}; base += 32) {
        int own = base + lane < ${groups} ? ${e}_items(t.total[base + lane]) : 0, sum = own;
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, sum, d);
            sum += lane >= d ? other : 0;
        }
        if (base + lane < ${groups}) t.item[base + lane] = done + sum - own;
        done += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) t.item[${groups}] = done;
    ${e}_meet();
}
/* A block's tile of an item; `same_rows`: the other block's differs in its columns. */
struct ${e}_tile { int group, row, column; bool same_rows; };
static __device__ __forceinline__ void ${e}_seek(const ${e}_tables &t, int item, int rank,
                                                 ${e}_tile &tile) {
    while (item >= t.item[tile.group + 1]) tile.group++; /* items come in ascending order */
    int tiles = ${e}_tiles(t.total[tile.group]), pairs = tiles / 2;
    int at = item - t.item[tile.group], band = at / (${band} * ${n_tiles}) * ${band};
    tile.same_rows = at >= pairs * ${n_tiles};
    if (tile.same_rows) {
        tile.row = tiles - 1, tile.column = (at - pairs * ${n_tiles}) * 2 + rank;
    } else {
        int height = pairs - band < ${band} ? pairs - band : ${band};
        at -= band * ${n_tiles};
        tile.row = (band + at % height) * 2 + rank, tile.column = at / height;
    }
    tile.row *= 128, tile.column *= 256;
}
/* Where a row of a group lies, `at` in which element of the batch, and how many come there from it
 * on; search begins in element `batch`. */
struct ${e}_place { int batch, at, left; };
static __device__ __forceinline__ ${e}_place ${e}_locate(const ${e}_tables &t, int group, int batch,
                                                         int row) {
    const int *before = t.before + group * ${batches};
    while (batch + 1 < ${batches} && row >= before[batch + 1]) batch++;
    int end = batch + 1 < ${batches} ? before[batch + 1] : t.total[group];
    return {batch, t.start[group * ${batches} + batch] + row - before[batch], end - row};
}
)";

static const char choose_text[] = R"(
/* A box of a stage that this block loads: where it goes, and where it begins, not along the sum. */
struct ${e}_box { bool left, both; unsigned to; int at; };
static __device__ __forceinline__ ${e}_box ${e}_choose(${e}_tile tile, int rank, int box) {
    ${e}_box b;
    int lefts = tile.same_rows ? 1 : 2;
    b.left = box < lefts, b.both = b.left == tile.same_rows;
    box = b.left ? box + (b.both ? rank : 0) : box - lefts + (b.both ? rank * 2 : 0);
    b.to = (b.left ? 0 : 16384) + box * 8192;
    b.at = (b.left ? tile.row : tile.column) + box * 64;
    if (${is_gated} && !b.left)
        b.at = tile.column / 2 + box % 2 * 64 + (box < 2 ? 0 : ${n} / 2); /* of both halves */
    return b;
}
/* Of the boxes that a run of rows is cut into, the one that has 64 >> i lines: after how many. */
static __device__ __forceinline__ int ${e}_cut(int run, int i) { return run & ~((128 >> i) - 1); }
)";

/* One warp loads the matrix, another the rows: the same boxes at each step but for the depth. */
static const char dot_load_text[] = R"(
struct ${e}_piece { unsigned to; int at, batch, kind; }; /* kind: which map */
static __device__ __forceinline__ void ${e}_load_matrix(const ${e}_arguments &a, ${e}_tables &t,
                                                        unsigned stages, int rank) {
    int lane = threadIdx.x % 32, stage = 0;
    unsigned parity = 1;
    ${e}_tile tile = {};
    for (int item = blockIdx.x / 2; item < t.item[${groups}]; item += gridDim.x / 2) {
        ${e}_seek(t, item, rank, tile);
        ${e}_box own = ${e}_choose(tile, rank, (tile.same_rows ? 1 : 2) + lane);
        for (int d = 0; d < ${k}; d += 64) {
            unsigned to = stages + stage * ${stage_bytes}, full = ${e}_address(&t.full[stage]);
            ${e}_wait(${e}_address(&t.empty[stage]), parity);
            __syncwarp(); /* or a late lane would find it empty once more */
            if (lane == 0) ${e}_expect(full, ${stage_bytes});
            if (lane < (tile.same_rows ? 4 : 2))
                ${e}_load(a.map + 7, to + own.to, ${right_deep} ? d : own.at,
                          ${right_deep} ? own.at : d, tile.group, full, !tile.same_rows);
            __syncwarp();
            if (++stage == ${stages}) stage = 0, parity ^= 1;
        }
    }
}
/* 64 lines of rows as pieces, each of rows that follow one another; how many. What follows a
 * group's rows does no harm. */
static __device__ __forceinline__ int ${e}_list(const ${e}_tables &t, int group, int row,
                                                unsigned to, ${e}_piece *list) {
    int count = 0;
    ${e}_place p = {};
    for (int line = 0, run; line < 64; line += run) {
        p = ${e}_locate(t, group, p.batch, row + line);
        run = 64 - line;
        if (p.left > 0 && p.left < run && row + line + p.left < t.total[group]) run = p.left;
        for (int i = 0; i < 7; i++) {
            int skip = ${e}_cut(run, i);
            if (run & 64 >> i) list[count++] = {to + (line + skip) * 128, p.at + skip, p.batch, i};
        }
    }
    return count;
}
static __device__ __forceinline__ void ${e}_load_rows(const ${e}_arguments &a, ${e}_tables &t,
                                                      unsigned stages, int rank) {
    __shared__ ${e}_piece list[128];
    int lane = threadIdx.x % 32, stage = 0;
    unsigned parity = 1;
    ${e}_tile tile = {};
    for (int item = blockIdx.x / 2; item < t.item[${groups}]; item += gridDim.x / 2) {
        ${e}_seek(t, item, rank, tile);
        ${e}_box own = ${e}_choose(tile, rank, lane);
        int pieces = own.left ? ${e}_list(t, tile.group, own.at, own.to, list + lane * 64) : 0;
        __syncwarp();
        int first = __shfl_sync(~0u, pieces, 0), all = first + __shfl_sync(~0u, pieces, 1);
        ${e}_piece mine = {};
        if (lane < all) mine = list[lane < first ? lane : 64 + lane - first];
        for (int d = 0; d < ${k}; d += 64) {
            unsigned to = stages + stage * ${stage_bytes}, full = ${e}_address(&t.full[stage]);
            ${e}_wait(${e}_address(&t.empty[stage]), parity);
            __syncwarp(); /* or a late lane would find it empty once more */
            if (lane < all)
                ${e}_load(a.map + mine.kind, to + mine.to, d, mine.at, mine.batch, full,
                          tile.same_rows);
            for (int i = lane + 32; i < all; i += 32) { /* where elements have few rows each */
                ${e}_piece p = list[i < first ? i : 64 + i - first];
                ${e}_load(a.map + p.kind, to + p.to, d, p.at, p.batch, full, tile.same_rows);
            }
            __syncwarp();
            if (++stage == ${stages}) stage = 0, parity ^= 1;
        }
    }
}
static __device__ __forceinline__ void ${e}_load_all(const ${e}_arguments &a, ${e}_tables &t,
                                                     unsigned stages, int rank) {
    int warp = threadIdx.x / 32;
    if (warp == 0) ${e}_load_matrix(a, t, stages, rank);
    else if (warp == 1) ${e}_load_rows(a, t, stages, rank);
    else ${e}_clear(a, t);
}
)";

/* The same rows for all boxes of a step; a box a warp. */
static const char outer_load_text[] = R"(
/* Of a box that has rows of several elements of the batch, or ends: the lanes' pieces. */
static __device__ __forceinline__ void ${e}_load_cut(const ${e}_map *map, const ${e}_tables &t,
                                                     int group, int batch, int row, unsigned to,
                                                     int column, unsigned barrier, bool both) {
    int lane = threadIdx.x % 32;
    for (int line = 0, run; line < 64; line += run) {
        ${e}_place p = ${e}_locate(t, group, batch, row + line);
        batch = p.batch, run = 64 - line;
        if (p.left > 0 && p.left < run) run = p.left;
        int skip = ${e}_cut(run, lane);
        if (lane < 7 && run & 64 >> lane)
            ${e}_load(map + lane, to + (line + skip) * 128, column,
                      p.left > 0 ? p.at + skip : (int)${rows}, batch, barrier, both);
        __syncwarp();
    }
}
static __device__ __forceinline__ void ${e}_load_all(const ${e}_arguments &a, ${e}_tables &t,
                                                     unsigned stages, int rank) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stage = 0;
    unsigned parity = 1;
    ${e}_tile tile = {};
    for (int item = blockIdx.x / 2; item < t.item[${groups}]; item += gridDim.x / 2) {
        ${e}_seek(t, item, rank, tile);
        int total = t.total[tile.group], boxes = tile.same_rows ? 5 : 4;
        ${e}_place p = {};
        for (int row = 0; row < total; row += 64) {
            unsigned to = stages + stage * ${stage_bytes}, full = ${e}_address(&t.full[stage]);
            ${e}_wait(${e}_address(&t.empty[stage]), parity);
            __syncwarp(); /* or a late lane would find it empty once more */
            if (threadIdx.x == 0) ${e}_expect(full, ${stage_bytes});
            if (p.left < 64) p = ${e}_locate(t, tile.group, p.batch, row);
            for (int box = warp; box < boxes; box += 4) {
                ${e}_box b = ${e}_choose(tile, rank, box);
                const ${e}_map *map = a.map + (b.left ? 0 : 7);
                if (p.left < 64)
                    ${e}_load_cut(map, t, tile.group, p.batch, row, to + b.to, b.at, full, b.both);
                else if (lane == 0)
                    ${e}_load(map, to + b.to, b.at, p.at, p.batch, full, b.both);
            }
            p.at += 64, p.left -= 64;
            __syncwarp();
            if (++stage == ${stages}) stage = 0, parity ^= 1;
        }
    }
}
)";

/* Zeros in rows of no group, 64 rows at a time, by warps that have nothing else to do. */
static const char clear_text[] = R"(
/* How many of these rows of an element of the batch are of a group. */
static __device__ __forceinline__ int ${e}_covered(const ${e}_tables &t, int batch, int from,
                                                   int to) {
    int sum = 0;
    for (int e = threadIdx.x % 32; e < ${groups}; e += 32) {
        int i = e * ${batches} + batch, low = t.start[i], high = low - t.before[i];
        high += batch + 1 < ${batches} ? t.before[i + 1] : t.total[e];
        low = low > from ? low : from, high = high < to ? high : to;
        sum += high > low ? high - low : 0;
    }
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
}
static __device__ __noinline__ void ${e}_clear(const ${e}_arguments &a, const ${e}_tables &t) {
    int windows = (int)((${rows} + 63) / 64), lane = threadIdx.x % 32;
    for (int w = blockIdx.x * 2 + threadIdx.x / 32 - 2; w < windows * ${batches};
         w += gridDim.x * 2) {
        int batch = w / windows, from = w % windows * 64;
        int to = from + 64 < ${rows} ? from + 64 : (int)${rows};
        if (${e}_covered(t, batch, from, to) == to - from) continue;
        for (int row = from; row < to; row++) {
            if (${e}_covered(t, batch, row, row + 1)) continue;
            ${result} *out = (${result} *)a.p[${c_at}] + batch * ${c_batch} + row * ${c_row};
            for (int c = lane * ${wide}; c < ${n}; c += 32 * ${wide})
                *(uint4 *)(out + c) = make_uint4(0, 0, 0, 0);
            ${clear_gated}
        }
    }
}
)";

/* Quads of lanes exchange what they hold, so that each writes 16 bytes of a row. */
static const char narrow_text[] = R"(
static __device__ __forceinline__ void ${e}_exchange(unsigned (&v)[4], int lane) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        unsigned other = __shfl_xor_sync(~0u, lane & 1 ? v[j] : v[j + 1], 1);
        v[j] = lane & 1 ? other : v[j], v[j + 1] = lane & 1 ? v[j + 1] : other;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        unsigned other = __shfl_xor_sync(~0u, lane & 2 ? v[j] : v[j + 2], 2);
        v[j] = lane & 2 ? other : v[j], v[j + 2] = lane & 2 ? v[j + 2] : other;
    }
}
static __device__ __forceinline__ void ${e}_write(${result} *out, const float (&sum)[128], int i,
                                                  int columns) { /* of row i of the thread's two */
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < 32; u += 4) {
        unsigned v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[j] = ${e}_pack(sum[(u + j) * 4 + 2 * i], sum[(u + j) * 4 + 2 * i + 1]);
        ${e}_exchange(v, lane);
        int c = (u + lane) * 8;
        if (c < columns)
            *(uint4 *)(out + (${is_gated} && u >= 16 ? c - 128 + ${n} / 2 : c)) =
                make_uint4(v[0], v[1], v[2], v[3]);
    }
}
)";
static const char wide_text[] = R"(
static __device__ __forceinline__ void ${e}_write(${result} *out, const float (&sum)[128], int i,
                                                  int columns) { /* of row i of the thread's two */
    int lane = threadIdx.x % 4;
    bool odd = lane & 1;
#pragma unroll
    for (int u = 0; u < 32; u += 2) {
        float x = sum[u * 4 + 2 * i], y = sum[u * 4 + 2 * i + 1];
        float z = sum[u * 4 + 4 + 2 * i], w = sum[u * 4 + 5 + 2 * i];
        float first = __shfl_xor_sync(~0u, odd ? x : z, 1);
        float second = __shfl_xor_sync(~0u, odd ? y : w, 1);
        int c = (u + odd) * 8 + lane / 2 * 4;
        if (c < columns)
            *(float4 *)(out + c) =
                odd ? make_float4(first, second, z, w) : make_float4(x, y, first, second);
    }
}
)";

static const char squares_text[] = R"(
static __device__ __forceinline__ void ${e}_write_squares(const ${e}_arguments &a, int group,
                                                          int row, int column,
                                                          const float (&sum)[128]) {
    float squares[4] = {};
#pragma unroll
    for (int i = 0; i < 128; i++) squares[i % 4] += sum[i] * sum[i];
    float all = (squares[0] + squares[1]) + (squares[2] + squares[3]);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) all += __shfl_xor_sync(~0u, all, d);
    float *out = (float *)a.p[${s_at}] + group * ${s_group};
    if (threadIdx.x % 32 == 0 && row < ${k} && column < ${n})
        out[row / 16 * ${s_row} + column / 256 * ${s_col}] = all;
}
)";

/* A tile has 128 columns of each half, the same ones, so that a thread holds both of an element. */
static const char gated_text[] = R"(
${gated}
static __device__ __forceinline__ float ${e}_numbers(const ${e}_arguments &a, int batch, int row,
                                                     bool second) {
    const float numbers[] = {${row_numbers}};
    return numbers[second];
}
static __device__ __forceinline__ void ${e}_write_gated(const ${e}_arguments &a, ${e}_place p,
                                                        int column, const float (&sum)[128], int i,
                                                        bool valid) {
    int lane = threadIdx.x % 4;
    float x2 = valid ? ${e}_numbers(a, p.batch, p.at, false) : 0;
    float x3 = valid ? ${e}_numbers(a, p.batch, p.at, true) : 0;
    ${result} *out = (${result} *)a.p[${s_at}] + column + p.batch * ${s_batch} + p.at * ${s_row};
#pragma unroll
    for (int u = 0; u < 16; u += 4) {
        unsigned v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int x = (u + j) * 4 + 2 * i, y = x + 64;
            v[j] = ${e}_pack(${e}_gated(ml_round_bf16(sum[x]), ml_round_bf16(sum[y]), x2, x3),
                             ${e}_gated(ml_round_bf16(sum[x + 1]), ml_round_bf16(sum[y + 1]), x2,
                                        x3));
        }
        ${e}_exchange(v, lane);
        if (valid) *(uint4 *)(out + (u + lane) * 8) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}
)";
static const char clear_gated_text[] = R"(
            float same = ${e}_gated(0, 0, ${e}_numbers(a, batch, row, false),
                                    ${e}_numbers(a, batch, row, true));
            unsigned pair = ${e}_pack(same, same);
            out = (${result} *)a.p[${s_at}] + batch * ${s_batch} + row * ${s_row};
            for (int c = lane * ${wide}; c < ${n} / 2; c += 32 * ${wide})
                *(uint4 *)(out + c) = make_uint4(pair, pair, pair, pair);)";

static const char kernel_text[] = R"(
static __device__ __forceinline__ void ${e}_multiply(const ${e}_arguments &a, const ${e}_tables &t,
                                                     unsigned stages, int rank) {
    int stage = 0, lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128 - 1;
    int first = warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4; /* row of results */
    unsigned parity = 0;
    ${e}_tile tile = {};
    for (int item = blockIdx.x / 2; item < t.item[${groups}]; item += gridDim.x / 2) {
        ${e}_seek(t, item, rank, tile);
        int steps = ${outer} ? (t.total[tile.group] + 63) / 64 : (${k} + 63) / 64;
        if (!${outer} && tile.row + warpgroup * 64 >= t.total[tile.group]) { /* no rows */
            for (int step = 0; step < steps; step++) {
                ${e}_wait(${e}_address(&t.full[stage]), parity);
                __syncwarp();
                if (lane < 2) ${e}_release(${e}_address(&t.empty[stage]), lane);
                if (++stage == ${stages}) stage = 0, parity ^= 1;
            }
            continue;
        }
        float sum[128] = {};
        unsigned last = 0;
        for (int step = 0; step < steps; step++) {
            unsigned lefts = stages + stage * ${stage_bytes} + warpgroup * 8192;
            unsigned rights = stages + stage * ${stage_bytes} + 16384;
            ${e}_wait(${e}_address(&t.full[stage]), parity);
            ${e}_begin();
#pragma unroll
            for (int k = 0; k < 4; k++)
                ${e}_product(sum, ${e}_operand(lefts + k * ${left_step}, ${left_block}),
                             ${e}_operand(rights + k * ${right_step}, ${right_block}));
            ${e}_end();
            ${e}_finish_but_one();
            if (step > 0 && lane < 2) ${e}_release(last, lane);
            last = ${e}_address(&t.empty[stage]);
            if (++stage == ${stages}) stage = 0, parity ^= 1;
        }
        ${e}_finish();
        if (steps > 0 && lane < 2) ${e}_release(last, lane);
        int columns = ${n} - tile.column;
        ${write_squares}
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = tile.row + first + i * 8;
            ${result} *out =
                (${result} *)a.p[${c_at}] + (${is_gated} ? tile.column / 2 : tile.column);
            if (${outer}) {
                out += tile.group * ${c_group} + row * ${c_row};
                ${e}_write(out, sum, i, row < ${k} ? columns : 0);
            } else {
                ${e}_place p = ${e}_locate(t, tile.group, 0, row);
                out += p.batch * ${c_batch} + p.at * ${c_row};
                ${e}_write(out, sum, i, p.left > 0 ? columns : 0);
                ${write_gated}
            }
        }
    }
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(${threads}, 1)
    ${e}(const __grid_constant__ ${e}_arguments a) {
    extern __shared__ uint4 ${e}_shared[];
    __shared__ ${e}_tables t;
    unsigned stages = (${e}_address(${e}_shared) + 1023) & ~1023u;
    int rank = ${e}_rank();
    ${e}_fill(a, t);
    if (threadIdx.x < 128) {
        ${e}_give_registers();
        ${e}_load_all(a, t, stages, rank);
    } else {
        ${e}_take_registers();
        ${e}_multiply(a, t, stages, rank);
    }
    ${e}_meet(); /* the other block may still load for this one */
}
)";

static int64_t round_up(int64_t size) {
    return (size + 7) / 8 * 8;
}

/* Boxes of 64 columns and some rows of what lies as [depth][row][column], columns contiguous. */
static ml_tensor_map map_of(int pointer, const int64_t size[3], const int64_t stride[3], int rows) {
    ml_tensor_map map = {.pointer = pointer,
                         .dtype = ML_BF16,
                         .rank = 3,
                         .box = {DEEP, rows, 1},
                         .swizzle = DEEP * 2};
    for (int i = 0; i < 3; i++) {
        map.size[i] = size[i];
        /* an axis of one element has any stride, but it must be one that a map may have */
        map.stride[i] = size[i] > 1 ? stride[i] : i ? round_up(size[0]) : 1;
    }
    return map;
}

/* One for each height of boxes of rows; the right operand of an outer product has rows too. */
static void add_maps(ml_template *t, ml_kernel *kernel, const ml_ragged *r) {
    int64_t left[3] = {r->k, r->rows, r->batch}, left_stride[3] = {1, r->a_row, r->a_batch};
    int64_t right[3] = {r->n, r->rows, r->batch}, right_stride[3] = {1, r->b_row, r->b_batch};
    bool deep = !r->outer && r->b_col != 1;
    if (!r->outer) {
        right[0] = deep ? r->k : r->n, right[1] = deep ? r->n : r->k, right[2] = r->groups;
        right_stride[1] = deep ? r->b_col : r->b_row, right_stride[2] = r->b_group;
    }
    kernel->map_count = r->outer ? 2 * HEIGHTS : HEIGHTS + 1;
    ml_tensor_map *map = ML_NEW_ARRAY(t->arena, ml_tensor_map, kernel->map_count);
    kernel->maps = map;
    for (int i = 0; i < kernel->map_count; i++)
        map[i] = i < HEIGHTS ? map_of(0, left, left_stride, DEEP >> i)
                             : map_of(1, right, right_stride, DEEP >> (i - HEIGHTS));
}

static void set_all(ml_template *t, const ml_ragged *r) {
    enum { LINE = 128, UNUSED = 16, BAND = 8 };
    bool right_deep = !r->outer && r->b_col != 1;
    template_wgmma_registers(t);
    template_set(t, "maps", "%d", r->outer ? 2 * HEIGHTS : HEIGHTS + 1);
    template_set(t, "outer", "%d", r->outer);
    template_set(t, "stages", "%d", STAGES);
    template_set(t, "threads", "%d", THREADS);
    template_set(t, "stage_bytes", "%d", STAGE_BYTES);
    template_set(t, "band", "%d", BAND);
    template_set(t, "wide", "%d", r->c_dtype == ML_BF16 ? 8 : 4);
    template_set(t, "left_flat", "%d", r->outer);
    template_set(t, "right_flat", "%d", !right_deep);
    template_set(t, "right_deep", "%d", right_deep);
    template_set(t, "left_step", "%d", r->outer ? 16 * LINE : 32);
    template_set(t, "right_step", "%d", right_deep ? 32 : 16 * LINE);
    template_set(t, "left_block", "%d", r->outer ? BOX_BYTES : UNUSED);
    template_set(t, "right_block", "%d", right_deep ? UNUSED : BOX_BYTES);
    template_set(t, "is_gated", "%d", r->gated != 0);
    template_set_text(t, "write_gated",
                      r->gated ? "${e}_write_gated(a, p, tile.column / 2, sum, i, "
                                 "p.left > 0 && columns > 0);"
                               : "");
    template_set_text(t, "clear_gated", r->gated ? clear_gated_text : "");
    template_set_text(t, "write_squares",
                      r->squares ? "${e}_write_squares(a, tile.group, tile.row + first - lane / 4, "
                                   "tile.column, sum);"
                                 : "");
}

bool template_tma_serves(const ml_ragged *r) {
    enum { SEGMENTS = 2048, GROUPS = 1024, WIDE_BF16 = 8, WIDE_F32 = 4 };
    int64_t wide = r->c_dtype == ML_BF16 ? WIDE_BF16 : WIDE_F32;
    if (r->groups > GROUPS || r->groups * r->batch > SEGMENTS) return false;
    if (r->a_row <= 0 || r->b_row <= 0 || r->b_col <= 0) return false;
    if (r->gated && (r->s_col != 1 || r->s_row % wide || r->s_batch % wide)) return false;
    return r->c_row % wide == 0 && r->c_group % wide == 0 && r->c_batch % wide == 0;
}

ml_kernel *template_tma(ml_template *t, const ml_ragged *r, int multiprocessors, int pointers) {
    enum { ALIGNMENT = 1024, H200 = 132 };
    set_all(t, r);
    const char *const parts[] = {ptx_text,
                                 template_wgmma_products,
                                 ptx_end_text,
                                 template_wgmma_operand,
                                 tables_text,
                                 choose_text,
                                 r->c_dtype == ML_BF16 ? narrow_text : wide_text,
                                 r->gated ? gated_text : "",
                                 r->outer ? "" : clear_text,
                                 r->outer ? outer_load_text : dot_load_text,
                                 r->squares ? squares_text : "",
                                 kernel_text};
    ml_kernel *kernel =
        template_kernel_of(t, parts, sizeof parts / sizeof *parts,
                           r->outer ? "ragged_outer tma" : "ragged_dot tma", pointers);
    add_maps(t, kernel, r);
    int blocks = (multiprocessors > 0 ? multiprocessors : H200) / CLUSTER * CLUSTER;
    template_launch(kernel, blocks, 1, 1, THREADS, STAGES * STAGE_BYTES + ALIGNMENT);
    return kernel;
}
