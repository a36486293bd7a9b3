/* Rows and columns: how the loops of a kernel are ordered and divided for its reductions. */
#include "codegen/lower/lower_internal.h"
#include "runtime/base/machine.h"

#include <string.h>

enum {
    SMALL_TOTAL = 8192,  /* sums of everything up to that size take one row */
    SMALL_COLUMNS = 256, /* column sums of fewer elements in all need no partial results */
    LEAST_COLUMNS = 128, /* ... of kernels that only sum everything */
    MOST_COLUMNS = 8192,
    LEAST_ROWS = 32,        /* a kernel must keep that many rows to be worth extending by columns */
    C_CHUNKS = 32,          /* more than any laptop's cores; does not depend on the threads */
    CHUNK_WORK = 4096,      /* elements worth a chunk */
    LONG_COLUMNS = 16384,   /* rows so long are cut into many chunks ... */
    LONG_ROWS = 2,          /* ... of so many rows */
    MOST_BYTES = 110 << 10, /* or, if of longer rows a multiprocessor has room for one ... */
    ALONE_ROWS = 4,         /* ... of so many */
};

static int64_t product(const lower_group *group, int first, int last) {
    int64_t size = 1;
    for (int d = first; d < last; d++) size *= group->size[d];
    return size;
}

int64_t fuse_rows(const lower_group *group) {
    return product(group, 0, group->committed ? group->row_digits : group->digits);
}

int64_t fuse_columns(const lower_group *group) {
    return product(group, group->committed ? group->row_digits : group->digits, group->digits);
}

/* The most bytes that one tensor has of a row. */
static int64_t bytes_of_row(const lowering *l, const lower_group *group) {
    int most = 0;
    for (uint32_t a = 0; a < group->accesses.count; a++) {
        const lower_access *access = &group->accesses.at[a];
        int bytes = ml_dtypes[ml_graph_type(l->g, access->node)->dtype].bytes;
        bool by_row = false, by_column = false;
        for (int i = 0; i < access->rank; i++)
            for (int d = 0; d < group->digits; d++)
                if (access->index[i].coef[d] != 0) {
                    by_row |= d < group->row_digits;
                    by_column |= d >= group->row_digits;
                }
        if (by_row && by_column && bytes > most) most = bytes;
    }
    return most * fuse_columns(group);
}

/* Whether most chunks wait for their turn: multiprocessors differ in what memory gives them, and of
 * long rows each block has a few to work on: some more where a block has its multiprocessor alone,
 * as no other warp works while it waits for its first row. */
static bool has_many_chunks(const lowering *l, const lower_group *group) {
    return l->target->kind == ML_TARGET_CUDA && group->committed &&
           fuse_columns(group) >= LONG_COLUMNS;
}

/* Sums of columns take so many registers that a multiprocessor holds one block, and each chunk's
 * are written and read again: there is one for each multiprocessor. */
int64_t fuse_chunks(const lowering *l, const lower_group *group, ml_scope scope) {
    int64_t rows = fuse_rows(group), columns = fuse_columns(group);
    int64_t processors = l->target->multiprocessors > 0 ? l->target->multiprocessors
                                                        : ml_machine_planned.multiprocessors;
    int64_t most = l->target->kind != ML_TARGET_CUDA ? C_CHUNKS
                   : scope == ML_SCOPE_COLUMN        ? processors
                                                     : 2 * processors;
    if (scope == ML_SCOPE_ALL && has_many_chunks(l, group)) {
        int64_t each = bytes_of_row(l, group) <= MOST_BYTES ? LONG_ROWS : ALONE_ROWS;
        return (rows + each - 1) / each;
    }
    int64_t worth = rows * columns / CHUNK_WORK;
    /* partial results must stay small beside what is read */
    if (worth > rows / 8) worth = rows / 8;
    if (worth > most) worth = most;
    if (worth > rows) worth = rows;
    return worth < 1 ? 1 : worth;
}

static void reorder_indices(lower_index *index, int count, const int *order, int digits) {
    for (int i = 0; i < count; i++) {
        lower_index old = index[i];
        for (int d = 0; d < digits; d++) index[i].coef[d] = old.coef[order[d]];
    }
}

