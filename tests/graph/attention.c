/* The definition of attention against loops, and that of its gradient against differences of
 * them: causal, windows, grouped heads, fewer and more keys than queries, a score function, parts
 * of something longer, keys in the order of ranks. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "tests/passes/support.h"

typedef struct {
    int batch, seq, kv_seq, heads, kv_heads, dim, value_dim;
    bool causal, scored;
    int window;
    int pieces, q_start, k_start, offset, second; /* second: of the second piece of q */
    int key_ranks;
} shape;

static const shape SHAPES[] = {
    {2, 4, 4, 2, 2, 3, 3, false, false, 0},
    {1, 5, 5, 4, 2, 2, 2, true, false, 0},
    {2, 3, 6, 2, 1, 2, 4, true, false, 0},
    {1, 6, 3, 2, 2, 2, 2, true, false, 0},
    {1, 6, 6, 4, 2, 2, 3, true, false, 2},
    {1, 5, 5, 2, 2, 2, 2, false, false, 3},
    {2, 4, 5, 4, 2, 3, 3, true, true, 0},
    {1, 6, 2, 2, 1, 2, 2, true, true, 1},
    {1, 4, 5, 2, 1, 2, 2, true, false, 0, true, 6, 4, 0},
    {1, 4, 4, 2, 2, 2, 2, true, true, 3, true, 4, 4, 1},
    {1, 3, 4, 2, 2, 2, 2, true, false, 0, true, 2, 6, 0},
    {1, 4, 8, 2, 1, 2, 2, true, false, 0, 2, 0, 0, 0, .second = 6},
    {2, 6, 9, 2, 2, 2, 2, true, true, 4, 2, 5, 1, 1, .second = 1},
    {1, 4, 8, 2, 1, 2, 2, true, false, 0, 2, 0, 0, 0, .second = 6, .key_ranks = 2},
    {2, 2, 12, 2, 2, 2, 2, true, true, 7, 2, 4, 0, 0, .second = 7, .key_ranks = 3},
};
enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES };
static const shape *current;

static double score_of(double s, double bias) {
    return 2 * tanh(s / 2) + bias;
}

/* The row in which key t is: blocks of two that ranks trade. */
static int row_of(const shape *p, int t) {
    static const int of_two[] = {0, 3, 2, 1}, of_three[] = {0, 5, 2, 3, 4, 1};
    if (p->key_ranks == 0) return t;
    return (p->key_ranks == 2 ? of_two : of_three)[t / 2] * 2 + t % 2;
}

/* o and lse of one query row. q [b s h d], k [b t kv d], v [b kv t e], bias [h]. */
static void attend_row(const shape *p, double *const *in, int b, int h, int i, double *o,
                       double *lse) {
    int kv = h / (p->heads / p->kv_heads);
    int offset = p->pieces ? p->offset + p->q_start - p->k_start : p->kv_seq - p->seq;
    if (p->pieces == 2 && i >= p->seq / 2) offset += p->second - p->q_start - p->seq / 2;
    double weights[16], sum = 0;
    for (int t = 0; t < p->kv_seq; t++) {
        double s = 0;
        for (int d = 0; d < p->dim; d++)
            s += in[0][((b * p->seq + i) * p->heads + h) * p->dim + d] *
                 in[1][((b * p->kv_seq + row_of(p, t)) * p->kv_heads + kv) * p->dim + d];
        s *= 0.7;
        if (p->scored) s = score_of(s, in[3][h]);
        bool hidden = (p->causal && t > i + offset) || (p->window && i + offset - t >= p->window);
        weights[t] = hidden ? 0 : exp(s);
        sum += weights[t];
    }
    *lse = log(sum);
    for (int e = 0; e < p->value_dim; e++) {
        o[e] = 0;
        for (int t = 0; t < p->kv_seq && sum > 0; t++)
            o[e] += weights[t] / sum *
                    in[2][((b * p->kv_heads + kv) * p->kv_seq + row_of(p, t)) * p->value_dim + e];
    }
}

