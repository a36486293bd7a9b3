#ifdef MLUA_CUDA
#include "runtime/device/cuda/cuda_nccl.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/base/dynamic.h"
#include "runtime/base/knobs.h"
#include "runtime/base/machine.h"
#include "runtime/base/process.h"

/* ---- The library ----------------------------------------------------------------------------- */
#if __has_include(<nccl.h>) && !defined(MLUA_NO_NCCL_HEADER)
#include <nccl.h>
#else
/* NCCL is no part of the CUDA toolkit. What is used of it has not changed since version 2.18. */
typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef enum { ncclSuccess = 0, ncclInProgress = 7 } ncclResult_t;
typedef enum { ncclSum = 0, ncclMax = 2, ncclMin = 3 } ncclRedOp_t;
typedef enum {
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt64 = 4,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9
} ncclDataType_t;
ncclResult_t ncclGetVersion(int *);
ncclResult_t ncclGetUniqueId(ncclUniqueId *);
ncclResult_t ncclCommInitRank(ncclComm_t *, int, ncclUniqueId, int);
typedef struct ncclConfig ncclConfig_t;
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t *, ncclConfig_t *);
ncclResult_t ncclCommDestroy(ncclComm_t);
ncclResult_t ncclCommAbort(ncclComm_t);
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
const char *ncclGetErrorString(ncclResult_t);
const char *ncclGetLastError(ncclComm_t);
ncclResult_t ncclAllReduce(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                           CUstream);
ncclResult_t ncclReduceScatter(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t,
                               ncclComm_t, CUstream);
ncclResult_t ncclAllGather(const void *, void *, size_t, ncclDataType_t, ncclComm_t, CUstream);
ncclResult_t ncclSend(const void *, size_t, ncclDataType_t, int, ncclComm_t, CUstream);
ncclResult_t ncclRecv(void *, size_t, ncclDataType_t, int, ncclComm_t, CUstream);
#endif

/* clang-format off */
#define NCCL_CALLS(X)                                                                              \
    X(ncclGetVersion) X(ncclGetUniqueId) X(ncclCommInitRank) X(ncclCommSplit) X(ncclCommDestroy)   \
    X(ncclCommAbort) X(ncclCommGetAsyncError) X(ncclGroupStart) X(ncclGroupEnd)                    \
    X(ncclGetErrorString) X(ncclGetLastError) X(ncclAllReduce) X(ncclReduceScatter)                \
    X(ncclAllGather) X(ncclSend) X(ncclRecv)
/* clang-format on */

static struct {
#define DECLARE(name) __typeof__(name) *name;
    NCCL_CALLS(DECLARE)
#undef DECLARE
    int version;
} nccl;

enum { OLDEST = 21800, ORDERS = 22600 };

/* Whether NCCL is to keep the order of calls between communicators, and can: unless the user says
 * otherwise. Not where a program uses one at most, as the order costs 0.13 ms a call in a CUDA
 * graph (two H200s, NCCL 2.28). Not under pipeline stages: a message waits for the one before it on
 * its channel, and would keep waiting all that is called after it, which the other rank may need to
 * take that one (tests/pipeline/launches.c). Older drivers keep the order by letting each call wait
 * for the end of the one before. NCCL reads this once in a process: one whose script runs again
 * (MLUA_RUNS) cannot have stages after none, for the driver then faults at the graphs of pieces. */
static ml_status keep_order(int axes, bool stages, bool *ordered) {
    static const char variable[] = "NCCL_LAUNCH_ORDER_IMPLICIT";
    static bool decided, by_us, order;
    int driver = 0;
    bool able = nccl.version >= ORDERS && cuda.cuDriverGetVersion(&driver) == CUDA_SUCCESS &&
                driver >= 12030;
    if (!decided && able && !stages && axes > 1) by_us = setenv(variable, "1", 0) == 0;
    const char *set = getenv(variable);
    if (!decided) order = able && set && strcmp(set, "1") == 0;
    decided = true;
    *ordered = order;
    if (!stages || !order || !by_us) return ML_OK;
    ml_fail(ML_INVALID, "NCCL keeps the order of calls in this process, which ran a layout without "
                        "pipeline stages before: it must not under stages");
    return ml_help("run the script under this layout in a process of its own, without MLUA_RUNS");
}

