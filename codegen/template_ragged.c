/* Products by groups of rows (lower.h, ml_ragged) on CUDA. Offsets are read on the device: the host
 * never waits for them, and the grid is what the most ragged groups would need.
 *
 * A block computes a tile of the result. RAGGED_DOT: blocks count tiles through the groups, and
 * through the rows between them, which are cleared; a tile never crosses two groups. RAGGED_OUTER:
 * a tile belongs to one group and sums over its rows in order, so that results repeat. bf16 goes to
 * tensor cores (mma.sync, cp.async one step ahead), everything else to plain multiplications. */
#include "codegen/template.h"

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    const ml_ragged *r;
    int64_t tile_m, tile_n, tiles; /* most row tiles of one element of the batch */
} printer;

/* Sets group (-1: none), rows of the tile `row`, its sizes, the depth to sum over, and pointers to
 * the first element of a, b and c; returns where there is nothing to do. */
static const char dot_text[] = R"(
    int group = -1, tile = blockIdx.y % ${tiles}, rows = 0;
    long long row = 0, done = 0, batch = blockIdx.y / ${tiles};
    const int *starts = (const int *)a.p[2] + batch * ${start_batch};
    const int *ends = (const int *)a.p[3] + batch * ${end_batch};
    for (int e = 0; e <= ${groups}; e++) { /* the rows before group e, then its own */
        long long start = ${rows}, end = ${rows};
        if (e < ${groups}) start = starts[e * ${start_stride}], end = ends[e * ${end_stride}];
        start = start < done ? done : start > ${rows} ? ${rows} : start;
        end = end < start ? start : end > ${rows} ? ${rows} : end;
        int before = (int)((start - done + ${tm} - 1) / ${tm});
        int own = (int)((end - start + ${tm} - 1) / ${tm});
        if (tile >= 0 && tile < before + own) {
            row = tile < before ? done + tile * ${tm}LL : start + (tile - before) * ${tm}LL;
            long long left = (tile < before ? start : end) - row;
            rows = left < ${tm} ? (int)left : ${tm};
            if (tile >= before) group = e;
        }
        tile -= before + own;
        done = end;
    }
    if (rows == 0) return;
    int column = blockIdx.x * ${tn};
    int columns = ${n} - column < ${tn} ? ${n} - column : ${tn};
    long long depth = group < 0 ? 0 : ${k};
    const ${memory} *left = (const ${memory} *)a.p[0] + batch * ${a_batch} + row * ${a_row};
    const ${memory} *right = (const ${memory} *)a.p[1] + (group < 0 ? 0 : group) * ${b_group} +
                             column * ${b_col};
    ${result} *out = (${result} *)a.p[4] + batch * ${c_batch} + row * ${c_row} + column * ${c_col};
)";

static const char outer_text[] = R"(
    int group = blockIdx.y;
    int m = blockIdx.x / ${n_tiles} * ${tm}, n = blockIdx.x % ${n_tiles} * ${tn};
    int rows = ${k} - m < ${tm} ? ${k} - m : ${tm}, columns = ${n} - n < ${tn} ? ${n} - n : ${tn};
    long long depth = 0;
    const ${memory} *left = 0, *right = 0;
    ${result} *out = (${result} *)a.p[4] + group * ${c_group} + m * ${c_row} + n * ${c_col};
)";

/* The rows of the group in one element of the batch: what the sum goes over next. */
static const char segment_text[] = R"(
        long long start = ((const int *)a.p[2])[batch * ${start_batch} + group * ${start_stride}];
        long long end = ((const int *)a.p[3])[batch * ${end_batch} + group * ${end_stride}];
        start = start < 0 ? 0 : start;
        end = end > ${rows} ? ${rows} : end;
        depth = end > start ? end - start : 0;
        start = depth ? start : 0;
        left = (const ${memory} *)a.p[0] + batch * ${a_batch} + start * ${a_row} + m * ${a_col};
        right = (const ${memory} *)a.p[1] + batch * ${b_batch} + start * ${b_row} + n * ${b_col};
)";

