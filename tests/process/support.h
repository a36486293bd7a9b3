/* Tests that run the binary as a user would: what it prints, its exit code, how long it takes.
 *
 *     PROCESS_TEST(greets) {
 *         process_write(room, "hello.lua", "print 'hello'");
 *         process_result r = process_run(room, 0, "", "run hello.lua");
 *         CHECK_TEXT(r.output, "hello\n");
 *     }
 *
 * The commands run in a folder of the test's own, which is removed at its end; `$MLUA` is the
 * binary and `$ROOT` the repository in them. */
#ifndef ML_TESTS_PROCESS_SUPPORT_H
#define ML_TESTS_PROCESS_SUPPORT_H

#include "tests/test.h"

typedef struct {
    ml_arena *arena;
    const char *folder;
} process_room;

typedef struct {
    char *output;       /* stdout and stderr together */
    int code;           /* 128 + signal where one ended it */
    double seconds;     /* on the clock */
    double cpu_seconds; /* of processor time: what a busy machine does not change */
    int64_t peak_bytes; /* resident, of the largest process of the command */
} process_result;

/* What a training step printed with --json, as text: equal texts are equal bits. */
typedef struct {
    char *loss, *grad_norm;
} process_step;

typedef void process_body(process_room *room);
void process_in_room(process_body *body);
#define PROCESS_TEST(name)                                                                         \
    static void process_##name(process_room *room);                                                \
    TEST(process, name) {                                                                          \
        process_in_room(process_##name);                                                           \
    }                                                                                              \
    static void process_##name(process_room *room)

/* The same of several ranks. */
#define DIST_TEST(name)                                                                            \
    static void dist_##name(process_room *room);                                                   \
    TEST(dist, name) {                                                                             \
        process_in_room(dist_##name);                                                              \
    }                                                                                              \
    static void dist_##name(process_room *room)

enum { PROCESS_ANY_CODE = -1, PROCESS_SECONDS = 240 /* a command may take */ };

/* Run `[VARIABLE=value ...] $MLUA ARGUMENTS` with no input (unless the arguments redirect it) and
 * require this exit code. */
process_result process_run(process_room *room, int code, const char *environment,
                           const char *arguments, ...) __attribute__((format(printf, 4, 5)));
/* The same, with any exit code; all of the output so far is heard whenever there is more. */
process_result process_follow(process_room *room, test_listener *hear, void *context,
                              const char *environment, const char *arguments, ...)
    __attribute__((format(printf, 5, 6)));
/* As process_run, for any shell command. */
process_result process_shell(process_room *room, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The output has this text in it. */
void process_expect(const process_result *result, const char *text);
void process_write(process_room *room, const char *name, const char *text);

/* The number that follows `key` in a text, which must be there. */
double process_number(const char *text, const char *key);
/* The two numbers of each line "step N A B" of two outputs, within 1e-5; `layout` is for messages.
 */
void process_compare_steps(const char *layout, const char *actual, const char *expected);

/* Write "text", which no version of this repository changes; the default text is the repository's
 * own, and on some, rounding alone moves one rank's norms by 1e-4 within three steps, as Adam's
 * first ones magnify gradients that are next to nothing. */
void process_write_text(process_room *room);
/* Train with --json on the CPU for `count` steps, all of which must have been made, on that text
 * unless the arguments say data=. */
process_step *process_train(process_room *room, int count, const char *environment,
                            const char *arguments);
/* Compare two runs: to the bit where `relative` is 0. */
void process_compare(const process_step *actual, const process_step *expected, int count,
                     double relative, const char *what);
/* Compare two outputs line by line: names, then numbers. Sums of microbatches are of f32, in
 * another order. */
void process_compare_lines(const char *actual, const char *expected, const char *what);

#endif
