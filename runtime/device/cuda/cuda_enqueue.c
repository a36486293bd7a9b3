#ifdef MLUA_CUDA
/* Steps on their streams: one, all, and all of them as one CUDA graph. */
#include <stdio.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/base/machine.h"
#include "runtime/device/cuda/cuda_internal.h"

void cuda_gemm_operands(const cuda_step *step, void *operands[CUDA_GEMM_OPERANDS]) {
    operands[0] = step->pointers[0];
    operands[1] = step->pointers[1];
    operands[2] = step->pointers[step->step->read_count];
    operands[3] = step->step->gemm->epilogue == ML_EPILOGUE_BIAS ? step->pointers[2] : NULL;
    operands[4] = step->step->gemm->scaled ? step->pointers[step->step->read_count - 1] : NULL;
}

void cuda_graph_forget(ml_executable *e) {
    if (!e->graph) return;
    cuda_wait_for(e->device, NULL);
    CUDA_OK(cuGraphExecDestroy(e->graph));
    e->graph = NULL;
}

static ml_comm *ranks_of(const ml_executable *e) {
    return e->device->base.ranks->comm;
}

/* A launch that need not wait until the kernel ahead of it has ended: it does so itself. */
static ml_status launch_early(cuda_device *d, const cuda_launch *launch, void **parameters) {
    const ml_kernel *k = launch->kernel;
    CUlaunchAttribute early = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION};
    early.value.programmaticStreamSerializationAllowed = 1;
    const CUlaunchConfig config = {.gridDimX = k->grid[0],
                                   .gridDimY = k->grid[1],
                                   .gridDimZ = k->grid[2],
                                   .blockDimX = k->block,
                                   .blockDimY = 1,
                                   .blockDimZ = 1,
                                   .sharedMemBytes = k->shared_bytes,
                                   .hStream = d->stream,
                                   .attrs = &early,
                                   .numAttrs = 1};
    CUDA_TRY(cuLaunchKernelEx(&config, launch->function, parameters, NULL));
    return ML_OK;
}

/* Steps of decoding are short, so that what lies between them counts. The first kernel of a run
 * waits for all before it, other programs' too: the rest may read what no step writes at once. */
static bool starts_early(const ml_executable *e, const ml_kernel *k) {
    enum { ARCH = 90 };
    const ml_target *target = &e->device->base.target;
    return e->plan->roots.often && k->early && e->launched && !target->no_early &&
           cuda.cuLaunchKernelEx && target->arch >= ARCH && !e->device->nccl;
}

static ml_status launch_kernel(ml_executable *e, const cuda_launch *launch) {
    const ml_kernel *k = launch->kernel;
    cuda_device *d = e->device;
    void *parameters[] = {launch->arguments};
    if (k->grid[0] == 0 || k->grid[1] == 0 || k->grid[2] == 0) return ML_OK; /* nothing to do */
    if (starts_early(e, k)) return launch_early(d, launch, parameters);
    e->launched = true;
    if (k->cooperative) {
        CUDA_TRY(cuLaunchCooperativeKernel(launch->function, k->grid[0], k->grid[1], k->grid[2],
                                           k->block, 1, 1, k->shared_bytes, d->stream, parameters));
        return ML_OK;
    }
    CUDA_TRY(cuLaunchKernel(launch->function, k->grid[0], k->grid[1], k->grid[2], k->block, 1, 1,
                            k->shared_bytes, d->stream, parameters, NULL));
    return ML_OK;
}

/* One contiguous operand of the step to another of the same type. */
static ml_status copy_operand(ml_executable *e, const cuda_step *step, int from, int to) {
    const ml_value *v = &e->plan->schedule->values.at[step->step->values[from]];
    int64_t bytes = ml_type_bytes(&v->type);
    if (bytes == 0 || step->pointers[from] == step->pointers[to]) return ML_OK;
    CUDA_TRY(cuMemcpyDtoDAsync((CUdeviceptr)(uintptr_t)step->pointers[to],
                               (CUdeviceptr)(uintptr_t)step->pointers[from], (size_t)bytes,
                               e->device->stream));
    return ML_OK;
}

ml_status cuda_enqueue(ml_executable *e, const cuda_step *step) {
    cuda_doing(step->what);
    if (step == e->steps) e->launched = false;
    if (step->gemm) {
        void *operands[CUDA_GEMM_OPERANDS];
        int reads = step->step->read_count, addend = reads - 1 - step->step->gemm->scaled;
        cuda_gemm_operands(step, operands);
        if (step->step->gemm->accumulate) /* mostly it is there already */
            ML_TRY(copy_operand(e, step, addend, reads));
        return cuda_gemm_run(e->device, step->gemm, operands);
    }
    if (step->attention) return cuda_attention_run(e->device, step->attention);
    if (step->loop) return cuda_loop_run(e, step);
    if (step->step->kind == ML_STEP_COPY) return copy_operand(e, step, 0, 1);
    if (step->step->kind == ML_STEP_HOST_COPY) return cuda_host_copy_here(step, e->device->stream);
    if (step->step->kind == ML_STEP_COLLECTIVE) return cuda_collect_alone(e, step);
    for (int i = 0; i < step->launch_count; i++) ML_TRY(launch_kernel(e, &step->launches[i]));
    return ML_OK;
}

