/* The documents of text files as token ids, in their order, or their words counted; by all cores.
 * Used by the room and by `mlua tokenize`. */
#ifndef ML_DATA_ENCODE_H
#define ML_DATA_ENCODE_H

#include "runtime/text/tokenizer.h"
#include "runtime/text/train.h"

enum { ENCODE_SPARE = 2 };

typedef struct {
    const ml_tokenizer *tokenizer; /* NULL: words are counted, and there is no sink */
    int flags;                     /* of ml_encoder_encode */
    /* `ends`: the ids end their document (text.h). May append ENCODE_SPARE ids. Called by one
     * thread at a time, in the file's order, and not by the caller's. */
    ml_status (*sink)(void *context, ml_ids *ids, bool ends);
    void (*progress)(void *context, int64_t bytes); /* NULL, or likewise after bytes of the file */
    void *context;
} encode_options;

typedef struct encoding encoding;
ml_status encode_open(const encode_options *options, encoding **e);
void encode_close(encoding *e); /* NULL is allowed */
ml_status encode_file(encoding *e, const char *path);
ml_status encode_words(encoding *e, const ml_words **words); /* of all files; last before closing */

#endif
