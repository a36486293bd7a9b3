#ifdef MLUA_CUDA
/* Runs that look at each step: MLUA_DEBUG=2 times them, MLUA_CHECK=cpu compares their results. */
#include <stdio.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/device/cuda_device.h"

/* ---- Times
 * --------------------------------------------------------------------------------------- */
static const char *label_of(const cuda_step *step, char *out, size_t size) {
    const ml_gemm *g = step->step->gemm;
    if (step->step->kind == ML_STEP_COPY) return "copy";
    if (step->attention)
        return step->step->attention->backward ? "cudnn attention gradient" : "cudnn attention";
    if (!g) return step->step->kernel->label ? step->step->kernel->label : "kernel";
    snprintf(out, size, "gemm %lldx%lldx%lld%s%s", (long long)g->m, (long long)g->n,
             (long long)g->k, g->accumulate ? " +=" : "",
             g->epilogue == ML_EPILOGUE_BIAS ? " +bias" : "");
    int64_t batch = g->batch[0] * g->batch[1] * g->batch[2];
    size_t length = strlen(out);
    if (batch != 1) snprintf(out + length, size - length, " x%lld", (long long)batch);
    return out;
}

static void print_step(const ml_executable *e, uint32_t i, float ms) {
    const cuda_step *step = &e->steps[i];
    const ml_origin *o =
        step->step->node ? ml_graph_origin(e->plan->graph, step->step->node) : NULL;
    char buffer[128];
    double seconds = ms > 0 ? 1e-3 * (double)ms : 1e-9;
    fprintf(stderr, "%5u %9.4f %8.0f %8.1f  %s", i, (double)ms,
            (double)step->step->bytes / seconds * 1e-9, step->step->flops / seconds * 1e-12,
            label_of(step, buffer, sizeof buffer));
    if (o && o->module && *o->module) fprintf(stderr, "  %s", o->module);
    if (o && o->file) fprintf(stderr, "  %s:%d", o->file, o->line);
    fprintf(stderr, "\n");
}

static void print_totals(const ml_executable *e, const float *ms) {
    static const char *const names[] = {"kernels", "gemm", "attention", "copies"};
    double time[4] = {0}, flops[4] = {0}, bytes[4] = {0}, total = 0;
    uint32_t count[4] = {0};
    for (uint32_t i = 0; i < e->step_count; i++) {
        const ml_step *step = e->steps[i].step;
        time[step->kind] += (double)ms[i];
        flops[step->kind] += step->flops;
        bytes[step->kind] += (double)step->bytes;
        count[step->kind]++;
        total += (double)ms[i];
    }
    for (int k = 0; k < 4; k++)
        if (count[k])
            fprintf(stderr, "%9s %6u steps %9.3f ms %8.0f GB/s %8.1f TFLOP/s\n", names[k], count[k],
                    time[k], bytes[k] / time[k] * 1e-6, flops[k] / time[k] * 1e-9);
    fprintf(stderr, "    total %6u steps %9.3f ms\n", e->step_count, total);
}

static ml_status time_steps(ml_executable *e, CUevent *events, float *ms) {
    CUstream stream = e->device->stream;
    for (uint32_t i = 0; i <= e->step_count; i++) CUDA_TRY(cuEventCreate(&events[i], 0));
    CUDA_TRY(cuEventRecord(events[0], stream));
    for (uint32_t i = 0; i < e->step_count; i++) {
        ML_TRY(cuda_enqueue(e, &e->steps[i]));
        CUDA_TRY(cuEventRecord(events[i + 1], stream));
        /* The first run stops at each step, so that a failing kernel is named. */
        if (e->runs == 1) CUDA_TRY(cuStreamSynchronize(stream));
    }
    CUDA_TRY(cuStreamSynchronize(stream));
    for (uint32_t i = 0; i < e->step_count; i++)
        CUDA_TRY(cuEventElapsedTime(&ms[i], events[i], events[i + 1]));
    return ML_OK;
}

ml_status cuda_run_timed(ml_executable *e) {
    CUevent *events = ml_alloc((e->step_count + 1) * sizeof *events);
    float *ms = ml_alloc((e->step_count + 1) * sizeof *ms);
    ml_status status = events && ms
                           ? time_steps(e, events, ms)
                           : ml_fail(ML_NO_MEMORY, "no memory to time %u steps", e->step_count);
    for (uint32_t i = 0; events && i <= e->step_count; i++)
        if (events[i]) cuda.cuEventDestroy(events[i]);
    if (status == ML_OK) {
        fprintf(stderr, "%5s %9s %8s %8s  %s\n", "step", "ms", "GB/s", "TFLOP/s", "kernel");
        for (uint32_t i = 0; i < e->step_count; i++) print_step(e, i, ms[i]);
        print_totals(e, ms);
    }
    ml_free(events);
    ml_free(ms);
    cuda_doing(NULL);
    return status;
}

/* ---- Checks
 * -------------------------------------------------------------------------------------- */
/* For the checker (check.c): storage contents on the host. Raises. */
void cuda_read_storage(void *executable, uint32_t storage, int64_t offset, int64_t bytes,
                       void *to) {
    ml_executable *e = executable;
    ML_CHECK(e->device->base.ops->download(&e->device->base, to,
                                           (const char *)e->addresses[storage] + offset, bytes));
}

ml_status cuda_run_checked(ml_executable *e) {
    ml_status status = ml_check_begin(e->checker);
    for (uint32_t i = 0; i < e->step_count && status == ML_OK; i++) {
        status = cuda_enqueue(e, &e->steps[i]);
        if (status == ML_OK) status = CUDA_OK(cuStreamSynchronize(e->device->stream));
        if (status == ML_OK) status = ml_check_step(e->checker, i);
    }
    cuda_doing(NULL);
    return status;
}
#endif
