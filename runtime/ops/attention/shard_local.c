/* Attention of one rank's part: the heads of k and v that its queries read, score functions over
 * what is cut, and calls. */
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/attention/attention_internal.h"
#include "runtime/ops/attention/shard_attention.h"

enum { Q = ATTENTION_Q, K = ATTENTION_K, V = ATTENTION_V };

static const ml_type *global_type(const shard_attention *x, int k) {
    return ml_graph_type(x->s->from, ml_graph_source(x->s->from, x->n, k));
}

/* Into how many parts source k is cut along `axis`. */
static int64_t parts(const shard_attention *x, int k, ml_axis axis) {
    int at = ml_type_find(global_type(x, k), axis);
    return at < 0 ? 1 : ml_layout_parts(x->s->layout, &x->need[k], at);
}

static ml_ref add2(shard_attention *x, ml_op op, ml_ref a, ml_ref b) {
    return ml_map2(x->g, op, a, b);
}

/* ---- Key/value heads of whole k and v -------------------------------------------------------- */

/* Which key/value head each of this rank's heads reads: one for all of them where they share it,
 * else one for each head. */
typedef struct {
    ml_ref index; /* 0 where k and v have their own */
    ml_axis axis; /* its own, and that of the picked heads */
} head_choice;

static head_choice choose_heads(shard_attention *x) {
    ml_axis heads = x->args.heads, kv = x->args.kv_heads;
    if (heads == kv || parts(x, Q, heads) == parts(x, K, kv)) return (head_choice){0};
    for (int i = 0; i < x->s->layout->count; i++)
        if (x->need[K].over[i].kind == ML_SHARED) return (head_choice){0};
    int at = ml_type_find(global_type(x, Q), heads);
    ml_placements rest = x->need[Q]; /* the mesh axes that cut the heads but not k */
    int kv_at = ml_type_find(global_type(x, K), kv);
    for (int i = 0; i < x->s->layout->count; i++)
        if (shard_same(x->need[K].over[i], shard_split(kv_at))) rest.over[i].kind = ML_REPLICATED;
    int64_t mine = ml_part_size(x->score.size[x->score.rank - 3], parts(x, Q, heads));
    int64_t group =
        x->score.size[x->score.rank - 3] / global_type(x, K)->size[kv_at]; /* heads a kv head */
    ml_ref base = shard_base(x->s, &rest, at, mine);
    ml_type one = {.dtype = ML_I32, .rank = 1, .axis = {kv}, .size = {1}};
    head_choice choice = {.axis = group % mine == 0 ? kv : heads};
    if (group % mine == 0)
        base = ml_broadcast(x->g, base, &one);
    else
        base = add2(x, ML_OP_ADD, ml_iota(x->g, heads, mine), base);
    choice.index = add2(x, ML_OP_IDIV, base, ml_const_int(x->g, ML_I32, group));
    x->kv_heads = choice.axis;
    return choice;
}

/* k or v with the chosen heads, its axes in the old order. */
static ml_ref pick(shard_attention *x, const head_choice *c, ml_ref key) {
    if (!c->index) return key;
    ml_type order = *ml_graph_type(x->g, key);
    int at = ml_type_find(&order, x->args.kv_heads);
    order.axis[at] = c->axis;
    order.size[at] = ml_graph_type(x->g, c->index)->size[0];
    return ml_permute(x->g, ml_gather(x->g, key, c->index, x->args.kv_heads), &order);
}

/* The gradient of pick: a part of the sum over the ranks. */
static ml_ref unpick(shard_attention *x, const head_choice *c, ml_ref gradient, ml_ref key) {
    if (!c->index) return gradient;
    const ml_type *t = ml_graph_type(x->g, key);
    if (c->axis != x->args.kv_heads)
        return ml_scatter_add(x->g, c->index, gradient, x->args.kv_heads, t);
    ml_axis apart = ml_axis_named(x->g, "group'heads"); /* the index has an axis of its own */
    return ml_scatter_add(x->g, ml_rename(x->g, c->index, x->args.kv_heads, apart),
                          ml_rename(x->g, gradient, x->args.kv_heads, apart), x->args.kv_heads, t);
}

/* ---- Score functions ------------------------------------------------------------------------- */

static bool uses_index(const shard_attention *x, ml_axis axis) {
    const ml_ref roots[] = {x->args.score, x->args.derivative};
    for (int f = 0; f < 2; f++) {
        ml_refs body = {0};
        if (!roots[f]) continue;
        graph_reach(x->s->from, roots[f], x->s->scratch, &body);
        for (uint32_t i = 0; i < body.count; i++)
            if (ml_graph_node(x->s->from, body.at[i])->op == ML_OP_IOTA &&
                ml_graph_args(x->s->from, body.at[i])[0] == axis)
                return true;
    }
    return false;
}

