/* Inside the kernel cache: files beside its entries.
 *
 * Every entry ends with a mark and a hash of what comes before it, so that a file that a crash or
 * a full disk cut short is detected and written again. */
#ifndef ML_CACHE_H
#define ML_CACHE_H

#include "codegen/jit/jit.h"

extern ml_jit_options cache_options; /* set by ml_jit_set_options */
/* The folder for the source of what does not compile. */
const char *cache_failed_folder(void);

/* A name for a new file in the cache's folder, unlike any other of this process or another. */
ml_status cache_temporary(const char *suffix, char *out, int size);
/* The cache's folder `failed` takes no files, for `reason`: it is created again where it was
 * deleted; else a temporary folder takes its place, which is announced on stderr. ML_IO where none
 * can be created, with each folder that was tried. Nothing to do where another thread replaced it
 * already. */
ml_status cache_replace_folder(const char *failed, const char *reason);
bool cache_folder_takes_files(const char *path); /* some 64 KiB; errno says why not */
/* The folder before a temporary one; "" where there was none. */
void cache_former_folder(char *out, int size);
void cache_remove_folder(const char *path);                     /* with the files in it */
bool cache_write_all(int file, const char *from, int64_t size); /* errno says why not */
bool cache_make_folders(const char *path); /* with its parents; errno says why not */
/* A whole file as a heap block, terminated; ML_IO where it cannot be read. */
ml_status cache_read_file(const char *path, void **bytes, int64_t *size);
/* Save source text where people find it: in folder `folder` (created if need be; relative ones are
 * in the cache). Writes the path to out. */
ml_status cache_save_source(const char *folder, const char *name, const char *prelude,
                            const char *const *sources, int count, char *out, int size);
/* same[i] is the first kernel with kernel i's key. */
void cache_find_same(ml_kernel *const *kernels, int count, ml_arena *arena, int *same);

#endif
