/* Attention on the GPU, forward and backward: cuDNN and the template kernels against the
 * definition in float64. Short sequences take the same kernels as long ones here, because the
 * target is set never to fall back to the score matrix. */
#include "runtime/ops/attention/attention.h"
#include "runtime/base/knobs.h"
#include "runtime/exec/session.h"
#include "tests/ops/support.h"

#include <math.h>
#include <stdio.h>

/* No score function; a soft cap with a slope along the keys; a mask of documents of 70 tokens. */
typedef enum { PLAIN, CAPPED, DOCUMENTS } score_kind;
typedef struct {
    const char *name;
    int batch, heads, kv_heads, seq, kv_seq, dim;
    bool causal;
    int window;
    score_kind score;
    int pieces;
    int q_start, k_start, second; /* second: of the second piece of the queries */
    int key_ranks;
} shape;

static const shape shapes[] = {
    {"causal", 2, 2, 2, 128, 128, 64, true, 0, PLAIN},
    {"whole", 2, 2, 2, 128, 128, 64, false, 0, PLAIN},
    {"grouped", 2, 4, 2, 96, 96, 64, true, 0, PLAIN},
    {"one K/V head", 1, 4, 1, 72, 72, 128, true, 0, PLAIN},
    {"window", 1, 2, 2, 200, 200, 32, true, 48, PLAIN},
    {"odd length", 2, 2, 2, 77, 77, 64, true, 0, PLAIN},
    {"short", 3, 2, 2, 9, 9, 16, true, 0, PLAIN},
    {"head of 40", 1, 2, 2, 70, 70, 40, true, 0, PLAIN},
    {"head of 20", 1, 2, 1, 70, 70, 20, true, 0, PLAIN},
    {"more keys, causal", 1, 2, 2, 40, 104, 64, true, 0, PLAIN},
    {"more keys, whole", 2, 2, 1, 40, 104, 64, false, 0, PLAIN},
    {"score", 2, 2, 2, 96, 96, 64, true, 0, CAPPED},
    {"score, grouped window", 1, 4, 2, 90, 90, 32, true, 33, CAPPED},
    {"long", 1, 1, 1, 640, 640, 64, true, 0, PLAIN},
    {"score, head of 128", 1, 2, 1, 200, 200, 128, true, 0, CAPPED},
    {"score, head of 96", 1, 4, 2, 200, 330, 96, true, 0, CAPPED},
    {"head of 192", 1, 2, 1, 200, 200, 192, true, 0, PLAIN},
    {"score, head of 256", 1, 2, 2, 150, 210, 256, true, 0, CAPPED},
    {"documents", 2, 2, 1, 330, 330, 64, true, 0, DOCUMENTS},
    {"documents, head of 128", 1, 2, 2, 200, 450, 128, false, 0, DOCUMENTS},
    {"documents, head of 128, causal", 1, 2, 1, 330, 330, 128, true, 0, DOCUMENTS},
};
/* Queries that begin at operands, in one piece or two, as context parallelism has them. */
static const shape parts[] = {
    {"part of documents", 1, 2, 1, 2200, 140, 64, true, 0, DOCUMENTS, true, 0, 2060},
    {"part", 1, 2, 1, 200, 264, 64, true, 0, PLAIN, true, 300, 200},
    {"part with a score", 1, 2, 2, 130, 130, 32, true, 150, CAPPED, true, 260, 130},
    {"hidden part", 1, 2, 2, 70, 150, 64, true, 0, PLAIN, true, 0, 70},
    {"pieces", 2, 4, 2, 256, 512, 128, true, 0, PLAIN, 2, 0, 0, 384},
    {"pieces with a score", 1, 2, 2, 260, 520, 64, true, 0, CAPPED, 2, 390, 0, 0},
    {"pieces of documents", 1, 2, 1, 300, 600, 64, true, 200, DOCUMENTS, 2, 0, 0, 450},
    {"keys of ranks", 2, 4, 2, 256, 512, 128, true, 0, PLAIN, 2, 0, 0, 384, 2},
    {"keys of ranks, documents", 1, 2, 1, 256, 768, 64, true, 600, DOCUMENTS, 2, 256, 0, 384, 3},
    {"keys of ranks, half tiles", 1, 2, 2, 192, 384, 128, true, 0, CAPPED, 2, 192, 0, 96, 3},
};
#define COUNT(list) ((int)(sizeof(list) / sizeof *(list)))

static const shape *current;
static ml_dtype current_dtype;
static bool heads_first; /* {batch, heads, seq, head_dim} in memory, else heads after seq */
/* As kernels are specified. Unknown: thread blocks take several blocks of queries. Few: thread
 * blocks of the gradient on warpgroup products take several blocks of keys. */
