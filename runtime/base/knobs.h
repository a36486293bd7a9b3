/* The environment knobs, read once. One table (KNOBS in knobs.c) feeds `mlua --help`. */
#ifndef ML_KNOBS_H
#define ML_KNOBS_H

#include <stdbool.h>
#include <stdint.h>

enum { ML_BLAS_FASTER = 2, ML_RECOMPUTE_THRIFTY = 2 };
typedef struct {
    int debug;             /* MLUA_DEBUG=0..5: device and choices, steps with times, plans with
                              kernel IR, schedules and sources of kernels, passes */
    const char *dump;      /* MLUA_DUMP=pass[@name]: print the graph after a pass */
    bool verify;           /* MLUA_VERIFY=1: verify the graph after every pass */
    const char *check;     /* MLUA_CHECK=cpu: run every kernel on the CPU too and compare */
    bool no_fuse;          /* MLUA_NOFUSE=1: one kernel for each op */
    const char *keep;      /* MLUA_KEEP=dir: keep the sources of generated kernels there */
    int64_t out_of_memory; /* MLUA_OOM=n: the n-th allocation fails; 0 is never */
    const char *cache;     /* MLUA_CACHE=dir: the kernel cache's folder */
    bool tune;             /* MLUA_TUNE=0: what libraries propose first; nothing is timed */
    bool cudnn;            /* MLUA_CUDNN=0: attention runs on our own kernels on the GPU */
    bool deterministic;    /* MLUA_DETERMINISTIC=0: cuDNN's attention may add up in any order */
    int wgmma;             /* MLUA_WGMMA=0: no attention on warpgroup products; N: their tiles */
    bool tma;              /* MLUA_TMA=0: products by groups without the copy engine */
    int blas;              /* MLUA_BLAS=0: products on the CPU by our own kernels; 1: by a BLAS */
    int recompute;         /* MLUA_RECOMPUTE=1: recompute activations whatever the time; 0: none */
    int chunk;             /* MLUA_CHUNK=MiB: logits beyond this are computed in chunks; 0: never */
    bool copies;           /* MLUA_COPIES=0: no copies of parameters outlive a step */
    bool batch;            /* MLUA_BATCH=0: every kernel has a launch of its own */
    int overlap;           /* MLUA_OVERLAP=0|1: collectives beside other work; -1: on GPUs */
    int halves;            /* MLUA_HALVES=0|1: halves of the batch take turns; -1: where it pays */
    int peer;              /* MLUA_PEER=n: GPUs copy between their memories; 0: NCCL does */
    int hosts;             /* MLUA_HOSTS=n: ranks of one host take themselves for those of n */
    int timeout;           /* MLUA_TIMEOUT=s: seconds until a silent rank is given up; 0: default */
    const char *bind;      /* MLUA_BIND=address: where rank 0's rendezvous listens */
    const char *secret;    /* MLUA_SECRET: what ranks prove to each other that they know */
    int threads;           /* MLUA_THREADS=n: CPU threads; 0 is all cores */
    int64_t fault_io;      /* MLUA_FAULT_IO=n: a save ends the process before file operation n */
    int runs;              /* MLUA_RUNS=n: the script runs n times in the same processes */
} ml_knobs_values;

const ml_knobs_values *ml_knobs(void);
/* Name, value syntax and meaning of knob i; false past the last. */
bool ml_knob_describe(int i, const char **name, const char **syntax, const char **meaning);
/* Whether MLUA_DEBUG >= level; and print to stderr where it is. */
bool ml_debug_on(int level);
void ml_debug(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
