/* Every op of the table: result type, gradient against finite differences in float64, and each
 * pass leaving its values alone. A row of ops.def without a case fails. */
#include <stdio.h>
#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "runtime/ops/cached_attention/cached_attention.h"
#include "runtime/ops/conv/conv.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/ragged/ragged.h"
#include "tests/passes/support.h"

typedef ml_ref op_build(fixture *f);
typedef struct {
    ml_op op;
    const char *expected; /* type of what `build` makes */
    op_build *build;
} op_case;

/* ---- Elementwise ops: every arrangement of operands -------------------------------------------
 */

typedef struct {
    const char *a, *b, *expected;
} arrangement;
static const arrangement arrangements[] = {
    {"b3 d4", "b3 d4", "[b=3, d=4]"},
    {"b3 d4", "d4", "[b=3, d=4]"},
    {"d4", "b3 d4", "[b=3, d=4]"},
    {"d4 b3", "b3 d4", "[d=4, b=3]"},
    {"b3 d4", "", "[b=3, d=4]"},
    {"", "s2 d3", "[s=2, d=3]"},
    {"s2 b3 d2", "d2 s2", "[s=2, b=3, d=2]"},
};
enum { ARRANGEMENTS = sizeof arrangements / sizeof *arrangements };

/* Values for which the op is smooth around every element. */
static void domain(ml_op op, int operand, double *low, double *high) {
    *low = -2, *high = 2;
    if (ml_op_is(op, operand == 0 ? ML_POSITIVE_A : ML_POSITIVE_B)) *low = 0.5;
}

static ml_ref operand(fixture *f, ml_op op, int i, const char *axes) {
    double low, high;
    domain(op, i, &low, &high);
    ml_ref x = fixture_input(f, ML_F64, axes, low, high);
    if (ml_ops[op].rule == ML_RULE_LOGIC || (op == ML_OP_WHERE && i == 0))
        return ml_map2(f->g, ML_OP_GT, x, ml_const(f->g, ML_F64, 0));
    return x;
}

static ml_op current_op;
static const arrangement *current;

static ml_ref build_map(fixture *f) {
    ml_ref sources[3];
    int count = ml_ops[current_op].sources;
    const char *axes[3] = {current->a, current->b, ""};
    for (int i = 0; i < count; i++) sources[i] = operand(f, current_op, i, axes[i]);
    ml_type type = {.dtype = ML_F64};
    return ml_graph_add(f->g, current_op, sources, count, NULL, 0, &type);
}

static void check_map(fixture *f) {
    snprintf(f->label, sizeof f->label, "%s of [%s] and [%s]", ml_ops[current_op].name, current->a,
             current->b);
    ml_ref y = build_map(f);
    ml_dtype_rule rule = ml_ops[current_op].rule;
    bool test = rule == ML_RULE_TEST || rule == ML_RULE_LOGIC;
    bool one = ml_ops[current_op].sources == 1;
    const char *axes = one ? "[b=3, d=4]" : current->expected;
    char expected[64];
    snprintf(expected, sizeof expected, "%s%s", test ? "bool" : "f64", axes);
    CHECK_TEXT(fixture_type_text(f, f->g, y), expected);
    if (current_op != ML_OP_STOP_GRADIENT) fixture_check_gradients(f, fixture_loss(f, y));
}

static bool is_plain_map(ml_op op) {
    return ml_ops[op].op_class == ML_CLASS_MAP && op != ML_OP_CAST && op != ML_OP_RANDOM;
}

TEST(passes, elementwise) {
    for (int op = 0; op < ML_OP_COUNT; op++) {
        if (!is_plain_map(op)) continue;
        current_op = op;
        int count = ml_ops[op].sources == 1 ? 1 : ARRANGEMENTS;
        for (int i = 0; i < count; i++) {
            current = &arrangements[i];
            fixture_run(check_map, (uint64_t)(op * 100 + i));
        }
    }
}

/* ---- All other ops, case by case ---------------------------------------------------------------
 */

static ml_ref x_of(fixture *f, const char *axes) {
    return fixture_input(f, ML_F64, axes, -2, 2);
}
static ml_ref add1(fixture *f, ml_op op, ml_ref a, const int64_t *args, int count) {
    return ml_graph_add(f->g, op, &a, 1, args, count, NULL);
}
#define AXIS(name) fixture_axis(f, name)
#define BUILD(name, value)                                                                         \
    static ml_ref name(fixture *f) {                                                               \
        return value;                                                                              \
    }
#define TYPE(axes) fixture_type(f, ML_F64, axes)

