/* Every op under drawn layouts: results, gradients and updates of states are those of one rank.
 * Operands are inputs (placed by acts) or states (by params), as drawn. */
#include <stdio.h>
#include <string.h>

#include "runtime/graph/ragged.h"
#include "tests/shard_support.h"

enum { DRAWS = 24 };

typedef ml_ref build_function(fixture *f);

static ml_ref operand(fixture *f, const char *axes) {
    if (fixture_below(f, 2)) return fixture_state(f, ML_F64, axes);
    return fixture_input(f, ML_F64, axes, -2, 2);
}
static ml_ref with_args(fixture *f, ml_op op, ml_ref a, const int64_t *args, int count) {
    return ml_graph_add(f->g, op, &a, 1, args, count, NULL);
}
#define AXIS(name) fixture_axis(f, name)
#define TYPE(axes) fixture_type(f, ML_F64, axes)
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
static ml_ref cast_f64(fixture *f, ml_ref x) {
    return ml_cast(f->g, x, ML_F64);
}

static ml_ref dot(fixture *f, const char *a, const char *b, const char *over) {
    ml_ref left = operand(f, a), right = operand(f, b);
    ml_type axes = TYPE(over);
    return ml_dot(f->g, left, right, axes.axis, axes.rank, ML_F64);
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
BUILD(build_iota, mul(f, cast_f64(f, ml_iota(f->g, AXIS("s"), 8)), operand(f, "b4 s8")))
BUILD(build_state, sine(f, fixture_state(f, ML_F64, "s4 d4")))
BUILD(build_cast, ml_cast(f->g, ml_cast(f->g, operand(f, "s4 d4"), ML_F32), ML_F64))
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
BUILD(build_gather, ml_gather(f->g, operand(f, "v8 d4"), fixture_index(f, "b4 s4", 8), AXIS("v")))
BUILD(build_gather_rows,
      ml_gather(f->g, operand(f, "b4 v8 d4"), fixture_index(f, "s4 b4", 9), AXIS("v")))
BUILD(build_gather_own,
      ml_gather(f->g, operand(f, "b4 s4"), fixture_index(f, "b4 s8", 4), AXIS("s")))
BUILD(build_pick, ml_gather(f->g, operand(f, "b4 s4 v8"), fixture_index(f, "b4 s4", 8), AXIS("v")))
BUILD(build_sum,
      ml_reduce(f->g, ML_OP_SUM, operand(f, "b4 s4 d4"), (ml_axis[]){AXIS("d"), AXIS("b")}, 2))
BUILD(build_max,
      ml_reduce(f->g, ML_OP_MAX, operand(f, "b4 s4 d4"), (ml_axis[]){AXIS("s"), AXIS("d")}, 2))
BUILD(build_min, ml_reduce(f->g, ML_OP_MIN, operand(f, "s4 d4"), (ml_axis[]){AXIS("s")}, 1))
BUILD(build_argmax,
      cast_f64(f, ml_reduce(f->g, ML_OP_ARGMAX, operand(f, "b4 s8"), (ml_axis[]){AXIS("s")}, 1)))
BUILD(build_cumsum,
      with_args(f, ML_OP_CUMSUM, operand(f, "b4 s4 d4"), (int64_t[]){AXIS("s"), 0}, 2))
BUILD(build_cumsum_back,
      with_args(f, ML_OP_CUMSUM, operand(f, "b4 s4"), (int64_t[]){AXIS("s"), 1}, 2))
BUILD(build_sort, with_args(f, ML_OP_SORT, operand(f, "b4 s8 d4"), (int64_t[]){AXIS("s"), 1}, 2))
BUILD(build_top_k,
      with_args(f, ML_OP_TOP_K, operand(f, "b4 e8 d4"), (int64_t[]){AXIS("e"), 4, AXIS("k")}, 3))
BUILD(build_out, cast_f64(f, ml_out(f->g, build_sort(f), 1)))

BUILD(build_dot, dot(f, "b4 s4 d8", "d8 h4", "d8"))
BUILD(build_dot_batch, dot(f, "b4 s4 h4 d4", "d4 t4 h4 b4", "d4"))
BUILD(build_dot_two, dot(f, "s4 h4 d4", "h4 d4 e4", "h4 d4"))
BUILD(build_dot_vector, dot(f, "s4 d4", "d4", "d4"))
BUILD(build_dot_all, dot(f, "s4 d4", "d4 s4", "s4 d4"))
static ml_ref build_scatter(fixture *f) {
    ml_type type = TYPE("v8 d4");
    return ml_scatter_add(f->g, fixture_index(f, "b4 s4", 8), operand(f, "b4 s4 d4"), AXIS("v"),
                          &type);
}
static ml_ref build_scatter_rows(fixture *f) {
    ml_type type = TYPE("b4 v8");
    return ml_scatter_add(f->g, fixture_index(f, "s4 b4", 8), operand(f, "b4 s4"), AXIS("v"),
                          &type);
}
static ml_ref build_scatter_one(fixture *f) {
    ml_type type = TYPE("b4 s4 v8");
    return ml_scatter_add(f->g, fixture_index(f, "b4 s4", 8), operand(f, "s4 b4"), AXIS("v"),
                          &type);
}
/* Values that are sums over ranks, in ops that keep them so and ops that cannot. */
static ml_ref build_partial(fixture *f) {
    ml_ref a = dot(f, "b4 d8", "d8 h4", "d8"), b = dot(f, "b4 d4", "d4 h4", "d4");
    ml_ref c = operand(f, "b4 h4");
    ml_ref x = add(f, mul(f, ml_map1(f->g, ML_OP_NEG, a), ml_const(f->g, ML_F64, 3)), b);
    return add(f, mul(f, x, ml_map1(f->g, ML_OP_EXP, c)), sum(f, operand(f, "b4 h4 s4"), "s"));
}
static ml_ref build_norm(fixture *f) {
    ml_ref x = add(f, dot(f, "b4 s4 h4", "h4 d8", "h4"), operand(f, "b4 s4 d8"));
    ml_ref mean = ml_map2(f->g, ML_OP_DIV, sum(f, x, "d"), ml_const(f->g, ML_F64, 8));
    ml_ref centred = ml_map2(f->g, ML_OP_SUB, x, mean);
    ml_ref scale = add(f, sum(f, mul(f, centred, centred), "d"), ml_const(f->g, ML_F64, 1));
    return mul(f, mul(f, centred, ml_map1(f->g, ML_OP_RSQRT, scale)), operand(f, "d8"));
}
static ml_ref build_where(fixture *f) {
    ml_ref x = operand(f, "b4 s4"), y = operand(f, "s4"), zero = ml_const(f->g, ML_F64, 0);
    ml_ref z = ml_where(f->g, ml_map2(f->g, ML_OP_LT, x, zero), y, x);
    return ml_where(f->g, ml_map2(f->g, ML_OP_GT, sum(f, y, "s"), zero), z, zero);
}

/* Groups of rows: bounds that ascend, some groups empty, some rows of none; of each sequence. */
static ml_ref bounds(fixture *f, const char *axes, bool ends) {
    static const double values[4][2][4] = {{{0, 3, 3, 5}, {3, 3, 5, 7}},
                                           {{0, 0, 4, 4}, {0, 4, 4, 8}},
                                           {{0, 2, 4, 6}, {2, 4, 6, 8}},
                                           {{1, 8, 8, 8}, {8, 8, 8, 8}}};
    ml_ref index = fixture_index(f, axes, 8);
    int64_t count = ml_type_elements(ml_graph_type(f->g, index));
    for (int64_t i = 0; i < count; i++)
        f->inputs[f->input_count - 1][i] = values[i / 4][ends][i % 4];
    return index;
}
static ml_ref ragged(fixture *f, ml_op op, const char *a, const char *b, int64_t reduced) {
    ml_ref sources[] = {operand(f, a), operand(f, b), bounds(f, "g4", false),
                        bounds(f, "g4", true)};
    ml_type type = {.dtype = ML_F64};
    return ml_graph_add(f->g, op, sources, 4, (int64_t[]){AXIS("b"), AXIS("g"), reduced},
                        reduced ? 3 : 2, &type);
}
BUILD(build_ragged, ragged(f, ML_OP_RAGGED_DOT, "b8 d4", "g4 d4 h4", AXIS("d")))
BUILD(build_ragged_outer, ragged(f, ML_OP_RAGGED_OUTER, "b8 d4", "h4 b8", 0))

/* The experts of a mixture: two products by groups with an activation and weights between them. */
static ml_ref experts(fixture *f, const char *x_axes, const char *weights, const char *bound_axes) {
    ml_ref starts = bounds(f, bound_axes, false), ends = bounds(f, bound_axes, true);
    ml_ref x = operand(f, x_axes), made[2];
    for (int i = 0; i < 2; i++)
        made[i] = ml_ragged_dot(f->g, (ml_ref[]){x, operand(f, "g4 d4 h4"), starts, ends},
                                AXIS("b"), AXIS("d"), ML_F64);
    ml_ref h = mul(f, mul(f, made[0], ml_map1(f->g, ML_OP_SIGMOID, made[0])), made[1]);
    h = mul(f, h, operand(f, weights));
    return ml_ragged_dot(f->g, (ml_ref[]){h, operand(f, "g4 h4 d4"), starts, ends}, AXIS("b"),
                         AXIS("h"), ML_F64);
}
static ml_ref build_experts(fixture *f) {
    ml_type tokens = TYPE("s4 d4");
    ml_ref y = experts(f, "b8 d4", "b8", "g4");
    return ml_scatter_add(f->g, fixture_index(f, "b8", 4), y, AXIS("s"), &tokens);
}
static ml_ref build_sequences(fixture *f) {
    ml_type tokens = TYPE("e4 s4 d4");
    ml_ref y = experts(f, "e4 b8 d4", "e4 b8", "e4 g4");
    return ml_scatter_add(f->g, fixture_index(f, "e4 b8", 4), y, AXIS("s"), &tokens);
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
    {ML_OP_RAGGED_DOT, build_experts},
    {ML_OP_RAGGED_DOT, build_sequences},
};
enum { CASES = sizeof cases / sizeof *cases };

static const op_case *current;

static void name_and_check(fixture *f) {
    snprintf(f->label, sizeof f->label, "case %d, %s", (int)(current - cases),
             ml_ops[current->op].name);
    ml_ref y = current->build(f);
    shard_check_drawn(f, y, "b s d h v e k g", 4);
}

static bool is_map(ml_op op) {
    return ml_ops[op].op_class == ML_CLASS_MAP && op != ML_OP_CAST && op != ML_OP_RANDOM &&
           op != ML_OP_WHERE;
}

TEST(shard_ops, drawn_layouts) {
    for (int i = 0; i < CASES; i++) {
        current = &cases[i];
        for (int draw = 0; draw < DRAWS; draw++)
            fixture_run(name_and_check, (uint64_t)(draw * 100 + i));
    }
}

/* ---- Elementwise ops ------------------------------------------------------------------------- */

static int map_op;

static ml_ref build_map(fixture *f) {
    bool logic = ml_ops[map_op].rule == ML_RULE_LOGIC;
    static const char *const axes[3][2] = {{"b4 s4", "b4 s4"}, {"b4 s4", "s4"}, {"s4", "s4 b4"}};
    const char *const *pick = axes[fixture_below(f, 3)];
    ml_ref sources[2];
    for (int k = 0; k < ml_ops[map_op].sources; k++) {
        sources[k] = operand(f, pick[k]);
        if (logic) sources[k] = ml_map2(f->g, ML_OP_LT, sources[k], ml_const(f->g, ML_F64, 0));
    }
    ml_ref y = ml_ops[map_op].sources == 1 ? ml_map1(f->g, map_op, sources[0])
                                           : ml_map2(f->g, map_op, sources[0], sources[1]);
    return cast_f64(f, y);
}

static void check_map(fixture *f) {
    snprintf(f->label, sizeof f->label, "%s", ml_ops[map_op].name);
    ml_ref y = build_map(f);
    shard_check_drawn(f, y, "b s d", 4);
}

TEST(shard_ops, elementwise) {
    for (map_op = 0; map_op < ML_OP_COUNT; map_op++)
        for (int draw = 0; draw < 3 && is_map(map_op); draw++)
            fixture_run(check_map, (uint64_t)(map_op * 10 + draw));
}

/* Every op that a script can make has a case here or in shard_attention.c. */
TEST(shard_ops, complete) {
    for (int op = 0; op < ML_OP_COUNT; op++) {
        bool found = is_map(op) || ml_ops[op].op_class == ML_CLASS_COLLECTIVE ||
                     op == ML_OP_CONST || op == ML_OP_INPUT || op == ML_OP_PARAM ||
                     op == ML_OP_COORDINATE || op == ML_OP_ATTENTION || op == ML_OP_ATTENTION_GRAD;
        for (int i = 0; i < CASES; i++) found = found || cases[i].op == (ml_op)op;
        if (!found) test_fail("%s has no case", ml_ops[op].name);
    }
}

/* Experts over ranks: no collective between their products, forward or backward. */
static void experts_traffic(fixture *f) {
    ml_ref y = build_experts(f), gradients[SUPPORT_INPUTS], wrt[SUPPORT_INPUTS];
    int count = 0;
    for (int64_t i = 0; i < f->state_count; i++)
        wrt[count++] = ml_graph_add(f->g, ML_OP_STATE, NULL, 0, &i, 1, NULL);
    ml_ref loss = fixture_loss(f, y);
    ml_autodiff(f->g, loss, wrt, count, gradients);
    ml_layout layout = shard_layout(f, "ep4 acts g params g");
    ml_roots roots = {.outputs = &loss, .output_count = 1}, local;
    roots.updates = ML_NEW_ARRAY(f->arena, ml_update, count + 1);
    for (int i = 0; i < count; i++)
        roots.updates[roots.update_count++] = (ml_update){(uint32_t)i, gradients[i]};
    CHECK(shard_check(f, &layout, &roots, 1e-9, true));
    ml_graph *g = shard_program(f, &layout, &roots, &local);
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_ops[ml_graph_node(g, n)->op].op_class == ML_CLASS_COLLECTIVE &&
            ml_type_find(ml_graph_type(g, n), AXIS("h")) >= 0)
            test_fail("%s of something as wide as the hidden layer",
                      ml_ops[ml_graph_node(g, n)->op].name);
    ml_graph_free(g);
}
TEST(shard_ops, experts_traffic) {
    for (int i = 0; i < 8; i++) fixture_run(experts_traffic, (uint64_t)i);
}
