/* How the work of each op of the core can be cut over one mesh axis.
 *
 * A cut is along one axis of the op's index space: sources that have the axis are needed split
 * along it and others whole; a result that has it is split, one that sums over it is partial. */
#include <string.h>

#include "runtime/shard/shard_internal.h"

enum { FEW = 8 };

int shard_preference(const sharder *s, ml_axis axis) {
    const ml_mesh_axis *mesh = &s->layout->axis[s->mesh];
    for (int i = 0; i < mesh->acts_count; i++)
        if (mesh->acts[i] == axis) return i;
    for (int i = 0; i < mesh->params_count; i++)
        if (mesh->params[i] == axis) return SHARD_PARAMS + i;
    return SHARD_UNLISTED;
}

shard_strategy *shard_strategy_new(sharder *s, ml_ref n, int preference) {
    int sources = ml_graph_node(s->from, n)->source_count;
    while (s->pool.count < s->pool_count + (uint32_t)sources) (void)ML_PUSH(s->scratch, &s->pool);
    if (s->strategy_count == s->strategies.count) (void)ML_PUSH(s->scratch, &s->strategies);
    shard_strategy *out = &s->strategies.at[s->strategy_count++];
    *out = (shard_strategy){.preference = preference, .sources = s->pool_count};
    for (int k = 0; k < sources; k++) s->pool.at[s->pool_count++] = (ml_placement){0};
    return out;
}

ml_placement shard_repeated(const sharder *s, ml_ref n, ml_placement over) {
    if (over.kind != ML_SPLIT && over.kind != ML_OWNED && over.kind < ML_SENT) return over;
    const ml_type *t = ml_graph_type(s->from, n);
    const ml_type *source = ml_graph_type(s->from, ml_graph_source(s->from, n, 0));
    int position = ml_type_find(source, t->axis[over.axis]);
    if (position >= 0 && over.kind == ML_SENT)
        return (ml_placement){ML_SENT, (uint8_t)position,
                              (uint8_t)ml_type_find(source, t->axis[over.batch])};
    if (position < 0) return (ml_placement){0};
    return (ml_placement){over.kind, (uint8_t)position, over.batch, over.within};
}

static bool has_version(const sharder *s, ml_ref n, ml_placement over) {
    while (s->values[n].repeats) {
        ml_placement inner = shard_repeated(s, n, over);
        if (over.kind != inner.kind || (over.kind != ML_SPLIT && over.kind != ML_SHARED_SUM))
            return false;
        over = inner;
        n = ml_graph_source(s->from, n, 0);
    }
    for (uint32_t v = shard_next_version(s, n, 0); v; v = shard_next_version(s, n, v))
        if (shard_same(s->versions.at[v].at.over[s->mesh], over)) return true;
    return false;
}

int shard_own_rows(const sharder *s, ml_ref n) {
    if (s->values[n].repeats) {
        ml_ref source = ml_graph_source(s->from, n, 0);
        int row = shard_own_rows(s, source);
        if (row < 0) return -1;
        return ml_type_find(ml_graph_type(s->from, n), ml_graph_type(s->from, source)->axis[row]);
    }
    for (uint32_t v = shard_next_version(s, n, 0); v; v = shard_next_version(s, n, v))
        if (s->versions.at[v].at.over[s->mesh].kind == ML_OWNED)
            return s->versions.at[v].at.over[s->mesh].axis;
    return -1;
}

const ml_ref *shard_owner(const sharder *s, ml_ref n) {
    while (s->values[n].repeats) n = ml_graph_source(s->from, n, 0);
    return s->values[n].owner;
}

bool shard_source_has(const sharder *s, ml_ref n, int k, ml_placement over) {
    return has_version(s, ml_graph_source(s->from, n, k), over);
}

bool shard_candidate(const sharder *s, ml_ref n, ml_axis axis, const int *source_positions) {
    int rank = shard_preference(s, axis);
    if (rank < SHARD_PARAMS || (rank < SHARD_UNLISTED && s->values[n].params)) return true;
    for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
        if (source_positions[k] >= 0 && shard_source_has(s, n, k, shard_split(source_positions[k])))
            return true;
    return false;
}

