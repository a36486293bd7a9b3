/* SCATTER_ADD: result[batch, index[batch, token], column] += value[batch, token, column], from 0,
 * or from a third operand that lies as the result does and is mostly in its place.
 *
 * Axes of the value that index and result share are batch axes, those of the index alone are
 * tokens, the others columns. Each element of the result is summed in an order that depends on
 * nothing but the shapes and the indices; indices outside the result are skipped.
 *
 * CPU: units own a block of columns and a range of rows and walk all tokens. CUDA: with few tokens
 * a thread an element compares every index; else tokens are sorted by row (stable radix sort),
 * cut into chunks so that rows with many tokens are summed by many blocks, and rows add up their
 * tokens or their chunks. */
#include <string.h>

#include "codegen/kernels/template.h"

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    int64_t batches, tokens, columns, rows; /* rows: size of the scattered axis */
    ml_dtype value_dtype, dtype;            /* of the value and of the result */
    bool vector;                            /* columns can be moved four at a time */
    bool based;                             /* on a third operand, of the result's dtype */
} printer;

enum { DIRECT_TOKENS = 16, MAX_DIRECT = 1 << 26, TILES = 256, VECTOR = 4 };

static int64_t stride_of(const ml_value *v, ml_axis axis) {
    int at = ml_type_find(&v->type, axis);
    return at < 0 ? 0 : v->stride[at];
}

static bool is_multiple(const ml_template_loops *loops, int64_t of) {
    for (int i = 0; i < loops->count; i++)
        if (loops->stride[i] % of != 0) return false;
    return true;
}

static const char add_base_text[] = R"(
    out = *(const ${e}_results *)((const ${memory} *)a.p[${base_at}] + place);
    for (int j = 0; j < ${width}; j++) sum[j] += out.x[j];)";

/* Sort the value's axes into batch, tokens and columns, and print the offsets of all operands. */
static void begin(printer *p, ml_schedule *s, ml_step *step) {
    *p = (printer){.schedule = s, .step = step, .text = template_begin(s)};
    ml_template *t = &p->text;
    const ml_value *index = template_value(s, step, 0), *value = template_value(s, step, 1);
    const ml_value *result = template_value(s, step, step->read_count);
    ml_axis along = (ml_axis)ml_graph_args(s->graph, step->node)[0];
    /* [kind][operand]; kinds: batch, token, column; operands: index, value, result */
    ml_template_loops loops[3][3] = {0};
    int64_t total[3] = {1, 1, 1};
    for (int kind = 0; kind < 3; kind++)
        for (int i = 0; i < value->type.rank; i++) {
            ml_axis axis = value->type.axis[i];
            bool indexed = ml_type_find(&index->type, axis) >= 0;
            bool kept = axis != along && ml_type_find(&result->type, axis) >= 0;
            if (kind != (!indexed ? 2 : kept ? 0 : 1)) continue;
            int64_t size = value->type.size[i];
            total[kind] *= size;
            template_loop_add(&loops[kind][0], size, stride_of(index, axis));
            template_loop_add(&loops[kind][1], size, value->stride[i]);
            template_loop_add(&loops[kind][2], size, kind == 1 ? 0 : stride_of(result, axis));
        }
    p->batches = total[0], p->tokens = total[1], p->columns = total[2];
    p->rows = result->type.size[ml_type_find(&result->type, along)];
    p->value_dtype = (ml_dtype)value->type.dtype, p->dtype = (ml_dtype)result->type.dtype;
    int64_t row_stride = stride_of(result, along);
    bool single = loops[2][1].count == 1 && loops[2][2].count == 1 && loops[2][1].stride[0] == 1 &&
                  loops[2][2].stride[0] == 1;
    p->vector = single && p->columns % VECTOR == 0 && row_stride % VECTOR == 0 &&
                value->offset % VECTOR == 0 && result->offset % VECTOR == 0;
    for (int kind = 0; kind < 2; kind++)
        for (int i = 1; i < 3; i++) p->vector &= is_multiple(&loops[kind][i], VECTOR);
    const char *const kinds[] = {"batch", "token", "column"};
    const char *const operands[] = {"index", "value", "result"};
    for (int kind = 0; kind < 3; kind++)
        for (int i = 0; i < 3; i++)
            template_set_text(t, ml_arena_format(s->arena, "%s_%s", operands[i], kinds[kind]),
                              template_offset(s->arena, &loops[kind][i], kinds[kind]));
    template_set(t, "row_stride", "%lldLL", (long long)row_stride);
    template_set(t, "batches", "%lldLL", (long long)p->batches);
    template_set(t, "tokens", "%lldLL", (long long)p->tokens);
    template_set(t, "columns", "%lldLL", (long long)p->columns);
    template_set(t, "rows", "%lldLL", (long long)p->rows);
    template_set_text(t, "value", emit_memory_type(p->value_dtype));
    template_set_text(t, "memory", emit_memory_type(p->dtype));
    template_set_text(t, "sum", emit_compute_type(p->dtype));
    /* integers wrap around */
    const char *adder = p->dtype == ML_I64 ? "unsigned long long" : "unsigned";
    bool is_float = ml_dtypes[p->dtype].kind == ML_KIND_FLOAT;
    template_set_text(t, "adder", is_float ? emit_compute_type(p->dtype) : adder);
    template_set_text(t, "load", p->value_dtype == ML_BF16 ? "ml_load_bf16" : "");
    template_set_text(t, "store", p->dtype == ML_BF16 ? "ml_store_bf16" : "");
    p->based = step->read_count == 3;
    template_set(t, "based", "%d", p->based);
    template_set_text(t, "start", p->based ? "((const ${memory} *)a.p[${base_at}])[at]" : "0");
    template_set_text(t, "add_base", p->based ? add_base_text : "");
    template_set(t, "base_at", "%d", p->based ? 2 : step->read_count);
    template_set(t, "result_at", "%d", step->read_count);
}

