/* The definition of CACHED_ATTENTION: each row's keys and values are gathered from the pools, slot
 * s of columns * block holding the last position p < length with p % (columns * block) == s; the
 * rest is attention's (attention/definition.c). Slots that hold no position read nothing. */
#include <math.h>

#include "runtime/graph/infer.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/cached_attention/cached_attention.h"

typedef struct {
    ml_graph *g;
    const ml_ref *source;
    int count;
    ml_cached_attention_args args;
    ml_dtype dtype, compute; /* of products; of scores */
    ml_axis row, group;
    int64_t kv_heads, group_size;
    ml_type score;         /* row, heads, seq, kv_seq: of slots */
    ml_ref query, key;     /* i32 positions: {row, seq}, {row, kv_seq} */
    ml_ref valid, pool_at; /* {row, kv_seq}: a slot holds a position; where in the pools, or -1 */
} parts;

static ml_ref integer(parts *p, int64_t value) {
    return ml_const_int(p->g, ML_I32, value);
}

static ml_ref map2(parts *p, ml_op op, ml_ref a, ml_ref b) {
    return ml_map2(p->g, op, a, b);
}

/* Axes i.. of the scores, in their order. */
static ml_type plane(const parts *p, ml_dtype dtype, const ml_axis *axes, int count) {
    ml_type t = {.dtype = (uint8_t)dtype};
    for (int i = 0; i < count; i++) {
        t.axis[t.rank] = axes[i];
        t.size[t.rank++] = ml_type_size(&p->score, axes[i]);
    }
    return t;
}

/* Where the slots' positions lie, and which these are. */
static void find_slots(parts *p, int64_t slots) {
    ml_graph *g = p->g;
    const ml_cached_attention_args *a = &p->args;
    ml_type rows = plane(p, ML_I32, (ml_axis[]){p->row, a->kv_seq}, 2);
    ml_ref slot = ml_broadcast(g, ml_iota(g, a->kv_seq, slots), &rows);
    ml_ref after = map2(p, ML_OP_SUB, p->source[CACHED_LENGTH], integer(p, 1));
    after = map2(p, ML_OP_SUB, ml_broadcast(g, after, &rows), slot); /* of the slot's first */
    p->valid = map2(p, ML_OP_GE, after, integer(p, 0));
    ml_ref turns = map2(p, ML_OP_IDIV, after, integer(p, slots));
    p->key = map2(p, ML_OP_ADD, slot, map2(p, ML_OP_MUL, turns, integer(p, slots)));
    ml_ref column = map2(p, ML_OP_IDIV, ml_iota(g, a->kv_seq, slots), integer(p, a->block));
    ml_ref at = ml_permute(g, ml_gather(g, p->source[CACHED_TABLE], column, a->columns), &rows);
    at = map2(p, ML_OP_MUL, at, integer(p, a->block));
    at = map2(p, ML_OP_ADD, at, map2(p, ML_OP_MOD, slot, integer(p, a->block)));
    p->pool_at = ml_where(g, p->valid, at, integer(p, -1));
}

static parts start(ml_graph *g, ml_ref n) {
    parts p = {.g = g, .source = ml_graph_sources(g, n)};
    p.count = ml_graph_node(g, n)->source_count;
    ml_cached_attention_read(g, n, &p.args);
    const ml_type *q = ml_graph_type(g, p.source[CACHED_Q]),
                  *k = ml_graph_type(g, p.source[CACHED_K]);
    int64_t slots = ml_type_size(ml_graph_type(g, p.source[CACHED_TABLE]), p.args.columns);
    slots *= p.args.block;
    p.row = ml_cached_attention_row(g, p.source);
    p.dtype = ml_wider((ml_dtype)q->dtype, (ml_dtype)k->dtype);
    p.compute = attention_dtype(p.dtype);
    ml_cached_attention_score_type(g, p.source, &p.args, &p.score);
    p.score.dtype = (uint8_t)p.compute;
    p.score.size[3] = slots;
    if (p.args.kv_heads && p.args.kv_heads != p.args.heads) {
        p.kv_heads = ml_type_size(k, p.args.kv_heads);
        p.group_size = p.score.size[1] / p.kv_heads;
        p.group = ml_axis_named(g, "group'heads");
    }
    ml_type queries = plane(&p, ML_I32, (ml_axis[]){p.row, p.args.seq}, 2);
    p.query = map2(&p, ML_OP_ADD, ml_broadcast(g, p.source[CACHED_START], &queries),
                   ml_iota(g, p.args.seq, queries.size[1]));
    find_slots(&p, slots);
    return p;
}

static ml_ref split_heads(parts *p, ml_ref n) {
    if (!p->group) return n;
    return ml_split(p->g, n, p->args.heads, p->args.kv_heads, p->kv_heads, p->group, p->group_size);
}

static ml_ref merge_heads(parts *p, ml_ref n) {
    return p->group ? ml_merge(p->g, n, p->args.kv_heads, p->group, p->args.heads) : n;
}

/* {row, kv_seq, rest...} of a pool. */
static ml_ref gathered(parts *p, ml_ref pool) {
    return ml_gather(p->g, pool, p->pool_at, p->args.pool);
}

