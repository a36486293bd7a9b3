/* The CUDA device: what its files share.
 *
 * README.md in runtime/device lists the files. Calls run one way: cuda.c and cuda_exec.c call all,
 * cuda_ranks.c those that connect GPUs, these cuda_nccl.c and cuda_ipc.c; cuda_memory.c and
 * cuda_driver.c call none.
 *
 * One in-order stream carries everything but collectives that go on beside it, so one workspace
 * serves all library calls. With several ranks no wait is the driver's own: cuda_wait_for looks for
 * the failure of other ranks meanwhile. Executables
 * keep no address of the workspace across a change of workspace_generation: they bind again. */
#ifndef ML_CUDA_INTERNAL_H
#define ML_CUDA_INTERNAL_H
#ifdef MLUA_CUDA

#include "codegen/lower/library.h"
#include "runtime/device/check.h"
#include "runtime/device/cuda/cuda_driver.h"
#include "runtime/device/device.h"

typedef struct cuda_gemm_library cuda_gemm_library;
typedef struct cuda_gemm cuda_gemm;           /* cuBLASLt descriptors of one shape, shared */
typedef struct cuda_dnn cuda_dnn;             /* cuDNN, opened */
typedef struct cuda_nccl cuda_nccl;           /* communicators of several ranks */
typedef struct cuda_attention cuda_attention; /* a cuDNN plan of one attention step */
/* A choice between such a plan and own kernels. */
typedef struct cuda_attention_tuning cuda_attention_tuning;
typedef struct cuda_times cuda_times; /* runs whose times are not yet known */

enum { CUDA_PINNED = 4, CUDA_PINNED_BYTES = 8 << 20 };

typedef struct {
    uint64_t key;
    CUmodule module;
    CUfunction function;
    uint32_t shared_bytes; /* of a launch, that the function's attribute was asked to allow */
} cuda_function;

/* Of states that are prefetched (cuda_prefetch.c). */
typedef struct {
    CUevent event;
    int axis;  /* of the mesh, on whose stream it is recorded */
    bool nccl; /* which has served a launch of it */
} cuda_prefetch_event;
typedef struct {
    ML_VEC(cuda_prefetch_event) events;
    uint32_t *event_of; /* by state, below `states`: 1 + the number of its event; 0: none */
    uint32_t states;
    uint32_t generation; /* counts what is added to the events */
    bool pending;        /* some launch may not be waited for yet */
} cuda_prefetch;

struct cuda_device;
/* What a wait looks for meanwhile, where there are other ranks. */
typedef struct {
    ml_status (*check)(struct cuda_device *device); /* fails once another rank has failed */
    void (*give_up)(struct cuda_device *device);    /* what runs between ranks ends */
} cuda_others;

typedef struct cuda_device {
    ml_device base;
    ml_arena *arena;
    CUdevice device;
    CUcontext context;
    CUstream stream;
    CUstream host_streams[2];  /* copies to host memory and back; NULL until needed */
    char *pinned[CUDA_PINNED]; /* host memory; one is free once its event has passed */
    CUevent pinned_event[CUDA_PINNED];
    int pinned_next;
    CUdeviceptr workspace;
    int64_t workspace_bytes;
    uint32_t workspace_generation;
    ml_index function_index; /* by kernel key */
    ML_VEC(cuda_function) functions;
    struct cuda_block { /* what allocate gave out, for the accounts */
        void *memory;
        int64_t bytes;
        uint64_t serial; /* no two blocks have the same */
    } * blocks;
    uint32_t block_count, block_capacity;
    uint64_t block_serial;    /* of the last one */
    struct cuda_block aside;  /* unused memory; NULL: none */
    cuda_gemm_library *gemms; /* NULL until first needed */
    cuda_dnn *dnn;
    cuda_attention_tuning *tunings; /* decided ones, a list */
    cuda_times *times;              /* NULL until a run is timed */
    cuda_nccl *nccl;                /* NULL: one rank */
    const cuda_others *others;      /* likewise */
    struct cuda_ce_state *ce;       /* NULL until an executable has collectives that copy */
    struct cuda_fetch *fetch;       /* NULL until another thread is to read memory */
    struct cuda_stage *stage;       /* NULL where no threads write memory */
    struct cuda_channel *channels;
    int64_t ring_bytes;         /* for messages of channels */
    struct cuda_opened *opened; /* memory of other ranks (cuda_ipc.h) */
    uint32_t opened_count, opened_generation;
    cuda_prefetch prefetch;
    const ml_executable
        *marked; /* whose marks say when sums of gradients are final; NULL: none's */
    bool parted; /* from the other ranks: none of their memory is open any more */
} cuda_device;