/* ---- CPU ---- */

static const char cpu_text[] = R"(
static void ${e}_unit(const int *index, const ${value} *value, const ${memory} *base,
                      ${sums_memory} *sums, ${memory} *result, long long batch,
                      long long first_row, long long last_row, long long first_column,
                      long long last_column) {
    for (long long row = first_row; row < last_row; row++)
        for (long long column = first_column; column < last_column; column++)
            if (!${based})
                sums[row * ${sums_row} + ${sums_column}] = 0;
            else if (base != result)
                result[row * ${row_stride} + ${result_column}] =
                    base[row * ${row_stride} + ${result_column}];
    for (long long token = 0; token < ${tokens}; token++) {
        long long row = index[${index_token}];
        if (row < first_row || row >= last_row) continue;
        const ${value} *from = value + ${value_token};
        ${sums_memory} *to = sums + row * ${sums_row};
#pragma GCC ivdep
        for (long long column = first_column; column < last_column; column++)
            to[${sums_column}] =
                (${adder})to[${sums_column}] + (${adder})${load}(from[${value_column}]);
    }
    if (${narrow})
        for (long long row = first_row; row < last_row; row++)
            for (long long column = first_column; column < last_column; column++)
                result[row * ${row_stride} + ${result_column}] =
                    ${store}(sums[row * ${sums_row} + ${sums_column}]);
}
void ${e}(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        long long part = unit % ${row_parts}, block = unit / ${row_parts} % ${column_blocks};
        long long batch = unit / (${row_parts} * ${column_blocks});
        long long last = (block + 1) * ${column_block};
        ${e}_unit((const int *)p[0] + ${index_batch}, (const ${value} *)p[1] + ${value_batch},
                  (const ${memory} *)p[${base_at}] + ${result_batch},
                  (${sums_memory} *)p[${sums_at}] + ${sums_batch},
                  (${memory} *)p[${result_at}] + ${result_batch}, batch,
                  part * ${rows} / ${row_parts}, (part + 1) * ${rows} / ${row_parts},
                  block * ${column_block}, last < ${columns} ? last : ${columns});
    }
}
)";

