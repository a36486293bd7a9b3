#include "runtime/io/safetensors.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/graph/convert.h"

enum { HEADER_LIMIT = 100000000 };

static bool parse_dtype(const char *text, ml_safetensor *tensor) {
    tensor->half = text && strcmp(text, "F16") == 0; /* read as f32 */
    tensor->e4m3 = text && strcmp(text, "F8_E4M3") == 0;
    tensor->dtype = ML_F32;
    if (tensor->half || tensor->e4m3) return true;
    for (ml_dtype dtype = 0; text && dtype < ML_DTYPE_COUNT; dtype++)
        if (strcmp(text, ml_dtypes[dtype].safetensors) == 0) return tensor->dtype = dtype, true;
    return false;
}

static ml_status help_with_dtypes(void) {
    char list[128] = "";
    for (ml_dtype d = 0; d < ML_DTYPE_COUNT; d++)
        strncat(strncat(list, ml_dtypes[d].safetensors, 16), ", ", 3);
    return ml_help("%sF16 and F8_E4M3 are read: convert the file", list);
}

int64_t ml_safetensor_width(const ml_safetensor *tensor) {
    return tensor->half ? 2 : tensor->e4m3 ? 1 : ml_dtypes[tensor->dtype].bytes;
}

/* Reads one header entry, whose offsets count from `start`; false where it is malformed or its
 * shape does not fill its bytes. */
static bool parse_tensor(json_t *entry, int64_t start, int64_t size, ml_safetensor *tensor) {
    json_t *shape = json_object_get(entry, "shape"),
           *offsets = json_object_get(entry, "data_offsets");
    if (!parse_dtype(json_string_value(json_object_get(entry, "dtype")), tensor)) return false;
    if (!json_is_array(shape) || json_array_size(shape) > ML_MAX_AXES) return false;
    if (!json_is_array(offsets) || json_array_size(offsets) != 2) return false;
    json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (!json_is_integer(first) || !json_is_integer(last)) return false;
    const int64_t begin = json_integer_value(first), end = json_integer_value(last);
    if (begin < 0 || end < begin || end > size) return false;
    int64_t bytes = ml_safetensor_width(tensor);
    tensor->rank = (int)json_array_size(shape);
    for (int i = 0; i < tensor->rank; i++) {
        json_t *extent = json_array_get(shape, (size_t)i);
        if (!json_is_integer(extent) || json_integer_value(extent) < 0) return false;
        tensor->shape[i] = json_integer_value(extent);
        if (__builtin_mul_overflow(bytes, tensor->shape[i], &bytes)) return false;
    }
    tensor->offset = start + begin;
    tensor->bytes = end - begin;
    return bytes == tensor->bytes;
}

