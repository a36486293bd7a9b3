/* What `data` names: sources of files, each with a weight; internal to the room.
 *
 *     books.txt                      a file
 *     books/                         every data file in a folder, by name
 *     PATTERN                        those that it names, as the shell has it
 *     set                            Megatron's set.bin and set.idx
 *     a.bin,b.bin                    one source of several files
 *     PATTERN:0.7,code.bin:0.3       sources by weight */
#ifndef ML_DATA_SPEC_H
#define ML_DATA_SPEC_H

#include "runtime/base/memory.h"

typedef struct {
    const char *text; /* the part of the specification that names it */
    double weight;
    ML_VEC(const char *) files;
} spec_source;
typedef ML_VEC(spec_source) spec;

void spec_parse(ml_arena *arena, const char *text, spec *result); /* raises */

#endif
