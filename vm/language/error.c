/* Errors as scripts and people see them.
 *
 * An error is a table with the class "mlua.error" and the fields message, file, line, help, text
 * (everything, as it is printed) and interrupted. tostring returns the text, and the methods of
 * strings take it (err:match "axis"), so that scripts use it as they do plain Lua's errors, which
 * stay strings until the message handler of the outermost call turns them into such tables. */
#include "vm/vm.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/knobs.h"

static const char *const error_class = "mlua.error";

/* The frame of a script's function, from `level` on: the innermost for 1, its caller's for 2. Where
 * there is none down to the call `end`, *frame is that. */
static bool script_frame(lua_State *L, lua_Debug *frame, int level, int scripts,
                         const vm_call_id *end) {
    for (; lua_getstack(L, level, frame); level++) {
        if (frame->i_ci == end) return false;
        lua_getinfo(L, "S", frame);
        if (frame->what[0] == 'C' || strncmp(frame->source, VM_STDLIB, sizeof VM_STDLIB - 1) == 0)
            continue;
        lua_getinfo(L, "l", frame); /* which takes long: not for the many frames of the library */
        if (frame->currentline >= 1 && --scripts <= 0) return true;
    }
    return false;
}

bool vm_script_frame(lua_State *L, lua_Debug *frame) {
    return script_frame(L, frame, 0, 1, NULL);
}

bool vm_script_frame_above(lua_State *L, const vm_call_id *end, lua_Debug *frame) {
    return script_frame(L, frame, 1, 1, end); /* 0 is the C function that asks */
}

/* Whose line an error names: none where what runs was asked for on the command line. */
static bool blamed_frame(lua_State *L, lua_Debug *frame, int scripts) {
    return script_frame(L, frame, 0, scripts, vm_of(L)->command);
}

const char *vm_file_of(const char *source) {
    return source[0] == '@' || source[0] == '=' ? source + 1 : source;
}

/* ---- Rendering ------------------------------------------------------------------------------- */

/* The origin that a node shows: for the read of a state, the state's declaration. */
static const ml_origin *origin_of(const ml_graph *g, ml_ref n, const char **state_name) {
    ml_ref leaf = n;
    *state_name = NULL;
    if (ml_graph_node(g, n)->op == ML_OP_CAST) leaf = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, leaf)->op == ML_OP_STATE) {
        const ml_state *state = ml_graph_state(g, (uint32_t)ml_graph_args(g, leaf)[0]);
        *state_name = state->name;
        return &state->origin;
    }
    return ml_graph_origin(g, n);
}

/* The k-th operand's name, where the text does not contain one. */
static const char *operand_word(int k, int count) {
    static const char *const ordinals[] = {"first", "second", "third", "fourth"};
    if (count == 1) return "the tensor";
    if (count == 2) return k == 0 ? "left" : "right";
    return k < 4 ? ordinals[k] : "operand";
}

