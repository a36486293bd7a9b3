/* The compiler, top to bottom: the way of a program from the session's graph to an executable plan.
 *
 *   1. gradients   the script's graph grows by its backward pass (graph/autodiff.c)
 *   2. passes      over the global graph, then over the graph of one rank, from sharding on
 *   3. steps       lowering to steps and kernel IR, their order, batches, updates, memory
 *   4. parts       a program is one part; or pipeline stages, each split into tasks
 *   5. memory      attempts that save more and more memory, until the plan fits
 *
 * Each pass is a row of the tables in section 2: what MLUA_DUMP prints, MLUA_VERIFY verifies and
 * mlua check --explain lists. */
#include "runtime/compile.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "codegen/lower/library.h"
#include "runtime/base/knobs.h"
#include "runtime/passes/passes.h"
#include "runtime/pipeline/plan.h"
#include "runtime/plan/fit_memory.h"
#include "runtime/plan/plan_internal.h"

/* ---- 1. gradients ---- */
void ml_compile_gradients(ml_graph *g, ml_ref loss, const ml_ref *wrt, int count,
                          ml_ref *gradients) {
    ml_autodiff(g, loss, wrt, count, gradients);
}

/* ---- 2. passes ---- */
/* What a pass sees. Its plan has the graph and the roots, which the pass rewrites. */
typedef struct {
    ml_plan *plan;
    plan_choice choice;
    const int *input_wave; /* by INPUT id, where weight-gradient tasks are deferred: the wave of
                              tasks in which it is received; else NULL */
    bool param_cache;      /* of a program that is one part */
    ml_axis half_axis;     /* along which the batch is halved, and its size; 0: it is not */
    int64_t half_size;
    bool chunked;
} pass_context;

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
    return c->plan->layout != NULL;
}

/* From the global program to that of one rank. Results keep the order of their axes. */
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
    if (r->watched > 0) plan_roots(plan, &plan->roots); /* what was added is the graph's */
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
    return g;
}

/* Where that leaves less to permute: tensors and sequences that are split, not parameters alone. */
static ml_graph *propagate_layout(pass_context *c) {
    ml_plan *plan = c->plan;
    ml_roots before = plan->roots;
    plan_roots(plan, &before);
    ml_graph *moved = ml_sink_orders(plan->graph, &plan->roots);
    if (ml_permuted_bytes(moved) < ml_permuted_bytes(plan->graph)) return moved;
    ml_graph_free(moved);
    plan->roots = before;
    return plan->graph;
}

static bool gathers_sorted(pass_context *c) {
    return on_gpu(c) && ml_gather_sorted_applies(c->plan->graph);
}
static bool splits_sums(pass_context *c) {
    return on_gpu(c) && ml_split_sums_applies(c->plan->graph);
}
static bool splits_products(pass_context *c) {
    return on_fused_gpu(c) && ml_split_dots_applies(c->plan->graph);
}
/* Merged weights are written side by side by the casts that a GPU makes of them anyway. The CPU
 * computes with the f32 states themselves, which would have to be copied at each step. */
static bool merges_products(pass_context *c) {
    return on_fused_gpu(c);
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
    return ml_halves(c->plan->graph, &c->plan->roots, c->half_axis, c->half_size);
}

static int64_t chunk_bytes(const pass_context *c) {
    int64_t bytes = c->plan->options->chunk_bytes;
    return bytes > 0 ? bytes : ML_CHUNK_BYTES;
}
static bool chunks(pass_context *c) {
    c->chunked = ml_chunk_applies(c->plan->graph, chunk_bytes(c)) && !c->plan->target->no_fuse;
    return c->chunked;
}
static bool has_chunks(pass_context *c) {
    return c->chunked;
}
static ml_graph *chunk_logits(pass_context *c) {
    return ml_chunk(c->plan->graph, &c->plan->roots, chunk_bytes(c));
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
    const double flops_a_byte = 150, share = 128;
    double flops = 0;
    for (ml_ref n = 1; n < ml_graph_count(plan->graph); n++) {
        int op_class = ml_ops[ml_graph_node(plan->graph, n)->op].op_class;
        if (op_class == ML_CLASS_CONTRACT || op_class == ML_CLASS_ROUTINE)
            flops += ml_flops(plan->graph, n);
    }
    const double bytes = flops / flops_a_byte / share, most = 0x1p62;
    return (int64_t)(bytes < most ? bytes : most); /* flops grow with the square of a sequence */
}

