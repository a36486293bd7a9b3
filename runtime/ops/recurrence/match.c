/* Which recurrences are linear scans (linear_scan.h), found from their algebra
 * (recurrence/affine.c): a state whose next value is a matrix times it plus an outer product, the
 * matrix diagonal plus one of low rank, and of which all else reads products with keys: linear
 * attention, RetNet, GLA, Mamba-2, the memory and the normaliser of mLSTM, DeltaNet, KDA, RWKV-7.
 *
 * States are taken one after another, each after those that its next value depends on: a linear
 * scan's products become inputs of what is left of the step, and so do the values of a state of
 * another form (a stabiliser, max(f + m, i)) where a linear one depends on them or is beside them.
 */
#include <string.h>

#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/recurrence/recurrence_internal.h"

enum { MOST_STATES = 16, MOST_READS = 16 };

/* A product with a state: node = sum over keys of (S or S') q, plus rest. */
typedef struct {
    ml_ref node, q, rest;
    ml_ref instead, parameter, full; /* in what is left of the step; the results at all positions */
    bool after;                      /* S' */
} state_read;

typedef struct {
    ml_graph *g;
    const ml_recurrence_step *s;
    recurrence_body b;
    int state;
    ml_type keys;
    ml_ref decay;
    ml_ref key[AFFINE_WRITES], value[AFFINE_WRITES]; /* value 0: 1 */
    int writes, pairs;
    ml_ref u[LINEAR_SCAN_MOST_RANK], w[LINEAR_SCAN_MOST_RANK];
    state_read reads[MOST_READS];
    int read_count;
    ml_ref final;
    bool *visited;   /* by place in the body */
    const char *why; /* it is no linear scan */
} form;

static bool refuse(form *f, const char *why) {
    f->why = why;
    return false;
}

static const ml_type *type_of(const form *f, ml_ref n) {
    return ml_graph_type(f->g, n);
}

static ml_ref state_of(const form *f) {
    return f->s->states[f->state].parameter;
}

static uint32_t states_of(const recurrence_body *b, ml_ref n) {
    uint32_t at = recurrence_place(b, n);
    return at == ML_INDEX_NONE ? 0 : b->states[at];
}

/* All that the step gives. */
static void find_body(recurrence_body *b, ml_graph *g, const ml_recurrence_step *s) {
    ml_ref *roots = ML_NEW_ARRAY(ml_graph_arena(g), ml_ref, s->state_count + s->stacked_count + 1);
    memcpy(roots, s->next, sizeof *roots * (size_t)s->state_count);
    if (s->stacked_count)
        memcpy(roots + s->state_count, s->stacked, sizeof *roots * (size_t)s->stacked_count);
    recurrence_body_find(b, g, s, roots, s->state_count + s->stacked_count);
}

/* ---- One state ------------------------------------------------------------------------------- */

static affine_state affine_of(const form *f, ml_ref base) {
    return (affine_state){
        .b = &f->b, .state = f->state, .parameter = state_of(f), .base = base, .keys = f->keys};
}

/* n as a read of the state after the position, or before it. */
static bool find_read(form *f, ml_ref n) {
    for (int before = 0; before < 2; before++) {
        affine_state x = affine_of(f, before ? state_of(f) : f->s->next[f->state]);
        affine_form found;
        if (!affine_find(&x, n, &found) || !found.vector) continue;
        if (f->read_count == MOST_READS) return false;
        ml_ref none = ml_const(f->g, (ml_dtype)type_of(f, state_of(f))->dtype, 0);
        f->reads[f->read_count++] = (state_read){
            .node = n, .q = found.decay ? found.decay : none, .rest = found.rest, .after = !before};
        return true;
    }
    return false;
}

/* Every way from a result to the state leads over a read. */
static bool only_reads(form *f, ml_ref n) {
    uint32_t at = recurrence_place(&f->b, n);
    if (at == ML_INDEX_NONE || !(f->b.states[at] >> f->state & 1) || f->visited[at]) return true;
    f->visited[at] = true;
    const ml_node *node = ml_graph_node(f->g, n);
    bool reduces = node->op == ML_OP_SUM || (node->op == ML_OP_DOT && node->arg_count);
    if (reduces && find_read(f, n)) return true;
    if (n == f->s->next[f->state] || node->source_count == 0) return false;
    for (int i = 0; i < node->source_count; i++)
        if (!only_reads(f, ml_graph_source(f->g, n, i))) return false;
    return true;
}

