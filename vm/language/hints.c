/* Help lines that need a look at what the script did: errors of plain Lua, calls with a dot in
 * place of a colon, arguments that are nil. */
#include "vm/vm.h"

#include <stdlib.h>
#include <string.h>

#include "vm/language/lexer.h"

/* ---- Errors of plain Lua --------------------------------------------------------------------- */

static int core_tokens(lua_State *L) {
    static const char *const classes[] = {"EOF", "NAME", "NUMBER", "STRING"};
    size_t size;
    const char *text = luaL_checklstring(L, 1, &size);
    lexer s;
    int kind = 0;
    lua_newtable(L);
    lexer_begin(&s, text, size);
    for (lua_Integer i = 1; kind != T_EOF; i++, lexer_next(&s)) {
        kind = s.kind;
        lua_createtable(L, 0, 5);
        lua_pushlstring(L, text + s.start, s.end - s.start);
        if (kind >= T_EOF && kind <= T_STRING)
            lua_pushstring(L, classes[kind - T_EOF]);
        else
            lua_pushvalue(L, -1);
        lua_setfield(L, -3, "kind");
        lua_setfield(L, -2, "text");
        vm_set_integer(L, "line", s.line);
        vm_set_integer(L, "first", (lua_Integer)s.start + 1);
        vm_set_integer(L, "last", (lua_Integer)s.end);
        lua_rawseti(L, -2, i);
    }
    return 1;
}

void vm_hints_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"tokens", core_tokens, "text: string -> table[]",
         "the tokens of a text of Lua, {kind, text, line, first, last}: a kind is NAME, NUMBER, "
         "STRING, EOF (the last), or the token's own text"},
        {0}};
    vm_register(L, functions);
}

/* message, the script's text or nil, line */
static int plain_note(lua_State *L) {
    vm_push_library(L, "mlua.hints", "note");
    lua_insert(L, 1);
    lua_call(L, 3, 1);
    return 1;
}

void vm_push_plain_help(lua_State *L, const char *text, const char *file, int line) {
    bool ours = strncmp(text, VM_STDLIB + 1, sizeof VM_STDLIB - 2) == 0;
    luaL_checkstack(L, 8, "an error");
    lua_pushcfunction(L, plain_note);
    lua_pushstring(L, text);
    if (file)
        vm_push_source(L, file);
    else
        lua_pushnil(L);
    lua_pushinteger(L, line);
    /* after a stack overflow there is no room for the call */
    if (lua_pcall(L, 3, 1, 0) == LUA_OK && !lua_isnil(L, -1)) return;
    bool nothing = strstr(text, ", got nil)") || strstr(text, ", got no value)");
    nothing = nothing || strcmp(text, "attempt to index a nil value") == 0; /* by ipairs */
    if (nothing || (ours && strstr(text, "a nil value")))
        vm_push_nil_help(L);
    else
        lua_pushnil(L);
}

/* ---- Arguments that are nil ------------------------------------------------------------------ */

/* Whether the chain of names that ends before the current token is read, and not called, set or
 * followed further. */
static bool is_read(const lexer *after) {
    switch (after->kind) {
    case '(':
    case '{':
    case '[':
    case ':':
    case '=':
    case T_STRING: return false;
    default: return true;
    }
}

/* The first chain of names in the text ("self.bias") that is nil where the frame is, or the word
 * nil. */
static bool push_nil_chain(lua_State *L, const lua_Debug *frame, const char *text, size_t size) {
    lexer s;
    int before = 0;
    for (lexer_begin(&s, text, size); s.kind != T_EOF;) {
        if (s.kind == T_NIL) return lua_pushliteral(L, "nil"), true;
        if (s.kind != T_NAME || before == '.' || before == ':') {
            before = s.kind;
            lexer_next(&s);
            continue;
        }
        size_t start = s.start, end;
        do {
            end = s.end;
            lexer_next(&s);
            if (s.kind != '.') break;
            lexer_next(&s);
        } while (s.kind == T_NAME);
        before = T_NAME;
        if (!is_read(&s) || !vm_push_chain(L, frame, text + start, end - start)) continue;
        bool is_nil = lua_isnil(L, -1);
        lua_pop(L, 1);
        if (!is_nil) continue;
        lua_pushlstring(L, text + start, end - start);
        return true;
    }
    return false;
}

