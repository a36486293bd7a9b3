#ifdef MLUA_CUDA
/* Groups of collectives by copies between GPUs: what each stream does, and the kernel that adds
 * up what was copied. */
#include <stdio.h>
#include <string.h>

#include "codegen/jit/jit.h"
#include "runtime/device/cuda/cuda_ce_collectives.h"

enum { READY, READ }; /* kinds of words: the operands are there; they were read */
enum { THREADS = 256, MOST_BLOCKS = 264, ALIGNMENT = 256 };

/* ---- The kernel ------------------------------------------------------------------------------ */
/* One for each type. p: this rank's operand, the others' in the buffer, the result. s:
 * elements, bytes between two ranks' parts of the buffer, this rank's place, ranks. */
static const char kernel_text[] = R"(
struct ml_arguments { char *p[3]; long long s[4]; };
struct alignas(16) ml_quad { unsigned word[4]; };
ML_INLINE float ml_wide(float x) { return x; }
ML_INLINE double ml_wide(double x) { return x; }
ML_INLINE float ml_wide(ml_bf16 x) { return ml_load_bf16(x); }
ML_INLINE float ml_wide(ml_f16 x) { return ml_load_f16(x); }
ML_INLINE void ml_narrow(float x, float *to) { *to = x; }
ML_INLINE void ml_narrow(double x, double *to) { *to = x; }
ML_INLINE void ml_narrow(float x, ml_bf16 *to) { *to = ml_store_bf16(x); }
ML_INLINE void ml_narrow(float x, ml_f16 *to) { *to = ml_store_f16(x); }

template <typename T, typename C> static __device__ void ml_add_up(const ml_arguments &a) {
    enum { PER = 16 / sizeof(T) };
    const T *own = (const T *)a.p[0];
    T *to = (T *)a.p[2];
    const long long count = a.s[0], step = (long long)gridDim.x * blockDim.x;
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const int at = (int)a.s[2], ranks = (int)a.s[3];
    const bool wide = (((ml_u64)own | (ml_u64)to) & 15) == 0;
    const long long packs = wide ? count / PER : 0;
    for (long long i = first; i < packs; i += step) {
        C sum[PER];
        for (int r = 0; r < ranks; r++) {
            const char *from = a.p[1] + (r < at ? r : r - 1) * a.s[1];
            const ml_quad pack = ((const ml_quad *)(r == at ? a.p[0] : from))[i];
            const T *x = (const T *)&pack;
            for (int k = 0; k < PER; k++) sum[k] = r == 0 ? ml_wide(x[k]) : sum[k] + ml_wide(x[k]);
        }
        ml_quad pack;
        for (int k = 0; k < PER; k++) ml_narrow(sum[k], (T *)&pack + k);
        ((ml_quad *)to)[i] = pack;
    }
    for (long long i = packs * PER + first; i < count; i += step) {
        C sum = 0;
        for (int r = 0; r < ranks; r++) {
            const T *x = (const T *)(a.p[1] + (r < at ? r : r - 1) * a.s[1]);
            const C term = ml_wide(r == at ? own[i] : x[i]);
            sum = r == 0 ? term : sum + term;
        }
        ml_narrow(sum, to + i);
    }
}
)";
static const char entry_text[] =
    "extern \"C\" __global__ void __launch_bounds__(%d) ml_add_%s(const ml_arguments a)\n"
    "{\n    ml_add_up<%s, %s>(a);\n}\n";
static const struct {
    ml_dtype dtype;
    const char *name, *memory, *compute;
} types[] = {{ML_F32, "f32", "float", "float"},
             {ML_F64, "f64", "double", "double"},
             {ML_F16, "f16", "ml_f16", "float"},
             {ML_BF16, "bf16", "ml_bf16", "float"}};
enum { TYPES = sizeof types / sizeof *types };

bool cuda_ce_adds(ml_dtype dtype) {
    for (int i = 0; i < TYPES; i++)
        if (types[i].dtype == dtype) return true;
    return false;
}

static void make_text(char *text, size_t size) {
    int used = snprintf(text, size, "%s", kernel_text);
    for (int i = 0; i < TYPES; i++)
        used += snprintf(text + used, size - (size_t)used, entry_text, THREADS, types[i].name,
                         types[i].memory, types[i].compute);
}

