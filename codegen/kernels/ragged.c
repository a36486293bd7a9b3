/* Products by groups of rows (lower.h, ml_ragged) on CUDA. Offsets are read on the device: the host
 * never waits for them, and the grid is what the most ragged groups would need.
 *
 * A group's rows are those of all elements of the batch, one after another, so that tiles are full
 * however few rows one element has. RAGGED_DOT: a warp finds the tile's group by a scan over the
 * groups' tiles, then a table in shared memory says where each row of the tile lies; the last
 * blocks clear what is of no group. RAGGED_OUTER: a tile belongs to one group and sums over its
 * rows in order, so that results repeat. bf16 goes to tensor cores (on Hopper by template_tma.c or,
 * where the driver or the strides do not let it, template_wgmma.c; elsewhere and for few columns by
 * mma.sync, cp.async one step ahead), everything else to plain multiplications. */
#include "runtime/graph/ragged.h"
#include "codegen/kernels/template.h"
#include "runtime/base/knobs.h"

enum { PRODUCT_READS = 4 };

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    const ml_ragged *r;
    int64_t tile_m, tile_n, tiles; /* most tiles of rows */
    int64_t height;                /* blocks along the rows */
} printer;

/* Rows of a group as they are counted: from 0 through all elements of the batch. A walk is at one
 * of these; it goes forward only. */
static const char walk_text[] = R"(
struct ${e}_walk {
    int batch;
    long long first, start, count; /* what is counted before; its rows of this element */
};
static __device__ __forceinline__ void ${e}_enter(${e}_walk &w, ${e}_arguments &a, int group,
                                                  int batch) {
    long long start = ((const int *)a.p[2])[batch * ${start_batch} + group * ${start_stride}];
    long long end = ((const int *)a.p[3])[batch * ${end_batch} + group * ${end_stride}];
    start = start < 0 ? 0 : start;
    end = end > ${rows} ? ${rows} : end;
    w.batch = batch, w.start = start, w.count = end > start ? end - start : 0;
}
static __device__ __forceinline__ void ${e}_seek(${e}_walk &w, ${e}_arguments &a, int group,
                                                 long long row) {
    while (row >= w.first + w.count && w.batch + 1 < ${batches}) {
        w.first += w.count;
        ${e}_enter(w, a, group, w.batch + 1);
    }
}
/* Blocks go through bands of columns: those that run together read few rows and few columns, which
 * then come from the cache. */
static __device__ __forceinline__ void ${e}_order(int block, int &row, int &column) {
    int band = block / (${band} * ${height}), rest = block % (${band} * ${height});
    int width = ${n_tiles} - band * ${band} < ${band} ? ${n_tiles} - band * ${band} : ${band};
    row = rest / width, column = band * ${band} + rest % width;
}
static __device__ __forceinline__ long long ${e}_count(${e}_arguments &a, int group) {
    ${e}_walk w;
    long long count = 0;
    for (int batch = 0; batch < ${batches}; batch++) {
        ${e}_enter(w, a, group, batch);
        count += w.count;
    }
    return count;
}
)";

/* Zeros in rows of no group, of the elements of the batch one after another in windows. */
static const char clear_text[] = R"(
static __device__ __noinline__ void ${e}_clear(${e}_arguments &a, int window, int column,
                                               int columns) {
    int batch = window / ${windows};
    long long from = window % ${windows} * ${window}LL, covered = 0;
    long long to = from + ${window} < ${rows} ? from + ${window} : ${rows};
    ${e}_walk w;
    for (int e = threadIdx.x % 32; e < ${groups}; e += 32) {
        ${e}_enter(w, a, e, batch);
        long long low = w.start > from ? w.start : from, high = w.start + w.count;
        high = high < to ? high : to;
        covered += high > low ? high - low : 0;
    }
    for (int d = 16; d > 0; d /= 2) covered += __shfl_xor_sync(~0u, covered, d);
    if (covered == to - from) return;
    for (long long row = from + threadIdx.x / 32; row < to; row += 8) {
        int in = 0;
        for (int e = threadIdx.x % 32; e < ${groups}; e += 32) {
            ${e}_enter(w, a, e, batch);
            in |= row >= w.start && row < w.start + w.count;
        }
        for (int d = 16; d > 0; d /= 2) in |= __shfl_xor_sync(~0u, in, d);
        ${result} *out = (${result} *)a.p[${c_at}] + batch * ${c_batch} + row * ${c_row};
        for (int c = threadIdx.x % 32; c < columns && !in; c += 32)
            out[(column + c) * ${c_col}] = ${zero};
    }
}
)";

