/* What C knows of a traced script, as tables of Lua: stdlib/known.lua makes one JSON object. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/graph/analysis.h"
#include "vm/check/predicted.h"
#include "vm/check/traffic.h"
#include "vm/known/known.h"

/* ---- Values ---------------------------------------------------------------------------------- */

typedef struct {
    ml_arena *arena;
    ml_ref *nodes; /* of tensors and states, by value; 0: none */
    ml_placements *places;
    bool *placed;
} placement_list;

static ml_ref node_of(lua_State *L, const known_value *value) {
    if (value->kind == KNOWN_TENSOR) return value->node;
    return value->kind == KNOWN_STATE ? vm_state_node(L, value->state) : 0;
}

/* By node, on top of the stack: whether it is of an attention's function or of a recurrence's step,
 * which are no part of a program by themselves. */
static const bool *push_bound(lua_State *L) {
    const ml_graph *g = vm_of(L)->graph;
    bool *bound = lua_newuserdatauv(L, ml_graph_count(g) + 1, 0);
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        const ml_node *node = ml_graph_node(g, n);
        bound[n] = node->op == ML_OP_PARAM || (node->flags & ML_NODE_FUNCTION);
        for (int i = 0; i < node->source_count && !bound[n]; i++)
            bound[n] = bound[ml_graph_source(g, n, i)];
    }
    return bound;
}

static void place_values(lua_State *L, const known_values *all, placement_list *list) {
    const ml_graph *g = vm_of(L)->graph;
    size_t count = all->values.count;
    list->nodes = lua_newuserdatauv(L, (count + 1) * sizeof *list->nodes, 0);
    list->places = lua_newuserdatauv(L, (count + 1) * sizeof *list->places, 0);
    list->placed = lua_newuserdatauv(L, count + 1, 0);
    memset(list->placed, 0, count + 1);
    if (!ml_session_layout(vm_of(L)->session)) return;
    ml_ref *asked = lua_newuserdatauv(L, (count + 1) * sizeof *asked, 0);
    int *value_of = lua_newuserdatauv(L, (count + 1) * sizeof *value_of, 0);
    bool *known = lua_newuserdatauv(L, count + 1, 0);
    ml_placements *places = lua_newuserdatauv(L, (count + 1) * sizeof *places, 0);
    int asked_count = 0;
    for (size_t i = 0; i < count; i++) list->nodes[i] = node_of(L, &all->values.at[i]);
    const bool *bound = push_bound(L);
    for (size_t i = 0; i < count; i++) {
        ml_ref n = list->nodes[i];
        if (!n || bound[n] || ml_graph_node(g, n)->op == ML_OP_CONST) continue;
        value_of[asked_count] = (int)i;
        asked[asked_count++] = n;
    }
    traffic_place(L, all->arena, asked, asked_count, places, known);
    for (int i = 0; i < asked_count; i++) {
        list->placed[value_of[i]] = known[i];
        list->places[value_of[i]] = places[i];
    }
    lua_pop(L, 5);
}

static void set_type(lua_State *L, const char *key, const ml_type *type) {
    vm_push_type(L, vm_of(L)->graph, type);
    lua_setfield(L, -2, key);
}

