/* The bubble of a pipeline: the share of a step in which ranks wait. The device times each task
 * without the host (on a GPU by events), so that the step runs as usual. From the times of some
 * steps the following ones are predicted; the next ones are measured. Several of each, for single
 * steps differ by 5 %: a GPU that was idle before runs faster, and a second later slower. */
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/knobs.h" /* ml_debug */
#include "runtime/exec/pipeline/run.h"
#include "runtime/pipeline/plan.h"

/* Which steps, counted from 1 without those in which microbatches run alone. The first one is timed
 * only to prepare what timing needs. */
enum {
    WARM_STEP = 2,
    LEARNT_STEP, /* the first of those */
    MEASURED_STEP = LEARNT_STEP + 3,
    LAST_STEP = MEASURED_STEP + 2,
};

static bool timed(const bubble_clock *clock) {
    return clock->step >= WARM_STEP && clock->step <= LAST_STEP;
}

static ml_status wait_for_device(const ml_program *program) {
    ml_device *device = program->session->device;
    return device->ops->wait(device);
}

/* Of the steps of --profile, those count that are only timed as a whole; runs that are compared
 * with the CPU's are not timed. */
static bool counts(const ml_program *program) {
    const ml_profile *profile = program->session->device->profile;
    if (program->plan->roots.mixed || program->plan->pipeline->microbatches == 1 ||
        program->session->device->options.check)
        return false;
    if (profile != NULL && profile->stores) return ml_profile_mode(profile) == ML_RUN_WHOLE;
    return ml_profile_mode(profile) == ML_RUN_PLAIN;
}

ml_status bubble_step_begin(ml_program *program, bubble_clock *clock) {
    ml_device *device = program->session->device;
    clock->step = counts(program) ? ++clock->steps : 0;
    if (!timed(clock)) return ML_OK;
    ml_status status = ml_device_profile(device);
    if (status == ML_OK) status = wait_for_device(program);
    if (status == ML_OK) status = ml_comm_barrier(program->session->comm);
    if (status != ML_OK) {
        clock->step = 0;
        return status;
    }
    clock->mode = device->profile->mode;
    device->profile->mode = ML_RUN_WHOLE;
    device->profile->lists = clock->step >= LEARNT_STEP && clock->step < MEASURED_STEP;
    device->profile->runs.count = 0;
    clock->busy = device->profile->busy;
    clock->began = ml_clock_now();
    return ML_OK;
}

