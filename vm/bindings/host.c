#include "vm/vm.h"

#include <errno.h>
#include <limits.h>
#include <malloc.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/command.h"
#include "runtime/base/knobs.h"
#include "vm/bindings/precision.h"
#include "vm/check/dry.h"
#include "vm/embed.h"
#include "vm/language/traps.h"

static const char *const sources_key = "mlua.sources"; /* registry: file name -> text */

const ml_embedded *embed_find(const char *name) {
    for (const ml_embedded *file = ml_embedded_files; file->name; file++)
        if (strcmp(file->name, name) == 0) return file;
    return NULL;
}

ml_vm *vm_of(lua_State *L) {
    return *(ml_vm **)lua_getextraspace(L);
}

/* ---- Interned strings ------------------------------------------------------------------------ */

typedef struct {
    ml_vm *vm;
    const char *text, *result;
} intern_call;

static void intern(void *argument) {
    intern_call *call = argument;
    ml_vm *vm = call->vm;
    size_t length = strlen(call->text);
    uint64_t hash = ml_hash(call->text, length, 0);
    uint32_t cursor = 0, found;
    while ((found = ml_index_next(&vm->strings, hash, &cursor)) != ML_INDEX_NONE)
        if (strcmp(vm->texts.at[found], call->text) == 0) {
            call->result = vm->texts.at[found];
            return;
        }
    const char *copy = ml_arena_copy(vm->arena, call->text, length);
    *ML_PUSH(vm->arena, &vm->texts) = copy;
    ml_index_add(&vm->strings, hash, vm->texts.count - 1);
    call->result = copy;
}

const char *vm_intern(lua_State *L, const char *text) {
    intern_call call = {.vm = vm_of(L), .text = text};
    if (ml_protect(intern, &call) != ML_OK) luaL_error(L, "not enough memory");
    return call.result;
}

/* ---- Chunks ---------------------------------------------------------------------------------- */

void vm_push_sources(lua_State *L) {
    luaL_getsubtable(L, LUA_REGISTRYINDEX, sources_key);
}

void vm_push_source(lua_State *L, const char *file) {
    if (file[0] == '@' || file[0] == '=') file++;
    if (strncmp(file, VM_STDLIB + 1, sizeof VM_STDLIB - 2) == 0) {
        const ml_embedded *embedded = embed_find(file + sizeof VM_STDLIB - 2);
        if (embedded)
            lua_pushlstring(L, embedded->data, embedded->size);
        else
            lua_pushnil(L);
        return;
    }
    vm_push_sources(L);
    lua_getfield(L, -1, file);
    lua_remove(L, -2);
}

void vm_push_line(lua_State *L, const char *file, int line) {
    vm_push_source(L, file);
    const char *text = lua_tostring(L, -1);
    for (int i = 1; text && i < line; i++) {
        text = strchr(text, '\n');
        if (text) text++;
    }
    if (text) {
        size_t length = strcspn(text, "\r\n");
        if (length || text[0])
            lua_pushlstring(L, text, length);
        else
            lua_pushnil(L);
    } else {
        lua_pushnil(L);
    }
    lua_remove(L, -2);
}

typedef struct {
    ml_arena *arena;
    const char *text;
    size_t size;
    traps_kind kind;
    char *result;
    size_t result_size;
} traps_call;

static void close_traps(void *argument) {
    traps_call *call = argument;
    call->result =
        traps_rewrite(call->text, call->size, call->kind, call->arena, &call->result_size);
}

