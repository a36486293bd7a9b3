/* How attention to cached keys and values can be cut: along the rows, with whole pools, or along
 * the heads with those of keys and values; where these do not divide, all ranks do all of it. What
 * fills up a part would read blocks that no table lists, so that parts are equal. */
#include "runtime/ops/attention/shard_attention.h"
#include "runtime/ops/cached_attention/cached_attention.h"

typedef struct {
    sharder *s;
    ml_ref n;
    int count; /* of sources */
    ml_cached_attention_args args;
    ml_axis row;
    const ml_placements *need;
    const ml_ref *sources; /* of this rank */
    ml_type score;         /* of this rank */
    /* Indices along axes that are cut, which the score function uses: captured behind the others.
     */
    int index_count;
    ml_ref index[2];
} cached;

static const ml_type *type_of(const cached *x, int k) {
    return ml_graph_type(x->s->from, ml_graph_source(x->s->from, x->n, k));
}

static cached read_node(sharder *s, ml_ref n) {
    cached x = {.s = s, .n = n, .count = ml_graph_node(s->from, n)->source_count};
    ml_cached_attention_read(s->from, n, &x.args);
    x.row = ml_cached_attention_row(s->from, ml_graph_sources(s->from, n));
    return x;
}

/* Split along `axis`: in the pools under the name `in_pools`, 0 where they lack it. */
static void split_along(const cached *x, ml_axis axis, ml_axis in_pools) {
    sharder *s = x->s;
    int *at = ML_NEW_ARRAY(s->scratch, int, x->count);
    for (int k = 0; k < x->count; k++) {
        bool pool = k == CACHED_K || k == CACHED_V;
        at[k] = pool && !in_pools ? -1 : ml_type_find(type_of(x, k), pool ? in_pools : axis);
        int64_t size = at[k] < 0 ? 0 : type_of(x, k)->size[at[k]], parts = 1;
        for (int i = 0; i < s->mesh && at[k] >= 0; i++)
            if (shard_same(s->need[k].over[i], shard_split(at[k])))
                parts *= s->layout->axis[i].size;
        if (size % (parts * s->layout->axis[s->mesh].size)) return;
    }
    if (!shard_candidate(s, x->n, axis, at)) return;
    shard_strategy *to = shard_strategy_new(s, x->n, shard_preference(s, axis));
    for (int k = 0; k < x->count; k++)
        if (at[k] >= 0) s->pool.at[to->sources + (uint32_t)k] = shard_split(at[k]);
    to->out[0] = shard_split(at[CACHED_Q]);
}

void cached_attention_propose(sharder *s, ml_ref n) {
    const cached x = read_node(s, n);
    split_along(&x, x.row, 0);
    split_along(&x, x.args.heads, x.args.kv_heads);
}

/* ---- One rank's part ------------------------------------------------------------------------- */

static ml_ref parameter(const cached *x, int64_t index, const ml_type *type) {
    return ml_graph_add(x->s->to, ML_OP_PARAM, NULL, 0, &index, 1, type);
}

/* The index along an axis, of the whole. */
static ml_ref copy_index(cached *x, ml_axis axis, int64_t size) {
    ml_graph *g = x->s->to;
    int position = ml_type_find(type_of(x, CACHED_Q), axis);
    int64_t local = ml_type_size(&x->score, axis);
    if (axis == x->args.seq || axis == x->args.kv_seq || local == size)
        return ml_iota(g, axis, local);
    ml_ref base = shard_base(x->s, &x->need[CACHED_Q], position, local);
    ml_ref index = ml_map2(g, ML_OP_ADD, ml_iota(g, axis, local), base);
    int known = 0;
    while (known < x->index_count && x->index[known] != index) known++;
    if (known == x->index_count) x->index[x->index_count++] = index;
    return parameter(x, 1 + x->count - CACHED_CAPTURED + known, ml_graph_type(g, index));
}

static ml_ref copy_leaf(void *context, ml_ref n) {
    cached *x = context;
    const int64_t *args = ml_graph_args(x->s->from, n);
    if (ml_graph_node(x->s->from, n)->op == ML_OP_IOTA)
        return copy_index(x, (ml_axis)args[0], args[1]);
    if (args[0] == 0) return parameter(x, 0, &x->score);
    ml_type type;
    ml_cached_attention_param_type(x->s->to, x->sources, &x->args,
                                   x->sources[CACHED_CAPTURED + args[0] - 1], &type);
    return parameter(x, args[0], &type);
}

void cached_attention_local(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *need,
                            const ml_placements *out, ml_ref *outputs) {
    cached x = read_node(s, n);
    x.need = need;
    x.sources = sources;
    ml_cached_attention_score_type(s->to, sources, &x.args, &x.score);
    ml_cached_attention_args args = x.args;
    args.score = shard_copy_function(s, x.args.score, copy_leaf, &x);
    ml_ref *all = ML_NEW_ARRAY(s->scratch, ml_ref, x.count + x.index_count);
    for (int i = 0; i < x.count + x.index_count; i++)
        all[i] = i < x.count ? sources[i] : x.index[i - x.count];
    ml_type order = ml_layout_local(s->layout, ml_graph_type(s->from, n), &out[0]);
    outputs[0] =
        ml_permute(s->to, ml_cached_attention(s->to, all, x.count + x.index_count, &args), &order);
}
