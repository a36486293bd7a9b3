#ifdef MLUA_CUDA
#include "runtime/device/cuda/cuda_ce_collectives.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/base/clock.h"
#include "runtime/base/knobs.h"
#include "runtime/base/machine.h"
#include "runtime/base/process.h"

enum { KINDS = 2, WORDS_BYTES = 2 << 20, LEAST_ROOM = 64 << 10 };

/* ---- Exchanges ------------------------------------------------------------------------------- */
static int64_t ranks_of(const cuda_device *d, int axis) {
    return ml_ranks_row(d->base.ranks, axis).size;
}

static int place_of(const cuda_device *d, int axis) {
    return (int)ml_ranks_row(d->base.ranks, axis).at;
}

/* Whether copies may serve an axis of so many ranks. */
static bool fits(int64_t ranks) {
    return ranks > 1 && ranks <= CE_RANKS;
}

/* The rank of the job at a place along the axis. */
static int rank_at(const cuda_device *d, int axis, int place) {
    ml_row row = ml_ranks_row(d->base.ranks, axis);
    return d->base.ranks->rank + (place - (int)row.at) * (int)row.step;
}

static ml_status gather(cuda_device *d, int axis, const cuda_offer *mine, int64_t count,
                        cuda_offer *all) {
    const ml_collective_step step = {.kind = ML_COLLECTIVE_ALL_GATHER,
                                     .mesh_axis = axis,
                                     .ranks = ranks_of(d, axis),
                                     .count = count * CUDA_OFFER_WORDS,
                                     .dtype = ML_I64};
    return cuda_nccl_collect(&d->base, &step, mine, all);
}

/* Whether it is so on all ranks along the axis. */
static ml_status agree(cuda_device *d, int axis, bool *able) {
    const ml_collective_step least = {.kind = ML_COLLECTIVE_ALL_REDUCE,
                                      .mesh_axis = axis,
                                      .ranks = ranks_of(d, axis),
                                      .count = 1,
                                      .dtype = ML_I64,
                                      .combine = ML_COMBINE_MIN};
    int64_t mine = *able, all = 0;
    ML_TRY(cuda_nccl_collect(&d->base, &least, &mine, &all));
    *able = all != 0;
    return ML_OK;
}

/* ---- The device's part ----------------------------------------------------------------------- */
int64_t cuda_ce_reserve(const cuda_device *d) {
    return d->base.options.peer ? ml_copy_bytes(d->base.target.memory_bytes) + WORDS_BYTES : 0;
}

static ml_status words_make(cuda_device *d) {
    ML_TRY(cuda_nccl_stream(&d->ce->escape));
    ML_TRY(d->base.ops->allocate(&d->base, WORDS_BYTES, &d->ce->words));
    ML_TRY(d->base.ops->zero(&d->base, d->ce->words, WORDS_BYTES));
    return cuda_wait_for(d, NULL);
}

static ml_status ce_open(cuda_device *d) {
    if (d->ce) return ML_OK;
    d->ce = ml_alloc(sizeof *d->ce);
    return d->ce ? words_make(d) : ml_fail(ML_NO_MEMORY, "no memory for copies between GPUs");
}

/* Where the words of an axis begin, in each rank's block. */
static CUdeviceptr words_of(int axis) {
    return (CUdeviceptr)(axis * KINDS * CE_RANKS * CE_WORD_BYTES);
}

static bool open_words(cuda_device *d, int axis, const cuda_offer *all) {
    cuda_ce_axis *a = &d->ce->axis[axis];
    for (int i = 0; i < a->ranks; i++) {
        CUdeviceptr words = (CUdeviceptr)(uintptr_t)d->ce->words;
        if (i != a->at) {
            uint32_t place = cuda_ipc_open(d, rank_at(d, axis, i), &all[i], true);
            if (place == CUDA_SHARE_NONE) return false;
            words = cuda_ipc_address(d, place, &all[i]);
        }
        a->words[i] = words + words_of(axis);
    }
    return true;
}

/* The axes that copies may serve divide the buffer's memory. */
static int64_t buffer_share(const cuda_device *d) {
    int64_t axes = 0;
    for (int i = 0; i < d->base.ranks->layout->count; i++) axes += fits(ranks_of(d, i));
    return ml_copy_bytes(d->base.target.memory_bytes) / (axes > 0 ? axes : 1);
}

