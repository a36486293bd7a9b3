/* Context parallelism: attention whose queries are cut.
 *
 * Keys are whole (gathered), or cut alike (a ring): then a rank's block of keys moves on to the
 * next rank, round by round, and what the rounds give is merged by their logsumexps. The next block
 * is on its way while the present one is attended to.
 *
 * Causal attention over contiguous parts would give the first rank almost no work and the last one
 * twice the average. So ranks trade halves: with 2 n blocks over n ranks, rank r has blocks 2 r and
 * 2 r + 1 by the rule, keeps the first and swaps the second with rank n - 1 - r (REVERSE), whose
 * second one is 2 n - 1 - 2 r. Every rank then has blocks low and 2 n - 1 - low: equal work for
 * all. Results are swapped back. Everything outside of attention keeps the rule's contiguous parts,
 * so that no other op has to know; the price is half of q and o on the network forward (in a ring
 * of k and v too), and half of do and dq backward (in a ring o, dk and dv). With gathered keys
 * optimize/trade_once.c removes it afterwards where what is between attentions takes each position
 * by itself.
 *
 * With gathered keys that is one call forward and one backward, on queries that are two pieces with
 * a place each (ml_attention_args).
 *
 * In the rounds of a ring after the first, what the mask hides is known without looking at
 * positions: a rank's high queries see the low keys of every other rank; besides, its low queries
 * see the low keys of ranks whose low block is before its own, and its high queries the high keys
 * of the others. That makes two attentions of a quarter each with no causal mask, on every rank in
 * every round: nothing hidden is computed, and cuDNN serves them. */
#include <math.h>

#include "runtime/graph/infer.h"
#include "runtime/ops/attention/shard_attention.h"

enum { Q = ATTENTION_Q, K = ATTENTION_K, V = ATTENTION_V, LOW = 0, HIGH = 1 };

static ml_ref add2(shard_attention *x, ml_op op, ml_ref a, ml_ref b) {
    return ml_map2(x->g, op, a, b);
}
static ml_ref integer(shard_attention *x, int64_t value) {
    return ml_const_int(x->g, ML_I32, value);
}
static ml_ref times(shard_attention *x, ml_ref block, int64_t size) {
    return add2(x, ML_OP_MUL, block, integer(x, size));
}
static ml_ref number(shard_attention *x, ml_ref like, double value) {
    return ml_const(x->g, ml_graph_type(x->g, like)->dtype, value);
}

static int64_t size_along(const shard_attention *x, ml_ref n, ml_axis axis) {
    return ml_type_size(ml_graph_type(x->g, n), axis);
}

static ml_ref *by_source(const shard_attention *x) {
    return ML_NEW_ARRAY(x->s->scratch, ml_ref, x->count);
}

static ml_ref between_ranks(shard_attention *x, ml_op op, int mesh, ml_ref n) {
    return ml_graph_add(x->g, op, &n, 1, (int64_t[]){mesh, x->s->layout->axis[mesh].size}, 2, NULL);
}

static ml_ref coordinate(shard_attention *x, int mesh) {
    int64_t args[] = {mesh, x->s->layout->axis[mesh].size};
    return ml_graph_add(x->g, ML_OP_COORDINATE, NULL, 0, args, 2, NULL);
}

/* The backward pass makes what only moves the forward pass's tensors again: to keep it would be to
 * have all keys at once. */
static void again(shard_attention *x, bool on) {
    ml_graph_set_flags(x->g, x->s->flags | (x->grad && on ? ML_NODE_COPY : 0));
}

static ml_ref pass_on(shard_attention *x, ml_ref n) {
    again(x, true);
    n = between_ranks(x, ML_OP_SHIFT, x->ring, n);
    again(x, false);
    return n;
}

/* The rank whose keys are here in this round. */
static ml_ref origin_of_keys(shard_attention *x, int64_t round) {
    int64_t ranks = x->s->layout->axis[x->ring].size;
    ml_ref rank = add2(x, ML_OP_ADD, coordinate(x, x->ring), integer(x, ranks - round));
    return add2(x, ML_OP_MOD, rank, integer(x, ranks));
}

/* ---- Sums ------------------------------------------------------------------------------------ */

