/* CONV (conv.h): its type, gradients, cost and definition. */
#include "runtime/ops/conv/conv.h"

#include <assert.h>
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/graph/reference.h"

/* ---- Arguments ------------------------------------------------------------------------------- */

static int read_windows(const int64_t *args, int count, conv_window *out) {
    for (int i = 0; i < count / CONV_ARGS; i++) {
        const int64_t *a = args + CONV_ARGS * i;
        out[i] = (conv_window){(ml_axis)a[0], (ml_axis)a[1], a[2], a[3], a[4], a[5]};
    }
    return count / CONV_ARGS;
}

int conv_read(const ml_graph *g, ml_ref n, conv_window windows[CONV_WINDOWS]) {
    return read_windows(ml_graph_args(g, n), ml_graph_node(g, n)->arg_count, windows);
}

ml_ref ml_conv(ml_graph *g, ml_ref a, ml_ref b, const conv_window *windows, int count,
               const ml_type *type) {
    int64_t args[CONV_ARGS * CONV_WINDOWS];
    assert(count >= 1 && count <= CONV_WINDOWS);
    for (int i = 0; i < count; i++) {
        const conv_window *w = &windows[i];
        memcpy(args + CONV_ARGS * i,
               (int64_t[]){w->axis, w->taps, w->up, w->stride, w->dilation, w->before},
               CONV_ARGS * sizeof *args);
    }
    return ml_graph_add(g, ML_OP_CONV, (ml_ref[]){a, b}, 2, args, CONV_ARGS * count, type);
}

bool conv_gives_taps(const ml_graph *g, ml_ref n) {
    return ml_type_find(ml_graph_type(g, n), (ml_axis)ml_graph_args(g, n)[1]) >= 0;
}

static int64_t size_of(const ml_type *t, ml_axis axis) {
    return t->size[ml_type_find(t, axis)];
}

int64_t conv_steps(const ml_graph *g, ml_ref n, const conv_window *window) {
    ml_ref of = conv_gives_taps(g, n) ? ml_graph_source(g, n, 1) : n;
    return size_of(ml_graph_type(g, of), window->axis);
}

int64_t conv_taps(const ml_graph *g, ml_ref n, const conv_window *window) {
    ml_ref of = conv_gives_taps(g, n) ? n : ml_graph_source(g, n, 1);
    return size_of(ml_graph_type(g, of), window->taps);
}

/* ---- The type -------------------------------------------------------------------------------- */

static const char *name_of(const infer *in, ml_axis axis) {
    return ml_axis_name(in->g, axis);
}

static bool has(const ml_type *t, ml_axis axis) {
    return ml_type_find(t, axis) >= 0;
}

static void check_window(const infer *in, const conv_window *w, bool gives_taps) {
    const ml_type *b = infer_source(in, 1), *filter = gives_taps ? in->given : b;
    const ml_type *along = gives_taps ? b : in->given;
    int64_t far = CONV_FARTHEST;
    (void)infer_find(in, 0, w->axis, "convolve along", "the tensor");
    bool right = has(filter, w->taps) && has(along, w->axis) && !has(filter, w->axis) &&
                 !has(along, w->taps) && !has(infer_source(in, 0), w->taps);
    if (!right)
        infer_raise(in, "the filter alone has the taps: rename one of them first",
                    "cannot convolve along \"%s\" with the taps \"%s\"", name_of(in, w->axis),
                    name_of(in, w->taps));
    if (w->up < 1 || w->stride < 1 || !w->dilation || (w->up > 1 && w->stride > 1))
        ml_raise(ML_INTERNAL, "conv has a window that is none");
    if (w->up > far || w->stride > far || w->dilation > far || w->dilation < -far ||
        w->before > far || w->before < -far)
        infer_raise(in, NULL, "the window of a convolution along \"%s\" is too large",
                    name_of(in, w->axis));
}

static bool is_window(const conv_window *windows, int count, ml_axis axis) {
    for (int i = 0; i < count; i++)
        if (windows[i].axis == axis || windows[i].taps == axis) return true;
    return false;
}

