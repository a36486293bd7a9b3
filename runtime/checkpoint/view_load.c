#include "runtime/checkpoint/view_load.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/pool.h"
#include "runtime/checkpoint/parts.h"
#include "runtime/graph/convert.h"

enum { SLAB = 1 << 18, BLOCK = 128 }; /* elements at a time; rows and columns of one scale */
enum { WIDE = SLAB * 8, TARGET = SLAB * 12, SCRATCH = SLAB * 20 }; /* of a thread: raw, f32, cast */

/* A box that is copied. */
typedef struct {
    const ml_view *view;
    fill_box box;
    int dense; /* from axis `dense` on, the box fills at least half of what it spans */
    ml_dtype dtype;
    int64_t width; /* of the target's elements, in bytes */
    fill_thread *thread;
} view_copy;

static void dense_find(view_copy *c) {
    int64_t count = 1;
    c->dense = c->box.rank > 0 ? c->box.rank - 1 : 0;
    for (int k = c->box.rank - 1; k >= 0; k--) {
        count *= c->box.n[k];
        if (2 * count >= fill_box_span(&c->box, k)) c->dense = k;
    }
}

/* ---- in memory ---- */
#define TILE(T)                                                                                    \
    for (int64_t i = i0; i < i1; i++)                                                              \
        for (int64_t j = j0; j < j1; j++)                                                          \
    ((T *)to)[i * d[a] + j * d[b]] = ((const T *)from)[i * s[a] + j * s[b]]

