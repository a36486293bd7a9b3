/* The home stage of each node (stage_internal.h).
 *
 * A node of a layer, forward or backward, has its home with the layer. A node of no layer has that
 * of its operands: forward the last of their stages, backward the first; scalars and what every
 * stage computes for itself do not count. Without such operands, as in the lookup of an embedding,
 * it is the stage of its states, else that of its first user. */
#include "runtime/pipeline/stage_internal.h"

/* ---- Sums ------------------------------------------------------------------------------------ */

static bool is_float(const ml_graph *g, ml_ref n) {
    return ml_dtypes[ml_graph_type(g, n)->dtype].kind == ML_KIND_FLOAT;
}

/* Ops that can be applied to each part of a sum. Each part is rounded as the whole would be. */
static bool may_be_linear(const ml_graph *g, ml_ref n) {
    ml_op op = ml_graph_node(g, n)->op;
    if (ml_ops[op].linear == ML_LINEAR_NO) return false;
    if (op == ML_OP_CAST) return is_float(g, n) && is_float(g, ml_graph_source(g, n, 0));
    return ml_op_is_map(op) || ml_op_is(op, ML_RELABEL) || op == ML_OP_PLACE || op == ML_OP_SUM;
}

bool stage_is_term(const stage_cutting *c, ml_ref n, int i) {
    ml_op op = ml_graph_node(c->g, n)->op;
    if (op == ML_OP_MUL) return c->node[ml_graph_source(c->g, n, i)].kind != STAGE_FREE;
    return (op != ML_OP_WHERE && op != ML_OP_DIV) || (ml_op_linear_in(op) >> i & 1);
}

/* Whether the node is linear in its terms: every stage can compute its predicates and factors. */
static bool is_linear(const stage_cutting *c, ml_ref n) {
    int count = ml_graph_node(c->g, n)->source_count, terms = 0;
    if (!may_be_linear(c->g, n)) return false;
    for (int i = 0; i < count; i++) {
        if (stage_is_term(c, n, i))
            terms++;
        else if (c->node[ml_graph_source(c->g, n, i)].kind != STAGE_FREE)
            return false;
    }
    return ml_graph_node(c->g, n)->op != ML_OP_MUL || terms == 1;
}

/* Whether operand i of a node that may be a sum of parts may be one too. */
static bool passes_sum(const ml_graph *g, ml_ref n, int i) {
    ml_op op = ml_graph_node(g, n)->op;
    if (op == ML_OP_WHERE) return i > 0;
    if (op == ML_OP_DIV) return i == 0 && ml_graph_type(g, ml_graph_source(g, n, 1))->rank == 0;
    if (op == ML_OP_MUL) return ml_graph_type(g, ml_graph_source(g, n, 1 - i))->rank == 0;
    return true;
}

/* Sums of parts may be gradients of states, new values of gradient states, scalars of no layer, and
 * what is used for nothing but these. */
static void find_sums(stage_cutting *c) {
    const ml_roots *roots = c->roots;
    bool *spoilt = ML_NEW_ARRAY(c->scratch, bool, c->node_count);
    for (int i = 0; i < roots->output_count; i++) spoilt[roots->outputs[i]] = true;
    for (int i = 0; i < roots->update_count; i++) {
        ml_ref value = roots->updates[i].value;
        bool gradient = ml_graph_state(c->g, roots->updates[i].state)->kind == ML_STATE_GRADIENT;
        if (gradient)
            c->node[value].sum = true;
        else
            spoilt[value] = true;
    }
    for (ml_ref n = c->node_count - 1; n > 0; n--) {
        stage_node *at = &c->node[n];
        if (!at->live) continue;
        const ml_node *node = ml_graph_node(c->g, n);
        bool number = at->at < 0 && ml_graph_type(c->g, n)->rank == 0;
        at->sum = (at->sum || number || (node->flags & ML_NODE_GRADIENT) || !spoilt[n]) &&
                  may_be_linear(c->g, n);
        for (int i = 0; i < node->source_count; i++)
            if (!at->sum || !passes_sum(c->g, n, i)) spoilt[ml_graph_source(c->g, n, i)] = true;
    }
}

