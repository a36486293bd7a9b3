/* Products of few rows on a GPU, of bf16 by bf16 or by weights of 8 bits: a step of decoding reads
 * each weight once, and its time is that of reading. */
#include "codegen/kernels/few_rows.h"

enum { TILE = 64, PACK_BYTES = 16, EIGHT = 8, ARCH = 80, CLUSTERS = 90 };

static int64_t most_rows(const ml_target *target) {
    enum { DEFAULT = 8 };
    return target->few_rows ? target->few_rows - 1 : DEFAULT;
}

static bool on_target(const ml_target *target) {
    return target->kind == ML_TARGET_CUDA && target->arch >= ARCH && !target->no_fuse &&
           most_rows(target) > 0;
}

static bool of_sizes(const ml_target *target, int64_t m, int64_t n, int64_t k) {
    enum { FEWEST_COLUMNS = 16, FEWEST_DEPTH = 64, MOST = 1 << 30 };
    return m <= most_rows(target) && n >= FEWEST_COLUMNS && k >= FEWEST_DEPTH && n <= MOST &&
           k <= MOST;
}

bool ml_few_rows_of_bytes(const ml_target *target, int64_t m, int64_t n, int64_t k) {
    return on_target(target) && of_sizes(target, m, n, k) && n % PACK_BYTES == 0 &&
           k % PACK_BYTES == 0;
}

static bool is_deep(const ml_gemm *g) {
    return g->b_row == 1 && g->b_col >= g->k;
}

/* Rows of the first operand that copies of 16 bytes take. */
static bool has_packs(const ml_schedule *s, const ml_step *step, const ml_gemm *g) {
    const int64_t pack = PACK_BYTES / 2;
    return g->a_col == 1 && (g->m == 1 || g->a_row % pack == 0) && g->k % pack == 0 &&
           template_value(s, step, 0)->offset % pack == 0;
}

/* Whether the kernel takes this product. Of 8 bits it takes all that lowering leaves to it. */
static bool serves(const ml_schedule *s, const ml_step *step, const ml_gemm *g) {
    const int64_t pack = PACK_BYTES / ml_dtypes[g->b_dtype].bytes;
    if (!on_target(s->target) || !of_sizes(s->target, g->m, g->n, g->k)) return false;
    for (int i = 0; i < ML_GEMM_BATCHES; i++)
        if (g->batch[i] != 1) return false;
    if (g->a_dtype != ML_BF16 || (g->c_dtype != ML_BF16 && g->c_dtype != ML_F32)) return false;
    if (g->b_dtype != ML_BF16) return ml_dtypes[g->b_dtype].bytes == 1;
    if (!has_packs(s, step, g) || g->c_col != 1 || (!is_deep(g) && g->b_col != 1)) return false;
    return (is_deep(g) ? g->b_col : g->b_row) % pack == 0 &&
           (is_deep(g) ? g->k : g->n) % pack == 0 && template_value(s, step, 1)->offset % pack == 0;
}

/* Parts of the depth: as many as give each multiprocessor some blocks, each of a few slots. */
static int64_t choose_split(const ml_target *target, int64_t tiles, int64_t steps) {
    enum { BLOCKS = 4, MOST = 8, FEWEST_STEPS = 4 };
    int64_t split = BLOCKS * (int64_t)target->multiprocessors / tiles;
    if (split > MOST) split = MOST;
    if (split > steps / FEWEST_STEPS) split = steps / FEWEST_STEPS;
    return split < 1 || target->arch < CLUSTERS ? 1 : split;
}

static void set(ml_template *t, const char *name, int64_t value) {
    template_set(t, name, "%lldLL", (long long)value);
}

