/* Simplification of elementwise ops. Every rule keeps the value up to rounding, also for
 * infinities and NaN: x * 0 and x - x stay for floats. */
#include "runtime/passes/passes.h"
#include "runtime/passes/simplify.h"

#include <math.h>
#include <string.h>

/* The node a rule looks at. */
typedef struct {
    simplifier *s;
    ml_graph *g;
    ml_ref n, a, b, c; /* the node and its operands */
    ml_op op;
    ml_type type;
    bool is_float; /* of the operands */
    bool a_fixed, b_fixed;
    reference_cell a_value, b_value; /* where fixed */
} subject;

static ml_op op_of(const subject *x, ml_ref n) {
    return ml_graph_node(x->g, n)->op;
}
static ml_ref source(const subject *x, ml_ref n, int i) {
    return ml_graph_source(x->g, n, i);
}

static bool is_number(const subject *x, bool fixed, reference_cell value, double number) {
    if (!fixed) return false;
    return x->is_float ? value.number == number : (double)value.integer == number;
}
static bool a_is(const subject *x, double number) {
    return is_number(x, x->a_fixed, x->a_value, number);
}
static bool b_is(const subject *x, double number) {
    return is_number(x, x->b_fixed, x->b_value, number);
}

static ml_ref as_result(const subject *x, ml_ref n) {
    return simplify_fit(x->s, n, &x->type);
}
static ml_ref map1(const subject *x, ml_op op, ml_ref a) {
    return as_result(x, simplify_map1(x->s, op, a));
}
static ml_ref map2(const subject *x, ml_op op, ml_ref a, ml_ref b) {
    return as_result(x, simplify_map2(x->s, op, a, b));
}
/* As a constant of this dtype holds it: bf16 ones keep f32's precision (ml_const). */
static reference_cell constant(ml_dtype dtype, reference_cell value) {
    return reference_store(ml_is_narrow(dtype) ? ml_compute_dtype(dtype) : dtype, value, true);
}
/* A number of the operands' dtype. */
static ml_ref scalar(const subject *x, double value) {
    ml_dtype dtype = ml_graph_type(x->g, x->a)->dtype;
    reference_cell cell = {.number = value};
    if (!x->is_float) cell.integer = (int64_t)value;
    return simplify_full(x->s, &(ml_type){.dtype = dtype}, constant(dtype, cell));
}
static ml_ref scalar_cell(const subject *x, reference_cell value) {
    return simplify_full(x->s, &(ml_type){.dtype = x->type.dtype}, value);
}

/* ---- Broadcasts and constants ---------------------------------------------------------------- */

static ml_ref fold(const subject *x) {
    int count = ml_graph_node(x->g, x->n)->source_count;
    reference_cell values[3];
    for (int i = 0; i < count; i++)
        if (!simplify_constant(x->g, source(x, x->n, i), &values[i])) return 0;
    ml_dtype from = ml_graph_type(x->g, x->a)->dtype;
    reference_cell value = reference_map(x->op, x->type.dtype, from, values);
    return simplify_full(x->s, &x->type, constant(x->type.dtype, value));
}

/* Whether an elementwise op over these operands would have exactly the type's axes and order. */
static bool gives_type(const subject *x, const ml_ref *sources, int count) {
    for (int i = 0; i < count; i++) {
        ml_type type = *ml_graph_type(x->g, sources[i]);
        type.dtype = x->type.dtype;
        if (type.rank == x->type.rank) return ml_type_equal(&type, &x->type);
    }
    return false;
}

static bool covers_all(const subject *x, ml_ref n, const ml_ref *sources, int count) {
    const ml_type *type = ml_graph_type(x->g, n);
    for (int i = 0; i < count; i++) {
        const ml_type *other = ml_graph_type(x->g, sources[i]);
        for (int k = 0; k < other->rank; k++)
            if (ml_type_find(type, other->axis[k]) < 0) return false;
    }
    return true;
}

/* Operands broadcast by name: an explicit BROADCAST is not needed where another operand has all
 * the axes, and where none has, the op can be done before broadcasting. */
