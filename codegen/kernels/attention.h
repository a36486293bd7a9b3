/* Attention, inside codegen/kernels: which kernels serve a step (attention.c, attention_mma.c,
 * attention_wgmma.c choose), the parameters that all of them share (attention_bind.c), and the
 * score function as text (attention_score.c). The kernels are cuda/attention*.cu and
 * c/attention*.c; their headers say what parameters mean. */
#ifndef ML_TEMPLATE_ATTENTION_H
#define ML_TEMPLATE_ATTENTION_H

#include "codegen/kernels/template.h"

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    const ml_attention_step *a;
    ml_template text;
    int captured, captured_first; /* captured tensors: count, position of the first */
    int pieces;                   /* of the queries; their places are operands before it */
    int64_t batches, group;       /* product of batch axes; query heads of a K/V head */
    int masks;                    /* taken off the score function (attention_score.c) */
    bool masked_by_head, open_score_is_plain;
    struct splitter *splitter; /* while it prints */
} attention_printer;

/* ---- Binding */

/* Binds the parameters of cuda/attention.cuh, cuda/attention_grad.cuh, cuda/attention_simt.cuh and
 * c/attention_mask.h, and of them all that c/attention.h shares. */
void attention_bind(attention_printer *p, ml_schedule *s, ml_step *step);
void attention_set(attention_printer *p, const char *name, int64_t value);
/* After workspace was added: one more pointer. */
void attention_bind_workspace(attention_printer *p, const char *name, int at);
/* A kernel of this file on CUDA; sizes as for template_launch. */
ml_kernel *attention_kernel(attention_printer *p, const char *file, const char *label,
                            int64_t blocks, uint32_t threads, int64_t shared_bytes);
/* cuda/attention_units.cuh. */
void attention_bind_units(attention_printer *p);
void attention_bind_exponents(attention_printer *p, bool scored);
int64_t attention_round_up(int64_t n, int64_t to);
int64_t attention_divide_up(int64_t n, int64_t by);

/* ---- The score function */

/* Takes the score function apart: p->masks counts the masks at its root. If any, binds SHOWN,
 * statements that end in a bool of that name, and what cuda/attention_blocks.cu compares. For
 * attention_open_score. */
void attention_split_score(attention_printer *p, const ml_function *f);
/* From here on SCORE and DERIVATIVE are those where masks show it. For each row of a tile, with its
 * query in qi and the first key in kv, comes LINE_ROWS first, which sets what LINES declares for
 * `row` 0 and 1; SCORE wants `row`, and how many keys after the first in the float `step`. In
 * gradients rows are keys and steps queries. Call it after attention_bind_units. */
void attention_open_score(attention_printer *p);
/* States of blocks of 64 queries by 64 keys (cuda/attention_blocks.cuh): workspace for them, and
 * the kernel that writes them. */
void attention_reserve_states(attention_printer *p);
ml_kernel *attention_states_kernel(attention_printer *p);

/* ---- Choosing */

/* bf16 on tensor cores: 16-byte accesses fit every operand. */
bool attention_aligned(const attention_printer *p);
/* Kernels on mma.sync (cuda/attention_mma*); false where they do not serve these shapes. */
bool attention_mma(attention_printer *p);
/* Kernels on Hopper's warpgroup products (cuda/attention_wgmma*). Their workspace is added before
 * any kernel: f32 elements for the gradient (0: as others), and states of blocks. */
bool attention_wgmma(attention_printer *p);
bool attention_wgmma_serves(const attention_printer *p);
int64_t attention_wgmma_workspace(const attention_printer *p);

#endif
