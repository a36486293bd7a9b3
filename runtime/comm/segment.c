/* The shared memory of a host's ranks, and the job's one failure in it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/comm/comm_internal.h"

static const uint64_t MAGIC = 0x31676573616c6d6dul;
enum { GROUP_BYTES = 8 << 20, LEAST_CHUNK = 64 << 10, LARGEST_CHUNK = 512 << 10, PAGE = 4096 };

/* Chunks shrink as ranks grow, so that a group's staging stays near 3 * GROUP_BYTES. */
static uint64_t chunk_of(int world) {
    uint64_t chunk = LARGEST_CHUNK;
    while (chunk > LEAST_CHUNK && chunk * (uint64_t)world > GROUP_BYTES) chunk /= 2;
    return chunk;
}

static uint64_t header_bytes(int world) {
    uint64_t bytes = sizeof(comm_segment) + (uint64_t)world * sizeof(comm_record);
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static void describe(comm_segment *s, int world) {
    s->world = world;
    s->chunk_bytes = chunk_of(world);
    s->slot_bytes = COMM_CONTROL + 3 * s->chunk_bytes;
    s->bytes = header_bytes(world) + COMM_MOST_GROUPS * (uint64_t)world * s->slot_bytes;
    s->magic = MAGIC;
}

int comm_segment_new(int world) {
    if (world < 1 || world > COMM_MOST_RANKS) {
        ml_fail(ML_INVALID, "%d ranks on one host: at most %d can share memory", world,
                COMM_MOST_RANKS);
        return -1;
    }
    int fd = memfd_create("mlua", MFD_CLOEXEC);
    comm_segment header = {0};
    describe(&header, world);
    if (fd >= 0 && ftruncate(fd, (off_t)header.bytes) == 0 &&
        pwrite(fd, &header, sizeof header, 0) == (ssize_t)sizeof header)
        return fd;
    ml_fail(ML_IO, "cannot make shared memory for %d ranks: %s", world, strerror(errno));
    if (fd >= 0) close(fd);
    return -1;
}

ml_status comm_segment_map(int fd, comm_segment **segment, size_t *bytes) {
    struct stat about;
    comm_segment header, expected = {0};
    *segment = NULL;
    if (fstat(fd, &about) != 0 || pread(fd, &header, sizeof header, 0) != (ssize_t)sizeof header)
        return ml_fail(ML_IO, "descriptor %d holds no shared memory of ranks: %s", fd,
                       strerror(errno));
    bool right = header.magic == MAGIC && header.world >= 1 && header.world <= COMM_MOST_RANKS;
    if (right) describe(&expected, header.world);
    if (!right || header.bytes != expected.bytes || (uint64_t)about.st_size != header.bytes)
        return ml_fail(ML_INVALID, "descriptor %d holds no shared memory of this version's ranks",
                       fd);
    void *at = mmap(NULL, header.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED)
        return ml_fail(ML_NO_MEMORY, "cannot map the ranks' shared memory: %s", strerror(errno));
    *segment = at;
    *bytes = header.bytes;
    return ML_OK;
}

comm_segment *comm_segment_alone(int world, size_t *bytes) {
    *bytes = header_bytes(world);
    void *at = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return NULL;
    comm_segment *segment = at;
    segment->magic = MAGIC;
    segment->world = world;
    return segment;
}

/* A reader that always meets a writer (one that died at it) takes what is there. */
void comm_note_read(comm_record *record, char note[COMM_NOTE_BYTES]) {
    for (int attempt = 0; attempt < 1000; attempt++) {
        uint32_t before = atomic_load(&record->note_version);
        memcpy(note, record->note, COMM_NOTE_BYTES);
        atomic_thread_fence(memory_order_acquire);
        if (!(before & 1) && atomic_load(&record->note_version) == before) break;
    }
    note[COMM_NOTE_BYTES - 1] = 0;
}

void ml_comm_progress(ml_comm *comm) {
    if (!comm->segment) return;
    comm_record *record = &comm->segment->ranks[comm->rank];
    atomic_fetch_add_explicit(&record->progress, 1, memory_order_relaxed);
}

void ml_comm_note(ml_comm *comm, const char *text) {
    if (!comm->segment) return;
    comm_record *record = &comm->segment->ranks[comm->rank];
    atomic_fetch_add(&record->note_version, 1);
    size_t length = strnlen(text, COMM_NOTE_BYTES - 1);
    memcpy(record->note, text, length);
    record->note[length] = 0;
    atomic_fetch_add(&record->note_version, 1);
    atomic_store(&record->busy, 0);
    ml_comm_progress(comm);
}

void ml_comm_busy(ml_comm *comm, const char *text) {
    ml_comm_note(comm, text);
    if (comm->segment) atomic_store(&comm->segment->ranks[comm->rank].busy, 1);
}

void ml_comm_done(ml_comm *comm) {
    ml_comm_note(comm, "the script");
}

bool comm_failure_set(comm_segment *segment, int rank, const char *text) {
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&segment->failed, &none, (uint32_t)rank + 1)) return false;
    snprintf(segment->failure, sizeof segment->failure, "%s", text);
    atomic_store(&segment->failure_ready, 1);
    return true;
}

