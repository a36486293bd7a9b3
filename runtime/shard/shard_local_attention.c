/* Attention of one rank's part.
 *
 * Where queries are cut, positions are no longer what an op on parts would think: masks and score
 * functions then use captured tensors of global positions. In a ring, each rank has a block of keys
 * that moves on to the next rank; what the rounds give is merged by their logsumexps. */
#include <math.h>
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/shard/shard_parts.h"

enum { Q, K, V, O, LSE, DO, FORWARD = V + 1, BACKWARD = DO + 1 };

typedef struct {
    sharder *s;
    ml_graph *g;
    ml_ref n;
    ml_attention_args global, local;
    const ml_placements *need;
    bool grad;
    int count, captured; /* sources; the first captured one */
    ml_ref *sources;     /* of the local op; positions are appended */
    ml_type score;       /* of the whole attention */
    bool seq_cut;
    int ring;      /* the mesh axis, or -1 */
    ml_ref block;  /* ring: which block of keys this rank has in this round */
    ml_ref picked; /* indices of key/value heads; 0 where k and v have their own */
    ml_axis picked_axis;
    /* Captured positions, in the order in which they are appended. */
    int position_count;
    ml_axis position_axis[ML_MAX_AXES];
} local_attention;

static const ml_type *global_type(const local_attention *x, int k) {
    return ml_graph_type(x->s->from, ml_graph_source(x->s->from, x->n, k));
}

/* Into how many parts source k is cut along `axis`. */
static int64_t parts(const local_attention *x, int k, ml_axis axis) {
    int at = ml_type_find(global_type(x, k), axis);
    return at < 0 ? 1 : ml_layout_parts(x->s->layout, &x->need[k], at);
}

static ml_ref add2(local_attention *x, ml_op op, ml_ref a, ml_ref b) {
    return ml_map2(x->g, op, a, b);
}
static ml_ref number(local_attention *x, ml_ref like, double value) {
    return ml_const(x->g, ml_graph_type(x->g, like)->dtype, value);
}

/* ---- Key/value heads of whole k and v -------------------------------------------------------- */

/* The index of the key/value head that each of this rank's heads reads: one for all of them where
 * they share it, else one for each head. */
static void pick_heads(local_attention *x) {
    ml_axis heads = x->global.heads, kv = x->global.kv_heads;
    if (heads == kv || parts(x, Q, heads) == parts(x, K, kv)) return;
    int at = ml_type_find(global_type(x, Q), heads);
    ml_placements rest = x->need[Q]; /* the mesh axes that cut the heads but not k */
    int kv_at = ml_type_find(global_type(x, K), kv);
    for (int i = 0; i < x->s->layout->count; i++)
        if (shard_same(x->need[K].over[i], shard_split(kv_at))) rest.over[i].kind = ML_REPLICATED;
    int64_t mine = x->score.size[x->score.rank - 3] / parts(x, Q, heads);
    int64_t group =
        x->score.size[x->score.rank - 3] / global_type(x, K)->size[kv_at]; /* heads a kv head */
    ml_ref base = shard_base(x->s, &rest, at, mine);
    ml_type one = {.dtype = ML_I32, .rank = 1, .axis = {kv}, .size = {1}};
    x->picked_axis = group % mine == 0 ? kv : heads;
    if (group % mine == 0)
        base = ml_broadcast(x->g, base, &one);
    else
        base = add2(x, ML_OP_ADD, ml_iota(x->g, heads, mine), base);
    x->picked = add2(x, ML_OP_IDIV, base, ml_const_int(x->g, ML_I32, group));
    x->local.kv_heads = x->picked_axis;
}

/* k or v with the picked heads, its axes in the old order. */
static ml_ref pick(local_attention *x, ml_ref key) {
    if (!x->picked) return key;
    ml_type order = *ml_graph_type(x->g, key);
    int at = ml_type_find(&order, x->global.kv_heads);
    order.axis[at] = x->picked_axis;
    order.size[at] = ml_graph_type(x->g, x->picked)->size[0];
    return ml_permute(x->g, ml_gather(x->g, key, x->picked, x->global.kv_heads), &order);
}

/* The gradient of pick: a part of the sum over the ranks. */
static ml_ref unpick(local_attention *x, ml_ref gradient, ml_ref key) {
    if (!x->picked) return gradient;
    const ml_type *t = ml_graph_type(x->g, key);
    if (x->picked_axis != x->global.kv_heads)
        return ml_scatter_add(x->g, x->picked, gradient, x->global.kv_heads, t);
    ml_axis apart = ml_axis_named(x->g, "group'heads"); /* the index has an axis of its own */
    return ml_scatter_add(x->g, ml_rename(x->g, x->picked, x->global.kv_heads, apart),
                          ml_rename(x->g, gradient, x->global.kv_heads, apart), x->global.kv_heads,
                          t);
}

