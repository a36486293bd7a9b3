/* The checkpoints in a folder, whole or not, and what interrupted saves left behind.
 *
 * A save writes into a folder of a temporary name, NAME.tmp-XXXXXXXXXXXXXXXX (hexadecimal), beside
 * the one that it will have. A folder is a whole checkpoint if its manifest and the sizes and heads
 * of its files are right (manifest.h); tensors are not read here. */
#ifndef ML_CHECKPOINT_LIST_H
#define ML_CHECKPOINT_LIST_H

#include "runtime/io/manifest.h"

typedef struct {
    const char *path;
    int64_t step; /* "step" of the record, else the number at the name's end; -1: neither */
    bool whole;
    const char *problem; /* of one that is not: "FILE is damaged: ..." */
} ml_checkpoint_listed;

typedef struct {
    ml_checkpoint_listed *at;
    int count;
} ml_checkpoint_listing;

/* All folders of `folder` but temporary ones, in the arena: the highest step first. A folder that
 * is not there has none. */
ml_status ml_checkpoint_folders(const char *folder, ml_arena *arena, ml_checkpoint_listing *list);
/* The temporary name of `path`; room for strlen(path) + ML_CHECKPOINT_TEMPORARY bytes. */
enum { ML_CHECKPOINT_TEMPORARY = 22 };
void ml_checkpoint_temporary(const char *path, uint64_t number, char *name);
/* Remove the temporary folders in `folder`: of `name` alone where that is not NULL. No save may be
 * under way there. */
ml_status ml_checkpoint_sweep(const char *folder, const char *name);

#endif