/* Replace the function on top by its rewritten form; false where there is nothing to rewrite. */
static bool load_rewritten(lua_State *L, const char *text, size_t size, const char *chunk, int env,
                           traps_kind kind) {
    traps_call call = {.arena = ml_arena_new(), .text = text, .size = size, .kind = kind};
    if (!call.arena) return false;
    int status = LUA_ERRSYNTAX;
    if (ml_protect(close_traps, &call) == ML_OK && call.result)
        status = luaL_loadbufferx(L, call.result, call.result_size, chunk, "t");
    else
        lua_pushnil(L);
    ml_arena_free(call.arena);
    if (status == LUA_OK) {
        if (env) {
            lua_pushvalue(L, env);
            lua_setupvalue(L, -2, 1);
        }
        lua_getfield(L, LUA_REGISTRYINDEX, "mlua.traps");
        status = lua_pcall(L, 1, 1, 0);
    }
    if (status == LUA_OK)
        lua_replace(L, -2);
    else
        lua_pop(L, 1);
    return status == LUA_OK;
}

void vm_save_source(lua_State *L, const char *chunk, const char *text, size_t size) {
    vm_push_sources(L);
    lua_pushlstring(L, text, size);
    lua_setfield(L, -2, chunk[0] == '@' || chunk[0] == '=' ? chunk + 1 : chunk);
    lua_pop(L, 1);
}

/* Messages of the parser shorten long file names to "...end": put the whole one there. */
static void restore_file_name(lua_State *L, const char *chunk) {
    const char *message = lua_tostring(L, -1);
    if (chunk[0] != '@' || !message || strncmp(message, "...", 3) != 0) return;
    size_t length = strlen(chunk), shown = 0;
    for (size_t at = 1; at < length && !shown; at++) {
        size_t rest = length - at;
        if (strncmp(message + 3, chunk + at, rest) == 0 && message[3 + rest] == ':') shown = rest;
    }
    if (!shown) return;
    lua_pushfstring(L, "%s%s", chunk + 1, message + 3 + shown);
    lua_replace(L, -2);
}

static int load_text(lua_State *L, const char *text, size_t size, const char *chunk, int env,
                     traps_kind kind) {
    if (env) env = lua_absindex(L, env);
    int status = luaL_loadbufferx(L, text, size, chunk, "t");
    bool script = strncmp(chunk, VM_STDLIB, sizeof VM_STDLIB - 1) != 0;
    if (script) vm_save_source(L, chunk, text, size);
    if (status != LUA_OK) {
        restore_file_name(L, chunk);
        return status;
    }
    if (env) {
        lua_pushvalue(L, env);
        if (!lua_setupvalue(L, -2, 1)) lua_pop(L, 1);
    }
    bool observes = script && kind == TRAPS_SCRIPT && vm_of(L)->options->facts;
    /* Where values are noted the text is deeper nested, perhaps deeper than Lua accepts. */
    bool done = observes && load_rewritten(L, text, size, chunk, env, TRAPS_OBSERVED);
    if (script && !done) load_rewritten(L, text, size, chunk, env, kind);
    return LUA_OK;
}

int vm_load(lua_State *L, const char *text, size_t size, const char *chunk, int env) {
    return load_text(L, text, size, chunk, env, TRAPS_SCRIPT);
}

int vm_load_input(lua_State *L, const char *text, size_t size, const char *chunk) {
    return load_text(L, text, size, chunk, 0, TRAPS_INPUT);
}

/* The text of a file. */
static int load_file_text(lua_State *L, const char *text, size_t size, const char *path, int env) {
    static const char mark[] = "\xEF\xBB\xBF"; /* of UTF-8, which some editors begin files with */
    size_t skip = size >= 3 && memcmp(text, mark, 3) == 0 ? 3 : 0;
    if (skip < size && text[skip] == '#') /* a first line "#!..." is for the shell */
        while (skip < size && text[skip] != '\n') skip++;
    lua_pushfstring(L, "@%s", strcmp(path, "-") == 0 ? "stdin" : path);
    int status = vm_load(L, text + skip, size - skip, lua_tostring(L, -1), env);
    lua_remove(L, -2);
    return status;
}

