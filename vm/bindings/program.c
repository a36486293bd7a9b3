/* Programs in Lua: made from inputs, outputs and updates; called with a table of feeds. */
#include "vm/vm.h"

#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/suggest.h"
#include "runtime/pipeline/plan.h"
#include "vm/bindings/program_plan.h"
#include "vm/check/dry.h"
#include "vm/check/explain.h"
#include "vm/check/traffic.h"
#include "vm/known/known.h"

enum { MOST_MICROBATCHES = 1 << 30 };

vm_program *vm_to_program(lua_State *L, int index) {
    return luaL_testudata(L, index, vm_program_class);
}

const ml_plan *vm_program_plan(const vm_program *program) {
    return program->program ? ml_program_plan(program->program) : program->plan;
}

static vm_program *check_program(lua_State *L) {
    return luaL_checkudata(L, 1, vm_program_class);
}

static int program_gc(lua_State *L) {
    vm_program *p = check_program(L);
    ml_program_free(p->program);
    ml_plan_free(p->plan);
    ml_free(p->roots.outputs);
    ml_free(p->roots.updates);
    ml_free(p->output_types);
    ml_free(p->input_ids);
    if (p->arena) ml_arena_free(p->arena);
    *p = (vm_program){0};
    return 0;
}

/* ---- Making ---------------------------------------------------------------------------------- */

static void *allocate(lua_State *L, int64_t count, size_t size) {
    void *block = ml_alloc((size_t)(count ? count : 1) * size);
    if (!block) vm_fail(L, NULL, "not enough host memory for a program");
    return block;
}

/* The names of table `outputs`, sorted, as a list on top of the stack. */
static void push_sorted_names(lua_State *L, int outputs) {
    lua_newtable(L);
    int list = lua_gettop(L), count = 0;
    lua_pushnil(L);
    while (lua_next(L, outputs)) {
        lua_pop(L, 1);
        if (lua_type(L, -1) != LUA_TSTRING)
            vm_fail(L, "{loss = t}", "an output of a program needs a name, got %s",
                    luaL_typename(L, -1));
        const char *name = lua_tostring(L, -1);
        int at = ++count; /* insertion: programs have few outputs */
        for (; at > 1; at--) {
            lua_rawgeti(L, list, at - 1);
            bool after = strcmp(lua_tostring(L, -1), name) <= 0;
            if (after) {
                lua_pop(L, 1);
                break;
            }
            lua_rawseti(L, list, at);
        }
        lua_pushvalue(L, -1);
        lua_rawseti(L, list, at);
    }
}

static void read_outputs(lua_State *L, vm_program *p, int names, int table) {
    const ml_graph *g = vm_of(L)->graph;
    int64_t count = vm_table_length(L, names);
    p->roots.outputs = allocate(L, count, sizeof *p->roots.outputs);
    p->output_types = allocate(L, count, sizeof *p->output_types);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, names, i + 1);
        lua_pushfstring(L, "the output \"%s\"", lua_tostring(L, -1));
        lua_pushvalue(L, -2);
        lua_gettable(L, table);
        ml_ref n = lua_type(L, -1) == LUA_TNUMBER ? vm_number(L, -1, ML_F32)
                                                  : vm_tensor(L, -1, lua_tostring(L, -2));
        p->roots.outputs[i] = n;
        p->output_types[i] = *ml_graph_type(g, n);
        lua_pop(L, 3);
    }
    p->roots.output_count = (int)count;
}