static void set_operands(ml_template *t, const ml_few_rows *p, int reads) {
    const ml_gemm *g = p->gemm;
    const bool bias = g->epilogue == ML_EPILOGUE_BIAS;
    int at = 2;
    template_set(t, "POINTERS", "%d", reads + 1);
    template_set(t, "BIAS_AT", "%d", bias ? at++ : 0);
    template_set(t, "SCALE_AT", "%d", p->scaled ? at++ : 0);
    template_set(t, "ADDEND_AT", "%d", g->accumulate ? at++ : 0);
    template_set(t, "C_AT", "%d", reads);
    template_set(t, "GROUPS", "%d", 0);
    set(t, "START_STRIDE", 0), set(t, "END_STRIDE", 0), set(t, "B_GROUP", 0);
}

/* The kernel of a product of this shape, `height` times, after all that is set for its operands. */
static ml_kernel *print(ml_template *t, const ml_target *target, const ml_gemm *g, bool packs,
                        bool constant, int pointers, int64_t height) {
    enum { THREADS = 128, SLOTS = 5 };
    const int64_t bytes = ml_dtypes[g->b_dtype].bytes, depth = bytes == 1 ? 128 : 64;
    const int64_t tiles = (g->n + TILE - 1) / TILE, steps = (g->k + depth - 1) / depth;
    const int64_t split = choose_split(target, tiles * (height > 1 ? height - 1 : 1), steps);
    const bool deep = is_deep(g);
    const int64_t lines = (deep ? TILE : depth) * ((deep ? depth : TILE) * bytes + PACK_BYTES);
    const int64_t room = (g->m + EIGHT - 1) / EIGHT * EIGHT;
    const int64_t slot = lines + room * (depth * 2 + (bytes == 1 && deep ? 2 : 1) * PACK_BYTES);
    template_set(t, "ROWS", "%lld", (long long)g->m);
    template_set(t, "ROOM", "%lld", (long long)room);
    set(t, "COLUMNS", g->n), set(t, "DEPTH", g->k);
    set(t, "A_ROW", g->a_row), set(t, "A_COL", g->a_col);
    set(t, "B_STRIDE", deep ? g->b_col : g->b_row);
    set(t, "C_ROW", g->c_row), set(t, "C_COL", g->c_col);
    template_set(t, "A_PACKS", "%d", packs);
    template_set(t, "B_BYTES", "%d", (int)bytes);
    template_set(t, "B_FP8", "%d", g->b_dtype == ML_E4M3);
    template_set(t, "B_DEEP", "%d", deep);
    template_set(t, "SPLIT", "%lld", (long long)split);
    template_set(t, "SLOTS", "%d", SLOTS);
    template_set(t, "CONSTANT", "%d", constant);
    template_set_text(t, "RESULT", emit_memory_type(g->c_dtype));
    template_set_text(t, "STORE", ml_dtypes[g->c_dtype].store);
    template_set_text(t, "LOAD", ml_dtypes[g->c_dtype].load);
    ml_kernel *kernel = template_file(t, "few_rows.cu", "few_rows", pointers);
    template_launch(kernel, tiles * split, height, 1, THREADS, SLOTS * slot); /* sums need less */
    return kernel;
}

bool ml_template_few_rows(ml_schedule *s, ml_step *step, const ml_few_rows *p) {
    if (!serves(s, step, p->gemm)) return false;
    ml_template t = template_begin(s);
    set_operands(&t, p, step->read_count);
    step->kernel = print(&t, s->target, p->gemm, has_packs(s, step, p->gemm), p->constant,
                         step->read_count + 1, 1);
    return true;
}

bool few_rows_of_groups(const ml_target *target, const ml_ragged *r) {
    return on_target(target) && !r->outer && r->batch == 1 && r->rows <= EIGHT &&
           of_sizes(target, r->rows, r->n, r->k);
}

ml_kernel *few_rows_groups_kernel(ml_template *t, const ml_target *target, const ml_ragged *r,
                                  int pointers) {
    static const char *const absent[] = {"BIAS_AT", "SCALE_AT", "ADDEND_AT"};
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
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) template_set(t, absent[i], "%d", 0);
    return print(t, target, &gemm, true, false, pointers, groups + 1);
}
