/* What is fused: the steps that typical pieces of a model become. */
#include "runtime/ops/attention/attention.h"
#include "tests/lower/support.h"

#include <string.h>

static int count(const piece *p, ml_step_kind kind) {
    int found = 0;
    for (uint32_t i = 0; i < p->s->steps.count; i++) found += p->s->steps.at[i].kind == kind;
    return found;
}

static int finishing(const piece *p) { /* kernels that only read partial results */
    int found = 0;
    for (uint32_t i = 0; i < p->s->steps.count; i++) {
        const ml_step *step = &p->s->steps.at[i];
        int partial = 0;
        for (int r = 0; r < step->read_count; r++)
            partial += p->s->values.at[step->values[r]].node == 0;
        found += partial > 0;
    }
    return found;
}

static void build_norm(void *context) {
    piece *p = context;
    output(p, layer_norm(p, input(p, ML_F32, "bse", SIZES(4, 32, 64)), 64));
}

TEST(lower, layer_norm) {
    piece p;
    lower_piece(&p, build_norm);
    CHECK_EQ_INT(p.s->steps.count, 1);
    CHECK_EQ_INT(p.s->steps.at[0].ir->phases, 3);
    CHECK_EQ_INT(p.s->steps.at[0].ir->loop_count, 2); /* batch and seq are one loop */
    free_piece(&p);
}

static void build_residual(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_F32, "bse", SIZES(4, 32, 64)), w = input(p, ML_F32, "ef", SIZES(64, 48));
    ml_ref y = input(p, ML_F32, "bse", SIZES(4, 32, 64)), sum = ADD(x, y);
    output(p, ADD(sum, number(p, 1))); /* a later user of the residual stream */
    output(p, dot(p, layer_norm(p, sum, 64), w, "e"));
    output(p, sum);
}

TEST(lower, residual_and_norm) {
    piece p;
    lower_piece(&p, build_residual);
    CHECK_EQ_INT(count(&p, ML_STEP_KERNEL), 1);
    CHECK_EQ_INT(count(&p, ML_STEP_GEMM), 1);
    CHECK_EQ_INT(p.s->steps.at[0].write_count, 3);
    free_piece(&p);
}

/* silu(gate) * up, weighted by rows, and all gradients: what experts do. */
static void build_gate(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_BF16, "be", SIZES(256, 32)), weight = input(p, ML_F32, "b", SIZES(256));
    ml_ref w[3] = {input(p, ML_BF16, "ef", SIZES(32, 64)), input(p, ML_BF16, "ef", SIZES(32, 64)),
                   input(p, ML_BF16, "fe", SIZES(64, 32))};
    ml_ref gate = dot(p, x, w[0], "e"), h = ml_cast(p->g, gate, ML_F32);
    h = ml_cast(p->g, MUL(h, FN(SIGMOID, h)), ML_BF16);
    h = ml_cast(p->g, MUL(h, dot(p, x, w[1], "e")), ML_F32);
    h = ml_cast(p->g, MUL(h, weight), ML_BF16);
    ml_ref y = ml_cast(p->g, dot(p, h, w[2], "f"), ML_F32);
    ml_axis all[2] = {axis(p, "b"), axis(p, "e")};
    ml_ref wrt[4] = {weight, w[0], w[1], w[2]}, gradients[4];
    ml_autodiff(p->g, ml_reduce(p->g, ML_OP_SUM, FN(SIN, y), all, 2), wrt, 4, gradients);
    for (int i = 0; i < 4; i++) output(p, gradients[i]);
}

/* Of all that is as wide as the hidden layer memory holds gate, up, the weighted product, and the
 * gradients of these three, each in bf16: the product before its weight is computed again. */
TEST(lower, gated_and_weighted) {
    piece p;
    int wide = 0;
    lower_piece(&p, build_gate);
    for (uint32_t i = 0; i < p.s->steps.count; i++)
        for (int k = 0; k < p.s->steps.at[i].write_count; k++) {
            const ml_step *step = &p.s->steps.at[i];
            const ml_value *v = &p.s->values.at[step->values[step->read_count + k]];
            if (ml_type_elements(&v->type) != 256 * 64) continue;
            CHECK_EQ_INT(v->type.dtype, ML_BF16);
            wide++;
        }
    CHECK_EQ_INT(wide, 6);
    free_piece(&p);
}

