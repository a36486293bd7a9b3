/* Rows of groups (tokens of experts) sent to the ranks that hold the groups, and sent back.
 *
 * Rows are in the order of their groups along an axis, for each element of a batch axis that is
 * split over a mesh axis; groups are split over the same one. Each rank packs the rows for rank p
 * into `slots` capacity slots, by group and then by batch element, and all ranks exchange these
 * buffers (all-to-all). What arrived from each sender is in the order of the groups again: the
 * batch axis now counts senders, the rows' axis slots, and products by groups and elementwise ops
 * work on it as they did before. Sending back is the same exchange.
 *
 * The number of slots is fixed when a program is compiled. Buffers of run-time sizes would have to
 * be as large as the worst case, in which one rank gets all rows: ranks times the memory of an even
 * share, and a GPU would have to wait for its host to learn the counts before it could send. Twice
 * an even share, instead, costs twice the bytes of what an even router sends. With R rows of D
 * elements on each rank, top-k choices included, and experts of 3 D x F on N ranks, a layer sends
 * 4 exchange R D (N-1)/N elements forward and backward; gathering the weights of E experts
 * and scattering their gradients takes 9 E D F (N-1)/N. `mlua check` prints both in bytes.
 * Rows that find no place are never dropped in silence: they come back as NaN, the overflow check
 * (ml_roots) says of which module and what factor would have done, and the step changes no state.
 * Under pipeline stages each rank checks by itself, and the runtime compares ranks and restores
 * states after all microbatches (exec/pipeline/retry.c). */
#include <math.h>
#include <string.h>

#include "runtime/ops/ragged/ragged.h"
#include "runtime/ops/ragged/shard_rows.h"

/* ---- Where rows go --------------------------------------------------------------------------- */

/* The local graph of one exchange and its axes. Groups are those of all ranks, `own` those of one;
 * gaps are the rows of no group before each group and after the last one: they go to the first
 * rank, behind its groups, so that what elementwise ops make of them is not lost. */
enum { BATCH, ROW, GROUP, OWN, GAP, PEER, PLACE, AXES };
typedef struct {
    ml_graph *g;
    int mesh;
    ml_axis axis[AXES];
    int64_t size[AXES];
} exchange;

/* Rows in order along `axis` (groups or gaps), for each batch element: from and to which row, and
 * at which place of their rank they begin. */
typedef struct {
    int axis;
    ml_ref from, to, first;
} runs;

static ml_ref op2(const exchange *x, ml_op op, ml_ref a, ml_ref b) {
    return ml_map2(x->g, op, a, b);
}
static ml_ref number(const exchange *x, int64_t value) {
    return ml_const_int(x->g, ML_I32, value);
}
static ml_ref iota(const exchange *x, int axis) {
    return ml_iota(x->g, x->axis[axis], x->size[axis]);
}
/* What comes before each element along an axis. */
static ml_ref before(const exchange *x, ml_ref n, int axis) {
    ml_ref sums = ml_graph_add(x->g, ML_OP_CUMSUM, &n, 1, (int64_t[]){x->axis[axis], 0}, 2, NULL);
    return op2(x, ML_OP_SUB, sums, n);
}
static ml_ref total(const exchange *x, ml_ref n, int axis) {
    return ml_reduce(x->g, ML_OP_SUM, n, &x->axis[axis], 1);
}
static ml_ref all_to_all(const exchange *x, ml_ref n) {
    return ml_graph_add(x->g, ML_OP_ALL_TO_ALL, &n, 1, (int64_t[]){x->mesh, x->size[PEER]}, 2,
                        NULL);
}
static ml_ref by_peer(const exchange *x, ml_ref n) {
    return ml_split(x->g, n, x->axis[GROUP], x->axis[PEER], x->size[PEER], x->axis[OWN],
                    x->size[OWN]);
}

