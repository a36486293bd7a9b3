/* The node store: tables shared by a session's graphs, hash-consing, the constructor. */
#include "runtime/graph/graph.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/graph/op_interface.h"

/* Flags that are part of a node's identity. */
enum { IDENTITY = ML_NODE_COPY | ML_NODE_FUNCTION };

static uint64_t hash_text(const char *text, uint64_t seed) {
    return text ? ml_hash(text, strlen(text) + 1, seed) : seed * 31 + 7;
}

static bool same_text(const char *a, const char *b) {
    return a == b || (a && b && strcmp(a, b) == 0);
}

static const char *copy_text(ml_arena *arena, const char *text) {
    return text ? ml_arena_copy(arena, text, strlen(text)) : NULL;
}

/* ---- Tables ---------------------------------------------------------------------------------- */

ml_axis ml_axis_named(ml_graph *g, const char *name) {
    ml_graph_tables *t = g->tables;
    uint64_t hash = hash_text(name, 0);
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&t->axis_index, hash, &cursor)) != ML_INDEX_NONE)
        if (strcmp(t->axes.at[at], name) == 0) return (ml_axis)at;
    if (t->axes.count > UINT16_MAX) ml_raise(ML_INVALID, "more than 65535 axis names");
    const char *copy = copy_text(t->arena, name);
    uint32_t id = t->axes.count;
    *ML_PUSH(t->arena, &t->axes) = copy;
    ml_index_add(&t->axis_index, hash, id);
    return (ml_axis)id;
}

const char *ml_axis_name(const ml_graph *g, ml_axis axis) {
    return axis < g->tables->axes.count ? g->tables->axes.at[axis] : "?";
}

ml_axis ml_axis_fresh(ml_graph *g, const char *stem) {
    int length = (int)strcspn(stem, "'");
    char name[256];
    snprintf(name, sizeof name, "%.*s'%u", length > 200 ? 200 : length, stem, ++g->tables->fresh);
    return ml_axis_named(g, name);
}

/* Unused axis slots are zeroed, so that equal types have equal bytes. */
static uint32_t type_intern(ml_graph *g, const ml_type *type) {
    ml_graph_tables *t = g->tables;
    ml_type clean = {.dtype = type->dtype, .rank = type->rank};
    memcpy(clean.axis, type->axis, sizeof *type->axis * type->rank);
    memcpy(clean.size, type->size, sizeof *type->size * type->rank);
    uint64_t hash = clean.dtype * 16u + clean.rank;
    for (int i = 0; i < clean.rank; i++)
        hash = ml_mix(hash, (uint64_t)clean.size[i] << 16 | clean.axis[i]);
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&t->type_index, hash, &cursor)) != ML_INDEX_NONE)
        if (ml_type_equal(t->types.at[at], &clean)) return at;
    ml_type *copy = ML_NEW(t->arena, ml_type);
    *copy = clean;
    uint32_t id = t->types.count;
    *ML_PUSH(t->arena, &t->types) = copy;
    ml_index_add(&t->type_index, hash, id);
    return id;
}

uint32_t graph_type_index(ml_graph *g, const ml_type *type) {
    return type_intern(g, type);
}

static ml_origin origin_copy(ml_arena *arena, const ml_origin *origin) {
    return (ml_origin){copy_text(arena, origin->file), origin->line,
                       origin->module ? copy_text(arena, origin->module) : "",
                       copy_text(arena, origin->name)};
}

static bool same_origin(const ml_origin *a, const ml_origin *b, const char *module) {
    return a->line == b->line && same_text(a->file, b->file) && same_text(a->module, module) &&
           same_text(a->name, b->name);
}

