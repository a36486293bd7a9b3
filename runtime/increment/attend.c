/* Attention: keys and values in pools, with a window in rings, queries of the new positions. */
#include "runtime/increment/internal.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/cached_attention/cached_attention.h"

enum { MOST = CACHED_CAPTURED + 32, QKV = 3 };

typedef struct {
    increment *inc;
    ml_ref n;
    at_positions at;
    ml_attention_args args; /* of the whole program's */
    ml_cached_attention_args cached;
    int64_t offset; /* a query at position p sees keys up to p + offset */
    int64_t ring;   /* positions of a ring of keys and values; 0: they lie in pools */
    ml_ref sources[MOST];
    int count;
    ml_ref *copies; /* of the score function, by node */
} attention;

/* ---- The score function ---------------------------------------------------------------------- */

/* Indices along the queries' axis count from the place among keys in the copy, and from the place
 * among queries in the original. */
static ml_ref copy_iota(attention *a, ml_ref n) {
    ml_graph *g = a->inc->g;
    ml_axis axis = (ml_axis)ml_graph_args(g, n)[0];
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, n)->dtype;
    if (axis == a->args.seq) {
        ml_ref index = ml_iota(g, a->inc->fresh, a->inc->size[a->at]);
        return ml_map2(g, ML_OP_SUB, index, ml_const_int(g, dtype, a->offset));
    }
    if (axis != a->args.kv_seq && axis != a->args.heads) return ml_const_int(g, dtype, 0);
    return n;
}

static ml_ref copy_node(attention *a, ml_ref n, const ml_type *score) {
    ml_graph *g = a->inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    ml_ref sources[3];
    if (node.op == ML_OP_IOTA) return copy_iota(a, n);
    if (node.op == ML_OP_PARAM) {
        ml_type type = *score;
        int i = (int)args[0];
        if (i > 0)
            ml_cached_attention_param_type(g, a->sources, &a->cached,
                                           a->sources[CACHED_CAPTURED + i - 1], &type);
        return ml_graph_add(g, ML_OP_PARAM, NULL, 0, args, 1, &type);
    }
    if (node.op == ML_OP_CONST)
        return ml_graph_add(g, ML_OP_CONST, NULL, 0, args, node.arg_count, ml_graph_type(g, n));
    for (int i = 0; i < node.source_count; i++) sources[i] = a->copies[ml_graph_source(g, n, i)];
    if (node.op == ML_OP_CAST) return ml_cast(g, sources[0], (ml_dtype)ml_graph_type(g, n)->dtype);
    return ml_graph_add(g, (ml_op)node.op, sources, node.source_count, args, node.arg_count, NULL);
}

/* The function over scores {row, heads, new, kv_seq}. */
static ml_ref copy_function(attention *a) {
    increment *inc = a->inc;
    ml_ref root = a->args.score;
    bool *reached = ML_NEW_ARRAY(inc->arena, bool, root + 1);
    a->copies = ML_NEW_ARRAY(inc->arena, ml_ref, root + 1);
    ml_type score;
    ml_cached_attention_score_type(inc->g, a->sources, &a->cached, &score);
    reached[root] = true;
    for (ml_ref n = root; n > 0; n--)
        for (int i = 0; reached[n] && i < ml_graph_node(inc->g, n)->source_count; i++)
            reached[ml_graph_source(inc->g, n, i)] = true;
    for (ml_ref n = 1; n <= root; n++)
        if (reached[n]) a->copies[n] = copy_node(a, n, &score);
    return a->copies[root];
}

/* What it uses: of queries, the new positions' values; of keys, a pool or a table over all. */
static void add_captured(attention *a) {
    increment *inc = a->inc;
    for (int i = ml_attention_captured(inc->g, a->n); i < ml_graph_node(inc->g, a->n)->source_count;
         i++) {
        ml_ref s = ml_graph_source(inc->g, a->n, i);
        const place *p = &inc->places[s];
        ml_ref value;
        if (a->count == MOST)
            increment_refuse(inc, a->n, NULL, "a score function uses more than %d tensors",
                             MOST - CACHED_CAPTURED);
        if (p->fed && p->axis == a->args.kv_seq)
            value = increment_pool(inc, s, 0, a->ring, increment_operand(inc, a->n, i, AT_NEW));
        else
            value = increment_operand(inc, a->n, i, a->at);
        a->sources[a->count++] = value;
    }
}

/* ---- The operands ---------------------------------------------------------------------------- */

