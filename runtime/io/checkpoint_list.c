#include "runtime/io/checkpoint_list.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/io/durable.h"

static const char mark[] = ".tmp-";
enum { MARK = sizeof mark - 1, DIGITS = 16 };

void ml_checkpoint_temporary(const char *path, uint64_t number, char *name) {
    sprintf(name, "%s%s%016" PRIx64, path, mark, number);
}

/* Where a temporary name's mark begins; 0: it is none. */
static size_t temporary_mark(const char *name) {
    const size_t length = strlen(name);
    if (length <= MARK + DIGITS) return 0;
    const char *at = name + length - MARK - DIGITS;
    return strncmp(at, mark, MARK) == 0 && strspn(at + MARK, "0123456789abcdef") == DIGITS
               ? length - MARK - DIGITS
               : 0;
}

static int64_t step_of(const char *name, const char *record) {
    json_t *root = record ? json_loads(record, 0, NULL) : NULL;
    json_t *step = json_object_get(root, "step");
    int64_t value = json_is_integer(step) ? json_integer_value(step) : -1;
    json_decref(root);
    if (value >= 0) return value;
    size_t digits = strlen(name);
    while (digits > 0 && isdigit((unsigned char)name[digits - 1])) digits--;
    return name[digits] ? strtoll(name + digits, NULL, 10) : -1;
}

static int newest_first(const void *a, const void *b) {
    const ml_checkpoint_listed *x = a, *y = b;
    if (x->step != y->step) return x->step > y->step ? -1 : 1;
    return strcmp(y->path, x->path);
}

typedef struct {
    const char *folder;
    ml_arena *arena;
    ml_checkpoint_listing *list;
    DIR *open;
} list_call;

static void list_add(const list_call *call, ml_checkpoint_listed *entry, const char *name) {
    ml_manifest *manifest = NULL;
    *entry =
        (ml_checkpoint_listed){.path = ml_arena_format(call->arena, "%s/%s", call->folder, name)};
    entry->whole = ml_manifest_read(entry->path, &manifest) == ML_OK;
    entry->step = step_of(name, manifest ? manifest->record : NULL);
    ml_manifest_free(manifest);
    if (!entry->whole) {
        const char *text = ml_error_last()->text;
        entry->problem = ml_arena_copy(call->arena, text, strlen(text));
    }
}

static void list_body(void *context) {
    const list_call *call = context;
    ML_VEC(ml_checkpoint_listed) found = {0};
    for (struct dirent *entry; (entry = readdir(call->open)) != NULL;) {
        struct stat status;
        const char *name = entry->d_name;
        if (name[0] == '.' || temporary_mark(name) > 0) continue;
        const char *path = ml_arena_format(call->arena, "%s/%s", call->folder, name);
        if (stat(path, &status) != 0 || !S_ISDIR(status.st_mode)) continue;
        list_add(call, ML_PUSH(call->arena, &found), name);
    }
    if (found.count > 0) qsort(found.at, found.count, sizeof *found.at, newest_first);
    *call->list = (ml_checkpoint_listing){found.at, (int)found.count};
}

ml_status ml_checkpoint_folders(const char *folder, ml_arena *arena, ml_checkpoint_listing *list) {
    *list = (ml_checkpoint_listing){0};
    list_call call = {folder, arena, list, opendir(folder)};
    if (call.open == NULL && (errno == ENOENT || errno == ENOTDIR)) return ML_OK;
    if (call.open == NULL)
        return ml_fail(ML_IO, "cannot open the folder %s: %s", folder, strerror(errno));
    ml_status status = ml_protect(list_body, &call);
    closedir(call.open);
    return status;
}

ml_status ml_checkpoint_sweep(const char *folder, const char *name) {
    char path[4096];
    DIR *open = opendir(folder);
    if (open == NULL) return ML_OK;
    ml_status status = ML_OK;
    for (struct dirent *entry; status == ML_OK && (entry = readdir(open)) != NULL;) {
        size_t length = temporary_mark(entry->d_name);
        if (length == 0 ||
            (name && (strlen(name) != length || strncmp(name, entry->d_name, length) != 0)))
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        status = ml_durable_remove(path);
    }
    closedir(open);
    return status;
}
