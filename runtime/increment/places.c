/* How each node of the whole program depends on positions, or why it is refused. */
#include "runtime/increment/internal.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/cached_attention/cached_attention.h"
#include "runtime/ops/conv/conv.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/recurrence/recurrence.h"

static const char *const ALTERNATIVES =
    "m.attention with causal = true, cumsum, m.conv with causal = true and m.scan read earlier "
    "positions alone";

static const char *axis_name(const increment *inc, ml_axis axis) {
    return ml_axis_name(inc->g, axis);
}

static const char *op_name(const increment *inc, ml_ref n) {
    return ml_ops[ml_graph_node(inc->g, n)->op].name;
}

/* Mixing ops read operands whose every element some position makes known. */
static void require_known(increment *inc, ml_ref n, int i) {
    ml_ref s = ml_graph_source(inc->g, n, i);
    if (inc->places[s].fed && inc->places[s].lead < 0) increment_refuse_ahead(inc, s);
}

static _Noreturn void refuse_cut(increment *inc, ml_ref n, const place *p) {
    increment_refuse(inc, n, "m.scan and m.attention work on the axis of positions itself",
                     "%s of the chunks of positions \"%s\" has no increment yet", op_name(inc, n),
                     axis_name(inc, p->outer ? p->outer : p->axis));
}

/* p also depends on what s does where positions are in chunks; false where the axes differ. */
static bool add_chunks(place *p, const place *s) {
    if (p->chunk != s->chunk) return false;
    if (p->outer == s->outer) return p->outer || p->axis == s->axis;
    if (p->outer) return p->outer == s->axis;
    if (s->outer != p->axis) return false;
    p->axis = s->axis;
    p->other = s->other;
    p->outer = s->outer;
    return true;
}

/* p also depends on positions along this axis. */
static void add_axis(increment *inc, ml_ref n, place *p, ml_axis axis) {
    if (!axis || axis == p->axis || axis == p->other) return;
    if (p->other)
        increment_refuse(inc, n, ALTERNATIVES,
                         "%s relates positions of \"%s\", \"%s\" and \"%s\", which has no "
                         "increment yet",
                         op_name(inc, n), axis_name(inc, p->axis), axis_name(inc, p->other),
                         axis_name(inc, axis));
    *(p->axis ? &p->other : &p->axis) = axis;
}

/* What n is where it computes each position, or each pair of positions, by itself: the axes of its
 * operands, the least lead. */
static place combine(increment *inc, ml_ref n) {
    place p = {0};
    const ml_type *t = ml_graph_type(inc->g, n);
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        const place *s = &inc->places[ml_graph_source(inc->g, n, i)];
        if (!s->fed) continue;
        if (!p.fed || s->lead < p.lead) p.lead = s->lead;
        p.fed = true;
        if (!p.batch) p.batch = s->batch;
        if (!p.axis) {
            p.chunk = s->chunk;
            p.outer = s->outer;
            p.axis = s->axis;
        }
        if ((p.chunk || s->chunk) && !add_chunks(&p, s)) refuse_cut(inc, n, p.chunk ? &p : s);
        if (p.outer && !s->outer) continue; /* of the whole chunk */
        add_axis(inc, n, &p, s->axis);
        add_axis(inc, n, &p, s->other);
    }
    if (p.batch && ml_type_find(t, p.batch) < 0) p.batch = 0;
    return p;
}

static _Noreturn void refuse_pair(increment *inc, ml_ref n, const place *p) {
    increment_refuse(inc, n, ALTERNATIVES,
                     "%s of the pairs of positions of \"%s\" and \"%s\" has no increment yet",
                     op_name(inc, n), axis_name(inc, p->axis), axis_name(inc, p->other));
}

/* ---- Movements ------------------------------------------------------------------------------- */

static place split_place(increment *inc, ml_ref n, place p) {
    const int64_t *args = ml_graph_args(inc->g, n);
    bool outer = args[2] == 1;
    if (args[0] == p.batch) {
        p.batch = (ml_axis)args[1];
        return p;
    }
    if (args[0] == p.other) refuse_pair(inc, n, &p);
    if (args[0] != p.axis) return p;
    if (p.other) refuse_pair(inc, n, &p);
    bool inner = args[4] == 1;
    if (p.chunk && !outer && !inner) refuse_cut(inc, n, &p);
    p.axis = (ml_axis)args[inner && !outer ? 1 : 3];
    if (outer || inner) return p;
    p.outer = (ml_axis)args[1];
    p.chunk = args[4];
    return p;
}

