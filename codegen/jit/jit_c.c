/* Kernels through the system C compiler.
 *
 * Starting a compiler costs about as much as compiling a kernel, so missing kernels are compiled a
 * batch at a time into one shared object. Two kinds of cache entries: a batch's object ("so"),
 * and for each kernel a small file ("ref") that holds the key of its batch. */
#define _GNU_SOURCE
#include "codegen/jit/cache.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/command.h"
#include "runtime/base/knobs.h"

enum { PATH_SIZE = 1024, BATCH = 16, MAX_COMPILER_WORDS = 8, MAX_ARGUMENTS = 40 };

/* No -ffast-math: NaN and infinity keep their meaning, and sums their order. Products and sums are
 * joined to FMAs only in kernels that say so (contracts_begin): in others they are joined or not by
 * what else was fused, and results would depend on that. */
static const char *const flags[] = {
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-w",
    "-pipe",
#if defined(__x86_64__)
    "-march=native",
#else
    "-mcpu=native",
#endif
};
enum { FLAG_COUNT = sizeof flags / sizeof *flags };

static const char contracts_begin[] = "#ifdef __clang__\n"
                                      "#pragma float_control(push)\n"
                                      "#pragma clang fp contract(fast)\n"
                                      "#else\n"
                                      "#pragma GCC push_options\n"
                                      "#pragma GCC optimize(\"fp-contract=fast\")\n"
                                      "#endif\n",
                  contracts_end[] = "#ifdef __clang__\n"
                                    "#pragma float_control(pop)\n"
                                    "#else\n"
                                    "#pragma GCC pop_options\n"
                                    "#endif\n";

/* The compiler, found once. */
static struct {
    pthread_once_t once;
    bool found;
    char words[PATH_SIZE];                    /* $CC cut at blanks */
    const char *word[MAX_COMPILER_WORDS + 1]; /* command and its own arguments */
    int word_count;
    int first_flag;       /* of word[]: this one and those after it follow mlua's flags */
    char path[PATH_SIZE]; /* of the command */
    uint64_t identity;    /* of compiler, flags and processor */
} compiler = {.once = PTHREAD_ONCE_INIT};

typedef struct {
    uint64_t key[2];
    void *handle; /* of dlopen */
} object;

struct ml_jit_c {
    ml_arena *arena;
    ML_VEC(object) objects;
};

static bool find_in_path(const char *name, char *out) {
    if (strchr(name, '/') != NULL) {
        snprintf(out, PATH_SIZE, "%s", name);
        return access(out, X_OK) == 0;
    }
    const char *path = getenv("PATH");
    if (path == NULL) path = "/usr/local/bin:/usr/bin:/bin";
    while (*path != 0) {
        int length = (int)strcspn(path, ":");
        snprintf(out, PATH_SIZE, "%.*s/%s", length, path, name);
        if (length > 0 && access(out, X_OK) == 0) return true;
        path += length + (path[length] == ':');
    }
    return false;
}

/* What the processor is: the lines of /proc/cpuinfo that say which instructions it has. */
static uint64_t processor_identity(void) {
    static const char *const lines[] = {"model name",      "flags",    "Features", "vendor_id",
                                        "CPU implementer", "CPU part", "isa"};
    uint64_t hash = 0;
    char line[8192];
    FILE *file = fopen("/proc/cpuinfo", "re");
    if (file == NULL) return hash;
    while (fgets(line, sizeof line, file) != NULL && line[0] != '\n')
        for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
            if (strncmp(line, lines[i], strlen(lines[i])) == 0)
                hash = ml_hash(line, strlen(line), hash);
    fclose(file);
    return hash;
}