/* (o, lse) of the same queries over some keys and over others: lse = log(exp a + exp b). */
static void merge(shard_attention *x, ml_ref o[2], ml_ref lse[2]) {
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

/* *o, *lse and those over other keys, which count where `test` is 0 or true. */
static void add_keys(shard_attention *x, ml_ref *o, ml_ref *lse, ml_ref test, const ml_ref *made) {
    ml_ref os[] = {*o, made[0]}, lses[] = {*lse, made[1]};
    if (test) lses[1] = ml_where(x->g, test, lses[1], number(x, lses[1], -INFINITY));
    if (*o)
        merge(x, os, lses);
    else
        os[0] = os[1], lses[0] = lses[1];
    *o = os[0], *lse = lses[0];
}

/* *sum += term where `test` is 0 or true, in the dtype of the scores. */
static void add_term(shard_attention *x, ml_ref *sum, ml_ref test, ml_ref term) {
    term = ml_cast(x->g, term, attention_dtype((ml_dtype)ml_graph_type(x->g, term)->dtype));
    if (test) term = ml_where(x->g, test, term, number(x, term, 0));
    *sum = *sum ? add2(x, ML_OP_ADD, *sum, term) : term;
}

static ml_ref as_source(shard_attention *x, ml_ref n) {
    return ml_cast(x->g, n, (ml_dtype)ml_graph_type(x->g, x->sources[Q])->dtype);
}

/* Sums over rounds are added up after every few of them: what the rounds computed is freed by then,
 * and is not read and written more often than that. */
static void add_up_rounds(shard_attention *x, int64_t round, const ml_ref *sums, int count) {
    enum { TOGETHER = 4 };
    for (int i = 0; i < count && round % TOGETHER == TOGETHER - 1; i++)
        if (sums[i]) ml_graph_mark(x->g, sums[i], ML_NODE_PROMPT);
}

/* ---- Contiguous parts ------------------------------------------------------------------------ */

static shard_rows own_queries(shard_attention *x) {
    const ml_type *q = ml_graph_type(x->s->from, ml_graph_source(x->s->from, x->n, Q));
    int64_t size = size_along(x, x->sources[Q], x->args.seq);
    ml_ref start = shard_base(x->s, &x->need[Q], ml_type_find(q, x->args.seq), size);
    return (shard_rows){.start = start, .size = size};
}

static shard_rows whole_keys(const shard_attention *x) {
    return (shard_rows){.size = size_along(x, x->sources[K], x->args.kv_seq)};
}

/* Rounds after which no query sees a key of what is to come: a causal window may be short. */
static int64_t rounds_needed(const shard_attention *x, int64_t size) {
    int64_t ranks = x->s->layout->axis[x->ring].size;
    int64_t queries = x->score.size[x->score.rank - 2], keys = x->score.size[x->score.rank - 1];
    if (!x->args.causal || !x->args.window || queries != keys) return ranks;
    int64_t blocks = (x->args.window - 1) / size + ((x->args.window - 1) % size > 0);
    return blocks < ranks ? 1 + blocks : ranks;
}

/* After `rounds` rounds a sum that travels with its keys is rounds - 1 ranks away from home. */
static ml_ref send_home(shard_attention *x, ml_ref sum, int64_t rounds) {
    int64_t ranks = x->s->layout->axis[x->ring].size, left = ranks - (rounds - 1);
    bool back = rounds + 1 < left; /* between reversals a shift is one in the other direction */
    if (left == ranks) return sum;
    if (back) sum = between_ranks(x, ML_OP_REVERSE, x->ring, sum);
    for (int64_t i = back ? rounds - 1 : left; i > 0; i--)
        sum = between_ranks(x, ML_OP_SHIFT, x->ring, sum);
    return back ? between_ranks(x, ML_OP_REVERSE, x->ring, sum) : sum;
}

/* In round r rank c has the keys of rank c - r. Gradients of keys travel with them. */
static void contiguous_ring(shard_attention *x, ml_ref *outputs) {
    shard_rows q = own_queries(x), k = whole_keys(x);
    int64_t rounds = rounds_needed(x, k.size);
    ml_ref sums[3] = {0}, o = 0, lse = 0, made[ML_MAX_OUTPUTS], next[3] = {0};
    k.of = by_source(x);
    for (int i = K; i <= V; i++) k.of[i] = x->sources[i];
    for (int64_t round = 0; round < rounds; round++) {
        k.block = origin_of_keys(x, round);
        k.start = times(x, k.block, k.size);
        for (int i = K; i <= V && round + 1 < rounds; i++) next[i] = pass_on(x, k.of[i]);
        for (int i = K; i <= V && sums[i]; i++)
            sums[i] = between_ranks(x, ML_OP_SHIFT, x->ring, sums[i]);
        shard_attention_call(x, &q, &k, x->args.causal, false, made);
        if (x->grad)
            for (int i = Q; i <= V; i++) add_term(x, &sums[i], 0, made[i]);
        else
            add_keys(x, &o, &lse, 0, made);
        add_up_rounds(x, round, (ml_ref[]){o, lse, sums[Q]}, 3);
        for (int i = K; i <= V; i++) k.of[i] = next[i];
    }
    outputs[0] = as_source(x, x->grad ? sums[Q] : o);
    if (!x->grad) outputs[1] = lse;
    for (int i = K; i <= V && x->grad; i++)
        outputs[i] = as_source(x, send_home(x, sums[i], rounds));
}

/* ---- Traded halves --------------------------------------------------------------------------- */

/* This rank's two blocks, low and high. */
typedef struct {
    shard_attention *x;
    int mesh;
    int64_t ranks, size;   /* rows of a block */
    ml_ref keeps_low, low; /* whether the block that it keeps is the low one; which that is */
    shard_rows q[2], k[2];
    ml_ref o[2], lse[2]; /* forward, so far */
    ml_ref sum[3][2];    /* backward: dq, dk, dv so far */
} halves;

/* Which block is the low one of `rank`. */
static ml_ref low_block(halves *h, ml_ref rank) {
    ml_ref kept = times(h->x, rank, 2);
    ml_ref other = add2(h->x, ML_OP_SUB, integer(h->x, 2 * h->ranks - 1), kept);
    return add2(h->x, ML_OP_MINIMUM, kept, other);
}
static ml_ref high_block(halves *h, ml_ref low) {
    return add2(h->x, ML_OP_SUB, integer(h->x, 2 * h->ranks - 1), low);
}

static ml_ref half(halves *h, ml_ref n, ml_axis axis, int which) {
    return ml_slice(h->x->g, n, axis, which * h->size, (which + 1) * h->size);
}
static ml_ref joined(halves *h, const ml_ref part[2], ml_axis axis) {
    again(h->x, true); /* what is kept are the halves */
    ml_ref both = ml_concat(h->x->g, part, 2, axis);
    again(h->x, false);
    return both;
}

/* q, k and v are traded once, in the forward pass: the halves are kept for the backward pass in
 * place of them. */
static void trade(halves *h, ml_ref n, ml_axis axis, ml_ref part[2]) {
    bool once = n == h->x->sources[Q] || n == h->x->sources[K] || n == h->x->sources[V];
    again(h->x, !once);
    ml_ref kept = half(h, n, axis, 0);
    ml_ref other = between_ranks(h->x, ML_OP_REVERSE, h->mesh, half(h, n, axis, 1));
    again(h->x, false);
    part[LOW] = ml_where(h->x->g, h->keeps_low, kept, other);
    part[HIGH] = ml_where(h->x->g, h->keeps_low, other, kept);
}
static ml_ref trade_back(halves *h, const ml_ref part[2], ml_axis axis) {
    ml_ref kept = ml_where(h->x->g, h->keeps_low, part[LOW], part[HIGH]);
    ml_ref other = ml_where(h->x->g, h->keeps_low, part[HIGH], part[LOW]);
    ml_ref both[] = {kept, between_ranks(h->x, ML_OP_REVERSE, h->mesh, other)};
    return joined(h, both, axis);
}

static void set_block(halves *h, shard_rows *rows, ml_ref block) {
    rows->block = block;
    rows->start = times(h->x, block, h->size);
    rows->size = h->size;
}

/* The forward attention, where its gradient may read output `which` of it, its source k, as the
 * attention made it; NULL where that is in another program or its parts lay elsewhere. */
static const shard_value *made_by(const shard_attention *x, int k, int which) {
    const ml_graph *from = x->s->from;
    ml_ref n = ml_graph_source(from, x->n, k);
    if (!x->grad) return NULL;
    if (ml_graph_node(from, n)->op == ML_OP_OUT) {
        if (ml_graph_args(from, n)[0] != which) return NULL;
        n = ml_graph_source(from, n, 0);
    } else if (which != 0) {
        return NULL;
    }
    const shard_value *made = &x->s->values[n];
    if (ml_graph_node(from, n)->op != ML_OP_ATTENTION || made->output_places == NULL) return NULL;
    for (int i = 0; i < x->s->layout->count; i++)
        if (!shard_same(made->output_places[which].over[i], x->need[k].over[i])) return NULL;
    return made;
}

/* The forward pass's statistics are kept as it made them, of low and high rows, or all. */
static bool kept_lse(const shard_attention *x, int k, ml_ref part[2]) {
    const shard_value *made = k == ATTENTION_LSE ? made_by(x, k, 1) : NULL;
    if (made == NULL || !made->kept[0]) return false;
    part[0] = made->kept[0], part[1] = made->kept[1];
    return true;
}

/* Its result is, in two pieces: what is outside of attention can be swapped again from it. */
static ml_ref kept_pieces(const shard_attention *x, int k) {
    const shard_value *made = k == ATTENTION_O ? made_by(x, k, 0) : NULL;
    return made ? made->kept[2] : 0;
}

static halves trade_queries(shard_attention *x) {
    ml_axis axis = x->args.seq;
    halves h = {.x = x, .mesh = x->queries, .ranks = x->s->layout->axis[x->queries].size};
    h.size = size_along(x, x->sources[Q], axis) / 2;
    ml_ref rank = coordinate(x, h.mesh), part[2];
    h.keeps_low = add2(x, ML_OP_LT, times(x, rank, 2), integer(x, h.ranks));
    h.low = low_block(&h, rank);
    for (int i = 0; i < 2; i++) {
        h.q[i].of = by_source(x);
        set_block(&h, &h.q[i], i ? high_block(&h, h.low) : h.low);
    }
    for (int k = 0; k < x->count; k++) {
        if (k == K || k == V || !shard_attention_along(x, k, axis)) continue;
        if (!kept_lse(x, k, part) || !part[HIGH]) trade(&h, x->sources[k], axis, part);
        h.q[LOW].of[k] = part[LOW], h.q[HIGH].of[k] = part[HIGH];
    }
    return h;
}

/* What a call between these halves of queries and keys made counts where `test` is 0 or true. */
static void contribute(halves *h, int q, int k, ml_ref test, const ml_ref *made) {
    if (!h->x->grad) {
        add_keys(h->x, &h->o[q], &h->lse[q], test, made);
        return;
    }
    add_term(h->x, &h->sum[Q][q], test, made[Q]);
    for (int i = K; i <= V; i++) add_term(h->x, &h->sum[i][k], test, made[i]);
}

static void finish_queries(halves *h, ml_ref *outputs) {
    shard_attention *x = h->x;
    ml_ref *part = x->grad ? h->sum[Q] : h->o;
    for (int i = 0; i < 2; i++) part[i] = as_source(x, part[i]);
    outputs[0] = trade_back(h, part, x->args.seq);
    if (x->grad) return;
    shard_value *value = &x->s->values[x->n];
    for (int i = 0; i < 2; i++) value->kept[i] = h->lse[i];
    outputs[1] = trade_back(h, h->lse, x->args.seq);
}

static void call_halves(halves *h, int q, int k, bool causal) {
    ml_ref made[ML_MAX_OUTPUTS];
    shard_attention_call(h->x, &h->q[q], &h->k[k], causal, false, made);
    contribute(h, q, k, 0, made);
}

/* ---- The ring of traded halves --------------------------------------------------------------- */

/* Low and high rows one after another are causal among themselves as they are in the whole. */
static void own_keys_at_once(halves *h, const ml_ref *keys) {
    shard_attention *x = h->x;
    shard_rows q = {.of = by_source(x), .size = 2 * h->size}, k = {.of = by_source(x)};
    ml_axis axes[] = {x->args.seq, x->args.kv_seq, x->args.kv_seq};
    ml_ref made[ML_MAX_OUTPUTS], part[ML_MAX_OUTPUTS];
    for (int i = K; i <= V; i++) k.of[i] = keys[i];
    for (int i = 0; i < x->count; i++) {
        ml_ref both[] = {h->q[LOW].of[i], h->q[HIGH].of[i]};
        if (both[LOW]) q.of[i] = joined(h, both, x->args.seq);
    }
    shard_attention_call(x, &q, &k, true, true, made);
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < ml_op_outputs(x->g, made[0]); j++)
            part[j] = half(h, made[j], x->grad ? axes[j] : x->args.seq, i);
        contribute(h, i, i, 0, part);
    }
}

