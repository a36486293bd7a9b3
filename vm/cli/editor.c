/* Editor definitions (LuaCATS), generated from what the program is made of: the rows that bindings
 * register, the library table itself, and the comments above its functions in stdlib/. */
#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "vm/embed.h"
#include "vm/vm.h"

typedef struct {
    lua_State *L;
    FILE *file;
} writer;

/* ---- Rows of C: "axis: Axis|string, start?: integer -> Tensor" ------------------------------- */

/* Where the next parameter ends: at a comma outside of brackets. */
static const char *end_of_parameter(const char *at, const char *end) {
    int depth = 0;
    for (; at < end; at++) {
        if (strchr("([{<", *at)) depth++;
        if (strchr(")]}>", *at)) depth--;
        if (*at == ',' && depth == 0) break;
    }
    return at;
}

static void write_row(writer *w, const vm_entry *row, const char *owner, char separator) {
    const char *signature = row->signature, *arrow = strstr(signature, "-> ");
    const char *end = arrow ? arrow : signature + strlen(signature);
    char names[512] = "";
    fprintf(w->file, "---%s\n", row->doc);
    for (const char *at = signature; at < end;) {
        while (at < end && isspace((unsigned char)*at)) at++;
        const char *stop = end_of_parameter(at, end), *colon = memchr(at, ':', (size_t)(stop - at));
        if (!colon) break;
        bool optional = colon[-1] == '?';
        int length = (int)(colon - at) - optional;
        const char *last = stop;
        while (last > colon && isspace((unsigned char)last[-1])) last--;
        fprintf(w->file, "---@param %.*s%s %.*s\n", length, at, optional ? "?" : "",
                (int)(last - colon - 2), colon + 2);
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%.*s", used ? ", " : "", length, at);
        at = stop + 1;
    }
    for (const char *at = arrow ? arrow + 3 : NULL; at;) {
        const char *stop = end_of_parameter(at, at + strlen(at));
        while (isspace((unsigned char)*at)) at++;
        fprintf(w->file, "---@return %.*s\n", (int)(stop - at), at);
        at = *stop ? stop + 1 : NULL;
    }
    fprintf(w->file, "function %s%c%s(%s) end\n\n", owner, separator, row->name, names);
}

/* An elementwise op as a method has its first operand in front. */
static void write_method_row(writer *w, const vm_entry *row) {
    vm_entry method = *row;
    if (strncmp(row->signature, "a: Tensor", 9) == 0) {
        const char *comma = strstr(row->signature, ", "), *arrow = strstr(row->signature, "-> ");
        method.signature = comma && comma < arrow ? comma + 2 : arrow;
    }
    write_row(w, &method, "Tensor", ':');
}

/* ---- Functions of stdlib --------------------------------------------------------------------- */

typedef struct {
    const char *comment, *comment_end; /* the lines "---..." above */
    const char *parameters;            /* after '(' of the definition, or NULL */
    size_t parameters_length;
} definition;

static const char *line_start(const char *data, const char *at) {
    while (at > data && at[-1] != '\n') at--;
    return at;
}

/* The comment lines that end before `line`. */
static void find_comment(const char *data, const char *line, definition *d) {
    d->comment = d->comment_end = line;
    while (d->comment > data) {
        const char *above = line_start(data, d->comment - 1);
        const char *text = above + strspn(above, " ");
        if (strncmp(text, "---", 3) != 0) break;
        d->comment = above;
    }
}

/* Find "function m.NAME(" or "m.NAME =" at the start of a line; `name` may hold a dot. */
static bool find_in(const ml_embedded *file, const char *name, definition *d) {
    char patterns[2][160];
    snprintf(patterns[0], sizeof patterns[0], "function m.%s(", name);
    snprintf(patterns[1], sizeof patterns[1], "m.%s = ", name);
    for (const char *line = file->data, *end = file->data + file->size; line < end;) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        size_t length = newline ? (size_t)(newline - line) : (size_t)(end - line);
        for (int i = 0; i < 2; i++) {
            size_t size = strlen(patterns[i]);
            if (length < size || memcmp(line, patterns[i], size) != 0) continue;
            find_comment(file->data, line, d);
            const char *open = line + size - (i == 0);
            if (i == 1) /* "m.name = function(": other definitions have their @param lines */
                open = strncmp(open, "function(", 9) == 0 ? open + 8 : NULL;
            const char *close = open && open < line + length
                                    ? memchr(open, ')', (size_t)(line + length - open))
                                    : NULL;
            d->parameters = close ? open + 1 : NULL;
            d->parameters_length = close ? (size_t)(close - open - 1) : 0;
            return true;
        }
        line += length + 1;
    }
    return false;
}

static bool find_definition(const char *name, definition *d) {
    for (const ml_embedded *file = ml_embedded_files; file->name; file++) {
        size_t length = strlen(file->name);
        if (length > 4 && strcmp(file->name + length - 4, ".lua") == 0 && find_in(file, name, d))
            return true;
    }
    return false;
}