static ml_ref may_attend(parts *p) {
    const ml_cached_attention_args *a = &p->args;
    const ml_axis axes[] = {p->row, a->seq, a->kv_seq};
    ml_type of = plane(p, ML_I32, axes, 3), test = of;
    test.dtype = ML_BOOL;
    ml_ref mask = ml_broadcast(p->g, p->valid, &test);
    ml_ref query = ml_broadcast(p->g, p->query, &of), key = ml_broadcast(p->g, p->key, &of);
    if (a->causal) mask = map2(p, ML_OP_AND, mask, map2(p, ML_OP_GE, query, key));
    if (a->window && a->window < INT32_MAX) {
        ml_ref near = map2(p, ML_OP_LT, map2(p, ML_OP_SUB, query, key), integer(p, a->window));
        mask = map2(p, ML_OP_AND, mask, near);
    }
    return mask;
}

/* ---- The score function ---------------------------------------------------------------------- */

/* With every axis of the scores, so that what the function combines always fits. */
static ml_ref widened(parts *p, ml_ref n) {
    ml_type as = p->score;
    as.dtype = ml_graph_type(p->g, n)->dtype;
    return ml_broadcast(p->g, n, &as);
}

static ml_ref captured(parts *p, ml_ref n) {
    const ml_type *t = ml_graph_type(p->g, n);
    if (ml_type_find(t, p->args.pool) >= 0)
        n = gathered(p, n);
    else if (ml_type_find(t, p->args.kv_seq) >= 0)
        n = ml_gather(p->g, n, ml_where(p->g, p->valid, p->key, integer(p, -1)), p->args.kv_seq);
    return widened(p, n);
}

static ml_ref copy_leaf(parts *p, ml_ref n, ml_ref score) {
    const int64_t *args = ml_graph_args(p->g, n);
    if (ml_graph_node(p->g, n)->op == ML_OP_PARAM)
        return args[0] ? captured(p, p->source[CACHED_CAPTURED + args[0] - 1]) : score;
    ml_axis axis = (ml_axis)args[0];
    if (axis == p->args.seq) return widened(p, p->query);
    if (axis == p->args.kv_seq) return widened(p, p->key);
    return widened(p, ml_iota(p->g, axis, args[1]));
}

static ml_ref call(parts *p, ml_ref score) {
    ml_graph *g = p->g;
    ml_refs body = {0};
    graph_reach(g, p->args.score, ml_graph_arena(g), &body);
    ml_ref *copies = ML_NEW_ARRAY(ml_graph_arena(g), ml_ref, body.count);
    for (uint32_t i = 0; i < body.count; i++) {
        ml_ref n = body.at[i], sources[3] = {0};
        const ml_node node = *ml_graph_node(g, n);
        for (int k = 0; k < node.source_count; k++) {
            uint32_t at = 0;
            while (body.at[at] != ml_graph_source(g, n, k)) at++;
            sources[k] = copies[at];
        }
        copies[i] = node.op == ML_OP_PARAM || node.op == ML_OP_IOTA
                        ? copy_leaf(p, n, score)
                        : ml_graph_add(g, (ml_op)node.op, sources, node.source_count,
                                       ml_graph_args(g, n), node.arg_count, ml_graph_type(g, n));
    }
    return ml_permute(g, widened(p, copies[body.count - 1]), &p->score);
}

/* ---- All of it ------------------------------------------------------------------------------- */

static ml_ref scores(parts *p) {
    ml_graph *g = p->g;
    ml_ref q = split_heads(p, ml_cast(g, p->source[CACHED_Q], p->dtype));
    ml_ref k = ml_cast(g, gathered(p, p->source[CACHED_K]), p->dtype);
    ml_ref s = ml_dot(g, q, k, &p->args.head_dim, 1, p->compute);
    s = map2(p, ML_OP_MUL, s, ml_const(g, p->compute, p->args.scale));
    s = ml_permute(g, merge_heads(p, s), &p->score);
    if (p->args.score) s = ml_cast(g, call(p, s), p->compute);
    return ml_where(g, may_attend(p), s, ml_const(g, p->compute, -INFINITY));
}

void cached_attention_define(ml_graph *g, ml_ref n, ml_ref *outputs) {
    parts p = start(g, n);
    const ml_type type = *ml_graph_type(g, n);
    ml_ref s = scores(&p), none = ml_const(g, p.compute, -INFINITY);
    ml_ref largest = ml_reduce(g, ML_OP_MAX, s, &p.args.kv_seq, 1);
    largest = ml_where(g, map2(&p, ML_OP_EQ, largest, none), ml_const(g, p.compute, 0), largest);
    largest = ml_map1(g, ML_OP_STOP_GRADIENT, largest);
    ml_ref e = ml_map1(g, ML_OP_EXP, map2(&p, ML_OP_SUB, s, largest));
    ml_ref sum = ml_reduce(g, ML_OP_SUM, e, &p.args.kv_seq, 1);
    ml_ref empty = map2(&p, ML_OP_EQ, sum, ml_const(g, p.compute, 0));
    ml_ref safe = ml_where(g, empty, ml_const(g, p.compute, 1), sum);
    ml_ref weights = ml_cast(g, map2(&p, ML_OP_DIV, e, safe), p.dtype);
    ml_ref v = ml_cast(g, gathered(&p, p.source[CACHED_V]), p.dtype);
    ml_ref o = ml_dot(g, split_heads(&p, weights), v, &p.args.kv_seq, 1, p.dtype);
    outputs[0] = ml_cast(g, ml_permute(g, merge_heads(&p, o), &type), (ml_dtype)type.dtype);
}
