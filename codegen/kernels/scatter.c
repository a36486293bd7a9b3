/* SCATTER_ADD: result[batch, index[batch, token], column] += value[batch, token, column], from 0,
 * or from a third operand of the result's strides, which mostly is at its address.
 *
 * Axes of the value that index and result share are batch axes, those of the index alone are
 * tokens, the others columns. Each element of the result is summed in an order that depends on
 * nothing but the shapes and the indices; indices outside the result are skipped.
 *
 * CPU (c/scatter_add.c): units own a block of columns and a range of rows and walk all tokens. CUDA
 * (cuda/scatter_add_*.cu): with few tokens a thread an element compares every index (direct); else
 * tokens are sorted by row (stable radix sort: count, offsets, move, starts), cut into chunks so
 * that rows with many tokens are summed by many blocks (chunks), and rows add up their tokens or
 * their chunks (rows). */
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

/* Sort the value's axes into batch, tokens and columns, and set the offsets of all operands. */
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
    p->rows = ml_type_size(&result->type, along);
    p->value_dtype = (ml_dtype)value->type.dtype, p->dtype = (ml_dtype)result->type.dtype;
    int64_t row_stride = stride_of(result, along);
    bool single = loops[2][1].count == 1 && loops[2][2].count == 1 && loops[2][1].stride[0] == 1 &&
                  loops[2][2].stride[0] == 1;
    p->vector = single && p->columns % VECTOR == 0 && row_stride % VECTOR == 0 &&
                value->offset % VECTOR == 0 && result->offset % VECTOR == 0;
    for (int kind = 0; kind < 2; kind++)
        for (int i = 1; i < 3; i++) p->vector &= is_multiple(&loops[kind][i], VECTOR);
    const char *const indices[] = {"batch", "token", "column"};
    const char *const names[3][3] = {
        {"INDEX_BATCH(batch)", "VALUE_BATCH(batch)", "RESULT_BATCH(batch)"},
        {"INDEX_TOKEN(token)", "VALUE_TOKEN(token)", "RESULT_TOKEN(token)"},
        {"INDEX_COLUMN(column)", "VALUE_COLUMN(column)", "RESULT_COLUMN(column)"}};
    for (int kind = 0; kind < 3; kind++)
        for (int i = 0; i < 3; i++)
            template_set_text(t, names[kind][i],
                              template_offset(s->arena, &loops[kind][i], indices[kind]));
    template_set(t, "ROW_STRIDE", "%lldLL", (long long)row_stride);
    template_set(t, "BATCHES", "%lldLL", (long long)p->batches);
    template_set(t, "TOKENS", "%lldLL", (long long)p->tokens);
    template_set(t, "COLUMNS", "%lldLL", (long long)p->columns);
    template_set(t, "ROWS", "%lldLL", (long long)p->rows);
    template_set_text(t, "ELEMENT", emit_memory_type(p->value_dtype));
    template_set_text(t, "MEMORY", emit_memory_type(p->dtype));
    template_set_text(t, "REAL", emit_compute_type(p->dtype));
    /* integers wrap around */
    const char *adder = p->dtype == ML_I64 ? "unsigned long long" : "unsigned";
    bool is_float = ml_dtypes[p->dtype].kind == ML_KIND_FLOAT;
    template_set_text(t, "ADDER", is_float ? emit_compute_type(p->dtype) : adder);
    template_set_text(t, "LOAD", ml_dtypes[p->value_dtype].load);
    template_set_text(t, "STORE", ml_dtypes[p->dtype].store);
    p->based = step->read_count == 3;
    template_set(t, "BASED", "%d", p->based);
    template_set(t, "BASE_AT", "%d", p->based ? 2 : step->read_count);
    template_set(t, "RESULT_AT", "%d", step->read_count);
}

/* ---- CPU ---- */

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
    bool narrow = ml_is_narrow(p->dtype) || wide; /* sums need a wider type than the result has */
    int at = p->step->read_count;
    if (narrow)
        at = template_workspace(p->schedule, p->step, wide ? ML_F64 : ML_F32,
                                p->batches * p->rows * p->columns);
    if (wide) template_set_text(t, "ADDER", "double");
    template_set(t, "NARROW", "%d", narrow);
    template_set(t, "SUMS_AT", "%d", at);
    template_set_text(t, "SUMS_MEMORY", wide ? "double" : narrow ? "float" : "MEMORY");
    template_set_text(t, "SUMS_ROW", narrow ? "COLUMNS" : "ROW_STRIDE");
    template_set_text(t, "SUMS_COLUMN(column)", narrow ? "column" : "RESULT_COLUMN(column)");
    template_set_text(t, "SUMS_BATCH(batch)",
                      narrow ? "batch * (ROWS * COLUMNS)" : "RESULT_BATCH(batch)");
    template_set(t, "ROW_PARTS", "%lldLL", (long long)parts);
    template_set(t, "COLUMN_BLOCKS", "%lldLL", (long long)blocks);
    template_set(t, "COLUMN_BLOCK", "%lldLL", (long long)block);
    ml_kernel *k = template_file(t, "scatter_add.c", "scatter_add",
                                 p->step->read_count + p->step->write_count);
    k->units = units * parts;
    int64_t work = p->rows * block / parts + p->tokens * (1 + block / parts);
    k->grain = 1 + 100000 / work;
    p->step->kernel = k;
}

