/* Attention on CUDA with tensor cores by mma.sync (cuda/attention_mma*): bf16, head sizes up to 256
 * in steps of 8. Chooses rows of tiles by what fits registers, and shared memory for two blocks of
 * a multiprocessor. */
#include "codegen/kernels/attention.h"

enum { LARGE = 128, LARGEST = 256, TENSOR_CORES = 80 };

/* 16-byte accesses: rows are contiguous and start at multiples of eight elements. */
static bool aligned(const attention_printer *p, int i, bool statistics) {
    if (statistics) return true;
    const ml_attention_strides *s = &p->a->strides[i];
    int64_t all = s->head | s->seq | s->batch[0] | s->batch[1] | s->batch[2] |
                  template_value(p->schedule, p->step, i)->offset;
    return s->dim == 1 && all % 8 == 0;
}

bool attention_aligned(const attention_printer *p) {
    const ml_attention_step *a = p->a;
    if (a->dtype != ML_BF16 || a->head_dim % 8 || a->value_dim % 8) return false;
    int reads = a->backward ? 6 : 3, writes = a->backward ? 3 : 2;
    for (int i = 0; i < reads; i++)
        if (!aligned(p, i, i == 4)) return false;
    for (int i = 0; i < writes; i++)
        if (!aligned(p, p->step->read_count + i, !a->backward && i == 1)) return false;
    return true;
}

typedef struct {
    int64_t head, value; /* columns of tiles */
    int64_t both;        /* elements of a row of q or k and one of v or dO in shared memory */
    bool huge, large;    /* heads above 128, above 64 */
    bool tight; /* tiles for heads of 128, 192 rows of both, are more than a block may have */
} mma_widths;

static mma_widths widths_of(const attention_printer *p) {
    enum { PADDING = 8, ROWS = 192, ROOM = 1024 };
    const ml_attention_step *a = p->a;
    mma_widths w = {.huge = a->head_dim > LARGE || a->value_dim > LARGE};
    int64_t step = w.huge ? 32 : 16; /* a half is whole tiles too */
    w.head = attention_round_up(a->head_dim, step);
    w.value = attention_round_up(a->value_dim, step);
    w.both = w.head + w.value + 2 * PADDING;
    w.large = w.head > 64 || w.value > 64;
    w.tight = ROWS * w.both * 2 + ROOM > ml_target_shared(p->schedule->target->arch);
    return w;
}

/* `tiles`: of 16 rows, that each of four warps owns; `rows`: of a slot. */
static void forward(attention_printer *p, const mma_widths *w) {
    int64_t tiles = w->huge ? 1 : 2, own = 64 * tiles, rows = w->huge || w->tight ? 32 : 64;
    int64_t widest = (w->head > w->value ? w->head : w->value) + 8;
    attention_set(p, "WARP_TILES", tiles);
    attention_set(p, "KEYS", rows);
    int64_t blocks = attention_divide_up(p->a->seq, own) * p->a->heads * p->batches;
    p->step->kernel = attention_kernel(p, "attention_mma_forward.cu", "attention", blocks, 128,
                                       own * widest * 2 + 2 * rows * w->both * 2);
}

static ml_kernel *backward_queries(attention_printer *p, const mma_widths *w) {
    int64_t tiles = w->huge || (w->large && w->tight) ? 1 : 2, own = 64 * tiles;
    int64_t rows = w->huge ? 16 : w->large ? 32 : 64;
    attention_set(p, "WARP_TILES", tiles);
    attention_set(p, "KEYS", rows);
    int64_t blocks = attention_divide_up(p->a->seq, own) * p->a->heads * p->batches;
    return attention_kernel(p, "attention_mma_dq.cu", "attention_grad dq", blocks, 128,
                            own * w->both * 2 + 2 * rows * w->both * 2 + 8 * own);
}

static ml_kernel *backward_keys(attention_printer *p, const mma_widths *w) {
    int64_t tiles = w->large ? 1 : 2, own = 64 * tiles, parts = w->huge ? 2 : 1;
    int64_t rows = w->huge ? 16 : w->large && !w->tight ? 64 : 32;
    attention_set(p, "WARP_TILES", tiles);
    attention_set(p, "KEYS", own);
    attention_set(p, "QUERIES", rows);
    attention_set(p, "PARTS", parts);
    int64_t blocks = attention_divide_up(p->a->kv_seq, own) * parts * p->a->kv_heads * p->batches;
    return attention_kernel(p, "attention_mma_dkv.cu", "attention_grad dk dv", blocks, 128,
                            own * w->both * 2 + 2 * rows * w->both * 2 + 4 * rows * 4);
}

bool attention_mma(attention_printer *p) {
    const ml_attention_step *a = p->a;
    if (p->schedule->target->arch < TENSOR_CORES || a->head_dim > LARGEST ||
        a->value_dim > LARGEST || !attention_aligned(p))
        return false;
    mma_widths w = widths_of(p);
    attention_bind_units(p);
    attention_set(p, "HEAD_WIDTH", w.head);
    attention_set(p, "VALUE_WIDTH", w.value);
    if (!a->backward) {
        forward(p, &w);
        return true;
    }
    p->step->kernel = backward_queries(p, &w);
    p->step->kernel->next = backward_keys(p, &w);
    return true;
}