/* From the main thread only. */
static ml_status open_library(void) {
    static const struct {
        const char *symbol;
        size_t at;
    } calls[] = {
#define ENTRY(name) {#name, offsetof(__typeof__(nccl), name)},
        NCCL_CALLS(ENTRY)
#undef ENTRY
    };
    if (nccl.version) return ML_OK;
    void *library = ml_dynamic_open("libnccl.so.2");
    if (!library) {
        ml_fail(ML_DEVICE, "no NCCL (libnccl.so.2), which several GPUs need");
        return ml_help("install NCCL 2.18 or newer (libnccl2), or use one GPU");
    }
    setenv("NCCL_NVLS_ENABLE", "0", 0); /* multicast over NVLink, unless the user wants it */
    int version = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        void *address = dlsym(library, calls[i].symbol);
        if (!address) {
            ml_fail(ML_DEVICE, "this NCCL (libnccl.so.2) is too old: it has no %s",
                    calls[i].symbol);
            return ml_help("install NCCL 2.18 or newer");
        }
        memcpy((char *)&nccl + calls[i].at, &address, sizeof address);
    }
    if (nccl.ncclGetVersion(&version) != ncclSuccess || version < OLDEST) {
        ml_fail(ML_DEVICE, "NCCL %d.%d is too old", version / 10000, version / 100 % 100);
        return ml_help("install NCCL 2.18 or newer");
    }
    nccl.version = version;
    return ML_OK;
}

ml_status ml_cuda_nccl_describe(char *text, int size) {
    ML_TRY(open_library());
    snprintf(text, (size_t)size, "%d.%d.%d (libnccl.so.2)", nccl.version / 10000,
             nccl.version / 100 % 100, nccl.version % 100);
    return ML_OK;
}

static ml_status nccl_fail(ncclResult_t result, const char *call) {
    const char *detail = nccl.ncclGetLastError(NULL), *what = cuda_doing_now();
    size_t length = strcspn(call, "(");
    bool detailed = detail && *detail;
    return ml_fail(ML_DEVICE, "%.*s failed: %s, error %d%s%s%s%s%s", (int)length, call,
                   nccl.ncclGetErrorString(result), (int)result, detailed ? " (" : "",
                   detailed ? detail : "", detailed ? ")" : "", *what ? " at " : "", what);
}
#define NCCL_TRY(call)                                                                             \
    do {                                                                                           \
        ncclResult_t result_ = nccl.call;                                                          \
        if (result_ != ncclSuccess) return nccl_fail(result_, #call);                              \
    } while (0)

/* What a pair of ranks has to itself. Its kernels run beside computation, so they have few thread
 * blocks, each of which takes a multiprocessor; but so many that a message fits into the buffers
 * that NCCL has for each (4 MiB): its sender is done before it is received. This is the oldest form
 * of ncclConfig_t that has all that is set; NCCL takes the rest as unset. */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cluster, least_blocks, most_blocks;
    const char *network;
    int share, traffic; /* the latter since 2.25; before, it is padding */
} pair_config;
static const pair_config pair_wishes = {
    .size = sizeof(pair_config),
    .magic = 0xcafebeef,
    .version = 21800,
    .blocking = 1,
    .cluster = INT_MIN, /* unset */
    .least_blocks = INT_MIN,
    .most_blocks = 8,
    .network = NULL,
    .share = 0,
    .traffic = INT_MIN,
};

/* Kernels of this stream start before those of others that wait. */
ml_status cuda_nccl_stream(CUstream *stream) {
    enum { HIGHEST = -100 }; /* the driver takes the highest that it has */
    CUDA_TRY(cuStreamCreateWithPriority(stream, CU_STREAM_NON_BLOCKING, HIGHEST));
    return ML_OK;
}