/* o [b s h e] and lse [b h s] */
static void attend(const shape *p, double *const *in, double *o, double *lse) {
    for (int b = 0; b < p->batch; b++)
        for (int h = 0; h < p->heads; h++)
            for (int i = 0; i < p->seq; i++)
                attend_row(p, in, b, h, i, o + ((b * p->seq + i) * p->heads + h) * p->value_dim,
                           lse + (b * p->heads + h) * p->seq + i);
}

static ml_attention_args arguments(fixture *f, const shape *p) {
    return (ml_attention_args){.seq = fixture_axis(f, "s"),
                               .kv_seq = fixture_axis(f, "t"),
                               .heads = fixture_axis(f, "h"),
                               .kv_heads = fixture_axis(f, p->heads == p->kv_heads ? "h" : "kv"),
                               .head_dim = fixture_axis(f, "d"),
                               .causal = p->causal,
                               .window = p->window,
                               .pieces = p->pieces,
                               .offset = p->offset,
                               .key_ranks = p->key_ranks,
                               .scale = 0.7};
}

/* Inputs 0..3: q, k, v, bias over heads. */
static void make_inputs(fixture *f, const shape *p, ml_ref *sources) {
    const char *kv = p->heads == p->kv_heads ? "h" : "kv";
    ml_arena *a = f->arena;
    char *q = ml_arena_format(a, "b%d s%d h%d d%d", p->batch, p->seq, p->heads, p->dim);
    char *k = ml_arena_format(a, "b%d t%d %s%d d%d", p->batch, p->kv_seq, kv, p->kv_heads, p->dim);
    char *v =
        ml_arena_format(a, "b%d %s%d t%d d%d", p->batch, kv, p->kv_heads, p->kv_seq, p->value_dim);
    const char *axes[] = {q, k, v, ml_arena_format(a, "h%d", p->heads)};
    for (int i = 0; i < 4; i++) sources[i] = fixture_input(f, ML_F64, axes[i], -1, 1);
}

/* score = 2 tanh(s / 2) + bias; its derivative = cotangent * (1 - tanh^2). */
static void make_functions(fixture *f, const ml_ref *sources, ml_attention_args *args) {
    ml_graph *g = f->g;
    ml_type type;
    ml_attention_score_type(g, sources[0], sources[1], args, &type);
    ml_ref s = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){0}, 1, &type);
    ml_ref bias =
        ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){1}, 1, ml_graph_type(g, sources[3]));
    ml_ref cotangent = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){2}, 1, &type);
    ml_ref two = ml_const(g, ML_F64, 2), one = ml_const(g, ML_F64, 1);
    ml_ref t = ml_map1(g, ML_OP_TANH, ml_map2(g, ML_OP_DIV, s, two));
    args->score = ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MUL, two, t), bias);
    ml_ref slope = ml_map2(g, ML_OP_SUB, one, ml_map2(g, ML_OP_MUL, t, t));
    args->derivative = ml_map2(g, ML_OP_MUL, cotangent, slope);
}

/* sum(o * w) by the loops */
static double loop_loss(const shape *p, double *const *in, const double *w, double *o,
                        double *lse) {
    double loss = 0;
    attend(p, in, o, lse);
    for (int i = 0; i < p->batch * p->seq * p->heads * p->value_dim; i++) loss += o[i] * w[i];
    return loss;
}

static void check_gradient(fixture *f, const shape *p, const ml_ref *gradients, const double *w,
                           double *o, double *lse) {
    for (int source = 0; source < 3; source++) {
        double *gradient = fixture_value(f, f->g, gradients[source]), *x = f->inputs[source];
        int64_t count = ml_type_elements(ml_graph_type(f->g, gradients[source]));
        CHECK(ml_type_equal(ml_graph_type(f->g, gradients[source]),
                            ml_graph_type(f->g, f->nodes[source])));
        for (int64_t i = 0; i < count; i++) {
            const double step = 1e-5;
            double kept = x[i];
            x[i] = kept + step;
            double above = loop_loss(p, f->inputs, w, o, lse);
            x[i] = kept - step;
            double below = loop_loss(p, f->inputs, w, o, lse);
            x[i] = kept;
            EXPECT(CHECK_NEAR(gradient[i], (above - below) / (2 * step), 1e-7),
                   "%s: gradient of source %d, element %d", f->label, source, (int)i);
        }
    }
}

