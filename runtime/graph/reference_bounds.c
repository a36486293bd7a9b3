/* How far rounding may take a program's values from those that the reference interpreter computes
 * in float64 (reference.h): a bound for each element, carried from operation to operation.
 *
 * An elementwise op is evaluated at the ends of its operands' intervals; movements move bounds as
 * they move elements; a sum's bounds add up, and its own roundings follow from its terms'
 * magnitudes. Each op then adds what rounding to its dtype, flushing of subnormal numbers and
 * overflow may do. A bound is infinite where any value is possible: a quotient by what may be 0, a
 * choice that rounding decides between values that are not known to be finite. */
#include "runtime/graph/reference.h"

#include <math.h>
#include <string.h>

typedef struct {
    reference_run *run;
    const bool *unrounded;   /* by input */
    reference_value *bounds; /* by node: f64 cells */
} bounds_run;

/* Half a unit in the last place, relative. */
static double unit_of(ml_dtype dtype) {
    return ldexp(1, -ml_dtypes[dtype].digits);
}

/* Roundings of one elementwise op, in half units of the last place. GPUs divide and take roots to
 * two units; functions are good to some units, or to 1e-6 where the result is rounded to bf16. */
static double roundings_of(ml_op op, ml_dtype dtype, ml_dtype from) {
    if (op == ML_OP_CAST) {
        bool widens = ml_is_float(from) && ml_dtypes[dtype].digits >= ml_dtypes[from].digits;
        return dtype == ML_F64 || (widens && dtype != from) ? 0 : 1;
    }
    if (ml_op_is(op, ML_EXACT)) return 0;
    if (ml_op_is(op, ML_ROUNDS_ONCE)) return 1;
    return ml_ops[op].flops < 8 ? 4 : dtype == ML_F64 ? 8 : 40;
}

/* With what an op's own rounding adds to the bound of its result. */
static double rounded(ml_dtype dtype, double roundings, double value, double bound) {
    if (ml_dtypes[dtype].kind != ML_KIND_FLOAT || !isfinite(value)) return bound;
    if (fabs(value) + bound > ml_dtypes[dtype].largest) return INFINITY;
    if (roundings == 0) return bound;
    return bound + roundings * unit_of(dtype) * (fabs(value) + bound) + ml_dtypes[dtype].least;
}

/* ---- Elementwise ops ------------------------------------------------------------------------- */

/* An operand's value at one end of its interval. */
static reference_cell end_of(ml_dtype dtype, reference_cell x, double bound, bool upper) {
    if (ml_dtypes[dtype].kind == ML_KIND_FLOAT)
        x.number += upper ? bound : -bound;
    else if (dtype == ML_BOOL)
        x.integer = bound > 0 ? upper : x.integer;
    else if (bound < 0x1p62)
        x.integer = (int64_t)((uint64_t)x.integer +
                              (uint64_t)(int64_t)(upper ? ceil(bound) : -ceil(bound)));
    return x;
}

static double distance(ml_dtype dtype, reference_cell a, reference_cell b) {
    if (ml_dtypes[dtype].kind != ML_KIND_FLOAT) return fabs((double)a.integer - (double)b.integer);
    if (a.number == b.number || (isnan(a.number) && isnan(b.number))) return 0;
    double d = fabs(a.number - b.number);
    return isnan(d) ? INFINITY : d;
}

/* The operands of one element. */
typedef struct {
    ml_op op;
    ml_dtype dtype;   /* of the result */
    ml_dtype from[3]; /* of the operands */
    int count;
    reference_cell x[3], y;
    double bound[3];
} element;

static double number_of(const element *e, int i) {
    bool is_float = ml_dtypes[e->from[i]].kind == ML_KIND_FLOAT;
    return is_float ? e->x[i].number : (double)e->x[i].integer;
}

/* The furthest that the result at an end of the operands' intervals is from that in their middle:
 * for what is monotonous in each operand. */
static double at_ends(const element *e) {
    double most = 0;
    for (int corner = 0; corner < 1 << e->count; corner++) {
        reference_cell x[3];
        for (int i = 0; i < e->count; i++)
            x[i] = end_of(e->from[i], e->x[i], e->bound[i], corner >> i & 1);
        reference_cell y = reference_map(e->op, e->dtype, e->from[0], x);
        most = fmax(most, distance(e->dtype, y, e->y));
    }
    return most;
}

static double chosen(const element *e) {
    double most = e->bound[e->x[0].integer ? 1 : 2];
    for (int i = 1; i < 3 && e->bound[0] > 0; i++)
        most = fmax(most, distance(e->dtype, e->x[i], e->y) + e->bound[i]);
    return most;
}