static uint32_t origin_intern(ml_graph *g, const ml_origin *origin) {
    ml_graph_tables *t = g->tables;
    const char *module = origin->module ? origin->module : "";
    if (t->origins.count && same_origin(t->origins.at[g->origin], origin, module)) return g->origin;
    uint64_t hash = hash_text(origin->file, (uint64_t)origin->line);
    hash = hash_text(origin->name, hash_text(module, hash));
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&t->origin_index, hash, &cursor)) != ML_INDEX_NONE)
        if (same_origin(t->origins.at[at], origin, module)) return at;
    ml_origin *copy = ML_NEW(t->arena, ml_origin);
    *copy = origin_copy(t->arena, origin);
    uint32_t id = t->origins.count;
    *ML_PUSH(t->arena, &t->origins) = copy;
    ml_index_add(&t->origin_index, hash, id);
    return id;
}

static int64_t count_elements(const ml_type *type, const char *what) {
    int64_t count = 1;
    for (int i = 0; i < type->rank; i++) {
        if (type->size[i] > ML_MAX_ELEMENTS / count)
            ml_raise(ML_INVALID, "%s would have more than 2^57 elements", what);
        count *= type->size[i];
    }
    return count;
}

uint32_t ml_graph_add_state(ml_graph *g, const ml_state *state) {
    ml_graph_tables *t = g->tables;
    const char *what = state->kind == ML_STATE_PARAMETER ? "a parameter" : "a state";
    int64_t elements = count_elements(&state->type, what);
    if (elements > ML_MAX_ELEMENTS - t->state_elements)
        ml_raise(ML_INVALID,
                 "all parameters and other states would have more than 2^57 elements together");
    t->state_elements += elements;
    ml_state *copy = ML_NEW(t->arena, ml_state);
    *copy = *state;
    copy->name = copy_text(t->arena, state->name);
    uint64_t *parts = ML_NEW_ARRAY(t->arena, uint64_t, (size_t)state->part_count + 1);
    for (int i = 0; i < state->part_count; i++) parts[i] = state->parts[i];
    copy->parts = parts;
    const uint32_t origin = origin_intern(g, &state->origin);
    copy->origin = *t->origins.at[origin];
    *ML_PUSH(t->arena, &t->states) = copy;
    return t->states.count - 1;
}
ml_state *ml_graph_state(const ml_graph *g, uint32_t id) {
    assert(id < g->tables->states.count);
    return g->tables->states.at[id];
}
uint32_t ml_graph_state_count(const ml_graph *g) {
    return g->tables->states.count;
}

uint32_t ml_graph_add_input(ml_graph *g, const ml_input *input) {
    ml_graph_tables *t = g->tables;
    (void)count_elements(&input->type, "an input");
    ml_input *copy = ML_NEW(t->arena, ml_input);
    *copy = *input;
    copy->name = copy_text(t->arena, input->name);
    *ML_PUSH(t->arena, &t->inputs) = copy;
    return t->inputs.count - 1;
}
const ml_input *ml_graph_input(const ml_graph *g, uint32_t id) {
    assert(id < g->tables->inputs.count);
    return g->tables->inputs.at[id];
}
uint32_t ml_graph_input_count(const ml_graph *g) {
    return g->tables->inputs.count;
}

/* ---- Graphs ---------------------------------------------------------------------------------- */

typedef struct {
    ml_arena *arena;
    ml_graph_tables *shared; /* NULL: make new ones */
    const ml_graph *like;    /* it will be about as large; or NULL */
    ml_graph *made;
} new_request;

static void graph_reserve(ml_graph *g, const ml_graph *like) {
    ML_VEC_RESERVE(g->arena, &g->nodes, like->nodes.count + 1);
    ML_VEC_RESERVE(g->arena, &g->sources, like->sources.count + 1);
    ML_VEC_RESERVE(g->arena, &g->args, like->args.count + 1);
}

