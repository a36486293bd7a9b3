/* Checkpoints: saves, loads and folders of them (runtime/checkpoint/checkpoint.h). */
#include "vm/vm.h"

#include <string.h>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/checkpoint_list.h"
#include "runtime/io/durable.h"

static const char *const writer_class = "mlua.checkpoint_writer";
static const char *const scratch_class = "mlua.checkpoint_scratch";

static int writer_gc(lua_State *L) {
    ml_checkpoint_writer **writer = luaL_checkudata(L, 1, writer_class);
    ml_checkpoint_writer_free(*writer);
    *writer = NULL;
    return 0;
}

/* What a call has allocated: released with the userdata. */
typedef struct {
    ml_arena *arena;
    ml_manifest *manifest;
} scratch;

static int scratch_gc(lua_State *L) {
    scratch *s = luaL_checkudata(L, 1, scratch_class);
    ml_manifest_free(s->manifest);
    if (s->arena) ml_arena_free(s->arena);
    *s = (scratch){0};
    return 0;
}

static scratch *scratch_new(lua_State *L) {
    scratch *s = lua_newuserdatauv(L, sizeof *s, 0);
    *s = (scratch){0};
    luaL_setmetatable(L, scratch_class);
    s->arena = ml_arena_new();
    if (!s->arena) vm_fail(L, NULL, "not enough host memory for a checkpoint");
    return s;
}

/* The session's writer, made at the first save: in a field of its class's metatable. */
static ml_checkpoint_writer *writer_of(lua_State *L) {
    if (lua_getfield(L, LUA_REGISTRYINDEX, writer_class) == LUA_TTABLE &&
        lua_getfield(L, -1, "writer") == LUA_TUSERDATA) {
        ml_checkpoint_writer **made = lua_touserdata(L, -1);
        lua_pop(L, 2);
        return *made;
    }
    lua_settop(L, lua_gettop(L) - 1);
    ml_checkpoint_writer **made = lua_newuserdatauv(L, sizeof *made, 0);
    *made = NULL;
    luaL_setmetatable(L, writer_class);
    vm_check(L, ml_checkpoint_writer_new(vm_of(L)->session, made));
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "writer");
    lua_pop(L, 2);
    return *made;
}

static int push_problem(lua_State *L) {
    const ml_error *error = ml_error_last();
    lua_pushnil(L);
    lua_pushstring(L, error->text);
    lua_pushstring(L, error->help[0] ? error->help : NULL);
    return 3;
}

static void comm_busy(lua_State *L, const char *what) {
    if (vm_of(L)->options->comm) ml_comm_busy(vm_of(L)->options->comm, what);
}

static void comm_done(lua_State *L) {
    if (vm_of(L)->options->comm) ml_comm_done(vm_of(L)->options->comm);
}

/* The list {{State, name}...} at `index`, or (absent) all states; in the scratch. */
typedef struct {
    ml_arena *arena;
    ml_checkpoint_entry *entries;
    int count;
} entries_call;

static void entries_new(void *context) {
    entries_call *call = context;
    call->entries = ML_NEW_ARRAY(call->arena, ml_checkpoint_entry, call->count + 1);
}

static int read_entries(lua_State *L, int index, scratch *s, const ml_checkpoint_entry **entries) {
    int count = 0;
    if (lua_isnoneornil(L, index)) {
        vm_check(L, ml_checkpoint_states(vm_of(L)->session, s->arena, entries, &count));
        return count;
    }
    luaL_checktype(L, index, LUA_TTABLE);
    entries_call call = {s->arena, NULL, (int)vm_table_length(L, index)};
    vm_protect(L, entries_new, &call);
    for (int i = 0; i < call.count; i++) {
        lua_rawgeti(L, index, i + 1);
        luaL_checktype(L, -1, LUA_TTABLE);
        lua_rawgeti(L, -1, 1);
        call.entries[i].state = vm_state(L, -1, "a state of a checkpoint");
        lua_rawgeti(L, -2, 2);
        call.entries[i].name = luaL_checkstring(L, -1); /* the list keeps it */
        lua_pop(L, 3);
    }
    *entries = call.entries;
    return call.count;
}

