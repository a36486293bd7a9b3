/* Tensors of safetensors files and of checkpoints. Headers are checked; data are not read. */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/io/file.h"
#include "vm/show/show.h"

enum { HEADER_LIMIT = 100000000 };

static const struct {
    const char *name, *shown;
    int bits;
} dtypes[] = {
    {"F64", "f64", 64},   {"F32", "f32", 32},        {"BF16", "bf16", 16},
    {"F16", "f16", 16},   {"F8_E4M3", "f8_e4m3", 8}, {"F8_E5M2", "f8_e5m2", 8},
    {"I64", "i64", 64},   {"I32", "i32", 32},        {"I16", "i16", 16},
    {"I8", "i8", 8},      {"U64", "u64", 64},        {"U32", "u32", 32},
    {"U16", "u16", 16},   {"U8", "u8", 8},           {"BOOL", "bool", 8},
    {"C64", "c64", 64},   {"F8_E8M0", "f8_e8m0", 8}, {"F4", "f4", 4},
    {"F6_E2M3", "f6", 6}, {"F6_E3M2", "f6", 6},
};

static int find_dtype(const char *name) {
    int count = sizeof dtypes / sizeof *dtypes;
    for (int i = 0; name && i < count; i++)
        if (strcmp(dtypes[i].name, name) == 0) return i;
    return -1;
}

static ml_status malformed(const char *path, const char *tensor, const char *what) {
    return ml_fail(ML_IO, "%s: tensor \"%s\" %s", path, tensor, what);
}

/* One entry of a header, of a file with `room` bytes of data. */
static ml_status add_tensor(json_t *tensors, const char *path, const char *file, const char *name,
                            json_t *entry, int64_t room) {
    json_t *shape = json_object_get(entry, "shape"), *extent;
    json_t *offsets = json_object_get(entry, "data_offsets");
    const char *dtype = show_string(entry, "dtype", NULL);
    if (!dtype) return malformed(path, name, "has no dtype");
    if (!json_is_array(shape)) return malformed(path, name, "has no shape");
    json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    int64_t begin = json_integer_value(first), end = json_integer_value(last), bits = 1;
    if (!json_is_integer(first) || !json_is_integer(last) || json_array_size(offsets) != 2)
        return malformed(path, name, "has no data_offsets");
    if (begin < 0 || end < begin || end > room)
        return ml_fail(ML_IO, "%s: tensor \"%s\" is at bytes %lld to %lld of %lld", path, name,
                       (long long)begin, (long long)end, (long long)room);
    size_t i;
    bool fits = true;
    json_array_foreach(shape, i, extent) {
        int64_t size = json_is_integer(extent) ? json_integer_value(extent) : -1;
        fits = fits && size >= 0 && !__builtin_mul_overflow(bits, size, &bits);
    }
    int64_t elements = bits;
    int known = find_dtype(dtype);
    if (!fits || (known >= 0 && (__builtin_mul_overflow(bits, dtypes[known].bits, &bits) ||
                                 bits % 8 || bits / 8 != end - begin)))
        return malformed(path, name, "has another number of bytes than its shape and dtype need");
    json_t *shown = json_pack(
        "{sssssOsIsIss}", "name", name, "dtype", known >= 0 ? dtypes[known].shown : dtype, "shape",
        shape, "elements", (json_int_t)elements, "bytes", (json_int_t)(end - begin), "file", file);
    if (json_array_append_new(tensors, shown)) return malformed(path, name, "cannot be shown");
    return ML_OK;
}

static ml_status add_header(json_t *shown, const char *path, const char *name, json_t *header,
                            int64_t room) {
    const char *key;
    json_t *entry, *tensors = json_object_get(shown, "tensors");
    json_object_foreach(header, key, entry) {
        if (strcmp(key, "__metadata__") != 0)
            ML_TRY(add_tensor(tensors, path, name, key, entry, room));
        else if (json_is_object(entry))
            json_object_update(json_object_get(shown, "metadata"), entry);
    }
    return ML_OK;
}

static ml_status read_header(json_t *shown, const ml_file *file, const char *name) {
    const char *path = file->path;
    unsigned char head[ML_FILE_HEAD] = {0};
    int64_t bytes = file->bytes;
    if (bytes < 8)
        return ml_fail(ML_IO, "%s is no safetensors file: it has %lld bytes", path,
                       (long long)bytes);
    ML_TRY(ml_file_read(file, 0, head, bytes < ML_FILE_HEAD ? bytes : ML_FILE_HEAD));
    uint64_t length = 0;
    for (int i = 0; i < 8; i++) length |= (uint64_t)head[i] << 8 * i;
    const ml_file_kind *kind = ml_file_kind_of(head, bytes);
    if (head[8] != '{' || length < 2 || length > HEADER_LIMIT)
        return ml_fail(ML_IO, "%s is no safetensors file%s%s", path, kind ? ": it is " : "",
                       kind ? kind->what : "");
    if ((int64_t)length > bytes - 8)
        return ml_fail(ML_IO, "%s is truncated: its header has %lld bytes, and %lld are there",
                       path, (long long)length, (long long)bytes - 8);
    char *text = ml_alloc(length);
    if (!text) return ml_fail(ML_NO_MEMORY, "out of memory while opening %s", path);
    ml_status status = ml_file_read(file, 8, text, (int64_t)length);
    json_error_t problem;
    json_t *header = NULL;
    if (status == ML_OK) {
        header = json_loadb(text, length, JSON_REJECT_DUPLICATES, &problem);
        status = json_is_object(header)
                     ? add_header(shown, path, name, header, bytes - 8 - (int64_t)length)
                     : ml_fail(ML_IO, "%s: the header is not a JSON object: %s (byte %d)", path,
                               header ? "another value" : problem.text, problem.position + 8);
    }
    json_decref(header);
    ml_free(text);
    return status;
}