/* Memory, transfers and waiting (cuda_memory.c). As device.h says: */
ml_status cuda_allocate(ml_device *device, int64_t bytes, void **memory);
void cuda_release(ml_device *device, void *memory);
void cuda_set_aside(ml_device *device, void *memory);
/* Release what was set aside; false: nothing was. */
bool cuda_reclaim(cuda_device *device);
/* cuMemAlloc, which takes what was set aside where memory is short. */
CUresult cuda_take(cuda_device *device, CUdeviceptr *address, int64_t bytes);
ml_status cuda_copy(ml_device *device, void *to, const void *from, int64_t bytes);
ml_status cuda_upload(ml_device *device, void *to, const void *from, int64_t bytes);
ml_status cuda_download(ml_device *device, void *to, const void *from, int64_t bytes);
ml_status cuda_download_parts(ml_device *device, const ml_copied_part *parts, int count);
ml_status cuda_zero(ml_device *device, void *memory, int64_t bytes);
/* cuda_fetch.c: likewise. */
ml_status cuda_mark(ml_device *device);
ml_status cuda_fetch_memory(ml_device *device, void *to, const void *from, int64_t bytes);
void cuda_fetch_close(cuda_device *device);
/* cuda_stage.c: likewise. */
ml_status cuda_stage(ml_device *device, int slots, int64_t bytes, char **buffers);
ml_status cuda_put(ml_device *device, int slot, const void *from, void *to, int64_t width,
                   int64_t height, int64_t pitch);
void cuda_unstage(ml_device *device);
/* cuda_host_copy.c: likewise. */
ml_status cuda_pin(ml_device *device, int64_t bytes, void **memory);
void cuda_unpin(ml_device *device, void *memory);
ml_status cuda_time_host_copies(ml_device *device, int64_t bytes, double seconds[3]);
void cuda_host_copy_close(cuda_device *device);
/* Until the event has passed, or, where it is NULL, all work on the device's stream. */
ml_status cuda_wait_for(cuda_device *device, CUevent event);

/* Make the workspace at least this large (never smaller). Waits for the stream if it must move. */
ml_status cuda_workspace(cuda_device *device, int64_t bytes);

/* Executables (cuda_exec.c). */
ml_status cuda_compile(ml_device *device, const ml_plan *const *plans, int count);
ml_status cuda_load(ml_device *device, const ml_plan *plan, ml_executable **executable);
ml_status cuda_bind(ml_executable *executable, void *const *addresses);
ml_status cuda_run(ml_executable *executable);
ml_status cuda_ready(ml_executable *executable);
void cuda_unload(ml_executable *executable);
/* The body of a loop: it is bound and run by its loop. */
ml_status cuda_load_body(cuda_device *device, const ml_plan *plan, ml_executable **body);
/* Where its steps' operands are; with `choose` also which algorithms serve them. */
ml_status cuda_bind_body(ml_executable *body, bool choose);

typedef struct {
    CUfunction function;
    const ml_kernel *kernel;
    void **arguments; /* the kernel's one struct: tensor maps, pointers, scalars */
    void **pointers;  /* in there */
} cuda_launch;

