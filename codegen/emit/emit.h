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

#endif
