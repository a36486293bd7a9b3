/* Names that a script reads and never set.
 *
 * In Lua such a name is nil, and `causal = True` trains a model that is not causal. So the table of
 * globals has a metatable: a name that was never assigned raises, with what was probably meant. A
 * name that was assigned, also nil, is declared and reads as in Lua; rawget(_G, name) asks for
 * any name. Tables that a script passes to load() as an environment have no such metatable. Names
 * that other Lua versions have and 5.4 lacks read as nil, because libraries ask for them: `unpack
 * or table.unpack`; calling one raises by itself, and vm_name_note() names what 5.4 has.
 *
 * The files of stdlib/ see a copy of the table, made before the script begins: a script that sets
 * `type` or `table` breaks only itself. */
#include "vm/vm.h"

#include <string.h>

#include "runtime/base/suggest.h"
#include "vm/language/lexer.h"

static const char *const declared_key = "mlua.declared"; /* registry: name -> true */
static const char *const library_key = "mlua.globals";   /* registry: what stdlib/ sees of _G */

typedef struct {
    const char *name, *help;
} note;

static const char *find_note(const note *notes, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(notes[i].name, name) == 0) return notes[i].help;
    return NULL;
}

/* Of other Lua versions and of the lua command. */
static const char *absent_note(const char *name) {
    static const char bits[] = "Lua 5.4 has operators: a & b, a | b, a ~ b, ~a, a << n, a >> n";
    static const char environment[] = "load(text, name, \"t\", environment) sets an environment";
    static const note notes[] = {
        {"unpack", "Lua 5.4's is table.unpack"},
        {"loadstring", "Lua 5.4's is load"},
        {"setfenv", environment},
        {"getfenv", environment},
        {"module", "return a table from the file, and require it"},
        {"newproxy", "setmetatable({}, {...}) makes one"},
        {"gcinfo", "collectgarbage(\"count\") is the memory in KiB"},
        {"bit", bits},
        {"bit32", bits},
        {"jit", "mlua runs Lua 5.4"},
        {"ffi", "mlua runs Lua 5.4"},
        {"arg", "settings are written key=value on the command line: m.config { steps = 100 }"},
    };
    return find_note(notes, sizeof notes / sizeof *notes, name);
}

/* Of other languages, and what a script's beginning defines. */
static const char nothing_note[] = "Lua's is nil";
static const char infinity_note[] = "Lua's is math.huge";
static const char library_note[] = "mlua's functions are in one table: local m = require \"mlua\"";
static const char begin_note[] = "begin with local m = require \"mlua\"";
static const char failure_note[] = "error(message) raises, pcall(function() ... end) catches";
static const char list_note[] = "a list is { 1, 2, 3 }, a table of names { name = value }";
static const char whole_note[] =
    "math.floor(x) or x // 1 of a number, t:cast(\"i32\") of a tensor, tonumber(s) of a text";
