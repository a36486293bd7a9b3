/* The text before every C kernel: types in memory and their conversions, the functions of ops.def.
 * The f32 functions are branch-free so that loops over them become SIMD code; errors against the
 * exact value are a few units in the last place (tests/emit/math.c). Needs no headers. */
#ifndef ML_PRELUDE_H
#define ML_PRELUDE_H

typedef unsigned char ml_bool;
typedef unsigned short ml_bf16;
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
ML_INLINE float ml_sqrt_f32(float x) { return __builtin_sqrtf(x); }
ML_INLINE float ml_rsqrt_f32(float x) { return 1.0f / __builtin_sqrtf(x); }
ML_INLINE float ml_abs_f32(float x) { return __builtin_fabsf(x); }
ML_INLINE float ml_floor_f32(float x) { return __builtin_floorf(x); }
ML_INLINE float ml_ceil_f32(float x) { return __builtin_ceilf(x); }
ML_INLINE float ml_round_f32(float x) { return __builtin_rintf(x); }
ML_INLINE int ml_is_finite_f32(float x) { return (ml_bits_f32(x) & 0x7f800000u) != 0x7f800000u; }
ML_INLINE float ml_sign_f32(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }
ML_INLINE float ml_max_f32(float a, float b) { return a > b || a != a ? a : b; }
ML_INLINE float ml_min_f32(float a, float b) { return a < b || a != a ? a : b; }
ML_INLINE float ml_sigmoid_f32(float x) { return 1.0f / (1.0f + ml_exp_f32(-x)); }
/* tanh: an odd polynomial near 0, 1 - 2 / (e^2x + 1) elsewhere */
ML_INLINE float ml_tanh_f32(float x) {
    float a = __builtin_fabsf(x), z = x * x;
    float p = -6.09671417e-3f;
    p = p * z + 2.09971790e-2f;
    p = p * z - 5.38509096e-2f;
    p = p * z + 1.33327698e-1f;
    p = p * z - 3.33333289e-1f;
    p = p * z * x + x;
    float y = 1.0f - 2.0f / (ml_exp_f32(a + a) + 1.0f);
    y = __builtin_copysignf(a < 0.625f ? p : y, x);
    return x == x ? y : x;
}
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
/* sin(x + shift pi/2): reduced in f64, so that any f32 keeps its accuracy up to about 1e15; from
 * there on only the bounds hold */
ML_INLINE float ml_sine_f32(float x, double shift) {
    double q = __builtin_rint((double)x * 0.63661977236758134308);
    double wide = (double)x - q * 1.57079632673412561417e+0;
    float r = (float)(wide - q * 6.07710050650619224932e-11);
    r = r > 1.0f ? 1.0f : r < -1.0f ? -1.0f : r;
    double turn = q + shift;
    int quarter = (int)(turn - 4.0 * __builtin_floor(turn * 0.25));
    float z = r * r;
    float s = 2.72493140e-6f;
    s = s * z - 1.98400820e-4f;
    s = s * z + 8.33333187e-3f;
    s = s * z - 1.66666667e-1f;
    s = s * z * r + r;
    float c = -2.73004482e-7f;
    c = c * z + 2.48005964e-5f;
    c = c * z - 1.38888877e-3f;
    c = c * z + 4.16666666e-2f;
    c = c * (z * z) - 0.5f * z + 1.0f;
    float y = quarter & 1 ? c : s;
    y = quarter & 2 ? -y : y;
    return ml_is_finite_f32(x) ? y : ML_NAN;
}
ML_INLINE float ml_sin_f32(float x) { return ml_sine_f32(x, 0.0); }
ML_INLINE float ml_cos_f32(float x) { return ml_sine_f32(x, 1.0); }
ML_INLINE float ml_pow_f32(float a, float b) { return __builtin_powf(a, b); }
/* the quotient may have been rounded up to an integer: then the rest has the wrong sign */
ML_INLINE float ml_idiv_f32(float a, float b) {
    float q = __builtin_floorf(a / b), rest = q == 0.0f ? a : __builtin_fmaf(-q, b, a);
    return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? q - 1.0f : q;
}
ML_INLINE float ml_mod_f32(float a, float b) {
    float r = __builtin_fmodf(a, b);
    return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? r + b : r;
}

