/* Running a pipeline: the inputs of a step's microbatches are collected, then every rank runs its
 * actions in the order of the schedule. */
#include <stdlib.h>
#include <string.h>

#include "runtime/exec/pipeline/run.h"
#include "runtime/plan/arena_offsets.h"

char *saved_address(const ml_program *program, int stage, int microbatch, int saved) {
    const pipeline_stage *s = &plan_of(program)->stages[stage];
    const saved_value *at = &s->tasks.saved[saved];
    int slot = at->from == SAVED_ONCE_PER_STEP ? s->slots : s->slot_of[microbatch];
    return program->pipeline->stages[stage].buffers + slot * s->tasks.buffer_bytes + at->offset;
}

static int executable_count(const ml_program *program, int stage) {
    const pipeline_stage *s = &plan_of(program)->stages[stage];
    return (program->pipeline->rebinds ? 1 : s->slots) * s->tasks.count + s->tasks.once_per_step;
}

/* ---- loading ---- */
/* Bytes of a channel's messages, each at any alignment. */
static int64_t channel_room(const struct ml_pipeline_plan *plan, int channel) {
    int64_t bytes = ARENA_ALIGNMENT;
    for (int i = 0; i < plan->message_count; i++)
        if (plan->messages[i].channel == channel)
            bytes += plan->messages[i].bytes + ARENA_ALIGNMENT;
    return bytes;
}

/* Channel `i` of the plan as channels of comm between all ranks that differ along the stages' mesh
 * axis alone: all ranks together create each of them, in this order. */
static ml_status channel_open(ml_program *program, int i) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    int64_t ahead = plan->schedule.in_flight[i] > 0 ? plan->schedule.in_flight[i] : 1;
    int64_t most = channel_room(plan, i), room = ahead * most;
    const ml_layout *layout = program->plan->layout;
    ml_session *session = program->session;
    int axis = layout->stages.mesh_axis, tag = session->channel_tags++, step = 1;
    int from = plan->channels[i].from % plan->ranks, to = plan->channels[i].to % plan->ranks;
    ml_status status = ML_OK;
    for (int k = axis + 1; k < layout->count; k++) step *= (int)layout->axis[k].size;
    for (int rank = 0; rank < ml_comm_world(session->comm) && status == ML_OK; rank++) {
        if (ml_layout_coordinate(layout, rank, axis) != 0) continue;
        ml_channel *channel = NULL;
        status = ml_comm_channel(session->comm, rank + from * step, rank + to * step, tag, room,
                                 &channel);
        if (channel != NULL) program->pipeline->comm_channels[i] = channel;
    }
    const ml_device_ops *ops = session->device->ops;
    ml_channel *channel = program->pipeline->comm_channels[i];
    if (status == ML_OK && ops->connect != NULL)
        status = ops->connect(session->device, channel, most);
    if (status == ML_OK && channel != NULL && ops->patient != NULL)
        program->pipeline->patient |= ops->patient(session->device, channel);
    return status;
}

/* Each channel of the plan has one of comm with room for the messages that are in flight on it at
 * once. */
static ml_status pipeline_connect(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_status status = ML_OK;
    if (program->owner != NULL) return ML_OK; /* it uses its owner's */
    for (int i = 0; i < plan->channel_count && status == ML_OK; i++) {
        if (!plan->channels[i].local) status = channel_open(program, i);
    }
    return status;
}

static int64_t stage_bytes(const pipeline_stage *plan) {
    return plan->slots * plan->tasks.buffer_bytes + plan->tasks.once_bytes;
}

/* Every stage has its part of the program's memory. */
static ml_status buffers_load(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_program *owner = program->owner != NULL ? program->owner : program;
    ml_status status = pipeline_buffers_reserve(owner, program->plan->buffer_bytes);
    char *buffers = owner->microbatch_buffers, *host = program->host;
    for (int v = 0; v < plan->count && status == ML_OK; v++) {
        if (!mine(program, v)) continue;
        program->pipeline->stages[v].buffers = buffers;
        program->pipeline->stages[v].host = host;
        buffers += stage_bytes(&plan->stages[v]);
        if (host != NULL) host += plan->stages[v].slots * plan->stages[v].host_bytes;
    }
    return status;
}

static ml_status stage_load(ml_program *program, int v) {
    const pipeline_stage *plan = &plan_of(program)->stages[v];
    stage_run *stage = &program->pipeline->stages[v];
    ml_device *device = program->session->device;
    int count = executable_count(program, v), by_slot = count - plan->tasks.once_per_step;
    ml_status status = ML_OK;
    stage->executables = ml_alloc(sizeof *stage->executables * (size_t)(count + 1));
    stage->bound = ml_alloc((size_t)count + 1);
    if (stage->executables == NULL || stage->bound == NULL)
        return ml_fail(ML_NO_MEMORY, "out of memory for a pipeline stage");
    for (int i = 0; i < count && status == ML_OK; i++) {
        const ml_plan *part = plan->plans[i < by_slot ? i % plan->tasks.count : plan->tasks.count];
        status = device->ops->load(device, part, &stage->executables[i]);
    }
    return status;
}

