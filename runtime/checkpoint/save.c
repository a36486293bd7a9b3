/* Saves: a snapshot of what this rank writes, and the threads that write it. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/knobs.h"
#include "runtime/base/pool.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/parts.h"
#include "runtime/io/checkpoint_list.h"
#include "runtime/io/durable.h"
#include "runtime/io/tensor_hash.h"

static const int64_t FILE_BYTES = (int64_t)4 << 30; /* of a file, about */
static const double GIB = 1 << 30;
static const int64_t SPARE = (int64_t)1 << 30; /* of a device's memory, that stays free */
enum { THREADS = 4, PATH = 4096 };

typedef struct {
    checkpoint_box box; /* what this rank writes */
    char *memory;       /* its rows as they lay in the part: of the snapshot, or of the block */
    _Atomic uint64_t hash;
} save_item;

typedef struct save {
    ml_comm *comm; /* NULL: one rank */
    int rank, world;
    ml_manifest *manifest;
    save_item *items;  /* by tensor of the manifest */
    char *snapshot;    /* in host memory, or NULL: */
    ml_device *device; /* whose memory has it, in `block`; pieces are fetched into `buffers` */
    void *block;
    char *buffers; /* one of `largest` bytes for each thread */
    int64_t bytes, largest;
    pthread_mutex_t fetching;
    checkpoint_piece *pieces;
    int64_t piece_count;
    int *files;        /* by file of the manifest; -1: this rank writes nothing to it */
    int report;        /* `rank-N`, not of rank 0 */
    char folder[PATH]; /* temporary; once the save is `named`, what it has replaced */
    bool named;
    double began;
    ml_checkpoint_result result;
} save;

struct ml_checkpoint_writer {
    ml_session *session;
    save *current; /* its thread runs, or has ended and was not joined */
    pthread_t thread;
    _Atomic bool ended;
    bool threaded, has_result;
    ml_checkpoint_result result;
    pthread_t remover;
    char *removed; /* path that the remover removes; NULL: none since it was joined */
    ml_status removal;
    char problem[PATH + 256];
};

static void save_free(save *s) {
    if (s == NULL) return;
    for (int i = 0; s->files != NULL && i < s->manifest->file_count; i++)
        if (s->files[i] >= 0) close(s->files[i]);
    if (s->report >= 0) close(s->report);
    ml_manifest_free(s->manifest);
    ml_free(s->items);
    if (s->block != NULL) s->device->ops->set_aside(s->device, s->block);
    pthread_mutex_destroy(&s->fetching);
    ml_free(s->snapshot);
    ml_free(s->buffers);
    ml_free(s->pieces);
    ml_free(s->files);
    ml_free(s);
}

/* ---- Which states ---------------------------------------------------------------------------- */

typedef struct {
    ml_session *session;
    ml_arena *arena;
    ml_checkpoint_entry *entries;
    int count;
} states_call;

static void states_body(void *context) {
    states_call *call = context;
    const ml_graph *g = call->session->graph;
    const uint32_t count = ml_graph_state_count(g);
    call->entries = ML_NEW_ARRAY(call->arena, ml_checkpoint_entry, count + 1);
    for (uint32_t id = 0; id < count; id++) {
        const ml_state *state = ml_graph_state(g, id);
        if (state->name == NULL || state->kind == ML_STATE_GRADIENT ||
            state->kind == ML_STATE_CACHE)
            continue;
        call->entries[call->count++] = (ml_checkpoint_entry){id, state->name};
    }
}

ml_status ml_checkpoint_states(ml_session *session, ml_arena *arena,
                               const ml_checkpoint_entry **entries, int *count) {
    states_call call = {session, arena, NULL, 0};
    ml_status status = ml_protect(states_body, &call);
    *entries = call.entries;
    *count = call.count;
    return status;
}

typedef struct {
    const ml_session *session;
    save *save;
    const char *record;
    const ml_checkpoint_entry *entries;
    int count;
} describe_call;

