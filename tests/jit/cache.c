/* The kernel cache, and what the compilers say about kernels that do not compile. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "codegen/jit/jit.h"
#include "tests/test.h"

enum { PATH_SIZE = 1024 };

/* Overwrite byte `at` (from the end where negative) of a cache entry, or cut it there. */
static void damage(uint64_t key[2], const char *suffix, long at, bool cut) {
    char path[PATH_SIZE];
    REQUIRE(ml_cache_file(key, suffix, path, sizeof path) == ML_OK);
    if (cut) {
        REQUIRE(truncate(path, at) == 0);
        return;
    }
    FILE *file = fopen(path, "r+");
    REQUIRE(file != NULL);
    fseek(file, at, at < 0 ? SEEK_END : SEEK_SET);
    int old = fgetc(file);
    fseek(file, -1, SEEK_CUR);
    fputc(old ^ 0x55, file);
    fclose(file);
}

TEST(jit, cache_keeps_and_checks) {
    uint64_t key[2] = {0x1234, (uint64_t)getpid()};
    char text[] = "sixteen bytes or more of a kernel", path[PATH_SIZE];
    void *bytes;
    int64_t size;
    CHECK_STATUS(ml_cache_read(key, "test", &bytes, &size), ML_IO);
    CHECK_STATUS(ml_cache_write(key, "test", text, sizeof text), ML_OK);
    CHECK_STATUS(ml_cache_read(key, "test", &bytes, &size), ML_OK);
    CHECK_EQ_INT(size, (int64_t)sizeof text);
    CHECK_TEXT((char *)bytes, text);
    ml_free(bytes);
    const long places[] = {0, 20, -1, -12};
    for (int i = 0; i < 6; i++) {
        CHECK_STATUS(ml_cache_write(key, "test", text, sizeof text), ML_OK);
        damage(key, "test", i < 4 ? places[i] : i == 4 ? 10 : 0, i >= 4);
        CHECK_STATUS(ml_cache_read(key, "test", &bytes, &size), ML_IO);
        CHECK_STATUS(ml_cache_file(key, "test", path, sizeof path), ML_OK);
        CHECK(access(path, F_OK) != 0); /* a damaged entry is removed */
    }
}

TEST(jit, cache_is_private) {
    char path[PATH_SIZE];
    struct stat about;
    uint64_t key[2] = {0x4321, (uint64_t)getpid()};
    CHECK_STATUS(ml_cache_write(key, "test", "x", 1), ML_OK); /* the first one makes the folder */
    REQUIRE(ml_cache_path(path, sizeof path) == ML_OK);
    REQUIRE(stat(path, &about) == 0);
    CHECK_EQ_INT(about.st_uid, geteuid());
    CHECK_EQ_INT(about.st_mode & 022, 0);
}

/* --- a folder that can no longer be written, in the midst of a run --- */

typedef struct {
    uint64_t key[2];
    ml_status status;
} write_job;

static bool has_entry(uint64_t key[2]) {
    void *bytes;
    int64_t size;
    if (ml_cache_read(key, "test", &bytes, &size) != ML_OK) return false;
    ml_free(bytes);
    return true;
}

static void *write_entry(void *argument) {
    write_job *job = argument;
    job->status = ml_cache_write(job->key, "test", "entry", 6);
    return NULL;
}

/* The number of what failed. */
static int lose_folder(void) {
    enum { WRITERS = 4 };
    char path[PATH_SIZE], away[PATH_SIZE + 8], temporary[PATH_SIZE], file[PATH_SIZE];
    write_job before = {.key = {0x5678, (uint64_t)getpid()}}, jobs[WRITERS];
    pthread_t threads[WRITERS];
    if (ml_cache_path(path, sizeof path) != ML_OK) return 1;
    snprintf(away, sizeof away, "%s.away", path);
    write_entry(&before);
    if (before.status != ML_OK || rename(path, away) != 0) return 2;
    if (mknod(path, S_IFREG | 0600, 0) != 0) return 11; /* no folder can be made there */
    for (int i = 0; i < WRITERS; i++) {
        jobs[i] = (write_job){.key = {(uint64_t)i, (uint64_t)getpid()}};
        pthread_create(&threads[i], NULL, write_entry, &jobs[i]);
    }
    for (int i = 0; i < WRITERS; i++) pthread_join(threads[i], NULL);
    if (unlink(path) != 0 || rename(away, path) != 0) return 3;
    if (ml_cache_path(temporary, sizeof temporary) != ML_OK || !strcmp(temporary, path)) return 4;
    for (int i = 0; i < WRITERS; i++) {
        if (jobs[i].status != ML_OK) return 5;
        if (!has_entry(jobs[i].key)) return 6;
        ml_cache_file(jobs[i].key, "test", file, sizeof file);
        if (strncmp(file, temporary, strlen(temporary)) != 0 || unlink(file) != 0) return 7;
    }
    if (!has_entry(before.key)) return 8; /* read on */
    if (ml_cache_file(before.key, "test", file, sizeof file) != ML_OK || unlink(file)) return 9;
    return rmdir(temporary) == 0 ? 0 : 10;
}

