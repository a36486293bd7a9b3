/* Sessions: the graph, the device, and the memory that outlives programs. */
#include "runtime/exec/session.h"

#include <string.h>

#include "runtime/pipeline/plan.h"
#include "runtime/plan/arena_offsets.h"

typedef struct {
    ml_graph *graph;
} graph_call;

static void graph_body(void *context) {
    ((graph_call *)context)->graph = ml_graph_new();
}

ml_status ml_session_new(ml_session **session) {
    *session = NULL;
    graph_call call = {0};
    ML_TRY(ml_protect(graph_body, &call));
    ml_session *made = ml_alloc(sizeof *made);
    if (made == NULL) {
        ml_graph_free(call.graph);
        return ml_fail(ML_NO_MEMORY, "out of memory while starting a session");
    }
    made->graph = call.graph;
    made->clock = 1;
    made->options = ml_compile_options_read();
    made->stages.arena = ml_arena_new();
    *session = made;
    if (made->stages.arena != NULL) return ML_OK;
    ml_session_free(made);
    *session = NULL;
    return ml_fail(ML_NO_MEMORY, "out of memory while starting a session");
}

void ml_session_free(ml_session *session) {
    if (session == NULL) return;
    while (session->programs != NULL) ml_program_free(session->programs);
    ml_device *device = session->device;
    if (device != NULL && device->ops->part != NULL) device->ops->part(device);
    for (uint32_t i = 0; i < session->state_count; i++) {
        if (session->states[i].memory == NULL || session->states[i].within) continue;
        session->device->ops->release(session->device, session->states[i].memory);
    }
    if (session->arena != NULL) session->device->ops->release(session->device, session->arena);
    if (device != NULL) beside_core.device_close(device);
    ml_free(session->states);
    if (session->stages.arena != NULL) ml_arena_free(session->stages.arena);
    ml_graph_free(session->graph);
    ml_free(session);
}

ml_graph *ml_session_graph(ml_session *session) {
    return session->graph;
}
ml_device *ml_session_device(ml_session *session) {
    return session->device;
}
void ml_session_set_seed(ml_session *session, int64_t seed) {
    session->seed = seed;
}
void ml_session_set_memory(ml_session *session, int64_t bytes) {
    session->memory_budget = bytes;
}
void ml_session_log(ml_session *session, ml_compile_log *log) {
    session->options.log = log;
}
int64_t ml_session_seed(const ml_session *session) {
    return session->seed;
}

/* What is not for plans, such as the context's own memory, counts too. */
static void limit_memory(ml_session *session) {
    ml_device *device = session->device;
    int64_t budget = session->memory_budget, plans = device->target.memory_bytes;
    if (budget == 0) return;
    if (device->total_bytes > 0) budget -= device->total_bytes - plans;
    if (budget < 1) budget = 1;
    if (plans == 0 || budget < plans) device->target.memory_bytes = budget;
}

ml_status ml_session_open(ml_session *session, const char *device, int ordinal) {
    if (session->device == NULL) {
        if (session->comm != NULL) ordinal = beside_core.local_rank(session->comm);
        ML_TRY(beside_core.device_open(device, ordinal, &session->device));
        session->device->ranks = &session->ranks;
        ml_target_set_options(&session->device->target);
        if (session->comm != NULL && session->device->target.kind == ML_TARGET_C) {
            session->device->target.memory_bytes /=
                beside_core.world(session->comm); /* of one host */
        }
        limit_memory(session);
        return session_devices_agree(session);
    }
    if (device == NULL || strcmp(device, session->device->ops->name) == 0) return ML_OK;
    return ml_fail(ML_INVALID, "the session runs on device %s already, and cannot open %s",
                   session->device->ops->name, device);
}