static void graph_fill(void *argument) {
    new_request *request = argument;
    ml_arena *arena = request->arena;
    ml_graph *g = ML_NEW(arena, ml_graph);
    g->arena = arena;
    g->owns_tables = !request->shared;
    g->tables = request->shared;
    if (request->like != NULL) graph_reserve(g, request->like);
    if (request->like != NULL) g->expected = request->like->nodes.count;
    ML_PUSH(arena, &g->nodes); /* node 0 is none */
    g->indexed = 1;
    if (g->owns_tables) {
        ml_graph_tables *t = g->tables = ML_NEW(arena, ml_graph_tables);
        t->arena = arena;
        t->axis_index.arena = t->type_index.arena = t->origin_index.arena = arena;
        *ML_PUSH(arena, &t->axes) = "";
        origin_intern(g, &(ml_origin){0}); /* origin 0 is unknown */
    }
    request->made = g;
}

static ml_graph *graph_new(ml_graph_tables *shared, const ml_graph *like) {
    new_request request = {ml_arena_new(), shared, like, NULL};
    if (!request.arena) ml_raise(ML_NO_MEMORY, "out of memory: could not make a graph");
    if (ml_protect(graph_fill, &request) != ML_OK) {
        ml_arena_free(request.arena);
        ml_raise_last();
    }
    return request.made;
}

ml_graph *ml_graph_new(void) {
    return graph_new(NULL, NULL);
}
ml_graph *ml_graph_derive(const ml_graph *parent) {
    return graph_new(parent->tables, NULL);
}
ml_graph *graph_derive_like(const ml_graph *parent, const ml_graph *like) {
    return graph_new(parent->tables, like);
}
void ml_graph_free(ml_graph *g) {
    if (!g) return;
    graph_forget(g);
    ml_arena_free(g->arena);
}
void graph_forget(ml_graph *g) {
    ml_free(g->lists);
    ml_free(g->slots);
    g->lists = NULL;
    g->slots = NULL;
    g->list_count = g->slot_count = g->hashed = 0;
    g->indexed = 1;
}
ml_arena *ml_graph_arena(ml_graph *g) {
    return g->arena;
}
uint32_t ml_graph_count(const ml_graph *g) {
    return g->nodes.count;
}

const ml_origin *ml_graph_origin(const ml_graph *g, ml_ref n) {
    return g->tables->origins.at[ml_graph_node(g, n)->origin];
}

bool ml_graph_constant(const ml_graph *g, ml_ref n, double *value) {
    while (ml_graph_node(g, n)->op == ML_OP_BROADCAST) n = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, n)->op != ML_OP_CONST) return false;
    int64_t bits = ml_graph_args(g, n)[0];
    if (ml_dtypes[ml_graph_type(g, n)->dtype].kind == ML_KIND_FLOAT)
        memcpy(value, &bits, sizeof *value);
    else
        *value = (double)bits;
    return true;
}

int ml_op_outputs(const ml_graph *g, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    int outputs = ml_ops[node->op].outputs;
    if (outputs >= 0) return outputs;
    return ml_op_interface_of((ml_op)node->op)->outputs(g, n);
}

void ml_graph_set_origin(ml_graph *g, const ml_origin *origin) {
    g->origin = origin ? origin_intern(g, origin) : 0;
}
void graph_take_origin(ml_graph *g, const ml_graph *from, ml_ref n) {
    uint32_t origin = ml_graph_node(from, n)->origin;
    g->origin =
        g->tables == from->tables ? origin : origin_intern(g, from->tables->origins.at[origin]);
}
void ml_graph_set_flags(ml_graph *g, uint8_t flags) {
    g->flags = flags;
}
void ml_graph_mark(ml_graph *g, ml_ref n, uint8_t flags) {
    assert(n && n < g->nodes.count && !(flags & IDENTITY));
    g->nodes.at[n].flags |= flags;
}

/* ---- Hash-consing ---------------------------------------------------------------------------- */

