/* The lists of passes of the whole compiler: for each its name, function and purpose, and when it
 * runs. Most are optimizations: shorter lists compile the same programs. */
#include <string.h>

#include "runtime/compile_passes.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/conv/conv.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/quantize/scale_products.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/ops/recurrence/recurrence.h"
#include "runtime/optimize/optimize.h"
#include "runtime/passes/passes.h"
#include "runtime/plan/plan_internal.h"

static bool on_gpu(const pass_context *c) {
    return c->plan->target->kind == ML_TARGET_CUDA;
}

static bool on_fused_gpu(const pass_context *c) {
    return on_gpu(c) && !c->plan->target->no_fuse;
}

static bool trades(pass_context *c) {
    return pass_has_layout(c) && ml_trade_once_applies(c->plan->graph);
}
static ml_graph *trade_once(pass_context *c) {
    ml_plan *plan = c->plan;
    ml_roots before = plan->roots;
    plan_roots(plan, &before);
    ml_graph *made = ml_trade_once(plan->graph, &plan->roots, ML_ATTENTION_RUN);
    if (ml_traded_bytes(made, pass_times(c, made)) <
        ml_traded_bytes(plan->graph, pass_times(c, plan->graph)))
        return made;
    ml_graph_free(made);
    plan->roots = before;
    return plan->graph;
}

/* Where that leaves less to permute: tensors and sequences that are split, not parameters alone.
 * Tried as the graph is, and with rows that are gathered in the order of collectives. */
static ml_graph *propagate_layout(pass_context *c) {
    ml_plan *plan = c->plan;
    ml_graph *best = plan->graph;
    ml_roots before = plan->roots, best_roots = before;
    for (int i = 0; i < 2; i++) {
        plan_roots(plan, &before);
        ml_graph *begin = i ? ml_gather_in_order(plan->graph, &plan->roots) : plan->graph;
        if (!begin) continue;
        ml_graph *moved = ml_propagate_layout(begin, &plan->roots);
        if (i) ml_graph_free(begin);
        bool better = ml_permuted_bytes(moved, pass_times(c, moved)) <
                      ml_permuted_bytes(best, pass_times(c, best));
        ml_graph *worse = better ? best : moved;
        if (worse != plan->graph) ml_graph_free(worse);
        if (better) best = moved, best_roots = plan->roots;
    }
    plan->roots = best_roots;
    return best;
}

static bool gathers_sorted(pass_context *c) {
    return on_gpu(c) && ml_invert_permutations_applies(c->plan->graph);
}
/* Of steps of decoding, which send few rows to experts. */
static bool counts_sorts(pass_context *c) {
    return on_fused_gpu(c) && c->plan->roots.often && ml_count_sorts_applies(c->plan->graph);
}
static bool splits_sums(pass_context *c) {
    return on_gpu(c) && ml_split_scaled_sums_applies(c->plan->graph);
}
static bool splits_products(pass_context *c) {
    return on_fused_gpu(c) && ml_split_f32_products_applies(c->plan->graph);
}
/* On a GPU the casts of weights to bf16, which are needed anyway, write merged weights side by
 * side. The CPU computes with the f32 states themselves, which would have to be copied at each
 * step. */
static bool merges_products(pass_context *c) {
    return on_fused_gpu(c);
}

static bool joins_collectives(pass_context *c) {
    return merges_products(c) && pass_has_layout(c);
}

static bool gathers_together(pass_context *c) {
    return joins_collectives(c) && ml_gather_together_applies(c->plan->graph);
}

/* Programs that run often, such as the steps of generation, compute in the compute dtype. */
static bool has_fp8_products(pass_context *c) {
    return !c->plan->roots.often && ml_scale_products_applies(c->plan->graph);
}
static bool has_scaled_products(pass_context *c) {
    return ml_widen_scaled_products_applies(c->plan->graph);
}
static bool serves_scaled(const void *context, const ml_graph *g, ml_ref n) {
    return ml_graph_node(g, n)->op == ML_OP_DOT ? ml_scaled_product_library(context, g, n)
                                                : ml_scaled_ragged_kernel(context, g, n);
}
static ml_graph *widen_scaled_products(pass_context *c) {
    ml_plan *plan = c->plan;
    return ml_widen_scaled_products(plan->graph, &plan->roots, serves_scaled, plan->target);
}