/* n along all of `count` axes, in their order. */
static ml_ref spread(const exchange *x, ml_ref n, const int *axes, int count) {
    ml_type type = {.dtype = ML_I32, .rank = (uint8_t)count};
    for (int i = 0; i < count; i++) {
        type.axis[i] = x->axis[axes[i]];
        type.size[i] = x->size[axes[i]];
    }
    return ml_broadcast(x->g, n, &type);
}

/* Bounds cut to what there is. */
static ml_ref cut_to(const exchange *x, ml_ref bounds, int64_t most) {
    bounds = op2(x, ML_OP_MAXIMUM, bounds, number(x, 0));
    return op2(x, ML_OP_MINIMUM, bounds, number(x, most));
}

/* value where from <= i < to, else 0. */
static ml_ref where_within(const exchange *x, ml_ref i, ml_ref from, ml_ref to, ml_ref value) {
    ml_ref in = op2(x, ML_OP_AND, op2(x, ML_OP_GE, i, from), op2(x, ML_OP_LT, i, to));
    return ml_where(x->g, in, value, number(x, 0));
}

/* The order in which runs fill slots: along their axis first, by batch element within. `begun`
 * are the slots taken before along the axis. */
static ml_ref fill(const exchange *x, ml_ref counts, ml_ref begun, int axis) {
    ml_ref first = before(x, counts, BATCH);
    return op2(x, ML_OP_ADD, first, spread(x, begun, (int[]){BATCH, axis}, 2));
}

/* To which of all slots each row of these runs is sent, counted from 1: peer * slots + its slot
 * there; 0 for rows that find none, and for others. */
static ml_ref slots(const exchange *x, const runs *r) {
    const int axes[] = {BATCH, ROW, r->axis};
    ml_ref row = spread(x, iota(x, ROW), axes, 3), from = spread(x, r->from, axes, 3);
    ml_ref place = op2(x, ML_OP_ADD, op2(x, ML_OP_SUB, row, from), spread(x, r->first, axes, 3));
    ml_ref slot = op2(x, ML_OP_ADD, place, number(x, 1));
    if (r->axis == GROUP) {
        ml_ref peer = op2(x, ML_OP_IDIV, iota(x, GROUP), number(x, x->size[OWN]));
        peer = op2(x, ML_OP_MUL, peer, number(x, x->size[PLACE]));
        slot = op2(x, ML_OP_ADD, slot, spread(x, peer, axes, 3));
    }
    ml_ref found = op2(x, ML_OP_LT, place, number(x, x->size[PLACE]));
    slot = ml_where(x->g, found, slot, number(x, 0));
    return total(x, where_within(x, row, from, spread(x, r->to, axes, 3), slot), r->axis);
}

/* Which row of these runs, of all batch elements one after another and counted from 1, is sent to
 * each place (of each peer, for groups); 0: none. */
static ml_ref contents(const exchange *x, const runs *r) {
    bool groups = r->axis == GROUP;
    const int with_peer[] = {BATCH, PEER, PLACE, OWN}, without[] = {BATCH, PLACE, GAP};
    const int *axes = groups ? with_peer : without, count = groups ? 4 : 3;
    ml_ref part[] = {r->from, r->to, r->first};
    for (int i = 0; i < 3; i++)
        part[i] = spread(x, groups ? by_peer(x, part[i]) : part[i], axes, count);
    ml_ref base = op2(x, ML_OP_MUL, iota(x, BATCH), number(x, x->size[ROW]));
    base = spread(x, op2(x, ML_OP_ADD, base, number(x, 1)), axes, count);
    ml_ref row = op2(x, ML_OP_SUB, spread(x, iota(x, PLACE), axes, count), part[2]);
    row = op2(x, ML_OP_ADD, row, part[0]); /* were its run long enough */
    row = where_within(x, row, part[0], part[1], op2(x, ML_OP_ADD, row, base));
    return total(x, total(x, row, BATCH), groups ? OWN : GAP);
}