static bool recomputes_all(const pass_context *c) {
    return c->choice.recompute == RECOMPUTE_ALL || c->plan->options->recompute == ML_ALWAYS;
}
static bool recomputes(pass_context *c) {
    bool deferred = c->input_wave != NULL;
    if (recomputes_all(c)) return true;
    return c->plan->options->recompute == ML_WHERE_IT_PAYS && on_gpu(c) &&
           !(deferred && c->choice.recompute == RECOMPUTE_FREE_BUT_WEIGHT_GRAD);
}
static ml_graph *recompute(pass_context *c) {
    ml_plan *plan = c->plan;
    if (recomputes_all(c)) return ml_recompute(plan->graph, &plan->roots);
    return ml_recompute_thrifty(plan->graph, &plan->roots, spare_bytes(plan));
}

static bool defers_weight_grad(pass_context *c) {
    return c->input_wave != NULL;
}
static ml_graph *reuse_slices(pass_context *c) {
    return ml_read_joined(c->plan->graph, &c->plan->roots, c->input_wave);
}
static bool has_expert_norms(pass_context *c) {
    return on_fused_gpu(c) && ml_ragged_squares_apply(c->plan->graph);
}
/* Kernels of products have what to continue with in registers. */
static bool has_gated_experts(pass_context *c) {
    enum { HOPPER = 90 };
    return on_fused_gpu(c) && c->plan->target->arch == HOPPER && !c->plan->target->no_tma &&
           ml_ragged_gated_applies(c->plan->graph);
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
    {"drop_placements", ml_drop_places, .when = has_useless_placements,
     .purpose = "shardings that the script asks for mean nothing on one rank"},
    {"conform_updates", .run_with = conform_updates,
     .purpose = "new values take the dtype and the axis order of their states"},
    {"simplify", ml_simplify,
     .purpose = "what scripts and autodiff leave: constants, casts there and back, equal nodes"},
};

/* Over the graph of one rank, whatever is done to save memory: attempts share their result. */
static const pass rank_passes[] = {
    {"shard", .run_with = shard, .when = has_layout,
     .purpose = "the part of one rank, with collectives"},
    {"simplify_sharded", ml_simplify, .when = has_layout,
     .purpose = "movements around collectives cancel, equal collectives become one"},
    {"propagate_layout", .run_with = propagate_layout, .when = has_layout,
     .purpose = "permutations move away from collectives until they cancel"},
    {"gather_sorted", ml_gather_sorted, .when = gathers_sorted,
     .purpose = "scatter-adds at sorted indices become sums of gathers"},
    {"split_scaled_sums", ml_split_sums, .when = splits_sums,
     .purpose = "factors that are constant along a sum leave it"},
    {"decompose_attention", .run_with = decompose_attention,
     .purpose = "attention over few keys becomes products and a softmax"},
    {"simplify_decomposed", ml_simplify,
     .purpose = "what the passes since sharding leave: equal nodes, movements that cancel"},
    {"split_f32_products", ml_split_dots, .when = splits_products,
     .purpose = "narrow products of f32 become products of bf16"},
    {"merge_products", ml_merge_dots, .when = merges_products,
     .purpose = "products that share an operand become one"},
    {"simplify_merged", ml_simplify, .when = merges_products,
     .purpose = "slices of merged results cancel against what joined them"},
};

