/* Redistribution: from the placement that a value has to the one in which it is needed.
 *
 * Collectives work on the outermost axis, so that their buffers are contiguous: the axis that is
 * gathered, scattered or exchanged is permuted to the front before and back after. An axis that
 * several mesh axes cut is cut by the outermost first; only the innermost cut can be undone, and
 * only inside of the others can a new one be made. */
#include "runtime/shard/shard_internal.h"

double shard_move_cost(ml_placement from, ml_placement to, double bytes, int64_t ranks) {
    double whole = (double)ranks, part = bytes / whole;
    double exchanged = ml_collective_sent(ML_COLLECTIVE_ALL_TO_ALL, part, whole);
    double gathered = ml_collective_sent(ML_COLLECTIVE_ALL_GATHER, part, whole);
    double scattered = ml_collective_sent(ML_COLLECTIVE_REDUCE_SCATTER, bytes, whole);
    if (shard_same(from, to)) return 0;
    if (from.kind == ML_SENT || to.kind == ML_SENT) { /* by way of a split along the batch */
        ml_placement way = shard_split(from.kind == ML_SENT ? from.batch : to.batch);
        ml_placement other = from.kind == ML_SENT ? to : from;
        if (other.kind == ML_OWNED || other.kind == ML_SENT) return -1;
        double rest = from.kind == ML_SENT ? shard_move_cost(way, to, bytes, ranks)
                                           : shard_move_cost(from, way, bytes, ranks);
        return rest < 0 ? rest : rest + exchanged;
    }
    if (to.kind == ML_SHARED_SUM) return -1;
    if (ml_placement_shared(from)) { /* by way of a sum with zeros elsewhere */
        if (to.kind == ML_PARTIAL_SUM) return 0;
        from = (ml_placement){ML_PARTIAL_SUM, 0};
    }
    if (to.kind == ML_SHARED) to = (ml_placement){ML_REPLICATED, 0}; /* and a slice */
    if (shard_same(from, to)) return 0;
    if (to.kind >= ML_PARTIAL_SUM) {
        bool partial = from.kind >= ML_PARTIAL_SUM && from.kind <= ML_PARTIAL_MIN;
        return to.kind == ML_PARTIAL_SUM && !partial ? 0 : -1;
    }
    if (from.kind == ML_REPLICATED) return 0;                                 /* a slice */
    if (from.kind == ML_SPLIT && shard_along(to, from.axis)) return gathered; /* and a slice */
    if (from.kind >= ML_PARTIAL_SUM)
        return to.kind == ML_SPLIT ? scattered
                                   : ml_collective_sent(ML_COLLECTIVE_ALL_REDUCE, bytes, whole);
    return to.kind == ML_SPLIT ? exchanged : gathered;
}

ml_ref shard_coordinate(sharder *s, int mesh) {
    const int64_t args[] = {mesh, s->layout->axis[mesh].size};
    return ml_graph_add(s->to, ML_OP_COORDINATE, NULL, 0, args, 2, NULL);
}

ml_ref shard_gathered_parts(sharder *s, ml_ref n, int mesh, ml_axis parts) {
    ml_graph *g = s->to;
    ml_type type = *ml_graph_type(g, n);
    const int64_t args[] = {mesh, s->layout->axis[mesh].size};
    for (int i = type.rank++; i > 0; i--) {
        type.axis[i] = type.axis[i - 1];
        type.size[i] = type.size[i - 1];
    }
    type.axis[0] = parts;
    type.size[0] = 1;
    n = ml_broadcast(g, n, &type);
    return ml_graph_add(g, ML_OP_ALL_GATHER, &n, 1, args, 2, NULL);
}

ml_ref shard_group(sharder *s, int i, int64_t groups) {
    const int64_t ranks = s->layout->axis[i].size;
    const ml_ref c = shard_coordinate(s, i);
    if (groups == ranks) return c;
    return ml_map2(s->to, ML_OP_IDIV, c, ml_const_int(s->to, ML_I32, ranks / groups));
}

