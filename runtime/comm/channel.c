/* Channels: messages from one rank to another of the same host, through a ring in shared memory.
 *
 * The area of a channel is a page of counters and a ring of `room` bytes, at the end of the
 * segment's file: rank 0 lengthens the file, the two ends map the area, and what no message touched
 * takes no memory. The sender alone writes the first group of counters, the receiver the second.
 * Bytes and messages are counted from the beginning, never wrapped. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/comm/wire_internal.h"

enum {
    MESSAGES = 256,   /* under way at most, whatever their sizes */
    PART = 512 << 10, /* bytes copied at once, so that both ends copy at the same time */
};

typedef struct {
    _Alignas(COMM_LINE) _Atomic uint64_t sent, written;  /* messages begun, bytes */
    _Atomic uint32_t filled, receiver_sleeps;            /* `filled` changes with the two above */
    _Alignas(COMM_LINE) _Atomic uint64_t received, read; /* messages ended, bytes */
    _Atomic uint32_t freed, sender_sleeps;
    _Alignas(COMM_LINE) int64_t sizes[MESSAGES]; /* of the messages that are under way */
} ring;
_Static_assert(sizeof(ring) <= COMM_CONTROL, "the counters of a channel fit before its ring");

struct ml_channel {
    ml_comm *comm;
    ml_channel *next; /* in its bucket */
    int from, to, tag, spins;
    int64_t room;
    uint64_t offset, bytes; /* of its area, in the segment's file */
    ring *ring;             /* NULL where this rank is neither end, or on another host */
    uint64_t what;          /* is being done */
    uint32_t seen;          /* of the counter that is waited for */
};

/* ---- Making one ------------------------------------------------------------------------------ */

static bool is_end(const ml_channel *e) {
    return e->from == e->comm->rank || e->to == e->comm->rank;
}

static ml_channel *find(const ml_comm *comm, int bucket, int from, int to, int tag) {
    ml_channel *e = comm->channels[bucket];
    while (e && (e->from != from || e->to != to || e->tag != tag)) e = e->next;
    return e;
}

/* All ranks must mean the same channel. */
static ml_status agree(ml_comm *comm, uint64_t mine, int from, int to, int tag) {
    uint64_t *words = ml_alloc((size_t)comm->world * sizeof *words);
    if (!words) return ml_fail(ML_NO_MEMORY, "no memory for a channel between ranks");
    ml_status status = comm_words(comm->groups[0], mine, words);
    for (int i = 0; status == ML_OK && i < comm->world; i++)
        if (words[i] != mine)
            status = ml_fail(ML_INVALID,
                             "ranks %d and %d disagree on the channel from rank %d to %d (tag %d)",
                             comm->rank, i, from, to, tag);
    ml_free(words);
    return status;
}

/* Give up an area in which no message is under way: its memory, not its place in the file. The
 * receiver sees to both: the sender might look at counters whose memory it has just given back. */
static ml_status leave(ml_channel *e) {
    ring *r = e->ring;
    bool receives = e->to == e->comm->rank;
    if (!r) return ML_OK;
    if (receives && atomic_load(&r->sent) != atomic_load(&r->received))
        return ml_fail(ML_INTERNAL,
                       "the channel from rank %d to %d (tag %d) grows while messages are under way",
                       e->from, e->to, e->tag);
    munmap(r, e->bytes);
    e->ring = NULL;
    if (receives)
        fallocate(e->comm->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)e->offset,
                  (off_t)e->bytes);
    return ML_OK;
}

/* A new area of the file; the ranks agree before an end maps it. */
static ml_status place(ml_channel *e, int64_t room, uint64_t agreed) {
    ml_comm *comm = e->comm;
    uint64_t page = COMM_CONTROL;
    uint64_t begin = comm->channels_end ? comm->channels_end : comm->segment->bytes;
    uint64_t bytes = COMM_CONTROL + ((uint64_t)room + page - 1) / page * page;
    if (comm->rank == 0 && ftruncate(comm->fd, (off_t)(begin + bytes)) != 0)
        return ml_fail(ML_NO_MEMORY, "cannot get %lld bytes of shared memory for messages: %s",
                       (long long)bytes, strerror(errno));
    ml_status status = agree(comm, agreed, e->from, e->to, e->tag);
    if (status != ML_OK) return status;
    comm->channels_end = begin + bytes;
    if (is_end(e)) {
        if ((status = leave(e)) != ML_OK) return status;
        void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, comm->fd,
                        (off_t)begin);
        if (at == MAP_FAILED)
            return ml_fail(ML_NO_MEMORY, "cannot map %lld bytes of shared memory for messages: %s",
                           (long long)bytes, strerror(errno));
        e->ring = at;
    }
    e->offset = begin;
    e->bytes = bytes;
    e->room = room;
    return ML_OK;
}

