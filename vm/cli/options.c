#include "vm/cli/options.h"

#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "vm/cli/gpus.h"
#include "vm/cli/usage.h"

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
        if (!equals || !parse_integer(equals + 1, &size) || size < 1) {
            usage_error("--mesh takes sizes such as dp=2,tp=4, not \"%s\"", item);
            return equals && strcmp(equals + 1, "dynamic") == 0
                       ? print_suggestion(NULL, "--layout cp=dynamic, with the ranks in --mesh")
                       : EXIT_USAGE;
        }
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

/* "context=ring,zero=false"; cuts the text apart. What they may be, stdlib/layout.lua knows. */
static int parse_layout(vm_options *options, char *text) {
    for (char *item = strtok(text, ","); item; item = strtok(NULL, ",")) {
        char *equals = strchr(item, '=');
        if (!equals || equals == item || !equals[1])
            return usage_error("--layout takes options such as context=ring, not \"%s\"", item);
        *equals = 0;
        if (options->layout_count == VM_MAX_SETTINGS)
            return usage_error("--layout has too many options");
        options->layout[options->layout_count++] = (vm_setting){item, equals + 1};
    }
    return EXIT_OK;
}

static int parse_dtype(vm_options *options, char *text) {
    if (options->task && strcmp(options->task, "export") == 0)
        return options->file_dtype = text, EXIT_OK;
    options->fp8 = strcmp(text, "fp8") == 0;
    if (options->fp8) return options->dtype = ML_BF16, EXIT_OK;
    for (int i = 0; i < ML_DTYPE_COUNT; i++)
        if (ml_dtypes[i].kind == ML_KIND_FLOAT && ml_dtypes[i].bytes > 1 &&
            strcmp(ml_dtypes[i].name, text) == 0)
            return options->dtype = i, EXIT_OK;
    return usage_error("--dtype takes bf16, fp8, f16, f32 or f64, not \"%s\"", text);
}

