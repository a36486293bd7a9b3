#ifdef MLUA_CUDA
/* Prefetches: all-gathers that continue after their program, on their mesh axis' stream, beside the
 * programs that follow (codegen/lower/lower.h).
 *
 * Each launch of them is followed by an event of its states, the device's: rebuilds of the same
 * states by several programs record the same one. A program waits for the events of the states that
 * it uses, each before the first step that does; in a CUDA graph by external events. Where NCCL has
 * served them, it waits for all before its first collective: kernels of two communicators have no
 * common order on all ranks. What is not a plain run waits for all. */
#include "runtime/base/knobs.h"
#include "runtime/device/cuda/cuda_ce_collectives.h"

/* ---- Programs that prefetch ------------------------------------------------------------------ */
static bool is_prefetch(const cuda_step *step) {
    return step->step->kind == ML_STEP_COLLECTIVE && step->step->collective->prefetch;
}

static uint32_t state_of(const ml_executable *e, const ml_step *step, int value) {
    const ml_schedule *s = e->plan->schedule;
    const ml_storage *storage = &s->storages.at[s->values.at[step->values[value]].storage];
    return storage->kind == ML_STORAGE_STATE ? storage->id : UINT32_MAX;
}

/* The state's event, 1 + its number; 0: it is not prefetched. */
static uint32_t event_of(const cuda_device *d, uint32_t state) {
    return state < d->prefetch.states ? d->prefetch.event_of[state] : 0;
}

static void room_for(cuda_device *d, uint32_t states) {
    cuda_prefetch *p = &d->prefetch;
    if (states <= p->states) return;
    uint32_t *larger = ML_NEW_ARRAY(d->arena, uint32_t, (size_t)states * 2);
    for (uint32_t i = 0; i < p->states; i++) larger[i] = p->event_of[i];
    p->event_of = larger;
    p->states = states * 2;
}

/* Those of a launch that have no event yet get one. */
static void launch_load(ml_executable *e, const cuda_step *step) {
    cuda_device *d = e->device;
    uint32_t made = 0;
    for (uint32_t i = 0; i < step->group; i++) {
        const uint32_t state = state_of(e, step[i].step, 1);
        if (event_of(d, state) != 0) continue;
        if (made == 0) {
            cuda_prefetch_event *event = ML_PUSH(d->arena, &d->prefetch.events);
            made = d->prefetch.events.count;
            event->axis = step->step->collective->mesh_axis;
            ML_CHECK(CUDA_OK(cuEventCreate(&event->event, CU_EVENT_DISABLE_TIMING)));
            d->prefetch.generation++;
        }
        d->prefetch.event_of[state] = made;
    }
}

void cuda_prefetch_load(ml_executable *e) {
    uint32_t gathers = 0, launches = 0;
    room_for(e->device, ml_graph_state_count(e->plan->schedule->graph));
    for (uint32_t t = 0; t < e->step_count; t++) {
        if (!is_prefetch(&e->steps[t])) continue;
        gathers++;
        if (e->steps[t].group == 0) continue;
        launch_load(e, &e->steps[t]);
        launches++;
    }
    e->prefetches = gathers > 0;
    if (e->prefetches)
        ml_debug(1,
                 "prefetch: %u all-gathers of parameters, in %u launches, continue beside the next "
                 "program\n",
                 gathers, launches);
}

ml_status cuda_prefetch_launched(ml_executable *e, const cuda_step *step, CUstream stream) {
    cuda_device *d = e->device;
    uint32_t last = 0;
    bool copies = true;
    for (uint32_t i = 0; i < step->group; i++) copies &= step[i].ce != NULL;
    for (uint32_t i = 0; i < step->group; i++) {
        const uint32_t event = event_of(d, state_of(e, step[i].step, 1));
        if (event == last) continue;
        CUDA_TRY(cuEventRecord(d->prefetch.events.at[event - 1].event, stream));
        last = event;
        if (copies || d->prefetch.events.at[event - 1].nccl) continue;
        d->prefetch.events.at[event - 1].nccl = true;
        d->prefetch.generation++;
    }
    d->prefetch.pending = true;
    if (copies || step->step->collective->prefetch == ML_PREFETCH_ANY) return ML_OK;
    return cuda_prefetch_await_all(d);
}

