/* Products of few rows against sums in f64, on an emulated GPU, whose clusters are of one block:
 * by bf16, and by int8 and E4M3 with scales. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/graph/convert.h"
#include "tests/kernels/support.h"

typedef struct {
    int64_t m, n, k;
    bool deep, bias, addend, wide; /* wide: f32 results */
    ml_dtype bytes;                /* weights of 8 bits with scales; 0: bf16 */
    bool turned;                   /* A is contiguous along rows */
} shape;

static const shape SHAPES[] = {
    {1, 256, 64, false, false, false, true},
    {1, 264, 712, false, false, true, true},
    {5, 328, 200, true, true, false, false},
    {8, 256, 520, true, false, true, false},
    {7, 320, 136, false, true, false, false},
    {8, 256, 328, true, false, false, true},
    {3, 264, 72, false, false, true, true},
    {8, 256, 176, false, false, false, true, ML_I8, false},
    {3, 272, 640, true, false, true, false, ML_I8, true},
    {5, 336, 144, false, false, true, false, ML_E4M3, true},
    {8, 256, 528, true, false, false, true, ML_E4M3, false},
    {19, 264, 328, true, true, false, false},
    {32, 256, 176, false, false, true, true, ML_I8, true},
};

static double bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

static void fill(uint16_t *to, int64_t count, uint32_t seed) {
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525 + 1013904223;
        to[i] = (uint16_t)(0x3f00 | (seed >> 31 << 15) | (seed >> 20 & 0xff));
    }
}

static uint32_t add_value(ml_schedule *s, ml_dtype dtype) {
    ml_value *v = ML_PUSH(s->arena, &s->values);
    v->type.dtype = (uint8_t)dtype;
    return s->values.count - 1;
}

static double element_of(const shape *p, char *const *memory, int at, int64_t i) {
    if (at == 1 && p->bytes) return ml_element(p->bytes, memory[1], i);
    return bf16(((uint16_t *)memory[at])[i]);
}

/* Element i of operand `at`. */
static double element(char *const *memory, int at, bool wide, int64_t i) {
    return wide ? ((float *)memory[at])[i] : bf16(((uint16_t *)memory[at])[i]);
}

static void compare(const shape *p, char *const *memory, int reads) {
    for (int64_t i = 0; i < p->m * p->n; i++) {
        const int64_t row = i / p->n, column = i % p->n;
        double sum = 0, most = 0;
        for (int64_t d = 0; d < p->k; d++) {
            int64_t at = p->deep ? column * p->k + d : d * p->n + column;
            int64_t left = p->turned ? d * p->m + row : row * p->k + d;
            double term = element_of(p, memory, 0, left) * element_of(p, memory, 1, at);
            sum += term, most += fabs(term);
        }
        if (p->bytes) sum *= ((float *)memory[2])[column], most *= 4;
        if (p->bias) sum += element(memory, 2, p->wide, column);
        if (p->addend) sum += element(memory, reads - 1, p->wide, i);
        double got = element(memory, reads, p->wide, i);
        double allowed = 1e-6 * most + (p->wide ? 0 : fabs(sum) / 256);
        if (fabs(got - sum) <= allowed) continue;
        CHECK_NEAR(got, sum, 0);
        return;
    }
}

static void one_product(ml_arena *arena, const shape *p) {
    const ml_target target = {
        .kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132, .few_rows = 33};
    const ml_dtype result = p->wide ? ML_F32 : ML_BF16;
    ml_schedule *s = ML_NEW(arena, ml_schedule);
    ml_step *step = ML_NEW(arena, ml_step);
    s->arena = arena, s->target = &target;
    const int scale = p->bytes ? 2 : 0; /* the operand */
    step->read_count = 2 + p->bias + (scale != 0) + p->addend, step->write_count = 1;
    step->values = ML_NEW_ARRAY(arena, uint32_t, 6);
    char *memory[6];
    for (int i = 0; i <= step->read_count; i++) {
        const bool wide = i >= 2 && (p->wide || i == scale);
        const ml_dtype dtype = i == 1 && p->bytes ? p->bytes : wide ? ML_F32 : ML_BF16;
        step->values[i] = add_value(s, dtype);
        int64_t count = i == 0 ? p->m * p->k : i == 1 ? p->k * p->n : p->m * p->n;
        memory[i] = ml_arena_alloc(arena, (size_t)count * 4);
        if (!wide) fill((uint16_t *)memory[i], count, (uint32_t)i);
        for (int64_t e = 0; wide && e < count; e++) ((float *)memory[i])[e] = (float)(e % 13) / 8;
        for (int64_t e = 0; i == 1 && p->bytes && e < count; e++) /* no NaN of E4M3 */
            memory[1][e] = (char)((e * 37 + e / 251) % 255 - 127);
        for (int64_t e = 0; i == 1 && p->bytes == ML_E4M3 && e < count; e++)
            memory[1][e] = (char)ml_to_e4m3(memory[1][e] / 3.0);
    }
    const ml_gemm gemm = {.m = p->m,
                          .n = p->n,
                          .k = p->k,
                          .batch = {1, 1, 1},
                          .a_row = p->turned ? 1 : p->k,
                          .a_col = p->turned ? p->m : 1,
                          .b_row = p->deep ? 1 : p->n,
                          .b_col = p->deep ? p->k : 1,
                          .c_row = p->n,
                          .c_col = 1,
                          .a_dtype = ML_BF16,
                          .b_dtype = p->bytes ? p->bytes : ML_BF16,
                          .c_dtype = result,
                          .accumulate = p->addend,
                          .epilogue = p->bias ? ML_EPILOGUE_BIAS : ML_EPILOGUE_NONE};
    const ml_few_rows product = {.gemm = &gemm, .constant = true, .scaled = p->bytes};
    REQUIRE(ml_template_few_rows(s, step, &product));
    if (template_emulate(&step->kernel, 1, memory)) compare(p, memory, step->read_count);
}

static void all_products(void *arena) {
    for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++) one_product(arena, &SHAPES[i]);
}

TEST(emulate, few_rows) {
    ml_arena *arena = ml_arena_new();
    ml_status status = ml_protect(all_products, arena);
    ml_arena_free(arena);
    CHECK_EQ_INT(status, ML_OK);
}