static const char text_note[] = "(\"%d of %d\"):format(i, n) makes a text";
static const note foreign_names[] = {
    {"True", "Lua's is true"},
    {"False", "Lua's is false"},
    {"TRUE", "Lua's is true"},
    {"FALSE", "Lua's is false"},
    {"None", nothing_note},
    {"none", nothing_note},
    {"nill", nothing_note},
    {"Nil", nothing_note},
    {"null", nothing_note},
    {"NULL", nothing_note},
    {"nullptr", nothing_note},
    {"undefined", nothing_note},
    {"inf", infinity_note},
    {"Inf", infinity_note},
    {"Infinity", infinity_note},
    {"nan", "Lua's is 0/0"},
    {"NaN", "Lua's is 0/0"},
    {"pi", "Lua's is math.pi"},
    {"len", "#t is the length of a list or text, t:size(axis) that of a tensor's axis"},
    {"range", "for i = 1, n do ... end counts; m.iota(axis) is a tensor"},
    {"enumerate", "for i, item in ipairs(list) do ... end"},
    {"zip", "for i, a in ipairs(list) do local b = other[i] ... end"},
    {"int", whole_note},
    {"float", "tonumber(s) of a text, t:cast(\"f32\") of a tensor"},
    {"str", "tostring(x)"},
    {"list", list_note},
    {"dict", list_note},
    {"tuple", list_note},
    {"set", "a set is a table: set[item] = true"},
    {"isinstance", "type(x) == \"number\", m.is_module(x)"},
    {"hasattr", "x.name ~= nil"},
    {"getattr", "x[name]"},
    {"setattr", "x[name] = value"},
    {"super", "call it by its class: Base.forward(self, x)"},
    {"printf", text_note},
    {"sprintf", text_note},
    {"format", text_note},
    {"f", "a text with values in it is (\"loss %g\"):format(loss)"},
    {"console", "print(...)"},
    {"open", "io.open(path)"},
    {"exit", "os.exit(code)"},
    {"quit", "os.exit(code)"},
    {"import", begin_note},
    {"include", begin_note},
    {"from", begin_note},
    {"m", begin_note},
    {"mlua", begin_note},
    {"torch", library_note},
    {"nn", library_note},
    {"F", library_note},
    {"np", library_note},
    {"numpy", library_note},
    {"jax", library_note},
    {"jnp", library_note},
    {"tf", library_note},
    {"optim", "optimizers are m.adamw{...}, m.sgd{...}, m.lion{...}, m.muon{...}"},
    {"cfg", "local cfg = m.config { steps = 100 } declares settings"},
    {"A", "local A = m.axes { batch = 8, seq = 128 } makes axes"},
    {"self", "define the function with a colon: function Net:forward(x)"},
    {"this", "a method's first argument is self: function Net:forward(x)"},
    {"lambda", "function(x) return ... end"},
    {"raise", failure_note},
    {"throw", failure_note},
    {"try", failure_note},
    {"max", "math.max(a, b) of numbers, m.maximum(a, b) of tensors, t:max(axis) along an axis"},
    {"min", "math.min(a, b) of numbers, m.minimum(a, b) of tensors, t:min(axis) along an axis"},
    {"sum", "t:sum(axis)"},
    {"time", "os.time() in seconds, os.clock() of this process"},
    {"random", "math.random() of a script, m.uniform(axes, key) in a tensor"},
};

static const char *foreign_note(const char *name) {
    return find_note(foreign_names, sizeof foreign_names / sizeof *foreign_names, name);
}

const char *vm_name_note(const char *name) {
    const char *help = absent_note(name);
    return help ? help : foreign_note(name);
}

/* ---- The text of the script ------------------------------------------------------------------ */

/* Where a chunk first declares a name: lines from 1, 0: nowhere. */
typedef struct {
    int local;    /* `local name` or `local function name` outside of all blocks */
    int inner;    /* likewise in a block, a parameter, a variable of a loop */
    int assigned; /* `name =` or `function name` outside of a table */
} places;

typedef struct {
    lua_State *L;
    lexer at;
    const char *word;
    int blocks; /* that are open */
    places found;
    int names; /* stack index of a list that gets the other names of locals */
} survey;

static void see_local(survey *s, bool inner) {
    if (lexer_is(&s->at, s->word)) {
        int *line = inner || s->blocks ? &s->found.inner : &s->found.local;
        if (!*line) *line = s->at.line;
    } else {
        lua_pushlstring(s->L, s->at.text + s->at.start, s->at.end - s->at.start);
        lua_rawseti(s->L, s->names, (lua_Integer)lua_rawlen(s->L, s->names) + 1);
    }
}

/* At the first of a list of names: `a <const>, b`, (a, b, ...). */
static void see_names(survey *s, bool inner) {
    for (; s->at.kind == T_NAME || s->at.kind == ','; lexer_next(&s->at)) {
        if (s->at.kind == T_NAME) see_local(s, inner);
        lexer ahead = s->at;
        lexer_next(&ahead);
        if (ahead.kind != '<') continue;
        while (s->at.kind != '>' && s->at.kind != T_EOF) lexer_next(&s->at);
    }
}

