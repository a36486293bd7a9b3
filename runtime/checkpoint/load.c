/* Loading: each rank reads the ranges that it holds; the hashes of all ranks' reads are compared
 * with those of the manifest before any state is set. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "runtime/base/knobs.h"
#include "runtime/base/pool.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/parts.h"
#include "runtime/io/file.h"
#include "runtime/io/tensor_hash.h"

enum { THREADS = 4, PATH = 4096, SUMS = 3 }; /* of a tensor: halves of its hash, elements */

typedef struct {
    const ml_manifest_tensor *tensor;
    uint32_t state;
    checkpoint_box box; /* what this rank holds */
    char *memory;       /* this rank's part */
    int64_t bytes;
    _Atomic uint64_t hash;
} load_item;

typedef struct {
    ml_session *session;
    const char *path;
    const ml_checkpoint_entry *entries;
    int entry_count;
    ml_checkpoint_report *report;
    load_item *items;
    int count;
    ml_file *files; /* by file of the manifest */
    checkpoint_piece *pieces;
    int64_t piece_count;
    int64_t *sums;
} load;

/* ---- What fits ------------------------------------------------------------------------------- */

/* The same extents in the same order; axes may have got other names, but not one another's. */
static bool same_shape(const ml_graph *g, const ml_type *type, const ml_manifest_tensor *t) {
    if (t->dtype != (ml_dtype)type->dtype || t->rank != type->rank) return false;
    for (int i = 0; i < t->rank; i++) {
        if (t->size[i] != type->size[i]) return false;
        for (int k = 0; k < t->rank; k++)
            if (k != i && strcmp(t->axis[i], ml_axis_name(g, type->axis[k])) == 0) return false;
    }
    return true;
}

static void print_shape(const ml_manifest_tensor *t, ml_text *text) {
    ml_text_add(text, "%s[", ml_dtypes[t->dtype].name);
    for (int i = 0; i < t->rank; i++)
        ml_text_add(text, "%s%s=%lld", i ? ", " : "", t->axis[i], (long long)t->size[i]);
    ml_text_add(text, "]");
}

static const char *reshaped_text(const ml_graph *g, ml_arena *arena, const ml_type *type,
                                 const ml_manifest_tensor *t) {
    ml_manifest_tensor here = {.dtype = (ml_dtype)type->dtype, .rank = type->rank};
    for (int i = 0; i < type->rank; i++) {
        here.axis[i] = ml_axis_name(g, type->axis[i]);
        here.size[i] = type->size[i];
    }
    ml_text text = {.arena = arena};
    ml_text_add(&text, "%s: ", t->name);
    print_shape(t, &text);
    ml_text_add(&text, " in the checkpoint, ");
    print_shape(&here, &text);
    ml_text_add(&text, " here");
    return text.text;
}

static void match_body(void *context) {
    load *l = context;
    ml_checkpoint_report *report = l->report;
    const ml_manifest *m = report->manifest;
    const ml_graph *g = l->session->graph;
    ml_arena *arena = m->arena;
    l->items = ML_NEW_ARRAY(arena, load_item, l->entry_count + 1);
    report->missing = ML_NEW_ARRAY(arena, const char *, l->entry_count + 1);
    report->reshaped = ML_NEW_ARRAY(arena, const char *, l->entry_count + 1);
    report->unexpected = ML_NEW_ARRAY(arena, const char *, m->tensor_count + 1);
    bool *used = ML_NEW_ARRAY(arena, bool, m->tensor_count + 1);
    for (int i = 0; i < l->entry_count; i++) {
        const ml_checkpoint_entry *entry = &l->entries[i];
        const ml_manifest_tensor *t = ml_manifest_find(m, entry->name);
        const ml_type *type = &ml_graph_state(g, entry->state)->type;
        if (t == NULL) {
            report->missing[report->missing_count++] =
                ml_arena_copy(arena, entry->name, strlen(entry->name));
            continue;
        }
        used[t - m->tensors] = true;
        if (same_shape(g, type, t))
            l->items[l->count++] = (load_item){.tensor = t, .state = entry->state};
        else
            report->reshaped[report->reshaped_count++] = reshaped_text(g, arena, type, t);
    }
    for (int i = 0; i < m->tensor_count; i++)
        if (!used[i]) report->unexpected[report->unexpected_count++] = m->tensors[i].name;
}

/* "2 tensors are missing: a, b" */
static void list_add(ml_text *text, const char *what, const char *const *names, int count) {
    enum { MOST = 6 };
    if (count == 0) return;
    ml_text_add(text, "%s%d %s: ", text->length ? "; " : "", count, what);
    for (int i = 0; i < count && i < MOST; i++) ml_text_add(text, "%s%s", i ? ", " : "", names[i]);
    if (count > MOST) ml_text_add(text, " and %d more", count - MOST);
}