BUILD(build_const, ml_const(f->g, ML_F64, 2.5))
BUILD(build_iota, ml_iota(f->g, AXIS("s"), 5))
BUILD(build_state, fixture_state(f, ML_F64, "s2 d3"))
BUILD(build_input, x_of(f, "d3"))
BUILD(build_cast, ml_cast(f->g, ml_cast(f->g, x_of(f, "s2 d3"), ML_F32), ML_F64))

static ml_ref build_param(fixture *f) {
    ml_type type = TYPE("d3");
    int64_t index = 0;
    ml_ref p = ml_graph_add(f->g, ML_OP_PARAM, NULL, 0, &index, 1, &type);
    ml_ref x = x_of(f, "d3");
    return ml_graph_inline(f->g, ml_map2(f->g, ML_OP_MUL, p, p), &x, 1);
}
static ml_ref build_random(fixture *f) {
    ml_ref key = ml_const_int(f->g, ML_I64, 1234567890123456789);
    ml_type type = TYPE("s2 d3");
    return ml_graph_add(f->g, ML_OP_RANDOM, &key, 1, NULL, 0, &type);
}
static ml_ref build_broadcast(fixture *f) {
    ml_type type = TYPE("d3 s2 b2");
    ml_ref x = x_of(f, "s2 d3");
    return ml_graph_add(f->g, ML_OP_BROADCAST, &x, 1, NULL, 0, &type);
}
BUILD(build_rename, add1(f, ML_OP_RENAME, x_of(f, "s2 d3"),
                         (int64_t[]){AXIS("s"), AXIS("d"), AXIS("d"), AXIS("s")}, 4))
static ml_ref build_permute(fixture *f) {
    ml_type type = TYPE("d3 b2 s2");
    ml_ref x = x_of(f, "b2 s2 d3");
    return ml_graph_add(f->g, ML_OP_PERMUTE, &x, 1, NULL, 0, &type);
}
BUILD(build_place,
      add1(f, ML_OP_PLACE, x_of(f, "s2 d3"), (int64_t[]){AXIS("x"), AXIS("d"), AXIS("y"), 0}, 4))
BUILD(build_slice, ml_slice(f->g, x_of(f, "s5 d3"), AXIS("s"), 1, 4))
BUILD(build_pad, ml_pad(f->g, x_of(f, "s2 d3"), AXIS("s"), 1, 2))
BUILD(build_split, ml_split(f->g, x_of(f, "s6 d2"), AXIS("s"), AXIS("h"), 2, AXIS("s"), 3))
BUILD(build_merge, ml_merge(f->g, x_of(f, "h2 d2 s3"), AXIS("h"), AXIS("s"), AXIS("s")))
BUILD(build_merge_back, ml_merge(f->g, x_of(f, "h2 d2 s3"), AXIS("s"), AXIS("h"), AXIS("m")))
static ml_ref build_concat(fixture *f) {
    ml_ref parts[3] = {x_of(f, "s2 d3"), x_of(f, "d3 s1"), x_of(f, "s3 d3")};
    return ml_concat(f->g, parts, 3, AXIS("s"));
}
static ml_ref build_concat_twice(fixture *f) {
    ml_ref x = x_of(f, "s2 d3"), parts[2] = {x, x};
    return ml_concat(f->g, parts, 2, AXIS("d"));
}
BUILD(build_gather, ml_gather(f->g, x_of(f, "v5 d2"), fixture_index(f, "b2 s3", 5), AXIS("v")))
BUILD(build_gather_rows,
      ml_gather(f->g, x_of(f, "b2 v5 d2"), fixture_index(f, "s3 b2", 5), AXIS("v")))
BUILD(build_gather_own, ml_gather(f->g, x_of(f, "b2 s4"), fixture_index(f, "b2 s3", 4), AXIS("s")))
BUILD(build_pick, ml_gather(f->g, x_of(f, "b2 s3 v5"), fixture_index(f, "b2 s3", 5), AXIS("v")))
BUILD(build_sum,
      ml_reduce(f->g, ML_OP_SUM, x_of(f, "b2 s3 d2"), (ml_axis[]){AXIS("d"), AXIS("b")}, 2))
BUILD(build_max,
      ml_reduce(f->g, ML_OP_MAX, x_of(f, "b2 s3 d4"), (ml_axis[]){AXIS("s"), AXIS("d")}, 2))
