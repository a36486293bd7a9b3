/* Which basic blocks of mlua each test reaches (make reach). The compiler calls
 * __sanitizer_cov_trace_pc in each block (-fsanitize-coverage=trace-pc); it sets a byte for the
 * call in a file that is mapped, $MLUA_REACH/AREA@NAME.PROGRAM, so that what a process reached
 * stays however it ends. Processes that a test starts inherit its name. compare.py reads the files.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Bytes; a call takes 5, so that each has a byte of its own among every fourth. */
enum { SIZE = 4 << 20, SPACING = 4 };
static unsigned char none[SIZE], *reached = none;
extern const char __executable_start[];
static const char variable[] = "MLUA_REACH_TEST";

void __sanitizer_cov_trace_pc(void) {
    size_t offset = (size_t)((const char *)__builtin_return_address(0) - __executable_start);
    if (offset / SPACING < SIZE) reached[offset / SPACING] = 1;
}

static void map_file(const char *test) {
    const char *folder = getenv("MLUA_REACH");
    char path[512], name[256];
    if (!folder || !test) return;
    snprintf(name, sizeof name, "%s", test);
    for (char *at; (at = strchr(name, '/')) != NULL;) *at = '@';
    snprintf(path, sizeof path, "%s/%s.%s", folder, name, program_invocation_short_name);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, SIZE) != 0) return;
    bool again = reached != none;
    void *map = mmap(again ? reached : NULL, SIZE, PROT_READ | PROT_WRITE,
                     MAP_SHARED | (again ? MAP_FIXED : 0), file, 0);
    close(file);
    if (map != MAP_FAILED) reached = map;
}

void test_begins(const char *name) {
    setenv(variable, name, 1);
    map_file(name);
}

__attribute__((constructor(101))) static void start(void) {
    map_file(getenv(variable));
}