static ml_ref without_broadcasts(const subject *x) {
    int count = ml_graph_node(x->g, x->n)->source_count;
    ml_ref sources[3];
    bool changed = false;
    for (int i = 0; i < count; i++) sources[i] = source(x, x->n, i);
    for (int i = 0; i < count; i++) {
        ml_ref before = sources[i];
        if (op_of(x, before) != ML_OP_BROADCAST) continue;
        sources[i] = source(x, before, 0);
        if (gives_type(x, sources, count))
            changed = true;
        else
            sources[i] = before;
    }
    if (changed) return simplify_make(x->s, x->op, sources, count, NULL, 0, &x->type);
    for (int i = 0; i < count; i++)
        if (op_of(x, sources[i]) == ML_OP_BROADCAST)
            sources[i] = source(x, sources[i], 0);
        else if (ml_graph_type(x->g, sources[i])->rank == x->type.rank)
            return 0;
    for (int i = 0; i < count; i++)
        if (covers_all(x, sources[i], sources, count)) {
            ml_ref small = simplify_make(x->s, x->op, sources, count, NULL, 0, &x->type);
            return as_result(x, small);
        }
    return 0;
}

/* ---- Arithmetic ------------------------------------------------------------------------------ */

static ml_ref negation(const subject *x) {
    reference_cell c;
    if (op_of(x, x->a) == ML_OP_NEG) return source(x, x->a, 0);
    if (op_of(x, x->a) == ML_OP_SUB)
        return map2(x, ML_OP_SUB, source(x, x->a, 1), source(x, x->a, 0));
    if (op_of(x, x->a) == ML_OP_MUL && x->is_float &&
        simplify_constant(x->g, source(x, x->a, 1), &c)) {
        c.number = -c.number;
        return map2(x, ML_OP_MUL, source(x, x->a, 0), scalar_cell(x, c));
    }
    return 0;
}

/* PAD + PAD whose contents are neighbours: one PAD of their CONCAT. (Gradients of slices.) */
static ml_ref join_pads(const subject *x) {
    if (op_of(x, x->a) != ML_OP_PAD || op_of(x, x->b) != ML_OP_PAD) return 0;
    for (int i = 0; i < 2; i++) /* neither may be broadcast */
        if (ml_graph_type(x->g, i ? x->b : x->a)->rank != x->type.rank) return 0;
    int64_t left[3], right[3];
    memcpy(left, ml_graph_args(x->g, x->a), sizeof left);
    memcpy(right, ml_graph_args(x->g, x->b), sizeof right);
    if (left[0] != right[0]) return 0;
    ml_axis axis = (ml_axis)left[0];
    int64_t total = ml_type_size(&x->type, axis);
    ml_ref parts[2] = {source(x, x->a, 0), source(x, x->b, 0)};
    int64_t args[3] = {axis, left[1], right[2]};
    if (total - left[2] != right[1]) {
        if (total - right[2] != left[1]) return 0;
        parts[0] = source(x, x->b, 0), parts[1] = source(x, x->a, 0);
        args[1] = right[1], args[2] = left[2];
    }
    ml_ref joined = simplify_make(x->s, ML_OP_CONCAT, parts, 2, args, 1, NULL);
    return as_result(x, simplify_make(x->s, ML_OP_PAD, &joined, 1, args, 3, NULL));
}

static ml_ref addition(const subject *x) {
    if (b_is(x, 0)) return as_result(x, x->a);
    if (a_is(x, 0)) return as_result(x, x->b);
    if (op_of(x, x->b) == ML_OP_NEG) return map2(x, ML_OP_SUB, x->a, source(x, x->b, 0));
    if (op_of(x, x->a) == ML_OP_NEG) return map2(x, ML_OP_SUB, x->b, source(x, x->a, 0));
    return join_pads(x);
}