void vm_push_nil_help(lua_State *L) {
    lua_Debug frame;
    luaL_checkstack(L, 20, "an error");
    if (vm_script_frame(L, &frame)) {
        size_t size;
        vm_push_line(L, frame.source, frame.currentline);
        const char *line = lua_tolstring(L, -1, &size);
        if (line && push_nil_chain(L, &frame, line, size)) {
            const char *name = lua_tostring(L, -1);
            lua_pushstring(L, strcmp(name, "nil") ? lua_pushfstring(L, "%s is nil", name) : NULL);
            return;
        }
    }
    lua_pushliteral(L, "is a name misspelt, or does a function return nothing?");
}

/* ---- Calls with a dot ------------------------------------------------------------------------ */

static int get_field(lua_State *L) {
    lua_gettable(L, 1);
    return 1;
}

/* Whether the value at `index` has, as the field `name`, the function at `function`. */
static bool has_method(lua_State *L, int index, const char *name, int function) {
    index = lua_absindex(L, index);
    int type = lua_type(L, index);
    if (type != LUA_TTABLE && type != LUA_TUSERDATA) return false;
    lua_pushcfunction(L, get_field);
    lua_pushvalue(L, index);
    lua_pushstring(L, name);
    bool has = lua_pcall(L, 2, 1, 0) == LUA_OK && lua_rawequal(L, -1, function);
    lua_pop(L, 1);
    return has;
}

/* A call by a script's function, whose own line is being run. Of what a function of the library
 * calls last, Lua retains neither the name nor the arguments: the name is NULL. */
typedef struct {
    lua_Debug *caller, *called;
    const char *name;    /* of what is called */
    int function, first; /* stack indices of it and of its first argument */
} script_call;

/* Whether the object at the top lacks in the call: its method was called, on something else. */
static bool lacks(lua_State *L, const script_call *c) {
    if (!c->name) return vm_is_tensor(L, -1);
    if (lua_rawequal(L, -1, c->first) || !has_method(L, -1, c->name, c->function)) return false;
    if (lua_type(L, -1) == LUA_TUSERDATA) return true;
    /* Of a table a function is a method if it has a self, and is not called on another instance. */
    const char *parameter = lua_getlocal(L, c->called, 1);
    if (parameter) lua_pop(L, 1);
    return parameter && strcmp(parameter, "self") == 0 &&
           !has_method(L, c->first, c->name, c->function);
}

/* Whether the method of a tensor, which no name holds, was called on something else. */
static bool lacks_tensor(lua_State *L, const script_call *c) {
    if (!c->name) return false;
    lua_getfield(L, LUA_REGISTRYINDEX, "mlua.tensor_methods");
    lua_getfield(L, -1, c->name);
    bool found = lua_rawequal(L, -1, c->function) && !vm_is_tensor(L, c->first);
    lua_pop(L, 2);
    return found;
}

/* A place on the caller's line: the last name of "object.name(", and the object's text, which is
 * empty where it is no chain of names: f(x).sum("seq"). */
typedef struct {
    lexer at;
    int before; /* the kind of the token before */
    size_t start, end;
} place;

static bool next_method(place *p) {
    for (; p->at.kind != T_EOF; lexer_next(&p->at)) {
        int kind = p->at.kind, before = p->before;
        p->before = kind;
        if (kind == T_NAME && before == '.') {
            lexer after = p->at;
            lexer_next(&after);
            if (after.kind == '(' || after.kind == '{' || after.kind == T_STRING) return true;
            if (p->end > p->start) p->end = p->at.end;
        } else if (kind == T_NAME && before != ':') {
            p->start = p->at.start, p->end = p->at.end;
        } else if (kind != '.') {
            p->start = p->end = 0;
        }
    }
    return false;
}

