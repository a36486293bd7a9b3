#include "vm/repl/repl.h"

#include "vm/bindings/precision.h"
#include "vm/check/traffic.h"

#include <ctype.h>
#include <histedit.h>
#include <stdlib.h>
#include <string.h>

/* ---- Printing -------------------------------------------------------------------------------- */

enum { SHOWN_ITEMS = 24, SHOWN_NAMES = 200 };

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

/* A value on one line, as an item of a table. */
static void print_short(lua_State *L, int index) {
    if (lua_type(L, index) == LUA_TSTRING) {
        lua_getglobal(L, "string");
        lua_getfield(L, -1, "format");
        lua_pushliteral(L, "%q");
        lua_pushvalue(L, index);
        lua_call(L, 2, 1);
        printf("%s", lua_tostring(L, -1));
        lua_pop(L, 2);
    } else if (lua_type(L, index) == LUA_TTABLE && !luaL_getmetafield(L, index, "__tostring")) {
        printf("{...}");
    } else {
        if (lua_type(L, index) == LUA_TTABLE) lua_pop(L, 1);
        printf("%s", luaL_tolstring(L, index, NULL));
        lua_pop(L, 1);
    }
}

static int compare_names(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

/* Replace the set at the top by its sorted list. */
void repl_sort_names(lua_State *L) {
    int set = lua_gettop(L), count = 0;
    lua_pushnil(L);
    while (lua_next(L, set)) lua_pop(L, 1), count++;
    const char **list = lua_newuserdatauv(L, (size_t)(count + 1) * sizeof *list, 0);
    int at = 0;
    lua_pushnil(L);
    while (lua_next(L, set)) {
        lua_pop(L, 1);
        if (lua_type(L, -1) == LUA_TSTRING)
            list[at++] = lua_tostring(L, -1); /* the set references it */
    }
    qsort(list, (size_t)at, sizeof *list, compare_names);
    lua_createtable(L, at, 0);
    for (int i = 0; i < at; i++) {
        lua_pushstring(L, list[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_replace(L, set);
    lua_settop(L, set);
}

static int get_field(lua_State *L) {
    lua_gettable(L, 1);
    return 1;
}

/* The items of a table: the list first, then its names in order, then all other keys. */
static void print_table(lua_State *L, int index) {
    int shown = 0;
    lua_Integer length = (lua_Integer)lua_rawlen(L, index);
    printf("{");
    for (lua_Integer i = 1; i <= length && shown < SHOWN_ITEMS; i++) {
        printf(shown++ ? ", " : "");
        lua_rawgeti(L, index, i);
        print_short(L, lua_gettop(L));
        lua_pop(L, 1);
    }
    int others = 0;
    lua_pushnil(L);
    while (lua_next(L, index)) {
        lua_pop(L, 1);
        others += lua_type(L, -1) != LUA_TSTRING;
    }
    lua_newtable(L);
    int names = lua_gettop(L);
    repl_add_fields(L, names, index);
    repl_sort_names(L);
    lua_Integer count = (lua_Integer)lua_rawlen(L, names);
    for (lua_Integer i = 1; i <= count && shown < SHOWN_ITEMS; i++) {
        printf(shown++ ? ", " : "");
        lua_pushcfunction(L, get_field);
        lua_pushvalue(L, index);
        lua_rawgeti(L, names, i);
        printf("%s = ", lua_tostring(L, -1));
        if (lua_pcall(L, 2, 1, 0) == LUA_OK)
            print_short(L, lua_gettop(L));
        else
            printf("?");
        lua_pop(L, 1);
    }
    if (others > length || shown < length + count) printf(shown ? ", ..." : "...");
    printf("}\n");
    lua_pop(L, 1);
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
    } else if (lua_type(L, index) == LUA_TTABLE &&
               luaL_getmetafield(L, index, "__tostring") == LUA_TNIL) {
        print_table(L, index);
    } else {
        if (lua_type(L, index) == LUA_TTABLE) lua_pop(L, 1);
        print_short(L, index);
        printf("\n");
    }
}

/* ---- Completion ------------------------------------------------------------------------------ */

static bool is_name(int c) {
    return isalnum(c) || c == '_';
}

/* Whether the text ends inside a string; sets where that string's content begins. */
static bool in_string(const char *text, size_t length, size_t *start) {
    int quote = 0;
    for (size_t i = 0; i < length; i++) {
        if (quote && text[i] == '\\')
            i++;
        else if (quote ? text[i] == quote : text[i] == '"' || text[i] == '\'')
            quote = quote ? 0 : text[i], *start = i + 1;
    }
    return quote != 0;
}

static void add_name(lua_State *L, int names, const char *name, const char *prefix, size_t length) {
    if (strncmp(name, prefix, length) != 0) return;
    lua_pushboolean(L, 1);
    lua_setfield(L, names, name);
}

/* Names that the table at `table` has as keys. */
static void add_keys(lua_State *L, int names, int table, const char *prefix, size_t length) {
    table = lua_absindex(L, table);
    lua_pushnil(L);
    while (lua_next(L, table)) {
        lua_pop(L, 1);
        if (lua_type(L, -1) == LUA_TSTRING) add_name(L, names, lua_tostring(L, -1), prefix, length);
    }
}

/* Methods of userdata are in the upvalue of __index, or are __index itself. */
static void add_methods(lua_State *L, int names, int value, const char *prefix, size_t length) {
    value = lua_absindex(L, value);
    if (!lua_getmetatable(L, value)) return;
    lua_getfield(L, -1, "__index");
    if (lua_iscfunction(L, -1) && lua_getupvalue(L, -1, 1)) lua_replace(L, -2);
    if (lua_istable(L, -1)) add_keys(L, names, -1, prefix, length);
    lua_pop(L, 2);
    if (!vm_is_tensor(L, value)) return;
    lua_getfield(L, LUA_REGISTRYINDEX, "mlua.tensor_methods");
    add_keys(L, names, -1, prefix, length);
    lua_pop(L, 1);
}

void repl_add_methods(lua_State *L, int names, int value) {
    add_methods(L, names, value, "", 0);
}

static int list_pairs(lua_State *L) {
    luaL_getmetafield(L, 1, "__pairs");
    lua_pushvalue(L, 1);
    lua_call(L, 1, 3);
    int names = 2;
    for (;;) {
        lua_pushvalue(L, -3);
        lua_pushvalue(L, -3);
        lua_pushvalue(L, -3);
        lua_call(L, 2, 1);
        if (lua_isnil(L, -1)) return 0;
        if (lua_type(L, -1) == LUA_TSTRING) {
            lua_pushvalue(L, -1);
            lua_pushboolean(L, 1);
            lua_settable(L, names);
        }
        lua_replace(L, -2);
    }
}

void repl_add_fields(lua_State *L, int names, int value) {
    int top = lua_gettop(L);
    if (luaL_getmetafield(L, value, "__pairs") != LUA_TNIL) {
        lua_pushcfunction(L, list_pairs);
        lua_pushvalue(L, value);
        lua_pushvalue(L, names);
        lua_pcall(L, 2, 0, 0);
    } else {
        add_keys(L, names, value, "", 0);
    }
    lua_settop(L, top);
}

/* Push the value of "a.b" before the last '.' or ':'; false where there is none. */
static bool push_object(lua_State *L, const char *path, size_t length) {
    lua_pushglobaltable(L);
    while (length) {
        size_t end = 0;
        while (end < length && is_name((unsigned char)path[end])) end++;
        if (!end) return false;
        lua_pushcfunction(L, get_field);
        lua_insert(L, -2);
        lua_pushlstring(L, path, end);
        if (lua_pcall(L, 2, 1, 0) != LUA_OK || lua_isnil(L, -1)) return false;
        path += end;
        length -= end;
        if (length) path++, length--;
    }
    return true;
}

static void add_axes(lua_State *L, int names, const char *prefix, size_t length) {
    const ml_vm *vm = vm_of(L);
    for (uint32_t i = 0; i < vm->sites.count; i++)
        add_name(L, names, ml_axis_name(vm->graph, vm->sites.at[i].axis), prefix, length);
}

static void add_words(lua_State *L, int names, const char *prefix, size_t length) {
    static const char *const words[] = {"and",   "break", "do",       "else", "elseif", "end",
                                        "false", "for",   "function", "goto", "if",     "in",
                                        "local", "nil",   "not",      "or",   "repeat", "return",
                                        "then",  "true",  "until",    "while"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        add_name(L, names, words[i], prefix, length);
    lua_pushglobaltable(L);
    add_keys(L, names, -1, prefix, length);
    lua_pop(L, 1);
}

size_t repl_candidates(lua_State *L, const char *text, size_t length) {
    luaL_checkstack(L, 24, "completion");
    lua_newtable(L);
    int names = lua_gettop(L);
    size_t start = length, content;
    if (text[0] == ':' && text[1] != ':' && !memchr(text, ' ', length)) {
        for (int i = 0; repl_command_name(i); i++)
            add_name(L, names, repl_command_name(i), text + 1, length - 1);
        repl_sort_names(L);
        return length - 1;
    }
    if (in_string(text, length, &content)) {
        add_axes(L, names, text + content, length - content);
        repl_sort_names(L);
        return length - content;
    }
    while (start && is_name((unsigned char)text[start - 1])) start--;
    size_t object = start;
    while (object && (is_name((unsigned char)text[object - 1]) || text[object - 1] == '.' ||
                      text[object - 1] == ':'))
        object--;
    if (object == start) {
        add_words(L, names, text + start, length - start);
    } else if (push_object(L, text + object, start - 1 - object)) {
        int value = lua_gettop(L);
        if (lua_istable(L, value)) add_keys(L, names, value, text + start, length - start);
        add_methods(L, names, value, text + start, length - start);
        if (luaL_getmetafield(L, value, "__pairs") != LUA_TNIL) {
            lua_pushcfunction(L, list_pairs);
            lua_pushvalue(L, value);
            lua_newtable(L);
            lua_pushvalue(L, -1);
            lua_insert(L, value);
            lua_pcall(L, 2, 0, 0);
            add_keys(L, names, value, text + start, length - start);
        }
    }
    lua_settop(L, names);
    repl_sort_names(L);
    return length - start;
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
