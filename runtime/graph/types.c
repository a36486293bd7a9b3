/* Checks and type inference: dtype rules, elementwise broadcasting, reductions, scans, DOT. */
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "runtime/graph/collectives.h"
#include "runtime/graph/infer.h"
#include "runtime/graph/op_interface.h"

const ml_type *infer_source(const infer *in, int i) {
    return ml_graph_type(in->g, in->sources[i]);
}

_Noreturn void infer_raise(const infer *in, const char *help, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    ml_fail(ML_INVALID, "%s", text);
    if (help) ml_help("%s", help);
    ml_error *error = ml_error_last();
    for (int i = 0; i < in->source_count && i < ML_ERROR_OPERANDS; i++)
        error->operands[error->operand_count++] = in->sources[i];
    ml_raise_last();
}

const char *infer_axes(const infer *in, const ml_type *t) {
    if (!t->rank) return "no axes";
    ml_text text = {.arena = ml_graph_arena(in->g)};
    for (int i = 0; i < t->rank; i++)
        ml_text_add(&text, "%s%s", i ? ", " : "", ml_axis_name(in->g, t->axis[i]));
    return text.text;
}

/* How messages call operand i. */
static const char *operand_name(const infer *in, int i) {
    static const char *const where[] = {"the test", "the first value", "the second value"};
    if (in->op == ML_OP_WHERE) return where[i];
    if (in->source_count == 1) return "the tensor";
    if (in->source_count == 2) return i ? "the right" : "the left";
    return ml_arena_format(ml_graph_arena(in->g), "tensor %d", i + 1);
}

/* An infinitive for "cannot ..."; NULL where it is made of the op's name. */
static const char *verb(ml_op op) {
    static const char *const verbs[ML_OP_COUNT] = {
        [ML_OP_ADD] = "add",
        [ML_OP_SUB] = "subtract",
        [ML_OP_MUL] = "multiply",
        [ML_OP_DIV] = "divide",
        [ML_OP_IDIV] = "divide",
        [ML_OP_MAXIMUM] = "take the maximum",
        [ML_OP_MINIMUM] = "take the minimum",
        [ML_OP_MOD] = "take the remainder",
        [ML_OP_POW] = "raise to a power",
        [ML_OP_SUM] = "sum over",
        [ML_OP_DOT] = "contract",
        [ML_OP_SORT] = "sort along",
    };
    ml_op_class op_class = ml_ops[op].op_class;
    if (verbs[op]) return verbs[op];
    if (ml_op_compares(op)) return "compare";
    return op_class == ML_CLASS_REDUCE || op_class == ML_CLASS_SCAN ? NULL : "combine";
}

/* "sum over", or "take the max over" for ops without a verb. */
static const char *axis_verb(const infer *in) {
    const char *text = verb(in->op);
    return text ? text
                : ml_arena_format(ml_graph_arena(in->g), "take the %s over", ml_ops[in->op].name);
}

int infer_find(const infer *in, int i, int64_t axis, const char *what, const char *whose) {
    const ml_type *t = infer_source(in, i);
    int at = ml_type_find(t, (ml_axis)axis);
    if (at >= 0) return at;
    const char *name = ml_axis_name(in->g, (ml_axis)axis), *known[ML_MAX_AXES];
    for (int k = 0; k < t->rank; k++) known[k] = ml_axis_name(in->g, t->axis[k]);
    const char *near = ml_suggest(name, known, t->rank);
    const char *help =
        ml_arena_format(ml_graph_arena(in->g), "%s%s%s%s%s",
                        t->rank ? "its axes are " : "it has no axes: it is a single number",
                        t->rank ? infer_axes(in, t) : "", near ? "; did you mean \"" : "",
                        near ? near : "", near ? "\"?" : "");
    infer_raise(in, help, "cannot %s \"%s\": %s has no such axis", what, name, whose);
}