/* What the fullest rank gets, where it is more than there are slots for. */
static void check_overflow(sharder *s, const exchange *x, ml_ref to_each) {
    ml_ref most = ml_reduce(x->g, ML_OP_MAX, to_each, &x->axis[PEER], 1);
    double even = (double)(x->size[BATCH] * x->size[ROW]) / (double)x->size[PEER];
    ml_ref factor =
        ml_map2(x->g, ML_OP_MUL, ml_cast(x->g, most, ML_F32), ml_const(x->g, ML_F32, 1 / even));
    factor = ml_where(x->g, op2(x, ML_OP_GT, most, number(x, x->size[PLACE])), factor,
                      ml_const(x->g, ML_F32, 0));
    *ML_PUSH(s->scratch, &s->overflow_checks) = (shard_overflow_check){factor, s->origin};
}

static void plan(sharder *s, const exchange *x, ml_ref starts, ml_ref ends, shard_exchange *out) {
    ml_axis group = x->axis[GROUP], gap = x->axis[GAP];
    ml_ref first = op2(x, ML_OP_EQ, iota(x, PEER), number(x, 0));
    starts = cut_to(x, starts, x->size[ROW]);
    ends = op2(x, ML_OP_MAXIMUM, cut_to(x, ends, x->size[ROW]), starts);
    ml_ref counts = op2(x, ML_OP_SUB, ends, starts);
    ml_ref sent = by_peer(x, total(x, counts, BATCH)), to_each = total(x, sent, OWN);
    ml_ref begun = ml_merge(x->g, before(x, sent, OWN), x->axis[PEER], x->axis[OWN], group);
    runs groups = {GROUP, starts, ends, fill(x, counts, begun, GROUP)};
    /* Gap e is before group e; the last one ends with the rows. */
    runs gaps = {.axis = GAP, .from = ml_rename(x->g, ml_pad(x->g, ends, group, 1, 0), group, gap)};
    gaps.to = op2(x, ML_OP_SUB, starts, number(x, x->size[ROW]));
    gaps.to = ml_rename(x->g, ml_pad(x->g, gaps.to, group, 0, 1), group, gap);
    gaps.to = op2(x, ML_OP_ADD, gaps.to, number(x, x->size[ROW]));
    gaps.to = op2(x, ML_OP_MAXIMUM, gaps.to, gaps.from);
    counts = op2(x, ML_OP_SUB, gaps.to, gaps.from);
    ml_ref behind = total(x, ml_where(x->g, first, to_each, number(x, 0)), PEER);
    ml_ref none = total(x, counts, BATCH);
    gaps.first = fill(x, counts, op2(x, ML_OP_ADD, before(x, none, GAP), behind), GAP);
    none = ml_where(x->g, first, total(x, none, GAP), number(x, 0));
    check_overflow(s, x, op2(x, ML_OP_ADD, to_each, none));
    out->slot = op2(x, ML_OP_ADD, slots(x, &groups), slots(x, &gaps));
    out->slot = op2(x, ML_OP_SUB, out->slot, number(x, 1));
    const int places[] = {PEER, PLACE};
    ml_ref rest = spread(x, contents(x, &gaps), places, 2);
    rest = op2(x, ML_OP_MUL, rest, spread(x, ml_cast(x->g, first, ML_I32), places, 2));
    out->index = op2(x, ML_OP_ADD, contents(x, &groups), rest);
    out->index = op2(x, ML_OP_SUB, out->index, number(x, 1));
    const int own[] = {PEER, OWN};
    ml_ref received = all_to_all(x, spread(x, sent, own, 2)), started = before(x, received, OWN);
    ml_ref bounds[] = {started, op2(x, ML_OP_ADD, started, received)};
    for (int i = 0; i < 2; i++) {
        ml_ref cut = ml_rename(x->g, cut_to(x, bounds[i], x->size[PLACE]), x->axis[OWN], group);
        bounds[i] = ml_rename(x->g, cut, x->axis[PEER], x->axis[BATCH]);
    }
    out->starts = bounds[0];
    out->ends = bounds[1];
}

