/* All layers of a program whose passes ran over few (fold_layers.h). */
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/passes/fold_layers.h"

enum { LEAST_REPEATED = 8 }; /* periods of a region after the passes */

typedef struct {
    const fold *f;
    const ml_graph *g;
    ml_graph *to;
    ml_roots *roots;
    ml_arena *arena;
    repeats regions; /* of g; their layers are numbered as those of the folded program */
    ml_ref *first;   /* of each region in the whole program */
    bool failed;
} unfolding;

static int64_t layers_added(const fold *f) {
    return f->high - f->low;
}

/* ---- Layers of g ----------------------------------------------------------------------------- */

/* What node n says of its layer, in the numbers of the folded program; NULL: nothing. */
static const fold_anchor *anchor_of(const fold *f, const ml_graph *g, ml_ref n, bool state,
                                    int64_t *layer) {
    const ml_node *node = ml_graph_node(g, n);
    const uint32_t id = state ? (uint32_t)ml_graph_args(g, n)[0] : node->origin;
    if (id >= (state ? f->state_count : f->origin_count)) return NULL;
    const fold_anchor *anchor = state ? &f->states[id] : &f->origins[id];
    if (!anchor->node) return NULL;
    *layer = anchor->layer < f->low ? anchor->layer : anchor->layer - layers_added(f);
    return anchor;
}

/* Number the layers as the folded program does, by one node that names its own. */
static bool number_layers(const fold *f, const ml_graph *g, repeats *all) {
    for (uint32_t i = 0; i < all->count; i++) {
        const repeat *r = &all->at[i];
        const uint32_t time = r->count / 2;
        for (ml_ref n = r->first + time * r->period; n < r->first + (time + 1) * r->period; n++) {
            int64_t here, next;
            const bool state = ml_graph_node(g, n)->op == ML_OP_STATE;
            const fold_anchor *a = anchor_of(f, g, n, state, &here);
            const fold_anchor *b = anchor_of(f, g, n + r->period, state, &next);
            if (!a || !b || a->node != b->node || (next - here != 1 && next - here != -1)) continue;
            const int sign = (int)(next - here) * r->direction;
            const int64_t moved = here - sign * repeats_layer(r, time);
            for (uint32_t k = 0; k < all->count; k++) {
                all->at[k].direction *= sign;
                all->at[k].layer = all->at[k].layer * sign + moved;
            }
            return true;
        }
    }
    return false;
}

/* Whether nodes i of the periods in the middle name the same thing of layers one after another. */
static bool anchored_alike(const fold *f, const ml_graph *g, const repeat *r, uint32_t i,
                           bool state) {
    int64_t layer, apart = 0;
    const fold_anchor *first = NULL;
    for (uint32_t t = r->count / 4; t <= 3 * r->count / 4; t++) {
        const fold_anchor *a = anchor_of(f, g, r->first + t * r->period + i, state, &layer);
        if (t > r->count / 4 && (first ? first->node : 0) != (a ? a->node : 0)) return false;
        if (a && t > r->count / 4 && layer - repeats_layer(r, t) != apart) return false;
        first = a;
        if (a) apart = layer - repeats_layer(r, t);
    }
    if (!first) { /* the same for all */
        const ml_node *node = ml_graph_node(g, r->first + r->count / 2 * r->period + i);
        return !state &&
               node->origin == ml_graph_node(g, r->first + r->count / 4 * r->period + i)->origin;
    }
    return apart <= REPEATS_NEAR && apart >= -REPEATS_NEAR;
}

/* The regions of g; none where its layers do not repeat as those of the folded program do. */
static void find_regions(const fold *f, const ml_graph *g, ml_arena *arena, repeats *out) {
    repeats_find(g, LEAST_REPEATED, arena, out);
    bool alike = out->count > 0 && number_layers(f, g, out);
    for (uint32_t i = 0; i < out->count && alike; i++) {
        const repeat *r = &out->at[i];
        const ml_ref middle = r->first + r->count / 2 * r->period;
        for (uint32_t k = 0; k < r->period && alike; k++)
            alike = anchored_alike(f, g, r, k, false) &&
                    (ml_graph_node(g, middle + k)->op != ML_OP_STATE ||
                     anchored_alike(f, g, r, k, true));
    }
    if (!alike) out->count = 0;
}

const uint32_t *fold_times(const fold *f, const ml_graph *g, ml_arena *arena) {
    repeats all;
    find_regions(f, g, arena, &all);
    if (!all.count) return NULL;
    uint32_t *times = ML_NEW_ARRAY(arena, uint32_t, ml_graph_count(g));
    for (ml_ref n = 1; n < ml_graph_count(g); n++) times[n] = 1;
    for (uint32_t i = 0; i < all.count; i++) {
        const repeat *r = &all.at[i];
        const ml_ref middle = r->first + r->count / 2 * r->period;
        for (uint32_t k = 0; k < r->period; k++) times[middle + k] += (uint32_t)layers_added(f);
    }
    return times;
}

