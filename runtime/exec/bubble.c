/* The bubble of a pipeline, measured: the share of a step in which ranks wait. */
#include "runtime/exec/session.h"
#include "runtime/plan/staged.h"

/* Which steps, counted from 1; those that --profile runs kernel by kernel are not counted. */
enum { TIMED_TASKS = 3, TIMED_STEP };

static ml_status settled(const ml_program *program) {
    ml_device *device = program->session->device;
    return device->ops->wait(device);
}

ml_status bubble_step_begin(ml_program *program, bubble_clock *clock) {
    ml_run_mode mode = ml_profile_mode(program->session->device->profile);
    bool counts =
        program->plan->staged->microbatches > 1 && (mode == ML_RUN_PLAIN || mode == ML_RUN_WHOLE);
    clock->step = counts ? ++clock->steps : 0;
    if (clock->step != TIMED_STEP) return ML_OK;
    ml_status status = settled(program);
    if (status == ML_OK) status = ml_comm_barrier(program->session->comm);
    clock->began = ml_profile_now();
    return status;
}

ml_status bubble_task_begin(ml_program *program, bubble_clock *clock) {
    if (clock->step != TIMED_TASKS) return ML_OK;
    ml_status status = settled(program);
    clock->task = ml_profile_now();
    return status;
}

ml_status bubble_task_end(ml_program *program, bubble_clock *clock) {
    if (clock->step != TIMED_TASKS) return ML_OK;
    ml_status status = settled(program);
    clock->busy += ml_profile_now() - clock->task;
    return status;
}

/* What all ranks of the pipeline do, of what the last one of them takes. */
ml_status bubble_step_end(ml_program *program, bubble_clock *clock) {
    if (clock->step != TIMED_STEP) return ML_OK;
    const ml_layout *layout = program->plan->layout;
    int axis = layout->stages.mesh_axis, ranks = (int)layout->axis[axis].size;
    ml_status status = settled(program);
    double mine[2] = {clock->busy, ml_profile_now() - clock->began}, busy = 0, length = 0;
    double *all = ml_alloc(sizeof mine * (size_t)ranks);
    if (all == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for the times of %d ranks", ranks);
    if (status == ML_OK)
        status = session_collect(program->session, axis, ML_OP_ALL_GATHER, mine, all, 2, ML_F64);
    for (int i = 0; i < ranks && status == ML_OK; i++) {
        busy += all[2 * i] / ranks;
        if (all[2 * i + 1] > length) length = all[2 * i + 1];
    }
    if (status == ML_OK) clock->share = busy < length ? 1 - busy / length : 0;
    ml_free(all);
    return status;
}
