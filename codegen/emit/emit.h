/* Inside the printer: what emit.c works out about a kernel before emit_c.c or emit_cuda.c prints
 * it.
 *
 * A stage is what kernel.h calls a phase, recomputed from the data flow: row instructions of stage
 * s run before the pass over the columns of stage s. `depth` of an instruction is the deepest loop
 * that its value depends on (-1: none) and `place` the loop inside which it is printed, so that
 * nothing is computed more often than it changes. A value of an earlier pass that a later one
 * needs is read from a buffer (`buffered`) or computed again in that pass. */
#ifndef ML_EMIT_H
#define ML_EMIT_H

#include "codegen/kernel.h"

enum { EMIT_MAX_STAGES = 8, EMIT_OWN_SCALARS = 2 /* the loops' bounds */ };

typedef struct emitter {
    const ml_kernel_ir *ir;
    ml_target target;
    ml_arena *arena;
    const struct c_schedule *c; /* chosen: one of both, by the target */
    const struct cuda_shape *cuda;
    /* While a source is printed: */
    ml_text text;
    const char *entry;
    int batch; /* members that one launch may have; 0: a kernel of its own */
    /* Found by emit_analyse: */
    int *stage, *depth, *place;
    bool *buffered;               /* set by the target: survives its pass */
    int *scalar;                  /* of a constant: its place among the scalars; 0: in the text */
    bool *exact;                  /* a CAST to bf16 that a bf16 store rounds anyway */
    bool *need[EMIT_MAX_STAGES];  /* instructions to print in a stage */
    bool passes[EMIT_MAX_STAGES]; /* whether a stage has anything to do inside the columns */
    int stages, scalars;
    int inner;             /* the innermost loop */
    int64_t rows, columns; /* products of sizes */
    const char **index;    /* texts of the loops' indices */
} emitter;

/* C type that a dtype is computed in ("float"), and of its memory ("ml_bf16"). */
const char *emit_compute_type(ml_dtype dtype);
const char *emit_memory_type(ml_dtype dtype);
/* Texts of numbers: exact, of the dtype's compute type. */
void emit_constant(ml_text *out, ml_dtype dtype, double number, int64_t integer);
/* The value a reduction starts from. */
void emit_identity(ml_text *out, ml_op op, ml_dtype dtype);
/* Analysis; decides nothing about buffers. `emit_needs` is called once they are decided. */
void emit_analyse(emitter *e);
void emit_needs(emitter *e);
/* "o3[...]" without brackets: the offset of operand `op` over loops first .. last, as text that
 * begins with " + " for every term; `skip` is a loop to leave out, or -1. */
void emit_offset(emitter *e, ml_text *out, const ml_operand *operand, int first, int last,
                 int skip);
/* "const float v3 = ml_exp_f32(v2);" for MAP, CONST and INDEX; loads and stores are the target's.
 */
void emit_value(emitter *e, ml_text *out, int inst);
/* The name of a value, or the text of a constant (or of the scalar that holds it). */
const char *emit_name(emitter *e, int inst);
extern const char emit_prelude_c[], emit_prelude_cuda[];

/* For each target: choose a schedule and set the kernel's launch; print the schedule, all that the
 * source depends on beside the IR; print the source. */
void emit_c_choose(emitter *e, ml_kernel *out);
void emit_c_print_schedule(const emitter *e, ml_text *out);
const char *emit_c_print(emitter *e);
void emit_cuda_choose(emitter *e, ml_kernel *out);
void emit_cuda_print_schedule(const emitter *e, ml_text *out);
const char *emit_cuda_print(emitter *e);
/* " name %3 %7": the instructions that a schedule marks, if any. */
void emit_print_marked(ml_text *out, const char *name, const bool *marks, int count);

#endif