/* Whether the first argument is the object itself: h.dot(h, w). */
static bool passes_object(const place *p) {
    lexer s = p->at;
    lexer_next(&s);
    lexer_next(&s);
    return s.end - s.start == p->end - p->start &&
           memcmp(s.text + s.start, s.text + p->start, s.end - s.start) == 0;
}

/* Push the message and the help for a call "h.dot(w)" whose method lacks h. */
static bool push_lacking(lua_State *L, const script_call *c) {
    size_t size;
    vm_push_line(L, c->caller->source, c->caller->currentline);
    const char *line = lua_tolstring(L, -1, &size);
    if (!line) return false;
    place p = {.before = 0};
    for (lexer_begin(&p.at, line, size); next_method(&p); p.start = p.end = 0, lexer_next(&p.at)) {
        if (c->name && !lexer_is(&p.at, c->name)) continue;
        size_t length = p.end - p.start;
        bool found = !length && lacks_tensor(L, c);
        if (length && !passes_object(&p) && vm_push_chain(L, c->caller, line + p.start, length)) {
            found = lacks(L, c);
            lua_pop(L, 1);
        }
        if (!found) continue;
        const char *object = length ? lua_pushlstring(L, line + p.start, length) : "x";
        const char *name = lua_pushlstring(L, line + p.at.start, p.at.end - p.at.start);
        lua_pushfstring(L, "%s.%s(...) does not pass %s to the method", object, name, object);
        lua_pushfstring(L, "methods are called with a colon: %s:%s(...)", object, name);
        return true;
    }
    return false;
}

/* Likewise for "m:softmax(x)", where m is no argument. */
static bool push_superfluous(lua_State *L, const script_call *c) {
    static const char *const libraries[][2] = {
        {"mlua", "m"},        {"mlua.core", "core"}, {"math", "math"}, {"table", "table"},
        {"string", "string"}, {"os", "os"},          {"io", "io"},     {"coroutine", "coroutine"}};
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        const char *library = libraries[i][1];
        lua_getfield(L, -1, libraries[i][0]);
        bool same = lua_istable(L, -1) && lua_rawequal(L, -1, c->first);
        lua_pop(L, 1);
        if (!same) continue;
        lua_pushfstring(L, "%s:%s(...) passes %s itself", library, c->name, library);
        lua_pushfstring(L, "functions of %s are called with a dot: %s.%s(...)", library, library,
                        c->name);
        return true;
    }
    return false;
}

enum { MOST_CALLS = 3 }; /* of scripts' functions, from the innermost: the error may occur later */

bool vm_push_call_help(lua_State *L, lua_Debug *where) {
    int top = lua_gettop(L), calls = 0;
    luaL_checkstack(L, 40, "an error");
    lua_Debug frames[2];
    for (int level = 0; calls < MOST_CALLS && lua_getstack(L, level, &frames[level % 2]); level++) {
        lua_Debug *caller = &frames[level % 2], *called = &frames[(level + 1) % 2];
        lua_getinfo(L, "Sl", caller);
        bool script = caller->currentline >= 1 &&
                      strncmp(caller->source, VM_STDLIB, sizeof VM_STDLIB - 1) != 0;
        if (!script || level == 0) continue;
        calls++;
        lua_getinfo(L, "nft", called);
        bool last = called->istailcall, method = strcmp(called->namewhat, "method") == 0;
        bool field = strcmp(called->namewhat, "field") == 0;
        script_call c = {caller, called, last ? NULL : called->name, top + 1, top + 2};
        if (!lua_getlocal(L, called, 1)) lua_pushnil(L);
        if ((method && push_superfluous(L, &c)) || ((field || last) && push_lacking(L, &c))) {
            lua_replace(L, top + 2);
            lua_replace(L, top + 1);
            lua_settop(L, top + 2);
            *where = *caller;
            return true;
        }
        lua_settop(L, top);
    }
    return false;
}