void fuse_reorder(lower_group *group, const int *order) {
    int64_t size[ML_MAX_LOOPS] = {0};
    for (int d = 0; d < group->digits; d++) size[d] = group->size[order[d]];
    memcpy(group->size, size, sizeof size);
    for (uint32_t r = 0; r < group->roots.count; r++)
        reorder_indices(group->roots.at[r].index, group->roots.at[r].space.rank, order,
                        group->digits);
    for (uint32_t a = 0; a < group->accesses.count; a++)
        reorder_indices(group->accesses.at[a].index, group->accesses.at[a].rank, order,
                        group->digits);
}

/* Digits that only axes which the root reduces use (bit d), mapped through `match` if there is one.
 */
static unsigned root_digits(const ml_graph *g, const lower_root *root, bool reduced,
                            const lower_match *match) {
    const ml_type *type = ml_graph_type(g, root->node);
    bool reduces = root->kind == LOWER_ROOT_REDUCE || root->kind == LOWER_ROOT_FINISH;
    unsigned mask = 0;
    for (int i = 0; i < root->space.rank; i++) {
        bool outer_digits = !reduces || ml_type_find(type, root->space.axis[i]) >= 0;
        if (outer_digits == reduced) continue;
        lower_index index = match ? fuse_map_index(&root->index[i], match) : root->index[i];
        for (int d = 0; d < ML_MAX_LOOPS; d++)
            if (index.coef[d] != 0) mask |= 1u << d;
    }
    return mask;
}

/* Digits by the strides of the largest tensor that is read, largest stride first; `order`: what
 * they were before. */
static void order_by_memory(lowering *l, lower_group *group, int *order) {
    int64_t best[ML_MAX_LOOPS] = {0}, most = -1;
    for (uint32_t a = 0; a < group->accesses.count; a++) {
        const lower_access *access = &group->accesses.at[a];
        int64_t stride[ML_MAX_LOOPS] = {0}, elements = 1;
        lower_layout scratch;
        if (access->partial) continue;
        const lower_layout *layout = views_layout(l, access->node, &scratch);
        for (int d = 0; d < group->digits; d++) {
            for (int i = 0; i < access->rank; i++)
                stride[d] += layout->stride[i] * access->index[i].coef[d];
            if (stride[d] != 0) elements *= group->size[d];
        }
        if (elements <= most) continue;
        most = elements;
        memcpy(best, stride, sizeof best);
    }
    for (int d = 0; d < group->digits; d++) { /* insertion sort: stable */
        int at = d;
        for (; at > 0 && best[order[at - 1]] < best[d] && best[order[at - 1]] != 0; at--)
            order[at] = order[at - 1];
        order[at] = d;
    }
    fuse_reorder(group, order);
}

/* Those of `first` in order, then the others. */
static int partition(int digits, unsigned first, int *order) {
    int count = 0, rows;
    for (int d = 0; d < digits; d++)
        if (first >> d & 1) order[count++] = d;
    rows = count;
    for (int d = 0; d < digits; d++)
        if (!(first >> d & 1)) order[count++] = d;
    return rows;
}

/* How many leading digits are rows when everything is summed up. */
static int rows_for_all(const int64_t *size, int digits) {
    int rows = digits;
    int64_t columns = 1;
    while (rows > 1 && columns < LEAST_COLUMNS && columns * size[rows - 1] <= MOST_COLUMNS)
        columns *= size[--rows];
    return rows;
}

/* A single long loop is cut so that its inner part can be vectorized. */
static void cut_single_loop(lower_group *group) {
    if (group->digits != 1) return;
    for (int64_t inner = 4096; inner >= 64; inner--) {
        if (group->size[0] % inner != 0 || group->size[0] / inner < 2) continue;
        fuse_refine(group, 0, inner);
        return;
    }
}

/* Each axis of the result must be contiguous digits in the order of the partial results' memory.
 * `match` maps the root into a kernel whose digits have these sizes; NULL: it is there already. */
static bool axes_adjacent(const lower_match *match, const lower_root *root, const ml_type *type,
                          const int *order, const int64_t *size, int digits) {
    int position[ML_MAX_LOOPS] = {0}, found[ML_MAX_LOOPS];
    for (int i = 0; i < digits; i++) position[order[i]] = i;
    for (int i = 0; i < root->space.rank; i++) {
        if (ml_type_find(type, root->space.axis[i]) < 0) continue;
        lower_index index = match ? fuse_map_index(&root->index[i], match) : root->index[i];
        int count = fuse_digits_of(&index, size, digits, found);
        if (count < 0) return false;
        for (int d = 1; d < count; d++)
            if (position[found[d]] != position[found[d - 1]] - 1) return false;
    }
    return true;
}

