/* Slices of a CONCAT in place of its operands (passes.h): where gradients are concatenated (those
 * of queries, keys and values, or of gate and up) and each is also an operand of another product,
 * that product reads a slice of the CONCAT, so that one tensor is saved instead of two.
 *
 * From a CONCAT's operand the search follows invertible movements back to what products read. A
 * product that reads a slice waits for the whole CONCAT, so all its operands must be of one wave:
 * the receives that they depend on are the same. */
#include "runtime/graph/rewrite.h"
#include "runtime/optimize/optimize.h"

enum { MOST_OPERANDS = 32 };

typedef struct {
    rewrite *r;
    const int *input_wave; /* by INPUT */
    int *wave;             /* by node: the highest of what it is made of */
    ml_ref *whole;         /* by node: the CONCAT that it is a part of; 0: none */
    uint8_t *part;         /* by node: which */
    uint32_t *read;        /* by CONCAT: the operands that products read, a bit each */
} state;

static void waves_find(state *s) {
    const ml_graph *g = s->r->from;
    s->wave = ML_NEW_ARRAY(s->r->scratch, int, s->r->count);
    for (ml_ref n = 1; n < s->r->count; n++) {
        const ml_node *node = ml_graph_node(g, n);
        if (node->op == ML_OP_INPUT) s->wave[n] = s->input_wave[ml_graph_args(g, n)[0]];
        for (int i = 0; i < node->source_count; i++) {
            int wave = s->wave[ml_graph_source(g, n, i)];
            if (wave > s->wave[n]) s->wave[n] = wave;
        }
    }
}

static bool is_undone(ml_op op) {
    return op == ML_OP_MERGE || op == ML_OP_RENAME || op == ML_OP_PERMUTE;
}

/* Whether node n is a CONCAT of gradients of one wave. */
static bool joins(const state *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->r->from, n);
    if (!s->r->users[n] || node->op != ML_OP_CONCAT || !(node->flags & ML_NODE_BACKWARD) ||
        node->source_count > MOST_OPERANDS)
        return false;
    for (int i = 0; i < node->source_count; i++)
        if (s->wave[ml_graph_source(s->r->from, n, i)] != s->wave[n]) return false;
    return true;
}

/* Everything that is the CONCAT's operand `part`, up to views. */
static void mark_part(state *s, ml_ref concat, int part) {
    const ml_graph *g = s->r->from;
    ml_ref n = ml_graph_source(g, concat, part);
    for (;; n = ml_graph_source(g, n, 0)) {
        if (!s->whole[n]) s->whole[n] = concat, s->part[n] = (uint8_t)part;
        if (!is_undone(ml_graph_node(g, n)->op)) return;
    }
}

/* The CONCAT whose part source i of product n is; 0: none, or n is no product of gradients. */
static ml_ref read_by(const state *s, ml_ref n, int i) {
    const ml_node *node = ml_graph_node(s->r->from, n);
    bool product = ml_op_is(node->op, ML_PRODUCT | ML_WIDENS);
    bool multiplies = product && (node->flags & ML_NODE_BACKWARD);
    return multiplies && s->r->users[n] ? s->whole[ml_graph_source(s->r->from, n, i)] : 0;
}

static void wait_edges(void *context, rewrite_edge *edge, void *edges) {
    const state *s = context;
    for (ml_ref n = 1; n < s->r->count; n++)
        for (int i = 0; i < ml_graph_node(s->r->from, n)->source_count; i++)
            if (read_by(s, n, i)) edge(edges, read_by(s, n, i), n);
}

static bool reads_all(const state *s, ml_ref concat) {
    int count = ml_graph_node(s->r->from, concat)->source_count;
    return s->read[concat] == (uint32_t)(((uint64_t)1 << count) - 1);
}

