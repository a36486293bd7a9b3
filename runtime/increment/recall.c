/* Gathers along positions: of earlier ones, where bounds of the index prove it. What is gathered is
 * kept by position. */
#include <math.h>

#include "runtime/increment/internal.h"

/* At index p along an axis a value is within low[0] p + low[1] and high[0] p + high[1]. */
typedef struct {
    bool has_low, has_high;
    double low[2], high[2];
} range;

static range range_of(const increment *inc, ml_ref n, ml_axis axis);

static range constant(double value) {
    return (range){true, true, {0, value}, {0, value}};
}

static range sum(range a, range b) {
    range out = {.has_low = a.has_low && b.has_low, .has_high = a.has_high && b.has_high};
    for (int i = 0; i < 2; i++) {
        out.low[i] = a.low[i] + b.low[i];
        out.high[i] = a.high[i] + b.high[i];
    }
    return out;
}

static range scaled(range a, double by) {
    range out = a;
    for (int i = 0; i < 2; i++) {
        out.low[i] = by * (by < 0 ? a.high[i] : a.low[i]);
        out.high[i] = by * (by < 0 ? a.low[i] : a.high[i]);
    }
    if (by < 0) {
        out.has_low = a.has_high;
        out.has_high = a.has_low;
    }
    return out;
}

/* What is one of both: p is not negative. */
static range either(range a, range b) {
    range out = {.has_low = a.has_low && b.has_low, .has_high = a.has_high && b.has_high};
    for (int i = 0; i < 2; i++) {
        out.low[i] = fmin(a.low[i], b.low[i]);
        out.high[i] = fmax(a.high[i], b.high[i]);
    }
    return out;
}

/* The larger: each lower bound is one of it, of which the larger at p = 0 is taken. */
static range larger(range a, range b) {
    range out = either(a, b);
    const range *best = !b.has_low || (a.has_low && a.low[1] >= b.low[1]) ? &a : &b;
    out.has_low = best->has_low;
    out.low[0] = best->low[0];
    out.low[1] = best->low[1];
    return out;
}

/* How far an upper bound is above p, at most. */
static double ahead_of(const increment *inc, const range *r) {
    int64_t context = ml_type_size(ml_graph_type(inc->g, inc->in->tokens), inc->in->seq);
    if (!r->has_high) return INFINITY;
    return fmax(r->high[1], (r->high[0] - 1) * (double)(context - 1) + r->high[1]);
}

/* The smaller: each upper bound is one of it. */
static range smaller(const increment *inc, range a, range b) {
    range out = either(a, b);
    const range *best = ahead_of(inc, &a) <= ahead_of(inc, &b) ? &a : &b;
    out.has_high = best->has_high;
    out.high[0] = best->high[0];
    out.high[1] = best->high[1];
    return out;
}

static range divided(range a, double by) {
    range out = scaled(a, 1 / by);
    out.low[1] -= (by - 1) / by; /* rounded down */
    return out;
}

static range modulo(range a, double by) {
    bool positive = a.has_low && a.low[0] >= 0 && a.low[1] >= 0;
    range out = {true, true, {0, 0}, {0, by - 1}};
    if (positive && a.has_high && a.high[0] <= 0 && a.high[1] < by - 1) out.high[1] = a.high[1];
    return out;
}

static range range_of_two(const increment *inc, ml_ref n, ml_axis axis) {
    ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    range a = range_of(inc, ml_graph_source(inc->g, n, 0), axis);
    ml_ref right = ml_graph_source(inc->g, n, 1);
    range b = range_of(inc, right, axis);
    double by;
    if (op == ML_OP_ADD) return sum(a, b);
    if (op == ML_OP_SUB) return sum(a, scaled(b, -1));
    if (op == ML_OP_MAXIMUM) return larger(a, b);
    if (op == ML_OP_MINIMUM) return smaller(inc, a, b);
    if (!ml_graph_constant(inc->g, right, &by)) return (range){0};
    if (op == ML_OP_MUL) return scaled(a, by);
    if (op == ML_OP_IDIV && by >= 1) return divided(a, by);
    if (op == ML_OP_MOD && by >= 1) return modulo(a, by);
    return (range){0};
}

