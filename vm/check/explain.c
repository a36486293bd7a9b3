#include "vm/check/explain.h"

#include <string.h>

#include "runtime/compile_passes.h"
#include "runtime/plan/log.h"
#include "vm/cli/output.h"

static void print_number(double value, int width, int digits) {
    if (value > 0)
        printf(" %*.*f", width, digits, value);
    else
        printf(" %*s", width, "-");
}

/* The purpose of pass `name`; of another step of the compiler its text. */
static const char *purpose_of(const ml_log_event *event) {
    const char *name, *purpose;
    for (int i = 0; ml_compile_pass(i, &name, &purpose); i++)
        if (event->kind == ML_LOG_PASS && strcmp(name, event->name) == 0) return purpose;
    return event->text ? event->text : "";
}

static void print_event(const ml_log_event *event, int *attempts) {
    const double gib = 1 << 30;
    switch (event->kind) {
    case ML_LOG_ATTEMPT:
        printf("attempt %d: %s\n  %-20s %7s %7s %9s %9s %10s\n", ++*attempts, event->text, "pass",
               "nodes", "steps", "GiB moved", "est. ms", "took ms");
        break;
    case ML_LOG_PART: printf("  %s\n", event->text); break;
    case ML_LOG_PEAK: printf("  peak %.3f GiB: %s\n", event->bytes / gib, event->text); break;
    case ML_LOG_PASS:
    case ML_LOG_STEPS:
        printf("  %-20s %7u", event->name, event->nodes);
        print_number(event->steps, 7, 0);
        print_number(event->bytes / gib, 9, 3);
        print_number(1e3 * event->seconds, 9, 3);
        printf(" %7.2f ms  %s\n", 1e3 * event->took, purpose_of(event));
        break;
    }
}

static void print_log(const ml_vm *vm, const char *program, const ml_compile_log *log) {
    int attempts = 0;
    bool discards = vm->discards;
    output_discard((ml_vm *)vm, false);
    printf("program \"%s\"\n", program ? program : "");
    for (uint32_t i = 0; i < log->events.count; i++) print_event(&log->events.at[i], &attempts);
    printf("\n");
    output_discard((ml_vm *)vm, discards);
}

/* Plans of the programs that the script made before; on top of the stack. */
static ml_plans push_plans(lua_State *L) {
    luaL_getsubtable(L, LUA_REGISTRYINDEX, "mlua.programs");
    ml_plans plans = {.count = (int)lua_rawlen(L, -1)};
    ml_plan **at = lua_newuserdatauv(L, ((size_t)plans.count + 1) * sizeof *at, 0);
    for (int i = 0; i < plans.count; i++) {
        lua_rawgeti(L, -2, i + 1);
        at[i] = vm_to_program(L, -1)->plan;
        lua_pop(L, 1);
    }
    lua_remove(L, -2);
    plans.at = at;
    return plans;
}

static ml_status plan_now(lua_State *L, const ml_roots *roots, ml_plan **plan) {
    ml_vm *vm = vm_of(L);
    const ml_plans others = push_plans(L);
    ml_status status = ml_session_plan(vm->session, roots, &vm->check_target, &others, plan);
    lua_pop(L, 1);
    return status;
}

void explain_plan_alone(lua_State *L, const ml_roots *roots, ml_plan **plan) {
    ml_vm *vm = vm_of(L);
    const ml_plans others = push_plans(L);
    const bool runs = !vm->dry.runs && !vm_cannot_run(vm);
    ml_status status =
        ml_session_plan_alone(vm->session, roots, vm_target(L), runs ? NULL : &others, plan);
    lua_pop(L, 1);
    vm_check(L, status);
}

void explain_plan(lua_State *L, const ml_roots *roots, ml_plan **plan) {
    ml_vm *vm = vm_of(L);
    if (!vm->options->explain) {
        vm_check(L, plan_now(L, roots, plan));
        return;
    }
    ml_compile_log *log = ml_compile_log_new();
    ml_session_log(vm->session, log);
    ml_status status = plan_now(L, roots, plan);
    ml_session_log(vm->session, NULL);
    if (log) print_log(vm, roots->name, log);
    ml_compile_log_free(log);
    vm_check(L, status);
}
