/* LINEAR_SCAN and its gradient: arguments, types, constructors, cost. */
#include "runtime/ops/linear_scan/linear_scan.h"

#include <string.h>

#include "runtime/graph/infer.h"

enum { ARGS = 6, COTANGENTS = 2 };

static ml_linear_scan unpack(const int64_t *args, int source_count, bool grad) {
    ml_linear_scan s = {.axis = (ml_axis)args[0],
                        .keys = (ml_axis)args[1],
                        .values = (ml_axis)args[2],
                        .reverse = args[3] != 0,
                        .after = args[4] != 0,
                        .dtype = (ml_dtype)args[5]};
    s.rank = (source_count - LINEAR_SCAN_FIRST_PAIR - (grad ? COTANGENTS : 0)) / 2;
    return s;
}

static void read_sizes(const ml_type *state, const ml_type *k, const ml_type *a,
                       ml_linear_scan *s) {
    s->decay_per_key = ml_type_find(a, s->keys) >= 0;
    s->length = ml_type_size(k, s->axis);
    s->key_size = ml_type_size(state, s->keys);
    s->value_size = s->values ? ml_type_size(state, s->values) : 1;
}

void ml_linear_scan_read(const ml_graph *g, ml_ref n, ml_linear_scan *out) {
    const ml_node *node = ml_graph_node(g, n);
    const ml_ref *from = ml_graph_sources(g, n);
    assert(node->arg_count == ARGS);
    *out = unpack(ml_graph_args(g, n), node->source_count, node->op == ML_OP_LINEAR_SCAN_GRAD);
    read_sizes(ml_graph_type(g, from[LINEAR_SCAN_STATE]), ml_graph_type(g, from[LINEAR_SCAN_K]),
               ml_graph_type(g, from[LINEAR_SCAN_DECAY]), out);
}

/* ---- Types ----------------------------------------------------------------------------------- */

static void push(ml_type *t, ml_axis axis, int64_t size) {
    assert(t->rank < ML_MAX_AXES);
    t->axis[t->rank] = axis;
    t->size[t->rank++] = size;
}

void linear_scan_slices(const ml_linear_scan *s, const ml_type *state, ml_axis last, ml_dtype dtype,
                        ml_type *out) {
    *out = (ml_type){.dtype = (uint8_t)dtype};
    push(out, s->axis, s->length);
    for (int i = 0; i < state->rank; i++)
        if (state->axis[i] != s->keys && state->axis[i] != s->values)
            push(out, state->axis[i], state->size[i]);
    if (last) push(out, last, ml_type_size(state, last));
}

ml_axis linear_scan_own(const ml_linear_scan *s, int i) {
    if (i == LINEAR_SCAN_V) return s->values;
    if (i == LINEAR_SCAN_DECAY) return s->decay_per_key ? s->keys : 0;
    return s->keys;
}

void ml_linear_scan_type(const ml_graph *g, ml_ref n, int i, ml_type *out) {
    ml_linear_scan s;
    ml_linear_scan_read(g, n, &s);
    const ml_type *state = ml_graph_type(g, ml_graph_source(g, n, LINEAR_SCAN_STATE));
    bool grad = ml_graph_node(g, n)->op == ML_OP_LINEAR_SCAN_GRAD;
    if (grad ? i == LINEAR_SCAN_STATE : i == 1)
        *out = *state;
    else if (grad)
        linear_scan_slices(&s, state, linear_scan_own(&s, i),
                           (ml_dtype)ml_graph_type(g, ml_graph_source(g, n, i))->dtype, out);
    else
        linear_scan_slices(&s, state, s.values, s.dtype, out);
}

static const char *operand_name(const infer *in, int i) {
    static const char *const names[] = {"q", "k", "v", "the decay", "the initial state"};
    if (i < LINEAR_SCAN_FIRST_PAIR) return names[i];
    int pair = i - LINEAR_SCAN_FIRST_PAIR;
    return ml_arena_format(ml_graph_arena(in->g), "%s%d", pair % 2 ? "w" : "u", pair / 2);
}

static void check_state(const infer *in, const ml_linear_scan *s) {
    const ml_type *state = infer_source(in, LINEAR_SCAN_STATE);
    (void)infer_find(in, LINEAR_SCAN_STATE, s->keys, "scan with keys", "the initial state");
    if (s->values)
        (void)infer_find(in, LINEAR_SCAN_STATE, s->values, "scan with values", "the initial state");
    if (ml_type_find(state, s->axis) >= 0)
        infer_raise(in, NULL, "cannot scan over \"%s\": the initial state has it",
                    ml_axis_name(in->g, s->axis));
    if (state->dtype != ML_F32 && state->dtype != ML_F64)
        infer_raise(in, "cast the initial state", "the state of linear_scan is f32 or f64, not %s",
                    ml_dtypes[state->dtype].name);
    if (state->rank == ML_MAX_AXES)
        infer_raise(in, "merge some of its axes first", "the state of linear_scan has %d axes",
                    ML_MAX_AXES);
    if (s->keys == s->values)
        infer_raise(in, NULL, "keys and values of linear_scan are one axis \"%s\"",
                    ml_axis_name(in->g, s->keys));
}

