/* The layers of a model and their members: found by module paths, assigned to stages by cost
 * (stage.h). */
#include <string.h>

#include "runtime/base/machine.h"
#include "runtime/pipeline/stage_internal.h"

/* ---- Lists ----------------------------------------------------------------------------------- */

typedef struct {
    const char *path; /* the first `length` characters are the list's */
    int length, layers;
} list;
typedef struct {
    ml_arena *arena;
    const char *requested; /* NULL: any */
    ML_VEC(list) lists;
} lists;

static void note_path(lists *all, const char *path) {
    int length = stage_path_list(path), layers = length ? stage_path_number(path + length + 1) : 0;
    if (all->requested) {
        const char *within;
        int layer = stage_path_layer(all->requested, path, &within);
        if (layer >= 0) path = all->requested, length = (int)strlen(path), layers = layer + 1;
    }
    if (!length) return;
    for (uint32_t i = 0; i < all->lists.count; i++) {
        list *l = &all->lists.at[i];
        if (l->length != length || strncmp(l->path, path, (size_t)length) != 0) continue;
        if (layers > l->layers) l->layers = layers;
        return;
    }
    *ML_PUSH(all->arena, &all->lists) = (list){path, length, layers};
}

/* The list to divide: the one that the layout names, else the longest; NULL where there is none. */
static const list *choose(const lists *all) {
    const list *best = NULL;
    for (uint32_t i = 0; i < all->lists.count; i++) {
        const list *l = &all->lists.at[i];
        if (all->requested ? l->path == all->requested : !best || l->layers > best->layers)
            best = l;
    }
    return best;
}

static lists lists_for(const ml_layout *layout, ml_arena *arena) {
    const char *name = layout->stages.list;
    bool any = !name[0] || strcmp(name, "layers") == 0;
    return (lists){.arena = arena, .requested = any ? NULL : name};
}

static void note_states(lists *all, const ml_graph *g) {
    for (uint32_t s = 0; s < ml_graph_state_count(g); s++) {
        const ml_state *state = ml_graph_state(g, s);
        if (state->name && state->kind == ML_STATE_PARAMETER) note_path(all, state->name);
    }
}

static _Noreturn void raise_no_list(const lists *all) {
    ml_text known = {.arena = all->arena};
    for (uint32_t i = 0; i < all->lists.count; i++)
        ml_text_add(&known, "%s\"%.*s\" (%d)", i ? ", " : "", all->lists.at[i].length,
                    all->lists.at[i].path, all->lists.at[i].layers);
    if (all->requested)
        ml_fail(ML_INVALID, "the model has no list of modules \"%s\" to cut into pipeline stages",
                all->requested);
    else
        ml_fail(ML_INVALID, "the model has no list of modules to cut into pipeline stages");
    if (known.text)
        ml_help("its lists: %s", known.text);
    else
        ml_help("self.blocks = m.stack(layers, Block) makes one; stages cut between its members");
    ml_raise_last();
}

static void check_layers(const ml_layout *layout, const list *l) {
    const ml_stages *stages = &layout->stages;
    const ml_mesh_axis *axis = &layout->axis[stages->mesh_axis];
    if (l->layers >= axis->size * stages->chunks) return;
    ml_fail(ML_INVALID, "cannot cut \"%.*s\", %d layers, into %lld pipeline stages", l->length,
            l->path, l->layers, (long long)axis->size * stages->chunks);
    int64_t most = l->layers / stages->chunks;
    if (stages->chunks > 1)
        ml_help("each stage needs a layer: with %d stages a rank, %s=%lld at most; or fewer chunks",
                stages->chunks, axis->name, (long long)(most ? most : 1));
    else
        ml_help("each stage needs a layer: %s=%d at most", axis->name, l->layers);
    ml_raise_last();
}

/* ---- Assignment ------------------------------------------------------------------------------ */

/* Work in FLOPs of products: an op bound by memory counts the bytes that it writes (scatter_add the
 * rows that it adds), and attention runs at half a product's speed. */
double stage_flops(const ml_graph *g, ml_ref n) {
    int op = ml_graph_node(g, n)->op;
    ml_op_class class = ml_ops[op].op_class;
    bool moved = class == ML_CLASS_MOVE && op != ML_OP_GATHER && op != ML_OP_CONCAT;
    if (class == ML_CLASS_LEAF || moved) return 0;
    if (op == ML_OP_ATTENTION || op == ML_OP_ATTENTION_GRAD) return 2 * ml_flops(g, n);
    ml_ref moves = op == ML_OP_SCATTER_ADD ? ml_graph_source(g, n, 1) : n;
    return ml_flops(g, n) +
           ml_machine_planned.flops_per_byte * (double)ml_type_bytes(ml_graph_type(g, moves));
}

