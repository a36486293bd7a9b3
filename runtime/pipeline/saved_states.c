/* What a pipelined step that is done again must find as it was (exec/pipeline_retry.c): the states
 * that it assigns, but for those that it begins anew. Sums over microbatches are read by
 * where(first, 0, state), and `first` is an input: where it is true, nothing of the state before
 * the step is used. */
#include "runtime/pipeline/plan.h"

typedef struct ml_staged_plan staged_plan;

/* How the program reads a state. */
struct staged_begin {
    bool read, otherwise; /* at all; elsewhere than as a branch that `input` leaves out */
    bool when;
    uint32_t input;
};

/* Whether node n uses source i only where a boolean input of the program is not *when. */
static bool left_out(const ml_graph *g, ml_ref n, int i, uint32_t *input, bool *when) {
    const ml_ref *sources = ml_graph_sources(g, n);
    if (ml_graph_node(g, n)->op != ML_OP_WHERE || i == 0 || sources[1] == sources[2]) return false;
    const ml_type *test = ml_graph_type(g, sources[0]);
    if (ml_graph_node(g, sources[0])->op != ML_OP_INPUT || test->rank > 0) return false;
    *input = (uint32_t)ml_graph_args(g, sources[0])[0];
    *when = i == 2;
    return true;
}

static void note_read(const ml_graph *g, ml_ref n, int i, struct staged_begin *begin) {
    uint32_t input = 0;
    bool when = false, out = left_out(g, n, i, &input, &when);
    if (begin->read && (begin->input != input || begin->when != when)) out = false;
    begin->otherwise |= !out;
    begin->read = true;
    begin->input = input;
    begin->when = when;
}

static uint32_t state_of(const ml_graph *g, ml_ref n) {
    return (uint32_t)ml_graph_args(g, n)[0];
}

/* By state, once. */
static const struct staged_begin *begins_of(const ml_plan *plan) {
    const ml_graph *g = plan->graph;
    const ml_roots *r = &plan->roots;
    if (plan->staged->begins != NULL) return plan->staged->begins;
    struct staged_begin *begins = plan->staged->begins =
        ML_NEW_ARRAY(plan->arena, struct staged_begin, (size_t)ml_graph_state_count(g) + 1);
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        for (int i = 0; i < ml_graph_node(g, n)->source_count; i++) {
            ml_ref source = ml_graph_source(g, n, i);
            if (ml_graph_node(g, source)->op == ML_OP_STATE)
                note_read(g, n, i, &begins[state_of(g, source)]);
        }
    for (int i = 0; i < r->output_count; i++)
        if (ml_graph_node(g, r->outputs[i])->op == ML_OP_STATE)
            begins[state_of(g, r->outputs[i])].otherwise = true;
    for (int i = 0; i < r->update_count; i++)
        if (ml_graph_node(g, r->updates[i].value)->op == ML_OP_STATE)
            begins[state_of(g, r->updates[i].value)].otherwise = true;
    return begins;
}

static const staged_stage *stage_like(const staged_plan *staged, int v) {
    int like = staged->stages[v].like;
    return &staged->stages[like >= 0 ? like : v];
}

/* Of a step of one microbatch, which has one action of each task. */
static const ml_action *action_of(const staged_plan *staged, int v, int piece) {
    int rank = v % staged->ranks, task = staged->stages[v].first_task + piece;
    const ml_action *actions = staged->pipeline.actions[rank];
    for (int i = 0; i < staged->pipeline.action_count[rank]; i++)
        if (actions[i].task == task) return &actions[i];
    return NULL;
}

int64_t staged_watched_until(const staged_plan *staged) {
    int64_t until = 0;
    for (int v = 0; v < staged->count; v++) {
        const staged_stage *stage = stage_like(staged, v);
        if (!stage->planned || stage->watched == 0) continue;
        if (staged->microbatches > 1) return INT64_MAX;
        const ml_action *action = action_of(staged, v, stage->watched_piece);
        if (action->end > until) until = action->end;
    }
    return until;
}

typedef struct {
    const ml_plan *plan;
    const struct staged_begin *begins;
    bool *seen; /* by state */
    ml_arena *arena;
    staged_saved_list *out;
} listing;

/* What is assigned and never read holds its new value whatever it held. */
static void list_state(listing *l, uint32_t state) {
    const struct staged_begin *begin = &l->begins[state];
    if (l->seen[state] || !(begin->read || begin->otherwise)) return;
    l->seen[state] = true;
    ml_type type = ml_plan_state_type(l->plan->layout, l->plan->graph, state);
    *ML_PUSH(l->arena, l->out) = (staged_saved){.state = state,
                                                .bytes = ml_type_bytes(&type),
                                                .begins = !begin->otherwise,
                                                .when = begin->when,
                                                .input = begin->input};
}

void staged_saved_find(const ml_plan *plan, int rank, int64_t until, ml_arena *arena,
                       staged_saved_list *out) {
    const staged_plan *staged = plan->staged;
    listing l = {.plan = plan, .begins = begins_of(plan), .arena = arena, .out = out};
    l.seen = ML_NEW_ARRAY(arena, bool, (size_t)ml_graph_state_count(plan->graph) + 1);
    for (int v = rank; v < staged->count; v += staged->ranks) {
        const staged_stage *stage = stage_like(staged, v);
        for (int p = 0; p < stage->pieces.count; p++) {
            const ml_roots *roots = &stage->plans[p]->roots;
            if (until < INT64_MAX && action_of(staged, v, p)->start >= until) continue;
            for (int i = 0; i < roots->update_count; i++) list_state(&l, roots->updates[i].state);
        }
    }
}