static ml_status load_image(cuda_device *d, const void *image) {
    cuda_ce_state *p = d->ce;
    CUDA_TRY(cuModuleLoadData(&p->module, image));
    for (int i = 0; i < TYPES; i++) {
        char name[64];
        snprintf(name, sizeof name, "ml_add_%s", types[i].name);
        CUDA_TRY(cuModuleGetFunction(&p->sum[types[i].dtype], p->module, name));
    }
    return ML_OK;
}

static ml_status add(cuda_device *d, ml_dtype dtype, void *const pointers[3],
                     const int64_t sizes[4], CUstream stream) {
    struct {
        void *p[3];
        int64_t s[4];
    } arguments;
    void *parameters[] = {&arguments};
    memcpy(arguments.p, pointers, sizeof arguments.p);
    memcpy(arguments.s, sizes, sizeof arguments.s);
    int64_t each = THREADS * 16 / ml_dtypes[dtype].bytes, blocks = (sizes[0] + each - 1) / each;
    if (blocks > MOST_BLOCKS) blocks = MOST_BLOCKS;
    CUDA_TRY(cuLaunchKernel(d->ce->sum[dtype], (unsigned)(blocks > 0 ? blocks : 1), 1, 1, THREADS,
                            1, 1, 0, stream, parameters, NULL));
    return ML_OK;
}

/* A first launch may wait for all that runs, so that is now, when nothing does. */
static ml_status launch_first(cuda_device *d) {
    void *nowhere[3] = {d->ce->words, d->ce->words, d->ce->words};
    const int64_t nothing[4] = {0, 0, 0, 1};
    for (int i = 0; i < TYPES; i++) ML_TRY(add(d, types[i].dtype, nowhere, nothing, d->stream));
    return cuda_wait_for(d, NULL);
}

ml_status cuda_ce_load(cuda_device *d) {
    char text[8192];
    if (d->ce->module) return ML_OK;
    make_text(text, sizeof text);
    ml_kernel kernel = {.key = ml_hash(text, strlen(text), 0),
                        .entry = "ml_add_up",
                        .recipe = text,
                        .label = "sum of what other GPUs have"};
    ml_kernel *list = &kernel;
    ml_jit_cuda *jit = NULL;
    const void *image = NULL;
    int64_t size = 0;
    ml_pool *pool = ml_pool_new(1);
    if (!pool) return ml_fail(ML_NO_MEMORY, "no memory to compile a kernel");
    cuda_doing("sums by copies between GPUs");
    ml_status status =
        ml_jit_cuda_compile(&list, 1, d->base.target.arch, pool, &jit, &image, &size);
    ml_pool_free(pool);
    if (status == ML_OK) status = load_image(d, image);
    if (jit) ml_jit_cuda_free(jit);
    return status == ML_OK ? launch_first(d) : status;
}

/* ---- What streams do ------------------------------------------------------------------------- */
typedef struct {
    ml_executable *e;
    cuda_ce_state *p;
    const cuda_ce_axis *axis; /* with the streams that copy, and the buffer */
    int ranks, at;
    CUstream stream;
    const cuda_step *steps;
    uint32_t count;
} group;

/* Bytes of each rank's part of half the buffer. */
static int64_t room_of(const group *g) {
    return g->axis->buffer_bytes / CE_HALVES / (g->ranks - 1) / ALIGNMENT * ALIGNMENT;
}

static int other(const group *g, int i) { /* i from 1 on: no rank is read by all at the same time */
    return (g->at + i) % g->ranks;
}

static CUstream stream_of(const group *g, int i) {
    return g->axis->streams[(i - 1) % g->axis->stream_count];
}

static void word_write(CUstreamBatchMemOpParams *op, CUdeviceptr word, uint32_t value) {
    memset(op, 0, sizeof *op);
    op->operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    op->writeValue.address = word;
    op->writeValue.value = value;
}

/* Wait for this rank's word to become 1 and put it back. */
static void word_await(CUstreamBatchMemOpParams op[2], CUdeviceptr word) {
    memset(op, 0, 2 * sizeof *op);
    op[0].operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    op[0].waitValue.address = word;
    op[0].waitValue.value = 1;
    op[0].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    word_write(&op[1], word, 0);
}

