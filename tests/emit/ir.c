#include "tests/emit/ir.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime/graph/convert.h"

void ir_init(ir_kernel *k, int row_loops, int loops, const int64_t *sizes) {
    memset(k, 0, sizeof *k);
    k->ir.row_loops = row_loops;
    k->ir.loop_count = loops;
    k->ir.inst = k->inst;
    k->ir.operand = k->operand;
    k->ir.phases = 1;
    memcpy(k->ir.size, sizes, sizeof *sizes * (size_t)loops);
}

void ir_free(ir_kernel *k) {
    for (int i = 0; i < k->ir.operand_count; i++) ml_free(k->memory[i]);
}

static int64_t product(const ml_kernel_ir *ir, int first, int last) {
    int64_t all = 1;
    for (int loop = first; loop < last; loop++) all *= ir->size[loop];
    return all;
}

static int64_t ir_rows(const ir_kernel *k) {
    return product(&k->ir, 0, k->ir.row_loops);
}

static int64_t ir_columns(const ir_kernel *k) {
    return product(&k->ir, k->ir.row_loops, k->ir.loop_count);
}

int ir_operand(ir_kernel *k, ml_dtype dtype, const int64_t *strides, bool written) {
    int at = k->ir.operand_count++;
    ml_operand *operand = &k->ir.operand[at];
    operand->dtype = (uint8_t)dtype;
    operand->written = written;
    int64_t elements = 1;
    for (int loop = k->ir.loop_count - 1; loop >= 0; loop--) {
        operand->stride[loop] = strides != NULL ? strides[loop] : elements;
        elements *= k->ir.size[loop];
    }
    int64_t last = 0, first = 0;
    for (int loop = 0; loop < k->ir.loop_count; loop++) {
        int64_t reach = operand->stride[loop] * (k->ir.size[loop] - 1);
        *(reach > 0 ? &last : &first) += reach;
    }
    k->elements[at] = last - first + 1;
    k->offset[at] = -first;
    return at;
}

int ir_partial(ir_kernel *k, ml_dtype dtype, bool by_column) {
    int at = k->ir.operand_count++;
    k->ir.operand[at].dtype = (uint8_t)dtype;
    k->ir.operand[at].written = true;
    k->elements[at] = k->ir.chunks * (by_column ? ir_columns(k) : 1);
    return at;
}

static ml_inst *add(ir_kernel *k, ml_inst_kind kind, ml_dtype dtype) {
    ml_inst *inst = &k->inst[k->ir.inst_count++];
    memset(inst, 0, sizeof *inst);
    inst->kind = (uint8_t)kind;
    inst->dtype = (uint8_t)dtype;
    inst->level = (uint8_t)k->level;
    inst->phase = (uint8_t)k->phase;
    inst->index = inst->guard = inst->src[0] = inst->src[1] = inst->src[2] = ML_NO_INST;
    if (k->phase >= k->ir.phases) k->ir.phases = k->phase + 1;
    return inst;
}

static int last(const ir_kernel *k) {
    return k->ir.inst_count - 1;
}

int ir_const(ir_kernel *k, ml_dtype dtype, double number) {
    ml_inst *inst = add(k, ML_INST_CONST, dtype);
    if (ml_dtypes[dtype].kind == ML_KIND_FLOAT)
        inst->constant.number = number;
    else
        inst->constant.integer = (int64_t)number;
    inst->level = ML_LEVEL_ROW;
    return last(k);
}

int ir_index(ir_kernel *k, int loop) {
    ml_inst *inst = add(k, ML_INST_INDEX, ML_I64);
    inst->operand = (uint16_t)loop;
    return last(k);
}

int ir_load_at(ir_kernel *k, int operand, ml_dtype dtype, int index, int guard) {
    ml_inst *inst = add(k, ML_INST_LOAD, dtype);
    inst->operand = (uint16_t)operand;
    inst->index = (uint16_t)index;
    inst->guard = (uint16_t)guard;
    return last(k);
}

int ir_load(ir_kernel *k, int operand, ml_dtype dtype) {
    return ir_load_at(k, operand, dtype, ML_NO_INST, ML_NO_INST);
}

void ir_store(ir_kernel *k, int operand, int value) {
    ml_inst *inst = add(k, ML_INST_STORE, (ml_dtype)k->ir.operand[operand].dtype);
    inst->operand = (uint16_t)operand;
    inst->src[0] = (uint16_t)value;
}

