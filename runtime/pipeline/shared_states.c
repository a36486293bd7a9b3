/* States that several stages of a rank use share one memory, so the order of the rank's tasks must
 * let each microbatch read what the one before it assigned. */
#include "runtime/pipeline/pipeline_internal.h"
enum { NO_STAGE = 0, SEVERAL = -1 };

typedef struct {
    const ml_plan *plan;
    const pipeline_plan *pipeline;
    int rank;
    int *stage;    /* by state: 1 + the one that uses it, NO_STAGE or SEVERAL */
    bool *updated; /* by state */
    int *done;     /* by microbatch: updates of the present state */
} ordering;

static bool planned_here(const ordering *o, int v) {
    return v % o->pipeline->ranks == o->rank && o->pipeline->stages[v].planned;
}

static void note(ordering *o, uint32_t state, int v) {
    int *stage = &o->stage[state];
    if (*stage == NO_STAGE)
        *stage = v + 1;
    else if (*stage != v + 1)
        *stage = SEVERAL;
}

static void uses_find(ordering *o) {
    for (int v = 0; v < o->pipeline->count; v++) {
        const pipeline_stage *stage = &o->pipeline->stages[v];
        for (int p = 0; planned_here(o, v) && p < stage->tasks.count; p++) {
            const ml_plan *part = stage->plans[p];
            for (ml_ref n = 1; n < ml_graph_count(part->graph); n++)
                if (ml_graph_node(part->graph, n)->op == ML_OP_STATE)
                    note(o, (uint32_t)ml_graph_args(part->graph, n)[0], v);
            for (int i = 0; i < part->roots.update_count; i++) {
                note(o, part->roots.updates[i].state, v);
                o->updated[part->roots.updates[i].state] = true;
            }
        }
    }
}

static bool reads(const ml_plan *part, uint32_t state) {
    for (ml_ref n = 1; n < ml_graph_count(part->graph); n++)
        if (ml_graph_node(part->graph, n)->op == ML_OP_STATE &&
            ml_graph_args(part->graph, n)[0] == state)
            return true;
    return false;
}

static bool updates(const ml_plan *part, uint32_t state) {
    for (int i = 0; i < part->roots.update_count; i++)
        if (part->roots.updates[i].state == state) return true;
    return false;
}

/* By task of the rank: whether it reads (1) and updates (2) the state; how many update it. */
static int tasks_find(const ordering *o, uint32_t state, uint8_t *uses) {
    int count = 0;
    for (int v = 0; v < o->pipeline->count; v++) {
        const pipeline_stage *stage = &o->pipeline->stages[v];
        for (int p = 0; planned_here(o, v) && p < stage->tasks.count; p++) {
            uint8_t *use = &uses[stage->first_task + p];
            *use = (uint8_t)(reads(stage->plans[p], state) | updates(stage->plans[p], state) << 1);
            count += *use >> 1;
        }
    }
    return count;
}

/* A microbatch reads a state after all updates of the microbatches before, and before any of its
 * own or of later ones. */
static bool in_order(const ordering *o, const uint8_t *uses, int each) {
    const ml_pipeline_schedule *p = &o->pipeline->schedule;
    int complete = 0, highest = -1;
    for (int i = 0; i < o->pipeline->microbatches; i++) o->done[i] = 0;
    for (int i = 0; i < p->action_count[o->rank]; i++) {
        const ml_action *action = &p->actions[o->rank][i];
        uint8_t use = uses[action->task];
        if (use == 0) continue;
        if (complete < action->microbatch || ((use & 1) && highest >= action->microbatch))
            return false;
        if (!(use & 2)) continue;
        o->done[action->microbatch]++;
        if (action->microbatch > highest) highest = action->microbatch;
        while (complete < o->pipeline->microbatches && o->done[complete] == each) complete++;
    }
    return true;
}

static _Noreturn void raise_shared(const ordering *o, uint32_t state) {
    const ml_state *info = ml_graph_state(o->plan->graph, state);
    ml_fail(ML_INVALID,
            "state \"%s\" (%s:%d) is used by several stages of one rank and assigned before the "
            "last of them has read it",
            info->name ? info->name : "?", info->origin.file ? info->origin.file : "?",
            info->origin.line);
    ml_help("give each layer a state of its own; or stages without chunks");
    ml_raise_last();
}

void pipeline_states_check(const ml_plan *plan, int rank) {
    const pipeline_plan *pipeline = plan->pipeline;
    uint32_t states = ml_graph_state_count(plan->graph);
    if (pipeline->count == pipeline->ranks) return;
    ordering o = {.plan = plan, .pipeline = pipeline, .rank = rank};
    o.stage = ML_NEW_ARRAY(plan->arena, int, (size_t)states + 1);
    o.updated = ML_NEW_ARRAY(plan->arena, bool, (size_t)states + 1);
    o.done = ML_NEW_ARRAY(plan->arena, int, (size_t)pipeline->microbatches);
    uint8_t *uses = ML_NEW_ARRAY(plan->arena, uint8_t, (size_t)pipeline->task_count + 1);
    uses_find(&o);
    for (uint32_t id = 0; id < states; id++) {
        if (o.stage[id] != SEVERAL || !o.updated[id]) continue;
        int each = tasks_find(&o, id, uses);
        if (!in_order(&o, uses, each)) raise_shared(&o, id);
    }
}