/* 64 x 64, sixteen results a thread, any strides. */
static const char plain_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    __shared__ ${sum} lefts[16][65], rights[16][65];
    ${locate}
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    ${sum} sum[4][4] = {};
    ${each_segment} {
    ${segment}
    for (long long d = 0; d < depth; d += 16) {
        for (int i = threadIdx.x; i < 1024; i += 256) {
            int j = ${left_deep} ? i % 16 : i / 64, at = ${left_deep} ? i / 16 : i % 64;
            bool valid = at < rows && d + j < depth;
            lefts[j][at] = valid ? (${sum})${load_left} : 0;
            j = ${right_deep} ? i % 16 : i / 64, at = ${right_deep} ? i / 16 : i % 64;
            valid = at < columns && d + j < depth;
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
    }
    for (int u = 0; u < 4; u++)
        for (int v = 0; v < 4; v++)
            if (y + 16 * u < rows && x + 16 * v < columns)
                out[(y + 16 * u) * ${c_row} + (x + 16 * v) * ${c_col}] = ${store};
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
static __device__ __forceinline__ void ${e}_stage(unsigned to, const ml_bf16 *left,
                                                  const ml_bf16 *right, long long d, int rows,
                                                  int columns, long long depth) {
    if (${left_deep}) ${e}_tile(to, 72, left + d, ${left_stride}, rows, depth - d, 128, 64);
    else ${e}_tile(to, 136, left + d * ${left_stride}, ${left_stride}, depth - d, rows, 64, 128);
    to += ${left_bytes};
    if (${right_deep}) ${e}_tile(to, 72, right + d, ${right_stride}, columns, depth - d, 128, 64);
    else
        ${e}_tile(to, 136, right + d * ${right_stride}, ${right_stride}, depth - d, columns, 64,
                  128);
    ${e}_commit();
}
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
    ${each_segment} {
    ${segment}
    __syncthreads(); /* the stages are free again */
    if (depth) ${e}_stage(stages, left, right, 0, rows, columns, depth);
    int stage = 0;
    for (long long d = 0; d < depth; d += 64, stage ^= 1) {
        ${e}_wait();
        __syncthreads();
        if (d + 64 < depth)
            ${e}_stage(stages + (stage ^ 1) * ${stage_bytes}, left, right, d + 64, rows, columns,
                       depth);
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
    const ml_value *starts = template_value(s, step, 2), *c = template_value(s, step, 4);
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
    for (int i = 0; i < 5; i++)
        if (i != 2 && i != 3 && template_value(p->schedule, p->step, i)->offset % 8) return false;
    if (r->a_batch % 8 || r->b_batch % 8 || r->c_batch % 2) return false;
    if (r->k % 8 || r->n % 8 || r->a_col != 1 || r->a_row % 8) return false;
    if (r->outer) return r->b_col == 1 && r->b_row % 8 == 0;
    if (r->b_group % 8) return false;
    return r->b_col == 1 ? r->b_row % 8 == 0 : r->b_row == 1 && r->b_col % 8 == 0;
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
    template_set_text(&p->text, "each_segment",
                      r->outer ? "for (long long batch = 0; batch < ${batches}; batch++)" : "");
    template_set(&p->text, "batches", "%lld", (long long)r->batch);
    template_set_text(&p->text, "segment", r->outer ? segment_text : "");
    template_set(&p->text, "tiles", "%lld", (long long)p->tiles);
    set(p, "a_row", r->a_row), set(p, "a_col", r->a_col);
    set(p, "b_group", r->b_group), set(p, "b_row", r->b_row), set(p, "b_col", r->b_col);
    set(p, "c_group", r->c_group), set(p, "c_row", r->c_row), set(p, "c_col", r->c_col);
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
    set(p, "left_stride", r->a_row);
    set(p, "right_stride", right_deep ? r->b_col : r->b_row);
    template_set(t, "left_bytes", "%lld", (long long)left_bytes);
    template_set(t, "stage_bytes", "%lld", (long long)stage_bytes);
    template_set_text(t, "write_pair",
                      r->c_dtype == ML_BF16 ? "*(unsigned *)(out + r * ${c_row} + c) = "
                                              "${e}_pack(sum[u][v][2 * i], sum[u][v][2 * i + 1]);"
                                            : "out[r * ${c_row} + c] = sum[u][v][2 * i], "
                                              "out[r * ${c_row} + c + 1] = sum[u][v][2 * i + 1];");
    const char *body = ml_arena_format(t->arena, "%s%s", template_mma_ptx, mma_text);
    ml_kernel *kernel = template_kernel(t, body, r->outer ? "ragged_outer" : "ragged_dot",
                                        p->step->read_count + p->step->write_count);
    kernel->shared_bytes = (uint32_t)(2 * stage_bytes);
    return kernel;
}

static ml_kernel *plain_kernel(printer *p) {
    const ml_ragged *r = p->r;
    ml_template *t = &p->text;
    int64_t a_at = r->outer ? r->a_col : r->a_row, a_deep = r->outer ? r->a_row : r->a_col;
    const char *left = ml_arena_format(t->arena, "left[at * %lldLL + (d + j) * %lldLL]",
                                       (long long)a_at, (long long)a_deep);
    const char *right = ml_arena_format(t->arena, "right[at * %lldLL + (d + j) * %lldLL]",
                                        (long long)r->b_col, (long long)r->b_row);
    template_set_text(t, "sum", r->dtype == ML_F64 ? "double" : "float");
    template_set(t, "left_deep", "%d", a_deep == 1);
    template_set(t, "right_deep", "%d", r->b_row == 1);
    template_set_text(t, "load_left", template_load(t->arena, r->dtype, left));
    template_set_text(t, "load_right", template_load(t->arena, r->dtype, right));
    template_set_text(t, "store", template_store(t->arena, r->c_dtype, "sum[u][v]"));
    return template_kernel(t, plain_text, r->outer ? "ragged_outer plain" : "ragged_dot plain",
                           p->step->read_count + p->step->write_count);
}

void ml_template_ragged(ml_schedule *s, ml_step *step) {
    printer p = {.schedule = s, .step = step, .text = {.arena = s->arena}};
    p.r = step->ragged = describe(s, step);
    if (s->target->kind != ML_TARGET_CUDA) {
        step->kind = ML_STEP_RAGGED;
        return;
    }
    const ml_ragged *r = p.r;
    bool mma = mma_serves(&p);
    p.tile_m = p.tile_n = mma ? 128 : 64;
    int64_t columns = (r->n + p.tile_n - 1) / p.tile_n;
    p.tiles = r->rows / p.tile_m + 2 * r->groups + 1; /* each range may end in a part of one */
    if (r->rows > INT32_MAX || r->k > INT32_MAX || r->n > INT32_MAX || r->groups > 65535 ||
        p.tiles * r->batch > 65535)
        ml_raise(ML_INVALID, "a product of %lld rows in %lld groups is too large for the GPU",
                 (long long)(r->batch * r->rows), (long long)r->groups);
    set_sizes(&p);
    step->kernel = mma ? mma_kernel(&p) : plain_kernel(&p);
    uint32_t shared = step->kernel->shared_bytes;
    if (r->outer)
        template_launch(step->kernel, columns * ((r->k + p.tile_m - 1) / p.tile_m), r->groups, 1,
                        256, shared);
    else
        template_launch(step->kernel, columns, p.tiles * r->batch, 1, 256, shared);
}
