/* Trading positions once (optimize.h).
 *
 * Attention over contiguous parts of a sequence trades halves (ops/attention/shard_context.c): each
 * rank keeps the first half of its rows and swaps the second with the rank at the other end, before
 * each attention and behind it. That is a permutation of positions over ranks and its own inverse,
 * and what lies between two attentions takes each position by itself. So all of it is computed in
 * the traded order: the program's inputs are traded instead, a few integers a position. Sums over
 * positions have the same terms, spread over the ranks otherwise.
 *
 * Keys and values are gathered in the traded order, one rank's rows after another's. Attention
 * reads them so, and so are their gradients added up over ranks (ml_attention_args.key_ranks);
 * another op that takes rows in their own order has them put in it on the rank (a GATHER of rows).
 *
 * A node's value is at hand as it was (`plain`), along one of its axes traded or, whole on a rank,
 * in ranks' order (`traded`, `ranked`), or both; an exchange or a GATHER makes one of the other
 * where an op takes positions in another way. */
#include "runtime/graph/collectives.h"
#include "runtime/graph/rewrite.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/optimize/optimize.h"

#include <string.h>

enum { KEYS = 1, VALUES = 2 }; /* which sources of attention they are */

typedef struct {
    int64_t axis, mesh, ranks, size; /* size: of the axis on a rank */
} trade;

typedef struct {
    rewrite *r;
    trade t;
    int64_t run;         /* of keys side by side: halves that attention reads are multiples of it */
    ml_ref *swapped;     /* by node: what it is the trade of */
    bool *inner;         /* by node: only trades read it */
    bool *varies;        /* by node: it may differ among the ranks of a group */
    bool *root;          /* by node */
    bool *keys;          /* by node: keys or values of an attention follow from it */
    ml_ref *plain;       /* by node: in the new graph; 0: not made yet */
    ml_ref *traded;      /* by node, likewise */
    ml_ref *ranked;      /* by node, likewise */
    ml_axis *along;      /* by node: the axis along which `traded` or `ranked` is */
    bool *prefers;       /* by node: users take `traded` */
    ml_axis *keys_along; /* by node: of an attention whose keys are in ranks' order */
    ml_axis rows;        /* of `order` */
    ml_ref order;        /* of rows in ranks' order, and back */
} state;

static const int64_t *args_of(const state *s, ml_ref n) {
    return ml_graph_args(s->r->from, n);
}
static const ml_type *type_of(const state *s, ml_ref n) {
    return ml_graph_type(s->r->from, n);
}
static ml_op op_of(const state *s, ml_ref n) {
    return (ml_op)ml_graph_node(s->r->from, n)->op;
}

/* ---- What is there --------------------------------------------------------------------------- */

/* Whether n is concat(slice(x, 0, h), reverse(slice(x, h, 2 h))); *t is how it is traded. */
static ml_ref trade_of(const ml_graph *g, ml_ref n, trade *t) {
    const ml_node *node = ml_graph_node(g, n);
    if (node->op != ML_OP_CONCAT || node->source_count != 2) return 0;
    ml_ref first = ml_graph_source(g, n, 0), other = ml_graph_source(g, n, 1);
    if (ml_graph_node(g, first)->op != ML_OP_SLICE || ml_graph_node(g, other)->op != ML_OP_REVERSE)
        return 0;
    ml_ref second = ml_graph_source(g, other, 0), x = ml_graph_source(g, first, 0);
    if (ml_graph_node(g, second)->op != ML_OP_SLICE || ml_graph_source(g, second, 0) != x) return 0;
    const int64_t *a = ml_graph_args(g, first), *b = ml_graph_args(g, second);
    *t = (trade){ml_graph_args(g, n)[0], ml_graph_args(g, other)[0], ml_graph_args(g, other)[1],
                 ml_type_size(ml_graph_type(g, n), (ml_axis)a[0])};
    bool halves = a[0] == t->axis && b[0] == t->axis && a[1] == 0 && 2 * a[2] == t->size &&
                  b[1] == a[2] && b[2] == t->size;
    return halves ? x : 0;
}

bool ml_trade_once_applies(const ml_graph *g) {
    trade t;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (trade_of(g, n, &t)) return true;
    return false;
}

