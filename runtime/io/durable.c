#define _GNU_SOURCE /* renameat2 */
#include "runtime/io/durable.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/knobs.h"
#include "runtime/base/memory.h"

static _Atomic int64_t done, fault;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fault_read(void) {
    atomic_store(&fault, ml_knobs()->fault_io);
}

int64_t ml_durable_fault(int64_t n) {
    pthread_once(&once, fault_read);
    int64_t before = atomic_load(&done);
    atomic_store(&fault, n > 0 ? before + n : 0);
    return before;
}

static void operation(void) {
    pthread_once(&once, fault_read);
    int64_t number = atomic_fetch_add(&done, 1) + 1;
    if (number == atomic_load(&fault)) kill(getpid(), SIGKILL);
}

static ml_status failed(const char *what, const char *path) {
    const int reason = errno;
    ml_fail(ML_IO, "cannot %s %s: %s", what, path, strerror(reason));
    if (reason == ENOSPC || reason == EDQUOT) return ml_help("free some space on that disk");
    if (reason == EROFS || reason == EACCES) return ml_help("name a folder that may be written");
    return ML_IO;
}

ml_status ml_durable_folder(const char *path) {
    operation();
    return mkdir(path, 0777) == 0 ? ML_OK : failed("make the folder", path);
}

ml_status ml_durable_open(const char *path, int *descriptor) {
    operation();
    *descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    return *descriptor >= 0 ? ML_OK : failed("write", path);
}

ml_status ml_durable_write(int descriptor, const char *path, int64_t offset, const void *from,
                           int64_t bytes) {
    operation();
    for (int64_t at = 0; at < bytes;) {
        ssize_t count =
            pwrite(descriptor, (const char *)from + at, (size_t)(bytes - at), (off_t)(offset + at));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return failed("write", path);
        at += count;
    }
    return ML_OK;
}

ml_status ml_durable_sync(int descriptor, const char *path) {
    operation();
    return fsync(descriptor) == 0 ? ML_OK : failed("write", path);
}

/* Some file systems have nothing to sync in a folder. */
ml_status ml_durable_sync_folder(const char *path) {
    operation();
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return failed("open the folder", path);
    bool synced = fsync(folder) == 0 || errno == EINVAL || errno == ENOTSUP;
    ml_status status = synced ? ML_OK : failed("write", path);
    close(folder);
    return status;
}

ml_status ml_durable_sync_parent(const char *path) {
    char parent[4096];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash == NULL) return ml_durable_sync_folder(".");
    slash[slash == parent] = 0;
    return ml_durable_sync_folder(parent);
}

ml_status ml_durable_folders(const char *path) {
    char part[4096];
    const size_t length = strlen(path);
    if (length >= sizeof part) return ml_fail(ML_IO, "the path %.80s... is too long", path);
    memcpy(part, path, length + 1);
    for (char *at = part + 1; length && at <= part + length; at++) {
        if (*at && *at != '/') continue;
        const char kept = *at;
        *at = 0;
        if (access(part, F_OK) != 0) {
            operation();
            if (mkdir(part, 0777) == 0)
                ML_TRY(ml_durable_sync_parent(part));
            else if (errno != EEXIST)
                return failed("make the folder", part);
        }
        *at = kept;
    }
    return ML_OK;
}

ml_status ml_durable_file(const char *path, const void *from, size_t bytes) {
    int descriptor;
    ML_TRY(ml_durable_open(path, &descriptor));
    ml_status status = ml_durable_write(descriptor, path, 0, from, (int64_t)bytes);
    if (status == ML_OK) status = ml_durable_sync(descriptor, path);
    close(descriptor);
    return status;
}

ml_status ml_durable_rename(const char *from, const char *to, bool *swapped) {
    *swapped = false;
    operation();
    if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) return ML_OK;
    if (errno == EEXIST) {
        operation();
        *swapped = renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_EXCHANGE) == 0;
        return *swapped ? ML_OK : failed("replace", to);
    }
    /* file systems without those flags: a folder does not replace one that holds files */
    if (errno != EINVAL && errno != ENOSYS) return failed("give the name", to);
    return rename(from, to) == 0 ? ML_OK : failed("give the name", to);
}

ml_status ml_durable_unlink(const char *path) {
    operation();
    return unlink(path) == 0 || errno == ENOENT ? ML_OK : failed("remove", path);
}

ml_status ml_durable_remove(const char *path) {
    char name[4096];
    struct stat kind; /* what a link names stays */
    if (lstat(path, &kind) == 0 && S_ISLNK(kind.st_mode)) return ml_durable_unlink(path);
    DIR *folder = opendir(path);
    if (folder == NULL) return errno == ENOENT ? ML_OK : failed("remove", path);
    ml_status status = ML_OK;
    /* the manifest first: what is left of a folder is then no checkpoint */
    snprintf(name, sizeof name, "%s/manifest.json", path);
    if (access(name, F_OK) == 0) status = ml_durable_unlink(name);
    for (struct dirent *entry; status == ML_OK && (entry = readdir(folder)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        status = ml_durable_unlink(name);
    }
    closedir(folder);
    if (status != ML_OK) return status;
    operation();
    return rmdir(path) == 0 || errno == ENOENT ? ML_OK : failed("remove", path);
}
