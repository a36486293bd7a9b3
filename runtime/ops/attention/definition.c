/* The definition of attention and of its gradient.
 *
 * Inside, queries have their heads split into (kv_heads, group), so that every product finds its
 * axes by name; score functions and the softmax work on whole heads. Keys and values that are in
 * ranks' order are put in their own first, and their gradients back at last. */
#include <math.h>

#include "runtime/graph/infer.h"
#include "runtime/ops/attention/attention.h"

typedef struct {
    ml_graph *g;
    ml_attention_args args;
    ml_dtype dtype;   /* of q, k, v */
    ml_dtype compute; /* of the scores */
    ml_type score;    /* batch, heads, seq, kv_seq */
    bool grouped;     /* kv_heads is an axis of its own */
    ml_axis group;
    int64_t kv_heads, group_size;
    ml_ref mask;      /* bool over seq, kv_seq: may attend; 0 where all may */
    int captured;     /* the first captured source */
    ml_ref places[2]; /* of q and k; 0 where they are whole. Of q in two pieces: over seq, what is
                         added to a row's number */
    ml_axis rows;     /* of `order` */
    ml_ref order;     /* of keys that are in ranks' order, and back; 0: they are in their own */
} parts;

static ml_ref in_dtype(parts *p, ml_ref n) {
    return ml_cast(p->g, n, p->compute);
}
static ml_ref minus_infinity(parts *p) {
    return ml_const(p->g, p->compute, -INFINITY);
}

/* heads -> kv_heads, group */
static ml_ref split_heads(parts *p, ml_ref n) {
    if (!p->grouped) return n;
    return ml_split(p->g, n, p->args.heads, p->args.kv_heads, p->kv_heads, p->group, p->group_size);
}

static ml_ref merge_heads(parts *p, ml_ref n) {
    if (!p->grouped) return n;
    return ml_merge(p->g, n, p->args.kv_heads, p->group, p->args.heads);
}

static ml_ref make_mask(parts *p) {
    ml_graph *g = p->g;
    const ml_attention_args *a = &p->args;
    int64_t seq = p->score.size[p->score.rank - 2], kv_seq = p->score.size[p->score.rank - 1];
    ml_ref mask = 0;
    if (!a->causal && !a->window) return 0;
    ml_ref offset = ml_const_int(g, ML_I32, a->pieces ? a->offset : kv_seq - seq);
    if (a->pieces) {
        offset = ml_map2(g, ML_OP_ADD, offset, p->places[0]);
        offset = ml_map2(g, ML_OP_SUB, offset, p->places[1]);
    }
    ml_ref query = ml_map2(g, ML_OP_ADD, ml_iota(g, a->seq, seq), offset);
    ml_type plane = {
        .dtype = ML_I32, .rank = 2, .axis = {a->seq, a->kv_seq}, .size = {seq, kv_seq}};
    query = ml_broadcast(g, query, &plane);
    ml_ref key = ml_iota(g, a->kv_seq, kv_seq);
    if (a->causal) mask = ml_map2(g, ML_OP_GE, query, key);
    if (a->window && a->window < (a->pieces ? INT32_MAX : seq + kv_seq)) {
        ml_ref near = ml_map2(g, ML_OP_LT, ml_map2(g, ML_OP_SUB, query, key),
                              ml_const_int(g, ML_I32, a->window));
        mask = mask ? ml_map2(g, ML_OP_AND, mask, near) : near;
    }
    return mask;
}

/* `end`: of the places among the sources. */
static void find_places(parts *p, const ml_ref *end) {
    ml_graph *g = p->g;
    int64_t seq = p->score.size[p->score.rank - 2];
    p->places[0] = end[-ml_attention_places(&p->args)];
    p->places[1] = end[-1];
    if (p->args.pieces < 2) return;
    ml_ref half = ml_const_int(g, ML_I32, seq / 2);
    ml_ref first = ml_map2(g, ML_OP_LT, ml_iota(g, p->args.seq, seq), half);
    p->places[0] = ml_where(g, first, p->places[0], ml_map2(g, ML_OP_SUB, end[-2], half));
}