int ir_map(ir_kernel *k, ml_op op, ml_dtype dtype, int a, int b, int c) {
    ml_inst *inst = add(k, ML_INST_MAP, dtype);
    inst->op = (uint8_t)op;
    inst->src[0] = (uint16_t)a;
    inst->src[1] = (uint16_t)b;
    inst->src[2] = (uint16_t)c;
    return last(k);
}

int ir_cast(ir_kernel *k, ml_dtype dtype, int a) {
    int at = ir_map(k, ML_OP_CAST, dtype, a, ML_NO_INST, ML_NO_INST);
    k->inst[at].from_dtype = k->inst[a].dtype;
    return at;
}

int ir_reduce(ir_kernel *k, ml_op op, ml_scope scope, int a, int operand) {
    ml_inst *inst =
        add(k, ML_INST_REDUCE, op == ML_OP_ARGMAX ? ML_I32 : (ml_dtype)k->inst[a].dtype);
    inst->op = (uint8_t)op;
    inst->scope = (uint8_t)scope;
    inst->src[0] = (uint16_t)a;
    inst->operand = (uint16_t)operand;
    return last(k);
}

double ir_get(const ir_kernel *k, int operand, int64_t i) {
    return ml_element((ml_dtype)k->ir.operand[operand].dtype, k->memory[operand], i);
}

void ir_set(ir_kernel *k, int operand, int64_t i, double value) {
    ml_set_element((ml_dtype)k->ir.operand[operand].dtype, k->memory[operand], i, value);
}

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return *state >> 33;
}

void ir_fill(ir_kernel *k, uint64_t seed) {
    uint64_t state = seed + 12345;
    for (int i = 0; i < k->ir.operand_count; i++) {
        ml_dtype dtype = (ml_dtype)k->ir.operand[i].dtype;
        ml_free(k->memory[i]);
        k->memory[i] = ml_alloc((size_t)(k->elements[i] * ml_dtypes[dtype].bytes) + 64);
        if (k->ir.operand[i].written) continue;
        for (int64_t e = 0; e < k->elements[i]; e++) {
            double uniform = (double)next_random(&state) / 1073741824.0 - 1.0;
            if (ml_dtypes[dtype].kind == ML_KIND_INT) uniform = floor(uniform * 100);
            if (dtype == ML_BOOL) uniform = uniform > 0;
            ir_set(k, i, e, uniform);
        }
    }
}

static double map_value(ml_op op, ml_dtype dtype, double a, double b, double c) {
    switch (op) {
    case ML_OP_ADD: return a + b;
    case ML_OP_SUB: return a - b;
    case ML_OP_MUL: return a * b;
    case ML_OP_DIV: return a / b;
    case ML_OP_NEG: return -a;
    case ML_OP_EXP: return exp(a);
    case ML_OP_LOG: return log(a);
    case ML_OP_TANH: return tanh(a);
    case ML_OP_SQRT: return sqrt(a);
    case ML_OP_RSQRT: return 1 / sqrt(a);
    case ML_OP_SIGMOID: return 1 / (1 + exp(-a));
    case ML_OP_MAXIMUM: return isnan(a) || isnan(b) ? NAN : fmax(a, b);
    case ML_OP_IDIV: return floor(a / b);
    case ML_OP_MOD: return a - b * floor(a / b);
    case ML_OP_LT: return a < b;
    case ML_OP_GE: return a >= b;
    case ML_OP_IS_FINITE: return isfinite(a) != 0;
    case ML_OP_EQ: return a == b;
    case ML_OP_AND: return a != 0 && b != 0;
    case ML_OP_WHERE: return a != 0 ? b : c;
    case ML_OP_CAST:
        return dtype == ML_BOOL      ? a != 0
               : ml_is_narrow(dtype) ? ml_round_to(dtype, a)
               : ml_is_float(dtype)  ? a
                                     : trunc(a);
    default: return NAN;
    }
}

typedef struct {
    ir_kernel *k;
    double **results;
    double *values[IR_MAX_INST]; /* [columns] */
    int64_t at[ML_MAX_LOOPS];
    int64_t row, column, chunk;
} interpreter;

