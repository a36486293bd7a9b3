/* Every invariant of graph.h, checked. Run after each pass in tests and with MLUA_VERIFY=1. */
#include <string.h>

#include "runtime/graph/infer.h"

typedef struct {
    ml_graph *g;
    const ml_roots *roots;
    const char *pass;
    ml_ref node;
    uint8_t *reached; /* by sources, from the roots */
} verifier;

static _Noreturn void broken(const verifier *v, const char *what) {
    ml_text text = {.arena = ml_graph_arena(v->g)};
    if (v->node) {
        const ml_origin *origin = ml_graph_origin(v->g, v->node);
        ml_type_print(v->g, ml_graph_type(v->g, v->node), &text);
        if (origin->file) ml_text_add(&text, " from %s:%d", origin->file, origin->line);
        ml_raise(ML_INTERNAL, "after %s, node %%%u %s = %s: %s", v->pass, v->node, text.text,
                 ml_ops[ml_graph_node(v->g, v->node)->op].name, what);
    }
    ml_raise(ML_INTERNAL, "after %s: %s", v->pass, what);
}

static bool is_root(const verifier *v, ml_ref n) {
    return n && n < ml_graph_count(v->g);
}

/* The type of a state, or of one rank's part of it. */
static bool fits_state(const ml_type *t, const ml_type *state) {
    if (t->dtype != state->dtype || t->rank != state->rank) return false;
    for (int i = 0; i < t->rank; i++) {
        int at = ml_type_find(state, t->axis[i]);
        if (at < 0 || !ml_is_part(state->size[at], t->size[i])) return false;
    }
    return true;
}

static bool fits_part(const ml_type *t, const ml_type *state, int64_t start) {
    return t->dtype == state->dtype && start >= 0 &&
           start + ml_type_elements(t) <= ml_type_elements(state);
}

static void check_roots(verifier *v) {
    const ml_roots *roots = v->roots;
    for (int i = 0; i < roots->output_count; i++) {
        if (!is_root(v, roots->outputs[i])) broken(v, "an output is no node");
        v->reached[roots->outputs[i]] = 1;
    }
    for (int i = 0; i < roots->update_count; i++) {
        const ml_update *update = &roots->updates[i];
        if (!is_root(v, update->value)) broken(v, "the new value of a state is no node");
        if (update->state >= ml_graph_state_count(v->g))
            broken(v, "an updated state does not exist");
        const ml_state *state = ml_graph_state(v->g, update->state);
        v->node = update->value;
        const ml_type *type = ml_graph_type(v->g, update->value);
        if (update->part ? !fits_part(type, &state->type, update->start)
                         : !fits_state(type, &state->type))
            broken(v, "it is assigned to a state of another type");
        v->node = 0;
        v->reached[update->value] = 1;
    }
}

static void check_updates_once(verifier *v) {
    uint32_t states = ml_graph_state_count(v->g);
    uint8_t *updated = ml_arena_alloc(ml_graph_arena(v->g), states);
    for (int i = 0; i < v->roots->update_count; i++) {
        uint32_t state = v->roots->updates[i].state;
        if (v->roots->updates[i].part) continue;
        if (updated[state]) broken(v, "a state is updated twice");
        updated[state] = 1;
    }
}

static void check_structure(verifier *v) {
    ml_graph *g = v->g;
    const ml_node *node = ml_graph_node(g, v->node);
    if (node->op >= ML_OP_COUNT) ml_raise(ML_INTERNAL, "after %s: there is no such op", v->pass);
    for (int i = 0; i < node->source_count; i++) {
        ml_ref source = ml_graph_source(g, v->node, i);
        if (!source || source >= v->node) broken(v, "a source does not come before it");
        if ((ml_graph_node(g, source)->flags & ML_NODE_FUNCTION) !=
            (node->flags & ML_NODE_FUNCTION))
            broken(v, "it uses a node of a function");
    }
    for (int i = 0; i < node->arg_count; i++)
        if (ml_op_arg_of(node->op, i)->kind == ML_ARG_FUNCTION &&
            (ml_graph_args(g, v->node)[i] < 0 || ml_graph_args(g, v->node)[i] >= v->node))
            broken(v, "its function does not come before it");
    bool leaf = v->roots && v->roots->step;
    if (node->op == ML_OP_PARAM && !(node->flags & ML_NODE_FUNCTION) && v->reached[v->node] &&
        !leaf)
        broken(v, "a parameter is used outside of a function");
    if (v->reached[v->node] && (node->flags & ML_NODE_FUNCTION))
        broken(v, "a node of a function is computed");
    if (graph_lookup(g, v->node) != v->node) broken(v, "an equal node exists");
}

/* Infer again from the operands; the result must be the type that the node has. */
static void infer_again(void *argument) {
    verifier *v = argument;
    ml_graph *g = v->g;
    const ml_node *node = ml_graph_node(g, v->node);
    infer in = {g,
                node->op,
                (ml_ref *)ml_graph_sources(g, v->node),
                node->source_count,
                (int64_t *)ml_graph_args(g, v->node),
                node->arg_count,
                ml_graph_type(g, v->node),
                true};
    ml_type type = {0};
    graph_check_shape(&in);
    infer_type(&in, &type);
    if (!ml_type_equal(&type, ml_graph_type(g, v->node))) {
        ml_text text = {.arena = ml_graph_arena(g)};
        ml_type_print(g, &type, &text);
        ml_raise(ML_INTERNAL, "its operands give %s", text.text);
    }
}

static void check_node(verifier *v) {
    check_structure(v);
    if (ml_protect(infer_again, v) != ML_OK) {
        if (ml_error_last()->status == ML_NO_MEMORY) ml_raise_last();
        const char *why = ml_error_last()->text;
        broken(v, ml_arena_copy(ml_graph_arena(v->g), why, strlen(why)));
    }
}

void ml_graph_verify(const ml_graph *g, const ml_roots *roots, const char *pass) {
    /* Messages are written into the arena; no node is made. */
    verifier v = {(ml_graph *)g, roots, pass, 0, NULL};
    uint32_t count = ml_graph_count(g);
    v.reached = ml_arena_alloc(ml_graph_arena(v.g), count);
    if (roots) {
        check_roots(&v);
        check_updates_once(&v);
    }
    for (v.node = count - 1; v.node > 0; v.node--) {
        if (!v.reached[v.node]) continue;
        const ml_ref *sources = ml_graph_sources(g, v.node);
        for (int i = 0; i < ml_graph_node(g, v.node)->source_count; i++)
            if (sources[i] < v.node) v.reached[sources[i]] = 1;
    }
    for (v.node = 1; v.node < count; v.node++) check_node(&v);
}
