/* Limits of control groups, read from trees of files as systems have them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/cgroup.h"
#include "tests/test.h"

/* A line of a tree: "FILE CONTENTS"; @ in FILE is a space. */
typedef struct {
    const char *const *lines;
    int64_t memory;
    int cores;
} tree;

static const char *const version2[] = {
    "proc/self/mountinfo 24 1 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw",
    "proc/self/cgroup 0::/user.slice/job",
    "sys/fs/cgroup/user.slice/job/memory.max max",
    "sys/fs/cgroup/user.slice/job/cpu.max 150000 100000",
    "sys/fs/cgroup/user.slice/memory.max 3221225472",
    "sys/fs/cgroup/user.slice/cpu.max max 100000",
    NULL,
};
/* A container that sees its own group alone, as what is mounted. */
static const char *const container1[] = {
    "proc/self/mountinfo 30 1 0:26 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "31 1 0:27 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 1 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
    "proc/self/cgroup 5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/",
    "sys/fs/cgroup/memory/memory.limit_in_bytes 1073741824",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us 400000",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us 100000",
    NULL,
};
static const char *const unlimited1[] = {
    "proc/self/mountinfo 30 1 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "31 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
    "proc/self/cgroup 5:memory:/job\n4:cpu:/job",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes 9223372036854771712",
    "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us -1",
    "sys/fs/cgroup/cpu/job/cpu.cfs_period_us 100000",
    NULL,
};
/* Spaces and backslashes, which mountinfo writes in octal. */
static const char *const escaped[] = {
    "proc/self/mountinfo 24 1 0:22 /a\\040job\\134x /cgroup\\0401 rw - cgroup2 cgroup2 rw",
    "proc/self/cgroup 0::/a job\\x/part",
    "cgroup@1/part/memory.max 4096",
    "cgroup@1/cpu.max 300000 100000",
    NULL,
};
static const char *const none[] = {"proc/self/mountinfo 24 1 0:22 / /proc rw - proc proc rw", NULL};

static void write_tree(const char *folder, const char *const *lines) {
    for (; *lines; lines++) {
        char path[512], command[1200];
        const char *contents = strchr(*lines, ' ') + 1;
        snprintf(path, sizeof path, "%s/%.*s", folder, (int)(contents - 1 - *lines), *lines);
        for (char *at = path; (at = strchr(at, '@'));) *at = ' ';
        snprintf(command, sizeof command, "mkdir -p \"$(dirname \"%s\")\"", path);
        REQUIRE(system(command) == 0);
        FILE *file = fopen(path, "w");
        REQUIRE(file != NULL);
        fprintf(file, "%s\n", contents);
        fclose(file);
    }
}

TEST(base, limits_of_control_groups) {
    static const tree trees[] = {{version2, 3221225472, 2},
                                 {container1, 1073741824, 4},
                                 {unlimited1, 0, 0},
                                 {escaped, 4096, 3},
                                 {none, 0, 0}};
    for (size_t i = 0; i < sizeof trees / sizeof *trees; i++) {
        char folder[] = "/tmp/mlua-test-XXXXXX", command[64];
        REQUIRE(mkdtemp(folder) != NULL);
        write_tree(folder, trees[i].lines);
        CHECK_EQ_INT(ml_cgroup_memory(folder), trees[i].memory);
        CHECK_EQ_INT(ml_cgroup_cores(folder), trees[i].cores);
        snprintf(command, sizeof command, "rm -r %s", folder);
        CHECK(system(command) == 0);
    }
    CHECK(ml_cgroup_memory("/nowhere") == 0);
}