static void build_norm_gradient(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_F32, "bse", SIZES(8, 256, 64)),
           w = input(p, ML_F32, "ef", SIZES(64, 48));
    ml_ref y = layer_norm(p, x, 64), wrt[4] = {x, 0, 0, w}, gradients[4];
    wrt[1] = ml_graph_source(p->g, y, 1);
    wrt[2] = ml_graph_source(p->g, ml_graph_source(p->g, y, 0), 1);
    ml_ref z = dot(p, y, w, "e");
    ml_axis all[3] = {axis(p, "b"), axis(p, "s"), axis(p, "f")};
    ml_autodiff(p->g, ml_reduce(p->g, ML_OP_SUM, FN(SIN, z), all, 3), wrt, 4, gradients);
    for (int i = 0; i < 4; i++) output(p, gradients[i]);
}

TEST(lower, norm_gradient) {
    piece p;
    lower_piece(&p, build_norm_gradient);
    CHECK_EQ_INT(count(&p, ML_STEP_GEMM), 3);
    /* forward; cos(z); backward with the columns' sums; adding those up */
    CHECK_EQ_INT(count(&p, ML_STEP_KERNEL), 4);
    CHECK_EQ_INT(finishing(&p), 1);
    free_piece(&p);
}

static void build_softmax(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_F32, "bst", SIZES(4, 32, 64));
    ml_axis t = axis(p, "t");
    ml_ref e = FN(EXP, SUB(x, ml_reduce(p->g, ML_OP_MAX, x, &t, 1)));
    output(p, DIV(e, ml_reduce(p->g, ML_OP_SUM, e, &t, 1)));
}

TEST(lower, softmax) {
    piece p;
    lower_piece(&p, build_softmax);
    CHECK_EQ_INT(p.s->steps.count, 1);
    CHECK_EQ_INT(p.s->steps.at[0].read_count, 1);
    CHECK(p.s->steps.at[0].may_alias[0] == 1);
    free_piece(&p);
}

/* Logits from a product; their loss, and the gradients of both operands. */
static void build_cross_entropy(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_F32, "bse", SIZES(4, 64, 32)),
           w = input(p, ML_F32, "ev", SIZES(32, 512));
    ml_ref target = input(p, ML_I32, "bs", SIZES(4, 64)), logits = dot(p, x, w, "e");
    ml_axis v = axis(p, "v"), rows[2] = {axis(p, "b"), axis(p, "s")};
    ml_ref high = ml_reduce(p->g, ML_OP_MAX, logits, &v, 1);
    ml_ref sum = ml_reduce(p->g, ML_OP_SUM, FN(EXP, SUB(logits, high)), &v, 1);
    const ml_type *type = ml_graph_type(p->g, logits);
    ml_type whole = *type;
    whole.dtype = ML_I32;
    ml_ref here =
        ml_map2(p->g, ML_OP_EQ, ml_broadcast(p->g, ml_iota(p->g, v, 512), &whole), target);
    ml_ref picked = ml_reduce(p->g, ML_OP_SUM, ml_where(p->g, here, logits, number(p, 0)), &v, 1);
    ml_ref loss = ml_reduce(p->g, ML_OP_SUM, SUB(ADD(FN(LOG, sum), high), picked), rows, 2);
    ml_ref wrt[2] = {x, w}, gradients[2];
    ml_autodiff(p->g, loss, wrt, 2, gradients);
    output(p, loss);
    output(p, gradients[0]);
    output(p, gradients[1]);
}

TEST(lower, cross_entropy) {
    piece p;
    lower_piece(&p, build_cross_entropy);
    CHECK_EQ_INT(count(&p, ML_STEP_GEMM), 3);
    CHECK(count(&p, ML_STEP_KERNEL) <= 2); /* one, and the sum of the rows' losses */
    bool in_place = false;
    for (uint32_t i = 0; i < p.s->steps.count; i++) {
        const ml_step *step = &p.s->steps.at[i];
        for (int w = 0; w < step->write_count && step->may_alias != NULL; w++)
            in_place = in_place || step->may_alias[w] != 0;
    }
    CHECK(in_place);
    free_piece(&p);
}

