/* Which kernels serve a step of attention: on the CPU one family; on CUDA the fastest of warpgroup
 * products, tensor cores and general kernels that its dtype, strides and sizes allow. */
#include "codegen/kernels/attention.h"
#include "codegen/lower/library.h"

/* ---- The CPU */

/* Registers: 2 MR sums, 2 of b, 1 of a. Tiles of 64 x 64 stay in the first two caches. */
typedef struct {
    int64_t vector_bytes, lanes, mr, queries, keys, unit;
} c_blocking;

static c_blocking choose_blocking(const ml_attention_step *a, const ml_target *target) {
    c_blocking b = {.vector_bytes = target->vector_bytes ? target->vector_bytes : 16};
    int64_t most = a->dtype == ML_F64 ? 32 : 64;
    b.lanes = b.vector_bytes / (a->dtype == ML_F64 ? 8 : 4), b.mr = b.vector_bytes == 64 ? 8 : 4;
    b.unit = b.lanes > b.mr ? b.lanes : b.mr;
    b.queries = attention_round_up(a->seq < most ? a->seq : most, b.unit);
    b.keys = attention_round_up(a->kv_seq < most ? a->kv_seq : most, b.unit);
    return b;
}

static void bind_blocking(attention_printer *p, const c_blocking *b) {
    attention_set(p, "VECTOR_BYTES", b->vector_bytes);
    attention_set(p, "LANES", b->lanes);
    attention_set(p, "MR", b->mr);
    attention_set(p, "QUERIES", b->queries);
    attention_set(p, "KEYS", b->keys);
    attention_set(p, "HEAD_WIDTH", attention_round_up(p->a->head_dim, b->unit));
    attention_set(p, "VALUE_WIDTH", attention_round_up(p->a->value_dim, b->unit));
    template_set_text(&p->text, "LANE_INTEGER", p->a->dtype == ML_F64 ? "long long" : "int");
}

static ml_kernel *c_kernel(attention_printer *p, const char *file, const char *label,
                           int64_t units) {
    ml_kernel *k = template_file(&p->text, file, label, p->step->read_count + p->step->write_count);
    k->units = units;
    return k;
}

static void attention_c(ml_schedule *s, ml_step *step) {
    attention_printer p;
    attention_bind(&p, s, step);
    const ml_attention_step *a = p.a;
    c_blocking b = choose_blocking(a, s->target);
    bind_blocking(&p, &b);
    int64_t pairs = p.batches * a->kv_heads;
    int64_t query_blocks = p.batches * a->heads * attention_divide_up(a->seq, b.queries);
    int64_t key_blocks = pairs * attention_divide_up(a->kv_seq, b.keys);
    if (!a->backward) {
        step->kernel = c_kernel(&p, "attention_forward.c", "attention", query_blocks);
        return;
    }
    bool whole = !ml_is_narrow(a->dtype) && pairs >= 2 * s->target->threads;
    attention_set(&p, "WHOLE", whole);
    step->kernel =
        c_kernel(&p, "attention_grad_dkv.c", "attention_grad", whole ? pairs : key_blocks);
    if (!whole)
        step->kernel->next = c_kernel(&p, "attention_grad_dq.c", "attention_grad dq", query_blocks);
}

/* ---- CUDA */

/* Bytes of shared memory of the general kernels with tiles of `tile` rows. */
static int64_t simt_shared_bytes(const attention_printer *p, int64_t tile) {
    const ml_attention_step *a = p->a;
    int64_t head = a->head_dim | 1, value = a->value_dim | 1, real = a->dtype == ML_F64 ? 8 : 4;
    if (!a->backward) return tile * (2 * head + value + tile + 1) * real;
    return tile * (2 * head + 2 * value + 2 * (tile + 1) + 2) * real;
}

static void attention_simt(attention_printer *p) {
    const ml_attention_step *a = p->a;
    int64_t tile = simt_shared_bytes(p, 64) <= 98304 ? 64 : 32, bytes = simt_shared_bytes(p, tile);
    if (bytes > 227 * 1024)
        ml_raise(ML_INVALID, "attention with head size %lld and value size %lld is too large",
                 (long long)a->head_dim, (long long)a->value_dim);
    int64_t query_blocks = p->batches * a->heads * attention_divide_up(a->seq, tile);
    int64_t key_blocks = p->batches * a->kv_heads * attention_divide_up(a->kv_seq, tile);
    attention_set(p, "TILE", tile);
    if (!a->backward) {
        p->step->kernel =
            attention_kernel(p, "attention_simt_forward.cu", "attention", query_blocks, 256, bytes);
        return;
    }
    p->step->kernel =
        attention_kernel(p, "attention_simt_dq.cu", "attention_grad dq", query_blocks, 256, bytes);
    p->step->kernel->next = attention_kernel(p, "attention_simt_dkv.cu", "attention_grad dk dv",
                                             key_blocks, 256, bytes);
}

/* Workspace of the gradient, for whichever kernels run in the end, or cuDNN in the same place. */
static void reserve_workspace(attention_printer *p) {
    ml_schedule *s = p->schedule;
    ml_dtype dtype = p->a->dtype == ML_F64 ? ML_F64 : ML_F32;
    int64_t deltas = p->batches * p->a->heads * p->a->seq, wgmma = attention_wgmma_workspace(p);
    int at = template_workspace(s, p->step, dtype, wgmma > deltas ? wgmma : deltas);
    ml_storage *workspace = &s->storages.at[template_value(s, p->step, at)->storage];
    int64_t library = ml_attention_workspace(p->a);
    if (library > workspace->bytes) workspace->bytes = library;
    attention_bind_workspace(p, "DELTA_AT", at);
}

static void attention_cuda(ml_schedule *s, ml_step *step) {
    attention_printer p;
    attention_bind(&p, s, step);
    if (p.a->backward) reserve_workspace(&p);
    if (p.masks > 0 && attention_wgmma_serves(&p)) attention_reserve_states(&p);
    if (!attention_mma(&p)) attention_simt(&p);
    ml_kernel *fallback = step->kernel;
    if (attention_wgmma(&p)) step->kernel->fallback = fallback;
}

void ml_template_attention(ml_schedule *s, ml_step *step) {
    if (s->target->kind == ML_TARGET_CUDA)
        attention_cuda(s, step);
    else
        attention_c(s, step);
}
