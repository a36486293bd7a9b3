/* See tests/shard/cases.h. */
#include "tests/shard/cases.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/cached_attention/cached_attention.h"
#include "runtime/ops/conv/conv.h"

#include <stdio.h>
#include <string.h>

#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/ragged/ragged.h"

typedef ml_ref build_function(fixture *f);

ml_dtype shard_case_dtype = ML_F64;
shard_given *shard_case_given;

#define FLOAT shard_case_dtype

/* ---- Operands -------------------------------------------------------------------------------- */

/* The positions of the axes that divide; their number. */
static int cuttable(const ml_type *t, int *positions) {
    int count = 0;
    for (int i = 0; i < t->rank; i++)
        if (t->size[i] % shard_case_given->parts == 0) positions[count++] = i;
    return count;
}

static ml_ref given_operand(fixture *f, ml_dtype dtype, const char *axes, int64_t bound) {
    static const char *const mesh_names[GIVEN_MESH] = {"x", "y"};
    shard_given *given = shard_case_given;
    int positions[ML_MAX_AXES], k = given->count++;
    if (k >= GIVEN_OPERANDS) ml_raise(ML_INTERNAL, "a case has too many operands");
    ml_type type = fixture_type(f, dtype, axes);
    int count = cuttable(&type, positions);
    given->choices[k] = 1 + count + !bound;
    int64_t args[2 * GIVEN_MESH];
    bool sum = false;
    for (int m = 0; m < given->mesh; m++) {
        int choice = given->choice[k][m];
        args[2 * m] = fixture_axis(f, mesh_names[m]);
        args[2 * m + 1] = choice == 0       ? 0
                          : choice <= count ? type.axis[positions[choice - 1]]
                                            : fixture_axis(f, "parts_of_sum");
        sum = sum || choice > count;
    }
    if (sum) axes = ml_arena_format(f->arena, "%s parts_of_sum%d", axes, (int)given->parts);
    ml_ref x = bound ? fixture_index(f, axes, bound) : fixture_input(f, dtype, axes, -2, 2);
    x = ml_graph_add(f->g, ML_OP_PLACE, &x, 1, args, 2 * given->mesh, NULL);
    ml_axis parts = fixture_axis(f, "parts_of_sum");
    if (sum) x = ml_reduce(f->g, ML_OP_SUM, x, &parts, 1);
    return given->placed[k] = x;
}

ml_placement shard_case_place(const fixture *f, int k, int m) {
    const shard_given *given = shard_case_given;
    int positions[ML_MAX_AXES], choice = given->choice[k][m];
    int count = cuttable(ml_graph_type(f->g, given->placed[k]), positions);
    if (!choice) return (ml_placement){0};
    if (choice > count) return (ml_placement){ML_PARTIAL_SUM, 0};
    return (ml_placement){ML_SPLIT, (uint8_t)positions[choice - 1]};
}

static ml_ref operand(fixture *f, const char *axes) {
    if (shard_case_given) return given_operand(f, FLOAT, axes, 0);
    if (fixture_below(f, 2)) return fixture_state(f, FLOAT, axes);
    return fixture_input(f, FLOAT, axes, -2, 2);
}
static ml_ref indices(fixture *f, const char *axes, int64_t bound) {
    return shard_case_given ? given_operand(f, ML_I32, axes, bound) : fixture_index(f, axes, bound);
}

/* ---- Ops ------------------------------------------------------------------------------------- */

static ml_ref with_args(fixture *f, ml_op op, ml_ref a, const int64_t *args, int count) {
    return ml_graph_add(f->g, op, &a, 1, args, count, NULL);
}
#define AXIS(name) fixture_axis(f, name)
#define TYPE(axes) fixture_type(f, FLOAT, axes)
#define BUILD(name, value)                                                                         \
    static ml_ref name(fixture *f) {                                                               \
        return value;                                                                              \
    }
static ml_ref sine(fixture *f, ml_ref x) {
    return ml_map1(f->g, ML_OP_SIN, x);
}
static ml_ref add(fixture *f, ml_ref a, ml_ref b) {
    return ml_map2(f->g, ML_OP_ADD, a, b);
}
static ml_ref mul(fixture *f, ml_ref a, ml_ref b) {
    return ml_map2(f->g, ML_OP_MUL, a, b);
}
static ml_ref sum(fixture *f, ml_ref x, const char *axis) {
    ml_axis a = AXIS(axis);
    return ml_reduce(f->g, ML_OP_SUM, x, &a, 1);
}
static ml_ref number(fixture *f, ml_ref x) {
    return ml_cast(f->g, x, FLOAT);
}

