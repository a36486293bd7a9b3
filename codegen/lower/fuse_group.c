/* Groups: which roots share a kernel, and which steps there are.
 *
 * Roots are placed in topological order. A root joins the kernel with which it shares the most
 * memory traffic (results that need no loading, tensors that both read) and in whose loops it
 * runs; otherwise it starts a kernel. */
#include "codegen/lower/lower_internal.h"

#include <string.h>

enum {
    CANDIDATES = 8,
};

void fuse_producers(lowering *l, ml_ref n, bool partial,
                    void (*visit)(void *context, uint32_t group), void *context) {
    const lower_info *info = &l->info[n];
    if (partial) {
        visit(context, info->partial_group);
        return;
    }
    if (info->role == LOWER_ROOT) visit(context, info->group);
    if (info->role == LOWER_OPAQUE) {
        bool out = ml_graph_node(l->g, n)->op == ML_OP_OUT;
        visit(context, l->info[out ? ml_graph_source(l->g, n, 0) : n].group);
    }
    if (info->role != LOWER_CONCAT) return;
    for (int i = 0; i < ml_graph_node(l->g, n)->source_count; i++) {
        if (info->part_groups[i] != LOWER_NONE) {
            visit(context, info->part_groups[i]);
            continue;
        }
        ml_ref part = ml_graph_source(l->g, n, i);
        while (!lower_in_memory(l, part)) part = ml_graph_source(l->g, part, 0);
        fuse_producers(l, part, false, visit, context);
    }
}

void fuse_group_dependencies(lowering *l, uint32_t id, void (*visit)(void *context, uint32_t group),
                             void *context) {
    const lower_group *group = &l->groups.at[id];
    for (uint32_t a = 0; a < group->accesses.count; a++)
        fuse_producers(l, group->accesses.at[a].node, group->accesses.at[a].partial, visit,
                       context);
    if (!group->opaque) return;
    if (group->turns) {
        lower_view view;
        if (views_of(l, group->node, &view)) fuse_producers(l, view.base, false, visit, context);
        return;
    }
    for (int i = 0; i < ml_graph_node(l->g, group->node)->source_count; i++) {
        lower_view view;
        bool packed = i < 2 && group->packed[i] != LOWER_NONE;
        ml_ref source =
            group->gemm ? gemm_operand(l, group->node, i) : ml_graph_source(l->g, group->node, i);
        if (packed)
            visit(context, group->packers[i]);
        else if (views_of(l, source, &view))
            fuse_producers(l, view.base, false, visit, context);
    }
    lower_view view;
    const ml_ref more[] = {group->bias ? group->bias : group->addend, group->scale};
    for (int i = 0; i < 2; i++)
        if (more[i] != 0 && views_of(l, more[i], &view))
            fuse_producers(l, view.base, false, visit, context);
}

/* --- joining --- */

typedef struct {
    lowering *l;
    uint32_t group, level; /* level above all producers but `group` */
    bool produces;         /* `group` is among them */
} level_search;

static void search_level(void *context, uint32_t group) {
    level_search *search = context;
    if (group == 0) return;
    if (group == search->group) {
        search->produces = true;
        return;
    }
    uint32_t level = search->l->groups.at[group].level + 1;
    if (level > search->level) search->level = level;
}

/* Everything that the root reads from other groups than `id` must be ready before that. */
static bool levels_fit(lowering *l, uint32_t id, const lower_group *from, uint32_t *level) {
    const lower_group *to = &l->groups.at[id];
    level_search search = {.l = l, .group = id};
    for (uint32_t a = 0; a < from->accesses.count; a++) {
        const lower_access *access = &from->accesses.at[a];
        if (fuse_find_available(to, access) != NULL) continue;
        fuse_producers(l, access->node, access->partial, search_level, &search);
        if (search.produces) return false;
    }
    *level = search.level > to->level ? search.level : to->level;
    return !to->sealed || *level == to->level;
}

/* `meeting`: of the two; NULL: not looked for yet. */
static bool join(lowering *l, uint32_t id, const lower_group *from, bool by_size,
                 lower_meeting *meeting) {
    lower_group *to = &l->groups.at[id];
    uint32_t level;
    if (to->opaque) return false;
    if (meeting == NULL) meeting = fuse_meeting(l, to, from);
    const lower_joined *joined = fuse_joined(l, meeting, to, from, by_size);
    if (!joined->fits || !levels_fit(l, id, from, &level)) return false;
    fuse_take(l, to, from, joined);
    to->level = level;
    return true;
}

