/* Small graphs as text, in the form that ml_graph_print writes:
 *
 *     %1 f32[batch=4, embed=8] = input 0 x
 *     %2 f32[embed=8] = state 0 w   -- gpt.lua:3 blocks.1
 *     %3 = mul %1 %2                        what the op infers of the type may be left out
 *     output 0 = %3
 *     state 0 w = %3
 *
 * Operands refer to earlier lines. After "--" stand the origin and the module, and flags in
 * parentheses: (backward), (copy). States are parameters, those named "sum..." sums of gradients,
 * "adam..." of the optimizer. Inputs and states that are not large are filled with random numbers,
 * integers with those below 2, or below N with "(below N)". Functions of attention and of products
 * by groups are not read. */
#ifndef ML_TESTS_GRAPH_TEXT_H
#define ML_TESTS_GRAPH_TEXT_H

#include "tests/passes/support.h"

/* Adds the nodes to the fixture's graph, which is empty. Raises, with the line. */
void graph_read(fixture *f, const char *text, ml_roots *roots);

#endif
