#include "runtime/io/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_LIMIT = 100000000 };

static ml_status map_file(const char *path, ml_safetensors *file) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (descriptor < 0) return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size < 8) {
        bool folder = S_ISDIR(status.st_mode);
        close(descriptor);
        return ml_fail(ML_IO, "%s is no safetensors file: %s", path,
                       folder ? "it is a folder" : "it has fewer than 8 bytes");
    }
    void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    close(descriptor);
    if (map == MAP_FAILED) return ml_fail(ML_IO, "cannot map %s: %s", path, strerror(errno));
    file->map = map;
    file->map_bytes = status.st_size;
    return ML_OK;
}

static bool parse_dtype(const char *text, ml_dtype *dtype) {
    static const struct {
        const char *name;
        ml_dtype dtype;
    } known[] = {
        {"F64", ML_F64}, {"F32", ML_F32}, {"BF16", ML_BF16},
        {"I64", ML_I64}, {"I32", ML_I32}, {"BOOL", ML_BOOL},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (text && strcmp(text, known[i].name) == 0) return *dtype = known[i].dtype, true;
    return false;
}

/* Reads one header entry; false where it is malformed or its shape does not fill its bytes. */
static bool parse_tensor(json_t *entry, const char *data, int64_t size, ml_safetensor *tensor) {
    json_t *shape = json_object_get(entry, "shape"),
           *offsets = json_object_get(entry, "data_offsets");
    if (!parse_dtype(json_string_value(json_object_get(entry, "dtype")), &tensor->dtype))
        return false;
    if (!json_is_array(shape) || json_array_size(shape) > ML_MAX_AXES) return false;
    if (!json_is_array(offsets) || json_array_size(offsets) != 2) return false;
    json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (!json_is_integer(first) || !json_is_integer(last)) return false;
    const int64_t begin = json_integer_value(first), end = json_integer_value(last);
    if (begin < 0 || end < begin || end > size) return false;
    int64_t bytes = ml_dtypes[tensor->dtype].bytes;
    tensor->rank = (int)json_array_size(shape);
    for (int i = 0; i < tensor->rank; i++) {
        json_t *extent = json_array_get(shape, (size_t)i);
        if (!json_is_integer(extent) || json_integer_value(extent) < 0) return false;
        tensor->shape[i] = json_integer_value(extent);
        if (__builtin_mul_overflow(bytes, tensor->shape[i], &bytes)) return false;
    }
    tensor->data = data + begin;
    tensor->bytes = end - begin;
    return bytes == tensor->bytes;
}

static int by_offset(const void *a, const void *b) {
    const ml_safetensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static ml_status read_entries(const char *path, json_t *header, ml_safetensors *file,
                              int64_t start) {
    const char *data = (const char *)file->map + start, *name;
    const int64_t size = file->map_bytes - start;
    json_t *entry;
    json_object_foreach(header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) continue;
        ml_safetensor *tensor = &file->tensor[file->count++];
        tensor->name = ml_arena_copy(file->arena, name, strlen(name));
        const char *dtype = json_string_value(json_object_get(entry, "dtype"));
        if (dtype != NULL && !parse_dtype(dtype, &tensor->dtype)) {
            ml_fail(ML_IO, "%s: tensor \"%s\" is of dtype %s", path, name, dtype);
            return ml_help("F64, F32, BF16, I64, I32 and BOOL are read: convert the file");
        }
        if (!parse_tensor(entry, data, size, tensor))
            return ml_fail(ML_IO, "%s: the header's entry for tensor \"%s\" is malformed", path,
                           name);
    }
    qsort(file->tensor, (size_t)file->count, sizeof *file->tensor, by_offset);
    const char *expected = data;
    for (int i = 0; i < file->count; i++) {
        if (file->tensor[i].data != expected)
            return ml_fail(ML_IO, "%s: tensor \"%s\" does not start where the one before it ends",
                           path, file->tensor[i].name);
        expected += file->tensor[i].bytes;
    }
    if (expected != data + size)
        return ml_fail(ML_IO, "%s: %lld bytes after the last tensor belong to none", path,
                       (long long)(data + size - expected));
    return ML_OK;
}

typedef struct {
    ml_safetensors *file;
    const char *path;
    json_t *header;
    int64_t start;
} read_call;

static void read_header(void *argument) {
    read_call *call = argument;
    const size_t count = json_object_size(call->header);
    call->file->tensor = ML_NEW_ARRAY(call->file->arena, ml_safetensor, count + 1);
    ML_CHECK(read_entries(call->path, call->header, call->file, call->start));
}

static ml_status parse_header(const char *path, ml_safetensors *file) {
    uint64_t length;
    memcpy(&length, file->map, 8);
    const char *text = (const char *)file->map + 8;
    if (length > HEADER_LIMIT || (int64_t)length > file->map_bytes - 8 || length < 2 ||
        *text != '{')
        return ml_fail(ML_IO, "%s is no safetensors file: its header is malformed", path);
    json_error_t problem;
    json_t *header = json_loadb(text, length, JSON_REJECT_DUPLICATES, &problem);
    if (!json_is_object(header)) {
        json_decref(header);
        return ml_fail(ML_IO, "%s: the header is not valid JSON: %s (byte %d)", path, problem.text,
                       problem.position + 8);
    }
    read_call call = {file, path, header, 8 + (int64_t)length};
    ml_status status = ml_protect(read_header, &call);
    json_decref(header);
    return status;
}

ml_status ml_safetensors_open(const char *path, ml_safetensors **out) {
    ml_safetensors *file = *out = ml_alloc(sizeof *file);
    if (!file || !(file->arena = ml_arena_new())) {
        ml_safetensors_close(file);
        *out = NULL;
        return ml_fail(ML_NO_MEMORY, "out of memory while opening %s", path);
    }
    ml_status status = map_file(path, file);
    if (status == ML_OK) status = parse_header(path, file);
    if (status == ML_OK) return ML_OK;
    ml_safetensors_close(file);
    *out = NULL;
    return status;
}

void ml_safetensors_close(ml_safetensors *file) {
    if (!file) return;
    if (file->map) munmap(file->map, (size_t)file->map_bytes);
    if (file->arena) ml_arena_free(file->arena);
    ml_free(file);
}