static uint64_t node_hash(const ml_node *node, const ml_ref *sources, const int64_t *args) {
    uint64_t hash =
        ml_mix(node->op | (uint64_t)(node->flags & IDENTITY) << 8 | (uint64_t)node->type << 32,
               node->source_count + ((uint32_t)node->arg_count << 16));
    for (int i = 0; i < node->source_count; i++) hash = ml_mix(hash, sources[i]);
    for (int i = 0; i < node->arg_count; i++) hash = ml_mix(hash, (uint64_t)args[i]);
    return hash;
}

static bool node_same(const ml_graph *g, ml_ref n, const ml_node *node, const ml_ref *sources,
                      const int64_t *args) {
    const ml_node *other = &g->nodes.at[n];
    if (other->op != node->op || other->type != node->type ||
        (other->flags & IDENTITY) != (node->flags & IDENTITY) ||
        other->source_count != node->source_count || other->arg_count != node->arg_count)
        return false;
    const ml_ref *other_sources = g->sources.at + other->sources;
    for (int i = 0; i < node->source_count; i++)
        if (other_sources[i] != sources[i]) return false;
    const int64_t *other_args = g->args.at + other->args;
    for (int i = 0; i < node->arg_count; i++)
        if (other_args[i] != args[i]) return false;
    return true;
}

/* Equal nodes have the same newest operand, which few others have for theirs: those are in its
 * list, next to one another in memory as they are in the order of a pass. A table of a million
 * nodes, looked up at random, would miss the cache each time. What is in a list of the most already
 * (the users of a number that each layer reads), or has no operand, is in a hash table: linear
 * probing; the load stays below 2/3. */
struct ml_graph_list {
    ml_ref first; /* whose newest operand is this node; 0: none */
    ml_ref next;  /* in the list that this node is in */
};
struct ml_graph_slot {
    uint32_t hash;
    ml_ref node; /* 0: free */
};
enum { LEAST_SLOTS = 64, LONGEST_LIST = 8 };

/* Where a node is to be looked for, and put. */
typedef struct {
    ml_ref newest;
    bool listed; /* the list of `newest` has room, and an equal node could only be there */
    uint32_t hash;
} node_place;

static ml_ref newest_of(const ml_node *node, const ml_ref *sources) {
    ml_ref newest = 0;
    for (int i = 0; i < node->source_count; i++)
        if (sources[i] > newest) newest = sources[i];
    return newest;
}

static void slot_put(ml_graph *g, uint32_t hash, ml_ref n) {
    uint32_t at = hash & (g->slot_count - 1);
    while (g->slots[at].node != 0) at = (at + 1) & (g->slot_count - 1);
    g->slots[at] = (struct ml_graph_slot){hash, n};
}

/* Room for so many more nodes: in lists of all that there are, and in the table. */
static void index_reserve(ml_graph *g, uint32_t more) {
    uint32_t nodes = g->nodes.count + more, before = g->slot_count;
    if (nodes > g->list_count) {
        uint32_t room = nodes > g->expected ? nodes + nodes / 2 : g->expected + LEAST_SLOTS;
        struct ml_graph_list *lists =
            ml_realloc(g->lists, g->list_count * sizeof *lists, room * sizeof *lists);
        if (!lists) ml_raise(ML_NO_MEMORY, "out of memory: no index of %u nodes", nodes);
        g->lists = lists;
        g->list_count = room;
    }
    if (g->hashed + more < before / 3 * 2) return;
    uint32_t count = before ? before : LEAST_SLOTS;
    while (g->hashed + more >= count / 3 * 2) {
        if (count > UINT32_MAX / 4) ml_raise(ML_NO_MEMORY, "a graph is too large");
        count *= 2;
    }
    struct ml_graph_slot *old = g->slots, *slots = ml_alloc(count * sizeof *slots);
    if (!slots) ml_raise(ML_NO_MEMORY, "out of memory: no index of %u nodes", nodes);
    g->slots = slots;
    g->slot_count = count;
    for (uint32_t i = 0; i < before; i++)
        if (old[i].node != 0) slot_put(g, old[i].hash, old[i].node);
    ml_free(old);
}

