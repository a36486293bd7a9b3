/* Attention kernels against the definition in float64: masks, grouped heads, sizes that are no
 * multiples of tiles, score functions with captured tensors, layouts. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "tests/kernels/support.h"

typedef enum { NO_SCORE, SOFT_CAP, SLOPES, DOCUMENTS, STRIPES } score_kind;
typedef struct {
    int batch, heads, kv_heads, seq, kv_seq, dim;
    bool causal;
    int window;
    score_kind score;
    bool heads_first;
    int pieces, q_start, k_start, offset, second; /* second: of the second piece of the queries */
    bool opposite;                                /* a scale below 0 */
    int key_ranks;
} shape;

static const shape shapes[] = {
    {2, 2, 2, 70, 70, 64, true, 0, NO_SCORE, false},
    {2, 4, 2, 33, 50, 24, true, 0, NO_SCORE, true},
    {1, 2, 2, 50, 33, 40, true, 0, NO_SCORE, false}, /* some rows see nothing */
    {1, 2, 1, 100, 100, 20, false, 0, NO_SCORE, false},
    {1, 6, 2, 90, 90, 32, true, 17, NO_SCORE, false},
    {2, 1, 1, 40, 90, 7, false, 9, NO_SCORE, true},
    {1, 2, 2, 66, 66, 128, true, 0, NO_SCORE, false},
    {3, 2, 2, 1, 80, 16, true, 0, NO_SCORE, false},
    {1, 1, 1, 40, 40, 256, true, 0, NO_SCORE, false},
    {2, 2, 2, 64, 64, 32, true, 0, SOFT_CAP, false},
    {2, 4, 2, 70, 70, 32, true, 0, SLOPES, false},
    {2, 4, 2, 75, 75, 32, true, 0, DOCUMENTS, true},
    {2, 2, 2, 60, 77, 16, false, 30, SLOPES, false},
};

/* Parts of longer ones: what a mask crosses in the middle, hides, and shows. */
static const shape parts[] = {
    {2, 2, 2, 70, 150, 64, true, 0, NO_SCORE, false, true, 130, 90, 0},
    {1, 2, 2, 70, 70, 64, true, 0, NO_SCORE, true, true, 0, 500, 0},
    {1, 2, 1, 100, 100, 20, true, 0, NO_SCORE, false, true, 500, 0, 0},
    {2, 4, 2, 90, 130, 32, true, 50, SLOPES, false, true, 100, 60, 7},
    {1, 2, 2, 80, 100, 32, false, 33, NO_SCORE, true, true, 90, 40, -3},
    {1, 2, 2, 66, 66, 64, true, 40, NO_SCORE, false, true, 300, 100, 0}, /* too far away */
    {1, 2, 2, 66, 75, 32, false, 0, SLOPES, false, true, 300, 100, 0},
    {2, 4, 2, 140, 280, 64, true, 0, NO_SCORE, false, 2, 0, 0, 0, .second = 210}, /* two pieces */
    {1, 2, 1, 66, 132, 32, true, 40, SLOPES, true, 2, 99, 0, 0, .second = 0},
};

/* Keys that all queries are too early or too late for: no kernel may read them. */
static const struct {
    shape shape;
    int start, stop;
} hidden[] = {
    {{1, 2, 2, 64, 256, 64, true, 0, NO_SCORE, false, true, 10, 0, 0}, 128, 256},
    {{1, 2, 1, 64, 192, 32, true, 0, NO_SCORE, true, true, 0, 64, 0}, 0, 192},
    {{1, 2, 2, 60, 256, 64, true, 20, NO_SCORE, false, true, 400, 200, 0}, 0, 128},
};

/* Keys in the order of ranks: of two, each with two batches; of three, in blocks of half a tile. */
static const shape ranked[] = {
    {2, 2, 1, 128, 512, 32, true, 0, NO_SCORE, false, 2, 192, 0, 0, .second = 384, .key_ranks = 2},
    {1, 2, 2, 96, 384, 64, true, 250, DOCUMENTS, true, 2, 150, 0, 0, .second = 320, .key_ranks = 3},
};
enum { RANKED = sizeof ranked / sizeof *ranked };

