/* What a pipeline needs before its first step: memory for saved values, channels, executables of
 * its tasks. */
#include "runtime/exec/pipeline/run.h"
#include "runtime/plan/arena_offsets.h"

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
    ml_session *session = program->session;
    const ml_layout *layout = session->ranks.layout; /* that of groups has fewer ranks */
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
ml_status pipeline_connect(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_status status = ML_OK;
    if (!program->pipeline->own_channels) return ML_OK;
    for (int i = 0; i < plan->channel_count && status == ML_OK; i++) {
        if (!plan->channels[i].local) status = channel_open(program, i);
    }
    return status;
}

/* Programs of one lead have other addresses from now on. */
static void members_unbind(const ml_program *lead) {
    for (ml_program *p = lead->session->programs; p != NULL; p = p->next)
        if (p->pipeline != NULL && p->pipeline->lead == lead) p->bound = false;
}

/* Every stage has its part of the lead's memory, whose slots are as large as the largest program
 * needs them. */
static ml_status buffers_load(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    ml_program *lead = program->pipeline->lead;
    ml_program *memory = lead->owner != NULL ? lead->owner : lead;
    const void *before = memory->microbatch_buffers;
    int64_t bytes = 0, previous = memory->buffer_bytes;
    char *host = program->host;
    for (int v = 0; v < plan->count; v++) {
        if (!mine(program, v)) continue;
        const task_set *tasks = &plan->stages[v].tasks;
        stage_run *stage = &lead->pipeline->stages[v];
        if (stage->stride < tasks->buffer_bytes) stage->stride = tasks->buffer_bytes;
        stage->offset = bytes;
        bytes += slots_of(program, v) * stage->stride + tasks->once_bytes;
        program->pipeline->stages[v].host = host;
        if (host != NULL) host += plan->stages[v].slots * plan->stages[v].host_bytes;
    }
    ml_status status = pipeline_buffers_reserve(memory, bytes);
    if (before != NULL && memory->buffer_bytes != previous) members_unbind(lead);
    return status;
}

static ml_status stage_load(ml_program *program, int v) {
    const pipeline_stage *plan = &plan_of(program)->stages[v];
    stage_run *stage = &program->pipeline->stages[v];
    ml_device *device = program->session->device;
    int by_slot = (program->pipeline->rebinds ? 1 : slots_of(program, v)) * plan->tasks.count;
    int count = stage->executable_count = by_slot + plan->tasks.once_per_step;
    ml_status status = ML_OK;
    stage->executables = ml_alloc(sizeof *stage->executables * (size_t)(count + 1));
    stage->bound = ml_alloc((size_t)count + 1);
    stage->user = ml_alloc(sizeof(ml_program *) * (size_t)(slots_of(program, v) + 1));
    if (stage->executables == NULL || stage->bound == NULL || stage->user == NULL)
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

/* A program that joins a lead's steps has the same tasks and sends the same values. */
static ml_status members_alike(const ml_program *lead, const ml_program *program) {
    const struct ml_pipeline_plan *a = plan_of(lead), *b = plan_of(program);
    bool alike = a->task_count == b->task_count && a->channel_count == b->channel_count &&
                 a->message_count == b->message_count && a->count == b->count;
    for (int i = 0; i < a->task_count && alike; i++) alike = a->tasks[i].stage == b->tasks[i].stage;
    for (int i = 0; i < a->channel_count && alike; i++)
        alike = a->channels[i].from_task == b->channels[i].from_task &&
                a->channels[i].to_task == b->channels[i].to_task;
    for (int i = 0; i < a->message_count && alike; i++)
        alike = a->messages[i].channel == b->messages[i].channel;
    for (int v = 0; v < a->count && alike; v++) /* host memory has the program's own slots */
        alike = (b->stages[v].slots >= a->stages[v].slots || b->stages[v].host_bytes == 0) &&
                b->stages[v].tasks.once_bytes == a->stages[v].tasks.once_bytes;
    if (alike) return ML_OK;
    return ml_fail(ML_INTERNAL, "programs of mixed microbatches differ in their stages");
}

/* Whose channels carry the program's messages: its owner's, or its lead's where they are not too
 * small for them, or its own. */
static const ml_program *channels_of(const ml_program *program, const ml_program *lead) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    if (program->owner != NULL) return program->owner;
    for (int i = 0; i < plan->channel_count; i++)
        if (plan->channels[i].bytes > plan_of(lead)->channels[i].bytes) return program;
    return lead;
}

ml_status pipeline_load(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    struct pipeline_run *run = program->pipeline = ml_alloc(sizeof *run);
    if (run == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a program");
    run->clock.share = -1;
    run->rebinds = program->session->device->target.kind == ML_TARGET_C;
    run->lead = program->lead != NULL ? program->lead : program;
    run->stages = ml_alloc(sizeof *run->stages * (size_t)(plan->count + 1));
    run->of = ml_alloc(sizeof(ml_program *) * (size_t)(plan->microbatches + 1));
    ml_status status = run->lead != program ? members_alike(run->lead, program) : ML_OK;
    if (status != ML_OK) return status;
    const ml_program *channels = channels_of(program, run->lead);
    run->own_channels = channels == program;
    if (!run->own_channels) {
        run->comm_channels = channels->pipeline->comm_channels;
        run->patient = channels->pipeline->patient;
    } else {
        run->comm_channels = ml_alloc(sizeof(ml_channel *) * (size_t)(plan->channel_count + 1));
    }
    if (run->stages == NULL || run->comm_channels == NULL || run->of == NULL)
        return ml_fail(ML_NO_MEMORY, "out of memory for a program");
    for (int m = 0; m < plan->microbatches; m++) run->of[m] = program;
    status = feeds_make(program);
    if (status == ML_OK) status = messages_list(program);
    if (status == ML_OK) status = buffers_load(program);
    for (int v = 0; v < plan->count && status == ML_OK; v++) {
        if (mine(program, v)) status = stage_load(program, v);
    }
    return status == ML_OK ? retry_load(program) : status;
}

/* No slot of a lead waits for what this program sent. */
static void users_forget(const ml_program *program) {
    for (ml_program *p = program->session->programs; p != NULL; p = p->next)
        for (int v = 0; p->pipeline != NULL && p->pipeline->lead == p && v < plan_of(p)->count;
             v++) {
            ml_program **user = p->pipeline->stages ? p->pipeline->stages[v].user : NULL;
            for (int i = 0; user != NULL && i < plan_of(p)->stages[v].slots; i++)
                if (user[i] == program) user[i] = NULL;
        }
}

void pipeline_unload(ml_program *program) {
    struct pipeline_run *run = program->pipeline;
    ml_device *device = program->session->device;
    if (run == NULL) return;
    device->ops->wait(device);
    users_forget(program);
    for (int v = 0; v < plan_of(program)->count && run->stages != NULL; v++) {
        stage_run *stage = &run->stages[v];
        int count = executable_count(program, v);
        for (int i = 0; i < count && stage->executables != NULL; i++) {
            if (stage->executables[i] != NULL) device->ops->unload(stage->executables[i]);
        }
        ml_free(stage->executables);
        ml_free(stage->bound);
        ml_free(stage->user);
    }
    retry_unload(program);
    ml_free(run->stages);
    ml_free(run->of);
    if (run->own_channels) ml_free(run->comm_channels);
    if (program->owner == NULL) ml_free(run->feeds);
    ml_free(run->messages);
    ml_free(run);
    program->pipeline = NULL;
}
