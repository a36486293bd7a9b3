/* See tests/graph/support.h. */
#include "tests/graph/support.h"
#include "runtime/graph/collectives.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/cached_attention/cached_attention.h"
#include "runtime/ops/conv/conv.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/ops/recurrence/recurrence.h"

#include <stdio.h>

typedef struct {
    graph_body *body;
    ml_graph *g;
} run;

static void run_body(void *argument) {
    run *r = argument;
    r->g = ml_graph_new();
    r->body(r->g);
}

void graph_run(graph_body *body) {
    run r = {body, NULL};
    ml_status status = ml_protect(run_body, &r);
    ml_graph_free(r.g);
    if (status != ML_OK) ml_raise_last();
}

ml_axis graph_axis(ml_graph *g, const char *name) {
    return ml_axis_named(g, name);
}

ml_type graph_axes(ml_graph *g, ml_dtype dtype, const char *axes) {
    ml_type type = {.dtype = (uint8_t)dtype};
    char name[32];
    long long size;
    int used;
    while (sscanf(axes, " %31[a-z_]%lld%n", name, &size, &used) == 2) {
        type.axis[type.rank] = graph_axis(g, name);
        type.size[type.rank++] = size;
        axes += used;
    }
    return type;
}

ml_ref graph_input(ml_graph *g, ml_dtype dtype, const char *axes) {
    ml_input input = {"x", graph_axes(g, dtype, axes)};
    int64_t id = ml_graph_add_input(g, &input);
    return ml_graph_add(g, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
}

const char *graph_type_text(ml_graph *g, ml_ref n) {
    ml_text text = {.arena = ml_graph_arena(g)};
    ml_type_print(g, ml_graph_type(g, n), &text);
    return text.text;
}

graph_qkv graph_attention(ml_graph *g, ml_dtype dtype, int kv_heads) {
    graph_qkv a = {.args = {.seq = graph_axis(g, "s"),
                            .kv_seq = graph_axis(g, "t"),
                            .heads = graph_axis(g, "h"),
                            .kv_heads = graph_axis(g, kv_heads == 4 ? "h" : "kv"),
                            .head_dim = graph_axis(g, "d"),
                            .causal = true,
                            .scale = 0.5}};
    char axes[64];
    snprintf(axes, sizeof axes, "b2 t6 %s%d d8", kv_heads == 4 ? "h" : "kv", kv_heads);
    a.q = graph_input(g, dtype, "b2 s5 h4 d8");
    a.k = graph_input(g, dtype, axes);
    a.v = graph_input(g, dtype, axes);
    return a;
}

ml_ref graph_score(ml_graph *g, const graph_qkv *a, ml_ref bias) {
    ml_type type;
    ml_attention_score_type(g, a->q, a->k, &a->args, &type);
    ml_ref s = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){0}, 1, &type);
    ml_ref limit = ml_const(g, type.dtype, 30);
    ml_ref score =
        ml_map2(g, ML_OP_MUL, ml_map1(g, ML_OP_TANH, ml_map2(g, ML_OP_DIV, s, limit)), limit);
    if (!bias) return score;
    ml_ref captured =
        ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){1}, 1, ml_graph_type(g, bias));
    return ml_map2(g, ML_OP_ADD, score, captured);
}

static ml_ref sample_map(ml_graph *g, ml_op op) {
    ml_dtype dtype = ml_ops[op].rule == ML_RULE_LOGIC ? ML_BOOL : ML_F32;
    ml_ref sources[3] = {graph_input(g, dtype, "b2 s4"), 0, 0};
    if (ml_ops[op].sources > 1) sources[1] = graph_input(g, dtype, "s4");
    return ml_graph_add(g, op, sources, ml_ops[op].sources, NULL, 0, NULL);
}

static ml_ref sample_leaf(ml_graph *g, ml_op op) {
    ml_type type = graph_axes(g, ML_F32, "b2 s4");
    switch (op) {
    case ML_OP_CONST: return ml_const(g, ML_F32, 2.5);
    case ML_OP_IOTA: return ml_iota(g, graph_axis(g, "s"), 4);
    case ML_OP_STATE: {
        int64_t id = ml_graph_add_state(g, &(ml_state){.name = "w", .type = type});
        return ml_graph_add(g, op, NULL, 0, &id, 1, NULL);
    }
    case ML_OP_INPUT: return graph_input(g, ML_F32, "b2 s4");
    case ML_OP_COORDINATE: return ml_graph_add(g, op, NULL, 0, (int64_t[]){0, 2}, 2, NULL);
    default: return ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){0}, 1, &type);
    }
}

/* Over two ranks. */
static ml_ref sample_collective(ml_graph *g, ml_op op) {
    ml_ref x = graph_input(g, ML_F32, "b2 s4");
    bool combines = ml_collectives[ml_collective_of(op)].combines;
    return ml_graph_add(g, op, &x, 1, (int64_t[]){0, 2, ML_COMBINE_SUM}, combines ? 3 : 2, NULL);
}

