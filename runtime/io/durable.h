/* Files that survive a crash of the process or of the machine.
 *
 * What is written here counts only once it has been synced and its name has been given by a rename,
 * whose folder has been synced too: before that, a crash leaves nothing or a temporary name. Every
 * operation that changes a file system is one numbered step: MLUA_FAULT_IO=N kills the process (as
 * kill -9 does) before its N-th, so that tests can crash at every place of a save. Errors are ML_IO
 * with the path and the reason (a full disk, a folder that may not be written). From any thread. */
#ifndef ML_DURABLE_H
#define ML_DURABLE_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

/* From now on the n-th operation kills the process; 0: none. Gives how many there were so far. */
int64_t ml_durable_fault(int64_t n);

ml_status ml_durable_folder(const char *path); /* make a folder; one that is there is an error */
/* Make each folder of the path that is not there yet; the ones that these lie in are synced. */
ml_status ml_durable_folders(const char *path);
/* Open a file for writing; it is made where there is none. */
ml_status ml_durable_open(const char *path, int *descriptor);
ml_status ml_durable_write(int descriptor, const char *path, int64_t offset, const void *from,
                           int64_t bytes);
ml_status ml_durable_sync(int descriptor, const char *path);
ml_status ml_durable_sync_folder(const char *path);
ml_status ml_durable_sync_parent(const char *path); /* the folder that `path` lies in */
/* A whole new file: opened, written, synced and closed. */
ml_status ml_durable_file(const char *path, const void *from, size_t bytes);
/* Give `from` the name `to`. A folder `to` that is there takes the name `from` instead, at the same
 * moment; *swapped says so. */
ml_status ml_durable_rename(const char *from, const char *to, bool *swapped);
ml_status ml_durable_unlink(const char *path);
/* A folder with the files in it (one level); one that is not there is none to remove. */
ml_status ml_durable_remove(const char *path);

#endif