/* Push lines such as "      h   bf16[seq=8]   from gpt.lua:3\n". */
static void push_operands(lua_State *L, const lua_Debug *frame, const ml_ref *operands, int count) {
    const ml_graph *g = vm_of(L)->graph;
    int base = lua_gettop(L);
    size_t name_width = 0, type_width = 0;
    luaL_checkstack(L, 2 * count + 16, "operands");
    for (int i = 0; i < count; i++) {
        ml_ref renamed = ml_graph_node(g, operands[i])->op == ML_OP_RENAME /* as by m.attention */
                             ? ml_graph_source(g, operands[i], 0)
                             : operands[i];
        if (!frame || (!vm_push_name(L, frame, operands[i]) && !vm_push_name(L, frame, renamed)))
            lua_pushstring(L, operand_word(i, count));
        vm_push_type(L, g, ml_graph_type(g, operands[i]));
        size_t name = lua_rawlen(L, -2), type = lua_rawlen(L, -1);
        if (name > name_width) name_width = name;
        if (type > type_width) type_width = type;
    }
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    for (int i = 0; i < count; i++) {
        const char *name = lua_tostring(L, base + 1 + 2 * i);
        const char *type = lua_tostring(L, base + 2 + 2 * i);
        const char *state;
        const ml_origin *origin = origin_of(g, operands[i], &state);
        luaL_addstring(&b, "      ");
        luaL_addstring(&b, name);
        for (size_t w = strlen(name); w < name_width + 2; w++) luaL_addchar(&b, ' ');
        luaL_addstring(&b, type);
        if (origin && origin->file) {
            char line[32];
            snprintf(line, sizeof line, ":%d", origin->line);
            for (size_t w = strlen(type); w < type_width + 3; w++) luaL_addchar(&b, ' ');
            luaL_addstring(&b, "from ");
            luaL_addstring(&b, origin->file);
            luaL_addstring(&b, line);
            if (state && strcmp(state, name) != 0) {
                luaL_addstring(&b, "   parameter ");
                luaL_addstring(&b, state);
            }
        }
        luaL_addchar(&b, '\n');
    }
    luaL_pushresult(&b);
    lua_replace(L, base + 1);
    lua_settop(L, base + 1);
}

/* The text that sizes `axis` in the statement that begins on a line: "cfg.embed". Pushes it or
 * returns false. */
static bool push_size_text(lua_State *L, const vm_axis_site *site) {
    const char *name = ml_axis_name(vm_of(L)->graph, site->axis);
    size_t length = strlen(name);
    for (int line = site->line; line < site->line + 12; line++) {
        vm_push_line(L, site->file, line);
        const char *text = lua_tostring(L, -1);
        for (const char *at = text; at && (at = strstr(at, name)) != NULL; at += length) {
            const char *value = at + length + strspn(at + length, " ");
            bool whole = at == text || !strchr("abcdefghijklmnopqrstuvwxyz_.", at[-1]);
            if (!whole || *value != '=' || value[1] == '=') continue;
            value += 1 + strspn(value + 1, " ");
            size_t size = strcspn(value, ",};)");
            while (size && value[size - 1] == ' ') size--;
            lua_pushlstring(L, value, size);
            lua_remove(L, -2);
            return size > 0;
        }
        lua_pop(L, 1);
    }
    return false;
}

static const vm_axis_site *find_site(const ml_vm *vm, ml_axis axis, int64_t size) {
    for (uint32_t i = 0; i < vm->sites.count; i++)
        if (vm->sites.at[i].axis == axis && vm->sites.at[i].size == size) return &vm->sites.at[i];
    return NULL;
}

/* Two operands that disagree on the size of an axis: push which lines size it, or nil. */
static void push_size_help(lua_State *L, const ml_ref *operands, int count) {
    const ml_vm *vm = vm_of(L);
    if (count == 2) {
        const ml_type *a = ml_graph_type(vm->graph, operands[0]);
        const ml_type *b = ml_graph_type(vm->graph, operands[1]);
        for (int i = 0; i < a->rank; i++) {
            int at = ml_type_find(b, a->axis[i]);
            if (at < 0 || a->size[i] == b->size[at]) continue;
            const vm_axis_site *left = find_site(vm, a->axis[i], a->size[i]);
            const vm_axis_site *right = find_site(vm, a->axis[i], b->size[at]);
            int top = lua_gettop(L);
            if (left && right && push_size_text(L, left) && push_size_text(L, right)) {
                lua_pushfstring(L, "line %d sizes %s from %s; line %d from %s", left->line,
                                ml_axis_name(vm->graph, a->axis[i]), lua_tostring(L, top + 1),
                                right->line, lua_tostring(L, top + 2));
                lua_replace(L, top + 1);
                lua_settop(L, top + 1);
                return;
            }
            lua_settop(L, top);
        }
    }
    lua_pushnil(L);
}