/* ---- Homes ----------------------------------------------------------------------------------- */

static bool is_cheap(ml_op op) {
    ml_op_class class = ml_ops[op].op_class;
    return class != ML_CLASS_CONTRACT && class != ML_CLASS_ROUTINE && op != ML_OP_SORT &&
           op != ML_OP_TOP_K;
}

static void assign_state(stage_cutting *c, ml_ref n) {
    stage_node *at = &c->node[n];
    uint32_t id = (uint32_t)ml_graph_args(c->g, n)[0];
    const stage_state *state = &c->state[id];
    at->kind = STAGE_LAZY;
    at->home = state->home;
    at->hint = state->home >= 0 ? state->home : stage_by_name(c->g, &c->map, id);
    if (!state->set) return;
    at->set = state->set;
    at->kind = stage_set_count(c, state->set) > 1 ? STAGE_SUM : STAGE_HOME;
}

/* The stages of the terms of sum n; terms without a home yet will have its own. */
static uint64_t *terms_set(stage_cutting *c, ml_ref n) {
    uint64_t *set = ML_NEW_ARRAY(c->scratch, uint64_t, c->words);
    for (int i = 0; i < ml_graph_node(c->g, n)->source_count; i++) {
        const stage_node *term = &c->node[ml_graph_source(c->g, n, i)];
        if (!stage_is_term(c, n, i) || term->home < 0) continue;
        if (term->kind == STAGE_HOME) stage_include(set, term->home);
        for (int w = 0; term->kind == STAGE_SUM && w < c->words; w++) set[w] |= term->set[w];
    }
    return set;
}

/* Terms at several stages? */
static bool assign_sum(stage_cutting *c, ml_ref n) {
    stage_node *at = &c->node[n];
    if (!at->sum || !is_linear(c, n)) return false;
    uint64_t *set = terms_set(c, n);
    if (stage_set_count(c, set) < 2) return false;
    at->kind = STAGE_SUM;
    at->set = set;
    at->home = stage_next(c, set, 0);
    return true;
}

/* The homes of terms may have changed since. */
static void update_sums(stage_cutting *c) {
    for (ml_ref n = 1; n < c->node_count; n++) {
        stage_node *at = &c->node[n];
        if (!at->live || at->kind != STAGE_SUM || ml_graph_node(c->g, n)->op == ML_OP_STATE)
            continue;
        at->set = terms_set(c, n);
        if (stage_set_count(c, at->set) < 2) at->kind = STAGE_HOME;
        at->home = stage_next(c, at->set, 0);
    }
}

/* By operands: tensors before scalars, and homes before hints of states. */
static int home_by_operands(const stage_cutting *c, ml_ref n) {
    const ml_node *node = ml_graph_node(c->g, n);
    bool backward = stage_backward(c->g, n);
    for (int numbers = 0; numbers < 2; numbers++) {
        int home = -1, hint = -1;
        for (int i = 0; i < node->source_count; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            const stage_node *of = &c->node[source];
            if (!numbers && ml_graph_type(c->g, source)->rank == 0) continue;
            if (of->kind == STAGE_LAZY && of->hint > hint) hint = of->hint;
            if (of->kind < STAGE_HOME || of->home < 0) continue;
            if (home < 0 || (backward ? of->home < home : of->home > home)) home = of->home;
        }
        if (home < 0) home = hint;
        if (home >= 0) return home;
    }
    return -1;
}

