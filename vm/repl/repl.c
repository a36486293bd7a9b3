/* The interactive prompt. On a terminal: line editing, history and completion by libedit; from a
 * pipe: plain lines, no prompt. An input that is incomplete continues on the next line; the inputs
 * are numbered, and errors name them: "[3]:1: ...". */
#define _GNU_SOURCE /* ppoll */
#include "vm/repl/repl.h"

#include <ctype.h>
#include <errno.h>
#include <histedit.h>
#include <limits.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "vm/check/dry.h"

enum { HISTORY_SIZE = 10000, PATH_SIZE = 4096 };

typedef struct {
    ml_vm *vm;
    bool interactive;
    EditLine *edit;
    History *history;
    char history_file[PATH_SIZE];
    const char *prompt;
    sigset_t open; /* the signals that are blocked while a key is waited for: Ctrl-C's is not */
    char *line;    /* of getline, where there is no terminal */
    size_t line_capacity;
} repl;

/* ---- Lines ----------------------------------------------------------------------------------- */

static const char *repl_prompt(EditLine *edit) {
    repl *r;
    el_get(edit, EL_CLIENTDATA, &r);
    return r->prompt;
}

static unsigned char complete(EditLine *edit, int key) {
    (void)key;
    repl *r;
    el_get(edit, EL_CLIENTDATA, &r);
    const LineInfo *info = el_line(edit);
    return repl_complete(r->vm->L, edit, info->buffer, (size_t)(info->cursor - info->buffer))
               ? CC_REDISPLAY
               : CC_REFRESH;
}

/* The path of the history; "" where none can be written. Makes the folders. */
static void find_history(char *path, size_t size) {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    path[0] = 0;
    int length;
    if (state && state[0] == '/')
        length = snprintf(path, size, "%s/mlua/history", state);
    else if (home && home[0] == '/')
        length = snprintf(path, size, "%s/.local/state/mlua/history", home);
    else
        return;
    if (length < 0 || (size_t)length >= size) {
        path[0] = 0;
        return;
    }
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
}

/* The next key, of which a signal is one: signals are unblocked while this waits
 * alone, so that none is lost between the keys. */
static int read_key(EditLine *edit, wchar_t *key) {
    repl *r;
    el_get(edit, EL_CLIENTDATA, &r);
    char bytes[MB_LEN_MAX];
    for (size_t count = 1; count <= sizeof bytes; count++) {
        struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
        if (ppoll(&input, 1, NULL, &r->open) < 0) return -1;
        ssize_t got = read(STDIN_FILENO, bytes + count - 1, 1);
        if (got <= 0) return (int)got;
        mbstate_t state = {0};
        *key = (unsigned char)bytes[0];                              /* where it is no character */
        if (mbrtowc(key, bytes, count, &state) != (size_t)-2) break; /* more bytes follow */
    }
    return 1;
}

static void open_editor(repl *r) {
    HistEvent event;
    setlocale(LC_CTYPE, "");
    r->edit = el_init("mlua", stdin, stdout, stderr);
    r->history = history_init();
    if (!r->edit || !r->history) return;
    el_set(r->edit, EL_CLIENTDATA, r);
    el_set(r->edit, EL_PROMPT, repl_prompt);
    el_set(r->edit, EL_GETCFN, read_key);
    el_set(r->edit, EL_EDITOR, "emacs");
    el_set(r->edit, EL_HIST, history, r->history);
    el_set(r->edit, EL_ADDFN, "mlua-complete", "complete a name", complete);
    el_set(r->edit, EL_BIND, "^I", "mlua-complete", NULL);
    el_set(r->edit, EL_BIND, "^R", "em-inc-search-prev", NULL);
    history(r->history, &event, H_SETSIZE, HISTORY_SIZE);
    history(r->history, &event, H_SETUNIQUE, 1);
    find_history(r->history_file, sizeof r->history_file);
    if (r->history_file[0]) history(r->history, &event, H_LOAD, r->history_file);
    el_source(r->edit, NULL);
}

static void close_editor(repl *r) {
    HistEvent event;
    if (r->history && r->history_file[0]) history(r->history, &event, H_SAVE, r->history_file);
    if (r->edit) el_end(r->edit);
    if (r->history) history_end(r->history);
    free(r->line); /* getline's */
}

static void on_interrupt(int number) {
    (void)number;
}

