/* The gradient of a recurrence: a recurrence in the other direction.
 *
 * Its states are the cotangents of the states. Its step computes the step anew from the states
 * before it (the histories), and takes one product with the cotangents of what it gave. Gradients
 * of inputs are stacked, those of captured tensors summed. Where the latter are products of two
 * values of the step, as those of weights are, both are stacked and multiplied once, outside. */
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/graph/recurrence.h"

typedef ML_VEC(ml_recurrence_pair) pair_list;
typedef ML_VEC(ml_ref) ref_list;

/* A term of the gradient of a captured tensor. */
typedef struct {
    int source;   /* of the node */
    ml_ref dot;   /* a product to be taken outside; 0: a sum */
    int left[2];  /* its operands: stacked results; -1: a tensor that is there already ... */
    ml_ref is[2]; /* ... this one */
    int summed;
} term;

typedef struct {
    ml_graph *g;
    ml_arena *arena;
    ml_ref n;
    ml_recurrence r;
    const ml_ref *cotangents;
    const bool *wants;
    ml_ref *values; /* by source: what stands for it in the step */
    ref_list roots, given, wrt;
    ref_list gradients; /* of wrt */
    pair_list inputs, states, captured;
    ref_list next, stacked, summed;
    ML_VEC(term) terms;
} reversal;

static bool is_float_type(const ml_type *t) {
    return ml_is_float((ml_dtype)t->dtype);
}

static ml_ref zeros(ml_graph *g, const ml_type *type) {
    return ml_broadcast(g, ml_const(g, (ml_dtype)type->dtype, 0), type);
}

static void pair_add(reversal *v, pair_list *list, ml_ref parameter, ml_ref value) {
    *ML_PUSH(v->arena, list) = (ml_recurrence_pair){parameter, value};
}

static void ref_add(reversal *v, ref_list *list, ml_ref n) {
    *ML_PUSH(v->arena, list) = n;
}

/* A parameter for each source, and where its value comes from. */
static void stand_in(reversal *v) {
    int count = v->r.inputs + v->r.states + v->r.captured;
    v->values = ML_NEW_ARRAY(v->arena, ml_ref, count + 1);
    for (int i = 0; i < count; i++) {
        ml_ref source = ml_graph_source(v->g, v->n, i);
        ml_type type = *ml_graph_type(v->g, source);
        int state = i - v->r.inputs;
        if (i < v->r.inputs) {
            ml_recurrence_slice(v->g, source, v->r.axis, v->r.length, &type);
            v->values[i] = ml_recurrence_parameter(v->g, &type);
            pair_add(v, &v->inputs, v->values[i], source);
        } else if (state < v->r.states) {
            v->values[i] = ml_recurrence_parameter(v->g, &type);
            ml_ref history = ml_out(v->g, v->n, ml_recurrence_history(&v->r) + state);
            pair_add(v, &v->inputs, v->values[i], history);
        } else {
            v->values[i] = ml_recurrence_parameter(v->g, &type);
            pair_add(v, &v->captured, v->values[i], source);
        }
        bool state_one = state >= 0 && state < v->r.states;
        if (is_float_type(&type) && (state_one || v->wants[i])) ref_add(v, &v->wrt, v->values[i]);
    }
}

/* Root i of the step, and the cotangent of what it gives. */
static void root_add(reversal *v, int i, ml_ref cotangent) {
    int count = v->r.inputs + v->r.states + v->r.captured;
    ref_add(v, &v->roots,
            ml_graph_inline(v->g, ml_recurrence_root(v->g, v->n, i), v->values, count));
    ref_add(v, &v->given, cotangent);
}

static void roots_add(reversal *v) {
    for (int i = 0; i < v->r.states; i++) {
        ml_type type = *ml_graph_type(v->g, v->values[v->r.inputs + i]);
        if (!is_float_type(&type)) continue;
        ml_ref after = ml_recurrence_parameter(v->g, &type);
        ml_ref final = v->cotangents[ml_recurrence_final(&v->r) + i];
        pair_add(v, &v->states, after, final ? final : zeros(v->g, &type));
        root_add(v, i, after);
    }
    for (int i = 0; i < v->r.stacked + v->r.summed; i++) {
        if (!v->cotangents[i]) continue;
        int root = v->r.states + i;
        ml_type type = *ml_graph_type(v->g, ml_recurrence_root(v->g, v->n, root));
        ml_ref cotangent = ml_recurrence_parameter(v->g, &type);
        pair_add(v, i < v->r.stacked ? &v->inputs : &v->captured, cotangent, v->cotangents[i]);
        root_add(v, root, cotangent);
    }
}