bool comm_may_report(comm_segment *segment) {
    return !atomic_load(&segment->launched) && atomic_exchange(&segment->reported, 1) == 0;
}

/* Who set the failure may be killed before its text is ready: after a second it is reported
 * without. */
int comm_failure_get(comm_segment *segment, char text[COMM_FAILURE_BYTES]) {
    int rank = (int)atomic_load(&segment->failed) - 1;
    if (rank < 0) return -1;
    for (int i = 0; i < 1000 && !atomic_load(&segment->failure_ready); i++) usleep(1000);
    if (atomic_load(&segment->failure_ready))
        snprintf(text, COMM_FAILURE_BYTES, "%s", segment->failure);
    else
        snprintf(text, COMM_FAILURE_BYTES, "rank %d failed", rank);
    return rank;
}

/* The rank that is most likely held up by `rank` itself: one that waits for a message from or to
 * it, else one in a collective, else any that waits; -1: none does. */
static int who_waits(comm_segment *segment, int rank) {
    int found = -1, best = 0;
    for (int other = 0; other < segment->world && best < 3; other++) {
        uint64_t what = atomic_load(&segment->ranks[other].waiting);
        if (other == rank || !what) continue;
        int end = comm_described_rank(what);
        int score = end == rank ? 3 : end < 0 ? 2 : 1;
        if (score > best) found = other, best = score;
    }
    return found;
}

bool comm_accuse(comm_segment *segment, int rank, const char *why) {
    char text[COMM_FAILURE_BYTES], note[COMM_NOTE_BYTES], what[128];
    comm_record *record = &segment->ranks[rank];
    uint64_t waiting = atomic_load(&record->waiting);
    comm_note_read(record, note);
    int used = snprintf(text, sizeof text, "rank %d (pid %d) %s", rank, (int)record->pid, why);
    if (*note)
        used += snprintf(text + used, sizeof text - (size_t)used, "; last seen in: %s", note);
    if (waiting) {
        comm_describe_text(waiting, what, sizeof what);
        used += snprintf(text + used, sizeof text - (size_t)used, ", waiting in %s", what);
    }
    int other = who_waits(segment, rank);
    uint64_t theirs = other < 0 ? 0 : atomic_load(&segment->ranks[other].waiting);
    if (theirs) {
        comm_note_read(&segment->ranks[other], note);
        comm_describe_text(theirs, what, sizeof what);
        snprintf(text + used, sizeof text - (size_t)used, "; rank %d waits in %s%s%s", other, what,
                 *note ? ": " : "", note);
    }
    return comm_failure_set(segment, rank, text);
}
