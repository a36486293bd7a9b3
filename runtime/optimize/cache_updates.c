/* Updates of the parameter cache by the program that sets parameters (cache_updates.h). Where some
 * values that lie side by side are of parameters that it does not set, such as frozen weights above
 * their adapters, it writes the others alone, where they are one piece of memory. */
#include "runtime/optimize/cache_updates.h"

enum { ALIGNMENT = 256 }; /* of what kernels take for a storage */

typedef struct {
    bool set, kept; /* it reads states that are set, or others */
    bool exchanged; /* by collectives */
} reads;

static reads reads_of(const ml_graph *g, ml_ref n, const bool *set) {
    const ml_node *node = ml_graph_node(g, n);
    reads all = {.exchanged = ml_ops[node->op].op_class == ML_CLASS_COLLECTIVE};
    if (node->op == ML_OP_STATE) {
        all.set = set[ml_graph_args(g, n)[0]];
        all.kept = !all.set;
    }
    for (int i = 0; i < node->source_count; i++) {
        const reads source = reads_of(g, ml_graph_source(g, n, i), set);
        all.set |= source.set;
        all.kept |= source.kept;
        all.exchanged |= source.exchanged;
    }
    return all;
}

/* The elements of a CONCAT's source. */
static int64_t part_elements(const ml_graph *g, ml_ref n, int i) {
    return ml_type_elements(ml_graph_type(g, ml_graph_source(g, n, i)));
}

/* Whether each part of n that is of parameters that are set is one piece of memory, and of no
 * others. */
static bool in_pieces(const ml_graph *g, ml_ref n, const bool *set) {
    const ml_node *node = ml_graph_node(g, n);
    const ml_type *type = ml_graph_type(g, n);
    int64_t bytes = 0;
    if (node->op != ML_OP_CONCAT) return false;
    for (int i = 0; type->axis[i] != (ml_axis)ml_graph_args(g, n)[0]; i++)
        if (type->size[i] != 1) return false;
    for (int i = 0; i < node->source_count; i++) {
        const reads part = reads_of(g, ml_graph_source(g, n, i), set);
        if (part.set && (part.kept || bytes % ALIGNMENT != 0)) return false;
        bytes += part_elements(g, n, i) * ml_dtypes[type->dtype].bytes;
    }
    return true;
}

cache_class cache_class_of(const ml_graph *g, ml_ref value, const bool *set) {
    const reads all = reads_of(g, value, set);
    if (!all.set) return CACHE_KEPT;
    if (all.exchanged) return CACHE_REBUILT;
    return !all.kept || in_pieces(g, value, set) ? CACHE_WRITTEN : CACHE_REBUILT;
}

/* The same computed from new values. */
static ml_ref renew(cache_updates *c, const ml_graph *g, ml_ref n, ml_ref *renewed) {
    ml_graph *to = c->plan->graph;
    const ml_node *node = ml_graph_node(g, n);
    const uint32_t state = node->op == ML_OP_STATE ? (uint32_t)ml_graph_args(g, n)[0] : 0;
    if (node->op == ML_OP_STATE && c->set[state]) return c->new_value[state];
    if (g == to && node->source_count == 0) return n;
    if (renewed[n] != 0) return renewed[n];
    const int count = node->source_count;
    ml_ref *sources = ML_NEW_ARRAY(c->scratch, ml_ref, (size_t)count + 1);
    for (int i = 0; i < count; i++) sources[i] = renew(c, g, ml_graph_source(g, n, i), renewed);
    if (count > 0) ml_graph_set_origin(to, ml_graph_origin(to, sources[0]));
    return renewed[n] = ml_graph_copy(to, g, n, sources);
}

static void mark_sources(cache_updates *c, const ml_graph *g, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    if (node->op == ML_OP_STATE) {
        const uint32_t state = (uint32_t)ml_graph_args(g, n)[0];
        c->source[state] = c->source[state] || !c->set[state];
    }
    for (int i = 0; i < node->source_count; i++) mark_sources(c, g, ml_graph_source(g, n, i));
}

void cache_updates_add(cache_updates *c, const ml_graph *g, const ml_update *cached,
                       ml_ref *renewed) {
    const ml_ref n = cached->value;
    const reads all = reads_of(g, n, c->set);
    ml_update update = {.state = cached->state};
    if (!all.set || c->listed[cached->state]) return;
    c->listed[cached->state] = true;
    if (!all.kept || !in_pieces(g, n, c->set)) {
        update.value = renew(c, g, n, renewed);
        *ML_PUSH(c->scratch, &c->list) = update;
        return;
    }
    update.part = true;
    for (int i = 0; i < ml_graph_node(g, n)->source_count; i++) {
        const ml_ref part = ml_graph_source(g, n, i);
        if (reads_of(g, part, c->set).set) {
            update.value = renew(c, g, part, renewed);
            *ML_PUSH(c->scratch, &c->list) = update;
        }
        update.start += part_elements(g, n, i);
    }
    mark_sources(c, g, n);
}

/* Whether the states of n that are set have the parts there that their new values are of. */
static bool fits(const cache_updates *c, const ml_graph *g, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    const uint32_t state = node->op == ML_OP_STATE ? (uint32_t)ml_graph_args(g, n)[0] : 0;
    if (node->op == ML_OP_STATE && c->set[state])
        return ml_type_equal(ml_graph_type(g, n),
                             ml_graph_type(c->plan->graph, c->new_value[state]));
    for (int i = 0; i < node->source_count; i++)
        if (!fits(c, g, ml_graph_source(g, n, i))) return false;
    return true;
}

void cache_updates_of(cache_updates *c, const ml_plan *microbatch) {
    for (const ml_plan *r = microbatch->rebuild; r != NULL; r = r->next) {
        ml_ref *renewed = ML_NEW_ARRAY(c->scratch, ml_ref, ml_graph_count(r->graph));
        for (int i = 0; i < r->roots.update_count; i++) {
            const ml_update *cached = &r->roots.updates[i];
            if (cache_class_of(r->graph, cached->value, c->set) == CACHE_WRITTEN &&
                fits(c, r->graph, cached->value))
                cache_updates_add(c, r->graph, cached, renewed);
        }
    }
}
