/* A run's folder; and what a path is. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vm/show/show.h"

/* ---- Runs ---- */

/* How many steps, by the options of m.train or the script's settings. */
static void add_steps(json_t *run) {
    json_t *about = json_object_get(run, "about"), *progress = json_object_get(run, "progress");
    json_t *steps = json_object_get(about, "steps");
    if (!json_is_integer(steps))
        steps = json_object_get(json_object_get(about, "settings"), "steps");
    if (json_is_integer(steps)) json_object_set(progress, "steps", steps);
}

json_t *show_read_run(const char *path, bool verifies) {
    json_t *about =
        show_exists(path, "settings.json") ? show_load_json(path, "settings.json") : json_object();
    if (!about) return NULL;
    char metrics[4096];
    snprintf(metrics, sizeof metrics, "%s/metrics.jsonl", path);
    json_t *run = json_pack("{sssssos{}s{}s{}s[]}", "kind", "run", "path", path, "about", about,
                            "progress", "last", "series", "checkpoints");
    if (access(metrics, F_OK) == 0 && show_read_metrics(metrics, run) != ML_OK)
        return json_decref(run), NULL;
    if (show_exists(path, "profile.json") && show_read_profile(path, run) != ML_OK)
        return json_decref(run), NULL;
    add_steps(run);
    char checkpoints[4096];
    snprintf(checkpoints, sizeof checkpoints, "%s/checkpoints", path);
    json_t *list = json_object_get(run, "checkpoints");
    if (show_read_checkpoints(checkpoints, verifies, list) != ML_OK) return json_decref(run), NULL;
    return run;
}

/* ---- What a path is ---- */

typedef struct {
    int entries, tensors, runs;
    char run[2][256];
} contents;

static contents look_into(const char *path) {
    contents c = {0};
    char child[4096];
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        if (entry->d_name[0] == '.') continue;
        size_t length = strlen(entry->d_name);
        c.entries++;
        c.tensors += length > 12 && strcmp(entry->d_name + length - 12, ".safetensors") == 0;
        snprintf(child, sizeof child, "%s/%s", path, entry->d_name);
        if (show_exists(child, "settings.json") || show_exists(child, "manifest.json")) {
            if (c.runs < 2) snprintf(c.run[c.runs], sizeof c.run[0], "%s", entry->d_name);
            c.runs++;
        }
    }
    if (dir) closedir(dir);
    return c;
}

static json_t *read_folder(const char *path, bool verifies) {
    if (show_exists(path, "manifest.json")) return show_read_checkpoint(path, verifies);
    if (show_exists(path, "settings.json") || show_exists(path, "metrics.jsonl"))
        return show_read_run(path, verifies);
    contents c = look_into(path);
    if (c.tensors) return show_read_tensors(path);
    if (!c.entries)
        ml_fail(ML_IO, "%s is empty: no run, checkpoint or safetensors files", path);
    else
        ml_fail(ML_IO,
                "%s is no run (settings.json, metrics.jsonl), no checkpoint (manifest.json) and "
                "has no safetensors files",
                path);
    if (c.runs)
        ml_help("it holds others: mlua show %s/%s%s%s%s%s", path, c.run[0], c.runs > 1 ? " " : "",
                c.runs > 1 ? path : "", c.runs > 1 ? "/" : "", c.run[1]);
    return NULL;
}

json_t *show_read(const char *path, bool verifies) {
    char plain[4096];
    struct stat status;
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') length--;
    snprintf(plain, sizeof plain, "%.*s", (int)length, path);
    if (stat(plain, &status) != 0)
        return ml_fail(ML_IO, "cannot open %s: %s", plain, strerror(errno)), NULL;
    if (S_ISDIR(status.st_mode)) return read_folder(plain, verifies);
    length = strlen(plain);
    if (length < 13 || strcmp(plain + length - 12, ".safetensors") != 0) {
        ml_fail(ML_IO, "%s is no safetensors file", plain);
        ml_help(
            "mlua show takes the folder of a run or a checkpoint, or a file named *.safetensors");
        return NULL;
    }
    return show_read_tensors(plain);
}
