/* The documents of a text file, one after another; internal to the room.
 *
 * A .txt file is one document; each line of a .jsonl file is one: an object with the string `text`,
 * or with `messages`, a list of {role, content}, which become <|im_start|>ROLE\nCONTENT<|im_end|>\n
 * each. Either may end in .gz or .zst. */
#ifndef ML_DATA_TEXT_H
#define ML_DATA_TEXT_H

#include <stddef.h>

#include "runtime/base/status.h"

/* `ends`: the text ends its document; of a .txt file beyond 256 MiB the parts do not. */
typedef ml_status text_sink(void *context, const char *text, size_t bytes, bool ends);

ml_status text_read(const char *path, text_sink *sink, void *context);
bool text_is_name(const char *path);  /* .txt, .jsonl, or these with .gz, .zst */
bool text_is_plain(const char *path); /* neither compressed nor .jsonl: its bytes are its text */

#endif
