/* What the attention templates for C and for CUDA share: the texts of sizes, strides and pasted
 * functions. Kernel texts name a query position `qi`, a key position `kv`, a query head `head` and
 * a linear batch index `batch` (all int), and call the score `x`. qi and kv count from the first
 * rows that the kernel has; a function that speaks of masks or scores begins with ${places}, which
 * declares where these lie in the whole, q_start and k_start, and the query's `shift` against the
 * keys, where the host does not know them. */
#ifndef ML_TEMPLATE_ATTENTION_H
#define ML_TEMPLATE_ATTENTION_H

#include "codegen/kernels/template.h"

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    const ml_attention_step *a;
    ml_template text;
    int captured, captured_first; /* captured tensors: count, position of the first */
    bool placed;                  /* its places are the two operands before */
    int64_t batches, group;       /* product of batch axes; query heads of a K/V head */
    int masks;                    /* taken off the score function (template_attention_score.c) */
    bool masked_by_head, open_score_is_plain;
    struct splitter *splitter; /* while it prints */
} attention_printer;

/* Sets: seq kv_seq heads kv_heads group head_dim value_dim batches scale; memory, load, store
 * (names of functions, or nothing); for each tensor NAME of q k v o lse g (do) dq dk dv: NAME_at
 * (its pointer), NAME_batch (offset text of `batch`), NAME_head, NAME_seq, NAME_dim; masks and
 * ranges (see set_masks); places; lse_memory; captures (declarations), score, derivative.
 * The pasted functions: score replaces x; derivative replaces `slope`, d loss / d score, given the
 * score before the function in `raw`. */
void attention_begin(attention_printer *p, ml_schedule *s, ml_step *step);
int64_t attention_round_up(int64_t n, int64_t to);

/* Takes the score function apart: p->masks tells how many masks were at its root. If any, sets
 * shown: statements that end in a bool of that name. For attention_open_score. */
void attention_split_score(attention_printer *p, const ml_function *f);
/* From here on `score` and `derivative` are those where masks show it. For each row of a tile, with
 * its query in qi and the first key in kv, comes `line_rows` first, which sets what `lines`
 * declares for `row` 0 and 1; `score` wants `row`, and how many keys after the first in the float
 * `step`. In gradients rows are keys and steps queries. Call it after attention_set_units. */
void attention_open_score(attention_printer *p);
/* States of blocks of 64 queries by 64 keys: workspace for them, at `states_at`, and the kernel
 * that writes them, a byte each; q_parts by k_parts of them a batch and, if p->masked_by_head,
 * head. */
enum { ATTENTION_PART = 64, ATTENTION_PARTLY_SHOWN = 1, ATTENTION_SHOWN = 2 };
void attention_reserve_states(attention_printer *p, ml_schedule *s);
ml_kernel *attention_states_kernel(attention_printer *p);
/* Lists of a block's tiles from these states, or none, and what is hidden in tiles that are partly
 * shown: for template_attention_wgmma.c. */
extern const char attention_list_text[], attention_no_list_text[], attention_hide_text[];

void template_attention_c(ml_schedule *s, ml_step *step);
void template_attention_cuda(ml_schedule *s, ml_step *step);
/* Tensor-core kernels for bf16; false where they do not serve these shapes (template_mma.c). */
bool template_attention_mma(attention_printer *p);
/* Workspace of those on Hopper: before any text is printed. */
void attention_wgmma_reserve(attention_printer *p, ml_schedule *s);
/* The same on Hopper's warpgroup products (template_attention_wgmma.c). */
bool template_attention_wgmma(attention_printer *p);
/* bf16 on tensor cores: 16-byte accesses fit every operand; units of exponents (template_mma.c). */
bool attention_aligned(const attention_printer *p);
void attention_set_units(attention_printer *p);
void attention_set_score_units(attention_printer *p, bool scored);

/* How a kernel on warpgroup products is cut: warpgroups of 64 rows, rows of the tiles that pass by,
 * stages of these, blocks on a multiprocessor; whether for the gradient. MLUA_WGMMA=N takes variant
 * N of each table, from 1. */
enum { ATTENTION_VARIANTS = 3 };
typedef struct {
    int groups, tile, stages, resident;
    int fewer;  /* registers of a thread that copies; 0: few */
    int works;  /* forward: blocks of queries of a thread block; 0: one */
    bool turns; /* warpgroups issue their products in turns */
    bool gradient;
} attention_tile;
/* Expand bodies after what such kernels share; pointers and sizes are set. */
ml_kernel *attention_wgmma_kernel(attention_printer *p, const attention_tile *tile,
                                  const char *const *bodies, int count, const char *label);
/* dq, dk and dv (template_attention_wgmma_grad.c). */
void attention_wgmma_gradient(attention_printer *p);
/* Its texts for what goes in and out of blocks (template_attention_wgmma_supply.c): bulk copies and
 * turns; shared memory; those who bring operands; those who add dq. */
extern const char attention_grad_bulk[], attention_grad_parts[], attention_grad_supply[],
    attention_grad_add[];
int64_t attention_width(const attention_printer *p);
bool attention_wgmma_serves(const attention_printer *p);
/* f32 elements of workspace that the gradient wants; 0: as others do. */
int64_t attention_wgmma_sums(const attention_printer *p);

#endif
