/* The source of a kernel for CUDA, from its schedule. Each part calls those above it alone. */
#ifndef ML_CUDA_PRINT_H
#define ML_CUDA_PRINT_H

#include "codegen/emit/cuda_schedule.h"

/* cuda_index.c. The offset of an access over the loops inside the row; at pack level the innermost
 * index is that of the pack's first element. */
const char *cuda_access_text(const cuda_schedule *s, const ml_inst *inst, bool whole_pack);
const char *cuda_slot_text(const cuda_schedule *s, int pack, const char *slot); /* of a thread */
void cuda_print_unravel(const cuda_schedule *s, const char *linear, int first, int last,
                        const char *integer);
void cuda_print_pointers(const cuda_schedule *s);

/* cuda_pack.c */
void cuda_add_pack_type(ml_text *out, const cuda_schedule *s, int operand);
const char *cuda_pack_name(const cuda_schedule *s, int pack);
void cuda_print_pack_load(const cuda_schedule *s, int pack, const char *to);
void cuda_print_pack_loop(const cuda_schedule *s);
void cuda_print_combine(const cuda_schedule *s, int reduce, const char *to, const char *value);
void cuda_print_accumulator(const cuda_schedule *s, int reduce);
void cuda_print_total(const cuda_schedule *s, int inst); /* of a long sum: what was lost is added */

/* cuda_peephole.c */
void cuda_print_accumulators(const cuda_schedule *s, int phase);
void cuda_print_largest_end(const cuda_schedule *s, int phase);
bool cuda_print_simpler(const cuda_schedule *s, int inst); /* whether it did */

/* cuda_element.c */
void cuda_print_loops(const cuda_schedule *s, int phase, int first, int last);
void cuda_print_columns_outside(const cuda_schedule *s, int phase); /* loops around the packs' */
void cuda_print_elements(const cuda_schedule *s, int phase);        /* of a pack */

/* cuda_prefetch.c */
void cuda_print_start(const cuda_schedule *s); /* before a chunk's rows */
void cuda_print_step(const cuda_schedule *s);  /* before a row: request the next ones, await it */
void cuda_print_row_end(const cuda_schedule *s);
void cuda_print_commit(const cuda_schedule *s);
/* With one slot: before a pass that is some pack's last, find the address of the next row; and once
 * the pass has such a pack in registers, copy the next row's over it. */
void cuda_print_refill_start(const cuda_schedule *s, int phase);
void cuda_print_refill(const cuda_schedule *s, int pack, int phase);

/* cuda_block_reduce.c. "ml_team_reduce<...>(a3, ...)" over teams of `team` threads. */
const char *cuda_reduction_text(const cuda_schedule *s, int inst, int team);
void cuda_print_row_results(const cuda_schedule *s, int phase);

/* cuda_partial_reduce.c. Before a chunk's rows, and after them. */
void cuda_print_partials(const cuda_schedule *s, bool start);

/* cuda_online_softmax.c */
void cuda_print_group_start(const cuda_schedule *s); /* the loop over groups, of the last pass */
void cuda_print_group_end(const cuda_schedule *s);
void cuda_print_online_pass(const cuda_schedule *s, int phase);

#endif