/* How ZeRO-1 splits a sum of gradients over this mesh axis; whole where it does not. */
static ml_placement flat_place(const sharder *s, ml_ref n) {
    const ml_placement whole = {0};
    if (!s->layout->axis[s->mesh].flat || !s->values[n].params) return whole;
    const ml_type *t = ml_graph_type(s->from, n);
    ml_placement flat =
        ml_layout_place(s->layout, s->from, t, ML_STATE_OPTIMIZER, NULL).over[s->mesh];
    for (int k = 0; k < ml_graph_node(s->from, n)->source_count && flat.kind == ML_SPLIT; k++)
        if (shard_source_has(s, n, k, (ml_placement){ML_PARTIAL_SUM, 0})) return flat;
    return whole;
}

static ml_placement split_within(int position) {
    return (ml_placement){ML_SPLIT, (uint8_t)position, .within = 1};
}

static bool source_is_within(const sharder *s, ml_ref n, const int *source_positions) {
    for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
        if (source_positions[k] >= 0 &&
            shard_source_has(s, n, k, split_within(source_positions[k])))
            return true;
    return false;
}

const ml_type *shard_source_type(const sharder *s, ml_ref n, int k) {
    return ml_graph_type(s->from, ml_graph_source(s->from, n, k));
}

/* The size of the axis that is cut, where it is one size wherever it is found; else 0. */
static int64_t size_cut(const sharder *s, ml_ref n, const int *source_positions, int out) {
    int64_t size = out >= 0 ? ml_graph_type(s->from, n)->size[out] : -1;
    for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++) {
        if (source_positions[k] < 0) continue;
        int64_t other = shard_source_type(s, n, k)->size[source_positions[k]];
        if (size >= 0 && size != other) return 0;
        size = other;
    }
    return size < 0 ? 0 : size;
}

/* Whether parts may be filled up here (README.md): elements keep their places along the axis, or a
 * reduction leaves out what fills it up (shard_local.c); and each rank has room for an element. */
static bool may_be_filled(const sharder *s, ml_ref n, const int *source_positions, int out) {
    return size_cut(s, n, source_positions, out) >= s->layout->axis[s->mesh].size;
}

static bool is_uneven(const sharder *s, ml_ref n, const int *source_positions, int out) {
    int64_t ranks = s->layout->axis[s->mesh].size;
    if (out >= 0 && ml_graph_type(s->from, n)->size[out] % ranks) return true;
    for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
        if (source_positions[k] >= 0 &&
            shard_source_type(s, n, k)->size[source_positions[k]] % ranks)
            return true;
    return false;
}

/* Source k is a sum over groups, and the op is linear in it, so that others may be shared. */
static bool sums_groups(const sharder *s, ml_ref n, int k, int position, int64_t size) {
    ml_op op = ml_graph_node(s->from, n)->op;
    if (position < 0 || !shard_source_has(s, n, k, shard_shared_sum(position, size))) return false;
    if (op == ML_OP_CONCAT) return true;
    if (k == 0 && (ml_op_moves(op) || op == ML_OP_STOP_GRADIENT)) return true;
    if (op == ML_OP_CAST)
        return ml_is_float(ml_graph_type(s->from, n)->dtype) &&
               ml_is_float(shard_source_type(s, n, 0)->dtype);
    ml_linear linear = ml_ops[op].linear;
    return (linear == ML_LINEAR_A && k == 0) || (linear == ML_LINEAR_B && k == 1) ||
           linear == ML_LINEAR_EACH || linear == ML_LINEAR_JOINT;
}

/* Along key/value heads of which there are fewer than ranks, a group of ranks shares the work of
 * one: of values that all of the group have, or of sums over the group. */
