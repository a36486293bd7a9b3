/* manifest.json of a checkpoint: what was saved, and where each tensor lies.
 *
 * A checkpoint is a folder of safetensors files: model-*.safetensors of parameters with
 * model.safetensors.index.json, state-*.safetensors of the rest, and the manifest, which is written
 * last. Files depend on the names, types and values of the tensors alone, never on how many ranks
 * wrote them: tensors lie by the width of their elements (the widest first), then by name. The
 * manifest begins with a hash of its own text, and has of each file its size and a hash of its
 * head (the header of a safetensors file, all of the index), of each tensor a hash of its content
 * (tensor_hash.h): every byte of the folder is covered by one.
 *   {"hash": hex, "format": 1, "record": {...}, "files": [{name, bytes, head, hash}], "tensors":
 *    [{name, dtype, axes: [["embed", 768], ...], file, offset, bytes, hash}]}
 * Offsets and sizes are in bytes; offsets count from the beginning of the file. */
#ifndef ML_MANIFEST_H
#define ML_MANIFEST_H

#include "runtime/base/memory.h"
#include "runtime/graph/graph.h"

enum { ML_MANIFEST_FILE_NAME = 64 };

typedef struct {
    const char *name;
    ml_dtype dtype;
    int rank;
    const char *axis[ML_MAX_AXES];
    int64_t size[ML_MAX_AXES];
    bool model; /* a parameter: in model-*.safetensors */
    int file;   /* place in files */
    int64_t offset, bytes;
    uint64_t hash;
    uint32_t state; /* of who writes or reads it; nothing of the file */
} ml_manifest_tensor;

typedef struct {
    char name[ML_MANIFEST_FILE_NAME];
    int64_t bytes, head; /* the head's size */
    uint64_t hash;       /* of the head */
    const char *text;    /* the head, of a checkpoint that is to be written */
} ml_manifest_file;

typedef struct {
    ml_arena *arena;
    const char *record; /* JSON: an object of the writer's own */
    ml_manifest_tensor *tensors;
    int tensor_count;
    ml_manifest_file *files;
    int file_count;
    ml_index names; /* of tensors that were read */
} ml_manifest;

ml_status ml_manifest_new(ml_manifest **manifest); /* without tensors */
void ml_manifest_free(ml_manifest *manifest);      /* NULL is allowed */
/* Order the tensors (name, dtype, axes and model are given), assign their places in files of at
 * most about `limit` bytes, and make the heads of the files. */
ml_status ml_manifest_place(ml_manifest *manifest, int64_t limit);
/* The text of manifest.json, of a manifest that is placed and whose tensors have their hashes; in
 * the manifest's arena. */
ml_status ml_manifest_text(ml_manifest *manifest, const char **text);
/* Read and check that of a folder, with the sizes and heads of all its files; tensors are not read.
 * ML_IO names the file that is damaged. */
ml_status ml_manifest_read(const char *folder, ml_manifest **manifest);
/* By name; NULL where there is none. */
const ml_manifest_tensor *ml_manifest_find(const ml_manifest *manifest, const char *name);

#endif