static bool all_read(form *f) {
    f->visited = ml_arena_alloc(ml_graph_arena(f->g), f->b.body.count + 1);
    for (int i = 0; i < f->s->state_count; i++)
        if (i != f->state && !only_reads(f, f->s->next[i])) return false;
    for (int i = 0; i < f->s->stacked_count; i++)
        if (!only_reads(f, f->s->stacked[i])) return false;
    if (f->read_count == 0) { /* the final state alone */
        ml_ref none = ml_const(f->g, (ml_dtype)type_of(f, state_of(f))->dtype, 0);
        f->reads[f->read_count++] = (state_read){.q = none, .after = true};
    }
    return true;
}

static bool has_axis(const form *f, ml_ref n, ml_axis axis) {
    return n && ml_type_find(type_of(f, n), axis) >= 0;
}

/* What has keys: all operands but the values, the query third. */
static int keyed_count(const form *f) {
    return 2 + f->writes + 2 * f->pairs;
}

static ml_ref with_keys(const form *f, ml_ref q, int i) {
    const ml_ref first[] = {f->key[0], f->decay, q};
    const int pairs = i - 2 - f->writes;
    if (i < 3) return first[i];
    if (pairs < 0) return f->key[i - 2];
    return pairs % 2 ? f->w[pairs / 2] : f->u[pairs / 2];
}

static bool value_has(const form *f, ml_axis axis) {
    for (int i = 0; i < f->writes; i++)
        if (has_axis(f, f->value[i], axis)) return true;
    return false;
}

/* The axis that is the values' own for this query: the largest, best one that the value has; 0:
 * none. */
static ml_axis own_axis(const form *f, ml_ref q) {
    const ml_type *state = type_of(f, state_of(f));
    ml_axis own = 0;
    int64_t largest = 0;
    for (int i = 0; i < state->rank; i++) {
        ml_axis axis = state->axis[i];
        bool given = value_has(f, axis), better = given && !value_has(f, own);
        bool free = ml_type_find(&f->keys, axis) < 0;
        for (int k = 0; k < keyed_count(f) && free; k++)
            free = !has_axis(f, with_keys(f, q, k), axis);
        if (own && !better && (state->size[i] <= largest || !given)) free = false;
        if (free) own = axis, largest = state->size[i];
    }
    return own;
}

static bool has_all_axes(const form *f, ml_ref n) {
    const ml_type *t = type_of(f, state_of(f));
    for (int i = 0; i < t->rank; i++)
        if (!has_axis(f, n, t->axis[i])) return false;
    return true;
}

static const char WIDER[] = "an operand has a wider dtype than the state";
static const char NOT_OUTER[] =
    "what is added to the state is no sum of up to 4 outer products of keys and values";

/* Whether the operands of a read are those of a linear scan. */
static bool serves(form *f, ml_ref q) {
    const ml_type *t = type_of(f, state_of(f));
    ml_dtype dtype = ml_compute_dtype((ml_dtype)t->dtype);
    ml_axis own = own_axis(f, q);
    for (int i = 0; i < f->writes; i++) {
        if (!f->value[i]) continue;
        const ml_type *v = type_of(f, f->value[i]);
        if (!ml_dtype_holds(dtype, (ml_dtype)v->dtype)) return refuse(f, WIDER);
        if (affine_has_any(v, &f->keys)) return refuse(f, NOT_OUTER);
    }
    int rank = t->rank;
    for (int k = 0; k < type_of(f, q)->rank; k++)
        rank += ml_type_find(t, type_of(f, q)->axis[k]) < 0;
    /* products have two axes of positions besides, and which of a position's pairs */
    if (rank > ML_MAX_AXES - 2 - (f->pairs > 1))
        return refuse(f, "products of positions would have too many axes");
    for (int k = 0; k < keyed_count(f); k++) {
        const ml_type *o = type_of(f, with_keys(f, q, k));
        if (!ml_dtype_holds(dtype, (ml_dtype)o->dtype)) return refuse(f, WIDER);
        for (int i = 0; i < o->rank && k != 2; i++)
            if (ml_type_find(t, o->axis[i]) < 0)
                return refuse(f, "an operand has an axis that the state has not");
    }
    /* else products of positions have all axes of the state: those of q k alone */
    for (int i = 0; i < f->writes && !own; i++)
        if (has_all_axes(f, f->key[i]) && !has_all_axes(f, q)) return refuse(f, NOT_OUTER);
    if (!own && !has_all_axes(f, q))
        return refuse(f, "decays, keys and queries have all axes of the state: none of them is of "
                         "the values alone");
    return true;
}

