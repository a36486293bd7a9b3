/* The reference interpreter's LINEAR_SCAN and LINEAR_SCAN_GRAD: loops over the positions. */
#include <string.h>

#include "runtime/graph/reference.h"
#include "runtime/ops/linear_scan/linear_scan.h"

/* Operands as {position, batch, keys or values}, states as {batch, keys, values}. */
typedef struct {
    reference_run *r;
    ml_ref node;
    ml_linear_scan s;
    int pairs; /* operands: those before the cotangents */
    int64_t batch, keys, values;
    ml_type state_order;                        /* batch, keys, values */
    double *operand[LINEAR_SCAN_MOST_SOURCES];  /* a: one a key, also where all have one */
    double *gradient[LINEAR_SCAN_MOST_SOURCES]; /* laid out as the operands */
    double *y, *dy, *ds;
    double *state;   /* of one batch element at a time: before each position, and after the last */
    double *product; /* values */
} scan;

static double *numbers(const scan *x, int64_t count) {
    return ML_NEW_ARRAY(x->r->scratch, double, count + 1);
}

/* The elements of a value, in the order of `over`, repeated along axes that it lacks. */
static double *gather(const scan *x, int source, const ml_type *over) {
    const reference_value *from = &x->r->values[ml_graph_source(x->r->graph, x->node, source)];
    double *out = numbers(x, ml_type_elements(over));
    reference_walk w = reference_walk_over(over);
    reference_walk_follow(&w, 0, over, &from->type);
    int64_t at = 0;
    do out[at++] = from->cells[w.offset[0]].number;
    while (reference_walk_step(&w));
    return out;
}

static void store(const double *from, const ml_type *order, reference_value *out) {
    reference_walk w = reference_walk_over(order);
    reference_walk_follow(&w, 0, order, &out->type);
    int64_t at = 0;
    do out->cells[w.offset[0]].number = from[at++];
    while (reference_walk_step(&w));
}

static int64_t position(const scan *x, int64_t i) {
    return x->s.reverse ? x->s.length - 1 - i : i;
}

/* The row of `size` numbers of batch element b at the i-th position that is visited. */
static double *row(const scan *x, double *of, int64_t i, int64_t b, int64_t size) {
    return of + (position(x, i) * x->batch + b) * size;
}

static double *own_row(const scan *x, double *const *of, int source, int64_t i, int64_t b) {
    return row(x, of[source], i, b, source == LINEAR_SCAN_V ? x->values : x->keys);
}

/* out = w^T S */
static void contract(const scan *x, const double *w, const double *state, double *out) {
    memset(out, 0, sizeof *out * (size_t)x->values);
    for (int64_t k = 0; k < x->keys; k++)
        for (int64_t v = 0; v < x->values; v++) out[v] += w[k] * state[k * x->values + v];
}

static void forward_step(const scan *x, int64_t i, int64_t b) {
    const int64_t size = x->keys * x->values;
    const double *before = x->state + i * size;
    double *after = x->state + (i + 1) * size;
    const double *a = own_row(x, x->operand, LINEAR_SCAN_DECAY, i, b);
    const double *key = own_row(x, x->operand, LINEAR_SCAN_K, i, b);
    const double *value = own_row(x, x->operand, LINEAR_SCAN_V, i, b);
    for (int64_t k = 0; k < x->keys; k++)
        for (int64_t v = 0; v < x->values; v++)
            after[k * x->values + v] = a[k] * before[k * x->values + v] + key[k] * value[v];
    for (int p = LINEAR_SCAN_FIRST_PAIR; p < x->pairs; p += 2) {
        const double *u = own_row(x, x->operand, p, i, b);
        contract(x, own_row(x, x->operand, p + 1, i, b), before, x->product);
        for (int64_t k = 0; k < x->keys; k++)
            for (int64_t v = 0; v < x->values; v++)
                after[k * x->values + v] += u[k] * x->product[v];
    }
    contract(x, own_row(x, x->operand, LINEAR_SCAN_Q, i, b), x->s.after ? after : before,
             row(x, x->y, i, b, x->values));
}