static ml_ref gradient_of(const reversal *v, int source) {
    for (uint32_t i = 0; i < v->wrt.count; i++)
        if (v->wrt.at[i] == v->values[source]) return v->gradients.at[i];
    return 0;
}

static void next_add(reversal *v) {
    for (int i = 0; i < v->r.states; i++) {
        ml_type type = *ml_graph_type(v->g, v->values[v->r.inputs + i]);
        if (!is_float_type(&type)) continue;
        ml_ref before = gradient_of(v, v->r.inputs + i);
        ml_ref history = v->cotangents[ml_recurrence_history(&v->r) + i];
        if (history) {
            ml_ref given = ml_recurrence_parameter(v->g, &type);
            pair_add(v, &v->inputs, given, history);
            before = before ? ml_map2(v->g, ML_OP_ADD, before, given) : given;
        }
        ref_add(v, &v->next, before ? before : zeros(v->g, &type));
    }
}

/* ---- Captured tensors ---- */

static bool differs_by_position(const reversal *v, ml_ref n) {
    ml_refs body = {0};
    graph_reach(v->g, n, v->arena, &body);
    for (uint32_t i = 0; i < body.count; i++)
        for (int list = 0; list < 2; list++) {
            const pair_list *pairs = list ? &v->states : &v->inputs;
            for (uint32_t k = 0; k < pairs->count; k++)
                if (pairs->at[k].parameter == body.at[i]) return true;
        }
    return false;
}

/* A result at every position: the tensor itself where it is one that the step reads. */
static int stack(reversal *v, ml_ref n, ml_ref *is) {
    for (uint32_t i = 0; i < v->inputs.count; i++)
        if (v->inputs.at[i].parameter == n) {
            *is = v->inputs.at[i].value;
            return -1;
        }
    for (uint32_t i = 0; i < v->stacked.count; i++)
        if (v->stacked.at[i] == n) return (int)i;
    ref_add(v, &v->stacked, n);
    return (int)v->stacked.count - 1;
}

/* Whether all positions' products are better taken at once. */
static bool taken_outside(const reversal *v, ml_ref n) {
    enum { MOST = 8 }; /* times the memory of the gradient itself, a position */
    if (ml_graph_node(v->g, n)->op != ML_OP_DOT) return false;
    int64_t operands = 0;
    for (int i = 0; i < 2; i++) {
        ml_ref source = ml_graph_source(v->g, n, i);
        if (ml_graph_type(v->g, source)->rank == ML_MAX_AXES) return false;
        if (!differs_by_position(v, source)) return false;
        operands += ml_type_elements(ml_graph_type(v->g, source));
    }
    return operands / MOST <= ml_type_elements(ml_graph_type(v->g, n));
}

static void terms_add(reversal *v, int source, ml_ref gradient) {
    const ml_node *node = ml_graph_node(v->g, gradient);
    ml_ref a = node->source_count ? ml_graph_source(v->g, gradient, 0) : 0;
    bool passes = node->op == ML_OP_PERMUTE ||
                  (node->op == ML_OP_CAST && is_float_type(ml_graph_type(v->g, a)));
    if (passes) {
        terms_add(v, source, a);
        return;
    }
    if (node->op == ML_OP_ADD) {
        ml_ref b = ml_graph_source(v->g, gradient, 1);
        if (ml_type_same_axes(ml_graph_type(v->g, a), ml_graph_type(v->g, b))) {
            terms_add(v, source, a);
            terms_add(v, source, b);
            return;
        }
    }
    term made = {.source = source};
    if (taken_outside(v, gradient)) {
        made.dot = gradient;
        for (int i = 0; i < 2; i++)
            made.left[i] = stack(v, ml_graph_source(v->g, gradient, i), &made.is[i]);
    } else {
        ml_dtype dtype = ml_compute_dtype((ml_dtype)ml_graph_type(v->g, gradient)->dtype);
        made.summed = (int)v->summed.count;
        ref_add(v, &v->summed, ml_cast(v->g, gradient, dtype));
    }
    *ML_PUSH(v->arena, &v->terms) = made;
}

