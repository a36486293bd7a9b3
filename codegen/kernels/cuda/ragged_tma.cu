/* Products by groups of rows in bf16, or in floats of 8 bits, on Hopper's copy engine (TMA) and
 * warpgroup products (wgmma).
 *
 * Blocks are persistent and come in pairs (clusters), a pair a work tile at a time: two tiles of
 * 128 x 256 that share their columns, or, where a group's tiles of rows are odd in number, two of
 * the last rows that share those. What is shared each block loads half of, for both. One warp
 * loads, as far ahead as the ring has slots; two warpgroups multiply, 64 rows each, and write
 * results while the next work tile is loaded. Work tiles are ordered by group, then by bands of
 * rows whose columns stay in the cache.
 *
 * A slot is six boxes of 64 x 64, two of the left operand and four of the right one, in 128-byte
 * lines that are swizzled as ragged_wgmma.cuh says. Lines along the rows may come from several
 * elements of the batch: what comes from one is cut into boxes of 32, 16, ... 1 lines. Lines that
 * a sum must not see are loaded from outside of the tensor, as zeros.
 *
 * Of 8 bits a box is 64 lines of 128 deep. Hopper adds such products with 13 bits behind the
 * largest: sums that are to be in f32 begin anew every 128 of depth and are added up in registers,
 * half of the columns at a time, while the other warpgroup multiplies. Operands of RAGGED_OUTER are
 * transposed before (ragged_turn.cu), each group at a multiple of 128, filled up with zeros.
 *
 * Where a RAGGED_OUTER gives sums of squares too, each warp adds up those of its 16 x 256 results
 * (others are 0) before it writes them. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY ragged
#define POINTERS 5
#define MAPS 8
#define OUTER 0
#define SQUARES 0
#define NARROW 1 /* results are bf16, not f32 */
#define C_AT 4   /* pointers of the results */
#define S_AT 5
#define RESULT ml_bf16
#define ROWS 4096LL /* of an element of the batch */
#define BATCHES 1
#define GROUPS 8
#define K_SIZE 1024
#define N_SIZE 1024
#define N_TILES 4 /* tiles along the columns */
#define SLOTS 4
#define SLOT_BYTES 49152
#define STEP 64 /* of the depth, in a slot */
#define SCALE 0 /* pointer of what sums are multiplied by, of 8 bits */
#define BAND 8  /* pairs of tiles of rows */
#define WIDE 8  /* results in 16 bytes */
#define START_BATCH 8LL
#define START_STRIDE 1LL
#define END_BATCH 8LL
#define END_STRIDE 1LL
#define C_BATCH 65536LL
#define C_GROUP 0LL
#define C_ROW 1024LL
#define S_BATCH 65536LL
#define S_GROUP 256LL
#define S_ROW 512LL
#define S_COL 1LL
#endif
#include "ragged_gated.cuh"
#include "ragged_wgmma.cuh"
#include "tma.cuh"

struct arguments {
    tensor_map map[MAPS];
    char *p[POINTERS];
};

/* What every thread looks up: for each group, where its rows of each element of the batch begin,
 * how many rows lie in elements before, how many there are, and how many work tiles come before. */
