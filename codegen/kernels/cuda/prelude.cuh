/* The text before every CUDA kernel: types in memory and their conversions, the functions of
 * ops.def, packs of neighbouring elements, reductions over threads. Needs no headers. */
#ifndef ML_PRELUDE_CUH
#define ML_PRELUDE_CUH

typedef unsigned char ml_bool;
struct ml_bf16 {
    unsigned short bits;
};
struct ml_f16 {
    unsigned short bits;
};
struct ml_i8 {
    signed char bits;
};
struct ml_e4m3 {
    unsigned char bits;
};
struct ml_e5m2 {
    unsigned char bits;
};
typedef long long ml_i64;
typedef unsigned long long ml_u64;
#define ML_INLINE static __device__ __forceinline__
#define ML_INF __int_as_float(0x7f800000)
#define ML_NAN __int_as_float(0x7fc00000)
#define ML_MATH_f32(name) name##f
#define ML_MATH_f64(name) name

/* A name at file scope of the kernel ENTRY: several kernels may share a translation unit. */
#define ML_JOIN_(entry, name) entry##_##name
#define ML_JOIN(entry, name) ML_JOIN_(entry, name)
#define NAME(name) ML_JOIN(ENTRY, name)

/* First in kernels that may be launched before the steps ahead have ended (ml_kernel.early): from
 * here on those have, and what they wrote is there. The next launch may begin likewise. */
ML_INLINE void kernel_begins() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
}
/* Its two parts, for kernels of which the next may begin only later. */
ML_INLINE void kernel_waits() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
ML_INLINE void kernel_lets_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* That the line at `at` be in the L2 cache: of what is read later. */
ML_INLINE void kernel_asks(const void *at) {
#if __CUDA_ARCH__ >= 800
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

/* bfloat16 in memory is its upper half; stores round to nearest, ties to even */
ML_INLINE float ml_load_bf16(ml_bf16 h) { return __uint_as_float((unsigned)h.bits << 16); }
ML_INLINE ml_bf16 ml_store_bf16(float x) {
    ml_bf16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
    return h;
}
/* by one instruction: as the upper one of two */
ML_INLINE float ml_round_bf16(float x) {
    unsigned r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(x), "f"(0.0f));
    return __uint_as_float(r);
}

/* IEEE half precision: stores round to nearest, ties to even */
ML_INLINE float ml_load_f16(ml_f16 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
    return x;
}
ML_INLINE ml_f16 ml_store_f16(float x) {
    ml_f16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
    return h;
}
ML_INLINE float ml_round_f16(float x) { return ml_load_f16(ml_store_f16(x)); }

/* 8 bits, as in the prelude of C kernels. */
ML_INLINE float ml_load_i8(ml_i8 q) { return (float)q.bits; }
ML_INLINE float ml_round_i8(float x) {
    float low = x > -127.0f ? x : x == x ? -127.0f : 0.0f, y = low < 127.0f ? low : 127.0f;
    return (y + 12582912.0f) - 12582912.0f;
}
ML_INLINE ml_i8 ml_store_i8(float x) {
    ml_i8 q;
    q.bits = (signed char)(int)ml_round_i8(x);
    return q;
}
ML_INLINE float ml_load_e4m3(ml_e4m3 q) {
    unsigned size = q.bits & 0x7fu, sign = (q.bits & 0x80u) << 24;
    unsigned finite =
        __float_as_uint(__uint_as_float(size << 20) * 1.329227995784916e36f); /* 2^120 */
    return __uint_as_float(sign | (size == 0x7fu ? 0x7fc00000u : finite));
}
ML_INLINE ml_e4m3 ml_store_e4m3(float x) {
    unsigned u = __float_as_uint(x), size = u & 0x7fffffffu, sign = u >> 24 & 0x80u;
    unsigned small = __float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u;
    unsigned normal = (size - (120u << 23) + 0x7ffffu + (size >> 20 & 1u)) >> 20;
    ml_e4m3 q;
    q.bits = (unsigned char)(sign | (size > 0x43e80000u   ? 0x7fu
                                     : size < 0x3c800000u ? small
                                                          : normal));
    return q;
}
ML_INLINE float ml_round_e4m3(float x) { return ml_load_e4m3(ml_store_e4m3(x)); }
ML_INLINE float ml_load_e5m2(ml_e5m2 q) {
    ml_f16 h;
    h.bits = (unsigned short)(q.bits << 8);
    return ml_load_f16(h);
}
ML_INLINE ml_e5m2 ml_store_e5m2(float x) {
    unsigned u = __float_as_uint(x), size = u & 0x7fffffffu, sign = u >> 24 & 0x80u;
    unsigned small = __float_as_uint(__uint_as_float(size) + 128.0f) - 0x43000000u;
    unsigned normal = (size - (112u << 23) + 0xfffffu + (size >> 21 & 1u)) >> 21;
    ml_e5m2 q;
    q.bits = (unsigned char)(sign | (size > 0x7f800000u    ? 0x7eu
                                     : size >= 0x47700000u ? 0x7cu
                                     : size < 0x38800000u  ? small
                                                           : normal));
    return q;
}
ML_INLINE float ml_round_e5m2(float x) { return ml_load_e5m2(ml_store_e5m2(x)); }

