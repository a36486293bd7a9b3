/* What the stages of a rank need: buffers of the microbatches in flight, states, temporaries, work
 * and traffic. */
#include <string.h>

#include "runtime/pipeline/pipeline_internal.h"
#include "runtime/plan/plan_internal.h"

typedef struct {
    int64_t kinds[ML_MEMORY_KINDS], states[ML_MEMORY_KINDS];
    int64_t arena, library, buffers, once_per_step, saved, peak;
    int64_t host, offloaded; /* bytes of host memory; copied there, of a microbatch */
    double flops, copy_seconds;
    uint32_t step;
} account;

static void account_states(const ml_plan *part, bool *seen, account *a) {
    for (uint32_t i = 0; i < part->states.count; i++) {
        const ml_held_state *state = &part->states.at[i];
        if (seen[state->id]) continue;
        seen[state->id] = true;
        a->states[state->kind] += state->bytes;
    }
}

const ml_plan *pipeline_once_per_step(const pipeline_plan *pipeline, int v) {
    const pipeline_stage *stage = pipeline_representative(pipeline, v);
    return stage->tasks.once_per_step ? stage->plans[stage->tasks.count] : NULL;
}

/* Copies of states, for a step that may have to be repeated. */
static int64_t account_saved(const ml_plan *plan, int coordinate, ml_arena *arena) {
    pipeline_saved_list list = {0};
    int64_t bytes = 0;
    int64_t until = plan->pipeline->until;
    if (until == 0) return 0;
    pipeline_saved_find(plan, coordinate, until, arena, &list);
    for (uint32_t i = 0; i < list.count; i++)
        if (!list.at[i].begins) bytes += memory_padded(list.at[i].bytes);
    return bytes;
}

typedef struct {
    ml_plan *plan;
    int coordinate; /* -1: the rank with the largest account */
    ml_arena *scratch;
    bool *seen; /* by state */
    account best;
} accounting;

static void account_rank(accounting *x, int coordinate, account *a) {
    const ml_plan *plan = x->plan, *largest = NULL;
    const pipeline_plan *pipeline = plan->pipeline;
    memset(x->seen, 0, (size_t)ml_graph_state_count(plan->graph) + 1);
    memset(a, 0, sizeof *a);
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks) {
        const pipeline_stage *stage = pipeline_representative(pipeline, v);
        a->buffers += stage->tasks.buffer_bytes * pipeline->stages[v].slots;
        a->once_per_step += stage->tasks.once_bytes;
        a->host += stage->host_bytes * pipeline->stages[v].slots;
        for (int p = 0; p < stage->plan_count; p++) {
            const ml_plan *part = stage->plans[p];
            account_states(part, x->seen, a);
            a->flops += part->flops;
            a->offloaded += part->offloaded_bytes;
            a->copy_seconds += part->copy_seconds;
            if (part->library_bytes > a->library) a->library = part->library_bytes;
            if (largest == NULL || part->arena_bytes > largest->arena_bytes) largest = part;
        }
    }
    a->arena = largest->arena_bytes;
    a->saved = account_saved(plan, coordinate, x->scratch);
    for (int i = 0; i < ML_MEMORY_KINDS; i++) {
        a->kinds[i] = a->states[i] + largest->kind_bytes[i] - largest->state_bytes[i];
        a->peak += a->states[i];
    }
    a->kinds[ML_MEMORY_ACTIVATIONS] += a->buffers;
    a->kinds[ML_MEMORY_PARAMETERS] += a->once_per_step;
    a->kinds[ML_MEMORY_WORKSPACE] += a->library - largest->library_bytes + a->saved;
    a->peak += a->arena + a->library + a->buffers + a->once_per_step + a->saved;
}

/* And the work that ranks duplicate. */
static void traffic_sum(ml_plan *plan, int coordinate) {
    const pipeline_plan *pipeline = plan->pipeline;
    ml_traffic *sent = &plan->traffic[plan->layout->stages.mesh_axis][ML_COLLECTIVE_SEND];
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks) {
        const ml_plan *local = pipeline_representative(pipeline, v)->local;
        ml_division_add(&plan->roots.division, &local->roots.division);
        for (int i = 0; i < ML_MAX_MESH; i++) {
            for (int k = 0; k < ML_COLLECTIVE_KINDS; k++) {
                plan->traffic[i][k].count += local->traffic[i][k].count;
                plan->traffic[i][k].bytes += local->traffic[i][k].bytes;
            }
        }
    }
    sent->count += pipeline->sent[coordinate].count;
    sent->bytes += pipeline->sent[coordinate].bytes;
}

static void parts_list(ml_plan *plan, int coordinate) {
    const pipeline_plan *pipeline = plan->pipeline;
    int count = 0;
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks)
        count += pipeline_representative(pipeline, v)->plan_count;
    plan->parts = ML_NEW_ARRAY(plan->arena, ml_plan *, (size_t)count);
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks) {
        const pipeline_stage *stage = pipeline_representative(pipeline, v);
        for (int p = 0; p < stage->plan_count; p++)
            plan->parts[plan->part_count++] = stage->plans[p];
    }
}

