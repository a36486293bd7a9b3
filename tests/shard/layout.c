/* The rule: placements, what they print as, what is refused, parts cut out and put back; programs
 * of any number of layers and ranks. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "runtime/compile.h"
#include "tests/shard/support.h"

static const char *placed(fixture *f, const ml_layout *layout, const char *axes, int kind) {
    ml_type type = fixture_type(f, ML_BF16, axes);
    ml_placements at = ml_layout_place(layout, f->g, &type, kind, "it");
    ml_text text = {.arena = f->arena};
    ml_layout_print_type(layout, f->g, &type, &at, &text);
    return text.text;
}

static const char *local(fixture *f, const ml_layout *layout, const char *axes, int kind) {
    ml_type type = fixture_type(f, ML_BF16, axes);
    ml_placements at = ml_layout_place(layout, f->g, &type, kind, "it");
    ml_type part = ml_layout_local(layout, &type, &at);
    ml_text text = {.arena = f->arena};
    ml_type_print(f->g, &part, &text);
    return text.text;
}

static void placements(fixture *f) {
    ml_layout layout = shard_layout(f, "dp4 acts batch flat; cp2 acts seq; one1 acts embed; "
                                       "tp2 params heads ffn acts heads ffn seq");
    CHECK_EQ_INT(ml_layout_ranks(&layout), 16);
    const int expected[] = {2, 1, 0, 1};
    for (int i = 0; i < 4; i++)
        CHECK_EQ_INT(ml_layout_coordinate(&layout, 2 * 4 + 3, i), expected[i]);
    CHECK_TEXT(placed(f, &layout, "batch8 seq16 embed4", -1),
               "bf16[batch=8@dp, seq=16@cp@tp, embed=4]");
    CHECK_TEXT(local(f, &layout, "batch8 seq16 embed4", -1), "bf16[batch=2, seq=4, embed=4]");
    CHECK_TEXT(placed(f, &layout, "batch8 seq16 heads4", -1),
               "bf16[batch=8@dp, seq=16@cp, heads=4@tp]");
    CHECK_TEXT(placed(f, &layout, "embed8 ffn16", ML_STATE_PARAMETER), "bf16[embed=8, ffn=16@tp]");
    CHECK_TEXT(placed(f, &layout, "embed8 ffn16", ML_STATE_OPTIMIZER),
               "bf16[embed=8@dp, ffn=16@tp]");
    CHECK_TEXT(placed(f, &layout, "embed6 ffn16", ML_STATE_OPTIMIZER),
               "bf16[embed=6, ffn=16@tp@dp]");
    CHECK_TEXT(placed(f, &layout, "heads8", ML_STATE_OPTIMIZER), "bf16[heads=8@tp@dp]");
    CHECK_TEXT(placed(f, &layout, "embed6 heads4", ML_STATE_OPTIMIZER),
               "bf16[embed=6@dp, heads=4@tp]");
    CHECK_TEXT(local(f, &layout, "embed6 heads4", ML_STATE_OPTIMIZER), "bf16[embed=2, heads=2]");
    CHECK_TEXT(placed(f, &layout, "embed6 heads4", ML_STATE_PARAMETER),
               "bf16[embed=6, heads=4@tp]");
    CHECK_TEXT(placed(f, &layout, "embed3 seq7 heads4", ML_STATE_OPTIMIZER),
               "bf16[embed=3, seq=7@dp, heads=4@tp]");
    CHECK_TEXT(placed(f, &layout, "embed3 heads4", ML_STATE_OPTIMIZER),
               "bf16[embed=3, heads=4@tp]");
    CHECK_TEXT(placed(f, &layout, "embed6 vocab8", ML_STATE_OPTIMIZER),
               "bf16[embed=6, vocab=8@dp]");
    CHECK_TEXT(placed(f, &layout, "", ML_STATE_OPTIMIZER), "bf16");
    /* Filled up ends; and what has fewer elements than there are ranks to split it. */
    CHECK_TEXT(placed(f, &layout, "batch9 heads7", -1), "bf16[batch=9@dp, heads=7@tp]");
    CHECK_TEXT(local(f, &layout, "batch9 heads7", -1), "bf16[batch=3, heads=4]");
    CHECK_TEXT(local(f, &layout, "batch5 heads1", -1), "bf16[batch=2, heads=1]");
    CHECK_TEXT(local(f, &layout, "batch1021 heads513", -1), "bf16[batch=256, heads=272]");
    CHECK_TEXT(local(f, &layout, "batch1019 heads509", -1), "bf16[batch=255, heads=255]");
    CHECK_TEXT(placed(f, &layout, "batch3 seq3", -1), "bf16[batch=3, seq=3@cp]");
    CHECK_TEXT(placed(f, &layout, "embed5 heads7", ML_STATE_OPTIMIZER),
               "bf16[embed=5@dp, heads=7@tp]");
    CHECK_TEXT(shard_layout_text(f, &layout),
               "dp=4 acts(batch) flat, cp=2 acts(seq), one=1 acts(embed), "
               "tp=2 params(heads ffn) acts(heads ffn seq)");
    ml_placements partial = {{{ML_SPLIT, 0}, {ML_PARTIAL_SUM, 0}, {0, 0}, {ML_PARTIAL_MAX, 0}}};
    ml_type type = fixture_type(f, ML_F32, "batch8");
    ml_text text = {.arena = f->arena};
    ml_layout_print_type(&layout, f->g, &type, &partial, &text);
    CHECK_TEXT(text.text, "f32[batch=8@dp] partial(cp) partial max(tp)");
}
TEST(shard_layout, placements) {
    fixture_run(placements, 1);
}