static void set_axes(lua_State *L, const ml_type *type) {
    lua_createtable(L, type->rank, 0);
    for (int i = 0; i < type->rank; i++) {
        lua_createtable(L, 0, 2);
        vm_set_string(L, "name", ml_axis_name(vm_of(L)->graph, type->axis[i]));
        vm_set_integer(L, "size", type->size[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "axes");
}

typedef struct {
    const ml_layout *layout;
    const ml_graph *graph;
    const ml_type *type;
    const ml_placements *at;
    ml_text text;
} print_call;

static void print_placed(void *argument) {
    print_call *call = argument;
    ml_layout_print_type(call->layout, call->graph, call->type, call->at, &call->text);
}

static void set_placement(lua_State *L, const known_values *all, const ml_type *type,
                          const ml_placements *at) {
    print_call call = {
        ml_session_layout(vm_of(L)->session), vm_of(L)->graph, type, at, {.arena = all->arena}};
    ml_type local = ml_layout_local(call.layout, type, at);
    vm_protect(L, print_placed, &call);
    vm_set_string(L, "placed", call.text.text);
    set_type(L, "local_type", &local);
    vm_set_integer(L, "local_bytes", ml_type_bytes(&local));
}

static void push_value(lua_State *L, const known_values *all, const placement_list *list,
                       size_t i) {
    static const char *const kinds[] = {"tensor", "state", "axis", "other"};
    const known_value *value = &all->values.at[i];
    const ml_graph *g = vm_of(L)->graph;
    lua_createtable(L, 0, 12);
    vm_set_string(L, "kind", kinds[value->kind]);
    vm_set_string(L, "file", value->file);
    vm_set_integer(L, "line", value->line);
    vm_set_integer(L, "begin", (lua_Integer)value->begin);
    vm_set_integer(L, "finish", (lua_Integer)value->end);
    if (value->module[0]) vm_set_string(L, "module", value->module);
    if (value->kind == KNOWN_OTHER) vm_set_string(L, "text", value->text);
    if (value->kind != KNOWN_OTHER) set_axes(L, &value->type);
    if (value->kind > KNOWN_STATE) return;
    set_type(L, "type", &value->type);
    vm_set_integer(L, "bytes", ml_type_bytes(&value->type));
    if (list->placed && list->placed[i]) set_placement(L, all, &value->type, &list->places[i]);
    if (value->kind == KNOWN_STATE) {
        const ml_state *state = ml_graph_state(g, value->state);
        vm_set_string(L, "name", state->name);
    } else {
        vm_set_string(L, "op", ml_ops[ml_graph_node(g, value->node)->op].name);
        vm_set_number(L, "flops", ml_flops(g, value->node));
    }
    if (!value->others) return;
    lua_createtable(L, value->others, 0);
    for (int k = 0; k < value->others; k++) {
        vm_push_type(L, g, &value->other[k]);
        lua_rawseti(L, -2, k + 1);
    }
    lua_setfield(L, -2, "others");
}

static int core_known_values(lua_State *L) {
    const known_values *all = known_of(L);
    placement_list list = {0};
    bool places = lua_toboolean(L, 1);
    lua_settop(L, 0);
    lua_newtable(L);
    if (!all) return 1;
    if (places) place_values(L, all, &list);
    for (size_t i = 0; i < all->values.count; i++) {
        push_value(L, all, &list, i);
        lua_rawseti(L, 1, (lua_Integer)i + 1);
    }
    lua_settop(L, 1);
    return 1;
}

static int core_known_pause(lua_State *L) {
    known_values *all = known_of(L);
    lua_pushboolean(L, all && all->paused);
    if (all) all->paused = lua_toboolean(L, 1);
    return 1;
}

/* ---- Steps ----------------------------------------------------------------------------------- */

/* Add to a field of the table on top. */
static void add_to(lua_State *L, const char *key, double amount) {
    lua_getfield(L, -1, key);
    amount += lua_tonumber(L, -1);
    lua_pop(L, 1);
    vm_set_number(L, key, amount);
}

typedef struct {
    bool known;
    ml_rates rates;
    predict_products *products;
    const ml_layout *layout;
} step_times;

/* Steps of a line that do the same are one item: a stack's layers, or several programs. */
static void add_step(lua_State *L, int by_key, int list, const step_times *times,
                     const ml_plan *part, uint32_t at) {
    const ml_graph *g = part->schedule->graph;
    const ml_step *step = &part->schedule->steps.at[at];
    if (step->kind == ML_STEP_WAIT || step->kind == ML_STEP_HOST_COPY) return;
    const ml_origin *origin = ml_graph_origin(g, step->node);
    const predict_basis by = {.rates = &times->rates, .products = times->products};
    bool backward = ml_graph_node(g, step->node)->flags & ML_NODE_BACKWARD;
    const char *kind = ml_step_kind_name(step->kind);
    const char *label =
        step->collective ? ml_collectives[step->collective->kind].label : ml_step_label(step);
    if (!origin || !origin->file) return;
    const char *module = origin->module ? origin->module : "";
    lua_pushfstring(L, "%s:%d:%s:%s:%d:%s", origin->file, origin->line, kind, label, backward,
                    module);
    lua_pushvalue(L, -1);
    if (lua_rawget(L, by_key) == LUA_TNIL) {
        lua_pop(L, 1);
        lua_createtable(L, 0, 10);
        vm_set_string(L, "file", origin->file);
        vm_set_integer(L, "line", origin->line);
        vm_set_string(L, "kind", kind);
        vm_set_string(L, "label", label);
        vm_set_boolean(L, "backward", backward);
        vm_set_string(L, "module", module);
        set_type(L, "type", ml_graph_type(g, step->node));
        lua_pushvalue(L, -1);
        lua_rawseti(L, list, (lua_Integer)lua_rawlen(L, list) + 1);
        lua_pushvalue(L, -2);
        lua_pushvalue(L, -2);
        lua_rawset(L, by_key);
    }
    add_to(L, "count", 1);
    add_to(L, "flops", step->flops);
    if (times->known)
        add_to(L, "seconds", predict_step(&by, part->schedule, times->layout, at, NULL));
    add_to(L, "moved", (double)step->bytes);
    if (step->collective) add_to(L, "sent", ml_step_sent(step->collective));
    lua_pop(L, 2);
}

static int core_known_steps(lua_State *L) {
    lua_settop(L, 0);
    lua_newtable(L);
    lua_newtable(L);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, "mlua.programs");
    vm_predicted predicted = {0};
    step_times times = {.layout = ml_session_layout(vm_of(L)->session)};
    int64_t ranks = times.layout ? ml_layout_ranks(times.layout) : 1;
    if (lua_rawlen(L, 3)) times.known = predicted_rates(L, ranks, &predicted);
    times.rates = predicted.rates;
    times.products = predicted.products;
    for (lua_Integer i = 1; i <= (lua_Integer)lua_rawlen(L, 3); i++) {
        lua_rawgeti(L, 3, i);
        const vm_program *program = vm_to_program(L, -1);
        const ml_plan *plan = program ? vm_program_plan(program) : NULL;
        for (int p = 0; plan && p < plan->part_count; p++) {
            const ml_plan *part = plan->parts[p];
            for (uint32_t k = 0; k < part->schedule->steps.count; k++)
                add_step(L, 2, 1, &times, part, k);
        }
        lua_pop(L, 1);
    }
    lua_settop(L, 1);
    return 1;
}

/* ---- States, hints, files -------------------------------------------------------------------- */

/* Parameters that differ in one number of their names, as those of a stack's layers: an item. */
typedef struct {
    const ml_state *state; /* the first */
    int64_t first, last;   /* their numbers; 0: a name without one */
} parameter_group;

/* Push the name with "*" in the place of its first number between dots, of which *number is the
 * value; the name itself, and 0, where there is none. */
static void push_pattern(lua_State *L, const char *name, int64_t *number) {
    *number = 0;
    for (const char *at = name; (at = strchr(at, '.')) != NULL;) {
        char *end;
        bool digit = *++at >= '1' && *at <= '9';
        int64_t value = digit ? strtoll(at, &end, 10) : 0;
        if (value <= 0 || *end != '.') continue;
        *number = value;
        lua_pushlstring(L, name, (size_t)(at - name));
        lua_pushfstring(L, "*%s", end);
        lua_concat(L, 2);
        return;
    }
    lua_pushstring(L, name);
}

static bool extends(const parameter_group *group, const ml_state *state, int64_t number) {
    const ml_origin *one = &group->state->origin, *other = &state->origin;
    bool here =
        one->line == other->line && one->file && other->file && strcmp(one->file, other->file) == 0;
    return here && number && group->last + 1 == number &&
           ml_type_equal(&group->state->type, &state->type);
}

static void push_group(lua_State *L, const parameter_group *group) {
    const ml_state *state = group->state;
    int64_t number;
    lua_createtable(L, 0, 8);
    push_pattern(L, state->name, &number);
    lua_setfield(L, -2, "name");
    if (number) {
        vm_set_integer(L, "first", group->first);
        vm_set_integer(L, "last", group->last);
    }
    set_type(L, "type", &state->type);
    vm_set_integer(L, "elements", ml_type_elements(&state->type));
    vm_set_integer(L, "bytes", ml_type_bytes(&state->type));
    vm_set_string(L, "file", state->origin.file);
    vm_set_integer(L, "line", state->origin.line);
}

static int core_known_parameters(lua_State *L) {
    const ml_graph *g = vm_of(L)->graph;
    uint32_t states = ml_graph_state_count(g);
    lua_Integer count = 0;
    lua_settop(L, 0);
    lua_newtable(L);
    lua_newtable(L); /* by pattern: the last group */
    parameter_group *groups = lua_newuserdatauv(L, ((size_t)states + 1) * sizeof *groups, 0);
    for (uint32_t id = 0; id < states; id++) {
        const ml_state *state = ml_graph_state(g, id);
        int64_t number;
        if (state->kind != ML_STATE_PARAMETER || !state->name) continue;
        push_pattern(L, state->name, &number);
        lua_pushvalue(L, -1);
        lua_Integer at = lua_rawget(L, 2) == LUA_TNUMBER ? lua_tointeger(L, -1) : -1;
        lua_pop(L, 1);
        if (at >= 0 && extends(&groups[at], state, number)) {
            groups[at].last = number;
            lua_pop(L, 1);
            continue;
        }
        groups[count] = (parameter_group){state, number, number};
        lua_pushinteger(L, count++);
        lua_rawset(L, 2);
    }
    for (lua_Integer i = 0; i < count; i++) {
        push_group(L, &groups[i]);
        lua_rawseti(L, 1, i + 1);
    }
    lua_settop(L, 1);
    return 1;
}

static int core_known_hints(lua_State *L) {
    const ml_vm *vm = vm_of(L);
    lua_settop(L, 0);
    lua_createtable(L, (int)vm->hints.count, 0);
    for (uint32_t i = 0; i < vm->hints.count; i++) {
        lua_createtable(L, 0, 3);
        vm_set_string(L, "file", vm->hints.at[i].file);
        vm_set_integer(L, "line", vm->hints.at[i].line);
        vm_set_string(L, "text", vm->hints.at[i].text);
        lua_rawseti(L, 1, i + 1);
    }
    return 1;
}

/* The report texts of the script's programs, the files that were loaded, the limits. */
static int core_known_run(lua_State *L) {
    const ml_vm *vm = vm_of(L);
    lua_settop(L, 0);
    lua_createtable(L, 0, 5);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, "mlua.reports");
    lua_setfield(L, -2, "reports");
    vm_set_string(L, "script", vm->options->script);
    vm_set_string(L, "limits", vm->options->limits);
    vm_set_string(L, "stopped", vm->dry.message);
    lua_newtable(L);
    vm_push_sources(L);
    lua_Integer count = 0;
    lua_pushnil(L);
    while (lua_next(L, -2)) {
        lua_pop(L, 1);
        lua_pushvalue(L, -1);
        lua_rawseti(L, -4, ++count);
    }
    lua_pop(L, 1);
    lua_setfield(L, -2, "files");
    return 1;
}

