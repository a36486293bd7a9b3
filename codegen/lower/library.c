#include "codegen/lower/library.h"

#include "runtime/base/divisor.h"

enum { MAX_SLICES = 256 };
/* Bytes of dS of a slice: as few as keep a GPU busy, more where that takes too many slices; the
 * smallest slice, one K/V head of one sample, may have up to the last. */
static const int64_t SLICE_BYTES = (int64_t)1 << 28, MOST_BYTES = (int64_t)1 << 30;
static const double SMALLEST_SLICE_BYTES = 0x1p31;

const char *ml_attention_refused(const ml_attention_step *a) {
    if (a->no_cudnn) return "MLUA_CUDNN=0";
    if (!ml_is_narrow(a->dtype)) return "cuDNN's attention computes in bf16 and f16";
    if (a->args.score) return "it has a score function";
    if (a->args.pieces) return "where its queries and keys begin is known at run time only";
    if (a->args.key_ranks) return "its keys are in the order of ranks";
    if (a->args.causal && a->seq != a->kv_seq) return "it is causal over more keys than queries";
    if (a->args.window && !a->args.causal) return "it has a window and is not causal";
    if (a->head_dim % 8 || a->value_dim % 8) return "a head size is no multiple of 8";
    if (a->head_dim > 256 || a->value_dim > 256) return "a head size is above 256";
    if (a->batch[0] * a->batch[1] * a->batch[2] == 0 || a->seq == 0 || a->kv_seq == 0)
        return "it is empty";
    return NULL;
}

/* Into how few slices n is cut so that none has more than `most`; 0 where that takes too many. */
static int64_t slices_of(int64_t n, int64_t most) {
    return ml_divisor_from(n, most > 0 ? (n - 1) / most + 1 : n, MAX_SLICES);
}

/* Bytes of dS of all query heads of one K/V head of one sample, in bf16; beyond int64 for the
 * longest sequences that a graph can hold. */
static double slice_bytes(const ml_attention_step *a) {
    return 2.0 * (double)(a->heads / a->kv_heads) * (double)a->seq * (double)a->kv_seq;
}

/* Whether slices of at most `most` bytes are few enough. */
static bool cut(const ml_attention_step *a, int64_t most, int64_t *batch_slices,
                int64_t *head_slices) {
    const int64_t samples = a->batch[0] * a->batch[1] * a->batch[2];
    const double each = slice_bytes(a), sample = each * (double)a->kv_heads;
    const bool whole = sample <= (double)most; /* a slice has all heads of its samples */
    *batch_slices = whole ? slices_of(samples, most / (int64_t)sample) : samples;
    *head_slices = whole ? 1 : slices_of(a->kv_heads, most / (int64_t)each);
    if (*batch_slices == 0 || *batch_slices > MAX_SLICES || *head_slices == 0) return false;
    return *batch_slices * *head_slices <= MAX_SLICES;
}

bool ml_attention_slices(const ml_attention_step *a, int64_t *batch_slices, int64_t *head_slices) {
    if (slice_bytes(a) > SMALLEST_SLICE_BYTES) return false;
    for (int64_t most = SLICE_BYTES; most <= MOST_BYTES; most *= 2)
        if (cut(a, most, batch_slices, head_slices)) return true;
    return false;
}

/* Row sums; a gradient of K and V for each query head where heads share; dS, or dQ in f32. */
static int64_t backward_bytes(const ml_attention_step *a) {
    const bool deterministic = !a->nondeterministic;
    int64_t batch_slices = 1, head_slices = 1;
    if (deterministic && !ml_attention_slices(a, &batch_slices, &head_slices)) return 0;
    const int64_t samples = a->batch[0] * a->batch[1] * a->batch[2];
    const int64_t kv_heads = samples * a->kv_heads / (batch_slices * head_slices);
    const int64_t group = a->heads / a->kv_heads, heads = kv_heads * group;
    int64_t bytes = heads * a->seq * 4 + 4096;
    if (group > 1) bytes += heads * a->kv_seq * (a->head_dim + a->value_dim) * 2;
    if (deterministic) return bytes + kv_heads * (int64_t)slice_bytes(a);
    return bytes + heads * a->seq * a->head_dim * 4;
}

int64_t ml_attention_workspace(const ml_attention_step *a) {
    return a->backward && !ml_attention_refused(a) ? backward_bytes(a) : 0;
}

int64_t ml_library_workspace(const ml_schedule *s) {
    for (uint32_t i = 0; i < s->steps.count; i++)
        if (s->target->kind == ML_TARGET_CUDA && s->steps.at[i].kind == ML_STEP_GEMM)
            return ML_GEMM_WORKSPACE;
    return 0;
}
