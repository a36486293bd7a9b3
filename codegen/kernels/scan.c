/* CUMSUM, SORT and TOP_K: each row (all axes but one) on its own.
 *
 * CPU (c/cumsum.c, c/sort.c): merge sort, insertion for a small TOP_K. CUDA: running sums by a
 * block or a thread a row (cuda/cumsum.cu); bitonic sort of rows in shared memory
 * (cuda/sort_rows.cu), or for long rows of tiles of it, with exchanges between tiles in memory
 * (cuda/sort_tiles.cu, cuda/sort_exchange.cu); what the graph says are few kinds or a permutation
 * is not compared (cuda/sort_counted.cu, cuda/sort_inverse.cu); a warp or a block a row for a small
 * TOP_K (cuda/top_k.cu). Keys: c/sort_keys.h. */
#include <string.h>

#include "codegen/kernels/template.h"

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    ml_op op;
    int64_t rows, size, kept; /* kept: elements written by row */
    int64_t stride;           /* of the input along the axis */
    bool wide;                /* 8-byte elements: keys are pairs */
    bool backwards;           /* CUMSUM from the end; SORT descending */
} printer;

enum {
    STACK_KEYS = 2048,  /* CPU: longer rows sort in a workspace */
    INSERTED = 64,      /* CPU: a TOP_K up to this is by insertion */
    SHARED_KEYS = 4096, /* CUDA: longer rows sort in memory */
    WARP_ROW = 1024,    /* CUDA: TOP_K by a warp up to this row length .. */
    WARP_KEPT = 32,     /* .. and this k */
    BLOCK_KEPT = 64,    /* CUDA: TOP_K by a block up to this k */
    LANES = 64,         /* CPU cumsum: rows side by side where they are adjacent */
    LONG_SUMS = 256,    /* cumsum: running sums in f32 of more elements are compensated */
};

static int64_t stride_along(const ml_value *v, ml_axis axis) {
    return v->stride[ml_type_find(&v->type, axis)];
}

/* Row loops of an operand, in the order of the input's axes. */
static ml_template_loops row_loops(const ml_value *v, const ml_value *x, ml_axis axis) {
    ml_template_loops loops = {0};
    for (int i = 0; i < x->type.rank; i++)
        if (x->type.axis[i] != axis)
            template_loop_add(&loops, x->type.size[i], stride_along(v, x->type.axis[i]));
    return loops;
}

static const char *row_offset(printer *p, const ml_value *v, const ml_value *x, ml_axis axis) {
    ml_template_loops loops = row_loops(v, x, axis);
    return template_offset(p->text.arena, &loops, "row");
}

/* How many consecutive rows are sure to be adjacent in memory. */
static int64_t adjacent_rows(const ml_value *v, const ml_value *x, ml_axis axis, int64_t most) {
    ml_template_loops loops = row_loops(v, x, axis);
    int last = loops.count - 1;
    if (last < 0 || loops.stride[last] != 1) return 1;
    while (loops.size[last] % most != 0) most /= 2;
    return most;
}

static void set_row(printer *p, const char *name, const ml_value *v, const ml_value *x,
                    ml_axis axis, ml_axis out_axis) {
    ml_template *t = &p->text;
    template_set_text(t, ml_arena_format(t->arena, "%s_ROW(row)", name), row_offset(p, v, x, axis));
    template_set(t, ml_arena_format(t->arena, "%s_STRIDE", name), "%lldLL",
                 (long long)stride_along(v, out_axis));
}

/* Outputs: values and i32 indices of SORT and TOP_K; either may be absent. */
static void set_outputs(printer *p, const ml_value *x, ml_axis axis, ml_axis out_axis) {
    static const char *const names[] = {"VALUES", "INDICES"};
    ml_template *t = &p->text;
    for (int i = 0; i < 2; i++) {
        template_set_text(t, ml_arena_format(t->arena, "%s_AT", names[i]), "-1");
        set_row(p, names[i], x, x, axis, axis);
    }
    for (int i = 0; i < p->step->write_count; i++) {
        int at = p->step->read_count + i;
        const ml_value *y = template_value(p->schedule, p->step, at);
        bool indices =
            i == 1 || (y->node && ml_graph_node(p->schedule->graph, y->node)->op == ML_OP_OUT);
        template_set(t, ml_arena_format(t->arena, "%s_AT", names[indices]), "%d", at);
        set_row(p, names[indices], y, x, axis, out_axis);
    }
}

