/* Running a pipeline: the inputs of a step's microbatches are collected, then every rank runs its
 * actions in the order of the schedule. */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/exec/pipeline/run.h"

static void *storage_address(const ml_program *program, int v, int p, int slot,
                             const ml_storage *storage) {
    const pipeline_stage *stage = &plan_of(program)->stages[v];
    const task_set *tasks = &stage->tasks;
    int saved = 0;
    switch (storage->kind) {
    case ML_STORAGE_INPUT:
        while (tasks->saved[saved].input != storage->id) saved++;
        return saved_in_slot(program, v, slot, saved);
    case ML_STORAGE_SAVED:
        return saved_in_slot(program, v, slot, tasks->tasks[p].exports[storage->id]);
    case ML_STORAGE_HOST:
        return program->pipeline->stages[v].host + slot * stage->host_bytes + storage->offset;
    default: return program_address(program, program->plan, storage);
    }
}

/* Of a task's executables, the one of the slot. */
static int executable_of(const ml_program *program, int v, int p, int slot) {
    const pipeline_stage *plan = &plan_of(program)->stages[v];
    if (p == plan->tasks.count) return executable_count(program, v) - 1;
    return p + (program->pipeline->rebinds ? 0 : slot * plan->tasks.count);
}

static ml_status task_bind(ml_program *program, int v, int p, int slot) {
    const ml_schedule *s = plan_of(program)->stages[v].plans[p]->schedule;
    stage_run *stage = &program->pipeline->stages[v];
    int at = executable_of(program, v, p, slot);
    if (stage->bound[at] && !program->pipeline->rebinds) return ML_OK;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        program->addresses[i] = storage_address(program, v, p, slot, &s->storages.at[i]);
    }
    ml_status status =
        program->session->device->ops->bind(stage->executables[at], program->addresses);
    stage->bound[at] = status == ML_OK;
    return status;
}

/* Before any message is in flight: what a GPU does to bind, such as releasing memory, may wait for
 * all work in progress there. */
static ml_status tasks_bind(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_status status = ML_OK;
    for (int v = 0; v < plan->count && !program->pipeline->rebinds; v++) {
        int slots = mine(program, v) ? slots_of(program, v) : 0;
        for (int slot = 0; slot < slots; slot++) {
            for (int p = 0; p < plan->stages[v].plan_count && status == ML_OK; p++)
                status = task_bind(program, v, p, slot);
        }
    }
    return status;
}

static ml_status task_run(ml_program *program, int v, int p, int microbatch) {
    ml_executable **executables = program->pipeline->stages[v].executables;
    int slot = slot_at(program, v, microbatch);
    ML_TRY(program->pipeline->rebinds ? task_bind(program, v, p, slot) : ML_OK);
    return program->session->device->ops->run(executables[executable_of(program, v, p, slot)]);
}

/* What is the same for all microbatches of the step. */
static ml_status once_run(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_status status = ML_OK;
    for (int v = 0; v < plan->count && status == ML_OK; v++) {
        const task_set *tasks = &plan->stages[v].tasks;
        if (!mine(program, v) || !tasks->once_per_step) continue;
        status = task_run(program, v, tasks->count, 0);
    }
    return status;
}

/* After this, all messages that the program sent from the slot have arrived. */
static ml_status messages_wait_sent(ml_program *program, int v, int slot) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_device *device = program->session->device;
    ml_status status = ML_OK;
    for (int i = 0; i < program->pipeline->message_count && status == ML_OK; i++) {
        const pipeline_message *m = &plan->messages[program->pipeline->messages[i]];
        if (plan->channels[m->channel].from != v || plan->channels[m->channel].local) continue;
        status = device->ops->wait_sent(device, program->pipeline->comm_channels[m->channel],
                                        saved_in_slot(program, v, slot, m->saved_from));
    }
    return status;
}

/* A slot is reused: messages that were sent from it must have arrived, then the inputs are copied.
 */
