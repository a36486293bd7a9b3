/* CONCATs that share the memory of what they are computed of: queries and keys turned by their
 * positions (RoPE) take the place of those that a product left side by side with the values, which
 * else would keep all three in memory until the backward pass.
 *
 * A CONCAT is laid over the parts of a product's (or kernel's) result that its own kernel reads,
 * each element over one that the same iteration reads and no other. Nothing else may read them, and
 * no two CONCATs share them. It happens between the choice of groups and of their memory: nothing
 * has a value yet. */
#include "codegen/lower/lower_internal.h"

#include <string.h>

/* What is stored in `of`, within each of its rows of `pitch` elements: elements low .. high. */
typedef struct {
    int64_t low, high;
} columns;

typedef struct {
    ml_ref node, over;
    uint32_t group, before; /* before: 1 + the overlay before it over the same; 0: none */
    int64_t pitch;
    columns columns;
    lower_layout layout;
    bool fits;
} overlay;

typedef struct {
    lowering *l;
    ML_VEC(overlay) overlays;
    uint32_t *last; /* by node: 1 + the last overlay over it; 0: none */
} overlays;

/* The elements of a strided box; whole rows where that is not known. */
static columns columns_of(int64_t pitch, int64_t offset, const int64_t *stride, const int64_t *size,
                          int rank) {
    columns whole = {0, pitch - 1}, c = {offset % pitch, offset % pitch};
    for (int i = 0; i < rank; i++) {
        if (size[i] == 1 || stride[i] % pitch == 0) continue;
        if (stride[i] < 0) return whole;
        c.high += stride[i] * (size[i] - 1);
    }
    return offset < 0 || c.high >= pitch ? whole : c;
}

static bool meet(const columns *a, const columns *b) {
    return a->low <= b->high && b->low <= a->high;
}

static ml_ref holder_of(lowering *l, ml_ref n) {
    lower_layout scratch;
    return views_layout(l, n, &scratch)->holder;
}

/* An access's address over the group's digits; false where some axis is computed. */
static bool address_of(lowering *l, const lower_group *group, const lower_access *access,
                       int64_t *offset, int64_t *coef) {
    lower_layout scratch;
    const lower_layout *layout = views_layout(l, access->node, &scratch);
    memset(coef, 0, sizeof(int64_t) * ML_MAX_LOOPS);
    *offset = layout->offset;
    for (int i = 0; i < access->rank; i++) {
        if (access->index[i].inst != ML_NO_INST) return false;
        *offset += layout->stride[i] * access->index[i].offset;
        for (int d = 0; d < group->digits; d++)
            coef[d] += layout->stride[i] * access->index[i].coef[d];
    }
    return true;
}

/* Whether only routines read n that take their operands with any strides. */
static bool serves_routines(const lowering *l, ml_ref n) {
    bool any = false;
    for (uint32_t i = l->first_user[n]; i < l->first_user[n + 1]; i++) {
        ml_ref user = l->user[i];
        int op = ml_graph_node(l->g, user)->op;
        if (!l->info[user].reached) continue;
        bool moves = ml_op_is(op, ML_RELABEL | ML_BIJECTIVE);
        if (!lower_routines[op].any_strides &&
            (!moves || lower_in_memory(l, user) || !serves_routines(l, user)))
            return false;
        any = true;
    }
    return any;
}

/* The one kernel that copies all parts, element by element; 0: none. */
static uint32_t group_of(const lowering *l, ml_ref n) {
    const lower_info *info = &l->info[n];
    int count = ml_graph_node(l->g, n)->source_count;
    for (int i = 0; i < count; i++)
        if (info->part_groups[i] == LOWER_NONE || info->part_groups[i] != info->part_groups[0])
            return 0;
    const lower_group *group = &l->groups.at[info->part_groups[0]];
    return group->opaque || group->committed || group->chunks > 0 ? 0 : info->part_groups[0];
}

