/* Two locks in the cache's folder: NOW is shared by those that plan and exclusive to the one that
 * times; NEXT is held while one waits for NOW, so that those that come later wait behind it. They
 * end with their process. Each is waited for 10 s at most: without a folder, or where a process
 * that is stopped holds one, products are timed beside others. */
#include "vm/check/quiet.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "codegen/jit/jit.h"

enum { NOW, NEXT, LOCKS, PATH_SIZE = 1100 };
static int files[LOCKS] = {-1, -1};

static bool open_locks(void) {
    static const char *const names[LOCKS] = {"timing.now", "timing.next"};
    char folder[PATH_SIZE - 20], path[PATH_SIZE];
    if (files[NOW] >= 0) return true;
    if (ml_cache_path(folder, sizeof folder) != ML_OK) return false;
    bool opened = true;
    for (int i = 0; i < LOCKS; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        files[i] = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        opened = opened && files[i] >= 0;
    }
    for (int i = 0; i < LOCKS && !opened; files[i++] = -1)
        if (files[i] >= 0) close(files[i]);
    return opened;
}

static void lock(int which, int how) {
    enum { TRIES = 10000 }; /* milliseconds */
    const struct timespec moment = {.tv_nsec = 1000000};
    for (int i = 0; i < TRIES && flock(files[which], how | LOCK_NB) != 0; i++) {
        if (errno != EWOULDBLOCK && errno != EINTR) return; /* the folder's files have none */
        nanosleep(&moment, NULL);
    }
}

static void take(int how) {
    if (!open_locks()) return;
    lock(NEXT, LOCK_EX);
    lock(NOW, how);
}

void quiet_plan(void) {
    take(LOCK_SH);
    if (files[NEXT] >= 0) flock(files[NEXT], LOCK_UN);
}

void quiet_begin(void) {
    if (files[NOW] >= 0) flock(files[NOW], LOCK_UN);
    take(LOCK_EX);
}

void quiet_end(void) {
    for (int i = 0; i < LOCKS; i++)
        if (files[i] >= 0) flock(files[i], LOCK_UN);
}
