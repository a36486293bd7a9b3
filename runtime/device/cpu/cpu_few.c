/* B by rows is read DEEP rows at a time over a strip of columns, whose sums stay in the first-level
 * cache. B by columns is transposed in registers, eight columns x eight terms at a time. */
#include "runtime/device/cpu/cpu_few.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "runtime/device/cpu/cpu_kernel.h"

enum {
    DEPTH = CPU_KERNEL_DEPTH,
    DEEP = 8,
    LINES = 8,
    STRIP = 2048,
    SUMS = 2 * STRIP,
    UNIT = 16,
    REST = 64,
    WIDEST = 4
};

/* sums[i * width + j] += the sum over p of a[i * DEPTH + p] * b[p * stride + j] for i < rows, j <
 * columns and p < DEEP in this order; columns is a multiple of UNIT. */
typedef void few_add(int64_t rows, int64_t columns, const float *a, const void *b, int64_t stride,
                     float *sums, int64_t width);
/* sums[i * LINES + l] += the sum over p of a[i * DEPTH + p] * line[l][p] for p < count in this
 * order; count is a multiple of DEEP. */
typedef void few_dot(int64_t rows, const float *a, const void *const *line, int64_t count,
                     float *sums);
typedef struct {
    few_add *add;
    few_dot *dot;
} few_kernel;

#define UNROLL _Pragma("GCC unroll 16")

/* Bytes as a vector NAME of 32-bit integers, by the instructions that MACHINE has: GCC has none for
 * half a vector. */
#define INTS_few_4_few_4(at) __builtin_convertvector(*(const few_4_i8 *)(at), few_4_ints)
#define INTS_few_4_few_8(at) __builtin_convertvector(*(const few_8_i8 *)(at), few_8_ints)
#define INTS_few_8_few_8(at)                                                                       \
    ((few_8_ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at))))
#define INTS_few_16_few_8(at) INTS_few_8_few_8(at)
#define INTS_few_16_few_16(at)                                                                     \
    ((few_16_ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at))))