/* --- placing --- */

typedef struct {
    uint32_t group;
    lower_meeting *meeting; /* with that */
} candidate;

static void add_candidate(lowering *l, const lower_group *from, uint32_t id, candidate *list,
                          int *count) {
    if (id == 0 || id == LOWER_NONE || *count == CANDIDATES || l->groups.at[id].opaque) return;
    for (int i = 0; i < *count; i++)
        if (list[i].group == id) return;
    lower_meeting *meeting = fuse_meeting(l, &l->groups.at[id], from);
    const int64_t score = meeting->shared;
    if (score == 0 && !meeting->consumes) return;
    int at = (*count)++;
    for (; at > 0; at--) {
        const candidate *before = &list[at - 1];
        const int64_t other = before->meeting->shared;
        if (other > score || (other == score && before->group > id)) break;
        list[at] = *before;
    }
    list[at] = (candidate){id, meeting};
}

static bool mixes_recomputation(const lowering *l, uint32_t id, const lower_group *from) {
    int later = ML_NODE_COPY | ML_NODE_BACKWARD;
    bool copy = ml_graph_node(l->g, from->node)->flags & ML_NODE_COPY;
    return copy && !(ml_graph_node(l->g, l->groups.at[id].node)->flags & later);
}

/* Whether joining would run a prompt root (ML_NODE_PROMPT), or one of a kernel with such, later
 * than steps that could run after it. */
static bool delays_prompt(const lowering *l, uint32_t id, const lower_group *from) {
    return (from->prompt || l->groups.at[id].prompt) && id < l->last_opaque;
}

static int64_t elements_of(const lower_group *group) {
    int64_t elements = 1;
    for (int d = 0; d < group->digits; d++) elements *= group->size[d];
    return elements;
}

/* GPUs: whether a state's new value, computed of its old one, would be a result of the rows that
 * the kernel adds up. All threads of a row read the old one, so that the new one could not be
 * stored there and would have to be copied; kernels of new values alone share a launch. */
static bool displaces_state(const lowering *l, uint32_t id, const lower_group *from) {
    const lower_group *to = &l->groups.at[id];
    const lower_root *root = &from->roots.at[0];
    if (l->target->kind != ML_TARGET_CUDA || root->kind != LOWER_ROOT_VALUE) return false;
    if (!l->info[root->node].pinned || elements_of(from) >= elements_of(to)) return false;
    for (uint32_t a = 0; a < from->accesses.count; a++) {
        ml_ref read = from->accesses.at[a].node;
        if (ml_graph_node(l->g, read)->op == ML_OP_STATE && gemm_updates(l, root->node, read))
            return true;
    }
    return false;
}

static uint32_t find_kernel(lowering *l, const lower_group *from) {
    candidate list[CANDIDATES];
    int count = 0;
    if (l->target->no_fuse) return 0;
    for (uint32_t a = 0; a < from->accesses.count; a++) {
        const lower_access *access = &from->accesses.at[a];
        const lower_info *info = &l->info[access->node];
        if (access->partial) continue;
        if (info->role == LOWER_ROOT) add_candidate(l, from, info->group, list, &count);
        add_candidate(l, from, info->recent[0], list, &count);
        add_candidate(l, from, info->recent[1], list, &count);
    }
    for (int i = 0; i < count; i++) {
        uint32_t id = list[i].group;
        if (mixes_recomputation(l, id, from) || delays_prompt(l, id, from)) continue;
        if (displaces_state(l, id, from)) continue;
        if (join(l, id, from, false, list[i].meeting)) return id;
    }
    if (from->digits == 0 && l->scalar_group != 0 && join(l, l->scalar_group, from, true, NULL))
        return l->scalar_group;
    if (from->roots.at[0].kind != LOWER_ROOT_FINISH) return 0;
    for (int i = 0; i < 4; i++)
        if (l->finish_group[i] != 0 && join(l, l->finish_group[i], from, true, NULL))
            return l->finish_group[i];
    return 0;
}

static void seal(void *context, uint32_t group) {
    lowering *l = context;
    if (group != 0) l->groups.at[group].sealed = true;
}

static void note_reader(lowering *l, ml_ref n, uint32_t id) {
    lower_info *info = &l->info[n];
    info->stored = true;
    if (info->recent[0] == id || info->recent[1] == id) return;
    info->recent[1] = info->recent[0];
    info->recent[0] = id;
}