/* Of the positions within chunks. */
static place cut_place(increment *inc, ml_ref n, const place *p) {
    place out;
    if (!increment_find_chunks(inc, n, p, &out)) refuse_cut(inc, n, p);
    return out;
}

static place merge_place(increment *inc, ml_ref n, place p) {
    const int64_t *args = ml_graph_args(inc->g, n);
    const ml_type *t = ml_graph_type(inc->g, ml_graph_source(inc->g, n, 0));
    if (p.other && (increment_names(inc->g, n, p.axis) || increment_names(inc->g, n, p.other)))
        refuse_pair(inc, n, &p);
    if (p.outer && args[0] == p.outer && args[1] == p.axis)
        return (place){.fed = true, .axis = (ml_axis)args[2], .batch = p.batch, .lead = p.lead};
    if (increment_spreads(inc, n))
        return (place){.fed = true, .axis = (ml_axis)args[2], .batch = p.batch, .lead = p.lead};
    if (p.outer && (args[0] == p.outer || args[1] == p.outer)) refuse_cut(inc, n, &p);
    if (args[0] != p.axis && args[1] != p.axis) {
        if (args[0] == p.batch || args[1] == p.batch) p.batch = 0;
        return p;
    }
    ml_axis other = (ml_axis)args[args[0] == p.axis];
    if (ml_type_size(t, other) != 1)
        increment_refuse(
            inc, n, "merge other axes, or work on both",
            "merge joins the positions of \"%s\" with axis \"%s\", which has no increment yet",
            axis_name(inc, p.axis), axis_name(inc, other));
    if (other == p.batch) p.batch = 0;
    p.axis = (ml_axis)args[2];
    return p;
}

/* Parts that depend on no token are before the others, or never read: what comes after the
 * positions lies ahead of all of them. */
static place concat_place(increment *inc, ml_ref n) {
    place p = {0};
    int64_t offset = 0;
    ml_axis axis = (ml_axis)ml_graph_args(inc->g, n)[0];
    place all = combine(inc, n);
    int64_t unit = increment_unit(&all, axis);
    if (!unit || all.other) return all;
    if (all.outer && axis == all.axis) refuse_cut(inc, n, &all);
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        ml_ref s = ml_graph_source(inc->g, n, i);
        place part = inc->places[s];
        part.lead += offset;
        if (part.fed && (!p.fed || part.lead < p.lead)) p.lead = part.lead;
        p.fed |= part.fed;
        offset += unit * ml_type_size(ml_graph_type(inc->g, s), axis);
    }
    all.lead = p.lead;
    return all;
}

static place gather_place(increment *inc, ml_ref n) {
    ml_ref table = ml_graph_source(inc->g, n, 0);
    place p = combine(inc, n);
    ml_axis axis = (ml_axis)ml_graph_args(inc->g, n)[0];
    const place *t = &inc->places[table];
    place earlier;
    if (t->fed && increment_find_recall(inc, n, &earlier)) return earlier;
    if (t->fed && (axis == t->axis || axis == t->other || axis == t->outer))
        increment_refuse(inc, n, ALTERNATIVES,
                         "gather reads any position of \"%s\", later ones too: nothing bounds "
                         "its index by the position",
                         axis_name(inc, axis));
    if (t->fed && axis == t->batch)
        increment_refuse(inc, n, NULL, "gather reads along the batch's axis \"%s\"",
                         axis_name(inc, axis));
    return p;
}

static place move_place(increment *inc, ml_ref n) {
    const ml_node *node = ml_graph_node(inc->g, n);
    const int64_t *args = ml_graph_args(inc->g, n);
    place p = combine(inc, n);
    switch ((ml_move_op)ml_graph_node(inc->g, n)->op) {
    case ML_MOVE_BROADCAST:
    case ML_MOVE_PERMUTE:
    case ML_MOVE_PLACE:
    case ML_MOVE_OUT: return p;
    case ML_MOVE_RENAME: {
        const place *s = &inc->places[ml_graph_source(inc->g, n, 0)];
        p.axis = increment_renamed(inc->g, n, s->axis);
        p.other = s->other ? increment_renamed(inc->g, n, s->other) : 0;
        p.outer = s->outer ? increment_renamed(inc->g, n, s->outer) : 0;
        p.batch = s->batch ? increment_renamed(inc->g, n, s->batch) : 0;
        return p;
    }
    case ML_MOVE_SLICE:
    case ML_MOVE_PAD:
        if (args[0] == p.batch && node->op == ML_OP_PAD)
            increment_refuse(inc, n, NULL, "pad adds sequences to the batch");
        if (p.outer && args[0] == p.axis) return cut_place(inc, n, &p);
        if (p.other && args[0] == p.outer) refuse_pair(inc, n, &p);
        if (!p.other)
            p.lead +=
                increment_unit(&p, (ml_axis)args[0]) * (node->op == ML_OP_PAD ? args[1] : -args[1]);
        return p;
    case ML_MOVE_SPLIT:
    case ML_MOVE_MERGE:
        p.batch = inc->places[ml_graph_source(inc->g, n, 0)].batch;
        return ml_graph_node(inc->g, n)->op == ML_OP_SPLIT ? split_place(inc, n, p)
                                                           : merge_place(inc, n, p);
    case ML_MOVE_CONCAT: return concat_place(inc, n);
    case ML_MOVE_GATHER: return gather_place(inc, n);
    }
    return p;
}

