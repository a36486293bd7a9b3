/* Products of few rows on a GPU, of bf16 by bf16 or by weights of 8 bits: a step of decoding reads
 * each weight once, and its time is that of reading. */
#include "codegen/kernels/few_rows.h"
#include <stdlib.h>

enum { PACK_BYTES = 16, EIGHT = 8, ARCH = 80, CLUSTERS = 90 };
enum { BLOCKS = 4 }; /* of a multiprocessor */

static bool on_target(const ml_target *target) {
    return target->kind == ML_TARGET_CUDA && target->arch >= ARCH && !target->no_fuse;
}

static bool of_sizes(int64_t m, int64_t n, int64_t k) {
    enum { FEWEST_COLUMNS = 16, FEWEST_DEPTH = 64, MOST = 1 << 30 };
    return m <= EIGHT && n >= FEWEST_COLUMNS && k >= FEWEST_DEPTH && n <= MOST && k <= MOST;
}

bool ml_few_rows_of_bytes(const ml_target *target, int64_t m, int64_t n, int64_t k) {
    return on_target(target) && of_sizes(m, n, k) && n % PACK_BYTES == 0 && k % PACK_BYTES == 0;
}

static bool is_deep(const ml_gemm *g) {
    return g->b_row == 1 && g->b_col >= g->k;
}

/* Parts of the depth: as many as give each multiprocessor some blocks, each of a few slots. */
static int64_t choose_split(const ml_target *target, int64_t tiles, int64_t steps) {
    enum { MOST = 8, FEWEST_STEPS = 4 };
    int64_t split = BLOCKS * (int64_t)target->multiprocessors / tiles;
    if (split > MOST) split = MOST;
    if (split > steps / FEWEST_STEPS) split = steps / FEWEST_STEPS;
    return split < 1 || target->arch < CLUSTERS ? 1 : split;
}

/* How the work of a product is divided among blocks, and their shared memory. */
typedef struct {
    int64_t tiles, split, slots, bytes;
} division;

static int64_t tile_of(const ml_gemm *g) {
    return ml_dtypes[g->b_dtype].bytes == 1 && !is_deep(g) ? 128 : 64;
}

static division divide(const ml_target *target, const ml_few_rows *p, int64_t height) {
    enum { RING = 48 << 10, LINE = 128 }; /* so that BLOCKS of a few rows fit */
    const ml_gemm *g = p->gemm;
    const bool deep = is_deep(g);
    const int64_t bytes = ml_dtypes[g->b_dtype].bytes, depth = bytes == 1 && deep ? 128 : 64;
    const int64_t tile = tile_of(g), steps = (g->k + depth - 1) / depth;
    const int64_t slot = (deep ? tile : depth) * LINE;
    division d = {.slots = RING / slot};
    for (; p; p = p->next) d.tiles += (p->gemm->n + tile - 1) / tile;
    d.split = choose_split(target, d.tiles * (height > 1 ? height - 1 : 1), steps);
    const int64_t pad = bytes == 1 && deep ? 2 * PACK_BYTES : PACK_BYTES;
    const int64_t range = (steps + d.split - 1) / d.split * depth;
    /* what a block of a cluster receives: of each block as many sums, at least a warp's */
    const int64_t own = g->m * tile / d.split < 32 ? 32 : g->m * tile / d.split + 1;
    d.bytes = d.slots * slot + g->m * (range * 2 + pad) + own * d.split * (int64_t)sizeof(float);
    return d;
}

/* Rows of the first operand that copies of 16 bytes take. */
static bool has_packs(const ml_schedule *s, const ml_step *step, const ml_gemm *g) {
    const int64_t pack = PACK_BYTES / 2;
    return g->a_col == 1 && (g->m == 1 || g->a_row % pack == 0) && g->k % pack == 0 &&
           template_value(s, step, 0)->offset % pack == 0;
}

/* Whether the kernel takes this product. Of 8 bits it takes all that lowering leaves to it. */
static bool serves(const ml_schedule *s, const ml_step *step, const ml_gemm *g, bool computed) {
    const int64_t pack = PACK_BYTES / ml_dtypes[g->b_dtype].bytes;
    if (!on_target(s->target) || !of_sizes(g->m, g->n, g->k)) return false;
    if (divide(s->target, &(ml_few_rows){.gemm = g}, 1).bytes > ml_target_shared(s->target->arch))
        return false;
    for (int i = 0; i < ML_GEMM_BATCHES; i++)
        if (g->batch[i] != 1) return false;
    if (g->a_dtype != ML_BF16 || (g->c_dtype != ML_BF16 && g->c_dtype != ML_F32)) return false;
    if (g->b_dtype != ML_BF16) return ml_dtypes[g->b_dtype].bytes == 1;
    if ((!computed && !has_packs(s, step, g)) || g->c_col != 1 || (!is_deep(g) && g->b_col != 1))
        return false;
    return (is_deep(g) ? g->b_col : g->b_row) % pack == 0 &&
           (is_deep(g) ? g->k : g->n) % pack == 0 && template_value(s, step, 1)->offset % pack == 0;
}

