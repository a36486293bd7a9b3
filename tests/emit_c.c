/* Kernels for the CPU, from hand-made IR, against the interpreter of emit_ir.c. */
#include <math.h>

#include "tests/emit_ir.h"
#include "tests/test.h"

static const int none = ML_NO_INST;

static int map1(ir_kernel *k, ml_op op, int a) {
    return ir_map(k, op, (ml_dtype)k->inst[a].dtype, a, none, none);
}

static int map2(ir_kernel *k, ml_op op, int a, int b) {
    return ir_map(k, op, (ml_dtype)k->inst[a].dtype, a, b, none);
}

static void check_kernel(ir_kernel *k, int parts, double tolerance) {
    ir_fill(k, 7);
    double worst = ir_compare(k, parts);
    CHECK_NEAR(1.0 + (worst > tolerance ? worst : 0), 1.0, 1e-12);
    ir_free(k);
}

TEST(emit, elementwise_flat) {
    ir_kernel k;
    ir_init(&k, 1, 1, (int64_t[]){5001});
    int a = ir_operand(&k, ML_F32, NULL, false), b = ir_operand(&k, ML_F32, NULL, false);
    int y = ir_operand(&k, ML_F32, NULL, true);
    int va = ir_load(&k, a, ML_F32), vb = ir_load(&k, b, ML_F32);
    ir_store(&k, y, map1(&k, ML_OP_TANH, map2(&k, ML_OP_MUL, va, map1(&k, ML_OP_EXP, vb))));
    check_kernel(&k, 3, 1e-6);
}

TEST(emit, elementwise_broadcast_permute) {
    ir_kernel k;
    ir_init(&k, 3, 3, (int64_t[]){3, 70, 33});
    int x = ir_operand(&k, ML_BF16, (int64_t[]){33, 99, 1}, false);
    int row = ir_operand(&k, ML_F32, (int64_t[]){70, 1, 0}, false);
    int column = ir_operand(&k, ML_F32, (int64_t[]){0, 0, 1}, false);
    int y = ir_operand(&k, ML_F32, NULL, true), z = ir_operand(&k, ML_BF16, NULL, true);
    int vx = ir_load(&k, x, ML_BF16), vr = ir_load(&k, row, ML_F32);
    int vc = ir_load(&k, column, ML_F32);
    int sum = map2(&k, ML_OP_ADD, ir_cast(&k, ML_F32, vx), map2(&k, ML_OP_MUL, vr, vc));
    ir_store(&k, y, sum);
    ir_store(&k, z, ir_cast(&k, ML_BF16, vx));
    check_kernel(&k, 4, 1e-6);
}

TEST(emit, elementwise_gather_guard) {
    ir_kernel k;
    ir_init(&k, 2, 2, (int64_t[]){50, 20});
    int table = ir_operand(&k, ML_F32, (int64_t[]){20, 1}, false);
    int index = ir_operand(&k, ML_I32, (int64_t[]){1, 0}, false);
    int padded = ir_operand(&k, ML_F32, (int64_t[]){15, 1}, false);
    int y = ir_operand(&k, ML_F32, NULL, true), flags = ir_operand(&k, ML_BOOL, NULL, true);
    k.ir.operand[table].stride[0] = 0; /* rows come from the index */
    int row =
        ir_map(&k, ML_OP_MOD, ML_I32, ir_load(&k, index, ML_I32), ir_const(&k, ML_I32, 50), none);
    int at = map2(&k, ML_OP_MUL, ir_cast(&k, ML_I64, row), ir_const(&k, ML_I64, 20));
    int value = ir_load_at(&k, table, ML_F32, at, none);
    int inside = ir_map(&k, ML_OP_LT, ML_BOOL, ir_index(&k, 1), ir_const(&k, ML_I64, 15), none);
    int pad = ir_load_at(&k, padded, ML_F32, none, inside);
    ir_store(&k, y, map2(&k, ML_OP_ADD, value, pad));
    ir_store(&k, flags,
             ir_map(&k, ML_OP_AND, ML_BOOL, inside, ir_map(&k, ML_OP_GE, ML_BOOL, value, pad, none),
                    none));
    check_kernel(&k, 2, 1e-6);
}