static parts start(ml_graph *g, ml_ref n) {
    parts p = {.g = g};
    ml_attention_read(g, n, &p.args);
    ml_ref q = ml_graph_source(g, n, 0), k = ml_graph_source(g, n, 1);
    p.dtype = ml_graph_type(g, q)->dtype;
    p.compute = attention_dtype(p.dtype);
    ml_attention_score_type(g, q, k, &p.args, &p.score);
    p.grouped = p.args.kv_heads != p.args.heads;
    if (p.grouped) {
        const ml_type *t = ml_graph_type(g, k);
        p.kv_heads = ml_type_size(t, p.args.kv_heads);
        p.group_size = p.score.size[p.score.rank - 3] / p.kv_heads;
        /* one name for all attentions: equal parts of equal layers stay equal */
        p.group = ml_axis_named(g, "group'heads");
    }
    p.captured = ml_attention_captured(g, n);
    if (p.args.pieces) find_places(&p, ml_graph_sources(g, n) + p.captured);
    p.mask = make_mask(&p);
    if (p.args.key_ranks) {
        p.rows = ml_axis_named(g, "keys'ranks");
        p.order =
            ml_attention_key_order(g, p.rows, p.score.size[p.score.rank - 1], p.args.key_ranks);
    }
    return p;
}

ml_ref ml_attention_key_order(ml_graph *g, ml_axis rows, int64_t keys, int64_t ranks) {
    ml_ref row = ml_iota(g, rows, keys), size = ml_const_int(g, ML_I32, keys / (2 * ranks));
    ml_ref block = ml_map2(g, ML_OP_IDIV, row, size);
    ml_ref first = ml_map2(g, ML_OP_MOD, block, ml_const_int(g, ML_I32, 2));
    first = ml_map2(g, ML_OP_EQ, first, ml_const_int(g, ML_I32, 0));
    ml_ref other = ml_map2(g, ML_OP_SUB, ml_const_int(g, ML_I32, 2 * ranks), block);
    other =
        ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MUL, other, size), ml_map2(g, ML_OP_MOD, row, size));
    return ml_where(g, first, row, other);
}

/* k, v or a gradient of them from ranks' order into their own, or back. */
static ml_ref reordered(parts *p, ml_ref n) {
    if (!p->order) return n;
    const ml_type type = *ml_graph_type(p->g, n);
    n = ml_rename(p->g, ml_gather(p->g, n, p->order, p->args.kv_seq), p->rows, p->args.kv_seq);
    return ml_permute(p->g, n, &type);
}

/* scale * q k over head_dim, with the heads whole. */
static ml_ref raw_scores(parts *p, ml_ref q, ml_ref k) {
    ml_ref s = ml_dot(p->g, split_heads(p, q), k, &p->args.head_dim, 1, p->compute);
    s = ml_map2(p->g, ML_OP_MUL, s, ml_const(p->g, p->compute, p->args.scale));
    return ml_permute(p->g, merge_heads(p, s), &p->score);
}

/* values[0] = s, then the captured sources, then the cotangent where there is one. */
static ml_ref call(parts *p, ml_ref function, ml_ref s, ml_ref n, ml_ref cotangent) {
    int count = ml_graph_node(p->g, n)->source_count - p->captured;
    ml_axis axes[] = {p->args.seq, p->args.kv_seq};
    ml_ref *values = ML_NEW_ARRAY(ml_graph_arena(p->g), ml_ref, count + 2);
    values[0] = s;
    for (int i = 0; i < count; i++) values[1 + i] = ml_graph_source(p->g, n, p->captured + i);
    values[1 + count] = cotangent;
    int given = cotangent ? count + 2 : count + 1;
    ml_ref result = graph_inline_placed(p->g, function, values, given, axes, p->places);
    return ml_permute(p->g, result, &p->score);
}

static ml_ref masked(parts *p, ml_ref s) {
    return p->mask ? ml_where(p->g, p->mask, s, minus_infinity(p)) : s;
}

/* 0 where n is -infinity, so that a row with nothing to attend to gives exp(-infinity - 0) = 0. */
static ml_ref finite_or_zero(parts *p, ml_ref n) {
    ml_ref empty = ml_map2(p->g, ML_OP_EQ, n, minus_infinity(p));
    return ml_where(p->g, empty, ml_const(p->g, p->compute, 0), n);
}

