/* Kernels of WRITE_ROWS and CACHED_ATTENTION against the reference, on a CPU and on an emulated
 * GPU. */
#include "runtime/ops/cached_attention/cached_attention.h"

#include <string.h>

#include "tests/kernels/support.h"

static void label(fixture *f, const char *text) {
    strncpy(f->label, text, sizeof f->label - 1);
}

/* Distinct rows, one of which is negative and one beyond the end. */
static void write_rows(fixture *f, ml_dtype dtype, const char *cache, const char *index,
                       const char *value) {
    label(f, value);
    ml_ref at = fixture_index(f, index, 1);
    double *rows = f->inputs[f->input_count - 1];
    int64_t count = ml_type_elements(ml_graph_type(f->g, at));
    for (int64_t i = 0; i < count; i++) rows[i] = (double)(i * 5 % 37);
    if (count > 2) rows[1] = -1, rows[2] = 37;
    template_check(f,
                   ml_write_rows(f->g, fixture_input(f, dtype, cache, -1, 1), at,
                                 fixture_input(f, dtype, value, -1, 1), fixture_axis(f, "p")),
                   0);
}

static void all_write_rows(fixture *f) {
    for (int gaps = 0; gaps < 2; gaps++) {
        template_use_gaps(gaps);
        write_rows(f, ML_F32, "p37 h2 d8", "r3 s4", "r3 s4 h2 d8");
        write_rows(f, ML_BF16, "h3 p37 d5", "s4 r2", "d5 r2 h3 s4");
        write_rows(f, ML_F32, "p37", "r1", "r1");
        write_rows(f, ML_F64, "p37 d300", "", "d300");
    }
    template_use_gaps(false);
}
TEST(kernels, write_rows) {
    fixture_run(all_write_rows, 1);
}
TEST(emulate, write_rows) {
    template_use_emulator(true);
    fixture_run(all_write_rows, 1);
    template_use_emulator(false);
}

/* ---- Cached attention ------------------------------------------------------------------------ */

typedef struct {
    const char *name;
    ml_dtype q, kv;
    int rows, fresh, heads, kv_heads, dim, value_dim, block, columns; /* kv_heads 0: shared */
    bool causal, scored;
    int window, length; /* 0: the table's length */
} shape;

static const shape SHAPES[] = {
    {"a step", ML_F32, ML_F32, 3, 1, 4, 4, 32, 32, 16, 4, true, false, 0, 0},
    {"grouped", ML_F32, ML_BF16, 2, 1, 6, 2, 40, 24, 8, 5, true, false, 0, 0},
    {"bf16", ML_BF16, ML_BF16, 2, 1, 8, 1, 64, 64, 16, 20, true, false, 0, 0},
    {"many parts", ML_F32, ML_F32, 1, 1, 2, 2, 16, 16, 16, 60, true, false, 0, 0},
    {"a few", ML_F32, ML_F32, 2, 3, 4, 2, 20, 12, 4, 9, true, true, 0, 0},
    {"a chunk", ML_F32, ML_F32, 2, 37, 4, 2, 24, 24, 16, 8, true, false, 0, 0},
    {"a chunk in bf16", ML_BF16, ML_BF16, 1, 50, 4, 4, 64, 48, 16, 9, true, true, 0, 0},
    {"a window", ML_F32, ML_F32, 2, 1, 2, 1, 8, 8, 4, 30, true, true, 50, 0},
    {"a ring", ML_F32, ML_F32, 3, 5, 4, 2, 8, 8, 4, 6, true, true, 17, 90},
    {"all keys", ML_F32, ML_F32, 2, 4, 2, 2, 8, 8, 4, 6, false, false, 0, 0},
    {"a chunk of groups", ML_BF16, ML_BF16, 2, 45, 6, 2, 72, 40, 16, 8, true, false, 30, 0},
    {"a large group", ML_BF16, ML_BF16, 2, 1, 40, 2, 128, 128, 16, 70, true, false, 0, 0},
    {"wide heads", ML_BF16, ML_BF16, 1, 20, 2, 2, 192, 128, 16, 5, true, true, 0, 0},
    {"a latent", ML_F32, ML_F32, 2, 1, 128, 0, 72, 64, 16, 9, true, false, 0, 0},
    {"a latent in bf16", ML_BF16, ML_BF16, 1, 1, 32, 0, 576, 512, 16, 9, true, false, 0, 0},
};
enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES };
static const shape *current;
static int parallel;