static void unravel(const ml_kernel_ir *ir, int first, int last_loop, int64_t linear, int64_t *at) {
    for (int loop = last_loop - 1; loop >= first; loop--) {
        at[loop] = linear % ir->size[loop];
        linear /= ir->size[loop];
    }
}

static double source(const interpreter *it, int inst) {
    return inst == ML_NO_INST ? 0 : it->values[inst][it->column];
}

static int64_t address(const interpreter *it, const ml_inst *inst) {
    const ml_operand *operand = &it->k->ir.operand[inst->operand];
    int64_t offset = it->k->offset[inst->operand];
    for (int loop = 0; loop < it->k->ir.loop_count; loop++)
        offset += operand->stride[loop] * it->at[loop];
    return offset + (inst->index != ML_NO_INST ? (int64_t)source(it, inst->index) : 0);
}

static double evaluate(interpreter *it, const ml_inst *inst) {
    switch ((ml_inst_kind)inst->kind) {
    case ML_INST_CONST:
        return ml_dtypes[inst->dtype].kind == ML_KIND_FLOAT ? inst->constant.number
                                                            : (double)inst->constant.integer;
    case ML_INST_INDEX: return (double)it->at[inst->operand];
    case ML_INST_LOAD:
        if (inst->guard != ML_NO_INST && source(it, inst->guard) == 0) return 0;
        return it->k->ir.operand[inst->operand].written
                   ? it->results[inst->operand][address(it, inst)]
                   : ir_get(it->k, inst->operand, address(it, inst));
    case ML_INST_STORE:
        it->results[inst->operand][address(it, inst)] = source(it, inst->src[0]);
        return 0;
    case ML_INST_MAP:
        if (inst->op == ML_OP_RANDOM) return NAN;
        return ml_round_to((ml_dtype)inst->dtype,
                           map_value((ml_op)inst->op, (ml_dtype)inst->dtype,
                                     source(it, inst->src[0]), source(it, inst->src[1]),
                                     source(it, inst->src[2])));
    default: return 0;
    }
}

static void reduce_step(ml_op op, double *to, double value, double *best, int64_t at) {
    bool number = !isnan(*to); /* NaN stays */
    if (op == ML_OP_SUM) *to += value;
    if (op == ML_OP_MAX && number && !(value <= *to)) *to = value;
    if (op == ML_OP_MIN && number && !(value >= *to)) *to = value;
    if (op == ML_OP_ARGMAX && (at == 0 || value > *best || (isnan(value) && !isnan(*best)))) {
        *best = value;
        *to = (double)at;
    }
}

static double identity(ml_op op) {
    return op == ML_OP_MAX ? -INFINITY : op == ML_OP_MIN ? INFINITY : 0;
}

static void interpret_reduce(interpreter *it, int i, int64_t columns) {
    const ml_inst *inst = &it->k->inst[i];
    ml_op op = (ml_op)inst->op;
    bool once = inst->scope == ML_SCOPE_ALL && inst->level == ML_LEVEL_ROW;
    double total = identity(op), best = 0;
    for (it->column = 0; it->column < (once ? 1 : columns); it->column++) {
        double value = source(it, inst->src[0]);
        double *to = inst->scope == ML_SCOPE_ROW ? &total
                     : inst->scope == ML_SCOPE_ALL
                         ? &it->results[inst->operand][it->chunk]
                         : &it->results[inst->operand][it->chunk * columns + it->column];
        reduce_step(op, to, value, &best, it->column);
    }
    for (int64_t c = 0; c < columns; c++) it->values[i][c] = total;
}

static void interpret_row(interpreter *it) {
    ml_kernel_ir *ir = &it->k->ir;
    int64_t columns = ir_columns(it->k);
    unravel(ir, 0, ir->row_loops, it->row, it->at);
    for (int i = 0; i < ir->inst_count; i++) {
        if (ir->inst[i].kind == ML_INST_REDUCE) {
            interpret_reduce(it, i, columns);
            continue;
        }
        for (it->column = 0; it->column < columns; it->column++) {
            unravel(ir, ir->row_loops, ir->loop_count, it->column, it->at);
            it->values[i][it->column] = evaluate(it, &ir->inst[i]);
        }
    }
}

/* With rows cut into as many chunks: as ranges, or so many at a time by turns. results[operand] are
 * heap blocks of doubles for written operands. */