void infer_append(const infer *in, ml_type *out, ml_axis axis, int64_t size) {
    const char *name = ml_axis_name(in->g, axis);
    if (ml_type_find(out, axis) >= 0)
        infer_raise(in, "rename one of them first", "%s would give a tensor with axis \"%s\" twice",
                    ml_ops[in->op].name, name);
    if (size < 1)
        infer_raise(in, NULL, "axis \"%s\" has size %lld: sizes are 1 or more", name,
                    (long long)size);
    if (out->rank == ML_MAX_AXES)
        infer_raise(in, "merge some of its axes first",
                    "%s would give a tensor with more than %d axes", ml_ops[in->op].name,
                    ML_MAX_AXES);
    if (size > ML_MAX_ELEMENTS / ml_type_elements(out))
        infer_raise(in, NULL, "%s would give a tensor with more than 2^57 elements",
                    ml_ops[in->op].name);
    out->axis[out->rank] = axis;
    out->size[out->rank++] = size;
}

/* ---- Dtypes ---------------------------------------------------------------------------------- */

static ml_dtype_kind kind_of(const infer *in, int i) {
    return ml_dtypes[infer_source(in, i)->dtype].kind;
}

static _Noreturn void raise_kind(const infer *in, int i, const char *wanted, const char *help) {
    infer_raise(in, help, "%s works on %s, not on %s", ml_ops[in->op].name, wanted,
                ml_dtypes[infer_source(in, i)->dtype].name);
}

void infer_float_only(const infer *in, int i) {
    if (kind_of(in, i) != ML_KIND_FLOAT) raise_kind(in, i, "floats", "cast it: x:cast(\"f32\")");
}

void infer_number_only(const infer *in, int i) {
    if (kind_of(in, i) == ML_KIND_BOOL)
        raise_kind(in, i, "numbers", "cast it: x:cast(\"f32\") gives 1 where true, 0 where false");
}

static void bool_only(const infer *in, int i) {
    if (kind_of(in, i) != ML_KIND_BOOL)
        raise_kind(in, i, "booleans", "compare it with something: m.ne(x, 0)");
}

void infer_dtype(const infer *in, int i, ml_dtype dtype, const char *whose) {
    const ml_type *t = infer_source(in, i);
    if (t->dtype == dtype) return;
    const char *help = "compare it with something: m.ne(x, 0)";
    if (dtype != ML_BOOL)
        help = ml_arena_format(ml_graph_arena(in->g), "cast it: x:cast(\"%s\")",
                               ml_dtypes[dtype].name);
    infer_raise(in, help, "%s of %s is %s, not %s", whose, ml_ops[in->op].name,
                ml_dtypes[dtype].name, ml_dtypes[t->dtype].name);
}

ml_dtype infer_promote(infer *in, int first, int last) {
    ml_dtype widest = infer_source(in, first)->dtype;
    for (int i = first + 1; i < last; i++) {
        ml_dtype dtype = infer_source(in, i)->dtype;
        if (dtype == widest) continue;
        if (kind_of(in, i) != ML_KIND_FLOAT || ml_dtypes[widest].kind != ML_KIND_FLOAT)
            infer_raise(in, "cast one: x:cast(\"f32\")",
                        "%s needs operands of one dtype: %s is %s, %s is %s", ml_ops[in->op].name,
                        operand_name(in, first), ml_dtypes[infer_source(in, first)->dtype].name,
                        operand_name(in, i), ml_dtypes[dtype].name);
        widest = ml_wider(widest, dtype);
    }
    for (int i = first; i < last; i++) {
        if (infer_source(in, i)->dtype == widest) continue;
        if (in->frozen) ml_raise(ML_INTERNAL, "operand %d is not promoted", i);
        in->sources[i] = ml_graph_add(in->g, ML_OP_CAST, &in->sources[i], 1, NULL, 0,
                                      &(ml_type){.dtype = widest});
    }
    return widest;
}

static ml_dtype given_dtype(const infer *in) {
    assert(in->given && in->given->dtype < ML_DTYPE_COUNT);
    return in->given->dtype;
}

