/* RAGGED_DOT and RAGGED_OUTER: products of rows that belong to groups (tokens sorted by expert).
 * Types, gradients and definitions. */
#include "runtime/ops/ragged/ragged.h"

#include "runtime/graph/infer.h"
#include "runtime/graph/reference.h"

static const char *name_of(const infer *in, int64_t axis) {
    return ml_axis_name(in->g, (ml_axis)axis);
}

static void check_same(const infer *in, int64_t axis, int64_t left, int64_t right) {
    if (left != right)
        infer_raise(in, NULL,
                    "cannot combine groups along \"%s\": %lld on the left, %lld on the right",
                    name_of(in, axis), (long long)left, (long long)right);
}

/* The axis of the bounds that is not the groups': every row axis has groups of its own along it.
 * 0 where there is none. */
static ml_axis batch_axis(const ml_type *bounds, ml_axis groups) {
    if (bounds->rank < 2) return 0;
    return bounds->axis[bounds->axis[0] == groups];
}

/* The groups' first rows and their ends: i32 {groups}, or {batch, groups}. Gives their number. */
static int64_t check_bounds(const infer *in, ml_axis groups) {
    for (int i = 2; i < 4; i++) {
        const ml_type *t = infer_source(in, i);
        infer_dtype(in, i, ML_I32, i == 2 ? "each start" : "each end");
        if (t->rank < 1 || t->rank > 2 || ml_type_find(t, groups) < 0)
            infer_raise(in, "they say where each group's rows begin and end",
                        "%s: the %s have axes %s instead of \"%s\" and at most one that the left "
                        "has too",
                        ml_ops[in->op].name, i == 2 ? "starts" : "ends", infer_axes(in, t),
                        name_of(in, groups));
    }
    const ml_type *starts = infer_source(in, 2), *ends = infer_source(in, 3);
    if (!ml_type_same_axes(starts, ends))
        infer_raise(in, NULL, "%s: the starts have axes %s, the ends %s", ml_ops[in->op].name,
                    infer_axes(in, starts), infer_axes(in, ends));
    ml_axis batch = batch_axis(starts, groups);
    for (int i = 0; batch && i < (in->op == ML_OP_RAGGED_OUTER ? 2 : 1); i++) {
        int at = infer_find(in, i, batch, "pair groups along", i ? "the right" : "the left");
        check_same(in, batch, infer_source(in, i)->size[at], ml_type_size(starts, batch));
    }
    return ml_type_size(starts, groups);
}

/* The axis of source i that is none of these; raises unless there is exactly one. */
static int free_axis(const infer *in, int i, ml_axis one, ml_axis two, ml_axis three,
                     const char *whose) {
    const ml_type *t = infer_source(in, i);
    int found = -1, count = 0;
    for (int at = 0; at < t->rank; at++)
        if (t->axis[at] != one && t->axis[at] != two && t->axis[at] != three) found = at, count++;
    if (count != 1)
        infer_raise(in, "merge axes into one first, or give it one of size 1",
                    "%s: %s has axes %s; it needs one axis of its own beside the shared ones",
                    ml_ops[in->op].name, whose, infer_axes(in, t));
    return found;
}

static void infer_dot(infer *in, ml_type *out) {
    ml_axis rows = (ml_axis)in->args[0], groups = (ml_axis)in->args[1], k = (ml_axis)in->args[2];
    const ml_type *x = infer_source(in, 0), *w = infer_source(in, 1);
    int x_rows = infer_find(in, 0, rows, "multiply rows along", "the left");
    int x_k = infer_find(in, 0, k, "contract", "the left");
    int w_k = infer_find(in, 1, k, "contract", "the right");
    int w_groups = infer_find(in, 1, groups, "choose a matrix along", "the right");
    check_same(in, groups, w->size[w_groups], check_bounds(in, groups));
    ml_axis batch = batch_axis(infer_source(in, 2), groups);
    if (x->rank != 2 + (batch != 0))
        infer_raise(in, "merge its other axes into the rows first, or give the starts and ends one",
                    "ragged_dot: the left has axes %s; it needs rows, the contracted one, and "
                    "that of the starts and ends beside the groups'",
                    infer_axes(in, x));
    int n = free_axis(in, 1, groups, k, k, "the right");
    check_same(in, k, x->size[x_k], w->size[w_k]);
    if (batch) infer_append(in, out, batch, ml_type_size(x, batch));
    infer_append(in, out, rows, x->size[x_rows]);
    infer_append(in, out, w->axis[n], w->size[n]);
}

