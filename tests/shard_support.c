/* See shard_support.h. */
#include "tests/shard_support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

ml_layout shard_layout(fixture *f, const char *text) {
    ml_layout layout = {0};
    char word[64];
    int used;
    bool acts = true, fresh = true;
    while (sscanf(text, " %63[^ ;]%n", word, &used) == 1) {
        text += used;
        if (fresh) {
            ml_mesh_axis *a = &layout.axis[layout.count++];
            int digits = (int)strcspn(word, "0123456789");
            a->name = ml_arena_copy(f->arena, word, (size_t)digits);
            sscanf(word + digits, "%lld", (long long *)&a->size);
        }
        ml_mesh_axis *a = &layout.axis[layout.count - 1];
        if (!fresh && strcmp(word, "flat") == 0)
            a->flat = true;
        else if (!fresh && strcmp(word, "acts") == 0)
            acts = true;
        else if (!fresh && strcmp(word, "params") == 0)
            acts = false;
        else if (!fresh && acts)
            a->acts[a->acts_count++] = fixture_axis(f, word);
        else if (!fresh)
            a->params[a->params_count++] = fixture_axis(f, word);
        fresh = false;
        while (*text == ' ') text++;
        if (*text == ';') {
            text++;
            fresh = true;
        }
    }
    return layout;
}

const char *shard_layout_text(fixture *f, const ml_layout *layout) {
    ml_text text = {.arena = f->arena};
    ml_layout_print(layout, f->g, &text);
    return text.text;
}

static ml_roots copy_roots(fixture *f, const ml_roots *roots) {
    ml_roots copy = *roots;
    copy.outputs = ML_NEW_ARRAY(f->arena, ml_ref, roots->output_count + 1);
    copy.updates = ML_NEW_ARRAY(f->arena, ml_update, roots->update_count + 1);
    if (roots->output_count)
        memcpy(copy.outputs, roots->outputs, sizeof *copy.outputs * (size_t)roots->output_count);
    if (roots->update_count)
        memcpy(copy.updates, roots->updates, sizeof *copy.updates * (size_t)roots->update_count);
    return copy;
}

ml_graph *shard_program(fixture *f, const ml_layout *layout, const ml_roots *roots,
                        ml_roots *local) {
    *local = copy_roots(f, roots);
    ml_graph *g = ml_shard(f->g, local, layout);
    ml_graph_verify(g, local, "shard");
    return g;
}

/* ---- Values ---------------------------------------------------------------------------------- */

static double *cut(fixture *f, const ml_layout *layout, const ml_type *type, int kind, int64_t rank,
                   const double *whole) {
    ml_placements at = ml_layout_place(layout, f->g, type, kind, "it");
    ml_type local = ml_layout_local(layout, type, &at);
    double *part = ML_NEW_ARRAY(f->arena, double, ml_type_elements(&local));
    ml_shard_cut(layout, type, &at, rank, sizeof *part, whole, part);
    return part;
}

static double worst_difference(const double *actual, const double *expected, int64_t count) {
    double largest = 1e-300, worst = 0;
    for (int64_t i = 0; i < count; i++)
        if (isfinite(expected[i])) largest = fmax(largest, fabs(expected[i]));
    for (int64_t i = 0; i < count; i++) {
        if (actual[i] == expected[i] || (isnan(actual[i]) && isnan(expected[i]))) continue;
        double off = fabs(actual[i] - expected[i]) / fmax(largest, 1e-3);
        worst = isfinite(off) ? fmax(worst, off) : INFINITY;
    }
    return worst;
}

typedef struct {
    fixture *f;
    const ml_layout *layout;
    const ml_roots *roots;
    int count;
    ml_ref *nodes; /* outputs, then updates */
    double **expected;
    double tolerance;
    bool good;
} comparison;

static void complain(comparison *c, int i, int64_t rank, double off, const char *stage) {
    c->good = false;
    bool output = i < c->roots->output_count;
    test_fail("%s: %s %d under %s, rank %lld%s: off by %.3g", c->f->label,
              output ? "output" : "update", output ? i : i - c->roots->output_count,
              shard_layout_text(c->f, c->layout), (long long)rank, stage, off);
}