/* More tokens than this may be too many to be added up one by one in f32. */
enum { MANY_TOKENS = 1024 };

static bool is_f32(const printer *p) {
    return strcmp(ml_suffix(p->dtype), "f32") == 0 && ml_dtypes[p->dtype].kind == ML_KIND_FLOAT;
}

/* f32 sums of hundreds of tokens a row; those of tables, of which a row gets a few, need no wider
 * copy of the table. */
static bool needs_f64(const printer *p) {
    enum { A_ROW = 64 };
    return p->tokens > MANY_TOKENS && p->tokens >= A_ROW * p->rows && !p->based && is_f32(p);
}

static void scatter_cpu(printer *p) {
    ml_template *t = &p->text;
    /* Where few rows are hit, writing zeros is the work: whole rows then. Else blocks of columns,
     * which share the work evenly however often a row is hit. */
    bool sparse = p->tokens * 4 <= p->rows;
    int64_t block = sparse ? p->columns : 64, blocks = (p->columns + block - 1) / block;
    int64_t wanted = 4 * (int64_t)p->schedule->target->threads, units = p->batches * blocks;
    int64_t parts = units >= wanted ? 1 : (wanted + units - 1) / units;
    if (parts > p->rows) parts = p->rows;
    bool wide = needs_f64(p);
    bool narrow = p->dtype == ML_BF16 || wide; /* sums need a wider type than the result has */
    int at = p->step->read_count;
    if (narrow)
        at = template_workspace(p->schedule, p->step, wide ? ML_F64 : ML_F32,
                                p->batches * p->rows * p->columns);
    if (wide) template_set_text(t, "adder", "double");
    template_set(t, "narrow", "%d", narrow);
    template_set(t, "sums_at", "%d", at);
    template_set_text(t, "sums_memory", wide ? "double" : narrow ? "float" : "${memory}");
    template_set_text(t, "sums_row", narrow ? "${columns}" : "${row_stride}");
    template_set_text(t, "sums_column", narrow ? "column" : "${result_column}");
    template_set_text(t, "sums_batch",
                      narrow ? "batch * (${rows} * ${columns})" : "${result_batch}");
    template_set(t, "row_parts", "%lldLL", (long long)parts);
    template_set(t, "column_blocks", "%lldLL", (long long)blocks);
    template_set(t, "column_block", "%lldLL", (long long)block);
    ml_kernel *k =
        template_kernel(t, cpu_text, "scatter_add", p->step->read_count + p->step->write_count);
    k->units = units * parts;
    int64_t work = p->rows * block / parts + p->tokens * (1 + block / parts);
    k->grain = 1 + 100000 / work;
    p->step->kernel = k;
}

/* ---- CUDA ---- */

/* A thread an element of the result, columns fastest. */
static const char direct_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    long long element = blockIdx.x * 256LL + threadIdx.x;
    if (element >= ${batches} * ${rows} * ${columns}) return;
    long long column = element % ${columns}, row = element / ${columns} % ${rows};
    long long batch = element / (${columns} * ${rows});
    const int *index = (const int *)a.p[0] + ${index_batch};
    const ${value} *value = (const ${value} *)a.p[1] + ${value_batch} + ${value_column};
    long long at = ${result_batch} + row * ${row_stride} + ${result_column};
    ${adder} sum = ${start}${lost};
    for (long long token = 0; token < ${tokens}; token++)
        if (index[${index_token}] == row) ${add}(${adder})${load}(value[${value_token}])${added};
    ${total}((${memory} *)a.p[${result_at}])[at] = ${store}((${sum})sum);
}
)";

/* Stable radix sort of (key, token), key = batch rows + index, or `limit` where the index is bad.
 * s[0] is the shift; pass 0 reads the indices, others the keys and tokens of the pass before. */