static void softmax(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype, bool keep) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    int x = ir_operand(k, dtype, NULL, false), y = ir_operand(k, dtype, NULL, true);
    int lse = ir_operand(k, ML_F32, (int64_t[]){1, 0}, true);
    k->level = ML_LEVEL_ELEMENT;
    int vx = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    int largest = ir_reduce(k, ML_OP_MAX, ML_SCOPE_ROW, vx, 0);
    k->phase = 1;
    int e = map1(k, ML_OP_EXP, map2(k, ML_OP_SUB, vx, largest));
    k->inst[e].kept = keep;
    int sum = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, e, 0);
    k->phase = 2;
    ir_store(k, y, map2(k, ML_OP_DIV, e, sum));
    k->level = ML_LEVEL_ROW;
    ir_store(k, lse, map2(k, ML_OP_ADD, map1(k, ML_OP_LOG, sum), largest));
}

TEST(emit, row_softmax) {
    ir_kernel k;
    softmax(&k, 37, 256, ML_F32, true);
    check_kernel(&k, 2, 2e-6);
    softmax(&k, 37, 77, ML_F32, false);
    check_kernel(&k, 3, 2e-6);
    softmax(&k, 3, 50304, ML_F32, true);
    check_kernel(&k, 1, 2e-6);
    softmax(&k, 300, 5, ML_BF16, true);
    check_kernel(&k, 2, 5e-3);
    softmax(&k, 3, 1, ML_F64, true);
    check_kernel(&k, 1, 1e-6);
}

/* A norm's backward pass: two row sums, dx, and partial column sums for the gain and the bias. */
static void norm_backward(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    k->ir.chunks = 5;
    int x = ir_operand(k, dtype, NULL, false), dy = ir_operand(k, dtype, NULL, false);
    int gain = ir_operand(k, ML_F32, (int64_t[]){0, 1}, false);
    int scale = ir_operand(k, ML_F32, (int64_t[]){1, 0}, false);
    int dx = ir_operand(k, dtype, NULL, true), dgain = ir_partial(k, ML_F32, true);
    int dbias = ir_partial(k, ML_F32, true), norm = ir_partial(k, ML_F32, false);
    int largest = ir_partial(k, ML_F32, false);
    int vs = ir_load(k, scale, ML_F32);
    k->level = ML_LEVEL_ELEMENT;
    int vx = map2(k, ML_OP_MUL, ir_cast(k, ML_F32, ir_load(k, x, dtype)), vs);
    int vdy = ir_cast(k, ML_F32, ir_load(k, dy, dtype));
    int vg = map2(k, ML_OP_MUL, vdy, ir_load(k, gain, ML_F32));
    int sum1 = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, vg, 0);
    int sum2 = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, map2(k, ML_OP_MUL, vg, vx), 0);
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_COLUMN, map2(k, ML_OP_MUL, vdy, vx), dgain);
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_COLUMN, vdy, dbias);
    k->phase = 1;
    k->level = ML_LEVEL_ROW;
    int count = ir_const(k, ML_F32, (double)columns);
    int mean1 = map2(k, ML_OP_DIV, sum1, count), mean2 = map2(k, ML_OP_DIV, sum2, count);
    k->level = ML_LEVEL_ELEMENT;
    int inside = map2(k, ML_OP_SUB, map2(k, ML_OP_SUB, vg, mean1), map2(k, ML_OP_MUL, vx, mean2));
    int vdx = map2(k, ML_OP_MUL, inside, vs);
    ir_store(k, dx, vdx);
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_ALL, map2(k, ML_OP_MUL, vdx, vdx), norm);
    k->level = ML_LEVEL_ROW;
    ir_reduce(k, ML_OP_MAX, ML_SCOPE_ALL, mean2, largest);
}

TEST(emit, row_norm_backward) {
    ir_kernel k;
    norm_backward(&k, 41, 96, ML_F32);
    check_kernel(&k, 2, 1e-5);
    norm_backward(&k, 3, 130, ML_F32); /* fewer rows than chunks */
    check_kernel(&k, 5, 1e-5);
    norm_backward(&k, 64, 20, ML_BF16);
    check_kernel(&k, 3, 1e-2);
}