static void assign_node(stage_cutting *c, ml_ref n) {
    stage_node *at = &c->node[n];
    const ml_node *node = ml_graph_node(c->g, n);
    bool free = true, lazy = true;
    at->kind = STAGE_HOME, at->home = at->hint = -1, at->set = NULL;
    if (node->op == ML_OP_STATE) {
        assign_state(c, n);
        return;
    }
    for (int i = 0; i < node->source_count; i++) {
        const stage_node *source = &c->node[ml_graph_source(c->g, n, i)];
        free = free && source->kind == STAGE_FREE;
        lazy = lazy && source->kind <= STAGE_LAZY;
        if (source->kind == STAGE_LAZY && source->hint > at->hint) at->hint = source->hint;
    }
    if (free && is_cheap(node->op))
        at->kind = STAGE_FREE;
    else if (lazy && !free && stage_elementwise(node->op) && !at->output && !at->updates)
        at->kind = STAGE_LAZY;
    else if (node->op == ML_OP_OUT)
        at->home = c->node[ml_graph_source(c->g, n, 0)].home;
    else if (!assign_sum(c, n))
        at->home = at->at >= 0 ? stage_of_position(&c->map, at->at) : home_by_operands(c, n);
}

/* The home of what is undecided is that of its first user, users first; an op's outputs stay with
 * it. */
static void assign_rest(stage_cutting *c) {
    int *earliest = ML_NEW_ARRAY(c->scratch, int, c->node_count);
    for (ml_ref n = 0; n < c->node_count; n++) earliest[n] = INT32_MAX;
    for (int i = 0; i < c->roots->update_count; i++) {
        const ml_update *update = &c->roots->updates[i];
        int home = c->state[update->state].home;
        if (home >= 0 && home < earliest[update->value]) earliest[update->value] = home;
    }
    for (ml_ref n = c->node_count - 1; n > 0; n--) {
        stage_node *at = &c->node[n];
        if (!at->live || at->kind < STAGE_HOME) continue;
        const ml_node *node = ml_graph_node(c->g, n);
        if (at->home < 0 && earliest[n] < INT32_MAX) at->home = earliest[n];
        if (at->home < 0 && node->op != ML_OP_OUT) at->home = 0;
        for (int i = 0; i < node->source_count && at->home >= 0; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            if (at->home < earliest[source]) earliest[source] = at->home;
        }
    }
    for (ml_ref n = 1; n < c->node_count; n++)
        if (c->node[n].live && ml_graph_node(c->g, n)->op == ML_OP_OUT &&
            c->node[n].kind == STAGE_HOME)
            c->node[n].home = c->node[ml_graph_source(c->g, n, 0)].home;
}

/* Whether the backward pass computes it, or one of its terms. */
static bool is_backward(const ml_graph *g, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    bool backward = stage_backward(g, n);
    for (int i = 0; i < node->source_count; i++)
        backward = backward || stage_backward(g, ml_graph_source(g, n, i));
    return backward;
}

/* The stages that hold parts of a sum in a state: one a rank, since its stages share the state's
 * memory. It is the last to run: the highest of them forward, the lowest backward. */
static uint64_t *part_holders(const stage_cutting *c, ml_ref value) {
    uint64_t *set = ML_NEW_ARRAY(c->scratch, uint64_t, c->words);
    int *holder_of = ML_NEW_ARRAY(c->scratch, int, c->ranks); /* 1 + its stage */
    bool backward = is_backward(c->g, value);
    for (int v = stage_next(c, c->node[value].set, 0); v >= 0;
         v = stage_next(c, c->node[value].set, v + 1))
        if (!backward || !holder_of[v % c->ranks]) holder_of[v % c->ranks] = v + 1;
    for (int r = 0; r < c->ranks; r++)
        if (holder_of[r]) stage_include(set, holder_of[r] - 1);
    return set;
}

/* A state of gradients that no program used yet has a part on each rank where its new value has
 * one. */
