#include "vm/bindings/input_range.h"

#include "runtime/graph/convert.h"

#include <string.h>

typedef struct {
    const ml_graph *g;
    ml_arena *arena;
    ml_input_ranges *ranges;
    unsigned char *reached; /* by node: the roots depend on it */
    unsigned char *carries; /* by node: its elements may be an input's, with their values */
    const ml_index_use *use;
    int steps; /* nodes that may still be visited: a graph of concats has many paths */
} search;

enum { MAX_STEPS = 10000 };

/* ---- Ops that keep values -------------------------------------------------------------------- */

/* Whether values of the source's dtype that are positions stay what they are; what is too large for
 * the narrower integer is out of range in any case. */
static bool keeps_positions(ml_dtype from, ml_dtype to) {
    if (ml_dtypes[to].kind == ML_KIND_INT) return true;
    return from == to ||
           (ml_dtypes[from].kind == ML_KIND_FLOAT && ml_dtypes[to].kind == ML_KIND_FLOAT &&
            ml_dtypes[to].bytes > ml_dtypes[from].bytes);
}

static bool keeps_values(const ml_graph *g, ml_ref n) {
    ml_op op = ml_graph_node(g, n)->op;
    if (op == ML_OP_CAST)
        return keeps_positions((ml_dtype)ml_graph_type(g, ml_graph_source(g, n, 0))->dtype,
                               (ml_dtype)ml_graph_type(g, n)->dtype);
    return op == ML_OP_STOP_GRADIENT || ml_op_moves(op);
}

static void mark(search *s) {
    const ml_graph *g = s->g;
    const uint32_t count = ml_graph_count(g);
    for (ml_ref n = count; n-- > 1;) {
        const ml_node *node = ml_graph_node(g, n);
        for (int i = 0; s->reached[n] && i < node->source_count; i++)
            s->reached[ml_graph_source(g, n, i)] = 1;
    }
    for (ml_ref n = 1; n < count; n++) {
        if (!s->reached[n]) continue;
        const ml_node *node = ml_graph_node(g, n);
        s->carries[n] = node->op == ML_OP_INPUT;
        for (int i = 0; !s->carries[n] && keeps_values(g, n) && i < node->source_count; i++)
            s->carries[n] = s->carries[ml_graph_source(g, n, i)];
    }
}

/* ---- Elements -------------------------------------------------------------------------------- */

static int64_t coordinate(const ml_type *t, const int64_t *at, ml_axis axis) {
    int i = ml_type_find(t, axis);
    return i < 0 ? 0 : at[i];
}

/* The place in source k of the element of n with these coordinates; -1 where it comes from
 * elsewhere. `skipped` elements along a CONCAT's axis come from the sources before. */
static int64_t place_in_source(const ml_graph *g, ml_ref n, int k, int64_t skipped,
                               const int64_t *at) {
    const ml_node *node = ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    const ml_type *to = ml_graph_type(g, n), *from = ml_graph_type(g, ml_graph_source(g, n, k));
    int64_t place = 0;
    for (int i = 0; i < from->rank; i++) {
        ml_axis axis = from->axis[i];
        int64_t c = node->op == ML_OP_RENAME ? at[i] : coordinate(to, at, axis);
        if (node->op == ML_OP_SLICE && axis == args[0]) c += args[1];
        if (node->op == ML_OP_PAD && axis == args[0]) c -= args[1];
        if (node->op == ML_OP_CONCAT && axis == args[0]) c -= skipped;
        if (node->op == ML_OP_SPLIT && axis == args[0])
            c = coordinate(to, at, (ml_axis)args[1]) * args[4] +
                coordinate(to, at, (ml_axis)args[3]);
        if (node->op == ML_OP_MERGE && (axis == args[0] || axis == args[1])) {
            int64_t inner = ml_type_size(from, (ml_axis)args[1]);
            int64_t merged = coordinate(to, at, (ml_axis)args[2]);
            c = axis == args[0] ? merged / inner : merged % inner;
        }
        if (c < 0 || c >= from->size[i]) return -1;
        place = place * from->size[i] + c;
    }
    return place;
}

/* Which elements of source k arrive in the part of n. */
static const unsigned char *part_of_source(search *s, ml_ref n, int k, const unsigned char *part) {
    const ml_graph *g = s->g;
    const ml_node *node = ml_graph_node(g, n);
    const ml_type *to = ml_graph_type(g, n), *from = ml_graph_type(g, ml_graph_source(g, n, k));
    if (!part && node->op != ML_OP_SLICE) return NULL;
    unsigned char *result = ml_arena_alloc(s->arena, (size_t)ml_type_elements(from));
    int64_t at[ML_MAX_AXES] = {0}, count = ml_type_elements(to), skipped = 0;
    for (int i = 0; node->op == ML_OP_CONCAT && i < k; i++) {
        const ml_type *before = ml_graph_type(g, ml_graph_source(g, n, i));
        skipped += ml_type_size(before, (ml_axis)ml_graph_args(g, n)[0]);
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t place = !part || part[i] ? place_in_source(g, n, k, skipped, at) : -1;
        if (place >= 0) result[place] = 1;
        for (int d = to->rank; d-- > 0;) {
            if (++at[d] < to->size[d]) break;
            at[d] = 0;
        }
    }
    return result;
}

static bool same_part(const search *s, const ml_input_range *a, const unsigned char *part) {
    if (!a->part || !part) return a->part == part;
    int64_t count = ml_type_elements(&ml_graph_input(s->g, a->input)->type);
    return memcmp(a->part, part, (size_t)count) == 0;
}