static int core_checkpoint_rehearse(lua_State *L) {
    const ml_checkpoint_entry *entries;
    lua_settop(L, 1);
    if (vm_of(L)->dry.runs) return 0;
    vm_start_device(L);
    ml_checkpoint_writer *writer = writer_of(L);
    int count = read_entries(L, 1, scratch_new(L), &entries);
    comm_busy(L, "preparing a checkpoint");
    ml_checkpoint_rehearse(writer, entries, count); /* a save says what it lacks */
    comm_done(L);
    return 0;
}

static int core_checkpoint_begin(lua_State *L) {
    const char *path = luaL_checkstring(L, 1), *record = luaL_checkstring(L, 2);
    lua_settop(L, 3);
    if (vm_of(L)->dry.runs) return lua_pushboolean(L, true), 1;
    vm_start_device(L);
    const ml_checkpoint_entry *entries;
    ml_checkpoint_writer *writer = writer_of(L);
    int count = read_entries(L, 3, scratch_new(L), &entries);
    comm_busy(L, "taking the snapshot of a checkpoint");
    ml_status status = ml_checkpoint_begin(writer, path, record, entries, count);
    comm_done(L);
    if (status != ML_OK) return push_problem(L);
    lua_pushboolean(L, true);
    return 1;
}

static int push_result(lua_State *L, const ml_checkpoint_result *result) {
    lua_createtable(L, 0, 7);
    vm_set_string(L, "path", result->path);
    vm_set_integer(L, "bytes", result->bytes);
    vm_set_number(L, "stall", result->stall);
    vm_set_number(L, "seconds", result->seconds);
    vm_set_boolean(L, "own", result->own);
    if (result->status == ML_OK) return 1;
    vm_set_string(L, "error", result->problem);
    vm_set_string(L, "help", result->help[0] ? result->help : NULL);
    return 1;
}

static int core_checkpoint_poll(lua_State *L) {
    ml_checkpoint_result result;
    if (vm_of(L)->dry.runs || !ml_checkpoint_poll(writer_of(L), &result)) return 0;
    return push_result(L, &result);
}

static int core_checkpoint_wait(lua_State *L) {
    ml_checkpoint_result result;
    bool found = false;
    if (vm_of(L)->dry.runs) return 0;
    ml_checkpoint_writer *writer = writer_of(L);
    comm_busy(L, "writing a checkpoint");
    ml_status status = ml_checkpoint_wait(writer, &found, &result);
    comm_done(L);
    vm_check(L, status);
    return found ? push_result(L, &result) : 0;
}

