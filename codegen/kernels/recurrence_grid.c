/* A recurrence with products of its states as one cooperative kernel (cuda/recurrence_grid.cuh,
 * which says how blocks divide the work; recurrence_values.c takes the step apart). */
#include "codegen/kernels/recurrence_grid.h"

#include <string.h>

enum {
    COUNTER = 128, /* bytes of one that blocks count at: a cache line */
    MOST_BLOCK_COLUMNS = 64,
    SHARING_COLUMNS = 32, /* of a product that blocks share, at most: sums stay in registers */
    MOST_SPLIT = 8,
    WARPS = GRID_THREADS / 32,
};

static int64_t padded(int64_t bytes) {
    return (bytes + 255) / 256 * 256;
}

/* Pairs of them are two warps'. */
static int row_tiles(const grid *x) {
    int tiles = (int)((x->rows + 15) / 16);
    return tiles == 1 ? 1 : tiles + tiles % 2;
}

static int64_t depth_of(const grid *x, const grid_product *p) {
    return p->slots * x->size;
}

static int64_t columns_of(const grid *x, const grid_product *p) {
    return (int64_t)p->results * p->split * x->block_columns;
}

/* ---- Who does what ---- */

static void split_product(const grid *x, grid_product *p) {
    p->split = 1;
    for (;;) {
        int twice = 2 * p->split;
        bool small = depth_of(x, p) / p->split <= GRID_DEPTH ||
                     2 * columns_of(x, p) > SHARING_COLUMNS || twice > MOST_SPLIT;
        if (small || x->blocks % twice || depth_of(x, p) / 16 % twice) return;
        p->split = twice;
    }
}

static void place(grid *x) {
    int64_t most = 0;
    int row_warps = row_tiles(x) % 2 ? 1 : 2;
    x->matrix_bytes = 0;
    x->workspace_bytes = padded(COUNTER * (1 + (int64_t)x->product_count * x->blocks));
    x->zero_bytes = x->workspace_bytes;
    for (int i = 0; i < x->product_count; i++) {
        grid_product *p = &x->products[i];
        split_product(x, p);
        int64_t columns = columns_of(x, p), depth = depth_of(x, p);
        if (columns > most) most = columns;
        p->matrix_at = x->matrix_bytes;
        x->matrix_bytes += depth / p->split * columns * 2;
        p->operand_at = x->workspace_bytes;
        x->workspace_bytes += padded(2 * row_tiles(x) * 16 * depth * 2);
    }
    /* rows past the last are read too, and multiplied to nowhere */
    if (x->rows % (row_tiles(x) * 16)) x->zero_bytes = x->workspace_bytes;
    for (int i = 0; i < x->product_count; i++) {
        grid_product *p = &x->products[i];
        p->sums_at = x->workspace_bytes;
        if (p->split > 1)
            x->workspace_bytes +=
                padded(x->blocks * p->split * p->results * x->rows * x->block_columns * 4);
    }
    x->part_bytes = (int64_t)(WARPS / row_warps) * row_tiles(x) * 16 * (most + 8) * 4;
    if (most > GRID_COLUMNS)
        grid_refuse("%lld columns of a product would be one multiprocessor's, more than %d",
                    (long long)most, GRID_COLUMNS);
}

static void divide(grid *x) {
    const ml_target *target = x->schedule->target;
    int64_t room = ml_target_shared(target->arch);
    int columns = 8;
    while (columns <= MOST_BLOCK_COLUMNS &&
           (x->size % columns || x->size / columns > target->multiprocessors))
        columns += 8;
    if (columns > MOST_BLOCK_COLUMNS)
        grid_refuse("%d multiprocessors cannot share %lld columns", target->multiprocessors,
                    (long long)x->size);
    x->block_columns = columns;
    x->blocks = (int)(x->size / columns);
    place(x);
    if (x->matrix_bytes + x->part_bytes > room)
        grid_refuse("its matrices take %lld KiB of a multiprocessor's shared memory, of %lld",
                    (long long)((x->matrix_bytes + x->part_bytes) >> 10), (long long)(room >> 10));
    if (x->r.length * x->blocks * (x->product_count + 1) > INT32_MAX) grid_refuse("it is too long");
}

