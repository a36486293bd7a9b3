/* Parts of a LINEAR_SCAN as affine maps of states. */
#include "runtime/ops/linear_scan/parts.h"

#include "runtime/ops/recurrence/recurrence.h"

static ml_dtype state_dtype(const ml_graph *g, const ml_ref *sources) {
    return (ml_dtype)ml_graph_type(g, sources[LINEAR_SCAN_STATE])->dtype;
}

/* a b, where neither may have all axes. */
static ml_ref product(ml_graph *g, ml_ref a, ml_ref b) {
    ml_type all = *ml_graph_type(g, a);
    const ml_type *t = ml_graph_type(g, b);
    const int rank = all.rank;
    for (int i = 0; i < t->rank; i++) {
        if (ml_type_find(&all, t->axis[i]) >= 0) continue;
        if (all.rank == ML_MAX_AXES)
            ml_raise(ML_INVALID, "a scan's operands have more than %d axes", ML_MAX_AXES);
        all.axis[all.rank] = t->axis[i];
        all.size[all.rank++] = t->size[i];
    }
    if (all.rank > rank) a = ml_broadcast(g, a, &all);
    return ml_map2(g, ML_OP_MUL, a, b);
}

/* The product of the decays behind each position, in the scan's direction, and that of all. */
static ml_ref decays_behind(ml_graph *g, ml_ref a, const ml_linear_scan *scan, ml_ref *all) {
    ml_type slice;
    ml_recurrence_slice(g, a, scan->axis, scan->length, &slice);
    const ml_recurrence_pair in = {ml_recurrence_parameter(g, &slice), a};
    const ml_recurrence_pair state = {
        ml_recurrence_parameter(g, &slice),
        ml_broadcast(g, ml_const(g, (ml_dtype)slice.dtype, 1), &slice)};
    const ml_ref next = ml_map2(g, ML_OP_MUL, state.parameter, in.parameter);
    const ml_recurrence_step step = {.axis = scan->axis,
                                     .reverse = !scan->reverse,
                                     .length = scan->length,
                                     .inputs = &in,
                                     .input_count = 1,
                                     .states = &state,
                                     .state_count = 1,
                                     .next = &next,
                                     .stacked = &state.parameter,
                                     .stacked_count = 1};
    const ml_ref behind = ml_recurrence_new(g, &step);
    *all = ml_out(g, behind, 1);
    return behind;
}

static ml_ref in_order(ml_graph *g, ml_ref n, const ml_type *as) {
    return ml_graph_type(g, n)->rank < as->rank ? ml_broadcast(g, n, as) : ml_permute(g, n, as);
}

/* Without low rank: one product over the positions. */
static linear_scan_map map_of_decays(ml_graph *g, const ml_ref *sources,
                                     const ml_linear_scan *scan) {
    const ml_type state = *ml_graph_type(g, sources[LINEAR_SCAN_STATE]);
    const ml_dtype dtype = (ml_dtype)state.dtype;
    const ml_ref k = sources[LINEAR_SCAN_K], v = sources[LINEAR_SCAN_V];
    linear_scan_map map;
    ml_ref behind =
        decays_behind(g, ml_cast(g, sources[LINEAR_SCAN_DECAY], dtype), scan, &map.total);
    ml_ref keys = product(g, ml_cast(g, k, dtype), behind);
    keys = ml_cast(g, keys, (ml_dtype)ml_graph_type(g, k)->dtype);
    map.last = ml_dot(g, keys, v, &scan->axis, 1, dtype);
    map.last = in_order(g, map.last, &state);
    return map;
}

/* The keys of a state before a map. The values of a scan that is itself a map's are keys before it.
 */
static ml_axis from_keys(ml_graph *g, const ml_linear_scan *scan) {
    const char *name = ml_axis_name(g, scan->keys);
    ml_axis from;
    do {
        name = ml_arena_format(ml_graph_arena(g), "%s'from", name);
        from = ml_axis_named(g, name);
    } while (from == scan->values);
    return from;
}

/* {keys, from, batch...}: 1 where both are the same. */
static ml_ref identity(ml_graph *g, const ml_linear_scan *scan, ml_type state, ml_axis from) {
    const int at = scan->values ? ml_type_find(&state, scan->values) : state.rank++;
    state.axis[at] = from;
    state.size[at] = scan->key_size;
    const ml_type pairs = {.dtype = ML_I32,
                           .rank = 2,
                           .axis = {scan->keys, from},
                           .size = {scan->key_size, scan->key_size}};
    ml_ref row = ml_broadcast(g, ml_iota(g, scan->keys, scan->key_size), &pairs);
    ml_ref same = ml_map2(g, ML_OP_EQ, row, ml_iota(g, from, scan->key_size));
    return ml_broadcast(g, ml_cast(g, same, (ml_dtype)state.dtype), &state);
}