/* tanh(s) + bias[row, head] * (key - query) + weight[pool] */
static ml_ref make_score(fixture *f, const ml_ref *sources, const ml_cached_attention_args *args) {
    ml_graph *g = f->g;
    ml_type score, pool;
    ml_cached_attention_score_type(g, sources, args, &score);
    ml_cached_attention_param_type(g, sources, args, sources[CACHED_CAPTURED + 1], &pool);
    const ml_type *bias = ml_graph_type(g, sources[CACHED_CAPTURED]);
    ml_ref s = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){0}, 1, &score);
    ml_ref zero = ml_map2(g, ML_OP_SUB, s, s);
    ml_ref b = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){1}, 1, bias);
    ml_ref w = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){2}, 1, &pool);
    ml_ref key = ml_cast(g, ml_iota(g, args->kv_seq, args->keys), ML_F32);
    ml_ref query = ml_cast(g, ml_iota(g, args->seq, score.size[2]), ML_F32);
    ml_ref distance = ml_map2(g, ML_OP_SUB, ml_map2(g, ML_OP_ADD, zero, key), query);
    ml_ref x = ml_map2(g, ML_OP_ADD, ml_map1(g, ML_OP_TANH, s), ml_map2(g, ML_OP_MUL, distance, b));
    return ml_map2(g, ML_OP_ADD, x, w);
}

/* Row 0 is full, row 1 has half, the others have nothing, or less than the queries stand at. */
static void set_lengths(fixture *f, const shape *p, int start, int length) {
    const int full = p->length ? p->length : p->block * p->columns;
    for (int r = 0; r < p->rows; r++) {
        const int keys = r == 0 ? full : r == 1 ? full / 2 : 0;
        f->inputs[length][r] = keys;
        f->inputs[start][r] = keys > p->fresh ? keys - p->fresh : 0;
    }
}

static void check_shape(fixture *f) {
    const shape *p = current;
    ml_arena *a = f->arena;
    label(f, p->name);
    const int blocks = p->rows * p->columns;
    const char *kv = p->kv_heads ? ml_arena_format(a, "kv%d", p->kv_heads) : "";
    const char *rows = ml_arena_format(a, "r%d", p->rows);
    ml_ref sources[] = {
        fixture_input(f, p->q,
                      ml_arena_format(a, "r%d s%d h%d d%d", p->rows, p->fresh, p->heads, p->dim),
                      -1, 1),
        fixture_input(f, p->kv, ml_arena_format(a, "p%d %s d%d", blocks * p->block, kv, p->dim), -1,
                      1),
        fixture_input(f, p->kv,
                      ml_arena_format(a, "p%d %s d%d", blocks * p->block, kv, p->value_dim), -1, 1),
        fixture_index(f, ml_arena_format(a, "r%d c%d", p->rows, p->columns), blocks),
        fixture_index(f, rows, 1),
        fixture_index(f, rows, 1),
        fixture_input(f, ML_F32, ml_arena_format(a, "r%d h%d", p->rows, p->heads), -0.1, 0.1),
        fixture_input(f, ML_F32, ml_arena_format(a, "p%d", blocks * p->block), -1, 1)};
    set_lengths(f, p, 4, 5);
    ml_cached_attention_args args = {.seq = fixture_axis(f, "s"),
                                     .pool = fixture_axis(f, "p"),
                                     .columns = fixture_axis(f, "c"),
                                     .heads = fixture_axis(f, "h"),
                                     .kv_heads = p->kv_heads ? fixture_axis(f, "kv") : 0,
                                     .head_dim = fixture_axis(f, "d"),
                                     .kv_seq = fixture_axis(f, "t"),
                                     .keys = p->length ? p->length : p->block * p->columns,
                                     .causal = p->causal,
                                     .window = p->window,
                                     .block = p->block,
                                     .scale = 0.3};
    if (p->scored) args.score = make_score(f, sources, &args);
    ml_ref node = ml_cached_attention(f->g, sources, CACHED_CAPTURED + 2 * p->scored, &args);
    ml_target target = {.kind = ML_TARGET_C, .threads = parallel, .vector_bytes = 32};
    template_check_target(f, node,
                          p->q == ML_BF16    ? 6e-3
                          : p->kv == ML_BF16 ? 1e-5
                                             : 1e-6,
                          &target);
}

static void check_shapes(int first, int step) {
    for (int i = first; i < SHAPE_COUNT; i += step) {
        current = &SHAPES[i];
        fixture_run(check_shape, (uint64_t)i + 1);
    }
}

/* Kernels differ by the threads that share the keys, and by strides: the first test compiles those
 * of all shapes, what follows some (all with DIST_ALL=1). */
TEST(kernels, cached_attention) {
    parallel = 1;
    check_shapes(0, 1);
    parallel = 13;
    check_shapes(!test_all(), test_all() ? 1 : 2);
}
TEST(kernels, cached_attention_gaps) {
    parallel = 3;
    template_use_cuda(test_all()); /* other strides in the same files */
    template_use_gaps(true);
    check_shapes(0, test_all() ? 1 : 3);
    template_use_gaps(false);
    template_use_cuda(true);
}
static void emulate_shapes(int first, int step) {
    parallel = 1;
    template_use_emulator(true);
    check_shapes(first, step);
    template_use_emulator(false);
}
TEST(emulate, cached_attention) {
    emulate_shapes(1, 3);
}
TEST(long, emulate_cached_attention) {
    emulate_shapes(0, 1);
}