/* What rank `rank` must have of value i, an output or update. */
static double *wanted(comparison *c, int i, int64_t rank) {
    if (i < c->roots->output_count) return c->expected[i];
    const ml_state *state =
        ml_graph_state(c->f->g, c->roots->updates[i - c->roots->output_count].state);
    ml_type type = *ml_graph_type(c->f->g, c->nodes[i]);
    ml_placements at = ml_layout_place(c->layout, c->f->g, &state->type, (int)state->kind, "it");
    for (int m = 0; m < c->layout->count; m++)
        if (at.over[m].kind == ML_SPLIT)
            at.over[m].axis = (uint8_t)ml_type_find(&type, state->type.axis[at.over[m].axis]);
    ml_type local = ml_layout_local(c->layout, &type, &at);
    double *part = ML_NEW_ARRAY(c->f->arena, double, ml_type_elements(&local));
    ml_shard_cut(c->layout, &type, &at, rank, sizeof *part, c->expected[i], part);
    return part;
}

static void compare(comparison *c, const ml_graph *g, const ml_roots *local, double ***states,
                    double ***inputs, const char *stage) {
    int64_t ranks = ml_layout_ranks(c->layout);
    ml_arena *arena = c->f->arena;
    ml_ref *nodes = ML_NEW_ARRAY(arena, ml_ref, c->count + 1);
    double ***results = ML_NEW_ARRAY(arena, double **, ranks);
    for (int64_t r = 0; r < ranks; r++) results[r] = ML_NEW_ARRAY(arena, double *, c->count + 1);
    for (int i = 0; i < c->count; i++)
        nodes[i] = i < local->output_count ? local->outputs[i]
                                           : local->updates[i - local->output_count].value;
    ml_shard_reference(g, c->layout, states, inputs, nodes, c->count, results, arena);
    for (int i = 0; i < c->count && c->good; i++)
        for (int64_t r = 0; r < ranks && c->good; r++) {
            int64_t elements = ml_type_elements(ml_graph_type(g, nodes[i]));
            double off = worst_difference(results[r][i], wanted(c, i, r), elements);
            if (!(off <= c->tolerance)) complain(c, i, r, off, stage);
        }
}

static void compare_after_passes(comparison *c, ml_graph *sharded, ml_roots *local,
                                 double ***states, double ***inputs) {
    ml_graph *simple = ml_simplify(sharded, local);
    ml_graph *merged = ml_merge_dots(simple, local);
    ml_graph *last = ml_recompute(merged, local);
    ml_graph_verify(last, local, "the passes after sharding");
    compare(c, last, local, states, inputs, " after the passes");
    ml_graph_free(last);
    ml_graph_free(merged);
    ml_graph_free(simple);
}

bool shard_check(fixture *f, const ml_layout *layout, const ml_roots *roots, double tolerance,
                 bool passes) {
    comparison c = {f,    layout, roots,     roots->output_count + roots->update_count,
                    NULL, NULL,   tolerance, true};
    int64_t ranks = ml_layout_ranks(layout);
    c.nodes = ML_NEW_ARRAY(f->arena, ml_ref, c.count + 1);
    c.expected = ML_NEW_ARRAY(f->arena, double *, c.count + 1);
    for (int i = 0; i < c.count; i++)
        c.nodes[i] = i < roots->output_count ? roots->outputs[i]
                                             : roots->updates[i - roots->output_count].value;
    ml_reference(f->g, (const double *const *)f->states, (const double *const *)f->inputs, c.nodes,
                 c.count, c.expected, false, f->arena);
    ml_roots local;
    ml_graph *g = shard_program(f, layout, roots, &local);
    double ***states = ML_NEW_ARRAY(f->arena, double **, ranks);
    double ***inputs = ML_NEW_ARRAY(f->arena, double **, ranks);
    for (int64_t r = 0; r < ranks; r++) {
        states[r] = ML_NEW_ARRAY(f->arena, double *, f->state_count + 1);
        inputs[r] = ML_NEW_ARRAY(f->arena, double *, f->input_count + 1);
        for (int i = 0; i < f->state_count; i++) {
            const ml_state *state = ml_graph_state(f->g, (uint32_t)i);
            states[r][i] = cut(f, layout, &state->type, (int)state->kind, r, f->states[i]);
        }
        for (int i = 0; i < f->input_count; i++)
            inputs[r][i] =
                cut(f, layout, &ml_graph_input(f->g, (uint32_t)i)->type, -1, r, f->inputs[i]);
    }
    compare(&c, g, &local, states, inputs, "");
    if (passes && c.good) compare_after_passes(&c, g, &local, states, inputs);
    ml_graph_free(g);
    return c.good;
}

int64_t shard_count(const ml_graph *g, const ml_layout *layout, int i, ml_collective kind) {
    ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS];
    ml_shard_traffic(g, layout, traffic);
    return traffic[i][kind].count;
}
