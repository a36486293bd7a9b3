/* Ranges of a program's inputs: what the ops that take indices allow of the values that the caller
 * gives.
 *
 * gather takes indices below the size of an axis; one_hot and cross_entropy, which are compositions
 * in Lua, declare the same of their indices (ml_index_use). A range is found where such an index is
 * an input, or comes from one through ops that keep each value: casts between integers, from floats
 * to integers, and the ops that rearrange elements. After arithmetic or `where` nothing is known,
 * and nothing is claimed. Of an input that is sliced only the elements that arrive are bounded. */
#ifndef ML_INPUT_RANGE_H
#define ML_INPUT_RANGE_H

#include "runtime/graph/graph.h"

/* `node` takes the values of `index` as positions 0 .. size-1, or the value `ignored`. */
typedef struct {
    ml_ref node, index;
    const char *what; /* the function's name */
    int64_t size;
    bool ignores;
    int64_t ignored;
} ml_index_use;
typedef ML_VEC(ml_index_use) ml_index_uses;

typedef struct {
    uint32_t input; /* its id */
    ml_index_use use;
    const unsigned char *part; /* by element: whether it is bounded; NULL: all are */
} ml_input_range;
typedef ML_VEC(ml_input_range) ml_input_ranges;

/* The ranges of what the roots reach, by those gathers and the declared uses; raises. */
void ml_find_input_ranges(const ml_graph *g, const ml_roots *roots, const ml_index_uses *declared,
                          ml_arena *arena, ml_input_ranges *ranges);
/* The first of an input's elements (of its dtype) that is out of range, or -1. */
int64_t ml_first_out_of_range(const ml_input_range *range, ml_dtype dtype, const void *data,
                              int64_t count);

#endif
