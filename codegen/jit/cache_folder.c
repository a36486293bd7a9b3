/* The folder of the kernel cache: which one it is, what takes its place, and the names of new files
 * in it. */
#define _GNU_SOURCE
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

#include "codegen/jit/cache.h"
#include "runtime/base/leftover.h"
#include "runtime/base/process.h"

enum { PATH_SIZE = 1024, KEY_DIGITS = 32, OWNER_ONLY = 0700 };
enum { DAY = 24 * 3600, STALE_SECONDS = 3600, UNUSED_SECONDS = 90 * DAY };

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
ml_jit_options cache_options;

void ml_jit_set_options(const ml_jit_options *options) {
    cache_options = *options;
}

const char *cache_failed_folder(void) {
    return cache_options.keep != NULL ? cache_options.keep : "failed";
}

bool cache_make_folders(const char *path) {
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
    if (!cache_make_folders(path) || stat(path, &about) != 0) return strerror(errno);
    if (!S_ISDIR(about.st_mode)) return "it is not a folder";
    if (about.st_uid != geteuid()) return "another user owns it";
    if (about.st_mode & 022) return "other users may write to it";
    if (access(path, R_OK | W_OK | X_OK) != 0) return "it is not writable";
    return NULL;
}

/* An absolute path: the compiler must not take a name for an option, nor a script change the
 * working directory that it is relative to. */
static bool wanted_path(char *out) {
    const char *cache = cache_options.cache, *xdg = getenv("XDG_CACHE_HOME"),
               *home = getenv("HOME");
    char here[PATH_SIZE] = "";
    int length = -1;
    if (cache != NULL && cache[0] != 0 && cache[0] != '/' && getcwd(here, sizeof here) == NULL)
        return false;
    if (cache != NULL && cache[0] != 0)
        length = snprintf(out, PATH_SIZE, "%s%s%s", here, here[0] ? "/" : "", cache);
    else if (xdg != NULL && xdg[0] == '/')
        length = snprintf(out, PATH_SIZE, "%s/mlua", xdg);
    else if (home != NULL && home[0] == '/')
        length = snprintf(out, PATH_SIZE, "%s/.cache/mlua", home);
    return length > 0 && length < PATH_SIZE - 128;
}

void cache_remove_folder(const char *path) {
    DIR *dir = opendir(path);
    if (dir == NULL) return;
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir))
        unlinkat(dirfd(dir), entry->d_name, 0);
    closedir(dir);
    rmdir(path);
}

static void remove_temporary(void) {
    if (folder.temporary && folder.owner == getpid()) cache_remove_folder(folder.path);
}

/* Where a temporary folder may be, in order; "" for a variable that is not set. */
static const char *temporary_base(int i) {
    static const char *const bases[] = {NULL, "/tmp", "/var/tmp", "/dev/shm"};
    const char *variable = getenv("TMPDIR");
    if (i > 0) return i < (int)(sizeof bases / sizeof *bases) ? bases[i] : NULL;
    return variable != NULL && variable[0] == '/' ? variable : "";
}

/* Whether a file of 64 KiB can be written there; errno says why not. */
static bool takes_files(const char *path) {
    static const char block[4096] = {1};
    enum { BLOCKS = 16 };
    char name[PATH_SIZE], tag[ML_LEFTOVER_TAG];
    ml_leftover_tag(tag);
    snprintf(name, sizeof name, "%.*s/tmp-%s-%u.probe", PATH_SIZE - 128, path, tag,
             atomic_fetch_add(&temporary_count, 1));
    int file = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return false;
    bool good = true;
    for (int i = 0; i < BLOCKS && good; i++)
        good = write(file, block, sizeof block) == (ssize_t)sizeof block;
    int problem = errno;
    if (close(file) != 0 && good) good = false, problem = errno;
    unlink(name);
    errno = problem;
    return good;
}

/* A new folder of our own in `base` that takes files; errno says why there is none. */
static bool make_temporary(const char *base, char path[PATH_SIZE]) {
    char tag[ML_LEFTOVER_TAG];
    ml_leftover_tag(tag);
    ml_leftover_remove_folders(base, "mlua-");
    snprintf(path, PATH_SIZE, "%.*s/mlua-%s-XXXXXX", PATH_SIZE - 128, base, tag);
    if (mkdtemp(path) == NULL) return false;
    if (takes_files(path)) return true;
    int problem = errno;
    rmdir(path);
    errno = problem;
    return false;
}

