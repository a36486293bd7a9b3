/* Texts of values, for the files that print. All are of the arena. */
#ifndef ML_SHOW_PRINT_H
#define ML_SHOW_PRINT_H

#include "vm/show/show.h"

enum { SHOW_KEY = 15 }; /* columns of the words on the left */

char *show_bytes_text(ml_arena *arena, double bytes);
char *show_count_text(ml_arena *arena, double value);
char *show_time_text(ml_arena *arena, double seconds);
/* Without control characters, which a terminal would act on. */
char *show_plain(ml_arena *arena, const char *text);
char *show_value_text(ml_arena *arena, const json_t *value);
/* "key  text", where there is one. */
void show_line(const char *key, const char *text);
/* "a=1 b=2" in lines of `width`. */
void show_pairs(ml_arena *arena, const char *key, json_t *object, const char *separator, int width);

void show_print_run(ml_arena *arena, const json_t *run, int width, bool ascii);
void show_compare_runs(ml_arena *arena, const json_t *runs, int width, bool ascii);
void show_print_charts(ml_arena *arena, const json_t *runs, int width, bool ascii);

#endif
