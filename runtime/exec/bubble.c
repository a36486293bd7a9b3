/* The bubble of a pipeline, measured: the share of a step in which ranks wait. The device times
 * each task beside the host (on a GPU by events), so that the step runs as ever. */
#include "runtime/exec/session.h"
#include "runtime/plan/staged.h"

/* Which steps, counted from 1 and without those in which microbatches go alone. The first one runs
 * timed only to have all ready that timing needs.
 */
enum { WARM_STEP = 2, TIMED_STEP };

static ml_status settled(const ml_program *program) {
    ml_device *device = program->session->device;
    return device->ops->wait(device);
}

/* Of the steps of --profile, those that are only timed as a whole count. */
static bool counts(const ml_program *program) {
    const ml_profile *profile = program->session->device->profile;
    if (program->plan->staged->microbatches == 1) return false;
    if (profile != NULL && profile->keeps) return ml_profile_mode(profile) == ML_RUN_WHOLE;
    return ml_profile_mode(profile) == ML_RUN_PLAIN;
}

ml_status bubble_step_begin(ml_program *program, bubble_clock *clock) {
    ml_device *device = program->session->device;
    clock->step = counts(program) ? ++clock->steps : 0;
    if (clock->step != WARM_STEP && clock->step != TIMED_STEP) return ML_OK;
    ml_status status = ml_device_profile(device);
    if (status == ML_OK) status = settled(program);
    if (status == ML_OK) status = ml_comm_barrier(program->session->comm);
    if (status != ML_OK) return status;
    clock->mode = device->profile->mode;
    device->profile->mode = ML_RUN_WHOLE;
    clock->busy = device->profile->busy;
    clock->began = ml_profile_now();
    return ML_OK;
}

/* What all ranks of the pipeline do, of what the last one of them takes. */
static ml_status share_find(ml_program *program, bubble_clock *clock, const double mine[2]) {
    const ml_layout *layout = program->plan->layout;
    int axis = layout->stages.mesh_axis, ranks = (int)layout->axis[axis].size;
    double busy = 0, length = 0, *all = ml_alloc(2 * sizeof *mine * (size_t)ranks);
    if (all == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for the times of %d ranks", ranks);
    ml_status status =
        session_collect(program->session, axis, ML_OP_ALL_GATHER, mine, all, 2, ML_F64);
    for (int i = 0; i < ranks && status == ML_OK; i++) {
        busy += all[2 * i] / ranks;
        if (all[2 * i + 1] > length) length = all[2 * i + 1];
    }
    if (status == ML_OK) clock->share = busy < length ? 1 - busy / length : 0;
    ml_free(all);
    return status;
}

ml_status bubble_step_end(ml_program *program, bubble_clock *clock) {
    ml_profile *profile = program->session->device->profile;
    if (clock->step != WARM_STEP && clock->step != TIMED_STEP) return ML_OK;
    ml_status status = settled(program);
    double mine[2] = {profile->busy - clock->busy, ml_profile_now() - clock->began};
    profile->mode = clock->mode;
    if (status != ML_OK || clock->step == WARM_STEP) return status;
    return share_find(program, clock, mine);
}
