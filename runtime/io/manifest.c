#include "runtime/io/manifest.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/graph/ops.h"
#include "runtime/io/file.h"

/* "{"hash":"0123456789abcdef","; the hash is of what follows. */
enum { HASH_AT = 9, HASH_DIGITS = 16, HASHED_FROM = HASH_AT + HASH_DIGITS + 2, FORMAT = 1 };
enum { MANIFEST_LIMIT = 1 << 30 };

ml_status ml_manifest_new(ml_manifest **manifest) {
    ml_manifest *made = *manifest = ml_alloc(sizeof *made);
    if (made != NULL && (made->arena = ml_arena_new()) != NULL) return ML_OK;
    ml_free(made);
    *manifest = NULL;
    return ml_fail(ML_NO_MEMORY, "out of memory for a checkpoint's manifest");
}

void ml_manifest_free(ml_manifest *manifest) {
    if (manifest == NULL) return;
    ml_arena_free(manifest->arena);
    ml_free(manifest);
}

static void release_text(char *text) {
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(text);
}

typedef struct {
    ml_manifest *manifest;
    const char *from;
    char *text;
} copy_call;

static void copy_body(void *context) {
    copy_call *call = context;
    call->text = ml_arena_copy(call->manifest->arena, call->from, strlen(call->from));
}

static ml_status copy_text(ml_manifest *manifest, const char *from, char **text) {
    copy_call call = {manifest, from, NULL};
    ml_status status = ml_protect(copy_body, &call);
    *text = call.text;
    return status;
}

/* A text of jansson's, in the manifest's arena; raises. */
static char *keep_text(ml_manifest *manifest, char *text) {
    if (text == NULL) ml_raise(ML_NO_MEMORY, "out of memory for a checkpoint's manifest");
    char *copy = NULL;
    ml_status status = copy_text(manifest, text, &copy);
    release_text(text);
    ML_CHECK(status);
    return copy;
}

/* ---- Places ---------------------------------------------------------------------------------- */

static int by_place(const void *a, const void *b) {
    const ml_manifest_tensor *x = a, *y = b;
    if (x->model != y->model) return x->model ? -1 : 1;
    int wide = ml_dtypes[y->dtype].bytes - ml_dtypes[x->dtype].bytes;
    return wide != 0 ? wide : strcmp(x->name, y->name);
}

static json_t *shape_json(const ml_manifest_tensor *t) {
    json_t *shape = json_array();
    for (int k = 0; k < t->rank; k++) json_array_append_new(shape, json_integer(t->size[k]));
    return shape;
}

/* The header of a safetensors file of tensors [first, end), padded to 8 bytes; NULL: no memory. */
static char *header_text(const ml_manifest_tensor *t, int count) {
    json_t *header = json_object();
    int64_t at = 0;
    json_object_set_new(header, "__metadata__", json_pack("{s:s}", "format", "pt"));
    for (int i = 0; i < count; i++) {
        json_object_set_new(header, t[i].name,
                            json_pack("{s:s,s:o,s:[I,I]}", "dtype",
                                      ml_dtypes[t[i].dtype].safetensors, "shape", shape_json(&t[i]),
                                      "data_offsets", (json_int_t)at,
                                      (json_int_t)(at + t[i].bytes)));
        at += t[i].bytes;
    }
    char *text = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    return text;
}

/* The file's head, length included, and the tensors' offsets. */
static void file_place(ml_manifest *m, ml_manifest_file *file, int first, int count) {
    char *text = keep_text(m, header_text(m->tensors + first, count));
    size_t length = strlen(text), padded = (length + 7) / 8 * 8;
    char *head = ml_arena_alloc(m->arena, padded + 9);
    for (int i = 0; i < 8; i++) head[i] = (char)((uint64_t)padded >> 8 * i);
    memset(head + 8, ' ', padded);
    memcpy(head + 8, text, length);
    file->text = head;
    file->head = (int64_t)padded + 8;
    file->bytes = file->head;
    for (int i = first; i < first + count; i++) {
        m->tensors[i].offset = file->bytes;
        file->bytes += m->tensors[i].bytes;
    }
}

