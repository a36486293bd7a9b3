/* What the next value of a state is in the max-plus algebra: max(state + slope, offset), where
 * neither depends on a state (a running maximum, mLSTM's stabiliser max(f + m, i)). The state may
 * be moved by what does not depend on it, compared, selected. An infinitely low slope: nothing of
 * the state is left. */
#include <math.h>

#include "runtime/ops/recurrence/recurrence_internal.h"

typedef struct {
    ml_ref slope, offset; /* of the state's dtype */
} form;

typedef struct {
    ml_graph *g;
    ml_ref state;
    ml_dtype dtype;
    ml_refs nodes; /* of the next value, ascending */
    form *forms;   /* slope 0: the node does not depend on the state */
} algebra;

static form *form_of(const algebra *x, ml_ref n) {
    for (uint32_t i = 0; i < x->nodes.count; i++)
        if (x->nodes.at[i] == n) return &x->forms[i];
    return NULL;
}

static ml_ref lowest(const algebra *x) {
    return ml_const(x->g, x->dtype, -INFINITY);
}

/* A source as a function of the state: one that does not depend on it is an offset. */
static form source_form(const algebra *x, ml_ref n) {
    const form *found = form_of(x, n);
    return found->slope ? *found : (form){lowest(x), n};
}

/* Both parts moved by `by`, or by its negative. */
static form moved(const algebra *x, ml_op op, form f, ml_ref by) {
    return (form){ml_map2(x->g, op, f.slope, by), ml_map2(x->g, op, f.offset, by)};
}

static form laid_out(const algebra *x, form f, const ml_type *type) {
    ml_ref part[2] = {f.slope, f.offset};
    for (int i = 0; i < 2; i++) {
        bool same = ml_type_same_axes(ml_graph_type(x->g, part[i]), type);
        part[i] = same ? ml_permute(x->g, part[i], type) : ml_broadcast(x->g, part[i], type);
    }
    return (form){part[0], part[1]};
}

static form selected(const algebra *x, ml_ref condition, form a, form b) {
    ml_ref slopes[] = {condition, a.slope, b.slope}, offsets[] = {condition, a.offset, b.offset};
    return (form){ml_graph_add(x->g, ML_OP_WHERE, slopes, 3, NULL, 0, NULL),
                  ml_graph_add(x->g, ML_OP_WHERE, offsets, 3, NULL, 0, NULL)};
}

/* Of a node that depends on the state by its sources; false: it has no such form. */
static bool node_form(const algebra *x, ml_ref n, form *out) {
    const ml_node node = *ml_graph_node(x->g, n);
    const ml_type type = *ml_graph_type(x->g, n);
    ml_ref from[3] = {0};
    if (type.dtype != x->dtype || node.source_count > 3) return false;
    for (int i = 0; i < node.source_count; i++) from[i] = ml_graph_source(x->g, n, i);
    const bool first = form_of(x, from[0])->slope != 0;
    const bool second = node.source_count > 1 && form_of(x, from[1])->slope != 0;
    switch ((ml_op)node.op) {
    case ML_OP_BROADCAST:
    case ML_OP_PERMUTE: *out = source_form(x, from[0]); break;
    case ML_OP_ADD:
        if (first && second) return false;
        *out = moved(x, ML_OP_ADD, source_form(x, from[first ? 0 : 1]), from[first ? 1 : 0]);
        break;
    case ML_OP_SUB:
        if (second) return false;
        *out = moved(x, ML_OP_SUB, source_form(x, from[0]), from[1]);
        break;
    case ML_OP_MAXIMUM: {
        const form a = source_form(x, from[0]), b = source_form(x, from[1]);
        *out = (form){ml_map2(x->g, ML_OP_MAXIMUM, a.slope, b.slope),
                      ml_map2(x->g, ML_OP_MAXIMUM, a.offset, b.offset)};
        break;
    }
    case ML_OP_WHERE:
        if (first) return false;
        *out = selected(x, from[0], source_form(x, from[1]), source_form(x, from[2]));
        break;
    default: return false;
    }
    *out = laid_out(x, *out, &type);
    return true;
}

static bool depends(const algebra *x, ml_ref n) {
    for (int i = 0; i < ml_graph_node(x->g, n)->source_count; i++)
        if (form_of(x, ml_graph_source(x->g, n, i))->slope) return true;
    return false;
}

bool recurrence_max_plus(ml_graph *g, const ml_recurrence_step *s, int state, ml_ref *slope,
                         ml_ref *offset) {
    ml_arena *arena = ml_graph_arena(g);
    algebra x = {.g = g, .state = s->states[state].parameter};
    const ml_type type = *ml_graph_type(g, x.state);
    x.dtype = (ml_dtype)type.dtype;
    graph_reach(g, s->next[state], arena, &x.nodes);
    x.forms = ML_NEW_ARRAY(arena, form, x.nodes.count + 1);
    for (uint32_t i = 0; i < x.nodes.count; i++) {
        const ml_ref n = x.nodes.at[i];
        for (int k = 0; k < s->state_count; k++)
            if (k != state && n == s->states[k].parameter) return false;
        if (n == x.state)
            x.forms[i] = laid_out(&x, (form){ml_const(g, x.dtype, 0), lowest(&x)}, &type);
        else if (depends(&x, n) && !node_form(&x, n, &x.forms[i]))
            return false;
    }
    const form f = laid_out(&x, source_form(&x, s->next[state]), &type);
    *slope = f.slope, *offset = f.offset;
    return true;
}
