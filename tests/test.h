/* The test harness. `build/test [--list] [--all] [--gpu] [-v] [--again] [-j PROCESSES] [pattern
 * ...]` runs the tests whose "area/name" contains one of the patterns; where none is given, those
 * that are not in tests/slow.list, with --all those too. Areas that begin with "gpu" run with --gpu
 * alone, and then only they. -v prints each test's time. The tests are spread over one process more
 * than there are cores, so that none may depend on another, and one that crashes fails alone; -j 0
 * runs them in the program itself (for debuggers). --but-plain leaves out the tests that
 * tests/plain.list lists (CI under sanitizers); --plain runs those of them that are in slow.list
 * too, which no other run of CI has. --again (CI) runs up to ten that failed once more, one at a
 * time; one that then passes counts as passed and is named.
 *
 *     TEST(graph, adds) { CHECK_EQ_INT(1 + 1, 2); }
 *
 * A test is run in ml_protect: what it raises fails it. A failed CHECK is printed and the test
 * continues; a failed REQUIRE ends it. A test fails as well when it leaves heap blocks behind, or
 * reaches no check; what cannot run here calls test_skip with the reason, and is counted. */
#ifndef ML_TEST_H
#define ML_TEST_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>

#include "runtime/base/memory.h"
#include "runtime/base/status.h"

typedef void test_function(const void *argument);
/* Name is "area/name"; both pointers must stay valid. */
void test_register(const char *name, test_function *run, const void *argument);

#define TEST(area, name)                                                                           \
    static void test_##area##_##name(const void *);                                                \
    __attribute__((constructor)) static void register_##area##_##name(void) {                      \
        test_register(#area "/" #name, test_##area##_##name, 0);                                   \
    }                                                                                              \
    static void test_##area##_##name(const void *argument __attribute__((unused)))

#define CHECK(condition) test_check((condition), #condition, __FILE__, __LINE__)
#define REQUIRE(condition)                                                                         \
    ((condition) ? test_checked() : test_stop(#condition, __FILE__, __LINE__))
#define CHECK_EQ_INT(actual, expected)                                                             \
    test_check_int((actual), (expected), #actual, __FILE__, __LINE__)
/* |actual - expected| <= relative * the larger of them and 1. NaN is near NaN, infinities too. */
#define CHECK_NEAR(actual, expected, relative)                                                     \
    test_check_near((actual), (expected), (relative), #actual, __FILE__, __LINE__)
#define CHECK_TEXT(actual, expected)                                                               \
    test_check_text((actual), (expected), #actual, __FILE__, __LINE__)
/* A call that returns ml_status. */
#define CHECK_STATUS(call, expected)                                                               \
    test_check_status((call), (expected), #call, __FILE__, __LINE__)
/* body(argument) raises ML_INVALID (or `status`) with exactly this text; ml_error_last() has more.
 */
#define CHECK_RAISES(body, argument, status, expected)                                             \
    test_check_raises((body), (argument), (status), (expected), __FILE__, __LINE__)

bool test_check(bool passed, const char *what, const char *file, int line);
_Noreturn void test_stop(const char *what, const char *file, int line);
bool test_check_int(int64_t actual, int64_t expected, const char *what, const char *file, int line);
bool test_check_near(double actual, double expected, double relative, const char *what,
                     const char *file, int line);
bool test_check_text(const char *actual, const char *expected, const char *what, const char *file,
                     int line);
bool test_check_status(ml_status actual, ml_status expected, const char *what, const char *file,
                       int line);
bool test_check_raises(void (*body)(void *), void *argument, ml_status status, const char *expected,
                       const char *file, int line);
/* With a message of its own in printf's form. */
#define EXPECT(condition, ...) ((condition) ? test_checked() : test_fail(__VA_ARGS__))
/* A check of another kind that passed: a test that reaches no check fails. */
void test_checked(void);
/* End the running test as skipped, unless a check failed before: what it needs is absent here. The
 * reason, printed after "skipped area/name: ", says how to run it. */
_Noreturn void test_skip(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same of a part of the test, which continues and counts as passed: "ok in part area/name". */
void test_left_out(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* DIST_ALL is set: long tests run too, and others draw more cases. */
bool test_all(void);
/* The name of the test that runs: "area/name". */
const char *test_running(void);
/* Fail the running test with a message of its own. */
void test_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Deterministic numbers: *state starts at any value. */
uint64_t test_random(uint64_t *state);
double test_uniform(uint64_t *state, double low, double high);
int64_t test_range(uint64_t *state, int64_t low, int64_t high); /* low .. high, both included */

/* The text of a file, in `arena`; NULL where there is none. */
char *test_read_file(ml_arena *arena, const char *path);
/* The file has this text; where UPDATE_GOLDEN is set, it is written. */
void test_compare_file(ml_arena *arena, const char *path, const char *actual);

/* The binary under test: $MLUA, or build/mlua. */
const char *test_binary(void);
/* Run a shell command; its stdout and stderr together, in `arena`, and its exit code (128 + signal
 * where one ended it). */
char *test_command(ml_arena *arena, const char *command, int *exit_code);
/* The same; where somebody hears (not NULL), all of the output so far whenever there is more;
 * *used: what the command and all that it waited for took. */
typedef void test_listener(void *context, const char *output);
char *test_follow(ml_arena *arena, const char *command, test_listener *hear, void *context,
                  int *exit_code, struct rusage *used);

#endif
