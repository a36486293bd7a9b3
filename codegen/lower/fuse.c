/* Roles: which nodes get memory (or a register), and which are computed again where they are used.
 *
 * A pointwise node that several others use is worth memory when recomputing it would
 * read more than one tensor of its size, or take many operations. So GELU's derivative is
 * recomputed from the saved pre-activation and normalized values from x and its rstd, while sums of
 * the residual stream are stored. What the backward pass reads anyway costs a value of the forward
 * pass nothing there. A widening cast is never stored: what it casts is. Expensive small tensors
 * that are broadcast (rotary tables, rates) are stored too, and values that are compared with their
 * largest. A root that turns out to be used by its own kernel alone is never stored. */
#include "codegen/lower/lower_internal.h"

#include <string.h>

enum {
    MANY_NODES = 48,   /* recompute at most that many operations */
    ALWAYS_ROOT = 160, /* and never inline more than that, for anyone */
    MOST_PATHS = 1500, /* operations of one expression when written out */
    MANY_PATHS = 400,
    MANY_LOADS = 20,   /* tensors that one expression may read */
    FULL_SHARE = 4,    /* a tensor is "full-size" from a quarter of the node's elements */
    EXPANSION = 4,     /* broadcasting to that many times the elements ... */
    WORTH_STORING = 6, /* ... repeats too much from that many FLOPs on */
    UNROLL = 16,       /* reductions of outer axes up to that size are written out */
};

/* Each element of the result receives at most one contribution: where(iota == index, value, 0). */
static bool scatter_is_map(const ml_graph *g, ml_ref n) {
    const ml_type *index = ml_graph_type(g, ml_graph_source(g, n, 0)), *type = ml_graph_type(g, n);
    ml_axis scattered = (ml_axis)ml_graph_args(g, n)[0]; /* in the index it is another axis */
    for (int i = 0; i < index->rank; i++)
        if (index->axis[i] == scattered || ml_type_find(type, index->axis[i]) < 0) return false;
    return true;
}

void fuse_dot_space(const ml_graph *g, ml_ref n, ml_type *space) {
    const ml_type *a = ml_graph_type(g, ml_graph_source(g, n, 0));
    const ml_type *b = ml_graph_type(g, ml_graph_source(g, n, 1));
    *space = *ml_graph_type(g, n);
    const ml_type *operands[2] = {a, b};
    for (int o = 0; o < 2; o++) {
        for (int i = 0; i < operands[o]->rank; i++) {
            if (ml_type_find(space, operands[o]->axis[i]) >= 0) continue;
            if (space->rank == ML_MAX_AXES)
                ml_raise(ML_INVALID, "a dot over more than %d axes in all", ML_MAX_AXES);
            space->axis[space->rank] = operands[o]->axis[i];
            space->size[space->rank++] = operands[o]->size[i];
        }
    }
}

static void reach(lowering *l) {
    for (int i = 0; i < l->roots->output_count; i++) l->info[l->roots->outputs[i]].reached = true;
    l->update = ML_NEW_ARRAY(l->scratch, uint32_t, l->count + 1);
    l->assigned = ML_NEW_ARRAY(l->scratch, bool, (size_t)ml_graph_state_count(l->g) + 1);
    for (int i = l->roots->update_count; i-- > 0;) {
        l->info[l->roots->updates[i].value].reached = true;
        l->update[l->roots->updates[i].value] = (uint32_t)i + 1;
        l->assigned[l->roots->updates[i].state] = true;
    }
    for (ml_ref n = l->count - 1; n > 0; n--) {
        if (!l->info[n].reached) continue;
        const ml_ref *sources = ml_graph_sources(l->g, n);
        for (int i = 0; i < ml_graph_node(l->g, n)->source_count; i++) {
            l->info[sources[i]].reached = true;
            l->first_user[sources[i] + 1]++;
        }
    }
    for (ml_ref n = 1; n <= l->count; n++) l->first_user[n] += l->first_user[n - 1];
    l->user = ML_NEW_ARRAY(l->scratch, ml_ref, l->first_user[l->count] + 1);
    uint32_t *at = ML_NEW_ARRAY(l->scratch, uint32_t, l->count + 1);
    memcpy(at, l->first_user, sizeof(uint32_t) * l->count);
    for (ml_ref n = 1; n < l->count; n++) {
        if (!l->info[n].reached) continue;
        const ml_ref *sources = ml_graph_sources(l->g, n);
        for (int i = 0; i < ml_graph_node(l->g, n)->source_count; i++)
            l->user[at[sources[i]]++] = n;
    }
}

