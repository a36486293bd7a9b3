#include "runtime/checkpoint/view_load.h"

#include <string.h>

#include "runtime/exec/session.h"
#include "runtime/graph/convert.h"

enum { SLAB = 1 << 20, BLOCK = 128 }; /* elements at a time; rows and columns of one scale */

/* A box that is copied: by axis, the largest stride in the tensor first. */
typedef struct {
    const ml_view *view;
    int rank, dense; /* from axis `dense` on, the box fills at least half of what it spans */
    int64_t n[ML_MAX_AXES], s[ML_MAX_AXES], d[ML_MAX_AXES]; /* extents; strides in both */
    ml_dtype dtype;
    int64_t width;    /* of the target's elements, in bytes */
    int64_t most;     /* elements of a slab: SLAB, or all of the tensor */
    void *raw, *slab; /* as they are in the file; in the target's dtype */
} view_copy;

static int64_t span(const view_copy *c, int k) {
    int64_t elements = 1;
    for (int i = k; i < c->rank; i++) elements += (c->n[i] - 1) * c->s[i];
    return elements;
}

static void axis_add(view_copy *c, int64_t n, int64_t s, int64_t d) {
    int at = c->rank++;
    for (; at > 0 && c->s[at - 1] < s; at--) {
        c->n[at] = c->n[at - 1];
        c->s[at] = c->s[at - 1];
        c->d[at] = c->d[at - 1];
    }
    c->n[at] = n;
    c->s[at] = s;
    c->d[at] = d;
}

static void dense_find(view_copy *c) {
    int64_t count = 1;
    c->dense = c->rank > 0 ? c->rank - 1 : 0;
    for (int k = c->rank - 1; k >= 0; k--) {
        count *= c->n[k];
        if (2 * count >= span(c, k)) c->dense = k;
    }
}

/* ---- in memory ---- */
#define TILE(T)                                                                                    \
    for (int64_t i = i0; i < i1; i++)                                                              \
        for (int64_t j = j0; j < j1; j++)                                                          \
    ((T *)to)[i * c->d[a] + j * c->d[b]] = ((const T *)from)[i * c->s[a] + j * c->s[b]]

/* Axes a and b, in tiles that a cache holds in both orders; a == b: one axis. */
static void copy_plane(const view_copy *c, int a, int b, int64_t na, const char *from, char *to) {
    enum { SIDE = 32 };
    const int64_t nb = a == b ? 1 : c->n[b];
    if (a == b && c->s[a] == 1 && c->d[a] == 1) {
        memcpy(to, from, (size_t)(na * c->width));
        return;
    }
    for (int64_t i0 = 0; i0 < na; i0 += SIDE)
        for (int64_t j0 = 0; j0 < nb; j0 += SIDE) {
            const int64_t i1 = i0 + SIDE < na ? i0 + SIDE : na;
            const int64_t j1 = j0 + SIDE < nb ? j0 + SIDE : nb;
            switch (c->width) {
            case 1: TILE(uint8_t); break;
            case 2: TILE(uint16_t); break;
            case 4: TILE(uint32_t); break;
            default: TILE(uint64_t); break;
            }
        }
}

/* Axes k and on, of the first `rows` of axis k. */
static void copy_memory(const view_copy *c, int k, int64_t rows, const char *from, char *to) {
    if (k >= c->rank) {
        memcpy(to, from, (size_t)c->width);
        return;
    }
    int a = c->rank - 1, b = a; /* innermost in the tensor, and in the target */
    for (int i = k; i < c->rank; i++)
        if (c->d[i] < c->d[b]) b = i;
    int64_t n[ML_MAX_AXES], at[ML_MAX_AXES] = {0}, turns = 1;
    for (int i = k; i < c->rank; i++) {
        n[i] = i == k ? rows : c->n[i];
        if (i != a && i != b) turns *= n[i];
    }
    view_copy plane = *c;
    plane.n[b] = n[b];
    for (int64_t turn = 0; turn < turns; turn++) {
        int64_t source = 0, target = 0;
        for (int i = k; i < c->rank; i++) {
            source += at[i] * c->s[i];
            target += at[i] * c->d[i];
        }
        copy_plane(&plane, a, b, n[a], from + source * c->width, to + target * c->width);
        for (int i = c->rank - 1; i >= k; i--) {
            if (i == a || i == b) continue;
            if (++at[i] < n[i]) break;
            at[i] = 0;
        }
    }
}

