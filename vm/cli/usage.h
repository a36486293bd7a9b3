/* Help for words of the command line that mlua does not know: what they are called elsewhere, and
 * how it is written here. */
#ifndef ML_USAGE_H
#define ML_USAGE_H

#include <stdbool.h>
#include <stddef.h>

/* For an option `word` that the command does not have: "--lr=1e-3" is a setting, "--gpus" are
 * ranks. Whether the help knows what is meant, whatever option has a similar name. */
bool usage_option_help(const char *command, bool runs, bool checks, const char *word, char *help,
                       size_t size);
/* The device that "gpu", "CUDA", "cuda:0" or (of those that a check plans for) "A100" means; NULL
 * for other names. */
const char *usage_device_meant(const char *name, bool plans);

#endif
