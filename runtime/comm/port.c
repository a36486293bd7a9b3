/* Who has a TCP port: its socket is listed in /proc/net/tcp, with its owner, and the process that
 * has it open is found by its descriptors, as far as this user may look. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/comm/join_internal.h"

enum { TIME_WAIT = 6, LISTEN = 10, MOST_PROCESSES = 1 << 15, MOST_DESCRIPTORS = 4096 };
typedef struct {
    unsigned long inode; /* 0: not found */
    unsigned user;
} holder;

/* A listening socket above others. */
static void look_into(const char *path, int port, holder *found) {
    char line[512];
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        unsigned local, state, user;
        unsigned long inode;
        if (sscanf(line, "%*d: %*[0-9A-F]:%x %*[0-9A-F]:%*x %x %*s %*s %*s %u %*d %lu", &local,
                   &state, &user, &inode) != 4)
            continue;
        if (local != (unsigned)port || state == TIME_WAIT || !inode) continue;
        if (found->inode && state != LISTEN) continue;
        *found = (holder){inode, user};
    }
    if (file) fclose(file);
}

static bool has_open(const char *process, const char *socket) {
    char path[320], target[64];
    snprintf(path, sizeof path, "/proc/%s/fd", process);
    DIR *dir = opendir(path);
    bool found = false;
    struct dirent *entry;
    for (int i = 0; dir && !found && i < MOST_DESCRIPTORS && (entry = readdir(dir)); i++) {
        ssize_t size = readlinkat(dirfd(dir), entry->d_name, target, sizeof target - 1);
        target[size > 0 ? size : 0] = 0;
        found = strcmp(target, socket) == 0;
    }
    if (dir) closedir(dir);
    return found;
}

/* When it started, in ticks of the system; 0: not known. */
static unsigned long long start_of(const char *process) {
    char path[320], line[1024];
    unsigned long long ticks = 0;
    snprintf(path, sizeof path, "/proc/%s/stat", process);
    FILE *file = fopen(path, "re");
    const char *after = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    enum { FIELDS = 20 }; /* behind the name, which may have spaces */
    for (int i = 0; after && i < FIELDS; i++) after = strchr(after + 1, ' ');
    if (after) ticks = strtoull(after, NULL, 10);
    if (file) fclose(file);
    return ticks;
}

/* Of the processes that have it open the first one: others have inherited it. */
static bool name_process(const char *socket, char *text, size_t size) {
    DIR *dir = opendir("/proc");
    unsigned long long first = 0;
    bool found = false;
    struct dirent *entry;
    for (int i = 0; dir && i < MOST_PROCESSES && (entry = readdir(dir)); i++) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
        if (!has_open(entry->d_name, socket)) continue;
        const unsigned long long start = start_of(entry->d_name);
        if (found && start >= first) continue;
        char path[320], name[64] = "a program";
        snprintf(path, sizeof path, "/proc/%s/comm", entry->d_name);
        FILE *file = fopen(path, "re");
        if (file && fgets(name, sizeof name, file)) name[strcspn(name, "\n")] = 0;
        if (file) fclose(file);
        snprintf(text, size, "%s (pid %.16s)", name, entry->d_name);
        found = true;
        first = start;
    }
    if (dir) closedir(dir);
    return found;
}

void join_port_holder(int port, char *text, size_t size) {
    holder found = {0};
    char socket[64];
    look_into("/proc/net/tcp", port, &found);
    look_into("/proc/net/tcp6", port, &found);
    snprintf(socket, sizeof socket, "socket:[%lu]", found.inode);
    if (found.inode && name_process(socket, text, size)) return;
    if (found.inode && found.user != geteuid())
        snprintf(text, size, "user %u", found.user);
    else
        snprintf(text, size, "another program");
}
