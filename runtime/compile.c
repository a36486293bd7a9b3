/* The compiler, top to bottom: the way of a program from the session's graph to an executable plan.
 *
 *   1. gradients   the script's graph grows by its backward pass (graph/autodiff.c)
 *   2. passes      over the global graph, then over the graph of one rank, from sharding on
 *   3. steps       lowering to steps and kernel IR, their order, batches, updates, memory
 *   4. parts       a program is one part; or pipeline stages, each split into tasks
 *   5. memory      attempts that save more and more memory, until one fits (compile_attempts.c)
 *
 * The passes are rows of lists in compile_list.c. mlua check --explain prints this way for a
 * given script. */
#include "runtime/compile.h"

#include <stdio.h>
#include <string.h>

#include "codegen/lower/library.h"
#include "runtime/base/knobs.h"
#include "runtime/compile_internal.h"
#include "runtime/graph/analysis.h"
#include "runtime/pipeline/plan.h"
#include "runtime/plan/arena_offsets.h"
#include "runtime/plan/log.h"
#include "runtime/plan/plan_internal.h"

/* ---- 1. gradients ---- */
void ml_compile_gradients(ml_graph *g, ml_ref loss, const ml_ref *wrt, int count,
                          ml_ref *gradients) {
    ml_time_part("the script");
    ml_autodiff(g, loss, wrt, count, gradients);
    ml_time_part("gradients");
}

/* ---- 2. passes: compile_list.c ---- */

/* ---- 3. steps ---- */
static uint64_t hash_schedule(const ml_schedule *s, uint64_t seed) {
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        int64_t fields[5] = {storage->kind, storage->id, storage->bytes, storage->offset,
                             storage->part_of};
        seed = ml_hash(fields, sizeof fields, seed);
    }
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_step *step = &s->steps.at[i];
        size_t values = (size_t)(step->read_count + step->write_count);
        seed = ml_hash(&step->kind, sizeof step->kind, seed);
        seed = ml_hash(step->values, values * sizeof *step->values, seed);
        if (step->kind == ML_STEP_COLLECTIVE) {
            const ml_collective_step *c = step->collective;
            int64_t fields[] = {c->kind,     c->mesh_axis, c->count, c->lead_order,
                                c->prefetch, c->ticket,    c->launch};
            seed = ml_hash(fields, sizeof fields, seed);
        }
        if (step->loop != NULL)
            seed = ml_hash(&step->loop->plan->hash, sizeof step->loop->plan->hash, seed);
        for (const ml_kernel *k = step->kernel; k != NULL; k = k->next) {
            seed = ml_hash(&k->key, sizeof k->key, seed);
        }
    }
    return seed;
}

/* How the steps are ordered: as lowered; with collectives beside computation; with those that
 * rebuild a parameter cache of the graph `program` beside what follows. */
typedef struct {
    bool overlap;
    const ml_graph *program;
} step_order;

static void compile_steps(ml_plan *plan, step_order order);

static int64_t reserve(int64_t *bytes, int64_t size) {
    int64_t offset = *bytes;
    *bytes += memory_padded(size);
    return offset;
}

/* Whether slices of the value are where kernels of GPUs expect storages. */
static bool in_place(const ml_schedule *s, const ml_step *step, int value, int64_t slice) {
    enum { ALIGNMENT = 256 };
    const ml_value *v = &s->values.at[step->values[value]];
    int64_t offset = v->offset * ml_dtypes[v->type.dtype].bytes;
    return s->target->kind != ML_TARGET_CUDA || (offset % ALIGNMENT == 0 && slice % ALIGNMENT == 0);
}

/* Two buffers for each carried value, copies of slices, then what the body works in. */
static void loop_workspace(ml_schedule *s, ml_step *step, ml_loop *loop) {
    int64_t bytes = 0;
    for (int i = 0; i < loop->carried_count; i++) {
        ml_loop_carried *c = &loop->carried[i];
        for (int k = 0; k < 2; k++) c->offset[k] = reserve(&bytes, c->bytes);
        c->initial_copied = c->initial >= 0 && !in_place(s, step, c->initial, 0);
        c->final_copied = c->final >= 0 && !in_place(s, step, c->final, 0);
        c->history_copied = c->history >= 0 && !in_place(s, step, c->history, c->bytes);
    }
    for (int i = 0; i < loop->input_count; i++) {
        ml_loop_input *in = &loop->inputs[i];
        if (!in_place(s, step, in->value, in->bytes))
            in->staged = reserve(&bytes, in->bytes ? in->bytes : in->all);
    }
    for (int i = 0; i < loop->stacked_count; i++) {
        ml_loop_stacked *out = &loop->stacked[i];
        if (!in_place(s, step, out->value, out->bytes)) out->staged = reserve(&bytes, out->bytes);
    }
    loop->arena = bytes;
    bytes += loop->plan->arena_bytes;
    if (bytes == 0) return;
    loop->workspace = step->read_count + step->write_count;
    plan_add_workspace(s, step, bytes);
}