/* ---- Text ---- */

static void print_matrices(const grid *x, const grid_product *p, ml_text *out) {
    int64_t depth = depth_of(x, p) / p->split, width = (int64_t)p->split * x->block_columns;
    int number = (int)(p - x->products);
    ml_text_add(out, "unsigned gathered%d = 0;\n", number);
    ml_text_add(out, "const int member%d = blockIdx.x %% %d, group%d = blockIdx.x / %d;\n", number,
                p->split, number, p->split);
    ml_text_add(out, "(void)gathered%d, (void)member%d, (void)group%d;\n", number, number, number);
    for (int i = 0; i < p->results; i++) {
        const grid_result *result = &p->result[i];
        ml_text_add(out, "{ const long long base[] = {");
        for (int k = 0; k < p->slots; k++)
            ml_text_add(out, "%s%lldLL", k ? ", " : "", (long long)result->base[k]);
        ml_text_add(out, "};\nload_matrix<%lld, %lld, %lld>(matrix + %lld, ", (long long)depth,
                    (long long)columns_of(x, p), (long long)width, (long long)(p->matrix_at / 2));
        ml_text_add(out, "(const unsigned short *)P[%d] + group%d * %lldLL, ", result->matrix,
                    number, (long long)(width * result->column_stride));
        ml_text_add(out, "base, member%d * %lld, %d, %lldLL, %lldLL); }\n", number,
                    (long long)depth, i, (long long)result->depth_stride,
                    (long long)result->column_stride);
    }
}

/* The operand to memory, for all blocks. */
static void print_operand(const grid *x, const grid_product *p, int workspace, ml_text *out) {
    int number = (int)(p - x->products);
    ml_text_add(out,
                "unsigned short *const operand%d = (unsigned short *)(P[%d] + %lldLL) + parity * "
                "%lldLL;\n",
                number, workspace, (long long)p->operand_at,
                (long long)(row_tiles(x) * 16 * depth_of(x, p)));
    for (int k = 0; k < p->slots; k++)
        ml_text_add(out,
                    "EACH if (on[e]) operand%d[operand_at(row[e], %lld + column[e])] = "
                    "ml_store_bf16(%s).bits;\n",
                    number, (long long)(k * x->size), x->values.at[p->operand[k]].name);
}

static void print_product(const grid *x, const grid_product *p, int workspace, ml_text *out) {
    int number = (int)(p - x->products);
    int64_t depth = depth_of(x, p) / p->split, columns = columns_of(x, p);
    ml_text_add(out, "multiply<%lld, %lld>(operand%d + member%d * %lld, matrix + %lld, part);\n",
                (long long)depth, (long long)columns, number, number,
                (long long)(depth * row_tiles(x) * 16), (long long)(p->matrix_at / 2));
    if (p->split > 1) {
        int64_t group = (int64_t)p->split * p->split * p->results * x->rows * x->block_columns;
        ml_text_add(out, "float *const sums%d = (float *)(P[%d] + %lldLL) + group%d * %lldLL;\n",
                    number, workspace, (long long)p->sums_at, number, (long long)group);
        ml_text_add(out,
                    "share<%d, %d>(part, sums%d, member%d, counters + (%d + group%d) * "
                    "COUNTER_WORDS, gathered%d += %d);\n",
                    p->split, p->results, number, number, 1 + number * x->blocks, number, number,
                    p->split);
    }
    ml_text_add(out, "EACH {\n");
    for (int i = 0; i < p->results; i++) {
        const grid_value *v = &x->values.at[p->result[i].value];
        ml_text_add(out, "%s = %s(", v->name, v->dtype == ML_BF16 ? "ml_round_bf16" : "");
        if (p->split > 1)
            ml_text_add(out, "shared_total<%d, %d>(sums%d, member%d, %d, row[e], own[e]));\n",
                        p->split, p->results, number, number, i);
        else
            ml_text_add(out, "total<%lld>(part, row[e], %d + own[e]));\n", (long long)columns,
                        i * x->block_columns);
    }
    ml_text_add(out, "}\n__syncthreads();\n");
}

static const char *or_empty(const ml_text *text) {
    return text->text ? text->text : "";
}