/* Sets group, how many rows the tile has and where each lies (row_at, out_at), its columns, the
 * depth to sum over, and pointers; returns where there is nothing to do. */
static const char dot_text[] = R"(
    __shared__ long long row_at[${tm}], out_at[${tm}], tile_first;
    __shared__ int tile_group;
    int tile, column;
    ${e}_order(blockIdx.y * ${n_tiles} + blockIdx.x, tile, column);
    column *= ${tn};
    int columns = ${n} - column < ${tn} ? ${n} - column : ${tn};
    if (tile >= ${tiles}) {
        ${e}_clear(a, tile - ${tiles}, column, columns);
        return;
    }
    if (threadIdx.x == 0) tile_group = -1;
    __syncthreads();
    if (threadIdx.x < 32)
        for (int base = 0, done = 0; base < ${groups} && done <= tile; base += 32) {
            int e = base + threadIdx.x;
            int own = e < ${groups} ? (int)((${e}_count(a, e) + ${tm} - 1) / ${tm}) : 0;
            int sum = own; /* of the tiles up to this group */
            for (int d = 1; d < 32; d *= 2) {
                int before = __shfl_up_sync(~0u, sum, d);
                sum += threadIdx.x >= d ? before : 0;
            }
            int at = tile - (done + sum - own);
            if (at >= 0 && at < own) tile_group = e, tile_first = at * ${tm}LL;
            done += __shfl_sync(~0u, sum, 31);
        }
    __syncthreads();
    int group = tile_group;
    if (group < 0) return;
    long long depth = ${k}, left_rows = ${e}_count(a, group) - tile_first;
    int rows = left_rows < ${tm} ? (int)left_rows : ${tm};
    ${e}_walk walk;
    walk.first = 0;
    ${e}_enter(walk, a, group, 0);
    if (threadIdx.x < rows) {
        long long row = tile_first + threadIdx.x;
        ${e}_seek(walk, a, group, row);
        row += walk.start - walk.first;
        row_at[threadIdx.x] = walk.batch * ${a_batch} + row * ${a_row};
        out_at[threadIdx.x] = walk.batch * ${c_batch} + row * ${c_row};
    }
    __syncthreads();
    const ${memory} *left = (const ${memory} *)a.p[0];
    const ${memory} *right = (const ${memory} *)a.p[1] + group * ${b_group} + column * ${b_col};
    ${result} *out = (${result} *)a.p[${c_at}] + column * ${c_col};
)";

static const char outer_text[] = R"(
    int group = blockIdx.y;
    int m, n;
    ${e}_order(blockIdx.x, m, n);
    m *= ${tm}, n *= ${tn};
    int rows = ${k} - m < ${tm} ? ${k} - m : ${tm}, columns = ${n} - n < ${tn} ? ${n} - n : ${tn};
    long long depth = ${e}_count(a, group);
    ${e}_walk walk, walk_right;
    walk.first = 0;
    ${e}_enter(walk, a, group, 0);
    walk_right = walk;
    const ${memory} *left = (const ${memory} *)a.p[0] + m * ${a_col};
    const ${memory} *right = (const ${memory} *)a.p[1] + n * ${b_col};
    ${result} *out = (${result} *)a.p[${c_at}] + group * ${c_group} + m * ${c_row} + n * ${c_col};
)";

/* 64 x 64, sixteen results a thread, any strides. */
static const char plain_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
${walk}
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    __shared__ ${sum} lefts[16][65], rights[16][65];
    ${locate}
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    ${sum} sum[4][4] = {};
    for (long long d = 0; d < depth; d += 16) {
        for (int i = threadIdx.x; i < 1024; i += 256) {
            int j = ${left_deep} ? i % 16 : i / 64, at = ${left_deep} ? i / 16 : i % 64;
            bool valid = at < rows && d + j < depth;
            ${seek_left}
            lefts[j][at] = valid ? (${sum})${load_left} : 0;
            j = ${right_deep} ? i % 16 : i / 64, at = ${right_deep} ? i / 16 : i % 64;
            valid = at < columns && d + j < depth;
            ${seek_right}
            rights[j][at] = valid ? (${sum})${load_right} : 0;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 16; j++)
#pragma unroll
            for (int u = 0; u < 4; u++)
#pragma unroll
                for (int v = 0; v < 4; v++)
                    sum[u][v] += lefts[j][y + 16 * u] * rights[j][x + 16 * v];
        __syncthreads();
    }
    for (int u = 0; u < 4; u++)
        for (int v = 0; v < 4; v++)
            if (y + 16 * u < rows && x + 16 * v < columns)
                out[${out_row} + (x + 16 * v) * ${c_col}] = ${store};
}
)";