/* After the word `function`. */
static void see_function(survey *s, bool local) {
    lexer name = s->at;
    if (local && name.kind == T_NAME) see_local(s, false);
    while (s->at.kind == '.' || s->at.kind == ':' || s->at.kind == T_NAME) lexer_next(&s->at);
    if (!local && lexer_is(&name, s->word) && s->at.last_end == name.end && !s->found.assigned)
        s->found.assigned = name.line;
    s->blocks++;
    if (s->at.kind == '(') lexer_next(&s->at);
    see_names(s, true);
}

static void look(survey *s, const char *text, size_t size) {
    int braces = 0, before = 0;
    lexer_begin(&s->at, text, size);
    while (s->at.kind != T_EOF) {
        int kind = s->at.kind, line = s->at.line;
        bool word = kind == T_NAME && before != '.' && before != ':' && lexer_is(&s->at, s->word);
        before = kind;
        braces += (kind == '{') - (kind == '}');
        s->blocks += kind == T_IF || kind == T_DO || kind == T_REPEAT;
        s->blocks -= kind == T_END || kind == T_UNTIL;
        lexer_next(&s->at);
        if (kind == T_FUNCTION) {
            see_function(s, false);
        } else if (kind == T_LOCAL && s->at.kind == T_FUNCTION) {
            lexer_next(&s->at);
            see_function(s, true);
        } else if (kind == T_LOCAL || kind == T_FOR) {
            see_names(s, kind == T_FOR);
        } else if (word && braces == 0 && s->at.kind == '=' && !s->found.assigned) {
            s->found.assigned = line;
        }
    }
}

/* ---- What was probably meant ----------------------------------------------------------------- */

static int get_field(lua_State *L) {
    lua_gettable(L, 1);
    return 1;
}

/* Whether the table at `index` has the field; metamethods may raise, which is no. */
static bool has_field(lua_State *L, int index, const char *name) {
    index = lua_absindex(L, index);
    if (lua_type(L, index) != LUA_TTABLE) return false;
    lua_pushcfunction(L, get_field);
    lua_pushvalue(L, index);
    lua_pushstring(L, name);
    bool has = lua_pcall(L, 2, 1, 0) == LUA_OK && !lua_isnil(L, -1);
    lua_pop(L, 1);
    return has;
}

/* Where the table that a variable holds has the name as a field, add "cfg.name" to the text at
 * `help`. The value is on top, and is popped. */
static void offer_field(lua_State *L, const char *variable, const char *name, int help) {
    bool has = variable[0] != '(' && strcmp(variable, "_ENV") != 0 &&
               strncmp(variable, "mlua__", 6) != 0 && has_field(L, -1, name);
    lua_pop(L, 1);
    if (!has) return;
    const char *sofar = lua_tostring(L, help);
    lua_pushfstring(L, "%s%s.%s", sofar ? lua_pushfstring(L, "%s or ", sofar) : "did you mean ",
                    variable, name);
    lua_replace(L, help);
    lua_settop(L, help);
}

static void add_name(lua_State *L, int names, const char *name) {
    lua_pushstring(L, name);
    lua_rawseti(L, names, (lua_Integer)lua_rawlen(L, names) + 1);
}

/* Make the text (or nil) on top "did you mean cfg.embed or A.embed" for the variables of a frame;
 * their names go to the list at `names`. */
