/* Positions that a script cuts into chunks: x:split("seq", chunks, within). What it computes of a
 * whole chunk is known after the chunk's last position. */
#include "runtime/increment/internal.h"

/* ---- Places ---------------------------------------------------------------------------------- */

bool increment_find_chunks(increment *inc, ml_ref n, const place *operands, place *out) {
    const place *p = operands;
    ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    bool sums = ml_ops[op].op_class == ML_CLASS_REDUCE || op == ML_OP_DOT;
    bool within = increment_names(inc->g, n, p->axis);
    *out = *p;
    if (!p->chunk || p->other || !within || increment_names(inc->g, n, p->outer)) return false;
    if (!p->outer) { /* over chunks */
        out->lead = p->lead < 0 ? p->lead : 0;
        return increment_is_running_sum(inc, n);
    }
    bool slices = op == ML_OP_SLICE;
    if (p->lead < 0 || (!sums && !slices && !increment_is_running_sum(inc, n))) return false;
    out->over = p->axis;
    out->lead = 0;
    if (!sums && !slices) return true;
    out->axis = p->outer;
    out->outer = 0;
    out->lead = p->lead + 1 - (slices ? ml_graph_args(inc->g, n)[2] : p->chunk);
    if (out->lead > 0) out->lead = 0;
    return true;
}

/* ---- Values ---------------------------------------------------------------------------------- */

/* What the last chunks are read from: under any name of its axes. */
static ml_ref unnamed(const increment *inc, ml_ref s) {
    while (ml_graph_node(inc->g, s)->op == ML_OP_RENAME) {
        const place *p = &inc->places[s];
        ml_ref of = ml_graph_source(inc->g, s, 0);
        const int64_t *args = ml_graph_args(inc->g, s);
        for (int i = 1; i < ml_graph_node(inc->g, s)->arg_count; i += 2)
            if (!increment_unit(p, (ml_axis)args[i]) && args[i] != p->batch) return s;
        s = of;
    }
    return s;
}

/* The chunk in progress begins up to chunk - 1 positions before; the last whole one, of which sums
 * are, chunk - 1 before that. The operand's element p + lead is made known by position p. */
ml_ref increment_window(increment *inc, ml_ref s, const place *query, ml_axis key,
                        at_positions at) {
    ml_graph *g = inc->g;
    ml_ref from = unnamed(inc, s);
    int64_t chunk = query->chunk, lead = inc->places[from].lead;
    int64_t rows = 2 * (chunk - 1) + lead;
    ml_ref all = increment_stacked(inc, from, rows);
    ml_type type = increment_plain(ML_I32);
    increment_push(&type, inc->row, inc->rows);
    increment_push(&type, inc->fresh, inc->size[at]);
    increment_push(&type, key, chunk);
    ml_ref first = ml_map2(g, ML_OP_MUL, increment_place_index(inc, query, true, at),
                           ml_const_int(g, ML_I32, chunk));
    ml_ref element = ml_map2(g, ML_OP_ADD, ml_broadcast(g, first, &type), ml_iota(g, key, chunk));
    ml_ref index = ml_map2(g, ML_OP_ADD, element, ml_const_int(g, ML_I32, rows - lead));
    index = ml_map2(g, ML_OP_SUB, index, inc->in->start);
    ml_ref value = ml_gather(g, all, index, inc->fresh);
    ml_ref seen = ml_map2(g, ML_OP_LE, element, increment_index(inc, query->outer ? 0 : lead, at));
    return ml_where(g, seen, value, ml_const(g, (ml_dtype)ml_graph_type(g, value)->dtype, 0));
}

ml_ref increment_spread(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    ml_ref s = ml_graph_source(g, n, 0);
    place p = inc->places[s];
    p.outer = p.axis; /* of the index within the chunk */
    return ml_gather(g, inc->values[at][s], increment_place_index(inc, &p, false, at),
                     (ml_axis)ml_graph_args(g, n)[1]);
}

ml_ref increment_ends_chunk(increment *inc, const place *p) {
    ml_graph *g = inc->g;
    ml_ref index = increment_index(inc, p->lead, AT_NEW), none = ml_const_int(g, ML_I32, 0);
    ml_ref rest = ml_map2(g, ML_OP_MOD, index, ml_const_int(g, ML_I32, p->chunk));
    return ml_map2(g, ML_OP_AND, ml_map2(g, ML_OP_GE, index, none),
                   ml_map2(g, ML_OP_EQ, rest, none));
}

/* Over chunks. */
ml_ref increment_chunk_cumsum(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[n];
    if (at == AT_LAST) return increment_last(inc, inc->values[AT_NEW][n]);
    ml_ref value = increment_operand(inc, n, 0, AT_NEW);
    ml_ref none = ml_const(g, (ml_dtype)ml_graph_type(g, value)->dtype, 0);
    return increment_running_sum(inc, n, ml_where(g, increment_ends_chunk(inc, p), value, none));
}

ml_ref increment_hold(increment *inc, ml_ref n, ml_ref value) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[n];
    if (!p->chunk) return value;
    ml_type type = *ml_graph_type(g, value);
    ml_type rest = increment_without(&type, inc->row, inc->fresh);
    uint32_t state = increment_slot_state(inc, n, 0, &rest);
    ml_ref before = increment_slot_read(inc, state, ml_const(g, (ml_dtype)rest.dtype, 0));
    type.size[ml_type_find(&type, inc->fresh)] = 1;
    before = ml_broadcast(g, before, &type);
    ml_ref all = ml_concat(g, (ml_ref[]){before, value}, 2, inc->fresh);
    ml_ref end = ml_map2(g, ML_OP_MUL, increment_place_index(inc, p, true, AT_NEW),
                         ml_const_int(g, ML_I32, p->chunk));
    end = ml_map2(g, ML_OP_SUB, end, ml_const_int(g, ML_I32, p->lead - 1));
    ml_ref index = ml_map2(g, ML_OP_SUB, end, inc->in->start);
    index = ml_map2(g, ML_OP_MAXIMUM, index, ml_const_int(g, ML_I32, 0));
    value = ml_gather(g, all, index, inc->fresh);
    increment_slot_write(inc, state, increment_squeeze(g, increment_last(inc, value), inc->fresh));
    return value;
}