enum { UNKNOWN = 0, FEW = 2 };
static int multiprocessors;

static ml_ref document_of(ops_case *c, ml_ref s, const char *axis, int size) {
    ml_ref odd = ml_cast(c->g, ml_map2(c->g, ML_OP_NE, s, s), ML_I32);
    ml_ref sources[3] = {ml_const_int(c->g, ML_BOOL, 1), ml_iota(c->g, ops_axis(c, axis), size),
                         odd}; /* an index as vm/bindings/attention.c makes it, of all axes of s */
    ml_ref at = ml_cast(c->g, ml_graph_add(c->g, ML_OP_WHERE, sources, 3, NULL, 0, NULL), ML_F32);
    at = ml_map2(c->g, ML_OP_MUL, at, ml_const(c->g, ML_F32, 1.0 / 70));
    return ml_map1(c->g, ML_OP_FLOOR, at);
}

/* 20 tanh(s / 20) - (query - key) / 16, or s in a document. */
static ml_ref score_of(ops_case *c) {
    char axes[96];
    int64_t index = 0;
    snprintf(axes, sizeof axes, "batch%d heads%d seq%d kv_seq%d", current->batch, current->heads,
             current->seq, current->kv_seq);
    ml_type type = ops_type(c, ML_F32, axes);
    ml_ref s = ml_graph_add(c->g, ML_OP_PARAM, NULL, 0, &index, 1, &type);
    if (current->score == DOCUMENTS) {
        ml_ref same = ml_map2(c->g, ML_OP_EQ, document_of(c, s, "seq", current->seq),
                              document_of(c, s, "kv_seq", current->kv_seq));
        return ml_where(c->g, same, s, ml_const(c->g, ML_F32, -INFINITY));
    }
    ml_ref capped = ml_map2(c->g, ML_OP_DIV, s, ml_const(c->g, ML_F32, 20));
    capped =
        ml_map2(c->g, ML_OP_MUL, ml_map1(c->g, ML_OP_TANH, capped), ml_const(c->g, ML_F32, 20));
    ml_ref q = ml_cast(c->g, ml_iota(c->g, ops_axis(c, "seq"), current->seq), ML_F32);
    ml_ref k = ml_cast(c->g, ml_iota(c->g, ops_axis(c, "kv_seq"), current->kv_seq), ML_F32);
    ml_ref sixteenth = ml_const(c->g, ML_F32, 0.0625);
    capped = ml_map2(c->g, ML_OP_SUB, capped, ml_map2(c->g, ML_OP_MUL, q, sixteenth));
    return ml_map2(c->g, ML_OP_ADD, capped, ml_map2(c->g, ML_OP_MUL, k, sixteenth));
}

static ml_ref operand(ops_case *c, const char *heads, int head_count, const char *seq, int length) {
    char axes[96];
    const shape *s = current;
    if (heads_first)
        snprintf(axes, sizeof axes, "batch%d %s%d %s%d head_dim%d", s->batch, heads, head_count,
                 seq, length, s->dim);
    else
        snprintf(axes, sizeof axes, "batch%d %s%d %s%d head_dim%d", s->batch, seq, length, heads,
                 head_count, s->dim);
    return ops_input(c, current_dtype, axes, -2, 2);
}

static void build_shape(ops_case *c) {
    const shape *s = current;
    const bool grouped = s->heads != s->kv_heads;
    const char *kv_heads = grouped ? "kv_heads" : "heads";
    ml_target *target = &ml_session_device(c->session)->target;
    target->longest_materialized = 0;
    target->multiprocessors = multiprocessors;
    ml_ref qkv[] = {operand(c, "heads", s->heads, "seq", s->seq),
                    operand(c, kv_heads, s->kv_heads, "kv_seq", s->kv_seq),
                    operand(c, kv_heads, s->kv_heads, "kv_seq", s->kv_seq),
                    0,
                    0,
                    0};
    int count = 3;
    if (s->pieces) qkv[count++] = ops_input(c, ML_I32, "", s->q_start, s->q_start);
    if (s->pieces == 2) qkv[count++] = ops_input(c, ML_I32, "", s->second, s->second);
    if (s->pieces) qkv[count++] = ops_input(c, ML_I32, "", s->k_start, s->k_start);
    ml_attention_args args = {.seq = ops_axis(c, "seq"),
                              .kv_seq = ops_axis(c, "kv_seq"),
                              .heads = ops_axis(c, "heads"),
                              .kv_heads = ops_axis(c, kv_heads),
                              .head_dim = ops_axis(c, "head_dim"),
                              .causal = s->causal,
                              .window = s->window,
                              .pieces = s->pieces,
                              .key_ranks = s->key_ranks,
                              .scale = 1 / sqrt(s->dim),
                              .score = s->score != PLAIN ? score_of(c) : 0};
    char label[96];
    snprintf(label, sizeof label, "attention, %s%s", s->name, heads_first ? ", heads first" : "");
    ml_ref o = ml_attention(c->g, qkv, count, &args);
    ops_output(c, o, ops_tolerance(current_dtype), "%s", label);
    ops_gradients(c, o, qkv, 3, 2 * ops_tolerance(current_dtype), label);
}

