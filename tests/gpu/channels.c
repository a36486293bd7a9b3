/* Messages between GPUs along channels: in order, whole, both ways at once. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/device/device.h"
#include "tests/comm/support.h"
#include "tests/test.h"

#ifdef MLUA_CUDA
enum { RANKS = 3, MESSAGES = 12, SLOTS = 3, MOST_BYTES = 70001 };

typedef struct {
    ml_device *device;
    ml_comm *comm;
    ml_channel *out[2],
        *in[2]; /* to and from the rank after and before this one, and the reverse */
    char *sent[2][SLOTS], *received[2][SLOTS];
    char *host;
} rank_state;

static ml_layout layout = {.count = 1, .axis = {{.name = "pp", .size = RANKS}}};

/* Rings of channels that are not used (tag 2) take all that an emulated GPU spares: that of the
 * second way, which is to be large, is cut, and both ends go by that. */
static ml_status connect(rank_state *r) {
    int me = ml_comm_rank(r->comm);
    ml_status status = r->device->ops->join(r->device);
    static const int tags[] = {0, 2, 1};
    for (int way = 0, k = 0; k < 3; k++, way = tags[k % 3])
        for (int from = 0; from < RANKS && status == ML_OK; from++) {
            ml_channel *channel = NULL;
            int to = (from + (way == 1 ? RANKS - 1 : 1)) % RANKS;
            status = ml_comm_channel(r->comm, from, to, way, 1, &channel);
            if (status == ML_OK)
                status =
                    r->device->ops->connect(r->device, channel, way ? 16 << 20 : MOST_BYTES / 4);
            if (from == me && way < 2) r->out[way] = channel;
            if (to == me && way < 2) r->in[way] = channel;
        }
    for (int i = 0; i < 2 * SLOTS && status == ML_OK; i++) {
        status = r->device->ops->allocate(r->device, MOST_BYTES, (void **)&r->sent[i % 2][i / 2]);
        if (status == ML_OK)
            status = r->device->ops->allocate(r->device, MOST_BYTES,
                                              (void **)&r->received[i % 2][i / 2]);
    }
    return status;
}

static int64_t bytes_of(int message) {
    return 1 + (int64_t)message * message * 4391 % MOST_BYTES;
}

static char byte_of(int from, int way, int message, int64_t i) {
    return (char)(from * 31 + way * 7 + message * 13 + (int)(i % 251));
}

static ml_status send(rank_state *r, int n) {
    const ml_device_ops *ops = r->device->ops;
    int64_t bytes = bytes_of(n);
    ml_status status = ML_OK;
    for (int way = 0; way < 2 && status == ML_OK; way++) {
        char *memory = r->sent[way][n % SLOTS];
        for (int64_t i = 0; i < bytes; i++) r->host[i] = byte_of(ml_comm_rank(r->comm), way, n, i);
        status = ops->wait_sent(r->device, r->out[way], memory);
        if (status == ML_OK) status = ops->upload(r->device, memory, r->host, bytes);
        if (status == ML_OK) status = ops->send(r->device, r->out[way], memory, bytes);
    }
    return status;
}

static ml_status take(rank_state *r, int n) {
    const ml_device_ops *ops = r->device->ops;
    int64_t bytes = bytes_of(n);
    ml_status status = ML_OK;
    for (int way = 0; way < 2 && status == ML_OK; way++) {
        char *memory = r->received[way][n % SLOTS];
        int from = ml_channel_from(r->in[way]);
        status = ops->expect(r->device, r->in[way], memory, bytes);
        if (status == ML_OK) status = ops->arrive(r->device, r->in[way], memory);
        if (status == ML_OK) status = ops->download(r->device, r->host, memory, bytes);
        for (int64_t i = 0; status == ML_OK && i < bytes; i++)
            if (r->host[i] != byte_of(from, way, n, i))
                status = ml_fail(ML_INTERNAL, "byte %lld of message %d from rank %d is %d",
                                 (long long)i, n, from, r->host[i]);
    }
    return status;
}

/* A few messages both ways, then take those of the others: no rank waits for a sender. */
static ml_status exchange(rank_state *r, int first, int count) {
    ml_status status = ML_OK;
    for (int i = 0; i < count && status == ML_OK; i++) status = send(r, first + i);
    for (int i = 0; i < count && status == ML_OK; i++) status = take(r, first + i);
    return status;
}

static int edges_body(ml_comm *comm, void *argument) {
    (void)argument;
    int me = ml_comm_rank(comm);
    rank_state r = {.comm = comm, .host = ml_alloc(MOST_BYTES)};
    ml_ranks ranks = {.layout = &layout, .comm = comm, .rank = me};
    ml_status status = ml_device_open("cuda", me, &r.device);
    if (status == ML_OK) r.device->ranks = &ranks;
    if (status == ML_OK) status = connect(&r);
    for (int n = 0; n < MESSAGES && status == ML_OK; n++) status = exchange(&r, n, 1);
    for (int n = MESSAGES; n < 8 * MESSAGES && status == ML_OK; n += SLOTS)
        status = exchange(&r, n, SLOTS);
    if (status == ML_OK) status = ml_comm_barrier(comm);
    if (status != ML_OK) ml_comm_fail(comm, ml_error_last()->text);
    if (status != ML_OK) fprintf(stderr, "rank %d: %s\n", me, ml_error_last()->text);
    ml_device_close(r.device);
    ml_free(r.host);
    return status == ML_OK ? 0 : 1;
}

/* Its ranks are forks, which the driver allows only before it is opened: the name comes before
 * those of the other tests that run in this process. */
TEST(gpu, channels) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (driver) dlclose(driver);
    REQUIRE(!driver);
    pid_t child = fork(); /* the driver must not be opened here */
    if (child == 0) _exit(ml_cuda_count() < RANKS);
    int status = 0;
    REQUIRE(child > 0 && waitpid(child, &status, 0) == child);
    if (status) test_skip("it takes %d GPUs", RANKS);
    comm_run(RANKS, edges_body, NULL);
}
#else
TEST(gpu, edges) {
    test_skip("built without the CUDA toolkit's headers");
}
#endif