static bool has_conv(pass_context *c) {
    return ml_decompose_conv_applies(c->plan->graph);
}
static bool has_linear_scan(pass_context *c) {
    return ml_decompose_linear_scans_applies(c->plan->graph);
}
static bool has_scan_kernel(const void *context, const ml_graph *g, ml_ref n) {
    const ml_target *target = context;
    ml_linear_scan scan;
    ml_linear_scan_read(g, n, &scan);
    if (target->kind != ML_TARGET_CUDA || target->no_fuse) return false;
    return ml_linear_scan_is_scalar(&scan) ? ml_linear_scan_kernel(target, g, n)
                                           : ml_delta_scan_kernel(target, g, n);
}
static bool has_gpu_scan(pass_context *c) {
    return on_fused_gpu(c) && has_linear_scan(c);
}
static ml_graph *segment_linear_scans(pass_context *c) {
    enum { LEAST = 512 }; /* positions of a segment, which share the cost of its map */
    ml_plan *plan = c->plan;
    return ml_segment_linear_scans(plan->graph, &plan->roots, plan->target->multiprocessors, LEAST,
                                   has_scan_kernel, plan->target);
}
static ml_graph *decompose_linear_scans(pass_context *c) {
    ml_plan *plan = c->plan;
    return ml_decompose_linear_scans(plan->graph, &plan->roots, has_scan_kernel, plan->target);
}
static bool has_segments(pass_context *c) {
    return ml_resize_segments_applies(c->plan->graph);
}
static ml_graph *resize_segments(pass_context *c) {
    return ml_resize_segments(c->plan->graph, &c->plan->roots, c->choice.segment, &c->scan);
}
static bool shares_segments(pass_context *c) {
    return pass_has_layout(c) && has_segments(c);
}
static ml_graph *share_segments(pass_context *c) {
    return ml_share_segments(c->plan->graph, &c->plan->roots, c->plan->layout);
}
static bool resized_segments(pass_context *c) {
    return c->scan > 0;
}
static bool chooses_half_batch(pass_context *c) {
    if (!plan_half_batch(c->plan, c->choice.overlap, &c->half_axis, &c->half_size))
        c->half_size = 0;
    return c->half_size > 0;
}
static bool has_half_batch(pass_context *c) {
    return c->half_size > 0;
}
static ml_graph *half_batch(pass_context *c) {
    return ml_half_batches(c->plan->graph, &c->plan->roots, c->half_axis, c->half_size);
}

/* Logits are a larger share of what a program with products of 8 bits needs, and smaller chunks
 * cost it as much as others: 0.3 % of a step of llama-3b for 0.5 GiB. */
static int64_t chunk_bytes(pass_context *c) {
    int64_t bytes = c->plan->options->chunk_bytes;
    if (bytes > 0) return bytes;
    return has_scaled_products(c) ? ML_CHUNK_BYTES / 2 : ML_CHUNK_BYTES;
}
static bool chunks(pass_context *c) {
    c->chunked =
        ml_chunk_logits_applies(c->plan->graph, chunk_bytes(c)) && !c->plan->target->no_fuse;
    return c->chunked;
}
static bool has_chunks(pass_context *c) {
    return c->chunked;
}
/* Of chunks, or of a parameter that a program of microbatches uses twice: tied embeddings. */
static bool adds_terms(pass_context *c) {
    const ml_plan *plan = c->plan;
    return c->chunked ||
           (plan->roots.microbatches > 1 && !(plan->layout != NULL && plan->layout->stages.on));
}
static ml_graph *chunk_logits(pass_context *c) {
    return ml_chunk_logits(c->plan->graph, &c->plan->roots, chunk_bytes(c));
}