ML_INLINE double ml_exp_f64(double x) { return __builtin_exp(x); }
ML_INLINE double ml_log_f64(double x) { return __builtin_log(x); }
ML_INLINE double ml_expm1_f64(double x) { return __builtin_expm1(x); }
ML_INLINE double ml_log1p_f64(double x) { return __builtin_log1p(x); }
ML_INLINE double ml_sqrt_f64(double x) { return __builtin_sqrt(x); }
ML_INLINE double ml_rsqrt_f64(double x) { return 1.0 / __builtin_sqrt(x); }
ML_INLINE double ml_sin_f64(double x) { return __builtin_sin(x); }
ML_INLINE double ml_cos_f64(double x) { return __builtin_cos(x); }
ML_INLINE double ml_tanh_f64(double x) { return __builtin_tanh(x); }
ML_INLINE double ml_erf_f64(double x) { return __builtin_erf(x); }
ML_INLINE double ml_sigmoid_f64(double x) { return 1.0 / (1.0 + __builtin_exp(-x)); }
ML_INLINE double ml_abs_f64(double x) { return __builtin_fabs(x); }
ML_INLINE double ml_floor_f64(double x) { return __builtin_floor(x); }
ML_INLINE double ml_ceil_f64(double x) { return __builtin_ceil(x); }
ML_INLINE double ml_round_f64(double x) { return __builtin_rint(x); }
ML_INLINE int ml_is_finite_f64(double x) { return x - x == 0.0; }
ML_INLINE double ml_sign_f64(double x) { return x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : x; }
ML_INLINE double ml_max_f64(double a, double b) { return a > b || a != a ? a : b; }
ML_INLINE double ml_min_f64(double a, double b) { return a < b || a != a ? a : b; }
ML_INLINE double ml_pow_f64(double a, double b) { return __builtin_pow(a, b); }
ML_INLINE double ml_idiv_f64(double a, double b) {
    double q = __builtin_floor(a / b), rest = q == 0.0 ? a : __builtin_fma(-q, b, a);
    return rest != 0.0 && (rest < 0.0) != (b < 0.0) ? q - 1.0 : q;
}
ML_INLINE double ml_mod_f64(double a, double b) {
    double r = __builtin_fmod(a, b);
    return r != 0.0 && (r < 0.0) != (b < 0.0) ? r + b : r;
}

/* integers: quotients round towards minus infinity; a zero divisor gives 0 */
#define ML_INTEGERS(type, suffix)                                                                  \
    ML_INLINE type ml_idiv_##suffix(type a, type b) {                                              \
        type d = b == 0 || b == -1 ? 1 : b, q = a / d;                                             \
        q -= a % d != 0 && (a < 0) != (d < 0);                                                     \
        return b == 0 ? 0 : b == -1 ? -a : q;                                                      \
    }                                                                                              \
    ML_INLINE type ml_mod_##suffix(type a, type b) {                                               \
        type d = b == 0 || b == -1 ? 1 : b, r = a % d;                                             \
        return r != 0 && (r < 0) != (d < 0) ? r + d : r;                                           \
    }                                                                                              \
    ML_INLINE type ml_max_##suffix(type a, type b) { return a > b ? a : b; }                       \
    ML_INLINE type ml_min_##suffix(type a, type b) { return a < b ? a : b; }                       \
    ML_INLINE type ml_abs_##suffix(type a) { return a < 0 ? -a : a; }                              \
    ML_INLINE type ml_sign_##suffix(type a) { return (a > 0) - (a < 0); }                          \
    ML_INLINE int ml_is_finite_##suffix(type a) {                                                  \
        (void)a;                                                                                   \
        return 1;                                                                                  \
    }
ML_INTEGERS(int, i32)
ML_INTEGERS(ml_i64, i64)

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

/* the counter generator: uniform in [0, 1) */
ML_INLINE ml_u64 ml_mix(ml_u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
ML_INLINE float ml_random_f32(ml_i64 key, ml_i64 index) {
    const ml_u64 golden = 0x9e3779b97f4a7c15ull;
    ml_u64 u = ml_mix(ml_mix((ml_u64)key + golden) + ((ml_u64)index + 1) * golden);
    return (float)(int)(u >> 40) * 0x1p-24f;
}
ML_INLINE double ml_random_f64(ml_i64 key, ml_i64 index) { return ml_random_f32(key, index); }

/* Reductions keep 64, 16 or 1 independent lanes, so that their order does not depend on the
 * machine. These combine the lanes in pairs that are half as many lanes apart each time. (GCC
 * has __builtin_shufflevector from 12 on.) */
#define ML_VECTOR(type, name, width)                                                               \
    typedef type name                                                                              \
        __attribute__((vector_size(width * sizeof(type)), aligned(sizeof(type)), may_alias));
#define ML_VECTORS(type, mask, suffix)                                                             \
    ML_VECTOR(type, ml_v16_##suffix, 16)                                                           \
    ML_VECTOR(type, ml_v8_##suffix, 8)                                                             \
    ML_VECTOR(type, ml_v4_##suffix, 4) ML_VECTOR(type, ml_v2_##suffix, 2)                          \
        ML_VECTOR(mask, ml_m16_##suffix, 16) ML_VECTOR(mask, ml_m8_##suffix, 8)                    \
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