/* A reduction of few elements over axes that are not innermost: better written out as arithmetic.
 */
static bool unrolls(const lowering *l, ml_ref n) {
    const ml_node *node = ml_graph_node(l->g, n);
    const ml_type *from = ml_graph_type(l->g, ml_graph_source(l->g, n, 0));
    const int64_t *args = ml_graph_args(l->g, n);
    if (node->op == ML_OP_ARGMAX || l->target->no_fuse) return false;
    int64_t reduced = 1;
    for (int i = 0; i < node->arg_count; i++) {
        int at = ml_type_find(from, (ml_axis)args[i]);
        bool innermost = true;
        for (int j = at + 1; j < from->rank; j++) innermost = innermost && from->size[j] == 1;
        if (innermost && from->size[at] != 1) return false;
        reduced *= from->size[at];
    }
    return reduced <= UNROLL;
}

static lower_role first_role(lowering *l, ml_ref n) {
    const ml_node *node = ml_graph_node(l->g, n);
    switch (ml_ops[node->op].op_class) {
    case ML_CLASS_LEAF:
        if (node->op == ML_OP_PARAM && !l->roots->step)
            ml_raise(ML_INTERNAL, "lowering: node %%%u is a parameter outside of a function", n);
        return node->op == ML_OP_CONST || node->op == ML_OP_IOTA ? LOWER_INLINE : LOWER_LEAF;
    case ML_CLASS_MAP: return l->target->no_fuse ? LOWER_ROOT : LOWER_INLINE;
    case ML_CLASS_MOVE:
        return node->op == ML_OP_CONCAT ? LOWER_CONCAT
               : node->op == ML_OP_OUT  ? LOWER_OPAQUE
                                        : LOWER_INLINE;
    case ML_CLASS_REDUCE:
        l->info[n].unrolled = unrolls(l, n);
        return l->info[n].unrolled ? LOWER_INLINE : LOWER_ROOT;
    case ML_CLASS_CONTRACT:
        if (gemm_serves(l, n)) return LOWER_OPAQUE;
        l->info[n].generic_dot = true;
        return node->arg_count == 0 ? LOWER_INLINE : LOWER_ROOT;
    case ML_CLASS_ROUTINE:
        if (node->op == ML_OP_SCATTER_ADD && scatter_is_map(l->g, n)) return LOWER_INLINE;
        return LOWER_OPAQUE;
    case ML_CLASS_COLLECTIVE:
    case ML_CLASS_SCAN: break;
    }
    return LOWER_OPAQUE;
}

/* Whether a PERMUTE moves axes of one element alone: nothing in memory. */
static bool keeps_order(const lowering *l, ml_ref n) {
    const ml_type *to = ml_graph_type(l->g, n);
    const ml_type *from = ml_graph_type(l->g, ml_graph_source(l->g, n, 0));
    for (int i = 0, j = 0; i < to->rank; i++) {
        if (to->size[i] == 1) continue;
        while (from->size[j] == 1) j++;
        if (from->axis[j++] != to->axis[i]) return false;
    }
    return true;
}

/* An output or update needs memory of its own in its type's order; where only a step reads it
 * (`read`), a part of another's memory will do. */
