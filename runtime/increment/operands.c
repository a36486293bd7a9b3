/* Values of operands at the new positions. */
#include "runtime/increment/internal.h"

/* What depends on no token beside n: a table over n's positions where it has that axis and n keeps
 * it. */
static ml_ref table_operand(increment *inc, ml_ref n, int i, at_positions at) {
    place p = inc->places[n];
    ml_ref s = ml_graph_source(inc->g, n, i);
    p.lead = increment_source_lead(inc, n, i);
    bool gathered = ml_graph_node(inc->g, n)->op == ML_OP_GATHER && i == 0;
    gathered = gathered && ml_graph_args(inc->g, n)[0] == p.axis;
    if (inc->places[s].given) return increment_given(inc, s, gathered ? 0 : p.axis, p.lead, at);
    if (gathered) return increment_squeeze(inc->g, s, p.batch);
    if (ml_graph_node(inc->g, n)->op == ML_OP_ATTENTION && (i == 1 || i == 2))
        p.axis = (ml_axis)ml_graph_args(inc->g, n)[1];
    if (p.inner && ml_type_find(ml_graph_type(inc->g, s), p.axis) >= 0)
        return increment_inner_table(inc, s, &p, at);
    return increment_table(inc, s, &p, at);
}

ml_ref increment_value(increment *inc, ml_ref s, int64_t lead, at_positions at) {
    int64_t delay = inc->places[s].lead - lead;
    if (!delay) return inc->values[at][s];
    ml_ref value = increment_delayed(inc, s, delay);
    return at == AT_LAST ? increment_last(inc, value) : value;
}

ml_ref increment_operand(increment *inc, ml_ref n, int i, at_positions at) {
    ml_ref s = ml_graph_source(inc->g, n, i);
    const place *from = &inc->places[s];
    if (!from->fed) return table_operand(inc, n, i, at);
    ml_ref value = increment_value(inc, s, increment_source_lead(inc, n, i), at);
    place p = inc->places[n];
    p.lead = increment_source_lead(inc, n, i);
    if (p.outer && !from->outer && ml_type_find(ml_graph_type(inc->g, s), p.axis) >= 0)
        value = ml_gather(inc->g, value, increment_place_index(inc, &p, false, at), p.axis);
    if (inc->places[n].batch != from->batch && ml_graph_node(inc->g, n)->source_count > 1)
        value = increment_squeeze(inc->g, value, inc->places[n].batch);
    return value;
}
