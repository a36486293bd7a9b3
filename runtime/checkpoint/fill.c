#include "runtime/checkpoint/fill.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>

#include "runtime/base/clock.h"
#include "runtime/base/knobs.h"
#include "runtime/base/pool.h"

enum { THREADS = 16, AHEAD = 2 }; /* at most; pieces of a thread that are announced */

static int64_t resident_peak(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (int64_t)usage.ru_maxrss << 10;
}

/* ---- Boxes -------------------------------------------------------------------------------------
 */

void fill_box_add(fill_box *box, int64_t n, int64_t s, int64_t d) {
    if (n == 1) return;
    int at = box->rank++;
    for (; at > 0 && box->s[at - 1] < s; at--) {
        box->n[at] = box->n[at - 1];
        box->s[at] = box->s[at - 1];
        box->d[at] = box->d[at - 1];
    }
    box->n[at] = n;
    box->s[at] = s;
    box->d[at] = d;
}

void fill_box_join(fill_box *box) {
    int kept = 0;
    for (int i = 1; i < box->rank; i++) {
        const int64_t n = box->n[i], s = box->s[i], d = box->d[i];
        const bool one = box->s[kept] == n * s && box->d[kept] == n * d;
        if (!one) kept++;
        box->n[kept] = one ? box->n[kept] * n : n;
        box->s[kept] = s;
        box->d[kept] = d;
    }
    if (box->rank > 0) box->rank = kept + 1;
}

int64_t fill_box_elements(const fill_box *box) {
    int64_t elements = 1;
    for (int i = 0; i < box->rank; i++) elements *= box->n[i];
    return elements;
}

int64_t fill_box_span(const fill_box *box, int axis) {
    int64_t elements = 1;
    for (int i = axis; i < box->rank; i++) elements += (box->n[i] - 1) * box->s[i];
    return elements;
}

bool fill_next(int rank, const int64_t *n, int64_t *at) {
    for (int i = rank - 1; i >= 0; i--) {
        if (++at[i] < n[i]) return true;
        at[i] = 0;
    }
    return false;
}

