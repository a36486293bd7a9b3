/* The layers of a model: found by module paths, dealt to stages by cost (stage.h). */
#include <math.h>
#include <string.h>

#include "runtime/shard/stage_parts.h"

/* ---- Paths ----------------------------------------------------------------------------------- */

/* The number that begins at text, up to its '.' or end; 0 where it is none. */
static int component_number(const char *text) {
    int number = 0;
    if (*text < '1' || *text > '9') return 0;
    for (; *text >= '0' && *text <= '9'; text++)
        if (number < 100000000) number = 10 * number + (*text - '0');
    return *text == '.' || *text == 0 ? number : 0;
}

int stage_layer(const char *list, const char *path) {
    size_t length = strlen(list);
    for (const char *at = path; at && *at;) {
        if (strncmp(at, list, length) == 0 && at[length] == '.') {
            int number = component_number(at + length + 1);
            if (number) return number - 1;
        }
        at = strchr(at, '.');
        if (at) at++;
    }
    return -1;
}

/* Length of the outermost list in a path: up to the dot before its first number; 0 for none. */
static int outermost_list(const char *path) {
    for (const char *dot = strchr(path, '.'); dot; dot = strchr(dot + 1, '.'))
        if (component_number(dot + 1)) return (int)(dot - path);
    return 0;
}

