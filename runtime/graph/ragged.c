/* RAGGED_DOT and RAGGED_OUTER: products of rows that belong to groups (tokens sorted by expert).
 * Types, gradients and definitions. */
#include "runtime/graph/ragged.h"

#include "runtime/graph/infer.h"

static const char *name_of(const infer *in, int64_t axis) {
    return ml_axis_name(in->g, (ml_axis)axis);
}

/* The groups' first rows and their ends: i32[groups]. */
static int64_t check_bounds(const infer *in, ml_axis groups) {
    for (int i = 2; i < 4; i++) {
        const ml_type *t = infer_source(in, i);
        infer_dtype(in, i, ML_I32, i == 2 ? "the starts" : "the ends");
        if (t->rank != 1 || t->axis[0] != groups)
            infer_raise(in, "they say where each group's rows begin and end",
                        "%s: the %s have axes %s instead of \"%s\" alone", ml_ops[in->op].name,
                        i == 2 ? "starts" : "ends", infer_axes(in, t), name_of(in, groups));
    }
    int64_t size = infer_source(in, 2)->size[0];
    if (infer_source(in, 3)->size[0] != size)
        infer_raise(in, NULL, "%s: there are %lld starts and %lld ends", ml_ops[in->op].name,
                    (long long)size, (long long)infer_source(in, 3)->size[0]);
    return size;
}

/* The axis of source i that is neither of the two; raises unless there is exactly one. */
static int free_axis(const infer *in, int i, ml_axis one, ml_axis two, const char *whose) {
    const ml_type *t = infer_source(in, i);
    int found = -1, count = 0;
    for (int at = 0; at < t->rank; at++)
        if (t->axis[at] != one && t->axis[at] != two) found = at, count++;
    if (count != 1)
        infer_raise(in, "merge axes into one first, or give it one of size 1",
                    "%s: %s has axes %s; it needs one axis of its own beside the shared ones",
                    ml_ops[in->op].name, whose, infer_axes(in, t));
    return found;
}

static void check_same(const infer *in, int64_t axis, int64_t left, int64_t right) {
    if (left != right)
        infer_raise(in, NULL,
                    "cannot combine groups along \"%s\": %lld on the left, %lld on the "
                    "right",
                    name_of(in, axis), (long long)left, (long long)right);
}

static void infer_dot(infer *in, ml_type *out) {
    ml_axis rows = (ml_axis)in->args[0], groups = (ml_axis)in->args[1], k = (ml_axis)in->args[2];
    const ml_type *x = infer_source(in, 0), *w = infer_source(in, 1);
    int x_rows = infer_find(in, 0, rows, "multiply rows along", "the left");
    int x_k = infer_find(in, 0, k, "contract", "the left");
    int w_k = infer_find(in, 1, k, "contract", "the right");
    int w_groups = infer_find(in, 1, groups, "choose a matrix along", "the right");
    if (x->rank != 2)
        infer_raise(in, "merge its other axes into the rows first",
                    "ragged_dot: the left has axes %s instead of two", infer_axes(in, x));
    int n = free_axis(in, 1, groups, k, "the right");
    check_same(in, k, x->size[x_k], w->size[w_k]);
    check_same(in, groups, w->size[w_groups], check_bounds(in, groups));
    infer_append(in, out, rows, x->size[x_rows]);
    infer_append(in, out, w->axis[n], w->size[n]);
}

static void infer_outer(infer *in, ml_type *out) {
    ml_axis rows = (ml_axis)in->args[0], groups = (ml_axis)in->args[1];
    int x_rows = infer_find(in, 0, rows, "multiply rows along", "the left");
    int y_rows = infer_find(in, 1, rows, "multiply rows along", "the right");
    int m = free_axis(in, 0, rows, rows, "the left"), n = free_axis(in, 1, rows, rows, "the right");
    const ml_type *x = infer_source(in, 0), *y = infer_source(in, 1);
    check_same(in, rows, x->size[x_rows], y->size[y_rows]);
    infer_append(in, out, groups, check_bounds(in, groups));
    infer_append(in, out, x->axis[m], x->size[m]);
    infer_append(in, out, y->axis[n], y->size[n]);
}

void infer_ragged(infer *in, ml_type *out) {
    for (int i = 0; i < 2; i++) infer_float_only(in, i);
    ml_dtype dtype = infer_promote(in, 0, 2);
    if (in->given && ml_dtypes[in->given->dtype].kind == ML_KIND_FLOAT) dtype = in->given->dtype;
    out->dtype = dtype;
    if (in->op == ML_OP_RAGGED_DOT)
        infer_dot(in, out);
    else
        infer_outer(in, out);
}

