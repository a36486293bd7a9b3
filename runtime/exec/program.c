/* Programs: plans made ready to run, with the addresses of all that they touch. */
#include "runtime/exec/program.h"
#include "runtime/base/machine.h"

#include <stdio.h>
#include <string.h>

#include "runtime/exec/session.h"
#include "runtime/pipeline/plan.h"
#include "runtime/plan/arena_offsets.h"

/* ---- making ---- */
/* Inputs of the program, and not what stages receive or keep. */
static bool input_fed(const ml_plan *plan, uint32_t id) {
    const struct ml_pipeline_plan *pipeline = plan->pipeline;
    return pipeline == NULL || id < pipeline->script_inputs;
}

static void inputs_find(ml_program *program) {
    ml_plan *plan = program->plan;
    uint32_t known = ml_graph_input_count(plan->graph), storages = 0;
    bool *used = ML_NEW_ARRAY(plan->arena, bool, (size_t)known + 1);
    program->input_ids = ML_NEW_ARRAY(plan->arena, uint32_t, (size_t)known + 1);
    program->input_offsets = ML_NEW_ARRAY(plan->arena, int64_t, (size_t)known + 1);
    program->input_bytes = ML_NEW_ARRAY(plan->arena, int64_t, (size_t)known + 1);
    program->input_places = ML_NEW_ARRAY(plan->arena, ml_placements, (size_t)known + 1);
    for (int p = 0; p < plan->part_count; p++) {
        const ml_schedule *s = plan->parts[p]->schedule;
        if (s->storages.count > storages) storages = s->storages.count;
        for (uint32_t i = 0; i < s->storages.count; i++) {
            const ml_storage *storage = &s->storages.at[i];
            if (storage->kind == ML_STORAGE_INPUT && input_fed(plan, storage->id))
                used[storage->id] = true;
        }
    }
    int rebuilds = 0;
    for (const ml_plan *r = plan->rebuild; r != NULL; r = r->next, rebuilds++)
        if (r->schedule->storages.count > storages) storages = r->schedule->storages.count;
    program->rebuilds = ML_NEW_ARRAY(plan->arena, ml_executable *, (size_t)rebuilds + 1);
    program->addresses = ML_NEW_ARRAY(plan->arena, void *, (size_t)storages + 1);
    for (uint32_t id = 0; id < known; id++) {
        if (!used[id]) continue;
        const ml_graph *global = program->session->graph;
        const ml_layout *layout = plan->layout;
        ml_type local = ml_plan_input_type(layout, global, id);
        program->input_bytes[program->input_count] = ml_type_bytes(&local);
        if (layout != NULL) {
            program->input_places[program->input_count] = ml_plan_input_places(layout, global, id);
        }
        program->input_ids[program->input_count++] = id;
    }
}

static void inputs_body(void *context) {
    inputs_find(context);
}

/* Each transfer of a few bytes takes as long as one of all, and a device takes but a few transfers
 * ahead of the runs that they wait for. */
