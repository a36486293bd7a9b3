#include "runtime/graph/convert.h"

#include <math.h>
#include <string.h>

static float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

float ml_from_bf16(uint16_t bits) {
    return of_bits((uint32_t)bits << 16);
}

static uint16_t round_bf16(float value) {
    uint32_t bits = bits_of(value);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40); /* quiet, not infinite */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* A double that was rounded to the middle between two bf16 numbers is moved off it again, to the
 * side on which it was: rounding twice is rounding once then. */
uint16_t ml_to_bf16(double value) {
    float near = (float)value;
    uint32_t bits = bits_of(near);
    if ((bits & 0xffff) == 0x8000 && (double)near != value) {
        bool beyond = value < 0 ? value < (double)near : value > (double)near;
        near = of_bits(beyond ? bits + 1 : bits - 1);
    }
    return round_bf16(near);
}

float ml_from_f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, mantissa = bits & 0x3ff;
    const uint32_t exponent = bits >> 10 & 31;
    if (exponent == 31) return of_bits(sign | 0x7f800000 | mantissa << 13); /* infinity, NaN */
    if (exponent > 0) return of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float small = (float)mantissa * 0x1p-24f; /* zero and subnormals */
    return sign ? -small : small;
}

uint16_t ml_to_f16(double value) {
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double size = fabs(value);
    int exponent;
    if (value != value) return sign | 0x7e00;
    if (size >= 65520) return sign | 0x7c00;                              /* half way to 65,536 */
    if (size < 0x1p-14) return sign | (uint16_t)nearbyint(size * 0x1p24); /* subnormal, or 2^-14 */
    const double mantissa = nearbyint(frexp(size, &exponent) * 0x1p11);   /* 1024 to 2048 */
    return (uint16_t)(sign + ((exponent + 14) << 10) + (int)mantissa - 1024);
}

/* The same of an f32, which a loop over many can do by vectors: a subnormal is rounded by adding
 * 0.5, whose last bit is the least of an f16. */
static uint16_t round_f16(float value) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
    const uint32_t small = bits_of(of_bits(size) + 0.5f) - 0x3f000000;
    const uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t half = size < 0x38800000 ? small : normal;
    half = size >= 0x477ff000 ? 0x7c00 : half;
    half = size > 0x7f800000 ? 0x7e00 : half;
    return (uint16_t)((bits >> 16 & 0x8000) | half);
}

float ml_from_e4m3(uint8_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x80) << 24, size = bits & 0x7f;
    if (size == 0x7f) return of_bits(sign | 0x7fc00000);
    return of_bits(sign | bits_of(of_bits(size << 20) * 0x1p120f));
}

uint8_t ml_to_e4m3(double value) {
    const uint8_t sign = signbit(value) ? 0x80 : 0;
    const double size = fabs(value);
    int exponent;
    if (!(size <= 464)) return sign | 0x7f;                            /* half way to 480, or NaN */
    if (size < 0x1p-6) return sign | (uint8_t)nearbyint(size * 0x1p9); /* subnormal, or 2^-6 */
    const double mantissa = nearbyint(frexp(size, &exponent) * 0x1p4); /* 8 to 16 */
    return (uint8_t)(sign + ((exponent + 6) << 3) + (int)mantissa - 8);
}

float ml_from_e5m2(uint8_t bits) {
    return ml_from_f16((uint16_t)(bits << 8));
}

uint8_t ml_to_e5m2(double value) {
    const uint8_t sign = signbit(value) ? 0x80 : 0;
    const double size = fabs(value);
    int exponent;
    if (value != value) return sign | 0x7e;
    if (size >= 61440) return sign | 0x7c;                               /* half way to 2^16 */
    if (size < 0x1p-14) return sign | (uint8_t)nearbyint(size * 0x1p16); /* subnormal, or 2^-14 */
    const double mantissa = nearbyint(frexp(size, &exponent) * 0x1p3);   /* 4 to 8 */
    return (uint8_t)(sign + ((exponent + 14) << 2) + (int)mantissa - 4);
}

int8_t ml_to_i8(double value) {
    if (value != value) return 0;
    return (int8_t)nearbyint(value < -127 ? -127 : value > 127 ? 127 : value);
}

#define ml_plain(x) (x)
#define ml_truth(x) ((x) != 0)