static ml_status slot_begin(ml_program *program, int v, int microbatch) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    const task_set *tasks = &plan->stages[v].tasks;
    ml_device *device = program->session->device;
    int slot = slot_at(program, v, microbatch);
    ml_program **user = &program->pipeline->lead->pipeline->stages[v].user[slot];
    ml_status status = messages_wait_sent(*user != NULL ? *user : program, v, slot);
    *user = program;
    const char *feed =
        program->pipeline->feeds + (int64_t)microbatch * program->pipeline->feed_bytes;
    for (int i = 0; i < tasks->saved_count && status == ML_OK; i++) {
        for (int k = 0; k < program->input_count; k++) {
            if (program->input_ids[k] != tasks->saved[i].input) continue;
            status = device->ops->upload(device, saved_address(program, v, microbatch, i),
                                         feed + program->input_offsets[k], program->input_bytes[k]);
        }
    }
    return status;
}

/* Whether a message is the first of its channel: the one that may be expected before its task is
 * next, for a channel expects one at a time. */
static bool leads_channel(const struct ml_pipeline_plan *plan, const pipeline_message *m) {
    return m == plan->messages || m[-1].channel != m->channel;
}

/* Expect the first message of each channel to the task: those that can be expected an action ahead,
 * or those that cannot. */
static ml_status leading_expect(ml_program *program, const ml_action *action, bool early) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_device *device = program->session->device;
    int v = plan->tasks[action->task].stage;
    ml_status status = ML_OK;
    for (int i = 0; i < program->pipeline->message_count && status == ML_OK; i++) {
        const pipeline_message *m = &plan->messages[program->pipeline->messages[i]];
        const pipeline_channel *channel = &plan->channels[m->channel];
        ml_channel *carrier = program->pipeline->comm_channels[m->channel];
        if (channel->to_task != action->task || channel->local || !leads_channel(plan, m)) continue;
        bool patient = program->pipeline->patient && device->ops->patient(device, carrier);
        if (patient != early) continue;
        status = device->ops->expect(
            device, carrier, saved_address(program, v, action->microbatch, m->saved_to), m->bytes);
    }
    return status;
}

/* Prepare the slot of the next action, or of the one after it. */
static ml_status task_slot(ml_program *program, const ml_action *action) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    int v = plan->tasks[action->task].stage;
    bool first = action->task == plan->stages[v].first_task;
    return first ? slot_begin(program, v, action->microbatch) : ML_OK;
}

/* The action after the next one: expect what can be expected at no cost. */
static ml_status task_foresee(ml_program *program, const ml_action *action) {
    if (action == NULL || !program->pipeline->patient) return ML_OK;
    program = program_at(program->pipeline->lead, action->microbatch);
    ml_status status = task_slot(program, action);
    return status == ML_OK ? leading_expect(program, action, true) : status;
}

/* The next action, which was foreseen. */
static ml_status task_prepare(ml_program *program, const ml_action *action) {
    ml_status status = program->pipeline->patient ? ML_OK : task_slot(program, action);
    return status == ML_OK ? leading_expect(program, action, false) : status;
}

/* What the task waits for. */
static ml_status task_receive(ml_program *program, const ml_action *action) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_device *device = program->session->device;
    ml_status status = ML_OK;
    for (int i = 0; i < program->pipeline->message_count && status == ML_OK; i++) {
        const pipeline_message *m = &plan->messages[program->pipeline->messages[i]];
        const pipeline_channel *channel = &plan->channels[m->channel];
        if (channel->to_task != action->task) continue;
        char *to = saved_address(program, channel->to, action->microbatch, m->saved_to);
        if (channel->local) {
            const char *from =
                saved_address(program, channel->from, action->microbatch, m->saved_from);
            status = device->ops->copy(device, to, from, m->bytes);
            continue;
        }
        ml_channel *carrier = program->pipeline->comm_channels[m->channel];
        if (!leads_channel(plan, m)) status = device->ops->expect(device, carrier, to, m->bytes);
        if (status == ML_OK) status = device->ops->arrive(device, carrier, to);
    }
    return status;
}

