/* What a recurrence's step computes of its inputs alone, by a product or a sum over axes, is
 * computed for all positions at once, outside: by the same ops over tensors that have the scan's
 * axis too. The step gets its slices as a further input. */
#include <string.h>

#include "runtime/ops/recurrence/recurrence_internal.h"

static uint64_t ref_hash(ml_ref n) {
    return n * 0x9E3779B97F4A7C15u;
}

uint32_t recurrence_place(const recurrence_body *h, ml_ref n) {
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&h->places, ref_hash(n), &cursor)) != ML_INDEX_NONE)
        if (h->body.at[at] == n) return at;
    return ML_INDEX_NONE;
}

static void reach(recurrence_body *h, ml_ref n) {
    if (n < h->floor || recurrence_place(h, n) != ML_INDEX_NONE) return;
    *ML_PUSH(ml_graph_arena(h->g), &h->body) = n;
    ml_index_add(&h->places, ref_hash(n), h->body.count - 1);
}

static int depends_on(const recurrence_body *h, ml_ref n) {
    uint32_t at = recurrence_place(h, n);
    return at == ML_INDEX_NONE ? RECURRENCE_OUTSIDE : h->depends[at];
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

static void classify(recurrence_body *h, uint32_t i) {
    const ml_recurrence_step *s = h->step;
    ml_ref n = h->body.at[i], value = 0;
    const ml_node *node = ml_graph_node(h->g, n);
    if (is_one_of(s->states, s->state_count, n, &value)) {
        h->depends[i] = RECURRENCE_BY_STATES;
        for (int k = 0; k < s->state_count; k++)
            if (s->states[k].parameter == n) h->states[i] = 1u << (k < 31 ? k : 31);
        return;
    }
    if (is_one_of(s->inputs, s->input_count, n, &value)) h->depends[i] = RECURRENCE_BY_INPUTS;
    if (h->depends[i] || is_one_of(s->captured, s->captured_count, n, &value)) {
        h->vectorizes[i] = true;
        h->full[i] = value;
        return;
    }
    h->vectorizes[i] = takes_axis((ml_op)node->op) && ml_graph_type(h->g, n)->rank < ML_MAX_AXES &&
                       node->source_count > 0;
    for (int k = 0; k < node->source_count; k++) {
        ml_ref source = ml_graph_source(h->g, n, k);
        uint32_t at = recurrence_place(h, source);
        int depends = depends_on(h, source);
        if (depends > h->depends[i]) h->depends[i] = (uint8_t)depends;
        if (at != ML_INDEX_NONE) h->states[i] |= h->states[at];
        h->vectorizes[i] = h->vectorizes[i] && (at == ML_INDEX_NONE || h->vectorizes[at]);
    }
    if (h->depends[i] == RECURRENCE_OUTSIDE) h->vectorizes[i] = true, h->full[i] = n;
}

bool recurrence_multiplies(const recurrence_body *h) {
    for (uint32_t i = 0; i < h->body.count; i++)
        if (ml_graph_node(h->g, h->body.at[i])->op == ML_OP_DOT &&
            h->depends[i] == RECURRENCE_BY_STATES)
            return true;
    return false;
}

/* A product or a sum whose results of all positions are not much larger than what it reads. Sums
 * over axes of size 1 are left where the step has products anyhow: there they are views. */
static bool is_worth(const recurrence_body *h, uint32_t i) {
    enum { MOST = 16 };
    ml_ref n = h->body.at[i];
    const ml_node *node = ml_graph_node(h->g, n);
    bool reduces = node->op == ML_OP_DOT || ml_ops[node->op].op_class == ML_CLASS_REDUCE;
    if (!reduces || node->arg_count == 0) return false;
    if (node->op != ML_OP_DOT && h->step->sums_stay) return false;
    if (h->depends[i] != RECURRENCE_BY_INPUTS || !h->vectorizes[i]) return false;
    int64_t read = 0;
    for (int k = 0; k < node->source_count; k++)
        if (depends_on(h, ml_graph_source(h->g, n, k)) == RECURRENCE_BY_INPUTS)
            read += ml_type_elements(ml_graph_type(h->g, ml_graph_source(h->g, n, k)));
    if (ml_type_elements(ml_graph_type(h->g, n)) == read && node->op == ML_OP_SUM)
        return !recurrence_multiplies(h);
    return ml_type_elements(ml_graph_type(h->g, n)) / MOST <= read;
}

/* The type with the scan's axis before its own. */
static void full_type(const recurrence_body *h, ml_ref n, ml_type *out) {
    ml_type t = *ml_graph_type(h->g, n);
    *out = t;
    out->rank++;
    for (int i = 0; i < t.rank; i++) out->axis[i + 1] = t.axis[i], out->size[i + 1] = t.size[i];
    out->axis[0] = h->step->axis;
    out->size[0] = h->step->length;
}

/* n over the vectorized sources; elementwise ops and views have an operand with all axes. */
static ml_ref vectorized_node(recurrence_body *h, ml_ref n) {
    ml_graph *g = h->g;
    ml_node node = *ml_graph_node(g, n);
    ml_ref few[8], *sources = few;
    ml_type type;
    full_type(h, n, &type);
    if (node.source_count > 8) sources = ML_NEW_ARRAY(ml_graph_arena(g), ml_ref, node.source_count);
    for (int k = 0; k < node.source_count; k++)
        sources[k] = recurrence_vectorized(h, ml_graph_source(g, n, k));
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

ml_ref recurrence_vectorized(recurrence_body *h, ml_ref n) {
    uint32_t at = recurrence_place(h, n);
    if (at == ML_INDEX_NONE) return n;
    if (!h->full[at]) h->full[at] = vectorized_node(h, n);
    return h->full[at];
}

void recurrence_body_find(recurrence_body *b, ml_graph *g, const ml_recurrence_step *s,
                          const ml_ref *roots, int count) {
    ml_arena *arena = ml_graph_arena(g);
    *b = (recurrence_body){.g = g, .step = s, .floor = ml_graph_count(g)};
    b->places.arena = arena;
    const ml_recurrence_pair *pairs[] = {s->inputs, s->states, s->captured};
    const int counts[] = {s->input_count, s->state_count, s->captured_count};
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < counts[k]; i++)
            if (pairs[k][i].parameter < b->floor) b->floor = pairs[k][i].parameter;
    for (int i = 0; i < count; i++) reach(b, roots[i]);
    for (uint32_t next = 0; next < b->body.count; next++)
        for (int i = 0; i < ml_graph_node(g, b->body.at[next])->source_count; i++)
            reach(b, ml_graph_source(g, b->body.at[next], i));
    graph_sort(&b->body);
    b->places = (ml_index){.arena = arena};
    for (uint32_t i = 0; i < b->body.count; i++)
        ml_index_add(&b->places, ref_hash(b->body.at[i]), i);
    b->depends = ml_arena_alloc(arena, b->body.count + 1);
    b->states = ML_NEW_ARRAY(arena, uint32_t, b->body.count + 1);
    b->vectorizes = ML_NEW_ARRAY(arena, bool, b->body.count + 1);
    b->full = ML_NEW_ARRAY(arena, ml_ref, b->body.count + 1);
    for (uint32_t i = 0; i < b->body.count; i++) classify(b, i);
}

typedef struct {
    recurrence_body b;
    ml_ref *instead; /* by place: what stands for it in the step */
    ML_VEC(ml_recurrence_pair) inputs;
} hoisting;

/* The step with parameters in place of what is computed outside. */
static void replace(hoisting *h) {
    ml_graph *g = h->b.g;
    for (uint32_t i = 0; i < h->b.body.count; i++) {
        ml_ref n = h->b.body.at[i];
        h->instead[i] = n;
        if (is_worth(&h->b, i)) {
            ml_type slice = *ml_graph_type(g, n);
            ml_ref full = recurrence_vectorized(&h->b, n);
            ml_recurrence_pair pair = {ml_recurrence_parameter(g, &slice), full};
            *ML_PUSH(ml_graph_arena(g), &h->inputs) = pair;
            h->instead[i] = pair.parameter;
            continue;
        }
        int count = ml_graph_node(g, n)->source_count;
        ml_ref *sources = ML_NEW_ARRAY(ml_graph_arena(g), ml_ref, count + 1);
        bool changed = false;
        for (int k = 0; k < count; k++) {
            ml_ref source = ml_graph_source(g, n, k);
            uint32_t at = recurrence_place(&h->b, source);
            sources[k] = at == ML_INDEX_NONE ? source : h->instead[at];
            changed = changed || sources[k] != source;
        }
        if (changed) h->instead[i] = ml_graph_copy(g, g, n, sources);
    }
}

void recurrence_hoist(ml_graph *g, ml_recurrence_step *s) {
    ml_arena *arena = ml_graph_arena(g);
    if (s->input_count == 0) return;
    int counts[] = {s->state_count, s->stacked_count, s->summed_count}, count = 0;
    const ml_ref *lists[] = {s->next, s->stacked, s->summed};
    ml_ref *roots = ML_NEW_ARRAY(arena, ml_ref, counts[0] + counts[1] + counts[2] + 1);
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < counts[k]; i++) roots[count++] = lists[k][i];
    ml_origin origin = *g->tables->origins.at[g->origin];
    hoisting h = {.instead = NULL};
    recurrence_body_find(&h.b, g, s, roots, count);
    h.instead = ML_NEW_ARRAY(arena, ml_ref, h.b.body.count + 1);
    replace(&h);
    ml_graph_set_origin(g, &origin);
    if (h.inputs.count == 0) return;
    ml_recurrence_pair *inputs =
        ML_NEW_ARRAY(arena, ml_recurrence_pair, s->input_count + (int)h.inputs.count);
    memcpy(inputs, s->inputs, sizeof *inputs * (size_t)s->input_count);
    memcpy(inputs + s->input_count, h.inputs.at, sizeof *inputs * h.inputs.count);
    s->inputs = inputs;
    s->input_count += (int)h.inputs.count;
    for (int i = 0; i < count; i++) {
        uint32_t at = recurrence_place(&h.b, roots[i]);
        if (at != ML_INDEX_NONE) roots[i] = h.instead[at];
    }
    s->next = roots;
    s->stacked = roots + counts[0];
    s->summed = roots + counts[0] + counts[1];
}
