/* A run as text. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "vm/show/print.h"

enum { CHECKPOINTS = 12 /* that are listed */ };

static char *progress_text(ml_arena *arena, const json_t *run) {
    json_t *progress = json_object_get(run, "progress");
    double step = show_number(progress, "step"), steps = show_number(progress, "steps");
    double tokens = show_number(progress, "tokens"), seconds = show_number(progress, "seconds");
    double each = show_number(progress, "seconds_per_step");
    ml_text text = {.arena = arena};
    if (!isfinite(step)) return "no step yet";
    ml_text_add(&text, "step %.0f", step);
    if (steps > 0) ml_text_add(&text, " of %.0f (%.0f %%)", steps, 100 * step / steps);
    if (isfinite(tokens)) ml_text_add(&text, ", %s tokens", show_count_text(arena, tokens));
    if (isfinite(seconds)) ml_text_add(&text, ", %s", show_time_text(arena, seconds));
    if (steps > step && isfinite(each))
        ml_text_add(&text, "; %s left at this speed", show_time_text(arena, (steps - step) * each));
    return text.text;
}

static char *last_text(ml_arena *arena, const json_t *run) {
    static const struct {
        const char *key, *format;
    } known[] = {{"loss", "loss %.4f"},
                 {"grad_norm", "norm %.3f"},
                 {"lr", "lr %.2e"},
                 {"memory_gib", "%.2f GiB"}};
    json_t *last = json_object_get(run, "last");
    ml_text text = {.arena = arena};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        double value = show_number(last, known[i].key);
        bool there = json_object_get(last, known[i].key);
        if (isfinite(value)) {
            if (text.length) ml_text_add(&text, "  ");
            ml_text_add(&text, known[i].format, value);
        } else if (there && strcmp(known[i].key, "loss") == 0) {
            ml_text_add(&text, "loss not finite");
        }
    }
    double speed = show_number(last, "tokens_per_s"), mfu = show_number(last, "mfu");
    if (isfinite(speed)) ml_text_add(&text, "  %s tokens/s", show_count_text(arena, speed));
    if (isfinite(mfu)) ml_text_add(&text, "  MFU %.1f %%", 100 * mfu);
    return text.text ? text.text : "";
}

/* "data 1.2 s, save 3.0 s": what is worth a tenth of a second. */
static char *lost_text(ml_arena *arena, const json_t *run) {
    json_t *lost = json_object_get(json_object_get(run, "progress"), "lost"), *seconds;
    ml_text text = {.arena = arena};
    const char *name;
    json_object_foreach(lost, name, seconds) if (json_number_value(seconds) >= 0.1)
        ml_text_add(&text, "%s%s %s", text.length ? ", " : "", name,
                    show_time_text(arena, json_number_value(seconds)));
    return text.text ? text.text : "";
}

/* "parameters 61.8 MiB, optimizer 82.7 MiB" */
static char *memory_text(ml_arena *arena, const json_t *run) {
    json_t *memory = json_object_get(json_object_get(run, "about"), "memory"), *bytes;
    ml_text text = {.arena = arena};
    const char *name;
    json_object_foreach(memory, name, bytes) if (json_number_value(bytes) > 0)
        ml_text_add(&text, "%s%s %s", text.length ? ", " : "", show_plain(arena, name),
                    show_bytes_text(arena, json_number_value(bytes)));
    return text.text ? text.text : "";
}

/* "GEMM 41 %, attention 20 %" of the device's time in the measured steps. */
static char *profile_text(ml_arena *arena, const json_t *run) {
    json_t *profile = json_object_get(run, "profile"), *kind;
    double all = show_number(profile, "seconds");
    ml_text text = {.arena = arena};
    size_t i;
    json_array_foreach(json_object_get(profile, "kinds"), i, kind) if (all > 0) ml_text_add(
        &text, "%s%s %.0f %%", i ? ", " : "", show_plain(arena, show_string(kind, "kind", "?")),
        100 * show_number(kind, "seconds") / all);
    return text.text ? text.text : "";
}

static char *evaluation_text(ml_arena *arena, const json_t *run) {
    json_t *e = json_object_get(run, "evaluation");
    double loss = show_number(e, "loss"), lowest = show_number(e, "lowest");
    if (!json_is_object(e)) return "";
    char *text = ml_arena_format(arena, "step %.0f: %.4f", show_number(e, "step"), loss);
    if (lowest < loss)
        return ml_arena_format(arena, "%s; lowest %.4f at step %.0f", text, lowest,
                               show_number(e, "lowest_step"));
    return text;
}

/* "save 7, restart 1" */
static char *events_text(ml_arena *arena, const json_t *run) {
    json_t *event, *counts = json_object(), *count;
    ml_text text = {.arena = arena};
    const char *name;
    size_t i;
    json_array_foreach(json_object_get(run, "events"), i, event) {
        name = show_string(event, "event", "?");
        if (strcmp(name, "start") == 0 || strcmp(name, "end") == 0) continue;
        json_object_set_new(counts, name,
                            json_integer(1 + json_integer_value(json_object_get(counts, name))));
    }
    json_object_foreach(counts, name, count)
        ml_text_add(&text, "%s%s %lld", text.length ? ", " : "", show_plain(arena, name),
                    (long long)json_integer_value(count));
    json_decref(counts);
    return text.text ? text.text : "";
}

