/* The documents of text files as token ids, in their order, or their words counted; by all cores.
 * Used by the room and by `mlua tokenize`. */
#ifndef ML_DATA_ENCODE_H
#define ML_DATA_ENCODE_H

#include "runtime/text/tokenizer.h"
#include "runtime/text/train.h"

enum { ENCODE_SPARE = 2 };

/* The calls are those of one thread at a time, which is not the caller's, in the files' order. */
typedef struct {
    const ml_tokenizer *tokenizer; /* NULL: words are counted, and there is no sink */
    int flags;                     /* of ml_encoder_encode */
    /* `ends`: the ids end their document (text.h). May append ENCODE_SPARE ids. */
    ml_status (*sink)(void *context, ml_ids *ids, bool ends);
    /* NULL, or around the documents of the file of that number; no end where reading it failed. */
    ml_status (*begin)(void *context, int file), (*end)(void *context, int file);
    void (*progress)(void *context, int64_t bytes); /* NULL, or after some bytes of a file's text */
    void *context;
} encode_options;

typedef struct encoding encoding;
ml_status encode_open(const encode_options *options, encoding **e);
void encode_close(encoding *e); /* NULL is allowed */
/* All of them, those before one that cannot be read too. */
ml_status encode_files(encoding *e, int count, char *const *paths);
ml_status encode_words(encoding *e, const ml_words **words); /* of all files; last before closing */

#endif
