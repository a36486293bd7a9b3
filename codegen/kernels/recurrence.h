/* Inside of the kernels of recurrences (recurrence*.c). */
#ifndef ML_KERNELS_RECURRENCE_H
#define ML_KERNELS_RECURRENCE_H

#include "codegen/kernels/template.h"
#include "runtime/graph/infer.h"
#include "runtime/ops/recurrence/recurrence.h"

enum { RECURRENCE_COPY = 16 }; /* bytes of an asynchronous copy */

/* 0 where the value lacks the axis. */
int64_t recurrence_stride(const ml_value *v, ml_axis axis);
/* The offset of a row's elements; `rows` has the rows' axes. */
const char *recurrence_offset(ml_arena *arena, const ml_value *v, const ml_type *rows,
                              const char *row);
/* Whether slices of rows side by side are whole asynchronous copies at each position. */
bool recurrence_copies(const ml_value *v, ml_axis axis, const ml_type *rows, ml_axis along);
/* Which output of the step's node its operand i is. */
int recurrence_output(const ml_schedule *s, const ml_step *step, int i);

/* Whether all that a step gives at each position is narrow, so that its kernel takes the quick
 * functions: cuda/recurrence_quick.cuh. Checkpoints do not count. */
bool recurrence_quick(const ml_schedule *s, const ml_step *step, ml_axis axis);

/* What a step's parameter is, or a result: wide ones are an element e of a row's short axis. */
typedef struct {
    const char *text;
    bool wide;
} recurrence_text;

/* Print the roots as CUDA: statements over a row, and loops over e < N. A wide result is an array;
 * `text` of it is that of element e. */
void recurrence_body_print(ml_text *out, const ml_graph *g, ml_axis axis, int64_t size,
                           const recurrence_text *parameters, const ml_ref *roots, int count,
                           const char *prefix, recurrence_text *results);

/* Whether the next values of all states compose (recurrence_compose.c): each is affine in its own
 * state and depends on no other, or max-plus, of which there is a bit in `max_plus`. What scales,
 * moves or selects them is added to `factors`, state by state. */
bool recurrence_composes(const ml_graph *g, ml_ref n, ml_arena *arena, uint32_t *max_plus,
                         ml_refs *factors);
/* The same of one root, in one algebra; and its slope as text: a number, or statements' result. */
bool recurrence_has_form(const ml_graph *g, ml_ref root, int parameter, bool max_plus,
                         ml_arena *arena, ml_refs *factors);
const char *recurrence_slope(ml_text *out, const ml_graph *g, ml_ref root, int parameter,
                             bool max_plus, const char *const *factors, const char *prefix);

/* The kernel of a step that ml_recurrence_by_rows has, or that computes histories again. */
void recurrence_rows_kernel(ml_schedule *s, ml_step *step);

#endif
