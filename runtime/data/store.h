/* A file of stored tokens, of which ranges are read; internal to the room.
 *
 * Formats: text or any bytes (a token a byte); u16 or u32 tokens without a header (nanoGPT);
 * llm.c's .bin with its header of 1,024 bytes; Megatron's .bin with an .idx beside it;
 * one-dimensional .npy arrays of integers. Opening reads headers, samples of the content and, of an
 * .idx, a few entries all over it: never the whole. Nothing of a file is trusted. */
#ifndef ML_DATA_STORE_H
#define ML_DATA_STORE_H

#include "runtime/io/file.h"

typedef enum {
    STORE_BY_NAME, /* by suffix and content; what is no known format is refused */
    STORE_BYTES,   /* whatever the file holds */
    STORE_U16,
    STORE_U32,
} store_kind;

typedef struct {
    const char *origin; /* the text file whose tokens these are; NULL: itself */
    ml_file file;
    const unsigned char *memory; /* instead of the file; somebody else's */
    bool reopen;                 /* the files are opened for each read: too many are open */
    int64_t separator;           /* the token between documents; -1: none is known */
    bool separator_first;        /* it is a document's first token, not its last */
    int width;                   /* bytes of a token: 1, 2, 4 or 8 */
    int64_t begin, tokens;       /* byte of the first token; their number */
    ml_file index;               /* .idx; descriptor -1: none */
    int64_t sequences, documents;
    int64_t lengths, pointers; /* bytes of the index where they begin */
} store;

/* Closed again where that fails. `look`: check the content by samples all over the file. */
ml_status store_open(const char *path, store_kind kind, bool look, store *s);
void store_close(store *s);
/* Tokens [first, first + count), which must be among those of the store. */
ml_status store_read(const store *s, int64_t first, int64_t count, int32_t *tokens);
/* begins[i] = 1 where token first + i is the first one of a document, of all `count` + 1 elements
 * that follow the tokens [first, first + count), which are at `tokens`: by the index, or by the
 * separator; a store with neither is one document. */
ml_status store_mark(const store *s, int64_t first, int64_t count, const int32_t *tokens,
                     unsigned char *begins);

bool store_ends_in(const char *path, const char *suffix);

#endif
