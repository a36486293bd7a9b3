#include "vm/check/planned_for.h"

#include "runtime/base/machine.h"
#include "vm/cli/gpus.h"

const char *planned_device(const ml_vm *vm) {
    return vm->check_device ? vm->check_device : ml_session_device(vm->session)->description;
}

int64_t planned_process(const ml_vm *vm, int64_t plans) {
    return vm->check_ranks > 0 ? ml_process_bytes(plans, vm->check_ranks > 1) : plans;
}

bool planned_has(const ml_vm *vm, int64_t process) {
    const ml_gpu *gpu = vm->check_device ? gpu_by_model(vm->check_device) : NULL;
    return !gpu || (double)process <= gpu->memory_gib * (1 << 30);
}

typedef struct {
    const ml_plan *plan;
    int64_t extra;
    ml_plan_limit limit;
} require_call;

static void require_body(void *argument) {
    require_call *call = argument;
    ml_plan_require(call->plan, call->extra, &call->limit);
}

void planned_require(lua_State *L, const ml_plan *plan, int64_t extra) {
    const ml_vm *vm = vm_of(L);
    const int64_t needed = plan->peak_bytes + extra;
    require_call call = {plan,
                         extra,
                         {vm_target(L)->memory_bytes, planned_device(vm),
                          vm->options->memory > 0 ? (int64_t)(vm->options->memory * (1 << 30)) : 0,
                          planned_process(vm, needed) - needed}};
    vm_protect(L, require_body, &call);
}