/* ---- Refused --------------------------------------------------------------------------------- */

typedef struct {
    fixture *f;
    ml_layout layout;
    const char *axes;
    int kind;
} placing;

static void place(void *argument) {
    placing *p = argument;
    ml_type type = fixture_type(p->f, ML_F32, p->axes);
    (void)ml_layout_place(&p->layout, p->f->g, &type, p->kind, "state \"wk\"");
}

static void indivisible(fixture *f) {
    placing p = {f, shard_layout(f, "tp2 params kv_heads; ep2 params kv_heads"),
                 "embed16 kv_heads6", 0};
    CHECK_RAISES(place, &p, ML_INVALID,
                 "cannot split \"kv_heads\" of state \"wk\", 6 elements, over tp=2 x ep=2");
    CHECK_TEXT(ml_error_last()->help,
               "sizes that divide: ep=1, 3; or leave \"kv_heads\" out of what ep splits");
    p = (placing){f, shard_layout(f, "dp2 acts seq; cp2 acts seq; tp3 acts seq"), "seq16", -1};
    CHECK_RAISES(place, &p, ML_INVALID,
                 "cannot split \"seq\" of state \"wk\", 16 elements, over dp=2 x cp=2 x tp=3");
    CHECK_TEXT(ml_error_last()->help,
               "sizes that divide: tp=1, 2, 4; or leave \"seq\" out of what tp splits");
}
TEST(shard_layout, indivisible) {
    fixture_run(indivisible, 1);
}

typedef struct {
    fixture *f;
    ml_layout layout;
    ml_roots roots;
} sharding;

static void run_shard(void *argument) {
    sharding *s = argument;
    ml_graph_free(ml_shard(s->f->g, &s->roots, &s->layout));
}

/* The error names the tensor; the roots stay as they were. */
static void refused_program(fixture *f) {
    ml_ref w = fixture_state(f, ML_F64, "embed7 heads6"),
           x = fixture_input(f, ML_F64, "embed7", 0, 1);
    ml_axis embed = fixture_axis(f, "embed");
    ml_ref y = ml_dot(f->g, x, w, &embed, 1, ML_F64);
    sharding s = {f,
                  shard_layout(f, "tp2 params heads; ep2 params heads"),
                  {.outputs = &y, .output_count = 1}};
    CHECK_RAISES(run_shard, &s, ML_INVALID,
                 "cannot split \"heads\" of parameter \"w0\", 6 elements, over tp=2 x ep=2");
    ml_ref before = y;
    s.layout = shard_layout(f, "dp3 acts embed; cp2 acts embed");
    CHECK_RAISES(run_shard, &s, ML_INVALID,
                 "cannot split \"embed\" of input \"x0\", 7 elements, over dp=3 x cp=2");
    CHECK_EQ_INT(y, before);
}
TEST(shard_layout, refused_program) {
    fixture_run(refused_program, 1);
}

