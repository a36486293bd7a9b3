/* Sums over positions by hand: a node of queries and keys is contracted over the keys, of which a
 * mask hides those that are later than the query. Keys are kept by position; coefficients of the
 * new queries are computed with all keys so far. */
#include "runtime/increment/internal.h"

/* ---- Where they are -------------------------------------------------------------------------- */

typedef enum { WIDE_TABLE, WIDE_QUERY, WIDE_KEY, WIDE_BOTH } wide_kind;

/* Of the new queries, at positions of this place, and all keys, whose axis is as in the whole
 * program: keys of all positions, or of the query's chunk. */
typedef struct {
    place query;
    ml_axis key;
    at_positions at;
} frame;

/* Of a node of which a contraction is computed. */
static wide_kind kind_of(const increment *inc, ml_ref n, const frame *f) {
    const place *p = &inc->places[n];
    if (!p->fed) return WIDE_TABLE;
    bool of_chunk = p->chunk && !p->outer;
    if (of_chunk || (p->axis == f->query.axis && p->axis != f->key && !p->other)) return WIDE_QUERY;
    bool of_query = (f->query.outer || !f->query.chunk) && f->query.axis != f->key &&
                    ml_type_find(ml_graph_type(inc->g, n), f->query.axis) >= 0;
    return p->other || of_query ? WIDE_BOTH : WIDE_KEY;
}

/* For the operands of n. */
static frame inner(const increment *inc, ml_ref n, const frame *f) {
    frame out = *f;
    out.query = increment_inner_place(inc, n, &f->query);
    if (ml_graph_node(inc->g, n)->op == ML_OP_RENAME) out.key = increment_inner(inc->g, n, f->key);
    return out;
}

/* How many elements of the keys' axis a position makes known beyond its own index. */
static int64_t key_lead(const increment *inc, ml_ref n, const frame *f) {
    const ml_node node = *ml_graph_node(inc->g, n);
    const int64_t *args = ml_graph_args(inc->g, n);
    wide_kind kind = kind_of(inc, n, f);
    if (kind == WIDE_KEY) return f->query.chunk ? 0 : inc->places[n].lead;
    int64_t least = INT32_MAX, offset = 0;
    frame before = inner(inc, n, f);
    bool along = increment_names(inc->g, n, f->key) && ml_ops[node.op].op_class == ML_CLASS_MOVE;
    for (int i = 0; i < node.source_count && kind == WIDE_BOTH; i++) {
        ml_ref s = ml_graph_source(inc->g, n, i);
        int64_t lead = key_lead(inc, s, &before) + offset;
        if (along && node.op == ML_OP_CONCAT)
            offset += ml_type_size(ml_graph_type(inc->g, s), f->key);
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

static bool try_query(increment *inc, ml_ref n, const place *operands, ml_axis query, ml_axis key) {
    if (query == key || !contracts(inc, n, query, key)) return false;
    frame f = {.query = {.axis = query, .outer = operands->outer, .chunk = operands->chunk},
               .key = key};
    int64_t ahead = INT32_MAX;
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        int64_t lead = key_lead(inc, ml_graph_source(inc->g, n, i), &f);
        if (lead < ahead) ahead = lead;
    }
    return increment_masked(inc, n, query, key, ahead);
}

/* The queries' axis: of a pair the other; else one that a table brings. */
bool increment_find_contraction(increment *inc, ml_ref n, const place *operands, place *out) {
    const ml_type *t = ml_graph_type(inc->g, n);
    const place *p = operands;
    ml_axis key = increment_names(inc->g, n, p->axis) ? p->axis : p->other;
    ml_axis query = key == p->axis ? p->other : p->axis;
    bool of_chunks = increment_names(inc->g, n, p->outer) || (p->chunk && !p->outer);
    if (!key || p->lead < 0 || of_chunks) return false;
    bool found = query && try_query(inc, n, p, query, key);
    for (int i = 0; i < t->rank && !p->other && !found; i++) {
        query = t->axis[i];
        found = query != p->batch && query != p->outer && try_query(inc, n, p, query, key);
    }
    *out = *p;
    out->axis = query;
    out->other = 0;
    out->over = key;
    out->lead = 0;
    return found;
}

/* ---- What they need -------------------------------------------------------------------------- */

static void need(increment *inc, ml_ref n, const frame *f, uint8_t needs) {
    wide_kind kind = kind_of(inc, n, f);
    frame before = inner(inc, n, f);
    bool delayed = inc->places[n].lead != f->query.lead;
    if (kind == WIDE_KEY) inc->needs[n] |= 1 << AT_NEW;
    if (kind == WIDE_QUERY) inc->needs[n] |= delayed ? 1 << AT_NEW : needs;
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count && kind == WIDE_BOTH; i++)
        need(inc, ml_graph_source(inc->g, n, i), &before, needs);
}

