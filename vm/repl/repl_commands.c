/* Commands of the prompt: :check, :mem and :shard report what was typed, as `mlua check` reports
 * scripts; :help. */
#include <ctype.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "vm/check/traffic.h"
#include "vm/repl/repl.h"

static const struct {
    const char *name;
    repl_command command;
} commands[] = {
    {"check", REPL_CHECK}, {"mem", REPL_MEM}, {"shard", REPL_SHARD}, {"help", REPL_HELP}};
enum { COMMANDS = sizeof commands / sizeof *commands };

const char *repl_command_name(int i) {
    return i < COMMANDS ? commands[i].name : NULL;
}

repl_command repl_read_command(const char *text, const char **rest) {
    const char *at = text + strspn(text, " \t");
    *rest = text;
    if (at[0] == '=' && at[1] != '=') {
        *rest = at + 1;
        return REPL_VALUES;
    }
    if (at[0] != ':' || at[1] == ':') return REPL_EXPRESSION;
    size_t length = 0;
    while (isalnum((unsigned char)at[1 + length])) length++;
    *rest = at + 1 + length;
    for (int i = 0; i < COMMANDS; i++)
        if (strlen(commands[i].name) == length && strncmp(commands[i].name, at + 1, length) == 0)
            return commands[i].command;
    return REPL_UNKNOWN;
}

void repl_push_unknown(lua_State *L, const char *chunk, const char *text) {
    const char *names[COMMANDS];
    const char *at = strchr(text, ':') + 1;
    size_t length = strcspn(at, " \t\r\n");
    for (int i = 0; i < COMMANDS; i++) names[i] = commands[i].name;
    lua_pushlstring(L, at, length);
    const char *guess = ml_suggest(lua_tostring(L, -1), names, COMMANDS);
    lua_pushfstring(L, "%s:1: there is no command \":%s\"\n  help: %s%s%s", chunk + 1,
                    lua_tostring(L, -1), guess ? "did you mean :" : "",
                    guess ? guess : ":check, :mem, :shard and :help are commands",
                    guess ? "?" : "");
    lua_remove(L, -2);
}

/* ---- What is reported ------------------------------------------------------------------------ */

typedef struct {
    int programs, outputs, updates; /* stack indices: lists, and a table by name */
    int count;                      /* of outputs and updates */
} targets;

static const char typed_name[] = "what was typed"; /* of the program that computes it */
static const char *const help_for_targets = ":mem x:dot(w, \"embed\"), :check step, :shard model; "
                                            "without one, the last value or the script";

/* A state assigned to itself stays sharded; as an output it would be gathered. */
static void add_output(lua_State *L, targets *t, int index) {
    uint32_t id;
    t->count++;
    if (vm_is_state(L, index, &id)) {
        lua_createtable(L, 2, 0);
        lua_pushvalue(L, index);
        lua_rawseti(L, -2, 1);
        vm_push_tensor(L, vm_state_node(L, id));
        lua_rawseti(L, -2, 2);
        lua_rawseti(L, t->updates, (lua_Integer)lua_rawlen(L, t->updates) + 1);
    } else {
        lua_pushfstring(L, "%d", t->count);
        lua_pushvalue(L, index);
        lua_settable(L, t->outputs);
    }
}

static bool add_target(lua_State *L, targets *t, int index);

/* The parameters of a module, the tensors of a table, the program behind a function of one result.
 */
static bool add_table(lua_State *L, targets *t, int index) {
    int top = lua_gettop(L);
    bool any = false;
    lua_pushliteral(L, "program");
    lua_rawget(L, index);
    if (vm_to_program(L, -1)) return any = add_target(L, t, top + 1), lua_settop(L, top), any;
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_getfield(L, -1, "mlua");
    lua_getfield(L, -1, "is_module");
    lua_pushvalue(L, index);
    lua_call(L, 1, 1);
    if (lua_toboolean(L, -1)) {
        lua_getfield(L, -2, "parameters");
        lua_pushvalue(L, index);
        lua_call(L, 1, 1);
    } else {
        lua_pushvalue(L, index);
    }
    int list = lua_gettop(L);
    lua_pushnil(L);
    while (lua_next(L, list)) {
        if (vm_is_tensor(L, -1)) add_output(L, t, lua_gettop(L)), any = true;
        lua_pop(L, 1);
    }
    lua_settop(L, top);
    return any;
}

static bool add_target(lua_State *L, targets *t, int index) {
    luaL_checkstack(L, 16, "a report");
    if (vm_to_program(L, index)) {
        lua_pushvalue(L, index);
        lua_rawseti(L, t->programs, (lua_Integer)lua_rawlen(L, t->programs) + 1);
        return true;
    }
    if (vm_is_tensor(L, index)) return add_output(L, t, index), true;
    return lua_istable(L, index) && add_table(L, t, index);
}

