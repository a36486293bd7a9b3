/* See test.h. */
#define _GNU_SOURCE /* pipe2 */
#include "tests/test.h"
#include "runtime/base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct {
    const char *name;
    test_function *run;
    const void *argument;
    double seconds; /* of processor time, where tests/slow.list lists the test; 0 elsewhere */
    bool plain;     /* tests/plain.list lists it */
} test;

static test *tests;
static int test_count;
enum { MOST_MESSAGES = 20 }; /* of one test */

/* Of the running test. */
static const char *running = "";
static int failures, checks;
static char skip_reason[512], left_out[512]; /* empty: nothing is skipped */

void golden_scripts_register(ml_arena *arena); /* golden.c */
void golden_graphs_register(ml_arena *arena);  /* passes/golden.c */

void test_register(const char *name, test_function *run, const void *argument) {
    if ((test_count & (test_count - 1)) == 0) { /* room for the next power of two */
        tests = realloc(tests, sizeof *tests * (size_t)(test_count ? 2 * test_count : 1));
        if (!tests) {
            perror(name);
            exit(2);
        }
    }
    tests[test_count++] = (test){.name = name, .run = run, .argument = argument};
}

/* ---- Checks ---------------------------------------------------------------------------------- */

static bool too_many(void) {
    if (++failures == MOST_MESSAGES + 1) fprintf(stderr, "  ... and more\n");
    return failures > MOST_MESSAGES;
}