static bool defers_weight_grad(pass_context *c) {
    return c->input_wave != NULL;
}
static ml_graph *reuse_slices(pass_context *c) {
    return ml_reuse_concat_slices(c->plan->graph, &c->plan->roots, c->input_wave);
}
static bool has_expert_norms(pass_context *c) {
    return on_fused_gpu(c) && ml_fuse_expert_norms_applies(c->plan->graph);
}
/* Kernels of products have what to continue with in registers. */
static bool has_gated_experts(pass_context *c) {
    enum { HOPPER = 90 };
    return on_fused_gpu(c) && c->plan->target->arch == HOPPER && !c->plan->target->no_tma &&
           ml_fuse_gated_experts_applies(c->plan->graph);
}

static bool reads_sharded(pass_context *c) {
    c->sharded = plan_reads_sharded(c->plan);
    return c->sharded;
}
static ml_graph *gather_sharded(pass_context *c) {
    return plan_gather_sharded(c->plan);
}
static bool caches_params(pass_context *c) {
    return c->param_cache || c->sharded;
}
static ml_graph *param_cache(pass_context *c) {
    return plan_param_cache(c->plan, c->param_cache);
}

/* Over the global graph. A program is divided into pipeline stages after them. */
static const compile_pass global_passes[] = {
    {"extract", .run_with = pass_extract, .purpose = "the nodes that the program's results need"},
    {"drop_placements", ml_drop_placements, .when = pass_has_placements,
     .purpose = "shardings that the script asks for mean nothing on one rank"},
    {"conform_updates", .run_with = pass_conform_updates,
     .purpose = "new values take the dtype and the axis order of their states"},
    {"fold_layers", .run_with = pass_fold_layers, .when = pass_folds_layers,
     .purpose =
         "most of the layers that repeat are left out of the passes up to where they are unfolded"},
    {"simplify", ml_simplify,
     .purpose = "what scripts and autodiff leave: constants, casts there and back, equal nodes"},
    {"scale_products", ml_scale_products, .when = has_fp8_products,
     .purpose = "products of blocks round their operands to 8 bits, with a scale for each tensor"},
    {"unfold_stages", .run_with = pass_unfold_layers, .when = pass_has_folded_stages,
     .purpose = "what became of a layer is repeated for those that were left out, for stages"},
};

/* Over the graph of one rank, whatever is done to save memory: attempts share their result. */
static const compile_pass rank_passes[] = {
    {"share_segments", .run_with = share_segments, .when = shares_segments,
     .purpose = "scans whose axis ranks share get as many segments on each rank"},
    {"shard", .run_with = pass_shard, .when = pass_has_layout,
     .purpose = "the part of one rank, with collectives"},
    {"simplify_sharded", ml_simplify, .when = pass_has_layout,
     .purpose = "movements around collectives cancel, equal collectives become one"},
    {"trade_once", .run_with = trade_once, .when = trades,
     .purpose = "ranks that trade positions for attention do so once, for all between attentions"},
    {"propagate_layout", .run_with = propagate_layout, .when = pass_has_layout,
     .purpose = "permutations move away from collectives until they cancel"},
    {"invert_permutations", ml_invert_permutations, .when = gathers_sorted,
     .purpose = "scatter-adds at sorted indices become sums of gathers"},
    {"count_sorts", ml_count_sorts, .when = counts_sorts,
     .purpose = "sorts and running sums of few elements become sums of comparisons"},
    {"split_scaled_sums", ml_split_scaled_sums, .when = splits_sums,
     .purpose = "factors that are constant along a sum leave it"},
    {"decompose_conv", ml_decompose_conv, .when = has_conv,
     .purpose = "convolutions become products and shifted views"},
    {"segment_linear_scans", .run_with = segment_linear_scans, .when = has_gpu_scan,
     .purpose = "scans with few rows are cut into segments that run side by side"},
    {"decompose_linear_scans", .run_with = decompose_linear_scans, .when = has_linear_scan,
     .purpose = "scans that no kernel serves become products over chunks of positions"},
    {"decompose_attention", .run_with = pass_decompose,
     .purpose = "attention over few keys becomes products and a softmax"},
    {"simplify_decomposed", ml_simplify,
     .purpose = "what the passes since sharding leave: equal nodes, movements that cancel"},
    {"split_f32_products", ml_split_f32_products, .when = splits_products,
     .purpose = "narrow products of f32 become products of bf16"},
    {"merge_products", ml_merge_products, .when = merges_products,
     .purpose = "products that share an operand become one"},
    {"join_collectives", ml_join_collectives, .when = joins_collectives,
     .purpose =
         "slices of one product are gathered, and its gradients added up over ranks, as one"},
    {"gather_together", ml_gather_together, .when = gathers_together,
     .purpose =
         "keys and values of an attention are gathered, and their gradients added up, as one"},
    {"widen_scaled_products", .run_with = widen_scaled_products, .when = has_scaled_products,
     .purpose = "products of 8 bits that no library serves are computed of bf16"},
    {"simplify_merged", ml_simplify, .when = merges_products,
     .purpose = "slices of merged results cancel against what joined them"},
    {"unfold_layers", .run_with = pass_unfold_layers, .when = pass_has_left_out,
     .purpose = "what became of a layer is repeated for those that were left out"},
};

