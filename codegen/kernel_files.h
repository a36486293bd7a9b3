/* The sources of kernels inside the binary: every file of codegen/kernels/cuda and
 * codegen/kernels/c. The Makefile writes the table; names are paths in the repository, texts end in
 * a 0 byte, and a row whose name is NULL ends it. */
#ifndef ML_KERNEL_FILES_H
#define ML_KERNEL_FILES_H

#include <stddef.h>

typedef struct {
    const char *name, *text;
    size_t size; /* without the 0 byte */
} ml_kernel_file;
extern const ml_kernel_file ml_kernel_files[];

/* By the last part of its path, such as "cumsum.cu", of `length` bytes. Raises ML_INTERNAL. */
const ml_kernel_file *ml_kernel_file_find(const char *name, size_t length);

#endif
