/* What depends on no token: read at the rows' own positions, without computing it at all of them
 * where it is computed position by position; and the first elements of padded axes. */
#include "runtime/increment/internal.h"

static uint64_t table_hash(const table_entry *e) {
    uint64_t h = ml_mix(e->node, (uint64_t)e->axis << 32 | e->batch);
    return ml_mix(h, (uint64_t)e->lead << 1 | (e->at == AT_LAST));
}

static table_entry *find_table(increment *inc, const table_entry *key) {
    uint32_t cursor = 0, i;
    while ((i = ml_index_next(&inc->table_index, table_hash(key), &cursor)) != ML_INDEX_NONE) {
        table_entry *e = &inc->tables.at[i];
        if (e->node == key->node && e->axis == key->axis && e->batch == key->batch &&
            e->lead == key->lead && e->at == key->at)
            return e;
    }
    return NULL;
}

static ml_ref lift_table(increment *inc, const table_entry *t) {
    const ml_ref n = t->node;
    const int count = ml_graph_node(inc->g, n)->source_count;
    ml_ref *sources = ML_NEW_ARRAY(inc->arena, ml_ref, count);
    ml_axis axis = increment_before(inc->g, n, t->axis);
    ml_axis batch = t->batch ? increment_before(inc->g, n, t->batch) : 0;
    lifting by = {t->axis, t->batch, increment_plain(ML_I32)};
    increment_push(&by.by, inc->row, inc->rows);
    increment_push(&by.by, inc->fresh, inc->size[t->at]);
    for (int i = 0; i < count; i++)
        sources[i] =
            increment_table(inc, ml_graph_source(inc->g, n, i), axis, batch, t->lead, t->at);
    return increment_lift(inc, n, sources, &by);
}

static ml_ref read_table(increment *inc, const table_entry *t) {
    ml_graph *g = inc->g;
    const ml_ref n = t->node;
    const ml_op op = (ml_op)ml_graph_node(g, n)->op;
    const int64_t *args = ml_graph_args(g, n);
    if (op == ML_OP_IOTA)
        return ml_cast(g, increment_index(inc, t->lead, t->at),
                       (ml_dtype)ml_graph_type(g, n)->dtype);
    if (op == ML_OP_SLICE && args[0] == t->axis)
        return increment_table(inc, ml_graph_source(g, n, 0), t->axis, t->batch, t->lead + args[1],
                               t->at);
    if (op == ML_OP_GATHER && args[0] == t->axis && args[0] != t->batch)
        return ml_gather(
            g, increment_squeeze(g, ml_graph_source(g, n, 0), t->batch),
            increment_table(inc, ml_graph_source(g, n, 1), t->axis, t->batch, t->lead, t->at),
            t->axis);
    bool renames = op == ML_OP_RENAME;
    if (renames || (increment_by_parts(g, n, t->axis) && !increment_names(g, n, t->batch)))
        return lift_table(inc, t);
    return ml_gather(g, increment_squeeze(g, n, t->batch), increment_index(inc, t->lead, t->at),
                     t->axis);
}

ml_ref increment_table(increment *inc, ml_ref n, ml_axis axis, ml_axis batch, int64_t lead,
                       at_positions at) {
    if (ml_type_find(ml_graph_type(inc->g, n), axis) < 0)
        return increment_squeeze(inc->g, n, batch);
    table_entry key = {n, axis, batch, lead, at, 0}, *known = find_table(inc, &key);
    if (known) return known->value;
    key.value = read_table(inc, &key);
    ml_index_add(&inc->table_index, table_hash(&key), inc->tables.count);
    *ML_PUSH(inc->arena, &inc->tables) = key;
    return key.value;
}

