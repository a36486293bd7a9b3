/* What decoding makes of a model's logits: by weights of 8 bits (runtime/ops/quantize/weights.h),
 * of which there is one list for each dtype; in f32 (runtime/graph/wide.h). */
#include "runtime/ops/quantize/weights.h"

#include "runtime/graph/wide.h"

#include "vm/vm.h"

static const char *const lists_key = "mlua.weights"; /* registry: dtype -> list */
static const char *const list_class = "mlua.weight_list";

static int list_gc(lua_State *L) {
    ml_weight_list *list = luaL_checkudata(L, 1, list_class);
    if (list->arena) ml_arena_free(list->arena);
    *list = (ml_weight_list){0};
    return 0;
}

static ml_weight_list *list_of(lua_State *L, int index) {
    const ml_dtype dtype = vm_dtype(L, index, -1);
    if (dtype != ML_I8 && dtype != ML_E4M3)
        vm_fail(L, "i8 or e4m3", "weights of 8 bits cannot be %s", ml_dtypes[dtype].name);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, lists_key);
    if (lua_rawgeti(L, -1, dtype) == LUA_TNIL) {
        ml_weight_list *list = lua_newuserdatauv(L, sizeof *list, 0);
        *list = (ml_weight_list){.dtype = dtype};
        luaL_setmetatable(L, list_class);
        list->arena = ml_arena_new();
        if (!list->arena) vm_fail(L, NULL, "not enough host memory");
        lua_rawseti(L, -3, dtype);
        lua_pop(L, 2);
        return list;
    }
    ml_weight_list *list = lua_touserdata(L, -1);
    lua_pop(L, 2);
    return list;
}

typedef struct {
    ml_graph *graph;
    ml_origin origin;
    ml_ref logits;
    ml_weight_list *list;
} narrow_call;

static void narrow(void *argument) {
    narrow_call *call = argument;
    ml_arena *scratch = ml_arena_new();
    if (!scratch) ml_raise(ML_NO_MEMORY, "not enough host memory");
    call->logits = ml_weights_narrow(call->graph, call->logits, call->list, scratch);
    ml_arena_free(scratch);
    ml_graph_set_origin(call->graph, &call->origin);
}

static void widen(void *argument) {
    narrow_call *call = argument;
    call->logits = ml_wide(call->graph, call->logits);
}

static int core_wide_logits(lua_State *L) {
    narrow_call call = {.graph = vm_of(L)->graph, .logits = vm_tensor(L, 1, "the logits")};
    vm_protect(L, widen, &call);
    return vm_push_tensor(L, call.logits);
}

static void name_state(lua_State *L, uint32_t state, uint32_t parameter, const char *suffix) {
    const char *name = ml_graph_state(vm_of(L)->graph, parameter)->name;
    lua_pushfstring(L, "%s in %s", name ? name : "a parameter", suffix);
    vm_adopt_state(L, state, lua_gettop(L));
    lua_pop(L, 2);
}

static int core_narrow_weights(lua_State *L) {
    narrow_call call = {.graph = vm_of(L)->graph, .logits = vm_tensor(L, 1, "the logits")};
    call.list = list_of(L, 2);
    uint32_t first = call.list->count;
    vm_origin(L, &call.origin);
    vm_protect(L, narrow, &call);
    for (uint32_t i = first; i < call.list->count; i++) {
        const ml_weight *weight = &call.list->at[i];
        const char *dtype = ml_dtypes[call.list->dtype].name;
        name_state(L, weight->values, weight->parameter, dtype);
        lua_pushfstring(L, "%s, scales", dtype);
        name_state(L, weight->scales, weight->parameter, lua_tostring(L, -1));
        lua_pop(L, 1);
    }
    return vm_push_tensor(L, call.logits);
}

/* Values of all weights from those of their parameters, some at a time, so that `frees` leaves
 * little beside what is kept. */
static int core_fill_weights(lua_State *L) {
    enum { AT_ONCE = 1 << 28 }; /* bytes of parameters */
    const ml_weight_list *list = list_of(L, 1);
    const bool frees = lua_toboolean(L, 2);
    ml_vm *vm = vm_of(L);
    int64_t before = 0, after = 0;
    uint32_t *states = lua_newuserdatauv(L, sizeof *states * (2 * (size_t)list->count + 1), 0);
    for (uint32_t begin = 0, end; begin < list->count; begin = end) {
        int64_t bytes = 0;
        uint32_t count = 0;
        for (end = begin; end < list->count && (end == begin || bytes < AT_ONCE); end++) {
            const ml_weight *weight = &list->at[end];
            states[count++] = weight->values, states[count++] = weight->scales;
            bytes += ml_type_bytes(&ml_graph_state(vm->graph, weight->parameter)->type);
        }
        before += bytes;
        for (uint32_t i = 0; i < count; i++)
            after += ml_type_bytes(&ml_graph_state(vm->graph, states[i])->type);
        if (vm->dry.runs) continue;
        vm_check(L, ml_session_initialize_states(vm->session, states, count));
        for (uint32_t i = begin; frees && i < end; i++)
            ml_session_free_state(vm->session, list->at[i].parameter);
    }
    lua_pushinteger(L, before);
    lua_pushinteger(L, after);
    return 2;
}

static const vm_entry functions[] = {
    {"wide_logits", core_wide_logits, "logits: Tensor -> Tensor",
     "the same in f32: the sums of their product are not rounded to the compute dtype"},
    {"narrow_weights", core_narrow_weights, "logits: Tensor, dtype: string -> Tensor",
     "logits by products that read their weights as i8 or e4m3 with a scale for each output"},
    {"fill_weights", core_fill_weights, "dtype: string, frees?: boolean -> integer, integer",
     "values for these weights from the parameters, which are freed where no program reads them; "
     "bytes of the parameters and of what stands for them"},
    {0}};

void vm_weights_register(lua_State *L) {
    static const vm_entry none[] = {{0}};
    vm_register(L, functions);
    vm_new_class(L, list_class, none, NULL, list_gc);
    lua_pop(L, 1);
}