static void infer_outer(infer *in, ml_type *out) {
    ml_axis rows = (ml_axis)in->args[0], groups = (ml_axis)in->args[1];
    int x_rows = infer_find(in, 0, rows, "multiply rows along", "the left");
    int y_rows = infer_find(in, 1, rows, "multiply rows along", "the right");
    int64_t count = check_bounds(in, groups);
    ml_axis batch = batch_axis(infer_source(in, 2), groups);
    int m = free_axis(in, 0, rows, batch, batch, "the left");
    int n = free_axis(in, 1, rows, batch, batch, "the right");
    const ml_type *x = infer_source(in, 0), *y = infer_source(in, 1);
    check_same(in, rows, x->size[x_rows], y->size[y_rows]);
    infer_append(in, out, groups, count);
    infer_append(in, out, x->axis[m], x->size[m]);
    infer_append(in, out, y->axis[n], y->size[n]);
}

/* Operands of 8 bits, which only passes make, and their scale. */
static ml_dtype scaled_dtype(const infer *in) {
    const ml_type *scale = infer_source(in, RAGGED_SCALE);
    const ml_dtype right = (ml_dtype)infer_source(in, 1)->dtype;
    if (scale->rank != 0 || scale->dtype != ML_F32 || in->given == NULL || !ml_is_narrow(right) ||
        ml_dtypes[right].bytes != 1)
        ml_raise(ML_INTERNAL, "a scaled product takes floats of 8 bits and a number in f32");
    return (ml_dtype)in->given->dtype;
}

void ragged_infer(infer *in, ml_type *out) {
    const bool more = in->op == ML_OP_RAGGED_DOT && in->args[3] != 0;
    const int least =
        in->source_count < RAGGED_SCALE ? RAGGED_SCALE : ml_ragged_sources(in->g, in->sources[0]);
    if (least > RAGGED_SCALE && in->source_count == RAGGED_SCALE)
        infer_raise(in, "cast them to bf16 first", "%s: operands of 8 bits have no product",
                    ml_ops[in->op].name);
    if (in->source_count < least || (in->source_count > least && !more))
        ml_raise(ML_INTERNAL, "%s has %d operands", ml_ops[in->op].name, in->source_count);
    for (int i = 0; i < 2; i++) infer_float_only(in, i);
    ml_dtype dtype = least > RAGGED_SCALE ? scaled_dtype(in) : infer_promote(in, 0, 2);
    if (in->given && ml_dtypes[in->given->dtype].kind == ML_KIND_FLOAT) dtype = in->given->dtype;
    out->dtype = dtype;
    if (in->op == ML_OP_RAGGED_DOT)
        infer_dot(in, out), ragged_check_gated(in, out);
    else
        infer_outer(in, out);
}

/* The groups' axis: that of the bounds which x has not. */
static ml_axis groups_of(const ml_graph *g, const ml_ref *sources) {
    const ml_type *x = ml_graph_type(g, sources[0]), *starts = ml_graph_type(g, sources[2]);
    for (int i = 0; i < starts->rank; i++)
        if (ml_type_find(x, starts->axis[i]) < 0) return starts->axis[i];
    return starts->rank ? starts->axis[0] : 0;
}