/* The next line with its newline; NULL at the end. *interrupted: the line was given up. */
static const char *read_line(repl *r, const char *prompt, bool *interrupted) {
    *interrupted = false;
    if (!r->edit) return getline(&r->line, &r->line_capacity, stdin) >= 0 ? r->line : NULL;
    struct sigaction action = {.sa_handler = on_interrupt}, before; /* read_key() ends at it */
    sigset_t interrupt;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    pthread_sigmask(SIG_BLOCK, &interrupt, &r->open);
    sigaction(SIGINT, &action, &before);
    int count = 0;
    r->prompt = prompt;
    errno = 0;
    const char *line = el_gets(r->edit, &count);
    *interrupted = !line && errno == EINTR;
    sigaction(SIGINT, &before, NULL);
    pthread_sigmask(SIG_SETMASK, &r->open, NULL);
    if (*interrupted) {
        el_reset(r->edit);
        fputs("\n", stdout);
    }
    return line;
}

/* ---- Inputs ---------------------------------------------------------------------------------- */

static bool is_incomplete(lua_State *L) {
    size_t length;
    const char *message = lua_tolstring(L, -1, &length);
    return message && length >= 5 && strcmp(message + length - 5, "<eof>") == 0;
}

/* Load the text at index 1 as an expression or as statements; LUA_OK with a function pushed. */
static int load_input(lua_State *L, const char *chunk) {
    size_t length;
    const char *text = lua_tolstring(L, 1, &length), *rest;
    repl_command command = repl_read_command(text, &rest);
    vm_save_source(L, chunk, text, length);
    if (command == REPL_UNKNOWN) return repl_push_unknown(L, chunk, text), LUA_ERRSYNTAX;
    lua_pushfstring(L, "return %s", rest);
    const char *expression = lua_tostring(L, -1);
    int status = vm_load(L, expression, strlen(expression), chunk, 0);
    if (status != LUA_OK && command == REPL_EXPRESSION) {
        bool open = is_incomplete(L); /* "1 +" is no statement, but may become an expression */
        status = vm_load_input(L, text, length, chunk);
        if (status == LUA_OK || !open || is_incomplete(L))
            lua_remove(L, -2);
        else
            lua_pop(L, 1);
    }
    lua_remove(L, -2);
    vm_save_source(L, chunk, text, length);
    return status;
}

/* Upvalue 1: the command; the results of its expression. */
static int show_results(lua_State *L) {
    repl_command command = (repl_command)lua_tointeger(L, lua_upvalueindex(1));
    int count = lua_gettop(L);
    if (command != REPL_VALUES)
        repl_run_command(L, command);
    else
        for (int i = 1; i <= count; i++) repl_print_values(L, i);
    return 0;
}

/* Called from the input's first line, so that errors name it. */
static void show_from(lua_State *L, const char *chunk, repl_command command) {
    static const char text[] = "local show = ... show(select(2, ...))";
    int count = lua_gettop(L);
    if (luaL_loadbufferx(L, text, sizeof text - 1, chunk, "t") != LUA_OK) lua_error(L);
    vm_push_library_globals(L);
    lua_setupvalue(L, -2, 1);
    lua_pushinteger(L, command);
    lua_pushcclosure(L, show_results, 1);
    for (int i = 1; i <= count; i++) lua_pushvalue(L, i);
    lua_call(L, count + 1, 0);
}

/* The function, the name of its chunk and the command. */
static int run_input(lua_State *L) {
    char chunk[32];
    repl_command command = (repl_command)lua_tointeger(L, 3);
    snprintf(chunk, sizeof chunk, "%s", lua_tostring(L, 2));
    lua_settop(L, 1);
    lua_call(L, 0, LUA_MULTRET);
    int results = lua_gettop(L);
    luaL_checkstack(L, results + 16, "results");
    if (results && command != REPL_HELP) {
        lua_pushvalue(L, 1);
        lua_setglobal(L, "_");
    }
    if (command != REPL_EXPRESSION)
        show_from(L, chunk, command);
    else
        for (int i = 1; i <= results; i++) repl_print(L, i);
    vm_print_hints(L);
    fflush(stdout);
    return 0;
}

