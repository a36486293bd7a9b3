/* See tests/pipeline/support.h. */
#include "tests/pipeline/support.h"

#include <math.h>
#include <string.h>

ml_ref stage_state(fixture *f, const char *name, ml_state_kind kind, const ml_type *type) {
    ml_state made = {.name = name, .kind = kind, .type = *type};
    int64_t id = ml_graph_add_state(f->g, &made), count = ml_type_elements(type);
    if (id < SUPPORT_INPUTS) {
        double *values = ML_NEW_ARRAY(f->arena, double, count);
        for (int64_t i = 0; i < count; i++)
            values[i] = kind == ML_STATE_GRADIENT ? 0 : fixture_uniform(f, 0.1, 1);
        f->states[id] = values;
        f->state_count = (int)id + 1;
    }
    return ml_graph_add(f->g, ML_OP_STATE, NULL, 0, &id, 1, NULL);
}

stage_pipeline stage_pipeline_of(fixture *f, int ranks, int chunks) {
    stage_pipeline p = {.f = f, .layout = {.count = 1}};
    p.layout.axis[0] = (ml_mesh_axis){.name = "pp", .size = ranks};
    p.layout.stages =
        (ml_stages){.on = true, .chunks = chunks, .microbatches = 1, .list = "layers"};
    p.map.arena = f->arena;
    for (int s = 0; s < ranks * chunks && ranks * chunks <= STAGE_SUPPORT_STAGES; s++)
        p.states[s] = ML_NEW_ARRAY(f->arena, double *, SUPPORT_INPUTS);
    return p;
}

static double *filled(fixture *f, const ml_type *type, double value) {
    int64_t count = ml_type_elements(type);
    double *values = ML_NEW_ARRAY(f->arena, double, count);
    for (int64_t i = 0; i < count; i++) values[i] = value;
    return values;
}

/* States that were just given holders get their values there; of sums of gradients the first. */
static void fill_states(stage_pipeline *p) {
    for (uint32_t id = 0; id < (uint32_t)p->f->state_count; id++) {
        const ml_state *state = ml_graph_state(p->f->g, id);
        int64_t bytes = ml_type_elements(&state->type) * (int64_t)sizeof(double);
        bool first = true;
        for (int s = 0; s < p->map.count; s++) {
            if (p->states[s][id] && !isnan(p->states[s][id][0])) continue;
            bool held = ml_stage_holds(&p->map, id, s);
            p->states[s][id] = filled(p->f, &state->type, held ? 0 : NAN);
            if (held && (state->kind != ML_STATE_GRADIENT || first))
                memcpy(p->states[s][id], p->f->states[id], (size_t)bytes);
            if (held) first = false;
        }
    }
}

static double **values_of(stage_pipeline *p, const ml_graph *g, int stage, double **inputs,
                          const ml_ref *nodes, int count) {
    double **results = ML_NEW_ARRAY(p->f->arena, double *, count + 1);
    ml_reference(g, (const double *const *)p->states[stage], (const double *const *)inputs, nodes,
                 count, results, false, p->f->arena);
    return results;
}

static void same(stage_pipeline *p, const char *what, int i, int stage, const double *actual,
                 const double *expected, int64_t count) {
    double largest = 1e-3;
    test_checked();
    for (int64_t k = 0; k < count; k++) largest = fmax(largest, fabs(expected[k]));
    for (int64_t k = 0; k < count; k++)
        if (!(fabs(actual[k] - expected[k]) <= 1e-9 * largest)) {
            test_fail("%s: %s %d at stage %d, element %lld: %.12g, expected %.12g", p->f->label,
                      what, i, stage, (long long)k, actual[k], expected[k]);
            return;
        }
}

