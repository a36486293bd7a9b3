/* A device behind one table of functions: cpu, cuda, null.
 *
 * All calls but `fetch` and `put` come from one thread. Memory is device memory: only upload,
 * download, fetch, put and zero touch it. An executable is a plan prepared for it (kernels compiled
 * and loaded, GEMM algorithms chosen); running it enqueues all steps in order. Functions return
 * ml_status with the error stored. */
#ifndef ML_DEVICE_H
#define ML_DEVICE_H

#include "runtime/comm/comm.h"
#include "runtime/device/profile.h"
#include "runtime/plan/plan.h"
#include "runtime/shard/groups.h"

typedef struct ml_device ml_device;
typedef struct ml_executable ml_executable;

/* What the user asks of devices (base/knobs.h): read once, where one is opened. */
typedef struct {
    int threads; /* of a CPU; 0: as many as cores */
    bool check;  /* compare what every step writes with the reference interpreter */
    bool tune;   /* time what libraries propose, and attention by cuDNN and by own kernels */
    int peer;    /* GPUs of a host copy from one another's memory; 0: NCCL does */
    int graphs;  /* 0: a GPU runs on streams; 1: programs as one CUDA graph each; -1: by the plan */
    int hosts;   /* the ranks of this host take themselves for those of so many */
    int blas;    /* products on the CPU: ML_BLAS_FASTER, 1: by a BLAS, 0: by own kernels */
    int runs;    /* of the script, in this process */
    int debug;
} ml_device_options;

typedef struct {
    void *to;
    const void *from;
    int64_t bytes;
} ml_copied_part;

/* A product of matrices, or by groups, in which these have `rows` of each item's rows, equally
 * many. */
typedef struct {
    bool grouped;
    ml_gemm gemm;
    ml_ragged ragged;
    int64_t rows;
} ml_product;

typedef struct {
    const char *name; /* "cpu", "cuda", "null" */
    ml_status (*open)(ml_device **device, int ordinal, const ml_device_options *options);
    void (*close)(ml_device *device);
    ml_status (*allocate)(ml_device *device, int64_t bytes, void **memory); /* 256-byte aligned */
    void (*release)(ml_device *device, void *memory);
    ml_status (*upload)(ml_device *device, void *to, const void *from,
                        int64_t bytes); /* in order with runs; `from` may be reused at once */
    ml_status (*download)(ml_device *device, void *to, const void *from, int64_t bytes); /* waits */
    ml_status (*download_parts)(ml_device *device, const ml_copied_part *parts,
                                int count); /* few bytes, at once; waits. NULL: one by one */
    ml_status (*copy)(ml_device *device, void *to, const void *from,
                      int64_t bytes); /* on the device, in order with runs */
    ml_status (*zero)(ml_device *device, void *memory, int64_t bytes);
    /* Reading memory beside the runs, from another thread (one at a time); NULL where the host can
     * read it. mark: what is in order before this call will be seen; fetch: memory as it was at the
     * last mark, that nothing has written since. */
    ml_status (*mark)(ml_device *device);
    ml_status (*fetch)(ml_device *device, void *to, const void *from, int64_t bytes);
    /* Where there is a mark: instead of release, of memory that will be wanted again. The next
     * allocation of as many bytes gets it; one that does not fit beside it has it released, as is
     * memory where little else is free. */
    void (*set_aside)(ml_device *device, void *memory);
    /* Writing memory from several threads beside one another, where nothing else uses it; NULL
     * where the host can write it. stage: a buffer of `bytes` in host memory for each of `slots`
     * threads, one behind the other; put: `height` rows of `width` bytes, packed in the thread's
     * buffer, to places `pitch` bytes apart: returns when they are there. */
    ml_status (*stage)(ml_device *device, int slots, int64_t bytes, char **buffers);
    ml_status (*put)(ml_device *device, int slot, const void *from, void *to, int64_t width,
                     int64_t height, int64_t pitch);
    void (*unstage)(ml_device *device);
    /* Host memory that executables copy to and from beside computation, and the end of it; NULL
     * where any serves. */
    ml_status (*pin)(ml_device *device, int64_t bytes, void **memory);
    void (*unpin)(ml_device *device, void *memory);
    /* The seconds of a copy of so many bytes to such memory, of one back, and of both at once, the
     * fastest of a few; NULL where there is no such memory. */
    ml_status (*time_host_copies)(ml_device *device, int64_t bytes, double seconds[3]);
    /* The seconds of each of the products on one of `ranks` that run it at once, on `threads`
     * threads each, as long as it takes within a step; 0 of one that is not timed. NULL where
     * products are predicted by rates. products_by: what computes them, on which times depend. */
    ml_status (*time_products)(ml_device *device, const ml_product *products, int count, int ranks,
                               int threads, double *seconds);
    void (*products_by)(char *out, int size);
    /* Until all runs are finished: reports their errors, and their times to the profile. */
    ml_status (*wait)(ml_device *device);
    /* Compile the kernels of several plans at once, all of which are loaded next. NULL where that
     * is as fast one by one. */
    ml_status (*compile)(ml_device *device, const ml_plan *const *plans, int count);
    /* addresses[storage] is the base of each storage of the plan's schedule. */
    ml_status (*load)(ml_device *device, const ml_plan *plan, ml_executable **executable);
    ml_status (*bind)(ml_executable *executable, void *const *addresses);
    ml_status (*run)(ml_executable *executable);
    void (*unload)(ml_executable *executable);
    /* Several ranks; NULL where a device needs nothing of the kind. join: all ranks at once, before
     * the first program and with device->ranks set: connect this device with the others'. collect:
     * an all-gather or all-reduce of host memory between the ranks along a mesh axis. */
    ml_status (*join)(ml_device *device);
    ml_status (*collect)(ml_device *device, const ml_collective_step *step, const void *from,
                         void *to);
    /* Before memory is given back that bound executables use: they all will be bound again before
     * they run. All ranks that run the same programs at once. NULL where nothing is to do. */
    ml_status (*forget)(ml_device *device);
    /* Before the memory of a session is given back, with no executables left: waits a moment until
     * the other ranks use none of it. Never fails. NULL where nothing is to do. */
    void (*part)(ml_device *device);
    /* Before a bound executable runs for the first time, but one like it has run: make now what its
     * runs would make. Nothing may be under way. NULL where there is nothing to make. */
    ml_status (*ready)(ml_executable *executable);
    /* All ranks at once, right after ml_comm_channel created channels of which each rank is an end
     * of at most one, this one (NULL: of none): the ops below may then use it. `usual`: the bytes
     * that are sent at once. NULL where a device needs no such call. */
    ml_status (*connect)(ml_device *device, ml_channel *channel, int64_t usual);
    /* Whether a message of the channel may be expected long before it comes at no cost to the runs
     * that go on meanwhile. NULL: of no channel. */
    bool (*patient)(const ml_device *device, const ml_channel *channel);
    /* Between ranks (pipeline stages). Messages of a channel arrive in the order they were sent,
     * whole; the two ranks call in that order and with the same sizes. NULL where there are
     * none.
     * send: in order with runs before it; returns at once unless many messages are under way. The
     * memory must not be written before `wait_sent` of it, which makes later runs wait for the
     * send. expect: the next message of the channel is received in `memory`, once earlier runs have
     * released it (on a GPU: are finished; so expect a message before the run that it may arrive
     * beside); arrive: later runs wait for it. One message of a channel is expected at a time. */
    ml_status (*send)(ml_device *device, ml_channel *channel, const void *memory, int64_t bytes);
    ml_status (*wait_sent)(ml_device *device, ml_channel *channel, const void *memory);
    ml_status (*expect)(ml_device *device, ml_channel *channel, void *memory, int64_t bytes);
    ml_status (*arrive)(ml_device *device, ml_channel *channel, void *memory);
} ml_device_ops;

