/* Random kernels: loops, broadcasts, permuted and computed addresses, guards, several passes with
 * row reductions, values kept or not, partial reductions. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/emit/cases.h"

enum { MAX_VALUES = 40 };

typedef struct {
    ir_kernel *k;
    uint64_t state;
    ml_dtype compute;
    int row[MAX_VALUES], element[MAX_VALUES], row_count, element_count;
} generator;

static int below(generator *g, int n) {
    g->state = g->state * 6364136223846793005ull + 1442695040888963407ull;
    return (int)((g->state >> 33) % (uint64_t)n);
}

static ml_dtype any_dtype(generator *g) {
    if (g->compute == ML_F64) return ML_F64;
    return below(g, 3) == 0 ? ML_BF16 : ML_F32;
}

/* Contiguous over a random subset of the loops first .. last-1, now and then in another order. */
static int any_operand(generator *g, int first, int last, bool all, bool written) {
    const ml_kernel_ir *ir = &g->k->ir;
    int64_t strides[ML_MAX_LOOPS] = {0}, elements = 1;
    int order[ML_MAX_LOOPS], count = 0;
    for (int loop = first; loop < last; loop++)
        if (all || below(g, 4) > 0) order[count++] = loop;
    if (below(g, 4) == 0 && count > 1) {
        int a = below(g, count), b = below(g, count), kept = order[a];
        order[a] = order[b];
        order[b] = kept;
    }
    for (int i = count - 1; i >= 0; i--) {
        strides[order[i]] = elements;
        elements *= ir->size[order[i]];
    }
    if (below(g, 5) == 0 && count > 0 && !written) strides[order[0]] += 3; /* rows with gaps */
    return ir_operand(g->k, any_dtype(g), strides, written);
}

static int widened(generator *g, int value) {
    return ir_cast(g->k, g->compute, value);
}

static void add_value(generator *g, int value) {
    bool row = g->k->level == ML_LEVEL_ROW;
    int *count = row ? &g->row_count : &g->element_count;
    if (*count < MAX_VALUES) (row ? g->row : g->element)[(*count)++] = value;
}

static int guard_of(generator *g) {
    int loops = g->k->level == ML_LEVEL_ROW ? g->k->ir.row_loops : g->k->ir.loop_count;
    int loop = below(g, loops);
    return ir_map(g->k, ML_OP_LT, ML_BOOL, ir_index(g->k, loop),
                  ir_const(g->k, ML_I64, (double)(1 + g->k->ir.size[loop] / 2)), ML_NO_INST);
}

static void add_load(generator *g) {
    bool row = g->k->level == ML_LEVEL_ROW;
    int last = row ? g->k->ir.row_loops : g->k->ir.loop_count;
    int operand = any_operand(g, 0, last, false, false);
    int guard = below(g, 6) == 0 ? guard_of(g) : ML_NO_INST, index = ML_NO_INST;
    if (below(g, 6) == 0) { /* so many elements further on, by a row's integer */
        int level = g->k->level;
        g->k->level = ML_LEVEL_ROW;
        int64_t strides[ML_MAX_LOOPS] = {1};
        int offsets = ir_operand(g->k, ML_I32, strides, false);
        int value = ir_map(g->k, ML_OP_MOD, ML_I32, ir_load(g->k, offsets, ML_I32),
                           ir_const(g->k, ML_I32, 5), ML_NO_INST);
        index = ir_map(g->k, ML_OP_MUL, ML_I64, ir_cast(g->k, ML_I64, value),
                       ir_const(g->k, ML_I64, below(g, 2) ? 8 : 3), ML_NO_INST);
        g->k->level = level;
        g->k->elements[operand] += 40;
    }
    add_value(g, widened(g, ir_load_at(g->k, operand, (ml_dtype)g->k->ir.operand[operand].dtype,
                                       index, guard)));
}

static int any_value(generator *g) {
    bool row = g->k->level == ML_LEVEL_ROW;
    if ((row || below(g, 3) == 0 || g->element_count == 0) && g->row_count > 0)
        return g->row[below(g, g->row_count)];
    if (row || g->element_count == 0) return ir_const(g->k, g->compute, 0.75);
    return g->element[below(g, g->element_count)];
}

