/* Convolutions (conv.h) as products and shifted views, which fuse with what is beside them.
 *
 * For each tap, a is read as it lies under the tap at every step: slices and zeros, and a split
 * where steps are apart (`under_tap`). What follows depends on what is summed:
 * - Nothing but the taps (depthwise): products with the tap's row of the filter, added in the
 *   compute dtype: a few loads and multiplications for each element, in one kernel with what comes
 *   before and after.
 * - Other axes too (channels are mixed): matrix products. Either one, of the columns: what lies
 *   under all taps, side by side in memory (one gather, whose indices its kernel computes), by the
 *   filter as it is. Or one for each tap, each added to the f32 result of those before. Columns
 *   move fewer bytes (taps x a, against 8 bytes for each element of the result and tap), unless the
 *   result is far wider than a; but they are taps times as large as a, so that from COLUMNS_BYTES
 *   on there is a product for each tap.
 * - Windows that lie side by side (patches) are a split of a: one product, nothing is copied.
 * - The gradient of a filter: for each tap a product of what lies under it and b over all steps, in
 *   one kernel where channels are not mixed; or one product with columns, gathered again: those of
 *   the forward pass would have to be kept until then.
 *   Beyond MANY_TAPS one reduction over columns that are gathered where it reads them.
 * - Operands with zeros between their elements (the gradient of what a stride skips): each residue
 *   of the result's index has taps of its own; the parts are interleaved. */
#include "runtime/passes/passes.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/graph/rewrite.h"
#include "runtime/ops/conv/conv.h"

enum { COLUMNS_BYTES = 1 << 30, MANY_TAPS = 64 };

typedef struct {
    ml_graph *g;
    ml_ref a, b;
    conv_window window[CONV_WINDOWS];
    int windows;
    int64_t taps[CONV_WINDOWS], all_taps;
    ml_type type; /* of the result */
    bool gives_taps;
    ml_axis summed[ML_MAX_AXES]; /* axes of both that the result has not, but for the windows' */
    int summed_count;
    ml_ref *part, *filter; /* lists with room for all taps */
    ml_arena *scratch;
    uint8_t flags; /* of the node */
} conv;

static int64_t size_of(const ml_graph *g, ml_ref n, ml_axis axis) {
    const ml_type *t = ml_graph_type(g, n);
    return t->size[ml_type_find(t, axis)];
}

static ml_dtype sum_dtype(const conv *c) {
    return ml_compute_dtype(c->type.dtype);
}

static void begin(conv *c, const ml_graph *from, ml_ref n) {
    const ml_type *b = ml_graph_type(c->g, c->b);
    c->windows = conv_read(from, n, c->window);
    c->type = *ml_graph_type(from, n);
    c->flags = ml_graph_node(from, n)->flags & (uint8_t)~ML_NODE_GRADIENT;
    c->gives_taps = conv_gives_taps(from, n);
    c->all_taps = 1;
    for (int i = 0; i < c->windows; i++)
        c->all_taps *= c->taps[i] = conv_taps(from, n, &c->window[i]);
    const ml_type *a = ml_graph_type(c->g, c->a);
    for (int i = 0; i < a->rank; i++) {
        bool window = false;
        for (int k = 0; k < c->windows; k++) window = window || c->window[k].axis == a->axis[i];
        if (!window && ml_type_find(b, a->axis[i]) >= 0 && ml_type_find(&c->type, a->axis[i]) < 0)
            c->summed[c->summed_count++] = a->axis[i];
    }
    c->part = ML_NEW_ARRAY(c->scratch, ml_ref, c->all_taps + 1);
    c->filter = ML_NEW_ARRAY(c->scratch, ml_ref, c->all_taps + 1);
}

static void tap_at(const conv *c, int64_t number, int64_t *tap) {
    for (int i = c->windows; i-- > 0; number /= c->taps[i]) tap[i] = number % c->taps[i];
}

/* ---- Pieces ---------------------------------------------------------------------------------- */

