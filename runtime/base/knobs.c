#define _GNU_SOURCE /* environ */
#include "runtime/base/knobs.h"

#include "runtime/base/suggest.h"

#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef enum {
    NUMBER,
    LARGE_NUMBER,
    FLAG,
    TEXT,
    WORD, /* the one word that the syntax names; 0 is the same as not set */
} knob_kind;
typedef struct {
    const char *name, *syntax, *meaning;
    knob_kind kind;
    size_t offset; /* in ml_knobs_values */
} knob;

#define AT(field) offsetof(ml_knobs_values, field)
static const knob KNOBS[] = {
    {"MLUA_DEBUG", "0..5",
     "print more: 1 device and choices, 2 steps with times, 3 plans with kernel IR, 4 "
     "schedules and sources of kernels, 5 passes",
     NUMBER, AT(debug)},
    {"MLUA_TIMES", "0|1",
     "print what each part of the compiler took: processor time, and the memory of the process "
     "after it",
     FLAG, AT(times)},
    {"MLUA_DUMP", "PASS[@NAME]", "print the graph after a pass, of the program called NAME", TEXT,
     AT(dump)},
    {"MLUA_VERIFY", "0|1", "verify the graph after every pass", FLAG, AT(verify)},
    {"MLUA_CHECK", "cpu",
     "compare what every kernel writes with the reference interpreter (small models: it is slow)",
     WORD, AT(check)},
    {"MLUA_NOFUSE", "0|1", "one kernel for each op", FLAG, AT(no_fuse)},
    {"MLUA_KEEP", "DIR", "keep the sources of generated kernels in DIR", TEXT, AT(keep)},
    {"MLUA_OOM", "N", "let the N-th allocation fail, to test what happens then", LARGE_NUMBER,
     AT(out_of_memory)},
    {"MLUA_CACHE", "DIR", "keep compiled kernels in DIR", TEXT, AT(cache)},
    {"MLUA_COMPILERS", "N",
     "C compilers that a process runs at once for its kernels; where not set, as many as CPU "
     "threads. Fewer compile more kernels each and take less time together",
     NUMBER, AT(compilers)},
    {"MLUA_TUNE", "0|1",
     "0: time nothing, but take the GPU library's first algorithm for each GEMM, and cuDNN for "
     "attention",
     FLAG, AT(tune)},
    {"MLUA_CUDNN", "0|1", "0: attention runs on mlua's own kernels on the GPU", FLAG, AT(cudnn)},
    {"MLUA_DETERMINISTIC", "0|1",
     "0: let cuDNN's attention gradient add up in any order, which is faster", FLAG,
     AT(deterministic)},
    {"MLUA_WGMMA", "0..3",
     "mlua's own kernels with Hopper's warpgroup instructions (attention, products by groups of "
     "rows): "
     "1 to 3 choose the tile sizes of attention's forward pass (default 1); 0: without these "
     "kernels",
     NUMBER, AT(wgmma)},
    {"MLUA_TMA", "0|1", "0: products by groups of rows without Hopper's copy engine", FLAG,
     AT(tma)},
    {"MLUA_EARLY", "0|1",
     "0: in programs that run often each kernel on a GPU starts after the one ahead has ended; "
     "else it starts before, and waits itself",
     FLAG, AT(early)},
    {"MLUA_BLAS", "0|1",
     "matrix products on the CPU: 0 by mlua's own kernels, 1 by OpenBLAS; by the faster where not "
     "set",
     NUMBER, AT(blas)},
    {"MLUA_RECOMPUTE", "0|1",
     "1: compute activations again in the backward pass wherever that saves memory; 0: only where "
     "the budget of memory needs it; "
     "where not set likewise, but on a GPU those whose recomputation is cheap first (selective)",
     NUMBER, AT(recompute)},
    {"MLUA_HOST_LINK", "GB/S",
     "what a GPU copies to host memory a second, and as much back at the same time; values of the "
     "forward pass are kept there where the budget of memory needs it and the copies are hidden. "
     "0: never; on a CPU, where only tests want it, that is the default",
     NUMBER, AT(host_link)},
    {"MLUA_CHUNK", "MIB",
     "compute logits of more than MIB MiB, and their loss, in chunks of tokens (default 1024, "
     "in FP8 512); 0: never in chunks",
     NUMBER, AT(chunk)},
    {"MLUA_PARAM_CACHE", "0|1",
     "0: each step casts parameters for a GPU's products anew; else the casts are stored (the "
     "parameter cache) and updated with the parameters, or once a step by pipeline stages, where "
     "memory allows",
     FLAG, AT(param_cache)},
    {"MLUA_FOLD", "0|1",
     "0: the compiler's passes see all layers of a model; else few of those that repeat, and copy "
     "what became of them",
     FLAG, AT(fold)},
    {"MLUA_BATCH", "0|1",
     "0: a launch for each kernel; else a GPU runs those that are alike in one", FLAG, AT(batch)},
    {"MLUA_OVERLAP", "0|1",
     "order the steps so that collectives run beside computation: 0 never; 1 also on a CPU, which "
     "runs one step at a time (to test the order); default: on GPUs",
     NUMBER, AT(overlap)},
    {"MLUA_HALVES", "0|1",
     "one half of the batch computes while the other exchanges: 0 never, 1 wherever it can; "
     "default: on GPUs, where that hides much",
     NUMBER, AT(halves)},
    {"MLUA_GRAPHS", "0|1",
     "a GPU runs a program as one CUDA graph: 0 never, but step by step on its streams; 1 wherever "
     "it can; default: but for long programs that copy beside computation",
     NUMBER, AT(graphs)},
    {"MLUA_PEER", "0..8",
     "N > 0: GPUs of one host copy directly between their memories, without NCCL, in messages of "
     "pipeline stages and in collectives beside computation, in these N copies of a rank at a time "
     "(1, the default: 3); 0: NCCL everywhere",
     NUMBER, AT(peer)},
    {"MLUA_HOSTS", "N",
     "for tests: the ranks on this machine act as if they were on N hosts, equally many "
     "consecutive "
     "ranks on each: between hosts they use sockets and NCCL alone, never shared memory. Ranks of "
     "different hosts may use the same GPU",
     NUMBER, AT(hosts)},
    {"MLUA_TIMEOUT", "SECONDS",
     "how long a rank may show no sign of life, or keep others waiting at a collective, until the "
     "job "
     "ends; default: 12 s without a sign of life; at a collective 24 s, or three steps if that is "
     "longer",
     NUMBER, AT(timeout)},
    {"MLUA_BIND", "ADDRESS",
     "where rank 0 waits for ranks of other hosts; default: anywhere (0.0.0.0) where the launcher "
     "says that there are several hosts, else this host alone (127.0.0.1)",
     TEXT, AT(bind)},
    {"MLUA_SECRET", "TEXT",
     "what the ranks of a job must know to join it, and prove in all that they send to other hosts "
     "(nothing is encrypted); default: a file of the user's, created when first needed",
     TEXT, AT(secret)},
    {"MLUA_THREADS", "N", "CPU threads; all cores where not set", NUMBER, AT(threads)},
    {"MLUA_FAULT_IO", "N",
     "for tests: the process kills itself before the N-th operation on files of a save",
     LARGE_NUMBER, AT(fault_io)},
    {"MLUA_RUNS", "N",
     "run the script N times, each with fresh states, in the same processes; core.options().run "
     "counts",
     NUMBER, AT(runs)},
};
enum { KNOB_COUNT = sizeof KNOBS / sizeof *KNOBS };