/* A new compiler is another file: its version need not be asked for, which would start it. */
static void find_compiler(void) {
    const char *command = getenv("CC");
    if (command == NULL || command[strspn(command, " ")] == 0) command = "cc";
    snprintf(compiler.words, sizeof compiler.words, "%s", command);
    char *rest = compiler.words;
    for (char *word; (word = strsep(&rest, " ")) != NULL;)
        if (word[0] != 0 && compiler.word_count < MAX_COMPILER_WORDS)
            compiler.word[compiler.word_count++] = word;
    for (compiler.first_flag = 1; compiler.first_flag < compiler.word_count; compiler.first_flag++)
        if (compiler.word[compiler.first_flag][0] == '-') break;
    struct stat about;
    if (!find_in_path(compiler.word[0], compiler.path) || stat(compiler.path, &about) != 0) return;
    compiler.found = true;
    uint64_t parts[] = {processor_identity(), (uint64_t)about.st_size, (uint64_t)about.st_mtime};
    uint64_t hash = ml_hash(parts, sizeof parts, 0);
    hash = ml_hash(compiler.path, strlen(compiler.path), hash);
    hash = ml_hash(command, strlen(command), hash);
    for (int i = 0; i < FLAG_COUNT; i++) hash = ml_hash(flags[i], strlen(flags[i]), hash);
    const char *prelude = ml_prelude(ML_TARGET_C);
    compiler.identity = ml_hash(prelude, strlen(prelude), hash);
}

static ml_status require_compiler(void) {
    pthread_once(&compiler.once, find_compiler);
    if (compiler.found) return ML_OK;
    ml_fail(ML_DEVICE,
            "no C compiler: \"%s\" is not on the PATH, and the CPU device compiles its "
            "kernels with it",
            compiler.word[0]);
    return ml_help("install one (Debian, Ubuntu: apt-get install gcc), or set CC to yours");
}

/* One compile job: some kernels, one object. */
typedef struct {
    ml_kernel *const *kernels;
    const char *const *sources;
    uint64_t (*kernel_keys)[2];
    int count;
    unsigned stops; /* see ml_command */
    uint64_t key[2];
    void *object; /* once compiled: a heap block of `size` bytes */
    int64_t size;
} batch;

typedef struct {
    char source[PATH_SIZE], object[PATH_SIZE], errors[PATH_SIZE];
    char folder[PATH_SIZE]; /* for the compiler's own temporary files */
} batch_files;

static ml_status write_source(const batch *b, const char *path) {
    FILE *file = fopen(path, "we");
    if (file == NULL) return ml_fail(ML_IO, "cannot write %s: %s", path, strerror(errno));
    fputs(ml_prelude(ML_TARGET_C), file);
    for (int i = 0; i < b->count; i++) {
        bool contracts = b->kernels[i]->contracts;
        fprintf(file, "\n%s%s\n%s", contracts ? contracts_begin : "", b->sources[i],
                contracts ? contracts_end : "");
    }
    bool written = !ferror(file);
    if (fclose(file) == 0 && written) return ML_OK;
    return ml_fail(ML_IO, "cannot write %s: %s", path, strerror(errno));
}

/* The first line that reports an error; NULL where there is none. Cuts `text` at its end. */
static char *first_error(char *text) {
    char *at = text == NULL ? NULL : strstr(text, "error");
    if (at == NULL) return text != NULL && text[0] != 0 ? text : NULL;
    while (at > text && at[-1] != '\n') at--;
    at[strcspn(at, "\n")] = 0;
    return at;
}

