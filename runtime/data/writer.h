/* Files of tokens as other programs write them, to the bit.
 *
 * nanoGPT's .bin: u16, or u32, alone. llm.c's: 256 i32 (20240520 or 20240801, version 1 or 7,
 * tokens), then u16 or u32. Megatron's .bin and .idx: each document is one sequence. The tokens are
 * those that are added: a separator between documents is the caller's. Files have their names only
 * once they are whole: everything is written to NAME.part before. */
#ifndef ML_WRITER_H
#define ML_WRITER_H

#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct ml_writer ml_writer;
/* ML_WRITE_PART: Megatron's, but not waited for until it is on the disk. */
typedef enum { ML_WRITE_PLAIN, ML_WRITE_LLMC, ML_WRITE_MEGATRON, ML_WRITE_PART } ml_write_format;

/* `path` ends in .bin; `width` is the bytes of a token: 2 or 4 (Megatron: 1, 2 or 4). */
ml_status ml_writer_open(const char *path, ml_write_format format, int width, ml_writer **writer);
/* Append tokens to the document. One that does not fit the width is an error. */
ml_status ml_writer_add(ml_writer *writer, const uint32_t *ids, int64_t count);
ml_status ml_writer_end_document(ml_writer *writer);
/* Instead of adding, by several threads: place each document's tokens in order, `ends` after its
 * last ones, by one thread at a time; put what is placed at the `at`-th token, by any thread. Not
 * for llm.c's. */
ml_status ml_writer_place(ml_writer *writer, int64_t count, bool ends);
ml_status ml_writer_put(ml_writer *writer, int64_t at, const uint32_t *ids, int64_t count);
int64_t ml_writer_tokens(const ml_writer *writer); /* added or placed */
/* All of other files of Megatron's with that width (their .bin), in this order: done[i] are the
 * tokens before part i where all of it was put there already, else -1; the others are copied by all
 * cores. Of one file alone the .bin is taken, not copied. Not for llm.c's. */
ml_status ml_writer_join(ml_writer *writer, int count, char *const *parts, const int64_t *done);
/* Give the files their names, or, where not `keep`, remove what was written. Frees the writer. */
ml_status ml_writer_close(ml_writer *writer, bool keep);

#endif