/* ---- Score functions ------------------------------------------------------------------------- */

static int64_t local_size(const local_attention *x, ml_axis axis) {
    int64_t size = x->score.size[ml_type_find(&x->score, axis)];
    if (axis == x->global.kv_seq) return size / parts(x, K, axis);
    return size / parts(x, Q, axis);
}

static bool is_cut(const local_attention *x, ml_axis axis) {
    return local_size(x, axis) != x->score.size[ml_type_find(&x->score, axis)];
}

static bool uses_iota(const local_attention *x, ml_ref root, ml_axis axis) {
    ml_refs body = {0};
    if (!root) return false;
    graph_reach(x->s->from, root, x->s->scratch, &body);
    for (uint32_t i = 0; i < body.count; i++)
        if (ml_graph_node(x->s->from, body.at[i])->op == ML_OP_IOTA &&
            ml_graph_args(x->s->from, body.at[i])[0] == axis)
            return true;
    return false;
}

static bool masks(const local_attention *x) {
    return x->seq_cut && (x->global.causal || x->global.window);
}

/* The global positions along an axis of the scores that is cut. */
static ml_ref positions_of(local_attention *x, ml_axis axis) {
    int64_t size = local_size(x, axis);
    ml_ref iota = ml_iota(x->g, axis, size), base;
    if (axis == x->global.kv_seq)
        base = add2(x, ML_OP_MUL, x->block, ml_const_int(x->g, ML_I32, size));
    else
        base = shard_base(x->s, &x->need[Q], ml_type_find(global_type(x, Q), axis), size);
    return add2(x, ML_OP_ADD, iota, base);
}

/* Which positions the functions need: they become the last captured tensors. */
static void capture_positions(local_attention *x) {
    x->position_count = 0;
    for (int i = 0; i < x->score.rank; i++) {
        ml_axis axis = x->score.axis[i];
        bool of_mask = masks(x) && (axis == x->global.seq || axis == x->global.kv_seq);
        if (!is_cut(x, axis)) continue;
        if (!of_mask && !uses_iota(x, x->global.score, axis) &&
            !uses_iota(x, x->global.derivative, axis))
            continue;
        x->sources[x->count + x->position_count] = positions_of(x, axis);
        x->position_axis[x->position_count++] = axis;
    }
}

static ml_ref parameter(local_attention *x, int64_t index, const ml_type *type) {
    return ml_graph_add(x->g, ML_OP_PARAM, NULL, 0, &index, 1, type);
}

/* Inside of a function: indices along an axis of the scores. */
static ml_ref indices(local_attention *x, ml_axis axis) {
    int captured = x->count - x->captured;
    for (int i = 0; i < x->position_count; i++)
        if (x->position_axis[i] == axis)
            return parameter(x, 1 + captured + i, ml_graph_type(x->g, x->sources[x->count + i]));
    return ml_iota(x->g, axis, local_size(x, axis));
}

static ml_ref copy_parameter(local_attention *x, int64_t index, const ml_type *score) {
    int captured = x->count - x->captured;
    if (index == 0) return parameter(x, 0, score);
    if (index == captured + 1) return parameter(x, index + x->position_count, score);
    return parameter(x, index, ml_graph_type(x->g, x->sources[x->captured + (int)index - 1]));
}

/* The function over local scores. */
static ml_ref copy_function(local_attention *x, ml_ref root, const ml_type *score) {
    const ml_graph *from = x->s->from;
    ml_refs body = {0};
    graph_reach(from, root, x->s->scratch, &body);
    ml_ref *copies = ML_NEW_ARRAY(x->s->scratch, ml_ref, body.count);
    for (uint32_t i = 0; i < body.count; i++) {
        const ml_node *node = ml_graph_node(from, body.at[i]);
        const int64_t *args = ml_graph_args(from, body.at[i]);
        ml_ref sources[3] = {0};
        for (int k = 0; k < node->source_count; k++) {
            uint32_t at = 0;
            while (body.at[at] != ml_graph_source(from, body.at[i], k)) at++;
            sources[k] = copies[at];
        }
        if (node->op == ML_OP_PARAM)
            copies[i] = copy_parameter(x, args[0], score);
        else if (node->op == ML_OP_IOTA)
            copies[i] = indices(x, (ml_axis)args[0]);
        else
            copies[i] = ml_graph_add(x->g, (ml_op)node->op, sources, node->source_count, args,
                                     node->arg_count, ml_graph_type(from, body.at[i]));
    }
    return copies[body.count - 1];
}