/* Push the whole text of an error. message, operand lines and help are at the given indices. */
static void push_text(lua_State *L, const char *file, int line, int message, int operands,
                      int help) {
    luaL_Buffer b;
    const char *text = lua_tostring(L, message);
    const char *rest = strchr(text, '\n');
    if (file) {
        vm_push_line(L, file, line);
        lua_pushfstring(L, "%s:%d: ", file, line);
    } else {
        lua_pushnil(L);
        lua_pushliteral(L, "mlua: ");
    }
    int prefix = lua_gettop(L);
    luaL_buffinit(L, &b);
    luaL_addstring(&b, lua_tostring(L, prefix));
    luaL_addlstring(&b, text, rest ? (size_t)(rest - text) : strlen(text));
    luaL_addchar(&b, '\n');
    const char *source = lua_tostring(L, prefix - 1);
    if (source) {
        char number[32];
        snprintf(number, sizeof number, "%5d | ", line);
        luaL_addstring(&b, number);
        luaL_addstring(&b, source);
        luaL_addchar(&b, '\n');
    }
    if (rest) {
        luaL_addstring(&b, rest + 1);
        if (text[strlen(text) - 1] != '\n') luaL_addchar(&b, '\n');
    }
    if (operands) luaL_addstring(&b, lua_tostring(L, operands));
    if (help && lua_toboolean(L, help)) {
        luaL_addstring(&b, "  help: ");
        luaL_addstring(&b, lua_tostring(L, help));
        luaL_addchar(&b, '\n');
    }
    luaL_pushresult(&b);
    lua_replace(L, prefix - 1);
    lua_settop(L, prefix - 1);
}

/* For editors: the operands as a list in the error object on top. */
static void add_operands(lua_State *L, const lua_Debug *frame, const ml_ref *operands, int count) {
    const ml_graph *g = vm_of(L)->graph;
    lua_createtable(L, count, 0);
    for (int i = 0; i < count; i++) {
        const char *state;
        const ml_origin *origin = origin_of(g, operands[i], &state);
        lua_createtable(L, 0, 4);
        if (!frame || !vm_push_name(L, frame, operands[i]))
            lua_pushstring(L, operand_word(i, count));
        lua_setfield(L, -2, "name");
        vm_push_type(L, g, ml_graph_type(g, operands[i]));
        lua_setfield(L, -2, "type");
        if (origin && origin->file) {
            vm_set_string(L, "file", origin->file);
            vm_set_integer(L, "line", origin->line);
        }
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "operands");
}

static void add_traceback(lua_State *L, int object) {
    if (!ml_debug_on(1)) return;
    luaL_traceback(L, L, NULL, 1);
    lua_setfield(L, object, "traceback");
}

/* Turn message and help (top of the stack; help may be nil) into an error object there. */
static void make_error(lua_State *L, const char *file, int line, int operands) {
    int help = lua_gettop(L), message = help - 1;
    push_text(L, file, line, message, operands, help);
    lua_createtable(L, 0, 6);
    lua_insert(L, message);
    int object = message;
    lua_setfield(L, object, "text");
    lua_setfield(L, object, "help");
    lua_setfield(L, object, "message");
    lua_pushstring(L, file);
    lua_setfield(L, object, "file");
    lua_pushinteger(L, line);
    lua_setfield(L, object, "line");
    luaL_setmetatable(L, error_class);
    add_traceback(L, object);
}

/* Message and help (or nil) are on top of the stack: whether they, and the place of the error, give
 * way to a call that explains it. A help that is missing may be added. */
static bool explain(lua_State *L, lua_Debug *where) {
    int help = lua_gettop(L);
    if (vm_push_call_help(L, where)) {
        lua_replace(L, help);
        lua_replace(L, help - 1);
        return true;
    }
    const char *message = lua_tostring(L, help - 1);
    bool nothing = strstr(message, ", got nil") || strstr(message, ", got nothing");
    if (nothing && lua_isnil(L, help)) {
        vm_push_nil_help(L);
        lua_replace(L, help);
        lua_settop(L, help);
    }
    return false;
}

