/* Recurrences: the step is the same, its states are kept between increments. Positions that are not
 * valid leave the states as they are. */
#include "runtime/graph/linear_scan.h"
#include "runtime/graph/recurrence.h"
#include "runtime/increment/internal.h"

/* The state with which the new positions begin: {row, ...}; *state: what holds it. */
static ml_ref state_before(increment *inc, ml_ref n, int rows, ml_ref initial, uint32_t *state) {
    ml_ref first = increment_squeeze(inc->g, initial, inc->places[n].batch);
    *state = increment_slot_state(inc, n, rows, ml_graph_type(inc->g, first));
    ml_ref value = increment_slot_read(inc, *state, first);
    ml_type type = increment_plain(ML_I32);
    increment_push(&type, inc->row, inc->rows);
    lifting by = {.by = type};
    type = increment_lifted_type(ml_graph_type(inc->g, first), &by);
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
    ml_ref *copies; /* of the step, by node */
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

/* Parameter i of the step. */
static ml_ref leaf(stepper *s, int i) {
    increment *inc = s->inc;
    if (i < s->r.inputs) return s->inputs[i].parameter;
    i -= s->r.inputs;
    if (i < s->r.states) return s->states[i].parameter;
    return increment_squeeze(inc->g, ml_graph_source(inc->g, s->n, s->r.inputs + i),
                             inc->places[s->n].batch);
}

static ml_ref copy_step_node(stepper *s, ml_ref n) {
    increment *inc = s->inc;
    ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    lifting by = {.batch = inc->places[s->n].batch, .by = increment_plain(ML_I32)};
    increment_push(&by.by, inc->row, inc->rows);
    if (node.op == ML_OP_PARAM) return leaf(s, (int)ml_graph_args(g, n)[0]);
    if (node.op == ML_OP_CONST || node.op == ML_OP_IOTA)
        return ml_graph_add(g, (ml_op)node.op, NULL, 0, ml_graph_args(g, n), node.arg_count,
                            ml_graph_type(g, n));
    bool reduces = ml_ops[node.op].op_class == ML_CLASS_REDUCE || node.op == ML_OP_RENAME;
    if (!increment_by_parts(g, n, 0) || (increment_names(g, n, by.batch) && !reduces))
        increment_refuse(inc, s->n, "compute it outside of the step",
                         "%s in the step of a scan has no increment yet", ml_ops[node.op].name);
    ml_ref *sources = ML_NEW_ARRAY(inc->arena, ml_ref, node.source_count);
    for (int i = 0; i < node.source_count; i++) sources[i] = s->copies[ml_graph_source(g, n, i)];
    return increment_lift(inc, n, sources, &by);
}

static void copy_step(stepper *s) {
    ml_graph *g = s->inc->g;
    int roots = ml_recurrence_roots(&s->r);
    ml_ref end = 0;
    for (int i = 0; i < roots; i++)
        if (ml_recurrence_root(g, s->n, i) >= end) end = ml_recurrence_root(g, s->n, i) + 1;
    bool *reached = ML_NEW_ARRAY(s->inc->arena, bool, end);
    s->copies = ML_NEW_ARRAY(s->inc->arena, ml_ref, end);
    for (int i = 0; i < roots; i++) reached[ml_recurrence_root(g, s->n, i)] = true;
    for (ml_ref n = end - 1; n > 0; n--)
        for (int i = 0; reached[n] && i < ml_graph_node(g, n)->source_count; i++)
            reached[ml_graph_source(g, n, i)] = true;
    for (ml_ref n = 1; n < end; n++)
        if (reached[n]) s->copies[n] = copy_step_node(s, n);
    for (int i = 0; i < roots; i++) {
        ml_ref root = ml_recurrence_root(g, s->n, i);
        lifting by = {.batch = s->inc->places[s->n].batch, .by = increment_plain(ML_I32)};
        increment_push(&by.by, s->inc->row, s->inc->rows);
        ml_type type = increment_lifted_type(ml_graph_type(g, root), &by);
        s->roots[i] = ml_broadcast(g, s->copies[root], &type);
    }
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
