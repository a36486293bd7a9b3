/* Loading: each rank reads the ranges that it holds right into its states, which have no value
 * until the hashes of all ranks' reads are those of the manifest. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/parts.h"
#include "runtime/io/tensor_hash.h"

enum { PATH = 4096, SUMS = 3 }; /* of a tensor: halves of its hash, elements */

typedef struct {
    const ml_manifest_tensor *tensor;
    uint32_t state;
    int64_t elements; /* that this rank holds */
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
    uint32_t *states;
    ml_file *files; /* by file of the manifest */
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
    l->states = ML_NEW_ARRAY(arena, uint32_t, l->entry_count + 1);
    l->sums = ML_NEW_ARRAY(arena, int64_t, SUMS * (l->entry_count + 1));
    l->files = ML_NEW_ARRAY(arena, ml_file, m->file_count + 1);
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
        if (same_shape(g, type, t)) {
            l->states[l->count] = entry->state;
            l->items[l->count++] = (load_item){.tensor = t, .state = entry->state};
        } else {
            report->reshaped[report->reshaped_count++] = reshaped_text(g, arena, type, t);
        }
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

/* Runs that are contiguous in the file are in the state too. Blocks stay in a core's cache between
 * their reading and their hash. */
static ml_status piece_read(void *context, const fill_item *item, const fill_box *piece, char *to,
                            fill_thread *thread) {
    enum { BLOCK = 512 << 10 };
    load *l = context;
    load_item *own = &l->items[item->id];
    const int width = item->width, inner = piece->rank - 1;
    const bool runs = inner >= 0 && piece->s[inner] == 1;
    const int64_t bytes = (runs ? piece->n[inner] : 1) * width;
    int64_t at[ML_MAX_AXES] = {0};
    uint64_t hash = 0;
    do {
        int64_t source = piece->source, target = 0, count;
        for (int i = 0; i < inner + !runs; i++) {
            source += at[i] * piece->s[i];
            target += at[i] * piece->d[i];
        }
        for (int64_t done = 0; done < bytes; done += count) {
            char *block = to + target * width + done;
            count = bytes - done < BLOCK ? bytes - done : BLOCK;
            if (ml_file_read(item->file, item->at + source * width + done, block, count) != ML_OK)
                return ml_fail(ML_IO, "tensor \"%s\": %s", own->tensor->name,
                               ml_error_last()->text);
            fill_lap(thread, FILL_READ);
            hash += ml_tensor_hash(block, width, source + done / width, count / width);
            fill_lap(thread, FILL_HASH);
        }
    } while (fill_next(inner + !runs, piece->n, at));
    atomic_fetch_add(&own->hash, hash);
    return ML_OK;
}

static int by_place(const void *a, const void *b) {
    const fill_item *x = a, *y = b;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    return (x->at > y->at) - (x->at < y->at);
}

static ml_status files_open(load *l) {
    const ml_manifest *m = l->report->manifest;
    char name[PATH + ML_MANIFEST_FILE_NAME];
    for (int i = 0; i < m->file_count; i++) {
        snprintf(name, sizeof name, "%s/%s", l->path, m->files[i].name);
        ML_TRY(ml_file_open(name, &l->files[i]));
    }
    return ML_OK;
}

/* What this rank holds of each tensor: none where another stage has it. */
static ml_status items_place(load *l, fill_item *items) {
    for (int i = 0; i < l->count; i++) {
        load_item *own = &l->items[i];
        const ml_manifest_tensor *t = own->tensor;
        checkpoint_box box;
        ML_TRY(checkpoint_box_of(l->session, own->state, false, &box));
        own->elements = checkpoint_box_bytes(&box) / box.width;
        items[i] = (fill_item){.state = own->state, .id = i, .width = box.width};
        items[i].file = &l->files[t->file];
        items[i].at = t->offset;
        items[i].read_width = box.width;
        items[i].box = checkpoint_box_whole(&box);
    }
    qsort(items, (size_t)l->count, sizeof *items, by_place);
    return ML_OK;
}

/* Each copy of a tensor that the ranks have read between them adds its hash once. */
static ml_status hashes_check(load *l) {
    const ml_manifest *m = l->report->manifest;
    for (int i = 0; i < l->count; i++) {
        const load_item *item = &l->items[i];
        const uint64_t hash = item->hash;
        l->sums[i * SUMS] = (int64_t)(hash & UINT32_MAX);
        l->sums[i * SUMS + 1] = (int64_t)(hash >> 32);
        l->sums[i * SUMS + 2] = item->elements;
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

/* From fill_begin on, a failure on any rank leaves the states of all without a value. */
static ml_status states_read(load *l) {
    ml_session *session = l->session;
    fill_times times;
    fill_item *items = ml_alloc(sizeof *items * (size_t)(l->count + 1));
    ml_status status = items ? files_open(l) : ml_fail(ML_NO_MEMORY, "out of memory while loading");
    if (status == ML_OK) status = items_place(l, items);
    status = checkpoint_together(session, status, "open the checkpoint's files");
    if (status == ML_OK) {
        status = fill_begin(session, l->states, l->count, items, l->count);
        if (status == ML_OK) status = fill_run(session, items, l->count, 0, piece_read, l, &times);
        status = checkpoint_together(session, status, "read its part of the checkpoint");
    }
    ml_free(items);
    ML_TRY(status);
    ML_TRY(hashes_check(l));
    fill_end(session, l->states, l->count);
    fill_report(session, l->path, &times);
    return ML_OK;
}

static ml_status load_run(load *l, bool all, bool strict) {
    ml_session *session = l->session;
    ml_manifest **manifest = &l->report->manifest;
    ml_status status = ml_manifest_read(l->path, manifest);
    ML_TRY(checkpoint_together(session, status, "read the checkpoint's manifest"));
    if (session->everyone != NULL) {
        uint64_t hash = ml_hash((*manifest)->record, strlen((*manifest)->record), 0);
        for (int i = 0; i < (*manifest)->tensor_count; i++)
            hash = hash * 31 + (*manifest)->tensors[i].hash;
        ML_TRY(ml_comm_agree(session->comm, hash, "the checkpoint that is loaded"));
    }
    status = ml_protect(match_body, l);
    if (status == ML_OK && strict) status = strict_check(l, all);
    ML_TRY(checkpoint_together(session, status, "match the checkpoint's tensors"));
    status = checkpoint_prepare(session, l->states, l->count);
    ML_TRY(checkpoint_together(session, status, "make its states ready"));
    return states_read(l);
}

ml_status ml_checkpoint_load(ml_session *session, const char *path,
                             const ml_checkpoint_entry *entries, int count, bool all, bool strict,
                             ml_checkpoint_report *report) {
    *report = (ml_checkpoint_report){0};
    ML_TRY(session_ready(session));
    load l = {session, path, entries, count, report};
    ml_status status = load_run(&l, all, strict);
    ml_error error = *ml_error_last();
    for (int i = 0; l.files != NULL && i < report->manifest->file_count; i++)
        ml_file_close(&l.files[i]);
    *ml_error_last() = error;
    return status;
}
