/* At which stages each node is live (stage_internal.h): users before their sources, from the roots
 * down. States get their holders on the way: the stages that read them. */
#include "runtime/pipeline/stage_internal.h"

enum { LONGEST_LIST = 16 }; /* values of a node */

/* A value that was found moves to the front: neighbours in the graph mostly ask for the same stage.
 * Numbers that many stages read have a table. */
stage_value *stage_find(stage_node *at, int stage) {
    if (at->by_stage) return at->by_stage[stage];
    for (stage_value **link = &at->values; *link; link = &(*link)->next) {
        stage_value *v = *link;
        if (v->stage != stage) continue;
        *link = v->next;
        v->next = at->values;
        return at->values = v;
    }
    return NULL;
}

stage_value *stage_part(const stage_node *at, int stage) {
    if (!at->parts || !stage_in(at->set, stage)) return NULL;
    int place = __builtin_popcountll(at->set[stage / 64] & (((uint64_t)1 << (stage % 64)) - 1));
    for (int w = 0; w < stage / 64; w++) place += __builtin_popcountll(at->set[w]);
    return &at->parts[place];
}

void stage_terms(stage_cutting *c, ml_ref n, stage_refs *out) {
    stage_refs open = {0}; /* last first */
    *ML_PUSH(c->scratch, &open) = n;
    while (open.count) {
        ml_ref at = open.at[--open.count];
        if (at != n && !c->node[at].absorbed) {
            *ML_PUSH(c->scratch, out) = at;
            continue;
        }
        for (int i = ml_graph_node(c->g, at)->source_count; i-- > 0;)
            *ML_PUSH(c->scratch, &open) = ml_graph_source(c->g, at, i);
    }
}

/* ---- Requirements ---------------------------------------------------------------------------- */

static void add_value(stage_cutting *c, ml_ref n, int stage, bool received) {
    stage_node *at = &c->node[n];
    if (stage_find(at, stage)) return;
    stage_value *v = ML_NEW(c->scratch, stage_value);
    *v = (stage_value){stage, received, 0, 0, -1, -1, at->values};
    at->values = v;
    if (++at->value_count == LONGEST_LIST) {
        at->by_stage = ML_NEW_ARRAY(c->scratch, stage_value *, c->out->count);
        for (v = at->values; v; v = v->next) at->by_stage[v->stage] = v;
    } else if (at->by_stage) {
        at->by_stage[stage] = v;
    }
}

/* Whether n is recomputed from what another stage sends, so that less is sent: a cast to a wider
 * dtype, a broadcast, and scalars that follow from one other scalar. */
static bool is_derived(const stage_cutting *c, ml_ref n) {
    const ml_node *node = ml_graph_node(c->g, n);
    ml_ref of = 0;
    if (ml_ops[node->op].op_class != ML_CLASS_MAP && node->op != ML_OP_BROADCAST) return false;
    for (int i = 0; i < node->source_count; i++) {
        ml_ref source = ml_graph_source(c->g, n, i);
        if (c->node[source].kind == STAGE_FREE || source == of) continue;
        if (c->node[source].kind == STAGE_LAZY || of) return false;
        of = source;
    }
    if (!of) return false;
    const ml_type *type = ml_graph_type(c->g, n), *from = ml_graph_type(c->g, of);
    if (type->rank == 0) return from->rank == 0;
    return (node->op == ML_OP_CAST || node->op == ML_OP_BROADCAST) &&
           ml_type_bytes(from) < ml_type_bytes(type);
}

static bool holds(const stage_cutting *c, ml_ref n, int stage) {
    uint32_t id = (uint32_t)ml_graph_args(c->g, n)[0];
    return !c->state[id].known || ml_stage_holds(&c->map, id, stage);
}

static void require(stage_cutting *c, ml_ref n, int stage) {
    const stage_node *at = &c->node[n];
    bool received = at->home != stage &&
                    (at->kind == STAGE_SUM || (at->kind == STAGE_HOME && !is_derived(c, n)));
    if (at->kind == STAGE_LAZY && ml_graph_node(c->g, n)->op == ML_OP_STATE)
        received = !holds(c, n, stage);
    add_value(c, n, stage, received);
}

static void require_parts(stage_cutting *c, ml_ref n);

/* Term `n` of a sum whose home is `home`. */
static void require_term(stage_cutting *c, ml_ref n, int home) {
    const stage_node *at = &c->node[n];
    if (at->kind == STAGE_SUM)
        require_parts(c, n);
    else
        require(c, n, at->kind == STAGE_HOME ? at->home : home);
}

/* Each part at its stage; a sum's terms come before it. */
static void require_parts(stage_cutting *c, ml_ref n) {
    stage_node *at = &c->node[n];
    if (at->parts) return;
    at->parts = ML_NEW_ARRAY(c->scratch, stage_value, stage_set_count(c, at->set));
    stage_value *part = at->parts;
    for (int v = stage_next(c, at->set, 0); v >= 0; v = stage_next(c, at->set, v + 1))
        *part++ = (stage_value){.stage = v, .transfer = -1, .output = -1};
}

static void require_terms(stage_cutting *c, ml_ref n) {
    const stage_node *at = &c->node[n];
    const ml_node *node = ml_graph_node(c->g, n);
    if (node->op == ML_OP_ADD) {
        stage_refs terms = {0};
        stage_terms(c, n, &terms);
        for (uint32_t i = 0; i < terms.count; i++) require_term(c, terms.at[i], at->home);
        return;
    }
    for (int i = 0; i < node->source_count; i++) {
        ml_ref source = ml_graph_source(c->g, n, i);
        if (stage_is_term(c, n, i)) {
            require_term(c, source, at->home);
            continue;
        }
        for (int v = stage_next(c, at->set, 0); v >= 0; v = stage_next(c, at->set, v + 1))
            require(c, source, v);
    }
}

