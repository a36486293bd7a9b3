/* Scans by segments (recurrence/segments.c) with segments of another length: `segments` and
 * `steps`, the axes that the scan's axis is split into, get other sizes wherever they are. Where
 * one segment has all positions, both are the scan's own axis again, and the step over a segment
 * stands in place of the scan over segments: what its gradient computes again is then what the
 * forward pass computes, one node. */
#include "runtime/graph/infer.h"
#include "runtime/graph/rewrite.h"
#include "runtime/ops/recurrence/recurrence_internal.h"
#include "runtime/shard/layout.h"

typedef struct {
    ml_axis whole, segments, steps;
    int64_t count, size; /* of segments, on this rank; positions of one: now */
    int64_t to;          /* then; count * size: all */
    bool fixed;          /* a node depends on the present length */
} segmented;

/* Nodes of `from` as they are then, by node; outputs of those in whose place a step stands. */
typedef struct {
    ml_ref *made;
    ml_ref **outputs;
} copies;

typedef struct {
    const ml_graph *from;
    ml_graph *to;
    ml_arena *arena;
    ML_VEC(segmented) list;
    uint32_t nodes;   /* of `from` */
    copies functions; /* of nodes as parts of functions */
} resizing;

static bool to_whole(const segmented *s) {
    return s->to == s->count * s->size;
}

static segmented *of_axis(const resizing *x, int64_t axis) {
    for (uint32_t i = 0; i < x->list.count; i++) {
        segmented *s = &x->list.at[i];
        if (axis && (s->segments == axis || s->steps == axis)) return s;
    }
    return NULL;
}

static bool has(const ml_type *t, ml_axis axis) {
    return ml_type_find(t, axis) >= 0;
}

static bool involves(const resizing *x, const ml_type *t) {
    for (int i = 0; i < t->rank; i++)
        if (of_axis(x, t->axis[i])) return true;
    return false;
}

/* ---- Which there are, and what keeps one as it is ---- */

int64_t ml_recurrence_segment(const ml_graph *g, ml_ref n) {
    ml_recurrence r, inner;
    ml_axis whole, steps;
    ml_recurrence_read(g, n, &r);
    if (!recurrence_segment_axes(g, r.axis, &whole, &steps)) return 0;
    for (int i = 0; i < ml_recurrence_roots(&r); i++) {
        ml_refs body = {0};
        graph_reach(g, ml_recurrence_root(g, n, i), ml_graph_arena((ml_graph *)g), &body);
        for (uint32_t k = 0; k < body.count; k++) {
            if (ml_graph_node(g, body.at[k])->op != ML_OP_RECURRENCE) continue;
            ml_recurrence_read(g, body.at[k], &inner);
            if (inner.axis == steps) return inner.length;
        }
    }
    return 0;
}

static void find_scan(resizing *x, ml_ref n) {
    ml_recurrence r;
    segmented one = {0};
    ml_recurrence_read(x->from, n, &r);
    if (!recurrence_segment_axes(x->from, r.axis, &one.whole, &one.steps)) return;
    one.segments = r.axis;
    one.count = r.length;
    one.size = ml_recurrence_segment(x->from, n);
    segmented *known = of_axis(x, r.axis);
    if (known) {
        known->fixed |= known->count != one.count || (one.size && known->size != one.size);
        return;
    }
    one.fixed = one.size == 0;
    *ML_PUSH(x->arena, &x->list) = one;
}

static void check_type(const resizing *x, const ml_type *t) {
    for (int i = 0; i < t->rank; i++) {
        segmented *s = of_axis(x, t->axis[i]);
        if (!s) continue;
        s->fixed |= t->size[i] != (t->axis[i] == s->steps ? s->size : s->count);
        s->fixed |= has(t, s->whole);
    }
}