/* ---- Communicators --------------------------------------------------------------------------- */
struct cuda_nccl {
    cuda_device *device;
    int rank, world, axis_count;
    ncclUniqueId id;
    ncclComm_t all, axis[ML_MAX_MESH]; /* an axis of all ranks has theirs */
    int64_t size[ML_MAX_MESH], at[ML_MAX_MESH];
    int first[ML_MAX_MESH];       /* of this rank's group along the axis */
    CUstream stream[ML_MAX_MESH]; /* one for all, where the order between several is not ensured */
    CUstream streams[ML_MAX_MESH];
    pthread_t thread; /* that connects */
    bool connecting, aborted;
    _Atomic bool connected; /* or failed */
    ml_status status;
    ml_error error;
    cuda_pair *pairs;
    struct split {
        int color, key;
        CUstream stream;
        ncclComm_t comm;
    } split;          /* that is being created */
    CUdeviceptr room; /* for cuda_nccl_collect */
};

enum { NO_COLOR = -1 }; /* NCCL_SPLIT_NOCOLOR */

static ml_status connect_axes(cuda_nccl *n) {
    NCCL_TRY(ncclCommInitRank(&n->all, n->world, n->id, n->rank));
    bool taken = false; /* by a mesh axis; one of groups may have all ranks, too */
    for (int i = 0; i < n->axis_count; i++) {
        if (n->size[i] == 1) continue;
        if (n->size[i] == n->world && !taken)
            n->axis[i] = n->all, taken = true;
        else
            NCCL_TRY(ncclCommSplit(n->all, n->first[i], (int)n->at[i], &n->axis[i], NULL));
    }
    return ML_OK;
}

/* NCCL makes a connection when it is first used, and that may wait for all that runs on the GPU: so
 * a pair sends its first message, of what is in the room, while nothing is. */
static ml_status first_message(cuda_nccl *n) {
    void *room = (void *)(uintptr_t)n->room;
    CUstream stream = n->split.stream;
    if (n->split.key == 0)
        NCCL_TRY(ncclSend(room, 1, ncclUint8, 1, n->split.comm, stream));
    else
        NCCL_TRY(ncclRecv(room, 1, ncclUint8, 0, n->split.comm, stream));
    CUDA_TRY(cuStreamSynchronize(stream));
    return ML_OK;
}

/* The mesh axes' communicators or, once they are there, the split that is wanted. */
static ml_status connect(cuda_nccl *n) {
    CUDA_TRY(cuCtxSetCurrent(n->device->context));
    if (!n->all) return connect_axes(n);
    ncclConfig_t *wishes = (ncclConfig_t *)(void *)&pair_wishes;
    NCCL_TRY(ncclCommSplit(n->all, n->split.color, n->split.key, &n->split.comm, wishes));
    return n->split.comm ? first_message(n) : ML_OK;
}

static void *connect_thread(void *argument) {
    cuda_nccl *n = argument;
    cuda_doing("the connection of the GPUs");
    n->status = connect(n);
    if (n->status != ML_OK) n->error = *ml_error_last();
    atomic_store(&n->connected, true);
    return NULL;
}

static ml_status connect_start(cuda_nccl *n) {
    atomic_store(&n->connected, false);
    if (ml_process_thread(&n->thread, connect_thread, n) != 0)
        return ml_fail(ML_NO_MEMORY, "no memory for a thread");
    n->connecting = true;
    return ML_OK;
}

static void describe_mesh(cuda_nccl *n, const ml_ranks *ranks) {
    n->rank = ranks->rank;
    n->world = ml_comm_world(ranks->comm);
    n->axis_count = ranks->layout->count;
    for (int i = 0; i < n->axis_count; i++) {
        ml_row row = ml_ranks_row(ranks, i);
        n->size[i] = row.size;
        n->at[i] = row.at;
        n->first[i] = (int)(n->rank - row.at * row.step);
    }
}

/* Mesh axes of several ranks that a program may use at once. Where groups of ranks run programs by
 * themselves (cp = "dynamic"), a program uses the axis of one size of groups, or the one that they
 * divide. */