static void add_map(generator *g) {
    static const ml_op ops[] = {ML_OP_ADD,  ML_OP_MUL,     ML_OP_SUB,
                                ML_OP_TANH, ML_OP_MAXIMUM, ML_OP_SIGMOID};
    ml_op op = ops[below(g, 6)];
    int a = any_value(g), b = any_value(g);
    int value =
        ir_map(g->k, op, g->compute, a, ml_ops[op].sources > 1 ? b : ML_NO_INST, ML_NO_INST);
    value = ir_map(g->k, ML_OP_TANH, g->compute, value, ML_NO_INST, ML_NO_INST); /* stays small */
    g->k->inst[value].saved = g->k->level == ML_LEVEL_ELEMENT && below(g, 2) == 0;
    add_value(g, value);
}

/* The operations of one phase; what row reductions give is known in the next. */
static void add_phase(generator *g, bool last, bool columns) {
    int results[4], count = 0;
    g->k->level = ML_LEVEL_ROW;
    for (int i = below(g, 3); i > 0; i--) below(g, 2) ? add_load(g) : add_map(g);
    if (columns) {
        g->k->level = ML_LEVEL_ELEMENT;
        if (g->element_count == 0) add_load(g);
        for (int i = 1 + below(g, 5); i > 0; i--) below(g, 3) == 0 ? add_load(g) : add_map(g);
        for (int i = last ? 0 : 1 + below(g, 2); i > 0; i--)
            results[count++] =
                ir_reduce(g->k, below(g, 2) ? ML_OP_SUM : ML_OP_MAX, ML_SCOPE_ROW, any_value(g), 0);
    }
    if (g->k->ir.chunks > 0 && below(g, 2) == 0)
        ir_reduce(g->k, below(g, 2) ? ML_OP_SUM : ML_OP_MIN,
                  columns && below(g, 2) ? ML_SCOPE_COLUMN : ML_SCOPE_ALL, any_value(g), -1);
    if (columns && (last || below(g, 3) == 0))
        ir_store(g->k, any_operand(g, 0, g->k->ir.loop_count, true, true), any_value(g));
    g->k->level = ML_LEVEL_ROW;
    if (last || below(g, 3) == 0)
        ir_store(g->k, any_operand(g, 0, g->k->ir.row_loops, true, true), any_value(g));
    g->k->phase++;
    for (int i = 0; i < count; i++) {
        int scaled = ir_map(g->k, ML_OP_TANH, g->compute, results[i], ML_NO_INST, ML_NO_INST);
        add_value(g, scaled);
    }
}

/* Partial reductions get their operands last: all is known then. */
static void add_partials(ir_kernel *k) {
    for (int i = 0; i < k->ir.inst_count; i++) {
        ml_inst *inst = &k->inst[i];
        if (inst->kind != ML_INST_REDUCE || inst->scope == ML_SCOPE_ROW) continue;
        inst->operand =
            (uint16_t)ir_partial(k, (ml_dtype)inst->dtype, inst->scope == ML_SCOPE_COLUMN);
    }
}

void emit_random_case(ir_kernel *k, uint64_t seed) {
    static const int64_t row_sizes[] = {1, 2, 3, 5, 9, 40},
                         column_sizes[] = {1, 2, 4, 7, 8, 24, 50, 256};
    generator g = {.k = k, .state = seed * 977 + 13};
    int64_t sizes[ML_MAX_LOOPS];
    for (int i = 0; i < 5; i++) below(&g, 2);
    int rows = 1 + below(&g, 3), columns = below(&g, 4) == 0 ? 0 : 1 + below(&g, 2);
    for (int i = 0; i < rows; i++) sizes[i] = row_sizes[below(&g, 6)];
    for (int i = 0; i < columns; i++) sizes[rows + i] = column_sizes[below(&g, 8)];
    if (rows + columns == 1) sizes[0] = 1024 + below(&g, 2000);
    ir_init(k, rows, rows + columns, sizes);
    g.compute = below(&g, 5) == 0 ? ML_F64 : ML_F32;
    k->ir.chunks = below(&g, 3) == 0 ? 1 + below(&g, 6) : 0;
    int phases = columns > 0 ? 1 + below(&g, 3) : 1;
    for (int i = 0; i < phases; i++) add_phase(&g, i == phases - 1, columns > 0);
    add_partials(k);
    ir_fill(k, seed);
}
