/* How products by groups can be cut, and what follows for their rows: over groups, each rank has
 * the rows of its own (ML_OWNED), or rows are sent to it (ML_SENT, moe_dispatch.c). */
#include <string.h>

#include "runtime/ops/ragged/ragged.h"
#include "runtime/ops/ragged/shard_rows.h"

/* Rows of groups: a rank with some of the groups computes a part of the sum; a rank with some of
 * the rows counts its groups' bounds from where its rows begin. */
static void propose_rows(sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    const ml_type *t = ml_graph_type(s->from, n);
    for (int k = 0; k < 2; k++) {
        const ml_type *from = shard_source_type(s, n, k);
        for (int i = 0; i < from->rank; i++) {
            int at[RAGGED_MOST_SOURCES];
            for (int other = 0; other < node->source_count; other++)
                at[other] = ml_type_find(shard_source_type(s, n, other), from->axis[i]);
            if (k == 1 && at[0] >= 0) continue; /* proposed already */
            shard_cut_evenly(s, n, from->axis[i], at, ml_type_find(t, from->axis[i]),
                             ML_PARTIAL_SUM);
        }
    }
    if (node->op == ML_OP_RAGGED_DOT) return;
    int groups = ml_type_find(shard_source_type(s, n, 2), t->axis[0]);
    int at[RAGGED_MOST_SOURCES] = {-1, -1, groups, groups, -1};
    shard_cut_evenly(s, n, t->axis[0], at, 0, 0);
}

/* Cut over groups, rows of the same groups are enough. */
static void take_own_rows(sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    int operands = node->op == ML_OP_RAGGED_DOT ? 1 : 2;
    for (uint32_t i = 0; i < s->strategy_count; i++) {
        ml_placement *need = &s->pool.at[s->strategies.at[i].sources];
        ml_placement over_groups = shard_split(shard_source_type(s, n, 2)->rank - 1);
        bool cut_before = false; /* these groups would be others than those of the rows */
        for (int j = 0; j < s->mesh; j++)
            cut_before = cut_before || shard_same(s->need[2].over[j], over_groups);
        if (cut_before || !shard_same(need[2], over_groups)) continue;
        for (int k = 0; k < operands; k++) {
            ml_ref source = ml_graph_source(s->from, n, k);
            int row = shard_own_rows(s, source);
            const ml_ref *owner = shard_owner(s, source);
            if (row < 0 || owner[0] != ml_graph_source(s->from, n, 2) ||
                owner[1] != ml_graph_source(s->from, n, 3))
                continue;
            need[k] = (ml_placement){ML_OWNED, (uint8_t)row};
        }
    }
}

/* Both sources are sums over the ranks as well: so is what they add up to. */
static bool sums(const sharder *s, ml_ref n) {
    return shard_source_has(s, n, 0, (ml_placement){ML_PARTIAL_SUM, 0}) &&
           shard_source_has(s, n, 1, (ml_placement){ML_PARTIAL_SUM, 0});
}

/* Elementwise ops, sums over other axes, and maxima, of rows of one partition into groups. */
static void propose_own_rows(sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    const ml_type *t = ml_graph_type(s->from, n);
    const ml_ref *owner = NULL;
    ml_axis row_axis = 0;
    const bool most = node->op == ML_OP_MAX;
    if (ml_ops[node->op].op_class != ML_CLASS_MAP && node->op != ML_OP_SUM && !most) return;
    for (int k = 0; k < node->source_count; k++)
        for (int j = 0; j < s->mesh; j++)
            if (s->need[k].over[j].kind == ML_OWNED || s->need[k].over[j].kind == ML_SENT)
                return; /* over one mesh axis only */
    for (int k = 0; k < node->source_count; k++) {
        ml_ref source = ml_graph_source(s->from, n, k);
        int row = shard_own_rows(s, source);
        if (row < 0) continue;
        const ml_ref *other = shard_owner(s, source);
        ml_axis axis = ml_graph_type(s->from, source)->axis[row];
        if (owner && (other[0] != owner[0] || other[1] != owner[1] || axis != row_axis)) return;
        owner = other;
        row_axis = axis;
    }
    if (!owner || (ml_type_find(t, row_axis) < 0 && !most)) return;
    if ((node->op == ML_OP_ADD || node->op == ML_OP_SUB) && sums(s, n)) return;
    shard_strategy *to = shard_strategy_new(s, n, SHARD_OWN);
    for (int k = 0; k < node->source_count; k++) {
        int row = shard_own_rows(s, ml_graph_source(s->from, n, k));
        if (row >= 0)
            s->pool.at[to->sources + (uint32_t)k] = (ml_placement){ML_OWNED, (uint8_t)row};
    }
    const int row = ml_type_find(t, row_axis);
    to->out[0] =
        row < 0 ? (ml_placement){ML_PARTIAL_MAX, 0} : (ml_placement){ML_OWNED, (uint8_t)row};
}

