/* Entries of the kernel cache, and the sources that are saved beside them. */
#define _GNU_SOURCE
#include "codegen/jit/cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/knobs.h"

enum { PATH_SIZE = 1024, TRAILER_SIZE = 16, DAY = 24 * 3600 };
static const char mark[8] = {'m', 'l', 'u', 'a', 'c', 'a', 'c', 'h'};

static ml_status entry_path(const char *in, uint64_t key[2], const char *suffix, char *out,
                            int size) {
    int length = snprintf(out, (size_t)size, "%s/%016llx%016llx.%s", in, (unsigned long long)key[0],
                          (unsigned long long)key[1], suffix);
    return length < size ? ML_OK : ml_fail(ML_IO, "the cache's path is too long: %s", in);
}

ml_status ml_cache_file(uint64_t key[2], const char *suffix, char *out, int size) {
    char path[PATH_SIZE], former[PATH_SIZE];
    ml_status status = ml_cache_path(path, sizeof path);
    if (status == ML_OK) status = entry_path(path, key, suffix, out, size);
    if (status != ML_OK || access(out, F_OK) == 0) return status;
    cache_former_folder(former, sizeof former);
    if (former[0] == 0 || entry_path(former, key, suffix, out, size) != ML_OK ||
        access(out, F_OK) != 0)
        status = entry_path(path, key, suffix, out, size);
    return status;
}

/* An entry's time says when it was last used, to a day. */
static void note_use(const char *path) {
    struct stat about;
    if (stat(path, &about) == 0 && about.st_mtime < time(NULL) - DAY)
        (void)utimensat(AT_FDCWD, path, NULL, 0);
}

static bool read_all(int file, char *to, int64_t size) {
    for (int64_t done = 0; done < size;) {
        ssize_t got = read(file, to + done, (size_t)(size - done));
        if (got < 0 && errno == EINTR) continue;
        if (got == 0) errno = EIO; /* it was cut short meanwhile */
        if (got <= 0) return false;
        done += got;
    }
    return true;
}

/* All of an open file, which is closed, as a heap block. */
static ml_status read_open(int file, const char *path, void **bytes, int64_t *size) {
    struct stat about;
    char *block = NULL;
    ml_status status = ML_OK;
    if (fstat(file, &about) != 0 || !S_ISREG(about.st_mode))
        status = ml_fail(ML_IO, "cannot read %s: it is not a file", path);
    else if ((block = ml_alloc((size_t)about.st_size + 1)) == NULL)
        status = ml_fail(ML_NO_MEMORY, "out of memory: %s has %lld bytes", path,
                         (long long)about.st_size);
    else if (!read_all(file, block, about.st_size))
        status = ml_fail(ML_IO, "cannot read %s: %s", path, strerror(errno));
    close(file);
    if (status != ML_OK) {
        ml_free(block);
        return status;
    }
    *bytes = block;
    *size = about.st_size;
    return ML_OK;
}

ml_status cache_read_file(const char *path, void **bytes, int64_t *size) {
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    return read_open(file, path, bytes, size);
}

/* Why an open entry is not one that this user's processes wrote; NULL where it may be one. */
static const char *distrust(int file) {
    struct stat about;
    if (fstat(file, &about) != 0) return strerror(errno);
    if (!S_ISREG(about.st_mode)) return "it is not a file";
    if (about.st_uid != geteuid()) return "another user owns it";
    if (about.st_mode & 022) return "other users may write to it";
    return NULL;
}

/* An entry becomes code of this process: a link, or a file that somebody else may have written, is
 * removed, and the kernel is compiled again. */
static ml_status open_entry(const char *path, int *file) {
    *file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (*file < 0 && errno != ELOOP)
        return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    const char *reason = *file < 0 ? "it is a link" : distrust(*file);
    if (reason == NULL) return ML_OK;
    if (*file >= 0) close(*file);
    fprintf(stderr, "mlua: %s in the kernel cache is not used: %s\n", path, reason);
    unlink(path);
    return ml_fail(ML_IO, "%s is not trusted: %s", path, reason);
}

ml_status ml_cache_read(uint64_t key[2], const char *suffix, void **bytes, int64_t *size) {
    char path[PATH_SIZE];
    int file;
    void *block;
    ml_status status = ml_cache_file(key, suffix, path, sizeof path);
    if (status == ML_OK) status = open_entry(path, &file);
    if (status == ML_OK) status = read_open(file, path, &block, size);
    if (status != ML_OK) return status;
    char *trailer = (char *)block + *size - TRAILER_SIZE;
    uint64_t hash = 0;
    bool whole = *size >= TRAILER_SIZE && memcmp(trailer, mark, sizeof mark) == 0;
    if (whole) memcpy(&hash, trailer + sizeof mark, sizeof hash);
    if (!whole || hash != ml_hash(block, (size_t)*size - TRAILER_SIZE, key[0])) {
        ml_free(block);
        unlink(path);
        return ml_fail(ML_IO, "%s is damaged", path);
    }
    note_use(path);
    *size -= TRAILER_SIZE;
    trailer[0] = 0;
    *bytes = block;
    return ML_OK;
}