/* What body gives in another run of this program, of this test alone, with a cache of its own. */
static void in_own_cache(const char *test, int (*body)(void)) {
    char folder[] = "/tmp/mlua-test-XXXXXX", self[PATH_SIZE] = "", command[3 * PATH_SIZE];
    if (getenv("CACHE_OF_ITS_OWN") != NULL) {
        CHECK_EQ_INT(body(), 0);
        return;
    }
    REQUIRE(readlink("/proc/self/exe", self, sizeof self - 1) > 0 && mkdtemp(folder) != NULL);
    snprintf(command, sizeof command,
             "cd %s; CACHE_OF_ITS_OWN=1 TMPDIR=$PWD MLUA_CACHE=$PWD/cache '%s' %s >log 2>&1 || "
             "{ cat log; exit 1; }; cd /; rm -r %s",
             folder, self, test, folder);
    CHECK_EQ_INT(system(command), 0);
}

TEST(jit, cache_folder_is_lost) {
    in_own_cache("jit/cache_folder_is_lost", lose_folder);
}

/* Make an entry and let it be `days` old. */
static void old_entry(uint64_t number, int days, char *path) {
    uint64_t key[2] = {number, (uint64_t)getpid()};
    struct timespec times[2] = {{.tv_sec = time(NULL) - days * 86400L}};
    times[1] = times[0];
    ml_cache_write(key, "test", "entry", 6);
    ml_cache_file(key, "test", path, PATH_SIZE);
    utimensat(AT_FDCWD, path, times, 0);
}

static int look_after(void) {
    char unused[PATH_SIZE], old[PATH_SIZE], folder[PATH_SIZE];
    uint64_t key[2] = {22, (uint64_t)getpid()};
    struct stat about;
    old_entry(21, 100, unused);
    old_entry(22, 50, old);
    if (!has_entry(key)) return 1;
    if (stat(old, &about) != 0 || about.st_mtime < time(NULL) - 3600) return 2; /* used now */
    if (ml_cache_path(folder, sizeof folder) != ML_OK) return 3;
    strncat(folder, "/swept", sizeof folder - strlen(folder) - 1);
    unlink(folder);
    pid_t child = fork(); /* a new process looks after the folder before it writes, once a day */
    if (child == 0) _exit((old_entry(23, 0, folder), unlink(folder)));
    if (child < 0 || waitpid(child, NULL, 0) != child) return 4;
    if (access(unused, F_OK) == 0) return 5;
    return unlink(old) == 0 ? 0 : 6;
}

TEST(jit, cache_forgets_what_is_not_used) {
    in_own_cache("jit/cache_forgets_what_is_not_used", look_after);
}

static ml_kernel kernel_of(ml_arena *arena, const char *name, const char *body) {
    ml_kernel kernel = {.entry = name, .label = "test kernel"};
    const char *source = ml_arena_format(
        arena,
        "void %s(char *const *p, const long long *s, long long begin, long long end)\n{%s}\n", name,
        body);
    kernel.recipe = source;
    kernel.key = ml_hash(source, strlen(source), 0);
    return kernel;
}

TEST(jit, kernels_share_batches_and_sources) {
    enum { COUNT = 23 };
    ml_arena *arena = ml_arena_new();
    ml_kernel kernels[COUNT], *list[COUNT];
    ml_c_function *functions[COUNT];
    for (int i = 0; i < COUNT; i++) {
        int number = i % 20; /* the last three are copies */
        kernels[i] =
            kernel_of(arena, ml_arena_format(arena, "kernel_%d_%d", number, getpid()),
                      ml_arena_format(arena, "((int *)p[0])[0] = %d + (int)begin;", number));
        list[i] = &kernels[i];
    }
    ml_pool *pool = ml_pool_new(2);
    for (int round = 0; round < 2; round++) { /* compiled, then from the cache */
        ml_jit_c *jit;
        REQUIRE(ml_jit_c_load(list, COUNT, round == 0 ? pool : NULL, &jit, functions) == ML_OK);
        for (int i = 0; i < COUNT; i++) {
            int result = 0;
            char *pointers[] = {(char *)&result};
            functions[i](pointers, NULL, 100, 101);
            CHECK_EQ_INT(result, 100 + i % 20);
        }
        CHECK(functions[20] == functions[0]);
        ml_jit_c_free(jit);
    }
    ml_pool_free(pool);
    ml_arena_free(arena);
}

static int open_descriptors(void) {
    int count = 0;
    for (int i = 0; i < 256; i++) count += fcntl(i, F_GETFD) != -1;
    return count;
}