/* Message and help (or nil) are on top of the stack. */
static _Noreturn void raise_error(lua_State *L, const ml_ref *operands, int count) {
    lua_Debug frame;
    bool known = blamed_frame(L, &frame, 1);
    int help = lua_gettop(L), lines = 0;
    if (explain(L, &frame)) known = true, count = 0;
    if (count) {
        if (lua_isnil(L, help)) {
            push_size_help(L, operands, count);
            lua_replace(L, help);
        }
        push_operands(L, known ? &frame : NULL, operands, count);
        lua_insert(L, help - 1); /* below message and help */
        lines = help - 1;
    }
    make_error(L, known ? vm_file_of(frame.source) : NULL, known ? frame.currentline : 0, lines);
    if (vm_of(L)->options->facts) add_operands(L, known ? &frame : NULL, operands, count);
    lua_error(L);
    __builtin_unreachable();
}

int vm_fail_with(lua_State *L, const ml_ref *operands, int count, const char *help,
                 const char *format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    luaL_checkstack(L, 40, "an error");
    lua_pushstring(L, text);
    lua_pushstring(L, help);
    raise_error(L, operands, count);
}

void vm_raise(lua_State *L) {
    ml_error *error = ml_error_last();
    ml_ref operands[ML_ERROR_OPERANDS];
    int count = 0;
    bool interrupted = error->status == ML_INTERRUPTED;
    if (error->status == ML_DEVICE) vm_of(L)->device_failed = true;
    luaL_checkstack(L, 40, "an error");
    lua_pushstring(L, error->text);
    if (error->help[0])
        lua_pushstring(L, error->help);
    else
        lua_pushnil(L);
    const ml_graph *g = vm_of(L)->graph;
    for (int i = 0; i < error->operand_count; i++) {
        ml_ref n = error->operands[i];
        if (n && n < ml_graph_count(g) && ml_graph_node(g, n)->op != ML_OP_CONST)
            operands[count++] = n;
    }
    if (!interrupted) raise_error(L, operands, count);
    make_error(L, NULL, 0, 0);
    vm_set_boolean(L, "interrupted", 1);
    lua_error(L);
    __builtin_unreachable();
}

void vm_check(lua_State *L, ml_status status) {
    if (status != ML_OK) vm_raise(L);
}

void vm_protect(lua_State *L, void (*body)(void *), void *argument) {
    if (ml_protect(body, argument) != ML_OK) vm_raise(L);
}

/* ---- Errors of plain Lua --------------------------------------------------------------------- */

/* The frame whose position Lua put before a message ("gpt.lua:3: ..."): its chunk may be longer
 * than what the message shows. */
static bool frame_of_prefix(lua_State *L, const char *file, size_t length, int line,
                            lua_Debug *frame) {
    for (int level = 0; lua_getstack(L, level, frame); level++) {
        lua_getinfo(L, "Sl", frame);
        if (frame->currentline == line && strlen(frame->short_src) == length &&
            memcmp(frame->short_src, file, length) == 0)
            return true;
    }
    return false;
}

/* Split "file:line: message". */
static const char *split_position(const char *text, size_t *file_length, int *line) {
    for (const char *colon = strchr(text, ':'); colon; colon = strchr(colon + 1, ':')) {
        char *end;
        long number = strtol(colon + 1, &end, 10);
        if (end == colon + 1 || end[0] != ':' || end[1] != ' ') continue;
        const char *newline = strchr(text, '\n');
        if (newline && newline < colon) return NULL;
        *file_length = (size_t)(colon - text);
        *line = (int)number;
        return end + 2;
    }
    return NULL;
}

