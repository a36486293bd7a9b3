#define _GNU_SOURCE
#include "codegen/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/knobs.h"
#include "runtime/base/leftover.h"
#include "runtime/base/process.h"

enum { PATH_SIZE = 1024, TRAILER_SIZE = 16, KEY_DIGITS = 32, OWNER_ONLY = 0700 };
enum { DAY = 24 * 3600, STALE_SECONDS = 3600, UNUSED_SECONDS = 90 * DAY };
static const char mark[8] = {'m', 'l', 'u', 'a', 'c', 'a', 'c', 'h'};

/* The folder, chosen at first use. A temporary one serves where the real one cannot be written;
 * what the real one held by then is read on. */
static struct {
    pthread_mutex_t mutex;
    bool chosen, temporary;
    pid_t owner; /* the process that removes the temporary folder */
    char path[PATH_SIZE];
    char former[PATH_SIZE]; /* the folder before a temporary one; "" where there was none */
} folder = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static atomic_uint temporary_count;

/* Make a folder and its parents. */
static bool make_folders(const char *path) {
    char part[PATH_SIZE];
    snprintf(part, sizeof part, "%s", path);
    for (char *slash = strchr(part + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(part, OWNER_ONLY) != 0 && errno != EEXIST) return false;
        *slash = '/';
    }
    return mkdir(part, OWNER_ONLY) == 0 || errno == EEXIST;
}

/* Why a folder cannot serve; NULL where it can. Others must not be able to plant code in it. */
static const char *refusal(const char *path) {
    struct stat about;
    if (!make_folders(path) || stat(path, &about) != 0) return strerror(errno);
    if (!S_ISDIR(about.st_mode)) return "it is not a folder";
    if (about.st_uid != geteuid()) return "another user owns it";
    if (about.st_mode & 022) return "other users may write to it";
    if (access(path, R_OK | W_OK | X_OK) != 0) return "it is not writable";
    return NULL;
}

static bool wanted_path(char *out) {
    const char *cache = ml_knobs()->cache, *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length = -1;
    if (cache != NULL && cache[0] != 0)
        length = snprintf(out, PATH_SIZE, "%s", cache);
    else if (xdg != NULL && xdg[0] == '/')
        length = snprintf(out, PATH_SIZE, "%s/mlua", xdg);
    else if (home != NULL && home[0] != 0)
        length = snprintf(out, PATH_SIZE, "%s/.cache/mlua", home);
    return length > 0 && length < PATH_SIZE - 128;
}

static void remove_temporary(void) {
    if (!folder.temporary || folder.owner != getpid()) return;
    DIR *dir = opendir(folder.path);
    if (dir == NULL) return;
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir))
        unlinkat(dirfd(dir), entry->d_name, 0);
    closedir(dir);
    rmdir(folder.path);
}

static const char *temporary_base(void) {
    const char *base = getenv("TMPDIR");
    return base != NULL && base[0] == '/' ? base : "/tmp";
}

/* Called with the mutex held. */
static ml_status use_temporary(const char *instead_of, const char *reason) {
    const char *base = temporary_base();
    char path[PATH_SIZE], tag[ML_LEFTOVER_TAG];
    ml_leftover_tag(tag);
    ml_leftover_remove_folders(base, "mlua-");
    snprintf(path, sizeof path, "%.*s/mlua-%s-XXXXXX", PATH_SIZE - 128, base, tag);
    if (mkdtemp(path) == NULL)
        return ml_fail(ML_IO, "cannot make a folder for compiled kernels: %s: %s; in %s: %s",
                       instead_of, reason, base, strerror(errno));
    fprintf(stderr,
            "mlua: compiled kernels are not kept: %s: %s. MLUA_CACHE=DIR names another folder\n",
            instead_of, reason);
    snprintf(folder.former, sizeof folder.former, "%s", folder.path);
    snprintf(folder.path, sizeof folder.path, "%s", path);
    folder.temporary = folder.chosen = true;
    folder.owner = getpid();
    ml_process_at_end(remove_temporary);
    return ML_OK;
}