static void begin(rewrite *r) {
    state *s = r->context;
    s->r = r;
    s->whole = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    s->part = ML_NEW_ARRAY(r->scratch, uint8_t, r->count);
    s->read = ML_NEW_ARRAY(r->scratch, uint32_t, r->count);
    waves_find(s);
    for (ml_ref n = 1; n < r->count; n++)
        for (int i = 0; joins(s, n) && i < ml_graph_node(r->from, n)->source_count; i++)
            mark_part(s, n, i);
    for (ml_ref n = 1; n < r->count; n++)
        for (int i = 0; i < ml_graph_node(r->from, n)->source_count; i++)
            s->read[read_by(s, n, i)] |= (uint32_t)1 << s->part[ml_graph_source(r->from, n, i)];
    for (ml_ref n = 1; n < r->count; n++)
        if (s->whole[n] && !reads_all(s, s->whole[n])) s->whole[n] = 0;
    if (rewrite_order(r, wait_edges, s)) return;
    r->order = NULL; /* one waits for itself */
    for (ml_ref n = 1; n < r->count; n++) s->whole[n] = 0;
}

static ml_ref rename_back(rewrite *r, ml_ref n, ml_ref moved) {
    int count = ml_graph_node(r->from, n)->arg_count;
    int64_t *args = ML_NEW_ARRAY(r->scratch, int64_t, (size_t)count);
    for (int i = 0; i < count; i++) args[i] = ml_graph_args(r->from, n)[i ^ 1];
    return ml_graph_add(r->to, ML_OP_RENAME, &moved, 1, args, count, NULL);
}

static ml_ref split_back(rewrite *r, ml_ref n, ml_ref moved, const ml_type *type) {
    const int64_t *args = ml_graph_args(r->from, n);
    ml_axis outer = (ml_axis)args[0], inner = (ml_axis)args[1];
    return ml_split(r->to, moved, (ml_axis)args[2], outer, ml_type_size(type, outer), inner,
                    ml_type_size(type, inner));
}

/* What movement n was made from, given its result. */
static ml_ref undo(rewrite *r, ml_ref n, ml_ref moved) {
    const ml_type *type = ml_graph_type(r->from, ml_graph_source(r->from, n, 0));
    ml_op op = ml_graph_node(r->from, n)->op;
    if (op == ML_OP_RENAME) moved = rename_back(r, n, moved);
    if (op == ML_OP_MERGE) moved = split_back(r, n, moved, type);
    return ml_permute(r->to, moved, type);
}

/* Node n as a part of its CONCAT. */
static ml_ref part_of(state *s, ml_ref n) {
    rewrite *r = s->r;
    ml_ref concat = s->whole[n], at = ml_graph_source(r->from, concat, s->part[n]);
    ml_axis axis = (ml_axis)ml_graph_args(r->from, concat)[0];
    int64_t start = 0, size = 0;
    for (int i = 0; i <= s->part[n]; i++) {
        const ml_type *type = ml_graph_type(r->from, ml_graph_source(r->from, concat, i));
        start += size;
        size = ml_type_size(type, axis);
    }
    ml_ref made = ml_slice(r->to, r->map[concat], axis, start, start + size);
    made = ml_permute(r->to, made, ml_graph_type(r->from, at));
    for (; at != n; at = ml_graph_source(r->from, at, 0)) made = undo(r, at, made);
    return made;
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    state *s = r->context;
    int count = ml_graph_node(r->from, n)->source_count;
    ml_ref *own = ML_NEW_ARRAY(r->scratch, ml_ref, (size_t)count + 1);
    for (int i = 0; i < count; i++)
        own[i] = read_by(s, n, i) ? part_of(s, ml_graph_source(r->from, n, i)) : sources[i];
    return rewrite_copy(r, n, own);
}

ml_graph *ml_reuse_concat_slices(const ml_graph *from, ml_roots *roots, const int *input_wave) {
    state s = {.input_wave = input_wave};
    return rewrite_run(from, roots, begin, rule, &s);
}
