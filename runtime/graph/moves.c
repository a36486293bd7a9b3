/* Checks and type inference of the ops that move elements, and of SCATTER_ADD. */
#include <assert.h>

#include "runtime/graph/infer.h"

static const char *name_of(const infer *in, int64_t axis) {
    return ml_axis_name(in->g, (ml_axis)axis);
}

static void infer_broadcast(infer *in, ml_type *out) {
    const ml_type *t = infer_source(in, 0), *as = in->given;
    assert(as);
    for (int i = 0; i < t->rank; i++) {
        int at = ml_type_find(as, t->axis[i]);
        if (at < 0)
            infer_raise(in, "name all of its axes", "cannot broadcast: axis \"%s\" would be lost",
                        name_of(in, t->axis[i]));
        if (as->size[at] != t->size[i])
            infer_raise(in, NULL, "cannot broadcast \"%s\" from %lld to %lld",
                        name_of(in, t->axis[i]), (long long)t->size[i], (long long)as->size[at]);
    }
    out->dtype = t->dtype;
    for (int i = 0; i < as->rank; i++) infer_append(in, out, as->axis[i], as->size[i]);
}

static void infer_permute(infer *in, ml_type *out) {
    const ml_type *t = infer_source(in, 0), *as = in->given;
    assert(as);
    if (!ml_type_same_axes(t, as)) {
        const char *help =
            ml_arena_format(ml_graph_arena(in->g), "its axes are %s", infer_axes(in, t));
        infer_raise(in, help, "cannot permute to %s: permute names each of the axes once",
                    infer_axes(in, as));
    }
    *out = *as;
    out->dtype = t->dtype;
}

static void infer_rename(infer *in, ml_type *out) {
    const ml_type *t = infer_source(in, 0);
    for (int i = 0; i < in->arg_count; i += 2)
        infer_find(in, 0, in->args[i], "rename", "the tensor");
    out->dtype = t->dtype;
    for (int i = 0; i < t->rank; i++) {
        ml_axis axis = t->axis[i];
        for (int k = 0; k < in->arg_count; k += 2)
            if (in->args[k] == t->axis[i]) axis = (ml_axis)in->args[k + 1];
        infer_append(in, out, axis, t->size[i]);
    }
}

static void infer_slice(infer *in, ml_type *out) {
    int at = infer_find(in, 0, in->args[0], "slice", "the tensor");
    *out = *infer_source(in, 0);
    int64_t start = in->args[1], stop = in->args[2];
    if (start < 0 || start >= stop || stop > out->size[at])
        infer_raise(in, "positions count from 0, and the last is not included",
                    "cannot slice \"%s\" from %lld to %lld: it has %lld elements",
                    name_of(in, in->args[0]), (long long)start, (long long)stop,
                    (long long)out->size[at]);
    out->size[at] = stop - start;
}

/* The type of source i with another size of the axis at position `at`. */
static void resized(const infer *in, int i, int at, int64_t size, ml_type *out) {
    const ml_type *t = infer_source(in, i);
    out->dtype = t->dtype;
    for (int k = 0; k < t->rank; k++)
        infer_append(in, out, t->axis[k], k == at ? size : t->size[k]);
}

static void infer_pad(infer *in, ml_type *out) {
    int at = infer_find(in, 0, in->args[0], "pad", "the tensor");
    int64_t before = in->args[1], after = in->args[2];
    if (before < 0 || after < 0 || before > INT64_MAX / 4 || after > INT64_MAX / 4)
        infer_raise(in, "slice takes elements away", "cannot pad \"%s\" by %lld and %lld elements",
                    name_of(in, in->args[0]), (long long)before, (long long)after);
    resized(in, 0, at, before + infer_source(in, 0)->size[at] + after, out);
}

/* The size that the inner axis would have, where the outer one divides. */
static const char *split_help(const infer *in, ml_axis inner, int64_t size, int64_t outer) {
    if (outer < 1 || size % outer) return NULL;
    return ml_arena_format(ml_graph_arena(in->g), "m.axis(\"%s\", %lld) as the inner one would do",
                           name_of(in, inner), (long long)(size / outer));
}