/* What the innermost frame of a script has called, by the name that it has there; or NULL. */
static const char *called_name(lua_State *L) {
    lua_Debug frame, called = {0};
    for (int level = 0; lua_getstack(L, level, &frame); level++) {
        lua_getinfo(L, "nSl", &frame);
        bool script =
            frame.currentline >= 1 && strncmp(frame.source, VM_STDLIB, sizeof VM_STDLIB - 1) != 0;
        if (script) return called.name;
        called = frame;
    }
    return NULL;
}

/* Push an error object for a string that plain Lua raised, at index 1. */
static void convert_message(lua_State *L) {
    const char *text = lua_tostring(L, 1);
    size_t length = 0;
    int line = 0;
    const char *message = split_position(text, &length, &line);
    /* coroutine.wrap puts its own position before that of the error. */
    while (message && strncmp(message, text, length) == 0 && message[length] == ':') {
        size_t inner_length = 0;
        const char *inner = split_position(message, &inner_length, &line);
        if (!inner || inner_length != length) break;
        message = inner;
    }
    lua_Debug frame;
    bool known = false;
    const char *file = NULL;
    /* What Lua's own functions of C raise has no position: ipairs(nil), table.sort { 1, "a" }. */
    if (!message && strncmp(text, "attempt to ", strlen("attempt to ")) == 0 &&
        vm_script_frame(L, &frame)) {
        known = true;
        file = vm_file_of(frame.source);
        line = frame.currentline;
    }
    if (message) {
        bool stdlib = strncmp(text, VM_STDLIB + 1, sizeof VM_STDLIB - 2) == 0;
        lua_pushlstring(L, text, length);
        file = lua_tostring(L, -1);
        if (stdlib) {
            const char *called = called_name(L);
            lua_pushfstring(L, "%s%s%s (at %s:%d)", called ? called : "",
                            called ? " was given what it cannot take: " : "", message, file, line);
            message = lua_tostring(L, -1);
            known = vm_script_frame(L, &frame);
            file = NULL;
        } else if (frame_of_prefix(L, text, length, line, &frame)) {
            known = true;
        }
        if (known) {
            file = vm_file_of(frame.source);
            line = frame.currentline;
        }
    }
    int top = lua_gettop(L);
    if (known && vm_push_call_help(L, &frame)) {
        file = vm_file_of(frame.source);
        line = frame.currentline;
    } else {
        lua_pushstring(L, message ? message : text);
        vm_push_plain_help(L, text, file, line);
        lua_copy(L, -1, top + 2);
        lua_settop(L, top + 2);
    }
    make_error(L, file, line, 0);
}

int vm_message_handler(lua_State *L) {
    lua_settop(L, 1);
    if (luaL_getmetafield(L, 1, "__name") == LUA_TSTRING &&
        strcmp(lua_tostring(L, -1), error_class) == 0) {
        lua_settop(L, 1);
        return 1;
    }
    lua_settop(L, 1);
    if (lua_type(L, 1) != LUA_TSTRING) luaL_tolstring(L, 1, NULL), lua_replace(L, 1);
    convert_message(L);
    return 1;
}

void vm_finish_error(lua_State *L) {
    lua_pushcfunction(L, vm_message_handler);
    lua_insert(L, -2);
    lua_call(L, 1, 1);
}

/* ---- The class and core.fail ----------------------------------------------------------------- */

static int error_tostring(lua_State *L) {
    lua_getfield(L, 1, "text");
    size_t length;
    const char *text = luaL_tolstring(L, -1, &length);
    while (length && text[length - 1] == '\n') length--;
    lua_pushlstring(L, text, length);
    return 1;
}

static int error_concat(lua_State *L) {
    luaL_tolstring(L, 1, NULL);
    luaL_tolstring(L, 2, NULL);
    lua_concat(L, 2);
    return 1;
}

/* A method of strings, called with an error: its text is the string. Upvalue: the function. */
static int error_string_method(lua_State *L) {
    luaL_checkany(L, 1);
    luaL_tolstring(L, 1, NULL);
    lua_replace(L, 1);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
    return lua_gettop(L);
}