/* Sums over one of both axes, of what has both, depend on the length. */
static void check_reduction(const resizing *x, ml_ref n, segmented *s) {
    const ml_node *node = ml_graph_node(x->from, n);
    bool segments = false, steps = false, others = false;
    for (int i = 0; i < node->arg_count; i++) {
        const int64_t axis = ml_graph_args(x->from, n)[i];
        segments |= axis == s->segments;
        steps |= axis == s->steps;
        others |= axis != s->segments;
    }
    for (int i = 0; i < node->source_count && segments != steps; i++) {
        const ml_type *t = ml_graph_type(x->from, ml_graph_source(x->from, n, i));
        s->fixed |= has(t, s->segments) && has(t, s->steps);
    }
    s->fixed |= node->op == ML_OP_DOT && !others; /* a product over no axis */
}

static bool reduces(ml_op op) {
    return op == ML_OP_SUM || op == ML_OP_MAX || op == ML_OP_MIN || op == ML_OP_DOT;
}

/* Arguments that name one of the axes. */
static void check_argument(const resizing *x, ml_ref n, segmented *s) {
    const ml_op op = (ml_op)ml_graph_node(x->from, n)->op;
    const int64_t *args = ml_graph_args(x->from, n);
    bool known = op == ML_OP_RECURRENCE;
    if (op == ML_OP_SPLIT)
        known = args[0] == s->whole && args[1] == s->segments && args[3] == s->steps;
    if (op == ML_OP_MERGE)
        known = args[0] == s->segments && args[1] == s->steps && args[2] == s->whole;
    if (reduces(op))
        check_reduction(x, n, s);
    else
        s->fixed |= !known;
}

static void fix_all(const resizing *x, const ml_type *t) {
    for (int i = 0; i < t->rank; i++) {
        segmented *s = of_axis(x, t->axis[i]);
        if (s) s->fixed = true;
    }
}

static void check_node(const resizing *x, ml_ref n) {
    const ml_node *node = ml_graph_node(x->from, n);
    const ml_type *t = ml_graph_type(x->from, n);
    const ml_op_class of = ml_ops[node->op].op_class;
    const bool leaf = of == ML_CLASS_LEAF && node->op != ML_OP_PARAM && node->op != ML_OP_CONST;
    check_type(x, t);
    if (leaf || node->op == ML_OP_RANDOM || node->op == ML_OP_PLACE ||
        (of == ML_CLASS_COLLECTIVE && node->op != ML_OP_ALL_REDUCE))
        fix_all(x, t);
    for (int i = 0; i < node->arg_count; i++) {
        const ml_arg_kind kind = ml_op_arg_of((ml_op)node->op, i)->kind;
        const bool axis = ml_arg_is_axis(kind) || kind == ML_ARG_AXIS_OR_0;
        segmented *s = axis ? of_axis(x, ml_graph_args(x->from, n)[i]) : NULL;
        if (s) check_argument(x, n, s);
    }
}

/* live: by node; NULL: all are. */
static void find(resizing *x, const ml_graph *from, const bool *live) {
    x->from = from;
    x->nodes = ml_graph_count(from);
    for (ml_ref n = 1; n < x->nodes; n++)
        if ((!live || live[n]) && ml_graph_node(from, n)->op == ML_OP_RECURRENCE) find_scan(x, n);
    for (ml_ref n = 1; n < x->nodes && x->list.count; n++)
        if (!live || live[n]) check_node(x, n);
}

/* What n is computed of, functions too, by node. */
static bool *find_live(const ml_graph *g, ml_ref n, ml_arena *arena) {
    bool *live = ML_NEW_ARRAY(arena, bool, ml_graph_count(g));
    live[n] = true;
    for (ml_ref i = n; i > 0; i--) {
        const ml_node *node = ml_graph_node(g, i);
        for (int k = 0; live[i] && k < node->source_count; k++)
            live[ml_graph_source(g, i, k)] = true;
        for (int k = 0; live[i] && k < node->arg_count; k++)
            if (ml_op_arg_of((ml_op)node->op, k)->kind == ML_ARG_FUNCTION)
                live[ml_graph_args(g, i)[k]] = true;
    }
    return live;
}