static void own_keys(halves *h, const ml_ref *keys) {
    shard_attention *x = h->x;
    bool captured = false;
    for (int i = x->captured; i < x->count; i++)
        captured = captured || shard_attention_along(x, i, x->args.kv_seq);
    if (!captured && !x->indexed && !x->args.window) {
        own_keys_at_once(h, keys);
        return;
    }
    call_halves(h, LOW, LOW, true);
    call_halves(h, HIGH, HIGH, true);
    call_halves(h, HIGH, LOW, false);
}

static void select_rows(halves *h, ml_ref test, const shard_rows *a, const shard_rows *b,
                        shard_rows *out) {
    *out = (shard_rows){.of = by_source(h->x)};
    for (int i = 0; i < h->x->count; i++)
        if (a->of[i]) {
            out->of[i] = ml_where(h->x->g, test, a->of[i], b->of[i]);
            ml_graph_mark(h->x->g, out->of[i], ML_NODE_PROMPT);
        }
    set_block(h, out, ml_where(h->x->g, test, a->block, b->block));
}

static void others_keys(halves *h) {
    shard_attention *x = h->x;
    ml_ref made[ML_MAX_OUTPUTS];
    shard_rows q, k;
    call_halves(h, HIGH, LOW, false);
    ml_ref lower = add2(x, ML_OP_LT, h->k[LOW].block, h->low);
    again(x, true);
    select_rows(h, lower, &h->q[LOW], &h->q[HIGH], &q);
    select_rows(h, lower, &h->k[LOW], &h->k[HIGH], &k);
    again(x, false);
    shard_attention_call(x, &q, &k, false, false, made);
    contribute(h, LOW, LOW, lower, made);
    contribute(h, HIGH, HIGH, ml_map1(x->g, ML_OP_NOT, lower), made);
}

