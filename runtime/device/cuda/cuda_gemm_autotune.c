#ifdef MLUA_CUDA
/* Which cuBLASLt algorithm serves a shape.
 *
 * The library proposes up to CANDIDATES; each is timed on the operands' own memory, clearly slow
 * ones once only, and the fastest is remembered on disk under the shape, the library's version and
 * the GPU. Every candidate is deterministic: split sums go through the workspace in a fixed order,
 * and a remembered choice gives the same bits in the next run. */
#include <stdio.h>
#include <string.h>

#include "codegen/jit/jit.h"
#include "runtime/base/knobs.h"
#include "runtime/device/cuda/cuda_gemm.h"

enum { CANDIDATES = 16, RUNS = 3 };

/* ---- The cache on disk ----------------------------------------------------------------------- */
typedef struct {
    uint64_t magic;
    cublasLtMatmulAlgo_t algorithm;
} tuned;
static const uint64_t MAGIC = 0x32656e7574616c6d; /* "mlatune2" */

static void cache_key(const cuda_device *device, const cuda_gemm *gemm, uint64_t key[2]) {
    const ml_gemm *g = &gemm->shape.gemm;
    const int64_t *alignment = gemm->shape.alignment;
    int64_t facts[] = {(int64_t)device->gemms->version,
                       device->base.target.multiprocessors,
                       device->base.target.arch,
                       ML_GEMM_WORKSPACE,
                       g->a_dtype,
                       g->b_dtype,
                       g->c_dtype,
                       g->accumulate,
                       g->epilogue,
                       g->scaled,
                       alignment[0],
                       alignment[1],
                       alignment[2],
                       alignment[3]};
    for (int i = 0; i < 2; i++) {
        uint64_t hash = ml_hash(g, offsetof(ml_gemm, a_dtype), MAGIC + (uint64_t)i);
        key[i] = ml_hash(facts, sizeof facts, hash);
    }
}

static bool read_cache(cuda_device *device, cuda_gemm *gemm) {
    cuda_gemm_library *library = device->gemms;
    uint64_t key[2];
    tuned entry = {.magic = MAGIC};
    cublasLtMatmulHeuristicResult_t result;
    cache_key(device, gemm, key);
    if (!ml_choice_read(key, "gemm", &entry, sizeof entry)) return false;
    cublasStatus_t status =
        library->cublasLtMatmulAlgoCheck(library->handle, gemm->operation, gemm->x, gemm->y,
                                         gemm->d, gemm->d, &entry.algorithm, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.state != CUBLAS_STATUS_SUCCESS ||
        result.workspaceSize > ML_GEMM_WORKSPACE)
        return false;
    gemm->algorithm = entry.algorithm;
    return true;
}

static void write_cache(cuda_device *device, const cuda_gemm *gemm) {
    uint64_t key[2];
    tuned entry = {MAGIC, gemm->algorithm};
    cache_key(device, gemm, key);
    /* Without a cache the next run tunes again: slower to start, nothing worse. */
    if (ml_choice_write(key, "gemm", &entry, sizeof entry) != ML_OK)
        ml_debug(1, "gemm: the choice is not remembered: %s\n", ml_error_last()->text);
}

/* ---- Candidates ------------------------------------------------------------------------------ */
static ml_status set_preference(cuda_gemm_library *library, const cuda_gemm *gemm,
                                cublasLtMatmulPreference_t preference) {
    const size_t workspace = ML_GEMM_WORKSPACE;
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const int64_t *alignment = gemm->shape.alignment;
    const uint32_t x = (uint32_t)alignment[gemm->swapped ? 1 : 0];
    const uint32_t y = (uint32_t)alignment[gemm->swapped ? 0 : 1];
    const uint32_t d = (uint32_t)alignment[2];
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void *value;
        size_t size;
    } settings[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &x, sizeof x},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &y, sizeof y},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &d, sizeof d},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &d, sizeof d},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        LT_TRY(library, cublasLtMatmulPreferenceSetAttribute, preference, settings[i].name,
               settings[i].value, settings[i].size);
    return ML_OK;
}

static ml_status propose(cuda_gemm_library *library, const cuda_gemm *gemm,
                         cublasLtMatmulHeuristicResult_t *found, int *count) {
    cublasLtMatmulPreference_t preference;
    char text[160];
    *count = 0;
    LT_TRY(library, cublasLtMatmulPreferenceCreate, &preference);
    ml_status status = set_preference(library, gemm, preference);
    if (status == ML_OK) {
        cublasStatus_t result = library->cublasLtMatmulAlgoGetHeuristic(
            library->handle, gemm->operation, gemm->x, gemm->y, gemm->d, gemm->d, preference,
            CANDIDATES, found, count);
        if (result != CUBLAS_STATUS_SUCCESS && result != CUBLAS_STATUS_NOT_SUPPORTED)
            status = gemm_fail(library, result, "cublasLtMatmulAlgoGetHeuristic");
    }
    library->cublasLtMatmulPreferenceDestroy(preference);
    if (status == ML_OK && *count == 0)
        return ml_fail(ML_DEVICE, "cuBLASLt has no algorithm for a product of %s at %s",
                       gemm_describe(gemm, text, sizeof text), cuda_doing_now());
    return status;
}