static bool all_vectorize(form *f) {
    ml_ref roots[1 + 2 * AFFINE_WRITES + 2 * LINEAR_SCAN_MOST_RANK + MOST_READS];
    int count = 0;
    roots[count++] = f->decay;
    for (int i = 0; i < f->writes; i++) {
        roots[count++] = f->key[i];
        if (f->value[i]) roots[count++] = f->value[i];
    }
    for (int i = 0; i < f->pairs; i++) roots[count++] = f->u[i], roots[count++] = f->w[i];
    for (int i = 0; i < f->read_count; i++) roots[count++] = f->reads[i].q;
    recurrence_body_find(&f->b, f->g, f->s, roots, count);
    for (int i = 0; i < count; i++) {
        uint32_t at = recurrence_place(&f->b, roots[i]);
        if (at != ML_INDEX_NONE && !f->b.vectorizes[at]) return false;
    }
    for (int i = 0; i < f->read_count; i++) { /* a vector times weights is no read */
        uint32_t at = recurrence_place(&f->b, f->reads[i].q);
        bool same = at == ML_INDEX_NONE || f->b.depends[at] == RECURRENCE_OUTSIDE;
        if (f->reads[i].node && same && !own_axis(f, f->reads[i].q)) return false;
    }
    return true;
}

/* Whether state i, whose next value depends on no other, is a linear scan; as what. */
static bool is_linear(form *f, ml_graph *g, const ml_recurrence_step *s, int i) {
    *f = (form){.g = g, .s = s, .state = i};
    affine_form next;
    ml_ref state = s->states[i].parameter, zero;
    if (!ml_is_float((ml_dtype)ml_graph_type(g, state)->dtype))
        return refuse(f, "the state is no float");
    find_body(&f->b, g, s);
    affine_state x = affine_of(f, state);
    affine_keys(&x);
    f->keys = x.keys;
    if (f->keys.rank == 0) return refuse(f, "the state is read by no product or sum over its axes");
    if (!affine_find(&x, s->next[i], &next) || next.vector)
        return refuse(f,
                      "the new state is neither a decay of the state nor products of it with keys");
    if (next.rounded) return refuse(f, "the state is rounded to a narrower dtype");
    if (next.pairs > LINEAR_SCAN_MOST_RANK)
        return refuse(f, "the transition beside the decay is of a rank above 4");
    if (!next.decay && !next.pairs) return refuse(f, "the new state does not depend on the state");
    zero = ml_const(g, (ml_dtype)ml_graph_type(g, state)->dtype, 0);
    f->decay = next.decay ? next.decay : zero;
    f->key[0] = f->value[0] = zero;
    f->writes = next.rest ? affine_outer(&x, next.rest, f->key, f->value) : 1;
    if (f->writes == 0) return refuse(f, NOT_OUTER);
    f->pairs = next.pairs;
    memcpy(f->u, next.u, sizeof f->u);
    memcpy(f->w, next.w, sizeof f->w);
    for (int k = 0; k < f->pairs; k++) affine_move_factors(&x, &f->u[k], &f->w[k]);
    if (!all_read(f))
        return refuse(f, "the state is read otherwise than by products and sums over its keys");
    for (int k = 0; k < f->read_count; k++)
        if (!serves(f, f->reads[k].q)) return false;
    return all_vectorize(f) ||
           refuse(f, "an operand is not one that all positions have computed at once");
}

/* ---- The ops --------------------------------------------------------------------------------- */

static ml_type with_axis(const form *f, const ml_type *type) {
    ml_type all = *type;
    all.rank++;
    for (int i = type->rank; i > 0; i--)
        all.axis[i] = type->axis[i - 1], all.size[i] = type->size[i - 1];
    all.axis[0] = f->s->axis, all.size[0] = f->s->length;
    return all;
}

static ml_axis merged_name(form *f, const ml_type *keys) {
    ml_text name = {.arena = ml_graph_arena(f->g)};
    for (int i = 0; i < keys->rank; i++)
        ml_text_add(&name, "%s%s", i ? "'" : "", ml_axis_name(f->g, keys->axis[i]));
    return ml_axis_named(f->g, name.text);
}

