/* The environment knobs MLUA_*, read once. One table says what each does (KNOBS in knobs.c), which
 * `mlua help environment` prints. */
#ifndef ML_KNOBS_H
#define ML_KNOBS_H

#include <stdbool.h>
#include <stdint.h>

enum { ML_BLAS_FASTER = 2 };

/* What each means is in KNOBS; -1: not set, where 0 has a meaning of its own. */
typedef struct {
    int debug;
    const char *dump;
    bool times;
    bool verify;
    const char *check;
    bool no_fuse;
    const char *keep;
    int64_t out_of_memory; /* MLUA_OOM */
    const char *cache;
    int compilers; /* 0: one for each CPU thread */
    bool tune, cudnn, deterministic;
    int wgmma;
    bool tma, early;
    int blas;
    int recompute;
    int chunk; /* MiB */
    bool param_cache, batch, fold;
    int overlap, halves, graphs;
    int host_link; /* GB/s */
    int peer, hosts, timeout; /* timeout: s; 0: the default */
    const char *bind, *secret;
    int threads; /* 0: all cores */
    int64_t fault_io;
    int runs;
} ml_knobs_values;

const ml_knobs_values *ml_knobs(void);
/* What a row of a product is does not depend on the other rows or on its place, nor on what was
 * timed: from now on as with MLUA_TUNE=0 MLUA_BLAS=0. Before a device is opened. */
void ml_knobs_fix_rows(void);
/* Name, value syntax and meaning of knob i; false past the last. */
bool ml_knob_describe(int i, const char **name, const char **syntax, const char **meaning);
/* Whether MLUA_DEBUG >= level; and print to stderr where it is. */
bool ml_debug_on(int level);
void ml_debug(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* With MLUA_TIMES: a part of the compiler has ended. Prints its name, the processor time of the
 * process since the part before ended, and its memory now. */
void ml_time_part(const char *name);

#endif