/* Push what an editor has of the file and has not saved; false where there is nothing. */
static bool push_buffer(lua_State *L, const char *path) {
    if (!vm_of(L)->options->buffers) return false;
    char *folder = realpath(".", NULL), *whole = realpath(path, NULL);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, "mlua.buffers");
    int buffers = lua_gettop(L);
    if (strncmp(path, "./", 2) == 0) path += 2;
    lua_pushfstring(L, path[0] == '/' ? "%s%s" : "%s/%s", path[0] == '/' || !folder ? "" : folder,
                    path);
    bool found = lua_gettable(L, buffers) == LUA_TSTRING; /* it may not exist as a file */
    if (!found && whole) found = lua_getfield(L, buffers, whole) == LUA_TSTRING;
    free(folder);
    free(whole);
    if (found) lua_replace(L, buffers);
    lua_settop(L, found ? buffers : buffers - 1);
    return found;
}

int vm_load_file(lua_State *L, const char *path, int env) {
    if (env) env = lua_absindex(L, env);
    if (push_buffer(L, path)) {
        size_t length;
        const char *text = lua_tolstring(L, -1, &length);
        int status = load_file_text(L, text, length, path, env);
        lua_remove(L, -2);
        return status;
    }
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    if (!file) {
        lua_pushfstring(L, "cannot open %s: %s", path, strerror(errno));
        return LUA_ERRFILE;
    }
    /* A malloc'ed buffer would leak if Lua raised between; a userdata does not. */
    size_t capacity = 1 << 16, size = 0, got;
    char *text = lua_newuserdatauv(L, capacity, 0);
    while ((got = fread(text + size, 1, capacity - size, file)) > 0) {
        size += got;
        if (size < capacity) continue;
        char *wider = lua_newuserdatauv(L, capacity * 2, 0);
        memcpy(wider, text, size);
        lua_remove(L, -2);
        text = wider;
        capacity *= 2;
    }
    int failed = ferror(file) ? errno : 0;
    if (file != stdin) fclose(file);
    if (failed) {
        lua_pushfstring(L, "cannot read %s: %s", path, strerror(failed));
        lua_remove(L, -2);
        return LUA_ERRFILE;
    }
    int status = load_file_text(L, text, size, path, env);
    lua_remove(L, -2);
    return status;
}

/* ---- load, loadfile, dofile, require with traps closed --------------------------------------- */

static int load_result(lua_State *L, int status) {
    if (status == LUA_OK) return 1;
    lua_pushnil(L);
    lua_insert(L, -2);
    return 2;
}

/* Code that was compiled before can crash the program: only text is loaded. */
static bool refuses_text(lua_State *L, int mode) {
    const char *text = luaL_optstring(L, mode, "t");
    if (strchr(text, 't')) return false;
    lua_pushfstring(L, "attempt to load a text chunk (mode is '%s')", text);
    return true;
}

static int lua_load_text(lua_State *L) {
    int env = lua_isnone(L, 4) ? 0 : 4;
    if (refuses_text(L, 3)) return load_result(L, LUA_ERRSYNTAX);
    if (lua_isfunction(L, 1)) {
        luaL_Buffer buffer;
        luaL_buffinit(L, &buffer);
        for (;;) {
            lua_pushvalue(L, 1);
            lua_call(L, 0, 1);
            size_t length = 0;
            if (lua_isnil(L, -1)) break;
            if (!lua_tolstring(L, -1, &length))
                return luaL_error(L, "reader function must return a string");
            if (!length) break;
            luaL_addvalue(&buffer);
        }
        lua_pop(L, 1);
        luaL_pushresult(&buffer);
        lua_replace(L, 1);
    }
    size_t size;
    const char *text = luaL_checklstring(L, 1, &size);
    const char *chunk = luaL_optstring(L, 2, text);
    return load_result(L, vm_load(L, text, size, chunk, env));
}

static int lua_load_file(lua_State *L) {
    int env = lua_isnone(L, 3) ? 0 : 3;
    if (refuses_text(L, 2)) return load_result(L, LUA_ERRSYNTAX);
    return load_result(L, vm_load_file(L, luaL_optstring(L, 1, "-"), env));
}