/* Without an axis of size 1: a view where there is another axis. */
static ml_ref drop_axis(ml_graph *g, ml_ref x, ml_axis axis) {
    const ml_type *t = ml_graph_type(g, x);
    int at = ml_type_find(t, axis);
    if (t->rank == 1) return ml_reduce(g, ML_OP_SUM, x, &axis, 1);
    if (at + 1 < t->rank) return ml_merge(g, x, axis, t->axis[at + 1], t->axis[at + 1]);
    return ml_merge(g, x, t->axis[at - 1], axis, t->axis[at - 1]);
}

/* The elements first, first + step, ... (`count`) of x along an axis, 0 where x has none; 0 where
 * it has none of them. x has no axis `within`. */
static ml_ref elements(ml_graph *g, ml_ref x, ml_axis axis, ml_axis within, int64_t first,
                       int64_t step, int64_t count) {
    int64_t size = size_of(g, x, axis), stop = first + step * count;
    if (first + step * (count - 1) < 0 || first >= size) return 0;
    int64_t from = first > 0 ? first : 0, to = stop < size ? stop : size;
    x = ml_slice(g, x, axis, from, to);
    x = ml_pad(g, x, axis, from - first, stop - to);
    if (step == 1) return x;
    x = ml_split(g, x, axis, axis, count, within, step);
    return drop_axis(g, ml_slice(g, x, within, 0, 1), within);
}

/* Whether a's rows are of channels that the filter has with its taps innermost: its rows, which
 * would be read with gaps for each element, are better written anew. As a sum a tap is stored by
 * itself (codegen/lower/fuse.c: what is small, computed and repeated). */
static bool has_gaps(const conv *c) {
    const ml_type *a = ml_graph_type(c->g, c->a), *b = ml_graph_type(c->g, c->b);
    return !c->summed_count && b->axis[b->rank - 1] == c->window[c->windows - 1].taps &&
           ml_type_find(b, a->axis[a->rank - 1]) >= 0;
}

/* One tap of the filter, without the taps' axes. */
static ml_ref filter_at(const conv *c, const int64_t *tap) {
    ml_ref x = c->b;
    bool stored = has_gaps(c);
    for (int i = 0; i < c->windows; i++) {
        ml_axis axis = c->window[i].taps;
        x = ml_slice(c->g, x, axis, tap[i], tap[i] + 1);
        x = stored ? ml_reduce(c->g, ML_OP_SUM, x, &axis, 1) : drop_axis(c->g, x, axis);
    }
    return x;
}

/* a as it lies under a tap at steps residue + up * (0 .. count - 1) of each window; 0: nowhere. */
static ml_ref under_tap(const conv *c, const int64_t *tap, const int64_t *residue,
                        const int64_t *count) {
    ml_ref x = c->a;
    for (int i = 0; i < c->windows && x; i++) {
        const conv_window *w = &c->window[i];
        int64_t first = w->stride * residue[i] + w->dilation * tap[i] - w->before;
        if (first % w->up != 0) return 0;
        x = elements(c->g, x, w->axis, w->taps, first / w->up, w->stride, count[i]);
    }
    return x;
}

/* x with an axis of size 1 at that position. */
static ml_ref with_axis(ml_graph *g, ml_ref x, ml_axis axis, int position) {
    ml_type type = *ml_graph_type(g, x);
    for (int i = type.rank++; i > position; i--)
        type.axis[i] = type.axis[i - 1], type.size[i] = type.size[i - 1];
    type.axis[position] = axis;
    type.size[position] = 1;
    return ml_broadcast(g, x, &type);
}

static ml_ref zeros(const conv *c, const ml_type *as) {
    return ml_broadcast(c->g, ml_const(c->g, as->dtype, 0), as);
}

/* ---- Convolutions ---------------------------------------------------------------------------- */

