/* What a recurrence's step computes of its inputs alone, by a product or a sum over axes, is
 * computed for all positions at once, outside: by the same ops over tensors that have the scan's
 * axis too. The step gets its slices as a further input. */
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/graph/recurrence.h"

enum { OUTSIDE, BY_INPUTS, BY_STATES }; /* what a node depends on */

typedef struct {
    ml_graph *g;
    ml_recurrence_step *step;
    ml_ref floor;     /* nodes before it depend on no parameter of the step */
    ml_refs body;     /* what the roots reach from there on, ascending */
    ml_index places;  /* of nodes in body */
    uint8_t *depends; /* by place */
    bool *vectorizes; /* by place: it can be computed for all positions at once */
    ml_ref *full;     /* by place: that; 0 not yet */
    ml_ref *instead;  /* by place: what stands for it in the step */
    ML_VEC(ml_recurrence_pair) inputs;
} hoisting;

static uint64_t ref_hash(ml_ref n) {
    return n * 0x9E3779B97F4A7C15u;
}

static uint32_t place_of(const hoisting *h, ml_ref n) {
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&h->places, ref_hash(n), &cursor)) != ML_INDEX_NONE)
        if (h->body.at[at] == n) return at;
    return ML_INDEX_NONE;
}

static void reach(hoisting *h, ml_ref n) {
    if (n < h->floor || place_of(h, n) != ML_INDEX_NONE) return;
    *ML_PUSH(ml_graph_arena(h->g), &h->body) = n;
    ml_index_add(&h->places, ref_hash(n), h->body.count - 1);
}

static int depends_on(const hoisting *h, ml_ref n) {
    uint32_t at = place_of(h, n);
    return at == ML_INDEX_NONE ? OUTSIDE : h->depends[at];
}

static bool is_one_of(const ml_recurrence_pair *pairs, int count, ml_ref n, ml_ref *value) {
    for (int i = 0; i < count; i++)
        if (pairs[i].parameter == n) {
            *value = pairs[i].value;
            return true;
        }
    return false;
}

/* Ops that take a further axis by name. */
static bool takes_axis(ml_op op) {
    return ml_op_is_function(op) || op == ML_OP_DOT || op == ML_OP_SUM || op == ML_OP_MAX ||
           op == ML_OP_MIN || (ml_op_is(op, ML_VIEW) && ml_op_is(op, ML_BY_PARTS)) ||
           op == ML_OP_PAD;
}

static void classify(hoisting *h, uint32_t i) {
    const ml_recurrence_step *s = h->step;
    ml_ref n = h->body.at[i], value;
    const ml_node *node = ml_graph_node(h->g, n);
    if (is_one_of(s->states, s->state_count, n, &value)) {
        h->depends[i] = BY_STATES;
        return;
    }
    if (is_one_of(s->inputs, s->input_count, n, &value)) h->depends[i] = BY_INPUTS;
    if (h->depends[i] || is_one_of(s->captured, s->captured_count, n, &value)) {
        h->vectorizes[i] = true;
        h->full[i] = value;
        return;
    }
    h->vectorizes[i] = takes_axis((ml_op)node->op) && ml_graph_type(h->g, n)->rank < ML_MAX_AXES &&
                       node->source_count > 0;
    for (int k = 0; k < node->source_count; k++) {
        ml_ref source = ml_graph_source(h->g, n, k);
        uint32_t at = place_of(h, source);
        int depends = depends_on(h, source);
        if (depends > h->depends[i]) h->depends[i] = (uint8_t)depends;
        h->vectorizes[i] = h->vectorizes[i] && (at == ML_INDEX_NONE || h->vectorizes[at]);
    }
    if (h->depends[i] == OUTSIDE) h->vectorizes[i] = true, h->full[i] = n;
}

/* A product or a sum whose results of all positions are not much larger than what it reads. */
static bool is_worth(const hoisting *h, uint32_t i) {
    enum { MOST = 16 };
    ml_ref n = h->body.at[i];
    const ml_node *node = ml_graph_node(h->g, n);
    bool reduces = node->op == ML_OP_DOT || ml_ops[node->op].op_class == ML_CLASS_REDUCE;
    if (!reduces || node->arg_count == 0) return false;
    if (h->depends[i] != BY_INPUTS || !h->vectorizes[i]) return false;
    int64_t read = 0;
    for (int k = 0; k < node->source_count; k++)
        if (depends_on(h, ml_graph_source(h->g, n, k)) == BY_INPUTS)
            read += ml_type_elements(ml_graph_type(h->g, ml_graph_source(h->g, n, k)));
    return ml_type_elements(ml_graph_type(h->g, n)) / MOST <= read;
}

/* The type with the scan's axis before its own. */
static void full_type(const hoisting *h, ml_ref n, ml_type *out) {
    ml_type t = *ml_graph_type(h->g, n);
    *out = t;
    out->rank++;
    for (int i = 0; i < t.rank; i++) out->axis[i + 1] = t.axis[i], out->size[i + 1] = t.size[i];
    out->axis[0] = h->step->axis;
    out->size[0] = h->step->length;
}

static ml_ref vectorized(hoisting *h, ml_ref n);

