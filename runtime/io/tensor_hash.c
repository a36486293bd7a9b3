#include "runtime/io/tensor_hash.h"

#include <string.h>

/* One-to-one (the finalizer of splitmix64), of bits to which a multiple of an odd number is added.
 */
static inline uint64_t mix(uint64_t bits, uint64_t index) {
    uint64_t x = bits + (index + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

#define ADD_ELEMENTS(T)                                                                            \
    for (int64_t i = 0; i < count; i++) {                                                          \
        T bits;                                                                                    \
        memcpy(&bits, (const char *)elements + i * (int64_t)sizeof bits, sizeof bits);             \
        sum += mix(bits, (uint64_t)(index + i));                                                   \
    }                                                                                              \
    break

uint64_t ml_tensor_hash(const void *elements, int width, int64_t index, int64_t count) {
    uint64_t sum = 0;
    switch (width) {
    case 1: ADD_ELEMENTS(uint8_t);
    case 2: ADD_ELEMENTS(uint16_t);
    case 4: ADD_ELEMENTS(uint32_t);
    default: ADD_ELEMENTS(uint64_t);
    }
    return sum;
}