/* Pass what stages send, level by level; inputs that did not come yet are NaN. */
static double ***pass_transfers(stage_pipeline *p, const ml_stage_graphs *pipeline) {
    int count = (int)ml_graph_input_count(p->f->g);
    double ***inputs = ML_NEW_ARRAY(p->f->arena, double **, pipeline->count);
    for (int s = 0; s < pipeline->count; s++) {
        inputs[s] = ML_NEW_ARRAY(p->f->arena, double *, count);
        for (int i = 0; i < count; i++)
            inputs[s][i] = i < p->f->input_count
                               ? p->f->inputs[i]
                               : filled(p->f, &ml_graph_input(p->f->g, (uint32_t)i)->type, NAN);
    }
    double **sent = ML_NEW_ARRAY(p->f->arena, double *, pipeline->transfer_count + 1);
    for (int first = 0, end; first < pipeline->transfer_count; first = end) {
        int wave = pipeline->transfers[first].from_wave;
        for (end = first; end < pipeline->transfer_count; end++) {
            const ml_transfer *t = &pipeline->transfers[end];
            if (t->from_wave != wave) break;
            const ml_stage *from = &pipeline->stages[t->from];
            CHECK(t->to_wave > t->from_wave && t->to_wave < pipeline->stages[t->to].waves);
            CHECK(t->output >= from->roots.output_count - from->roots.kept);
            CHECK(t->output < from->roots.output_count && t->from != t->to);
            sent[end] = values_of(p, from->graph, t->from, inputs[t->from],
                                  &from->roots.outputs[t->output], 1)[0];
        }
        for (int i = first; i < end; i++)
            inputs[pipeline->transfers[i].to][pipeline->transfers[i].input] = sent[i];
        if (end < pipeline->transfer_count) CHECK(pipeline->transfers[end].from_wave > wave);
    }
    return inputs;
}

/* Levels follow from those at which received values are first needed. */
static void check_levels(stage_pipeline *p, const ml_stage_graphs *pipeline) {
    uint32_t inputs = ml_graph_input_count(p->f->g);
    int *needed = ML_NEW_ARRAY(p->f->arena, int, inputs + 1);
    for (int i = 0; i < pipeline->transfer_count; i++)
        needed[pipeline->transfers[i].input] = pipeline->transfers[i].to_wave;
    for (int s = 0; s < pipeline->count; s++) {
        const ml_graph *g = pipeline->stages[s].graph;
        int *wave = ML_NEW_ARRAY(p->f->arena, int, ml_graph_count(g) + 1), most = 0;
        for (ml_ref n = 1; n < ml_graph_count(g); n++) {
            const ml_node *node = ml_graph_node(g, n);
            if (node->op == ML_OP_INPUT) wave[n] = needed[ml_graph_args(g, n)[0]];
            for (int i = 0; i < node->source_count; i++) {
                int of = wave[ml_graph_source(g, n, i)];
                if (of > wave[n]) wave[n] = of;
            }
            if (wave[n] > most) most = wave[n];
        }
        CHECK_EQ_INT(pipeline->stages[s].waves, most + 1);
        for (int i = 0; i < pipeline->transfer_count; i++) {
            const ml_transfer *t = &pipeline->transfers[i];
            if (t->from == s)
                CHECK_EQ_INT(wave[pipeline->stages[s].roots.outputs[t->output]], t->from_wave);
        }
    }
}

static void check_outputs(stage_pipeline *p, const ml_stage_graphs *pipeline, const ml_roots *whole,
                          double ***inputs, double **expected) {
    int ranks = (int)p->layout.axis[0].size;
    for (int i = 0; i < whole->output_count; i++)
        for (int rank = 0; rank < ranks; rank++) {
            int found = 0;
            for (int s = rank; s < pipeline->count; s += ranks) {
                const ml_stage *stage = &pipeline->stages[s];
                if (stage->output_of[i] < 0) continue;
                found++;
                ml_ref node = stage->roots.outputs[stage->output_of[i]];
                same(p, "output", i, s, values_of(p, stage->graph, s, inputs[s], &node, 1)[0],
                     expected[i], ml_type_elements(ml_graph_type(stage->graph, node)));
            }
            CHECK_EQ_INT(found, 1);
        }
}

