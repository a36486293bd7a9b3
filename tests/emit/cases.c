#include "tests/emit/cases.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static const int none = ML_NO_INST;

static int map1(ir_kernel *k, ml_op op, int a) {
    return ir_map(k, op, (ml_dtype)k->inst[a].dtype, a, none, none);
}

static int map2(ir_kernel *k, ml_op op, int a, int b) {
    return ir_map(k, op, (ml_dtype)k->inst[a].dtype, a, b, none);
}

static void flat(ir_kernel *k, int64_t size, int64_t unused, ml_dtype dtype) {
    (void)unused;
    ir_init(k, 1, 1, (int64_t[]){size});
    int a = ir_operand(k, dtype, NULL, false), b = ir_operand(k, ML_F32, NULL, false);
    int y = ir_operand(k, dtype, NULL, true);
    int va = ir_cast(k, ML_F32, ir_load(k, a, dtype)), vb = ir_load(k, b, ML_F32);
    ir_store(k, y, map1(k, ML_OP_TANH, map2(k, ML_OP_MUL, va, map1(k, ML_OP_EXP, vb))));
}

static void permuted(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 3, 3, (int64_t[]){3, rows, columns});
    int x = ir_operand(k, dtype, (int64_t[]){columns, 3 * columns, 1}, false);
    int row = ir_operand(k, ML_F32, (int64_t[]){rows, 1, 0}, false);
    int column = ir_operand(k, ML_F32, (int64_t[]){0, 0, 1}, false);
    int across = ir_operand(k, dtype, (int64_t[]){rows * columns, 1, rows}, false);
    int y = ir_operand(k, ML_F32, NULL, true), z = ir_operand(k, dtype, NULL, true);
    int vx = ir_cast(k, ML_F32, ir_load(k, x, dtype)), vr = ir_load(k, row, ML_F32);
    int vc = ir_load(k, column, ML_F32);
    ir_store(k, y, map2(k, ML_OP_ADD, vx, map2(k, ML_OP_MUL, vr, vc)));
    int sum = map2(k, ML_OP_ADD, vx, ir_cast(k, ML_F32, ir_load(k, across, dtype)));
    ir_store(k, z, ir_cast(k, dtype, sum));
}

static void gather(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 2, 2, (int64_t[]){rows, columns});
    int table = ir_operand(k, dtype, NULL, false);
    int index = ir_operand(k, ML_I32, (int64_t[]){1, 0}, false);
    int padded = ir_operand(k, dtype, (int64_t[]){columns - 5, 1}, false);
    int y = ir_operand(k, dtype, NULL, true), flags = ir_operand(k, ML_BOOL, NULL, true);
    k->ir.operand[table].stride[0] = 0; /* rows come from the index */
    int row = ir_map(k, ML_OP_MOD, ML_I32, ir_load(k, index, ML_I32),
                     ir_const(k, ML_I32, (double)rows), none);
    int at = map2(k, ML_OP_MUL, ir_cast(k, ML_I64, row), ir_const(k, ML_I64, (double)columns));
    int value = ir_load_at(k, table, dtype, at, none);
    int inside = ir_map(k, ML_OP_LT, ML_BOOL, ir_index(k, 1),
                        ir_const(k, ML_I64, (double)columns - 5), none);
    int low = ir_map(k, ML_OP_LT, ML_BOOL, ir_index(k, 0), ir_const(k, ML_I64, 7), none);
    int pad = ir_load_at(k, padded, dtype, none, inside);
    int some = ir_load_at(k, table, dtype, none, low);
    ir_store(k, y, map2(k, ML_OP_ADD, map2(k, ML_OP_ADD, value, some), pad));
    ir_store(k, flags,
             ir_map(k, ML_OP_AND, ML_BOOL, inside, ir_map(k, ML_OP_GE, ML_BOOL, value, pad, none),
                    none));
}

static void softmax(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    int x = ir_operand(k, dtype, NULL, false), y = ir_operand(k, dtype, NULL, true);
    int lse = ir_operand(k, ML_F32, (int64_t[]){1, 0}, true);
    k->level = ML_LEVEL_ELEMENT;
    int vx = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    int largest = ir_reduce(k, ML_OP_MAX, ML_SCOPE_ROW, vx, 0);
    k->phase = 1;
    int e = map1(k, ML_OP_EXP, map2(k, ML_OP_SUB, vx, largest));
    k->inst[e].saved = rows % 2 == 1;
    int sum = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, e, 0);
    k->phase = 2;
    ir_store(k, y, map2(k, ML_OP_DIV, e, sum));
    k->level = ML_LEVEL_ROW;
    ir_store(k, lse, map2(k, ML_OP_ADD, map1(k, ML_OP_LOG, sum), largest));
}

