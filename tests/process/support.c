/* See tests/process/support.h. */
#include "tests/process/support.h"
#include "runtime/base/clock.h"

#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static char *format_list(ml_arena *arena, const char *format, va_list arguments) {
    va_list copy;
    va_copy(copy, arguments);
    int length = vsnprintf(NULL, 0, format, copy);
    va_end(copy);
    char *text = ml_arena_alloc(arena, (size_t)length + 1);
    vsnprintf(text, (size_t)length + 1, format, arguments);
    return text;
}

/* Of the command and of what it waited for. */
static double cpu_seconds_of(const struct rusage *used) {
    return (double)(used->ru_utime.tv_sec + used->ru_stime.tv_sec) +
           1e-6 * (double)(used->ru_utime.tv_usec + used->ru_stime.tv_usec);
}

typedef struct {
    process_body *body;
    process_room room;
} room_run;

static void run_in_room(void *argument) {
    room_run *run = argument;
    run->body(&run->room);
}

void process_in_room(process_body *body) {
    char folder[] = "/tmp/mlua-test-XXXXXX", command[64];
    REQUIRE(mkdtemp(folder) != NULL);
    room_run run = {body, {ml_arena_new(), folder}};
    ml_status status = run.room.arena ? ml_protect(run_in_room, &run) : ML_NO_MEMORY;
    ml_arena_free(run.room.arena);
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    CHECK_EQ_INT(system(command), 0);
    if (status != ML_OK) ml_raise_last();
}

static process_result follow_command(process_room *room, test_listener *hear, void *context,
                                     const char *command) {
    char root[PATH_MAX], binary[PATH_MAX];
    process_result result = {.output = ""};
    REQUIRE(getcwd(root, sizeof root) != NULL);
    if (!realpath(test_binary(), binary)) ml_raise(ML_IO, "there is no %s", test_binary());
    char *whole =
        ml_arena_format(room->arena, "cd '%s' && export MLUA='%s' ROOT='%s' && { %s; } </dev/null",
                        room->folder, binary, root, command);
    struct rusage used;
    double start = ml_clock_now();
    result.output = test_follow(room->arena, whole, hear, context, &result.code, &used);
    result.seconds = ml_clock_now() - start;
    result.cpu_seconds = cpu_seconds_of(&used);
    result.peak_bytes = (int64_t)used.ru_maxrss << 10; /* of the largest process */
    return result;
}

static process_result run_command(process_room *room, int code, const char *command) {
    process_result result = follow_command(room, NULL, NULL, command);
    if (code != PROCESS_ANY_CODE) test_checked();
    EXPECT(!(code != PROCESS_ANY_CODE && result.code != code),
           "exit code %d, not %d, from\n    %s\n%s", result.code, code, command, result.output);
    return result;
}

/* In the test's own process group: who stops the test stops it too. */
static char *mlua_command(ml_arena *arena, const char *environment, const char *words) {
    return ml_arena_format(arena, "env %s timeout --foreground %d \"$MLUA\" %s", environment,
                           PROCESS_SECONDS, words);
}

process_result process_run(process_room *room, int code, const char *environment,
                           const char *arguments, ...) {
    va_list list;
    va_start(list, arguments);
    char *words = format_list(room->arena, arguments, list);
    va_end(list);
    return run_command(room, code, mlua_command(room->arena, environment, words));
}

process_result process_follow(process_room *room, test_listener *hear, void *context,
                              const char *environment, const char *arguments, ...) {
    va_list list;
    va_start(list, arguments);
    char *words = format_list(room->arena, arguments, list);
    va_end(list);
    return follow_command(room, hear, context, mlua_command(room->arena, environment, words));
}

process_result process_shell(process_room *room, int code, const char *format, ...) {
    va_list list;
    va_start(list, format);
    char *command = format_list(room->arena, format, list);
    va_end(list);
    return run_command(room, code, command);
}

void process_expect(const process_result *result, const char *text) {
    test_checked();
    EXPECT(strstr(result->output, text), "there is no \"%s\" in\n%s", text, result->output);
}

void process_write(process_room *room, const char *name, const char *text) {
    FILE *file = fopen(ml_arena_format(room->arena, "%s/%s", room->folder, name), "w");
    REQUIRE(file != NULL);
    fputs(text, file);
    CHECK_EQ_INT(fclose(file), 0);
}