static void begin(printer *p, ml_schedule *s, ml_step *step) {
    *p = (printer){.schedule = s, .step = step, .text = template_begin(s)};
    ml_template *t = &p->text;
    const int64_t *args = ml_graph_args(s->graph, step->node);
    const ml_value *x = template_value(s, step, 0);
    ml_axis axis = (ml_axis)args[0];
    p->op = (ml_op)ml_graph_node(s->graph, step->node)->op;
    p->size = x->type.size[ml_type_find(&x->type, axis)];
    p->rows = ml_type_elements(&x->type) / p->size;
    p->kept = p->op == ML_OP_TOP_K ? args[1] : p->size;
    p->stride = stride_along(x, axis);
    p->backwards = p->op == ML_OP_TOP_K || args[1] != 0;
    ml_dtype dtype = (ml_dtype)x->type.dtype;
    p->wide = ml_dtypes[dtype].bytes == 8;
    bool is_float = ml_dtypes[dtype].kind == ML_KIND_FLOAT;
    template_set(t, "POINTERS", "%d", step->read_count + step->write_count);
    template_set(t, "SCALARS", "0");
    template_set(t, "ROWS", "%lldLL", (long long)p->rows);
    template_set(t, "SIZE", "%lld", (long long)p->size);
    template_set(t, "KEPT", "%lld", (long long)p->kept);
    template_set(t, "BACKWARDS", "%d", p->backwards);
    template_set(t, "DESCENDING", "%d", p->backwards);
    template_set(t, "WIDE", "%d", p->wide);
    template_set(t, "IS_FLOAT", "%d", is_float);
    template_set_text(t, "MEMORY", emit_memory_type(dtype));
    template_set_text(t, "REAL", emit_compute_type(dtype));
    const char *adder = dtype == ML_I64 ? "unsigned long long" : "unsigned";
    template_set_text(t, "ADDER", is_float ? emit_compute_type(dtype) : adder);
    template_set_text(t, "LOAD", ml_dtypes[dtype].load);
    template_set_text(t, "STORE", ml_dtypes[dtype].store);
    set_row(p, "X", x, x, axis, axis);
    if (p->op == ML_OP_CUMSUM)
        set_row(p, "Y", template_value(s, step, 1), x, axis, axis);
    else
        set_outputs(p, x, axis, p->op == ML_OP_TOP_K ? (ml_axis)args[2] : axis);
}

static ml_kernel *finish(printer *p, const char *file, const char *label) {
    return template_file(&p->text, file, label, p->step->read_count + p->step->write_count);
}

/* ---- CPU ---- */

/* Whether running sums would lose digits in f32. */
static bool is_long_sum(const printer *p) {
    const ml_value *x = template_value(p->schedule, p->step, 0);
    return p->size > LONG_SUMS && strcmp(ml_suffix(x->type.dtype), "f32") == 0;
}

static void cumsum_cpu(printer *p) {
    const ml_value *x = template_value(p->schedule, p->step, 0);
    if (is_long_sum(p)) template_set_text(&p->text, "ADDER", "double");
    const ml_value *y = template_value(p->schedule, p->step, 1);
    ml_axis axis = (ml_axis)ml_graph_args(p->schedule->graph, p->step->node)[0];
    int64_t lanes = adjacent_rows(x, x, axis, LANES); /* rows summed side by side */
    lanes = adjacent_rows(y, x, axis, lanes);
    template_set(&p->text, "LANES", "%lld", (long long)lanes);
    p->step->kernel = finish(p, "cumsum.c", "cumsum");
    p->step->kernel->units = p->rows / lanes;
    p->step->kernel->grain = 1 + 30000 / (p->size * lanes);
}