void increment_need_contraction(increment *inc, ml_ref n) {
    frame f = {.query = inc->places[n], .key = inc->places[n].over};
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++)
        need(inc, ml_graph_source(inc->g, n, i), &f, inc->needs[n]);
}

/* ---- Values ---------------------------------------------------------------------------------- */

static ml_ref wide(increment *inc, ml_ref n, const frame *f);

static ml_ref lift(increment *inc, ml_ref n, const frame *f) {
    int count = ml_graph_node(inc->g, n)->source_count;
    ml_ref *sources = ML_NEW_ARRAY(inc->arena, ml_ref, count + 1);
    frame before = inner(inc, n, f);
    for (int i = 0; i < count; i++) sources[i] = wide(inc, ml_graph_source(inc->g, n, i), &before);
    lifting by = increment_by(inc, &f->query, f->at);
    return increment_move(inc, n, sources, &by);
}

static ml_ref compute(increment *inc, ml_ref n, const frame *f) {
    wide_kind kind = kind_of(inc, n, f);
    if (kind == WIDE_TABLE) return increment_table(inc, n, &f->query, f->at);
    if (kind == WIDE_QUERY) return increment_value(inc, n, f->query.lead, f->at);
    if (kind == WIDE_BOTH) return lift(inc, n, f);
    return f->query.chunk ? increment_window(inc, n, &f->query, f->key, f->at)
                          : increment_keys(inc, n);
}

static ml_ref wide(increment *inc, ml_ref n, const frame *f) {
    uint64_t hash =
        ml_mix(n, (uint64_t)f->query.axis << 32 | (uint64_t)f->key << 1 | (f->at == AT_LAST));
    uint32_t cursor = 0, i;
    while ((i = ml_index_next(&inc->wide_index, hash, &cursor)) != ML_INDEX_NONE) {
        const wide_entry *e = &inc->wide.at[i];
        if (e->node == n && e->query == f->query.axis && e->key == f->key && e->at == f->at)
            return e->value;
    }
    ml_ref value = compute(inc, n, f);
    ml_index_add(&inc->wide_index, hash, inc->wide.count);
    *ML_PUSH(inc->arena, &inc->wide) = (wide_entry){n, f->query.axis, f->key, f->at, value};
    return value;
}

/* A running sum within a chunk is the sum of what is known of it. */
static ml_ref sum_within(increment *inc, ml_ref n, const frame *f) {
    ml_ref value = increment_window(inc, ml_graph_source(inc->g, n, 0), &f->query, f->key, f->at);
    return ml_reduce(inc->g, ML_OP_SUM, value, &f->key, 1);
}

ml_ref increment_contraction(increment *inc, ml_ref n, at_positions at) {
    const place *p = &inc->places[n];
    frame f = {*p, p->over, at};
    f.query.over = 0;
    return p->axis == p->over ? sum_within(inc, n, &f) : lift(inc, n, &f);
}