/* Over the graph of one rank, depending on the choices by which attempts differ. */
static const pass choice_passes[] = {
    {"half_batch_overlap", .run_with = half_batch, .when = chooses_half_batch,
     .purpose = "the halves of the batch alternate, to hide collectives"},
    {"split_half_sums", ml_open_sums, .when = has_half_batch,
     .purpose = "gradients of the halves are added to their state one after the other"},
    {"simplify_halves", .run_with = simplify_parts, .when = has_half_batch,
     .purpose = "slices of slices, and what both halves compute alike"},
    {"chunk_logits", .run_with = chunk_logits, .when = chunks,
     .purpose = "large logits and their loss are computed in chunks of tokens"},
    {"split_chunk_sums", ml_open_sums, .when = has_chunks,
     .purpose = "gradients of the chunks are added to their state one after the other"},
    {"simplify_chunks", .run_with = simplify_parts, .when = has_chunks,
     .purpose = "slices of slices, and what all chunks compute alike"},
    {"recompute", .run_with = recompute, .when = recomputes,
     .purpose = "cheap values are computed again in the backward pass instead of stored"},
    {"reuse_concat_slices", .run_with = reuse_slices, .when = defers_weight_grad,
     .purpose = "deferred products read slices of what is stored anyway"},
    {"fuse_expert_norms", ml_ragged_squares, .when = has_expert_norms,
     .purpose = "sums of squares come from the kernels of grouped products"},
    {"fuse_gated_experts", ml_ragged_gated, .when = has_gated_experts,
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
enum { GLOBAL, RANK, CHOICE, PASS_LISTS };

static void run_passes(pass_context *c, int which) {
    for (int i = 0; i < all_passes[which].count; i++) {
        const pass *p = &all_passes[which].list[i];
        if (p->when != NULL && !p->when(c)) continue;
        ml_graph *graph = p->run != NULL ? p->run(c->plan->graph, &c->plan->roots) : p->run_with(c);
        pass_done(c->plan, graph, p->name);
    }
}

static const char TASK[] = "task"; /* what MLUA_DUMP calls the graph of a task */

bool ml_compile_pass(int i, const char **name, const char **purpose) {
    for (int which = 0; which < PASS_LISTS; i -= all_passes[which++].count) {
        if (i >= all_passes[which].count) continue;
        *name = all_passes[which].list[i].name;
        *purpose = all_passes[which].list[i].purpose;
        return true;
    }
    *name = TASK;
    *purpose = "what runs between two messages of a pipeline stage";
    return i == 0;
}

/* Report a name that is no pass; once. */
static void check_dump(const char *wanted) {
    static atomic_bool reported;
    const char *name, *purpose;
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

/* ---- 3. steps ---- */
static uint64_t hash_schedule(const ml_schedule *s, uint64_t seed) {
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        int64_t fields[4] = {storage->kind, storage->id, storage->bytes, storage->offset};
        seed = ml_hash(fields, sizeof fields, seed);
    }
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_step *step = &s->steps.at[i];
        size_t values = (size_t)(step->read_count + step->write_count);
        seed = ml_hash(&step->kind, sizeof step->kind, seed);
        seed = ml_hash(step->values, values * sizeof *step->values, seed);
        for (const ml_kernel *k = step->kernel; k != NULL; k = k->next) {
            seed = ml_hash(&k->key, sizeof k->key, seed);
        }
    }
    return seed;
}

static void compile_steps(ml_plan *plan, bool overlap) {
    const ml_target *target = plan->target;
    if (plan->pipeline_task) pass_done(plan, plan->graph, TASK);
    ml_schedule *s = plan->schedule = ml_lower(plan->graph, &plan->roots, target, plan->arena);
    if (plan->options->verify) ml_lower_verify(s);
    for (uint32_t i = 0; i < s->steps.count; i++) plan->flops += s->steps.at[i].flops;
    if (overlap) plan_overlap(plan);
    if (target->kind == ML_TARGET_CUDA && !target->no_fuse && !plan->options->no_batch)
        plan_batch(plan);
    plan_assign(plan);
    if (plan->pipeline_task) plan_export(plan);
    plan->arena_bytes = ml_memory_place(s, plan->pipeline_task ? 0 : plan->roots.output_count);
    plan->library_bytes = ml_library_workspace(s);
    memory_account(plan);
    plan->hash = hash_schedule(s, ml_graph_hash(plan->graph, 0));
    ml_text text = {.arena = plan->arena};
    plan_print(plan, &text);
    ml_debug(3, "%s", text.text);
}

/* ---- 4. parts ---- */
/* What attempts at a plan share: the first one builds it, and the accepted one owns it. */
typedef struct {
    ml_graph *graph; /* of one rank, before the passes that depend on choices; NULL: not yet */
    ml_roots roots;
    ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS];
} rank_part;
struct compile_shared {
    ml_arena *arena;
    bool several;     /* another attempt may follow: parts are saved */
    rank_part *parts; /* of a pipeline by stage, else one */
    int part_count;
    ml_graph *global; /* of a pipeline: the graph of every attempt's plan, and its roots */
    ml_roots roots;
    struct ml_pipeline_plan *pipeline; /* what all attempts begin with: stages, schedule, slots */
    uint64_t hash;
};