/* Objects that are loaded at once are different ones, although their files are closed. */
TEST(jit, loaded_kernels_hold_no_descriptor) {
    enum { COUNT = 3 };
    ml_arena *arena = ml_arena_new();
    ml_jit_c *jits[COUNT];
    ml_c_function *functions[COUNT];
    int before = open_descriptors();
    for (int i = 0; i < COUNT; i++) {
        ml_kernel kernel = kernel_of(arena, ml_arena_format(arena, "alone_%d_%d", i, getpid()),
                                     ml_arena_format(arena, "*(int *)p[0] = %d;", i)),
                  *list = &kernel;
        REQUIRE(ml_jit_c_load(&list, 1, NULL, &jits[i], &functions[i]) == ML_OK);
    }
    CHECK_EQ_INT(open_descriptors(), before);
    for (int i = 0; i < COUNT; i++) {
        int result = -1;
        char *pointers[] = {(char *)&result};
        functions[i](pointers, NULL, 0, 1);
        CHECK_EQ_INT(result, i);
    }
    for (int i = 0; i < COUNT; i++) ml_jit_c_free(jits[i]);
    ml_arena_free(arena);
}

TEST(jit, failing_kernel_is_saved) {
    ml_arena *arena = ml_arena_new();
    ml_kernel kernel = kernel_of(arena, "broken", "no_such_thing = 1;"), *list = &kernel;
    ml_c_function *function;
    ml_jit_c *jit;
    CHECK_STATUS(ml_jit_c_load(&list, 1, NULL, &jit, &function), ML_COMPILE);
    CHECK(jit == NULL);
    const char *text = ml_error_last()->text, *path = strstr(text, "source in ");
    CHECK(strstr(text, "test kernel") != NULL && strstr(text, "no_such_thing") != NULL);
    CHECK(path != NULL);
    if (path != NULL) {
        const char *name = ml_arena_format(arena, "%.*s", (int)strcspn(path + 10, ":"), path + 10);
        CHECK(access(name, R_OK) == 0);
        unlink(name);
    }
    ml_arena_free(arena);
}

TEST(jit, failing_cuda_kernel_is_saved) {
    char description[128];
    if (ml_jit_cuda_describe(description, sizeof description) != ML_OK)
        test_skip("%s", ml_error_last()->text);
    ml_kernel kernel = {.entry = "broken",
                        .label = "test kernel",
                        .recipe = "extern \"C\" __global__ void broken() { no_such_thing = 1; }"};
    ml_kernel *list = &kernel;
    const void *image;
    int64_t size;
    ml_jit_cuda *jit;
    CHECK_STATUS(ml_jit_cuda_compile(&list, 1, 90, NULL, &jit, &image, &size), ML_COMPILE);
    CHECK(jit == NULL);
    CHECK(strstr(ml_error_last()->text, "no_such_thing") != NULL);
    CHECK(strstr(ml_error_last()->text, "broken.cu") != NULL);
    CHECK_STATUS(ml_jit_cuda_compile(&list, 1, 999, NULL, &jit, &image, &size), ML_DEVICE);
    CHECK(strstr(ml_error_last()->text, "(sm_999)") != NULL); /* a GPU newer than NVRTC */
}

/* A run's copy serves where the cache has no entry; a damaged one, and one of another kind or size,
 * does not. */
TEST(jit, choices) {
    char folder[64] = "/tmp/mlua-choices-XXXXXX", path[128];
    uint64_t key[2] = {0x1234, (uint64_t)getpid()};
    const uint64_t written[2] = {77, 5};
    uint64_t read[2] = {77}, other[2] = {78};
    REQUIRE(mkdtemp(folder) != NULL);
    CHECK_STATUS(ml_choices_keep(folder), ML_OK);
    CHECK(!ml_choice_read(key, "choice", read, sizeof read));
    CHECK_STATUS(ml_choice_write(key, "choice", written, sizeof written), ML_OK);
    REQUIRE(ml_cache_file(key, "choice", path, sizeof path) == ML_OK);
    CHECK(unlink(path) == 0);
    CHECK(ml_choice_read(key, "choice", read, sizeof read) && read[1] == 5);
    CHECK(!ml_choice_read(key, "choice", other, sizeof other) && other[1] == 0);
    CHECK(!ml_choice_read(key, "choice", read, sizeof read[0]));
    snprintf(path, sizeof path, "%s/%016llx%016llx.choice", folder, (unsigned long long)key[0],
             (unsigned long long)key[1]);
    FILE *file = fopen(path, "r+b");
    REQUIRE(file != NULL);
    fputc('F', file);
    fclose(file);
    CHECK(!ml_choice_read(key, "choice", read, sizeof read));
    CHECK_STATUS(ml_choices_keep(NULL), ML_OK);
    CHECK(unlink(path) == 0 && rmdir(folder) == 0);
}