/* bool, with every axis of the scores: may attend. An index gets these axes by a choice between it
 * and the scores: functions are elementwise. */
static ml_ref mask_of(local_attention *x, const ml_type *score) {
    ml_graph *g = x->g;
    int64_t offset = x->score.size[x->score.rank - 1] - x->score.size[x->score.rank - 2];
    ml_ref query = add2(x, ML_OP_ADD, indices(x, x->global.seq), ml_const_int(g, ML_I32, offset));
    ml_ref widen[] = {ml_const_int(g, ML_BOOL, 1), query,
                      ml_cast(g, parameter(x, 0, score), ML_I32)};
    query = ml_graph_add(g, ML_OP_WHERE, widen, 3, NULL, 0, NULL);
    ml_ref key = indices(x, x->global.kv_seq), mask = 0;
    if (x->global.causal) mask = add2(x, ML_OP_GE, query, key);
    if (!x->global.window || x->global.window > INT32_MAX) return mask;
    ml_ref near = add2(x, ML_OP_LT, add2(x, ML_OP_SUB, query, key),
                       ml_const_int(g, ML_I32, x->global.window));
    return mask ? add2(x, ML_OP_AND, mask, near) : near;
}

/* Score function and derivative of the local attention, and its positions. */
static void make_functions(local_attention *x) {
    x->local.score = x->local.derivative = 0;
    x->local.causal = !masks(x) && x->global.causal;
    x->local.window = masks(x) ? 0 : x->global.window;
    capture_positions(x);
    if (!x->global.score && !masks(x)) return;
    ml_type score;
    ml_attention_score_type(x->g, x->sources[Q], x->sources[K], &x->local, &score);
    ml_ref s = parameter(x, 0, &score);
    ml_ref value = x->global.score ? copy_function(x, x->global.score, &score) : s;
    ml_ref mask = masks(x) ? mask_of(x, &score) : 0;
    if (mask)
        value = ml_where(x->g, mask, ml_cast(x->g, value, score.dtype),
                         ml_const(x->g, score.dtype, -INFINITY));
    x->local.score = value;
    if (!x->grad) return;
    int64_t cotangent = 1 + x->count - x->captured + x->position_count;
    ml_ref slope = x->global.derivative ? copy_function(x, x->global.derivative, &score)
                                        : parameter(x, cotangent, &score);
    if (mask) slope = ml_where(x->g, mask, slope, ml_const(x->g, score.dtype, 0));
    x->local.derivative = slope;
}

/* ---- One round ------------------------------------------------------------------------------- */

static void attend(local_attention *x, ml_ref *outputs) {
    make_functions(x);
    int count = x->count + x->position_count;
    if (!x->grad) {
        outputs[0] = ml_attention(x->g, x->sources, count, &x->local);
        outputs[1] = ml_out(x->g, outputs[0], 1);
        return;
    }
    outputs[0] = ml_attention_grad(x->g, x->sources, count, &x->local);
    for (int i = 1; i < 3; i++) outputs[i] = ml_out(x->g, outputs[0], i);
}

/* ---- The ring -------------------------------------------------------------------------------- */

static ml_ref shift(local_attention *x, ml_ref n) {
    int64_t args[] = {x->ring, x->s->layout->axis[x->ring].size};
    return ml_graph_add(x->g, ML_OP_SHIFT, &n, 1, args, 2, NULL);
}

/* Captured tensors along the keys: the part of this round's block. */
static void take_blocks(local_attention *x, const ml_ref *whole) {
    ml_axis axis = x->global.kv_seq, peer = ml_axis_named(x->g, "peer'mesh");
    int64_t ranks = x->s->layout->axis[x->ring].size;
    for (int k = x->captured; k < x->count; k++) {
        ml_type order = *ml_graph_type(x->g, whole[k]);
        int at = ml_type_find(&order, axis);
        if (at < 0) continue;
        order.size[at] /= ranks;
        ml_ref parts = ml_split(x->g, whole[k], axis, peer, ranks, axis, order.size[at]);
        x->sources[k] = ml_permute(x->g, ml_gather(x->g, parts, x->block, peer), &order);
    }
}