/* The indices along heads and batch axes that the functions use where these are cut. */
static void capture_indices(shard_attention *x) {
    for (int i = 0; i < x->score.rank; i++) {
        ml_axis axis = x->score.axis[i];
        bool rows = axis == x->args.seq || axis == x->args.kv_seq;
        if (!uses_index(x, axis)) continue;
        x->indexed = x->indexed || rows;
        int64_t count = rows ? 1 : parts(x, Q, axis), size = ml_part_size(x->score.size[i], count);
        if (count == 1) continue;
        int at = ml_type_find(global_type(x, Q), axis);
        x->index_axis[x->index_count] = axis;
        x->index[x->index_count++] =
            add2(x, ML_OP_ADD, ml_iota(x->g, axis, size), shard_base(x->s, &x->need[Q], at, size));
    }
}

typedef struct {
    shard_attention *x;
    const ml_ref *sources; /* of the call */
    ml_type score;         /* of the call */
    int first;             /* the first captured one of the call */
} function_copy;

static ml_ref parameter(const function_copy *c, int64_t index, const ml_type *type) {
    return ml_graph_add(c->x->g, ML_OP_PARAM, NULL, 0, &index, 1, type);
}

static ml_ref copy_parameter(const function_copy *c, int64_t index) {
    int captured = c->x->count - c->x->captured;
    if (index == 0) return parameter(c, 0, &c->score);
    if (index == captured + 1) return parameter(c, index + c->x->index_count, &c->score);
    return parameter(c, index, ml_graph_type(c->x->g, c->sources[c->first + (int)index - 1]));
}

static ml_ref copy_index(const function_copy *c, ml_axis axis) {
    const shard_attention *x = c->x;
    for (int i = 0; i < x->index_count; i++)
        if (x->index_axis[i] == axis)
            return parameter(c, 1 + x->count - x->captured + i, ml_graph_type(x->g, x->index[i]));
    return ml_iota(x->g, axis, ml_type_size(&c->score, axis));
}

static ml_ref copy_leaf(void *context, ml_ref n) {
    const function_copy *c = context;
    const ml_graph *from = c->x->s->from;
    int64_t first = ml_graph_args(from, n)[0];
    return ml_graph_node(from, n)->op == ML_OP_PARAM ? copy_parameter(c, first)
                                                     : copy_index(c, (ml_axis)first);
}

ml_ref shard_copy_function(sharder *s, ml_ref root, shard_copy_leaf *leaf, void *context) {
    ml_refs body = {0};
    if (!root) return 0;
    graph_reach(s->from, root, s->scratch, &body);
    ml_ref *copies = ML_NEW_ARRAY(s->scratch, ml_ref, body.count);
    for (uint32_t i = 0; i < body.count; i++) {
        const ml_node *node = ml_graph_node(s->from, body.at[i]);
        ml_ref sources[3] = {0};
        for (int k = 0; k < node->source_count; k++) {
            uint32_t at = 0;
            while (body.at[at] != ml_graph_source(s->from, body.at[i], k)) at++;
            sources[k] = copies[at];
        }
        if (node->op == ML_OP_PARAM || node->op == ML_OP_IOTA)
            copies[i] = leaf(context, body.at[i]);
        else
            copies[i] = ml_graph_add(s->to, (ml_op)node->op, sources, node->source_count,
                                     ml_graph_args(s->from, body.at[i]), node->arg_count,
                                     ml_graph_type(s->from, body.at[i]));
    }
    return copies[body.count - 1];
}

/* The function over the scores of the call. */
static ml_ref copy_function(function_copy *c, ml_ref root) {
    return shard_copy_function(c->x->s, root, copy_leaf, c);
}

/* ---- A call ---------------------------------------------------------------------------------- */

bool shard_attention_along(const shard_attention *x, int k, ml_axis axis) {
    return ml_type_find(global_type(x, k), axis) >= 0;
}

/* Captured tensors are whole along the keys: the block of the call. */
static ml_ref take_block(shard_attention *x, ml_ref whole, const shard_rows *k) {
    ml_axis axis = x->args.kv_seq, peer = ml_axis_named(x->g, "peer'mesh");
    ml_type order = *ml_graph_type(x->g, whole);
    int at = ml_type_find(&order, axis);
    int64_t blocks = order.size[at] / k->size;
    order.size[at] = k->size;
    ml_ref split = ml_split(x->g, whole, axis, peer, blocks, axis, k->size);
    return ml_permute(x->g, ml_gather(x->g, split, k->block, peer), &order);
}