/* Operand i has the scan's axis, its own, and of others some of the state's. */
static void check_operand(const infer *in, const ml_linear_scan *s, int i) {
    const ml_type *t = infer_source(in, i), *state = infer_source(in, LINEAR_SCAN_STATE);
    const char *name = operand_name(in, i);
    ml_axis own = linear_scan_own(s, i);
    infer_float_only(in, i);
    int at = infer_find(in, i, s->axis, "scan over", name);
    if (t->size[at] != s->length)
        infer_raise(in, NULL, "cannot scan: \"%s\" is %lld in k, %lld in %s",
                    ml_axis_name(in->g, s->axis), (long long)s->length, (long long)t->size[at],
                    name);
    if (own) (void)infer_find(in, i, own, "scan with", name);
    if (!ml_dtype_holds((ml_dtype)state->dtype, (ml_dtype)t->dtype))
        infer_raise(in, "begin with a state of that dtype", "%s of linear_scan is %s, the state %s",
                    name, ml_dtypes[t->dtype].name, ml_dtypes[state->dtype].name);
    for (int k = 0; k < t->rank; k++) {
        ml_axis axis = t->axis[k];
        if (axis == s->axis) continue;
        int place = ml_type_find(state, axis);
        bool other = axis != own && (axis == s->keys || axis == s->values);
        if (place < 0 || other)
            infer_raise(in, "q and k have its keys, v its values, all of them some of its others",
                        "cannot scan: %s has axis \"%s\", the state has %s", name,
                        ml_axis_name(in->g, axis), infer_axes(in, state));
        if (state->size[place] != t->size[k])
            infer_raise(in, NULL, "cannot scan: \"%s\" is %lld in %s, %lld in the state",
                        ml_axis_name(in->g, axis), (long long)t->size[k], name,
                        (long long)state->size[place]);
    }
}

void linear_scan_infer(infer *in, ml_type *out) {
    bool grad = in->op == ML_OP_LINEAR_SCAN_GRAD;
    int least = LINEAR_SCAN_FIRST_PAIR + (grad ? COTANGENTS : 0);
    if (in->source_count < least || (in->source_count - least) % 2 ||
        in->source_count > least + 2 * LINEAR_SCAN_MOST_RANK)
        ml_raise(ML_INTERNAL, "%s has %d operands", ml_ops[in->op].name, in->source_count);
    ml_linear_scan s = unpack(in->args, in->source_count, grad);
    check_state(in, &s);
    (void)infer_find(in, LINEAR_SCAN_K, s.axis, "scan over", "k");
    const ml_type *state = infer_source(in, LINEAR_SCAN_STATE);
    read_sizes(state, infer_source(in, LINEAR_SCAN_K), infer_source(in, LINEAR_SCAN_DECAY), &s);
    for (int i = 0; i < LINEAR_SCAN_FIRST_PAIR + 2 * s.rank; i++)
        if (i != LINEAR_SCAN_STATE) check_operand(in, &s, i);
    if (!ml_is_float(s.dtype))
        infer_raise(in, "cast the result", "linear_scan gives floats, not %s",
                    ml_dtypes[s.dtype].name);
    if (!grad) {
        linear_scan_slices(&s, state, s.values, s.dtype, out);
        return;
    }
    ml_type y;
    linear_scan_slices(&s, state, s.values, s.dtype, &y);
    if (!ml_type_same_axes(infer_source(in, in->source_count - 2), &y) ||
        !ml_type_same_axes(infer_source(in, in->source_count - 1), state))
        ml_raise(ML_INTERNAL, "linear_scan_grad has a cotangent of wrong type");
    linear_scan_slices(&s, state, s.keys, (ml_dtype)infer_source(in, LINEAR_SCAN_Q)->dtype, out);
}

/* ---- Constructors, cost ---------------------------------------------------------------------- */

static ml_ref add(ml_graph *g, ml_op op, const ml_ref *sources, int count,
                  const ml_linear_scan *s) {
    const int64_t args[ARGS] = {s->axis, s->keys, s->values, s->reverse, s->after, s->dtype};
    return ml_graph_add(g, op, sources, count, args, ARGS, NULL);
}

ml_ref ml_linear_scan_new(ml_graph *g, const ml_ref *sources, const ml_linear_scan *s) {
    return add(g, ML_OP_LINEAR_SCAN, sources, LINEAR_SCAN_FIRST_PAIR + 2 * s->rank, s);
}

ml_ref ml_linear_scan_grad(ml_graph *g, const ml_ref *sources, const ml_linear_scan *s) {
    return add(g, ML_OP_LINEAR_SCAN_GRAD, sources,
               LINEAR_SCAN_FIRST_PAIR + 2 * s->rank + COTANGENTS, s);
}

/* At each position k v^T, q^T S, and w^T S and u times it; the gradient has two products for each.
 */
double linear_scan_flops(const ml_graph *g, ml_ref n) {
    ml_linear_scan s;
    ml_linear_scan_read(g, n, &s);
    bool grad = ml_graph_node(g, n)->op == ML_OP_LINEAR_SCAN_GRAD;
    double state =
        (double)ml_type_elements(ml_graph_type(g, ml_graph_source(g, n, LINEAR_SCAN_STATE)));
    return (grad ? 8 : 4) * (1 + s.rank) * state * (double)s.length;
}