static ml_channel *channel_new(ml_comm *comm, int bucket, int from, int to, int tag) {
    ml_channel *e = ml_alloc(sizeof *e);
    if (!e) return NULL;
    *e = (ml_channel){.comm = comm,
                      .next = comm->channels[bucket],
                      .from = from,
                      .to = to,
                      .tag = tag,
                      .spins = comm->spins};
    comm->channels[bucket] = e;
    return e;
}

ml_status ml_comm_channel(ml_comm *comm, int from, int to, int tag, int64_t room,
                          ml_channel **channel) {
    *channel = NULL;
    if (from < 0 || to < 0 || from >= comm->world || to >= comm->world || from == to || room < 1)
        return ml_fail(ML_INTERNAL, "a channel from rank %d to %d of %d with room for %lld bytes",
                       from, to, comm->world, (long long)room);
    int64_t key[] = {from, to, tag, room};
    int bucket = (int)(ml_hash(key, 3 * sizeof *key, 0) % COMM_CHANNEL_BUCKETS);
    ml_channel *e = find(comm, bucket, from, to, tag);
    bool known = e != NULL;
    if (!e && !(e = channel_new(comm, bucket, from, to, tag)))
        return ml_fail(ML_NO_MEMORY, "no memory for a channel between ranks");
    if (!comm->wire) {
        uint64_t agreed = ml_hash(key, sizeof key, known);
        ml_status status =
            known && room <= e->room ? agree(comm, agreed, from, to, tag) : place(e, room, agreed);
        if (status != ML_OK) return status;
    }
    if (is_end(e)) *channel = e;
    return ML_OK;
}

void comm_channels_free(ml_comm *comm) {
    for (int i = 0; i < COMM_CHANNEL_BUCKETS; i++)
        while (comm->channels[i]) {
            ml_channel *e = comm->channels[i];
            comm->channels[i] = e->next;
            if (e->ring) munmap(e->ring, e->bytes);
            ml_free(e);
        }
}

int ml_channel_from(const ml_channel *channel) {
    return channel->from;
}

int ml_channel_to(const ml_channel *channel) {
    return channel->to;
}

/* ---- Messages -------------------------------------------------------------------------------- */

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static bool sending(const ml_channel *e) {
    return e->from == e->comm->rank;
}

/* The other end, unless it has continued. */
static int missing(const void *argument) {
    const ml_channel *e = argument;
    uint32_t now = atomic_load(sending(e) ? &e->ring->freed : &e->ring->filled);
    return now != e->seen ? -1 : sending(e) ? e->to : e->from;
}

/* Wait for the other end's next change. */
static ml_status wait_for_change(ml_channel *e) {
    ring *r = e->ring;
    comm_wait wait = {.word = sending(e) ? &r->freed : &r->filled,
                      .sleepers = sending(e) ? &r->sender_sleeps : &r->receiver_sleeps,
                      .value = e->seen,
                      .what = e->what,
                      .missing = missing,
                      .argument = e};
    return comm_sleep(e->comm, &wait, &e->spins);
}

static void wake_other(ml_channel *e) {
    ring *r = e->ring;
    _Atomic uint32_t *word = sending(e) ? &r->filled : &r->freed;
    atomic_fetch_add(word, 1);
    comm_wake(word, sending(e) ? &r->receiver_sleeps : &r->sender_sleeps);
}

static ml_status start(ml_channel *e, comm_kind kind, int64_t bytes) {
    ml_comm *comm = e->comm;
    int end = kind == COMM_SEND ? e->from : e->to, other = kind == COMM_SEND ? e->to : e->from;
    if (comm->rank != end || bytes < 0)
        return ml_fail(ML_INTERNAL, "rank %d is at the wrong end of the channel from %d to %d",
                       comm->rank, e->from, e->to);
    if (comm->wire)
        return ml_fail(ML_INVALID,
                       "pipeline stages on the CPU must be on one host, and rank %d is on another; "
                       "use GPUs, or start all ranks on one host",
                       comm->wire->other_rank);
    e->what = comm_describe_message(kind, other, e->tag, bytes);
    ml_comm_progress(comm);
    return atomic_load(&comm->segment->failed) ? comm_failure_report(comm) : ML_OK;
}

