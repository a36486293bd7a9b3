/* Movements, reductions, scans, contractions and routines on the CPU device, forward and backward,
 * over shapes that cross the kernels' tiles. */
#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "tests/ops/support.h"

static ml_dtype dtype; /* of the running test */

static ml_ref x_of(ops_case *c, const char *axes) {
    return ops_input(c, dtype, axes, -2, 2);
}
static bool is_float(void) {
    return ml_dtypes[dtype].kind == ML_KIND_FLOAT;
}

/* y itself, y where a kernel consumes it, and the gradients of what it was made from. */
static void check(ops_case *c, ml_ref y, const ml_ref *wrt, int count, double slack,
                  const char *label) {
    double tolerance = slack * ops_tolerance(dtype);
    ops_output(c, y, tolerance, "%s", label);
    if (ml_dtypes[ml_graph_type(c->g, y)->dtype].kind != ML_KIND_FLOAT) return;
    ops_output(c, ml_map1(c->g, ML_OP_NEG, y), tolerance, "-%s", label);
    if (is_float() && count > 0) ops_gradients(c, y, wrt, count, 4 * tolerance, label);
}

static void build_moves(ops_case *c) {
    ml_graph *g = c->g;
    ml_axis b = ops_axis(c, "b"), s = ops_axis(c, "s"), d = ops_axis(c, "d"), h = ops_axis(c, "h"),
            e = ops_axis(c, "e"), m = ops_axis(c, "m");
    ml_ref x = x_of(c, "b3 s6 d8"), small = x_of(c, "s6 d8"), part = x_of(c, "d8 s2 b3");
    ml_type turned = ops_type(c, dtype, "d8 b3 s6"), wide = ops_type(c, dtype, "s6 b3 d8");
    check(c, ml_broadcast(g, small, &wide), &small, 1, 1, "broadcast");
    check(c, ml_permute(g, x, &turned), &x, 1, 1, "permute");
    check(c, ml_rename(g, x, s, e), &x, 1, 1, "rename");
    check(c, ml_slice(g, x, s, 1, 4), &x, 1, 1, "slice");
    check(c, ml_slice(g, ml_slice(g, x, d, 2, 8), b, 1, 2), &x, 1, 1, "slices");
    check(c, ml_pad(g, x, s, 2, 3), &x, 1, 1, "pad");
    check(c, ml_pad(g, ml_pad(g, small, d, 1, 0), s, 0, 1), &small, 1, 1, "pads");
    check(c, ml_split(g, x, d, h, 2, e, 4), &x, 1, 1, "split");
    check(c, ml_merge(g, x, s, d, m), &x, 1, 1, "merge");
    check(c, ml_merge(g, x, d, b, m), &x, 1, 1, "merge of far axes");
    check(c, ml_merge(g, ml_slice(g, x, s, 1, 3), s, d, m), &x, 1, 1, "merge of a slice");
    ml_ref halves = ml_split(g, x, s, h, 3, s, 2);
    check(c, ml_merge(g, halves, s, h, m), &x, 1, 1, "split and merge the other way");
    ml_ref parts[3] = {x, part, ml_map1(g, ML_OP_NEG, x)};
    check(c, ml_concat(g, parts, 3, s), parts, 2, 1, "concat");
    ml_ref twice[2] = {x, x};
    check(c, ml_concat(g, twice, 2, d), &x, 1, 1, "concat of the same");
    ml_ref pieces[2] = {ml_slice(g, x, d, 4, 8), ml_slice(g, x, d, 0, 4)};
    ml_ref rotated = ml_concat(g, pieces, 2, d);
    check(c, ml_map2(g, ML_OP_ADD, rotated, x), &x, 1, 1, "rotate half");
}

static void build_reductions(ops_case *c) {
    static const char *const kept[] = {"d", "s", "b", "b d", "s d", "b s", ""};
    ml_ref x = x_of(c, "b3 s37 d20");
    ml_op ops[] = {ML_OP_SUM, ML_OP_MAX, ML_OP_MIN};
    for (int i = 0; i < 7; i++) {
        ml_axis axes[3];
        int count = 0;
        for (const char *name = "bsd"; *name; name++) {
            char text[2] = {*name, 0};
            if (strstr(kept[i], text) == NULL) axes[count++] = ops_axis(c, text);
        }
        for (int o = 0; o < 3; o++) {
            ml_ref y = ml_reduce(c->g, ops[o], x, axes, count);
            double tolerance = o == 0 ? 4 * ops_tolerance(dtype) : 0;
            ops_output(c, y, tolerance, "%s to [%s]", ml_ops[ops[o]].name, kept[i]);
            if (is_float() && i % 3 == o) {
                ops_gradients(c, y, &x, 1, 4 * ops_tolerance(dtype), ml_ops[ops[o]].name);
            }
        }
        if (count != 1) continue;
        ops_output(c, ml_reduce(c->g, ML_OP_ARGMAX, x, axes, 1), 0, "argmax to [%s]", kept[i]);
    }
}

