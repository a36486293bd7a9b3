/* The increment, node by node. */
#include "runtime/increment/internal.h"

/* ---- What is needed -------------------------------------------------------------------------- */

static bool reads_new(increment *inc, ml_ref n, int i) {
    if (!increment_mixes(inc, n)) return false;
    if (ml_graph_node(inc->g, n)->op != ML_OP_ATTENTION) return true;
    return i == 1 || i == 2 ||
           inc->places[ml_graph_source(inc->g, n, i)].axis != inc->places[n].axis;
}

static void need_operands(increment *inc, ml_ref n) {
    if (increment_recalls(inc, n)) {
        increment_need_recall(inc, n);
        return;
    }
    if (inc->places[n].over) {
        increment_need_contraction(inc, n);
        return;
    }
    if (increment_exclusive(inc, n)) {
        inc->needs[ml_graph_source(inc->g, n, 0)] |= inc->needs[n];
        return;
    }
    bool attends = ml_graph_node(inc->g, n)->op == ML_OP_ATTENTION && !increment_crosses(inc, n);
    if (increment_mixes(inc, n) && !attends) inc->needs[n] |= 1 << AT_NEW;
    const latent *l = attends ? increment_latent(inc, n) : NULL;
    if (l) increment_need_latent(inc, l);
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        ml_ref s = ml_graph_source(inc->g, n, i);
        if (!inc->places[s].fed || (l && (i == 1 || i == 2))) continue;
        bool delayed = inc->places[s].lead != increment_source_lead(inc, n, i);
        bool all = delayed || reads_new(inc, n, i);
        inc->needs[s] |= all ? 1 << AT_NEW : inc->needs[n];
    }
}

static void find_needs(increment *inc) {
    ml_ref logits = inc->in->logits;
    bool last = inc->in->last && inc->size[AT_NEW] > 1 && !inc->places[logits].lead;
    inc->needs[logits] = (uint8_t)(1 << (last ? AT_LAST : AT_NEW));
    for (ml_ref n = logits; n > 0; n--)
        if (inc->needs[n] && n != inc->in->tokens) need_operands(inc, n);
}

/* ---- Values ---------------------------------------------------------------------------------- */

static ml_ref mixed(increment *inc, ml_ref n, at_positions at) {
    ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    if (inc->places[n].over) return increment_contraction(inc, n, at);
    if (op == ML_OP_ATTENTION) return increment_attention(inc, n, at);
    if (at == AT_LAST) return increment_last(inc, inc->values[AT_NEW][n]);
    if (op == ML_OP_CUMSUM && inc->places[n].chunk) return increment_chunk_cumsum(inc, n, at);
    if (op == ML_OP_CONV) return increment_conv(inc, n);
    if (op == ML_OP_CUMSUM) return increment_cumsum(inc, n);
    if (op == ML_OP_LINEAR_SCAN) return increment_linear_scan(inc, n);
    return increment_recurrence(inc, n);
}

static ml_ref value_of(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    bool along =
        increment_names(g, n, inc->places[n].axis) || increment_names(g, n, inc->places[n].outer);
    if (n == inc->in->tokens)
        return at == AT_LAST ? increment_last(inc, inc->in->fed) : inc->in->fed;
    if (increment_exclusive(inc, n)) return inc->values[at][ml_graph_source(g, n, 0)];
    if (increment_recalls(inc, n)) return increment_recall(inc, n, at);
    if (increment_spreads(inc, n)) return increment_spread(inc, n, at);
    if (increment_mixes(inc, n)) return mixed(inc, n, at);
    if (increment_crosses(inc, n)) return increment_cross(inc, n, at);
    if (increment_is_rows(inc, n)) return increment_rows(inc, n, at);
    if (node.op == ML_OP_SLICE && along) return increment_operand(inc, n, 0, at);
    if (node.op == ML_OP_PAD && along) return increment_pad(inc, n, at);
    if (node.op == ML_OP_CONCAT && along) return increment_concat(inc, n, at);
    ml_ref *sources = ML_NEW_ARRAY(inc->arena, ml_ref, node.source_count);
    for (int i = 0; i < node.source_count; i++) sources[i] = increment_operand(inc, n, i, at);
    lifting by = increment_by(inc, &inc->places[n], at);
    return increment_move(inc, n, sources, &by);
}

static void find_values(increment *inc) {
    for (ml_ref n = 1; n < inc->end; n++)
        for (int at = AT_NEW; at <= AT_LAST; at++) {
            if (!(inc->needs[n] >> at & 1)) continue;
            ml_graph_set_origin(inc->g, ml_graph_origin(inc->g, n));
            inc->values[at][n] = value_of(inc, n, (at_positions)at);
        }
}

