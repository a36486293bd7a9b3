/* The gradient of a recurrence: a recurrence in the other direction.
 *
 * Its states are the cotangents of the states. Its step computes the step anew from the states
 * before it (the histories), and takes one product with the cotangents of what it gave. Gradients
 * of inputs are stacked, those of captured tensors summed. Products in them, as of weights, are
 * taken once, outside, of what is stacked. */
#include <string.h>

#include "runtime/graph/gradient.h"
#include "runtime/graph/infer.h"
#include "runtime/ops/recurrence/recurrence_internal.h"

typedef ML_VEC(ml_recurrence_pair) pair_list;
typedef ML_VEC(ml_ref) ref_list;

/* A term of the gradient of a source: a product to be taken outside, of results that are stacked;
 * or one that is stacked or summed, and then summed over the axes that the source lacks. */
typedef struct {
    int source;        /* of the node */
    ml_ref dot;        /* 0: none */
    int at[2];         /* of the stacked results; -1: a tensor that is there already ... */
    ml_ref is[2];      /* ... this one */
    ml_ref renamed[2]; /* the operand is what this RENAME makes of it; 0: itself */
    bool summed;       /* at[0] counts summed results */
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

/* ---- Terms: gradients of inputs and of captured tensors ---- */

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

static bool is_input(const reversal *v, int source) {
    return source < v->r.inputs;
}

/* What a captured tensor's parameter stands for; 0 for other nodes. */
static ml_ref captured_value(const reversal *v, ml_ref n) {
    for (uint32_t i = 0; i < v->captured.count; i++)
        if (v->captured.at[i].parameter == n) return v->captured.at[i].value;
    return 0;
}

/* Whether all positions' products are better taken at once. */
static bool taken_outside(const reversal *v, int source, ml_ref n) {
    enum { MOST = 8 }; /* times the memory of the gradient itself, a position */
    if (ml_graph_node(v->g, n)->op != ML_OP_DOT) return false;
    int64_t operands = 0;
    for (int i = 0; i < 2; i++) {
        ml_ref operand = ml_graph_source(v->g, n, i);
        const ml_type *type = ml_graph_type(v->g, operand);
        if (is_input(v, source) && captured_value(v, operand)) continue;
        if (type->rank == ML_MAX_AXES || !differs_by_position(v, operand)) return false;
        operands += ml_type_elements(type);
    }
    return operands / MOST <= ml_type_elements(ml_graph_type(v->g, n));
}

/* Whether a state or result has as many elements. */
static bool is_within(const reversal *v, ml_ref n) {
    int64_t elements = ml_type_elements(ml_graph_type(v->g, n));
    for (uint32_t i = 0; i < v->states.count; i++)
        if (elements <= ml_type_elements(ml_graph_type(v->g, v->states.at[i].parameter)))
            return true;
    for (uint32_t i = 0; i < v->roots.count; i++)
        if (elements <= ml_type_elements(ml_graph_type(v->g, v->roots.at[i]))) return true;
    return false;
}

/* What a sum over axes, or a sum of such sums, adds up, where a state or result has as many
 * elements: it is summed outside, so that the step itself stays elementwise. */
static ml_ref summand(const reversal *v, ml_ref n) {
    const ml_op op = (ml_op)ml_graph_node(v->g, n)->op;
    const bool leaf = ml_graph_node(v->g, n)->source_count == 0;
    ml_ref a = leaf ? 0 : ml_graph_source(v->g, n, 0), from = n;
    if (op == ML_OP_SUM) return is_within(v, a) ? a : n;
    if (op == ML_OP_PERMUTE || (op == ML_OP_CAST && is_float_type(ml_graph_type(v->g, a))))
        from = summand(v, a);
    if (from != a && from != n) return from;
    if (op != ML_OP_ADD) return n;
    ml_ref b = ml_graph_source(v->g, n, 1), left = summand(v, a), right = summand(v, b);
    const ml_type *l = ml_graph_type(v->g, left), *r = ml_graph_type(v->g, right);
    if (left == a || right == b || !ml_type_same_axes(l, r)) return n;
    ml_dtype dtype = (ml_dtype)ml_graph_type(v->g, n)->dtype;
    return ml_map2(v->g, ML_OP_ADD, ml_cast(v->g, left, dtype), ml_cast(v->g, right, dtype));
}

/* What is stacked for an input is rounded in the step as the gradient itself would be: half the
 * memory where the input is narrow. Not of steps with sums, whose kernel adds up rows itself. */
static ml_ref as_narrow(const reversal *v, int source, ml_ref n) {
    ml_dtype dtype = (ml_dtype)ml_graph_type(v->g, ml_graph_source(v->g, v->n, source))->dtype;
    int bytes = ml_dtypes[ml_graph_type(v->g, n)->dtype].bytes;
    return ml_dtypes[dtype].bytes < bytes ? ml_cast(v->g, n, dtype) : n;
}

static void term_add(reversal *v, int source, ml_ref gradient) {
    term made = {.source = source};
    if (taken_outside(v, source, gradient)) {
        made.dot = gradient;
        for (int i = 0; i < 2; i++) {
            ml_ref operand = ml_graph_source(v->g, gradient, i);
            made.is[i] = is_input(v, source) ? captured_value(v, operand) : 0;
            if (!made.is[i] && ml_graph_node(v->g, operand)->op == ML_OP_RENAME) {
                made.renamed[i] = operand;
                operand = ml_graph_source(v->g, operand, 0);
            }
            made.at[i] = made.is[i] ? -1 : stack(v, operand, &made.is[i]);
        }
    } else if (is_input(v, source)) {
        bool outside = ml_recurrence_elementwise(v->g, v->n);
        ml_ref from = outside ? summand(v, gradient) : gradient;
        if (outside && from == gradient) from = as_narrow(v, source, from);
        made.at[0] = stack(v, from, &made.is[0]);
    } else {
        ml_ref from = summand(v, gradient);
        ml_dtype dtype = ml_compute_dtype((ml_dtype)ml_graph_type(v->g, from)->dtype);
        made.summed = true;
        made.at[0] = (int)v->summed.count;
        ref_add(v, &v->summed, ml_cast(v->g, from, dtype));
    }
    *ML_PUSH(v->arena, &v->terms) = made;
}

/* Whether a sum is better taken term by term, outside. */
static bool splits(const reversal *v, int source, ml_ref sum) {
    ml_ref a = ml_graph_source(v->g, sum, 0), b = ml_graph_source(v->g, sum, 1);
    if (!ml_type_same_axes(ml_graph_type(v->g, a), ml_graph_type(v->g, b))) return false;
    return !is_input(v, source) || (taken_outside(v, source, a) && taken_outside(v, source, b));
}

static void terms_add(reversal *v, int source, ml_ref gradient) {
    const ml_node *node = ml_graph_node(v->g, gradient);
    ml_ref a = node->source_count ? ml_graph_source(v->g, gradient, 0) : 0;
    bool passes = node->op == ML_OP_PERMUTE ||
                  (node->op == ML_OP_CAST && is_float_type(ml_graph_type(v->g, a)));
    if (passes) {
        terms_add(v, source, a);
    } else if (node->op == ML_OP_ADD && splits(v, source, gradient)) {
        ml_ref b = ml_graph_source(v->g, gradient, 1);
        terms_add(v, source, a);
        terms_add(v, source, b);
    } else
        term_add(v, source, gradient);
}

/* The same at all positions, under the names that `rename` gives. */
static ml_ref renamed(const reversal *v, ml_ref rename, ml_ref all) {
    if (!rename) return all;
    int count = ml_graph_node(v->g, rename)->arg_count;
    int64_t args[2 * ML_MAX_AXES];
    for (int i = 0; i < count; i++) args[i] = ml_graph_args(v->g, rename)[i];
    return ml_graph_add(v->g, ML_OP_RENAME, &all, 1, args, count, NULL);
}

static ml_ref dot_outside(const reversal *v, const term *t, ml_ref reversed) {
    ml_ref operands[2];
    int64_t axes[ML_MAX_AXES + 1];
    int count = ml_graph_node(v->g, t->dot)->arg_count;
    for (int i = 0; i < 2; i++)
        operands[i] =
            renamed(v, t->renamed[i], t->at[i] < 0 ? t->is[i] : ml_out(v->g, reversed, t->at[i]));
    for (int i = 0; i < count; i++) axes[i] = ml_graph_args(v->g, t->dot)[i];
    if (!is_input(v, t->source)) axes[count++] = v->r.axis;
    ml_type dtype = {.dtype = ml_graph_type(v->g, t->dot)->dtype};
    return ml_graph_add(v->g, ML_OP_DOT, operands, 2, axes, count, &dtype);
}

/* A term as a part of the gradient, of the source's type. */
static ml_ref term_value(const reversal *v, const term *t, ml_ref reversed) {
    ml_graph *g = v->g;
    ml_recurrence back = {0};
    if (reversed) ml_recurrence_read(g, reversed, &back);
    ml_type type = *ml_graph_type(g, ml_graph_source(g, v->n, t->source));
    ml_ref value = t->dot         ? dot_outside(v, t, reversed)
                   : t->at[0] < 0 ? t->is[0]
                                  : ml_out(g, reversed, t->at[0] + (t->summed ? back.stacked : 0));
    ml_type from = *ml_graph_type(g, value);
    ml_axis missing[ML_MAX_AXES];
    int count = 0;
    for (int i = 0; i < from.rank; i++)
        if (ml_type_find(&type, from.axis[i]) < 0) missing[count++] = from.axis[i];
    if (count) value = ml_reduce(g, ML_OP_SUM, value, missing, count);
    return ml_cast(g, ml_permute(g, value, &type), (ml_dtype)type.dtype);
}

/* ---- All of it ---- */

static ml_ref reversed_new(const reversal *v) {
    ml_recurrence_rows rows; /* then this one is so, too */
    ml_recurrence_step step = {.axis = v->r.axis,
                               .reverse = !v->r.reverse,
                               .sums_stay = ml_recurrence_by_rows(v->g, v->n, &rows) &&
                                            !ml_recurrence_elementwise(v->g, v->n),
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

static void collect(const reversal *v, ml_ref reversed, ml_ref *gradients) {
    ml_graph *g = v->g;
    ml_recurrence back = {0};
    if (reversed) ml_recurrence_read(g, reversed, &back);
    int state = ml_recurrence_final(&back);
    for (int i = 0; i < v->r.states; i++)
        if (is_float_type(ml_graph_type(g, v->values[v->r.inputs + i])))
            gradients[v->r.inputs + i] = ml_out(g, reversed, state++);
    for (uint32_t i = 0; i < v->terms.count; i++) {
        const term *t = &v->terms.at[i];
        ml_ref value = term_value(v, t, reversed), *sum = &gradients[t->source];
        *sum = *sum ? ml_map2(g, ML_OP_ADD, *sum, value) : value;
    }
}

void recurrence_gradient(tape *t, ml_ref n, const ml_ref *cotangents) {
    ml_graph *g = gradient_graph(t);
    const int count = ml_graph_node(g, n)->source_count;
    reversal v = {.g = g, .arena = ml_graph_arena(g), .n = n, .cotangents = cotangents};
    ml_ref *gradients = ML_NEW_ARRAY(gradient_scratch(t), ml_ref, count);
    bool *wants = ML_NEW_ARRAY(gradient_scratch(t), bool, count);
    for (int i = 0; i < count; i++) wants[i] = gradient_wants(t, n, i);
    v.wants = wants;
    ml_recurrence_read(g, n, &v.r);
    stand_in(&v);
    roots_add(&v);
    for (uint32_t i = 0; i < v.wrt.count; i++) ref_add(&v, &v.gradients, 0);
    if (v.roots.count && v.wrt.count)
        gradient_pull_back(t, v.roots.at, v.given.at, (int)v.roots.count, v.wrt.at,
                           (int)v.wrt.count, v.gradients.at);
    next_add(&v);
    for (int i = 0; i < count; i++) {
        bool state = i >= v.r.inputs && i < v.r.inputs + v.r.states;
        ml_ref gradient = state ? 0 : gradient_of(&v, i);
        if (gradient && wants[i]) terms_add(&v, i, gradient);
    }
    bool steps = v.states.count + v.stacked.count + v.summed.count > 0; /* or all is there */
    collect(&v, steps ? reversed_new(&v) : 0, gradients);
    for (int i = 0; i < count; i++)
        if (gradients[i]) gradient_give(t, n, i, gradients[i]);
}
