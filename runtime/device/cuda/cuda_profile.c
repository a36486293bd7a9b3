#ifdef MLUA_CUDA
/* Timed runs: events around the whole of a run, around each step, and around repeated products.
 *
 * Runs that are timed as a whole stay asynchronous: their events wait in a list until somebody
 * waits for the device. When each began is known from an event that was recorded at the end of the
 * wait before: with nothing under way it passed at once. Runs by steps go without the CUDA graph,
 * between two waits. */
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/device/cuda/cuda_internal.h"

/* A run whose end may still lie ahead. */
typedef struct {
    CUevent begin, end;
    const ml_profile_program *program;
} whole_run;

struct cuda_times {
    ml_arena *arena;
    CUevent base;           /* before all pending runs */
    double start;           /* on the host, when it was recorded */
    ML_VEC(whole_run) runs; /* pending ones first; the rest have events to be used again */
    uint32_t pending;
};

/* ---- Whole runs ---- */
typedef struct {
    cuda_device *device;
    whole_run *run;
} next_call;

/* The next free pair of events. Raises. */
static void next_body(void *context) {
    next_call *call = context;
    cuda_times *times = call->device->times;
    if (times->pending == times->runs.count) {
        whole_run *added = ML_PUSH(times->arena, &times->runs);
        ML_CHECK(CUDA_OK(cuEventCreate(&added->begin, CU_EVENT_DEFAULT)));
        ML_CHECK(CUDA_OK(cuEventCreate(&added->end, CU_EVENT_DEFAULT)));
    }
    call->run = &times->runs.at[times->pending];
}

static ml_status base_record(cuda_device *d) {
    d->times->start = ml_clock_now();
    CUDA_TRY(cuEventRecord(d->times->base, d->stream));
    return ML_OK;
}

static ml_status times_open(cuda_device *d) {
    if (d->times) return ML_OK;
    d->times = ml_alloc(sizeof *d->times);
    if (d->times) d->times->arena = ml_arena_new();
    if (d->times && d->times->arena) {
        CUDA_TRY(cuEventCreate(&d->times->base, CU_EVENT_DEFAULT));
        return base_record(d);
    }
    ml_free(d->times);
    d->times = NULL;
    return ml_fail(ML_NO_MEMORY, "no memory to time runs");
}

void cuda_times_close(cuda_device *d) {
    if (!d->times) return;
    if (d->times->base) CUDA_OK(cuEventDestroy(d->times->base));
    for (uint32_t i = 0; i < d->times->runs.count; i++) {
        if (d->times->runs.at[i].begin) CUDA_OK(cuEventDestroy(d->times->runs.at[i].begin));
        if (d->times->runs.at[i].end) CUDA_OK(cuEventDestroy(d->times->runs.at[i].end));
    }
    ml_arena_free(d->times->arena);
    ml_free(d->times);
    d->times = NULL;
}

ml_status cuda_times_collect(cuda_device *d) {
    if (!d->times) return ML_OK;
    uint32_t count = d->times->pending;
    d->times->pending = 0;
    for (uint32_t i = 0; i < count; i++) {
        const whole_run *run = &d->times->runs.at[i];
        float begin = 0, ms = 0;
        CUDA_TRY(cuEventElapsedTime(&begin, d->times->base, run->begin));
        CUDA_TRY(cuEventElapsedTime(&ms, run->begin, run->end));
        double start = d->times->start + 1e-3 * (double)begin;
        ML_TRY(
            ml_profile_run_ends(d->base.profile, run->program, start, start + 1e-3 * (double)ms));
    }
    return base_record(d);
}

static ml_status run_whole(ml_executable *e) {
    enum { MOST_PENDING = 4096 };
    cuda_device *d = e->device;
    next_call call = {.device = d};
    ML_TRY(times_open(d));
    if (d->times->pending == MOST_PENDING) ML_TRY(d->base.ops->wait(&d->base));
    ML_TRY(ml_protect(next_body, &call));
    call.run->program = e->profiled;
    CUDA_TRY(cuEventRecord(call.run->begin, d->stream));
    ML_TRY(cuda_run_plain(e));
    CUDA_TRY(cuEventRecord(call.run->end, d->stream));
    d->times->pending++;
    return ML_OK;
}

/* ---- Step by step ---- */
typedef struct {
    ml_executable *e;
    cuda_step_times *times;
} make_call;

