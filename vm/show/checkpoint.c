/* A checkpoint by its manifest.json: whole where every file that it names has its size. */
#include <string.h>
#include <sys/stat.h>

#include "vm/show/show.h"

static int64_t file_bytes(const char *folder, const char *name) {
    char path[4096];
    struct stat status;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return stat(path, &status) == 0 && S_ISREG(status.st_mode) ? status.st_size : -1;
}

/* The first file that is missing or of another size: in `problem`; false where there is one. */
static bool compare_files(const char *path, json_t *manifest, int64_t *bytes, char *problem,
                          size_t size) {
    json_t *files = json_object_get(manifest, "files"), *file;
    size_t i;
    if (!json_is_array(files))
        return snprintf(problem, size, "manifest.json lists no files"), false;
    json_array_foreach(files, i, file) {
        const char *name = show_string(file, "name", "");
        int64_t wanted = json_integer_value(json_object_get(file, "bytes"));
        int64_t there = file_bytes(path, name);
        if (there == wanted)
            *bytes += there;
        else if (there < 0)
            return snprintf(problem, size, "%s is missing", name), false;
        else
            return snprintf(problem, size, "%s has %lld bytes of %lld", name, (long long)there,
                            (long long)wanted),
                   false;
    }
    return true;
}

static json_t *state_of(const char *path, json_t *manifest, const char *unreadable) {
    char problem[1024] = "";
    int64_t bytes = 0;
    json_t *step = json_object_get(json_object_get(manifest, "record"), "step");
    if (unreadable)
        snprintf(problem, sizeof problem, "%s", unreadable);
    else
        compare_files(path, manifest, &bytes, problem, sizeof problem);
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    json_t *state =
        json_pack("{sssIsb}", "path", path, "bytes", (json_int_t)bytes, "whole", !*problem);
    if (json_is_integer(step))
        json_object_set(state, "step", step);
    else if (strncmp(name, "step-", 5) == 0)
        json_object_set_new(state, "step", json_integer(strtoll(name + 5, NULL, 10)));
    if (*problem) json_object_set_new(state, "problem", json_string(problem));
    return state;
}

json_t *show_checkpoint_state(const char *path) {
    if (!show_exists(path, "manifest.json"))
        return state_of(path, NULL, "there is no manifest.json");
    json_t *manifest = show_load_json(path, "manifest.json");
    json_t *state = state_of(path, manifest, manifest ? NULL : ml_error_last()->text);
    json_decref(manifest);
    return state;
}

/* A tensor of the manifest; its bytes are one range of a file, or pieces of several. */
static json_t *shown_tensor(json_t *tensor) {
    json_t *axes = json_object_get(tensor, "axes"), *axis,
           *pieces = json_object_get(tensor, "pieces");
    json_int_t elements = 1, bytes = json_integer_value(json_object_get(tensor, "bytes"));
    size_t i;
    json_array_foreach(axes, i, axis) {
        json_int_t size = json_integer_value(json_array_get(axis, 1));
        if (__builtin_mul_overflow(elements, size, &elements)) elements = 0;
    }
    const char *file = show_string(tensor, "file", NULL);
    if (!file) file = show_string(json_array_get(pieces, 0), "file", "?");
    json_t *piece;
    if (!bytes)
        json_array_foreach(pieces, i, piece) bytes +=
            json_integer_value(json_object_get(piece, "bytes"));
    json_t *shown = json_pack("{ssssso?sIsIss}", "name", show_string(tensor, "name", "?"), "dtype",
                              show_string(tensor, "dtype", "?"), "axes", json_incref(axes),
                              "elements", elements, "bytes", bytes, "file", file);
    if (json_array_size(pieces) > 1)
        json_object_set_new(shown, "pieces", json_integer((json_int_t)json_array_size(pieces)));
    return shown;
}

json_t *show_read_checkpoint(const char *path) {
    json_t *manifest = show_load_json(path, "manifest.json"), *tensor;
    size_t i;
    if (!manifest) return NULL;
    json_t *shown = state_of(path, manifest, NULL), *tensors = json_array();
    json_t *record = json_object_get(manifest, "record");
    json_array_foreach(json_object_get(manifest, "tensors"), i, tensor)
        json_array_append_new(tensors, shown_tensor(tensor));
    json_object_set_new(shown, "kind", json_string("checkpoint"));
    if (record) json_object_set(shown, "record", record);
    json_object_set_new(shown, "tensors", tensors);
    json_decref(manifest);
    show_add_sums(shown);
    return shown;
}