static void infer_split(infer *in, ml_type *out) {
    const ml_type *t = infer_source(in, 0);
    int at = infer_find(in, 0, in->args[0], "split", "the tensor");
    ml_axis outer = (ml_axis)in->args[1], inner = (ml_axis)in->args[3];
    int64_t outer_size = in->args[2], inner_size = in->args[4];
    if (outer_size < 1 || inner_size < 1 || t->size[at] % outer_size ||
        t->size[at] / outer_size != inner_size)
        infer_raise(in, split_help(in, inner, t->size[at], outer_size),
                    "cannot split \"%s\" of size %lld into \"%s\" %lld x \"%s\" %lld",
                    name_of(in, in->args[0]), (long long)t->size[at], name_of(in, outer),
                    (long long)outer_size, name_of(in, inner), (long long)inner_size);
    out->dtype = t->dtype;
    for (int i = 0; i < t->rank; i++) {
        if (i != at) {
            infer_append(in, out, t->axis[i], t->size[i]);
            continue;
        }
        infer_append(in, out, outer, outer_size);
        infer_append(in, out, inner, inner_size);
    }
}

static void infer_merge(infer *in, ml_type *out) {
    const ml_type *t = infer_source(in, 0);
    int outer = infer_find(in, 0, in->args[0], "merge", "the tensor");
    int inner = infer_find(in, 0, in->args[1], "merge", "the tensor");
    if (outer == inner)
        infer_raise(in, NULL, "cannot merge \"%s\" with itself", name_of(in, in->args[0]));
    out->dtype = t->dtype;
    for (int i = 0; i < t->rank; i++) {
        if (i == inner) continue;
        if (i == outer)
            infer_append(in, out, (ml_axis)in->args[2], t->size[outer] * t->size[inner]);
        else
            infer_append(in, out, t->axis[i], t->size[i]);
    }
}

static void infer_concat(infer *in, ml_type *out) {
    if (in->source_count < 1) infer_raise(in, NULL, "concat needs at least one tensor");
    ml_dtype dtype = infer_promote(in, 0, in->source_count);
    const ml_type *first = infer_source(in, 0);
    int64_t total = 0;
    for (int s = 0; s < in->source_count; s++) {
        const ml_type *t = infer_source(in, s);
        const char *whose = ml_arena_format(ml_graph_arena(in->g), "tensor %d", s + 1);
        int at = infer_find(in, s, in->args[0], "concatenate along", whose);
        total += t->size[at]; /* 64 sources of 2^57 reach 2^63 */
        if (total > ML_MAX_ELEMENTS)
            infer_raise(in, NULL, "concat would give a tensor with more than 2^57 elements");
        for (int i = 0; i < first->rank; i++) {
            if (first->axis[i] == in->args[0]) continue;
            int other = infer_find(in, s, first->axis[i], "concatenate tensors with", whose);
            if (t->size[other] != first->size[i])
                infer_raise(in, NULL, "cannot concatenate: \"%s\" is %lld in tensor 1, %lld in %s",
                            name_of(in, first->axis[i]), (long long)first->size[i],
                            (long long)t->size[other], whose);
        }
        for (int i = 0; i < t->rank; i++)
            infer_find(in, 0, t->axis[i], "concatenate tensors with", "tensor 1");
    }
    resized(in, 0, ml_type_find(first, (ml_axis)in->args[0]), total, out);
    out->dtype = dtype;
}

static void infer_gather(infer *in, ml_type *out) {
    infer_dtype(in, 1, ML_I32, "the index");
    int at = infer_find(in, 0, in->args[0], "gather along", "the table");
    const ml_type *table = infer_source(in, 0), *index = infer_source(in, 1);
    infer_indexed(in, table->axis[at], table->size[at]);
    out->dtype = table->dtype;
    for (int i = 0; i < index->rank; i++) infer_append(in, out, index->axis[i], index->size[i]);
    for (int i = 0; i < table->rank; i++) {
        if (i == at) continue;
        int shared = ml_type_find(index, table->axis[i]);
        if (shared < 0) {
            infer_append(in, out, table->axis[i], table->size[i]);
        } else if (index->size[shared] != table->size[i])
            infer_raise(in, NULL, "cannot gather: \"%s\" is %lld in the table, %lld in the index",
                        name_of(in, table->axis[i]), (long long)table->size[i],
                        (long long)index->size[shared]);
    }
}

/* Each axis of `part` but `except` is in `whole` with the same size. */
static void check_within(const infer *in, const char *what, const ml_type *part,
                         const char *part_name, ml_axis except, const ml_type *whole,
                         const char *whole_name) {
    for (int i = 0; i < part->rank; i++) {
        if (part->axis[i] == except) continue;
        int at = ml_type_find(whole, part->axis[i]);
        const char *name = name_of(in, part->axis[i]);
        if (at < 0)
            infer_raise(in, NULL, "cannot %s: %s has axis \"%s\", %s does not", what, part_name,
                        name, whole_name);
        if (whole->size[at] != part->size[i])
            infer_raise(in, NULL, "cannot %s: \"%s\" is %lld in %s, %lld in %s", what, name,
                        (long long)part->size[i], part_name, (long long)whole->size[at],
                        whole_name);
    }
}

