/* Rows of experts sent to the ranks that hold them: what is sent, and rows that find no place. */
#include <math.h>

#include "runtime/ops/ragged/ragged.h"
#include "tests/shard/support.h"

enum { EXPERTS = 4, ROWS = 8, BATCH = 4 };

#define AXIS(name) fixture_axis(f, name)

/* Rows that go to each expert, by batch element; the last has one row of no expert. */
static const int even[BATCH][EXPERTS] = {{2, 2, 2, 2}, {1, 3, 4, 0}, {3, 1, 0, 4}, {2, 2, 3, 1}};
static const int uneven[BATCH][EXPERTS] = {{2, 2, 2, 2}, {1, 3, 4, 0}, {3, 4, 0, 1}, {4, 3, 0, 0}};

static ml_ref bounds(fixture *f, const int rows[BATCH][EXPERTS], bool ends) {
    ml_ref n = fixture_index(f, "b4 e4", ROWS);
    double *values = f->inputs[f->input_count - 1];
    for (int b = 0; b < BATCH; b++)
        for (int e = 0, at = 0; e < EXPERTS; at += rows[b][e++])
            values[b * EXPERTS + e] = at + (ends ? rows[b][e] : 0);
    return n;
}

/* Two products with an activation and weights between them, and the gradients of all. */
static ml_roots experts(fixture *f, const int rows[BATCH][EXPERTS]) {
    ml_ref starts = bounds(f, rows, false), ends = bounds(f, rows, true);
    ml_ref x = fixture_input(f, ML_F64, "b4 r8 d6", -1, 1);
    ml_ref weight = fixture_input(f, ML_F64, "b4 r8", -1, 1);
    ml_ref up = fixture_state(f, ML_F64, "e4 d6 h10"), down = fixture_state(f, ML_F64, "e4 h10 d6");
    ml_axis r = AXIS("r");
    ml_ref h = ml_ragged_dot(f->g, (ml_ref[]){x, up, starts, ends}, r, AXIS("d"), ML_F64);
    h = ml_map2(f->g, ML_OP_MUL, h, ml_map1(f->g, ML_OP_SIGMOID, h));
    h = ml_map2(f->g, ML_OP_MUL, h, weight);
    ml_ref y = ml_ragged_dot(f->g, (ml_ref[]){h, down, starts, ends}, r, AXIS("h"), ML_F64);
    ml_ref wrt[] = {x, weight, up, down}, gradients[4];
    ml_autodiff(f->g, fixture_loss(f, y), wrt, 4, gradients);
    ml_roots roots = {.outputs = ML_NEW_ARRAY(f->arena, ml_ref, 3), .output_count = 3};
    roots.updates = ML_NEW_ARRAY(f->arena, ml_update, 2);
    roots.outputs[0] = y;
    roots.outputs[1] = gradients[0];
    roots.outputs[2] = gradients[1];
    for (int i = 0; i < 2; i++)
        roots.updates[roots.update_count++] =
            (ml_update){(uint32_t)ml_graph_args(f->g, wrt[2 + i])[0], gradients[2 + i]};
    return roots;
}

static void sends_rows(fixture *f) {
    ml_roots roots = experts(f, even), local;
    ml_layout layout = shard_layout(f, "ep2 acts b e params e");
    roots.kept = 3;
    layout.exchange = 1.25;
    CHECK(shard_check(f, &layout, &roots, 1e-9, true));
    ml_graph *g = shard_program(f, &layout, &roots, &local);
    /* x and its weights there, y back; gradients likewise; and how many rows there are */
    CHECK_EQ_INT(shard_count(g, &layout, 0, ML_COLLECTIVE_ALL_TO_ALL), 7);
    CHECK_EQ_INT(shard_count(g, &layout, 0, ML_COLLECTIVE_ALL_GATHER), 0);
    CHECK_EQ_INT(shard_count(g, &layout, 0, ML_COLLECTIVE_REDUCE_SCATTER), 0);
    CHECK_EQ_INT(shard_count(g, &layout, 0, ML_COLLECTIVE_ALL_REDUCE), 1); /* what is watched */
    CHECK_EQ_INT(local.overflow_count, 1);
    CHECK_EQ_INT(local.output_count, 4);
    ml_graph_free(g);
}
TEST(shard_moe_dispatch, sends_rows) {
    for (uint64_t seed = 0; seed < 4; seed++) fixture_run(sends_rows, seed);
}

