/* The documents of a text file as token ids, in their order; encoded by all cores. Internal to the
 * room. */
#ifndef ML_DATA_ENCODE_H
#define ML_DATA_ENCODE_H

#include "runtime/text/tokenizer.h"

/* `ends`: the ids end their document (text.h). The sink may append to ids. */
typedef ml_status encode_sink(void *context, ml_ids *ids, bool ends);
ml_status encode_file(const char *path, const ml_tokenizer *tokenizer, encode_sink *sink,
                      void *context);

#endif