static void describe_body(void *context) {
    const describe_call *call = context;
    const ml_graph *g = call->session->graph;
    ml_manifest *m = call->save->manifest;
    m->record = ml_arena_copy(m->arena, call->record, strlen(call->record));
    m->tensors = ML_NEW_ARRAY(m->arena, ml_manifest_tensor, call->count + 1);
    for (int i = 0; i < call->count; i++) {
        const ml_state *state = ml_graph_state(g, call->entries[i].state);
        ml_manifest_tensor *t = &m->tensors[m->tensor_count++];
        if (state->kind == ML_STATE_GRADIENT)
            ml_raise(ML_INVALID, "a sum of gradients lives within a step and cannot be saved");
        t->name = ml_arena_copy(m->arena, call->entries[i].name, strlen(call->entries[i].name));
        t->state = call->entries[i].state;
        t->model = state->kind == ML_STATE_PARAMETER;
        t->dtype = (ml_dtype)state->type.dtype;
        t->rank = state->type.rank;
        for (int k = 0; k < t->rank; k++) {
            t->size[k] = state->type.size[k];
            t->axis[k] = ml_axis_name(g, state->type.axis[k]);
            t->axis[k] = ml_arena_copy(m->arena, t->axis[k], strlen(t->axis[k]));
        }
    }
}

static ml_status names_differ(const ml_manifest *m) {
    for (int i = 0; i < m->tensor_count; i++)
        if (strcmp(m->tensors[i].name, "__metadata__") == 0)
            return ml_fail(ML_INVALID, "a state to be saved is called \"__metadata__\", which the "
                                       "format of safetensors keeps to itself");
    for (int i = 1; i < m->tensor_count; i++) /* sorted by name within each kind and width */
        if (strcmp(m->tensors[i].name, m->tensors[i - 1].name) == 0)
            return ml_fail(ML_INVALID, "two states to be saved are called \"%s\"",
                           m->tensors[i].name);
    return ML_OK;
}

/* All ranks save the same. */
static ml_status save_agree(const ml_session *session, const save *s) {
    uint64_t hash = ml_hash(s->result.path, strlen(s->result.path), 0);
    if (session->everyone == NULL) return ML_OK;
    for (int i = 0; i < s->manifest->file_count; i++) hash = hash * 31 + s->manifest->files[i].hash;
    return ml_comm_agree(session->comm, hash, "the states that are saved, or the folder");
}

/* ---- The snapshot ---------------------------------------------------------------------------- */

static ml_status states_ready(ml_session *session, const ml_manifest *m) {
    bool all = true;
    for (int i = 0; i < m->tensor_count; i++) {
        const uint32_t state = m->tensors[i].state;
        all = all && (!session_holds(session, state) || session->states[state].initialized);
    }
    if (!all) ML_TRY(session_initialize(session, NULL));
    for (int i = 0; i < m->tensor_count; i++) {
        const uint32_t state = m->tensors[i].state;
        if (session_holds(session, state) && !session->states[state].initialized)
            return ml_fail(ML_INVALID, "the state \"%s\" has no value yet", m->tensors[i].name);
    }
    return ML_OK;
}