static ml_status enqueue_timed(ml_executable *e, const cuda_step *step) {
    ML_TRY(cuda_time_begins(e, step, e->device->stream));
    ML_TRY(cuda_enqueue(e, step));
    return cuda_time_ends(e, step, e->device->stream);
}

ml_status cuda_enqueue_all(ml_executable *e) {
    uint32_t next_mark = 0, next_await = 0;
    for (uint32_t i = 0; i < e->step_count; i++) {
        const cuda_step *step = &e->steps[i];
        ML_TRY(cuda_prefetch_await(e, i, &next_await));
        if (step->step->kind == ML_STEP_COLLECTIVE)
            ML_TRY(cuda_collect_group(e, step));
        else if (step->step->kind == ML_STEP_HOST_COPY)
            ML_TRY(cuda_host_copy_start(e, step));
        else if (step->step->kind == ML_STEP_WAIT && step->step->host_copy)
            ML_TRY(cuda_host_copy_wait(e, step));
        else if (step->step->kind == ML_STEP_WAIT)
            ML_TRY(cuda_collect_wait(e, step));
        else
            ML_TRY(enqueue_timed(e, step));
        ML_TRY(cuda_lead_mark(e, i, &next_mark));
    }
    cuda_doing(NULL);
    return ML_OK;
}

/* A graph has memory for each launch: many positions of a loop are put on the stream by each run.
 */
static ml_status check_size(const ml_executable *e) {
    enum { MOST_LAUNCHES = 32768 };
    int64_t launches = 0;
    for (uint32_t i = 0; i < e->step_count; i++)
        if (e->steps[i].loop) launches += cuda_loop_launches(&e->steps[i]);
    if (launches <= MOST_LAUNCHES) return ML_OK;
    return ml_fail(ML_INVALID, "its loops are %lld launches", (long long)launches);
}

/* Capture the whole step. Where that fails, runs stay eager: slower, but right. */
static ml_status capture(ml_executable *e) {
    CUgraph graph = NULL;
    CUgraphExec whole = NULL;
    CUstream stream = e->device->stream;
    ML_TRY(check_size(e));
    CUDA_TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    e->captures = e->led = true;
    ml_status status = cuda_enqueue_all(e);
    e->captures = e->led = false;
    CUresult result = cuda.cuStreamEndCapture(stream, &graph);
    if (status == ML_OK && result != CUDA_SUCCESS) status = cuda_fail(result, "cuStreamEndCapture");
    if (status == ML_OK) status = CUDA_OK(cuGraphInstantiate(&whole, graph, 0));
    if (status == ML_OK) e->graph = whole;
    ml_error error = *ml_error_last();
    if (graph) CUDA_OK(cuGraphDestroy(graph));
    *ml_error_last() = error;
    return status;
}

void cuda_note_run(const ml_executable *e) {
    const char *name = e->plan->roots.name;
    char note[128];
    snprintf(note, sizeof note, "%s %llu", name ? name : "run", (unsigned long long)e->runs);
    ml_comm_note(ranks_of(e), note);
}

/* A graph puts what several streams do on channels of its own, where copies of one wait behind
 * those of another: a step of gpt-1.3b on two H200s takes 3 % longer as a graph with split tensors,
 * 6 % with split sequences, one with copies to the host 2 to 6 %. So these run on their streams,
 * where the device works for longer than the host needs to put them there. Ranks choose alike, by
 * the plan. */
static bool runs_on_streams(const ml_executable *e) {
    const double start = 20e-6; /* seconds of the host for a step, at most */
    bool copies = false;
    const int asked = e->device->base.options.graphs;
    if (e->prefetches) return true; /* a graph ends with all that it has begun */
    if (asked >= 0) return !asked;
    for (uint32_t i = 0; i < e->step_count; i++)
        copies |= e->steps[i].ce != NULL || e->steps[i].step->kind == ML_STEP_HOST_COPY;
    return copies && e->plan->flops / ml_machine_planned.product_flops > start * e->step_count;
}

/* Ranks replay graphs only if all that share collectives have one. */
ml_status cuda_graph_capture(ml_executable *e) {
    e->graph_refused = runs_on_streams(e);
    if (e->graph_refused) return ML_OK;
    cuda_doing("the capture of the step");
    if (e->device->nccl) ml_comm_busy(ranks_of(e), "capturing the step");
    int64_t captured = capture(e) == ML_OK;
    if (!captured)
        ml_debug(1, "cuda: no graph of the step, it runs eagerly: %s\n", ml_error_last()->text);
    else
        ml_debug(1, "cuda: a run of program \"%s\" is the launch of one graph\n",
                 e->plan->roots.name ? e->plan->roots.name : "");
    ML_TRY(cuda_collect_least(e, &captured, 1));
    if (!captured) cuda_graph_forget(e);
    e->graph_refused = !captured;
    if (e->device->nccl) cuda_note_run(e);
    return ML_OK;
}

ml_status cuda_run_plain(ml_executable *e) {
    if (!e->graph && e->runs > 1 && !e->graph_refused) ML_TRY(cuda_graph_capture(e));
    ML_TRY(cuda_lead_start(e));
    e->led = e->leads;
    if (e->graph) {
        cuda_doing("the replay of the step");
        CUDA_TRY(cuGraphLaunch(e->graph, e->device->stream));
    } else {
        ML_TRY(cuda_enqueue_all(e));
    }
    cuda_doing(NULL);
    if (e->marks.count > 0) e->device->marked = e;
    return ML_OK;
}
#endif
