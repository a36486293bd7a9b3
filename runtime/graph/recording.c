#include "runtime/graph/recording.h"

#include <string.h>

#include "runtime/graph/infer.h"

/* One that a repetition replaces: a leaf, or a node that depends on one. Or a node that stays. */
typedef struct {
    bool varies;
    uint32_t at; /* an index of ml_recording.values; or the node */
} operand;

typedef struct {
    ml_op op;
    uint32_t type;
    uint16_t source_count, arg_count;
    int leaf; /* STATE and CONST: whose value the argument is; else -1 */
    const operand *sources;
    const int64_t *args;
} instruction;

struct ml_recording {
    ml_arena *arena;
    graph_log log;
    const ml_leaf *leaves;
    const uint32_t *types; /* by leaf; of a number 0 */
    ML_VEC(instruction) code;
    const operand *results;
    int leaf_count, result_count;
    ml_index places;      /* by node that varies: where it is in `nodes` and `values` */
    ML_VEC(ml_ref) nodes; /* those recorded: leaves, then what `code` makes */
    ml_ref *values;       /* those of a repetition */
    ml_ref *given;        /* its results */
};

/* ---- Recording ------------------------------------------------------------------------------- */

ml_recording *ml_recording_open(ml_graph *g) {
    if (g->log != NULL) return NULL;
    ml_recording *r = ml_alloc(sizeof *r);
    if (r != NULL) r->arena = ml_arena_new();
    if (r == NULL || r->arena == NULL) {
        ml_free(r);
        ml_raise(ML_NO_MEMORY, "out of memory: nodes cannot be recorded");
    }
    r->log.arena = r->places.arena = r->arena;
    g->log = &r->log;
    return r;
}

void ml_recording_end(ml_graph *g, ml_recording *r) {
    if (g->log == &r->log) g->log = NULL;
}

void ml_recording_free(ml_recording *r) {
    if (r == NULL) return;
    ml_arena_free(r->arena);
    ml_free(r);
}

/* ---- Leaves ---------------------------------------------------------------------------------- */

static uint32_t leaf_type(ml_graph *g, const ml_leaf *leaf) {
    switch (leaf->kind) {
    case ML_RECORDED_NODE: return ml_graph_node(g, (ml_ref)leaf->value)->type;
    case ML_RECORDED_STATE:
        return graph_type_index(g, &ml_graph_state(g, (uint32_t)leaf->value)->type);
    case ML_RECORDED_NUMBER: break;
    }
    return 0;
}

/* Programs treat states by their kinds, too. */
static int leaf_kind(const ml_graph *g, const ml_leaf *leaf) {
    enum { KINDS = 4 };
    if (leaf->kind != ML_RECORDED_STATE) return leaf->kind;
    return KINDS + (int)ml_graph_state(g, (uint32_t)leaf->value)->kind;
}

uint64_t ml_leaves_key(ml_graph *g, const ml_leaf *leaves, int count) {
    uint64_t key = (uint64_t)count;
    for (int i = 0; i < count; i++)
        key = ml_mix(key, (uint64_t)leaf_kind(g, &leaves[i]) << 32 | leaf_type(g, &leaves[i]));
    return key;
}

uint64_t ml_type_key(ml_graph *g, const ml_type *type) {
    return graph_type_index(g, type);
}

bool ml_recording_fits(ml_graph *g, const ml_recording *r, const ml_leaf *leaves, int count) {
    if (count != r->leaf_count) return false;
    for (int i = 0; i < count; i++)
        if (leaf_kind(g, &leaves[i]) != leaf_kind(g, &r->leaves[i]) ||
            leaf_type(g, &leaves[i]) != r->types[i])
            return false;
    return true;
}

/* ---- What depends on leaves ------------------------------------------------------------------ */

static uint64_t ref_hash(ml_ref n) {
    return ml_mix(n, 0);
}

static operand find(const ml_recording *r, ml_ref n) {
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&r->places, ref_hash(n), &cursor)) != ML_INDEX_NONE)
        if (r->nodes.at[at] == n) return (operand){true, at};
    return (operand){false, n};
}

static void add_place(ml_recording *r, ml_ref n) {
    uint32_t at = r->nodes.count;
    *ML_PUSH(r->arena, &r->nodes) = n;
    ml_index_add(&r->places, ref_hash(n), at);
}

/* The leaf that a STATE or CONST reads, or -1. */
static int leaf_of(const ml_graph *g, const ml_recording *r, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    const bool state = node->op == ML_OP_STATE;
    if (!state && (node->op != ML_OP_CONST || ml_graph_type(g, n)->dtype != ML_I64)) return -1;
    for (int i = 0; i < r->leaf_count; i++)
        if (r->leaves[i].kind == (state ? ML_RECORDED_STATE : ML_RECORDED_NUMBER) &&
            r->leaves[i].value == ml_graph_args(g, n)[0])
            return i;
    return -1;
}

