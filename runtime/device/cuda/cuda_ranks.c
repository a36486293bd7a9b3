#ifdef MLUA_CUDA
#include "runtime/device/cuda/cuda_ranks.h"

#include "runtime/device/cuda/cuda_ce_collectives.h"

static void abort_all(cuda_device *d) {
    if (!cuda_nccl_aborts(d)) return;
    cuda_ce_abort_begin(d);
    cuda_nccl_abort(d);
    cuda_channels_give_up(d);
    cuda_ce_abort_end(d);
}

static ml_status check(cuda_device *d) {
    ml_status status = cuda_nccl_errors(d);
    if (status == ML_OK) return status;
    ml_error error = *ml_error_last();
    abort_all(d);
    *ml_error_last() = error;
    return status;
}

ml_status cuda_ranks_join(ml_device *device) {
    static const cuda_others others = {check, abort_all};
    cuda_device *d = (cuda_device *)device;
    if (d->nccl) return ML_OK;
    ml_status status = cuda_nccl_join(device);
    if (!d->nccl) return status;
    d->others = &others;
    device->target.memory_bytes -= cuda_ce_reserve(d);
    return status;
}

static bool others_failed(const cuda_device *d) {
    const ml_ranks *ranks = d->base.ranks;
    if (!ranks || !ranks->comm) return false;
    ml_error first = *ml_error_last();
    bool failed = ml_comm_check(ranks->comm) != ML_OK;
    *ml_error_last() = first;
    return failed;
}

void cuda_ranks_part(ml_device *device) {
    cuda_device *d = (cuda_device *)device;
    if (!cuda_nccl_connected(d)) return;
    if (others_failed(d)) abort_all(d);
    cuda_channels_drain(d);
    cuda_ipc_end(d);
}

bool cuda_ranks_close(cuda_device *d) {
    if (!d->nccl) return true;
    if (!cuda_nccl_end_connecting(d)) return false;
    cuda_ranks_part(&d->base);
    cuda_nccl_destroy(d);
    cuda_channels_close(d);
    cuda_nccl_close(d);
    d->others = NULL;
    return true;
}
#endif