static ml_dtype map_dtype(infer *in) {
    int count = in->source_count;
    switch (ml_ops[in->op].rule) {
    case ML_RULE_ARITH:
        for (int i = 0; i < count; i++) infer_number_only(in, i);
        return infer_promote(in, 0, count);
    case ML_RULE_FLOAT:
        for (int i = 0; i < count; i++)
            if (kind_of(in, i) != ML_KIND_FLOAT && kind_of(in, count - 1 - i) != ML_KIND_FLOAT)
                infer_float_only(in, i);
        return infer_promote(in, 0, count);
    case ML_RULE_TEST:
        if (in->op == ML_OP_IS_FINITE) infer_float_only(in, 0);
        if (in->op != ML_OP_EQ && in->op != ML_OP_NE)
            for (int i = 0; i < count; i++) infer_number_only(in, i);
        infer_promote(in, 0, count);
        return ML_BOOL;
    case ML_RULE_LOGIC:
        for (int i = 0; i < count; i++) bool_only(in, i);
        return ML_BOOL;
    case ML_RULE_SAME: return infer_source(in, 0)->dtype;
    case ML_RULE_OWN: break;
    }
    if (in->op == ML_OP_CAST) return given_dtype(in);
    assert(in->op == ML_OP_WHERE);
    infer_dtype(in, 0, ML_BOOL, "the test");
    return infer_promote(in, 1, 3);
}

/* ---- Elementwise ----------------------------------------------------------------------------- */

static bool covers(const ml_type *a, const ml_type *b) {
    for (int i = 0; i < b->rank; i++)
        if (ml_type_find(a, b->axis[i]) < 0) return false;
    return true;
}

/* Axes of `other` that `t` lacks, quoted. */
static const char *lacking(const infer *in, const ml_type *t, const ml_type *other) {
    ml_text text = {.arena = ml_graph_arena(in->g)};
    for (int i = 0; i < other->rank; i++)
        if (ml_type_find(t, other->axis[i]) < 0)
            ml_text_add(&text, "%s\"%s\"", text.length ? ", " : "",
                        ml_axis_name(in->g, other->axis[i]));
    return text.text;
}

static void check_sizes(const infer *in, int a, int b, const char *what, const char *help) {
    const ml_type *left = infer_source(in, a), *right = infer_source(in, b);
    for (int i = 0; i < left->rank; i++) {
        int at = ml_type_find(right, left->axis[i]);
        if (at >= 0 && left->size[i] != right->size[at])
            infer_raise(in, help, "cannot %s: \"%s\" is %lld on %s, %lld on %s", what,
                        ml_axis_name(in->g, left->axis[i]), (long long)left->size[i],
                        operand_name(in, a), (long long)right->size[at], operand_name(in, b));
    }
}

static bool share_axis(const ml_type *a, const ml_type *b) {
    for (int i = 0; i < a->rank; i++)
        if (ml_type_find(b, a->axis[i]) >= 0) return true;
    return false;
}

static _Noreturn void raise_mix(const infer *in) {
    for (int a = 0; a < in->source_count; a++)
        for (int b = a + 1; b < in->source_count; b++) {
            const ml_type *left = infer_source(in, a), *right = infer_source(in, b);
            if (covers(left, right) || covers(right, left)) continue;
            bool product = in->op == ML_OP_MUL && share_axis(left, right);
            infer_raise(in,
                        product ? "a:dot(b, \"axis\") sums products over an axis; elementwise "
                                  "operands broadcast only where one has every axis of the other"
                                : "elementwise operands broadcast only where one has every axis of "
                                  "the other: broadcast one first, or rename an axis",
                        "cannot %s: %s lacks %s, %s lacks %s", verb(in->op), operand_name(in, a),
                        lacking(in, left, right), operand_name(in, b), lacking(in, right, left));
        }
    infer_raise(in, "broadcast one of them first",
                "cannot %s: no operand has every axis of the others", verb(in->op));
}

/* RANDOM's axes are its own; its key has none, its indices have the same. */
static void infer_random(infer *in, ml_type *out) {
    infer_dtype(in, 0, ML_I64, "the key");
    if (infer_source(in, 0)->rank)
        infer_raise(in, NULL, "the key of random is a single number, not a tensor with axes %s",
                    infer_axes(in, infer_source(in, 0)));
    if (ml_dtypes[given_dtype(in)].kind != ML_KIND_FLOAT)
        infer_raise(in, "cast the result", "random gives floats, not %s",
                    ml_dtypes[given_dtype(in)].name);
    out->dtype = given_dtype(in);
    for (int i = 0; i < in->given->rank; i++)
        infer_append(in, out, in->given->axis[i], in->given->size[i]);
    if (in->source_count < 2) return;
    infer_dtype(in, 1, ML_I64, "the index");
    if (!ml_type_same_axes(infer_source(in, 1), out))
        ml_raise(ML_INTERNAL, "the indices of random have other axes than its result");
}