/* value's axes are index's and the result's without the scattered one. */
void infer_scatter(infer *in, ml_type *out) {
    const ml_type *index = infer_source(in, 0), *value = infer_source(in, 1), *as = in->given;
    ml_axis axis = (ml_axis)in->args[0];
    assert(as);
    infer_dtype(in, 0, ML_I32, "the index");
    infer_number_only(in, 1);
    if (ml_type_find(as, axis) < 0)
        infer_raise(in, NULL, "cannot scatter along \"%s\": the result has no such axis",
                    name_of(in, axis));
    infer_indexed(in, axis, ml_type_size(as, axis));
    check_within(in, "scatter", index, "the index", 0, value, "the value");
    check_within(in, "scatter", as, "the result", axis, value, "the value");
    for (int i = 0; i < value->rank; i++)
        if (ml_type_find(index, value->axis[i]) < 0 &&
            (value->axis[i] == axis || ml_type_find(as, value->axis[i]) < 0))
            infer_raise(in, NULL, "cannot scatter: axis \"%s\" of the value has no place to go",
                        name_of(in, value->axis[i]));
    if (as->dtype != value->dtype && (ml_dtypes[as->dtype].kind != ML_KIND_FLOAT ||
                                      ml_dtypes[value->dtype].kind != ML_KIND_FLOAT))
        infer_raise(in, "cast the value", "cannot scatter %s into %s", ml_dtypes[value->dtype].name,
                    ml_dtypes[as->dtype].name);
    out->dtype = as->dtype;
    for (int i = 0; i < as->rank; i++) infer_append(in, out, as->axis[i], as->size[i]);
}

/* value's axes are index's and the cache's without the written one. */
void infer_write_rows(infer *in, ml_type *out) {
    const ml_type *cache = infer_source(in, 0), *index = infer_source(in, 1),
                  *value = infer_source(in, 2);
    ml_axis axis = (ml_axis)in->args[0];
    infer_dtype(in, 1, ML_I32, "the index");
    infer_find(in, 0, axis, "write rows along", "the cache");
    infer_indexed(in, axis, ml_type_size(cache, axis));
    for (int i = 0; i < index->rank; i++)
        if (index->axis[i] != axis && ml_type_find(cache, index->axis[i]) >= 0)
            infer_raise(in, "rename it in the index and the value",
                        "cannot write rows: both the cache and the index have axis \"%s\"",
                        name_of(in, index->axis[i]));
    check_within(in, "write rows", index, "the index", 0, value, "the value");
    check_within(in, "write rows", cache, "the cache", axis, value, "the value");
    if (value->rank != index->rank + cache->rank - 1)
        infer_raise(in, "the value has the axes of the index and those of a row of the cache",
                    "cannot write rows: the value has axes %s, the index %s, the cache %s",
                    infer_axes(in, value), infer_axes(in, index), infer_axes(in, cache));
    if (value->dtype != cache->dtype)
        infer_raise(in, "cast the value", "cannot write rows of %s into a cache of %s",
                    ml_dtypes[value->dtype].name, ml_dtypes[cache->dtype].name);
    *out = *cache;
}

static void infer_place(infer *in, ml_type *out) {
    *out = *infer_source(in, 0);
    for (int i = 1; i < in->arg_count; i += 2)
        if (in->args[i]) (void)infer_find(in, 0, in->args[i], "place", "the tensor");
}

void infer_move(infer *in, ml_type *out) {
    switch ((ml_move_op)in->op) {
    case ML_OP_BROADCAST: infer_broadcast(in, out); break;
    case ML_OP_RENAME: infer_rename(in, out); break;
    case ML_OP_PERMUTE: infer_permute(in, out); break;
    case ML_OP_SLICE: infer_slice(in, out); break;
    case ML_OP_PAD: infer_pad(in, out); break;
    case ML_OP_SPLIT: infer_split(in, out); break;
    case ML_OP_MERGE: infer_merge(in, out); break;
    case ML_OP_CONCAT: infer_concat(in, out); break;
    case ML_OP_GATHER: infer_gather(in, out); break;
    case ML_OP_PLACE: infer_place(in, out); break;
    case ML_OP_OUT: infer_out(in, out); break;
    }
}