/* There must be room. */
static void index_put(ml_graph *g, const node_place *place, ml_ref n) {
    g->indexed = n + 1;
    if (place->listed) {
        g->lists[n].next = g->lists[place->newest].first;
        g->lists[place->newest].first = n;
    } else {
        slot_put(g, place->hash, n);
        g->hashed++;
    }
}

/* Where the node belongs that no other one is equal to. */
static node_place place_new(const ml_graph *g, const ml_node *node, const ml_ref *sources,
                            const int64_t *args) {
    node_place place = {.newest = newest_of(node, sources)};
    int length = 0;
    for (ml_ref n = g->lists[place.newest].first; n && length < LONGEST_LIST; n = g->lists[n].next)
        length++;
    place.listed = place.newest != 0 && length < LONGEST_LIST;
    if (!place.listed) place.hash = (uint32_t)(node_hash(node, sources, args) >> 32);
    return place;
}

/* Passes end with copies of all live nodes; these are indexed when a later pass adds nodes. */
static void index_rest(ml_graph *g) {
    while (g->indexed < g->nodes.count) {
        const ml_node *node = &g->nodes.at[g->indexed];
        index_reserve(g, 1);
        node_place place =
            place_new(g, node, g->sources.at + node->sources, g->args.at + node->args);
        index_put(g, &place, g->indexed);
    }
}

/* The node that is equal, or 0. Afterwards there is room for one more, at `place`. */
static ml_ref find_same(ml_graph *g, const ml_node *node, const ml_ref *sources,
                        const int64_t *args, node_place *place) {
    index_rest(g);
    index_reserve(g, 1);
    *place = (node_place){.newest = newest_of(node, sources)};
    int length = 0;
    for (ml_ref n = g->lists[place->newest].first; n; n = g->lists[n].next, length++)
        if (node_same(g, n, node, sources, args)) return n;
    place->listed = place->newest != 0 && length < LONGEST_LIST;
    if (place->listed) return 0;
    place->hash = (uint32_t)(node_hash(node, sources, args) >> 32);
    for (uint32_t at = place->hash;; at++) {
        const struct ml_graph_slot *slot = &g->slots[at & (g->slot_count - 1)];
        if (slot->node == 0) return 0;
        if (slot->hash == place->hash && node_same(g, slot->node, node, sources, args))
            return slot->node;
    }
}

ml_ref graph_lookup(ml_graph *g, ml_ref n) {
    const ml_node *node = &g->nodes.at[n];
    const ml_ref *sources = g->sources.at + node->sources;
    const int64_t *args = g->args.at + node->args;
    node_place place;
    return find_same(g, node, sources, args, &place);
}

static ml_ref node_append(ml_graph *g, ml_node *node, const ml_ref *sources, const int64_t *args) {
    node->sources = g->sources.count;
    node->args = g->args.count;
    if (g->sources.capacity - g->sources.count < node->source_count)
        for (int i = 0; i < node->source_count; i++) ML_PUSH(g->arena, &g->sources);
    else
        g->sources.count += node->source_count;
    if (g->args.capacity - g->args.count < node->arg_count)
        for (int i = 0; i < node->arg_count; i++) ML_PUSH(g->arena, &g->args);
    else
        g->args.count += node->arg_count;
    for (int i = 0; i < node->source_count; i++) g->sources.at[node->sources + i] = sources[i];
    for (int i = 0; i < node->arg_count; i++) g->args.at[node->args + i] = args[i];
    ml_ref n = g->nodes.count;
    *ML_PUSH(g->arena, &g->nodes) = *node;
    return n;
}

