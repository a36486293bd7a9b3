/* The rows of compile_list.c between which passes see few of the layers that repeat
 * (passes/fold_layers.h). */
#include "runtime/compile_passes.h"
#include "runtime/passes/fold_layers.h"
#include "runtime/plan/plan_internal.h"

struct compile_fold {
    ml_arena *arena;
    fold layers;
    ml_graph *few;   /* made, and not yet the plan's */
    ml_graph *whole; /* what was folded */
    bool owned;      /* by the plan */
    bool local;      /* plan->local before */
    bool failed;
};

/* Folds, to know whether there is something to fold. */
bool pass_folds_layers(pass_context *c) {
    ml_plan *plan = c->plan;
    if (c->whole || plan->options->no_fold) return false;
    struct compile_fold *fold = c->fold = ML_NEW(plan->arena, struct compile_fold);
    fold->arena = ml_arena_new();
    if (fold->arena == NULL) ml_raise(ML_NO_MEMORY, "no memory left for a pass over the program");
    ml_roots roots = plan->roots;
    const int margin = c->few_margin > 0 ? c->few_margin : FOLD_MARGIN;
    fold->few = fold_layers(plan->graph, &roots, margin, fold->arena, &fold->layers);
    if (fold->few == NULL) {
        pass_fold_free(c);
        return false;
    }
    plan_roots(plan, &roots); /* they may outlive the fold */
    c->left_out = fold->layers.high - fold->layers.low;
    return true;
}

ml_graph *pass_fold_layers(pass_context *c) {
    struct compile_fold *fold = c->fold;
    ml_graph *few = fold->few;
    fold->whole = c->plan->graph;
    fold->owned = !c->plan->borrows;
    fold->local = c->plan->local;
    fold->few = NULL;
    c->plan->borrows = true;
    return few;
}

bool pass_has_folded(pass_context *c) {
    return c->fold != NULL;
}
bool pass_has_left_out(pass_context *c) {
    return c->fold != NULL && (c->few_margin == 0 || c->fold->failed);
}
bool pass_has_folded_stages(pass_context *c) {
    return c->stages && c->fold != NULL;
}

const uint32_t *pass_times(pass_context *c, const ml_graph *g) {
    if (c->fold == NULL || c->fold->failed) return NULL;
    const uint32_t *times = fold_times(&c->fold->layers, g, c->fold->arena);
    if (times == NULL) c->fold->failed = true;
    return times;
}

static ml_graph *begin_again(pass_context *c) {
    struct compile_fold *fold = c->fold;
    ml_graph *whole = fold->whole;
    c->whole = true;
    c->left_out = 0;
    c->plan->local = fold->local;
    plan_graph_set(c->plan, whole);
    c->plan->borrows = !fold->owned;
    plan_roots(c->plan, &fold->layers.roots);
    fold->owned = false; /* by the plan again */
    return whole;
}

ml_graph *pass_unfold_layers(pass_context *c) {
    struct compile_fold *fold = c->fold;
    ml_roots roots = c->plan->roots;
    ml_graph *all = NULL;
    if (!fold->failed) all = fold_unfold(&fold->layers, c->plan->graph, &roots, fold->arena);
    if (all != NULL)
        plan_roots(c->plan, &roots);
    else
        all = begin_again(c);
    pass_fold_free(c);
    return all;
}

/* Also after a pass that raised: then the plan is freed, and its roots are not read again. */
void pass_fold_free(pass_context *c) {
    struct compile_fold *fold = c->fold;
    c->fold = NULL;
    if (fold == NULL) return;
    if (fold->few != NULL) ml_graph_free(fold->few);
    if (fold->owned) ml_graph_free(fold->whole);
    ml_arena_free(fold->arena);
}
