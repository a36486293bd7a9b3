/* The script of a model that is given by its weights: the run's own, or the one of models/, inside
 * the binary, that names the architecture of a Hugging Face folder's config.json. */
#ifndef ML_FROM_H
#define ML_FROM_H

#include "vm/vm.h"

/* Sets options->script, and script_text where it is inside the binary; false: ml_error_last says
 * why. */
bool from_script(vm_options *options);

#endif
