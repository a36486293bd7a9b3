/* How attention and its gradient can be cut over one mesh axis: along a batch axis, the heads, the
 * queries with all keys gathered, or queries and keys both (a ring). */
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/attention/attention_internal.h"
#include "runtime/shard/shard_internal.h"

enum { Q, K, V };

typedef struct {
    sharder *s;
    ml_ref n;
    ml_attention_args args;
    int count;
    bool grad;
    ml_type score;
} attention;

static const ml_type *type_of(const attention *x, int k) {
    return ml_graph_type(x->s->from, ml_graph_source(x->s->from, x->n, k));
}

static ml_axis key_axis(const attention *x, ml_axis axis) {
    return axis == x->args.heads ? x->args.kv_heads : axis;
}

/* Split along `axis` wherever it is found: in k and v under the name that it has there. Heads that
 * fill up a part are computed like others, and those of k and v then have as many. */
static shard_strategy *split_along(const attention *x, ml_axis axis, ml_axis in_keys) {
    sharder *s = x->s;
    shard_strategy *to = shard_strategy_new(s, x->n, shard_preference(s, axis));
    for (int k = 0; k < x->count; k++) {
        int at = ml_type_find(type_of(x, k), k == K || k == V ? in_keys : axis);
        if (at >= 0) s->pool.at[to->sources + (uint32_t)k] = shard_split(at);
    }
    int at = ml_type_find(type_of(x, Q), axis), kv = ml_type_find(type_of(x, K), in_keys);
    if (at >= 0) to->out[0] = shard_split(at);
    int64_t size = at >= 0 ? type_of(x, Q)->size[at] : 0, ranks = s->layout->axis[s->mesh].size;
    to->uneven = axis != x->args.seq && size >= ranks && size % ranks &&
                 (!in_keys || (kv >= 0 && type_of(x, K)->size[kv] == size));
    if (!x->grad) {
        at = ml_type_find(&x->score, axis);
        to->out[1] = shard_split(at);
        return to;
    }
    for (int i = K; i <= V; i++) {
        at = in_keys ? ml_type_find(type_of(x, i), in_keys) : -1;
        to->out[i] = at >= 0 ? shard_split(at) : (ml_placement){ML_PARTIAL_SUM, 0};
    }
    return to;
}

static bool worth(const attention *x, ml_axis axis) {
    ml_axis in_keys = key_axis(x, axis);
    if (shard_preference(x->s, axis) < SHARD_PARAMS) return true;
    for (int k = 0; k < x->count; k++) {
        ml_ref source = ml_graph_source(x->s->from, x->n, k);
        int position = ml_type_find(type_of(x, k), k == K || k == V ? in_keys : axis);
        if (position < 0) continue;
        for (uint32_t v = shard_next_version(x->s, source, 0); v;
             v = shard_next_version(x->s, source, v))
            if (shard_same(x->s->versions.at[v].at.over[x->s->mesh], shard_split(position)))
                return true;
    }
    return false;
}

/* How earlier mesh axes cut source k along `axis`: their number. */
static int cut_before(const attention *x, int k, ml_axis axis) {
    int position = ml_type_find(type_of(x, k), axis), count = 0;
    for (int i = 0; i < x->s->mesh; i++)
        count += shard_same(x->s->need[k].over[i], shard_split(position));
    return count;
}

/* Groups of ranks with the queries' heads of one key/value head share it. */
static void share_heads(const attention *x) {
    sharder *s = x->s;
    ml_axis heads = x->args.heads, kv = x->args.kv_heads;
    int at = ml_type_find(type_of(x, K), kv);
    int64_t ranks = s->layout->axis[s->mesh].size, size = type_of(x, K)->size[at];
    bool divides = type_of(x, Q)->size[ml_type_find(type_of(x, Q), heads)] % ranks == 0;
    if (kv != s->shared || size >= ranks || ranks % size || !divides || size > UINT8_MAX) return;
    if (shard_preference(s, kv) >= SHARD_PARAMS || cut_before(x, Q, heads) || cut_before(x, K, kv))
        return;
    shard_strategy *to = split_along(x, heads, 0);
    for (int i = K; i <= V; i++) {
        s->pool.at[to->sources + (uint32_t)i] = shard_shared(ml_type_find(type_of(x, i), kv), size);
        if (x->grad) to->out[i] = shard_shared_sum(ml_type_find(type_of(x, i), kv), size);
    }
}

/* Key/value heads go with their queries' where they are listed and divide, or where the queries'
 * heads that a rank has are those of whole key/value heads; otherwise k and v stay whole, and each
 * rank takes the key/value heads that its queries read. */
static void propose_heads(const attention *x) {
    sharder *s = x->s;
    ml_axis heads = x->args.heads, kv = x->args.kv_heads;
    if (!worth(x, heads)) return;
    for (int i = 0; i < s->mesh; i++)
        if (s->need[K].over[i].kind == ML_SHARED) return; /* each rank has one */
    share_heads(x);
    if (cut_before(x, Q, heads) == cut_before(x, K, kv)) (void)split_along(x, heads, kv);
    int64_t keys = type_of(x, K)->size[ml_type_find(type_of(x, K), kv)];
    bool shared = shard_preference(s, kv) >= SHARD_PARAMS || keys % s->layout->axis[s->mesh].size;
    if (heads != kv && shared) (void)split_along(x, heads, 0);
}

static void propose_queries(const attention *x) {
    sharder *s = x->s;
    ml_axis seq = x->args.seq, kv_seq = x->args.kv_seq;
    bool alone = !cut_before(x, Q, seq) && !cut_before(x, K, kv_seq);
    if (!worth(x, seq) || cut_before(x, K, kv_seq)) return;
    if (shard_preference(s, kv_seq) < SHARD_PARAMS && alone)
        (void)split_along(x, seq, kv_seq);
    else
        (void)split_along(x, seq, 0);
}

void attention_propose(sharder *s, ml_ref n) {
    attention x = {.s = s, .n = n, .count = ml_graph_node(s->from, n)->source_count};
    x.grad = ml_graph_node(s->from, n)->op == ML_OP_ATTENTION_GRAD;
    ml_attention_read(s->from, n, &x.args);
    ml_attention_score_type(s->from, ml_graph_source(s->from, n, Q), ml_graph_source(s->from, n, K),
                            &x.args, &x.score);
    const ml_type *q = type_of(&x, Q);
    for (int i = 0; i < q->rank; i++) {
        ml_axis axis = q->axis[i];
        if (axis == x.args.seq || axis == x.args.heads || axis == x.args.head_dim) continue;
        if (worth(&x, axis)) (void)split_along(&x, axis, axis);
    }
    propose_heads(&x);
    propose_queries(&x);
}
