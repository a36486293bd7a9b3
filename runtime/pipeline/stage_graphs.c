/* The graphs of the stages, with the transfers between them (stage_internal.h). */
#include <limits.h>
#include <stdlib.h>

#include "runtime/pipeline/stage_internal.h"
#include "runtime/pipeline/subgraph.h"

typedef struct {
    subgraph part;
    ML_VEC(double) flops; /* by wave */
} growing;

typedef struct {
    stage_cutting *cut;
    growing *stages;
    ML_VEC(ml_transfer) transfers; /* to_wave INT_MAX until something uses the value */
} building;

static growing *begin(building *b, ml_ref n, int stage) {
    const stage_cutting *c = b->cut;
    ml_graph_set_origin(b->stages[stage].part.graph, ml_graph_origin(c->g, n));
    ml_graph_set_flags(b->stages[stage].part.graph,
                       ml_graph_node(c->g, n)->flags & (uint8_t)~ML_NODE_GRADIENT);
    return &b->stages[stage];
}

static void reach_wave(building *b, growing *s, int wave) {
    while (s->flops.count <= (uint32_t)wave) ML_PUSH(b->cut->arena, &s->flops);
}

/* The value v of node n is built. */
static void finish(building *b, ml_ref n, stage_value *v) {
    stage_cutting *c = b->cut;
    growing *s = &b->stages[v->stage];
    bool leaf = ml_ops[ml_graph_node(s->part.graph, v->ref)->op].op_class == ML_CLASS_LEAF;
    if ((ml_graph_node(c->g, n)->flags & ML_NODE_GRADIENT) && !leaf)
        ml_graph_mark(s->part.graph, v->ref, ML_NODE_GRADIENT);
    reach_wave(b, s, v->wave);
    if (!v->received) s->flops.at[v->wave] += stage_flops(s->part.graph, v->ref);
}

/* Something of this wave uses v. */
static void use(building *b, const stage_value *v, int wave) {
    if (v->transfer < 0) return;
    ml_transfer *t = &b->transfers.at[v->transfer];
    if (wave < t->to_wave) t->to_wave = wave;
}

static int max_wave(int wave, const stage_value *v) {
    return v->wave > wave ? v->wave : wave;
}

/* ---- Transfers ------------------------------------------------------------------------------- */

static uint32_t add_input(building *b, ml_graph *g, ml_ref n, int from, int to,
                          const ml_type *type) {
    stage_cutting *c = b->cut;
    const ml_origin *origin = ml_graph_origin(c->g, n);
    const char *module = origin->module && origin->module[0] ? origin->module : "the model";
    const char *name = origin->name ? origin->name : ml_ops[ml_graph_node(c->g, n)->op].name;
    const char *program = c->roots->name ? c->roots->name : "program";
    ml_input input = {ml_arena_format(c->scratch, "transfer %u of %s, stage %d to %d: %s of %s",
                                      b->transfers.count, program, from, to, name, module),
                      *type};
    return ml_graph_add_input(g, &input);
}

/* Send value `from` of node n to stage `to`, where it becomes *v. */
static void send(building *b, ml_ref n, stage_value *from, int to, stage_value *v) {
    growing *source = &b->stages[from->stage];
    if (from->output < 0) from->output = subgraph_export(&source->part, from->ref);
    growing *s = begin(b, n, to);
    ml_type type = *ml_graph_type(source->part.graph, from->ref);
    int64_t id = add_input(b, s->part.graph, n, from->stage, to, &type);
    v->stage = to;
    v->received = true;
    v->ref = subgraph_import(&s->part, b->cut->g, n, id);
    v->wave = from->wave + 1;
    v->transfer = (int)b->transfers.count;
    use(b, from, from->wave);
    *ML_PUSH(b->cut->arena, &b->transfers) =
        (ml_transfer){from->stage, to, from->wave, INT_MAX, from->output, (uint32_t)id, n};
    finish(b, n, v);
}

