/* Linear scans with few independent rows, cut along their axis for a GPU's multiprocessors.
 *
 * A kernel follows the state of a row (a head of a sequence) position by position, so that rows are
 * all that fills the GPU. Where they are too few, the axis is cut into segments, which become a
 * batch axis: the affine map of each segment (linear_scan/parts.h), the states between segments,
 * then all segments side by side, each from its own state. That computes the states twice, which
 * pays where a quarter of the GPU or less would run otherwise. */
#include "runtime/graph/rewrite.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/linear_scan/parts.h"
#include "runtime/passes/passes.h"

enum {
    TILE = 128, /* values that one block follows */
    MOST_SOURCES = LINEAR_SCAN_MOST_SOURCES + 2,
};

typedef struct {
    ml_graph *g;
    ml_linear_scan scan; /* of one segment */
    ml_axis segments;
    int64_t count;
} segmenting;

static int64_t rows_of(const ml_graph *g, ml_ref state, const ml_linear_scan *scan) {
    const int64_t values = (scan->value_size + TILE - 1) / TILE;
    return ml_type_elements(ml_graph_type(g, state)) / (scan->key_size * scan->value_size) * values;
}

/* Into how many segments: enough for three quarters of the multiprocessors; 1 where rows fill a
 * quarter. */
static int64_t segments_for(const ml_graph *g, ml_ref state, const ml_linear_scan *scan,
                            int multiprocessors, int64_t least) {
    int64_t rows = rows_of(g, state, scan), count = 1;
    if (4 * rows > multiprocessors) return 1;
    while (4 * rows * count < 3 * multiprocessors && scan->length % (2 * count) == 0 &&
           scan->length / (2 * count) >= least)
        count *= 2;
    return count;
}

static ml_ref with_segments(const segmenting *x, ml_ref n) {
    ml_type type = *ml_graph_type(x->g, n);
    for (int i = type.rank++; i > 0; i--) {
        type.axis[i] = type.axis[i - 1];
        type.size[i] = type.size[i - 1];
    }
    type.axis[0] = x->segments;
    type.size[0] = x->count;
    return ml_broadcast(x->g, n, &type);
}

/* The operands with an axis of segments, but for the states. */
static void cut(const segmenting *x, const ml_ref *sources, int count, int64_t length,
                ml_ref *parts) {
    for (int i = 0; i < count; i++) {
        const bool has = ml_type_find(ml_graph_type(x->g, sources[i]), x->scan.axis) >= 0;
        parts[i] = !has ? sources[i]
                        : ml_split(x->g, sources[i], x->scan.axis, x->segments, x->count,
                                   x->scan.axis, length);
    }
}

/* The state before each segment {segments, ...}, and after the last. */
static ml_ref states_between(const segmenting *x, const ml_ref *sources, const ml_linear_scan *scan,
                             ml_ref first, ml_ref *final) {
    ml_ref parts[LINEAR_SCAN_MOST_SOURCES];
    cut(x, sources, LINEAR_SCAN_FIRST_PAIR + 2 * scan->rank, scan->length, parts);
    parts[LINEAR_SCAN_STATE] = with_segments(x, first);
    const linear_scan_map map = linear_scan_map_of(x->g, parts, scan);
    return linear_scan_chain(x->g, &map, x->segments, first, scan, final);
}

/* {axis, ...} of the whole from {axis, segments, ...}. */
static ml_ref joined(const segmenting *x, ml_ref n, const ml_type *as) {
    ml_graph *g = x->g;
    ml_type order = *ml_graph_type(g, n);
    const int at = ml_type_find(&order, x->segments);
    for (int i = at; i > 0; i--) {
        order.axis[i] = order.axis[i - 1];
        order.size[i] = order.size[i - 1];
    }
    order.axis[0] = x->segments;
    order.size[0] = x->count;
    n = ml_merge(g, ml_permute(g, n, &order), x->segments, x->scan.axis, x->scan.axis);
    return ml_permute(g, n, as);
}

static void segment(segmenting *x, const ml_graph *from, ml_ref n, const ml_ref *sources,
                    ml_ref *outputs) {
    ml_graph *g = x->g;
    const bool grad = ml_graph_node(from, n)->op == ML_OP_LINEAR_SCAN_GRAD;
    const int own = LINEAR_SCAN_FIRST_PAIR + 2 * x->scan.rank, count = own + (grad ? 2 : 0);
    ml_ref parts[MOST_SOURCES], reversed[MOST_SOURCES], final;
    x->scan.length /= x->count;
    cut(x, sources, count, x->scan.length, parts);
    parts[LINEAR_SCAN_STATE] =
        states_between(x, sources, &x->scan, sources[LINEAR_SCAN_STATE], &final);
    if (grad) {
        ml_linear_scan adjoint;
        linear_scan_adjoint(g, sources, sources[own], &x->scan, reversed, &adjoint);
        parts[own + 1] = states_between(x, reversed, &adjoint, sources[own + 1], &final);
    }
    const ml_ref made =
        grad ? ml_linear_scan_grad(g, parts, &x->scan) : ml_linear_scan_new(g, parts, &x->scan);
    for (int i = 0; i < ml_op_outputs(from, n); i++) {
        ml_type type;
        ml_linear_scan_type(from, n, i, &type);
        const bool state = i == (grad ? LINEAR_SCAN_STATE : 1);
        outputs[i] = state ? final : joined(x, ml_out(g, made, i), &type);
    }
}

typedef struct {
    int multiprocessors;
    int64_t least;
    ml_linear_scan_served *served;
    const void *context;
} choice;

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    const choice *c = r->context;
    const bool scan = ml_op_is_linear_scan((ml_op)ml_graph_node(r->from, n)->op);
    if (!scan || !c->served(c->context, r->from, n)) return rewrite_copy(r, n, sources);
    segmenting x = {.g = r->to};
    ml_linear_scan_read(r->from, n, &x.scan);
    const ml_ref state = ml_graph_source(r->from, n, LINEAR_SCAN_STATE);
    x.count = segments_for(r->from, state, &x.scan, c->multiprocessors, c->least);
    if (x.count == 1) return rewrite_copy(r, n, sources);
    const char *axis = ml_axis_name(r->to, x.scan.axis);
    x.segments = ml_axis_named(r->to, ml_arena_format(r->scratch, "%s'segments", axis));
    ml_ref *outputs = r->outputs[n] = ML_NEW_ARRAY(r->scratch, ml_ref, MOST_SOURCES);
    segment(&x, r->from, n, sources, outputs);
    return outputs[0];
}

ml_graph *ml_segment_linear_scans(const ml_graph *from, ml_roots *roots, int multiprocessors,
                                  int64_t least, ml_linear_scan_served *served,
                                  const void *context) {
    choice c = {multiprocessors, least, served, context};
    return rewrite_run(from, roots, NULL, rule, &c);
}
