/* Attempts at a plan, which save more and more memory, until one fits; and estimates of them. */
#include <stdio.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/compile.h"
#include "runtime/compile_internal.h"
#include "runtime/pipeline/plan.h"
#include "runtime/plan/host_copies.h"
#include "runtime/plan/log.h"
#include "runtime/plan/plan_internal.h"

typedef struct {
    const ml_compile_input *in;
    ml_plan **plan;
    int64_t limit;        /* bytes; 0: none is known */
    int64_t beside;       /* bytes that other programs held beside the attempt before */
    plan_choice first;    /* all values are kept */
    double kept, seconds; /* of a plan with that; of the last */
    int64_t kept_bytes;   /* likewise: of the rank */
    plan_fit fit;
} compilation;

/* No further attempt follows: the plan owns the graph that it borrows of the part. */
static void take_graph(ml_plan *plan) {
    rank_part *part = plan->shared->parts;
    if (!plan->borrows || part->graph != plan->graph) return;
    plan->borrows = false;
    part->graph = NULL;
}

/* A cache takes at most as much as the parameters that it copies. */
static int64_t least_states(const ml_plan *plan, bool caches) {
    const int64_t *bytes = plan->state_bytes;
    return bytes[ML_MEMORY_PARAMETERS] / (caches ? 2 : 1) + bytes[ML_MEMORY_GRADIENTS] +
           bytes[ML_MEMORY_OPTIMIZER];
}

static double part_seconds(const ml_plan *part) {
    const ml_schedule *s = part->schedule;
    double seconds = part->copy_seconds;
    for (uint32_t t = 0; t < s->steps.count; t++) seconds += plan_step_seconds(s, part->layout, t);
    return seconds;
}

