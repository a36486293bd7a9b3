/* The reference interpreter: ops along axes, by their definitions. */
#include "runtime/graph/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void reference_strides(const ml_type *t, int64_t *strides) {
    int64_t stride = 1;
    for (int i = t->rank; i-- > 0;) {
        strides[i] = stride;
        stride *= t->size[i];
    }
}

reference_walk reference_walk_over(const ml_type *over) {
    reference_walk w = {.rank = over->rank};
    for (int i = 0; i < over->rank; i++) w.size[i] = over->size[i];
    return w;
}

void reference_walk_follow(reference_walk *w, int slot, const ml_type *over,
                           const ml_type *operand) {
    int64_t strides[ML_MAX_AXES];
    reference_strides(operand, strides);
    for (int i = 0; i < over->rank; i++) {
        int at = ml_type_find(operand, over->axis[i]);
        w->stride[slot][i] = at < 0 ? 0 : strides[at];
    }
}

bool reference_walk_step(reference_walk *w) {
    for (int i = w->rank; i-- > 0;) {
        w->at[i]++;
        for (int s = 0; s < REFERENCE_TENSORS; s++) w->offset[s] += w->stride[s][i];
        if (w->at[i] < w->size[i]) return true;
        for (int s = 0; s < REFERENCE_TENSORS; s++) w->offset[s] -= w->stride[s][i] * w->size[i];
        w->at[i] = 0;
    }
    return false;
}

/* A sum of floats and what its roundings lost, of each exactly (Knuth's TwoSum, which has no
 * branch): long sums are as good as short ones. */
typedef struct {
    double sum, lost;
} float_sum;

static void sum_add(float_sum *s, double x) {
    const double total = s->sum + x, added = total - s->sum;
    s->lost += (s->sum - (total - added)) + (x - added);
    s->sum = total;
}

static double sum_total(const float_sum *s) {
    return isfinite(s->lost) ? s->sum + s->lost : s->sum; /* else the sum is infinite or NaN */
}

/* Sums of floats over axes. */
static void reduce_floats(const reference_value *a, reference_value *out) {
    reference_walk w = reference_walk_over(&a->type);
    reference_walk_follow(&w, 0, &a->type, &a->type);
    reference_walk_follow(&w, 1, &a->type, &out->type);
    int64_t count = ml_type_elements(&out->type);
    float_sum *sums = ml_alloc(sizeof *sums * (size_t)count);
    if (!sums) ml_raise(ML_NO_MEMORY, "no memory left for a reference reduction");
    do sum_add(&sums[w.offset[1]], a->cells[w.offset[0]].number);
    while (reference_walk_step(&w));
    for (int64_t i = 0; i < count; i++) out->cells[i].number = sum_total(&sums[i]);
    ml_free(sums);
}

void reference_reduce(ml_op op, const reference_value *a, reference_value *out) {
    if (op == ML_OP_SUM && reference_is_float(&a->type)) {
        reduce_floats(a, out);
        return;
    }
    reference_walk w = reference_walk_over(&a->type);
    reference_walk_follow(&w, 0, &a->type, &a->type);
    reference_walk_follow(&w, 1, &a->type, &out->type);
    int64_t count = ml_type_elements(&out->type);
    bool *started = ml_alloc((size_t)count);
    if (!started) ml_raise(ML_NO_MEMORY, "no memory left for a reference reduction");
    do {
        reference_cell x = a->cells[w.offset[0]], *y = &out->cells[w.offset[1]];
        bool *begun = &started[w.offset[1]];
        if (!*begun)
            *y = x;
        else if (op == ML_OP_SUM)
            y->integer = (int64_t)((uint64_t)y->integer + (uint64_t)x.integer);
        else {
            reference_cell both[2] = {*y, x};
            ml_op pair = op == ML_OP_MAX ? ML_OP_MAXIMUM : ML_OP_MINIMUM;
            *y = reference_map(pair, a->type.dtype, a->type.dtype, both);
        }
        *begun = true;
    } while (reference_walk_step(&w));
    ml_free(started);
}

/* An order of all cells in which NaN comes after everything. */
static int compare(reference_cell a, reference_cell b, bool is_float) {
    if (!is_float) return a.integer < b.integer ? -1 : a.integer > b.integer;
    if (isnan(a.number) || isnan(b.number)) return isnan(a.number) - isnan(b.number);
    return a.number < b.number ? -1 : a.number > b.number;
}