static void add_range(search *s, uint32_t input, const unsigned char *part) {
    const ml_index_use *use = s->use;
    for (uint32_t i = 0; i < s->ranges->count; i++) {
        const ml_input_range *r = &s->ranges->at[i];
        if (r->input == input && r->use.size == use->size && r->use.ignores == use->ignores &&
            r->use.ignored == use->ignored && same_part(s, r, part))
            return;
    }
    *ML_PUSH(s->arena, s->ranges) = (ml_input_range){input, *use, part};
}

static void follow(search *s, ml_ref n, const unsigned char *part) {
    if (!s->carries[n] || --s->steps < 0) return;
    const ml_node *node = ml_graph_node(s->g, n);
    if (node->op == ML_OP_INPUT) {
        add_range(s, (uint32_t)ml_graph_args(s->g, n)[0], part);
        return;
    }
    for (int k = 0; k < node->source_count; k++) {
        ml_ref source = ml_graph_source(s->g, n, k);
        if (s->carries[source]) follow(s, source, part_of_source(s, n, k, part));
    }
}

/* ---- Uses ------------------------------------------------------------------------------------ */

static void follow_use(search *s, const ml_index_use *use) {
    if (!s->reached[use->node] || !s->carries[use->index]) return;
    s->use = use;
    s->steps = MAX_STEPS;
    follow(s, use->index, NULL);
}

/* A gather, or its gradient where the gather itself is not needed. */
static bool gather_use(const ml_graph *g, ml_ref n, ml_index_use *use) {
    const ml_node *node = ml_graph_node(g, n);
    bool gradient = node->op == ML_OP_SCATTER_ADD && node->flags & ML_NODE_BACKWARD;
    if (node->op != ML_OP_GATHER && !gradient) return false;
    const ml_type *table =
        gradient ? ml_graph_type(g, n) : ml_graph_type(g, ml_graph_source(g, n, 0));
    int at = ml_type_find(table, (ml_axis)ml_graph_args(g, n)[0]);
    *use = (ml_index_use){.node = n,
                          .index = ml_graph_source(g, n, gradient ? 0 : 1),
                          .what = "gather",
                          .size = table->size[at]};
    return true;
}

void ml_find_input_ranges(const ml_graph *g, const ml_roots *roots, const ml_index_uses *declared,
                          ml_arena *arena, ml_input_ranges *ranges) {
    const uint32_t count = ml_graph_count(g);
    search s = {.g = g, .arena = arena, .ranges = ranges};
    s.reached = ml_arena_alloc(arena, count);
    s.carries = ml_arena_alloc(arena, count);
    for (int i = 0; i < roots->output_count; i++) s.reached[roots->outputs[i]] = 1;
    for (int i = 0; i < roots->update_count; i++) s.reached[roots->updates[i].value] = 1;
    mark(&s);
    ml_index_use use;
    for (ml_ref n = 1; n < count; n++)
        if (s.reached[n] && gather_use(g, n, &use)) follow_use(&s, &use);
    for (uint32_t i = 0; i < declared->count; i++) follow_use(&s, &declared->at[i]);
}

/* ---- Values ---------------------------------------------------------------------------------- */

static bool integer_in_range(const ml_index_use *use, int64_t value) {
    return (value >= 0 && value < use->size) || (use->ignores && value == use->ignored);
}

/* As a cast to an integer takes it, towards zero; NaN is none. */
static bool number_in_range(const ml_index_use *use, double value) {
    if (value > -1 && value < (double)use->size) return true;
    bool fits = value > -0x1p62 && value < 0x1p62;
    return use->ignores && fits && (int64_t)value == use->ignored;
}

static bool element_in_range(const ml_index_use *use, ml_dtype dtype, const void *data, int64_t i) {
    if (ml_is_float(dtype)) return number_in_range(use, ml_element(dtype, data, i));
    if (dtype == ML_I64) return integer_in_range(use, ((const int64_t *)data)[i]); /* exactly */
    return integer_in_range(use, (int64_t)ml_element(dtype, data, i));
}

enum { BLOCK = 256 };

/* Of i32, a block at a time without branches. */
static bool block_in_range(const ml_index_use *use, const int32_t *values) {
    const uint32_t size = use->size > INT32_MAX ? (uint32_t)INT32_MAX + 1 : (uint32_t)use->size;
    const bool fits = use->ignores && use->ignored >= INT32_MIN && use->ignored <= INT32_MAX;
    const int32_t ignored = fits ? (int32_t)use->ignored : 0; /* 0 is in any range */
    uint32_t bad = 0;
    for (int i = 0; i < BLOCK; i++)
        bad |= (uint32_t)((uint32_t)values[i] >= size) & (uint32_t)(values[i] != ignored);
    return bad == 0;
}

int64_t ml_first_out_of_range(const ml_input_range *range, ml_dtype dtype, const void *data,
                              int64_t count) {
    for (int64_t first = 0; first < count; first += BLOCK) {
        int64_t end = first + BLOCK < count ? first + BLOCK : count;
        bool whole = dtype == ML_I32 && end == first + BLOCK;
        if (whole && block_in_range(&range->use, (const int32_t *)data + first)) continue;
        for (int64_t i = first; i < end; i++)
            if ((!range->part || range->part[i]) && !element_in_range(&range->use, dtype, data, i))
                return i;
    }
    return -1;
}