/* New values at every holder and nowhere else; parts of gradients make up the whole. */
static void check_updates(stage_pipeline *p, const ml_stage_graphs *pipeline, const ml_roots *whole,
                          double ***inputs, double **expected) {
    double **made[STAGE_SUPPORT_STAGES][SUPPORT_INPUTS] = {0};
    int ranks = (int)p->layout.axis[0].size;
    for (int s = 0; s < pipeline->count; s++)
        for (int u = 0; u < pipeline->stages[s].roots.update_count; u++) {
            const ml_update *update = &pipeline->stages[s].roots.updates[u];
            CHECK(ml_stage_holds(&p->map, update->state, s) && !made[s][update->state]);
            made[s][update->state] =
                values_of(p, pipeline->stages[s].graph, s, inputs[s], &update->value, 1);
        }
    for (int u = 0; u < whole->update_count; u++) {
        uint32_t id = whole->updates[u].state;
        const ml_state *state = ml_graph_state(p->f->g, id);
        int64_t count = ml_type_elements(&state->type);
        double *total = filled(p->f, &state->type, 0);
        bool sum = state->kind == ML_STATE_GRADIENT;
        CHECK(p->map.holders[id] != NULL);
        for (const struct ml_holder *h = p->map.holders[id]; h; h = h->next) {
            if (!CHECK(made[h->stage][id] != NULL)) continue;
            for (const struct ml_holder *of = h->next; sum && of; of = of->next)
                CHECK(of->stage % ranks != h->stage % ranks); /* they share its memory */
            double *value = p->states[h->stage][id] = made[h->stage][id][0];
            if (!sum) same(p, state->name, u, h->stage, value, expected[u], count);
            for (int64_t k = 0; k < count; k++) total[k] += value[k];
        }
        if (sum) same(p, state->name, u, -1, total, expected[u], count);
        p->f->states[id] = expected[u];
    }
}

void stage_run(stage_pipeline *p, const ml_roots *program) {
    ml_roots roots = *program;
    fixture *f = p->f;
    roots.outputs = ML_NEW_ARRAY(f->arena, ml_ref, roots.output_count + 1);
    roots.updates = ML_NEW_ARRAY(f->arena, ml_update, roots.update_count + 1);
    memcpy(roots.outputs, program->outputs, sizeof(ml_ref) * (size_t)roots.output_count);
    memcpy(roots.updates, program->updates, sizeof(ml_update) * (size_t)roots.update_count);
    ml_graph *g = ml_graph_extract(f->g, &roots), *simple = ml_simplify(g, &roots);
    ml_stage_cut(simple, &roots, &p->layout, &p->map, f->arena, &p->last);
    for (int s = 0; s < p->last.count; s++)
        ml_graph_verify(p->last.stages[s].graph, &p->last.stages[s].roots, "stage");
    check_levels(p, &p->last);
    fill_states(p);
    int outputs = roots.output_count, count = outputs + roots.update_count;
    ml_ref *nodes = ML_NEW_ARRAY(f->arena, ml_ref, count + 1);
    for (int i = 0; i < count; i++)
        nodes[i] = i < outputs ? roots.outputs[i] : roots.updates[i - outputs].value;
    double **expected = ML_NEW_ARRAY(f->arena, double *, count + 1);
    ml_reference(simple, (const double *const *)f->states, (const double *const *)f->inputs, nodes,
                 count, expected, false, f->arena);
    double ***inputs = pass_transfers(p, &p->last);
    check_outputs(p, &p->last, &roots, inputs, expected);
    check_updates(p, &p->last, &roots, inputs, expected + outputs);
    ml_stage_graphs graphs = p->last;
    ml_stage_graphs_free(&graphs);
    ml_graph_free(simple);
    ml_graph_free(g);
}