/* Kernels that write no elements but bf16 use the quick functions: errors of about 1e-6 (2e-6 for
 * exp of arguments around 20), a thousandth of what rounding to bf16 loses. */
ML_INLINE float ml_quick_exp_f32(float x) {
    float r;
    x *= 1.44269504f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
ML_INLINE float ml_quick_sigmoid_f32(float x) {
    return __fdividef(1.0f, 1.0f + ml_quick_exp_f32(-x));
}
ML_INLINE float ml_quick_tanh_f32(float x) {
    float y = 1.0f - __fdividef(2.0f, 1.0f + ml_quick_exp_f32(2.0f * x));
    return fabsf(x) < 0.04f ? x - x * x * x * 0.333333333f : y;
}
/* The hardware's: relative errors up to 2^-11, for scores of attention in bf16, of operands that
 * were rounded to 2^-9. */
ML_INLINE float ml_hardware_tanh_f32(float x) {
    float r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
/* exp(x - y) 2^up where y is the same for many x: one multiplication and addition an
 * element; errors as of an argument as large as y. From 1e9 on numbers are equal or 64
 * apart, and their difference must be exact, or rows of nothing but -1e30 would overflow:
 * there in base 2, and without 2^up. With 2^up for f16, which overflows sooner, x and y are
 * bf16, which from ML_UP_TO on are as far apart. */
#define ML_UP_TO 1e7f
ML_INLINE float ml_quick_exp_less(float x, float y, float up = 0.0f) {
    const bool near = fabsf(y) < (up > 0.0f ? ML_UP_TO : 1e9f);
    const float unit = near ? 1.44269504f : 1.0f;
    float r;
    x = fmaf(x, unit, near ? fmaf(-unit, y, up) : -y);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
/* what is at most 1 times 2^15, so that f16 holds it to 2^-12 from 2^-29 on; and back */
#define ML_UP 15.0f
#define ML_DOWN 3.0517578125e-05f
ML_INLINE float ml_down(float y) { return fabsf(y) < ML_UP_TO ? ML_DOWN : 1.0f; }
/* for kernels that have no registers left for what ml_quick_exp_less makes of y */
ML_INLINE float ml_exp_up(float x) {
    float r;
    x = fmaf(x, 1.44269504f, ML_UP);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
ML_INLINE float ml_exp_f32(float x) { return expf(x); }
ML_INLINE float ml_log_f32(float x) { return logf(x); }
ML_INLINE float ml_expm1_f32(float x) { return expm1f(x); }
ML_INLINE float ml_log1p_f32(float x) { return log1pf(x); }
ML_INLINE float ml_rsqrt_f32(float x) { return rsqrtf(x); }
ML_INLINE float ml_max_f32(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
ML_INLINE float ml_min_f32(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
ML_INLINE float ml_erf_f32(float x) { return erff(x); }
ML_INLINE unsigned ml_bits_f32(float x) { return __float_as_uint(x); }
ML_INLINE float ml_from_bits_f32(unsigned u) { return __uint_as_float(u); }
#define ML_QUARTER(q, shift) (int)((long long)(q) + (shift))
#define ML_DIVIDE(a, b) __fdividef(a, b)
#define ML_QUOTIENT(a, b) __fdiv_rn(a, b)
#include "../c/functions.h"

/* Long sums: sum + lost is what was added, but for roundings of lost (Knuth's two-sum). */
ML_INLINE void ml_add_f32(float &sum, float &lost, float x) {
    float total = sum + x, part = total - sum;
    lost += (sum - (total - part)) + (x - part);
    sum = total;
}
ML_INLINE float ml_total_f32(float sum, float lost) {
    return ml_is_finite_f32(lost) ? sum + lost : sum;
}

/* casts: towards zero, what does not fit is the nearest that does; NaN gives 0, of itself only
 * from f32 to i32 */
ML_INLINE int ml_i32_of_f32(float x) { return __float2int_rz(x); }
ML_INLINE int ml_i32_of_f64(double x) { return x == x ? __double2int_rz(x) : 0; }
ML_INLINE ml_i64 ml_i64_of_f32(float x) { return x == x ? __float2ll_rz(x) : 0; }
ML_INLINE ml_i64 ml_i64_of_f64(double x) { return x == x ? __double2ll_rz(x) : 0; }

/* N neighbouring elements, moved by the widest loads and stores that their bytes allow; addresses
 * are multiples of their bytes, or of 16 */
template <typename T, int N>
union alignas(sizeof(T) * N < 4    ? 4
              : sizeof(T) * N < 16 ? sizeof(T) * N
                                   : 16) ml_pack {
    T e[N];
    unsigned word[(sizeof(T) * N + 3) / 4];
    unsigned short half;
};
/* bf16 element k as f32, by one instruction */
template <int N> ML_INLINE float ml_unpack(const ml_pack<ml_bf16, N> &q, int k) {
    unsigned word = q.word[k / 2];
    return __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16);
}
/* the largest element; NaN where one is NaN */
template <int N> ML_INLINE float ml_unpack(const ml_pack<ml_f16, N> &q, int k) {
    return ml_load_f16(q.e[k]);
}
template <int N> ML_INLINE float ml_unpack(const ml_pack<ml_i8, N> &q, int k) {
    return ml_load_i8(q.e[k]);
}
template <int N> ML_INLINE float ml_unpack(const ml_pack<ml_e4m3, N> &q, int k) {
    return ml_load_e4m3(q.e[k]);
}
template <int N> ML_INLINE float ml_unpack(const ml_pack<ml_e5m2, N> &q, int k) {
    return ml_load_e5m2(q.e[k]);
}
ML_INLINE unsigned ml_max_bf16x2(unsigned a, unsigned b) {
    unsigned r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
/* largest elements by twos, and the larger of two */
template <int N> ML_INLINE unsigned ml_pack_max(const ml_pack<ml_bf16, N> &q, unsigned most) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) most = ml_max_bf16x2(most, q.word[i]);
    return most;
}
ML_INLINE float ml_pair_max(unsigned q) {
    return ml_max_f32(__uint_as_float(q << 16), __uint_as_float(q & 0xffff0000u));
}
template <typename T, int N> ML_INLINE ml_pack<T, N> ml_load_pack(const T *p) {
    const int bytes = sizeof(T) * N;
    ml_pack<T, N> q;
    if (N == 1) {
#pragma unroll
        for (int i = 0; i < N; i++) q.e[i] = p[i];
    } else if (bytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < bytes / 16; i++) {
            uint4 x = ((const uint4 *)p)[i];
            q.word[(i * 4) % ((bytes + 3) / 4)] = x.x;
            q.word[(i * 4 + 1) % ((bytes + 3) / 4)] = x.y;
            q.word[(i * 4 + 2) % ((bytes + 3) / 4)] = x.z;
            q.word[(i * 4 + 3) % ((bytes + 3) / 4)] = x.w;
        }
    } else if (bytes == 8) {
        uint2 x = *(const uint2 *)p;
        q.word[0] = x.x;
        q.word[1 % ((bytes + 3) / 4)] = x.y;
    } else if (bytes == 4) {
        q.word[0] = *(const unsigned *)p;
    } else {
        q.half = *(const unsigned short *)p;
    }
    return q;
}
template <typename T, int N> ML_INLINE void ml_store_pack(T *p, ml_pack<T, N> q) {
    const int bytes = sizeof(T) * N;
    if (N == 1) {
#pragma unroll
        for (int i = 0; i < N; i++) p[i] = q.e[i];
    } else if (bytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < bytes / 16; i++)
            ((uint4 *)p)[i] = make_uint4(
                q.word[(i * 4) % ((bytes + 3) / 4)], q.word[(i * 4 + 1) % ((bytes + 3) / 4)],
                q.word[(i * 4 + 2) % ((bytes + 3) / 4)], q.word[(i * 4 + 3) % ((bytes + 3) / 4)]);
    } else if (bytes == 8) {
        *(uint2 *)p = make_uint2(q.word[0], q.word[1 % ((bytes + 3) / 4)]);
    } else if (bytes == 4) {
        *(unsigned *)p = q.word[0];
    } else {
        *(unsigned short *)p = q.half;
    }
}
/* copies to shared memory that are waited for later; a multiple of 16 bytes */
ML_INLINE void ml_stage_16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(16)
                 : "memory");
}
template <typename T, int N> ML_INLINE void ml_stage_pack(char *to, const T *from) {
#pragma unroll
    for (int i = 0; i < (int)(sizeof(T) * N / 16); i++)
        ml_stage_16(to + i * 16, (const char *)from + i * 16);
}
/* f32 values rounded to a narrow float, two at a time */
ML_INLINE void ml_round_two(ml_pack<ml_bf16, 2> &q, const float *v) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(q.word[0]) : "f"(v[1]), "f"(v[0]));
}
ML_INLINE void ml_round_two(ml_pack<ml_f16, 2> &q, const float *v) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(q.word[0]) : "f"(v[1]), "f"(v[0]));
}
ML_INLINE void ml_round_two(ml_pack<ml_i8, 2> &q, const float *v) {
    q.e[0] = ml_store_i8(v[0]), q.e[1] = ml_store_i8(v[1]);
}
ML_INLINE void ml_round_two(ml_pack<ml_e4m3, 2> &q, const float *v) {
#if __CUDA_ARCH__ >= 890
    unsigned short two; /* by one instruction, which saturates */
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(v[1]), "f"(v[0]));
    q.e[0].bits = (unsigned char)(fabsf(v[0]) > 464.0f ? 0x7fu | (two & 0x80u) : two & 0xffu);
    q.e[1].bits = (unsigned char)(fabsf(v[1]) > 464.0f ? 0x7fu | (two >> 8 & 0x80u) : two >> 8);