/* Where the groups' bounds lie that go with rows in placement `at`. */
static ml_placements bounds_at(const sharder *s, ml_ref n, const ml_ref *owner,
                               const ml_placements *at) {
    const ml_type *t = ml_graph_type(s->from, n), *bounds = ml_graph_type(s->from, owner[0]);
    ml_placements out = {0}, before = shard_unsent(s, at);
    for (int j = 0; j < s->layout->count; j++) {
        if (before.over[j].kind != ML_SPLIT) continue;
        int position = ml_type_find(bounds, t->axis[before.over[j].axis]);
        if (position >= 0) out.over[j] = shard_split(position);
    }
    return out;
}

static exchange axes_of(const sharder *s, ml_ref n, const ml_ref *owner, const ml_placements *at,
                        int i) {
    const ml_type *t = ml_graph_type(s->from, n), *bounds = ml_graph_type(s->from, owner[0]);
    ml_placement sent = at->over[i];
    ml_placements unsent = shard_unsent(s, at);
    ml_type local = ml_layout_local(s->layout, t, &unsent);
    int group = ml_type_find(bounds, t->axis[sent.batch]) == 0;
    int64_t ranks = s->layout->axis[i].size, groups = bounds->size[group];
    return (exchange){
        .g = s->to,
        .mesh = i,
        .axis = {t->axis[sent.batch], t->axis[sent.axis], bounds->axis[group],
                 ml_axis_named(s->to, "own'sent"), ml_axis_named(s->to, "gap'sent"),
                 ml_axis_named(s->to, "peer'mesh"), ml_axis_named(s->to, "place'sent")},
        .size = {local.size[sent.batch], local.size[sent.axis], groups, groups / ranks, groups + 1,
                 ranks, ml_layout_sent_places(s->layout, t, at, i)},
    };
}

static bool same_places(const sharder *s, const ml_placements *a, const ml_placements *b) {
    for (int j = 0; j < s->layout->count; j++)
        if (!shard_same(a->over[j], b->over[j])) return false;
    return true;
}

struct shard_exchanges {
    shard_exchange *at;
    uint32_t count, capacity;
};

const shard_exchange *rows_exchange(sharder *s, ml_ref n, const ml_placements *at, int i) {
    const ml_ref *owner = shard_owner(s, n);
    ml_placements bounds = bounds_at(s, n, owner, at);
    if (!s->exchanges) s->exchanges = ML_NEW(s->scratch, struct shard_exchanges);
    for (uint32_t k = 0; k < s->exchanges->count; k++) {
        const shard_exchange *e = &s->exchanges->at[k];
        if (e->mesh == i && e->owner[0] == owner[0] && e->owner[1] == owner[1] &&
            same_places(s, &e->bounds, &bounds))
            return e;
    }
    shard_exchange made = {.owner = {owner[0], owner[1]}, .mesh = i, .bounds = bounds};
    exchange x = axes_of(s, n, owner, at, i);
    ml_ref starts = shard_get(s, made.owner[0], &bounds);
    ml_ref ends = shard_get(s, made.owner[1], &bounds);
    plan(s, &x, starts, ends, &made);
    shard_exchange *kept = ML_PUSH(s->scratch, s->exchanges);
    *kept = made;
    return kept;
}

/* ---- Moving values --------------------------------------------------------------------------- */

/* In the order of the value's axes. */
static ml_ref ordered(const sharder *s, ml_ref n, ml_ref node) {
    ml_type order = *ml_graph_type(s->from, n);
    const ml_type *t = ml_graph_type(s->to, node);
    for (int i = 0; i < order.rank; i++) order.size[i] = ml_type_size(t, order.axis[i]);
    return ml_permute(s->to, node, &order);
}

