#ifdef MLUA_CUDA
#include "runtime/device/cuda_pull.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/knobs.h"

enum { KINDS = 2, WORD_BYTES = 32, WORDS_BYTES = 2 << 20, LEAST_ROOM = 64 << 10 };

/* What a rank tells the others of an operand, or of its words: of a block that they can open. */
typedef struct {
    int64_t able; /* 0: it cannot be opened */
    int64_t offset;
    uint64_t serial, host;
    CUipcMemHandle handle;
} pull_offer;

/* ---- Exchanges ----------------------------------------------------------------------------------
 */
static int64_t ranks_of(const cuda_device *d, int axis) {
    return d->base.ranks->layout->axis[axis].size;
}

static int place_of(const cuda_device *d, int axis) {
    return (int)ml_layout_coordinate(d->base.ranks->layout, d->base.ranks->rank, axis);
}

/* The rank of the job at a place along the axis. */
static int rank_at(const cuda_device *d, int axis, int place) {
    const ml_layout *layout = d->base.ranks->layout;
    int step = 1;
    for (int i = axis + 1; i < layout->count; i++) step *= (int)layout->axis[i].size;
    return d->base.ranks->rank + (place - place_of(d, axis)) * step;
}

static ml_status gather(cuda_device *d, int axis, const pull_offer *mine, int64_t count,
                        pull_offer *all) {
    const ml_collective_step step = {.op = ML_OP_ALL_GATHER,
                                     .mesh_axis = axis,
                                     .ranks = ranks_of(d, axis),
                                     .count =
                                         count * (int64_t)(sizeof(pull_offer) / sizeof(int64_t)),
                                     .dtype = ML_I64};
    return cuda_nccl_collect(&d->base, &step, mine, all);
}

