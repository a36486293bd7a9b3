#ifdef MLUA_CUDA
/* Runs with MLUA_CHECK=cpu: what each step wrote is compared. */
#include "runtime/device/cuda/cuda_internal.h"

/* For the checker (check.c): storage contents on the host. Raises. */
void cuda_read_storage(void *executable, uint32_t storage, int64_t offset, int64_t bytes,
                       void *to) {
    ml_executable *e = executable;
    ML_CHECK(e->device->base.ops->download(&e->device->base, to,
                                           (const char *)e->addresses[storage] + offset, bytes));
}

ml_status cuda_run_checked(ml_executable *e) {
    ml_status status = ml_check_begin(e->checker);
    for (uint32_t i = 0; i < e->step_count && status == ML_OK; i++) {
        status = cuda_enqueue(e, &e->steps[i]);
        if (status == ML_OK) status = cuda_wait_for(e->device, NULL);
        if (status == ML_OK) status = ml_check_step(e->checker, i);
    }
    cuda_doing(NULL);
    return status;
}
#endif