static int lua_do_file(lua_State *L) {
    const char *path = luaL_optstring(L, 1, "-");
    lua_settop(L, 1);
    if (vm_load_file(L, path, 0) != LUA_OK) return lua_error(L);
    lua_call(L, 0, LUA_MULTRET);
    return lua_gettop(L) - 1;
}

static int search_embedded(lua_State *L) {
    const char *module = luaL_checkstring(L, 1);
    if (strcmp(module, "mlua") != 0 && strncmp(module, "mlua.", 5) != 0) {
        lua_pushnil(L);
        return 1;
    }
    lua_pushfstring(L, "%s.lua", module[4] ? module + 5 : "init");
    const ml_embedded *file = embed_find(lua_tostring(L, -1));
    if (!file) {
        lua_pushfstring(L, "mlua has no file %s", lua_tostring(L, -1));
        return 1;
    }
    const char *chunk = lua_pushfstring(L, VM_STDLIB "%s", file->name);
    vm_push_library_globals(L);
    if (vm_load(L, file->data, file->size, chunk, -1) != LUA_OK) return lua_error(L);
    lua_pushstring(L, file->name);
    return 2;
}

/* Push the path of a module that is in an editor's buffer: such a file may not exist yet. */
static bool push_buffer_path(lua_State *L, const char *module) {
    if (!vm_of(L)->options->buffers) return false;
    const char *name = luaL_gsub(L, module, ".", "/");
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "path");
    for (const char *at = lua_tostring(L, -1); at && *at; at += *at == ';') {
        size_t length = strcspn(at, ";");
        lua_pushlstring(L, at, length);
        const char *path = luaL_gsub(L, lua_tostring(L, -1), "?", name);
        if (push_buffer(L, path)) return lua_pop(L, 1), true;
        lua_pop(L, 2);
        at += length;
    }
    return false;
}

static int search_file(lua_State *L) {
    lua_settop(L, 1);
    if (push_buffer_path(L, luaL_checkstring(L, 1))) {
        const char *found = lua_tostring(L, -1);
        if (vm_load_file(L, found, 0) != LUA_OK) return lua_error(L);
        lua_pushstring(L, found);
        return 2;
    }
    lua_settop(L, 1);
    lua_getglobal(L, "package");
    lua_getfield(L, 2, "searchpath");
    lua_pushvalue(L, 1);
    lua_getfield(L, 2, "path");
    lua_call(L, 2, 2);
    if (lua_isnil(L, -2)) return 1;
    lua_pop(L, 1);
    const char *path = lua_tostring(L, -1);
    if (vm_load_file(L, path, 0) != LUA_OK) return lua_error(L);
    lua_pushstring(L, path);
    return 2;
}

static void set_searchers(lua_State *L, const char *script) {
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "searchers");
    lua_pushcfunction(L, search_embedded);
    lua_rawseti(L, -2, 2);
    lua_pushcfunction(L, search_file);
    lua_rawseti(L, -2, 3);
    lua_pushnil(L); /* compiled C modules would link a second Lua */
    lua_rawseti(L, -2, 4);
    lua_pop(L, 1);
    lua_pushliteral(L, "./?.lua;./?/init.lua");
    const char *slash = script ? strrchr(script, '/') : NULL;
    if (slash) {
        lua_pushlstring(L, script, (size_t)(slash - script));
        const char *folder = lua_tostring(L, -1);
        lua_pushfstring(L, "%s/?.lua;%s/?/init.lua;%s", folder, folder, lua_tostring(L, -2));
        if (strcmp(slash, "/script.lua") ==
            0) { /* of a run, which keeps what it loaded beside it */
            lua_pushfstring(L, "%s/files/?.lua;%s/files/?/init.lua;%s", folder, folder,
                            lua_tostring(L, -1));
            lua_replace(L, -2);
        }
        lua_replace(L, -3);
        lua_pop(L, 1);
    }
    lua_setfield(L, -2, "path");
    lua_pushliteral(L, "");
    lua_setfield(L, -2, "cpath");
    lua_pushnil(L);
    lua_setfield(L, -2, "loadlib");
    lua_pop(L, 1);
}