static ml_status choose_folder(void) {
    char path[PATH_SIZE] = "";
    if (folder.chosen) return ML_OK;
    if (!wanted_path(path)) return use_temporary("the cache", "neither MLUA_CACHE nor HOME is set");
    const char *reason = refusal(path);
    if (reason != NULL) return use_temporary(path, reason);
    snprintf(folder.path, sizeof folder.path, "%s", path);
    folder.chosen = true;
    return ML_OK;
}

ml_status ml_cache_path(char *out, int size) {
    pthread_mutex_lock(&folder.mutex);
    ml_status status = choose_folder();
    if (status == ML_OK) snprintf(out, (size_t)size, "%s", folder.path);
    pthread_mutex_unlock(&folder.mutex);
    return status;
}

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
    pthread_mutex_lock(&folder.mutex);
    snprintf(former, sizeof former, "%s", folder.former);
    pthread_mutex_unlock(&folder.mutex);
    if (former[0] == 0 || entry_path(former, key, suffix, out, size) != ML_OK ||
        access(out, F_OK) != 0)
        status = entry_path(path, key, suffix, out, size);
    return status;
}

/* Whether the folder's entries were last looked through more than a day ago: there may be many, on
 * a slow file system. The time is that of the file "swept". */
static bool sweep_is_due(int dir) {
    struct stat about;
    if (fstatat(dir, "swept", &about, 0) == 0 && about.st_mtime > time(NULL) - DAY) return false;
    int file = openat(dir, "swept", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return false;
    futimens(file, NULL);
    close(file);
    return true;
}

/* Remove what processes that died while they compiled left behind (of another machine after an
 * hour), and entries that nobody has used for months: kernels of models long changed. */
static void remove_stale(const char *path) {
    DIR *dir = opendir(path);
    if (dir == NULL) return;
    bool sweep = sweep_is_due(dirfd(dir));
    time_t now = time(NULL);
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        const char *name = entry->d_name;
        bool is_entry = strspn(name, "0123456789abcdef") == KEY_DIGITS && name[KEY_DIGITS] == '.';
        time_t most = is_entry ? UNUSED_SECONDS : STALE_SECONDS;
        struct stat about;
        if (is_entry ? !sweep : strncmp(name, "tmp-", 4) != 0) continue;
        if (!is_entry && ml_leftover_is_dead(name + 4))
            unlinkat(dirfd(dir), name, 0);
        else if (fstatat(dirfd(dir), name, &about, AT_SYMLINK_NOFOLLOW) == 0 &&
                 about.st_mtime < now - most)
            unlinkat(dirfd(dir), name, 0);
    }
    closedir(dir);
}

/* An entry's time says when it was last used, to a day. */
static void note_use(const char *path) {
    struct stat about;
    if (stat(path, &about) == 0 && about.st_mtime < time(NULL) - DAY)
        (void)utimensat(AT_FDCWD, path, NULL, 0);
}

ml_status cache_temporary(const char *suffix, char *out, int size) {
    static char tag[ML_LEFTOVER_TAG];
    static pid_t tagged;
    char path[PATH_SIZE];
    ml_status status = ml_cache_path(path, sizeof path);
    if (status != ML_OK) return status;
    pthread_mutex_lock(&folder.mutex);
    if (tagged != getpid()) { /* a forked process is another one */
        ml_leftover_tag(tag);
        tagged = getpid();
        remove_stale(path);
        ml_leftover_remove_folders(temporary_base(), "mlua-");
    }
    pthread_mutex_unlock(&folder.mutex);
    snprintf(out, (size_t)size, "%s/tmp-%s-%u.%s", path, tag, atomic_fetch_add(&temporary_count, 1),
             suffix);
    return ML_OK;
}