static const char digits_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; long long s[1]; };
static __device__ __forceinline__ unsigned ${e}_key(const ${e}_arguments &a, long long i) {
    if (a.s[0] > 0) return ((const unsigned *)a.p[${keys_in}])[i];
    long long token = i % ${tokens}, batch = i / ${tokens};
    long long row = ((const int *)a.p[0])[${index_batch} + ${index_token}];
    return row >= 0 && row < ${rows} ? (unsigned)(batch * ${rows} + row) : ${limit}u;
}
)";

static const char count_text[] = R"(
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    __shared__ unsigned count[${radix}];
    for (int d = threadIdx.x; d < ${radix}; d += 256) count[d] = 0;
    __syncthreads();
    long long first = blockIdx.x * ${tile}LL;
    for (long long i = first + threadIdx.x; i < first + ${tile} && i < ${all}; i += 256)
        atomicAdd(&count[(${e}_key(a, i) >> a.s[0]) & (${radix} - 1)], 1u);
    __syncthreads();
    unsigned *out = (unsigned *)a.p[${counts}];
    for (int d = threadIdx.x; d < ${radix}; d += 256) out[d * ${tiles} + blockIdx.x] = count[d];
}
)";

/* Exclusive sums of the counts, by one block. */
static const char offsets_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
extern "C" __global__ void __launch_bounds__(1024) ${e}(${e}_arguments a) {
    __shared__ unsigned warps[32];
    unsigned *counts = (unsigned *)a.p[${counts}], before = 0;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int start = 0; start < ${radix} * ${tiles}; start += 4096) {
        int at = start + (int)threadIdx.x * 4;
        unsigned x[4], sum = 0;
        for (int i = 0; i < 4; i++) {
            x[i] = sum;
            sum += at + i < ${radix} * ${tiles} ? counts[at + i] : 0;
        }
        unsigned upto = sum;
        for (int d = 1; d < 32; d *= 2) {
            unsigned y = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += y;
        }
        if (lane == 31) warps[warp] = upto;
        __syncthreads();
        unsigned below = before, total = before;
        for (int w = 0; w < 32; w++) {
            if (w < warp) below += warps[w];
            total += warps[w];
        }
        for (int i = 0; i < 4; i++)
            if (at + i < ${radix} * ${tiles}) counts[at + i] = below + upto - sum + x[i];
        before = total;
        __syncthreads();
    }
}
)";

static const char move_text[] = R"(
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    __shared__ unsigned next[${radix}], counts[8][${radix}];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int d = threadIdx.x; d < ${radix}; d += 256)
        next[d] = ((const unsigned *)a.p[${counts}])[d * ${tiles} + blockIdx.x];
    long long first = blockIdx.x * ${tile}LL;
    for (long long start = first; start < first + ${tile} && start < ${all}; start += 256) {
        for (int i = threadIdx.x; i < 8 * ${radix}; i += 256) (&counts[0][0])[i] = 0;
        __syncthreads();
        long long i = start + threadIdx.x;
        bool valid = i < ${all};
        unsigned key = valid ? ${e}_key(a, i) : 0;
        unsigned digit = valid ? (key >> a.s[0]) & (${radix} - 1) : ${radix};
        unsigned same = __match_any_sync(~0u, digit);
        unsigned rank = __popc(same & ((1u << lane) - 1));
        if (valid && rank == 0) counts[warp][digit] = __popc(same);
        __syncthreads();
        for (int d = threadIdx.x; d < ${radix}; d += 256)
            for (int w = 0; w < 8; w++) {
                unsigned here = counts[w][d];
                counts[w][d] = next[d];
                next[d] += here;
            }
        __syncthreads();
        if (valid) {
            unsigned to = counts[warp][digit] + rank;
            ((unsigned *)a.p[${keys_out}])[to] = key;
            ((unsigned *)a.p[${tokens_out}])[to] =
                a.s[0] > 0 ? ((const unsigned *)a.p[${tokens_in}])[i] : (unsigned)i;
        }
        __syncthreads();
    }
}
)";

