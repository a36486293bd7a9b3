/* What sharded programs become before they are lowered: halves of the batch that take turns (the
 * order of what they compute and exchange, what plans choose, and that ranks on the CPU learn what
 * one rank does), and memory orders that need no copies around collectives. */
#include <stdlib.h>
#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "runtime/optimize/optimize.h"
#include "tests/passes/support.h"
#include "tests/process/support.h"

enum { LAYERS = 3, RANKS = 2 };

static ml_ref collective(fixture *f, ml_op op, ml_ref x, const char *axes) {
    const int64_t args[] = {0, RANKS, ML_COMBINE_SUM};
    ml_type lying = fixture_type(f, ML_F32, axes);
    x = ml_permute(f->g, x, &lying);
    return ml_graph_add(f->g, op, &x, 1, args, op == ML_OP_REDUCE_SCATTER ? 3 : 2, NULL);
}

/* Layers of a model whose rows lie in parts between them: x + scatter(tanh(gather(x) . up) . down).
 */
static ml_ref make_layers(fixture *f, ml_ref up, ml_ref down) {
    ml_axis embed = fixture_axis(f, "embed"), hidden = fixture_axis(f, "hidden");
    ml_ref x = fixture_input(f, ML_F32, "batch4 seq3 embed5", -1, 1);
    for (int i = 0; i < LAYERS; i++) {
        ml_type lying = fixture_type(f, ML_F32, "batch4 seq6 embed5");
        ml_ref whole = collective(f, ML_OP_ALL_GATHER, x, "seq3 batch4 embed5");
        whole = ml_permute(f->g, whole, &lying);
        ml_ref inner = ml_map1(f->g, ML_OP_TANH, ml_dot(f->g, whole, up, &embed, 1, ML_F32));
        ml_ref y = ml_dot(f->g, inner, down, &hidden, 1, ML_F32);
        ml_ref part = collective(f, ML_OP_REDUCE_SCATTER, y, "seq6 batch4 embed5");
        x = ml_map2(f->g, ML_OP_ADD, x, ml_permute(f->g, part, ml_graph_type(f->g, x)));
    }
    return x;
}

/* A letter for each product (D), gather (g) and scatter (s), in order. */
static char *order_of(fixture *f, const ml_graph *g) {
    ml_text text = {.arena = f->arena};
    ml_text_add(&text, "%s", "");
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        int op = ml_graph_node(g, n)->op;
        if (op == ML_OP_DOT) ml_text_add(&text, "D");
        if (op == ML_OP_ALL_GATHER) ml_text_add(&text, "g");
        if (op == ML_OP_REDUCE_SCATTER) ml_text_add(&text, "s");
    }
    return text.text;
}

static ml_graph *halved(fixture *f, ml_roots *roots, ml_ref *outputs, int count) {
    *roots = (ml_roots){.outputs = outputs, .output_count = count};
    ml_graph *g = ml_half_batches(f->g, roots, fixture_axis(f, "batch"), 4);
    ml_graph_verify(g, roots, "halves");
    return g;
}

static void check_turns(fixture *f) {
    ml_ref up = fixture_input(f, ML_F32, "embed5 hidden7", -1, 1);
    ml_ref down = fixture_input(f, ML_F32, "hidden7 embed5", -1, 1), outputs[2];
    ml_roots roots;
    ml_ref x = make_layers(f, up, down);
    outputs[0] = x;
    ml_graph *g = halved(f, &roots, outputs, 1);
    CHECK_TEXT(order_of(f, g), "gDDsggDDsgDDsgDDsgDDsDDs");
    ml_graph_free(g);
    ml_axis axes[] = {fixture_axis(f, "batch"), fixture_axis(f, "seq"), fixture_axis(f, "embed")};
    outputs[0] = ml_reduce(f->g, ML_OP_SUM, x, axes, 3); /* the loss, which is added */
    g = halved(f, &roots, outputs, 1);
    for (ml_ref n = 1; n < ml_graph_count(g); n++) CHECK(ml_graph_node(g, n)->op != ML_OP_CONCAT);
    ml_graph_free(g);
}

TEST(plan_half_batch, turns) {
    fixture_run(check_turns, 3);
}

static int permutes(const ml_graph *g) {
    int count = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        count += ml_graph_node(g, n)->op == ML_OP_PERMUTE;
    return count;
}

