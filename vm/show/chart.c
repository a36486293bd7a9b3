/* Curves in the terminal.
 *
 * A chart is a grid of dots: 2 x 4 to a character in Braille, 1 x 2 in ASCII, 1 x 1 where several
 * runs share it, each drawn by its letter. Each column of dots shows the range of the values of its
 * steps, joined to the column before. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "vm/show/show.h"

enum { LABEL = 9, ROWS = SHOW_CHART_LINES - 2, RUNS = 26 }; /* columns, lines */

typedef struct {
    int across, down; /* dots to a character */
    int columns;      /* characters */
    bool ranges;      /* of a bin, not its mean alone */
    uint32_t *dots;   /* [ROWS * down][columns * across]: a bit for each run (RUNS letters) */
    double first, last, low, high;
} grid;

typedef struct {
    json_t *step, *value, *low, *high;
    size_t count;
} curve;

static curve curve_of(const json_t *run, const char *series) {
    json_t *s = json_object_get(json_object_get(run, "series"), series);
    curve c = {json_object_get(s, "step"), json_object_get(s, "value"), json_object_get(s, "low"),
               json_object_get(s, "high"), 0};
    if (!c.low) c.low = c.high = c.value;
    c.count = json_array_size(c.step);
    return c;
}

static double at(const json_t *list, size_t i) {
    json_t *value = json_array_get(list, i);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

/* The first step's time has that of starting in it: it would hide all others. */
static size_t begin_of(const char *series, const curve *c) {
    return c->count > 2 && strcmp(series, "tokens_per_s") == 0;
}

static bool find_range(const json_t *runs, const char *series, grid *g) {
    json_t *run;
    size_t r;
    g->first = g->low = INFINITY, g->last = g->high = -INFINITY;
    json_array_foreach(runs, r, run) {
        curve c = curve_of(run, series);
        for (size_t i = begin_of(series, &c); i < c.count; i++) {
            g->first = fmin(g->first, at(c.step, i)), g->last = fmax(g->last, at(c.step, i));
            g->low = fmin(g->low, at(c.low, i)), g->high = fmax(g->high, at(c.high, i));
        }
    }
    return g->first <= g->last && g->low <= g->high;
}

static int row_of(const grid *g, double value) {
    int rows = ROWS * g->down;
    double part = g->high > g->low ? (value - g->low) / (g->high - g->low) : 0.5;
    int row = (int)lround((1 - part) * (rows - 1));
    return row < 0 ? 0 : row >= rows ? rows - 1 : row;
}

static void fill(grid *g, int column, int from, int to, int run) {
    int width = g->columns * g->across;
    for (int row = from; row <= to; row++) g->dots[row * width + column] |= 1u << run;
}

static double column_of(const grid *g, double step) {
    int width = g->columns * g->across;
    return g->last > g->first ? (step - g->first) / (g->last - g->first) * (width - 1) : 0;
}

static void draw(grid *g, const curve *c, size_t begin, int run) {
    double before = NAN, value_before = 0;
    for (size_t i = begin; i < c->count; i++) {
        double value = at(c->value, i), x = column_of(g, at(c->step, i));
        if (!isfinite(value)) {
            before = NAN;
            continue;
        }
        const json_t *top = g->ranges ? c->high : c->value, *low = g->ranges ? c->low : c->value;
        fill(g, (int)lround(x), row_of(g, at(top, i)), row_of(g, at(low, i)), run);
        int from = isfinite(before) ? (int)lround(before) : 0, to = (int)lround(x);
        int last_row = row_of(g, value_before);
        for (int column = from; isfinite(before) && column <= to; column++) {
            double part = to > from ? (double)(column - from) / (to - from) : 1;
            int row = row_of(g, value_before + part * (value - value_before));
            int near = last_row < row ? last_row + 1 : last_row > row ? last_row - 1 : row;
            fill(g, column, near < row ? near : row, near < row ? row : near, run);
            last_row = row;
        }
        before = x, value_before = value;
    }
}

static void add_braille(ml_text *line, unsigned bits) {
    static const unsigned char bit[8] = {0, 1, 2, 6, 3, 4, 5, 7}; /* down the left, the right */
    unsigned code = 0x2800;
    for (int i = 0; i < 8; i++) code |= (bits >> i & 1) << bit[i];
    ml_text_add(line, "%c%c%c", 0xE0 | code >> 12, 0x80 | (code >> 6 & 63), 0x80 | (code & 63));
}

/* Of several runs in one place, each in turn. */
static char letter_of(unsigned runs, int column) {
    for (int skip = column % __builtin_popcount(runs); skip; skip--) runs &= runs - 1;
    return (char)('a' + __builtin_ctz(runs));
}

static void add_character(ml_text *line, const grid *g, int row, int column) {
    int width = g->columns * g->across;
    unsigned bits = 0, runs = 0;
    for (int i = 0; i < g->across; i++)
        for (int k = 0; k < g->down; k++) {
            unsigned here = g->dots[(row * g->down + k) * width + column * g->across + i];
            bits |= (here != 0) << (i * g->down + k);
            runs |= here;
        }
    if (!bits)
        ml_text_add(line, " ");
    else if (g->across == 2)
        add_braille(line, bits);
    else if (g->down == 2)
        ml_text_add(line, "%c", " '.:"[bits]);
    else
        ml_text_add(line, "%c", letter_of(runs, column));
}

static void print_grid(ml_arena *arena, const grid *g, bool ascii, show_chart *chart) {
    const char *bar = ascii ? "|" : "│", *corner = ascii ? "+" : "└";
    const char *dash = ascii ? "-" : "─";
    for (int row = 0; row < ROWS; row++) {
        ml_text line = {.arena = arena};
        char label[32] = "";
        if (row == 0) snprintf(label, sizeof label, "%.4g", g->high);
        if (row == ROWS - 1 && g->high > g->low) snprintf(label, sizeof label, "%.4g", g->low);
        ml_text_add(&line, "%*s %s", LABEL, label, bar);
        for (int column = 0; column < g->columns; column++) add_character(&line, g, row, column);
        chart->line[1 + row] = line.text;
    }
    ml_text line = {.arena = arena};
    char first[32], last[32];
    int length = snprintf(first, sizeof first, "%.0f", g->first);
    int end = snprintf(last, sizeof last, "%.0f", g->last);
    ml_text_add(&line, "%*s %s%s", LABEL, "step", corner, first);
    for (int i = length; i + end < g->columns; i++) ml_text_add(&line, "%s", dash);
    ml_text_add(&line, "%s", g->last > g->first ? last : "");
    for (int i = g->last > g->first ? 0 : end; i > 0; i--) ml_text_add(&line, "%s", dash);
    chart->line[SHOW_CHART_LINES - 1] = line.text;
}

bool show_draw(ml_arena *arena, const json_t *runs, const char *series, const char *title,
               int width, bool ascii, show_chart *chart) {
    bool several = json_array_size(runs) > 1;
    grid g = {.ranges = !several,
              .across = ascii || several ? 1 : 2,
              .down = several ? 1
                      : ascii ? 2
                              : 4};
    g.columns = width - LABEL - 2 > 8 ? width - LABEL - 2 : 8;
    if (!find_range(runs, series, &g)) return false;
    g.dots = ml_arena_alloc(arena, sizeof *g.dots * (size_t)(g.columns * g.across * ROWS * g.down));
    json_t *run;
    size_t r;
    json_array_foreach(runs, r, run) {
        curve c = curve_of(run, series);
        draw(&g, &c, begin_of(series, &c), (int)(r % RUNS));
    }
    chart->line[0] = ml_arena_format(arena, "%*s %-*s", LABEL, "", g.columns + 1, title);
    print_grid(arena, &g, ascii, chart);
    return true;
}