/* Exponentials of what lies above a row's value. */
static void exp_above(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype, double bottom) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    int x = ir_operand(k, dtype, NULL, false), y = ir_operand(k, dtype, NULL, true);
    int base = ir_operand(k, ML_F32, (int64_t[]){1, 0}, false);
    int low = ir_const(k, ML_F32, bottom);
    int from = map2(k, ML_OP_ADD, ir_load(k, base, ML_F32), low);
    k->level = ML_LEVEL_ELEMENT;
    int vx = map2(k, ML_OP_ADD, ir_cast(k, ML_F32, ir_load(k, x, dtype)), low);
    ir_store(k, y, map1(k, ML_OP_EXP, map2(k, ML_OP_SUB, vx, from)));
}
static void probabilities(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    exp_above(k, rows, columns, dtype, 3);
}
/* Of rows of which a mask hides everything. */
static void masked(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    exp_above(k, rows, columns, dtype, -1e30);
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

/* A norm of a sum: three passes over rows, for values of elements that stay in registers from pass
 * to pass. With chunks a block walks several rows. */
static void norm(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype, int chunks) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    k->ir.chunks = chunks;
    int x = ir_operand(k, dtype, NULL, false), y = ir_operand(k, dtype, NULL, false);
    int gain = ir_operand(k, ML_F32, (int64_t[]){0, 1}, false);
    int out = ir_operand(k, dtype, NULL, true);
    int total = chunks > 0 ? ir_partial(k, ML_F32, false) : none;
    int count = ir_const(k, ML_F32, (double)columns);
    k->level = ML_LEVEL_ELEMENT;
    int vx = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    int sum = map2(k, ML_OP_ADD, vx, ir_cast(k, ML_F32, ir_load(k, y, dtype)));
    int all = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, sum, 0);
    k->phase = 1;
    k->level = ML_LEVEL_ROW;
    int mean = map2(k, ML_OP_DIV, all, count);
    k->level = ML_LEVEL_ELEMENT;
    int off = map2(k, ML_OP_SUB, sum, mean);
    int squares = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, map2(k, ML_OP_MUL, off, off), 0);
    k->phase = 2;
    k->level = ML_LEVEL_ROW;
    int scale = map1(k, ML_OP_RSQRT, map2(k, ML_OP_DIV, squares, count));
    if (chunks > 0) ir_reduce(k, ML_OP_SUM, ML_SCOPE_ALL, scale, total);
    k->level = ML_LEVEL_ELEMENT;
    int normal = map2(k, ML_OP_MUL, off, scale);
    ir_store(k, out, map2(k, ML_OP_MUL, normal, ir_load(k, gain, ML_F32)));
}

static void norm_of_sum(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    norm(k, rows, columns, dtype, 3);
}

static void norm_by_rows(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    norm(k, rows, columns, dtype, 0);
}

/* Largest elements in a wider type than they lie in memory. */
static void wide_largest(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    int x = ir_operand(k, dtype, NULL, false);
    int y = ir_operand(k, ML_F64, (int64_t[]){1, 0}, true);
    k->level = ML_LEVEL_ELEMENT;
    int value = ir_cast(k, ML_F64, ir_load(k, x, dtype));
    int largest = ir_reduce(k, ML_OP_MAX, ML_SCOPE_ROW, value, 0);
    k->phase = 1;
    k->level = ML_LEVEL_ROW;
    ir_store(k, y, largest);
}

/* Largest elements of what all rows share, which waits in registers. */
static void shared_largest(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    k->ir.chunks = 2;
    int x = ir_operand(k, dtype, (int64_t[]){0, 1}, false);
    int y = ir_operand(k, dtype, NULL, true), total = ir_partial(k, ML_F32, false);
    k->level = ML_LEVEL_ELEMENT;
    int value = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    int largest = ir_reduce(k, ML_OP_MAX, ML_SCOPE_ROW, value, 0);
    k->phase = 1;
    int below = map2(k, ML_OP_SUB, value, largest);
    ir_store(k, y, below);
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_ALL, below, total);
}