static ml_ref dot(fixture *f, const char *a, const char *b, const char *over) {
    ml_ref left = operand(f, a), right = operand(f, b);
    ml_type axes = TYPE(over);
    return ml_dot(f->g, left, right, axes.axis, axes.rank, FLOAT);
}

static ml_ref build_random(fixture *f) {
    ml_ref key = ml_const_int(f->g, ML_I64, 1234567890123456789);
    ml_type type = TYPE("s4 d8");
    return mul(f, operand(f, "s4 d8"), ml_graph_add(f->g, ML_OP_RANDOM, &key, 1, NULL, 0, &type));
}
static ml_ref build_broadcast(fixture *f) {
    ml_type type = TYPE("d8 s4 b4");
    return ml_broadcast(f->g, operand(f, "s4 d8"), &type);
}
BUILD(build_iota, mul(f, number(f, ml_iota(f->g, AXIS("s"), 8)), operand(f, "b4 s8")))
BUILD(build_state, sine(f, fixture_state(f, FLOAT, "s4 d4")))
BUILD(build_cast,
      ml_cast(f->g, ml_cast(f->g, operand(f, "s4 d4"), FLOAT == ML_F64 ? ML_F32 : ML_F64), FLOAT))
BUILD(build_rename, with_args(f, ML_OP_RENAME, operand(f, "s4 d8"),
                              (int64_t[]){AXIS("s"), AXIS("d"), AXIS("d"), AXIS("s")}, 4))
static ml_ref build_permute(fixture *f) {
    ml_type type = TYPE("d8 b4 s4");
    return ml_permute(f->g, operand(f, "b4 s4 d8"), &type);
}
/* Over mesh axis x along d, or whole; whether the layout has others or not. */
BUILD(build_place,
      sine(f, with_args(f, ML_OP_PLACE, add(f, dot(f, "s4 h8", "h8 d4", "h8"), operand(f, "s4 d4")),
                        (int64_t[]){AXIS("x"), fixture_below(f, 2) ? AXIS("d") : 0}, 2)))
BUILD(build_slice, ml_slice(f->g, operand(f, "s8 d4"), AXIS("s"), 2, 6))
BUILD(build_slice_odd, ml_slice(f->g, operand(f, "s8 d4"), AXIS("s"), 1, 4))
BUILD(build_pad, ml_pad(f->g, operand(f, "s4 d4"), AXIS("s"), 1, 3))
BUILD(build_split, ml_split(f->g, operand(f, "s16 d4"), AXIS("s"), AXIS("h"), 4, AXIS("s"), 4))
BUILD(build_split_odd, ml_split(f->g, operand(f, "s12 d4"), AXIS("s"), AXIS("s"), 3, AXIS("h"), 4))
BUILD(build_merge, ml_merge(f->g, operand(f, "h4 d4 s2"), AXIS("h"), AXIS("s"), AXIS("s")))
BUILD(build_merge_back, ml_merge(f->g, operand(f, "h4 d4 s4"), AXIS("s"), AXIS("h"), AXIS("m")))
static ml_ref build_concat(fixture *f) {
    ml_ref parts[3] = {operand(f, "s4 d4"), operand(f, "d4 s8"), operand(f, "s4 d4")};
    return ml_concat(f->g, parts, 3, AXIS("s"));
}
BUILD(build_gather, ml_gather(f->g, operand(f, "v8 d4"), indices(f, "b4 s4", 8), AXIS("v")))
BUILD(build_gather_rows, ml_gather(f->g, operand(f, "b4 v8 d4"), indices(f, "s4 b4", 9), AXIS("v")))
BUILD(build_gather_own, ml_gather(f->g, operand(f, "b4 s4"), indices(f, "b4 s8", 4), AXIS("s")))
BUILD(build_pick, ml_gather(f->g, operand(f, "b4 s4 v8"), indices(f, "b4 s4", 8), AXIS("v")))
BUILD(build_sum,
      ml_reduce(f->g, ML_OP_SUM, operand(f, "b4 s4 d4"), (ml_axis[]){AXIS("d"), AXIS("b")}, 2))
