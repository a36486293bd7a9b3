/* The ends of the axis of positions: pads and concatenations, whose parts are chosen by position.
 */
#include "runtime/increment/internal.h"

/* Whether the index p + lead, for positions p of the context, may be below `bound`, or not. */
static bool crosses(const increment *inc, int64_t lead, int64_t bound) {
    int64_t context = ml_type_size(ml_graph_type(inc->g, inc->in->tokens), inc->in->seq);
    return bound > lead && bound <= context - 1 + lead;
}

static ml_ref below(increment *inc, int64_t lead, int64_t bound, at_positions at) {
    return ml_map2(inc->g, ML_OP_LT, increment_index(inc, lead, at),
                   ml_const_int(inc->g, ML_I32, bound));
}

ml_ref increment_bounded(increment *inc, ml_ref value, int64_t lead, int64_t first, int64_t last,
                         at_positions at) {
    ml_graph *g = inc->g;
    ml_ref none = ml_const(g, (ml_dtype)ml_graph_type(g, value)->dtype, 0);
    if (crosses(inc, lead, first)) value = ml_where(g, below(inc, lead, first, at), none, value);
    if (crosses(inc, lead, last)) value = ml_where(g, below(inc, lead, last, at), value, none);
    return value;
}

ml_ref increment_pad(increment *inc, ml_ref n, at_positions at) {
    const int64_t *args = ml_graph_args(inc->g, n);
    const place *p = &inc->places[n];
    const ml_type *t = ml_graph_type(inc->g, ml_graph_source(inc->g, n, 0));
    int64_t unit = increment_unit(p, (ml_axis)args[0]);
    int64_t last = args[1] + ml_type_size(t, (ml_axis)args[0]);
    return increment_bounded(inc, increment_operand(inc, n, 0, at), p->lead, unit * args[1],
                             unit * last, at);
}

ml_ref increment_concat(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[n];
    ml_axis axis = (ml_axis)ml_graph_args(g, n)[0];
    lifting by = increment_by(inc, &inc->places[n], at);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
    int64_t context = ml_type_size(ml_graph_type(g, inc->in->tokens), inc->in->seq), offset = 0;
    ml_ref value = 0;
    for (int i = 0; i < ml_graph_node(g, n)->source_count; i++) {
        int64_t first = offset;
        offset += increment_unit(p, axis) *
                  ml_type_size(ml_graph_type(g, ml_graph_source(g, n, i)), axis);
        if (offset <= p->lead || first > context - 1 + p->lead) continue; /* not read */
        ml_ref part = ml_broadcast(g, increment_operand(inc, n, i, at), &type);
        value = value ? ml_where(g, below(inc, p->lead, first, at), value, part) : part;
    }
    return value;
}