static void make_body(void *context) {
    make_call *call = context;
    ml_executable *e = call->e;
    cuda_step_times *times = ML_NEW(e->arena, cuda_step_times);
    e->times = times;
    times->begin = ML_NEW_ARRAY(e->arena, CUevent, e->step_count + 1);
    times->end = ML_NEW_ARRAY(e->arena, CUevent, e->step_count + 1);
    ML_CHECK(CUDA_OK(cuEventCreate(&times->base, CU_EVENT_DEFAULT)));
    for (uint32_t i = 0; i < e->step_count; i++) {
        ML_CHECK(CUDA_OK(cuEventCreate(&times->begin[i], CU_EVENT_DEFAULT)));
        ML_CHECK(CUDA_OK(cuEventCreate(&times->end[i], CU_EVENT_DEFAULT)));
    }
}

void cuda_times_forget(ml_executable *e) {
    cuda_step_times *times = e->times;
    e->times = NULL;
    if (!times) return;
    if (times->base) CUDA_OK(cuEventDestroy(times->base));
    for (uint32_t i = 0; i < e->step_count; i++) {
        if (times->begin && times->begin[i]) CUDA_OK(cuEventDestroy(times->begin[i]));
        if (times->end && times->end[i]) CUDA_OK(cuEventDestroy(times->end[i]));
    }
}

/* Seconds from the base of the run to an event. */
static ml_status since_base(const ml_executable *e, CUevent event, double *seconds) {
    float ms = 0;
    CUDA_TRY(cuEventElapsedTime(&ms, e->times->base, event));
    *seconds = 1e-3 * (double)ms;
    return ML_OK;
}

/* The step at i, or the collectives that are one launch with it, which share its time by their
 * bytes. *last becomes the end of the latest. */
static ml_status record_step(ml_executable *e, uint32_t i, double start, double *last) {
    const ml_collective_step *c = e->steps[i].step->collective;
    uint32_t count = e->steps[i].step->kind == ML_STEP_COLLECTIVE ? e->steps[i].group : 1;
    int stream = count > 0 && c && c->ticket ? ML_STREAM_AXIS + c->mesh_axis : ML_STREAM_MAIN;
    if (e->steps[i].step->kind == ML_STEP_HOST_COPY)
        stream = ML_STREAM_HOST + e->steps[i].step->host_copy->back;
    double begin, end, bytes = 0;
    if (count == 0 || e->steps[i].step->kind == ML_STEP_WAIT) return ML_OK;
    ML_TRY(since_base(e, e->times->begin[i], &begin));
    ML_TRY(since_base(e, e->times->end[i], &end));
    if (start + end > *last) *last = start + end;
    for (uint32_t k = i; k < i + count; k++) bytes += (double)e->steps[k].step->bytes;
    for (uint32_t k = i; k < i + count; k++) {
        double share =
            count == 1 || bytes <= 0 ? 1 / (double)count : (double)e->steps[k].step->bytes / bytes;
        double from = begin, to = begin + share * (end - begin);
        if (k + 1 == i + count) to = end;
        ML_TRY(ml_profile_step_ran(e->device->base.profile, e->profiled, k, stream, start + from,
                                   start + to));
        begin = to;
        bytes -= (double)e->steps[k].step->bytes;
    }
    return ML_OK;
}

static ml_status record_steps(ml_executable *e, double start) {
    double last = start;
    for (uint32_t i = 0; i < e->step_count; i++) ML_TRY(record_step(e, i, start, &last));
    return ml_profile_run_ends(e->device->base.profile, e->profiled, start, last);
}

static ml_status run_steps(ml_executable *e) {
    make_call call = {.e = e};
    if (!e->times) ML_TRY(ml_protect(make_body, &call));
    ML_TRY(cuda_wait_for(e->device, NULL));
    double start = ml_clock_now();
    CUDA_TRY(cuEventRecord(e->times->base, e->device->stream));
    e->times->recording = true;
    e->times->stops = e->runs == 1 && e->device->base.profile->prints;
    ml_status status = cuda_enqueue_all(e);
    e->times->recording = false;
    ML_TRY(status);
    ML_TRY(cuda_prefetch_await_all(e->device));
    ML_TRY(cuda_wait_for(e->device, NULL));
    return record_steps(e, start);
}

/* ---- Alone ---- */
enum { BATCH = 6 };

/* A batch follows itself without a pause, so that no launch is waited for; its first call, which
 * may be, does not count. */