static void build_scans(ops_case *c) {
    ml_ref x = x_of(c, "b5 s70 d3"), y;
    ml_axis axes[] = {ops_axis(c, "s"), ops_axis(c, "d"), ops_axis(c, "b")};
    for (int i = 0; i < 3; i++) {
        for (int flag = 0; flag < 2; flag++) {
            int64_t args[3] = {axes[i], flag, 0};
            y = ml_graph_add(c->g, ML_OP_CUMSUM, &x, 1, args, 2, NULL);
            check(c, y, &x, 1, 4, "cumsum");
            y = ml_graph_add(c->g, ML_OP_SORT, &x, 1, args, 2, NULL);
            ops_output(c, ml_out(c->g, y, 1), 0, "indices of sort %d %d", i, flag);
            check(c, y, &x, 1, 1, "sort");
        }
        int64_t args[3] = {axes[i], 2, ops_axis(c, "k")};
        y = ml_graph_add(c->g, ML_OP_TOP_K, &x, 1, args, 3, NULL);
        ops_output(c, ml_out(c->g, y, 1), 0, "indices of top_k %d", i);
        check(c, y, &x, 1, 1, "top_k");
    }
}

static void build_gathers(ops_case *c) {
    ml_axis v = ops_axis(c, "v"), s = ops_axis(c, "s");
    struct {
        const char *table, *index;
        int bound;
        ml_axis axis;
    } cases[] = {{"v50 d24", "b3 s17", 50, v},
                 {"b3 v9 d4", "s7 b3", 9, v},
                 {"d6 v11", "s13", 11, v},
                 {"b4 s9", "b4 s5", 9, s},
                 {"b3 s4 v31", "b3 s4", 31, v}};
    for (int i = 0; i < 5; i++) {
        ml_ref table = x_of(c, cases[i].table),
               index = ops_index(c, cases[i].index, cases[i].bound);
        check(c, ml_gather(c->g, table, index, cases[i].axis), &table, 1, 2, "gather");
    }
    ml_type type = ops_type(c, dtype, "v50 d24"), rows = ops_type(c, dtype, "b3 v5");
    ml_ref value = x_of(c, "b3 s17 d24"), row = x_of(c, "b3 s17");
    ml_ref y = ml_scatter_add(c->g, ops_index(c, "b3 s17", 50), value, v, &type);
    check(c, y, &value, 1, 4, "scatter_add");
    y = ml_scatter_add(c->g, ops_index(c, "s17 b3", 5), row, v, &rows);
    check(c, y, &row, 1, 4, "scatter_add by rows");
    ml_type hot_type = ops_type(c, ML_I32, "b3 s4 v31");
    ml_ref index = ml_broadcast(c->g, ops_index(c, "b3 s4", 31), &hot_type);
    ml_ref hot = ml_map2(c->g, ML_OP_EQ, ml_iota(c->g, v, 31), index);
    ops_output(c, ml_cast(c->g, hot, dtype), 0, "one hot");
}

static void build_dots(ops_case *c) {
    static const struct {
        const char *a, *b, *over;
    } cases[] = {
        {"b2 s33 d48", "d48 h40", "d"},
        {"b2 s9 h3 d16", "b2 t11 h3 d16", "d"},
        {"b2 h3 s9 t11", "b2 t11 h3 d16", "t"},
        {"s20 h3 d8", "h3 d8 e17", "h d"},
        {"s20 d8", "d8", "d"},
        {"d8", "d8", "d"},
        {"s20 d8", "d8 s20", "s d"},
        {"b4 s3 d5", "e6 d5", "d"},
        {"s5", "d7", ""},
        {"s5 b3", "b3 d7", ""},
        {"d40 s70", "s70 e3", "s"},
        {"a2 b3 c2 s5 d4", "c2 d4 a2 e6 b3", "d"},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        ml_type over = {0};
        char name[2] = {0};
        for (const char *at = cases[i].over; *at; at++) {
            if (*at == ' ') continue;
            name[0] = *at;
            over.axis[over.rank++] = ops_axis(c, name);
        }
        ml_ref wrt[2] = {x_of(c, cases[i].a), x_of(c, cases[i].b)};
        ml_dtype out = ml_is_narrow(dtype) && i % 2 ? ML_F32 : dtype;
        ml_ref y = ml_dot(c->g, wrt[0], wrt[1], over.axis, over.rank, out);
        check(c, y, wrt, 2, 4, cases[i].a);
    }
}