enum { LONG = 1 << 15, ROWS = 64 };

/* Logits with a bias; their loss and the gradients of both. */
static void build_long_loss(void *context) {
    piece *p = context;
    ml_ref wrt[2] = {input(p, ML_BF16, "bv", SIZES(ROWS, LONG)),
                     input(p, ML_F32, "v", SIZES(LONG))};
    ml_axis v = axis(p, "v"), b = axis(p, "b");
    ml_ref x = ADD(ml_cast(p->g, wrt[0], ML_F32), wrt[1]), gradients[2];
    ml_ref high = ml_reduce(p->g, ML_OP_MAX, x, &v, 1);
    ml_ref sum = ml_reduce(p->g, ML_OP_SUM, FN(EXP, SUB(x, high)), &v, 1);
    ml_ref loss = ml_reduce(p->g, ML_OP_SUM, ADD(FN(LOG, sum), high), &b, 1);
    ml_autodiff(p->g, loss, wrt, 2, gradients);
    output(p, loss);
    output(p, gradients[0]);
    output(p, gradients[1]);
}

/* Logits so long that a multiprocessor has room for one row. */
static void build_longer_loss(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_BF16, "bv", SIZES(ROWS, 4 * LONG)), gradient;
    ml_axis v = axis(p, "v"), b = axis(p, "b");
    ml_ref e = FN(EXP, ml_cast(p->g, x, ML_F32)), sum = ml_reduce(p->g, ML_OP_SUM, e, &v, 1);
    ml_ref loss = ml_reduce(p->g, ML_OP_SUM, FN(LOG, sum), &b, 1);
    ml_autodiff(p->g, loss, &x, 1, &gradient);
    output(p, loss);
    output(p, gradient);
}

static int kernels_of_blocks(const piece *p, uint32_t blocks) {
    int found = 0;
    for (uint32_t i = 0; i < p->s->steps.count; i++) {
        const ml_kernel *kernel = p->s->steps.at[i].kernel;
        found += kernel != NULL && kernel->grid[0] == blocks;
    }
    return found;
}

/* Long rows are walked by many blocks of few rows; sums of columns by few blocks, elsewhere. */
TEST(lower, long_rows) {
    piece p;
    lower_for(&p, ML_TARGET_CUDA, build_longer_loss);
    CHECK_EQ_INT(kernels_of_blocks(&p, ROWS / 4), 1);
    CHECK_EQ_INT(kernels_of_blocks(&p, ROWS / 8), 0);
    free_piece(&p);
    lower_for(&p, ML_TARGET_CUDA, build_long_loss);
    int partials = 0;
    CHECK_EQ_INT(kernels_of_blocks(&p, ROWS / 2), 1);
    for (uint32_t i = 0; i < p.s->values.count; i++) {
        if (p.s->values.at[i].node != 0) continue;
        partials++;
        CHECK(ml_type_elements(&p.s->values.at[i].type) <= ROWS / 8 * LONG);
    }
    CHECK(partials > 0);
    free_piece(&p);
}

/* A constant that is an output, and a kernel that knows it all the same. */
static void build_constant(void *context) {
    piece *p = context;
    ml_ref one = number(p, 1);
    output(p, one);
    output(p, ADD(FN(EXP, input(p, ML_F32, "be", SIZES(64, 32))), one));
}

TEST(lower, constants_in_memory) {
    piece p;
    lower_piece(&p, build_constant);
    bool reads = false;
    for (uint32_t i = 0; i < p.s->steps.count; i++) {
        CHECK(p.s->steps.at[i].read_count <= 1); /* the input alone */
        reads |= p.s->steps.at[i].read_count == 1;
    }
    CHECK(reads);
    free_piece(&p);
}