static bool has_function(const ml_graph *g, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    if (node->flags & (ML_NODE_FUNCTION | ML_NODE_COPY)) return true;
    for (int i = 0; i < node->arg_count; i++)
        if (ml_op_arg_of(node->op, i)->kind == ML_ARG_FUNCTION && ml_graph_args(g, n)[i] != 0)
            return true;
    return false;
}

/* Add what makes n, unless it stays; false where it cannot be made again. A leaf that the code asks
 * for, too, is equal to one of its nodes by chance, as the gradients of two terms of a sum are. */
static bool add_node(const ml_graph *g, ml_recording *r, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    const operand known = find(r, n);
    if (known.varies) return known.at >= (uint32_t)r->leaf_count;
    const int leaf = leaf_of(g, r, n);
    bool varies = leaf >= 0;
    operand *sources = ML_NEW_ARRAY(r->arena, operand, node->source_count + 1);
    for (int i = 0; i < node->source_count; i++) {
        sources[i] = find(r, ml_graph_source(g, n, i));
        varies = varies || sources[i].varies;
    }
    if (!varies) return true;
    if (has_function(g, n)) return false;
    int64_t *args = ML_NEW_ARRAY(r->arena, int64_t, node->arg_count + 1);
    for (int i = 0; i < node->arg_count; i++) args[i] = ml_graph_args(g, n)[i];
    *ML_PUSH(r->arena, &r->code) = (instruction){.op = (ml_op)node->op,
                                                 .type = node->type,
                                                 .source_count = node->source_count,
                                                 .arg_count = node->arg_count,
                                                 .leaf = leaf,
                                                 .sources = sources,
                                                 .args = args};
    add_place(r, n);
    return true;
}

/* Leaves come first. Those that are no nodes get none: what reads them is an instruction. */
static bool add_leaves(ml_graph *g, ml_recording *r, const ml_leaf *leaves, int count) {
    ml_leaf *copies = ML_NEW_ARRAY(r->arena, ml_leaf, count + 1);
    uint32_t *types = ML_NEW_ARRAY(r->arena, uint32_t, count + 1);
    for (int i = 0; i < count; i++) {
        copies[i] = leaves[i];
        types[i] = leaf_type(g, &leaves[i]);
        for (int k = 0; k < i; k++) /* which of them does a node depend on? */
            if (leaves[k].kind == leaves[i].kind && leaves[k].value == leaves[i].value)
                return false;
        add_place(r, leaves[i].kind == ML_RECORDED_NODE ? (ml_ref)leaves[i].value : 0);
    }
    r->leaves = copies;
    r->types = types;
    r->leaf_count = count;
    return true;
}

bool ml_recording_close(ml_graph *g, ml_recording *r, const ml_leaf *leaves, int leaf_count,
                        const ml_ref *results, int result_count) {
    if (!add_leaves(g, r, leaves, leaf_count)) return false;
    for (uint32_t i = 0; i < r->log.nodes.count; i++)
        if (!add_node(g, r, r->log.nodes.at[i])) return false;
    operand *found = ML_NEW_ARRAY(r->arena, operand, result_count + 1);
    for (int i = 0; i < result_count; i++) found[i] = find(r, results[i]);
    r->results = found;
    r->result_count = result_count;
    r->values = ML_NEW_ARRAY(r->arena, ml_ref, r->nodes.count + 1);
    r->given = ML_NEW_ARRAY(r->arena, ml_ref, result_count + 1);
    return true;
}

/* ---- Repeating ------------------------------------------------------------------------------- */

static ml_ref value_of(const ml_recording *r, operand o) {
    return o.varies ? r->values[o.at] : o.at;
}

static ml_ref repeat_one(ml_graph *g, ml_recording *r, const instruction *i,
                         const ml_leaf *leaves) {
    enum { FEW = 16 };
    ml_ref few[FEW], *sources = few;
    if (i->source_count > FEW) sources = ML_NEW_ARRAY(r->arena, ml_ref, i->source_count);
    for (int k = 0; k < i->source_count; k++) sources[k] = value_of(r, i->sources[k]);
    ml_node node = {.op = (uint8_t)i->op,
                    .type = i->type,
                    .source_count = i->source_count,
                    .arg_count = i->arg_count};
    return graph_add_typed(g, &node, sources, i->leaf < 0 ? i->args : &leaves[i->leaf].value);
}

const ml_ref *ml_recording_repeat(ml_graph *g, ml_recording *r, const ml_leaf *leaves) {
    for (int i = 0; i < r->leaf_count; i++)
        r->values[i] = leaves[i].kind == ML_RECORDED_NODE ? (ml_ref)leaves[i].value : 0;
    for (uint32_t i = 0; i < r->code.count; i++)
        r->values[(uint32_t)r->leaf_count + i] = repeat_one(g, r, &r->code.at[i], leaves);
    for (int i = 0; i < r->result_count; i++) r->given[i] = value_of(r, r->results[i]);
    return r->given;
}
