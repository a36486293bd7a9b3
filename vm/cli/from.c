#include "vm/cli/from.h"

#include <ctype.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "vm/embed.h"

/* A file whose Infinity, which Python writes and JSON has not, reads as 1e308. */
typedef struct {
    FILE *file;
    const char *rest; /* of what stands for the word */
    bool quoted, escaped;
} endless_file;

static int next_byte(endless_file *f) {
    if (*f->rest) return *f->rest++;
    int c = getc(f->file);
    if (c == 'I' && !f->quoted) {
        while ((c = getc(f->file)) != EOF && isalpha(c)) {}
        if (c != EOF) ungetc(c, f->file);
        f->rest = "e308";
        return '1';
    }
    if (c == '"' && !f->escaped) f->quoted = !f->quoted;
    f->escaped = c == '\\' && !f->escaped;
    return c;
}

static size_t read_bytes(void *buffer, size_t room, void *data) {
    size_t count = 0;
    for (int c; count < room && (c = next_byte(data)) != EOF; count++)
        ((char *)buffer)[count] = (char)c;
    return count;
}

static json_t *load(const char *path) {
    json_error_t problem = {.text = "cannot be opened"};
    endless_file f = {.file = fopen(path, "rb"), .rest = ""};
    json_t *value =
        f.file ? json_load_callback(read_bytes, &f, JSON_REJECT_DUPLICATES, &problem) : NULL;
    if (f.file) fclose(f.file);
    if (!value) ml_fail(ML_IO, "%s:%d: not valid JSON: %s", path, problem.line, problem.text);
    return value;
}

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
        ml_help("give the script: mlua %s SCRIPT --from %s", options->task ? options->task : "run",
                options->from);
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
        if (access(options->from, F_OK) != 0)
            return ml_fail(ML_IO, "--from %s: there is no such folder", options->from), false;
        ml_fail(ML_INVALID, "%s has no script.lua and no config.json", options->from);
        ml_help("give the script: mlua %s SCRIPT --from %s", options->task ? options->task : "run",
                options->from);
        return false;
    }
    json_t *config = load(path);
    if (!config) return false;
    bool found = published_script(options, path, config);
    json_decref(config);
    return found;
}

static bool holds_adapter(const char *folder, char *path, size_t size) {
    snprintf(path, size, "%s/adapter_config.json", folder);
    return access(path, R_OK) == 0;
}

bool from_adapter(vm_options *options) {
    static char base[4096];
    char path[4096 + 64];
    const char *comma = options->from ? strrchr(options->from, ',') : NULL;
    if (comma && access(options->from, F_OK) != 0) {
        options->adapter = comma + 1;
        if (!holds_adapter(options->adapter, path, sizeof path)) {
            ml_fail(ML_INVALID, "--from %s: there is no %s", options->from, path);
            return false;
        }
        snprintf(base, sizeof base, "%.*s", (int)(comma - options->from), options->from);
        options->from = base;
        return true;
    }
    if (!options->from || !holds_adapter(options->from, path, sizeof path)) return true;
    json_t *config = load(path);
    if (!config) return false;
    const char *name = json_string_value(json_object_get(config, "base_model_name_or_path"));
    options->adapter = options->from;
    snprintf(base, sizeof base, "%s", name ? name : "");
    json_decref(config);
    if (!*base || access(base, F_OK) != 0) {
        ml_fail(ML_INVALID, "%s holds adapters of %s%s", options->from,
                *base ? base : "a model that it does not name",
                *base ? ", which is not a folder here" : "");
        ml_help("name the model's folder first: --from BASE,%s", options->from);
        return false;
    }
    options->from = base;
    return true;
}