static void push_names(lua_State *L, const char *const *names, int count) {
    lua_createtable(L, count, 0);
    for (int i = 0; i < count; i++) {
        lua_pushstring(L, names[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

static int core_checkpoint_load(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    lua_settop(L, 3);
    const bool all = lua_isnil(L, 2), strict = lua_isnil(L, 3) || lua_toboolean(L, 3);
    if (!vm_of(L)->dry.runs) vm_start_device(L);
    scratch *s = scratch_new(L);
    if (vm_of(L)->dry.runs) {
        if (ml_manifest_read(path, &s->manifest) != ML_OK) return push_problem(L);
        lua_pushstring(L, s->manifest->record);
        for (int i = 0; i < 3; i++) lua_newtable(L);
        return 4;
    }
    const ml_checkpoint_entry *entries;
    int count = read_entries(L, 2, s, &entries);
    ml_checkpoint_report report;
    comm_busy(L, "loading a checkpoint");
    ml_status status =
        ml_checkpoint_load(vm_of(L)->session, path, entries, count, all, strict, &report);
    comm_done(L);
    s->manifest = report.manifest;
    /* other failures say nothing of the checkpoint */
    if (status != ML_IO && status != ML_INVALID) vm_check(L, status);
    if (status != ML_OK) return push_problem(L);
    lua_pushstring(L, report.manifest->record);
    push_names(L, report.missing, report.missing_count);
    push_names(L, report.unexpected, report.unexpected_count);
    push_names(L, report.reshaped, report.reshaped_count);
    return 4;
}

static int core_checkpoint_list(lua_State *L) {
    const char *folder = luaL_checkstring(L, 1);
    scratch *s = scratch_new(L);
    ml_checkpoint_listing list;
    vm_check(L, ml_checkpoint_folders(folder, s->arena, &list));
    lua_createtable(L, list.count, 0);
    for (int i = 0; i < list.count; i++) {
        const ml_checkpoint_listed *entry = &list.at[i];
        lua_createtable(L, 0, 4);
        vm_set_string(L, "path", entry->path);
        if (entry->step >= 0) vm_set_integer(L, "step", entry->step);
        vm_set_boolean(L, "whole", entry->whole);
        vm_set_string(L, "problem", entry->problem);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int core_checkpoint_record(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    scratch *s = scratch_new(L);
    if (ml_manifest_read(path, &s->manifest) != ML_OK) return push_problem(L);
    lua_pushstring(L, s->manifest->record);
    return 1;
}

static bool is_first(lua_State *L) {
    const ml_comm *comm = vm_of(L)->options->comm;
    return !vm_of(L)->dry.runs && (!comm || ml_comm_rank(comm) == 0);
}

static int core_checkpoint_sweep(lua_State *L) {
    const char *folder = luaL_checkstring(L, 1);
    if (is_first(L) && ml_checkpoint_sweep(folder, NULL) != ML_OK) return push_problem(L);
    lua_pushboolean(L, true);
    return 1;
}

static int core_checkpoint_remove(lua_State *L) {
    const char *path = luaL_optstring(L, 1, NULL);
    if (is_first(L) && ml_checkpoint_remove(writer_of(L), path) != ML_OK) return push_problem(L);
    lua_pushboolean(L, true);
    return 1;
}

static int core_replica_check(lua_State *L) {
    char what[1024], note[64];
    bool differs = false;
    if (vm_of(L)->dry.runs) return 0;
    snprintf(note, sizeof note, "comparing replicas at step %lld",
             (long long)luaL_checkinteger(L, 1));
    comm_busy(L, note);
    ml_status status = ml_replicas_check(vm_of(L)->session, &differs, what);
    comm_done(L);
    vm_check(L, status);
    if (!differs) return 0;
    vm_of(L)->device_failed = true; /* a run's ranks may be started again */
    lua_pushstring(L, what);
    return 1;
}

void vm_checkpoint_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"checkpoint_rehearse", core_checkpoint_rehearse, "",
         "take the memory that a save of all states needs; on all ranks at once"},
        {"checkpoint_begin", core_checkpoint_begin,
         "path: string, record: string, entries?: table[] -> boolean?, string?, string?",
         "begin to save states, {{State, name}...} or all, and a JSON object into the folder "
         "`path`; "
         "on all ranks at once. Returns once a snapshot is taken: true, or nil, problem, help"},
        {"checkpoint_poll", core_checkpoint_poll, "-> table?",
         "a save that has ended and was not given out yet: {path, bytes, stall, seconds, error?, "
         "help?}; of ranks but the first: that their part is written"},
        {"checkpoint_wait", core_checkpoint_wait, "-> table?",
         "the same after waiting for the save under way, as rank 0 saw it; on all ranks at once"},
        {"checkpoint_load", core_checkpoint_load,
         "path: string, entries?: table[], strict?: boolean -> string?, string[]|string, string[], "
         "string[]",
         "set states {{State, name}...}, or all, from a checkpoint; on all ranks at once. The "
         "record, "
         "and the names of missing, unexpected and reshaped tensors; or nil, problem, help. Strict "
         "(the default): those are errors, unexpected ones only without entries"},
        {"checkpoint_list", core_checkpoint_list, "folder: string -> table[]",
         "the checkpoints in a folder, the newest first: {path, step?, whole, problem?}"},
        {"checkpoint_record", core_checkpoint_record, "path: string -> string?, string?",
         "the JSON object that was saved with a checkpoint, whose files have their sizes and "
         "headers; or nil, problem, help"},
        {"checkpoint_sweep", core_checkpoint_sweep, "folder: string -> boolean?, string?",
         "rank 0 removes what interrupted saves left in a folder"},
        {"checkpoint_remove", core_checkpoint_remove, "path?: string -> boolean?, string?",
         "rank 0 removes a checkpoint in a thread, its manifest first; nil and a problem where "
         "the removal before has failed. Without a path: wait for that one"},
        {"replica_check", core_replica_check, "step: integer -> string?",
         "on all ranks at once: nil where ranks that hold the same parts of states hold the same "
         "bits; else which ranks and states differ"},
        {0}};
    static const vm_entry no_methods[] = {{0}};
    vm_register(L, functions);
    vm_new_class(L, writer_class, no_methods, NULL, writer_gc);
    lua_pop(L, 1);
    vm_new_class(L, scratch_class, no_methods, NULL, scratch_gc);
    lua_pop(L, 1);
}
