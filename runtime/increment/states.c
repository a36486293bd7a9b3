/* States of increments: what slots hold, pools and rings of values by position, values of earlier
 * positions. */
#include "runtime/increment/internal.h"

static ml_ref state_node(ml_graph *g, uint32_t state) {
    return ml_graph_add(g, ML_OP_STATE, NULL, 0, (int64_t[]){state}, 1, NULL);
}

static uint32_t new_state(increment *inc, ml_ref n, const ml_type *type) {
    ml_graph *g = inc->g;
    ml_state state = {.kind = ML_STATE_OTHER, .type = *type, .origin = *ml_graph_origin(g, n)};
    uint32_t id = ml_graph_add_state(g, &state);
    ml_graph_state(g, id)->initial = ml_broadcast(g, ml_const(g, (ml_dtype)type->dtype, 0), type);
    return id;
}

static uint32_t find_state(increment *inc, ml_kept what, int64_t size, const ml_type *value) {
    ml_type type = increment_plain((ml_dtype)value->dtype);
    increment_push(&type, what.kind == ML_KEPT_SLOT ? inc->slot : inc->pool, size);
    for (int i = 0; i < value->rank; i++) increment_push(&type, value->axis[i], value->size[i]);
    for (uint32_t i = 0; i < inc->kept->count; i++) {
        const ml_kept *k = &inc->kept->at[i];
        if (k->kind != what.kind || k->node != what.node || k->rows != what.rows ||
            k->ring != what.ring)
            continue;
        if (!ml_type_equal(&ml_graph_state(inc->g, k->state)->type, &type))
            ml_raise(ML_INVALID, "programs that share kept states have one number of slots and of "
                                 "positions in pools");
        return k->state;
    }
    what.state = new_state(inc, what.node, &type);
    *ML_PUSH(inc->kept->arena, inc->kept) = what;
    return what.state;
}

uint32_t increment_slot_state(increment *inc, ml_ref n, int64_t rows, const ml_type *value) {
    ml_kept what = {.kind = ML_KEPT_SLOT, .node = n, .rows = rows};
    return find_state(inc, what, inc->in->slot_count, value);
}

static void update(increment *inc, uint32_t state, ml_ref value) {
    for (uint32_t i = 0; i < inc->out->updates.count; i++)
        if (inc->out->updates.at[i].state == state) return; /* the same value */
    value = ml_permute(inc->g, value, &ml_graph_state(inc->g, state)->type);
    *ML_PUSH(inc->arena, &inc->out->updates) = (ml_update){state, value};
}

/* ---- Slots ----------------------------------------------------------------------------------- */

ml_ref increment_slot_rows(increment *inc, uint32_t state) {
    ml_graph *g = inc->g;
    ml_ref value = state_node(g, state);
    return inc->in->slots ? ml_gather(g, value, inc->in->slots, inc->slot)
                          : ml_rename(g, value, inc->slot, inc->row);
}

ml_ref increment_slot_read(increment *inc, uint32_t state, ml_ref initial) {
    return ml_where(inc->g, inc->begins, initial, increment_slot_rows(inc, state));
}

void increment_slot_give(increment *inc, uint32_t state, ml_ref value) {
    ml_ref before = state_node(inc->g, state);
    update(inc, state, ml_write_rows(inc->g, before, inc->in->slots, value, inc->slot));
}

void increment_slot_write(increment *inc, uint32_t state, ml_ref value) {
    ml_graph *g = inc->g;
    ml_ref before = state_node(g, state);
    if (inc->in->slots) {
        ml_ref at = ml_where(g, inc->active, inc->in->slots, ml_const_int(g, ML_I32, -1));
        update(inc, state, ml_write_rows(g, before, at, value, inc->slot));
        return;
    }
    ml_type type = *ml_graph_type(g, before);
    type.axis[0] = inc->row;
    value = ml_permute(g, value, &type);
    value = ml_where(g, inc->active, value, ml_rename(g, before, inc->slot, inc->row));
    update(inc, state, ml_rename(g, value, inc->row, inc->slot));
}

/* ---- Values of earlier positions ------------------------------------------------------------- */