static ml_ref sample_move(ml_graph *g, ml_op op) {
    ml_ref x = graph_input(g, ML_F32, "b2 s4");
    ml_axis b = graph_axis(g, "b"), s = graph_axis(g, "s"), n = graph_axis(g, "n");
    ml_type wide = graph_axes(g, ML_F32, "n3 b2 s4"), turned = graph_axes(g, ML_F32, "s4 b2");
    switch (op) {
    case ML_OP_BROADCAST: return ml_broadcast(g, x, &wide);
    case ML_OP_RENAME: return ml_rename(g, x, b, n);
    case ML_OP_PERMUTE: return ml_permute(g, x, &turned);
    case ML_OP_SLICE: return ml_slice(g, x, s, 1, 3);
    case ML_OP_PAD: return ml_pad(g, x, s, 1, 2);
    case ML_OP_SPLIT: return ml_split(g, x, s, n, 2, graph_axis(g, "m"), 2);
    case ML_OP_MERGE: return ml_merge(g, x, b, s, n);
    case ML_OP_CONCAT: return ml_concat(g, (ml_ref[]){x, graph_input(g, ML_BF16, "s3 b2")}, 2, s);
    case ML_OP_GATHER: return ml_gather(g, x, graph_input(g, ML_I32, "n3 b2"), s);
    case ML_OP_PLACE: {
        int64_t args[] = {graph_axis(g, "mesh"), s, graph_axis(g, "other_mesh"), 0};
        return ml_graph_add(g, op, &x, 1, args, 4, NULL);
    }
    case ML_OP_OUT: return ml_out(g, graph_sample(g, ML_OP_TOP_K), 1);
    default: {
        ml_type table = graph_axes(g, ML_F32, "v9 d8");
        return ml_scatter_add(g, graph_input(g, ML_I32, "b2 s4"),
                              graph_input(g, ML_F32, "b2 s4 d8"), graph_axis(g, "v"), &table);
    }
    }
}

static ml_ref sample_attention(ml_graph *g, ml_op op) {
    graph_qkv a = graph_attention(g, ML_F32, 2);
    ml_ref bias = graph_input(g, ML_F32, "h4");
    a.args.score = graph_score(g, &a, bias);
    ml_ref o = ml_attention(g, (ml_ref[]){a.q, a.k, a.v, bias}, 4, &a.args);
    if (op == ML_OP_ATTENTION) return o;
    ml_type type;
    ml_attention_score_type(g, a.q, a.k, &a.args, &type);
    a.args.derivative = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){2}, 1, &type);
    ml_ref sources[] = {a.q, a.k, a.v, o, ml_out(g, o, 1), graph_input(g, ML_F32, "b2 s5 h4 d8"),
                        bias};
    return ml_attention_grad(g, sources, 7, &a.args);
}

static ml_ref sample_cached_attention(ml_graph *g) {
    ml_ref sources[] = {graph_input(g, ML_F32, "r2 s3 h4 d8"), graph_input(g, ML_BF16, "p8 kv2 d8"),
                        graph_input(g, ML_BF16, "p8 kv2 d5"),  graph_input(g, ML_I32, "r2 c3"),
                        graph_input(g, ML_I32, "r2"),          graph_input(g, ML_I32, "r2"),
                        graph_input(g, ML_F32, "h4")};
    ml_cached_attention_args args = {.seq = graph_axis(g, "s"),
                                     .pool = graph_axis(g, "p"),
                                     .columns = graph_axis(g, "c"),
                                     .heads = graph_axis(g, "h"),
                                     .kv_heads = graph_axis(g, "kv"),
                                     .head_dim = graph_axis(g, "d"),
                                     .kv_seq = graph_axis(g, "t"),
                                     .keys = 6,
                                     .causal = true,
                                     .block = 2,
                                     .scale = 0.5};
    ml_type score;
    ml_cached_attention_score_type(g, sources, &args, &score);
    ml_ref s = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){0}, 1, &score);
    ml_ref bias = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){1}, 1,
                               ml_graph_type(g, sources[CACHED_CAPTURED]));
    args.score = ml_map2(g, ML_OP_ADD, s, bias);
    return ml_cached_attention(g, sources, CACHED_CAPTURED + 1, &args);
}

static ml_ref sample_ragged(ml_graph *g, ml_op op) {
    ml_ref x = graph_input(g, ML_F32, "r6 d3"), starts = graph_input(g, ML_I32, "e4");
    ml_ref ends = graph_input(g, ML_I32, "e4");
    ml_axis rows = graph_axis(g, "r"), reduced = graph_axis(g, "d");
    if (op == ML_OP_RAGGED_OUTER)
        return ml_ragged_outer(g, (ml_ref[]){x, graph_input(g, ML_F32, "r6 f5"), starts, ends},
                               rows, ML_F32);
    ml_ref w = graph_input(g, ML_F32, "e4 d3 f5");
    return ml_ragged_dot(g, (ml_ref[]){x, w, starts, ends}, rows, reduced, ML_F32);
}

static ml_ref sample_conv(ml_graph *g) {
    conv_window window = {graph_axis(g, "s"), graph_axis(g, "k"), 1, 1, 1, 2};
    ml_type type = graph_axes(g, ML_F32, "b2 s4");
    return ml_conv(g, graph_input(g, ML_F32, "b2 s4"), graph_input(g, ML_F32, "k3"), &window, 1,
                   &type);
}