/* ---- Ops that read other positions ----------------------------------------------------------- */

static _Noreturn void refuse_attention(increment *inc, ml_ref n) {
    ml_attention_args a;
    ml_attention_read(inc->g, n, &a);
    int64_t positions = ml_type_size(ml_graph_type(inc->g, ml_graph_source(inc->g, n, 0)), a.seq);
    int64_t keys = ml_type_size(ml_graph_type(inc->g, ml_graph_source(inc->g, n, 1)), a.kv_seq);
    if (keys > positions)
        increment_refuse(inc, n, "put what all see before the keys, not after them",
                         "attention over %lld keys of %lld positions reads later ones",
                         (long long)keys, (long long)positions);
    increment_refuse(inc, n, "m.attention(q, k, v, { causal = true })",
                     "attention without causal = true reads later positions");
}

static place attention_place(increment *inc, ml_ref n) {
    ml_attention_args a;
    ml_attention_read(inc->g, n, &a);
    if (increment_crosses(inc, n)) return increment_cross_place(inc, n, combine(inc, n));
    const ml_ref *s = ml_graph_sources(inc->g, n);
    const place *q = &inc->places[s[0]], *k = &inc->places[s[1]], *v = &inc->places[s[2]];
    int count = ml_graph_node(inc->g, n)->source_count;
    bool kv = k->fed || v->fed;
    if ((q->fed && q->axis != a.seq) || (k->fed && k->axis != a.kv_seq) ||
        (v->fed && v->axis != a.kv_seq) || !kv)
        increment_refuse(inc, n, ALTERNATIVES,
                         "attention over \"%s\" is not over the positions of its queries",
                         axis_name(inc, a.kv_seq));
    for (int i = 0; i < count; i++) {
        const place *p = &inc->places[s[i]];
        if (p->other) refuse_pair(inc, n, p);
        require_known(inc, n, i);
    }
    if (!a.causal) refuse_attention(inc, n);
    ml_axis batch = q->fed ? q->batch : k->fed ? k->batch : v->batch;
    return (place){.fed = true, .axis = a.seq, .batch = batch};
}

/* Elements beyond the end count as 0, which a step does not know. */
static void require_length(increment *inc, ml_ref n, int64_t lead) {
    ml_ref s = ml_graph_source(inc->g, n, 0);
    int64_t context = ml_type_size(ml_graph_type(inc->g, inc->in->tokens), inc->in->seq);
    int64_t size = ml_type_size(ml_graph_type(inc->g, s), inc->places[s].axis);
    if (size < context + lead)
        increment_refuse(inc, n, "convolve first, then slice",
                         "conv pads %lld elements of %lld positions at the end", (long long)size,
                         (long long)context);
}

static place conv_place(increment *inc, ml_ref n, place p) {
    conv_window windows[CONV_WINDOWS];
    int count = conv_read(inc->g, n, windows);
    for (int i = 0; i < count; i++) {
        const conv_window *w = &windows[i];
        if (w->axis != p.axis) continue;
        if (w->stride != 1 || w->up != 1 || conv_gives_taps(inc->g, n) ||
            inc->places[ml_graph_source(inc->g, n, 1)].fed)
            increment_refuse(inc, n, "m.conv(x, filter, { causal = true }), with stride 1",
                             "conv along \"%s\" is not one step a position",
                             axis_name(inc, p.axis));
        int64_t last = w->dilation > 0 ? w->dilation * (conv_taps(inc->g, n, w) - 1) : 0;
        require_known(inc, n, 0);
        require_length(inc, n, p.lead);
        p.lead -= last - w->before;
        if (p.lead > 0) p.lead = 0;
    }
    return p;
}