typedef struct {
    const ml_step *step; /* of the plan, which a device never writes */
    ml_kernel *kernel;   /* the step's, or what it runs otherwise on this machine */
    const char *what;    /* "step 12 (sum+mul), gpt.lua:41" for messages */
    int launch_count;    /* kernels: the step's kernel and its chain */
    cuda_launch *launches;
    cuda_gemm *gemm;
    cuda_attention *attention; /* cuDNN serves; NULL: the launches do */
    const uint64_t *tuning;    /* attention that both may serve: the key of the choice; or NULL */
    bool undecided;            /* both are loaded: the first bind times them */
    void **pointers;           /* by the step's values */
    struct cuda_loop *loop;    /* of a recurrence that is no kernel */
    struct cuda_ce_step *ce;   /* of a collective that copies; NULL: NCCL has it */
    uint32_t leader; /* ticket of the one that leads and whose result this one, which leads too,
                        reads; 0: none */
    uint32_t group;  /* collectives from this one on that are one launch; 0: in an earlier one's */
} cuda_step;

/* Loops (cuda_loop.c): the body is an executable, whose steps are put on the stream for each
 * position, their pointers at its slices. */
void cuda_loop_load(ml_executable *executable, cuda_step *step); /* raises */
void cuda_loop_unload(cuda_step *step);
/* Choose algorithms: the pointers are those of the first position. */
ml_status cuda_loop_bind(ml_executable *executable, const cuda_step *step);
ml_status cuda_loop_run(ml_executable *executable, const cuda_step *step);
/* Launches of a step, of all positions. */
int64_t cuda_loop_launches(const cuda_step *step);

/* Tensor maps (cuda_maps.c). Where the driver has none, the step runs its kernel's `otherwise`. */
void cuda_maps_choose(cuda_step *step); /* raises */
/* Encode them for the pointers that the launch has now. */
ml_status cuda_maps_bind(cuda_launch *launch);

/* Events around the steps of an executable. */
typedef struct cuda_step_times {
    bool recording;             /* a run by steps is under way */
    bool stops;                 /* after each step: MLUA_DEBUG=2 has a kernel that fails named */
    CUevent base, *begin, *end; /* by step */
} cuda_step_times;

/* Of a collective with a ticket: its group may begin; it is done. */
typedef struct {
    CUevent ready, done;
    bool waited;    /* while a run is put on the stream */
    uint32_t first; /* ticket of its group: that one's events serve */
} cuda_ticket;

/* Behind the step all sums of gradients are final that were last written up to it. */
typedef struct {
    uint32_t step;
    CUevent event;
} cuda_sum_mark;

/* Before the step the event of a prefetch. */
typedef struct {
    uint32_t step, event;
} cuda_await;

struct ml_executable {
    cuda_device *device;
    const ml_plan *plan;
    ml_arena *arena;
    cuda_step *steps;
    uint32_t step_count;
    void **addresses; /* by storage, as bound */
    bool bound;
    uint32_t workspace_generation;
    cuda_ticket *tickets; /* [0] is unused */
    uint32_t ticket_count;
    struct cuda_host_ticket *host_tickets; /* of copies to and from the host; [0] is unused */
    uint32_t host_ticket_count;
    bool collects[ML_MAX_MESH];    /* has collectives along the mesh axis */
    struct cuda_ce_step *ce_steps; /* of its steps; NULL: none */
    uint32_t *opened;              /* by rank and step: what it uses of the device's list */
    uint32_t opened_count, opened_generation;
    CUgraphExec graph; /* of the whole step; NULL until captured */
    bool graph_refused;
    bool captures;                   /* its steps are being captured */
    bool leads;                      /* some collectives lead (cuda_lead.c), */
    uint32_t last_lead[ML_MAX_MESH]; /* of these, by mesh axis: the last one's ticket */
    const ml_executable *behind;     /* the run before, if it has marks */
    bool led;                        /* and those of the present run have been started */
    ML_VEC(cuda_sum_mark) marks;     /* of a program that writes sums of gradients */
    const uint32_t *sum_marks;       /* by state, below sum_count: the mark behind its last write */
    uint32_t sum_count;
    bool prefetches;            /* some collectives continue after a run */
    ML_VEC(cuda_await) awaits;  /* of prefetches, in the order of steps */
    uint32_t awaits_generation; /* of the device's events when they were found */
    bool launched;              /* something of the present run is on the stream */
    uint64_t runs;
    ml_checker *checker;          /* where MLUA_CHECK asks for one */
    ml_profile_program *profiled; /* its description; NULL until a run is timed */
    cuda_step_times *times;       /* NULL until a run is timed by steps */
};

