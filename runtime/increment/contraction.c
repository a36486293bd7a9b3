/* Sums over positions by hand: a node of queries and keys is contracted over the keys, of which a
 * mask hides those that are later than the query. Keys are kept by position; coefficients of the
 * new queries are computed with all keys so far. */
#include "runtime/increment/internal.h"

/* ---- Where they are -------------------------------------------------------------------------- */

typedef enum { WIDE_TABLE, WIDE_QUERY, WIDE_KEY, WIDE_BOTH } wide_kind;

/* Of a node of which a contraction is computed. */
static wide_kind kind_of(const increment *inc, ml_ref n, ml_axis query) {
    const place *p = &inc->places[n];
    if (!p->fed) return WIDE_TABLE;
    if (p->axis == query && !p->other) return WIDE_QUERY;
    return p->other || ml_type_find(ml_graph_type(inc->g, n), query) >= 0 ? WIDE_BOTH : WIDE_KEY;
}

/* How many elements of the keys' axis a position makes known beyond its own index. */
static int64_t key_lead(const increment *inc, ml_ref n, ml_axis query, ml_axis key) {
    const ml_node node = *ml_graph_node(inc->g, n);
    const int64_t *args = ml_graph_args(inc->g, n);
    wide_kind kind = kind_of(inc, n, query);
    if (kind == WIDE_KEY) return inc->places[n].lead;
    int64_t least = INT32_MAX, offset = 0;
    ml_axis q = increment_inner(inc->g, n, query), k = increment_inner(inc->g, n, key);
    bool along = increment_names(inc->g, n, key) && ml_ops[node.op].op_class == ML_CLASS_MOVE;
    for (int i = 0; i < node.source_count && kind == WIDE_BOTH; i++) {
        ml_ref s = ml_graph_source(inc->g, n, i);
        int64_t lead = key_lead(inc, s, q, k) + offset;
        if (along && node.op == ML_OP_CONCAT) offset += ml_type_size(ml_graph_type(inc->g, s), key);
        if (along && node.op == ML_OP_PAD) lead += args[1];
        if (along && node.op == ML_OP_SLICE) lead -= args[1];
        if (lead < least) least = lead;
    }
    return least;
}

static bool contracts(const increment *inc, ml_ref n, ml_axis query, ml_axis key) {
    ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    ml_op_class class = ml_ops[op].op_class;
    if (class != ML_CLASS_REDUCE && class != ML_CLASS_SCAN && op != ML_OP_DOT) return false;
    return increment_names(inc->g, n, key) && increment_by_parts(inc->g, n, query);
}

static bool try_query(increment *inc, ml_ref n, ml_axis query, ml_axis key) {
    if (query == key || !contracts(inc, n, query, key)) return false;
    int64_t ahead = INT32_MAX;
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        int64_t lead = key_lead(inc, ml_graph_source(inc->g, n, i), query, key);
        if (lead < ahead) ahead = lead;
    }
    return increment_masked(inc, n, query, key, ahead);
}

/* The queries' axis: of a pair the other; else one that a table brings. */
bool increment_find_contraction(increment *inc, ml_ref n, const place *operands, place *out) {
    const ml_type *t = ml_graph_type(inc->g, n);
    ml_axis key = increment_names(inc->g, n, operands->axis) ? operands->axis : operands->other;
    ml_axis query = key == operands->axis ? operands->other : operands->axis;
    if (!key || operands->lead < 0) return false;
    bool found = query && try_query(inc, n, query, key);
    for (int i = 0; i < t->rank && !operands->other && !found; i++) {
        query = t->axis[i];
        found = query != operands->batch && try_query(inc, n, query, key);
    }
    ml_axis batch = ml_type_find(t, operands->batch) >= 0 ? operands->batch : 0;
    *out = (place){.fed = true, .axis = query, .over = key, .batch = batch};
    return found;
}

/* ---- What they need -------------------------------------------------------------------------- */

static void need(increment *inc, ml_ref n, ml_axis query, uint8_t needs) {
    wide_kind kind = kind_of(inc, n, query);
    ml_axis before = increment_inner(inc->g, n, query);
    if (kind == WIDE_KEY) inc->needs[n] |= 1 << AT_NEW;
    if (kind == WIDE_QUERY) inc->needs[n] |= inc->places[n].lead ? 1 << AT_NEW : needs;
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count && kind == WIDE_BOTH; i++)
        need(inc, ml_graph_source(inc->g, n, i), before, needs);
}

void increment_need_contraction(increment *inc, ml_ref n) {
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++)
        need(inc, ml_graph_source(inc->g, n, i), inc->places[n].axis, inc->needs[n]);
}

/* ---- Values ---------------------------------------------------------------------------------- */

/* Of the new queries and all keys: the axis of keys is as in the whole program. */
typedef struct {
    ml_axis query, key, batch;
    at_positions at;
} frame;

static ml_ref wide(increment *inc, ml_ref n, frame f);

static lifting lifting_of(const increment *inc, const frame *f) {
    lifting by = {f->query, f->batch, increment_plain(ML_I32)};
    increment_push(&by.by, inc->row, inc->rows);
    increment_push(&by.by, inc->fresh, inc->size[f->at]);
    return by;
}

static ml_ref lift(increment *inc, ml_ref n, const frame *f) {
    int count = ml_graph_node(inc->g, n)->source_count;
    ml_ref *sources = ML_NEW_ARRAY(inc->arena, ml_ref, count + 1);
    frame before = {increment_inner(inc->g, n, f->query), increment_inner(inc->g, n, f->key),
                    increment_inner(inc->g, n, f->batch), f->at};
    for (int i = 0; i < count; i++) sources[i] = wide(inc, ml_graph_source(inc->g, n, i), before);
    lifting by = lifting_of(inc, f);
    return increment_move(inc, n, sources, &by);
}

static ml_ref compute(increment *inc, ml_ref n, const frame *f) {
    switch (kind_of(inc, n, f->query)) {
    case WIDE_TABLE: return increment_table(inc, n, f->query, f->batch, 0, f->at);
    case WIDE_QUERY: return increment_value(inc, n, 0, f->at);
    case WIDE_KEY: return increment_keys(inc, n);
    case WIDE_BOTH: break;
    }
    return lift(inc, n, f);
}

static ml_ref wide(increment *inc, ml_ref n, frame f) {
    uint64_t hash = ml_mix(n, (uint64_t)f.query << 32 | (uint64_t)f.key << 1 | (f.at == AT_LAST));
    uint32_t cursor = 0, i;
    while ((i = ml_index_next(&inc->wide_index, hash, &cursor)) != ML_INDEX_NONE) {
        const wide_entry *e = &inc->wide.at[i];
        if (e->node == n && e->query == f.query && e->key == f.key && e->at == f.at)
            return e->value;
    }
    ml_ref value = compute(inc, n, &f);
    ml_index_add(&inc->wide_index, hash, inc->wide.count);
    *ML_PUSH(inc->arena, &inc->wide) = (wide_entry){n, f.query, f.key, f.at, value};
    return value;
}

ml_ref increment_contraction(increment *inc, ml_ref n, at_positions at) {
    const place *p = &inc->places[n];
    return lift(inc, n, &(frame){p->axis, p->over, p->batch, at});
}