/* starts[key]: the first sorted position whose key is at least `key`, by bisection: rows without
 * tokens cost no more than others. */
static const char starts_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    const unsigned *keys = (const unsigned *)a.p[${keys}];
    long long key = blockIdx.x * 256LL + threadIdx.x, low = 0, high = ${all};
    if (key > ${limit}) return;
    while (low < high) {
        long long middle = (low + high) / 2;
        if (keys[middle] < key) low = middle + 1;
        else high = middle;
    }
    ((unsigned *)a.p[${starts}])[key] = (unsigned)low;
}
)";

/* The sum of the tokens at sorted positions first .. end-1, for ${width} columns. */
static const char sum_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
struct __align__(${width} * sizeof(${value})) ${e}_values { ${value} x[${width}]; };
static __device__ __forceinline__ void ${e}_sum(const ${e}_arguments &a, unsigned first,
                                                unsigned end, long long column,
                                                ${adder} (&sum)[${width}]) {
    const unsigned *tokens = (const unsigned *)a.p[${sorted}];
    const ${value} *value = (const ${value} *)a.p[1] + ${value_column};
#pragma unroll 8
    for (unsigned i = first; i < end; i++) {
        long long all = tokens[i], token = all % ${tokens}, batch = all / ${tokens};
        (void)token, (void)batch;
        ${e}_values v = *(const ${e}_values *)(value + ${value_batch} + ${value_token});
        for (int j = 0; j < ${width}; j++) sum[j] += (${adder})${load}(v.x[j]);
    }
}
)";

/* Rows with more than ${chunk} tokens: the sums of the first row (slot 0) and of the last (slot 1)
 * that chunk `blockIdx.x` holds. */
static const char chunks_text[] = R"(
extern "C" __global__ void __launch_bounds__(${threads}) ${e}(${e}_arguments a) {
    const unsigned *keys = (const unsigned *)a.p[${keys}];
    const unsigned *starts = (const unsigned *)a.p[${starts}];
    long long first = blockIdx.x * ${chunk}LL;
    long long end = first + ${chunk} < ${all} ? first + ${chunk} : ${all};
    long long column = (blockIdx.y * ${threads}LL + threadIdx.x) * ${width};
    if (column >= ${columns}) return;
    for (int slot = 0; slot < 2; slot++) {
        unsigned key = keys[slot ? end - 1 : first];
        if (key == ${limit}u || (slot && key == keys[first])) continue;
        unsigned from = starts[key], to = starts[key + 1];
        if (to - from <= ${chunk}) continue;
        ${adder} sum[${width}] = {0};
        ${e}_sum(a, from > first ? from : first, to < end ? to : end, column, sum);
        ${adder} *out = (${adder} *)a.p[${partial}] + column;
        out += (blockIdx.x * 2LL + slot) * ${columns};
        for (int j = 0; j < ${width}; j++) out[j] = sum[j];
    }
}
)";

static const char rows_text[] = R"(
struct __align__(${width} * sizeof(${memory})) ${e}_results { ${memory} x[${width}]; };
extern "C" __global__ void __launch_bounds__(${threads}) ${e}(${e}_arguments a) {
    const unsigned *keys = (const unsigned *)a.p[${keys}];
    const unsigned *starts = (const unsigned *)a.p[${starts}];
    long long key = blockIdx.x * ${rows_block}LL + threadIdx.x / ${lanes};
    long long column = (blockIdx.y * ${lanes}LL + threadIdx.x % ${lanes}) * ${width};
    if (key >= ${limit}LL || column >= ${columns}) return;
    unsigned first = starts[key], end = starts[key + 1];
    ${adder} sum[${width}] = {0};
    if (${based} && first == end && a.p[${base_at}] == a.p[${result_at}]) return;
    if (end - first <= ${chunk}) ${e}_sum(a, first, end, column, sum);
    else {
        const ${adder} *partial = (const ${adder} *)a.p[${partial}] + column;
        for (unsigned c = first / ${chunk}; c <= (end - 1) / ${chunk}; c++) {
            long long slot = c * 2LL + (keys[c * ${chunk}LL] != key);
            for (int j = 0; j < ${width}; j++) sum[j] += partial[slot * ${columns} + j];
        }
    }
    long long batch = key / ${rows}, row = key % ${rows};
    long long place = ${result_batch} + row * ${row_stride} + ${result_column};
    ${e}_results out;
    ${add_base}
    for (int j = 0; j < ${width}; j++) out.x[j] = ${store}((${sum})sum[j]);
    *(${e}_results *)((${memory} *)a.p[${result_at}] + place) = out;
}
)";