double ml_element(ml_dtype dtype, const void *data, int64_t i) {
    switch (dtype) {
#define ML_DTYPE(ident, name, bytes, kind, compute, promotion, digits, least, largest, host, from, \
                 ...)                                                                              \
    case ML_##ident:                                                                               \
        return (double)from(((const host *)data)[i]);
#include "runtime/graph/dtypes.def"
#undef ML_DTYPE
    case ML_DTYPE_COUNT: break;
    }
    return 0;
}

void ml_set_element(ml_dtype dtype, void *data, int64_t i, double value) {
    switch (dtype) {
#define ML_DTYPE(ident, name, bytes, kind, compute, promotion, digits, least, largest, host, from, \
                 to, ...)                                                                          \
    case ML_##ident:                                                                               \
        ((host *)data)[i] = (host)to(value);                                                       \
        break;
#include "runtime/graph/dtypes.def"
#undef ML_DTYPE
    case ML_DTYPE_COUNT: break;
    }
}

double ml_round_to(ml_dtype dtype, double value) {
    double cell;
    ml_set_element(dtype, &cell, 0, value);
    return ml_element(dtype, &cell, 0);
}

bool ml_converts(ml_dtype from, ml_dtype to) {
    const ml_dtype_kind a = ml_dtypes[from].kind, b = ml_dtypes[to].kind;
    return from == to || (a == b && a != ML_KIND_BOOL);
}

/* One loop a pair of dtypes. */
#define CONVERT(from_type, to_type, expression)                                                    \
    do {                                                                                           \
        const from_type *a = source;                                                               \
        to_type *b = target;                                                                       \
        for (int64_t i = 0; i < count; i++) b[i] = (expression);                                   \
    } while (0)

static void convert_floats(ml_dtype from, const void *source, ml_dtype to, void *target,
                           int64_t count) {
    if (from == ML_F16 && to == ML_F32) CONVERT(uint16_t, float, ml_from_f16(a[i]));
    if (from == ML_F16 && to == ML_F64) CONVERT(uint16_t, double, (double)ml_from_f16(a[i]));
    if (from == ML_F16 && to == ML_BF16) CONVERT(uint16_t, uint16_t, round_bf16(ml_from_f16(a[i])));
    if (from == ML_BF16 && to == ML_F16) CONVERT(uint16_t, uint16_t, round_f16(ml_from_bf16(a[i])));
    if (from == ML_F32 && to == ML_F16) CONVERT(float, uint16_t, round_f16(a[i]));
    if (from == ML_F64 && to == ML_F16) CONVERT(double, uint16_t, ml_to_f16(a[i]));
    if (from == ML_BF16 && to == ML_F32) CONVERT(uint16_t, float, ml_from_bf16(a[i]));
    if (from == ML_BF16 && to == ML_F64) CONVERT(uint16_t, double, (double)ml_from_bf16(a[i]));
    if (from == ML_F32 && to == ML_BF16) CONVERT(float, uint16_t, round_bf16(a[i]));
    if (from == ML_F32 && to == ML_F64) CONVERT(float, double, (double)a[i]);
    if (from == ML_F64 && to == ML_BF16) CONVERT(double, uint16_t, ml_to_bf16(a[i]));
    if (from == ML_F64 && to == ML_F32) CONVERT(double, float, (float)a[i]);
    if (from == ML_I8 && to == ML_F32) CONVERT(int8_t, float, (float)a[i]);
    if (from == ML_E4M3 && to == ML_F32) CONVERT(uint8_t, float, ml_from_e4m3(a[i]));
    if (from == ML_E5M2 && to == ML_F32) CONVERT(uint8_t, float, ml_from_e5m2(a[i]));
    bool weights = ml_dtypes[to].bytes == 1 || (ml_dtypes[from].bytes == 1 && to != ML_F32);
    for (int64_t i = 0; weights && i < count; i++)
        ml_set_element(to, target, i, ml_element(from, source, i));
}

int64_t ml_convert(ml_dtype from, const void *source, ml_dtype to, void *target, int64_t count) {
    assert(ml_converts(from, to));
    if (from == to) {
        if (count > 0) memcpy(target, source, (size_t)(count * ml_dtypes[to].bytes));
        return -1;
    }
    if (ml_dtypes[to].kind == ML_KIND_FLOAT) {
        convert_floats(from, source, to, target, count);
        return -1;
    }
    if (to == ML_I64) {
        CONVERT(int32_t, int64_t, a[i]);
        return -1;
    }
    const int64_t *wide = source;
    for (int64_t i = 0; i < count; i++) {
        if (wide[i] < INT32_MIN || wide[i] > INT32_MAX) return i;
        ((int32_t *)target)[i] = (int32_t)wide[i];
    }
    return -1;
}