/* These two axes first. */
static ml_ref front(ml_graph *g, ml_ref node, ml_axis one, ml_axis two) {
    const ml_type *t = ml_graph_type(g, node);
    ml_type order = {.dtype = t->dtype};
    ml_axis first[] = {one, two};
    for (int i = 0; i < t->rank + 2; i++) {
        ml_axis axis = i < 2 ? first[i] : t->axis[i - 2];
        if (i >= 2 && (axis == one || axis == two)) continue;
        order.axis[order.rank] = axis;
        order.size[order.rank++] = ml_type_size(t, axis);
    }
    return ml_permute(g, node, &order);
}

/* Elements of `node` along axes a and b at i32 indices that count along both. */
static ml_ref pick(ml_graph *g, ml_ref node, ml_axis a, ml_axis b, ml_ref index) {
    ml_axis flat = ml_axis_named(g, "flat'sent");
    return ml_gather(g, ml_merge(g, front(g, node, a, b), a, b, flat), index, flat);
}

ml_ref rows_send(sharder *s, ml_ref n, ml_ref node, const ml_placements *at) {
    int i = shard_sent_over(s, at);
    const shard_exchange *e = rows_exchange(s, n, at, i);
    exchange x = axes_of(s, n, e->owner, at, i);
    ml_ref packed = front(x.g, pick(x.g, node, x.axis[BATCH], x.axis[ROW], e->index), x.axis[PEER],
                          x.axis[PLACE]);
    ml_ref sent = all_to_all(&x, packed);
    sent = ml_rename(x.g, sent, x.axis[PEER], x.axis[BATCH]);
    sent = ml_rename(x.g, sent, x.axis[PLACE], x.axis[ROW]);
    return ordered(s, n, sent);
}

ml_ref rows_bring_back(sharder *s, ml_ref n, ml_ref node, const ml_placements *at) {
    int i = shard_sent_over(s, at);
    const shard_exchange *e = rows_exchange(s, n, at, i);
    exchange x = axes_of(s, n, e->owner, at, i);
    ml_ref back = ml_rename(x.g, node, x.axis[BATCH], x.axis[PEER]);
    back = ml_rename(x.g, back, x.axis[ROW], x.axis[PLACE]);
    back = all_to_all(&x, front(x.g, back, x.axis[PEER], x.axis[PLACE]));
    back = ordered(s, n, pick(x.g, back, x.axis[PEER], x.axis[PLACE], e->slot));
    const ml_type *t = ml_graph_type(x.g, back);
    if (ml_dtypes[t->dtype].kind != ML_KIND_FLOAT) return back;
    ml_ref lost = op2(&x, ML_OP_LT, e->slot, number(&x, 0));
    return ml_where(x.g, ml_broadcast(x.g, lost, t), ml_const(x.g, (ml_dtype)t->dtype, NAN), back);
}

/* Of sent rows: the capacity slots that one fills. */
ml_ref rows_own(sharder *s, ml_ref n, ml_ref node, const ml_placements *at) {
    int i = shard_sent_over(s, at);
    if (i < 0) return shard_rows_of_own(s, n, node, at);
    const shard_exchange *e = rows_exchange(s, n, at, i);
    exchange x = axes_of(s, n, e->owner, at, i);
    ml_ref full = ml_cast(x.g, op2(&x, ML_OP_GE, e->index, number(&x, 0)), ML_I32);
    full = ml_rename(x.g, all_to_all(&x, full), x.axis[PEER], x.axis[BATCH]);
    return ml_cast(x.g, ml_rename(x.g, full, x.axis[PLACE], x.axis[ROW]), ML_BOOL);
}

