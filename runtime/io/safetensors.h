/* The safetensors file format: a JSON header of named tensors, then their bytes.
 *
 * The file is mapped, not read; `data` points into the mapping. Everything in the header is
 * checked before a tensor is handed out: header length, duplicate keys, known dtypes, shape times
 * dtype against the offsets, offsets contiguous from 0 to the file's end. */
#ifndef ML_SAFETENSORS_H
#define ML_SAFETENSORS_H

#include "runtime/graph/graph.h"

typedef struct {
    const char *name;
    ml_dtype dtype;
    int rank;
    int64_t shape[ML_MAX_AXES];
    const void *data; /* little endian, row-major; aligned to 1 byte only */
    int64_t bytes;
} ml_safetensor;

typedef struct {
    int count;
    ml_safetensor *tensor; /* in the order of their bytes */
    void *map;
    int64_t map_bytes;
    ml_arena *arena;
} ml_safetensors;

ml_status ml_safetensors_open(const char *path,
                              ml_safetensors **file); /* ML_IO names file and tensor */
void ml_safetensors_close(ml_safetensors *file);

#endif