/* 128 x 128 in steps of 64, two stages; eight warps of 64 x 32. Tiles lie in shared memory as in
 * memory: depth innermost (ldmatrix as it is) or outermost (transposed). */
static const char mma_text[] = R"(
static __device__ __forceinline__ void ${e}_tile(unsigned to, int stride, const ml_bf16 *from,
                                                 long long row_stride, long long rows,
                                                 long long columns, int tile_rows, int width) {
    for (int i = threadIdx.x; i < tile_rows * (width / 8); i += 256) {
        int r = i / (width / 8), c = i % (width / 8) * 8;
        bool valid = r < rows && c < columns;
        ${e}_copy(to + (r * stride + c) * 2, from + (valid ? r * row_stride + c : 0),
                  valid ? 16 : 0);
    }
}
${stage_text}
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    extern __shared__ uint4 ${e}_shared[];
    ${locate}
    unsigned stages = ${e}_address(${e}_shared);
    int lane = threadIdx.x % 32;
    int warp_m = threadIdx.x / 128 * 64, warp_n = threadIdx.x / 32 % 4 * 32;
    int left_at = ${left_deep}
                      ? (warp_m + lane % 16) * 72 + lane / 16 * 8
                      : (lane / 16 * 8 + lane % 8) * 136 + warp_m + lane / 8 % 2 * 8;
    int right_at = ${right_deep}
                       ? (warp_n + lane / 16 * 8 + lane % 8) * 72 + lane / 8 % 2 * 8
                       : lane % 16 * 136 + warp_n + lane / 16 * 8;
    float sum[4][4][4] = {};
    if (depth) ${e}_stage(${stage_call}, stages, left, right, 0, rows, columns, depth);
    int stage = 0;
    for (long long d = 0; d < depth; d += 64, stage ^= 1) {
        ${e}_wait();
        __syncthreads();
        if (d + 64 < depth)
            ${e}_stage(${stage_call}, stages + (stage ^ 1) * ${stage_bytes}, left, right, d + 64,
                       rows, columns, depth);
        unsigned lefts = stages + stage * ${stage_bytes} + left_at * 2;
        unsigned rights = stages + stage * ${stage_bytes} + ${left_bytes} + right_at * 2;
#pragma unroll
        for (int k = 0; k < 64; k += 16) {
            unsigned x[4][4], y[2][4];
#pragma unroll
            for (int u = 0; u < 4; u++)
                if (${left_deep}) ${e}_matrices(x[u], lefts + (u * 16 * 72 + k) * 2);
                else ${e}_transposed(x[u], lefts + (k * 136 + u * 16) * 2);
#pragma unroll
            for (int v = 0; v < 2; v++)
                if (${right_deep}) ${e}_matrices(y[v], rights + (v * 16 * 72 + k) * 2);
                else ${e}_transposed(y[v], rights + (k * 136 + v * 16) * 2);
#pragma unroll
            for (int u = 0; u < 4; u++)
#pragma unroll
                for (int v = 0; v < 4; v++)
                    ${e}_mma(sum[u][v], x[u], y[v / 2][v % 2 * 2], y[v / 2][v % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int u = 0; u < 4; u++)
#pragma unroll
        for (int v = 0; v < 4; v++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int r = warp_m + u * 16 + i * 8 + lane / 4, c = warp_n + v * 8 + lane % 4 * 2;
                if (r >= rows || c >= columns) continue;
                ${write_pair}
            }
}
)";

/* After kernels that do not: sums of the squares of 16 x 256 results, read again. */
static const char squares_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    __shared__ float warps[8];
    int x = blockIdx.x % ${squares_wide}, y = blockIdx.x / ${squares_wide}, group = blockIdx.y;
    int column = x * 256 + threadIdx.x, row = y * 16;
    const ${result} *from = (const ${result} *)a.p[${c_at}];
    from += group * ${c_group} + column * ${c_col};
    float sum = 0;
    for (int i = row; i < row + 16 && i < ${k} && column < ${n}; i++)
        sum += from[i * ${c_row}] * from[i * ${c_row}];
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < 8; i++) sum += warps[i];
    if (threadIdx.x == 0)
        ((float *)a.p[${s_at}])[group * ${s_group} + y * ${s_row} + x * ${s_col}] = sum;
}
)";

