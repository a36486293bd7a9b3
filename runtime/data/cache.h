/* The tokens of text files, made once: a Megatron .bin with its .idx for each file, in the folder
 * tokens/ of $MLUA_CACHE, $XDG_CACHE_HOME/mlua or ~/.cache/mlua; internal to the room.
 *
 * An entry is named by the file (its path, size and time) and the tokenizer's hash. Processes that
 * want the same one wait for each other; what is there is whole. A document ends with the
 * tokenizer's eos, with a line end where tokens are bytes. */
#ifndef ML_DATA_CACHE_H
#define ML_DATA_CACHE_H

#include <stddef.h>

#include "runtime/text/tokenizer.h"

/* Write the path of the .bin to out; the second fails where it is not made yet. */
ml_status cache_tokens(const char *path, const ml_tokenizer *tokenizer, char *out, size_t size);
ml_status cache_find(const char *path, const ml_tokenizer *tokenizer, char *out, size_t size);

#endif