static void share(sharder *s, ml_ref n, ml_axis axis, const int *source_positions, int out) {
    const ml_node *node = ml_graph_node(s->from, n);
    int64_t size = size_cut(s, n, source_positions, out), ranks = s->layout->axis[s->mesh].size;
    int rank = shard_preference(s, axis), sum = -1;
    bool joint = ml_ops[node->op].linear == ML_LINEAR_JOINT || node->op == ML_OP_CONCAT;
    bool all = joint;
    if (axis != s->shared || size < 1 || size >= ranks || ranks % size || size > UINT8_MAX) return;
    if (rank >= SHARD_PARAMS) return;
    for (int k = 0; k < node->source_count; k++) {
        bool sums = sums_groups(s, n, k, source_positions[k], size);
        if (sums) sum = k;
        all = all && sums;
    }
    if (sum < 0 && (out < 0 || s->values[n].params || size == 1)) return;
    if (joint && sum >= 0 && !all) return;
    shard_strategy *to = shard_strategy_new(s, n, rank);
    for (int k = 0; k < node->source_count; k++) {
        ml_placement *need = &s->pool.at[to->sources + (uint32_t)k];
        if (source_positions[k] < 0) continue;
        *need = sum == k || (sum >= 0 && joint) ? shard_shared_sum(source_positions[k], size)
                                                : shard_shared(source_positions[k], size);
    }
    ml_placement result = out < 0   ? (ml_placement){ML_PARTIAL_SUM, 0}
                          : sum < 0 ? shard_shared(out, size)
                                    : shard_shared_sum(out, size);
    for (int i = 0; i < ML_MAX_OUTPUTS; i++) to->out[i] = result;
}

static void cut_in_parts(sharder *s, ml_ref n, ml_axis axis, const int *source_positions, int out,
                         ml_placement_kind combine, bool uneven) {
    ml_placement flat = out >= 0 ? flat_place(s, n) : (ml_placement){0};
    bool is_flat = shard_along(flat, out);
    bool wanted[2] = {(is_flat && !flat.within) || shard_candidate(s, n, axis, source_positions),
                      (is_flat && flat.within) || source_is_within(s, n, source_positions)};
    for (int within = 0; within < 2; within++) {
        if (!wanted[within]) continue;
        shard_strategy *to = shard_strategy_new(s, n, shard_preference(s, axis));
        to->uneven = uneven;
        for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
            if (source_positions[k] >= 0)
                s->pool.at[to->sources + (uint32_t)k] =
                    within ? split_within(source_positions[k]) : shard_split(source_positions[k]);
        ml_placement result = out < 0  ? (ml_placement){(uint8_t)combine, 0}
                              : within ? split_within(out)
                                       : shard_split(out);
        for (int i = 0; i < ML_MAX_OUTPUTS; i++) to->out[i] = result;
    }
}

void shard_cut_along(sharder *s, ml_ref n, ml_axis axis, const int *source_positions, int out,
                     ml_placement_kind combine) {
    share(s, n, axis, source_positions, out);
    bool uneven = is_uneven(s, n, source_positions, out);
    if (uneven && !may_be_filled(s, n, source_positions, out)) return;
    cut_in_parts(s, n, axis, source_positions, out, combine, uneven);
}

void shard_cut_evenly(sharder *s, ml_ref n, ml_axis axis, const int *source_positions, int out,
                      ml_placement_kind combine) {
    if (!is_uneven(s, n, source_positions, out))
        cut_in_parts(s, n, axis, source_positions, out, combine, false);
}

static int *positions(sharder *s, ml_ref n, int few[FEW]) {
    int count = ml_graph_node(s->from, n)->source_count;
    int *at = count > FEW ? ML_NEW_ARRAY(s->scratch, int, count) : few;
    for (int k = 0; k < count; k++) at[k] = -1;
    return at;
}

/* Each axis of the result, found by name in the sources. Not along `except`. */
static void by_name(sharder *s, ml_ref n, ml_axis except) {
    const ml_type *t = ml_graph_type(s->from, n);
    int few[FEW], *at = positions(s, n, few);
    for (int i = 0; i < t->rank; i++) {
        if (t->axis[i] == except) continue;
        for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
            at[k] = ml_type_find(shard_source_type(s, n, k), t->axis[i]);
        shard_cut_along(s, n, t->axis[i], at, i, 0);
    }
}

/* Axes at the same place in the one source and in the result, but for the one at `except`. */
static void by_position(sharder *s, ml_ref n, int except) {
    const ml_type *t = ml_graph_type(s->from, n), *from = shard_source_type(s, n, 0);
    for (int i = 0; i < t->rank; i++)
        if (i != except)
            shard_cut_along(
                s, n, shard_preference(s, t->axis[i]) < SHARD_UNLISTED ? t->axis[i] : from->axis[i],
                &i, i, 0);
}

