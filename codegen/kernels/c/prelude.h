/* The text before every C kernel: types in memory and their conversions, the functions of ops.def.
 * The f32 functions are branch-free so that loops over them become SIMD code; errors against the
 * exact value are a few units in the last place (tests/emit/math.c). Needs no headers. */
#ifndef ML_PRELUDE_H
#define ML_PRELUDE_H

typedef unsigned char ml_bool;
typedef unsigned short ml_bf16;
typedef unsigned short ml_f16;
typedef signed char ml_i8;
typedef unsigned char ml_e4m3;
typedef unsigned char ml_e5m2;
typedef long long ml_i64;
typedef unsigned long long ml_u64;
#define ML_INLINE static inline __attribute__((always_inline, unused))
#define ML_INF __builtin_inff()
#define ML_NAN __builtin_nanf("")
#define ML_MATH_f32(name) __builtin_##name##f
#define ML_MATH_f64(name) __builtin_##name

/* A name at file scope of the kernel ENTRY: several kernels may share a translation unit. */
#define ML_JOIN_(entry, name) entry##_##name
#define ML_JOIN(entry, name) ML_JOIN_(entry, name)
#define NAME(name) ML_JOIN(ENTRY, name)

ML_INLINE unsigned ml_bits_f32(float x) {
    union {
        float f;
        unsigned u;
    } b = {x};
    return b.u;
}
ML_INLINE float ml_from_bits_f32(unsigned u) {
    union {
        unsigned u;
        float f;
    } b = {u};
    return b.f;
}

/* bfloat16 in memory is its upper half; stores round to nearest, ties to even, NaN stays quiet NaN
 */
