#define _GNU_SOURCE
#include "runtime/base/cgroup.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_SIZE = 4096, LINE_SIZE = 8192 };

typedef struct {
    bool unified; /* version 2 */
    char root[PATH_SIZE], mount[PATH_SIZE];
} hierarchy;

/* Whether `word` is one of a list that commas separate. */
static bool lists(const char *list, const char *word) {
    size_t length = strlen(word);
    for (const char *at = list; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, word, length) == 0 && (at[length] == 0 || at[length] == ',')) return true;
    }
    return false;
}

/* What mountinfo writes as \040 (octal) is one character: space, tab, newline, backslash. */
static void decode(char *text) {
    char *to = text;
    for (const char *at = text; *at; to++) {
        int value = 0, digits = 0;
        for (; *at == '\\' && digits < 3 && at[1 + digits] >= '0' && at[1 + digits] <= '7';
             digits++)
            value = 8 * value + (at[1 + digits] - '0');
        *to = digits == 3 ? (char)value : *at;
        at += digits == 3 ? 4 : 1;
    }
    *to = 0;
}

/* A line of mountinfo: "36 35 98:0 ROOT MOUNT OPTIONS ... - TYPE SOURCE SUPER-OPTIONS" (proc(5)).
 */
static bool read_mount(char *line, const char *controller, hierarchy *out) {
    char *type = strstr(line, " - "), *end, name[64], super[LINE_SIZE];
    if (type == NULL || sscanf(type + 3, "%63s %*s %8191s", name, super) != 2) return false;
    out->unified = strcmp(name, "cgroup2") == 0;
    if (!out->unified && (strcmp(name, "cgroup") != 0 || !lists(super, controller))) return false;
    char *field = line;
    for (int i = 0; i < 3 && field != NULL; i++) field = strchr(field + 1, ' ');
    if (field == NULL || (end = strchr(field + 1, ' ')) == NULL) return false;
    snprintf(out->root, PATH_SIZE, "%.*s", (int)(end - field - 1), field + 1);
    snprintf(out->mount, PATH_SIZE, "%.*s", (int)strcspn(end + 1, " "), end + 1);
    decode(out->root);
    decode(out->mount);
    return true;
}

/* Where the controller is mounted: version 1 where it is there, as version 2 lacks it then. */
static bool find_hierarchy(const char *root, const char *controller, hierarchy *found) {
    char path[PATH_SIZE], line[LINE_SIZE];
    hierarchy here;
    bool any = false;
    snprintf(path, sizeof path, "%.2048s/proc/self/mountinfo", root);
    FILE *file = fopen(path, "re");
    if (file == NULL) return false;
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = 0;
        if (!read_mount(line, controller, &here) || (any && here.unified)) continue;
        *found = here;
        any = true;
    }
    fclose(file);
    return any;
}

/* This process's group in the hierarchy: a line "ID:CONTROLLERS:PATH", of version 2 "0::PATH". */
static bool find_group(const char *root, const char *controller, bool unified, char *group) {
    char path[PATH_SIZE], line[LINE_SIZE];
    bool found = false;
    snprintf(path, sizeof path, "%.2048s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    if (file == NULL) return false;
    while (!found && fgets(line, sizeof line, file) != NULL) {
        char *list = strchr(line, ':'), *at = list != NULL ? strchr(list + 1, ':') : NULL;
        if (at == NULL) continue;
        *at = 0;
        if (unified ? strcmp(line, "0:") != 0 : !lists(list + 1, controller)) continue;
        at[1 + strcspn(at + 1, "\n")] = 0;
        snprintf(group, PATH_SIZE, "%s", at + 1);
        found = true;
    }
    fclose(file);
    return found;
}

static FILE *open_limit(const char *root, const char *mount, const char *group, const char *name) {
    char path[3 * PATH_SIZE];
    snprintf(path, sizeof path, "%s%s%s/%s", root, mount, group, name);
    return fopen(path, "re");
}

typedef struct {
    const char *root, *mount, *group;
    bool unified;
    double least; /* 0: no limit so far */
} search;

static void note(search *s, double limit) {
    if (limit > 0 && (s->least == 0 || limit < s->least)) s->least = limit;
}

/* Files say "max" where there is no limit in version 2, and a number near 2^63 in version 1. */
static void memory_of_group(search *s) {
    double bytes;
    FILE *file = open_limit(s->root, s->mount, s->group,
                            s->unified ? "memory.max" : "memory.limit_in_bytes");
    if (file == NULL) return;
    if (fscanf(file, "%lf", &bytes) == 1 && bytes < 0x1p62) note(s, bytes);
    fclose(file);
}

static void cores_of_group(search *s) {
    double quota = 0, period = 0;
    FILE *file =
        open_limit(s->root, s->mount, s->group, s->unified ? "cpu.max" : "cpu.cfs_quota_us");
    if (file == NULL) return;
    int fields = fscanf(file, "%lf %lf", &quota, &period); /* "max 100000", or -1: no limit */
    fclose(file);
    if (!s->unified && (file = open_limit(s->root, s->mount, s->group, "cpu.cfs_period_us"))) {
        fields += fscanf(file, "%lf", &period);
        fclose(file);
    }
    if (fields == 2 && quota > 0 && period > 0) note(s, quota / period);
}

/* The least limit from the process's group up to what is mounted. */
static double least_limit(const char *root, const char *controller, void (*look)(search *)) {
    hierarchy h;
    char group[PATH_SIZE] = "";
    if (!find_hierarchy(root, controller, &h)) return 0;
    if (!find_group(root, controller, h.unified, group)) return 0;
    /* A container may see its own group as what is mounted, under its name outside. */
    size_t length = strcmp(h.root, "/") == 0 ? 0 : strlen(h.root);
    bool below = strncmp(group, h.root, length) == 0 && (group[length] == '/' || !group[length]);
    char *at = below ? group + length : strcpy(group, "");
    search s = {.root = root, .mount = h.mount, .group = at, .unified = h.unified};
    for (char *slash = at;; *slash = 0) {
        look(&s);
        if ((slash = strrchr(at, '/')) == NULL) return s.least;
    }
}

int64_t ml_cgroup_memory(const char *root) {
    return (int64_t)least_limit(root, "memory", memory_of_group);
}

int ml_cgroup_cores(const char *root) {
    double cores = least_limit(root, "cpu", cores_of_group);
    return (int)cores + (cores > (int)cores);
}

int64_t ml_memory_here(void) {
    int64_t pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    int64_t bytes = pages > 0 && page > 0 ? pages * page : 0, limit = ml_cgroup_memory("");
    return limit > 0 && (bytes == 0 || limit < bytes) ? limit : bytes;
}
