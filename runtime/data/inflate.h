/* A file's bytes from its beginning, decompressed where it is called .gz or .zst; internal to the
 * room. Several compressed parts one after another are one stream, as gzip -dc has it. */
#ifndef ML_DATA_INFLATE_H
#define ML_DATA_INFLATE_H

#include <stddef.h>

#include "runtime/base/status.h"

typedef struct inflater inflater;

ml_status inflate_open(const char *path, inflater **result);
/* Up to `room` bytes; *got = 0 is the end. Damage is an error with the file's name and the offset
 * in the compressed file. */
ml_status inflate_read(inflater *in, char *to, size_t room, size_t *got);
void inflate_close(inflater *in);

#endif