BUILD(build_max,
      ml_reduce(f->g, ML_OP_MAX, operand(f, "b4 s4 d4"), (ml_axis[]){AXIS("s"), AXIS("d")}, 2))
BUILD(build_min, ml_reduce(f->g, ML_OP_MIN, operand(f, "s4 d4"), (ml_axis[]){AXIS("s")}, 1))
BUILD(build_argmax,
      number(f, ml_reduce(f->g, ML_OP_ARGMAX, operand(f, "b4 s8"), (ml_axis[]){AXIS("s")}, 1)))
BUILD(build_cumsum,
      with_args(f, ML_OP_CUMSUM, operand(f, "b4 s4 d4"), (int64_t[]){AXIS("s"), 0}, 2))
BUILD(build_cumsum_back,
      with_args(f, ML_OP_CUMSUM, operand(f, "b4 s4"), (int64_t[]){AXIS("s"), 1}, 2))
BUILD(build_sort, with_args(f, ML_OP_SORT, operand(f, "b4 s8 d4"), (int64_t[]){AXIS("s"), 1}, 2))
BUILD(build_top_k,
      with_args(f, ML_OP_TOP_K, operand(f, "b4 e8 d4"), (int64_t[]){AXIS("e"), 4, AXIS("k")}, 3))
BUILD(build_out, number(f, ml_out(f->g, build_sort(f), 1)))

BUILD(build_dot, dot(f, "b4 s4 d8", "d8 h4", "d8"))
BUILD(build_dot_batch, dot(f, "b4 s4 h4 d4", "d4 t4 h4 b4", "d4"))
BUILD(build_dot_two, dot(f, "s4 h4 d4", "h4 d4 e4", "h4 d4"))
BUILD(build_dot_vector, dot(f, "s4 d4", "d4", "d4"))
BUILD(build_dot_all, dot(f, "s4 d4", "d4 s4", "s4 d4"))
static ml_ref build_scatter(fixture *f) {
    ml_type type = TYPE("v8 d4");
    return ml_scatter_add(f->g, indices(f, "b4 s4", 8), operand(f, "b4 s4 d4"), AXIS("v"), &type);
}
static ml_ref build_scatter_rows(fixture *f) {
    ml_type type = TYPE("b4 v8");
    return ml_scatter_add(f->g, indices(f, "s4 b4", 8), operand(f, "b4 s4"), AXIS("v"), &type);
}
static ml_ref build_scatter_one(fixture *f) {
    ml_type type = TYPE("b4 s4 v8");
    return ml_scatter_add(f->g, indices(f, "b4 s4", 8), operand(f, "s4 b4"), AXIS("v"), &type);
}
/* Values that are sums over ranks, in ops that keep them so and ops that cannot. */
static ml_ref build_partial(fixture *f) {
    ml_ref a = dot(f, "b4 d8", "d8 h4", "d8"), b = dot(f, "b4 d4", "d4 h4", "d4");
    ml_ref c = operand(f, "b4 h4");
    ml_ref x = add(f, mul(f, ml_map1(f->g, ML_OP_NEG, a), ml_const(f->g, FLOAT, 3)), b);
    return add(f, mul(f, x, ml_map1(f->g, ML_OP_EXP, c)), sum(f, operand(f, "b4 h4 s4"), "s"));
}
static ml_ref build_norm(fixture *f) {
    ml_ref x = add(f, dot(f, "b4 s4 h4", "h4 d8", "h4"), operand(f, "b4 s4 d8"));
    ml_ref mean = ml_map2(f->g, ML_OP_DIV, sum(f, x, "d"), ml_const(f->g, FLOAT, 8));
    ml_ref centred = ml_map2(f->g, ML_OP_SUB, x, mean);
    ml_ref scale = add(f, sum(f, mul(f, centred, centred), "d"), ml_const(f->g, FLOAT, 1));
    return mul(f, mul(f, centred, ml_map1(f->g, ML_OP_RSQRT, scale)), operand(f, "d8"));
}
static ml_ref build_where(fixture *f) {
    ml_ref x = operand(f, "b4 s4"), y = operand(f, "s4"), zero = ml_const(f->g, FLOAT, 0);
    ml_ref z = ml_where(f->g, ml_map2(f->g, ML_OP_LT, x, zero), y, x);
    return ml_where(f->g, ml_map2(f->g, ML_OP_GT, sum(f, y, "s"), zero), z, zero);
}