static void set(ml_template *t, const char *name, int64_t value) {
    template_set(t, name, "%lldLL", (long long)value);
}

/* Which product a tile is of, with its pointers: of the step's reads in their order, and writes. */
static void set_products(ml_template *t, const ml_few_rows *list, int c_at) {
    ml_text out = {.arena = t->arena};
    int at = 1;
    for (const ml_few_rows *p = list; p; p = p->next) {
        const ml_gemm *g = p->gemm;
        const bool given[] = {g->epilogue == ML_EPILOGUE_BIAS, p->scaled, g->accumulate};
        const char *pointer[3] = {"0", "0", "0"};
        const long long tiles = (long long)((g->n + tile_of(g) - 1) / tile_of(g));
        const int b = at++;
        for (int i = 0; i < 3; i++)
            if (given[i]) pointer[i] = ml_arena_format(t->arena, "a.p[%d]", at++);
        if (p->next) ml_text_add(&out, "if (tile < %lld) ", tiles);
        ml_text_add(
            &out,
            "return {a.p[%d], %s, %s, %s, a.p[%d], %lldLL, %lldLL, %lldLL, %lldLL, tile * %d};\n",
            b, pointer[1], pointer[0], pointer[2], c_at++, (long long)g->n,
            (long long)(is_deep(g) ? g->b_col : g->b_row), (long long)g->c_row, (long long)g->c_col,
            (int)tile_of(g));
        if (p->next) ml_text_add(&out, "tile -= %lld;\n", tiles);
    }
    template_set_text(t, "PICK", out.text);
    template_set(t, "SCALED", "%d", list->scaled);
    template_set(t, "BIAS", "%d", list->gemm->epilogue == ML_EPILOGUE_BIAS);
    template_set(t, "ADDENDS", "%d", list->gemm->accumulate);
}

/* The kernel of a product of this shape, `height` times, after all that is set for its operands. */
static ml_kernel *print(ml_template *t, const ml_target *target, const ml_gemm *g, bool packs,
                        const ml_few_rows *p, int pointers, int64_t height) {
    enum { THREADS = 128 };
    const division d = divide(target, p, height);
    const bool deep = is_deep(g);
    template_set(t, "ROWS", "%lld", (long long)g->m);
    set(t, "DEPTH", g->k);
    set(t, "A_ROW", g->a_row), set(t, "A_COL", g->a_col);
    template_set(t, "A_PACKS", "%d", packs);
    template_set(t, "COMPUTED", "%d", p->computes != NULL);
    template_set(t, "B_BYTES", "%d", ml_dtypes[g->b_dtype].bytes);
    template_set(t, "B_FP8", "%d", g->b_dtype == ML_E4M3);
    template_set(t, "B_DEEP", "%d", deep);
    template_set(t, "SPLIT", "%lld", (long long)d.split);
    template_set(t, "SLOTS", "%d", (int)d.slots);
    template_set(t, "CONSTANT", "%d", p->constant);
    template_set(t, "BLOCKS", "%d", BLOCKS);
    template_set_text(t, "RESULT", emit_memory_type(g->c_dtype));
    template_set_text(t, "STORE", ml_dtypes[g->c_dtype].store);
    template_set_text(t, "LOAD", ml_dtypes[g->c_dtype].load);
    ml_kernel *kernel = template_file(t, "few_rows.cu", "few_rows", pointers);
    template_launch(kernel, d.tiles * d.split, height, 1, THREADS, d.bytes); /* sums need less */
    return kernel;
}

/* Requests for column k of what no step writes and is the same for all rows: gains of a norm. */
static const char *print_requests(ml_template *t, const ml_kernel_ir *ir, const char **pointers) {
    ml_text out = {.arena = t->arena};
    const int inner = ir->loop_count - 1;
    for (int o = 1; o < ir->operand_count; o++) {
        const ml_operand *operand = &ir->operand[o];
        if (operand->written || ir->row_loops == ir->loop_count || operand->stride[inner] != 1 ||
            (inner > 0 && operand->stride[0] != 0))
            continue;
        ml_text_add(&out, "kernel_asks(%s + k * %dLL);\n", pointers[o],
                    ml_dtypes[operand->dtype].bytes);
    }
    return out.text ? out.text : "";
}