static void *copy_of(lowering *l, const void *from, size_t bytes) {
    void *copy = ml_arena_alloc(l->scratch, bytes);
    if (bytes > 0) memcpy(copy, from, bytes);
    return copy;
}

/* `group` lives in the builder's memory, but for the arrays of its indices. */
static uint32_t new_group(lowering *l, const lower_group *group) {
    level_search search = {.l = l};
    lower_group *own = ML_PUSH(l->scratch, &l->groups);
    uint32_t id = l->groups.count - 1;
    *own = *group;
    own->roots.at = copy_of(l, group->roots.at, sizeof(lower_root) * group->roots.count);
    own->accesses.at = copy_of(l, group->accesses.at, sizeof(lower_access) * group->accesses.count);
    own->roots.capacity = own->roots.count;
    own->accesses.capacity = own->accesses.count;
    fuse_group_dependencies(l, id, search_level, &search);
    l->groups.at[id].level = search.level;
    return id;
}

static ml_dtype compute_dtype(ml_dtype dtype) {
    return ml_is_narrow(dtype) ? ml_compute_dtype(dtype) : dtype;
}

/* A reduction over rows ends in another kernel, which adds up the chunks. */
static void place_finish(lowering *l, uint32_t id, ml_ref n, ml_scope scope) {
    lower_group *group = &l->groups.at[id];
    const ml_type *type = ml_graph_type(l->g, n);
    if (group->chunks == 0) group->chunks = fuse_chunks(l, group, scope);
    l->info[n].partial_group = id;
    lower_root finish = {.kind = LOWER_ROOT_FINISH, .node = n};
    finish.space.dtype = (uint8_t)compute_dtype((ml_dtype)type->dtype);
    finish.space.rank = (uint8_t)(type->rank + 1);
    finish.space.size[0] = group->chunks;
    memcpy(finish.space.axis + 1, type->axis, sizeof(ml_axis) * type->rank);
    memcpy(finish.space.size + 1, type->size, sizeof(int64_t) * type->rank);
    fuse_place(l, &finish);
}

uint32_t fuse_place(lowering *l, lower_root *root) {
    lower_group single = fuse_single(l, root);
    lower_root *own = &single.roots.at[0];
    single.prompt = ml_graph_node(l->g, own->node)->flags & ML_NODE_PROMPT;
    uint32_t id = find_kernel(l, &single);
    if (id == 0) id = new_group(l, &single);
    lower_group *group = &l->groups.at[id];
    group->prompt = group->prompt || single.prompt;
    ml_scope scope = (ml_scope)group->roots.at[group->roots.count - 1].scope;
    if (group->digits == 0) l->scalar_group = id;
    if (own->kind == LOWER_ROOT_FINISH) l->finish_group[l->finish_next++ & 3] = id;
    if (own->kind != LOWER_ROOT_PACK && own->kind != LOWER_ROOT_PART) l->info[own->node].group = id;
    for (uint32_t a = 0; a < single.accesses.count; a++) {
        const lower_access *access = &single.accesses.at[a];
        if (!access->partial && fuse_find_available(group, access)) continue;
        if (!access->partial) note_reader(l, access->node, id);
        fuse_producers(l, access->node, access->partial, seal, l);
    }
    if (own->kind == LOWER_ROOT_REDUCE && scope != ML_SCOPE_ROW)
        place_finish(l, id, own->node, scope);
    return id;
}

static void place_node(lowering *l, ml_ref n) {
    lower_root root = {.kind = LOWER_ROOT_VALUE, .node = n};
    bool dot = l->info[n].generic_dot && ml_graph_node(l->g, n)->arg_count > 0;
    bool reduces = ml_ops[ml_graph_node(l->g, n)->op].op_class == ML_CLASS_REDUCE;
    root.space = *ml_graph_type(l->g, n);
    if (dot) {
        root.kind = LOWER_ROOT_REDUCE;
        fuse_dot_space(l->g, n, &root.space);
    } else if (reduces && !l->info[n].unrolled) {
        root.kind = LOWER_ROOT_REDUCE;
        root.space = *ml_graph_type(l->g, ml_graph_source(l->g, n, 0));
    }
    fuse_place(l, &root);
}