/* After kernels that do not: what follows a row's halves. */
static const char gated_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
${gated}
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    long long batch = blockIdx.x / ${rows}, row = blockIdx.x % ${rows};
    const ${result} *from = (const ${result} *)a.p[${c_at}] + batch * ${c_batch} + row * ${c_row};
    ml_bf16 *out = (ml_bf16 *)a.p[${s_at}] + batch * ${s_batch} + row * ${s_row};
    for (long long c = threadIdx.x; c < ${half}; c += 256)
        out[c * ${s_col}] = ml_store_bf16(
            ${e}_gated(ml_load_bf16(from[c * ${c_col}]),
                       ml_load_bf16(from[(c + ${half}) * ${c_col}]), ${row_numbers}));
}
)";

/* Rows of the tile by the table; the matrix of the group. */
static const char dot_stage_text[] = R"(
static __device__ __forceinline__ void ${e}_stage(const long long *row_at, unsigned to,
                                                  const ml_bf16 *left, const ml_bf16 *right,
                                                  long long d, int rows, int columns,
                                                  long long depth) {
    for (int i = threadIdx.x; i < 1024; i += 256) {
        int r = i / 8, c = i % 8 * 8;
        bool valid = r < rows && d + c < depth;
        ${e}_copy(to + (r * 72 + c) * 2, left + (valid ? row_at[r] + d + c : 0), valid ? 16 : 0);
    }
    to += ${left_bytes};
    if (${right_deep}) ${e}_tile(to, 72, right + d, ${right_stride}, columns, depth - d, 128, 64);
    else
        ${e}_tile(to, 136, right + d * ${right_stride}, ${right_stride}, depth - d, columns, 64,
                  128);
    ${e}_commit();
}
)";

/* The same rows of both; a thread's come in ascending order. */
static const char outer_stage_text[] = R"(
static __device__ __forceinline__ void ${e}_stage(${e}_walk &walk, ${e}_arguments &a, int group,
                                                  unsigned to, const ml_bf16 *left,
                                                  const ml_bf16 *right, long long d, int rows,
                                                  int columns, long long depth) {
    for (int i = threadIdx.x; i < 1024; i += 256) {
        int r = i / 16, c = i % 16 * 8;
        bool valid = d + r < depth;
        if (valid) ${e}_seek(walk, a, group, d + r);
        long long row = d + r - walk.first + walk.start;
        const ml_bf16 *from =
            left + (valid && c < rows ? walk.batch * ${a_batch} + row * ${a_row} + c : 0);
        ${e}_copy(to + (r * 136 + c) * 2, from, valid && c < rows ? 16 : 0);
        from = right + (valid && c < columns ? walk.batch * ${b_batch} + row * ${b_row} + c : 0);
        ${e}_copy(to + ${left_bytes} + (r * 136 + c) * 2, from, valid && c < columns ? 16 : 0);
    }
    ${e}_commit();
}
)";

static int64_t stride_of(const ml_value *v, ml_axis axis) {
    int at = axis ? ml_type_find(&v->type, axis) : -1;
    return at < 0 ? 0 : v->stride[at];
}

/* The axis that is neither; every operand has one of its own. */
static ml_axis other_axis(const ml_type *t, ml_axis one, ml_axis two) {
    int at = 0;
    while (at < t->rank && (t->axis[at] == one || t->axis[at] == two)) at++;
    if (at == t->rank) ml_raise(ML_INTERNAL, "a product by groups has an operand of one axis");
    return t->axis[at];
}

