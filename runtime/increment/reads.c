/* What a node reads of its operands' positions: the same ones or others, at which lead, and whether
 * it looks ahead. */
#include "runtime/increment/internal.h"

bool increment_crosses(const increment *inc, ml_ref n) {
    if (ml_graph_node(inc->g, n)->op != ML_OP_ATTENTION) return false;
    const ml_ref *s = ml_graph_sources(inc->g, n);
    return inc->places[s[0]].fed && !inc->places[s[1]].fed && !inc->places[s[2]].fed;
}

bool increment_mixes(const increment *inc, ml_ref n) {
    const place *p = &inc->places[n];
    ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    if (!p->fed || increment_crosses(inc, n)) return false;
    if (p->over) return true;
    if (op == ML_OP_ATTENTION || op == ML_OP_CONV || op == ML_OP_LINEAR_SCAN ||
        op == ML_OP_RECURRENCE || op == ML_OP_CUMSUM)
        return increment_names(inc->g, n, p->axis);
    return false;
}

bool increment_is_running_sum(const increment *inc, ml_ref n) {
    return ml_graph_node(inc->g, n)->op == ML_OP_CUMSUM && !ml_graph_args(inc->g, n)[1];
}

bool increment_exclusive(const increment *inc, ml_ref n) {
    if (ml_graph_node(inc->g, n)->op != ML_OP_SUB) return false;
    ml_ref sum = ml_graph_source(inc->g, n, 0), of = ml_graph_source(inc->g, n, 1);
    const place *p = &inc->places[sum];
    return p->fed && p->chunk && !p->outer && increment_is_running_sum(inc, sum) &&
           increment_names(inc->g, sum, p->axis) && ml_graph_source(inc->g, sum, 0) == of;
}

bool increment_spreads(const increment *inc, ml_ref n) {
    if (ml_graph_node(inc->g, n)->op != ML_OP_MERGE) return false;
    ml_ref s = ml_graph_source(inc->g, n, 0);
    const place *p = &inc->places[s];
    const int64_t *args = ml_graph_args(inc->g, n);
    return p->chunk && !p->outer && args[0] == p->axis &&
           ml_type_size(ml_graph_type(inc->g, s), (ml_axis)args[1]) == p->chunk;
}

int64_t increment_source_lead(const increment *inc, ml_ref n, int i) {
    const ml_node *node = ml_graph_node(inc->g, n);
    const place *p = &inc->places[n], *s = &inc->places[ml_graph_source(inc->g, n, i)];
    ml_axis axis = node->op == ML_OP_CONCAT ? (ml_axis)ml_graph_args(inc->g, n)[0] : 0;
    if (increment_unit(p, axis)) {
        int64_t offset = 0;
        for (int k = 0; k < i; k++)
            offset += increment_unit(p, axis) *
                      ml_type_size(ml_graph_type(inc->g, ml_graph_source(inc->g, n, k)), axis);
        return p->lead - offset;
    }
    if (node->source_count == 1 && !increment_mixes(inc, n)) return s->lead;
    if (node->op == ML_OP_CONV) return s->lead;
    return node->op == ML_OP_ATTENTION && !increment_crosses(inc, n) ? 0 : p->lead;
}

/* The op to which a negative lead of n is due: none of its operands have one. */
static ml_ref ahead_since(const increment *inc, ml_ref n) {
    for (bool found = true; found;) {
        found = false;
        for (int i = 0; i < ml_graph_node(inc->g, n)->source_count && !found; i++) {
            ml_ref s = ml_graph_source(inc->g, n, i);
            if (!inc->places[s].fed || inc->places[s].lead >= 0) continue;
            n = s;
            found = true;
        }
    }
    return n;
}

void increment_refuse_ahead(increment *inc, ml_ref n) {
    ml_ref at = ahead_since(inc, n);
    int64_t ahead = -inc->places[at].lead;
    increment_refuse(
        inc, at,
        "a shift to earlier positions pads before: x:pad(\"seq\", 1, 0):slice(\"seq\", "
        "0, n); m.conv has causal = true",
        "%s looks ahead: what it gives at a position of \"%s\" depends on %lld later "
        "%s",
        ml_ops[ml_graph_node(inc->g, at)->op].name, ml_axis_name(inc->g, inc->places[at].axis),
        (long long)ahead, ahead == 1 ? "one" : "ones");
}
