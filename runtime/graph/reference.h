/* The reference interpreter's insides: values, and the ops that are more than one line.
 *
 * A value holds one cell for each element, in the order of its type: `number` where the dtype is a
 * float, `integer` (bool: 0 or 1) otherwise. */
#ifndef ML_GRAPH_REFERENCE_H
#define ML_GRAPH_REFERENCE_H

#include "runtime/graph/analysis.h"

typedef union {
    double number;
    int64_t integer;
} reference_cell;

typedef struct reference_value {
    ml_type type;
    reference_cell *cells; /* NULL before it is computed and after its last use */
} reference_value;

/* Counts through all coordinates of axes, last one fastest, with offsets into several tensors. */
enum { REFERENCE_TENSORS = 3 };
typedef struct {
    int rank;
    int64_t size[2 * ML_MAX_AXES], at[2 * ML_MAX_AXES];
    int64_t stride[REFERENCE_TENSORS][2 * ML_MAX_AXES];
    int64_t offset[REFERENCE_TENSORS];
} reference_walk;

static inline bool reference_is_float(const ml_type *t) {
    return ml_dtypes[t->dtype].kind == ML_KIND_FLOAT;
}

/* One rank's interpretation of a graph that holds no attention. reference_start counts uses; then
 * each node with uses is computed in ascending order, by reference_compute or, a collective, by
 * its caller between reference_begin (zeroed cells) and reference_finish (rounds, releases what was
 * used for the last time). reference_end releases the rest. */
typedef struct reference_run {
    const ml_graph *graph;
    const double *const *states, *const *inputs; /* by id */
    const int64_t *coordinates;                  /* by mesh axis; NULL outside of a mesh */
    reference_cell *const *params;               /* by index; of a recurrence's step */
    bool round;
    ml_arena *scratch;
    reference_value *values;
    uint32_t *uses;                /* by node */
    reference_value **outputs; /* by node: all outputs of an op that computes them at once; NULL
                                  until there are any */
} reference_run;
void reference_start(reference_run *r, const ml_roots *roots);
reference_value *reference_begin(reference_run *r, ml_ref node);
void reference_finish(reference_run *r, ml_ref node);
void reference_compute(reference_run *r, ml_ref node);
/* Only the cells of `out`, from those of the sources. */
void reference_evaluate(reference_run *r, ml_ref node, reference_value *out);
double *reference_result(const reference_run *r, ml_ref node, ml_arena *arena);
void reference_end(reference_run *r);

/* Elements between neighbours along each axis of t. */
void reference_strides(const ml_type *t, int64_t *strides);
/* A walk over all coordinates of `over`. */
reference_walk reference_walk_over(const ml_type *over);
/* Let offset[slot] follow `operand`, whose axes are found by name (0 stride where it lacks one). */
void reference_walk_follow(reference_walk *w, int slot, const ml_type *over,
                           const ml_type *operand);
bool reference_walk_step(reference_walk *w); /* false after the last */

/* One op on one element; `dtype` is that of the result, `from` that of the first operand. */
reference_cell reference_map(ml_op op, ml_dtype dtype, ml_dtype from, const reference_cell *x);
/* As memory of this dtype would hold it: integers wrap, floats round where `round` is set. */
reference_cell reference_store(ml_dtype dtype, reference_cell x, bool round);

/* Ops along axes (reference_axes.c): `out` has its type and zeroed cells. */
void reference_reduce(ml_op op, const reference_value *a, reference_value *out);
void reference_argmax(const reference_value *a, ml_axis axis, reference_value *out);
void reference_cumsum(const reference_value *a, ml_axis axis, bool from_end, reference_value *out);
/* The first entries of a sorted along an axis, as many as out's axis holds; indices may be NULL. */
void reference_sort(const reference_value *a, ml_axis axis, ml_axis out_axis, bool descending,
                    reference_value *values, reference_value *indices);
void reference_dot(const reference_value *a, const reference_value *b, const reference_value *scale,
                   /* NULL: 1 */ const int64_t *axes, int count, reference_value *out);
void reference_gather(const reference_value *table, const reference_value *index, ml_axis axis,
                      reference_value *out);
void reference_write_rows(const reference_value *cache, const reference_value *index,
                          const reference_value *value, ml_axis axis, reference_value *out);
void reference_scatter_add(const reference_value *index, const reference_value *value, ml_axis axis,
                           reference_value *out);

#endif
