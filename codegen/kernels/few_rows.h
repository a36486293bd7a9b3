/* Products by groups of rows, of few rows in all: few_rows.c for ragged.c. */
#ifndef ML_FEW_ROWS_H
#define ML_FEW_ROWS_H

#include "codegen/kernels/template.h"
#include "runtime/ops/ragged/ragged.h"

/* Of bf16 operands and results that tensor cores serve; whether they are few enough. */
bool few_rows_of_groups(const ml_target *target, const ml_ragged *r);
/* After what ragged.c sets for the same product. */
ml_kernel *few_rows_groups_kernel(ml_template *t, const ml_target *target, const ml_ragged *r,
                                  int pointers);

#endif
