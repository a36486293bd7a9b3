/* Sources of kernels as text: a file of codegen/kernels/cuda or codegen/kernels/c and values of its
 * parameters.
 *
 * A file is valid CUDA or C by itself. Between #ifndef MLUA_EMBEDDED and its #endif are examples,
 * for editors and for compiling the file alone: #include of the prelude, and a #define for each
 * parameter, which declares it. Other #includes name files of the same folder, pasted once each.
 *
 * The text of a kernel is a #define of each declared parameter, the files without their examples,
 * with #line before each part, and an #undef of all that was defined, as several kernels may share
 * a translation unit. CUDA is in a namespace of its own; C makes names at file scope unique by NAME
 * (prelude.h). The kernel itself is called ENTRY, which the text does not define: the text is a
 * function of the file and the values alone. */
#ifndef ML_FILES_H
#define ML_FILES_H

#include "codegen/kernel_files.h"
#include "runtime/base/memory.h"

/* `name` may have arguments: "ROW(i)". Lines of `value` are joined as those of one macro. */
typedef struct {
    const char *name, *value;
} ml_parameter;

/* A file with the parameters that it declares: all that its text is printed from. */
typedef struct {
    const ml_kernel_file *file;
    uint64_t key;
    uint32_t count;
    const ml_parameter *parameters;
} ml_file_recipe;

/* Of several values of a parameter the last one counts; `values` are copied. Raises ML_INTERNAL
 * where one that the file declares has none. */
const ml_file_recipe *files_choose(ml_arena *arena, const char *file, const ml_parameter *values,
                                   uint32_t count);
char *files_print(const ml_file_recipe *recipe, const char *entry, ml_arena *arena);

#endif
