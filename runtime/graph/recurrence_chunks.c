/* Recurrences of sums of outer products that decay by numbers (linear attention, RetNet, GLA,
 * Mamba-2, the memory and the normaliser of mLSTM), by products over chunks of positions.
 *
 * With S' = a S + k v, where a has no axis of v's own, and reads of S or S' by a product with q
 * over k's axes, the results within a chunk are (q k^T * D) v, where D(p, j) is the product of the
 * decays after position j up to p; what chunks before leave is q S D(p). Where each channel of keys
 * has a decay, D is a factor of the keys: q (k D)^T. The states from chunk to chunk are a
 * recurrence by elements. D is one too, over the positions of a chunk: no logarithms, so that
 * decays of any sign, and of 0 (resets), are exact. What a state is, is found from its next value
 * as algebra: any spelling of an affine function serves. */
#include <string.h>

#include "runtime/graph/recurrence_internal.h"

enum { MOST_STATES = 8, MOST_READS = 16, MOST_FACTORS = 16, LEAST_LENGTH = 32 };

/* A product with a state: read = sum over axes of (S or S') q. */
typedef struct {
    ml_ref node, q, full; /* full: the results at all positions */
    int state;
    bool after; /* S' */
} state_read;

typedef struct {
    ml_ref decay, rest; /* S' = decay S + rest; rest 0: none */
    ml_ref key, value;  /* rest = key value; value 0: 1 */
    ml_type keys;       /* the axes that reads contract; rank 0 before the first read */
    bool per_key;       /* the decay has axes of keys: a number for each channel */
    ml_ref final;
} state_form;

typedef struct {
    ml_graph *g;
    const ml_recurrence_step *s;
    recurrence_body b;
    state_form states[MOST_STATES];
    state_read reads[MOST_READS];
    int read_count;
    int64_t chunk, chunks;
    ml_axis chunk_axis, p, j; /* chunks; positions of one; the same of keys */
} form;

static const ml_type *type_of(const form *f, ml_ref n) {
    return ml_graph_type(f->g, n);
}

/* ---- Algebra ---- */

static uint32_t states_of(const form *f, ml_ref n) {
    uint32_t at = recurrence_place(&f->b, n);
    return at == ML_INDEX_NONE ? 0 : f->b.states[at];
}

static ml_ref strip(const form *f, ml_ref n) {
    while (ml_graph_node(f->g, n)->op == ML_OP_BROADCAST ||
           ml_graph_node(f->g, n)->op == ML_OP_PERMUTE)
        n = ml_graph_source(f->g, n, 0);
    return n;
}

/* Past casts of floats, too: to wider ones only, or to any. */
static ml_ref uncast(const form *f, ml_ref n, bool any) {
    for (;;) {
        n = strip(f, n);
        if (ml_graph_node(f->g, n)->op != ML_OP_CAST) return n;
        ml_ref from = ml_graph_source(f->g, n, 0);
        ml_dtype narrow = (ml_dtype)type_of(f, from)->dtype, to = (ml_dtype)type_of(f, n)->dtype;
        if (!ml_is_float(narrow) || !ml_is_float(to) || !(any || ml_dtype_holds(to, narrow)))
            return n;
        n = from;
    }
}

/* a op b, where neither may have all axes; in the order of the union. */
static ml_ref join(form *f, ml_op op, ml_ref a, ml_ref b) {
    ml_type all = *type_of(f, a);
    const ml_type *t = type_of(f, b);
    for (int i = 0; i < t->rank; i++)
        if (ml_type_find(&all, t->axis[i]) < 0 && all.rank < ML_MAX_AXES) {
            all.axis[all.rank] = t->axis[i];
            all.size[all.rank++] = t->size[i];
        }
    if (all.rank > type_of(f, a)->rank) a = ml_broadcast(f->g, a, &all);
    return ml_map2(f->g, op, a, b);
}

static ml_ref number(form *f, const ml_type *like, double value) {
    return ml_const(f->g, (ml_dtype)like->dtype, value);
}

static bool is_zero(const form *f, ml_ref n) {
    double value;
    return ml_graph_constant(f->g, n, &value) && value == 0;
}