/* Print the comment lines, and collect the names after @param; `skip` leaves out that many. */
static void write_comment(writer *w, const definition *d, int skip, char *names, size_t size) {
    names[0] = 0;
    for (const char *line = d->comment; line < d->comment_end;) {
        const char *newline = memchr(line, '\n', (size_t)(d->comment_end - line));
        const char *end = newline ? newline : d->comment_end;
        const char *text = line + strspn(line, " ");
        bool parameter = strncmp(text, "---@param ", 10) == 0;
        if (!parameter || skip-- <= 0) {
            fprintf(w->file, "%.*s\n", (int)(end - text), text);
            if (parameter) {
                size_t used = strlen(names);
                snprintf(names + used, size - used, "%s%.*s", used ? ", " : "",
                         (int)strcspn(text + 10, " ?"), text + 10);
            }
        }
        line = end + 1;
    }
}

/* `function OWNER NAME(...) end` for the function m.NAME of stdlib. */
static void write_function(writer *w, const char *owner, char separator, const char *name,
                           const char *path) {
    definition d;
    char names[512];
    bool method = separator == ':';
    if (!find_definition(path, &d) || d.comment == d.comment_end) return;
    write_comment(w, &d, method ? 1 : 0, names, sizeof names);
    if (d.parameters && !method)
        fprintf(w->file, "function %s%c%s(%.*s) end\n\n", owner, separator, name,
                (int)d.parameters_length, d.parameters);
    else
        fprintf(w->file, "function %s%c%s(%s) end\n\n", owner, separator, name, names);
}

/* ---- Classes that the comments of stdlib declare --------------------------------------------- */

/* The end of the comment lines "---..." that begin at `line`. */
static const char *end_of_comment(const char *line, const char *end) {
    while (line < end && end - line >= 3 && memcmp(line, "---", 3) == 0) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        line = newline ? newline + 1 : end;
    }
    return line;
}

static bool declares_class(const char *comment, const char *end) {
    static const char mark[] = "---@class ", library[] = "---@class mlua\n";
    for (const char *line = comment; line < end; line++) {
        if ((size_t)(end - line) >= strlen(mark) && memcmp(line, mark, strlen(mark)) == 0)
            return strncmp(line, library, strlen(library)) != 0;
        line = memchr(line, '\n', (size_t)(end - line));
        if (!line) break;
    }
    return false;
}

static void write_classes(writer *w) {
    for (const ml_embedded *file = ml_embedded_files; file->name; file++) {
        const char *end = file->data + file->size;
        size_t length = strlen(file->name);
        if (length < 4 || strcmp(file->name + length - 4, ".lua") != 0) continue;
        for (const char *line = file->data; line && line < end;) {
            const char *stop = end_of_comment(line, end);
            if (stop > line && declares_class(line, stop))
                fprintf(w->file, "%.*s\n", (int)(stop - line), line);
            line = memchr(stop, '\n', (size_t)(end - stop));
            if (line) line++;
        }
    }
}

/* ---- The whole file -------------------------------------------------------------------------- */

static int compare_keys(lua_State *L) {
    lua_pushboolean(L, strcmp(lua_tostring(L, 1), lua_tostring(L, 2)) < 0);
    return 1;
}

/* Push the sorted string keys of the table at `index`; the value is their number. */
static int push_keys(lua_State *L, int index) {
    int count = 0;
    index = lua_absindex(L, index);
    lua_newtable(L);
    lua_pushnil(L);
    while (lua_next(L, index)) {
        lua_pop(L, 1);
        if (lua_type(L, -1) != LUA_TSTRING) continue;
        lua_pushvalue(L, -1);
        lua_rawseti(L, -3, ++count);
    }
    lua_getglobal(L, "table");
    lua_getfield(L, -1, "sort");
    lua_pushvalue(L, -3);
    lua_pushcfunction(L, compare_keys);
    lua_call(L, 2, 0);
    lua_pop(L, 1);
    return count;
}

static void write_methods(writer *w, int methods) {
    lua_State *L = w->L;
    int count = push_keys(L, methods);
    for (int i = 1; i <= count; i++) {
        lua_rawgeti(L, -1, i);
        lua_pushvalue(L, -1);
        lua_rawget(L, methods);
        const char *name = lua_tostring(L, -2);
        const vm_entry *row = vm_documentation(L, -1);
        if (row)
            write_method_row(w, row);
        else
            write_function(w, "Tensor", ':', name, name);
        lua_pop(L, 2);
    }
    lua_pop(L, 1);
}

static void write_class(writer *w, const char *class_name, const char *title, const char *base,
                        const char *fields) {
    lua_State *L = w->L;
    fprintf(w->file, "---@class %s%s%s\n%slocal %s = {}\n\n", title, base ? ": " : "",
            base ? base : "", fields, title);
    luaL_getmetatable(L, class_name);
    lua_getfield(L, -1, "__index");
    if (lua_iscfunction(L, -1) && lua_getupvalue(L, -1, 1)) lua_replace(L, -2);
    if (lua_istable(L, -1)) {
        int table = lua_gettop(L), count = push_keys(L, table);
        for (int i = 1; i <= count; i++) {
            lua_rawgeti(L, -1, i);
            lua_rawget(L, table);
            const vm_entry *row = vm_documentation(L, -1);
            if (row) write_row(w, row, title, ':');
            lua_pop(L, 1);
        }
        lua_pop(L, 1);
    }
    lua_pop(L, 2);
}

