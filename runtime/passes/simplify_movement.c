/* Simplification of movements and reductions: neighbours that cancel or compose. PERMUTE and
 * BROADCAST drift towards the users, where elementwise ops absorb them. */
#include "runtime/passes/passes.h"
#include "runtime/passes/simplify.h"

#include <string.h>

/* The node a rule looks at, and its first source. */
typedef struct {
    simplifier *s;
    ml_graph *g;
    ml_ref n, a;
    ml_op op, a_op;
    ml_type type, a_type;
    int64_t args[2 * ML_MAX_AXES], a_args[2 * ML_MAX_AXES]; /* CONCAT and others: the first ones */
    int arg_count;
} subject;

static ml_ref inner(const subject *x) {
    return ml_graph_source(x->g, x->a, 0);
}
static const ml_type *inner_type(const subject *x) {
    return ml_graph_type(x->g, inner(x));
}
static ml_ref move(const subject *x, ml_op op, ml_ref a, const int64_t *args, int count) {
    return simplify_make(x->s, op, &a, 1, args, count, NULL);
}
static ml_ref fit(const subject *x, ml_ref n) {
    return simplify_fit(x->s, n, &x->type);
}
static int64_t size_in(const ml_type *t, int64_t axis) {
    return ml_type_size(t, (ml_axis)axis);
}
static bool has(const ml_type *t, int64_t axis) {
    return ml_type_find(t, (ml_axis)axis) >= 0;
}

static ml_ref zeros(const subject *x) {
    return simplify_full(x->s, &x->type, (reference_cell){.integer = 0});
}

/* The result without what PERMUTE or BROADCAST did to the source, where those commute with this
 * op on axes that the inner value has as well. */
static ml_ref move_inside(const subject *x) {
    return fit(x, move(x, x->op, inner(x), x->args, x->arg_count));
}

static ml_ref broadcast(const subject *x) {
    if (x->type.rank == x->a_type.rank) return fit(x, x->a);
    if (x->a_op == ML_OP_BROADCAST || x->a_op == ML_OP_PERMUTE) return fit(x, inner(x));
    return 0;
}

static ml_ref permute(const subject *x) {
    if (ml_type_equal(&x->type, &x->a_type)) return x->a;
    if (x->a_op == ML_OP_BROADCAST || x->a_op == ML_OP_PERMUTE) return fit(x, inner(x));
    return 0;
}

/* Names that the axes of `part` get where those of `whole` become those of `renamed`. */
static ml_type renamed_part(const ml_type *part, const ml_type *whole, const ml_type *renamed) {
    ml_type result = *part;
    for (int i = 0; i < part->rank; i++)
        result.axis[i] = renamed->axis[ml_type_find(whole, part->axis[i])];
    return result;
}

static ml_ref rename(const subject *x) {
    bool same = true;
    for (int i = 0; i < x->type.rank; i++) same = same && x->type.axis[i] == x->a_type.axis[i];
    if (same) return x->a;
    if (x->a_op == ML_OP_RENAME) return simplify_rename(x->s, inner(x), &x->type);
    if (x->a_op == ML_OP_IOTA) return ml_iota(x->g, x->type.axis[0], x->type.size[0]);
    if (x->a_op == ML_OP_PERMUTE || x->a_op == ML_OP_BROADCAST) {
        ml_type target = renamed_part(inner_type(x), &x->a_type, &x->type);
        return fit(x, simplify_rename(x->s, inner(x), &target));
    }
    return 0;
}

/* A slice of PAD: what is left of the contents, padded with what is left of the padding. */
static ml_ref slice_pad(const subject *x) {
    int64_t axis = x->args[0], before = x->a_args[1], size = size_in(inner_type(x), axis);
    int64_t start = x->args[1] > before ? x->args[1] : before;
    int64_t stop = x->args[2] < before + size ? x->args[2] : before + size;
    if (start >= stop) return zeros(x);
    ml_ref kept =
        move(x, ML_OP_SLICE, inner(x), (int64_t[]){axis, start - before, stop - before}, 3);
    return move(x, ML_OP_PAD, kept, (int64_t[]){axis, start - x->args[1], x->args[2] - stop}, 3);
}

