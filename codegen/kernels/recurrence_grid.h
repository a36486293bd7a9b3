/* Inside of recurrence_grid*.c: a step with products of states, taken apart.
 *
 * Every value that a thread computes is one of a row and of one column of its own: a node of the
 * step at a coordinate for each of its axes. Columns of the axes that products sum over, and of
 * results with further axes (gates), are slots: as many columns as a state has, each. */
#ifndef ML_RECURRENCE_GRID_H
#define ML_RECURRENCE_GRID_H

#include "codegen/kernels/template.h"
#include "runtime/ops/recurrence/recurrence.h"

enum {
    GRID_THREADS = 512,
    GRID_SLOTS = 16,
    GRID_PRODUCTS = 8,
    GRID_LEVELS = 8, /* products of what products gave */
    GRID_ROWS = 128,
    GRID_COLUMNS = 64, /* of a product that a block computes */
    GRID_DEPTH = 1024, /* of a product, that blocks do not share yet */
};

/* base, and the row or column at hand on top of it. */
typedef enum { GRID_FIXED, GRID_COLUMN, GRID_DEEP, GRID_ROW } grid_variable; /* ROW + i: axis i */
typedef struct {
    int64_t base;
    int variable;
} grid_coordinate;

typedef struct {
    ml_ref node;
    grid_coordinate at[ML_MAX_AXES]; /* by the node's axes */
    ml_dtype dtype;
    int level; /* after so many products */
    bool zero;
    const char *name; /* its text */
} grid_value;

typedef struct {
    int matrix;               /* of the step's sources */
    int64_t base[GRID_SLOTS]; /* elements, by slot of the operand */
    int64_t depth_stride, column_stride;
    int value; /* that it gives */
} grid_result;
typedef struct {
    int level;                      /* of its operand */
    int slots, operand[GRID_SLOTS]; /* values */
    int results;
    grid_result result[GRID_SLOTS];
    int split;                              /* blocks that share it */
    int64_t operand_at, matrix_at, sums_at; /* bytes: in the workspace, in shared memory */
} grid_product;

typedef struct {
    ml_schedule *schedule;
    const ml_graph *g;
    ml_step *step;
    ml_template text;
    ml_recurrence r;
    int row_axes;
    ml_axis row_axis[ML_MAX_AXES];
    int64_t row_size[ML_MAX_AXES];
    int64_t rows, size; /* size: columns of a state */
    ML_VEC(grid_value) values;
    grid_product products[GRID_PRODUCTS];
    int product_count;
    int block_columns, blocks;
    int64_t matrix_bytes, part_bytes, workspace_bytes;
    int64_t zero_bytes; /* of the workspace, before the kernel runs */
    int raw_count, sum_count;
    /* Text: before the first position; a position's inputs, asked for and taken; its values by
     * level; what it stores; after the last. */
    ml_text setup, load, inputs, declare, level[GRID_LEVELS], stores, next, last;
} grid;

/* Raises ML_INVALID, with the reason, where the step is another. Calls write nothing to the step.
 */
void grid_take_apart(grid *x);
/* Where operand i is at these coordinates of `type`: the text of an index. */
const char *grid_address(const grid *x, int i, const ml_type *type, const grid_coordinate *at,
                         const char *row, const char *column);
_Noreturn void grid_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