/* For kernels on warpgroup products: several tiles, ragged ends, each kind of mask and score. */
static const shape hopper[] = {
    {1, 2, 1, 150, 450, 64, true, 0, SOFT_CAP, false}, /* more tiles than stages */
    {1, 2, 1, 200, 210, 128, true, 0, SOFT_CAP, true},
    {1, 2, 2, 70, 300, 64, true, 90, SLOPES, false},
    {2, 1, 1, 75, 75, 128, true, 0, DOCUMENTS, true},
    {1, 2, 2, 150, 70, 128, true, 0, NO_SCORE, false}, /* some rows see nothing */
    {2, 1, 1, 260, 260, 64, false, 0, NO_SCORE, true},
    {1, 1, 1, 70, 400, 64, true, 0, NO_SCORE, false, true, 330, 0, 0},
    {1, 2, 1, 70, 150, 128, true, 50, SLOPES, false, true, 130, 90, 7},
    {1, 2, 1, 330, 450, 64, true, 0, STRIPES, false}, /* blocks that no query sees, and all see */
    {1, 2, 2, 200, 200, 128, false, 0, STRIPES, false},
    {1, 2, 1, 70, 140, 40, true, 0, SOFT_CAP, false}, /* columns that are zeros */
    {1, 2, 2, 150, 140, 96, true, 60, NO_SCORE, true},
    {1, 1, 1, 140, 200, 72, true, 0, DOCUMENTS, false},
    {1, 2, 1, 150, 200, 192, true, 0, DOCUMENTS, false}, /* forward only, as these are */
    {1, 1, 1, 140, 140, 256, true, 0, SOFT_CAP, true},
    {23, 3, 3, 10, 140, 64, true, 0, NO_SCORE, false}, /* heads in groups, the first one smaller */
    {8, 5, 5, 70, 140, 64, true, 80, DOCUMENTS, false},
    {1, 1, 1, 70, 75, 64, false, 0, NO_SCORE, true, .opposite = true},
    {1, 2, 1, 300, 600, 64, true, 0, NO_SCORE, false, 2, 0, 0, 0, .second = 450}, /* two pieces */
    {1, 2, 2, 140, 280, 128, true, 90, SLOPES, true, 2, 140, 0, 0, .second = 70},
    {1, 1, 1, 150, 300, 64, true, 0, DOCUMENTS, false, 2, 75, 0, 0, .second = 150},
};

static const shape *current;
static bool known_to_nvrtc; /* the shapes' CUDA kernels, which another test has it compile */
static ml_dtype dtype;
static ml_target target;
static int spoilt[2], number;
static const char *kind; /* of shape, for messages */

static ml_ref parameter(fixture *f, int64_t index, const ml_type *type) {
    return ml_graph_add(f->g, ML_OP_PARAM, NULL, 0, &index, 1, type);
}

static ml_ref index_of(fixture *f, const char *axis, int64_t size) {
    return ml_cast(f->g, ml_iota(f->g, fixture_axis(f, axis), size), ML_F32);
}

/* s + (k - q) / 32, where q and k are in the same hundred or k is among the head's first ones; with
 * indices as vm/bindings/attention.c makes them, of all axes of the scores. */
static ml_ref stripes(fixture *f, ml_ref x) {
    ml_ref odd = ml_cast(f->g, ml_map2(f->g, ML_OP_NE, x, x), ML_I32), index[3];
    const char *const axes[] = {"s", "t", "h"};
    const int sizes[] = {current->seq, current->kv_seq, current->heads};
    for (int i = 0; i < 3; i++) {
        ml_ref sources[] = {ml_const_int(f->g, ML_BOOL, 1),
                            ml_iota(f->g, fixture_axis(f, axes[i]), sizes[i]), odd};
        index[i] = ml_graph_add(f->g, ML_OP_WHERE, sources, 3, NULL, 0, NULL);
    }
    ml_ref hundred[2], hundredth = ml_const(f->g, ML_F32, 0.01);
    for (int i = 0; i < 2; i++) {
        ml_ref at = ml_map2(f->g, ML_OP_MUL, ml_cast(f->g, index[i], ML_F32), hundredth);
        hundred[i] = ml_map1(f->g, ML_OP_FLOOR, at);
    }
    ml_ref first = ml_map2(f->g, ML_OP_MUL, index[2], ml_const_int(f->g, ML_I32, 90));
    ml_ref others = ml_map2(f->g, ML_OP_AND, ml_map2(f->g, ML_OP_NE, hundred[0], hundred[1]),
                            ml_map2(f->g, ML_OP_GE, index[1], first));
    ml_ref distance = ml_cast(f->g, ml_map2(f->g, ML_OP_SUB, index[1], index[0]), ML_F32);
    distance = ml_map2(f->g, ML_OP_MUL, distance, ml_const(f->g, ML_F32, 1.0 / 32));
    return ml_where(f->g, others, ml_const(f->g, ML_F32, -INFINITY),
                    ml_map2(f->g, ML_OP_ADD, x, distance));
}