/* Axes a and b, in tiles that a cache holds in both orders; a == b: one axis. */
static void copy_plane(const view_copy *c, int a, int b, int64_t na, const char *from, char *to) {
    enum { SIDE = 32 };
    const int64_t *s = c->box.s, *d = c->box.d;
    const int64_t nb = a == b ? 1 : c->box.n[b];
    if (a == b && s[a] == 1 && d[a] == 1) {
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
    if (k >= c->box.rank) {
        memcpy(to, from, (size_t)c->width);
        return;
    }
    int a = c->box.rank - 1, b = a; /* innermost in the tensor, and in the target */
    for (int i = k; i < c->box.rank; i++)
        if (c->box.d[i] < c->box.d[b]) b = i;
    int64_t n[ML_MAX_AXES], turns[ML_MAX_AXES], at[ML_MAX_AXES] = {0};
    for (int i = k; i < c->box.rank; i++) {
        n[i] = i == k ? rows : c->box.n[i];
        turns[i] = i == a || i == b ? 1 : n[i];
    }
    view_copy plane = *c;
    plane.box.n[b] = n[b];
    do {
        int64_t source = 0, target = 0;
        for (int i = k; i < c->box.rank; i++) {
            source += at[i] * c->box.s[i];
            target += at[i] * c->box.d[i];
        }
        copy_plane(&plane, a, b, n[a], from + source * c->width, to + target * c->width);
    } while (fill_next(c->box.rank - k, turns + k, at + k));
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
static ml_status scaled(const view_copy *c, const uint8_t *bits, int64_t first, int64_t count,
                        float *to) {
    const ml_safetensor *t = c->view->tensor, *scale = c->view->scale;
    const int64_t columns = t->rank == 2 ? t->shape[1] : 1;
    const int64_t across = scale->rank == 2 ? scale->shape[1] : 1;
    float table[256];
    for (int i = 0; i < 256; i++) table[i] = from_e4m3(i);
    float *scales = ml_alloc((size_t)scale->bytes + 1);
    if (scales == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while reading scales");
    ml_status status = ml_safetensors_read(c->view->scale_file, scale, scales);
    for (int64_t i = 0; i < count && status == ML_OK; i++) {
        const int64_t row = (first + i) / columns, column = (first + i) % columns;
        to[i] = table[bits[i]] * scales[row / BLOCK * across + column / BLOCK];
    }
    ml_free(scales);
    return status;
}

/* Elements [first, first + count) of the tensor, in the target's dtype. */
static ml_status slab_read(const view_copy *c, int64_t first, int64_t count, void *to) {
    const ml_safetensor *t = c->view->tensor;
    const bool narrow = t->half || t->e4m3, same = !narrow && t->dtype == c->dtype;
    const int64_t width = ml_safetensor_width(t);
    void *raw = same ? to : c->thread->scratch;
    ml_status status =
        ml_file_read(&c->view->file->file, t->offset + first * width, raw, count * width);
    fill_lap(c->thread, FILL_READ);
    if (status != ML_OK)
        return ml_fail(status, "tensor \"%s\": %s", t->name, ml_error_last()->text);
    if (same) return ML_OK;
    if (!narrow) {
        ml_convert(t->dtype, raw, c->dtype, to, count);
        return ML_OK;
    }
    float *wide = c->dtype == ML_F32 ? to : (float *)(c->thread->scratch + WIDE);
    if (t->e4m3) status = scaled(c, raw, first, count, wide);
    for (int64_t i = 0; t->half && i < count; i++) wide[i] = ml_from_f16(((uint16_t *)raw)[i]);
    if (c->dtype != ML_F32 && status == ML_OK) ml_convert(ML_F32, wide, c->dtype, to, count);
    return status;
}

/* As slab_read, to where the elements of axis k and on belong. */
static ml_status slab_copy(const view_copy *c, int k, int64_t rows, int64_t first, int64_t count,
                           char *to) {
    const bool run =
        k >= c->box.rank || (k == c->box.rank - 1 && c->box.s[k] == 1 && c->box.d[k] == 1);
    char *slab = run ? to : c->thread->scratch + TARGET;
    ML_TRY(slab_read(c, first, count, slab));
    if (!run) copy_memory(c, k, rows, slab, to);
    fill_lap(c->thread, FILL_CONVERT);
    return ML_OK;
}

static ml_status copy_file(const view_copy *c, int k, int64_t from, char *to) {
    const bool dense = k >= c->dense;
    ml_status status = ML_OK;
    if (k >= c->box.rank || (dense && fill_box_span(&c->box, k) <= SLAB))
        return slab_copy(c, k, k < c->box.rank ? c->box.n[k] : 1, from, fill_box_span(&c->box, k),
                         to);
    /* as many rows of axis k at once as a slab holds */
    int64_t inner = fill_box_span(&c->box, k + 1), rows = 1;
    if (dense && inner <= SLAB) rows = (SLAB - inner) / c->box.s[k] + 1;
    for (int64_t i = 0; i < c->box.n[k] && status == ML_OK; i += rows) {
        const int64_t left = c->box.n[k] - i, now = rows < left ? rows : left;
        char *at = to + i * c->box.d[k] * c->width;
        if (!dense || inner > SLAB) {
            status = copy_file(c, k + 1, from + i * c->box.s[k], at);
            continue;
        }
        status = slab_copy(c, k, now, from + i * c->box.s[k], (now - 1) * c->box.s[k] + inner, at);
    }
    return status;
}

/* ---- states ---------------------------------------------------------------------------------- */

static ml_status piece_fill(void *context, const fill_item *item, const fill_box *piece, char *to,
                            fill_thread *thread) {
    const ml_view *view = &((const ml_view *)context)[item->id];
    view_copy c = {.view = view, .box = *piece, .width = item->width, .thread = thread};
    c.dtype = item->dtype;
    dense_find(&c);
    return copy_file(&c, 0, piece->source, to);
}

/* What the view has of this rank's part. */
static fill_box view_box(const ml_view *view, const checkpoint_box *part) {
    fill_box box = {.source = view->offset};
    int64_t step = 1;
    for (int i = part->rank - 1; i >= 0; i--) {
        int64_t begin = view->start[i], end = view->start[i] + view->count[i];
        if (begin < part->first[i]) begin = part->first[i];
        if (end > part->first[i] + part->held[i]) end = part->first[i] + part->held[i];
        if (begin >= end) return (fill_box){.rank = 1};
        box.source += (begin - view->start[i]) * view->stride[i];
        box.target += (begin - part->first[i]) * step;
        fill_box_add(&box, end - begin, view->stride[i], step);
        step *= part->local[i];
    }
    if (checkpoint_box_bytes(part) == 0) return (fill_box){.rank = 1};
    fill_box_join(&box);
    return box;
}

static ml_status view_check(const ml_session *session, const ml_view *view) {
    const ml_type *type = &ml_graph_state(session->graph, view->state)->type;
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

static int by_place(const void *a, const void *b) {
    const fill_item *x = a, *y = b;
    const int64_t from = x->at + x->box.source * x->read_width;
    const int64_t to = y->at + y->box.source * y->read_width;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    return (from > to) - (from < to);
}

static ml_status items_place(ml_session *session, const ml_view *views, int count,
                             fill_item *items) {
    checkpoint_box part;
    for (int i = 0; i < count; i++) {
        const ml_view *view = &views[i];
        if (i == 0 || view->state != views[i - 1].state)
            ML_TRY(checkpoint_box_of(session, view->state, false, &part));
        items[i] = (fill_item){.state = view->state, .id = i, .width = part.width};
        items[i].dtype = (ml_dtype)ml_graph_state(session->graph, view->state)->type.dtype;
        items[i].file = &view->file->file;
        items[i].at = view->tensor->offset;
        items[i].read_width = (int)ml_safetensor_width(view->tensor);
        items[i].box = view_box(view, &part);
    }
    qsort(items, (size_t)count, sizeof *items, by_place);
    return ML_OK;
}

typedef struct {
    ml_session *session;
    const ml_view *views;
    int count;
    const char *from;
    uint32_t *states;
    int state_count;
    fill_item *items;
} load;

static ml_status load_run(const load *l) {
    fill_times times;
    ml_status status = checkpoint_prepare(l->session, l->states, l->state_count);
    if (status == ML_OK) status = items_place(l->session, l->views, l->count, l->items);
    if (status == ML_OK)
        status = fill_begin(l->session, l->states, l->state_count, l->items, l->count);
    if (status == ML_OK)
        status =
            fill_run(l->session, l->items, l->count, SCRATCH, piece_fill, (void *)l->views, &times);
    ML_TRY(checkpoint_together(l->session, status, "read its part of the weights"));
    fill_end(l->session, l->states, l->state_count);
    fill_report(l->session, l->from, &times);
    return ML_OK;
}

ml_status ml_session_load_views(ml_session *session, const ml_view *views, int count,
                                const char *from) {
    load l = {session, views, count, from};
    for (int i = 0; i < count; i++) ML_TRY(view_check(session, &views[i]));
    l.states = ml_alloc(sizeof *l.states * (size_t)(count + 1));
    l.items = ml_alloc(sizeof *l.items * (size_t)(count + 1));
    for (int i = 0; i < count && l.states != NULL; i++)
        if (i == 0 || views[i].state != views[i - 1].state)
            l.states[l.state_count++] = views[i].state;
    ml_status status = ML_OK;
    if (l.states == NULL || l.items == NULL)
        status = ml_fail(ML_NO_MEMORY, "out of memory while loading weights");
    if (status == ML_OK) status = load_run(&l);
    ml_free(l.states);
    ml_free(l.items);
    return status;
}

typedef struct {
    const view_copy *copy;
    const char *from;
    char *to;
} paste_call;

static void rows_paste(void *context, int64_t begin, int64_t end, int thread) {
    const paste_call *call = context;
    const view_copy *c = call->copy;
    (void)thread;
    copy_memory(c, 0, end - begin, call->from + begin * c->box.s[0] * c->width,
                call->to + begin * c->box.d[0] * c->width);
}

void ml_view_paste(const ml_view *view, int rank, const int64_t *size, int64_t width,
                   const void *from, void *tensor) {
    view_copy c = {.view = view, .width = width};
    int64_t source = 0, step = 1;
    for (int i = rank - 1; i >= 0; i--) {
        source += view->start[i] * step;
        fill_box_add(&c.box, view->count[i], step, view->stride[i]);
        step *= size[i];
    }
    fill_box_join(&c.box);
    paste_call call = {&c, (const char *)from + source * width,
                       (char *)tensor + view->offset * width};
    const int64_t rows = c.box.rank > 0 ? c.box.n[0] : 1;
    const bool large = rows > 1 && fill_box_elements(&c.box) * width > FILL_PIECE;
    ml_pool *pool = large ? ml_pool_new(ml_cpu_count()) : NULL;
    if (pool == NULL)
        copy_memory(&c, 0, rows, call.from, call.to);
    else
        ml_pool_run(pool, rows, rows < 64 ? rows : 64, rows_paste, &call); /* nothing in it fails */
    if (pool != NULL) ml_pool_free(pool);
}