void known_set_buffers(lua_State *L, const char *path) {
    luaL_Buffer text;
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    if (!file) vm_fail(L, NULL, "cannot open %s: %s", path, strerror(errno));
    vm_push_library(L, "mlua.known", "buffers");
    luaL_buffinit(L, &text);
    for (size_t got = 1; got > 0;) {
        got = fread(luaL_prepbuffer(&text), 1, LUAL_BUFFERSIZE, file);
        luaL_addsize(&text, got);
    }
    if (file != stdin) fclose(file);
    luaL_pushresult(&text);
    lua_call(L, 1, 1);
    lua_setfield(L, LUA_REGISTRYINDEX, "mlua.buffers");
}

/* ---- The object ------------------------------------------------------------------------------ */

static int write_facts(lua_State *L) {
    vm_push_library(L, "mlua.known", "write");
    lua_insert(L, 1);
    lua_call(L, 1, 0);
    return 0;
}

void known_write_pending(lua_State *L) {
    known_values *all = known_of(L);
    static const double LONG = 0.5; /* seconds of processor time */
    if (!all || all->pending_written || all->paused) return;
    if ((double)clock() / CLOCKS_PER_SEC < LONG) return;
    all->pending_written = true;
    vm_push_library(L, "mlua.known", "write");
    lua_pushnil(L);
    lua_pushboolean(L, 1);
    lua_call(L, 2, 0);
}