/* The digits of the result's axes, axis by axis, in place of the memory's order. */
static void order_by_axes(const lower_group *group, const ml_type *type, int rows, int *order) {
    const lower_root *root = &group->roots.at[0];
    int count = rows, found[ML_MAX_LOOPS];
    for (int i = 0; i < root->space.rank; i++) {
        if (ml_type_find(type, root->space.axis[i]) < 0) continue;
        int digits = fuse_digits_of(&root->index[i], group->size, group->digits, found);
        while (digits > 0) order[count++] = found[--digits];
    }
}

/* The order of a column's terms does not depend on what else a kernel computes: rows whose columns
 * are summed up come in the order of the sum's axes, whatever that of memory is. `rank`: by digit,
 * its place in that order. */
static void order_rows_by_axes(int rows, const int *rank, int *order) {
    for (int i = 1; i < rows; i++)
        for (int at = i; at > 0 && rank[order[at - 1]] > rank[order[at]]; at--) {
            int other = order[at];
            order[at] = order[at - 1], order[at - 1] = other;
        }
}

static bool rows_follow_axes(int rows, const int *rank, const int *order) {
    for (int i = 1; i < rows; i++)
        if (rank[order[i - 1]] > rank[order[i]]) return false;
    return true;
}

/* Divide the loops of a kernel with this one reduction. */
static void commit_reduction(lowering *l, lower_group *group) {
    lower_root *root = &group->roots.at[0];
    bool argmax = ml_graph_node(l->g, root->node)->op == ML_OP_ARGMAX;
    root->scope = ML_SCOPE_ROW;
    if (root_digits(l->g, root, true, NULL) == 0) return; /* one element: elementwise */
    int before[ML_MAX_LOOPS];
    for (int d = 0; d < ML_MAX_LOOPS; d++) before[d] = d;
    if (!argmax && root->kind == LOWER_ROOT_REDUCE) order_by_memory(l, group, before);
    unsigned reduced = root_digits(l->g, root, true, NULL);
    unsigned outer_digits = root_digits(l->g, root, false, NULL), first = outer_digits;
    int64_t total = product(group, 0, group->digits);
    int order[ML_MAX_LOOPS];
    group->committed = true;
    bool partial = root->kind == LOWER_ROOT_REDUCE && !argmax && !l->target->no_fuse &&
                   ml_graph_type(l->g, root->node)->rank < ML_MAX_AXES;
    if (partial && outer_digits == 0 && total > SMALL_TOTAL) {
        cut_single_loop(group);
        root->scope = ML_SCOPE_ALL;
        group->row_digits = rows_for_all(group->size, group->digits);
        return;
    }
    if (partial && outer_digits != 0 && (outer_digits >> (group->digits - 1) & 1) &&
        total > SMALL_COLUMNS) {
        root->scope = ML_SCOPE_COLUMN;
        first = reduced;
    }
    group->row_digits = partition(group->digits, first, order);
    const ml_type *type = ml_graph_type(l->g, root->node);
    if (root->scope == ML_SCOPE_COLUMN &&
        !axes_adjacent(NULL, root, type, order, group->size, group->digits))
        order_by_axes(group, type, group->row_digits, order);
    if (root->scope == ML_SCOPE_COLUMN) order_rows_by_axes(group->row_digits, before, order);
    fuse_reorder(group, order);
}

/* The kernel for a root alone as it was found for one that is alike. */
typedef struct {
    lower_group group;
    ml_scope scope;
    lower_index *index;
    uint32_t *number; /* of the nodes of its accesses */
} single;

static void *copy_of(lowering *l, const void *from, size_t bytes) {
    void *copy = ml_arena_alloc(l->scratch, bytes);
    if (bytes > 0) memcpy(copy, from, bytes);
    return copy;
}