/* Between memory and the ring, which begins again at its end. */
static void copy_in(ml_channel *e, uint64_t at, const char *from, uint64_t bytes) {
    char *buffer = (char *)e->ring + COMM_CONTROL;
    uint64_t begin = at % (uint64_t)e->room, first = least(bytes, (uint64_t)e->room - begin);
    if (first > 0) memcpy(buffer + begin, from, first);
    if (first < bytes) memcpy(buffer, from + first, bytes - first);
}

static void copy_out(const ml_channel *e, uint64_t at, char *to, uint64_t bytes) {
    const char *buffer = (const char *)e->ring + COMM_CONTROL;
    uint64_t begin = at % (uint64_t)e->room, first = least(bytes, (uint64_t)e->room - begin);
    if (first > 0) memcpy(to, buffer + begin, first);
    if (first < bytes) memcpy(to + first, buffer, bytes - first);
}

/* How much of `left` bytes fits now; not less than makes waking the receiver worth it. */
static bool has_room(const ml_channel *e, uint64_t left, uint64_t *part) {
    ring *r = e->ring;
    uint64_t room = (uint64_t)e->room;
    uint64_t free = room - (atomic_load(&r->written) - atomic_load(&r->read));
    *part = least(least(left, free), PART);
    return *part >= least(left, least((room + 1) / 2, PART));
}

ml_status ml_channel_send(ml_channel *e, const void *memory, int64_t bytes) {
    ml_status status = start(e, COMM_SEND, bytes);
    ring *r = e->ring;
    bool begun = false;
    for (uint64_t at = 0, part; status == ML_OK && (at < (uint64_t)bytes || !begun);) {
        e->seen = atomic_load(&r->freed);
        bool full = !begun && atomic_load(&r->sent) - atomic_load(&r->received) == MESSAGES;
        if (full || !has_room(e, (uint64_t)bytes - at, &part)) {
            status = wait_for_change(e);
            continue;
        }
        uint64_t written = atomic_load(&r->written);
        copy_in(e, written, (const char *)memory + at, part);
        atomic_store(&r->written, written + part);
        if (!begun) {
            uint64_t sent = atomic_load(&r->sent);
            r->sizes[sent % MESSAGES] = bytes;
            atomic_store(&r->sent, sent + 1);
            begun = true;
        }
        at += part;
        wake_other(e);
    }
    return status;
}

/* Another size than this end expects: the ranks run different programs. */
static ml_status differs(ml_channel *e, int64_t sent, int64_t expected) {
    char theirs[COMM_NOTE_BYTES], own[COMM_NOTE_BYTES];
    comm_segment *segment = e->comm->segment;
    comm_note_read(&segment->ranks[e->from], theirs);
    comm_note_read(&segment->ranks[e->to], own);
    ml_fail(ML_INVALID,
            "the ranks run different programs: rank %d sends %lld bytes to rank %d (tag %d; %s), "
            "which expects %lld (%s)",
            e->from, (long long)sent, e->to, e->tag, theirs, (long long)expected, own);
    ml_comm_fail(e->comm, ml_error_last()->text);
    return ML_INVALID;
}

static ml_status wait_for_message(ml_channel *e, int64_t bytes) {
    ring *r = e->ring;
    uint64_t received = atomic_load(&r->received);
    for (;;) {
        e->seen = atomic_load(&r->filled);
        if (atomic_load(&r->sent) != received) break;
        ML_TRY(wait_for_change(e));
    }
    int64_t sent = r->sizes[received % MESSAGES];
    return sent == bytes ? ML_OK : differs(e, sent, bytes);
}

ml_status ml_channel_receive(ml_channel *e, void *memory, int64_t bytes) {
    ml_status status = start(e, COMM_RECEIVE, bytes);
    if (status != ML_OK || (status = wait_for_message(e, bytes)) != ML_OK) return status;
    ring *r = e->ring;
    bool ended = false;
    for (uint64_t at = 0; status == ML_OK && !ended;) {
        e->seen = atomic_load(&r->filled);
        uint64_t read = atomic_load(&r->read), left = (uint64_t)bytes - at;
        uint64_t part = least(least(left, PART), atomic_load(&r->written) - read);
        if (part == 0 && left > 0) {
            status = wait_for_change(e);
            continue;
        }
        copy_out(e, read, (char *)memory + at, part);
        atomic_store(&r->read, read + part);
        at += part;
        ended = at == (uint64_t)bytes;
        if (ended) atomic_store(&r->received, atomic_load(&r->received) + 1);
        wake_other(e);
    }
    return status;
}