/* y = q^T S: dq = S dy, dS += q dy^T */
static void backward_read(const scan *x, int64_t i, int64_t b, const double *state, double *ds) {
    const double *q = own_row(x, x->operand, LINEAR_SCAN_Q, i, b);
    const double *dy = row(x, x->dy, i, b, x->values);
    double *dq = own_row(x, x->gradient, LINEAR_SCAN_Q, i, b);
    for (int64_t k = 0; k < x->keys; k++)
        for (int64_t v = 0; v < x->values; v++) {
            dq[k] += state[k * x->values + v] * dy[v];
            ds[k * x->values + v] += q[k] * dy[v];
        }
}

/* ds: of the state after the position; becomes that of the state before it. */
static void backward_step(const scan *x, int64_t i, int64_t b, double *ds, double *dbefore) {
    const int64_t size = x->keys * x->values;
    const double *before = x->state + i * size, *after = before + size;
    const double *a = own_row(x, x->operand, LINEAR_SCAN_DECAY, i, b);
    const double *key = own_row(x, x->operand, LINEAR_SCAN_K, i, b);
    const double *value = own_row(x, x->operand, LINEAR_SCAN_V, i, b);
    double *da = own_row(x, x->gradient, LINEAR_SCAN_DECAY, i, b);
    double *dkey = own_row(x, x->gradient, LINEAR_SCAN_K, i, b);
    double *dvalue = own_row(x, x->gradient, LINEAR_SCAN_V, i, b);
    if (x->s.after) backward_read(x, i, b, after, ds);
    for (int64_t k = 0; k < x->keys; k++)
        for (int64_t v = 0; v < x->values; v++) {
            int64_t at = k * x->values + v;
            dkey[k] += ds[at] * value[v];
            dvalue[v] += ds[at] * key[k];
            da[k] += ds[at] * before[at];
            dbefore[at] = a[k] * ds[at];
        }
    for (int p = LINEAR_SCAN_FIRST_PAIR; p < x->pairs; p += 2) {
        const double *u = own_row(x, x->operand, p, i, b);
        const double *w = own_row(x, x->operand, p + 1, i, b);
        double *du = own_row(x, x->gradient, p, i, b), *dw = own_row(x, x->gradient, p + 1, i, b);
        double *of_product = x->product + x->values;
        contract(x, w, before, x->product);
        contract(x, u, ds, of_product);
        for (int64_t k = 0; k < x->keys; k++)
            for (int64_t v = 0; v < x->values; v++) {
                int64_t at = k * x->values + v;
                du[k] += ds[at] * x->product[v];
                dw[k] += before[at] * of_product[v];
                dbefore[at] += w[k] * of_product[v];
            }
    }
    if (!x->s.after) backward_read(x, i, b, before, dbefore);
    memcpy(ds, dbefore, sizeof *ds * (size_t)size);
}

static void begin(scan *x) {
    const ml_graph *g = x->r->graph;
    ml_linear_scan_read(g, x->node, &x->s);
    const ml_type *state = ml_graph_type(g, ml_graph_source(g, x->node, LINEAR_SCAN_STATE));
    ml_type slices, one = {.dtype = state->dtype};
    linear_scan_slices(&x->s, state, 0, (ml_dtype)state->dtype, &slices);
    x->pairs = LINEAR_SCAN_FIRST_PAIR + 2 * x->s.rank;
    x->batch = ml_type_elements(&slices) / x->s.length;
    x->keys = x->s.key_size, x->values = x->s.value_size;
    for (int i = 1; i < slices.rank; i++)
        one.axis[one.rank] = slices.axis[i], one.size[one.rank++] = slices.size[i];
    one.axis[one.rank] = x->s.keys, one.size[one.rank++] = x->keys;
    if (x->s.values) one.axis[one.rank] = x->s.values, one.size[one.rank++] = x->values;
    x->state_order = one;
    for (int i = 0; i < x->pairs; i++) {
        ml_axis own = i == LINEAR_SCAN_DECAY ? x->s.keys : linear_scan_own(&x->s, i);
        linear_scan_slices(&x->s, state, own, ML_F64, &slices);
        x->operand[i] = gather(x, i, i == LINEAR_SCAN_STATE ? &x->state_order : &slices);
    }
    x->state = numbers(x, (x->s.length + 1) * x->keys * x->values);
    x->product = numbers(x, 2 * x->values);
    x->y = numbers(x, x->s.length * x->batch * x->values);
}