static bool read_all(int file, char *to, int64_t size) {
    for (int64_t done = 0; done < size;) {
        ssize_t got = read(file, to + done, (size_t)(size - done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        done += got;
    }
    return true;
}

ml_status cache_read_file(const char *path, void **bytes, int64_t *size) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (file < 0) return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
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

ml_status ml_cache_read(uint64_t key[2], const char *suffix, void **bytes, int64_t *size) {
    char path[PATH_SIZE];
    ml_status status = ml_cache_file(key, suffix, path, sizeof path);
    if (status != ML_OK) return status;
    void *block;
    status = cache_read_file(path, &block, size);
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

static bool write_all(int file, const char *from, int64_t size) {
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
    bool written = write_all(file, bytes, size) && write_all(file, trailer, TRAILER_SIZE);
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
    char tried[PATH_SIZE];
    ml_status status = ml_cache_path(tried, sizeof tried);
    if (status == ML_OK) status = try_write(key, suffix, bytes, size);
    if (status == ML_OK) return ML_OK;
    /* A full disk or a quota: go on from a temporary folder, which the write of another thread may
     * have made already. */
    pthread_mutex_lock(&folder.mutex);
    bool moved = folder.chosen && strcmp(folder.path, tried) != 0;
    if (folder.chosen && !moved && !folder.temporary) {
        char reason[256];
        snprintf(reason, sizeof reason, "%.255s", ml_error_last()->text);
        status = use_temporary(tried, reason);
        moved = status == ML_OK;
    }
    pthread_mutex_unlock(&folder.mutex);
    return moved ? try_write(key, suffix, bytes, size) : status;
}

ml_status cache_keep(const char *to, const char *name, const char *prelude,
                     const char *const *sources, int count, char *out, int size) {
    char path[PATH_SIZE] = "";
    if (to[0] != '/' && ml_knobs()->keep != to) {
        ml_status status = ml_cache_path(path, sizeof path);
        if (status != ML_OK) return status;
        strncat(path, "/", sizeof path - strlen(path) - 1);
    }
    strncat(path, to, sizeof path - strlen(path) - 1);
    bool made = make_folders(path);
    snprintf(out, (size_t)size, "%s/%s", path, name);
    FILE *file = made ? fopen(out, "we") : NULL;
    if (file == NULL) return ml_fail(ML_IO, "cannot write %s: %s", out, strerror(errno));
    fputs(prelude, file);
    for (int i = 0; i < count; i++) fprintf(file, "\n%s", sources[i]);
    return fclose(file) == 0 ? ML_OK : ml_fail(ML_IO, "cannot write %s: %s", out, strerror(errno));
}

void cache_keep_if_asked(const ml_kernel *kernel, const char *prelude, const char *extension) {
    static atomic_flag told = ATOMIC_FLAG_INIT;
    const char *keep = ml_knobs()->keep;
    char name[128], path[PATH_SIZE];
    if (keep == NULL || keep[0] == 0) return;
    snprintf(name, sizeof name, "%s.%s", kernel->entry, extension);
    snprintf(path, sizeof path, "%s/%s", keep, name);
    if (access(path, F_OK) == 0) return; /* its name says what it holds */
    if (cache_keep(keep, name, prelude, &kernel->source, 1, path, sizeof path) != ML_OK &&
        !atomic_flag_test_and_set(&told))
        fprintf(stderr, "mlua: MLUA_KEEP=%s keeps nothing: %s\n", keep, ml_error_last()->text);
}

void cache_find_same(ml_kernel *const *kernels, int count, ml_arena *arena, int *same) {
    ml_index known = {.arena = arena};
    for (int i = 0; i < count; i++) {
        uint32_t cursor = 0, first;
        while ((first = ml_index_next(&known, kernels[i]->key, &cursor)) != ML_INDEX_NONE)
            if (strcmp(kernels[first]->source, kernels[i]->source) == 0) break;
        same[i] = first == ML_INDEX_NONE ? i : (int)first;
        if (first == ML_INDEX_NONE) ml_index_add(&known, kernels[i]->key, (uint32_t)i);
    }
}