/* ---- Parts ----------------------------------------------------------------------------------- */

static void parts(fixture *f) {
    static const char *const layouts[] = {"x2 acts a; y3 acts b", "x2 acts a; y2 acts a; z3 acts b",
                                          "x4 acts c", "x2 acts d; y2 acts c a"};
    ml_type type = fixture_type(f, ML_I32, "a4 b6 c8");
    int32_t whole[4 * 6 * 8], copy[4 * 6 * 8], part[4 * 6 * 8];
    for (int i = 0; i < 4 * 6 * 8; i++) whole[i] = i;
    for (int i = 0; i < 4; i++) {
        ml_layout layout = shard_layout(f, layouts[i]);
        ml_placements at = ml_layout_place(&layout, f->g, &type, -1, "it");
        ml_type held = ml_layout_local(&layout, &type, &at);
        memset(copy, 0xff, sizeof copy);
        for (int64_t rank = ml_layout_ranks(&layout) - 1; rank >= 0; rank--) {
            ml_shard_cut(&layout, &type, &at, rank, sizeof *part, whole, part);
            ml_shard_paste(&layout, &type, &at, rank, sizeof *part, part, copy);
        }
        CHECK(memcmp(whole, copy, sizeof copy) == 0);
        if (i != 1) continue;
        /* rank 7: x=1, y=0, z=1: the third quarter of a, the second third of b */
        ml_shard_cut(&layout, &type, &at, 7, sizeof *part, whole, part);
        CHECK_EQ_INT(ml_type_elements(&held), 16);
        CHECK_EQ_INT(part[0], 2 * 48 + 2 * 8);
        CHECK_EQ_INT(part[15], 2 * 48 + 3 * 8 + 7);
    }
    /* 7 elements in parts of 2: the last has one, and what fills it up is 0. */
    ml_layout uneven = shard_layout(f, "x4 flat; y2 params c");
    ml_type odd = fixture_type(f, ML_I32, "b7 c2");
    ml_placements at = ml_layout_place(&uneven, f->g, &odd, ML_STATE_OPTIMIZER, "it");
    memset(copy, 0xff, sizeof copy);
    for (int64_t rank = 7; rank >= 0; rank--) {
        memset(part, 0xff, sizeof part);
        ml_shard_cut(&uneven, &odd, &at, rank, sizeof *part, whole, part);
        CHECK_EQ_INT(part[0], 4 * (rank / 2) + rank % 2);
        CHECK_EQ_INT(part[1], rank < 6 ? part[0] + 2 : 0);
        CHECK_EQ_INT(part[2], -1);
        ml_shard_paste(&uneven, &odd, &at, rank, sizeof *part, part, copy);
    }
    CHECK(memcmp(whole, copy, 14 * sizeof *copy) == 0 && copy[14] == -1);
    int32_t number = 5, held = 0;
    ml_layout layout = shard_layout(f, "x2 acts a");
    ml_shard_cut(&layout, &(ml_type){.dtype = ML_I32}, &(ml_placements){0}, 1, 4, &number, &held);
    CHECK_EQ_INT(held, 5);
}
TEST(shard_layout, parts) {
    fixture_run(parts, 1);
}

/* ---- Programs -------------------------------------------------------------------------------- */

static void one_rank(fixture *f) {
    ml_ref x = fixture_input(f, ML_F64, "a4", 0, 1), y = ml_map1(f->g, ML_OP_EXP, x);
    ml_roots roots = {.outputs = &y, .output_count = 1}, local;
    ml_layout layout = shard_layout(f, "dp1 acts a; tp1 params a");
    ml_graph *g = shard_program(f, &layout, &roots, &local);
    CHECK_EQ_INT(ml_graph_count(g), 3);
    CHECK_EQ_INT(ml_graph_node(g, local.outputs[0])->op, ML_OP_EXP);
    ml_graph_free(g);
}
TEST(shard_layout, one_rank) {
    fixture_run(one_rank, 1);
}

