/* The line of `mlua check` on time: whose rates, and what they give. */
#include "vm/check/predicted.h"

#include <string.h>

#include "runtime/base/pool.h"
#include "vm/check/bench.h"
#include "vm/check/timed.h"
#include "vm/cli/gpus.h"

/* Rates that were measured on this machine come before those of a table. */
bool predicted_rates(lua_State *L, int64_t ranks, vm_predicted *p) {
    const ml_vm *vm = vm_of(L);
    const ml_target *target = vm_target(L);
    const ml_gpu *gpu = target->kind == ML_TARGET_CUDA ? gpu_by_model(vm->check_device) : NULL;
    char date[ML_BENCH_DATE];
    p->peak_flops = gpu ? gpu->tflops * 1e12 : 0;
    bool cpu = target->kind == ML_TARGET_C;
    const char *name = vm->options->device;
    bool here = cpu || (gpu_is_present() && (!name || strcmp(name, "cuda") == 0));
    const ml_rates *table = gpu ? ml_rates_of(gpu->key) : NULL;
    if (here && ml_bench_rates(cpu ? "cpu" : "cuda", &p->rates, date)) {
        if (cpu) ml_rates_share(&p->rates, ranks, ml_cpu_count());
        if (cpu) p->products = timed_products(L, ranks);
        p->source = vm_intern(L, lua_pushfstring(L, "by rates measured here on %s", date));
        lua_pop(L, 1);
        return p->known = true;
    }
    if (!table) return false;
    p->rates = *table;
    p->source = vm_intern(L, lua_pushfstring(L, "by the table of %s", gpu->key));
    lua_pop(L, 1);
    return p->known = true;
}

typedef struct {
    const ml_rates *rates;
    predict_products *products;
    const ml_plan *plan, *microbatch;
    const vm_host *documents; /* NULL: each row is one */
    bool none;                /* there are no documents */
    ml_arena *arena;
    ml_prediction one;
} predict_call;

static void predict(void *argument) {
    predict_call *call = argument;
    const vm_host *h = call->documents;
    ml_sequence_rows rows = {0};
    predict_basis by = {call->rates, h || call->none ? &rows : NULL, call->products,
                        call->microbatch};
    if (h) ml_sequence_rows_read(call->arena, h->data, h->dims[0], h->dims[1], &rows);
    predict_plan(&by, call->plan, &call->one);
}

static void add_call(lua_State *L, vm_predicted *p, predict_call *call, double times) {
    call->rates = &p->rates;
    call->products = p->products;
    call->microbatch = p->microbatch;
    call->arena = ml_arena_new();
    ml_status status = call->arena ? ml_protect(predict, call)
                                   : ml_fail(ML_NO_MEMORY, "not enough host memory to predict");
    const bool may_time = vm_of(L)->options->confined == NULL;
    if (status == ML_OK && may_time && timed_missing(p->products))
        status = ml_protect(predict, call);
    ml_arena_free(call->arena);
    vm_check(L, status);
    predict_add(&p->step, &call->one, times);
    if (call->plan->roots.microbatches > 1 && !call->plan->fewer) p->microbatch = call->plan;
}

void predicted_add(lua_State *L, vm_predicted *p, const ml_plan *plan, double times) {
    add_call(L, p, &(predict_call){.plan = plan}, times);
}

bool predicted_runs(lua_State *L, vm_predicted *p, double times) {
    if (!lua_istable(L, 2)) return false;
    if (vm_option(L, 2, "lengths")) p->lengths = vm_intern(L, lua_tostring(L, -1));
    lua_settop(L, 2);
    if (!vm_option(L, 2, "runs")) return false;
    const int list = lua_gettop(L);
    for (int64_t i = 1; i <= vm_table_length(L, list); i++, lua_settop(L, list)) {
        lua_rawgeti(L, list, i);
        lua_getfield(L, -1, "program");
        lua_getfield(L, -2, "documents");
        lua_getfield(L, -3, "times");
        const vm_program *program = vm_to_program(L, -3);
        predict_call call = {.documents = vm_to_host(L, -2)};
        call.none = lua_isboolean(L, -2) && !lua_toboolean(L, -2);
        if (!program || (!call.documents && !call.none))
            vm_fail(L, NULL, "a run is of a program and documents");
        call.plan = vm_program_plan(program);
        add_call(L, p, &call, luaL_optnumber(L, -1, call.plan->pipeline ? 1 : times));
    }
    lua_settop(L, list - 1);
    return true;
}

static double mfu(const vm_predicted *p, double flops) {
    return p->peak_flops > 0 ? flops / p->step.seconds / p->peak_flops : 0;
}

const ml_plan *predicted_rebuild(lua_State *L, int64_t programs, const ml_plan *rebuild) {
    const ml_plan **list = lua_newuserdatauv(L, (size_t)(programs + 1) * sizeof *list, 0);
    for (int64_t i = 0; i < programs; i++) {
        lua_rawgeti(L, 1, i + 1);
        list[i] = vm_program_plan(vm_to_program(L, -1));
        lua_pop(L, 1);
    }
    while (rebuild && !ml_plan_leaves_stale(list, programs, rebuild)) rebuild = rebuild->next;
    lua_pop(L, 1);
    return rebuild;
}

void predicted_print(const vm_predicted *p, double tokens, bool samples, double flops) {
    const ml_prediction *s = &p->step;
    if (!p->known || s->seconds <= 0) return;
    printf("predicted step  %.*f ms", s->seconds < 0.1 ? 2 : 1, 1e3 * s->seconds);
    if (tokens > 0) printf(", %.0f %s/s", tokens / s->seconds, samples ? "samples" : "tokens");
    if (p->peak_flops > 0) printf(", MFU %.1f%%", 100 * mfu(p, flops));
    printf(" (%s%s%s)\n ", p->source, p->lengths ? "; " : "", p->lengths ? p->lengths : "");
    for (int i = 0; i < PREDICT_KINDS; i++)
        printf(" %s %.1f%%,", predict_names[i], 100 * s->busy[i] / s->seconds);
    printf(" exposed communication %.1f%%", 100 * s->exposed / s->seconds);
    if (s->bubble > 0) printf(", bubble %.1f%%", 100 * s->bubble);
    if (s->held > 0) printf(", waits for host copies %.1f%%", 100 * s->held / s->seconds);
    printf("\n");
}

void predicted_json(const vm_predicted *p, double tokens, double flops, json_t *object) {
    const ml_prediction *s = &p->step;
    if (!p->known || s->seconds <= 0) return;
    json_t *out =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:s}", "seconds", s->seconds,
                  "tokens_per_s", tokens / s->seconds, "mfu", mfu(p, flops), "exposed",
                  s->exposed / s->seconds, "collectives", s->sent / s->seconds, "bubble", s->bubble,
                  "host_copies", s->copied, "host_wait", s->held, "rates", p->source);
    if (out && p->lengths) json_object_set_new(out, "documents", json_string(p->lengths));
    if (out) json_object_set_new(out, "memory_bytes", json_real(p->rates.memory_bytes));
    if (out) json_object_set_new(out, "link_bytes", json_real(p->rates.link_bytes));
    if (out) json_object_set_new(out, "network_bytes", json_real(p->rates.network_bytes));
    if (out) json_object_set_new(out, "host_ranks", json_integer(p->rates.host_ranks));
    for (int i = 0; i < PREDICT_KINDS && out; i++)
        json_object_set_new(out, predict_names[i], json_real(s->busy[i] / s->seconds));
    json_object_set_new(object, "predicted", out);
}