static ml_status messages_list(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    struct pipeline_run *run = program->pipeline;
    run->messages = ml_alloc(sizeof(int) * (size_t)(plan->message_count + 1));
    if (run->messages == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a program");
    for (int i = 0; i < plan->message_count; i++) {
        const pipeline_channel *channel = &plan->channels[plan->messages[i].channel];
        if (mine(program, channel->from) || mine(program, channel->to))
            run->messages[run->message_count++] = i;
    }
    return ML_OK;
}

/* The inputs that this rank's stages read, and their offsets in a microbatch's feed. */
static ml_status feeds_make(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    struct pipeline_run *run = program->pipeline;
    if (program->owner != NULL) {
        run->feeds = program->owner->pipeline->feeds;
        run->feed_bytes = program->owner->pipeline->feed_bytes;
        return retry_inputs(program);
    }
    for (int i = 0; i < program->input_count; i++) {
        program->input_offsets[i] = run->feed_bytes;
        run->feed_bytes += program->input_bytes[i];
    }
    run->feeds = ml_alloc((size_t)(run->feed_bytes * plan->microbatches) + 1);
    return run->feeds != NULL ? ML_OK : ml_fail(ML_NO_MEMORY, "out of memory for inputs");
}

static ml_status pipeline_load(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    struct pipeline_run *run = program->pipeline = ml_alloc(sizeof *run);
    if (run == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a program");
    run->clock.share = -1;
    run->rebinds = program->session->device->target.kind == ML_TARGET_C;
    run->stages = ml_alloc(sizeof *run->stages * (size_t)(plan->count + 1));
    if (program->owner != NULL) {
        run->comm_channels = program->owner->pipeline->comm_channels;
        run->patient = program->owner->pipeline->patient;
    } else {
        run->comm_channels = ml_alloc(sizeof(ml_channel *) * (size_t)(plan->channel_count + 1));
    }
    if (run->stages == NULL || run->comm_channels == NULL)
        return ml_fail(ML_NO_MEMORY, "out of memory for a program");
    ml_status status = feeds_make(program);
    if (status == ML_OK) status = messages_list(program);
    if (status == ML_OK) status = buffers_load(program);
    for (int v = 0; v < plan->count && status == ML_OK; v++) {
        if (mine(program, v)) status = stage_load(program, v);
    }
    return status == ML_OK ? retry_load(program) : status;
}

static void pipeline_unload(ml_program *program) {
    struct pipeline_run *run = program->pipeline;
    ml_device *device = program->session->device;
    if (run == NULL) return;
    device->ops->wait(device);
    for (int v = 0; v < plan_of(program)->count && run->stages != NULL; v++) {
        stage_run *stage = &run->stages[v];
        int count = executable_count(program, v);
        for (int i = 0; i < count && stage->executables != NULL; i++) {
            if (stage->executables[i] != NULL) device->ops->unload(stage->executables[i]);
        }
        ml_free(stage->executables);
        ml_free(stage->bound);
    }
    retry_unload(program);
    ml_free(run->stages);
    if (program->owner == NULL) {
        ml_free(run->comm_channels);
        ml_free(run->feeds);
    }
    ml_free(run->messages);
    ml_free(run);
    program->pipeline = NULL;
}

/* ---- running ---- */
static void *storage_address(const ml_program *program, int v, int p, int microbatch,
                             const ml_storage *storage) {
    const pipeline_stage *stage = &plan_of(program)->stages[v];
    const task_set *tasks = &stage->tasks;
    int saved = 0;
    switch (storage->kind) {
    case ML_STORAGE_INPUT:
        while (tasks->saved[saved].input != storage->id) saved++;
        return saved_address(program, v, microbatch, saved);
    case ML_STORAGE_SAVED:
        return saved_address(program, v, microbatch, tasks->tasks[p].exports[storage->id]);
    case ML_STORAGE_HOST:
        return program->pipeline->stages[v].host + stage->slot_of[microbatch] * stage->host_bytes +
               storage->offset;
    default: return program_address(program, storage);
    }
}

/* Of a task's executables, the one of the microbatch's slot. */
static int executable_of(const ml_program *program, int v, int p, int microbatch) {
    const pipeline_stage *plan = &plan_of(program)->stages[v];
    if (p == plan->tasks.count) return executable_count(program, v) - 1;
    return p + (program->pipeline->rebinds ? 0 : plan->slot_of[microbatch] * plan->tasks.count);
}

static ml_status task_bind(ml_program *program, int v, int p, int microbatch) {
    const ml_schedule *s = plan_of(program)->stages[v].plans[p]->schedule;
    stage_run *stage = &program->pipeline->stages[v];
    int at = executable_of(program, v, p, microbatch);
    if (stage->bound[at] && !program->pipeline->rebinds) return ML_OK;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        program->addresses[i] = storage_address(program, v, p, microbatch, &s->storages.at[i]);
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
        for (int m = 0; m < plan->microbatches && mine(program, v); m++) {
            for (int p = 0; p < plan->stages[v].plan_count && status == ML_OK; p++)
                status = task_bind(program, v, p, m);
        }
    }
    return status;
}

static ml_status task_run(ml_program *program, int v, int p, int microbatch) {
    ml_executable **executables = program->pipeline->stages[v].executables;
    ML_TRY(program->pipeline->rebinds ? task_bind(program, v, p, microbatch) : ML_OK);
    return program->session->device->ops->run(
        executables[executable_of(program, v, p, microbatch)]);
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

/* After this, all messages that were sent from the microbatch's buffer have arrived. */
static ml_status messages_wait_sent(ml_program *program, int v, int microbatch) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_device *device = program->session->device;
    ml_status status = ML_OK;
    for (int i = 0; i < program->pipeline->message_count && status == ML_OK; i++) {
        const pipeline_message *m = &plan->messages[program->pipeline->messages[i]];
        if (plan->channels[m->channel].from != v || plan->channels[m->channel].local) continue;
        status = device->ops->wait_sent(device, program->pipeline->comm_channels[m->channel],
                                        saved_address(program, v, microbatch, m->saved_from));
    }
    return status;
}

/* A slot is reused: messages that were sent from it must have arrived, then the inputs are copied.
 */
static ml_status slot_begin(ml_program *program, int v, int microbatch) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    const task_set *tasks = &plan->stages[v].tasks;
    ml_device *device = program->session->device;
    ml_status status = messages_wait_sent(program, v, microbatch);
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
    double begin = profile != NULL ? ml_profile_now() : 0;
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
        if (mine(program, v)) status = messages_wait_sent(program, v, microbatch);
    if (status == ML_OK) status = device->ops->wait(device);
    for (int v = 0; v < plan->count && device->ops->ready != NULL; v++) {
        int count = mine(program, v) ? executable_count(program, v) : 0;
        for (int i = 0; i < count && status == ML_OK; i++)
            status = device->ops->ready(program->pipeline->stages[v].executables[i]);
    }
    return status;
}