/* The result's type with these sizes along the windows. */
static ml_type part_type(const conv *c, const int64_t *count, ml_dtype dtype) {
    ml_type type = c->type;
    type.dtype = dtype;
    for (int i = 0; i < c->windows; i++)
        type.size[ml_type_find(&type, c->window[i].axis)] = count[i];
    return type;
}

static ml_ref multiplied(const conv *c, ml_ref x, ml_ref y, const ml_type *as) {
    x = ml_broadcast(c->g, ml_cast(c->g, x, as->dtype), as);
    y = ml_broadcast(c->g, ml_cast(c->g, y, as->dtype), as);
    return ml_map2(c->g, ML_OP_MUL, x, y);
}

/* part[i] by filter[i], summed over the channels and all i. */
static ml_ref sum_of_products(const conv *c, int64_t parts, const ml_type *as) {
    ml_ref sum = 0;
    for (int64_t i = 0; i < parts; i++) {
        ml_ref term = c->summed_count ? ml_dot(c->g, c->part[i], c->filter[i], c->summed,
                                               c->summed_count, as->dtype)
                                      : multiplied(c, c->part[i], c->filter[i], as);
        sum = sum ? ml_map2(c->g, ML_OP_ADD, sum, term) : term;
    }
    return ml_permute(c->g, sum, as); /* products are added up in their own order */
}

/* ---- Columns --------------------------------------------------------------------------------- */

/* The taps first + step * (0 .. count - 1) of a window, which elements of a lie under at the steps
 * of one residue: tap j at step q reads element stride * q + advance * j + begin. */
typedef struct {
    int64_t first, step, count, advance, begin;
} tap_row;

static tap_row taps_of_residue(const conv_window *w, int64_t taps, int64_t residue) {
    int64_t apart = llabs(w->dilation), rest = w->up; /* their greatest common divisor */
    while (rest) {
        int64_t next = apart % rest;
        apart = rest, rest = next;
    }
    tap_row r = {.step = w->up / apart};
    int64_t at = w->stride * residue - w->before;
    while (r.first < taps && (at + w->dilation * r.first) % w->up != 0) r.first++;
    r.count = (taps - r.first + r.step - 1) / r.step;
    r.advance = w->dilation * r.step / w->up;
    r.begin = (at + w->dilation * r.first) / w->up;
    return r;
}

/* x with an axis of these taps outside of its innermost one, whose rows are copied as they are: one
 * gather, whose indices are computed where it is read. They have the axes of the rows, so that its
 * result is in this order. */
static ml_ref gather_taps(ml_graph *g, ml_ref x, const conv_window *w, const tap_row *r,
                          int64_t count) {
    ml_type type = *ml_graph_type(g, x), index;
    type.size[ml_type_find(&type, w->axis)] = count;
    int position = type.rank - 1;
    for (int i = type.rank++; i > position; i--)
        type.axis[i] = type.axis[i - 1], type.size[i] = type.size[i - 1];
    type.axis[position] = w->taps, type.size[position] = r->count;
    index = type;
    index.dtype = ML_I32;
    index.rank -= type.axis[type.rank - 1] != w->axis;
    ml_ref step =
        ml_map2(g, ML_OP_MUL, ml_iota(g, w->axis, count), ml_const_int(g, ML_I32, w->stride));
    ml_ref tap =
        ml_map2(g, ML_OP_MUL, ml_iota(g, w->taps, r->count), ml_const_int(g, ML_I32, r->advance));
    step = ml_map2(g, ML_OP_ADD, step, ml_const_int(g, ML_I32, r->begin));
    ml_ref at = ml_map2(g, ML_OP_ADD, ml_broadcast(g, step, &index), tap);
    return ml_permute(g, ml_gather(g, x, at, w->axis), &type);
}

