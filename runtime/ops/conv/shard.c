/* Convolutions whose own axis is cut: each rank computes its steps from its part, and adds what the
 * neighbours' nearest elements (the halo) give to its first or last steps. The sums of both are in
 * the compute dtype and rounded once; the part itself is copied nowhere.
 *
 * A halo is one all-to-all, of which each rank fills its neighbour's place alone, summed over the
 * ranks: the first and last rank receive zeros, which is what lies beyond the ends. */
#include "runtime/ops/conv/conv.h"

#include <string.h>

#include "runtime/shard/shard_internal.h"

/* Of one window on one rank: how many elements of the ranks before and after are under it, at the
 * first `low` steps and at those from `high` on. */
typedef struct {
    int64_t part, steps; /* elements and steps of a rank */
    int64_t before, after, low, high;
} halo;

static int64_t divided_down(int64_t a, int64_t b) {
    return a / b - (a % b < 0);
}

/* False where parts and steps do not correspond, or a halo is more than a neighbour has. */
static bool find_halo(const conv_window *w, int64_t size, int64_t steps, int64_t taps,
                      int64_t ranks, halo *out) {
    int64_t reach = w->dilation * (taps - 1), low = reach < 0 ? reach : 0;
    int64_t high = reach > 0 ? reach : 0;
    if (size % ranks || steps % ranks || w->up * size != w->stride * steps) return false;
    halo h = {.part = size / ranks, .steps = steps / ranks};
    int64_t first = -divided_down(w->before - low, w->up); /* the least p, the greatest p: */
    int64_t last = divided_down(w->stride * (h.steps - 1) + high - w->before, w->up);
    h.before = first < 0 ? -first : 0;
    h.after = last >= h.part ? last - h.part + 1 : 0;
    h.low = divided_down(w->before - low - 1, w->stride) + 1;
    h.high = divided_down(w->up * (h.part - 1) - high + w->before, w->stride) + 1;
    if (h.low > h.steps) h.low = h.steps;
    if (h.high < 0) h.high = 0;
    *out = h;
    return h.before <= h.part && h.after <= h.part;
}

static int64_t size_of(const ml_graph *g, ml_ref n, ml_axis axis) {
    const ml_type *t = ml_graph_type(g, n);
    return t->size[ml_type_find(t, axis)];
}

static void propose_windows(sharder *s, ml_ref n) {
    conv_window w[CONV_WINDOWS];
    halo h;
    int count = conv_read(s->from, n, w);
    ml_ref a = ml_graph_source(s->from, n, 0), b = ml_graph_source(s->from, n, 1);
    bool gives_taps = conv_gives_taps(s->from, n);
    for (int i = 0; i < count; i++) /* corners would be those of two neighbours */
        for (int j = 0; j < s->mesh; j++)
            if (shard_along(s->need[0].over[j], ml_type_find(ml_graph_type(s->from, a), w[i].axis)))
                return;
    for (int i = 0; i < count; i++) {
        int at[2] = {ml_type_find(ml_graph_type(s->from, a), w[i].axis),
                     gives_taps ? ml_type_find(ml_graph_type(s->from, b), w[i].axis) : -1};
        if (!shard_candidate(s, n, w[i].axis, at) ||
            !find_halo(&w[i], size_of(s->from, a, w[i].axis), conv_steps(s->from, n, &w[i]),
                       conv_taps(s->from, n, &w[i]), s->layout->axis[s->mesh].size, &h))
            continue;
        shard_strategy *to = shard_strategy_new(s, n, shard_preference(s, w[i].axis));
        for (int k = 0; k < 2; k++)
            if (at[k] >= 0) s->pool.at[to->sources + (uint32_t)k] = shard_split(at[k]);
        to->out[0] = gives_taps ? (ml_placement){ML_PARTIAL_SUM, 0}
                                : shard_split(ml_type_find(ml_graph_type(s->from, n), w[i].axis));
    }
}

/* Along every axis that no window names: split in the result, or a part of a sum; and along those
 * of windows, with what neighbours have. */
void conv_propose(sharder *s, ml_ref n) {
    const ml_type *t = ml_graph_type(s->from, n);
    conv_window w[CONV_WINDOWS];
    int count = conv_read(s->from, n, w);
    for (int k = 0; k < 2; k++) {
        const ml_type *from = shard_source_type(s, n, k);
        for (int i = 0; i < from->rank; i++) {
            ml_axis axis = from->axis[i];
            int at[2] = {ml_type_find(shard_source_type(s, n, 0), axis),
                         ml_type_find(shard_source_type(s, n, 1), axis)};
            bool proposed = k == 1 && at[0] >= 0;
            for (int j = 0; j < count; j++)
                proposed = proposed || w[j].axis == axis || w[j].taps == axis;
            if (!proposed) shard_cut_along(s, n, axis, at, ml_type_find(t, axis), ML_PARTIAL_SUM);
        }
    }
    propose_windows(s, n);
    shard_propose_partial(s, n);
}

/* The x of the rank that is `to` before this one: each sends its own that far on. 0 where there is
 * none. */