/* The number of microbatches of this step that run alone, before the others. The first one of fresh
 * executables does: a GPU loads kernels and builds graphs for the first runs, and that may wait for
 * all work in progress there, such as a message whose receiver waits for this rank. All do while
 * products are measured alone. All ranks decide the same. */
static ml_status microbatches_alone(ml_program *program, int *alone) {
    struct pipeline_run *run = program->pipeline;
    int64_t ready = !run->fresh;
    ml_status status = ML_OK;
    if (program->session->comm != NULL) status = ml_comm_least(program->session->comm, &ready);
    run->fresh = !ready;
    *alone = ready ? 0 : 1;
    if (ml_profile_mode(program->session->device->profile) == ML_RUN_ALONE)
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
        next = action_from(plan, (int)(action - actions) + 1, without);
        status = retry_check_flags(program, action->start);
        if (status == ML_OK) status = task_prepare(program, action);
        if (status == ML_OK) status = transfer(program, action, true);
        if (status == ML_OK) status = task_foresee(program, next);
        if (status == ML_OK) status = action_run(program, action);
        if (status == ML_OK) status = transfer(program, action, false);
    }
    return status == ML_OK ? retry_check_flags(program, INT64_MAX) : status;
}

ml_status pipeline_step(ml_program *program) {
    bubble_clock *clock = &program->pipeline->clock;
    int alone = 0;
    ml_status status = tasks_bind(program);
    if (status == ML_OK) status = retry_begin(program);
    if (status == ML_OK) status = once_run(program);
    if (status == ML_OK) status = microbatches_alone(program, &alone);
    clock->step = 0;
    if (status == ML_OK && alone == 0) status = bubble_step_begin(program, clock);
    for (int i = 0; i < alone && status == ML_OK; i++) {
        status = microbatch_run(program, i);
        if (status != ML_OK || !program->pipeline->fresh || !step_is_valid(program)) continue;
        status = tasks_ready(program, i);
        program->pipeline->fresh = status != ML_OK;
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
    struct pipeline_run *run = program->pipeline;
    char *feed = run->feeds + (int64_t)run->queued * run->feed_bytes;
    ml_program *done;
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
    bool complete = status != ML_OK || ++run->queued == plan_of(program)->microbatches;
    if (complete) run->queued = 0; /* after an error, a new step begins */
    if (!complete || status != ML_OK) return status;
    program->done = NULL;
    program->unsettled = program->may_overflow;
    if (program->unsettled) program->session->pending = program;
    return program_execute(retry_at_once(program) ? program->retry : program);
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
    int queued = program->pipeline->queued;
    if (queued > 0) {
        const char *name = program->plan->roots.name;
        program->pipeline->queued = 0;
        ml_fail(ML_INVALID, "program \"%s\" was started %d times; a step has %d microbatches",
                name != NULL ? name : "", queued, plan_of(program)->microbatches);
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
    .step = pipeline_step,
    .assign_state = ml_stage_assign_state,
    .bubble = pipeline_bubble,
    .buffers_reserve = pipeline_buffers_reserve,
    .overflow_agree = pipeline_overflow_agree,
    .plans_alike = pipeline_plans_alike,
    .overflow = pipeline_overflow,
};
