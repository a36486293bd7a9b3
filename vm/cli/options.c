#include "vm/cli/options.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "vm/cli/gpus.h"
#include "vm/cli/usage.h"

typedef enum {
    OPTION_DEVICE,
    OPTION_DTYPE,
    OPTION_JSON,
    OPTION_MESH,
    OPTION_RANKS,
    OPTION_PROFILE,
    OPTION_PROFILE_STEPS,
    OPTION_BENCH,
    OPTION_SEED,
    OPTION_TYPES,
    OPTION_EXPLAIN,
    OPTION_QUIET,
    OPTION_FROM,
    OPTION_PROMPT,
    OPTION_IDS,
    OPTION_TOKENS,
    OPTION_TEMPERATURE,
    OPTION_TOP_K,
    OPTION_TOP_P,
    OPTION_SCRIPT,
    OPTION_HF,
    OPTION_ADAPTER,
    OPTION_ASCII,
    OPTION_TOKEN_FILE,
    OPTION_SPECIAL,
    OPTION_TRAIN,
    OPTION_HTML,
    OPTION_VERIFY,
    OPTION_OUT,
    OPTION_RESUME,
    OPTION_NEW_DATA,
    OPTION_RESTARTS,
    OPTION_ELASTIC
} option_id;
static const struct {
    const char *name, *value;
    option_id id;
    int commands;
    const char *doc;
} option_table[] = {
    {"--device", "NAME", OPTION_DEVICE, FOR_SCRIPTS | FOR_GENERATE | FOR_EXPORT,
     "cpu, cuda or null; default: the GPU where there is one. `check` and `repl` also take h200, "
     "..."},
    {"--dtype", "NAME", OPTION_DTYPE, FOR_SCRIPTS | FOR_GENERATE | FOR_EXPORT,
     "in which forward functions compute: bf16, f32 or f64; default: bf16 on a GPU, f32 on a CPU"},
    {"--json", NULL, OPTION_JSON, FOR_RUN | FOR_CHECK | FOR_GENERATE | FOR_SHOW | FOR_TOKENIZE,
     "one JSON object a step, or the report as one, alone on standard output"},
    {"--seed", "N", OPTION_SEED, FOR_SCRIPTS | FOR_GENERATE | FOR_EXPORT,
     "of all randomness; a script's own seed setting wins (default 0)"},
    {"--mesh", "a=2,b=4", OPTION_MESH, FOR_SCRIPTS | FOR_GENERATE | FOR_EXPORT,
     "sizes of the layout's mesh axes, 1 where not named"},
    {"-n", "RANKS", OPTION_RANKS, FOR_RUN | FOR_DOCTOR | FOR_GENERATE | FOR_EXPORT,
     "ranks to start on this host (default 1)"},
    {"--profile", "FILE.json", OPTION_PROFILE, FOR_RUN,
     "measure some steps: a trace for ui.perfetto.dev, and a table of time by kernel; `show` reads "
     "RUN/profile.json"},
    {"--profile-steps", "A:B", OPTION_PROFILE_STEPS, FOR_RUN,
     "which steps --profile looks into (default 3:5)"},
    {"--bench", NULL, OPTION_BENCH, FOR_DOCTOR,
     "measure each device's copy bandwidth and largest matrix products; takes seconds"},
    {"--types", NULL, OPTION_TYPES, FOR_CHECK, "print the type of every tensor too"},
    {"--explain", NULL, OPTION_EXPLAIN, FOR_CHECK,
     "print how each program is compiled: every pass with its effect, attempts to save memory"},
    {"--from", "DIR", OPTION_FROM, FOR_SCRIPTS | FOR_GENERATE,
     "begin with the weights of a run, a checkpoint, a Hugging Face folder or a safetensors file; "
     "PEFT's adapters by their folder, or BASE,FOLDER where it does not name a folder's weights"},
    {"--out", "DIR", OPTION_OUT, FOR_RUN,
     "keep the run in this folder: script, settings, metrics, log, checkpoints"},
    {"--resume", NULL, OPTION_RESUME, FOR_RUN,
     "continue the run that --out names, from its newest whole checkpoint; where there is none, "
     "start"},
    {"--new-data", NULL, OPTION_NEW_DATA, FOR_RUN,
     "the data of a resumed run may be others than it began with"},
    {"--restarts", "N", OPTION_RESTARTS, FOR_RUN,
     "start the ranks again from the last checkpoint when one dies, N times at most"},
    {"--elastic", NULL, OPTION_ELASTIC, FOR_RUN,
     "with fewer data-parallel ranks where a GPU is missing, or a restart makes no step"},
    {"--prompt", "TEXT", OPTION_PROMPT, FOR_GENERATE, "what is continued"},
    {"--ids", "3,1,4", OPTION_IDS, FOR_GENERATE, "the same, as token ids"},
    {"--tokens", "N", OPTION_TOKENS, FOR_GENERATE, "how many more (default 32)"},
    {"--temperature", "T", OPTION_TEMPERATURE, FOR_GENERATE,
     "0, the likeliest token each time, is the default"},
    {"--top_k", "K", OPTION_TOP_K, FOR_GENERATE, "draw from the K likeliest tokens"},
    {"--top_p", "P", OPTION_TOP_P, FOR_GENERATE,
     "draw from the likeliest tokens that together have this probability"},
    {"--script", "SCRIPT", OPTION_SCRIPT, FOR_EXPORT,
     "the model's script; default: the run's own, or the one that a Hugging Face folder needs"},
    {"--hf", NULL, OPTION_HF, FOR_EXPORT,
     "as Hugging Face's transformers has it: config.json, names and shapes of tensors, tokenizer"},
    {"--adapter", NULL, OPTION_ADAPTER, FOR_EXPORT,
     "with --hf: only the model's adapters (m.lora), as PEFT has them; else they are merged"},
    {"-o", "OUT.bin|OUT.idx", OPTION_TOKEN_FILE, FOR_TOKENIZE,
     "write ids alone, or Megatron's OUT.bin and OUT.idx; what a stopped run finished is kept"},
    {"--train", "TOKENS", OPTION_TRAIN, FOR_TOKENIZE,
     "train a tokenizer of that many tokens on the files, byte-level BPE; -o tokenizer.json"},
    {"--special", NULL, OPTION_SPECIAL, FOR_TOKENIZE,
     "add the tokens that the tokenizer puts around a text"},
    {"--html", "FILE", OPTION_HTML, FOR_SHOW,
     "write a page that needs no network: curves to zoom into, layout, memory, profile"},
    {"--verify", NULL, OPTION_VERIFY, FOR_SHOW,
     "read every tensor of checkpoints and compare its hash"},
    {"--ascii", NULL, OPTION_ASCII, FOR_SHOW,
     "curves without Braille characters; the default where the locale is not UTF-8"},
    {"--quiet", NULL, OPTION_QUIET, FOR_SCRIPTS | FOR_GENERATE | FOR_EXPORT | FOR_TOKENIZE,
     "no lines of steps and evaluations, no notes on what takes time"},
};
enum { OPTION_COUNT = sizeof option_table / sizeof *option_table };

