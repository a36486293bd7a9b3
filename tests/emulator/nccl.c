/* libnccl for the emulator: collectives between processes, each with an emulated GPU. Messages are
 * files in a folder of the communicator ($EMULATOR/nccl/ID); sums are in the order of the ranks.
 * Calls only put work on streams; it waits for the other ranks there, as on a GPU. With
 * EMULATOR_WAITS=1 a message is removed once its receiver takes it, and a communicator's first
 * message waits for all that this rank has under way. EMULATOR_CONNECTS=MS: connecting takes so
 * many milliseconds, in which the thread needs the device's context and the other ranks' processes.
 * Complains about ranks that call different collectives. */
#include <nccl.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fibers.h"

enum { MOST = 64, GROUP = 4096 };
typedef enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE } kind;
static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2}; /* by ncclDataType_t */

struct ncclComm {
    char folder[512];
    int rank, size, splits, aborted;
    long sent[MOST], received[MOST]; /* messages to and from each */
    void *stream;                    /* of its last work */
};
typedef struct {
    kind kind;
    struct ncclComm *comm;
    const char *from;
    char *to;
    size_t count;
    int type, op, peer;
    long message[MOST]; /* that it waits for, by rank */
} piece;
typedef struct {
    int count, begun;
    piece *at;
} group_work;

static group_work collecting; /* between ncclGroupStart and ncclGroupEnd */
static void *collecting_stream;
static int depth;

/* ---- Messages ---- */
static void name_message(const struct ncclComm *c, int from, int to, long n, char path[600]) {
    snprintf(path, 600, "%s/%d.%d.%ld", c->folder, from, to, n);
}

static void send_message(struct ncclComm *c, int peer, uint64_t what, const void *bytes,
                         size_t size) {
    char path[600], part[620];
    name_message(c, c->rank, peer, c->sent[peer]++, path);
    snprintf(part, sizeof part, "%s.part", path);
    FILE *file = fopen(part, "wb");
    if (!file || fwrite(&what, 8, 1, file) != 1 || (size && fwrite(bytes, size, 1, file) != 1))
        emu_complain("nccl: a message cannot be written");
    if (file) fclose(file);
    rename(part, path);
}

static int has_message(const struct ncclComm *c, int peer, long n) {
    char path[600];
    name_message(c, peer, c->rank, n, path);
    return access(path, F_OK) == 0;
}

static void take_message(const struct ncclComm *c, int peer, long n, uint64_t what, void *to,
                         size_t size) {
    char path[600], more;
    uint64_t theirs = 0;
    name_message(c, peer, c->rank, n, path);
    FILE *file = fopen(path, "rb");
    int good = file && fread(&theirs, 8, 1, file) == 1 && theirs == what &&
               (size == 0 || fread(to, size, 1, file) == 1) && fread(&more, 1, 1, file) == 0;
    if (!good) emu_complain("nccl: two ranks call different collectives");
    if (file) fclose(file);
    unlink(path);
}

static void wait_message(struct ncclComm *c, int peer, uint64_t what, void *to, size_t size) {
    long n = c->received[peer]++;
    while (!has_message(c, peer, n)) {
        if (!emu_alive()) raise(SIGSEGV); /* the context was destroyed, or the process ends */
        usleep(500);
    }
    take_message(c, peer, n, what, to, size);
}

/* ---- Collectives ---- */
#define COMBINE(name, type)                                                                        \
    static type name(int op, type a, type b) {                                                     \
        return op == ncclSum ? (type)(a + b) : op == ncclMax ? (a > b ? a : b) : (a < b ? a : b);  \
    }
COMBINE(combine_byte, uint8_t)
COMBINE(combine_int, int32_t)
COMBINE(combine_long, int64_t)
COMBINE(combine_float, float)
COMBINE(combine_double, double)

static float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void combine(const piece *p, char *sum, const char *other) {
#define EACH(type, name)                                                                           \
    for (size_t i = 0; i < p->count; i++)                                                          \
    ((type *)sum)[i] = name(p->op, ((type *)sum)[i], ((const type *)other)[i])
    switch (p->type) {
    case ncclUint8: EACH(uint8_t, combine_byte); break;
    case ncclInt32: EACH(int32_t, combine_int); break;
    case ncclInt64: EACH(int64_t, combine_long); break;
    case ncclFloat32: EACH(float, combine_float); break;
    case ncclFloat64: EACH(double, combine_double); break;
    case ncclBfloat16:
        for (size_t i = 0; i < p->count; i++) {
            uint16_t *a = (uint16_t *)sum + i;
            *a = narrow(combine_float(p->op, widen(*a), widen(((const uint16_t *)other)[i])));
        }
        break;
    default: emu_complain("nccl: a reduction of an unknown type");
    }
}