static ml_kernel **append(printer *p, ml_kernel **at, const char *const *bodies, int count,
                          const char *label) {
    *at = template_kernel_of(&p->text, bodies, count, label,
                             p->step->read_count + p->step->write_count);
    return &(*at)->next;
}

/* The sorted keys and tokens are in keys[passes % 2] and tokens[passes % 2] (workspaces). */
static ml_kernel **add_sort(printer *p, ml_kernel **at, int passes, int radix_bits, int64_t tiles,
                            const int *keys, const int *tokens) {
    for (int pass = 0; pass < passes; pass++) {
        template_set(&p->text, "keys_in", "%d", keys[pass % 2]);
        template_set(&p->text, "tokens_in", "%d", tokens[pass % 2]);
        template_set(&p->text, "keys_out", "%d", keys[(pass + 1) % 2]);
        template_set(&p->text, "tokens_out", "%d", tokens[(pass + 1) % 2]);
        const char *const count[] = {digits_text, count_text}, *const move[] = {digits_text,
                                                                                move_text};
        const char *const offsets[] = {offsets_text};
        ml_kernel **counter = at, **summer = append(p, at, count, 2, "scatter_add count");
        ml_kernel **mover = append(p, summer, offsets, 1, "scatter_add offsets");
        at = append(p, mover, move, 2, "scatter_add move");
        template_launch(*counter, tiles, 1, 1, 256, 0);
        template_launch(*summer, 1, 1, 1, 1024, 0);
        template_launch(*mover, tiles, 1, 1, 256, 0);
        ml_kernel *shifted[] = {*counter, *mover};
        for (int i = 0; i < 2; i++) {
            shifted[i]->scalar_count = 1;
            shifted[i]->scalar[0] = pass * radix_bits;
        }
    }
    return at;
}

static int bits_of(int64_t n) {
    int bits = 0;
    while (n >> bits) bits++;
    return bits;
}

/* Workspaces of the sorted path, and the texts that name them. */
static void set_sorted(printer *p, int64_t all, int64_t limit, int radix_bits, int64_t tiles,
                       int64_t chunk, int *keys, int *tokens) {
    ml_template *t = &p->text;
    ml_schedule *s = p->schedule;
    for (int i = 0; i < 2; i++) {
        keys[i] = template_workspace(s, p->step, ML_I32, all);
        tokens[i] = template_workspace(s, p->step, ML_I32, all);
    }
    int64_t chunks = (all + chunk - 1) / chunk;
    ml_dtype wide = p->dtype == ML_BF16 || p->dtype == ML_BOOL ? ML_F32 : p->dtype;
    template_set(t, "counts", "%d", template_workspace(s, p->step, ML_I32, tiles << radix_bits));
    template_set(t, "starts", "%d", template_workspace(s, p->step, ML_I32, limit + 1));
    template_set(t, "partial", "%d", template_workspace(s, p->step, wide, chunks * 2 * p->columns));
    template_set(t, "all", "%lldLL", (long long)all);
    template_set(t, "limit", "%lld", (long long)limit);
    template_set(t, "radix", "%d", 1 << radix_bits);
    template_set(t, "tiles", "%lld", (long long)tiles);
    template_set(t, "chunk", "%lld", (long long)chunk);
    template_set(t, "pointers", "%d", p->step->read_count + p->step->write_count);
}

