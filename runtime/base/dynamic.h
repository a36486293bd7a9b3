/* Libraries that are opened when they are first needed, so that one binary runs without them. */
#ifndef ML_DYNAMIC_H
#define ML_DYNAMIC_H

/* Open a library by its soname: where the loader finds it, else under $CUDA_HOME, $CUDA_PATH or
 * /usr/local/cuda. NULL where it is absent; dlerror() says why. */
void *ml_dynamic_open(const char *soname);

#endif