/* cuda_enqueue.c. Put one step on the stream, and all of them: the latter with collectives beside
 * the stream. */
ml_status cuda_enqueue(ml_executable *executable, const cuda_step *step);
ml_status cuda_enqueue_all(ml_executable *executable);
/* a, b, c, bias and scale (or NULL) of a GEMM step. */
enum { CUDA_GEMM_OPERANDS = 5 };
void cuda_gemm_operands(const cuda_step *step, void *operands[CUDA_GEMM_OPERANDS]);
/* The graph of the whole step: captured where all ranks that share collectives can, forgotten. */
ml_status cuda_graph_capture(ml_executable *executable);
void cuda_graph_forget(ml_executable *executable);
void cuda_note_run(const ml_executable *executable); /* for the other ranks' messages */

/* Collectives of an executable (cuda_collectives.c). */
void cuda_collect_load(ml_executable *executable); /* raises */
void cuda_collect_unload(ml_executable *executable);
/* The group that begins with this step. */
ml_status cuda_collect_group(ml_executable *executable, const cuda_step *step);
ml_status cuda_collect_wait(ml_executable *executable, const cuda_step *step);
/* The group on the stream, and its ticket's event: what it waits for is waited for. */
ml_status cuda_collect_beside(ml_executable *executable, const cuda_step *step, CUstream stream);
/* Collectives that lead (cuda_lead.c). Finds marks, or whether there are such; start: puts them on
 * their streams, before the run; mark: behind a step on the device's stream, *next counts marks. */
void cuda_lead_load(ml_executable *executable); /* raises */
void cuda_lead_unload(ml_executable *executable);
ml_status cuda_lead_start(ml_executable *executable);
ml_status cuda_lead_mark(const ml_executable *executable, uint32_t step, uint32_t *next);
/* Prefetches (cuda_prefetch.c). Finds those of the program; launched: records events behind a group
 * on its stream; follow: finds what a program waits for, before a run, and whether it is more than
 * before; await: before a step, *next counts; all: for runs that are not plain, and before memory
 * is given back. */
void cuda_prefetch_load(ml_executable *executable); /* raises */
ml_status cuda_prefetch_launched(ml_executable *executable, const cuda_step *step, CUstream stream);
ml_status cuda_prefetch_follow(ml_executable *executable, bool *more);
ml_status cuda_prefetch_await(const ml_executable *executable, uint32_t step, uint32_t *next);
ml_status cuda_prefetch_await_all(cuda_device *device);
void cuda_prefetch_close(cuda_device *device);
/* Each of `count` values becomes the smallest of the ranks with which this executable has
 * collectives, and of those with which these have some. */
ml_status cuda_collect_least(ml_executable *executable, int64_t *values, int64_t count);
/* Copies to and from the host (cuda_host_copy.c): on their direction's stream, between events; one
 * alone, on a stream. */
void cuda_host_copy_load(ml_executable *executable); /* raises */
void cuda_host_copy_unload(ml_executable *executable);
ml_status cuda_host_copy_start(ml_executable *executable, const cuda_step *step);
ml_status cuda_host_copy_wait(ml_executable *executable, const cuda_step *step);
ml_status cuda_host_copy_here(const cuda_step *step, CUstream stream);
/* One collective alone, on the device's stream. */
ml_status cuda_collect_alone(ml_executable *executable, const cuda_step *step);

