/* The command line: commands and options are tables, from which help is printed too. */
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/crash.h"
#include "runtime/base/knobs.h"
#include "runtime/base/process.h"
#include "runtime/base/suggest.h"
#include "vm/check/dry.h"
#include "vm/check/timed.h"
#include "vm/cli/doctor.h"
#include "vm/cli/folder.h"
#include "vm/cli/from.h"
#include "vm/cli/gpus.h"
#include "vm/cli/options.h"
#include "vm/cli/output.h"
#include "vm/cli/restart.h"
#include "vm/cli/tokenize.h"
#include "vm/known/known.h"
#include "vm/vm.h"

static ml_launch launch;
static bool launched;       /* as one of the ranks of a job */
static char **command_line; /* a copy: options are cut apart as they are read */

/* SIGTERM and SIGUSR1 end a run that a folder keeps so that it may be started again. */
static int exit_of_signal(const vm_options *options) {
    if (options->run_folder && (vm_stop_signal == SIGTERM || vm_stop_signal == SIGUSR1))
        return ML_EXIT_REQUEUE;
    return vm_stop_signal == SIGHUP ? EXIT_HUNG_UP : EXIT_INTERRUPTED;
}

static int run_command(vm_options *options, int count, char **words);
static int check_main(vm_options *options, int count, char **words);
static int watch_main(vm_options *options, int count, char **words);
static int tune_main(vm_options *options, int count, char **words);
static int repl_main(vm_options *options, int count, char **words);
static int generate_main(vm_options *options, int count, char **words);
static int serve_main(vm_options *options, int count, char **words);
static int export_main(vm_options *options, int count, char **words);
static int show_main(vm_options *options, int count, char **words);
static int tokenize_main(vm_options *options, int count, char **words);
static int doctor_main(vm_options *options, int count, char **words);
static int lsp_main(vm_options *options, int count, char **words);
static int editor_main(vm_options *options, int count, char **words);
static int help_main(vm_options *options, int count, char **words);
static int version_main(vm_options *options, int count, char **words);

static const command commands[] = {
    {"run", "SCRIPT [key=value ...]",
     "run a script; key=value overrides what it declares with m.config", FOR_RUN, run_command},
    {"check", "SCRIPT [key=value ...]",
     "build, type-check and plan; report work and memory; run nothing", FOR_CHECK, check_main},
    {"watch", "SCRIPT [key=value ...]",
     "check at each save; show errors, and what differs from the report before", FOR_WATCH,
     watch_main},
    {"tune", "SCRIPT --gpus N [key=value ...]",
     "search the layouts of so many GPUs for the fastest that fits, by predicted times; print it "
     "as a command",
     FOR_TUNE, tune_main},
    {"repl", "[SCRIPT] [key=value ...]",
     "type expressions, see their types and values; knows what SCRIPT sets, and trains nothing",
     FOR_REPL, repl_main},
    {"generate", "[SCRIPT] --from DIR [key=value ...]",
     "continue a prompt by a trained model; without SCRIPT, the run's own or the one that DIR "
     "needs",
     FOR_GENERATE, generate_main},
    {"serve", "[SCRIPT] --from DIR [key=value ...]",
     "answer requests over HTTP as OpenAI's API does: /v1/completions, /v1/chat/completions; "
     "SIGTERM ends it after what it has begun",
     FOR_SERVE, serve_main},
    {"export", "RUN|CHECKPOINT|DIR OUT [key=value ...]",
     "write a model's weights for other programs", FOR_EXPORT, export_main},
    {"show", "RUN|CHECKPOINT|FILE.safetensors ...",
     "a run: settings, progress, curves, checkpoints; several runs compared; a checkpoint's or a "
     "file's tensors",
     FOR_SHOW, show_main},
    {"tokenize", "TOKENIZER FILE... --json|-o OUT",
     "make token ids of .txt and .jsonl files, also .gz and .zst", FOR_TOKENIZE, tokenize_main},
    {"doctor", "", "what was found on this machine, what is missing and what that costs",
     FOR_DOCTOR, doctor_main},
    {"lsp", "", "the language server for editors: types, layouts and errors while typing", 0,
     lsp_main},
    {"editor", "[FILE]", "write the definitions that editors complete from (LuaCATS)", 0,
     editor_main},
    {"help", "[COMMAND|environment]", "this text, or that of a command, or of the variables", 0,
     help_main},
    {"version", "", "print the version", 0, version_main},
};
enum { COMMAND_COUNT = sizeof commands / sizeof *commands };

