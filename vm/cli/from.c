#include "vm/cli/from.h"

#include <jansson.h>
#include <string.h>
#include <unistd.h>

#include "vm/embed.h"

/* DIR/script.lua of a run, or of the run whose checkpoint DIR is. */
static bool run_script(vm_options *options, char *path, size_t size) {
    static const char *const places[] = {"script.lua", "../../script.lua"};
    for (int i = 0; i < 2; i++) {
        snprintf(path, size, "%s/%s", options->from, places[i]);
        if (access(path, R_OK) != 0) continue;
        options->script = path;
        return true;
    }
    return false;
}

static const ml_embedded *model_of(const char *architecture) {
    char quoted[256];
    snprintf(quoted, sizeof quoted, "\"%s\"", architecture);
    for (const ml_embedded *file = ml_model_files; file->name; file++)
        if (strstr(file->data, quoted)) return file;
    return NULL;
}

static bool published_script(vm_options *options, const char *path, json_t *config) {
    json_t *list = json_object_get(config, "architectures");
    const char *architecture = json_string_value(json_array_get(list, 0));
    if (!architecture) return ml_fail(ML_IO, "%s names no architecture", path), false;
    const ml_embedded *file = model_of(architecture);
    if (!file) {
        ml_fail(ML_INVALID, "no script of models/ is a %s, which %s names", architecture, path);
        ml_help("give the script: mlua generate SCRIPT --from %s", options->from);
        return false;
    }
    static char chunk[64];
    snprintf(chunk, sizeof chunk, "@%s", file->name);
    options->script = file->name;
    options->script_text = file->data;
    options->script_chunk = chunk;
    return true;
}

bool from_script(vm_options *options) {
    static char path[4096];
    if (run_script(options, path, sizeof path)) return true;
    snprintf(path, sizeof path, "%s/config.json", options->from);
    if (access(path, R_OK) != 0) {
        ml_fail(ML_INVALID, "%s has no script.lua and no config.json", options->from);
        ml_help("give the script: mlua generate SCRIPT --from %s", options->from);
        return false;
    }
    json_error_t problem;
    json_t *config = json_load_file(path, JSON_REJECT_DUPLICATES, &problem);
    if (!json_is_object(config)) {
        json_decref(config);
        ml_fail(ML_IO, "%s is not valid JSON: %s (line %d)", path, problem.text, problem.line);
        return false;
    }
    bool found = published_script(options, path, config);
    json_decref(config);
    return found;
}
