/* What control groups (versions 1 and 2) grant this process: a container's limits. Its own group
 * and all above it, as far as they are mounted, may set limits; the smallest holds. */
#ifndef ML_CGROUP_H
#define ML_CGROUP_H

#include <stdint.h>

/* Files are read below `root`, "" for the system's own (tests have others). 0: no limit. */
int64_t ml_cgroup_memory(const char *root); /* bytes */
/* Physical memory, or what the container may use of it: bytes; 0: unknown. */
int64_t ml_memory_here(void);
int ml_cgroup_cores(const char *root);      /* cores' worth of time, rounded up */

#endif