/* ---- Sums ------------------------------------------------------------------------------------ */

/* x as a term of node n. */
static ml_ref term(building *b, ml_ref n, int stage, ml_ref x) {
    ml_graph *g = b->stages[stage].part.graph;
    const ml_type *type = ml_graph_type(b->cut->g, n);
    if (ml_graph_type(g, x)->rank < type->rank) return ml_broadcast(g, x, type);
    return ml_permute(g, x, type);
}

static ml_ref zero(ml_graph *g, const ml_type *type) {
    ml_ref number = ml_const(g, type->dtype, 0);
    return type->rank ? ml_broadcast(g, number, type) : number;
}

static void add_term(building *b, ml_ref n, stage_value *sum, const stage_value *v) {
    growing *s = begin(b, n, sum->stage);
    ml_ref x = term(b, n, sum->stage, v->ref);
    sum->ref = sum->ref ? ml_map2(s->part.graph, ML_OP_ADD, sum->ref, x) : x;
    sum->wave = max_wave(sum->wave, v);
    use(b, v, sum->wave);
}

static void add_term_everywhere(building *b, ml_ref n, ml_ref of) {
    stage_node *at = &b->cut->node[n], *from = &b->cut->node[of];
    if (from->kind == STAGE_SUM) {
        int count = stage_set_count(b->cut, from->set);
        for (int i = 0; i < count; i++)
            add_term(b, n, stage_part(at, from->parts[i].stage), &from->parts[i]);
        return;
    }
    int stage = from->kind == STAGE_HOME ? from->home : at->home;
    add_term(b, n, stage_part(at, stage), stage_find(from, stage));
}

/* The part that node n, no ADD, has at a stage: terms of other stages are 0 there. */
static void make_part(building *b, ml_ref n, stage_value *part) {
    stage_cutting *c = b->cut;
    growing *s = begin(b, n, part->stage);
    ml_ref sources[3];
    const stage_value *used[3] = {0};
    int count = ml_graph_node(c->g, n)->source_count;
    for (int i = 0; i < count; i++) {
        ml_ref source = ml_graph_source(c->g, n, i);
        stage_node *of = &c->node[source];
        int home = of->kind == STAGE_HOME ? of->home : c->node[n].home;
        if (of->kind == STAGE_SUM)
            used[i] = stage_part(of, part->stage);
        else if (!stage_is_term(c, n, i) || home == part->stage)
            used[i] = stage_find(of, part->stage);
        sources[i] = used[i] ? used[i]->ref : zero(s->part.graph, ml_graph_type(c->g, source));
        if (used[i]) part->wave = max_wave(part->wave, used[i]);
    }
    for (int i = 0; i < count; i++)
        if (used[i]) use(b, used[i], part->wave);
    part->ref = ml_graph_copy(s->part.graph, c->g, n, sources);
}

static void build_parts(building *b, ml_ref n) {
    stage_cutting *c = b->cut;
    stage_node *at = &c->node[n];
    int count = stage_set_count(c, at->set);
    ml_op op = ml_graph_node(c->g, n)->op;
    if (op == ML_OP_ADD) {
        stage_refs terms = {0};
        stage_terms(c, n, &terms);
        for (uint32_t i = 0; i < terms.count; i++) add_term_everywhere(b, n, terms.at[i]);
    }
    for (int i = 0; i < count; i++) {
        stage_value *part = &at->parts[i];
        if (op == ML_OP_STATE)
            part->ref = ml_graph_copy(begin(b, n, part->stage)->part.graph, c->g, n, NULL);
        else if (op != ML_OP_ADD)
            make_part(b, n, part);
        finish(b, n, part);
    }
}

/* All parts together, in the order of stages. */
static void build_sum(building *b, ml_ref n, stage_value *v) {
    const stage_node *at = &b->cut->node[n];
    int count = stage_set_count(b->cut, at->set);
    for (int i = 0; i < count; i++) {
        stage_value *part = &at->parts[i], sent = *part;
        if (part->stage != v->stage) send(b, n, part, v->stage, &sent);
        add_term(b, n, v, &sent);
    }
    finish(b, n, v);
}

