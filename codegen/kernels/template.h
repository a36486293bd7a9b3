/* Kernels written as source text with placeholders (attention, scatter_add, scans).
 *
 * A body is C or CUDA text in which ${name} stands for a text that template_set gave: sizes,
 * strides, types, pasted functions. ${e} is the kernel's entry name, which makes file-scope names
 * unique, as several kernels may share one translation unit. Invariant: the text depends on
 * structure alone (no node numbers, no addresses), so that equal kernels have equal keys. */
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
/* `body` with every ${name} replaced, in the replacements too. */
char *template_expand(const ml_template *t, const char *body);
/* A kernel of a body with what was set so far, expanded when its source is printed. Key, entry,
 * label and pointer_count are set; units is 1. */
ml_kernel *template_kernel(ml_template *t, const char *body, const char *label, int pointers);
/* Of several bodies, one after the other. */
ml_kernel *template_kernel_of(ml_template *t, const char *const *bodies, int count,
                              const char *label, int pointers);
/* The kernel of a file (files.h) with these parameters: sets the same. */
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
int64_t template_loop_total(const ml_template_loops *loops);
const char *template_offset(ml_arena *arena, const ml_template_loops *loops, const char *index);

/* Memory that only this step's kernels use, as a further written value; the value is its position
 * among the kernel's pointers. */
int template_workspace(ml_schedule *s, ml_step *step, ml_dtype dtype, int64_t elements);

/* Conversions between an element in memory and its compute type, for both targets. */
const char *template_load(ml_arena *arena, ml_dtype dtype, const char *element);
const char *template_store(ml_arena *arena, ml_dtype dtype, const char *value);

/* CUDA, bf16 tensor cores: struct ${e}_arguments, and ${e}_copy, _commit, _wait (cp.async),
 * _matrices and _transposed (ldmatrix), _mma, _pack, _exp2. ${quick}: text before them. */
extern const char template_mma_ptx[];

/* The kernel of a product by groups of rows for sm_90, once template_ragged.c has set all sizes.
 * right_deep: the right operand's depth is innermost; narrow: the result is bf16. */
ml_kernel *template_wgmma(ml_template *t, bool outer, bool right_deep, bool narrow, int pointers);

/* The file of the CUDA kernel of a SORT of integers that the graph says are few kinds or a
 * permutation. NULL: neither. `size`: of a row. */
typedef struct {
    int64_t blocks; /* for each row */
    uint32_t threads;
} template_sort_grid;
const char *template_sort_known(ml_template *t, const ml_graph *g, ml_ref sort, int64_t size,
                                template_sort_grid *grid);

/* What kernels of 64 x 256 products a warpgroup share: _begin, _end, _finish, _finish_but_one and
 * _product on ${registers} and ${sums}; and _operand, its operands in shared memory. */
extern const char template_wgmma_products[], template_wgmma_operand[];
void template_wgmma_registers(ml_template *t); /* sets ${registers} and ${sums} */

/* The same by the copy engine: where strides, beyond what tensor cores need, allow it. */
bool template_tma_serves(const ml_ragged *r);
ml_kernel *template_tma(ml_template *t, const ml_ragged *r, int multiprocessors, int pointers);

const ml_value *template_value(const ml_schedule *s, const ml_step *step, int i);

#endif