typedef struct {
    const load *load;
    bool all;
    ml_text text;
} strict_call;

static void strict_body(void *context) {
    strict_call *call = context;
    const ml_checkpoint_report *r = call->load->report;
    list_add(&call->text, "missing", r->missing, r->missing_count);
    list_add(&call->text, "of another shape or dtype", r->reshaped, r->reshaped_count);
    if (call->all) list_add(&call->text, "unexpected", r->unexpected, r->unexpected_count);
}

static ml_status strict_check(const load *l, bool all) {
    strict_call call = {l, all, {.arena = l->report->manifest->arena}};
    ML_TRY(ml_protect(strict_body, &call));
    if (call.text.length == 0) return ML_OK;
    ml_fail(ML_INVALID, "the tensors of %s are not those of this script: %s", l->path,
            call.text.text);
    return ml_help("strict = false loads what fits");
}

/* ---- Reading --------------------------------------------------------------------------------- */

typedef struct {
    const ml_file *file;
    load_item *item;
    char *memory;
    uint64_t hash;
} read_call;

static ml_status run_read(void *context, int64_t whole, int64_t part, int64_t bytes) {
    read_call *call = context;
    const int width = call->item->box.width;
    ML_TRY(
        ml_file_read(call->file, call->item->tensor->offset + whole, call->memory + part, bytes));
    call->hash += ml_tensor_hash(call->memory + part, width, whole / width, bytes / width);
    return ML_OK;
}

static void pieces_read(void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    load *l = context;
    for (int64_t i = begin; i < end; i++) {
        const checkpoint_piece *piece = &l->pieces[i];
        load_item *item = &l->items[piece->item];
        checkpoint_box box = checkpoint_box_rows(&item->box, piece->begin, piece->end);
        read_call call = {&l->files[item->tensor->file], item, NULL, 0};
        call.memory = item->memory + piece->begin * checkpoint_row_bytes(&box);
        if (checkpoint_runs(&box, run_read, &call) != ML_OK) {
            ml_error error = *ml_error_last();
            ml_raise(error.status, "tensor \"%s\": %s", item->tensor->name, error.text);
        }
        atomic_fetch_add(&item->hash, call.hash);
    }
}

static ml_status items_place(load *l) {
    for (int i = 0; i < l->count; i++) {
        load_item *item = &l->items[i];
        ML_TRY(checkpoint_box_of(l->session, item->state, false, &item->box));
        item->bytes = checkpoint_row_bytes(&item->box) * item->box.local[0];
        if (!session_holds(l->session, item->state)) continue;
        item->memory = ml_alloc((size_t)item->bytes + 1);
        if (item->memory == NULL)
            return ml_fail(ML_NO_MEMORY, "out of memory while loading a checkpoint");
        l->piece_count += checkpoint_pieces(&item->box, i, NULL);
    }
    l->pieces = ml_alloc(sizeof *l->pieces * (size_t)(l->piece_count + 1));
    l->sums = ml_alloc(sizeof *l->sums * SUMS * (size_t)(l->count + 1));
    if (l->pieces == NULL || l->sums == NULL)
        return ml_fail(ML_NO_MEMORY, "out of memory while loading a checkpoint");
    checkpoint_piece *piece = l->pieces;
    for (int i = 0; i < l->count; i++)
        if (l->items[i].memory != NULL) piece += checkpoint_pieces(&l->items[i].box, i, piece);
    return ML_OK;
}