static void build_adamw(void *context) {
    piece *p = context;
    ml_ref w = input(p, ML_F32, "ef", SIZES(64, 48)),
           gradient = input(p, ML_F32, "ef", SIZES(64, 48));
    ml_ref m = input(p, ML_F32, "ef", SIZES(64, 48)), v = input(p, ML_F32, "ef", SIZES(64, 48));
    ml_ref rate = input(p, ML_F32, "", SIZES(0)), scale = FN(SQRT, input(p, ML_F32, "", SIZES(0)));
    ml_ref g = MUL(gradient, scale);
    m = ADD(MUL(m, number(p, 0.9)), MUL(g, number(p, 0.1)));
    v = ADD(MUL(v, number(p, 0.95)), MUL(MUL(g, g), number(p, 0.05)));
    ml_ref step = DIV(m, ADD(FN(SQRT, v), number(p, 1e-8)));
    output(p, SUB(w, MUL(rate, ADD(step, MUL(w, number(p, 0.1))))));
    output(p, m);
    output(p, v);
}

TEST(lower, adamw) {
    piece p;
    lower_piece(&p, build_adamw);
    CHECK_EQ_INT(p.s->steps.count, 1);
    CHECK_EQ_INT(p.s->steps.at[0].write_count, 3);
    CHECK_EQ_INT(p.s->steps.at[0].ir->loop_count, 1);
    free_piece(&p);
}

static void build_rope(void *context) {
    piece *p = context;
    ml_ref q = input(p, ML_F32, "bshd", SIZES(2, 32, 4, 16)),
           angle = input(p, ML_F32, "sd", SIZES(32, 8));
    ml_axis d = axis(p, "d");
    ml_ref a = ml_slice(p->g, q, d, 0, 8), b = ml_slice(p->g, q, d, 8, 16);
    ml_ref parts[2] = {SUB(MUL(a, FN(COS, angle)), MUL(b, FN(SIN, angle))),
                       ADD(MUL(a, FN(SIN, angle)), MUL(b, FN(COS, angle)))};
    output(p, ml_concat(p->g, parts, 2, d));
}

TEST(lower, rope) {
    piece p;
    lower_piece(&p, build_rope);
    CHECK_EQ_INT(p.s->steps.count, 2); /* the table of cosines and sines, once; the rotation */
    CHECK_EQ_INT(p.s->steps.at[0].write_count, 2);
    CHECK_EQ_INT(p.s->steps.at[1].write_count, 2);
    free_piece(&p);
}

static void build_gelu(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_F32, "bse", SIZES(4, 64, 32)),
           w = input(p, ML_F32, "ef", SIZES(32, 128));
    ml_ref v = input(p, ML_F32, "fe", SIZES(128, 32)), bias = input(p, ML_F32, "f", SIZES(128));
    ml_ref hidden = gelu(p, ADD(dot(p, x, w, "e"), bias)), y = dot(p, hidden, v, "f");
    ml_ref wrt[4] = {x, w, v, bias}, gradients[4];
    ml_axis all[3] = {axis(p, "b"), axis(p, "s"), axis(p, "e")};
    ml_autodiff(p->g, ml_reduce(p->g, ML_OP_SUM, MUL(y, y), all, 3), wrt, 4, gradients);
    for (int i = 0; i < 4; i++) output(p, gradients[i]);
}

TEST(lower, bias_and_gelu) {
    piece p;
    lower_piece(&p, build_gelu);
    CHECK_EQ_INT(count(&p, ML_STEP_GEMM), 6);
    /* forward, 2 y, backward with the bias's gradient, adding that up; only the product before
     * the bias is kept */
    CHECK_EQ_INT(count(&p, ML_STEP_KERNEL), 4);
    free_piece(&p);
}