/* The score function; sources gets what it captures. */
static ml_ref score(fixture *f, ml_ref *sources, int *count) {
    const shape *s = current;
    char axes[96];
    snprintf(axes, sizeof axes, "b%d h%d s%d t%d", s->batch, s->heads, s->seq, s->kv_seq);
    ml_type type = fixture_type(f, ML_F32, axes);
    ml_ref x = parameter(f, 0, &type);
    if (s->score == SOFT_CAP) {
        ml_ref cap = ml_const(f->g, ML_F32, 2);
        ml_ref y = ml_map1(f->g, ML_OP_TANH, ml_map2(f->g, ML_OP_DIV, x, cap));
        return ml_map2(f->g, ML_OP_MUL, y, cap);
    }
    if (s->score == STRIPES) return stripes(f, x);
    if (s->score == SLOPES) { /* s slope[h] + bias[b, t, s] + h - (q - k) / 16 + b */
        snprintf(axes, sizeof axes, "h%d", s->heads);
        ml_ref slope = sources[(*count)++] = fixture_input(f, ML_F32, axes, 0.5, 1.5);
        snprintf(axes, sizeof axes, "b%d t%d s%d", s->batch, s->kv_seq, s->seq);
        ml_ref bias = sources[(*count)++] = fixture_input(f, dtype, axes, -1, 1);
        ml_ref y = ml_map2(f->g, ML_OP_MUL, x, parameter(f, 1, ml_graph_type(f->g, slope)));
        ml_ref given = parameter(f, 2, ml_graph_type(f->g, bias));
        y = ml_map2(f->g, ML_OP_ADD, y, ml_cast(f->g, given, ML_F32));
        ml_ref q = index_of(f, "s", s->seq), k = index_of(f, "t", s->kv_seq);
        ml_ref sixteenth = ml_const(f->g, ML_F32, 0.0625);
        y = ml_map2(f->g, ML_OP_ADD, y, index_of(f, "h", s->heads));
        y = ml_map2(f->g, ML_OP_SUB, y, ml_map2(f->g, ML_OP_MUL, q, sixteenth));
        y = ml_map2(f->g, ML_OP_ADD, y, ml_map2(f->g, ML_OP_MUL, k, sixteenth));
        return ml_map2(f->g, ML_OP_ADD, y, index_of(f, "b", s->batch));
    }
    snprintf(axes, sizeof axes, "b%d s%d", s->batch, s->seq);
    ml_ref of_q = sources[(*count)++] = fixture_index(f, axes, 3);
    snprintf(axes, sizeof axes, "b%d t%d", s->batch, s->kv_seq);
    ml_ref of_k = sources[(*count)++] = fixture_index(f, axes, 3);
    ml_ref a = ml_cast(f->g, parameter(f, 1, ml_graph_type(f->g, of_q)), ML_F32);
    ml_ref b = ml_cast(f->g, parameter(f, 2, ml_graph_type(f->g, of_k)), ML_F32);
    a = ml_map2(f->g, ML_OP_ADD, ml_map2(f->g, ML_OP_MUL, x, ml_const(f->g, ML_F32, 0)), a);
    ml_ref same = ml_map2(f->g, ML_OP_EQ, a, b);
    return ml_where(f->g, same, x, ml_const(f->g, ML_F32, -INFINITY));
}

static ml_ref operand(fixture *f, const char *heads, int head_count, const char *seq, int length) {
    char axes[96];
    const shape *s = current;
    if (s->heads_first)
        snprintf(axes, sizeof axes, "b%d %s%d %s%d d%d", s->batch, heads, head_count, seq, length,
                 s->dim);
    else
        snprintf(axes, sizeof axes, "b%d %s%d %s%d d%d", s->batch, seq, length, heads, head_count,
                 s->dim);
    return fixture_input(f, dtype, axes, -1.5, 1.5);
}