ml_ref rows_overflows(sharder *s) {
    ml_graph *g = s->to;
    ml_type one = {.dtype = ML_F32, .rank = 1, .size = {1}};
    one.axis[0] = ml_axis_named(g, "exchanges'watched");
    ml_ref *parts = ML_NEW_ARRAY(s->scratch, ml_ref, s->overflow_checks.count);
    for (uint32_t i = 0; i < s->overflow_checks.count; i++)
        parts[i] = ml_broadcast(g, s->overflow_checks.at[i].number, &one);
    ml_ref all = ml_concat(g, parts, (int)s->overflow_checks.count, one.axis[0]);
    for (int i = 0; i < s->layout->count && !s->layout->stages.on; i++) {
        int64_t args[] = {i, s->layout->axis[i].size, ML_COMBINE_MAX};
        if (args[1] > 1) all = ml_graph_add(g, ML_OP_ALL_REDUCE, &all, 1, args, 3, NULL);
    }
    return all;
}

ml_ref rows_unless(sharder *s, ml_ref overflows, const ml_update *update, ml_ref value) {
    ml_graph *g = s->to;
    const ml_state *state = ml_graph_state(s->from, update->state);
    ml_axis over = ml_graph_type(g, overflows)->axis[0];
    ml_ref most = ml_reduce(g, ML_OP_MAX, overflows, &over, 1);
    ml_ref fit = ml_map2(g, ML_OP_EQ, most, ml_const(g, ML_F32, 0));
    ml_placements at = ml_layout_place(s->layout, s->from, &state->type, (int)state->kind, NULL);
    ml_type local = ml_layout_local(s->layout, &state->type, &at);
    int64_t id = update->state;
    ml_ref before = ml_graph_add(g, ML_OP_STATE, NULL, 0, &id, 1, &local);
    before = ml_permute(g, before, ml_graph_type(g, value));
    return ml_where(g, fit, value, before);
}

/* ---- Proposals ------------------------------------------------------------------------------- */

/* Where the rows and the batch are in a value. */
typedef struct {
    ml_axis row, batch;
    const ml_ref *owner;
} rows_of;

static bool has(const sharder *s, ml_ref n, ml_axis axis) {
    return ml_type_find(ml_graph_type(s->from, n), axis) >= 0;
}

/* Whether it can be computed on sent rows, or does not depend on them. */
static bool fits(const sharder *s, ml_ref n, const rows_of *rows) {
    bool row = has(s, n, rows->row), batch = has(s, n, rows->batch);
    if (!row && !batch) return true;
    const ml_node *node = ml_graph_node(s->from, n);
    if (s->values[n].free) {
        if (node->op == ML_OP_RENAME || !node->source_count) return false;
        for (int k = 0; k < node->source_count; k++)
            if (!fits(s, ml_graph_source(s->from, n, k), rows)) return false;
        return true;
    }
    if (!row || !batch) return false;
    if (s->values[n].repeats) return fits(s, ml_graph_source(s->from, n, 0), rows);
    const ml_ref *owner = s->values[n].owner;
    return !owner[0] || (owner[0] == rows->owner[0] && owner[1] == rows->owner[1]);
}

/* Over the mesh axes before this one, nothing cuts the rows or their groups. */
static bool uncut(const sharder *s, ml_ref source, int k, const rows_of *rows) {
    for (int j = 0; j < s->mesh; j++) {
        ml_placement p = s->need[k].over[j];
        if (p.kind == ML_OWNED || p.kind == ML_SENT) return false;
        if (p.kind == ML_SPLIT && ml_graph_type(s->from, source)->axis[p.axis] == rows->row)
            return false;
    }
    return true;
}

static ml_placement sent(const sharder *s, ml_ref n, const rows_of *rows) {
    const ml_type *t = ml_graph_type(s->from, n);
    int row = ml_type_find(t, rows->row), batch = ml_type_find(t, rows->batch);
    if (row < 0 || batch < 0) return (ml_placement){0};
    return (ml_placement){ML_SENT, (uint8_t)row, (uint8_t)batch};
}

/* The version of n that is sent over this mesh axis; 0: none. */
static uint32_t sent_version(const sharder *s, ml_ref n) {
    while (s->values[n].repeats) n = ml_graph_source(s->from, n, 0);
    for (uint32_t v = shard_next_version(s, n, 0); v; v = shard_next_version(s, n, v))
        if (s->versions.at[v].at.over[s->mesh].kind == ML_SENT) return v;
    return 0;
}