static const single *note_single(lowering *l, const lower_group *group) {
    const lower_root *own = &group->roots.at[0];
    const uint32_t count = group->accesses.count;
    single *known = ML_NEW(l->scratch, single);
    known->group = *group;
    known->group.shape = ++l->shapes;
    known->scope = (ml_scope)own->scope;
    known->index = copy_of(l, own->index, sizeof *own->index * own->space.rank);
    known->number = ML_NEW_ARRAY(l->scratch, uint32_t, count + 1);
    lower_access *accesses = copy_of(l, group->accesses.at, sizeof(lower_access) * count);
    known->group.accesses.at = accesses;
    for (uint32_t i = 0; i < count; i++) {
        known->number[i] = l->number[accesses[i].node];
        accesses[i].index = copy_of(l, accesses[i].index, sizeof(lower_index) * accesses[i].rank);
    }
    alike_add(l, &l->singles, known);
    return known;
}

/* `own` is of the root in hand. Kernels that are alike share the arrays of their indices. */
static lower_group single_again(lowering *l, const single *known, lower_root *own) {
    lower_group group = known->group;
    group.node = own->node;
    group.roots.at = own;
    own->scope = (uint8_t)known->scope;
    own->index = known->index;
    ml_arena_reset(l->work);
    group.accesses.at = ML_NEW_ARRAY(l->work, lower_access, group.accesses.count);
    for (uint32_t i = 0; i < group.accesses.count; i++) {
        group.accesses.at[i] = known->group.accesses.at[i];
        group.accesses.at[i].node = l->numbered.at[known->number[i] - 1];
    }
    return group;
}

static lower_group find_single(lowering *l, lower_root *own) {
    lower_group group;
    memset(&group, 0, sizeof group);
    group.node = own->node;
    group.roots.at = own;
    group.roots.count = group.roots.capacity = 1;
    for (int i = 0; i < own->space.rank; i++) {
        own->index[i] = fuse_index_zero();
        if (own->space.size[i] == 1) continue;
        own->index[i].coef[group.digits] = 1;
        group.size[group.digits++] = own->space.size[i];
    }
    lower_builder b;
    for (;;) {
        eval_begin(&b, l, &group);
        eval_root(&b, own);
        if (b.refine_digit < 0) break;
        fuse_refine(&group, b.refine_digit, b.refine_inner);
    }
    group.accesses.at = b.access.at;
    group.accesses.count = group.accesses.capacity = b.access.count;
    group.insts = (int)b.inst.count + 1;
    if (own->kind == LOWER_ROOT_REDUCE || own->kind == LOWER_ROOT_FINISH)
        commit_reduction(l, &group);
    return group;
}

lower_group fuse_single(lowering *l, const lower_root *root) {
    lower_root *own = &l->single; /* of the one root in hand at a time */
    *own = *root;
    own->index = NULL;
    alike_begin(l);
    alike_root(l, own);
    const single *known = alike_find(l, &l->singles);
    if (known == NULL) {
        lower_index index[ML_MAX_AXES + 1];
        own->index = index;
        lower_group group = find_single(l, own);
        known = note_single(l, &group);
    }
    return single_again(l, known, own);
}

/* The single reduced axis must be all columns, in order: its index is the column's number. */
static bool argmax_fits(const lower_match *match, const lower_root *root, const ml_type *type,
                        int rows, int digits) {
    int found[ML_MAX_LOOPS];
    for (int i = 0; i < root->space.rank; i++) {
        if (ml_type_find(type, root->space.axis[i]) >= 0) continue;
        lower_index index = fuse_map_index(&root->index[i], match);
        int count = fuse_digits_of(&index, match->size[0], match->digits[0], found);
        if (count != digits - rows) return false;
        for (int d = 0; d < count; d++)
            if (found[d] != digits - 1 - d) return false;
    }
    return true;
}

static bool scope_of(const lowering *l, unsigned outer_digits, unsigned reduced, unsigned rows,
                     unsigned columns, const lower_root *root, ml_scope *scope) {
    bool finish = root->kind == LOWER_ROOT_FINISH;
    bool argmax = ml_graph_node(l->g, root->node)->op == ML_OP_ARGMAX;
    *scope = ML_SCOPE_ROW;
    if (outer_digits == rows && reduced == columns) return true;
    if (finish || argmax || ml_graph_type(l->g, root->node)->rank >= ML_MAX_AXES) return false;
    *scope = ML_SCOPE_COLUMN;
    if (outer_digits == columns && reduced == rows && outer_digits != 0) return true;
    *scope = ML_SCOPE_ALL;
    return outer_digits == 0 && (reduced == (rows | columns) || reduced == rows);
}

