/* LINEAR_SCAN by products over chunks of positions: its definition on devices.
 *
 * With S' = a S + k v^T the results within a chunk are (q k^T * D) v, where D(p, j) is the product
 * of the decays after position j up to p; what chunks before leave is q S D(p). Where each key has
 * a decay, D is a factor of the keys: q (k D)^T. The states from chunk to chunk are a recurrence by
 * elements. D is one too, over the positions of a chunk: no logarithms, so that decays of any sign,
 * and of 0 (resets), are exact. */
#include "runtime/ops/linear_scan/linear_scan_internal.h"
#include "runtime/ops/recurrence/recurrence.h"

static const ml_type *type_of(const chunk_form *f, ml_ref n) {
    return ml_graph_type(f->g, n);
}

ml_ref chunk_join(chunk_form *f, ml_op op, ml_ref a, ml_ref b) {
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

ml_ref chunk_operand(chunk_form *f, int i, double beyond) {
    ml_graph *g = f->g;
    ml_ref full = f->sources[i];
    ml_type type = *ml_graph_type(g, full), order = {.dtype = type.dtype, .rank = 1};
    order.axis[0] = f->s.axis, order.size[0] = f->s.length;
    for (int k = 0; k < type.rank; k++)
        if (type.axis[k] != f->s.axis)
            order.axis[order.rank] = type.axis[k], order.size[order.rank++] = type.size[k];
    full = ml_permute(g, full, &order);
    int64_t length = f->chunk * f->chunks;
    if (length > f->s.length) full = ml_pad(g, full, f->s.axis, 0, length - f->s.length);
    if (length > f->s.length && beyond != 0) { /* to zeros: other positions keep all digits */
        ml_ref number = ml_const(g, (ml_dtype)type.dtype, beyond);
        ml_ref inside = ml_map2(g, ML_OP_LT, ml_iota(g, f->s.axis, length),
                                ml_const_int(g, ML_I32, f->s.length));
        full = ml_map2(g, ML_OP_ADD, full,
                       ml_where(g, inside, ml_const(g, (ml_dtype)type.dtype, 0), number));
    }
    return ml_split(g, full, f->s.axis, f->chunk_axis, f->chunks, f->p, f->chunk);
}

ml_ref chunk_contract(chunk_form *f, ml_ref a, ml_ref b, ml_axis over) {
    return ml_dot(f->g, a, b, &over, 1, f->dtype);
}

/* x' = a x + e times from `x0` on over the positions of a chunk, where e (0: none) differs by
 * position and times (0: 1) does not; before or after each one. */
static ml_ref decays(chunk_form *f, ml_ref e, ml_ref times, ml_ref x0, bool after, ml_ref *final) {
    ml_graph *g = f->g;
    ml_recurrence_pair in[2], x = {0, x0};
    ml_ref sources[2] = {f->decay, e};
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
    if (e && times) term = chunk_join(f, ML_OP_MUL, times, term);
    if (e) next = ml_permute(g, ml_map2(g, ML_OP_ADD, next, term), &order);
    ml_recurrence_step step = {.axis = f->p,
                               .reverse = f->s.reverse,
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

ml_ref chunk_decays(chunk_form *f, ml_ref keys, bool after, ml_ref *final) {
    ml_type none = *type_of(f, f->none);
    const ml_type *t = type_of(f, keys);
    if (!f->s.decay_per_key) return decays(f, f->diagonal, 0, f->none, after, final);
    for (int k = 0; k < t->rank; k++)
        if (ml_type_find(&none, t->axis[k]) < 0 && none.rank < ML_MAX_AXES) {
            none.axis[none.rank] = t->axis[k];
            none.size[none.rank++] = t->size[k];
        }
    ml_ref begin = ml_broadcast(f->g, f->none, &none);
    return decays(f, f->diagonal, ml_cast(f->g, keys, f->dtype), begin, after, final);
}

ml_ref chunk_decays_since(chunk_form *f, bool after, ml_ref *final) {
    return decays(f, 0, 0, f->one, after, final);
}

ml_ref chunk_states(chunk_form *f, ml_ref total, ml_ref sums, chunk_step *step_of, ml_ref *final) {
    ml_graph *g = f->g;
    ml_ref initial = f->sources[LINEAR_SCAN_STATE], sources[2] = {total, sums};
    ml_type type = *type_of(f, initial), slice;
    ml_recurrence_pair in[2], x = {ml_recurrence_parameter(g, &type), initial};
    for (int k = 0; k < 2; k++) {
        ml_recurrence_slice(g, sources[k], f->chunk_axis, f->chunks, &slice);
        in[k] = (ml_recurrence_pair){ml_recurrence_parameter(g, &slice), sources[k]};
    }
    ml_ref next = step_of(f, x.parameter, in[0].parameter, in[1].parameter);
    next = ml_permute(g, next, &type);
    ml_recurrence_step step = {.axis = f->chunk_axis,
                               .reverse = f->s.reverse,
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

static ml_ref decayed_state(chunk_form *f, ml_ref state, ml_ref total, ml_ref sums) {
    return ml_map2(f->g, ML_OP_ADD, ml_map2(f->g, ML_OP_MUL, state, total), sums);
}

ml_ref chunk_merge(chunk_form *f, ml_ref y) {
    ml_type all, order;
    linear_scan_slices(&f->s, type_of(f, f->sources[LINEAR_SCAN_STATE]), f->s.values, f->s.dtype,
                       &all);
    order = (ml_type){.dtype = type_of(f, y)->dtype, .rank = (uint8_t)(all.rank + 1)};
    order.axis[0] = f->chunk_axis, order.size[0] = f->chunks;
    order.axis[1] = f->p, order.size[1] = f->chunk;
    for (int i = 1; i < all.rank; i++)
        order.axis[i + 1] = all.axis[i], order.size[i + 1] = all.size[i];
    y = type_of(f, y)->rank < order.rank ? ml_broadcast(f->g, y, &order)
                                         : ml_permute(f->g, y, &order);
    y = ml_merge(f->g, y, f->chunk_axis, f->p, f->s.axis);
    if (f->chunk * f->chunks > f->s.length) y = ml_slice(f->g, y, f->s.axis, 0, f->s.length);
    return ml_cast(f->g, y, f->s.dtype);
}

/* Where products of decays begin. */
static void begin_decays(chunk_form *f) {
    ml_graph *g = f->g;
    f->decay = ml_cast(g, chunk_operand(f, LINEAR_SCAN_DECAY, 1), f->dtype);
    ml_type row = *type_of(f, f->decay), square;
    for (int k = 1; k + 1 < row.rank; k++) /* without the positions, which come second */
        row.axis[k] = row.axis[k + 1], row.size[k] = row.size[k + 1];
    row.rank--;
    square = row;
    square.axis[square.rank] = f->j, square.size[square.rank++] = f->chunk;
    f->one = ml_broadcast(g, ml_const(g, f->dtype, 1), &row);
    f->none = ml_broadcast(g, ml_const(g, f->dtype, 0), &square);
    ml_type pairs = {
        .dtype = ML_I32, .rank = 2, .axis = {f->p, f->j}, .size = {f->chunk, f->chunk}};
    ml_ref at = ml_broadcast(g, ml_iota(g, f->p, f->chunk), &pairs);
    f->diagonal = ml_cast(g, ml_map2(g, ML_OP_EQ, at, ml_iota(g, f->j, f->chunk)), f->dtype);
}

/* The products over j of what is narrow in k and v are of their dtype. */
static ml_ref times_values(chunk_form *f, ml_ref weights, ml_ref values) {
    ml_dtype narrow = (ml_dtype)type_of(f, values)->dtype;
    return chunk_contract(f, ml_cast(f->g, weights, narrow), values, f->j);
}

static ml_ref read_all(chunk_form *f, ml_ref keys, ml_ref values, ml_ref before) {
    ml_graph *g = f->g;
    ml_ref unused, q = chunk_operand(f, LINEAR_SCAN_Q, 0);
    ml_ref decayed = chunk_decays(f, keys, f->s.after, &unused);
    ml_ref since = chunk_decays_since(f, f->s.after, &unused), weights, carried;
    if (f->s.decay_per_key) {
        weights = chunk_contract(f, q, decayed, f->s.keys);
        carried = chunk_contract(f, chunk_join(f, ML_OP_MUL, ml_cast(g, q, f->dtype), since),
                                 before, f->s.keys);
    } else {
        weights = chunk_join(f, ML_OP_MUL, chunk_contract(f, q, keys, f->s.keys), decayed);
        carried = chunk_join(f, ML_OP_MUL, chunk_contract(f, q, before, f->s.keys), since);
    }
    return chunk_merge(f, chunk_join(f, ML_OP_ADD, carried, times_values(f, weights, values)));
}

static void rank_none(chunk_form *f, ml_ref outputs[2]) {
    ml_graph *g = f->g;
    ml_ref keys = ml_rename(g, chunk_operand(f, LINEAR_SCAN_K, 0), f->p, f->j);
    ml_ref values = ml_rename(g, chunk_operand(f, LINEAR_SCAN_V, 0), f->p, f->j), last, total;
    (void)chunk_decays(f, keys, true, &last);
    (void)chunk_decays_since(f, true, &total);
    last = ml_cast(g, last, (ml_dtype)type_of(f, keys)->dtype);
    if (!f->s.decay_per_key) last = chunk_join(f, ML_OP_MUL, keys, last);
    ml_ref sums = times_values(f, last, values);
    ml_ref before = chunk_states(f, total, sums, decayed_state, &outputs[1]);
    outputs[0] = read_all(f, keys, values, before);
}

/* Chunks long enough for products, short for short sequences, where each key has a decay of its own
 * and where triangular matrices are to be inverted; of a length that divides the whole, if there is
 * one: else the last is filled up. */
static void choose_chunk(chunk_form *f) {
    enum { LEAST = 16, TRIANGLE = 32, SHORT = 128, LONG = 512 };
    int64_t length = f->s.length, most = length >= LONG ? 64 : length >= SHORT ? 32 : LEAST;
    if (f->s.decay_per_key) most = LEAST;
    if (f->s.rank && most > TRIANGLE) most = f->s.rank > 1 ? LEAST : TRIANGLE;
    if (length < most) most = length;
    f->chunk = most;
    while (length % f->chunk != 0 && f->chunk > most / 2) f->chunk--;
    if (length % f->chunk != 0) f->chunk = most;
    f->chunks = (length + f->chunk - 1) / f->chunk;
}

static ml_axis named(chunk_form *f, const char *suffix) {
    const char *name = ml_axis_name(f->g, f->s.axis);
    return ml_axis_named(f->g, ml_arena_format(ml_graph_arena(f->g), "%s'%s", name, suffix));
}

/* One position: the definition itself, as where a model generates. */
static void one_position(chunk_form *f, ml_ref outputs[2]) {
    ml_graph *g = f->g;
    ml_axis axis = f->s.axis;
    ml_ref x[LINEAR_SCAN_MOST_SOURCES], before = f->sources[LINEAR_SCAN_STATE];
    ml_type state = *type_of(f, before), y;
    for (int i = 0; i < LINEAR_SCAN_FIRST_PAIR + 2 * f->s.rank; i++)
        if (i != LINEAR_SCAN_STATE)
            x[i] = ml_cast(g, ml_reduce(g, ML_OP_SUM, f->sources[i], &axis, 1), f->dtype);
    ml_ref after = ml_map2(g, ML_OP_MUL, before, x[LINEAR_SCAN_DECAY]);
    after =
        ml_map2(g, ML_OP_ADD, after, chunk_join(f, ML_OP_MUL, x[LINEAR_SCAN_K], x[LINEAR_SCAN_V]));
    for (int i = LINEAR_SCAN_FIRST_PAIR; i < LINEAR_SCAN_FIRST_PAIR + 2 * f->s.rank; i += 2) {
        ml_ref z = chunk_contract(f, x[i + 1], before, f->s.keys);
        after = ml_map2(g, ML_OP_ADD, after, chunk_join(f, ML_OP_MUL, z, x[i]));
    }
    ml_ref read = chunk_contract(f, x[LINEAR_SCAN_Q], f->s.after ? after : before, f->s.keys);
    linear_scan_slices(&f->s, &state, f->s.values, f->dtype, &y);
    outputs[0] = ml_cast(g, ml_broadcast(g, read, &y), f->s.dtype);
    outputs[1] = ml_permute(g, after, &state);
}

void linear_scan_chunks(ml_graph *g, const ml_ref *sources, const ml_linear_scan *scan,
                        ml_ref outputs[2]) {
    chunk_form f = {.g = g, .sources = sources, .s = *scan};
    f.dtype = (ml_dtype)ml_graph_type(g, sources[LINEAR_SCAN_STATE])->dtype;
    if (scan->length == 1) {
        one_position(&f, outputs);
        return;
    }
    choose_chunk(&f);
    f.chunk_axis = named(&f, "chunks");
    f.p = named(&f, "positions");
    f.j = named(&f, "keys");
    begin_decays(&f);
    if (scan->rank)
        chunk_triangular(&f, outputs);
    else
        rank_none(&f, outputs);
}
