/* Half batches (passes.h): one rank's program over the two halves of its batch, a segment of one
 * half and then the same segment of the other, so that collectives of one half overlap products of
 * the other.
 *
 * A node is HALVED where each half of its result takes the same half of its sources alone, and one
 * of these is halved; inputs that have the axis begin that. It is SUMMED where it contracts the
 * axis: the results of the halves are combined (the loss, gradients of weights). All else is WHOLE,
 * and has halves put together or cut off where it meets them.
 *
 * Halves take turns by segments of the nodes. A segment ends before the first product that follows
 * a collective after another product: so it has products, then what exchanges their results and
 * prepares the operands of the next ones, which is what runs beside the other half's products. Much
 * longer segments would have more live values; in shorter ones collectives would have no products
 * to overlap. A sum over both halves is known at the end of its segment, so a segment ends before
 * the first node that needs a sum of its own. */
#include "runtime/graph/infer.h"
#include "runtime/graph/rewrite.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/optimize/optimize.h"

enum { HALVES = 2 };

typedef enum { WHOLE, HALVED, SUMMED } kind;

typedef struct {
    rewrite *r;
    ml_axis axis;
    int64_t size;      /* of the axis, whole */
    uint8_t *kinds;    /* by node */
    uint32_t *segment; /* by live node: which it is in, from 1 on */
    bool *late;        /* by whole node: needs halves or sums of its own segment */
    ml_ref *half[HALVES];
    ml_ref *whole; /* by node; 0: not built yet, or a halved one that nothing reads whole */
    uint32_t made; /* segments */
} state;

static const ml_node *node_of(const state *s, ml_ref n) {
    return ml_graph_node(s->r->from, n);
}

static bool has_axis(const state *s, ml_ref n) {
    const ml_type *type = ml_graph_type(s->r->from, n);
    int at = ml_type_find(type, s->axis);
    return at >= 0 && type->size[at] == s->size;
}

/* ---- What becomes of each node --------------------------------------------------------------- */

/* Along a batch axis, and without a function of the scores, which may read indices. */
static bool keeps_attention(const state *s, ml_ref n) {
    ml_attention_args args;
    ml_attention_read(s->r->from, n, &args);
    const ml_axis others[] = {args.seq, args.kv_seq, args.heads, args.kv_heads, args.head_dim};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i] == s->axis) return false;
    for (int i = 0; i < 3; i++) /* q, k and v: gradients have their axes */
        if (!has_axis(s, ml_graph_source(s->r->from, n, i))) return false;
    return !args.score && !args.derivative;
}

static bool keeps_halves(const state *s, ml_ref n) {
    const ml_graph *from = s->r->from;
    if (!has_axis(s, n)) return false;
    ml_op op = node_of(s, n)->op;
    if (ml_op_attends(op)) return keeps_attention(s, n);
    if (op == ML_OP_OUT) return s->kinds[ml_graph_source(from, n, 0)] == HALVED;
    if (op == ML_OP_SORT || op == ML_OP_TOP_K) return ml_graph_args(from, n)[0] != s->axis;
    if (op == ML_OP_RANDOM) return node_of(s, n)->source_count == 2; /* has each element's index */
    return rewrite_splits(from, n, s->axis);
}

static bool sums_halves(const state *s, ml_ref n) {
    const ml_node *node = node_of(s, n);
    bool reduces = node->op == ML_OP_SUM || node->op == ML_OP_MAX || node->op == ML_OP_MIN ||
                   node->op == ML_OP_DOT;
    if (node->op == ML_OP_SCATTER_ADD)
        return !has_axis(s, n) && has_axis(s, ml_graph_source(s->r->from, n, 0)) &&
               has_axis(s, ml_graph_source(s->r->from, n, 1));
    for (int i = 0; reduces && i < node->arg_count; i++)
        if (ml_graph_args(s->r->from, n)[i] == s->axis) return true;
    return false;
}

/* Whether who reads n may read halves of it. */
static bool offers_halves(const state *s, ml_ref n) {
    return s->kinds[n] == HALVED || (node_of(s, n)->op == ML_OP_INPUT && has_axis(s, n));
}

static void find_kinds(state *s) {
    for (ml_ref n = 1; n < s->r->count; n++) {
        bool any = false;
        if (!s->r->users[n]) continue;
        for (int i = 0; i < node_of(s, n)->source_count; i++)
            any = any || offers_halves(s, ml_graph_source(s->r->from, n, i));
        if (any) s->kinds[n] = keeps_halves(s, n) ? HALVED : sums_halves(s, n) ? SUMMED : WHOLE;
    }
}

/* Whether n needs a result of segment `at` that both halves are part of. */
static bool waits_for_both(const state *s, ml_ref n, uint32_t at) {
    for (int i = 0; i < node_of(s, n)->source_count; i++) {
        ml_ref source = ml_graph_source(s->r->from, n, i);
        if (s->segment[source] != at) continue;
        if (s->kinds[source] == SUMMED || s->late[source]) return true;
        if (s->kinds[source] == HALVED && s->kinds[n] == WHOLE) return true;
    }
    return false;
}

static void find_segments(state *s) {
    bool product = false, exchanged = false; /* in this segment: seen; seen after a product */
    uint32_t at = 1;
    for (ml_ref n = 1; n < s->r->count; n++) {
        if (!s->r->users[n]) continue;
        int op = node_of(s, n)->op, op_class = ml_ops[op].op_class;
        bool whole = s->kinds[n] == WHOLE, waits = waits_for_both(s, n, at);
        bool works = !whole && (op_class == ML_CLASS_CONTRACT || op_class == ML_CLASS_ROUTINE);
        if ((works && exchanged) || (!whole && waits)) {
            at++;
            product = exchanged = false;
        }
        product = product || works;
        exchanged = exchanged || (product && !whole && op_class == ML_CLASS_COLLECTIVE);
        s->segment[n] = at;
        s->late[n] = whole && waits;
    }
}