static void check_shape(fixture *f) {
    const shape *p = current;
    snprintf(f->label, sizeof f->label, "shape %d", (int)(p - SHAPES));
    ml_ref sources[7], outputs[2], gradients[3];
    make_inputs(f, p, sources);
    ml_attention_args args = arguments(f, p);
    int places = ml_attention_places(&args);
    if (p->scored) make_functions(f, sources, &args);
    ml_attention_args forward = args;
    forward.derivative = 0;
    ml_ref given[7] = {sources[0], sources[1], sources[2]};
    if (p->pieces) given[3] = ml_const_int(f->g, ML_I32, p->q_start);
    if (p->pieces == 2) given[4] = ml_const_int(f->g, ML_I32, p->second);
    if (p->pieces) given[2 + places] = ml_const_int(f->g, ML_I32, p->k_start);
    given[3 + places] = sources[3];
    ml_ref node = ml_attention(f->g, given, 3 + places + p->scored, &forward);
    ml_attention_decompose(f->g, node, outputs);
    CHECK(ml_type_equal(ml_graph_type(f->g, outputs[0]), ml_graph_type(f->g, node)));
    int64_t o_count = ml_type_elements(ml_graph_type(f->g, node));
    double *o = ML_NEW_ARRAY(f->arena, double, o_count);
    double *lse = ML_NEW_ARRAY(f->arena, double, p->batch * p->heads * p->seq);
    double *actual = fixture_value(f, f->g, outputs[0]);
    double *actual_lse = fixture_value(f, f->g, outputs[1]);
    attend(p, f->inputs, o, lse);
    for (int64_t i = 0; i < o_count; i++)
        EXPECT(CHECK_NEAR(actual[i], o[i], 1e-12), "%s: o[%d]", f->label, (int)i);
    for (int i = 0; i < p->batch * p->heads * p->seq; i++)
        EXPECT(CHECK_NEAR(actual_lse[i], lse[i], 1e-12), "%s: lse[%d]", f->label, i);

    fixture_check_gradients(f, fixture_loss(f, outputs[0])); /* through the definition itself */

    ml_ref cotangent = fixture_input(
        f, ML_F64,
        ml_arena_format(f->arena, "b%d s%d h%d d%d", p->batch, p->seq, p->heads, p->value_dim), -1,
        1);
    ml_ref all[10] = {sources[0], sources[1], sources[2], node, ml_out(f->g, node, 1), cotangent};
    memcpy(all + 6, given + 3, sizeof *given * (size_t)(places + 1));
    ml_ref grad = ml_attention_grad(f->g, all, 6 + places + p->scored, &args);
    ml_attention_decompose(f->g, grad, gradients);
    ml_graph_verify(f->g, NULL, "decompose");
    check_gradient(f, p, gradients, f->inputs[f->input_count - 1], o, lse);
}

TEST(graph_attention, definition) {
    for (int i = 0; i < SHAPE_COUNT; i++) {
        current = &SHAPES[i];
        fixture_run(check_shape, (uint64_t)i + 1);
    }
}

/* The closed form beside a loop over the queries. */
TEST(graph_attention, pairs_of_masks) {
    for (int i = 0; i < 1024; i++) {
        const int64_t queries = 1 + i % 8, keys = 1 + i / 8 % 8, window = i / 64 % 4;
        const bool causal = i / 256 % 2;
        for (int64_t shift = -9; shift < 10; shift++) {
            double pairs = 0;
            for (int64_t q = 0; q < queries; q++)
                for (int64_t k = 0; k < keys; k++)
                    pairs += (!causal || k <= q + shift) && (!window || q + shift - k < window);
            CHECK_NEAR(ml_attention_pairs(queries, keys, shift, causal, window), pairs, 0);
        }
    }
}
