/* MLUA_CHECK=cpu: comparing what each step of a program wrote with the reference interpreter.
 *
 * The value that a step computes is worked out again by definition, in float64, from the values
 * that the device itself stored before the step: a wrong kernel is found where it is wrong, and
 * rounding does not add up. Limits: every value of the program is stored on the host as doubles,
 * and the interpreter is slow, so it serves small models; what is inside of a step is not seen;
 * steps that only hand partial results on are checked with the step that finishes them. An element
 * may be off by 5e-4 of the largest one (f32; bf16 2e-2, f64 1e-9), and beyond that by what the
 * roundings inside of the step may have added (ml_reference_bounds). */
#ifndef ML_CHECK_H
#define ML_CHECK_H

#include "runtime/plan/plan.h"

typedef struct ml_checker ml_checker;
/* Reads `bytes` at `offset` of a storage of the plan into host memory; raises. */
typedef void ml_check_read(void *context, uint32_t storage, int64_t offset, int64_t bytes,
                           void *to);

ml_status ml_check_new(const ml_plan *plan, ml_check_read *read, void *context,
                       ml_checker **checker);
/* Before the first step of each run: takes states and inputs. */
ml_status ml_check_begin(ml_checker *checker);
/* Before step `step` runs: ML_INTERNAL where what it reads is no longer what was written there. */
ml_status ml_check_reads(ml_checker *checker, uint32_t step);
/* After step `step` has run: ML_INTERNAL with the step, its node and the deviation where it is
 * wrong. */
ml_status ml_check_step(ml_checker *checker, uint32_t step);
void ml_check_free(ml_checker *checker);

#endif
