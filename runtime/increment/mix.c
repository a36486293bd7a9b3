/* Convolutions and running sums, whose states are the last inputs and the sum. */
#include "runtime/increment/internal.h"
#include "runtime/ops/conv/conv.h"

static void find_window(increment *inc, ml_ref n, conv_window *out) {
    conv_window windows[CONV_WINDOWS];
    int count = conv_read(inc->g, n, windows);
    for (int i = 0; i < count; i++)
        if (windows[i].axis == inc->places[n].axis) *out = windows[i];
}

/* The operand's elements from which the new positions are computed, `reach` before those on. */
static ml_ref window_rows(increment *inc, ml_ref n, int64_t rows, int64_t after) {
    ml_graph *g = inc->g;
    ml_ref s = ml_graph_source(g, n, 0);
    ml_ref all = increment_stacked(inc, s, rows);
    return ml_slice(g, all, inc->fresh, 0, rows + inc->size[AT_NEW] - after);
}

ml_ref increment_conv(increment *inc, ml_ref n) {
    ml_graph *g = inc->g;
    conv_window w = {0}, windows[CONV_WINDOWS];
    find_window(inc, n, &w);
    int count = conv_read(g, n, windows);
    int64_t span = w.dilation * (conv_taps(g, n, &w) - 1);
    int64_t least = span < 0 ? span : 0, most = span < 0 ? 0 : span;
    int64_t lead = inc->places[n].lead, from = inc->places[ml_graph_source(g, n, 0)].lead;
    ml_ref rows =
        window_rows(inc, n, from - lead + w.before - least, from - lead + w.before - most);
    for (int i = 0; i < count; i++) {
        if (windows[i].axis != w.axis) continue;
        windows[i].axis = inc->fresh;
        windows[i].before = least;
    }
    lifting by = increment_by(inc, &inc->places[n], AT_NEW);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
    ml_ref filter = ml_graph_source(g, n, 1);
    if (inc->places[filter].given) filter = increment_without_tokens(inc, filter, 0);
    return ml_conv(g, rows, filter, windows, count, &type);
}

/* Sums along the new positions, and the elements of each. */
static ml_ref sums(increment *inc, ml_ref n, ml_ref value) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[n];
    const int64_t args[2] = {inc->fresh, 0}, size = inc->size[AT_NEW];
    lifting by = increment_by(inc, &inc->places[n], AT_NEW);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
    if (size * (increment_each(p)) == 1) return value;
    if (p->inner)
        value = ml_merge(g, ml_broadcast(g, value, &type), inc->fresh, p->axis, inc->fresh);
    value = ml_graph_add(g, ML_OP_CUMSUM, &value, 1, args, 2, NULL);
    return p->inner ? ml_split(g, value, inc->fresh, inc->fresh, size, p->axis, p->inner) : value;
}

/* value {row, new, ...} of the last new position, and of its last element. */
static ml_ref last_sum(increment *inc, ml_ref n, ml_ref value) {
    const place *p = &inc->places[n];
    ml_ref last = increment_squeeze(inc->g, increment_last(inc, value), inc->fresh);
    if (!p->inner) return last;
    return ml_gather(inc->g, last, ml_const_int(inc->g, ML_I32, p->inner - 1), p->axis);
}

ml_ref increment_cumsum(increment *inc, ml_ref n) {
    return increment_running_sum(inc, n, increment_operand(inc, n, 0, AT_NEW));
}

/* {row, ...}: the sum of what is before the new positions; *state: what holds it. */
static ml_ref sum_so_far(increment *inc, ml_ref n, ml_ref value, uint32_t *state) {
    ml_graph *g = inc->g;
    ml_type rest = increment_without(ml_graph_type(g, value), inc->row, inc->fresh);
    rest = increment_without(&rest, inc->places[n].axis, 0);
    *state = increment_slot_state(inc, n, 1, &rest);
    return increment_slot_read(inc, *state, ml_const(g, (ml_dtype)rest.dtype, 0));
}

ml_ref increment_sum_before(increment *inc, ml_ref n) {
    ml_graph *g = inc->g;
    ml_ref value = inc->values[AT_NEW][n];
    ml_type type = *ml_graph_type(g, value);
    uint32_t state;
    ml_ref first = sum_so_far(inc, n, value, &state);
    type.size[ml_type_find(&type, inc->fresh)] = 1;
    first = ml_broadcast(g, first, &type);
    if (inc->size[AT_NEW] == 1) return first;
    value = ml_slice(g, value, inc->fresh, 0, inc->size[AT_NEW] - 1);
    return ml_concat(g, (ml_ref[]){first, value}, 2, inc->fresh);
}

ml_ref increment_running_sum(increment *inc, ml_ref n, ml_ref value) {
    uint32_t state;
    value = sums(inc, n, value);
    value = ml_map2(inc->g, ML_OP_ADD, value, sum_so_far(inc, n, value, &state));
    increment_slot_write(inc, state, last_sum(inc, n, value));
    return value;
}
