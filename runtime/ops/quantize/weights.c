#include "runtime/ops/quantize/weights.h"

#include <string.h>

typedef struct {
    uint64_t summed; /* a set of axes of the state: its bits are places in the state's type */
    bool read;       /* by a product that may read narrow values */
    bool kept;       /* something else needs it as it is */
} use;

typedef struct {
    ml_graph *g;
    ml_arena *scratch;
    ml_weight_list *weights;
    ml_ref root;
    bool *live;
    bool *wide; /* by node: a product whose result is part of the logits or of a choice */
    ml_ref *of; /* by node: the STATE node that it is, renamed and cast at most; 0: none */
    use *uses;  /* by state */
    ml_ref *map;
} work;

static void find_live(work *w) {
    w->live[w->root] = w->wide[w->root] = true;
    for (ml_ref n = w->root; n > 0; n--) {
        const ml_node *node = ml_graph_node(w->g, n);
        const bool product = ml_ops[node->op].op_class == ML_CLASS_CONTRACT ||
                             ml_ops[node->op].op_class == ML_CLASS_ROUTINE;
        const bool chooses = node->op == ML_OP_SORT || node->op == ML_OP_TOP_K;
        for (int i = 0; w->live[n] && i < node->source_count; i++) {
            ml_ref source = ml_graph_source(w->g, n, i);
            w->live[source] = true;
            if ((w->wide[n] && !product) || chooses) w->wide[source] = true;
        }
    }
}

/* A parameter of floats, renamed and cast to floats at most. */
static void find_parameters(work *w) {
    for (ml_ref n = 1; n <= w->root; n++) {
        const ml_node *node = ml_graph_node(w->g, n);
        if (!w->live[n] || node->flags & ML_NODE_FUNCTION) continue;
        if (!ml_is_float((ml_dtype)ml_graph_type(w->g, n)->dtype)) continue;
        if (node->op == ML_OP_STATE) {
            uint32_t id = (uint32_t)ml_graph_args(w->g, n)[0];
            if (ml_graph_state(w->g, id)->kind == ML_STATE_PARAMETER) w->of[n] = n;
        } else if (node->op == ML_OP_CAST || node->op == ML_OP_RENAME) {
            w->of[n] = w->of[ml_graph_source(w->g, n, 0)];
        }
    }
}

static use *use_of(const work *w, ml_ref n) {
    return w->of[n] ? &w->uses[ml_graph_args(w->g, w->of[n])[0]] : NULL;
}

/* The axes of the state that a product sums of n, which is the state renamed: by place. */
static uint64_t summed_axes(const work *w, ml_ref dot, ml_ref n, int64_t *terms) {
    const ml_type *type = ml_graph_type(w->g, n); /* renaming keeps the places of axes */
    uint64_t set = 0;
    *terms = 1;
    for (int i = 0; i < ml_graph_node(w->g, dot)->arg_count; i++) {
        int at = ml_type_find(type, (ml_axis)ml_graph_args(w->g, dot)[i]);
        set |= (uint64_t)1 << at;
        *terms *= type->size[at];
    }
    return set;
}

static bool may_read(const work *w, ml_ref n) {
    const ml_node *node = ml_graph_node(w->g, n);
    return node->op == ML_OP_DOT && node->arg_count > 0 && !w->wide[n] &&
           !(node->flags & ML_NODE_FUNCTION) &&
           !w->of[ml_graph_source(w->g, n, 0)] != !w->of[ml_graph_source(w->g, n, 1)];
}

static void find_uses(work *w) {
    if (w->of[w->root]) use_of(w, w->root)->kept = true;
    for (ml_ref n = 1; n <= w->root; n++) {
        for (int i = 0; w->live[n] && i < ml_graph_node(w->g, n)->source_count; i++) {
            ml_ref source = ml_graph_source(w->g, n, i);
            use *u = use_of(w, source);
            int64_t terms = 0;
            if (!u || w->of[n]) continue;
            uint64_t set = may_read(w, n) ? summed_axes(w, n, source, &terms) : 0;
            u->kept = u->kept || terms < ML_WEIGHT_TERMS || (u->read && u->summed != set);
            u->read = true;
            u->summed = set;
        }
    }
}

/* ---- States ---------------------------------------------------------------------------------- */

static ml_ref state_node(ml_graph *g, uint32_t state) {
    return ml_graph_add(g, ML_OP_STATE, NULL, 0, (int64_t[]){state}, 1, NULL);
}

static uint32_t add_state(ml_graph *g, uint32_t parameter, ml_ref initial) {
    ml_state state = {.kind = ML_STATE_PARAMETER,
                      .type = *ml_graph_type(g, initial),
                      .origin = ml_graph_state(g, parameter)->origin};
    uint32_t id = ml_graph_add_state(g, &state);
    ml_graph_state(g, id)->initial = initial;
    return id;
}

