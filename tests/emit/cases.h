/* Hand-made kernel IR that the tests of both printers share: elementwise kernels with broadcasts,
 * permutations, gathers and guards, softmax, a norm's backward pass, sums over everything and over
 * rows, argmax, integer reductions. */
#ifndef ML_TEST_EMIT_CASES_H
#define ML_TEST_EMIT_CASES_H

#include "tests/emit/ir.h"

/* A random kernel (tests/emit/random.c), memory filled. */
void emit_random_case(ir_kernel *k, uint64_t seed);
/* Build case `i` (the last ones are random), memory filled; its name, or NULL past the last. */
const char *emit_case(ir_kernel *k, int i, double *tolerance);

#endif