void known_write(lua_State *L, bool failed) {
    if (!failed) lua_pushnil(L);
    lua_pushcfunction(L, write_facts);
    lua_insert(L, -2);
    if (vm_call(L, 1, 0) != LUA_OK) vm_print_error(L);
}

void vm_known_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"known_values", core_known_values, "places: boolean -> table[]",
         "values of the script's expressions, and where the layout puts them: kind, file, line, "
         "begin, finish (bytes), type, axes, "
         "bytes, placed, local_type, local_bytes, op, flops, others"},
        {"known_pause", core_known_pause, "pause: boolean -> boolean",
         "whether values are not noted from now on; gives whether they were not"},
        {"known_steps", core_known_steps, "-> table[]",
         "steps of all programs by line, kind and module: count, flops, seconds (predicted, all of "
         "them), moved (bytes), sent"},
        {"known_parameters", core_known_parameters, "-> table[]",
         "the named parameters: name, type, elements, bytes, file, line; those that differ in a "
         "number of their names are one item, blocks.*.wq of the numbers first to last"},
        {"known_hints", core_known_hints, "-> table[]", "hints so far: file, line, text"},
        {"known_run", core_known_run, "-> table",
         "reports (JSON), script, files that were loaded, limits, stopped"},
        {0}};
    vm_register(L, functions);
    if (vm_of(L)->options->facts) known_register(L);
}