/* Groups of rows: bounds that ascend, some groups empty, some rows of none; of each sequence. */
static ml_ref bounds(fixture *f, const char *axes, bool ends) {
    static const double values[4][2][4] = {{{0, 3, 3, 5}, {3, 3, 5, 7}},
                                           {{0, 0, 4, 4}, {0, 4, 4, 8}},
                                           {{0, 2, 4, 6}, {2, 4, 6, 8}},
                                           {{1, 8, 8, 8}, {8, 8, 8, 8}}};
    ml_ref index = indices(f, axes, 8);
    int64_t count = ml_type_elements(ml_graph_type(f->g, f->nodes[f->input_count - 1]));
    for (int64_t i = 0; i < count; i++)
        f->inputs[f->input_count - 1][i] = values[i / 4][ends][i % 4];
    return index;
}
/* last: what a RAGGED_DOT sums over; 0, one output, of a RAGGED_OUTER */
static ml_ref ragged(fixture *f, ml_op op, const char *a, const char *b, int64_t last) {
    ml_ref sources[] = {operand(f, a), operand(f, b), bounds(f, "g4", false),
                        bounds(f, "g4", true)};
    ml_type type = {.dtype = FLOAT};
    int64_t args[] = {AXIS("b"), AXIS("g"), last, 0};
    return ml_graph_add(f->g, op, sources, 4, args, op == ML_OP_RAGGED_DOT ? 4 : 3, &type);
}
BUILD(build_ragged, ragged(f, ML_OP_RAGGED_DOT, "b8 d4", "g4 d4 h4", AXIS("d")))
BUILD(build_ragged_outer, ragged(f, ML_OP_RAGGED_OUTER, "b8 d4", "h4 b8", 0))

/* The experts of a mixture: two products by groups with an activation and weights between them. */
static ml_ref experts(fixture *f, const char *x_axes, const char *weights, const char *bound_axes) {
    ml_ref starts = bounds(f, bound_axes, false), ends = bounds(f, bound_axes, true);
    ml_ref x = operand(f, x_axes), made[2];
    for (int i = 0; i < 2; i++)
        made[i] = ml_ragged_dot(f->g, (ml_ref[]){x, operand(f, "g4 d4 h4"), starts, ends},
                                AXIS("b"), AXIS("d"), FLOAT);
    ml_ref h = mul(f, mul(f, made[0], ml_map1(f->g, ML_OP_SIGMOID, made[0])), made[1]);
    h = mul(f, h, operand(f, weights));
    return ml_ragged_dot(f->g, (ml_ref[]){h, operand(f, "g4 h4 d4"), starts, ends}, AXIS("b"),
                         AXIS("h"), FLOAT);
}
ml_ref shard_case_experts(fixture *f) {
    ml_type tokens = TYPE("s4 d4");
    ml_ref y = experts(f, "b8 d4", "b8", "g4");
    return ml_scatter_add(f->g, indices(f, "b8", 4), y, AXIS("s"), &tokens);
}
static ml_ref build_sequences(fixture *f) {
    ml_type tokens = TYPE("e4 s4 d4");
    ml_ref y = experts(f, "e4 b8 d4", "e4 b8", "e4 g4");
    return ml_scatter_add(f->g, indices(f, "e4 b8", 4), y, AXIS("s"), &tokens);
}

static ml_ref conv(fixture *f, const char *a, const char *b, const char *out, int64_t stride,
                   int64_t before) {
    ml_type type = TYPE(out);
    conv_window w = {AXIS("s"), AXIS("k"), 1, stride, 1, before};
    return ml_conv(f->g, operand(f, a), operand(f, b), &w, 1, &type);
}
BUILD(build_conv, conv(f, "b4 s8 d4", "k3 d4", "b4 s8 d4", 1, 2))
BUILD(build_conv_full, conv(f, "b4 s8 d4", "d4 h4 k2", "b4 s4 h4", 2, 1))
BUILD(build_conv_groups, conv(f, "b4 s8 h4 d4", "k3 h4 d4 e4", "b4 s8 h4 e4", 1, 1))
BUILD(build_conv_middle, conv(f, "b4 s8 d4", "k3 d4", "b4 s8 d4", 1, 1))
BUILD(build_conv_long, conv(f, "b4 s8 d4", "k5 d4", "b4 s8 d4", 1, 2))
BUILD(build_conv_side, conv(f, "b4 s8 d4", "d4 h4 k2", "b4 s4 h4", 2, 0))
static ml_ref build_conv_image(fixture *f) {
    ml_type type = TYPE("b4 s4 t8 h4");
    conv_window w[2] = {{AXIS("s"), AXIS("k"), 1, 2, 1, 1}, {AXIS("t"), AXIS("l"), 1, 1, 1, 1}};
    return ml_conv(f->g, operand(f, "b4 s8 t8 d4"), operand(f, "d4 h4 k3 l3"), w, 2, &type);
}
static ml_ref build_conv_up(fixture *f) {
    ml_type type = TYPE("b4 s8 h4");
    conv_window w = {AXIS("s"), AXIS("k"), 2, 1, -1, -1};
    return ml_conv(f->g, operand(f, "b4 s4 d4"), operand(f, "k3 d4 h4"), &w, 1, &type);
}
BUILD(build_conv_filter, conv(f, "b4 s8 d4", "b4 s8 d4", "d4 k3", 1, 2))

