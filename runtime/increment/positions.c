/* The new positions of rows, and the last of them. */
#include "runtime/increment/internal.h"

lifting increment_by(const increment *inc, const place *p, at_positions at) {
    lifting by = {p->axis, p->batch, p->outer, increment_plain(ML_I32)};
    increment_push(&by.by, inc->row, inc->rows);
    increment_push(&by.by, inc->fresh, inc->size[at]);
    if (p->inner) increment_push(&by.by, p->axis, p->inner);
    return by;
}

ml_ref increment_index(increment *inc, int64_t lead, at_positions at) {
    return ml_map2(inc->g, ML_OP_ADD, inc->position[at], ml_const_int(inc->g, ML_I32, lead));
}

/* {row}: the place of the last new token. */
static ml_ref last_index(increment *inc) {
    ml_ref one = ml_const_int(inc->g, ML_I32, 1), none = ml_const_int(inc->g, ML_I32, 0);
    return ml_map2(inc->g, ML_OP_MAXIMUM, ml_map2(inc->g, ML_OP_SUB, inc->in->count, one), none);
}

ml_ref increment_last(increment *inc, ml_ref value) {
    ml_type type = increment_plain(ML_I32);
    if (inc->size[AT_NEW] == 1) return value;
    increment_push(&type, inc->row, inc->rows);
    increment_push(&type, inc->fresh, 1);
    return ml_gather(inc->g, value, ml_broadcast(inc->g, last_index(inc), &type), inc->fresh);
}

int64_t increment_unit(const place *p, ml_axis axis) {
    if (!axis || (axis != p->axis && axis != p->outer)) return 0;
    return p->chunk && axis == (p->outer ? p->outer : p->axis) ? p->chunk : 1;
}

ml_ref increment_place_index(increment *inc, const place *p, bool outer, at_positions at) {
    ml_ref index = increment_index(inc, p->lead, at);
    if (!p->chunk) return index;
    ml_op op = outer || !p->outer ? ML_OP_IDIV : ML_OP_MOD;
    return ml_map2(inc->g, op, index, ml_const_int(inc->g, ML_I32, p->chunk));
}