/* a - b * (a // b) jumps where a // b does. */
static double of_remainder(const element *e) {
    element quotient = *e;
    quotient.op = ML_OP_IDIV;
    quotient.y = reference_map(ML_OP_IDIV, e->dtype, e->from[0], e->x);
    bool jumps = at_ends(&quotient) > 0;
    double times = ml_dtypes[e->dtype].kind == ML_KIND_FLOAT ? fabs(quotient.y.number)
                                                             : fabs((double)quotient.y.integer);
    return jumps ? fabs(number_of(e, 1)) + e->bound[1] : e->bound[0] + times * e->bound[1];
}

static double propagated(const element *e) {
    bool any = false, unknown = false;
    for (int i = 0; i < e->count; i++) {
        any = any || e->bound[i] > 0;
        unknown = unknown || isinf(e->bound[i]);
    }
    if (!any) return 0;
    if (e->op == ML_OP_WHERE) return chosen(e);
    if (e->op == ML_OP_EQ || e->op == ML_OP_NE)
        return fabs(number_of(e, 0) - number_of(e, 1)) <= e->bound[0] + e->bound[1];
    if (e->op == ML_OP_RANDOM) return 1;
    if (e->dtype == ML_BOOL && unknown) return 1;
    if (unknown) return INFINITY;
    if (e->op == ML_OP_ABS) return e->bound[0];
    if (e->op == ML_OP_SIN || e->op == ML_OP_COS) return fmin(e->bound[0], 2);
    if (e->op == ML_OP_MOD) return of_remainder(e);
    if (e->op == ML_OP_DIV || e->op == ML_OP_IDIV)
        return fabs(number_of(e, 1)) <= e->bound[1] ? INFINITY : at_ends(e);
    if (e->op == ML_OP_POW && e->bound[0] > 0 && number_of(e, 0) <= e->bound[0]) return INFINITY;
    return at_ends(e);
}

/* ---- By node --------------------------------------------------------------------------------- */

static reference_value *source_of(const bounds_run *b, ml_ref node, int i) {
    return &b->run->values[ml_graph_source(b->run->graph, node, i)];
}

static const reference_value *bounds_of(const bounds_run *b, ml_ref node, int i) {
    return &b->bounds[ml_graph_source(b->run->graph, node, i)];
}

static double largest_bound(const reference_value *bounds) {
    double most = 0;
    for (int64_t i = 0; i < ml_type_elements(&bounds->type); i++)
        most = fmax(most, bounds->cells[i].number);
    return most;
}

static void fill(reference_value *out, double value) {
    for (int64_t i = 0; i < ml_type_elements(&out->type); i++) out->cells[i].number = value;
}

/* An input of a narrow float that a kernel may have read before it was rounded, and constants of
 * one, which hold f32's digits. */
static void leaf(const bounds_run *b, ml_ref node, const reference_value *y, reference_value *out) {
    const ml_graph *g = b->run->graph;
    bool input = ml_graph_node(g, node)->op == ML_OP_INPUT;
    if (!ml_is_narrow(y->type.dtype) || (input && !b->unrounded[ml_graph_args(g, node)[0]])) return;
    for (int64_t i = 0; i < ml_type_elements(&y->type); i++)
        if (isfinite(y->cells[i].number))
            out->cells[i].number = unit_of(y->type.dtype) * fabs(y->cells[i].number);
}

static void elementwise(const bounds_run *b, ml_ref node, const reference_value *y,
                        reference_value *out) {
    const ml_graph *g = b->run->graph;
    element e = {.op = ml_graph_node(g, node)->op, .dtype = y->type.dtype};
    e.count = ml_graph_node(g, node)->source_count;
    reference_walk w = reference_walk_over(&y->type);
    for (int i = 0; i < e.count; i++) {
        reference_walk_follow(&w, i, &y->type, &source_of(b, node, i)->type);
        e.from[i] = source_of(b, node, i)->type.dtype;
    }
    double roundings = roundings_of(e.op, e.dtype, e.from[0]);
    int64_t at = 0;
    do {
        for (int i = 0; i < e.count; i++) {
            e.x[i] = source_of(b, node, i)->cells[w.offset[i]];
            e.bound[i] = bounds_of(b, node, i)->cells[w.offset[i]].number;
        }
        e.y = y->cells[at];
        double value = reference_is_float(&y->type) ? e.y.number : 0;
        out->cells[at++].number = rounded(e.dtype, roundings, value, propagated(&e));
    } while (reference_walk_step(&w));
}