static ml_knobs_values values = {.tune = true,
                                 .cudnn = true,
                                 .deterministic = true,
                                 .param_cache = true,
                                 .batch = true,
                                 .fold = true,
                                 .wgmma = 1,
                                 .tma = true,
                                 .early = true,
                                 .blas = ML_BLAS_FASTER,
                                 .overlap = -1,
                                 .halves = -1,
                                 .graphs = -1,
                                 .peer = 1,
                                 .recompute = -1,
                                 .host_link = -1,
                                 .chunk = -1};
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The largest number that a knob takes: its syntax names it, but for counts. */
static long long most_of(const knob *k) {
    const char *range = strstr(k->syntax, "..");
    if (k->kind == WORD) return 0;
    if (range) return strtoll(range + 2, NULL, 10);
    if (strcmp(k->syntax, "0|1") == 0) return 1;
    return k->kind == LARGE_NUMBER ? LLONG_MAX : 1000000;
}

static void read_knob(const knob *k, const char *text) {
    void *field = (char *)&values + k->offset;
    if (k->kind == TEXT || (k->kind == WORD && strcmp(text, k->syntax) == 0)) {
        *(const char **)field = text;
        return;
    }
    char *end;
    long long number = strtoll(text, &end, 10);
    if (*end || number < 0 || number > most_of(k)) {
        fprintf(stderr, "mlua: %s=%s is ignored: it takes %s\n", k->name, text, k->syntax);
        return;
    }
    if (k->kind == NUMBER) *(int *)field = (int)number;
    if (k->kind == LARGE_NUMBER) *(int64_t *)field = number;
    if (k->kind == FLAG) *(bool *)field = number != 0;
}