/* The sources of node n, where it is live. */
static void require_sources(stage_cutting *c, ml_ref n) {
    stage_node *at = &c->node[n];
    const ml_node *node = ml_graph_node(c->g, n);
    for (stage_value *v = at->values; v; v = v->next)
        if (v->received) { /* prepends to the list, or is there */
            add_value(c, n, at->home, false);
            break;
        }
    for (stage_value *v = at->values; v; v = v->next) {
        if (v->received) continue;
        if (at->kind == STAGE_SUM)
            require_parts(c, n);
        else
            for (int i = 0; i < node->source_count; i++)
                require(c, ml_graph_source(c->g, n, i), v->stage);
    }
    if (at->kind == STAGE_SUM && at->parts && node->op != ML_OP_STATE) require_terms(c, n);
}

/* ---- Roots ----------------------------------------------------------------------------------- */

/* A state that is a result itself is read by one stage for all. */
static void assign_root_state(stage_cutting *c, ml_ref n) {
    stage_node *at = &c->node[n];
    if (at->kind != STAGE_LAZY || at->home >= 0) return;
    int home = at->hint;
    for (const stage_value *v = at->values; v; v = v->next)
        if (home < 0 || v->stage < home) home = v->stage;
    at->home = home < 0 ? 0 : home;
    add_value(c, n, at->home, false);
}

/* Every rank has each output on one of its stages. */
static void require_output(stage_cutting *c, ml_ref n) {
    assign_root_state(c, n);
    const stage_node *at = &c->node[n];
    for (int rank = 0; rank < c->ranks; rank++) {
        bool here = at->kind != STAGE_FREE && at->home % c->ranks == rank;
        int stage = here ? at->home : rank;
        if (at->kind == STAGE_LAZY)
            add_value(c, n, stage, !here);
        else
            require(c, n, stage);
    }
}

/* A new value, where it is computed. */
static void require_update(stage_cutting *c, ml_ref n, uint32_t state) {
    assign_root_state(c, n);
    const stage_node *at = &c->node[n];
    bool parts = at->kind == STAGE_SUM && c->state[state].set;
    if (parts)
        require_parts(c, n);
    else if (at->kind != STAGE_FREE)
        require(c, n, at->home);
}

/* The new value at all holders. */
static void require_at_holders(stage_cutting *c, const ml_update *update) {
    const stage_node *at = &c->node[update->value];
    const stage_state *state = &c->state[update->state];
    if (state->set) {
        if (at->kind != STAGE_SUM) require(c, update->value, state->home);
        return;
    }
    for (const struct ml_holder *h = c->map.holders[update->state]; h; h = h->next)
        if (at->kind == STAGE_LAZY)
            add_value(c, update->value, h->stage, h->stage != at->home);
        else
            require(c, update->value, h->stage);
}

static void walk(stage_cutting *c) {
    int *updates = ML_NEW_ARRAY(c->scratch, int, c->node_count); /* 1 + the first; by value */
    int *next = ML_NEW_ARRAY(c->scratch, int, c->roots->update_count + 1);
    for (int i = 0; i < c->roots->update_count; i++) {
        ml_ref value = c->roots->updates[i].value;
        next[i] = updates[value];
        updates[value] = i + 1;
    }
    for (ml_ref n = c->node_count - 1; n > 0; n--) {
        if (!c->node[n].live) continue;
        if (c->node[n].output) require_output(c, n);
        for (int i = updates[n]; i; i = next[i - 1])
            require_update(c, n, c->roots->updates[i - 1].state);
        require_sources(c, n);
    }
}

/* ---- Holders --------------------------------------------------------------------------------- */

static void add_holder(stage_cutting *c, uint32_t state, int stage) {
    struct ml_holder **at = &c->map.holders[state];
    while (*at && (*at)->stage < stage) at = &(*at)->next;
    if (*at && (*at)->stage == stage) return;
    struct ml_holder *holder = ML_NEW(c->map.arena, struct ml_holder);
    *holder = (struct ml_holder){stage, *at};
    *at = holder;
}

/* States that no program used before are held where they are read, else where their new value is
 * computed. */
static void find_holders(stage_cutting *c) {
    for (uint32_t s = 0; s < c->state_count; s++) {
        stage_state *state = &c->state[s];
        if (state->known) continue;
        for (int v = state->set ? stage_next(c, state->set, 0) : -1; v >= 0;
             v = stage_next(c, state->set, v + 1))
            add_holder(c, s, v);
        if (state->set || !state->node) continue;
        for (const stage_value *v = c->node[state->node].values; v; v = v->next)
            if (!v->received) add_holder(c, s, v->stage);
    }
    for (int i = 0; i < c->roots->update_count; i++) {
        const ml_update *update = &c->roots->updates[i];
        const stage_node *value = &c->node[update->value];
        if (c->map.holders[update->state]) continue;
        int home = stage_by_name(c->g, &c->map, update->state);
        add_holder(c, update->state, value->kind != STAGE_FREE ? value->home : home < 0 ? 0 : home);
    }
}

/* Twice: other holders need a new value too, and the first walk finds which stages read a state. */
void stage_liveness_find(stage_cutting *c) {
    walk(c);
    find_holders(c);
    for (int i = 0; i < c->roots->update_count; i++) require_at_holders(c, &c->roots->updates[i]);
    walk(c);
}