/* ---- Nodes ----------------------------------------------------------------------------------- */

typedef struct {
    stage_cutting *cut;
    int stage;
} at_stage;

static ml_ref value_at(void *context, ml_ref source) {
    const at_stage *at = context;
    return stage_find(&at->cut->node[source], at->stage)->ref;
}

static void build_value(building *b, ml_ref n, stage_value *v) {
    stage_cutting *c = b->cut;
    at_stage at = {c, v->stage};
    int count = ml_graph_node(c->g, n)->source_count;
    for (int i = 0; i < count; i++)
        v->wave = max_wave(v->wave, stage_find(&c->node[ml_graph_source(c->g, n, i)], v->stage));
    for (int i = 0; i < count; i++)
        use(b, stage_find(&c->node[ml_graph_source(c->g, n, i)], v->stage), v->wave);
    v->ref = subgraph_copy(&begin(b, n, v->stage)->part, c->g, n, value_at, &at);
    finish(b, n, v);
}

static void check_holders(const building *b, ml_ref n) {
    uint32_t state = (uint32_t)ml_graph_args(b->cut->g, n)[0];
    for (const stage_value *v = b->cut->node[n].values; v; v = v->next)
        if (!v->received && b->cut->node[n].kind != STAGE_SUM &&
            !ml_stage_holds(&b->cut->map, state, v->stage))
            ml_raise(ML_INTERNAL, "stage %d reads state \"%s\", which it does not hold", v->stage,
                     ml_graph_state(b->cut->g, state)->name);
}

static int ascending(const void *left, const void *right) {
    return (*(stage_value *const *)left)->stage - (*(stage_value *const *)right)->stage;
}

/* At all stages that use it, in their order: computed first, then sent. */
static void build_node(building *b, ml_ref n) {
    stage_cutting *c = b->cut;
    stage_node *at = &c->node[n];
    if (at->parts) build_parts(b, n);
    if (ml_graph_node(c->g, n)->op == ML_OP_STATE) check_holders(b, n);
    int count = 0;
    for (stage_value *v = at->values; v; v = v->next) count++;
    if (!count) return;
    stage_value *single, **values = &single;
    if (count > 1) values = ML_NEW_ARRAY(c->scratch, stage_value *, count);
    count = 0;
    for (stage_value *v = at->values; v; v = v->next) values[count++] = v;
    if (count > 1) qsort(values, (size_t)count, sizeof *values, ascending);
    for (int i = 0; i < count; i++) {
        if (values[i]->received) continue;
        if (at->kind == STAGE_SUM)
            build_sum(b, n, values[i]);
        else
            build_value(b, n, values[i]);
    }
    for (int i = 0; i < count; i++)
        if (values[i]->received) send(b, n, stage_find(at, at->home), values[i]->stage, values[i]);
}

/* ---- Roots ----------------------------------------------------------------------------------- */

static void assign(building *b, uint32_t state, const stage_value *v) {
    use(b, v, v->wave);
    subgraph_update(&b->stages[v->stage].part, state, v->ref);
}

/* The holder to which a part of another stage is sent: that of its rank, else the first. */
static int holder_for(const stage_cutting *c, const stage_state *state, int stage) {
    for (int v = stage_next(c, state->set, 0); v >= 0; v = stage_next(c, state->set, v + 1))
        if (v % c->ranks == stage % c->ranks) return v;
    return state->home;
}