/* The axes of keys, of which n has some, as one. */
static ml_ref merge_keys(form *f, ml_ref n, const ml_type *keys) {
    ml_type all = *type_of(f, n);
    if (keys->rank == 1 || !affine_has_any(&all, keys)) return n;
    for (int i = 0; i < keys->rank; i++)
        if (ml_type_find(&all, keys->axis[i]) < 0)
            all.axis[all.rank] = keys->axis[i], all.size[all.rank++] = keys->size[i];
    n = ml_broadcast(f->g, n, &all);
    ml_axis name = merged_name(f, keys), outer = keys->axis[0];
    for (int i = 1; i < keys->rank; i++) {
        n = ml_merge(f->g, n, outer, keys->axis[i], name);
        outer = name;
    }
    return n;
}

static ml_ref split_keys(form *f, ml_ref n, const ml_type *keys) {
    int64_t inner = 1;
    for (int i = 1; i < keys->rank; i++) inner *= keys->size[i];
    ml_axis name = merged_name(f, keys);
    for (int i = 1; i < keys->rank; i++) {
        ml_axis rest = i + 1 < keys->rank ? name : keys->axis[i];
        n = ml_split(f->g, n, name, keys->axis[i - 1], keys->size[i - 1], rest, inner);
        inner /= keys->size[i];
    }
    return n;
}

/* n at all positions, with at least its keys, which are one axis: `own`; 0: they are not its own.
 */
static ml_ref operand(form *f, ml_ref n, bool keyed) {
    ml_ref full = recurrence_vectorized(&f->b, n);
    ml_type all = with_axis(f, type_of(f, n));
    for (int i = 0; i < f->keys.rank && keyed; i++)
        if (ml_type_find(&all, f->keys.axis[i]) < 0)
            all.axis[all.rank] = f->keys.axis[i], all.size[all.rank++] = f->keys.size[i];
    if (type_of(f, full)->rank < all.rank) full = ml_broadcast(f->g, full, &all);
    return merge_keys(f, full, &f->keys);
}

/* A value, with its own axis. */
static ml_ref value_operand(form *f, ml_ref value, ml_axis own) {
    ml_dtype dtype = ml_compute_dtype((ml_dtype)type_of(f, state_of(f))->dtype);
    ml_ref full = operand(f, value ? value : ml_const(f->g, dtype, 1), false);
    ml_type all = *type_of(f, full);
    if (!own || ml_type_find(&all, own) >= 0) return full;
    all.axis[all.rank] = own, all.size[all.rank++] = ml_type_size(type_of(f, state_of(f)), own);
    return ml_broadcast(f->g, full, &all);
}

/* The state with the axes that queries have and it has not: they share it. */
static ml_type shared_type(const form *f, ml_ref state, ml_ref q) {
    ml_type all = *type_of(f, state);
    const ml_type *t = type_of(f, q);
    for (int i = 0; i < t->rank && all.rank < ML_MAX_AXES; i++)
        if (t->axis[i] != f->s->axis && ml_type_find(&all, t->axis[i]) < 0)
            all.axis[all.rank] = t->axis[i], all.size[all.rank++] = t->size[i];
    return all;
}

/* The state of the first of those that share it, as the step has it. */
static ml_ref final_state(form *f, ml_ref final) {
    ml_type type = *type_of(f, state_of(f)), from = *type_of(f, final);
    ml_axis shared[ML_MAX_AXES];
    int count = 0;
    for (int k = 0; k < from.rank; k++) {
        if (ml_type_find(&type, from.axis[k]) >= 0) continue;
        shared[count++] = from.axis[k];
        final = ml_slice(f->g, final, from.axis[k], 0, 1);
    }
    if (count) final = ml_reduce(f->g, ML_OP_SUM, final, shared, count);
    return ml_cast(f->g, ml_permute(f->g, final, &type), (ml_dtype)type.dtype);
}

/* The products of the scan take all operands in the dtype that the step's own product reads the
 * queries in. */
