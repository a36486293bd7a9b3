/* The command line: commands and options are tables, from which help is printed too. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/knobs.h"
#include "runtime/base/suggest.h"
#include "vm/vm.h"

#ifndef MLUA_VERSION
#define MLUA_VERSION "0.1"
#endif

enum { EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 130 };
enum { FOR_RUN = 1, FOR_CHECK = 2, FOR_REPL = 4, FOR_SCRIPTS = FOR_RUN | FOR_CHECK | FOR_REPL };

/* ---- Tables ------------------------------------------------------------------------------------
 */

typedef enum {
    OPTION_DEVICE,
    OPTION_DTYPE,
    OPTION_JSON,
    OPTION_MESH,
    OPTION_RANKS,
    OPTION_SEED,
    OPTION_TYPES,
    OPTION_QUIET
} option_id;
static const struct {
    const char *name, *value;
    option_id id;
    int commands;
    const char *doc;
} option_table[] = {
    {"--device", "NAME", OPTION_DEVICE, FOR_SCRIPTS,
     "cpu, cuda or null; default: the GPU where there is one. `check` also takes h200, h100, a100, "
     "..."},
    {"--dtype", "NAME", OPTION_DTYPE, FOR_SCRIPTS,
     "in which forward functions compute: bf16, f32 or f64; default: bf16 on a GPU, f32 on a CPU"},
    {"--json", NULL, OPTION_JSON, FOR_RUN | FOR_CHECK,
     "one JSON object a step, or the report as one"},
    {"--seed", "N", OPTION_SEED, FOR_SCRIPTS,
     "of all randomness; a script's own seed setting wins (default 0)"},
    {"--mesh", "a=2,b=4", OPTION_MESH, FOR_RUN | FOR_CHECK,
     "sizes of the layout's mesh axes, 1 where not named"},
    {"-n", "RANKS", OPTION_RANKS, FOR_RUN, "ranks to start on this host (default 1)"},
    {"--types", NULL, OPTION_TYPES, FOR_CHECK, "print the type of every tensor too"},
    {"--quiet", NULL, OPTION_QUIET, FOR_SCRIPTS, "say less"},
};
enum { OPTION_COUNT = sizeof option_table / sizeof *option_table };

typedef struct command {
    const char *name, *arguments, *doc;
    int flag; /* FOR_...; 0: takes no options */
    int (*run)(vm_options *options, int count, char **words);
} command;

static int run_command(vm_options *options, int count, char **words);
static int check_main(vm_options *options, int count, char **words);
static int repl_main(vm_options *options, int count, char **words);
static int doctor_main(vm_options *options, int count, char **words);
static int editor_main(vm_options *options, int count, char **words);
static int help_main(vm_options *options, int count, char **words);
static int version_main(vm_options *options, int count, char **words);

static const command commands[] = {
    {"run", "SCRIPT [key=value ...]",
     "run a script; key=value overrides what it declares with m.config", FOR_RUN, run_command},
    {"check", "SCRIPT [key=value ...]",
     "build, type-check and plan; report work and memory; run nothing", FOR_CHECK, check_main},
    {"repl", "[SCRIPT] [key=value ...]", "type expressions and see their types", FOR_REPL,
     repl_main},
    {"doctor", "", "what was found on this machine, what is missing and what that costs", 0,
     doctor_main},
    {"editor", "[FILE]", "write the definitions that editors complete from (LuaCATS)", 0,
     editor_main},
    {"help", "[COMMAND]", "this text, or that of a command", 0, help_main},
    {"version", "", "print the version", 0, version_main},
};
enum { COMMAND_COUNT = sizeof commands / sizeof *commands };

static const command *find_command(const char *name) {
    for (int i = 0; i < COMMAND_COUNT; i++)
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    return NULL;
}

/* ---- Help --------------------------------------------------------------------------------------
 */

static void print_options(int flags) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (!(option_table[i].commands & flags)) continue;
        char left[64];
        snprintf(left, sizeof left, "%s%s%s", option_table[i].name,
                 option_table[i].value ? " " : "",
                 option_table[i].value ? option_table[i].value : "");
        printf("  %-18s %s\n", left, option_table[i].doc);
    }
    printf("  %-18s %s\n", "--help", "this text");
}