static reference_value *outputs_new(const scan *x) {
    int count = ml_op_outputs(x->r->graph, x->node);
    reference_value *outputs = ML_NEW_ARRAY(x->r->scratch, reference_value, count);
    for (int i = 0; i < count; i++) {
        ml_linear_scan_type(x->r->graph, x->node, i, &outputs[i].type);
        outputs[i].cells =
            ML_NEW_ARRAY(x->r->scratch, reference_cell, ml_type_elements(&outputs[i].type));
    }
    return outputs;
}

static reference_value *forward(scan *x) {
    reference_value *outputs = outputs_new(x);
    const int64_t size = x->keys * x->values;
    double *final = numbers(x, x->batch * size);
    for (int64_t b = 0; b < x->batch; b++) {
        memcpy(x->state, x->operand[LINEAR_SCAN_STATE] + b * size, sizeof(double) * (size_t)size);
        for (int64_t i = 0; i < x->s.length; i++) forward_step(x, i, b);
        memcpy(final + b * size, x->state + x->s.length * size, sizeof(double) * (size_t)size);
    }
    store(x->y, &outputs[0].type, &outputs[0]);
    store(final, &x->state_order, &outputs[1]);
    return outputs;
}

/* A number for each key is one for all of them where they share a decay: the sum. */
static void store_decay(const scan *x, reference_value *out) {
    const double *from = x->gradient[LINEAR_SCAN_DECAY];
    int64_t each = x->s.decay_per_key ? 1 : x->keys;
    for (int64_t i = 0; i < ml_type_elements(&out->type); i++)
        for (int64_t k = 0; k < each; k++) out->cells[i].number += from[i * each + k];
}

static reference_value *backward(scan *x) {
    reference_value *outputs = outputs_new(x);
    const int64_t size = x->keys * x->values, rows = x->s.length * x->batch;
    const ml_type *state =
        ml_graph_type(x->r->graph, ml_graph_source(x->r->graph, x->node, LINEAR_SCAN_STATE));
    ml_type y;
    linear_scan_slices(&x->s, state, x->s.values, ML_F64, &y);
    x->dy = gather(x, x->pairs, &y);
    x->ds = gather(x, x->pairs + 1, &x->state_order);
    for (int i = 0; i < x->pairs; i++)
        x->gradient[i] = numbers(x, rows * (i == LINEAR_SCAN_V ? x->values : x->keys));
    double *before = numbers(x, size);
    for (int64_t b = 0; b < x->batch; b++) {
        memcpy(x->state, x->operand[LINEAR_SCAN_STATE] + b * size, sizeof(double) * (size_t)size);
        for (int64_t i = 0; i < x->s.length; i++) forward_step(x, i, b);
        for (int64_t i = x->s.length; i-- > 0;) backward_step(x, i, b, x->ds + b * size, before);
    }
    for (int i = 0; i < x->pairs; i++)
        if (i == LINEAR_SCAN_STATE)
            store(x->ds, &x->state_order, &outputs[i]);
        else if (i == LINEAR_SCAN_DECAY)
            store_decay(x, &outputs[i]);
        else
            store(x->gradient[i], &outputs[i].type, &outputs[i]);
    return outputs;
}

reference_value *linear_scan_evaluate(reference_run *r, ml_ref node) {
    scan x = {.r = r, .node = node};
    if (!r->outputs)
        r->outputs = ML_NEW_ARRAY(r->scratch, reference_value *, ml_graph_count(r->graph));
    if (r->outputs[node]) return r->outputs[node];
    begin(&x);
    bool grad = ml_graph_node(r->graph, node)->op == ML_OP_LINEAR_SCAN_GRAD;
    return r->outputs[node] = grad ? backward(&x) : forward(&x);
}