static int axes_at_once(const cuda_nccl *n, const ml_groups *groups) {
    bool apart = groups && groups->count > 0 && !groups->together;
    int count = apart;
    for (int i = 0; i < n->axis_count; i++) {
        bool grouped =
            apart && (i == groups->of || (i >= groups->first && i < groups->first + groups->count));
        count += !grouped && n->size[i] > 1;
    }
    return count;
}

static ml_status open_streams(cuda_nccl *n, bool ordered) {
    CUstream one = NULL;
    for (int i = 0; i < n->axis_count; i++) {
        if (n->size[i] == 1) continue;
        if (ordered || !one) {
            ML_TRY(cuda_nccl_stream(&n->streams[i]));
            one = n->streams[i];
        }
        n->stream[i] = one;
    }
    return ML_OK;
}

/* Ranks that take themselves for those of another host have no memory in common for NCCL either. */
static void set_host(uint64_t host) {
    char text[32];
    snprintf(text, sizeof text, "mlua-%016llx", (unsigned long long)host);
    setenv("NCCL_HOSTID", text, 0);
}

ml_status cuda_nccl_join(ml_device *device) {
    cuda_device *d = (cuda_device *)device;
    if (d->nccl) return ML_OK;
    ML_TRY(open_library());
    cuda_nccl *n = ml_alloc(sizeof *n);
    if (!n) return ml_fail(ML_NO_MEMORY, "no memory to connect the GPUs");
    n->device = d;
    d->nccl = n;
    describe_mesh(n, device->ranks);
    if (device->options.hosts > 1) set_host(ml_comm_host(device->ranks->comm));
    device->target.memory_bytes -= ml_communicator_bytes(device->target.memory_bytes);
    if (n->rank == 0) NCCL_TRY(ncclGetUniqueId(&n->id));
    ML_TRY(ml_comm_share(device->ranks->comm, &n->id, sizeof n->id));
    bool ordered;
    int axes = axes_at_once(n, device->ranks->groups);
    ML_TRY(keep_order(axes, device->ranks->layout->stages.on, &ordered));
    ML_TRY(open_streams(n, ordered));
    return connect_start(n);
}

static ml_status connect_end(cuda_nccl *n) {
    ml_comm *comm = n->device->base.ranks->comm;
    const struct timespec pause = {.tv_nsec = 2000000};
    ml_status status = ML_OK;
    ml_comm_busy(comm, "connecting GPUs through NCCL");
    for (double slice = 0; status == ML_OK && !atomic_load(&n->connected); slice = 2e-3) {
        status = ml_comm_waiting(comm, slice);
        nanosleep(&pause, NULL);
    }
    ml_comm_waited(comm);
    ml_comm_done(comm);
    if (status != ML_OK) return status;
    pthread_join(n->thread, NULL);
    n->connecting = false;
    if (n->status == ML_OK)
        ml_debug(1, "nccl: %d.%d.%d connects %d GPUs\n", nccl.version / 10000,
                 nccl.version / 100 % 100, nccl.version % 100, n->world);
    return ML_OK;
}

ml_status cuda_nccl_ready(cuda_device *d) {
    cuda_nccl *n = d->nccl;
    if (!n) return ml_fail(ML_INTERNAL, "a program for several ranks was loaded on one");
    if (n->connecting) ML_TRY(connect_end(n));
    if (n->status != ML_OK) *ml_error_last() = n->error;
    return n->status;
}

/* Every communicator once. */
static void each_communicator(cuda_nccl *n, ncclResult_t (*call)(ncclComm_t)) {
    for (int i = 0; i < n->axis_count; i++) {
        if (n->axis[i] && n->axis[i] != n->all) call(n->axis[i]);
        n->axis[i] = NULL;
    }
    for (cuda_pair *pair = n->pairs; pair; pair = pair->next) {
        if (pair->comm) call(pair->comm);
        pair->comm = NULL;
    }
    if (n->all) call(n->all);
    n->all = NULL;
}