static place scan_place(increment *inc, ml_ref n, place p, bool reverse, int first, int count) {
    if (reverse)
        increment_refuse(inc, n, "without reverse it reads earlier positions alone",
                         "%s from the end reads later positions", op_name(inc, n));
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        if (!p.chunk) require_known(inc, n, i);
        if (i >= first && i < first + count) continue;
        if (inc->places[ml_graph_source(inc->g, n, i)].fed)
            increment_refuse(inc, n, "let it be an input of the scan",
                             "%s begins with, or uses, what depends on the tokens",
                             op_name(inc, n));
    }
    if (!p.chunk || p.lead > 0) p.lead = 0;
    return p;
}

static place recurrence_place(increment *inc, ml_ref n, place p) {
    ml_recurrence r;
    ml_recurrence_read(inc->g, n, &r);
    if (p.chunk && r.stacked > 1) refuse_cut(inc, n, &p);
    if (r.summed)
        increment_refuse(inc, n, ALTERNATIVES, "scan sums over all positions, later ones too");
    return scan_place(inc, n, p, r.reverse, 0, r.inputs);
}

static place linear_scan_place(increment *inc, ml_ref n, place p) {
    ml_linear_scan scan;
    ml_linear_scan_read(inc->g, n, &scan);
    ml_ref state = ml_graph_source(inc->g, n, LINEAR_SCAN_STATE);
    if (inc->places[state].fed)
        increment_refuse(inc, n, NULL, "scan begins with what depends on the tokens");
    return scan_place(inc, n, p, scan.reverse, 0, ml_graph_node(inc->g, n)->source_count);
}

/* Results of an op that gives several: what it is after the last position depends on all. */
static void check_output(increment *inc, ml_ref n) {
    ml_ref s = ml_graph_source(inc->g, n, 0);
    ml_op op = (ml_op)ml_graph_node(inc->g, s)->op;
    if (!increment_mixes(inc, s)) return;
    ml_recurrence r = {0};
    if (op == ML_OP_RECURRENCE) ml_recurrence_read(inc->g, s, &r);
    if (op == ML_OP_RECURRENCE && ml_graph_args(inc->g, n)[0] < r.stacked) return;
    increment_refuse(inc, n, "the outputs of m.scan at each position",
                     op == ML_OP_ATTENTION ? "the logsumexp of attention is not kept"
                                           : "the state after the last position depends on all");
}

static _Noreturn void refuse_contraction(increment *inc, ml_ref n, const place *p) {
    if (increment_defines(inc, n)) refuse_attention(inc, increment_defines(inc, n));
    ml_axis key = increment_names(inc->g, n, p->axis) ? p->axis : p->other;
    increment_refuse(
        inc, n,
        "m.attention with causal = true; by hand, m.where(m.le(of, at), s, 0), of both "
        "m.iota's, hides later positions",
        "%s over \"%s\" has no increment yet: it may read later positions, whose terms "
        "no comparison of positions makes 0",
        op_name(inc, n), axis_name(inc, key));
}

static _Noreturn void refuse_over(increment *inc, ml_ref n, const place *p) {
    const char *name = op_name(inc, n), *axis = axis_name(inc, p->axis);
    if (increment_names(inc->g, n, p->axis))
        increment_refuse(inc, n, ALTERNATIVES, "%s over \"%s\" reads all positions, later ones too",
                         name, axis);
    increment_refuse(inc, n, ALTERNATIVES,
                     "%s over \"%s\" has no increment yet: it may read later positions", name,
                     axis);
}

static place rest_place(increment *inc, ml_ref n) {
    ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    if (op == ML_OP_ATTENTION) return attention_place(inc, n);
    place p = combine(inc, n), contracted;
    bool along = increment_names(inc->g, n, p.axis) || increment_names(inc->g, n, p.other) ||
                 increment_names(inc->g, n, p.outer);
    if (along && p.chunk && increment_find_chunks(inc, n, &p, &contracted)) {
        place by_mask;
        return increment_find_contraction(inc, n, &p, &by_mask) ? by_mask : contracted;
    }
    bool over_chunks = along && p.chunk && !p.outer;
    if (over_chunks && op == ML_OP_LINEAR_SCAN) return linear_scan_place(inc, n, p);
    if (over_chunks && op == ML_OP_RECURRENCE) return recurrence_place(inc, n, p);
    if (along && p.lead < 0) increment_refuse_ahead(inc, n);
    if (along && increment_find_contraction(inc, n, &p, &contracted)) return contracted;
    if (along && p.other) refuse_contraction(inc, n, &p);
    if (along && p.chunk) refuse_cut(inc, n, &p);
    if (along) {
        if (op == ML_OP_CONV) return conv_place(inc, n, p);
        if (op == ML_OP_LINEAR_SCAN) return linear_scan_place(inc, n, p);
        if (op == ML_OP_RECURRENCE) return recurrence_place(inc, n, p);
        if (op == ML_OP_CUMSUM)
            return scan_place(inc, n, p, ml_graph_args(inc->g, n)[1] != 0, 0, 1);
    }
    bool conv = op == ML_OP_CONV && !inc->places[ml_graph_source(inc->g, n, 1)].fed;
    bool of_batch = increment_names(inc->g, n, p.batch) && ml_ops[op].op_class != ML_CLASS_REDUCE;
    if ((!increment_by_parts(inc->g, n, p.axis) && !conv) || of_batch || op == ML_OP_RANDOM ||
        along || ml_type_find(ml_graph_type(inc->g, n), p.axis) < 0)
        refuse_over(inc, n, &p);
    return p;
}