/* The trades of the graph's first axis that is traded, and what only they read. */
static void find_trades(state *s) {
    const ml_graph *g = s->r->from;
    bool *elsewhere = ML_NEW_ARRAY(s->r->scratch, bool, s->r->count);
    trade t;
    for (ml_ref n = 1; n < s->r->count; n++) {
        ml_ref x = s->r->users[n] ? trade_of(g, n, &t) : 0;
        if (!x || (s->t.size && memcmp(&t, &s->t, sizeof t) != 0)) continue;
        if (!s->t.size) s->t = t;
        s->swapped[n] = x;
        s->inner[ml_graph_source(g, n, 0)] = s->inner[ml_graph_source(g, n, 1)] = true;
        s->inner[ml_graph_source(g, ml_graph_source(g, n, 1), 0)] = true;
    }
    for (ml_ref n = s->r->count; n-- > 1;) {
        s->inner[n] = s->inner[n] && !elsewhere[n] && !s->root[n];
        if (!s->r->users[n] || s->inner[n] || s->swapped[n]) continue;
        for (int i = 0; i < ml_graph_node(g, n)->source_count; i++)
            elsewhere[ml_graph_source(g, n, i)] = true;
    }
}

static void find_keys(state *s) {
    const ml_graph *g = s->r->from;
    for (ml_ref n = s->r->count; n-- > 1;) {
        const bool attends = ml_op_attends(op_of(s, n));
        if (!s->r->users[n]) continue;
        for (int i = 0; i < ml_graph_node(g, n)->source_count; i++)
            if (attends ? i == KEYS || i == VALUES : s->keys[n])
                s->keys[ml_graph_source(g, n, i)] = true;
    }
}

static bool may_vary(const state *s, ml_ref n) {
    const ml_graph *g = s->r->from;
    const ml_node *node = ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    if (node->op == ML_OP_COORDINATE) return args[0] == s->t.mesh;
    if (node->op == ML_OP_INPUT)
        return ml_type_elements(&ml_graph_input(g, (uint32_t)args[0])->type) !=
               ml_type_elements(type_of(s, n));
    if (node->op == ML_OP_STATE) {
        const ml_state *state = ml_graph_state(g, (uint32_t)args[0]);
        return state->kind == ML_STATE_GRADIENT || /* each rank's own sum */
               ml_type_elements(&state->type) != ml_type_elements(type_of(s, n));
    }
    if (ml_ops[node->op].op_class == ML_CLASS_COLLECTIVE && args[0] == s->t.mesh) {
        if (node->op == ML_OP_ALL_REDUCE || node->op == ML_OP_ALL_GATHER) return false;
        if (node->op == ML_OP_REDUCE_SCATTER || node->op == ML_OP_ALL_TO_ALL) return true;
    }
    for (int i = 0; i < node->source_count; i++)
        if (s->varies[ml_graph_source(g, n, i)]) return true;
    return false;
}

/* ---- Values ---------------------------------------------------------------------------------- */

static ml_ref swap(const state *s, ml_ref n, ml_axis axis) {
    ml_graph *g = s->r->to;
    ml_ref second = ml_slice(g, n, axis, s->t.size / 2, s->t.size);
    second =
        ml_graph_add(g, ML_OP_REVERSE, &second, 1, (int64_t[]){s->t.mesh, s->t.ranks}, 2, NULL);
    return ml_concat(g, (ml_ref[]){ml_slice(g, n, axis, 0, s->t.size / 2), second}, 2, axis);
}

/* The ranks' traded rows one after another in their own order, or back. */
static ml_ref reordered(state *s, ml_ref n, ml_axis axis) {
    ml_graph *g = s->r->to;
    const ml_type type = *ml_graph_type(g, n);
    if (!s->rows) s->rows = ml_axis_fresh(g, "rows");
    if (!s->order)
        s->order = ml_attention_key_order(g, s->rows, s->t.size * s->t.ranks, s->t.ranks);
    n = ml_rename(g, ml_gather(g, n, s->order, axis), s->rows, axis);
    return ml_permute(g, n, &type);
}

static ml_ref plain(state *s, ml_ref n) {
    if (!s->plain[n])
        s->plain[n] = s->ranked[n] ? reordered(s, s->ranked[n], s->along[n])
                                   : swap(s, s->traded[n], s->along[n]);
    return s->plain[n];
}