/* ---- CUDA ---- */

static ml_kernel **append(printer *p, ml_kernel **at, const char *file, const char *label) {
    *at = template_file(&p->text, file, label, p->step->read_count + p->step->write_count);
    return &(*at)->next;
}

/* The sorted keys and tokens are in keys[passes % 2] and tokens[passes % 2] (workspaces). */
static ml_kernel **add_sort(printer *p, ml_kernel **at, int passes, int radix_bits, int64_t tiles,
                            const int *keys, const int *tokens) {
    for (int pass = 0; pass < passes; pass++) {
        template_set(&p->text, "KEYS_IN_AT", "%d", keys[pass % 2]);
        template_set(&p->text, "TOKENS_IN_AT", "%d", tokens[pass % 2]);
        template_set(&p->text, "KEYS_OUT_AT", "%d", keys[(pass + 1) % 2]);
        template_set(&p->text, "TOKENS_OUT_AT", "%d", tokens[(pass + 1) % 2]);
        ml_kernel **counter = at;
        ml_kernel **summer = append(p, at, "scatter_add_count.cu", "scatter_add count");
        ml_kernel **mover = append(p, summer, "scatter_add_offsets.cu", "scatter_add offsets");
        at = append(p, mover, "scatter_add_move.cu", "scatter_add move");
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
    ml_dtype wide = ml_is_narrow(p->dtype) || p->dtype == ML_BOOL ? ML_F32 : p->dtype;
    template_set(t, "COUNTS_AT", "%d", template_workspace(s, p->step, ML_I32, tiles << radix_bits));
    template_set(t, "STARTS_AT", "%d", template_workspace(s, p->step, ML_I32, limit + 1));
    template_set(t, "PARTIAL_AT", "%d",
                 template_workspace(s, p->step, wide, chunks * 2 * p->columns));
    template_set(t, "ALL", "%lldLL", (long long)all);
    template_set(t, "LIMIT", "%lld", (long long)limit);
    template_set(t, "RADIX", "%d", 1 << radix_bits);
    template_set(t, "TILES", "%lld", (long long)tiles);
    template_set(t, "CHUNK", "%lld", (long long)chunk);
    template_set(t, "POINTERS", "%d", p->step->read_count + p->step->write_count);
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
    template_set(t, "TILE", "%lld", (long long)tile);
    ml_kernel **at = add_sort(p, &p->step->kernel, passes, radix_bits, tiles, keys, tokens);

    int64_t width = p->vector ? VECTOR : 1, lanes = 1;
    while (lanes < 256 && lanes * width < p->columns) lanes *= 2;
    int64_t chunks = (all + chunk - 1) / chunk,
            blocks_y = (p->columns + lanes * width - 1) / (lanes * width);
    int64_t threads = lanes < 32 ? 32 : lanes;
    template_set(t, "KEYS_AT", "%d", keys[passes % 2]);
    template_set(t, "SORTED_AT", "%d", tokens[passes % 2]);
    template_set(t, "WIDTH", "%lld", (long long)width);
    template_set(t, "LANES", "%lld", (long long)lanes);
    template_set(t, "ROWS_BLOCK", "%lld", (long long)(256 / lanes));
    ml_kernel **starter = at;
    at = append(p, at, "scatter_add_starts.cu", "scatter_add starts");
    template_launch(*starter, limit / 256 + 1, 1, 1, 256, 0);
    template_set(t, "THREADS", "%lld", (long long)threads);
    ml_kernel **chunker = at;
    at = append(p, at, "scatter_add_chunks.cu", "scatter_add chunks");
    template_launch(*chunker, chunks, (p->columns + threads * width - 1) / (threads * width), 1,
                    (uint32_t)threads, 0);
    append(p, at, "scatter_add_rows.cu", "scatter_add");
    int64_t rows_block = 256 / lanes;
    template_launch(*at, (limit + rows_block - 1) / rows_block, blocks_y, 1, 256, 0);
}

static void scatter_cuda(printer *p) {
    int64_t elements = p->batches * p->rows * p->columns;
    if (p->tokens > DIRECT_TOKENS && elements * p->tokens > MAX_DIRECT) {
        scatter_sorted(p);
        return;
    }
    template_set(&p->text, "POINTERS", "%d", p->step->read_count + p->step->write_count);
    template_set(&p->text, "COMPENSATED", "%d", p->tokens > MANY_TOKENS && is_f32(p));
    append(p, &p->step->kernel, "scatter_add_direct.cu", "scatter_add");
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
