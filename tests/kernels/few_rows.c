/* Products of few rows against sums in f64, on an emulated GPU, whose clusters are of one block:
 * by bf16, and by int8 and E4M3 with scales; of a first operand in memory, or computed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codegen/jit/jit.h"
#include "runtime/graph/convert.h"
#include "tests/kernels/support.h"

typedef struct {
    int64_t m, n, k;
    bool deep, bias, addend, wide; /* wide: f32 results */
    ml_dtype bytes;                /* weights of 8 bits with scales; 0: bf16 */
    bool turned;                   /* A is contiguous along rows */
    char computed; /* A is what a kernel of loops makes of operand 0 and the last: 'n'ormed rows
                      times gains, or 'p'roducts of both */
    bool compiled; /* and a cluster has several blocks */
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
    {1, 256, 712, false, false, true, true, .computed = 'n'},
    {5, 264, 1032, true, true, false, false, .computed = 'n', .compiled = true},
    {3, 272, 640, false, false, true, false, ML_I8, .computed = 'p'},
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

/* Element (row, d) of A, as a kernel of its own would have stored it. */
static double left_of(const shape *p, char *const *memory, int last, int64_t row, int64_t d) {
    const int64_t at = p->turned ? d * p->m + row : row * p->k + d;
    if (!p->computed) return element_of(p, memory, 0, at);
    float x = (float)bf16(((uint16_t *)memory[0])[at]), sum = 0;
    if (p->computed == 'p') {
        x *= (float)bf16(((uint16_t *)memory[last])[at]);
    } else {
        for (int64_t i = 0; i < p->k; i++) {
            const float y = (float)bf16(((uint16_t *)memory[0])[row * p->k + i]);
            sum += y * y;
        }
        x = x * (1 / sqrtf(sum)) * ((float *)memory[last])[d];
    }
    return bf16(ml_to_bf16(x));
}

/* Element i of operand `at`. */
static double element(char *const *memory, int at, bool wide, int64_t i) {
    return wide ? ((float *)memory[at])[i] : bf16(((uint16_t *)memory[at])[i]);
}

static void compare(ml_arena *arena, const shape *p, char *const *memory, int reads) {
    const int addend = reads - 1 - (p->computed != 0);
    double *left = ML_NEW_ARRAY(arena, double, p->m * p->k);
    for (int64_t i = 0; i < p->m * p->k; i++)
        left[i] = left_of(p, memory, reads - 1, i / p->k, i % p->k);
    for (int64_t i = 0; i < p->m * p->n; i++) {
        const int64_t row = i / p->n, column = i % p->n;
        double sum = 0, most = 0;
        for (int64_t d = 0; d < p->k; d++) {
            int64_t at = p->deep ? column * p->k + d : d * p->n + column;
            double term = left[row * p->k + d] * element_of(p, memory, 1, at);
            sum += term, most += fabs(term);
        }
        if (p->bytes) sum *= ((float *)memory[2])[column], most *= 4;
        if (p->bias) sum += element(memory, 2, p->wide, column);
        if (p->addend) sum += element(memory, addend, p->wide, i);
        double got = element(memory, reads, p->wide, i);
        double allowed = 1e-6 * most + (p->wide ? 0 : fabs(sum) / 256);
        if (p->computed) allowed += most / 4096; /* sums of a row in another order round A apart */
        if (fabs(got - sum) <= allowed) continue;
        CHECK_NEAR(got, sum, 0);
        return;
    }
}