/* n traded along the axis; 0: it cannot be. */
static ml_ref traded(state *s, ml_ref n, ml_axis axis) {
    bool has = ml_type_find(type_of(s, n), axis) >= 0;
    if (!s->varies[n]) return plain(s, n); /* the same on both ranks that trade */
    if (!has || (s->traded[n] && s->along[n] != axis)) return 0;
    if (ml_type_size(type_of(s, n), axis) != s->t.size) return 0;
    if (!s->traded[n]) s->traded[n] = swap(s, s->plain[n], axis), s->along[n] = axis;
    return s->traded[n];
}

static ml_ref *plain_sources(state *s, ml_ref n) {
    int count = ml_graph_node(s->r->from, n)->source_count;
    ml_ref *list = ML_NEW_ARRAY(s->r->scratch, ml_ref, count + 1);
    for (int i = 0; i < count; i++) list[i] = plain(s, ml_graph_source(s->r->from, n, i));
    return list;
}

/* NULL: not all can be traded along the axis. */
static ml_ref *traded_sources(state *s, ml_ref n, ml_axis axis) {
    int count = ml_graph_node(s->r->from, n)->source_count;
    ml_ref *list = ML_NEW_ARRAY(s->r->scratch, ml_ref, count + 1);
    for (int i = 0; i < count; i++)
        if (!(list[i] = traded(s, ml_graph_source(s->r->from, n, i), axis))) return NULL;
    return list;
}

static void set_plain(state *s, ml_ref n, ml_ref made) {
    s->plain[n] = made;
}
static void set_traded(state *s, ml_ref n, ml_ref made, ml_axis axis) {
    s->traded[n] = made, s->along[n] = axis, s->prefers[n] = true;
}
static void set_ranked(state *s, ml_ref n, ml_ref made, ml_axis axis) {
    s->ranked[n] = made, s->along[n] = axis;
}
static bool is_ranked(const state *s, ml_ref n, ml_axis axis) {
    return s->ranked[n] && s->along[n] == axis;
}

/* ---- Ops ------------------------------------------------------------------------------------- */

static bool names(const state *s, ml_ref n, ml_axis axis) {
    for (int i = 0; i < ml_graph_node(s->r->from, n)->arg_count; i++)
        if (args_of(s, n)[i] == axis) return true;
    return false;
}

/* Whether each position of the result follows from the same position of the sources. */
static bool keeps_positions(const state *s, ml_ref n, ml_axis axis) {
    if (op_of(s, n) == ML_OP_RANDOM) return ml_graph_node(s->r->from, n)->source_count == 2;
    return ml_type_size(type_of(s, n), axis) == s->t.size && rewrite_splits(s->r->from, n, axis);
}

/* Whether the result is a sum (or the largest or smallest) over positions: of a rank's, which
 * whatever follows adds up over the ranks. */
static bool sums_positions(const state *s, ml_ref n, ml_axis axis) {
    ml_op op = op_of(s, n);
    if (op == ML_OP_SUM || op == ML_OP_MAX || op == ML_OP_MIN || op == ML_OP_DOT)
        return names(s, n, axis);
    return op == ML_OP_SCATTER_ADD && args_of(s, n)[0] != axis &&
           ml_type_find(type_of(s, n), axis) < 0;
}

static ml_axis renamed(const state *s, ml_ref n, ml_axis axis) {
    const int64_t *args = args_of(s, n);
    for (int i = 0; i < ml_graph_node(s->r->from, n)->arg_count; i += 2)
        if (args[i] == axis) return (ml_axis)args[i + 1];
    return axis;
}

/* n, of whose sources one is better read traded along the axis. */
static void build_traded(state *s, ml_ref n, ml_axis axis) {
    const ml_node *node = ml_graph_node(s->r->from, n);
    bool between =
        ml_ops[node->op].op_class == ML_CLASS_COLLECTIVE && args_of(s, n)[0] == s->t.mesh;
    bool gathers = between && node->op == ML_OP_ALL_GATHER && type_of(s, n)->axis[0] == axis;
    bool moves = !between && (node->op == ML_OP_RENAME || keeps_positions(s, n, axis));
    bool sums = !between && !moves && sums_positions(s, n, axis);
    ml_ref *sources = gathers || moves || sums ? traded_sources(s, n, axis) : NULL;
    if (!sources) {
        set_plain(s, n, rewrite_copy(s->r, n, plain_sources(s, n)));
        return;
    }
    ml_ref made = rewrite_copy(s->r, n, sources);
    if (gathers)
        set_ranked(s, n, made, axis);
    else if (moves)
        set_traded(s, n, made, node->op == ML_OP_RENAME ? renamed(s, n, axis) : axis);
    else
        set_plain(s, n, made);
}