static void narrow_operands(ml_graph *g, ml_ref *sources, int count) {
    const ml_dtype dtype = (ml_dtype)ml_graph_type(g, sources[LINEAR_SCAN_Q])->dtype;
    for (int i = LINEAR_SCAN_K; i < count; i++) {
        const ml_dtype wide = (ml_dtype)ml_graph_type(g, sources[i])->dtype;
        const bool product = i != LINEAR_SCAN_DECAY && i != LINEAR_SCAN_STATE;
        if (product && dtype != wide && ml_dtype_holds(wide, dtype))
            sources[i] = ml_cast(g, sources[i], dtype);
    }
}

static ml_ref zeros(ml_graph *g, const ml_type *type) {
    return ml_broadcast(g, ml_const(g, (ml_dtype)type->dtype, 0), type);
}

/* The results of a read at all positions, and the final state. What is written as a sum of outer
 * products is a scan for each of them, all but the first from zeros: the sum of their states is the
 * state, which is linear in what is written. */
static ml_ref scan_new(form *f, const state_read *r, ml_ref *sources, const ml_linear_scan *like,
                       const ml_origin *origin, ml_ref *final) {
    ml_graph *g = f->g;
    ml_linear_scan scan = *like;
    ml_ref y = 0;
    for (int i = 0; i < f->writes; i++) {
        sources[LINEAR_SCAN_K] = operand(f, f->key[i], true);
        sources[LINEAR_SCAN_V] = value_operand(f, f->value[i], scan.values);
        if (i == 1) {
            const ml_type state = *type_of(f, sources[LINEAR_SCAN_STATE]);
            sources[LINEAR_SCAN_STATE] = zeros(g, &state);
        }
        narrow_operands(g, sources, LINEAR_SCAN_FIRST_PAIR + 2 * f->pairs);
        if (f->writes > 1) scan.dtype = (ml_dtype)type_of(f, sources[LINEAR_SCAN_STATE])->dtype;
        ml_graph_set_origin(g, origin);
        const ml_ref made = ml_linear_scan_new(g, sources, &scan), last = ml_out(g, made, 1);
        y = i == 0 ? made : ml_map2(g, ML_OP_ADD, y, made);
        *final = i == 0 ? last : ml_map2(g, ML_OP_ADD, *final, last);
    }
    return r->node ? ml_cast(g, y, (ml_dtype)type_of(f, r->node)->dtype) : y;
}

static void read_one(form *f, state_read *r, const ml_origin *origin) {
    ml_graph *g = f->g;
    const ml_type *keys = &f->keys;
    ml_ref initial = f->s->states[f->state].value, sources[LINEAR_SCAN_MOST_SOURCES], final = 0;
    ml_dtype dtype = ml_compute_dtype((ml_dtype)type_of(f, initial)->dtype);
    initial = merge_keys(f, ml_cast(g, initial, dtype), keys);
    sources[LINEAR_SCAN_Q] = operand(f, r->q, true);
    ml_type shared = shared_type(f, initial, sources[LINEAR_SCAN_Q]);
    sources[LINEAR_SCAN_DECAY] = operand(f, f->decay, affine_has_any(type_of(f, f->decay), keys));
    sources[LINEAR_SCAN_STATE] =
        shared.rank > type_of(f, initial)->rank ? ml_broadcast(g, initial, &shared) : initial;
    for (int i = 0; i < f->pairs; i++) {
        sources[LINEAR_SCAN_FIRST_PAIR + 2 * i] = operand(f, f->u[i], true);
        sources[LINEAR_SCAN_FIRST_PAIR + 2 * i + 1] = operand(f, f->w[i], true);
    }
    const ml_linear_scan scan = {.axis = f->s->axis,
                                 .keys = keys->rank == 1 ? keys->axis[0] : merged_name(f, keys),
                                 .values = own_axis(f, r->q),
                                 .reverse = f->s->reverse,
                                 .after = r->after,
                                 .dtype = r->node ? (ml_dtype)type_of(f, r->node)->dtype : dtype,
                                 .rank = f->pairs};
    const ml_ref made = scan_new(f, r, sources, &scan, origin, &final);
    if (keys->rank > 1) final = split_keys(f, final, keys);
    if (!f->final || shared.rank == type_of(f, initial)->rank) f->final = final_state(f, final);
    if (!r->node) return;
    ml_type read = *type_of(f, r->node), all = with_axis(f, &read);
    r->full =
        type_of(f, made)->rank < all.rank ? ml_broadcast(g, made, &all) : ml_permute(g, made, &all);
    r->parameter = r->instead = ml_recurrence_parameter(g, &read);
    if (!r->rest) return;
    ml_ref rest = ml_cast(g, r->rest, (ml_dtype)read.dtype);
    r->instead = ml_map2(g, ML_OP_ADD, r->parameter, rest);
}