/* Sums of columns in f64, beside largest elements of several passes, which share no exchange. */
static void maxima(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    k->ir.chunks = 3;
    int x = ir_operand(k, dtype, NULL, false), y = ir_operand(k, ML_F64, (int64_t[]){1, 0}, true);
    int sums = ir_partial(k, ML_F64, true);
    k->level = ML_LEVEL_ELEMENT;
    int value = ir_cast(k, ML_F64, ir_load(k, x, dtype)), largest = none;
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_COLUMN, value, sums);
    for (k->phase = 0; k->phase < 3; k->phase++) {
        if (k->phase > 0) value = map2(k, ML_OP_MUL, value, largest);
        largest = ir_reduce(k, ML_OP_MAX, ML_SCOPE_ROW, value, 0);
    }
    k->level = ML_LEVEL_ROW;
    ir_store(k, y, largest);
}

/* A cross-entropy and its gradient, as stdlib writes them: three passes over rows of which a block
 * walks several, and of which one element each is the label's. */
static void loss(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    k->ir.chunks = 2;
    int x = ir_operand(k, dtype, NULL, false), y = ir_operand(k, dtype, NULL, true);
    int labels = ir_operand(k, ML_I32, (int64_t[]){1, 0}, false);
    int lse = ir_operand(k, ML_F32, (int64_t[]){1, 0}, true), total = ir_partial(k, ML_F32, false);
    int sums = ir_operand(k, ML_F32, (int64_t[]){1, 0}, true);
    int zero = ir_const(k, ML_F32, 0), one = ir_const(k, ML_F32, 1);
    int lowest = ir_const(k, ML_F32, -INFINITY);
    int label = map2(k, ML_OP_MUL, ir_load(k, labels, ML_I32), ir_const(k, ML_I32, 37));
    k->level = ML_LEVEL_ELEMENT;
    int vx = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    int largest = ir_reduce(k, ML_OP_MAX, ML_SCOPE_ROW, vx, 0);
    int column = ir_cast(k, ML_I32, ir_index(k, 1));
    int hit = ir_map(k, ML_OP_EQ, ML_BOOL, column, label, none);
    int own = ir_map(k, ML_OP_WHERE, ML_F32, hit, vx, zero);
    int picked = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, own, 0);
    k->phase = 1;
    k->level = ML_LEVEL_ROW;
    int finite = ir_map(k, ML_OP_IS_FINITE, ML_BOOL, largest, none, none);
    int shift = ir_map(k, ML_OP_WHERE, ML_F32, finite, largest, zero);
    k->level = ML_LEVEL_ELEMENT;
    int e = map1(k, ML_OP_EXP, map2(k, ML_OP_SUB, vx, shift));
    int sum = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, e, 0);
    k->phase = 2;
    k->level = ML_LEVEL_ROW;
    int empty = ir_map(k, ML_OP_EQ, ML_BOOL, sum, zero, none);
    int divisor = ir_map(k, ML_OP_WHERE, ML_F32, empty, one, sum);
    int base = ir_map(k, ML_OP_WHERE, ML_F32, empty, lowest, shift);
    int log_sum = map2(k, ML_OP_ADD, map1(k, ML_OP_LOG, divisor), base);
    ir_store(k, lse, log_sum);
    ir_store(k, sums, sum);
    int known = ir_map(k, ML_OP_IS_FINITE, ML_BOOL, log_sum, none, none);
    int own_loss = map2(k, ML_OP_SUB, log_sum, picked);
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_ALL, ir_map(k, ML_OP_WHERE, ML_F32, known, own_loss, zero),
              total);
    k->level = ML_LEVEL_ELEMENT;
    int less = ir_map(k, ML_OP_WHERE, ML_F32, hit, ir_const(k, ML_F32, -1), zero);
    ir_store(k, y, map2(k, ML_OP_ADD, less, map2(k, ML_OP_DIV, e, divisor)));
}

/* The same beside the largest elements of other rows. */
static void loss_beside(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    loss(k, rows, columns, dtype);
    int other = ir_operand(k, dtype, NULL, false);
    int most = ir_operand(k, ML_F32, (int64_t[]){1, 0}, true);
    k->phase = 0;
    int value = ir_cast(k, ML_F32, ir_load(k, other, dtype));
    int largest = ir_reduce(k, ML_OP_MAX, ML_SCOPE_ROW, value, 0);
    k->phase = 2;
    k->level = ML_LEVEL_ROW;
    ir_store(k, most, largest);
}