/* Over the graph of one rank, depending on the choices by which attempts differ. */
static const compile_pass choice_passes[] = {
    {"resize_segments", .run_with = resize_segments, .when = has_segments,
     .purpose = "segments of scans, whose states are computed again, get a length, or are dropped"},
    {"simplify_segments", .run_with = pass_simplify_parts, .when = resized_segments,
     .purpose = "what a scan of one segment and its gradient compute alike"},
    {"half_batch_overlap", .run_with = half_batch, .when = chooses_half_batch,
     .purpose = "the halves of the batch alternate, to hide collectives"},
    {"split_half_sums", ml_split_accumulation, .when = has_half_batch,
     .purpose = "gradients of the halves are added to their state one after the other"},
    {"simplify_halves", .run_with = pass_simplify_parts, .when = has_half_batch,
     .purpose = "slices of slices, and what both halves compute alike"},
    {"chunk_logits", .run_with = chunk_logits, .when = chunks,
     .purpose = "large logits and their loss are computed in chunks of tokens"},
    {"split_sums", ml_split_accumulation, .when = adds_terms,
     .purpose = "terms of a gradient are added to its state one after the other"},
    {"simplify_chunks", .run_with = pass_simplify_parts, .when = has_chunks,
     .purpose = "slices of slices, and what all chunks compute alike"},
    {"recompute", .run_with = pass_recompute, .when = pass_recomputes,
     .purpose = "values are computed again in the backward pass where that saves memory"},
    {"reuse_concat_slices", .run_with = reuse_slices, .when = defers_weight_grad,
     .purpose = "deferred products read slices of what is stored anyway"},
    {"fuse_expert_norms", ml_fuse_expert_norms, .when = has_expert_norms,
     .purpose = "sums of squares come from the kernels of grouped products"},
    {"fuse_gated_experts", ml_fuse_gated_experts, .when = has_gated_experts,
     .purpose = "gates are applied in the kernels of grouped products"},
    {"gather_sharded", .run_with = gather_sharded, .when = reads_sharded,
     .purpose = "parameters that lie on ranks of several groups are gathered over all ranks"},
    {"param_cache", .run_with = param_cache, .when = caches_params,
     .purpose = "parameters are stored as products read them, beside their f32 states"},
};

void (*const compile_batch_kernels)(ml_plan *plan) = plan_batch_kernels;
void (*const compile_join_products)(ml_plan *plan) = plan_join_products;
void (*const compile_write_keys)(ml_plan *plan) = plan_write_keys;
void (*const compile_offload)(ml_plan *plan, int64_t limit, bool exposed) = plan_offload;

const compile_pass_list compile_pass_lists[PASS_LISTS] = {
    [PASSES_GLOBAL] = {global_passes, sizeof global_passes / sizeof *global_passes},
    [PASSES_RANK] = {rank_passes, sizeof rank_passes / sizeof *rank_passes},
    [PASSES_CHOICE] = {choice_passes, sizeof choice_passes / sizeof *choice_passes},
};