static const command *find_command(const char *name) {
    for (int i = 0; i < COMMAND_COUNT; i++)
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    return NULL;
}

/* ---- Help ------------------------------------------------------------------------------------ */

static void print_knobs(void) {
    const char *name, *syntax, *meaning;
    printf("environment\n");
    for (int i = 0; ml_knob_describe(i, &name, &syntax, &meaning); i++) {
        char left[64];
        snprintf(left, sizeof left, "%s=%s", name, syntax);
        printf("  %-22s %s\n", left, meaning);
    }
}

static void print_help(void) {
    printf("mlua trains the models that Lua scripts describe.\n\nusage: mlua COMMAND ...\n       "
           "mlua SCRIPT [key=value ...]    the same as mlua run\n\ncommands\n");
    for (int i = 0; i < COMMAND_COUNT; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s %s", commands[i].name, commands[i].arguments);
        printf("  %-32s %s\n", left, commands[i].doc);
    }
    printf("\noptions\n");
    options_print(FOR_SCRIPTS);
    printf("\n");
    print_knobs();
}

static void print_command_help(const command *c) {
    printf("usage: mlua %s%s%s%s\n\n%s\n", c->name, c->flag ? " [options]" : "",
           *c->arguments ? " " : "", c->arguments, c->doc);
    if (c->flag) {
        printf("\noptions\n");
        options_print(c->flag);
    }
}

/* ---- Scripts --------------------------------------------------------------------------------- */

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