/* What the task has computed for others, or (`to_task`) what this rank has for the task. */
static ml_status messages_send(ml_program *program, const ml_action *action, bool to_task) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_device *device = program->session->device;
    ml_status status = ML_OK;
    for (int i = 0; i < program->pipeline->message_count && status == ML_OK; i++) {
        const pipeline_message *m = &plan->messages[program->pipeline->messages[i]];
        const pipeline_channel *channel = &plan->channels[m->channel];
        if ((to_task ? channel->to_task : channel->from_task) != action->task) continue;
        if (channel->local || !mine(program, channel->from)) continue;
        status = device->ops->send(
            device, program->pipeline->comm_channels[m->channel],
            saved_address(program, channel->from, action->microbatch, m->saved_from), m->bytes);
    }
    return status;
}

/* The receives or the sends of a task; where runs are profiled, with the host's time. */
static ml_status transfer(ml_program *program, const ml_action *action, bool receives) {
    ml_profile *profile = program->session->device->profile;
    double begin = profile != NULL ? ml_clock_now() : 0;
    ml_status status =
        receives ? task_receive(program, action) : messages_send(program, action, false);
    if (status != ML_OK || profile == NULL) return status;
    return ml_profile_host(profile, receives ? "receive" : "send", begin);
}

static ml_status action_run(ml_program *program, const ml_action *action) {
    int v = plan_of(program)->tasks[action->task].stage;
    int p = action->task - plan_of(program)->stages[v].first_task;
    if (!step_is_valid(program)) return ML_OK;
    ml_status status = task_run(program, v, p, action->microbatch);
    return status == ML_OK ? retry_note(program, v, p, action->microbatch) : status;
}

static int compare_start(const void *a, const void *b) {
    const ml_action *x = *(const ml_action *const *)a, *y = *(const ml_action *const *)b;
    return x->start != y->start ? (x->start < y->start ? -1 : 1) : x->task - y->task;
}

/* The actions of all ranks for one microbatch, one of each task, each after those from which it
 * receives. */
static ml_status actions_of(const struct ml_pipeline_plan *plan, int microbatch,
                            const ml_action ***list, int *count) {
    const ml_action **found = ml_alloc(sizeof *found * (size_t)(plan->task_count + 1));
    *list = found;
    *count = 0;
    if (found == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a step");
    for (int r = 0; r < plan->ranks; r++)
        for (int i = 0; i < plan->schedule.action_count[r]; i++)
            if (plan->schedule.actions[r][i].microbatch == microbatch)
                found[(*count)++] = &plan->schedule.actions[r][i];
    qsort(found, (size_t)*count, sizeof *found, compare_start);
    return ML_OK;
}

/* A microbatch runs through all tasks alone. Messages are sent only when the task that needs them
 * is next: then nothing in flight waits for a later action. */
static ml_status microbatch_run(ml_program *program, int microbatch) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    const ml_action **actions;
    int count;
    ml_status status = actions_of(plan, microbatch, &actions, &count);
    program = program_at(program, microbatch);
    for (int i = 0; i < count && status == ML_OK; i++) {
        bool own = mine(program, plan->tasks[actions[i]->task].stage);
        status = retry_check_flags(program, actions[i]->start);
        if (own && status == ML_OK) status = task_foresee(program, actions[i]);
        if (own && status == ML_OK) status = task_prepare(program, actions[i]);
        if (status == ML_OK) status = messages_send(program, actions[i], true);
        if (!own || status != ML_OK) continue;
        status = transfer(program, actions[i], true);
        if (status == ML_OK) status = action_run(program, actions[i]);
    }
    ml_free(actions);
    return status == ML_OK ? retry_check_flags(program, INT64_MAX) : status;
}

/* Nothing is in flight: what a device prepares for its later runs (CUDA graphs) is prepared now,
 * for all slots. */
static ml_status tasks_ready(ml_program *program, int microbatch) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_device *device = program->session->device;
    ml_status status = ML_OK;
    for (int v = 0; v < plan->count && status == ML_OK; v++)
        if (mine(program, v))
            status = messages_wait_sent(program, v, slot_at(program, v, microbatch));
    if (status == ML_OK) status = device->ops->wait(device);
    for (int v = 0; v < plan->count && device->ops->ready != NULL; v++) {
        int count = mine(program, v) ? executable_count(program, v) : 0;
        for (int i = 0; i < count && status == ML_OK; i++)
            status = device->ops->ready(program->pipeline->stages[v].executables[i]);
    }
    return status;
}