static void run_dtypes(ops_body *body, const ml_dtype *dtypes, int count, uint64_t seed) {
    for (int i = 0; i < count; i++) {
        dtype = dtypes[i];
        ops_run(body, seed + (uint64_t)i, dtype == ML_F32 ? OPS_UNFUSED : 0);
    }
}

static const ml_dtype all[] = {ML_F32, ML_BF16, ML_F16, ML_I32, ML_F64, ML_I64};

OPS_TEST(moves) {
    run_dtypes(build_moves, all, 5, 100);
}
OPS_TEST(reductions) {
    run_dtypes(build_reductions, all, 6, 110);
}
OPS_TEST(scans) {
    run_dtypes(build_scans, all, 5, 120);
}
OPS_TEST(gathers) {
    run_dtypes(build_gathers, all, 3, 130);
}
OPS_TEST(dots) {
    run_dtypes(build_dots, (ml_dtype[]){ML_F32, ML_F64, ML_BF16, ML_I32, ML_F16}, 5, 140);
}

/* ---- attention ---- */
typedef struct {
    const char *q, *k;
    bool causal;
    int64_t window;
    bool score;
} attention_case;

static ml_ref softcap(ops_case *c, ml_ref q, ml_ref k, const ml_attention_args *args) {
    ml_type type;
    int64_t index = 0;
    ml_attention_score_type(c->g, q, k, args, &type);
    ml_ref s = ml_graph_add(c->g, ML_OP_PARAM, NULL, 0, &index, 1, &type);
    ml_ref cap = ml_const(c->g, type.dtype, 3);
    return ml_map2(c->g, ML_OP_MUL, cap,
                   ml_map1(c->g, ML_OP_TANH, ml_map2(c->g, ML_OP_DIV, s, cap)));
}

static void build_attention(ops_case *c) {
    static const attention_case cases[] = {
        {"b2 s70 h3 d16", "b2 t70 h3 d16", true, 0, false},
        {"b2 h4 s33 d8", "t45 b2 j2 d8", true, 0, false},
        {"s20 h2 d8", "t50 h2 d8", false, 0, false},
        {"b2 s70 h2 d24", "b2 t70 h2 d24", true, 13, false},
        {"b1 s40 h2 d16", "b1 t40 h2 d16", true, 0, true},
    };
    for (int i = 0; i < 5; i++) {
        const attention_case *at = &cases[i];
        bool grouped = strchr(at->k, 'j') != NULL;
        ml_ref x[3] = {x_of(c, at->q), x_of(c, at->k), x_of(c, at->k)};
        ml_attention_args args = {.seq = ops_axis(c, "s"),
                                  .kv_seq = ops_axis(c, "t"),
                                  .heads = ops_axis(c, "h"),
                                  .kv_heads = ops_axis(c, grouped ? "j" : "h"),
                                  .head_dim = ops_axis(c, "d"),
                                  .causal = at->causal,
                                  .window = at->window,
                                  .scale = 0.3};
        if (at->score) args.score = softcap(c, x[0], x[1], &args);
        ml_ref o = ml_attention(c->g, x, 3, &args);
        ops_output(c, o, 4 * ops_tolerance(dtype), "attention %d", i);
        ops_output(c, ml_out(c->g, o, 1), 4 * ops_tolerance(dtype), "logsumexp %d", i);
        ops_gradients(c, o, x, 3, 20 * ops_tolerance(dtype), "attention");
    }
}

static void run_attention(ops_case *c) { /* the template: nothing is short enough to decompose */
    ml_session_device(c->session)->target.longest_materialized = 0;
    build_attention(c);
}

static void run_materialized(ops_case *c) {
    ml_session_device(c->session)->target.longest_materialized = 1000;
    build_attention(c);
}

OPS_TEST(attention) {
    run_dtypes(run_attention, (ml_dtype[]){ML_F32, ML_F64, ML_BF16, ML_F16}, 4, 150);
}
OPS_TEST(attention_decomposed) {
    run_dtypes(run_materialized, all, 1, 160);
}
