/* Divisors of sizes. Sizes come from scripts and may be primes near 2^63, so every search is over
 * a range that the caller bounds, never over all numbers below the size. */
#ifndef ML_DIVISOR_H
#define ML_DIVISOR_H

#include <stdint.h>

/* The smallest divisor of n in least..most, or 0 where there is none; n and least are positive.
 * At most most - least + 1 divisions. */
int64_t ml_divisor_from(int64_t n, int64_t least, int64_t most);

#endif