/* The box's axes by their strides in the target, the smallest first. */
static void order_of(const fill_box *box, int order[ML_MAX_AXES]) {
    for (int i = 0; i < box->rank; i++) {
        int at = i;
        for (; at > 0 && box->d[order[at - 1]] > box->d[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
}

/* ---- Pieces ------------------------------------------------------------------------------------
 */

typedef struct {
    int item;
    fill_box box;
} fill_piece;

typedef struct {
    ml_session *session;
    const fill_item *items;
    fill_make *make;
    void *context;
    fill_piece *pieces;
    int64_t count;
    char *buffers; /* NULL: states are written where they are */
    fill_thread thread[THREADS];
    int threads;
    atomic_bool failed;
} fill;

/* A box's axes from `axis` on, into pieces; only counted where `to` is NULL. */
static int64_t box_cut(const fill_item *item, int number, const fill_box *box, int axis,
                       fill_piece *to) {
    int64_t inner = item->width, count = 0;
    if (axis >= box->rank) {
        if (to != NULL) *to = (fill_piece){number, *box};
        return 1;
    }
    for (int i = axis + 1; i < box->rank; i++) inner *= box->n[i];
    const int64_t all = box->n[axis], rows = inner <= FILL_PIECE ? FILL_PIECE / inner : 1;
    for (int64_t at = 0; at < all; at += rows) {
        fill_piece piece = {number, *box};
        piece.box.n[axis] = rows < all - at ? rows : all - at;
        piece.box.source += at * box->s[axis];
        piece.box.target += at * box->d[axis];
        if (inner > FILL_PIECE) {
            count += box_cut(item, number, &piece.box, axis + 1, to ? to + count : NULL);
            continue;
        }
        if (to != NULL) to[count] = piece;
        count++;
    }
    return count;
}

static int64_t items_cut(const fill_item *items, int count, fill_piece *to) {
    int64_t pieces = 0;
    for (int i = 0; i < count; i++)
        if (fill_box_elements(&items[i].box) > 0)
            pieces += box_cut(&items[i], i, &items[i].box, 0, to ? to + pieces : NULL);
    return pieces;
}

/* Where a piece fills at least half of the range that it spans. */
static void piece_announce(const fill *f, int64_t i) {
    if (i >= f->count) return;
    const fill_piece *piece = &f->pieces[i];
    const fill_item *item = &f->items[piece->item];
    const int64_t span = fill_box_span(&piece->box, 0), width = item->read_width;
    if (2 * fill_box_elements(&piece->box) >= span)
        ml_file_announce(item->file, item->at + piece->box.source * width, span * width);
}

static void box_pack(fill_box *box) {
    int order[ML_MAX_AXES];
    int64_t step = 1;
    order_of(box, order);
    for (int i = 0; i < box->rank; i++) {
        box->d[order[i]] = step;
        step *= box->n[order[i]];
    }
}

/* A packed piece to its place on the device: runs of bytes, or rows of them at equal distances. */
static ml_status piece_copy(const fill *f, const fill_box *box, int width, int slot,
                            const char *from, char *to) {
    ml_device *device = f->session->device;
    int order[ML_MAX_AXES], axis = 0;
    int64_t run = 1, n[ML_MAX_AXES], d[ML_MAX_AXES], at[ML_MAX_AXES] = {0};
    order_of(box, order);
    while (axis < box->rank && box->d[order[axis]] == run) run *= box->n[order[axis++]];
    const int64_t height = axis < box->rank ? box->n[order[axis]] : 1;
    const int64_t pitch = axis < box->rank ? box->d[order[axis++]] : run;
    const int outer = box->rank > axis ? box->rank - axis : 0;
    for (int i = 0; i < outer; i++) { /* the largest stride first */
        n[i] = box->n[order[box->rank - 1 - i]];
        d[i] = box->d[order[box->rank - 1 - i]];
    }
    do {
        int64_t place = 0;
        for (int i = 0; i < outer; i++) place += at[i] * d[i];
        ML_TRY(device->ops->put(device, slot, from, to + place * width, run * width, height,
                                pitch * width));
        from += run * height * width;
    } while (fill_next(outer, n, at));
    return ML_OK;
}

void fill_lap(fill_thread *thread, int kind) {
    const double time = ml_clock_now();
    thread->seconds[kind] += time - thread->since;
    thread->since = time;
}

static ml_status piece_make(const fill *f, const fill_piece *piece, int number,
                            fill_thread *thread) {
    const fill_item *item = &f->items[piece->item];
    char *to = f->session->states[item->state].memory;
    to += piece->box.target * item->width;
    thread->since = ml_clock_now();
    if (f->buffers == NULL) return f->make(f->context, item, &piece->box, to, thread);
    fill_box box = piece->box;
    char *buffer = f->buffers + (int64_t)FILL_PIECE * number;
    box_pack(&box);
    ML_TRY(f->make(f->context, item, &box, buffer, thread));
    ml_status status = piece_copy(f, &piece->box, item->width, number, buffer, to);
    fill_lap(thread, FILL_COPY);
    return status;
}

static void pieces_make(void *context, int64_t begin, int64_t end, int thread) {
    fill *f = context;
    for (int64_t i = begin; i < end && !f->failed; i++) {
        piece_announce(f, i + (int64_t)AHEAD * f->threads);
        if (piece_make(f, &f->pieces[i], thread, &f->thread[thread]) == ML_OK) continue;
        f->failed = true;
        ml_raise_last();
    }
}

/* ---- A whole load ------------------------------------------------------------------------------
 */

ml_status fill_begin(ml_session *session, const uint32_t *states, int count, const fill_item *items,
                     int item_count) {
    ml_device *device = session->device;
    int64_t *filled = ml_alloc(sizeof *filled * (size_t)(session->state_count + 1));
    if (filled == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while loading states");
    for (int i = 0; i < item_count; i++)
        filled[items[i].state] += fill_box_elements(&items[i].box) * items[i].width;
    ml_status status = ML_OK;
    for (int i = 0; i < count && status == ML_OK; i++) {
        session_state *held = &session->states[states[i]];
        held->set_at = ++session->clock;
        if (!session_holds(session, states[i])) continue;
        status = session_allocate(session, states[i]);
        session_lose(session, states[i]);
        if (status == ML_OK && filled[states[i]] < held->bytes)
            status = device->ops->zero(device, held->memory, held->bytes);
    }
    ml_free(filled);
    return status == ML_OK ? device->ops->wait(device) : status;
}

void fill_end(ml_session *session, const uint32_t *states, int count) {
    for (int i = 0; i < count; i++) {
        session_state *held = &session->states[states[i]];
        held->set_at = ++session->clock;
        if (!session_holds(session, states[i])) continue;
        held->initialized = true;
        held->lost = false;
    }
}

static int threads_of(const ml_device *device) {
    int threads = device->options.threads > 0 ? device->options.threads : ml_cpu_count();
    return threads < THREADS ? threads : THREADS;
}

static ml_status threads_run(fill *f, int64_t scratch) {
    ml_device *device = f->session->device;
    ml_pool *pool = ml_pool_new(threads_of(device));
    if (pool == NULL) return ml_fail(ML_NO_MEMORY, "no threads for loading states");
    f->threads = ml_pool_threads(pool);
    char *room = ml_alloc((size_t)(scratch * f->threads) + 1);
    ml_status status = ML_OK;
    if (room == NULL) status = ml_fail(ML_NO_MEMORY, "out of memory while loading states");
    if (status == ML_OK && device->ops->put != NULL)
        status = device->ops->stage(device, f->threads, FILL_PIECE, &f->buffers);
    for (int i = 0; i < f->threads && room != NULL; i++) f->thread[i].scratch = room + scratch * i;
    for (int i = 0; i < AHEAD * f->threads; i++) piece_announce(f, i);
    if (status == ML_OK) status = ml_pool_run(pool, f->count, f->count, pieces_make, f);
    ml_error error = *ml_error_last();
    if (f->buffers != NULL) device->ops->unstage(device);
    ml_free(room);
    ml_pool_free(pool);
    *ml_error_last() = error;
    return status;
}

ml_status fill_run(ml_session *session, const fill_item *items, int count, int64_t scratch,
                   fill_make *make, void *context, fill_times *times) {
    *times = (fill_times){.resident = resident_peak(), .began = ml_clock_now()};
    fill *f = ml_alloc(sizeof *f);
    if (f == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while loading states");
    f->session = session;
    f->items = items;
    f->make = make;
    f->context = context;
    f->count = items_cut(items, count, NULL);
    f->pieces = ml_alloc(sizeof *f->pieces * (size_t)(f->count + 1));
    ml_status status = ML_OK;
    if (f->pieces == NULL) status = ml_fail(ML_NO_MEMORY, "out of memory while loading states");
    if (status == ML_OK) items_cut(items, count, f->pieces);
    if (status == ML_OK && f->count > 0) status = threads_run(f, scratch);
    for (int i = 0; i < count; i++) {
        times->bytes += fill_box_elements(&items[i].box) * items[i].read_width;
        times->placed += fill_box_elements(&items[i].box) * items[i].width;
    }
    times->threads = f->threads;
    times->buffers = f->threads * (scratch + (f->buffers != NULL ? FILL_PIECE : 0));
    for (int i = 0; i < f->threads * FILL_KINDS; i++)
        times->seconds[i % FILL_KINDS] += f->thread[i / FILL_KINDS].seconds[i % FILL_KINDS];
    ml_free(f->pieces);
    ml_free(f);
    return status;
}

void fill_report(const ml_session *session, const char *path, const fill_times *times) {
    const double *s = times->seconds, threads = times->threads > 0 ? times->threads : 1;
    int64_t more = resident_peak() - times->resident;
    if (session->device->ops->put == NULL) more -= times->placed;
    ml_debug(1,
             "loaded %.3f GiB of %s in %.3f s by %d threads: each %.3f s reading, %.3f hashing, "
             "%.3f converting, %.3f copying to the device; %.0f MiB of buffers, %.0f MiB more "
             "host memory at the peak\n",
             (double)times->bytes / (1 << 30), path, ml_clock_now() - times->began, times->threads,
             s[FILL_READ] / threads, s[FILL_HASH] / threads, s[FILL_CONVERT] / threads,
             s[FILL_COPY] / threads, (double)times->buffers / (1 << 20),
             (double)(more > 0 ? more : 0) / (1 << 20));
}