/* Stages begin with parts; part i begins at position begin[i]. */
static void assign_parts(const double *cost, const int *begin, int parts, const ml_layout *layout,
                         ml_stage_map *map, ml_arena *scratch) {
    map->count = (int)layout->axis[layout->stages.mesh_axis].size * layout->stages.chunks;
    map->first = ML_NEW_ARRAY(map->arena, int, map->count + 1);
    stage_balance(cost, parts, layout, scratch, map->first);
    for (int i = 0; i <= map->count; i++)
        map->first[i] = map->first[i] < parts ? begin[map->first[i]] : map->layers * map->members;
}

static void set_list(const list *chosen, ml_stage_map *map) {
    map->list = ml_arena_copy(map->arena, chosen->path, (size_t)chosen->length);
}

bool stage_layers_assign_by_names(const ml_graph *g, const ml_layout *layout, ml_stage_map *map) {
    lists all = lists_for(layout, map->arena);
    note_states(&all, g);
    const list *chosen = choose(&all);
    if (!chosen) return false;
    check_layers(layout, chosen);
    double *cost = ML_NEW_ARRAY(map->arena, double, chosen->layers);
    int *begin = ML_NEW_ARRAY(map->arena, int, chosen->layers);
    for (int i = 0; i < chosen->layers; i++) cost[i] = 1, begin[i] = i;
    set_list(chosen, map);
    map->layers = chosen->layers;
    map->members = 1;
    assign_parts(cost, begin, chosen->layers, layout, map, map->arena);
    return true;
}

bool stage_elementwise(ml_op op) {
    ml_op_class class = ml_ops[op].op_class;
    return class == ML_CLASS_MAP || (class == ML_CLASS_MOVE && op != ML_OP_GATHER);
}

static bool uses_parameters(const stage_cutting *c) {
    for (ml_ref n = 1; n < c->node_count; n++)
        if (c->node[n].live && ml_graph_node(c->g, n)->op == ML_OP_STATE &&
            ml_graph_state(c->g, (uint32_t)ml_graph_args(c->g, n)[0])->kind == ML_STATE_PARAMETER)
            return true;
    return false;
}

/* A node's position, or where it has none, that of its operands: forward the last of them, backward
 * the first; -1 for what every stage computes for itself, and where no operand has one. */
static int *positions_by_operands(stage_cutting *c, const bool *free) {
    int *at = ML_NEW_ARRAY(c->scratch, int, c->node_count);
    for (ml_ref n = 1; n < c->node_count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        bool backward = stage_backward(c->g, n);
        at[n] = -1;
        if (!c->node[n].live || free[n]) continue;
        for (int i = 0; i < node->source_count; i++) {
            int of = at[ml_graph_source(c->g, n, i)];
            if (of >= 0 && (at[n] < 0 || (backward ? of < at[n] : of > at[n]))) at[n] = of;
        }
        if (c->node[n].at >= 0) at[n] = c->node[n].at;
    }
    return at;
}

/* By node: of inputs and constants alone. */
static bool *free_find(stage_cutting *c) {
    bool *free = ML_NEW_ARRAY(c->scratch, bool, c->node_count);
    for (ml_ref n = 1; n < c->node_count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        free[n] = node->op != ML_OP_STATE;
        for (int i = 0; i < node->source_count; i++)
            free[n] = free[n] && free[ml_graph_source(c->g, n, i)];
    }
    return free;
}

/* The cost of each position, with the nodes that belong there by operands, else by their first
 * user. */
static double *position_costs(stage_cutting *c, int positions, const bool *free, const int *by) {
    double *cost = ML_NEW_ARRAY(c->scratch, double, positions);
    int *first = ML_NEW_ARRAY(c->scratch, int, c->node_count); /* position of a user */
    for (ml_ref n = 1; n < c->node_count; n++) first[n] = positions;
    for (ml_ref n = c->node_count - 1; n > 0; n--) {
        if (!c->node[n].live || free[n]) continue;
        int at = by[n] >= 0 ? by[n] : first[n] < positions ? first[n] : 0;
        cost[at] += stage_flops(c->g, n);
        for (int i = 0; i < ml_graph_node(c->g, n)->source_count; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            if (at < first[source]) first[source] = at;
        }
    }
    return cost;
}

/* ---- Members of layers ----------------------------------------------------------------------- */

/* By node: whether one stage computes it, not every rank from inputs or states that it has. */
static bool *values_find(stage_cutting *c, const bool *free) {
    bool *value = ML_NEW_ARRAY(c->scratch, bool, c->node_count);
    for (ml_ref n = 1; n < c->node_count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        bool own = node->op != ML_OP_STATE && !stage_elementwise((ml_op)node->op);
        value[n] = c->node[n].live && !free[n] && own;
        for (int i = 0; i < node->source_count && c->node[n].live; i++)
            value[n] = value[n] || value[ml_graph_source(c->g, n, i)];
    }
    return value;
}

