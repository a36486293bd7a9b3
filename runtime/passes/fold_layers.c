/* Leaving layers out of a program (fold_layers.h). */
#include "runtime/passes/fold_layers.h"

#include <assert.h>
#include <string.h>

#include "runtime/graph/infer.h"

enum { LEAST_FOLDED = 16 }; /* layers that are left out, at least */

/* ---- Which layers ---------------------------------------------------------------------------- */

static bool choose_layers(fold *f) {
    int64_t first = INT64_MIN, last = INT64_MAX;
    for (uint32_t i = 0; i < f->regions.count; i++) {
        const repeat *r = &f->regions.at[i];
        const int64_t a = r->layer, b = repeats_layer(r, (int64_t)r->count - 1);
        if ((a < b ? a : b) > first) first = a < b ? a : b;
        if ((a < b ? b : a) < last) last = a < b ? b : a;
    }
    f->low = first + f->margin;
    f->high = last - f->margin + 1;
    return f->regions.count > 0 && f->high - f->low >= LEAST_FOLDED;
}

/* The layer of node n; false: of none. */
static bool layer_of(const fold *f, ml_ref n, int *region, int64_t *layer) {
    *region = repeats_of(&f->regions, n);
    if (*region < 0) return false;
    const repeat *r = &f->regions.at[*region];
    *layer = repeats_layer(r, repeats_time(r, n));
    return true;
}

static bool left_out(const fold *f, int64_t layer) {
    return layer >= f->low && layer < f->high;
}

/* What stands for node n, of a layer that is left out, where a node of layer `user` reads it: the
 * node of a layer that stays, as near to the user. */
static ml_ref stand_in(const fold *f, int region, ml_ref n, int64_t user) {
    const repeat *r = &f->regions.at[region];
    const int64_t moved = (f->high - f->low) * r->period * r->direction;
    return (ml_ref)(user >= f->high ? n - moved : n + moved);
}

/* ---- Anchors --------------------------------------------------------------------------------- */

static void add_anchor(fold_anchor *anchor, ml_ref node, int region, int64_t layer) {
    if (!anchor->node) *anchor = (fold_anchor){node, region, layer};
}

static void find_anchors(fold *f) {
    const ml_graph *g = f->from;
    f->state_count = ml_graph_state_count(g);
    f->origin_count = g->tables->origins.count;
    f->states = ML_NEW_ARRAY(f->arena, fold_anchor, f->state_count + 1);
    f->origins = ML_NEW_ARRAY(f->arena, fold_anchor, f->origin_count + 1);
    for (uint32_t i = 0; i < f->regions.count; i++) {
        const repeat *r = &f->regions.at[i];
        const ml_ref middle = r->first + r->count / 2 * r->period;
        for (uint32_t k = 0; k < r->period; k++) {
            const ml_node *node = ml_graph_node(g, middle + k);
            const bool state = node->op == ML_OP_STATE;
            const bool line = node->origin != ml_graph_node(g, middle + k - r->period)->origin;
            for (uint32_t t = 0; t < r->count && (state || line); t++) {
                const ml_ref n = r->first + t * r->period + k;
                const int64_t layer = repeats_layer(r, t);
                if (state)
                    add_anchor(&f->states[ml_graph_args(g, n)[0]], r->first + k, (int)i, layer);
                if (line)
                    add_anchor(&f->origins[ml_graph_node(g, n)->origin], r->first + k, (int)i,
                               layer);
            }
        }
    }
}

/* The node of the same place whose layer stays, where a node of layer `user` has the anchor; 0: its
 * own. */
static ml_ref renamed(const fold *f, const fold_anchor *anchor, int64_t user) {
    if (!anchor->node || !left_out(f, anchor->layer)) return 0;
    const repeat *r = &f->regions.at[anchor->region];
    const int64_t time = (anchor->layer - r->layer) * r->direction;
    return stand_in(f, anchor->region, anchor->node + (ml_ref)time * r->period, user);
}

/* ---- The folded graph ------------------------------------------------------------------------ */

static ml_ref source_of(const fold *f, const ml_ref *copies, ml_ref n, ml_ref source) {
    int region, of;
    int64_t layer, user;
    if (copies[source] || !layer_of(f, source, &region, &layer) || !left_out(f, layer))
        return copies[source];
    if (!layer_of(f, n, &of, &user)) return 0; /* it reads all layers */
    return copies[stand_in(f, region, source, user)];
}

/* At the ends of what is left out periods have nodes of the layer beside theirs. */
static void rename_copy(const fold *f, ml_graph *to, ml_ref copy, ml_ref n) {
    ml_node *node = &to->nodes.at[copy];
    int region;
    int64_t layer;
    if (!layer_of(f, n, &region, &layer)) return;
    const ml_ref line = renamed(f, &f->origins[node->origin], layer);
    if (line) node->origin = ml_graph_node(f->from, line)->origin;
    if (node->op != ML_OP_STATE) return;
    const ml_ref state = renamed(f, &f->states[to->args.at[node->args]], layer);
    if (state) to->args.at[node->args] = ml_graph_args(f->from, state)[0];
}

static ml_ref copied_function(void *copies, ml_ref function) {
    const ml_ref copy = ((const ml_ref *)copies)[function];
    assert(copy); /* in no region, so it stays */
    return copy;
}

