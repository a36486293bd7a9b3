#include "vm/cli/restart.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "vm/cli/doctor.h"
#include "vm/cli/options.h"

enum { MESH_BYTES = 4096 };
typedef struct {
    const vm_options *options;
    char **words; /* of the next start */
    int count, ranks;
    int64_t dp; /* the size of the mesh's data-parallel axis; 0: it has none */
    char number[24], mesh[MESH_BYTES];
} starter;

/* Whether words[i] is this option; *next is the first word after it. */
static bool is_option(char *const *words, int i, const char *name, bool value, int *next) {
    size_t length = strlen(name);
    if (strncmp(words[i], name, length) != 0) return false;
    if (words[i][length] == '=' && value) return *next = i + 1, true;
    if (words[i][length]) return false;
    *next = i + 1 + (value && words[i + 1] ? 1 : 0);
    return true;
}

/* Without the options of this file, which are the launcher's alone. */
static void copy_words(starter *s, char **argv) {
    for (int i = 0, next; argv[i];) {
        if (is_option(argv, i, "--restarts", true, &next) ||
            is_option(argv, i, "--elastic", false, &next))
            i = next;
        else
            s->words[s->count++] = argv[i++];
    }
    s->words[s->count] = NULL;
}

static void set_option(starter *s, const char *name, char *value) {
    int next, to = 0;
    for (int i = 0; i < s->count;)
        if (is_option(s->words, i, name, value != NULL, &next))
            i = next;
        else
            s->words[to++] = s->words[i++];
    s->words[to++] = (char *)name;
    if (value) s->words[to++] = value;
    s->words[s->count = to] = NULL;
}

/* ---- Fewer ranks ----------------------------------------------------------------------------- */

static int64_t data_parallel(const vm_options *options) {
    for (int i = 0; i < options->mesh_count; i++)
        if (strcmp(options->mesh[i].key, "dp") == 0)
            return strtoll(options->mesh[i].text, NULL, 10);
    return 0;
}

/* The largest divisor of dp with which no more than `most` ranks run; false where there is none. */
static bool shrink(starter *s, int most) {
    int64_t dp = s->dp;
    if (dp < 2 || s->ranks % dp) return false;
    int others = (int)(s->ranks / dp), used = 0;
    do dp--;
    while (dp >= 1 && (s->dp % dp || dp * others > most));
    if (dp < 1) return false;
    s->dp = dp;
    s->ranks = (int)dp * others;
    for (int i = 0; i < s->options->mesh_count && used < MESH_BYTES; i++) {
        const vm_setting *axis = &s->options->mesh[i];
        bool shrinks = strcmp(axis->key, "dp") == 0;
        used += snprintf(s->mesh + used, (size_t)(MESH_BYTES - used), "%s%s=%lld", i ? "," : "",
                         axis->key, shrinks ? (long long)dp : strtoll(axis->text, NULL, 10));
    }
    snprintf(s->number, sizeof s->number, "%d", s->ranks);
    set_option(s, "-n", s->number);
    set_option(s, "--mesh", s->mesh);
    return true;
}

/* The last step that metrics.jsonl has; -1: none. */
static int64_t last_step(const char *folder) {
    char path[4096], text[65537];
    static const char key[] = "\n{\"step\":";
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    FILE *file = fopen(path, "rbe");
    if (!file) return -1;
    text[0] = '\n';
    if (fseek(file, 1 - (long)sizeof text, SEEK_END) != 0) rewind(file);
    text[fread(text + 1, 1, sizeof text - 2, file) + 1] = 0;
    fclose(file);
    int64_t step = -1;
    for (const char *at = text; (at = strstr(at, key)) != NULL; at++)
        step = strtoll(at + sizeof key - 1, NULL, 10);
    return step;
}

static int gpus_left(const vm_options *options) {
    if (options->device && strcmp(options->device, "cuda") != 0) return 0;
    return doctor_gpus();
}

/* ---- Starting again -------------------------------------------------------------------------- */

/* A rank was killed, stood still or lost its device. Errors of the script would come again. */
static bool died(int code) {
    if (code == EXIT_INTERRUPTED || code == EXIT_HUNG_UP) return false;
    return code > 128 || code == ML_EXIT_PEER || code == RESTART_EXIT_DEVICE;
}

static void start_again(starter *s, int64_t start, int code, bool made_no_step) {
    int gpus = s->options->elastic ? gpus_left(s->options) : 0, before = s->ranks;
    bool fewer = false;
    if (gpus > 0 && gpus < s->ranks)
        fewer = shrink(s, gpus);
    else if (s->options->elastic && made_no_step)
        fewer = shrink(s, s->ranks - 1);
    fprintf(stderr, "mlua: the ranks ended with exit code %d; restart %lld of %lld", code,
            (long long)start, (long long)s->options->restarts);
    if (fewer)
        fprintf(stderr, ", with %d ranks instead of %d (dp=%lld)", s->ranks, before,
                (long long)s->dp);
    fputs("\n", stderr);
    set_option(s, "--resume", NULL);
}

int restart_ranks(const vm_options *options, const ml_comm_options *comm, char **argv) {
    int count = 0, code = EXIT_ERROR;
    while (argv[count]) count++;
    starter s = {.options = options,
                 .ranks = options->ranks > 1 ? (int)options->ranks : 1,
                 .dp = data_parallel(options)};
    s.words = ml_alloc(sizeof *s.words * (size_t)(count + 8));
    if (!s.words) return fprintf(stderr, "mlua: not enough host memory to start\n"), code;
    copy_words(&s, argv);
    int64_t furthest = -1;
    for (int64_t start = 1;; start++) {
        code = ml_launch_local(s.ranks, comm, s.words);
        if (!died(code) || start > options->restarts) break;
        int64_t step = last_step(options->run_folder);
        start_again(&s, start, code, step <= furthest);
        if (step > furthest) furthest = step;
    }
    ml_free(s.words);
    return code;
}