/* The sums of this round's keys come from the rank before. */
static void receive_sums(halves *h) {
    shard_attention *x = h->x;
    ml_axis axis = x->args.kv_seq;
    for (int i = K; i <= V && h->sum[i][LOW]; i++) {
        ml_ref sum = between_ranks(x, ML_OP_SHIFT, x->ring, joined(h, h->sum[i], axis));
        for (int j = 0; j < 2; j++) h->sum[i][j] = half(h, sum, axis, j);
    }
}

static void place_keys(halves *h, const ml_ref *keys, ml_ref low) {
    shard_attention *x = h->x;
    again(x, true);
    for (int j = 0; j < 2; j++) {
        h->k[j].of = by_source(x);
        set_block(h, &h->k[j], j ? high_block(h, low) : low);
        for (int i = K; i <= V; i++) h->k[j].of[i] = half(h, keys[i], x->args.kv_seq, j);
    }
    again(x, false);
}

static void balanced_ring(shard_attention *x, ml_ref *outputs) {
    halves h = trade_queries(x);
    ml_axis axis = x->args.kv_seq;
    ml_ref part[2], keys[3] = {0}, next[3] = {0};
    for (int i = K; i <= V; i++) {
        trade(&h, x->sources[i], axis, part);
        keys[i] = joined(&h, part, axis);
    }
    for (int64_t round = 0; round < h.ranks; round++) {
        for (int i = K; i <= V && round + 1 < h.ranks; i++) next[i] = pass_on(x, keys[i]);
        if (x->grad) receive_sums(&h);
        place_keys(&h, keys, low_block(&h, origin_of_keys(x, round)));
        if (round == 0)
            own_keys(&h, keys);
        else
            others_keys(&h);
        ml_ref sums[] = {h.o[0], h.o[1], h.lse[0], h.lse[1], h.sum[Q][0], h.sum[Q][1]};
        add_up_rounds(x, round, sums, 6);
        for (int i = K; i <= V; i++) keys[i] = next[i];
    }
    finish_queries(&h, outputs);
    if (!x->grad) return;
    receive_sums(&h); /* home */
    for (int i = K; i <= V; i++) {
        for (int j = 0; j < 2; j++) part[j] = as_source(x, h.sum[i][j]);
        outputs[i] = trade_back(&h, part, axis);
    }
}

