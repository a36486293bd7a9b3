/* The documents of a text file, one after another; internal to the room.
 *
 * A .txt file is one document; each line of a .jsonl file is one: an object with the string `text`,
 * or with `messages`, a list of {role, content}, which become <|im_start|>ROLE\nCONTENT<|im_end|>\n
 * each. Either may end in .gz or .zst. A file is read in order; what a line holds, any thread can
 * say. */
#ifndef ML_DATA_TEXT_H
#define ML_DATA_TEXT_H

#include "runtime/text/buffer.h"

/* Where bytes stand: in line `line` (from 1), whose first byte is `offset` of the file's text. */
typedef struct {
    const char *path;
    int64_t line, offset;
    bool json; /* they are a line of a .jsonl file */
    bool ends; /* they end their document; of a .txt file beyond 256 MiB the parts do not */
} text_place;

typedef ml_status text_sink(void *context, text_place place, const char *bytes, size_t count);
ml_status text_read(const char *path, text_sink *sink, void *context);
/* The document of bytes that text_read gave, in them or in `held`; NULL: the line is blank. */
ml_status text_of(text_place place, const char *bytes, size_t count, ml_bytes *held,
                  const char **text, size_t *length);

bool text_is_name(const char *path);  /* .txt, .jsonl, or these with .gz, .zst */
bool text_is_plain(const char *path); /* neither compressed nor .jsonl: its bytes are its text */

#endif