TEST(emit, all_sums) {
    ir_kernel k;
    ir_init(&k, 1, 1, (int64_t[]){100003});
    k.ir.chunks = 7;
    int x = ir_operand(&k, ML_F32, NULL, false), total = ir_partial(&k, ML_F32, false);
    int least = ir_partial(&k, ML_F32, false), count = ir_partial(&k, ML_I32, false);
    int v = ir_load(&k, x, ML_F32);
    ir_reduce(&k, ML_OP_SUM, ML_SCOPE_ALL, map2(&k, ML_OP_MUL, v, v), total);
    ir_reduce(&k, ML_OP_MIN, ML_SCOPE_ALL, v, least);
    int positive = ir_map(&k, ML_OP_LT, ML_BOOL, ir_const(&k, ML_F32, 0), v, none);
    ir_reduce(&k, ML_OP_SUM, ML_SCOPE_ALL, ir_cast(&k, ML_I32, positive), count);
    check_kernel(&k, 2, 2e-7);
    ir_init(&k, 3, 3, (int64_t[]){7, 5, 130});
    k.ir.chunks = 4;
    x = ir_operand(&k, ML_F32, (int64_t[]){130, 910, 1}, false);
    total = ir_partial(&k, ML_F32, false);
    int y = ir_operand(&k, ML_F32, NULL, true);
    v = ir_load(&k, x, ML_F32);
    ir_store(&k, y, v);
    ir_reduce(&k, ML_OP_SUM, ML_SCOPE_ALL, map2(&k, ML_OP_MUL, v, v), total);
    check_kernel(&k, 3, 2e-7);
}

TEST(emit, column_sums) {
    ir_kernel k;
    ir_init(&k, 2, 4, (int64_t[]){9, 4, 3, 11});
    k.ir.chunks = 6;
    int x = ir_operand(&k, ML_BF16, NULL, false), sums = ir_partial(&k, ML_F32, true);
    int best = ir_partial(&k, ML_F32, true);
    k.level = ML_LEVEL_ELEMENT;
    int v = ir_load(&k, x, ML_BF16);
    ir_reduce(&k, ML_OP_SUM, ML_SCOPE_COLUMN, v, sums);
    ir_reduce(&k, ML_OP_MAX, ML_SCOPE_COLUMN, v, best);
    check_kernel(&k, 2, 1e-6);
}

TEST(emit, argmax) {
    for (int64_t columns = 3; columns < 400; columns = columns * 3 + 1) {
        ir_kernel k;
        ir_init(&k, 1, 2, (int64_t[]){11, columns});
        int x = ir_operand(&k, ML_F32, NULL, false);
        int y = ir_operand(&k, ML_I32, (int64_t[]){1, 0}, true);
        k.level = ML_LEVEL_ELEMENT;
        int best = ir_reduce(&k, ML_OP_ARGMAX, ML_SCOPE_ROW, ir_load(&k, x, ML_F32), 0);
        k.level = ML_LEVEL_ROW;
        k.phase = 1;
        ir_store(&k, y, best);
        ir_fill(&k, (uint64_t)columns);
        for (int64_t i = 0; i < columns; i++) {
            ir_set(&k, x, i, 1);                   /* all equal: the first */
            ir_set(&k, x, columns + i, -INFINITY); /* all -infinity */
            ir_set(&k, x, 2 * columns + i, i >= columns / 2 ? 5 : i == 1 ? 5 : 0);
        }
        ir_set(&k, x, 3 * columns + columns - 1, NAN);
        ir_set(&k, x, 4 * columns + columns / 2, NAN);
        ir_set(&k, x, 4 * columns + columns - 1, NAN);
        CHECK_NEAR(ir_compare(&k, 2) + 1, 1.0, 1e-12);
        ir_free(&k);
    }
}

TEST(emit, strided_reduction_and_integers) {
    ir_kernel k;
    ir_init(&k, 2, 4, (int64_t[]){4, 6, 3, 5});
    int x = ir_operand(&k, ML_I64, (int64_t[]){90, 1, 30, 6}, false);
    int y = ir_operand(&k, ML_I64, (int64_t[]){6, 1, 0, 0}, true);
    int least = ir_operand(&k, ML_I64, (int64_t[]){6, 1, 0, 0}, true);
    int wide = ir_operand(&k, ML_F64, NULL, true);
    k.level = ML_LEVEL_ELEMENT;
    int v = ir_load(&k, x, ML_I64);
    int q = map2(&k, ML_OP_IDIV, v, ir_const(&k, ML_I64, -7));
    int m = map2(&k, ML_OP_MOD, v, ir_const(&k, ML_I64, 9));
    int sum = ir_reduce(&k, ML_OP_SUM, ML_SCOPE_ROW, map2(&k, ML_OP_ADD, q, m), 0);
    int low = ir_reduce(&k, ML_OP_MIN, ML_SCOPE_ROW, v, 0);
    int linear = map2(&k, ML_OP_ADD, ir_index(&k, 3), map2(&k, ML_OP_MUL, ir_index(&k, 2), v));
    ir_store(&k, wide, ir_cast(&k, ML_F64, linear));
    k.level = ML_LEVEL_ROW;
    k.phase = 1;
    ir_store(&k, y, sum);
    ir_store(&k, least, low);
    check_kernel(&k, 3, 1e-12);
}