ml_ref shard_base(sharder *s, const ml_placements *at, int position, int64_t local) {
    ml_graph *g = s->to;
    ml_ref block = 0;
    int count = s->layout->count;
    for (int k = 0; k < 2 * count; k++) { /* those within come last */
        int i = k % count;
        bool shared = ml_placement_shared(at->over[i]) && at->over[i].axis == position;
        if (!(shared || shard_along(at->over[i], position)) || at->over[i].within != k / count)
            continue;
        int64_t ranks = s->layout->axis[i].size;
        ml_ref c = shard_group(s, i, shared ? at->over[i].batch : ranks);
        if (block) {
            block = ml_map2(g, ML_OP_MUL, block, ml_const_int(g, ML_I32, ranks));
            c = ml_map2(g, ML_OP_ADD, block, c);
        }
        block = c;
    }
    return block ? ml_map2(g, ML_OP_MUL, block, ml_const_int(g, ML_I32, local)) : 0;
}

/* ---- One step over one mesh axis ------------------------------------------------------------- */

typedef struct {
    sharder *s;
    ml_ref value;
    ml_type global; /* axes and order of the value */
    ml_placements at, target;
    ml_ref node;
    bool gathered;
    bool copy; /* of a forward value, for the backward pass */
} movement;

/* A product whose first axis would be the one at `position` were its operands exchanged: so made,
 * it need not be copied. */
static ml_ref exchanged_product(movement *m, int position) {
    ml_graph *g = m->s->to;
    const ml_node *node = ml_graph_node(g, m->node);
    const ml_type type = *ml_graph_type(g, m->node);
    if (node->op != ML_OP_DOT || position == 0) return m->node;
    ml_ref a = ml_graph_source(g, m->node, 0), b = ml_graph_source(g, m->node, 1);
    const ml_type *first = ml_graph_type(g, a), *second = ml_graph_type(g, b);
    ml_axis reduced[ML_MAX_AXES];
    if (first->rank + second->rank - 2 * node->arg_count != type.rank) return m->node;
    if (ml_type_find(first, type.axis[position]) >= 0) return m->node;
    uint8_t flags = node->flags & ML_NODE_GRADIENT;
    int count = node->arg_count;
    for (int i = 0; i < count; i++) reduced[i] = (ml_axis)ml_graph_args(g, m->node)[i];
    const ml_dtype dtype = (ml_dtype)type.dtype;
    ml_ref made = node->source_count == 3 ? ml_scaled_dot(g, b, a, ml_graph_source(g, m->node, 2),
                                                          reduced, count, dtype)
                                          : ml_dot(g, b, a, reduced, count, dtype);
    ml_graph_mark(g, made, flags);
    return made;
}

static ml_ref to_front(movement *m, int position) {
    ml_type front = ml_type_fronted(ml_graph_type(m->s->to, m->node), position);
    return ml_permute(m->s->to, exchanged_product(m, position), &front);
}

/* In the order of the value again, whatever the sizes are now. */
static void back(movement *m, ml_ref node) {
    ml_type order = m->global;
    const ml_type *t = ml_graph_type(m->s->to, node);
    for (int i = 0; i < order.rank; i++) order.size[i] = ml_type_size(t, order.axis[i]);
    m->node = ml_permute(m->s->to, node, &order);
}

static ml_ref collective(movement *m, ml_op op, ml_ref x, int i, ml_placement_kind partial) {
    int64_t args[] = {i, m->s->layout->axis[i].size, partial - ML_PARTIAL_SUM};
    bool combines = ml_collectives[ml_collective_of(op)].combines;
    return ml_graph_add(m->s->to, op, &x, 1, args, combines ? 3 : 2, NULL);
}

/* With the axis filled up, so that mesh axis i divides it. */
static ml_ref filled(movement *m, ml_ref node, int i, int position) {
    const ml_type *t = ml_graph_type(m->s->to, node);
    int64_t ranks = m->s->layout->axis[i].size, size = t->size[position];
    int64_t missing = ml_part_size(size, ranks) * ranks - size;
    return missing ? ml_pad(m->s->to, node, t->axis[position], 0, missing) : node;
}

