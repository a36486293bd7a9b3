/* How linear scans and their gradients can be cut: along a batch axis, along the values, of which
 * each is a recurrence of its own, or along the scan's own axis by passing states.
 *
 * Along the axis each rank has consecutive positions: it computes the affine map of its part
 * (linear_scan/parts.h), all ranks gather the maps, whose bytes do not depend on the length, each
 * follows the states from rank to rank and begins its part with its own. The gradient does so in
 * the other direction too. Keys are whole. */
#include "runtime/ops/linear_scan/parts.h"
#include "runtime/shard/shard_internal.h"

typedef struct {
    sharder *s;
    ml_ref n;
    ml_linear_scan scan;
    int count; /* of sources */
    bool grad;
} linear_scan;

static const ml_type *type_of(const linear_scan *x, int k) {
    return ml_graph_type(x->s->from, ml_graph_source(x->s->from, x->n, k));
}

static void split_along(const linear_scan *x, ml_axis axis, int64_t size) {
    sharder *s = x->s;
    int at[LINEAR_SCAN_MOST_SOURCES + 2];
    int64_t ranks = s->layout->axis[s->mesh].size;
    bool uneven = size % ranks != 0;
    for (int k = 0; k < x->count; k++) at[k] = ml_type_find(type_of(x, k), axis);
    /* what fills a part up would be in the states, or in sums over the values */
    bool filled = axis != x->scan.axis && !(x->grad && axis == x->scan.values);
    if (size < ranks || (uneven && !filled)) return;
    if (!shard_candidate(s, x->n, axis, at)) return;
    shard_strategy *to = shard_strategy_new(s, x->n, shard_preference(s, axis));
    to->uneven = uneven;
    for (int k = 0; k < x->count; k++)
        if (at[k] >= 0) s->pool.at[to->sources + (uint32_t)k] = shard_split(at[k]);
    for (int i = 0; i < ml_op_outputs(s->from, x->n); i++) {
        ml_type type;
        ml_linear_scan_type(s->from, x->n, i, &type);
        int position = ml_type_find(&type, axis);
        uint8_t whole = axis == x->scan.axis ? ML_REPLICATED : ML_PARTIAL_SUM;
        to->out[i] = position >= 0 ? shard_split(position) : (ml_placement){whole, 0};
    }
}

static linear_scan read_node(sharder *s, ml_ref n) {
    linear_scan x = {.s = s, .n = n, .count = ml_graph_node(s->from, n)->source_count};
    x.grad = ml_graph_node(s->from, n)->op == ML_OP_LINEAR_SCAN_GRAD;
    ml_linear_scan_read(s->from, n, &x.scan);
    return x;
}

void linear_scan_propose(sharder *s, ml_ref n) {
    const linear_scan x = read_node(s, n);
    const ml_type *state = type_of(&x, LINEAR_SCAN_STATE);
    for (int i = 0; i < state->rank; i++)
        if (state->axis[i] != x.scan.keys) split_along(&x, state->axis[i], state->size[i]);
    const int at = ml_type_find(type_of(&x, LINEAR_SCAN_Q), x.scan.axis);
    for (int i = 0; i < s->mesh; i++) /* states are passed over one mesh axis */
        if (shard_along(s->need[LINEAR_SCAN_Q].over[i], at)) return;
    split_along(&x, x.scan.axis, x.scan.length);
}

/* ---- One rank's part ------------------------------------------------------------------------- */

/* The state before this rank's part, and after the whole. */
static ml_ref passed(const linear_scan *x, const ml_ref *sources, const ml_linear_scan *scan,
                     ml_ref first, int mesh, ml_ref *final) {
    ml_graph *g = x->s->to;
    const ml_axis parts = ml_axis_named(g, SHARD_PARTS);
    linear_scan_map map = linear_scan_map_of(g, sources, scan);
    if (map.last) map.last = shard_gathered_parts(x->s, map.last, mesh, parts);
    map.total = shard_gathered_parts(x->s, map.total, mesh, parts);
    const ml_ref states = linear_scan_chain(g, &map, parts, first, scan, final);
    return ml_gather(g, states, shard_coordinate(x->s, mesh), parts);
}

/* The mesh axis over which the scan's axis is cut; -1: none. */
static int cut_over(const linear_scan *x, const ml_placements *need) {
    const int at = ml_type_find(type_of(x, LINEAR_SCAN_Q), x->scan.axis);
    for (int i = 0; i < x->s->layout->count; i++)
        if (shard_along(need[LINEAR_SCAN_Q].over[i], at)) return i;
    return -1;
}

void linear_scan_local(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *need,
                       const ml_placements *out, ml_ref *outputs) {
    (void)out;
    linear_scan x = read_node(s, n);
    ml_graph *g = s->to;
    ml_ref own[LINEAR_SCAN_MOST_SOURCES + 2], final = 0;
    const int mesh = cut_over(&x, need), dy = x.count - 2, dS = x.count - 1;
    for (int i = 0; i < x.count; i++) own[i] = sources[i];
    x.scan.length = ml_type_size(ml_graph_type(g, own[LINEAR_SCAN_Q]), x.scan.axis);
    if (x.scan.values)
        x.scan.value_size = ml_type_size(ml_graph_type(g, own[LINEAR_SCAN_STATE]), x.scan.values);
    if (mesh >= 0)
        own[LINEAR_SCAN_STATE] =
            passed(&x, sources, &x.scan, sources[LINEAR_SCAN_STATE], mesh, &final);
    if (x.grad && mesh >= 0) {
        ml_linear_scan adjoint;
        ml_ref reversed[LINEAR_SCAN_MOST_SOURCES];
        linear_scan_adjoint(g, sources, sources[dy], &x.scan, reversed, &adjoint);
        own[dS] = passed(&x, reversed, &adjoint, sources[dS], mesh, &final);
    }
    const ml_ref made =
        x.grad ? ml_linear_scan_grad(g, own, &x.scan) : ml_linear_scan_new(g, own, &x.scan);
    for (int i = 0; i < ml_op_outputs(s->from, n); i++) outputs[i] = ml_out(g, made, i);
    if (mesh >= 0) outputs[x.grad ? LINEAR_SCAN_STATE : 1] = final;
}