bool cuda_nccl_connected(const cuda_device *d) {
    return d->nccl && !d->nccl->connecting;
}

bool cuda_nccl_aborts(const cuda_device *d) {
    return cuda_nccl_connected(d) && !d->nccl->aborted;
}

void cuda_nccl_abort(cuda_device *d) {
    d->nccl->aborted = true;
    each_communicator(d->nccl, nccl.ncclCommAbort);
}

/* NCCL cannot be asked to give up connecting. Where all ranks end alike it comes to its end
 * within a second or two; where one has ended it may never do. */
static bool connecting_ends(cuda_nccl *n) {
    enum { LOOKS = 1000 };
    const struct timespec pause = {.tv_nsec = 2000000};
    if (!n->connecting) return true;
    for (int i = 0; i < LOOKS && !atomic_load(&n->connected); i++) nanosleep(&pause, NULL);
    if (!atomic_load(&n->connected)) return false;
    pthread_join(n->thread, NULL);
    n->connecting = false;
    return true;
}

bool cuda_nccl_end_connecting(cuda_device *d) {
    if (!d->nccl || connecting_ends(d->nccl)) return true;
    pthread_detach(d->nccl->thread);
    ml_process_abandon();
    return false;
}

void cuda_nccl_destroy(cuda_device *d) {
    each_communicator(d->nccl, nccl.ncclCommDestroy);
}

void cuda_nccl_close(cuda_device *d) {
    cuda_nccl *n = d->nccl;
    for (int i = 0; i < n->axis_count; i++)
        if (n->streams[i]) CUDA_OK(cuStreamDestroy(n->streams[i]));
    if (n->room) CUDA_OK(cuMemFree(n->room));
    ml_free(n);
    d->nccl = NULL;
}

static ml_status check_error(ncclComm_t comm) {
    ncclResult_t error = ncclSuccess;
    if (!comm) return ML_OK;
    NCCL_TRY(ncclCommGetAsyncError(comm, &error));
    if (error == ncclSuccess || error == ncclInProgress) return ML_OK;
    return nccl_fail(error, "what the GPUs send one another");
}

static ml_status check_errors(cuda_nccl *n) {
    ML_TRY(check_error(n->all));
    for (int i = 0; i < n->axis_count; i++) ML_TRY(check_error(n->axis[i]));
    for (cuda_pair *pair = n->pairs; pair; pair = pair->next) ML_TRY(check_error(pair->comm));
    return ML_OK;
}

ml_status cuda_nccl_errors(cuda_device *d) {
    cuda_nccl *n = d->nccl;
    if (n && n->aborted)
        return ml_fail(ML_DEVICE, "the GPUs' communicators were aborted after a failure");
    ML_TRY(ml_comm_check(d->base.ranks->comm));
    return n && !n->connecting ? check_errors(n) : ML_OK;
}

CUstream cuda_nccl_axis_stream(cuda_device *d, int mesh_axis) {
    return d->nccl->stream[mesh_axis];
}

/* ---- Collectives ----------------------------------------------------------------------------- */
static const ncclDataType_t types[ML_DTYPE_COUNT] = {
#define ML_DTYPE(ident, name, bytes, kind, compute, promotion, digits, least, largest, host, from, \
                 to, memory, load, store, file, cuda, nccl, tensor_map, doc)                       \
    [ML_##ident] = nccl,
#include "runtime/graph/dtypes.def"
#undef ML_DTYPE
};

static ncclRedOp_t reduction(const ml_collective_step *s) {
    if (s->combine == ML_COMBINE_MIN) return ncclMin;
    return s->combine == ML_COMBINE_MAX || s->dtype == ML_BOOL ? ncclMax : ncclSum;
}

ml_status cuda_nccl_begin(void) {
    NCCL_TRY(ncclGroupStart());
    return ML_OK;
}

ml_status cuda_nccl_end(void) {
    NCCL_TRY(ncclGroupEnd());
    return ML_OK;
}