ml_ref increment_inner_table(increment *inc, ml_ref n, const place *p, at_positions at) {
    ml_graph *g = inc->g;
    if (ml_graph_node(g, n)->op == ML_OP_BROADCAST) {
        ml_ref inner = ml_graph_source(g, n, 0);
        lifting by = {p->axis, p->batch, increment_plain(ML_I32)};
        increment_push(&by.by, inc->row, inc->rows);
        increment_push(&by.by, inc->fresh, inc->size[at]);
        increment_push(&by.by, p->axis, p->inner);
        ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
        inner = increment_squeeze(g, inner, p->batch);
        if (ml_type_find(ml_graph_type(g, inner), p->axis) < 0)
            return ml_broadcast(g, inner, &type);
    }
    int64_t positions = ml_type_size(ml_graph_type(g, n), p->axis) / p->inner;
    n = ml_split(g, n, p->axis, inc->past, positions, p->axis, p->inner);
    return increment_table(inc, n, inc->past, p->batch, p->lead, at);
}

/* ---- First elements -------------------------------------------------------------------------- */

/* Elements first .. last - 1 along the axis, as `past`, of what depends on no token. */
ml_ref increment_part(increment *inc, ml_ref n, ml_axis axis, ml_axis batch, int64_t first,
                      int64_t last) {
    n = increment_squeeze(inc->g, n, batch);
    if (ml_type_find(ml_graph_type(inc->g, n), axis) < 0) return n;
    return ml_rename(inc->g, ml_slice(inc->g, n, axis, first, last), axis, inc->past);
}

static lifting by_past(const increment *inc, ml_ref n, int64_t count) {
    lifting by = {inc->places[n].axis, inc->places[n].batch, increment_plain(ML_I32)};
    increment_push(&by.by, inc->past, count);
    return by;
}

static ml_ref prefix_of_pad(increment *inc, ml_ref n, int64_t count) {
    ml_graph *g = inc->g;
    int64_t before = ml_graph_args(g, n)[1], zeros = before < count ? before : count;
    lifting by = by_past(inc, n, zeros);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
    ml_ref none = ml_broadcast(g, ml_const(g, (ml_dtype)type.dtype, 0), &type);
    if (zeros == count) return none;
    ml_ref rest = increment_prefix(inc, ml_graph_source(g, n, 0), count - zeros);
    if (!zeros) return rest;
    return ml_concat(g, (ml_ref[]){none, rest}, 2, inc->past);
}

static ml_ref prefix_of_concat(increment *inc, ml_ref n, int64_t count) {
    ml_graph *g = inc->g;
    int sources = ml_graph_node(g, n)->source_count, parts = 0;
    ml_ref *part = ML_NEW_ARRAY(inc->arena, ml_ref, sources);
    const place *p = &inc->places[n];
    for (int i = 0; i < sources && count; i++) {
        ml_ref s = ml_graph_source(g, n, i);
        int64_t size = ml_type_size(ml_graph_type(g, s), p->axis);
        if (size > count) size = count;
        part[parts++] = inc->places[s].fed ? increment_prefix(inc, s, size)
                                           : increment_part(inc, s, p->axis, p->batch, 0, size);
        count -= size;
    }
    return ml_concat(g, part, parts, inc->past);
}

ml_ref increment_prefix(increment *inc, ml_ref n, int64_t count) {
    ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const place *p = &inc->places[n];
    const int64_t *args = ml_graph_args(g, n);
    if (node.op == ML_OP_PAD && args[0] == p->axis) return prefix_of_pad(inc, n, count);
    if (node.op == ML_OP_CONCAT && args[0] == p->axis) return prefix_of_concat(inc, n, count);
    if (node.op == ML_OP_SLICE && args[0] == p->axis)
        return ml_slice(g, increment_prefix(inc, ml_graph_source(g, n, 0), args[1] + count),
                        inc->past, args[1], args[1] + count);
    ml_ref *sources = ML_NEW_ARRAY(inc->arena, ml_ref, node.source_count);
    for (int i = 0; i < node.source_count; i++) {
        ml_ref s = ml_graph_source(g, n, i);
        sources[i] = inc->places[s].fed ? increment_prefix(inc, s, count)
                                        : increment_part(inc, s, p->axis, p->batch, 0, count);
    }
    lifting by = by_past(inc, n, count);
    return increment_move(inc, n, sources, &by);
}