static ml_status files_open(load *l) {
    const ml_manifest *m = l->report->manifest;
    char name[PATH + ML_MANIFEST_FILE_NAME];
    l->files = ml_alloc(sizeof *l->files * (size_t)(m->file_count + 1));
    if (l->files == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while loading a checkpoint");
    for (int i = 0; i < m->file_count; i++) {
        snprintf(name, sizeof name, "%s/%s", l->path, m->files[i].name);
        ML_TRY(ml_file_open(name, &l->files[i]));
    }
    return ML_OK;
}

static ml_status parts_read(load *l) {
    ML_TRY(items_place(l));
    ML_TRY(files_open(l));
    if (l->piece_count == 0) return ML_OK;
    ml_pool *pool = ml_pool_new(ml_cpu_count() < THREADS ? ml_cpu_count() : THREADS);
    if (pool == NULL) return ml_fail(ML_NO_MEMORY, "no threads for loading a checkpoint");
    ml_status status = ml_pool_run(pool, l->piece_count, l->piece_count, pieces_read, l);
    ml_pool_free(pool);
    return status;
}

/* Each copy of a tensor that the ranks have read between them adds its hash once. */
static ml_status hashes_check(load *l) {
    const ml_manifest *m = l->report->manifest;
    for (int i = 0; i < l->count; i++) {
        const load_item *item = &l->items[i];
        if (item->memory == NULL) continue;
        const uint64_t hash = item->hash;
        l->sums[i * SUMS] = (int64_t)(hash & UINT32_MAX);
        l->sums[i * SUMS + 1] = (int64_t)(hash >> 32);
        l->sums[i * SUMS + 2] = checkpoint_box_bytes(&item->box) / item->box.width;
    }
    ML_TRY(checkpoint_sum(l->session, l->sums, (int64_t)SUMS * l->count));
    for (int i = 0; i < l->count; i++) {
        const ml_manifest_tensor *t = l->items[i].tensor;
        const int64_t *sum = &l->sums[i * SUMS], elements = t->bytes / ml_dtypes[t->dtype].bytes;
        const uint64_t copies = elements > 0 ? (uint64_t)(sum[2] / elements) : 0;
        const uint64_t hash = (uint64_t)sum[0] + ((uint64_t)sum[1] << 32);
        if (hash == copies * t->hash) continue;
        ml_fail(ML_IO,
                "%s/%s is damaged: the values of tensor \"%s\" are not those that were saved",
                l->path, m->files[t->file].name, t->name);
        return ml_help("load an older checkpoint");
    }
    return ML_OK;
}

static ml_status states_set(load *l) {
    ml_session *session = l->session;
    ml_device *device = session->device;
    for (int i = 0; i < l->count; i++) {
        load_item *item = &l->items[i];
        session_state *held = &session->states[item->state];
        held->set_at = ++session->clock;
        if (item->memory == NULL) continue;
        ML_TRY(session_allocate(session, item->state));
        if (item->bytes > 0)
            ML_TRY(device->ops->upload(device, held->memory, item->memory, item->bytes));
        held->initialized = true;
    }
    return ML_OK;
}

static ml_status load_states(load *l) {
    ml_session *session = l->session;
    uint32_t *states = ml_alloc(sizeof *states * (size_t)(l->count + 1));
    if (states == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while loading a checkpoint");
    for (int i = 0; i < l->count; i++) states[i] = l->items[i].state;
    ml_status status = checkpoint_prepare(session, states, l->count);
    ml_free(states);
    if (status == ML_OK) status = parts_read(l);
    ML_TRY(checkpoint_together(session, status, "read its part of the checkpoint"));
    ML_TRY(hashes_check(l));
    return checkpoint_together(session, states_set(l), "set its states");
}

static void load_release(load *l) {
    for (int i = 0; i < l->count; i++) ml_free(l->items[i].memory);
    for (int i = 0; l->files != NULL && i < l->report->manifest->file_count; i++)
        ml_file_close(&l->files[i]);
    ml_free(l->files);
    ml_free(l->pieces);
    ml_free(l->sums);
}

static ml_status load_run(load *l, bool all, bool strict) {
    ml_session *session = l->session;
    ml_manifest **manifest = &l->report->manifest;
    ml_status status = ml_manifest_read(l->path, manifest);
    ML_TRY(checkpoint_together(session, status, "read the checkpoint's manifest"));
    if (session->world != NULL) {
        uint64_t hash = ml_hash((*manifest)->record, strlen((*manifest)->record), 0);
        for (int i = 0; i < (*manifest)->tensor_count; i++)
            hash = hash * 31 + (*manifest)->tensors[i].hash;
        ML_TRY(ml_comm_agree(session->comm, hash, "the checkpoint that is loaded"));
    }
    status = ml_protect(match_body, l);
    if (status == ML_OK && strict) status = strict_check(l, all);
    ML_TRY(checkpoint_together(session, status, "match the checkpoint's tensors"));
    return load_states(l);
}

ml_status ml_checkpoint_load(ml_session *session, const char *path,
                             const ml_checkpoint_entry *entries, int count, bool all, bool strict,
                             ml_checkpoint_report *report) {
    *report = (ml_checkpoint_report){0};
    ML_TRY(session_ready(session));
    load l = {session, path, entries, count, report};
    struct timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    ml_status status = load_run(&l, all, strict);
    ml_error error = *ml_error_last();
    clock_gettime(CLOCK_MONOTONIC, &ended);
    int64_t bytes = 0;
    for (int i = 0; i < l.count; i++) bytes += l.items[i].memory != NULL ? l.items[i].bytes : 0;
    ml_debug(1, "loaded %.3f GiB of %s in %.3f s\n", (double)bytes / (1 << 30), path,
             (double)(ended.tv_sec - began.tv_sec) +
                 1e-9 * (double)(ended.tv_nsec - began.tv_nsec));
    load_release(&l);
    *ml_error_last() = error;
    return status;
}
