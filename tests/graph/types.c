/* The type of every op, by the dtype rules of ops.def and by examples. */
#include <stdio.h>
#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "tests/graph/support.h"

/* Of graph_sample's node, where it is not elementwise. */
static const char *const EXPECTED[ML_OP_COUNT] = {
    [ML_OP_CONST] = "f32",
    [ML_OP_IOTA] = "i32[s=4]",
    [ML_OP_STATE] = "f32[b=2, s=4]",
    [ML_OP_INPUT] = "f32[b=2, s=4]",
    [ML_OP_PARAM] = "f32[b=2, s=4]",
    [ML_OP_BROADCAST] = "f32[n=3, b=2, s=4]",
    [ML_OP_RENAME] = "f32[n=2, s=4]",
    [ML_OP_PERMUTE] = "f32[s=4, b=2]",
    [ML_OP_SLICE] = "f32[b=2, s=2]",
    [ML_OP_PAD] = "f32[b=2, s=7]",
    [ML_OP_SPLIT] = "f32[b=2, n=2, m=2]",
    [ML_OP_MERGE] = "f32[n=8]",
    [ML_OP_CONCAT] = "f32[b=2, s=7]",
    [ML_OP_GATHER] = "f32[n=3, b=2]",
    [ML_OP_SUM] = "f32[b=2]",
    [ML_OP_MAX] = "f32[b=2]",
    [ML_OP_MIN] = "f32[b=2]",
    [ML_OP_ARGMAX] = "i32[b=2]",
    [ML_OP_CUMSUM] = "f32[b=2, s=4]",
    [ML_OP_SORT] = "f32[b=2, s=4]",
    [ML_OP_TOP_K] = "f32[b=2, k=3]",
    [ML_OP_DOT] = "f32[b=2, n=3]",
    [ML_OP_RAGGED_DOT] = "f32[r=6, f=5]",
    [ML_OP_RAGGED_OUTER] = "f32[e=4, d=3, f=5]",
    [ML_OP_CONV] = "f32[b=2, s=4]",
    [ML_OP_SCATTER_ADD] = "f32[v=9, d=8]",
    [ML_OP_ATTENTION] = "f32[b=2, s=5, h=4, d=8]",
    [ML_OP_WRITE_ROWS] = "f32[b=2, s=4]",
    [ML_OP_CACHED_ATTENTION] = "f32[r=2, s=3, h=4, d=5]",
    [ML_OP_ATTENTION_GRAD] = "f32[b=2, s=5, h=4, d=8]",
    [ML_OP_OUT] = "i32[b=2, k=3]",
    [ML_OP_RECURRENCE] = "f32[s=4, b=2]",
    [ML_OP_LINEAR_SCAN] = "f32[s=4, b=2, v=5]",
    [ML_OP_LINEAR_SCAN_GRAD] = "f32[s=4, b=2, k=3]",
    [ML_OP_CAST] = "bf16[b=2, s=4]",
    [ML_OP_COORDINATE] = "i32",
    [ML_OP_ALL_GATHER] = "f32[b=4, s=4]",
    [ML_OP_REDUCE_SCATTER] = "f32[b=1, s=4]",
};

static void every_op(ml_graph *g) {
    for (int op = 0; op < ML_OP_COUNT; op++) {
        ml_ref n = graph_sample(g, op);
        const char *expected = EXPECTED[op];
        if (!expected)
            expected = ml_ops[op].rule == ML_RULE_TEST || ml_ops[op].rule == ML_RULE_LOGIC
                           ? "bool[b=2, s=4]"
                           : "f32[b=2, s=4]";
        EXPECT(ml_graph_node(g, n)->op == op, "the sample of %s is none", ml_ops[op].name);
        EXPECT(CHECK_TEXT(graph_type_text(g, n), expected), "of %s", ml_ops[op].name);
    }
    ml_graph_verify(g, NULL, "building");
}
TEST(graph_types, every_op) {
    graph_run(every_op);
}

typedef struct {
    ml_graph *g;
    ml_op op;
    ml_ref sources[3];
    ml_ref result;
} attempt;

static void try_add(void *argument) {
    attempt *a = argument;
    a->result = ml_graph_add(a->g, a->op, a->sources, ml_ops[a->op].sources, NULL, 0, NULL);
}

