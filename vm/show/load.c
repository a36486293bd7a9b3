/* JSON files, and what is in them. */
#include <errno.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "vm/show/show.h"

bool show_exists(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

json_t *show_load_json(const char *folder, const char *name) {
    char path[4096];
    json_error_t problem;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    json_t *value = json_load_file(path, JSON_REJECT_DUPLICATES, &problem);
    if (json_is_object(value)) return value;
    if (access(path, R_OK) != 0)
        ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    else if (value)
        ml_fail(ML_IO, "%s is not a JSON object", path);
    else
        ml_fail(ML_IO, "%s:%d: not valid JSON: %s", path, problem.line, problem.text);
    json_decref(value);
    return NULL;
}

const char *show_string(const json_t *object, const char *key, const char *otherwise) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : otherwise;
}

double show_number(const json_t *object, const char *key) {
    json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}