static ml_ref from_neighbour(sharder *s, ml_ref x, int mesh, int64_t to, ml_axis places) {
    ml_graph *g = s->to;
    int64_t args[] = {mesh, s->layout->axis[mesh].size};
    ml_type wide = *ml_graph_type(g, x);
    memmove(wide.axis + 1, wide.axis, sizeof *wide.axis * wide.rank);
    memmove(wide.size + 1, wide.size, sizeof *wide.size * wide.rank);
    wide.axis[0] = places, wide.size[0] = args[1], wide.rank++;
    ml_ref rank = ml_graph_add(g, ML_OP_COORDINATE, NULL, 0, args, 2, NULL);
    ml_ref place = ml_map2(g, ML_OP_ADD, rank, ml_const_int(g, ML_I32, to));
    ml_ref chosen = ml_map2(g, ML_OP_EQ, ml_iota(g, places, args[1]), place);
    ml_ref sent = ml_where(g, chosen, ml_broadcast(g, x, &wide), ml_const(g, wide.dtype, 0));
    sent = ml_graph_add(g, ML_OP_ALL_TO_ALL, &sent, 1, args, 2, NULL);
    return ml_reduce(g, ML_OP_SUM, sent, &places, 1);
}

typedef struct {
    sharder *s;
    ml_ref a, b;
    conv_window w[CONV_WINDOWS];
    int count, cut; /* which window */
    ml_type type;   /* of the local result, in the compute dtype */
    bool gives_taps;
} local_conv;

/* What x, in place of a, gives to the steps first .. last-1, where the window begins at `before`.
 */
static ml_ref part_of_steps(local_conv *c, ml_ref x, int64_t before, int64_t first, int64_t last) {
    ml_graph *g = c->s->to;
    conv_window w[CONV_WINDOWS];
    ml_axis axis = c->w[c->cut].axis;
    ml_ref b = c->gives_taps ? ml_slice(g, c->b, axis, first, last) : c->b;
    int64_t steps = size_of(g, c->b, c->gives_taps ? axis : c->w[c->cut].taps);
    ml_type type = c->type;
    memcpy(w, c->w, sizeof w);
    w[c->cut].before = before;
    if (!c->gives_taps) {
        int at = ml_type_find(&type, axis);
        steps = type.size[at];
        type.size[at] = last - first;
    }
    ml_ref y = ml_conv(g, x, b, w, c->count, &type);
    return c->gives_taps ? y : ml_pad(g, y, axis, first, steps - last);
}

static ml_ref local_steps(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *need,
                          const ml_type *local) {
    local_conv c = {.s = s, .a = sources[0], .b = sources[1], .type = *local};
    ml_graph *g = s->to;
    int mesh = -1;
    halo h;
    c.count = conv_read(s->from, n, c.w);
    c.gives_taps = conv_gives_taps(s->from, n);
    ml_ref a = ml_graph_source(s->from, n, 0);
    for (int i = 0; i < c.count; i++)
        for (int j = 0; j < s->layout->count; j++)
            if (shard_along(need[0].over[j], ml_type_find(ml_graph_type(s->from, a), c.w[i].axis)))
                c.cut = i, mesh = j;
    if (mesh < 0) return ml_conv(g, c.a, c.b, c.w, c.count, local);
    const conv_window *w = &c.w[c.cut];
    if (!find_halo(w, size_of(s->from, a, w->axis), conv_steps(s->from, n, w),
                   conv_taps(s->from, n, w), s->layout->axis[mesh].size, &h))
        ml_raise(ML_INTERNAL, "a convolution is cut where it cannot be");
    c.type.dtype = (uint8_t)ml_compute_dtype(local->dtype);
    ml_ref y = ml_conv(g, c.a, c.b, c.w, c.count, &c.type);
    if (h.before > 0 && h.low > 0) {
        ml_ref x = ml_slice(g, c.a, w->axis, h.part - h.before, h.part);
        x = from_neighbour(s, x, mesh, 1, w->taps);
        y = ml_map2(g, ML_OP_ADD, y, part_of_steps(&c, x, w->before - w->up * h.before, 0, h.low));
    }
    if (h.after > 0 && h.high < h.steps) {
        ml_ref x = from_neighbour(s, ml_slice(g, c.a, w->axis, 0, h.after), mesh, -1, w->taps);
        int64_t before = w->before + w->up * h.part - w->stride * h.high;
        y = ml_map2(g, ML_OP_ADD, y, part_of_steps(&c, x, before, h.high, h.steps));
    }
    return ml_cast(g, y, local->dtype);
}

void conv_local(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *need,
                const ml_placements *out, ml_ref *outputs) {
    ml_type local = ml_layout_local(s->layout, ml_graph_type(s->from, n), &out[0]);
    ml_ref cleared[2];
    for (int k = 0; k < 2; k++) cleared[k] = shard_reduced_source(s, n, k, sources[k], &need[k]);
    outputs[0] = local_steps(s, n, cleared, need, &local);
}