static bool readable(const char *script) {
    return strcmp(script, "-") == 0 || access(script, R_OK) == 0;
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

/* The first setting of the command line that a script must declare (stdlib/universal.lua). */
static int first_declared(lua_State *L, const vm_options *options) {
    int first = 0, top = lua_gettop(L);
    lua_getfield(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    if (lua_getfield(L, -1, "mlua.universal") == LUA_TTABLE) {
        lua_getfield(L, -1, "kinds");
        while (first < options->override_count &&
               lua_getfield(L, -1, options->overrides[first].key) != LUA_TNIL)
            first++, lua_pop(L, 1);
    }
    lua_settop(L, top);
    return first;
}

/* Runs in a protected call: what is raised here, the message handler finishes. */
static int script_main(lua_State *L) {
    const vm_options *options = vm_of(L)->options;
    if (options->mode == VM_RUN) vm_check(L, ml_device_find(options->device));
    if (options->buffers) known_set_buffers(L, options->buffers);
    int loaded = options->script_text
                     ? vm_load(L, options->script_text, strlen(options->script_text),
                               options->script_chunk, 0)
                     : vm_load_file(L, options->script, 0);
    if (loaded != LUA_OK) return lua_error(L);
    if (options->task && options->mode == VM_RUN) {
        dry_call_until(L);
        return 0;
    }
    if (options->mode == VM_CHECK) {
        dry_call(L);
        lua_pushcfunction(L, vm_report_rest);
    }
    if (options->run_folder)
        dry_call_until(L); /* m.train ends it where a signal asks for that */
    else
        lua_call(L, 0, 0);
    vm_profile_finish(L);
    bool reported = options->comm && ml_comm_rank(options->comm) != 0; /* by the first rank */
    int first = first_declared(L, options);
    if (first == options->override_count || reported) return 0;
    lua_getfield(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    if (lua_getfield(L, -1, "mlua") == LUA_TTABLE)
        lua_pushliteral(L, "settings"), lua_rawget(L, -2);
    if (lua_isnil(L, -1))
        fprintf(stderr,
                "mlua: the script declares no settings with m.config: %s=%s changed nothing\n",
                options->overrides[first].key, options->overrides[first].text);
    return 0;
}

/* Send the other ranks the error at the top of the stack; false where one of them failed first
 * and has reported it. */
static bool first_failure(lua_State *L, ml_comm *comm) {
    if (!comm) return true;
    /* Where all ranks find the same error in the script, the first reports it: it gets
     * half a second, or more while it is at work and may come to that line yet. */
    enum { LOOKS = 50, LOOKS_AT_WORK = 300 };
    for (int i = 0; ml_comm_rank(comm) != 0 && ml_comm_check(comm) == ML_OK; i++) {
        if (i >= (ml_comm_first_works(comm) ? LOOKS_AT_WORK : LOOKS)) break;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    bool first = ml_comm_fail(comm, luaL_tolstring(L, -1, NULL));
    lua_pop(L, 1);
    return first;
}

static int run_script_once(vm_options *options) {
    ml_vm *vm = NULL;
    if (options->batch_invariant) ml_knobs_fix_rows();
    int result = EXIT_OK;
    bool serves = options->task && strcmp(options->task, "serve") == 0;
    if (vm_new(options, &vm) != ML_OK) {
        result = print_last_error();
    } else {
        vm_catch_signals(vm);
        lua_pushcfunction(vm->L, script_main);
        bool failed = vm_call(vm->L, 0, 0) != LUA_OK;
        vm_catch_signals(NULL);
        result = vm->dry.code; /* of os.exit in a check */
        if (failed) {
            fflush(stdout);
            result = vm_is_interrupt(vm->L, -1)                 ? exit_of_signal(options)
                     : vm->device_failed && options->run_folder ? RESTART_EXIT_DEVICE
                                                                : EXIT_ERROR;
            if (options->facts)
                known_write(vm->L, true);
            else if (first_failure(vm->L, options->comm))
                vm_print_error(vm->L);
        } else if (options->facts) {
            known_write(vm->L, false);
        } else if (vm_stop && !options->run_folder && !serves &&
                   (!options->comm || ml_comm_rank(options->comm) == 0)) {
            fflush(stdout);
            fputs("mlua: interrupted\n", stderr); /* the script ended in its own way */
        }
        bool ended = serves && vm_stop == 1 && !failed; /* as it should */
        if (vm_stop && !ended) result = exit_of_signal(options);
        result = vm_end_code(vm->L, result);
        if (options->comm && ml_comm_peer_failed()) result = ML_EXIT_PEER;
    }
    options->facts ? fflush(NULL), _exit(result) : vm_end(vm); /* an editor waits for the end */
    return result;
}

static int run_script(vm_options *options) {
    int result = EXIT_OK, runs = ml_knobs()->runs > 1 ? ml_knobs()->runs : 1;
    if (!output_divert(options)) return EXIT_ERROR;
    for (options->run = 1; options->run <= runs && result == EXIT_OK; options->run++)
        result = run_script_once(options);
    return output_restore(options) || result != EXIT_OK ? result : EXIT_ERROR;
}

/* ---- Commands -------------------------------------------------------------------------------- */

static int parse_script(const char *name, vm_options *options, int count, char **words,
                        bool needed) {
    const command *c = find_command(name);
    int result = options_parse(c, options, count, words);
    if (result == EXIT_OK && needed && !options->script) {
        usage_error("%s needs a script", name);
        return print_suggestion(NULL, "mlua run models/gpt.lua");
    }
    if (result == EXIT_OK && !from_adapter(options)) return print_last_error();
    return result;
}

/* This process as one of several ranks. */
static int run_rank(vm_options *options) {
    if (options->restarts)
        return usage_error("--restarts is of ranks that mlua run -n starts, and %s started these",
                           launch.source);
    if (options->ranks && options->ranks != launch.world)
        return usage_error("-n %lld, and %s started %d ranks", (long long)options->ranks,
                           launch.source, launch.world);
    if (ml_comm_open(&launch, &options->comm) != ML_OK) return print_last_error();
    if (launch.rank == 0 && folder_check(options) != ML_OK) {
        if (ml_comm_fail(options->comm, ml_error_last()->text)) print_last_error();
        ml_comm_close(options->comm);
        return EXIT_ERROR;
    }
    /* What all ranks would print, the first prints. */
    if (launch.rank != 0 && !freopen("/dev/null", "w", stdout)) return EXIT_ERROR;
    int result = run_script(options);
    ml_comm_close(options->comm);
    return result;
}

/* -n and --mesh as far as they can be compared without the script's layout. */
static int ranks_error(const vm_options *options) {
    enum { MOST_RANKS = 1 << 30 };
    int64_t product = 1;
    for (int i = 0; i < options->mesh_count; i++) {
        int64_t size = strtoll(options->mesh[i].text, NULL, 10);
        if (size > MOST_RANKS / product)
            return usage_error("the mesh has more than %d ranks", MOST_RANKS);
        product *= size;
    }
    if (!options->mesh_count || options->ranks % product == 0) return EXIT_OK;
    usage_error("-n %lld, and the mesh has %lld ranks", (long long)options->ranks,
                (long long)product);
    fprintf(stderr, "  help: -n %lld\n", (long long)product);
    return EXIT_USAGE;
}

static int run_ranks(vm_options *options) {
    if (launched) return run_rank(options);
    if (folder_check(options) != ML_OK) return print_last_error();
    if (options->ranks <= 1 && !options->restarts) return run_script(options);
    int result = ranks_error(options);
    if (result != EXIT_OK) return result;
    if (options->restarts) return restart_ranks(options, &launch.options, command_line);
    return ml_launch_local((int)options->ranks, &launch.options, command_line);
}

/* Before any rank trains for nothing. */
static int profile_error(const vm_options *options) {
    if (options->profile_first && !options->profile) {
        usage_error("--profile-steps says which steps, and nothing asks for a profile");
        return print_suggestion(NULL, "--profile=trace.json");
    }
    size_t length = options->run_folder ? strlen(options->run_folder) : 0;
    bool inside = length && options->profile && options->profile[length] == '/' &&
                  strncmp(options->profile, options->run_folder, length) == 0;
    if (!options->profile || inside || vm_profile_writable(options->profile)) return EXIT_OK;
    fprintf(stderr, "mlua: cannot write the profile to %s: %s\n", options->profile,
            strerror(errno));
    return EXIT_ERROR;
}

/* Beside the run, which is a process of its own: its words are those of the command line. */
static int watch_run(vm_options *options) {
    if (!options->run_folder) {
        usage_error("--watch needs a folder, which has the states from one script to the next");
        return print_suggestion(NULL, "mlua run gpt.lua --out runs/a --watch");
    }
    if (options->restarts || options->profile)
        return usage_error("--watch takes neither --restarts nor --profile");
    int count = 0;
    while (command_line[count]) count++;
    options->paths = ml_alloc(sizeof(char *) * (size_t)count);
    if (!options->paths) return print_last_error();
    for (int i = 1; i < count; i++) {
        bool command = i == 1 && strcmp(command_line[i], "run") == 0; /* it may be left out */
        if (!command && strcmp(command_line[i], "--watch") != 0)
            options->paths[options->path_count++] = command_line[i];
    }
    ml_vm *vm = NULL;
    if (vm_new(options, &vm) != ML_OK) return vm_free(vm), print_last_error();
    vm_catch_signals(vm);
    lua_getglobal(vm->L, "require");
    lua_pushstring(vm->L, "mlua.run_watch");
    bool failed = vm_call(vm->L, 1, 1) != LUA_OK;
    if (!failed) lua_pushstring(vm->L, options->script);
    failed = failed || vm_call(vm->L, 1, 1) != LUA_OK;
    vm_catch_signals(NULL);
    int result = failed ? EXIT_ERROR : (int)lua_tointeger(vm->L, -1);
    if (failed) vm_print_error(vm->L);
    vm_free(vm);
    ml_free(options->paths);
    return result;
}

static int run_command(vm_options *options, int count, char **words) {
    options->mode = VM_RUN;
    int result = parse_script("run", options, count, words, true);
    if (result == EXIT_OK && !readable(options->script)) return missing_script(options->script);
    if (result == EXIT_OK && options->watch) return watch_run(options);
    if (result == EXIT_OK) result = profile_error(options);
    return result == EXIT_OK ? run_ranks(options) : result;
}

static int repl_main(vm_options *options, int count, char **words) {
    options->mode = VM_REPL;
    int result = parse_script("repl", options, count, words, false);
    if (result != EXIT_OK) return result;
    if (options->script && access(options->script, R_OK) != 0)
        return missing_script(options->script);
    ml_vm *vm = NULL;
    bool planned = options->device && gpu_by_key(options->device);
    if ((planned || ml_device_find(options->device) == ML_OK) && vm_new(options, &vm) == ML_OK) {
        vm_catch_signals(vm);
        result = repl_run(vm);
        vm_catch_signals(NULL);
    } else {
        result = print_last_error();
    }
    vm_free(vm);
    return result;
}

/* A command that is a function of stdlib/. */
static int library_main(vm_options *options, const char *module, const char *argument) {
    ml_vm *vm = NULL;
    if (vm_new(options, &vm) != ML_OK) return vm_free(vm), print_last_error();
    lua_getglobal(vm->L, "require");
    lua_pushstring(vm->L, module);
    bool failed = vm_call(vm->L, 1, 1) != LUA_OK;
    if (!failed) lua_pushstring(vm->L, argument);
    failed = failed || vm_call(vm->L, 1, 0) != LUA_OK;
    if (failed) fflush(stdout), vm_print_error(vm->L);
    vm_free(vm);
    return failed ? EXIT_ERROR : EXIT_OK;
}

static int check_main(vm_options *options, int count, char **words) {
    options->mode = VM_CHECK;
    int result = parse_script("check", options, count, words, true);
    if (result != EXIT_OK) return result;
    if (!options_of_check(options)) return EXIT_USAGE;
    options->json |= options->facts;
    if (!options->buffers && !readable(options->script)) return missing_script(options->script);
    timed_plan(options);
    if (options->confined) options->limits = known_confine(options->confined);
    if (options->memory_curve) return library_main(options, "mlua.memory_curve", NULL);
    return run_script(options);
}

static int watch_main(vm_options *options, int count, char **words) {
    options->mode = VM_CHECK;
    int result = parse_script("watch", options, count, words, true);
    if (result != EXIT_OK) return result;
    if (!readable(options->script)) return missing_script(options->script);
    options->paths = command_line + 2; /* mlua watch WORD... */
    options->path_count = count;
    return library_main(options, "mlua.watch", options->script);
}

/* The script of a model that is named by its weights alone. */
static int find_script(vm_options *options) {
    if (!options->from && !(options->measure && options->script)) {
        usage_error("%s needs --from DIR", options->task);
        return print_suggestion(NULL, "a run's folder, a checkpoint or a Hugging Face folder");
    }
    if (options->script && !readable(options->script)) return missing_script(options->script);
    return options->script || from_script(options) ? EXIT_OK : print_last_error();
}

/* At most one of --prompt, --ids and --prompts; --chat writes texts. */
static int prompt_error(const vm_options *options) {
    if (options->prompt && options->ids) return usage_error("--prompt and --ids are both a prompt");
    if (options->prompts && (options->prompt || options->ids))
        return usage_error("--prompts and %s are both prompts",
                           options->prompt ? "--prompt" : "--ids");
    if (options->chat && options->ids)
        return usage_error("--chat takes a text, and --ids are none");
    if (options->system && !options->chat)
        return usage_error("--system is a message of a conversation: it needs --chat");
    return EXIT_OK;
}

static int generate_main(vm_options *options, int count, char **words) {
    options->mode = VM_RUN;
    options->task = "generate";
    int result = parse_script("generate", options, count, words, false);
    if (result == EXIT_OK) result = prompt_error(options);
    if (result == EXIT_OK) result = find_script(options);
    return result == EXIT_OK ? run_ranks(options) : result;
}

static int serve_main(vm_options *options, int count, char **words) {
    enum { LAST_PORT = 65535 };
    options->mode = VM_RUN;
    options->task = "serve";
    int result = parse_script("serve", options, count, words, false);
    if (result == EXIT_OK && options->port > LAST_PORT)
        return usage_error("--port takes 0 to %d, not %lld", LAST_PORT, (long long)options->port);
    if (result == EXIT_OK) result = find_script(options);
    return result == EXIT_OK ? run_ranks(options) : result;
}

/* export FROM OUT: the two words are no script. */
static int export_main(vm_options *options, int count, char **words) {
    options->mode = VM_RUN;
    options->task = "export";
    int result = parse_script("export", options, count, words, false);
    if (!options->device) options->device = "cpu"; /* it writes from memory of the host */
    if (result == EXIT_OK && (!options->from || !options->out)) {
        usage_error("export needs what to export, and a folder to write");
        return print_suggestion(NULL, "mlua export runs/a out --hf");
    }
    if (result == EXIT_OK && options->adapter_alone && !options->hf) {
        usage_error("--adapter writes a folder of PEFT's, for models of Hugging Face");
        return print_suggestion(NULL, "mlua export runs/a out --hf --adapter");
    }
    if (result == EXIT_OK) result = find_script(options);
    return result == EXIT_OK ? run_ranks(options) : result;
}

static int show_main(vm_options *options, int count, char **words) {
    int result = options_parse(find_command("show"), options, count, words);
    if (result != EXIT_OK) return result;
    if (!options->path_count) {
        usage_error("show needs the folder of a run or a checkpoint, or a safetensors file");
        return print_suggestion(NULL, "mlua show runs/a");
    }
    return library_main(options, "mlua.show", NULL);
}

static int tokenize_main(vm_options *options, int count, char **words) {
    int result = options_parse(find_command("tokenize"), options, count, words);
    if (result != EXIT_OK) return result;
    const tokenize_options given = {options->json, options->special, options->quiet, options->out,
                                    options->train};
    if (options->train && (!options->out || !options->path_count)) {
        usage_error("tokenize --train needs text files, and -o with the file to write");
        return print_suggestion(NULL, "mlua tokenize --train 32768 web.jsonl.gz -o tokenizer.json");
    }
    if (!options->train && (options->path_count < 2 || options->json == (options->out != NULL))) {
        usage_error("tokenize needs a tokenizer, text files, and either --json or -o");
        return print_suggestion(NULL, "mlua tokenize tokenizer.json web.jsonl.gz -o web.bin");
    }
    bool done = options->train ? tokenize_train(&given, options->path_count, options->paths)
                               : tokenize_files(&given, options->path_count, options->paths);
    return done ? EXIT_OK : print_last_error();
}

static int doctor_main(vm_options *options, int count, char **words) {
    int result = options_parse(find_command("doctor"), options, count, words);
    if (result != EXIT_OK) return result;
    if (options->script) return usage_error("doctor takes no arguments");
    if (options->ranks && !options->bench) {
        usage_error("doctor -n measures collectives, which only --bench asks for");
        return print_suggestion(NULL, "mlua doctor --bench -n 8");
    }
    if (launched) return doctor_rank(&launch) ? EXIT_OK : EXIT_ERROR;
    if (!doctor_print()) return print_last_error();
    if (!options->bench) return EXIT_OK;
    if (!doctor_bench()) result = EXIT_ERROR;
    int ranks = options->ranks ? (int)options->ranks : doctor_gpus();
    int ranks_result = ranks > 1 ? ml_launch_local(ranks, &launch.options, command_line) : EXIT_OK;
    return result != EXIT_OK ? result : ranks_result;
}

static int lsp_main(vm_options *options, int count, char **words) {
    (void)words;
    if (count) return usage_error("lsp takes no arguments: an editor starts it");
    return library_main(options, "mlua.lsp", NULL);
}

static int tune_main(vm_options *options, int count, char **words) {
    options->mode = VM_CHECK;
    int result = parse_script("tune", options, count, words, true);
    if (result != EXIT_OK) return result;
    result = options_of_tune(options);
    if (result != EXIT_OK) return result;
    const char *search = options->serve ? "mlua.tune_serve" : "mlua.tune";
    return readable(options->script) ? library_main(options, search, NULL)
                                     : missing_script(options->script);
}

static int editor_main(vm_options *options, int count, char **words) {
    if (count > 1) return usage_error("editor takes one file");
    return library_main(options, "mlua.editor", count ? words[0] : NULL);
}

static int unknown_command(const char *word, const char *what) {
    const char *names[COMMAND_COUNT];
    for (int i = 0; i < COMMAND_COUNT; i++) names[i] = commands[i].name;
    usage_error("there is no %s \"%s\"", what, word);
    return print_suggestion(ml_suggest(word, names, COMMAND_COUNT),
                            "mlua --help lists the commands");
}

static int help_main(vm_options *options, int count, char **words) {
    (void)options;
    const command *c = count ? find_command(words[0]) : NULL;
    if (count > 1) return usage_error("help takes one command");
    if (c)
        print_command_help(c);
    else if (count && strcmp(words[0], "environment") == 0)
        print_knobs();
    else if (count)
        return unknown_command(words[0], "command");
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

/* Whether the first word is meant as a script: by its name, or because the file exists. */
static bool is_script(const char *word) {
    size_t length = strlen(word);
    return strchr(word, '/') || (length > 4 && strcmp(word + length - 4, ".lua") == 0) ||
           strcmp(word, "-") == 0 || access(word, F_OK) == 0;
}

static void free_words(void) {
    for (int i = 0; command_line && command_line[i]; i++) ml_free(command_line[i]);
    ml_free(command_line);
}

static bool copy_words(int count, char **words) {
    command_line = ml_alloc(sizeof(char *) * (size_t)(count + 1));
    for (int i = 0; command_line && i < count; i++) {
        size_t size = strlen(words[i]) + 1;
        command_line[i] = ml_alloc(size);
        if (!command_line[i]) break;
        memcpy(command_line[i], words[i], size);
        if (i + 1 == count) return true;
    }
    ml_fail(ML_NO_MEMORY, "not enough host memory to start");
    return false;
}

static int run_words(int count, char **words) {
    launched = ml_launch_detect(&launch); /* before knobs are read: ranks' variables are none */
    ml_process_begin();
    ml_crash_report();
    json_set_alloc_funcs(ml_alloc, ml_free);
    static vm_options options = {
        .dtype = -1, .tokens = 32, .port = 8000, .queue = 1024, .seconds = 600};
    if (count < 2) {
        fprintf(stderr,
                "usage: mlua COMMAND ..., or mlua SCRIPT [key=value ...]\n  help: mlua --help\n");
        return EXIT_USAGE;
    }
    if (is_help(words[1])) return help_main(&options, 0, NULL);
    if (strcmp(words[1], "--version") == 0) return version_main(&options, 0, NULL);
    const command *c = find_command(words[1]);
    if (!c && !is_script(words[1]) && words[1][0] != '-')
        return unknown_command(words[1], "command or script");
    int first = c ? 2 : 1;
    if (!c) c = find_command("run");
    for (int i = first; i < count; i++)
        if (is_help(words[i])) {
            print_command_help(c);
            return EXIT_OK;
        }
    if (!copy_words(count, words)) return print_last_error();
    char *command = folder_command(count, words);
    options.command = command;
    int result = c->run(&options, count - first, words + first);
    ml_free(command);
    free_words();
    return result;
}

int main(int count, char **words) {
    int result = run_words(count, words);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        if (result == EXIT_OK) fprintf(stderr, "mlua: cannot write to standard output\n");
        if (result == EXIT_OK) result = EXIT_ERROR;
    }
    if (ml_process_abandoned()) vm_exit(result);
    return result;
}
