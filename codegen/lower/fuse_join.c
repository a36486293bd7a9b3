/* Joining: whether a root's own kernel fits into another, and what that becomes.
 *
 * Layers repeat: of a thousand layers the same roots meet the same kernels. What two kernels become
 * follows from their shapes, which are all but their nodes, and from which of their nodes are the
 * same. So each such meeting is worked out once, and for others that are alike only the nodes are
 * put in their places. Kernels of one shape share the arrays of their indices, which nothing
 * changes. */
#include <string.h>

#include "codegen/lower/lower_internal.h"

enum {
    KERNEL_OPERANDS = 40, /* tensors a kernel touches, at most (of ML_MAX_OPERANDS) */
    KERNEL_INSTS = 700,
    KERNEL_PHASES = 5,
    SHARED_PART = 4, /* a shared tensor counts from a quarter of the root's space */
};

const lower_root *fuse_find_available(const lower_group *group, const lower_access *access) {
    if (access->partial) return NULL;
    for (uint32_t r = 0; r < group->roots.count; r++)
        if (group->roots.at[r].node == access->node && fuse_available(&group->roots.at[r]))
            return &group->roots.at[r];
    return NULL;
}

static const lower_access *find_access(const lower_group *group, const lower_access *access) {
    for (uint32_t a = 0; a < group->accesses.count; a++)
        if (group->accesses.at[a].node == access->node &&
            group->accesses.at[a].partial == access->partial)
            return &group->accesses.at[a];
    return NULL;
}

static int64_t access_elements(const lower_group *group, const lower_access *access) {
    int64_t elements = 1;
    for (int d = 0; d < group->digits; d++)
        for (int i = 0; i < access->rank; i++)
            if (access->index[i].coef[d] != 0) {
                elements *= group->size[d];
                break;
            }
    return elements;
}

/* Elements that need not be read again; *consumes: a result of `to` is used. */
static int64_t shared_elements(const lower_group *to, const lower_group *from, bool *consumes) {
    int64_t shared = 0, space = 1;
    for (int d = 0; d < from->digits; d++) space *= from->size[d];
    *consumes = false;
    for (uint32_t a = 0; a < from->accesses.count; a++) {
        const lower_access *access = &from->accesses.at[a];
        int64_t elements = access_elements(from, access);
        if (fuse_find_available(to, access)) {
            *consumes = true;
            shared += 2 * elements;
        } else if (elements * SHARED_PART >= space && find_access(to, access)) {
            shared += elements;
        }
    }
    return shared;
}

/* Everything that the root reads from `to` must be there at the same indices. */
static bool indices_agree(const lowering *l, const lower_group *to, const lower_group *from,
                          const lower_match *match) {
    for (uint32_t a = 0; a < from->accesses.count; a++) {
        const lower_access *access = &from->accesses.at[a];
        const lower_root *root = fuse_find_available(to, access);
        if (root == NULL) continue;
        lower_index result[ML_MAX_AXES];
        fuse_result_index(l->g, root, result);
        for (int i = 0; i < access->rank; i++) {
            lower_index there = fuse_refined_index(&result[i], match, 0);
            lower_index here = fuse_map_index(&access->index[i], match);
            if (access->index[i].inst != ML_NO_INST || !fuse_index_equal(&there, &here))
                return false;
        }
    }
    return true;
}

/* The phase in which `from`'s root runs inside `to`. */
static int root_phase(const lower_group *to, const lower_group *from) {
    int phase = 0;
    for (uint32_t a = 0; a < from->accesses.count; a++) {
        const lower_root *root = fuse_find_available(to, &from->accesses.at[a]);
        if (root == NULL) continue;
        int after =
            root->phase + (root->kind == LOWER_ROOT_REDUCE || root->kind == LOWER_ROOT_FINISH);
        if (after > phase) phase = after;
    }
    return phase;
}

static bool limits_fit(const lower_group *to, const lower_group *from) {
    uint32_t operands = to->accesses.count + to->roots.count + 1;
    for (uint32_t a = 0; a < from->accesses.count; a++) {
        const lower_access *access = &from->accesses.at[a];
        operands += !fuse_find_available(to, access) && !find_access(to, access);
    }
    if (root_phase(to, from) > KERNEL_PHASES) return false;
    return operands <= KERNEL_OPERANDS && to->insts + from->insts <= KERNEL_INSTS;
}

/* --- a meeting worked out --- */

/* Of the access `a` of `from`. */
static void take_access(lowering *l, lower_joined *joined, const lower_group *from, uint32_t a,
                        const lower_match *match) {
    lower_group *to = &joined->group;
    const lower_access *access = &from->accesses.at[a];
    if (fuse_find_available(to, access)) return;
    lower_index *index = ML_NEW_ARRAY(l->scratch, lower_index, access->rank + 1);
    for (int i = 0; i < access->rank; i++) index[i] = fuse_map_index(&access->index[i], match);
    for (uint32_t t = 0; t < to->accesses.count; t++) {
        const lower_access *old = &to->accesses.at[t];
        if (old->node == access->node && old->partial == access->partial &&
            memcmp(old->index, index, sizeof *index * access->rank) == 0)
            return;
    }
    lower_access *taken = ML_PUSH(l->scratch, &to->accesses);
    *taken = *access;
    taken->index = index;
    *ML_PUSH(l->scratch, &joined->taken) = a;
}

