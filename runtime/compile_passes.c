/* The list of passes, and for each what it needs to know: when it runs, and on what. The rewrites
 * themselves are in runtime/passes, sharding in runtime/shard. */
#include "runtime/compile_passes.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/machine.h"
#include "runtime/ops/conv/conv.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/quantize/scale_products.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/passes/passes.h"
#include "runtime/plan/plan_internal.h"

typedef struct {
    const char *name;
    ml_graph *(*run)(const ml_graph *from, ml_roots *roots); /* one of run and run_with */
    ml_graph *(*run_with)(pass_context *c);                  /* may return the plan's own graph */
    bool (*when)(pass_context *c);                           /* NULL: always */
    const char *purpose;
} pass;

static bool on_gpu(const pass_context *c) {
    return c->plan->target->kind == ML_TARGET_CUDA;
}

static bool on_fused_gpu(const pass_context *c) {
    return on_gpu(c) && !c->plan->target->no_fuse;
}

/* Costs, memory and traffic are sums of bytes in int64: raise where all tensors of the program have
 * more than 2^60. */
static void check_total(const ml_plan *plan) {
    const ml_graph *g = plan->graph;
    const int64_t most = (int64_t)1 << 60;
    int64_t left = most;
    ml_ref largest = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        int64_t bytes = ml_type_bytes(ml_graph_type(g, n));
        if (!largest || bytes > ml_type_bytes(ml_graph_type(g, largest))) largest = n;
        left = bytes < left ? left - bytes : -1;
    }
    if (left >= 0) return;
    const ml_origin *origin = ml_graph_origin(g, largest);
    ml_text type = {.arena = plan->arena};
    ml_type_print(g, ml_graph_type(g, largest), &type);
    ml_fail(ML_INVALID, "the tensors of program \"%s\" have more than 2^60 bytes",
            plan->roots.name ? plan->roots.name : "");
    if (origin && origin->file)
        ml_help("the largest is %s from %s:%d", type.text, origin->file, origin->line);
    ml_raise_last();
}

static ml_graph *extract(pass_context *c) {
    plan_graph_set(c->plan, ml_graph_extract(c->plan->graph, &c->plan->roots));
    check_total(c->plan);
    return c->plan->graph;
}

static bool has_useless_placements(pass_context *c) {
    const ml_graph *g = c->plan->graph;
    if (c->plan->layout != NULL) return false;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->op == ML_OP_PLACE) return true;
    return false;
}

/* New values take the dtype and the axis order of their states. */
static ml_graph *conform_updates(pass_context *c) {
    ml_plan *plan = c->plan;
    ml_graph *g = plan->graph;
    for (int i = 0; i < plan->roots.update_count; i++) {
        ml_update *update = &plan->roots.updates[i];
        const ml_state *state = ml_graph_state(g, update->state);
        const ml_type *type = ml_graph_type(g, update->value);
        if (!ml_type_same_axes(&state->type, type)) {
            ml_text old = {.arena = plan->arena}, new = {.arena = plan->arena};
            ml_type_print(g, &state->type, &old);
            ml_type_print(g, type, &new);
            ml_raise(ML_INVALID, "state \"%s\" is %s and cannot be assigned %s",
                     state->name ? state->name : "?", old.text, new.text);
        }
        ml_graph_set_origin(g, ml_graph_origin(g, update->value));
        ml_ref value = ml_cast(g, update->value, state->type.dtype);
        update->value = ml_permute(g, value, &state->type);
    }
    return g;
}

static bool has_layout(pass_context *c) {
    return c->plan->layout != NULL && !c->plan->roots.step;
}