/* The bodies of recurrences: programs of their own. */
static void compile_loops(ml_plan *plan) {
    ml_schedule *s = plan->schedule;
    for (uint32_t i = 0; i < s->steps.count; i++) {
        ml_loop *loop = s->steps.at[i].loop;
        if (loop == NULL) continue;
        const ml_origin *origin = ml_graph_origin(plan->graph, s->steps.at[i].node);
        log_text(plan, ML_LOG_PART, "the step of the scan at %s:%d",
                 origin->file ? origin->file : "?", origin->line);
        ml_roots roots;
        ml_graph *graph = ml_loop_body(s, &s->steps.at[i], &roots);
        ml_plan *body = plan_of_part(plan, &graph, &roots, &loop->plan);
        body->pipeline_task = true;
        passes_run(&(pass_context){.plan = body}, PASSES_RANK, PASSES_RANK);
        compile_steps(body, (step_order){0});
        if (body->library_bytes > plan->library_bytes) plan->library_bytes = body->library_bytes;
        loop_workspace(s, &s->steps.at[i], loop);
    }
}

static void compile_steps(ml_plan *plan, step_order order) {
    const ml_target *target = plan->target;
    if (plan->pipeline_task) pass_done(plan, plan->graph, PASS_TASK);
    ml_schedule *s = plan->schedule = ml_lower(plan->graph, &plan->roots, target, plan->arena);
    if (plan->options->verify) ml_lower_verify(s);
    compile_loops(plan);
    for (uint32_t i = 0; i < s->steps.count; i++) plan->flops += s->steps.at[i].flops;
    log_steps(plan, "lower", "operators share kernels, values get storages");
    plan_reduce_in_place(plan, order.overlap);
    if (order.overlap) {
        plan_overlap(plan);
        log_steps(plan, "overlap", "collectives run beside computation");
    }
    if (order.program != NULL) {
        plan_prefetch(plan, order.program);
        log_steps(plan, "prefetch", "all-gathers continue beside the programs that follow");
    }
    if (compile_batch_kernels != NULL && target->kind == ML_TARGET_CUDA && !target->no_fuse &&
        !plan->options->no_batch) {
        compile_batch_kernels(plan);
        log_steps(plan, "batch_kernels", "equal kernels of several steps are one launch");
    }
    const bool decodes = target->kind == ML_TARGET_CUDA && !target->no_fuse && plan->roots.often;
    if (decodes && compile_join_products != NULL) {
        compile_join_products(plan);
        log_steps(plan, "join_products", "products of few rows compute their first operand");
    }
    if (order.program == NULL) plan_update_states(plan);
    if (decodes && compile_write_keys != NULL) compile_write_keys(plan);
    if (plan->pipeline_task) plan_export_outputs(plan);
    plan->arena_bytes =
        ml_memory_assign_offsets(s, plan->pipeline_task ? 0 : plan->roots.output_count);
    log_steps(plan, "memory", "updates in place or by copies; offsets of temporaries");
    int64_t library = ml_library_workspace(s);
    if (library > plan->library_bytes) plan->library_bytes = library;
    memory_account(plan);
    plan->hash = hash_schedule(s, ml_graph_hash(plan->graph, 0));
}

/* ---- 4. parts ---- */
struct compile_shared *compile_shared_new(bool several) {
    struct compile_shared *shared = ml_alloc(sizeof *shared);
    if (shared == NULL) ml_raise(ML_NO_MEMORY, "out of memory while planning a program");
    shared->arena = ml_arena_new();
    shared->several = several;
    if (shared->arena != NULL) return shared;
    ml_free(shared);
    ml_raise(ML_NO_MEMORY, "out of memory while planning a program");
}