/* Where part `part` starts along the CONCAT's axis. */
static int64_t part_start(const lowering *l, ml_ref n, int part) {
    ml_axis axis = (ml_axis)ml_graph_args(l->g, n)[0];
    int64_t at = 0;
    for (int i = 0; i < part; i++) {
        const ml_type *type = ml_graph_type(l->g, ml_graph_source(l->g, n, i));
        at += ml_type_size(type, axis);
    }
    return at;
}

/* The address at which a part's root writes if the CONCAT is stored as `layout` says. */
static bool writes_at(const lowering *l, const lower_group *group, const lower_root *root,
                      const lower_layout *layout, int64_t offset, const int64_t *coef) {
    const ml_type *type = ml_graph_type(l->g, root->node);
    ml_axis axis = (ml_axis)ml_graph_args(l->g, root->node)[0];
    int64_t at = layout->offset + part_start(l, root->node, root->part) *
                                      views_axis_stride(type, layout->stride, axis);
    int64_t own[ML_MAX_LOOPS] = {0};
    for (int i = 0; i < root->space.rank; i++) {
        int64_t stride = views_axis_stride(type, layout->stride, root->space.axis[i]);
        at += stride * root->index[i].offset;
        for (int d = 0; d < group->digits; d++) own[d] += stride * root->index[i].coef[d];
    }
    return at == offset && memcmp(own, coef, sizeof *own * (size_t)group->digits) == 0;
}

/* The strides and the offset at which part 0's root would write where the access reads. */
static bool solve(const lowering *l, const lower_group *group, const lower_root *root,
                  int64_t offset, const int64_t *coef, lower_layout *layout) {
    const ml_type *type = ml_graph_type(l->g, root->node);
    for (int i = 0; i < type->rank; i++) {
        const lower_index *index = &root->index[ml_type_find(&root->space, type->axis[i])];
        layout->stride[i] = 0;
        if (index->offset != 0 || index->inst != ML_NO_INST) return false;
        for (int d = 0; d < group->digits && layout->stride[i] == 0; d++)
            if (index->coef[d] != 0) layout->stride[i] = coef[d] / index->coef[d];
    }
    layout->offset = offset;
    return writes_at(l, group, root, layout, offset, coef);
}

/* Whether all elements of the type have places of their own. */
static bool is_injective(const ml_type *type, const int64_t *stride) {
    for (int i = 0; i < type->rank; i++) {
        int64_t reach = 1;
        if (type->size[i] == 1) continue;
        for (int j = 0; j < type->rank; j++)
            if (j != i && type->size[j] > 1 && stride[j] <= stride[i])
                reach += stride[j] * (type->size[j] - 1);
        if (stride[i] < reach) return false;
    }
    return true;
}

static bool may_lie_under(lowering *l, ml_ref under, ml_ref n) {
    const lower_info *info = &l->info[under];
    bool computed = info->role == LOWER_ROOT ||
                    (info->role == LOWER_OPAQUE && ml_graph_node(l->g, under)->op == ML_OP_DOT);
    return computed && !info->pinned && !info->shares && holder_of(l, under) == under &&
           ml_graph_type(l->g, under)->rank > 1 &&
           ml_graph_type(l->g, under)->dtype == ml_graph_type(l->g, n)->dtype;
}

static int64_t pitch_of(lowering *l, ml_ref n) {
    lower_layout scratch;
    return views_layout(l, n, &scratch)->stride[ml_graph_type(l->g, n)->rank - 2];
}

/* Whether each part has a read at its very places, and no other read meets the CONCAT. */
static bool is_read_in_place(lowering *l, const overlay *o) {
    const lower_group *group = &l->groups.at[o->group];
    int parts = 0;
    for (uint32_t r = 0; r < group->roots.count; r++) {
        const lower_root *root = &group->roots.at[r];
        bool found = root->node != o->node || root->kind != LOWER_ROOT_PART;
        parts += !found;
        for (uint32_t a = 0; a < group->accesses.count && !found; a++) {
            int64_t offset, coef[ML_MAX_LOOPS];
            const lower_access *access = &group->accesses.at[a];
            found = !access->partial && access->node == o->over &&
                    address_of(l, group, access, &offset, coef) &&
                    writes_at(l, group, root, &o->layout, offset, coef);
        }
        if (!found) return false;
    }
    return parts == ml_graph_node(l->g, o->node)->source_count;
}