static ml_status compile_failure(const batch *b, const batch_files *files, int code) {
    if (code == -SIGINT || code == -SIGTERM) /* who stops this process stops its commands */
        return ml_fail(ML_INTERRUPTED, "interrupted while kernels were compiled");
    char saved[PATH_SIZE], name[64];
    snprintf(name, sizeof name, "%s.c", b->kernels[0]->entry);
    if (cache_save_source(cache_failed_folder(), name, ml_prelude(ML_TARGET_C), b->sources,
                          b->count, saved, sizeof saved) != ML_OK)
        snprintf(saved, sizeof saved, "(not saved)");
    void *text = NULL;
    int64_t size;
    if (cache_read_file(files->errors, &text, &size) != ML_OK) text = NULL;
    const char *error = first_error(text);
    if (code == ML_COMMAND_NOT_STARTED)
        ml_fail(ML_COMPILE, "cannot start the C compiler %s: source in %s", compiler.path, saved);
    else if (code < 0)
        ml_fail(ML_COMPILE, "the C compiler %s was killed by signal %d: source in %s",
                compiler.path, -code, saved);
    else
        ml_fail(ML_COMPILE, "a generated kernel (%s%s) does not compile: source in %s: %s",
                b->kernels[0]->label, b->count > 1 ? " or one beside it" : "", saved,
                error != NULL ? error : "the compiler gave no reason");
    ml_free(text);
    return ml_help("this is a bug of mlua, or of the compiler; CC=... tries another compiler");
}

/* Take what was compiled. That the cache cannot hold it costs time in the next run alone. */
static ml_status take_object(batch *b, const char *path) {
    ml_status status = cache_read_file(path, &b->object, &b->size);
    if (status != ML_OK) return status;
    status = ml_cache_write(b->key, "so", b->object, b->size);
    for (int i = 0; i < b->count && status == ML_OK; i++)
        status = ml_cache_write(b->kernel_keys[i], "ref", b->key, sizeof b->key);
    if (status != ML_OK) ml_debug(1, "%s\n", ml_error_last()->text);
    return ML_OK;
}

/* Whether the compiler failed for want of room: it says so, or its folder takes no file now. */
static bool lacks_room(const char *folder, const char *errors) {
    static const char *const signs[] = {"No space left", "quota exceeded", "Read-only file system",
                                        "Input/output error", "File too large"};
    if (!cache_folder_takes_files(folder)) return true;
    void *text;
    int64_t size;
    bool found = false;
    if (cache_read_file(errors, &text, &size) != ML_OK) return true;
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
        found = found || strstr(text, signs[i]) != NULL;
    ml_free(text);
    return found;
}

static ml_status run_compiler(batch *b, const batch_files *files, const char *folder) {
    const char *arguments[MAX_ARGUMENTS];
    int count = 0;
    arguments[count++] = compiler.path;
    for (int i = 1; i < compiler.first_flag; i++) arguments[count++] = compiler.word[i];
    for (int i = 0; i < FLAG_COUNT; i++) arguments[count++] = flags[i];
    for (int i = compiler.first_flag; i < compiler.word_count; i++)
        arguments[count++] = compiler.word[i];
    arguments[count++] = "-o";
    arguments[count++] = files->object;
    arguments[count++] = files->source;
    arguments[count++] = "-lm";
    arguments[count] = NULL;
    const ml_command compile = {.words = arguments,
                                .out = "/dev/null",
                                .errors = files->errors,
                                .files = {files->source, files->object, files->errors},
                                .temporaries = files->folder,
                                .stops = b->stops};
    int code = ml_command_run(&compile);
    bool interrupted = code == -SIGINT || code == -SIGTERM;
    if (code == 0) return take_object(b, files->object);
    if (!interrupted && lacks_room(folder, files->errors))
        return ml_fail(ML_IO, "the C compiler has no room for its files");
    return compile_failure(b, files, code);
}

/* In `folder`, the cache's. ML_IO where it is the folder that failed. */
static ml_status compile_in(batch *b, const char *folder) {
    batch_files files;
    ml_status status = cache_temporary("c", files.source, PATH_SIZE);
    if (status == ML_OK) status = cache_temporary("o", files.object, PATH_SIZE);
    if (status == ML_OK) status = cache_temporary("err", files.errors, PATH_SIZE);
    if (status == ML_OK) status = cache_temporary("d", files.folder, PATH_SIZE);
    if (status != ML_OK) return status;
    if (mkdir(files.folder, 0700) != 0)
        status = ml_fail(ML_IO, "cannot make %s: %s", files.folder, strerror(errno));
    if (status == ML_OK) status = write_source(b, files.source);
    if (status == ML_OK) status = run_compiler(b, &files, folder);
    cache_remove_folder(files.folder);
    unlink(files.source);
    unlink(files.object);
    unlink(files.errors);
    return status;
}