/* The axis of `to` into (peer, part), the peer of this rank's coordinate kept: no data moves. */
static void take_part(movement *m, int i, ml_placement to) {
    ml_graph *g = m->s->to;
    bool shared = to.kind == ML_SHARED;
    if (shared && to.batch == 1) return;
    ml_ref node = shared ? m->node : filled(m, m->node, i, to.axis);
    const ml_type *t = ml_graph_type(g, node);
    ml_axis axis = t->axis[to.axis], peer = ml_axis_named(g, "peer'mesh");
    int64_t ranks = shared ? to.batch : m->s->layout->axis[i].size, size = t->size[to.axis];
    ml_ref parts = ml_split(g, node, axis, peer, ranks, axis, size / ranks);
    back(m, ml_gather(g, parts, shard_group(m->s, i, ranks), peer));
}

static void gather_parts(movement *m, int i, int position) {
    ml_graph *g = m->s->to;
    ml_ref x = to_front(m, position);
    if (m->copy) ml_graph_set_flags(g, m->s->flags | ML_NODE_COPY);
    x = collective(m, ML_OP_ALL_GATHER, x, i, ML_PARTIAL_SUM);
    if (m->copy) ml_graph_set_flags(g, m->s->flags);
    if (ml_graph_type(g, x)->size[0] > m->global.size[position])
        x = ml_slice(g, x, m->global.axis[position], 0, m->global.size[position]);
    back(m, x);
    m->gathered |= shard_gathers_again(m->s, m->value, i);
}

/* From split along `from` to split along `to`. */
static void exchange(movement *m, int i, int from, int to) {
    ml_graph *g = m->s->to;
    ml_axis whole = m->global.axis[from], cut = m->global.axis[to];
    ml_axis peer = ml_axis_named(g, "peer'mesh");
    const ml_type *t = ml_graph_type(g, m->node);
    int64_t ranks = m->s->layout->axis[i].size, size = t->size[to];
    ml_ref x = ml_split(g, m->node, cut, peer, ranks, cut, size / ranks);
    ml_type order = *ml_graph_type(g, x);
    order = ml_type_fronted(&order, ml_type_find(&order, whole));
    order = ml_type_fronted(&order, ml_type_find(&order, peer));
    x = collective(m, ML_OP_ALL_TO_ALL, ml_permute(g, x, &order), i, ML_PARTIAL_SUM);
    back(m, ml_merge(g, x, peer, whole, whole));
}

/* What all ranks have, as a sum over them: the first rank's is the whole, others' are 0. */
static void share(movement *m, int i) {
    ml_graph *g = m->s->to;
    int64_t args[] = {i, m->s->layout->axis[i].size};
    ml_ref c = ml_graph_add(g, ML_OP_COORDINATE, NULL, 0, args, 2, NULL);
    ml_ref first = ml_map2(g, ML_OP_EQ, c, ml_const_int(g, ML_I32, 0));
    ml_ref zero = ml_const(g, (ml_dtype)ml_graph_type(g, m->node)->dtype, 0);
    m->node = ml_where(g, first, m->node, zero);
}

/* Parts as a sum over the ranks: each rank's is 0 where the others' parts are; of a group of ranks
 * that have the same, the first's alone counts. No data moves. */
static void spread(movement *m, int i, ml_placement from) {
    ml_graph *g = m->s->to;
    if (from.kind == ML_SHARED_SUM && from.batch == 1) return;
    ml_type t = *ml_graph_type(g, m->node);
    int position = from.axis;
    ml_axis axis = t.axis[position], peer = ml_axis_named(g, "peer'mesh");
    int64_t ranks = m->s->layout->axis[i].size;
    int64_t count = ml_placement_shared(from) ? from.batch : ranks;
    ml_ref index = ml_iota(g, peer, count), c = shard_group(m->s, i, count);
    if (from.kind == ML_SHARED) {
        index = ml_map2(g, ML_OP_MUL, index, ml_const_int(g, ML_I32, ranks / count));
        c = shard_group(m->s, i, ranks);
    }
    ml_ref mine = ml_map2(g, ML_OP_EQ, index, c);
    if (t.rank == ML_MAX_AXES)
        ml_raise(ML_INVALID, "sharding: a tensor of %d axes cannot become a sum over %s", t.rank,
                 m->s->layout->axis[i].name);
    for (int k = t.rank++; k > position; k--) {
        t.axis[k] = t.axis[k - 1];
        t.size[k] = t.size[k - 1];
    }
    t.axis[position] = peer;
    t.size[position] = count;
    ml_ref zero = ml_const(g, (ml_dtype)t.dtype, 0);
    ml_ref parts = ml_where(g, mine, ml_broadcast(g, m->node, &t), zero);
    back(m, ml_merge(g, parts, peer, axis, axis));
}