static void read_updates(lua_State *L, vm_program *p, int table) {
    const ml_update *taken;
    int taken_count;
    if (vm_to_updates(L, table, &taken, &taken_count)) {
        p->roots.updates = allocate(L, taken_count, sizeof *taken);
        for (int i = 0; i < taken_count; i++) p->roots.updates[i] = taken[i];
        p->roots.update_count = taken_count;
        return;
    }
    int64_t count = vm_table_length(L, table);
    p->roots.updates = allocate(L, count, sizeof *p->roots.updates);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, table, i + 1);
        if (!lua_istable(L, -1))
            vm_fail(L, "{{state, tensor}, ...}",
                    "an update must be a pair of a state and a tensor");
        lua_rawgeti(L, -1, 1);
        lua_rawgeti(L, -2, 2);
        p->roots.updates[i] = (ml_update){vm_state(L, -2, "the first of an update"),
                                          vm_tensor(L, -1, "the second of an update")};
        lua_pop(L, 3);
    }
    p->roots.update_count = (int)count;
}

/* Input ids by position in the script's list; the names go to a list on top of the stack. */
static void read_inputs(lua_State *L, vm_program *p, int table) {
    const ml_graph *g = vm_of(L)->graph;
    lua_newtable(L);
    if (!lua_istable(L, table)) return;
    int64_t count = vm_table_length(L, table);
    p->input_ids = allocate(L, count, sizeof *p->input_ids);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, table, i + 1);
        ml_ref n = vm_tensor(L, -1, "an input of a program");
        if (ml_graph_node(g, n)->op != ML_OP_INPUT)
            vm_fail_with(L, &n, 1, "m.input(name, axes, dtype) makes one",
                         "input %d of the program is not an input", i + 1);
        p->input_ids[i] = (uint32_t)ml_graph_args(g, n)[0];
        lua_pushstring(L, ml_graph_input(g, p->input_ids[i])->name);
        lua_rawseti(L, -3, i + 1);
        lua_pop(L, 1);
    }
    p->input_count = (int)count;
}

static int read_microbatches(lua_State *L, int index) {
    int64_t count = vm_integer(L, index, "a program's microbatches");
    if (count < 1 || count > MOST_MICROBATCHES)
        vm_fail(L, NULL, "a program's microbatches must be 1 to %d, got %lld", MOST_MICROBATCHES,
                (long long)count);
    return (int)count;
}

/* Every input that the program uses must be listed. */
static void check_inputs(lua_State *L, vm_program *p) {
    const ml_graph *g = vm_of(L)->graph;
    uint32_t *used = lua_newuserdatauv(L, sizeof(uint32_t) * (ml_graph_input_count(g) + 1), 0);
    p->used_count = ml_program_inputs(p->program, used);
    for (int i = 0; i < p->used_count; i++) {
        bool found = false;
        for (int k = 0; k < p->input_count && !found; k++) found = p->input_ids[k] == used[i];
        if (!found)
            vm_fail(L, "list it in the program's inputs",
                    "the program uses the input \"%s\", which no caller feeds",
                    ml_graph_input(g, used[i])->name);
    }
    lua_pop(L, 1);
}

/* A parameter's name determines its initial value: without one it would be zero. */
static void check_parameters(lua_State *L, const ml_plan *part) {
    const ml_schedule *s = part->schedule;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        if (s->storages.at[i].kind != ML_STORAGE_STATE) continue;
        const ml_state *state = ml_graph_state(s->graph, s->storages.at[i].id);
        if (state->name || state->kind != ML_STATE_PARAMETER) continue;
        vm_fail(L, "put it into a module, or name it: m.param{A.embed, name=\"gain\"}",
                "the parameter from %s:%d has no name, which determines its initial value",
                state->origin.file ? state->origin.file : "?", state->origin.line);
    }
}

/* At the start of a run, of a program that trains: which ranks do nothing that others do not, and
 * which wait. */
