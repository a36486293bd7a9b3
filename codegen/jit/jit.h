/* Kernel sources to machine code, through a cache on disk.
 *
 * The cache is the folder of ml_jit_options, else $XDG_CACHE_HOME/mlua, else ~/.cache/mlua: created
 * with mode 0700, refused where another user owns it. An entry's name is a hash of prelude, source,
 * flags, architecture and compiler version; it is written under a temporary name and renamed.
 * Entries that were not used for 90 days are removed. */
#ifndef ML_JIT_H
#define ML_JIT_H

#include "codegen/kernel.h"
#include "runtime/base/pool.h"

/* What the user asks of the process's compilers; the strings are borrowed for its life. It is set
 * where the environment is read (runtime/device/device.c), before anything is compiled: the cache's
 * folder is chosen at its first use. Without it all are absent. */
typedef struct {
    const char *keep;  /* the folder that saves the sources of kernels; NULL or "": none */
    const char *cache; /* the cache's folder; NULL or "": the user's */
    int compilers;     /* C compilers that run at once; 0: one for each thread of the pool */
} ml_jit_options;
void ml_jit_set_options(const ml_jit_options *options);

/* Compile with the system C compiler ($CC, else cc) for this machine's instruction set. Distinct
 * sources are compiled once, several at a time on `pool`. functions[i] belongs to kernels[i].
 * Fails with ML_COMPILE, naming the saved source and the compiler's first error line, or with
 * ML_DEVICE and help where there is no C compiler. */
typedef void ml_c_function(char *const *p, const long long *s, long long begin, long long end);
typedef struct ml_jit_c ml_jit_c; /* owns the loaded objects */
ml_status ml_jit_c_load(ml_kernel *const *kernels, int count, ml_pool *pool, ml_jit_c **jit,
                        ml_c_function **functions);
void ml_jit_c_free(ml_jit_c *jit);
/* "gcc 12.2.0 (/usr/bin/cc)" for `mlua doctor`; ML_DEVICE where there is none. */
ml_status ml_jit_c_describe(char *out, int size);

/* Compile with NVRTC to cubins: images[i], sizes[i] belong to kernels[i] and live in *arena (heap
 * blocks that ml_jit_cuda_free frees). NVRTC is opened on first use. */
typedef struct ml_jit_cuda ml_jit_cuda;
ml_status ml_jit_cuda_compile(ml_kernel *const *kernels, int count, int arch, ml_pool *pool,
                              ml_jit_cuda **jit, const void **images, int64_t *sizes);
/* This process is one of several of this host that compile the same kernels, numbered from 0: each
 * begins with its own part of them, and finds in the cache what others have compiled by then. */
void ml_jit_cuda_share(int process, int processes);
void ml_jit_cuda_free(ml_jit_cuda *jit);
ml_status ml_jit_cuda_describe(char *out, int size); /* "NVRTC 13.0" */

/* Schedule and source where they are asked for: MLUA_DEBUG=4 prints them, the option `keep`
 * saves the source. Raises. */
void ml_jit_show(const ml_kernel *kernel, ml_target_kind kind, ml_arena *arena);

/* The cache itself (cache.c). */
ml_status ml_cache_path(char *out, int size); /* makes the folder */
/* A heap block; ML_IO where the entry is absent or damaged. */
ml_status ml_cache_read(uint64_t key[2], const char *suffix, void **bytes, int64_t *size);
ml_status ml_cache_write(uint64_t key[2], const char *suffix, const void *bytes, int64_t size);
/* The same of what timing has chosen (choices.c): a run's folder, if one is named (NULL: none), is
 * read first and gets a copy. A record begins with a word that says what it is: reading fills in
 * one of this size that begins so, and is false where there is none. */
ml_status ml_choices_keep(const char *folder);
bool ml_choice_read(uint64_t key[2], const char *suffix, void *record, int64_t size);
ml_status ml_choice_write(uint64_t key[2], const char *suffix, const void *bytes, int64_t size);
/* Its path: where it is, else where it would be written. */
ml_status ml_cache_file(uint64_t key[2], const char *suffix, char *out, int size);

#endif
