/* Passes over whole programs: attention, a transformer block, and what each rule is for. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "runtime/optimize/optimize.h"
#include "tests/passes/support.h"

#define AXIS(name) fixture_axis(f, name)
#define MAP2(op, a, b) ml_map2(f->g, ML_OP_##op, a, b)
#define MAP1(op, a) ml_map1(f->g, ML_OP_##op, a)
#define NUM(v) ml_const(f->g, ML_F64, v)

/* ---- Attention against loops --------------------------------------------------------------------
 */

typedef enum { SCORE_NONE, SCORE_SOFTCAP, SCORE_ALIBI, SCORE_DOCUMENT } score_kind;
typedef struct {
    int heads, kv_heads, seq, kv_seq, dim;
    bool causal;
    int64_t window;
    score_kind score;
} attention_case;
static const attention_case attention_cases[] = {
    {2, 2, 5, 5, 3, false, 0, SCORE_NONE},    {2, 2, 5, 5, 3, true, 0, SCORE_NONE},
    {4, 2, 4, 6, 2, true, 0, SCORE_NONE},     {2, 2, 6, 4, 2, true, 0, SCORE_NONE},
    {2, 1, 6, 6, 2, true, 3, SCORE_NONE},     {2, 2, 4, 4, 2, false, 2, SCORE_NONE},
    {2, 2, 5, 5, 3, true, 0, SCORE_SOFTCAP},  {2, 1, 5, 5, 2, true, 0, SCORE_ALIBI},
    {2, 2, 6, 6, 2, true, 0, SCORE_DOCUMENT}, {2, 2, 6, 6, 2, false, 3, SCORE_DOCUMENT},
};
static const attention_case *now;
static const double DIM_SCALE = 0.6;

static ml_ref param(fixture *f, int64_t index, const ml_type *type) {
    return ml_graph_add(f->g, ML_OP_PARAM, NULL, 0, &index, 1, type);
}

/* x at every pair: a score function is elementwise, and s has all axes. */
static ml_ref at_pairs(fixture *f, ml_ref s, ml_ref x) {
    return ml_where(f->g, MAP2(NE, s, s), s, ml_cast(f->g, x, ML_F64));
}

static ml_ref position(fixture *f, ml_ref s, const char *axis) {
    const ml_type *type = ml_graph_type(f->g, s);
    int64_t size = type->size[ml_type_find(type, AXIS(axis))];
    return at_pairs(f, s, ml_iota(f->g, AXIS(axis), size));
}

/* captured: ALIBI: one slope a head; DOCUMENT: the document of each query and of each key. */
static ml_ref score_function(fixture *f, const ml_type *type, const ml_ref *captured) {
    ml_ref s = param(f, 0, type);
    if (now->score == SCORE_SOFTCAP) return MAP2(MUL, NUM(2), MAP1(TANH, MAP2(MUL, s, NUM(0.5))));
    if (now->score == SCORE_ALIBI) {
        ml_ref slope = param(f, 1, ml_graph_type(f->g, captured[0]));
        ml_ref distance = MAP2(SUB, position(f, s, "kv_seq"), position(f, s, "seq"));
        return MAP2(ADD, s, MAP2(MUL, slope, distance));
    }
    ml_ref query = at_pairs(f, s, param(f, 1, ml_graph_type(f->g, captured[0])));
    ml_ref key = at_pairs(f, s, param(f, 2, ml_graph_type(f->g, captured[1])));
    return ml_where(f->g, MAP2(EQ, query, key), s, NUM(-INFINITY));
}

static ml_ref build_attention(fixture *f, ml_attention_args *args) {
    const attention_case *c = now;
    const char *kv_name = c->heads == c->kv_heads ? "heads" : "kv_heads";
    char q_axes[64], kv_axes[64];
    snprintf(q_axes, sizeof q_axes, "b2 seq%d heads%d dim%d", c->seq, c->heads, c->dim);
    snprintf(kv_axes, sizeof kv_axes, "%s%d b2 kv_seq%d dim%d", kv_name, c->kv_heads, c->kv_seq,
             c->dim);
    ml_ref sources[5] = {fixture_input(f, ML_F64, q_axes, -1, 1),
                         fixture_input(f, ML_F64, kv_axes, -1, 1),
                         fixture_input(f, ML_F64, kv_axes, -1, 1)};
    int count = 3;
    *args = (ml_attention_args){.seq = AXIS("seq"),
                                .kv_seq = AXIS("kv_seq"),
                                .heads = AXIS("heads"),
                                .kv_heads = AXIS(kv_name),
                                .head_dim = AXIS("dim"),
                                .causal = c->causal,
                                .window = c->window,
                                .scale = DIM_SCALE};
    if (c->score == SCORE_ALIBI) {
        snprintf(q_axes, sizeof q_axes, "heads%d", c->heads);
        sources[count++] = fixture_input(f, ML_F64, q_axes, 0, 1);
    }
    if (c->score == SCORE_DOCUMENT) {
        snprintf(q_axes, sizeof q_axes, "b2 seq%d", c->seq);
        snprintf(kv_axes, sizeof kv_axes, "b2 kv_seq%d", c->kv_seq);
        sources[count++] = fixture_index(f, q_axes, 2);
        sources[count++] = fixture_index(f, kv_axes, 2);
    }
    ml_type type;
    ml_attention_score_type(f->g, sources[0], sources[1], args, &type);
    if (c->score != SCORE_NONE) args->score = score_function(f, &type, sources + 3);
    return ml_attention(f->g, sources, count, args);
}

