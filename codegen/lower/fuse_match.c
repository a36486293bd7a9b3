/* Fitting iteration spaces: which loop of one kernel is which loop of another.
 *
 * Two kernels that read the same tensor at the same places run over that tensor's axes alike. Each
 * axis is a mixed-radix number over digits; where the radices differ, digits are cut (refined)
 * until they agree. */
#include "codegen/lower/lower_internal.h"

#include <string.h>

lower_index fuse_index_zero(void) {
    lower_index zero;
    memset(&zero, 0, sizeof zero);
    zero.inst = ML_NO_INST;
    return zero;
}

bool fuse_index_equal(const lower_index *a, const lower_index *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

bool fuse_available(const lower_root *root) {
    if (root->kind == LOWER_ROOT_PART || root->kind == LOWER_ROOT_PACK) return false;
    return root->kind != LOWER_ROOT_REDUCE || root->scope == ML_SCOPE_ROW;
}

void fuse_result_index(const ml_graph *g, const lower_root *root, lower_index *out) {
    const ml_type *type = ml_graph_type(g, root->node);
    for (int i = 0; i < type->rank; i++)
        out[i] = root->index[ml_type_find(&root->space, type->axis[i])];
}

void fuse_refine_index(lower_index *index, int digit, int64_t inner, int digits) {
    for (int d = digits; d > digit + 1; d--) index->coef[d] = index->coef[d - 1];
    index->coef[digit + 1] = index->coef[digit];
    index->coef[digit] *= inner;
}

static void refine_sizes(int64_t *size, int *digits, int digit, int64_t inner) {
    for (int d = *digits; d > digit + 1; d--) size[d] = size[d - 1];
    size[digit + 1] = inner;
    size[digit] /= inner;
    ++*digits;
}

/* Cut `digit` into an outer one and an inner one of size `inner`. */
void fuse_refine(lower_group *group, int digit, int64_t inner) {
    for (uint32_t r = 0; r < group->roots.count; r++)
        for (int i = 0; i < group->roots.at[r].space.rank; i++)
            fuse_refine_index(&group->roots.at[r].index[i], digit, inner, group->digits);
    for (uint32_t a = 0; a < group->accesses.count; a++)
        for (int i = 0; i < group->accesses.at[a].rank; i++)
            fuse_refine_index(&group->accesses.at[a].index[i], digit, inner, group->digits);
    refine_sizes(group->size, &group->digits, digit, inner);
    if (digit < group->row_digits) group->row_digits++;
}

lower_index fuse_refined_index(const lower_index *index, const lower_match *match, int which) {
    lower_index refined = *index;
    int digits = match->digits[which] - match->refinements[which];
    for (int i = 0; i < match->refinements[which]; i++)
        fuse_refine_index(&refined, match->refined[which][i], match->inner[which][i], digits + i);
    return refined;
}

lower_index fuse_map_index(const lower_index *index, const lower_match *match) {
    lower_index from = fuse_refined_index(index, match, 1), to = fuse_index_zero();
    to.offset = from.offset;
    to.scale = from.scale;
    to.inst = from.inst;
    for (int d = 0; d < match->digits[1]; d++)
        if (from.coef[d] != 0 && match->map[d] >= 0) to.coef[match->map[d]] += from.coef[d];
    return to;
}

/* The digits of a mixed-radix number, innermost first; -1 where the index is none. */
int fuse_digits_of(const lower_index *index, const int64_t *size, int digits, int *out) {
    int count = 0;
    int64_t next = 1;
    if (index->inst != ML_NO_INST) return -1;
    for (;;) {
        int found = -1, rest = 0;
        for (int d = 0; d < digits; d++) {
            if (index->coef[d] == next && size[d] > 1) found = d;
            if (index->coef[d] != 0) rest++;
        }
        if (found < 0) return rest == count ? count : -1;
        out[count++] = found;
        next *= size[found];
    }
}

static bool refine_match(lower_match *m, int which, int digit, int64_t inner) {
    int count = m->refinements[which];
    if (m->digits[which] == ML_MAX_LOOPS || count == ML_MAX_LOOPS) return false;
    m->refined[which][count] = digit;
    m->inner[which][count] = inner;
    m->refinements[which]++;
    for (int d = 0; d < m->digits[1]; d++)
        if (which == 0 && m->map[d] > digit) m->map[d]++;
    if (which == 1) {
        for (int d = m->digits[1]; d > digit + 1; d--) m->map[d] = m->map[d - 1];
        m->map[digit + 1] = -1;
    }
    refine_sizes(m->size[which], &m->digits[which], digit, inner);
    return true;
}

static bool taken(const lower_match *m, int digit) {
    for (int d = 0; d < m->digits[1]; d++)
        if (m->map[d] == digit) return true;
    return false;
}

typedef enum { PAIR_NO, PAIR_YES, PAIR_AGAIN } pair_result;

/* One step along an axis: identify digit a of `to` with digit b of `from`, or cut one of them. */
static pair_result pair_digits(lower_match *m, int a, int b) {
    int64_t size_a = m->size[0][a], size_b = m->size[1][b];
    if (m->map[b] >= 0) return m->map[b] == a ? PAIR_YES : PAIR_NO;
    if (taken(m, a)) return PAIR_NO;
    if (size_a == size_b) {
        m->map[b] = a;
        return PAIR_YES;
    }
    if (size_a % size_b == 0) return refine_match(m, 0, a, size_b) ? PAIR_AGAIN : PAIR_NO;
    if (size_b % size_a == 0) return refine_match(m, 1, b, size_a) ? PAIR_AGAIN : PAIR_NO;
    return PAIR_NO;
}

/* Indices with holes (a slice of a split axis): digits of equal size and coefficient are the same.
 */
static bool pair_by_coefficient(lower_match *m, const lower_index *a, const lower_index *b) {
    int map[ML_MAX_LOOPS];
    for (int d = 0; d < m->digits[1]; d++) {
        map[d] = -1;
        for (int t = 0; t < m->digits[0] && b->coef[d] != 0; t++)
            if (a->coef[t] == b->coef[d] && m->size[0][t] == m->size[1][d]) map[d] = t;
        if (b->coef[d] == 0 || map[d] < 0) continue;
        if (m->map[d] >= 0 ? m->map[d] != map[d] : taken(m, map[d])) return false;
        for (int other = 0; other < d; other++)
            if (map[other] == map[d]) return false;
    }
    for (int d = 0; d < m->digits[1]; d++)
        if (map[d] >= 0) m->map[d] = map[d];
    return true;
}

static bool pair_axis(lower_match *m, const lower_index *to, const lower_index *from) {
    if (to->inst != ML_NO_INST || from->inst != ML_NO_INST) return true;
    if (to->offset != from->offset) return false;
    for (;;) {
        lower_index a = fuse_refined_index(to, m, 0), b = fuse_refined_index(from, m, 1);
        int da[ML_MAX_LOOPS], db[ML_MAX_LOOPS];
        int count_a = fuse_digits_of(&a, m->size[0], m->digits[0], da);
        int count_b = fuse_digits_of(&b, m->size[1], m->digits[1], db);
        if (count_a < 0 || count_b < 0) return pair_by_coefficient(m, &a, &b);
        pair_result result = PAIR_YES;
        int i = 0;
        for (; i < count_a && i < count_b && result == PAIR_YES; i++)
            result = pair_digits(m, da[i], db[i]);
        if (result == PAIR_NO) return false;
        if (result == PAIR_YES) return count_a == count_b;
    }
}

static bool pair_access(lower_match *m, const lower_index *to, const lower_index *from, int rank) {
    lower_match before = *m;
    for (int i = 0; i < rank; i++) {
        if (pair_axis(m, &to[i], &from[i])) continue;
        *m = before;
        return false;
    }
    return true;
}

static int unmapped(const lower_match *m) {
    int count = 0;
    for (int d = 0; d < m->digits[1]; d++) count += m->map[d] < 0;
    return count;
}

/* What no common tensor decides: the remaining digits in order, where their sizes agree. */
static void pair_rest(lower_match *m) {
    int to = 0;
    for (int d = 0; d < m->digits[1]; d++) {
        if (m->map[d] >= 0) continue;
        while (to < m->digits[0] && (taken(m, to) || m->size[0][to] != m->size[1][d])) to++;
        if (to == m->digits[0]) return;
        m->map[d] = to;
    }
}

bool fuse_match(const ml_graph *g, const lower_group *to, const lower_group *from, bool by_size,
                lower_match *match) {
    memset(match, 0, sizeof *match);
    match->digits[0] = to->digits;
    match->digits[1] = from->digits;
    memcpy(match->size[0], to->size, sizeof to->size);
    memcpy(match->size[1], from->size, sizeof from->size);
    for (int d = 0; d < ML_MAX_LOOPS; d++) match->map[d] = -1;
    /* tensors that `to` computes bind first: they must agree exactly */
    for (uint32_t a = 0; a < from->accesses.count; a++) {
        const lower_access *access = &from->accesses.at[a];
        if (access->partial) continue;
        for (uint32_t r = 0; r < to->roots.count; r++) {
            const lower_root *root = &to->roots.at[r];
            if (root->node != access->node || !fuse_available(root)) continue;
            lower_index index[ML_MAX_AXES];
            fuse_result_index(g, root, index);
            if (!pair_access(match, index, access->index, access->rank)) return false;
        }
    }
    for (uint32_t a = 0; a < from->accesses.count && unmapped(match) > 0; a++) {
        const lower_access *access = &from->accesses.at[a];
        for (uint32_t t = 0; t < to->accesses.count && unmapped(match) > 0; t++) {
            const lower_access *other = &to->accesses.at[t];
            if (other->node == access->node && other->partial == access->partial)
                pair_access(match, other->index, access->index, access->rank);
        }
    }
    if (by_size) pair_rest(match);
    return true;
}
