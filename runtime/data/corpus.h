/* A corpus: tokens in files, of which samples are drawn in an order that nothing changes.
 *
 * A specification names sources of files (spec.h has the forms) with weights. The files of a source
 * are one stream of tokens. A sample is a window of length + 1 tokens of one source. Which one
 * sample i is depends on (seed, i, length) and the files alone: not on the batch, accumulation,
 * ranks or what was drawn before (order.h). Text is tokenized once, into a cache; without a
 * tokenizer its bytes are its tokens. Only windows that are drawn are read; any number of threads
 * may read. */
#ifndef ML_CORPUS_H
#define ML_CORPUS_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/text/tokenizer.h"

typedef struct ml_corpus ml_corpus;

typedef enum {
    ML_CORPUS_BY_NAME, /* by suffix and content; what is no known format is refused */
    ML_CORPUS_BYTES,   /* whatever the file holds */
    ML_CORPUS_U16,
    ML_CORPUS_U32,
} ml_corpus_kind;

/* `tokenizer` (NULL: text is bytes) belongs to the corpus from now on, also where this fails. */
ml_status ml_corpus_open(const char *spec, ml_corpus_kind kind, ml_tokenizer *tokenizer,
                         ml_corpus **corpus);
/* Bytes of text; `data` must outlive the corpus. `name` is for messages. */
ml_status ml_corpus_from_memory(const char *name, const void *data, size_t size,
                                ml_corpus **corpus);
/* Of files by their names; fails where tokens of text would have to be made first. */
ml_status ml_corpus_open_made(const char *spec, ml_tokenizer *tokenizer, ml_corpus **corpus);
void ml_corpus_close(ml_corpus *corpus);
int64_t ml_corpus_tokens(const ml_corpus *corpus);
/* Files' documents where an index or lines count them, else a document a file. */
int64_t ml_corpus_documents(const ml_corpus *corpus);
const char *ml_corpus_name(const ml_corpus *corpus);              /* the specification */
const ml_tokenizer *ml_corpus_tokenizer(const ml_corpus *corpus); /* NULL: none */
bool ml_corpus_is_bytes(const ml_corpus *corpus);                 /* every token is a byte */

/* Append what says whether other files give the same samples, as JSON: {"sources": [{"weight",
 * "files": [{"name", "tokens", "bytes", "hash"}]}], "tokenizer"}. Folders are not in it; the hash
 * is of some blocks of the tokens. */
ml_status ml_corpus_identity(const ml_corpus *corpus, ml_bytes *text);

typedef struct {
    int64_t seed;
    double from, to; /* shares: of each source's tokens, [from, to) are drawn from */
    int64_t vocab;   /* a token of at least this is an error; 0: any is valid */
} ml_corpus_range;

/* Whether each source has a window, also one that is seldom drawn. */
ml_status ml_corpus_check(const ml_corpus *corpus, const ml_corpus_range *range, int64_t length);
/* The length + 1 tokens of a sample. Unless `begins` is NULL, begins[i] becomes 1 where tokens[i]
 * is the first one of a document, else 0; it has room for length + 2 bytes. */
ml_status ml_corpus_sample(const ml_corpus *corpus, const ml_corpus_range *range, int64_t sample,
                           int64_t length, int32_t *tokens, unsigned char *begins);
/* Tokens [first, first + count) of all files in the order of the specification. */
ml_status ml_corpus_read(const ml_corpus *corpus, int64_t first, int64_t count, int32_t *tokens);
/* The first file whose documents are not known: tokens without marks. NULL: all are. */
const char *ml_corpus_unmarked(const ml_corpus *corpus);

/* Rows [rows][length]: inputs, and the tokens after them, targets. Unless documents is NULL, also
 * the number of each input's document in the row and its position in that, both from 0; the target
 * of a document's last token is then -1. */
typedef struct {
    int32_t *inputs, *targets, *documents, *positions;
} ml_batch;
void ml_batch_put(const ml_batch *batch, int64_t row, int64_t length, const int32_t *tokens,
                  const unsigned char *begins);
/* Samples [sample, sample + rows) to the rows from `first`. */
ml_status ml_corpus_fill(const ml_corpus *corpus, const ml_corpus_range *range, int64_t sample,
                         int64_t rows, int64_t length, int64_t first, const ml_batch *batch);

#endif