/* Bytes that a pass transfers from the positions before each boundary to those after it, or back.
 */
typedef struct {
    double *on, *back;
} boundary_bytes;

/* Of tensors that this pass computes and uses. */
static boundary_bytes boundary_bytes_find(stage_cutting *c, int positions, const bool *value,
                                          const int *by, bool backward) {
    boundary_bytes out = {ML_NEW_ARRAY(c->scratch, double, positions + 1),
                          ML_NEW_ARRAY(c->scratch, double, positions + 1)};
    int *least = ML_NEW_ARRAY(c->scratch, int, c->node_count);
    int *most = ML_NEW_ARRAY(c->scratch, int, c->node_count);
    for (ml_ref n = 1; n < c->node_count; n++) {
        least[n] = most[n] = by[n];
        if (!value[n] || by[n] < 0 || stage_backward(c->g, n) != backward) continue;
        for (int i = 0; i < ml_graph_node(c->g, n)->source_count; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            if (by[n] < least[source]) least[source] = by[n];
            if (by[n] > most[source]) most[source] = by[n];
        }
    }
    for (ml_ref n = 1; n < c->node_count; n++) {
        double bytes = (double)ml_type_bytes(ml_graph_type(c->g, n));
        if (!value[n] || by[n] < 0 || stage_backward(c->g, n) != backward) continue;
        out.on[by[n] + 1] += bytes, out.on[most[n] + 1] -= bytes;
        out.back[least[n] + 1] += bytes, out.back[by[n] + 1] -= bytes;
    }
    for (int at = 1; at <= positions; at++)
        out.on[at] += out.on[at - 1], out.back[at] += out.back[at - 1];
    return out;
}

/* ---- Paths of nodes -------------------------------------------------------------------------- */

static const char *module_of(const stage_cutting *c, ml_ref n) {
    const char *module = ml_graph_origin(c->g, n)->module;
    return c->node[n].live && module ? module : "";
}

/* Nodes share origins: paths are read once each, into tables of so many entries. */
static uint32_t origin_count(const stage_cutting *c) {
    uint32_t count = 0;
    for (ml_ref n = 1; n < c->node_count; n++)
        if (ml_graph_node(c->g, n)->origin >= count) count = ml_graph_node(c->g, n)->origin + 1;
    return count;
}

static void note_modules(const stage_cutting *c, lists *found) {
    bool *seen = ML_NEW_ARRAY(c->scratch, bool, origin_count(c) + 1);
    for (ml_ref n = 1; n < c->node_count; n++) {
        const char *module = module_of(c, n);
        bool *read = &seen[ml_graph_node(c->g, n)->origin];
        if (!module[0] || *read) continue;
        note_path(found, module);
        *read = true;
    }
}

/* The members of layers, in the order in which the forward pass first uses them. */
static void members_find(stage_cutting *c, const bool *value) {
    enum { MOST = 64 };
    ml_stage_map *map = &c->map;
    bool *seen = ML_NEW_ARRAY(c->scratch, bool, origin_count(c) + 1);
    map->member = ML_NEW_ARRAY(map->arena, const char *, MOST);
    map->members = 0;
    for (ml_ref n = 1; n < c->node_count; n++) {
        const char *within = "", *module = module_of(c, n);
        bool *read = &seen[ml_graph_node(c->g, n)->origin];
        if (!value[n] || stage_backward(c->g, n) || !module[0] || *read) continue;
        *read = true;
        if (stage_path_layer(map->list, module, &within) < 0 || !within[0]) continue;
        if (stage_path_member(map, within) >= 0 || map->members == MOST) continue;
        map->member[map->members++] = ml_arena_copy(map->arena, within, strcspn(within, "."));
    }
    if (map->members == 0) map->members = 1, map->member = NULL;
}

/* What nodes of an origin share. */
typedef struct {
    bool read, named; /* it names a member */
    int at;           /* of the member, or of the layer's first; -1: of no layer */
    int last;         /* position of the last of its forward nodes; -1: it has none yet */
} origin_position;

static void place_read(const stage_cutting *c, const char *module, origin_position *place) {
    const char *within;
    int layer = stage_path_layer(c->map.list, module, &within);
    int member = layer < 0 ? -1 : stage_path_member(&c->map, within);
    if (layer >= c->map.layers) layer = c->map.layers - 1;
    *place = (origin_position){.read = true, .at = -1, .last = -1};
    if (layer < 0) return;
    place->at = layer * c->map.members + (member < 0 ? 0 : member);
    place->named = member >= 0 || c->map.members == 1;
}

