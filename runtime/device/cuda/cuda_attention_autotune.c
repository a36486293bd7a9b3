#ifdef MLUA_CUDA
/* Which serves an attention step that both could: cuDNN, or our kernels on warpgroup products.
 *
 * Where the choice is not remembered both are loaded, and the first bind times them on the
 * operands' own memory. cuDNN's deterministic gradient writes dS to memory and, where query heads
 * share K/V heads, a gradient of K and V for each; ours does neither, but which is faster depends
 * on the shape. The choice is stored on disk under the shape, our kernels' text, cuDNN's version
 * and the GPU: both are deterministic, and a remembered choice gives the same bits in the next run.
 */
#include <stdio.h>
#include <string.h>

#include "codegen/jit/jit.h"
#include "runtime/base/knobs.h"
#include "runtime/device/cuda/cuda_dnn.h"

enum { RUNS = 4 };
static const uint64_t MAGIC = 0x3130747365746e63; /* "cntest01" */

typedef enum { CUDNN, OWN, KINDS } kind; /* cuDNN where timing is off */
static const char *const kind_names[KINDS] = {"cuDNN", "own kernels"};

struct cuda_attention_tuning {
    cuda_attention_tuning *next;
    uint64_t key[2];
    kind winner;
};
typedef struct {
    uint64_t magic;
    int64_t winner;
} entry;

/* ---- What is remembered ---------------------------------------------------------------------- */
static uint64_t hash_step(const cuda_device *device, const ml_step *step, uint64_t seed) {
    const ml_attention_step *a = step->attention;
    const int64_t facts[] = {
        device->base.target.multiprocessors,
        device->base.target.arch,
        a->batch[0],
        a->batch[1],
        a->batch[2],
        a->heads,
        a->kv_heads,
        a->seq,
        a->kv_seq,
        a->head_dim,
        a->value_dim,
        a->args.causal,
        a->args.window,
        a->backward,
        !device->base.target.nondeterministic,
    };
    uint64_t hash = ml_hash(facts, sizeof facts, seed);
    hash = ml_hash(a->strides, (size_t)a->operand_count * sizeof *a->strides, hash);
    for (const ml_kernel *k = step->kernel; k; k = k->next) {
        hash = ml_hash(&k->key, sizeof k->key, hash);
        hash = ml_hash(k->grid, sizeof k->grid, hash);
    }
    return hash;
}

const uint64_t *cuda_attention_tuning_key(ml_executable *e, const ml_step *step) {
    if (step->kind != ML_STEP_ATTENTION || !e->device->base.options.tune) return NULL;
    if (!step->kernel || !step->kernel->fallback || ml_attention_refused(step->attention))
        return NULL;
    uint64_t *tuning = ML_NEW_ARRAY(e->arena, uint64_t, 2);
    for (int i = 0; i < 2; i++) tuning[i] = hash_step(e->device, step, MAGIC + (uint64_t)i);
    return tuning;
}

static void versioned(const cuda_device *device, const uint64_t *tuning, uint64_t key[2]) {
    const uint64_t version = device->dnn->cudnnGetVersion();
    for (int i = 0; i < 2; i++) key[i] = ml_hash(&version, sizeof version, tuning[i]);
}

/* Choices of this process serve even where the disk stores nothing. */
static void keep(cuda_device *device, const uint64_t key[2], kind winner) {
    cuda_attention_tuning *c = ml_alloc(sizeof *c);
    if (!c) return;
    *c = (cuda_attention_tuning){device->tunings, {key[0], key[1]}, winner};
    device->tunings = c;
}

static bool recall(cuda_device *device, const uint64_t *tuning, kind *winner) {
    uint64_t key[2];
    entry read = {.magic = MAGIC};
    versioned(device, tuning, key);
    for (const cuda_attention_tuning *c = device->tunings; c; c = c->next)
        if (memcmp(c->key, key, sizeof key) == 0) return *winner = c->winner, true;
    if (!ml_choice_read(key, "attention", &read, sizeof read)) return false;
    if (read.winner < 0 || read.winner >= KINDS) return false;
    *winner = (kind)read.winner;
    keep(device, key, *winner);
    return true;
}

static void remember(cuda_device *device, const uint64_t *tuning, kind winner) {
    uint64_t key[2];
    const entry written = {MAGIC, winner};
    versioned(device, tuning, key);
    keep(device, key, winner);
    if (ml_choice_write(key, "attention", &written, sizeof written) != ML_OK)
        ml_debug(1, "attention: the choice is not remembered: %s\n", ml_error_last()->text);
}