/* (o, lse) and another round's, over other keys: lse = log(exp a + exp b). */
static void merge(local_attention *x, ml_ref o[2], ml_ref lse[2]) {
    ml_graph *g = x->g;
    ml_ref minus = number(x, lse[0], -INFINITY), zero = number(x, lse[0], 0);
    ml_ref largest = add2(x, ML_OP_MAXIMUM, lse[0], lse[1]);
    largest = ml_where(g, add2(x, ML_OP_EQ, largest, minus), zero, largest);
    ml_ref weight[2];
    for (int i = 0; i < 2; i++)
        weight[i] = ml_map1(g, ML_OP_EXP, add2(x, ML_OP_SUB, lse[i], largest));
    ml_ref sum = add2(x, ML_OP_ADD, weight[0], weight[1]);
    ml_ref empty = add2(x, ML_OP_EQ, sum, zero);
    ml_ref safe = ml_where(g, empty, number(x, sum, 1), sum);
    ml_ref both = 0;
    for (int i = 0; i < 2; i++) {
        ml_ref share = add2(x, ML_OP_DIV, weight[i], safe);
        share = add2(x, ML_OP_MUL, ml_cast(g, o[i], ml_graph_type(g, sum)->dtype), share);
        both = both ? add2(x, ML_OP_ADD, both, share) : share;
    }
    o[0] = both;
    lse[0] = ml_where(g, empty, minus, add2(x, ML_OP_ADD, ml_map1(g, ML_OP_LOG, safe), largest));
}

static ml_ref accumulate(local_attention *x, ml_ref sum, ml_ref term) {
    term = ml_cast(x->g, term, attention_dtype((ml_dtype)ml_graph_type(x->g, term)->dtype));
    return sum ? add2(x, ML_OP_ADD, sum, term) : term;
}

/* In round r rank c has the keys of rank c - r. Gradients of keys travel with them and are home
 * after as many shifts as there are ranks. */
static void ring(local_attention *x, const ml_ref *whole, ml_ref *outputs) {
    ml_graph *g = x->g;
    int64_t ranks = x->s->layout->axis[x->ring].size;
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, x->sources[Q])->dtype;
    ml_ref c = ml_graph_add(g, ML_OP_COORDINATE, NULL, 0, (int64_t[]){x->ring, ranks}, 2, NULL);
    ml_ref sums[3] = {0}, o[2] = {0}, lse[2] = {0}, made[ML_MAX_OUTPUTS];
    for (int64_t round = 0; round < ranks; round++) {
        x->block = add2(x, ML_OP_ADD, c, ml_const_int(g, ML_I32, ranks - round));
        x->block = add2(x, ML_OP_MOD, x->block, ml_const_int(g, ML_I32, ranks));
        take_blocks(x, whole);
        attend(x, made);
        if (x->grad) {
            sums[0] = accumulate(x, sums[0], made[0]);
            for (int i = K; i <= V; i++)
                sums[i] = accumulate(x, sums[i] ? shift(x, sums[i]) : 0, made[i]);
        } else {
            o[round > 0] = made[0];
            lse[round > 0] = made[1];
            if (round) merge(x, o, lse);
        }
        for (int k = K; k <= V && round + 1 < ranks; k++) x->sources[k] = shift(x, x->sources[k]);
    }
    outputs[0] = ml_cast(g, x->grad ? sums[0] : o[0], dtype);
    outputs[1] = x->grad ? ml_cast(g, shift(x, sums[1]), dtype) : lse[0];
    if (x->grad) outputs[2] = ml_cast(g, shift(x, sums[2]), dtype);
}

/* ---- All of it ------------------------------------------------------------------------------- */

void shard_local_attention(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *need,
                           const ml_placements *out, ml_ref *outputs) {
    const ml_node *node = ml_graph_node(s->from, n);
    local_attention x = {.s = s, .g = s->to, .n = n, .need = need, .count = node->source_count};
    x.grad = node->op == ML_OP_ATTENTION_GRAD;
    x.captured = x.grad ? BACKWARD : FORWARD;
    ml_attention_read(s->from, n, &x.global);
    x.local = x.global;
    ml_attention_score_type(s->from, ml_graph_source(s->from, n, Q), ml_graph_source(s->from, n, K),
                            &x.global, &x.score);
    x.sources = ML_NEW_ARRAY(s->scratch, ml_ref, x.count + ML_MAX_AXES);
    memcpy(x.sources, sources, sizeof *sources * (size_t)x.count);
    x.seq_cut = is_cut(&x, x.global.seq);
    x.ring = -1;
    int kv_at = ml_type_find(global_type(&x, K), x.global.kv_seq);
    for (int i = 0; i < s->layout->count; i++)
        if (shard_same(need[K].over[i], shard_split(kv_at))) x.ring = i;
    pick_heads(&x);
    for (int k = K; k <= V; k++) x.sources[k] = pick(&x, sources[k]);
    if (x.ring >= 0)
        ring(&x, sources, outputs);
    else
        attend(&x, outputs);
    if (x.grad)
        for (int k = K; k <= V; k++) outputs[k] = unpick(&x, outputs[k], sources[k]);
    ml_type order = ml_layout_local(s->layout, ml_graph_type(s->from, n), &out[0]);
    outputs[0] = ml_permute(s->to, outputs[0], &order);
}
