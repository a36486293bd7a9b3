/* The states that a repeated step must find as they were (exec/pipeline/retry.c): those that it
 * assigns, except where it does not read their old value. Sums over microbatches are read by
 * where(first, 0, state), and `first` is an input: where it is true, the old value is unused. */
#include "runtime/pipeline/pipeline_internal.h"

/* How the program reads a state. */
struct state_reads {
    bool read, otherwise; /* at all; other than as a branch that `input` discards */
    bool when;
    uint32_t input;
};

/* Whether node n discards source i where a boolean input of the program is *when. */
static bool discards(const ml_graph *g, ml_ref n, int i, uint32_t *input, bool *when) {
    const ml_ref *sources = ml_graph_sources(g, n);
    if (ml_graph_node(g, n)->op != ML_OP_WHERE || i == 0 || sources[1] == sources[2]) return false;
    const ml_type *test = ml_graph_type(g, sources[0]);
    if (ml_graph_node(g, sources[0])->op != ML_OP_INPUT || test->rank > 0) return false;
    *input = (uint32_t)ml_graph_args(g, sources[0])[0];
    *when = i == 2;
    return true;
}

static void note_read(const ml_graph *g, ml_ref n, int i, struct state_reads *begin) {
    uint32_t input = 0;
    bool when = false, out = discards(g, n, i, &input, &when);
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
static const struct state_reads *begins_of(const ml_plan *plan) {
    const ml_graph *g = plan->graph;
    const ml_roots *r = &plan->roots;
    if (plan->pipeline->begins != NULL) return plan->pipeline->begins;
    struct state_reads *begins = plan->pipeline->begins =
        ML_NEW_ARRAY(plan->arena, struct state_reads, (size_t)ml_graph_state_count(g) + 1);
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

/* In a step of one microbatch, which has one action of each task. */
static const ml_action *action_of(const pipeline_plan *pipeline, int v, int number) {
    int rank = v % pipeline->ranks, task = pipeline->stages[v].first_task + number;
    const ml_action *actions = pipeline->schedule.actions[rank];
    for (int i = 0; i < pipeline->schedule.action_count[rank]; i++)
        if (actions[i].task == task) return &actions[i];
    return NULL;
}

int64_t pipeline_overflow_time(const pipeline_plan *pipeline) {
    int64_t until = 0;
    for (int v = 0; v < pipeline->count; v++) {
        const pipeline_stage *stage = pipeline_representative(pipeline, v);
        if (!stage->planned || stage->overflow_flags == 0) continue;
        if (pipeline->microbatches > 1) return INT64_MAX;
        const ml_action *action = action_of(pipeline, v, stage->overflow_task);
        if (action->end > until) until = action->end;
    }
    return until;
}

typedef struct {
    const ml_plan *plan;
    const struct state_reads *begins;
    bool *seen; /* by state */
    ml_arena *arena;
    pipeline_saved_list *out;
} listing;

/* A state that is assigned and never read needs no old value. */
static void list_state(listing *l, uint32_t state) {
    const struct state_reads *begin = &l->begins[state];
    if (l->seen[state] || !(begin->read || begin->otherwise)) return;
    l->seen[state] = true;
    ml_type type = ml_plan_state_type(l->plan->layout, l->plan->graph, state);
    *ML_PUSH(l->arena, l->out) = (pipeline_saved_state){.state = state,
                                                        .bytes = ml_type_bytes(&type),
                                                        .begins = !begin->otherwise,
                                                        .when = begin->when,
                                                        .input = begin->input};
}

void pipeline_saved_find(const ml_plan *plan, int rank, int64_t until, ml_arena *arena,
                         pipeline_saved_list *out) {
    const pipeline_plan *pipeline = plan->pipeline;
    listing l = {.plan = plan, .begins = begins_of(plan), .arena = arena, .out = out};
    l.seen = ML_NEW_ARRAY(arena, bool, (size_t)ml_graph_state_count(plan->graph) + 1);
    for (int v = rank; v < pipeline->count; v += pipeline->ranks) {
        const pipeline_stage *stage = pipeline_representative(pipeline, v);
        for (int p = 0; p < stage->tasks.count; p++) {
            const ml_roots *roots = &stage->plans[p]->roots;
            if (until < INT64_MAX && action_of(pipeline, v, p)->start >= until) continue;
            for (int i = 0; i < roots->update_count; i++) list_state(&l, roots->updates[i].state);
        }
    }
}
