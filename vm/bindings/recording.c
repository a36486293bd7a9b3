/* Recordings in Lua: what a function of the library made of its arguments, made again for others of
 * the same types (runtime/graph/recording.h). What it assigns to states is assigned again, too. */
#include "runtime/graph/recording.h"

#include "vm/vm.h"

enum { MOST_LEAVES = 32, MOST_ASSIGNED = 16, MOST_RESULTS = 8 };

static const char *const recording_class = "recording";

typedef struct {
    uint32_t state;
    ml_ref given, value; /* before and after it was brought to the state's dtype and axes */
} assignment;

struct vm_recording {
    ml_vm *vm;
    ml_recording *nodes; /* NULL: it cannot be repeated */
    assignment assigned[MOST_ASSIGNED];
    int leaves[MOST_ASSIGNED]; /* which leaf each of these states is */
    int assigned_count, results;
    bool closed;
};

static vm_recording *check_recording(lua_State *L) {
    return luaL_checkudata(L, 1, recording_class);
}

static void forget(vm_recording *r) {
    if (r->nodes) ml_recording_end(r->vm->graph, r->nodes);
    ml_recording_free(r->nodes);
    r->nodes = NULL;
}

static int recording_gc(lua_State *L) {
    forget(check_recording(L));
    return 0;
}

static int end_recording(lua_State *L) {
    vm_recording *r = check_recording(L);
    if (r->vm->recording == r) r->vm->recording = NULL;
    if (r->nodes) ml_recording_end(r->vm->graph, r->nodes);
    return 0;
}

static void open_recording(void *argument) {
    vm_recording *r = argument;
    r->nodes = ml_recording_open(r->vm->graph);
}

/* core.record(fn, ...) */
static int core_record(lua_State *L) {
    luaL_checkany(L, 1);
    vm_recording *r = lua_newuserdatauv(L, sizeof *r, 0);
    *r = (vm_recording){.vm = vm_of(L)};
    luaL_setmetatable(L, recording_class);
    lua_insert(L, 1);
    lua_toclose(L, 1); /* errors end it, too */
    vm_protect(L, open_recording, r);
    if (r->nodes) r->vm->recording = r;
    lua_pushvalue(L, 1);
    lua_insert(L, 2); /* the result; then fn and its arguments */
    lua_call(L, lua_gettop(L) - 3, LUA_MULTRET);
    return lua_gettop(L) - 1;
}

void vm_record_assignment(vm_recording *r, uint32_t state, ml_ref given, ml_ref value) {
    if (r->assigned_count < MOST_ASSIGNED)
        r->assigned[r->assigned_count] = (assignment){state, given, value};
    r->assigned_count++;
}

/* ---- Leaves ---------------------------------------------------------------------------------- */

static ml_leaf read_leaf(lua_State *L, int index) {
    uint32_t state;
    if (lua_isinteger(L, index)) return (ml_leaf){ML_RECORDED_NUMBER, lua_tointeger(L, index)};
    if (vm_is_state(L, index, &state)) return (ml_leaf){ML_RECORDED_STATE, state};
    return (ml_leaf){ML_RECORDED_NODE, vm_tensor(L, index, "a leaf of a recording")};
}

/* Those from `first` on. */
static int read_leaves(lua_State *L, int first, ml_leaf *leaves) {
    const int count = lua_gettop(L) - first + 1;
    if (count > MOST_LEAVES)
        vm_fail(L, NULL, "a recording has at most %d leaves, not %d", MOST_LEAVES, count);
    for (int i = 0; i < count; i++) leaves[i] = read_leaf(L, first + i);
    return count;
}

typedef struct {
    ml_graph *graph;
    vm_recording *recording;
    ml_origin origin;
    ml_leaf leaves[MOST_LEAVES];
    int count, result_count;
    ml_ref results[MOST_RESULTS + MOST_ASSIGNED];
    const ml_ref *given;
    ml_type type;
    uint64_t key;
    bool done;
} leaf_call;

/* Its arrays are large: they are not cleared. */
static void begin(lua_State *L, leaf_call *call, vm_recording *recording) {
    call->graph = vm_of(L)->graph;
    call->recording = recording;
    call->count = call->result_count = 0;
    call->type = (ml_type){0};
    call->done = false;
}

static void find_key(void *argument) {
    leaf_call *call = argument;
    call->key = ml_leaves_key(call->graph, call->leaves, call->count);
}

static void find_type(void *argument) {
    leaf_call *call = argument;
    call->key = ml_type_key(call->graph, &call->type);
}

/* core.alike(leaf, ...), core.alike(axes) */
static int core_alike(lua_State *L) {
    leaf_call call;
    begin(L, &call, NULL);
    if (lua_istable(L, 1)) {
        vm_read_axes(L, 1, "the axes of a tensor", &call.type);
        vm_protect(L, find_type, &call);
        lua_pushinteger(L, (lua_Integer)call.key);
        return 1;
    }
    call.count = read_leaves(L, 1, call.leaves);
    vm_protect(L, find_key, &call);
    lua_pushinteger(L, (lua_Integer)call.key);
    return 1;
}