/* The outer part of an axis that is split can be cut as the whole axis is. */
static void propose_split(sharder *s, ml_ref n) {
    const ml_type *t = ml_graph_type(s->from, n), *from = shard_source_type(s, n, 0);
    int outer = ml_type_find(from, (ml_axis)ml_graph_args(s->from, n)[0]);
    for (int i = 0; i < t->rank; i++) {
        if (i == outer + 1) continue;
        int source = i > outer ? i - 1 : i;
        ml_axis name = t->axis[i];
        if (shard_preference(s, name) == SHARD_UNLISTED) name = from->axis[source];
        shard_cut_along(s, n, name, &source, i, 0);
    }
}

/* What a text calls a node: its name and line. */
static const char *node_text(const sharder *s, ml_ref n) {
    const ml_origin *origin = ml_graph_origin(s->from, n);
    const char *name = origin->name ? origin->name : "a tensor";
    if (!origin->file) return name;
    return ml_arena_format(s->scratch, "%s (%s:%d)", name, origin->file, origin->line);
}

/* The placement that PLACE asks for over this mesh axis; false where it asks for none. */
static bool propose_place(sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    const ml_type *t = ml_graph_type(s->from, n);
    const int64_t *args = ml_graph_args(s->from, n);
    int64_t parts = s->layout->axis[s->mesh].size;
    int asked = -1;
    for (int i = 0; i < node->arg_count; i += 2)
        if (strcmp(ml_axis_name(s->from, (ml_axis)args[i]), s->layout->axis[s->mesh].name) == 0)
            asked = i + 1;
    if (asked < 0) return false;
    shard_strategy *to = shard_strategy_new(s, n, SHARD_RELABEL);
    if (!args[asked]) return true;
    int position = ml_type_find(t, (ml_axis)args[asked]);
    for (int i = 0; i < s->mesh; i++)
        if (shard_same(s->need[0].over[i], shard_split(position))) parts *= s->layout->axis[i].size;
    to->uneven = t->size[position] % parts != 0;
    if (to->uneven && (parts > s->layout->axis[s->mesh].size || parts > t->size[position]))
        ml_layout_indivisible(s->layout, s->from, t, s->need, s->mesh, position, node_text(s, n));
    s->pool.at[to->sources] = to->out[0] = shard_split(position);
    return true;
}

static void propose_merge(sharder *s, ml_ref n) {
    const int64_t *args = ml_graph_args(s->from, n);
    const ml_type *t = ml_graph_type(s->from, n), *from = shard_source_type(s, n, 0);
    int merged = ml_type_find(t, (ml_axis)args[2]);
    for (int i = 0; i < t->rank; i++) {
        ml_axis old = i == merged ? (ml_axis)args[0] : t->axis[i];
        int source = ml_type_find(from, old);
        ml_axis name = shard_preference(s, t->axis[i]) < SHARD_UNLISTED ? t->axis[i] : old;
        shard_cut_along(s, n, name, &source, i, 0);
    }
}

/* Along the gathered axis, each rank finds what lies in its part and 0 elsewhere. */
static void propose_gather(sharder *s, ml_ref n) {
    ml_axis axis = (ml_axis)ml_graph_args(s->from, n)[0];
    const ml_type *t = ml_graph_type(s->from, n);
    const ml_type *table = shard_source_type(s, n, 0), *index = shard_source_type(s, n, 1);
    for (int i = 0; i < t->rank; i++) {
        bool own = t->axis[i] == axis; /* an axis of the index with the gathered axis' name */
        int at[2] = {own ? -1 : ml_type_find(table, t->axis[i]), ml_type_find(index, t->axis[i])};
        shard_cut_along(s, n, t->axis[i], at, i, 0);
    }
    if (t->dtype == ML_BOOL) return;
    int at[2] = {ml_type_find(table, axis), -1};
    shard_cut_along(s, n, axis, at, -1, ML_PARTIAL_SUM);
}

static void propose_scatter(sharder *s, ml_ref n) {
    ml_axis axis = (ml_axis)ml_graph_args(s->from, n)[0];
    const ml_type *t = ml_graph_type(s->from, n);
    const ml_type *index = shard_source_type(s, n, 0), *value = shard_source_type(s, n, 1);
    for (int i = 0; i < value->rank; i++) {
        int at[2] = {ml_type_find(index, value->axis[i]), i};
        int out = value->axis[i] == axis ? -1 : ml_type_find(t, value->axis[i]);
        shard_cut_along(s, n, value->axis[i], at, out, ML_PARTIAL_SUM);
    }
    int at[2] = {-1, -1};
    shard_cut_along(s, n, axis, at, ml_type_find(t, axis), 0);
}

