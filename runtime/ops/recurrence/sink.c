/* Inputs of an elementwise step that are computed elementwise, of tensors that are not larger
 * together, are computed in the step: its kernel reads those, and nothing is written between. */
#include "runtime/graph/infer.h"
#include "runtime/ops/recurrence/recurrence_internal.h"

enum { MOST_NODES = 8, MOST_LEAVES = 16 }; /* of an input */

typedef struct {
    ml_graph *g;
    ml_arena *arena;
    ml_recurrence r;
    ml_ref n;
    bool *expands; /* by input */
    ml_ref leaves[MOST_LEAVES];
    int leaf_count, nodes;
    ML_VEC(ml_recurrence_pair) inputs, known; /* known: what stands for a tensor at a position */
} sinking;

static bool has_axis(const sinking *s, ml_ref n) {
    return ml_type_find(ml_graph_type(s->g, n), s->r.axis) >= 0;
}

/* Computed again in the step, where it has the axis. Narrow floats are rounded in memory. */
static bool is_sunk(const sinking *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->g, n);
    ml_dtype dtype = (ml_dtype)ml_graph_type(s->g, n)->dtype;
    if (node->op == ML_OP_BROADCAST || node->op == ML_OP_PERMUTE) return true;
    return ml_op_is_function(node->op) && (dtype == ML_F32 || dtype == ML_BOOL);
}

/* The tensors with the axis that n is computed of; false where they are too many. */
static bool find_leaves(sinking *s, ml_ref n) {
    if (!has_axis(s, n)) return true;
    if (!is_sunk(s, n)) {
        for (int i = 0; i < s->leaf_count; i++)
            if (s->leaves[i] == n) return true;
        if (s->leaf_count == MOST_LEAVES) return false;
        s->leaves[s->leaf_count++] = n;
        return true;
    }
    if (++s->nodes > MOST_NODES) return false;
    for (int i = 0; i < ml_graph_node(s->g, n)->source_count; i++)
        if (!find_leaves(s, ml_graph_source(s->g, n, i))) return false;
    return true;
}

static int64_t bytes_of(const sinking *s, ml_ref n) {
    return ml_type_bytes(ml_graph_type(s->g, n));
}

static bool is_read(const sinking *s, ml_ref leaf) {
    for (int i = 0; i < s->r.inputs; i++)
        if (!s->expands[i] && ml_graph_source(s->g, s->n, i) == leaf) return true;
    return false;
}

/* Whether the inputs that `expands` says are computed of no more bytes than they have. */
static bool is_worth(sinking *s) {
    int64_t before = 0, after = 0;
    s->leaf_count = 0;
    for (int i = 0; i < s->r.inputs; i++) {
        if (!s->expands[i]) continue;
        ml_ref source = ml_graph_source(s->g, s->n, i);
        s->nodes = 0;
        before += bytes_of(s, source);
        if (!find_leaves(s, source)) return false;
    }
    for (int i = 0; i < s->leaf_count; i++)
        after += is_read(s, s->leaves[i]) ? 0 : bytes_of(s, s->leaves[i]);
    return before > 0 && after <= before;
}

static bool computes(const sinking *s, ml_ref n) {
    while (ml_graph_node(s->g, n)->op == ML_OP_PERMUTE) n = ml_graph_source(s->g, n, 0);
    return is_sunk(s, n) && has_axis(s, n);
}

static bool choose(sinking *s) {
    int count = 0;
    for (int i = 0; i < s->r.inputs; i++)
        count += s->expands[i] = computes(s, ml_graph_source(s->g, s->n, i));
    if (count == 0) return false;
    if (is_worth(s)) return true;
    bool any = false;
    for (int i = 0; i < s->r.inputs; i++) s->expands[i] = false;
    for (int i = 0; i < s->r.inputs; i++) { /* one after another */
        s->expands[i] = computes(s, ml_graph_source(s->g, s->n, i));
        if (s->expands[i]) any |= s->expands[i] = is_worth(s);
    }
    return any;
}