void compile_shared_free_parts(struct compile_shared *shared) {
    for (int i = 0; i < shared->part_count; i++) {
        if (shared->parts[i].graph != NULL) ml_graph_free(shared->parts[i].graph);
        shared->parts[i].graph = NULL;
    }
}

/* One of several attempts at what `shared` is for, which stays. */
void compile_attempt_free(ml_plan *plan) {
    if (plan != NULL) plan->shared = NULL;
    ml_plan_free(plan);
}

void compile_shared_free(struct compile_shared *shared) {
    if (shared == NULL) return;
    for (int i = 0; i < 2; i++) {
        compile_attempt_free(shared->few_plans[i]);
        compile_shared_free(shared->few[i]);
    }
    few_layers_free(&shared->layers);
    compile_shared_free_parts(shared);
    pipeline_partition_free(shared->pipeline);
    if (shared->global != NULL) ml_graph_free(shared->global);
    ml_arena_free(shared->arena);
    ml_free(shared);
}

/* The passes before the choices, once for all attempts: the part takes the graph over, and the plan
 * borrows it until a pass replaces it. */
void compile_part(pass_context *c, struct compile_shared *shared, rank_part *part) {
    ml_plan *plan = c->plan;
    passes_run(c, c->global ? PASSES_GLOBAL : PASSES_RANK, PASSES_RANK);
    if (plan->local) ml_shard_traffic(plan->graph, plan->layout, plan->traffic);
    if (!shared->several) return;
    part->roots = plan_roots_copy(shared->arena, &plan->roots);
    memcpy(part->traffic, plan->traffic, sizeof part->traffic);
    part->graph = plan->graph;
    plan->borrows = true;
}

/* The passes over one rank's graph. */
static void compile_rank(pass_context *c, struct compile_shared *shared, rank_part *part) {
    ml_plan *plan = c->plan;
    if (part->graph != NULL) {
        plan_roots(plan, &part->roots);
        plan->graph = ml_graph_extract(part->graph, &plan->roots);
        memcpy(plan->traffic, part->traffic, sizeof part->traffic);
        plan->local = true;
    } else {
        compile_part(c, shared, part);
    }
    passes_run(c, PASSES_CHOICE, PASSES_CHOICE);
    if (c->scan > shared->scan) shared->scan = c->scan;
    shared->keeps_all |= c->keeps_all;
    if (!plan->borrows || shared->pipeline == NULL) return; /* of a whole program: take_graph */
    plan->borrows = false;
    part->graph = NULL;
    part->graph = ml_graph_extract(plan->graph, &part->roots);
}

/* The passes over the global graph come first. */
static void begin_global(const ml_compile_input *in, pass_context *c) {
    c->global = true;
    c->plan->graph = (ml_graph *)in->graph; /* which the first pass copies */
    c->plan->borrows = true;
    plan_roots(c->plan, in->roots);
}

/* As far as the choice asks for it and the peak is above `limit`. */
void compile_offload_to(ml_plan *plan, const plan_choice *choice, int64_t limit) {
    if (choice->offload == OFFLOAD_NONE || plan->peak_bytes <= limit) return;
    compile_offload(plan, limit, choice->offload == OFFLOAD_ALL);
    log_steps(plan, "offload", "temporaries wait for the backward pass in host memory");
    plan->hash = hash_schedule(plan->schedule, ml_graph_hash(plan->graph, 0));
}

/* The graph beside whose program the all-gathers of a rebuild may continue; NULL: none does. */
static const ml_graph *prefetched_beside(const ml_plan *plan, const ml_plan *rebuild,
                                         const plan_choice *choice) {
    const bool may = compile_overlaps(rebuild->layout, plan->target, plan->options);
    bool gathers = false;
    for (ml_ref n = 1; n < ml_graph_count(rebuild->graph); n++)
        gathers |= ml_graph_node(rebuild->graph, n)->op == ML_OP_ALL_GATHER;
    if (!may || !gathers || plan->target->kind != ML_TARGET_CUDA) return NULL;
    return choice->overlap || rebuild->all_ranks ? plan->graph : NULL;
}

void compile_begin(const ml_compile_input *in, struct compile_shared *shared, pass_context *c) {
    begin_global(in, c);
    shared->parts = ML_NEW(shared->arena, rank_part);
    shared->part_count = 1;
}