ml_ref ml_ragged_dot(ml_graph *g, const ml_ref *sources, ml_axis rows, ml_axis reduced,
                     ml_dtype dtype) {
    ml_axis groups = groups_of(g, sources);
    return ml_graph_add(g, ML_OP_RAGGED_DOT, sources, ml_ragged_sources(g, sources[0]),
                        (int64_t[]){rows, groups, reduced, 0}, 4, &(ml_type){.dtype = dtype});
}

ml_ref ml_ragged_outer(ml_graph *g, const ml_ref *sources, ml_axis rows, ml_dtype dtype) {
    ml_axis groups = groups_of(g, sources);
    return ml_graph_add(g, ML_OP_RAGGED_OUTER, sources, ml_ragged_sources(g, sources[0]),
                        (int64_t[]){rows, groups, 0}, 3, &(ml_type){.dtype = dtype});
}

/* The axis that is none of these; 0 where there is none. */
static ml_axis other_axis(const ml_type *t, ml_axis one, ml_axis two, ml_axis three) {
    for (int i = 0; i < t->rank; i++)
        if (t->axis[i] != one && t->axis[i] != two && t->axis[i] != three) return t->axis[i];
    return 0;
}

/* y = x w: dx = dy w^T, dw = x^T dy by group. c = x^T y by group: dx = y dc^T, dy = x dc. */
ml_ref ragged_gradient(ml_graph *g, ml_ref n, ml_ref cotangent, int operand) {
    const int64_t *args = ml_graph_args(g, n);
    bool dot = ml_graph_node(g, n)->op == ML_OP_RAGGED_DOT;
    ml_axis rows = (ml_axis)args[0], groups = (ml_axis)args[1];
    ml_axis contracted = dot ? (ml_axis)args[2] : 0;
    const ml_ref *sources = ml_graph_sources(g, n);
    ml_ref x = sources[0], w = sources[1], starts = sources[2], ends = sources[3];
    ml_type type = *ml_graph_type(g, sources[operand]);
    cotangent = ml_cast(g, cotangent, (ml_dtype)type.dtype);
    if (dot && operand == 0) {
        ml_axis free = other_axis(ml_graph_type(g, w), groups, contracted, contracted);
        return ml_ragged_dot(g, (ml_ref[]){cotangent, w, starts, ends}, rows, free,
                             (ml_dtype)type.dtype);
    }
    if (dot)
        return ml_ragged_outer(g, (ml_ref[]){x, cotangent, starts, ends}, rows,
                               (ml_dtype)type.dtype);
    ml_ref partner = operand == 0 ? w : x;
    ml_axis batch = batch_axis(ml_graph_type(g, starts), groups);
    ml_axis reduced = other_axis(ml_graph_type(g, partner), rows, batch, batch);
    return ml_ragged_dot(g, (ml_ref[]){partner, cotangent, starts, ends}, rows, reduced,
                         (ml_dtype)type.dtype);
}

double ragged_flops(const ml_graph *g, ml_ref n) {
    const ml_type *x = ml_graph_type(g, ml_graph_source(g, n, 0));
    const ml_type *out = ml_graph_type(g, n);
    const int64_t *args = ml_graph_args(g, n);
    double elements = (double)ml_type_elements(out);
    if (ml_graph_node(g, n)->op == ML_OP_RAGGED_DOT)
        return 2 * elements * (double)ml_type_size(x, (ml_axis)args[2]);
    ml_axis groups = (ml_axis)args[1];
    ml_axis batch = batch_axis(ml_graph_type(g, ml_graph_source(g, n, 2)), groups);
    double rows = (double)ml_type_size(x, (ml_axis)args[0]);
    if (batch) rows *= (double)ml_type_size(x, batch);
    return 2 * elements / (double)ml_type_size(out, groups) * rows;
}

/* ---- The definition -------------------------------------------------------------------------- */

static int64_t stride_of(const ml_type *t, ml_axis axis) {
    int64_t strides[ML_MAX_AXES];
    int at = axis ? ml_type_find(t, axis) : -1;
    reference_strides(t, strides);
    return at < 0 ? 0 : strides[at];
}

