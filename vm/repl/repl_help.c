/* help(m.gelu), and a bare m.gelu: signature and text of a function, from the rows that bindings
 * register and from the comments above the functions of stdlib/ and of the script. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "vm/embed.h"
#include "vm/repl/repl.h"

enum { WIDTH = 96, INDENT = 2 };

static const char prompt_text[] =
    "EXPRESSION         types, bytes and lines of tensors; other values as they are\n"
    "= EXPRESSION       the numbers, too: small tensors are computed here, with initial "
    "parameters\n"
    "m.gelu             signature and text of a function; help(m.gelu), help \"gelu\" and help(x) "
    "too\n"
    ":check EXPRESSION  work, memory and kernels of what computes it; without one, the last value "
    "or\n"
    "                   the script's programs, as mlua check has them\n"
    ":mem EXPRESSION    its memory\n"
    ":shard EXPRESSION  its tensors' placement under the layout, and what ranks send\n"
    "_                  the last value; [3] in errors and origins is the third input\n"
    "local x = 1        stays: locals of the prompt are globals\n"
    "m is the library, help(m) lists its functions. Tab completes, ^R searches the history, ^D "
    "ends.\n";

/* ---- Text ------------------------------------------------------------------------------------ */

static void print_wrapped(const char *text, size_t length, int indent) {
    int column = 0;
    for (size_t at = 0; at < length;) {
        size_t word = 0;
        while (at + word < length && text[at + word] != ' ') word++;
        if (column && column + 1 + (int)word > WIDTH) printf("\n"), column = 0;
        column += column ? printf(" ") : printf("%*s", indent, "");
        column += printf("%.*s", (int)word, text + at);
        at += word;
        while (at < length && text[at] == ' ') at++;
    }
    printf("\n");
}

/* A line of a comment, without its dashes: "---@param x Tensor" as "x  Tensor". */
static void print_comment_line(const char *line, size_t length) {
    static const struct {
        const char *tag, *shown;
    } tags[] = {{"@param ", ""}, {"@return ", "gives "}, {"@field ", "."}};
    size_t at = 0;
    while (at < length && (line[at] == ' ' || line[at] == '-')) at++;
    line += at, length -= at;
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++) {
        size_t size = strlen(tags[i].tag);
        if (length < size || strncmp(line, tags[i].tag, size) != 0) continue;
        printf("    %s%.*s\n", tags[i].shown, (int)(length - size), line + size);
        return;
    }
    if (length && line[0] != '@') printf("  %.*s\n", (int)length, line);
}

static const char *line_before(const char *text, const char *line) {
    if (line == text) return NULL;
    for (line--; line > text && line[-1] != '\n';) line--;
    return line;
}

static bool is_comment(const char *line) {
    line += strspn(line, " \t");
    return line[0] == '-' && line[1] == '-' && line[2] != '[';
}

/* The comment lines directly above `line`. Where there are lines with three dashes, these alone. */
static void print_comment(const char *text, const char *line) {
    const char *first = line, *above;
    while ((above = line_before(text, first)) && is_comment(above)) first = above;
    for (const char *at = first; at < line;) {
        size_t length = strcspn(at, "\r\n");
        print_comment_line(at, length);
        at += length;
        while (*at == '\r' || *at == '\n') at++;
    }
}

static const char *find_line(const char *text, int number) {
    while (text && --number > 0) {
        text = strchr(text, '\n');
        if (text) text++;
    }
    return text;
}

/* ---- Names ----------------------------------------------------------------------------------- */

/* Push the key that has the value at `value` in the table at `table`; false where none has. */
static bool push_key(lua_State *L, int table, int value) {
    if (!lua_istable(L, table)) return false;
    lua_pushnil(L);
    while (lua_next(L, table)) {
        bool same = lua_rawequal(L, -1, value) && lua_type(L, -2) == LUA_TSTRING;
        lua_pop(L, 1);
        if (same) return true;
    }
    return false;
}