static void scatter(movement *m, int i, int position) {
    ml_ref x = filled(m, to_front(m, position), i, 0);
    back(m, collective(m, ML_OP_REDUCE_SCATTER, x, i, m->at.over[i].kind));
}

/* bool over the rows (and what else bounds have): they are in one of the groups that bounds in
 * placement `at` have. */
static ml_ref rows_within(movement *m, int row, const ml_placements *at) {
    ml_graph *g = m->s->to;
    const ml_ref *owner = m->s->values[m->value].owner;
    const ml_type *bounds = ml_graph_type(m->s->from, owner[0]);
    int64_t rows = ml_graph_type(g, m->node)->size[row];
    ml_axis groups = bounds->axis[bounds->rank - 1], apart = ml_axis_named(g, "groups'own");
    ml_ref edge[2], index = ml_iota(g, m->global.axis[row], rows);
    ml_ref base = shard_base(m->s, &m->at, row, rows);
    if (base) index = ml_map2(g, ML_OP_ADD, index, base);
    for (int i = 0; i < 2; i++)
        edge[i] = ml_rename(g, shard_get(m->s, owner[i], at), groups, apart);
    ml_type plane = *ml_graph_type(g, edge[0]);
    plane.axis[plane.rank] = m->global.axis[row];
    plane.size[plane.rank++] = rows;
    index = ml_broadcast(g, index, &plane);
    ml_ref inside = ml_map2(g, ML_OP_AND, ml_map2(g, ML_OP_GE, index, edge[0]),
                            ml_map2(g, ML_OP_LT, index, edge[1]));
    inside = ml_reduce(g, ML_OP_MAX, ml_cast(g, inside, ML_I32), &apart, 1);
    return ml_cast(g, inside, ML_BOOL);
}

/* The rows that count as this rank's: those of its groups; the first rank's are also those of no
 * group, in which all ranks have the same. */
static ml_ref own_rows(movement *m, int row) {
    ml_graph *g = m->s->to;
    const ml_type *bounds = ml_graph_type(m->s->from, m->s->values[m->value].owner[0]);
    ml_placements all = {0}, at;
    for (int i = 0; i < m->s->layout->count; i++) {
        if (m->at.over[i].kind != ML_SPLIT) continue;
        int position = ml_type_find(bounds, m->global.axis[m->at.over[i].axis]);
        if (position >= 0) all.over[i] = shard_split(position);
    }
    at = all;
    for (int i = 0; i < m->s->layout->count; i++)
        if (m->at.over[i].kind == ML_OWNED) at.over[i] = shard_split(bounds->rank - 1);
    ml_ref block = shard_base(m->s, &at, bounds->rank - 1, 1);
    ml_ref first = ml_map2(g, ML_OP_EQ, block, ml_const_int(g, ML_I32, 0));
    ml_ref none = ml_map1(g, ML_OP_NOT, rows_within(m, row, &all));
    return ml_map2(g, ML_OP_OR, rows_within(m, row, &at), ml_map2(g, ML_OP_AND, none, first));
}

ml_ref shard_rows_of_own(sharder *s, ml_ref n, ml_ref node, const ml_placements *at) {
    movement m = {
        .s = s, .value = n, .global = *ml_graph_type(s->from, n), .at = *at, .node = node};
    int row = 0;
    for (int i = 0; i < s->layout->count; i++)
        if (at->over[i].kind == ML_OWNED) row = at->over[i].axis;
    return own_rows(&m, row);
}

/* Zeros where other ranks' rows are: then the ranks' tensors add up to the whole one. */
static void clear_others(movement *m) {
    ml_ref zero = ml_const(m->s->to, (ml_dtype)m->global.dtype, 0);
    ml_ref own = shard_rows_of_own(m->s, m->value, m->node, &m->at);
    m->node = ml_where(m->s->to, own, m->node, zero);
    back(m, m->node);
    for (int i = 0; i < m->s->layout->count; i++)
        if (m->at.over[i].kind == ML_OWNED) m->at.over[i] = (ml_placement){ML_PARTIAL_SUM, 0};
}

/* ---- The order of steps ---------------------------------------------------------------------- */