/* The kernel of loops that computes A. */
static const ml_kernel_ir *computing(ml_arena *arena, const shape *p) {
    static const ml_inst normed[] = {
        {.kind = ML_INST_LOAD, .dtype = ML_BF16, .level = ML_LEVEL_ELEMENT, .operand = 0},
        {.kind = ML_INST_MAP, .op = ML_OP_CAST, .dtype = ML_F32, .from_dtype = ML_BF16, .src = {0}},
        {.kind = ML_INST_MAP, .op = ML_OP_MUL, .dtype = ML_F32, .src = {1, 1}},
        {.kind = ML_INST_REDUCE, .op = ML_OP_SUM, .dtype = ML_F32, .src = {2}},
        {.kind = ML_INST_MAP, .op = ML_OP_RSQRT, .dtype = ML_F32, .src = {3}, .phase = 1},
        {.kind = ML_INST_MAP, .op = ML_OP_MUL, .dtype = ML_F32, .src = {1, 4}, .phase = 1},
        {.kind = ML_INST_LOAD, .dtype = ML_F32, .operand = 1, .phase = 1},
        {.kind = ML_INST_MAP, .op = ML_OP_MUL, .dtype = ML_F32, .src = {5, 6}, .phase = 1},
        {.kind = ML_INST_STORE, .dtype = ML_BF16, .src = {7}, .operand = 2, .phase = 1}};
    static const ml_inst products[] = {
        {.kind = ML_INST_LOAD, .dtype = ML_BF16, .operand = 0},
        {.kind = ML_INST_LOAD, .dtype = ML_BF16, .operand = 1},
        {.kind = ML_INST_MAP, .op = ML_OP_MUL, .dtype = ML_BF16, .src = {0, 1}},
        {.kind = ML_INST_STORE, .dtype = ML_BF16, .src = {2}, .operand = 2}};
    const bool norm = p->computed == 'n';
    ml_kernel_ir *ir = ML_NEW(arena, ml_kernel_ir);
    *ir = (ml_kernel_ir){.loop_count = norm ? 2 : 1, .row_loops = 1, .operand_count = 3};
    ir->size[0] = norm ? p->m : p->m * p->k, ir->size[1] = p->k;
    ir->operand = ML_NEW_ARRAY(arena, ml_operand, 3);
    for (int o = 0; o < 3; o++) {
        ir->operand[o].dtype = norm && o == 1 ? ML_F32 : ML_BF16, ir->operand[o].written = o == 2;
        ir->operand[o].stride[0] = norm ? o == 1 ? 0 : p->k : 1, ir->operand[o].stride[1] = norm;
    }
    ir->inst_count = norm ? sizeof normed / sizeof *normed : sizeof products / sizeof *products;
    ir->inst = ML_NEW_ARRAY(arena, ml_inst, ir->inst_count);
    memcpy(ir->inst, norm ? normed : products, sizeof *normed * (size_t)ir->inst_count);
    for (int i = 0; i < ir->inst_count; i++) {
        ml_inst *inst = &ir->inst[i];
        const bool loads = inst->kind == ML_INST_LOAD, maps = inst->kind == ML_INST_MAP;
        const bool one = inst->op == ML_OP_CAST || inst->op == ML_OP_RSQRT;
        inst->index = inst->guard = ML_NO_INST;
        if (loads) inst->src[0] = ML_NO_INST;
        if (!maps || one) inst->src[1] = ML_NO_INST;
        inst->src[2] = ML_NO_INST;
    }
    return ir;
}

/* By NVRTC, as the emulator has no clusters. */
static void compile(ml_kernel *kernel) {
    char text[256];
    ml_jit_cuda *jit = NULL;
    const void *image;
    int64_t size;
    if (ml_jit_cuda_describe(text, sizeof text) != ML_OK) {
        test_left_out("CUDA kernels are not compiled: %s", ml_error_last()->text);
        return;
    }
    ml_pool *pool = ml_pool_new(1);
    REQUIRE(pool);
    CHECK_EQ_INT(ml_jit_cuda_compile(&kernel, 1, 90, pool, &jit, &image, &size), ML_OK);
    ml_jit_cuda_free(jit);
    ml_pool_free(pool);
}

static void one_product(ml_arena *arena, const shape *p) {
    const ml_target target = {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132};
    const ml_dtype result = p->wide ? ML_F32 : ML_BF16;
    ml_schedule *s = ML_NEW(arena, ml_schedule);
    ml_step *step = ML_NEW(arena, ml_step);
    s->arena = arena, s->target = &target;
    const int scale = p->bytes ? 2 : 0; /* the operand */
    step->read_count = 2 + p->bias + (scale != 0) + p->addend + (p->computed != 0);
    step->write_count = 1;
    step->values = ML_NEW_ARRAY(arena, uint32_t, 7);
    char *memory[7];
    for (int i = 0; i <= step->read_count; i++) {
        const bool other = p->computed && i == step->read_count - 1; /* of what A is computed */
        const bool wide = other ? p->computed == 'n' : i >= 2 && (p->wide || i == scale);
        const ml_dtype dtype = i == 1 && p->bytes ? p->bytes : wide ? ML_F32 : ML_BF16;
        step->values[i] = add_value(s, dtype);
        int64_t count = i == 0 || other ? p->m * p->k : i == 1 ? p->k * p->n : p->m * p->n;
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
    const ml_few_rows product = {.gemm = &gemm,
                                 .constant = true,
                                 .scaled = p->bytes,
                                 .computes = p->computed ? computing(arena, p) : NULL};
    REQUIRE(ml_template_few_rows(s, step, &product));
    if (p->compiled) compile(step->kernel);
    if (template_emulate(&step->kernel, 1, memory)) compare(arena, p, memory, step->read_count);
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