/* Lay n over what its kernel reads by access `access`, if that fits its first part. */
static bool try_access(lowering *l, overlay *o, const lower_access *access) {
    const lower_group *group = &l->groups.at[o->group];
    const ml_type *type = ml_graph_type(l->g, o->node);
    int64_t offset, coef[ML_MAX_LOOPS];
    if (access->partial || !may_lie_under(l, access->node, o->node)) return false;
    if (!address_of(l, group, access, &offset, coef)) return false;
    o->over = o->layout.holder = access->node;
    for (uint32_t r = 0; r < group->roots.count; r++) {
        const lower_root *root = &group->roots.at[r];
        if (root->kind != LOWER_ROOT_PART || root->node != o->node || root->part != 0) continue;
        if (!solve(l, group, root, offset, coef, &o->layout)) return false;
    }
    o->pitch = pitch_of(l, o->over);
    if (o->pitch < 1 || !is_injective(type, o->layout.stride) || !is_read_in_place(l, o))
        return false;
    o->columns = columns_of(o->pitch, o->layout.offset, o->layout.stride, type->size, type->rank);
    return true;
}

/* Whether another CONCAT takes these columns: one kernel may make both of the same elements. */
static bool is_taken(const overlays *all, const overlay *o) {
    for (uint32_t i = all->last[o->over]; i > 0; i = all->overlays.at[i - 1].before)
        if (meet(&all->overlays.at[i - 1].columns, &o->columns)) return true;
    return false;
}

static void propose(overlays *all, ml_ref n) {
    lowering *l = all->l;
    const lower_info *info = &l->info[n];
    overlay o = {.node = n, .fits = true};
    if (!info->reached || info->role != LOWER_CONCAT || info->pinned || info->layout != 0) return;
    if (info->value != LOWER_NONE || info->storage != LOWER_NONE || !serves_routines(l, n)) return;
    o.group = group_of(l, n);
    if (o.group == 0) return;
    const lower_group *group = &l->groups.at[o.group];
    for (uint32_t a = 0; a < group->accesses.count; a++) {
        if (!try_access(l, &o, &group->accesses.at[a]) || is_taken(all, &o)) continue;
        o.before = all->last[o.over];
        *ML_PUSH(l->scratch, &all->overlays) = o;
        all->last[o.over] = all->overlays.count;
        return;
    }
}

/* Something reads these elements of `holder` in group `id`; `at`: its address, for kernels. */
static void read(overlays *all, uint32_t id, ml_ref holder, int64_t offset, const int64_t *stride,
                 const int64_t *size, int rank, bool known) {
    lowering *l = all->l;
    for (uint32_t i = all->last[holder]; i > 0; i = all->overlays.at[i - 1].before) {
        overlay *o = &all->overlays.at[i - 1];
        if (!o->fits) continue;
        columns c = {0, o->pitch - 1};
        if (known) c = columns_of(o->pitch, offset, stride, size, rank);
        bool own = false;
        const lower_group *group = &l->groups.at[id];
        for (uint32_t r = 0; known && id == o->group && r < group->roots.count; r++) {
            const lower_root *root = &group->roots.at[r];
            own = own || (root->kind == LOWER_ROOT_PART && root->node == o->node &&
                          writes_at(l, group, root, &o->layout, offset, stride));
        }
        o->fits = own || !meet(&c, &o->columns);
    }
}

static void read_by_opaque(overlays *all, uint32_t id, ml_ref n) {
    lowering *l = all->l;
    lower_view view;
    if (n == 0 || !views_of(l, n, &view)) return;
    const ml_type *type = ml_graph_type(l->g, n);
    ml_ref holder = holder_of(l, view.base);
    read(all, id, holder, view.offset, view.stride, type->size, type->rank, true);
}