BUILD(build_min, ml_reduce(f->g, ML_OP_MIN, x_of(f, "s3 d4"), (ml_axis[]){AXIS("s")}, 1))
BUILD(build_argmax, ml_reduce(f->g, ML_OP_ARGMAX, x_of(f, "b2 s5"), (ml_axis[]){AXIS("s")}, 1))
BUILD(build_cumsum, add1(f, ML_OP_CUMSUM, x_of(f, "b2 s4 d2"), (int64_t[]){AXIS("s"), 0}, 2))
BUILD(build_cumsum_back, add1(f, ML_OP_CUMSUM, x_of(f, "b2 s4"), (int64_t[]){AXIS("s"), 1}, 2))
BUILD(build_sort, add1(f, ML_OP_SORT, x_of(f, "b2 s5 d2"), (int64_t[]){AXIS("s"), 0}, 2))
BUILD(build_sort_down, add1(f, ML_OP_SORT, x_of(f, "b2 s5"), (int64_t[]){AXIS("s"), 1}, 2))
BUILD(build_top_k,
      add1(f, ML_OP_TOP_K, x_of(f, "b2 e6 d2"), (int64_t[]){AXIS("e"), 2, AXIS("k")}, 3))
BUILD(build_top_k_long,
      add1(f, ML_OP_TOP_K, x_of(f, "e600"), (int64_t[]){AXIS("e"), 2, AXIS("k")}, 3))
BUILD(build_out, ml_out(f->g, build_sort(f), 1))

static ml_ref dot(fixture *f, const char *a, const char *b, const char *over) {
    ml_ref left = x_of(f, a), right = x_of(f, b);
    ml_type axes = fixture_type(f, ML_F64, over);
    return ml_dot(f->g, left, right, axes.axis, axes.rank, ML_F64);
}
BUILD(build_dot, dot(f, "b2 s3 d4", "d4 h2", "d4"))
BUILD(build_dot_batch, dot(f, "b2 s3 h2 d2", "d2 t3 h2 b2", "d2"))
BUILD(build_dot_two, dot(f, "s3 h2 d2", "h2 d2 e3", "h2 d2"))
BUILD(build_dot_vector, dot(f, "s3 d4", "d4", "d4"))
BUILD(build_dot_all, dot(f, "s3 d4", "d4 s3", "s3 d4"))
BUILD(build_dot_tied, ({
          ml_ref x = x_of(f, "s3 d4");
          ml_dot(f->g, x, ml_rename(f->g, x, AXIS("s"), AXIS("t")), (ml_axis[]){AXIS("d")}, 1,
                 ML_F64);
      }))
static ml_ref build_scatter(fixture *f) {
    ml_type type = TYPE("v5 d2");
    return ml_scatter_add(f->g, fixture_index(f, "b2 s3", 5), x_of(f, "b2 s3 d2"), AXIS("v"),
                          &type);
}
static ml_ref build_scatter_rows(fixture *f) {
    ml_type type = TYPE("b2 v5");
    return ml_scatter_add(f->g, fixture_index(f, "s3 b2", 5), x_of(f, "b2 s3"), AXIS("v"), &type);
}
static ml_ref build_scatter_one(fixture *f) {
    ml_type type = TYPE("b2 s3 v5");
    return ml_scatter_add(f->g, fixture_index(f, "b2 s3", 5), x_of(f, "s3 b2"), AXIS("v"), &type);
}

/* Groups of 2, 0, 1 and 3 of 7 rows: one row before them, none after. */
static ml_ref bound(fixture *f, const int *values) {
    ml_ref n = fixture_index(f, "e4", 1);
    for (int i = 0; i < 4; i++) f->inputs[f->input_count - 1][i] = values[i];
    return n;
}
static ml_ref ragged(fixture *f, ml_op op, const char *a, const char *b) {
    ml_ref x = x_of(f, a), w = x_of(f, b);
    ml_ref starts = bound(f, (int[]){1, 3, 3, 4}), ends = bound(f, (int[]){3, 3, 4, 7});
    ml_ref sources[] = {x, w, starts, ends};
    if (op == ML_OP_RAGGED_OUTER) return ml_ragged_outer(f->g, sources, AXIS("r"), ML_F64);
    return ml_ragged_dot(f->g, sources, AXIS("r"), AXIS("d"), ML_F64);
}
/* Each of two batch elements with groups of its own. */
static ml_ref ragged_batch(fixture *f, ml_op op, const char *a, const char *b) {
    static const double bounds[2][8] = {{1, 3, 3, 4, 0, 0, 2, 6}, {3, 3, 4, 7, 0, 2, 6, 7}};
    ml_ref sources[4] = {x_of(f, a), x_of(f, b)};
    for (int i = 0; i < 2; i++) {
        sources[2 + i] = fixture_index(f, "b2 e4", 1);
        memcpy(f->inputs[f->input_count - 1], bounds[i], sizeof bounds[i]);
    }
    if (op == ML_OP_RAGGED_OUTER) return ml_ragged_outer(f->g, sources, AXIS("r"), ML_F64);
    return ml_ragged_dot(f->g, sources, AXIS("r"), AXIS("d"), ML_F64);
}
BUILD(build_ragged_batch, ragged_batch(f, ML_OP_RAGGED_DOT, "r7 b2 d3", "e4 d3 n2"))
BUILD(build_outer_batch, ragged_batch(f, ML_OP_RAGGED_OUTER, "b2 r7 d3", "n2 r7 b2"))
BUILD(build_ragged, ragged(f, ML_OP_RAGGED_DOT, "r7 d3", "e4 d3 n2"))
BUILD(build_ragged_turned, ragged(f, ML_OP_RAGGED_DOT, "d3 r7", "n2 e4 d3"))
BUILD(build_outer, ragged(f, ML_OP_RAGGED_OUTER, "r7 d3", "n2 r7"))

