/* Recurrences: the step is the same, its states are kept between increments. Positions that are not
 * valid leave the states as they are. */
#include "runtime/increment/internal.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/recurrence/recurrence.h"

/* The state with which the new positions begin: {row, ...}; *state: what holds it. */
static ml_ref state_before(increment *inc, ml_ref n, int rows, ml_ref initial, uint32_t *state) {
    ml_ref first = increment_without_tokens(inc, initial, inc->places[n].batch);
    ml_type held = increment_without(ml_graph_type(inc->g, first), inc->row, 0);
    *state = increment_slot_state(inc, n, rows, &held);
    ml_ref value = increment_slot_read(inc, *state, first);
    ml_type type = increment_plain(ML_I32);
    increment_push(&type, inc->row, inc->rows);
    lifting by = {.by = type};
    type = increment_lifted_type(&held, &by);
    return ml_permute(inc->g, value, &type);
}

/* bool {row, new}: the scan has a step at this position. Over chunks, where one ends. */
static ml_ref steps_at(increment *inc, ml_ref n) {
    const place *p = &inc->places[n];
    return p->chunk ? ml_map2(inc->g, ML_OP_AND, inc->valid, increment_ends_chunk(inc, p))
                    : inc->valid;
}

/* ---- Linear scans ---------------------------------------------------------------------------- */

static ml_ref only_steps(increment *inc, ml_ref n, ml_ref value, double otherwise) {
    ml_graph *g = inc->g;
    if (inc->size[AT_NEW] == 1 && !inc->places[n].chunk) return value;
    return ml_where(g, steps_at(inc, n), value,
                    ml_const(g, (ml_dtype)ml_graph_type(g, value)->dtype, otherwise));
}

ml_ref increment_linear_scan(increment *inc, ml_ref n) {
    ml_graph *g = inc->g;
    ml_linear_scan scan;
    ml_linear_scan_read(g, n, &scan);
    ml_ref sources[LINEAR_SCAN_MOST_SOURCES];
    int count = ml_graph_node(g, n)->source_count;
    uint32_t state;
    for (int i = 0; i < count; i++)
        if (i != LINEAR_SCAN_STATE) sources[i] = increment_operand(inc, n, i, AT_NEW);
    sources[LINEAR_SCAN_K] = only_steps(inc, n, sources[LINEAR_SCAN_K], 0);
    sources[LINEAR_SCAN_V] = only_steps(inc, n, sources[LINEAR_SCAN_V], 0);
    sources[LINEAR_SCAN_DECAY] = only_steps(inc, n, sources[LINEAR_SCAN_DECAY], 1);
    for (int i = LINEAR_SCAN_FIRST_PAIR; i < count; i++)
        sources[i] = only_steps(inc, n, sources[i], 0);
    ml_ref initial = ml_graph_source(g, n, LINEAR_SCAN_STATE);
    sources[LINEAR_SCAN_STATE] = state_before(inc, n, 1, initial, &state);
    scan.axis = inc->fresh;
    scan.length = inc->size[AT_NEW];
    ml_ref value = ml_linear_scan_new(g, sources, &scan);
    increment_slot_write(inc, state, ml_out(g, value, 1));
    return increment_hold(inc, n, value);
}

/* ---- Other steps ----------------------------------------------------------------------------- */

typedef struct {
    increment *inc;
    ml_ref n;
    ml_recurrence r;
    ml_recurrence_pair *inputs, *states; /* one input more: which positions are valid */
    uint32_t *ids;
    ml_ref *roots;
} stepper;

static void read_inputs(stepper *s) {
    increment *inc = s->inc;
    ml_graph *g = inc->g;
    for (int i = 0; i <= s->r.inputs; i++) {
        ml_ref value =
            i < s->r.inputs ? increment_operand(inc, s->n, i, AT_NEW) : steps_at(inc, s->n);
        ml_type type = increment_plain((ml_dtype)ml_graph_type(g, value)->dtype), slice;
        increment_push(&type, inc->fresh, inc->size[AT_NEW]);
        increment_push(&type, inc->row, inc->rows);
        ml_type rest = increment_without(ml_graph_type(g, value), inc->row, inc->fresh);
        for (int k = 0; k < rest.rank; k++) increment_push(&type, rest.axis[k], rest.size[k]);
        value = ml_permute(g, value, &type);
        ml_recurrence_slice(g, value, inc->fresh, inc->size[AT_NEW], &slice);
        s->inputs[i] = (ml_recurrence_pair){ml_recurrence_parameter(g, &slice), value};
    }
}

static void read_states(stepper *s) {
    increment *inc = s->inc;
    for (int i = 0; i < s->r.states; i++) {
        ml_ref initial = ml_graph_source(inc->g, s->n, s->r.inputs + i);
        ml_ref value = state_before(inc, s->n, 1 + i, initial, &s->ids[i]);
        ml_ref parameter = ml_recurrence_parameter(inc->g, ml_graph_type(inc->g, value));
        s->states[i] = (ml_recurrence_pair){parameter, value};
    }
}

static void copy_step(stepper *s) {
    increment *inc = s->inc;
    ml_axis batch = inc->places[s->n].batch;
    int count = ml_graph_node(inc->g, s->n)->source_count;
    ml_ref *leaves = ML_NEW_ARRAY(inc->arena, ml_ref, count);
    for (int i = 0; i < count; i++)
        leaves[i] = i < s->r.inputs ? s->inputs[i].parameter
                    : i < s->r.inputs + s->r.states
                        ? s->states[i - s->r.inputs].parameter
                        : increment_without_tokens(inc, ml_graph_source(inc->g, s->n, i), batch);
    lifting by = {.batch = batch, .by = increment_plain(ML_I32)};
    increment_push(&by.by, inc->row, inc->rows);
    increment_step(inc, s->n, s->n, &by, leaves, s->roots);
}

static ml_ref apply(stepper *s) {
    increment *inc = s->inc;
    ml_graph *g = inc->g;
    ml_ref valid = s->inputs[s->r.inputs].parameter;
    for (int i = 0; i < s->r.states; i++)
        s->roots[i] = ml_where(g, valid, s->roots[i], s->states[i].parameter);
    ml_recurrence_step step = {.axis = inc->fresh,
                               .sums_stay = true,
                               .length = inc->size[AT_NEW],
                               .inputs = s->inputs,
                               .states = s->states,
                               .next = s->roots,
                               .stacked = s->roots + s->r.states,
                               .input_count = s->r.inputs + 1,
                               .state_count = s->r.states,
                               .stacked_count = s->r.stacked};
    return ml_recurrence_new(g, &step);
}

ml_ref increment_recurrence(increment *inc, ml_ref n) {
    stepper s = {.inc = inc, .n = n};
    ml_recurrence_read(inc->g, n, &s.r);
    s.inputs = ML_NEW_ARRAY(inc->arena, ml_recurrence_pair, s.r.inputs + 1);
    s.states = ML_NEW_ARRAY(inc->arena, ml_recurrence_pair, s.r.states + 1);
    s.ids = ML_NEW_ARRAY(inc->arena, uint32_t, s.r.states + 1);
    s.roots = ML_NEW_ARRAY(inc->arena, ml_ref, ml_recurrence_roots(&s.r) + 1);
    read_inputs(&s);
    read_states(&s);
    copy_step(&s);
    ml_ref value = apply(&s);
    for (int i = 0; i < s.r.states; i++)
        increment_slot_write(inc, s.ids[i], ml_out(inc->g, value, ml_recurrence_final(&s.r) + i));
    return increment_hold(inc, n, value);
}
