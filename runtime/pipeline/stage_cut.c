/* A program divided into pipeline stages (stage.h): the steps, and the map of states. */
#include <string.h>

#include "runtime/pipeline/stage_internal.h"

enum { MOST_STAGES = 1 << 20 };

/* Arrays of the copy's own, for all states: the caller's map is not changed. */
static void copy_map(const ml_graph *g, const ml_stage_map *map, ml_stage_map *copy) {
    *copy = *map;
    copy->state_count = ml_graph_state_count(g);
    copy->holders = ML_NEW_ARRAY(map->arena, struct ml_holder *, copy->state_count + 1);
    if (map->state_count)
        memcpy(copy->holders, map->holders, sizeof *copy->holders * map->state_count);
}

/* ---- A cut ----------------------------------------------------------------------------------- */

static void read_roots(stage_cutting *c) {
    for (int i = 0; i < c->roots->output_count; i++) {
        stage_node *at = &c->node[c->roots->outputs[i]];
        at->live = at->output = true;
        at->users++;
    }
    for (int i = 0; i < c->roots->update_count; i++) {
        stage_node *at = &c->node[c->roots->updates[i].value];
        at->live = at->updates = true;
        at->users++;
    }
    for (ml_ref n = c->node_count - 1; n > 0; n--) {
        if (!c->node[n].live) continue;
        for (int i = 0; i < ml_graph_node(c->g, n)->source_count; i++) {
            stage_node *source = &c->node[ml_graph_source(c->g, n, i)];
            source->live = true;
            source->users++;
        }
    }
}

static void read_states(stage_cutting *c) {
    c->state = ML_NEW_ARRAY(c->scratch, stage_state, c->state_count + 1);
    for (uint32_t s = 0; s < c->state_count; s++) {
        stage_state *state = &c->state[s];
        const struct ml_holder *h = c->map.holders[s];
        state->known = h != NULL;
        state->home = h ? h->stage : -1;
        if (!h || ml_graph_state(c->g, s)->kind != ML_STATE_GRADIENT) continue;
        state->set = ML_NEW_ARRAY(c->scratch, uint64_t, c->words);
        for (; h; h = h->next) stage_include(state->set, h->stage);
    }
    for (ml_ref n = 1; n < c->node_count; n++)
        if (c->node[n].live && ml_graph_node(c->g, n)->op == ML_OP_STATE)
            c->state[ml_graph_args(c->g, n)[0]].node = n;
}

static void cut(void *argument) {
    stage_cutting *c = argument;
    const ml_stages *stages = &c->layout->stages;
    ml_stage_graphs *out = c->out;
    c->ranks = (int)c->layout->axis[stages->mesh_axis].size;
    c->node_count = ml_graph_count(c->g);
    c->node = ML_NEW_ARRAY(c->scratch, stage_node, c->node_count);
    read_roots(c);
    stage_layers_assign(c); /* raises where the model has fewer layers than there are stages */
    int64_t count = (int64_t)c->ranks * stages->chunks;
    if (count > MOST_STAGES)
        ml_raise(ML_INVALID, "a pipeline of %lld stages, and %d are the most", (long long)count,
                 MOST_STAGES);
    c->words = ((int)count + 63) / 64;
    out->stages = ML_NEW_ARRAY(c->arena, ml_stage, count);
    out->count = (int)count;
    read_states(c);
    stage_assign(c);
    stage_liveness_find(c);
    stage_graphs_build(c);
}

void ml_stage_cut(const ml_graph *g, const ml_roots *roots, const ml_layout *layout,
                  ml_stage_map *map, ml_arena *arena, ml_stage_graphs *out) {
    stage_cutting c = {.g = g, .roots = roots, .layout = layout, .arena = arena, .out = out};
    *out = (ml_stage_graphs){0};
    copy_map(g, map, &c.map);
    c.state_count = c.map.state_count;
    c.scratch = ml_arena_new();
    if (!c.scratch) ml_raise(ML_NO_MEMORY, "no memory left to cut the program into stages");
    ml_status status = ml_protect(cut, &c);
    ml_arena_free(c.scratch);
    if (status != ML_OK) {
        ml_stage_graphs_free(out);
        ml_raise_last();
    }
    *map = c.map;
}

void ml_stage_graphs_free(ml_stage_graphs *pipeline) {
    for (int s = 0; s < pipeline->count; s++) ml_graph_free(pipeline->stages[s].graph);
    *pipeline = (ml_stage_graphs){0};
}

void ml_stage_assign_state(const ml_graph *g, const ml_layout *layout, ml_stage_map *map,
                           uint32_t state) {
    ml_stage_map grown = *map;
    if (state >= map->state_count) copy_map(g, map, &grown);
    if (!grown.count) (void)stage_layers_assign_by_names(g, layout, &grown);
    if (!grown.holders[state]) {
        int home = stage_by_name(g, &grown, state);
        struct ml_holder *holder = ML_NEW(map->arena, struct ml_holder);
        *holder = (struct ml_holder){home < 0 ? 0 : home, NULL};
        grown.holders[state] = holder;
    }
    *map = grown;
}
