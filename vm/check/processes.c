/* What `mlua tune` (stdlib/tune.lua) cannot do in Lua: run this program for many candidates,
 * several at once. Each is a process: a script that ends itself, or needs more memory than there
 * is, ends its own candidate. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "vm/vm.h"

enum { MOST_JOBS = 64, ALIVE, OUTPUT, ERRORS, FILES };
typedef struct {
    pid_t process; /* 0: none */
    int index;     /* of its words in the list */
    int files[FILES];
} job; /* ALIVE: ends when the process does, which holds its other end */

typedef struct {
    int count, running;
    job jobs[MOST_JOBS];
} runner;

static void close_job(job *j) {
    for (int i = ALIVE; i < FILES; i++)
        if (j->files[i] > 0) close(j->files[i]);
    *j = (job){0};
}

static int stop_all(runner *r) {
    for (int i = 0; i < r->count; i++) {
        job *j = &r->jobs[i];
        if (!j->process) continue;
        kill(j->process, SIGTERM);
        while (waitpid(j->process, NULL, 0) < 0 && errno == EINTR) {}
        close_job(j);
    }
    return 0;
}

static int runner_close(lua_State *L) {
    return stop_all(luaL_checkudata(L, 1, "mlua.runner"));
}

/* The words of candidate `index` of the list at stack index 1, as execv takes them. */
static char **read_words(lua_State *L, int index) {
    lua_rawgeti(L, 1, index);
    luaL_checktype(L, -1, LUA_TTABLE);
    int count = (int)lua_rawlen(L, -1);
    char **words = lua_newuserdatauv(L, sizeof *words * ((size_t)count + 2), 0);
    words[0] = (char *)"mlua";
    for (int i = 1; i <= count; i++) {
        lua_rawgeti(L, -2, i);
        words[i] = (char *)luaL_checkstring(L, -1); /* the table holds it */
        lua_pop(L, 1);
    }
    words[count + 1] = NULL;
    return words;
}

static void start(lua_State *L, job *j, int index) {
    int ends[2];
    char **words = read_words(L, index);
    if (pipe2(ends, O_CLOEXEC) != 0) vm_fail(L, NULL, "cannot start a process: %m");
    *j = (job){.index = index, .files = {[ALIVE] = ends[0]}};
    j->files[OUTPUT] = memfd_create("output", MFD_CLOEXEC);
    j->files[ERRORS] = memfd_create("errors", MFD_CLOEXEC);
    pid_t process = fork();
    if (process == 0) {
        dup2(j->files[OUTPUT], STDOUT_FILENO);
        dup2(j->files[ERRORS], STDERR_FILENO);
        fcntl(ends[1], F_SETFD, 0); /* open until the process ends */
        execv("/proc/self/exe", words);
        _exit(EXIT_FAILURE);
    }
    close(ends[1]);
    lua_pop(L, 2);
    j->process = process;
    if (process > 0) return;
    close_job(j);
    vm_fail(L, NULL, "cannot start a process: %m");
}

static void push_file(lua_State *L, int file) {
    luaL_Buffer text;
    luaL_buffinit(L, &text);
    lseek(file, 0, SEEK_SET);
    for (;;) {
        ssize_t got = read(file, luaL_prepbuffer(&text), LUAL_BUFFERSIZE);
        if (got <= 0) break;
        luaL_addsize(&text, (size_t)got);
    }
    luaL_pushresult(&text);
}

/* {output =, errors =, code =} into the table at stack index 4. */
static void finish(lua_State *L, job *j) {
    int status = 0;
    while (waitpid(j->process, &status, 0) < 0 && errno == EINTR) {}
    lua_createtable(L, 0, 3);
    push_file(L, j->files[OUTPUT]);
    lua_setfield(L, -2, "output");
    push_file(L, j->files[ERRORS]);
    lua_setfield(L, -2, "errors");
    vm_set_integer(L, "code", WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
    lua_rawseti(L, 4, j->index);
    close_job(j);
}

/* Until one of them ends, or the time is over. */
static void wait_for_one(lua_State *L, runner *r, double until) {
    struct pollfd files[MOST_JOBS];
    for (int i = 0; i < r->count; i++)
        files[i] = (struct pollfd){r->jobs[i].process ? r->jobs[i].files[ALIVE] : -1, POLLIN, 0};
    double left = until - ml_clock_now();
    int milliseconds = left > 3600 ? 3600000 : left > 0 ? (int)(1e3 * left) + 1 : 0;
    if (poll(files, (nfds_t)r->count, milliseconds) <= 0) return;
    for (int i = 0; i < r->count; i++) {
        if (!files[i].revents || !r->jobs[i].process) continue;
        finish(L, &r->jobs[i]);
        r->running--;
    }
}

/* run_program(list, jobs, seconds) -> results */
static int core_run_program(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    int jobs = (int)luaL_checkinteger(L, 2), count = (int)lua_rawlen(L, 1), next = 1;
    double until = ml_clock_now() + luaL_checknumber(L, 3);
    lua_settop(L, 3);
    lua_createtable(L, count, 0);
    runner *r = lua_newuserdatauv(L, sizeof *r, 0);
    *r = (runner){.count = jobs < 1 ? 1 : jobs > MOST_JOBS ? MOST_JOBS : jobs};
    luaL_setmetatable(L, "mlua.runner"); /* whatever is raised below, no process is left */
    while (ml_clock_now() < until && !vm_stop && (r->running > 0 || next <= count)) {
        for (int i = 0; i < r->count && next <= count; i++) {
            if (r->jobs[i].process) continue;
            start(L, &r->jobs[i], next++);
            r->running++;
        }
        wait_for_one(L, r, until);
    }
    stop_all(r);
    lua_pushvalue(L, 4);
    return 1;
}

void vm_processes_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"run_program", core_run_program,
         "list: string[][], jobs: integer, seconds: number -> table<integer, table>",
         "run this program with each list of words, `jobs` at once, for so long in all: what each "
         "that ended wrote, as output and errors, and its exit code"},
        {0}};
    luaL_newmetatable(L, "mlua.runner");
    vm_set_function(L, "__gc", runner_close);
    lua_pop(L, 1);
    vm_register(L, functions);
}
