/* Attention under drawn layouts: heads, key/value heads, queries, keys (rings), batches. */
#include <stdio.h>

#include "tests/shard_support.h"

enum { DRAWS = 40 };

typedef struct {
    int kv_heads, queries;
    bool causal, score;
    int window;
} attention_case;

static const attention_case cases[] = {
    {8, 8, false, false, 0}, {8, 8, true, false, 0}, {4, 8, true, false, 3},
    {2, 8, true, true, 0},   {1, 4, false, true, 2}, {4, 4, true, true, 0},
};
enum { CASES = sizeof cases / sizeof *cases };

static const attention_case *current;

static ml_ref parameter(fixture *f, int64_t index, const ml_type *type) {
    return ml_graph_add(f->g, ML_OP_PARAM, NULL, 0, &index, 1, type);
}

/* s * bias[heads] + key position * slope[seq] where the query's position is even. */
static ml_ref make_score(fixture *f, const ml_ref *sources, const ml_attention_args *args) {
    ml_type score;
    ml_attention_score_type(f->g, sources[0], sources[1], args, &score);
    ml_ref s = parameter(f, 0, &score);
    ml_ref bias = parameter(f, 1, ml_graph_type(f->g, sources[3]));
    ml_ref slope = parameter(f, 2, ml_graph_type(f->g, sources[4]));
    ml_ref key = ml_cast(f->g, ml_iota(f->g, args->kv_seq, score.size[score.rank - 1]), ML_F64);
    ml_ref query = ml_iota(f->g, args->seq, score.size[score.rank - 2]);
    ml_ref head = ml_cast(f->g, ml_iota(f->g, args->heads, score.size[score.rank - 3]), ML_F64);
    ml_ref even =
        ml_map2(f->g, ML_OP_EQ, ml_map2(f->g, ML_OP_MOD, query, ml_const_int(f->g, ML_I32, 2)),
                ml_const_int(f->g, ML_I32, 0));
    ml_ref wide = ml_where(f->g, even, ml_map2(f->g, ML_OP_MUL, s, slope), s);
    wide = ml_map2(f->g, ML_OP_ADD, wide, ml_map2(f->g, ML_OP_MUL, bias, head));
    return ml_map2(f->g, ML_OP_ADD, wide,
                   ml_map2(f->g, ML_OP_MUL, key, ml_const(f->g, ML_F64, 0.1)));
}

static ml_ref build(fixture *f) {
    char q[64], k[64];
    bool grouped = current->kv_heads != 8;
    snprintf(q, sizeof q, "b4 s%d h8 d2", current->queries);
    snprintf(k, sizeof k, "b4 t8 %s%d d2", grouped ? "k" : "h", current->kv_heads);
    ml_ref sources[] = {fixture_input(f, ML_F64, q, -2, 2), fixture_input(f, ML_F64, k, -2, 2),
                        fixture_input(f, ML_F64, k, -2, 2), 0, 0};
    ml_attention_args args = {.seq = fixture_axis(f, "s"),
                              .kv_seq = fixture_axis(f, "t"),
                              .heads = fixture_axis(f, "h"),
                              .kv_heads = fixture_axis(f, grouped ? "k" : "h"),
                              .head_dim = fixture_axis(f, "d"),
                              .causal = current->causal,
                              .window = current->window,
                              .scale = 0.7};
    if (!current->score) return ml_attention(f->g, sources, 3, &args);
    sources[3] = fixture_input(f, ML_F64, "h8", -1, 1);
    sources[4] = fixture_input(f, ML_F64, "t8", -1, 1);
    args.score = make_score(f, sources, &args);
    return ml_attention(f->g, sources, 5, &args);
}

static void check(fixture *f) {
    snprintf(f->label, sizeof f->label, "attention case %d", (int)(current - cases));
    ml_ref o = build(f);
    ml_ref y = ml_map2(f->g, ML_OP_ADD, o, ml_out(f->g, o, 1));
    CHECK(shard_check_drawn(f, y, "b s h t k", DRAWS) > DRAWS / 4);
}

TEST(shard_attention, drawn_layouts) {
    for (int i = 0; i < CASES; i++) {
        current = &cases[i];
        fixture_run(check, (uint64_t)i);
    }
}

/* ---- The three ways of context parallelism --------------------------------------------------- */

static void under(fixture *f, const ml_roots *roots, const char *text, int gathers, int exchanges,
                  int shifts) {
    ml_layout layout = shard_layout(f, text);
    ml_roots local;
    CHECK(shard_check(f, &layout, roots, 1e-9, true));
    ml_graph *g = shard_program(f, &layout, roots, &local);
    int64_t counts[] = {shard_count(g, &layout, 0, ML_COLLECTIVE_ALL_GATHER),
                        shard_count(g, &layout, 0, ML_COLLECTIVE_ALL_TO_ALL),
                        shard_count(g, &layout, 0, ML_COLLECTIVE_SHIFT)};
    ml_graph_free(g);
    const int expected[] = {gathers, exchanges, shifts};
    for (int i = 0; i < 3; i++)
        if (!CHECK_EQ_INT(counts[i], expected[i])) test_fail("under %s", text);
}

/* The output is gathered once, as all outputs are. */
static void three_ways(fixture *f) {
    current = &cases[1];
    ml_ref o = build(f);
    ml_roots roots = {.outputs = &o, .output_count = 1};
    under(f, &roots, "cp4 acts s t", 1, 0, 6);
    under(f, &roots, "cp4 acts h s", 1, 0, 0);
    under(f, &roots, "cp2 acts t s", 1, 0, 2);
    ml_ref parts[3];
    for (int i = 0; i < 3; i++) { /* q, k and v as a model has them: along the sequence */
        ml_axis d = fixture_axis(f, "d");
        ml_ref h = fixture_input(f, ML_F64, "b4 s8 d2", -1, 1);
        ml_ref wh = fixture_input(f, ML_F64, "d2 h8 e2", -1, 1);
        parts[i] = ml_dot(f->g, h, wh, &d, 1, ML_F64);
        parts[i] = ml_rename(f->g, parts[i], fixture_axis(f, "e"), d);
        if (i) parts[i] = ml_rename(f->g, parts[i], fixture_axis(f, "s"), fixture_axis(f, "t"));
    }
    ml_attention_args args;
    ml_attention_read(f->g, o, &args);
    ml_ref made = ml_attention(f->g, parts, 3, &args);
    roots.outputs = &made;
    under(f, &roots, "cp4 acts s", 3, 0, 0);
    under(f, &roots, "cp4 acts s t", 1, 0, 6);
}
TEST(shard_attention, three_ways) {
    fixture_run(three_ways, 7);
}