/* {past = rows, ...}: what stands before the first element that a position makes known. */
static ml_ref initial_rows(increment *inc, ml_ref n, int64_t rows, ml_dtype dtype) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[n];
    int64_t lead = p->lead, known = lead < rows ? lead : rows;
    if (lead <= 0) return ml_const(g, dtype, 0);
    if (p->chunk && !p->outer) { /* each element of chunks stands for all of its positions */
        ml_ref at = ml_map2(g, ML_OP_ADD, ml_iota(g, inc->past, rows),
                            ml_const_int(g, ML_I32, lead - rows));
        at = ml_map2(g, ML_OP_IDIV, at, ml_const_int(g, ML_I32, p->chunk));
        return ml_gather(g, increment_prefix(inc, n, (lead - 1) / p->chunk + 1), at, inc->past);
    }
    ml_ref all = increment_prefix(inc, n, lead);
    return ml_pad(g, ml_slice(g, all, inc->past, lead - known, lead), inc->past, rows - known, 0);
}

ml_ref increment_stacked(increment *inc, ml_ref n, int64_t rows) {
    ml_graph *g = inc->g;
    ml_ref value = inc->values[AT_NEW][n];
    if (!rows) return value;
    ml_type rest = increment_without(ml_graph_type(g, value), inc->row, inc->fresh);
    ml_type type = increment_plain((ml_dtype)rest.dtype);
    increment_push(&type, inc->past, rows);
    for (int i = 0; i < rest.rank; i++) increment_push(&type, rest.axis[i], rest.size[i]);
    uint32_t state = increment_slot_state(inc, n, rows, &type);
    ml_ref initial = initial_rows(inc, n, rows, (ml_dtype)rest.dtype);
    ml_ref before = increment_slot_read(inc, state, initial);
    before = ml_rename(g, before, inc->past, inc->fresh);
    ml_ref all = ml_concat(g, (ml_ref[]){before, value}, 2, inc->fresh);
    ml_type index = increment_plain(ML_I32);
    increment_push(&index, inc->row, inc->rows);
    increment_push(&index, inc->past, rows);
    ml_ref at = ml_broadcast(g, ml_iota(g, inc->past, rows), &index);
    at = ml_map2(g, ML_OP_ADD, at, inc->in->count);
    increment_slot_write(inc, state, ml_gather(g, all, at, inc->fresh));
    return all;
}

ml_ref increment_delayed(increment *inc, ml_ref n, int64_t delay) {
    ml_ref sum = increment_exclusive(inc, n) ? ml_graph_source(inc->g, n, 0) : n;
    const place *p = &inc->places[sum];
    if (delay == 1 && ml_graph_node(inc->g, sum)->op == ML_OP_CUMSUM && increment_mixes(inc, sum) &&
        !p->over && !p->inner)
        return increment_sum_before(inc, sum);
    return ml_slice(inc->g, increment_stacked(inc, n, delay), inc->fresh, 0, inc->size[AT_NEW]);
}

/* ---- Pools ----------------------------------------------------------------------------------- */

int64_t increment_ring(const increment *inc, int64_t window) {
    const int64_t block = inc->in->block, most = inc->in->most;
    int64_t context = ml_type_size(ml_graph_type(inc->g, inc->in->tokens), inc->in->seq);
    if (!most || window >= context) return 0;
    int64_t ring = (window + most - 1 + block - 1) / block * block;
    return ring < context ? ring : 0;
}

/* i32 {row}: the slot of each row. */
static ml_ref slots_of_rows(increment *inc) {
    return inc->in->slots ? inc->in->slots : ml_iota(inc->g, inc->row, inc->rows);
}

ml_ref increment_blocks(increment *inc, int64_t ring, ml_axis *columns) {
    ml_graph *g = inc->g;
    if (!ring) {
        *columns = increment_without(ml_graph_type(g, inc->in->table), inc->row, 0).axis[0];
        return inc->in->table;
    }
    *columns = ml_axis_named(g, "ring'");
    const int64_t count = ring / inc->in->block;
    ml_type type = increment_plain(ML_I32);
    increment_push(&type, inc->row, inc->rows);
    increment_push(&type, *columns, count);
    ml_ref first = ml_map2(g, ML_OP_MUL, slots_of_rows(inc), ml_const_int(g, ML_I32, count));
    return ml_map2(g, ML_OP_ADD, ml_broadcast(g, first, &type),
                   ml_broadcast(g, ml_iota(g, *columns, count), &type));
}