/* Windows as "axis taps up stride dilation before", of axes of a. */
static ml_ref conv(fixture *f, const char *a, const char *b, const char *out, int64_t stride,
                   int64_t dilation, int64_t before) {
    ml_type type = TYPE(out);
    bool two = strstr(a, "t") != NULL;
    conv_window w[2] = {{AXIS("s"), AXIS("k"), 1, stride, dilation, before},
                        {AXIS("t"), AXIS("l"), 1, 1, dilation, 0}};
    return ml_conv(f->g, x_of(f, a), x_of(f, b), w, two ? 2 : 1, &type);
}
BUILD(build_conv, conv(f, "b2 s4 d2", "k3 d2", "b2 s4 d2", 1, 1, 2))
BUILD(build_conv_full, conv(f, "b2 s5 d2", "d2 h3 k2", "b2 s2 h3", 2, 2, 0))
BUILD(build_conv_patches, conv(f, "s4 d2", "d2 h3 k2", "s2 h3", 2, 1, 0))
BUILD(build_conv_two, conv(f, "s3 t4 d2", "l2 d2 k2", "t3 s4 d2", 1, 1, 1))
static ml_ref build_conv_three(fixture *f) {
    ml_type type = TYPE("s2 t2 u2 h2");
    conv_window w[3] = {{AXIS("s"), AXIS("k"), 1, 1, 1, 0},
                        {AXIS("t"), AXIS("l"), 1, 2, 1, 1},
                        {AXIS("u"), AXIS("n"), 1, 1, 2, 1}};
    return ml_conv(f->g, x_of(f, "s3 t3 u3 d2"), x_of(f, "k2 l2 n2 d2 h2"), w, 3, &type);
}
BUILD(build_conv_filter, conv(f, "b2 s5 d2", "b2 s3 d2", "d2 k2", 2, 1, 1))
static ml_ref build_conv_up(fixture *f) {
    ml_type type = TYPE("b2 s5 h2");
    conv_window w = {AXIS("s"), AXIS("k"), 2, 1, -1, -1};
    return ml_conv(f->g, x_of(f, "b2 s3 d2"), x_of(f, "k3 d2 h2"), &w, 1, &type);
}

static ml_ref attention(fixture *f, const char *q, const char *k) {
    ml_ref sources[3] = {x_of(f, q), x_of(f, k), x_of(f, k)};
    bool grouped = strstr(k, "kv_heads") != NULL;
    ml_attention_args args = {.seq = AXIS("seq"),
                              .kv_seq = AXIS("kv_seq"),
                              .heads = AXIS("heads"),
                              .kv_heads = AXIS(grouped ? "kv_heads" : "heads"),
                              .head_dim = AXIS("dim"),
                              .causal = true,
                              .scale = 0.7};
    return ml_attention(f->g, sources, 3, &args);
}
BUILD(build_attention, attention(f, "b2 seq3 heads2 dim2", "b2 kv_seq3 heads2 dim2"))
BUILD(build_attention_grouped, attention(f, "seq3 heads4 dim2", "kv_seq4 kv_heads2 dim2"))
BUILD(build_attention_lse, ml_out(f->g, build_attention(f), 1))
static ml_ref build_attention_grad(fixture *f) {
    ml_ref o = build_attention(f), q = f->nodes[0], grad;
    ml_ref loss = fixture_loss(f, ml_map1(f->g, ML_OP_SIN, o));
    ml_autodiff(f->g, loss, &q, 1, &grad);
    CHECK(ml_graph_node(f->g, grad)->op == ML_OP_ATTENTION_GRAD);
    return grad;
}

/* Distinct indices into `rows`, one of which is none: 3 i + 1 modulo rows, which 3 must not divide.
 */