static void take_root(lowering *l, lower_joined *joined, const lower_group *from,
                      lower_match *match, ml_scope scope) {
    lower_group *to = &joined->group;
    for (int i = 0; i < match->refinements[0]; i++)
        fuse_refine(to, match->refined[0][i], match->inner[0][i]);
    for (int d = 0; d < match->digits[1]; d++) {
        if (match->map[d] >= 0) continue;
        match->map[d] = to->digits;
        to->size[to->digits++] = match->size[1][d];
    }
    for (uint32_t a = 0; a < from->accesses.count; a++) take_access(l, joined, from, a, match);
    int phase = root_phase(to, from);
    lower_root *root = ML_PUSH(l->scratch, &to->roots);
    *root = from->roots.at[0];
    root->index = ML_NEW_ARRAY(l->scratch, lower_index, root->space.rank + 1);
    root->phase = (uint8_t)phase;
    root->scope = (uint8_t)scope;
    for (int i = 0; i < root->space.rank; i++)
        root->index[i] = fuse_map_index(&from->roots.at[0].index[i], match);
    to->insts += from->insts;
}

static void *copy_of(lowering *l, const void *from, size_t bytes) {
    void *copy = ml_arena_alloc(l->scratch, bytes);
    if (bytes > 0) memcpy(copy, from, bytes);
    return copy;
}

/* The group with indices of its own. */
static lower_group group_copy(lowering *l, const lower_group *group) {
    lower_group own = *group;
    own.roots.at = copy_of(l, group->roots.at, sizeof(lower_root) * group->roots.count);
    own.accesses.at = copy_of(l, group->accesses.at, sizeof(lower_access) * group->accesses.count);
    own.roots.capacity = own.roots.count;
    own.accesses.capacity = own.accesses.count;
    for (uint32_t i = 0; i < own.roots.count; i++) {
        lower_root *root = &own.roots.at[i];
        root->index = copy_of(l, root->index, sizeof(lower_index) * root->space.rank);
    }
    for (uint32_t i = 0; i < own.accesses.count; i++) {
        lower_access *access = &own.accesses.at[i];
        access->index = copy_of(l, access->index, sizeof(lower_index) * access->rank);
    }
    return own;
}

static lower_joined *join_new(lowering *l, const lower_group *to, const lower_group *from,
                              bool consumes, bool by_size) {
    lower_joined *joined = ML_NEW(l->scratch, lower_joined);
    lower_match match;
    ml_scope scope;
    int order[ML_MAX_LOOPS], row_digits;
    if (!limits_fit(to, from)) return joined;
    if (!fuse_match(l->g, to, from, by_size || consumes, &match)) return joined;
    if (!indices_agree(l, to, from, &match)) return joined;
    if (!fuse_joins_space(l, to, from, &match, consumes, order, &row_digits, &scope)) return joined;
    joined->fits = true;
    joined->group = group_copy(l, to);
    joined->group.shape = ++l->shapes;
    take_root(l, joined, from, &match, scope);
    if (row_digits >= 0) {
        joined->group.committed = true;
        joined->group.row_digits = row_digits;
        fuse_reorder(&joined->group, order);
    }
    return joined;
}

/* --- meetings that are alike --- */

/* Shapes, and which nodes are the same. */
static void describe_meeting(lowering *l, const lower_group *to, const lower_group *from) {
    const uint64_t computed = (uint64_t)1 << 62, loaded = (uint64_t)2 << 62;
    alike_begin(l);
    alike_word(l, (uint64_t)to->shape << 32 | from->shape);
    alike_word(l, (uint64_t)to->chunks);
    for (uint32_t a = 0; a < from->accesses.count; a++) {
        const lower_access *access = &from->accesses.at[a];
        for (uint32_t r = 0; r < to->roots.count && !access->partial; r++)
            if (to->roots.at[r].node == access->node)
                alike_word(l, computed | (uint64_t)a << 32 | r);
        for (uint32_t t = 0; t < to->accesses.count; t++)
            if (to->accesses.at[t].node == access->node &&
                to->accesses.at[t].partial == access->partial)
                alike_word(l, loaded | (uint64_t)a << 32 | t);
    }
}

lower_meeting *fuse_meeting(lowering *l, const lower_group *to, const lower_group *from) {
    describe_meeting(l, to, from);
    lower_meeting *known = alike_find(l, &l->meetings);
    if (known != NULL) return known;
    known = ML_NEW(l->scratch, lower_meeting);
    known->shared = shared_elements(to, from, &known->consumes);
    alike_add(l, &l->meetings, known);
    return known;
}

const lower_joined *fuse_joined(lowering *l, lower_meeting *meeting, const lower_group *to,
                                const lower_group *from, bool by_size) {
    if (meeting->joined[by_size] == NULL)
        meeting->joined[by_size] = join_new(l, to, from, meeting->consumes, by_size);
    return meeting->joined[by_size];
}

void fuse_take(lowering *l, lower_group *to, const lower_group *from, const lower_joined *joined) {
    const lower_group *like = &joined->group;
    const uint32_t roots = to->roots.count, accesses = to->accesses.count;
    for (uint32_t r = 0; r < roots; r++) to->roots.at[r].index = like->roots.at[r].index;
    for (uint32_t a = 0; a < accesses; a++) to->accesses.at[a].index = like->accesses.at[a].index;
    lower_root *root = ML_PUSH(l->scratch, &to->roots);
    *root = from->roots.at[0];
    root->index = like->roots.at[roots].index;
    root->phase = like->roots.at[roots].phase;
    root->scope = like->roots.at[roots].scope;
    for (uint32_t i = 0; i < joined->taken.count; i++) {
        lower_access *taken = ML_PUSH(l->scratch, &to->accesses);
        *taken = from->accesses.at[joined->taken.at[i]];
        taken->index = like->accesses.at[accesses + i].index;
    }
    to->shape = like->shape;
    to->digits = like->digits;
    memcpy(to->size, like->size, sizeof to->size);
    to->committed = like->committed;
    to->row_digits = like->row_digits;
    to->insts = like->insts;
}