/* The same, and twice the rows themselves. */
static void loss_and_rows(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    loss(k, rows, columns, dtype);
    int twice = ir_operand(k, dtype, NULL, true);
    k->phase = 0;
    int value = ir_cast(k, ML_F32, ir_load(k, 0, dtype));
    ir_store(k, twice, map2(k, ML_OP_ADD, value, value));
}

/* The same by the approximate exponential, as of bf16, and the class of each row's largest element:
 * on a GPU one pass finds the sum and the largest. */
static void loss_and_class(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    loss(k, rows, columns, dtype);
    int class = ir_operand(k, ML_I32, (int64_t[]){1, 0}, true);
    int value = 0; /* as it was loaded for the largest one */
    while (k->inst[value].kind != ML_INST_LOAD || k->inst[value].operand != 0) value++;
    for (int i = 0; i < k->ir.inst_count; i++)
        if (k->inst[i].kind == ML_INST_MAP && k->inst[i].op == ML_OP_EXP) k->inst[i].quick = true;
    k->phase = 0;
    int best = ir_reduce(k, ML_OP_ARGMAX, ML_SCOPE_ROW, value, 0);
    k->phase = 2;
    k->level = ML_LEVEL_ROW;
    ir_store(k, class, best);
}

/* A row with an element that is no number, one of nothing but -infinity, rows that masks of -1e30,
 * -1e9 and -5e7 hide, and one with an infinity: of bf16 the latter's gradient may be no number in
 * more elements than that one. */
static void fill_loss(ir_kernel *k, ml_dtype dtype) {
    int64_t columns = k->ir.size[1];
    ir_set(k, 0, 7, NAN);
    for (int64_t i = 0; i < columns; i++) ir_set(k, 0, columns + i, -INFINITY);
    for (int64_t i = 0; i < columns; i++) ir_set(k, 0, 3 * columns + i, -1e30);
    for (int64_t i = 0; i < columns; i++) ir_set(k, 0, 4 * columns + i, -1e9);
    for (int64_t i = 0; i < columns && dtype == ML_BF16; i++) ir_set(k, 0, 2 * columns + i, -5e7);
    if (dtype == ML_F32) ir_set(k, 0, 2 * columns + columns / 2, INFINITY);
}

static void all_flat(ir_kernel *k, int64_t size, int64_t chunks, ml_dtype dtype) {
    ir_init(k, 1, 1, (int64_t[]){size});
    k->ir.chunks = chunks;
    int x = ir_operand(k, dtype, NULL, false), total = ir_partial(k, ML_F32, false);
    int least = ir_partial(k, ML_F32, false), count = ir_partial(k, ML_I32, false);
    int v = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_ALL, map2(k, ML_OP_MUL, v, v), total);
    ir_reduce(k, ML_OP_MIN, ML_SCOPE_ALL, v, least);
    int positive = ir_map(k, ML_OP_LT, ML_BOOL, ir_const(k, ML_F32, 0), v, none);
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_ALL, ir_cast(k, ML_I32, positive), count);
}

static void all_nested(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 3, 3, (int64_t[]){7, rows, columns});
    k->ir.chunks = 5;
    int x = ir_operand(k, dtype, (int64_t[]){columns, 7 * columns, 1}, false);
    int total = ir_partial(k, ML_F32, false), y = ir_operand(k, dtype, NULL, true);
    int v = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    ir_store(k, y, v);
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_ALL, map2(k, ML_OP_MUL, v, v), total);
}

static void column_sums(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 2, 4, (int64_t[]){rows, 4, 3, columns});
    k->ir.chunks = 6;
    int x = ir_operand(k, dtype, NULL, false), sums = ir_partial(k, ML_F32, true);
    int best = ir_partial(k, ML_F32, true), y = ir_operand(k, dtype, NULL, true);
    int first = ir_operand(k, ML_F32, (int64_t[]){4, 1, 0, 0}, true);
    ir_store(k, first, ir_cast(k, ML_F32, ir_index(k, 1)));
    k->level = ML_LEVEL_ELEMENT;
    int v = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    ir_store(k, y, map2(k, ML_OP_ADD, v, v));
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_COLUMN, v, sums);
    ir_reduce(k, ML_OP_MAX, ML_SCOPE_COLUMN, v, best);
}