/* n = decay S + rest; 0 for what is 0. false where it is not so. */
static bool affine(form *f, ml_ref n, ml_ref state, ml_ref *decay, ml_ref *rest) {
    ml_graph *g = f->g;
    ml_type type = *ml_graph_type(g, n);
    ml_ref a, b, da = 0, db = 0, ra = 0, rb = 0;
    *decay = *rest = 0;
    if (n == state) {
        *decay = number(f, &type, 1);
        return true;
    }
    if (!states_of(f, n)) {
        *rest = is_zero(f, n) ? 0 : n;
        return true;
    }
    ml_op op = (ml_op)ml_graph_node(g, n)->op;
    a = ml_graph_source(g, n, 0);
    b = ml_graph_node(g, n)->source_count > 1 ? ml_graph_source(g, n, 1) : 0;
    if (op == ML_OP_PERMUTE) return affine(f, a, state, decay, rest);
    if (op == ML_OP_CAST && uncast(f, n, false) != n) return affine(f, a, state, decay, rest);
    if (op == ML_OP_NEG) {
        if (!affine(f, a, state, &da, &ra)) return false;
        *decay = da ? ml_map1(g, ML_OP_NEG, da) : 0, *rest = ra ? ml_map1(g, ML_OP_NEG, ra) : 0;
        return true;
    }
    if (op == ML_OP_ADD || op == ML_OP_SUB) {
        if (!affine(f, a, state, &da, &ra) || !affine(f, b, state, &db, &rb)) return false;
        ml_ref zero = number(f, &type, 0);
        *decay = db ? join(f, op, da ? da : zero, db) : da;
        *rest = !rb ? ra : ra || op == ML_OP_SUB ? join(f, op, ra ? ra : zero, rb) : rb;
        return true;
    }
    if (op == ML_OP_MUL || (op == ML_OP_DIV && !states_of(f, b))) {
        ml_ref by = states_of(f, b) ? a : b, other = by == a ? b : a;
        if (states_of(f, by) || !affine(f, other, state, &da, &ra)) return false;
        by = strip(f, by);
        *decay = da ? join(f, op, da, by) : 0, *rest = ra ? join(f, op, ra, by) : 0;
        return true;
    }
    if (op == ML_OP_WHERE && !states_of(f, a)) {
        ml_ref zero = number(f, &type, 0), test = strip(f, a);
        if (!affine(f, b, state, &da, &ra)) return false;
        if (!affine(f, ml_graph_source(g, n, 2), state, &db, &rb)) return false;
        if (ra || rb) return false; /* begins anew with other values than 0 */
        da = da ? ml_cast(g, strip(f, da), (ml_dtype)type.dtype) : zero;
        db = db ? ml_cast(g, strip(f, db), (ml_dtype)type.dtype) : zero;
        *decay = ml_where(g, test, da, db);
        return true;
    }
    return false;
}

static bool has_any(const ml_type *t, const ml_type *axes) {
    for (int i = 0; i < axes->rank; i++)
        if (ml_type_find(t, axes->axis[i]) >= 0) return true;
    return false;
}

/* Products flattened into their factors, without what repeats them. */
static bool factors(const form *f, ml_ref n, ml_ref *list, int *count) {
    n = uncast(f, n, false);
    const ml_node *node = ml_graph_node(f->g, n);
    bool outer = node->op == ML_OP_DOT && node->arg_count == 0;
    if (node->op == ML_OP_MUL || outer)
        return factors(f, ml_graph_source(f->g, n, 0), list, count) &&
               factors(f, ml_graph_source(f->g, n, 1), list, count);
    if (*count == MOST_FACTORS) return false;
    list[(*count)++] = n;
    return true;
}

static bool within(const ml_type *t, const ml_type *all) {
    for (int i = 0; i < t->rank; i++)
        if (ml_type_find(all, t->axis[i]) < 0) return false;
    return true;
}

