/* A corpus: a stream of tokens in a file or in memory, from which windows are drawn.
 *
 * A file of text, or of any bytes, gives its bytes as tokens; a file of u16 tokens (little endian,
 * no header) gives them. Only the windows that are drawn are read. Drawing is a function of (seed,
 * sample number) alone, so that the order of the data does not depend on batch layout, accumulation
 * or ranks. */
#ifndef ML_CORPUS_H
#define ML_CORPUS_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct ml_corpus ml_corpus;

typedef enum {
    ML_CORPUS_BY_NAME, /* u16 tokens where it ends in .bin, else text; what is neither is refused */
    ML_CORPUS_BYTES,   /* whatever the file holds */
    ML_CORPUS_U16,
} ml_corpus_kind;

ml_status ml_corpus_open(const char *path, ml_corpus_kind kind, ml_corpus **corpus);
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
    int64_t vocab;       /* a token of at least this is an error; 0: any is valid */
} ml_corpus_range;

/* Draw samples [sample, sample + rows) of `length` tokens: inputs[row][i] and the tokens after
 * them, targets[row][i]. A window is length + 1 tokens that begin anywhere in the range. */
ml_status ml_corpus_fill(const ml_corpus *corpus, const ml_corpus_range *range, int64_t sample,
                         int64_t rows, int64_t length, int32_t *inputs, int32_t *targets);

#endif