/* Column sums of three types at once: on a GPU their shared memory must fit a block. */
static void column_sums_mixed(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    k->ir.chunks = 3;
    int x = ir_operand(k, dtype, NULL, false), wide = ir_partial(k, ML_F64, true);
    int sums = ir_partial(k, ML_F32, true), counts = ir_partial(k, ML_I32, true);
    k->level = ML_LEVEL_ELEMENT;
    int v = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_COLUMN, ir_cast(k, ML_F64, v), wide);
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_COLUMN, map2(k, ML_OP_MUL, v, v), sums);
    int positive = ir_map(k, ML_OP_LT, ML_BOOL, ir_const(k, ML_F32, 0), v, none);
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_COLUMN, ir_cast(k, ML_I32, positive), counts);
}

/* With more chunks than blocks that run at once leave for each tile of columns. */
static void column_sums_wide(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    k->ir.chunks = 132;
    int x = ir_operand(k, dtype, NULL, false), sums = ir_partial(k, ML_F32, true);
    int least = ir_partial(k, ML_F32, true);
    k->level = ML_LEVEL_ELEMENT;
    int v = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_COLUMN, v, sums);
    ir_reduce(k, ML_OP_MIN, ML_SCOPE_COLUMN, v, least);
}

/* What ends a reduction over chunks: rows of elements that lie far apart. */
static void strided(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype, int chunks) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    k->ir.chunks = chunks;
    int x = ir_operand(k, dtype, (int64_t[]){1, rows}, false);
    int y = ir_operand(k, ML_F32, (int64_t[]){1, 0}, true),
        most = ir_operand(k, ML_F32, (int64_t[]){1, 0}, true);
    int squares = chunks > 0 ? ir_partial(k, ML_F32, false) : 0;
    k->level = ML_LEVEL_ELEMENT;
    int v = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    int sum = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, v, 0);
    int largest = ir_reduce(k, ML_OP_MAX, ML_SCOPE_ROW, v, 0);
    k->level = ML_LEVEL_ROW;
    k->phase = 1;
    ir_store(k, y, sum);
    ir_store(k, most, largest);
    if (chunks == 0) return;
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_ALL, map2(k, ML_OP_MUL, sum, sum), squares);
}

static void strided_rows(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    strided(k, rows, columns, dtype, 3);
}

static void strided_alone(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    strided(k, rows, columns, dtype, 0);
}

/* Likewise, with a sum over all elements beside the rows' sums. */
static void strided_all(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    k->ir.chunks = 3;
    int x = ir_operand(k, dtype, (int64_t[]){1, rows}, false);
    int y = ir_operand(k, ML_F32, (int64_t[]){1, 0}, true), all = ir_partial(k, ML_F32, false);
    k->level = ML_LEVEL_ELEMENT;
    int v = ir_cast(k, ML_F32, ir_load(k, x, dtype));
    int sum = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, v, 0);
    ir_reduce(k, ML_OP_SUM, ML_SCOPE_ALL, map2(k, ML_OP_MUL, v, v), all);
    k->level = ML_LEVEL_ROW;
    k->phase = 1;
    ir_store(k, y, sum);
}

/* Whether any element of a row is not 0. */
static void any(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    int x = ir_operand(k, dtype, NULL, false);
    int y = ir_operand(k, ML_BOOL, (int64_t[]){1, 0}, true);
    k->level = ML_LEVEL_ELEMENT;
    int truth = ir_cast(k, ML_BOOL, ir_load(k, x, dtype));
    int one = ir_reduce(k, ML_OP_MAX, ML_SCOPE_ROW, truth, 0);
    k->level = ML_LEVEL_ROW;
    k->phase = 1;
    ir_store(k, y, one);
}

static void argmax(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 1, 2, (int64_t[]){rows, columns});
    int x = ir_operand(k, dtype, NULL, false);
    int y = ir_operand(k, ML_I32, (int64_t[]){1, 0}, true);
    k->level = ML_LEVEL_ELEMENT;
    int best = ir_reduce(k, ML_OP_ARGMAX, ML_SCOPE_ROW, ir_load(k, x, dtype), 0);
    k->level = ML_LEVEL_ROW;
    k->phase = 1;
    ir_store(k, y, best);
}