static CUdeviceptr word_of(const cuda_ce_axis *axis, int of_rank, int kind, int from_rank) {
    return axis->words[of_rank] + (CUdeviceptr)((kind * CE_RANKS + from_rank) * CE_WORD_BYTES);
}

static ml_status report_ready(const group *g) {
    CUstreamBatchMemOpParams ops[CE_RANKS];
    for (int i = 1; i < g->ranks; i++)
        word_write(&ops[i - 1], word_of(g->axis, other(g, i), READY, g->at), 1);
    CUDA_TRY(cuStreamBatchMemOp(g->stream, (unsigned)(g->ranks - 1), ops, 0));
    return ML_OK;
}

static ml_status await_ready(const group *g, int i) {
    CUstreamBatchMemOpParams ops[2];
    word_await(ops, word_of(g->axis, g->at, READY, other(g, i)));
    CUDA_TRY(cuStreamBatchMemOp(stream_of(g, i), 2, ops, 0));
    return ML_OK;
}

static ml_status report_read(const group *g, int i) {
    CUstreamBatchMemOpParams op;
    word_write(&op, word_of(g->axis, other(g, i), READ, g->at), 1);
    CUDA_TRY(cuStreamBatchMemOp(stream_of(g, i), 1, &op, 0));
    return ML_OK;
}

static ml_status await_read(const group *g) {
    CUstreamBatchMemOpParams ops[2 * CE_RANKS];
    for (int i = 1; i < g->ranks; i++)
        word_await(&ops[2 * (i - 1)], word_of(g->axis, g->at, READ, other(g, i)));
    CUDA_TRY(cuStreamBatchMemOp(g->stream, (unsigned)(2 * (g->ranks - 1)), ops, 0));
    return ML_OK;
}

static bool has(const cuda_step *step, ml_collective kind) {
    return step->ce && step->step->collective->kind == kind;
}

static int64_t step_bytes(const cuda_step *step) {
    return step->step->collective->count * ml_dtypes[step->step->collective->dtype].bytes;
}

/* The pieces of what is gathered that one other rank has; rank 0's place here: this rank's own. */
static ml_status copy_gathered(const group *g, int i) {
    int rank = other(g, i);
    CUstream stream = i == 0 ? g->stream : stream_of(g, i);
    for (uint32_t k = 0; k < g->count; k++) {
        if (!has(&g->steps[k], ML_COLLECTIVE_ALL_GATHER)) continue;
        int64_t bytes = step_bytes(&g->steps[k]);
        CUdeviceptr from = g->steps[k].ce->from[rank];
        CUdeviceptr to =
            (CUdeviceptr)(uintptr_t)g->steps[k].pointers[1] + (CUdeviceptr)(rank * bytes);
        cuda_doing(g->steps[k].what);
        if (from != to) CUDA_TRY(cuMemcpyDtoDAsync(to, from, (size_t)bytes, stream));
    }
    return ML_OK;
}

/* ---- Sums, in rounds that fill half a buffer ------------------------------------------------- */
typedef struct {
    uint32_t step; /* of the group */
    int64_t begin; /* elements of it that are done */
    int round;
} progress;

