/* Elements in memory from one dtype to another: floats to floats, integers to integers.
 *
 * Each value is rounded once, to the nearest, ties to even; what is too large becomes infinite, as
 * IEEE 754 has it; NaN stays NaN, subnormals and the signs of zeros are kept. Integers keep their
 * value, and what does not fit is reported. */
#ifndef ML_CONVERT_H
#define ML_CONVERT_H

#include "runtime/graph/graph.h"

float ml_from_bf16(uint16_t bits);
uint16_t ml_to_bf16(double value);
/* IEEE 754 binary16: 5 bits of exponent, 10 of mantissa. */
float ml_from_f16(uint16_t bits);
uint16_t ml_to_f16(double value);
/* OCP's E4M3: 4 bits of exponent, 3 of mantissa; no infinities: what is beyond 464 becomes NaN. */
float ml_from_e4m3(uint8_t bits);
uint8_t ml_to_e4m3(double value);
/* E5M2: the upper half of binary16, with its infinities. */
float ml_from_e5m2(uint8_t bits);
uint8_t ml_to_e5m2(double value);
int8_t ml_to_i8(double value); /* the nearest, ties to even, from -127 to 127; NaN is 0 */

/* One element in host memory as a number, and back: integers wrap around, floats round. */
double ml_element(ml_dtype dtype, const void *data, int64_t i);
void ml_set_element(ml_dtype dtype, void *data, int64_t i, double value);

double ml_round_to(ml_dtype dtype, double value); /* the nearest value of a float dtype */

bool ml_converts(ml_dtype from, ml_dtype to);
/* The first element that does not fit, or -1. The dtypes are such that ml_converts. */
int64_t ml_convert(ml_dtype from, const void *source, ml_dtype to, void *target, int64_t count);

#endif