/* Along the axes of a row; all ranks write all rows. */
static void propose_write_rows(sharder *s, ml_ref n) {
    const ml_type *t = ml_graph_type(s->from, n), *value = shard_source_type(s, n, 2);
    ml_axis axis = (ml_axis)ml_graph_args(s->from, n)[0];
    for (int i = 0; i < t->rank; i++) {
        int at[3] = {i, -1, ml_type_find(value, t->axis[i])};
        if (t->axis[i] != axis) shard_cut_along(s, n, t->axis[i], at, i, 0);
    }
}

static ml_placement_kind combine_of(ml_op op) {
    return op == ML_OP_MAX ? ML_PARTIAL_MAX : op == ML_OP_MIN ? ML_PARTIAL_MIN : ML_PARTIAL_SUM;
}

static void propose_reduced(sharder *s, ml_ref n) {
    ml_op op = ml_graph_node(s->from, n)->op;
    by_name(s, n, 0);
    for (int i = 0; i < ml_graph_node(s->from, n)->arg_count; i++) {
        ml_axis axis = (ml_axis)ml_graph_args(s->from, n)[i];
        int at[3] = {-1, -1, -1}; /* DOT may have a scale */
        for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
            at[k] = ml_type_find(shard_source_type(s, n, k), axis);
        shard_cut_along(s, n, axis, at, -1, combine_of(op));
    }
}

/* ---- Partial operands ------------------------------------------------------------------------ */

static bool is_zero(const sharder *s, ml_ref n) {
    double value;
    return ml_graph_constant(s->from, n, &value) && value == 0;
}

/* Whether source k may stay partial: it has been combined nowhere else, nor will be. */
static bool partial(const sharder *s, ml_ref n, int k, ml_placement_kind kind) {
    ml_ref source = ml_graph_source(s->from, n, k);
    if (s->values[source].users != 1) return false;
    if (kind == ML_PARTIAL_SUM && !s->values[source].repeats && shard_own_rows(s, source) >= 0)
        return true; /* rows of others can be cleared */
    return has_version(s, source, (ml_placement){kind, 0});
}

/* Each source is a number that is whole, or that may stay partial. */
static bool whole_or(const sharder *s, ml_ref n) {
    for (int k = 0; k < 2; k++)
        if (!partial(s, n, k, ML_PARTIAL_SUM) && !shard_source_has(s, n, k, (ml_placement){0}))
            return false;
    return true;
}

/* Which sources of a linear op must be partial for the result to be: bits; 0: it cannot be. */
static unsigned partial_sources(const sharder *s, ml_ref n, ml_placement_kind kind) {
    const ml_node *node = ml_graph_node(s->from, n);
    const ml_type *t = ml_graph_type(s->from, n);
    bool first = node->source_count > 0 && partial(s, n, 0, kind);
    bool second = node->source_count > 1 && partial(s, n, 1, kind);
    bool sum = kind == ML_PARTIAL_SUM;
    if (ml_op_moves(node->op) || node->op == ML_OP_GATHER || node->op == ML_OP_STOP_GRADIENT)
        return first ? 1 : 0;
    if (node->op == ML_OP_MAX) return kind == ML_PARTIAL_MAX && first ? 1 : 0;
    if (node->op == ML_OP_MIN) return kind == ML_PARTIAL_MIN && first ? 1 : 0;
    if (node->op == ML_OP_CAST) { /* sums of gradients keep all their bits */
        const ml_type *from = shard_source_type(s, n, 0);
        bool wider = ml_is_float(t->dtype) && ml_is_float(from->dtype) &&
                     ml_dtypes[t->dtype].promotion > ml_dtypes[from->dtype].promotion;
        return wider && s->values[n].params && first ? 1 : 0;
    }
    if (!sum) return 0;
    switch (ml_ops[node->op].linear) {
    case ML_LINEAR_NO: return 0;
    case ML_LINEAR_A: return first ? 1 : 0;
    case ML_LINEAR_B: return second ? 2 : 0;
    case ML_LINEAR_EACH: return first == second ? 0 : first ? 1 : 2;
    case ML_LINEAR_JOINT: /* what is added to a sum becomes one, and so do numbers: norms of tensors
                             that are split and of others */
        if (first && second) return 3;
        if (!first && !second) return 0;
        return s->values[n].added || (t->rank == 0 && whole_or(s, n)) ? 3 : 0;
    case ML_LINEAR_CHOSEN: {
        bool third = partial(s, n, 2, kind);
        if (!second && !third) return 0;
        if (s->values[n].added) return 6;
        if (!second && !is_zero(s, ml_graph_source(s->from, n, 1))) return 0;
        if (!third && !is_zero(s, ml_graph_source(s->from, n, 2))) return 0;
        return (second ? 2u : 0) | (third ? 4u : 0);
    }
    }
    return 0;
}

