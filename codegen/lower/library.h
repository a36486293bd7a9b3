/* What the GPU's libraries are given to work in.
 *
 * Known without a GPU, so that a plan accounts for it before there is one. The device may need less
 * (where a library is missing, its own kernels serve), never noticeably more. */
#ifndef ML_LIBRARY_H
#define ML_LIBRARY_H

#include "codegen/lower/lower.h"

enum { ML_GEMM_WORKSPACE = 64 << 20 }; /* bytes, of every cuBLASLt call */

/* Why cuDNN is not asked for this attention, or NULL where it is. Layouts are not looked at. */
const char *ml_attention_refused(const ml_attention_step *step);
/* The deterministic backward pass stores dS of a slice of the batch and of the K/V heads in
 * workspace. In how many slices it runs, so that one needs about a GiB: 1 x 1 where it
 * fits at once. False where even the smallest slice is too large. */
bool ml_attention_slices(const ml_attention_step *step, int64_t *batch_slices,
                         int64_t *head_slices);
/* Bytes of workspace that cuDNN wants for this step: a value that the step writes, in the arena. 0
 * where it is not asked. */
int64_t ml_attention_workspace(const ml_attention_step *step);
/* Bytes of workspace beside the arena for the other steps of a schedule: they share it. */
int64_t ml_library_workspace(const ml_schedule *schedule);

#endif