static void infer_map(infer *in, ml_type *out) {
    if (in->op == ML_OP_RANDOM) {
        infer_random(in, out);
        return;
    }
    ml_dtype dtype = map_dtype(in);
    for (int a = 0; a < in->source_count; a++)
        for (int b = a + 1; b < in->source_count; b++) check_sizes(in, a, b, verb(in->op), NULL);
    for (int a = 0; a < in->source_count; a++) {
        bool all = true;
        for (int b = 0; b < in->source_count && all; b++)
            all = covers(infer_source(in, a), infer_source(in, b));
        if (!all) continue;
        *out = *infer_source(in, a);
        out->dtype = dtype;
        return;
    }
    raise_mix(in);
}

/* ---- Leaves ---------------------------------------------------------------------------------- */

/* The type of a STATE or INPUT: that of its table, or of one rank's part where one is given. */
static void infer_held(const infer *in, const ml_type *held, ml_type *out) {
    *out = *held;
    if (!in->given || in->given->rank != held->rank || in->given->dtype != held->dtype) return;
    for (int i = 0; i < held->rank; i++)
        if (in->given->axis[i] != held->axis[i] || !ml_is_part(held->size[i], in->given->size[i]))
            return;
    *out = *in->given;
}

void infer_indexed(const infer *in, ml_axis axis, int64_t size) {
    if (size - 1 > INT32_MAX)
        infer_raise(in, "split it into two axes",
                    "axis \"%s\" has %lld elements: %s counts them in i32, which ends at %d",
                    ml_axis_name(in->g, axis), (long long)size, ml_ops[in->op].name, INT32_MAX);
}

static void check_mesh(const infer *in) {
    if (in->args[0] < 0 || in->args[1] < 1)
        ml_raise(ML_INTERNAL, "%s names no mesh axis", ml_ops[in->op].name);
}

static void infer_leaf(infer *in, ml_type *out) {
    switch ((ml_leaf_op)in->op) {
    case ML_OP_CONST: out->dtype = given_dtype(in); break;
    case ML_OP_IOTA:
        out->dtype = ML_I32;
        infer_indexed(in, (ml_axis)in->args[0], in->args[1]);
        infer_append(in, out, (ml_axis)in->args[0], in->args[1]);
        break;
    case ML_OP_STATE:
        if (in->args[0] < 0 || in->args[0] >= ml_graph_state_count(in->g))
            ml_raise(ML_INTERNAL, "there is no state %lld", (long long)in->args[0]);
        infer_held(in, &ml_graph_state(in->g, (uint32_t)in->args[0])->type, out);
        break;
    case ML_OP_INPUT:
        if (in->args[0] < 0 || in->args[0] >= ml_graph_input_count(in->g))
            ml_raise(ML_INTERNAL, "there is no input %lld", (long long)in->args[0]);
        infer_held(in, &ml_graph_input(in->g, (uint32_t)in->args[0])->type, out);
        break;
    case ML_OP_COORDINATE:
        check_mesh(in);
        out->dtype = ML_I32;
        break;
    case ML_OP_PARAM:
        out->dtype = given_dtype(in);
        for (int i = 0; i < in->given->rank; i++)
            infer_append(in, out, in->given->axis[i], in->given->size[i]);
    }
}

/* ---- Reductions, scans, products ------------------------------------------------------------- */

