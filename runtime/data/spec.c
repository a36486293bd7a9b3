#include "runtime/data/spec.h"

#include <dirent.h>
#include <errno.h>
#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/status.h"
#include "runtime/data/store.h"
#include "runtime/data/text.h"

static bool exists(const char *path) {
    return access(path, F_OK) == 0;
}

static bool is_folder(const char *path) {
    struct stat about;
    return stat(path, &about) == 0 && S_ISDIR(about.st_mode);
}

static bool is_data_name(const char *path) {
    return text_is_name(path) || store_ends_in(path, ".bin") || store_ends_in(path, ".npy");
}

static int compare(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static void add_folder(ml_arena *arena, const char *path, spec_source *source) {
    DIR *dir = opendir(path);
    uint32_t before = source->files.count;
    if (!dir) ml_raise(ML_IO, "cannot read the folder %s: %s", path, strerror(errno));
    char *names = NULL; /* nothing may raise while the folder is open */
    size_t count = 0, room = 0;
    bool full = false;
    for (struct dirent *entry; !full && (entry = readdir(dir));) {
        size_t length = strlen(entry->d_name) + 1;
        if (entry->d_name[0] == '.' || !is_data_name(entry->d_name)) continue;
        if (count + length > room) {
            char *more = ml_realloc(names, room, 2 * room + 4096);
            full = !more;
            if (full) continue;
            names = more, room = 2 * room + 4096;
        }
        memcpy(names + count, entry->d_name, length);
        count += length;
    }
    closedir(dir);
    const char *copy = full ? NULL : ml_arena_copy(arena, count ? names : "", count);
    ml_free(names);
    if (full) ml_raise(ML_NO_MEMORY, "not enough host memory for the names in %s", path);
    for (size_t at = 0; at < count; at += strlen(copy + at) + 1)
        *ML_PUSH(arena, &source->files) = ml_arena_format(
            arena, "%s%s%s", path, path[strlen(path) - 1] == '/' ? "" : "/", copy + at);
    if (source->files.count == before) {
        ml_fail(ML_IO, "the folder %s holds no data files", path);
        ml_help("data files are called .txt, .jsonl, either with .gz or .zst, .bin or .npy");
        ml_raise_last();
    }
    qsort(source->files.at + before, source->files.count - before, sizeof(char *), compare);
}

static void add_pattern(ml_arena *arena, const char *pattern, spec_source *source) {
    glob_t found;
    int code = glob(pattern, 0, NULL, &found);
    if (code == 0 && found.gl_pathc > 1 << 20) code = GLOB_NOSPACE;
    size_t bytes = 0, at = 0;
    for (size_t i = 0; code == 0 && i < found.gl_pathc; i++) bytes += strlen(found.gl_pathv[i]) + 1;
    char *names = code == 0 ? ml_alloc(bytes) : NULL;
    for (size_t i = 0; names && i < found.gl_pathc; at += strlen(found.gl_pathv[i++]) + 1)
        strcpy(names + at, found.gl_pathv[i]);
    if (code != GLOB_NOMATCH && code != GLOB_NOSPACE) globfree(&found);
    if (code == GLOB_NOMATCH) {
        ml_fail(ML_IO, "no file is called %s", pattern);
        ml_raise_last();
    }
    if (!names) ml_raise(ML_NO_MEMORY, "not enough host memory for the files of %s", pattern);
    const char *copy = ml_arena_copy(arena, names, bytes);
    ml_free(names);
    for (at = 0; at < bytes; at += strlen(copy + at) + 1)
        if (!store_ends_in(copy + at, ".idx") && !is_folder(copy + at))
            *ML_PUSH(arena, &source->files) = copy + at;
    if (source->files.count == 0) ml_raise(ML_IO, "no data file is called %s", pattern);
}

static void add_files(ml_arena *arena, const char *path, spec_source *source) {
    const char *bin = ml_arena_format(arena, "%s.bin", path);
    const char *idx = ml_arena_format(arena, "%s.idx", path);
    if (is_folder(path))
        add_folder(arena, path, source);
    else if (!exists(path) && exists(bin) && exists(idx))
        *ML_PUSH(arena, &source->files) = bin;
    else if (exists(path) && store_ends_in(path, ".idx"))
        *ML_PUSH(arena, &source->files) =
            ml_arena_format(arena, "%.*s.bin", (int)strlen(path) - 4, path);
    else if (!exists(path) && strpbrk(path, "*?["))
        add_pattern(arena, path, source);
    else
        *ML_PUSH(arena, &source->files) = path;
}

/* Cut ":WEIGHT" off; 0 where there is none. */
static double cut_weight(char *part) {
    char *colon = strrchr(part, ':'), *end;
    if (!colon || !colon[1] || exists(part)) return 0;
    double weight = strtod(colon + 1, &end);
    if (*end) return 0;
    if (!(weight > 0 && isfinite(weight)))
        ml_raise(ML_INVALID, "the weight of %s in data must be above 0", part);
    *colon = 0;
    return weight;
}

void spec_parse(ml_arena *arena, const char *text, spec *result) {
    char *rest = ml_arena_copy(arena, text, strlen(text));
    int weighted = 0, parts = 0;
    for (char *part = rest; part; part = rest) {
        rest = exists(part) ? NULL : strchr(part, ',');
        if (rest) *rest++ = 0;
        part += strspn(part, " ");
        for (size_t n = strlen(part); n > 0 && part[n - 1] == ' '; n--) part[n - 1] = 0;
        if (!*part) ml_raise(ML_INVALID, "data=\"%s\" has an empty part between commas", text);
        double weight = cut_weight(part);
        weighted += weight > 0, parts++;
        spec_source *source = weight > 0 || parts == 1 ? ML_PUSH(arena, result) : &result->at[0];
        if (!source->text) source->text = part;
        source->weight = weight > 0 ? weight : 1;
        add_files(arena, part, source);
    }
    if (weighted == 0 || weighted == parts) return;
    ml_fail(ML_INVALID, "data=\"%s\" gives a weight to %d of its %d parts", text, weighted, parts);
    ml_help("give each one, as in data=\"web/*.bin:0.7,code.bin:0.3\", or none");
    ml_raise_last();
}