/* A slice of CONCAT that leaves some part out. */
static ml_ref slice_concat(const subject *x) {
    int count = ml_graph_node(x->g, x->a)->source_count, kept = 0;
    int64_t axis = x->args[0], start = 0;
    ml_ref *parts = ML_NEW_ARRAY(x->s->scratch, ml_ref, count);
    for (int i = 0; i < count; i++) {
        ml_ref part = ml_graph_source(x->g, x->a, i);
        int64_t stop = start + size_in(ml_graph_type(x->g, part), axis);
        int64_t from = x->args[1] > start ? x->args[1] : start;
        int64_t to = x->args[2] < stop ? x->args[2] : stop;
        if (from < to)
            parts[kept++] =
                move(x, ML_OP_SLICE, part, (int64_t[]){axis, from - start, to - start}, 3);
        start = stop;
    }
    if (kept == count) return 0;
    return fit(x, simplify_make(x->s, ML_OP_CONCAT, parts, kept, &axis, 1, NULL));
}

/* What the backward pass takes out of something again, it takes out of what is kept for it: the
 * parts that this was made of are not. */
static bool taken_again(const subject *x) {
    return ml_graph_node(x->g, x->n)->flags & ~ml_graph_node(x->g, x->a)->flags & ML_NODE_COPY;
}

static ml_ref slice(const subject *x) {
    int64_t axis = x->args[0], start = x->args[1], stop = x->args[2];
    bool same_axis = x->a_args[0] == axis;
    if (start == 0 && stop == size_in(&x->a_type, axis)) return x->a;
    if (x->a_op == ML_OP_SLICE && same_axis) {
        int64_t base = x->a_args[1];
        return move(x, ML_OP_SLICE, inner(x), (int64_t[]){axis, base + start, base + stop}, 3);
    }
    if (x->a_op == ML_OP_PAD && same_axis) return slice_pad(x);
    if (x->a_op == ML_OP_CONCAT && same_axis && !taken_again(x)) return slice_concat(x);
    if (x->a_op == ML_OP_BROADCAST && !has(inner_type(x), axis)) return fit(x, inner(x));
    if (x->a_op == ML_OP_BROADCAST || x->a_op == ML_OP_PERMUTE) return move_inside(x);
    return 0;
}

static ml_ref pad(const subject *x) {
    reference_cell value;
    int64_t axis = x->args[0];
    if (x->args[1] == 0 && x->args[2] == 0) return x->a;
    if (simplify_constant(x->g, x->a, &value) && value.integer == 0) return zeros(x);
    if (x->a_op == ML_OP_PAD && x->a_args[0] == axis)
        return move(x, ML_OP_PAD, inner(x),
                    (int64_t[]){axis, x->args[1] + x->a_args[1], x->args[2] + x->a_args[2]}, 3);
    if (x->a_op == ML_OP_PERMUTE) return move_inside(x);
    return 0;
}

static ml_ref split(const subject *x) {
    if (x->a_op == ML_OP_MERGE && x->a_args[2] == x->args[0] &&
        size_in(inner_type(x), x->a_args[0]) == x->args[2]) {
        ml_type target = *inner_type(x);
        target.axis[ml_type_find(&target, (ml_axis)x->a_args[0])] = (ml_axis)x->args[1];
        target.axis[ml_type_find(inner_type(x), (ml_axis)x->a_args[1])] = (ml_axis)x->args[3];
        return fit(x, simplify_rename(x->s, inner(x), &target));
    }
    if (x->a_op == ML_OP_BROADCAST)
        return has(inner_type(x), x->args[0]) ? move_inside(x) : fit(x, inner(x));
    return x->a_op == ML_OP_PERMUTE ? move_inside(x) : 0;
}

static ml_ref merge(const subject *x) {
    int64_t outer = x->args[0], inner_axis = x->args[1], merged = x->args[2];
    if (x->a_op == ML_OP_SPLIT && x->a_args[1] == outer && x->a_args[3] == inner_axis) {
        ml_type target = *inner_type(x);
        target.axis[ml_type_find(&target, (ml_axis)x->a_args[0])] = (ml_axis)merged;
        return fit(x, simplify_rename(x->s, inner(x), &target));
    }
    if (x->a_op == ML_OP_BROADCAST) {
        bool has_outer = has(inner_type(x), outer), has_inner = has(inner_type(x), inner_axis);
        if (has_outer && has_inner) return move_inside(x);
        return has_outer || has_inner ? 0 : fit(x, inner(x));
    }
    return x->a_op == ML_OP_PERMUTE ? move_inside(x) : 0;
}

