/* See tests/shard/support.h. */
#include "tests/shard/support.h"
#include "runtime/optimize/optimize.h"

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
        else if (!fresh && strcmp(word, "keep") == 0)
            a->keep = true;
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

/* What fills up a part of an input may be anything: NaN, or an index that is one. */
static void poison(fixture *f, const ml_layout *layout, const ml_type *type,
                   const ml_placements *at, int64_t rank, double *part, int64_t count) {
    int64_t whole = ml_type_elements(type);
    double *ones = ML_NEW_ARRAY(f->arena, double, whole + 1);
    double *counts = ML_NEW_ARRAY(f->arena, double, count + 1);
    for (int64_t k = 0; k < whole; k++) ones[k] = 1;
    ml_shard_cut(layout, type, at, rank, sizeof *part, ones, counts);
    for (int64_t k = 0; k < count; k++)
        if (counts[k] == 0) part[k] = ml_is_float((ml_dtype)type->dtype) ? NAN : 1;
}

static double *cut(fixture *f, const ml_layout *layout, const ml_type *type, int kind, int64_t rank,
                   const double *whole) {
    ml_placements at = ml_layout_place(layout, f->g, type, kind, "it");
    ml_type local = ml_layout_local(layout, type, &at);
    double *part = ML_NEW_ARRAY(f->arena, double, ml_type_elements(&local));
    ml_shard_cut(layout, type, &at, rank, sizeof *part, whole, part);
    if (kind < 0) poison(f, layout, type, &at, rank, part, ml_type_elements(&local));
    for (int i = 0; i < layout->count; i++) { /* a sum: unequal parts, some of them negative */
        if (at.over[i].kind != ML_PARTIAL_SUM) continue;
        double others = (double)(layout->axis[i].size - 1);
        double share = ml_layout_coordinate(layout, rank, i) ? -0.5 / others : 1.5;
        for (int64_t k = 0; k < ml_type_elements(&local); k++) part[k] *= share;
    }
    return part;
}

