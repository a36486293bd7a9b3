#ifdef MLUA_CUDA
/* Loops: recurrences whose step is no kernel of its own. The step is an executable; for each
 * position its pointers are set to the slices there, and its steps are put on the stream, or into
 * the graph that is being captured. Slices that are not where kernels expect storages are copied
 * (codegen/lower/lower.h). */
#include <string.h>

#include "runtime/device/cuda/cuda_internal.h"

typedef struct cuda_loop {
    ml_executable *body;
    char **inputs, **outputs; /* of the body, by number, at a position */
} cuda_loop;

void cuda_loop_load(ml_executable *e, cuda_step *step) {
    const ml_step *s = step->step;
    cuda_loop *loop = ML_NEW(e->arena, cuda_loop);
    size_t inputs = (size_t)(2 * s->read_count + s->write_count);
    loop->inputs = ML_NEW_ARRAY(e->arena, char *, inputs + 1);
    loop->outputs = ML_NEW_ARRAY(e->arena, char *, s->loop->plan->roots.output_count + 1);
    step->loop = loop;
    ML_CHECK(cuda_load_body(e->device, s->loop->plan, &loop->body));
    for (int i = 0; i < ML_MAX_MESH; i++) e->collects[i] |= loop->body->collects[i];
}

void cuda_loop_unload(cuda_step *step) {
    if (step->loop) cuda_unload(step->loop->body);
    step->loop = NULL;
}

static ml_status copy(const ml_executable *e, char *to, const char *from, int64_t bytes) {
    if (to == from || bytes == 0) return ML_OK;
    CUDA_TRY(cuMemcpyDtoDAsync((CUdeviceptr)(uintptr_t)to, (CUdeviceptr)(uintptr_t)from,
                               (size_t)bytes, e->device->stream));
    return ML_OK;
}

static char *work_at(const cuda_step *step, int64_t offset) {
    return (char *)step->pointers[step->step->loop->workspace] + offset;
}

static char *slice_at(const cuda_step *step, int value, int64_t at, int64_t bytes) {
    return (char *)step->pointers[value] + at * bytes;
}

/* Of the i-th position that is visited; also after the last. */
static int64_t position(const ml_loop *loop, int64_t i) {
    return loop->reverse ? loop->length - 1 - i : i;
}

/* Where carried value k is before the i-th position, and after the last. */
static char *carried_at(const cuda_step *step, const ml_loop_carried *k, int64_t i) {
    const ml_loop *loop = step->step->loop;
    if (i == loop->length && k->final >= 0 && !k->final_copied) return step->pointers[k->final];
    if (k->history >= 0 && !k->history_copied && i < loop->length)
        return slice_at(step, k->history, position(loop, i), k->bytes);
    if (i == 0 && k->initial >= 0 && !k->initial_copied) return step->pointers[k->initial];
    return work_at(step, k->offset[i & 1]);
}

static ml_status begin(const ml_executable *e, const cuda_step *step) {
    const ml_loop *loop = step->step->loop;
    for (int i = 0; i < loop->carried_count; i++) {
        const ml_loop_carried *k = &loop->carried[i];
        char *first = carried_at(step, k, 0);
        if (k->initial >= 0)
            ML_TRY(copy(e, first, step->pointers[k->initial], k->bytes));
        else if (k->bytes > 0)
            CUDA_TRY(cuMemsetD8Async((CUdeviceptr)(uintptr_t)first, 0, (size_t)k->bytes,
                                     e->device->stream));
    }
    for (int i = 0; i < loop->input_count; i++) {
        const ml_loop_input *in = &loop->inputs[i];
        if (in->staged >= 0 && in->bytes == 0)
            ML_TRY(copy(e, work_at(step, in->staged), step->pointers[in->value], in->all));
    }
    return ML_OK;
}

static ml_status end(const ml_executable *e, const cuda_step *step) {
    const ml_loop *loop = step->step->loop;
    for (int i = 0; i < loop->carried_count; i++) {
        const ml_loop_carried *k = &loop->carried[i];
        if (k->final_copied)
            ML_TRY(copy(e, step->pointers[k->final], carried_at(step, k, loop->length), k->bytes));
    }
    return ML_OK;
}