/* ---- States ---------------------------------------------------------------------------------- */

static int open_state(lua_State *L) {
    luaL_openlibs(L);
    order_register(L);
    vm_libraries_register(L);
    ml_vm *vm = vm_of(L);
    set_searchers(L, vm->options->script);
    static const luaL_Reg loaders[] = {{"load", lua_load_text},
                                       {"loadfile", lua_load_file},
                                       {"dofile", lua_do_file},
                                       {NULL, NULL}};
    lua_pushglobaltable(L);
    luaL_setfuncs(L, loaders, 0);
    lua_pop(L, 1);

    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_newtable(L);
    vm_error_register(L);
    vm_hints_register(L);
    vm_axis_register(L);
    vm_tensor_register(L);
    vm_op_methods_register(L);
    vm_documentation_register(L);
    vm_unknown_register(L);
    vm_ops_register(L);
    vm_state_register(L);
    vm_host_register(L);
    vm_program_register(L);
    vm_programs_register(L);
    vm_attention_register(L);
    vm_conv_register(L);
    vm_scan_register(L);
    vm_increment_register(L);
    vm_weights_register(L);
    vm_corpus_register(L);
    vm_placement_register(L);
    vm_samples_register(L);
    vm_ranges_register(L);
    vm_tensorfile_register(L);
    vm_json_register(L);
    vm_tokenizer_register(L);
    vm_serve_register(L);
    vm_views_register(L);
    vm_show_register(L);
    vm_run_register(L);
    vm_checkpoint_register(L);
    vm_service_register(L);
    vm_check_register(L);
    vm_processes_register(L);
    dry_register(L);
    precision_register(L);
    vm_layout_register(L);
    vm_lineage_register(L);
    vm_profile_register(L);
    traps_register(L);
    vm_known_register(L);
    vm_lsp_register(L);
    lua_setfield(L, -2, "mlua.core");
    lua_pop(L, 1);
    vm_globals_register(L);
    return 0;
}

static void make_tables(void *argument) {
    ml_vm *vm = argument;
    vm->strings = (ml_index){.arena = vm->arena};
    vm->graph = ml_session_graph(vm->session);
}

/* A check holds no arrays of a device, and nearly all that it makes lives to its end: garbage is
 * collected at ten times what lives, and memory that is free waits for its next use. */
static void prepare_check(lua_State *L) {
    enum { PAUSE = 1000, LARGEST = 32 << 20, MORE = 256 << 10 }; /* percent; bytes */
    lua_gc(L, LUA_GCINC, PAUSE, 0, 0);
    mallopt(M_MXFAST, 0);
    mallopt(M_MMAP_THRESHOLD, LARGEST);
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    mallopt(M_TOP_PAD, MORE);
    ml_memory_grow_huge();
}

