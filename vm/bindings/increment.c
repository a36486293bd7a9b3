/* Increments in Lua: the step of a causal program, and the states that its programs share. */
#include "runtime/increment/increment.h"

#include "vm/vm.h"

static const char *const kept_class = "mlua.kept";

typedef struct {
    ml_kept_list list;
    ml_arena *scratch;
    lua_Integer number; /* among those of the session: part of the states' names */
} kept_box;

static kept_box *check_kept(lua_State *L, int index) {
    return luaL_checkudata(L, index, kept_class);
}

static int kept_gc(lua_State *L) {
    kept_box *box = check_kept(L, 1);
    if (box->list.arena) ml_arena_free(box->list.arena);
    if (box->scratch) ml_arena_free(box->scratch);
    *box = (kept_box){0};
    return 0;
}

static int core_increment_states(lua_State *L) {
    kept_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = (kept_box){0};
    luaL_setmetatable(L, kept_class);
    int result = lua_gettop(L);
    box->list.arena = ml_arena_new();
    box->scratch = ml_arena_new();
    if (!box->list.arena || !box->scratch) vm_fail(L, NULL, "not enough host memory");
    lua_getfield(L, LUA_REGISTRYINDEX, kept_class);
    lua_getfield(L, -1, "count");
    box->number = lua_tointeger(L, -1) + 1;
    lua_pop(L, 1);
    vm_set_integer(L, "count", box->number);
    lua_settop(L, result);
    return 1;
}