static ml_ragged *describe(const ml_schedule *s, const ml_step *step) {
    ml_ragged *r = ML_NEW(s->arena, ml_ragged);
    const int64_t *args = ml_graph_args(s->graph, step->node);
    const ml_value *a = template_value(s, step, 0), *b = template_value(s, step, 1);
    const ml_value *starts = template_value(s, step, 2);
    const ml_value *c = template_value(s, step, step->read_count);
    ml_axis rows = (ml_axis)args[0], groups = (ml_axis)args[1];
    r->outer = ml_graph_node(s->graph, step->node)->op == ML_OP_RAGGED_OUTER;
    ml_axis batch = 0;
    for (int i = 0; i < starts->type.rank; i++)
        if (starts->type.axis[i] != groups) batch = starts->type.axis[i];
    ml_axis k = other_axis(&a->type, rows, batch);
    ml_axis n = r->outer ? other_axis(&b->type, rows, batch) : other_axis(&b->type, groups, k);
    const ml_value *ends = template_value(s, step, 3);
    r->batch = batch ? a->type.size[ml_type_find(&a->type, batch)] : 1;
    r->a_batch = stride_of(a, batch), r->c_batch = r->outer ? 0 : stride_of(c, batch);
    r->b_batch = r->outer ? stride_of(b, batch) : 0;
    r->start_batch = stride_of(starts, batch), r->end_batch = stride_of(ends, batch);
    r->start_stride = stride_of(starts, groups), r->end_stride = stride_of(ends, groups);
    r->rows = a->type.size[ml_type_find(&a->type, rows)];
    r->groups = starts->type.size[ml_type_find(&starts->type, groups)];
    r->k = a->type.size[ml_type_find(&a->type, k)];
    r->n = b->type.size[ml_type_find(&b->type, n)];
    r->a_row = stride_of(a, rows), r->a_col = stride_of(a, k);
    r->b_group = r->outer ? 0 : stride_of(b, groups);
    r->b_row = stride_of(b, r->outer ? rows : k), r->b_col = stride_of(b, n);
    r->c_group = r->outer ? stride_of(c, groups) : 0;
    r->c_row = stride_of(c, r->outer ? k : rows), r->c_col = stride_of(c, n);
    r->squares = r->outer && args[2] != 0;
    r->gated = r->outer ? 0 : (ml_ref)args[3];
    r->rows_known = step->read_count - PRODUCT_READS;
    if (r->squares || r->gated) {
        const ml_value *second = template_value(s, step, step->read_count + 1);
        r->s_group = stride_of(second, groups), r->s_batch = stride_of(second, batch);
        r->s_row = stride_of(second, r->outer ? k : rows), r->s_col = stride_of(second, n);
    }
    r->dtype = (ml_dtype)a->type.dtype, r->c_dtype = (ml_dtype)c->type.dtype;
    return r;
}

static void set(printer *p, const char *name, int64_t value) {
    template_set(&p->text, name, "%lldLL", (long long)value);
}

/* 16-byte copies of whole groups of eight: one unit stride, the other sizes multiples of eight. */
static bool mma_serves(const printer *p) {
    const ml_ragged *r = p->r;
    if (r->dtype != ML_BF16 || p->schedule->target->arch < 80) return false;
    if (r->c_dtype != ML_BF16 && r->c_dtype != ML_F32) return false;
    if (r->c_col != 1 || (r->c_row | r->c_group) % 2 != 0) return false;
    const int aligned[] = {0, 1, p->step->read_count};
    for (int i = 0; i < 3; i++)
        if (template_value(p->schedule, p->step, aligned[i])->offset % 8) return false;
    if (r->a_batch % 8 || r->b_batch % 8 || r->c_batch % 2) return false;
    if (r->k % 8 || r->n % 8 || r->a_col != 1 || r->a_row % 8) return false;
    if (r->outer) return r->b_col == 1 && r->b_row % 8 == 0;
    if (r->b_group % 8) return false;
    return r->b_col == 1 ? r->b_row % 8 == 0 : r->b_row == 1 && r->b_col % 8 == 0;
}

/* Where a result has more columns than half a tile of theirs. Other GPUs have no such products. */
static bool wgmma_serves(const printer *p) {
    enum { HOPPER = 90, NARROW = 128 };
    return mma_serves(p) && p->schedule->target->arch == HOPPER && p->r->n > NARROW &&
           ml_knobs()->wgmma;
}

static ml_kernel *wgmma_kernel(printer *p) {
    const ml_ragged *r = p->r;
    return template_wgmma(&p->text, r->outer, !r->outer && r->b_col != 1, r->c_dtype == ML_BF16,
                          p->step->read_count + p->step->write_count);
}

/* Blocks that clear rows of no group; each looks at that many rows of one element of the batch. */
enum { CLEAR_WINDOW = 1024 };
static int64_t windows_of(const ml_ragged *r) {
    return (r->rows + CLEAR_WINDOW - 1) / CLEAR_WINDOW;
}

/* Columns of a matrix that stay in the cache while rows pass by; of an outer product, as many as
 * there are rows in what runs together. */
