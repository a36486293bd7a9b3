/* Runs the lists of passes, and what those rows need to know that are part of every list. The
 * rewrites themselves are in runtime/passes, sharding in runtime/shard. */
#include "runtime/compile_passes.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/machine.h"
#include "runtime/passes/passes.h"
#include "runtime/plan/plan_internal.h"

static bool on_gpu(const pass_context *c) {
    return c->plan->target->kind == ML_TARGET_CUDA;
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

ml_graph *pass_extract(pass_context *c) {
    plan_graph_set(c->plan, ml_graph_extract(c->plan->graph, &c->plan->roots));
    check_total(c->plan);
    return c->plan->graph;
}

bool pass_has_placements(pass_context *c) {
    const ml_graph *g = c->plan->graph;
    if (c->plan->layout != NULL) return false;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->op == ML_OP_PLACE) return true;
    return false;
}

/* New values take the dtype and the axis order of their states. */
ml_graph *pass_conform_updates(pass_context *c) {
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

bool pass_has_layout(pass_context *c) {
    return c->plan->layout != NULL && !c->plan->roots.step;
}

/* From the global program to that of one rank. The order of the results' axes does not change. */
ml_graph *pass_shard(pass_context *c) {
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
    const uint32_t *times = pass_times(c, plan->graph);
    plan_graph_set(plan, ml_shard_times(plan->graph, r, plan->layout, times));
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
    plan->local = true;
    return g;
}

ml_graph *pass_decompose(pass_context *c) {
    ml_plan *plan = c->plan;
    const int64_t longest = plan->target->longest_materialized;
    if (!ml_decompose_applies(plan->graph, longest)) return plan->graph;
    return ml_decompose(plan->graph, &plan->roots, longest);
}

/* Simplify what was duplicated, and count its collectives anew. */
ml_graph *pass_simplify_parts(pass_context *c) {
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
    bool chosen =
        c->choice.cheap == CHEAP_EVERYWHERE || (c->choice.cheap == CHEAP_UNDEFERRED && !deferred);
    return c->plan->options->recompute != ML_NEVER && on_gpu(c) && chosen;
}
/* Replace CHEAP_NOWHERE where a lower bound of the memory that it takes is above the limit: an
 * attempt without recomputation could not fit. */
static void decide_cheap(pass_context *c) {
    const ml_plan *plan = c->plan;
    int64_t limit = plan->limit;
    if (c->choice.cheap != CHEAP_NOWHERE) return;
    c->keeps_all = limit == 0 || ml_saved_bytes(plan->graph, plan->arena) <= limit;
    if (!c->keeps_all) c->choice.cheap = CHEAP_UNDEFERRED;
}
bool pass_recomputes(pass_context *c) {
    decide_cheap(c);
    return recomputes_cheap(c) || kept_share(c) < 1;
}
ml_graph *pass_recompute(pass_context *c) {
    ml_plan *plan = c->plan;
    int64_t bytes = recomputes_cheap(c) ? spare_bytes(plan) : 0;
    double speeds[ML_MAX_MESH] = {0};
    for (int i = 0; plan->layout != NULL && i < plan->layout->count; i++)
        speeds[i] = plan_link_speed(plan->layout, plan->target, i);
    ml_graph *g = ml_recompute(plan->graph, &plan->roots, bytes, kept_share(c), speeds, c->curves);
    if (plan->layout != NULL) ml_shard_traffic(g, plan->layout, plan->traffic);
    return g;
}

typedef struct {
    pass_context *context;
    pass_list first, last;
} passes_of_lists;

static const compile_pass *pass_at(const passes_of_lists *passes, int i) {
    for (pass_list which = passes->first; which <= passes->last; which++) {
        if (i < compile_pass_lists[which].count) return &compile_pass_lists[which].list[i];
        i -= compile_pass_lists[which].count;
    }
    return NULL;
}

static void run_lists(void *argument) {
    const passes_of_lists *passes = argument;
    pass_context *c = passes->context;
    const compile_pass *p;
    int folds = -1; /* the row that folded */
    for (int i = 0; (p = pass_at(passes, i)) != NULL; i++) {
        if (p->when != NULL && !p->when(c)) continue;
        const bool whole = c->whole;
        ml_graph *graph = p->run != NULL ? p->run(c->plan->graph, &c->plan->roots) : p->run_with(c);
        pass_done(c->plan, graph, p->name);
        if (c->fold != NULL && folds < 0) folds = i;
        if (c->whole && !whole) i = folds;
    }
}

void passes_run(pass_context *c, pass_list first, pass_list last) {
    const ml_status status = ml_protect(run_lists, &(passes_of_lists){c, first, last});
    pass_fold_free(c);
    if (status != ML_OK) ml_raise_last();
}

const char PASS_TASK[] = "task";

bool ml_compile_pass(int i, const char **name, const char **purpose) {
    for (int which = 0; which < PASS_LISTS; i -= compile_pass_lists[which++].count) {
        if (i >= compile_pass_lists[which].count) continue;
        *name = compile_pass_lists[which].list[i].name;
        *purpose = compile_pass_lists[which].list[i].purpose;
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
