/* What depends on no token: read at the rows' own positions, without computing it at all of them
 * where it is computed position by position; and the first elements of padded axes. */
#include "runtime/increment/internal.h"

static uint64_t table_hash(const table_entry *e) {
    const place *p = &e->place;
    uint64_t h = ml_mix(e->node, (uint64_t)p->axis << 32 | (uint64_t)p->outer << 16 | p->batch);
    return ml_mix(ml_mix(h, (uint64_t)p->chunk), (uint64_t)p->lead << 1 | (e->at == AT_LAST));
}

static table_entry *find_table(increment *inc, const table_entry *key) {
    const place *p = &key->place;
    uint32_t cursor = 0, i;
    while ((i = ml_index_next(&inc->table_index, table_hash(key), &cursor)) != ML_INDEX_NONE) {
        table_entry *e = &inc->tables.at[i];
        if (e->node == key->node && e->place.axis == p->axis && e->place.outer == p->outer &&
            e->place.batch == p->batch && e->place.chunk == p->chunk && e->place.lead == p->lead &&
            e->at == key->at)
            return e;
    }
    return NULL;
}

static ml_ref lift_table(increment *inc, const table_entry *t) {
    const ml_ref n = t->node;
    const int count = ml_graph_node(inc->g, n)->source_count;
    ml_ref *sources = ML_NEW_ARRAY(inc->arena, ml_ref, count);
    place before = increment_inner_place(inc, n, &t->place);
    lifting by = increment_by(inc, &t->place, t->at);
    for (int i = 0; i < count; i++)
        sources[i] = increment_table(inc, ml_graph_source(inc->g, n, i), &before, t->at);
    return increment_lift(inc, n, sources, &by);
}

/* n of all positions, at those of the rows. */
static ml_ref gather_table(increment *inc, const table_entry *t) {
    ml_graph *g = inc->g;
    const place *p = &t->place;
    ml_ref value = increment_squeeze(g, t->node, p->batch);
    if (p->outer && ml_type_find(ml_graph_type(g, value), p->outer) >= 0)
        value = ml_gather(g, value, increment_place_index(inc, p, true, t->at), p->outer);
    if (ml_type_find(ml_graph_type(g, value), p->axis) >= 0)
        value = ml_gather(g, value, increment_place_index(inc, p, false, t->at), p->axis);
    return value;
}

/* Of a split of positions into chunks: by the positions themselves. */
static ml_ref split_table(increment *inc, const table_entry *t) {
    place whole = t->place;
    whole.axis = (ml_axis)ml_graph_args(inc->g, t->node)[0];
    whole.outer = 0;
    whole.chunk = 0;
    return increment_table(inc, ml_graph_source(inc->g, t->node, 0), &whole, t->at);
}

static ml_ref read_table(increment *inc, const table_entry *t) {
    ml_graph *g = inc->g;
    const ml_ref n = t->node;
    const place *p = &t->place;
    const ml_op op = (ml_op)ml_graph_node(g, n)->op;
    const int64_t *args = ml_graph_args(g, n);
    if (op == ML_OP_IOTA)
        return ml_cast(g, increment_place_index(inc, p, args[0] == p->outer, t->at),
                       (ml_dtype)ml_graph_type(g, n)->dtype);
    bool cut = p->outer && args && args[0] == p->axis; /* within chunks */
    place shifted = *p;
    if (op == ML_OP_SLICE && increment_unit(p, (ml_axis)args[0]) && !cut) {
        shifted.lead += increment_unit(p, (ml_axis)args[0]) * args[1];
        return increment_table(inc, ml_graph_source(g, n, 0), &shifted, t->at);
    }
    if (op == ML_OP_GATHER && args[0] == p->axis && args[0] != p->batch && !p->chunk)
        return ml_gather(g, increment_squeeze(g, ml_graph_source(g, n, 0), p->batch),
                         increment_table(inc, ml_graph_source(g, n, 1), p, t->at), p->axis);
    if (op == ML_OP_SPLIT && p->outer && args[1] == p->outer && args[3] == p->axis)
        return split_table(inc, t);
    bool by_parts = increment_by_parts(g, n, p->axis) && increment_by_parts(g, n, p->outer);
    if (op == ML_OP_RENAME || (by_parts && !increment_names(g, n, p->batch)))
        return lift_table(inc, t);
    return gather_table(inc, t);
}

ml_ref increment_table(increment *inc, ml_ref n, const place *p, at_positions at) {
    const ml_type *type = ml_graph_type(inc->g, n);
    if (ml_type_find(type, p->axis) < 0 && (!p->outer || ml_type_find(type, p->outer) < 0))
        return increment_squeeze(inc->g, n, p->batch);
    table_entry key = {n, *p, at, 0};
    key.place.inner = 0;
    table_entry *known = find_table(inc, &key);
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
        lifting by = increment_by(inc, p, at);
        ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
        inner = increment_squeeze(g, inner, p->batch);
        if (ml_type_find(ml_graph_type(g, inner), p->axis) < 0)
            return ml_broadcast(g, inner, &type);
    }
    int64_t positions = ml_type_size(ml_graph_type(g, n), p->axis) / p->inner;
    n = ml_split(g, n, p->axis, inc->past, positions, p->axis, p->inner);
    place of_position = {.axis = inc->past, .batch = p->batch, .lead = p->lead};
    return increment_table(inc, n, &of_position, at);
}

/* ---- First elements -------------------------------------------------------------------------- */

/* {past = last - first}: their numbers, as indices along an axis of positions in chunks. */
static ml_ref part_index(increment *inc, const place *p, bool outer, int64_t first, int64_t last) {
    ml_graph *g = inc->g;
    ml_ref index =
        ml_map2(g, ML_OP_ADD, ml_iota(g, inc->past, last - first), ml_const_int(g, ML_I32, first));
    return ml_map2(g, outer ? ML_OP_IDIV : ML_OP_MOD, index, ml_const_int(g, ML_I32, p->chunk));
}