/* The dtype that a row of ops.def promises for operands of two dtypes; -1: an error. */
static int promised(ml_op op, ml_dtype a, ml_dtype b) {
    ml_dtype_kind kind = ml_dtypes[a].kind, other = ml_dtypes[b].kind;
    bool floats = kind == ML_KIND_FLOAT && other == ML_KIND_FLOAT;
    bool one_dtype = a == b || floats;
    int wider = a > b ? a : b;
    if (floats && a != b && a < ML_F32 && b < ML_F32)
        wider = ML_F32; /* of i8, e4m3, bf16, f16 none is the other's */
    switch (ml_ops[op].rule) {
    case ML_RULE_ARITH: return one_dtype && kind != ML_KIND_BOOL ? wider : -1;
    case ML_RULE_FLOAT: return floats ? wider : -1;
    case ML_RULE_TEST:
        if (op == ML_OP_IS_FINITE) return floats ? ML_BOOL : -1;
        if (kind == ML_KIND_BOOL && op != ML_OP_EQ && op != ML_OP_NE) return -1;
        return one_dtype ? ML_BOOL : -1;
    case ML_RULE_LOGIC: return kind == ML_KIND_BOOL && other == ML_KIND_BOOL ? ML_BOOL : -1;
    default: return a;
    }
}

static void dtype_rules(ml_graph *g) {
    for (int op = 0; op < ML_OP_COUNT; op++) {
        const ml_op_info *info = &ml_ops[op];
        if (info->op_class != ML_CLASS_MAP || info->rule == ML_RULE_OWN) continue;
        for (int left = 0; left < ML_DTYPE_COUNT; left++)
            for (int right = 0; right < ML_DTYPE_COUNT; right++) {
                if (info->sources == 1 && right != left) continue;
                attempt a = {g, op, {graph_input(g, left, "b2"), graph_input(g, right, "b2")}, 0};
                ml_status status = ml_protect(try_add, &a);
                int expected = promised(op, left, right);
                int actual = status == ML_OK ? ml_graph_type(g, a.result)->dtype : -1;
                EXPECT(!(actual != expected || (status != ML_OK && status != ML_INVALID)),
                       "%s of %s and %s gives %d, not %d", info->name, ml_dtypes[left].name,
                       ml_dtypes[right].name, actual, expected);
                if (status != ML_OK) CHECK_EQ_INT(ml_error_last()->operand_count, info->sources);
            }
    }
}
TEST(graph_types, dtype_rules) {
    graph_run(dtype_rules);
}

/* "f32[...]" of a op b */
static const char *added(ml_graph *g, const char *a, const char *b) {
    return graph_type_text(
        g, ml_map2(g, ML_OP_ADD, graph_input(g, ML_F32, a), graph_input(g, ML_F32, b)));
}

static void broadcasting(ml_graph *g) {
    CHECK_TEXT(added(g, "b2 s4", "b2 s4"), "f32[b=2, s=4]");
    CHECK_TEXT(added(g, "b2 s4", "s4 b2"), "f32[b=2, s=4]");
    CHECK_TEXT(added(g, "s4", "b2 s4"), "f32[b=2, s=4]");
    CHECK_TEXT(added(g, "b2 s4 d3", "s4"), "f32[b=2, s=4, d=3]");
    CHECK_TEXT(added(g, "", "b2"), "f32[b=2]");
    CHECK_TEXT(added(g, "", ""), "f32");
    ml_ref where = ml_where(g, graph_input(g, ML_BOOL, "b2 s4"), graph_input(g, ML_I32, ""),
                            graph_input(g, ML_I32, "s4"));
    CHECK_TEXT(graph_type_text(g, where), "i32[b=2, s=4]");
}
TEST(graph_types, broadcasting) {
    graph_run(broadcasting);
}

static const char *dotted(ml_graph *g, const char *a, const char *b, const char *names,
                          ml_dtype dtype) {
    ml_axis axes[4];
    int count = 0, used;
    for (char name[32]; sscanf(names, " %31[a-z]%n", name, &used) == 1; names += used)
        axes[count++] = graph_axis(g, name);
    return graph_type_text(
        g, ml_dot(g, graph_input(g, ML_BF16, a), graph_input(g, ML_BF16, b), axes, count, dtype));
}

static void dot_order(ml_graph *g) {
    CHECK_TEXT(dotted(g, "b2 s4 e8", "e8 h2 d4", "e", ML_BF16), "bf16[b=2, s=4, h=2, d=4]");
    CHECK_TEXT(dotted(g, "b2 s4 h3 d5", "d5 h3 b2 t7", "d", ML_F32), "f32[b=2, h=3, s=4, t=7]");
    CHECK_TEXT(dotted(g, "b2 h3 d5", "h3 d5 e8", "d h", ML_BF16), "bf16[b=2, e=8]");
    CHECK_TEXT(dotted(g, "e8", "e8", "e", ML_F32), "f32");
    CHECK_TEXT(dotted(g, "m2", "n3", "", ML_F32), "f32[m=2, n=3]");
    ml_ref mixed = ml_graph_add(
        g, ML_OP_DOT, (ml_ref[]){graph_input(g, ML_BF16, "b2 e8"), graph_input(g, ML_F32, "e8")}, 2,
        (int64_t[]){graph_axis(g, "e")}, 1, NULL);
    CHECK_TEXT(graph_type_text(g, mixed), "f32[b=2]");
    CHECK_EQ_INT(ml_graph_node(g, ml_graph_source(g, mixed, 0))->op, ML_OP_CAST);
}
TEST(graph_types, dot_order) {
    graph_run(dot_order);
}