static int64_t band_of(const printer *p) {
    enum { CACHED_BYTES = 16 << 20, SQUARE = 12 };
    int64_t columns = (p->r->n + p->tile_n - 1) / p->tile_n;
    int64_t bytes = p->r->k * p->tile_n * ml_dtypes[p->r->dtype].bytes;
    int64_t band = p->r->outer ? SQUARE : CACHED_BYTES / (bytes + 1);
    if (band > columns) return columns;
    return band > 1 ? band : 1;
}

/* ${gated}: declares ${e}_gated(x0, x1, x2, x3), of the halves and the numbers of a row; these:
 * ${row_numbers}, of row `row` of element `batch`. */
static void set_gated(printer *p) {
    const ml_ragged *r = p->r;
    ml_arena *arena = p->text.arena;
    static const char *const names[] = {"x0", "x1", "x2", "x3"};
    const ml_function f = {.g = p->schedule->graph, .values = names};
    ml_text body = {.arena = arena}, numbers = {.arena = arena};
    const ml_graph *g = f.g;
    ml_ref root = r->gated; /* rounded where it is written */
    if (ml_graph_node(g, root)->op == ML_OP_CAST &&
        ml_graph_type(g, ml_graph_source(g, root, 0))->dtype == ML_F32)
        root = ml_graph_source(g, root, 0);
    const char *result = ml_emit_function(&body, &f, root, "gated_");
    template_set_text(&p->text, "gated",
                      ml_arena_format(arena,
                                      "static __device__ __forceinline__ float ${e}_gated(float "
                                      "x0, float x1, float x2, float x3) {\n"
                                      "(void)x2, (void)x3;\n%sreturn %s;\n}\n",
                                      body.text ? body.text : "", result));
    for (int i = 0; i < RAGGED_GATED_ROWS; i++) {
        if (i >= r->rows_known) {
            ml_text_add(&numbers, "%s0.0f", i ? ", " : "");
            continue;
        }
        const ml_value *v = template_value(p->schedule, p->step, PRODUCT_READS + i);
        const ml_value *starts = template_value(p->schedule, p->step, 2);
        ml_axis rows = (ml_axis)ml_graph_args(p->schedule->graph, p->step->node)[0], batch = 0;
        for (int k = 0; k < v->type.rank; k++)
            if (v->type.axis[k] != rows && ml_type_find(&starts->type, v->type.axis[k]) >= 0)
                batch = v->type.axis[k];
        ml_text_add(&numbers, "%s((const float *)a.p[%d])[batch * %lldLL + row * %lldLL]",
                    i ? ", " : "", PRODUCT_READS + i, (long long)stride_of(v, batch),
                    (long long)stride_of(v, rows));
    }
    template_set_text(&p->text, "row_numbers", numbers.text);
    template_set_text(&p->text, "quick",
                      "#define ml_exp_f32 ml_quick_exp_f32\n" /* rounded to bf16 anyway */
                      "#define ml_sigmoid_f32 ml_quick_sigmoid_f32\n"
                      "#define ml_tanh_f32 ml_quick_tanh_f32\n");
    set(p, "half", r->n / 2);
}

static void set_sizes(printer *p) {
    const ml_ragged *r = p->r;
    template_set(&p->text, "pointers", "%d", p->step->read_count + p->step->write_count);
    template_set(&p->text, "groups", "%lld", (long long)r->groups);
    template_set(&p->text, "k", "%lld", (long long)r->k);
    template_set(&p->text, "n", "%lld", (long long)r->n);
    set(p, "rows", r->rows);
    set(p, "a_batch", r->a_batch), set(p, "b_batch", r->b_batch), set(p, "c_batch", r->c_batch);
    set(p, "start_batch", r->start_batch), set(p, "end_batch", r->end_batch);
    template_set(&p->text, "batches", "%lld", (long long)r->batch);
    template_set(&p->text, "tiles", "%lld", (long long)p->tiles);
    template_set(&p->text, "window", "%d", CLEAR_WINDOW);
    template_set(&p->text, "height", "%lld", (long long)p->height);
    template_set(&p->text, "band", "%lld", (long long)band_of(p));
    template_set(&p->text, "windows", "%lld", (long long)windows_of(r));
    template_set_text(&p->text, "zero", template_store(p->text.arena, r->c_dtype, "0.0f"));
    const char *walk =
        r->outer ? walk_text : ml_arena_format(p->text.arena, "%s%s", walk_text, clear_text);
    template_set_text(&p->text, "walk", walk);
    set(p, "a_row", r->a_row), set(p, "a_col", r->a_col);
    set(p, "b_group", r->b_group), set(p, "b_row", r->b_row), set(p, "b_col", r->b_col);
    set(p, "c_group", r->c_group), set(p, "c_row", r->c_row), set(p, "c_col", r->c_col);
    template_set(&p->text, "c_at", "%d", p->step->read_count);
    template_set(&p->text, "s_at", "%d", p->step->read_count + 1);
    set(p, "s_group", r->s_group), set(p, "s_batch", r->s_batch);
    set(p, "s_row", r->s_row), set(p, "s_col", r->s_col);
    template_set_text(&p->text, "quick", "");
    if (r->gated) set_gated(p);
    set(p, "start_stride", r->start_stride), set(p, "end_stride", r->end_stride);
    template_set(&p->text, "tm", "%lld", (long long)p->tile_m);
    template_set(&p->text, "tn", "%lld", (long long)p->tile_n);
    template_set(&p->text, "n_tiles", "%lld", (long long)((r->n + p->tile_n - 1) / p->tile_n));
    template_set_text(&p->text, "memory", emit_memory_type(r->dtype));
    template_set_text(&p->text, "result", emit_memory_type(r->c_dtype));
    template_set_text(&p->text, "locate", r->outer ? outer_text : dot_text);
}