/* The first operand as statements. Its first operand is the step's first, the others come last. */
static void set_computed(ml_template *t, const ml_target *target, const ml_few_rows *p, int reads) {
    const ml_kernel_ir *ir = p->computes;
    const char **pointers = ML_NEW_ARRAY(t->arena, const char *, ir->operand_count + 1);
    int others = -1; /* after the first */
    for (int o = 0; o < ir->operand_count; o++) others += !ir->operand[o].written;
    for (int o = 0, read = 0; o < ir->operand_count; o++) {
        if (ir->operand[o].written) continue;
        pointers[o] =
            ml_arena_format(t->arena, "a.p[%d]", read == 0 ? 0 : reads - others + read - 1);
        read++;
    }
    template_set_text(t, "COMPUTE_ROW", emit_rows(ir, target, pointers, p->gemm->k, t->arena));
    template_set_text(t, "ASK_ROW", print_requests(t, ir, pointers));
}

/* Whether blocks may compute the first operand: all of them at once, so that none does it late. */
static bool computes(const ml_target *target, const ml_few_rows *p) {
    const ml_gemm *g = p->gemm;
    const division d = divide(target, p, 1);
    return emit_rows_serve(p->computes, g->m, g->k, g->a_row) && g->a_col == 1 &&
           d.tiles * d.split <= BLOCKS * (int64_t)target->multiprocessors;
}

/* Whether a further product can be of one kernel with the first. */
static bool is_alike(const ml_few_rows *a, const ml_few_rows *b) {
    const ml_gemm *g = a->gemm, *h = b->gemm;
    return g->m == h->m && g->k == h->k && g->a_row == h->a_row && g->a_col == h->a_col &&
           is_deep(g) == is_deep(h) && g->b_dtype == h->b_dtype && g->c_dtype == h->c_dtype &&
           g->accumulate == h->accumulate && g->epilogue == h->epilogue && a->scaled == b->scaled &&
           a->constant == b->constant;
}

bool ml_template_few_rows(ml_schedule *s, ml_step *step, const ml_few_rows *list) {
    if (!serves(s, step, list->gemm, list->computes != NULL)) return false;
    if (list->computes && !computes(s->target, list)) return false;
    for (const ml_few_rows *p = list->next; p; p = p->next)
        if (!is_alike(list, p)) return false;
    ml_template t = template_begin(s);
    const int pointers = step->read_count + step->write_count;
    template_set(&t, "POINTERS", "%d", pointers);
    template_set(&t, "GROUPS", "%d", 0);
    set(&t, "START_STRIDE", 0), set(&t, "END_STRIDE", 0), set(&t, "B_GROUP", 0);
    set_products(&t, list, step->read_count);
    template_set_text(&t, "COMPUTE_ROW", "");
    template_set_text(&t, "ASK_ROW", "");
    if (list->computes) set_computed(&t, s->target, list, step->read_count);
    const bool packs = list->computes || has_packs(s, step, list->gemm);
    step->kernel = print(&t, s->target, list->gemm, packs, list, pointers, 1);
    if (list->computes) step->kernel->contracts = false;
    return true;
}

bool few_rows_of_groups(const ml_target *target, const ml_ragged *r) {
    return on_target(target) && !r->outer && r->batch == 1 && r->rows <= EIGHT &&
           of_sizes(r->rows, r->n, r->k);
}

ml_kernel *few_rows_groups_kernel(ml_template *t, const ml_target *target, const ml_ragged *r,
                                  int pointers) {
    const ml_gemm gemm = {.m = r->rows,
                          .n = r->n,
                          .k = r->k,
                          .a_row = r->a_row,
                          .a_col = r->a_col,
                          .b_row = r->b_row,
                          .b_col = r->b_col,
                          .c_row = r->c_row,
                          .c_col = r->c_col,
                          .a_dtype = r->dtype,
                          .b_dtype = r->dtype,
                          .c_dtype = r->c_dtype};
    const int64_t groups = r->rows < r->groups ? r->rows : r->groups; /* that have rows, at most */
    const ml_few_rows product = {.gemm = &gemm};
    set_products(t, &product, atoi(template_get(t, "C_AT")));
    template_set_text(t, "COMPUTE_ROW", "");
    template_set_text(t, "ASK_ROW", "");
    return print(t, target, &gemm, true, &product, pointers, groups + 1);
}