static void movements(ml_graph *g) {
    ml_ref table = graph_input(g, ML_BF16, "v9 b2 d8");
    ml_ref index = graph_input(g, ML_I32, "b2 s4");
    ml_axis v = graph_axis(g, "v"), b = graph_axis(g, "b"), d = graph_axis(g, "d");
    ml_ref rows = ml_gather(g, table, index, v);
    CHECK_TEXT(graph_type_text(g, rows), "bf16[b=2, s=4, d=8]");
    /* an index over the gathered axis itself, as take_along_axis has it */
    CHECK_TEXT(graph_type_text(g, ml_gather(g, table, graph_input(g, ML_I32, "v3 b2"), v)),
               "bf16[v=3, b=2, d=8]");
    CHECK_TEXT(graph_type_text(g, ml_split(g, table, v, v, 3, graph_axis(g, "w"), 3)),
               "bf16[v=3, w=3, b=2, d=8]");
    CHECK_TEXT(graph_type_text(g, ml_merge(g, table, d, v, v)), "bf16[b=2, v=72]");
    CHECK_TEXT(graph_type_text(g, ml_merge(g, table, v, d, graph_axis(g, "vd"))),
               "bf16[vd=72, b=2]");
    ml_ref swapped = ml_graph_add(g, ML_OP_RENAME, &table, 1, (int64_t[]){v, b, b, v}, 4, NULL);
    CHECK_TEXT(graph_type_text(g, swapped), "bf16[b=9, v=2, d=8]");
    ml_type result = graph_axes(g, ML_F32, "b2 v9 d8");
    CHECK_TEXT(graph_type_text(g, ml_scatter_add(g, index, rows, v, &result)),
               "f32[b=2, v=9, d=8]");
    ml_graph_verify(g, NULL, "building");
}
TEST(graph_types, movements) {
    graph_run(movements);
}

static void attention(ml_graph *g) {
    graph_qkv a = graph_attention(g, ML_BF16, 2);
    a.v = graph_input(g, ML_BF16, "kv2 d16 b2 t6");
    ml_ref o = ml_attention(g, (ml_ref[]){a.q, a.k, a.v}, 3, &a.args);
    CHECK_TEXT(graph_type_text(g, o), "bf16[b=2, s=5, h=4, d=16]");
    CHECK_TEXT(graph_type_text(g, ml_out(g, o, 1)), "f32[b=2, h=4, s=5]");
    ml_attention_args read;
    ml_attention_read(g, o, &read);
    CHECK(read.causal && read.scale == 0.5 && read.kv_heads == a.args.kv_heads);
    ml_ref grad =
        ml_attention_grad(g, (ml_ref[]){a.q, a.k, a.v, o, ml_out(g, o, 1), o}, 6, &a.args);
    CHECK_TEXT(graph_type_text(g, grad), graph_type_text(g, a.q));
    CHECK_TEXT(graph_type_text(g, ml_out(g, grad, 1)), graph_type_text(g, a.k));
    CHECK_TEXT(graph_type_text(g, ml_out(g, grad, 2)), graph_type_text(g, a.v));
    CHECK_EQ_INT(ml_op_outputs(g, o), 2);
    CHECK_EQ_INT(ml_op_outputs(g, grad), 3);
}
TEST(graph_types, attention) {
    graph_run(attention);
}

/* A function that ignores some axes of the scores, and one of another float dtype. */
static void score_functions(ml_graph *g) {
    graph_qkv a = graph_attention(g, ML_BF16, 4);
    ml_ref seq = ml_cast(g, ml_iota(g, a.args.seq, 5), ML_BF16);
    a.args.score = seq;
    ml_ref o = ml_attention(g, (ml_ref[]){a.q, a.k, a.v}, 3, &a.args);
    ml_attention_args read;
    ml_attention_read(g, o, &read);
    CHECK_TEXT(graph_type_text(g, read.score), "f32[b=2, h=4, s=5, t=6]");
    CHECK(ml_graph_node(g, read.score)->flags & ML_NODE_FUNCTION);
    ml_graph_verify(g, NULL, "building");
}
TEST(graph_types, score_functions) {
    graph_run(score_functions);
}
