/* What a run's folder needs of the host: folders, the log of what is printed, and texts that rank 0
 * gives to all ranks, so that no two of them judge a shared file system differently. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "codegen/jit/jit.h"
#include "runtime/io/durable.h"
#include "vm/vm.h"

static int core_make_folders(lua_State *L) {
    bool made = ml_durable_folders(luaL_checkstring(L, 1)) == ML_OK;
    if (made) return lua_pushboolean(L, 1), 1;
    luaL_pushfail(L);
    lua_pushstring(L, ml_error_last()->text);
    return 2;
}

static int core_log_to(lua_State *L) {
    ml_vm *vm = vm_of(L);
    const char *path = luaL_checkstring(L, 1);
    if (vm->log) fclose(vm->log);
    vm->log = fopen(path, "ae");
    if (!vm->log) {
        lua_pushfstring(L, "cannot write %s: %s", path, strerror(errno));
        return 1;
    }
    if (flock(fileno(vm->log), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return 0;
    return vm_fail(L, "a run's folder is for one process, or the ranks of one job, at a time",
                   "%s: another process is running this run", path);
}

/* A log that cannot be written, on a full disk, stops nothing. */
void vm_log(lua_State *L, const char *text, size_t size) {
    FILE *log = vm_of(L)->log;
    if (!log) return;
    if (fwrite(text, 1, size, log) != size || fflush(log) != 0) clearerr(log);
}

static int core_unsaved(lua_State *L) {
    vm_of(L)->unsaved = lua_isnoneornil(L, 1) ? NULL : vm_intern(L, luaL_checkstring(L, 1));
    return 0;
}

int vm_end_code(lua_State *L, int code) {
    ml_vm *vm = vm_of(L);
    if (!vm->unsaved) return code;
    fflush(stdout);
    fprintf(stderr, "mlua: %s\n", vm->unsaved);
    if (vm->log) fprintf(vm->log, "mlua: %s\n", vm->unsaved);
    vm->unsaved = NULL;
    return code == 0 ? ML_EXIT_UNSAVED : code;
}

static int core_log(lua_State *L) {
    size_t size;
    const char *text = luaL_checklstring(L, 1, &size);
    vm_log(L, text, size);
    return 0;
}

static int core_share(lua_State *L) {
    ml_comm *comm = vm_of(L)->options->comm;
    size_t size = 0;
    const char *text = lua_isnoneornil(L, 1) ? NULL : luaL_checklstring(L, 1, &size);
    lua_settop(L, 1);
    if (!comm) return 1;
    int64_t bytes = text ? (int64_t)size : -1;
    vm_check(L, ml_comm_share(comm, &bytes, sizeof bytes));
    if (bytes < 0) return 0;
    char *copy = lua_newuserdatauv(L, (size_t)bytes + 1, 0);
    if (ml_comm_rank(comm) == 0) memcpy(copy, text, (size_t)bytes);
    vm_check(L, ml_comm_share(comm, copy, (size_t)bytes));
    lua_pushlstring(L, copy, (size_t)bytes);
    return 1;
}

static int core_keep_choices(lua_State *L) {
    vm_check(L, ml_choices_keep(luaL_checkstring(L, 1)));
    return 0;
}

static int core_sources(lua_State *L) {
    vm_push_sources(L);
    return 1;
}

static int core_sleep(lua_State *L) {
    double seconds = luaL_checknumber(L, 1);
    if (!(seconds > 0)) return 0;
    if (seconds > 1) seconds = 1; /* a signal is seen between two instructions of Lua */
    nanosleep(
        &(struct timespec){(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)},
        NULL);
    return 0;
}

void vm_run_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"make_folders", core_make_folders, "path: string -> true?, string?",
         "each folder of a path that is not there yet; nil and the reason where one cannot be "
         "made"},
        {"log_to", core_log_to, "path: string -> string?",
         "notes and errors are added to this file from now on; the reason where they cannot be. "
         "Raises where another process does so"},
        {"unsaved", core_unsaved, "problem?: string",
         "how the run's end is not saved: printed when the script is over, and then the exit code "
         "is 73; nil: it is saved"},
        {"log_text", core_log, "text: string", "add a text to that file alone"},
        {"share", core_share, "text?: string -> string?",
         "rank 0's text, on every rank; all ranks at once"},
        {"keep_choices", core_keep_choices, "folder: string",
         "what timing chooses (algorithms of products and attention) is kept in this folder too, "
         "and "
         "taken from there first"},
        {"sources", core_sources, "-> table<string, string>",
         "the texts of the script and of all that it loaded, by file"},
        {"sleep", core_sleep, "seconds: number", "wait, a second at most"},
        {0}};
    vm_register(L, functions);
}
