/* What the tests of the kernel templates share: one node as a step, its kernels compiled for the
 * CPU, run over poisoned memory and compared with the reference interpreter. Where NVRTC is
 * installed, the CUDA kernels of the same step are compiled too; an emulator can run them. */
#ifndef TEMPLATE_SUPPORT_H
#define TEMPLATE_SUPPORT_H

#include "codegen/lower/lower.h"
#include "tests/passes/support.h"

/* `node` has several outputs or one; its sources are inputs or other nodes. For every output: the
 * root mean square of the differences is at most `tolerance` times that of the values, and no
 * element is off by more than 8 times the tolerance of the largest; integers are equal. */
void template_check(fixture *f, ml_ref node, double tolerance);
/* The same with the operands' memory laid out as targets of the step would be: `threads` decides
 * how work is cut, `vector_bytes` is the width of vectors. */
void template_check_target(fixture *f, ml_ref node, double tolerance, const ml_target *target);
/* Give every float input large gaps between its rows, as a part of a larger tensor has. */
void template_use_gaps(bool gaps);

/* Put NaN where kernels must not look: into the float operands with this axis, at its indices start
 * .. stop - 1. What is expected comes from the values that were there. 0: nowhere. */
void template_spoil(ml_axis axis, int64_t start, int64_t stop);
/* Whether the kernels for C must not look there either (as at first). */
void template_spoil_c(bool spoil);

/* Whether the CUDA kernels are compiled too (as at first). */
void template_use_cuda(bool compiled);
/* Whether they are run, and compared, by an emulator of a GPU's threads (slow; not at first). The
 * test is skipped where there is no C++ compiler. */
void template_use_emulator(bool emulated);

/* The GPU that CUDA kernels are made for; 0: as at first, an H200's 90 and 132. */
void template_use_gpu(int arch, int multiprocessors);
/* The variant of attention forward on warpgroup products; 0: the default, -1: on mma.sync. */
void template_use_tiles(int tiles);

/* Run kernels in order over these pointers; false, and a failed test, where they do not compile.
 */
bool template_emulate(ml_kernel *const *kernels, int count, char *const *memory);
/* The same of a kernel with tensor maps, of which no chain is made: two blocks share its work. */
bool template_emulate_pair(const ml_kernel *kernel, char *const *memory);

#endif