static ml_status axis_make(cuda_device *d, cuda_ce_axis *a) {
    const int wanted = d->base.options.peer, usual = 3;
    a->stream_count = wanted < 2 ? usual : wanted < CE_STREAMS ? wanted : CE_STREAMS;
    if (a->stream_count > a->ranks - 1) a->stream_count = a->ranks - 1;
    for (int i = 0; i < a->stream_count; i++) {
        ML_TRY(cuda_nccl_stream(&a->streams[i]));
        CUDA_TRY(cuEventCreate(&a->copied[i], CU_EVENT_DISABLE_TIMING));
    }
    for (int i = 0; i < CE_HALVES; i++)
        CUDA_TRY(cuEventCreate(&a->added[i], CU_EVENT_DISABLE_TIMING));
    CUDA_TRY(cuEventCreate(&a->begun, CU_EVENT_DISABLE_TIMING));
    return d->base.ops->allocate(&d->base, a->buffer_bytes, &a->buffer);
}

/* Once for each axis: open the words of all ranks along it. */
static ml_status connect_axis(cuda_device *d, int axis) {
    cuda_ce_axis *a = &d->ce->axis[axis];
    if (a->connected) return ML_OK;
    double began = ml_clock_now();
    a->ranks = (int)ranks_of(d, axis);
    a->at = place_of(d, axis);
    a->buffer_bytes = buffer_share(d);
    cuda_offer mine = cuda_ipc_offer(d, d->ce->words), all[CE_RANKS];
    ML_TRY(gather(d, axis, &mine, 1, all));
    bool able = a->buffer_bytes / CE_HALVES / a->ranks >= LEAST_ROOM && open_words(d, axis, all);
    ML_TRY(agree(d, axis, &able));
    if (able) ML_TRY(axis_make(d, a));
    a->able = able;
    a->connected = true;
    ml_debug(1, "peer: %d GPUs along %s %s (%.2f s)\n", a->ranks,
             d->base.ranks->layout->axis[axis].name,
             able ? "copy from one another's memory" : "cannot open one another's memory",
             ml_clock_now() - began);
    return ML_OK;
}

/* ---- Executables ----------------------------------------------------------------------------- */
static bool serves(const cuda_device *d, const cuda_step *step) {
    const ml_collective_step *c = step->step->collective;
    if (step->step->kind != ML_STEP_COLLECTIVE || c->ticket == 0 || c->count == 0) return false;
    if (!fits(ranks_of(d, c->mesh_axis))) return false;
    if (c->kind == ML_COLLECTIVE_ALL_GATHER) return true;
    return c->kind == ML_COLLECTIVE_REDUCE_SCATTER && c->combine == ML_COMBINE_SUM &&
           cuda_ce_adds(c->dtype);
}

/* What copies may serve of an executable, along one axis. */
typedef struct {
    ml_executable *e;
    int axis;
    uint32_t count;
    uint32_t *steps;
    cuda_offer *mine, *all; /* [count], and by rank */
    struct cuda_ce_step *ce_steps;
    int64_t *able; /* [count] */
} candidates;

/* What the others have of each step; false where something cannot be opened. */
static bool open_steps(const candidates *c) {
    ml_executable *e = c->e;
    const cuda_ce_axis *a = &e->device->ce->axis[c->axis];
    for (uint32_t i = 0; i < c->count; i++) {
        c->able[i] = 1;
        for (int r = 0; r < a->ranks; r++) c->able[i] &= c->all[(size_t)r * c->count + i].able != 0;
        for (int r = 0; r < a->ranks && c->able[i]; r++) {
            const cuda_offer *offer = &c->all[(size_t)r * c->count + i];
            c->ce_steps[i].from[r] = (CUdeviceptr)(uintptr_t)e->steps[c->steps[i]].pointers[0];
            if (r == a->at) continue;
            uint32_t place = cuda_ipc_open(e->device, rank_at(e->device, c->axis, r), offer, false);
            if (place == CUDA_SHARE_NONE) return false;
            e->opened[e->opened_count++] = place;
            c->ce_steps[i].from[r] = cuda_ipc_address(e->device, place, offer);
        }
    }
    return true;
}

static const struct cuda_block *block_of(const cuda_device *d, uint64_t serial) {
    for (uint32_t i = 0; i < d->block_count; i++)
        if (d->blocks[i].serial == serial) return &d->blocks[i];
    return NULL;
}

/* Each block that is opened costs time, on all other ranks: only those with most bytes are offered,
 * of which one holds all temporaries. NCCL has what is elsewhere. */