/* Whether it is so on all ranks along the axis. */
static ml_status agree(cuda_device *d, int axis, bool *able) {
    const ml_collective_step least = {.op = ML_OP_ALL_REDUCE,
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

/* Ranks of one host have the same; a block of another host cannot be opened in any case. */
static uint64_t host_hash(void) {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    return ml_hash(name, strlen(name), 0);
}

/* Ranks may have different drivers: all of them exchange offers all the same. */
static bool driver_able(void) {
    return cuda_driver_shares() && cuda.cuStreamBatchMemOp;
}

static const struct cuda_block *block_of(const cuda_device *d, uint64_t serial) {
    for (uint32_t i = 0; i < d->block_count; i++)
        if (d->blocks[i].serial == serial) return &d->blocks[i];
    return NULL;
}

static void offer_make(const cuda_device *d, const void *memory, pull_offer *offer) {
    CUdeviceptr base = 0, at = (CUdeviceptr)(uintptr_t)memory;
    size_t size = 0;
    *offer = (pull_offer){.host = d->pulls->host};
    for (uint32_t i = 0; i < d->block_count; i++) {
        const char *from = d->blocks[i].memory, *to = from + d->blocks[i].bytes;
        if ((const char *)memory < from || (const char *)memory >= to) continue;
        offer->serial = d->blocks[i].serial;
        offer->able = driver_able() &&
                      cuda.cuMemGetAddressRange(&base, &size, at) == CUDA_SUCCESS &&
                      cuda.cuIpcGetMemHandle(&offer->handle, base) == CUDA_SUCCESS;
        offer->offset = (int64_t)(at - base);
        return;
    }
}

/* ---- Memory of other ranks ----------------------------------------------------------------------
 */
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The place in the list of what is opened; UINT32_MAX where it cannot be. */
static uint32_t open_offer(cuda_pulls *p, int rank, const pull_offer *offer) {
    uint32_t free_slot = p->opened_count;
    for (uint32_t i = 0; i < p->opened_count; i++) {
        cuda_opened *o = &p->opened[i];
        if (o->users == 0) free_slot = i;
        if (o->users == 0 || o->rank != rank || o->serial != offer->serial) continue;
        o->users++;
        return i;
    }
    CUdeviceptr base = 0;
    if (!offer->able || !driver_able() || offer->host != p->host ||
        cuda.cuIpcOpenMemHandle(&base, offer->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) !=
            CUDA_SUCCESS)
        return UINT32_MAX;
    if (free_slot == p->opened_count) {
        size_t old = p->opened_count * sizeof *p->opened;
        cuda_opened *more = ml_realloc(p->opened, old, old + sizeof *more);
        if (!more) {
            CUDA_OK(cuIpcCloseMemHandle(base));
            return UINT32_MAX;
        }
        p->opened = more;
        p->opened_count++;
    }
    p->opened[free_slot] = (cuda_opened){rank, offer->serial, base, 1, false};
    return free_slot;
}

static void close_opened(cuda_pulls *p, uint32_t at) {
    if (p->opened[at].users > 0 && --p->opened[at].users == 0)
        CUDA_OK(cuIpcCloseMemHandle(p->opened[at].base));
}

/* ---- The device's part --------------------------------------------------------------------------
 */
static ml_status pulls_make(cuda_device *d, cuda_pulls *p) {
    const int wanted = ml_knobs()->peer, usual = 3;
    p->stream_count = wanted < 2 ? usual : wanted < PULL_STREAMS ? wanted : PULL_STREAMS;
    for (int i = 0; i < p->stream_count; i++) {
        ML_TRY(cuda_nccl_stream(&p->streams[i]));
        CUDA_TRY(cuEventCreate(&p->copied[i], CU_EVENT_DISABLE_TIMING));
    }
    for (int i = 0; i < PULL_HALVES; i++)
        CUDA_TRY(cuEventCreate(&p->added[i], CU_EVENT_DISABLE_TIMING));
    CUDA_TRY(cuEventCreate(&p->begun, CU_EVENT_DISABLE_TIMING));
    ML_TRY(cuda_nccl_stream(&p->escape));
    ML_TRY(d->base.ops->allocate(&d->base, WORDS_BYTES, &p->words));
    ML_TRY(d->base.ops->zero(&d->base, p->words, WORDS_BYTES));
    return cuda_wait_for(d, NULL);
}

static int64_t stage_bytes(int64_t memory_bytes) {
    const int64_t most = 128 << 20;
    return memory_bytes / 1024 < most ? memory_bytes / 1024 : most;
}

int64_t cuda_pull_reserve(int64_t memory_bytes) {
    return ml_knobs()->peer ? stage_bytes(memory_bytes) + WORDS_BYTES : 0;
}

static ml_status pulls_open(cuda_device *d) {
    if (d->pulls) return ML_OK;
    d->pulls = ml_alloc(sizeof *d->pulls);
    if (!d->pulls) return ml_fail(ML_NO_MEMORY, "no memory for copies between GPUs");
    d->pulls->host = host_hash();
    d->pulls->stage_bytes = stage_bytes(d->base.target.memory_bytes);
    return pulls_make(d, d->pulls);
}

CUdeviceptr cuda_pull_word(const cuda_pull_axis *axis, int of_rank, int kind, int from_rank) {
    return axis->words[of_rank] + (CUdeviceptr)((kind * PULL_RANKS + from_rank) * WORD_BYTES);
}

/* Where the words of an axis begin, in each rank's block. */
static CUdeviceptr words_of(int axis) {
    return (CUdeviceptr)(axis * KINDS * PULL_RANKS * WORD_BYTES);
}

/* Once for each axis: open the words of all ranks along it. */
static ml_status connect_axis(cuda_device *d, int axis) {
    cuda_pulls *p = d->pulls;
    cuda_pull_axis *a = &p->axis[axis];
    int64_t ranks = ranks_of(d, axis);
    pull_offer mine, all[PULL_RANKS];
    if (a->connected) return ML_OK;
    double began = seconds();
    offer_make(d, p->words, &mine);
    ML_TRY(gather(d, axis, &mine, 1, all));
    a->able = p->stage_bytes / PULL_HALVES / ranks >= LEAST_ROOM;
    for (int i = 0; i < ranks; i++) {
        a->words[i] = (CUdeviceptr)(uintptr_t)p->words + words_of(axis);
        if (i == place_of(d, axis)) continue;
        uint32_t at = open_offer(p, rank_at(d, axis, i), &all[i]);
        if (at == UINT32_MAX) {
            a->able = false;
            continue;
        }
        p->opened[at].words = true;
        a->words[i] = p->opened[at].base + (CUdeviceptr)all[i].offset + words_of(axis);
    }
    ML_TRY(agree(d, axis, &a->able));
    a->connected = true;
    ml_debug(1, "peer: %lld GPUs along %s %s (%.2f s)\n", (long long)ranks,
             d->base.ranks->layout->axis[axis].name,
             a->able ? "copy from one another's memory" : "cannot open one another's memory",
             seconds() - began);
    return ML_OK;
}

/* ---- Executables --------------------------------------------------------------------------------
 */
static bool serves(const cuda_step *step) {
    const ml_collective_step *c = step->step->collective;
    if (step->step->kind != ML_STEP_COLLECTIVE || c->ticket == 0 || c->count == 0) return false;
    if (c->op == ML_OP_ALL_GATHER) return true;
    return c->op == ML_OP_REDUCE_SCATTER && c->combine == ML_COMBINE_SUM &&
           cuda_pull_adds(c->dtype);
}

/* The only axis of the executable's tickets, and how many of its steps copies may serve. */
static int only_axis(const ml_executable *e, uint32_t *count) {
    int axis = -1;
    *count = 0;
    for (uint32_t i = 0; i < e->step_count; i++) {
        const ml_step *step = e->steps[i].step;
        if (step->kind != ML_STEP_COLLECTIVE || step->collective->ticket == 0) continue;
        if (axis >= 0 && axis != step->collective->mesh_axis) return -1;
        axis = step->collective->mesh_axis;
        *count += serves(&e->steps[i]);
    }
    return axis;
}

/* What the others have of each step; false where something cannot be opened. */
static bool open_steps(ml_executable *e, int axis, uint32_t count, const pull_offer *all) {
    cuda_device *d = e->device;
    int ranks = (int)ranks_of(d, axis), own = place_of(d, axis);
    uint32_t at = 0;
    for (uint32_t i = 0; i < e->step_count; i++) {
        if (!serves(&e->steps[i])) continue;
        struct cuda_pull *pull = &e->pulls[at];
        bool able = true;
        for (int r = 0; r < ranks; r++) able &= all[(size_t)r * count + at].able != 0;
        for (int r = 0; r < ranks && able; r++) {
            const pull_offer *offer = &all[(size_t)r * count + at];
            pull->from[r] = (CUdeviceptr)(uintptr_t)e->steps[i].pointers[0];
            if (r == own) continue;
            uint32_t slot = open_offer(d->pulls, rank_at(d, axis, r), offer);
            if (slot == UINT32_MAX) return false;
            e->opened[e->opened_count++] = slot;
            pull->from[r] = d->pulls->opened[slot].base + (CUdeviceptr)offer->offset;
        }
        e->steps[i].pull = able ? pull : NULL;
        at++;
    }
    return true;
}

/* Each block that is opened costs time, on all other ranks: only those with most bytes are offered,
 * of which one holds all temporaries. NCCL has what lies elsewhere. */
static void few_blocks(const ml_executable *e, pull_offer *offers, uint32_t count) {
    enum { BLOCKS = 4 };
    uint64_t kept[BLOCKS] = {0};
    for (int best = 0; best < BLOCKS; best++) {
        int64_t most = 0;
        for (uint32_t i = 0; i < count; i++) {
            const struct cuda_block *b = block_of(e->device, offers[i].serial);
            bool known = !b;
            for (int k = 0; k < best; k++) known = known || kept[k] == offers[i].serial;
            if (known || b->bytes <= most) continue;
            most = b->bytes;
            kept[best] = offers[i].serial;
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        bool found = false;
        for (int k = 0; k < BLOCKS; k++) found = found || kept[k] == offers[i].serial;
        if (!found) offers[i].able = 0;
    }
}

static ml_status exchange(ml_executable *e, int axis, uint32_t count, pull_offer *mine,
                          pull_offer *all) {
    uint32_t at = 0, served = 0;
    for (uint32_t i = 0; i < e->step_count; i++)
        if (serves(&e->steps[i])) offer_make(e->device, e->steps[i].pointers[0], &mine[at++]);
    few_blocks(e, mine, count);
    double began = seconds();
    ML_TRY(cuda_pull_load(e->device));
    double loaded = seconds();
    ML_TRY(gather(e->device, axis, mine, count, all));
    double told = seconds();
    bool able = open_steps(e, axis, count, all);
    double opened = seconds();
    ML_TRY(agree(e->device, axis, &able));
    for (uint32_t i = 0; i < e->step_count; i++) {
        if (!able) e->steps[i].pull = NULL;
        served += e->steps[i].pull != NULL;
    }
    ml_debug(1,
             "peer: %u of %u collectives beside other work of %s go by copies; kernels %.2f s, "
             "addresses %.2f s, %u allocations of others open after %.2f s\n",
             served, count, e->plan->roots.name ? e->plan->roots.name : "a program", loaded - began,
             told - loaded, e->device->pulls->opened_count, opened - told);
    return ML_OK;
}

ml_status cuda_pull_bind(ml_executable *e) {
    cuda_device *d = e->device;
    uint32_t count = 0;
    cuda_pull_unbind(e);
    if (!ml_knobs()->peer || !d->nccl || e->plan->piece) return ML_OK;
    int axis = only_axis(e, &count);
    if (axis < 0 && count > 0)
        ml_debug(1, "peer: collectives beside other work are of several mesh axes: by NCCL\n");
    if (axis < 0 || count == 0 || ranks_of(d, axis) > PULL_RANKS) return ML_OK;
    ML_TRY(pulls_open(d));
    ML_TRY(connect_axis(d, axis));
    if (!d->pulls->axis[axis].able) return ML_OK;
    size_t all = (size_t)count * (size_t)ranks_of(d, axis);
    pull_offer *mine = ml_alloc(count * sizeof *mine), *others = ml_alloc(all * sizeof *others);
    e->pulls = ml_alloc(count * sizeof *e->pulls);
    e->pull_generation = d->pulls->generation;
    e->opened = ml_alloc(all * sizeof *e->opened);
    ml_status status = mine && others && e->pulls && e->opened
                           ? exchange(e, axis, count, mine, others)
                           : ml_fail(ML_NO_MEMORY, "no memory for copies between GPUs");
    ml_free(mine);
    ml_free(others);
    return status;
}

void cuda_pull_unbind(ml_executable *e) {
    for (uint32_t i = 0; i < e->opened_count; i++)
        if (e->pull_generation == e->device->pulls->generation)
            close_opened(e->device->pulls, e->opened[i]);
    for (uint32_t i = 0; i < e->step_count; i++) e->steps[i].pull = NULL;
    ml_free(e->opened);
    ml_free(e->pulls);
    e->opened = NULL;
    e->pulls = NULL;
    e->opened_count = 0;
}

/* A block must not be given back while others have it open. Ranks that copy from one another run
 * the same programs, so they are here at the same time; their words stay open. */
ml_status cuda_pull_forget(ml_device *device) {
    cuda_device *d = (cuda_device *)device;
    cuda_pulls *p = d->pulls;
    bool closed = true;
    if (!p || p->aborted) return ML_OK;
    ML_TRY(cuda_wait_for(d, NULL));
    p->generation++;
    for (uint32_t i = 0; i < p->opened_count; i++) {
        if (p->opened[i].users == 0 || p->opened[i].words) continue;
        p->opened[i].users = 1;
        close_opened(p, i);
    }
    for (int i = 0; i < ML_MAX_MESH; i++)
        if (p->axis[i].able) ML_TRY(agree(d, i, &closed));
    return ML_OK;
}

/* ---- The end ------------------------------------------------------------------------------------
 */
/* Sets all words again and again: each is put back by the stream that has waited for it. */
static void *let_go(void *device) {
    cuda_device *d = device;
    cuda_pulls *p = d->pulls;
    const struct timespec pause = {.tv_nsec = 200000};
    CUdeviceptr words = (CUdeviceptr)(uintptr_t)p->words;
    enum { WORDS = ML_MAX_MESH * KINDS * PULL_RANKS };
    CUstreamBatchMemOpParams ops[WORDS / 2];
    cuda.cuCtxSetCurrent(d->context);
    while (!atomic_load(&p->gone)) {
        for (int half = 0; half < 2; half++) {
            memset(ops, 0, sizeof ops);
            for (int i = 0; i < WORDS / 2; i++) {
                ops[i].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                ops[i].writeValue.address =
                    words + (CUdeviceptr)((half * WORDS / 2 + i) * WORD_BYTES);
                ops[i].writeValue.value = 1;
            }
            if (cuda.cuStreamBatchMemOp(p->escape, WORDS / 2, ops, 0) != CUDA_SUCCESS) return NULL;
        }
        if (cuda.cuStreamSynchronize(p->escape) != CUDA_SUCCESS) return NULL;
        nanosleep(&pause, NULL);
    }
    return NULL;
}

void cuda_pull_abort_begin(cuda_device *d) {
    cuda_pulls *p = d->pulls;
    if (!p || p->aborted || !p->words) return;
    p->aborted = true;
    p->letting_go = pthread_create(&p->thread, NULL, let_go, d) == 0;
}

/* Once nothing is under way any more; what will not end in ten seconds ends with the process. */
void cuda_pull_abort_end(cuda_device *d) {
    cuda_pulls *p = d->pulls;
    const struct timespec pause = {.tv_nsec = 1000000};
    if (!p || !p->letting_go) return;
    for (int i = 0; i < 10000 && cuda.cuStreamQuery(d->stream) == CUDA_ERROR_NOT_READY; i++)
        nanosleep(&pause, NULL);
    for (int s = 0; s < p->stream_count; s++)
        for (int i = 0; i < 1000 && cuda.cuStreamQuery(p->streams[s]) == CUDA_ERROR_NOT_READY; i++)
            nanosleep(&pause, NULL);
    atomic_store(&p->gone, true);
    pthread_join(p->thread, NULL);
    p->letting_go = false;
}

void cuda_pull_close(cuda_device *d) {
    cuda_pulls *p = d->pulls;
    if (!p) return;
    cuda_pull_abort_end(d);
    for (uint32_t i = 0; i < p->opened_count; i++)
        if (p->opened[i].users > 0) CUDA_OK(cuIpcCloseMemHandle(p->opened[i].base));
    for (int i = 0; i < PULL_STREAMS; i++) {
        if (p->streams[i]) CUDA_OK(cuStreamDestroy(p->streams[i]));
        if (p->copied[i]) CUDA_OK(cuEventDestroy(p->copied[i]));
    }
    for (int i = 0; i < PULL_HALVES; i++)
        if (p->added[i]) CUDA_OK(cuEventDestroy(p->added[i]));
    if (p->begun) CUDA_OK(cuEventDestroy(p->begun));
    if (p->escape) CUDA_OK(cuStreamDestroy(p->escape));
    if (p->module) CUDA_OK(cuModuleUnload(p->module));
    ml_free(p->opened);
    ml_free(p);
    d->pulls = NULL;
}
#endif
