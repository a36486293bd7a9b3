/* What was planned for a program, in Lua: its accounts, its predicted time, its memory. */
#include "vm/bindings/program_plan.h"

#include "runtime/pipeline/plan.h"
#include "runtime/predict/predict.h"

/* In memory, with what is beside it and what does its steps again. */
static bool fits(const ml_plan *plan) {
    const int64_t limit = plan->target->memory_bytes;
    const bool repeats = !plan->may_overflow || plan->retry != NULL;
    return (limit <= 0 || plan->needed_bytes <= limit) && repeats;
}

/* The mesh axes along which all ranks do the same work. */
static void push_idle(lua_State *L, const ml_plan *plan) {
    lua_newtable(L);
    for (int i = 0; plan->layout && i < plan->layout->count; i++)
        if (ml_layout_undivided(plan->layout, &plan->roots.division, i) > 0.9995) {
            lua_pushstring(L, plan->layout->axis[i].name);
            lua_rawseti(L, -2, luaL_len(L, -2) + 1);
        }
}

/* The part of the work that is attention's. */
static double attention_share(const ml_plan *plan) {
    double attention = 0, all = 0;
    for (int p = 0; p < plan->part_count; p++) {
        const ml_schedule *s = plan->parts[p]->schedule;
        for (uint32_t i = 0; i < s->steps.count; i++) {
            const ml_step *step = &s->steps.at[i];
            all += step->flops;
            attention += step->kind == ML_STEP_ATTENTION ? step->flops : 0;
        }
    }
    return all > 0 ? attention / all : 0;
}

int program_plan(lua_State *L) {
    const vm_program *p = luaL_checkudata(L, 1, vm_program_class);
    const ml_plan *plan = vm_program_plan(p);
    lua_newtable(L);
    vm_set_number(L, "flops", plan->flops);
    if (plan->fewer != NULL) return 1;
    vm_set_number(L, "attention_flops", plan->flops * attention_share(plan));
    vm_set_integer(L, "peak_bytes", plan->peak_bytes);
    vm_set_integer(L, "arena_bytes", plan->arena_bytes);
    vm_set_integer(L, "stages", plan->pipeline ? plan->pipeline->count : 1);
    vm_set_number(L, "seconds", p->seconds);
    lua_newtable(L);
    for (int i = 0; i < ML_MEMORY_KINDS; i++)
        vm_set_integer(L, ml_memory_names[i], plan->kind_bytes[i]);
    lua_setfield(L, -2, "kinds");
    push_idle(L, plan);
    lua_setfield(L, -2, "idle");
    return 1;
}

typedef struct {
    const ml_plan *plan, *microbatch;
    const ml_rates *rates;
    double seconds, attention, rebuilds;
} cost_call;

/* Of what microbatches have cached, what is computed anew after each run of a program. */
static double predict_rebuilds(const cost_call *call) {
    const predict_basis by = {.rates = call->rates, .microbatch = call->microbatch};
    ml_prediction one;
    double seconds = 0;
    for (const ml_plan *r = call->microbatch ? call->microbatch->rebuild : NULL; r; r = r->next) {
        if (!ml_plan_leaves_stale(&call->plan, 1, r)) continue;
        predict_plan(&by, r, &one);
        seconds += one.seconds;
    }
    return seconds;
}

/* Of attention what follows query-key pairs: a row without pairs takes the rest of the time. */
static void predict_cost(void *argument) {
    cost_call *call = argument;
    ml_sequence_rows none = {0};
    ml_prediction whole, rest;
    predict_basis by = {.rates = call->rates, .microbatch = call->microbatch};
    predict_microbatch(&by, call->plan, &whole);
    by.rows = &none;
    predict_microbatch(&by, call->plan, &rest);
    call->seconds = whole.seconds;
    call->rebuilds = predict_rebuilds(call);
    call->attention = whole.seconds - rest.seconds;
}

/* The largest of all ranks': each stage's ranks plan that stage alone. */
static double most_of_ranks(lua_State *L, double seconds) {
    ml_comm *comm = vm_of(L)->options->comm;
    int64_t least = -(int64_t)(seconds * 1e12);
    if (comm) vm_check(L, ml_comm_least(comm, &least));
    return -1e-12 * (double)least;
}

int program_cost(lua_State *L) {
    /* by one table whatever the device: all ranks and runs see the same */
    const char *gpu = luaL_optstring(L, 2, "h100");
    cost_call call = {.plan = vm_program_plan(luaL_checkudata(L, 1, vm_program_class)),
                      .rates = ml_rates_of(gpu)};
    if (!call.rates) vm_fail(L, "h100, h200, a100 or b200", "there are no rates of \"%s\"", gpu);
    const vm_program *microbatch = vm_to_program(L, 3);
    call.microbatch = microbatch ? vm_program_plan(microbatch) : NULL;
    vm_protect(L, predict_cost, &call);
    double seconds = call.seconds, attention = call.attention;
    bool staged = call.plan->pipeline != NULL;
    lua_pushnumber(L, staged ? most_of_ranks(L, seconds) : seconds);
    lua_pushnumber(L, staged ? most_of_ranks(L, attention) : attention);
    lua_pushboolean(L, fits(call.plan));
    lua_pushnumber(L, call.rebuilds);
    return 4;
}

int program_room(lua_State *L) {
    const ml_plan *plan = vm_program_plan(luaL_checkudata(L, 1, vm_program_class));
    const double times = luaL_optnumber(L, 2, 1), limit = (double)plan->target->memory_bytes;
    const double bytes = (double)plan->needed_bytes + (times - 1) * (double)plan->arena_bytes;
    lua_pushnumber(L, limit > 0 ? bytes / limit : 0);
    lua_pushnumber(L, plan->slowed);
    lua_pushnumber(L, limit > 0 ? (double)plan->kept_bytes / limit : 0);
    return 3;
}