/* One collective: `at` is this rank's place along the axis. */
typedef struct {
    const ml_collective_step *step;
    ncclComm_t comm;
    ncclDataType_t type;
    const char *from;
    char *to;
    size_t count;
    int ranks, at;
    CUstream stream;
} collective;

static ml_status all_reduce(const collective *c) {
    NCCL_TRY(
        ncclAllReduce(c->from, c->to, c->count, c->type, reduction(c->step), c->comm, c->stream));
    return ML_OK;
}

static ml_status all_gather(const collective *c) {
    NCCL_TRY(ncclAllGather(c->from, c->to, c->count, c->type, c->comm, c->stream));
    return ML_OK;
}

static ml_status reduce_scatter(const collective *c) {
    NCCL_TRY(ncclReduceScatter(c->from, c->to, c->count, c->type, reduction(c->step), c->comm,
                               c->stream));
    return ML_OK;
}

/* Send `count` elements from offset `at` to one rank of the group, and receive as many from one. */
static ml_status exchange(const collective *c, size_t at, size_t count, int to, int from) {
    size_t bytes = at * (size_t)ml_dtypes[c->step->dtype].bytes;
    NCCL_TRY(ncclSend(c->from + bytes, count, c->type, to, c->comm, c->stream));
    NCCL_TRY(ncclRecv(c->to + bytes, count, c->type, from, c->comm, c->stream));
    return ML_OK;
}

static ml_status all_to_all(const collective *c) {
    size_t block = c->count / (size_t)c->ranks;
    for (int i = 0; i < c->ranks; i++) ML_TRY(exchange(c, (size_t)i * block, block, i, i));
    return ML_OK;
}

static ml_status shift(const collective *c) {
    return exchange(c, 0, c->count, (c->at + 1) % c->ranks, (c->at + c->ranks - 1) % c->ranks);
}

static ml_status reverse(const collective *c) {
    return exchange(c, 0, c->count, c->ranks - 1 - c->at, c->ranks - 1 - c->at);
}

ml_status cuda_nccl_enqueue(cuda_device *d, const ml_collective_step *s, const void *from, void *to,
                            CUstream stream) {
    static ml_status (*const entries[ML_COLLECTIVE_KINDS])(const collective *) = {
#define ML_COLLECTIVE(ident, name, ...) [ML_COLLECTIVE_##ident] = name,
#include "runtime/graph/collectives.def"
#undef ML_COLLECTIVE
    };
    ncclComm_t comm = d->nccl->axis[s->mesh_axis];
    if (!comm) return ml_fail(ML_DEVICE, "the GPUs' communicators were aborted after a failure");
    if (s->count == 0) return ML_OK;
    if (!entries[s->kind])
        return ml_fail(ML_INTERNAL, "no collective between GPUs: %s", ml_collectives[s->kind].name);
    return entries[s->kind](&(collective){.step = s,
                                          .comm = comm,
                                          .type = types[s->dtype],
                                          .from = from,
                                          .to = to,
                                          .count = (size_t)s->count,
                                          .ranks = (int)s->ranks,
                                          .at = (int)d->nccl->at[s->mesh_axis],
                                          .stream = stream});
}

/* ---- Pairs ----------------------------------------------------------------------------------- */
static ml_status room_make(cuda_nccl *n);

ml_status cuda_pair_new(cuda_device *d, int color, int end, CUstream stream, cuda_pair *pair) {
    cuda_nccl *n = d->nccl;
    if (!n) return ml_fail(ML_INTERNAL, "a channel between GPUs before they are connected");
    ML_TRY(cuda_nccl_ready(d));
    if (!n->all) return ml_fail(ML_DEVICE, "the GPUs' communicators were aborted");
    ML_TRY(cuda_wait_for(d, NULL)); /* nothing may be under way while NCCL splits */
    ML_TRY(room_make(n));
    n->split = (struct split){.color = pair ? color : NO_COLOR, .key = end, .stream = stream};
    ML_TRY(connect_start(n));
    ML_TRY(cuda_nccl_ready(d));
    if (!pair) return ML_OK;
    pair->comm = n->split.comm;
    pair->end = end;
    pair->next = n->pairs;
    n->pairs = pair;
    return ML_OK;
}