/* Whether what lies under `taps` taps at so many steps of each window is gathered. */
static bool has_columns(const conv *c, int64_t taps, const int64_t *count) {
    ml_type under = *ml_graph_type(c->g, c->a);
    for (int i = 0; i < c->windows; i++) {
        int64_t *size = &under.size[ml_type_find(&under, c->window[i].axis)];
        bool far = count[i] > INT32_MAX / c->window[i].stride || *size > INT32_MAX ||
                   llabs(c->window[i].before) > INT32_MAX ||
                   llabs(c->window[i].dilation) * c->taps[i] > INT32_MAX;
        if (far) return false; /* of indices in i32 */
        *size = count[i];
    }
    return under.rank + c->windows <= ML_MAX_AXES && taps <= COLUMNS_BYTES / ml_type_bytes(&under);
}

/* Of all windows; their axes of taps to `axes`, and the taps of the residue to `filter`. */
static ml_ref columns(const conv *c, const int64_t *residue, const int64_t *count, ml_axis *axes,
                      ml_ref *filter) {
    ml_ref x = c->a;
    for (int i = 0; i < c->windows; i++) {
        const conv_window *w = &c->window[i];
        tap_row r = taps_of_residue(w, c->taps[i], residue[i]);
        x = gather_taps(c->g, x, w, &r, count[i]);
        if (filter) *filter = elements(c->g, *filter, w->taps, w->axis, r.first, r.step, r.count);
        if (axes) axes[i] = w->taps;
    }
    return x;
}

/* The result at steps residue + up * (0 .. count - 1). */
static ml_ref convolve_part(const conv *c, const int64_t *residue, const int64_t *count) {
    int64_t tap[CONV_WINDOWS], parts = 0;
    ml_type as = part_type(c, count, c->type.dtype);
    int64_t taps = 1;
    for (int i = 0; i < c->windows; i++)
        taps *= taps_of_residue(&c->window[i], c->taps[i], residue[i]).count;
    if (taps < 1) return zeros(c, &as);
    if (c->summed_count && taps > 1 && has_columns(c, taps, count)) {
        ml_axis axes[ML_MAX_AXES + CONV_WINDOWS];
        ml_ref filter = c->b;
        memcpy(axes, c->summed, sizeof *axes * (size_t)c->summed_count);
        ml_ref x = columns(c, residue, count, axes + c->summed_count, &filter);
        int summed = c->summed_count + c->windows;
        return ml_permute(c->g, ml_dot(c->g, x, filter, axes, summed, as.dtype), &as);
    }
    for (int64_t i = 0; i < c->all_taps; i++) {
        tap_at(c, i, tap);
        ml_ref x = under_tap(c, tap, residue, count);
        if (!x) continue;
        c->part[parts] = x;
        c->filter[parts++] = filter_at(c, tap);
    }
    if (!parts) return zeros(c, &as);
    as.dtype = (uint8_t)sum_dtype(c);
    return ml_cast(c->g, sum_of_products(c, parts, &as), c->type.dtype);
}

/* Zeros at `turns` residues of window i, on which no tap lies. */
static ml_ref idle_turns(const conv *c, int i, const int64_t *count, int64_t turns) {
    ml_type type = c->type;
    int position = ml_type_find(&type, c->window[i].axis) + 1;
    for (int k = 0; k <= i; k++) type.size[ml_type_find(&type, c->window[k].axis)] = count[k];
    for (int k = type.rank++; k > position; k--)
        type.axis[k] = type.axis[k - 1], type.size[k] = type.size[k - 1];
    type.axis[position] = c->window[i].taps, type.size[position] = turns;
    return zeros(c, &type);
}