/* ---- All nodes ------------------------------------------------------------------------------- */

static bool depends(const increment *inc, ml_ref n) {
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++)
        if (inc->places[ml_graph_source(inc->g, n, i)].fed) return true;
    return false;
}

static void find_place(increment *inc, ml_ref n) {
    const ml_node *node = ml_graph_node(inc->g, n);
    if (n == inc->in->tokens) return;
    if (!depends(inc, n) && increment_gives(inc, n)) {
        inc->places[n] = increment_given_place(inc, n);
        return;
    }
    if (node->op == ML_OP_INPUT)
        increment_refuse(inc, n, "the logits of a model that generates depend on its tokens alone",
                         "the model reads the input \"%s\" beside its tokens",
                         ml_graph_input(inc->g, (uint32_t)ml_graph_args(inc->g, n)[0])->name);
    if (!depends(inc, n)) return;
    place rows;
    bool of_rows = increment_find_rows(inc, n, &rows);
    if (node->op == ML_OP_OUT) check_output(inc, n);
    bool moves = ml_ops[node->op].op_class == ML_CLASS_MOVE;
    inc->places[n] = of_rows                              ? rows
                     : moves                              ? move_place(inc, n)
                     : ml_op_is_function((ml_op)node->op) ? combine(inc, n)
                                                          : rest_place(inc, n);
    increment_check_given(inc, n);
    if (increment_exclusive(inc, n)) {
        inc->places[n] = inc->places[ml_graph_source(inc->g, n, 0)];
        inc->places[n].lead += inc->places[n].chunk;
    }
    const ml_type *t = ml_graph_type(inc->g, n);
    ml_axis own = ml_type_find(t, inc->row) >= 0     ? inc->row
                  : ml_type_find(t, inc->fresh) >= 0 ? inc->fresh
                                                     : 0;
    if (own)
        increment_refuse(inc, n, "the axes of the new tokens need names that no model uses",
                         "the model has an axis \"%s\"", axis_name(inc, own));
}

/* The batch of the tokens: an axis of size 1, if any. */
static void place_tokens(increment *inc) {
    ml_ref n = inc->in->tokens;
    ml_type rest = increment_without(ml_graph_type(inc->g, n), inc->in->seq, 0);
    if (ml_graph_node(inc->g, n)->op != ML_OP_INPUT || rest.rank > 1 ||
        rest.rank == ml_graph_type(inc->g, n)->rank || (rest.rank && rest.size[0] != 1))
        ml_raise(ML_INVALID, "the tokens of a whole program are an input over one sequence");
    inc->places[n] =
        (place){.fed = true, .axis = inc->in->seq, .batch = rest.rank ? rest.axis[0] : 0};
}

void increment_find_places(increment *inc) {
    inc->live[inc->in->logits] = true;
    for (ml_ref n = inc->in->logits; n > 0; n--)
        for (int i = 0; inc->live[n] && i < ml_graph_node(inc->g, n)->source_count; i++)
            inc->live[ml_graph_source(inc->g, n, i)] = true;
    place_tokens(inc);
    for (ml_ref n = 1; n < inc->end; n++)
        if (inc->live[n]) find_place(inc, n);
    const place *p = &inc->places[inc->in->logits];
    if (!p->fed) ml_raise(ML_INVALID, "the logits do not depend on the tokens");
    if (p->other) refuse_pair(inc, inc->in->logits, p);
    if (p->lead < 0) increment_refuse_ahead(inc, inc->in->logits);
    increment_require_positions(inc, inc->in->logits);
}
