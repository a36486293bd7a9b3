/* Copying parts of graphs: what roots reach, functions, inlining. */
#include <assert.h>
#include <string.h>

#include "runtime/graph/infer.h"

static uint64_t ref_hash(ml_ref n) {
    return n * 0x9E3779B97F4A7C15u;
}

static uint32_t ref_position(const ml_index *index, ml_ref n) {
    uint32_t cursor = 0;
    return ml_index_next(index, ref_hash(n), &cursor);
}

void graph_sort(ml_refs *refs) {
    /* Shell sort: functions are small, and the order of discovery is nearly sorted. */
    for (uint32_t gap = refs->count / 2; gap; gap /= 2)
        for (uint32_t i = gap; i < refs->count; i++) {
            ml_ref moving = refs->at[i];
            uint32_t j = i;
            for (; j >= gap && refs->at[j - gap] > moving; j -= gap)
                refs->at[j] = refs->at[j - gap];
            refs->at[j] = moving;
        }
}

void graph_reach(const ml_graph *g, ml_ref root, ml_arena *arena, ml_refs *out) {
    ml_index seen = {.arena = arena};
    *ML_PUSH(arena, out) = root;
    ml_index_add(&seen, ref_hash(root), 0);
    for (uint32_t next = 0; next < out->count; next++) {
        ml_ref n = out->at[next];
        for (int i = 0; i < ml_graph_node(g, n)->source_count; i++) {
            ml_ref source = ml_graph_source(g, n, i);
            if (ref_position(&seen, source) != ML_INDEX_NONE) continue;
            ml_index_add(&seen, ref_hash(source), out->count);
            *ML_PUSH(arena, out) = source;
        }
    }
    graph_sort(out);
}

/* Copies for the nodes of `body`, in order; node(context, n, sources) makes each. */
typedef ml_ref copy_one(void *context, ml_ref n, const ml_ref *sources);

static ml_ref copy_body(ml_graph *g, const ml_graph *from, ml_ref root, copy_one *copy,
                        void *context) {
    ml_arena *arena = ml_graph_arena(g);
    ml_refs body = {0};
    graph_reach(from, root, arena, &body);
    ml_ref *copies = ML_NEW_ARRAY(arena, ml_ref, body.count);
    ml_index positions = {.arena = arena};
    for (uint32_t i = 0; i < body.count; i++) {
        ml_ref n = body.at[i], few[16];
        int count = ml_graph_node(from, n)->source_count;
        ml_ref *sources = count > 16 ? ML_NEW_ARRAY(arena, ml_ref, count) : few;
        for (int s = 0; s < count; s++)
            sources[s] = copies[ref_position(&positions, ml_graph_source(from, n, s))];
        copies[i] = copy(context, n, sources);
        ml_index_add(&positions, ref_hash(n), i);
    }
    return copies[body.count - 1];
}

typedef struct {
    ml_graph *g;
    const ml_graph *from;
    const ml_ref *values;
    int count;
    const ml_axis *axis; /* two, and where their indices begin; or NULL */
    const ml_ref *start;
} copy_context;

static ml_ref copy_function_node(void *context, ml_ref n, const ml_ref *sources) {
    copy_context *c = context;
    return graph_copy_node(c->g, c->from, n, sources, ML_NODE_FUNCTION, 0);
}

ml_ref graph_copy_function(ml_graph *g, const ml_graph *from, ml_ref root) {
    if (!root || (g == from && (ml_graph_node(g, root)->flags & ML_NODE_FUNCTION))) return root;
    copy_context context = {.g = g, .from = from};
    return copy_body(g, from, root, copy_function_node, &context);
}

static ml_ref copy_plain_node(void *context, ml_ref n, const ml_ref *sources) {
    copy_context *c = context;
    return graph_copy_node(c->g, c->from, n, sources, 0, ML_NODE_FUNCTION);
}

ml_ref graph_copy_plain(ml_graph *g, const ml_graph *from, ml_ref root) {
    copy_context context = {.g = g, .from = from};
    return copy_body(g, from, root, copy_plain_node, &context);
}