/* Whether the values have an axis of their own, which neither keys nor decays have. */
static bool has_own(const form *f, const state_form *state) {
    const ml_type *value = type_of(f, state->value);
    for (int i = 0; i < value->rank; i++)
        if (ml_type_find(type_of(f, state->key), value->axis[i]) < 0 &&
            ml_type_find(type_of(f, state->decay), value->axis[i]) < 0)
            return true;
    return false;
}

/* rest = key value: key without the values' own axes, value without the keys'. */
static bool split_rest(form *f, int i) {
    state_form *state = &f->states[i];
    ml_ref list[MOST_FACTORS];
    int count = 0;
    if (!state->rest || !factors(f, state->rest, list, &count)) return false;
    for (int k = 0; k < count; k++) {
        const ml_type *t = type_of(f, list[k]);
        bool of_key = has_any(t, &state->keys);
        ml_ref *side = of_key || t->rank == 0 ? &state->key : &state->value;
        *side = *side ? join(f, ML_OP_MUL, *side, list[k]) : list[k];
    }
    if (!state->key || !within(&state->keys, type_of(f, state->key))) return false;
    state->per_key = has_any(type_of(f, state->decay), &state->keys);
    for (int k = 0; k < f->read_count && !state->value; k++) /* else whole matrices */
        if (f->reads[k].state == i && !within(type_of(f, state->key), type_of(f, f->reads[k].q)))
            return false;
    return !state->value || has_own(f, state);
}

/* ---- The step ---- */

static bool same_keys(ml_type *keys, const form *f, ml_ref dot) {
    const ml_type *t = type_of(f, ml_graph_source(f->g, dot, 0));
    int count = ml_graph_node(f->g, dot)->arg_count;
    if (count == 0 || (keys->rank && keys->rank != count)) return false;
    for (int i = 0; i < count; i++) {
        ml_axis axis = (ml_axis)ml_graph_args(f->g, dot)[i];
        if (keys->rank == count && ml_type_find(keys, axis) < 0) return false;
    }
    if (keys->rank) return true;
    for (int i = 0; i < count; i++) {
        keys->axis[i] = (ml_axis)ml_graph_args(f->g, dot)[i];
        keys->size[i] = t->size[ml_type_find(t, keys->axis[i])];
    }
    keys->rank = (uint8_t)count;
    return true;
}

static bool is_one(const form *f, ml_ref n) {
    double value;
    return ml_graph_constant(f->g, n, &value) && value == 1;
}

static bool find_read(form *f, ml_ref n) {
    for (int o = 0; o < 2; o++) {
        ml_ref x = uncast(f, ml_graph_source(f->g, n, o), true),
               q = ml_graph_source(f->g, n, 1 - o);
        for (int i = 0; i < f->s->state_count && !states_of(f, q); i++) {
            ml_ref state = f->s->states[i].parameter, by, rest;
            bool after = x == uncast(f, f->s->next[i], true);
            if (!after && (states_of(f, x) != 1u << i || !affine(f, x, state, &by, &rest) || rest))
                continue;
            if (!after && !is_one(f, by) && !within(type_of(f, by), type_of(f, q))) return false;
            if (!after && !is_one(f, by)) q = ml_map2(f->g, ML_OP_MUL, q, by);
            if (f->read_count == MOST_READS || !same_keys(&f->states[i].keys, f, n)) return false;
            f->reads[f->read_count++] = (state_read){.node = n, .q = q, .state = i, .after = after};
            return true;
        }
    }
    return false;
}

/* Every way from a stacked result to a state leads over a read. */
static bool only_reads(form *f, ml_ref n) {
    if (!states_of(f, n)) return true;
    for (int i = 0; i < f->read_count; i++)
        if (f->reads[i].node == n) return true;
    const ml_node *node = ml_graph_node(f->g, n);
    if (node->op == ML_OP_DOT && find_read(f, n)) return true;
    if (node->source_count == 0) return false;
    for (int i = 0; i < node->source_count; i++)
        if (!only_reads(f, ml_graph_source(f->g, n, i))) return false;
    return true;
}