static void remark_on_ranks(lua_State *L, const vm_program *p) {
    enum { WAITS = 25 }; /* percent */
    const ml_vm *vm = vm_of(L);
    const ml_plan *plan = vm_program_plan(p);
    bool first = vm->options->comm && ml_comm_rank(vm->options->comm) == 0;
    if (!first || vm->options->task || vm->options->quiet || !plan->layout ||
        !p->roots.update_count)
        return;
    if (plan->roots.division.flops < plan->flops / 2)
        return; /* the optimizer, as one of m.train's */
    for (int i = 0; i < plan->layout->count; i++)
        if (traffic_push_undivided(L, plan->layout, &plan->roots.division, i)) {
            fprintf(stderr, "mesh axis %s: %s\n", plan->layout->axis[i].name, lua_tostring(L, -1));
            lua_pop(L, 1);
        }
    double bubble = plan->pipeline ? 100 * plan->pipeline->schedule.bubble : 0;
    if (bubble < WAITS || p->roots.microbatches > 1) return;
    fprintf(
        stderr,
        "program \"%s\" runs one microbatch at a time in %d pipeline stages: a rank waits for "
        "%.0f%% of a step\n  help: m.train cuts a batch into microbatches, which overlap; an own "
        "loop sums gradients in states of kind \"gradient\" in a program of m.compile(fn, "
        "inputs, {microbatches = %d}), and assigns parameters in another\n",
        p->roots.name ? p->roots.name : "", plan->pipeline->count, bubble,
        2 * plan->pipeline->count);
}

typedef void planner(lua_State *L, vm_program *p);
typedef struct {
    planner *plan;
    vm_program *program;
} group_call;

static int plan_body(lua_State *L) {
    const group_call *call = lua_touserdata(L, 1);
    call->plan(L, call->program);
    return 0;
}

/* `plan` the program among the ranks of its group, and for the sums that it applies. Errors leave
 * neither to the programs that follow. */
static void plan_in_group(lua_State *L, vm_program *p, ml_program *lead, planner *plan) {
    ml_session *session = vm_of(L)->session;
    group_call call = {plan, p};
    vm_check(L, ml_session_use_groups(session, p->group, lead));
    ml_session_applies(session, p->applied);
    lua_pushcfunction(L, plan_body);
    lua_pushlightuserdata(L, &call);
    const int status = lua_pcall(L, 1, 0, 0);
    ml_session_applies(session, (ml_plan_list){0});
    vm_check(L, ml_session_use_groups(session, 0, NULL));
    if (status != LUA_OK) lua_error(L);
}

static void make_now(lua_State *L, vm_program *p) {
    vm_check(L, ml_program_new(vm_of(L)->session, &p->roots, &p->program));
}

static void make_program(lua_State *L, vm_program *p) {
    vm_start_device(L);
    plan_in_group(L, p, p->lead, make_now);
    check_inputs(L, p);
    vm_find_ranges(L, p);
    remark_on_ranks(L, p);
}

static void explain_now(lua_State *L, vm_program *p) {
    explain_plan(L, &p->roots, &p->plan);
}

/* Of a check's programs. */
static void list_planned(lua_State *L, int program) {
    dry_note_program(L, vm_to_program(L, program)->plan);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, "mlua.programs");
    lua_pushvalue(L, program);
    lua_rawseti(L, -2, (lua_Integer)lua_rawlen(L, -2) + 1);
    lua_pop(L, 1);
}

/* Where nothing runs. The program is at position 2. */
static void plan_program(lua_State *L, vm_program *p) {
    const ml_vm *vm = vm_of(L);
    if (vm->options->facts) known_write_pending(L);
    known_confine_plan();
    plan_in_group(L, p, NULL, explain_now);
    list_planned(L, 2);
}

static void explain_alone(lua_State *L, vm_program *p) {
    explain_plan_alone(L, &p->roots, &p->plan);
}

/* To compare programs before one of them is made: it takes no memory, and no check reports it. */
static void plan_alone(lua_State *L, vm_program *p) {
    known_confine_plan();
    plan_in_group(L, p, NULL, explain_alone);
}

static void refuse_applied(lua_State *L, int index) {
    vm_fail(L, "applies = {microbatch}", "a program applies the sums of a list of programs, got %s",
            luaL_typename(L, index));
}

/* Of the programs in the list on top of the stack, which becomes a block of their plans. Estimates
 * are left out: they have sums of some of the layers alone. */