/* Score of one pair; -infinity where masked. */
static double pair_score(const fixture *f, int b, int h, int q, int kv) {
    const attention_case *c = now;
    int kv_head = h / (c->heads / c->kv_heads), offset = c->kv_seq - c->seq;
    double s = 0;
    for (int d = 0; d < c->dim; d++)
        s += f->inputs[0][((b * c->seq + q) * c->heads + h) * c->dim + d] *
             f->inputs[1][((kv_head * 2 + b) * c->kv_seq + kv) * c->dim + d];
    s *= DIM_SCALE;
    if (c->score == SCORE_SOFTCAP) s = 2 * tanh(s / 2);
    if (c->score == SCORE_ALIBI) s += f->inputs[3][h] * (kv - q);
    if (c->score == SCORE_DOCUMENT &&
        f->inputs[3][b * c->seq + q] != f->inputs[4][b * c->kv_seq + kv])
        return -INFINITY;
    bool masked = (c->causal && kv > q + offset) || (c->window && q + offset - kv >= c->window);
    return masked ? -INFINITY : s;
}

/* o of one row (dim values) and the logsumexp. */
static double attention_row(const fixture *f, int b, int h, int q, double *o) {
    const attention_case *c = now;
    int kv_head = h / (c->heads / c->kv_heads);
    double sum = 0;
    memset(o, 0, sizeof *o * (size_t)c->dim);
    for (int kv = 0; kv < c->kv_seq; kv++) {
        double p = exp(pair_score(f, b, h, q, kv));
        sum += p;
        for (int d = 0; d < c->dim; d++)
            o[d] += p * f->inputs[2][((kv_head * 2 + b) * c->kv_seq + kv) * c->dim + d];
    }
    for (int d = 0; d < c->dim && sum > 0; d++) o[d] /= sum;
    return log(sum);
}

static void check_attention(fixture *f) {
    const attention_case *c = now;
    snprintf(f->label, sizeof f->label, "attention case %d", (int)(now - attention_cases));
    ml_attention_args args;
    ml_ref node = build_attention(f, &args);
    const double *o = fixture_value(f, f->g, node);
    const double *lse = fixture_value(f, f->g, ml_out(f->g, node, 1));
    for (int b = 0; b < 2; b++)
        for (int h = 0; h < c->heads; h++)
            for (int q = 0; q < c->seq; q++) {
                double row[8], expected = attention_row(f, b, h, q, row);
                CHECK_NEAR(lse[(b * c->heads + h) * c->seq + q], expected, 1e-12);
                for (int d = 0; d < c->dim; d++)
                    CHECK_NEAR(o[((b * c->seq + q) * c->heads + h) * c->dim + d], row[d], 1e-12);
            }
    fixture_check_gradients(f, fixture_loss(f, node));
}

TEST(passes, attention) {
    int count = sizeof attention_cases / sizeof *attention_cases;
    for (int i = 0; i < count; i++) {
        now = &attention_cases[i];
        fixture_run(check_attention, (uint64_t)(500 + i));
    }
}

/* ---- A transformer block ------------------------------------------------------------------------
 */

typedef struct {
    ml_ref loss, weights[16], gradients[16];
    int weight_count;
    ml_dtype dtype;
} block;

static ml_ref weight(fixture *f, block *b, const char *axes) {
    ml_ref w = fixture_state(f, b->dtype == ML_BF16 ? ML_F32 : b->dtype, axes);
    b->weights[b->weight_count++] = w;
    return ml_cast(f->g, w, b->dtype);
}

static ml_ref norm(fixture *f, block *b, ml_ref x) {
    ml_axis axis = AXIS("embed");
    ml_ref wide = ml_cast(f->g, x, b->dtype == ML_BF16 ? ML_F32 : b->dtype);
    ml_dtype dtype = ml_graph_type(f->g, wide)->dtype;
    ml_ref mean = MAP2(DIV, ml_reduce(f->g, ML_OP_SUM, MAP2(MUL, wide, wide), &axis, 1),
                       ml_const(f->g, dtype, 8));
    ml_ref scale = MAP1(RSQRT, MAP2(ADD, mean, ml_const(f->g, dtype, 1e-5)));
    return MAP2(MUL, ml_cast(f->g, MAP2(MUL, wide, scale), b->dtype), weight(f, b, "embed8"));
}

