#include "vm/cli/folder.h"

#include <errno.h>
#include <jansson.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* settings.json and records of checkpoints hold these texts. */
static ml_status text_check(const vm_options *options) {
    json_t *folder = json_string(options->run_folder), *command = json_string(options->command);
    ml_status status = ML_OK;
    if (!folder)
        status = ml_fail(ML_INVALID, "--out %s: the path is not UTF-8", options->run_folder);
    else if (!command)
        status = ml_fail(ML_INVALID, "--out keeps the command line, which is not UTF-8");
    if (status != ML_OK) ml_help("a name of a folder or a setting in UTF-8");
    json_decref(folder);
    json_decref(command);
    return status;
}

/* What the first step of a run writes. */
static bool holds_run(const char *folder) {
    static const char *const names[] = {"settings.json", "metrics.jsonl", "checkpoints"};
    char path[4096];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        if (access(path, F_OK) == 0) return true;
    }
    return false;
}

static bool has_mesh_axis(const vm_options *options, const char *name) {
    for (int i = 0; i < options->mesh_count; i++)
        if (strcmp(options->mesh[i].key, name) == 0) return true;
    return false;
}

ml_status folder_check(const vm_options *options) {
    const char *folder = options->run_folder;
    const char *alone = options->resume     ? "--resume"
                        : options->new_data ? "--new-data"
                        : options->restarts ? "--restarts"
                                            : NULL;
    if (!folder && alone) {
        ml_fail(ML_INVALID, "%s is of a run that a folder keeps", alone);
        return ml_help("mlua run %s --out DIR --resume", options->script), ML_INVALID;
    }
    if (options->elastic && (!options->restarts || !has_mesh_axis(options, "dp"))) {
        ml_fail(ML_INVALID,
                "--elastic restarts with fewer data-parallel ranks: it needs --restarts "
                "and a size of dp");
        return ml_help("--restarts 3 --elastic -n 8 --mesh dp=8"), ML_INVALID;
    }
    if (!folder) return ML_OK;
    struct stat status;
    if (!*folder || strlen(folder) > 3000)
        return ml_fail(ML_INVALID, "--out takes a folder, not \"%s\"", folder);
    ML_TRY(text_check(options));
    if (stat(folder, &status) == 0 && !S_ISDIR(status.st_mode))
        return ml_fail(ML_IO, "--out %s: it is a file, and no folder", folder);
    if (!options->resume && holds_run(folder)) {
        ml_fail(ML_INVALID, "--out %s: the folder holds a run already", folder);
        return ml_help("--resume continues it; another folder begins anew"), ML_INVALID;
    }
    return ML_OK;
}

static bool plain(const char *word) {
    return *word && !word[strcspn(word, " \t\n'\"\\$`&|;<>()*?[]#~!{}")];
}

char *folder_command(int count, char **words) {
    size_t size = 1, used = 0;
    for (int i = 0; i < count; i++) size += 4 * strlen(words[i]) + 3;
    char *text = ml_alloc(size);
    if (!text) return NULL;
    for (int i = 0; i < count; i++) {
        bool quoted = !plain(words[i]);
        if (i) text[used++] = ' ';
        if (quoted) text[used++] = '\'';
        for (const char *at = words[i]; *at; at++) {
            if (*at == '\'')
                used += (size_t)sprintf(text + used, "'\\''");
            else
                text[used++] = *at;
        }
        if (quoted) text[used++] = '\'';
    }
    text[used] = 0;
    return text;
}
