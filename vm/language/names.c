/* What a script calls a tensor: found from the text of the failing line and the frame's variables.
 */
#include "vm/vm.h"

#include <ctype.h>
#include <string.h>

/* Whether the value at `index` is the tensor n, or the state that n reads. */
static bool matches(lua_State *L, int index, ml_ref n) {
    const ml_graph *g = vm_of(L)->graph;
    if (vm_is_class(L, index, vm_tensor_class)) return *(ml_ref *)lua_touserdata(L, index) == n;
    uint32_t id;
    if (!vm_is_state(L, index, &id)) return false;
    const ml_node *node = ml_graph_node(g, n);
    if (node->op == ML_OP_CAST) n = ml_graph_source(g, n, 0), node = ml_graph_node(g, n);
    return node->op == ML_OP_STATE && ml_graph_args(g, n)[0] == (int64_t)id;
}

/* Push the variable `name` that the frame sees: a local, an upvalue or a global; false where there
 * is none, which pushes nil. */
static bool push_variable(lua_State *L, const lua_Debug *frame, const char *name) {
    lua_Debug ar = *frame;
    int found = 0;
    const char *local;
    for (int i = 1; (local = lua_getlocal(L, &ar, i)) != NULL; i++) {
        lua_pop(L, 1);
        if (strcmp(local, name) == 0) found = i; /* the last declared is the one in scope */
    }
    if (found) return lua_getlocal(L, &ar, found) != NULL;
    lua_getinfo(L, "f", &ar);
    int function = lua_gettop(L);
    for (int i = 1; (local = lua_getupvalue(L, function, i)) != NULL; i++) {
        if (strcmp(local, name) == 0) {
            lua_remove(L, function);
            return true;
        }
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
    vm_raw_global(L, name);
    return !lua_isnil(L, -1);
}

static int get_field(lua_State *L) {
    lua_gettable(L, 1);
    return 1;
}

/* Replace the table on top by its field; fields of modules are read by metamethods, which may fail.
 */
static bool follow(lua_State *L, const char *field, size_t length) {
    if (lua_type(L, -1) != LUA_TTABLE) return false;
    lua_pushcfunction(L, get_field);
    lua_insert(L, -2);
    lua_pushlstring(L, field, length);
    return lua_pcall(L, 2, 1, 0) == LUA_OK;
}

/* Try the chain of names at `text` ("self.wq"): pushes it if its value, or that of one of its
 * beginnings, is n. */
static bool try_chain(lua_State *L, const lua_Debug *frame, ml_ref n, const char *text,
                      size_t length) {
    int top = lua_gettop(L);
    size_t end = strcspn(text, ".");
    if (end > length) end = length;
    lua_pushlstring(L, text, end);
    push_variable(L, frame, lua_tostring(L, -1));
    for (;;) {
        if (matches(L, -1, n)) {
            lua_settop(L, top);
            lua_pushlstring(L, text, end);
            return true;
        }
        if (end >= length) break;
        size_t start = end + 1;
        end = start + strcspn(text + start, ".");
        if (end > length) end = length;
        if (!follow(L, text + start, end - start)) break;
    }
    lua_settop(L, top);
    return false;
}

bool vm_push_chain(lua_State *L, const lua_Debug *frame, const char *text, size_t length) {
    int top = lua_gettop(L);
    size_t end = 0;
    bool known = true;
    do {
        size_t start = end ? end + 1 : 0;
        end = start + strcspn(text + start, ".");
        if (end > length) end = length;
        if (start) {
            known = follow(L, text + start, end - start);
        } else {
            lua_pushlstring(L, text, end);
            known = push_variable(L, frame, lua_tostring(L, -1));
        }
    } while (known && end < length);
    if (known) lua_replace(L, top + 1);
    lua_settop(L, known ? top + 1 : top);
    return known;
}

static bool is_word(int c) {
    return isalnum(c) || c == '_';
}

/* Every chain of names on a line, outside of strings and comments. */
static bool search_line(lua_State *L, const lua_Debug *frame, ml_ref n, const char *line) {
    for (const char *at = line; *at;) {
        if (*at == '"' || *at == '\'') {
            const char *close = strchr(at + 1, *at);
            at = close ? close + 1 : at + strlen(at);
        } else if (at[0] == '-' && at[1] == '-') {
            return false;
        } else if (isalpha((unsigned char)*at) || *at == '_') {
            const char *end = at;
            while (is_word((unsigned char)*end) ||
                   (*end == '.' && (isalpha((unsigned char)end[1]) || end[1] == '_')))
                end++;
            if (try_chain(L, frame, n, at, (size_t)(end - at))) return true;
            at = end;
        } else {
            at++;
        }
    }
    return false;
}

static bool search_locals(lua_State *L, const lua_Debug *frame, ml_ref n) {
    lua_Debug ar = *frame;
    const char *local;
    for (int i = 1; (local = lua_getlocal(L, &ar, i)) != NULL; i++) {
        bool found = local[0] != '(' && matches(L, -1, n);
        lua_pop(L, 1);
        if (found) {
            lua_pushstring(L, local);
            return true;
        }
    }
    return false;
}

bool vm_push_name(lua_State *L, const lua_Debug *frame, ml_ref n) {
    if (frame->currentline < 1) return false;
    /* A statement may span lines: those after the line first, then those before. */
    static const int offsets[] = {0, 1, 2, 3, -1, -2};
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        if (frame->currentline + offsets[i] < 1) continue;
        vm_push_line(L, frame->source, frame->currentline + offsets[i]);
        const char *line = lua_tostring(L, -1);
        if (line && search_line(L, frame, n, line)) {
            lua_remove(L, -2);
            return true;
        }
        lua_pop(L, 1);
    }
    return search_locals(L, frame, n);
}