static void sort_cpu(printer *p) {
    ml_template *t = &p->text;
    bool insert = p->op == ML_OP_TOP_K && p->kept <= INSERTED;
    int at = -1;
    if (!insert && p->size > STACK_KEYS)
        at =
            template_workspace(p->schedule, p->step, ML_I64, p->rows * p->size * (p->wide ? 4 : 2));
    template_set(t, "INSERTION", "%d", insert);
    template_set(t, "WORKSPACE_AT", "%d", at);
    p->step->kernel = finish(p, "sort.c", p->op == ML_OP_SORT ? "sort" : "top_k");
    p->step->kernel->units = p->rows;
    p->step->kernel->grain = 1 + 5000 / p->size;
}

/* ---- CUDA ---- */

static int64_t power_of_two(int64_t n) {
    int64_t power = 1;
    while (power < n) power *= 2;
    return power;
}

static void cumsum_cuda(printer *p) {
    const ml_value *x = template_value(p->schedule, p->step, 0);
    ml_axis axis = (ml_axis)ml_graph_args(p->schedule->graph, p->step->node)[0];
    bool by_threads =
        p->size <= 32 || (p->stride != 1 && p->rows >= 4096 && adjacent_rows(x, x, axis, 32) == 32);
    template_set(&p->text, "THREAD_A_ROW", "%d", by_threads);
    template_set(&p->text, "COMPENSATED", "%d", is_long_sum(p));
    p->step->kernel = finish(p, "cumsum.cu", "cumsum");
    if (by_threads)
        template_launch(p->step->kernel, (p->rows + 127) / 128, 1, 1, 128, 0);
    else
        template_launch(p->step->kernel, p->rows, 1, 1, 256, 0);
}

/* Append a launch of `kernel` with scalars of its own to a chain. */
static ml_kernel **add_launch(printer *p, ml_kernel **at, const ml_kernel *kernel, int64_t blocks,
                              uint32_t threads, int64_t width, int64_t second, int64_t third) {
    *at = ML_NEW(p->text.arena, ml_kernel);
    **at = *kernel;
    template_launch(*at, blocks, 1, 1, threads, 0);
    (*at)->scalar[0] = width, (*at)->scalar[1] = second, (*at)->scalar[2] = third;
    return &(*at)->next;
}

static void sort_long(printer *p) {
    int64_t padded = power_of_two(p->size), all = p->rows * padded;
    int64_t tile = p->wide ? SHARED_KEYS / 2 : SHARED_KEYS;
    int keys = template_workspace(p->schedule, p->step, ML_I64, all * (p->wide ? 2 : 1));
    template_set(&p->text, "KEYS_AT", "%d", keys);
    template_set(&p->text, "PADDED", "%lld", (long long)padded);
    template_set(&p->text, "TILE", "%lld", (long long)tile);
    template_set(&p->text, "POINTERS", "%d", p->step->read_count + p->step->write_count);
    template_set(&p->text, "SCALARS", "3");
    ml_kernel *sort = finish(p, "sort_tiles.cu", "sort keys"), **at = &p->step->kernel;
    ml_kernel *exchange = finish(p, "sort_exchange.cu", "sort exchange");
    sort->scalar_count = exchange->scalar_count = 3;
    at = add_launch(p, at, sort, all / tile, 1024, 2, tile, 0);
    for (int64_t width = 2 * tile; width <= padded; width *= 2) {
        for (int64_t span = width; span > tile;) {
            int64_t together = span / tile < 8 ? span / tile : 8;
            span /= together;
            at = add_launch(p, at, exchange, (all / together + 255) / 256, 256, width, span,
                            together);
        }
        at = add_launch(p, at, sort, all / tile, 1024, width, width, 0);
    }
}

typedef struct {
    int64_t blocks; /* for each row */
    uint32_t threads;
} known_grid;

/* What has the same elements in another order or shape. */
static ml_ref unmoved(const ml_graph *g, ml_ref n) {
    while (ml_op_is(ml_graph_node(g, n)->op, ML_VIEW)) n = ml_graph_source(g, n, 0);
    return n;
}

/* All elements are at least 0 and less than this; 0 where that is not known. */
static int64_t kinds_of(const ml_graph *g, ml_ref n) {
    n = unmoved(g, n);
    bool chosen = ml_graph_node(g, n)->op == ML_OP_OUT; /* of several: TOP_K's indices */
    if (chosen) n = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, n)->op != (chosen ? ML_OP_TOP_K : ML_OP_ARGMAX)) return 0;
    const ml_type *from = ml_graph_type(g, ml_graph_source(g, n, 0));
    return from->size[ml_type_find(from, (ml_axis)ml_graph_args(g, n)[0])];
}