/* ---- Rows in ranks' order -------------------------------------------------------------------- */

/* Attention takes its keys so: in any order where nothing is said of their places, else as its
 * kernels can. */
static bool takes_ranked(const state *s, ml_ref n, ml_attention_args *args) {
    if (!ml_op_attends(op_of(s, n))) return false;
    ml_attention_read(s->r->from, n, args);
    for (int i = KEYS; i <= VALUES; i++)
        if (!is_ranked(s, ml_graph_source(s->r->from, n, i), args->kv_seq)) return false;
    const bool places = args->causal || args->window || args->score;
    args->key_ranks = places ? s->t.ranks : 0;
    return !places || s->t.size / 2 % s->run == 0;
}

static bool attend_ranked(state *s, ml_ref n) {
    const int count = ml_graph_node(s->r->from, n)->source_count;
    ml_attention_args ranked, args;
    if (!takes_ranked(s, n, &ranked)) return false;
    ml_ref *sources = ML_NEW_ARRAY(s->r->scratch, ml_ref, count);
    for (int i = 0; i < count; i++) {
        ml_ref source = ml_graph_source(s->r->from, n, i);
        sources[i] = i == KEYS || i == VALUES ? s->ranked[source] : plain(s, source);
    }
    ml_ref made = rewrite_copy(s->r, n, sources);
    ml_attention_read(s->r->to, made, &args); /* its functions are of the new graph */
    args.key_ranks = ranked.key_ranks;
    made = op_of(s, n) == ML_OP_ATTENTION ? ml_attention(s->r->to, sources, count, &args)
                                          : ml_attention_grad(s->r->to, sources, count, &args);
    set_plain(s, n, made);
    s->keys_along[n] = args.kv_seq;
    return true;
}

/* And gives the gradients of keys and values so. */
static bool give_ranked(state *s, ml_ref n) {
    ml_ref grad = ml_graph_source(s->r->from, n, 0);
    if (op_of(s, grad) != ML_OP_ATTENTION_GRAD || !s->keys_along[grad]) return false;
    set_ranked(s, n, rewrite_copy(s->r, n, &s->plain[grad]), s->keys_along[grad]);
    return true;
}

/* The axis along which n's sources are in ranks' order, all those that have it; 0: there is none.
 */
static ml_axis ranked_axis(const state *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->r->from, n);
    ml_axis axis = 0;
    for (int i = 0; i < node->source_count && !axis; i++) {
        ml_ref source = ml_graph_source(s->r->from, n, i);
        if (s->ranked[source]) axis = s->along[source];
    }
    for (int i = 0; i < node->source_count && axis; i++) {
        ml_ref source = ml_graph_source(s->r->from, n, i);
        if (ml_type_find(type_of(s, source), axis) >= 0 && !is_ranked(s, source, axis)) axis = 0;
    }
    return axis;
}

/* Ops that take each row by itself leave rows where they are, which is of no use where others than
 * attention read larger ones; sums over rows have the same terms. */
static bool compute_ranked(state *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->r->from, n);
    ml_axis axis = ranked_axis(s, n);
    bool moves = node->op == ML_OP_RENAME || (axis && rewrite_splits(s->r->from, n, axis));
    if (!axis || (!moves && !sums_positions(s, n, axis))) return false;
    ml_ref *sources = ML_NEW_ARRAY(s->r->scratch, ml_ref, node->source_count);
    int64_t bytes = 0;
    for (int i = 0; i < node->source_count; i++) {
        ml_ref source = ml_graph_source(s->r->from, n, i);
        if (is_ranked(s, source, axis)) bytes += ml_type_bytes(type_of(s, source));
    }
    if (moves && !s->keys[n] && ml_type_bytes(type_of(s, n)) > bytes) return false;
    for (int i = 0; i < node->source_count; i++) {
        ml_ref source = ml_graph_source(s->r->from, n, i);
        sources[i] = is_ranked(s, source, axis) ? s->ranked[source] : plain(s, source);
    }
    ml_ref made = rewrite_copy(s->r, n, sources);
    if (moves)
        set_ranked(s, n, made, node->op == ML_OP_RENAME ? renamed(s, n, axis) : axis);
    else
        set_plain(s, n, made);
    return true;
}

