/* Passes without which a program means the same and is slower or larger. As those of
 * runtime/passes: each builds a new graph and rewrites the roots; all raise. */
#ifndef ML_OPTIMIZE_H
#define ML_OPTIMIZE_H

#include "runtime/plan/plan.h"

/* Scatter-adds at the indices of a sort (or those divided by a number) become sums of gathers. */
ml_graph *ml_invert_permutations(const ml_graph *from, ml_roots *roots);
bool ml_invert_permutations_applies(const ml_graph *g); /* whether there is one */
/* Sorts of few integers, the orders that they give, and running sums, as sums of comparisons. */
ml_graph *ml_count_sorts(const ml_graph *from, ml_roots *roots);
bool ml_count_sorts_applies(const ml_graph *g); /* whether there is one */
/* Hoist loop-invariant factors out of reductions: the sum over an axis of a r + b s, where r and s
 * have no such axis, becomes r sum(a) + s sum(b). */
ml_graph *ml_split_scaled_sums(const ml_graph *from, ml_roots *roots);
bool ml_split_scaled_sums_applies(const ml_graph *g); /* whether there is one */
/* Narrow products of f32 with bf16 values, or of few elements and rounded to bf16 afterwards, in
 * terms of products of bf16. */
ml_graph *ml_split_f32_products(const ml_graph *from, ml_roots *roots);
bool ml_split_f32_products_applies(const ml_graph *g); /* whether there may be one */
/* Merge dots that share an operand into one over a CONCAT (q,k,v; gate,up and their gradients). */
ml_graph *ml_merge_products(const ml_graph *from, ml_roots *roots);
/* Behind it: gathered slices that are together one tensor become slices of it gathered, and sums of
 * which a CONCAT is made the sum of a CONCAT. */
ml_graph *ml_join_collectives(const ml_graph *from, ml_roots *roots);
/* Keys and values that an attention's ranks gather are gathered as one tensor, and their gradients
 * added up as one. */
ml_graph *ml_gather_together(const ml_graph *from, ml_roots *roots);
bool ml_gather_together_applies(const ml_graph *g); /* whether there may be such */
/* By product: where its result is gathered, a number for the mesh axis, and another one where it is
 * turned by positions (RoPE) before; else 0. Only products of one number are merged: the merged
 * result is sent as it is, where slices would be copied first, and products of what is not sent
 * (queries) run beside the gather. */
void ml_find_sent(const ml_graph *g, uint8_t *sent);
/* Where gradients are concatenated and also operands of other products, those products read slices
 * of the CONCAT, so that one tensor is saved and not two. input_wave: by INPUT id, the wave of the
 * pipeline in which it is received (0: of the script); no node moves to a later wave. */
ml_graph *ml_reuse_concat_slices(const ml_graph *from, ml_roots *roots, const int *input_wave);
/* Compute what lies between a product of more than `most_bytes` bytes (logits) and the sums and
 * products that use it up (the loss, gradients) in chunks of the product's outer axes, each with a
 * product of at most that size, so that none of it is ever whole in memory. The chunks' parts are
 * added in f32, in order. Products whose whole result is needed are left alone, and so are those
 * that no loss follows (layers' hidden tensors). Time in proportion to the nodes, but for losses
 * whose nodes lie inside one another's: a run for each. */
ml_graph *ml_chunk_logits(const ml_graph *from, ml_roots *roots, int64_t most_bytes);
/* Whether there is a product of that size at all. */
bool ml_chunk_logits_applies(const ml_graph *g, int64_t most_bytes);
/* After sharding: what is between attentions that trade halves of their queries with another rank
 * is computed in the traded order, so that inputs are traded in place of queries, results and
 * their gradients. Sums over positions, and updates that add them up, have other terms on each
 * rank; the ranks' together are the same. Attention reads keys in the order of ranks where halves
 * are multiples of `run` rows. */
ml_graph *ml_trade_once(const ml_graph *from, ml_roots *roots, int64_t run);
bool ml_trade_once_applies(const ml_graph *g); /* whether there are trades */
/* What trades between ranks take, in bytes: with what each of them takes whatever its size;
 * times[n] (or NULL: 1) nodes are like node n. */
double ml_traded_bytes(const ml_graph *g, const uint32_t *times);
/* Permutations move from operands to results, until they cancel: those around collectives, which
 * work along the outermost axis, would be copies otherwise. */
ml_graph *ml_propagate_layout(const ml_graph *from, ml_roots *roots);
/* Before it: rows that are gathered come in the order of collectives. NULL: there is none. */
ml_graph *ml_gather_in_order(const ml_graph *from, ml_roots *roots);
/* Of the results of all permutations; times[n] (or NULL: 1) nodes are like node n. */
int64_t ml_permuted_bytes(const ml_graph *g, const uint32_t *times);
/* After sharding: compute what depends on the inputs' `axis`, of `size` elements (even), by halves
 * of it, which alternate from one collective to the next, so that collectives of one half overlap
 * work of the other. Sums over the axis are those of the halves, added; those of bf16 are rounded
 * once. What cannot be split into halves is unchanged. Time in proportion to the nodes. */
ml_graph *ml_half_batches(const ml_graph *from, ml_roots *roots, ml_axis axis, int64_t size);
/* Terms of sums over microbatches, where those of one microbatch are several products (such as
 * those of chunks), are added to the state one after the other. After sharding: one by one they
 * would be reduced over ranks one by one too. */
ml_graph *ml_split_accumulation(const ml_graph *from, ml_roots *roots);
/* Whether the halves of the batch should alternate, where that hides collectives, and along which
 * axis. */
bool plan_half_batch(const ml_plan *plan, bool overlap, ml_axis *axis, int64_t *size);
/* Of a program of groups, before plan_param_cache: parameters that lie on ranks of several groups
 * are read as all-gathers over all ranks. */
bool plan_reads_sharded(const ml_plan *plan);
ml_graph *plan_gather_sharded(ml_plan *plan);
/* Of what rebuilds a cache: parameters that lie side by side in it are gathered as one. */
ml_graph *plan_gather_joined(const ml_graph *from, ml_roots *roots);
/* The graph with a cache of parameters, as states that are updated with the parameters: sets
 * plan->rebuild (whose steps are compiled with the program's); plan->graph where there is none.
 * Without `all`, of those alone that plan_gather_sharded has gathered. */
ml_graph *plan_param_cache(ml_plan *plan, bool all);
/* Join kernels that are alike: before memory is assigned, and after all that orders steps. */
void plan_batch_kernels(ml_plan *plan);
/* Products of few rows that share their first operand, and what computes it, become one kernel:
 * before memory is assigned. */
void plan_join_products(ml_plan *plan);
/* Cached attention writes the keys and values of new positions itself: after updates in place are
 * chosen. */
void plan_write_keys(ml_plan *plan);
/* Steps that copy temporaries to host memory where nothing reads them for long around the peak, and
 * back in time: as few as bring the plan's peak down to `limit` bytes, where computation hides
 * them, or, `exposed`, any. The plan's memory has been accounted for; it is placed anew. */
void plan_offload(ml_plan *plan, int64_t limit, bool exposed);

#endif