static void few_blocks(const candidates *c) {
    enum { BLOCKS = 4 };
    uint64_t chosen[BLOCKS] = {0};
    for (int best = 0; best < BLOCKS; best++) {
        int64_t most = 0;
        for (uint32_t i = 0; i < c->count; i++) {
            const struct cuda_block *b = block_of(c->e->device, c->mine[i].serial);
            bool known = !b;
            for (int k = 0; k < best; k++) known = known || chosen[k] == c->mine[i].serial;
            if (known || b->bytes <= most) continue;
            most = b->bytes;
            chosen[best] = c->mine[i].serial;
        }
    }
    for (uint32_t i = 0; i < c->count; i++) {
        bool found = false;
        for (int k = 0; k < BLOCKS; k++) found = found || chosen[k] == c->mine[i].serial;
        if (!found) c->mine[i].able = 0;
    }
}

static ml_status exchange(const candidates *c) {
    cuda_device *d = c->e->device;
    ML_TRY(connect_axis(d, c->axis));
    if (!d->ce->axis[c->axis].able) return ML_OK;
    ML_TRY(cuda_ce_load(d));
    for (uint32_t i = 0; i < c->count; i++)
        c->mine[i] = cuda_ipc_offer(d, c->e->steps[c->steps[i]].pointers[0]);
    few_blocks(c);
    ML_TRY(gather(d, c->axis, c->mine, c->count, c->all));
    if (!open_steps(c)) memset(c->able, 0, c->count * sizeof *c->able);
    return ML_OK;
}

static ml_status exchange_axis(ml_executable *e, int axis, uint32_t *first, int64_t *able) {
    size_t ranks = (size_t)ranks_of(e->device, axis);
    candidates c = {.e = e, .axis = axis, .ce_steps = e->ce_steps + *first, .able = able + *first};
    c.steps = ml_alloc((size_t)e->step_count * sizeof *c.steps);
    for (uint32_t i = 0; c.steps && i < e->step_count; i++)
        if (serves(e->device, &e->steps[i]) && e->steps[i].step->collective->mesh_axis == axis)
            c.steps[c.count++] = i;
    c.mine = ml_alloc((c.count + 1) * sizeof *c.mine);
    c.all = ml_alloc((c.count + 1) * ranks * sizeof *c.all);
    ml_status status = c.steps && c.mine && c.all
                           ? ML_OK
                           : ml_fail(ML_NO_MEMORY, "no memory for copies between GPUs");
    if (status == ML_OK && c.count > 0) status = exchange(&c);
    for (uint32_t i = 0; i < c.count; i++) e->steps[c.steps[i]].ce = &c.ce_steps[i];
    *first += c.count;
    ml_free(c.steps);
    ml_free(c.mine);
    ml_free(c.all);
    return status;
}

static void choose(ml_executable *e, const int64_t *able, uint32_t count, double began) {
    uint32_t served = 0;
    for (uint32_t i = 0; i < e->step_count; i++) {
        if (e->steps[i].ce && !able[e->steps[i].ce - e->ce_steps]) e->steps[i].ce = NULL;
        served += e->steps[i].ce != NULL;
    }
    ml_debug(1,
             "peer: %u of %u collectives beside other work of %s go by copies; %u allocations of "
             "others are open; %.2f s\n",
             served, count, e->plan->roots.name ? e->plan->roots.name : "a program",
             cuda_ipc_count(e->device), ml_clock_now() - began);
}

ml_status cuda_ce_bind(ml_executable *e) {
    cuda_device *d = e->device;
    size_t count = 0, places = 0;
    double began = ml_clock_now();
    cuda_ce_unbind(e);
    if (!d->base.options.peer || !d->nccl || e->plan->pipeline_task) return ML_OK;
    for (uint32_t i = 0; i < e->step_count; i++) {
        if (!serves(d, &e->steps[i])) continue;
        places += (size_t)ranks_of(d, e->steps[i].step->collective->mesh_axis);
        count++;
    }
    if (count == 0) return ML_OK;
    ML_TRY(ce_open(d));
    int64_t *able = ml_alloc(count * sizeof *able);
    e->ce_steps = ml_alloc(count * sizeof *e->ce_steps);
    e->opened = ml_alloc(places * sizeof *e->opened);
    e->opened_generation = d->opened_generation;
    ml_status status = able && e->ce_steps && e->opened
                           ? ML_OK
                           : ml_fail(ML_NO_MEMORY, "no memory for copies between GPUs");
    uint32_t first = 0;
    for (int axis = 0; axis < ML_MAX_MESH && status == ML_OK; axis++)
        if (e->collects[axis]) status = exchange_axis(e, axis, &first, able);
    if (status == ML_OK) status = cuda_collect_least(e, able, (int64_t)count);
    if (status == ML_OK) choose(e, able, (uint32_t)count, began);
    ml_free(able);
    return status;
}