static struct compile_shared *shared_new(bool several) {
    struct compile_shared *shared = ml_alloc(sizeof *shared);
    if (shared == NULL) ml_raise(ML_NO_MEMORY, "out of memory while planning a program");
    shared->arena = ml_arena_new();
    shared->several = several;
    if (shared->arena != NULL) return shared;
    ml_free(shared);
    ml_raise(ML_NO_MEMORY, "out of memory while planning a program");
}

static void shared_free_parts(struct compile_shared *shared) {
    for (int i = 0; i < shared->part_count; i++) {
        if (shared->parts[i].graph != NULL) ml_graph_free(shared->parts[i].graph);
        shared->parts[i].graph = NULL;
    }
}

static void shared_free(struct compile_shared *shared) {
    if (shared == NULL) return;
    shared_free_parts(shared);
    pipeline_partition_free(shared->pipeline);
    if (shared->global != NULL) ml_graph_free(shared->global);
    ml_arena_free(shared->arena);
    ml_free(shared);
}

typedef struct {
    const ml_compile_input *in;
    ml_plan **plan;
} compilation;

/* The passes over one rank's graph: those before the choices once for all attempts. The part takes
 * the graph over, and the plan borrows it until a pass replaces it. */
static void compile_rank(pass_context *c, struct compile_shared *shared, rank_part *part) {
    ml_plan *plan = c->plan;
    if (part->graph != NULL) {
        plan_roots(plan, &part->roots);
        plan->graph = ml_graph_extract(part->graph, &plan->roots);
        memcpy(plan->traffic, part->traffic, sizeof part->traffic);
    } else {
        run_passes(c, RANK);
        if (shared->several) {
            part->roots = plan_roots_copy(shared->arena, &plan->roots);
            memcpy(part->traffic, plan->traffic, sizeof part->traffic);
            part->graph = plan->graph;
            plan->borrows = true;
        }
    }
    run_passes(c, CHOICE);
    if (!plan->borrows) return;
    plan->borrows = false;
    part->graph = NULL;
    part->graph = ml_graph_extract(plan->graph, &part->roots);
}

static void compile_global(const ml_compile_input *in, ml_plan *plan) {
    pass_context c = {.plan = plan};
    plan->graph = (ml_graph *)in->graph; /* which the first pass copies */
    plan->borrows = true;
    plan_roots(plan, in->roots);
    run_passes(&c, GLOBAL);
}