/* A cut over mesh axis i is inside of another, over mesh axis j, of the same axis. */
static bool inside(ml_placement cut, int i, ml_placement other, int j) {
    return cut.within == other.within ? i > j : cut.within;
}

/* A mesh axis cuts the parts of `cut`, which is over mesh axis i, now. */
static bool cut_within(const movement *m, int i, ml_placement cut) {
    for (int j = 0; j < m->s->layout->count; j++)
        if (j != i && ml_placement_shared(m->at.over[j]) && m->at.over[j].axis == cut.axis)
            return true;
        else if (j != i && shard_along(m->at.over[j], cut.axis) && inside(m->at.over[j], j, cut, i))
            return true;
    return false;
}

/* A mesh axis around `cut` has still to be cut or joined. */
static bool cut_around_first(const movement *m, int i, ml_placement cut) {
    for (int j = 0; j < m->s->layout->count; j++) {
        ml_placement now = m->at.over[j], then = m->target.over[j];
        if (j == i || shard_same(now, then)) continue;
        if (shard_along(now, cut.axis) && inside(cut, i, now, j)) return true;
        if (shard_along(then, cut.axis) && inside(cut, i, then, j)) return true;
    }
    return false;
}

typedef enum { CLEAR, TAKE, SCATTER, EXCHANGE, SHARE, SPREAD, REDUCE, GATHER, STEPS } step;

static bool possible(const movement *m, step kind, int i) {
    ml_placement from = m->at.over[i], to = m->target.over[i];
    bool splits = to.kind == ML_SPLIT, was_split = from.kind == ML_SPLIT;
    bool uneven = (splits && m->global.size[to.axis] % m->s->layout->axis[i].size) ||
                  (was_split && m->global.size[from.axis] % m->s->layout->axis[i].size);
    if (shard_same(from, to)) return false;
    if (ml_placement_shared(from)) return kind == SPREAD;
    if (to.kind == ML_SHARED && from.kind == ML_REPLICATED)
        return kind == TAKE && ml_layout_parts(m->s->layout, &m->at, to.axis) == 1;
    bool can_cut = splits && !cut_within(m, i, to) && !cut_around_first(m, i, to);
    bool can_join = was_split && !cut_within(m, i, from);
    if (from.kind == ML_OWNED) return kind == CLEAR;
    switch (kind) {
    case CLEAR: return false;
    case TAKE: return from.kind == ML_REPLICATED && can_cut;
    case SHARE: return from.kind == ML_REPLICATED && to.kind == ML_PARTIAL_SUM;
    case SPREAD: return can_join && to.kind == ML_PARTIAL_SUM && !uneven;
    case SCATTER: return from.kind >= ML_PARTIAL_SUM && can_cut;
    case EXCHANGE: return can_join && can_cut && from.axis != to.axis && !uneven;
    case REDUCE: return from.kind >= ML_PARTIAL_SUM;
    default: return can_join;
    }
}

static void take_step(movement *m, step kind, int i) {
    ml_placement from = m->at.over[i], to = m->target.over[i];
    if (kind == CLEAR) {
        clear_others(m);
        return;
    }
    m->at.over[i] = to;
    switch (kind) {
    case TAKE: take_part(m, i, to); return;
    case SHARE: share(m, i); return;
    case SPREAD:
        spread(m, i, from);
        m->at.over[i] = (ml_placement){ML_PARTIAL_SUM, 0};
        return;
    case SCATTER:
        m->at.over[i] = from;
        scatter(m, i, to.axis);
        m->at.over[i] = to;
        return;
    case EXCHANGE: exchange(m, i, from.axis, to.axis); return;
    case REDUCE:
        m->node = collective(m, ML_OP_ALL_REDUCE, m->node, i, from.kind);
        m->at.over[i] = (ml_placement){ML_REPLICATED, 0};
        return;
    default: m->at.over[i] = (ml_placement){ML_REPLICATED, 0}; gather_parts(m, i, from.axis);
    }
}