void cuda_ce_unbind(ml_executable *e) {
    for (uint32_t i = 0; i < e->opened_count; i++)
        cuda_ipc_close(e->device, e->opened[i], e->opened_generation);
    for (uint32_t i = 0; i < e->step_count; i++) e->steps[i].ce = NULL;
    ml_free(e->opened);
    ml_free(e->ce_steps);
    e->opened = NULL;
    e->ce_steps = NULL;
    e->opened_count = 0;
}

/* A block must not be given back while others have it open. Ranks that copy from one another run
 * the same programs, so they are here at the same time; their words stay open. */
ml_status cuda_ce_forget(ml_device *device) {
    cuda_device *d = (cuda_device *)device;
    bool closed = true;
    if (!d->ce || d->ce->aborted) return ML_OK;
    ML_TRY(cuda_prefetch_await_all(d));
    ML_TRY(cuda_wait_for(d, NULL));
    cuda_ipc_forget(d);
    for (int i = 0; i < ML_MAX_MESH; i++)
        if (d->ce->axis[i].able) ML_TRY(agree(d, i, &closed));
    return ML_OK;
}

/* ---- The end --------------------------------------------------------------------------------- */
/* Sets all words again and again: each is put back by the stream that has waited for it. */
static void *let_go(void *device) {
    cuda_device *d = device;
    cuda_ce_state *p = d->ce;
    const struct timespec pause = {.tv_nsec = 200000};
    CUdeviceptr words = (CUdeviceptr)(uintptr_t)p->words;
    enum { WORDS = ML_MAX_MESH * KINDS * CE_RANKS };
    CUstreamBatchMemOpParams ops[WORDS / 2];
    cuda.cuCtxSetCurrent(d->context);
    while (!atomic_load(&p->ended)) {
        for (int half = 0; half < 2; half++) {
            memset(ops, 0, sizeof ops);
            for (int i = 0; i < WORDS / 2; i++) {
                ops[i].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                ops[i].writeValue.address =
                    words + (CUdeviceptr)((half * WORDS / 2 + i) * CE_WORD_BYTES);
                ops[i].writeValue.value = 1;
            }
            if (cuda.cuStreamBatchMemOp(p->escape, WORDS / 2, ops, 0) != CUDA_SUCCESS) return NULL;
        }
        if (cuda.cuStreamSynchronize(p->escape) != CUDA_SUCCESS) return NULL;
        nanosleep(&pause, NULL);
    }
    return NULL;
}

void cuda_ce_abort_begin(cuda_device *d) {
    cuda_ce_state *p = d->ce;
    if (!p || p->aborted || !p->words) return;
    p->aborted = true;
    p->letting_go = ml_process_thread(&p->thread, let_go, d) == 0;
}

/* Once nothing is under way any more; what will not end in ten seconds ends with the process. */
void cuda_ce_abort_end(cuda_device *d) {
    cuda_ce_state *p = d->ce;
    const struct timespec pause = {.tv_nsec = 1000000};
    if (!p || !p->letting_go) return;
    for (int i = 0; i < 10000 && cuda.cuStreamQuery(d->stream) == CUDA_ERROR_NOT_READY; i++)
        nanosleep(&pause, NULL);
    for (int k = 0; k < ML_MAX_MESH * CE_STREAMS; k++) {
        const cuda_ce_axis *a = &p->axis[k / CE_STREAMS];
        CUstream stream = a->streams[k % CE_STREAMS];
        for (int i = 0; stream && i < 1000 && cuda.cuStreamQuery(stream) == CUDA_ERROR_NOT_READY;
             i++)
            nanosleep(&pause, NULL);
    }
    atomic_store(&p->ended, true);
    pthread_join(p->thread, NULL);
    p->letting_go = false;
}

static void axis_close(cuda_ce_axis *a) {
    for (int i = 0; i < CE_STREAMS; i++) {
        if (a->streams[i]) CUDA_OK(cuStreamDestroy(a->streams[i]));
        if (a->copied[i]) CUDA_OK(cuEventDestroy(a->copied[i]));
    }
    for (int i = 0; i < CE_HALVES; i++)
        if (a->added[i]) CUDA_OK(cuEventDestroy(a->added[i]));
    if (a->begun) CUDA_OK(cuEventDestroy(a->begun));
}

void cuda_ce_close(cuda_device *d) {
    cuda_ce_state *p = d->ce;
    if (!p) return;
    cuda_ce_abort_end(d);
    for (int i = 0; i < ML_MAX_MESH; i++) axis_close(&p->axis[i]);
    if (p->escape) CUDA_OK(cuStreamDestroy(p->escape));
    if (p->module) CUDA_OK(cuModuleUnload(p->module));
    ml_free(p);
    d->ce = NULL;
}
#endif