static bool build_ranked(state *s, ml_ref n) {
    return op_of(s, n) == ML_OP_OUT ? give_ranked(s, n)
                                    : attend_ranked(s, n) || compute_ranked(s, n);
}

/* n, of whose sources none is better read traded or in ranks' order. */
static void build_plain(state *s, ml_ref n) {
    const ml_type *type = type_of(s, n);
    if (op_of(s, n) == ML_OP_REDUCE_SCATTER && args_of(s, n)[0] == s->t.mesh &&
        type->size[0] == s->t.size) {
        ml_ref source = ml_graph_source(s->r->from, n, 0);
        ml_ref rows = is_ranked(s, source, type->axis[0])
                          ? s->ranked[source]
                          : reordered(s, plain(s, source), type->axis[0]);
        set_traded(s, n, rewrite_copy(s->r, n, &rows), type->axis[0]);
        return;
    }
    set_plain(s, n, rewrite_copy(s->r, n, plain_sources(s, n)));
    /* What others follow from: inputs, and numbers of positions. */
    if (s->varies[n] && ml_type_size(type, (ml_axis)s->t.axis) == s->t.size &&
        (op_of(s, n) == ML_OP_INPUT || type->rank == 1))
        set_traded(s, n, swap(s, s->plain[n], (ml_axis)s->t.axis), (ml_axis)s->t.axis);
}

static void build_swapped(state *s, ml_ref n) {
    ml_ref x = s->swapped[n];
    if (!s->varies[x])
        set_plain(s, n, plain(s, x));
    else if (s->traded[x] && s->along[x] == s->t.axis)
        set_plain(s, n, s->traded[x]);
    else
        set_traded(s, n, plain(s, x), (ml_axis)s->t.axis);
}

static void begin(rewrite *r) {
    state *s = r->context;
    s->r = r;
    s->swapped = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    s->inner = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->varies = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->root = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->keys = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->plain = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    s->traded = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    s->ranked = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    s->along = ML_NEW_ARRAY(r->scratch, ml_axis, r->count);
    s->prefers = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->keys_along = ML_NEW_ARRAY(r->scratch, ml_axis, r->count);
    for (int i = 0; i < r->roots->output_count; i++) s->root[r->roots->outputs[i]] = true;
    for (int i = 0; i < r->roots->update_count; i++) s->root[r->roots->updates[i].value] = true;
    find_trades(s);
    find_keys(s);
    for (ml_ref n = 1; n < r->count; n++) s->varies[n] = may_vary(s, n);
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    state *s = r->context;
    const ml_node *node = ml_graph_node(r->from, n);
    ml_axis axis = 0;
    if (!s->t.size || s->inner[n]) return rewrite_copy(r, n, sources); /* inner ones are dead */
    for (int i = 0; i < node->source_count && !axis; i++) {
        ml_ref source = ml_graph_source(r->from, n, i);
        if (s->prefers[source]) axis = s->along[source];
    }
    if (s->swapped[n])
        build_swapped(s, n);
    else if (axis && ml_ops[node->op].outputs == 1)
        build_traded(s, n, axis);
    else if (!build_ranked(s, n))
        build_plain(s, n);
    if (s->ranked[n] && !s->root[n]) return s->ranked[n];
    return s->prefers[n] && !s->root[n] ? s->traded[n] : plain(s, n);
}

ml_graph *ml_trade_once(const ml_graph *from, ml_roots *roots, int64_t run) {
    state s = {.run = run};
    return rewrite_run(from, roots, begin, rule, &s);
}

double ml_traded_bytes(const ml_graph *g, const uint32_t *times) {
    enum { LEAST = 4 << 20 };
    double sum = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->op == ML_OP_REVERSE)
            sum += (LEAST + (double)ml_type_bytes(ml_graph_type(g, n))) *
                   (double)(times ? times[n] : 1);
    return sum;
}