/* Rows of a batch that is split over this mesh axis, as the groups are. */
static void propose_product(sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    const ml_ref *sources = ml_graph_sources(s->from, n);
    const ml_type *bounds = ml_graph_type(s->from, sources[2]);
    rows_of rows = {(ml_axis)ml_graph_args(s->from, n)[0], 0, &sources[2]};
    ml_axis group = (ml_axis)ml_graph_args(s->from, n)[1];
    int operands = node->op == ML_OP_RAGGED_DOT ? 1 : 2;
    int64_t ranks = s->layout->axis[s->mesh].size;
    if (bounds->rank < 2 || shard_preference(s, group) >= SHARD_UNLISTED) return;
    rows.batch = bounds->axis[bounds->axis[0] == group];
    int groups = ml_type_find(bounds, group);
    if (bounds->size[groups] % ranks || bounds->size[!groups] % ranks) return;
    for (int j = 0; j < s->mesh; j++)
        if (shard_same(s->need[2].over[j], shard_split(groups))) return;
    bool split = false;
    for (int k = 0; k < operands; k++) {
        if (!fits(s, sources[k], &rows) || !uncut(s, sources[k], k, &rows)) return;
        uint32_t v = s->values[sources[k]].versions;
        int batch = ml_type_find(ml_graph_type(s->from, sources[k]), rows.batch);
        for (; v; v = shard_next_version(s, sources[k], v))
            split = split || shard_same(s->versions.at[v].at.over[s->mesh], shard_split(batch));
        split = split || sent_version(s, sources[k]);
    }
    if (!split) return;
    shard_strategy *to = shard_strategy_new(s, n, SHARD_OWN);
    ml_placement *need = &s->pool.at[to->sources];
    for (int k = 0; k < operands; k++) need[k] = sent(s, sources[k], &rows);
    if (operands == 1)
        need[1] = shard_split(ml_type_find(ml_graph_type(s->from, sources[1]), group));
    need[2] = need[3] = shard_split(!groups);
    to->out[0] = operands == 1 ? sent(s, n, &rows) : shard_split(0);
}

void rows_propose_sent(sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    if (!(s->layout->exchange > 0)) return;
    if (node->op == ML_OP_RAGGED_DOT || node->op == ML_OP_RAGGED_OUTER) {
        propose_product(s, n);
        return;
    }
    const bool most = node->op == ML_OP_MAX;
    if (ml_ops[node->op].op_class != ML_CLASS_MAP && node->op != ML_OP_SUM && !most) return;
    rows_of rows = {0};
    for (int k = 0; k < node->source_count && !rows.row; k++) {
        ml_ref source = ml_graph_source(s->from, n, k);
        while (s->values[source].repeats) source = ml_graph_source(s->from, source, 0);
        uint32_t v = sent_version(s, source);
        if (!v) continue;
        ml_placement at = s->versions.at[v].at.over[s->mesh];
        const ml_type *t = ml_graph_type(s->from, source);
        rows = (rows_of){t->axis[at.axis], t->axis[at.batch], s->values[source].owner};
    }
    if (!rows.row || has(s, n, rows.row) != has(s, n, rows.batch)) return;
    const bool over_rows = !has(s, n, rows.row);
    if (over_rows && !most) return;
    for (int k = 0; k < node->source_count; k++) {
        ml_ref source = ml_graph_source(s->from, n, k);
        if (!fits(s, source, &rows) || !uncut(s, source, k, &rows)) return;
    }
    shard_strategy *to = shard_strategy_new(s, n, SHARD_OWN);
    for (int k = 0; k < node->source_count; k++)
        s->pool.at[to->sources + (uint32_t)k] = sent(s, ml_graph_source(s->from, n, k), &rows);
    to->out[0] = over_rows ? (ml_placement){ML_PARTIAL_MAX, 0} : sent(s, n, &rows);
}