/* Order the reduced axes as in source 0, so that equal nodes have equal arguments. */
static void sort_axes(infer *in) {
    const ml_type *t = infer_source(in, 0);
    for (int i = 1; i < in->arg_count; i++)
        for (int j = i; j > 0; j--) {
            int before = ml_type_find(t, (ml_axis)in->args[j - 1]);
            int after = ml_type_find(t, (ml_axis)in->args[j]);
            if (before == after)
                infer_raise(in, NULL, "%s names axis \"%s\" twice", ml_ops[in->op].name,
                            ml_axis_name(in->g, (ml_axis)in->args[j]));
            if (before < after) break;
            if (in->frozen) ml_raise(ML_INTERNAL, "the reduced axes are not in order");
            int64_t swap = in->args[j];
            in->args[j] = in->args[j - 1];
            in->args[j - 1] = swap;
        }
}

static bool is_reduced(const infer *in, ml_axis axis) {
    for (int i = 0; i < in->arg_count; i++)
        if (in->args[i] == axis) return true;
    return false;
}

static void infer_reduce(infer *in, ml_type *out) {
    const ml_type *t = infer_source(in, 0);
    infer_number_only(in, 0);
    for (int i = 0; i < in->arg_count; i++)
        infer_find(in, 0, in->args[i], axis_verb(in), "the tensor");
    if (in->arg_count == 0) ml_raise(ML_INTERNAL, "%s names no axis", ml_ops[in->op].name);
    sort_axes(in);
    for (int i = 0; in->op == ML_OP_ARGMAX && i < t->rank; i++)
        if (is_reduced(in, t->axis[i])) infer_indexed(in, t->axis[i], t->size[i]);
    out->dtype = in->op == ML_OP_ARGMAX ? ML_I32 : t->dtype;
    for (int i = 0; i < t->rank; i++)
        if (!is_reduced(in, t->axis[i])) infer_append(in, out, t->axis[i], t->size[i]);
}

static void infer_scan(infer *in, ml_type *out) {
    const ml_type *t = infer_source(in, 0);
    infer_number_only(in, 0);
    int at = infer_find(in, 0, in->args[0], axis_verb(in), "the tensor");
    if (in->op != ML_OP_CUMSUM) infer_indexed(in, t->axis[at], t->size[at]);
    if (in->op != ML_OP_TOP_K) {
        *out = *t;
        return;
    }
    int64_t k = in->args[1];
    if (k < 1 || k > t->size[at])
        infer_raise(in, NULL, "cannot take the %lld largest over \"%s\": it has %lld elements",
                    (long long)k, ml_axis_name(in->g, t->axis[at]), (long long)t->size[at]);
    out->dtype = t->dtype;
    for (int i = 0; i < t->rank; i++)
        infer_append(in, out, i == at ? (ml_axis)in->args[2] : t->axis[i],
                     i == at ? k : t->size[i]);
}

static void check_reduced(const infer *in) {
    for (int i = 0; i < in->arg_count; i++) {
        int left = infer_find(in, 0, in->args[i], "contract", "the left");
        int right = infer_find(in, 1, in->args[i], "contract", "the right");
        int64_t left_size = infer_source(in, 0)->size[left];
        int64_t right_size = infer_source(in, 1)->size[right];
        if (left_size != right_size)
            infer_raise(in, NULL, "cannot contract \"%s\": %lld on the left, %lld on the right",
                        ml_axis_name(in->g, (ml_axis)in->args[i]), (long long)left_size,
                        (long long)right_size);
    }
}

/* Of a scaled product, which only passes make. */
static ml_dtype scaled_dtype(const infer *in) {
    const ml_type *scale = infer_source(in, 2);
    bool fits = scale->rank == 0 && scale->dtype == ML_F32 && in->given != NULL;
    for (int i = 0; i < 2; i++) {
        const ml_dtype dtype = infer_source(in, i)->dtype;
        fits = fits && ml_is_narrow(dtype) && ml_dtypes[dtype].bytes == 1;
    }
    if (!fits) ml_raise(ML_INTERNAL, "a scaled product takes floats of 8 bits and a number in f32");
    return in->given->dtype;
}

