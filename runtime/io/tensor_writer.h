/* A safetensors file, written tensor by tensor beside what makes the next one.
 *
 * A write returns at once: threads cast pieces of the values and write them, while the caller makes
 * the next tensor. Values must stay as they are until the next call. */
#ifndef ML_TENSOR_WRITER_H
#define ML_TENSOR_WRITER_H

#include "runtime/graph/graph.h"

typedef struct ml_tensor_writer ml_tensor_writer;

/* A new file of that header, in JSON: the tensors follow in its order. */
ml_status ml_tensor_writer_new(const char *path, const char *header, size_t bytes,
                               ml_tensor_writer **writer);
/* Waits for the tensor before this one, and fails where that could not be written. */
ml_status ml_tensor_writer_add(ml_tensor_writer *writer, ml_dtype from, const void *values,
                               int64_t count, ml_dtype to);
ml_status ml_tensor_writer_close(ml_tensor_writer *writer); /* frees it; NULL is allowed */

#endif
