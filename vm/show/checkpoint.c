/* Checkpoints: what their manifests say, whether they are whole, the hashes of their tensors. */
#include <dirent.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/graph/ops.h"
#include "runtime/io/checkpoint_list.h"
#include "runtime/io/file.h"
#include "runtime/io/tensor_hash.h"
#include "vm/show/show.h"

enum { BLOCK = 1 << 20 };

/* ---- Hashes ---- */

static ml_status verify_tensor(const ml_file *file, const ml_manifest_tensor *t, char *block) {
    const int width = ml_dtypes[t->dtype].bytes;
    uint64_t hash = 0;
    for (int64_t at = 0; at < t->bytes; at += BLOCK) {
        int64_t bytes = t->bytes - at < BLOCK ? t->bytes - at : BLOCK;
        ML_TRY(ml_file_read(file, t->offset + at, block, bytes));
        hash += ml_tensor_hash(block, width, at / width, bytes / width);
    }
    if (hash == t->hash) return ML_OK;
    return ml_fail(ML_IO, "%s is damaged: tensor \"%s\" is not the one that was written",
                   file->path, t->name);
}

static ml_status verify_file(const char *folder, const ml_manifest *m, int which, char *block) {
    char path[4096];
    ml_file file;
    snprintf(path, sizeof path, "%s/%s", folder, m->files[which].name);
    ML_TRY(ml_file_open(path, &file));
    ml_status status = ML_OK;
    for (int i = 0; i < m->tensor_count && status == ML_OK; i++)
        if (m->tensors[i].file == which) status = verify_tensor(&file, &m->tensors[i], block);
    ml_file_close(&file);
    return status;
}

/* Read every tensor. */
static ml_status verify(const char *folder, const ml_manifest *m) {
    char *block = ml_alloc(BLOCK);
    ml_status status = block ? ML_OK : ml_fail(ML_NO_MEMORY, "out of memory to read %s", folder);
    for (int i = 0; i < m->file_count && status == ML_OK; i++)
        status = verify_file(folder, m, i, block);
    ml_free(block);
    return status;
}

/* ---- One checkpoint ---- */

/* What tensors of one type share; of many tensors few are new. */
typedef struct {
    const ml_manifest_tensor *of;
    json_t *axes, *elements, *bytes;
} shared_type;
enum { TYPES = 64 };

static bool same_type(const ml_manifest_tensor *a, const ml_manifest_tensor *b) {
    bool same = a->dtype == b->dtype && a->rank == b->rank;
    for (int k = 0; k < a->rank && same; k++)
        same = a->size[k] == b->size[k] && strcmp(a->axis[k], b->axis[k]) == 0;
    return same;
}

static const shared_type *find_type(shared_type *types, const ml_manifest_tensor *t) {
    int at = 0;
    while (at < TYPES && types[at].of && !same_type(types[at].of, t)) at++;
    if (at < TYPES && types[at].of) return &types[at];
    shared_type *type = &types[at < TYPES ? at : t->name[0] % TYPES];
    json_t *axes = json_array();
    json_int_t elements = 1;
    for (int k = 0; k < t->rank; k++) {
        elements *= t->size[k];
        json_array_append_new(axes, json_pack("[sI]", t->axis[k], (json_int_t)t->size[k]));
    }
    json_decref(type->axes), json_decref(type->elements), json_decref(type->bytes);
    *type = (shared_type){t, axes, json_integer(elements), json_integer(t->bytes)};
    return type;
}

static void add_tensors(json_t *list, const ml_manifest *m) {
    shared_type types[TYPES] = {0};
    json_t *file = NULL;
    for (int i = 0; i < m->tensor_count; i++) {
        const ml_manifest_tensor *t = &m->tensors[i];
        const shared_type *type = find_type(types, t);
        if (!file || t->file != t[-1].file) {
            json_decref(file);
            file = json_string(m->files[t->file].name);
        }
        json_t *tensor = json_object();
        json_object_set_new_nocheck(tensor, "name", json_string_nocheck(t->name));
        json_object_set_new_nocheck(tensor, "dtype", json_string(ml_dtypes[t->dtype].name));
        json_object_set_nocheck(tensor, "axes", type->axes);
        json_object_set_nocheck(tensor, "elements", type->elements);
        json_object_set_nocheck(tensor, "bytes", type->bytes);
        json_object_set_nocheck(tensor, "file", file);
        json_array_append_new(list, tensor);
    }
    json_decref(file);
    for (int i = 0; i < TYPES; i++)
        json_decref(types[i].axes), json_decref(types[i].elements), json_decref(types[i].bytes);
}

json_t *show_read_checkpoint(const char *path, bool verifies) {
    ml_manifest *m;
    if (ml_manifest_read(path, &m) != ML_OK ||
        (verifies && verify(path, m) != ML_OK && (ml_manifest_free(m), true))) {
        ml_help("mlua show FILE.safetensors shows the tensors of one file");
        return NULL;
    }
    json_t *shown = json_pack("{sssssbs[]}", "kind", "checkpoint", "path", path, "verified",
                              verifies, "tensors");
    json_t *record = json_loads(m->record, 0, NULL), *tensors = json_object_get(shown, "tensors");
    json_object_set_new(shown, "record", record ? record : json_object());
    add_tensors(tensors, m);
    ml_manifest_free(m);
    show_add_sums(shown);
    return shown;
}

/* ---- Those of a run ---- */

static int64_t folder_bytes(const char *path) {
    char child[4096 + 260];
    int64_t bytes = 0;
    struct stat status;
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        snprintf(child, sizeof child, "%s/%s", path, entry->d_name);
        if (stat(child, &status) == 0 && S_ISREG(status.st_mode)) bytes += status.st_size;
    }
    if (dir) closedir(dir);
    return bytes;
}

/* A problem without the path that stands before it anyway. */
static const char *without(const char *path, const char *problem) {
    static const char rest[] = " is no whole checkpoint: ";
    const size_t length = strlen(path);
    if (strncmp(problem, path, length) != 0) return problem;
    if (problem[length] == '/') return problem + length + 1;
    return strncmp(problem + length, rest, strlen(rest)) == 0 ? problem + length + strlen(rest)
                                                              : problem;
}

static json_t *listed_json(const ml_checkpoint_listed *c, bool verifies) {
    const char *problem = c->problem;
    ml_manifest *m;
    if (c->whole && verifies && ml_manifest_read(c->path, &m) == ML_OK) {
        if (verify(c->path, m) != ML_OK) problem = ml_error_last()->text;
        ml_manifest_free(m);
    }
    json_t *json = json_pack("{sssIsb}", "path", c->path, "bytes",
                             (json_int_t)folder_bytes(c->path), "whole", !problem);
    if (c->step >= 0) json_object_set_new(json, "step", json_integer(c->step));
    if (problem) json_object_set_new(json, "problem", json_string(without(c->path, problem)));
    return json;
}

ml_status show_read_checkpoints(const char *folder, bool verifies, json_t *list) {
    ml_checkpoint_listing found = {0};
    ml_arena *arena = ml_arena_new();
    if (!arena) return ml_fail(ML_NO_MEMORY, "out of memory to read %s", folder);
    ml_status status = ml_checkpoint_folders(folder, arena, &found);
    for (int i = 0; i < found.count; i++)
        json_array_append_new(list, listed_json(&found.at[i], verifies));
    ml_arena_free(arena);
    return status;
}
