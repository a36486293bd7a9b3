/* The folder of a run (--out), before a script is loaded. */
#ifndef ML_COMMAND_FOLDER_H
#define ML_COMMAND_FOLDER_H

#include "vm/vm.h"

/* ML_OK, or an error: --resume without --out, or a folder that holds a run already where nothing
 * asks to continue it. Of one process, before any rank is at work. */
ml_status folder_check(const vm_options *options);
/* The words as a shell takes them, ml_alloc'ed; NULL without memory. */
char *folder_command(int count, char **words);

#endif