/* Say so where a variable looks like a misspelt knob; other programs may have MLUA_ ones too. */
static void check_spelling(const char *variable) {
    static const char prefix[] = "MLUA_";
    enum { PREFIX = sizeof prefix - 1, LONGEST = 64 };
    size_t length = strcspn(variable, "=");
    if (strncmp(variable, prefix, PREFIX) != 0 || length >= LONGEST) return;
    char name[LONGEST];
    memcpy(name, variable, length);
    name[length] = 0;
    const char *known[KNOB_COUNT];
    for (int i = 0; i < KNOB_COUNT; i++) {
        if (strcmp(name, KNOBS[i].name) == 0) return;
        known[i] = KNOBS[i].name + PREFIX;
    }
    const char *guess = ml_suggest(name + PREFIX, known, KNOB_COUNT);
    if (guess) {
        fprintf(stderr, "mlua: %s is ignored: did you mean %s%s?\n", name, prefix, guess);
    }
}

static void read_environment(void) {
    for (int i = 0; i < KNOB_COUNT; i++) {
        const char *text = getenv(KNOBS[i].name);
        if (text && *text) read_knob(&KNOBS[i], text);
    }
    for (char **variable = environ; variable && *variable; variable++) check_spelling(*variable);
}

const ml_knobs_values *ml_knobs(void) {
    pthread_once(&once, read_environment);
    return &values;
}

void ml_knobs_fix_rows(void) {
    ml_knobs();
    values.tune = false;
    values.blas = 0;
}

bool ml_knob_describe(int i, const char **name, const char **syntax, const char **meaning) {
    if (i < 0 || i >= KNOB_COUNT) return false;
    *name = KNOBS[i].name;
    *syntax = KNOBS[i].syntax;
    *meaning = KNOBS[i].meaning;
    return true;
}

bool ml_debug_on(int level) {
    return ml_knobs()->debug >= level;
}

void ml_debug(int level, const char *format, ...) {
    if (!ml_debug_on(level)) return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
}

static long resident_kib(void) {
    long pages = 0, all = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f == NULL) return 0;
    if (fscanf(f, "%ld %ld", &all, &pages) != 2) pages = 0;
    fclose(f);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

void ml_time_part(const char *name) {
    static _Atomic int64_t last;
    if (!ml_knobs()->times) return;
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    const int64_t now = t.tv_sec * 1000000 + t.tv_nsec / 1000;
    fprintf(stderr, "%-24s %8.1f ms  %5ld MiB\n", name,
            1e-3 * (double)(now - atomic_exchange(&last, now)), resident_kib() / 1024);
}