/* ---- Nodes of the whole program -------------------------------------------------------------- */

static uint32_t nodes_added(const unfolding *u, int region) {
    return (uint32_t)layers_added(u->f) * u->regions.at[region].period;
}

/* Node n of g in the whole program, after so many of its layers where it is in a region. */
static ml_ref moved(const unfolding *u, ml_ref n, int region, int64_t layers) {
    const repeat *r = &u->regions.at[region];
    return (ml_ref)(u->first[region] + (n - r->first) + layers * r->period);
}

/* Node n of g that is in no region, or in one near its ends: fails near the middle, where layers
 * are added. */
static ml_ref outside(unfolding *u, ml_ref n) {
    const int region = repeats_of(&u->regions, n);
    if (region >= 0) {
        const repeat *r = &u->regions.at[region];
        const uint32_t time = repeats_time(r, n);
        if (time >= r->count / 3 && time < r->count - r->count / 3) u->failed = true;
        return moved(u, n, region, time < r->count / 2 ? 0 : layers_added(u->f));
    }
    int64_t added = 0;
    for (uint32_t i = 0; i < u->regions.count && u->regions.at[i].first < n; i++)
        added += nodes_added(u, (int)i);
    return (ml_ref)(n + added);
}

static ml_ref function_outside(void *u, ml_ref function) {
    return outside(u, function);
}

static void copy_outside(unfolding *u, ml_ref n) {
    ml_ref few[16], *sources = few;
    const int count = ml_graph_node(u->g, n)->source_count;
    if (count > 16) sources = ML_NEW_ARRAY(u->arena, ml_ref, count);
    for (int k = 0; k < count; k++) {
        sources[k] = outside(u, ml_graph_source(u->g, n, k));
        if (sources[k] >= ml_graph_count(u->to)) u->failed = true;
    }
    if (!u->failed) graph_append_placed(u->to, u->g, n, sources, function_outside, u);
}

/* ---- Regions --------------------------------------------------------------------------------- */

/* What a node has in period t: node `base` + t * `step` of the unfolded program has it, if that is
 * one of its region; else what the node of g has. */
typedef struct {
    int64_t base, step, first, last;
} layer_value;

/* A node of a period, and where its operands are in period t: start[k] + t * step[k]. */
typedef struct {
    layer_value origin, state;
    int64_t *start, *step;
} period_node;

static layer_value value_of(const unfolding *u, const repeat *r, ml_ref n, bool state) {
    const fold *f = u->f;
    const int64_t time = repeats_time(r, n);
    int64_t layer;
    const fold_anchor *anchor = anchor_of(f, u->g, n, state, &layer);
    if (!anchor) return (layer_value){0};
    const repeat *of = &f->regions.at[anchor->region];
    /* Of the first period; where layers descend, it has the last ones of the whole program. */
    layer -= r->direction * time;
    if (r->direction < 0) layer += layers_added(f);
    layer_value made = {.first = of->first, .last = of->first + of->count * of->period - 1};
    made.base = anchor->node + (layer - of->layer) * of->direction * of->period;
    made.step = (int64_t)r->direction * of->direction * of->period;
    return made;
}

static bool describe_operands(unfolding *u, const repeat *r, ml_ref n, period_node *out) {
    const int count = ml_graph_node(u->g, n)->source_count;
    const int64_t time = repeats_time(r, n);
    out->start = ML_NEW_ARRAY(u->arena, int64_t, 2 * count + 1);
    out->step = out->start + count;
    for (int k = 0; k < count; k++) {
        const ml_ref source = ml_graph_source(u->g, n, k);
        const int64_t step = (int64_t)source - ml_graph_source(u->g, n - r->period, k);
        if (step == 0) {
            out->start[k] = outside(u, source);
            continue;
        }
        const int region = repeats_of(&u->regions, source);
        if (region < 0) return false;
        const int64_t added = step < 0 ? layers_added(u->f) : 0;
        out->start[k] = (int64_t)moved(u, source, region, added) - time * step;
        out->step[k] = step;
    }
    return true;
}

/* The node of the unfolded program that has a value in period t; 0: none. Layers that are added
 * must have one. */
static ml_ref holder(unfolding *u, const layer_value *value, int64_t time, bool added) {
    const int64_t n = value->base + time * value->step;
    if (value->base && n >= value->first && n <= value->last) return (ml_ref)n;
    if (value->base && added) u->failed = true;
    return 0;
}

