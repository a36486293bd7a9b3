/* What is shown, as text: values, tensors, and which printer for which kind. */
#define _GNU_SOURCE /* strcasestr */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "vm/show/print.h"

enum { NAME = 60 /* columns of a tensor's name */ };

/* ---- Tensors ---- */

/* "[embed=768, heads=12]", or without names "[768, 12]". */
static char *axes_text(ml_arena *arena, const json_t *tensor) {
    json_t *list = json_object_get(tensor, "axes"), *axis;
    if (!list) list = json_object_get(tensor, "shape");
    ml_text text = {.arena = arena};
    size_t i;
    ml_text_add(&text, "[");
    json_array_foreach(list, i, axis) {
        json_t *name = json_array_get(axis, 0), *size = json_array_get(axis, 1);
        const char *comma = i ? ", " : "";
        if (json_is_string(name))
            ml_text_add(&text, "%s%s=%s", comma, show_plain(arena, json_string_value(name)),
                        show_value_text(arena, size));
        else
            ml_text_add(&text, "%s%s", comma, show_value_text(arena, axis));
    }
    ml_text_add(&text, "]");
    return text.text;
}

static void print_tensors(ml_arena *arena, const json_t *shown) {
    json_t *tensors = json_object_get(shown, "tensors"), *tensor;
    size_t i, widest = 4, axes = 4;
    json_array_foreach(tensors, i, tensor) {
        size_t length = strlen(show_string(tensor, "name", ""));
        if (length > widest && length <= NAME) widest = length;
        length = strlen(axes_text(arena, tensor));
        if (length > axes && length <= NAME) axes = length;
    }
    json_array_foreach(tensors, i, tensor) {
        printf("  %-*s  %-5s %-*s %10s  %s", (int)widest,
               show_plain(arena, show_string(tensor, "name", "")),
               show_plain(arena, show_string(tensor, "dtype", "")), (int)axes,
               axes_text(arena, tensor), show_bytes_text(arena, show_number(tensor, "bytes")),
               show_plain(arena, show_string(tensor, "file", "")));
        printf("\n");
    }
}

static void print_sums(ml_arena *arena, const json_t *shown) {
    json_t *sums = json_object_get(shown, "sums"), *sum;
    const char *dtype;
    ml_text text = {.arena = arena};
    ml_text_add(&text, "%.0f of %s elements, %s", show_number(sums, "tensors"),
                show_count_text(arena, show_number(sums, "elements")),
                show_bytes_text(arena, show_number(sums, "bytes")));
    json_object_foreach(json_object_get(sums, "dtypes"), dtype, sum)
        ml_text_add(&text, "; %s: %.0f of %s", show_plain(arena, dtype),
                    show_number(sum, "tensors"), show_bytes_text(arena, show_number(sum, "bytes")));
    show_line("tensors", text.text);
}

/* The record of a checkpoint: its plain values, and its objects as pairs. */
static void print_record(ml_arena *arena, const json_t *record, int width) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)record, key, value) {
        if (json_is_object(value))
            show_pairs(arena, show_plain(arena, key), value, " ", width);
        else if (json_is_array(value) ? json_array_size(value) > 0 : !json_is_null(value))
            show_line(show_plain(arena, key), show_value_text(arena, value));
    }
}

static void print_holder(ml_arena *arena, const json_t *shown, int width) {
    const char *kind = show_string(shown, "kind", ""),
               *problem = show_string(shown, "problem", NULL);
    show_line(kind, show_plain(arena, show_string(shown, "path", "")));
    if (strcmp(kind, "checkpoint") == 0)
        show_line("state", json_is_true(json_object_get(shown, "verified"))
                               ? "whole; every tensor was read"
                               : "whole");
    if (problem) show_line("damaged", show_plain(arena, problem));
    print_record(arena, json_object_get(shown, "record"), width);
    show_pairs(arena, "metadata", json_object_get(shown, "metadata"), " ", width);
    print_sums(arena, shown);
    print_tensors(arena, shown);
}

/* ---- All of them ---- */

static int terminal_width(void) {
    struct winsize window;
    const char *columns = getenv("COLUMNS");
    int width = columns ? atoi(columns) : 0;
    if (!width && ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0) width = window.ws_col;
    return width >= 40 && width <= 400 ? width : width > 400 ? 400 : 80;
}

/* Whether the terminal's text is UTF-8, by the variables that say so. */
static bool is_utf8(void) {
    const char *all = getenv("LC_ALL"), *type = getenv("LC_CTYPE"), *lang = getenv("LANG");
    const char *locale = all && *all ? all : type && *type ? type : lang ? lang : "";
    return strcasestr(locale, "utf-8") || strcasestr(locale, "utf8");
}

typedef struct {
    const json_t *shown;
    ml_arena *arena;
    bool ascii;
} print_call;

static void print_all(void *argument) {
    print_call *call = argument;
    json_t *runs = json_array(), *one;
    size_t i, printed = 0;
    int width = terminal_width();
    json_array_foreach(call->shown, i, one) if (strcmp(show_string(one, "kind", ""), "run") == 0)
        json_array_append(runs, one);
    bool several = json_array_size(runs) > 1;
    if (several) printed++, show_compare_runs(call->arena, runs, width, call->ascii);
    json_array_foreach(call->shown, i, one) {
        bool run = strcmp(show_string(one, "kind", ""), "run") == 0;
        if (run && several) continue;
        if (printed++) printf("\n");
        if (run)
            show_print_run(call->arena, one, width, call->ascii);
        else
            print_holder(call->arena, one, width);
    }
    json_decref(runs);
}

ml_status show_print(const json_t *shown, bool ascii) {
    print_call call = {shown, ml_arena_new(), ascii || !is_utf8()};
    ml_status status =
        call.arena ? ml_protect(print_all, &call) : ml_fail(ML_NO_MEMORY, "out of memory");
    ml_arena_free(call.arena);
    return status;
}
