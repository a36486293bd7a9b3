/* Kernel IR by hand, and a plain interpreter of it: every instruction over a whole row, in double
 * (integers exactly up to 2^53), following kernel.h word by word. */
#ifndef ML_TEST_EMIT_IR_H
#define ML_TEST_EMIT_IR_H

#include "codegen/jit/jit.h"

enum { IR_MAX_INST = 96 };

typedef struct {
    ml_kernel_ir ir;
    ml_inst inst[IR_MAX_INST];
    ml_operand operand[ML_MAX_OPERANDS];
    int level, phase;                  /* of instructions added from now on */
    int64_t elements[ML_MAX_OPERANDS]; /* of each operand's memory */
    int64_t offset[ML_MAX_OPERANDS];   /* of its first element in memory */
    void *memory[ML_MAX_OPERANDS];     /* heap blocks */
} ir_kernel;

void ir_init(ir_kernel *k, int row_loops, int loops, const int64_t *sizes);
void ir_free(ir_kernel *k); /* memory */
/* strides NULL: contiguous over all loops. */
int ir_operand(ir_kernel *k, ml_dtype dtype, const int64_t *strides, bool written);
int ir_partial(ir_kernel *k, ml_dtype dtype, bool by_column);
int ir_const(ir_kernel *k, ml_dtype dtype, double number);
int ir_index(ir_kernel *k, int loop);
int ir_load(ir_kernel *k, int operand, ml_dtype dtype);
int ir_load_at(ir_kernel *k, int operand, ml_dtype dtype, int index, int guard);
void ir_store(ir_kernel *k, int operand, int value);
int ir_map(ir_kernel *k, ml_op op, ml_dtype dtype, int a, int b, int c);
int ir_cast(ir_kernel *k, ml_dtype dtype, int a);
int ir_reduce(ir_kernel *k, ml_op op, ml_scope scope, int a, int operand);

/* Allocate every operand's memory and fill the ones that are read with random numbers. */
void ir_fill(ir_kernel *k, uint64_t seed);
double ir_get(const ir_kernel *k, int operand, int64_t element);
void ir_set(ir_kernel *k, int operand, int64_t element, double value);
/* Runs a printed kernel on pointers and scalars. */
typedef void ir_runner(void *context, const ml_kernel *kernel, char **pointers,
                       const long long *scalars);
/* Interpret, run, and compare: the largest difference relative to the larger of 1 and the value. */
double ir_compare(ir_kernel *k, const ml_kernel *kernel, ir_runner *run, void *context);

#endif