static void fail_at(const char *file, int line, const char *format, ...) {
    va_list arguments;
    if (too_many()) return;
    fprintf(stderr, "  %s:%d: ", file, line);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

void test_fail(const char *format, ...) {
    va_list arguments;
    if (too_many()) return;
    fputs("  ", stderr);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

void test_skip(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(skip_reason, sizeof skip_reason, format, arguments);
    va_end(arguments);
    ml_raise(ML_INTERNAL, "skipped: %s", skip_reason);
}

void test_left_out(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(left_out, sizeof left_out, format, arguments);
    va_end(arguments);
}

bool test_all(void) {
    return getenv("DIST_ALL") != NULL;
}

/* Tests of area "long", which take minutes, run where LONG is set. */
static bool long_tests(void) {
    return getenv("LONG") != NULL;
}

const char *test_running(void) {
    return running;
}

void test_checked(void) {
    checks++;
}

bool test_check(bool passed, const char *what, const char *file, int line) {
    checks++;
    if (!passed) fail_at(file, line, "false: %s", what);
    return passed;
}

_Noreturn void test_stop(const char *what, const char *file, int line) {
    ml_raise(ML_INTERNAL, "%s:%d: false: %s", file, line, what);
}

bool test_check_int(int64_t actual, int64_t expected, const char *what, const char *file,
                    int line) {
    checks++;
    if (actual == expected) return true;
    fail_at(file, line, "%s is %lld, not %lld", what, (long long)actual, (long long)expected);
    return false;
}

bool test_check_near(double actual, double expected, double relative, const char *what,
                     const char *file, int line) {
    checks++;
    double scale = fmax(1, fmax(fabs(actual), fabs(expected)));
    if (actual == expected || (isnan(actual) && isnan(expected))) return true;
    if (isfinite(scale) && fabs(actual - expected) <= relative * scale) return true;
    fail_at(file, line, "%s is %.17g, not %.17g (within %g)", what, actual, expected, relative);
    return false;
}

bool test_check_text(const char *actual, const char *expected, const char *what, const char *file,
                     int line) {
    checks++;
    if (actual && strcmp(actual, expected) == 0) return true;
    fail_at(file, line, "%s\n    is  \"%s\"\n    not \"%s\"", what, actual ? actual : "(null)",
            expected);
    return false;
}

bool test_check_status(ml_status actual, ml_status expected, const char *what, const char *file,
                       int line) {
    checks++;
    if (actual == expected) return true;
    fail_at(file, line, "%s gives status %d, not %d: %s", what, actual, expected,
            actual == ML_OK ? "ok" : ml_error_last()->text);
    return false;
}

bool test_check_raises(void (*body)(void *), void *argument, ml_status status, const char *expected,
                       const char *file, int line) {
    ml_status actual = ml_protect(body, argument);
    if (!test_check_status(actual, status, "this", file, line)) return false;
    return status == ML_OK ||
           test_check_text(ml_error_last()->text, expected, "the error", file, line);
}

/* ---- Helpers --------------------------------------------------------------------------------- */

uint64_t test_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double test_uniform(uint64_t *state, double low, double high) {
    return low + (high - low) * ldexp((double)(test_random(state) >> 11), -53);
}

int64_t test_range(uint64_t *state, int64_t low, int64_t high) {
    return low + (int64_t)(test_random(state) % (uint64_t)(high - low + 1));
}

const char *test_binary(void) {
    const char *binary = getenv("MLUA");
    return binary && *binary ? binary : "build/mlua";
}

/* Compilers take the largest part of the tests' time. Unless CC names one, commands compile their
 * kernels with -Og, in 0.3 to 0.4 of the time of -O3, and with -O0 the small models of lua/ and
 * dist/, which run for a few steps. Tests of kernels and ops compile theirs in this process with
 * -O3, as users do; under sanitizers, which do not see into kernels, with -Og. A compiler a process
 * is enough: as many tests run at once as there are cores, and one compiler of many kernels starts
 * less often. */
static bool compiler_given;

/* Ahead of the constructor that reads the knobs (tests/jit/options.c). */
__attribute__((constructor(101))) static void choose_compiler(void) {
    const char *given = getenv("CC");
    compiler_given = given && *given;
    setenv("MLUA_COMPILERS", "1", 0);
#ifdef __SANITIZE_ADDRESS__
    if (!compiler_given) setenv("CC", "cc -Og", 1);
#endif
}

static const char *compiler_of_commands(void) {
    bool brief = strncmp(running, "dist/", 5) == 0 || strncmp(running, "lua/", 4) == 0;
    return brief ? "cc -O0" : "cc -Og";
}

/* A shell that runs `command`; what it prints comes from *output. */
static pid_t start_shell(const char *command, int *output) {
    int ends[2];
    fflush(NULL);
    if (pipe2(ends, O_CLOEXEC) != 0) ml_raise(ML_IO, "cannot run %s", command);
    pid_t shell = fork();
    if (shell == 0) {
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        if (!compiler_given) setenv("CC", compiler_of_commands(), 1);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    *output = ends[0];
    if (shell > 0) return shell;
    close(ends[0]);
    ml_raise(ML_IO, "cannot run %s", command);
}

char *test_follow(ml_arena *arena, const char *command, test_listener *hear, void *context,
                  int *exit_code, struct rusage *used) {
    ml_text text = {.arena = arena};
    int output, status;
    char block[4096];
    ssize_t count;
    ml_text_add(&text, "%s", "");
    pid_t shell = start_shell(command, &output);
    while ((count = read(output, block, sizeof block)) > 0) {
        for (size_t i = 0; i < (size_t)count;) { /* NUL bytes cannot be part of a text */
            size_t length = strnlen(block + i, (size_t)count - i);
            ml_text_add(&text, "%.*s", (int)length, block + i);
            i += length + 1;
        }
        if (hear) hear(context, text.text);
    }
    close(output);
    while (wait4(shell, &status, 0, used) < 0 && errno == EINTR) continue;
    *exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    /* A sanitizer's report may end in exit code 1, which a test may expect. */
    if (strstr(text.text, "Sanitizer: ") || strstr(text.text, ": runtime error: "))
        test_fail("a sanitizer complains of %s:\n%s", command, text.text);
    return text.text;
}

char *test_command(ml_arena *arena, const char *command, int *exit_code) {
    struct rusage used;
    return test_follow(arena, command, NULL, NULL, exit_code, &used);
}

/* ---- Running ----------------------------------------------------------------------------------
 */

typedef struct {
    bool gpu, list, verbose;
    bool all;              /* those of tests/slow.list too, where no pattern names tests */
    bool again;            /* tests that failed run once more, alone */
    bool but_plain, plain; /* without those of tests/plain.list; with what that leaves out */
    int jobs;              /* processes; 0 runs the tests in this one */
    char **patterns;
    int pattern_count;
} options;

typedef enum { UNWANTED, WANTED, LEFT_TO_ALL } choice;

static choice choose(const options *o, const test *t) {
    if ((strncmp(t->name, "gpu", 3) == 0) != o->gpu) return UNWANTED;
    if (strncmp(t->name, "long/", 5) == 0 && !long_tests()) return UNWANTED;
    if (o->but_plain && t->plain) return UNWANTED;
    if (o->plain && !(t->plain && t->seconds > 0)) return UNWANTED;
    bool any = true; /* without a pattern to match */
    for (int i = 0; i < o->pattern_count; i++) {
        if (o->patterns[i][0] != '!')
            any = false;
        else if (strstr(t->name, o->patterns[i] + 1))
            return UNWANTED;
    }
    for (int i = 0; i < o->pattern_count; i++)
        if (o->patterns[i][0] != '!' && strstr(t->name, o->patterns[i])) return WANTED;
    if (!any) return UNWANTED;
    return t->seconds > 0 && !o->all && !o->plain ? LEFT_TO_ALL : WANTED;
}

/* ---- Slow tests: tests/slow.list lists those that take more than QUICK_SECONDS of processor time
 * with an empty kernel cache. They begin first, the longest ahead.
 */

enum { QUICK_SECONDS = 2 };
static const char slow_path[] = "tests/slow.list";

static void read_slow(void) {
    FILE *file = fopen(slow_path, "r");
    char name[128];
    double seconds;
    if (!file) return;
    while (fscanf(file, "%lf %127s", &seconds, name) == 2)
        for (int i = 0; i < test_count; i++)
            if (strcmp(tests[i].name, name) == 0) tests[i].seconds = seconds;
    fclose(file);
}

/* A name, or an area and its slash, a line; # begins a comment. */
static void read_plain(void) {
    FILE *file = fopen("tests/plain.list", "r");
    char line[256];
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        size_t length = strcspn(line, "\n");
        line[length] = 0;
        if (!length || line[0] == '#') continue;
        for (int i = 0; i < test_count; i++)
            if (line[length - 1] == '/' ? strncmp(tests[i].name, line, length) == 0
                                        : strcmp(tests[i].name, line) == 0)
                tests[i].plain = true;
    }
    fclose(file);
}

static int by_seconds(const void *a, const void *b) {
    const test *s = a, *t = b;
    int longer = (s->seconds < t->seconds) - (s->seconds > t->seconds);
    return longer ? longer : strcmp(s->name, t->name);
}

/* Of the first `count` of tests[], which took taken[i]. UPDATE_SLOW: write the file; else say which
 * it lacks: a busy machine or a sanitizer may double what a test takes. */
static void compare_slow(const options *o, int count, const float *taken) {
    bool update = getenv("UPDATE_SLOW") && o->all && !o->pattern_count;
    if (!update) {
#ifndef __SANITIZE_ADDRESS__
        for (int i = 0; i < count && !o->gpu; i++)
            if (!tests[i].seconds && taken[i] > 2 * QUICK_SECONDS && !long_tests() && !test_all())
                printf("slow: %s takes %.1f s of processor time, and %s does not list it\n",
                       tests[i].name, taken[i], slow_path);
#endif
        return;
    }
    FILE *file = fopen(slow_path, "w");
    if (!file) ml_raise(ML_IO, "cannot write %s", slow_path);
    for (int i = 0; i < count; i++) tests[i].seconds = taken[i];
    qsort(tests, (size_t)count, sizeof *tests, by_seconds);
    for (int i = 0; i < count && tests[i].seconds > QUICK_SECONDS; i++)
        fprintf(file, "%.1f %s\n", tests[i].seconds, tests[i].name);
    if (fclose(file)) ml_raise(ML_IO, "cannot write %s", slow_path);
}

static void run_body(void *argument) {
    const test *t = argument;
    t->run(t->argument);
}

/* Of this process and of those that it started and that ended. */
static double cpu_seconds(void) {
    struct rusage used[2];
    double sum = 0;
    getrusage(RUSAGE_SELF, &used[0]);
    getrusage(RUSAGE_CHILDREN, &used[1]);
    for (int i = 0; i < 2; i++)
        sum += (double)(used[i].ru_utime.tv_sec + used[i].ru_stime.tv_sec) +
               1e-6 * (double)(used[i].ru_utime.tv_usec + used[i].ru_stime.tv_usec);
    return sum;
}

typedef enum { PASSED, FAILED, SKIPPED, RESULTS } result;

/* Defined where the blocks that each test reaches are recorded (tests/reach/blocks.c). */
__attribute__((weak)) void test_begins(const char *name);

static result run_one(const options *o, const test *t, float *cpu_taken) {
    int64_t blocks = ml_live_blocks();
    double start = ml_clock_now(), cpu_start = cpu_seconds();
    running = t->name;
    if (test_begins) test_begins(running);
    failures = checks = 0;
    skip_reason[0] = left_out[0] = 0;
    if (ml_protect(run_body, (void *)t) != ML_OK && !skip_reason[0]) {
        const ml_error *error = ml_error_last();
        test_fail("raised: %s%s%s", error->text, error->help[0] ? "\n  help: " : "", error->help);
    }
    int64_t left = ml_live_blocks() - blocks;
    if (left && !failures) test_fail("%lld heap blocks are left behind", (long long)left);
    if (!checks && !skip_reason[0]) test_fail("no check was reached (see test_skip)");
    double taken = ml_clock_now() - start, cpu = cpu_seconds() - cpu_start;
    *cpu_taken = (float)cpu;
    if (failures)
        fprintf(stderr, "FAILED %s\n", t->name);
    else if (skip_reason[0])
        printf("skipped %s: %s\n", t->name, skip_reason);
    else if (left_out[0])
        printf("ok in part %s (%.2f s, %.2f s of CPU): %s\n", t->name, taken, cpu, left_out);
    else if (o->verbose || taken > 10)
        printf("ok %s (%.2f s, %.2f s of CPU)\n", t->name, taken, cpu);
    fflush(stdout);
    return failures ? FAILED : skip_reason[0] ? SKIPPED : PASSED;
}

/* ---- Several processes: each takes the next test; one that a test ends is started again. ------
 * Tests that mostly wait (for ranks that are stopped, late or silent) come last, and one process
 * begins with these.
 */

enum { MOST_JOBS = 16, AGAIN_AT_MOST = 10 };
/* Seconds after which a test is killed. */
enum { LONGEST = 900 };
typedef struct {
    atomic_int next[2]; /* of the tests that work, of those that wait */
    atomic_int results[RESULTS];
    atomic_int running[MOST_JOBS]; /* the test that a process is at, from 1; 0: none */
    struct {
        atomic_bool failed;
        float cpu; /* seconds */
    } test[];
} board;
typedef struct {
    const options *options;
    board *board; /* shared by all processes */
    int count;    /* of tests[] */
    int first_waiting, jobs;
    int capture[MOST_JOBS]; /* what the running test prints, which is shown in one piece */
    pid_t process[MOST_JOBS];
} crew;

static void show_capture(int capture) {
    char block[4096];
    ssize_t count;
    lseek(capture, 0, SEEK_SET);
    while ((count = read(capture, block, sizeof block)) > 0)
        if (write(STDOUT_FILENO, block, (size_t)count) != count) return;
}

static result run_captured(const options *o, const test *t, int capture, float *cpu) {
    int out = dup(STDOUT_FILENO), errors = dup(STDERR_FILENO);
    if (ftruncate(capture, 0) != 0) return FAILED;
    lseek(capture, 0, SEEK_SET);
    dup2(capture, STDOUT_FILENO);
    dup2(capture, STDERR_FILENO);
    result end = run_one(o, t, cpu);
    fflush(stderr);
    dup2(out, STDOUT_FILENO);
    dup2(errors, STDERR_FILENO);
    close(out);
    close(errors);
    show_capture(capture);
    return end;
}

static void work_on(crew *c, int slot, bool waiting) {
    int end = waiting ? c->count : c->first_waiting;
    for (int i; (i = atomic_fetch_add(&c->board->next[waiting], 1)) < end;) {
        c->board->running[slot] = i + 1;
        alarm(test_all() || long_tests() ? 0 : LONGEST);
        result end = run_captured(c->options, &tests[i], c->capture[slot], &c->board->test[i].cpu);
        atomic_fetch_add(&c->board->results[end], 1);
        if (end == FAILED) c->board->test[i].failed = true;
        c->board->running[slot] = 0;
    }
}

static void work(crew *c, int slot) {
    bool waiting = slot + 1 == c->jobs;
    work_on(c, slot, waiting);
    work_on(c, slot, !waiting);
}

static void start_worker(crew *c, int slot) {
    fflush(NULL);
    c->process[slot] = fork();
    if (c->process[slot] != 0) return;
    work(c, slot);
    exit(0); /* with the sanitizer's search for leaks */
}

static void end_worker(crew *c, int slot, int status) {
    int running = c->board->running[slot];
    c->process[slot] = 0;
    if (status == 0) return;
    if (running) show_capture(c->capture[slot]);
    printf("FAILED %s: its process ends with %s %d\n",
           running ? tests[running - 1].name : "after the tests",
           WIFSIGNALED(status) ? "signal" : "exit code",
           WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    atomic_fetch_add(&c->board->results[FAILED], 1);
    if (running) c->board->test[running - 1].failed = true;
    c->board->running[slot] = 0;
    if (c->board->next[0] < c->first_waiting || c->board->next[1] < c->count) start_worker(c, slot);
}

static bool open_crew(crew *c, int jobs) {
    c->board = mmap(NULL, sizeof *c->board + sizeof *c->board->test * (size_t)c->count,
                    PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < jobs; i++) {
        FILE *file = tmpfile(); /* open until the program ends */
        if (!file) return false;
        c->capture[i] = fileno(file);
    }
    return c->board != MAP_FAILED;
}

static void run_crew(crew *c, int jobs) {
    c->jobs = jobs;
    c->board->next[1] = c->first_waiting;
    for (int i = 0; i < jobs; i++) start_worker(c, i);
    int status;
    for (pid_t child; (child = waitpid(-1, &status, 0)) > 0;)
        for (int i = 0; i < jobs; i++)
            if (c->process[i] == child) end_worker(c, i, status);
}

static bool waits(const test *t) {
    return strncmp(t->name, "fault/", 6) == 0 || strncmp(t->name, "comm", 4) == 0;
}

/* The longest of those that work come first, so that none is the last that one process is at. */
static int by_turn(const void *a, const void *b) {
    int later = waits(a) - waits(b);
    return later ? later : by_seconds(a, b);
}

static void close_crew(crew *c) {
    munmap(c->board, sizeof *c->board + sizeof *c->board->test * (size_t)c->count);
    for (int i = 0; i < c->jobs; i++) close(c->capture[i]);
}

/* Run the tests that failed once more, one at a time: one that passes alone depends on the load of
 * the machine. It counts as passed, and is named. */
static void run_again(const crew *first, int results[RESULTS]) {
    crew c = {.options = first->options};
    for (int i = 0; i < first->count; i++) {
        if (!first->board->test[i].failed) continue;
        test failed = tests[i];
        tests[i] = tests[c.count], tests[c.count++] = failed;
    }
    c.first_waiting = c.count;
    printf("%d tests failed, and run again alone\n", c.count);
    fflush(stdout);
    if (!open_crew(&c, 1)) return;
    run_crew(&c, 1);
    for (int i = 0; i < c.count; i++)
        if (!c.board->test[i].failed)
            printf("UNSTEADY %s: failed, then passed alone\n", tests[i].name);
    int left = c.board->results[FAILED];
    results[PASSED] += c.count - left, results[FAILED] += left - c.count;
    close_crew(&c);
}

/* Move the tests that are wanted to the front; their number. */
static int choose_tests(const options *o, int *left) {
    int chosen = 0;
    read_slow();
    read_plain();
    qsort(tests, (size_t)test_count, sizeof *tests, by_turn);
    for (int i = 0; i < test_count; i++) {
        choice of = choose(o, &tests[i]);
        *left += of == LEFT_TO_ALL;
        if (of == WANTED) tests[chosen++] = tests[i];
    }
    return chosen;
}

static int run_all(const options *o) {
    static crew c;
    int results[RESULTS] = {0}, left = 0, chosen = choose_tests(o, &left);
    for (int i = 0; i < chosen && o->list; i++) puts(tests[i].name);
    if (o->list) return 0;
    float *cpu = calloc((size_t)chosen + 1, sizeof *cpu);
    if (!cpu) return 2;
    c.options = o, c.count = chosen;
    while (c.first_waiting < chosen && !waits(&tests[c.first_waiting])) c.first_waiting++;
    int jobs = o->jobs < chosen ? o->jobs : chosen;
    if (jobs > 0 && open_crew(&c, jobs)) {
        run_crew(&c, jobs);
        for (int i = 0; i < RESULTS; i++) results[i] = c.board->results[i];
        for (int i = 0; i < chosen; i++) cpu[i] = c.board->test[i].cpu;
    } else {
        for (int i = 0; i < chosen; i++) results[run_one(o, &tests[i], &cpu[i])]++;
    }
    /* A process that ends early leaves tests without a result. */
    int least_failed = chosen - results[PASSED] - results[SKIPPED];
    if (results[FAILED] < least_failed) results[FAILED] = least_failed;
    if (o->again && results[FAILED] && results[FAILED] <= AGAIN_AT_MOST && jobs > 0)
        run_again(&c, results);
    else
        compare_slow(o, chosen, cpu);
    free(cpu);
    if (left)
        printf("left to make test-all: %d tests of more than %d s of processor time (%s)\n", left,
               QUICK_SECONDS, slow_path);
    printf("%d passed, %d failed, %d skipped\n", results[PASSED], results[FAILED],
           results[SKIPPED]);
    return results[FAILED] || !results[PASSED]; /* skipped alone is no success */
}

static void register_files(void *arena) {
    golden_scripts_register(arena);
    golden_graphs_register(arena);
}

static int usage(const char *program) {
    fprintf(
        stderr,
        "usage: %s [--list] [--all] [--but-plain | --plain] [--gpu] [-v] [--again] [-j PROCESSES] "
        "[pattern | !pattern ...]\n",
        program);
    return 2;
}

/* GPU tests run in this process, where a sanitizer of the device sees them; others in one for each
 * core, and one more for those that wait. */
static int default_jobs(bool gpu) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return gpu ? 0 : cores < 1 ? 2 : cores >= MOST_JOBS ? MOST_JOBS : (int)cores + 1;
}

/* Tests send signals: the process that starts this one may ignore these (nohup, a job of a
 * script in the background). */
static void reset_signals(void) {
    static const int signals[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGCHLD, SIGPIPE};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) signal(signals[i], SIG_DFL);
}

int main(int count, char **arguments) {
    options o = {.jobs = -1};
    int first = 1;
    reset_signals();
    for (; first < count && arguments[first][0] == '-'; first++) {
        if (!strcmp(arguments[first], "--gpu"))
            o.gpu = true;
        else if (!strcmp(arguments[first], "--list"))
            o.list = true;
        else if (!strcmp(arguments[first], "--all"))
            o.all = true;
        else if (!strcmp(arguments[first], "--but-plain"))
            o.but_plain = true;
        else if (!strcmp(arguments[first], "--plain"))
            o.plain = true;
        else if (!strcmp(arguments[first], "-v"))
            o.verbose = true;
        else if (!strcmp(arguments[first], "--again"))
            o.again = true;
        else if (!strcmp(arguments[first], "-j") && first + 1 < count)
            o.jobs = atoi(arguments[++first]);
        else
            return usage(arguments[0]);
    }
    if (o.jobs < 0 || o.jobs > MOST_JOBS) o.jobs = default_jobs(o.gpu);
    o.patterns = arguments + first;
    o.pattern_count = count - first;
    ml_arena *arena = ml_arena_new();
    if (!arena || ml_protect(register_files, arena) != ML_OK) {
        fprintf(stderr, "cannot list the files: %s\n", ml_error_last()->text);
        return 2;
    }
    int result = run_all(&o);
    ml_arena_free(arena);
    return result;
}