/* An axis of one of them that no window names: it is in two at least, and has one size. */
static void check_paired(const infer *in, ml_axis axis) {
    const ml_type *all[3] = {infer_source(in, 0), infer_source(in, 1), in->given};
    int64_t size = 0;
    int count = 0;
    for (int i = 0; i < 3; i++) {
        if (!has(all[i], axis)) continue;
        int64_t other = size_of(all[i], axis);
        if (count && other != size)
            infer_raise(in, "an axis that both have pairs them element by element, or is summed",
                        "cannot convolve: \"%s\" is %lld in the tensor, %lld in the filter",
                        name_of(in, axis), (long long)size, (long long)other);
        size = other;
        count++;
    }
    if (count < 2)
        ml_raise(ML_INTERNAL, "conv has \"%s\" in one of its tensors alone", name_of(in, axis));
}

void conv_infer(infer *in, ml_type *out) {
    conv_window w[CONV_WINDOWS];
    int64_t taps = 1;
    if (in->arg_count < CONV_ARGS || in->arg_count > CONV_ARGS * CONV_WINDOWS || !in->given)
        ml_raise(ML_INTERNAL, "conv has %d arguments", in->arg_count);
    for (int i = 0; i < 2; i++) infer_float_only(in, i);
    infer_promote(in, 0, 2);
    int count = read_windows(in->args, in->arg_count, w);
    for (int i = 0; i < 2; i++)
        if ((i ? in->given : infer_source(in, 0))->rank == ML_MAX_AXES)
            infer_raise(in, "merge some of its axes first",
                        "a convolution's tensors have at most %d axes", ML_MAX_AXES - 1);
    bool gives_taps = has(in->given, w[0].taps);
    for (int i = 0; i < count; i++) {
        check_window(in, &w[i], gives_taps);
        int64_t own = size_of(gives_taps ? in->given : infer_source(in, 1), w[i].taps);
        taps = own > CONV_MOST_TAPS ? own : taps * own;
        if (taps > CONV_MOST_TAPS)
            infer_raise(in, "write it as a product of Fourier transforms, or in parts",
                        "a convolution of more than %d taps", CONV_MOST_TAPS);
    }
    const ml_type *all[3] = {infer_source(in, 0), infer_source(in, 1), in->given};
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < all[i]->rank; k++)
            if (!is_window(w, count, all[i]->axis[k])) check_paired(in, all[i]->axis[k]);
    if (ml_dtypes[in->given->dtype].kind != ML_KIND_FLOAT)
        infer_raise(in, "cast the result", "conv gives floats, not %s",
                    ml_dtypes[in->given->dtype].name);
    out->dtype = in->given->dtype;
    for (int i = 0; i < in->given->rank; i++)
        infer_append(in, out, in->given->axis[i], in->given->size[i]);
}

/* ---- Gradients and cost ---------------------------------------------------------------------- */

/* The three indices of a window are alike: the gradient of what has one of them is a sum over the
 * others. Exchanging a and what has t exchanges p and t. */
ml_ref conv_gradient(ml_graph *g, ml_ref n, ml_ref cotangent, int operand) {
    conv_window w[CONV_WINDOWS], turned[CONV_WINDOWS];
    ml_ref a = ml_graph_source(g, n, 0), b = ml_graph_source(g, n, 1);
    ml_type type = *ml_graph_type(g, operand ? b : a);
    int count = conv_read(g, n, w);
    bool gives_taps = conv_gives_taps(g, n), up = false;
    ml_ref other = operand ? a : b;
    ml_ref y = ml_cast(g, cotangent, ml_wider(type.dtype, ml_graph_type(g, other)->dtype));
    for (int i = 0; i < count; i++) {
        turned[i] =
            (conv_window){w[i].axis, w[i].taps, w[i].stride, w[i].up, -w[i].dilation, -w[i].before};
        up = up || w[i].up > 1;
    }
    if (operand == 0)
        return gives_taps ? ml_conv(g, b, y, turned, count, &type)
                          : ml_conv(g, y, b, turned, count, &type);
    if (!gives_taps && up) return ml_conv(g, y, a, turned, count, &type);
    return ml_conv(g, a, y, w, count, &type);
}

double conv_flops(const ml_graph *g, ml_ref n) {
    conv_window w[CONV_WINDOWS];
    int count = conv_read(g, n, w);
    ml_ref nodes[3] = {n, ml_graph_source(g, n, 0), ml_graph_source(g, n, 1)};
    double products = 1;
    for (int i = 0; i < 3; i++) {
        const ml_type *t = ml_graph_type(g, nodes[i]);
        for (int k = 0; k < t->rank; k++) {
            bool seen = is_window(w, count, t->axis[k]);
            for (int before = 0; before < i; before++)
                seen = seen || has(ml_graph_type(g, nodes[before]), t->axis[k]);
            if (!seen) products *= (double)t->size[k];
        }
    }
    for (int i = 0; i < count; i++) {
        int64_t steps = conv_steps(g, n, &w[i]);
        if (w[i].up > 1) steps = size_of(ml_graph_type(g, nodes[1]), w[i].axis);
        products *= (double)steps * (double)conv_taps(g, n, &w[i]);
    }
    return 2 * products;
}

