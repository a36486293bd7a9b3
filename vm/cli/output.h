/* Where standard output is written.
 *
 * With --json standard output is for JSON objects alone: what else is printed, by the script or by
 * programs that it starts, is written to standard error. In a check programs return zeros: from the
 * first one on, the script's own output does not describe the model and is discarded, except while
 * programs are traced. */
#ifndef ML_OUTPUT_H
#define ML_OUTPUT_H

#include "vm/vm.h"

/* Before and after the script; false, with a message on standard error, where it cannot be written.
 * Without --json nothing changes. */
bool output_divert(vm_options *options);
bool output_restore(vm_options *options);
/* Discard standard output from now on, or show it again. */
void output_discard(ml_vm *vm, bool discard);

#endif