/* The idle share of all ranks' time until the last one is done, from busy and elapsed seconds. */
static ml_status share_find(ml_program *program, const double mine[2], double *share) {
    const ml_layout *layout = program->plan->layout;
    int axis = layout->stages.mesh_axis, ranks = (int)layout->axis[axis].size;
    double busy = 0, length = 0, *all = ml_alloc(2 * sizeof *mine * (size_t)ranks);
    if (all == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for the times of %d ranks", ranks);
    ml_status status =
        session_collect(program->session, axis, ML_COLLECTIVE_ALL_GATHER, mine, all, 2, ML_F64);
    for (int i = 0; i < ranks && status == ML_OK; i++) {
        busy += all[2 * i] / ranks;
        if (all[2 * i + 1] > length) length = all[2 * i + 1];
    }
    if (status == ML_OK) *share = busy < length ? 1 - busy / length : 0;
    ml_free(all);
    return status;
}

/* ---- Predicting the following steps ---------------------------------------------------------- */

typedef struct {
    ml_program *program;
    bubble_clock *clock;
    ml_arena *arena;
    int64_t *mine, *all; /* [ranks][actions][2] nanoseconds; `mine` is this rank's part */
    int ranks, actions;  /* of the rank that has most */
    pipeline_forecast forecast;
} learning;

static int own_actions(const ml_program *program) {
    const struct ml_pipeline_plan *pipeline = program->plan->pipeline;
    return pipeline->schedule.action_count[pipeline->coordinate];
}

/* Add when this rank's actions began and ended in the step, if each was timed once. */
static void note_body(void *context) {
    learning *l = context;
    bubble_clock *clock = l->clock;
    const ml_profile *profile = l->program->session->device->profile;
    size_t own = (size_t)own_actions(l->program);
    if (clock->ran == NULL)
        clock->ran = ML_NEW_ARRAY(l->program->plan->arena, int64_t, 2 * own + 1);
    if (profile->runs.count != own) {
        ml_debug(1, "%u runs of a pipelined step were timed\n", profile->runs.count);
        return;
    }
    for (size_t i = 0; i < own; i++) {
        clock->ran[2 * i] += (int64_t)(1e9 * (profile->runs.at[i].begin - clock->began));
        clock->ran[2 * i + 1] += (int64_t)(1e9 * (profile->runs.at[i].end - clock->began));
    }
    clock->learnt++;
}

/* This rank's part of the table: the mean of the steps. */
static void table_body(void *context) {
    learning *l = context;
    const struct ml_pipeline_plan *pipeline = l->program->plan->pipeline;
    l->ranks = pipeline->ranks;
    for (int r = 0; r < pipeline->ranks; r++)
        if (pipeline->schedule.action_count[r] > l->actions)
            l->actions = pipeline->schedule.action_count[r];
    l->mine = ML_NEW_ARRAY(l->arena, int64_t, 2 * (size_t)l->actions);
    l->all = ML_NEW_ARRAY(l->arena, int64_t, 2 * (size_t)l->actions * (size_t)l->ranks);
    for (int i = 0; i < 2 * own_actions(l->program); i++)
        l->mine[i] = l->clock->ran[i] / l->clock->learnt;
}

/* Every rank gets the same table: the mean of all pipelines. Sums of integers are the same in any
 * order. */
static ml_status table_share(learning *l) {
    const ml_layout *layout = l->program->plan->layout;
    const ml_session *session = l->program->session;
    int axis = layout->stages.mesh_axis;
    int64_t count = 2 * (int64_t)l->actions, pipelines = 1;
    ml_status status =
        session_collect(session, axis, ML_COLLECTIVE_ALL_GATHER, l->mine, l->all, count, ML_I64);
    count *= l->ranks;
    for (int i = 0; i < layout->count && status == ML_OK; i++) {
        if (i == axis || layout->axis[i].size == 1) continue;
        pipelines *= layout->axis[i].size;
        status =
            session_collect(session, i, ML_COLLECTIVE_ALL_REDUCE, l->all, l->all, count, ML_I64);
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
    pipeline_retime(l->program->plan, ran, l->arena, &l->forecast);
    if (l->program->session->device->options.debug < 1 || l->program->session->ranks.rank != 0)
        return;
    ml_text text = {.arena = l->arena};
    pipeline_times_print(l->program->plan, &l->forecast, &text);
    ml_debug(1, "%s", text.text);
}

/* Whether every rank has timed each of its actions once in each of the steps. */
static ml_status all_timed(const ml_program *program, const bubble_clock *clock, bool *all) {
    int64_t fits = clock->learnt == MEASURED_STEP - LEARNT_STEP;
    ml_status status = ml_comm_least(program->session->comm, &fits);
    *all = fits != 0;
    return status;
}

/* Steps that were not timed completely predict no more than the plan; their results are right. */
static ml_status learn(ml_program *program, bubble_clock *clock) {
    bool all = false;
    learning l = {.program = program, .clock = clock};
    ml_status status = ml_protect(note_body, &l);
    if (status != ML_OK || clock->step + 1 < MEASURED_STEP) return status;
    clock->forecast = program->plan->pipeline->schedule.bubble;
    status = all_timed(program, clock, &all);
    if (status != ML_OK || !all) return status;
    l.arena = ml_arena_new();
    if (l.arena == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for the times of a step");
    status = ml_protect(table_body, &l);
    if (status == ML_OK) status = table_share(&l);
    if (status == ML_OK) status = ml_protect(learn_body, &l);
    clock->forecast = l.forecast.bubble;
    ml_arena_free(l.arena);
    return status;
}

static ml_status measure(ml_program *program, bubble_clock *clock, const double step[2]) {
    for (int i = 0; i < 2; i++)
        clock->measured[i] = step[i] + (clock->step == MEASURED_STEP ? 0 : clock->measured[i]);
    if (clock->step < LAST_STEP) return ML_OK;
    return share_find(program, clock->measured, &clock->share);
}

ml_status bubble_step_end(ml_program *program, bubble_clock *clock, ml_status status) {
    ml_profile *profile = program->session->device->profile;
    if (!timed(clock)) return status;
    if (status == ML_OK) status = wait_for_device(program);
    double mine[2] = {profile->busy - clock->busy, ml_clock_now() - clock->began}, unused;
    profile->mode = clock->mode;
    profile->lists = false;
    if (status != ML_OK) return status;
    if (clock->step == WARM_STEP) return share_find(program, mine, &unused);
    return clock->step < MEASURED_STEP ? learn(program, clock) : measure(program, clock, mine);
}