void compile_whole(const ml_compile_input *in, ml_plan *plan, const plan_choice *choice) {
    struct compile_shared *shared = plan->shared;
    pass_context c = {.plan = plan,
                      .choice = *choice,
                      .param_cache = choice->param_cache,
                      .curves = shared->curves};
    plan->parts = ML_NEW(plan->arena, ml_plan *);
    plan->parts[plan->part_count++] = plan;
    plan->script_inputs = UINT32_MAX;
    if (shared->parts == NULL) compile_begin(in, shared, &c);
    compile_rank(&c, shared, shared->parts);
    for (ml_plan *rebuild = plan->rebuild; rebuild != NULL; rebuild = rebuild->next) {
        log_text(plan, ML_LOG_PART, "what rebuilds the parameter cache");
        compile_steps(rebuild, (step_order){.program = prefetched_beside(plan, rebuild, choice)});
        if (rebuild->next == NULL) log_text(plan, ML_LOG_PART, "the program");
    }
    compile_steps(plan, (step_order){choice->overlap});
    if (plan->limit > 0)
        compile_offload_to(plan, choice, plan->limit - compile_update_needs(plan).states);
    for (const ml_plan *r = plan->rebuild; r != NULL; r = r->next)
        plan->hash = ml_hash(&r->hash, sizeof r->hash, plan->hash);
    plan->may_overflow = plan->roots.overflow_count > 0;
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
    pass_context c = {.plan = plan, .stages = true};
    begin_global(in, &c);
    passes_run(&c, PASSES_GLOBAL, PASSES_GLOBAL);
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
    pass_context c = {.plan =
                          pipeline_stage_begin(plan, v, choice->param_cache && !plan->roots.mixed),
                      .choice = *choice,
                      .curves = plan->shared->curves};
    log_text(plan, ML_LOG_PART, "stage %d of %d", v, pipeline->count);
    c.choice.overlap = false;
    if (pipeline->stages[v].waves.weight_grad) c.input_wave = pipeline->input_wave;
    compile_rank(&c, plan->shared, &plan->shared->parts[v]);
    pipeline_stage_split(plan, v);
    log_text(plan, ML_LOG_PART, "stage %d: %d tasks", v, pipeline->stages[v].plan_count);
    for (int i = 0; i < pipeline->stages[v].plan_count; i++)
        compile_steps(pipeline->stages[v].plans[i], (step_order){choice->overlap});
}

/* The same of a pipeline's stages: what they save is not in the arena, so that copying it makes
 * room for the arena of the program that sets the parameters too. */
static void offload_pipeline(ml_plan *plan, int coordinate, const plan_choice *choice) {
    const update_memory update = compile_update_needs(plan);
    const int64_t beyond = update.temporaries + update.copies - plan->arena_bytes;
    int64_t limit = plan->limit - update.states - (beyond > 0 ? beyond : 0);
    if (choice->offload == OFFLOAD_NONE) return;
    if (plan->peak_bytes > limit)
        pipeline_offload(plan, coordinate, limit, choice->offload == OFFLOAD_ALL, compile_offload);
}

void compile_pipeline(const ml_compile_input *in, ml_plan *plan, const plan_choice *choice) {
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
    offload_pipeline(plan, in->cut->coordinate, choice);
    plan->script_inputs = plan->pipeline->script_inputs;
    plan->may_overflow = plan->pipeline->until > 0;
    plan->hash = shared->hash;
}

void ml_plan_free(ml_plan *plan) {
    if (plan == NULL) return;
    pipeline_plan_free(plan->pipeline);
    ml_plan_free(plan->retry);
    ml_plan_free(plan->fewer);
    compile_shared_free(plan->shared);
    plan_free(plan);
}

static void print_part(const ml_plan *part, ml_text *out) {
    if (part == NULL) return;
    ml_lower_print(part->schedule, out);
    plan_print(part, out);
}

void ml_plan_print(const ml_plan *plan, ml_text *out) {
    const struct ml_pipeline_plan *p = plan->pipeline;
    if (p != NULL) ml_pipeline_schedule_print(&p->problem, &p->schedule, out);
    for (const ml_plan *r = plan->rebuild; r != NULL; r = r->next) print_part(r, out);
    for (int i = 0; i < plan->part_count; i++) print_part(plan->parts[i], out);
}