static bool all_vectorize(form *f) {
    ml_ref roots[3 * MOST_STATES + MOST_READS];
    int count = 0;
    for (int i = 0; i < f->s->state_count; i++) {
        roots[count++] = f->states[i].decay;
        roots[count++] = f->states[i].key;
        if (f->states[i].value) roots[count++] = f->states[i].value;
    }
    for (int i = 0; i < f->read_count; i++) roots[count++] = f->reads[i].q;
    recurrence_body_find(&f->b, f->g, f->s, roots, count);
    for (int i = 0; i < count; i++) {
        uint32_t at = recurrence_place(&f->b, roots[i]);
        if (at != ML_INDEX_NONE && !f->b.vectorizes[at]) return false;
    }
    return true;
}

static bool is_form(form *f) {
    const ml_recurrence_step *s = f->s;
    if (s->state_count == 0 || s->state_count > MOST_STATES || s->summed_count) return false;
    ml_ref *roots =
        ML_NEW_ARRAY(ml_graph_arena(f->g), ml_ref, s->state_count + s->stacked_count + 1);
    memcpy(roots, s->next, sizeof *roots * (size_t)s->state_count);
    memcpy(roots + s->state_count, s->stacked, sizeof *roots * (size_t)s->stacked_count);
    recurrence_body_find(&f->b, f->g, s, roots, s->state_count + s->stacked_count);
    for (int i = 0; i < s->state_count; i++) {
        state_form *state = &f->states[i];
        if (type_of(f, s->next[i])->rank > ML_MAX_AXES - 2 || states_of(f, s->next[i]) != 1u << i)
            return false;
        if (!ml_is_float((ml_dtype)type_of(f, s->next[i])->dtype)) return false;
        if (!affine(f, s->next[i], s->states[i].parameter, &state->decay, &state->rest))
            return false;
        if (!state->decay) return false;
    }
    for (int i = 0; i < s->stacked_count; i++)
        if (!only_reads(f, s->stacked[i])) return false;
    for (int i = 0; i < s->state_count; i++)
        if (f->states[i].keys.rank == 0 || !split_rest(f, i)) return false;
    return all_vectorize(f);
}

/* ---- Chunks ---- */

/* n at all positions, as {chunks, positions, its axes}; behind the last position `beyond`. */
static ml_ref chunked(form *f, ml_ref n, double beyond) {
    ml_graph *g = f->g;
    const ml_recurrence_step *s = f->s;
    ml_ref full = recurrence_vectorized(&f->b, n);
    ml_type type = *ml_graph_type(g, n), all = type;
    all.rank++;
    for (int i = type.rank; i > 0; i--)
        all.axis[i] = type.axis[i - 1], all.size[i] = type.size[i - 1];
    all.axis[0] = s->axis, all.size[0] = s->length;
    full = ml_graph_type(g, full)->rank < all.rank ? ml_broadcast(g, full, &all)
                                                   : ml_permute(g, full, &all);
    int64_t length = f->chunk * f->chunks;
    if (length > s->length) full = ml_pad(g, full, s->axis, 0, length - s->length);
    if (length > s->length && beyond != 0) { /* to zeros: other positions keep all digits */
        ml_ref number = ml_const(g, (ml_dtype)type.dtype, beyond);
        ml_ref inside =
            ml_map2(g, ML_OP_LT, ml_iota(g, s->axis, length), ml_const_int(g, ML_I32, s->length));
        full = ml_map2(g, ML_OP_ADD, full,
                       ml_where(g, inside, ml_const(g, (ml_dtype)type.dtype, 0), number));
    }
    return ml_split(g, full, s->axis, f->chunk_axis, f->chunks, f->p, f->chunk);
}

static ml_ref contract(form *f, ml_ref a, ml_ref b, const ml_type *over, ml_dtype dtype) {
    return ml_dot(f->g, a, b, over->axis, over->rank, dtype);
}

/* Decays within chunks: x' = a x + e times from `x0` on over the positions, where e (0: none)
 * differs by position and times (0: 1) does not; before or after each one. */