double shard_difference(const double *actual, const double *expected, int64_t count) {
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

/* The part of rank `rank` of an output that stays where the rule puts it. */
static double *kept_part(comparison *c, int i, int64_t rank, const double *whole) {
    const ml_type *type = ml_graph_type(c->f->g, c->nodes[i]);
    ml_placements at = ml_layout_place(c->layout, c->f->g, type, -1, NULL);
    ml_type local = ml_layout_local(c->layout, type, &at);
    double *part = ML_NEW_ARRAY(c->f->arena, double, ml_type_elements(&local));
    ml_shard_cut(c->layout, type, &at, rank, sizeof *part, whole, part);
    return part;
}

/* What rank `rank` has of an update where the whole is this. */
static double *updated_part(comparison *c, int i, int64_t rank, const double *whole) {
    const ml_state *state =
        ml_graph_state(c->f->g, c->roots->updates[i - c->roots->output_count].state);
    ml_type type = *ml_graph_type(c->f->g, c->nodes[i]);
    ml_placements at = ml_layout_place(c->layout, c->f->g, &state->type, (int)state->kind, "it");
    for (int m = 0; m < c->layout->count; m++)
        if (at.over[m].kind == ML_SPLIT)
            at.over[m].axis = (uint8_t)ml_type_find(&type, state->type.axis[at.over[m].axis]);
    ml_type local = ml_layout_local(c->layout, &type, &at);
    double *part = ML_NEW_ARRAY(c->f->arena, double, ml_type_elements(&local));
    ml_shard_cut(c->layout, &type, &at, rank, sizeof *part, whole, part);
    return part;
}

/* How far rank `rank` is off with value i, an output or update. */
static double difference(comparison *c, int i, int64_t rank, double *found, int64_t count) {
    if (i < c->roots->output_count - c->roots->kept)
        return shard_difference(found, c->expected[i], count);
    if (i < c->roots->output_count) { /* what fills it up may be anything */
        const double *part = kept_part(c, i, rank, c->expected[i]);
        int64_t whole = ml_type_elements(ml_graph_type(c->f->g, c->nodes[i]));
        double *ones = ML_NEW_ARRAY(c->f->arena, double, whole);
        for (int64_t k = 0; k < whole; k++) ones[k] = 1;
        const double *counts = kept_part(c, i, rank, ones);
        for (int64_t k = 0; k < count; k++)
            if (counts[k] == 0) found[k] = part[k];
        return shard_difference(found, part, count);
    }
    return shard_difference(found, updated_part(c, i, rank, c->expected[i]), count);
}

/* Updates of sums of which each rank has a part: each rank's results become the sums. */
static void add_parts(comparison *c, int i, int64_t elements, double ***results) {
    if (i < c->roots->output_count) return;
    const ml_state *state =
        ml_graph_state(c->f->g, c->roots->updates[i - c->roots->output_count].state);
    ml_placements at = ml_layout_place(c->layout, c->f->g, &state->type, (int)state->kind, "it");
    int64_t ranks = ml_layout_ranks(c->layout), inner = ranks;
    double *line = ML_NEW_ARRAY(c->f->arena, double, ranks);
    for (int m = 0; m < c->layout->count; m++) {
        int64_t size = c->layout->axis[m].size, outer = inner;
        inner /= size;
        for (int64_t k = 0; k < elements && at.over[m].kind == ML_PARTIAL_SUM; k++) {
            for (int64_t r = 0; r < ranks; r++) line[r] = results[r][i][k];
            for (int64_t r = 0; r < ranks; r++) {
                results[r][i][k] = 0;
                int64_t first = r / outer * outer + r % inner;
                for (int64_t peer = 0; peer < size; peer++)
                    results[r][i][k] += line[first + peer * inner];
            }
        }
    }
}

static void compare(comparison *c, const ml_graph *g, const ml_roots *local, double ***states,
                    double ***inputs, const char *stage) {
    int64_t ranks = ml_layout_ranks(c->layout);
    ml_arena *arena = c->f->arena;
    ml_ref *nodes = ML_NEW_ARRAY(arena, ml_ref, c->count + 1);
    double ***results = ML_NEW_ARRAY(arena, double **, ranks);
    for (int64_t r = 0; r < ranks; r++) results[r] = ML_NEW_ARRAY(arena, double *, c->count + 1);
    for (int i = 0; i < c->count; i++)
        nodes[i] = i < c->roots->output_count ? local->outputs[i]
                                              : local->updates[i - c->roots->output_count].value;
    shard_run_ranks(g, c->layout, states, inputs, nodes, c->count, results, arena);
    for (int i = 0; i < c->count && c->good; i++) {
        int64_t elements = ml_type_elements(ml_graph_type(g, nodes[i]));
        add_parts(c, i, elements, results);
        for (int64_t r = 0; r < ranks && c->good; r++) {
            double off = difference(c, i, r, results[r][i], elements);
            test_checked();
            if (!(off <= c->tolerance)) complain(c, i, r, off, stage);
        }
    }
}

static void compare_after_passes(comparison *c, ml_graph *sharded, ml_roots *local,
                                 double ***states, double ***inputs) {
    ml_graph *simple = ml_simplify(sharded, local);
    ml_graph *traded = ml_trade_once(simple, local, 1);
    ml_graph_verify(traded, local, "trade_once");
    ml_graph *merged = ml_merge_products(traded, local);
    ml_graph *joined = ml_join_collectives(merged, local);
    ml_graph *together = ml_gather_together(joined, local);
    ml_graph_verify(together, local, "gather_together");
    ml_graph *chunked = ml_chunk_logits(together, local, 640); /* bytes: large logits, here */
    double speeds[ML_MAX_MESH];
    for (int i = 0; i < ML_MAX_MESH; i++) speeds[i] = 1e12; /* what is gathered is gathered again */
    ml_graph *last = ml_recompute(chunked, local, 0, 0, speeds, NULL);
    ml_graph_verify(last, local, "the passes after sharding");
    compare(c, last, local, states, inputs, " after the passes");
    ml_graph_free(last);
    ml_graph_free(chunked);
    ml_graph_free(together);
    ml_graph_free(joined);
    ml_graph_free(merged);
    ml_graph_free(traded);
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

/* ---- Drawn layouts --------------------------------------------------------------------------- */

static void draw_list(fixture *f, const ml_type *names, ml_axis *list, int *count) {
    int64_t wanted = 1 + fixture_below(f, 4);
    while (wanted-- > 0) list[(*count)++] = names->axis[fixture_below(f, names->rank)];
}

static ml_layout draw_layout(fixture *f, const ml_type *names) {
    static const char *const meshes[] = {"x2",    "x4",       "x2;y2", "x2;y2",
                                         "x2;y3", "x2;y2;z2", "x3",    "x5"};
    ml_layout layout = shard_layout(f, meshes[fixture_below(f, 8)]);
    for (int i = 0; i < layout.count; i++) {
        draw_list(f, names, layout.axis[i].acts, &layout.axis[i].acts_count);
        draw_list(f, names, layout.axis[i].params, &layout.axis[i].params_count);
        layout.axis[i].flat = fixture_below(f, 3) == 0;
        layout.axis[i].keep = fixture_below(f, 2) == 0;
    }
    enum { ROOM_FOR_ALL = 100 };
    if (fixture_below(f, 2)) layout.exchange = ROOM_FOR_ALL;
    return layout;
}

typedef struct {
    fixture *f;
    ml_layout layout;
    ml_roots roots;
    bool passes;
} trial;

static void try_layout(void *argument) {
    trial *t = argument;
    (void)shard_check(t->f, &t->layout, &t->roots, 1e-9, t->passes);
}

/* A state that the gradient is added to, or that is set to it: a number says which. */
static ml_update accumulate(fixture *f, ml_ref gradient) {
    const ml_type t = *ml_graph_type(f->g, gradient);
    ml_ref sum = fixture_add_state(f, &t);
    uint32_t id = (uint32_t)ml_graph_args(f->g, sum)[0];
    ml_graph_state(f->g, id)->kind = ML_STATE_GRADIENT;
    ml_ref zero = ml_const(f->g, (ml_dtype)t.dtype, 0);
    ml_ref first = ml_map2(f->g, ML_OP_LT, fixture_input(f, ML_F64, "", -1, 1), zero);
    return (ml_update){id, ml_map2(f->g, ML_OP_ADD, ml_where(f->g, first, zero, sum), gradient)};
}

/* y and its gradients; the norms of those of states, which move the states. */
ml_roots shard_roots(fixture *f, ml_ref y) {
    ml_ref wrt[SUPPORT_INPUTS], gradients[SUPPORT_INPUTS];
    ml_roots roots = {.outputs = ML_NEW_ARRAY(f->arena, ml_ref, SUPPORT_INPUTS),
                      .updates = ML_NEW_ARRAY(f->arena, ml_update, SUPPORT_INPUTS)};
    roots.outputs[roots.output_count++] = y;
    int count = 0, states = f->state_count;
    for (int64_t i = 0; i < states; i++)
        wrt[count++] = ml_graph_add(f->g, ML_OP_STATE, NULL, 0, &i, 1, NULL);
    for (int i = 0; i < f->input_count; i++)
        if (ml_dtypes[ml_graph_type(f->g, f->nodes[i])->dtype].kind == ML_KIND_FLOAT)
            wrt[count++] = f->nodes[i];
    ml_ref loss = fixture_loss(f, y);
    roots.outputs[roots.output_count++] = loss;
    ml_autodiff(f->g, loss, wrt, count, gradients);
    for (int i = 0; i < count; i++) {
        if (!gradients[i]) continue;
        if (i >= states) {
            roots.outputs[roots.output_count++] = gradients[i];
            continue;
        }
        ml_ref square = ml_map2(f->g, ML_OP_MUL, gradients[i], gradients[i]);
        ml_type t = *ml_graph_type(f->g, square);
        roots.outputs[roots.output_count++] = ml_reduce(f->g, ML_OP_SUM, square, t.axis, t.rank);
        ml_ref moved = ml_map2(f->g, ML_OP_SUB, wrt[i], gradients[i]);
        roots.updates[roots.update_count++] = (ml_update){(uint32_t)i, moved};
        if (fixture_below(f, 2)) roots.updates[roots.update_count++] = accumulate(f, gradients[i]);
    }
    roots.kept = (int)fixture_below(f, roots.output_count + 1);
    return roots;
}

int shard_check_drawn(fixture *f, ml_ref y, const char *names, int draws) {
    trial t = {.f = f, .roots = shard_roots(f, y)};
    ml_type axes = {0};
    char name[32];
    int used, tried = 0;
    for (; sscanf(names, " %31[a-z_]%n", name, &used) == 1; names += used)
        axes.axis[axes.rank++ % ML_MAX_AXES] = fixture_axis(f, name);
    if (axes.rank > ML_MAX_AXES) axes.rank = ML_MAX_AXES;
    for (int i = 0; i < f->state_count; i++) {
        ml_state *state = ml_graph_state(f->g, (uint32_t)i);
        if (state->kind == ML_STATE_PARAMETER)
            state->kind = (ml_state_kind)fixture_below(f, ML_STATE_OTHER);
    }
    for (int draw = 0; draw < draws; draw++) {
        t.layout = draw_layout(f, &axes);
        t.passes = draw == 0;
        ml_status status = ml_protect(try_layout, &t);
        tried += status == ML_OK;
        if (status == ML_OK || strncmp(ml_error_last()->text, "cannot split", 12) == 0) continue;
        test_fail("%s: under %s: %s", f->label, shard_layout_text(f, &t.layout),
                  ml_error_last()->text);
    }
    return tried;
}