static ml_ref gelu(fixture *f, block *b, ml_ref x) {
#define CONST(v) ml_const(f->g, b->dtype, v)
    ml_ref cube = MAP2(MUL, x, MAP2(MUL, x, x));
    ml_ref inner = MAP2(MUL, CONST(0.79788456), MAP2(ADD, x, MAP2(MUL, CONST(0.044715), cube)));
    return MAP2(MUL, MAP2(MUL, CONST(0.5), x), MAP2(ADD, CONST(1), MAP1(TANH, inner)));
#undef CONST
}

/* h . w + bias */
static ml_ref projection(fixture *f, block *b, ml_ref h, const char *axes) {
    char all[64];
    snprintf(all, sizeof all, "embed8 %s", axes);
    ml_axis embed = AXIS("embed");
    ml_ref product = ml_dot(f->g, h, weight(f, b, all), &embed, 1, b->dtype);
    return MAP2(ADD, product, weight(f, b, axes));
}

static block build_block(fixture *f, ml_dtype dtype) {
    block b = {.dtype = dtype};
    ml_axis embed = AXIS("embed"), mix[2] = {AXIS("heads"), AXIS("dim")}, ffn = AXIS("ffn");
    ml_ref x = fixture_input(f, dtype, "b4 seq4 embed8", -1, 1);
    ml_ref h = norm(f, &b, x);
    ml_ref q = projection(f, &b, h, "heads4 dim4");
    ml_ref k = projection(f, &b, h, "kv_heads2 dim4"), v = projection(f, &b, h, "kv_heads2 dim4");
    k = ml_rename(f->g, k, AXIS("seq"), AXIS("kv_seq"));
    v = ml_rename(f->g, v, AXIS("seq"), AXIS("kv_seq"));
    ml_attention_args args = {.seq = AXIS("seq"),
                              .kv_seq = AXIS("kv_seq"),
                              .heads = AXIS("heads"),
                              .kv_heads = AXIS("kv_heads"),
                              .head_dim = AXIS("dim"),
                              .causal = true,
                              .scale = 0.5};
    ml_ref o = ml_attention(f->g, (ml_ref[]){q, k, v}, 3, &args);
    x = MAP2(ADD, x, ml_dot(f->g, o, weight(f, &b, "heads4 dim4 embed8"), mix, 2, dtype));
    ml_ref up = ml_dot(f->g, norm(f, &b, x), weight(f, &b, "embed8 ffn32"), &embed, 1, dtype);
    ml_ref down = weight(f, &b, "ffn32 embed8");
    x = MAP2(ADD, x, ml_dot(f->g, gelu(f, &b, up), down, &ffn, 1, dtype));
    b.loss = fixture_loss(f, MAP1(SIN, x));
    ml_autodiff(f->g, b.loss, b.weights, b.weight_count, b.gradients);
    return b;
}

static ml_ref *block_roots(fixture *f, const block *b) {
    ml_ref *roots = ML_NEW_ARRAY(f->arena, ml_ref, b->weight_count + 1);
    roots[0] = b->loss;
    memcpy(roots + 1, b->gradients, sizeof(ml_ref) * (size_t)b->weight_count);
    return roots;
}

static void check_block(fixture *f) {
    block b = build_block(f, ML_F64);
    ml_ref *roots = block_roots(f, &b);
    int count = b.weight_count + 1;
    fixture_check_passes(f, roots, count, 1e-9);
    /* forward 6 and twice as many backward but for the input's; q, k, v and their gradients merge
     */
    int dots = fixture_count_after(f, "simplify", roots, count, ML_OP_DOT);
    CHECK_EQ_INT(dots, 18);
    CHECK_EQ_INT(fixture_count_after(f, "merge_products", roots, count, ML_OP_DOT), 12);
    CHECK_EQ_INT(fixture_count_after(f, "merge_products", roots, count, ML_OP_ATTENTION_GRAD), 1);
    CHECK(fixture_count_after(f, "recompute", roots, count, ML_OP_TANH) == 2);
    /* all but the last: its result is not read by the backward pass */
    CHECK_EQ_INT(fixture_count_after(f, "recompute", roots, count, ML_OP_DOT), dots + 6);
    /* gelu's result alone costs what may be moved; norms come first and take too little of it */
    CHECK_EQ_INT(fixture_count_after(f, "simplify", roots, count, ML_OP_TANH), 1);
    CHECK_EQ_INT(fixture_count_after(f, "recompute_selective", roots, count, ML_OP_TANH), 2);
    CHECK_EQ_INT(fixture_count_after(f, "recompute_selective", roots, count, ML_OP_DOT), dots);
}

TEST(passes, block) {
    fixture_run(check_block, 77);
}