bool cache_write_all(int file, const char *from, int64_t size) {
    for (int64_t done = 0; done < size;) {
        ssize_t put = write(file, from + done, (size_t)(size - done));
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        done += put;
    }
    return true;
}

static ml_status try_write(uint64_t key[2], const char *suffix, const void *bytes, int64_t size) {
    char in[PATH_SIZE], path[PATH_SIZE], temporary[PATH_SIZE], trailer[TRAILER_SIZE];
    ml_status status = ml_cache_path(in, sizeof in);
    if (status == ML_OK) status = entry_path(in, key, suffix, path, sizeof path);
    if (status == ML_OK) status = cache_temporary("part", temporary, sizeof temporary);
    if (status != ML_OK) return status;
    uint64_t hash = ml_hash(bytes, (size_t)size, key[0]);
    memcpy(trailer, mark, sizeof mark);
    memcpy(trailer + sizeof mark, &hash, sizeof hash);
    int file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return ml_fail(ML_IO, "cannot write %s: %s", temporary, strerror(errno));
    bool written =
        cache_write_all(file, bytes, size) && cache_write_all(file, trailer, TRAILER_SIZE);
    int problem = errno;
    if (close(file) != 0 && written) {
        written = false;
        problem = errno;
    }
    if (written && rename(temporary, path) == 0) return ML_OK;
    if (written) problem = errno;
    unlink(temporary);
    return ml_fail(ML_IO, "cannot write %s: %s", path, strerror(problem));
}

ml_status ml_cache_write(uint64_t key[2], const char *suffix, const void *bytes, int64_t size) {
    char tried[PATH_SIZE] = "";
    ml_status status = ml_cache_path(tried, sizeof tried);
    if (status == ML_OK) status = try_write(key, suffix, bytes, size);
    if (status == ML_OK) return ML_OK;
    /* A full disk, a quota or a deleted folder: go on in another one. */
    char reason[256];
    snprintf(reason, sizeof reason, "%.255s", ml_error_last()->text);
    if (status == ML_IO && tried[0]) status = cache_replace_folder(tried, reason);
    return status == ML_OK ? try_write(key, suffix, bytes, size) : status;
}

ml_status cache_save_source(const char *to, const char *name, const char *prelude,
                            const char *const *sources, int count, char *out, int size) {
    char path[PATH_SIZE] = "";
    if (to[0] != '/' && cache_options.keep != to) {
        ML_TRY(ml_cache_path(path, sizeof path));
        strncat(path, "/", sizeof path - strlen(path) - 1);
    }
    strncat(path, to, sizeof path - strlen(path) - 1);
    bool created = cache_make_folders(path);
    snprintf(out, (size_t)size, "%s/%s", path, name);
    if (created) unlink(out); /* no link is followed: the folder may be one that others write to */
    int to_file =
        created ? open(out, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644) : -1;
    FILE *file = to_file >= 0 ? fdopen(to_file, "w") : NULL;
    if (file == NULL) return ml_fail(ML_IO, "cannot write %s: %s", out, strerror(errno));
    fputs(prelude, file);
    for (int i = 0; i < count; i++) fprintf(file, "\n%s", sources[i]);
    return fclose(file) == 0 ? ML_OK : ml_fail(ML_IO, "cannot write %s: %s", out, strerror(errno));
}

static void save_source(const ml_kernel *kernel, ml_target_kind kind, const char *source) {
    static atomic_flag reported = ATOMIC_FLAG_INIT;
    const char *keep = cache_options.keep;
    char name[128], path[PATH_SIZE];
    snprintf(name, sizeof name, "%s.%s", kernel->entry, kind == ML_TARGET_CUDA ? "cu" : "c");
    snprintf(path, sizeof path, "%s/%s", keep, name);
    struct stat about;
    if (lstat(path, &about) == 0 && S_ISREG(about.st_mode))
        return; /* its name says what it holds */
    if (cache_save_source(keep, name, ml_prelude(kind), &source, 1, path, sizeof path) != ML_OK &&
        !atomic_flag_test_and_set(&reported))
        fprintf(stderr, "mlua: MLUA_KEEP=%s saves nothing: %s\n", keep, ml_error_last()->text);
}

void ml_jit_show(const ml_kernel *kernel, ml_target_kind kind, ml_arena *arena) {
    bool save = cache_options.keep != NULL && cache_options.keep[0] != 0;
    if (!ml_debug_on(4) && !save) return;
    const char *source = ml_kernel_source(kernel, arena);
    ml_text schedule = {.arena = arena};
    ml_text_add(&schedule, "%s: %s\n", kernel->entry, kernel->label);
    ml_kernel_print_schedule(kernel, &schedule);
    ml_debug(4, "%s%s\n", schedule.text, source);
    if (save) save_source(kernel, kind, source);
}

void cache_find_same(ml_kernel *const *kernels, int count, ml_arena *arena, int *same) {
    ml_index known = {.arena = arena};
    for (int i = 0; i < count; i++) {
        uint32_t cursor = 0, first = ml_index_next(&known, kernels[i]->key, &cursor);
        same[i] = first == ML_INDEX_NONE ? i : (int)first;
        if (first == ML_INDEX_NONE) ml_index_add(&known, kernels[i]->key, (uint32_t)i);
    }
}