/* ---- states ---- */
ml_status session_grow(ml_session *session) {
    uint32_t count = ml_graph_state_count(session->graph);
    if (count <= session->state_count) return ML_OK;
    uint32_t room = count < 2 * session->state_count ? 2 * session->state_count : count;
    session_state *states =
        ml_realloc(session->states, session->state_count * sizeof *states, room * sizeof *states);
    if (states == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for %u states", count);
    session->states = states;
    session->state_count = room;
    return ML_OK;
}

ml_status session_allocate(ml_session *session, uint32_t id) {
    ml_status status = session_grow(session);
    if (status != ML_OK || session->states[id].memory != NULL) return status;
    ml_type local;
    ml_placements places;
    ML_TRY(session_place(session, id, &local, &places));
    int64_t bytes = ml_type_bytes(&local);
    ml_device *device = session->device;
    ML_TRY(device->ops->allocate(device, bytes > 0 ? bytes : 1, &session->states[id].memory));
    session->states[id].bytes = bytes;
    session->state_bytes += bytes;
    return ML_OK;
}

ml_status session_allocate_together(ml_session *session, const uint32_t *ids, int count) {
    ml_type local;
    ml_placements places;
    int64_t all = 0;
    void *memory = NULL;
    ML_TRY(session_grow(session));
    for (int i = 0; i < count; i++) {
        session_state *state = &session->states[ids[i]];
        ML_TRY(session_place(session, ids[i], &local, &places));
        state->bytes = ml_type_bytes(&local);
        if (state->bytes >= ARENA_ALIGNMENT) all += memory_padded(state->bytes);
    }
    if (all == 0) return ML_OK;
    ML_TRY(session->device->ops->allocate(session->device, all, &memory));
    bool within = false;
    for (int i = 0; i < count; i++) {
        session_state *state = &session->states[ids[i]];
        if (state->bytes < ARENA_ALIGNMENT) continue;
        state->memory = memory;
        state->within = within;
        within = true;
        memory = (char *)memory + memory_padded(state->bytes);
        session->state_bytes += state->bytes;
    }
    return ML_OK;
}

/* States are initialized in waves: no initial value of a wave reads another state of it. */
typedef struct {
    ml_session *session;
    const ml_program *program; /* NULL: all states, or those of `only` */
    const uint32_t *only;
    uint32_t only_count;
    ml_arena *arena;
    uint32_t *wanted; /* states without a value */
    uint32_t wanted_count;
    bool *listed;   /* by state: has been put into `wanted` */
    uint32_t *seen; /* by node: number of the last walk that came by */
    uint32_t walk;
    ml_ref *stack;
    ml_roots roots; /* updates: one for each state of this wave */
} initial_work;

static void wanted_add(initial_work *work, uint32_t id) {
    if (!session_holds(work->session, id) && work->program == NULL) return;
    if (work->listed[id] || work->session->states[id].initialized) return;
    const ml_state *state = ml_graph_state(work->session->graph, id);
    if (work->session->states[id].lost) {
        bool freed = work->session->states[id].freed;
        ml_fail(ML_INVALID, "the state \"%s\" has no value: %s", state->name ? state->name : "",
                freed ? "its memory was freed, for products read it in 8 bits"
                      : "what was loaded into it was damaged");
        ml_help(freed ? "leave out --weights" : "load a checkpoint that is whole");
        ml_raise_last();
    }
    if (state->kind == ML_STATE_CACHE) return; /* param_cache_rebuild.c */
    /* a module is yet to give it a name and with that its initial value */
    bool later = state->kind == ML_STATE_PARAMETER && state->name == NULL && state->initial == 0;
    if (later && work->program == NULL) return;
    work->listed[id] = true;
    work->wanted[work->wanted_count++] = id;
}

/* Walk the initial value of `id`; true if it reads a state that has no value yet. With `add`,
 * those states are wanted too, and what earlier walks have seen is left out. */
static bool initial_walk(initial_work *work, uint32_t id, bool add) {
    const ml_graph *g = work->session->graph;
    ml_ref root = ml_graph_state(g, id)->initial;
    uint32_t depth = 0, walk = add ? work->walk : ++work->walk;
    bool blocked = false;
    if (root == 0 || work->seen[root] == walk) return false;
    work->stack[depth++] = root;
    work->seen[root] = walk;
    while (depth > 0 && (add || !blocked)) {
        ml_ref n = work->stack[--depth];
        const ml_node *node = ml_graph_node(g, n);
        if (node->op == ML_OP_STATE) {
            uint32_t read = (uint32_t)ml_graph_args(g, n)[0];
            blocked |= !work->session->states[read].initialized;
            if (add) wanted_add(work, read);
        }
        for (int i = 0; i < node->source_count; i++) {
            ml_ref source = ml_graph_source(g, n, i);
            if (work->seen[source] == walk) continue;
            work->seen[source] = walk;
            work->stack[depth++] = source;
        }
    }
    return blocked;
}

static void wanted_find(initial_work *work) {
    uint32_t count = ml_graph_state_count(work->session->graph);
    if (work->program == NULL && work->only == NULL) {
        for (uint32_t id = 0; id < count; id++) wanted_add(work, id);
        return;
    }
    for (uint32_t i = 0; i < work->only_count; i++) wanted_add(work, work->only[i]);
    const ml_plan *part;
    for (int p = 0; work->program && (part = ml_plan_part(work->program->plan, p)) != NULL; p++) {
        const ml_schedule *s = part->schedule;
        for (uint32_t i = 0; i < s->storages.count; i++) {
            const ml_storage *storage = &s->storages.at[i];
            if (storage->kind == ML_STORAGE_STATE) wanted_add(work, storage->id);
        }
    }
    work->walk = 1;
    for (uint32_t i = 0; i < work->wanted_count; i++) initial_walk(work, work->wanted[i], true);
}

/* Zero where that is the initial value (on most devices cheaper than a kernel), else an update. */
static void initial_add(initial_work *work, uint32_t id) {
    ml_session *session = work->session;
    const ml_state *state = ml_graph_state(session->graph, id);
    double value = 0;
    ML_CHECK(session_allocate(session, id));
    if (state->initial != 0 &&
        !(ml_graph_constant(session->graph, state->initial, &value) && value == 0)) {
        work->roots.updates[work->roots.update_count++] = (ml_update){id, state->initial};
        return;
    }
    ml_device *device = session->device;
    ML_CHECK(device->ops->zero(device, session->states[id].memory, session->states[id].bytes));
}

static void initial_run(initial_work *work) {
    if (work->roots.update_count == 0) return;
    ml_program *program = NULL;
    ml_status status =
        program_build(work->session, &work->roots, work->session->ranks.layout, false, &program);
    if (status == ML_OK) status = program_execute(program);
    ml_device *device = work->session->device;
    if (status == ML_OK) status = device->ops->wait(device);
    ml_program_free(program);
    if (status != ML_OK) ml_raise_last();
}

static void initial_body(void *context) {
    initial_work *work = context;
    ml_session *session = work->session;
    size_t states = (size_t)ml_graph_state_count(session->graph) + 1;
    size_t nodes = (size_t)ml_graph_count(session->graph) + 1;
    work->wanted = ML_NEW_ARRAY(work->arena, uint32_t, states);
    work->listed = ML_NEW_ARRAY(work->arena, bool, states);
    work->roots.updates = ML_NEW_ARRAY(work->arena, ml_update, states);
    work->seen = ML_NEW_ARRAY(work->arena, uint32_t, nodes);
    work->stack = ML_NEW_ARRAY(work->arena, ml_ref, nodes);
    uint32_t *wave = ML_NEW_ARRAY(work->arena, uint32_t, states);
    wanted_find(work);
    while (work->wanted_count > 0) {
        uint32_t ready = 0, left = 0;
        for (uint32_t i = 0; i < work->wanted_count; i++) {
            uint32_t id = work->wanted[i];
            if (initial_walk(work, id, false))
                work->wanted[left++] = id;
            else
                wave[ready++] = id;
        }
        if (ready == 0) {
            ml_raise(ML_INVALID, "the initial value of state \"%s\" depends on itself",
                     ml_graph_state(session->graph, work->wanted[0])->name);
        }
        work->roots.update_count = 0;
        for (uint32_t i = 0; i < ready; i++) initial_add(work, wave[i]);
        initial_run(work);
        for (uint32_t i = 0; i < ready; i++) session->states[wave[i]].initialized = true;
        work->wanted_count = left;
    }
}

void session_lose(ml_session *session, uint32_t state) {
    session_state *held = &session->states[state];
    held->lost = held->lost || held->initialized;
    held->initialized = false;
    for (ml_program *p = session->programs; p != NULL; p = p->next) {
        p->ready = false;
        if (p->retry != NULL) p->retry->ready = false;
    }
}

static ml_status initialize(initial_work *work) {
    ML_TRY(session_grow(work->session));
    work->arena = ml_arena_new();
    if (work->arena == NULL)
        return ml_fail(ML_NO_MEMORY, "out of memory while initializing states");
    ml_status status = ml_protect(initial_body, work);
    ml_arena_free(work->arena);
    return status;
}

ml_status session_initialize(ml_session *session, const ml_program *program) {
    return initialize(&(initial_work){.session = session, .program = program});
}

ml_status ml_session_initialize_states(ml_session *session, const uint32_t *states,
                                       uint32_t count) {
    ML_TRY(program_settle_others(session, NULL));
    ML_TRY(session_grow(session));
    for (uint32_t i = 0; i < count; i++) {
        ML_TRY(session_assign_state(session, states[i]));
        session_state *held = &session->states[states[i]];
        bool lost = held->lost;
        session_lose(session, states[i]);
        held->lost = lost;
    }
    return initialize(&(initial_work){.session = session, .only = states, .only_count = count});
}

static ml_status state_check(ml_session *session, uint32_t state) {
    if (session->device == NULL) return ml_fail(ML_INTERNAL, "the session has no device yet");
    if (state < ml_graph_state_count(session->graph)) return ML_OK;
    return ml_fail(ML_INTERNAL, "there is no state %u", state);
}

/* This rank's part of a state, of several ranks; zeros where another stage is its home. */
static ml_status part_download(ml_session *session, uint32_t state, void *part) {
    ml_device *device = session->device;
    const session_state *held = &session->states[state];
    bool sums = ml_graph_state(session->graph, state)->kind == ML_STATE_GRADIENT;
    if (!(sums ? session_holds(session, state) : session_home(session, state))) return ML_OK;
    return device->ops->download(device, part, held->memory, held->bytes);
}

bool ml_session_has_value(const ml_session *session, uint32_t state) {
    return state < session->state_count && session->states[state].initialized;
}

/* The state has memory and a value. */
static ml_status state_ready(ml_session *session, uint32_t state) {
    ml_status status = state_check(session, state);
    if (status == ML_OK) status = program_settle_others(session, NULL);
    if (status == ML_OK) status = session_grow(session);
    if (status == ML_OK) status = session_assign_state(session, state);
    if (status == ML_OK && session_holds(session, state) && !session->states[state].initialized) {
        status = session_initialize(session, NULL);
        if (status == ML_OK && !session->states[state].initialized)
            status = ml_fail(ML_INVALID, "state %u has no initial value yet", state);
    }
    return status;
}

ml_status ml_session_state_memory(ml_session *session, uint32_t state, const void **memory) {
    *memory = NULL;
    if (session->everyone != NULL || session->device->ops->fetch != NULL) return ML_OK;
    ML_TRY(state_ready(session, state));
    *memory = session->states[state].memory;
    return ML_OK;
}

ml_status ml_session_read_state(ml_session *session, uint32_t state, void *to) {
    ML_TRY(state_ready(session, state));
    ml_device *device = session->device;
    const session_state *held = &session->states[state];
    if (session->everyone == NULL) {
        return device->ops->download(device, to, held->memory, held->bytes);
    }
    ml_type local;
    ml_placements places;
    ML_TRY(session_place(session, state, &local, &places));
    int64_t bytes = ml_type_bytes(&local);
    void *part = ml_alloc((size_t)bytes + 1);
    if (part == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while reading a state");
    ml_status status = part_download(session, state, part);
    if (status == ML_OK) status = session_spread(session, state, part, bytes);
    if (status == ML_OK) status = session_gather(session, state, part, to);
    ml_free(part);
    return status;
}

/* This rank's part of a whole value; of a sum, parts beyond the first are zero. */
static ml_status part_upload(ml_session *session, uint32_t state, const void *from) {
    ml_device *device = session->device;
    const ml_state *info = ml_graph_state(session->graph, state);
    session_state *held = &session->states[state];
    if (info->kind == ML_STATE_GRADIENT && !session_home(session, state))
        return device->ops->zero(device, held->memory, held->bytes);
    ml_type local;
    ml_placements places;
    ML_TRY(session_place(session, state, &local, &places));
    void *part = ml_alloc((size_t)held->bytes + 1);
    if (part == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while writing a state");
    ml_status status =
        session_cut(session, session->ranks.layout, &info->type, &places, from, part);
    if (status == ML_OK) status = device->ops->upload(device, held->memory, part, held->bytes);
    ml_free(part);
    return status;
}

ml_status ml_session_write_state(ml_session *session, uint32_t state, const void *from) {
    ml_status status = state_check(session, state);
    if (status == ML_OK) status = program_settle_others(session, NULL);
    if (status == ML_OK) status = session_assign_state(session, state);
    if (status != ML_OK || !session_holds(session, state)) return status;
    ML_TRY(session_allocate(session, state));
    ml_device *device = session->device;
    session_state *held = &session->states[state];
    if (session->everyone == NULL)
        status = device->ops->upload(device, held->memory, from, held->bytes);
    else
        status = part_upload(session, state, from);
    if (status == ML_OK) held->initialized = true;
    held->lost = held->lost && status != ML_OK;
    held->set_at = ++session->clock;
    return status;
}

/* ---- the arena ---- */
ml_status session_reserve(ml_session *session, int64_t bytes) {
    if (bytes <= session->arena_bytes && session->arena != NULL) return ML_OK;
    ml_device *device = session->device;
    ml_status status = device->ops->wait(device);
    if (status != ML_OK) return status;
    for (ml_program *p = session->programs; p != NULL; p = p->next) p->bound = false;
    if (session->arena != NULL && device->ops->forget != NULL) status = device->ops->forget(device);
    if (status != ML_OK) return status;
    if (session->arena != NULL) device->ops->release(device, session->arena);
    session->arena = NULL;
    session->arena_bytes = 0;
    status = device->ops->allocate(device, bytes > 0 ? bytes : 1, &session->arena);
    if (status == ML_OK) session->arena_bytes = bytes;
    return status;
}

static bool program_reads(const ml_program *program, uint32_t state) {
    const ml_plan *part;
    for (int p = 0; (part = ml_plan_part(program->plan, p)) != NULL; p++)
        for (uint32_t i = 0; i < part->schedule->storages.count; i++)
            if (part->schedule->storages.at[i].kind == ML_STORAGE_STATE &&
                part->schedule->storages.at[i].id == state)
                return true;
    return false;
}

bool ml_session_free_state(ml_session *session, uint32_t state) {
    if (state >= session->state_count || session->states[state].memory == NULL) return false;
    if (session->states[state].together) return false;
    for (const ml_program *p = session->programs; p != NULL; p = p->next)
        if (program_reads(p, state)) return false;
    session_lose(session, state);
    session_state *held = &session->states[state];
    session->device->ops->release(session->device, held->memory);
    session->state_bytes -= held->bytes;
    *held = (session_state){.lost = true, .freed = true};
    return true;
}