/* ---- Other sizes ---- */

static ml_type resized_type(const resizing *x, const ml_type *t) {
    ml_type out = {.dtype = t->dtype};
    for (int i = 0; i < t->rank; i++) {
        const segmented *s = of_axis(x, t->axis[i]);
        ml_axis axis = t->axis[i];
        int64_t size = t->size[i];
        if (s && !s->fixed) {
            if (to_whole(s) && axis == s->segments) continue;
            size = axis == s->steps ? s->to : s->count * s->size / s->to;
            if (to_whole(s)) axis = s->whole;
        }
        out.axis[out.rank] = axis;
        out.size[out.rank++] = size;
    }
    return out;
}

static bool changes(const resizing *x, ml_ref n) {
    if (involves(x, ml_graph_type(x->from, n))) return true;
    for (int i = 0; i < ml_graph_node(x->from, n)->source_count; i++)
        if (involves(x, ml_graph_type(x->from, ml_graph_source(x->from, n, i)))) return true;
    return false;
}

static ml_ref function_of(resizing *x, ml_ref root);

/* The node's arguments: how many are left. */
static int resized_args(resizing *x, ml_ref n, int64_t *args) {
    const ml_op op = (ml_op)ml_graph_node(x->from, n)->op;
    const int count = ml_graph_node(x->from, n)->arg_count;
    int left = 0;
    for (int i = 0; i < count; i++) {
        const ml_arg_kind kind = ml_op_arg_of(op, i)->kind;
        const int64_t old = ml_graph_args(x->from, n)[i];
        const bool axis = ml_arg_is_axis(kind) || kind == ML_ARG_AXIS_OR_0;
        const segmented *s = axis ? of_axis(x, old) : NULL;
        args[left] = old;
        if (kind == ML_ARG_FUNCTION && old) args[left] = function_of(x, (ml_ref)old);
        if (s && !s->fixed && to_whole(s)) {
            if (old == s->segments) continue;
            args[left] = s->whole;
        }
        left++;
    }
    const segmented *s = count ? of_axis(x, ml_graph_args(x->from, n)[op == ML_OP_SPLIT]) : NULL;
    if (!s || s->fixed) return left;
    if (op == ML_OP_RECURRENCE)
        args[2] = ml_graph_args(x->from, n)[0] == s->steps ? s->to : s->count * s->size / s->to;
    if (op == ML_OP_SPLIT) args[2] = s->count * s->size / s->to, args[4] = s->to;
    return left;
}

/* A node whose axes are the same, or change. */
static ml_ref resized(resizing *x, ml_ref n, const ml_ref *sources) {
    const ml_node node = *ml_graph_node(x->from, n);
    const ml_op op = (ml_op)node.op;
    ml_graph *g = x->to;
    if (op == ML_OP_OUT) return ml_out(g, sources[0], (int)ml_graph_args(x->from, n)[0]);
    if (!changes(x, n) && op != ML_OP_RECURRENCE) {
        const uint8_t kept = ML_NODE_FUNCTION | ML_NODE_BACKWARD | ML_NODE_COPY;
        const uint8_t set = g->flags & kept;
        return graph_copy_node(g, x->from, n, sources, set, ML_NODE_FUNCTION & (uint8_t)~set);
    }
    int64_t *args = ML_NEW_ARRAY(x->arena, int64_t, node.arg_count + 1);
    const int left = resized_args(x, n, args);
    graph_take_origin(g, x->from, n);
    const ml_type type = resized_type(x, ml_graph_type(x->from, n));
    const int64_t first = node.arg_count ? ml_graph_args(x->from, n)[op == ML_OP_SPLIT] : 0;
    const segmented *s = op == ML_OP_SPLIT || op == ML_OP_MERGE ? of_axis(x, first) : NULL;
    const bool none = reduces(op) && node.arg_count && left == 0;
    if (op == ML_OP_PERMUTE || none || (s && !s->fixed && to_whole(s)))
        return ml_permute(g, sources[0], &type);
    if (op == ML_OP_BROADCAST)
        return ml_graph_type(g, sources[0])->rank == type.rank ? ml_permute(g, sources[0], &type)
                                                               : ml_broadcast(g, sources[0], &type);
    return ml_graph_add(g, op, sources, node.source_count, args, left,
                        op == ML_OP_RECURRENCE ? NULL : &type);
}