/* ---- What is left of the step ---------------------------------------------------------------- */

/* A node of the step, and what stands for it in what is left. */
typedef struct {
    ml_ref node, instead;
} substitute;

typedef struct {
    ml_recurrence_step step;
    ml_recurrence_pair *inputs, *states;
    ml_ref *next, *stacked;
    const char **names;
    int *state_of, *stacked_of; /* of the whole step */
} rest_step;

/* Room for the parts of a step. */
static rest_step rest_new(ml_graph *g, const ml_recurrence_step *s, int more_inputs) {
    ml_arena *arena = ml_graph_arena(g);
    int most = s->state_count + s->stacked_count + 1, more_stacked = 2 * s->state_count;
    rest_step r = {.step = *s};
    r.inputs = ML_NEW_ARRAY(arena, ml_recurrence_pair, s->input_count + more_inputs + 1);
    r.states = ML_NEW_ARRAY(arena, ml_recurrence_pair, most);
    r.next = ML_NEW_ARRAY(arena, ml_ref, most);
    r.stacked = ML_NEW_ARRAY(arena, ml_ref, most + more_stacked);
    r.names = ML_NEW_ARRAY(arena, const char *, most);
    r.state_of = ML_NEW_ARRAY(arena, int, most);
    r.stacked_of = ML_NEW_ARRAY(arena, int, most + more_stacked);
    if (s->input_count) memcpy(r.inputs, s->inputs, sizeof *r.inputs * (size_t)s->input_count);
    r.step.inputs = r.inputs;
    r.step.states = r.states;
    r.step.next = r.next;
    r.step.stacked = r.stacked;
    r.step.names = s->names ? r.names : NULL;
    r.step.state_count = r.step.stacked_count = 0;
    return r;
}

static void rest_input(rest_step *r, ml_ref parameter, ml_ref value) {
    r->inputs[r->step.input_count++] = (ml_recurrence_pair){parameter, value};
}

static void rest_state(rest_step *r, const ml_recurrence_step *s, int i) {
    int at = r->step.state_count++;
    r->states[at] = s->states[i];
    r->next[at] = s->next[i];
    if (s->names) r->names[at] = s->names[i];
    r->state_of[at] = i;
}

static void rest_stack(rest_step *r, ml_ref n, int of) {
    r->stacked[r->step.stacked_count] = n;
    r->stacked_of[r->step.stacked_count++] = of;
}

/* Puts the substitutes in their places in all that the step gives. */
static void rest_rewrite(ml_graph *g, rest_step *r, const substitute *list, int count) {
    recurrence_body b;
    ml_arena *arena = ml_graph_arena(g);
    ml_origin origin = *g->tables->origins.at[g->origin];
    find_body(&b, g, &r->step);
    ml_ref *instead = ML_NEW_ARRAY(arena, ml_ref, b.body.count + 1);
    for (uint32_t i = 0; i < b.body.count; i++) {
        ml_ref n = instead[i] = b.body.at[i];
        for (int k = 0; k < count; k++)
            if (list[k].node == n) instead[i] = list[k].instead;
        int sources = ml_graph_node(g, n)->source_count;
        if (instead[i] != n || sources == 0) continue;
        ml_ref *changed = ML_NEW_ARRAY(arena, ml_ref, sources);
        bool any = false;
        for (int k = 0; k < sources; k++) {
            ml_ref source = ml_graph_source(g, n, k);
            uint32_t at = recurrence_place(&b, source);
            changed[k] = at == ML_INDEX_NONE ? source : instead[at];
            any = any || changed[k] != source;
        }
        if (any) instead[i] = ml_graph_copy(g, g, n, changed);
    }
    ml_ref *roots[] = {r->next, r->stacked};
    int counts[] = {r->step.state_count, r->step.stacked_count};
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < counts[k]; i++) {
            uint32_t at = recurrence_place(&b, roots[k][i]);
            if (at != ML_INDEX_NONE) roots[k][i] = instead[at];
        }
    ml_graph_set_origin(g, &origin);
}