/* {keys, from, batch...} with keys and from exchanged. */
static ml_ref transposed_total(ml_graph *g, ml_ref total, ml_axis keys, ml_axis from) {
    const ml_type type = *ml_graph_type(g, total);
    const ml_axis other =
        ml_axis_named(g, ml_arena_format(ml_graph_arena(g), "%s'to", ml_axis_name(g, keys)));
    total = ml_rename(g, total, keys, other);
    total = ml_rename(g, total, from, keys);
    return ml_permute(g, ml_rename(g, total, other, from), &type);
}

/* The product of the transitions: the scan from the identity, without input. One node serves the
 * scan, the scan that its gradient is (in the other direction, by transposed transitions, whose
 * product is the transposed one) and scans of which either is the map: axis names, direction, and
 * the operands that do not matter are the same. */
static ml_ref total_of(ml_graph *g, const ml_ref *sources, const ml_linear_scan *scan) {
    const ml_type state = *ml_graph_type(g, sources[LINEAR_SCAN_STATE]);
    ml_linear_scan square = *scan;
    ml_ref own[LINEAR_SCAN_MOST_SOURCES];
    for (int i = 0; i < LINEAR_SCAN_FIRST_PAIR; i++) own[i] = sources[i];
    for (int i = 0; i < 2 * scan->rank; i++)
        own[LINEAR_SCAN_FIRST_PAIR + i] = sources[LINEAR_SCAN_FIRST_PAIR + (i ^ scan->reverse)];
    square.values = 0;
    square.values = from_keys(g, &square);
    square.value_size = scan->key_size;
    square.reverse = false;
    square.after = true;
    const ml_type none = {.dtype = ml_graph_type(g, sources[LINEAR_SCAN_V])->dtype,
                          .rank = 2,
                          .axis = {scan->axis, square.values},
                          .size = {scan->length, scan->key_size}};
    own[LINEAR_SCAN_K] = own[LINEAR_SCAN_Q];
    own[LINEAR_SCAN_V] = ml_broadcast(g, ml_const(g, (ml_dtype)none.dtype, 0), &none);
    own[LINEAR_SCAN_STATE] = identity(g, scan, state, square.values);
    ml_ref total = ml_out(g, ml_linear_scan_new(g, own, &square), 1);
    if (scan->reverse) total = transposed_total(g, total, scan->keys, square.values);
    return ml_rename(g, total, square.values, from_keys(g, scan));
}

/* 0 everywhere: a constant, seen through views. */
static bool is_zero(const ml_graph *g, ml_ref n) {
    double value;
    while (!ml_graph_constant(g, n, &value)) {
        const ml_node *node = ml_graph_node(g, n);
        if (!ml_op_is((ml_op)node->op, ML_VIEW) || node->source_count != 1) return false;
        n = ml_graph_source(g, n, 0);
    }
    return value == 0;
}

/* The scan from a zero state; 0 where nothing is written. */
static ml_ref last_of(ml_graph *g, const ml_ref *sources, const ml_linear_scan *scan) {
    if (is_zero(g, sources[LINEAR_SCAN_V])) return 0;
    ml_ref own[LINEAR_SCAN_MOST_SOURCES];
    for (int i = 0; i < LINEAR_SCAN_FIRST_PAIR + 2 * scan->rank; i++) own[i] = sources[i];
    const ml_type *state = ml_graph_type(g, sources[LINEAR_SCAN_STATE]);
    own[LINEAR_SCAN_STATE] = ml_broadcast(g, ml_const(g, (ml_dtype)state->dtype, 0), state);
    return ml_out(g, ml_linear_scan_new(g, own, scan), 1);
}

linear_scan_map linear_scan_map_of(ml_graph *g, const ml_ref *sources, const ml_linear_scan *scan) {
    if (!scan->rank) return map_of_decays(g, sources, scan);
    return (linear_scan_map){last_of(g, sources, scan), total_of(g, sources, scan)};
}