/* One step towards the target; false where it is reached. Steps that make less come first. */
static bool advance(movement *m) {
    int count = m->s->layout->count;
    for (int kind = 0; kind < STEPS; kind++)
        for (int k = 0; k < count; k++) {
            int i = kind == GATHER ? count - 1 - k : k;
            if (!possible(m, (step)kind, i)) continue;
            take_step(m, (step)kind, i);
            return true;
        }
    /* What is cut within stands in the way: join it; it is cut again later. */
    bool reached = true;
    for (int i = 0; i < count; i++) {
        ml_placement from = m->at.over[i], to = m->target.over[i];
        if (shard_same(from, to)) continue;
        reached = false;
        for (int j = count - 1; j >= 0; j--) {
            ml_placement inner = m->at.over[j];
            if (j == i || inner.kind != ML_SPLIT || cut_within(m, j, inner)) continue;
            bool stands = shard_along(from, inner.axis) && inside(inner, j, from, i);
            stands = stands || (shard_along(to, inner.axis) && inside(inner, j, to, i));
            if (!stands) continue;
            m->at.over[j] = (ml_placement){ML_REPLICATED, 0};
            gather_parts(m, j, inner.axis);
            return true;
        }
    }
    if (!reached) ml_raise(ML_INTERNAL, "sharding: a redistribution is stuck");
    return false;
}

/* ---- Values ---------------------------------------------------------------------------------- */

static bool equal(const sharder *s, const ml_placements *a, const ml_placements *b) {
    for (int i = 0; i < s->layout->count; i++)
        if (!shard_same(a->over[i], b->over[i])) return false;
    return true;
}

/* Bytes to get from one placement to another; negative where that cannot be. */
static double distance(const sharder *s, const ml_type *t, const ml_placements *from,
                       const ml_placements *to) {
    double bytes = (double)ml_type_bytes(t), total = 0;
    for (int i = 0; i < s->layout->count; i++) {
        double others = 1;
        for (int j = 0; j < s->layout->count; j++)
            if (j != i && from->over[j].kind == ML_SPLIT) others *= (double)s->layout->axis[j].size;
        double cost =
            shard_move_cost(from->over[i], to->over[i], bytes / others, s->layout->axis[i].size);
        if (cost < 0) return -1;
        total += cost;
    }
    return total;
}

/* A free value is computed where it is needed. */
static ml_ref make_free(sharder *s, ml_ref n, const ml_placements *at, bool gathered) {
    const ml_node *node = ml_graph_node(s->from, n);
    const ml_type *t = ml_graph_type(s->from, n);
    ml_ref sources[3] = {0};
    ml_placements need[3] = {{{{0}}}};
    for (int k = 0; k < node->source_count; k++) {
        ml_ref source = ml_graph_source(s->from, n, k);
        const ml_type *from = ml_graph_type(s->from, source);
        for (int i = 0; i < s->layout->count; i++) {
            ml_placement p = at->over[i];
            if (p.kind != ML_SPLIT && p.kind != ML_OWNED && p.kind < ML_SENT) continue;
            int position = node->op == ML_OP_RENAME ? p.axis : ml_type_find(from, t->axis[p.axis]);
            int batch = p.kind == ML_SENT ? ml_type_find(from, t->axis[p.batch]) : p.batch;
            if (position >= 0)
                need[k].over[i] =
                    (ml_placement){p.kind, (uint8_t)position, (uint8_t)batch, p.within};
        }
        sources[k] = shard_get(s, source, &need[k]);
    }
    ml_ref result;
    ml_graph_set_origin(s->to, ml_graph_origin(s->from, n));
    shard_local(s, n, sources, need, at, &result);
    ml_graph_set_origin(s->to, s->origin);
    shard_add_version(s, n, at, result, gathered);
    return result;
}

/* Whether n is a cast to a wider dtype, parts of which are to be gathered or exchanged: what it
 * casts is, which lies in such parts too, and cast again. *gathers: for the forward pass alone. */
static bool moves_narrow(const sharder *s, ml_ref n, const ml_placements *from,
                         const ml_placements *to, bool *gathers) {
    if (ml_graph_node(s->from, n)->op != ML_OP_CAST) return false;
    ml_ref source = ml_graph_source(s->from, n, 0);
    uint32_t wide = ml_dtypes[ml_graph_type(s->from, n)->dtype].bytes;
    uint32_t narrow = ml_dtypes[ml_graph_type(s->from, source)->dtype].bytes;
    bool moves = false, there = false;
    for (uint32_t v = shard_next_version(s, source, 0); v; v = shard_next_version(s, source, v))
        there = there || equal(s, &s->versions.at[v].at, from);
    for (int i = 0; i < s->layout->count; i++) {
        ml_placement a = from->over[i], b = to->over[i];
        if (a.kind > ML_SPLIT || b.kind > ML_SPLIT) return false;
        if (a.kind != ML_SPLIT || shard_same(a, b)) continue;
        moves = true;
        *gathers = *gathers || shard_gathers_again(s, n, i);
    }
    return moves && there && narrow < wide;
}