/* Rows and columns of an elementwise kernel that a reduction joins. */
static int divide_elementwise(const lower_match *m, unsigned outer_digits, unsigned reduced,
                              int *order) {
    int digits = m->digits[0];
    if (outer_digits == 0) {
        partition(digits, reduced, order);
        int64_t total = 1;
        for (int d = 0; d < digits; d++) total *= m->size[0][d];
        return total <= SMALL_TOTAL / 4 ? 0 : rows_for_all(m->size[0], digits);
    }
    bool innermost = reduced >> (digits - 1) & 1;
    return partition(digits, innermost ? outer_digits : reduced, order);
}

static unsigned rows_of(const int *order, int rows) {
    unsigned mask = 0;
    for (int i = 0; i < rows; i++) mask |= 1u << order[i];
    return mask;
}

static unsigned first_bits(int count) {
    return (1u << count) - 1;
}

/* New loops must be inside of the old ones, as rows are in memory. */
static bool extends_inwards(const lower_match *match) {
    bool inner = false;
    for (int d = 0; d < match->digits[1]; d++) {
        if (match->map[d] >= 0 && inner) return false;
        inner = inner || match->map[d] < 0;
    }
    return true;
}

/* Whether `from`'s only root can run in the loops of `to`, of which some may be new (unmapped). */
bool fuse_joins_space(lowering *l, const lower_group *to, const lower_group *from,
                      const lower_match *match, bool consumes, int *order, int *row_digits,
                      ml_scope *scope) {
    const lower_root *root = &from->roots.at[0];
    const ml_type *type = ml_graph_type(l->g, root->node);
    lower_match full = *match; /* with unmapped digits appended to `to` */
    int old = match->digits[0];
    for (int d = 0; d < full.digits[1]; d++) {
        if (full.map[d] >= 0) continue;
        if (full.digits[0] == ML_MAX_LOOPS) return false;
        full.map[d] = full.digits[0];
        full.size[0][full.digits[0]++] = full.size[1][d];
    }
    bool extends = full.digits[0] > old;
    unsigned outer_digits = root_digits(l->g, root, false, &full);
    unsigned reduced = root_digits(l->g, root, true, &full);
    unsigned all = first_bits(full.digits[0]);
    int rank[ML_MAX_LOOPS] = {0};
    for (int d = 0; d < full.digits[1]; d++) rank[full.map[d]] = d;
    *scope = ML_SCOPE_ROW;
    for (int d = 0; d < full.digits[0]; d++) order[d] = d;
    *row_digits = to->row_digits;
    if (to->committed) {
        for (int i = 0; i < match->refinements[0]; i++)
            if (match->refined[0][i] < *row_digits) ++*row_digits;
    } else if (extends) {
        int64_t rows = 1;
        for (int d = 0; d < old; d++) rows *= full.size[0][d];
        if (!consumes || rows < LEAST_ROWS || !extends_inwards(match)) return false;
        *row_digits = old;
    } else if (reduced != 0) {
        if ((outer_digits | reduced) != all) return false;
        *row_digits = divide_elementwise(&full, outer_digits, reduced, order);
        if (outer_digits != 0 && !(reduced & ~rows_of(order, *row_digits)))
            order_rows_by_axes(*row_digits, rank, order);
    } else {
        *row_digits = -1; /* stays elementwise */
        return outer_digits == all;
    }
    if (to->committed && extends) return false;
    unsigned rows = rows_of(order, *row_digits);
    if (reduced == 0)
        return outer_digits == all || (outer_digits == rows && (rows != 0 || all == 0 || consumes));
    if (!scope_of(l, outer_digits, reduced, rows, all & ~rows, root, scope)) return false;
    if (*scope == ML_SCOPE_COLUMN &&
        (!axes_adjacent(&full, root, type, order, full.size[0], full.digits[0]) ||
         !rows_follow_axes(*row_digits, rank, order)))
        return false;
    if (*scope == ML_SCOPE_COLUMN && to->chunks > 0 && has_many_chunks(l, to)) return false;
    if (ml_graph_node(l->g, root->node)->op == ML_OP_ARGMAX)
        return argmax_fits(&full, root, type, *row_digits, full.digits[0]);
    return true;
}