/* The op with `cells`, which are f64, in place of those of the sources first .. last-1. */
static void evaluate_on(const bounds_run *b, ml_ref node, int first, int last,
                        reference_cell *const *cells, reference_value *out) {
    reference_value *saved = ML_NEW_ARRAY(b->run->scratch, reference_value, last);
    for (int i = first; i < last; i++) saved[i] = *source_of(b, node, i);
    for (int i = first; i < last; i++) {
        source_of(b, node, i)->cells = cells[i];
        source_of(b, node, i)->type.dtype = ML_F64;
    }
    reference_evaluate(b->run, node, out);
    for (int i = first; i < last; i++) *source_of(b, node, i) = saved[i];
}

/* Bounds move as elements do; where an index is not sure, nothing is. */
static void movement(const bounds_run *b, ml_ref node, reference_value *out) {
    const ml_graph *g = b->run->graph;
    const bool writes = ml_graph_node(g, node)->op == ML_OP_WRITE_ROWS;
    const bool gathers = ml_graph_node(g, node)->op == ML_OP_GATHER;
    int count = gathers ? 1 : ml_graph_node(g, node)->source_count;
    reference_cell **cells = ML_NEW_ARRAY(b->run->scratch, reference_cell *, count);
    for (int i = 0; i < count; i++) cells[i] = bounds_of(b, node, i)->cells;
    if (writes) cells[1] = source_of(b, node, 1)->cells; /* the index */
    if ((gathers || writes) && largest_bound(bounds_of(b, node, 1)) > 0)
        fill(out, INFINITY);
    else
        evaluate_on(b, node, 0, count, cells, out);
}

/* The operands whose elements, or products, an op adds up: sources first .. last-1. False for other
 * ops. */
static bool summed_sources(ml_op op, int *first, int *last) {
    *first = ml_ops[op].linear == ML_LINEAR_B;
    *last = *first + 1 + (ml_ops[op].linear == ML_LINEAR_EACH);
    return ml_op_is(op, ML_SUMS);
}

/* Of the sum of all terms' magnitudes: what the order of additions may make. Kernels add up long
 * sums in parts. */
static double order_tolerance(ml_dtype dtype, double terms) {
    bool wide = dtype == ML_F64;
    return fmin((terms + 2) * unit_of(wide ? ML_F64 : ML_F32), wide ? 2e-11 : 1e-5);
}

/* The sum's terms with magnitudes as large as they may be (with their bounds), or as they are. */
static void sum_magnitudes(const bounds_run *b, ml_ref node, bool most, reference_value *out) {
    reference_cell *cells[3];
    int first, last;
    summed_sources(ml_graph_node(b->run->graph, node)->op, &first, &last);
    for (int i = first; i < last; i++) {
        const reference_value *x = source_of(b, node, i), *bound = bounds_of(b, node, i);
        int64_t count = ml_type_elements(&x->type);
        bool is_float = reference_is_float(&x->type);
        cells[i] = ML_NEW_ARRAY(b->run->scratch, reference_cell, count);
        for (int64_t k = 0; k < count; k++) {
            double value = is_float ? x->cells[k].number : (double)x->cells[k].integer;
            cells[i][k].number = fabs(value) + (most ? bound->cells[k].number : 0);
        }
    }
    evaluate_on(b, node, first, last, cells, out);
}

static void sums(const bounds_run *b, ml_ref node, const reference_value *y, reference_value *out) {
    int64_t count = ml_type_elements(&y->type);
    reference_value plain = {.type = out->type};
    plain.cells = ML_NEW_ARRAY(b->run->scratch, reference_cell, count);
    int first, last;
    summed_sources(ml_graph_node(b->run->graph, node)->op, &first, &last);
    double terms = (double)ml_type_elements(&source_of(b, node, first)->type);
    double order = order_tolerance(y->type.dtype, terms), bound = 0;
    for (int i = first; i < last; i++) bound += largest_bound(bounds_of(b, node, i));
    sum_magnitudes(b, node, true, out);
    if (bound > 0) sum_magnitudes(b, node, false, &plain);
    for (int64_t i = 0; i < count; i++) {
        double most = out->cells[i].number, own = bound > 0 ? most - plain.cells[i].number : 0;
        bool is_float = reference_is_float(&y->type);
        if (is_float && isfinite(y->cells[i].number) && most > ml_dtypes[y->type.dtype].largest)
            own = INFINITY;
        else if (is_float)
            own = rounded(y->type.dtype, 1, y->cells[i].number, own + order * most);
        out->cells[i].number = isnan(own) ? 0 : own; /* of what is infinite by definition */
    }
}

