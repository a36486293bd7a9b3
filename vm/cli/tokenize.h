/* mlua tokenize: text files to token ids. */
#ifndef ML_TOKENIZE_H
#define ML_TOKENIZE_H

#include <stdbool.h>

typedef struct {
    bool json, special, quiet; /* arrays on standard output; with what is put around a text */
    const char *out;           /* OUT.bin or OUT.idx; NULL: none */
} tokenize_options;

/* paths: the tokenizer, then files. False: ml_error_last() says why. */
bool tokenize_files(const tokenize_options *options, int count, char **paths);

#endif