struct tables {
    unsigned long long full[SLOTS], empty[SLOTS];
    int start[GROUPS * BATCHES], before[GROUPS * BATCHES];
    int total[GROUPS], item[GROUPS + 1];
#if BYTES && OUTER
    int place[GROUPS]; /* where its rows begin in operands that were transposed */
#endif
};
ML_INLINE int tiles_of(int rows) { return OUTER ? (K_SIZE + 127) / 128 : (rows + 127) / 128; }
ML_INLINE int items_of(int rows) {
    int tiles = tiles_of(rows);
    return tiles / 2 * N_TILES + tiles % 2 * ((N_TILES + 1) / 2);
}
ML_INLINE void fill_tables(const arguments &a, tables &t) {
    for (int e = threadIdx.x; e < GROUPS; e += 384) {
        int total = 0;
#pragma unroll 4
        for (int b = 0; b < BATCHES; b++) {
            int start = ((const int *)a.p[2])[b * START_BATCH + e * START_STRIDE];
            int end = ((const int *)a.p[3])[b * END_BATCH + e * END_STRIDE];
            start = start < 0 ? 0 : start;
            end = end > ROWS ? (int)ROWS : end;
            t.start[e * BATCHES + b] = start, t.before[e * BATCHES + b] = total;
            total += end > start ? end - start : 0;
        }
        t.total[e] = total;
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(shared_address(&t.full[i]), 1);
            barrier_init(shared_address(&t.empty[i]), 16); /* all warps of both that multiply */
        }
        barriers_visible();
    }
    __syncthreads();
    int lane = threadIdx.x, done = 0;
    for (int base = 0; lane < 32 && base < GROUPS; base += 32) {
        int own = base + lane < GROUPS ? items_of(t.total[base + lane]) : 0, sum = own;
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, sum, d);
            sum += lane >= d ? other : 0;
        }
        if (base + lane < GROUPS) t.item[base + lane] = done + sum - own;
        done += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) t.item[GROUPS] = done;
#if BYTES && OUTER
    if (lane == 32)
        for (int e = 0, place = 0; e < GROUPS; e++) {
            t.place[e] = place;
            place += (t.total[e] + 127) / 128 * 128;
        }
#endif
    cluster_sync();
}
/* A block's tile of a work tile; `same_rows`: the other block's differs in its columns. */
struct tile {
    int group, row, column;
    bool same_rows;
};
ML_INLINE void seek_tile(const tables &t, int item, int rank, tile &tile) {
    while (item >= t.item[tile.group + 1]) tile.group++; /* work tiles come in ascending order */
    int tiles = tiles_of(t.total[tile.group]), pairs = tiles / 2;
    int at = item - t.item[tile.group], band = at / (BAND * N_TILES) * BAND;
    tile.same_rows = at >= pairs * N_TILES;
    if (tile.same_rows) {
        tile.row = tiles - 1, tile.column = (at - pairs * N_TILES) * 2 + rank;
    } else {
        int height = pairs - band < BAND ? pairs - band : BAND;
        at -= band * N_TILES;
        tile.row = (band + at % height) * 2 + rank, tile.column = at / height;
    }
    tile.row *= 128, tile.column *= 256;
}
/* Where a row of a group is: `at` in which element of the batch, and how many there are from it
 * on; search begins in element `batch`. */
struct location {
    int batch, at, left;
};
ML_INLINE location locate(const tables &t, int group, int batch, int row) {
    const int *before = t.before + group * BATCHES;
    while (batch + 1 < BATCHES && row >= before[batch + 1]) batch++;
    int end = batch + 1 < BATCHES ? before[batch + 1] : t.total[group];
    return {batch, t.start[group * BATCHES + batch] + row - before[batch], end - row};
}
/* A box of a slot that this block loads: its address, and its first row or column. */
struct box_load {
    bool left, both;
    unsigned to;
    int at;
};
ML_INLINE box_load choose_box(tile tile, int rank, int box) {
    box_load b;
    int lefts = tile.same_rows ? 1 : 2;
    b.left = box < lefts, b.both = b.left == tile.same_rows;
    box = b.left ? box + (b.both ? rank : 0) : box - lefts + (b.both ? rank * 2 : 0);
    b.to = (b.left ? 0 : 16384) + box * 8192;
    b.at = (b.left ? tile.row : tile.column) + box * 64;
    if (GATED && !b.left)
        b.at = tile.column / 2 + box % 2 * 64 + (box < 2 ? 0 : N_SIZE / 2); /* of both halves */
    return b;
}
/* Of the boxes that a run of rows is cut into, the one that has 64 >> i lines: after how many. */
ML_INLINE int cut_at(int run, int i) { return run & ~((128 >> i) - 1); }