/* Attention written out: no transpose between [batch, seq, heads] and [batch, heads, seq]. */
static void build_attention(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_F32, "bse", SIZES(2, 32, 64)), w[4];
    ml_axis e = axis(p, "e"), h = axis(p, "h"), d = axis(p, "d"), s = axis(p, "s"),
            t = axis(p, "t");
    for (int i = 0; i < 4; i++) w[i] = input(p, ML_F32, "ehd", SIZES(64, 4, 16));
    ml_ref q = dot(p, x, w[0], "e"), k = ml_rename(p->g, dot(p, x, w[1], "e"), s, t);
    ml_ref v = ml_rename(p->g, dot(p, x, w[2], "e"), s, t), scores = dot(p, q, k, "d");
    ml_ref high = ml_reduce(p->g, ML_OP_MAX, scores, &t, 1), exps = FN(EXP, SUB(scores, high));
    ml_ref share = DIV(exps, ml_reduce(p->g, ML_OP_SUM, exps, &t, 1));
    ml_ref mixed = dot(p, share, v, "t");
    ml_axis over[2] = {h, d};
    ml_ref y = ml_dot(p->g, mixed, w[3], over, 2, ML_F32), wrt[5] = {x, w[0], w[1], w[2], w[3]};
    ml_ref gradients[5];
    ml_axis all[3] = {axis(p, "b"), s, e};
    ml_autodiff(p->g, ml_reduce(p->g, ML_OP_SUM, MUL(y, y), all, 3), wrt, 5, gradients);
    for (int i = 0; i < 5; i++) output(p, gradients[i]);
}

TEST(lower, attention_without_copies) {
    piece p;
    lower_piece(&p, build_attention);
    /* softmax, 2 y, softmax backward; the gradients of x are accumulated by the products */
    CHECK_EQ_INT(count(&p, ML_STEP_KERNEL), 3);
    free_piece(&p);
}

/* q, k and v of one product side by side, q and k turned by position, which attention reads. */
static ml_ref turned(piece *p, ml_ref x, ml_axis d) {
    ml_ref low = ml_slice(p->g, x, d, 0, 8), high = ml_slice(p->g, x, d, 8, 16);
    ml_ref c = input(p, ML_F32, "sd", SIZES(32, 8)), s = input(p, ML_F32, "sd", SIZES(32, 8));
    ml_ref parts[2] = {SUB(MUL(low, c), MUL(high, s)), ADD(MUL(high, c), MUL(low, s))};
    return ml_concat(p->g, parts, 2, d);
}

static ml_ref qkv_joined(piece *p, bool also_read) {
    ml_axis s = axis(p, "s"), t = axis(p, "t"), j = axis(p, "j"), h = axis(p, "h"),
            g = axis(p, "g"), d = axis(p, "d");
    ml_ref x = input(p, ML_F32, "bse", SIZES(2, 32, 64));
    ml_ref qkv = dot(p, x, input(p, ML_F32, "ej", SIZES(64, 128)), "e");
    ml_ref q = ml_split(p->g, ml_slice(p->g, qkv, j, 0, 64), j, h, 4, d, 16);
    ml_ref k = ml_split(p->g, ml_slice(p->g, qkv, j, 64, 96), j, g, 2, d, 16);
    ml_ref v = ml_split(p->g, ml_slice(p->g, qkv, j, 96, 128), j, g, 2, d, 16);
    ml_attention_args args = {.seq = s, .kv_seq = t, .heads = h, .kv_heads = g, .head_dim = d};
    args.scale = 0.25, args.causal = true;
    if (also_read) output(p, ml_reduce(p->g, ML_OP_SUM, FN(EXP, q), &d, 1));
    k = ml_rename(p->g, turned(p, k, d), s, t);
    ml_ref sources[3] = {turned(p, q, d), k, ml_rename(p->g, v, s, t)};
    return ml_attention(p->g, sources, 3, &args);
}

static void build_turned(void *context) {
    output(context, qkv_joined(context, false));
}

/* The sum may run after q was turned: q must stay as it was. */
static void build_turned_and_read(void *context) {
    output(context, qkv_joined(context, true));
}

TEST(lower, turned_in_place) {
    for (int also_read = 0; also_read < 2; also_read++) {
        for (int kind = 0; kind < 2; kind++) {
            piece p;
            lower_for(&p, kind ? ML_TARGET_CUDA : ML_TARGET_C,
                      also_read ? build_turned_and_read : build_turned);
            const ml_value *v[3] = {0};
            for (uint32_t i = 0; i < p.s->steps.count; i++) {
                const ml_step *step = &p.s->steps.at[i];
                for (int k = 0; k < 3 && step->kind == ML_STEP_ATTENTION; k++)
                    v[k] = &p.s->values.at[step->values[k]];
            }
            REQUIRE(v[2] != NULL);
            CHECK_EQ_INT(v[2]->offset, 96);
            CHECK_EQ_INT(v[1]->storage, v[2]->storage);
            CHECK_EQ_INT(v[1]->offset, 64);
            CHECK((v[0]->storage == v[2]->storage) == !also_read);
            CHECK_EQ_INT(v[0]->offset, 0);
            free_piece(&p);
        }
    }
}

