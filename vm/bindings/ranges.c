/* The ranges of a program's inputs: found when it is compiled, checked whenever it is fed. */
#include "vm/vm.h"

typedef struct {
    const ml_graph *graph;
    const ml_index_uses *declared;
    vm_program *program;
} find_call;

static void find(void *argument) {
    find_call *call = argument;
    ml_find_input_ranges(call->graph, &call->program->roots, call->declared, call->program->arena,
                         &call->program->ranges);
}

void vm_find_ranges(lua_State *L, vm_program *program) {
    ml_vm *vm = vm_of(L);
    find_call call = {vm->graph, &vm->index_uses, program};
    if (program->input_count == 0) return;
    program->arena = ml_arena_new();
    if (!program->arena) vm_fail(L, NULL, "not enough host memory for a program");
    vm_protect(L, find, &call);
}

/* ---- Messages -------------------------------------------------------------------------------- */

static void add_integer(luaL_Buffer *b, const char *before, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    luaL_addstring(b, before);
    luaL_addstring(b, text);
}

const char *vm_push_place(lua_State *L, const ml_type *type, int64_t i) {
    int64_t at[ML_MAX_AXES], rest = i;
    for (int k = type->rank; k-- > 0; rest /= type->size[k]) at[k] = rest % type->size[k];
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    if (type->rank) add_integer(&b, ": element ", i + 1);
    for (int k = 0; k < type->rank; k++) {
        luaL_addstring(&b, k ? ", " : " (");
        luaL_addstring(&b, ml_axis_name(vm_of(L)->graph, type->axis[k]));
        add_integer(&b, " ", at[k] + 1);
    }
    if (type->rank) luaL_addstring(&b, "; counted from 1)");
    luaL_pushresult(&b);
    return lua_tostring(L, -1);
}

/* Push "0 to 255", with what is left out. */
static const char *push_allowed(lua_State *L, const ml_index_use *use) {
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    add_integer(&b, "0 to ", use->size - 1);
    if (use->ignores && (use->ignored < 0 || use->ignored >= use->size)) {
        add_integer(&b, ", and ", use->ignored);
        luaL_addstring(&b, " for what is ignored");
    }
    luaL_pushresult(&b);
    return lua_tostring(L, -1);
}

/* Push where the op is: " at gpt.lua:12", and that line's text below the message; both may be
 * empty.
 */
static void push_origin(lua_State *L, ml_ref node, const char **where, const char **line) {
    const ml_origin *origin = ml_graph_origin(vm_of(L)->graph, node);
    *where = *line = "";
    if (!origin || !origin->file) return;
    *where = lua_pushfstring(L, " at %s:%d", origin->file, origin->line);
    vm_push_line(L, origin->file, origin->line);
    if (!lua_isstring(L, -1)) return;
    char number[32];
    snprintf(number, sizeof number, "%5d", origin->line);
    *line = lua_pushfstring(L, "\n%s | %s", number, lua_tostring(L, -1));
}

static const char *push_help(lua_State *L, const ml_index_use *use, int64_t negative) {
    if (negative && use->ignores)
        return lua_pushfstring(L,
                               "{ignore = %I} in cross_entropy's options leaves such targets out",
                               (LUAI_UACINT)negative);
    if (negative)
        return "ids count from 0; for padding, feed any id in range and mask the result by m.where";
    return "a larger axis, or ids of the tokenizer that the model is for; ids count from 0";
}

static _Noreturn void out_of_range(lua_State *L, const ml_input_range *range, const char *name,
                                   const ml_type *type, int64_t i, const void *data) {
    const ml_index_use *use = &range->use;
    const char *where, *line;
    luaL_checkstack(L, 40, "an error");
    vm_push_element(L, (ml_dtype)type->dtype, data, i);
    bool none = lua_tonumber(L, -1) != lua_tonumber(L, -1); /* "nan" whatever its sign bit is */
    int64_t negative = lua_isinteger(L, -1) ? lua_tointeger(L, -1) : -(lua_tonumber(L, -1) < 0);
    const char *value = none ? "nan" : luaL_tolstring(L, -1, NULL);
    push_origin(L, use->node, &where, &line);
    vm_fail(L, push_help(L, use, negative < 0 ? negative : 0), "%s%s is %s, and %s%s takes %s%s",
            name, vm_push_place(L, type, i), value, use->what, where, push_allowed(L, use), line);
}

void vm_check_range_of(lua_State *L, const vm_program *program, uint32_t input, const char *name,
                       const ml_type *type, const void *data) {
    for (uint32_t k = 0; k < program->ranges.count; k++) {
        const ml_input_range *range = &program->ranges.at[k];
        if (range->input != input) continue;
        int64_t i =
            ml_first_out_of_range(range, (ml_dtype)type->dtype, data, ml_type_elements(type));
        if (i >= 0) out_of_range(L, range, name, type, i, data);
    }
}

void vm_check_range(lua_State *L, const vm_program *program, uint32_t input, const void *data) {
    const ml_input *fed = ml_graph_input(vm_of(L)->graph, input);
    const char *name = lua_pushfstring(L, "input \"%s\"", fed->name);
    vm_check_range_of(L, program, input, name, &fed->type, data);
    lua_pop(L, 1);
}

/* ---- Declarations ---------------------------------------------------------------------------- */

typedef struct {
    ml_vm *vm;
    ml_index_use use;
} declare_call;

static void declare(void *argument) {
    declare_call *call = argument;
    *ML_PUSH(call->vm->arena, &call->vm->index_uses) = call->use;
}

static int core_declare_index(lua_State *L) {
    declare_call call = {.vm = vm_of(L)};
    call.use.node = vm_tensor(L, 1, "the result");
    call.use.index = vm_tensor(L, 2, "the index");
    call.use.size = vm_integer(L, 3, "the size");
    call.use.what = vm_intern(L, luaL_checkstring(L, 4));
    call.use.ignores = !lua_isnoneornil(L, 5);
    if (call.use.ignores) call.use.ignored = vm_integer(L, 5, "what is ignored");
    vm_protect(L, declare, &call);
    return 0;
}

void vm_ranges_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"declare_index", core_declare_index,
         "result: Tensor, index: Tensor, size: integer, what: string, ignored?: integer",
         "the result takes the values of the index as positions below size, or the ignored one; "
         "where they come from a program's input, others are an error before the program runs"},
        {0}};
    vm_register(L, functions);
}