static ml_kernel *mma_kernel(printer *p) {
    const ml_ragged *r = p->r;
    ml_template *t = &p->text;
    bool left_deep = !r->outer, right_deep = !r->outer && r->b_col != 1;
    int64_t deep_bytes = 128 * 72 * 2, flat_bytes = 64 * 136 * 2;
    int64_t left_bytes = left_deep ? deep_bytes : flat_bytes;
    int64_t stage_bytes = left_bytes + (right_deep ? deep_bytes : flat_bytes);
    template_set_text(t, "quick", "");
    template_set(t, "left_deep", "%d", left_deep);
    template_set(t, "right_deep", "%d", right_deep);
    template_set_text(t, "stage_text", r->outer ? outer_stage_text : dot_stage_text);
    template_set_text(t, "stage_call", r->outer ? "walk, a, group" : "row_at");
    set(p, "right_stride", right_deep ? r->b_col : r->b_row);
    template_set(t, "left_bytes", "%lld", (long long)left_bytes);
    template_set(t, "stage_bytes", "%lld", (long long)stage_bytes);
    template_set_text(t, "write_pair",
                      r->c_dtype == ML_BF16 ? "*(unsigned *)(out + ${out_row} + c) = "
                                              "${e}_pack(sum[u][v][2 * i], sum[u][v][2 * i + 1]);"
                                            : "out[${out_row} + c] = sum[u][v][2 * i], "
                                              "out[${out_row} + c + 1] = sum[u][v][2 * i + 1];");
    template_set_text(t, "out_row", r->outer ? "r * ${c_row}" : "out_at[r]");
    const char *body = ml_arena_format(t->arena, "%s${walk}%s", template_mma_ptx, mma_text);
    ml_kernel *kernel = template_kernel(t, body, r->outer ? "ragged_outer" : "ragged_dot",
                                        p->step->read_count + p->step->write_count);
    kernel->shared_bytes = (uint32_t)(2 * stage_bytes);
    return kernel;
}

static ml_kernel *plain_kernel(printer *p) {
    const ml_ragged *r = p->r;
    ml_template *t = &p->text;
    int64_t a_deep = r->outer ? r->a_row : r->a_col;
    const char *left =
        r->outer ? "left[walk.batch * ${a_batch} + (d + j - walk.first + walk.start) * ${a_row} + "
                   "at * ${a_col}]"
                 : "left[row_at[at] + (d + j) * ${a_col}]";
    const char *right = r->outer
                            ? "right[walk_right.batch * ${b_batch} + (d + j - walk_right.first + "
                              "walk_right.start) * ${b_row} + at * ${b_col}]"
                            : "right[at * ${b_col} + (d + j) * ${b_row}]";
    template_set_text(t, "out_row", r->outer ? "(y + 16 * u) * ${c_row}" : "out_at[y + 16 * u]");
    template_set_text(t, "seek_left",
                      r->outer ? "if (valid) ${e}_seek(walk, a, group, d + j);" : "");
    template_set_text(t, "seek_right",
                      r->outer ? "if (valid) ${e}_seek(walk_right, a, group, d + j);" : "");
    template_set_text(t, "sum", r->dtype == ML_F64 ? "double" : "float");
    template_set(t, "left_deep", "%d", a_deep == 1);
    template_set(t, "right_deep", "%d", r->b_row == 1);
    template_set_text(t, "load_left", template_load(t->arena, r->dtype, left));
    template_set_text(t, "load_right", template_load(t->arena, r->dtype, right));
    template_set_text(t, "store", template_store(t->arena, r->c_dtype, "sum[u][v]"));
    return template_kernel(t, plain_text, r->outer ? "ragged_outer plain" : "ragged_dot plain",
                           p->step->read_count + p->step->write_count);
}