/* Every program of a step of mixed microbatches is prepared, and its tasks have their addresses. */
static ml_status members_bind(ml_program *program) {
    ml_status status = ML_OK;
    for (int m = 0; m < plan_of(program)->microbatches && status == ML_OK; m++) {
        ml_program *member = program_at(program, m);
        if (member != program) status = program_prepare(member);
        if (status == ML_OK) status = tasks_bind(member);
    }
    return status;
}

/* The number of microbatches of this step that run alone, before the others. The first one of fresh
 * executables does, and of mixed microbatches all: a GPU loads kernels and builds graphs for the
 * first runs, and that may wait for all work in progress there, such as a message whose receiver
 * waits for this rank. All do while products are measured alone. All ranks decide the same. */
static ml_status microbatches_alone(ml_program *program, int *alone) {
    struct pipeline_run *run = program->pipeline;
    int64_t ready = 1;
    bool mixed = program->plan->roots.mixed;
    ml_status status = ML_OK;
    for (int m = 0; m < plan_of(program)->microbatches; m++)
        ready &= !program_at(program, m)->pipeline->fresh;
    if (program->session->comm != NULL) status = ml_comm_least(program->session->comm, &ready);
    if (!mixed) run->fresh = !ready;
    *alone = ready ? 0 : 1;
    if ((!ready && mixed) || ml_profile_mode(program->session->device->profile) == ML_RUN_ALONE)
        *alone = plan_of(program)->microbatches;
    return status;
}

/* From action `at` on, the first one of those that are not left out, or NULL. */
static const ml_action *action_from(const struct ml_pipeline_plan *plan, int at, int without) {
    const ml_action *actions = plan->schedule.actions[plan->coordinate];
    for (; at < plan->schedule.action_count[plan->coordinate]; at++)
        if (actions[at].microbatch >= without) return &actions[at];
    return NULL;
}

/* The actions of the schedule, except those of the first `without` microbatches. Where it costs
 * nothing, a message is expected while the task before its task runs (pipeline/slots.c relies on no
 * earlier action); else only when its task is next, since a receive that waits on a GPU occupies
 * multiprocessors which concurrent products could use. By then it is in NCCL's buffers on this GPU.
 */
static ml_status schedule_run(ml_program *program, int without) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    const ml_action *actions = plan->schedule.actions[plan->coordinate];
    const ml_action *action = action_from(plan, 0, without), *next;
    ml_status status = task_foresee(program, action);
    for (; action != NULL && status == ML_OK; action = next) {
        ml_program *member = program_at(program, action->microbatch);
        next = action_from(plan, (int)(action - actions) + 1, without);
        status = retry_check_flags(program, action->start);
        if (status == ML_OK) status = task_prepare(member, action);
        if (status == ML_OK) status = transfer(member, action, true);
        if (status == ML_OK) status = task_foresee(program, next);
        if (status == ML_OK) status = action_run(member, action);
        if (status == ML_OK) status = transfer(member, action, false);
    }
    return status == ML_OK ? retry_check_flags(program, INT64_MAX) : status;
}

ml_status pipeline_step(ml_program *program) {
    bubble_clock *clock = &program->pipeline->clock;
    int alone = 0;
    ml_status status = members_bind(program);
    if (status == ML_OK) status = retry_begin(program);
    if (status == ML_OK) status = once_run(program);
    if (status == ML_OK) status = microbatches_alone(program, &alone);
    clock->step = 0;
    if (status == ML_OK && alone == 0) status = bubble_step_begin(program, clock);
    for (int i = 0; i < alone && status == ML_OK; i++) {
        ml_program *member = program_at(program, i);
        status = microbatch_run(program, i);
        if (status != ML_OK || !member->pipeline->fresh || !step_is_valid(program)) continue;
        status = tasks_ready(member, i);
        member->pipeline->fresh = status != ML_OK;
    }
    if (status == ML_OK) status = schedule_run(program, alone);
    return bubble_step_end(program, clock, status);
}

static double pipeline_bubble(const ml_program *program, double *forecast) {
    const bubble_clock *clock = program->pipeline != NULL ? &program->pipeline->clock : NULL;
    *forecast = clock != NULL ? clock->forecast : 0;
    return clock != NULL ? clock->share : -1;
}