static ml_status compile_batch(batch *b) {
    enum { MOST_FOLDERS = 4 };
    char folder[PATH_SIZE], reason[256];
    for (int tried = 0;; tried++) {
        ml_status status = ml_cache_path(folder, sizeof folder);
        if (status != ML_OK) return status;
        status = compile_in(b, folder);
        if (status != ML_IO || tried == MOST_FOLDERS) return status;
        snprintf(reason, sizeof reason, "%.255s", ml_error_last()->text);
        ML_TRY(cache_replace_folder(folder, reason));
    }
}

static void compile_job(void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    batch *batches = context;
    for (int64_t i = begin; i < end; i++) ML_CHECK(compile_batch(&batches[i]));
}

static void cache_key(const char *source, uint64_t key[2]) {
    key[0] = ml_hash(source, strlen(source), compiler.identity);
    key[1] = ml_hash(source, strlen(source), ~compiler.identity);
}

/* Cut the missing kernels into batches: a few for each compiler, none too long. */
static batch *make_batches(ml_arena *arena, ml_kernel **missing, const char **sources,
                           uint64_t (*keys)[2], int count, int compilers, int *batch_count) {
    int rounds = (count + compilers * BATCH - 1) / (compilers * BATCH);
    int wanted = rounds * compilers < count ? rounds * compilers : count;
    batch *batches = ML_NEW_ARRAY(arena, batch, wanted);
    for (int i = 0; i < wanted; i++) {
        int begin = (int)((int64_t)i * count / wanted);
        batch *b = &batches[i];
        b->count = (int)((int64_t)(i + 1) * count / wanted) - begin;
        b->kernels = missing + begin;
        b->sources = sources + begin;
        b->stops = ml_command_stops();
        b->kernel_keys = keys + begin;
        b->key[0] = ml_hash(b->kernel_keys, sizeof *keys * (size_t)b->count, 0);
        b->key[1] = ml_hash(b->kernel_keys, sizeof *keys * (size_t)b->count, 1);
    }
    *batch_count = wanted;
    return batches;
}

/* A path of an open file that no other load has: dlopen takes two files of one name for the same,
 * and descriptors are used again. The bits of a counter are empty components and dots. */
static void unique_path(int file, char path[PATH_SIZE]) {
    static atomic_uint loads;
    unsigned number = atomic_fetch_add(&loads, 1);
    int size = snprintf(path, PATH_SIZE, "/proc/self/fd");
    for (int bit = 0; bit < 32; bit++)
        size += snprintf(path + size, (size_t)(PATH_SIZE - size), number >> bit & 1 ? "/." : "/");
    snprintf(path + size, (size_t)(PATH_SIZE - size), "/%d", file);
}

/* From a file in memory, so that what is loaded is what was checked, and a folder that forbids
 * execution (noexec) serves as a cache. */
static void *load_from_memory(const void *bytes, int64_t size) {
    char path[PATH_SIZE];
    int file = memfd_create("mlua-kernels", MFD_CLOEXEC);
    if (file < 0) return NULL;
    unique_path(file, path);
    void *handle = cache_write_all(file, bytes, size) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    close(file);
    return handle;
}

/* Where the system forbids that: from a new file in the cache. */
static void *load_from_folder(const void *bytes, int64_t size) {
    char path[PATH_SIZE];
    if (cache_temporary("so", path, sizeof path) != ML_OK) return NULL;
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
    bool written = file >= 0 && cache_write_all(file, bytes, size);
    if (file >= 0) close(file);
    void *handle = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (handle == NULL) {
        ml_fail(ML_DEVICE, "cannot load compiled kernels: %s", written ? dlerror() : path);
        ml_help("the system executes neither files in memory nor those of the kernel cache: "
                "MLUA_CACHE=DIR names a folder where it does");
    }
    if (file >= 0) unlink(path);
    return handle;
}