ML_INLINE float ml_load_bf16(ml_bf16 h) { return ml_from_bits_f32((unsigned)h << 16); }
ML_INLINE ml_bf16 ml_store_bf16(float x) {
    unsigned u = ml_bits_f32(x);
    unsigned rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (ml_bf16)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
ML_INLINE float ml_round_bf16(float x) { return ml_load_bf16(ml_store_bf16(x)); }

/* IEEE half precision. Loads: the exponent's bias differs by 112, and products by a power of two
 * are exact, of subnormals too. Stores round to nearest, ties to even: a subnormal by adding 0.5,
 * of which the last bit is the least of an f16; 65,520 and above become infinite. */
ML_INLINE float ml_load_f16(ml_f16 h) {
    unsigned size = (unsigned)(h & 0x7fff) << 13, sign = (unsigned)(h & 0x8000) << 16;
    unsigned finite = ml_bits_f32(ml_from_bits_f32(size) * 0x1p112f);
    return ml_from_bits_f32(sign | (size >= 0x0f800000u ? size | 0x7f800000u : finite));
}
ML_INLINE ml_f16 ml_store_f16(float x) {
    unsigned u = ml_bits_f32(x), size = u & 0x7fffffffu, sign = u >> 16 & 0x8000u;
    unsigned small = ml_bits_f32(ml_from_bits_f32(size) + 0.5f) - 0x3f000000u;
    unsigned normal = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
    unsigned h = size < 0x38800000u ? small : normal;
    h = size >= 0x477ff000u ? 0x7c00u : h;
    h = size > 0x7f800000u ? 0x7e00u : h;
    return (ml_f16)(sign | h);
}
ML_INLINE float ml_round_f16(float x) { return ml_load_f16(ml_store_f16(x)); }

/* 8 bits. Whole numbers: to the nearest by adding 3 * 2^22, NaN is 0. E4M3 and E5M2 as f16 above;
 * the least subnormal is the last bit of 2^14 and of 2^7, what is beyond 464 becomes NaN in E4M3.
 */
ML_INLINE float ml_load_i8(ml_i8 q) { return (float)q; }
ML_INLINE float ml_round_i8(float x) {
    float low = x > -127.0f ? x : x == x ? -127.0f : 0.0f, y = low < 127.0f ? low : 127.0f;
    return (y + 12582912.0f) - 12582912.0f;
}
ML_INLINE ml_i8 ml_store_i8(float x) { return (ml_i8)(int)ml_round_i8(x); }
ML_INLINE float ml_load_e4m3(ml_e4m3 q) {
    unsigned size = (unsigned)(q & 0x7f), sign = (unsigned)(q & 0x80) << 24;
    unsigned finite = ml_bits_f32(ml_from_bits_f32(size << 20) * 0x1p120f);
    return ml_from_bits_f32(sign | (size == 0x7fu ? 0x7fc00000u : finite));
}
ML_INLINE ml_e4m3 ml_store_e4m3(float x) {
    unsigned u = ml_bits_f32(x), size = u & 0x7fffffffu, sign = u >> 24 & 0x80u;
    unsigned small = ml_bits_f32(ml_from_bits_f32(size) + 16384.0f) - 0x46800000u;
    unsigned normal = (size - (120u << 23) + 0x7ffffu + (size >> 20 & 1u)) >> 20;
    unsigned q = size < 0x3c800000u ? small : normal;
    return (ml_e4m3)(sign | (size > 0x43e80000u ? 0x7fu : q));
}
ML_INLINE float ml_round_e4m3(float x) { return ml_load_e4m3(ml_store_e4m3(x)); }
ML_INLINE float ml_load_e5m2(ml_e5m2 q) { return ml_load_f16((ml_f16)(q << 8)); }
ML_INLINE ml_e5m2 ml_store_e5m2(float x) {
    unsigned u = ml_bits_f32(x), size = u & 0x7fffffffu, sign = u >> 24 & 0x80u;
    unsigned small = ml_bits_f32(ml_from_bits_f32(size) + 128.0f) - 0x43000000u;
    unsigned normal = (size - (112u << 23) + 0xfffffu + (size >> 21 & 1u)) >> 21;
    unsigned q = size < 0x38800000u ? small : normal;
    q = size >= 0x47700000u ? 0x7cu : q;
    return (ml_e5m2)(sign | (size > 0x7f800000u ? 0x7eu : q));
}
ML_INLINE float ml_round_e5m2(float x) { return ml_load_e5m2(ml_store_e5m2(x)); }

/* exp: 2^n e^r with |r| <= ln2/2; results below 2^-126 are 0 */
ML_INLINE float ml_exp_f32(float x) {
    float t = x * 1.44269504f + 12582912.0f, n = t - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.39262508e-3f;
    p = p * r + 8.36323288e-3f;
    p = p * r + 4.16665542e-2f;
    p = p * r + 1.66665767e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    p = ml_from_bits_f32(ml_bits_f32(p) + (ml_bits_f32(t) << 23));
    p = x < -87.3365479f ? 0.0f : p;
    p = x > 88.7228394f ? ML_INF : p;
    return x == x ? p : x;
}
/* log: x = 2^e (1 + f); with s = f / (2 + f), log(1 + f) = f - (f^2/2 - s (f^2/2 + R(s^2))) */
ML_INLINE float ml_log_f32(float x) {
    float scaled = x < 1.17549435e-38f ? x * 8388608.0f : x;
    float bias = x < 1.17549435e-38f ? 150.0f : 127.0f;
    unsigned u = ml_bits_f32(scaled) + 0x004afb0du; /* so that 1 + f lies in [sqrt 1/2, sqrt 2) */
    float e = (float)(int)(u >> 23) - bias;
    float f = ml_from_bits_f32((u & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    float s = f / (2.0f + f), z = s * s, half = 0.5f * f * f;
    float r = 2.33419434e-1f;
    r = r * z + 2.85503970e-1f;
    r = r * z + 4.00001256e-1f;
    r = z * (r * z + 6.66666665e-1f);
    float y = e * 0.693359375f + (f - (half - (s * (half + r) - e * 2.12194440e-4f)));
    y = x == ML_INF ? x : y;
    y = x > 0.0f ? y : ML_NAN;
    y = x == 0.0f ? -ML_INF : y;
    return y;
}
/* log(1 + x): as log of y = 1 + x, and what rounding y lost, over y; x itself where that is 1 + f
 */
ML_INLINE float ml_log1p_f32(float x) {
    float y = 1.0f + x, lost = x < 1.0f ? x - (y - 1.0f) : 1.0f - (y - x);
    unsigned u = ml_bits_f32(y) + 0x004afb0du;
    float e = (float)((int)(u >> 23) - 127);
    float f = ml_from_bits_f32((u & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    f = e == 0.0f ? x : f;
    lost = e == 0.0f ? 0.0f : lost / y;
    float s = f / (2.0f + f), z = s * s, half = 0.5f * f * f;
    float r = 2.33419434e-1f;
    r = r * z + 2.85503970e-1f;
    r = r * z + 4.00001256e-1f;
    r = z * (r * z + 6.66666665e-1f);
    float low = lost - e * 2.12194440e-4f;
    float l = e * 0.693359375f + (f - (half - (s * (half + r) + low)));
    l = x == ML_INF || x == 0.0f ? x : l;
    l = x > -1.0f ? l : ML_NAN;
    return x == -1.0f ? -ML_INF : l;
}
/* exp(x) - 1 = 2^n (e^r - 1) + (2^n - 1), by halves so that 2^128 fits; -1 from -20 on */
ML_INLINE float ml_expm1_f32(float x) {
    float b = x < -20.0f ? -20.0f : x;
    float t = b * 1.44269504f + 12582912.0f, n = t - 12582912.0f;
    float r = b - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.38982432e-3f;
    p = p * r + 8.36611446e-3f;
    p = p * r + 4.16668542e-2f;
    p = p * r + 1.66665480e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r;
    float half = ml_from_bits_f32((ml_bits_f32(t) << 23) + 0x3f000000u);
    float y = (half * p + (half - 0.5f)) * 2.0f;
    y = __builtin_fabsf(x) < 2.98023224e-8f ? x : y;
    y = x > 88.7228394f ? ML_INF : y;
    return x == x ? y : x;
}
ML_INLINE float ml_rsqrt_f32(float x) { return 1.0f / __builtin_sqrtf(x); }
ML_INLINE float ml_max_f32(float a, float b) { return a > b || a != a ? a : b; }
ML_INLINE float ml_min_f32(float a, float b) { return a < b || a != a ? a : b; }
/* erf: an odd polynomial near 0, 1 - e^-g(x) elsewhere, 1 beyond 4 */
ML_INLINE float ml_erf_f32(float x) {
    float a = __builtin_fabsf(x), z = x * x;
    float p = 8.39977779e-5f;
    p = p * z - 8.15005049e-4f;
    p = p * z + 5.20171457e-3f;
    p = p * z - 2.68596907e-2f;
    p = p * z + 1.12837012e-1f;
    p = p * z - 3.76126341e-1f;
    p = (p * z + 1.12837917f) * x;
    float b = a < 4.0f ? a : 4.0f;
    float g = -1.64306366e-6f;
    g = g * b + 4.61638586e-5f;
    g = g * b - 5.97585770e-4f;
    g = g * b + 4.76262583e-3f;
    g = g * b - 2.64276372e-2f;
    g = g * b + 1.10087166e-1f;
    g = g * b + 6.31823918e-1f;
    g = g * b + 1.13023106f;
    g = g * b - 3.18539662e-4f;
    float y = __builtin_copysignf(1.0f - ml_exp_f32(-g), x);
    y = a < 0.92f ? p : y;
    return x == x ? y : x;
}
/* the quarter of the circle after q quarters; branch-free, without integers of 64 bits */
#define ML_QUARTER(q, shift) (int)((q) + (shift)-4.0 * __builtin_floor(((q) + (shift)) * 0.25))
#define ML_DIVIDE(a, b) ((a) / (b))
#define ML_QUOTIENT(a, b) ((a) / (b))
#include "functions.h"

/* casts: towards zero; NaN gives 0, and what does not fit the nearest that does */
#define ML_TRUNCATE(name, from, to, limit, most)                                                   \
    ML_INLINE to name(from x) {                                                                    \
        to y = (to)(x > -limit && x < limit ? x : 0);                                              \
        y = x >= limit ? most : y;                                                                 \
        return x <= -limit ? -most - 1 : y;                                                        \
    }
ML_TRUNCATE(ml_i32_of_f32, float, int, 0x1p31f, 0x7fffffff)
ML_TRUNCATE(ml_i32_of_f64, double, int, 0x1p31, 0x7fffffff)
ML_TRUNCATE(ml_i64_of_f32, float, ml_i64, 0x1p63f, 0x7fffffffffffffffll)
ML_TRUNCATE(ml_i64_of_f64, double, ml_i64, 0x1p63, 0x7fffffffffffffffll)

/* Reductions keep 64, 16 or 1 independent lanes, so that their order does not depend on the
 * machine. These combine the lanes in pairs that are half as many lanes apart each time. (GCC
 * has __builtin_shufflevector from 12 on.) */
#define ML_VECTOR(type, name, width)                                                               \
    typedef type name                                                                              \
        __attribute__((vector_size(width * sizeof(type)), aligned(sizeof(type)), may_alias));
#define ML_VECTORS(type, mask, suffix)                                                             \
    ML_VECTOR(type, ml_v16_##suffix, 16)                                                           \
    ML_VECTOR(type, ml_v8_##suffix, 8)                                                             \
    ML_VECTOR(type, ml_v4_##suffix, 4)                                                             \
    ML_VECTOR(type, ml_v2_##suffix, 2)                                                             \
    ML_VECTOR(mask, ml_m16_##suffix, 16) ML_VECTOR(mask, ml_m8_##suffix, 8)                        \
        ML_VECTOR(mask, ml_m4_##suffix, 4) ML_VECTOR(mask, ml_m2_##suffix, 2)
ML_VECTORS(float, int, f32)
ML_VECTORS(double, ml_i64, f64)
ML_VECTORS(int, int, i32)
ML_VECTORS(ml_i64, ml_i64, i64)
#define ML_SUM_LANES(V, M, a, b) ((a) + (b))
#define ML_PICK_LANES(V, M, test, a, b) (V)(((test) & (M)(a)) | (~(test) & (M)(b)))
#define ML_MAX_LANES(V, M, a, b) ML_PICK_LANES(V, M, (M)((a) > (b)) | (M)((a) != (a)), a, b)
#define ML_MIN_LANES(V, M, a, b) ML_PICK_LANES(V, M, (M)((a) < (b)) | (M)((a) != (a)), a, b)
#define ML_FOLD(name, type, s, combine, one)                                                       \
    ML_INLINE type name(const type *lane, int count) {                                             \
        if (count == 1) return lane[0];                                                            \
        const ml_v16_##s *v = (const ml_v16_##s *)lane;                                            \
        ml_v16_##s a = v[0];                                                                       \
        if (count == 64) {                                                                         \
            ml_v16_##s b = combine(ml_v16_##s, ml_m16_##s, v[0], v[2]);                            \
            ml_v16_##s c = combine(ml_v16_##s, ml_m16_##s, v[1], v[3]);                            \
            a = combine(ml_v16_##s, ml_m16_##s, b, c);                                             \
        }                                                                                          \
        ml_v8_##s b[2];                                                                            \
        __builtin_memcpy(b, &a, sizeof a);                                                         \
        b[0] = combine(ml_v8_##s, ml_m8_##s, b[0], b[1]);                                          \
        ml_v4_##s c[2];                                                                            \
        __builtin_memcpy(c, b, sizeof c);                                                          \
        c[0] = combine(ml_v4_##s, ml_m4_##s, c[0], c[1]);                                          \
        ml_v2_##s d[2];                                                                            \
        __builtin_memcpy(d, c, sizeof d);                                                          \
        d[0] = combine(ml_v2_##s, ml_m2_##s, d[0], d[1]);                                          \
        return one(d[0][0], d[0][1]);                                                              \
    }
#define ML_ADD(a, b) ((a) + (b))
#define ML_FOLDS(type, s)                                                                          \
    ML_FOLD(ml_fold_sum_##s, type, s, ML_SUM_LANES, ML_ADD)                                        \
    ML_FOLD(ml_fold_max_##s, type, s, ML_MAX_LANES, ml_max_##s)                                    \
    ML_FOLD(ml_fold_min_##s, type, s, ML_MIN_LANES, ml_min_##s)                                    \
    /* whether (a, i) comes before (b, j) as the largest: NaN counts as largest, the first of      \
     * equals wins */                                                                              \
    ML_INLINE int ml_before_##s(type a, ml_i64 i, type b, ml_i64 j) {                              \
        return a > b || (a != a && b == b) || ((a == b || (a != a && b != b)) && i < j);           \
    }
ML_FOLDS(float, f32)
ML_FOLDS(double, f64)
ML_FOLDS(int, i32)
ML_FOLDS(ml_i64, i64)

#endif
