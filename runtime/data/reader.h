/* Batches of a corpus, read ahead by threads.
 *
 * Batch b is samples [skip + b * rows, ...) of `length` tokens, of which only [first, first +
 * count) are read: those of this rank. Threads keep the next DEPTH batches in memory, so that
 * asking for batches in their order waits for no file; any other batch may be asked for and is read
 * anew. What fails is reported when its batch is asked for. One thread asks at a time. */
#ifndef ML_READER_H
#define ML_READER_H

#include "runtime/data/corpus.h"

typedef struct ml_reader ml_reader;
typedef struct {
    ml_corpus_range range;
    int64_t skip, rows, first, count, length;
    bool documents; /* batches have documents and positions */
} ml_reader_plan;

/* The corpus must outlive the reader. */
ml_status ml_reader_open(const ml_corpus *corpus, const ml_reader_plan *plan, ml_reader **reader);
void ml_reader_close(ml_reader *reader); /* waits for reads that have begun */
bool ml_reader_is(const ml_reader *reader, const ml_reader_plan *plan);
/* Rows [first, first + count) of a batch; other rows stay as they are. */
ml_status ml_reader_fill(ml_reader *reader, int64_t batch, const ml_batch *to);

#endif