static uint64_t describe(const piece *p) {
    int shown = p->kind == RECEIVE ? SEND : p->kind;
    return (uint64_t)p->count << 16 | (uint64_t)(p->type << 8 | p->op << 4 | shown);
}

/* Send the others what they need of this rank. */
static void begin_piece(piece *p) {
    struct ncclComm *c = p->comm;
    size_t bytes = p->count * widths[p->type];
    for (int i = 0; i < c->size; i++) {
        int peer = p->kind == SEND || p->kind == RECEIVE ? i == p->peer : i != c->rank;
        if (!peer) continue;
        if (p->kind == SEND) p->message[i] = c->sent[i];
        if (p->kind != RECEIVE)
            send_message(c, i, describe(p), p->from + (p->kind == REDUCE_SCATTER ? i * bytes : 0),
                         bytes);
        if (p->kind != SEND) p->message[i] = c->received[i]++;
    }
}

static int message_taken(const piece *p) {
    char path[600];
    name_message(p->comm, p->comm->rank, p->peer, p->message[p->peer], path);
    return access(path, F_OK) != 0;
}

static int piece_ready(const piece *p, int alone) {
    if (p->kind == SEND) return !alone || !emu_waits() || message_taken(p);
    if (p->kind == RECEIVE) return has_message(p->comm, p->peer, p->message[p->peer]);
    for (int i = 0; i < p->comm->size; i++)
        if (i != p->comm->rank && !has_message(p->comm, i, p->message[i])) return 0;
    return 1;
}

static void end_piece(const piece *p) {
    const struct ncclComm *c = p->comm;
    size_t bytes = p->count * widths[p->type];
    if (p->kind == SEND) return;
    if (p->kind == RECEIVE) {
        take_message(c, p->peer, p->message[p->peer], describe(p), p->to, bytes);
        return;
    }
    const char *own = p->from + (p->kind == REDUCE_SCATTER ? (size_t)c->rank * bytes : 0);
    char *all = malloc((size_t)c->size * bytes + 1);
    for (int i = 0; i < c->size; i++)
        if (i == c->rank)
            memcpy(all + i * bytes, own, bytes);
        else
            take_message(c, i, p->message[i], describe(p), all + i * bytes, bytes);
    for (int i = 1; p->kind != ALL_GATHER && i < c->size; i++) combine(p, all, all + i * bytes);
    memcpy(p->to, all, p->kind == ALL_GATHER ? (size_t)c->size * bytes : bytes);
    free(all);
}

static int do_group(void *data) {
    group_work *g = data;
    for (int i = 0; !g->begun && i < g->count; i++) begin_piece(&g->at[i]);
    g->begun = 1;
    for (int i = 0; i < g->count; i++)
        if (!g->at[i].comm->aborted && !piece_ready(&g->at[i], g->count == 1)) return 0;
    for (int i = g->count; i-- > 0;) /* in any order, so not in that of the calls */
        if (!g->at[i].comm->aborted) end_piece(&g->at[i]);
    g->begun = 0; /* a graph does it again */
    return 1;
}

ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    if (--depth > 0 || collecting.count == 0) return ncclSuccess;
    group_work *g = malloc(sizeof *g);
    *g = collecting;
    collecting = (group_work){0};
    for (int i = 0; i < g->count; i++) {
        struct ncclComm *c = g->at[i].comm;
        if (c->stream) emu_order(c->stream, collecting_stream);
        c->stream = collecting_stream;
    }
    emu_enqueue(collecting_stream, do_group, g);
    return ncclSuccess;
}