static ml_status snapshot_place(const ml_session *session, save *s) {
    const ml_manifest *m = s->manifest;
    s->items = ml_alloc(sizeof *s->items * (size_t)(m->tensor_count + 1));
    s->files = ml_alloc(sizeof *s->files * (size_t)(m->file_count + 1));
    if (s->items == NULL || s->files == NULL)
        return ml_fail(ML_NO_MEMORY, "out of memory for a checkpoint");
    for (int i = 0; i < m->file_count; i++) s->files[i] = -1;
    for (int i = 0; i < m->tensor_count; i++) {
        save_item *item = &s->items[i];
        ML_TRY(checkpoint_box_of(session, m->tensors[i].state, true, &item->box));
        s->bytes += item->box.held[0] * checkpoint_row_bytes(&item->box);
        s->piece_count += checkpoint_pieces(&item->box, i, NULL);
        s->result.bytes += checkpoint_box_bytes(&item->box);
    }
    s->pieces = ml_alloc(sizeof *s->pieces * (size_t)(s->piece_count + 1));
    if (s->pieces == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a checkpoint");
    checkpoint_piece *piece = s->pieces;
    for (int i = 0; i < m->tensor_count; i++)
        piece += checkpoint_pieces(&s->items[i].box, i, piece);
    for (int64_t i = 0; i < s->piece_count; i++) {
        const int64_t row = checkpoint_row_bytes(&s->items[s->pieces[i].item].box);
        const int64_t bytes = (s->pieces[i].end - s->pieces[i].begin) * row;
        if (s->largest < bytes) s->largest = bytes;
    }
    return ML_OK;
}

/* Room for the snapshot on the device where it has some to spare, else in host memory. */
static ml_status snapshot_room(ml_session *session, save *s) {
    ml_device *device = session->device;
    const int64_t used = device->current_bytes + s->bytes + SPARE;
    if (device->ops->fetch != NULL && s->bytes > 0 && used < device->target.memory_bytes &&
        device->ops->allocate(device, s->bytes, &s->block) == ML_OK) {
        s->device = device;
        ml_debug(1, "checkpoint: %.3f GiB are copied on the device\n", (double)s->bytes / GIB);
        s->buffers = ml_alloc((size_t)s->largest * THREADS + 1);
        if (s->buffers == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a checkpoint");
        return ML_OK;
    }
    s->snapshot = ml_alloc((size_t)s->bytes + 1);
    if (s->snapshot != NULL) return ML_OK;
    ml_fail(ML_NO_MEMORY, "out of memory for a snapshot of %lld bytes", (long long)s->bytes);
    return ml_help("a save keeps a copy of what this rank writes in host memory until it is done");
}

static ml_status snapshot_take(ml_session *session, save *s) {
    char *to = s->block != NULL ? s->block : s->snapshot;
    ml_device *device = session->device;
    if (s->block == NULL) ML_TRY(device->ops->wait(device));
    for (int i = 0; i < s->manifest->tensor_count; i++) {
        save_item *item = &s->items[i];
        const int64_t row = checkpoint_row_bytes(&item->box), bytes = item->box.held[0] * row;
        const char *memory = session->states[s->manifest->tensors[i].state].memory;
        item->memory = to;
        if (bytes == 0) continue;
        memory += item->box.row * row;
        if (s->block != NULL)
            ML_TRY(device->ops->copy(device, to, memory, bytes));
        else
            ML_TRY(device->ops->download(device, to, memory, bytes));
        to += bytes;
    }
    return s->block != NULL ? device->ops->mark(device) : ML_OK;
}

/* ---- The folder ------------------------------------------------------------------------------ */

/* A folder of other things is not replaced. */
static ml_status path_check(const char *path) {
    char manifest[PATH + 16];
    struct stat status;
    if (lstat(path, &status) != 0) return ML_OK;
    if (!S_ISDIR(status.st_mode)) return ml_fail(ML_IO, "%s is not a folder", path);
    snprintf(manifest, sizeof manifest, "%s/manifest.json", path);
    if (access(manifest, F_OK) == 0) return ML_OK;
    DIR *folder = opendir(path);
    if (folder == NULL)
        return ml_fail(ML_IO, "cannot open the folder %s: %s", path, strerror(errno));
    int others = 0;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
        others += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(folder);
    if (others == 0) return ML_OK;
    ml_fail(ML_IO, "%s holds files that are no checkpoint", path);
    return ml_help("name a folder that is not there yet, or the checkpoint that is to be replaced");
}

/* Rank 0: the temporary folder, in which rests of saves of that name are removed before. */
static ml_status folder_make(save *s, uint64_t number) {
    const char *path = s->result.path, *name = strrchr(path, '/');
    char parent[PATH] = ".";
    if (name != NULL) snprintf(parent, sizeof parent, "%.*s", (int)(name - path), path);
    if (name == path) strcpy(parent, "/");
    ML_TRY(ml_durable_folders(parent));
    ML_TRY(path_check(path));
    ML_TRY(ml_checkpoint_sweep(parent, name ? name + 1 : path));
    ml_checkpoint_temporary(path, number, s->folder);
    return ml_durable_folder(s->folder);
}

static void report_name(const save *s, int rank, char name[PATH + 16]) {
    snprintf(name, PATH + 16, "%s/rank-%d", s->folder, rank);
}

static void folder_drop(const save *s) {
    ml_error error = *ml_error_last();
    ml_durable_remove(s->folder);
    *ml_error_last() = error;
}

/* All ranks: the folder is there, and a file of each rank in it. */
static ml_status folder_enter(const ml_session *session, save *s) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t number = ((uint64_t)t.tv_sec << 32 | (uint64_t)t.tv_nsec) ^ (uint64_t)getpid() << 40;
    if (session->everyone != NULL) ML_TRY(ml_comm_share(session->comm, &number, sizeof number));
    ml_checkpoint_temporary(s->result.path, number, s->folder);
    ml_status status = s->rank == 0 ? folder_make(s, number) : ML_OK;
    ML_TRY(checkpoint_together(session, status, "make the checkpoint's folder"));
    char name[PATH + 16];
    report_name(s, s->rank, name);
    if (s->rank > 0) status = ml_durable_open(name, &s->report);
    status = checkpoint_together(session, status, "write into the checkpoint's folder");
    if (status != ML_OK && s->rank == 0) folder_drop(s);
    return status;
}

/* ---- Writing: on threads of its own ---------------------------------------------------------- */

static void file_name(const save *s, int file, char name[PATH + ML_MANIFEST_FILE_NAME]) {
    snprintf(name, PATH + ML_MANIFEST_FILE_NAME, "%s/%s", s->folder, s->manifest->files[file].name);
}

/* The files that this rank writes to; rank 0 writes heads and gives files their sizes. */
static ml_status files_open(save *s) {
    const ml_manifest *m = s->manifest;
    char name[PATH + ML_MANIFEST_FILE_NAME];
    for (int i = 0; i < m->tensor_count + m->file_count; i++) {
        const bool own = i < m->tensor_count && checkpoint_box_bytes(&s->items[i].box) > 0;
        const int file = i < m->tensor_count ? m->tensors[i].file : i - m->tensor_count;
        if (s->files[file] >= 0 || !(own || s->rank == 0)) continue;
        file_name(s, file, name);
        ML_TRY(ml_durable_open(name, &s->files[file]));
        if (s->rank != 0) continue;
        ML_TRY(ml_durable_write(s->files[file], name, 0, m->files[file].text, m->files[file].head));
        if (ftruncate(s->files[file], (off_t)m->files[file].bytes) != 0)
            return ml_fail(ML_IO, "cannot write %s: %s", name, strerror(errno));
    }
    return ML_OK;
}

typedef struct {
    const save *save;
    const ml_manifest_tensor *tensor;
    const char *memory;
    const char *name; /* of the file */
    int width;
    uint64_t hash;
} write_call;

static ml_status run_write(void *context, int64_t whole, int64_t part, int64_t bytes) {
    write_call *call = context;
    const ml_manifest_tensor *t = call->tensor;
    call->hash +=
        ml_tensor_hash(call->memory + part, call->width, whole / call->width, bytes / call->width);
    return ml_durable_write(call->save->files[t->file], call->name, t->offset + whole,
                            call->memory + part, bytes);
}

/* The piece's rows in host memory. */
static const char *piece_rows(save *s, const checkpoint_piece *piece, int thread) {
    const save_item *item = &s->items[piece->item];
    const int64_t row = checkpoint_row_bytes(&item->box);
    const char *rows = item->memory + piece->begin * row;
    if (s->block == NULL) return rows;
    char *buffer = s->buffers + s->largest * thread;
    pthread_mutex_lock(&s->fetching);
    ml_status status =
        s->device->ops->fetch(s->device, buffer, rows, (piece->end - piece->begin) * row);
    pthread_mutex_unlock(&s->fetching);
    if (status != ML_OK) ml_raise_last();
    return buffer;
}

static void pieces_write(void *context, int64_t begin, int64_t end, int thread) {
    save *s = context;
    for (int64_t i = begin; i < end; i++) {
        const checkpoint_piece *piece = &s->pieces[i];
        save_item *item = &s->items[piece->item];
        char name[PATH + ML_MANIFEST_FILE_NAME];
        checkpoint_box box = checkpoint_box_rows(&item->box, piece->begin, piece->end);
        write_call call = {s, &s->manifest->tensors[piece->item], NULL, name, box.width, 0};
        call.memory = piece_rows(s, piece, thread);
        file_name(s, call.tensor->file, name);
        ML_CHECK(checkpoint_runs(&box, run_write, &call));
        atomic_fetch_add(&item->hash, call.hash);
    }
}

static ml_status part_write(save *s) {
    char name[PATH + ML_MANIFEST_FILE_NAME];
    ML_TRY(files_open(s));
    int threads = ml_cpu_count() < THREADS ? ml_cpu_count() : THREADS;
    ml_pool *pool = ml_pool_new(threads);
    if (pool == NULL) return ml_fail(ML_NO_MEMORY, "no threads for writing a checkpoint");
    ml_status status = ML_OK;
    if (s->piece_count > 0)
        status = ml_pool_run(pool, s->piece_count, s->piece_count, pieces_write, s);
    ml_pool_free(pool);
    for (int i = 0; i < s->manifest->file_count && status == ML_OK; i++) {
        if (s->files[i] < 0) continue;
        file_name(s, i, name);
        status = ml_durable_sync(s->files[i], name);
    }
    return status;
}

/* Of ranks but the first: the hashes of what was written, and a hash of those. */
static ml_status report_write(const save *s) {
    char name[PATH + 16];
    const size_t count = (size_t)s->manifest->tensor_count;
    uint64_t *hashes = ml_alloc((count + 1) * sizeof *hashes);
    if (hashes == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a checkpoint");
    report_name(s, s->rank, name);
    for (size_t i = 0; i < count; i++) hashes[i] = s->items[i].hash;
    hashes[count] = ml_hash(hashes, count * sizeof *hashes, 1);
    ml_status status =
        ml_durable_write(s->report, name, 0, hashes, (int64_t)((count + 1) * sizeof *hashes));
    ml_free(hashes);
    return status;
}

/* Rank 0: wait for the report of another rank, and add its hashes. */
static ml_status report_await(save *s, int rank, uint64_t *hashes) {
    char name[PATH + 16];
    const size_t count = (size_t)s->manifest->tensor_count, bytes = (count + 1) * sizeof *hashes;
    report_name(s, rank, name);
    for (long wait = 1000000;; wait = wait < 50000000 ? 2 * wait : wait) {
        int file = open(name, O_RDONLY | O_CLOEXEC);
        if (file < 0 && errno == ENOENT)
            return ml_fail(ML_IO, "rank %d could not write its part of %s", rank, s->result.path);
        ssize_t got = file < 0 ? 0 : pread(file, hashes, bytes, 0);
        if (file >= 0) close(file);
        if (got == (ssize_t)bytes && hashes[count] == ml_hash(hashes, bytes - sizeof *hashes, 1))
            break;
        ML_TRY(ml_comm_check(s->comm));
        nanosleep(&(struct timespec){.tv_nsec = wait}, NULL);
    }
    for (size_t i = 0; i < count; i++) atomic_fetch_add(&s->items[i].hash, hashes[i]);
    return ML_OK;
}

static ml_status reports_gather(save *s) {
    char name[PATH + 16];
    uint64_t *hashes = ml_alloc(((size_t)s->manifest->tensor_count + 1) * sizeof *hashes);
    if (hashes == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a checkpoint");
    ml_status status = ML_OK;
    for (int rank = 1; rank < s->world && status == ML_OK; rank++)
        status = report_await(s, rank, hashes);
    ml_free(hashes);
    for (int rank = 1; rank < s->world && status == ML_OK; rank++) {
        report_name(s, rank, name);
        status = ml_durable_unlink(name);
    }
    return status;
}

/* Rank 0, when all parts are durable: the manifest, and the name. */
static ml_status folder_finish(save *s) {
    char name[PATH + 16];
    const char *text;
    bool swapped;
    ML_TRY(reports_gather(s));
    for (int i = 0; i < s->manifest->tensor_count; i++)
        s->manifest->tensors[i].hash = s->items[i].hash;
    ML_TRY(ml_manifest_text(s->manifest, &text));
    snprintf(name, sizeof name, "%s/manifest.json", s->folder);
    ML_TRY(ml_durable_file(name, text, strlen(text)));
    ML_TRY(ml_durable_sync_folder(s->folder));
    ML_TRY(ml_durable_rename(s->folder, s->result.path, &swapped));
    s->named = true;
    ML_TRY(ml_durable_sync_parent(s->result.path));
    return swapped ? ml_durable_remove(s->folder) : ML_OK; /* what was replaced */
}

static void *save_thread(void *context) {
    ml_checkpoint_writer *writer = context;
    save *s = writer->current;
    char name[PATH + 16];
    ml_status status = part_write(s);
    if (status == ML_OK) status = s->rank == 0 ? folder_finish(s) : report_write(s);
    if (status != ML_OK) {
        s->result.status = status;
        snprintf(s->result.problem, sizeof s->result.problem, "%s", ml_error_last()->text);
        snprintf(s->result.help, sizeof s->result.help, "%s", ml_error_last()->help);
        report_name(s, s->rank, name);
        if (s->rank > 0)
            ml_durable_unlink(name);
        else if (!s->named)
            ml_durable_remove(s->folder);
    }
    s->result.seconds = ml_clock_now() - s->began;
    atomic_store(&writer->ended, true);
    return NULL;
}

/* ---- The writer ------------------------------------------------------------------------------ */

ml_status ml_checkpoint_writer_new(ml_session *session, ml_checkpoint_writer **writer) {
    *writer = ml_alloc(sizeof **writer);
    if (*writer == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for saving");
    (*writer)->session = session;
    return ML_OK;
}

static void writer_join(ml_checkpoint_writer *writer) {
    if (writer->current == NULL) return;
    if (writer->threaded) pthread_join(writer->thread, NULL);
    writer->result = writer->current->result;
    writer->has_result = true;
    save_free(writer->current);
    writer->current = NULL;
}

void ml_checkpoint_writer_free(ml_checkpoint_writer *writer) {
    if (writer == NULL) return;
    writer_join(writer);
    ml_checkpoint_remove(writer, NULL);
    ml_free(writer);
}

/* A large file takes long to remove: the file system frees its blocks and its cached pages. */
static void *remove_thread(void *context) {
    ml_checkpoint_writer *writer = context;
    writer->removal = ml_durable_remove(writer->removed);
    if (writer->removal != ML_OK)
        snprintf(writer->problem, sizeof writer->problem, "%s", ml_error_last()->text);
    return NULL;
}

/* A thread that takes no signals: they are the script's. */
static bool thread_start(pthread_t *thread, void *(*body)(void *), ml_checkpoint_writer *writer) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    const bool started = pthread_create(thread, NULL, body, writer) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

ml_status ml_checkpoint_remove(ml_checkpoint_writer *writer, const char *path) {
    ml_status status = ML_OK;
    if (writer->removed != NULL) {
        pthread_join(writer->remover, NULL);
        ml_free(writer->removed);
        writer->removed = NULL;
        if (writer->removal != ML_OK) status = ml_fail(writer->removal, "%s", writer->problem);
    }
    if (path == NULL) return status;
    const size_t bytes = strlen(path) + 1;
    writer->removed = ml_alloc(bytes);
    if (writer->removed != NULL) {
        memcpy(writer->removed, path, bytes);
        if (thread_start(&writer->remover, remove_thread, writer)) return status;
        ml_free(writer->removed);
        writer->removed = NULL;
    }
    ml_error before = *ml_error_last();
    ml_status removal = ml_durable_remove(path);
    if (removal == ML_OK) *ml_error_last() = before;
    return status != ML_OK && removal == ML_OK ? status : removal;
}

/* If the thread cannot be started, the caller writes, because the other ranks have begun. */
static void writer_start(ml_checkpoint_writer *writer, save *s) {
    writer->current = s;
    atomic_store(&writer->ended, false);
    writer->threaded = thread_start(&writer->thread, save_thread, writer);
    if (!writer->threaded) save_thread(writer);
}

/* The states are ready and all ranks' snapshots have room. */
static ml_status save_prepare(ml_session *session, save *s, const describe_call *describe) {
    ml_manifest *m;
    ML_TRY(ml_manifest_new(&s->manifest));
    m = s->manifest;
    ML_TRY(ml_protect(describe_body, (void *)describe));
    ML_TRY(ml_manifest_place(m, FILE_BYTES));
    ML_TRY(names_differ(m));
    uint32_t *states = ml_alloc(sizeof *states * (size_t)(m->tensor_count + 1));
    if (states == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a checkpoint");
    for (int i = 0; i < m->tensor_count; i++) states[i] = m->tensors[i].state;
    ml_status status = checkpoint_prepare(session, states, m->tensor_count);
    ml_free(states);
    if (status == ML_OK) status = states_ready(session, m);
    if (status == ML_OK) status = snapshot_place(session, s);
    return status == ML_OK ? snapshot_room(session, s) : status;
}

static ml_status save_begin(ml_session *session, save *s, const describe_call *describe) {
    ML_TRY(session_ready(session));
    ml_status status = save_prepare(session, s, describe);
    ML_TRY(checkpoint_together(session, status, "prepare the save"));
    ML_TRY(save_agree(session, s));
    ML_TRY(folder_enter(session, s));
    status = checkpoint_together(session, snapshot_take(session, s), "take the snapshot");
    if (status != ML_OK && s->rank == 0) folder_drop(s);
    return status;
}

static ml_status save_new(const ml_session *session, save **made) {
    save *s = *made = ml_alloc(sizeof *s);
    if (s == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a checkpoint");
    s->report = -1;
    pthread_mutex_init(&s->fetching, NULL);
    s->began = ml_clock_now();
    s->world = 1;
    if (session->everyone != NULL) {
        s->comm = session->comm;
        s->rank = session->ranks.rank;
        s->world = ml_comm_world(session->comm);
    }
    return ML_OK;
}

ml_status ml_checkpoint_rehearse(ml_checkpoint_writer *writer, const ml_checkpoint_entry *entries,
                                 int count) {
    ml_session *session = writer->session;
    save *s;
    if (session->device->ops->mark == NULL || writer->current != NULL) return ML_OK;
    ML_TRY(save_new(session, &s));
    describe_call describe = {session, s, "{}", entries, count};
    ml_status status = session_ready(session);
    if (status == ML_OK) status = save_prepare(session, s, &describe);
    if (status == ML_OK) status = session->device->ops->mark(session->device);
    status = checkpoint_together(session, status, "prepare a save");
    save_free(s);
    return status;
}

ml_status ml_checkpoint_begin(ml_checkpoint_writer *writer, const char *path, const char *record,
                              const ml_checkpoint_entry *entries, int count) {
    ml_session *session = writer->session;
    writer_join(writer);
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') length--;
    if (length == 0 || length + ML_CHECKPOINT_TEMPORARY > PATH)
        return ml_fail(ML_INVALID, "a checkpoint needs the path of a folder");
    save *s;
    ML_TRY(save_new(session, &s));
    snprintf(s->result.path, sizeof s->result.path, "%.*s", (int)length, path);
    describe_call describe = {session, s, record, entries, count};
    ml_status status = save_begin(session, s, &describe);
    s->result.stall = ml_clock_now() - s->began;
    if (status == ML_OK)
        writer_start(writer, s);
    else
        save_free(s);
    return status;
}

bool ml_checkpoint_poll(ml_checkpoint_writer *writer, ml_checkpoint_result *result) {
    if (writer->current != NULL && atomic_load(&writer->ended)) writer_join(writer);
    if (!writer->has_result) return false;
    *result = writer->result;
    result->own = true;
    writer->has_result = false;
    return true;
}

ml_status ml_checkpoint_wait(ml_checkpoint_writer *writer, bool *found,
                             ml_checkpoint_result *result) {
    const ml_session *session = writer->session;
    writer_join(writer);
    struct {
        bool found;
        ml_checkpoint_result result;
    } outcome = {writer->has_result, writer->result};
    ml_status status = ML_OK;
    if (session->everyone != NULL) status = ml_comm_share(session->comm, &outcome, sizeof outcome);
    /* a rank that could not write says why; rank 0 knows only that */
    const bool own = writer->has_result && writer->result.status != ML_OK;
    writer->has_result = false;
    *found = status == ML_OK && (own || outcome.found);
    *result = own ? writer->result : outcome.result;
    result->own = own;
    return status;
}