/* bf16 weights over f32 states: their gradients come out of the products in f32. */
static void check_mixed(fixture *f) {
    block b = build_block(f, ML_BF16);
    ml_ref *roots = block_roots(f, &b);
    ml_roots program = {.outputs = roots, .output_count = b.weight_count + 1};
    fixture_check_passes(f, roots, program.output_count, 1e-6);
    ml_graph *g = ml_simplify(f->g, &program);
    int products = 0;
    for (int i = 1; i < program.output_count; i++) {
        CHECK_EQ_INT(ml_graph_type(g, program.outputs[i])->dtype, ML_F32);
        products += ml_graph_node(g, program.outputs[i])->op == ML_OP_DOT;
    }
    CHECK_EQ_INT(products, 6);
    ml_graph_free(g);
}

TEST(passes, mixed_precision) {
    fixture_run(check_mixed, 78);
}

/* ---- What single rules are for ------------------------------------------------------------------
 */

static ml_op after(fixture *f, ml_ref n) {
    ml_roots roots = {.outputs = &n, .output_count = 1};
    ml_graph *g = ml_simplify(f->g, &roots);
    ml_op op = ml_graph_node(g, n)->op;
    ml_graph_free(g);
    return op;
}

static void check_rules(fixture *f) {
    ml_graph *g = f->g;
    ml_ref x = fixture_input(f, ML_F64, "b2 s4 d6", 0.5, 2),
           row = fixture_input(f, ML_F64, "d6", -1, 1);
    ml_type type = *ml_graph_type(g, x);
    ml_axis d = AXIS("d"), s = AXIS("s");
    int64_t none = ML_OP_INPUT;
#define RAW(op, ...)                                                                               \
    ml_graph_add(g, ML_OP_##op, (ml_ref[]){__VA_ARGS__},                                           \
                 sizeof((ml_ref[]){__VA_ARGS__}) / sizeof(ml_ref), NULL, 0, NULL)
    CHECK_EQ_INT(after(f, RAW(ADD, x, ml_broadcast(g, NUM(0), &type))), none);
    CHECK_EQ_INT(after(f, RAW(MUL, NUM(1), x)), none);
    CHECK_EQ_INT(after(f, RAW(NEG, RAW(NEG, x))), none);
    CHECK_EQ_INT(after(f, RAW(MUL, x, NUM(-1))), ML_OP_NEG);
    CHECK_EQ_INT(after(f, RAW(STOP_GRADIENT, x)), none);
    CHECK_EQ_INT(after(f, RAW(POW, x, NUM(0.5))), ML_OP_SQRT);
    CHECK_EQ_INT(after(f, RAW(POW, x, NUM(2))), ML_OP_MUL);
    CHECK_EQ_INT(after(f, RAW(DIV, NUM(1), RAW(SQRT, x))), ML_OP_RSQRT);
    CHECK_EQ_INT(after(f, RAW(WHERE, ml_const(g, ML_BOOL, 1), x, row)), none);
    CHECK_EQ_INT(after(f, ml_reduce(g, ML_OP_SUM, ml_broadcast(g, row, &type),
                                    (ml_axis[]){AXIS("b"), s}, 2)),
                 ML_OP_MUL);
    ml_ref low = ml_slice(g, x, d, 0, 2), high = ml_slice(g, x, d, 2, 6);
    ml_ref halves[2] = {RAW(SIN, low), RAW(COS, high)};
    CHECK_EQ_INT(after(f, ml_concat(g, (ml_ref[]){low, high}, 2, d)), none);
    ml_ref joined = ml_concat(g, halves, 2, d);
    CHECK_EQ_INT(after(f, ml_slice(g, joined, d, 2, 6)), ML_OP_COS);
    ml_ref pads = RAW(ADD, ml_pad(g, halves[1], d, 2, 0), ml_pad(g, halves[0], d, 0, 4));
    CHECK_EQ_INT(after(f, pads), ML_OP_CONCAT);
    ml_ref short_row =
        ml_pad(g, ml_slice(g, row, d, 0, 2), d, 0, 4); /* it is broadcast: no concat */
    CHECK_EQ_INT(after(f, RAW(ADD, ml_pad(g, halves[1], d, 2, 0), short_row)), ML_OP_ADD);
    CHECK_EQ_INT(after(f, ml_merge(g, ml_split(g, x, d, AXIS("p"), 2, AXIS("q"), 3), AXIS("p"),
                                   AXIS("q"), d)),
                 none);
    CHECK_EQ_INT(after(f, ml_split(g, ml_merge(g, x, s, d, s), s, s, 4, d, 6)), none);
#undef RAW
    ml_ref wide = ml_graph_add(g, ML_OP_CAST, (ml_ref[]){fixture_input(f, ML_BF16, "d6", -1, 1)}, 1,
                               NULL, 0, &(ml_type){.dtype = ML_F32});
    CHECK_EQ_INT(
        after(f, ml_graph_add(g, ML_OP_CAST, &wide, 1, NULL, 0, &(ml_type){.dtype = ML_BF16})),
        none);
    /* one logit of each row: no scatter in the gradient */
    ml_ref logits = fixture_input(f, ML_F64, "b2 s4 v7", -1, 1), gradient;
    ml_ref picked = ml_gather(g, logits, fixture_index(f, "b2 s4", 7), AXIS("v"));
    ml_autodiff(g, fixture_loss(f, picked), &logits, 1, &gradient);
    CHECK_EQ_INT(ml_graph_node(g, gradient)->op, ML_OP_SCATTER_ADD);
    CHECK_EQ_INT(after(f, gradient), ML_OP_WHERE);
}

