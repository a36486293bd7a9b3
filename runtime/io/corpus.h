/* A corpus: a stream of tokens in a file or in memory, from which windows are drawn.
 *
 * A file of text gives its bytes as tokens; a file of u16 tokens (little endian, no header) gives
 * them. Files are mapped, never read whole. Drawing is a function of (seed, sample number) alone,
 * so that the order of the data does not depend on batch layout, accumulation or ranks. */
#ifndef ML_CORPUS_H
#define ML_CORPUS_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct ml_corpus ml_corpus;

/* token_bytes is 1 or 2. */
ml_status ml_corpus_open(const char *path, int token_bytes, ml_corpus **corpus);
/* Bytes of text; `data` must outlive the corpus. `name` is for messages. */
ml_status ml_corpus_from_memory(const char *name, const void *data, size_t size,
                                ml_corpus **corpus);
void ml_corpus_close(ml_corpus *corpus);
int64_t ml_corpus_tokens(const ml_corpus *corpus);
const char *ml_corpus_name(const ml_corpus *corpus);
int ml_corpus_token_bytes(const ml_corpus *corpus);

typedef struct {
    int64_t seed;
    int64_t first, last; /* tokens [first, last) are drawn from */
    int64_t vocab;       /* a token of at least this is an error; 0: any goes */
} ml_corpus_range;

/* Draw samples [sample, sample + rows) of `length` tokens: inputs[row][i] and the tokens after
 * them, targets[row][i]. A window is length + 1 tokens that begin anywhere in the range. */
ml_status ml_corpus_fill(const ml_corpus *corpus, const ml_corpus_range *range, int64_t sample,
                         int64_t rows, int64_t length, int32_t *inputs, int32_t *targets);

#endif
