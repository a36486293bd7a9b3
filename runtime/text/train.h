/* Training of byte-level BPE: the pieces of a text are counted, then the most frequent pair of
 * neighbours becomes a token, again and again. The result depends on the counts alone, not on the
 * order of texts or threads: of pairs of one count the one of the least ids is taken. */
#ifndef ML_TRAIN_H
#define ML_TRAIN_H

#include "runtime/text/buffer.h"

/* Pieces (as Llama 3's pattern parts text) and how often each was seen; each thread has its own. */
typedef struct ml_words ml_words;
ml_status ml_words_open(ml_words **words);
void ml_words_close(ml_words *words);
ml_status ml_words_add(ml_words *words, const char *text, size_t bytes);
ml_status ml_words_merge(ml_words *words, const ml_words *more);
int64_t ml_words_count(const ml_words *words); /* different ones */

/* A merge: the text of its token, and how often its pair was seen when it was merged. */
typedef ml_status ml_train_sink(void *context, const char *token, size_t bytes, int64_t count);

/* Append a tokenizer.json of at most `vocab` tokens: 256 bytes, merges of pairs that were seen at
 * least twice, "<|endoftext|>". *made is how many there are. */
ml_status ml_train(const ml_words *words, int64_t vocab, ml_train_sink *sink, void *context,
                   ml_bytes *json, int64_t *made);

#endif
