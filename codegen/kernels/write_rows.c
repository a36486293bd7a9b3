/* WRITE_ROWS: result[index[token], column] = value[token, column], the other rows being the
 * cache's. The result mostly is at the cache's address: then only those rows are written.
 *
 * Axes of the value that the index has are tokens, the others columns. Not in place, a unit (CPU)
 * or block (CUDA) owns a range of rows, copies it and writes the tokens that lie in it. */
#include "codegen/kernels/template.h"

enum { C_UNIT_ELEMENTS = 1 << 18, CUDA_BLOCKS = 1024, CUDA_THREADS = 256 };

static int64_t stride_of(const ml_value *v, ml_axis axis) {
    int at = ml_type_find(&v->type, axis);
    return at < 0 ? 0 : v->stride[at];
}

static void set_loops(ml_template *t, const char *name, const char *index,
                      const ml_template_loops *loops) {
    template_set_text(t, name, template_offset(t->arena, loops, index));
}

/* Offsets of a token in index and value, and of a column in cache, value and result. */
static void set_offsets(ml_template *t, const ml_value *const *v, ml_axis along) {
    ml_template_loops token[2] = {0}, column[3] = {0};
    const ml_type *index = &v[1]->type, *cache = &v[0]->type;
    for (int i = 0; i < index->rank; i++) {
        template_loop_add(&token[0], index->size[i], v[1]->stride[i]);
        template_loop_add(&token[1], index->size[i], stride_of(v[2], index->axis[i]));
    }
    for (int i = 0; i < cache->rank; i++) {
        if (cache->axis[i] == along) continue;
        template_loop_add(&column[0], cache->size[i], v[0]->stride[i]);
        template_loop_add(&column[1], cache->size[i], stride_of(v[2], cache->axis[i]));
        template_loop_add(&column[2], cache->size[i], stride_of(v[3], cache->axis[i]));
    }
    set_loops(t, "INDEX_TOKEN(token)", "token", &token[0]);
    set_loops(t, "VALUE_TOKEN(token)", "token", &token[1]);
    set_loops(t, "CACHE_COLUMN(column)", "column", &column[0]);
    set_loops(t, "VALUE_COLUMN(column)", "column", &column[1]);
    set_loops(t, "RESULT_COLUMN(column)", "column", &column[2]);
}

void ml_template_write_rows(ml_schedule *s, ml_step *step) {
    ml_template t = template_begin(s);
    const ml_value *v[4];
    for (int i = 0; i < 4; i++) v[i] = template_value(s, step, i);
    ml_axis along = (ml_axis)ml_graph_args(s->graph, step->node)[0];
    int64_t rows = ml_type_size(&v[0]->type, along), elements = ml_type_elements(&v[0]->type);
    int64_t tokens = ml_type_elements(&v[1]->type), columns = elements / rows;
    set_offsets(&t, v, along);
    template_set_text(&t, "ELEMENT", emit_memory_type((ml_dtype)v[0]->type.dtype));
    template_set(&t, "ROWS", "%lldLL", (long long)rows);
    template_set(&t, "TOKENS", "%lldLL", (long long)tokens);
    template_set(&t, "COLUMNS", "%lldLL", (long long)columns);
    template_set(&t, "CACHE_ROW", "%lldLL", (long long)stride_of(v[0], along));
    template_set(&t, "RESULT_ROW", "%lldLL", (long long)stride_of(v[3], along));
    if (s->target->kind != ML_TARGET_CUDA) {
        int64_t units = (elements + C_UNIT_ELEMENTS - 1) / C_UNIT_ELEMENTS;
        if (units > 2 * s->target->threads) units = 2 * s->target->threads;
        if (units > rows) units = rows;
        if (units < 1) units = 1;
        template_set(&t, "UNITS", "%lldLL", (long long)units);
        step->kernel = template_file(&t, "write_rows.c", "write_rows", 4);
        step->kernel->units = units;
        step->kernel->grain = 1 + (1 << 16) / (tokens * columns);
        return;
    }
    int64_t blocks = (tokens * columns + CUDA_THREADS - 1) / CUDA_THREADS;
    if (blocks < 64) blocks = 64; /* for what is not in place */
    if (blocks > CUDA_BLOCKS) blocks = CUDA_BLOCKS;
    template_set(&t, "BLOCKS", "%lldLL", (long long)blocks);
    template_set(&t, "THREADS", "%d", CUDA_THREADS);
    step->kernel = template_file(&t, "write_rows.cu", "write_rows", 4);
    template_launch(step->kernel, blocks, 1, 1, CUDA_THREADS, 0);
}