/* Equal values, infinities and NaN: the first of the largest, NaN largest of all. */
static void fill_argmax(ir_kernel *k) {
    int64_t columns = k->ir.size[1];
    for (int64_t i = 0; i < columns; i++) {
        ir_set(k, 0, i, 1);
        ir_set(k, 0, columns + i, -INFINITY);
        ir_set(k, 0, 2 * columns + i, i >= columns / 2 ? 5 : i == 1 ? 5 : 0);
    }
    ir_set(k, 0, 3 * columns + columns - 1, NAN);
    ir_set(k, 0, 4 * columns + columns / 2, NAN);
    ir_set(k, 0, 4 * columns + columns - 1, NAN);
}

static void integers(ir_kernel *k, int64_t rows, int64_t columns, ml_dtype dtype) {
    ir_init(k, 2, 4, (int64_t[]){rows, 6, 3, columns});
    int x = ir_operand(k, dtype, (int64_t[]){18 * columns, 1, 6 * columns, 6}, false);
    int y = ir_operand(k, dtype, (int64_t[]){6, 1, 0, 0}, true);
    int least = ir_operand(k, dtype, (int64_t[]){6, 1, 0, 0}, true);
    int wide = ir_operand(k, ML_F64, NULL, true);
    k->level = ML_LEVEL_ELEMENT;
    int v = ir_load(k, x, dtype);
    int q = map2(k, ML_OP_IDIV, v, ir_const(k, dtype, -7));
    int m = map2(k, ML_OP_MOD, v, ir_const(k, dtype, 9));
    int sum = ir_reduce(k, ML_OP_SUM, ML_SCOPE_ROW, map2(k, ML_OP_ADD, q, m), 0);
    int low = ir_reduce(k, ML_OP_MIN, ML_SCOPE_ROW, v, 0);
    int linear = map2(k, ML_OP_ADD, ir_index(k, 3), map2(k, ML_OP_MUL, ir_index(k, 2), v));
    ir_store(k, wide, ir_cast(k, ML_F64, linear));
    k->level = ML_LEVEL_ROW;
    k->phase = 1;
    ir_store(k, y, sum);
    ir_store(k, least, low);
}

typedef struct {
    const char *name;
    void (*build)(ir_kernel *k, int64_t a, int64_t b, ml_dtype dtype);
    int64_t a, b;
    ml_dtype dtype;
    double tolerance;
} kernel_case;