/* ---- Timing ---------------------------------------------------------------------------------- */
typedef struct {
    cuda_device *device;
    const cuda_gemm *gemm;
    void *operand[3];
    CUevent begin, end;
} bench;

/* Milliseconds of one call; a candidate that fails takes for ever. Of few rows the time is that of
 * reading weights, which a program finds in memory, not in the caches. */
static ml_status time_once(const bench *b, const cublasLtMatmulAlgo_t *algorithm, float *ms) {
    enum { FEW = 256 };
    const ml_gemm *g = &b->gemm->shape.gemm;
    *ms = 1e30f;
    if (g->m <= FEW || g->n <= FEW)
        CUDA_TRY(cuMemsetD8Async(b->device->workspace, 0, ML_GEMM_WORKSPACE, b->device->stream));
    CUDA_TRY(cuEventRecord(b->begin, b->device->stream));
    if (gemm_call(b->device, b->gemm, b->operand[0], b->operand[1], b->operand[2], algorithm) !=
        CUBLAS_STATUS_SUCCESS)
        return ML_OK;
    CUDA_TRY(cuEventRecord(b->end, b->device->stream));
    CUDA_TRY(cuEventSynchronize(b->end));
    CUDA_TRY(cuEventElapsedTime(ms, b->begin, b->end));
    return ML_OK;
}

/* The first call also loads the kernel: it only decides against what is hopeless. */
static ml_status time_candidate(const bench *b, const cublasLtMatmulAlgo_t *algorithm, float best,
                                float *ms) {
    float once;
    ML_TRY(time_once(b, algorithm, ms));
    if (*ms > 3 * best + 20) return ML_OK;
    *ms = 1e30f;
    for (int run = 0; run < RUNS; run++) {
        ML_TRY(time_once(b, algorithm, &once));
        if (once < *ms) *ms = once;
        if (*ms > 1.2f * best) break;
    }
    return ML_OK;
}

static ml_status choose(const bench *b, const cublasLtMatmulHeuristicResult_t *found, int count,
                        cublasLtMatmulAlgo_t *algorithm) {
    float best = 1e29f, first = 0;
    int winner = -1;
    char text[160];
    for (int i = 0; i < count; i++) {
        float ms = 1e30f;
        if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
        ML_TRY(time_candidate(b, &found[i].algo, best, &ms));
        if (i == 0) first = ms;
        /* A later proposal must win clearly, or noise decides. */
        if (ms < (winner < 0 ? best : 0.99f * best)) best = ms, winner = i;
    }
    if (winner < 0)
        return ml_fail(ML_DEVICE, "every cuBLASLt algorithm fails for a product of %s at %s",
                       gemm_describe(b->gemm, text, sizeof text), cuda_doing_now());
    *algorithm = found[winner].algo;
    const ml_gemm *g = &b->gemm->shape.gemm;
    double flops = 2.0 * (double)g->m * (double)g->n * (double)g->k * (double)b->gemm->strided.size;
    ml_debug(1, "gemm: %s: %.3f ms, %.0f TFLOP/s (candidate %d of %d; the first takes %.3f ms)\n",
             gemm_describe(b->gemm, text, sizeof text), (double)best, flops / (double)best * 1e-9,
             winner + 1, count, (double)first);
    return ML_OK;
}

/* Numbers of about unit size in every type that is multiplied: zeros or one constant would draw
 * less power than real data and favour other candidates. */
ml_status cuda_tune_fill(cuda_device *device, void *memory, int64_t bytes) {
    enum { SEED_BYTES = 1 << 20 };
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)memory;
    uint16_t *seed = ml_alloc(SEED_BYTES);
    uint64_t state = 0x9e3779b97f4a7c15;
    if (!seed) return ml_fail(ML_NO_MEMORY, "no memory for the operands of timed calls");
    for (int i = 0; i < SEED_BYTES / 2; i++) {
        state = state * 6364136223846793005 + 1442695040888963407;
        seed[i] = (uint16_t)(0x3f00 | (state >> 63 << 15) | (state >> 40 & 0xff));
    }
    int64_t done = bytes < SEED_BYTES ? bytes : SEED_BYTES;
    ml_status status = device->base.ops->upload(&device->base, memory, seed, done);
    ml_free(seed);
    for (; done < bytes && status == ML_OK; done *= 2) {
        int64_t part = bytes - done < done ? bytes - done : done;
        status =
            CUDA_OK(cuMemcpyDtoDAsync(at + (CUdeviceptr)done, at, (size_t)part, device->stream));
    }
    return status;
}