TEST(passes, rules) {
    fixture_run(check_rules, 5);
}

/* Rows by expert and back: where every element gets `each` rows, what a scatter adds is gathered.
 */
static void check_sorted(fixture *f, int64_t each, int64_t tokens, bool gathered) {
    ml_graph *g = f->g;
    ml_axis rows = AXIS("r"), along = AXIS("t");
    ml_ref picked = fixture_index(f, "b3 r12", 4),
           value = fixture_input(f, ML_F64, "b3 r12 e5", -1, 1);
    ml_ref sorted = ml_graph_add(g, ML_OP_SORT, &picked, 1, (int64_t[]){rows, 0}, 2, NULL);
    ml_ref token = ml_map2(g, ML_OP_IDIV, ml_out(g, sorted, 1), ml_const_int(g, ML_I32, each));
    ml_type type = fixture_type(f, ML_F64, "b3 e5");
    type.axis[2] = along, type.size[2] = tokens, type.rank = 3;
    ml_ref y = ml_scatter_add(g, token, value, along, &type);
    CHECK_EQ_INT(fixture_count_after(f, "invert_permutations", &y, 1, ML_OP_SCATTER_ADD),
                 !gathered);
    fixture_check_pass(f, "invert_permutations", &y, 1, 1e-12);
}

static void check_all_sorted(fixture *f) {
    check_sorted(f, 3, 4, true);
    check_sorted(f, 1, 12, true);
    check_sorted(f, 3, 5, false); /* the last gets none */
    check_sorted(f, 2, 4, false); /* some belong to none */
}

/* Few rows by expert, with equal keys: their order, its inverse, what it arranges, and sums of
 * counts. */
static void check_counted(fixture *f) {
    ml_graph *g = f->g;
    ml_axis rows = AXIS("r");
    ml_ref keys = fixture_index(f, "r12", 4), counts = fixture_index(f, "n7", 9);
    ml_ref sorted = ml_graph_add(g, ML_OP_SORT, &keys, 1, (int64_t[]){rows, 0}, 2, NULL);
    ml_ref order = ml_out(g, sorted, 1);
    ml_ref back = ml_graph_add(g, ML_OP_SORT, &order, 1, (int64_t[]){rows, 0}, 2, NULL);
    ml_ref sums = ml_graph_add(g, ML_OP_CUMSUM, &counts, 1, (int64_t[]){AXIS("n"), 0}, 2, NULL);
    ml_ref all[] = {sorted, order, ml_out(g, back, 1), back, sums};
    CHECK_EQ_INT(fixture_count_after(f, "count_sorts", all, 5, ML_OP_SORT), 0);
    CHECK_EQ_INT(fixture_count_after(f, "count_sorts", all, 5, ML_OP_CUMSUM), 0);
    fixture_check_pass(f, "count_sorts", all, 5, 0);
}

TEST(passes, counted_sorts) {
    fixture_run(check_counted, 31);
}

TEST(passes, sorted_scatters) {
    fixture_run(check_all_sorted, 7);
}

/* Sums of terms that are scaled row by row. */
static void check_split_sums(fixture *f) {
    ml_graph *g = f->g;
    ml_ref a = fixture_input(f, ML_F64, "b3 s4 d6", -1, 1);
    ml_ref b = fixture_input(f, ML_F64, "b3 s4 d6", -1, 1);
    ml_ref r = fixture_input(f, ML_F64, "s4", -1, 1), c = fixture_input(f, ML_F64, "d6", -1, 1);
    ml_ref rows = ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MUL, a, r), ml_map2(g, ML_OP_MUL, r, b));
    ml_ref columns =
        ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MUL, a, c), ml_map2(g, ML_OP_MUL, b, r));
    ml_ref split = ml_reduce(g, ML_OP_SUM, rows, (ml_axis[]){AXIS("d"), AXIS("b")}, 2);
    ml_ref whole = ml_reduce(g, ML_OP_SUM, columns, (ml_axis[]){AXIS("d")}, 1);
    CHECK_EQ_INT(fixture_count_after(f, "split_scaled_sums", &split, 1, ML_OP_SUM), 2);
    CHECK_EQ_INT(fixture_count_after(f, "split_scaled_sums", &whole, 1, ML_OP_SUM), 1);
    fixture_check_pass(f, "split_scaled_sums", (ml_ref[]){split, whole}, 2, 1e-12);
}