static int parse_device(vm_options *options, char *name) {
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

/* "3,1,4"; a list in brackets too. */
static int parse_ids(vm_options *options, char *text) {
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

/* 60, 60GiB, 800MiB. */
static int parse_memory(vm_options *options, char *text) {
    const double most = 1e9;
    char *end;
    double gib = strtod(text, &end);
    bool known = *end == 0 || strcmp(end, "GiB") == 0;
    if (strcmp(end, "MiB") == 0) known = true, gib /= 1024;
    if (end == text || !known || !(gib > 0) || gib > most)
        return usage_error("--memory takes a size such as 60GiB or 800MiB, not \"%s\"", text);
    options->memory = gib;
    return EXIT_OK;
}

static int parse_weights(vm_options *options, char *text) {
    options->weights = text;
    if (strcmp(text, "int8") == 0 || strcmp(text, "fp8") == 0) return EXIT_OK;
    return usage_error("--weights takes int8 or fp8, not \"%s\"", text);
}

static int parse_stop(vm_options *options, char *text) {
    if (!*text) return usage_error("--stop takes a text that is not empty");
    if (options->stop_count == VM_MAX_STOPS) return usage_error("--stop is given too often");
    options->stops[options->stop_count++] = text;
    return EXIT_OK;
}

static int parse_seed(vm_options *options, char *text) {
    options->seed_given = true;
    if (parse_integer(text, &options->seed)) return EXIT_OK;
    return usage_error("--seed takes an integer, not \"%s\"", text);
}

static int parse_ranks(vm_options *options, char *text) {
    int64_t *ranks = &options->ranks;
    if (parse_integer(text, ranks) && *ranks >= 1 && *ranks <= INT_MAX) return EXIT_OK;
    return usage_error("-n takes a number of ranks, not \"%s\"", text);
}

static int parse_steps(vm_options *options, char *text) {
    if (vm_profile_parse_steps(text, options)) return EXIT_OK;
    return usage_error("--profile-steps takes A:B with 2 <= A <= B, not \"%s\"", text);
}

/* Where an option's value is stored, and what it may be. */
#define FLAG(field) VALUE_FLAG, offsetof(vm_options, field), 0, NULL
#define TEXT(field) VALUE_TEXT, offsetof(vm_options, field), 0, NULL
#define COUNT(field, least) VALUE_COUNT, offsetof(vm_options, field), least, NULL
#define NUMBER(field, most) VALUE_NUMBER, offsetof(vm_options, field), most, NULL
#define OWN(parse) VALUE_OWN, 0, 0, parse
typedef struct {
    const char *name, *value;
    enum { VALUE_FLAG, VALUE_TEXT, VALUE_COUNT, VALUE_NUMBER, VALUE_OWN } kind;
    size_t at;
    double limit; /* the least count, the greatest number */
    int (*parse)(vm_options *options, char *text);
    int commands;
    const char *doc;
} option;
static const option option_table[] = {
    {"--device", "NAME", OWN(parse_device),
     FOR_SCRIPTS | FOR_WATCH | FOR_TUNE | FOR_GENERATE | FOR_SERVE | FOR_EXPORT,
     "cpu, cuda or null; default: the GPU where there is one. `check`, `tune` and `repl` also take "
     "h200, ..."},
    {"--dtype", "NAME", OWN(parse_dtype),
     FOR_SCRIPTS | FOR_WATCH | FOR_TUNE | FOR_GENERATE | FOR_SERVE | FOR_EXPORT,
     "in which forward functions compute: bf16, fp8 (bf16, but products of blocks), f16 (with a "
     "scaled loss), f32 or f64; default: bf16 on a GPU, f32 on a CPU"},
    {"--json", NULL, FLAG(json),
     FOR_RUN | FOR_CHECK | FOR_TUNE | FOR_GENERATE | FOR_SHOW | FOR_TOKENIZE,
     "one JSON object a step, or the report as one, alone on standard output"},
    {"--seed", "N", OWN(parse_seed),
     FOR_SCRIPTS | FOR_WATCH | FOR_GENERATE | FOR_SERVE | FOR_EXPORT,
     "of all randomness; a script's own seed setting wins (default 0)"},
    {"--mesh", "a=2,b=4", OWN(parse_mesh),
     FOR_SCRIPTS | FOR_WATCH | FOR_GENERATE | FOR_SERVE | FOR_EXPORT,
     "sizes of the layout's mesh axes, 1 where not named"},
    {"--layout", "a=x,b=y", OWN(parse_layout), FOR_SCRIPTS | FOR_WATCH,
     "options of the layout instead of the script's: preset=fsdp, zero, sp, reshard, context, "
     "exchange, schedule, chunks, microbatches (m.layout.megatron)"},
    {"--memory", "SIZE", OWN(parse_memory), FOR_RUN | FOR_CHECK | FOR_WATCH | FOR_TUNE,
     "a budget for each rank, such as 60GiB or 800MiB (default: what its device has): values are "
     "kept or computed again so that the step is the fastest that fits"},
    {"--gpus", "N", COUNT(gpus, 1), FOR_TUNE, "ranks that the layout is for"},
    {"--nodes", "N", COUNT(hosts, 1), FOR_CHECK | FOR_WATCH | FOR_TUNE,
     "hosts that the ranks are on (default: 8 on each)"},
    {"--batch", "N", COUNT(global_batch, 1), FOR_TUNE,
     "samples of a step, of all ranks (default: the script's)"},
    {"--precision", "any|A,B", TEXT(precision), FOR_TUNE,
     "dtypes to choose from: any (bf16 and fp8 on a GPU), or those named; default: --dtype alone. "
     "With --serve those of weights: as they are (bf16), int8, fp8; default: any"},
    {"--serve", NULL, FLAG(serve), FOR_CHECK | FOR_TUNE,
     "of text that `serve` generates: a step of --slots texts; `tune` chooses ranks, slots and "
     "--weights for the most tokens a second within --latency"},
    {"--latency", "MS", NUMBER(latency, 1e9), FOR_TUNE,
     "with --serve: the most milliseconds from a token of a text to the next"},
    {"--first", "MS", NUMBER(first, 1e9), FOR_TUNE,
     "with --serve: the most milliseconds from the end of a prompt to its first token"},
    {"--prompt-tokens", "N", COUNT(prompt_tokens, 1), FOR_CHECK | FOR_TUNE | FOR_SERVE,
     "with --serve, and of what --measure measures: how long that prompt is (default 512)"},
    {"--within", "SECONDS", COUNT(within, 1), FOR_TUNE,
     "how long to plan layouts (default 8.5); at least some are planned"},
    {"--measure", NULL, FLAG(measure), FOR_TUNE | FOR_SERVE,
     "run the best on this machine for a few steps each, and choose by what that measures; of "
     "serve: answer nothing, measure steps of --slots texts, and end. It needs no --from"},
    {"--tries", "N", COUNT(tries, 1), FOR_TUNE, "how many --measure runs (default 5)"},
    {"--results", "FILE", TEXT(results), FOR_TUNE,
     "of --measure: add what each run measured, a line as soon as it is known; runs that FILE has "
     "are not made again"},
    {"--every", NULL, FLAG(every), FOR_TUNE,
     "plan every layout, however long that takes, and print all that fit"},
    {"-n", "RANKS", OWN(parse_ranks), FOR_RUN | FOR_DOCTOR | FOR_GENERATE | FOR_SERVE | FOR_EXPORT,
     "ranks to start on this host (default 1)"},
    {"--profile", "FILE.json", TEXT(profile), FOR_RUN,
     "measure some steps: a trace for ui.perfetto.dev, and a table of time by kernel; `show` reads "
     "RUN/profile.json"},
    {"--profile-steps", "A:B", OWN(parse_steps), FOR_RUN,
     "which steps --profile looks into (default 3:5)"},
    {"--bench", NULL, FLAG(bench), FOR_DOCTOR,
     "measure what each device reaches; takes seconds, and is kept for the times that `check` "
     "predicts"},
    {"--types", NULL, FLAG(types), FOR_CHECK, "print the type of every tensor too"},
    {"--explain", NULL, FLAG(explain), FOR_CHECK,
     "print how each program is compiled: every pass with its effect, attempts to save memory"},
    {"--memory-curve", NULL, FLAG(memory_curve), FOR_CHECK,
     "print the predicted time of a step at budgets from the least that fits to all that it may "
     "use"},
    {"--facts", NULL, FLAG(facts), FOR_CHECK,
     "write all that is known about the script as one JSON object, also where it fails: the types, "
     "bytes and layouts of expressions by place, steps by line, reports, the error"},
    {"--buffers", "FILE", TEXT(buffers), FOR_CHECK,
     "with --facts: texts that an editor has not saved, JSON {path: text}; - is standard input"},
    {"--confined", "DIR[:DIR]", TEXT(confined), FOR_CHECK,
     "with --facts: read only below these folders; no writing, processes or network; 5 s, 2 GiB"},
    {"--from", "DIR", TEXT(from), FOR_SCRIPTS | FOR_WATCH | FOR_TUNE | FOR_GENERATE | FOR_SERVE,
     "begin with the weights of a run, a checkpoint, a Hugging Face folder or a safetensors file; "
     "PEFT's adapters by their folder, or BASE,FOLDER where it does not name a folder's weights"},
    {"--out", "DIR", TEXT(run_folder), FOR_RUN,
     "keep the run in this folder: script, settings, metrics, log, checkpoints"},
    {"--resume", NULL, FLAG(resume), FOR_RUN,
     "continue the run that --out names, from its newest whole checkpoint; where there is none, "
     "start"},
    {"--new-data", NULL, FLAG(new_data), FOR_RUN,
     "the data of a resumed run may be others than it began with"},
    {"--new-sizes", NULL, FLAG(new_sizes), FOR_RUN,
     "states of a resumed run whose axes the script has changed begin anew"},
    {"--undo", "FILE:FILE", TEXT(undo), FOR_RUN,
     "with --new-sizes: a safetensors file of what an earlier edit left out, and one that is "
     "written with what this edit does (of --watch)"},
    {"--undo-memory", "GIB", NUMBER(undo_memory, 1e6), FOR_RUN,
     "with --watch: the most host memory for what an edit leaves out (default: half of what is "
     "available)"},
    {"--watch", NULL, FLAG(watch), FOR_RUN,
     "continue with the script at each save that mlua check accepts; needs --out"},
    {"--restarts", "N", COUNT(restarts, 1), FOR_RUN,
     "start the ranks again from the last checkpoint when one dies, N times at most"},
    {"--elastic", NULL, FLAG(elastic), FOR_RUN,
     "with fewer data-parallel ranks where a GPU is missing, or a restart makes no step"},
    {"--prompt", "TEXT", TEXT(prompt), FOR_GENERATE, "what is continued"},
    {"--ids", "3,1,4", OWN(parse_ids), FOR_GENERATE, "the same, as token ids"},
    {"--tokens", "N", COUNT(tokens, 0), FOR_GENERATE, "how many more (default 32)"},
    {"--temperature", "T", NUMBER(temperature, 1e6), FOR_GENERATE,
     "0, the likeliest token each time, is the default"},
    {"--top_k", "K", COUNT(top_k, 1), FOR_GENERATE, "draw from the K likeliest tokens"},
    {"--top_p", "P", NUMBER(top_p, 1), FOR_GENERATE,
     "draw from the likeliest tokens that together have this probability"},
    {"--min_p", "P", NUMBER(min_p, 1), FOR_GENERATE,
     "draw from tokens with at least P times the probability of the likeliest"},
    {"--repetition_penalty", "R", NUMBER(repetition_penalty, 1e6), FOR_GENERATE,
     "above 1: tokens of the prompt and the answer become less likely; divides their logits"},
    {"--presence_penalty", "X", NUMBER(presence_penalty, 1e6), FOR_GENERATE,
     "subtracted from the logits of tokens that the answer has"},
    {"--frequency_penalty", "X", NUMBER(frequency_penalty, 1e6), FOR_GENERATE,
     "the same, for each occurrence"},
    {"--stop", "TEXT", OWN(parse_stop), FOR_GENERATE,
     "a text that ends an answer, and is no part of it; may be given several times"},
    {"--samples", "N", COUNT(samples, 1), FOR_GENERATE,
     "answers to each prompt; the seeds are --seed and the next numbers (default 1)"},
    {"--logprobs", "K", COUNT(logprobs, 0), FOR_GENERATE,
     "with --json: log probabilities of tokens, and the K likeliest of each place, at most 20"},
    {"--rows", "N", COUNT(rows, 1), FOR_GENERATE, "answers that are written at once (default 16)"},
    {"--batch-invariant", NULL, FLAG(batch_invariant), FOR_GENERATE | FOR_SERVE,
     "a seed's text is the same whatever else is generated beside it, bit by bit: steps always "
     "compute all rows, prompts are read one at a time"},
    {"--prompts", "FILE", TEXT(prompts), FOR_GENERATE,
     "many prompts: a line each, or .jsonl with prompt, ids or messages; writes a JSON object an "
     "answer"},
    {"--chat", NULL, FLAG(chat), FOR_GENERATE,
     "the prompt is a message, written by the model's chat template; without --prompt, lines of "
     "standard input are a conversation"},
    {"--system", "TEXT", TEXT(system), FOR_GENERATE, "with --chat: the system's message"},
    {"--score", "FILE", TEXT(score), FOR_GENERATE,
     "log-likelihood of a text; with --weights beside that of the weights as they are"},
    {"--weights", "int8|fp8", OWN(parse_weights), FOR_GENERATE | FOR_SERVE | FOR_CHECK,
     "hold weights of products in 8 bits with a scale for each output; default: as they are"},
    {"--host", "ADDRESS", TEXT(host), FOR_SERVE,
     "where to listen (default 127.0.0.1); others than loopback need --token-file"},
    {"--port", "N", COUNT(port, 0), FOR_SERVE, "the port (default 8000); 0: one that is free"},
    {"--token-file", "FILE", TEXT(token_file), FOR_SERVE,
     "clients send the token in this file: Authorization: Bearer TOKEN"},
    {"--slots", "N", COUNT(slots, 1), FOR_SERVE | FOR_CHECK,
     "texts that are generated at once (default 32); more wait"},
    {"--chunk", "N", COUNT(chunk, 1), FOR_SERVE | FOR_CHECK,
     "tokens of prompts that are read between two tokens of a text (default 2048 on a GPU, else "
     "512): more of them serve more texts in all, fewer let a text wait for less"},
    {"--queue", "N", COUNT(queue, 1), FOR_SERVE,
     "texts that may wait (default 1024); more are refused with 429"},
    {"--seconds", "N", COUNT(seconds, 1), FOR_SERVE,
     "how long a request may take, waiting included (default 600)"},
    {"--script", "SCRIPT", TEXT(script), FOR_EXPORT,
     "the model's script; default: the run's own, or the one that a Hugging Face folder needs"},
    {"--hf", NULL, FLAG(hf), FOR_EXPORT,
     "as Hugging Face's transformers has it: config.json, names and shapes of tensors, tokenizer"},
    {"--adapter", NULL, FLAG(adapter_alone), FOR_EXPORT,
     "with --hf: only the model's adapters (m.lora), as PEFT has them; else they are merged"},
    {"-o", "OUT.bin|OUT.idx", TEXT(out), FOR_TOKENIZE,
     "write ids alone, or Megatron's OUT.bin and OUT.idx; what a stopped run finished is kept"},
    {"--train", "TOKENS", COUNT(train, 1), FOR_TOKENIZE,
     "train a tokenizer of that many tokens on the files, byte-level BPE; -o tokenizer.json"},
    {"--special", NULL, FLAG(special), FOR_TOKENIZE,
     "add the tokens that the tokenizer puts around a text"},
    {"--html", "FILE", TEXT(html), FOR_SHOW,
     "write a page that needs no network: curves to zoom into, layout, memory, profile"},
    {"--verify", NULL, FLAG(verify), FOR_SHOW,
     "read every tensor of checkpoints and compare its hash"},
    {"--ascii", NULL, FLAG(ascii), FOR_SHOW,
     "curves without Braille characters; the default where the locale is not UTF-8"},
    {"--quiet", NULL, FLAG(quiet),
     FOR_SCRIPTS | FOR_GENERATE | FOR_SERVE | FOR_EXPORT | FOR_TOKENIZE,
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

static int set_option(vm_options *options, const option *o, char *value) {
    void *field = (char *)options + o->at;
    double *number = field;
    int64_t *count = field;
    char *end;
    switch (o->kind) {
    case VALUE_FLAG: *(bool *)field = true; return EXIT_OK;
    case VALUE_TEXT: *(const char **)field = value; return EXIT_OK;
    case VALUE_COUNT:
        if (parse_integer(value, count) && (double)*count >= o->limit) return EXIT_OK;
        return usage_error("%s takes an integer, %g or more, not \"%s\"", o->name, o->limit, value);
    case VALUE_NUMBER:
        *number = strtod(value, &end);
        if (end != value && *end == 0 && *number >= 0 && *number <= o->limit) return EXIT_OK;
        return usage_error("%s takes a number from 0 to %g, not \"%s\"", o->name, o->limit, value);
    case VALUE_OWN: return o->parse(options, value);
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
            return set_option(options, &option_table[i], NULL);
        }
        if (!equals && *at + 1 >= count)
            return usage_error("%s needs a value: %s %s", name, name, option_table[i].value);
        return set_option(options, &option_table[i], equals ? equals + 1 : words[++*at]);
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
                   (options->script ||
                    c->flag & (FOR_REPL | FOR_GENERATE | FOR_SERVE | FOR_EXPORT))) {
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

static bool options_of_serve(vm_options *o) {
    if (o->serve) o->task = "serve";
    if (o->serve || !(o->slots || o->weights || o->chunk || o->prompt_tokens)) return true;
    usage_error("--slots, --weights, --chunk and --prompt-tokens belong to --serve");
    return false;
}

bool options_of_check(vm_options *o) {
    const bool others = o->serve || o->types || o->explain || o->facts;
    if (!o->facts && (o->buffers || o->confined))
        usage_error("--buffers and --confined belong to --facts");
    else if (o->memory_curve && others)
        usage_error("--memory-curve is of training, without --serve, --types, --explain or "
                    "--facts");
    else
        return options_of_serve(o);
    return false;
}

int options_of_tune(vm_options *o) {
    if (o->serve && !o->gpus) o->gpus = 1;
    if (!o->gpus) {
        usage_error("tune needs the number of GPUs");
        return print_suggestion(NULL, "mlua tune models/gpt.lua --gpus 8 --device h200");
    }
    if (o->tries && !o->measure)
        return usage_error("--tries says how many --measure runs, and nothing asks for that");
    if (o->results && !o->measure)
        return usage_error("--results takes what --measure runs, and nothing asks for that");
    if (o->serve && (o->results || o->every))
        return usage_error("--serve has neither --results nor --every");
    if (o->every && o->within)
        return usage_error("--every plans all layouts; --within bounds a search");
    if (!o->serve && (o->latency > 0 || o->first > 0 || o->prompt_tokens || o->from))
        return usage_error("--latency, --first, --prompt-tokens and --from belong to --serve");
    if (o->serve && o->global_batch)
        return usage_error("--serve has no --batch: it chooses how many texts there are at once");
    return EXIT_OK;
}