/* Rows in which more than one element may be the largest. */
static void argmax(const bounds_run *b, ml_ref node, const reference_value *y,
                   reference_value *out) {
    const reference_value *x = source_of(b, node, 0);
    double apart = 2 * largest_bound(bounds_of(b, node, 0));
    reference_value best = {.type = y->type};
    best.cells = ML_NEW_ARRAY(b->run->scratch, reference_cell, ml_type_elements(&y->type));
    if (apart == 0 || !reference_is_float(&x->type)) return;
    reference_reduce(ML_OP_MAX, x, &best);
    reference_walk w = reference_walk_over(&x->type);
    reference_walk_follow(&w, 0, &x->type, &x->type);
    reference_walk_follow(&w, 1, &x->type, &y->type);
    do {
        double less = best.cells[w.offset[1]].number - x->cells[w.offset[0]].number;
        if (!(less > apart)) out->cells[w.offset[1]].number++;
    } while (reference_walk_step(&w));
    for (int64_t i = 0; i < ml_type_elements(&y->type); i++)
        out->cells[i].number = out->cells[i].number > 1 ? INFINITY : 0;
}

/* What is sorted moves no further than the worst bound; its indices may be any where there is one.
 */
static void sorted(const bounds_run *b, ml_ref of, const reference_value *y, reference_value *out) {
    double bound = largest_bound(bounds_of(b, of, 0));
    fill(out, reference_is_float(&y->type) ? bound : bound > 0 ? INFINITY : 0);
}

static void bounds_compute(const bounds_run *b, ml_ref node, const reference_value *y,
                           reference_value *out) {
    const ml_graph *g = b->run->graph;
    ml_op op = ml_graph_node(g, node)->op;
    ml_ref of = op == ML_OP_OUT ? ml_graph_source(g, node, 0) : node;
    int first, last;
    ml_op producer = ml_graph_node(g, of)->op;
    if (ml_ops[op].op_class == ML_CLASS_LEAF)
        leaf(b, node, y, out);
    else if (ml_ops[op].op_class == ML_CLASS_MAP)
        elementwise(b, node, y, out);
    else if (producer == ML_OP_SORT || producer == ML_OP_TOP_K)
        sorted(b, of, y, out);
    else if (op == ML_OP_ARGMAX)
        argmax(b, node, y, out);
    else if (op == ML_OP_MAX || op == ML_OP_MIN)
        reference_reduce(ML_OP_MAX, bounds_of(b, node, 0), out);
    else if (summed_sources(op, &first, &last))
        sums(b, node, y, out);
    else if (op != ML_OP_OUT)
        movement(b, node, out);
    else /* the squares of a product's groups */
        for (int64_t i = 0; i < ml_type_elements(&y->type); i++)
            out->cells[i].number = rounded(y->type.dtype, 200, y->cells[i].number, 0);
}

typedef struct {
    const ml_graph *asked;
    ml_ref node;
    double **bounds;
    ml_arena *arena;
    ml_graph *graph;
    reference_run run;
    bounds_run state;
} request;

static void interpret(void *argument) {
    request *a = argument;
    reference_run *r = &a->run;
    ml_roots roots = {.outputs = &a->node, .output_count = 1};
    r->graph = a->graph = ml_decompose(a->asked, &roots, INT64_MAX);
    reference_start(r, &roots);
    a->state.bounds = ML_NEW_ARRAY(r->scratch, reference_value, ml_graph_count(r->graph));
    for (ml_ref node = 1; node < ml_graph_count(r->graph); node++) {
        if (!r->uses[node]) continue;
        reference_value *y = reference_begin(r, node), *out = &a->state.bounds[node];
        reference_evaluate(r, node, y);
        out->type = y->type;
        out->type.dtype = ML_F64;
        out->cells = ML_NEW_ARRAY(r->scratch, reference_cell, ml_type_elements(&y->type));
        bounds_compute(&a->state, node, y, out);
        reference_finish(r, node);
    }
    const reference_value *out = &a->state.bounds[roots.outputs[0]];
    *a->bounds = ML_NEW_ARRAY(a->arena, double, ml_type_elements(&out->type));
    for (int64_t i = 0; i < ml_type_elements(&out->type); i++)
        (*a->bounds)[i] = out->cells[i].number;
}

void ml_reference_bounds(const ml_graph *g, const double *const *inputs, const bool *unrounded,
                         ml_ref node, double **bounds, ml_arena *arena) {
    request a = {.asked = g, .node = node, .bounds = bounds, .arena = arena};
    a.run = (reference_run){.inputs = inputs, .scratch = ml_arena_new()};
    a.state = (bounds_run){.run = &a.run, .unrounded = unrounded};
    if (!a.run.scratch) ml_raise(ML_NO_MEMORY, "no memory left for the reference interpreter");
    ml_status status = ml_protect(interpret, &a);
    reference_end(&a.run);
    if (a.graph) ml_graph_free(a.graph);
    ml_arena_free(a.run.scratch);
    if (status != ML_OK) ml_raise_last();
}