/* Go on in a temporary folder. Called with the mutex held. */
static ml_status use_temporary(const char *instead_of, const char *reason) {
    char path[PATH_SIZE], tried[512] = "";
    const char *base;
    bool created = false;
    for (int i = 0; !created && (base = temporary_base(i)) != NULL; i++) {
        if (base[0] == 0 || (created = make_temporary(base, path))) continue;
        size_t length = strlen(tried);
        snprintf(tried + length, sizeof tried - length, "; %.100s: %s", base, strerror(errno));
    }
    if (!created) {
        ml_fail(ML_IO, "no folder takes compiled kernels: %s: %s%s", instead_of, reason, tried);
        return ml_help("make room in one of them, or name another: MLUA_CACHE=DIR");
    }
    fprintf(stderr,
            "mlua: compiled kernels are not saved: %s: %s. MLUA_CACHE=DIR names another folder\n",
            instead_of, reason);
    if (!folder.temporary)
        snprintf(folder.former, sizeof folder.former, "%s", folder.path);
    else
        remove_temporary();
    if (folder.owner != getpid()) ml_process_at_end(remove_temporary);
    snprintf(folder.path, sizeof folder.path, "%s", path);
    folder.temporary = folder.chosen = true;
    folder.owner = getpid();
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

ml_status cache_replace_folder(const char *failed, const char *reason) {
    ml_status status = ML_OK;
    pthread_mutex_lock(&folder.mutex);
    if (folder.chosen && strcmp(folder.path, failed) == 0) {
        /* One that was deleted meanwhile is created again. */
        bool again = !folder.temporary && access(failed, F_OK) != 0 && refusal(failed) == NULL &&
                     takes_files(failed);
        if (!again) status = use_temporary(failed, reason);
    }
    pthread_mutex_unlock(&folder.mutex);
    return status;
}

bool cache_folder_takes_files(const char *path) {
    return takes_files(path);
}

void cache_former_folder(char *out, int size) {
    pthread_mutex_lock(&folder.mutex);
    snprintf(out, (size_t)size, "%s", folder.former);
    pthread_mutex_unlock(&folder.mutex);
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

/* Whether a name is one that cache_temporary gave. Other files are not ours: the user chooses the
 * folder. */
static bool is_temporary(const char *name) {
    char machine[17], stamp[9];
    int process, end = 0;
    unsigned number;
    int fields = sscanf(name, "tmp-%16[0-9a-f]-%d-%8[0-9a-f]-%u.%n", machine, &process, stamp,
                        &number, &end);
    return fields == 4 && end > 0 && strlen(machine) == 16 && strlen(stamp) == 8;
}

/* Remove what processes that died while they compiled left behind (of another machine after an
 * hour), and entries unused for months: kernels of models long changed. */
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
        if (is_entry ? !sweep : !is_temporary(name)) continue;
        if (!is_entry && ml_leftover_is_dead(name + 4))
            unlinkat(dirfd(dir), name, 0);
        else if (fstatat(dirfd(dir), name, &about, AT_SYMLINK_NOFOLLOW) == 0 &&
                 about.st_mtime < now - most)
            unlinkat(dirfd(dir), name, 0);
    }
    closedir(dir);
    ml_leftover_remove_folders(path, "tmp-"); /* of compilers' own temporary files */
}

ml_status cache_temporary(const char *suffix, char *out, int size) {
    static char tag[ML_LEFTOVER_TAG];
    static pid_t tagged;
    char path[PATH_SIZE];
    ML_TRY(ml_cache_path(path, sizeof path));
    pthread_mutex_lock(&folder.mutex);
    if (tagged != getpid()) { /* a forked process is another one */
        ml_leftover_tag(tag);
        tagged = getpid();
        remove_stale(path);
        for (int i = 0; temporary_base(i) != NULL; i++)
            if (temporary_base(i)[0] != 0) ml_leftover_remove_folders(temporary_base(i), "mlua-");
    }
    pthread_mutex_unlock(&folder.mutex);
    snprintf(out, (size_t)size, "%s/tmp-%s-%u.%s", path, tag, atomic_fetch_add(&temporary_count, 1),
             suffix);
    return ML_OK;
}