/* The table is filled last: when memory runs out on the way, the graph stays valid. */
static ml_ref node_intern(ml_graph *g, ml_node *node, const ml_ref *sources, const int64_t *args) {
    node_place place;
    ml_ref found = find_same(g, node, sources, args, &place);
    if (found) { /* wanted in the forward pass as well: it is no longer of the backward one alone */
        if (g->log) *ML_PUSH(g->log->arena, &g->log->nodes) = found;
        g->nodes.at[found].flags |= node->flags & (ML_NODE_GRADIENT | ML_NODE_FP8);
        if (!(node->flags & ML_NODE_BACKWARD))
            g->nodes.at[found].flags &= (uint8_t)~ML_NODE_BACKWARD;
        return found;
    }
    ml_ref n = node_append(g, node, sources, args);
    index_put(g, &place, n);
    if (g->log) *ML_PUSH(g->log->arena, &g->log->nodes) = n;
    return n;
}

/* ---- The constructor ------------------------------------------------------------------------- */

void graph_check_shape(const infer *in) {
    const ml_op_info *info = &ml_ops[in->op];
    bool more = (in->op == ML_OP_RANDOM && in->source_count == 2) ||
                (in->op == ML_OP_DOT && in->source_count == 3);
    if (info->sources >= 0 && in->source_count != info->sources && !more)
        ml_raise(ML_INTERNAL, "%s takes %d operands, not %d", info->name, info->sources,
                 in->source_count);
    for (int i = 0; i < in->source_count; i++)
        if (!in->sources[i] || in->sources[i] >= in->g->nodes.count)
            ml_raise(ML_INTERNAL, "operand %d of %s is no node", i, info->name);
    int wanted = ml_op_arg_count(in->op);
    ml_arg_kind end = info->args[wanted].kind;
    if (end == ML_ARG_MORE             ? in->arg_count < wanted - 1
        : wanted && end == ML_ARG_MANY ? in->arg_count % wanted != 0
                                       : in->arg_count != wanted)
        ml_raise(ML_INTERNAL, "%s has %d arguments, not %d", info->name, wanted, in->arg_count);
    for (int i = 0; i < in->arg_count; i++) {
        ml_arg_kind kind = ml_op_arg_of(in->op, i)->kind;
        bool needed = ml_arg_is_axis(kind);
        if ((needed || kind == ML_ARG_AXIS_OR_0) &&
            (in->args[i] < needed || in->args[i] >= in->g->tables->axes.count))
            ml_raise(ML_INTERNAL, "argument %d of %s is no axis", i, info->name);
    }
}

enum { FEW = 16 };

ml_ref ml_graph_add(ml_graph *g, ml_op op, const ml_ref *sources, int source_count,
                    const int64_t *args, int arg_count, const ml_type *type) {
    ml_ref few_sources[FEW];
    int64_t few_args[FEW];
    if (source_count > UINT16_MAX || arg_count > UINT16_MAX)
        ml_raise(ML_INVALID, "%s has too many operands", ml_ops[op].name);
    infer in = {g, op, few_sources, source_count, few_args, arg_count, type, false};
    if (source_count > FEW) in.sources = ML_NEW_ARRAY(g->arena, ml_ref, source_count);
    if (arg_count > FEW) in.args = ML_NEW_ARRAY(g->arena, int64_t, arg_count);
    if (source_count) memcpy(in.sources, sources, sizeof *sources * (size_t)source_count);
    if (arg_count) memcpy(in.args, args, sizeof *args * (size_t)arg_count);
    graph_check_shape(&in);
    ml_type result = {0};
    infer_type(&in, &result);
    ml_node node = {.op = (uint8_t)op,
                    .flags = g->flags,
                    .source_count = (uint16_t)source_count,
                    .arg_count = (uint16_t)arg_count,
                    .type = type_intern(g, &result),
                    .origin = g->origin};
    return node_intern(g, &node, in.sources, in.args);
}