static void check_shape(fixture *f) {
    const shape *s = current;
    const char *kv = s->heads == s->kv_heads ? "h" : "g";
    snprintf(f->label, sizeof f->label, "%s %d in %s", kind, number, ml_dtypes[dtype].name);
    ml_ref sources[8] = {operand(f, "h", s->heads, "s", s->seq),
                         operand(f, kv, s->kv_heads, "t", s->kv_seq),
                         operand(f, kv, s->kv_heads, "t", s->kv_seq)};
    int count = 3;
    ml_attention_args args = {.seq = fixture_axis(f, "s"),
                              .kv_seq = fixture_axis(f, "t"),
                              .heads = fixture_axis(f, "h"),
                              .kv_heads = fixture_axis(f, kv),
                              .head_dim = fixture_axis(f, "d"),
                              .causal = s->causal,
                              .window = s->window,
                              .pieces = s->pieces,
                              .offset = s->offset,
                              .key_ranks = s->key_ranks,
                              .scale = (s->opposite ? -1 : 1) / sqrt(s->dim)};
    if (s->pieces) sources[count++] = fixture_input(f, ML_I32, "", s->q_start, s->q_start);
    if (s->pieces == 2) sources[count++] = fixture_input(f, ML_I32, "", s->second, s->second);
    if (s->pieces) sources[count++] = fixture_input(f, ML_I32, "", s->k_start, s->k_start);
    if (s->score) args.score = score(f, sources, &count);
    template_spoil(fixture_axis(f, "t"), spoilt[0], spoilt[1]);
    ml_ref o = ml_attention(f->g, sources, count, &args);
    double tolerance = dtype == ML_BF16 ? 1e-2 : 2e-6;
    template_check_target(f, o, tolerance, &target);
    ml_ref loss = fixture_loss(f, o), gradients[3];
    ml_autodiff(f->g, loss, sources, 3, gradients);
    ml_ref grad = gradients[0];
    while (ml_graph_node(f->g, grad)->op != ML_OP_ATTENTION_GRAD)
        grad = ml_graph_source(f->g, grad, 0);
    template_check_target(f, grad, tolerance, &target);
    template_spoil(0, 0, 0);
}

enum { SHAPES = sizeof shapes / sizeof *shapes, PARTS = sizeof parts / sizeof *parts };

/* Every `step`-th of `count` shapes. */
static void check_some(const shape *some, size_t count, ml_dtype of, int threads, int vector_bytes,
                       size_t step) {
    dtype = of;
    target = (ml_target){.kind = ML_TARGET_C, .threads = threads, .vector_bytes = vector_bytes};
    for (size_t i = 0; i < count; i += step) {
        current = &some[i];
        kind = spoilt[1] ? "hidden keys" : current->pieces ? "part" : "shape";
        if (!spoilt[1]) number = (int)i;
        bool compiled = !known_to_nvrtc && !current->pieces && (of == ML_BF16 || i % 8 == 0);
        template_use_cuda(test_all() || compiled);
        fixture_run(check_shape, i);
    }
    template_use_cuda(true);
}

static void check_all(ml_dtype of, int threads, int vector_bytes, size_t step) {
    check_some(shapes, SHAPES, of, threads, vector_bytes, step);
}

/* The hidden keys are NaN: they are skipped, by where queries and keys begin, not masked. */
static void check_hidden(ml_dtype of, int threads, size_t count) {
    for (size_t i = 0; i < count; i++) {
        number = (int)i;
        spoilt[0] = hidden[i].start, spoilt[1] = hidden[i].stop;
        check_some(&hidden[i].shape, 1, of, threads, 32, 1);
    }
    spoilt[0] = spoilt[1] = 0;
}

TEST(kernels, attention_whole) {
    check_all(ML_F32, 1, 32, test_all() ? 1 : 2);
    if (test_all()) check_some(shapes, 8, ML_F64, 1, 32, 1); /* without scores of f32 */
}
TEST(kernels, attention_two_passes) { /* on the CPU; the CUDA kernels are those above */
    known_to_nvrtc = true;
    check_all(ML_F32, 64, 16, 4);
    known_to_nvrtc = false;
}
TEST(kernels, attention_bf16) {
    check_all(ML_BF16, 2, 32, test_all() ? 3 : 6);
}

TEST(kernels, attention_parts) {
    check_some(parts, PARTS, ML_F32, 1, 32, test_all() ? 1 : 3);
    check_some(parts + 4, test_all() ? PARTS - 4 : 1, ML_BF16, 64, 16, 1);
}

TEST(kernels, attention_of_ranks) { /* the gradient in one pass, in two */
    check_some(ranked, 1, ML_F32, 1, 32, 1);
    check_some(ranked + 1, 1, ML_BF16, 64, 16, 1);
}
/* The CUDA kernels of some shapes, in the emulator: tensor cores (heads of 64 and of 32 with a
 * score function) and the general ones. */
