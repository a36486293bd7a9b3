/* Hash-consing, copying, extraction, the verifier, and memory that runs out. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "tests/graph/support.h"

static void equal_nodes_are_one(ml_graph *g) {
    ml_ref x = graph_input(g, ML_F32, "b2 s4"), y = graph_input(g, ML_F32, "s4");
    ml_graph_set_origin(g, &(ml_origin){"a.lua", 1, "net", NULL});
    ml_ref sum = ml_map2(g, ML_OP_ADD, x, y);
    ml_graph_set_origin(g, &(ml_origin){"b.lua", 2, "", "h"});
    CHECK(ml_map2(g, ML_OP_ADD, x, y) == sum);
    CHECK_TEXT(ml_graph_origin(g, sum)->file, "a.lua");
    CHECK(ml_map2(g, ML_OP_ADD, y, x) != sum);
    ml_axis both[] = {graph_axis(g, "b"), graph_axis(g, "s")};
    ml_axis swapped[] = {both[1], both[0]};
    CHECK(ml_reduce(g, ML_OP_SUM, x, both, 2) == ml_reduce(g, ML_OP_SUM, x, swapped, 2));
    CHECK(ml_cast(g, x, ML_BF16) != ml_cast(g, x, ML_F64));
    CHECK(ml_const(g, ML_F32, 0.1) == ml_const(g, ML_F32, (double)0.1f));
    CHECK(ml_const(g, ML_F32, 0) != ml_const(g, ML_F32, -0.0));
    CHECK(ml_const_int(g, ML_I64, INT64_MAX) != ml_const_int(g, ML_I64, INT64_MAX - 1));
    ml_graph_set_flags(g, ML_NODE_COPY);
    ml_ref copy = ml_map2(g, ML_OP_ADD, x, y);
    CHECK(copy != sum && ml_map2(g, ML_OP_ADD, x, y) == copy);
    ml_graph_set_flags(g, ML_NODE_BACKWARD);
    CHECK(ml_map2(g, ML_OP_ADD, x, y) == sum);
    CHECK(!(ml_graph_node(g, sum)->flags & ML_NODE_BACKWARD));
    ml_graph_mark(g, sum, ML_NODE_GRADIENT);
    CHECK(ml_graph_node(g, sum)->flags & ML_NODE_GRADIENT);
}
TEST(graph_store, equal_nodes_are_one) {
    graph_run(equal_nodes_are_one);
}

static void names(ml_graph *g) {
    ml_axis a = graph_axis(g, "heads"), fresh = ml_axis_fresh(g, "heads");
    CHECK(a == graph_axis(g, "heads") && fresh != a);
    CHECK_TEXT(ml_axis_name(g, fresh), "heads'1");
    CHECK_TEXT(ml_axis_name(g, ml_axis_fresh(g, "heads'1")), "heads'2");
    CHECK_TEXT(ml_axis_name(g, 0), "");
    ml_type t = graph_axes(g, ML_BF16, "b2 s4"), u = graph_axes(g, ML_BF16, "s4 b2");
    CHECK(ml_type_same_axes(&t, &u) && !ml_type_equal(&t, &u));
    CHECK_EQ_INT(ml_type_elements(&t), 8);
    CHECK_EQ_INT(ml_type_bytes(&t), 16);
    CHECK_EQ_INT(ml_type_find(&t, graph_axis(g, "s")), 1);
    CHECK_EQ_INT(ml_type_find(&t, a), -1);
    double value;
    CHECK(ml_graph_constant(g, ml_broadcast(g, ml_const(g, ML_BF16, 1.5), &t), &value));
    CHECK_NEAR(value, 1.5, 0);
    CHECK(!ml_graph_constant(g, graph_input(g, ML_F32, ""), &value));
}
TEST(graph_store, names) {
    graph_run(names);
}

static const char *printed(ml_graph *g, const ml_roots *roots) {
    ml_text text = {.arena = ml_graph_arena(g)};
    ml_graph_print(g, roots, &text);
    return text.text;
}

static void extraction(ml_graph *g) {
    ml_type type = graph_axes(g, ML_F32, "s4");
    ml_graph_set_origin(g, &(ml_origin){"gpt.lua", 7, "blocks.0", NULL});
    int64_t id = ml_graph_add_state(g, &(ml_state){.name = "w", .type = type});
    ml_ref w = ml_graph_add(g, ML_OP_STATE, NULL, 0, &id, 1, NULL);
    ml_map1(g, ML_OP_EXP, w); /* it has no user */
    ml_ref step = ml_map2(g, ML_OP_MUL, w, ml_const(g, ML_F32, 0.5));
    ml_axis s = graph_axis(g, "s");
    ml_ref outputs[] = {ml_reduce(g, ML_OP_SUM, step, &s, 1)};
    ml_update updates[] = {{0, step}};
    ml_roots roots = {outputs, 1, updates, 1};
    ml_graph *program = ml_graph_extract(g, &roots);
    CHECK_TEXT(printed(program, &roots), "%1 f32[s=4] = state 0 w   -- gpt.lua:7 blocks.0\n"
                                         "%2 f32 = const 0.5   -- gpt.lua:7 blocks.0\n"
                                         "%3 f32[s=4] = mul %1 %2   -- gpt.lua:7 blocks.0\n"
                                         "%4 f32 = sum %3 s   -- gpt.lua:7 blocks.0\n"
                                         "output 0 = %4\n"
                                         "state 0 w = %3\n");
    ml_graph_verify(program, &roots, "extract");
    ml_graph_free(program);
}
TEST(graph_store, extraction) {
    graph_run(extraction);
}