/* Whichever allocation fails, the pass raises and leaves nothing behind. */
static void out_of_memory(fixture *f) {
    ml_ref w = fixture_state(f, ML_F64, "a4 b8"), x = fixture_input(f, ML_F64, "c4 a4", 0, 1);
    ml_axis a = fixture_axis(f, "a");
    ml_ref y = ml_map1(f->g, ML_OP_EXP, ml_dot(f->g, x, w, &a, 1, ML_F64));
    const ml_ref before = y;
    sharding s = {f, shard_layout(f, "x2 acts a; y2 params b"), {.outputs = &y, .output_count = 1}};
    ml_status status = ML_NO_MEMORY;
    int n = 1;
    for (; n < 1000 && status != ML_OK; n++) {
        y = before;
        ml_memory_fail_at(n);
        status = ml_protect(run_shard, &s);
        ml_memory_fail_at(0);
        if (status != ML_OK) CHECK_EQ_INT(status, ML_NO_MEMORY);
    }
    CHECK(n > 3 && n < 1000);
}
TEST(shard_layout, out_of_memory) {
    fixture_run(out_of_memory, 1);
}

static const char *output_type(fixture *f, const ml_graph *g, ml_ref n) {
    ml_text text = {.arena = f->arena};
    ml_type_print(g, ml_graph_type(g, n), &text);
    return text.text;
}

/* The last outputs stay where the rule puts them: a partial sum is scattered and not made whole,
 * and a plan gives the parts in the order of the axes. */
static void kept_outputs(fixture *f) {
    ml_ref w = fixture_state(f, ML_F32, "a4 b8"), x = fixture_input(f, ML_F32, "c8 a4", 0, 1);
    ml_axis a = fixture_axis(f, "a");
    ml_ref y = ml_dot(f->g, x, w, &a, 1, ML_F32);
    ml_ref outputs[] = {y, y, ml_slice(f->g, y, fixture_axis(f, "c"), 0, 3)};
    ml_layout layout = shard_layout(f, "x2 params a acts c a");
    ml_roots roots = {.outputs = outputs, .output_count = 3, .kept = 2}, local;
    ml_graph *g = shard_program(f, &layout, &roots, &local);
    CHECK_TEXT(output_type(f, g, local.outputs[0]), "f32[c=8, b=8]");
    CHECK_TEXT(output_type(f, g, local.outputs[1]), "f32[c=4, b=8]");
    CHECK_TEXT(output_type(f, g, local.outputs[2]), "f32[c=2, b=8]");
    CHECK_EQ_INT(local.kept, 2);
    ml_graph_free(g);
    roots = (ml_roots){.outputs = outputs, .output_count = 1, .kept = 1};
    g = shard_program(f, &layout, &roots, &local);
    CHECK_EQ_INT(shard_count(g, &layout, 0, ML_COLLECTIVE_ALL_REDUCE), 0);
    CHECK_EQ_INT(shard_count(g, &layout, 0, ML_COLLECTIVE_ALL_GATHER),
                 1); /* of w or x: c is kept */
    ml_graph_free(g);
    ml_plan *plan;
    ml_target target = {.kind = ML_TARGET_C};
    roots = (ml_roots){.outputs = outputs, .output_count = 3, .kept = 2};
    ml_compile(&(ml_compile_input){f->g, &roots, &target, &layout}, &plan);
    CHECK_TEXT(output_type(f, plan->graph, plan->roots.outputs[0]), "f32[c=8, b=8]");
    CHECK_TEXT(output_type(f, plan->graph, plan->roots.outputs[1]), "f32[c=4, b=8]");
    ml_plan_free(plan);
}
TEST(shard_layout, kept_outputs) {
    fixture_run(kept_outputs, 1);
}