static void print_knobs(void) {
    const char *name, *syntax, *meaning;
    printf("\nenvironment\n");
    for (int i = 0; ml_knob_describe(i, &name, &syntax, &meaning); i++) {
        char left[64];
        snprintf(left, sizeof left, "%s=%s", name, syntax);
        printf("  %-22s %s\n", left, meaning);
    }
}

static void print_help(void) {
    printf("mlua trains the models that Lua scripts describe.\n\nusage: mlua COMMAND ...\n       "
           "mlua SCRIPT [key=value ...]"
           "    the same as mlua run\n\ncommands\n");
    for (int i = 0; i < COMMAND_COUNT; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s %s", commands[i].name, commands[i].arguments);
        printf("  %-32s %s\n", left, commands[i].doc);
    }
    printf("\noptions\n");
    print_options(FOR_SCRIPTS);
    print_knobs();
}

static void print_command_help(const command *c) {
    printf("usage: mlua %s %s%s\n\n%s\n", c->name, c->flag ? "[options] " : "", c->arguments,
           c->doc);
    if (c->flag) {
        printf("\noptions\n");
        print_options(c->flag);
    }
    if (c->flag) print_knobs();
}

__attribute__((format(printf, 1, 2))) static int usage_error(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("mlua: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    va_end(arguments);
    return EXIT_USAGE;
}

static int print_suggestion(const char *guess, const char *otherwise) {
    if (guess)
        fprintf(stderr, "  help: did you mean %s?\n", guess);
    else
        fprintf(stderr, "  help: %s\n", otherwise);
    return EXIT_USAGE;
}

/* ---- Options -----------------------------------------------------------------------------------
 */

static int option_error(const command *c, const char *word) {
    const char *names[OPTION_COUNT];
    int count = 0;
    for (int i = 0; i < OPTION_COUNT; i++)
        if (option_table[i].commands & c->flag) names[count++] = option_table[i].name;
    usage_error("%s has no option %s", c->name, word);
    char help[64];
    snprintf(help, sizeof help, "mlua %s --help lists them", c->name);
    return print_suggestion(ml_suggest(word, names, count), help);
}

static bool parse_integer(const char *text, int64_t *value) {
    char *end;
    errno = 0;
    *value = strtoll(text, &end, 0);
    return end != text && *end == 0 && errno == 0;
}

/* "dp=2,tp=4"; cuts the text apart. */
static int parse_mesh(vm_options *options, char *text) {
    for (char *item = strtok(text, ","); item; item = strtok(NULL, ",")) {
        char *equals = strchr(item, '=');
        int64_t size = 0;
        if (!equals || !parse_integer(equals + 1, &size) || size < 1)
            return usage_error("--mesh takes sizes such as dp=2,tp=4, not \"%s\"", item);
        if (size > 1) return usage_error("this version trains on one rank: %s is not 1", item);
        *equals = 0;
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

static int set_option(vm_options *options, option_id id, char *value) {
    int64_t number;
    switch (id) {
    case OPTION_DEVICE: options->device = value; return EXIT_OK;
    case OPTION_DTYPE:
        if (!parse_float_dtype(value, &options->dtype))
            return usage_error("--dtype takes bf16, f32 or f64, not \"%s\"", value);
        return EXIT_OK;
    case OPTION_JSON: options->json = true; return EXIT_OK;
    case OPTION_TYPES: options->types = true; return EXIT_OK;
    case OPTION_QUIET: options->quiet = true; return EXIT_OK;
    case OPTION_MESH: return parse_mesh(options, value);
    case OPTION_SEED:
        if (!parse_integer(value, &options->seed))
            return usage_error("--seed takes an integer, not \"%s\"", value);
        return EXIT_OK;
    case OPTION_RANKS:
        if (!parse_integer(value, &number) || number < 1)
            return usage_error("-n takes a number of ranks, not \"%s\"", value);
        if (number > 1) return usage_error("this version trains on one rank: -n 1");
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

static int parse_words(const command *c, vm_options *options, int count, char **words) {
    for (int i = 0; i < count; i++) {
        char *word = words[i], *equals = strchr(word, '=');
        if (word[0] == '-' && word[1]) {
            int result = parse_option(c, options, count, words, &i);
            if (result != EXIT_OK) return result;
        } else if (equals && equals > word && !strchr(word, '/') &&
                   (options->script || c->flag == FOR_REPL)) {
            if (options->override_count == VM_MAX_SETTINGS) return usage_error("too many settings");
            *equals = 0;
            options->overrides[options->override_count++] = (vm_setting){word, equals + 1};
        } else if (!options->script) {
            options->script = word;
        } else {
            usage_error("%s: what is \"%s\"?", c->name, word);
            return print_suggestion(NULL, "settings are written key=value");
        }
    }
    return EXIT_OK;
}

/* ---- Scripts -----------------------------------------------------------------------------------
 */

/* The file of the same folder that was probably meant; freed by the caller. */
static char *similar_file(const char *path) {
    const char *slash = strrchr(path, '/');
    char folder[4096];
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) + 1 : 2,
             slash ? path : "./");
    DIR *dir = opendir(folder);
    if (!dir) return NULL;
    char *names[512];
    int count = 0;
    for (struct dirent *entry; count < 512 && (entry = readdir(dir)) != NULL;) {
        if (entry->d_name[0] == '.') continue;
        size_t size = strlen(entry->d_name) + 1;
        if ((names[count] = ml_alloc(size)) != NULL) memcpy(names[count++], entry->d_name, size);
    }
    closedir(dir);
    const char *guess = ml_suggest(slash ? slash + 1 : path, (const char *const *)names, count);
    char *result = guess ? ml_alloc(strlen(guess) + strlen(folder) + 1) : NULL;
    if (result) sprintf(result, "%s%s", slash ? folder : "", guess);
    for (int i = 0; i < count; i++) ml_free(names[i]);
    return result;
}

static int missing_script(const char *path) {
    fprintf(stderr, "mlua: cannot open %s: %s\n", path, strerror(errno));
    char *guess = similar_file(path);
    if (guess) print_suggestion(guess, "");
    ml_free(guess);
    return EXIT_ERROR;
}

static int print_last_error(void) {
    const ml_error *error = ml_error_last();
    fprintf(stderr, "mlua: %s\n", error->text);
    if (error->help[0]) fprintf(stderr, "  help: %s\n", error->help);
    return EXIT_ERROR;
}

/* Runs in a protected call: what is raised here, the message handler finishes. */
static int script_main(lua_State *L) {
    const vm_options *options = vm_of(L)->options;
    if (vm_load_file(L, options->script, 0) != LUA_OK) return lua_error(L);
    lua_call(L, 0, 0);
    if (options->mode == VM_CHECK) {
        lua_pushcfunction(L, vm_report_rest);
        lua_call(L, 0, 0);
    }
    if (!options->override_count) return 0;
    lua_getfield(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    if (lua_getfield(L, -1, "mlua") == LUA_TTABLE)
        lua_pushliteral(L, "settings"), lua_rawget(L, -2);
    if (lua_isnil(L, -1))
        fprintf(stderr,
                "mlua: the script declares no settings with m.config: %s=%s changed nothing\n",
                options->overrides[0].key, options->overrides[0].text);
    return 0;
}

static int run_script(vm_options *options) {
    if (strcmp(options->script, "-") != 0 && access(options->script, R_OK) != 0)
        return missing_script(options->script);
    ml_vm *vm = NULL;
    int result = EXIT_OK;
    if (vm_new(options, &vm) != ML_OK) {
        result = print_last_error();
    } else {
        vm_catch_signals(vm);
        lua_pushcfunction(vm->L, script_main);
        if (vm_call(vm->L, 0, 0) != LUA_OK) {
            fflush(stdout);
            result = vm_is_interrupt(vm->L, -1) ? EXIT_INTERRUPTED : EXIT_ERROR;
            vm_print_error(vm->L);
        } else if (vm_stop) {
            fflush(stdout);
            fputs("mlua: interrupted\n", stderr); /* the script ended in its own way */
        }
        if (vm_stop) result = EXIT_INTERRUPTED;
        vm_catch_signals(NULL);
    }
    vm_free(vm);
    return result;
}

/* ---- Commands ----------------------------------------------------------------------------------
 */

static int parse_script(const char *name, vm_options *options, int count, char **words,
                        bool needed) {
    const command *c = find_command(name);
    int result = parse_words(c, options, count, words);
    if (result == EXIT_OK && needed && !options->script) {
        usage_error("%s needs a script", name);
        return print_suggestion(NULL, "mlua run models/gpt.lua");
    }
    return result;
}

static int run_command(vm_options *options, int count, char **words) {
    options->mode = VM_RUN;
    int result = parse_script("run", options, count, words, true);
    return result == EXIT_OK ? run_script(options) : result;
}

static int check_main(vm_options *options, int count, char **words) {
    options->mode = VM_CHECK;
    int result = parse_script("check", options, count, words, true);
    return result == EXIT_OK ? run_script(options) : result;
}

static int repl_main(vm_options *options, int count, char **words) {
    options->mode = VM_REPL;
    int result = parse_script("repl", options, count, words, false);
    if (result != EXIT_OK) return result;
    if (options->script && access(options->script, R_OK) != 0)
        return missing_script(options->script);
    ml_vm *vm = NULL;
    if (vm_new(options, &vm) == ML_OK) {
        vm_catch_signals(vm);
        result = repl_run(vm);
        vm_catch_signals(NULL);
    } else {
        result = print_last_error();
    }
    vm_free(vm);
    return result;
}

static void print_doctor(void *argument) {
    ml_text *text = argument;
    ml_device_doctor(text);
    fputs(text->text ? text->text : "", stdout);
}

static int doctor_main(vm_options *options, int count, char **words) {
    (void)options, (void)words;
    if (count) return usage_error("doctor takes no arguments");
    ml_text text = {.arena = ml_arena_new()};
    ml_status status = text.arena ? ml_protect(print_doctor, &text)
                                  : ml_fail(ML_NO_MEMORY, "not enough host memory");
    ml_arena_free(text.arena);
    return status == ML_OK ? EXIT_OK : print_last_error();
}

static int editor_main(vm_options *options, int count, char **words) {
    if (count > 1) return usage_error("editor takes one file");
    ml_vm *vm = NULL;
    int result = EXIT_ERROR;
    if (vm_new(options, &vm) == ML_OK)
        result = editor_write(vm, count ? words[0] : NULL);
    else
        print_last_error();
    vm_free(vm);
    return result;
}

static int unknown_command(const char *word) {
    const char *names[COMMAND_COUNT];
    for (int i = 0; i < COMMAND_COUNT; i++) names[i] = commands[i].name;
    usage_error("there is no command or script \"%s\"", word);
    return print_suggestion(ml_suggest(word, names, COMMAND_COUNT),
                            "mlua --help lists the commands");
}

static int help_main(vm_options *options, int count, char **words) {
    (void)options;
    const command *c = count ? find_command(words[0]) : NULL;
    if (count && !c) return unknown_command(words[0]);
    if (c)
        print_command_help(c);
    else
        print_help();
    return EXIT_OK;
}

static int version_main(vm_options *options, int count, char **words) {
    (void)options, (void)words;
    if (count) return usage_error("version takes no arguments");
    printf("mlua " MLUA_VERSION ", " LUA_RELEASE "\n");
    return EXIT_OK;
}

static bool is_help(const char *word) {
    return strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
}

/* Whether the first word is meant as a script: its name says so, or it is there. */
static bool is_script(const char *word) {
    size_t length = strlen(word);
    return strchr(word, '/') || (length > 4 && strcmp(word + length - 4, ".lua") == 0) ||
           strcmp(word, "-") == 0 || access(word, F_OK) == 0;
}

int main(int count, char **words) {
    json_set_alloc_funcs(ml_alloc, ml_free);
    static vm_options options = {.dtype = -1};
    if (count < 2) {
        fprintf(stderr,
                "usage: mlua COMMAND ..., or mlua SCRIPT [key=value ...]\n  help: mlua --help\n");
        return EXIT_USAGE;
    }
    if (is_help(words[1])) return help_main(&options, 0, NULL);
    if (strcmp(words[1], "--version") == 0) return version_main(&options, 0, NULL);
    const command *c = find_command(words[1]);
    if (!c && !is_script(words[1]) && words[1][0] != '-') return unknown_command(words[1]);
    int first = c ? 2 : 1;
    if (!c) c = find_command("run");
    for (int i = first; i < count; i++)
        if (is_help(words[i])) {
            print_command_help(c);
            return EXIT_OK;
        }
    int result = c->run(&options, count - first, words + first);
    return fflush(stdout) == 0 ? result : EXIT_ERROR;
}