#if NARROW
/* Quads of lanes exchange what they hold, so that each writes 16 bytes of a row. */
ML_INLINE void exchange(unsigned (&v)[4], int lane) {
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
ML_INLINE void write(RESULT *out, const float (&sum)[128], int i,
                     int columns) { /* of row i of the thread's two */
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < 32; u += 4) {
        unsigned v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[j] = pack_bf16(sum[(u + j) * 4 + 2 * i], sum[(u + j) * 4 + 2 * i + 1]);
        exchange(v, lane);
        int c = (u + lane) * 8;
        if (c < columns)
            *(uint4 *)(out + (GATED && u >= 16 ? c - 128 + N_SIZE / 2 : c)) =
                make_uint4(v[0], v[1], v[2], v[3]);
    }
}
#else
ML_INLINE void write(RESULT *out, const float (&sum)[128], int i,
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
#endif

#if GATED
/* A tile has 128 columns of each half, the same ones, so that a thread holds both of an element. */
ML_INLINE float numbers(const arguments &a, int batch, int row, bool second) {
    const float numbers[] = {ROW_NUMBERS(batch, row)};
    return numbers[second];
}
ML_INLINE void write_gated(const arguments &a, location p, int column, const float (&sum)[128],
                           int i, bool valid) {
    int lane = threadIdx.x % 4;
    float x2 = valid ? numbers(a, p.batch, p.at, false) : 0;
    float x3 = valid ? numbers(a, p.batch, p.at, true) : 0;
    RESULT *out = (RESULT *)a.p[S_AT] + column + p.batch * S_BATCH + p.at * S_ROW;
#pragma unroll
    for (int u = 0; u < 16; u += 4) {
        unsigned v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int x = (u + j) * 4 + 2 * i, y = x + 64;
            v[j] = pack_bf16(gated(ml_round_bf16(sum[x]), ml_round_bf16(sum[y]), x2, x3),
                             gated(ml_round_bf16(sum[x + 1]), ml_round_bf16(sum[y + 1]), x2, x3));
        }
        exchange(v, lane);
        if (valid) *(uint4 *)(out + (u + lane) * 8) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}
#endif

#if OUTER && BYTES
/* A box a lane of one warp. */
ML_INLINE void load_all(const arguments &a, tables &t, unsigned ring, int rank) {
    int lane = threadIdx.x, slot = 0;
    unsigned parity = 1;
    tile tile = {};
    if (lane >= 32) return;
    for (int item = blockIdx.x / 2; item < t.item[GROUPS]; item += gridDim.x / 2) {
        seek_tile(t, item, rank, tile);
        int total = t.total[tile.group], place = t.place[tile.group];
        box_load own = choose_box(tile, rank, lane);
        for (int row = 0; row < total; row += STEP) {
            unsigned to = ring + slot * SLOT_BYTES, full = shared_address(&t.full[slot]);
            barrier_spin(shared_address(&t.empty[slot]), parity);
            __syncwarp(); /* or a late lane would find it empty once more */
            if (lane == 0) barrier_expect(full, SLOT_BYTES);
            __syncwarp();
            if (lane < (tile.same_rows ? 5 : 4))
                load_box(a.map + (own.left ? 0 : 1), to + own.to, place + row, own.at, 0, full,
                         own.both);
            __syncwarp();
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
    }
}
#elif OUTER
/* The same rows for all boxes of a step; a box a warp. */
/* Of a box that has rows of several elements of the batch, or ends: the lanes' segments. */
ML_INLINE void load_cut(const tensor_map *map, const tables &t, int group, int batch, int row,
                        unsigned to, int column, unsigned barrier, bool both) {
    int lane = threadIdx.x % 32;
    for (int line = 0, run; line < 64; line += run) {
        location p = locate(t, group, batch, row + line);
        batch = p.batch, run = 64 - line;
        if (p.left > 0 && p.left < run) run = p.left;
        int skip = cut_at(run, lane);
        if (lane < 7 && run & 64 >> lane)
            load_box(map + lane, to + (line + skip) * 128, column,
                     p.left > 0 ? p.at + skip : (int)ROWS, batch, barrier, both);
        __syncwarp();
    }
}
ML_INLINE void load_all(const arguments &a, tables &t, unsigned ring, int rank) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slot = 0;
    unsigned parity = 1;
    tile tile = {};
    for (int item = blockIdx.x / 2; item < t.item[GROUPS]; item += gridDim.x / 2) {
        seek_tile(t, item, rank, tile);
        int total = t.total[tile.group], boxes = tile.same_rows ? 5 : 4;
        location p = {};
        for (int row = 0; row < total; row += 64) {
            unsigned to = ring + slot * SLOT_BYTES, full = shared_address(&t.full[slot]);
            barrier_spin(shared_address(&t.empty[slot]), parity);
            __syncwarp(); /* or a late lane would find it empty once more */
            if (threadIdx.x == 0) barrier_expect(full, SLOT_BYTES);
            if (p.left < 64) p = locate(t, tile.group, p.batch, row);
            for (int box = warp; box < boxes; box += 4) {
                box_load b = choose_box(tile, rank, box);
                const tensor_map *map = a.map + (b.left ? 0 : 7);
                if (p.left < 64)
                    load_cut(map, t, tile.group, p.batch, row, to + b.to, b.at, full, b.both);
                else if (lane == 0)
                    load_box(map, to + b.to, b.at, p.at, p.batch, full, b.both);
            }
            p.at += 64, p.left -= 64;
            __syncwarp();
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
    }
}
#else
/* Zeros in rows of no group, 64 rows at a time, by warps that have nothing else to do. */
/* How many of these rows of an element of the batch are of a group. */
ML_INLINE int covered(const tables &t, int batch, int from, int to) {
    int sum = 0;
    for (int e = threadIdx.x % 32; e < GROUPS; e += 32) {
        int i = e * BATCHES + batch, low = t.start[i], high = low - t.before[i];
        high += batch + 1 < BATCHES ? t.before[i + 1] : t.total[e];
        low = low > from ? low : from, high = high < to ? high : to;
        sum += high > low ? high - low : 0;
    }
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
}
static __device__ __noinline__ void clear_rows(const arguments &a, const tables &t) {
    int windows = (int)((ROWS + 63) / 64), lane = threadIdx.x % 32;
    for (int w = blockIdx.x * 2 + threadIdx.x / 32 - 2; w < windows * BATCHES; w += gridDim.x * 2) {
        int batch = w / windows, from = w % windows * 64;
        int to = from + 64 < ROWS ? from + 64 : (int)ROWS;
        if (covered(t, batch, from, to) == to - from) continue;
        for (int row = from; row < to; row++) {
            if (covered(t, batch, row, row + 1)) continue;
            RESULT *out = (RESULT *)a.p[C_AT] + batch * C_BATCH + row * C_ROW;
            for (int c = lane * WIDE; c < N_SIZE; c += 32 * WIDE)
                *(uint4 *)(out + c) = make_uint4(0, 0, 0, 0);
#if GATED
            float same = gated(0, 0, numbers(a, batch, row, false), numbers(a, batch, row, true));
            unsigned pair = pack_bf16(same, same);
            out = (RESULT *)a.p[S_AT] + batch * S_BATCH + row * S_ROW;
            for (int c = lane * WIDE; c < N_SIZE / 2; c += 32 * WIDE)
                *(uint4 *)(out + c) = make_uint4(pair, pair, pair, pair);
#endif
        }
    }
}

/* One warp loads the matrix, another the rows: the same boxes at each step but for the depth. */
struct segment {
    unsigned to;
    int at, batch, kind;
}; /* kind: which map */
ML_INLINE void load_matrix(const arguments &a, tables &t, unsigned ring, int rank) {
    int lane = threadIdx.x % 32, slot = 0;
    unsigned parity = 1;
    tile tile = {};
    for (int item = blockIdx.x / 2; item < t.item[GROUPS]; item += gridDim.x / 2) {
        seek_tile(t, item, rank, tile);
        box_load own = choose_box(tile, rank, (tile.same_rows ? 1 : 2) + lane);
        for (int d = 0; d < K_SIZE; d += STEP) {
            unsigned to = ring + slot * SLOT_BYTES, full = shared_address(&t.full[slot]);
            barrier_spin(shared_address(&t.empty[slot]), parity);
            __syncwarp(); /* or a late lane would find it empty once more */
            if (lane == 0) barrier_expect(full, SLOT_BYTES);
            if (lane < (tile.same_rows ? 4 : 2))
                load_box(a.map + 7, to + own.to, RIGHT_DEEP ? d : own.at, RIGHT_DEEP ? own.at : d,
                         tile.group, full, !tile.same_rows);
            __syncwarp();
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
    }
}
/* 64 lines of rows as segments, each of rows that follow one another; how many. What follows a
 * group's rows does no harm. */
ML_INLINE int list_segments(const tables &t, int group, int row, unsigned to, segment *list) {
    int count = 0;
    location p = {};
    for (int line = 0, run; line < 64; line += run) {
        p = locate(t, group, p.batch, row + line);
        run = 64 - line;
        if (p.left > 0 && p.left < run && row + line + p.left < t.total[group]) run = p.left;
        for (int i = 0; i < 7; i++) {
            int skip = cut_at(run, i);
            if (run & 64 >> i) list[count++] = {to + (line + skip) * 128, p.at + skip, p.batch, i};
        }
    }
    return count;
}
ML_INLINE void load_rows(const arguments &a, tables &t, unsigned ring, int rank) {
    __shared__ segment list[128];
    int lane = threadIdx.x % 32, slot = 0;
    unsigned parity = 1;
    tile tile = {};
    for (int item = blockIdx.x / 2; item < t.item[GROUPS]; item += gridDim.x / 2) {
        seek_tile(t, item, rank, tile);
        box_load own = choose_box(tile, rank, lane);
        int segments =
            own.left ? list_segments(t, tile.group, own.at, own.to, list + lane * 64) : 0;
        __syncwarp();
        int first = __shfl_sync(~0u, segments, 0), all = first + __shfl_sync(~0u, segments, 1);
        segment mine = {};
        if (lane < all) mine = list[lane < first ? lane : 64 + lane - first];
        for (int d = 0; d < K_SIZE; d += STEP) {
            unsigned to = ring + slot * SLOT_BYTES, full = shared_address(&t.full[slot]);
            barrier_spin(shared_address(&t.empty[slot]), parity);
            __syncwarp(); /* or a late lane would find it empty once more */
            if (lane < all)
                load_box(a.map + mine.kind, to + mine.to, d, mine.at, mine.batch, full,
                         tile.same_rows);
            for (int i = lane + 32; i < all; i += 32) { /* where elements have few rows each */
                segment p = list[i < first ? i : 64 + i - first];
                load_box(a.map + p.kind, to + p.to, d, p.at, p.batch, full, tile.same_rows);
            }
            __syncwarp();
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
    }
}
ML_INLINE void load_all(const arguments &a, tables &t, unsigned ring, int rank) {
    int warp = threadIdx.x / 32;
    if (warp == 0)
        load_matrix(a, t, ring, rank);
    else if (warp == 1)
        load_rows(a, t, ring, rank);
    else
        clear_rows(a, t);
}
#endif

#if SQUARES
ML_INLINE void write_squares(const arguments &a, int group, int row, int column,
                             const float (&sum)[128]) {
    float squares[4] = {};
#pragma unroll
    for (int i = 0; i < 128; i++) squares[i % 4] += sum[i] * sum[i];
    float all = (squares[0] + squares[1]) + (squares[2] + squares[3]);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) all += __shfl_xor_sync(~0u, all, d);
    float *out = (float *)a.p[S_AT] + group * S_GROUP;
    if (threadIdx.x % 32 == 0 && row < K_SIZE && column < N_SIZE)
        out[row / 16 * S_ROW + column / 256 * S_COL] = all;
}
#endif

#if PROMOTES
/* 128 of depth by half of the columns at a time. */
ML_INLINE void multiply_slot(float (&sum)[128], unsigned lefts, unsigned rights) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float part[64];
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma(part, descriptor(lefts + k * LEFT_STEP, LEFT_BLOCK),
                  descriptor(rights + half * 16384 + k * RIGHT_STEP, RIGHT_BLOCK), k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        keep_in_registers(part);
#pragma unroll
        for (int i = 0; i < 64; i++) sum[half * 64 + i] += part[i];
    }
}
#endif

ML_INLINE void multiply(const arguments &a, const tables &t, unsigned ring, int rank) {
    int slot = 0, lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128 - 1;
    int first = warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4; /* row of results */
    unsigned parity = 0;
    tile tile = {};
    for (int item = blockIdx.x / 2; item < t.item[GROUPS]; item += gridDim.x / 2) {
        seek_tile(t, item, rank, tile);
        int steps = ((OUTER ? t.total[tile.group] : K_SIZE) + STEP - 1) / STEP;
        if (!OUTER && tile.row + warpgroup * 64 >= t.total[tile.group]) { /* no rows */
            for (int step = 0; step < steps; step++) {
                barrier_spin(shared_address(&t.full[slot]), parity);
                __syncwarp();
                if (lane < 2) barrier_release(shared_address(&t.empty[slot]), lane);
                if (++slot == SLOTS) slot = 0, parity ^= 1;
            }
            continue;
        }
        float sum[128] = {};
#if !PROMOTES
        unsigned last = 0;
#endif
        for (int step = 0; step < steps; step++) {
            unsigned lefts = ring + slot * SLOT_BYTES + warpgroup * 8192;
            unsigned rights = ring + slot * SLOT_BYTES + 16384;
            barrier_spin(shared_address(&t.full[slot]), parity);
#if PROMOTES
            multiply_slot(sum, lefts, rights);
            if (lane < 2) barrier_release(shared_address(&t.empty[slot]), lane);
#else
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma(sum, descriptor(lefts + k * LEFT_STEP, LEFT_BLOCK),
                      descriptor(rights + k * RIGHT_STEP, RIGHT_BLOCK), 1);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0 && lane < 2) barrier_release(last, lane);
            last = shared_address(&t.empty[slot]);
#endif
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
#if !PROMOTES
        wgmma_wait<0>();
        if (steps > 0 && lane < 2) barrier_release(last, lane);
#endif
#if BYTES
        const float scale = *(const float *)a.p[SCALE];
#pragma unroll
        for (int i = 0; i < 128; i++) sum[i] *= scale;
#endif
        int columns = N_SIZE - tile.column;
#if SQUARES
        write_squares(a, tile.group, tile.row + first - lane / 4, tile.column, sum);
#endif
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = tile.row + first + i * 8;
            RESULT *out = (RESULT *)a.p[C_AT] + (GATED ? tile.column / 2 : tile.column);
            if (OUTER) {
                out += tile.group * C_GROUP + row * C_ROW;
                write(out, sum, i, row < K_SIZE ? columns : 0);
            } else {
                location p = locate(t, tile.group, 0, row);
                out += p.batch * C_BATCH + p.at * C_ROW;
                write(out, sum, i, p.left > 0 ? columns : 0);
#if GATED
                write_gated(a, p, tile.column / 2, sum, i, p.left > 0 && columns > 0);
#endif
            }
        }
    }
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    ENTRY(const __grid_constant__ arguments a) {
    extern __shared__ uint4 shared[];
    __shared__ tables t;
    unsigned ring = (shared_address(shared) + 1023) & ~1023u;
    int rank = cluster_rank();
    fill_tables(a, t);
    if (threadIdx.x < 128) {
        decrease_registers<56>();
        load_all(a, t, ring, rank);
    } else {
        increase_registers<224>();
        multiply(a, t, ring, rank);
    }
    cluster_sync(); /* the other block may still load for this one */
}
