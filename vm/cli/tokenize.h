/* mlua tokenize: text files to token ids. */
#ifndef ML_TOKENIZE_H
#define ML_TOKENIZE_H

#include <stdbool.h>

typedef struct {
    bool json, special, quiet; /* arrays on standard output; with what is put around a text */
    const char *out;           /* OUT.bin or OUT.idx; NULL: none */
    long long train;           /* tokens of the tokenizer that is trained; 0: none */
} tokenize_options;

/* paths: the tokenizer, then files. False: ml_error_last() says why. */
bool tokenize_files(const tokenize_options *options, int count, char **paths);
/* Train a tokenizer on files, and write it to options->out. With json each merge is a line with its
 * token's bytes (as the tokenizer writes them) and its count. */
bool tokenize_train(const tokenize_options *options, int count, char **paths);

#endif
