#define _GNU_SOURCE
#include "runtime/base/leftover.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/memory.h"

enum { MOST_ENTRIES = 1 << 16, MOST_FOLDERS = 64, MOST_FILES = 4096, MACHINE_DIGITS = 16 };

static unsigned long long read_machine(void) {
    char text[320] = "", host[65] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file) {
        if (!fgets(text, 64, file)) text[0] = 0;
        fclose(file);
    }
    size_t used = strlen(text);
    ssize_t more = readlink("/proc/self/ns/pid", text + used, 64);
    text[used + (more > 0 ? (size_t)more : 0)] = 0;
    gethostname(host, sizeof host - 1);
    strcat(text, host);
    return ml_hash(text, strlen(text), 0);
}

static unsigned long long machine(void) {
    static atomic_ullong known;
    unsigned long long value = atomic_load(&known);
    if (!value) atomic_store(&known, value = read_machine());
    return value;
}

void ml_leftover_tag(char tag[ML_LEFTOVER_TAG]) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint32_t stamp = (uint32_t)ml_hash(&now, sizeof now, 0);
    snprintf(tag, ML_LEFTOVER_TAG, "%016llx-%d-%08x", machine(), (int)getpid(), stamp);
}

bool ml_leftover_is_dead(const char *name) {
    char own[MACHINE_DIGITS + 2], *end;
    snprintf(own, sizeof own, "%016llx-", machine());
    if (strncmp(name, own, sizeof own - 1) != 0) return false;
    long pid = strtol(name + sizeof own - 1, &end, 10);
    return *end == '-' && pid > 0 && pid <= INT32_MAX && kill((pid_t)pid, 0) != 0 && errno == ESRCH;
}

static void remove_folder(int parent, const char *name) {
    struct stat about;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir =
        fd >= 0 && fstat(fd, &about) == 0 && about.st_uid == geteuid() ? fdopendir(fd) : NULL;
    if (!dir) {
        if (fd >= 0) close(fd);
        return;
    }
    struct dirent *entry;
    for (int i = 0; i < MOST_FILES && (entry = readdir(dir)) != NULL; i++)
        unlinkat(fd, entry->d_name, 0);
    closedir(dir);
    unlinkat(parent, name, AT_REMOVEDIR);
}

void ml_leftover_remove_folders(const char *path, const char *prefix) {
    DIR *dir = opendir(path);
    if (!dir) return;
    size_t length = strlen(prefix);
    struct dirent *entry;
    int removed = 0;
    for (int i = 0; i < MOST_ENTRIES && removed < MOST_FOLDERS && (entry = readdir(dir)); i++) {
        if (strncmp(entry->d_name, prefix, length) != 0) continue;
        if (!ml_leftover_is_dead(entry->d_name + length)) continue;
        remove_folder(dirfd(dir), entry->d_name);
        removed++;
    }
    closedir(dir);
}