TEST(passes, split_sums) {
    fixture_run(check_split_sums, 8);
}

/* A router and its gradients; the values are those of bf16 and f32, as the reference keeps more. */
static void check_split_dots(fixture *f) {
    ml_graph *g = f->g;
    ml_ref x = ml_cast(g, fixture_input(f, ML_BF16, "b3 s4 d16", -1, 1), ML_F32);
    ml_ref w = fixture_input(f, ML_F32, "d16 e8", -1, 1);
    ml_ref dy = fixture_input(f, ML_F32, "b3 s4 e8", -1, 1);
    ml_ref odd = fixture_input(f, ML_F32, "d16 e9", -1, 1);
    ml_axis rows[] = {AXIS("b"), AXIS("s")}, d = AXIS("d"), e = AXIS("e");
    ml_ref y[] = {ml_dot(g, x, w, &d, 1, ML_F32), ml_dot(g, x, dy, rows, 2, ML_F32),
                  ml_cast(g, ml_dot(g, dy, w, &e, 1, ML_F32), ML_BF16),
                  ml_dot(g, x, odd, &d, 1, ML_F32), ml_dot(g, dy, w, &e, 1, ML_F32)};
    static const int joined[] = {1, 1, 2, 0, 0};
    for (int i = 0; i < 5; i++) {
        CHECK_EQ_INT(fixture_count_after(f, "split_f32_products", &y[i], 1, ML_OP_CONCAT),
                     joined[i]);
        CHECK_EQ_INT(fixture_count_after(f, "split_f32_products", &y[i], 1, ML_OP_DOT), 1);
        fixture_check_pass(f, "split_f32_products", &y[i], 1, i == 2 ? 1e-4 : 1e-6);
    }
}

TEST(passes, split_dots) {
    fixture_run(check_split_dots, 9);
}

/* Gradients of queries and keys, joined for one product; `read` of them are read by others too.
 * Where `circular`, the second is made of the first by a product: that cannot wait for both. */
static void check_joined(fixture *f, int read, bool circular, int slices) {
    ml_graph *g = f->g;
    ml_axis b = AXIS("b"), s = AXIS("s"), k = AXIS("k"), h = AXIS("h"), d = AXIS("d"),
            j = AXIS("j");
    ml_ref x = fixture_input(f, ML_F64, "s4 b3 e5", -1, 1);
    ml_ref turn = fixture_input(f, ML_F64, "d6 c6", -1, 1);
    ml_ref w = fixture_input(f, ML_F64, "e5 j24", -1, 1);
    ml_graph_set_flags(g, ML_NODE_BACKWARD);
    ml_ref q = MAP1(SIN, fixture_input(f, ML_F64, "b3 s4 h2 d6", -1, 1));
    ml_ref keys = ml_rename(g, MAP1(SIN, fixture_input(f, ML_F64, "b3 k4 h2 d6", -1, 1)), k, s);
    if (circular) keys = ml_rename(g, ml_dot(g, q, turn, &d, 1, ML_F64), AXIS("c"), d);
    ml_ref parts[] = {ml_merge(g, q, h, d, j), ml_merge(g, keys, h, d, j)};
    ml_ref out[3] = {ml_dot(g, ml_concat(g, parts, 2, j), w, &j, 1, ML_F64)};
    const ml_ref of[] = {q, keys};
    for (int i = 0; i < read; i++) out[1 + i] = ml_dot(g, x, of[i], (ml_axis[]){b, s}, 2, ML_F64);
    ml_graph_set_flags(g, 0);
    CHECK_EQ_INT(fixture_count_after(f, "reuse_concat_slices", out, 1 + read, ML_OP_SLICE), slices);
    fixture_check_pass(f, "reuse_concat_slices", out, 1 + read, 1e-12);
    CHECK_EQ_INT(fixture_count_after(f, "reuse_concat_slices_in_turn", out, 1 + read, ML_OP_SLICE),
                 0);
}

static void check_reuse_concat_slices(fixture *f) {
    check_joined(f, 2, false, 2);
    check_joined(f, 1, false, 0);
    check_joined(f, 0, false, 0);
    check_joined(f, 2, true, 0);
}

TEST(passes, reuse_concat_slices) {
    fixture_run(check_reuse_concat_slices, 11);
}

/* ---- Values that are compared with the largest of them ------------------------------------------
 */

static bool marks(fixture *f, ml_ref comparison, ml_ref value) {
    bool *marked = ML_NEW_ARRAY(f->arena, bool, ml_graph_count(f->g));
    ml_mark_compared(f->g, comparison, marked);
    return marked[value];
}

static ml_ref largest(fixture *f, ml_ref x) {
    ml_axis axis = AXIS("s");
    return ml_reduce(f->g, ML_OP_MAX, x, &axis, 1);
}

/* A comparison finds the values behind movements, and the largest behind collectives and the larger
 * of two halves. */
