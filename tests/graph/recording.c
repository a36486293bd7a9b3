/* Recordings: a repetition makes the nodes that the recorded code makes for other leaves. */
#include "runtime/graph/recording.h"

#include "tests/graph/support.h"

/* p - 0.5 * (m * 0.9 + g) * random(key), and the new m; the read of m comes from the middle. */
static void step(ml_graph *g, const ml_leaf *leaves, ml_ref results[2]) {
    int64_t p_id = leaves[0].value, m_id = leaves[2].value;
    ml_ref p = ml_graph_add(g, ML_OP_STATE, NULL, 0, &p_id, 1, NULL);
    ml_ref key = ml_const_int(g, ML_I64, leaves[3].value);
    ml_ref draw = ml_graph_add(g, ML_OP_RANDOM, &key, 1, NULL, 0, ml_graph_type(g, p));
    ml_ref m = ml_graph_add(g, ML_OP_STATE, NULL, 0, &m_id, 1, NULL);
    m = ml_map2(g, ML_OP_MUL, m, ml_const(g, ML_F32, 0.9));
    results[1] = ml_map2(g, ML_OP_ADD, m, (ml_ref)leaves[1].value);
    ml_ref change = ml_map2(g, ML_OP_MUL, ml_const(g, ML_F32, 0.5), results[1]);
    results[0] = ml_map2(g, ML_OP_SUB, p, ml_map2(g, ML_OP_MUL, change, draw));
}

/* A parameter, its gradient, a slot and a key. */
static void new_leaves(ml_graph *g, const char *axes, int64_t key, ml_leaf leaves[4]) {
    ml_state p = {.kind = ML_STATE_PARAMETER, .type = graph_axes(g, ML_F32, axes)}, m = p;
    m.kind = ML_STATE_OPTIMIZER;
    leaves[0] = (ml_leaf){ML_RECORDED_STATE, ml_graph_add_state(g, &p)};
    leaves[1] = (ml_leaf){ML_RECORDED_NODE, graph_input(g, ML_F32, axes)};
    leaves[2] = (ml_leaf){ML_RECORDED_STATE, ml_graph_add_state(g, &m)};
    leaves[3] = (ml_leaf){ML_RECORDED_NUMBER, key};
}

static ml_recording *record(ml_graph *g, const ml_leaf leaves[4]) {
    ml_ref results[2];
    ml_recording *r = ml_recording_open(g);
    CHECK(r != NULL && ml_recording_open(g) == NULL);
    step(g, leaves, results);
    ml_recording_end(g, r);
    CHECK(ml_recording_close(g, r, leaves, 4, results, 2));
    return r;
}

static void repeats(ml_graph *g) {
    ml_leaf first[4], second[4], wider[4];
    new_leaves(g, "a2 b4", 1234567890123, first);
    new_leaves(g, "a2 b4", 9876543210987, second);
    new_leaves(g, "a2 b8", 5, wider);
    ml_recording *r = record(g, first);
    CHECK(ml_leaves_key(g, first, 4) == ml_leaves_key(g, second, 4));
    CHECK(ml_leaves_key(g, first, 4) != ml_leaves_key(g, wider, 4));
    CHECK(ml_recording_fits(g, r, second, 4) && !ml_recording_fits(g, r, second, 3));
    CHECK(!ml_recording_fits(g, r, wider, 4));
    const ml_leaf swapped[4] = {second[2], second[1], second[0], second[3]}; /* other kinds */
    CHECK(!ml_recording_fits(g, r, swapped, 4));

    ml_graph_set_origin(g, &(ml_origin){"b.lua", 7, "", NULL});
    const uint32_t before = ml_graph_count(g);
    const ml_ref *made = ml_recording_repeat(g, r, second);
    const uint32_t after = ml_graph_count(g);
    CHECK_EQ_INT(after - before, 9); /* two reads, a key, a draw, five of arithmetic */
    CHECK_TEXT(ml_graph_origin(g, made[0])->file, "b.lua");
    ml_ref wanted[2];
    step(g, second, wanted); /* finds them all */
    CHECK_EQ_INT(ml_graph_count(g), after);
    CHECK(made[0] == wanted[0] && made[1] == wanted[1]);
    made = ml_recording_repeat(g, r, first);
    CHECK_EQ_INT(ml_graph_count(g), after);
    ml_recording_free(r);
}
TEST(graph_recording, repeats_what_was_made) {
    graph_run(repeats);
}

static void refuses(ml_graph *g) {
    graph_qkv a = graph_attention(g, ML_F32, 2);
    ml_ref one = ml_const(g, ML_F32, 1), results[1];
    a.args.score = graph_score(g, &a, one);
    ml_recording *r = ml_recording_open(g);
    results[0] = ml_attention(g, (ml_ref[]){a.q, a.k, a.v, one}, 4, &a.args);
    ml_recording_end(g, r);
    const ml_leaf q = {ML_RECORDED_NODE, a.q}, twice[2] = {q, q};
    CHECK(!ml_recording_close(g, r, &q, 1, results, 1)); /* it has a function */
    ml_recording_free(r);
    r = ml_recording_open(g);
    results[0] = ml_map2(g, ML_OP_ADD, a.q, a.q);
    ml_recording_end(g, r);
    CHECK(!ml_recording_close(g, r, twice, 2, results, 1)); /* which of the two? */
    ml_recording_free(r);

    const ml_ref square = ml_map2(g, ML_OP_MUL, a.q, a.q);
    const ml_leaf leaves[2] = {{ML_RECORDED_NODE, square}, q};
    r = ml_recording_open(g);
    results[0] = ml_map2(g, ML_OP_ADD, square, ml_map2(g, ML_OP_MUL, a.q, a.q));
    ml_recording_end(g, r);
    CHECK(!ml_recording_close(g, r, leaves, 2, results, 1)); /* a square that is a leaf, too */
    ml_recording_free(r);
}
TEST(graph_recording, refuses_what_it_cannot_repeat) {
    graph_run(refuses);
}
