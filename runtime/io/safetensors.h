/* The safetensors file format: a JSON header of named tensors, then their bytes.
 *
 * Opening reads the header; a tensor's bytes are read when they are asked for. Everything in the
 * header is checked before a tensor is handed out: header length, duplicate keys, known dtypes,
 * shape times dtype against the offsets, offsets contiguous from 0 to the file's end. F16,
 * which tensors here do not have, is read as f32, exactly; F8_E4M3 by view_load.c alone. */
#ifndef ML_SAFETENSORS_H
#define ML_SAFETENSORS_H

#include "runtime/graph/graph.h"
#include "runtime/io/file.h"

typedef struct {
    const char *name;
    ml_dtype dtype; /* as it is read */
    bool half;      /* F16 in the file */
    bool e4m3;      /* F8_E4M3 in the file: 8 bits, by the scales of another tensor */
    int rank;
    int64_t shape[ML_MAX_AXES];
    int64_t offset, bytes; /* in the file: little endian, row-major */
} ml_safetensor;

typedef struct {
    int count;
    ml_safetensor *tensor; /* in the order of their bytes */
    ml_file file;
    ml_arena *arena;
} ml_safetensors;

ml_status ml_safetensors_open(const char *path,
                              ml_safetensors **file); /* ML_IO names file and tensor */
/* The elements of one of its tensors, of the tensor's dtype. */
ml_status ml_safetensors_read(const ml_safetensors *file, const ml_safetensor *tensor, void *to);
int64_t ml_safetensor_width(const ml_safetensor *tensor); /* bytes of an element in the file */
/* The JSON before the tensors, which is not checked; *text is freed by the caller, also if this
 * fails. */
ml_status ml_safetensors_header(const ml_file *file, char **text, int64_t *length);
void ml_safetensors_close(ml_safetensors *file);

#endif