void options_print(int flags) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (!(option_table[i].commands & flags)) continue;
        char left[64];
        snprintf(left, sizeof left, "%s%s%s", option_table[i].name,
                 option_table[i].value ? " " : "",
                 option_table[i].value ? option_table[i].value : "");
        printf("  %-20s %s\n", left, option_table[i].doc);
    }
    printf("  %-20s %s\n", "--help", "this text");
}

int usage_error(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("mlua: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    va_end(arguments);
    return EXIT_USAGE;
}

int print_suggestion(const char *guess, const char *otherwise) {
    if (guess)
        fprintf(stderr, "  help: did you mean %s?\n", guess);
    else
        fprintf(stderr, "  help: %s\n", otherwise);
    return EXIT_USAGE;
}

static int option_error(const command *c, const char *word) {
    const char *names[OPTION_COUNT];
    int count = 0;
    for (int i = 0; i < OPTION_COUNT; i++)
        if (option_table[i].commands & c->flag) names[count++] = option_table[i].name;
    usage_error("%s has no option %s", c->name, word);
    char help[160], name[64];
    bool meant = usage_option_help(c->name, c->flag == FOR_RUN, c->flag == FOR_CHECK, word, help,
                                   sizeof help);
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word, "="), word);
    return print_suggestion(meant ? NULL : ml_suggest(name, names, count), help);
}

static bool parse_integer(const char *text, int64_t *value) {
    char *end;
    errno = 0;
    *value = strtoll(text, &end, 10);
    return end != text && *end == 0 && errno == 0;
}