/* Push the table of the library, and that of the methods of tensors. */
static void push_library(lua_State *L) {
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_getfield(L, -1, "mlua");
    lua_remove(L, -2);
    lua_getfield(L, LUA_REGISTRYINDEX, "mlua.tensor_methods");
}

/* Push "m.gelu", "x:sum", or what the function is called otherwise. */
static void push_name(lua_State *L, int function, const char *otherwise) {
    int top = lua_gettop(L);
    push_library(L);
    if (push_key(L, top + 1, function))
        lua_pushfstring(L, "m.%s", lua_tostring(L, -1));
    else if (push_key(L, top + 2, function))
        lua_pushfstring(L, "x:%s", lua_tostring(L, -1));
    else
        lua_pushstring(L, otherwise);
    lua_replace(L, top + 1);
    lua_settop(L, top + 1);
}

/* ---- Functions ------------------------------------------------------------------------------- */

static void print_row(lua_State *L, int function, const vm_entry *row) {
    const char *arrow = strstr(row->signature, "-> ");
    size_t length = arrow ? (size_t)(arrow - row->signature) : strlen(row->signature);
    while (length && row->signature[length - 1] == ' ') length--;
    push_name(L, function, row->name);
    printf("%s(%.*s)%s%s\n", lua_tostring(L, -1), (int)length, row->signature, arrow ? " " : "",
           arrow ? arrow : "");
    lua_pop(L, 1);
    print_wrapped(row->doc, strlen(row->doc), INDENT);
}

/* "function Block:forward(x)" and "local function f(x)" without those words, up to the bracket that
 * closes the parameters. */
static void push_head(lua_State *L, const char *line) {
    static const char *const words[] = {"local ", "function "};
    size_t length = strcspn(line, "\r\n");
    const char *close = memchr(line, ')', length);
    if (close) length = (size_t)(close - line) + 1;
    while (length && (*line == ' ' || *line == '\t')) line++, length--;
    for (size_t i = 0; i < 2; i++) {
        size_t size = strlen(words[i]);
        if (length > size && strncmp(line, words[i], size) == 0) line += size, length -= size;
    }
    lua_pushlstring(L, line, length);
}

/* The names after "---@param" of the comment above `line`, as "(x, options)". */
static void push_parameters(lua_State *L, const char *text, const char *line) {
    static const char tag[] = "---@param ";
    const char *first = line, *above;
    luaL_Buffer names;
    bool any = false;
    while ((above = line_before(text, first)) && is_comment(above)) first = above;
    luaL_buffinit(L, &names);
    luaL_addchar(&names, '(');
    for (const char *at = first; at < line; at = strchr(at, '\n') + 1) {
        if (strncmp(at, tag, sizeof tag - 1) != 0) continue;
        const char *name = at + sizeof tag - 1;
        if (any) luaL_addstring(&names, ", ");
        luaL_addlstring(&names, name, strcspn(name, " ?"));
        any = true;
    }
    luaL_addchar(&names, ')');
    luaL_pushresult(&names);
}

/* The comment above "function m.NAME(" or "m.NAME = " in stdlib/, of a value of the library. */
static bool print_library_text(lua_State *L, int index) {
    int top = lua_gettop(L);
    bool found = false;
    push_library(L);
    if (!push_key(L, top + 1, index)) return lua_settop(L, top), false;
    const char *name = lua_tostring(L, -1);
    for (const ml_embedded *file = ml_embedded_files; file->name && !found; file++) {
        lua_pushlstring(L, file->data, file->size);
        const char *text = lua_tostring(L, -1);
        const char *at = strstr(text, lua_pushfstring(L, "\nfunction m.%s(", name));
        bool declared = at != NULL;
        if (!at) at = strstr(text, lua_pushfstring(L, "\nm.%s = ", name));
        found = at != NULL && line_before(text, at + 1) && is_comment(line_before(text, at + 1));
        if (found && declared)
            push_head(L, at + 1);
        else if (found && lua_isfunction(L, index))
            push_parameters(L, text, at + 1);
        else
            lua_pushliteral(L, "");
        if (found) {
            if (!declared) printf("m.%s", name);
            printf("%s\n", lua_tostring(L, -1));
            print_comment(text, at + 1);
        }
        lua_settop(L, top + 3);
    }
    lua_settop(L, top);
    return found;
}