/* Functions of attention follow it, into graphs with and without the same tables. */
static void functions_follow(ml_graph *g) {
    ml_ref outputs[] = {graph_sample(g, ML_OP_ATTENTION_GRAD)};
    ml_roots roots = {outputs, 1, NULL, 0};
    ml_graph *program = ml_graph_extract(g, &roots);
    ml_graph_verify(program, &roots, "extract");
    ml_attention_args args;
    ml_attention_read(program, outputs[0], &args);
    CHECK_EQ_INT(ml_graph_node(program, args.score)->op, ML_OP_ADD);
    CHECK(ml_graph_node(program, args.score)->flags & ML_NODE_FUNCTION);
    CHECK_EQ_INT(ml_graph_node(program, args.derivative)->op, ML_OP_PARAM);
    const char *text = printed(program, &roots);
    ml_ref again[] = {outputs[0]};
    ml_graph *second = ml_graph_extract(program, &(ml_roots){again, 1, NULL, 0});
    CHECK_TEXT(printed(second, &(ml_roots){again, 1, NULL, 0}), text);
    ml_graph_free(second);
    ml_graph_free(program);
}
TEST(graph_store, functions_follow) {
    graph_run(functions_follow);
}

static void other_tables(ml_graph *g) {
    graph_axis(g, "unrelated");
    ml_graph *from = ml_graph_new();
    ml_axis s = graph_axis(from, "s");
    ml_graph_set_origin(from, &(ml_origin){"x.lua", 3, "", NULL});
    ml_ref iota = ml_iota(from, s, 4), sum = ml_reduce(from, ML_OP_SUM, iota, &s, 1);
    ml_ref copy = ml_graph_copy(g, from, iota, NULL);
    copy = ml_graph_copy(g, from, sum, &copy);
    CHECK_TEXT(printed(g, NULL), "%1 i32[s=4] = iota s 4   -- x.lua:3\n"
                                 "%2 i32 = sum %1 s   -- x.lua:3\n");
    ml_graph_verify(g, NULL, "copying");
    ml_graph_free(from);
}
TEST(graph_store, other_tables) {
    graph_run(other_tables);
}

static void inlining(ml_graph *g) {
    graph_qkv a = graph_attention(g, ML_F32, 4);
    ml_ref root = graph_score(g, &a, graph_input(g, ML_F32, "h4"));
    ml_ref values[] = {graph_input(g, ML_F32, "t6 s5 h4 b2"), ml_const(g, ML_F32, 3)};
    ml_ref result = ml_graph_inline(g, root, values, 2);
    CHECK_TEXT(graph_type_text(g, result), "f32[t=6, s=5, h=4, b=2]");
    CHECK_EQ_INT(ml_graph_source(g, result, 1), values[1]);
}
TEST(graph_store, inlining) {
    graph_run(inlining);
}

/* ---- The verifier ---------------------------------------------------------------------------- */

typedef struct {
    ml_graph *g;
    ml_roots *roots;
} verification;

static void verify_body(void *argument) {
    verification *v = argument;
    ml_graph_verify(v->g, v->roots, "test");
}

/* Nodes are immutable for all but this test, which breaks them to see that it is noticed. */
static void broken_graphs(ml_graph *g) {
    ml_ref x = graph_input(g, ML_F32, "b2 s4");
    ml_axis s = graph_axis(g, "s");
    ml_ref sum = ml_reduce(g, ML_OP_SUM, x, &s, 1), twice = ml_map2(g, ML_OP_ADD, sum, sum);
    ml_ref outputs[] = {twice};
    ml_roots roots = {outputs, 1, NULL, 0};
    verification v = {g, &roots};
    CHECK_STATUS(ml_protect(verify_body, &v), ML_OK);

    ml_ref *sources = (ml_ref *)ml_graph_sources(g, twice);
    sources[1] = twice;
    CHECK_RAISES(verify_body, &v, ML_INTERNAL,
                 "after test, node %3 f32[b=2] = add: a source does not come before it");
    sources[0] = sources[1] = x;
    CHECK_RAISES(verify_body, &v, ML_INTERNAL,
                 "after test, node %3 f32[b=2] = add: an equal node exists");
    sources[0] = sources[1] = sum;

    int64_t *args = (int64_t *)ml_graph_args(g, sum);
    args[0] = graph_axis(g, "b");
    CHECK_STATUS(ml_protect(verify_body, &v), ML_INTERNAL);
    args[0] = s;

    ml_type *type = (ml_type *)ml_graph_type(g, x);
    type->size[0] = 3;
    CHECK_RAISES(verify_body, &v, ML_INTERNAL,
                 "after test, node %1 f32[b=3, s=4] = input: its operands give f32[b=2, s=4]");
    type->size[0] = 2;

    outputs[0] = 99;
    CHECK_RAISES(verify_body, &v, ML_INTERNAL, "after test: an output is no node");
    outputs[0] = twice;
    CHECK_STATUS(ml_protect(verify_body, &v), ML_OK);
}
TEST(graph_store, broken_graphs) {
    graph_run(broken_graphs);
}