/* A node of a layer that names no member belongs to the last member whose results it uses; a
 * backward node to that of the forward nodes with its origin, but not after the nodes that it uses.
 * Weights and masks of dropout do not count. */
static int position_in_layer(const stage_cutting *c, ml_ref n, const bool *value,
                             const origin_position *place) {
    const ml_node *node = ml_graph_node(c->g, n);
    bool backward = stage_backward(c->g, n);
    int members = c->map.members, end = place->last >= 0 ? place->last : place->at + members - 1;
    int best = backward ? end : place->at;
    for (int i = 0; i < node->source_count; i++) {
        ml_ref source = ml_graph_source(c->g, n, i);
        int of = c->node[source].at;
        if (!value[source] || of < 0 || of / members != place->at / members) continue;
        if (backward && stage_backward(c->g, source) && of < best) best = of;
        if (!backward && of > best) best = of;
    }
    return best;
}

static void positions_read(stage_cutting *c, const bool *value) {
    origin_position *places = ML_NEW_ARRAY(c->scratch, origin_position, origin_count(c) + 1);
    for (ml_ref n = 1; n < c->node_count; n++) {
        origin_position *place = &places[ml_graph_node(c->g, n)->origin];
        const char *module = module_of(c, n);
        c->node[n].at = -1;
        if (!module[0]) continue;
        if (!place->read) place_read(c, module, place);
        if (place->at < 0) continue;
        c->node[n].at = place->named ? place->at : position_in_layer(c, n, value, place);
        if (!value[n] || stage_backward(c->g, n)) continue;
        if (c->node[n].at > place->last) place->last = c->node[n].at;
    }
}

/* ---- A program's layers ---------------------------------------------------------------------- */

/* Where a stage may begin: with a layer, and with a member before which both passes transfer no
 * more than before its layer, in either direction; members of the first layer are compared with the
 * second layer. A layer that uses its members in another order transfers back, and is not split. */
static int *begins_find(stage_cutting *c, const bool *value, const int *by, int *count) {
    int members = c->map.members, positions = c->map.layers * members;
    int *begin = ML_NEW_ARRAY(c->scratch, int, positions);
    boundary_bytes forward = boundary_bytes_find(c, positions, value, by, false);
    boundary_bytes backward = boundary_bytes_find(c, positions, value, by, true);
    bool *used = ML_NEW_ARRAY(c->scratch, bool, positions); /* layers differ in their members */
    for (ml_ref n = 1; n < c->node_count; n++)
        if (value[n] && !stage_backward(c->g, n) && c->node[n].at >= 0) used[c->node[n].at] = true;
    *count = 0;
    for (int at = 0; at < positions; at++) {
        int layer = at / members * members, other = layer > 0 ? layer : layer + members;
        bool within = at > layer && used[at] && other < positions;
        if (within) {
            double some = 1e-3 * forward.on[other]; /* scalars */
            within = forward.on[at] <= forward.on[other] + some &&
                     forward.back[at] <= forward.back[other] + some &&
                     backward.on[at] <= backward.on[other] + some &&
                     backward.back[at] <= backward.back[other] + some;
        }
        if (at == layer || within) begin[(*count)++] = at;
    }
    return begin;
}

static void assign_by_cost(stage_cutting *c) {
    const bool *free = free_find(c), *value = values_find(c, free);
    members_find(c, value);
    positions_read(c, value);
    int parts, positions = c->map.layers * c->map.members;
    const int *by = positions_by_operands(c, free);
    const int *begin = begins_find(c, value, by, &parts);
    const double *cost = position_costs(c, positions, free, by);
    double *sum = ML_NEW_ARRAY(c->scratch, double, parts);
    for (int i = 0; i < parts; i++)
        for (int at = begin[i]; at < (i + 1 < parts ? begin[i + 1] : positions); at++)
            sum[i] += cost[at];
    assign_parts(sum, begin, parts, c->layout, &c->map, c->scratch);
}

void stage_layers_assign(stage_cutting *c) {
    if (c->map.count) {
        positions_read(c, values_find(c, free_find(c)));
        return;
    }
    lists all = lists_for(c->layout, c->scratch);
    note_modules(c, &all);
    const list *chosen = choose(&all);
    if (!chosen) { /* a program beside the model, or one of its optimizer alone */
        for (ml_ref n = 1; n < c->node_count; n++) c->node[n].at = -1;
        if (!uses_parameters(c)) return;
        if (!stage_layers_assign_by_names(c->g, c->layout, &c->map)) raise_no_list(&all);
        positions_read(c, values_find(c, free_find(c)));
        return;
    }
    check_layers(c->layout, chosen);
    set_list(chosen, &c->map);
    c->map.layers = chosen->layers;
    c->map.count = 1;
    assign_by_cost(c);
}