static ml_ref distinct_rows(fixture *f, const char *name, int64_t count, int64_t rows) {
    ml_graph *g = f->g;
    ml_ref i = ml_iota(g, AXIS(name), count), three = ml_const_int(g, ML_I32, 3);
    ml_ref at = ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MUL, i, three), ml_const_int(g, ML_I32, 1));
    at = ml_map2(g, ML_OP_MOD, at, ml_const_int(g, ML_I32, rows));
    ml_ref none = ml_map2(g, ML_OP_EQ, i, ml_const_int(g, ML_I32, 1));
    return ml_where(g, none, ml_const_int(g, ML_I32, -1), at);
}
BUILD(build_write_rows, ml_write_rows(f->g, x_of(f, "p5 d3"), distinct_rows(f, "s", 3, 5),
                                      x_of(f, "s3 d3"), AXIS("p")))
BUILD(build_write_inner, ml_write_rows(f->g, x_of(f, "b2 p5 d2"), distinct_rows(f, "s", 4, 5),
                                       x_of(f, "d2 s4 b2"), AXIS("p")))

/* Positions and lengths for a table of 2 x 2 positions; the second row has a key only. */
static ml_ref cached_attention(fixture *f, const char *k, const char *v, int64_t window) {
    ml_graph *g = f->g;
    ml_ref iota = ml_iota(g, AXIS("r"), 2), three = ml_const_int(g, ML_I32, 3);
    ml_ref sources[] = {
        x_of(f, "r2 seq2 heads4 dim2"),
        x_of(f, k),
        x_of(f, v),
        fixture_index(f, "r2 columns2", 3),
        ml_map2(g, ML_OP_SUB, three, ml_map2(g, ML_OP_MUL, iota, three)),
        ml_map2(g, ML_OP_SUB, ml_const_int(g, ML_I32, window ? 5 : 4),
                ml_map2(g, ML_OP_MUL, iota, three)),
        x_of(f, "heads4"),
    };
    bool grouped = strstr(k, "kv_heads") != NULL;
    ml_cached_attention_args args = {.seq = AXIS("seq"),
                                     .pool = AXIS("pool"),
                                     .columns = AXIS("columns"),
                                     .heads = AXIS("heads"),
                                     .kv_heads = grouped ? AXIS("kv_heads") : 0,
                                     .head_dim = AXIS("dim"),
                                     .kv_seq = AXIS("kv_seq"),
                                     .keys = 7,
                                     .causal = true,
                                     .window = window,
                                     .block = 2,
                                     .scale = 0.7};
    ml_type score;
    ml_cached_attention_score_type(g, sources, &args, &score);
    ml_ref s = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){0}, 1, &score);
    ml_ref bias = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){1}, 1,
                               ml_graph_type(g, sources[CACHED_CAPTURED]));
    args.score = ml_map2(g, ML_OP_ADD, ml_map1(g, ML_OP_TANH, s), bias);
    return ml_cached_attention(g, sources, CACHED_CAPTURED + 1, &args);
}
BUILD(build_cached, cached_attention(f, "pool6 kv_heads2 dim2", "kv_heads2 pool6 dim3", 0))
BUILD(build_cached_ring, cached_attention(f, "pool6 dim2", "dim2 pool6", 3))

static ml_ref linear_scan(fixture *f, const char *const axes[], int rank, bool after,
                          bool reverse) {
    ml_ref sources[LINEAR_SCAN_MOST_SOURCES];
    for (int i = 0; i < 5 + 2 * rank; i++) sources[i] = x_of(f, axes[i]);
    return fixture_linear_scan(f, sources, rank, after, reverse);
}
#define AXES(...) ((const char *const[]){__VA_ARGS__})
/* One decay; all in one chunk, and in two of which the last is filled up. */
BUILD(build_linear_scan,
      linear_scan(f, AXES("s5 b2 k2", "k2 s5", "b2 s5 v2", "s5", "k2 b2 v2"), 0, true, false))
BUILD(build_linear_scan_long,
      linear_scan(f, AXES("s19 k2", "s19 k2", "s19 v2", "s19", "k2 v2"), 0, false, false))
BUILD(build_linear_scan_back,
      linear_scan(f, AXES("s19 k2", "s19 k2", "s19 v2", "s19 k2", "v2 k2"), 0, true, true))
BUILD(build_linear_scan_vector,
      linear_scan(f, AXES("s18 b2 k2", "s18 k2", "s18 b2", "s18 k2", "b2 k2"), 0, false, false))
BUILD(build_linear_scan_rank_1,
      linear_scan(f, AXES("s5 b2 k2", "b2 s5 k2", "s5 v2", "s5", "k2 b2 v2", "k2 s5", "s5 b2 k2"),
                  1, true, false))