/* "dp=2,tp=4"; cuts the text apart. */
static int parse_mesh(vm_options *options, char *text) {
    for (char *item = strtok(text, ","); item; item = strtok(NULL, ",")) {
        char *equals = strchr(item, '=');
        int64_t size = 0;
        if (!equals || !parse_integer(equals + 1, &size) || size < 1)
            return usage_error("--mesh takes sizes such as dp=2,tp=4, not \"%s\"", item);
        *equals = 0;
        for (int i = 0; i < options->mesh_count; i++)
            if (strcmp(options->mesh[i].key, item) == 0)
                return usage_error("--mesh has two sizes of \"%s\"", item);
        if (options->mesh_count == VM_MAX_SETTINGS)
            return usage_error("--mesh names too many axes");
        options->mesh[options->mesh_count++] = (vm_setting){item, equals + 1};
    }
    return EXIT_OK;
}

static bool parse_float_dtype(const char *text, int *dtype) {
    for (int i = 0; i < ML_DTYPE_COUNT; i++)
        if (ml_dtypes[i].kind == ML_KIND_FLOAT && strcmp(ml_dtypes[i].name, text) == 0) {
            *dtype = i;
            return true;
        }
    return false;
}

static int parse_device(vm_options *options, const char *name) {
    options->device = name;
    bool known = strcmp(name, "cpu") == 0 || strcmp(name, "cuda") == 0 || strcmp(name, "null") == 0;
    if (known || (options->mode != VM_RUN && gpu_by_key(name))) return EXIT_OK;
    usage_error("there is no device \"%s\"", name);
    const char *meant = usage_device_meant(name, options->mode == VM_CHECK);
    if (meant) {
        fprintf(stderr, "  help: did you mean %s?%s\n", meant,
                strchr(name, ':') ? " Each rank takes a GPU of those in CUDA_VISIBLE_DEVICES" : "");
        return EXIT_USAGE;
    }
    fprintf(stderr, "  help: devices are cpu, cuda, null");
    if (options->mode != VM_RUN)
        for (int i = 0; gpu_at(i); i++) fprintf(stderr, ", %s", gpu_at(i)->key);
    else if (gpu_by_key(name))
        fprintf(stderr, "; mlua check plans for %s", name);
    fputs("\n", stderr);
    return EXIT_USAGE;
}

static int parse_number(const char *name, const char *text, double least, double most,
                        double *value) {
    char *end;
    *value = strtod(text, &end);
    if (end != text && *end == 0 && *value >= least && *value <= most) return EXIT_OK;
    return usage_error("%s takes a number from %g to %g, not \"%s\"", name, least, most, text);
}

/* "3,1,4"; a list in brackets too. */
static int parse_ids(vm_options *options, const char *text) {
    const char *at = text + strspn(text, " [");
    while (*at && *at != ']') {
        size_t digits = strspn(at, "0123456789");
        if (digits == 0 || digits > 9)
            return usage_error("--ids takes token ids such as 3,1,4, not \"%s\"", text);
        at += digits;
        at += strspn(at, ", ");
    }
    options->ids = text;
    return EXIT_OK;
}

static int parse_count(const char *name, const char *text, int64_t least, int64_t *value) {
    if (parse_integer(text, value) && *value >= least) return EXIT_OK;
    return usage_error("%s takes an integer, %lld or more, not \"%s\"", name, (long long)least,
                       text);
}

