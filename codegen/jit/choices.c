/* What timing has chosen: entries of the kernel cache that a run also keeps in its own folder, so
 * that it continues with the same choices on another machine with the same devices. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "codegen/jit/cache.h"

enum { FOLDER_SIZE = 1024, ENTRY_SIZE = FOLDER_SIZE + 128 };
static char folder[FOLDER_SIZE]; /* ""; or that of the run */

ml_status ml_choices_keep(const char *in) {
    if (in && strlen(in) >= sizeof folder)
        return ml_fail(ML_IO, "the path of a run's choices is too long: %s", in);
    snprintf(folder, sizeof folder, "%s", in ? in : "");
    return ML_OK;
}

static void path_of(uint64_t key[2], const char *suffix, const char *more, char *out) {
    snprintf(out, ENTRY_SIZE, "%s/%016llx%016llx.%s%s", folder, (unsigned long long)key[0],
             (unsigned long long)key[1], suffix, more);
}

/* The run's copy: the entry and its hash. A run without a copy, on a full disk, only times anew. */
static void keep(uint64_t key[2], const char *suffix, const void *bytes, int64_t size) {
    char path[ENTRY_SIZE], temporary[ENTRY_SIZE], more[32];
    if (!folder[0] || !cache_make_folders(folder)) return;
    snprintf(more, sizeof more, ".%ld", (long)getpid()); /* ranks may write the same at once */
    path_of(key, suffix, "", path);
    path_of(key, suffix, more, temporary);
    uint64_t hash = ml_hash(bytes, (size_t)size, key[0]);
    FILE *file = fopen(temporary, "wbe");
    if (!file) return;
    bool written = fwrite(bytes, 1, (size_t)size, file) == (size_t)size &&
                   fwrite(&hash, 1, sizeof hash, file) == sizeof hash;
    if (fclose(file) != 0 || !written || rename(temporary, path) != 0) unlink(temporary);
}

static bool recall(uint64_t key[2], const char *suffix, void **bytes, int64_t *size) {
    char path[ENTRY_SIZE];
    uint64_t hash;
    if (!folder[0]) return false;
    path_of(key, suffix, "", path);
    if (access(path, R_OK) != 0 || cache_read_file(path, bytes, size) != ML_OK) return false;
    *size -= (int64_t)sizeof hash;
    if (*size >= 0) memcpy(&hash, (char *)*bytes + *size, sizeof hash);
    if (*size >= 0 && hash == ml_hash(*bytes, (size_t)*size, key[0])) return true;
    ml_free(*bytes);
    return false;
}

bool ml_choice_read(uint64_t key[2], const char *suffix, void *record, int64_t size) {
    void *bytes = NULL;
    int64_t found = 0;
    if (!recall(key, suffix, &bytes, &found)) {
        if (ml_cache_read(key, suffix, &bytes, &found) != ML_OK) return false;
        keep(key, suffix, bytes, found);
    }
    bool same = found == size && memcmp(bytes, record, sizeof(uint64_t)) == 0;
    if (same) memcpy(record, bytes, (size_t)size);
    ml_free(bytes);
    return same;
}

ml_status ml_choice_write(uint64_t key[2], const char *suffix, const void *bytes, int64_t size) {
    keep(key, suffix, bytes, size);
    return ml_cache_write(key, suffix, bytes, size);
}