static ml_ref subtraction(const subject *x) {
    if (b_is(x, 0)) return as_result(x, x->a);
    if (a_is(x, 0)) return map1(x, ML_OP_NEG, as_result(x, x->b));
    if (op_of(x, x->b) == ML_OP_NEG) return map2(x, ML_OP_ADD, x->a, source(x, x->b, 0));
    if (x->a == x->b && !x->is_float) return simplify_full(x->s, &x->type, (reference_cell){0});
    return 0;
}

/* x * c1 * c2 where the product of the constants neither overflows nor vanishes. */
static ml_ref scale_twice(const subject *x) {
    reference_cell c;
    if (!x->b_fixed || op_of(x, x->a) != ML_OP_MUL || !x->is_float ||
        !simplify_constant(x->g, source(x, x->a, 1), &c))
        return 0;
    c.number *= x->b_value.number;
    c = constant(x->type.dtype, c);
    if (!isfinite(c.number) || fabs(c.number) < 0x1p-120) return 0;
    return map2(x, ML_OP_MUL, source(x, x->a, 0), scalar_cell(x, c));
}

static ml_ref multiplication(const subject *x) {
    if (x->a_fixed) /* constants to the right (both would have been folded) */
        return map2(x, ML_OP_MUL, x->b, scalar_cell(x, x->a_value));
    if (b_is(x, 1)) return as_result(x, x->a);
    if (b_is(x, -1)) return map1(x, ML_OP_NEG, as_result(x, x->a));
    if (b_is(x, 0) && !x->is_float) return simplify_full(x->s, &x->type, (reference_cell){0});
    bool a_negated = op_of(x, x->a) == ML_OP_NEG, b_negated = op_of(x, x->b) == ML_OP_NEG;
    if (a_negated && b_negated) return map2(x, ML_OP_MUL, source(x, x->a, 0), source(x, x->b, 0));
    if (a_negated && x->b_fixed && x->is_float) {
        reference_cell c = {.number = -x->b_value.number};
        return map2(x, ML_OP_MUL, source(x, x->a, 0), scalar_cell(x, c));
    }
    return scale_twice(x);
}

/* Divisors that serve many elements are inverted once. */
enum { SHARED_DIVISOR = 16 };
static ml_ref shared_division(const subject *x) {
    const ml_type *a = ml_graph_type(x->g, x->a), *b = ml_graph_type(x->g, x->b);
    if (x->b_fixed || a->dtype == ML_F64) return 0;
    if (ml_type_elements(a) / ml_type_elements(b) < SHARED_DIVISOR) return 0;
    return map2(x, ML_OP_MUL, x->a, simplify_map2(x->s, ML_OP_DIV, scalar(x, 1), x->b));
}

static ml_ref division(const subject *x) {
    if (b_is(x, 1)) return as_result(x, x->a);
    if (b_is(x, -1)) return map1(x, ML_OP_NEG, as_result(x, x->a));
    if (x->b_fixed && x->b_value.number != 0) { /* by a power of two: the reciprocal is exact */
        int exponent;
        double inverse = 1 / x->b_value.number;
        if (fabs(frexp(x->b_value.number, &exponent)) == 0.5 && exponent > -120 && exponent < 120)
            return map2(x, ML_OP_MUL, x->a, scalar(x, inverse));
    }
    if (x->a_fixed && op_of(x, x->b) == ML_OP_SQRT) {
        ml_ref inverse = simplify_map1(x->s, ML_OP_RSQRT, source(x, x->b, 0));
        return map2(x, ML_OP_MUL, inverse, scalar_cell(x, x->a_value));
    }
    return shared_division(x);
}

static ml_ref power(const subject *x) {
    if (!x->b_fixed) return 0;
    ml_ref a = as_result(x, x->a);
    ml_ref square = fabs(x->b_value.number) >= 2 ? map2(x, ML_OP_MUL, a, a) : 0;
    double p = x->b_value.number;
    if (p == 0) return simplify_full(x->s, &x->type, (reference_cell){.number = 1});
    if (p == 1) return a;
    if (p == 2) return square;
    if (p == 3) return map2(x, ML_OP_MUL, square, a);
    if (p == 4) return map2(x, ML_OP_MUL, square, square);
    if (p == -1) return map2(x, ML_OP_DIV, scalar(x, 1), a);
    if (p == -2) return map2(x, ML_OP_DIV, scalar(x, 1), square);
    if (p == 0.5) return map1(x, ML_OP_SQRT, a);
    if (p == -0.5) return map1(x, ML_OP_RSQRT, a);
    return 0;
}