/* What only gives elements other names is best done before they are combined: that may be
 * elsewhere. */
static int partial_rank(const sharder *s, ml_ref n) {
    ml_op op = ml_graph_node(s->from, n)->op;
    return ml_op_is(op, ML_BIJECTIVE) || op == ML_OP_STOP_GRADIENT ? SHARD_RELABEL
                                                                   : SHARD_KEEP_PARTIAL;
}

void shard_propose_partial(sharder *s, ml_ref n) {
    int count = ml_graph_node(s->from, n)->source_count;
    for (int kind = ML_PARTIAL_SUM; kind <= ML_PARTIAL_MIN; kind++) {
        unsigned sources = 0;
        if (ml_graph_node(s->from, n)->op == ML_OP_CONCAT) {
            bool all = true;
            for (int k = 0; k < count && all; k++) all = partial(s, n, k, kind);
            sources = all ? ~0u : 0;
        } else
            sources = partial_sources(s, n, kind);
        if (!sources) continue;
        shard_strategy *to = shard_strategy_new(s, n, partial_rank(s, n));
        for (int k = 0; k < count; k++)
            if (sources == ~0u || sources >> k & 1)
                s->pool.at[to->sources + (uint32_t)k] = (ml_placement){(uint8_t)kind, 0};
        to->out[0] = (ml_placement){(uint8_t)kind, 0};
    }
}

static void propose_rest(sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    const int64_t *args = ml_graph_args(s->from, n);
    switch ((ml_rest_op)node->op) {
    case ML_OP_CONST:
    case ML_OP_IOTA:
    case ML_OP_STATE:
    case ML_OP_INPUT:
    case ML_OP_PARAM:
    case ML_OP_COORDINATE:
    case ML_OP_OUT: break; /* their placement is decided elsewhere */
    case ML_OP_PLACE:
    case ML_OP_BROADCAST:
    case ML_OP_PERMUTE:
    case ML_OP_ARGMAX: by_name(s, n, 0); break;
    case ML_OP_RENAME: by_position(s, n, -1); break;
    case ML_OP_SLICE:
    case ML_OP_PAD:
    case ML_OP_CONCAT:
    case ML_OP_CUMSUM:
    case ML_OP_SORT: by_name(s, n, (ml_axis)args[0]); break;
    case ML_OP_TOP_K:
        by_position(s, n, ml_type_find(shard_source_type(s, n, 0), (ml_axis)args[0]));
        break;
    case ML_OP_SPLIT: propose_split(s, n); break;
    case ML_OP_MERGE: propose_merge(s, n); break;
    case ML_OP_GATHER: propose_gather(s, n); break;
    case ML_OP_SCATTER_ADD: propose_scatter(s, n); break;
    case ML_OP_SUM:
    case ML_OP_MAX:
    case ML_OP_MIN:
    case ML_OP_DOT: propose_reduced(s, n); break;
    case ML_OP_WRITE_ROWS: propose_write_rows(s, n); break;
    }
}

void shard_propose(sharder *s, ml_ref n) {
    ml_op op = ml_graph_node(s->from, n)->op;
    if (op == ML_OP_PLACE && propose_place(s, n)) return;
    if (ml_op_interfaces[op]) {
        ml_op_interfaces[op]->propose(s, n);
    } else {
        if (ml_op_is_map(op))
            by_name(s, n, 0);
        else
            propose_rest(s, n);
        if (s->rows && (ml_op_is_map(op) || op == ML_OP_SUM || op == ML_OP_MAX))
            s->rows->propose(s, n);
        shard_propose_partial(s, n);
    }
    (void)shard_strategy_new(s, n, SHARD_NO_CUT);
}