static ml_status pipeline_start(ml_program *program, const void *const *inputs) {
    ml_program *lead = program->pipeline->lead, *done;
    struct pipeline_run *run = lead->pipeline;
    char *feed = program->pipeline->feeds + run->queued * program->pipeline->feed_bytes;
    ml_status status = program_settle_others(program->session, program);
    if (status == ML_OK) status = program_settle(program, &done); /* of steps: the one before */
    if (status == ML_OK) status = program_prepare(program);
    for (int i = 0; i < program->input_count && status == ML_OK; i++) {
        const ml_graph *g = program->session->graph;
        status =
            session_cut(program->session, program->plan->layout,
                        &ml_graph_input(g, program->input_ids[i])->type, &program->input_places[i],
                        inputs[i], feed + program->input_offsets[i]);
    }
    run->of[run->queued] = program;
    bool complete = status != ML_OK || ++run->queued == plan_of(lead)->microbatches;
    if (complete) run->queued = 0; /* after an error, a new step begins */
    if (!complete || status != ML_OK) return status;
    program->done = NULL;
    program->unsettled = program->may_overflow;
    if (program->unsettled) program->session->pending = program;
    return program_execute(retry_at_once(program) ? program->retry : lead);
}

typedef struct {
    ml_plan *plan;
    int microbatches;
} microbatches_call;

static void microbatches_body(void *context) {
    const microbatches_call *call = context;
    pipeline_set_microbatches(call->plan, call->microbatches);
}

static ml_status pipeline_microbatches(ml_program *program, int microbatches) {
    ml_program *lead = program->pipeline->lead;
    microbatches_call call = {lead->plan, microbatches};
    lead->pipeline->queued = 0;
    return ml_protect(microbatches_body, &call);
}

static void pipeline_unbind(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    program->pipeline->fresh = true;
    for (int v = 0; v < plan->count; v++) {
        const pipeline_stage *stage = &plan->stages[v];
        if (!stage->planned) continue;
        memset(program->pipeline->stages[v].bound, 0, (size_t)executable_count(program, v));
    }
}

/* An output of the last microbatch, from the stage of this rank that has it. */
static ml_status output_download(const ml_program *program, int output, void *to) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_device *device = program->session->device;
    for (int v = plan->coordinate; v < plan->count; v += plan->ranks) {
        int saved = plan->stages[v].outputs[output];
        if (saved < 0) continue;
        return device->ops->download(device, to,
                                     saved_address(program, v, plan->microbatches - 1, saved),
                                     plan->stages[v].tasks.saved[saved].bytes);
    }
    return ML_OK;
}

static ml_status pipeline_finish(ml_program *program, void *const *outputs) {
    ml_program *lead = program->pipeline->lead;
    int queued = lead->pipeline->queued;
    if (queued > 0) {
        const char *name = program->plan->roots.name;
        lead->pipeline->queued = 0;
        ml_fail(ML_INVALID, "program \"%s\" was started %d times; a step has %d microbatches",
                name != NULL ? name : "", queued, plan_of(lead)->microbatches);
        return ml_help("call start once for each microbatch, then finish");
    }
    ml_program *done;
    ml_status status = program_settle(program, &done);
    for (int i = 0; i < program->plan->roots.output_count && status == ML_OK; i++) {
        if (outputs != NULL && outputs[i] != NULL) status = output_download(done, i, outputs[i]);
    }
    return status;
}

const staged_program_ops staged_programs = {
    .load = pipeline_load,
    .connect = pipeline_connect,
    .unload = pipeline_unload,
    .unbind = pipeline_unbind,
    .start = pipeline_start,
    .finish = pipeline_finish,
    .microbatches = pipeline_microbatches,
    .step = pipeline_step,
    .assign_state = ml_stage_assign_state,
    .bubble = pipeline_bubble,
    .buffers_reserve = pipeline_buffers_reserve,
    .overflow_agree = pipeline_overflow_agree,
    .plans_alike = pipeline_plans_alike,
    .overflow = pipeline_overflow,
};