#else
    q.e[0] = ml_store_e4m3(v[0]), q.e[1] = ml_store_e4m3(v[1]);
#endif
}
ML_INLINE void ml_round_two(ml_pack<ml_e5m2, 2> &q, const float *v) {
#if __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(v[1]), "f"(v[0]));
    q.e[0].bits = (unsigned char)(fabsf(v[0]) >= 61440.0f ? 0x7cu | (two & 0x80u) : two & 0xffu);
    q.e[1].bits = (unsigned char)(fabsf(v[1]) >= 61440.0f ? 0x7cu | (two >> 8 & 0x80u) : two >> 8);
#else
    q.e[0] = ml_store_e5m2(v[0]), q.e[1] = ml_store_e5m2(v[1]);
#endif
}
template <typename T, int N> ML_INLINE ml_pack<T, N> ml_round_pack(const float *v) {
    ml_pack<T, N> q;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        ml_pack<T, 2> two;
        ml_round_two(two, v + 2 * i);
        if (sizeof(T) == 2)
            q.word[i % ((sizeof(T) * N + 3) / 4)] = two.word[0];
        else
            q.e[2 * i] = two.e[0], q.e[2 * i + 1] = two.e[1];
    }
    return q;
}
/* f32 values rounded to f16 in a pack's place, two at a time, and one of them */
template <int N> ML_INLINE ml_pack<ml_bf16, N> ml_round_halves(const float *v) {
    ml_pack<ml_bf16, N> q;
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(q.word[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
    return q;
}
template <int N> ML_INLINE float ml_unpack_half(const ml_pack<ml_bf16, N> &q, int k) {
    float r;
    unsigned word = q.word[k / 2];
    if (k % 2)
        asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(word));
    else
        asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(r) : "r"(word));
    return r;
}
/* packs of bf16: -inf; the largest element, but finite; 2^15 exp(element - most) in the elements'
 * place, and their sum */