/* What pcall caught may be used as the string that plain Lua's errors are: err:match "...". */
static int error_index(lua_State *L) {
    lua_getglobal(L, LUA_STRLIBNAME);
    if (!lua_istable(L, -1)) return 0;
    lua_pushvalue(L, 2);
    if (lua_rawget(L, -2) != LUA_TFUNCTION) return 0;
    lua_pushcclosure(L, error_string_method, 1);
    return 1;
}

static int error_length(lua_State *L) {
    size_t length;
    luaL_tolstring(L, 1, &length);
    lua_pushinteger(L, (lua_Integer)length);
    return 1;
}

static int core_fail(lua_State *L) {
    luaL_checkstring(L, 1);
    lua_settop(L, 2);
    lua_pushvalue(L, 1);
    lua_pushnil(L);
    if (lua_istable(L, 2) && vm_option(L, 2, "help")) lua_replace(L, 4);
    lua_settop(L, 4);
    int level = 1;
    if (lua_istable(L, 2) && vm_option(L, 2, "level")) level = (int)vm_integer(L, -1, "the level");
    lua_Debug frame;
    const bool placed = lua_istable(L, 2) && vm_option(L, 2, "at");
    if (placed && vm_is_tensor(L, -1)) {
        const char *state;
        const ml_origin *origin = origin_of(vm_of(L)->graph, vm_tensor(L, -1, "at"), &state);
        if (origin && origin->file) {
            lua_settop(L, 4);
            make_error(L, origin->file, origin->line, 0);
            return lua_error(L);
        }
    }
    bool known = placed && lua_isfunction(L, -1);
    if (known) {
        lua_getinfo(L, ">S", &frame);
        known = frame.linedefined >= 1;
        frame.currentline = frame.linedefined;
    }
    lua_settop(L, 4);
    if (!known) known = explain(L, &frame) || blamed_frame(L, &frame, level);
    make_error(L, known ? vm_file_of(frame.source) : NULL, known ? frame.currentline : 0, 0);
    return lua_error(L);
}

static const vm_entry entries[] = {{"fail", core_fail,
                                    "message: string, options?: {help: string, level: integer, at: "
                                    "function|Tensor}",
                                    "raise an error that names the script's line, or that where "
                                    "`at` begins, or was made"},
                                   {0}};

void vm_error_register(lua_State *L) {
    luaL_newmetatable(L, error_class);
    static const luaL_Reg methods[] = {{"__tostring", error_tostring},
                                       {"__concat", error_concat},
                                       {"__index", error_index},
                                       {"__len", error_length},
                                       {NULL, NULL}};
    luaL_setfuncs(L, methods, 0);
    lua_pop(L, 1);
    vm_register(L, entries);
}

void vm_print_error(lua_State *L) {
    if (lua_istable(L, -1)) {
        lua_getfield(L, -1, "text");
        const char *text = lua_tostring(L, -1);
        if (!text) text = "mlua: an error without a message\n";
        fputs(text, stderr);
        vm_log(L, text, strlen(text));
        lua_pop(L, 1);
        lua_getfield(L, -1, "traceback");
        if (lua_tostring(L, -1)) fprintf(stderr, "%s\n", lua_tostring(L, -1));
        lua_pop(L, 2);
        return;
    }
    const char *text = lua_tostring(L, -1);
    if (text && strcmp(text, "not enough memory") == 0) text = "not enough host memory";
    fprintf(stderr, "mlua: %s\n", text ? text : "an error without a message");
    lua_pop(L, 1);
}

bool vm_is_interrupt(lua_State *L, int index) {
    index = lua_absindex(L, index);
    if (!lua_istable(L, index)) return false;
    lua_pushliteral(L, "interrupted");
    lua_rawget(L, index);
    bool result = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return result;
}