/* From the global program to that of one rank. The order of the results' axes does not change. */
static ml_graph *shard(pass_context *c) {
    ml_plan *plan = c->plan;
    ml_roots *r = &plan->roots;
    ml_type *types = ML_NEW_ARRAY(plan->arena, ml_type, (size_t)r->output_count + 1);
    for (int i = 0; i < r->output_count; i++) {
        const ml_type *type = ml_graph_type(plan->graph, r->outputs[i]);
        ml_placements places = {0};
        if (i >= r->output_count - r->kept)
            places = ml_layout_place(plan->layout, plan->graph, type, -1, NULL);
        types[i] = ml_layout_local(plan->layout, type, &places);
    }
    int asked = r->output_count;
    plan_graph_set(plan, ml_shard(plan->graph, r, plan->layout));
    if (r->overflow_count > 0) plan_roots(plan, &plan->roots); /* what was added is the graph's */
    ml_graph *g = plan->graph;
    for (int i = 0; i < asked; i++) {
        ml_graph_set_origin(g, ml_graph_origin(g, r->outputs[i]));
        r->outputs[i] = ml_permute(g, r->outputs[i], &types[i]);
    }
    for (int i = 0; i < r->update_count; i++) {
        ml_type type = plan_state(plan, r->updates[i].state);
        ml_graph_set_origin(g, ml_graph_origin(g, r->updates[i].value));
        r->updates[i].value = ml_permute(g, r->updates[i].value, &type);
    }
    ml_shard_traffic(g, plan->layout, plan->traffic);
    plan->local = true;
    return g;
}

/* Where that leaves less to permute: tensors and sequences that are split, not parameters alone. */
static ml_graph *propagate_layout(pass_context *c) {
    ml_plan *plan = c->plan;
    ml_roots before = plan->roots;
    plan_roots(plan, &before);
    ml_graph *moved = ml_propagate_layout(plan->graph, &plan->roots);
    if (ml_permuted_bytes(moved) < ml_permuted_bytes(plan->graph)) return moved;
    ml_graph_free(moved);
    plan->roots = before;
    return plan->graph;
}

