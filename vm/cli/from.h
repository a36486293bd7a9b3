/* The script of a model that is given by its weights: the run's own, or the one of models/, inside
 * the binary, that names the architecture of a Hugging Face folder's config.json. */
#ifndef ML_FROM_H
#define ML_FROM_H

#include "vm/vm.h"

/* Sets options->script, and script_text where it is inside the binary; false: ml_error_last says
 * why. */
bool from_script(vm_options *options);

/* Where options->from is a folder with adapter_config.json, or BASE,FOLDER: options->adapter is the
 * folder, options->from the weights that it is for. False: ml_error_last says why. */
bool from_adapter(vm_options *options);

#endif