static void offer_fields(lua_State *L, lua_Debug *frame, const char *name, int names) {
    int help = lua_gettop(L);
    const char *variable;
    for (int i = 1; (variable = lua_getlocal(L, frame, i)) != NULL; i++) {
        add_name(L, names, variable);
        offer_field(L, variable, name, help);
    }
    lua_pushvalue(L, help);
    lua_getinfo(L, "f", frame);
    lua_replace(L, help);
    int function = help++;
    for (int i = 1; (variable = lua_getupvalue(L, function, i)) != NULL; i++) {
        add_name(L, names, variable);
        offer_field(L, variable, name, help);
    }
    lua_replace(L, function);
}

/* Likewise, with a question mark, for the innermost functions of scripts that have such a field:
 * the chunk's own variables are in scope, but of a function only those are known that it names. */
static void push_field_help(lua_State *L, const char *name, int names) {
    lua_Debug frame;
    lua_pushnil(L);
    for (int level = 0; lua_isnil(L, -1) && lua_getstack(L, level, &frame); level++) {
        lua_getinfo(L, "S", &frame);
        if (frame.what[0] == 'C' || strncmp(frame.source, VM_STDLIB, sizeof VM_STDLIB - 1) == 0)
            continue;
        offer_fields(L, &frame, name, names);
    }
    if (lua_isnil(L, -1)) return;
    lua_pushfstring(L, "%s?", lua_tostring(L, -1));
    lua_replace(L, -2);
}

/* Typing errors seldom change the first letter: of names that the script did not choose, only those
 * that begin alike. */
static bool begins_alike(const char *name, const char *word) {
    return name[0] == word[0] || (name[0] && name[1] == word[0]);
}

/* The nearest of the strings in the list at `names`, and of the keys of the table at `keys`. */
static const char *nearest(lua_State *L, const char *name, int names, int keys) {
    size_t count = 0, room = (size_t)lua_rawlen(L, names);
    lua_pushnil(L);
    while (lua_next(L, keys)) lua_pop(L, 1), room++;
    const char **words = lua_newuserdatauv(L, (room + 1) * sizeof *words, 0);
    for (lua_Integer i = 1; i <= (lua_Integer)lua_rawlen(L, names); i++, lua_pop(L, 1))
        if (lua_rawgeti(L, names, i) == LUA_TSTRING) words[count++] = lua_tostring(L, -1);
    lua_pushnil(L);
    while (lua_next(L, keys)) {
        lua_pop(L, 1);
        if (lua_type(L, -1) == LUA_TSTRING && begins_alike(name, lua_tostring(L, -1)))
            words[count++] = lua_tostring(L, -1);
    }
    const char *guess = NULL;
    for (size_t i = 0; i < count; i++) { /* by name among equally near ones */
        const char *pair[] = {guess, words[i]}, *swapped[] = {words[i], guess};
        const char *better = ml_suggest(name, pair, 2);
        if (guess && better == guess && ml_suggest(name, swapped, 2) == words[i] &&
            strcmp(words[i], guess) < 0)
            better = words[i];
        guess = better;
    }
    return guess; /* the list or the table holds it */
}

static bool push_place_help(lua_State *L, const survey *s, int line) {
    const char *name = s->word;
    if (s->found.local > line)
        lua_pushfstring(L, "line %d declares the local %s: move that above", s->found.local, name);
    else if (s->found.inner && s->found.inner < line)
        lua_pushfstring(L, "the local %s of line %d ends with its block", name, s->found.inner);
    else if (s->found.assigned > line)
        lua_pushfstring(L, "line %d sets %s: move that above", s->found.assigned, name);
    else
        return false;
    return true;
}

static bool push_library_help(lua_State *L, const char *name) {
    int top = lua_gettop(L);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_getfield(L, top + 1, "mlua");
    lua_getfield(L, top + 1, "math");
    bool numbers = has_field(L, top + 3, name), tensors = false;
    if (lua_istable(L, top + 2)) {
        lua_pushstring(L, name);
        tensors = lua_rawget(L, top + 2) != LUA_TNIL;
    }
    lua_settop(L, top);
    if (tensors && numbers)
        lua_pushfstring(L, "m.%s of tensors, math.%s of numbers", name, name);
    else if (tensors || numbers)
        lua_pushfstring(L, "did you mean %s.%s?", tensors ? "m" : "math", name);
    return tensors || numbers;
}