static void find_readers(overlays *all, uint32_t id) {
    lowering *l = all->l;
    const lower_group *group = &l->groups.at[id];
    for (uint32_t a = 0; a < group->accesses.count; a++) {
        const lower_access *access = &group->accesses.at[a];
        int64_t offset = 0, coef[ML_MAX_LOOPS];
        if (access->partial) continue;
        bool known = address_of(l, group, access, &offset, coef);
        read(all, id, holder_of(l, access->node), offset, coef, group->size, group->digits, known);
    }
    if (!group->opaque) return;
    if (group->turns) {
        read_by_opaque(all, id, group->node);
        return;
    }
    for (int i = 0; i < ml_graph_node(l->g, group->node)->source_count; i++)
        read_by_opaque(all, id, ml_graph_source(l->g, group->node, i));
    read_by_opaque(all, id, group->bias);
    read_by_opaque(all, id, group->scale);
    read_by_opaque(all, id, group->addend);
}

void concat_share_memory(lowering *l) {
    overlays all = {.l = l};
    all.last = ML_NEW_ARRAY(l->scratch, uint32_t, l->count + 1);
    for (ml_ref n = 1; n < l->count; n++) propose(&all, n);
    if (all.overlays.count == 0) return;
    for (uint32_t i = 1; i < l->groups.count; i++) find_readers(&all, i);
    for (uint32_t i = 0; i < all.overlays.count; i++) {
        const overlay *o = &all.overlays.at[i];
        if (!o->fits) continue;
        *ML_PUSH(l->scratch, &l->layouts) = o->layout;
        l->info[o->node].layout = l->layouts.count - 1;
    }
}

/* --- parts that are written in place --- */

static bool writes_strided(lowering *l, ml_ref n, const int64_t *stride) {
    int op = ml_graph_node(l->g, n)->op;
    if (l->info[n].pinned || l->info[n].layout != 0) return false;
    if (op == ML_OP_OUT) op = ml_graph_node(l->g, ml_graph_source(l->g, n, 0))->op;
    if (op == ML_OP_DOT) return l->info[n].role == LOWER_OPAQUE && gemm_result_fits(l, n, stride);
    if (ml_ops[op].op_class == ML_CLASS_COLLECTIVE)
        return views_contiguous(ml_graph_type(l->g, n), stride);
    return op == ML_OP_CONCAT || lower_routines[op].any_strides;
}

static void place_parts(lowering *l, ml_ref n) {
    lower_layout own;
    own = *views_layout(l, n, &own);
    const ml_type *type = ml_graph_type(l->g, n);
    int axis = ml_type_find(type, (ml_axis)ml_graph_args(l->g, n)[0]),
        count = ml_graph_node(l->g, n)->source_count;
    int64_t at = 0;
    l->info[n].part_groups = ML_NEW_ARRAY(l->scratch, uint32_t, count);
    for (int i = 0; i < count; i++) {
        ml_ref part = ml_graph_source(l->g, n, i);
        const ml_type *part_type = ml_graph_type(l->g, part);
        int64_t stride[ML_MAX_AXES] = {0};
        for (int a = 0; a < part_type->rank; a++)
            stride[a] = views_axis_stride(type, own.stride, part_type->axis[a]);
        ml_ref maker = views_producer(l, part, stride);
        bool in_place = maker != 0 && writes_strided(l, maker, stride);
        l->info[n].part_groups[i] = in_place ? LOWER_NONE : 0;
        if (in_place) {
            lower_layout *layout = ML_PUSH(l->scratch, &l->layouts);
            layout->holder = own.holder;
            layout->offset = own.offset + at * own.stride[axis];
            memcpy(layout->stride, stride, sizeof stride);
            l->info[maker].layout = l->layouts.count - 1;
        }
        at += ml_type_size(part_type, type->axis[axis]);
    }
}

void concat_place_parts(lowering *l) {
    if (l->layouts.count == 0) (void)ML_PUSH(l->scratch, &l->layouts);
    for (ml_ref n = l->count - 1; n > 0; n--) /* outer ones first */
        if (l->info[n].reached && l->info[n].role == LOWER_CONCAT) place_parts(l, n);
}