static void propose_elementwise(sharder *s, ml_ref n) {
    propose_own_rows(s, n);
    rows_propose_sent(s, n);
}

static const shard_row_rules rows = {
    .propose = propose_elementwise,
    .send = rows_send,
    .bring_back = rows_bring_back,
    .own = rows_own,
    .overflows = rows_overflows,
    .unless = rows_unless,
};

void ragged_propose(sharder *s, ml_ref n) {
    s->rows = &rows;
    propose_rows(s, n);
    take_own_rows(s, n);
    rows_propose_sent(s, n);
}

/* Groups whose rows were sent over a mesh axis before are not cut again. */
bool ragged_feasible(const sharder *s, ml_ref n, const shard_strategy *strategy,
                     const ml_placements *need) {
    int i = shard_sent_over(s, &need[0]);
    if (i < 0 || i >= s->mesh) return true;
    ml_placement cut = s->pool.at[strategy->sources + 2];
    const ml_type *bounds = ml_graph_type(s->from, ml_graph_source(s->from, n, 2));
    return cut.kind != ML_SPLIT || bounds->axis[cut.axis] != (ml_axis)ml_graph_args(s->from, n)[1];
}

/* A product by some of the groups is 0 in others' rows: a part of a sum, and rows of its own.
 * (Over one mesh axis only: parts of parts would have to match in their order too.) */
void ragged_placed(sharder *s, ml_ref n, const ml_placements *need, const ml_placements *out,
                   ml_ref local) {
    const ml_type *bounds = ml_graph_type(s->from, ml_graph_source(s->from, n, 2));
    int row = ml_type_find(ml_graph_type(s->from, n), (ml_axis)ml_graph_args(s->from, n)[0]);
    ml_placements own = *out;
    int cuts = 0;
    for (int i = 0; i < s->layout->count; i++) {
        if (!shard_same(need[2].over[i], shard_split(bounds->rank - 1))) continue;
        cuts++;
        own.over[i] = (ml_placement){ML_OWNED, (uint8_t)row};
    }
    if (cuts != 1) return;
    for (int i = 0; i < 2; i++) s->values[n].owner[i] = ml_graph_source(s->from, n, 2 + i);
    shard_add_version(s, n, &own, local, false);
}

const ml_ref *ragged_row_bounds(const ml_graph *g, ml_ref n) {
    return &ml_graph_sources(g, n)[2];
}

/* ---- One rank's part ------------------------------------------------------------------------- */

/* Bounds of groups of rows, counted from this rank's first row. */
static ml_ref local_bounds(sharder *s, ml_ref bounds, ml_ref base, int64_t rows) {
    ml_ref i = ml_map2(s->to, ML_OP_SUB, bounds, base);
    i = ml_map2(s->to, ML_OP_MAXIMUM, i, ml_const_int(s->to, ML_I32, 0));
    return ml_map2(s->to, ML_OP_MINIMUM, i, ml_const_int(s->to, ML_I32, rows));
}

/* The scale, if any, is that of all ranks. */
static void local_sources(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *need,
                          ml_ref *local) {
    if (ml_graph_node(s->from, n)->source_count > RAGGED_SCALE)
        local[RAGGED_SCALE] = sources[RAGGED_SCALE];
    const ml_type *x = ml_graph_type(s->to, sources[0]);
    int rows = ml_type_find(x, (ml_axis)ml_graph_args(s->from, n)[0]);
    int sent = shard_sent_over(s, &need[0]);
    if (sent >= 0) {
        const shard_exchange *e = rows_exchange(s, ml_graph_source(s->from, n, 0), &need[0], sent);
        memcpy(local, (ml_ref[]){sources[0], sources[1], e->starts, e->ends}, 4 * sizeof *local);
        return;
    }
    ml_ref base = shard_base(s, &need[0], rows, x->size[rows]);
    for (int k = 0; k < 4; k++)
        local[k] = k < 2 || !base ? sources[k] : local_bounds(s, sources[k], base, x->size[rows]);
}

void ragged_local(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *need,
                  const ml_placements *out, ml_ref *outputs) {
    const ml_node *node = ml_graph_node(s->from, n);
    const ml_type local = ml_layout_local(s->layout, ml_graph_type(s->from, n), &out[0]);
    ml_ref own[RAGGED_MOST_SOURCES];
    local_sources(s, n, sources, need, own);
    outputs[0] = ml_graph_add(s->to, (ml_op)node->op, own, node->source_count,
                              ml_graph_args(s->from, n), node->arg_count, &local);
    for (int i = 1; i < ml_op_outputs(s->from, n); i++) outputs[i] = ml_out(s->to, outputs[0], i);
}
