/* Files inside the binary: every file of stdlib, the page of `mlua show --html` (report.html) and
 * the default corpus (corpus.txt). The Makefile
 * writes the table; names have no folder, and a row whose name is NULL ends it. Bytes are not
 * terminated. */
#ifndef ML_EMBED_H
#define ML_EMBED_H

#include <stddef.h>

typedef struct {
    const char *name;
    const char *data;
    size_t size;
} ml_embedded;
extern const ml_embedded ml_embedded_files[];

/* Every file of models/, by its path: "models/llama.lua". */
extern const ml_embedded ml_model_files[];

const ml_embedded *embed_find(const char *name); /* NULL where there is none */

#endif
