/* What both targets know of a kernel of loops (analyse.c, instruction.c, kernel.c).
 *
 * `phase` is kernel.h's, found from the data flow: row instructions of phase p run before the pass
 * over the columns of phase p. `depth` of an instruction is the deepest loop that its value depends
 * on (-1: none) and `loop` the loop inside which it is printed, so that nothing is computed more
 * often than it changes. A value of an earlier pass that a later one needs is read from a buffer
 * (`buffered`) or computed again in that pass. */
#ifndef ML_EMIT_INTERNAL_H
#define ML_EMIT_INTERNAL_H

#include "codegen/emit/emit.h"

enum { EMIT_MAX_PHASES = 8, EMIT_OWN_SCALARS = 2 /* the loops' bounds */ };

typedef struct emitter {
    const ml_kernel_ir *ir;
    ml_target target;
    ml_arena *arena;
    /* Found by emit_analyse: */
    int *phase, *depth, *loop; /* by instruction, as is what follows */
    int *scalar;               /* of a constant: its number among the scalars; 0: in the text */
    bool *exact;               /* rounded to a narrow float by its stores alone */
    int phases, scalars;
    int inner;             /* the innermost loop */
    int64_t rows, columns; /* products of sizes */
    const char **index;    /* texts of the loops' indices */
    /* Chosen: */
    bool *buffered;             /* survives its pass */
    const struct c_schedule *c; /* one of both, by the target */
    const struct cuda_schedule *cuda;
    /* Found by emit_needs, by phase: */
    bool *need[EMIT_MAX_PHASES];  /* instructions to print */
    bool passes[EMIT_MAX_PHASES]; /* whether there is anything to do inside the columns */
    /* While a source is printed: */
    ml_text text;
    const char *entry;
    int batch; /* members that one launch may have; 0: a kernel of its own */
} emitter;

/* Analysis; decides nothing about buffers. `emit_needs` is called once they are decided. */
void emit_analyse(emitter *e);
void emit_needs(emitter *e);
/* Whether a narrow float is rounded where it is computed: kernels round alike what they store and
 * what they pass on, so that no value depends on what else its kernel does. */
bool emit_rounds(const ml_inst *inst);
/* "o3[...]" without brackets: the offset of operand `op` over loops first .. last, as text that
 * begins with " + " for every term; `skip` is a loop to leave out, or -1. */
void emit_offset(emitter *e, ml_text *out, const ml_operand *operand, int first, int last,
                 int skip);
/* "const float v3 = ml_exp_f32(v2);" for MAP, CONST and INDEX; loads and stores are the target's.
 */
void emit_value(emitter *e, ml_text *out, int inst);
/* The name of a value, or the text of a constant (or of the scalar that holds it). */
const char *emit_name(emitter *e, int inst);
/* "    name %3 %7\n": the instructions that a schedule marks; nothing where there are none. */
void emit_print_marked(ml_text *out, const char *name, const bool *marks, int count);

#define FOR_EACH_SOURCE(inst, source)                                                              \
    for (int source##_at = 0, source; source##_at < ML_INST_SOURCES; source##_at++)                \
        if ((source = ml_inst_source(inst, source##_at)) != ML_NO_INST)

/* The three steps, for each target: choose a schedule and set the kernel's launch; print the
 * schedule, which has all that the source depends on beside the IR; print the source. */
void emit_c_choose(emitter *e, ml_kernel *out);
void emit_c_print_schedule(const emitter *e, ml_text *out);
const char *emit_c_print(emitter *e);
void emit_cuda_choose(emitter *e, ml_kernel *out);
void emit_cuda_print_schedule(const emitter *e, ml_text *out);
const char *emit_cuda_print(emitter *e);

#endif