/* Only the first operand and the last result are permuted. */
static void check_orders(fixture *f) {
    ml_ref up = fixture_input(f, ML_F32, "embed5 hidden7", -1, 1);
    ml_ref down = fixture_input(f, ML_F32, "hidden7 embed5", -1, 1);
    ml_ref x = make_layers(f, up, down);
    ml_roots roots = {.outputs = &x, .output_count = 1};
    CHECK(permutes(f->g) >= 4 * LAYERS);
    ml_graph *g = ml_propagate_layout(f->g, &roots);
    ml_graph_verify(g, &roots, "sink orders");
    CHECK_EQ_INT(permutes(g), 2);
    CHECK(ml_permuted_bytes(g, NULL) < ml_permuted_bytes(f->g, NULL));
    ml_graph_free(g);
}

TEST(plan_half_batch, orders) {
    fixture_run(check_orders, 4);
}

/* What continues from a sum of its own segment, or from what is whole, has both halves before it.
 */
static void check_waits(fixture *f) {
    ml_axis batch = fixture_axis(f, "batch"), embed = fixture_axis(f, "embed");
    ml_ref x = fixture_input(f, ML_F64, "batch4 embed6", -1, 1);
    ml_ref w = fixture_input(f, ML_F64, "embed6 hidden7", -1, 1);
    ml_ref y = ml_dot(f->g, x, w, &embed, 1, ML_F64);
    ml_ref sum = ml_reduce(f->g, ML_OP_SUM, y, &batch, 1), scaled = ml_map1(f->g, ML_OP_TANH, sum);
    ml_ref centered = ml_map2(f->g, ML_OP_SUB, y, scaled);
    const int64_t along[] = {batch, 0}; /* a running sum over the axis itself */
    ml_ref running = ml_graph_add(f->g, ML_OP_CUMSUM, &centered, 1, along, 2, NULL);
    ml_ref nodes[] = {ml_map2(f->g, ML_OP_MUL, running, y), sum,
                      ml_dot(f->g, x, ml_map1(f->g, ML_OP_SIN, running), &batch, 1, ML_F64)};
    fixture_check_pass(f, "halves", nodes, 3, 1e-12);
    CHECK_EQ_INT(fixture_count_after(f, "halves", nodes, 3, ML_OP_CUMSUM), 1);
}

TEST(plan_half_batch, what_needs_both) {
    fixture_run(check_waits, 5);
}

/* A weight whose parts are put together along an axis of its result: rows of a head stay together,
 * of which attention is made. */
static void check_rows_of_heads(fixture *f) {
    ml_axis embed = fixture_axis(f, "embed");
    ml_ref x = fixture_input(f, ML_F32, "seq6 batch4 embed5", -1, 1);
    ml_ref w = fixture_input(f, ML_F32, "dim8 heads2 embed5", -1, 1);
    ml_type lying = fixture_type(f, ML_F32, "batch4 seq6 embed5");
    ml_type heads = fixture_type(f, ML_F32, "heads2 dim8 embed5");
    ml_ref y =
        ml_dot(f->g, ml_permute(f->g, x, &lying), ml_permute(f->g, w, &heads), &embed, 1, ML_F32);
    ml_roots roots = {.outputs = &y, .output_count = 1};
    ml_graph *g = ml_propagate_layout(f->g, &roots);
    ml_graph_verify(g, &roots, "sink orders");
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->op == ML_OP_DOT)
            CHECK_TEXT(fixture_type_text(f, g, n), "f32[seq=6, batch=4, heads=2, dim=8]");
    ml_graph_free(g);
}

TEST(plan_half_batch, rows_of_heads) {
    fixture_run(check_rows_of_heads, 8);
}

/* The logsumexp of attention whose operands moved has the layout that its readers expect. */
static void check_logsumexp(fixture *f) {
    ml_type lying = fixture_type(f, ML_F64, "outer2 batch3 seq4 heads2 dim4");
    ml_type keys = fixture_type(f, ML_F64, "outer2 batch3 kv_seq4 heads2 dim4");
    ml_ref q = fixture_input(f, ML_F64, "batch3 outer2 seq4 heads2 dim4", -1, 1);
    ml_ref k = fixture_input(f, ML_F64, "batch3 outer2 kv_seq4 heads2 dim4", -1, 1);
    ml_ref k1 = ml_permute(f->g, k, &keys);
    ml_ref sources[] = {ml_permute(f->g, q, &lying), k1, k1};
    ml_attention_args args = {.seq = fixture_axis(f, "seq"),
                              .kv_seq = fixture_axis(f, "kv_seq"),
                              .heads = fixture_axis(f, "heads"),
                              .kv_heads = fixture_axis(f, "heads"),
                              .head_dim = fixture_axis(f, "dim"),
                              .scale = 0.5};
    ml_ref o = ml_attention(f->g, sources, 3, &args), lse = ml_out(f->g, o, 1);
    ml_ref nodes[] = {o, lse, ml_map1(f->g, ML_OP_EXP, lse)};
    fixture_check_pass(f, "propagate_layout", nodes, 3, 1e-9);
}

