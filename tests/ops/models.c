/* Small whole graphs on the CPU device: the pieces of a transformer and of its training step. */
#include <math.h>
#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "tests/ops/support.h"

static ml_dtype dtype;

static ml_ref mean(ops_case *c, ml_ref x, const char *axis, double size) {
    ml_axis a = ops_axis(c, axis);
    ml_ref sum = ml_reduce(c->g, ML_OP_SUM, x, &a, 1);
    return ml_map2(c->g, ML_OP_MUL, sum, ml_const(c->g, ml_graph_type(c->g, x)->dtype, 1 / size));
}

static ml_ref add(ops_case *c, ml_ref a, ml_ref b) {
    return ml_map2(c->g, ML_OP_ADD, a, b);
}
static ml_ref sub(ops_case *c, ml_ref a, ml_ref b) {
    return ml_map2(c->g, ML_OP_SUB, a, b);
}
static ml_ref mul(ops_case *c, ml_ref a, ml_ref b) {
    return ml_map2(c->g, ML_OP_MUL, a, b);
}
static ml_ref number(ops_case *c, double value) {
    return ml_const(c->g, dtype, value);
}

/* (x - mean) / sqrt(variance + 1e-5) * gain + bias over "d". */
static ml_ref layer_norm(ops_case *c, ml_ref x, ml_ref gain, ml_ref bias, double size) {
    ml_ref centred = sub(c, x, mean(c, x, "d", size));
    ml_ref variance = mean(c, mul(c, centred, centred), "d", size);
    ml_ref scale = ml_map1(c->g, ML_OP_RSQRT, add(c, variance, number(c, 1e-5)));
    return add(c, mul(c, mul(c, centred, scale), gain), bias);
}

static ml_ref gelu(ops_case *c, ml_ref x) {
    ml_ref cube = mul(c, mul(c, x, x), x);
    ml_ref inner = mul(c, add(c, x, mul(c, cube, number(c, 0.044715))), number(c, sqrt(2 / M_PI)));
    ml_ref one = add(c, ml_map1(c->g, ML_OP_TANH, inner), number(c, 1));
    return mul(c, mul(c, x, number(c, 0.5)), one);
}

static ml_ref softmax(ops_case *c, ml_ref x, const char *axis) {
    ml_axis a = ops_axis(c, axis);
    ml_ref e = ml_map1(c->g, ML_OP_EXP, sub(c, x, ml_reduce(c->g, ML_OP_MAX, x, &a, 1)));
    return ml_map2(c->g, ML_OP_DIV, e, ml_reduce(c->g, ML_OP_SUM, e, &a, 1));
}

/* The mean over tokens of logsumexp(logits) - logit of the target. */
static ml_ref cross_entropy(ops_case *c, ml_ref logits, ml_ref target, double tokens) {
    ml_axis v = ops_axis(c, "v");
    ml_ref top = ml_reduce(c->g, ML_OP_MAX, logits, &v, 1);
    ml_ref e = ml_map1(c->g, ML_OP_EXP, sub(c, logits, top));
    ml_ref lse = add(c, ml_map1(c->g, ML_OP_LOG, ml_reduce(c->g, ML_OP_SUM, e, &v, 1)), top);
    ml_ref loss = sub(c, lse, ml_gather(c->g, logits, target, v));
    ml_type type = *ml_graph_type(c->g, loss);
    return mul(c, ml_reduce(c->g, ML_OP_SUM, loss, type.axis, type.rank), number(c, 1 / tokens));
}

static void build_norms(ops_case *c) {
    double loose = 40 * ops_tolerance(dtype);
    ml_ref wrt[4] = {ops_input(c, dtype, "b5 s7 d96", -2, 2), ops_input(c, dtype, "d96", 0.5, 2),
                     ops_input(c, dtype, "d96", -1, 1), ops_input(c, dtype, "b5 s7 d96", -2, 2)};
    ml_ref residual = add(c, wrt[0], wrt[3]);
    ml_ref y = layer_norm(c, residual, wrt[1], wrt[2], 96);
    ops_output(c, residual, loose, "residual");
    ops_output(c, y, loose, "layer norm");
    ops_gradients(c, y, wrt, 4, loose, "layer norm");
    ml_ref p = softmax(c, wrt[0], "d");
    ops_output(c, p, loose, "softmax");
    ops_gradients(c, p, wrt, 1, loose, "softmax");
    ml_ref q = softmax(c, wrt[0], "s");
    ops_output(c, q, loose, "softmax over a middle axis");
    ops_gradients(c, gelu(c, residual), wrt, 1, loose, "gelu");
}

