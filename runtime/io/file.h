/* Data files: regular files that are read by ranges of bytes.
 *
 * Only regular files are opened: a pipe, a socket or a device would block, or has no size; opening
 * one never waits. A read gives all of its bytes or fails with the file's name, the offset and the
 * reason. Files are not mapped, so that a file which another process shortens is an error and not a
 * SIGBUS. The size is that at the opening: what is appended later is not seen. Reads have no common
 * position, and several threads may read one file. */
#ifndef ML_FILE_H
#define ML_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct {
    char *path;
    int descriptor; /* -1: none is open */
    int64_t bytes;
} ml_file;

enum { ML_FILE_HEAD = 16 }; /* bytes by which a format is recognised */

/* *file is closed again where that fails. */
ml_status ml_file_open(const char *path, ml_file *file);
void ml_file_close(ml_file *file); /* also of a zeroed one that was never opened */
/* A range that will be read soon: the system may read it ahead. */
void ml_file_announce(const ml_file *file, int64_t offset, int64_t bytes);
ml_status ml_file_read(const ml_file *file, int64_t offset, void *to, int64_t bytes);

/* What a file is by its first bytes, where that is a known binary format: "a NumPy array (.npy)",
 * and how to make tokens of it (NULL where there is nothing to say); else NULL. */
typedef struct {
    const char *what, *help;
} ml_file_kind;
const ml_file_kind *ml_file_kind_of(const unsigned char head[ML_FILE_HEAD], int64_t bytes);

#endif