static bool print_function(lua_State *L, int index) {
    lua_Debug info;
    const vm_entry *row = vm_documentation(L, index);
    if (row) return print_row(L, index, row), true;
    if (print_library_text(L, index)) return true;
    lua_pushvalue(L, index);
    lua_getinfo(L, ">S", &info);
    if (info.what[0] == 'C') return false;
    int top = lua_gettop(L);
    vm_push_source(L, info.source);
    const char *text = lua_tostring(L, -1), *line = find_line(text, info.linedefined);
    if (line && info.linedefined > 0) {
        push_head(L, line);
        const char *head = lua_tostring(L, -1), *file = info.source + (info.source[0] == '@');
        bool library = strncmp(info.source, VM_STDLIB, sizeof VM_STDLIB - 1) == 0;
        printf("%s", head);
        if (!library) printf("  from %s:%d", file, info.linedefined);
        printf("\n");
        print_comment(text, line);
    }
    lua_settop(L, top);
    return line != NULL;
}

/* ---- Other values ---------------------------------------------------------------------------- */

/* Names of a table that is on top, sorted, wrapped; pops it. */
static void print_names(lua_State *L, const char *before) {
    repl_sort_names(L);
    luaL_Buffer text;
    int list = lua_gettop(L);
    luaL_buffinit(L, &text);
    for (lua_Integer i = 1; i <= (lua_Integer)lua_rawlen(L, list); i++) {
        lua_rawgeti(L, list, i);
        if (i > 1) luaL_addchar(&text, ' ');
        luaL_addvalue(&text);
    }
    luaL_pushresult(&text);
    printf("%s", before);
    print_wrapped(lua_tostring(L, -1), lua_rawlen(L, -1), INDENT);
    lua_settop(L, list - 1);
}

/* The functions of the table at `index`. */
static void print_members(lua_State *L, int index, const char *before) {
    lua_newtable(L);
    lua_pushnil(L);
    while (lua_next(L, index)) {
        bool shown =
            lua_type(L, -2) == LUA_TSTRING && (lua_isfunction(L, -1) || lua_istable(L, -1));
        if (shown) {
            lua_pushvalue(L, -2);
            lua_pushboolean(L, 1);
            lua_rawset(L, -5);
        }
        lua_pop(L, 1);
    }
    print_names(L, before);
}

static bool is_library_call(lua_State *L, const char *function, int index) {
    push_library(L);
    lua_getfield(L, -2, function);
    lua_pushvalue(L, index);
    lua_call(L, 1, 1);
    bool result = lua_toboolean(L, -1);
    lua_pop(L, 3);
    return result;
}

static int get_forward(lua_State *L) {
    lua_getfield(L, 1, "forward");
    return 1;
}

/* An instance of a module or a class: its fields and its function forward. */
static void print_module(lua_State *L, int index) {
    printf("%s\n", luaL_tolstring(L, index, NULL));
    lua_pop(L, 1);
    lua_pushcfunction(L, get_forward);
    lua_pushvalue(L, index);
    if (lua_pcall(L, 1, 1, 0) == LUA_OK && lua_isfunction(L, -1)) print_function(L, lua_gettop(L));
    lua_pop(L, 1);
    lua_newtable(L);
    repl_add_fields(L, lua_gettop(L), index);
    print_names(L, "fields\n");
}

static void print_class(lua_State *L, int index, const char *what) {
    printf("%s\n", what);
    lua_newtable(L);
    repl_add_methods(L, lua_gettop(L), index);
    print_names(L, "methods\n");
}