/* An untimed run: eager or the graph. */
ml_status cuda_run_plain(ml_executable *executable);
/* Timed runs (cuda_profile.c). */
ml_status cuda_run_profiled(ml_executable *executable, ml_run_mode mode);
/* While a run is timed by steps (else nothing happens): events around a step, or around the group
 * that begins with it, on the stream that carries it. */
ml_status cuda_time_begins(ml_executable *executable, const cuda_step *step, CUstream stream);
ml_status cuda_time_ends(ml_executable *executable, const cuda_step *step, CUstream stream);
ml_status cuda_times_collect(cuda_device *device); /* once all runs are finished */
void cuda_times_forget(ml_executable *executable);
void cuda_times_close(cuda_device *device);
/* Runs that compare what each step wrote (cuda_run_checked.c). */
ml_status cuda_run_checked(ml_executable *executable);
ml_check_read cuda_read_storage; /* the context is the executable */

/* GEMM (cuda_gemm.c, cuda_gemm_autotune.c). `alignment` of operands a, b, c, bias is what their
 * addresses are multiples of, in bytes, at most 256. */
typedef struct {
    ml_gemm gemm;
    int64_t alignment[4];
} cuda_gemm_shape;
ml_status cuda_gemm_open(cuda_device *device);
void cuda_gemm_close(cuda_device *device);
/* The descriptors of a shape: created once for the device, which owns them. */
ml_status cuda_gemm_find(cuda_device *device, const cuda_gemm_shape *shape, cuda_gemm **gemm);
/* Choose the algorithm: from the cache on disk, or by timing candidates on the operands' memory;
 * scratch[i] says that operand i (a, b, c) holds nothing yet and may be overwritten. */
ml_status cuda_gemm_tune(cuda_device *device, cuda_gemm *gemm, void *const *operands,
                         const bool scratch[3]);
ml_status cuda_gemm_run(cuda_device *device, cuda_gemm *gemm, void *const *operands);
/* What is chosen by timing, for others too: numbers to time it with; whether this rank decides;
 * what the deciding rank has chosen, for all that must compute the same bits. */
ml_status cuda_tune_fill(cuda_device *device, void *memory, int64_t bytes);
bool cuda_tune_chooses(const cuda_device *device);
ml_status cuda_tune_share(cuda_device *device, void *choice, int64_t bytes);

/* Attention through cuDNN (cuda_dnn.c, cuda_attention.c). */
ml_status cuda_dnn_load(cuda_device *device); /* the library: enough to ask for its version */
ml_status cuda_dnn_open(cuda_device *device);
void cuda_dnn_close(cuda_device *device);
/* NULL in *attention where cuDNN does not serve this step: then the template does; `why` says why.
 */
ml_status cuda_attention_new(cuda_device *device, const ml_schedule *schedule, const ml_step *step,
                             cuda_attention **attention, char *why, int why_size);
void cuda_attention_free(cuda_device *device, cuda_attention *attention);
int64_t cuda_attention_workspace(const cuda_attention *attention);
ml_status cuda_attention_bind(cuda_device *device, cuda_attention *attention,
                              void *const *operands);
ml_status cuda_attention_run(cuda_device *device, cuda_attention *attention);

/* cuDNN or the own kernels on warpgroup products (cuda_attention_autotune.c). */
/* The tuning of an attention step that both may serve, else NULL. Raises. */
const uint64_t *cuda_attention_tuning_key(ml_executable *executable, const ml_step *step);
/* Whether the own kernels are known to serve, so that cuDNN need not be asked: where one rank
 * decides alone. cuDNN's library is loaded. */
bool cuda_attention_own_won(cuda_device *device, const uint64_t *tuning);
/* The step's pointers are bound, both ways: decide for good. */
ml_status cuda_attention_tune(ml_executable *executable, cuda_step *step);
void cuda_attention_tunings_close(cuda_device *device);

#endif
#endif