ml_status cuda_pair_send(const cuda_pair *pair, const void *memory, int64_t bytes,
                         CUstream stream) {
    if (!pair->comm) return ml_fail(ML_DEVICE, "the GPUs' communicators were aborted");
    NCCL_TRY(ncclSend(memory, (size_t)bytes, ncclUint8, 1 - pair->end, pair->comm, stream));
    return ML_OK;
}

ml_status cuda_pair_receive(const cuda_pair *pair, void *memory, int64_t bytes, CUstream stream) {
    if (!pair->comm) return ml_fail(ML_DEVICE, "the GPUs' communicators were aborted");
    NCCL_TRY(ncclRecv(memory, (size_t)bytes, ncclUint8, 1 - pair->end, pair->comm, stream));
    return ML_OK;
}

/* ---- Host memory ----------------------------------------------------------------------------- */
static const int64_t ROOM_BYTES = 32 << 20;

/* `count` elements of what the whole step speaks of, in the device's room. */
static ml_status collect_part(cuda_nccl *n, const ml_collective_step *whole, int64_t count,
                              const char *from, char *to) {
    cuda_device *d = n->device;
    ml_device *device = &d->base;
    ml_collective_step part = *whole;
    int width = ml_dtypes[whole->dtype].bytes;
    int64_t bytes = count * width, apart = whole->count * width;
    char *own = (char *)(uintptr_t)n->room, *result = own + (bytes + 255) / 256 * 256;
    int64_t blocks = whole->kind == ML_COLLECTIVE_ALL_GATHER ? whole->ranks : 1;
    part.count = count;
    ML_TRY(device->ops->upload(device, own, from, bytes));
    ML_TRY(cuda_nccl_enqueue(d, &part, own, result, d->stream));
    for (int64_t i = 0; i < blocks; i++)
        ML_TRY(device->ops->download(device, to + i * apart, result + i * bytes, bytes));
    return ML_OK;
}

/* Elements that go at once. */
static int64_t part_of(int64_t blocks, int width) {
    int64_t most = ROOM_BYTES / blocks / 256 * 256;
    return (most < 4096 ? 4096 : most) / width;
}

/* Room for the widest mesh axis, once: giving memory back would wait for all that runs, which may
 * wait for this rank. */
static ml_status room_make(cuda_nccl *n) {
    int64_t bytes = 0;
    for (int i = 0; i < n->axis_count; i++) {
        int64_t blocks = 1 + n->size[i], wanted = (part_of(blocks, 1) + 256) * blocks;
        if (wanted > bytes) bytes = wanted;
    }
    if (!n->room) CUDA_TRY(cuMemAlloc(&n->room, (size_t)bytes));
    return ML_OK;
}

ml_status cuda_nccl_collect(ml_device *device, const ml_collective_step *s, const void *from,
                            void *to) {
    cuda_device *d = (cuda_device *)device;
    int width = ml_dtypes[s->dtype].bytes;
    int64_t blocks = 1 + (s->kind == ML_COLLECTIVE_ALL_GATHER ? s->ranks : 1);
    if (s->kind != ML_COLLECTIVE_ALL_GATHER && s->kind != ML_COLLECTIVE_ALL_REDUCE)
        return ml_fail(ML_INTERNAL, "%s of host memory", ml_collectives[s->kind].name);
    const int64_t most = part_of(blocks, width);
    ML_TRY(cuda_nccl_ready(d));
    ML_TRY(room_make(d->nccl));
    cuda_doing("a collective of host memory");
    ml_status status = ML_OK;
    for (int64_t at = 0; at < s->count && status == ML_OK; at += most)
        status = collect_part(d->nccl, s, s->count - at < most ? s->count - at : most,
                              (const char *)from + at * width, (char *)to + at * width);
    cuda_doing(NULL);
    return status;
}
#endif
