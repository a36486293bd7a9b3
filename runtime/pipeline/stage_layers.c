/* The layers of a model, and their members: found by module paths, dealt to stages by cost
 * (stage.h). */
#include <math.h>
#include <string.h>

#include "runtime/pipeline/schedule.h"
#include "runtime/pipeline/stage_internal.h"

/* ---- Paths ----------------------------------------------------------------------------------- */

/* The number that begins at text, up to its '.' or end; 0 where it is none. */
static int component_number(const char *text) {
    int number = 0;
    if (*text < '1' || *text > '9') return 0;
    for (; *text >= '0' && *text <= '9'; text++)
        if (number < 100000000) number = 10 * number + (*text - '0');
    return *text == '.' || *text == 0 ? number : 0;
}

/* The layer of a module path or a state's name, counted from 0, and the path of what is within it;
 * -1 where it is in none. */
static int layer_of_path(const char *list, const char *path, const char **within) {
    size_t length = strlen(list);
    for (const char *at = path; at && *at;) {
        if (strncmp(at, list, length) == 0 && at[length] == '.') {
            int number = component_number(at + length + 1);
            const char *rest = strchr(at + length + 1, '.');
            *within = rest ? rest + 1 : "";
            if (number) return number - 1;
        }
        at = strchr(at, '.');
        if (at) at++;
    }
    return -1;
}

/* The member that a path within a layer begins with; -1 where it is none of them. */
static int member_of_path(const ml_stage_map *map, const char *within) {
    size_t length = strcspn(within, ".");
    for (int i = 0; map->member && i < map->members; i++)
        if (strncmp(map->member[i], within, length) == 0 && !map->member[i][length]) return i;
    return -1;
}

/* Length of the outermost list in a path: up to the dot before its first number; 0 for none. */
static int outermost_list(const char *path) {
    for (const char *dot = strchr(path, '.'); dot; dot = strchr(dot + 1, '.'))
        if (component_number(dot + 1)) return (int)(dot - path);
    return 0;
}