static copies copies_new(const resizing *x) {
    return (copies){ML_NEW_ARRAY(x->arena, ml_ref, x->nodes),
                    ML_NEW_ARRAY(x->arena, ml_ref *, x->nodes)};
}

static ml_ref resized_node(resizing *x, ml_ref n, const ml_ref *sources, ml_ref **outputs);

static void copy_inside(resizing *x, ml_ref n, const ml_ref *values, copies *c) {
    const ml_node node = *ml_graph_node(x->from, n);
    if (node.op == ML_OP_PARAM && values) {
        c->made[n] = values[ml_graph_args(x->from, n)[0]];
        return;
    }
    ml_ref *sources = ML_NEW_ARRAY(x->arena, ml_ref, node.source_count + 1);
    for (int k = 0; k < node.source_count; k++)
        sources[k] = c->made[ml_graph_source(x->from, n, k)];
    const ml_ref *outputs =
        node.op == ML_OP_OUT ? c->outputs[ml_graph_source(x->from, n, 0)] : NULL;
    graph_take_origin(x->to, x->from, n);
    c->made[n] = outputs ? outputs[ml_graph_args(x->from, n)[0]]
                         : resized_node(x, n, sources, &c->outputs[n]);
}

/* What a function's root is then, with these values in place of its parameters and nodes of these
 * flags; values NULL: as a function. */
static ml_ref resized_function(resizing *x, ml_ref root, const ml_ref *values, uint8_t flags,
                               copies *c) {
    ml_refs body = {0};
    graph_reach(x->from, root, x->arena, &body);
    const uint8_t before = x->to->flags;
    for (uint32_t i = 0; i < body.count; i++) {
        if (c->made[body.at[i]]) continue;
        ml_graph_set_flags(x->to, values ? flags : ml_graph_node(x->from, body.at[i])->flags);
        copy_inside(x, body.at[i], values, c);
    }
    ml_graph_set_flags(x->to, before);
    return c->made[root];
}

static ml_ref function_of(resizing *x, ml_ref root) {
    return resized_function(x, root, NULL, 0, &x->functions);
}

/* The step over all positions in place of the scan over one segment: its outputs. */
static void put_in_place(resizing *x, ml_ref n, const ml_ref *sources, ml_ref *outputs) {
    ml_recurrence r;
    ml_recurrence_read(x->from, n, &r);
    const uint8_t flags = x->to->flags;
    copies c = copies_new(x);
    const int results = r.stacked + r.summed;
    for (int i = 0; i < results + r.states; i++) {
        const int root = i < results ? r.states + i : i - results;
        outputs[i] = resized_function(x, ml_recurrence_root(x->from, n, root), sources, flags, &c);
    }
    for (int i = 0; i < r.states; i++) outputs[results + r.states + i] = sources[r.inputs + i];
}

/* A node over these sources, of the flags that new nodes have. */
static ml_ref resized_node(resizing *x, ml_ref n, const ml_ref *sources, ml_ref **outputs) {
    const bool scan = ml_graph_node(x->from, n)->op == ML_OP_RECURRENCE;
    const segmented *s = scan ? of_axis(x, ml_graph_args(x->from, n)[0]) : NULL;
    if (!s || s->fixed || !to_whole(s) || s->steps == ml_graph_args(x->from, n)[0])
        return resized(x, n, sources);
    *outputs = ML_NEW_ARRAY(x->arena, ml_ref, ml_op_outputs(x->from, n) + 1);
    put_in_place(x, n, sources, *outputs);
    return (*outputs)[0];
}