static void check_compared(fixture *f) {
    ml_graph *g = f->g;
    ml_ref x = fixture_input(f, ML_F64, "b4 s6", -1, 1),
           gain = fixture_input(f, ML_F64, "b4", 1, 2);
    ml_ref y = MAP2(MUL, MAP1(TANH, x), gain), most = largest(f, y);
    CHECK(marks(f, MAP2(EQ, y, most), y));
    CHECK(marks(f, MAP2(GE, most, y), y));
    CHECK(!marks(f, MAP2(GE, y, gain), y));
    CHECK(!marks(f, MAP2(ADD, y, most), y));
    ml_axis s = AXIS("s");
    ml_ref part = ml_slice(g, y, s, 0, 3);
    CHECK(marks(f, MAP2(EQ, part, most), y));
    ml_ref parts =
        ml_graph_add(g, ML_OP_REDUCE_SCATTER, &most, 1, (int64_t[]){0, 2, ML_COMBINE_MAX}, 3, NULL);
    ml_ref gathered = ml_graph_add(g, ML_OP_ALL_GATHER, &parts, 1, (int64_t[]){0, 2}, 2, NULL);
    CHECK(marks(f, MAP2(EQ, y, gathered), y));
    ml_ref other = MAP1(SIN, x), halves = MAP2(MAXIMUM, most, largest(f, other));
    ml_ref hit = MAP2(EQ, ml_concat(g, (ml_ref[]){y, other}, 2, s), halves);
    CHECK(marks(f, hit, y) && marks(f, hit, other));
}

TEST(passes, compared_with_the_largest) {
    fixture_run(check_compared, 14);
}

/* ---- Values by hand, randomness, FLOPs
 * ----------------------------------------------------------- */

static double number(fixture *f, ml_op op, ml_dtype dtype, double a, double b) {
    ml_ref sources[2] = {ml_const(f->g, dtype, a), ml_const(f->g, dtype, b)};
    int count = ml_ops[op].sources;
    return fixture_value(f, f->g, ml_graph_add(f->g, op, sources, count, NULL, 0, NULL))[0];
}

static void check_values(fixture *f) {
    CHECK_NEAR(number(f, ML_OP_IDIV, ML_I32, -7, 2), -4, 0);
    CHECK_NEAR(number(f, ML_OP_MOD, ML_I32, -7, 3), 2, 0);
    CHECK_NEAR(number(f, ML_OP_MOD, ML_I32, 7, -3), -2, 0);
    CHECK_NEAR(number(f, ML_OP_IDIV, ML_F64, -7.5, 2), -4, 0);
    CHECK_NEAR(number(f, ML_OP_MOD, ML_F64, -7.5, 2), 0.5, 0);
    CHECK_NEAR(number(f, ML_OP_ADD, ML_I32, 2147483647, 1), -2147483648.0, 0);
    CHECK_NEAR(number(f, ML_OP_ROUND, ML_F64, 2.5, 0), 2, 0);
    CHECK_NEAR(number(f, ML_OP_ROUND, ML_F64, 3.5, 0), 4, 0);
    CHECK_NEAR(number(f, ML_OP_SIGN, ML_I32, -3, 0), -1, 0);
    CHECK(isnan(number(f, ML_OP_MAXIMUM, ML_F64, NAN, 1)));
    CHECK(isnan(number(f, ML_OP_MINIMUM, ML_F64, 1, NAN)));
    CHECK_NEAR(number(f, ML_OP_MAXIMUM, ML_I64, -3, 4), 4, 0);
}

TEST(passes, reference_values) {
    fixture_run(check_values, 9);
}

TEST(passes, random_numbers) {
    /* The formula of passes.h, computed independently. */
    CHECK_NEAR(ml_random_uniform(0, 0), 10946269 / 16777216.0, 0);
    CHECK_NEAR(ml_random_uniform(-5, 123456789012), 4589945 / 16777216.0, 0);
    double sum = 0, squares = 0, neighbours = 0, last = 0.5;
    for (int i = 0; i < 100000; i++) {
        double u = ml_random_uniform(42, i);
        sum += u, squares += u * u, neighbours += (u - 0.5) * (last - 0.5);
        last = u;
    }
    CHECK(fabs(sum / 100000 - 0.5) < 0.005);
    CHECK(fabs(squares / 100000 - 1.0 / 3) < 0.005);
    CHECK(fabs(neighbours / 100000) < 0.002);
}

