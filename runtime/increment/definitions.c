/* Attention that CACHED_ATTENTION does not serve, by its definition: with keys that no position
 * gives, with axes beside heads and head_dim, with masks that a score function writes. Its sums
 * over keys are contractions. */
#include "runtime/increment/internal.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/recurrence/recurrence.h"

static bool has_further_axes(const ml_type *q, const ml_attention_args *a) {
    for (int i = 0; i < q->rank; i++) {
        ml_axis axis = q->axis[i];
        if (q->size[i] > 1 && axis != a->seq && axis != a->heads && axis != a->head_dim)
            return true;
    }
    return false;
}

typedef struct {
    increment *inc;
    bool *fed;        /* by node: it depends on the tokens */
    ml_ref *copies;   /* by node */
    ml_ref **outputs; /* by attention that is replaced */
} copier;

/* Attention to keys that no token gives mixes no positions (given.c). */
static bool is_replaced(const copier *c, ml_ref n) {
    const ml_graph *g = c->inc->g;
    ml_attention_args a;
    if (ml_graph_node(g, n)->op != ML_OP_ATTENTION) return false;
    const ml_ref *s = ml_graph_sources(g, n);
    if (!c->fed[s[1]] && !c->fed[s[2]]) return false;
    ml_attention_read(g, n, &a);
    const ml_type *q = ml_graph_type(g, ml_graph_source(g, n, 0));
    const ml_type *k = ml_graph_type(g, ml_graph_source(g, n, 1));
    if (has_further_axes(q, &a) || (!a.causal && a.score)) return true;
    return ml_type_size(k, a.kv_seq) > ml_type_size(q, a.seq);
}

static void mark_live(const ml_graph *g, ml_ref root, bool *live) {
    live[root] = true;
    for (ml_ref n = root; n > 0; n--)
        for (int i = 0; live[n] && i < ml_graph_node(g, n)->source_count; i++)
            live[ml_graph_source(g, n, i)] = true;
}

static void mark_fed(const increment *inc, ml_ref root, bool *fed) {
    for (ml_ref n = 1; n <= root; n++) {
        fed[n] = n == inc->in->tokens;
        for (int i = 0; !fed[n] && i < ml_graph_node(inc->g, n)->source_count; i++)
            fed[n] = fed[ml_graph_source(inc->g, n, i)];
    }
}

static void replace(copier *c, ml_ref n, const ml_ref *sources) {
    ml_graph *g = c->inc->g;
    ml_graph_set_origin(g, ml_graph_origin(g, n));
    ml_ref copy = ml_graph_copy(g, g, n, sources);
    ml_ref first = ml_graph_count(g);
    c->outputs[n] = ML_NEW_ARRAY(c->inc->arena, ml_ref, ML_MAX_OUTPUTS);
    ml_attention_decompose(g, copy, c->outputs[n]);
    c->copies[n] = c->outputs[n][0];
    *ML_PUSH(c->inc->arena, &c->inc->definitions) = (definition){copy, first, ml_graph_count(g)};
}

static void copy_node(copier *c, ml_ref n) {
    ml_graph *g = c->inc->g;
    const ml_node node = *ml_graph_node(g, n);
    ml_ref *sources = ML_NEW_ARRAY(c->inc->arena, ml_ref, node.source_count + 1);
    bool same = true;
    for (int i = 0; i < node.source_count; i++) {
        ml_ref s = ml_graph_source(g, n, i);
        sources[i] = c->copies[s];
        same &= sources[i] == s;
    }
    if (node.op == ML_OP_OUT && c->outputs[ml_graph_source(g, n, 0)])
        c->copies[n] = c->outputs[ml_graph_source(g, n, 0)][ml_graph_args(g, n)[0]];
    else if (is_replaced(c, n))
        replace(c, n, sources);
    else
        c->copies[n] = same ? n : ml_graph_copy(g, g, n, sources);
}

ml_ref increment_with_definitions(increment *inc, ml_ref logits) {
    logits = ml_recurrence_whole(inc->g, logits);
    bool *live = ML_NEW_ARRAY(inc->arena, bool, logits + 1), any = false;
    mark_live(inc->g, logits, live);
    copier c = {.inc = inc, .fed = ML_NEW_ARRAY(inc->arena, bool, logits + 1)};
    mark_fed(inc, logits, c.fed);
    for (ml_ref n = 1; n <= logits && !any; n++) any = live[n] && is_replaced(&c, n);
    if (!any) return logits;
    c.copies = ML_NEW_ARRAY(inc->arena, ml_ref, logits + 1);
    c.outputs = ML_NEW_ARRAY(inc->arena, ml_ref *, logits + 1);
    for (ml_ref n = 1; n <= logits; n++)
        if (live[n]) copy_node(&c, n);
    return c.copies[logits];
}

ml_ref increment_defines(const increment *inc, ml_ref n) {
    for (uint32_t i = 0; i < inc->definitions.count; i++) {
        const definition *d = &inc->definitions.at[i];
        if (n >= d->first && n < d->end) return d->attention;
    }
    return 0;
}
