/* Texts that generated kernels and kernels from templates share, in C and CUDA. */
#ifndef ML_EMIT_H
#define ML_EMIT_H

#include "codegen/kernel.h"

/* C type that a dtype is computed in ("float"), and of its memory ("ml_bf16"). */
const char *emit_compute_type(ml_dtype dtype);
const char *emit_memory_type(ml_dtype dtype);
/* Texts of numbers: exact, of the dtype's compute type. */
void emit_constant(ml_text *out, ml_dtype dtype, double number, int64_t integer);
/* The value a reduction starts from. */
void emit_identity(ml_text *out, ml_op op, ml_dtype dtype);

/* ---- Rows of a kernel of loops as statements of another kernel (rows.c, CUDA) ---------------- */

/* Whether its only result is a matrix of bf16, [rows][columns] with `step` elements from a row to
 * the next, that a block may compute by rows: elementwise, or with sums over each row. */
bool emit_rows_serve(const ml_kernel_ir *ir, int64_t rows, int64_t columns, int64_t step);
/* Statements that compute row `row` for a team of TEAM threads, of which this is number `lane`:
 * PUT(row, k, pack) for each 8 columns from `begin` to `end`, zeros from `columns` on. Both are
 * multiples of 8. They call sum_of_team(x), max_of_team and min_of_team. pointers: texts of the
 * operands' addresses. */
const char *emit_rows(const ml_kernel_ir *ir, const ml_target *target, const char *const *pointers,
                      int64_t columns, ml_arena *arena);

#endif