static void index_place(ml_manifest *m, ml_manifest_file *file) {
    json_t *map = json_object();
    int64_t total = 0;
    for (int i = 0; i < m->tensor_count; i++) {
        if (!m->tensors[i].model) continue;
        json_object_set_new(map, m->tensors[i].name,
                            json_string(m->files[m->tensors[i].file].name));
        total += m->tensors[i].bytes;
    }
    json_t *index =
        json_pack("{s:{s:I},s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char *text = index ? json_dumps(index, JSON_INDENT(1)) : NULL;
    json_decref(index);
    file->text = keep_text(m, text);
    file->head = file->bytes = (int64_t)strlen(file->text);
    strcpy(file->name, "model.safetensors.index.json");
}

/* How many tensors from `first` on share a file. */
static int file_extent(const ml_manifest *m, int first, int64_t limit) {
    int64_t bytes = m->tensors[first].bytes;
    int i = first + 1;
    for (; i < m->tensor_count && m->tensors[i].model == m->tensors[first].model; i++)
        if ((bytes += m->tensors[i].bytes) > limit) break;
    return i - first;
}

static void files_place(ml_manifest *m, int64_t limit) {
    m->files = ML_NEW_ARRAY(m->arena, ml_manifest_file, m->tensor_count + 1);
    int of[2] = {0, 0}, number[2] = {0, 0};
    for (int at = 0; at < m->tensor_count; at += file_extent(m, at, limit))
        of[m->tensors[at].model]++;
    for (int at = 0, count; at < m->tensor_count; at += count) {
        const int model = m->tensors[at].model;
        ml_manifest_file *file = &m->files[m->file_count];
        count = file_extent(m, at, limit);
        for (int i = at; i < at + count; i++) m->tensors[i].file = m->file_count;
        snprintf(file->name, sizeof file->name, "%s-%05d-of-%05d.safetensors",
                 model ? "model" : "state", ++number[model], of[model]);
        file_place(m, file, at, count);
        m->file_count++;
    }
    if (of[1] > 0) index_place(m, &m->files[m->file_count++]);
    for (int i = 0; i < m->file_count; i++)
        m->files[i].hash = ml_hash(m->files[i].text, (size_t)m->files[i].head, 0);
}

typedef struct {
    ml_manifest *manifest;
    int64_t limit;
} place_call;

static void place_body(void *context) {
    const place_call *call = context;
    ml_manifest *m = call->manifest;
    for (int i = 0; i < m->tensor_count; i++) {
        ml_manifest_tensor *t = &m->tensors[i];
        t->bytes = ml_dtypes[t->dtype].bytes;
        for (int k = 0; k < t->rank; k++) t->bytes *= t->size[k];
        json_t *name = json_string(t->name);
        if (name == NULL) ml_raise(ML_INVALID, "a state's name is not UTF-8: it cannot be saved");
        json_decref(name);
    }
    if (m->tensor_count > 0)
        qsort(m->tensors, (size_t)m->tensor_count, sizeof *m->tensors, by_place);
    files_place(m, call->limit);
}

ml_status ml_manifest_place(ml_manifest *manifest, int64_t limit) {
    place_call call = {manifest, limit};
    return ml_protect(place_body, &call);
}

/* ---- Text ------------------------------------------------------------------------------------ */

static json_t *hash_json(uint64_t hash) {
    return json_sprintf("%016" PRIx64, hash);
}

static json_t *manifest_json(const ml_manifest *m, json_t *record) {
    json_t *files = json_array(), *tensors = json_array();
    for (int i = 0; i < m->file_count; i++) {
        const ml_manifest_file *f = &m->files[i];
        json_array_append_new(files, json_pack("{s:s,s:I,s:I,s:o}", "name", f->name, "bytes",
                                               (json_int_t)f->bytes, "head", (json_int_t)f->head,
                                               "hash", hash_json(f->hash)));
    }
    for (int i = 0; i < m->tensor_count; i++) {
        const ml_manifest_tensor *t = &m->tensors[i];
        json_t *axes = json_array();
        for (int k = 0; k < t->rank; k++)
            json_array_append_new(axes, json_pack("[s,I]", t->axis[k], (json_int_t)t->size[k]));
        json_array_append_new(tensors,
                              json_pack("{s:s,s:s,s:o,s:s,s:I,s:I,s:o}", "name", t->name, "dtype",
                                        ml_dtypes[t->dtype].name, "axes", axes, "file",
                                        m->files[t->file].name, "offset", (json_int_t)t->offset,
                                        "bytes", (json_int_t)t->bytes, "hash", hash_json(t->hash)));
    }
    return json_pack("{s:s,s:i,s:o,s:o,s:o}", "hash", "0000000000000000", "format", FORMAT,
                     "record", record, "files", files, "tensors", tensors);
}

ml_status ml_manifest_text(ml_manifest *manifest, const char **text) {
    json_error_t problem;
    json_t *record = json_loads(manifest->record, JSON_REJECT_DUPLICATES, &problem);
    if (!json_is_object(record)) {
        json_decref(record);
        return ml_fail(ML_INVALID, "the record of a checkpoint is no JSON object: %s",
                       problem.text);
    }
    json_t *all = manifest_json(manifest, record);
    char *made = all ? json_dumps(all, JSON_COMPACT) : NULL, *copy = NULL, hex[HASH_DIGITS + 1];
    json_decref(all);
    if (made == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a checkpoint's manifest");
    ml_status status = copy_text(manifest, made, &copy);
    release_text(made);
    if (status != ML_OK) return status;
    snprintf(hex, sizeof hex, "%016" PRIx64,
             ml_hash(copy + HASHED_FROM, strlen(copy + HASHED_FROM), 0));
    memcpy(copy + HASH_AT, hex, HASH_DIGITS);
    *text = copy;
    return ML_OK;
}

/* ---- Reading --------------------------------------------------------------------------------- */

static bool read_hash(const json_t *value, uint64_t *hash) {
    const char *text = json_string_value(value);
    char *end;
    if (text == NULL || strlen(text) != HASH_DIGITS) return false;
    *hash = strtoull(text, &end, 16);
    return *end == 0;
}

static bool read_bytes(const json_t *value, int64_t *bytes) {
    *bytes = json_integer_value(value);
    return json_is_integer(value) && *bytes >= 0;
}

static bool parse_file(const json_t *entry, ml_manifest_file *f) {
    const char *name = json_string_value(json_object_get(entry, "name"));
    if (name == NULL || strlen(name) >= sizeof f->name || strchr(name, '/') || name[0] == '.')
        return false;
    strcpy(f->name, name);
    return read_bytes(json_object_get(entry, "bytes"), &f->bytes) &&
           read_bytes(json_object_get(entry, "head"), &f->head) && f->head <= f->bytes &&
           read_hash(json_object_get(entry, "hash"), &f->hash);
}

static bool parse_axes(ml_manifest *m, const json_t *axes, ml_manifest_tensor *t) {
    int64_t bytes = ml_dtypes[t->dtype].bytes;
    if (!json_is_array(axes) || json_array_size(axes) > ML_MAX_AXES) return false;
    t->rank = (int)json_array_size(axes);
    for (int k = 0; k < t->rank; k++) {
        const json_t *pair = json_array_get(axes, (size_t)k);
        const char *axis = json_string_value(json_array_get(pair, 0));
        if (axis == NULL || !read_bytes(json_array_get(pair, 1), &t->size[k])) return false;
        if (__builtin_mul_overflow(bytes, t->size[k], &bytes)) return false;
        t->axis[k] = ml_arena_copy(m->arena, axis, strlen(axis));
    }
    return bytes == t->bytes;
}

static bool parse_tensor(ml_manifest *m, const json_t *entry, ml_manifest_tensor *t) {
    const char *name = json_string_value(json_object_get(entry, "name"));
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const char *file = json_string_value(json_object_get(entry, "file"));
    if (name == NULL || dtype == NULL || file == NULL) return false;
    t->name = ml_arena_copy(m->arena, name, strlen(name));
    t->dtype = ML_DTYPE_COUNT;
    for (ml_dtype d = 0; d < ML_DTYPE_COUNT; d++)
        if (strcmp(ml_dtypes[d].name, dtype) == 0) t->dtype = d;
    t->file = -1;
    for (int i = 0; i < m->file_count; i++)
        if (strcmp(m->files[i].name, file) == 0) t->file = i;
    if (t->dtype == ML_DTYPE_COUNT || t->file < 0) return false;
    const ml_manifest_file *f = &m->files[t->file];
    t->model = strncmp(f->name, "model-", 6) == 0;
    return read_bytes(json_object_get(entry, "offset"), &t->offset) &&
           read_bytes(json_object_get(entry, "bytes"), &t->bytes) && t->offset >= f->head &&
           t->bytes <= f->bytes && t->offset <= f->bytes - t->bytes &&
           read_hash(json_object_get(entry, "hash"), &t->hash) &&
           parse_axes(m, json_object_get(entry, "axes"), t);
}

static uint64_t name_hash(const char *name) {
    return ml_hash(name, strlen(name), 0);
}

typedef struct {
    ml_manifest *manifest;
    const char *path;
    json_t *root;
} parse_call;

static void parse_body(void *context) {
    const parse_call *call = context;
    ml_manifest *m = call->manifest;
    const json_t *files = json_object_get(call->root, "files");
    const json_t *tensors = json_object_get(call->root, "tensors");
    bool good = json_is_array(files) && json_is_array(tensors);
    int file_count = good ? (int)json_array_size(files) : 0;
    int tensor_count = good ? (int)json_array_size(tensors) : 0;
    m->files = ML_NEW_ARRAY(m->arena, ml_manifest_file, file_count + 1);
    m->tensors = ML_NEW_ARRAY(m->arena, ml_manifest_tensor, tensor_count + 1);
    for (int i = 0; i < file_count && good; i++, m->file_count++)
        good = parse_file(json_array_get(files, (size_t)i), &m->files[i]);
    for (int i = 0; i < tensor_count && good; i++, m->tensor_count++)
        good = parse_tensor(m, json_array_get(tensors, (size_t)i), &m->tensors[i]);
    m->names.arena = m->arena;
    for (int i = 0; i < m->tensor_count; i++)
        ml_index_add(&m->names, name_hash(m->tensors[i].name), (uint32_t)i);
    if (!good) ml_raise(ML_IO, "%s is malformed", call->path);
}

static ml_status parse_text(ml_manifest *m, const char *path, const char *text, size_t length) {
    char hex[HASH_DIGITS + 1] = "";
    if (length > HASHED_FROM)
        snprintf(hex, sizeof hex, "%016" PRIx64,
                 ml_hash(text + HASHED_FROM, length - HASHED_FROM, 0));
    if (length <= HASHED_FROM || memcmp(text + HASH_AT, hex, HASH_DIGITS) != 0 ||
        memcmp(text, "{\"hash\":\"", HASH_AT) != 0 || memcmp(text + HASHED_FROM - 2, "\",", 2) != 0)
        return ml_fail(ML_IO, "%s is damaged: its text is not the one that was written", path);
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, NULL);
    json_t *record = json_object_get(root, "record");
    ml_status status = ML_OK;
    if (!json_is_object(root) || !json_is_object(record))
        status = ml_fail(ML_IO, "%s is malformed", path);
    if (status == ML_OK && json_integer_value(json_object_get(root, "format")) != FORMAT)
        status = ml_fail(ML_IO, "%s is of a format that this version does not know", path);
    parse_call call = {m, path, root};
    if (status == ML_OK) status = ml_protect(parse_body, &call);
    char *record_text = status == ML_OK ? json_dumps(record, JSON_COMPACT) : NULL, *copy = NULL;
    if (record_text != NULL) status = copy_text(m, record_text, &copy);
    if (record_text != NULL) release_text(record_text);
    m->record = copy;
    json_decref(root);
    if (status == ML_OK && copy == NULL)
        return ml_fail(ML_NO_MEMORY, "out of memory while reading %s", path);
    return status;
}

/* The first `bytes` of a file, with a final 0; *text is released by the caller. */
static ml_status read_head(const ml_file *file, int64_t bytes, char **text) {
    *text = ml_alloc((size_t)bytes + 1);
    if (*text == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while reading %s", file->path);
    return ml_file_read(file, 0, *text, bytes);
}

static ml_status check_file(const char *folder, const ml_manifest_file *f) {
    char path[4096], *head = NULL;
    ml_file file;
    snprintf(path, sizeof path, "%s/%s", folder, f->name);
    ML_TRY(ml_file_open(path, &file));
    ml_status status = ML_OK;
    if (file.bytes != f->bytes)
        status = ml_fail(ML_IO, "%s is damaged: it has %lld bytes, and %lld were written", path,
                         (long long)file.bytes, (long long)f->bytes);
    if (status == ML_OK) status = read_head(&file, f->head, &head);
    if (status == ML_OK && ml_hash(head, (size_t)f->head, 0) != f->hash)
        status = ml_fail(ML_IO, "%s is damaged: its %s is not the one that was written", path,
                         f->head == f->bytes ? "text" : "header");
    ml_free(head);
    ml_file_close(&file);
    return status;
}

static ml_status read_folder(const char *folder, ml_manifest *m) {
    char path[4096], *text = NULL;
    ml_file file;
    snprintf(path, sizeof path, "%s/manifest.json", folder);
    if (access(path, F_OK) != 0) {
        ml_fail(ML_IO, "%s is no whole checkpoint: it has no manifest.json", folder);
        return ml_help("a checkpoint is a folder that a run or m.save has written");
    }
    ML_TRY(ml_file_open(path, &file));
    ml_status status = ML_OK;
    if (file.bytes > MANIFEST_LIMIT) status = ml_fail(ML_IO, "%s is malformed", path);
    if (status == ML_OK) status = read_head(&file, file.bytes, &text);
    if (status == ML_OK) status = parse_text(m, path, text, (size_t)file.bytes);
    ml_free(text);
    ml_file_close(&file);
    for (int i = 0; i < m->file_count && status == ML_OK; i++)
        status = check_file(folder, &m->files[i]);
    return status;
}

ml_status ml_manifest_read(const char *folder, ml_manifest **manifest) {
    ML_TRY(ml_manifest_new(manifest));
    ml_status status = read_folder(folder, *manifest);
    if (status == ML_OK) return ML_OK;
    ml_manifest_free(*manifest);
    *manifest = NULL;
    return status;
}

const ml_manifest_tensor *ml_manifest_find(const ml_manifest *manifest, const char *name) {
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&manifest->names, name_hash(name), &cursor)) != ML_INDEX_NONE)
        if (strcmp(manifest->tensors[at].name, name) == 0) return &manifest->tensors[at];
    return NULL;
}