/* Rows of group e of batch element b, cut to those that there are. */
static void bounds(const reference_value *const *source, ml_axis batch, int64_t b, ml_axis groups,
                   int64_t e, int64_t rows, int64_t *out) {
    for (int i = 0; i < 2; i++) {
        const ml_type *t = &source[2 + i]->type;
        int64_t at = b * (batch ? stride_of(t, batch) : 0) + e * stride_of(t, groups);
        out[i] = source[2 + i]->cells[at].integer;
    }
    if (out[0] < 0) out[0] = 0;
    if (out[1] > rows) out[1] = rows;
}

typedef struct {
    int64_t x, w, out;
} strides_by;

static strides_by strides_along(const reference_value *const *source, const reference_value *out,
                                ml_axis axis) {
    return (strides_by){stride_of(&source[0]->type, axis), stride_of(&source[1]->type, axis),
                        stride_of(&out->type, axis)};
}

/* Loops over (batch, group, row, i, j): i and j are the other axes of x and of w or y. */
static void evaluate(ml_op op, const reference_value *const *source, const int64_t *args,
                     reference_value *out) {
    const reference_value *x = source[0], *w = source[1];
    ml_axis rows = (ml_axis)args[0], groups = (ml_axis)args[1];
    ml_axis batch = batch_axis(&source[2]->type, groups);
    ml_axis i_axis = other_axis(&x->type, rows, batch, batch);
    ml_axis j_axis = op == ML_OP_RAGGED_DOT ? other_axis(&w->type, groups, i_axis, i_axis)
                                            : other_axis(&w->type, rows, batch, batch);
    int64_t row_count = ml_type_size(&x->type, rows);
    int64_t m = ml_type_size(&x->type, i_axis);
    int64_t n = ml_type_size(&w->type, j_axis);
    int64_t batches = batch ? ml_type_size(&x->type, batch) : 1;
    const ml_type *starts = &source[2]->type;
    int64_t group_count = ml_type_size(starts, groups);
    strides_by by_row = strides_along(source, out, rows), by_i = strides_along(source, out, i_axis);
    strides_by by_j = strides_along(source, out, j_axis), by_e = strides_along(source, out, groups);
    strides_by by_b = strides_along(source, out, batch);
    for (int64_t at = 0; at < batches * group_count; at++) {
        int64_t b = at / group_count, e = at % group_count, bound[2];
        bounds(source, batch, b, groups, e, row_count, bound);
        for (int64_t r = bound[0]; r < bound[1]; r++)
            for (int64_t ij = 0; ij < m * n; ij++) {
                int64_t i = ij / n, j = ij % n;
                out->cells[b * by_b.out + e * by_e.out + r * by_row.out + i * by_i.out +
                           j * by_j.out]
                    .number +=
                    x->cells[b * by_b.x + r * by_row.x + i * by_i.x].number *
                    w->cells[b * by_b.w + e * by_e.w + r * by_row.w + i * by_i.w + j * by_j.w]
                        .number;
            }
    }
}

void ragged_evaluate(reference_run *r, ml_ref n, int i, reference_value *out) {
    const reference_value *sources[RAGGED_MOST_SOURCES];
    const ml_op op = (ml_op)ml_graph_node(r->graph, n)->op;
    const int count = ml_ragged_sources(r->graph, ml_graph_source(r->graph, n, 0));
    for (int k = 0; k < count; k++) sources[k] = &r->values[ml_graph_source(r->graph, n, k)];
    reference_value product = {.type = *ml_graph_type(r->graph, n), .cells = out->cells};
    if (i > 0)
        product.cells = ML_NEW_ARRAY(r->scratch, reference_cell, ml_type_elements(&product.type));
    evaluate(op, sources, ml_graph_args(r->graph, n), &product);
    for (int64_t k = 0; count > RAGGED_SCALE && k < ml_type_elements(&product.type); k++)
        product.cells[k].number *= sources[RAGGED_SCALE]->cells[0].number;
    if (i > 0) ragged_squares(&product, out);
}