/* ---- from the file ---- */
static float from_e4m3(int bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    float value = exponent == 0 ? (float)fraction / 512 : (float)(8 + fraction) / 8;
    for (int i = 7; i < exponent; i++) value *= 2;
    for (int i = exponent; exponent > 0 && i < 7; i++) value /= 2;
    if (exponent == 15 && fraction == 7) value = __builtin_nanf("");
    return bits & 128 ? -value : value;
}

/* Values of 8 bits by the scale of the block of 128 rows and columns that each lies in. */
static ml_status scaled(const view_copy *c, int64_t first, int64_t count, float *to) {
    const ml_safetensor *t = c->view->tensor, *scale = c->view->scale;
    const int64_t columns = t->rank == 2 ? t->shape[1] : 1;
    const int64_t across = scale->rank == 2 ? scale->shape[1] : 1;
    float table[256];
    for (int i = 0; i < 256; i++) table[i] = from_e4m3(i);
    float *scales = ml_alloc((size_t)scale->bytes + 1);
    if (scales == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while reading scales");
    ml_status status = ml_safetensors_read(c->view->scale_file, scale, scales);
    const uint8_t *bits = c->raw;
    for (int64_t i = 0; i < count && status == ML_OK; i++) {
        const int64_t row = (first + i) / columns, column = (first + i) % columns;
        to[i] = table[bits[i]] * scales[row / BLOCK * across + column / BLOCK];
    }
    ml_free(scales);
    return status;
}

/* Elements [first, first + count) of the tensor, in the target's dtype, into the slab. */
static ml_status slab_read(view_copy *c, int64_t first, int64_t count) {
    const ml_safetensor *t = c->view->tensor;
    const bool same = !t->half && !t->e4m3 && t->dtype == c->dtype;
    const int64_t width = ml_safetensor_width(t);
    void *raw = same ? c->slab : c->raw;
    ml_status status =
        ml_file_read(&c->view->file->file, t->offset + first * width, raw, count * width);
    if (status != ML_OK)
        return ml_fail(status, "tensor \"%s\": %s", t->name, ml_error_last()->text);
    if (same) return ML_OK;
    if (!t->half && !t->e4m3) {
        ml_convert(t->dtype, raw, c->dtype, c->slab, count);
        return ML_OK;
    }
    float *wide = c->dtype == ML_F32 ? c->slab : (float *)((char *)c->raw + c->most * 8);
    if (t->e4m3) status = scaled(c, first, count, wide);
    for (int64_t i = 0; t->half && i < count; i++) wide[i] = ml_from_f16(((uint16_t *)raw)[i]);
    if (c->dtype != ML_F32 && status == ML_OK) ml_convert(ML_F32, wide, c->dtype, c->slab, count);
    return status;
}

static ml_status copy_file(view_copy *c, int k, int64_t from, char *to) {
    const bool dense = k >= c->dense;
    ml_status status = ML_OK;
    if (k >= c->rank || (dense && span(c, k) <= c->most)) {
        status = slab_read(c, from, span(c, k));
        if (status == ML_OK) copy_memory(c, k, k < c->rank ? c->n[k] : 1, c->slab, to);
        return status;
    }
    /* as many rows of axis k at once as a slab holds */
    int64_t inner = span(c, k + 1), rows = 1;
    if (dense && inner <= c->most) rows = (c->most - inner) / c->s[k] + 1;
    for (int64_t i = 0; i < c->n[k] && status == ML_OK; i += rows) {
        const int64_t left = c->n[k] - i, now = rows < left ? rows : left;
        char *at = to + i * c->d[k] * c->width;
        if (!dense || inner > c->most) {
            status = copy_file(c, k + 1, from + i * c->s[k], at);
            continue;
        }
        status = slab_read(c, from + i * c->s[k], (now - 1) * c->s[k] + inner);
        if (status == ML_OK) copy_memory(c, k, now, c->slab, at);
    }
    return status;
}

/* ---- states ---- */
typedef struct {
    ml_type local;
    int64_t first[ML_MAX_AXES], held[ML_MAX_AXES]; /* what this rank's part has of the whole */
} state_part;

/* What the view has of the part, into it. */
static ml_status part_fill(const ml_view *view, const state_part *p, void *part, char *buffers,
                           int64_t most) {
    const int rank = p->local.rank;
    view_copy c = {.view = view, .dtype = (ml_dtype)p->local.dtype, .most = most};
    c.width = ml_dtypes[c.dtype].bytes;
    c.raw = buffers;
    c.slab = buffers + most * 16;
    int64_t source = view->offset, target = 0, step = 1;
    for (int i = rank - 1; i >= 0; i--) {
        int64_t begin = view->start[i], end = view->start[i] + view->count[i];
        if (begin < p->first[i]) begin = p->first[i];
        if (end > p->first[i] + p->held[i]) end = p->first[i] + p->held[i];
        if (begin >= end) return ML_OK;
        source += (begin - view->start[i]) * view->stride[i];
        target += (begin - p->first[i]) * step;
        if (end - begin > 1) axis_add(&c, end - begin, view->stride[i], step);
        step *= p->local.size[i];
    }
    dense_find(&c);
    return copy_file(&c, 0, source, (char *)part + target * c.width);
}

typedef struct {
    const ml_session *session;
    const ml_type *global;
    const ml_placements *places;
    state_part *part;
} range_call;

static void range_body(void *context) {
    const range_call *call = context;
    ml_shard_range(call->session->ranks.layout, call->global, call->places,
                   call->session->ranks.rank, call->part->first, call->part->held);
}

static ml_status part_of(ml_session *session, uint32_t state, state_part *part) {
    const ml_type *global = &ml_graph_state(session->graph, state)->type;
    ml_placements places;
    ml_status status = session_place(session, state, &part->local, &places);
    for (int i = 0; i < global->rank; i++) {
        part->first[i] = 0;
        part->held[i] = global->size[i];
    }
    if (status != ML_OK || session->ranks.layout == NULL) return status;
    range_call call = {session, global, &places, part};
    return ml_protect(range_body, &call);
}

static ml_status view_check(const ml_session *session, uint32_t state, const ml_view *view) {
    const ml_type *type = &ml_graph_state(session->graph, state)->type;
    int64_t elements = 1, last = view->offset, more;
    for (int i = 0; i < view->tensor->rank; i++) elements *= view->tensor->shape[i];
    bool fits = view->offset >= 0 && ml_is_float((ml_dtype)type->dtype);
    fits = fits && ml_is_float(view->tensor->dtype) && (!view->tensor->e4m3 || view->scale);
    for (int i = 0; i < type->rank && fits; i++)
        fits = view->start[i] >= 0 && view->count[i] > 0 && view->stride[i] >= 0 &&
               view->count[i] <= type->size[i] - view->start[i] &&
               !__builtin_mul_overflow(view->count[i] - 1, view->stride[i], &more) &&
               !__builtin_add_overflow(last, more, &last);
    if (fits && last < elements) return ML_OK;
    return ml_fail(ML_INVALID, "the tensor \"%s\" has not the shape or dtype that its view needs",
                   view->tensor->name);
}

ml_status ml_session_load_views(ml_session *session, uint32_t state, const ml_view *views,
                                int count) {
    ml_status status = ML_OK;
    for (int i = 0; i < count && status == ML_OK; i++)
        status = view_check(session, state, &views[i]);
    if (status == ML_OK) status = program_settle_others(session, NULL);
    if (status == ML_OK) status = session_grow(session);
    if (status == ML_OK) status = session_settle(session, state);
    if (status != ML_OK || !session_holds(session, state)) return status;
    status = session_allocate(session, state);
    state_part part;
    if (status == ML_OK) status = part_of(session, state, &part);
    if (status != ML_OK) return status;
    session_state *held = &session->states[state];
    void *memory = ml_alloc((size_t)held->bytes + 1);
    int64_t most = 1;
    for (int i = 0; i < count; i++) {
        int64_t elements = views[i].tensor->bytes / ml_safetensor_width(views[i].tensor);
        if (elements > most) most = elements < SLAB ? elements : SLAB;
    }
    char *buffers = ml_alloc((size_t)most * 24);
    if (memory == NULL || buffers == NULL)
        status = ml_fail(ML_NO_MEMORY, "out of memory while loading a state");
    for (int i = 0; i < count && status == ML_OK; i++)
        status = part_fill(&views[i], &part, memory, buffers, most);
    ml_device *device = session->device;
    if (status == ML_OK && held->bytes > 0)
        status = device->ops->upload(device, held->memory, memory, held->bytes);
    ml_free(memory);
    ml_free(buffers);
    if (status == ML_OK) held->initialized = true;
    held->set_at = ++session->clock;
    return status;
}

void ml_view_paste(const ml_view *view, int rank, const int64_t *size, int64_t width,
                   const void *from, void *tensor) {
    view_copy c = {.view = view, .width = width};
    int64_t source = 0, step = 1;
    for (int i = rank - 1; i >= 0; i--) {
        source += view->start[i] * step;
        if (view->count[i] > 1) axis_add(&c, view->count[i], step, view->stride[i]);
        step *= size[i];
    }
    copy_memory(&c, 0, c.rank > 0 ? c.n[0] : 1, (const char *)from + source * width,
                (char *)tensor + view->offset * width);
}