bool cuda_attention_own_won(cuda_device *device, const uint64_t *tuning) {
    kind winner;
    if (device->base.ranks && device->base.ranks->layout) return false;
    return recall(device, tuning, &winner) && winner == OWN;
}

void cuda_attention_tunings_close(cuda_device *device) {
    while (device->tunings) {
        cuda_attention_tuning *c = device->tunings;
        device->tunings = c->next;
        ml_free(c);
    }
}

/* ---- Timing ---------------------------------------------------------------------------------- */
typedef struct {
    ml_executable *executable;
    cuda_step step[KINDS]; /* the same step, served by each */
    CUevent begin, end;
} bench;

static bool is_temporary(const ml_executable *e, uint32_t value) {
    const ml_schedule *s = e->plan->schedule;
    return s->storages.at[s->values.at[value].storage].kind == ML_STORAGE_TEMPORARY;
}

/* Before a run temporaries hold nothing. What is written must be one; what is read and is none
 * stays as it is. */
static bool may_write(const ml_executable *e, const ml_step *s) {
    for (int i = s->read_count; i < s->read_count + s->write_count; i++)
        if (!is_temporary(e, s->values[i])) return false;
    return true;
}

static ml_status fill_reads(ml_executable *e, const cuda_step *step) {
    const ml_step *s = step->step;
    for (int i = 0; i < s->read_count; i++) {
        if (!is_temporary(e, s->values[i])) continue;
        const ml_value *value = &e->plan->schedule->values.at[s->values[i]];
        const int64_t bytes = ml_type_bytes(&value->type);
        ML_TRY(cuda_tune_fill(e->device, step->pointers[i], bytes));
    }
    return ML_OK;
}

static ml_status time_once(bench *b, kind which, float *best) {
    CUstream stream = b->executable->device->stream;
    float ms;
    CUDA_TRY(cuEventRecord(b->begin, stream));
    ML_TRY(cuda_enqueue(b->executable, &b->step[which]));
    CUDA_TRY(cuEventRecord(b->end, stream));
    CUDA_TRY(cuEventSynchronize(b->end));
    CUDA_TRY(cuEventElapsedTime(&ms, b->begin, b->end));
    if (ms < *best) *best = ms;
    return ML_OK;
}

/* By turns, so that both meet the same clocks; the first runs load the kernels. */
static ml_status time_both(bench *b, const char *what, kind *winner) {
    float best[KINDS];
    CUDA_TRY(cuEventCreate(&b->begin, CU_EVENT_DEFAULT));
    CUDA_TRY(cuEventCreate(&b->end, CU_EVENT_DEFAULT));
    for (int run = 0; run <= RUNS; run++)
        for (int i = 0; i < KINDS; i++) {
            if (run <= 1) best[i] = 1e30f;
            ML_TRY(time_once(b, (kind)i, &best[i]));
        }
    *winner = best[OWN] < best[CUDNN] ? OWN : CUDNN;
    ml_debug(1, "attention: %s: cuDNN %.3f ms, own kernels %.3f ms: %s\n", what,
             (double)best[CUDNN], (double)best[OWN], kind_names[*winner]);
    return ML_OK;
}

static ml_status decide_alone(ml_executable *e, const cuda_step *step, kind *winner) {
    bench b = {.executable = e, .step = {*step, *step}};
    if (recall(e->device, step->tuning, winner) || !may_write(e, step->step)) return ML_OK;
    b.step[OWN].attention = NULL;
    ML_TRY(fill_reads(e, step));
    ml_status status = time_both(&b, step->what, winner);
    cuda_wait_for(e->device, NULL);
    if (b.begin) CUDA_OK(cuEventDestroy(b.begin));
    if (b.end) CUDA_OK(cuEventDestroy(b.end));
    if (status == ML_OK) remember(e->device, step->tuning, *winner);
    return status;
}

ml_status cuda_attention_tune(ml_executable *e, cuda_step *step) {
    kind winner = CUDNN;
    if (cuda_tune_chooses(e->device)) ML_TRY(decide_alone(e, step, &winner));
    int64_t shared = winner;
    ML_TRY(cuda_tune_share(e->device, &shared, sizeof shared));
    step->undecided = false;
    if (shared != OWN) return ML_OK;
    cuda_attention_free(e->device, step->attention);
    step->attention = NULL;
    return ML_OK;
}
#endif