BUILD(build_linear_scan_keys,
      linear_scan(f, AXES("s18 k2", "s18 k2", "s18 v2", "k2 s18", "k2 v2", "k2 s18", "s18 k2"), 1,
                  false, true))
BUILD(build_linear_scan_rank_2, linear_scan(f,
                                            AXES("s5 k2", "s5 k2", "s5 v2", "s5", "k2 v2", "k2 s5",
                                                 "s5 k2", "k2 s5", "s5 k2"),
                                            2, true, true))
BUILD(build_linear_scan_once,
      linear_scan(f, AXES("s1 k3", "s1 k3", "s1 v2", "s1", "k3 v2", "k3 s1", "s1 k3"), 1, true,
                  false))
/* Operands that are permutations of others, one of them in two places, and a constant decay. */
static ml_ref moved(fixture *f, ml_ref x, const char *axes) {
    ml_type as = fixture_type(f, ML_F64, axes);
    return ml_graph_add(f->g, ML_OP_PERMUTE, &x, 1, NULL, 0, &as);
}
static ml_ref linear_scan_moved(fixture *f, bool constant) {
    ml_ref x = x_of(f, "b2 s5 k2"), decay = x_of(f, "s5 b2 k2");
    ml_type keys = fixture_type(f, ML_F64, "b2 s5 k2");
    if (constant) decay = ml_broadcast(f->g, ml_const(f->g, ML_F64, 0.9), &keys);
    ml_ref sources[] = {moved(f, x, "s5 b2 k2"), moved(f, x, "s5 b2 k2"),
                        moved(f, x_of(f, "v2 s5 b2"), "b2 s5 v2"), moved(f, decay, "k2 b2 s5"),
                        moved(f, x_of(f, "k2 b2 v2"), "v2 b2 k2")};
    return fixture_linear_scan(f, sources, 0, true, true);
}
BUILD(build_linear_scan_moved, linear_scan_moved(f, false))
BUILD(build_linear_scan_constant, linear_scan_moved(f, true))
BUILD(build_linear_scan_final, ml_out(f->g, build_linear_scan_back(f), 1))
/* Second derivatives: of a sum of gradients. */
static ml_ref linear_scan_grad(fixture *f, ml_ref y, const ml_ref *wrt, int count) {
    ml_ref gradients[LINEAR_SCAN_MOST_SOURCES], sum = 0;
    ml_ref loss = ml_map2(f->g, ML_OP_ADD, fixture_loss(f, y), fixture_loss(f, ml_out(f->g, y, 1)));
    ml_autodiff(f->g, loss, wrt, count, gradients);
    for (int i = 0; i < count; i++) {
        ml_ref term = fixture_loss(f, gradients[i]);
        sum = sum ? ml_map2(f->g, ML_OP_ADD, sum, term) : term;
    }
    return sum;
}
static ml_ref build_linear_scan_grad(fixture *f) {
    ml_ref wrt[5];
    ml_ref y = linear_scan(f, AXES("s2 b2 k2", "k2 s2", "s2 v2", "s2", "k2 b2 v2"), 0, true, true);
    memcpy(wrt, f->nodes, sizeof wrt);
    return linear_scan_grad(f, y, wrt, 5);
}
static ml_ref build_delta_grad(fixture *f) { /* w is k */
    static const char *const axes[] = {"s3 k2", "s3 k2", "s3 v2", "s3 k2", "k2 v2", "s3 k2"};
    ml_ref sources[7];
    for (int i = 0; i < 6; i++) sources[i] = x_of(f, axes[i]);
    sources[6] = sources[LINEAR_SCAN_K];
    return linear_scan_grad(f, fixture_linear_scan(f, sources, 1, true, false), sources, 6);
}

static ml_ref recurrence(fixture *f, bool reverse) {
    ml_ref xghw[] = {x_of(f, "b2 s3 d2"), x_of(f, "s3 b2"), x_of(f, "b2 d2"), x_of(f, "d2")};
    return fixture_recurrence(f, xghw, reverse);
}
BUILD(build_recurrence, recurrence(f, false))
BUILD(build_recurrence_back, recurrence(f, true))
BUILD(build_recurrence_sum, ml_out(f->g, recurrence(f, true), 1))
BUILD(build_recurrence_final, ml_out(f->g, recurrence(f, false), 2))
BUILD(build_recurrence_history, ml_out(f->g, recurrence(f, false), 3))
static ml_ref build_recurrence_grad(fixture *f) { /* of all of it: second derivatives */
    ml_ref y = build_recurrence(f), wrt[4], gradients[4], sum = 0;
    memcpy(wrt, f->nodes, sizeof wrt);
    ml_ref loss = ml_map2(f->g, ML_OP_ADD, fixture_loss(f, ml_map1(f->g, ML_OP_SIN, y)),
                          fixture_loss(f, ml_out(f->g, y, 2)));
    ml_autodiff(f->g, loss, wrt, 4, gradients);
    for (int i = 0; i < 4; i++) {
        ml_ref term = fixture_loss(f, ml_map2(f->g, ML_OP_MUL, gradients[i], gradients[i]));
        sum = sum ? ml_map2(f->g, ML_OP_ADD, sum, term) : term;
    }
    return sum;
}

