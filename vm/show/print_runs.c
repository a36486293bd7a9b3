/* Several runs beside each other: what differs, where they are, their curves. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "vm/show/print.h"

typedef struct {
    ml_arena *arena;
    const json_t *runs;
    int column;
} table;

static void print_row(const table *t, const char *label, const char *key,
                      char *cell(ml_arena *, const json_t *, const char *)) {
    json_t *run;
    size_t i;
    bool any = false;
    json_array_foreach(t->runs, i, run) any |= *cell(t->arena, run, key) != 0;
    if (!any) return;
    ml_text line = {.arena = t->arena};
    ml_text_add(&line, "%-*s", SHOW_KEY, show_plain(t->arena, label));
    json_array_foreach(t->runs, i, run)
        ml_text_add(&line, " %-*.*s", t->column, t->column, cell(t->arena, run, key));
    while (line.text[line.length - 1] == ' ') line.text[--line.length] = 0;
    printf("%s\n", line.text);
}

static char *about_cell(ml_arena *arena, const json_t *run, const char *key) {
    json_t *value = json_object_get(json_object_get(run, "about"), key);
    if (strcmp(key, "parameters") == 0 && json_is_number(value))
        return show_count_text(arena, json_number_value(value));
    return value && !json_is_null(value) ? show_value_text(arena, value) : "";
}

static char *setting_cell(ml_arena *arena, const json_t *run, const char *key) {
    json_t *value =
        json_object_get(json_object_get(json_object_get(run, "about"), "settings"), key);
    return value ? show_value_text(arena, value) : "";
}

static char *step_cell(ml_arena *arena, const json_t *run, const char *key) {
    json_t *progress = json_object_get(run, "progress");
    double step = show_number(progress, "step"), steps = show_number(progress, "steps");
    (void)key;
    if (!isfinite(step)) return "";
    return steps > 0 ? ml_arena_format(arena, "%.0f of %.0f", step, steps)
                     : ml_arena_format(arena, "%.0f", step);
}

static char *series_cell(ml_arena *arena, const json_t *run, const char *key) {
    double value = show_number(json_object_get(run, "last"), key);
    if (!isfinite(value)) return "";
    return strcmp(key, "tokens") == 0 || strcmp(key, "tokens_per_s") == 0
               ? show_count_text(arena, value)
               : ml_arena_format(arena, "%.5g", value);
}

static char *checkpoint_cell(ml_arena *arena, const json_t *run, const char *key) {
    json_t *list = json_object_get(run, "checkpoints"), *state;
    size_t i, whole = 0;
    (void)key;
    json_array_foreach(list, i, state) whole += json_is_true(json_object_get(state, "whole"));
    if (!json_array_size(list)) return "";
    return ml_arena_format(arena, whole == i ? "%zu whole" : "%zu whole of %zu", whole, i);
}

/* Settings in which not all runs agree. */
static void print_differences(const table *t) {
    json_t *names = json_object(), *run, *value, *other;
    const char *name;
    size_t i, k;
    json_array_foreach(t->runs, i, run) json_object_update_missing(
        names, json_object_get(json_object_get(run, "about"), "settings"));
    json_object_foreach(names, name, value) {
        bool same = true;
        json_array_foreach(t->runs, k, other) {
            json_t *theirs =
                json_object_get(json_object_get(json_object_get(other, "about"), "settings"), name);
            same = same && theirs && json_equal(theirs, value);
        }
        if (!same) print_row(t, name, name, setting_cell);
    }
    json_decref(names);
}

void show_compare_runs(ml_arena *arena, const json_t *runs, int width, bool ascii) {
    static const struct {
        const char *label, *key;
    } series[] = {
        {"loss", "loss"},        {"evaluation", "eval_loss"}, {"gradient norm", "grad_norm"},
        {"learning rate", "lr"}, {"tokens", "tokens"},        {"tokens/s", "tokens_per_s"},
        {"GiB", "memory_gib"}};
    size_t i, count = json_array_size(runs);
    table t = {arena, runs, (width - SHOW_KEY) / (int)count - 1};
    if (t.column < 12) t.column = 12;
    json_t *run;
    printf("%-*s", SHOW_KEY, "run");
    json_array_foreach(runs, i, run) {
        char *path = ml_arena_format(arena, "%c %s", (int)('a' + i % 26),
                                     show_plain(arena, show_string(run, "path", "")));
        size_t length = strlen(path);
        if ((int)length > t.column)
            memmove(path + 2, path + 2 + length - (size_t)t.column, (size_t)t.column - 1);
        printf(" %-*s", i + 1 < count ? t.column : 0, path);
    }
    printf("\n");
    static const char *const keys[] = {"script", "started", "device",
                                       "seed",   "layout",  "parameters"};
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
        print_row(&t, keys[k], keys[k], about_cell);
    print_differences(&t);
    print_row(&t, "step", "", step_cell);
    for (size_t k = 0; k < sizeof series / sizeof *series; k++)
        print_row(&t, series[k].label, series[k].key, series_cell);
    print_row(&t, "checkpoints", "", checkpoint_cell);
    show_print_charts(arena, runs, width, ascii);
}