TEST(plan_half_batch, logsumexp) {
    fixture_run(check_logsumexp, 6);
}

/* Rows added along an axis of the same name, of which there are not as many. */
static void check_rows_of_a_name(fixture *f) {
    ml_ref rows = fixture_input(f, ML_F64, "batch4 embed6", -1, 1);
    ml_ref index = fixture_index(f, "batch4", 10);
    ml_type type = fixture_type(f, ML_F64, "batch10 embed6");
    ml_ref added = ml_scatter_add(f->g, index, rows, fixture_axis(f, "batch"), &type);
    ml_ref nodes[] = {ml_map2(f->g, ML_OP_MUL, rows, rows), added};
    fixture_check_pass(f, "halves", nodes, 2, 1e-12);
}

TEST(plan_half_batch, rows_of_a_name) {
    fixture_run(check_rows_of_a_name, 7);
}

/* How many gathers a step has. */
static long gathers(process_room *room, const char *knobs, const char *arguments) {
    static const char key[] = "\"all-gather\":{\"count\":";
    process_result r = process_run(
        room, 0, knobs, "check --json \"$ROOT/models/gpt.lua\" --device h200 %s", arguments);
    const char *at = strstr(r.output, key);
    REQUIRE(at != NULL);
    return strtol(at + strlen(key), NULL, 10);
}

/* By halves where that hides much: activations between products that are long enough. */
static void choices(process_room *room) {
    static const struct {
        const char *arguments;
        bool halves;
    } cases[] = {
        {"preset=gpt-1.3b layers=4 batch=16 --mesh tp=2", true},
        {"preset=gpt-1.3b layers=4 batch=16 --mesh cp=2 --layout zero=false", true},
        {"preset=gpt-1.3b layers=4 batch=16 --mesh dp=2", false},
        {"preset=gpt-1.3b layers=4 batch=2 --mesh dp=2,tp=2", false},
        {"batch=16 --mesh tp=2", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        long never = gathers(room, "MLUA_HALVES=0", cases[i].arguments);
        long chosen = gathers(room, "", cases[i].arguments);
        EXPECT((chosen > 3 * never / 2) == cases[i].halves,
               "%s: %ld gathers, and %ld without halves", cases[i].arguments, chosen, never);
    }
}

TEST(plan_half_batch, choices) {
    process_in_room(choices);
}

/* Attention reads rows of heads in every layout: nowhere do its slow kernels for any strides serve.
 */
static void fast_attention(process_room *room) {
    static const char *const meshes[] = {"tp=2", "dp=2,tp=2", "dp=4,tp=2", "dp=2,cp=2,tp=2"};
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        process_result r = process_run(room, 0, "MLUA_DEBUG=3",
                                       "check \"$ROOT/models/gpt.lua\" --device h200 "
                                       "preset=gpt-1.3b layers=4 batch=32 --mesh %s",
                                       meshes[i]);
        REQUIRE(strstr(r.output, " attention attention_grad") != NULL);
        EXPECT(!strstr(r.output, "attention_grad dq"), "%s: general kernels", meshes[i]);
    }
}

TEST(plan_half_batch, fast_attention) {
    process_in_room(fast_attention);
}

enum { STEPS = 4 };
#define MODEL                                                                                      \
    "\"$ROOT/models/gpt.lua\" layers=2 embed=32 heads=4 seq=16 batch=8 vocab=256 sample=0 "        \
    "warmup=1 "                                                                                    \
    "%s %s"

static void ranks(process_room *room) {
    static const struct {
        const char *ranks, *settings;
    } cases[] = {{"-n 2 --mesh tp=2", ""},
                 {"-n 2 --mesh cp=2", "accum=2"},
                 {"-n 2 --mesh tp=2", "dropout=0.1"},
                 {"-n 4 --mesh dp=2,tp=2", "layout=fsdp"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *settings = cases[i].settings;
        process_step *one = process_train(room, STEPS, "MLUA_VERIFY=1",
                                          ml_arena_format(room->arena, MODEL, "", settings));
        process_step *many =
            process_train(room, STEPS, "MLUA_VERIFY=1 MLUA_HALVES=1 MLUA_OVERLAP=1",
                          ml_arena_format(room->arena, MODEL, cases[i].ranks, settings));
        process_compare(many, one, STEPS, 1e-5, cases[i].ranks);
    }
}

TEST(plan_half_batch, ranks) {
    process_in_room(ranks);
}
