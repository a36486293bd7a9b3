/* Products of few rows in bf16 on a GPU: a step of decoding reads each weight once, and its time is
 * that of reading. With 32 rows cuBLASLt is faster. */
#include "codegen/kernels/template.h"

enum { TILE = 64, LINE = 72, PACK = 8, ROOM = 8, ARCH = 80, CLUSTERS = 90 };

static bool aligned(const ml_value *v) {
    return v->offset % PACK == 0;
}

/* Whether the kernel takes this product. Copies are packs of 8 elements. */
static bool serves(const ml_schedule *s, const ml_step *step, const ml_gemm *g) {
    enum { FEWEST_COLUMNS = 256, FEWEST_DEPTH = 64, MOST = 1 << 30 };
    bool deep = g->b_row == 1 && g->b_col >= g->k;
    if (s->target->kind != ML_TARGET_CUDA || s->target->arch < ARCH || s->target->no_fuse)
        return false;
    for (int i = 0; i < ML_GEMM_BATCHES; i++)
        if (g->batch[i] != 1) return false;
    if (g->a_dtype != ML_BF16 || g->b_dtype != ML_BF16 ||
        (g->c_dtype != ML_BF16 && g->c_dtype != ML_F32))
        return false;
    if (g->m > ROOM || g->n < FEWEST_COLUMNS || g->k < FEWEST_DEPTH || g->n > MOST || g->k > MOST)
        return false;
    if (g->a_col != 1 || g->c_col != 1 || (!deep && g->b_col != 1)) return false;
    if ((g->m > 1 && g->a_row % PACK) || (deep ? g->b_col : g->b_row) % PACK ||
        (deep ? g->k : g->n) % PACK || g->k % PACK)
        return false;
    return aligned(template_value(s, step, 0)) && aligned(template_value(s, step, 1));
}

/* Parts of the depth: as many as give each multiprocessor some blocks, each of a few slots. */
static int64_t choose_split(const ml_target *target, int64_t tiles, int64_t steps) {
    enum { BLOCKS = 4, MOST = 8, FEWEST_STEPS = 4 };
    int64_t split = BLOCKS * (int64_t)target->multiprocessors / tiles;
    if (split > MOST) split = MOST;
    if (split > steps / FEWEST_STEPS) split = steps / FEWEST_STEPS;
    return split < 1 || target->arch < CLUSTERS ? 1 : split;
}

bool ml_template_few_rows(ml_schedule *s, ml_step *step, const ml_gemm *g, bool constant) {
    enum { THREADS = 128, SLOTS = 5, SLOT = (TILE + ROOM) * LINE * 2 };
    if (!serves(s, step, g)) return false;
    ml_template t = template_begin(s);
    int64_t tiles = (g->n + TILE - 1) / TILE, steps = (g->k + TILE - 1) / TILE;
    int64_t split = choose_split(s->target, tiles, steps);
    bool deep = g->b_row == 1 && g->b_col >= g->k, bias = g->epilogue == ML_EPILOGUE_BIAS;
    int pointers = step->read_count + 1;
    template_set(&t, "POINTERS", "%d", pointers);
    template_set(&t, "ROWS", "%lld", (long long)g->m);
    template_set(&t, "COLUMNS", "%lldLL", (long long)g->n);
    template_set(&t, "DEPTH", "%lldLL", (long long)g->k);
    template_set(&t, "A_ROW", "%lldLL", (long long)g->a_row);
    template_set(&t, "B_DEEP", "%d", deep);
    template_set(&t, "B_STRIDE", "%lldLL", (long long)(deep ? g->b_col : g->b_row));
    template_set(&t, "C_ROW", "%lldLL", (long long)g->c_row);
    template_set(&t, "SPLIT", "%lld", (long long)split);
    template_set(&t, "SLOTS", "%d", SLOTS);
    template_set(&t, "CONSTANT", "%d", constant);
    template_set(&t, "BIAS_AT", "%d", bias ? 2 : 0);
    template_set(&t, "ADDEND_AT", "%d", g->accumulate ? step->read_count - 1 : 0);
    template_set(&t, "C_AT", "%d", step->read_count);
    template_set_text(&t, "RESULT", emit_memory_type(g->c_dtype));
    template_set_text(&t, "STORE", ml_dtypes[g->c_dtype].store);
    template_set_text(&t, "LOAD", ml_dtypes[g->c_dtype].load);
    step->kernel = template_file(&t, "few_rows.cu", "few_rows", pointers);
    template_launch(step->kernel, tiles * split, 1, 1, THREADS, SLOTS * SLOT); /* sums need less */
    return true;
}