ml_status show_add_tensors(json_t *shown, const char *path, const char *name) {
    ml_file file = {0};
    ML_TRY(ml_file_open(path, &file));
    ml_status status = read_header(shown, &file, name);
    ml_file_close(&file);
    return status;
}

/* Count, elements and bytes, of all and by dtype. */
void show_add_sums(json_t *shown) {
    json_t *tensors = json_object_get(shown, "tensors"), *tensor, *by = json_object();
    json_int_t all_elements = 0, all_bytes = 0;
    size_t i;
    json_array_foreach(tensors, i, tensor) {
        json_int_t elements = json_integer_value(json_object_get(tensor, "elements"));
        json_int_t bytes = json_integer_value(json_object_get(tensor, "bytes"));
        const char *dtype = show_string(tensor, "dtype", "?");
        json_t *sum = json_object_get(by, dtype);
        if (!sum)
            json_object_set_new(
                by, dtype, sum = json_pack("{sisisi}", "tensors", 0, "elements", 0, "bytes", 0));
        const struct {
            const char *key;
            json_int_t more;
        } parts[] = {{"tensors", 1}, {"elements", elements}, {"bytes", bytes}};
        for (int k = 0; k < 3; k++) {
            json_t *value = json_object_get(sum, parts[k].key);
            json_integer_set(value, json_integer_value(value) + parts[k].more);
        }
        all_elements += elements, all_bytes += bytes;
    }
    json_object_set_new(shown, "sums",
                        json_pack("{sIsIsIso}", "tensors", (json_int_t)json_array_size(tensors),
                                  "elements", all_elements, "bytes", all_bytes, "dtypes", by));
}

/* ---- Folders ---- */

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The .safetensors files of a folder, sorted, in the order of their names. */
static ml_status add_folder(ml_arena *arena, json_t *shown, const char *path) {
    ML_VEC(char *) names = {0};
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        size_t length = strlen(entry->d_name);
        if (length > 12 && strcmp(entry->d_name + length - 12, ".safetensors") == 0)
            *ML_PUSH(arena, &names) = ml_arena_copy(arena, entry->d_name, length);
    }
    if (folder) closedir(folder);
    if (names.count) qsort(names.at, names.count, sizeof *names.at, by_name);
    for (uint32_t i = 0; i < names.count; i++)
        ML_TRY(show_add_tensors(shown, ml_arena_format(arena, "%s/%s", path, names.at[i]),
                                names.at[i]));
    return ML_OK;
}

/* What the index promises and the files do not have: the first of them, as the problem. */
static ml_status compare_index(ml_arena *arena, json_t *shown, const char *path) {
    static const char index_name[] = "model.safetensors.index.json";
    if (!show_exists(path, index_name)) return ML_OK;
    json_t *index = show_load_json(path, index_name), *tensors = json_object_get(shown, "tensors");
    if (!index) return ml_error_last()->status;
    json_t *there = json_object(), *tensor, *file;
    const char *name, *problem = NULL;
    size_t i, missing = 0;
    json_array_foreach(tensors, i, tensor)
        json_object_set(there, show_string(tensor, "name", ""), json_object_get(tensor, "file"));
    json_object_foreach(json_object_get(index, "weight_map"), name, file) {
        if (json_equal(json_object_get(there, name), file)) continue;
        if (!missing++)
            problem = ml_arena_format(arena, "%s has no tensor \"%s\", which %s names",
                                      json_is_string(file) ? json_string_value(file) : "the folder",
                                      name, index_name);
    }
    if (missing > 1) problem = ml_arena_format(arena, "%s, and %zu more", problem, missing - 1);
    if (problem) json_object_set_new(shown, "problem", json_string(problem));
    json_decref(there);
    json_decref(index);
    return ML_OK;
}

typedef struct {
    ml_arena *arena;
    json_t *shown;
    const char *path;
} folder_call;

static void read_folder(void *argument) {
    folder_call *call = argument;
    ML_CHECK(add_folder(call->arena, call->shown, call->path));
    ML_CHECK(compare_index(call->arena, call->shown, call->path));
}

json_t *show_read_tensors(const char *path) {
    struct stat status;
    json_t *shown =
        json_pack("{sssss{}s[]}", "kind", "safetensors", "path", path, "metadata", "tensors");
    ml_status result = ML_OK;
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) {
        folder_call call = {ml_arena_new(), shown, path};
        result =
            call.arena ? ml_protect(read_folder, &call) : ml_fail(ML_NO_MEMORY, "out of memory");
        ml_arena_free(call.arena);
    } else {
        const char *slash = strrchr(path, '/');
        result = show_add_tensors(shown, path, slash ? slash + 1 : path);
    }
    if (result != ML_OK) return json_decref(shown), NULL;
    show_add_sums(shown);
    return shown;
}