static void place_parts(lowering *l, ml_ref n) {
    for (int i = 0; i < ml_graph_node(l->g, n)->source_count; i++) {
        if (l->info[n].part_groups[i] == LOWER_NONE) continue;
        lower_root root = {.kind = LOWER_ROOT_PART, .node = n, .part = i};
        root.space = *ml_graph_type(l->g, ml_graph_source(l->g, n, i));
        l->info[n].part_groups[i] = fuse_place(l, &root);
    }
}

static void mark_read(lowering *l, ml_ref n) {
    lower_view view;
    if (views_of(l, n, &view)) l->info[view.base].stored = true;
}

static bool find_pack(lowering *l, ml_ref node, const ml_type *type, lower_group *group,
                      int which) {
    uint32_t cursor = 0, found;
    while ((found = ml_index_next(&l->pack_index, node, &cursor)) != ML_INDEX_NONE) {
        const lower_pack *pack = &l->packs.at[found];
        if (pack->node != node || !ml_type_equal(&l->s->values.at[pack->value].type, type))
            continue;
        group->packed[which] = pack->value;
        group->packers[which] = pack->group;
        return true;
    }
    return false;
}

static uint32_t place_turned(lowering *l, ml_ref node, uint32_t value) {
    lower_group group = {.opaque = true, .turns = true, .node = node, .result = node};
    group.packed[0] = value;
    group.packed[1] = LOWER_NONE;
    uint32_t id = new_group(l, &group);
    fuse_group_dependencies(l, id, seal, l);
    mark_read(l, node);
    return l->last_opaque = id;
}

/* The copy of a product's operand that gemm_plan asks for: one for all products that want it. */
static void place_pack(lowering *l, lower_group *group, int which) {
    const ml_type *type = &group->pack_type[which];
    ml_ref node = gemm_operand(l, group->node, which);
    if (find_pack(l, node, type, group, which)) return;
    lower_root root = {.kind = LOWER_ROOT_PACK, .node = node, .space = *type};
    root.value = views_temporary(l, node, type);
    group->packed[which] = root.value;
    group->packers[which] =
        gemm_turns(l, node, type) ? place_turned(l, node, root.value) : fuse_place(l, &root);
    *ML_PUSH(l->scratch, &l->packs) =
        (lower_pack){.node = node, .value = root.value, .group = group->packers[which]};
    ml_index_add(&l->pack_index, node, l->packs.count - 1);
}

static void place_opaque(lowering *l, ml_ref n) {
    ml_ref product = l->info[n].product ? l->info[n].product : n;
    lower_group group = {.opaque = true, .node = product, .packed = {LOWER_NONE, LOWER_NONE}};
    group.result = n;
    group.bias = l->info[n].bias;
    group.addend = l->info[n].addend;
    group.scale = l->info[n].scale;
    if (ml_graph_node(l->g, product)->op == ML_OP_DOT) gemm_plan(l, &group);
    for (int i = 0; i < 2; i++)
        if (group.packs[i]) place_pack(l, &group, i);
    uint32_t id = new_group(l, &group);
    l->info[n].group = l->last_opaque = id;
    fuse_group_dependencies(l, id, seal, l);
    for (int i = 0; i < ml_graph_node(l->g, product)->source_count; i++) {
        bool packed = i < 2 && group.packed[i] != LOWER_NONE;
        if (!packed && group.gemm != NULL) mark_read(l, gemm_operand(l, product, i));
        if (!packed && group.gemm == NULL) mark_read(l, ml_graph_source(l->g, product, i));
    }
    if (group.bias != 0) mark_read(l, group.bias);
    if (group.addend != 0) mark_read(l, group.addend);
    if (group.scale != 0) mark_read(l, group.scale);
}

void fuse_groups(lowering *l) {
    uint32_t count = 1;
    for (ml_ref n = 1; n < l->count; n++)
        count += l->info[n].role == LOWER_ROOT || l->info[n].role == LOWER_OPAQUE;
    ML_VEC_RESERVE(l->scratch, &l->groups, count);
    (void)ML_PUSH(l->scratch, &l->groups);
    for (ml_ref n = 1; n < l->count; n++) {
        if (!l->info[n].reached) continue;
        int role = l->info[n].role;
        if (role == LOWER_ROOT) place_node(l, n);
        if (role == LOWER_CONCAT) place_parts(l, n);
        if (role == LOWER_OPAQUE && ml_graph_node(l->g, n)->op != ML_OP_OUT) place_opaque(l, n);
    }
}