/* ---- The whole ------------------------------------------------------------------------------- */

static ml_ref new_tokens(increment *inc) {
    ml_graph *g = inc->g;
    const ml_type *t = ml_graph_type(g, inc->in->fed);
    inc->row = ml_graph_type(g, inc->in->start)->axis[0];
    for (int i = 0; i < t->rank; i++)
        if (t->axis[i] != inc->row) inc->fresh = t->axis[i];
    inc->rows = ml_type_size(t, inc->row);
    inc->size[AT_NEW] = ml_type_size(t, inc->fresh);
    inc->size[AT_LAST] = 1;
    ml_type rows = increment_plain(ML_I32);
    increment_push(&rows, inc->row, inc->rows);
    increment_push(&rows, inc->fresh, inc->size[AT_NEW]);
    return ml_broadcast(g, inc->in->start, &rows);
}

static void name_axes(increment *inc) {
    inc->slot = ml_axis_named(inc->g, "slots");
    inc->pool = ml_axis_named(inc->g, "pool");
    inc->past = ml_axis_named(inc->g, "past'");
}

/* Positions, and what is asked of rows. */
static void prepare(increment *inc) {
    ml_graph *g = inc->g;
    name_axes(inc);
    ml_ref start = new_tokens(inc), none = ml_const_int(g, ML_I32, 0);
    ml_ref step = ml_iota(g, inc->fresh, inc->size[AT_NEW]);
    inc->position[AT_NEW] = ml_map2(g, ML_OP_ADD, start, step);
    inc->position[AT_LAST] = increment_last(inc, inc->position[AT_NEW]);
    ml_type rows = *ml_graph_type(g, inc->position[AT_NEW]);
    inc->valid = ml_map2(g, ML_OP_LT, ml_broadcast(g, step, &rows), inc->in->count);
    inc->begins = ml_map2(g, ML_OP_EQ, inc->in->start, none);
    inc->active = ml_map2(g, ML_OP_GT, inc->in->count, none);
}

static void allocate(increment *inc) {
    inc->end = inc->in->logits + 1;
    inc->live = ML_NEW_ARRAY(inc->arena, bool, inc->end);
    inc->places = ML_NEW_ARRAY(inc->arena, place, inc->end);
    inc->needs = ML_NEW_ARRAY(inc->arena, uint8_t, inc->end);
    for (int at = AT_NEW; at <= AT_LAST; at++)
        inc->values[at] = ML_NEW_ARRAY(inc->arena, ml_ref, inc->end);
    inc->table_index = (ml_index){.arena = inc->arena};
    inc->wide_index = (ml_index){.arena = inc->arena};
}

static ml_ref finish(increment *inc) {
    ml_graph *g = inc->g;
    ml_ref logits = inc->in->logits;
    bool last = inc->needs[logits] >> AT_LAST & 1;
    ml_ref value = inc->values[last][logits];
    if (inc->places[logits].lead) value = increment_delayed(inc, logits, inc->places[logits].lead);
    if (inc->in->last && !last) value = increment_last(inc, value);
    lifting by = increment_by(inc, &inc->places[logits], inc->in->last ? AT_LAST : AT_NEW);
    ml_type type = increment_lifted_type(ml_graph_type(g, logits), &by);
    value = ml_permute(g, value, &type);
    return inc->in->last ? ml_merge(g, value, inc->row, inc->fresh, inc->row) : value;
}

void ml_increment_derive(ml_graph *g, const ml_increment *in, ml_kept_list *kept, ml_arena *arena,
                         ml_increment_result *out) {
    ml_increment by_definition = *in;
    increment inc = {.g = g, .arena = arena, .in = &by_definition, .kept = kept, .out = out};
    *out = (ml_increment_result){0};
    by_definition.logits = increment_with_definitions(&inc, in->logits);
    allocate(&inc);
    prepare(&inc);
    increment_find_places(&inc);
    find_needs(&inc);
    find_values(&inc);
    out->logits = finish(&inc);
}

void ml_increment_give(ml_graph *g, const ml_increment *in, ml_kept_list *kept, ml_arena *arena,
                       ml_increment_result *out) {
    ml_increment by_definition = *in;
    increment inc = {.g = g, .arena = arena, .in = &by_definition, .kept = kept, .out = out};
    *out = (ml_increment_result){0};
    by_definition.logits = increment_with_definitions(&inc, in->logits);
    allocate(&inc);
    name_axes(&inc);
    inc.row = ml_graph_type(g, in->slots)->axis[0];
    inc.rows = ml_type_size(ml_graph_type(g, in->slots), inc.row);
    increment_find_places(&inc);
    increment_hold_given(&inc);
}