/* A value may have its axes in another order than the parameter: types are inferred anew. */
static ml_ref inline_node(void *context, ml_ref n, const ml_ref *sources) {
    copy_context *c = context;
    const ml_node *node = ml_graph_node(c->g, n);
    if (node->op != ML_OP_PARAM) {
        ml_ref copy = ml_graph_add(c->g, node->op, sources, node->source_count,
                                   ml_graph_args(c->g, n), node->arg_count, ml_graph_type(c->g, n));
        for (int i = 0; node->op == ML_OP_IOTA && c->axis && i < 2; i++)
            if (c->start[i] && ml_graph_args(c->g, n)[0] == c->axis[i])
                return ml_map2(c->g, ML_OP_ADD, copy, c->start[i]);
        return copy;
    }
    int64_t index = ml_graph_args(c->g, n)[0];
    if (index < 0 || index >= c->count)
        ml_raise(ML_INTERNAL, "a function reads parameter %lld of %d", (long long)index, c->count);
    return c->values[index];
}

ml_ref ml_graph_inline(ml_graph *g, ml_ref root, const ml_ref *values, int count) {
    return graph_inline_placed(g, root, values, count, NULL, NULL);
}

ml_ref graph_inline_placed(ml_graph *g, ml_ref root, const ml_ref *values, int count,
                           const ml_axis axis[2], const ml_ref start[2]) {
    copy_context context = {g, g, values, count, axis, start};
    return copy_body(g, g, root, inline_node, &context);
}

static void mark_root(uint8_t *wanted, const ml_graph *from, ml_ref n) {
    assert(n && n < ml_graph_count(from));
    (void)from;
    wanted[n] = 1;
}

static _Noreturn void refuse_parameter(ml_ref n) {
    ml_fail(ML_INVALID, "a tensor of a scan's step is used outside of it");
    ml_error_last()->operands[0] = n;
    ml_error_last()->operand_count = 1;
    ml_help("return it from the step: scan gives it for all positions");
    ml_raise_last();
}

/* Sources come before their users: one walk down marks all, one walk up copies. */
static void copy_wanted(ml_graph *g, const ml_graph *from, bool step, uint8_t *wanted,
                        ml_ref *copies) {
    uint32_t count = ml_graph_count(from);
    for (ml_ref n = count - 1; n > 0; n--) {
        if (!wanted[n]) continue;
        if (!step && ml_graph_node(from, n)->op == ML_OP_PARAM) refuse_parameter(n);
        const ml_ref *sources = ml_graph_sources(from, n);
        for (int i = 0; i < ml_graph_node(from, n)->source_count; i++) wanted[sources[i]] = 1;
    }
    for (ml_ref n = 1; n < count; n++) {
        if (!wanted[n]) continue;
        int source_count = ml_graph_node(from, n)->source_count;
        const ml_ref *old = ml_graph_sources(from, n);
        ml_ref few[16];
        ml_ref *sources =
            source_count > 16 ? ML_NEW_ARRAY(ml_graph_arena(g), ml_ref, source_count) : few;
        for (int i = 0; i < source_count; i++) sources[i] = copies[old[i]];
        copies[n] = graph_append(g, from, n, sources); /* g was empty, and all are different */
    }
}

typedef struct {
    ml_graph *g;
    const ml_graph *from;
    ml_roots *roots;
    uint8_t *wanted;
    ml_ref *copies;
} extraction;

static void extract_body(void *argument) {
    extraction *e = argument;
    ml_roots *roots = e->roots;
    for (int i = 0; i < roots->output_count; i++) mark_root(e->wanted, e->from, roots->outputs[i]);
    for (int i = 0; i < roots->update_count; i++)
        mark_root(e->wanted, e->from, roots->updates[i].value);
    copy_wanted(e->g, e->from, roots->step, e->wanted, e->copies);
}

ml_graph *ml_graph_extract(const ml_graph *from, ml_roots *roots) {
    uint32_t count = ml_graph_count(from);
    extraction e = {ml_graph_derive(from), from, roots, NULL, NULL};
    e.wanted = ml_alloc(count);
    e.copies = ml_alloc(sizeof *e.copies * count);
    ml_status status = ML_NO_MEMORY;
    if (!e.wanted || !e.copies)
        ml_fail(ML_NO_MEMORY, "out of memory: could not copy a graph of %u nodes", count);
    else
        status = ml_protect(extract_body, &e);
    if (status == ML_OK) {
        for (int i = 0; i < roots->output_count; i++)
            roots->outputs[i] = e.copies[roots->outputs[i]];
        for (int i = 0; i < roots->update_count; i++)
            roots->updates[i].value = e.copies[roots->updates[i].value];
    }
    ml_free(e.wanted);
    ml_free(e.copies);
    if (status == ML_OK) return e.g;
    ml_graph_free(e.g);
    ml_raise_last();
}