/* Its outputs, where they are among those of the whole step. */
static void rest_apply(ml_graph *g, const rest_step *r, const ml_recurrence_step *whole,
                       ml_ref *outputs) {
    int stacked = r->step.stacked_count, count = stacked + r->step.state_count;
    if (count == 0) return;
    ml_ref *made = ML_NEW_ARRAY(ml_graph_arena(g), ml_ref, count);
    ml_recurrence_apply(g, &r->step, made);
    for (int i = 0; i < stacked; i++)
        if (r->stacked_of[i] >= 0) outputs[r->stacked_of[i]] = made[i];
    for (int i = 0; i < r->step.state_count; i++)
        outputs[whole->stacked_count + r->state_of[i]] = made[stacked + i];
}

static void apply_linear(form *f, ml_ref *outputs) {
    ml_graph *g = f->g;
    const ml_recurrence_step *s = f->s;
    substitute list[MOST_READS];
    ml_origin origin = *g->tables->origins.at[g->origin];
    rest_step rest = rest_new(g, s, f->read_count);
    int count = 0;
    for (int i = 0; i < f->read_count; i++) {
        state_read *r = &f->reads[i];
        read_one(f, r, &origin);
        if (!r->node) continue;
        rest_input(&rest, r->parameter, r->full);
        list[count++] = (substitute){r->node, r->instead};
    }
    ml_graph_set_origin(g, &origin);
    outputs[s->stacked_count + f->state] = f->final;
    for (int i = 0; i < s->state_count; i++)
        if (i != f->state) rest_state(&rest, s, i);
    for (int i = 0; i < s->stacked_count; i++) rest_stack(&rest, s->stacked[i], i);
    rest_rewrite(g, &rest, list, count);
    rest_apply(g, &rest, s, outputs);
}

/* ---- States of other forms ------------------------------------------------------------------- */

/* Of the states in `set`, those whose values, or whose next values, n needs. */
static void needed(const recurrence_body *b, ml_ref n, uint32_t set, bool *visited,
                   uint32_t *before, uint32_t *after) {
    const ml_recurrence_step *s = b->step;
    uint32_t at = recurrence_place(b, n);
    if (at == ML_INDEX_NONE || !(b->states[at] & set) || visited[at]) return;
    visited[at] = true;
    for (int i = 0; i < s->state_count; i++) {
        if (!(set >> i & 1)) continue;
        if (s->states[i].parameter == n) *before |= 1u << i;
        if (s->next[i] != n) continue;
        if (s->states[i].parameter != n) *after |= 1u << i;
        return;
    }
    for (int k = 0; k < ml_graph_node(b->g, n)->source_count; k++)
        needed(b, ml_graph_source(b->g, n, k), set, visited, before, after);
}

/* The states of a set, which depend on no others, by a recurrence of their own. */
static void apply_alone(ml_graph *g, const ml_recurrence_step *s, uint32_t set, ml_ref *outputs) {
    recurrence_body b;
    uint32_t before = 0, after = 0;
    substitute list[MOST_STATES];
    int count = 0;
    find_body(&b, g, s);
    bool *visited = ml_arena_alloc(ml_graph_arena(g), b.body.count + 1);
    rest_step alone = rest_new(g, s, 0), rest = rest_new(g, s, 2 * s->state_count);
    for (int i = 0; i < s->state_count; i++) rest_state(set >> i & 1 ? &alone : &rest, s, i);
    for (int i = 0; i < s->stacked_count; i++) {
        uint32_t states = states_of(&b, s->stacked[i]);
        rest_stack(states && !(states & ~set) ? &alone : &rest, s->stacked[i], i);
    }
    for (int i = 0; i < rest.step.state_count; i++)
        needed(&b, rest.next[i], set, visited, &before, &after);
    for (int i = 0; i < rest.step.stacked_count; i++)
        needed(&b, rest.stacked[i], set, visited, &before, &after);
    int own = alone.step.stacked_count;
    for (int i = 0; i < s->state_count; i++) {
        if (before >> i & 1) rest_stack(&alone, s->states[i].parameter, -1);
        if (after >> i & 1) rest_stack(&alone, s->next[i], -1);
    }
    int results = alone.step.stacked_count + alone.step.state_count;
    ml_ref *made = ML_NEW_ARRAY(ml_graph_arena(g), ml_ref, results);
    ml_recurrence_apply(g, &alone.step, made);
    for (int i = 0; i < own; i++) outputs[alone.stacked_of[i]] = made[i];
    for (int i = 0; i < alone.step.state_count; i++)
        outputs[s->stacked_count + alone.state_of[i]] = made[alone.step.stacked_count + i];
    for (int i = 0; i < s->state_count; i++) {
        if (before >> i & 1) rest_input(&rest, s->states[i].parameter, made[own++]);
        if (!(after >> i & 1)) continue;
        ml_type type = *ml_graph_type(g, s->next[i]);
        ml_ref parameter = ml_recurrence_parameter(g, &type);
        rest_input(&rest, parameter, made[own++]);
        list[count++] = (substitute){s->next[i], parameter};
    }
    rest_rewrite(g, &rest, list, count);
    rest_apply(g, &rest, s, outputs);
}