int shard_sent_over(const sharder *s, const ml_placements *at) {
    for (int i = 0; i < s->layout->count; i++)
        if (at->over[i].kind == ML_SENT) return i;
    return -1;
}

ml_placements shard_unsent(const sharder *s, const ml_placements *at) {
    ml_placements before = *at;
    int i = shard_sent_over(s, at);
    before.over[i] = shard_split(at->over[i].batch);
    return before;
}

/* By way of what is split along the batch: to sent rows, and from them. */
static ml_ref get_sent(sharder *s, ml_ref n, const ml_placements *at) {
    ml_placements before = shard_unsent(s, at);
    ml_ref node = s->rows->send(s, n, shard_get(s, n, &before), at);
    shard_add_version(s, n, at, node, false);
    return node;
}
/* Both are sent over one mesh axis, and others cut the batch and its rows in the same way: these
 * axes mean something else now. */
static bool sent_alike(const sharder *s, const ml_placements *a, const ml_placements *b) {
    int i = shard_sent_over(s, a);
    if (i < 0 || !shard_same(a->over[i], b->over[i])) return false;
    ml_placement p = a->over[i];
    for (int j = 0; j < s->layout->count; j++)
        for (int k = 0; k < 2; k++) {
            ml_placement cut = shard_split(k ? p.axis : p.batch);
            if (shard_same(a->over[j], cut) != shard_same(b->over[j], cut)) return false;
        }
    return true;
}
static void bring_back(movement *m) {
    m->node = m->s->rows->bring_back(m->s, m->value, m->node, &m->at);
    m->at = shard_unsent(m->s, &m->at);
    shard_add_version(m->s, m->value, &m->at, m->node, m->gathered);
}

ml_ref shard_get(sharder *s, ml_ref n, const ml_placements *at) {
    const ml_type *t = ml_graph_type(s->from, n);
    uint32_t best = 0;
    double least = 0;
    for (uint32_t v = shard_next_version(s, n, 0); v; v = shard_next_version(s, n, v)) {
        const ml_placements *has = &s->versions.at[v].at;
        if (equal(s, has, at)) return s->versions.at[v].node;
        double cost = distance(s, t, has, at);
        if (cost < 0 || (best && cost >= least)) continue;
        best = v;
        least = cost;
    }
    if (s->values[n].free || s->values[n].repeats) {
        ml_placements no_sum = *at;
        for (int i = 0; i < s->layout->count; i++)
            if (at->over[i].kind == ML_PARTIAL_SUM) no_sum.over[i] = (ml_placement){0};
        if (equal(s, &no_sum, at)) return make_free(s, n, at, false);
        ml_ref node = shard_get(s, n, &no_sum);
        movement m = {.s = s, .value = n, .global = *t, .at = no_sum, .target = *at, .node = node};
        while (advance(&m)) shard_add_version(s, n, &m.at, m.node, false);
        return m.node;
    }
    if (!best) ml_raise(ML_INTERNAL, "sharding: node %%%u cannot be partial", n);
    const shard_version *from = &s->versions.at[best];
    int sent = shard_sent_over(s, at), was_sent = shard_sent_over(s, &from->at);
    if (sent >= 0 && !sent_alike(s, &from->at, at)) return get_sent(s, n, at);
    bool gathers = from->gathered;
    if (moves_narrow(s, n, &from->at, at, &gathers)) return make_free(s, n, at, gathers);
    bool forward = !(ml_graph_node(s->from, n)->flags & ML_NODE_BACKWARD);
    movement m = {s, n, *t, from->at, *at, from->node, from->gathered, forward && s->backward};
    if (was_sent >= 0 && sent < 0) bring_back(&m);
    while (advance(&m)) shard_add_version(s, n, &m.at, m.node, m.gathered);
    return m.node;
}
