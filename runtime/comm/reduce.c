/* Sums, largest and smallest of several buffers, always added up in the order of the buffers. */
#include <string.h>

#include "runtime/comm/comm_internal.h"
#include "runtime/graph/convert.h"

enum { BLOCK = 512 }; /* elements whose accumulators stay in the first-level cache */

#define INLINE static inline __attribute__((always_inline))

INLINE float load_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
/* To nearest, ties to even; NaN stays NaN. */
INLINE uint16_t store_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

#define SAME(x) (x)
#define ADD(a, b) ((a) + (b))
#define ADD_INT(a, b) ((__typeof__(a))((uint64_t)(a) + (uint64_t)(b)))
#define OR(a, b) ((a) | (b))
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

/* NAME##_block has a constant length where it matters, so that the compiler makes vectors of it. */
#define REDUCER(NAME, MEMORY, TYPE, LOAD, STORE, SUM)                                              \
    INLINE void NAME##_add(TYPE *restrict sum, const MEMORY *restrict source, int length,          \
                           ml_combine op) {                                                        \
        if (op == ML_COMBINE_SUM)                                                                  \
            for (int i = 0; i < length; i++) sum[i] = SUM(sum[i], (TYPE)LOAD(source[i]));          \
        else if (op == ML_COMBINE_MAX)                                                             \
            for (int i = 0; i < length; i++) sum[i] = LARGER(sum[i], (TYPE)LOAD(source[i]));       \
        else                                                                                       \
            for (int i = 0; i < length; i++) sum[i] = SMALLER(sum[i], (TYPE)LOAD(source[i]));      \
    }                                                                                              \
    INLINE void NAME##_block(const void *const *sources, int count, int64_t at, MEMORY *out,       \
                             int length, ml_combine op) {                                          \
        TYPE sum[BLOCK];                                                                           \
        const MEMORY *first = (const MEMORY *)sources[0] + at;                                     \
        for (int i = 0; i < length; i++) sum[i] = LOAD(first[i]);                                  \
        for (int k = 1; k < count; k++)                                                            \
            NAME##_add(sum, (const MEMORY *)sources[k] + at, length, op);                          \
        for (int i = 0; i < length; i++) out[i] = (MEMORY)STORE(sum[i]);                           \
    }                                                                                              \
    static void NAME(ml_combine op, const void *const *sources, int count, int64_t from,           \
                     int64_t elements, void *out) {                                                \
        int64_t done = 0;                                                                          \
        for (; done + BLOCK <= elements; done += BLOCK)                                            \
            NAME##_block(sources, count, from + done, (MEMORY *)out + done, BLOCK, op);            \
        if (done < elements)                                                                       \
            NAME##_block(sources, count, from + done, (MEMORY *)out + done,                        \
                         (int)(elements - done), op);                                              \
    }

REDUCER(reduce_f32, float, float, SAME, SAME, ADD)
REDUCER(reduce_f64, double, double, SAME, SAME, ADD)
REDUCER(reduce_bf16, uint16_t, float, load_bf16, store_bf16, ADD)
REDUCER(reduce_f16, uint16_t, float, ml_from_f16, ml_to_f16, ADD)
REDUCER(reduce_i8, int8_t, float, SAME, ml_to_i8, ADD)
REDUCER(reduce_e4m3, uint8_t, float, ml_from_e4m3, ml_to_e4m3, ADD)
REDUCER(reduce_e5m2, uint8_t, float, ml_from_e5m2, ml_to_e5m2, ADD)
REDUCER(reduce_i32, int32_t, int32_t, SAME, SAME, ADD_INT)
REDUCER(reduce_i64, int64_t, int64_t, SAME, SAME, ADD_INT)
REDUCER(reduce_bool, uint8_t, uint8_t, SAME, SAME, OR)

void comm_reduce(ml_dtype dtype, ml_combine op, const void *const *sources, int count, int64_t from,
                 int64_t elements, void *out) {
    switch (dtype) {
    case ML_F32: reduce_f32(op, sources, count, from, elements, out); break;
    case ML_F64: reduce_f64(op, sources, count, from, elements, out); break;
    case ML_F16: reduce_f16(op, sources, count, from, elements, out); break;
    case ML_BF16: reduce_bf16(op, sources, count, from, elements, out); break;
    case ML_I8: reduce_i8(op, sources, count, from, elements, out); break;
    case ML_E4M3: reduce_e4m3(op, sources, count, from, elements, out); break;
    case ML_E5M2: reduce_e5m2(op, sources, count, from, elements, out); break;
    case ML_I32: reduce_i32(op, sources, count, from, elements, out); break;
    case ML_I64: reduce_i64(op, sources, count, from, elements, out); break;
    case ML_BOOL:
    case ML_DTYPE_COUNT: reduce_bool(op, sources, count, from, elements, out); break;
    }
}