static ml_ref attention(fixture *f, const char *kv, const char *heads) {
    ml_ref sources[3] = {operand(f, "b4 s4 h8 d2"), operand(f, kv), operand(f, kv)};
    ml_attention_args args = {.seq = AXIS("s"),
                              .kv_seq = AXIS("t"),
                              .heads = AXIS("h"),
                              .kv_heads = AXIS(heads),
                              .head_dim = AXIS("d"),
                              .causal = true,
                              .scale = 0.7};
    return ml_attention(f->g, sources, 3, &args);
}
BUILD(build_attention, attention(f, "b4 t8 h8 d2", "h"))
BUILD(build_attention_grouped, attention(f, "b4 t4 k4 d2", "k"))

/* Into distinct rows: 1, 4, none, 2. */
static ml_ref build_write_rows(fixture *f) {
    ml_graph *g = f->g;
    ml_ref i = ml_iota(g, AXIS("b"), 4);
    ml_ref at = ml_map2(g, ML_OP_MUL, i, ml_const_int(g, ML_I32, 3));
    at = ml_map2(g, ML_OP_ADD, at, ml_const_int(g, ML_I32, 1));
    at = ml_map2(g, ML_OP_MOD, at, ml_const_int(g, ML_I32, 8));
    ml_ref none = ml_map2(g, ML_OP_EQ, i, ml_const_int(g, ML_I32, 2));
    at = ml_where(g, none, ml_const_int(g, ML_I32, -1), at);
    return ml_write_rows(g, operand(f, "s8 h4 d4"), at, operand(f, "b4 d4 h4"), AXIS("s"));
}

/* A pool of 4 blocks of 2; scores that see positions, heads and rows. */
static ml_ref cached_attention(fixture *f, const char *k, const char *kv_heads) {
    ml_graph *g = f->g;
    ml_ref sources[] = {operand(f, "b4 s2 h4 d4"), operand(f, k),       operand(f, k),
                        indices(f, "b4 c3", 4),    indices(f, "b4", 6), indices(f, "b4", 7),
                        operand(f, "h4 b4")};
    ml_cached_attention_args args = {.seq = AXIS("s"),
                                     .pool = AXIS("p"),
                                     .columns = AXIS("c"),
                                     .heads = AXIS("h"),
                                     .kv_heads = kv_heads ? AXIS(kv_heads) : 0,
                                     .head_dim = AXIS("d"),
                                     .kv_seq = AXIS("t"),
                                     .keys = 6,
                                     .causal = true,
                                     .block = 2,
                                     .scale = 0.7};
    ml_type score;
    ml_cached_attention_score_type(g, sources, &args, &score);
    ml_ref s = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){0}, 1, &score);
    const ml_type *type = ml_graph_type(g, sources[CACHED_CAPTURED]);
    /* A factor: softmax does not change with a sum that all keys of a row share, whose gradient is
     * 0. */
    s = add(f, s, mul(f, s, ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){1}, 1, type)));
    for (int i = 0; i < 4; i++) {
        ml_ref index = ml_cast(g, ml_iota(g, score.axis[i], score.size[i]), FLOAT);
        s = add(f, s, mul(f, index, ml_const(g, FLOAT, 0.1 * (i + 1))));
    }
    args.score = s;
    return ml_cached_attention(g, sources, CACHED_CAPTURED + 1, &args);
}
BUILD(build_cached, cached_attention(f, "p8 k2 d4", "k"))
BUILD(build_cached_heads, cached_attention(f, "p8 h4 d4", "h"))
BUILD(build_cached_latent, cached_attention(f, "p8 d4", NULL))