static ncclResult_t add(piece p, void *stream) {
    if (p.comm->aborted || collecting.count == GROUP) return ncclInvalidUsage;
    if (!p.comm->stream && (p.kind == SEND || p.kind == RECEIVE) && emu_waits()) emu_finish();
    if (collecting.count && collecting_stream != stream)
        emu_complain("nccl: a group on two streams");
    ncclGroupStart();
    collecting.at = realloc(collecting.at, (size_t)(collecting.count + 1) * sizeof p);
    collecting.at[collecting.count++] = p;
    collecting_stream = stream;
    return ncclGroupEnd();
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return add((piece){ALL_REDUCE, comm, from, to, count, type, op}, stream);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return add((piece){ALL_GATHER, comm, from, to, count, type}, stream);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return add((piece){REDUCE_SCATTER, comm, from, to, count, type, op}, stream);
}
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    return add((piece){SEND, comm, from, NULL, count, type, 0, peer}, stream);
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return add((piece){RECEIVE, comm, NULL, to, count, type, 0, peer}, stream);
}

/* ---- Communicators ---- */
ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t result) {
    return result ? "emulated error" : "no error";
}
const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return "";
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    uint64_t word = 0;
    int file = open("/dev/urandom", O_RDONLY);
    if (read(file, &word, sizeof word) != sizeof word) return ncclSystemError;
    close(file);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%016llx", (unsigned long long)word);
    return ncclSuccess;
}

static struct ncclComm *new_comm(int size, int rank) {
    struct ncclComm *c = calloc(1, sizeof *c);
    c->rank = rank;
    c->size = size;
    return c;
}

/* What a rank writes into the connection to a process that ended: SIGPIPE comes of it. */
static void write_to_closed_end(void) {
    int ends[2];
    if (pipe(ends)) return;
    close(ends[0]);
    if (write(ends[1], "", 1) == 1)
        emu_complain("nccl: the reader is closed and yet it is written");
    close(ends[1]);
}

/* As the real library's sockets, buffers and proxies do, this uses the context all the time. */
static ncclResult_t keep_connecting(const int *process, int size) {
    const char *text = getenv("EMULATOR_CONNECTS");
    for (int left = text ? atoi(text) : 0; left > 0; left--) {
        if (!emu_alive()) raise(SIGSEGV);
        for (int i = 0; i < size; i++)
            if (kill(process[i], 0) && errno == ESRCH) {
                write_to_closed_end();
                return ncclRemoteError;
            }
        usleep(1000);
    }
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *result, int size, ncclUniqueId id, int rank) {
    const char *home = getenv("EMULATOR");
    struct ncclComm *c = new_comm(size, rank);
    if (!home || size > MOST) return ncclInvalidArgument;
    if (!getenv("NCCL_NVLS_ENABLE")) emu_complain("nccl: multicast is not switched off");
    snprintf(c->folder, sizeof c->folder, "%s/nccl", home);
    mkdir(c->folder, 0700);
    snprintf(c->folder, sizeof c->folder, "%s/nccl/%s", home, id.internal);
    mkdir(c->folder, 0700);
    int own = (int)getpid(), process[MOST];
    emu_enter();
    for (int i = 0; i < size; i++) send_message(c, i, 1, &own, sizeof own);
    for (int i = 0; i < size; i++) wait_message(c, i, 1, &process[i], sizeof own);
    ncclResult_t outcome = keep_connecting(process, size);
    emu_leave();
    *result = c;
    return outcome;
}
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *result,
                           ncclConfig_t *config) {
    int mine[2] = {color, key}, theirs[2], rank = 0, size = 0;
    (void)config;
    for (int i = 0; i < parent->size; i++) send_message(parent, i, 2, mine, sizeof mine);
    for (int i = 0; i < parent->size; i++) {
        wait_message(parent, i, 2, theirs, sizeof theirs);
        size += theirs[0] == color;
        rank += theirs[0] == color && (theirs[1] < key || (theirs[1] == key && i < parent->rank));
    }
    *result = NULL;
    int number = parent->splits++;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    struct ncclComm *c = new_comm(size, rank);
    snprintf(c->folder, sizeof c->folder, "%.400s/%d.%d", parent->folder, number, color);
    mkdir(c->folder, 0700);
    *result = c;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    const char *wanted = getenv("EMULATOR_NCCL_ERROR");
    (void)comm;
    *error = wanted ? (ncclResult_t)atoi(wanted) : ncclSuccess;
    return ncclSuccess;
}
/* The last one to leave removes the folder. */
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    rmdir(comm->folder);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->aborted = 1;
    return ncclSuccess;
}