/* h = h * x + w at each position; y = h. */
static ml_ref sample_recurrence(ml_graph *g) {
    ml_ref x = graph_input(g, ML_F32, "b2 s4"), h = graph_input(g, ML_F32, "b2");
    ml_type state = *ml_graph_type(g, h);
    ml_recurrence_pair in = {ml_recurrence_parameter(g, &state), x};
    ml_recurrence_pair carried = {ml_recurrence_parameter(g, &state), h};
    ml_ref next = ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MUL, carried.parameter, in.parameter),
                          graph_input(g, ML_F32, ""));
    ml_recurrence_step step = {.axis = graph_axis(g, "s"),
                               .length = 4,
                               .inputs = &in,
                               .input_count = 1,
                               .states = &carried,
                               .state_count = 1,
                               .next = &next,
                               .stacked = &next,
                               .stacked_count = 1};
    return ml_recurrence_new(g, &step);
}

/* A decay for each key, and a correction of rank 1. */
static ml_ref sample_linear_scan(ml_graph *g, ml_op op) {
    ml_ref k = graph_input(g, ML_F32, "b2 s4 k3"), u = graph_input(g, ML_F32, "s4 k3");
    ml_ref sources[] = {graph_input(g, ML_F32, "b2 s4 k3"),
                        k,
                        graph_input(g, ML_F32, "s4 b2 v5"),
                        graph_input(g, ML_F32, "s4 b2 k3"),
                        graph_input(g, ML_F32, "b2 k3 v5"),
                        u,
                        k,
                        graph_input(g, ML_F32, "s4 b2 v5"),
                        graph_input(g, ML_F32, "b2 k3 v5")};
    ml_linear_scan scan = {.axis = graph_axis(g, "s"),
                           .keys = graph_axis(g, "k"),
                           .values = graph_axis(g, "v"),
                           .after = true,
                           .dtype = ML_F32,
                           .rank = 1};
    return op == ML_OP_LINEAR_SCAN ? ml_linear_scan_new(g, sources, &scan)
                                   : ml_linear_scan_grad(g, sources, &scan);
}

ml_ref graph_sample(ml_graph *g, ml_op op) {
    ml_ref x;
    ml_axis s = graph_axis(g, "s");
    ml_type type = graph_axes(g, ML_F32, "b2 s4");
    switch (op) {
    case ML_OP_WHERE:
        return ml_where(g, graph_input(g, ML_BOOL, "s4"), graph_input(g, ML_F32, "b2 s4"),
                        graph_input(g, ML_BF16, ""));
    case ML_OP_CAST: return ml_cast(g, graph_input(g, ML_F32, "b2 s4"), ML_BF16);
    case ML_OP_RANDOM:
        x = graph_input(g, ML_I64, "");
        return ml_graph_add(g, op, &x, 1, NULL, 0, &type);
    case ML_OP_ARGMAX: return ml_reduce(g, op, graph_input(g, ML_F32, "b2 s4"), &s, 1);
    case ML_OP_DOT:
        return ml_dot(g, graph_input(g, ML_F32, "b2 s4"), graph_input(g, ML_F32, "s4 n3"), &s, 1,
                      ML_F32);
    case ML_OP_CUMSUM:
    case ML_OP_SORT:
        x = graph_input(g, ML_F32, "b2 s4");
        return ml_graph_add(g, op, &x, 1, (int64_t[]){s, 1}, 2, NULL);
    case ML_OP_TOP_K:
        x = graph_input(g, ML_F32, "b2 s4");
        return ml_graph_add(g, op, &x, 1, (int64_t[]){s, 3, graph_axis(g, "k")}, 3, NULL);
    case ML_OP_RAGGED_DOT:
    case ML_OP_RAGGED_OUTER: return sample_ragged(g, op);
    case ML_OP_CONV: return sample_conv(g);
    case ML_OP_ATTENTION:
    case ML_OP_ATTENTION_GRAD: return sample_attention(g, op);
    case ML_OP_WRITE_ROWS:
        return ml_write_rows(g, graph_input(g, ML_F32, "b2 s4"), graph_input(g, ML_I32, "n3"),
                             graph_input(g, ML_F32, "n3 b2"), s);
    case ML_OP_CACHED_ATTENTION: return sample_cached_attention(g);
    case ML_OP_LINEAR_SCAN:
    case ML_OP_LINEAR_SCAN_GRAD: return sample_linear_scan(g, op);
    case ML_OP_RECURRENCE: return sample_recurrence(g);
    default: break;
    }
    switch (ml_ops[op].op_class) {
    case ML_CLASS_LEAF: return sample_leaf(g, op);
    case ML_CLASS_MAP: return sample_map(g, op);
    case ML_CLASS_COLLECTIVE: return sample_collective(g, op);
    case ML_CLASS_REDUCE: return ml_reduce(g, op, graph_input(g, ML_F32, "b2 s4"), &s, 1);
    default: return sample_move(g, op);
    }
}