static const kernel_case cases[] = {
    {"flat", flat, 5001, 0, ML_F32, 2e-6},
    {"flat by packs", flat, 5008, 0, ML_F32, 2e-6},
    {"flat bf16", flat, 4096, 0, ML_BF16, 8e-3},
    {"flat f16", flat, 4096, 0, ML_F16, 1e-3},
    {"one element", flat, 1, 0, ML_F64, 2e-6},
    {"permuted", permuted, 70, 33, ML_BF16, 8e-3},
    {"permuted by packs", permuted, 12, 64, ML_F32, 2e-6},
    {"gather", gather, 50, 20, ML_F32, 2e-6},
    {"gather bf16", gather, 40, 21, ML_BF16, 8e-3},
    {"softmax", softmax, 37, 256, ML_F32, 2e-6},
    {"softmax, not kept", softmax, 38, 77, ML_F32, 2e-6},
    {"softmax, long rows", softmax, 3, 50304, ML_F32, 2e-6},
    {"softmax, long bf16 rows", softmax, 3, 50304, ML_BF16, 8e-3},
    {"softmax, short rows", softmax, 301, 5, ML_BF16, 8e-3},
    {"probabilities", probabilities, 5, 300, ML_BF16, 8e-3},
    {"probabilities, masked rows", masked, 5, 300, ML_BF16, 8e-3},
    {"softmax of one", softmax, 3, 1, ML_F64, 2e-6},
    {"softmax, middle rows", softmax, 9, 3072, ML_BF16, 8e-3},
    {"softmax, many middle rows", softmax, 300, 1600, ML_BF16, 8e-3},
    {"norm backward", norm_backward, 41, 96, ML_F32, 2e-5},
    {"norm backward, few rows", norm_backward, 3, 130, ML_F32, 2e-5},
    {"norm backward bf16", norm_backward, 64, 768, ML_BF16, 2e-2},
    {"norm backward f16", norm_backward, 64, 768, ML_F16, 2e-3},
    {"softmax, long f16 rows", softmax, 3, 50304, ML_F16, 1e-3},
    {"norm backward, long rows", norm_backward, 23, 4096, ML_BF16, 2e-2},
    {"norm backward, many rows", norm_backward, 290, 768, ML_BF16, 2e-2},
    {"norm backward, many wide rows", norm_backward, 70, 2048, ML_BF16, 2e-2},
    {"norm backward, very long rows", norm_backward, 11, 40000, ML_F32, 2e-5},
    {"norm of a sum", norm_of_sum, 70, 2048, ML_BF16, 2e-2},
    {"norm of a sum, row by row", norm_by_rows, 260, 1600, ML_F32, 2e-5},
    {"loss", loss, 23, 9000, ML_F32, 2e-5},
    {"loss, long bf16 rows", loss, 13, 50304, ML_BF16, 8e-3},
    {"loss, few long bf16 rows", loss, 5, 50304, ML_BF16, 8e-3},
    {"loss, rows that fill a block", loss, 5, 90112, ML_BF16, 8e-3},
    {"loss, longer rows than a block holds", loss, 5, 128256, ML_BF16, 8e-3},
    {"loss beside other rows", loss_beside, 5, 90112, ML_BF16, 8e-3},
    {"loss and its rows", loss_and_rows, 5, 90112, ML_BF16, 8e-3},
    {"loss and class", loss_and_class, 5, 90112, ML_BF16, 8e-3},
    {"loss and class, longer rows than a block holds", loss_and_class, 5, 128256, ML_BF16, 8e-3},
    {"largest as f64", wide_largest, 5, 1024, ML_BF16, 0},
    {"largest as f64, long rows", wide_largest, 5, 9000, ML_BF16, 0},
    {"all", all_flat, 100003, 7, ML_F32, 1e-6},
    {"all bf16", all_flat, 65536, 4, ML_BF16, 1e-6},
    {"all nested", all_nested, 5, 130, ML_F32, 2e-6},
    {"column sums", column_sums, 9, 11, ML_BF16, 8e-3},
    {"column sums by packs", column_sums, 50, 320, ML_F32, 2e-6},
    {"column sums of many rows", column_sums, 790, 264, ML_BF16, 8e-3},
    {"column sums of several types", column_sums_mixed, 70, 512, ML_BF16, 1e-5},
    {"column sums of many tiles", column_sums_wide, 264, 1640, ML_F32, 2e-6},
    {"rows of strided elements", strided_rows, 50, 264, ML_F32, 2e-5},
    {"rows of strided elements bf16", strided_rows, 37, 33, ML_BF16, 2e-5},
    {"rows of strided elements, rounds", strided_rows, 200, 264, ML_F32, 2e-5},
    {"rows of strided elements alone", strided_alone, 45, 132, ML_F32, 2e-5},
    {"rows of strided elements, and all", strided_all, 50, 264, ML_F32, 2e-5},
    {"any of bf16", any, 11, 64, ML_BF16, 0},
    {"argmax 3", argmax, 11, 3, ML_F32, 0},
    {"argmax 40", argmax, 11, 40, ML_F32, 0},
    {"argmax 1000", argmax, 6, 1000, ML_F32, 0},
    {"argmax 5000", argmax, 6, 5000, ML_BF16, 0},
    {"i64", integers, 4, 5, ML_I64, 0},
    {"i32", integers, 7, 17, ML_I32, 0},
    {"norm backward, few short rows", norm_backward, 25, 8, ML_F32, 2e-5},
    {"largest of what rows share", shared_largest, 300, 768, ML_BF16, 8e-3},
    {"largest of several passes", maxima, 400, 256, ML_F32, 1e-12},
};

static char label[32];

const char *emit_case(ir_kernel *k, int i, double *tolerance) {
    enum { LISTED = sizeof cases / sizeof *cases, RANDOM = 24 };
    if (i >= LISTED + RANDOM) return NULL;
    if (i >= LISTED) {
        const char *seed = getenv("EMIT_SEED"); /* other kernels than every day's */
        emit_random_case(k, (uint64_t)(i - LISTED) + (seed != NULL ? strtoull(seed, NULL, 10) : 0));
        *tolerance = 8e-3; /* they may store bf16 */
        snprintf(label, sizeof label, "random %d", i - LISTED);
        return label;
    }
    const kernel_case *c = &cases[i];
    c->build(k, c->a, c->b, c->dtype);
    ir_fill(k, (uint64_t)i);
    if (c->build == argmax) fill_argmax(k);
    if (c->build == loss) fill_loss(k, c->dtype);
    *tolerance = c->tolerance;
    return c->name;
}