/* n at a position. */
static ml_ref at_position(sinking *s, ml_ref n) {
    ml_graph *g = s->g;
    if (!has_axis(s, n)) return n;
    for (uint32_t i = 0; i < s->known.count; i++)
        if (s->known.at[i].value == n) return s->known.at[i].parameter;
    ml_node node = *ml_graph_node(g, n);
    ml_type slice;
    ml_ref made;
    ml_recurrence_slice(g, n, s->r.axis, s->r.length, &slice);
    if (!is_sunk(s, n)) {
        made = ml_recurrence_parameter(g, &slice);
        *ML_PUSH(s->arena, &s->inputs) = (ml_recurrence_pair){made, n};
    } else {
        ml_ref sources[3];
        for (int i = 0; i < node.source_count && i < 3; i++)
            sources[i] = at_position(s, ml_graph_source(g, n, i));
        if (node.op == ML_OP_BROADCAST)
            made = ml_broadcast(g, sources[0], &slice);
        else if (node.op == ML_OP_PERMUTE)
            made = ml_permute(g, sources[0], &slice);
        else
            made = ml_permute(
                g, ml_graph_add(g, (ml_op)node.op, sources, node.source_count, NULL, 0, &slice),
                &slice);
    }
    *ML_PUSH(s->arena, &s->known) = (ml_recurrence_pair){made, n};
    return made;
}

bool recurrence_sink(ml_graph *g, ml_ref n, ml_recurrence_step *out) {
    sinking s = {.g = g, .arena = ml_graph_arena(g), .n = n};
    ml_recurrence_read(g, n, &s.r);
    s.expands = ML_NEW_ARRAY(s.arena, bool, s.r.inputs + 1);
    if (s.r.states == 0 || !ml_recurrence_elementwise(g, n) || !choose(&s)) return false;
    int sources = s.r.inputs + s.r.states + s.r.captured, roots = ml_recurrence_roots(&s.r);
    ml_ref *values = ML_NEW_ARRAY(s.arena, ml_ref, sources + 1);
    ml_ref *results = ML_NEW_ARRAY(s.arena, ml_ref, roots + 1);
    ml_recurrence_pair *pairs = ML_NEW_ARRAY(s.arena, ml_recurrence_pair, sources + 1);
    for (int i = 0; i < s.r.inputs; i++) {
        ml_ref source = ml_graph_source(g, n, i);
        ml_type slice;
        ml_recurrence_slice(g, source, s.r.axis, s.r.length, &slice);
        if (!s.expands[i]) {
            values[i] = ml_recurrence_parameter(g, &slice);
            *ML_PUSH(s.arena, &s.inputs) = (ml_recurrence_pair){values[i], source};
            *ML_PUSH(s.arena, &s.known) = (ml_recurrence_pair){values[i], source};
        }
    }
    for (int i = 0; i < s.r.inputs; i++)
        if (s.expands[i]) values[i] = at_position(&s, ml_graph_source(g, n, i));
    for (int i = s.r.inputs; i < sources; i++) {
        ml_type type = *ml_graph_type(g, ml_graph_source(g, n, i));
        values[i] = ml_recurrence_parameter(g, &type);
        pairs[i] = (ml_recurrence_pair){values[i], ml_graph_source(g, n, i)};
    }
    for (int i = 0; i < roots; i++)
        results[i] = ml_graph_inline(g, ml_recurrence_root(g, n, i), values, sources);
    *out = (ml_recurrence_step){.axis = s.r.axis,
                                .reverse = s.r.reverse,
                                .length = s.r.length,
                                .inputs = s.inputs.at,
                                .input_count = (int)s.inputs.count,
                                .states = pairs + s.r.inputs,
                                .state_count = s.r.states,
                                .captured = pairs + s.r.inputs + s.r.states,
                                .captured_count = s.r.captured,
                                .next = results,
                                .stacked = results + s.r.states,
                                .stacked_count = s.r.stacked,
                                .summed = results + s.r.states + s.r.stacked,
                                .summed_count = s.r.summed};
    return true;
}