static void compile_whole(const ml_compile_input *in, ml_plan *plan, const plan_choice *choice) {
    struct compile_shared *shared = plan->shared;
    pass_context c = {.plan = plan, .choice = *choice, .param_cache = choice->param_cache};
    plan->parts = ML_NEW(plan->arena, ml_plan *);
    plan->parts[plan->part_count++] = plan;
    plan->script_inputs = UINT32_MAX;
    if (shared->parts == NULL) {
        compile_global(in, plan);
        shared->parts = ML_NEW(shared->arena, rank_part);
        shared->part_count = 1;
    }
    compile_rank(&c, shared, shared->parts);
    if (plan->refresh != NULL) compile_steps(plan->refresh, false);
    compile_steps(plan, choice->overlap);
    plan->may_overflow = plan->roots.watched > 0;
}

static uint64_t hash_layout(const ml_layout *layout, const ml_graph *g, ml_arena *arena,
                            uint64_t seed) {
    ml_text text = {.arena = arena};
    ml_layout_print(layout, g, &text);
    return ml_hash(text.text, strlen(text.text), seed);
}

/* What all ranks of a pipeline know alike. How each computes its tasks is its own affair, but for
 * options that change the order of collectives. */
static uint64_t hash_pipeline(const ml_compile_input *in, ml_plan *plan) {
    const ml_compile_options *o = plan->options;
    int64_t options[] = {o->overlap, in->target->no_fuse, o->recompute, o->chunk_bytes,
                         o->half_batch};
    uint64_t hash =
        hash_layout(in->layout, plan->graph, plan->arena, ml_graph_hash(plan->graph, 1));
    return pipeline_hash(plan->shared->pipeline, ml_hash(options, sizeof options, hash));
}

/* The first attempt divides the program into stages for all. */
static void compile_partition(const ml_compile_input *in, ml_plan *plan) {
    struct compile_shared *shared = plan->shared;
    compile_global(in, plan);
    shared->global = plan->graph;
    plan->borrows = true;
    shared->roots = plan_roots_copy(shared->arena, &plan->roots);
    pipeline_partition(shared->global, &shared->roots, in->layout, in->cut->map,
                       in->cut->coordinate, shared->arena, &shared->pipeline);
    shared->part_count = shared->pipeline->count;
    shared->parts = ML_NEW_ARRAY(shared->arena, rank_part, (size_t)shared->part_count);
    shared->hash = hash_pipeline(in, plan);
}

/* A stage: its passes, then its tasks. The half-batch pass does not know stages. */
static void compile_stage(ml_plan *plan, int v, const plan_choice *choice) {
    struct ml_pipeline_plan *pipeline = plan->pipeline;
    pass_context c = {.plan = pipeline_stage_begin(plan, v, choice->param_cache),
                      .choice = *choice};
    c.choice.overlap = false;
    if (pipeline->stages[v].waves.weight_grad) c.input_wave = pipeline->input_wave;
    compile_rank(&c, plan->shared, &plan->shared->parts[v]);
    pipeline_stage_split(plan, v);
    for (int i = 0; i < pipeline->stages[v].plan_count; i++)
        compile_steps(pipeline->stages[v].plans[i], choice->overlap);
}

static void compile_pipeline(const ml_compile_input *in, ml_plan *plan, const plan_choice *choice) {
    struct compile_shared *shared = plan->shared;
    if (shared->pipeline == NULL) {
        compile_partition(in, plan);
    } else {
        plan->graph = shared->global;
        plan->borrows = true;
        plan_roots(plan, &shared->roots);
    }
    pipeline_plan_begin(plan, shared->pipeline);
    for (int v = 0; v < plan->pipeline->count; v++)
        if (plan->pipeline->stages[v].planned) compile_stage(plan, v, choice);
    pipeline_plan_end(plan, in->cut->coordinate);
    plan->script_inputs = plan->pipeline->script_inputs;
    plan->may_overflow = plan->pipeline->until > 0;
    plan->hash = shared->hash;
}