/* Push the help line for a name that was never set. */
static void push_help(lua_State *L, const char *name) {
    luaL_checkstack(L, 40, "an error");
    const char *known = foreign_note(name);
    lua_Debug frame;
    if (known) {
        lua_pushstring(L, known);
        return;
    }
    lua_newtable(L);
    survey s = {.L = L, .word = name, .names = lua_gettop(L)};
    if (vm_script_frame(L, &frame)) {
        size_t size;
        vm_push_source(L, frame.source);
        const char *text = lua_tolstring(L, -1, &size);
        if (text) look(&s, text, size);
        lua_pop(L, 1);
        if (push_place_help(L, &s, frame.currentline)) return;
        push_field_help(L, name, s.names);
        if (!lua_isnil(L, -1)) return;
    }
    if (push_library_help(L, name)) return;
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_GLOBALS);
    const char *guess = nearest(L, name, s.names, lua_gettop(L));
    if (guess) {
        lua_pushfstring(L, "did you mean %s?", guess);
        return;
    }
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_newtable(L);
    if (lua_getfield(L, -2, "mlua") == LUA_TTABLE)
        guess = nearest(L, name, lua_gettop(L) - 1, lua_gettop(L));
    if (guess)
        lua_pushfstring(L, "did you mean m.%s?", guess);
    else
        lua_pushfstring(L, "set it before; where it may be unset: rawget(_G, \"%s\") or false",
                        name);
}

/* ---- The metatable --------------------------------------------------------------------------- */

/* globals, name -> value */
static int read_unknown(lua_State *L) {
    lua_settop(L, 2);
    if (lua_type(L, 2) != LUA_TSTRING) return 0;
    lua_getfield(L, LUA_REGISTRYINDEX, declared_key);
    lua_pushvalue(L, 2);
    if (lua_rawget(L, 3) != LUA_TNIL) return 0;
    const char *name = lua_tostring(L, 2);
    if (absent_note(name)) return 0;
    push_help(L, name);
    return vm_fail(L, lua_tostring(L, -1), "the name \"%s\" is not defined", name);
}

/* globals, name, value */
static int set_unknown(lua_State *L) {
    lua_settop(L, 3);
    if (lua_type(L, 2) == LUA_TSTRING) {
        lua_getfield(L, LUA_REGISTRYINDEX, declared_key);
        lua_pushvalue(L, 2);
        lua_pushboolean(L, 1);
        lua_rawset(L, 4);
        lua_settop(L, 3);
    }
    lua_rawset(L, 1);
    return 0;
}

void vm_raw_global(lua_State *L, const char *name) {
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_GLOBALS);
    lua_pushstring(L, name);
    lua_rawget(L, -2);
    lua_remove(L, -2);
}

void vm_globals_register(lua_State *L) {
    lua_newtable(L);
    lua_setfield(L, LUA_REGISTRYINDEX, declared_key);
    static const luaL_Reg methods[] = {
        {"__index", read_unknown}, {"__newindex", set_unknown}, {NULL, NULL}};
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_GLOBALS);
    lua_newtable(L);
    int globals = lua_gettop(L) - 1, copy = globals + 1;
    lua_pushnil(L);
    while (lua_next(L, globals)) {
        lua_pushvalue(L, -2);
        lua_insert(L, -2);
        lua_rawset(L, copy);
    }
    luaL_newlib(L, methods);
    lua_pushvalue(L, -1);
    lua_setmetatable(L, globals);
    lua_setmetatable(L, copy);
    lua_setfield(L, LUA_REGISTRYINDEX, library_key);
    lua_pop(L, 1);
}

void vm_push_library_globals(lua_State *L) {
    lua_getfield(L, LUA_REGISTRYINDEX, library_key);
}
