#include "runtime/io/tensor_hash.h"

#include <string.h>

#include "runtime/base/memory.h"

#define ADD_ELEMENTS(T)                                                                            \
    for (int64_t i = 0; i < count; i++) {                                                          \
        T bits;                                                                                    \
        memcpy(&bits, (const char *)elements + i * (int64_t)sizeof bits, sizeof bits);             \
        sum += ml_mix(bits, (uint64_t)(index + i));                                                \
    }                                                                                              \
    break

static inline __attribute__((always_inline)) uint64_t sum_of(const void *elements, int width,
                                                             int64_t index, int64_t count) {
    uint64_t sum = 0;
    switch (width) {
    case 1: ADD_ELEMENTS(uint8_t);
    case 2: ADD_ELEMENTS(uint16_t);
    case 4: ADD_ELEMENTS(uint32_t);
    default: ADD_ELEMENTS(uint64_t);
    }
    return sum;
}

#ifdef __x86_64__
/* Products of 64 bits, four or eight at once. */
#define SUM_BY(name, features)                                                                     \
    __attribute__((target(features), optimize("O3"))) static uint64_t name(                        \
        const void *elements, int width, int64_t index, int64_t count) {                           \
        return sum_of(elements, width, index, count);                                              \
    }
SUM_BY(sum_avx2, "avx2")
SUM_BY(sum_avx512, "avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

uint64_t ml_tensor_hash(const void *elements, int width, int64_t index, int64_t count) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return sum_avx512(elements, width, index, count);
    if (__builtin_cpu_supports("avx2")) return sum_avx2(elements, width, index, count);
#endif
    return sum_of(elements, width, index, count);
}
