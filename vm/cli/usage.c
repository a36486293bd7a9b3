#include "vm/cli/usage.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "vm/cli/gpus.h"

static bool counts_ranks(const char *word, size_t length) {
    static const char *const words[] = {"--gpus",     "--nproc",      "--nproc_per_node",
                                        "--num-gpus", "--num_gpus",   "--nproc-per-node",
                                        "-np",        "--world-size", "-n"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strlen(words[i]) == length && strncmp(words[i], word, length) == 0) return true;
    return false;
}

bool usage_option_help(const char *command, bool runs, bool checks, const char *word, char *help,
                       size_t size) {
    char setting[64];
    size_t dashes = strspn(word, "-"), length = strcspn(word, "=");
    const char *value = word[length] ? word + length + 1 : "...";
    if ((runs || checks) && counts_ranks(word, length)) {
        snprintf(help, size,
                 checks ? "--mesh dp=2 says for how many ranks"
                        : "-n 2 starts two ranks; --mesh dp=2 splits the work over them");
        return true;
    }
    snprintf(setting, sizeof setting, "%.*s", (int)(length - dashes), word + dashes);
    for (char *c = setting; *c; c++)
        if (*c == '-') *c = '_';
    if ((runs || checks) && strlen(setting) > 1)
        snprintf(help, size,
                 "settings of the script have no dashes: %s=%s; mlua %s --help lists the options",
                 setting, value, command);
    else
        snprintf(help, size, "mlua %s --help lists them", command);
    return false;
}

const char *usage_device_meant(const char *name, bool plans) {
    char lower[32];
    size_t length = strcspn(name, ":");
    if (length >= sizeof lower) return NULL;
    for (size_t i = 0; i < length; i++) lower[i] = (char)tolower((unsigned char)name[i]);
    lower[length] = 0;
    if (strcmp(lower, "gpu") == 0 || strcmp(lower, "cuda") == 0 || strcmp(lower, "nvidia") == 0)
        return "cuda";
    if (strcmp(lower, "cpu") == 0) return "cpu";
    for (int i = 0; plans && gpu_at(i); i++)
        if (strcmp(gpu_at(i)->key, lower) == 0) return gpu_at(i)->key;
    return NULL;
}