static bool same_order(const subject *x, ml_ref a, ml_ref b) {
    const ml_type *left = ml_graph_type(x->g, a), *right = ml_graph_type(x->g, b);
    for (int i = 0; i < left->rank; i++)
        if (left->axis[i] != right->axis[i]) return false;
    return true;
}

/* Append a part to a list; a slice that begins where the last one ends extends it. */
static int append_part(const subject *x, ml_ref *parts, int count, ml_ref part) {
    const ml_graph *g = x->g;
    if (count && ml_graph_node(g, part)->op == ML_OP_SLICE &&
        ml_graph_node(g, parts[count - 1])->op == ML_OP_SLICE &&
        ml_graph_source(g, part, 0) == ml_graph_source(g, parts[count - 1], 0)) {
        const int64_t *last = ml_graph_args(g, parts[count - 1]), *next = ml_graph_args(g, part);
        if (last[0] == x->args[0] && next[0] == x->args[0] && last[2] == next[1]) {
            int64_t args[3] = {last[0], last[1], next[2]};
            parts[count - 1] = move(x, ML_OP_SLICE, ml_graph_source(g, part, 0), args, 3);
            return count;
        }
    }
    parts[count] = part;
    return count + 1;
}

/* All parts the same number. */
static ml_ref concat_constant(const subject *x, const ml_ref *parts, int count) {
    reference_cell value, other;
    if (!simplify_constant(x->g, parts[0], &value)) return 0;
    for (int i = 1; i < count; i++)
        if (!simplify_constant(x->g, parts[i], &other) || other.integer != value.integer) return 0;
    return simplify_full(x->s, &x->type, value);
}

static ml_ref concat(const subject *x) {
    int count = ml_graph_node(x->g, x->n)->source_count, total = 0, kept = 0;
    for (int i = 0; i < count; i++)
        total += ml_graph_node(x->g, ml_graph_source(x->g, x->n, i))->source_count + 1;
    ml_ref *parts = ML_NEW_ARRAY(x->s->scratch, ml_ref, total);
    for (int i = 0; i < count; i++) {
        ml_ref part = ml_graph_source(x->g, x->n, i);
        if (ml_graph_node(x->g, part)->op == ML_OP_CONCAT &&
            ml_graph_args(x->g, part)[0] == x->args[0])
            for (int k = 0; k < ml_graph_node(x->g, part)->source_count; k++)
                kept = append_part(x, parts, kept, ml_graph_source(x->g, part, k));
        else
            kept = append_part(x, parts, kept, part);
    }
    ml_ref constant = concat_constant(x, parts, kept);
    if (constant) return constant;
    if (kept == 1) return fit(x, parts[0]);
    bool same = kept == count && same_order(x, parts[0], ml_graph_source(x->g, x->n, 0));
    for (int i = 0; i < kept && same; i++) same = parts[i] == ml_graph_source(x->g, x->n, i);
    return same ? 0 : fit(x, simplify_make(x->s, ML_OP_CONCAT, parts, kept, x->args, 1, NULL));
}

/* A scatter where no two elements meet: every index axis is one of the result's too. Then the
 * element of the result at v is the value where its index is v, and 0 elsewhere: an elementwise
 * op. (The gradient of picking one logit of each row.) */
static ml_ref scatter(const subject *x) {
    ml_ref index = x->a, value = ml_graph_source(x->g, x->n, 1);
    for (int i = 0; i < x->a_type.rank; i++)
        if (x->a_type.axis[i] == x->args[0] || !has(&x->type, x->a_type.axis[i])) return 0;
    ml_type indices = x->type;
    indices.dtype = ML_I32;
    ml_ref all = simplify_fit(x->s, index, &indices);
    ml_ref position = ml_iota(x->g, (ml_axis)x->args[0], size_in(&x->type, x->args[0]));
    ml_ref hit = simplify_map2(x->s, ML_OP_EQ, all, position);
    ml_ref choice[3] = {
        hit, simplify_cast(x->s, value, x->type.dtype),
        simplify_full(x->s, &(ml_type){.dtype = x->type.dtype}, (reference_cell){0})};
    return fit(x, simplify_make(x->s, ML_OP_WHERE, choice, 3, NULL, 0, NULL));
}