/* The rows of rings in which these positions of each row lie. */
static ml_ref ring_rows(increment *inc, int64_t ring, ml_ref position) {
    ml_graph *g = inc->g;
    ml_ref size = ml_const_int(g, ML_I32, ring);
    ml_ref first = ml_map2(g, ML_OP_MUL, slots_of_rows(inc), size);
    return ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MOD, position, size), first);
}

ml_ref increment_pool_rows(increment *inc, ml_ref position) {
    ml_graph *g = inc->g;
    const ml_type *table = ml_graph_type(g, inc->in->table);
    ml_axis columns = increment_without(table, inc->row, 0).axis[0];
    ml_ref block = ml_const_int(g, ML_I32, inc->in->block);
    ml_ref column = ml_map2(g, ML_OP_IDIV, position, block);
    column = ml_map2(g, ML_OP_MOD, column, ml_const_int(g, ML_I32, ml_type_size(table, columns)));
    ml_ref at = ml_gather(g, inc->in->table, column, columns);
    return ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MUL, at, block),
                   ml_map2(g, ML_OP_MOD, position, block));
}

ml_ref increment_pool(increment *inc, ml_ref s, int64_t lead, int64_t ring, ml_ref value) {
    ml_graph *g = inc->g;
    if (!inc->in->table) ml_raise(ML_INVALID, "what is kept by position needs the table of blocks");
    ml_type rest = increment_without(ml_graph_type(g, value), inc->row, inc->fresh);
    ml_kept what = {.kind = ring ? ML_KEPT_RING : ML_KEPT_POOL,
                    .node = s,
                    .rows = 1 + inc->places[s].lead - lead,
                    .ring = ring};
    int64_t size = ring ? ring * inc->in->slot_count : inc->in->pool;
    uint32_t state = find_state(inc, what, size, &rest);
    ml_ref position = inc->position[AT_NEW];
    ml_ref at = ring ? ring_rows(inc, ring, position) : increment_pool_rows(inc, position);
    at = ml_where(g, inc->valid, at, ml_const_int(g, ML_I32, -1));
    ml_ref cache = ml_write_rows(g, state_node(g, state), at, value, inc->pool);
    update(inc, state, cache);
    return cache;
}

/* The elements that no position gives come before those of the first position. */
ml_ref increment_keys(increment *inc, ml_ref s) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[s];
    int64_t size = ml_type_size(ml_graph_type(g, s), p->axis);
    int64_t before = p->lead < size ? p->lead : size;
    ml_ref pool = increment_pool(inc, s, p->lead, 0, inc->values[AT_NEW][s]), value = 0;
    ml_type index = increment_plain(ML_I32);
    increment_push(&index, inc->row, inc->rows);
    increment_push(&index, inc->past, size - before);
    if (before < size) {
        ml_ref position = ml_broadcast(g, ml_iota(g, inc->past, size - before), &index);
        ml_ref length = ml_map2(g, ML_OP_ADD, inc->in->start, inc->in->count);
        value = ml_gather(g, pool, increment_pool_rows(inc, position), inc->pool);
        value = ml_where(g, ml_map2(g, ML_OP_LT, position, length), value,
                         ml_const(g, (ml_dtype)ml_graph_type(g, value)->dtype, 0));
    }
    if (before) {
        ml_ref first = increment_prefix(inc, s, p->lead);
        first = ml_slice(g, first, inc->past, 0, before);
        ml_type type = index, rest = increment_without(ml_graph_type(g, pool), inc->pool, 0);
        type.dtype = rest.dtype;
        type.size[1] = before;
        for (int i = 0; i < rest.rank; i++) increment_push(&type, rest.axis[i], rest.size[i]);
        first = ml_broadcast(g, first, &type);
        value = value ? ml_concat(g, (ml_ref[]){first, value}, 2, inc->past) : first;
    }
    return ml_rename(g, value, inc->past, p->axis);
}