void repl_print_help(lua_State *L, int index) {
    index = lua_absindex(L, index);
    luaL_checkstack(L, 24, "help");
    uint32_t id;
    if (lua_isfunction(L, index)) {
        if (!print_function(L, index)) printf("a function of Lua: see the manual of Lua 5.4\n");
    } else if (vm_is_state(L, index, &id)) {
        repl_print(L, index);
        print_class(L, index, "a state: what lives across steps; used as a tensor it is its value");
    } else if (vm_is_tensor(L, index)) {
        repl_print(L, index);
        print_class(L, index, "a tensor; help(x.sum) describes a method");
    } else if (lua_isuserdata(L, index)) {
        repl_print(L, index);
        print_class(L, index, "help(x.name) describes a method");
    } else if (!lua_istable(L, index)) {
        repl_print(L, index);
    } else if (is_library_call(L, "is_module", index) || is_library_call(L, "is_class", index)) {
        print_module(L, index);
    } else if (print_library_text(L, index)) {
        print_members(L, index, "functions\n");
    } else {
        push_library(L);
        bool library = lua_rawequal(L, index, -2);
        lua_pop(L, 2);
        if (library)
            print_members(L, index, "mlua; help(m.gelu) describes one\n");
        else
            repl_print(L, index);
    }
}

/* ---- help ------------------------------------------------------------------------------------ */

/* Push what a text names: "gelu", "m.gelu", "x:sum", "math.floor"; raises where nothing does. */
static void push_named(lua_State *L, const char *text) {
    int top = lua_gettop(L);
    const char *name = text + strcspn(text, ".:");
    name = *name ? name + 1 : text;
    push_library(L);
    for (int i = 1; i <= 2; i++) {
        lua_pushstring(L, name);
        if (lua_rawget(L, top + i) != LUA_TNIL) {
            lua_replace(L, top + 1);
            lua_settop(L, top + 1);
            return;
        }
        lua_pop(L, 1);
    }
    lua_pushglobaltable(L);
    lua_pushstring(L, text);
    if (lua_rawget(L, -2) != LUA_TNIL) {
        lua_replace(L, top + 1);
        lua_settop(L, top + 1);
        return;
    }
    lua_newtable(L);
    int names = lua_gettop(L), count = 0;
    for (int i = 1; i <= 2; i++) {
        lua_pushnil(L);
        while (lua_next(L, top + i)) {
            lua_pop(L, 1);
            lua_pushvalue(L, -1);
            lua_rawseti(L, names, ++count);
        }
    }
    vm_push_suggestion(L, name, names);
    const char *guess = lua_tostring(L, -1);
    vm_fail(L,
            guess ? lua_pushfstring(L, "did you mean %s?", guess) : "help(m) lists the functions",
            "there is no help on \"%s\"", text);
}

void repl_help(lua_State *L, int count) {
    if (!count) fputs(prompt_text, stdout);
    for (int i = 1; i <= count; i++) {
        if (lua_type(L, i) == LUA_TSTRING) {
            push_named(L, lua_tostring(L, i));
            repl_print_help(L, -1);
            lua_pop(L, 1);
        } else {
            repl_print_help(L, i);
        }
    }
}

static int help_call(lua_State *L) {
    lua_remove(L, 1);
    repl_help(L, lua_gettop(L));
    return 0;
}

static int help_tostring(lua_State *L) {
    lua_pushlstring(L, prompt_text, sizeof prompt_text - 2); /* a newline follows */
    return 1;
}

void repl_push_help(lua_State *L) {
    static const luaL_Reg meta[] = {
        {"__call", help_call}, {"__tostring", help_tostring}, {NULL, NULL}};
    lua_newtable(L);
    lua_newtable(L);
    luaL_setfuncs(L, meta, 0);
    lua_setmetatable(L, -2);
}
