/* The documents of text files as token ids, in their order, or their words counted; by all cores.
 * Used by the room and by `mlua tokenize`. */
#ifndef ML_DATA_ENCODE_H
#define ML_DATA_ENCODE_H

#include "runtime/text/tokenizer.h"
#include "runtime/text/train.h"

/* Files have the numbers of their order. begin, sink, leave and progress are called by one thread
 * at a time, in the files' order; finish, write and end by any thread, several at once. All but
 * sink may be NULL. `ends`: the ids end their document (text.h). */
typedef struct {
    const ml_tokenizer *tokenizer; /* NULL: words are counted, and there is no sink */
    int flags;                     /* of ml_encoder_encode */
    ml_status (*begin)(void *context, int file);
    /* The document's ids are those from `first` on; may append more. */
    ml_status (*finish)(void *context, ml_ids *ids, int64_t first, bool ends);
    ml_status (*sink)(void *context, const uint32_t *ids, int64_t count, bool ends);
    ml_status (*leave)(void *context, int file); /* after its last document */
    /* Ids of one file, of documents that the sink was given: `at` of its ids come before them. */
    ml_status (*write)(void *context, int file, int64_t at, const uint32_t *ids, int64_t count);
    ml_status (*end)(void *context, int file);      /* all is written; not where reading failed */
    void (*progress)(void *context, int64_t bytes); /* after some bytes of a file's text */
    void *context;
} encode_options;

typedef struct encoding encoding;
ml_status encode_open(const encode_options *options, encoding **e);
void encode_close(encoding *e); /* NULL is allowed */
/* All of them, those before one that cannot be read too. */
ml_status encode_files(encoding *e, int count, char *const *paths);
ml_status encode_words(encoding *e, const ml_words **words); /* of all files; last before closing */

#endif