/* ---- Tests and casts ------------------------------------------------------------------------- */

static ml_ref logic(const subject *x) {
    bool is_and = x->op == ML_OP_AND;
    if (x->a == x->b) return as_result(x, x->a);
    if (x->a_fixed) return as_result(x, (x->a_value.integer != 0) == is_and ? x->b : x->a);
    if (x->b_fixed) return as_result(x, (x->b_value.integer != 0) == is_and ? x->a : x->b);
    return 0;
}

static ml_ref choice(const subject *x) {
    if (x->a_fixed) return as_result(x, x->a_value.integer ? x->b : x->c);
    if (x->b == x->c) return as_result(x, x->b);
    if (op_of(x, x->a) == ML_OP_NOT) {
        ml_ref swapped[3] = {source(x, x->a, 0), x->c, x->b};
        return as_result(x, simplify_make(x->s, ML_OP_WHERE, swapped, 3, NULL, 0, NULL));
    }
    return 0;
}

static ml_ref conversion(const subject *x) {
    if (ml_graph_type(x->g, x->a)->dtype == x->type.dtype) return x->a;
    if (op_of(x, x->a) != ML_OP_CAST) return 0;
    ml_ref first = source(x, x->a, 0);
    ml_dtype from = ml_graph_type(x->g, first)->dtype, middle = ml_graph_type(x->g, x->a)->dtype;
    return ml_dtype_holds(middle, from) ? simplify_cast(x->s, first, x->type.dtype) : 0;
}

static ml_ref extreme(const subject *x) {
    return x->a == x->b ? x->a : 0;
}

static ml_ref inversion(const subject *x) {
    return op_of(x, x->a) == ML_OP_NOT ? source(x, x->a, 0) : 0;
}

static ml_ref operand(const subject *x) {
    return x->a;
}

static ml_ref algebra(const subject *x) {
    static ml_ref (*const rules[ML_OP_COUNT])(const subject *) = {
        [ML_OP_NEG] = negation,       [ML_OP_ADD] = addition,          [ML_OP_SUB] = subtraction,
        [ML_OP_MUL] = multiplication, [ML_OP_DIV] = division,          [ML_OP_POW] = power,
        [ML_OP_MAXIMUM] = extreme,    [ML_OP_MINIMUM] = extreme,       [ML_OP_AND] = logic,
        [ML_OP_OR] = logic,           [ML_OP_NOT] = inversion,         [ML_OP_WHERE] = choice,
        [ML_OP_CAST] = conversion,    [ML_OP_STOP_GRADIENT] = operand,
    };
    return rules[x->op] ? rules[x->op](x) : 0;
}

ml_ref simplify_map(simplifier *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->graph, n);
    if (node->op == ML_OP_RANDOM) return 0;
    subject x = {.s = s, .g = s->graph, .n = n, .op = node->op};
    x.type = *ml_graph_type(x.g, n);
    x.a = source(&x, n, 0);
    x.b = node->source_count > 1 ? source(&x, n, 1) : 0;
    x.c = node->source_count > 2 ? source(&x, n, 2) : 0;
    x.is_float = ml_dtypes[ml_graph_type(x.g, x.a)->dtype].kind == ML_KIND_FLOAT;
    x.a_fixed = simplify_constant(x.g, x.a, &x.a_value);
    x.b_fixed = x.b && simplify_constant(x.g, x.b, &x.b_value);
    ml_ref made = fold(&x);
    if (!made) made = algebra(&x);
    if (!made) made = without_broadcasts(&x);
    return made;
}