static void wrong_updates(ml_graph *g) {
    ml_type type = graph_axes(g, ML_F32, "s4");
    ml_graph_add_state(g, &(ml_state){.name = "w", .type = type});
    ml_ref x = graph_input(g, ML_F32, "b2 s4"), y = graph_input(g, ML_F32, "s4");
    ml_update updates[] = {{0, y}, {0, x}};
    ml_roots roots = {NULL, 0, updates, 1};
    verification v = {g, &roots};
    CHECK_STATUS(ml_protect(verify_body, &v), ML_OK);
    roots.update_count = 2;
    CHECK_RAISES(verify_body, &v, ML_INTERNAL,
                 "after test, node %1 f32[b=2, s=4] = input: it is assigned to a state of another "
                 "type");
    updates[1].value = y;
    CHECK_RAISES(verify_body, &v, ML_INTERNAL, "after test: a state is updated twice");
}
TEST(graph_store, wrong_updates) {
    graph_run(wrong_updates);
}

static void computed_function(ml_graph *g) {
    graph_qkv a = graph_attention(g, ML_F32, 4);
    ml_ref outputs[] = {graph_score(g, &a, 0)};
    ml_roots roots = {outputs, 1, NULL, 0};
    verification v = {g, &roots};
    CHECK_STATUS(ml_protect(verify_body, &v), ML_INTERNAL);
    CHECK(strstr(ml_error_last()->text, "a parameter is used outside of a function"));
}
TEST(graph_store, computed_function) {
    graph_run(computed_function);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static void build_and_extract(void *argument) {
    ml_graph **graphs = argument;
    ml_graph *g = graphs[0] = ml_graph_new();
    for (int op = 0; op < ML_OP_COUNT; op++) graph_sample(g, op);
    ml_ref x = graph_sample(g, ML_OP_SUM);
    for (int i = 0; i < 300; i++) x = ml_map2(g, ML_OP_ADD, x, ml_const(g, ML_F32, i + 1));
    ml_ref parts[3], outputs[] = {x, graph_sample(g, ML_OP_ATTENTION_GRAD)};
    ml_attention_decompose(g, outputs[1], parts);
    ml_roots roots = {outputs, 2, NULL, 0};
    graphs[1] = ml_graph_extract(g, &roots);
    ml_graph_verify(graphs[1], &roots, "extract");
}

/* Every allocation fails once: an error each time, and nothing is left behind. */
TEST(graph_store, out_of_memory) {
    int64_t blocks = ml_live_blocks();
    int64_t n = 1;
    for (ml_status status = ML_NO_MEMORY; status != ML_OK; n++) {
        ml_graph *graphs[2] = {NULL, NULL};
        ml_memory_fail_at(n);
        status = ml_protect(build_and_extract, graphs);
        ml_memory_fail_at(0);
        if (status != ML_OK) CHECK_EQ_INT(status, ML_NO_MEMORY);
        ml_graph_free(graphs[1]);
        ml_graph_free(graphs[0]);
        if (!CHECK_EQ_INT(ml_live_blocks(), blocks) || n > 10000) break;
    }
    CHECK(n > 10); /* it did fail */
}

/* Near-linear: half a million nodes in moments, however many share a hash bucket. */
static void large_graph(ml_graph *g) {
    enum { LAYERS = 1000, NODES = 100 };
    ml_axis s = graph_axis(g, "s");
    ml_ref x = graph_input(g, ML_F32, "b2 s4");
    for (int layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < NODES; i += 4) {
            ml_ref mean = ml_reduce(g, ML_OP_MAX, x, &s, 1);
            ml_ref e = ml_map1(g, ML_OP_EXP, ml_map2(g, ML_OP_SUB, x, mean));
            x = ml_map2(g, ML_OP_MUL, e, x);
        }
    CHECK(ml_graph_count(g) > LAYERS * NODES);
    ml_roots roots = {&x, 1, NULL, 0};
    ml_graph *program = ml_graph_extract(g, &roots);
    ml_graph_verify(program, &roots, "extract");
    CHECK_EQ_INT(ml_graph_count(program), ml_graph_count(g));
    ml_graph_free(program);
}
TEST(graph_store, large_graph) {
    graph_run(large_graph);
}