int stage_of_position(const ml_stage_map *map, int position) {
    if (!map->count) return 0;
    int low = 0, high = map->count - 1; /* the last stage whose first position is not above it */
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (map->first[middle] <= position)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

int stage_by_name(const ml_graph *g, const ml_stage_map *map, uint32_t state) {
    const char *name = ml_graph_state(g, state)->name;
    if (!map->count || !name) return -1;
    const char *within;
    int layer = layer_of_path(map->list, name, &within), member;
    if (layer < 0) return -1;
    if (layer >= map->layers) layer = map->layers - 1;
    member = member_of_path(map, within);
    return stage_of_position(map, layer * map->members + (member < 0 ? 0 : member));
}

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
    int length = outermost_list(path), layers = length ? component_number(path + length + 1) : 0;
    if (all->requested) {
        const char *within;
        int layer = layer_of_path(all->requested, path, &within);
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

/* The list to cut: the one that was asked for, else the longest; NULL. */
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

/* How many stages the parts before each need at least where none may cost more than `most`: full
 * ones, from the start. Whether `count` are enough for all. */
static bool pack(const double *cost, int parts, int count, double most, int *needed) {
    double sum = 0;
    int stages = 0;
    for (int i = 0; i < parts; i++) {
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

/* With several stages a rank it is ranks that should have equal shares. As long as that makes them
 * more equal, a stage hands its first or last part to its neighbour, which is another rank's. */
static void even_ranks(const double *cost, int *first, int count, int ranks, ml_arena *scratch) {
    double *rank = ML_NEW_ARRAY(scratch, double, ranks);
    for (int v = 0; v < count; v++)
        for (int i = first[v]; i < first[v + 1]; i++) rank[v % ranks] += cost[i];
    bool moves = ranks > 1;
    for (int round = 0; moves && round < 4 * count; round++) {
        moves = false;
        for (int v = 1; v < count; v++) {
            double *before = &rank[(v - 1) % ranks], *after = &rank[v % ranks];
            double back = cost[first[v]], on = cost[first[v] - 1]; /* what a move takes along */
            if (first[v + 1] - first[v] > 1 && *after - *before > back * (1 + 1e-9)) {
                *before += back, *after -= back, first[v]++;
                moves = true;
            } else if (first[v] - first[v - 1] > 1 && *before - *after > on * (1 + 1e-9)) {
                *before -= on, *after += on, first[v]--;
                moves = true;
            }
        }
    }
}

/* How long a step of some microbatches takes, a third of the work forward. */
static int64_t step_length(const double *cost, const int *first, const ml_layout *layout,
                           ml_arena *scratch) {
    enum { UNITS = 1000000 };
    int ranks = (int)layout->axis[layout->stages.mesh_axis].size, chunks = layout->stages.chunks;
    int count = ranks * chunks, edges = 0;
    double all = 0;
    ml_pipeline_schedule schedule;
    ml_task *task = ML_NEW_ARRAY(scratch, ml_task, 2 * (size_t)count);
    ml_task_edge *edge = ML_NEW_ARRAY(scratch, ml_task_edge, 2 * (size_t)count);
    for (int i = 0; i < first[count]; i++) all += cost[i];
    for (int v = 0; v < count; v++) {
        double sum = 0;
        for (int i = first[v]; i < first[v + 1]; i++) sum += cost[i];
        int64_t units = all > 0 ? (int64_t)(UNITS * (sum / all)) : 0;
        task[2 * v] = (ml_task){.stage = v, .cost = units / 3 + 1};
        task[2 * v + 1] = (ml_task){.stage = v, .cost = units - units / 3 + 1};
        if (v == 0) continue;
        edge[edges++] = (ml_task_edge){.from = 2 * v - 2, .to = 2 * v};
        edge[edges++] = (ml_task_edge){.from = 2 * v + 1, .to = 2 * v - 1};
    }
    edge[edges++] = (ml_task_edge){.from = 2 * count - 2, .to = 2 * count - 1};
    ml_pipeline_problem problem = {.kind = (ml_schedule_kind)layout->stages.schedule,
                                   .ranks = ranks,
                                   .chunks = chunks,
                                   .microbatches = 2 * ranks,
                                   .task_count = 2 * count,
                                   .edge_count = edges,
                                   .tasks = task,
                                   .edges = edge};
    ml_pipeline_schedule_build(&problem, scratch, &schedule);
    return schedule.length;
}

/* Gives ranks equal shares, at the cost of less equal stages, where a step is shorter that way. */
static void assign_even_ranks(const double *cost, const ml_layout *layout, int count, int *first,
                              ml_arena *scratch) {
    int *even = ML_NEW_ARRAY(scratch, int, (size_t)count + 1);
    memcpy(even, first, sizeof *even * ((size_t)count + 1));
    even_ranks(cost, even, count, count / layout->stages.chunks, scratch);
    if (memcmp(even, first, sizeof *even * ((size_t)count + 1)) == 0) return;
    if (step_length(cost, even, layout, scratch) < step_length(cost, first, layout, scratch))
        memcpy(first, even, sizeof *even * ((size_t)count + 1));
}

/* The least maximum by bisection; part i begins at position begin[i]. */
static void assign_stages(const double *cost, const int *begin, int parts, const ml_layout *layout,
                          ml_stage_map *map, ml_arena *scratch) {
    int count = (int)layout->axis[layout->stages.mesh_axis].size * layout->stages.chunks;
    double low = 0, high = 0;
    int *needed = ML_NEW_ARRAY(scratch, int, parts);
    for (int i = 0; i < parts; i++) {
        high += cost[i];
        if (cost[i] > low) low = cost[i];
    }
    high = high > 0 ? high * 1.0001 : 1;
    for (int i = 0; i < 50 && high - low > 1e-6 * high; i++) {
        double middle = (low + high) / 2;
        if (pack(cost, parts, count, middle, needed))
            high = middle;
        else
            low = middle;
    }
    map->first = ML_NEW_ARRAY(map->arena, int, count + 1);
    map->first[count] = parts;
    map->count = count;
    (void)pack(cost, parts, count, high, needed);
    share(cost, count, high, needed, map->first);
    if (layout->stages.chunks > 1) assign_even_ranks(cost, layout, count, map->first, scratch);
    for (int i = 0; i <= count; i++)
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
    assign_stages(cost, begin, chosen->layers, layout, map, map->arena);
    return true;
}

static bool uses_parameters(const stage_cutting *c) {
    for (ml_ref n = 1; n < c->node_count; n++)
        if (c->node[n].live && ml_graph_node(c->g, n)->op == ML_OP_STATE &&
            ml_graph_state(c->g, (uint32_t)ml_graph_args(c->g, n)[0])->kind == ML_STATE_PARAMETER)
            return true;
    return false;
}

/* The position that a node goes with by its operands: its own; of those that it uses, forward the
 * last, backward the first; -1 where they tell none, which is all that is said of what is had
 * everywhere. */
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

/* What each position costs, with what goes with it: by operands, else with the first user. */
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

/* By node: whether it is of one place, not what every rank has or makes of its states. */
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

/* Bytes that a pass hands on from the positions before each to those from it on, or back. */
typedef struct {
    double *on, *back;
} boundary_bytes;

/* Of those tensors that this pass makes and uses. */
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

/* The members of layers, in the order in which the forward pass comes to them. */
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
        if (layer_of_path(map->list, module, &within) < 0 || !within[0]) continue;
        if (member_of_path(map, within) >= 0 || map->members == MOST) continue;
        map->member[map->members++] = ml_arena_copy(map->arena, within, strcspn(within, "."));
    }
    if (map->members == 0) map->members = 1, map->member = NULL;
}

/* What nodes of an origin share. */
typedef struct {
    bool read, named; /* it names a member */
    int at;           /* of the member, or of the layer's first; -1: of no layer */
    int last;         /* where the last of its forward nodes is; -1: it has none yet */
} origin_position;

static void place_read(const stage_cutting *c, const char *module, origin_position *place) {
    const char *within;
    int layer = layer_of_path(c->map.list, module, &within);
    int member = layer < 0 ? -1 : member_of_path(&c->map, within);
    if (layer >= c->map.layers) layer = c->map.layers - 1;
    *place = (origin_position){.read = true, .at = -1, .last = -1};
    if (layer < 0) return;
    place->at = layer * c->map.members + (member < 0 ? 0 : member);
    place->named = member >= 0 || c->map.members == 1;
}

/* What is of a layer and names no member goes with the last member whose results it uses; backward
 * with what it is the gradient of, which has its origin, but not after what it uses. Neither
 * weights nor masks of dropout tell where. */
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

/* Where a stage may begin: with a layer, and with a member before which both passes hand on no more
 * than before its layer, nor back; the first layer's members are held against the second layer. A
 * layer that goes through its members in another order hands back, and is whole. */
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
            double some = 1e-3 * forward.on[other]; /* numbers */
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
    assign_stages(sum, begin, parts, c->layout, &c->map, c->scratch);
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