/* ---- The definition -------------------------------------------------------------------------- */

/* The two indices t and k of each window, then every other axis once. */
typedef struct {
    int rank, windows;
    int64_t size[2 * CONV_WINDOWS + 3 * ML_MAX_AXES], at[2 * CONV_WINDOWS + 3 * ML_MAX_AXES];
    int64_t stride[3][2 * CONV_WINDOWS + 3 * ML_MAX_AXES]; /* of a, b and the result */
    int64_t p_stride[CONV_WINDOWS], p_size[CONV_WINDOWS];
    conv_window window[CONV_WINDOWS];
} conv_walk;

static int64_t stride_of(const ml_type *t, const int64_t *strides, ml_axis axis) {
    int at = ml_type_find(t, axis);
    return at < 0 ? 0 : strides[at];
}

static void walk_axis(conv_walk *w, const ml_type *const *types, const int64_t (*strides)[8],
                      ml_axis axis, int64_t size, bool window) {
    for (int i = 0; i < 3; i++)
        w->stride[i][w->rank] = window && i == 0 ? 0 : stride_of(types[i], strides[i], axis);
    w->size[w->rank++] = size;
}

static void walk_begin(conv_walk *w, const ml_type *const *types, const int64_t *args,
                       int arg_count) {
    int64_t strides[3][8];
    static_assert(ML_MAX_AXES <= 8, "strides has room for all axes");
    memset(w, 0, sizeof *w);
    w->windows = read_windows(args, arg_count, w->window);
    for (int i = 0; i < 3; i++) reference_strides(types[i], strides[i]);
    for (int i = 0; i < w->windows; i++) {
        const conv_window *window = &w->window[i];
        bool gives_taps = has(types[2], window->taps);
        w->p_stride[i] = stride_of(types[0], strides[0], window->axis);
        w->p_size[i] = size_of(types[0], window->axis);
        walk_axis(w, types, strides, window->axis, size_of(types[gives_taps ? 1 : 2], window->axis),
                  true);
        walk_axis(w, types, strides, window->taps, size_of(types[gives_taps ? 2 : 1], window->taps),
                  true);
    }
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < types[i]->rank; k++) {
            bool seen = is_window(w->window, w->windows, types[i]->axis[k]);
            for (int before = 0; before < i; before++)
                seen = seen || has(types[before], types[i]->axis[k]);
            if (!seen) walk_axis(w, types, strides, types[i]->axis[k], types[i]->size[k], false);
        }
}

/* Where the elements are; false where p is none of a. */
static bool walk_places(const conv_walk *w, int64_t *place) {
    place[0] = place[1] = place[2] = 0;
    for (int d = 0; d < w->rank; d++)
        for (int i = 0; i < 3; i++) place[i] += w->at[d] * w->stride[i][d];
    for (int i = 0; i < w->windows; i++) {
        const conv_window *window = &w->window[i];
        int64_t p =
            window->stride * w->at[2 * i] + window->dilation * w->at[2 * i + 1] - window->before;
        if (p < 0 || p % window->up != 0 || p / window->up >= w->p_size[i]) return false;
        place[0] += p / window->up * w->p_stride[i];
    }
    return true;
}

static bool walk_step(conv_walk *w) {
    for (int d = w->rank; d-- > 0;) {
        if (++w->at[d] < w->size[d]) return true;
        w->at[d] = 0;
    }
    return false;
}

void conv_evaluate(reference_run *r, ml_ref n, int i, reference_value *out) {
    const reference_value *a = &r->values[ml_graph_source(r->graph, n, 0)];
    const reference_value *b = &r->values[ml_graph_source(r->graph, n, 1)];
    const ml_type *types[3] = {&a->type, &b->type, &out->type};
    conv_walk w;
    int64_t place[3];
    (void)i;
    walk_begin(&w, types, ml_graph_args(r->graph, n), ml_graph_node(r->graph, n)->arg_count);
    do
        if (walk_places(&w, place))
            out->cells[place[2]].number += a->cells[place[0]].number * b->cells[place[1]].number;
    while (walk_step(&w));
}