TEST(kernels, attention_emulated) {
    template_use_emulator(true);
    known_to_nvrtc = true; /* by attention_bf16 and attention_whole */
    check_all(ML_BF16, 64, 16, test_all() ? 9 : 18);
    check_all(ML_F32, 64, 16, test_all() ? 10 : 20);
    known_to_nvrtc = false;
    template_use_emulator(false);
}
/* Blocks of other GPUs may have less than half of Hopper's shared memory. */
TEST(kernels, attention_little_room) {
    static const shape wide = {1, 1, 1, 70, 75, 128, true, 0, NO_SCORE, false};
    template_use_emulator(true);
    template_use_gpu(89, 0);
    number = 0;
    check_some(&wide, 1, ML_BF16, 64, 16, 1);
    template_use_emulator(false);
    template_use_gpu(0, 0);
}
TEST(kernels, attention_skips) {
    check_hidden(ML_F32, 1, 3);  /* the gradient in one pass */
    check_hidden(ML_F32, 64, 2); /* in two */
}
TEST(kernels, attention_skips_emulated) {
    template_use_emulator(true);
    known_to_nvrtc = true;
    check_hidden(ML_BF16, 64, test_all() ? 3 : 1); /* on tensor cores */
    known_to_nvrtc = false;
    if (test_all()) check_hidden(ML_F32, 64, 3);
    template_use_emulator(false);
}
TEST(kernels, attention_parts_emulated) {
    template_use_emulator(true);
    check_some(parts + 3, 1, ML_BF16, 64, 16, 1);
    if (test_all()) check_some(parts, PARTS, ML_BF16, 64, 16, 1);
    if (test_all()) check_some(parts, PARTS, ML_F32, 64, 16, 1);
    template_use_emulator(false);
}

/* Attention on Hopper's warpgroup products, with each of the tiles that it may be cut into; on so
 * few multiprocessors that the gradient deals the heads of some shapes in groups. */
static void check_on_hopper(int tiles, const shape *some, size_t count, size_t step) {
    enum { FEW = 13 };
    template_use_emulator(true);
    template_use_gpu(0, FEW);
    template_use_tiles(tiles - 1);
    check_some(some, count, ML_BF16, 64, 16, step);
    template_use_emulator(false);
    template_use_gpu(0, 0);
    template_use_tiles(0);
}
static void check_hopper(int tiles, size_t first, size_t step) {
    check_on_hopper(tiles, hopper + first, sizeof hopper / sizeof *hopper - first, step);
}
TEST(kernels, attention_hopper) {
    check_hopper(1, 0, test_all() ? 1 : 16);
}
/* Keys in the order of ranks: on warpgroup products; on mma.sync, and by the general kernels. */
static void check_ranked_on_hopper(int tiles) {
    const int first = test_all() ? 0 : RANKED - 1;
    known_to_nvrtc = true;
    check_on_hopper(tiles, ranked + first, (size_t)(RANKED - first), 1);
}
TEST(kernels, attention_hopper_of_ranks) {
    check_ranked_on_hopper(1);
    known_to_nvrtc = false;
}
TEST(kernels, attention_of_ranks_emulated) {
    check_ranked_on_hopper(0);
    template_use_emulator(true);
    check_some(ranked + RANKED - 1, 1, ML_F32, 64, 16, 1);
    template_use_emulator(false);
    known_to_nvrtc = false;
}
TEST(kernels, attention_hopper_masked) {
    if (test_all()) test_skip("kernels/attention_hopper includes its shapes with DIST_ALL=1");
    known_to_nvrtc = true;
    check_hopper(1, 3, 16);
    known_to_nvrtc = false;
}
/* Keys that masks hide from everybody are NaN: no kernel may read their tiles. */
TEST(kernels, attention_hopper_skips) {
    static const shape striped = {1, 2, 1, 130, 384, 64, false, 0, STRIPES, false};
    template_use_emulator(true);
    spoilt[0] = 256, spoilt[1] = 384, number = 0;
    template_spoil_c(false);
    known_to_nvrtc = true;
    check_some(&striped, 1, ML_BF16, 64, 16, 1);
    known_to_nvrtc = false;
    template_use_emulator(false);
    template_spoil_c(true);
    spoilt[0] = spoilt[1] = 0;
}
TEST(kernels, attention_hopper_opposite) {
    known_to_nvrtc = true;
    check_hopper(1, sizeof hopper / sizeof *hopper - 1, 1);
    check_hopper(0, sizeof hopper / sizeof *hopper - 1, 1); /* and on mma.sync */
    known_to_nvrtc = false;
}
TEST(kernels, attention_hopper_tiles) {
    if (!test_all()) test_skip("compilers take minutes: DIST_ALL=1");
    check_hopper(2, 0, 1);
    check_hopper(3, 0, 1);
}
