/* Products by groups of rows (lower.h, ml_ragged) on CUDA (cuda/ragged*.cu). Offsets are read on
 * the device: the host never waits for them, and the grid is what the most ragged groups would
 * need.
 *
 * A group's rows are those of all elements of the batch, one after another, so that tiles are full
 * however few rows one element has. RAGGED_DOT: a warp finds the tile's group by a scan over the
 * groups' tiles, then a table in shared memory has the offset of each row of the tile; the last
 * blocks clear what is of no group. RAGGED_OUTER: a tile belongs to one group and sums over its
 * rows in order, so that results repeat. bf16 runs on tensor cores (on Hopper by ragged_tma.cu or,
 * where the driver or the strides do not allow it, ragged_wgmma.cu; elsewhere and for few columns
 * by ragged_mma.cu), everything else by plain multiplications (ragged_plain.cu). Few rows in all,
 * as steps of decoding have, are products of few rows each (few_rows.cu).
 *
 * Floats of 8 bits are multiplied on Hopper by ragged_tma.cu, which reads both operands along the
 * sum. Matrices whose columns are contiguous are transposed before (transpose.cu), and so are both
 * operands of RAGGED_OUTER, by groups (ragged_turn.cu). Gradients (E5M2) and RAGGED_OUTER are added
 * up in f32, 128 of depth at a time; E4M3 by E4M3, forward, by the product's own adder. */
#include "runtime/ops/ragged/ragged.h"
#include "codegen/kernels/few_rows.h"
#include "codegen/kernels/template.h"

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    const ml_ragged *r;
    int64_t tile_m, tile_n, tiles; /* most tiles of rows */
    int64_t height;                /* blocks along the rows */
    int turned[2]; /* pointers of what is written of operands of 8 bits for the product; else 0 */
} printer;

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

/* What every such product reads, before numbers of the rows. */
static int reads_of(const ml_ragged *r) {
    return r->scaled ? RAGGED_MOST_SOURCES : RAGGED_SCALE;
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
    r->batch = batch ? ml_type_size(&a->type, batch) : 1;
    r->a_batch = stride_of(a, batch), r->c_batch = r->outer ? 0 : stride_of(c, batch);
    r->b_batch = r->outer ? stride_of(b, batch) : 0;
    r->start_batch = stride_of(starts, batch), r->end_batch = stride_of(ends, batch);
    r->start_stride = stride_of(starts, groups), r->end_stride = stride_of(ends, groups);
    r->rows = ml_type_size(&a->type, rows);
    r->groups = ml_type_size(&starts->type, groups);
    r->k = ml_type_size(&a->type, k);
    r->n = ml_type_size(&b->type, n);
    r->a_row = stride_of(a, rows), r->a_col = stride_of(a, k);
    r->b_group = r->outer ? 0 : stride_of(b, groups);
    r->b_row = stride_of(b, r->outer ? rows : k), r->b_col = stride_of(b, n);
    r->c_group = r->outer ? stride_of(c, groups) : 0;
    r->c_row = stride_of(c, r->outer ? k : rows), r->c_col = stride_of(c, n);
    r->squares = r->outer && args[2] != 0;
    r->gated = r->outer ? 0 : (ml_ref)args[3];
    r->scaled = ml_ragged_is_scaled(s->graph, ml_graph_source(s->graph, step->node, 0));
    r->rows_known = step->read_count - reads_of(r);
    if (r->squares || r->gated) {
        const ml_value *second = template_value(s, step, step->read_count + 1);
        r->s_group = stride_of(second, groups), r->s_batch = stride_of(second, batch);
        r->s_row = stride_of(second, r->outer ? k : rows), r->s_col = stride_of(second, n);
    }
    r->dtype = (ml_dtype)a->type.dtype, r->b_dtype = (ml_dtype)b->type.dtype;
    r->c_dtype = (ml_dtype)c->type.dtype;
    return r;
}