static bool copy_node(const fold *f, ml_graph *to, ml_ref *copies, ml_ref n) {
    ml_ref few[16], *sources = few;
    const int count = ml_graph_node(f->from, n)->source_count;
    if (count > 16) sources = ML_NEW_ARRAY(f->arena, ml_ref, count);
    for (int k = 0; k < count; k++) {
        sources[k] = source_of(f, copies, n, ml_graph_source(f->from, n, k));
        if (!sources[k]) return false;
    }
    copies[n] = graph_append_placed(to, f->from, n, sources, copied_function, copies);
    rename_copy(f, to, copies[n], n);
    return true;
}

static bool copy_nodes(const fold *f, ml_graph *to, ml_ref *copies) {
    int region;
    int64_t layer;
    for (ml_ref n = 1; n < ml_graph_count(f->from); n++) {
        if (layer_of(f, n, &region, &layer) && left_out(f, layer)) {
            const repeat *r = &f->regions.at[region]; /* to the end of this period */
            n = r->first + (repeats_time(r, n) + 1) * r->period - 1;
        } else if (!copy_node(f, to, copies, n)) {
            return false;
        }
    }
    return true;
}

/* ---- Roots ----------------------------------------------------------------------------------- */

/* Whether two updates, `apart` layers from one another, set the same state of their layers. */
static bool sets_alike(const fold *f, const ml_update *a, const ml_update *b, int64_t apart) {
    const fold_anchor *of = &f->states[a->state], *other = &f->states[b->state];
    if (!of->node || !other->node) /* no node reads it */
        return of->node == other->node &&
               ml_graph_state(f->from, a->state)->kind == ml_graph_state(f->from, b->state)->kind;
    return of->node == other->node && of->layer - other->layer == apart;
}

/* An update of a layer that is left out is as the same one of layer low - 1; `by_value`: 1 + the
 * update of a value that stays. */
static bool repeat_update(fold *f, int i, const int *by_value) {
    const ml_update *update = &f->roots.updates[i];
    fold_update *u = &f->updates[i];
    const repeat *r = &f->regions.at[repeats_of(&f->regions, update->value)];
    const int64_t back = u->layer - (f->low - 1);
    const int like = by_value[update->value - (uint32_t)(back * r->direction) * r->period] - 1;
    if (like < 0 || !sets_alike(f, update, &f->roots.updates[like], back)) return false;
    u->update = f->updates[like].update;
    return true;
}

static bool fold_updates(fold *f, const ml_ref *copies, ml_roots *roots) {
    int *by_value = ML_NEW_ARRAY(f->arena, int, ml_graph_count(f->from));
    ml_update *stay = ML_NEW_ARRAY(f->arena, ml_update, roots->update_count + 1);
    int count = 0;
    int64_t missing = 0; /* updates of layers that are left out, should they repeat */
    f->updates = ML_NEW_ARRAY(f->arena, fold_update, roots->update_count + 1);
    for (int i = 0; i < roots->update_count; i++) {
        ml_update update = roots->updates[i];
        fold_update *u = &f->updates[i];
        int region;
        u->inside = layer_of(f, update.value, &region, &u->layer);
        if (u->inside && by_value[update.value]) return false; /* it is new of two states */
        if (u->inside && u->layer == f->low - 1) missing += f->high - f->low;
        if (u->inside && left_out(f, u->layer)) continue;
        by_value[update.value] = i + 1;
        const ml_ref other = u->inside ? renamed(f, &f->states[update.state], u->layer) : 0;
        if (other) update.state = (uint32_t)ml_graph_args(f->from, other)[0];
        u->update = count;
        stay[count++] = (ml_update){update.state, copies[update.value]};
    }
    for (int i = 0; i < roots->update_count; i++) {
        if (!f->updates[i].inside || !left_out(f, f->updates[i].layer)) continue;
        if (!repeat_update(f, i, by_value)) return false;
        missing--;
    }
    roots->updates = stay;
    roots->update_count = count;
    return missing == 0;
}

static bool fold_outputs(fold *f, const ml_ref *copies, ml_roots *roots) {
    ml_ref *outputs = ML_NEW_ARRAY(f->arena, ml_ref, roots->output_count + 1);
    for (int i = 0; i < roots->output_count; i++)
        if (!(outputs[i] = copies[roots->outputs[i]])) return false;
    roots->outputs = outputs;
    return true;
}

typedef struct {
    fold *fold;
    ml_roots *roots;
    ml_graph *to;
    bool done;
} folding;

static void body(void *argument) {
    folding *p = argument;
    fold *f = p->fold;
    repeats_find(f->from, 2 * (uint32_t)f->margin + LEAST_FOLDED, f->arena, &f->regions);
    if (!choose_layers(f)) return;
    p->to = ml_graph_derive(f->from);
    ml_ref *copies = ML_NEW_ARRAY(f->arena, ml_ref, ml_graph_count(f->from));
    find_anchors(f);
    p->done = copy_nodes(f, p->to, copies) && fold_updates(f, copies, p->roots) &&
              fold_outputs(f, copies, p->roots);
}

ml_graph *fold_layers(const ml_graph *from, ml_roots *roots, int margin, ml_arena *arena, fold *f) {
    *f = (fold){.from = from, .roots = *roots, .margin = margin, .arena = arena};
    folding p = {.fold = f, .roots = roots};
    const ml_status status = ml_protect(body, &p);
    if (status == ML_OK && p.done) return p.to;
    if (p.to) ml_graph_free(p.to);
    if (status != ML_OK) ml_raise_last();
    *roots = f->roots;
    return NULL;
}