static int kept_list(lua_State *L) {
    static const char *const kinds[] = {"pool", "ring", "slot"};
    const ml_graph *g = vm_of(L)->graph;
    kept_box *box = check_kept(L, 1);
    lua_createtable(L, (int)box->list.count, 0);
    for (uint32_t i = 0; i < box->list.count; i++) {
        const ml_kept *k = &box->list.at[i];
        const ml_state *state = ml_graph_state(g, k->state);
        const ml_origin *origin = ml_graph_origin(g, k->node);
        lua_newtable(L);
        vm_set_string(L, "name", state->name);
        vm_set_string(L, "kind", kinds[k->kind]);
        vm_set_string(L, "module", origin->module);
        vm_set_string(L, "file", origin->file);
        vm_set_integer(L, "line", origin->line);
        vm_set_string(L, "dtype", ml_dtypes[state->type.dtype].name);
        int64_t bytes = ml_type_bytes(&state->type) / state->type.size[0];
        vm_set_integer(L, "bytes", k->ring ? bytes * k->ring : bytes);
        if (k->ring) vm_set_integer(L, "ring", k->ring);
        vm_push_state(L, k->state);
        lua_setfield(L, -2, "state");
        lua_createtable(L, state->type.rank - 1, 0);
        for (int a = 1; a < state->type.rank; a++) {
            vm_push_axis(L, state->type.axis[a], state->type.size[a]);
            lua_rawseti(L, -2, a);
        }
        lua_setfield(L, -2, "axes");
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* ---- The increment --------------------------------------------------------------------------- */

enum { MOST_GIVEN = 16 };
typedef struct {
    ml_graph *graph;
    ml_origin origin;
    ml_increment in;
    ml_ref given[MOST_GIVEN];
    bool gives; /* what the prompt gives, not new tokens */
    kept_box *kept;
    ml_increment_result out;
} increment_call;

static void derive(void *argument) {
    increment_call *call = argument;
    ml_arena_reset(call->kept->scratch);
    ml_graph_set_origin(call->graph, &call->origin);
    (call->gives ? ml_increment_give : ml_increment_derive)(
        call->graph, &call->in, &call->kept->list, call->kept->scratch, &call->out);
    ml_graph_set_origin(call->graph, &call->origin);
}

static ml_ref tensor_field(lua_State *L, const char *key, bool needed) {
    lua_getfield(L, 2, key);
    bool absent = lua_isnil(L, -1);
    if (absent && needed) vm_fail(L, NULL, "core.increment needs %s", key);
    ml_ref n = absent ? 0 : vm_tensor(L, -1, key);
    if (n && ml_graph_type(vm_of(L)->graph, n)->dtype != ML_I32)
        vm_fail(L, NULL, "%s of core.increment must be i32", key);
    lua_pop(L, 1);
    return n;
}

static int64_t count_field(lua_State *L, const char *key, int64_t otherwise) {
    if (!vm_option(L, 2, key)) return otherwise;
    int64_t value = vm_integer(L, -1, key);
    if (value < 1 || value > INT32_MAX)
        vm_fail(L, NULL, "%s of core.increment must be 1 or more, got %lld", key, (long long)value);
    lua_pop(L, 1);
    return value;
}

static void read_given(lua_State *L, increment_call *call) {
    call->in.given = call->given;
    if (!vm_option(L, 2, "given")) return;
    luaL_checktype(L, -1, LUA_TTABLE);
    int64_t count = vm_table_length(L, -1);
    if (count > MOST_GIVEN)
        vm_fail(L, NULL, "a prompt gives at most %d inputs, not %lld", MOST_GIVEN,
                (long long)count);
    for (int64_t i = 1; i <= count; i++) {
        lua_rawgeti(L, -1, i);
        call->given[call->in.given_count++] = vm_tensor(L, -1, "what a prompt gives");
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

static void read_fields(lua_State *L, increment_call *call) {
    static const char *const known[] = {"tokens", "seq",   "kept",  "new",       "start",
                                        "count",  "slots", "table", "slots_max", "pool",
                                        "block",  "last",  "given", "new_max",   NULL};
    ml_increment *in = &call->in;
    vm_check_options(L, 2, "core.increment", known);
    lua_getfield(L, 2, "kept");
    call->kept = check_kept(L, -1);
    in->logits = vm_tensor(L, 1, "the logits of core.increment");
    in->tokens = tensor_field(L, "tokens", true);
    in->fed = tensor_field(L, "new", !call->gives);
    in->start = tensor_field(L, "start", !call->gives);
    in->count = tensor_field(L, "count", !call->gives);
    in->slots = tensor_field(L, "slots", call->gives);
    read_given(L, call);
    in->table = tensor_field(L, "table", false);
    lua_getfield(L, 2, "seq");
    in->seq = vm_axis_id(L, -1, "core.increment");
    lua_getfield(L, 2, "last");
    in->last = lua_toboolean(L, -1);
    in->block = count_field(L, "block", 16);
    in->pool = count_field(L, "pool", in->block);
    in->most = vm_option(L, 2, "new_max") ? count_field(L, "new_max", 0) : 0;
    const ml_type *rows = ml_graph_type(vm_of(L)->graph, call->gives ? in->slots : in->start);
    in->slot_count = count_field(L, "slots_max", rows->rank ? rows->size[0] : 1);
}

static void check_fields(lua_State *L, const increment_call *call) {
    const ml_graph *g = vm_of(L)->graph;
    const ml_type *fed = ml_graph_type(g, call->in.fed), *start = ml_graph_type(g, call->in.start);
    const ml_type *count = ml_graph_type(g, call->in.count);
    if (start->rank != 1 || fed->rank != 2 || !ml_type_equal(start, count) ||
        ml_type_find(fed, start->axis[0]) < 0)
        vm_fail(L, "new {row, new}, start {row}, count {row}",
                "core.increment takes new tokens over rows and positions, start and count over "
                "rows");
    if (!call->in.slots && ml_type_size(start, start->axis[0]) != call->in.slot_count)
        vm_fail(L, "slots = i.slots: which slot each row works for",
                "core.increment has %lld rows and %lld slots",
                (long long)ml_type_size(start, start->axis[0]), (long long)call->in.slot_count);
    if (call->in.pool % call->in.block)
        vm_fail(L, NULL, "a pool is a whole number of blocks of %lld positions",
                (long long)call->in.block);
    if (call->in.table && ml_graph_type(g, call->in.table)->rank != 2)
        vm_fail(L, "table {row, columns}", "the table of core.increment has two axes");
}

/* States get names as soon as they are made, and the updates of the others are recorded. */
static void adopt(lua_State *L, const increment_call *call, uint32_t first) {
    const ml_kept_list *list = &call->kept->list;
    for (uint32_t i = first; i < list->count; i++) {
        const ml_origin *origin = ml_graph_origin(call->graph, list->at[i].node);
        lua_pushfstring(L, "kept.%d.%d%s%s", (int)call->kept->number, (int)i + 1,
                        origin->module[0] ? "." : "", origin->module);
        vm_adopt_state(L, list->at[i].state, lua_gettop(L));
        lua_pop(L, 2);
    }
    for (uint32_t i = 0; i < call->out.updates.count; i++) {
        vm_push_state(L, call->out.updates.at[i].state);
        lua_getfield(L, -1, "assign");
        lua_insert(L, -2);
        vm_push_tensor(L, call->out.updates.at[i].value);
        lua_call(L, 2, 0);
    }
}

static void run_call(lua_State *L, increment_call *call) {
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_settop(L, 2);
    read_fields(L, call);
    if (!call->gives) check_fields(L, call);
    uint32_t first = call->kept->list.count;
    vm_origin(L, &call->origin);
    vm_protect(L, derive, call);
    adopt(L, call, first);
}

static int core_increment(lua_State *L) {
    increment_call call = {.graph = vm_of(L)->graph};
    run_call(L, &call);
    return vm_push_tensor(L, call.out.logits);
}

static int core_increment_give(lua_State *L) {
    increment_call call = {.graph = vm_of(L)->graph, .gives = true};
    run_call(L, &call);
    return 0;
}

static int core_bytes_text(lua_State *L) {
    char text[64];
    vm_format_bytes(text, sizeof text, luaL_checkinteger(L, 1));
    lua_pushstring(L, text);
    return 1;
}

/* Names of the parameters of a Lua function. */
static int core_parameters(lua_State *L) {
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    lua_newtable(L);
    lua_insert(L, 1);
    const char *name; /* of the function on top */
    for (int i = 1; (name = lua_getlocal(L, NULL, i)) != NULL; i++) {
        lua_pushstring(L, name);
        lua_rawseti(L, 1, i);
    }
    lua_settop(L, 1);
    return 1;
}

static const vm_entry functions[] = {
    {"increment", core_increment, "logits: Tensor, options: table -> Tensor",
     "the logits of the new positions of several sequences, from those of a whole program over one "
     "sequence: {tokens=, seq=, kept=, new=, start=, count=, slots=, table=, slots_max=, pool=, "
     "block=, last=, given= inputs of the whole program that a prompt gives, new_max= the most new "
     "positions of the programs that share kept, where windows are held in rings}. States are "
     "assigned as state:assign does"},
    {"increment_give", core_increment_give, "logits: Tensor, options: table",
     "assigns what increments read of the inputs that a prompt gives to its slot, the one of "
     "`slots`: {tokens=, seq=, kept=, slots=, slots_max=, given=}"},
    {"bytes_text", core_bytes_text, "bytes: integer -> string", "12.5 MiB"},
    {"parameters", core_parameters, "f: function -> string[]",
     "the names of a Lua function's parameters"},
    {"increment_states", core_increment_states, "-> Kept",
     "the states of increments, which programs of one model share"},
    {0}};
static const vm_entry methods[] = {
    {"list", kept_list, "-> table[]",
     "what is kept: {name=, kind=\"pool\"|\"ring\"|\"slot\", dtype=, axes=, bytes= (of a position, "
     "or of a ring or slot of a sequence), ring= its positions, module=, file=, line=, state=}"},
    {0}};

void vm_increment_register(lua_State *L) {
    vm_register(L, functions);
    vm_new_class(L, kept_class, methods, NULL, kept_gc);
    lua_pop(L, 1);
}