static void build_loss(ops_case *c) {
    double loose = 40 * ops_tolerance(dtype);
    ml_ref wrt[2] = {ops_input(c, dtype, "b3 s5 d16", -2, 2),
                     ops_input(c, dtype, "v130 d16", -1, 1)};
    ml_axis d = ops_axis(c, "d");
    ml_ref logits = ml_dot(c->g, wrt[0], wrt[1], &d, 1, dtype), gradients[2];
    ml_ref loss = cross_entropy(c, logits, ops_index(c, "b3 s5", 130), 15);
    ops_output(c, loss, loose, "cross entropy");
    ml_autodiff(c->g, loss, wrt, 2, gradients);
    ops_output(c, gradients[0], loose, "gradient of the hidden states");
    ops_output(c, gradients[1], loose, "gradient of the embedding");
}

/* A transformer block with its gradients, as GPT-2 has it. */
static void build_block(ops_case *c) {
    double loose = 100 * ops_tolerance(dtype);
    ml_graph *g = c->g;
    ml_axis d = ops_axis(c, "d"), h = ops_axis(c, "h"), e = ops_axis(c, "e"), f = ops_axis(c, "f");
    enum { COUNT = 9 };
    ml_ref w[COUNT] = {
        ops_input(c, dtype, "b2 s24 d32", -2, 2), ops_input(c, dtype, "d32 h4 e8", -1, 1),
        ops_input(c, dtype, "d32 h4 e8", -1, 1),  ops_input(c, dtype, "d32 h4 e8", -1, 1),
        ops_input(c, dtype, "h4 e8 d32", -1, 1),  ops_input(c, dtype, "d32 f64", -1, 1),
        ops_input(c, dtype, "f64 d32", -1, 1),    ops_input(c, dtype, "d32", 0.5, 1),
        ops_input(c, dtype, "d32", -1, 1)};
    ml_ref n = layer_norm(c, w[0], w[7], w[8], 32), qkv[3];
    for (int i = 0; i < 3; i++) {
        ml_ref scaled = mul(c, ml_dot(g, n, w[1 + i], &d, 1, dtype), number(c, 0.2));
        qkv[i] = i ? ml_rename(g, scaled, ops_axis(c, "s"), ops_axis(c, "t")) : scaled;
    }
    ml_attention_args args = {.seq = ops_axis(c, "s"),
                              .kv_seq = ops_axis(c, "t"),
                              .heads = h,
                              .kv_heads = h,
                              .head_dim = e,
                              .causal = true,
                              .scale = 1 / sqrt(8)};
    ml_ref o = ml_attention(g, qkv, 3, &args);
    ml_ref x =
        add(c, w[0], mul(c, ml_dot(g, o, w[4], (ml_axis[]){h, e}, 2, dtype), number(c, 0.2)));
    ml_ref up = gelu(
        c, mul(c, ml_dot(g, layer_norm(c, x, w[7], w[8], 32), w[5], &d, 1, dtype), number(c, 0.2)));
    x = add(c, x, mul(c, ml_dot(g, up, w[6], &f, 1, dtype), number(c, 0.2)));
    ops_output(c, x, loose, "block");
    ops_gradients(c, x, w, COUNT, loose, "block");
}

static void run_dtypes(ops_body *body, uint64_t seed) {
    static const ml_dtype dtypes[] = {ML_F32, ML_F64};
    for (int i = 0; i < 2; i++) {
        dtype = dtypes[i];
        ops_run(body, seed + (uint64_t)i, i == 0 ? OPS_UNFUSED : 0);
    }
}

OPS_TEST(norms) {
    run_dtypes(build_norms, 200);
}
OPS_TEST(cross_entropy) {
    run_dtypes(build_loss, 210);
}
OPS_TEST(block) {
    run_dtypes(build_block, 220);
}
