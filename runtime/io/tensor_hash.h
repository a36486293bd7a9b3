/* The hash of a tensor's content, the same however the tensor is split.
 *
 * It is the sum, modulo 2^64, of a hash of each element's bits and its index in the whole tensor:
 * the sums of disjoint parts add up to that of the whole, in any order. The hash of an element is
 * one-to-one in its bits, so that one changed element always changes the sum. */
#ifndef ML_TENSOR_HASH_H
#define ML_TENSOR_HASH_H

#include <stdint.h>

/* `count` elements of `width` (1, 2, 4 or 8) bytes, of which the first is element `index`. */
uint64_t ml_tensor_hash(const void *elements, int width, int64_t index, int64_t count);

#endif