static ml_ref source_of(shard_attention *x, int i, const shard_rows *q, const shard_rows *k) {
    ml_ref source = x->sources[i];
    if (q->of && q->of[i]) source = q->of[i];
    if (k->of && k->of[i]) source = k->of[i];
    if (i >= x->captured && k->block && shard_attention_along(x, i, x->args.kv_seq))
        return take_block(x, source, k);
    return source;
}

void shard_attention_call(shard_attention *x, const shard_rows *q, const shard_rows *k, bool causal,
                          bool aligned, ml_ref *outputs) {
    ml_ref *sources = ML_NEW_ARRAY(x->s->scratch, ml_ref, x->count + 3 + ML_MAX_AXES);
    ml_attention_args args = x->args;
    int count = 0;
    args.kv_heads = x->kv_heads;
    args.causal = causal;
    bool placed = x->seq_cut && !aligned && (causal || args.window || x->indexed);
    args.pieces = placed ? 1 + (q->second != 0) : 0;
    int64_t whole = x->score.size[x->score.rank - 2], keys = x->score.size[x->score.rank - 1];
    args.offset = placed ? keys - whole : 0;
    for (int i = 0; i < x->captured; i++) sources[count++] = source_of(x, i, q, k);
    ml_ref zero = ml_const_int(x->g, ML_I32, 0);
    if (placed) {
        sources[count++] = q->start ? q->start : zero;
        if (q->second) sources[count++] = q->second;
        sources[count++] = k->start ? k->start : zero;
    }
    function_copy copy = {.x = x, .sources = sources, .first = count};
    for (int i = x->captured; i < x->count; i++) sources[count++] = source_of(x, i, q, k);
    for (int i = 0; i < x->index_count; i++) sources[count++] = x->index[i];
    ml_attention_score_type(x->g, sources[Q], sources[K], &args, &copy.score);
    args.score = copy_function(&copy, x->args.score);
    args.derivative = copy_function(&copy, x->args.derivative);
    if (x->grad)
        outputs[0] = ml_attention_grad(x->g, sources, count, &args);
    else
        outputs[0] = ml_attention(x->g, sources, count, &args);
    for (int i = 1; i < ml_op_outputs(x->g, outputs[0]); i++)
        outputs[i] = ml_out(x->g, outputs[0], i);
}

/* ---- All of it ------------------------------------------------------------------------------- */

static void find_cuts(shard_attention *x) {
    int seq = ml_type_find(global_type(x, Q), x->args.seq);
    int kv_seq = ml_type_find(global_type(x, K), x->args.kv_seq), cuts = 0;
    x->ring = x->queries = -1;
    for (int i = 0; i < x->s->layout->count; i++) {
        if (x->s->layout->axis[i].size == 1) continue;
        if (shard_same(x->need[K].over[i], shard_split(kv_seq))) x->ring = i;
        if (!shard_same(x->need[Q].over[i], shard_split(seq))) continue;
        x->queries = cuts++ ? -1 : i;
    }
    x->seq_cut = cuts > 0;
}

void attention_local(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *need,
                     const ml_placements *out, ml_ref *outputs) {
    shard_attention x = {.s = s, .g = s->to, .n = n, .need = need};
    x.count = ml_graph_node(s->from, n)->source_count;
    x.grad = ml_graph_node(s->from, n)->op == ML_OP_ATTENTION_GRAD;
    x.captured = ml_attention_captured(s->from, n);
    ml_attention_read(s->from, n, &x.args);
    if (x.args.pieces) ml_raise(ML_INTERNAL, "sharding: an attention of parts is cut again");
    x.kv_heads = x.args.kv_heads;
    ml_attention_score_type(s->from, ml_graph_source(s->from, n, Q), ml_graph_source(s->from, n, K),
                            &x.args, &x.score);
    x.sources = ML_NEW_ARRAY(s->scratch, ml_ref, x.count);
    memcpy(x.sources, sources, sizeof *sources * (size_t)x.count);
    find_cuts(&x);
    capture_indices(&x);
    head_choice choice = choose_heads(&x);
    for (int k = K; k <= V; k++) x.sources[k] = pick(&x, &choice, sources[k]);
    shard_attention_rows(&x, outputs);
    if (x.grad)
        for (int k = K; k <= V; k++) outputs[k] = unpick(&x, &choice, outputs[k], sources[k]);
    ml_type order = ml_layout_local(s->layout, ml_graph_type(s->from, n), &out[0]);
    outputs[0] = ml_permute(s->to, outputs[0], &order);
}