static ml_status step_batch(ml_executable *e, const cuda_step *step, CUevent *events, double *best,
                            double *total) {
    CUDA_TRY(cuEventRecord(events[0], e->device->stream));
    for (int i = 1; i <= BATCH; i++) {
        ML_TRY(cuda_enqueue(e, step));
        CUDA_TRY(cuEventRecord(events[i], e->device->stream));
    }
    ML_TRY(cuda_wait_for(e->device, NULL));
    for (int i = 2; i <= BATCH; i++) {
        float ms = 0;
        CUDA_TRY(cuEventElapsedTime(&ms, events[i - 1], events[i]));
        *total += 1e-3 * (double)ms;
        if (1e-3 * (double)ms < *best) *best = 1e-3 * (double)ms;
    }
    return ML_OK;
}

static ml_status step_fastest(ml_executable *e, const cuda_step *step, double *best) {
    CUevent events[BATCH + 1] = {0};
    ml_status status = ML_OK;
    double total = 0;
    *best = 1e30;
    for (int i = 0; i <= BATCH && status == ML_OK; i++)
        status = CUDA_OK(cuEventCreate(&events[i], CU_EVENT_DEFAULT));
    for (int runs = 0; status == ML_OK && !ml_profile_alone_enough(runs, total); runs += BATCH)
        status = step_batch(e, step, events, best, &total);
    for (int i = 0; i <= BATCH; i++)
        if (events[i]) cuda.cuEventDestroy(events[i]);
    return status;
}

/* Copy what a step wrote to `saved`, or back from it. */
static ml_status copy_writes(ml_executable *e, const cuda_step *step, CUdeviceptr saved,
                             bool back) {
    const ml_step *s = step->step;
    for (int i = s->read_count; i < s->read_count + s->write_count; i++) {
        CUdeviceptr own = (CUdeviceptr)(uintptr_t)step->pointers[i];
        size_t bytes = (size_t)ml_profile_span(&e->plan->schedule->values.at[s->values[i]]);
        if (bytes > 0)
            CUDA_TRY(cuMemcpyDtoDAsync(back ? own : saved, back ? saved : own, bytes,
                                       e->device->stream));
        saved += bytes;
    }
    return ML_OK;
}

/* The step ran just now: repeat it on the same operands, and leave behind what it wrote. */
static ml_status step_alone(ml_executable *e, uint32_t i) {
    const cuda_step *step = &e->steps[i];
    const ml_step *s = step->step;
    ml_profile *profile = e->device->base.profile;
    CUdeviceptr saved = 0;
    double best = 0;
    if (!ml_profile_wants_alone(profile, e->profiled, i)) return ML_OK;
    if (ml_profile_changes(e->plan->schedule, s, step->pointers)) {
        size_t bytes = 0;
        for (int w = s->read_count; w < s->read_count + s->write_count; w++)
            bytes += (size_t)ml_profile_span(&e->plan->schedule->values.at[s->values[w]]);
        if (cuda_take(e->device, &saved, (int64_t)bytes + 1) != CUDA_SUCCESS)
            return ML_OK; /* not measured */
        ML_TRY(copy_writes(e, step, saved, false));
    }
    ml_status status = step_fastest(e, step, &best);
    if (status == ML_OK && saved) status = copy_writes(e, step, saved, true);
    CUDA_OK(cuStreamSynchronize(e->device->stream));
    if (saved) CUDA_OK(cuMemFree(saved));
    return status == ML_OK ? ml_profile_alone(profile, e->profiled, i, best) : status;
}

static ml_status run_alone(ml_executable *e) {
    ML_TRY(cuda_wait_for(e->device, NULL));
    double start = ml_clock_now();
    for (uint32_t i = 0; i < e->step_count; i++) {
        ML_TRY(cuda_enqueue(e, &e->steps[i]));
        ML_TRY(step_alone(e, i));
    }
    cuda_doing(NULL);
    ML_TRY(cuda_wait_for(e->device, NULL));
    return ml_profile_run_ends(e->device->base.profile, e->profiled, start, ml_clock_now());
}

ml_status cuda_run_profiled(ml_executable *e, ml_run_mode mode) {
    ml_profile *profile = e->device->base.profile;
    if (!e->profiled) {
        ML_TRY(ml_profile_describe(profile, e->plan, &e->profiled));
        for (uint32_t i = 0; i < e->step_count; i++)
            if (e->steps[i].attention) ML_TRY(ml_profile_by(profile, e->profiled, i, "cuDNN"));
    }
    if (mode == ML_RUN_WHOLE) return run_whole(e);
    ml_profile_run_begins(profile);
    return mode == ML_RUN_STEPS ? run_steps(e) : run_alone(e);
}
#endif
