/* The rooms beside the core, for sessions and programs: other ranks, devices, text of kernels. */
#include "codegen/jit/jit.h"
#include "runtime/exec/session.h"

static void show_kernel(const ml_kernel *kernel, ml_target_kind kind, ml_arena *arena) {
    ml_device_jit_options();
    ml_jit_show(kernel, kind, arena);
}

const beside_core_ops beside_core = {
    .device_open = ml_device_open,
    .device_close = ml_device_close,
    .show_kernel = show_kernel,
    .rank = ml_comm_rank,
    .local_rank = ml_comm_local_rank,
    .world = ml_comm_world,
    .host_ranks = ml_comm_host_ranks,
    .local = ml_comm_local,
    .everyone = ml_comm_everyone,
    .group = ml_comm_group,
    .collect = ml_comm_collect,
    .agree = ml_comm_agree,
    .least = ml_comm_least,
    .barrier = ml_comm_barrier,
    .busy = ml_comm_busy,
    .expect = ml_comm_expect,
    .done = ml_comm_done,
    .step = ml_comm_step,
};