/* The ranks of a job as a device's programs need them. */
typedef struct {
    const ml_layout *layout; /* NULL: one rank */
    const ml_groups *groups; /* of the layout; NULL or with none of them */
    ml_comm *comm;           /* NULL where programs are only planned */
    int rank;
    ml_group *group[ML_MAX_MESH]; /* of this rank, by mesh axis; NULL where it would be alone */
} ml_ranks;

/* The ranks of this one's collectives over mesh axis i. */
static inline ml_row ml_ranks_row(const ml_ranks *ranks, int i) {
    return ml_groups_row(ranks->layout, ranks->groups, ranks->rank, i);
}

struct ml_device {
    const ml_device_ops *ops;
    ml_device_options options;
    ml_target target;
    const ml_ranks *ranks;             /* of the session; NULL: one rank */
    ml_profile *profile;               /* owned; NULL: runs are not looked at */
    char description[256];             /* "NVIDIA H200, 141 GB, driver 580.1" */
    int64_t peak_bytes, current_bytes; /* allocated */
    int64_t total_bytes;               /* memory of the device, in use or not; 0: not known */
};

extern const ml_device_ops ml_device_cpu, ml_device_null;
#ifdef MLUA_CUDA
extern const ml_device_ops ml_device_cuda;
ml_status ml_cuda_nccl_describe(char *text, int size); /* its version; fails where it is absent */
ml_status ml_cuda_find(void);                          /* a driver that sees a GPU */
int ml_cuda_count(void);   /* GPUs that the driver sees; 0 where there is no driver */
bool ml_cuda_absent(void); /* there is no NVIDIA driver, or it sees no GPU: nothing is broken */
#endif
/* What the user asks of the compiler of kernels takes effect: where a device is opened, and where
 * kernels are shown without one. */
void ml_device_jit_options(void);
/* Open by name: "cpu", "cuda", "null" or NULL for cuda where there is a GPU, else cpu. A GPU that
 * is there and cannot be opened is reported on stderr before the cpu takes its place. */
ml_status ml_device_open(const char *name, int ordinal, ml_device **device);
/* Fails where it is plain that ml_device_open would, and opens nothing. */
ml_status ml_device_find(const char *name);
void ml_device_close(ml_device *device);
/* Runs from now on are looked at as the device's profile says. Safe to call again. */
ml_status ml_device_profile(ml_device *device);
/* What `mlua doctor` prints: a line for each thing found or missing and what that costs. */
void ml_device_doctor(ml_text *out);

#endif