static void pin(lowering *l, ml_ref n, bool read) {
    ml_ref base = n;
    for (;;) {
        int op = ml_graph_node(l->g, base)->op;
        if (lower_in_memory(l, base)) break;
        bool ordered =
            op == ML_OP_PERMUTE &&
            (l->info[ml_graph_source(l->g, base, 0)].layout != 0 || keeps_order(l, base));
        bool sliced = op == ML_OP_SLICE && read;
        if (op != ML_OP_RENAME && op != ML_OP_SPLIT && op != ML_OP_MERGE && !ordered && !sliced)
            break;
        base = ml_graph_source(l->g, base, 0);
    }
    if (base != n) { /* the same memory serves where the movements keep its order */
        lower_view view;
        uint8_t role = l->info[base].role;
        if (role == LOWER_INLINE) l->info[base].role = LOWER_ROOT;
        bool serves = role != LOWER_LEAF && views_of(l, n, &view) &&
                      views_contiguous(ml_graph_type(l->g, n), view.stride);
        if (!serves) {
            l->info[base].role = role;
            base = n;
        }
    }
    if (l->info[base].role == LOWER_INLINE) l->info[base].role = LOWER_ROOT;
    l->info[base].pinned = l->info[base].stored = true;
}

static bool is_collective(const lowering *l, ml_ref n) {
    return ml_ops[ml_graph_node(l->g, n)->op].op_class == ML_CLASS_COLLECTIVE;
}

/* A routine by positions moves along its operands and results position by position. */
static void pin_slices(lowering *l, ml_ref n) {
    const ml_node *node = ml_graph_node(l->g, n);
    ml_ref of = node->op == ML_OP_OUT ? ml_graph_source(l->g, n, 0) : n;
    if (!lower_routines[ml_graph_node(l->g, of)->op].by_position || lower_one_kernel(l, of)) return;
    pin(l, n, false);
    for (int i = 0; of == n && i < node->source_count; i++)
        pin(l, ml_graph_source(l->g, n, i), false);
}

static bool is_inline_move(const lowering *l, ml_ref n) {
    return ml_ops[ml_graph_node(l->g, n)->op].op_class == ML_CLASS_MOVE &&
           l->info[n].role == LOWER_INLINE;
}

/* How many nodes that compute something use n, and the largest number of elements at which they
 * need it: users of a node come after it, so one pass backwards suffices. */
static void count_users(lowering *l, int64_t *peak) {
    for (ml_ref n = l->count - 1; n > 0; n--) {
        if (!l->info[n].reached) continue;
        unsigned users = l->info[n].pinned;
        int64_t own = ml_type_elements(ml_graph_type(l->g, n));
        peak[n] = own;
        for (uint32_t i = l->first_user[n]; i < l->first_user[n + 1]; i++) {
            ml_ref u = l->user[i];
            bool maps = ml_ops[ml_graph_node(l->g, u)->op].op_class == ML_CLASS_MAP;
            bool moves = is_inline_move(l, u);
            users += moves ? l->info[u].users : 1;
            int64_t at = moves ? peak[u] : maps ? ml_type_elements(ml_graph_type(l->g, u)) : own;
            if (at > peak[n]) peak[n] = at;
        }
        l->info[n].users = (uint8_t)(users > 255 ? 255 : users);
    }
}

/* The backward pass reads m by another way than through n. */
static bool read_anyway(const lowering *l, ml_ref m, ml_ref n, int depth) {
    for (uint32_t i = l->first_user[m]; i < l->first_user[m + 1]; i++) {
        ml_ref u = l->user[i];
        if (u == n) continue;
        if (ml_graph_node(l->g, u)->flags & ML_NODE_BACKWARD) return true;
        if (depth > 0 && !lower_in_memory(l, u) && read_anyway(l, u, n, depth - 1)) return true;
    }
    return false;
}