static ml_ref build_recurrence(fixture *f) {
    ml_ref xghw[] = {operand(f, "b4 s4 d8"), operand(f, "s4 d8"), operand(f, "d8 b4"),
                     operand(f, "b4")};
    ml_ref y = fixture_recurrence(f, xghw, true);
    return add(f, y, add(f, ml_out(f->g, y, 1), ml_out(f->g, y, 2)));
}

static ml_ref linear_scan(fixture *f, const char *const axes[], int rank, bool reverse) {
    ml_ref sources[LINEAR_SCAN_MOST_SOURCES];
    for (int i = 0; i < LINEAR_SCAN_FIRST_PAIR + 2 * rank; i++) sources[i] = operand(f, axes[i]);
    ml_axis keys = AXIS("k");
    ml_ref y = fixture_linear_scan(f, sources, rank, rank == 0, reverse);
    ml_ref final = ml_reduce(f->g, ML_OP_SUM, ml_out(f->g, y, 1), &keys, 1);
    return add(f, y, final);
}
static ml_ref build_linear_scan(fixture *f) {
    static const char *const axes[] = {"b4 s4 k2 h4", "s4 b4 k2", "h4 s4 v8 b4", "h4 s4 b4",
                                       "b4 h4 k2 v8"};
    return linear_scan(f, axes, 0, false);
}
static ml_ref build_linear_scan_keys(fixture *f) {
    static const char *const axes[] = {"b4 s4 k4", "s4 k4", "s4 v6 b4", "k4 s4 b4", "v6 b4 k4"};
    return linear_scan(f, axes, 0, true);
}
static ml_ref build_linear_scan_delta(fixture *f) {
    static const char *const axes[] = {"b4 s8 k2", "s8 b4 k2", "s8 v4 b4", "b4 s8",
                                       "b4 k2 v4", "s8 b4 k2", "k2 s8"};
    return linear_scan(f, axes, 1, false);
}
static ml_ref build_linear_scan_delta_vector(fixture *f) {
    static const char *const axes[] = {"s8 k2", "s8 b4 k2", "s8 b4", "b4 s8 k2", "b4 k2",
                                       "k2 s8", "s8 b4 k2", "k2 s8", "s8 k2"};
    return linear_scan(f, axes, 2, true);
}

