/* A decoding step over ranks: rows are written to pools that are states, and read by attention.
 * Heads are cut with those of the pools, rows with whole pools; both give what one rank gives. */
#include "runtime/ops/cached_attention/cached_attention.h"

#include <stdio.h>

#include "tests/shard/support.h"

typedef struct {
    const char *layout;
    int64_t rows, heads, pool_heads; /* of one rank's attention */
} expectation;

static const expectation EXPECTED[] = {
    {"tp2 acts h k params h k", 4, 4, 2},
    {"tp4 acts h k params h k", 4, 2, 1},
    {"tp2 acts h k", 4, 4, 2},
    {"dp2 acts r", 2, 8, 4},
    {"dp4 acts r", 1, 8, 4},
    {"dp2 acts r; tp2 acts h k params h k", 2, 4, 2},
    {"tp8 acts h k params h k", 4, 8, 4}, /* which key heads do not divide: all do all */
};
enum { LAYOUTS = sizeof EXPECTED / sizeof *EXPECTED };
static const expectation *current;

/* Rows 2 and 3 write nothing and see what was there. */
static ml_ref step(fixture *f, ml_update *updates) {
    ml_graph *g = f->g;
    ml_axis pool = fixture_axis(f, "p");
    ml_ref at = ml_iota(g, fixture_axis(f, "r"), 4), five = ml_const_int(g, ML_I32, 5);
    ml_ref write = ml_map2(g, ML_OP_LT, at, ml_const_int(g, ML_I32, 2));
    at = ml_where(g, write, ml_map2(g, ML_OP_MUL, at, five), ml_const_int(g, ML_I32, -1));
    ml_ref sources[] = {fixture_input(f, ML_F64, "r4 s1 h8 d4", -1, 1),
                        0,
                        0,
                        fixture_index(f, "r4 c3", 4),
                        fixture_index(f, "r4", 11),
                        fixture_index(f, "r4", 13)};
    for (uint32_t i = 0; i < 2; i++) {
        ml_ref value = fixture_input(f, ML_F64, "r4 k4 d4", -1, 1);
        ml_ref state = fixture_state(f, ML_F64, i ? "k4 p16 d4" : "p16 k4 d4");
        updates[i] = (ml_update){i, ml_write_rows(g, state, at, value, pool)};
        sources[CACHED_K + i] = updates[i].value;
    }
    ml_cached_attention_args args = {.seq = fixture_axis(f, "s"),
                                     .pool = pool,
                                     .columns = fixture_axis(f, "c"),
                                     .heads = fixture_axis(f, "h"),
                                     .kv_heads = fixture_axis(f, "k"),
                                     .head_dim = fixture_axis(f, "d"),
                                     .kv_seq = fixture_axis(f, "t"),
                                     .causal = true,
                                     .window = 7,
                                     .block = 4,
                                     .scale = 0.5};
    return ml_cached_attention(g, sources, CACHED_CAPTURED, &args);
}

static void check_layout(fixture *f) {
    ml_update updates[2];
    ml_ref y = step(f, updates);
    ml_layout layout = shard_layout(f, current->layout);
    snprintf(f->label, sizeof f->label, "%s", current->layout);
    ml_roots local,
        roots = {.outputs = &y, .output_count = 1, .updates = updates, .update_count = 2};
    CHECK(shard_check(f, &layout, &roots, 1e-9, true));
    ml_graph *g = shard_program(f, &layout, &roots, &local);
    int found = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        if (ml_graph_node(g, n)->op != ML_OP_CACHED_ATTENTION) continue;
        const ml_type *q = ml_graph_type(g, n), *k = ml_graph_type(g, ml_graph_source(g, n, 1));
        EXPECT(CHECK_EQ_INT(ml_type_size(q, fixture_axis(f, "r")), current->rows), "%s", f->label);
        EXPECT(CHECK_EQ_INT(ml_type_size(q, fixture_axis(f, "h")), current->heads), "%s", f->label);
        EXPECT(CHECK_EQ_INT(ml_type_size(k, fixture_axis(f, "k")), current->pool_heads), "%s",
               f->label);
        CHECK_EQ_INT(ml_type_size(k, fixture_axis(f, "p")), 16);
        found++;
    }
    CHECK_EQ_INT(found, 1);
    ml_graph_free(g);
}

TEST(shard_ops, cached_attention) {
    for (int i = 0; i < LAYOUTS; i++) {
        current = &EXPECTED[i];
        fixture_run(check_layout, (uint64_t)i + 1);
    }
}