static const char *print_step(const grid *x, int workspace) {
    ml_text out = {.arena = x->text.arena};
    ml_text_add(&out, "%s%sNEXT\n", or_empty(&x->declare), or_empty(&x->inputs));
    for (int level = 0; level < GRID_LEVELS; level++) {
        int count = 0;
        if (x->level[level].text) ml_text_add(&out, "EACH {\n%s}\n", x->level[level].text);
        for (int i = 0; i < x->product_count; i++)
            if (x->products[i].level == level)
                print_operand(x, &x->products[i], workspace, &out), count++;
        if (count == 0) continue;
        ml_text_add(&out, "MEET\n");
        for (int i = 0; i < x->product_count; i++)
            if (x->products[i].level == level) print_product(x, &x->products[i], workspace, &out);
    }
    ml_text_add(&out, "%sEACH {\n%s}\n", or_empty(&x->stores), or_empty(&x->next));
    return out.text;
}

static void print_kernels(grid *x, int workspace) {
    ml_template *t = &x->text;
    int pointers = x->step->read_count + x->step->write_count;
    int64_t words = x->zero_bytes / 4;
    for (int i = 0; i < x->product_count; i++) print_matrices(x, &x->products[i], &x->setup);
    template_set(t, "POINTERS", "%d", pointers);
    template_set(t, "COUNTERS", "%d", workspace);
    template_set(t, "WORDS", "%lld", (long long)words);
    template_set(t, "THREADS", "%d", GRID_THREADS);
    template_set(t, "ROWS", "%lld", (long long)x->rows);
    template_set(t, "ROW_TILES", "%d", row_tiles(x));
    template_set(t, "SIZE", "%lld", (long long)x->size);
    template_set(t, "BLOCK_COLUMNS", "%d", x->block_columns);
    template_set(t, "BLOCKS", "%d", x->blocks);
    template_set(t, "LENGTH", "%lldLL", (long long)x->r.length);
    template_set(t, "REVERSE", "%d", x->r.reverse);
    template_set(t, "MATRIX_BYTES", "%lld", (long long)x->matrix_bytes);
    template_set_text(t, "SETUP", or_empty(&x->setup));
    template_set_text(t, "LOAD", or_empty(&x->load));
    template_set_text(t, "STEP", print_step(x, workspace));
    template_set_text(t, "LAST", or_empty(&x->last));
    ml_kernel *zeros = template_file(t, "recurrence_counters.cu", "scan", pointers);
    template_launch(zeros, (words + 127) / 128, 1, 1, 128, 0);
    ml_kernel *kernel = template_file(t, "recurrence_grid.cu", "scan", pointers);
    template_launch(kernel, x->blocks, 1, 1, GRID_THREADS, x->matrix_bytes + x->part_bytes);
    kernel->cooperative = true;
    zeros->next = kernel;
    x->step->kernel = zeros;
}

static void build(void *argument) {
    grid *x = argument;
    const ml_target *target = x->schedule->target;
    if (target->kind != ML_TARGET_CUDA || target->arch < 80)
        grid_refuse("only GPUs from compute capability 8.0 on run it as one kernel");
    if (target->no_fuse) grid_refuse("kernels are not fused");
    grid_take_apart(x);
    divide(x);
    print_kernels(x, template_workspace(x->schedule, x->step, ML_I32, x->workspace_bytes / 4));
}

bool ml_template_recurrence_grid(ml_schedule *s, ml_step *step, const char **why) {
    grid x = {.schedule = s, .g = s->graph, .step = step, .text = template_begin(s)};
    ml_text *texts[] = {&x.setup, &x.load, &x.inputs, &x.declare, &x.stores, &x.next, &x.last};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) texts[i]->arena = x.text.arena;
    for (int i = 0; i < GRID_LEVELS; i++) x.level[i].arena = x.text.arena;
    ml_recurrence_read(s->graph, step->node, &x.r);
    ml_status status = ml_protect(build, &x);
    if (status == ML_OK) return true;
    if (status != ML_INVALID) ml_raise_last();
    *why = ml_arena_format(s->arena, "%s", ml_error_last()->text);
    return false;
}
