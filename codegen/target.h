/* What kernels are generated for: a machine, filled in by a device (or by hand, for planning
 * without one), and the options of code generation. Codegen reads no environment variables. */
#ifndef ML_TARGET_H
#define ML_TARGET_H

#include <stdbool.h>
#include <stdint.h>

typedef enum { ML_TARGET_C, ML_TARGET_CUDA } ml_target_kind;

typedef struct {
    ml_target_kind kind;
    int threads;                  /* C: threads that run kernels */
    int vector_bytes;             /* C: SIMD register width of the machine, 16, 32 or 64 */
    int arch;                     /* CUDA: compute capability, 90 for sm_90 */
    int multiprocessors;          /* CUDA */
    int64_t memory_bytes;         /* what plans may use; 0: unknown */
    int64_t longest_materialized; /* attention over more keys never holds the score matrix */
    int64_t link_bytes; /* a second, that a GPU sends to those of its host at most: from the data
                           sheet of what joins them; 0: unknown */
    int host_ranks;     /* GPUs of a host; 0: unknown */
    int64_t host_bytes; /* a second, each way between a GPU and host memory, for which plans may
                           offload values (MLUA_HOST_LINK); 0: they do not */
    int64_t host_memory; /* of a rank, that may be pinned for that; 0: unknown */
    /* The user's options (ml_target_set_options, runtime/exec/options.c); zero is the default. */
    bool no_fuse;          /* one kernel for each op (MLUA_NOFUSE=1) */
    bool no_cudnn;         /* attention runs on mlua's own kernels (MLUA_CUDNN=0) */
    bool nondeterministic; /* cuDNN's attention gradient sums in any order (MLUA_DETERMINISTIC=0) */
    bool no_wgmma;         /* no kernels on warpgroup products (MLUA_WGMMA=0) */
    int attention_tiles;   /* which tiles of attention forward on warpgroup products, from 0
                              (MLUA_WGMMA=1 + this) */
    bool no_tma;           /* grouped products without the copy engine (MLUA_TMA=0) */
    bool no_early;         /* kernels start after those ahead have ended (MLUA_EARLY=0) */
} ml_target;

/* On a GPU no attention is short enough: a fused kernel beats products and a softmax at any
 * length. */
enum { ML_CUDA_MATERIALIZED = 0 };

/* Bytes of shared memory that a block may have on GPUs of this architecture. */
static inline int64_t ml_target_shared(int arch) {
    int64_t kib = arch >= 90 && arch < 120 ? 227 : arch == 80 || arch == 87 ? 163 : 99;
    return kib << 10;
}

#endif