/* ---- Closing --------------------------------------------------------------------------------- */

/* Which leaf each state is that was assigned. A leaf itself may be another node's copy in another
 * order of axes, in whose place that node is assigned. */
static bool find_assigned(leaf_call *call) {
    vm_recording *r = call->recording;
    if (r->assigned_count > MOST_ASSIGNED) return false;
    for (int i = 0; i < r->assigned_count; i++) {
        const assignment *a = &r->assigned[i];
        r->leaves[i] = -1;
        for (int k = 0; k < call->count; k++) {
            const ml_leaf *leaf = &call->leaves[k];
            if (leaf->kind == ML_RECORDED_STATE && leaf->value == a->state) r->leaves[i] = k;
            if (leaf->kind == ML_RECORDED_NODE && (ml_ref)leaf->value == a->given) return false;
        }
        if (r->leaves[i] < 0) return false;
        call->results[call->result_count++] = a->value;
    }
    return true;
}

static void close_recording(void *argument) {
    leaf_call *call = argument;
    call->done =
        find_assigned(call) && ml_recording_close(call->graph, call->recording->nodes, call->leaves,
                                                  call->count, call->results, call->result_count);
}

/* recording:close(results, leaf, ...) */
static int recording_close(lua_State *L) {
    vm_recording *r = check_recording(L);
    leaf_call call;
    begin(L, &call, r);
    luaL_checktype(L, 2, LUA_TTABLE);
    call.count = read_leaves(L, 3, call.leaves);
    const int64_t results = vm_table_length(L, 2);
    if (results > MOST_RESULTS)
        vm_fail(L, NULL, "a recording has at most %d results, not %d", MOST_RESULTS, (int)results);
    for (int i = 0; i < results; i++) {
        lua_rawgeti(L, 2, i + 1);
        call.results[call.result_count++] = vm_tensor(L, -1, "a result of a recording");
        lua_pop(L, 1);
    }
    r->results = (int)results;
    if (r->nodes && !r->closed) vm_protect(L, close_recording, &call);
    r->closed = call.done;
    if (!r->closed) forget(r);
    lua_pushboolean(L, r->closed);
    return 1;
}

/* ---- Repeating ------------------------------------------------------------------------------- */

static void repeat(void *argument) {
    leaf_call *call = argument;
    call->done = ml_recording_fits(call->graph, call->recording->nodes, call->leaves, call->count);
    if (!call->done) return;
    ml_graph_set_origin(call->graph, &call->origin);
    call->given = ml_recording_repeat(call->graph, call->recording->nodes, call->leaves);
}

/* recording:again(leaf, ...) */
static int recording_again(lua_State *L) {
    const ml_vm *vm = vm_of(L);
    vm_recording *r = check_recording(L);
    leaf_call call;
    begin(L, &call, r);
    call.count = read_leaves(L, 2, call.leaves);
    if (r->closed && (r->assigned_count == 0 || (vm->traces && !vm->scanning))) {
        vm_origin(L, &call.origin);
        vm_protect(L, repeat, &call);
    }
    lua_pushboolean(L, call.done);
    if (!call.done) return 1;
    for (int i = 0; i < r->results; i++) vm_push_tensor(L, call.given[i]);
    for (int i = 0; i < r->assigned_count; i++)
        vm_add_update(L, (uint32_t)call.leaves[r->leaves[i]].value, call.given[r->results + i]);
    return 1 + r->results;
}

static const vm_entry functions[] = {
    {"record", core_record, "fn: function, ...: any -> Recording, any",
     "call fn(...), and note the nodes that it makes and the states that it assigns: fn is of the "
     "library, and makes them by the types of its arguments alone"},
    {"alike", core_alike, "...: Tensor|State|integer|Axis[] -> integer",
     "equal for equal lists of types, or of axes, and likely for no others"},
    {0}};
static const vm_entry methods[] = {
    {"close", recording_close, "results: Tensor[], ...: Tensor|State|integer -> boolean",
     "say which of the results, and which leaves differ the next time: all states that were "
     "assigned are among them, and the integers that are keys of random numbers; whether it can be "
     "repeated"},
    {"again", recording_again, "...: Tensor|State|integer -> boolean, Tensor",
     "the same for other leaves, and the results; false alone where these are of other types"},
    {0}};

void vm_recording_register(lua_State *L) {
    vm_register(L, functions);
    vm_new_class(L, recording_class, methods, NULL, recording_gc);
    lua_pop(L, 1);
    luaL_getmetatable(L, recording_class);
    vm_set_function(L, "__close", end_recording);
    lua_pop(L, 1);
}