/* Forward, and needed once there and once in the backward pass or more. */
static bool spans_passes(const lowering *l, ml_ref n) {
    int forward = 0, backward = 0;
    if (ml_graph_node(l->g, n)->flags & ML_NODE_BACKWARD) return false;
    for (uint32_t i = l->first_user[n]; i < l->first_user[n + 1]; i++) {
        bool late = ml_graph_node(l->g, l->user[i])->flags & ML_NODE_BACKWARD;
        if (late)
            backward++;
        else
            forward++;
    }
    return forward <= 1 && backward > 0;
}

typedef struct {
    lowering *l;
    ml_ref judged;    /* whose cost it is; its loads that the backward pass has anyway are free */
    bool spans;       /* it is of the forward pass, and the backward pass needs it */
    int64_t elements; /* of the node that is judged */
    int nodes, weight, loads, full;
} cost;

static void add_cost(cost *c, ml_ref n, int64_t elements) {
    lowering *l = c->l;
    if (l->stamp[n] == l->stamps || c->nodes > ALWAYS_ROOT) return;
    l->stamp[n] = l->stamps;
    if (lower_in_memory(l, n)) {
        int64_t own = ml_type_elements(ml_graph_type(l->g, n));
        c->loads++;
        bool full = (own < elements ? own : elements) * FULL_SHARE >= c->elements;
        enum { FEW_STEPS = 6 }; /* from a tensor to who computes with it */
        if (full && c->spans) full = !read_anyway(l, n, c->judged, FEW_STEPS);
        c->full += full;
        return;
    }
    const ml_node *node = ml_graph_node(l->g, n);
    c->nodes++;
    c->weight += ml_ops[node->op].flops;
    for (int i = 0; i < node->source_count; i++)
        add_cost(c, ml_graph_source(l->g, n, i), ml_type_elements(ml_graph_type(l->g, n)));
}

static int64_t reduced_elements(const lowering *l, ml_ref n) {
    int64_t own = ml_type_elements(ml_graph_type(l->g, n));
    return own > 0 ? ml_type_elements(ml_graph_type(l->g, ml_graph_source(l->g, n, 0))) / own : 1;
}

/* Operations to compute n where nothing is shared: movements make the same node be needed at many
 * places, so a graph of n nodes can take 2^n operations. */
static uint32_t paths_of(const lowering *l, ml_ref n, const uint32_t *paths) {
    const ml_node *node = ml_graph_node(l->g, n);
    int64_t total = 1;
    for (int i = 0; i < node->source_count; i++) {
        ml_ref source = ml_graph_source(l->g, n, i);
        if (!lower_in_memory(l, source)) total += paths[source];
    }
    if (l->info[n].unrolled) total *= reduced_elements(l, n);
    return total > UINT16_MAX ? UINT16_MAX : (uint32_t)total;
}

static bool worth_memory(lowering *l, ml_ref n, int64_t peak, uint32_t paths) {
    cost c = {.l = l, .judged = n, .elements = ml_type_elements(ml_graph_type(l->g, n))};
    c.spans = spans_passes(l, n);
    l->stamps++;
    l->stamp[n] = l->stamps;
    const ml_node *node = ml_graph_node(l->g, n);
    c.weight = ml_ops[node->op].flops;
    for (int i = 0; i < node->source_count; i++)
        add_cost(&c, ml_graph_source(l->g, n, i), c.elements);
    if (c.nodes > ALWAYS_ROOT || c.loads > MANY_LOADS || paths > MOST_PATHS) return true;
    if (peak >= EXPANSION * c.elements && c.weight >= WORTH_STORING) return true;
    if (l->info[n].unrolled && l->info[n].users > 1) return true; /* each element is many loads */
    return l->info[n].users > 1 && (c.full > 1 || c.nodes > MANY_NODES || paths > MANY_PATHS);
}

/* What to keep of n: where it only widens another value, that one, in half the memory. */
static ml_ref narrow_of(const lowering *l, ml_ref n) {
    if (ml_graph_node(l->g, n)->op != ML_OP_CAST) return n;
    ml_ref source = ml_graph_source(l->g, n, 0);
    const ml_type *from = ml_graph_type(l->g, source);
    bool narrow = ml_dtypes[from->dtype].bytes < ml_dtypes[ml_graph_type(l->g, n)->dtype].bytes;
    bool map = ml_ops[ml_graph_node(l->g, source)->op].op_class == ML_CLASS_MAP;
    return narrow && map && l->info[source].role == LOWER_INLINE ? source : n;
}