/* Logarithms of sums of exponentials that nothing reads, as where a gradient computes attention
 * again, lie as those that a gradient reads: by heads, as cuDNN requires. */
TEST(lower, attention_of_unread_sums) {
    piece p;
    lower_for(&p, ML_TARGET_CUDA, build_turned);
    const ml_attention_step *a = NULL;
    for (uint32_t i = 0; i < p.s->steps.count; i++)
        if (p.s->steps.at[i].attention) a = p.s->steps.at[i].attention;
    REQUIRE(a != NULL);
    CHECK_EQ_INT(a->strides[4].batch[0], 4 * 32);
    CHECK_EQ_INT(a->strides[4].head, 32);
    CHECK_EQ_INT(a->strides[4].seq, 1);
    free_piece(&p);
}

/* The same columns turned twice in one kernel: only one of the two may take their place. */
static void build_turned_twice(void *context) {
    piece *p = context;
    ml_axis s = axis(p, "s"), t = axis(p, "t"), j = axis(p, "j"), h = axis(p, "h"),
            d = axis(p, "d");
    ml_ref x = input(p, ML_F32, "bse", SIZES(2, 32, 64));
    ml_ref both = dot(p, x, input(p, ML_F32, "ej", SIZES(64, 128)), "e");
    ml_ref shared = ml_split(p->g, ml_slice(p->g, both, j, 0, 64), j, h, 4, d, 16);
    ml_ref v = ml_split(p->g, ml_slice(p->g, both, j, 64, 128), j, h, 4, d, 16);
    ml_attention_args args = {.seq = s, .kv_seq = t, .heads = h, .kv_heads = h, .head_dim = d};
    args.scale = 0.25, args.causal = true;
    ml_ref q = turned(p, shared, d), k = turned(p, shared, d);
    ml_ref sources[3] = {q, ml_rename(p->g, k, s, t), ml_rename(p->g, v, s, t)};
    output(p, ml_attention(p->g, sources, 3, &args));
}

TEST(lower, turned_twice) {
    for (int kind = 0; kind < 2; kind++) {
        piece p;
        lower_for(&p, kind ? ML_TARGET_CUDA : ML_TARGET_C, build_turned_twice);
        const ml_value *q = NULL, *k = NULL;
        for (uint32_t i = 0; i < p.s->steps.count; i++) {
            const ml_step *step = &p.s->steps.at[i];
            if (step->kind != ML_STEP_ATTENTION) continue;
            q = &p.s->values.at[step->values[0]], k = &p.s->values.at[step->values[1]];
        }
        REQUIRE(q != NULL);
        CHECK(q->storage != k->storage);
        free_piece(&p);
    }
}

/* q a product, k computed, v a slice; of none do rows of d lie together. */
static void build_attention_across(void *context) {
    piece *p = context;
    ml_axis s = axis(p, "s"), t = axis(p, "t"), h = axis(p, "h"), d = axis(p, "d");
    ml_ref given[3] = {dot(p, input(p, ML_BF16, "bse", SIZES(2, 32, 64)),
                           input(p, ML_BF16, "edh", SIZES(64, 16, 4)), "e"),
                       FN(TANH, input(p, ML_BF16, "btdh", SIZES(2, 32, 16, 4))),
                       ml_slice(p->g, input(p, ML_BF16, "bthd", SIZES(2, 32, 4, 17)), d, 1, 17)};
    ml_attention_args args = {.seq = s, .kv_seq = t, .heads = h, .kv_heads = h, .head_dim = d};
    args.scale = 0.25, args.causal = true;
    for (int i = 0; i < 2; i++) {
        ml_type order = *ml_graph_type(p->g, given[i]);
        ml_axis inner[] = {h, d};
        memcpy(order.axis + 2, inner, sizeof inner);
        order.size[2] = 4, order.size[3] = 16;
        given[i] = ml_permute(p->g, given[i], &order);
    }
    output(p, ml_attention(p->g, given, 3, &args));
}