static ml_ref decays(form *f, ml_ref a, ml_ref e, ml_ref times, ml_ref x0, bool after,
                     ml_ref *final) {
    ml_graph *g = f->g;
    ml_recurrence_pair in[2], x = {0, x0};
    ml_ref sources[2] = {a, e};
    ml_type type = *ml_graph_type(g, x0);
    x.parameter = ml_recurrence_parameter(g, &type);
    int count = e ? 2 : 1;
    for (int i = 0; i < count; i++) {
        ml_recurrence_slice(g, sources[i], f->p, f->chunk, &type);
        in[i] = (ml_recurrence_pair){ml_recurrence_parameter(g, &type), sources[i]};
    }
    ml_ref next = ml_map2(g, ML_OP_MUL, x.parameter, in[0].parameter);
    ml_ref term = e ? in[1].parameter : 0;
    ml_type order = *ml_graph_type(g, x0);
    if (e && times) term = join(f, ML_OP_MUL, times, term);
    if (e) next = ml_permute(g, ml_map2(g, ML_OP_ADD, next, term), &order);
    ml_recurrence_step step = {.axis = f->p,
                               .reverse = f->s->reverse,
                               .length = f->chunk,
                               .inputs = in,
                               .input_count = count,
                               .states = &x,
                               .state_count = 1,
                               .next = &next,
                               .stacked = after ? &next : &x.parameter,
                               .stacked_count = 1};
    ml_ref made = ml_recurrence_new(g, &step);
    *final = ml_out(g, made, 1);
    return made;
}

/* The states before each chunk, and after the last. */
static ml_ref between(form *f, int i, ml_ref total, ml_ref sums, ml_ref *final) {
    ml_graph *g = f->g;
    ml_type type = *type_of(f, f->s->states[i].parameter), slice;
    ml_recurrence_pair in[2], x = {ml_recurrence_parameter(g, &type), f->s->states[i].value};
    ml_ref sources[2] = {total, sums};
    for (int k = 0; k < 2; k++) {
        ml_recurrence_slice(g, sources[k], f->chunk_axis, f->chunks, &slice);
        in[k] = (ml_recurrence_pair){ml_recurrence_parameter(g, &slice), sources[k]};
    }
    ml_ref next =
        ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MUL, x.parameter, in[0].parameter), in[1].parameter);
    next = ml_permute(g, next, &type);
    ml_recurrence_step step = {.axis = f->chunk_axis,
                               .reverse = f->s->reverse,
                               .length = f->chunks,
                               .inputs = in,
                               .input_count = 2,
                               .states = &x,
                               .state_count = 1,
                               .next = &next,
                               .stacked = &x.parameter,
                               .stacked_count = 1};
    ml_ref made = ml_recurrence_new(g, &step);
    *final = ml_out(g, made, 1);
    return made;
}

/* {chunks, positions, ...} as the results of a read at all positions. */
static ml_ref merged(form *f, ml_ref y, const ml_type *read) {
    ml_type order = {.dtype = type_of(f, y)->dtype, .rank = (uint8_t)(read->rank + 2)};
    order.axis[0] = f->chunk_axis, order.size[0] = f->chunks;
    order.axis[1] = f->p, order.size[1] = f->chunk;
    for (int i = 0; i < read->rank; i++)
        order.axis[i + 2] = read->axis[i], order.size[i + 2] = read->size[i];
    y = type_of(f, y)->rank < order.rank ? ml_broadcast(f->g, y, &order)
                                         : ml_permute(f->g, y, &order);
    y = ml_merge(f->g, y, f->chunk_axis, f->p, f->s->axis);
    if (f->chunk * f->chunks > f->s->length) y = ml_slice(f->g, y, f->s->axis, 0, f->s->length);
    return ml_cast(f->g, y, (ml_dtype)read->dtype);
}

typedef struct {
    ml_ref a, keys, values;            /* of all chunks; keys and values by j; values 0: 1 */
    ml_ref one, diagonal, none, times; /* times: keys where these decay by channel; else 0 */
} state_chunks;