ml_ref linear_scan_chain(ml_graph *g, const linear_scan_map *maps, ml_axis parts, ml_ref first,
                         const ml_linear_scan *scan, ml_ref *final) {
    const ml_type state = *ml_graph_type(g, first);
    const int64_t count = ml_type_size(ml_graph_type(g, maps->total), parts);
    const ml_ref sources[] = {maps->total, maps->last};
    const int inputs = maps->last ? 2 : 1;
    ml_recurrence_pair in[2];
    for (int i = 0; i < inputs; i++) {
        ml_type slice;
        ml_recurrence_slice(g, sources[i], parts, count, &slice);
        in[i] = (ml_recurrence_pair){ml_recurrence_parameter(g, &slice), sources[i]};
    }
    const ml_recurrence_pair before = {ml_recurrence_parameter(g, &state), first};
    ml_ref next;
    if (scan->rank) {
        const ml_axis from = from_keys(g, scan);
        const ml_ref renamed = ml_rename(g, before.parameter, scan->keys, from);
        next = ml_dot(g, in[0].parameter, renamed, &from, 1, (ml_dtype)state.dtype);
        next = ml_permute(g, next, &state);
    } else
        next = ml_map2(g, ML_OP_MUL, before.parameter, in[0].parameter);
    if (maps->last) next = ml_map2(g, ML_OP_ADD, next, in[1].parameter);
    next = ml_permute(g, next, &state);
    const ml_recurrence_step step = {.axis = parts,
                                     .reverse = scan->reverse,
                                     .length = count,
                                     .inputs = in,
                                     .input_count = inputs,
                                     .states = &before,
                                     .state_count = 1,
                                     .next = &next,
                                     .stacked = &before.parameter,
                                     .stacked_count = 1};
    const ml_ref chain = ml_recurrence_new(g, &step);
    *final = ml_out(g, chain, 1);
    return chain;
}

/* The transposed transition of each position times q. */
static ml_ref transposed(ml_graph *g, const ml_ref *sources, const ml_linear_scan *scan) {
    const ml_dtype dtype = state_dtype(g, sources);
    const ml_dtype narrow = (ml_dtype)ml_graph_type(g, sources[LINEAR_SCAN_Q])->dtype;
    const ml_ref q = ml_cast(g, sources[LINEAR_SCAN_Q], dtype);
    ml_ref sum = product(g, q, ml_cast(g, sources[LINEAR_SCAN_DECAY], dtype));
    for (int r = 0; r < scan->rank; r++) {
        const ml_ref u = ml_cast(g, sources[LINEAR_SCAN_FIRST_PAIR + 2 * r], dtype);
        const ml_ref w = ml_cast(g, sources[LINEAR_SCAN_FIRST_PAIR + 2 * r + 1], dtype);
        const ml_ref uq = ml_reduce(g, ML_OP_SUM, product(g, u, q), &scan->keys, 1);
        const ml_ref term = product(g, w, uq);
        const ml_type *t = ml_graph_type(g, term);
        if (t->rank > ml_graph_type(g, sum)->rank) sum = ml_broadcast(g, sum, t);
        sum = ml_map2(g, ML_OP_ADD, sum, term);
    }
    return ml_cast(g, sum, narrow);
}

void linear_scan_adjoint(ml_graph *g, const ml_ref *sources, ml_ref dy, const ml_linear_scan *scan,
                         ml_ref *adjoint_sources, ml_linear_scan *adjoint) {
    *adjoint = *scan;
    adjoint->reverse = !scan->reverse;
    adjoint->after = true;
    for (int r = 0; r < scan->rank; r++) { /* (u w^T)^T */
        const int at = LINEAR_SCAN_FIRST_PAIR + 2 * r;
        adjoint_sources[at] = sources[at + 1];
        adjoint_sources[at + 1] = sources[at];
    }
    const ml_ref q = sources[LINEAR_SCAN_Q];
    adjoint_sources[LINEAR_SCAN_Q] = q;
    adjoint_sources[LINEAR_SCAN_K] = scan->after ? transposed(g, sources, scan) : q;
    adjoint_sources[LINEAR_SCAN_V] =
        ml_cast(g, dy, (ml_dtype)ml_graph_type(g, sources[LINEAR_SCAN_V])->dtype);
    adjoint_sources[LINEAR_SCAN_DECAY] = sources[LINEAR_SCAN_DECAY];
    adjoint_sources[LINEAR_SCAN_STATE] = sources[LINEAR_SCAN_STATE];
}