static int by_offset(const void *a, const void *b) {
    const ml_safetensor *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static ml_status read_entries(const char *path, json_t *header, ml_safetensors *file,
                              int64_t start) {
    const char *name;
    const int64_t size = file->file.bytes - start;
    json_t *entry;
    json_object_foreach(header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) continue;
        ml_safetensor *tensor = &file->tensor[file->count++];
        tensor->name = ml_arena_copy(file->arena, name, strlen(name));
        const char *dtype = json_string_value(json_object_get(entry, "dtype"));
        if (dtype != NULL && !parse_dtype(dtype, tensor)) {
            ml_fail(ML_IO, "%s: tensor \"%s\" is of dtype %s", path, name, dtype);
            return help_with_dtypes();
        }
        if (!parse_tensor(entry, start, size, tensor))
            return ml_fail(ML_IO, "%s: the header's entry for tensor \"%s\" is malformed", path,
                           name);
    }
    qsort(file->tensor, (size_t)file->count, sizeof *file->tensor, by_offset);
    int64_t expected = start;
    for (int i = 0; i < file->count; i++) {
        if (file->tensor[i].offset != expected)
            return ml_fail(ML_IO, "%s: tensor \"%s\" does not start where the one before it ends",
                           path, file->tensor[i].name);
        expected += file->tensor[i].bytes;
    }
    if (expected != start + size)
        return ml_fail(ML_IO, "%s: %lld bytes after the last tensor belong to none", path,
                       (long long)(start + size - expected));
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

static ml_status parse_header(ml_safetensors *file, const char *text, int64_t length) {
    const char *path = file->file.path;
    json_error_t problem;
    json_t *header = json_loadb(text, (size_t)length, JSON_REJECT_DUPLICATES, &problem);
    if (!json_is_object(header)) {
        json_decref(header);
        return ml_fail(ML_IO, "%s: the header is not valid JSON: %s (byte %d)", path, problem.text,
                       problem.position + 8);
    }
    read_call call = {file, path, header, 8 + length};
    ml_status status = ml_protect(read_header, &call);
    json_decref(header);
    return status;
}

static ml_status refuse(const ml_file *file, const ml_file_kind *kind, int64_t length) {
    const char *path = file->path;
    const long long bytes = (long long)file->bytes;
    if (bytes < 8)
        return ml_fail(ML_IO, "%s is no safetensors file: it has %lld bytes", path, bytes);
    if (kind) {
        ml_fail(ML_IO, "%s is no safetensors file: it is %s", path, kind->what);
        return ml_help("in Python, safetensors.torch.save_file(tensors, \"FILE.safetensors\") "
                       "writes one");
    }
    if (length)
        return ml_fail(ML_IO, "%s is truncated: its header has %lld bytes, and %lld are there",
                       path, (long long)length, bytes - 8);
    return ml_fail(ML_IO, "%s is no safetensors file: its header is malformed", path);
}

ml_status ml_safetensors_header(const ml_file *file, char **text, int64_t *length) {
    unsigned char head[ML_FILE_HEAD] = {0};
    const int64_t count = file->bytes < ML_FILE_HEAD ? file->bytes : ML_FILE_HEAD;
    if (file->bytes < 8) return refuse(file, NULL, 0);
    ML_TRY(ml_file_read(file, 0, head, count));
    uint64_t bytes = 0;
    for (int i = 0; i < 8; i++) bytes |= (uint64_t)head[i] << 8 * i;
    const ml_file_kind *kind = ml_file_kind_of(head, file->bytes);
    if (bytes > HEADER_LIMIT || bytes < 2 || head[8] != '{') return refuse(file, kind, 0);
    *length = (int64_t)bytes;
    if (*length > file->bytes - 8) return refuse(file, kind, *length);
    *text = ml_alloc(bytes);
    if (!*text) return ml_fail(ML_NO_MEMORY, "out of memory while opening %s", file->path);
    return ml_file_read(file, 8, *text, *length);
}

static ml_status load_header(ml_safetensors *file) {
    char *text = NULL;
    int64_t length;
    ml_status status = ml_safetensors_header(&file->file, &text, &length);
    if (status == ML_OK) status = parse_header(file, text, length);
    ml_free(text);
    return status;
}

ml_status ml_safetensors_open(const char *path, ml_safetensors **out) {
    ml_safetensors *file = *out = ml_alloc(sizeof *file);
    if (!file || !(file->arena = ml_arena_new())) {
        ml_safetensors_close(file);
        *out = NULL;
        return ml_fail(ML_NO_MEMORY, "out of memory while opening %s", path);
    }
    ml_status status = ml_file_open(path, &file->file);
    if (status == ML_OK) status = load_header(file);
    if (status == ML_OK) return ML_OK;
    ml_safetensors_close(file);
    *out = NULL;
    return status;
}

static ml_status read_half(const ml_safetensors *file, const ml_safetensor *tensor, float *to) {
    enum { BLOCK = 4096 };
    uint16_t block[BLOCK];
    const int64_t elements = tensor->bytes / 2;
    for (int64_t i = 0; i < elements; i += BLOCK) {
        int64_t count = elements - i < BLOCK ? elements - i : BLOCK;
        ML_TRY(ml_file_read(&file->file, tensor->offset + 2 * i, block, 2 * count));
        for (int64_t k = 0; k < count; k++) to[i + k] = ml_from_f16(block[k]);
    }
    return ML_OK;
}

ml_status ml_safetensors_read(const ml_safetensors *file, const ml_safetensor *tensor, void *to) {
    if (tensor->e4m3) {
        ml_fail(ML_IO, "tensor \"%s\": F8_E4M3 values need the scales of another tensor",
                tensor->name);
        return ml_help("--from reads a folder of such weights");
    }
    ml_status status = tensor->half ? read_half(file, tensor, to)
                                    : ml_file_read(&file->file, tensor->offset, to, tensor->bytes);
    if (status == ML_OK) return ML_OK;
    return ml_fail(status, "tensor \"%s\": %s", tensor->name, ml_error_last()->text);
}

void ml_safetensors_close(ml_safetensors *file) {
    if (!file) return;
    ml_file_close(&file->file);
    if (file->arena) ml_arena_free(file->arena);
    ml_free(file);
}