template <int N, int G> ML_INLINE void ml_lowest_packs(ml_pack<ml_bf16, N> (&q)[G]) {
#pragma unroll
    for (int i = 0; i < G * (N / 2); i++) q[i / (N / 2)].word[i % (N / 2)] = 0xff80ff80u;
}
template <int N, int G> ML_INLINE float ml_packs_max(const ml_pack<ml_bf16, N> (&q)[G]) {
    unsigned most = q[0].word[0];
#pragma unroll
    for (int i = 1; i < G * (N / 2); i++)
        most = ml_max_bf16x2(most, q[i / (N / 2)].word[i % (N / 2)]);
    const float limit = __uint_as_float(0x7f7f0000u);
    return ml_min_f32(ml_max_f32(ml_pair_max(most), -limit), limit);
}
template <int N, int G> ML_INLINE float ml_packs_exp(ml_pack<ml_bf16, N> (&q)[G], float most) {
    float sum = 0.0f, z[N];
#pragma unroll
    for (int i = 0; i < G; i++) {
#pragma unroll
        for (int k = 0; k < N; k++) sum += z[k] = ml_exp_up(ml_unpack(q[i], k) - most);
        q[i] = ml_round_halves<N>(z);
    }
    return sum;
}
/* sums of exp(element - most): `more` is one of `other`s */
ML_INLINE void ml_add_scaled(float &most, float &sum, float other, float more) {
    float apart = other - most, less = ml_quick_exp_f32(-fabsf(apart));
    sum = apart > 0.0f ? sum * less + more : sum + more * less;
    most = ml_max_f32(most, other);
}
template <typename T, int N> ML_INLINE ml_pack<T, N> ml_zero_pack() {
    ml_pack<T, N> q;
#pragma unroll
    for (int i = 0; i < (sizeof(T) * N + 3) / 4; i++) q.word[i] = 0;
    return q;
}

