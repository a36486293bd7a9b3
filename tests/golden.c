/* Tests that are scripts. golden/NAME: what tests/golden/NAME.lua prints, and its exit code, are
 * compared with NAME.out beside it (UPDATE_GOLDEN=1 rewrites that). lua/NAME: tests/lua/NAME.lua
 * exits with 0.
 *
 * The first line of a script may say how it is run: "-- args: [VARIABLE=value ...] words". In the
 * words, SCRIPT stands for the script, which comes last where it is not named; they are a shell's,
 * so that "< file" works. Without that line it is "run --device cpu". */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

void golden_scripts_register(ml_arena *arena);

typedef struct {
    const char *script, *expected; /* paths; no expected text for area lua */
} script_test;

enum { TIME_LIMIT = 300 }; /* seconds */

char *test_read_file(ml_arena *arena, const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) return NULL;
    ml_text text = {.arena = arena};
    char line[4096];
    ml_text_add(&text, "%s", "");
    while (fgets(line, sizeof line, file)) ml_text_add(&text, "%s", line);
    fclose(file);
    return text.text;
}

static char *shell_command(ml_arena *arena, const char *script) {
    static const char marker[] = "-- args: ";
    const char *source = test_read_file(arena, script);
    if (!source) ml_raise(ML_IO, "cannot read %s", script);
    char *words = "run --device cpu";
    if (strncmp(source, marker, strlen(marker)) == 0) {
        const char *start = source + strlen(marker);
        words = ml_arena_copy(arena, start, strcspn(start, "\n"));
    }
    ml_text command = {.arena = arena};
    bool before_binary = true, named = false, reads = strchr(words, '<');
    ml_text_add(&command, "exec timeout %d env", TIME_LIMIT);
    for (char *rest,
         *word = strtok_r(words = ml_arena_copy(arena, words, strlen(words)), " ", &rest);
         word; word = strtok_r(NULL, " ", &rest)) {
        if (before_binary && !strchr(word, '=')) {
            ml_text_add(&command, " '%s'", test_binary());
            before_binary = false;
        }
        if (strcmp(word, "SCRIPT") == 0) {
            ml_text_add(&command, " %s", script);
            named = true;
        } else
            ml_text_add(&command, " %s", word);
    }
    if (!named) ml_text_add(&command, " %s", script);
    if (!reads) ml_text_add(&command, " </dev/null");
    return command.text;
}

static void show_difference(ml_arena *arena, const char *expected_path, const char *actual) {
    fprintf(stderr, "  %s differs:\n", expected_path);
    fflush(stderr);
    FILE *diff = popen(ml_arena_format(arena, "diff -u '%s' - >&2", expected_path), "w");
    if (!diff) return;
    fputs(actual, diff);
    pclose(diff);
}

void test_compare_file(ml_arena *arena, const char *path, const char *actual) {
    test_checked();
    if (getenv("UPDATE_GOLDEN")) {
        FILE *file = fopen(path, "w");
        if (!file) ml_raise(ML_IO, "cannot write %s", path);
        fputs(actual, file);
        if (fclose(file)) ml_raise(ML_IO, "cannot write %s", path);
        return;
    }
    const char *expected = test_read_file(arena, path);
    if (!expected) {
        test_fail("%s is missing: UPDATE_GOLDEN=1 writes it. It would be\n%s", path, actual);
    } else if (strcmp(expected, actual) != 0) {
        test_fail("another output than expected");
        show_difference(arena, path, actual);
    }
}

typedef struct {
    const script_test *test;
    ml_arena *arena;
} script_run;

static void run_body(void *argument) {
    script_run *run = argument;
    int code;
    test_checked();
    char *output = test_command(run->arena, shell_command(run->arena, run->test->script), &code);
    if (run->test->expected) {
        size_t length = strlen(output);
        bool open_line = length && output[length - 1] != '\n';
        test_compare_file(
            run->arena, run->test->expected,
            ml_arena_format(run->arena, "%s%sexit: %d\n", output, open_line ? "\n" : "", code));
    } else if (code) {
        test_fail("%s exits with %d:\n%s", run->test->script, code, output);
    }
}

static void run_script(const void *argument) {
    script_run run = {argument, ml_arena_new()};
    ml_status status = run.arena ? ml_protect(run_body, &run) : ML_NO_MEMORY;
    ml_arena_free(run.arena);
    if (status != ML_OK) ml_raise_last();
}

static void register_folder(ml_arena *arena, const char *area) {
    const char *path = ml_arena_format(arena, "tests/%s", area);
    DIR *folder = opendir(path);
    if (!folder) return;
    for (struct dirent *entry; (entry = readdir(folder));) {
        size_t length = strlen(entry->d_name);
        if (length < 5 || strcmp(entry->d_name + length - 4, ".lua") != 0) continue;
        char *name = ml_arena_copy(arena, entry->d_name, length - 4);
        script_test *t = ML_NEW(arena, script_test);
        t->script = ml_arena_format(arena, "%s/%s.lua", path, name);
        if (strcmp(area, "golden") == 0)
            t->expected = ml_arena_format(arena, "%s/%s.out", path, name);
        test_register(ml_arena_format(arena, "%s/%s", area, name), run_script, t);
    }
    closedir(folder);
}

void golden_scripts_register(ml_arena *arena) {
    register_folder(arena, "golden");
    register_folder(arena, "lua");
}