/* ---- Training -------------------------------------------------------------------------------- */

void process_write_text(process_room *room) {
    enum { BYTES = 1 << 16 };
    char *text = ml_arena_alloc(room->arena, BYTES + 1);
    uint64_t state = 1;
    for (int i = 0; i < BYTES; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        double share = (double)(state >> 11) * 0x1p-53;
        text[i] = (char)(' ' + (int)(64 * share * share)); /* low ones are frequent */
    }
    text[BYTES] = 0;
    process_write(room, "text", text);
}

/* The value after "key": in a line of JSON. */
static char *field(ml_arena *arena, const char *line, const char *key) {
    const char *start = strstr(line, ml_arena_format(arena, "\"%s\":", key));
    if (!start || start > strchr(line, '\n')) return "missing";
    start = strchr(start, ':') + 1;
    return ml_arena_copy(arena, start, strcspn(start, ",}\n"));
}

double process_number(const char *text, const char *key) {
    const char *at = text ? strstr(text, key) : NULL;
    REQUIRE(at != NULL);
    return strtod(at + strlen(key), NULL);
}

process_step *process_train(process_room *room, int count, const char *environment,
                            const char *arguments) {
    process_write_text(room);
    const char *data = strstr(arguments, "data=") ? "" : "data=text";
    process_result result = process_run(
        room, 0, environment, "run --device cpu --json %s %s steps=%d", arguments, data, count);
    process_step *steps = ML_NEW_ARRAY(room->arena, process_step, count);
    const char *line = result.output;
    for (int i = 0; i < count; i++) {
        line = strstr(line, ml_arena_format(room->arena, "{\"step\":%d,", i + 1));
        if (!line) ml_raise(ML_INTERNAL, "no step %d in\n%s", i + 1, result.output);
        steps[i].loss = field(room->arena, line, "loss");
        steps[i].grad_norm = field(room->arena, line, "grad_norm");
    }
    return steps;
}

static void compare_text(const char *actual, const char *expected, double relative,
                         const char *what, const char *name, int step) {
    if (strcmp(actual, expected) == 0) return;
    double a = strtod(actual, NULL), b = strtod(expected, NULL);
    if (relative > 0 && fabs(a - b) <= relative * fabs(b)) return;
    test_fail("%s: %s of step %d is %s, not %s", what, name, step, actual, expected);
}

void process_compare(const process_step *actual, const process_step *expected, int count,
                     double relative, const char *what) {
    for (int i = 0; i < count; i++) {
        compare_text(actual[i].loss, expected[i].loss, relative, what, "loss", i + 1);
        compare_text(actual[i].grad_norm, expected[i].grad_norm, relative, what, "grad_norm",
                     i + 1);
    }
}

void process_compare_lines(const char *actual, const char *expected, const char *what) {
    int numbers = 0;
    const char *a = actual, *b = expected;
    while (*b) {
        char *after, *other;
        double wanted = strtod(b, &after), got = strtod(a, &other);
        if (after == b) {
            if (*a++ != *b++) break;
            continue;
        }
        numbers++;
        if (!(fabs(got - wanted) <= 2e-5 * fmax(fabs(wanted), 0.1))) break;
        a = other, b = after;
    }
    EXPECT(!(*a || *b), "%s:\n%s\nis not\n%s", what, actual, expected);
    CHECK(numbers > 20);
}

void process_compare_steps(const char *layout, const char *actual, const char *expected) {
    int lines = 0;
    for (;; lines++) {
        actual = strstr(actual, "step "), expected = strstr(expected, "step ");
        if (!actual || !expected) break;
        for (int i = 0; i < 2; i++) {
            char *end[2];
            const char *from[2] = {actual + 5, expected + 5};
            for (int k = 0; k < 2; k++) {
                from[k] += strcspn(from[k], " ");
                if (i) from[k] += 1 + strcspn(from[k] + 1, " ");
            }
            double a = strtod(from[0], &end[0]), b = strtod(from[1], &end[1]);
            EXPECT(fabs(a - b) <= 1e-5 * (1 + fabs(b)), "%s: %g in place of %g in line %d", layout,
                   a, b, lines + 1);
        }
        actual += 5, expected += 5;
    }
    CHECK(!actual && !expected && lines > 1);
}
