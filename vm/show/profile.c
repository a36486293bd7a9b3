/* The profile of a run, as `mlua run --profile RUN/profile.json` writes it: time by kernel. */
#include <stdlib.h>
#include <string.h>

#include "vm/show/show.h"

/* What the device did in the steps that were measured step by step, on the first rank. */
static bool is_kernel(json_t *event) {
    const char *kind = show_string(event, "cat", "");
    return strcmp(show_string(event, "ph", ""), "X") == 0 && show_number(event, "pid") == 0 &&
           strcmp(kind, "host") != 0 && strcmp(kind, "run") != 0 && strcmp(kind, "step") != 0;
}

static void add(json_t *sums, const char *key, json_t *event) {
    json_t *sum = json_object_get(sums, key);
    if (!sum) {
        sum = json_pack("{sssssisf}", "name", show_string(event, "name", "?"), "kind",
                        show_string(event, "cat", "?"), "count", 0, "seconds", 0.0);
        json_object_set_new(sums, key, sum);
    }
    json_t *count = json_object_get(sum, "count"), *seconds = json_object_get(sum, "seconds");
    json_integer_set(count, json_integer_value(count) + 1);
    json_real_set(seconds, json_real_value(seconds) + show_number(event, "dur") / 1e6);
}

static int slowest_first(const void *a, const void *b) {
    double x = show_number(*(json_t *const *)a, "seconds");
    double y = show_number(*(json_t *const *)b, "seconds");
    return x < y ? 1 : x > y ? -1 : 0;
}

/* The sums as a list, the longest first. */
static json_t *sorted(json_t *sums) {
    size_t count = 0;
    json_t **list = ml_alloc((json_object_size(sums) + 1) * sizeof *list), *sum, *result;
    const char *key;
    if (!list) return json_array();
    json_object_foreach(sums, key, sum) list[count++] = sum;
    if (count) qsort(list, count, sizeof *list, slowest_first);
    result = json_array();
    for (size_t i = 0; i < count && i < SHOW_KERNELS; i++) json_array_append(result, list[i]);
    ml_free(list);
    return result;
}

ml_status show_read_profile(const char *folder, json_t *run) {
    json_t *trace = show_load_json(folder, "profile.json"), *event, *sum;
    if (!trace) return ml_error_last()->status;
    json_t *by_name = json_object(), *kinds = json_object(), *steps = json_object();
    char key[512];
    size_t i;
    double seconds = 0;
    json_array_foreach(json_object_get(trace, "traceEvents"), i, event) {
        if (!is_kernel(event) || !(show_number(event, "dur") >= 0)) continue;
        const char *kind = show_string(event, "cat", "?");
        snprintf(key, sizeof key, "%s\n%s", kind, show_string(event, "name", "?"));
        add(by_name, key, event);
        add(kinds, kind, event);
        snprintf(key, sizeof key, "%.0f", show_number(json_object_get(event, "args"), "step"));
        json_object_set_new(steps, key, json_true());
    }
    const char *kind;
    json_object_foreach(kinds, kind, sum) seconds += show_number(sum, "seconds");
    json_object_set_new(run, "profile",
                        json_pack("{sfsIsoso}", "seconds", seconds, "steps",
                                  (json_int_t)json_object_size(steps), "kinds", sorted(kinds),
                                  "kernels", sorted(by_name)));
    json_decref(by_name);
    json_decref(kinds);
    json_decref(steps);
    json_decref(trace);
    return ML_OK;
}