static void begin(rewrite *r) {
    state *s = r->context;
    s->r = r;
    s->kinds = ML_NEW_ARRAY(r->scratch, uint8_t, r->count);
    s->segment = ML_NEW_ARRAY(r->scratch, uint32_t, r->count);
    s->late = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->whole = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    for (int h = 0; h < HALVES; h++) s->half[h] = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    find_kinds(s);
    find_segments(s);
}

/* ---- Making both ----------------------------------------------------------------------------- */

static void take_origin(state *s, ml_ref n) {
    graph_take_origin(s->r->to, s->r->from, n);
    ml_graph_set_flags(s->r->to, node_of(s, n)->flags & (uint8_t)~ML_NODE_GRADIENT);
}

static ml_ref half_of(state *s, ml_ref n, int h) {
    int64_t each = s->size / HALVES;
    if (s->kinds[n] == HALVED) return s->half[h][n];
    if (!has_axis(s, n)) return s->whole[n];
    take_origin(s, n);
    return ml_slice(s->r->to, s->whole[n], s->axis, h * each, (h + 1) * each);
}

static ml_ref whole_of(state *s, ml_ref n) {
    if (s->whole[n]) return s->whole[n];
    ml_ref halves[HALVES];
    for (int h = 0; h < HALVES; h++) halves[h] = s->half[h][n];
    take_origin(s, n);
    return s->whole[n] = ml_concat(s->r->to, halves, HALVES, s->axis);
}

/* Sums of bf16 are rounded once, when the halves are added. */
static ml_ref make_node(state *s, ml_ref n, ml_ref *sources) {
    const ml_node *node = node_of(s, n);
    ml_type type = *ml_graph_type(s->r->from, n);
    int at = ml_type_find(&type, s->axis);
    take_origin(s, n);
    if (ml_op_attends(node->op)) {
        ml_attention_args args;
        ml_attention_read(s->r->from, n, &args);
        return node->op == ML_OP_ATTENTION
                   ? ml_attention(s->r->to, sources, node->source_count, &args)
                   : ml_attention_grad(s->r->to, sources, node->source_count, &args);
    }
    if (s->kinds[n] == HALVED) type.size[at] = s->size / HALVES;
    if (s->kinds[n] == SUMMED && ml_is_narrow(type.dtype)) {
        type.dtype = ML_F32;
        int value = node->op == ML_OP_SCATTER_ADD;
        if (node->op != ML_OP_DOT) sources[value] = ml_cast(s->r->to, sources[value], ML_F32);
    }
    return ml_graph_add(s->r->to, node->op, sources, node->source_count,
                        ml_graph_args(s->r->from, n), node->arg_count, &type);
}

static void make_half(state *s, ml_ref n, int h) {
    int count = node_of(s, n)->source_count;
    ml_ref few[8], *sources = few;
    if (count > 8) sources = ML_NEW_ARRAY(s->r->scratch, ml_ref, count);
    for (int i = 0; i < count; i++) sources[i] = half_of(s, ml_graph_source(s->r->from, n, i), h);
    s->half[h][n] = make_node(s, n, sources);
}

static void make_whole(state *s, ml_ref n) {
    int count = node_of(s, n)->source_count;
    ml_ref few[8], *sources = few;
    if (count > 8) sources = ML_NEW_ARRAY(s->r->scratch, ml_ref, count);
    for (int i = 0; i < count; i++) sources[i] = whole_of(s, ml_graph_source(s->r->from, n, i));
    take_origin(s, n);
    s->whole[n] = rewrite_copy(s->r, n, sources);
}

static void add_halves(state *s, ml_ref n) {
    int op = node_of(s, n)->op;
    ml_op combine = op == ML_OP_MAX ? ML_OP_MAXIMUM : op == ML_OP_MIN ? ML_OP_MINIMUM : ML_OP_ADD;
    take_origin(s, n);
    ml_ref sum = ml_map2(s->r->to, combine, s->half[0][n], s->half[1][n]);
    s->whole[n] = ml_cast(s->r->to, sum, (ml_dtype)ml_graph_type(s->r->from, n)->dtype);
}

/* The segment that begins with `first`: one half, the other one, what needs both. */
static void make_segment(state *s, ml_ref first) {
    uint32_t at = s->made = s->segment[first];
    ml_ref end = first;
    for (; end < s->r->count && (!s->r->users[end] || s->segment[end] == at); end++) continue;
    for (int h = 0; h < HALVES; h++) {
        for (ml_ref n = first; n < end; n++) {
            if (!s->r->users[n]) continue;
            if (s->kinds[n] != WHOLE)
                make_half(s, n, h);
            else if (h == 0 && !s->late[n])
                make_whole(s, n);
        }
    }
    for (ml_ref n = first; n < end; n++) {
        if (s->kinds[n] == SUMMED)
            add_halves(s, n);
        else if (s->late[n])
            make_whole(s, n);
    }
}

/* Users of a halved node read its halves; only roots may read it as a whole. */
static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    state *s = r->context;
    (void)sources;
    if (s->segment[n] > s->made) make_segment(s, n);
    return whole_of(s, n);
}

ml_graph *ml_half_batches(const ml_graph *from, ml_roots *roots, ml_axis axis, int64_t size) {
    state s = {.axis = axis, .size = size};
    return rewrite_run(from, roots, begin, rule, &s);
}