/* By residues of the steps of window i on, which are the innermost axis in turn. */
static ml_ref interleave(const conv *c, int i, int64_t *residue, int64_t *count) {
    if (i == c->windows) return convolve_part(c, residue, count);
    const conv_window *w = &c->window[i];
    int64_t steps = c->type.size[ml_type_find(&c->type, w->axis)], idle = 0;
    int64_t turns = w->up < steps ? w->up : steps;
    ml_refs parts = {0};
    count[i] = (steps + w->up - 1) / w->up;
    residue[i] = 0;
    if (w->up == 1) return interleave(c, i + 1, residue, count);
    for (int64_t turn = 0; turn < turns; turn++) {
        if (taps_of_residue(w, c->taps[i], turn).count < 1) {
            idle++;
            continue;
        }
        if (idle) *ML_PUSH(c->scratch, &parts) = idle_turns(c, i, count, idle);
        idle = 0;
        residue[i] = turn;
        *ML_PUSH(c->scratch, &parts) = with_axis(c->g, interleave(c, i + 1, residue, count),
                                                 w->taps, ml_type_find(&c->type, w->axis) + 1);
    }
    if (idle) *ML_PUSH(c->scratch, &parts) = idle_turns(c, i, count, idle);
    ml_ref y = ml_concat(c->g, parts.at, (int)parts.count, w->taps);
    return ml_slice(c->g, ml_merge(c->g, y, w->axis, w->taps, w->axis), w->axis, 0, steps);
}

static ml_ref convolve(const conv *c) {
    int64_t residue[CONV_WINDOWS] = {0}, count[CONV_WINDOWS];
    return interleave(c, 0, residue, count);
}

/* ---- Gradients of filters -------------------------------------------------------------------- */

/* The axes that one of the products for each tap sums over. */
static int summed_axes(const conv *c, ml_axis *axes) {
    int count = c->summed_count;
    memcpy(axes, c->summed, sizeof *axes * (size_t)count);
    for (int i = 0; i < c->windows; i++) axes[count++] = c->window[i].axis;
    return count;
}

static ml_type without(ml_type type, ml_axis axis) {
    int at = ml_type_find(&type, axis);
    type.rank--;
    for (int i = at; i < type.rank; i++)
        type.axis[i] = type.axis[i + 1], type.size[i] = type.size[i + 1];
    return type;
}

/* Results by tap, whose axes they get, from window i on. */
static ml_ref by_taps(const conv *c, int i, const ml_ref *results, int64_t each) {
    if (i == c->windows) return results[0];
    int at = ml_type_find(&c->type, c->window[i].taps), position = at;
    for (int k = 0; k < i; k++) position -= ml_type_find(&c->type, c->window[k].taps) < at;
    ml_refs parts = {0};
    each /= c->taps[i];
    for (int64_t k = 0; k < c->taps[i]; k++)
        *ML_PUSH(c->scratch, &parts) = with_axis(c->g, by_taps(c, i + 1, results + k * each, each),
                                                 c->window[i].taps, position);
    return ml_concat(c->g, parts.at, (int)parts.count, c->window[i].taps);
}

/* Whether a has channels that b has not: those that the convolution sums over. */
static bool mixes(const conv *c) {
    const ml_type *a = ml_graph_type(c->g, c->a), *b = ml_graph_type(c->g, c->b);
    for (int i = 0; i < a->rank; i++)
        if (ml_type_find(b, a->axis[i]) < 0) return true;
    return false;
}

static ml_ref filter_gradient(const conv *c) {
    int64_t tap[CONV_WINDOWS], residue[CONV_WINDOWS] = {0}, count[CONV_WINDOWS];
    ml_axis axes[ML_MAX_AXES + CONV_WINDOWS];
    int summed = summed_axes(c, axes);
    ml_type under = *ml_graph_type(c->g, c->a), each = c->type;
    for (int i = 0; i < c->windows; i++) count[i] = size_of(c->g, c->b, c->window[i].axis);
    bool stored = mixes(c); /* what lies under the taps, as operands of matrix products */
    if (stored && c->flags & ML_NODE_BACKWARD) ml_graph_set_flags(c->g, c->flags | ML_NODE_COPY);
    if (stored ? c->all_taps > 1 && has_columns(c, c->all_taps, count)
               : c->all_taps > MANY_TAPS && has_columns(c, 1, count)) {
        ml_ref x = columns(c, residue, count, NULL, NULL);
        ml_graph_set_flags(c->g, c->flags);
        return ml_dot(c->g, x, c->b, axes, summed, c->type.dtype);
    }
    for (int i = 0; i < c->windows; i++) {
        under.size[ml_type_find(&under, c->window[i].axis)] = count[i];
        each = without(each, c->window[i].taps);
    }
    for (int64_t i = 0; i < c->all_taps; i++) {
        tap_at(c, i, tap);
        ml_ref x = under_tap(c, tap, residue, count);
        c->part[i] = x ? x : zeros(c, &under);
    }
    ml_graph_set_flags(c->g, c->flags);
    for (int64_t i = 0; i < c->all_taps; i++) {
        ml_ref y = ml_dot(c->g, c->part[i], c->b, axes, summed, c->type.dtype);
        c->part[i] = ml_permute(c->g, y, &each);
    }
    return by_taps(c, 0, c->part, c->all_taps);
}

