/* Ranks whose stages have equal plans: a check plans one of each. */
#include "runtime/pipeline/pipeline_internal.h"

/* A hash of all that determines the plans of a rank's stages. States are numbered in the order of
 * their use, and waves by their index: ranks with equal plans may differ in both. */
typedef struct {
    int user;        /* 1 + the last rank that has it */
    uint32_t number; /* in the order of their use there */
} shape_of_state;

typedef struct {
    const pipeline_plan *pipeline;
    const ml_graph *global;
    int rank;
    uint32_t states;       /* of the rank so far */
    shape_of_state *state; /* by id */
} rank_shape;

static uint64_t shape_state(rank_shape *r, uint32_t id, uint64_t shape) {
    shape_of_state *state = &r->state[id];
    if (state->user != r->rank + 1) *state = (shape_of_state){r->rank + 1, ++r->states};
    uint32_t fields[2] = {state->number, (uint32_t)ml_graph_state(r->global, id)->kind};
    return ml_hash(fields, sizeof fields, shape);
}

/* The index of the wave in which an input is received, from 1; 0 for one of the script. */
static uint64_t shape_input(const rank_shape *r, const task_waves *waves, uint32_t id,
                            uint64_t shape) {
    int wave = r->pipeline->input_wave[id], at = 0;
    while (wave > 0 && at < waves->count && waves->wave[at] != wave) at++;
    if (wave > 0) at++;
    return ml_hash(&at, sizeof at, shape);
}

static uint64_t shape_node(rank_shape *r, const task_waves *waves, const ml_graph *g, ml_ref n,
                           uint64_t shape) {
    const ml_node *node = ml_graph_node(g, n);
    const ml_type *type = ml_graph_type(g, n);
    const int64_t *args = ml_graph_args(g, n);
    uint32_t head[3] = {node->op, node->flags, type->dtype};
    shape = ml_hash(head, sizeof head, shape);
    shape = ml_hash(ml_graph_sources(g, n), node->source_count * sizeof(ml_ref), shape);
    shape = ml_hash(type->axis, type->rank * sizeof(ml_axis), shape);
    shape = ml_hash(type->size, type->rank * sizeof(int64_t), shape);
    if (node->op == ML_OP_STATE) return shape_state(r, (uint32_t)args[0], shape);
    if (node->op == ML_OP_INPUT) return shape_input(r, waves, (uint32_t)args[0], shape);
    return ml_hash(args, node->arg_count * sizeof(int64_t), shape);
}

static uint64_t shape_stage(rank_shape *r, int v, uint64_t shape) {
    const ml_stage *stage = &r->pipeline->cut.stages[v];
    const task_waves *waves = &r->pipeline->stages[v].waves;
    const ml_roots *roots = &stage->roots;
    int head[] = {waves->count, waves->weight_grad, waves->overlaps, roots->kept,
                  roots->output_count};
    shape = ml_hash(head, sizeof head, shape);
    for (ml_ref n = 1; n < ml_graph_count(stage->graph); n++)
        shape = shape_node(r, waves, stage->graph, n, shape);
    shape = ml_hash(roots->outputs, sizeof(ml_ref) * (size_t)roots->output_count, shape);
    for (int i = 0; i < roots->update_count; i++) {
        shape = ml_hash(&roots->updates[i].value, sizeof(ml_ref), shape);
        shape = shape_state(r, roots->updates[i].state, shape);
    }
    return shape;
}

int *pipeline_representatives(const pipeline_plan *pipeline, const ml_graph *global,
                              ml_arena *arena) {
    rank_shape r = {.pipeline = pipeline, .global = global};
    r.state = ML_NEW_ARRAY(arena, shape_of_state, ml_graph_state_count(global) + 1);
    uint64_t *shapes = ML_NEW_ARRAY(arena, uint64_t, (size_t)pipeline->ranks);
    int *representative = ML_NEW_ARRAY(arena, int, (size_t)pipeline->ranks);
    for (; r.rank < pipeline->ranks; r.rank++) {
        r.states = 0;
        for (int v = r.rank; v < pipeline->count; v += pipeline->ranks)
            shapes[r.rank] = shape_stage(&r, v, shapes[r.rank]);
        while (shapes[representative[r.rank]] != shapes[r.rank]) representative[r.rank]++;
    }
    return representative;
}