/* A checked object, loaded; NULL with an error where the system refuses. */
static void *load_object(ml_jit_c *jit, const uint64_t key[2], const void *bytes, int64_t size) {
    object *loaded = ML_PUSH(jit->arena, &jit->objects);
    memcpy(loaded->key, key, sizeof loaded->key);
    loaded->handle = load_from_memory(bytes, size);
    if (loaded->handle == NULL) loaded->handle = load_from_folder(bytes, size);
    if (loaded->handle == NULL) jit->objects.count--;
    return loaded->handle;
}

/* The object of a batch; NULL where it is not in the cache, is damaged, or does not load. */
static void *open_object(ml_jit_c *jit, uint64_t key[2]) {
    for (uint32_t i = 0; i < jit->objects.count; i++)
        if (memcmp(jit->objects.at[i].key, key, sizeof(uint64_t[2])) == 0)
            return jit->objects.at[i].handle;
    void *bytes;
    int64_t size;
    if (ml_cache_read(key, "so", &bytes, &size) != ML_OK) return NULL;
    void *handle = load_object(jit, key, bytes, size);
    ml_free(bytes);
    return handle;
}

static ml_c_function *function_of(void *handle, const ml_kernel *kernel) {
    union {
        void *object;
        ml_c_function *function;
    } symbol = {dlsym(handle, kernel->entry)};
    return symbol.function;
}

static ml_c_function *find_function(ml_jit_c *jit, const ml_kernel *kernel, uint64_t key[2]) {
    void *reference;
    int64_t size;
    uint64_t batch_key[2];
    if (ml_cache_read(key, "ref", &reference, &size) != ML_OK) return NULL;
    if (size == sizeof batch_key) memcpy(batch_key, reference, sizeof batch_key);
    ml_free(reference);
    void *handle = size == sizeof batch_key ? open_object(jit, batch_key) : NULL;
    return handle != NULL ? function_of(handle, kernel) : NULL;
}

typedef struct {
    ml_kernel *const *kernels;
    const char **sources; /* of distinct kernels */
    int count;
    ml_pool *pool;
    ml_jit_c *jit;
    ml_c_function **functions;
    batch *batches; /* of what the cache lacks; 0 where it lacks nothing */
    int batch_count;
} load_call;

/* The functions of a compiled batch; its first kernel is missing[0]. */
static void load_batch(const load_call *call, const batch *b, const int *missing) {
    void *handle = load_object(call->jit, b->key, b->object, b->size);
    if (handle == NULL) ml_raise_last();
    for (int i = 0; i < b->count; i++) {
        ml_c_function *function = function_of(handle, b->kernels[i]);
        if (function == NULL)
            ml_raise(ML_INTERNAL, "kernel %s is missing from its compiled object",
                     b->kernels[i]->label);
        call->functions[missing[i]] = function;
    }
}

/* Compile what the cache lacks. */
static void compile_missing(load_call *call, const int *missing, int count) {
    ml_arena *arena = call->jit->arena;
    ml_kernel **kernels = ML_NEW_ARRAY(arena, ml_kernel *, count);
    const char **sources = ML_NEW_ARRAY(arena, const char *, count);
    uint64_t(*keys)[2] = (uint64_t(*)[2])ml_arena_alloc(arena, sizeof(uint64_t[2]) * (size_t)count);
    for (int i = 0; i < count; i++) {
        kernels[i] = call->kernels[missing[i]];
        sources[i] = call->sources[missing[i]];
        cache_key(sources[i], keys[i]);
    }
    int threads = call->pool != NULL ? ml_pool_threads(call->pool) : 1,
        most = cache_options.compilers;
    bool fewer = most > 0 && most < threads;
    batch *batches = make_batches(arena, kernels, sources, keys, count, fewer ? most : threads,
                                  &call->batch_count);
    call->batches = batches;
    ml_debug(1, "compiling %d kernels in %d batches\n", count, call->batch_count);
    int parts = fewer && most < call->batch_count ? most : call->batch_count; /* run at once */
    if (call->pool != NULL)
        ML_CHECK(ml_pool_run(call->pool, call->batch_count, parts, compile_job, batches));
    else
        compile_job(batches, 0, call->batch_count, 0);
    for (int i = 0; i < call->batch_count; i++)
        load_batch(call, &batches[i], missing + (batches[i].kernels - kernels));
}