/* t without an axis: what the rows along it are counted by. */
static ml_type without(const ml_type *t, ml_axis axis) {
    ml_type rest = {.dtype = t->dtype};
    for (int i = 0; i < t->rank; i++)
        if (t->axis[i] != axis) {
            rest.axis[rest.rank] = t->axis[i];
            rest.size[rest.rank++] = t->size[i];
        }
    return rest;
}

static int64_t stride_of(const ml_type *t, ml_axis axis) {
    int64_t strides[ML_MAX_AXES];
    reference_strides(t, strides);
    return strides[ml_type_find(t, axis)];
}

void reference_argmax(const reference_value *a, ml_axis axis, reference_value *out) {
    bool is_float = reference_is_float(&a->type);
    int64_t size = ml_type_size(&a->type, axis), stride = stride_of(&a->type, axis);
    reference_walk w = reference_walk_over(&out->type);
    reference_walk_follow(&w, 0, &out->type, &a->type);
    reference_walk_follow(&w, 1, &out->type, &out->type);
    do {
        const reference_cell *row = a->cells + w.offset[0];
        int64_t best = 0;
        for (int64_t i = 1; i < size; i++)
            if (compare(row[i * stride], row[best * stride], is_float) > 0) best = i;
        out->cells[w.offset[1]].integer = best;
    } while (reference_walk_step(&w));
}

void reference_cumsum(const reference_value *a, ml_axis axis, bool from_end, reference_value *out) {
    bool is_float = reference_is_float(&a->type);
    int64_t size = ml_type_size(&a->type, axis), stride = stride_of(&a->type, axis);
    ml_type rows = without(&a->type, axis);
    reference_walk w = reference_walk_over(&rows);
    reference_walk_follow(&w, 0, &rows, &a->type);
    do {
        float_sum number = {0};
        uint64_t integer = 0;
        for (int64_t i = 0; i < size; i++) {
            int64_t at = w.offset[0] + (from_end ? size - 1 - i : i) * stride;
            if (is_float) {
                sum_add(&number, a->cells[at].number);
                out->cells[at].number = sum_total(&number);
            } else
                out->cells[at].integer = (int64_t)(integer += (uint64_t)a->cells[at].integer);
        }
    } while (reference_walk_step(&w));
}

void reference_sort(const reference_value *a, ml_axis axis, ml_axis out_axis, bool descending,
                    reference_value *values, reference_value *indices) {
    bool is_float = reference_is_float(&a->type);
    const ml_type *type = &values->type;
    int64_t size = ml_type_size(&a->type, axis), stride = stride_of(&a->type, axis);
    int64_t count = ml_type_size(type, out_axis), out_stride = stride_of(type, out_axis);
    ml_type rows = without(&a->type, axis);
    reference_walk w = reference_walk_over(&rows);
    reference_walk_follow(&w, 0, &rows, &a->type);
    reference_walk_follow(&w, 1, &rows, type);
    int64_t *order = ml_alloc(sizeof(int64_t) * (size_t)size);
    if (!order) ml_raise(ML_NO_MEMORY, "no memory left for a reference sort");
    do {
        const reference_cell *row = a->cells + w.offset[0];
        for (int64_t i = 0; i < size; i++) { /* insertion keeps equal elements in their order */
            int64_t at = i;
            for (; at > 0; at--) {
                int c = compare(row[order[at - 1] * stride], row[i * stride], is_float);
                if (descending ? c >= 0 : c <= 0) break;
                order[at] = order[at - 1];
            }
            order[at] = i;
        }
        for (int64_t i = 0; i < count; i++) {
            values->cells[w.offset[1] + i * out_stride] = row[order[i] * stride];
            if (indices) indices->cells[w.offset[1] + i * out_stride].integer = order[i];
        }
    } while (reference_walk_step(&w));
    ml_free(order);
}

/* Adds `count` products of cells x_stride and y_stride apart. */
static void add_products(float_sum *to, const reference_cell *x, int64_t x_stride,
                         const reference_cell *y, int64_t y_stride, int64_t count) {
    float_sum sum = *to;
    for (int64_t i = 0; i < count; i++)
        sum_add(&sum, x[i * x_stride].number * y[i * y_stride].number);
    *to = sum;
}

static uint64_t integer_products(const reference_cell *x, int64_t x_stride, const reference_cell *y,
                                 int64_t y_stride, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (uint64_t)x[i * x_stride].integer * (uint64_t)y[i * y_stride].integer;
    return sum;
}