static ml_ref dot_outside(const reversal *v, const term *t, ml_ref reversed) {
    ml_ref operands[2];
    int64_t axes[ML_MAX_AXES];
    int count = ml_graph_node(v->g, t->dot)->arg_count;
    for (int i = 0; i < 2; i++)
        operands[i] = t->left[i] < 0 ? t->is[i] : ml_out(v->g, reversed, t->left[i]);
    for (int i = 0; i < count; i++) axes[i + 1] = ml_graph_args(v->g, t->dot)[i];
    axes[0] = v->r.axis;
    ml_type dtype = {.dtype = ml_graph_type(v->g, t->dot)->dtype};
    return ml_graph_add(v->g, ML_OP_DOT, operands, 2, axes, count + 1, &dtype);
}

/* ---- All of it ---- */

static ml_ref reversed_new(const reversal *v) {
    ml_recurrence_step step = {.axis = v->r.axis,
                               .reverse = !v->r.reverse,
                               .length = v->r.length,
                               .inputs = v->inputs.at,
                               .input_count = (int)v->inputs.count,
                               .states = v->states.at,
                               .state_count = (int)v->states.count,
                               .next = v->next.at,
                               .captured = v->captured.at,
                               .captured_count = (int)v->captured.count,
                               .stacked = v->stacked.at,
                               .stacked_count = (int)v->stacked.count,
                               .summed = v->summed.at,
                               .summed_count = (int)v->summed.count};
    return ml_recurrence_new(v->g, &step);
}

/* In the order of stacked: -1 where the input has none. */
static int *inputs_stack(reversal *v) {
    int *at = ML_NEW_ARRAY(v->arena, int, v->r.inputs + 1);
    for (int i = 0; i < v->r.inputs; i++) {
        ml_ref gradient = gradient_of(v, i);
        at[i] = gradient && v->wants[i] ? (int)v->stacked.count : -1;
        if (at[i] >= 0) ref_add(v, &v->stacked, gradient);
    }
    return at;
}

static void collect(const reversal *v, ml_ref reversed, const int *inputs, ml_ref *gradients) {
    ml_graph *g = v->g;
    ml_recurrence back;
    ml_recurrence_read(g, reversed, &back);
    for (int i = 0; i < v->r.inputs; i++)
        if (inputs[i] >= 0) gradients[i] = ml_out(g, reversed, inputs[i]);
    int state = ml_recurrence_final(&back);
    for (int i = 0; i < v->r.states; i++)
        if (is_float_type(ml_graph_type(g, v->values[v->r.inputs + i])))
            gradients[v->r.inputs + i] = ml_out(g, reversed, state++);
    for (uint32_t i = 0; i < v->terms.count; i++) {
        const term *t = &v->terms.at[i];
        ml_ref value = t->dot ? dot_outside(v, t, reversed)
                              : ml_out(g, reversed, ml_recurrence_summed(&back) + t->summed);
        ml_type type = *ml_graph_type(g, ml_graph_source(g, v->n, t->source));
        value = ml_cast(g, ml_permute(g, value, &type), (ml_dtype)type.dtype);
        ml_ref *sum = &gradients[t->source];
        *sum = *sum ? ml_map2(g, ML_OP_ADD, *sum, value) : value;
    }
}

void ml_recurrence_gradient(ml_graph *g, ml_ref n, const ml_ref *cotangents, const bool *wants,
                            ml_recurrence_pullback *pullback, void *context, ml_ref *gradients) {
    reversal v = {.g = g, .arena = ml_graph_arena(g), .n = n, .wants = wants};
    v.cotangents = cotangents;
    ml_recurrence_read(g, n, &v.r);
    stand_in(&v);
    roots_add(&v);
    for (uint32_t i = 0; i < v.wrt.count; i++) ref_add(&v, &v.gradients, 0);
    if (v.roots.count && v.wrt.count)
        pullback(context, v.roots.at, v.given.at, (int)v.roots.count, v.wrt.at, (int)v.wrt.count,
                 v.gradients.at);
    next_add(&v);
    int *inputs = inputs_stack(&v);
    for (int i = v.r.inputs + v.r.states; i < v.r.inputs + v.r.states + v.r.captured; i++) {
        ml_ref gradient = gradient_of(&v, i);
        if (gradient && wants[i]) terms_add(&v, i, gradient);
    }
    if (v.states.count + v.stacked.count + v.summed.count == 0) return;
    collect(&v, reversed_new(&v), inputs, gradients);
}