static void check_flops(fixture *f) {
    ml_axis d = AXIS("d");
    ml_ref x = fixture_input(f, ML_F64, "b2 s3 d4", -1, 1);
    ml_ref w = fixture_input(f, ML_F64, "d4 e5", -1, 1);
    CHECK_NEAR(ml_flops(f->g, ml_dot(f->g, x, w, &d, 1, ML_F64)), 2 * 2 * 3 * 4 * 5, 0);
    CHECK_NEAR(ml_flops(f->g, MAP2(ADD, x, x)), 24, 0);
    CHECK_NEAR(ml_flops(f->g, ml_reduce(f->g, ML_OP_SUM, x, &d, 1)), 24, 0);
    ml_attention_args args;
    now = &attention_cases[1]; /* causal, 5 x 5 */
    CHECK_NEAR(ml_flops(f->g, build_attention(f, &args)), 2 * 2 * 12.5 * 2 * 6, 0);
    now = &attention_cases[4]; /* window of 3 over 6: 1 + 2 + 4 x 3 pairs */
    CHECK_NEAR(ml_flops(f->g, build_attention(f, &args)), 2 * 2 * 15.0 * 2 * 4, 0);
}

TEST(passes, flops) {
    fixture_run(check_flops, 3);
}

static void raise_gradient(void *context) {
    fixture *f = context;
    ml_ref x = fixture_input(f, ML_F32, "d4", 0, 1), gradient;
    ml_autodiff(f->g, x, &x, 1, &gradient);
}

static void check_error(fixture *f) {
    CHECK_RAISES(raise_gradient, f, ML_INVALID,
                 "cannot differentiate f32[d=4]: only a float with no axes has a gradient");
}

TEST(passes, gradient_of_a_vector) {
    fixture_run(check_error, 3);
}

/* ---- Twice, not at all, and without memory
 * ------------------------------------------------------- */

static void check_second(fixture *f) {
    snprintf(f->label, sizeof f->label, "second derivatives");
    ml_ref x = fixture_input(f, ML_F64, "b2 d3", 0.5, 2),
           w = fixture_input(f, ML_F64, "d3 e2", -1, 1);
    ml_axis d = AXIS("d");
    ml_ref y = ml_dot(f->g, MAP2(MUL, MAP1(SIN, x), MAP1(LOG, x)), w, &d, 1, ML_F64);
    ml_ref gradient, gated = MAP2(MUL, MAP1(TANH, y), MAP1(SIGMOID, y));
    ml_autodiff(f->g, fixture_loss(f, gated), &x, 1, &gradient);
    fixture_check_gradients(f, fixture_loss(f, gradient));
}

TEST(passes, second_derivatives) {
    fixture_run(check_second, 12);
}

static void check_stopped(fixture *f) {
    ml_ref x = fixture_input(f, ML_F64, "d3", -1, 1), y = fixture_input(f, ML_F64, "d3", -1, 1);
    ml_ref wrt[3] = {x, y, fixture_index(f, "d3", 4)}, gradients[3];
    ml_ref product = MAP2(MUL, x, MAP1(STOP_GRADIENT, y));
    ml_autodiff(f->g, fixture_loss(f, product), wrt, 3, gradients);
    CHECK(gradients[0] != 0);
    CHECK_EQ_INT(gradients[1], 0);
    CHECK_EQ_INT(gradients[2], 0);
    for (int i = 0; i < 3; i++) {
        double weight = f->inputs[3][i];
        CHECK_NEAR(fixture_value(f, f->g, gradients[0])[i], f->inputs[1][i] * weight, 1e-12);
    }
}

TEST(passes, stop_gradient) {
    fixture_run(check_stopped, 13);
}

static ml_graph *made[4];

static ml_graph *decompose_short(const ml_graph *from, ml_roots *roots) {
    return ml_decompose(from, roots, 512);
}

static ml_graph *recompute(const ml_graph *from, ml_roots *roots) {
    return ml_recompute(from, roots, 0, 0, NULL, NULL);
}

static void everything(void *context) {
    static ml_graph *(*const passes[])(const ml_graph *, ml_roots *) = {
        ml_simplify, decompose_short, ml_merge_products, recompute};
    fixture *f = context;
    f->g = ml_graph_new();
    block b = build_block(f, ML_BF16);
    ml_roots roots = {.outputs = block_roots(f, &b), .output_count = b.weight_count + 1};
    for (int i = 0; i < 4; i++) made[i] = passes[i](i ? made[i - 1] : f->g, &roots);
    (void)fixture_value(f, made[3], roots.outputs[0]);
}

/* Whichever allocation fails, the error says so and nothing leaks. */
TEST(passes, out_of_memory) {
    bool done = false;
    for (int64_t n = 1; !done; n += 1 + n / 8) {
        int64_t before = ml_live_blocks();
        fixture f = {.random = 7, .arena = ml_arena_new()};
        ml_memory_fail_at(n);
        ml_status status = ml_protect(everything, &f);
        ml_memory_fail_at(0);
        done = status == ML_OK;
        if (!done) CHECK_EQ_INT(status, ML_NO_MEMORY);
        for (int i = 0; i < 4; i++) ml_graph_free(made[i]), made[i] = NULL;
        ml_graph_free(f.g);
        ml_arena_free(f.arena);
        CHECK_EQ_INT(ml_live_blocks(), before);
    }
}
