#ifdef MLUA_CUDA
/* Events around the steps of a run that is timed step by step. */
#include "runtime/device/cuda/cuda_internal.h"

ml_status cuda_time_begins(ml_executable *e, const cuda_step *step, CUstream stream) {
    if (!e->times || !e->times->recording) return ML_OK;
    CUDA_TRY(cuEventRecord(e->times->begin[step - e->steps], stream));
    return ML_OK;
}

ml_status cuda_time_ends(ml_executable *e, const cuda_step *step, CUstream stream) {
    if (!e->times || !e->times->recording) return ML_OK;
    CUDA_TRY(cuEventRecord(e->times->end[step - e->steps], stream));
    return e->times->stops ? cuda_wait_for(e->device, NULL) : ML_OK;
}
#endif