void reference_dot(const reference_value *a, const reference_value *b, const reference_value *scale,
                   const int64_t *axes, int count, reference_value *out) {
    const bool is_float = reference_is_float(&out->type);
    int64_t length = 1, a_stride = 0, b_stride = 0; /* of the last axis summed over: a loop */
    if (count > 0) {
        const ml_axis last = (ml_axis)axes[--count];
        length = ml_type_size(&a->type, last);
        a_stride = stride_of(&a->type, last), b_stride = stride_of(&b->type, last);
    }
    ml_type summed = {.rank = (uint8_t)count};
    for (int i = 0; i < count; i++) {
        summed.axis[i] = (ml_axis)axes[i];
        summed.size[i] = ml_type_size(&a->type, (ml_axis)axes[i]);
    }
    reference_walk w = reference_walk_over(&out->type);
    reference_walk_follow(&w, 0, &out->type, &a->type);
    reference_walk_follow(&w, 1, &out->type, &b->type);
    reference_walk_follow(&w, 2, &out->type, &out->type);
    do {
        reference_walk k = reference_walk_over(&summed);
        reference_walk_follow(&k, 0, &summed, &a->type);
        reference_walk_follow(&k, 1, &summed, &b->type);
        float_sum number = {0};
        uint64_t integer = 0;
        do {
            const reference_cell *x = &a->cells[w.offset[0] + k.offset[0]];
            const reference_cell *y = &b->cells[w.offset[1] + k.offset[1]];
            if (is_float)
                add_products(&number, x, a_stride, y, b_stride, length);
            else
                integer += integer_products(x, a_stride, y, b_stride, length);
        } while (reference_walk_step(&k));
        reference_cell *to = &out->cells[w.offset[2]];
        if (is_float)
            to->number = sum_total(&number) * (scale ? scale->cells[0].number : 1);
        else
            to->integer = (int64_t)integer;
    } while (reference_walk_step(&w));
}

void reference_gather(const reference_value *table, const reference_value *index, ml_axis axis,
                      reference_value *out) {
    int64_t size = ml_type_size(&table->type, axis);
    int64_t stride = stride_of(&table->type, axis);
    reference_walk w = reference_walk_over(&out->type);
    reference_walk_follow(&w, 0, &out->type, &table->type);
    reference_walk_follow(&w, 1, &out->type, &index->type);
    reference_walk_follow(&w, 2, &out->type, &out->type);
    int own = ml_type_find(&out->type, axis); /* an axis of the index that has the same name */
    if (own >= 0) w.stride[0][own] = 0;
    do {
        int64_t i = index->cells[w.offset[1]].integer;
        if (i >= 0 && i < size)
            out->cells[w.offset[2]] = table->cells[w.offset[0] + i * stride];
        else
            memset(&out->cells[w.offset[2]], 0, sizeof(reference_cell));
    } while (reference_walk_step(&w));
}

void reference_write_rows(const reference_value *cache, const reference_value *index,
                          const reference_value *value, ml_axis axis, reference_value *out) {
    int64_t size = ml_type_size(&out->type, axis), stride = stride_of(&out->type, axis);
    memcpy(out->cells, cache->cells, sizeof *out->cells * (size_t)ml_type_elements(&out->type));
    reference_walk w = reference_walk_over(&value->type);
    reference_walk_follow(&w, 0, &value->type, &out->type);
    reference_walk_follow(&w, 1, &value->type, &index->type);
    reference_walk_follow(&w, 2, &value->type, &value->type);
    int own = ml_type_find(&value->type, axis); /* an axis of the index that has the same name */
    if (own >= 0) w.stride[0][own] = 0;
    do {
        int64_t i = index->cells[w.offset[1]].integer;
        if (i >= 0 && i < size) out->cells[w.offset[0] + i * stride] = value->cells[w.offset[2]];
    } while (reference_walk_step(&w));
}

void reference_scatter_add(const reference_value *index, const reference_value *value, ml_axis axis,
                           reference_value *out) {
    bool is_float = reference_is_float(&out->type);
    int64_t size = ml_type_size(&out->type, axis);
    int64_t stride = stride_of(&out->type, axis);
    reference_walk w = reference_walk_over(&value->type);
    reference_walk_follow(&w, 0, &value->type, &out->type);
    reference_walk_follow(&w, 1, &value->type, &index->type);
    reference_walk_follow(&w, 2, &value->type, &value->type);
    int own = ml_type_find(&value->type, axis);
    if (own >= 0) w.stride[0][own] = 0;
    do {
        int64_t i = index->cells[w.offset[1]].integer;
        if (i < 0 || i >= size) continue;
        reference_cell *to = &out->cells[w.offset[0] + i * stride], x = value->cells[w.offset[2]];
        if (is_float)
            to->number += x.number;
        else
            to->integer = (int64_t)((uint64_t)to->integer + (uint64_t)x.integer);
    } while (reference_walk_step(&w));
}