static const op_case cases[] = {
    {ML_OP_CONST, "f64", build_const},
    {ML_OP_IOTA, "i32[s=5]", build_iota},
    {ML_OP_STATE, "f64[s=2, d=3]", build_state},
    {ML_OP_INPUT, "f64[d=3]", build_input},
    {ML_OP_PARAM, "f64[d=3]", build_param},
    {ML_OP_CAST, "f64[s=2, d=3]", build_cast},
    {ML_OP_RANDOM, "f64[s=2, d=3]", build_random},
    {ML_OP_BROADCAST, "f64[d=3, s=2, b=2]", build_broadcast},
    {ML_OP_RENAME, "f64[d=2, s=3]", build_rename},
    {ML_OP_PERMUTE, "f64[d=3, b=2, s=2]", build_permute},
    {ML_OP_PLACE, "f64[s=2, d=3]", build_place},
    {ML_OP_SLICE, "f64[s=3, d=3]", build_slice},
    {ML_OP_PAD, "f64[s=5, d=3]", build_pad},
    {ML_OP_SPLIT, "f64[h=2, s=3, d=2]", build_split},
    {ML_OP_MERGE, "f64[s=6, d=2]", build_merge},
    {ML_OP_MERGE, "f64[d=2, m=6]", build_merge_back},
    {ML_OP_CONCAT, "f64[s=6, d=3]", build_concat},
    {ML_OP_CONCAT, "f64[s=2, d=6]", build_concat_twice},
    {ML_OP_GATHER, "f64[b=2, s=3, d=2]", build_gather},
    {ML_OP_GATHER, "f64[s=3, b=2, d=2]", build_gather_rows},
    {ML_OP_GATHER, "f64[b=2, s=3]", build_gather_own},
    {ML_OP_GATHER, "f64[b=2, s=3]", build_pick},
    {ML_OP_SUM, "f64[s=3]", build_sum},
    {ML_OP_MAX, "f64[b=2]", build_max},
    {ML_OP_MIN, "f64[d=4]", build_min},
    {ML_OP_ARGMAX, "i32[b=2]", build_argmax},
    {ML_OP_CUMSUM, "f64[b=2, s=4, d=2]", build_cumsum},
    {ML_OP_CUMSUM, "f64[b=2, s=4]", build_cumsum_back},
    {ML_OP_SORT, "f64[b=2, s=5, d=2]", build_sort},
    {ML_OP_SORT, "f64[b=2, s=5]", build_sort_down},
    {ML_OP_TOP_K, "f64[b=2, k=2, d=2]", build_top_k},
    {ML_OP_TOP_K, "f64[k=2]", build_top_k_long},
    {ML_OP_OUT, "i32[b=2, s=5, d=2]", build_out},
    {ML_OP_DOT, "f64[b=2, s=3, h=2]", build_dot},
    {ML_OP_DOT, "f64[b=2, h=2, s=3, t=3]", build_dot_batch},
    {ML_OP_DOT, "f64[s=3, e=3]", build_dot_two},
    {ML_OP_DOT, "f64[s=3]", build_dot_vector},
    {ML_OP_DOT, "f64", build_dot_all},
    {ML_OP_DOT, "f64[s=3, t=3]", build_dot_tied},
    {ML_OP_RAGGED_DOT, "f64[r=7, n=2]", build_ragged},
    {ML_OP_RAGGED_DOT, "f64[r=7, n=2]", build_ragged_turned},
    {ML_OP_RAGGED_OUTER, "f64[e=4, d=3, n=2]", build_outer},
    {ML_OP_RAGGED_DOT, "f64[b=2, r=7, n=2]", build_ragged_batch},
    {ML_OP_RAGGED_OUTER, "f64[e=4, d=3, n=2]", build_outer_batch},
    {ML_OP_SCATTER_ADD, "f64[v=5, d=2]", build_scatter},
    {ML_OP_SCATTER_ADD, "f64[b=2, v=5]", build_scatter_rows},
    {ML_OP_SCATTER_ADD, "f64[b=2, s=3, v=5]", build_scatter_one},
    {ML_OP_CONV, "f64[b=2, s=4, d=2]", build_conv},
    {ML_OP_CONV, "f64[b=2, s=2, h=3]", build_conv_full},
    {ML_OP_CONV, "f64[s=2, h=3]", build_conv_patches},
    {ML_OP_CONV, "f64[t=3, s=4, d=2]", build_conv_two},
    {ML_OP_CONV, "f64[s=2, t=2, u=2, h=2]", build_conv_three},
    {ML_OP_CONV, "f64[d=2, k=2]", build_conv_filter},
    {ML_OP_CONV, "f64[b=2, s=5, h=2]", build_conv_up},
    {ML_OP_ATTENTION, "f64[b=2, seq=3, heads=2, dim=2]", build_attention},
    {ML_OP_ATTENTION, "f64[seq=3, heads=4, dim=2]", build_attention_grouped},
    {ML_OP_ATTENTION, "f64[b=2, heads=2, seq=3]", build_attention_lse},
    {ML_OP_ATTENTION_GRAD, "f64[b=2, seq=3, heads=2, dim=2]", build_attention_grad},
    {ML_OP_WRITE_ROWS, "f64[p=5, d=3]", build_write_rows},
    {ML_OP_WRITE_ROWS, "f64[b=2, p=5, d=2]", build_write_inner},
    {ML_OP_CACHED_ATTENTION, "f64[r=2, seq=2, heads=4, dim=3]", build_cached},
    {ML_OP_CACHED_ATTENTION, "f64[r=2, seq=2, heads=4, dim=2]", build_cached_ring},
    {ML_OP_LINEAR_SCAN, "f64[s=5, b=2, v=2]", build_linear_scan},
    {ML_OP_LINEAR_SCAN, "f64[s=19, v=2]", build_linear_scan_long},
    {ML_OP_LINEAR_SCAN, "f64[s=19, v=2]", build_linear_scan_back},
    {ML_OP_LINEAR_SCAN, "f64[s=18, b=2]", build_linear_scan_vector},
    {ML_OP_LINEAR_SCAN, "f64[s=5, b=2, v=2]", build_linear_scan_rank_1},
    {ML_OP_LINEAR_SCAN, "f64[s=18, v=2]", build_linear_scan_keys},
    {ML_OP_LINEAR_SCAN, "f64[s=5, v=2]", build_linear_scan_rank_2},
    {ML_OP_LINEAR_SCAN, "f64[s=1, v=2]", build_linear_scan_once},
    {ML_OP_LINEAR_SCAN, "f64[s=5, b=2, v=2]", build_linear_scan_moved},
    {ML_OP_LINEAR_SCAN, "f64[s=5, b=2, v=2]", build_linear_scan_constant},
    {ML_OP_LINEAR_SCAN, "f64[v=2, k=2]", build_linear_scan_final},
    {ML_OP_LINEAR_SCAN_GRAD, "f64", build_linear_scan_grad},
    {ML_OP_LINEAR_SCAN_GRAD, "f64", build_delta_grad},
    {ML_OP_RECURRENCE, "f64[s=3, b=2, d=2]", build_recurrence},
    {ML_OP_RECURRENCE, "f64[s=3, b=2, d=2]", build_recurrence_back},
    {ML_OP_RECURRENCE, "f64[b=2, d=2]", build_recurrence_sum},
    {ML_OP_RECURRENCE, "f64[b=2, d=2]", build_recurrence_final},
    {ML_OP_RECURRENCE, "f64[s=3, b=2, d=2]", build_recurrence_history},
    {ML_OP_RECURRENCE, "f64", build_recurrence_grad},
};
enum { CASES = sizeof cases / sizeof *cases };

static const op_case *current_case;

static void check_case(fixture *f) {
    int number = (int)(current_case - cases);
    snprintf(f->label, sizeof f->label, "case %d, %s", number, ml_ops[current_case->op].name);
    ml_ref y = current_case->build(f);
    CHECK_TEXT(fixture_type_text(f, f->g, y), current_case->expected);
    fixture_check_gradients(f, fixture_loss(f, y));
}

TEST(passes, every_op) {
    for (int op = 0; op < ML_OP_COUNT; op++) {
        /* what only sharding makes, and only after autodiff */
        if (op == ML_OP_COORDINATE || ml_ops[op].op_class == ML_CLASS_COLLECTIVE) continue;
        bool found = is_plain_map(op);
        for (int i = 0; i < CASES; i++) found = found || cases[i].op == (ml_op)op;
        EXPECT(found, "%s has no case", ml_ops[op].name);
    }
    for (int i = 0; i < CASES; i++) {
        current_case = &cases[i];
        fixture_run(check_case, (uint64_t)i);
    }
}
