/* JSON to Lua values and back: configurations, records, indexes. */
#include "vm/vm.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

enum { DEEPEST = 100 };

static const char *const list_class = "mlua.list"; /* of a list without items */
static char null_value;                            /* its address is core.null, JSON's null */

static void push_value(lua_State *L, const json_t *value) {
    luaL_checkstack(L, 8, "JSON");
    switch (json_typeof(value)) {
    case JSON_NULL: lua_pushlightuserdata(L, &null_value); return;
    case JSON_TRUE: lua_pushboolean(L, 1); return;
    case JSON_FALSE: lua_pushboolean(L, 0); return;
    case JSON_INTEGER: lua_pushinteger(L, json_integer_value(value)); return;
    case JSON_REAL: lua_pushnumber(L, json_real_value(value)); return;
    case JSON_STRING:
        lua_pushlstring(L, json_string_value(value), json_string_length(value));
        return;
    case JSON_ARRAY: {
        size_t count = json_array_size(value);
        lua_createtable(L, (int)count, 0);
        if (!count) luaL_setmetatable(L, list_class);
        for (size_t i = 0; i < count; i++) {
            push_value(L, json_array_get(value, i));
            lua_rawseti(L, -2, (lua_Integer)i + 1);
        }
        return;
    }
    case JSON_OBJECT: {
        const char *key;
        json_t *item;
        lua_createtable(L, 0, (int)json_object_size(value));
        json_object_foreach((json_t *)value, key, item) {
            lua_pushstring(L, key);
            push_value(L, item);
            lua_rawset(L, -3);
        }
        return;
    }
    }
}

typedef struct {
    json_t *value;
} json_box;
static const char *const box_class = "mlua.json";

static int box_gc(lua_State *L) {
    json_box *box = luaL_checkudata(L, 1, box_class);
    json_decref(box->value);
    box->value = NULL;
    return 0;
}

static json_box *push_box(lua_State *L) {
    json_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    box->value = NULL;
    luaL_setmetatable(L, box_class);
    return box;
}

json_t **vm_push_json(lua_State *L) {
    return &push_box(L)->value;
}

void vm_open_json(lua_State *L) {
    push_value(L, ((const json_box *)lua_touserdata(L, -1))->value);
    lua_remove(L, -2);
}

static int core_json(lua_State *L) {
    size_t size;
    const char *text = luaL_checklstring(L, 1, &size);
    const char *where = luaL_optstring(L, 2, NULL);
    json_box *box = push_box(L);
    json_error_t problem;
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY;
    box->value = json_loadb(text, size, flags, &problem);
    if (!box->value && json_error_code(&problem) == json_error_numeric_overflow) /* 10^30 */
        box->value = json_loadb(text, size, flags | JSON_DECODE_INT_AS_REAL, &problem);
    if (!box->value && !where) {
        lua_pushnil(L);
        lua_pushfstring(L, "%s (line %d, column %d)", problem.text, problem.line, problem.column);
        return 2;
    }
    if (!box->value)
        vm_fail(L, NULL, "%s is not valid JSON: %s (line %d, column %d)", where, problem.text,
                problem.line, problem.column);
    vm_open_json(L);
    return 1;
}

/* ---- Lua to JSON ----------------------------------------------------------------------------- */

/* `holds`: a text that is not UTF-8, or a number that is not finite, is no error. */
static json_t *to_json(lua_State *L, int index, int depth, bool holds);

static json_t *failed(lua_State *L, const char *what) {
    vm_fail(L, "texts, finite numbers, booleans, core.null, lists and tables by text",
            "JSON cannot hold %s", what);
    return NULL;
}

static json_t *table_to_json(lua_State *L, int index, int depth, bool holds) {
    lua_Integer count = (lua_Integer)lua_rawlen(L, index);
    bool list = count > 0 || luaL_getmetafield(L, index, "__list") != LUA_TNIL;
    json_box *box = push_box(L); /* freed if an item is refused */
    box->value = list ? json_array() : json_object();
    if (!box->value) vm_fail(L, NULL, "not enough host memory");
    if (list) {
        for (lua_Integer i = 1; i <= count; i++) {
            lua_rawgeti(L, index, i);
            json_array_append_new(box->value, to_json(L, lua_gettop(L), depth + 1, holds));
            lua_pop(L, 1);
        }
    } else {
        lua_pushnil(L);
        while (lua_next(L, index)) {
            if (lua_type(L, -2) != LUA_TSTRING) failed(L, "a table with keys that are no texts");
            json_object_set_new(box->value, lua_tostring(L, -2),
                                to_json(L, lua_gettop(L), depth + 1, holds));
            lua_pop(L, 1);
        }
    }
    return json_incref(box->value);
}