static char *state_text(ml_arena *arena, const json_t *state) {
    return json_is_true(json_object_get(state, "whole"))
               ? "whole"
               : ml_arena_format(arena, "not whole: %s",
                                 show_plain(arena, show_string(state, "problem", "?")));
}

static void print_checkpoints(ml_arena *arena, const json_t *run) {
    json_t *list = json_object_get(run, "checkpoints"), *state;
    size_t i, count = json_array_size(list);
    json_array_foreach(list, i, state) {
        const char *path = show_string(state, "path", ""), *slash = strrchr(path, '/');
        if (i == CHECKPOINTS && count > CHECKPOINTS + 1) {
            printf("%-*s and %zu older\n", SHOW_KEY, "", count - i);
            break;
        }
        printf("%-*s %s  %10s  %s\n", SHOW_KEY, i ? "" : "checkpoints",
               show_plain(arena, slash ? slash + 1 : path),
               show_bytes_text(arena, show_number(state, "bytes")), state_text(arena, state));
    }
}

static void print_about(ml_arena *arena, const json_t *run, int width) {
    json_t *about = json_object_get(run, "about");
    ml_text text = {.arena = arena};
    show_line("run", show_plain(arena, show_string(run, "path", "")));
    show_line("script", show_plain(arena, show_string(about, "script", "")));
    json_t *command = json_object_get(about, "command");
    json_t *word;
    size_t i;
    json_array_foreach(command, i, word)
        ml_text_add(&text, "%s%s", i ? " " : "", show_value_text(arena, word));
    show_line("command", text.text                            ? text.text
                         : command && !json_is_array(command) ? show_value_text(arena, command)
                                                              : "");
    ml_text started = {.arena = arena};
    static const char *const keys[] = {"started", "version", "device", "seed"};
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        json_t *value = json_object_get(about, keys[k]);
        const char *label = k == 1 ? "mlua " : k == 3 ? "seed " : "";
        if (value && !json_is_null(value))
            ml_text_add(&started, "%s%s%s", started.length ? ", " : "", label,
                        show_value_text(arena, value));
    }
    show_line("started", started.text ? started.text : "");
    show_pairs(arena, "settings", json_object_get(about, "settings"), " ", width);
    show_pairs(arena, "layout", json_object_get(about, "layout"), ", ", width);
    double parameters = show_number(about, "parameters");
    if (isfinite(parameters)) show_line("parameters", show_count_text(arena, parameters));
    show_line("planned memory", memory_text(arena, run));
}

/* ---- Charts ---- */

static const struct {
    const char *series, *title;
} charts[] = {{"loss", "loss"},
              {"eval_loss", "evaluation loss"},
              {"grad_norm", "gradient norm"},
              {"lr", "learning rate"},
              {"tokens_per_s", "tokens/s"}};
enum { CHART_COUNT = sizeof charts / sizeof *charts };

/* Two beside each other where there is room. */
void show_print_charts(ml_arena *arena, const json_t *runs, int width, bool ascii) {
    show_chart drawn[CHART_COUNT];
    int count = 0, beside = width >= 76 ? 2 : 1, each = beside == 2 ? (width - 1) / 2 : width;
    for (int i = 0; i < CHART_COUNT; i++)
        count +=
            show_draw(arena, runs, charts[i].series, charts[i].title, each, ascii, &drawn[count]);
    for (int i = 0; i < count; i += beside) {
        printf("\n");
        for (int row = 0; row < SHOW_CHART_LINES; row++) {
            ml_text line = {.arena = arena};
            for (int k = i; k < i + beside && k < count; k++)
                ml_text_add(&line, "%s%s", k > i ? " " : "", drawn[k].line[row]);
            while (line.length && line.text[line.length - 1] == ' ') line.text[--line.length] = 0;
            printf("%s\n", line.text);
        }
    }
}

/* Series that the script added, and no chart shows. */
static void print_others(ml_arena *arena, const json_t *run) {
    static const char *const known[] = {"tokens",  "samples", "memory_gib", "step_ms",       "mfu",
                                        "data_ms", "eval_ms", "save_ms",    "tflops_per_gpu"};
    ml_text text = {.arena = arena};
    const char *name;
    json_t *curve;
    json_object_foreach(json_object_get(run, "series"), name, curve) {
        bool found = false;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            found |= strcmp(name, known[i]) == 0;
        for (int i = 0; i < CHART_COUNT; i++) found |= strcmp(name, charts[i].series) == 0;
        if (!found)
            ml_text_add(
                &text, "%s%s %s", text.length ? ", " : "", show_plain(arena, name),
                show_value_text(arena, json_object_get(json_object_get(run, "last"), name)));
    }
    show_line("also logged", text.text ? text.text : "");
}

void show_print_run(ml_arena *arena, const json_t *run, int width, bool ascii) {
    print_about(arena, run, width);
    show_line("progress", progress_text(arena, run));
    show_line("lost to", lost_text(arena, run));
    show_line("last", last_text(arena, run));
    print_others(arena, run);
    show_line("evaluation", evaluation_text(arena, run));
    show_line("events", events_text(arena, run));
    show_line("profile", profile_text(arena, run));
    print_checkpoints(arena, run);
    json_t *runs = json_pack("[O]", run);
    show_print_charts(arena, runs, width, ascii);
    json_decref(runs);
}