static void read_args(const ml_graph *g, ml_ref n, int64_t *args) {
    int count = ml_graph_node(g, n)->arg_count;
    if (count > 2 * ML_MAX_AXES) count = 2 * ML_MAX_AXES;
    if (count) memcpy(args, ml_graph_args(g, n), sizeof *args * (size_t)count);
}

static subject describe(simplifier *s, ml_ref n) {
    subject x = {.s = s, .g = s->graph, .n = n, .op = ml_graph_node(s->graph, n)->op};
    x.a = ml_graph_source(x.g, n, 0);
    x.a_op = ml_graph_node(x.g, x.a)->op;
    x.type = *ml_graph_type(x.g, n);
    x.a_type = *ml_graph_type(x.g, x.a);
    x.arg_count = ml_graph_node(x.g, n)->arg_count;
    read_args(x.g, n, x.args);
    read_args(x.g, x.a, x.a_args);
    return x;
}

ml_ref simplify_move(simplifier *s, ml_ref n) {
    static ml_ref (*const rules[ML_OP_COUNT])(const subject *) = {
        [ML_OP_BROADCAST] = broadcast, [ML_OP_PERMUTE] = permute, [ML_OP_RENAME] = rename,
        [ML_OP_SLICE] = slice,         [ML_OP_PAD] = pad,         [ML_OP_SPLIT] = split,
        [ML_OP_MERGE] = merge,         [ML_OP_CONCAT] = concat,   [ML_OP_SCATTER_ADD] = scatter,
    };
    subject x = describe(s, n);
    return rules[x.op] ? rules[x.op](&x) : 0;
}

/* ---- Reductions ------------------------------------------------------------------------------ */

/* Axes over which a value was repeated need no loop: a sum multiplies, max and min do nothing. */
static ml_ref reduce_broadcast(const subject *x) {
    int64_t left[ML_MAX_AXES];
    double repeats = 1;
    int count = 0;
    for (int i = 0; i < x->arg_count; i++)
        if (has(inner_type(x), x->args[i]))
            left[count++] = x->args[i];
        else
            repeats *= (double)size_in(&x->a_type, x->args[i]);
    ml_ref made = count ? move(x, x->op, inner(x), left, count) : inner(x);
    if (x->op == ML_OP_SUM) {
        reference_cell cell = {.number = repeats};
        if (ml_dtypes[x->type.dtype].kind != ML_KIND_FLOAT) cell.integer = (int64_t)repeats;
        cell = reference_store(x->type.dtype, cell, false);
        ml_ref times = simplify_full(x->s, &(ml_type){.dtype = x->type.dtype}, cell);
        made = simplify_map2(x->s, ML_OP_MUL, made, times);
    }
    return fit(x, made);
}

/* sum(-a) = -sum(a), and sum(c a) = c sum(a): one operation a row instead of one an element. */
static ml_ref sum_scaled(const subject *x) {
    reference_cell factor;
    if (ml_dtypes[x->type.dtype].kind != ML_KIND_FLOAT) return 0;
    if (x->a_op == ML_OP_NEG)
        return simplify_map1(x->s, ML_OP_NEG, move(x, ML_OP_SUM, inner(x), x->args, x->arg_count));
    if (x->a_op != ML_OP_MUL || inner_type(x)->rank != x->a_type.rank ||
        !simplify_constant(x->g, ml_graph_source(x->g, x->a, 1), &factor))
        return 0;
    ml_ref sum = move(x, ML_OP_SUM, inner(x), x->args, x->arg_count);
    ml_ref times = simplify_full(x->s, &(ml_type){.dtype = x->type.dtype}, factor);
    return fit(x, simplify_map2(x->s, ML_OP_MUL, sum, times));
}

ml_ref simplify_reduce(simplifier *s, ml_ref n) {
    subject x = describe(s, n);
    if (x.op == ML_OP_ARGMAX) return 0;
    if (x.op == ML_OP_SUM && (x.a_op == ML_OP_NEG || x.a_op == ML_OP_MUL)) return sum_scaled(&x);
    if (x.a_op == ML_OP_BROADCAST) return reduce_broadcast(&x);
    if (x.a_op == ML_OP_PERMUTE) return move_inside(&x);
    if (x.a_op == x.op) {
        int count = ml_graph_node(x.g, x.a)->arg_count;
        for (int i = 0; i < count; i++) x.args[x.arg_count++] = x.a_args[i];
        return fit(&x, move(&x, x.op, inner(&x), x.args, x.arg_count));
    }
    return 0;
}