static void check_shapes(const shape *list, int count, ml_dtype dtype, bool first) {
    current_dtype = dtype, heads_first = first;
    for (int i = 0; i < count; i++) {
        current = &list[i];
        ops_run(build_shape, (uint64_t)i, 0);
    }
}

/* cuDNN wherever it can serve, or nowhere: nothing is chosen by timing. */
static void check_list(const shape *list, int count, ml_dtype dtype, bool first, bool cudnn) {
    ml_knobs_values *knobs = (ml_knobs_values *)ml_knobs();
    const ml_knobs_values kept = *knobs;
    knobs->cudnn = cudnn;
    knobs->tune = false;
    check_shapes(list, count, dtype, first);
    *knobs = kept;
}
static void check_all(ml_dtype dtype, bool first, bool cudnn) {
    check_list(shapes, COUNT(shapes), dtype, first, cudnn);
}

GPU_TEST(attention, parts_f32) {
    check_list(parts, COUNT(parts), ML_F32, false, false);
}
/* On warpgroup products; thread blocks that take several blocks of keys; heads first. */
GPU_TEST(attention, parts_bf16) {
    check_list(parts, COUNT(parts), ML_BF16, false, false);
    multiprocessors = FEW;
    check_list(parts, COUNT(parts), ML_BF16, true, false);
    multiprocessors = UNKNOWN;
}
/* The other tiles, and mma.sync; then what is chosen by time. */
GPU_TEST(attention, parts_tiles) {
    ml_knobs_values *knobs = (ml_knobs_values *)ml_knobs();
    const ml_knobs_values kept = *knobs;
    for (int tiles = 0; tiles <= 3; tiles++) {
        knobs->wgmma = tiles;
        if (tiles != kept.wgmma) check_list(parts, COUNT(parts), ML_BF16, tiles % 2, false);
    }
    *knobs = kept;
    knobs->tune = true;
    check_shapes(parts, COUNT(parts), ML_BF16, false);
    *knobs = kept;
}

GPU_TEST(attention, f32) {
    check_all(ML_F32, false, false);
}
GPU_TEST(attention, f32_heads_first) {
    check_all(ML_F32, true, false);
}
GPU_TEST(attention, bf16_template) {
    check_all(ML_BF16, false, false);
}
GPU_TEST(attention, bf16_template_heads_first) {
    check_all(ML_BF16, true, false);
}
GPU_TEST(attention, bf16_template_blocks_of_keys) {
    multiprocessors = FEW;
    check_all(ML_BF16, false, false);
    multiprocessors = UNKNOWN;
}
GPU_TEST(attention, bf16_cudnn) {
    check_all(ML_BF16, false, true);
}
GPU_TEST(attention, bf16_cudnn_heads_first) {
    check_all(ML_BF16, true, true);
}
/* cuDNN or kernels on warpgroup products, whichever is faster. */
GPU_TEST(attention, bf16_chosen) {
    ml_knobs_values *knobs = (ml_knobs_values *)ml_knobs();
    const ml_knobs_values kept = *knobs;
    knobs->tune = true;
    check_shapes(shapes, COUNT(shapes), ML_BF16, false);
    *knobs = kept;
}
/* The other tiles of warpgroup products, and none of these. */
GPU_TEST(attention, bf16_tiles) {
    ml_knobs_values *knobs = (ml_knobs_values *)ml_knobs();
    const int kept = knobs->wgmma;
    for (int tiles = 0; tiles <= 3; tiles++) {
        if (tiles == kept) continue;
        knobs->wgmma = tiles;
        check_all(ML_BF16, tiles % 2, false);
    }
    knobs->wgmma = kept;
}
/* cuDNN's gradient may add up in any order (MLUA_DETERMINISTIC=0). */
GPU_TEST(attention, bf16_unordered) {
    ml_knobs_values *knobs = (ml_knobs_values *)ml_knobs();
    const ml_knobs_values kept = *knobs;
    knobs->deterministic = false;
    check_all(ML_BF16, false, true);
    *knobs = kept;
}
