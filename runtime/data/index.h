/* Megatron's .idx beside a .bin; internal to the room. */
#ifndef ML_DATA_INDEX_H
#define ML_DATA_INDEX_H

#include "runtime/data/store.h"

/* Of a store whose file is open: sets width, tokens, sequences, documents. */
ml_status index_open(const char *path, store *s);
ml_status index_mark(const store *s, int64_t at, int64_t count, unsigned char *begins);

#endif