/* Of integers. */
static range range_of(const increment *inc, ml_ref n, ml_axis axis) {
    const ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    double value;
    if (ml_graph_constant(g, n, &value)) return constant(value);
    if (n == inc->in->tokens) return (range){.has_low = true};
    if (node.op == ML_OP_IOTA && ml_graph_args(g, n)[0] == axis)
        return (range){true, true, {1, 0}, {1, 0}};
    if (node.op == ML_OP_IOTA)
        return either(constant(0), constant((double)ml_graph_args(g, n)[1] - 1));
    if (node.op == ML_OP_RENAME)
        return range_of(inc, ml_graph_source(g, n, 0), increment_inner(g, n, axis));
    if (node.op == ML_OP_BROADCAST || node.op == ML_OP_PERMUTE || node.op == ML_OP_STOP_GRADIENT)
        return range_of(inc, ml_graph_source(g, n, 0), axis);
    if (node.op == ML_OP_WHERE)
        return either(range_of(inc, ml_graph_source(g, n, 1), axis),
                      range_of(inc, ml_graph_source(g, n, 2), axis));
    if (node.source_count == 2 && ml_ops[node.op].op_class == ML_CLASS_MAP)
        return range_of_two(inc, n, axis);
    return (range){0};
}

/* No index is above its own position. */
static bool looks_back(const increment *inc, ml_ref index, ml_axis axis) {
    range r = range_of(inc, index, axis);
    return floor(ahead_of(inc, &r) + 1e-9) <= 0;
}

bool increment_find_recall(increment *inc, ml_ref n, place *out) {
    ml_ref table = ml_graph_source(inc->g, n, 0), index = ml_graph_source(inc->g, n, 1);
    const place *from = &inc->places[table], *at = &inc->places[index];
    const ml_type *t = ml_graph_type(inc->g, index);
    ml_axis axis = (ml_axis)ml_graph_args(inc->g, n)[0];
    bool plain = !from->other && !from->chunk && !from->inner && from->lead >= 0;
    if (!plain || at->other || at->chunk || at->inner || at->lead < 0 || axis != from->axis)
        return false;
    *out = (place){.fed = true, .over = from->axis, .batch = from->batch};
    if (at->fed) {
        out->axis = at->axis;
        return looks_back(inc, index, at->axis);
    }
    for (int i = 0; i < t->rank; i++) {
        out->axis = t->axis[i];
        if (out->axis != from->batch && looks_back(inc, index, out->axis)) return true;
    }
    return false;
}

bool increment_recalls(const increment *inc, ml_ref n) {
    return inc->places[n].over && ml_graph_node(inc->g, n)->op == ML_OP_GATHER;
}

void increment_need_recall(increment *inc, ml_ref n) {
    ml_ref index = ml_graph_source(inc->g, n, 1);
    inc->needs[ml_graph_source(inc->g, n, 0)] |= 1 << AT_NEW;
    if (inc->places[index].fed)
        inc->needs[index] |= inc->places[index].lead ? 1 << AT_NEW : inc->needs[n];
}

ml_ref increment_recall(increment *inc, ml_ref n, at_positions at) {
    ml_graph *g = inc->g;
    const place *p = &inc->places[n];
    ml_ref table = ml_graph_source(g, n, 0), index = ml_graph_source(g, n, 1);
    ml_ref pool = increment_pool(inc, table, 0, 0, increment_value(inc, table, 0, AT_NEW));
    index = inc->places[index].fed ? increment_value(inc, index, 0, at)
                                   : increment_table(inc, index, p, at);
    ml_ref value = ml_gather(g, pool, increment_pool_rows(inc, index), inc->pool);
    ml_ref first = ml_map2(g, ML_OP_GE, index, ml_const_int(g, ML_I32, 0));
    return ml_where(g, first, value, ml_const(g, (ml_dtype)ml_graph_type(g, value)->dtype, 0));
}