/* Where all are 0 the scale is 1. */
static const ml_weight *make_weight(work *w, uint32_t parameter, uint64_t summed) {
    ml_graph *g = w->g;
    const ml_dtype dtype = w->weights->dtype;
    ml_axis axes[ML_MAX_AXES];
    int count = 0;
    for (uint32_t i = 0; i < w->weights->count; i++)
        if (w->weights->at[i].parameter == parameter) return &w->weights->at[i];
    ml_ref value = ml_cast(g, state_node(g, parameter), ML_F32);
    const ml_type *type = ml_graph_type(g, value);
    for (int i = 0; i < type->rank; i++)
        if (summed >> i & 1) axes[count++] = type->axis[i];
    ml_ref most = ml_reduce(g, ML_OP_MAX, ml_map1(g, ML_OP_ABS, value), axes, count);
    ml_ref largest = ml_const(g, ML_F32, ml_dtypes[dtype].largest), zero = ml_const(g, ML_F32, 0);
    ml_ref scale = ml_where(g, ml_map2(g, ML_OP_GT, most, zero),
                            ml_map2(g, ML_OP_DIV, most, largest), ml_const(g, ML_F32, 1));
    ml_ref narrow = ml_cast(g, ml_map2(g, ML_OP_DIV, value, scale), dtype);
    ml_weight *weight = ML_PUSH(w->weights->arena, w->weights);
    weight->parameter = parameter;
    weight->values = add_state(g, parameter, narrow);
    weight->scales = add_state(g, parameter, scale);
    return weight;
}

/* ---- Products -------------------------------------------------------------------------------- */

/* A state of w's axes, or some of them, under the names that w has as `n`. */
static ml_ref renamed(work *w, ml_ref state, ml_ref parameter, ml_ref n) {
    const ml_type *from = ml_graph_type(w->g, parameter), *to = ml_graph_type(w->g, n);
    for (int i = 0; i < from->rank; i++)
        if (from->axis[i] != to->axis[i] &&
            ml_type_find(ml_graph_type(w->g, state), from->axis[i]) >= 0)
            state = ml_rename(w->g, state, from->axis[i], to->axis[i]);
    return state;
}

static ml_ref product(work *w, ml_ref n, int which) {
    ml_graph *g = w->g;
    ml_ref operand = ml_graph_source(g, n, which), x = w->map[ml_graph_source(g, n, 1 - which)];
    ml_ref parameter = w->of[operand];
    const uint32_t id = (uint32_t)ml_graph_args(g, parameter)[0];
    const ml_weight *weight = make_weight(w, id, w->uses[id].summed);
    const ml_dtype dtype = (ml_dtype)ml_graph_type(g, operand)->dtype;
    const ml_type type = *ml_graph_type(g, n);
    ml_axis axes[ML_MAX_AXES];
    int count = ml_graph_node(g, n)->arg_count;
    for (int i = 0; i < count; i++) axes[i] = (ml_axis)ml_graph_args(g, n)[i];
    ml_ref values =
        ml_cast(g, renamed(w, state_node(g, weight->values), parameter, operand), dtype);
    ml_ref scales = renamed(w, state_node(g, weight->scales), parameter, operand);
    const ml_dtype sum = ml_is_narrow(dtype) ? ML_F32 : dtype;
    ml_ref result = ml_dot(g, which ? x : values, which ? values : x, axes, count, sum);
    result = ml_map2(g, ML_OP_MUL, result, ml_cast(g, scales, sum));
    return ml_permute(g, ml_cast(g, result, (ml_dtype)type.dtype), &type);
}

static ml_ref copied(work *w, ml_ref n) {
    const ml_node node = *ml_graph_node(w->g, n);
    ml_ref *sources = ML_NEW_ARRAY(w->scratch, ml_ref, (size_t)node.source_count + 1);
    bool same = true;
    for (int i = 0; i < node.source_count; i++) {
        sources[i] = w->map[ml_graph_source(w->g, n, i)];
        same = same && sources[i] == ml_graph_source(w->g, n, i);
    }
    return same ? n : ml_graph_copy(w->g, w->g, n, sources);
}

ml_ref ml_weights_narrow(ml_graph *g, ml_ref logits, ml_weight_list *weights, ml_arena *scratch) {
    const size_t nodes = (size_t)logits + 1, states = (size_t)ml_graph_state_count(g) + 1;
    work w = {.g = g, .scratch = scratch, .weights = weights, .root = logits};
    w.live = ML_NEW_ARRAY(scratch, bool, nodes);
    w.wide = ML_NEW_ARRAY(scratch, bool, nodes);
    w.of = ML_NEW_ARRAY(scratch, ml_ref, nodes);
    w.map = ML_NEW_ARRAY(scratch, ml_ref, nodes);
    w.uses = ML_NEW_ARRAY(scratch, use, states);
    find_live(&w);
    find_parameters(&w);
    find_uses(&w);
    for (ml_ref n = 1; n <= logits; n++) {
        if (!w.live[n]) continue;
        int which = -1;
        for (int i = 0; i < 2 && may_read(&w, n); i++) {
            const use *u = use_of(&w, ml_graph_source(g, n, i));
            if (u && u->read && !u->kept) which = i;
        }
        const ml_origin origin = *ml_graph_origin(g, n);
        ml_graph_set_origin(g, &origin);
        w.map[n] = which >= 0 ? product(&w, n, which) : copied(&w, n);
    }
    return w.map[logits];
}