int stage_of_layer(const ml_stage_map *map, int layer) {
    if (!map->count) return 0;
    if (layer >= map->layers) layer = map->layers - 1;
    int low = 0, high = map->count - 1; /* the last stage whose first layer is not above it */
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (map->first[middle] <= layer)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

int stage_by_name(const ml_graph *g, const ml_stage_map *map, uint32_t state) {
    const char *name = ml_graph_state(g, state)->name;
    if (!map->count || !name) return -1;
    int layer = stage_layer(map->list, name);
    return layer < 0 ? -1 : stage_of_layer(map, layer);
}

/* ---- Lists ----------------------------------------------------------------------------------- */

typedef struct {
    const char *path; /* the first `length` characters are the list's */
    int length, layers;
} list;
typedef struct {
    ml_arena *arena;
    const char *wanted; /* NULL: any */
    ML_VEC(list) lists;
} lists;

static void note_path(lists *all, const char *path) {
    int length = outermost_list(path), layers = length ? component_number(path + length + 1) : 0;
    if (all->wanted) {
        int layer = stage_layer(all->wanted, path);
        if (layer >= 0) path = all->wanted, length = (int)strlen(path), layers = layer + 1;
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

/* The list to cut: the one that was asked for, else the longest; NULL. */
static const list *choose(const lists *all) {
    const list *best = NULL;
    for (uint32_t i = 0; i < all->lists.count; i++) {
        const list *l = &all->lists.at[i];
        if (all->wanted ? l->path == all->wanted : !best || l->layers > best->layers) best = l;
    }
    return best;
}

static lists lists_for(const ml_layout *layout, ml_arena *arena) {
    const char *name = layout->stages.list;
    bool any = !name[0] || strcmp(name, "layers") == 0;
    return (lists){.arena = arena, .wanted = any ? NULL : name};
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
    if (all->wanted)
        ml_fail(ML_INVALID, "the model has no list of modules \"%s\" to cut into pipeline stages",
                all->wanted);
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

/* ---- Dealing --------------------------------------------------------------------------------- */

/* Work in FLOPs of products: what waits for memory counts the bytes that it writes (scatter_add the
 * rows that it adds), and attention runs at half a product's speed. */
double stage_flops(const ml_graph *g, ml_ref n) {
    enum { FLOPS_PER_BYTE = 150 }; /* a GPU's products in the time in which it moves a byte */
    int op = ml_graph_node(g, n)->op;
    ml_op_class class = ml_ops[op].op_class;
    bool moved = class == ML_CLASS_MOVE && op != ML_OP_GATHER && op != ML_OP_CONCAT;
    if (class == ML_CLASS_LEAF || moved) return 0;
    if (op == ML_OP_ATTENTION || op == ML_OP_ATTENTION_GRAD) return 2 * ml_flops(g, n);
    ml_ref moves = op == ML_OP_SCATTER_ADD ? ml_graph_source(g, n, 1) : n;
    return ml_flops(g, n) + FLOPS_PER_BYTE * (double)ml_type_bytes(ml_graph_type(g, moves));
}

/* How many stages the layers before each need at least where none may cost more than `most`: full
 * ones, from the start. Whether `count` are enough for all. */
static bool pack(const double *cost, int layers, int count, double most, int *needed) {
    double sum = 0;
    int stages = 0;
    for (int i = 0; i < layers; i++) {
        needed[i] = stages;
        if (cost[i] > most) return false;
        if (!stages || sum + cost[i] > most) stages++, sum = 0;
        sum += cost[i];
    }
    return stages <= count;
}

/* Last stage first, each takes what comes nearest to an equal share of what is left, and never more
 * than `most` or so little that the stages before would have to. */
static void share(const double *cost, int count, double most, const int *needed, int *first) {
    double left = 0;
    for (int i = 0; i < first[count]; i++) left += cost[i];
    for (int stage = count - 1; stage >= 0; stage--) {
        double sum = 0, taken = 0, nearest = INFINITY;
        int best = first[stage + 1] - 1;
        for (int at = first[stage + 1] - 1; at >= stage; at--) {
            sum += cost[at];
            if (sum > most && at < first[stage + 1] - 1) break;
            if (needed[at] > stage || (stage == 0 && at > 0)) continue;
            double off = fabs(sum - left / (stage + 1));
            if (off > nearest * (1 + 1e-9)) continue;
            nearest = off, best = at, taken = sum;
        }
        first[stage] = best;
        left -= taken;
    }
}

/* The least maximum by bisection. */
static void deal(const double *cost, int layers, ml_stage_map *map, int count) {
    double low = 0, high = 0;
    int *needed = ML_NEW_ARRAY(map->arena, int, layers);
    for (int i = 0; i < layers; i++) {
        high += cost[i];
        if (cost[i] > low) low = cost[i];
    }
    high = high > 0 ? high * 1.0001 : 1;
    for (int i = 0; i < 50 && high - low > 1e-6 * high; i++) {
        double middle = (low + high) / 2;
        if (pack(cost, layers, count, middle, needed))
            high = middle;
        else
            low = middle;
    }
    map->first = ML_NEW_ARRAY(map->arena, int, count + 1);
    map->first[count] = layers;
    map->layers = layers;
    map->count = count;
    (void)pack(cost, layers, count, high, needed);
    share(cost, count, high, needed, map->first);
}

/* The layer that a node goes with by its operands: its own; of those that it uses, forward the
 * last, backward the first; -1 where they tell none, which is all that is said of what is had
 * everywhere. */
static int *layers_by_operands(stage_cutting *c, const bool *free) {
    int *layer = ML_NEW_ARRAY(c->scratch, int, c->node_count);
    for (ml_ref n = 1; n < c->node_count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        bool backward = node->flags & ML_NODE_BACKWARD;
        layer[n] = -1;
        if (!c->node[n].live || free[n]) continue;
        for (int i = 0; i < node->source_count; i++) {
            int of = layer[ml_graph_source(c->g, n, i)];
            if (of >= 0 && (layer[n] < 0 || (backward ? of < layer[n] : of > layer[n])))
                layer[n] = of;
        }
        if (c->node[n].layer >= 0) layer[n] = c->node[n].layer;
    }
    return layer;
}

/* What each layer costs, with what goes with it: by operands, else with the first user. */
static double *layer_costs(stage_cutting *c, int layers) {
    double *cost = ML_NEW_ARRAY(c->scratch, double, layers);
    bool *free = ML_NEW_ARRAY(c->scratch, bool, c->node_count);
    int *first = ML_NEW_ARRAY(c->scratch, int, c->node_count); /* layer of a user */
    for (ml_ref n = 1; n < c->node_count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        first[n] = layers;
        free[n] = node->op != ML_OP_STATE;
        for (int i = 0; i < node->source_count; i++)
            free[n] = free[n] && free[ml_graph_source(c->g, n, i)];
    }
    int *layer = layers_by_operands(c, free);
    for (ml_ref n = c->node_count - 1; n > 0; n--) {
        if (!c->node[n].live || free[n]) continue;
        int at = layer[n] >= 0 ? layer[n] : first[n] < layers ? first[n] : 0;
        cost[at] += stage_flops(c->g, n);
        for (int i = 0; i < ml_graph_node(c->g, n)->source_count; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            if (at < first[source]) first[source] = at;
        }
    }
    return cost;
}

static void set_list(const list *chosen, ml_stage_map *map) {
    map->list = ml_arena_copy(map->arena, chosen->path, (size_t)chosen->length);
}

static int stage_count(const ml_layout *layout) {
    return (int)layout->axis[layout->stages.mesh_axis].size * layout->stages.chunks;
}

bool stage_deal_by_names(const ml_graph *g, const ml_layout *layout, ml_stage_map *map) {
    lists all = lists_for(layout, map->arena);
    note_states(&all, g);
    const list *chosen = choose(&all);
    if (!chosen) return false;
    check_layers(layout, chosen);
    double *cost = ML_NEW_ARRAY(map->arena, double, chosen->layers);
    for (int i = 0; i < chosen->layers; i++) cost[i] = 1;
    set_list(chosen, map);
    deal(cost, chosen->layers, map, stage_count(layout));
    return true;
}

static bool uses_parameters(const stage_cutting *c) {
    for (ml_ref n = 1; n < c->node_count; n++)
        if (c->node[n].live && ml_graph_node(c->g, n)->op == ML_OP_STATE &&
            ml_graph_state(c->g, (uint32_t)ml_graph_args(c->g, n)[0])->kind == ML_STATE_PARAMETER)
            return true;
    return false;
}

/* By origin, which nodes share; parsed once each. `found` may be NULL. */
static void read_paths(stage_cutting *c, lists *found) {
    uint32_t most = 0;
    for (ml_ref n = 1; n < c->node_count; n++)
        if (ml_graph_node(c->g, n)->origin > most) most = ml_graph_node(c->g, n)->origin;
    int *layer = ML_NEW_ARRAY(c->scratch, int, most + 1);
    for (ml_ref n = 1; n < c->node_count; n++) {
        uint32_t origin = ml_graph_node(c->g, n)->origin;
        const char *module = ml_graph_origin(c->g, n)->module;
        c->node[n].layer = -1;
        if (!c->node[n].live || !module || !module[0]) continue;
        if (found && !layer[origin]) note_path(found, module);
        if (!layer[origin]) layer[origin] = c->map.count ? stage_layer(c->map.list, module) + 2 : 1;
        int of = layer[origin] - 2;
        c->node[n].layer = of < 0 ? -1 : of < c->map.layers ? of : c->map.layers - 1;
    }
}

void stage_deal(stage_cutting *c) {
    if (c->map.count) {
        read_paths(c, NULL);
        return;
    }
    lists all = lists_for(c->layout, c->scratch);
    read_paths(c, &all);
    const list *chosen = choose(&all);
    if (!chosen) { /* a program beside the model, or one of its optimizer alone */
        if (!uses_parameters(c)) return;
        if (!stage_deal_by_names(c->g, c->layout, &c->map)) raise_no_list(&all);
        read_paths(c, NULL);
        return;
    }
    check_layers(c->layout, chosen);
    set_list(chosen, &c->map);
    c->map.layers = chosen->layers;
    c->map.count = 1;
    read_paths(c, NULL);
    deal(layer_costs(c, chosen->layers), chosen->layers, &c->map, stage_count(c->layout));
}