static ml_plan_list read_applied(lua_State *L) {
    const int list = lua_gettop(L);
    if (!lua_istable(L, list)) refuse_applied(L, list);
    const int64_t count = vm_table_length(L, list);
    const ml_plan **at = lua_newuserdatauv(L, (size_t)(count + 1) * sizeof *at, 0);
    int applied = 0;
    for (int64_t i = 0; i < count; i++) {
        lua_rawgeti(L, list, i + 1);
        const vm_program *of = vm_to_program(L, -1);
        if (!of) refuse_applied(L, -1);
        at[applied] = vm_program_plan(of);
        applied += at[applied]->fewer == NULL;
        lua_pop(L, 1);
    }
    lua_replace(L, list);
    return (ml_plan_list){at, applied};
}

/* The program is at position 2, and its lead may be at 3. */
static void read_mixed(lua_State *L, vm_program *p) {
    const vm_program *lead = vm_to_program(L, 3);
    p->roots.mixed = true;
    p->lead = lead ? lead->program : NULL;
    lua_setiuservalue(L, 2, 4); /* its slots are the lead's, which lives as long */
}

static bool plans_alone(const ml_vm *vm) {
    return vm->dry.runs || vm_cannot_run(vm);
}

/* The options are at position 1. */
static void plan_or_make(lua_State *L, vm_program *p) {
    const ml_vm *vm = vm_of(L);
    if (vm_option(L, 1, "estimate")) p->roots.estimate = lua_toboolean(L, -1) && plans_alone(vm);
    lua_settop(L, 2);
    if (vm_option(L, 1, "plan_only") && lua_toboolean(L, -1)) {
        p->roots.any_plan =
            lua_type(L, -1) == LUA_TSTRING && strcmp(lua_tostring(L, -1), "any") == 0;
        plan_alone(L, p);
    } else if (plans_alone(vm)) {
        plan_program(L, p);
    } else {
        make_program(L, p);
    }
}