/* The work of all ranks, as if evenly distributed, from that of one of them. */
static double flops_even(const pipeline_plan *pipeline, double own, int coordinate) {
    double mine = 0;
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks)
        for (int i = 0; i < pipeline->cut.stages[v].waves; i++)
            mine += pipeline->cut.stages[v].flops[i];
    return mine > 0 ? own * pipeline->flops / mine / pipeline->ranks : 0;
}

static void list_state(accounting *x, ml_held_state state) {
    if (x->seen[state.id]) return;
    x->seen[state.id] = true;
    *ML_PUSH(x->plan->arena, &x->plan->states) = state;
}

/* In a check: a stage whose plan is another's has states of its own. */
static void list_own(accounting *x, const pipeline_stage *stage) {
    const ml_plan *plan = x->plan;
    pipeline_plan *pipeline = plan->pipeline;
    if (pipeline->state_bytes == NULL)
        pipeline->state_bytes =
            ML_NEW_ARRAY(plan->arena, int64_t, (size_t)ml_graph_state_count(plan->graph) + 1);
    for (int i = 0; i < stage->state_count; i++) {
        const uint32_t id = stage->states[i];
        int64_t *bytes = &pipeline->state_bytes[id];
        if (x->seen[id]) continue;
        if (*bytes == 0) {
            const ml_type local = plan_state(plan, id);
            *bytes = memory_padded(ml_type_bytes(&local));
        }
        list_state(x, (ml_held_state){
                          id, ml_plan_memory_kind(ml_graph_state(plan->graph, id)->kind), *bytes});
    }
}

static void list_states(accounting *x) {
    const pipeline_plan *pipeline = x->plan->pipeline;
    memset(x->seen, 0, (size_t)ml_graph_state_count(x->plan->graph) + 1);
    x->plan->states.count = 0;
    for (int v = pipeline->coordinate; v < pipeline->count; v += pipeline->ranks) {
        const pipeline_stage *stage = pipeline_representative(pipeline, v);
        if (pipeline->stages[v].states != NULL) {
            list_own(x, &pipeline->stages[v]);
            continue;
        }
        for (int p = 0; p < stage->plan_count; p++)
            for (uint32_t i = 0; i < stage->plans[p]->states.count; i++)
                list_state(x, stage->plans[p]->states.at[i]);
    }
}

static void account_body(void *context) {
    accounting *x = context;
    pipeline_plan *pipeline = x->plan->pipeline;
    account a;
    x->seen = ML_NEW_ARRAY(x->scratch, bool, (size_t)ml_graph_state_count(x->plan->graph) + 1);
    pipeline->coordinate = x->coordinate;
    if (x->coordinate >= 0) account_rank(x, x->coordinate, &x->best);
    for (int r = 0; x->coordinate < 0 && r < pipeline->ranks; r++) {
        account_rank(x, r, &a);
        if (r > 0 && a.peak <= x->best.peak) continue;
        x->best = a;
        pipeline->coordinate = r;
    }
    list_states(x);
}

void pipeline_memory(ml_plan *plan, int coordinate) {
    pipeline_plan *pipeline = plan->pipeline;
    accounting x = {.plan = plan, .coordinate = coordinate, .scratch = ml_arena_new()};
    if (x.scratch == NULL) ml_raise(ML_NO_MEMORY, "no memory left to plan a pipeline");
    ml_status status = ml_protect(account_body, &x);
    ml_arena_free(x.scratch);
    if (status != ML_OK) ml_raise_last();
    plan->part_count = 0;
    memset(plan->traffic, 0, sizeof plan->traffic);
    plan->roots.division = (ml_division){0};
    memcpy(plan->kind_bytes, x.best.kinds, sizeof x.best.kinds);
    memcpy(plan->state_bytes, x.best.states, sizeof x.best.states);
    plan->arena_bytes = x.best.arena;
    plan->library_bytes = x.best.library;
    plan->buffer_bytes = x.best.buffers + x.best.once_per_step;
    plan->input_bytes = x.best.saved;
    plan->peak_bytes = plan->reach_bytes = x.best.peak;
    plan->host_bytes = x.best.host;
    plan->offloaded_bytes = x.best.offloaded * pipeline->microbatches;
    plan->copy_seconds = x.best.copy_seconds;
    plan->flops = flops_even(pipeline, x.best.flops, pipeline->coordinate);
    traffic_sum(plan, pipeline->coordinate);
    parts_list(plan, pipeline->coordinate);
    if (plan->retry == NULL) return;
    pipeline_memory(plan->retry, pipeline->coordinate);
    plan_retry_account(plan);
}