/* ---- All of them ----------------------------------------------------------------------------- */

/* Of the states in `left`, the fewest that depend on no others of them. */
static uint32_t first_states(const uint32_t *depends, int count, uint32_t left) {
    uint32_t best = 0;
    for (int i = 0; i < count; i++) {
        if (!(left >> i & 1)) continue;
        uint32_t set = 1u << i, before = 0;
        while (set != before) {
            before = set;
            for (int k = 0; k < count; k++)
                if (before >> k & 1) set |= depends[k] & left;
        }
        if (!best || __builtin_popcount(set) < __builtin_popcount(best)) best = set;
    }
    return best;
}

/* The step as if the states in `known` were computed already: they are inputs. */
static ml_recurrence_step assumed(ml_graph *g, const ml_recurrence_step *s, uint32_t known,
                                  int wanted, int *at) {
    rest_step r = rest_new(g, s, s->state_count);
    for (int i = 0; i < s->state_count; i++) {
        if (i == wanted) *at = r.step.state_count;
        if (!(known >> i & 1)) {
            rest_state(&r, s, i);
            continue;
        }
        ml_type one = *ml_graph_type(g, s->states[i].parameter), all = one;
        all.rank++;
        for (int k = one.rank; k > 0; k--)
            all.axis[k] = one.axis[k - 1], all.size[k] = one.size[k - 1];
        all.axis[0] = s->axis, all.size[0] = s->length;
        rest_input(&r, s->states[i].parameter, ml_broadcast(g, s->states[i].value, &all));
    }
    for (int i = 0; i < s->stacked_count; i++) rest_stack(&r, s->stacked[i], i);
    return r.step;
}

/* The first states, which depend on no others, and whether some state is a linear scan. */
static bool find_linear(ml_graph *g, const ml_recurrence_step *s, uint32_t *first,
                        const char **why) {
    recurrence_body b;
    uint32_t depends[MOST_STATES];
    form f;
    *why = NULL;
    if (s->state_count == 0 || s->state_count > MOST_STATES || s->summed_count) return false;
    for (int i = 0; i < s->state_count; i++)
        if (!ml_type_same_axes(ml_graph_type(g, s->states[i].parameter),
                               ml_graph_type(g, s->next[i])))
            return false; /* an error that ml_recurrence_new reports */
    find_body(&b, g, s);
    for (int i = 0; i < s->state_count; i++) depends[i] = states_of(&b, s->next[i]);
    const uint32_t all = (1u << s->state_count) - 1;
    *first = first_states(depends, s->state_count, all);
    for (uint32_t left = all; left;) {
        uint32_t set = first_states(depends, s->state_count, left);
        int at = 0, state = __builtin_ctz(set);
        f.why = "states depend on one another";
        if ((set & (set - 1)) == 0) {
            ml_recurrence_step one = assumed(g, s, all & ~left, state, &at);
            if (is_linear(&f, g, &one, at)) return true;
        }
        if (!*why) *why = f.why;
        left &= ~set;
    }
    return false;
}

const char *recurrence_refusal(ml_graph *g, const ml_recurrence_step *s) {
    uint32_t first;
    const char *why;
    return find_linear(g, s, &first, &why) ? NULL : why;
}

bool recurrence_match(ml_graph *g, const ml_recurrence_step *s, ml_ref *outputs) {
    uint32_t first;
    const char *why;
    form f;
    if (!find_linear(g, s, &first, &why)) return false;
    if ((first & (first - 1)) == 0 && is_linear(&f, g, s, __builtin_ctz(first)))
        apply_linear(&f, outputs);
    else
        apply_alone(g, s, first, outputs);
    return true;
}
