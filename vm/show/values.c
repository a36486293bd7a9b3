/* Texts of values. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "vm/show/print.h"

char *show_bytes_text(ml_arena *arena, double bytes) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    if (bytes < 1024) return ml_arena_format(arena, "%.0f B", bytes);
    int unit = 0;
    for (bytes /= 1024; bytes >= 1024 && unit < 3; unit++) bytes /= 1024;
    return ml_arena_format(arena, unit < 2 ? "%.1f %s" : "%.2f %s", bytes, units[unit]);
}

char *show_count_text(ml_arena *arena, double value) {
    static const char *const units[] = {"", " k", " M", " G", " T", " P"};
    int unit = 0;
    while (fabs(value) >= 1000 && unit < 5) value /= 1000, unit++;
    return ml_arena_format(arena, unit ? "%.1f%s" : "%.0f%s", value, units[unit]);
}

char *show_time_text(ml_arena *arena, double seconds) {
    if (seconds < 60) return ml_arena_format(arena, "%.1f s", seconds);
    if (seconds < 3600)
        return ml_arena_format(arena, "%d min %d s", (int)seconds / 60, (int)seconds % 60);
    double minutes = floor(seconds / 60);
    return ml_arena_format(arena, "%.0f h %d min", floor(minutes / 60), (int)fmod(minutes, 60));
}

/* Control characters, which a terminal would act on, as "?". */
char *show_plain(ml_arena *arena, const char *text) {
    char *copy = ml_arena_copy(arena, text, strlen(text));
    for (unsigned char *c = (unsigned char *)copy; *c; c++)
        if (*c < 32 || *c == 127 || (*c == 0xC2 && c[1] < 0xA0)) *c = '?';
    return copy;
}

char *show_value_text(ml_arena *arena, const json_t *value) {
    if (json_is_string(value)) return show_plain(arena, json_string_value(value));
    if (json_is_integer(value))
        return ml_arena_format(arena, "%lld", (long long)json_integer_value(value));
    if (json_is_real(value)) return ml_arena_format(arena, "%.6g", json_real_value(value));
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    char *copy = text ? show_plain(arena, text) : "?";
    ml_free(text);
    return copy;
}

/* The values of an object as "a=1 b=2", in lines of `width` behind the key. */
void show_pairs(ml_arena *arena, const char *key, json_t *object, const char *separator,
                int width) {
    const char *name;
    json_t *value;
    int column = 0;
    json_object_foreach(object, name, value) {
        char *pair =
            ml_arena_format(arena, "%s=%s", show_plain(arena, name), show_value_text(arena, value));
        int length = (int)strlen(pair) + (int)strlen(separator);
        if (column == 0 || column + length > width) {
            printf("%s%-*s %s", column ? "\n" : "", SHOW_KEY, column ? "" : key, pair);
            column = SHOW_KEY + 1 + length;
        } else {
            printf("%s%s", separator, pair);
            column += length;
        }
    }
    if (column) printf("\n");
}

void show_line(const char *key, const char *text) {
    if (*text) printf("%-*s %s\n", SHOW_KEY, key, text);
}
