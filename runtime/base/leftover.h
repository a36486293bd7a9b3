/* What processes that died (SIGKILL, a crash) left behind, found by its names, which say which
 * process of which machine created it. */
#ifndef ML_LEFTOVER_H
#define ML_LEFTOVER_H

#include <stdbool.h>

enum { ML_LEFTOVER_TAG = 48 };

/* "MACHINE-PID-TIME" of this process. MACHINE is a hash of the machine as booted, its name and the
 * namespace that process numbers are of: hosts and containers may share a folder. */
void ml_leftover_tag(char tag[ML_LEFTOVER_TAG]);
/* Whether a name that begins with a tag is of a process of this machine that is dead. */
bool ml_leftover_is_dead(const char *name);
/* Remove this user's folders in `path` whose name is `prefix`, a dead process's tag, and more, with
 * the files in them: at most 64 folders, of 4096 files each. */
void ml_leftover_remove_folders(const char *path, const char *prefix);

#endif