/* Reductions over a team: TEAM neighbouring threads, a power of two up to 32, or whole warps.
 * Every thread gets the result; the order is fixed. Teams of several warps have 32 elements of
 * `shared` and a barrier of their own; the caller keeps uses of `shared` apart by ml_team_sync. */
template <int TEAM, int THREADS> ML_INLINE void ml_team_sync(int team) {
    if (TEAM == THREADS)
        __syncthreads();
    else if (TEAM > 32)
        asm volatile("bar.sync %0, %1;" : : "r"(team + 1), "n"(TEAM) : "memory");
}
/* the lanes of this thread's team in its warp: other teams may be elsewhere */
template <int TEAM> ML_INLINE unsigned ml_team_lanes() {
    if (TEAM >= 32) return 0xffffffffu;
    return ((1u << (TEAM % 32)) - 1u) << (threadIdx.x % 32 / TEAM * TEAM);
}
struct ml_sum {
    template <typename T> static __device__ __forceinline__ T of(T a, T b) { return a + b; }
};
struct ml_max {
    static __device__ __forceinline__ float of(float a, float b) { return ml_max_f32(a, b); }
    static __device__ __forceinline__ double of(double a, double b) { return ml_max_f64(a, b); }
    static __device__ __forceinline__ int of(int a, int b) { return a > b ? a : b; }
    static __device__ __forceinline__ ml_i64 of(ml_i64 a, ml_i64 b) { return a > b ? a : b; }
};
struct ml_min {
    static __device__ __forceinline__ float of(float a, float b) { return ml_min_f32(a, b); }
    static __device__ __forceinline__ double of(double a, double b) { return ml_min_f64(a, b); }
    static __device__ __forceinline__ int of(int a, int b) { return a < b ? a : b; }
    static __device__ __forceinline__ ml_i64 of(ml_i64 a, ml_i64 b) { return a < b ? a : b; }
};
template <typename F, int TEAM, typename T> ML_INLINE T ml_warp_reduce(T v) {
#pragma unroll
    for (int m = (TEAM < 32 ? TEAM : 32) / 2; m > 0; m /= 2)
        v = F::of(v, __shfl_xor_sync(ml_team_lanes<TEAM>(), v, m));
    return v;
}
/* a team's warps, or more: a power of two */
template <int TEAM>
constexpr int ml_team_slots = TEAM <= 64    ? 2
                              : TEAM <= 128 ? 4
                              : TEAM <= 256 ? 8
                              : TEAM <= 512 ? 16
                                            : 32;
/* between two of these of one value, the team's threads meet */
template <int TEAM, typename T> ML_INLINE void ml_team_put(T v, T *shared) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x % TEAM / 32] = v;
}
template <typename F, int TEAM, typename T> ML_INLINE T ml_team_get(T identity, const T *shared) {
    const int slots = ml_team_slots<TEAM>, slot = threadIdx.x % slots;
    T v = slot < TEAM / 32 ? shared[slot] : identity;
#pragma unroll
    for (int m = slots / 2; m > 0; m /= 2) v = F::of(v, __shfl_xor_sync(0xffffffffu, v, m));
    return v;
}
/* the same of two values at once: of a warp, lanes 0 .. 15 reduce a, the others b; the parts of b
 * follow those of a */
