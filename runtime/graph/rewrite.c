/* The frame of every pass (rewrite.h). */
#include "runtime/graph/rewrite.h"

#include "runtime/graph/infer.h"

typedef struct {
    rewrite rewrite;
    ml_roots *roots;
    void (*begin)(rewrite *r);
    rewrite_rule *rule;
    ml_graph *result;
} run;

static void count_users(rewrite *r) {
    r->users = ML_NEW_ARRAY(r->scratch, uint32_t, r->count);
    for (int i = 0; i < r->roots->output_count; i++) r->users[r->roots->outputs[i]]++;
    for (int i = 0; i < r->roots->update_count; i++) r->users[r->roots->updates[i].value]++;
    for (ml_ref node = r->count; node-- > 1;) {
        if (!r->users[node]) continue;
        int count = ml_graph_node(r->from, node)->source_count;
        for (int i = 0; i < count; i++) r->users[ml_graph_source(r->from, node, i)]++;
    }
}

ml_ref rewrite_copy(rewrite *r, ml_ref node, const ml_ref *sources) {
    return ml_graph_copy(r->to, r->from, node, sources);
}

ml_ref rewrite_copy_again(rewrite *r, ml_ref node, const ml_ref *sources) {
    return graph_copy_node(r->to, r->from, node, sources, ML_NODE_BACKWARD | ML_NODE_COPY, 0);
}

static ml_ref rewritten(run *p, ml_ref node) {
    rewrite *r = &p->rewrite;
    const ml_node *n = ml_graph_node(r->from, node);
    if (n->op == ML_OP_OUT) {
        const ml_ref *outputs = r->outputs[ml_graph_source(r->from, node, 0)];
        if (outputs) return outputs[ml_graph_args(r->from, node)[0]];
    }
    ml_ref few[8], *sources = few;
    if (n->source_count > 8) sources = ML_NEW_ARRAY(r->scratch, ml_ref, n->source_count);
    for (int i = 0; i < n->source_count; i++)
        sources[i] = r->map[ml_graph_source(r->from, node, i)];
    graph_take_origin(r->to, r->from, node);
    ml_graph_set_flags(r->to, n->flags & (uint8_t)~ML_NODE_GRADIENT);
    ml_ref made = p->rule(r, node, sources);
    if (n->flags & ML_NODE_GRADIENT) ml_graph_mark(r->to, made, ML_NODE_GRADIENT);
    return made;
}

static void map_roots(const ml_roots *roots, const ml_ref *map, ml_arena *arena, ml_roots *out) {
    *out = *roots;
    out->outputs = ML_NEW_ARRAY(arena, ml_ref, roots->output_count + 1);
    out->updates = ML_NEW_ARRAY(arena, ml_update, roots->update_count + 1);
    for (int i = 0; i < roots->output_count; i++) out->outputs[i] = map[roots->outputs[i]];
    for (int i = 0; i < roots->update_count; i++) {
        out->updates[i] = roots->updates[i];
        out->updates[i].value = map[roots->updates[i].value];
    }
}

static void take_roots(run *p, const ml_roots *roots) {
    for (int i = 0; i < roots->output_count; i++) p->roots->outputs[i] = roots->outputs[i];
    for (int i = 0; i < roots->update_count; i++) p->roots->updates[i] = roots->updates[i];
}

static bool all_used(const rewrite *r) {
    for (ml_ref node = 1; node < r->count; node++)
        if (!r->users[node]) return false;
    return true;
}

/* Copy the live part of p->rewrite.to into a graph of its own. Its nodes are different, and so are
 * their copies. Where all is live, it is the result itself. */
static void keep_live(run *p, ml_roots *roots) {
    rewrite live = {.from = p->rewrite.to, .scratch = p->rewrite.scratch, .roots = roots};
    live.count = ml_graph_count(live.from);
    count_users(&live);
    if (all_used(&live)) {
        p->result = p->rewrite.to;
        p->rewrite.to = NULL;
        graph_forget(p->result);
        take_roots(p, roots);
        return;
    }
    live.map = ML_NEW_ARRAY(live.scratch, ml_ref, live.count);
    p->result = live.to = graph_derive_like(live.from, live.from);
    for (ml_ref node = 1; node < live.count; node++) {
        if (!live.users[node]) continue;
        const ml_node *n = ml_graph_node(live.from, node);
        ml_ref few[8], *sources = few;
        if (n->source_count > 8) sources = ML_NEW_ARRAY(live.scratch, ml_ref, n->source_count);
        for (int i = 0; i < n->source_count; i++)
            sources[i] = live.map[ml_graph_source(live.from, node, i)];
        live.map[node] = graph_append(live.to, live.from, node, sources);
    }
    ml_roots mapped;
    map_roots(roots, live.map, live.scratch, &mapped);
    take_roots(p, &mapped);
}

static void body(void *argument) {
    run *p = argument;
    rewrite *r = &p->rewrite;
    r->count = ml_graph_count(r->from);
    count_users(r);
    r->map = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    r->outputs = ML_NEW_ARRAY(r->scratch, ml_ref *, r->count);
    r->to = graph_derive_like(r->from, r->from);
    if (p->begin) p->begin(r);
    for (uint32_t i = 0; r->order && i < r->order_count; i++)
        r->map[r->order[i]] = rewritten(p, r->order[i]);
    for (ml_ref node = 1; !r->order && node < r->count; node++)
        if (r->users[node]) r->map[node] = rewritten(p, node);
    ml_roots roots;
    map_roots(r->roots, r->map, r->scratch, &roots);
    keep_live(p, &roots);
}

ml_graph *rewrite_run(const ml_graph *from, ml_roots *roots, void (*begin)(rewrite *r),
                      rewrite_rule *rule, void *context) {
    run p = {.roots = roots, .begin = begin, .rule = rule};
    p.rewrite =
        (rewrite){.from = from, .roots = roots, .scratch = ml_arena_new(), .context = context};
    if (!p.rewrite.scratch) ml_raise(ML_NO_MEMORY, "no memory left for a pass over the program");
    ml_status status = ml_protect(body, &p);
    if (p.rewrite.to) ml_graph_free(p.rewrite.to);
    ml_arena_free(p.rewrite.scratch);
    if (status != ML_OK) {
        if (p.result) ml_graph_free(p.result);
        ml_raise_last();
    }
    return p.result;
}
