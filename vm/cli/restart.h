/* --restarts: the ranks of one host are started again from the last checkpoint when one dies. */
#ifndef ML_COMMAND_RESTART_H
#define ML_COMMAND_RESTART_H

#include "vm/vm.h"

/* How a rank ends whose device failed, in a run that a folder keeps: sysexits.h's EX_IOERR. */
enum { RESTART_EXIT_DEVICE = 74 };

/* Run the ranks of this command line (a NULL-ended argv) until they end in another way than by a
 * rank's death, options->restarts times more at most; with --elastic over fewer data-parallel ranks
 * where a GPU is missing, or a start made no step. The value is the exit code. */
int restart_ranks(const vm_options *options, const ml_comm_options *comm, char **argv);

#endif