template <typename F, int TEAM, typename T> ML_INLINE void ml_team_put_pair(T a, T b, T *shared) {
    const bool second = threadIdx.x & 16;
    T v = F::of(second ? b : a, __shfl_xor_sync(0xffffffffu, second ? a : b, 16));
#pragma unroll
    for (int m = 8; m > 0; m /= 2) v = F::of(v, __shfl_xor_sync(0xffffffffu, v, m));
    if (threadIdx.x % 16 == 0) shared[second * ml_team_slots<TEAM> + threadIdx.x % TEAM / 32] = v;
}
template <typename F, int TEAM, typename T>
ML_INLINE void ml_team_get_pair(T &a, T &b, T identity, const T *shared) {
    const int slots = ml_team_slots<TEAM>;
    T v = threadIdx.x % slots < TEAM / 32 ? shared[threadIdx.x % (2 * slots)] : identity;
#pragma unroll
    for (int m = slots / 2; m > 0; m /= 2) v = F::of(v, __shfl_xor_sync(0xffffffffu, v, m));
    a = __shfl_sync(0xffffffffu, v, 0);
    b = __shfl_sync(0xffffffffu, v, slots);
}
/* the warps' sums of exp(element - their largest element), as one of exp(element - most) */
template <int TEAM>
ML_INLINE float ml_team_get_scaled(float most, const float *largest, const float *sums) {
    const int warps = TEAM / 32;
    int slot = threadIdx.x % 32;
    float v = slot < warps ? sums[slot] * ml_quick_exp_f32(largest[slot] - most) : 0.0f;
#pragma unroll
    for (int m = 16; m > 0; m /= 2) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}
template <typename F, int TEAM, int THREADS, typename T>
ML_INLINE T ml_team_reduce(T v, T identity, T *shared, int team) {
    v = ml_warp_reduce<F, TEAM>(v);
    if (TEAM <= 32) return v;
    ml_team_put<TEAM>(v, shared);
    ml_team_sync<TEAM, THREADS>(team);
    return ml_team_get<F, TEAM>(identity, shared);
}
/* teams that share warps, whose threads lie APART lanes apart: first each warp's part, then all
 * WARPS parts in order, the block having met */
template <typename F, int APART, typename T> ML_INLINE T ml_apart_reduce(T v) {
    const unsigned first = APART == 8 ? 0x01010101u : 1u;
    const unsigned lanes = first << (threadIdx.x % APART);
#pragma unroll
    for (int m = 16; m >= APART; m /= 2) v = F::of(v, __shfl_xor_sync(lanes, v, m));
    return v;
}
template <int APART, typename T> ML_INLINE void ml_apart_put(T v, T *shared) {
    if (threadIdx.x % 32 < APART) *shared = v;
}
template <typename F, int WARPS, typename T> ML_INLINE T ml_apart_get(const T *shared) {
    T v = shared[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) v = F::of(v, shared[w]);
    return v;
}
/* whether (a, i) comes before (b, j) as the largest: NaN counts as largest, the first of equals
 * wins; an index below 0 is no candidate */
template <typename T, typename I> ML_INLINE bool ml_before(T a, I i, T b, I j) {
    if (i < 0 || j < 0) return i >= 0;
    return a > b || (a != a && b == b) || ((a == b || (a != a && b != b)) && i < j);
}
template <int TEAM, int THREADS, typename T, typename I>
ML_INLINE I ml_team_argmax(T v, I i, T *shared, I *shared_index, int team) {
#pragma unroll
    for (int m = (TEAM < 32 ? TEAM : 32) / 2; m > 0; m /= 2) {
        T w = __shfl_xor_sync(ml_team_lanes<TEAM>(), v, m);
        I j = __shfl_xor_sync(ml_team_lanes<TEAM>(), i, m);
        if (ml_before(w, j, v, i)) {
            v = w;
            i = j;
        }
    }
    if (TEAM <= 32) return i;
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x % TEAM / 32] = v;
        shared_index[threadIdx.x % TEAM / 32] = i;
    }
    ml_team_sync<TEAM, THREADS>(team);
    i = shared_index[0];
    v = shared[0];
    for (int k = 1; k < TEAM / 32; k++)
        if (ml_before(shared[k], shared_index[k], v, i)) {
            v = shared[k];
            i = shared_index[k];
        }
    return i;
}

#endif
