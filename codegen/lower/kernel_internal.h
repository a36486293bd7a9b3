/* Inside kernel.c and kernel_ir.c: one kernel in the making. */
#ifndef ML_KERNEL_INTERNAL_H
#define ML_KERNEL_INTERNAL_H

#include "codegen/lower/lower_internal.h"

typedef struct {
    uint32_t value, root;
    bool partial;
} lower_write;

typedef struct {
    lowering *l;
    const lower_group *group;
    lower_builder b;
    ML_VEC(lower_write) writes;
    ML_VEC(ml_operand) operands; /* strides by digit; reads, then writes */
    int reads;
    uint8_t *level, *phase, *last; /* by instruction of b; last: the last phase that computes it */
    bool *live;
} emission;

/* Levels, phases, loops: b's instructions and digits to the final IR. */
void lower_finish_ir(emission *e, ml_kernel_ir *ir);
uint64_t *lower_aliases(const emission *e, const ml_kernel_ir *ir);
void lower_describe_ir(const ml_schedule *s, const ml_kernel_ir *ir, ml_step *step);
uint64_t lower_hash_ir(const ml_kernel_ir *ir); /* of all but the values */
bool lower_same_ir(const ml_kernel_ir *a, const ml_kernel_ir *b);

#endif