static ml_status inputs_gather(ml_program *program) {
    enum { SMALL = 1 << 20 };
    const ml_plan *plan = program->plan;
    if (plan->pipeline != NULL || program->input_count < 2 || program->coordinates > SMALL)
        return ML_OK;
    program->together = ml_alloc((size_t)program->coordinates + 1);
    if (program->together == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for inputs");
    memset(program->together, 0, (size_t)program->coordinates);
    return ML_OK;
}

static ml_status inputs_allocate(ml_program *program) {
    const ml_layout *layout = program->plan->layout;
    int64_t bytes = 0, largest = 0;
    for (int i = 0; i < program->input_count && program->plan->pipeline == NULL; i++) {
        program->input_offsets[i] = bytes;
        bytes += memory_padded(program->input_bytes[i]);
    }
    for (int i = 0; i < program->input_count; i++) {
        if (program->input_bytes[i] > largest) largest = program->input_bytes[i];
    }
    program->coordinates = bytes;
    if (layout != NULL) {
        bytes += ARENA_ALIGNMENT * (int64_t)layout->count;
        program->part = ml_alloc((size_t)largest + 1);
        if (program->part == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for inputs");
    }
    if (program->input_count == 0 && layout == NULL) return ML_OK;
    ML_TRY(inputs_gather(program));
    ml_device *device = program->session->device;
    ml_status status = device->ops->allocate(device, bytes > 0 ? bytes : 1, &program->inputs);
    for (int i = 0; layout != NULL && i < layout->count && status == ML_OK; i++) {
        int64_t rank = session_rank_under(program->session, layout);
        int32_t at = (int32_t)ml_layout_coordinate(layout, rank, i);
        char *to = (char *)program->inputs + program->coordinates + ARENA_ALIGNMENT * (int64_t)i;
        status = device->ops->upload(device, to, &at, sizeof at);
    }
    return status;
}

typedef struct {
    const ml_program *program;
    int64_t extra;
} require_call;

static void require_body(void *context) {
    const require_call *call = context;
    const ml_session *session = call->program->session;
    const ml_device *device = session->device;
    const int64_t bytes = device->target.memory_bytes, budget = session->memory_budget;
    const int64_t whole = device->total_bytes > 0 ? device->total_bytes : bytes;
    const ml_plan_limit limit = {bytes, device->description, budget <= whole ? budget : 0,
                                 budget - bytes};
    ml_plan_require(call->program->plan, call->extra, &limit);
}

typedef struct {
    ml_program *program;
    ml_arena *arena;
    ML_VEC(uint32_t) ids;
} shared_call;

/* Sums of gradients, and cached parameters that are gathered in their own memory or by all ranks:
 * those that have no memory yet, each once. They last as long as the session, as other ranks have
 * them open, and do not release a program at the same time. */
static void shared_find(void *context) {
    shared_call *call = context;
    ml_session *session = call->program->session;
    bool *seen = ML_NEW_ARRAY(call->arena, bool, (size_t)session->state_count + 1);
    const ml_plan *part;
    for (int p = 0; (part = ml_plan_part(call->program->plan, p)) != NULL; p++) {
        const ml_schedule *s = part->schedule;
        for (uint32_t i = 0; i < s->storages.count; i++) {
            const uint32_t id = s->storages.at[i].id;
            if (s->storages.at[i].kind != ML_STORAGE_STATE || seen[id]) continue;
            const ml_state_kind kind = ml_graph_state(session->graph, id)->kind;
            const bool gathered =
                kind == ML_STATE_CACHE && (part->all_ranks || s->storages.at[i].part_of != 0);
            if (kind != ML_STATE_GRADIENT && !gathered) continue;
            seen[id] = true;
            session->states[id].together = true;
            if (session->states[id].memory == NULL) *ML_PUSH(call->arena, &call->ids) = id;
        }
    }
}

static ml_status shared_allocate(ml_program *program) {
    shared_call call = {program, ml_arena_new()};
    if (call.arena == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while making a program");
    ml_status status = ml_protect(shared_find, &call);
    if (status == ML_OK)
        status = session_allocate_together(program->session, call.ids.at, (int)call.ids.count);
    ml_arena_free(call.arena);
    return status;
}

static ml_status states_allocate(ml_program *program) {
    const ml_plan *plan = program->plan;
    const bool several = program->session->everyone != NULL && plan->pipeline == NULL;
    ml_status status = several ? shared_allocate(program) : ML_OK;
    const ml_plan *part;
    for (int p = 0; (part = ml_plan_part(program->plan, p)) != NULL; p++) {
        const ml_schedule *s = part->schedule;
        for (uint32_t i = 0; i < s->storages.count && status == ML_OK; i++) {
            if (s->storages.at[i].kind != ML_STORAGE_STATE) continue;
            status = session_allocate(program->session, s->storages.at[i].id);
        }
    }
    return status;
}

/* Whether all ranks make this program: under stages, those that initialize states are each rank's
 * own affair. */
static bool ranks_together(const ml_program *program) {
    const ml_session *session = program->session;
    if (session->everyone == NULL) return false;
    return program->plan->pipeline != NULL || !session->layout.stages.on;
}

/* Of the ranks that compile the same kernels, the first. */
static bool rank_leads(const ml_session *session) {
    const ml_layout *layout = &session->layout;
    if (session->everyone == NULL) return true;
    for (int i = 0; i < layout->count; i++) {
        if (layout->stages.on && layout->stages.mesh_axis == i) continue;
        if (ml_layout_coordinate(layout, session->ranks.rank, i) != 0) return false;
    }
    return true;
}

/* On a CPU one rank compiles, and the others find its kernels in the cache. On GPUs all do: they
 * deal the kernels (ml_jit_cuda_share). */
static bool ranks_take_turns(const ml_session *session) {
    return session->everyone != NULL && session->device->target.kind != ML_TARGET_CUDA;
}

/* Copies to and from it go on beside computation. */
static ml_status host_allocate(ml_program *program) {
    ml_device *device = program->session->device;
    int64_t bytes = program->plan->host_bytes;
    if (bytes == 0) return ML_OK;
    if (device->ops->pin != NULL) return device->ops->pin(device, bytes, &program->host);
    program->host = ml_alloc((size_t)bytes);
    return program->host != NULL ? ML_OK : ml_fail(ML_NO_MEMORY, "out of memory to offload values");
}

static void host_release(ml_program *program) {
    ml_device *device = program->session->device;
    if (program->host != NULL && device->ops->unpin != NULL)
        device->ops->unpin(device, program->host);
    else
        ml_free(program->host);
}

ml_status program_reserve(ml_program *program) {
    ml_session *session = program->session;
    ml_status status = ml_protect(inputs_body, program);
    if (status == ML_OK) status = session_grow(session);
    if (status != ML_OK) return status;
    if (program->plan->pipeline != NULL) session_release(session);
    ml_beside beside;
    ML_TRY(session_beside(session, program->plan, &beside));
    require_call call = {program, beside.bytes};
    ML_TRY(ml_protect(require_body, &call));
    program_hold_cache(program);
    status = states_allocate(program);
    if (status == ML_OK) status = host_allocate(program);
    return status == ML_OK ? session_reserve(session, ml_plan_arena(program->plan)) : status;
}

/* The plan's kernels, and those that rebuild its parameter cache. */
static ml_status executables_load(ml_program *program) {
    ml_device *device = program->session->device;
    const ml_plan *plan = program->plan;
    ml_executable **rebuild = program->rebuilds;
    ml_status status = device->ops->load(device, plan, &program->executable);
    for (const ml_plan *r = plan->rebuild; r != NULL && status == ML_OK; r = r->next)
        status = device->ops->load(device, r, rebuild++);
    return status;
}

static double bytes_sent(const ml_plan *plan) {
    double bytes = 0;
    for (int i = 0; plan->layout != NULL && i < plan->layout->count; i++)
        for (int k = 0; k < ML_COLLECTIVE_KINDS; k++) bytes += (double)plan->traffic[i][k].bytes;
    return bytes;
}

/* Seconds at most between two signs of progress of a rank that runs the program, on devices and
 * links that make a small part of what they should: a CPU gives a sign at each step, a GPU at each
 * run. */
static double longest_silence(const ml_program *program) {
    const ml_machine *gpu = &ml_machine_slowest_gpu, *cpu = &ml_machine_slowest_cpu;
    const ml_session *session = program->session;
    const ml_plan *plan = program->plan, *part;
    if (session->device->target.kind == ML_TARGET_CUDA)
        return plan->flops / gpu->product_flops +
               bytes_sent(plan) /
                   (beside_core.local(session->comm) ? gpu->link_bytes : gpu->network_bytes);
    double most = 0;
    for (int p = 0; (part = ml_plan_part(program->plan, p)) != NULL; p++) {
        const ml_schedule *s = part->schedule;
        for (uint32_t i = 0; i < s->steps.count; i++)
            if (s->steps.at[i].flops > most) most = s->steps.at[i].flops;
    }
    return most / cpu->product_flops;
}

ml_status program_compile(ml_program *program) {
    ml_session *session = program->session;
    ml_status status = ML_OK;
    bool together = ranks_together(program) && ranks_take_turns(session);
    bool first = rank_leads(session);
    if (!first && together) status = beside_core.barrier(session->comm);
    if (status != ML_OK) return status;
    if (session->everyone != NULL) {
        beside_core.expect(session->comm, longest_silence(program));
        beside_core.busy(session->comm, "compiling kernels");
    }
    if (program->plan->pipeline != NULL)
        status = staged_programs.load(program);
    else
        status = executables_load(program);
    if (status == ML_OK && first && together) status = beside_core.barrier(session->comm);
    if (status == ML_OK && program->plan->pipeline != NULL)
        status = staged_programs.connect(program);
    if (session->everyone != NULL) beside_core.done(session->comm);
    return status;
}

static ml_status program_load(ml_program *program) {
    ml_status status = program_reserve(program);
    if (status == ML_OK) status = inputs_allocate(program);
    if (status == ML_OK) status = retry_reserve(program);
    program->waits = program->session->together;
    return status == ML_OK && !program->waits ? program_compile(program) : status;
}

/* ---- several at once ---- */
typedef struct {
    ml_session *session;
    ml_arena *arena;
    ML_VEC(const ml_plan *) plans;
} waiting_plans;

static void plans_find(void *context) {
    waiting_plans *found = context;
    for (const ml_program *p = found->session->programs; p != NULL; p = p->next) {
        const ml_plan *part;
        for (int i = 0; p->waits && (part = ml_plan_part(p->plan, i)) != NULL; i++)
            *ML_PUSH(found->arena, &found->plans) = part;
    }
}

static ml_status plans_compile(ml_session *session, const waiting_plans *found) {
    const ml_device_ops *ops = session->device->ops;
    bool turns = ranks_take_turns(session), first = rank_leads(session);
    if (turns && !first) return beside_core.barrier(session->comm);
    if (session->everyone != NULL) beside_core.busy(session->comm, "compiling kernels");
    ml_status status = ops->compile(session->device, found->plans.at, (int)found->plans.count);
    if (session->everyone != NULL) beside_core.done(session->comm);
    return turns && status == ML_OK ? beside_core.barrier(session->comm) : status;
}

void ml_session_together(ml_session *session, bool on) {
    session->together = on;
}

ml_status ml_session_compile(ml_session *session) {
    waiting_plans found = {.session = session, .arena = ml_arena_new()};
    session->together = false;
    if (found.arena == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while making programs");
    ml_status status = ml_protect(plans_find, &found);
    if (status == ML_OK && found.plans.count > 0 && session->device->ops->compile != NULL)
        status = plans_compile(session, &found);
    ml_arena_free(found.arena);
    while (status == ML_OK) {
        ml_program *next = NULL; /* the one that was made first */
        for (ml_program *p = session->programs; p != NULL; p = p->next)
            if (p->waits) next = p;
        if (next == NULL) break;
        status = program_compile(next);
        next->waits = status != ML_OK;
    }
    return status;
}

/* Ranks whose plans differ report that before any of them waits for another. */
static ml_status program_agree(const ml_program *program) {
    const ml_session *session = program->session;
    if (!ranks_together(program)) return ML_OK;
    char what[128];
    const char *name = program->plan->roots.name;
    snprintf(what, sizeof what, "the plan of program \"%s\"", name != NULL ? name : "");
    return beside_core.agree(session->comm, program->plan->hash, what);
}

void program_enter(ml_session *session, ml_program *program) {
    program->session = session;
    program->next = session->programs;
    if (program->next != NULL) program->next->previous = program;
    session->programs = program;
}

/* What a program keeps because it runs often must fit beside what others hold; all ranks hold as
 * much. */
static ml_status keep_less(ml_program *program, const ml_roots *roots, const ml_layout *layout,
                           bool pipelined) {
    ml_session *session = program->session;
    int64_t limit = session->device->target.memory_bytes;
    if (program->plan->rebuild == NULL || limit <= 0) return ML_OK;
    ml_beside beside;
    ml_status status = session_beside(session, program->plan, &beside);
    if (status != ML_OK || program->plan->peak_bytes + beside.bytes <= limit) return status;
    ml_roots seldom = *roots;
    seldom.often = false;
    ml_plan_free(program->plan);
    program->plan = NULL;
    return session_plan(session, &seldom, layout, pipelined, &program->plan);
}

ml_status program_build(ml_session *session, const ml_roots *roots, const ml_layout *layout,
                        bool pipelined, ml_program **program) {
    *program = NULL;
    if (session->device == NULL) {
        ml_status status = ml_session_open(session, NULL, 0);
        if (status != ML_OK) return status;
    }
    ml_status ready = session_ready(session);
    if (ready == ML_OK) ready = session_connect(session);
    if (ready != ML_OK) return ready;
    ml_program *made = ml_alloc(sizeof *made);
    if (made == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while making a program");
    program_enter(session, made);
    made->lead = session->lead;
    ml_status status = session_plan(session, roots, layout, pipelined, &made->plan);
    if (status == ML_OK && roots->often) status = keep_less(made, roots, layout, pipelined);
    if (status == ML_OK) status = program_agree(made);
    if (status == ML_OK) status = retry_plan(made, roots);
    if (status == ML_OK && made->retry != NULL) status = program_agree(made); /* a smaller plan */
    if (status == ML_OK) status = program_load(made);
    if (status != ML_OK) {
        ml_program_free(made);
        return status;
    }
    *program = made;
    return ML_OK;
}

ml_status ml_program_new(ml_session *session, const ml_roots *roots, ml_program **program) {
    return program_build(session, roots, session_program_layout(session), true, program);
}

void ml_program_free(ml_program *program) {
    if (program == NULL) return;
    ml_session *session = program->session;
    ml_device *device = session->device;
    ml_program_free(program->retry);
    if (session->pending == program) session->pending = NULL;
    if (program->owner != NULL) program->owner->retry = NULL;
    if (program->previous != NULL)
        program->previous->next = program->next;
    else
        session->programs = program->next;
    if (program->next != NULL) program->next->previous = program->previous;
    ml_error kept = *ml_error_last(); /* freeing after a failure must not hide it */
    if (program->executable != NULL) {
        device->ops->wait(device);
        device->ops->unload(program->executable);
    }
    for (ml_executable **r = program->rebuilds; r != NULL && *r != NULL; r++)
        device->ops->unload(*r);
    program_release_cache(program);
    staged_programs.unload(program);
    bool owns = program->inputs != NULL && program->owner == NULL;
    if (owns) device->ops->release(device, program->inputs);
    host_release(program);
    if (program->microbatch_buffers != NULL)
        device->ops->release(device, program->microbatch_buffers);
    *ml_error_last() = kept;
    ml_plan_free(program->plan);
    ml_free(program->part);
    ml_free(program->together);
    ml_free(program);
}

const ml_plan *ml_program_plan(const ml_program *program) {
    return program->plan;
}

const ml_plan *ml_program_retry(const ml_program *program) {
    return program->retry != NULL ? program->retry->plan : NULL;
}

double ml_program_bubble(const ml_program *program, double *forecast) {
    return staged_programs.bubble(program, forecast);
}

int ml_program_inputs(const ml_program *program, uint32_t *ids) {
    for (int i = 0; i < program->input_count && ids != NULL; i++) ids[i] = program->input_ids[i];
    return program->input_count;
}

/* ---- running ---- */
/* Where this rank's part of a state's memory begins. */
static int64_t part_begins(const ml_session *session, const ml_layout *layout,
                           const ml_storage *storage) {
    if (storage->part_of == 0) return 0;
    int64_t rank = session_rank_under(session, layout);
    return ml_layout_coordinate(layout, rank, storage->part_of - 1) * storage->bytes;
}

void *program_address(const ml_program *program, const ml_plan *plan, const ml_storage *storage) {
    if (storage->kind == ML_STORAGE_STATE)
        return (char *)program->session->states[storage->id].memory + storage->offset +
               part_begins(program->session, plan->layout, storage);
    if (storage->kind == ML_STORAGE_TEMPORARY) {
        return (char *)program->session->arena + storage->offset;
    }
    if (storage->kind == ML_STORAGE_HOST) return (char *)program->host + storage->offset;
    if (storage->kind == ML_STORAGE_COORDINATE) {
        int64_t at = program->coordinates + ARENA_ALIGNMENT * (int64_t)storage->id;
        return (char *)program->inputs + at;
    }
    int i = 0;
    while (program->input_ids[i] != storage->id) i++;
    return (char *)program->inputs + program->input_offsets[i];
}

static ml_status executable_bind(ml_program *program, const ml_plan *plan,
                                 ml_executable *executable) {
    const ml_schedule *s = plan->schedule;
    for (uint32_t i = 0; i < s->storages.count; i++)
        program->addresses[i] = program_address(program, plan, &s->storages.at[i]);
    return program->session->device->ops->bind(executable, program->addresses);
}

static ml_status program_bind(ml_program *program) {
    if (program->bound) return ML_OK;
    ml_status status = session_reserve(program->session, ml_plan_arena(program->plan));
    if (status != ML_OK) return status;
    if (program->plan->pipeline != NULL) {
        staged_programs.unbind(program);
        program->bound = true;
        return ML_OK;
    }
    ml_executable **rebuild = program->rebuilds;
    for (const ml_plan *r = program->plan->rebuild; r && status == ML_OK; r = r->next)
        status = executable_bind(program, r, *rebuild++);
    if (status == ML_OK) status = executable_bind(program, program->plan, program->executable);
    program->bound = status == ML_OK;
    return status;
}

ml_status program_prepare(ml_program *program) {
    if (!program->ready) {
        ml_status status = session_initialize(program->session, program);
        program->ready = status == ML_OK;
        if (status != ML_OK) return status;
    }
    return program_bind(program);
}

ml_status program_execute(ml_program *program) {
    ml_status status = program_bind(program);
    if (status == ML_OK && program->plan->pipeline != NULL) return staged_programs.step(program);
    if (status == ML_OK) status = program_rebuild_cache(program);
    if (status != ML_OK) return status;
    return program->session->device->ops->run(program->executable);
}

/* Elements of a strided value, from its memory to type order. `from` is where its offset points. */
static void gather_elements(const ml_value *value, char *to, const char *from) {
    int64_t at[ML_MAX_AXES] = {0}, offset = 0, count = ml_type_elements(&value->type);
    int width = ml_dtypes[value->type.dtype].bytes;
    for (int64_t i = 0; i < count; i++) {
        memcpy(to + i * width, from + offset * width, (size_t)width);
        for (int axis = value->type.rank - 1; axis >= 0; axis--) {
            offset += value->stride[axis];
            if (++at[axis] < value->type.size[axis]) break;
            offset -= value->stride[axis] * value->type.size[axis];
            at[axis] = 0;
        }
    }
}

ml_status program_download(ml_program *program, int output, void *to) {
    const ml_schedule *s = program->plan->schedule;
    const ml_value *value = &s->values.at[s->output_values[output]];
    ml_device *device = program->session->device;
    int64_t width = ml_dtypes[value->type.dtype].bytes, span = 1;
    const char *from = (const char *)program->addresses[value->storage] + value->offset * width;
    if (ml_type_elements(&value->type) == 0) return ML_OK;
    if (ml_value_contiguous(value)) {
        return device->ops->download(device, to, from, ml_type_bytes(&value->type));
    }
    for (int i = 0; i < value->type.rank; i++) span += (value->type.size[i] - 1) * value->stride[i];
    char *memory = ml_alloc((size_t)(span * width));
    if (memory == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while reading an output");
    ml_status status = device->ops->download(device, memory, from, span * width);
    if (status == ML_OK) gather_elements(value, to, memory);
    ml_free(memory);
    return status;
}

ml_status program_settle(ml_program *program, ml_program **done) {
    ml_session *session = program->session;
    *done = program->done != NULL ? program->done : program;
    if (!program->unsettled) return ML_OK;
    program->unsettled = false;
    if (session->pending == program) session->pending = NULL;
    ml_status status = retry_settle(program, done);
    program->done = *done;
    return status;
}

ml_status program_settle_others(ml_session *session, const ml_program *next) {
    ml_program *done;
    if (session->pending == NULL || session->pending == next) return ML_OK;
    return program_settle(session->pending, &done);
}

static ml_status upload_inputs(ml_program *program, const void *const *inputs) {
    ml_session *session = program->session;
    ml_device *device = session->device;
    for (int i = 0; i < program->input_count; i++) {
        const int64_t bytes = program->input_bytes[i];
        char *to = (char *)program->inputs + program->input_offsets[i];
        char *gathered =
            program->together != NULL ? program->together + program->input_offsets[i] : NULL;
        const void *from = inputs[i];
        if (program->part != NULL) {
            void *part = gathered != NULL ? gathered : program->part;
            ML_TRY(session_cut(session, program->plan->layout,
                               &ml_graph_input(session->graph, program->input_ids[i])->type,
                               &program->input_places[i], inputs[i], part));
            from = part;
        } else if (gathered != NULL) {
            memcpy(gathered, from, (size_t)bytes);
        }
        if (gathered == NULL) ML_TRY(device->ops->upload(device, to, from, bytes));
    }
    if (program->together == NULL) return ML_OK;
    return device->ops->upload(device, program->inputs, program->together, program->coordinates);
}

ml_status ml_program_refresh(ml_program *program) {
    ml_program *done;
    if (program->pipeline != NULL) return ML_OK;
    if (program->waits) ML_TRY(ml_session_compile(program->session));
    if (program_has_joint_rebuilds(program)) {
        ML_TRY(program_settle_others(program->session, program));
        ML_TRY(program_settle(program, &done));
        ML_TRY(program_prepare(program)); /* bound by all ranks at once, too */
        ML_TRY(program_run_joint_rebuilds(program));
    }
    return program->retry != NULL ? ml_program_refresh(program->retry) : ML_OK;
}

ml_status ml_program_start(ml_program *program, const void *const *inputs) {
    ml_session *session = program->session;
    ml_device *device = session->device;
    if (program->waits) ML_TRY(ml_session_compile(session));
    if (program->pipeline != NULL) return staged_programs.start(program, inputs);
    ml_program *done;
    ml_status status = program_settle_others(session, program);
    if (status == ML_OK) status = program_settle(program, &done); /* the run before */
    if (status == ML_OK) status = program_prepare(program);
    if (status == ML_OK) status = upload_inputs(program, inputs);
    if (status != ML_OK) return status;
    program->done = NULL;
    program->unsettled = program->may_overflow;
    if (program->unsettled) session->pending = program;
    if (retry_at_once(program)) return program_execute(program->retry);
    ML_TRY(program_rebuild_cache(program));
    return device->ops->run(program->executable);
}

/* Outputs of a few bytes are one transfer, where the device has such. */
static ml_status download_outputs(ml_program *program, void *const *outputs, int count) {
    enum { MOST = 16, SMALL = 4096 };
    const ml_schedule *s = program->plan->schedule;
    ml_device *device = program->session->device;
    ml_copied_part parts[MOST];
    int part_count = 0;
    for (int i = 0; i < count; i++) {
        if (outputs[i] == NULL) continue;
        const ml_value *value = &s->values.at[s->output_values[i]];
        const int64_t bytes = ml_type_bytes(&value->type),
                      width = ml_dtypes[value->type.dtype].bytes;
        if (device->ops->download_parts == NULL || part_count == MOST || bytes == 0 ||
            bytes > SMALL || !ml_value_contiguous(value)) {
            ML_TRY(program_download(program, i, outputs[i]));
            continue;
        }
        const char *from = (const char *)program->addresses[value->storage] + value->offset * width;
        parts[part_count++] = (ml_copied_part){outputs[i], from, bytes};
    }
    return part_count > 0 ? device->ops->download_parts(device, parts, part_count) : ML_OK;
}

ml_status ml_program_finish(ml_program *program, void *const *outputs) {
    if (program->pipeline != NULL) return staged_programs.finish(program, outputs);
    const ml_roots *roots = &program->plan->roots;
    ml_program *done;
    ML_TRY(program_settle(program, &done));
    if (outputs == NULL) return ML_OK;
    return download_outputs(done, outputs, roots->output_count - (roots->overflow_count > 0));
}

ml_status ml_program_microbatches(ml_program *program, int microbatches) {
    if (program->pipeline == NULL) return ML_OK; /* each is a run of its own */
    if (microbatches < 1 || microbatches > program->plan->roots.microbatches)
        return ml_fail(ML_INVALID, "a step of the program has 1 to %d microbatches, got %d",
                       program->plan->roots.microbatches, microbatches);
    return staged_programs.microbatches(program, microbatches);
}

ml_status ml_program_run(ml_program *program, const void *const *inputs, void *const *outputs) {
    ml_status status = ml_program_start(program, inputs);
    return status == ML_OK ? ml_program_finish(program, outputs) : status;
}
