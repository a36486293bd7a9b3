/* The C side of kernels that are files (files.h; attention, products by groups, scans, ...): choose
 * shapes and a variant, set the file's parameters (sizes, strides, types, generated expressions),
 * name the file. Invariant: parameters depend on structure alone (no node numbers, no addresses),
 * so that equal kernels have equal keys. */
#ifndef ML_TEMPLATE_H
#define ML_TEMPLATE_H

#include "codegen/emit/emit.h"
#include "codegen/kernels/files.h"
#include "codegen/lower/lower.h"

typedef struct {
    ml_arena *arena;
    ML_VEC(ml_parameter) entries;
    ml_expansions *known;
} ml_template;

ml_template template_begin(ml_schedule *s);
/* Later settings of a name win. */
void template_set(ml_template *t, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The text is not copied. */
void template_set_text(ml_template *t, const char *name, const char *text);
const char *template_get(const ml_template *t, const char *name); /* raises when unknown */
/* The kernel of a file with the parameters set so far, printed when its source is wanted: key,
 * entry, label and pointer_count are set; units is 1. */
ml_kernel *template_file(ml_template *t, const char *file, const char *label, int pointers);
/* CUDA kernels: grid and block instead of units. */
void template_launch(ml_kernel *k, int64_t x, int64_t y, int64_t z, uint32_t block,
                     int64_t shared_bytes);

/* Loops of sizes size[] (last fastest) with the strides of one operand: the text of the element
 * offset of linear index `index`, such as "((i / 12) * 768 + i % 12 * 64)". Loops that are
 * contiguous with the next are merged. */
typedef struct {
    int count;
    int64_t size[ML_MAX_AXES], stride[ML_MAX_AXES];
} ml_template_loops;
void template_loop_add(ml_template_loops *loops, int64_t size, int64_t stride);
const char *template_offset(ml_arena *arena, const ml_template_loops *loops, const char *index);

/* Memory that only this step's kernels use, as a further written value; the value is its position
 * among the kernel's pointers. */
int template_workspace(ml_schedule *s, ml_step *step, ml_dtype dtype, int64_t elements);

/* An element in memory as its compute type, for both targets. */
const char *template_load(ml_arena *arena, ml_dtype dtype, const char *element);

const ml_value *template_value(const ml_schedule *s, const ml_step *step, int i);

#endif