static ml_status tune_on(bench *b, const bool scratch[3],
                         const cublasLtMatmulHeuristicResult_t *found, int count,
                         cublasLtMatmulAlgo_t *algorithm) {
    for (int i = 0; i < 2; i++)
        if (scratch[i]) ML_TRY(cuda_tune_fill(b->device, b->operand[i], gemm_extent(b->gemm, i)));
    CUDA_TRY(cuEventCreate(&b->begin, CU_EVENT_DEFAULT));
    CUDA_TRY(cuEventCreate(&b->end, CU_EVENT_DEFAULT));
    return choose(b, found, count, algorithm);
}

/* Time the candidates. C is written: where it must not be, on memory borrowed for it. */
static ml_status tune(cuda_device *device, cuda_gemm *gemm, void *const *operands,
                      const bool scratch[3], const cublasLtMatmulHeuristicResult_t *found,
                      int count) {
    bench b = {.device = device, .gemm = gemm, .operand = {operands[0], operands[1], operands[2]}};
    CUdeviceptr borrowed = 0;
    gemm->algorithm = found[0].algo;
    if (!scratch[2]) {
        size_t bytes = (size_t)gemm_extent(gemm, 2);
        if (cuda_take(device, &borrowed, (int64_t)bytes) != CUDA_SUCCESS)
            return ML_OK; /* the first it is */
        b.operand[2] = (void *)(uintptr_t)borrowed;
        CUDA_OK(cuMemsetD8Async(borrowed, 0, bytes, device->stream));
    }
    ml_status status = tune_on(&b, scratch, found, count, &gemm->algorithm);
    cuda_wait_for(device, NULL);
    if (b.begin) CUDA_OK(cuEventDestroy(b.begin));
    if (b.end) CUDA_OK(cuEventDestroy(b.end));
    if (borrowed) CUDA_OK(cuMemFree(borrowed));
    if (status == ML_OK) write_cache(device, gemm);
    return status;
}

/* ---- Several ranks --------------------------------------------------------------------------- */
/* Ranks that compute the same must do it to the bit: those of a pipeline stage, which tune the same
 * shapes in the same order, take what the first of them has chosen. */
static bool shares(const ml_layout *layout, int mesh_axis) {
    return layout->axis[mesh_axis].size > 1 &&
           !(layout->stages.on && layout->stages.mesh_axis == mesh_axis);
}

bool cuda_tune_chooses(const cuda_device *device) {
    const ml_ranks *ranks = device->base.ranks;
    if (!device->nccl) return true;
    for (int i = 0; i < ranks->layout->count; i++)
        if (shares(ranks->layout, i) && ml_layout_coordinate(ranks->layout, ranks->rank, i) != 0)
            return false;
    return true;
}

ml_status cuda_tune_share(cuda_device *device, void *choice, int64_t bytes) {
    if (!device->nccl) return ML_OK;
    const ml_layout *layout = device->base.ranks->layout;
    int64_t most = 1;
    for (int i = 0; i < layout->count; i++)
        if (layout->axis[i].size > most) most = layout->axis[i].size;
    void *all = ml_alloc((size_t)(most * bytes));
    if (!all) return ml_fail(ML_NO_MEMORY, "no memory to compare choices between ranks");
    ml_status status = ML_OK;
    for (int i = 0; i < layout->count && status == ML_OK; i++) {
        if (!shares(layout, i)) continue;
        const ml_collective_step gather = {.kind = ML_COLLECTIVE_ALL_GATHER,
                                           .mesh_axis = i,
                                           .ranks = layout->axis[i].size,
                                           .count = bytes,
                                           .dtype = ML_BOOL}; /* bytes */
        status = device->base.ops->collect(&device->base, &gather, choice, all);
        if (status == ML_OK) memcpy(choice, all, (size_t)bytes);
    }
    ml_free(all);
    return status;
}

static ml_status choose_alone(cuda_device *device, cuda_gemm *gemm, void *const *operands,
                              const bool scratch[3]) {
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    int count = 0;
    if (device->base.options.tune && read_cache(device, gemm)) return ML_OK;
    ML_TRY(propose(device->gemms, gemm, found, &count));
    gemm->algorithm = found[0].algo;
    return device->base.options.tune && count > 1
               ? tune(device, gemm, operands, scratch, found, count)
               : ML_OK;
}

ml_status cuda_gemm_tune(cuda_device *device, cuda_gemm *gemm, void *const *operands,
                         const bool scratch[3]) {
    if (gemm->chosen || gemm->empty) return ML_OK;
    ML_TRY(gemm_point(device->gemms, gemm, operands));
    if (cuda_tune_chooses(device)) ML_TRY(choose_alone(device, gemm, operands, scratch));
    ML_TRY(cuda_tune_share(device, &gemm->algorithm, sizeof gemm->algorithm));
    gemm->chosen = true;
    return ML_OK;
}
#endif