static void read_one(form *f, state_read *r, const state_chunks *c, ml_ref before) {
    ml_graph *g = f->g;
    const state_form *state = &f->states[r->state];
    ml_type read = *type_of(f, r->node), over = {.rank = 1, .axis = {f->j}, .size = {f->chunk}};
    ml_dtype dtype = (ml_dtype)type_of(f, f->s->states[r->state].parameter)->dtype;
    ml_ref unused, q = chunked(f, r->q, 0);
    ml_ref decayed = decays(f, c->a, c->diagonal, c->times, c->none, r->after, &unused);
    ml_ref since = decays(f, c->a, 0, 0, c->one, r->after, &unused), weights, carried;
    if (state->per_key) {
        weights = contract(f, q, decayed, &state->keys, dtype);
        carried = contract(f, join(f, ML_OP_MUL, q, since), before, &state->keys, dtype);
    } else {
        weights = join(f, ML_OP_MUL, contract(f, q, c->keys, &state->keys, dtype), decayed);
        carried = join(f, ML_OP_MUL, contract(f, q, before, &state->keys, dtype), since);
    }
    ml_ref y;
    if (c->values) {
        ml_dtype narrow = (ml_dtype)type_of(f, c->values)->dtype;
        y = contract(f, ml_cast(g, weights, narrow), c->values, &over, dtype);
    } else
        y = ml_reduce(g, ML_OP_SUM, weights, &f->j, 1);
    r->full = merged(f, join(f, ML_OP_ADD, carried, y), &read);
}

static void compute_state(form *f, int i) {
    ml_graph *g = f->g;
    state_form *state = &f->states[i];
    ml_dtype dtype = (ml_dtype)type_of(f, f->s->states[i].parameter)->dtype;
    ml_type over = {.rank = 1, .axis = {f->j}, .size = {f->chunk}};
    state_chunks c = {.a = ml_cast(g, chunked(f, state->decay, 1), dtype)};
    c.keys = ml_rename(g, chunked(f, state->key, 0), f->p, f->j);
    if (state->value) c.values = ml_rename(g, chunked(f, state->value, 0), f->p, f->j);
    ml_type row = *type_of(f, c.a), square;
    for (int k = 1; k + 1 < row.rank; k++) /* without the positions, which come second */
        row.axis[k] = row.axis[k + 1], row.size[k] = row.size[k + 1];
    row.rank--;
    square = row;
    square.axis[square.rank] = f->j, square.size[square.rank++] = f->chunk;
    if (state->per_key) { /* keys as far as they have decayed at each position */
        c.times = ml_cast(g, c.keys, dtype);
        const ml_type *keys = type_of(f, c.keys);
        for (int k = 0; k < keys->rank && square.rank < ML_MAX_AXES; k++)
            if (ml_type_find(&square, keys->axis[k]) < 0) {
                square.axis[square.rank] = keys->axis[k];
                square.size[square.rank++] = keys->size[k];
            }
    }
    c.one = ml_broadcast(g, ml_const(g, dtype, 1), &row);
    c.none = ml_broadcast(g, ml_const(g, dtype, 0), &square);
    ml_type pairs = {
        .dtype = ML_I32, .rank = 2, .axis = {f->p, f->j}, .size = {f->chunk, f->chunk}};
    ml_ref at = ml_broadcast(g, ml_iota(g, f->p, f->chunk), &pairs);
    c.diagonal = ml_cast(g, ml_map2(g, ML_OP_EQ, at, ml_iota(g, f->j, f->chunk)), dtype);
    ml_ref last, total;
    (void)decays(f, c.a, c.diagonal, c.times, c.none, true, &last);
    (void)decays(f, c.a, 0, 0, c.one, true, &total);
    last = ml_cast(g, last, (ml_dtype)type_of(f, c.keys)->dtype);
    ml_ref keys = state->per_key ? last : join(f, ML_OP_MUL, c.keys, last);
    ml_ref sums = c.values ? contract(f, keys, c.values, &over, dtype)
                           : ml_cast(g, ml_reduce(g, ML_OP_SUM, keys, &f->j, 1), dtype);
    ml_ref before = between(f, i, total, sums, &state->final);
    for (int k = 0; k < f->read_count; k++)
        if (f->reads[k].state == i) read_one(f, &f->reads[k], &c, before);
}