/* ---- Gathered keys, queries in two pieces ---------------------------------------------------- */

/* The first half of the rows, and the second one that the rank at the other end has there. */
static ml_ref swap_second_half(shard_attention *x, ml_ref n, ml_axis axis) {
    int64_t size = size_along(x, n, axis) / 2;
    ml_ref second = ml_slice(x->g, n, axis, size, 2 * size);
    ml_ref both[] = {ml_slice(x->g, n, axis, 0, size),
                     between_ranks(x, ML_OP_REVERSE, x->queries, second)};
    return ml_concat(x->g, both, 2, axis);
}

/* q is swapped once, in the forward pass, and with it what attention makes of it is kept so for the
 * backward pass. */
static shard_rows queries_in_pieces(shard_attention *x) {
    ml_axis axis = x->args.seq;
    int64_t size = size_along(x, x->sources[Q], axis), ranks = x->s->layout->axis[x->queries].size;
    ml_ref rank = coordinate(x, x->queries), lse[2];
    ml_ref opposite = add2(x, ML_OP_SUB, integer(x, ranks - 1), rank);
    shard_rows q = {.of = by_source(x), .start = times(x, rank, size), .size = size};
    q.second = add2(x, ML_OP_ADD, times(x, opposite, size), integer(x, size / 2));
    for (int k = 0; k < x->count; k++) {
        if (k == K || k == V || !shard_attention_along(x, k, axis)) continue;
        if (kept_lse(x, k, lse) && !lse[1]) {
            q.of[k] = lse[0];
            continue;
        }
        q.of[k] = kept_pieces(x, k);
        if (!q.of[k]) q.of[k] = swap_second_half(x, x->sources[k], axis);
    }
    return q;
}