/* ---- Windows side by side ---------------------------------------------------------------------
 */

/* Whether each element of the larger one is under one tap of one window: `up` of the result. */
static bool side_by_side_windows(const conv *c, bool up) {
    const ml_type *a = ml_graph_type(c->g, c->a), *b = ml_graph_type(c->g, c->b);
    int rank = up ? c->type.rank : a->rank;
    for (int i = 0; i < c->windows; i++) {
        const conv_window *w = &c->window[i];
        const ml_type *with_steps = c->gives_taps ? b : &c->type;
        int64_t p = a->size[ml_type_find(a, w->axis)], k = c->taps[i];
        int64_t t = with_steps->size[ml_type_find(with_steps, w->axis)];
        if (up ? w->up != k || w->dilation != -1 || t != p * k
               : w->stride != k || w->dilation != 1 || p != t * k || w->up != 1)
            return false;
        if (w->before != 0) return false;
    }
    return (c->summed_count || c->gives_taps) && rank + c->windows <= ML_MAX_AXES;
}

static ml_ref multiply_patches(const conv *c) {
    ml_axis axes[ML_MAX_AXES + CONV_WINDOWS];
    ml_ref x = c->a;
    int summed = c->gives_taps ? summed_axes(c, axes) : c->summed_count;
    for (int i = 0; i < c->windows; i++) {
        const conv_window *w = &c->window[i];
        x = ml_split(c->g, x, w->axis, w->axis, size_of(c->g, x, w->axis) / c->taps[i], w->taps,
                     c->taps[i]);
    }
    if (!c->gives_taps) {
        memcpy(axes, c->summed, sizeof *axes * (size_t)summed);
        for (int i = 0; i < c->windows; i++) axes[summed++] = c->window[i].taps;
    }
    return ml_dot(c->g, x, c->b, axes, summed, c->type.dtype);
}

static ml_ref lay_patches(const conv *c) {
    ml_ref y = ml_dot(c->g, c->a, c->b, c->summed, c->summed_count, c->type.dtype);
    for (int i = 0; i < c->windows; i++)
        y = ml_merge(c->g, y, c->window[i].axis, c->window[i].taps, c->window[i].axis);
    return y;
}

/* ---- The pass ---------------------------------------------------------------------------------
 */

static ml_ref replace(rewrite *r, ml_ref n, const ml_ref *sources) {
    if (ml_graph_node(r->from, n)->op != ML_OP_CONV) return rewrite_copy(r, n, sources);
    conv c = {.g = r->to, .scratch = r->scratch, .a = sources[0], .b = sources[1]};
    ml_ref y;
    begin(&c, r->from, n);
    if (side_by_side_windows(&c, false))
        y = multiply_patches(&c);
    else if (!c.gives_taps && side_by_side_windows(&c, true))
        y = lay_patches(&c);
    else
        y = c.gives_taps ? filter_gradient(&c) : convolve(&c);
    return ml_permute(r->to, y, &c.type);
}

ml_graph *ml_decompose_conv(const ml_graph *from, ml_roots *roots) {
    return rewrite_run(from, roots, NULL, replace, NULL);
}

bool ml_decompose_conv_applies(const ml_graph *g) {
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->op == ML_OP_CONV) return true;
    return false;
}