typedef struct {
    ml_op op;
    build_function *build;
} op_case;
static const op_case cases[] = {
    {ML_OP_IOTA, build_iota},
    {ML_OP_STATE, build_state},
    {ML_OP_CAST, build_cast},
    {ML_OP_RANDOM, build_random},
    {ML_OP_BROADCAST, build_broadcast},
    {ML_OP_RENAME, build_rename},
    {ML_OP_PERMUTE, build_permute},
    {ML_OP_PLACE, build_place},
    {ML_OP_SLICE, build_slice},
    {ML_OP_SLICE, build_slice_odd},
    {ML_OP_PAD, build_pad},
    {ML_OP_SPLIT, build_split},
    {ML_OP_SPLIT, build_split_odd},
    {ML_OP_MERGE, build_merge},
    {ML_OP_MERGE, build_merge_back},
    {ML_OP_CONCAT, build_concat},
    {ML_OP_GATHER, build_gather},
    {ML_OP_GATHER, build_gather_rows},
    {ML_OP_GATHER, build_gather_own},
    {ML_OP_GATHER, build_pick},
    {ML_OP_SUM, build_sum},
    {ML_OP_MAX, build_max},
    {ML_OP_MIN, build_min},
    {ML_OP_ARGMAX, build_argmax},
    {ML_OP_CUMSUM, build_cumsum},
    {ML_OP_CUMSUM, build_cumsum_back},
    {ML_OP_SORT, build_sort},
    {ML_OP_TOP_K, build_top_k},
    {ML_OP_OUT, build_out},
    {ML_OP_DOT, build_dot},
    {ML_OP_DOT, build_dot_batch},
    {ML_OP_DOT, build_dot_two},
    {ML_OP_DOT, build_dot_vector},
    {ML_OP_DOT, build_dot_all},
    {ML_OP_SCATTER_ADD, build_scatter},
    {ML_OP_SCATTER_ADD, build_scatter_rows},
    {ML_OP_SCATTER_ADD, build_scatter_one},
    {ML_OP_ADD, build_partial},
    {ML_OP_MUL, build_norm},
    {ML_OP_WHERE, build_where},
    {ML_OP_RAGGED_DOT, build_ragged},
    {ML_OP_RAGGED_OUTER, build_ragged_outer},
    {ML_OP_RAGGED_DOT, shard_case_experts},
    {ML_OP_RAGGED_DOT, build_sequences},
    {ML_OP_CONV, build_conv},
    {ML_OP_CONV, build_conv_full},
    {ML_OP_CONV, build_conv_groups},
    {ML_OP_CONV, build_conv_filter},
    {ML_OP_CONV, build_conv_middle},
    {ML_OP_CONV, build_conv_long},
    {ML_OP_CONV, build_conv_side},
    {ML_OP_CONV, build_conv_image},
    {ML_OP_CONV, build_conv_up},
    {ML_OP_ATTENTION, build_attention},
    {ML_OP_WRITE_ROWS, build_write_rows},
    {ML_OP_CACHED_ATTENTION, build_cached},
    {ML_OP_CACHED_ATTENTION, build_cached_heads},
    {ML_OP_CACHED_ATTENTION, build_cached_latent},
    {ML_OP_LINEAR_SCAN, build_linear_scan},
    {ML_OP_LINEAR_SCAN, build_linear_scan_keys},
    {ML_OP_LINEAR_SCAN, build_linear_scan_delta},
    {ML_OP_LINEAR_SCAN, build_linear_scan_delta_vector},
    {ML_OP_RECURRENCE, build_recurrence},
    {ML_OP_ATTENTION, build_attention_grouped},
};
enum { CASES = sizeof cases / sizeof *cases };

/* ---- Elementwise ops ------------------------------------------------------------------------- */

enum { SHAPES = 3 };

/* Those of them that take any numbers, or any truth values. */
static bool is_map(ml_op op) {
    return ml_ops[op].op_class == ML_CLASS_MAP && op != ML_OP_CAST && op != ML_OP_RANDOM &&
           op != ML_OP_WHERE;
}

static ml_ref build_map(fixture *f, ml_op op, int shape) {
    static const char *const axes[SHAPES][2] = {
        {"b4 s4", "b4 s4"}, {"b4 s4", "s4"}, {"s4", "s4 b4"}};
    ml_ref sources[2];
    for (int k = 0; k < ml_ops[op].sources; k++) {
        sources[k] = operand(f, axes[shape][k]);
        if (ml_ops[op].rule == ML_RULE_LOGIC)
            sources[k] = ml_map2(f->g, ML_OP_LT, sources[k], ml_const(f->g, FLOAT, 0));
    }
    ml_ref y = ml_ops[op].sources == 1 ? ml_map1(f->g, op, sources[0])
                                       : ml_map2(f->g, op, sources[0], sources[1]);
    return number(f, y);
}

/* ---- All of them ----------------------------------------------------------------------------- */

/* The op and shape of case CASES + i. */
static bool find_map(int i, ml_op *op, int *shape) {
    for (*op = 0; *op < ML_OP_COUNT; ++*op) {
        int shapes = !is_map(*op) ? 0 : ml_ops[*op].sources == 1 ? 1 : SHAPES;
        if (i < shapes) {
            *shape = i;
            return true;
        }
        i -= shapes;
    }
    return false;
}

int shard_case_count(void) {
    ml_op op;
    int shape, count = CASES;
    while (find_map(count - CASES, &op, &shape)) count++;
    return count;
}

ml_op shard_case_op(int i) {
    ml_op op = ML_OP_COUNT;
    int shape;
    if (i < CASES) return cases[i].op;
    (void)find_map(i - CASES, &op, &shape);
    return op;
}

ml_ref shard_case_build(fixture *f, int i) {
    ml_op op;
    int shape;
    if (i < CASES) return cases[i].build(f);
    if (!find_map(i - CASES, &op, &shape)) ml_raise(ML_INTERNAL, "there is no case %d", i);
    return build_map(f, op, shape);
}

int shard_case_find(ml_op op) {
    for (int i = 0, count = shard_case_count(); i < count; i++)
        if (shard_case_op(i) == op) return i;
    return -1;
}