ml_ref graph_add_typed(ml_graph *g, const ml_node *node, const ml_ref *sources,
                       const int64_t *args) {
    ml_node added = *node;
    added.flags = g->flags;
    added.origin = g->origin;
    return node_intern(g, &added, sources, args);
}

/* ---- Copying --------------------------------------------------------------------------------- */

static ml_axis map_axis(ml_graph *g, const ml_graph *from, int64_t axis) {
    if (g->tables == from->tables || !axis) return (ml_axis)axis;
    return ml_axis_named(g, ml_axis_name(from, (ml_axis)axis));
}

static uint32_t map_type(ml_graph *g, const ml_graph *from, uint32_t type) {
    if (g->tables == from->tables) return type;
    ml_type mapped = *from->tables->types.at[type];
    for (int i = 0; i < mapped.rank; i++) mapped.axis[i] = map_axis(g, from, mapped.axis[i]);
    return type_intern(g, &mapped);
}

static void copy_args(ml_graph *g, const ml_graph *from, ml_ref n, int64_t *args) {
    const ml_node *node = ml_graph_node(from, n);
    const int64_t *old = ml_graph_args(from, n);
    if (g->tables == from->tables && !graph_has_function((ml_op)node->op)) {
        for (int i = 0; i < node->arg_count; i++) args[i] = old[i];
        return;
    }
    for (int i = 0; i < node->arg_count; i++) {
        ml_arg_kind kind = ml_op_arg_of(node->op, i)->kind;
        if (kind == ML_ARG_FUNCTION)
            args[i] = (int64_t)graph_copy_function(g, from, (ml_ref)old[i]);
        else
            args[i] = ml_arg_is_axis(kind) || kind == ML_ARG_AXIS_OR_0 ? map_axis(g, from, old[i])
                                                                       : old[i];
    }
}

ml_ref graph_copy_node(ml_graph *g, const ml_graph *from, ml_ref n, const ml_ref *sources,
                       uint8_t set, uint8_t clear) {
    ml_node node = *ml_graph_node(from, n);
    if (g->tables != from->tables && (node.op == ML_OP_STATE || node.op == ML_OP_INPUT))
        ml_raise(ML_INTERNAL, "a %s cannot be copied between sessions", ml_ops[node.op].name);
    int64_t few[FEW];
    int64_t *args = node.arg_count > FEW ? ML_NEW_ARRAY(g->arena, int64_t, node.arg_count) : few;
    copy_args(g, from, n, args);
    node.type = map_type(g, from, node.type);
    node.flags = (uint8_t)((node.flags | set) & ~clear);
    if (g->tables != from->tables)
        node.origin = origin_intern(g, from->tables->origins.at[node.origin]);
    return node_intern(g, &node, sources, args);
}

ml_ref graph_append_placed(ml_graph *g, const ml_graph *from, ml_ref n, const ml_ref *sources,
                           graph_place *place, void *context) {
    assert(g->tables == from->tables);
    ml_node node = *ml_graph_node(from, n);
    const int64_t *old = ml_graph_args(from, n);
    int64_t few[FEW];
    int64_t *args = node.arg_count > FEW ? ML_NEW_ARRAY(g->arena, int64_t, node.arg_count) : few;
    if (place == NULL) copy_args(g, from, n, args);
    for (int i = 0; place != NULL && i < node.arg_count; i++) {
        const bool function = ml_op_arg_of(node.op, i)->kind == ML_ARG_FUNCTION;
        args[i] = function && old[i] ? (int64_t)place(context, (ml_ref)old[i]) : old[i];
    }
    return node_append(g, &node, sources, args);
}

ml_ref graph_append(ml_graph *g, const ml_graph *from, ml_ref n, const ml_ref *sources) {
    return graph_append_placed(g, from, n, sources, NULL, NULL);
}

ml_ref ml_graph_copy(ml_graph *g, const ml_graph *from, ml_ref n, const ml_ref *sources) {
    return graph_copy_node(g, from, n, sources, 0, 0);
}