bool ml_scaled_ragged_kernel(const ml_target *target, const ml_graph *g, ml_ref n) {
    enum { HOPPER = 90, UNIT = 16, GROUPS = 1024, SEGMENTS = 2048 };
    const ml_type *out = ml_graph_type(g, n), *x = ml_graph_type(g, ml_graph_source(g, n, 0));
    const ml_type *bounds = ml_graph_type(g, ml_graph_source(g, n, 2));
    const int64_t *args = ml_graph_args(g, n), groups = ml_type_size(bounds, (ml_axis)args[1]);
    const int64_t depth = ml_graph_node(g, n)->op == ML_OP_RAGGED_OUTER
                              ? out->size[out->rank - 2]
                              : ml_type_size(x, (ml_axis)args[2]);
    return target->kind == ML_TARGET_CUDA && target->arch == HOPPER && !target->no_fuse &&
           !target->no_wgmma && !target->no_tma && depth % UNIT == 0 &&
           out->size[out->rank - 1] % UNIT == 0 && groups <= GROUPS &&
           ml_type_elements(bounds) <= SEGMENTS && (out->dtype == ML_BF16 || out->dtype == ML_F32);
}

static int pointers(const printer *p) {
    return p->step->read_count + p->step->write_count;
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
           !p->schedule->target->no_wgmma;
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

/* The function of a row's halves: a body that declares values of x0, x1 and the numbers x2, x3 of
 * the row, and the result; the numbers of row `row` of element `batch`. */
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
    template_set_text(&p->text, "GATED_BODY", body.text ? body.text : "");
    template_set_text(&p->text, "GATED_RESULT", result);
    for (int i = 0; i < RAGGED_GATED_ROWS; i++) {
        if (i >= r->rows_known) {
            ml_text_add(&numbers, "%s0.0f", i ? ", " : "");
            continue;
        }
        const int at = reads_of(r) + i;
        const ml_value *v = template_value(p->schedule, p->step, at);
        const ml_value *starts = template_value(p->schedule, p->step, 2);
        ml_axis rows = (ml_axis)ml_graph_args(p->schedule->graph, p->step->node)[0], batch = 0;
        for (int k = 0; k < v->type.rank; k++)
            if (v->type.axis[k] != rows && ml_type_find(&starts->type, v->type.axis[k]) >= 0)
                batch = v->type.axis[k];
        ml_text_add(&numbers, "%s((const float *)a.p[%d])[batch * %lldLL + row * %lldLL]",
                    i ? ", " : "", at, (long long)stride_of(v, batch),
                    (long long)stride_of(v, rows));
    }
    template_set_text(&p->text, "ROW_NUMBERS(batch, row)", numbers.text);
}

static bool is_right_deep(const ml_ragged *r) {
    return !r->outer && r->b_col != 1;
}

/* In elements, and other numbers of 64 bits. */
static void set_strides(printer *p) {
    const ml_ragged *r = p->r;
    const struct {
        const char *name;
        int64_t value;
    } strides[] = {{"ROWS", r->rows},
                   {"HALF", r->n / 2},
                   {"A_BATCH", r->a_batch},
                   {"A_ROW", r->a_row},
                   {"A_COL", r->a_col},
                   {"B_BATCH", r->b_batch},
                   {"B_GROUP", r->b_group},
                   {"B_ROW", r->b_row},
                   {"B_COL", r->b_col},
                   {"C_BATCH", r->c_batch},
                   {"C_GROUP", r->c_group},
                   {"C_ROW", r->c_row},
                   {"C_COL", r->c_col},
                   {"S_BATCH", r->s_batch},
                   {"S_GROUP", r->s_group},
                   {"S_ROW", r->s_row},
                   {"S_COL", r->s_col},
                   {"START_BATCH", r->start_batch},
                   {"START_STRIDE", r->start_stride},
                   {"END_BATCH", r->end_batch},
                   {"END_STRIDE", r->end_stride},
                   {"RIGHT_STRIDE", is_right_deep(r) ? r->b_col : r->b_row}};
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        template_set(&p->text, strides[i].name, "%lldLL", (long long)strides[i].value);
}