/* Under a drawn layout of two mesh axes, with places for all. */
static void other_axes(fixture *f) {
    static const char *const layouts[] = {
        "dp2 acts b;ep2 acts b e params e",
        "ep2 acts b e params e;dp2 acts b",
        "tp2 acts h params h;ep2 acts b e params e",
        "ep2 acts b e params e;tp2 acts h params h",
        "ep4 acts b e params e",
        "ep2 acts b e params e;sp2 acts d r",
        "ep2 acts b e params e;fp2 acts b params d",
    };
    ml_roots roots = experts(f, uneven);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        ml_layout layout = shard_layout(f, layouts[i]);
        layout.exchange = 4;
        CHECK(shard_check(f, &layout, &roots, 1e-9, true));
        layout.exchange = 0;
        CHECK(shard_check(f, &layout, &roots, 1e-9, false));
    }
}
TEST(shard_moe_dispatch, other_axes) {
    fixture_run(other_axes, 5);
}

/* What is watched on each rank, and the first output. */
static void run_ranks(fixture *f, const ml_layout *layout, ml_roots *roots, double **watched,
                      double **y) {
    int64_t ranks = ml_layout_ranks(layout);
    ml_roots local;
    ml_graph *g = shard_program(f, layout, roots, &local);
    double ***states = ML_NEW_ARRAY(f->arena, double **, ranks), ***inputs, ***results;
    inputs = ML_NEW_ARRAY(f->arena, double **, ranks);
    results = ML_NEW_ARRAY(f->arena, double **, ranks);
    for (int64_t r = 0; r < ranks; r++) {
        results[r] = ML_NEW_ARRAY(f->arena, double *, 2);
        states[r] = ML_NEW_ARRAY(f->arena, double *, f->state_count);
        inputs[r] = ML_NEW_ARRAY(f->arena, double *, f->input_count);
        for (int k = 0; k < f->state_count + f->input_count; k++) {
            int i = k < f->state_count ? k : k - f->state_count;
            const ml_type *type = k < f->state_count ? &ml_graph_state(f->g, (uint32_t)i)->type
                                                     : &ml_graph_input(f->g, (uint32_t)i)->type;
            int kind = k < f->state_count ? (int)ml_graph_state(f->g, (uint32_t)i)->kind : -1;
            double *whole = k < f->state_count ? f->states[i] : f->inputs[i];
            ml_placements at = ml_layout_place(layout, f->g, type, kind, "it");
            ml_type part = ml_layout_local(layout, type, &at);
            double *to = ML_NEW_ARRAY(f->arena, double, ml_type_elements(&part));
            ml_shard_cut(layout, type, &at, r, sizeof *to, whole, to);
            (k < f->state_count ? states : inputs)[r][i] = to;
        }
    }
    ml_ref nodes[] = {local.outputs[local.output_count - 1], local.outputs[0]};
    shard_run_ranks(g, layout, states, inputs, nodes, 2, results, f->arena);
    for (int64_t r = 0; r < ranks; r++) watched[r] = results[r][0], y[r] = results[r][1];
    ml_graph_free(g);
}

/* The second rank has 15 rows for the first, the one of no expert included, where 8 are even. */
static void overflow(fixture *f) {
    ml_roots roots = experts(f, uneven);
    ml_layout layout = shard_layout(f, "ep2 acts b e params e");
    double *watched[2], *y[2];
    for (int k = 0; k < 2; k++) {
        layout.exchange = k ? 2 : 1;
        run_ranks(f, &layout, &roots, watched, y);
        for (int r = 0; r < 2; r++) {
            int lost = 0;
            CHECK(fabs(watched[r][0] - (k ? 0 : 15.0 / 8)) < 1e-6);
            for (int i = 0; i < BATCH * ROWS; i++) lost += isnan(y[r][6 * i]);
            CHECK_EQ_INT(lost, k ? 0 : 15 - 8);
        }
    }
}
TEST(shard_moe_dispatch, overflow) {
    fixture_run(overflow, 1);
}