/* Bytes that are no ASCII become question marks. */
static json_t *ascii_to_json(lua_State *L, const char *text, size_t size) {
    luaL_Buffer plain;
    luaL_buffinit(L, &plain);
    for (size_t i = 0; i < size; i++)
        luaL_addchar(&plain, (signed char)text[i] < 0 ? '?' : text[i]);
    luaL_pushresult(&plain);
    json_t *value = json_stringn(lua_tostring(L, -1), size);
    lua_pop(L, 1);
    return value;
}

static json_t *to_json(lua_State *L, int index, int depth, bool holds) {
    if (depth > DEEPEST) return failed(L, "a table that is nested so deep, or in itself");
    luaL_checkstack(L, 8, "JSON");
    switch (lua_type(L, index)) {
    case LUA_TBOOLEAN: return json_boolean(lua_toboolean(L, index));
    case LUA_TNUMBER:
        if (lua_isinteger(L, index)) return json_integer(lua_tointeger(L, index));
        if (isfinite(lua_tonumber(L, index))) return json_real(lua_tonumber(L, index));
        return holds ? json_string(isnan(lua_tonumber(L, index)) ? "nan"
                                   : lua_tonumber(L, index) < 0  ? "-inf"
                                                                 : "inf")
                     : failed(L, "a number that is not finite");
    case LUA_TSTRING: {
        size_t size;
        const char *text = lua_tolstring(L, index, &size);
        json_t *value = json_stringn(text, size);
        if (!value && holds) value = ascii_to_json(L, text, size);
        return value ? value : failed(L, "a text that is not UTF-8");
    }
    case LUA_TLIGHTUSERDATA:
        if (lua_touserdata(L, index) == &null_value) return json_null();
        break;
    case LUA_TTABLE: {
        int top = lua_gettop(L);
        json_t *value = table_to_json(L, index, depth, holds);
        lua_settop(L, top); /* the box holds a count of its own */
        return value;
    }
    default: break;
    }
    return failed(L, vm_typename(L, index));
}

static int core_to_json(lua_State *L) {
    size_t indent = (size_t)luaL_optinteger(L, 2, 0), digits = (size_t)luaL_optinteger(L, 3, 17);
    luaL_checkany(L, 1);
    json_box *box = push_box(L);
    box->value = to_json(L, 1, 0, lua_toboolean(L, 4));
    size_t flags = JSON_ENCODE_ANY | JSON_SORT_KEYS | JSON_REAL_PRECISION(digits) |
                   (indent ? JSON_INDENT(indent) : JSON_COMPACT);
    char *text = json_dumps(box->value, flags);
    if (!text) vm_fail(L, NULL, "not enough host memory for a text of JSON");
    lua_pushstring(L, text);
    ml_free(text);
    return 1;
}

static int core_list(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    luaL_setmetatable(L, list_class);
    return 1;
}

void vm_json_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"json", core_json, "text: string, what?: string -> any",
         "the value of a text of JSON; null is core.null. A text that is none raises, named as "
         "`what`; without `what` it gives nil and the reason"},
        {"to_json", core_to_json,
         "value: any, indent?: integer, digits?: integer, holds?: boolean -> string",
         "a value as JSON, keys sorted; numbers with 17 digits, or fewer; `holds`: numbers that "
         "are "
         "not finite become texts, and other bytes than UTF-8 question marks"},
        {"list", core_list, "list: table -> table", "the table, which JSON has as a list if empty"},
        {0}};
    luaL_newmetatable(L, box_class);
    vm_set_function(L, "__gc", box_gc);
    lua_pop(L, 1);
    luaL_newmetatable(L, list_class);
    vm_set_boolean(L, "__list", true);
    lua_pop(L, 1);
    vm_register(L, functions);
    lua_pushlightuserdata(L, &null_value);
    lua_setfield(L, -2, "null");
}