/* Read one input; false at the end of the inputs. Leaves nothing on the stack. */
static bool step(repl *r, int number) {
    lua_State *L = r->vm->L;
    bool interrupted;
    char chunk[32], prompt[32];
    snprintf(chunk, sizeof chunk, "@[%d]", number);
    snprintf(prompt, sizeof prompt, "[%d] ", number);
    lua_settop(L, 0);
    const char *line = read_line(r, prompt, &interrupted);
    if (interrupted) return true;
    if (!line) return false;
    lua_pushstring(L, line);
    while (load_input(L, chunk) != LUA_OK && is_incomplete(L)) {
        lua_pop(L, 1);
        line = read_line(r, "... ", &interrupted);
        if (interrupted) return true;
        if (!line) {
            load_input(L, chunk);
            break;
        }
        lua_pushstring(L, line);
        lua_concat(L, 2);
    }
    if (r->history) {
        HistEvent event;
        size_t length;
        const char *text = lua_tolstring(L, 1, &length);
        while (length && isspace((unsigned char)text[length - 1])) length--;
        lua_pushlstring(L, text, length);
        if (length) history(r->history, &event, H_ENTER, lua_tostring(L, -1));
        lua_pop(L, 1);
    }
    vm_stop = 0;
    bool loaded = lua_isfunction(L, -1);
    if (loaded) {
        lua_pushcfunction(L, run_input);
        lua_insert(L, -2);
        const char *rest;
        lua_pushstring(L, chunk);
        lua_pushinteger(L, repl_read_command(lua_tostring(L, 1), &rest));
        if (vm_call(L, 3, 0) == LUA_OK) return true;
    } else {
        vm_finish_error(L);
    }
    fflush(stdout);
    vm_print_error(L);
    return true;
}

/* Inside a protected call, so that no Lua error, not even of memory, ends the prompt. */
static int protected_step(lua_State *L) {
    repl *r = lua_touserdata(L, 1);
    int number = (int)lua_tointeger(L, 2);
    lua_pushboolean(L, step(r, number));
    return 1;
}

/* What core.options() returns. */
static void set_mode(lua_State *L, const char *mode) {
    lua_getfield(L, LUA_REGISTRYINDEX, "mlua.options");
    vm_set_string(L, "mode", mode);
    lua_pop(L, 1);
}

static int preload(lua_State *L) {
    const vm_options *options = vm_of(L)->options;
    lua_getglobal(L, "require");
    lua_pushliteral(L, "mlua");
    lua_call(L, 1, 1);
    lua_setglobal(L, "m");
    repl_push_help(L);
    lua_setglobal(L, "help");
    lua_pushnil(L); /* the last value: there is none */
    lua_setglobal(L, "_");
    if (!options->script) return 0;
    if (vm_load_file(L, options->script, 0) != LUA_OK) return lua_error(L);
    set_mode(L, "check"); /* m.train plans, m.generate does nothing */
    dry_call_keeping(L);
    return 0;
}

/* The script has ended, maybe within a function that is traced. */
static void leave_script(ml_vm *vm) {
    lua_State *L = vm->L;
    set_mode(L, "repl");
    vm->module = "";
    vm->traces = vm->exact = false;
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    if (lua_getfield(L, -1, "mlua") == LUA_TTABLE) {
        lua_newtable(L);
        vm_set_integer(L, "sites", 0);
        lua_setfield(L, -2, "context");
    }
    lua_pop(L, 2);
}

int repl_run(ml_vm *vm) {
    repl r = {.vm = vm, .interactive = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO)};
    lua_State *L = vm->L;
    lua_pushcfunction(L, preload);
    if (vm_call(L, 0, 0) != LUA_OK) vm_print_error(L);
    if (vm->options->script) leave_script(vm);
    int line;
    const char *file = dry_end(vm, &line);
    if (file && !vm->options->quiet)
        printf("the script was stopped at %s:%d, where it calls programs that are known again and "
               "again\n",
               file, line);
    if (r.interactive) open_editor(&r);
    if (r.edit && vm->options->script && !vm->options->quiet)
        printf("mlua: %s is traced, and trains nothing; its variables are known here\n",
               vm->options->script);
    if (r.edit && !vm->options->quiet)
        printf(
            "mlua: expressions print their type, = x computes; m is the library; help says more; "
            "^D ends\n");
    for (int number = 1, more = 1; more; number++) {
        lua_settop(L, 0);
        lua_pushcfunction(L, protected_step);
        lua_pushlightuserdata(L, &r);
        lua_pushinteger(L, number);
        if (lua_pcall(L, 2, 1, 0) == LUA_OK)
            more = lua_toboolean(L, -1);
        else
            vm_print_error(L);
    }
    if (r.edit) printf("\n");
    close_editor(&r);
    return 0;
}