ml_ref ml_ragged_dot(ml_graph *g, const ml_ref *sources, ml_axis rows, ml_axis reduced,
                     ml_dtype dtype) {
    ml_axis groups = ml_graph_type(g, sources[2])->axis[0];
    return ml_graph_add(g, ML_OP_RAGGED_DOT, sources, 4, (int64_t[]){rows, groups, reduced}, 3,
                        &(ml_type){.dtype = dtype});
}

ml_ref ml_ragged_outer(ml_graph *g, const ml_ref *sources, ml_axis rows, ml_dtype dtype) {
    ml_axis groups = ml_graph_type(g, sources[2])->axis[0];
    return ml_graph_add(g, ML_OP_RAGGED_OUTER, sources, 4, (int64_t[]){rows, groups}, 2,
                        &(ml_type){.dtype = dtype});
}

/* The axis that is neither; 0 where there is none. */
static ml_axis other_axis(const ml_type *t, ml_axis one, ml_axis two) {
    for (int i = 0; i < t->rank; i++)
        if (t->axis[i] != one && t->axis[i] != two) return t->axis[i];
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
        ml_axis free = other_axis(ml_graph_type(g, w), groups, contracted);
        return ml_ragged_dot(g, (ml_ref[]){cotangent, w, starts, ends}, rows, free,
                             (ml_dtype)type.dtype);
    }
    if (dot)
        return ml_ragged_outer(g, (ml_ref[]){x, cotangent, starts, ends}, rows,
                               (ml_dtype)type.dtype);
    ml_ref partner = operand == 0 ? w : x;
    ml_axis reduced = other_axis(ml_graph_type(g, partner), rows, rows);
    return ml_ragged_dot(g, (ml_ref[]){partner, cotangent, starts, ends}, rows, reduced,
                         (ml_dtype)type.dtype);
}

double ragged_flops(const ml_graph *g, ml_ref n) {
    const ml_type *x = ml_graph_type(g, ml_graph_source(g, n, 0));
    const ml_type *out = ml_graph_type(g, n);
    const int64_t *args = ml_graph_args(g, n);
    double elements = (double)ml_type_elements(out);
    if (ml_graph_node(g, n)->op == ML_OP_RAGGED_DOT)
        return 2 * elements * (double)x->size[ml_type_find(x, (ml_axis)args[2])];
    double groups = (double)out->size[ml_type_find(out, (ml_axis)args[1])];
    return 2 * elements / groups * (double)x->size[ml_type_find(x, (ml_axis)args[0])];
}

/* ---- The definition ----------------------------------------------------------------------------
 */

static int64_t stride_of(const ml_type *t, ml_axis axis) {
    int64_t strides[ML_MAX_AXES];
    int at = ml_type_find(t, axis);
    reference_strides(t, strides);
    return at < 0 ? 0 : strides[at];
}

/* Rows of group e, cut to those that there are. */
static void bounds(const reference_value *const *source, int64_t e, int64_t rows, int64_t *first,
                   int64_t *end) {
    *first = source[2]->cells[e].integer, *end = source[3]->cells[e].integer;
    if (*first < 0) *first = 0;
    if (*end > rows) *end = rows;
}

/* Loops over (group, row, i, j): i and j are the other axes of x and of w or y. */
void reference_ragged(ml_op op, const reference_value *const *source, const int64_t *args,
                      reference_value *out) {
    const reference_value *x = source[0], *w = source[1];
    bool dot = op == ML_OP_RAGGED_DOT;
    ml_axis rows = (ml_axis)args[0], groups = (ml_axis)args[1];
    ml_axis i_axis = other_axis(&x->type, rows, rows);
    ml_axis j_axis = other_axis(&w->type, dot ? groups : rows, dot ? i_axis : rows);
    int64_t row_count = x->type.size[ml_type_find(&x->type, rows)];
    int64_t m = x->type.size[ml_type_find(&x->type, i_axis)];
    int64_t n = w->type.size[ml_type_find(&w->type, j_axis)];
    int64_t x_row = stride_of(&x->type, rows), x_i = stride_of(&x->type, i_axis);
    int64_t w_row = stride_of(&w->type, rows), w_group = stride_of(&w->type, groups);
    int64_t w_i = stride_of(&w->type, i_axis), w_j = stride_of(&w->type, j_axis);
    int64_t o_row = stride_of(&out->type, rows), o_group = stride_of(&out->type, groups);
    int64_t o_i = stride_of(&out->type, i_axis), o_j = stride_of(&out->type, j_axis);
    for (int64_t e = 0; e < source[2]->type.size[0]; e++) {
        int64_t first, end;
        bounds(source, e, row_count, &first, &end);
        for (int64_t r = first; r < end; r++)
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < n; j++)
                    out->cells[e * o_group + r * o_row + i * o_i + j * o_j].number +=
                        x->cells[r * x_row + i * x_i].number *
                        w->cells[e * w_group + r * w_row + i * w_i + j * w_j].number;
    }
}