static int set_option(vm_options *options, option_id id, char *value) {
    int64_t number;
    switch (id) {
    case OPTION_DEVICE: return parse_device(options, value);
    case OPTION_DTYPE:
        if (options->task && strcmp(options->task, "export") == 0)
            return options->file_dtype = value, EXIT_OK;
        if (!parse_float_dtype(value, &options->dtype))
            return usage_error("--dtype takes bf16, f32 or f64, not \"%s\"", value);
        return EXIT_OK;
    case OPTION_JSON: options->json = true; return EXIT_OK;
    case OPTION_TYPES: options->types = true; return EXIT_OK;
    case OPTION_EXPLAIN: options->explain = true; return EXIT_OK;
    case OPTION_FROM: options->from = value; return EXIT_OK;
    case OPTION_PROMPT: options->prompt = value; return EXIT_OK;
    case OPTION_IDS: return parse_ids(options, value);
    case OPTION_TOKENS: return parse_count("--tokens", value, 0, &options->tokens);
    case OPTION_TOP_K: return parse_count("--top_k", value, 1, &options->top_k);
    case OPTION_TRAIN: return parse_count("--train", value, 1, &options->train);
    case OPTION_TEMPERATURE:
        return parse_number("--temperature", value, 0, 1e6, &options->temperature);
    case OPTION_TOP_P: return parse_number("--top_p", value, 0, 1, &options->top_p);
    case OPTION_SCRIPT: options->script = value; return EXIT_OK;
    case OPTION_HF: options->hf = true; return EXIT_OK;
    case OPTION_ADAPTER: options->adapter_alone = true; return EXIT_OK;
    case OPTION_VERIFY: options->verify = true; return EXIT_OK;
    case OPTION_TOKEN_FILE: options->out = value; return EXIT_OK;
    case OPTION_SPECIAL: options->special = true; return EXIT_OK;
    case OPTION_HTML: options->html = value; return EXIT_OK;
    case OPTION_ASCII: options->ascii = true; return EXIT_OK;
    case OPTION_OUT: options->run_folder = value; return EXIT_OK;
    case OPTION_RESUME: options->resume = true; return EXIT_OK;
    case OPTION_NEW_DATA: options->new_data = true; return EXIT_OK;
    case OPTION_ELASTIC: options->elastic = true; return EXIT_OK;
    case OPTION_RESTARTS:
        if (!parse_integer(value, &options->restarts) || options->restarts < 1)
            return usage_error("--restarts takes a number of times, not \"%s\"", value);
        return EXIT_OK;
    case OPTION_QUIET: options->quiet = true; return EXIT_OK;
    case OPTION_MESH: return parse_mesh(options, value);
    case OPTION_SEED:
        if (!parse_integer(value, &options->seed))
            return usage_error("--seed takes an integer, not \"%s\"", value);
        return EXIT_OK;
    case OPTION_BENCH: options->bench = true; return EXIT_OK;
    case OPTION_PROFILE: options->profile = value; return EXIT_OK;
    case OPTION_PROFILE_STEPS:
        if (!vm_profile_parse_steps(value, options))
            return usage_error("--profile-steps takes A:B with 2 <= A <= B, not \"%s\"", value);
        return EXIT_OK;
    case OPTION_RANKS:
        if (!parse_integer(value, &number) || number < 1 || number > INT_MAX)
            return usage_error("-n takes a number of ranks, not \"%s\"", value);
        options->ranks = number;
        return EXIT_OK;
    }
    return EXIT_OK;
}

/* Option words[*at], with its value behind '=' or in the next word. */
static int parse_option(const command *c, vm_options *options, int count, char **words, int *at) {
    char *word = words[*at], *equals = strncmp(word, "--", 2) == 0 ? strchr(word, '=') : NULL;
    size_t length = equals ? (size_t)(equals - word) : strlen(word);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const char *name = option_table[i].name;
        if (!(option_table[i].commands & c->flag) || strlen(name) != length ||
            strncmp(name, word, length) != 0)
            continue;
        if (!option_table[i].value) {
            if (equals) return usage_error("%s takes no value", name);
            return set_option(options, option_table[i].id, NULL);
        }
        if (!equals && *at + 1 >= count)
            return usage_error("%s needs a value: %s %s", name, name, option_table[i].value);
        return set_option(options, option_table[i].id, equals ? equals + 1 : words[++*at]);
    }
    return option_error(c, word);
}

int options_parse(const command *c, vm_options *options, int count, char **words) {
    for (int i = 0; i < count; i++) {
        char *word = words[i], *equals = strchr(word, '=');
        if (word[0] == '-' && word[1]) {
            int result = parse_option(c, options, count, words, &i);
            if (result != EXIT_OK) return result;
        } else if (equals && equals > word && !memchr(word, '/', (size_t)(equals - word)) &&
                   (options->script || c->flag & (FOR_REPL | FOR_GENERATE | FOR_EXPORT))) {
            if (options->override_count == VM_MAX_SETTINGS) return usage_error("too many settings");
            *equals = 0;
            options->overrides[options->override_count++] = (vm_setting){word, equals + 1};
        } else if (c->flag == FOR_EXPORT && (!options->from || !options->out)) {
            *(options->from ? &options->out : &options->from) = word;
        } else if (c->flag & (FOR_SHOW | FOR_TOKENIZE)) {
            options->paths = words; /* gathered at its beginning */
            words[options->path_count++] = word;
        } else if (!options->script) {
            options->script = word;
        } else {
            usage_error("%s: what is \"%s\"?", c->name, word);
            return print_suggestion(NULL, "settings are written key=value");
        }
    }
    return EXIT_OK;
}