/* The indices of a sort along the same axis. */
static bool is_permutation(const ml_graph *g, ml_ref n, ml_axis axis) {
    while (ml_graph_node(g, n)->op == ML_OP_PERMUTE) n = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, n)->op != ML_OP_OUT) return false;
    ml_ref sort = ml_graph_source(g, n, 0);
    return ml_graph_node(g, sort)->op == ML_OP_SORT && (ml_axis)ml_graph_args(g, sort)[0] == axis;
}

/* The file of the kernel of a SORT of integers that the graph says are few kinds or a permutation,
 * of which nothing is compared; NULL: neither. Numbers that TOP_K or ARGMAX chose (a token's
 * experts) are counted; sorting the indices that a SORT gave gives the inverse permutation. */
static const char *file_of_known(ml_template *t, const ml_graph *g, ml_ref sort, int64_t size,
                                 known_grid *grid) {
    enum { PART = 256, THREADS = 1024, MOST_KINDS = 256, MOST_HELD = 32 };
    ml_ref x = ml_graph_source(g, sort, 0);
    if (ml_graph_node(g, sort)->op != ML_OP_SORT || ml_graph_type(g, x)->dtype != ML_I32)
        return NULL;
    *grid = (known_grid){(size + PART - 1) / PART, PART};
    template_set(t, "PARTS", "%lld", (long long)grid->blocks);
    if (is_permutation(g, x, (ml_axis)ml_graph_args(g, sort)[0])) return "sort_inverse.cu";
    int64_t kinds = kinds_of(g, x), held = (size + THREADS - 1) / THREADS;
    if (kinds == 0 || kinds > MOST_KINDS || held > MOST_HELD) return NULL;
    *grid = (known_grid){1, THREADS};
    template_set(t, "KINDS", "%lld", (long long)kinds);
    template_set(t, "HELD", "%lld", (long long)held);
    return "sort_counted.cu";
}

static void sort_cuda(printer *p) {
    ml_template *t = &p->text;
    const bool top = p->op == ML_OP_TOP_K;
    int64_t padded = power_of_two(p->size), grid = p->rows;
    uint32_t threads = 512;
    known_grid known;
    const char *file = file_of_known(t, p->schedule->graph, p->step->node, p->size, &known);
    if (file) {
        grid = p->rows * known.blocks, threads = known.threads;
    } else if (top && p->kept <= WARP_KEPT && p->size <= WARP_ROW) {
        file = "top_k.cu", threads = 128, grid = (p->rows + 3) / 4;
        template_set(t, "HELD", "%lld", (long long)(p->size + 31) / 32);
    } else if (top && p->kept <= BLOCK_KEPT) {
        file = "top_k.cu";
        template_set(t, "HELD", "0");
    } else if (p->size > (p->wide ? SHARED_KEYS / 2 : SHARED_KEYS)) {
        sort_long(p);
        return;
    } else {
        int64_t block_rows = padded >= 512 ? 1 : 512 / padded;
        threads = padded >= 2048 ? 1024 : 256;
        file = "sort_rows.cu", grid = (p->rows + block_rows - 1) / block_rows;
        template_set(t, "PADDED", "%lld", (long long)padded);
        template_set(t, "BLOCK_ROWS", "%lld", (long long)block_rows);
        template_set(t, "THREADS", "%u", threads);
    }
    p->step->kernel = finish(p, file, top ? "top_k" : "sort");
    template_launch(p->step->kernel, grid, 1, 1, threads, 0);
}

void ml_template_scan(ml_schedule *s, ml_step *step) {
    printer p;
    begin(&p, s, step);
    bool cuda = s->target->kind == ML_TARGET_CUDA;
    if (p.op == ML_OP_CUMSUM)
        (cuda ? cumsum_cuda : cumsum_cpu)(&p);
    else
        (cuda ? sort_cuda : sort_cpu)(&p);
}