/* A vector of elements as one of floats. */
#define VECTOR_f32(MACHINE, NAME, at) (*(const NAME##_floats *)(at))
#define VECTOR_bf16(MACHINE, NAME, at)                                                             \
    ((NAME##_floats)(__builtin_convertvector(*(const NAME##_bf16 *)(at), NAME##_words) << 16))
#define VECTOR_i8(MACHINE, NAME, at)                                                               \
    __builtin_convertvector(INTS_##MACHINE##_##NAME(at), NAME##_floats)
#define VECTOR_e4m3(MACHINE, NAME, at)                                                             \
    ({                                                                                             \
        NAME##_words q = (NAME##_words)INTS_##MACHINE##_##NAME(at), size = q & 0x7f;               \
        NAME##_words nan = (NAME##_words)(size == 0x7f) & 0x7fc00000;                              \
        NAME##_floats finite = (NAME##_floats)(size << 20) * 0x1p120f;                             \
        (NAME##_floats)((NAME##_words)finite | nan | (q & 0x80) << 24);                            \
    })
#define VECTORS(NAME, LANES)                                                                       \
    typedef float NAME##_floats __attribute__((vector_size(4 * (LANES)), aligned(4)));             \
    typedef uint32_t NAME##_words __attribute__((vector_size(4 * (LANES)), aligned(4)));           \
    typedef int32_t NAME##_ints __attribute__((vector_size(4 * (LANES)), aligned(4)));             \
    typedef int8_t NAME##_i8 __attribute__((vector_size(LANES), aligned(1)));                      \
    typedef uint16_t NAME##_bf16 __attribute__((vector_size(2 * (LANES)), aligned(2)));
VECTORS(few_4, 4)
VECTORS(few_8, 8)
VECTORS(few_16, 16)

#define ADD_ROWS(NAME, ATTRIBUTE, LANES, DTYPE, TYPE, COUNT)                                       \
    ATTRIBUTE static void NAME##_##DTYPE##_add_##COUNT(int64_t columns, const float *restrict a,   \
                                                       const TYPE *restrict b, int64_t stride,     \
                                                       float *restrict sums, int64_t width) {      \
        for (int64_t j = 0; j < columns; j += (LANES)) {                                           \
            if (j * (int64_t)sizeof(TYPE) % 64 == 0)                                               \
                UNROLL for (int p = 0; p < DEEP; p++)                                              \
                    __builtin_prefetch(b + (p + 4 * DEEP) * stride + j);                           \
            NAME##_floats sum[COUNT];                                                              \
            UNROLL for (int i = 0; i < COUNT; i++) sum[i] =                                        \
                *(const NAME##_floats *)(sums + i * width + j);                                    \
            UNROLL for (int p = 0; p < DEEP; p++) {                                                \
                const TYPE *at = b + p * stride + j;                                               \
                NAME##_floats x = VECTOR_##DTYPE(NAME, NAME, at);                                  \
                UNROLL for (int i = 0; i < COUNT; i++) sum[i] += a[i * DEPTH + p] * x;             \
            }                                                                                      \
            UNROLL for (int i = 0; i < COUNT; i++) * (NAME##_floats *)(sums + i * width + j) =     \
                sum[i];                                                                            \
        }                                                                                          \
    }

/* y[p] is element p of the eight vectors x[l]. */
#define PAIR(a, b, ...) __builtin_shuffle(a, b, (few_8_words){__VA_ARGS__})
#define TRANSPOSE(y, x)                                                                            \
    few_8_floats t[LINES], u[LINES], y[LINES];                                                     \
    UNROLL for (int l = 0; l < LINES; l += 2) {                                                    \
        t[l] = PAIR(x[l], x[l + 1], 0, 8, 1, 9, 4, 12, 5, 13);                                     \
        t[l + 1] = PAIR(x[l], x[l + 1], 2, 10, 3, 11, 6, 14, 7, 15);                               \
    }                                                                                              \
    UNROLL for (int l = 0; l < LINES; l += 4) UNROLL for (int h = 0; h < 2; h++) {                 \
        u[l + 2 * h] = PAIR(t[l + h], t[l + h + 2], 0, 1, 8, 9, 4, 5, 12, 13);                     \
        u[l + 2 * h + 1] = PAIR(t[l + h], t[l + h + 2], 2, 3, 10, 11, 6, 7, 14, 15);               \
    }                                                                                              \
    UNROLL for (int l = 0; l < 4; l++) {                                                           \
        y[l] = PAIR(u[l], u[l + 4], 0, 1, 2, 3, 8, 9, 10, 11);                                     \
        y[l + 4] = PAIR(u[l], u[l + 4], 4, 5, 6, 7, 12, 13, 14, 15);                               \
    }
#define DOT_ROWS(NAME, ATTRIBUTE, DTYPE, TYPE, COUNT)                                              \
    ATTRIBUTE static void NAME##_##DTYPE##_dot_##COUNT(const float *a, const void *const *line,    \
                                                       int64_t count, float *sums) {               \
        few_8_floats sum[COUNT];                                                                   \
        UNROLL for (int i = 0; i < COUNT; i++) sum[i] = *(few_8_floats *)(sums + i * LINES);       \
        for (int64_t p = 0; p < count; p += DEEP) {                                                \
            few_8_floats x[LINES];                                                                 \
            UNROLL for (int l = 0; l < LINES; l++) x[l] =                                          \
                VECTOR_##DTYPE(NAME, few_8, (const TYPE *)line[l] + p);                            \
            TRANSPOSE(y, x)                                                                        \
            UNROLL for (int q = 0; q < DEEP; q++) UNROLL for (int i = 0; i < COUNT; i++) sum[i] += \
                a[i * DEPTH + p + q] * y[q];                                                       \
        }                                                                                          \
        UNROLL for (int i = 0; i < COUNT; i++) * (few_8_floats *)(sums + i * LINES) = sum[i];      \
    }

#define KERNEL(NAME, ATTRIBUTE, LANES, DTYPE, TYPE)                                                \
    ADD_ROWS(NAME, ATTRIBUTE, LANES, DTYPE, TYPE, 4)                                               \
    ADD_ROWS(NAME, ATTRIBUTE, LANES, DTYPE, TYPE, 2)                                               \
    ADD_ROWS(NAME, ATTRIBUTE, LANES, DTYPE, TYPE, 1)                                               \
    DOT_ROWS(NAME, ATTRIBUTE, DTYPE, TYPE, 4)                                                      \
    DOT_ROWS(NAME, ATTRIBUTE, DTYPE, TYPE, 2)                                                      \
    DOT_ROWS(NAME, ATTRIBUTE, DTYPE, TYPE, 1)                                                      \
    static void NAME##_##DTYPE##_add(int64_t rows, int64_t columns, const float *a, const void *b, \
                                     int64_t stride, float *sums, int64_t width) {                 \
        for (int64_t i = 0, step; i < rows; i += step) {                                           \
            float *to = sums + i * width;                                                          \
            step = rows - i >= 4 ? 4 : rows - i >= 2 ? 2 : 1;                                      \
            (step == 4   ? NAME##_##DTYPE##_add_4                                                  \
             : step == 2 ? NAME##_##DTYPE##_add_2                                                  \
                         : NAME##_##DTYPE##_add_1)(columns, a + i * DEPTH, b, stride, to, width);  \
        }                                                                                          \
    }                                                                                              \
    static void NAME##_##DTYPE##_dot(int64_t rows, const float *a, const void *const *line,        \
                                     int64_t count, float *sums) {                                 \
        for (int64_t i = 0, step; i < rows; i += step) {                                           \
            float *to = sums + i * LINES;                                                          \
            step = rows - i >= 4 ? 4 : rows - i >= 2 ? 2 : 1;                                      \
            (step == 4   ? NAME##_##DTYPE##_dot_4                                                  \
             : step == 2 ? NAME##_##DTYPE##_dot_2                                                  \
                         : NAME##_##DTYPE##_dot_1)(a + i * DEPTH, line, count, to);                \
        }                                                                                          \
    }
#define MACHINE(NAME, ATTRIBUTE, LANES)                                                            \
    KERNEL(NAME, ATTRIBUTE, LANES, f32, float)                                                     \
    KERNEL(NAME, ATTRIBUTE, LANES, bf16, uint16_t)                                                 \
    KERNEL(NAME, ATTRIBUTE, LANES, i8, int8_t)                                                     \
    KERNEL(NAME, ATTRIBUTE, LANES, e4m3, uint8_t)                                                  \
    static few_kernel NAME##_kernel(ml_dtype dtype) {                                              \
        if (dtype == ML_BF16) return (few_kernel){NAME##_bf16_add, NAME##_bf16_dot};               \
        if (dtype == ML_I8) return (few_kernel){NAME##_i8_add, NAME##_i8_dot};                     \
        if (dtype == ML_E4M3) return (few_kernel){NAME##_e4m3_add, NAME##_e4m3_dot};               \
        return (few_kernel){NAME##_f32_add, NAME##_f32_dot};                                       \
    }

MACHINE(few_4, , 4)
#if defined(__x86_64__)
MACHINE(few_8, __attribute__((target("avx2,fma"))), 8)
MACHINE(few_16, __attribute__((target("avx512f,avx512vl,fma"))), 16)
#endif

static few_kernel kernel_for(ml_dtype dtype) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))
        return few_16_kernel(dtype);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return few_8_kernel(dtype);
#endif
    return few_4_kernel(dtype);
}

bool cpu_few_reads(ml_dtype dtype) {
    return dtype == ML_F32 || dtype == ML_BF16 || dtype == ML_I8 || dtype == ML_E4M3;
}

/* A part of a product: terms p .. p + count - 1 of columns j .. j + columns - 1. */
typedef struct {
    const cpu_few_call *call;
    few_kernel kernel;
    int64_t j, columns, p, count;
    const float *a; /* the terms of each row, DEPTH apart, with zeros up to a multiple of DEEP */
} few_part;

/* `rows` rows of B, at most DEEP, of `columns` columns, at most REST, in copies that zeros fill up
 * to what the kernel takes. */
static void sum_rest(const few_part *part, const float *a, const char *b, int64_t rows,
                     int64_t columns, float *sums) {
    const int64_t size = ml_dtypes[part->call->b_dtype].bytes, m = part->call->m;
    _Alignas(64) char rest[DEEP * REST * WIDEST] = {0};
    float some[CPU_FEW_ROWS * REST] = {0};
    for (int64_t q = 0; q < rows; q++)
        memcpy(rest + q * REST * size, b + q * part->call->b_row * size, (size_t)(columns * size));
    for (int64_t i = 0; i < m; i++)
        memcpy(some + i * REST, sums + i * part->columns, (size_t)columns * sizeof *sums);
    part->kernel.add(m, (columns + UNIT - 1) / UNIT * UNIT, a, rest, REST, some, REST);
    for (int64_t i = 0; i < m; i++)
        memcpy(sums + i * part->columns, some + i * REST, (size_t)columns * sizeof *sums);
}

/* By rows of B. */
static void sum_rows(const few_part *part, float *sums) {
    const cpu_few_call *call = part->call;
    const int64_t size = ml_dtypes[call->b_dtype].bytes;
    for (int64_t q = 0; q < part->count; q += DEEP) {
        const char *b = call->b + ((part->p + q) * call->b_row + part->j) * size;
        const int64_t rows = part->count - q < DEEP ? part->count - q : DEEP;
        const int64_t whole = rows == DEEP ? part->columns / UNIT * UNIT : 0;
        if (whole > 0)
            part->kernel.add(call->m, whole, part->a + q, b, call->b_row, sums, part->columns);
        for (int64_t at = whole; at < part->columns; at += REST)
            sum_rest(part, part->a + q, b + at * size, rows,
                     part->columns - at < REST ? part->columns - at : REST, sums + at);
    }
}

/* By columns of B: eight of them, of which the last stands for those that are missing. */
static void sum_lines(const few_part *part, int64_t at, float *sums) {
    const cpu_few_call *call = part->call;
    const int64_t size = ml_dtypes[call->b_dtype].bytes, whole = part->count / DEEP * DEEP;
    const int64_t last = part->columns - 1 - at;
    const void *line[LINES];
    _Alignas(64) char rest[LINES][DEEP * WIDEST] = {{0}};
    for (int64_t l = 0; l < LINES; l++)
        line[l] = call->b + ((part->j + at + (l < last ? l : last)) * call->b_col + part->p) * size;
    part->kernel.dot(call->m, part->a, line, whole, sums);
    if (whole == part->count) return;
    for (int l = 0; l < LINES; l++) {
        memcpy(rest[l], (const char *)line[l] + whole * size,
               (size_t)((part->count - whole) * size));
        line[l] = rest[l];
    }
    part->kernel.dot(call->m, part->a + whole, line, DEEP, sums);
}

static void sum_columns(const few_part *part, float *sums) {
    const int64_t m = part->call->m;
    float some[CPU_FEW_ROWS * LINES];
    for (int64_t at = 0; at < part->columns; at += LINES) {
        const int64_t count = part->columns - at < LINES ? part->columns - at : LINES;
        memset(some, 0, sizeof some);
        sum_lines(part, at, some);
        for (int64_t i = 0; i < m; i++)
            memcpy(sums + i * part->columns + at, some + i * LINES, (size_t)count * sizeof *sums);
    }
}

static void read_terms(const few_part *part, float *a) {
    const cpu_few_call *call = part->call;
    const int64_t filled = (part->count + DEEP - 1) / DEEP * DEEP;
    for (int64_t i = 0; i < call->m; i++) {
        const float *from = call->a + i * call->a_row + part->p * call->a_col;
        for (int64_t q = 0; q < part->count; q++) a[i * DEPTH + q] = from[q * call->a_col];
        for (int64_t q = part->count; q < filled; q++) a[i * DEPTH + q] = 0;
    }
}

static void store_sums(const few_part *part, const float *sums, bool add) {
    for (int64_t i = 0; i < part->call->m; i++, sums += part->columns) {
        float *c = part->call->c + i * part->call->c_row + part->j;
        for (int64_t j = 0; j < part->columns; j++) c[j] = add ? c[j] + sums[j] : sums[j];
    }
}

void cpu_few_product(const cpu_few_call *call, int64_t first, int64_t last) {
    const bool by_rows = call->b_col == 1;
    const int64_t depth = cpu_kernel_depth(call->k);
    float sums[SUMS], a[CPU_FEW_ROWS * DEPTH];
    few_part part = {.call = call, .kernel = kernel_for(call->b_dtype), .a = a};
    int64_t strip = SUMS / call->m < STRIP ? SUMS / call->m : STRIP;
    for (int64_t p = 0; p < call->k || p == 0; p += depth) {
        part.p = p, part.count = call->k - p < depth ? call->k - p : depth;
        read_terms(&part, a);
        for (part.j = first; part.j < last; part.j += strip) {
            part.columns = last - part.j < strip ? last - part.j : strip;
            memset(sums, 0, (size_t)(call->m * part.columns) * sizeof *sums);
            (by_rows ? sum_rows : sum_columns)(&part, sums);
            store_sums(&part, sums, p > 0 || call->accumulate);
        }
    }
}