static void infer_dot(infer *in, ml_type *out) {
    check_reduced(in);
    for (int i = 0; i < 2; i++) infer_number_only(in, i);
    ml_dtype dtype = in->source_count == 3 ? scaled_dtype(in) : infer_promote(in, 0, 2);
    check_sizes(in, 0, 1, "contract",
                "an axis that both have and that is not contracted pairs them element by element");
    sort_axes(in);
    if (in->given && in->given->dtype != dtype) {
        if (ml_dtypes[dtype].kind != ML_KIND_FLOAT ||
            ml_dtypes[in->given->dtype].kind != ML_KIND_FLOAT)
            infer_raise(in, "cast the result", "dot of %s cannot give %s", ml_dtypes[dtype].name,
                        ml_dtypes[in->given->dtype].name);
        dtype = in->given->dtype;
    }
    const ml_type *a = infer_source(in, 0), *b = infer_source(in, 1);
    out->dtype = dtype;
    for (int batch = 1; batch >= 0; batch--)
        for (int i = 0; i < a->rank; i++)
            if (!is_reduced(in, a->axis[i]) && (ml_type_find(b, a->axis[i]) >= 0) == batch)
                infer_append(in, out, a->axis[i], a->size[i]);
    for (int i = 0; i < b->rank; i++)
        if (!is_reduced(in, b->axis[i]) && ml_type_find(a, b->axis[i]) < 0)
            infer_append(in, out, b->axis[i], b->size[i]);
}

/* The outermost axis is the one that is gathered, scattered or exchanged. */
static void infer_collective(infer *in, ml_type *out) {
    const char *name = ml_ops[in->op].name;
    int64_t ranks = in->args[1];
    check_mesh(in);
    *out = *infer_source(in, 0);
    if (in->arg_count == 3 && (in->args[2] < 0 || in->args[2] >= ML_COMBINE_COUNT))
        ml_raise(ML_INTERNAL, "%s combines in no known way", name);
    ml_collective_result result = ml_collectives[ml_collective_of(in->op)].result;
    if (result == ML_RESULT_SAME) return;
    if (!out->rank) ml_raise(ML_INTERNAL, "%s of a tensor with no axes", name);
    if (result == ML_RESULT_GATHERED) {
        if (out->size[0] > ML_MAX_ELEMENTS / ranks / ml_type_elements(out) * out->size[0])
            infer_raise(in, NULL, "%s would give a tensor with more than 2^57 elements", name);
        out->size[0] *= ranks;
        return;
    }
    if (result == ML_RESULT_SCATTERED ? out->size[0] % ranks != 0 : out->size[0] != ranks)
        ml_raise(ML_INTERNAL, "%s over %lld ranks of an outermost axis of size %lld", name,
                 (long long)ranks, (long long)out->size[0]);
    if (result == ML_RESULT_SCATTERED) out->size[0] /= ranks;
}

void infer_out(infer *in, ml_type *out) {
    const ml_graph *g = in->g;
    ml_ref of = in->sources[0];
    ml_op op = ml_graph_node(g, of)->op;
    int64_t output = in->args[0];
    if (output < 1 || output >= ml_op_outputs(g, of))
        ml_raise(ML_INTERNAL, "%s has no output %lld", ml_ops[op].name, (long long)output);
    *out = *ml_graph_type(g, of);
    if (ml_ops[op].op_class == ML_CLASS_SCAN) /* the indices of its values */
        out->dtype = ML_I32;
    else
        ml_op_interface_of(op)->output_type(g, of, (int)output, out);
}

static void infer_routine(infer *in, ml_type *out) {
    if (in->op == ML_OP_SCATTER_ADD)
        infer_scatter(in, out);
    else if (in->op == ML_OP_WRITE_ROWS)
        infer_write_rows(in, out);
    else
        ml_op_interface_of(in->op)->infer(in, out);
}

void infer_type(infer *in, ml_type *out) {
    switch (ml_ops[in->op].op_class) {
    case ML_CLASS_LEAF: infer_leaf(in, out); break;
    case ML_CLASS_MAP: infer_map(in, out); break;
    case ML_CLASS_MOVE: infer_move(in, out); break;
    case ML_CLASS_REDUCE: infer_reduce(in, out); break;
    case ML_CLASS_SCAN: infer_scan(in, out); break;
    case ML_CLASS_CONTRACT: infer_dot(in, out); break;
    case ML_CLASS_ROUTINE: infer_routine(in, out); break;
    case ML_CLASS_COLLECTIVE: infer_collective(in, out); break;
    }
}
