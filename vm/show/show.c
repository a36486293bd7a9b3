#include "vm/show/show.h"

#include <stdio.h>
#include <string.h>

static bool print_json(const json_t *shown) {
    json_t *all = json_pack("{sO}", "shown", shown);
    int failed = json_dumpf(all, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
    json_decref(all);
    if (failed) ml_fail(ML_IO, "cannot write to standard output");
    printf("\n");
    return !failed;
}

bool show_paths(const show_options *options, int count, char **paths) {
    json_t *shown = json_array();
    bool good = shown != NULL;
    for (int i = 0; i < count && good; i++) {
        json_t *one = show_read(paths[i], options->verify);
        good = one && json_array_append_new(shown, one) == 0;
    }
    if (good && options->html) good = show_write_page(options->html, shown) == ML_OK;
    if (good && (options->json || !options->html))
        good = options->json ? print_json(shown) : show_print(shown, options->ascii) == ML_OK;
    json_decref(shown);
    return good;
}
