/* The bubble of a pipeline: the share of a step in which ranks wait. The device times each task
 * beside the host (on a GPU by events), so that the step runs as ever. The times of one step tell
 * how the following ones go; the next one is measured. */
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/exec/session.h"
#include "runtime/plan/staged.h"

/* Which steps, counted from 1 and without those in which microbatches go alone. The first one runs
 * timed only to have all ready that timing needs.
 */
enum { WARM_STEP = 2, LEARNT_STEP, MEASURED_STEP };

static bool timed(const bubble_clock *clock) {
    return clock->step >= WARM_STEP && clock->step <= MEASURED_STEP;
}

static ml_status settled(const ml_program *program) {
    ml_device *device = program->session->device;
    return device->ops->wait(device);
}

/* Of the steps of --profile, those that are only timed as a whole count; of runs that are compared
 * with the CPU's nothing is timed. */
static bool counts(const ml_program *program) {
    const ml_profile *profile = program->session->device->profile;
    if (program->plan->staged->microbatches == 1 || ml_knobs()->check != NULL) return false;
    if (profile != NULL && profile->keeps) return ml_profile_mode(profile) == ML_RUN_WHOLE;
    return ml_profile_mode(profile) == ML_RUN_PLAIN;
}

ml_status bubble_step_begin(ml_program *program, bubble_clock *clock) {
    ml_device *device = program->session->device;
    clock->step = counts(program) ? ++clock->steps : 0;
    if (!timed(clock)) return ML_OK;
    ml_status status = ml_device_profile(device);
    if (status == ML_OK) status = settled(program);
    if (status == ML_OK) status = ml_comm_barrier(program->session->comm);
    if (status != ML_OK) return status;
    clock->mode = device->profile->mode;
    device->profile->mode = ML_RUN_WHOLE;
    device->profile->lists = clock->step == LEARNT_STEP;
    device->profile->runs.count = 0;
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

/* ---- What a step tells of those that follow ----------------------------------------------------
 */

typedef struct {
    ml_program *program;
    ml_arena *arena;
    int64_t *mine, *all; /* [ranks][actions][2] nanoseconds; `mine` is this rank's part */
    int ranks, actions;  /* of the rank that has most */
    staged_forecast forecast;
} learning;

/* When this rank's actions began and ended. */
static void table_body(void *context) {
    learning *l = context;
    const struct ml_staged_plan *staged = l->program->plan->staged;
    const bubble_clock *clock = staged_clock(l->program);
    const ml_profile *profile = l->program->session->device->profile;
    l->ranks = staged->ranks;
    for (int r = 0; r < staged->ranks; r++)
        if (staged->pipeline.action_count[r] > l->actions)
            l->actions = staged->pipeline.action_count[r];
    l->mine = ML_NEW_ARRAY(l->arena, int64_t, 2 * (size_t)l->actions);
    l->all = ML_NEW_ARRAY(l->arena, int64_t, 2 * (size_t)l->actions * (size_t)l->ranks);
    int own = staged->pipeline.action_count[staged->coordinate];
    for (int i = 0; i < own; i++) {
        l->mine[2 * i] = (int64_t)(1e9 * (profile->runs.at[i].begin - clock->began));
        l->mine[2 * i + 1] = (int64_t)(1e9 * (profile->runs.at[i].end - clock->began));
    }
}

/* Every rank gets the same table: the mean of all pipelines. Sums of whole numbers are the same in
 * any order. */
static ml_status table_share(learning *l) {
    const ml_layout *layout = l->program->plan->layout;
    const ml_session *session = l->program->session;
    int axis = layout->stages.mesh_axis;
    int64_t count = 2 * (int64_t)l->actions, pipelines = 1;
    ml_status status =
        session_collect(session, axis, ML_OP_ALL_GATHER, l->mine, l->all, count, ML_I64);
    count *= l->ranks;
    for (int i = 0; i < layout->count && status == ML_OK; i++) {
        if (i == axis || layout->axis[i].size == 1) continue;
        pipelines *= layout->axis[i].size;
        status = session_collect(session, i, ML_OP_ALL_REDUCE, l->all, l->all, count, ML_I64);
    }
    for (int64_t i = 0; i < count; i++) l->all[i] /= pipelines;
    return status;
}

static void learn_body(void *context) {
    learning *l = context;
    ml_task_time *times = ML_NEW_ARRAY(l->arena, ml_task_time, (size_t)l->actions * l->ranks + 1);
    const ml_task_time **ran = ML_NEW_ARRAY(l->arena, const ml_task_time *, (size_t)l->ranks);
    for (int i = 0; i < l->actions * l->ranks; i++)
        times[i] = (ml_task_time){l->all[2 * i], l->all[2 * i + 1]};
    for (int r = 0; r < l->ranks; r++) ran[r] = times + (size_t)r * l->actions;
    staged_measured(l->program->plan, ran, l->arena, &l->forecast);
    if (ml_knobs()->debug < 1 || l->program->session->ranks.rank != 0) return;
    ml_text text = {.arena = l->arena};
    staged_times_print(l->program->plan, &l->forecast, &text);
    ml_debug(1, "%s", text.text);
}

/* Whether every rank has timed each of its actions once. */
static ml_status all_timed(const ml_program *program, bool *all) {
    const struct ml_staged_plan *staged = program->plan->staged;
    int64_t timed = program->session->device->profile->runs.count;
    int64_t fits = timed == staged->pipeline.action_count[staged->coordinate];
    if (!fits) ml_debug(1, "%lld runs of a pipelined step were timed\n", (long long)timed);
    ml_status status = ml_comm_least(program->session->comm, &fits);
    *all = fits != 0;
    return status;
}

/* A step that was not timed well foretells no more than the plan: what it computed is right all the
 * same. */
static ml_status learn(ml_program *program, bubble_clock *clock) {
    bool all;
    ml_status timed = all_timed(program, &all);
    clock->forecast = program->plan->staged->pipeline.bubble;
    if (timed != ML_OK || !all) return timed;
    learning l = {.program = program, .arena = ml_arena_new()};
    if (l.arena == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for the times of a step");
    ml_status status = ml_protect(table_body, &l);
    if (status == ML_OK) status = table_share(&l);
    if (status == ML_OK) status = ml_protect(learn_body, &l);
    clock->forecast = l.forecast.bubble;
    ml_arena_free(l.arena);
    return status;
}

ml_status bubble_step_end(ml_program *program, bubble_clock *clock) {
    ml_profile *profile = program->session->device->profile;
    if (!timed(clock)) return ML_OK;
    ml_status status = settled(program);
    double mine[2] = {profile->busy - clock->busy, ml_profile_now() - clock->began};
    profile->mode = clock->mode;
    profile->lists = false;
    if (status != ML_OK || clock->step == WARM_STEP) return status;
    return clock->step == LEARNT_STEP ? learn(program, clock) : share_find(program, clock, mine);
}