/* The stacked results from what was read. */
static void give(form *f, ml_ref *outputs) {
    ml_graph *g = f->g;
    const ml_recurrence_step *s = f->s;
    ml_arena *arena = ml_graph_arena(g);
    int count = s->input_count + f->read_count, roots = s->stacked_count;
    if (roots == 0) return;
    ml_recurrence_pair *inputs = ML_NEW_ARRAY(arena, ml_recurrence_pair, count);
    recurrence_body_find(&f->b, g, s, s->stacked, roots);
    ml_ref *instead = ML_NEW_ARRAY(arena, ml_ref, f->b.body.count + 1);
    for (int i = 0; i < s->input_count; i++) {
        inputs[i] = s->inputs[i];
    }
    for (int i = 0; i < f->read_count; i++) {
        ml_type type = *type_of(f, f->reads[i].node);
        inputs[s->input_count + i] =
            (ml_recurrence_pair){ml_recurrence_parameter(g, &type), f->reads[i].full};
    }
    for (uint32_t i = 0; i < f->b.body.count; i++) {
        ml_ref n = instead[i] = f->b.body.at[i];
        for (int k = 0; k < f->read_count; k++)
            if (f->reads[k].node == n) instead[i] = inputs[s->input_count + k].parameter;
        int sources = ml_graph_node(g, n)->source_count;
        if (instead[i] != n || !f->b.states[i] || sources == 0) continue;
        ml_ref *changed = ML_NEW_ARRAY(arena, ml_ref, sources);
        for (int k = 0; k < sources; k++) {
            uint32_t at = recurrence_place(&f->b, ml_graph_source(g, n, k));
            changed[k] = at == ML_INDEX_NONE ? ml_graph_source(g, n, k) : instead[at];
        }
        instead[i] = ml_graph_copy(g, g, n, changed);
    }
    ml_ref *stacked = ML_NEW_ARRAY(arena, ml_ref, roots);
    for (int i = 0; i < roots; i++) {
        uint32_t at = recurrence_place(&f->b, s->stacked[i]);
        stacked[i] = at == ML_INDEX_NONE ? s->stacked[i] : instead[at];
    }
    ml_recurrence_step step = {.axis = s->axis,
                               .reverse = s->reverse,
                               .length = s->length,
                               .inputs = inputs,
                               .input_count = count,
                               .captured = s->captured,
                               .captured_count = s->captured_count,
                               .stacked = stacked,
                               .stacked_count = roots};
    ml_recurrence_apply(g, &step, outputs);
}

/* Chunks long enough for products, short for short sequences and where each channel has a decay of
 * its own; of a length that divides the whole, if there is one: else the last is filled up. */
static void choose_chunk(form *f) {
    enum { LEAST = 16, SHORT = 128, LONG = 512 };
    int64_t length = f->s->length, most = length >= LONG ? 64 : length >= SHORT ? 32 : LEAST;
    for (int i = 0; i < f->s->state_count; i++)
        if (f->states[i].per_key) most = LEAST;
    f->chunk = most;
    while (length % f->chunk != 0 && f->chunk > most / 2) f->chunk--;
    if (length % f->chunk != 0) f->chunk = most;
    f->chunks = (length + f->chunk - 1) / f->chunk;
}

static ml_axis named(form *f, const char *suffix) {
    const char *name = ml_axis_name(f->g, f->s->axis);
    return ml_axis_named(f->g, ml_arena_format(ml_graph_arena(f->g), "%s'%s", name, suffix));
}

bool recurrence_chunks(ml_graph *g, const ml_recurrence_step *s, ml_ref *outputs) {
    form f = {.g = g, .s = s};
    if (s->length < LEAST_LENGTH || !is_form(&f)) return false;
    choose_chunk(&f);
    f.chunk_axis = named(&f, "chunks");
    f.p = named(&f, "positions");
    f.j = named(&f, "keys");
    ml_origin origin = *g->tables->origins.at[g->origin];
    for (int i = 0; i < s->state_count; i++) compute_state(&f, i);
    ml_graph_set_origin(g, &origin);
    give(&f, outputs);
    for (int i = 0; i < s->state_count; i++) outputs[s->stacked_count + i] = f.states[i].final;
    return true;
}