/* ---- Programs that follow -------------------------------------------------------------------- */
static void await_add(ml_executable *e, bool *seen, uint32_t step, uint32_t event) {
    if (event == 0 || seen[event]) return;
    seen[event] = true;
    *ML_PUSH(e->arena, &e->awaits) = (cuda_await){step, event - 1};
}

/* The events that the program waits for, each at the first step that uses one of its states, or is
 * a collective of its mesh axis: a graph has those on streams of its own. Those of NCCL: at the
 * first collective. */
static void awaits_find(void *executable) {
    ml_executable *e = executable;
    const cuda_prefetch *p = &e->device->prefetch;
    bool *seen = ML_NEW_ARRAY(e->arena, bool, (size_t)p->events.count + 1);
    uint32_t collectives = 0, launches = 0;
    e->awaits.count = 0;
    for (uint32_t t = 0; t < e->step_count; t++) {
        const ml_step *step = e->steps[t].step;
        for (int i = 0; i < step->read_count + step->write_count; i++)
            await_add(e, seen, t, event_of(e->device, state_of(e, step, i)));
        const bool collects = step->kind == ML_STEP_COLLECTIVE && !step->collective->prefetch;
        for (uint32_t i = 0; collects && i < p->events.count; i++)
            if (p->events.at[i].nccl || p->events.at[i].axis == step->collective->mesh_axis)
                await_add(e, seen, t, i + 1);
        if (!collects || collectives++ > 0) continue;
        for (uint32_t i = 0; i < p->events.count; i++)
            launches += p->events.at[i].nccl && seen[i + 1];
    }
    if (launches > 0)
        ml_debug(1, "prefetch: %u launches by NCCL end before the program's first collective\n",
                 launches);
}

/* A state keeps its event: there are more of them, or one is waited for at an earlier step. */
static uint64_t awaits_sum(const ml_executable *e) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < e->awaits.count; i++) sum += e->step_count + 1 - e->awaits.at[i].step;
    return sum;
}

ml_status cuda_prefetch_follow(ml_executable *e, bool *more) {
    const cuda_device *d = e->device;
    const uint64_t before = awaits_sum(e);
    *more = false;
    if (e->awaits_generation == d->prefetch.generation) return ML_OK;
    ML_TRY(ml_protect(awaits_find, e));
    e->awaits_generation = d->prefetch.generation;
    *more = awaits_sum(e) != before;
    return ML_OK;
}

ml_status cuda_prefetch_await(const ml_executable *e, uint32_t step, uint32_t *next) {
    const cuda_device *d = e->device;
    for (; *next < e->awaits.count && e->awaits.at[*next].step == step; ++*next)
        CUDA_TRY(cuStreamWaitEvent(d->stream,
                                   d->prefetch.events.at[e->awaits.at[*next].event].event,
                                   e->captures ? CU_EVENT_WAIT_EXTERNAL : CU_EVENT_WAIT_DEFAULT));
    return ML_OK;
}

ml_status cuda_prefetch_await_all(cuda_device *d) {
    for (uint32_t i = 0; i < d->prefetch.events.count && d->prefetch.pending; i++)
        CUDA_TRY(cuStreamWaitEvent(d->stream, d->prefetch.events.at[i].event, 0));
    d->prefetch.pending = false;
    return ML_OK;
}

void cuda_prefetch_close(cuda_device *d) {
    for (uint32_t i = 0; i < d->prefetch.events.count; i++)
        if (d->prefetch.events.at[i].event) CUDA_OK(cuEventDestroy(d->prefetch.events.at[i].event));
}
#endif