static ml_ref pool_of(attention *a, int i) {
    increment *inc = a->inc;
    ml_ref s = ml_graph_source(inc->g, a->n, i);
    ml_ref value = increment_operand(inc, a->n, i, AT_NEW);
    place p = inc->places[a->n];
    p.axis = a->args.kv_seq;
    lifting by = increment_by(inc, &p, AT_NEW);
    ml_type type = increment_lifted_type(ml_graph_type(inc->g, s), &by);
    return increment_pool(inc, s, 0, a->ring, ml_broadcast(inc->g, value, &type));
}

/* Keys are their features, which all heads share, and so are values. */
static void read_latent(attention *a, const latent *l) {
    increment *inc = a->inc;
    a->sources[CACHED_Q] = increment_latent_query(inc, l, &a->args, a->sources[CACHED_Q]);
    a->sources[CACHED_K] = a->sources[CACHED_V] = increment_latent_pool(inc, l, a->n, a->ring);
    a->cached.kv_heads = 0;
    a->cached.head_dim = increment_latent_axis(inc);
}

/* {row}: the position of the first query, and how many keys are valid, among keys. */
static void add_places(attention *a) {
    increment *inc = a->inc;
    ml_graph *g = inc->g;
    ml_ref first = inc->in->start;
    if (a->at == AT_LAST) first = increment_squeeze(g, inc->position[AT_LAST], inc->fresh);
    ml_ref length = ml_map2(g, ML_OP_ADD, inc->in->start, inc->in->count);
    a->sources[CACHED_START] = ml_map2(g, ML_OP_ADD, first, ml_const_int(g, ML_I32, a->offset));
    /* rows without new positions read nothing */
    a->sources[CACHED_LENGTH] = ml_where(g, inc->active, length, ml_const_int(g, ML_I32, 0));
}

static void read_args(attention *a) {
    increment *inc = a->inc;
    ml_graph *g = inc->g;
    const ml_ref *s = ml_graph_sources(g, a->n);
    ml_attention_read(g, a->n, &a->args);
    int64_t keys = ml_type_size(ml_graph_type(g, s[1]), a->args.kv_seq);
    a->offset = keys - ml_type_size(ml_graph_type(g, s[0]), a->args.seq);
    int64_t behind = a->offset < 0 ? -a->offset : 0; /* the newest key that a query sees */
    a->ring = a->args.window ? increment_ring(inc, a->args.window + behind) : 0;
    ml_axis columns;
    a->sources[CACHED_TABLE] = increment_blocks(inc, a->ring, &columns);
    a->cached = (ml_cached_attention_args){.seq = inc->fresh,
                                           .pool = inc->pool,
                                           .columns = columns,
                                           .heads = a->args.heads,
                                           .kv_heads = a->args.kv_heads,
                                           .head_dim = a->args.head_dim,
                                           .kv_seq = a->args.kv_seq,
                                           .keys = keys,
                                           .causal = true,
                                           .window = a->args.window,
                                           .block = inc->in->block,
                                           .scale = a->args.scale};
}

ml_ref increment_attention(increment *inc, ml_ref n, at_positions at) {
    attention *a = ML_NEW(inc->arena, attention);
    *a = (attention){.inc = inc, .n = n, .at = at, .count = CACHED_CAPTURED};
    if (!inc->in->table) ml_raise(ML_INVALID, "what is kept by position needs the table of blocks");
    read_args(a);
    lifting by = increment_by(inc, &inc->places[n], at);
    ml_type queries =
        increment_lifted_type(ml_graph_type(inc->g, ml_graph_source(inc->g, n, 0)), &by);
    a->sources[CACHED_Q] = ml_broadcast(inc->g, increment_operand(inc, n, 0, at), &queries);
    const latent *l = increment_latent(inc, n);
    if (l)
        read_latent(a, l);
    else {
        a->sources[CACHED_K] = pool_of(a, 1);
        a->sources[CACHED_V] = pool_of(a, 2);
    }
    add_places(a);
    add_captured(a);
    if (a->args.score) a->cached.score = copy_function(a);
    ml_ref value = ml_cached_attention(inc->g, a->sources, a->count, &a->cached);
    if (!l) return value;
    ml_type type = increment_lifted_type(ml_graph_type(inc->g, n), &by);
    value = increment_latent_value(inc, l, &a->args, value, ml_type_size(&type, a->args.head_dim));
    return ml_permute(inc->g, value, &type);
}