static ml_kernel *squares_kernel(printer *p) {
    const ml_ragged *r = p->r;
    const int64_t rows = RAGGED_SQUARE_ROWS, columns = RAGGED_SQUARE_COLUMNS;
    int64_t wide = (r->n + columns - 1) / columns;
    template_set(&p->text, "squares_wide", "%lld", (long long)wide);
    ml_kernel *kernel = template_kernel(&p->text, squares_text, "squares",
                                        p->step->read_count + p->step->write_count);
    template_launch(kernel, wide * ((r->k + rows - 1) / rows), r->groups, 1, 256, 0);
    return kernel;
}

static ml_kernel *gated_kernel(printer *p) {
    ml_kernel *kernel =
        template_kernel(&p->text, gated_text, "gated", p->step->read_count + p->step->write_count);
    template_launch(kernel, p->r->batch * p->r->rows, 1, 1, 256, 0);
    return kernel;
}

static bool tma_serves(const printer *p) {
    enum { SIXTEEN = 8 }; /* elements of 16 bytes, at least */
    return wgmma_serves(p) && ml_knobs()->tma && template_tma_serves(p->r) &&
           template_value(p->schedule, p->step, p->step->read_count)->offset % SIXTEEN == 0 &&
           (!p->r->gated ||
            template_value(p->schedule, p->step, p->step->read_count + 1)->offset % SIXTEEN == 0);
}

typedef enum { PLAIN, MMA, WGMMA, TMA } method;

static ml_kernel *print_kernel(printer *p, method how) {
    const ml_ragged *r = p->r;
    p->tile_m = how == PLAIN ? 64 : 128;
    p->tile_n = how >= WGMMA ? 256 : p->tile_m;
    int64_t columns = (r->n + p->tile_n - 1) / p->tile_n;
    int64_t clearing = r->batch * windows_of(r);
    p->tiles = r->batch * r->rows / p->tile_m + r->groups; /* each group may end in a part of one */
    if (r->rows > INT32_MAX || r->k > INT32_MAX || r->n > INT32_MAX || r->groups > 65535 ||
        p->tiles + clearing > 65535)
        ml_raise(ML_INVALID, "a product of %lld rows in %lld groups is too large for the GPU",
                 (long long)(r->batch * r->rows), (long long)r->groups);
    p->height = r->outer ? (r->k + p->tile_m - 1) / p->tile_m : p->tiles + clearing;
    set_sizes(p);
    if (how == TMA)
        return template_tma(&p->text, r, p->schedule->target->multiprocessors,
                            p->step->read_count + p->step->write_count);
    ml_kernel *kernel = how == WGMMA ? wgmma_kernel(p)
                        : how == MMA ? mma_kernel(p)
                                     : plain_kernel(p);
    uint32_t shared = kernel->shared_bytes;
    if (r->outer)
        template_launch(kernel, columns * p->height, r->groups, 1, 256, shared);
    else
        template_launch(kernel, columns, p->height, 1, 256, shared);
    if (r->squares) kernel->next = squares_kernel(p);
    if (r->gated) kernel->next = gated_kernel(p);
    return kernel;
}

void ml_template_ragged(ml_schedule *s, ml_step *step) {
    printer p = {.schedule = s, .step = step, .text = template_begin(s)};
    p.r = step->ragged = describe(s, step);
    if (s->target->kind != ML_TARGET_CUDA) {
        step->kind = ML_STEP_RAGGED;
        return;
    }
    method best = tma_serves(&p) ? TMA : wgmma_serves(&p) ? WGMMA : mma_serves(&p) ? MMA : PLAIN;
    for (method how = best > MMA ? MMA : best; how <= best;
         how++) { /* each falls back on the last */
        ml_kernel *otherwise = step->kernel;
        step->kernel = print_kernel(&p, how);
        step->kernel->otherwise = otherwise;
    }
}