static bool assign_gradient_states(stage_cutting *c) {
    bool any = false;
    for (int i = 0; i < c->roots->update_count; i++) {
        const ml_update *update = &c->roots->updates[i];
        stage_state *state = &c->state[update->state];
        if (ml_graph_state(c->g, update->state)->kind != ML_STATE_GRADIENT || state->set) continue;
        const stage_node *value = &c->node[update->value];
        int home = value->home >= 0 ? value->home : value->hint;
        if (value->kind <= STAGE_LAZY && home < 0)
            home = stage_by_name(c->g, &c->map, update->state);
        if (value->kind == STAGE_SUM) {
            state->set = part_holders(c, update->value);
        } else {
            state->set = ML_NEW_ARRAY(c->scratch, uint64_t, c->words);
            stage_include(state->set, home < 0 ? 0 : home);
        }
        state->home = stage_next(c, state->set, 0);
        any = true;
    }
    for (uint32_t s = 0; s < c->state_count; s++) { /* read, but set by no program yet */
        stage_state *state = &c->state[s];
        if (!state->node || state->set || ml_graph_state(c->g, s)->kind != ML_STATE_GRADIENT)
            continue;
        int home = stage_by_name(c->g, &c->map, s);
        state->set = ML_NEW_ARRAY(c->scratch, uint64_t, c->words);
        state->home = home < 0 ? 0 : home;
        stage_include(state->set, state->home);
        any = true;
    }
    return any;
}

/* ---- Smaller transfers ----------------------------------------------------------------------- */

static bool makes_smaller(const ml_graph *g, ml_ref n) {
    ml_op op = ml_graph_node(g, n)->op;
    return (op == ML_OP_CAST || op == ML_OP_SLICE || op == ML_OP_SUM || op == ML_OP_MAX ||
            op == ML_OP_MIN) &&
           ml_type_bytes(ml_graph_type(g, n)) <
               ml_type_bytes(ml_graph_type(g, ml_graph_source(g, n, 0)));
}

/* An op that makes a tensor of another stage smaller is computed at that stage, unless something
 * else needs the whole tensor anyway. */
static void shrink_transfers(stage_cutting *c) {
    bool *whole = ML_NEW_ARRAY(c->scratch, bool, c->node_count);
    for (ml_ref n = c->node_count - 1; n > 0; n--) {
        stage_node *at = &c->node[n];
        if (!at->live || at->kind != STAGE_HOME) continue;
        const ml_node *node = ml_graph_node(c->g, n);
        bool smaller = makes_smaller(c->g, n);
        for (int i = 0; i < node->source_count; i++) {
            stage_node *source = &c->node[ml_graph_source(c->g, n, i)];
            if (source->kind == STAGE_HOME && source->home != at->home && !smaller)
                whole[ml_graph_source(c->g, n, i)] = true;
        }
    }
    for (ml_ref n = 1; n < c->node_count; n++) {
        stage_node *at = &c->node[n];
        if (!at->live || at->kind != STAGE_HOME || !makes_smaller(c->g, n)) continue;
        ml_ref source = ml_graph_source(c->g, n, 0);
        const stage_node *of = &c->node[source];
        if (of->kind == STAGE_HOME && !whole[source] && !of->output && !of->updates)
            at->home = of->home;
    }
}

/* An ADD whose one user is a sum of the same type is absorbed: its terms become the user's. A chain
 * of thousands of scalars is then one list, not as many parts at each stage. */
static void absorb_sums(stage_cutting *c) {
    for (ml_ref n = 1; n < c->node_count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        if (!c->node[n].live || c->node[n].kind != STAGE_SUM || node->op != ML_OP_ADD) continue;
        for (int i = 0; i < 2; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            stage_node *of = &c->node[source];
            of->absorbed = of->kind == STAGE_SUM && ml_graph_node(c->g, source)->op == ML_OP_ADD &&
                           of->users == 1 && ml_graph_node(c->g, source)->type == node->type;
        }
    }
}

void stage_assign(stage_cutting *c) {
    find_sums(c);
    for (ml_ref n = 1; n < c->node_count; n++)
        if (c->node[n].live) assign_node(c, n);
    if (assign_gradient_states(c))
        for (ml_ref n = 1; n < c->node_count; n++)
            if (c->node[n].live) assign_node(c, n);
    assign_rest(c);
    shrink_transfers(c);
    update_sums(c);
    absorb_sums(c);
}
