/* Inside kernel.c and kernel_ir.c: one kernel in the making. */
#ifndef ML_KERNEL_INTERNAL_H
#define ML_KERNEL_INTERNAL_H

#include "codegen/lower/lower_internal.h"

typedef struct {
    uint32_t value, root;
    bool partial;
} lower_write;

/* An operand in the making: what is read, or written; several may become one. */
typedef struct {
    uint32_t node; /* the number of the node that is read (alike.c); or the root that is written */
    uint32_t value;
    bool partial, merged; /* merged: its value is that of another one, further on */
    int64_t offset;       /* elements from where the node begins */
    int64_t back;         /* elements from there back to where the value begins */
    uint16_t operand;
} kernel_part;

typedef struct {
    lowering *l;
    const lower_group *group;
    lower_builder b;
    ML_VEC(lower_write) writes;
    ML_VEC(ml_operand) operands; /* strides by digit; reads, then writes */
    ML_VEC(uint32_t) values;     /* of the operands */
    kernel_part *parts;          /* the accesses of b, then `writes` */
    uint32_t part_count;
    int reads;
    uint8_t *level, *phase, *last; /* by instruction of b; last: the last phase that computes it */
    bool *live;
} emission;

/* Levels, phases, loops: b's instructions and digits to the final IR. */
void lower_finish_ir(emission *e, ml_kernel_ir *ir);
uint64_t *lower_aliases(const emission *e, const ml_kernel_ir *ir);
void lower_describe_ir(const ml_schedule *s, const ml_kernel_ir *ir, ml_step *step);
uint64_t lower_hash_ir(const ml_kernel_ir *ir);
bool lower_same_ir(const ml_kernel_ir *a, const ml_kernel_ir *b);

#endif