TEST(lower, attention_reads_rows) {
    piece p;
    lower_for(&p, ML_TARGET_CUDA, build_attention_across);
    int found = 0;
    for (uint32_t i = 0; i < p.s->steps.count; i++) {
        const ml_step *step = &p.s->steps.at[i];
        for (int k = 0; k < 3 && step->kind == ML_STEP_ATTENTION; k++) {
            const ml_attention_strides *strides = &step->attention->strides[k];
            CHECK_EQ_INT(strides->dim, 1);
            CHECK_EQ_INT(strides->head, 16);
            found++;
        }
    }
    CHECK_EQ_INT(found, 3);
    free_piece(&p);
}

/* A product whose bias is all that follows: the GPU's library adds it. */
static void build_bias(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_F32, "bse", SIZES(4, 64, 32)),
           w = input(p, ML_F32, "ehd", SIZES(32, 4, 8));
    output(p, ADD(dot(p, x, w, "e"), input(p, ML_F32, "hd", SIZES(4, 8))));
}

TEST(lower, bias_of_a_product) {
    piece p;
    lower_for(&p, ML_TARGET_CUDA, build_bias);
    CHECK_EQ_INT(p.s->steps.count, 1);
    CHECK(p.s->steps.at[0].gemm->epilogue == ML_EPILOGUE_BIAS);
    free_piece(&p);
    lower_piece(&p, build_bias);
    CHECK_EQ_INT(p.s->steps.count, 2);
    free_piece(&p);
}

/* A biased product that is added to a residual stream, of which a norm is taken. */
static void build_biased_stream(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_BF16, "bse", SIZES(4, 64, 32)),
           w = input(p, ML_BF16, "ef", SIZES(32, 48)), bias = input(p, ML_BF16, "f", SIZES(48));
    ml_ref stream = input(p, ML_BF16, "bsf", SIZES(4, 64, 48)), y;
    ml_axis e = axis(p, "e"), f = axis(p, "f");
    y = ADD(stream, ADD(ml_dot(p->g, x, w, &e, 1, ML_BF16), bias));
    y = ml_cast(p->g, y, ML_F32);
    output(p, MUL(y, FN(RSQRT, ml_reduce(p->g, ML_OP_SUM, MUL(y, y), &f, 1))));
}

/* The library adds the bias before it rounds the sum to bf16, also where a kernel reads the result:
 * added after, a bias far below the spacing of the stream would decide each tie. */
TEST(lower, bias_before_rounding) {
    piece p;
    lower_for(&p, ML_TARGET_CUDA, build_biased_stream);
    CHECK_EQ_INT(p.s->steps.count, 2);
    CHECK(p.s->steps.at[0].gemm->epilogue == ML_EPILOGUE_BIAS);
    CHECK_EQ_INT(p.s->steps.at[1].read_count, 2); /* the product and the stream */
    free_piece(&p);
}

/* Each level needs the one before at two places; small sums of small sums. */
static void build_doubling(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_F32, "se", SIZES(32, 24));
    ml_axis e = axis(p, "e");
    for (int i = 0; i < 14; i++) {
        ml_ref low = ml_slice(p->g, x, e, 0, 23), high = ml_slice(p->g, x, e, 1, 24);
        x = ADD(ml_pad(p->g, FN(SIN, low), e, 0, 1), ml_pad(p->g, FN(COS, high), e, 1, 0));
    }
    output(p, x);
    ml_ref y = input(p, ML_F32, "abcde", SIZES(12, 12, 12, 2, 6));
    for (const char *at = "abcd"; *at; at++) {
        char name[2] = {*at, 0};
        ml_axis over = axis(p, name);
        y = ml_reduce(p->g, ML_OP_SUM, FN(SIN, MUL(y, y)), &over, 1);
    }
    output(p, y);
}

TEST(lower, no_explosion) {
    piece p;
    lower_piece(&p, build_doubling);
    CHECK(p.s->steps.count < 12);
    for (uint32_t i = 0; i < p.s->steps.count; i++) CHECK(p.s->steps.at[i].ir->inst_count < 4000);
    free_piece(&p);
}