/* The segments of the next round: none where all is done. */
static void next_segments(const group *g, progress *at) {
    int64_t room = room_of(g), used = 0;
    g->p->segment_count = 0;
    while (at->step < g->count && g->p->segment_count < CE_SEGMENTS) {
        const cuda_step *step = &g->steps[at->step];
        if (!has(step, ML_COLLECTIVE_REDUCE_SCATTER)) {
            at->step++;
            continue;
        }
        const ml_collective_step *c = step->step->collective;
        int64_t width = ml_dtypes[c->dtype].bytes, left = c->count - at->begin;
        int64_t count = (room - used) / width < left ? (room - used) / width : left;
        if (count <= 0) return;
        g->p->segments[g->p->segment_count++] = (cuda_segment){step, at->begin, count, used};
        used += (count * width + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        at->begin += count;
        if (at->begin == c->count) at->step++, at->begin = 0;
    }
}

static CUdeviceptr buffer_of(const group *g, int round, int rank) {
    int part = rank < g->at ? rank : rank - 1;
    int64_t room = room_of(g);
    return (CUdeviceptr)(uintptr_t)g->axis->buffer +
           (CUdeviceptr)((round % CE_HALVES * (g->ranks - 1) + part) * room);
}

static ml_status copy_segments(const group *g, int round, int i) {
    int rank = other(g, i);
    for (uint32_t k = 0; k < g->p->segment_count; k++) {
        const cuda_segment *s = &g->p->segments[k];
        const ml_collective_step *c = s->step->step->collective;
        int64_t width = ml_dtypes[c->dtype].bytes;
        CUdeviceptr from =
            s->step->ce->from[rank] + (CUdeviceptr)((g->at * c->count + s->begin) * width);
        cuda_doing(s->step->what);
        CUDA_TRY(cuMemcpyDtoDAsync(buffer_of(g, round, rank) + (CUdeviceptr)s->offset, from,
                                   (size_t)(s->count * width), stream_of(g, i)));
    }
    return ML_OK;
}

static ml_status add_segments(const group *g, int round) {
    int first = g->at == 0 ? 1 : 0; /* whose part of the buffer is the first */
    for (uint32_t k = 0; k < g->p->segment_count; k++) {
        const cuda_segment *s = &g->p->segments[k];
        const ml_collective_step *c = s->step->step->collective;
        int64_t width = ml_dtypes[c->dtype].bytes;
        void *const pointers[3] = {
            (char *)s->step->pointers[0] + (g->at * c->count + s->begin) * width,
            (void *)(uintptr_t)(buffer_of(g, round, first) + (CUdeviceptr)s->offset),
            (char *)s->step->pointers[1] + s->begin * width};
        const int64_t sizes[4] = {s->count, room_of(g), g->at, g->ranks};
        cuda_doing(s->step->what);
        ML_TRY(add(g->e->device, c->dtype, pointers, sizes, g->stream));
    }
    return ML_OK;
}

/* The stream continues once all streams that copy are here. */
static ml_status stream_follows(const group *g) {
    for (int i = 0; i < g->axis->stream_count; i++) {
        CUDA_TRY(cuEventRecord(g->axis->copied[i], g->axis->streams[i]));
        CUDA_TRY(cuStreamWaitEvent(g->stream, g->axis->copied[i], 0));
    }
    return ML_OK;
}

/* A half of the buffer is filled again once what was in it is added up. */
static ml_status sum_all(const group *g) {
    progress at = {0};
    for (;; at.round++) {
        int half = at.round % CE_HALVES;
        next_segments(g, &at);
        if (g->p->segment_count == 0) return ML_OK;
        for (int i = 0; i < g->axis->stream_count && at.round >= CE_HALVES; i++)
            CUDA_TRY(cuStreamWaitEvent(g->axis->streams[i], g->axis->added[half], 0));
        for (int i = 1; i < g->ranks; i++) ML_TRY(copy_segments(g, at.round, i));
        ML_TRY(stream_follows(g));
        ML_TRY(add_segments(g, at.round));
        CUDA_TRY(cuEventRecord(g->axis->added[half], g->stream));
    }
}

/* Others are informed as soon as they were read: not once a kernel has found a multiprocessor
 * to add up. */
static ml_status run_group(const group *g) {
    ML_TRY(report_ready(g));
    CUDA_TRY(cuEventRecord(g->axis->begun, g->stream));
    for (int i = 0; i < g->axis->stream_count; i++)
        CUDA_TRY(cuStreamWaitEvent(g->axis->streams[i], g->axis->begun, 0));
    ML_TRY(copy_gathered(g, 0));
    for (int i = 1; i < g->ranks; i++) {
        ML_TRY(await_ready(g, i));
        ML_TRY(copy_gathered(g, i));
    }
    ML_TRY(sum_all(g));
    for (int i = 1; i < g->ranks; i++) ML_TRY(report_read(g, i));
    ML_TRY(stream_follows(g));
    return await_read(g);
}

ml_status cuda_ce_enqueue(ml_executable *e, const cuda_step *steps, uint32_t count,
                          CUstream stream) {
    bool any = false;
    for (uint32_t i = 0; i < count; i++) any |= steps[i].ce != NULL;
    if (!any) return ML_OK;
    if (e->device->ce->aborted)
        return ml_fail(ML_DEVICE, "copies between the GPUs were given up after a failure");
    const cuda_ce_axis *axis = &e->device->ce->axis[steps->step->collective->mesh_axis];
    group g = {e, e->device->ce, axis, axis->ranks, axis->at, stream, steps, count};
    return run_group(&g);
}
#endif