/* Elements first .. last - 1 along the axis, as `past`, of what depends on no token. */
ml_ref increment_part(increment *inc, ml_ref n, const place *p, int64_t first, int64_t last) {
    ml_graph *g = inc->g;
    if (inc->places[n].given)
        increment_refuse(inc, n, "pad or join other axes, or what the tokens alone decide",
                         "what the prompt gives beside padded tokens has no increment yet");
    n = increment_squeeze(g, n, p->batch);
    bool inner = ml_type_find(ml_graph_type(g, n), p->axis) >= 0;
    if (p->outer && ml_type_find(ml_graph_type(g, n), p->outer) >= 0)
        n = ml_gather(g, n, part_index(inc, p, true, first, last), p->outer);
    if (!inner) return n;
    if (p->outer) return ml_gather(g, n, part_index(inc, p, false, first, last), p->axis);
    return ml_rename(g, ml_slice(g, n, p->axis, first, last), p->axis, inc->past);
}

static lifting by_past(const increment *inc, ml_ref n, int64_t count) {
    const place *p = &inc->places[n];
    lifting by = {p->axis, p->batch, p->outer, increment_plain(ML_I32)};
    increment_push(&by.by, inc->past, count);
    return by;
}

/* Along an axis of n's place, of whose elements `unit` count as one position. */
static ml_ref prefix_of_pad(increment *inc, ml_ref n, int64_t count, int64_t unit) {
    ml_graph *g = inc->g;
    int64_t before = unit * ml_graph_args(g, n)[1], zeros = before < count ? before : count;
    if (!zeros) return increment_prefix(inc, ml_graph_source(g, n, 0), count);
    lifting by = by_past(inc, n, zeros);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
    ml_ref none = ml_broadcast(g, ml_const(g, (ml_dtype)type.dtype, 0), &type);
    if (zeros == count) return none;
    ml_ref rest = increment_prefix(inc, ml_graph_source(g, n, 0), count - zeros);
    return ml_concat(g, (ml_ref[]){none, rest}, 2, inc->past);
}

static ml_ref prefix_of_concat(increment *inc, ml_ref n, int64_t count, int64_t unit) {
    ml_graph *g = inc->g;
    int sources = ml_graph_node(g, n)->source_count, parts = 0;
    ml_ref *part = ML_NEW_ARRAY(inc->arena, ml_ref, sources);
    const place *p = &inc->places[n];
    ml_axis axis = (ml_axis)ml_graph_args(g, n)[0];
    for (int i = 0; i < sources && count; i++) {
        ml_ref s = ml_graph_source(g, n, i);
        int64_t size = unit * ml_type_size(ml_graph_type(g, s), axis);
        if (size > count) size = count;
        part[parts++] = inc->places[s].fed ? increment_prefix(inc, s, size)
                                           : increment_part(inc, s, p, 0, size);
        count -= size;
    }
    return ml_concat(g, part, parts, inc->past);
}

/* Of source s, for the first `count` of n: each element of chunks stands for all of its positions.
 */
static ml_ref prefix_of_source(increment *inc, ml_ref n, ml_ref s, int64_t count) {
    const place *p = &inc->places[n], *from = &inc->places[s];
    if (!from->fed) return increment_part(inc, s, p, 0, count);
    if (!p->outer || !from->chunk || from->outer) return increment_prefix(inc, s, count);
    ml_ref chunks = increment_prefix(inc, s, (count - 1) / p->chunk + 1);
    return ml_gather(inc->g, chunks, part_index(inc, p, true, 0, count), inc->past);
}

/* Of a merge of chunks with the positions within them. */
static ml_ref prefix_of_spread(increment *inc, ml_ref n, int64_t count) {
    ml_graph *g = inc->g;
    ml_ref s = ml_graph_source(g, n, 0);
    const place *from = &inc->places[s];
    ml_ref value = increment_prefix(inc, s, (count - 1) / from->chunk + 1);
    value = ml_gather(g, value, part_index(inc, from, true, 0, count), inc->past);
    return ml_gather(g, value, part_index(inc, from, false, 0, count),
                     (ml_axis)ml_graph_args(g, n)[1]);
}

ml_ref increment_prefix(increment *inc, ml_ref n, int64_t count) {
    ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const place *p = &inc->places[n];
    const int64_t *args = ml_graph_args(g, n);
    int64_t unit = args ? increment_unit(p, (ml_axis)args[0]) : 0;
    if (unit && !p->outer) unit = 1; /* of chunks, elements are counted */
    if (node.op == ML_OP_PAD && unit) return prefix_of_pad(inc, n, count, unit);
    if (node.op == ML_OP_CONCAT && unit) return prefix_of_concat(inc, n, count, unit);
    if (node.op == ML_OP_SLICE && unit) {
        int64_t first = unit * args[1];
        ml_ref all = increment_prefix(inc, ml_graph_source(g, n, 0), first + count);
        return ml_slice(g, all, inc->past, first, first + count);
    }
    lifting by = by_past(inc, n, count);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
    if (increment_exclusive(inc, n))
        return ml_broadcast(g, ml_const(g, (ml_dtype)type.dtype, 0), &type);
    if (increment_spreads(inc, n)) return prefix_of_spread(inc, n, count);
    ml_ref *sources = ML_NEW_ARRAY(inc->arena, ml_ref, node.source_count);
    for (int i = 0; i < node.source_count; i++)
        sources[i] = prefix_of_source(inc, n, ml_graph_source(g, n, i), count);
    return increment_move(inc, n, sources, &by);
}