static bool gathers_sorted(pass_context *c) {
    return on_gpu(c) && ml_invert_permutations_applies(c->plan->graph);
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

/* Programs that run often, such as the steps of generation, compute in the compute dtype. */
static bool has_fp8_products(pass_context *c) {
    return !c->plan->roots.often && ml_scale_products_applies(c->plan->graph);
}
static bool has_scaled_products(pass_context *c) {
    return ml_widen_scaled_products_applies(c->plan->graph);
}
static bool serves_scaled(const void *context, const ml_graph *g, ml_ref n) {
    return ml_scaled_product_library(context, g, n);
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
static ml_graph *decompose_attention(pass_context *c) {
    ml_plan *plan = c->plan;
    return ml_decompose(plan->graph, &plan->roots, plan->target->longest_materialized);
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

static int64_t chunk_bytes(const pass_context *c) {
    int64_t bytes = c->plan->options->chunk_bytes;
    return bytes > 0 ? bytes : ML_CHUNK_BYTES;
}
static bool chunks(pass_context *c) {
    c->chunked =
        ml_chunk_logits_applies(c->plan->graph, chunk_bytes(c)) && !c->plan->target->no_fuse;
    return c->chunked;
}
static bool has_chunks(pass_context *c) {
    return c->chunked;
}
static ml_graph *chunk_logits(pass_context *c) {
    return ml_chunk_logits(c->plan->graph, &c->plan->roots, chunk_bytes(c));
}

/* Simplify what was duplicated, and count its collectives anew. */
static ml_graph *simplify_parts(pass_context *c) {
    ml_plan *plan = c->plan;
    ml_graph *g = ml_simplify(plan->graph, &plan->roots);
    if (plan->layout != NULL) ml_shard_traffic(g, plan->layout, plan->traffic);
    return g;
}

/* The bytes that a GPU moves in one part in 128 of the time that the program's products take. */
static int64_t spare_bytes(const ml_plan *plan) {
    const double share = 128;
    double flops = 0;
    for (ml_ref n = 1; n < ml_graph_count(plan->graph); n++) {
        int op_class = ml_ops[ml_graph_node(plan->graph, n)->op].op_class;
        if (op_class == ML_CLASS_CONTRACT || op_class == ML_CLASS_ROUTINE)
            flops += ml_flops(plan->graph, n);
    }
    const double bytes = flops / ml_machine_planned.flops_per_byte / share, most = 0x1p62;
    return (int64_t)(bytes < most ? bytes : most); /* flops grow with the square of a sequence */
}

/* The share of values that is kept for the backward pass. */
static double kept_share(const pass_context *c) {
    return c->plan->options->recompute == ML_ALWAYS ? 0 : c->choice.kept;
}
static bool recomputes_cheap(const pass_context *c) {
    bool deferred = c->input_wave != NULL;
    return c->plan->options->recompute != ML_NEVER && on_gpu(c) &&
           (!deferred || c->choice.cheap_everywhere);
}
static bool recomputes(pass_context *c) {
    return recomputes_cheap(c) || kept_share(c) < 1;
}
static ml_graph *recompute(pass_context *c) {
    ml_plan *plan = c->plan;
    int64_t bytes = recomputes_cheap(c) ? spare_bytes(plan) : 0;
    return ml_recompute(plan->graph, &plan->roots, bytes, kept_share(c));
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

static bool caches_params(pass_context *c) {
    return c->param_cache;
}
static ml_graph *param_cache(pass_context *c) {
    return plan_param_cache(c->plan);
}

/* Over the global graph. A program is divided into pipeline stages after them. */
static const pass global_passes[] = {
    {"extract", .run_with = extract, .purpose = "the nodes that the program's results need"},
    {"drop_placements", ml_drop_placements, .when = has_useless_placements,
     .purpose = "shardings that the script asks for mean nothing on one rank"},
    {"conform_updates", .run_with = conform_updates,
     .purpose = "new values take the dtype and the axis order of their states"},
    {"simplify", ml_simplify,
     .purpose = "what scripts and autodiff leave: constants, casts there and back, equal nodes"},
    {"scale_products", ml_scale_products, .when = has_fp8_products,
     .purpose = "products of blocks round their operands to 8 bits, with a scale for each tensor"},
};

/* Over the graph of one rank, whatever is done to save memory: attempts share their result. */
static const pass rank_passes[] = {
    {"shard", .run_with = shard, .when = has_layout,
     .purpose = "the part of one rank, with collectives"},
    {"simplify_sharded", ml_simplify, .when = has_layout,
     .purpose = "movements around collectives cancel, equal collectives become one"},
    {"propagate_layout", .run_with = propagate_layout, .when = has_layout,
     .purpose = "permutations move away from collectives until they cancel"},
    {"invert_permutations", ml_invert_permutations, .when = gathers_sorted,
     .purpose = "scatter-adds at sorted indices become sums of gathers"},
    {"split_scaled_sums", ml_split_scaled_sums, .when = splits_sums,
     .purpose = "factors that are constant along a sum leave it"},
    {"decompose_conv", ml_decompose_conv, .when = has_conv,
     .purpose = "convolutions become products and shifted views"},
    {"segment_linear_scans", .run_with = segment_linear_scans, .when = has_gpu_scan,
     .purpose = "scans with few rows are cut into segments that run side by side"},
    {"decompose_linear_scans", .run_with = decompose_linear_scans, .when = has_linear_scan,
     .purpose = "scans that no kernel serves become products over chunks of positions"},
    {"decompose_attention", .run_with = decompose_attention,
     .purpose = "attention over few keys becomes products and a softmax"},
    {"simplify_decomposed", ml_simplify,
     .purpose = "what the passes since sharding leave: equal nodes, movements that cancel"},
    {"split_f32_products", ml_split_f32_products, .when = splits_products,
     .purpose = "narrow products of f32 become products of bf16"},
    {"merge_products", ml_merge_products, .when = merges_products,
     .purpose = "products that share an operand become one"},
    {"widen_scaled_products", .run_with = widen_scaled_products, .when = has_scaled_products,
     .purpose = "products of 8 bits that no library serves are computed of bf16"},
    {"simplify_merged", ml_simplify, .when = merges_products,
     .purpose = "slices of merged results cancel against what joined them"},
};

/* Over the graph of one rank, depending on the choices by which attempts differ. */
static const pass choice_passes[] = {
    {"half_batch_overlap", .run_with = half_batch, .when = chooses_half_batch,
     .purpose = "the halves of the batch alternate, to hide collectives"},
    {"split_half_sums", ml_split_accumulation, .when = has_half_batch,
     .purpose = "gradients of the halves are added to their state one after the other"},
    {"simplify_halves", .run_with = simplify_parts, .when = has_half_batch,
     .purpose = "slices of slices, and what both halves compute alike"},
    {"chunk_logits", .run_with = chunk_logits, .when = chunks,
     .purpose = "large logits and their loss are computed in chunks of tokens"},
    {"split_chunk_sums", ml_split_accumulation, .when = has_chunks,
     .purpose = "gradients of the chunks are added to their state one after the other"},
    {"simplify_chunks", .run_with = simplify_parts, .when = has_chunks,
     .purpose = "slices of slices, and what all chunks compute alike"},
    {"recompute", .run_with = recompute, .when = recomputes,
     .purpose = "values are computed again in the backward pass where that saves memory"},
    {"reuse_concat_slices", .run_with = reuse_slices, .when = defers_weight_grad,
     .purpose = "deferred products read slices of what is stored anyway"},
    {"fuse_expert_norms", ml_fuse_expert_norms, .when = has_expert_norms,
     .purpose = "sums of squares come from the kernels of grouped products"},
    {"fuse_gated_experts", ml_fuse_gated_experts, .when = has_gated_experts,
     .purpose = "gates are applied in the kernels of grouped products"},
    {"param_cache", .run_with = param_cache, .when = caches_params,
     .purpose = "parameters are stored as products read them, beside their f32 states"},
};

static const struct {
    const pass *list;
    int count;
} all_passes[] = {
    {global_passes, sizeof global_passes / sizeof *global_passes},
    {rank_passes, sizeof rank_passes / sizeof *rank_passes},
    {choice_passes, sizeof choice_passes / sizeof *choice_passes},
};
void passes_run(pass_context *c, pass_list which) {
    for (int i = 0; i < all_passes[which].count; i++) {
        const pass *p = &all_passes[which].list[i];
        if (p->when != NULL && !p->when(c)) continue;
        ml_graph *graph = p->run != NULL ? p->run(c->plan->graph, &c->plan->roots) : p->run_with(c);
        pass_done(c->plan, graph, p->name);
    }
}

const char PASS_TASK[] = "task";

bool ml_compile_pass(int i, const char **name, const char **purpose) {
    for (int which = 0; which < PASS_LISTS; i -= all_passes[which++].count) {
        if (i >= all_passes[which].count) continue;
        *name = all_passes[which].list[i].name;
        *purpose = all_passes[which].list[i].purpose;
        return true;
    }
    *name = PASS_TASK;
    *purpose = "what runs between two messages of a pipeline stage";
    return i == 0;
}

void passes_check_dump(const ml_compile_options *options) {
    static atomic_bool reported;
    const char *name, *purpose, *wanted = options->dump;
    size_t length = wanted ? strcspn(wanted, "@") : 0;
    if (wanted == NULL) return;
    for (int i = 0; ml_compile_pass(i, &name, &purpose); i++)
        if (strlen(name) == length && strncmp(name, wanted, length) == 0) return;
    if (atomic_exchange(&reported, true)) return;
    fprintf(stderr, "mlua: MLUA_DUMP=%s is ignored: there is no such pass\n  help: ", wanted);
    for (int i = 0; ml_compile_pass(i, &name, &purpose); i++)
        fprintf(stderr, "%s%s", i ? ", " : "passes: ", name);
    fputs("\n", stderr);
}