/* What the body reads and writes at the i-th position. */
static void aim(const cuda_step *step, int64_t i) {
    const ml_loop *loop = step->step->loop;
    cuda_loop *l = step->loop;
    for (int k = 0; k < loop->input_count; k++) {
        const ml_loop_input *in = &loop->inputs[k];
        l->inputs[in->input] = in->staged >= 0
                                   ? work_at(step, in->staged)
                                   : slice_at(step, in->value, position(loop, i), in->bytes);
    }
    for (int k = 0; k < loop->stacked_count; k++) {
        const ml_loop_stacked *out = &loop->stacked[k];
        l->outputs[out->output] = out->staged >= 0
                                      ? work_at(step, out->staged)
                                      : slice_at(step, out->value, position(loop, i), out->bytes);
    }
    for (int k = 0; k < loop->carried_count; k++) {
        const ml_loop_carried *carried = &loop->carried[k];
        l->inputs[carried->input] = carried_at(step, carried, i);
        l->outputs[carried->output] = carried_at(step, carried, i + 1);
    }
}

static ml_status bind(const cuda_step *step, int64_t i, bool choose) {
    ml_executable *body = step->loop->body;
    const ml_schedule *s = body->plan->schedule;
    const ml_loop *loop = step->step->loop;
    char *arena = loop->workspace >= 0 ? work_at(step, loop->arena) : NULL;
    aim(step, i);
    for (uint32_t k = 0; k < s->storages.count; k++) {
        const ml_storage *storage = &s->storages.at[k];
        body->addresses[k] = storage->kind == ML_STORAGE_INPUT   ? step->loop->inputs[storage->id]
                             : storage->kind == ML_STORAGE_SAVED ? step->loop->outputs[storage->id]
                                                                 : arena + storage->offset;
    }
    return cuda_bind_body(body, choose);
}

ml_status cuda_loop_bind(ml_executable *e, const cuda_step *step) {
    (void)e;
    return bind(step, 0, true);
}

/* Slices that the body reads from copies. */
static ml_status stage_in(const ml_executable *e, const cuda_step *step, int64_t i) {
    const ml_loop *loop = step->step->loop;
    for (int k = 0; k < loop->input_count; k++) {
        const ml_loop_input *in = &loop->inputs[k];
        if (in->staged >= 0 && in->bytes > 0)
            ML_TRY(copy(e, work_at(step, in->staged),
                        slice_at(step, in->value, position(loop, i), in->bytes), in->bytes));
    }
    for (int k = 0; k < loop->carried_count; k++) {
        const ml_loop_carried *carried = &loop->carried[k];
        if (carried->history_copied)
            ML_TRY(copy(e, slice_at(step, carried->history, position(loop, i), carried->bytes),
                        carried_at(step, carried, i), carried->bytes));
    }
    return ML_OK;
}

static ml_status stage_out(const ml_executable *e, const cuda_step *step, int64_t i) {
    const ml_loop *loop = step->step->loop;
    for (int k = 0; k < loop->stacked_count; k++) {
        const ml_loop_stacked *out = &loop->stacked[k];
        if (out->staged >= 0)
            ML_TRY(copy(e, slice_at(step, out->value, position(loop, i), out->bytes),
                        work_at(step, out->staged), out->bytes));
    }
    return ML_OK;
}

ml_status cuda_loop_run(ml_executable *e, const cuda_step *step) {
    ml_executable *body = step->loop->body;
    ML_TRY(begin(e, step));
    for (int64_t i = 0; i < step->step->loop->length; i++) {
        ML_TRY(bind(step, i, false));
        ML_TRY(stage_in(e, step, i));
        for (uint32_t k = 0; k < body->step_count; k++) ML_TRY(cuda_enqueue(body, &body->steps[k]));
        ML_TRY(stage_out(e, step, i));
    }
    cuda_doing(step->what);
    return end(e, step);
}

int64_t cuda_loop_launches(const cuda_step *step) {
    if (!step->loop) return step->launch_count > 1 ? step->launch_count : 1;
    const ml_loop *loop = step->step->loop;
    int64_t each = loop->input_count + loop->stacked_count + loop->carried_count; /* copies */
    for (uint32_t i = 0; i < step->loop->body->step_count; i++)
        each += cuda_loop_launches(&step->loop->body->steps[i]);
    return each * loop->length;
}
#endif