/* A table in m with its functions, such as m.init. */
static void write_table(writer *w, int table, const char *name) {
    lua_State *L = w->L;
    definition d;
    char names[512], owner[64], path[160];
    if (!find_definition(name, &d) || d.comment == d.comment_end) return;
    write_comment(w, &d, 0, names, sizeof names);
    fprintf(w->file, "m.%s = {}\n\n", name);
    snprintf(owner, sizeof owner, "m.%s", name);
    int count = push_keys(L, table);
    for (int i = 1; i <= count; i++) {
        lua_rawgeti(L, -1, i);
        snprintf(path, sizeof path, "%s.%s", name, lua_tostring(L, -1));
        write_function(w, owner, '.', lua_tostring(L, -1), path);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

/* What scripts see: the functions of m, and its tables. */
static void write_library(writer *w, int table) {
    lua_State *L = w->L;
    int count = push_keys(L, table);
    for (int i = 1; i <= count; i++) {
        lua_rawgeti(L, -1, i);
        lua_pushvalue(L, -1);
        lua_rawget(L, table);
        const char *name = lua_tostring(L, -2);
        const vm_entry *row = lua_isfunction(L, -1) ? vm_documentation(L, -1) : NULL;
        if (row) {
            vm_entry renamed = *row;
            renamed.name = name;
            write_row(w, &renamed, "m", '.');
        } else if (lua_isfunction(L, -1)) {
            write_function(w, "m", '.', name, name);
        } else if (lua_istable(L, -1)) {
            write_table(w, lua_gettop(L), name);
        }
        lua_pop(L, 2);
    }
    lua_pop(L, 1);
}

static int write_all(lua_State *L) {
    writer w = {L, lua_touserdata(L, 1)};
    static const char tensors[] =
        "---A dtype and named axes. It has no value while the script runs.\n---\n"
        "---Elementwise operands match by the names of their axes: one has all axes of the "
        "others.\n---\n"
        "---Dtypes: floats of several (bf16, f32, f64) are promoted to the widest. Integers, bools "
        "and floats do not mix:\n---t:cast(dtype) converts. A Lua number takes the dtype of the "
        "tensor beside it (an integer tensor takes integers\n---alone); where all operands are "
        "numbers it is i32 or i64 if they are integers, else f32. Forward functions read\n"
        "---parameters in the compute dtype (m.compute_dtype); p:read() gives the stored f32. Sums "
        "and products accumulate\n---in f32 or wider.\n";
    static const char operators[] =
        "---@operator add(Tensor|number): Tensor\n---@operator sub(Tensor|number): Tensor\n"
        "---@operator mul(Tensor|number): Tensor\n---@operator div(Tensor|number): Tensor\n"
        "---@operator idiv(Tensor|number): Tensor\n---@operator mod(Tensor|number): Tensor\n"
        "---@operator pow(Tensor|number): Tensor\n---@operator unm: Tensor\n";
    fprintf(
        w.file,
        "---@meta mlua\n-- Written by `mlua editor` from the program's own tables: do not edit.\n\n"
        "---@class Axis\n---@field name string\n---@field size integer\n\n");
    fprintf(w.file, "%s---@class Tensor\n%slocal Tensor = {}\n\n", tensors, operators);
    lua_getfield(L, LUA_REGISTRYINDEX, "mlua.tensor_methods");
    lua_getglobal(L, "require");
    lua_pushliteral(L, "mlua"); /* adds its methods to the table */
    lua_call(L, 1, 1);
    write_methods(&w, 2);
    write_class(&w, vm_state_class, "State", "Tensor", "");
    write_class(&w, vm_host_class, "Host", NULL, "---@field [integer] number\n");
    write_class(&w, vm_program_class, "Program", NULL,
                "---@overload fun(inputs: table): table<string, number|Host>\n");
    write_class(&w, vm_corpus_class, "Corpus", NULL, "");
    write_class(&w, vm_random_class, "Random", NULL, "");
    write_classes(&w);
    fprintf(w.file, "---@class mlua\nlocal m = {}\n\n");
    write_library(&w, 3);
    fprintf(w.file, "return m\n");
    return 0;
}

int editor_write(ml_vm *vm, const char *path) {
    lua_State *L = vm->L;
    FILE *file = path ? fopen(path, "w") : stdout;
    if (!file) {
        fprintf(stderr, "mlua: cannot write %s: %s\n", path, strerror(errno));
        return 1;
    }
    lua_pushcfunction(L, write_all);
    lua_pushlightuserdata(L, file);
    int status = vm_call(L, 1, 0);
    bool failed = ferror(file) != 0;
    if (path && fclose(file) != 0) failed = true;
    if (status != LUA_OK)
        vm_print_error(L);
    else if (failed)
        fprintf(stderr, "mlua: cannot write %s: %s\n", path ? path : "the definitions",
                strerror(errno));
    return status != LUA_OK || failed;
}