static void append_period(unfolding *u, const repeat *r, const period_node *nodes, int64_t time) {
    const int64_t added = layers_added(u->f), half = r->count / 2;
    const int64_t like = time < half ? time : time < half + added ? half : time - added;
    for (uint32_t i = 0; i < r->period && !u->failed; i++) {
        const ml_ref n = r->first + (uint32_t)like * r->period + i;
        const period_node *p = &nodes[i];
        ml_ref few[16], *sources = few;
        const int count = ml_graph_node(u->g, n)->source_count;
        if (count > 16) sources = ML_NEW_ARRAY(u->arena, ml_ref, count);
        for (int k = 0; k < count; k++) {
            const int64_t source = p->start[k] + time * p->step[k];
            if (source <= 0 || source >= ml_graph_count(u->to)) u->failed = true;
            sources[k] = (ml_ref)source;
        }
        if (u->failed) return;
        const ml_ref made = graph_append_placed(u->to, u->g, n, sources, function_outside, u);
        ml_node *node = &u->to->nodes.at[made];
        const ml_ref line = holder(u, &p->origin, time, like == half);
        const ml_ref state = holder(u, &p->state, time, like == half);
        if (line) node->origin = ml_graph_node(u->f->from, line)->origin;
        if (state) u->to->args.at[node->args] = ml_graph_args(u->f->from, state)[0];
    }
}

static void append_region(unfolding *u, int region) {
    const repeat *r = &u->regions.at[region];
    const ml_ref middle = r->first + r->count / 2 * r->period;
    period_node *nodes = ML_NEW_ARRAY(u->arena, period_node, r->period);
    for (uint32_t i = 0; i < r->period; i++) {
        nodes[i].origin = value_of(u, r, middle + i, false);
        if (ml_graph_node(u->g, middle + i)->op == ML_OP_STATE)
            nodes[i].state = value_of(u, r, middle + i, true);
        if (!describe_operands(u, r, middle + i, &nodes[i])) u->failed = true;
    }
    const int64_t periods = r->count + layers_added(u->f);
    for (int64_t t = 0; t < periods && !u->failed; t++) append_period(u, r, nodes, t);
}

/* ---- Roots ----------------------------------------------------------------------------------- */

/* The new value of an update: as the folded program's own, or that of a layer that stayed. */
static ml_ref value_of_update(unfolding *u, const fold_update *update) {
    const fold *f = u->f;
    const ml_ref n = u->roots->updates[update->update].value;
    const int region = repeats_of(&u->regions, n);
    if (!update->inside || region < 0) {
        if (update->inside && update->layer >= f->low && update->layer < f->high) u->failed = true;
        return outside(u, n);
    }
    const int64_t before = update->layer < f->low    ? 0
                           : update->layer < f->high ? update->layer - (f->low - 1)
                                                     : layers_added(f);
    const bool up = u->regions.at[region].direction > 0;
    return moved(u, n, region, up ? before : layers_added(f) - before);
}

static void unfold_roots(unfolding *u) {
    ml_roots *roots = u->roots;
    const ml_roots *whole = &u->f->roots;
    ml_update *updates = ML_NEW_ARRAY(u->arena, ml_update, whole->update_count + 1);
    ml_ref *outputs = ML_NEW_ARRAY(u->arena, ml_ref, roots->output_count + 1);
    for (int i = 0; i < whole->update_count; i++)
        updates[i] = (ml_update){whole->updates[i].state, value_of_update(u, &u->f->updates[i])};
    for (int i = 0; i < roots->output_count; i++) outputs[i] = outside(u, roots->outputs[i]);
    roots->updates = updates;
    roots->update_count = whole->update_count;
    roots->outputs = outputs;
}

static void body(void *argument) {
    unfolding *u = argument;
    find_regions(u->f, u->g, u->arena, &u->regions);
    u->failed = !u->regions.count;
    if (u->failed) return;
    u->to = ml_graph_derive(u->g);
    u->first = ML_NEW_ARRAY(u->arena, ml_ref, u->regions.count);
    ml_ref added = 0;
    for (uint32_t i = 0; i < u->regions.count; added += nodes_added(u, (int)i++))
        u->first[i] = u->regions.at[i].first + added;
    uint32_t region = 0;
    for (ml_ref n = 1; n < ml_graph_count(u->g) && !u->failed; n++) {
        const bool begins = region < u->regions.count && u->regions.at[region].first == n;
        if (!begins) {
            copy_outside(u, n);
            continue;
        }
        append_region(u, (int)region);
        n += u->regions.at[region].period * u->regions.at[region].count - 1;
        region++;
    }
    if (!u->failed) unfold_roots(u);
}

ml_graph *fold_unfold(const fold *f, const ml_graph *g, ml_roots *roots, ml_arena *arena) {
    ml_roots whole = *roots;
    unfolding u = {.f = f, .g = g, .roots = &whole, .arena = arena};
    const ml_status status = ml_protect(body, &u);
    if (status == ML_OK && !u.failed) {
        *roots = whole;
        return u.to;
    }
    if (u.to) ml_graph_free(u.to);
    if (status != ML_OK) ml_raise_last();
    return NULL;
}