/* n over the vectorized sources; elementwise ops and views have an operand with all axes. */
static ml_ref vectorized_node(hoisting *h, ml_ref n) {
    ml_graph *g = h->g;
    ml_node node = *ml_graph_node(g, n);
    ml_ref few[8], *sources = few;
    ml_type type;
    full_type(h, n, &type);
    if (node.source_count > 8) sources = ML_NEW_ARRAY(ml_graph_arena(g), ml_ref, node.source_count);
    for (int k = 0; k < node.source_count; k++)
        sources[k] = vectorized(h, ml_graph_source(g, n, k));
    graph_take_origin(g, g, n);
    for (int k = 0; ml_op_is_function((ml_op)node.op) && k < node.source_count; k++) {
        const ml_type *t = ml_graph_type(g, sources[k]);
        if (ml_type_find(t, h->step->axis) < 0) continue;
        ml_type wide = type;
        wide.dtype = t->dtype;
        if (t->rank < wide.rank) sources[k] = ml_broadcast(g, sources[k], &wide);
        break;
    }
    if (node.op == ML_OP_PERMUTE) return ml_permute(g, sources[0], &type);
    if (node.op == ML_OP_BROADCAST) return ml_broadcast(g, sources[0], &type);
    int64_t *args = ML_NEW_ARRAY(ml_graph_arena(g), int64_t, node.arg_count + 1);
    if (node.arg_count) memcpy(args, ml_graph_args(g, n), sizeof *args * node.arg_count);
    ml_ref made =
        ml_graph_add(g, (ml_op)node.op, sources, node.source_count, args, node.arg_count, &type);
    return ml_permute(g, made, &type);
}

static ml_ref vectorized(hoisting *h, ml_ref n) {
    uint32_t at = place_of(h, n);
    if (at == ML_INDEX_NONE) return n;
    if (!h->full[at]) h->full[at] = vectorized_node(h, n);
    return h->full[at];
}

static void reach_all(hoisting *h) {
    const ml_recurrence_step *s = h->step;
    ml_arena *arena = ml_graph_arena(h->g);
    for (int i = 0; i < s->state_count; i++) reach(h, s->next[i]);
    for (int i = 0; i < s->stacked_count; i++) reach(h, s->stacked[i]);
    for (int i = 0; i < s->summed_count; i++) reach(h, s->summed[i]);
    for (uint32_t next = 0; next < h->body.count; next++)
        for (int i = 0; i < ml_graph_node(h->g, h->body.at[next])->source_count; i++)
            reach(h, ml_graph_source(h->g, h->body.at[next], i));
    graph_sort(&h->body);
    h->places = (ml_index){.arena = arena};
    for (uint32_t i = 0; i < h->body.count; i++)
        ml_index_add(&h->places, ref_hash(h->body.at[i]), i);
    h->depends = ml_arena_alloc(arena, h->body.count + 1);
    h->vectorizes = ML_NEW_ARRAY(arena, bool, h->body.count + 1);
    h->full = ML_NEW_ARRAY(arena, ml_ref, h->body.count + 1);
    h->instead = ML_NEW_ARRAY(arena, ml_ref, h->body.count + 1);
    for (uint32_t i = 0; i < h->body.count; i++) classify(h, i);
}

/* The step with parameters in place of what is computed outside; false where nothing is. */
static bool replace(hoisting *h) {
    ml_graph *g = h->g;
    for (uint32_t i = 0; i < h->body.count; i++) {
        ml_ref n = h->body.at[i];
        h->instead[i] = n;
        if (is_worth(h, i)) {
            ml_type slice = *ml_graph_type(g, n);
            ml_recurrence_pair pair = {ml_recurrence_parameter(g, &slice), vectorized(h, n)};
            *ML_PUSH(ml_graph_arena(g), &h->inputs) = pair;
            h->instead[i] = pair.parameter;
            continue;
        }
        int count = ml_graph_node(g, n)->source_count;
        ml_ref *sources = ML_NEW_ARRAY(ml_graph_arena(g), ml_ref, count + 1);
        bool changed = false;
        for (int k = 0; k < count; k++) {
            ml_ref source = ml_graph_source(g, n, k);
            uint32_t at = place_of(h, source);
            sources[k] = at == ML_INDEX_NONE ? source : h->instead[at];
            changed = changed || sources[k] != source;
        }
        if (changed) h->instead[i] = ml_graph_copy(g, g, n, sources);
    }
    return h->inputs.count > 0;
}

static const ml_ref *replaced(const hoisting *h, const ml_ref *roots, int count) {
    ml_ref *list = ML_NEW_ARRAY(ml_graph_arena(h->g), ml_ref, count + 1);
    for (int i = 0; i < count; i++) {
        uint32_t at = place_of(h, roots[i]);
        list[i] = at == ML_INDEX_NONE ? roots[i] : h->instead[at];
    }
    return list;
}

void recurrence_hoist(ml_graph *g, ml_recurrence_step *s) {
    hoisting h = {.g = g, .step = s, .floor = ml_graph_count(g)};
    ml_arena *arena = ml_graph_arena(g);
    h.places.arena = arena;
    if (s->input_count == 0) return;
    const ml_recurrence_pair *pairs[] = {s->inputs, s->states, s->captured};
    const int counts[] = {s->input_count, s->state_count, s->captured_count};
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < counts[k]; i++)
            if (pairs[k][i].parameter < h.floor) h.floor = pairs[k][i].parameter;
    ml_origin origin = *g->tables->origins.at[g->origin];
    reach_all(&h);
    bool some = replace(&h);
    ml_graph_set_origin(g, &origin);
    if (!some) return;
    int count = s->input_count + (int)h.inputs.count;
    ml_recurrence_pair *inputs = ML_NEW_ARRAY(arena, ml_recurrence_pair, count);
    memcpy(inputs, s->inputs, sizeof *inputs * (size_t)s->input_count);
    memcpy(inputs + s->input_count, h.inputs.at, sizeof *inputs * h.inputs.count);
    s->inputs = inputs;
    s->input_count = count;
    s->next = replaced(&h, s->next, s->state_count);
    s->stacked = replaced(&h, s->stacked, s->stacked_count);
    s->summed = replaced(&h, s->summed, s->summed_count);
}
