/* Functions of ops.def that are the same in C and in CUDA: a part of both preludes, which define
 * ml_exp_f32, ml_bits_f32, ml_from_bits_f32, ML_MATH_f32, ML_MATH_f64, ML_DIVIDE (a quotient that
 * may be off by units in the last place), ML_QUOTIENT (one that may not) and ML_QUARTER (of a
 * sine). */

ML_INLINE float ml_sqrt_f32(float x) { return ML_MATH_f32(sqrt)(x); }
ML_INLINE float ml_abs_f32(float x) { return ML_MATH_f32(fabs)(x); }
ML_INLINE float ml_floor_f32(float x) { return ML_MATH_f32(floor)(x); }
ML_INLINE float ml_ceil_f32(float x) { return ML_MATH_f32(ceil)(x); }
ML_INLINE float ml_round_f32(float x) { return ML_MATH_f32(rint)(x); }
ML_INLINE int ml_is_finite_f32(float x) { return (ml_bits_f32(x) & 0x7f800000u) != 0x7f800000u; }
ML_INLINE float ml_sign_f32(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }
ML_INLINE float ml_sigmoid_f32(float x) { return ML_DIVIDE(1.0f, 1.0f + ml_exp_f32(-x)); }
/* tanh: an odd polynomial near 0, 1 - 2 / (e^2x + 1) elsewhere */
ML_INLINE float ml_tanh_f32(float x) {
    float a = ML_MATH_f32(fabs)(x), z = x * x;
    float p = -6.09671417e-3f;
    p = p * z + 2.09971790e-2f;
    p = p * z - 5.38509096e-2f;
    p = p * z + 1.33327698e-1f;
    p = p * z - 3.33333289e-1f;
    p = p * z * x + x;
    float y = 1.0f - ML_DIVIDE(2.0f, ml_exp_f32(a + a) + 1.0f);
    y = ML_MATH_f32(copysign)(a < 0.625f ? p : y, x);
    return x == x ? y : x;
}
/* sin(x + shift pi/2): reduced in f64, so that any f32 keeps its accuracy up to about 1e15; from
 * there on only the bounds hold */
ML_INLINE float ml_sine_f32(float x, int shift) {
    double q = ML_MATH_f64(rint)((double)x * 0.63661977236758134308);
    double wide = ML_MATH_f64(fma)(-q, 1.57079632673412561417e+0, (double)x);
    float r = (float)ML_MATH_f64(fma)(-q, 6.07710050650619224932e-11, wide);
    r = r > 1.0f ? 1.0f : r < -1.0f ? -1.0f : r;
    int quarter = ML_QUARTER(q, shift);
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
ML_INLINE float ml_sin_f32(float x) { return ml_sine_f32(x, 0); }
ML_INLINE float ml_cos_f32(float x) { return ml_sine_f32(x, 1); }
ML_INLINE float ml_pow_f32(float a, float b) { return ML_MATH_f32(pow)(a, b); }
/* the quotient may have been rounded up to an integer: then the rest has the wrong sign */
ML_INLINE float ml_idiv_f32(float a, float b) {
    float q = ML_MATH_f32(floor)(ML_QUOTIENT(a, b)),
          rest = q == 0.0f ? a : ML_MATH_f32(fma)(-q, b, a);
    return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? q - 1.0f : q;
}
ML_INLINE float ml_mod_f32(float a, float b) {
    float r = ML_MATH_f32(fmod)(a, b);
    return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? r + b : r;
}

ML_INLINE double ml_exp_f64(double x) { return ML_MATH_f64(exp)(x); }
ML_INLINE double ml_log_f64(double x) { return ML_MATH_f64(log)(x); }
ML_INLINE double ml_expm1_f64(double x) { return ML_MATH_f64(expm1)(x); }
ML_INLINE double ml_log1p_f64(double x) { return ML_MATH_f64(log1p)(x); }
ML_INLINE double ml_sqrt_f64(double x) { return ML_MATH_f64(sqrt)(x); }
ML_INLINE double ml_rsqrt_f64(double x) { return 1.0 / ML_MATH_f64(sqrt)(x); }
ML_INLINE double ml_sin_f64(double x) { return ML_MATH_f64(sin)(x); }
ML_INLINE double ml_cos_f64(double x) { return ML_MATH_f64(cos)(x); }
ML_INLINE double ml_tanh_f64(double x) { return ML_MATH_f64(tanh)(x); }
ML_INLINE double ml_erf_f64(double x) { return ML_MATH_f64(erf)(x); }
ML_INLINE double ml_sigmoid_f64(double x) { return 1.0 / (1.0 + ML_MATH_f64(exp)(-x)); }
ML_INLINE double ml_abs_f64(double x) { return ML_MATH_f64(fabs)(x); }
ML_INLINE double ml_floor_f64(double x) { return ML_MATH_f64(floor)(x); }
ML_INLINE double ml_ceil_f64(double x) { return ML_MATH_f64(ceil)(x); }
ML_INLINE double ml_round_f64(double x) { return ML_MATH_f64(rint)(x); }
ML_INLINE int ml_is_finite_f64(double x) { return x - x == 0.0; }
ML_INLINE double ml_sign_f64(double x) { return x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : x; }
ML_INLINE double ml_max_f64(double a, double b) { return a > b || a != a ? a : b; }
ML_INLINE double ml_min_f64(double a, double b) { return a < b || a != a ? a : b; }
ML_INLINE double ml_pow_f64(double a, double b) { return ML_MATH_f64(pow)(a, b); }
ML_INLINE double ml_idiv_f64(double a, double b) {
    double q = ML_MATH_f64(floor)(a / b), rest = q == 0.0 ? a : ML_MATH_f64(fma)(-q, b, a);
    return rest != 0.0 && (rest < 0.0) != (b < 0.0) ? q - 1.0 : q;
}
ML_INLINE double ml_mod_f64(double a, double b) {
    double r = ML_MATH_f64(fmod)(a, b);
    return r != 0.0 && (r < 0.0) != (b < 0.0) ? r + b : r;
}

/* Stochastic rounding to bf16. The lower 16 bits of a, as a fraction, are the probability that its
 * size is rounded up, which is so where they and those of b have a carry. */
ML_INLINE float ml_stochastic_bf16_f32(float a, float b) {
    unsigned draw = b > 0.0f ? (b < 1.0f ? (unsigned)(b * 65536.0f) : 65535u) : 0u;
    unsigned bits = ml_bits_f32(a);
    bits = (bits + draw) & 0xffff0000u;
    return ml_is_finite_f32(a) ? ml_from_bits_f32(bits) : a;
}
ML_INLINE double ml_stochastic_bf16_f64(double a, double b) {
    return ml_stochastic_bf16_f32((float)a, (float)b);
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

/* the counter generator: uniform in [0, 1) */
ML_INLINE ml_u64 ml_mix(ml_u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
ML_INLINE float ml_random_f32(ml_i64 key, ml_i64 index) {
    const ml_u64 golden = 0x9e3779b97f4a7c15ull;
    ml_u64 u = ml_mix(ml_mix((ml_u64)key + golden) + ((ml_u64)index + 1) * golden);
    return (float)(int)(u >> 40) * 5.9604644775390625e-8f;
}
ML_INLINE double ml_random_f64(ml_i64 key, ml_i64 index) { return ml_random_f32(key, index); }