/* A sum of gradients: each holder gets its own part, and those of stages that hold none. */
static void assign_parts(building *b, const ml_update *update) {
    stage_cutting *c = b->cut;
    const stage_state *state = &c->state[update->state];
    stage_node *value = &c->node[update->value];
    for (int v = stage_next(c, state->set, 0); v >= 0; v = stage_next(c, state->set, v + 1)) {
        stage_value whole = {.stage = v, .transfer = -1, .output = -1};
        const stage_value *part = value->kind == STAGE_SUM ? stage_part(value, v)
                                  : v == state->home       ? stage_find(value, v)
                                                           : NULL;
        if (part) whole = *part;
        int parts = value->kind == STAGE_SUM ? stage_set_count(c, value->set) : 0;
        for (int i = 0; i < parts; i++) {
            int of = value->parts[i].stage;
            if (stage_in(state->set, of) || holder_for(c, state, of) != v) continue;
            stage_value sent = {0};
            send(b, update->value, &value->parts[i], v, &sent);
            add_term(b, update->value, &whole, &sent);
        }
        if (!whole.ref)
            whole.ref = zero(begin(b, update->value, v)->part.graph,
                             &ml_graph_state(c->g, update->state)->type);
        reach_wave(b, &b->stages[v], whole.wave);
        assign(b, update->state, &whole);
    }
}

static void build_updates(building *b) {
    stage_cutting *c = b->cut;
    for (int i = 0; i < c->roots->update_count; i++) {
        const ml_update *update = &c->roots->updates[i];
        if (c->state[update->state].set) {
            assign_parts(b, update);
            continue;
        }
        for (const struct ml_holder *h = c->map.holders[update->state]; h; h = h->next)
            assign(b, update->state, stage_find(&c->node[update->value], h->stage));
    }
}

/* The program's outputs that stage s has, then its exports. */
static void build_roots(building *b, int s) {
    stage_cutting *c = b->cut;
    growing *from = &b->stages[s];
    ml_stage *to = &c->out->stages[s];
    const ml_roots *roots = c->roots;
    to->output_of = ML_NEW_ARRAY(c->arena, int, roots->output_count + 1);
    ml_ref *outputs = ML_NEW_ARRAY(c->arena, ml_ref, roots->output_count + 1);
    int base = 0;
    for (int i = 0; i < roots->output_count; i++) {
        stage_node *at = &c->node[roots->outputs[i]];
        int rank = s % c->ranks;
        bool home = at->kind != STAGE_FREE && at->home % c->ranks == rank;
        to->output_of[i] = -1;
        if (s != (home ? at->home : rank)) continue;
        const stage_value *v = stage_find(at, s);
        use(b, v, v->wave);
        to->output_of[i] = base;
        outputs[base++] = v->ref;
    }
    to->roots = subgraph_roots(&from->part, roots->name, outputs, base);
    for (uint32_t i = 0; i < b->transfers.count; i++)
        if (b->transfers.at[i].from == s) b->transfers.at[i].output += base;
    reach_wave(b, from, 0);
    to->waves = (int)from->flops.count;
    to->flops = from->flops.at;
}

static int by_wave(const void *left, const void *right) {
    const ml_transfer *a = left, *b = right;
    if (a->from_wave != b->from_wave) return a->from_wave - b->from_wave;
    if (a->from != b->from) return a->from - b->from;
    if (a->output != b->output) return a->output - b->output;
    return a->to - b->to;
}

void stage_graphs_build(stage_cutting *c) {
    building b = {.cut = c};
    ml_stage_graphs *out = c->out;
    b.stages = ML_NEW_ARRAY(c->scratch, growing, out->count);
    for (int s = 0; s < out->count; s++) {
        out->stages[s].graph = ml_graph_derive(c->g);
        b.stages[s].part = (subgraph){.arena = c->arena, .graph = out->stages[s].graph};
    }
    for (ml_ref n = 1; n < c->node_count; n++)
        if (c->node[n].live && !c->node[n].absorbed) build_node(&b, n);
    build_updates(&b);
    for (int s = 0; s < out->count; s++) build_roots(&b, s);
    if (b.transfers.count)
        qsort(b.transfers.at, b.transfers.count, sizeof *b.transfers.at, by_wave);
    out->transfers = b.transfers.at;
    out->transfer_count = (int)b.transfers.count;
}