static void set_sizes(printer *p) {
    const ml_ragged *r = p->r;
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {{"POINTERS", pointers(p)},
                 {"C_AT", p->step->read_count},
                 {"S_AT", p->step->read_count + 1},
                 {"OUTER", r->outer},
                 {"SQUARES", r->squares},
                 {"GATED", r->gated != 0},
                 {"SCALE", r->scaled ? RAGGED_SCALE : 0},
                 {"BYTES", r->scaled},
                 {"PROMOTES", r->scaled && (r->outer || r->dtype != ML_E4M3)},
                 {"LEFT_FLAT", r->outer && !r->scaled},
                 {"NARROW", r->c_dtype == ML_BF16},
                 {"RIGHT_DEEP", is_right_deep(r)},
                 {"BATCHES", r->batch},
                 {"GROUPS", r->groups},
                 {"K_SIZE", r->k},
                 {"N_SIZE", r->n},
                 {"TILE_M", p->tile_m},
                 {"TILE_N", p->tile_n},
                 {"TILES", p->tiles},
                 {"N_TILES", (r->n + p->tile_n - 1) / p->tile_n},
                 {"HEIGHT", p->height},
                 {"BAND", band_of(p)},
                 {"WINDOW", CLEAR_WINDOW},
                 {"WINDOWS", windows_of(r)}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        template_set(&p->text, sizes[i].name, "%lld", (long long)sizes[i].value);
    template_set_text(&p->text, "MEMORY", emit_memory_type(r->dtype));
    template_set_text(&p->text, "RIGHT_MEMORY", emit_memory_type(r->b_dtype));
    template_set_text(&p->text, "RIGHT_LOAD", ml_dtypes[r->b_dtype].load);
    template_set_text(&p->text, "LEFT_FORMAT", ml_dtypes[r->dtype].name);
    template_set_text(&p->text, "RIGHT_FORMAT", ml_dtypes[r->b_dtype].name);
    template_set_text(&p->text, "RESULT", emit_memory_type(r->c_dtype));
    template_set_text(&p->text, "ADDER", r->dtype == ML_F64 ? "double" : "float");
    template_set_text(&p->text, "LOAD", ml_dtypes[r->dtype].load);
    template_set_text(&p->text, "STORE", ml_dtypes[r->c_dtype].store);
    template_set_text(&p->text, "GATED_BODY", "");
    template_set_text(&p->text, "GATED_RESULT", "0.0f");
    template_set_text(&p->text, "ROW_NUMBERS(batch, row)", "0.0f");
    set_strides(p);
    if (r->gated) set_gated(p);
}

static ml_kernel *choose_file(printer *p, const char *file, const char *label) {
    label = ml_arena_format(p->text.arena, "ragged_%s%s", p->r->outer ? "outer" : "dot", label);
    ml_kernel *kernel = template_file(&p->text, file, label, pointers(p));
    kernel->contracts = !p->r->gated; /* bits as those of a kernel of loops */
    return kernel;
}

static ml_kernel *mma_kernel(printer *p) {
    const ml_ragged *r = p->r;
    ml_template *t = &p->text;
    bool left_deep = !r->outer, right_deep = is_right_deep(r);
    int64_t deep_bytes = 128 * 72 * 2, flat_bytes = 64 * 136 * 2;
    int64_t left_bytes = left_deep ? deep_bytes : flat_bytes;
    int64_t slot_bytes = left_bytes + (right_deep ? deep_bytes : flat_bytes);
    template_set(t, "LEFT_DEEP", "%d", left_deep);
    template_set(t, "LEFT_BYTES", "%lld", (long long)left_bytes);
    template_set(t, "SLOT_BYTES", "%lld", (long long)slot_bytes);
    ml_kernel *kernel = choose_file(p, "ragged_mma.cu", "");
    kernel->shared_bytes = (uint32_t)(2 * slot_bytes);
    return kernel;
}

static ml_kernel *wgmma_kernel(printer *p) {
    enum { SLOTS = 4, SLOT_BYTES = (128 + 256) * 128, ALIGNMENT = 1024 };
    ml_kernel *kernel = choose_file(p, "ragged_wgmma.cu", " wgmma");
    kernel->shared_bytes = SLOTS * SLOT_BYTES + ALIGNMENT;
    return kernel;
}

static ml_kernel *plain_kernel(printer *p) {
    const ml_ragged *r = p->r;
    template_set(&p->text, "LEFT_DEEP", "%d", (r->outer ? r->a_row : r->a_col) == 1);
    template_set(&p->text, "RIGHT_DEEP", "%d", r->b_row == 1);
    return choose_file(p, "ragged_plain.cu", " plain");
}

static ml_kernel *squares_kernel(printer *p) {
    const ml_ragged *r = p->r;
    const int64_t rows = RAGGED_SQUARE_ROWS, columns = RAGGED_SQUARE_COLUMNS;
    int64_t wide = (r->n + columns - 1) / columns;
    template_set(&p->text, "SQUARES_WIDE", "%lld", (long long)wide);
    ml_kernel *kernel = template_file(&p->text, "ragged_squares.cu", "squares", pointers(p));
    template_launch(kernel, wide * ((r->k + rows - 1) / rows), r->groups, 1, 256, 0);
    return kernel;
}

static ml_kernel *gated_kernel(printer *p) {
    ml_kernel *kernel = template_file(&p->text, "ragged_gated.cu", "gated", pointers(p));
    kernel->contracts = false;
    template_launch(kernel, p->r->batch * p->r->rows, 1, 1, 256, 0);
    return kernel;
}

/* ---- The copy engine: tensor maps ---- */

enum { HEIGHTS = 7 }; /* of boxes: 64, 32, ... 1 lines */
enum { ROWS = 128, COLUMNS = 256, LINES = 64, SLOTS = 4, THREADS = 384, CLUSTER = 2 };
enum { LINE_BYTES = 128, BOX_BYTES = LINES * LINE_BYTES, PART_BYTES = 16 };
enum { SLOT_BYTES = (ROWS + COLUMNS) / LINES * BOX_BYTES };

/* Boxes of 128 bytes of some lines of [depth][line][column], columns contiguous. */
static ml_tensor_map map_of(int pointer, ml_dtype dtype, const int64_t size[3],
                            const int64_t stride[3], int lines) {
    const int bytes = ml_dtypes[dtype].bytes, part = PART_BYTES / bytes;
    ml_tensor_map map = {.pointer = pointer,
                         .dtype = dtype,
                         .rank = 3,
                         .box = {LINE_BYTES / bytes, lines, 1},
                         .swizzle = LINE_BYTES};
    for (int i = 0; i < 3; i++) {
        map.size[i] = size[i];
        /* an axis of one element has any stride, but it must be one that a map may have */
        map.stride[i] = size[i] > 1 ? stride[i] : i ? (size[0] + part - 1) / part * part : 1;
    }
    return map;
}

/* Places of transposed rows: whole tiles for each group. */
static int64_t places_of(const ml_ragged *r) {
    return (r->batch * r->rows / ROWS + r->groups) * ROWS;
}

/* Both operands of an outer product, transposed. */
static void add_turned_maps(const printer *p, ml_kernel *kernel) {
    const ml_ragged *r = p->r;
    const int64_t places = places_of(r), stride[3] = {1, places, places};
    ml_tensor_map *map = ML_NEW_ARRAY(p->text.arena, ml_tensor_map, 2);
    for (int i = 0; i < 2; i++) {
        const int64_t size[3] = {places, i ? r->n : r->k, 1};
        map[i] = map_of(p->turned[i], i ? r->b_dtype : r->dtype, size, stride, LINES);
    }
    kernel->maps = map;
    kernel->map_count = 2;
}

/* One for each height of boxes of rows; the right operand of an outer product has rows too. */
static void add_maps(const printer *p, ml_kernel *kernel) {
    const ml_ragged *r = p->r;
    int64_t left[3] = {r->k, r->rows, r->batch}, left_stride[3] = {1, r->a_row, r->a_batch};
    int64_t right[3] = {r->n, r->rows, r->batch}, right_stride[3] = {1, r->b_row, r->b_batch};
    bool deep = !r->outer && r->b_col != 1;
    if (!r->outer) {
        right[0] = deep ? r->k : r->n, right[1] = deep ? r->n : r->k, right[2] = r->groups;
        right_stride[1] = deep ? r->b_col : r->b_row, right_stride[2] = r->b_group;
    }
    if (p->turned[1]) {
        right[0] = r->k, right[1] = r->n;
        right_stride[1] = r->k, right_stride[2] = r->k * r->n;
    }
    kernel->map_count = r->outer ? 2 * HEIGHTS : HEIGHTS + 1;
    ml_tensor_map *map = ML_NEW_ARRAY(p->text.arena, ml_tensor_map, kernel->map_count);
    kernel->maps = map;
    const int from = p->turned[1] ? p->turned[1] : 1;
    for (int i = 0; i < kernel->map_count; i++)
        map[i] = i < HEIGHTS
                     ? map_of(0, r->dtype, left, left_stride, LINES >> i)
                     : map_of(from, r->b_dtype, right, right_stride, LINES >> (i - HEIGHTS));
}

/* Beyond what tensor cores need. */
static bool strides_fit_maps(const ml_ragged *r) {
    enum { SEGMENTS = 2048, GROUPS = 1024, WIDE_BF16 = 8, WIDE_F32 = 4 };
    int64_t wide = r->c_dtype == ML_BF16 ? WIDE_BF16 : WIDE_F32;
    if (r->groups > GROUPS || r->groups * r->batch > SEGMENTS) return false;
    if (r->a_row <= 0 || r->b_row <= 0 || r->b_col <= 0) return false;
    if (r->gated && (r->s_col != 1 || r->s_row % wide || r->s_batch % wide)) return false;
    return r->c_row % wide == 0 && r->c_group % wide == 0 && r->c_batch % wide == 0;
}

/* A matrix of each group, or the rows of each group, of 8 bits, with depth contiguous. */
static ml_kernel *turn_kernel(printer *p, int which) {
    enum { TILE = 128, TILES = 4, BLOCK = 256 };
    const ml_ragged *r = p->r;
    ml_template *t = &p->text;
    const int64_t columns = which ? r->n : r->k;
    template_set(t, "FROM", "%d", which);
    template_set(t, "TO", "%d", p->turned[which]);
    template_set(t, "COLUMNS", "%lldLL", (long long)columns);
    if (!r->outer) {
        template_set(t, "ROWS", "%lldLL", (long long)r->k);
        template_set(t, "ROW", "%lldLL", (long long)r->b_row);
        template_set(t, "MATRIX", "%lldLL", (long long)r->b_group);
        ml_kernel *kernel = choose_file(p, "transpose.cu", " tma");
        template_launch(kernel, (columns + TILE - 1) / TILE, (r->k + TILE - 1) / TILE, r->groups,
                        BLOCK, 0);
        return kernel;
    }
    template_set(t, "FROM_BATCH", "%lldLL", (long long)(which ? r->b_batch : r->a_batch));
    template_set(t, "FROM_ROW", "%lldLL", (long long)(which ? r->b_row : r->a_row));
    template_set(t, "PLACES", "%lldLL", (long long)places_of(r));
    template_set(t, "TILES", "%d", TILES);
    ml_kernel *kernel = choose_file(p, "ragged_turn.cu", " tma");
    template_launch(kernel, (columns + TILES * TILE - 1) / (TILES * TILE), places_of(r) / TILE, 1,
                    BLOCK, 0);
    return kernel;
}

/* Those before the product, and it. */
static ml_kernel *after_turns(printer *p, ml_kernel *product) {
    for (int i = 2; i-- > 0;) {
        if (!p->turned[i]) continue;
        ml_kernel *turn = turn_kernel(p, i);
        turn->next = product;
        product = turn;
    }
    return product;
}

static ml_kernel *tma_kernel(printer *p) {
    enum { ALIGNMENT = 1024, H200 = 132, BAND = 8 };
    const ml_ragged *r = p->r;
    ml_template *t = &p->text;
    int multiprocessors = p->schedule->target->multiprocessors;
    const bool rows_turned = r->outer && r->scaled;
    template_set(t, "MAPS", "%d", rows_turned ? 2 : r->outer ? 2 * HEIGHTS : HEIGHTS + 1);
    template_set(t, "STEP", "%d", LINE_BYTES / ml_dtypes[r->dtype].bytes);
    if (r->scaled) template_set(t, "RIGHT_DEEP", "1");
    template_set(t, "SLOTS", "%d", SLOTS);
    template_set(t, "SLOT_BYTES", "%d", SLOT_BYTES);
    template_set(t, "BAND", "%d", BAND);
    template_set(t, "WIDE", "%d", r->c_dtype == ML_BF16 ? 8 : 4);
    ml_kernel *kernel = choose_file(p, "ragged_tma.cu", " tma");
    if (rows_turned)
        add_turned_maps(p, kernel);
    else
        add_maps(p, kernel);
    int blocks = (multiprocessors > 0 ? multiprocessors : H200) / CLUSTER * CLUSTER;
    template_launch(kernel, blocks, 1, 1, THREADS, SLOTS * SLOT_BYTES + ALIGNMENT);
    return after_turns(p, kernel);
}

/* Of operands of 8 bits: the left one with depth contiguous, rows of an outer product with columns,
 * a matrix with either; all in parts of 16 bytes. */
static bool bytes_fit(const printer *p) {
    const ml_ragged *r = p->r;
    for (int i = 0; i < 2; i++)
        if (template_value(p->schedule, p->step, i)->offset % PART_BYTES) return false;
    const int64_t strides[] = {r->k,
                               r->n,
                               r->a_batch,
                               r->a_row,
                               r->b_batch,
                               r->b_group,
                               r->b_row == 1 ? r->b_col : r->b_row};
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        if (strides[i] % PART_BYTES) return false;
    return r->scaled && r->a_col == 1 && r->c_col == 1 &&
           (r->b_col == 1 || (!r->outer && r->b_row == 1)) && strides_fit_maps(r);
}

/* What the product reads of 8 bits in place of its operands. */
static void add_turned(printer *p) {
    const ml_ragged *r = p->r;
    for (int i = 0; i < 2; i++) {
        if (!r->outer && (i == 0 || r->b_row == 1)) continue;
        const int64_t size = r->outer ? places_of(r) * (i ? r->n : r->k) : r->groups * r->k * r->n;
        p->turned[i] = template_workspace(p->schedule, p->step, i ? r->b_dtype : r->dtype, size);
    }
}

static bool tma_serves(const printer *p) {
    enum { SIXTEEN = 8 }; /* elements of 16 bytes, at least */
    return (bytes_fit(p) || (wgmma_serves(p) && strides_fit_maps(p->r))) &&
           !p->schedule->target->no_tma &&
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
    if (how == TMA) return tma_kernel(p);
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
    if (mma_serves(&p) && few_rows_of_groups(s->target, p.r)) {
        p.tile_m = p.tile_n = p.tiles = p.height = 1; /* of its own */
        set_sizes(&p);
        step->kernel = few_rows_groups_kernel(&p.text, s->target, p.r, pointers(&p));
        if (p.r->gated) step->kernel->next = gated_kernel(&p);
        return;
    }
    method best = tma_serves(&p) ? TMA : wgmma_serves(&p) ? WGMMA : mma_serves(&p) ? MMA : PLAIN;
    method first = p.r->scaled ? PLAIN : best > MMA ? MMA : best;
    if (p.r->scaled && best == TMA) add_turned(&p);
    for (method how = first; how <= best; how++) { /* each falls back on the last */
        if (p.r->scaled && how != first && how != best) continue;
        ml_kernel *fallback = step->kernel;
        step->kernel = print_kernel(&p, how);
        step->kernel->fallback = fallback;
    }
}