static int core_program(lua_State *L) {
    static const char *const known[] = {"name",         "inputs",    "outputs",  "updates",
                                        "microbatches", "often",     "group",    "mixed",
                                        "applies",      "plan_only", "estimate", NULL};
    ml_vm *vm = vm_of(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    vm_check_options(L, 1, "core.program", known);
    if (vm->options->mesh_count && !vm->laid_out)
        vm_fail(L, "m.train{layout = m.layout.megatron{}}, or the same option of m.compile",
                "--mesh sizes a layout, and the script has given none");
    vm_open_device(L);
    vm_compare_random(L);
    double started = ml_clock_now();
    vm_program *p = lua_newuserdatauv(L, sizeof *p, 4); /* names of it, inputs, outputs; lead */
    *p = (vm_program){0};
    luaL_setmetatable(L, vm_program_class);
    lua_getfield(L, 1, "name");
    p->roots.name =
        lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : NULL; /* owned by the user value */
    lua_setiuservalue(L, 2, 1);
    if (vm_option(L, 1, "outputs")) {
        if (!lua_istable(L, 3))
            vm_fail(L, "{loss = t}", "a program's outputs are a table of tensors, got %s",
                    luaL_typename(L, 3));
        push_sorted_names(L, 3);
        read_outputs(L, p, 4, 3);
    } else {
        lua_newtable(L);
    }
    lua_setiuservalue(L, 2, 3);
    lua_settop(L, 2);
    if (vm_option(L, 1, "microbatches")) p->roots.microbatches = read_microbatches(L, 3);
    lua_settop(L, 2);
    if (vm_option(L, 1, "often")) p->roots.often = lua_toboolean(L, 3);
    lua_settop(L, 2);
    if (vm_option(L, 1, "group")) p->group = vm_integer(L, 3, "a program's group");
    lua_settop(L, 2);
    if (vm_option(L, 1, "mixed")) read_mixed(L, p);
    lua_settop(L, 2);
    if (vm_option(L, 1, "updates")) read_updates(L, p, 3);
    lua_settop(L, 2);
    lua_getfield(L, 1, "inputs");
    read_inputs(L, p, 3);
    lua_setiuservalue(L, 2, 2);
    lua_settop(L, 2);
    if (vm_option(L, 1, "applies")) p->applied = read_applied(L); /* on the stack meanwhile */
    plan_or_make(L, p);
    p->applied = (ml_plan_list){0};
    lua_settop(L, 2);
    for (int i = 0; i < vm_program_plan(p)->part_count; i++)
        check_parameters(L, vm_program_plan(p)->parts[i]);
    p->seconds = ml_clock_now() - started;
    return 1;
}

/* ---- Running --------------------------------------------------------------------------------- */

/* The elements of the feed at `index`, whose memory is pushed. */
static const void *feed_contents(lua_State *L, int index, const ml_input *input) {
    vm_wanted wanted;
    index = lua_absindex(L, index);
    vm_want(L, lua_pushfstring(L, "input \"%s\"", input->name), &input->type, &wanted);
    const void *data = vm_contents(L, index, &wanted);
    lua_remove(L, -2);
    return data;
}

/* Push the message about a feed that the program does not have. */
static const char *push_feed_help(lua_State *L, const char *name, int names, int64_t count) {
    vm_push_suggestion(L, name, names);
    if (lua_isstring(L, -1)) return lua_pushfstring(L, "did you mean %s?", lua_tostring(L, -1));
    if (count == 0) return lua_pushliteral(L, "it has none");
    lua_pushliteral(L, "its inputs are");
    for (int64_t i = 1; i <= count; i++) {
        lua_rawgeti(L, names, i);
        lua_pushfstring(L, i == 1 ? "%s %s" : "%s, %s", lua_tostring(L, -2), lua_tostring(L, -1));
    }
    return lua_tostring(L, -1);
}

/* Raise for a feed that the program does not know, or an input that is not fed. */
static void check_feeds(lua_State *L, int names) {
    int64_t count = vm_table_length(L, names);
    luaL_checkstack(L, (int)count * 2 + 20, "too many inputs");
    lua_pushnil(L);
    while (lua_next(L, 2)) {
        lua_pop(L, 1);
        bool known = false;
        for (int64_t i = 1; i <= count && !known; i++) {
            lua_rawgeti(L, names, i);
            known = lua_rawequal(L, -1, -2);
            lua_pop(L, 1);
        }
        if (known) continue;
        const char *name = luaL_tolstring(L, -1, NULL);
        vm_fail(L, push_feed_help(L, name, names, count), "the program has no input \"%s\"", name);
    }
    for (int64_t i = 1; i <= count; i++) {
        lua_rawgeti(L, names, i);
        lua_pushvalue(L, -1);
        if (lua_gettable(L, 2) == LUA_TNIL)
            vm_fail(L, NULL, "the program needs the input \"%s\"", lua_tostring(L, -2));
        lua_pop(L, 2);
    }
}

/* The memory of each used input, in the program's order; conversions stay on the stack. */
static const void **read_feeds(lua_State *L, const vm_program *p, int names) {
    const ml_graph *g = vm_of(L)->graph;
    const void **inputs = lua_newuserdatauv(L, sizeof *inputs * (size_t)(p->used_count + 1), 0);
    uint32_t *used = lua_newuserdatauv(L, sizeof *used * (size_t)(p->used_count + 1), 0);
    luaL_checkstack(L, p->used_count + 20, "too many inputs");
    ml_program_inputs(p->program, used);
    for (int i = 0; i < p->used_count; i++) {
        int k = 0;
        while (p->input_ids[k] != used[i]) k++;
        lua_rawgeti(L, names, k + 1);
        lua_gettable(L, 2);
        inputs[i] = feed_contents(L, -1, ml_graph_input(g, used[i]));
        lua_remove(L, -2);
        vm_check_range(L, p, used[i], inputs[i]);
    }
    return inputs;
}

/* Where nothing runs, the feeds' shapes are checked all the same. */
static void check_shapes(lua_State *L, const vm_program *p, int names) {
    for (int i = 0; i < p->input_count; i++) {
        int top = lua_gettop(L);
        lua_rawgeti(L, names, i + 1);
        lua_gettable(L, 2);
        feed_contents(L, -1, ml_graph_input(vm_of(L)->graph, p->input_ids[i]));
        lua_settop(L, top);
    }
}

static int program_start(lua_State *L) {
    vm_program *p = check_program(L);
    lua_settop(L, 2);
    if (lua_isnil(L, 2)) lua_newtable(L), lua_replace(L, 2);
    if (!lua_istable(L, 2))
        vm_fail(L, "p{tokens = ids}", "a program takes a table of inputs, got %s",
                luaL_typename(L, 2));
    lua_getiuservalue(L, 1, 2);
    check_feeds(L, 3);
    dry_note_call(L);
    /* Of the script of the prompt, in its first call from there. */
    if (!p->program && !vm_of(L)->dry.runs) make_program(L, p);
    if (p->program) {
        vm_compare_random(L);
        vm_profile_run(L);
        double begin = vm_profile_clock(L);
        const void **inputs = read_feeds(L, p, 3);
        vm_check(L, ml_program_start(p->program, inputs));
        vm_profile_span(L, "start", begin);
    } else {
        check_shapes(L, p, 3);
    }
    p->started = true;
    return 0;
}

static int program_finish(lua_State *L) {
    vm_program *p = check_program(L);
    if (!p->started) vm_fail(L, "call p:start(inputs) first", "the program has not been started");
    p->started = false;
    lua_settop(L, 1);
    int count = p->roots.output_count;
    lua_getiuservalue(L, 1, 3);   /* 2: output names */
    lua_createtable(L, 0, count); /* 3: results */
    void **outputs = lua_newuserdatauv(L, sizeof *outputs * (size_t)(count + 1), 0);
    double *scalars = lua_newuserdatauv(L, sizeof *scalars * (size_t)(count + 1), 0);
    for (int i = 0; i < count; i++) {
        const ml_type *type = &p->output_types[i];
        scalars[i] = 0;
        outputs[i] = &scalars[i];
        if (type->rank == 0) continue;
        lua_rawgeti(L, 2, i + 1);
        outputs[i] = vm_push_host(L, type->dtype, type->rank, type->size)->data;
        lua_settable(L, 3);
    }
    double begin = vm_profile_clock(L);
    if (p->program) vm_check(L, ml_program_finish(p->program, outputs));
    vm_profile_span(L, "finish", begin);
    for (int i = 0; i < count; i++) {
        if (p->output_types[i].rank) continue;
        lua_rawgeti(L, 2, i + 1);
        vm_push_element(L, p->output_types[i].dtype, &scalars[i], 0);
        lua_settable(L, 3);
    }
    lua_settop(L, 3);
    return 1;
}

static int program_refresh(lua_State *L) {
    vm_program *p = check_program(L);
    if (p->program) vm_check(L, ml_program_refresh(p->program));
    return 0;
}

static int program_call(lua_State *L) {
    program_start(L);
    return program_finish(L);
}

/* ---- Plans ----------------------------------------------------------------------------------- */

static int program_list(lua_State *L) {
    vm_program *p = check_program(L);
    const ml_vm *vm = vm_of(L);
    const bool listed = plans_alone(vm) && !vm->options->explain;
    if (listed) {
        vm_check(L, ml_session_show(p->plan));
        list_planned(L, 1);
    }
    lua_pushboolean(L, listed);
    return 1;
}

typedef struct {
    ml_plan *plan;
    int count;
} microbatches_call;

static void plan_microbatches(void *argument) {
    microbatches_call *call = argument;
    pipeline_set_microbatches(call->plan, call->count);
}

static int program_microbatches(lua_State *L) {
    vm_program *p = check_program(L);
    microbatches_call call = {p->plan, read_microbatches(L, 2)};
    if (p->program) vm_check(L, ml_program_microbatches(p->program, call.count));
    if (p->plan && p->plan->pipeline) vm_protect(L, plan_microbatches, &call);
    return 0;
}

static int program_bubble(lua_State *L) {
    vm_program *p = check_program(L);
    const ml_plan *plan = vm_program_plan(p);
    double forecast, measured = p->program ? ml_program_bubble(p->program, &forecast) : -1;
    if (measured < 0) return 0;
    lua_pushnumber(L, measured);
    lua_pushnumber(L, forecast);
    lua_pushnumber(L, plan->pipeline->schedule.bubble);
    return 3;
}

static int program_name(lua_State *L) {
    check_program(L);
    lua_getiuservalue(L, 1, 1);
    return 1;
}

static int program_tostring(lua_State *L) {
    vm_program *p = check_program(L);
    lua_getiuservalue(L, 1, 1);
    lua_pushfstring(L, "program %s: %d inputs, %d outputs, %d updates",
                    lua_isstring(L, -1) ? lua_tostring(L, -1) : "", p->input_count,
                    p->roots.output_count, p->roots.update_count);
    return 1;
}

static const vm_entry functions[] = {
    {"program", core_program,
     "options: {name: string, inputs: Tensor[], outputs: "
     "table<string, Tensor>, updates: table, applies: Program[], group: integer, "
     "mixed: boolean|Program, plan_only: boolean|string, estimate: boolean} -> Program",
     "compile outputs and updates of states into a program"},
    {0}};
static const vm_entry methods[] = {
    {"start", program_start, "inputs?: table",
     "the first half of a call: enqueues the work and returns while it runs; inputs may be reused"},
    {"finish", program_finish, "-> table",
     "the second half: waits and gives the outputs; no other program may run in between"},
    {"refresh", program_refresh, "",
     "of a program of groups of ranks: what all ranks gather for it at once, where that is stale"},
    {"bubble", program_bubble, "-> number?, number?, number?",
     "the share of a step in which pipeline ranks wait: measured, as predicted from measured times "
     "of tasks and messages, planned; nil before step 9 and without a pipeline"},
    {"plan", program_plan, "-> Plan", "what was planned"},
    {"cost", program_cost, "gpu?: string, microbatch?: Program -> number, number, boolean, number",
     "seconds of a run, or of a microbatch on the slowest pipeline rank, and those of its "
     "attention, by the table of an H100 or of `gpu`, and whether it fits in memory with what does "
     "its steps again: to compare programs. Of an update behind its last microbatch, beside which "
     "sums may be added up, also the seconds of what the next one's parameter cache takes"},
    {"room", program_room, "times?: number -> number, number, number",
     "the share of its device's memory that a rank needs, with temporaries `times` as large (0: no "
     "limit is known), how many times as long as with all values stored its run is predicted, and "
     "the share with all values stored"},
    {"list", program_list, "-> boolean",
     "make a program that was planned alone one of the script's; false where that takes making it "
     "anew: in a run, and to explain how it is planned"},
    {"microbatches", program_microbatches, "count: integer",
     "how many the next steps have, each of a program of these `mixed` ones"},
    {"name", program_name, "-> string?", "the name"},
    {0}};

void vm_program_register(lua_State *L) {
    vm_register(L, functions);
    vm_new_class(L, vm_program_class, methods, NULL, program_gc);
    lua_pop(L, 1);
    static const luaL_Reg meta[] = {
        {"__call", program_call}, {"__tostring", program_tostring}, {NULL, NULL}};
    luaL_getmetatable(L, vm_program_class);
    luaL_setfuncs(L, meta, 0);
    lua_pop(L, 1);
}
