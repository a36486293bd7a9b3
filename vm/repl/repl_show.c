#include "vm/repl/repl.h"

#include "vm/bindings/precision.h"
#include "vm/check/traffic.h"

#include <histedit.h>

/* ---- Printing -------------------------------------------------------------------------------- */

enum { SHOWN_NAMES = 200 };

static void print_bytes(int64_t bytes) {
    char text[64];
    vm_format_bytes(text, sizeof text, bytes);
    printf("  %s", text);
}

static void print_origin(const ml_origin *origin) {
    if (origin && origin->file) printf("  from %s:%d", origin->file, origin->line);
}

static void print_tensor(lua_State *L, ml_ref n) {
    const ml_graph *g = vm_of(L)->graph;
    const ml_type *type = ml_graph_type(g, n);
    double value;
    const char *wide = precision_is_wide(L, g, n) ? "  a product in f32" : "";
    if (traffic_print_tensor(L, n)) {
        printf("%s", wide);
        print_origin(ml_graph_origin(g, n));
        printf("\n");
        return;
    }
    vm_push_type(L, g, type);
    printf("%s", lua_tostring(L, -1));
    lua_pop(L, 1);
    if (type->rank == 0 && ml_graph_constant(g, n, &value)) printf(" = %.14g", value);
    printf("%s", wide);
    print_bytes(ml_type_bytes(type));
    print_origin(ml_graph_origin(g, n));
    printf("\n");
}

static void print_state(lua_State *L, uint32_t id) {
    static const char *const kinds[] = {"parameter", "optimizer state", "gradient sum", "state"};
    const ml_graph *g = vm_of(L)->graph;
    const ml_state *state = ml_graph_state(g, id);
    printf("%s %s%s", kinds[state->kind], state->name ? state->name : "", state->name ? " " : "");
    if (!traffic_print_tensor(L, vm_state_node(L, id))) {
        vm_push_type(L, g, &state->type);
        printf("%s", lua_tostring(L, -1));
        lua_pop(L, 1);
        print_bytes(ml_type_bytes(&state->type));
    }
    print_origin(&state->origin);
    printf("\n");
}

void repl_print(lua_State *L, int index) {
    luaL_checkstack(L, 16, "printing");
    index = lua_absindex(L, index);
    uint32_t id;
    if (vm_is_class(L, index, vm_tensor_class)) {
        print_tensor(L, *(ml_ref *)lua_touserdata(L, index));
    } else if (vm_is_state(L, index, &id)) {
        print_state(L, id);
    } else if (lua_isfunction(L, index)) {
        repl_print_help(L, index);
    } else {
        vm_push_library(L, "mlua.prompt", "write");
        lua_pushvalue(L, index);
        lua_call(L, 1, 0);
    }
}

/* ---- Completion ------------------------------------------------------------------------------ */

size_t repl_candidates(lua_State *L, const char *text, size_t length) {
    vm_push_library(L, "mlua.prompt", "candidates");
    lua_pushlstring(L, text, length);
    lua_newtable(L);
    for (int i = 0; repl_command_name(i); i++) {
        lua_pushstring(L, repl_command_name(i));
        lua_rawseti(L, -2, i + 1);
    }
    lua_pushglobaltable(L);
    lua_call(L, 3, 2);
    size_t part = (size_t)lua_tointeger(L, -1);
    lua_pop(L, 1);
    return part;
}

bool repl_complete(lua_State *L, EditLine *edit, const char *text, size_t length) {
    int top = lua_gettop(L);
    size_t part = repl_candidates(L, text, length);
    int list = lua_gettop(L);
    lua_Integer count = (lua_Integer)lua_rawlen(L, list);
    bool show = false;
    if (count) {
        lua_rawgeti(L, list, 1);
        lua_rawgeti(L, list, count);
        const char *first = lua_tostring(L, -2), *last = lua_tostring(L, -1);
        size_t common = 0; /* of a sorted list: that of its ends */
        while (first[common] && first[common] == last[common]) common++;
        if (common > part) {
            lua_pushlstring(L, first + part, common - part);
            el_insertstr(edit, lua_tostring(L, -1));
        } else {
            show = count > 1;
        }
    }
    if (show) {
        printf("\n");
        for (lua_Integer i = 1; i <= count && i <= SHOWN_NAMES; i++) {
            lua_rawgeti(L, list, i);
            printf("%s  ", lua_tostring(L, -1));
            lua_pop(L, 1);
        }
        printf(count > SHOWN_NAMES ? "...\n" : "\n");
        fflush(stdout);
    }
    lua_settop(L, top);
    return show;
}