static void balanced_gathered(shard_attention *x, ml_ref *outputs) {
    shard_rows q = queries_in_pieces(x), k = whole_keys(x);
    shard_attention_call(x, &q, &k, true, false, outputs);
    shard_value *value = &x->s->values[x->n];
    if (!x->grad) value->kept[0] = outputs[1], value->kept[2] = outputs[0];
    for (int i = 0; i < (x->grad ? 1 : 2); i++)
        outputs[i] = swap_second_half(x, outputs[i], x->args.seq);
}

/* ---- Which of them --------------------------------------------------------------------------- */

/* With a window of up to half of the keys, all but the first queries have the same work: trading
 * would gain nothing. */
static bool worth_trading(const shard_attention *x) {
    int64_t queries = x->score.size[x->score.rank - 2], keys = x->score.size[x->score.rank - 1];
    bool narrow = x->args.window && x->args.window <= keys / 2;
    return x->args.causal && !narrow && queries == keys && x->queries >= 0 &&
           size_along(x, x->sources[Q], x->args.seq) % 2 == 0;
}

void shard_attention_rows(shard_attention *x, ml_ref *outputs) {
    shard_rows q = {0}, k = whole_keys(x);
    bool trading = worth_trading(x);
    if (x->ring >= 0) {
        (trading ? balanced_ring : contiguous_ring)(x, outputs);
        return;
    }
    if (trading) {
        balanced_gathered(x, outputs);
        return;
    }
    if (x->seq_cut) q = own_queries(x);
    shard_attention_call(x, &q, &k, x->args.causal, false, outputs);
}