static void scatter_sorted(printer *p) {
    ml_template *t = &p->text;
    int64_t all = p->batches * p->tokens, limit = p->batches * p->rows, chunk = 64;
    if (all > INT32_MAX || limit > INT32_MAX)
        ml_raise(ML_INVALID, "scatter_add over %lld tokens and %lld rows is too large for the GPU",
                 (long long)all, (long long)limit);
    while (chunk * chunk < all && chunk < 1024) chunk *= 2;
    int bits = bits_of(limit), passes = (bits + 8) / 9, radix_bits = (bits + passes - 1) / passes;
    int64_t tile = 2048;
    while (tile * TILES < all) tile *= 2;
    int64_t tiles = (all + tile - 1) / tile;
    int keys[2], tokens[2];
    set_sorted(p, all, limit, radix_bits, tiles, chunk, keys, tokens);
    template_set(t, "tile", "%lld", (long long)tile);
    ml_kernel **at = add_sort(p, &p->step->kernel, passes, radix_bits, tiles, keys, tokens);

    int64_t width = p->vector ? VECTOR : 1, lanes = 1;
    while (lanes < 256 && lanes * width < p->columns) lanes *= 2;
    int64_t chunks = (all + chunk - 1) / chunk,
            blocks_y = (p->columns + lanes * width - 1) / (lanes * width);
    int64_t threads = lanes < 32 ? 32 : lanes;
    template_set(t, "keys", "%d", keys[passes % 2]);
    template_set(t, "sorted", "%d", tokens[passes % 2]);
    template_set(t, "width", "%lld", (long long)width);
    template_set(t, "lanes", "%lld", (long long)lanes);
    template_set(t, "rows_block", "%lld", (long long)(256 / lanes));
    const char *const starts[] = {starts_text};
    const char *const sums[] = {sum_text, chunks_text}, *const rows[] = {sum_text, rows_text};
    ml_kernel **starter = at;
    at = append(p, at, starts, 1, "scatter_add starts");
    template_launch(*starter, limit / 256 + 1, 1, 1, 256, 0);
    template_set(t, "threads", "%lld", (long long)threads);
    ml_kernel **chunker = at;
    at = append(p, at, sums, 2, "scatter_add chunks");
    template_launch(*chunker, chunks, (p->columns + threads * width - 1) / (threads * width), 1,
                    (uint32_t)threads, 0);
    template_set_text(t, "threads", "256");
    append(p, at, rows, 2, "scatter_add");
    int64_t rows_block = 256 / lanes;
    template_launch(*at, (limit + rows_block - 1) / rows_block, blocks_y, 1, 256, 0);
}

static void scatter_cuda(printer *p) {
    int64_t elements = p->batches * p->rows * p->columns;
    if (p->tokens > DIRECT_TOKENS && elements * p->tokens > MAX_DIRECT) {
        scatter_sorted(p);
        return;
    }
    template_set(&p->text, "pointers", "%d", p->step->read_count + p->step->write_count);
    bool keeps = p->tokens > MANY_TOKENS && is_f32(p); /* what the sum loses (Knuth's two-sum) */
    template_set_text(&p->text, "lost", keeps ? ", lost = 0" : "");
    template_set_text(&p->text, "add", keeps ? "{ const float x = " : "sum += ");
    template_set_text(&p->text, "added",
                      keeps ? ", next = sum + x, part = next - sum; "
                              "lost += (sum - (next - part)) + (x - part); sum = next; }"
                            : "");
    template_set_text(&p->text, "total", keeps ? "if (lost - lost == 0) sum += lost;\n    " : "");
    const char *const bodies[] = {direct_text};
    append(p, &p->step->kernel, bodies, 1, "scatter_add");
    template_launch(p->step->kernel, (elements + 255) / 256, 1, 1, 256, 0);
}

void ml_template_scatter_add(ml_schedule *s, ml_step *step) {
    printer p;
    begin(&p, s, step);
    if (s->target->kind == ML_TARGET_CUDA)
        scatter_cuda(&p);
    else
        scatter_cpu(&p);
}