/* A program that computes the outputs, planned; it is not one of the script's. */
static void plan_outputs(lua_State *L, const targets *t) {
    ml_vm *vm = vm_of(L);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, "mlua.programs");
    int known = lua_gettop(L);
    lua_Integer count = (lua_Integer)lua_rawlen(L, known);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_getfield(L, -1, "mlua.core");
    lua_getfield(L, -1, "program");
    lua_newtable(L);
    vm_set_string(L, "name", typed_name);
    lua_pushvalue(L, t->outputs);
    lua_setfield(L, -2, "outputs");
    lua_pushvalue(L, t->updates);
    lua_setfield(L, -2, "updates");
    vm->dry.runs = true;
    int status = lua_pcall(L, 1, 1, 0);
    vm->dry.runs = false;
    lua_pushnil(L);
    lua_rawseti(L, known, count + 1);
    if (status != LUA_OK) lua_error(L);
    lua_rawseti(L, t->programs, (lua_Integer)lua_rawlen(L, t->programs) + 1);
    lua_settop(L, known - 1);
}

/* Push the programs and options of the script's report, or of all programs; false where there are
 * none. */
static bool push_script(lua_State *L) {
    if (lua_getfield(L, LUA_REGISTRYINDEX, "mlua.report") == LUA_TTABLE) {
        lua_rawgeti(L, -1, 1);
        if (lua_rawgeti(L, -2, 2) != LUA_TTABLE) lua_newtable(L), lua_replace(L, -2);
        return true;
    }
    lua_getfield(L, LUA_REGISTRYINDEX, "mlua.programs");
    lua_newtable(L);
    return lua_istable(L, -2) && lua_rawlen(L, -2) > 0;
}

/* Push the programs and options for what was typed, values 1 .. count of the stack. */
static void push_typed(lua_State *L, int count) {
    for (int i = 0; i < 3; i++) lua_newtable(L);
    int top = lua_gettop(L);
    targets t = {.programs = top - 2, .outputs = top - 1, .updates = top};
    for (int i = 1; i <= count; i++)
        if (!add_target(L, &t, i))
            vm_fail(L, help_for_targets,
                    "a report is of tensors, modules and programs, and this is %s",
                    vm_typename(L, i));
    if (t.count) plan_outputs(L, &t);
    lua_settop(L, t.programs);
    lua_newtable(L);
    vm_set_boolean(L, "typed", t.count > 0);
}

/* The last value, where it is something to report. */
static int push_last(lua_State *L) {
    lua_getglobal(L, "_");
    bool known = vm_is_tensor(L, -1) || vm_to_program(L, -1);
    if (!known) lua_pop(L, 1);
    return known;
}

/* Report the placement of the tensors that were typed; false for programs, whose communication is
 * reported. */
static bool print_typed(lua_State *L, int programs) {
    lua_rawgeti(L, programs, 1);
    lua_getiuservalue(L, -1, 1);
    const char *name = lua_tostring(L, -1);
    bool typed = lua_rawlen(L, programs) == 1 && name && strcmp(name, typed_name) == 0;
    if (typed) traffic_print_typed(L, &vm_to_program(L, -2)->roots);
    lua_pop(L, 2);
    return typed;
}

void repl_run_command(lua_State *L, repl_command command) {
    static const char *const parts[] = {
        [REPL_CHECK] = "all", [REPL_MEM] = "memory", [REPL_SHARD] = "shard"};
    int count = lua_gettop(L);
    if (command == REPL_HELP) {
        repl_help(L, count);
        return;
    }
    if (!count) count = push_last(L);
    if (count)
        push_typed(L, count);
    else if (!push_script(L))
        vm_fail(L, help_for_targets, "there is nothing to report yet");
    int options = lua_gettop(L), programs = options - 1;
    lua_rawgeti(L, programs, 1);
    bool laid_out = vm_program_plan(vm_to_program(L, -1))->layout != NULL;
    lua_pop(L, 1);
    if (command == REPL_SHARD && !laid_out)
        vm_fail(
            L, "m.use_layout(m.layout.megatron{tp = 4}); of a script: mlua repl SCRIPT --mesh tp=4",
            "there is no layout of several ranks: all is on one");
    if (command == REPL_SHARD && print_typed(L, programs)) return;
    lua_newtable(L); /* the script's options persist for the next time */
    static const char *const persistent[] = {"tokens", "accum", "step", "typed"};
    for (size_t i = 0; i < sizeof persistent / sizeof *persistent; i++) {
        lua_getfield(L, options, persistent[i]);
        lua_setfield(L, options + 1, persistent[i]);
    }
    lua_pushstring(L, parts[command]);
    lua_setfield(L, options + 1, "part");
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_getfield(L, -1, "mlua.core");
    lua_getfield(L, -1, "report");
    lua_pushvalue(L, programs);
    lua_pushvalue(L, options + 1);
    lua_call(L, 2, 0);
}