static void load_body(void *argument) {
    load_call *call = argument;
    ml_arena *arena = call->jit->arena;
    ML_CHECK(require_compiler());
    int *same = ML_NEW_ARRAY(arena, int, call->count + 1);
    call->sources = ML_NEW_ARRAY(arena, const char *, call->count + 1);
    int *missing = ML_NEW_ARRAY(arena, int, call->count + 1), missing_count = 0;
    cache_find_same(call->kernels, call->count, arena, same);
    for (int i = 0; i < call->count; i++) {
        uint64_t key[2];
        if (same[i] != i) continue;
        ml_jit_show(call->kernels[i], ML_TARGET_C, arena);
        call->sources[i] = ml_kernel_source(call->kernels[i], arena);
        cache_key(call->sources[i], key);
        call->functions[i] = find_function(call->jit, call->kernels[i], key);
        if (call->functions[i] == NULL) missing[missing_count++] = i;
    }
    if (missing_count > 0) compile_missing(call, missing, missing_count);
    for (int i = 0; i < call->count; i++) call->functions[i] = call->functions[same[i]];
}

ml_status ml_jit_c_load(ml_kernel *const *kernels, int count, ml_pool *pool, ml_jit_c **jit,
                        ml_c_function **functions) {
    *jit = ml_alloc(sizeof **jit);
    if (*jit == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while compiling kernels");
    (*jit)->arena = ml_arena_new();
    load_call call = {
        .kernels = kernels, .count = count, .pool = pool, .jit = *jit, .functions = functions};
    ml_status status = (*jit)->arena != NULL
                           ? ml_protect(load_body, &call)
                           : ml_fail(ML_NO_MEMORY, "out of memory while compiling kernels");
    for (int i = 0; i < call.batch_count; i++) ml_free(call.batches[i].object);
    if (status != ML_OK) {
        ml_jit_c_free(*jit);
        *jit = NULL;
    }
    return status;
}

void ml_jit_c_free(ml_jit_c *jit) {
    if (jit == NULL) return;
    for (uint32_t i = 0; i < jit->objects.count; i++) dlclose(jit->objects.at[i].handle);
    if (jit->arena != NULL) ml_arena_free(jit->arena);
    ml_free(jit);
}

ml_status ml_jit_c_describe(char *out, int size) {
    ml_status status = require_compiler();
    char answer[PATH_SIZE], errors[PATH_SIZE];
    if (status == ML_OK) status = cache_temporary("out", answer, sizeof answer);
    if (status == ML_OK) status = cache_temporary("err", errors, sizeof errors);
    if (status != ML_OK) return status;
    const char *arguments[] = {compiler.path, "--version", NULL};
    void *text = NULL;
    int64_t length = 0;
    const ml_command ask = {.words = arguments,
                            .out = answer,
                            .errors = errors,
                            .files = {answer, errors},
                            .stops = ml_command_stops()};
    bool answered = ml_command_run(&ask) == 0 && cache_read_file(answer, &text, &length) == ML_OK;
    const char *line = answered ? text : "of unknown version";
    snprintf(out, (size_t)size, "%.*s (%s)", (int)strcspn(line, "\n"), line, compiler.path);
    ml_free(text);
    unlink(answer);
    unlink(errors);
    return ML_OK;
}