ml_status vm_new(const vm_options *options, ml_vm **result) {
    ml_vm *vm = *result = ml_alloc(sizeof *vm);
    if (!vm) return ml_fail(ML_NO_MEMORY, "not enough host memory to start");
    vm->options = options;
    vm->compute_dtype = options->dtype;
    vm->fp8 = options->fp8;
    vm->module = "";
    vm->arena = ml_arena_new();
    if (!vm->arena) return ml_fail(ML_NO_MEMORY, "not enough host memory to start");
    ml_status status = ml_session_new(&vm->session);
    if (status == ML_OK) status = ml_protect(make_tables, vm);
    if (status != ML_OK) return status;
    ml_session_set_seed(vm->session, options->seed);
    ml_session_set_memory(vm->session, (int64_t)(options->memory * (1 << 30)));
    if (options->comm) ml_session_join(vm->session, options->comm);
    vm->L = lua_newstate(order_allocate, vm);
    if (!vm->L) return ml_fail(ML_NO_MEMORY, "not enough host memory for a Lua state");
    *(ml_vm **)lua_getextraspace(vm->L) = vm;
    if (options->mode == VM_CHECK) prepare_check(vm->L);
    lua_pushcfunction(vm->L, open_state);
    if (lua_pcall(vm->L, 0, 0, 0) != LUA_OK) {
        const char *message = lua_tostring(vm->L, -1);
        return ml_fail(ML_INTERNAL, "cannot start Lua: %s", message ? message : "an error");
    }
    return ML_OK;
}

void vm_end(ml_vm *vm) {
#ifndef __SANITIZE_ADDRESS__
    if (vm && vm->options->mode == VM_CHECK) return;
#endif
    vm_free(vm);
}

void vm_free(ml_vm *vm) {
    if (!vm) return;
    if (vm->L) lua_close(vm->L);
    if (vm->log) fclose(vm->log);
    ml_session_free(vm->session);
    ml_arena_free(vm->arena);
    ml_free(vm);
}

int vm_call(lua_State *L, int arguments, int results) {
    int base = lua_gettop(L) - arguments;
    lua_pushcfunction(L, vm_message_handler);
    lua_insert(L, base);
    int status = lua_pcall(L, arguments, results, base);
    lua_remove(L, base);
    return status;
}

/* ---- Signals --------------------------------------------------------------------------------- */

#define SAME_NOTICE 1.0 /* seconds between signals of which the second is no new one */

volatile int vm_stop, vm_stop_signal;
static lua_State *volatile running;
static volatile bool in_folder; /* of a run: its training saves at the first signal */

/* Runs between two Lua instructions after a signal. A script that polls core.stopped() ends in its
 * own way at the first signal; any other, and any at the second, ends here. */
static void interrupt_hook(lua_State *L, lua_Debug *frame) {
    (void)frame;
    lua_sethook(L, NULL, 0, 0);
    if (vm_of(L)->polls_stop && vm_stop < 2) return;
    ml_fail(ML_INTERRUPTED, "interrupted");
    vm_raise(L);
}

/* One notice may come twice: who ends a job signals its processes and the launcher, which passes it
 * on. A terminal's Ctrl-C (which the kernel sends) counts each time. */
static bool is_same_notice(const siginfo_t *info) {
    static volatile double last;
    double time = ml_clock_now(), before = last;
    last = time;
    return in_folder && info->si_code <= 0 && before > 0 && time - before < SAME_NOTICE;
}

static void on_signal(int number, siginfo_t *info, void *context) {
    (void)context;
    if (is_same_notice(info)) return;
    vm_stop = vm_stop + 1;
    vm_stop_signal = number;
    ml_command_stop();
    if (vm_stop >= (in_folder ? 2 : 3)) signal(number, SIG_DFL);
    if (vm_stop >= 2 && in_folder) raise(number); /* at once, though it is being saved */
    lua_State *L = running;
    if (L) lua_sethook(L, interrupt_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
}

void vm_catch_signals(ml_vm *vm) {
    lua_State *before = running;
    running = vm ? vm->L : NULL;
    if (before) lua_sethook(before, NULL, 0, 0); /* it raises, where nothing may catch it now */
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_RESTART | SA_SIGINFO}, old;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    in_folder = vm && vm->options->run_folder;
    if (in_folder) sigaction(SIGUSR1, &action, NULL); /* a cluster's notice of its time limit */
    /* A terminal that is closed ends a run, but for nohup's, and the prompt, at once. */
    bool prompts = vm && vm->options->mode == VM_REPL;
    if (!prompts && sigaction(SIGHUP, NULL, &old) == 0 && old.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
}