/* ---- 5. memory ---- */
/* Two moments of each parameter that the plan reads. */
static int64_t moment_bytes(const ml_plan *plan) {
    int64_t bytes = 0;
    const ml_schedule *s = plan->schedule;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        if (storage->kind == ML_STORAGE_STATE &&
            ml_graph_state(s->graph, storage->id)->kind == ML_STATE_PARAMETER)
            bytes += 2 * storage->bytes;
    }
    return bytes;
}

static void measure(const ml_plan *plan, plan_size *size) {
    const struct ml_pipeline_plan *p = plan->pipeline;
    *size = (plan_size){.peak = plan->peak_bytes, .caches = plan->refresh != NULL};
    for (int v = p ? p->coordinate : 0; p && v < p->count; v += p->ranks) {
        size->caches |= pipeline_once_per_step(p, v) != NULL;
        size->weight_grad |= p->stages[v].waves.weight_grad;
    }
    if (plan->roots.microbatches <= 1) return;
    if (p != NULL) size->moments = 2 * plan->state_bytes[ML_MEMORY_PARAMETERS];
    if (plan->refresh != NULL) size->moments = moment_bytes(plan->refresh);
}

static bool is_pipeline(const ml_compile_input *in) {
    return in->layout != NULL && in->layout->stages.on && in->cut != NULL;
}

static const ml_compile_options *options_of(const ml_compile_input *in) {
    static const ml_compile_options defaults;
    return in->options != NULL ? in->options : &defaults;
}

/* Make *c->plan, in the place of an earlier attempt. */
static void attempt(void *context, const plan_choice *choice, plan_size *size) {
    const compilation *c = context;
    ml_plan *old = *c->plan, *plan = plan_empty();
    if (old != NULL) {
        plan->shared = old->shared;
        old->shared = NULL;
        ml_plan_free(old);
    }
    *c->plan = plan;
    plan->layout = c->in->layout;
    plan->target = c->in->target;
    plan->options = options_of(c->in);
    if (plan->shared == NULL) plan->shared = shared_new(plan->target->memory_bytes > 0);
    if (is_pipeline(c->in))
        compile_pipeline(c->in, plan, choice);
    else
        compile_whole(c->in, plan, choice);
    measure(plan, size);
}

void ml_compile(const ml_compile_input *in, ml_plan **plan) {
    const ml_target *target = in->target;
    const ml_compile_options *options = options_of(in);
    compilation c = {in, plan};
    plan_fit fit = {attempt, &c, target->memory_bytes > 0 ? target->memory_bytes : INT64_MAX};
    bool gpu = target->kind == ML_TARGET_CUDA;
    plan_choice first = {.recompute = RECOMPUTE_FREE_BUT_WEIGHT_GRAD};
    first.overlap = in->layout != NULL &&
                    (options->overlap == ML_WHERE_IT_PAYS ? gpu : options->overlap == ML_ALWAYS);
    first.param_cache = in->cut != NULL && !options->no_param_cache &&
                        (in->layout != NULL || (gpu && !target->no_fuse));
    *plan = NULL;
    check_dump(options->dump);
    plan_fit_memory(&fit, &first);
    shared_free_parts((*plan)->shared); /* of further attempts */
    if (is_pipeline(in)) return;
    shared_free((*plan)->shared);
    (*plan)->shared = NULL;
}

void ml_plan_free(ml_plan *plan) {
    if (plan == NULL) return;
    pipeline_plan_free(plan->pipeline);
    ml_plan_free(plan->fallback);
    shared_free(plan->shared);
    plan_free(plan);
}

void ml_plan_print(const ml_plan *plan, ml_text *out) {
    const struct ml_pipeline_plan *p = plan->pipeline;
    if (p != NULL) ml_pipeline_schedule_print(&p->problem, &p->schedule, out);
    if (plan->refresh != NULL) plan_print(plan->refresh, out);
    for (int i = 0; i < plan->part_count; i++) plan_print(plan->parts[i], out);
}