/* Of a rank's stages for one microbatch, with a part of what is computed once a step. */
static double rank_seconds(const struct ml_pipeline_plan *p, int rank) {
    double seconds = 0;
    for (int v = rank; v < p->count; v += p->ranks) {
        const pipeline_stage *stage = &p->stages[v];
        for (int i = 0; i < stage->plan_count; i++)
            seconds +=
                part_seconds(stage->plans[i]) / (i < stage->tasks.count ? 1 : p->microbatches);
    }
    return seconds;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static void measure_seconds(const ml_plan *plan, plan_size *size) {
    const struct ml_pipeline_plan *p = plan->pipeline;
    for (int i = 0; p == NULL && i < plan->part_count; i++)
        size->seconds += part_seconds(plan->parts[i]);
    for (int r = 0; p != NULL && r < p->ranks; r++) { /* the slowest of those that are planned */
        double seconds = rank_seconds(p, r);
        if (seconds > size->seconds) size->seconds = seconds;
    }
}

/* What copies of a microbatch's share of the memory take, where the memory is of all microbatches
 * in flight. */
static double pipeline_copy_rate(const ml_plan *plan) {
    const struct ml_pipeline_plan *p = plan->pipeline;
    int in_flight = 1;
    for (int v = 0; v < p->count; v++)
        if (p->stages[v].slots > in_flight) in_flight = p->stages[v].slots;
    return in_flight * host_copy_rate(plan->target, plan->layout, true);
}

/* `update`: what the program that sets the parameters needs. Returns what is beside the plan. */
static int64_t measure(const compilation *c, ml_plan *plan, const update_memory *update,
                       plan_size *size) {
    const struct ml_pipeline_plan *p = plan->pipeline;
    *size = (plan_size){.caches = plan->rebuild != NULL};
    measure_seconds(plan, size);
    for (int v = p ? p->coordinate : 0; p && v < p->count; v += p->ranks) {
        size->caches |= pipeline_once_per_step(p, v) != NULL;
        size->weight_grad |= p->stages[v].waves.weight_grad;
    }
    size->states = least_states(plan, size->caches);
    plan->update_states = size->moments = update->states;
    plan->update_inputs = update->inputs;
    plan->update_arena = update->temporaries + update->copies;
    ml_beside beside = {0};
    if (c->in->beside != NULL) beside = c->in->beside(c->in->beside_context, plan);
    const int64_t bytes = beside.bytes + beside.reserved;
    size->peak = plan->peak_bytes + bytes;
    size->reach = plan->reach_bytes + bytes;
    size->arena = plan->arena_bytes;
    size->others = beside.arena;
    size->shared = size->peak - larger(plan->arena_bytes, beside.arena) +
                   larger(plan->update_arena, beside.arena);
    /* Copies of what stages save take nothing out of the arena, others of temporaries all. */
    const int64_t shared = size->shared - (p != NULL ? size->peak - size->reach : 0);
    if (shared > size->reach) size->reach = shared;
    size->scan = plan->shared->scan;
    size->keeps_all = plan->shared->keeps_all;
    return bytes;
}

static bool is_pipeline(const ml_compile_input *in) {
    return in->layout != NULL && in->layout->stages.on && in->cut != NULL;
}

static const ml_compile_options *options_of(const ml_compile_input *in) {
    static const ml_compile_options defaults;
    return in->options != NULL ? in->options : &defaults;
}

static void log_attempt(const ml_plan *plan, const plan_choice *choice, const char *how) {
    char share[32] = "", segment[64] = "";
    if (choice->kept < 1) snprintf(share, sizeof share, ", %.1f %% kept", 100 * choice->kept);
    if (choice->segment)
        snprintf(segment, sizeof segment, ", scans by segments of about %lld positions",
                 (long long)choice->segment);
    static const char *const copies[] = {"", ", copies to the host beside computation",
                                         ", copies to the host"};
    static const char *const cheap[] = {"selective, without stages that defer weight gradients",
                                        "selective", "nothing, or selective where that cannot fit"};
    log_text(plan, ML_LOG_ATTEMPT, "%soverlap %s, parameter cache %s, recompute %s%s%s%s", how,
             choice->overlap ? "on" : "off", choice->param_cache ? "on" : "off",
             cheap[choice->cheap], share, segment, copies[choice->offload]);
}

static void begin_plan(const compilation *c, ml_plan *plan, struct compile_shared *shared) {
    plan->layout = c->in->layout;
    plan->update_layout = c->in->update != NULL ? c->in->update : c->in->layout;
    plan->target = c->in->target;
    plan->options = options_of(c->in);
    plan->applied = c->in->applied;
    plan->shared = shared;
    if (shared->curves == NULL) shared->curves = recompute_curves_new(shared->arena);
}

static void log_peak(const compilation *c, const ml_plan *plan, const plan_size *size) {
    log_text(plan, ML_LOG_PEAK, "%s, %.3g ms by the planner's rates",
             c->limit == 0            ? "no limit is known"
             : size->peak <= c->limit ? "fits"
                                      : "too large",
             1e3 * size->seconds);
}

static void note_kept(compilation *c, const plan_choice *choice, const plan_size *size) {
    if (!plan_choice_same(choice, &c->first)) return;
    c->kept = size->seconds;
    c->kept_bytes = size->moments + larger(size->peak, size->shared);
}

/* Compile *c->plan, instead of the attempt before. */
static void attempt(void *context, const plan_choice *choice, plan_size *size) {
    compilation *c = context;
    ml_plan *old = *c->plan, *plan = plan_empty();
    struct compile_shared *shared = old != NULL ? old->shared : NULL;
    *c->plan = plan;
    if (shared != NULL && shared->few_alone) { /* no part of the whole program */
        ml_plan_free(old);
        old = NULL;
        shared = NULL;
    }
    plan->shared = shared;
    compile_attempt_free(old);
    begin_plan(c, plan, shared != NULL ? shared : compile_shared_new(c->limit > 0));
    plan->limit = c->limit > 0 ? larger(c->limit - c->beside, 1) : 0;
    log_attempt(plan, choice, "");
    if (is_pipeline(c->in))
        compile_pipeline(c->in, plan, choice);
    else
        compile_whole(c->in, plan, choice);
    const update_memory update = compile_update_needs(plan);
    c->beside = measure(c, plan, &update, size);
    note_kept(c, choice, size);
    c->seconds = size->seconds;
    if (plan->pipeline != NULL && c->fit.offloads) c->fit.host_rate = pipeline_copy_rate(plan);
    log_peak(c, plan, size);
}

/* ---- estimates ---- */
/* Whether an estimate will do. */
static bool only_estimates(const ml_compile_input *in) {
    return in->roots->any_plan || in->roots->estimate;
}

/* The programs with few layers, where there are to be estimates; *c->plan has no more than what
 * attempts share, of which the part is of few layers too where an estimate will do. */
static bool begin_estimates(compilation *c) {
    enum { LEAST_NODES = 16000 }; /* of the session: fewer are planned in some tenths of a second */
    if (c->limit == 0 || is_pipeline(c->in) || options_of(c->in)->no_fold ||
        ml_graph_count(c->in->graph) < LEAST_NODES)
        return false;
    ml_plan *plan = *c->plan = plan_empty();
    struct compile_shared *shared = compile_shared_new(true);
    begin_plan(c, plan, shared);
    pass_context passes = {.plan = plan, .few_margin = only_estimates(c->in) ? FEW_MARGIN : 0};
    compile_begin(c->in, shared, &passes);
    compile_part(&passes, shared, shared->parts);
    few_layers *layers = &shared->layers;
    rank_part *part = shared->parts;
    const int64_t left_out = passes.few_margin > 0 ? passes.left_out : 0;
    shared->few_alone = left_out > 0;
    if (only_estimates(c->in) && part->roots.overflow_count > 0) return false; /* with a retry */
    if (!few_layers_make(part->graph, &part->roots, left_out, shared->arena, layers)) return false;
    for (int i = 0; i < 2; i++) {
        struct compile_shared *few = shared->few[i] = compile_shared_new(true);
        few->parts = ML_NEW(few->arena, rank_part);
        few->part_count = 1;
        few->curves = shared->curves;
        few->parts[0] = (rank_part){.graph = layers->at[i].graph, .roots = layers->at[i].roots};
        if (plan->local) ml_shard_traffic(layers->at[i].graph, plan->layout, few->parts[0].traffic);
        layers->at[i].graph = NULL;
    }
    return true;
}

/* What the plan of the whole program is too large by is spread over its layers. */
static void offload_few(const compilation *c, const few_layers *layers, ml_plan *const *plans,
                        const update_memory *update, const plan_choice *choice) {
    const double peak =
        few_extended(layers, (double)plans[0]->peak_bytes, (double)plans[1]->peak_bytes);
    const double excess = peak - (double)(c->limit - c->beside - update->states);
    for (int i = 0; i < 2 && excess > 0; i++) {
        const double part = excess * layers->at[i].layers / layers->layers;
        compile_offload_to(plans[i], choice, plans[i]->peak_bytes - (int64_t)part);
    }
}

/* The same as an attempt, but that there is no plan: what that would need. */
static void estimate(void *context, const plan_choice *choice, plan_size *size) {
    compilation *c = context;
    struct compile_shared *shared = (*c->plan)->shared;
    update_memory updates[2];
    plan_size sizes[2];
    int64_t beside[2];
    log_attempt(*c->plan, choice, "estimated by few layers: ");
    for (int i = 0; i < 2; i++) {
        compile_attempt_free(shared->few_plans[i]);
        shared->few_plans[i] = NULL;
        ml_plan *plan = shared->few_plans[i] = plan_empty();
        begin_plan(c, plan, shared->few[i]);
        ml_compile_options *options = ML_NEW(plan->arena, ml_compile_options);
        *options = *options_of(c->in);
        options->log = NULL;
        options->dump = NULL;
        plan->options = options;
        compile_whole(c->in, plan, choice);
        updates[i] = compile_update_needs(plan);
    }
    const few_layers *layers = &shared->layers;
    const update_memory update = few_extended_update(layers, updates);
    offload_few(c, layers, shared->few_plans, &update, choice);
    few_extend_temporaries(layers, shared->few_plans);
    for (int i = 0; i < 2; i++) beside[i] = measure(c, shared->few_plans[i], &update, &sizes[i]);
    *size = few_extended_size(layers, sizes);
    c->beside = (int64_t)few_extended(layers, (double)beside[0], (double)beside[1]);
    (*c->plan)->peak_bytes = size->peak - c->beside;
    (*c->plan)->needed_bytes = size->moments + larger(size->peak, size->shared);
    c->seconds = size->seconds;
    note_kept(c, choice, size);
    log_peak(c, *c->plan, size);
}

/* One of the plans of few layers, which owns what was shared by attempts at it. */
static ml_plan *take_few(const compilation *c, int i) {
    struct compile_shared *all = (*c->plan)->shared;
    ml_plan *plan = all->few_plans[i];
    plan->shared = all->few[i];
    plan->shared->curves = NULL; /* of what is freed */
    all->few_plans[i] = NULL;
    all->few[i] = NULL;
    return plan;
}

/* *c->plan becomes the last estimate. */
static void take_estimate(compilation *c) {
    ml_plan *all = *c->plan, *plan = take_few(c, 1);
    plan->fewer = take_few(c, 0);
    plan->beyond = few_beyond(&all->shared->layers);
    plan->needed_bytes = all->needed_bytes;
    few_extend_work(&all->shared->layers, plan->fewer, plan);
    *c->plan = plan;
    ml_plan_free(all);
}

/* No attempt follows. */
static void end_attempts(ml_plan *plan) {
    plan->applied = (ml_plan_list){0};
    if (plan->pipeline == NULL) take_graph(plan);
    compile_shared_free_parts(plan->shared);
    if (plan->pipeline != NULL) return;
    compile_shared_free(plan->shared);
    plan->shared = NULL;
}

void ml_compile(const ml_compile_input *in, ml_plan **plan) {
    const ml_target *target = in->target;
    const ml_compile_options *options = options_of(in);
    compilation c = {in, plan, target->memory_bytes};
    plan_fit *fit = &c.fit;
    *fit =
        (plan_fit){.attempt = attempt, .context = &c, .limit = c.limit > 0 ? c.limit : INT64_MAX};
    bool gpu = target->kind == ML_TARGET_CUDA;
    fit->any = in->roots->any_plan;
    fit->estimated = in->roots->estimate;
    fit->offloads =
        compile_offload != NULL && target->host_bytes > 0 && c.limit > 0 && !in->roots->often;
    if (fit->offloads && !is_pipeline(in))
        fit->host_rate = host_copy_rate(target, in->layout, false);
    plan_choice first = {.kept = 1};
    if (gpu && options->recompute == ML_AUTO) first.cheap = CHEAP_NOWHERE;
    first.overlap = compile_overlaps(in->layout, target, options);
    first.param_cache = in->cut != NULL && !options->no_param_cache &&
                        (in->layout != NULL || (gpu && !target->no_fuse));
    *plan = NULL;
    c.first = first;
    passes_check_dump(options);
    ml_time_part("the program's updates");
    if (begin_estimates(&c)) fit->estimate = estimate;
    if (plan_fit_memory(fit, &first)) take_estimate(&c);
    if (ml_debug_on(3)) {
        ml_text text = {.arena = (*plan)->arena};
        ml_plan_print(*plan, &text);
        ml_debug(3, "%s", text.text);
    }
    (*plan)->slowed = c.kept > 0 ? c.seconds / c.kept : 1;
    (*plan)->kept_bytes = c.kept_bytes;
    end_attempts(*plan);
    if ((*plan)->fewer != NULL) end_attempts((*plan)->fewer);
    ml_time_part("accounts of the plan");
}