static void interpret(ir_kernel *k, int64_t chunks, int turn, double **results) {
    interpreter it = {.k = k, .results = results};
    int64_t rows = ir_rows(k);
    for (int i = 0; i < k->ir.operand_count; i++)
        results[i] =
            k->ir.operand[i].written ? ml_alloc(sizeof(double) * (size_t)k->elements[i]) : NULL;
    for (int i = 0; i < k->ir.inst_count; i++) {
        const ml_inst *inst = &k->inst[i];
        it.values[i] = ml_alloc(sizeof(double) * (size_t)ir_columns(k));
        if (inst->kind == ML_INST_REDUCE && inst->scope != ML_SCOPE_ROW)
            for (int64_t e = 0; e < k->elements[inst->operand]; e++)
                results[inst->operand][e] = identity((ml_op)inst->op);
    }
    for (it.chunk = 0; it.chunk < chunks; it.chunk++) {
        int64_t low = turn ? 0 : it.chunk * rows / chunks;
        int64_t high = turn ? rows : (it.chunk + 1) * rows / chunks;
        for (it.row = low; it.row < high; it.row++)
            if (turn == 0 || it.row / turn % chunks == it.chunk) interpret_row(&it);
    }
    for (int i = 0; i < k->ir.inst_count; i++) ml_free(it.values[i]);
}

static double difference(double got, double expected) {
    if (isnan(got) && isnan(expected)) return 0;
    if (got == expected) return 0;
    double scale = fabs(expected) > 1 ? fabs(expected) : 1, d = fabs(got - expected) / scale;
    return isnan(d) ? INFINITY : d;
}

/* The op that combines an operand's chunks into one result; ML_OP_COUNT for other operands. */
static ml_op combined_by(const ir_kernel *k, int operand) {
    for (int i = 0; i < k->ir.inst_count; i++) {
        const ml_inst *inst = &k->inst[i];
        if (inst->kind == ML_INST_REDUCE && inst->scope == ML_SCOPE_ALL && inst->operand == operand)
            return (ml_op)inst->op;
    }
    return ML_OP_COUNT;
}

/* Where chunks of an elementwise kernel begin is the printer's choice: their sum counts. */
static double compare_operand(const ir_kernel *k, int operand, const double *expected) {
    ml_op op = combined_by(k, operand);
    double worst = 0, got_all = identity(op), expected_all = identity(op), unused = 0;
    for (int64_t e = 0; e < k->elements[operand]; e++) {
        double got = ir_get(k, operand, e), d = difference(got, expected[e]);
        if (op == ML_OP_COUNT && d > worst) worst = d;
        if (op == ML_OP_COUNT) continue;
        reduce_step(op, &got_all, got, &unused, e);
        reduce_step(op, &expected_all, expected[e], &unused, e);
    }
    double d = op == ML_OP_COUNT ? 0 : difference(got_all, expected_all);
    return d > worst ? d : worst;
}

/* Rows that a chunk of a kernel for CUDA gets in its turn; or 0. */
static int rows_a_turn(const ml_kernel *kernel) {
    ml_arena *arena = ml_arena_new();
    const char *at = ml_kernel_source(kernel, arena);
    char step[5];
    int rows = 0;
    while (rows == 0 && (at = strstr(at, "row += ")) != NULL)
        if (sscanf(at++, "row += %d * %4[a-z]", &rows, step) != 2) rows = 0;
    ml_arena_free(arena);
    return rows;
}

double ir_compare(ir_kernel *k, const ml_kernel *kernel, ir_runner *run, void *context) {
    double *results[ML_MAX_OPERANDS], worst = 0;
    char *pointers[ML_MAX_OPERANDS];
    long long scalars[ML_MAX_SCALARS];
    for (int i = 0; i < k->ir.operand_count; i++)
        pointers[i] = (char *)k->memory[i] + k->offset[i] * ml_dtypes[k->ir.operand[i].dtype].bytes;
    for (int i = 0; i < ML_MAX_SCALARS; i++) scalars[i] = kernel->scalar[i];
    interpret(k, k->ir.chunks > 0 ? kernel->scalar[1] : 1, rows_a_turn(kernel), results);
    run(context, kernel, pointers, scalars);
    for (int i = 0; i < k->ir.operand_count; i++) {
        double d = results[i] != NULL ? compare_operand(k, i, results[i]) : 0;
        if (d > worst) worst = d;
        ml_free(results[i]);
    }
    return worst;
}