static void forward(parts *p, ml_ref n, ml_ref *outputs) {
    ml_graph *g = p->g;
    ml_ref k = reordered(p, ml_graph_source(g, n, 1)), v = reordered(p, ml_graph_source(g, n, 2));
    ml_ref s = raw_scores(p, ml_graph_source(g, n, 0), k);
    if (p->args.score) s = call(p, p->args.score, s, n, 0);
    s = masked(p, s);
    /* No gradient flows through the largest: it cancels out of the values. */
    ml_ref largest = ml_reduce(g, ML_OP_MAX, s, &p->args.kv_seq, 1);
    largest = ml_map1(g, ML_OP_STOP_GRADIENT, finite_or_zero(p, largest));
    ml_ref e = ml_map1(g, ML_OP_EXP, ml_map2(g, ML_OP_SUB, s, largest));
    ml_ref sum = ml_reduce(g, ML_OP_SUM, e, &p->args.kv_seq, 1);
    ml_ref empty = ml_map2(g, ML_OP_EQ, sum, ml_const(g, p->compute, 0));
    ml_ref safe = ml_where(g, empty, ml_const(g, p->compute, 1), sum);
    ml_ref weights = ml_cast(g, ml_map2(g, ML_OP_DIV, e, safe), p->dtype);
    ml_ref o = ml_dot(g, split_heads(p, weights), v, &p->args.kv_seq, 1, p->dtype);
    outputs[0] = ml_permute(g, merge_heads(p, o), ml_graph_type(g, n));
    ml_ref lse = ml_map2(g, ML_OP_ADD, ml_map1(g, ML_OP_LOG, safe), largest);
    outputs[1] = ml_where(g, empty, minus_infinity(p), lse);
}

/* With P = exp(s - lse), dP = do v and r = sum(P dP) = sum(do o) of a row: ds = P (dP - r). */
static void backward(parts *p, ml_ref n, ml_ref *outputs) {
    ml_graph *g = p->g;
    const ml_ref *source = ml_graph_sources(g, n);
    ml_ref q = source[0], o = source[3], lse = source[4], cotangent = source[5];
    ml_ref k = reordered(p, source[1]), v = reordered(p, source[2]);
    ml_axis dim = p->args.head_dim;
    ml_ref raw = raw_scores(p, q, k);
    ml_ref s = p->args.score ? call(p, p->args.score, raw, n, 0) : raw;
    ml_ref weights =
        ml_map1(g, ML_OP_EXP, ml_map2(g, ML_OP_SUB, masked(p, s), finite_or_zero(p, lse)));
    ml_ref split_cotangent = split_heads(p, cotangent);
    ml_ref dweights = ml_dot(g, split_cotangent, v, &dim, 1, p->compute);
    dweights = ml_permute(g, merge_heads(p, dweights), &p->score);
    ml_ref row = ml_reduce(g, ML_OP_SUM,
                           ml_map2(g, ML_OP_MUL, in_dtype(p, cotangent), in_dtype(p, o)), &dim, 1);
    ml_ref ds = ml_map2(g, ML_OP_MUL, weights, ml_map2(g, ML_OP_SUB, dweights, row));
    if (p->args.derivative) {
        ds = call(p, p->args.derivative, raw, n, ds);
        /* where masked, the function may have been far out of its range */
        if (p->mask) ds = ml_where(g, p->mask, ds, ml_const(g, p->compute, 0));
    }
    ds = ml_map2(g, ML_OP_MUL, ds, ml_const(g, p->compute, p->args.scale));
    ds = split_heads(p, ml_cast(g, ds, p->dtype));
    ml_axis query_axes[] = {p->args.seq, p->group};
    int query_count = p->grouped ? 2 : 1;
    ml_ref dq = ml_dot(g, ds, k, &p->args.kv_seq, 1, p->dtype);
    ml_ref dk = ml_dot(g, ds, split_heads(p, q), query_axes, query_count, p->dtype);
    ml_ref dv = ml_dot(g, split_heads(p, ml_cast(g, weights, p->dtype)), split_cotangent,
                       query_axes, query_count, p->dtype);
    outputs[0] = ml_permute(g, merge_heads(p, dq), ml_graph_type(g, q));
    outputs[1] = reordered(p, ml_permute(g, dk, ml_graph_type(g, k)));
    outputs[2] = reordered(p, ml_permute(g, dv, ml_graph_type(g, v)));
}

void ml_attention_decompose(ml_graph *g, ml_ref n, ml_ref *outputs) {
    parts p = start(g, n);
    if (ml_graph_node(g, n)->op == ML_OP_ATTENTION)
        forward(&p, n, outputs);
    else
        backward(&p, n, outputs);
}