/* The divisor of a length that is the largest up to `positions`, or nearest above. */
static int64_t divisor_for(int64_t length, int64_t positions) {
    if (positions <= 0 || positions >= length) return length;
    for (int64_t d = positions; d > positions / 4 && d > 1; d--)
        if (length % d == 0) return d;
    for (int64_t d = positions + 1; d < length; d++)
        if (length % d == 0) return d;
    return length;
}

typedef struct {
    resizing x;
    int64_t positions, longest;
    const ml_layout *layout; /* whose ranks are to share segments; NULL: none are */
} request;

/* Positions of a segment, as now where ranks share segments evenly: else the largest divisor of a
 * rank's part up to twice as many; where there is none, all. */
static int64_t shared_size(const request *q, const segmented *s) {
    const ml_type one = {.dtype = ML_F32, .rank = 1, .axis = {s->segments}, .size = {s->count}};
    const ml_placements at = ml_layout_place(q->layout, q->x.from, &one, -1, NULL);
    const int64_t length = s->count * s->size;
    for (int i = 0; i < q->layout->count; i++) {
        const int64_t ranks = q->layout->axis[i].size;
        if (at.over[i].kind != ML_SPLIT || s->count % ranks == 0 || length % ranks) continue;
        for (int64_t d = 2 * s->size; d > 1; d--)
            if (length / ranks % d == 0) return d;
        return length;
    }
    return s->size;
}

static void begin(rewrite *r) {
    request *q = r->context;
    q->x.arena = r->scratch;
    find(&q->x, r->from, NULL);
    q->x.to = r->to;
    q->x.functions = copies_new(&q->x);
    for (int i = 0; i < r->roots->output_count; i++)
        fix_all(&q->x, ml_graph_type(r->from, r->roots->outputs[i]));
    for (uint32_t i = 0; i < q->x.list.count; i++) {
        segmented *s = &q->x.list.at[i];
        s->to = s->fixed    ? s->size
                : q->layout ? shared_size(q, s)
                            : divisor_for(s->count * s->size, q->positions);
        if (!s->fixed && s->count * s->size > q->longest) q->longest = s->count * s->size;
    }
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    request *q = r->context;
    return resized_node(&q->x, n, sources, &r->outputs[n]);
}

/* In increments (runtime/increment) scans are over positions. */
ml_ref ml_recurrence_whole(ml_graph *g, ml_ref n) {
    if (!ml_resize_segments_applies(g)) return n;
    resizing x = {.to = g, .arena = ml_graph_arena(g)};
    const bool *live = find_live(g, n, x.arena);
    find(&x, g, live);
    x.functions = copies_new(&x);
    for (uint32_t i = 0; i < x.list.count; i++)
        x.list.at[i].to = x.list.at[i].count * x.list.at[i].size;
    copies c = copies_new(&x);
    for (ml_ref i = 1; i <= n; i++)
        if (live[i] && !(ml_graph_node(g, i)->flags & ML_NODE_FUNCTION)) {
            ml_graph_set_flags(g, ml_graph_node(g, i)->flags & (uint8_t)~ML_NODE_GRADIENT);
            copy_inside(&x, i, NULL, &c);
        }
    ml_graph_set_flags(g, 0);
    return c.made[n];
}

ml_graph *ml_resize_segments(const ml_graph *from, ml_roots *roots, int64_t positions,
                             int64_t *longest) {
    request q = {.positions = positions};
    ml_graph *made = rewrite_run(from, roots, begin, rule, &q);
    *longest = q.longest;
    return made;
}

ml_graph *ml_share_segments(const ml_graph *from, ml_roots *roots, const ml_layout *layout) {
    request q = {.layout = layout};
    return rewrite_run(from, roots, begin, rule, &q);
}

bool ml_resize_segments_applies(const ml_graph *g) {
    ml_axis whole, steps;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->op == ML_OP_RECURRENCE &&
            recurrence_segment_axes(g, (ml_axis)ml_graph_args(g, n)[0], &whole, &steps))
            return true;
    return false;
}