/* Whether rows of `axis` are contiguous in n, at multiples of 16 bytes. */
bool fuse_has_rows(lowering *l, ml_ref n, ml_axis axis) {
    const ml_type *type = ml_graph_type(l->g, n);
    lower_view view;
    if (!views_of(l, n, &view)) { /* what it is computed of is not in memory yet */
        if (ml_graph_node(l->g, n)->op != ML_OP_PERMUTE) return true;
        const ml_type *from = ml_graph_type(l->g, ml_graph_source(l->g, n, 0));
        return from->axis[from->rank - 1] == axis;
    }
    int64_t odd = view.offset;
    for (int i = 0; i < type->rank; i++) odd |= type->axis[i] == axis ? 0 : view.stride[i];
    return odd % 8 == 0 && views_axis_stride(type, view.stride, axis) == 1;
}

void fuse_roles(lowering *l) {
    reach(l);
    for (ml_ref n = 1; n < l->count; n++)
        if (l->info[n].reached) l->info[n].role = (uint8_t)first_role(l, n);
    lower_recurrence_layouts(l);
    for (int i = 0; i < l->roots->output_count; i++) pin(l, l->roots->outputs[i], false);
    for (int i = 0; i < l->roots->update_count; i++) pin(l, l->roots->updates[i].value, false);
    for (ml_ref n = 1; n < l->count; n++) /* collectives move whole blocks of memory */
        if (l->info[n].reached && is_collective(l, n))
            pin(l, ml_graph_source(l->g, n, 0), true);
        else if (l->info[n].reached)
            pin_slices(l, n);
    concat_place_parts(l);
    for (ml_ref n = 1; n < l->count; n++)
        if (l->info[n].reached && is_collective(l, n) && !l->info[n].layout) pin(l, n, false);
    for (ml_ref n = 1; n < l->count; n++) {
        const ml_node *node = ml_graph_node(l->g, n);
        if (!l->info[n].reached || l->info[n].role != LOWER_OPAQUE || node->op == ML_OP_OUT)
            continue;
        if (lower_routines[node->op].require) lower_routines[node->op].require(l, n);
        bool strided = lower_routines[node->op].by_position && lower_one_kernel(l, n);
        const bool product = node->op == ML_OP_DOT;
        for (int i = 0; i < node->source_count; i++)
            views_require(l, product ? gemm_operand(l, n, i) : ml_graph_source(l->g, n, i),
                          strided);
    }
    gemm_take_additions(l);
    layout_choose(l);
    int64_t *peak = ML_NEW_ARRAY(l->scratch, int64_t, l->count);
    count_users(l, peak);
    uint32_t *paths = ML_NEW_ARRAY(l->scratch, uint32_t, l->count);
    bool *compared = ML_NEW_ARRAY(l->scratch, bool, l->count);
    for (ml_ref n = 1; n < l->count; n++)
        if (l->info[n].reached) ml_mark_compared(l->g, n, compared);
    for (ml_ref n = 1; n < l->count; n++) {
        if (!l->info[n].reached || l->info[n].role != LOWER_INLINE) continue;
        int op_class = ml_ops[ml_graph_node(l->g, n)->op].op_class;
        paths[n] = paths_of(l, n, paths);
        if (op_class == ML_CLASS_LEAF || op_class == ML_CLASS_MOVE) continue;
        if (l->info[n].taken) continue;
        bool prompt = ml_graph_node(l->g, n)->flags & ML_NODE_PROMPT;
        if (prompt || compared[n] || worth_memory(l, n, peak[n], paths[n]))
            l->info[narrow_of(l, n)].role = LOWER_ROOT;
    }
}
