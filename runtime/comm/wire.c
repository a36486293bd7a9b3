/* Small messages between hosts, in frames: kind, length, a number that counts the exchanges, and a
 * proof of these; then, where there are any, the bytes and a proof of them. No frame is acted upon
 * before its proof is checked. The lock is held while a frame is read or written, so that the
 * watcher, which looks at what has arrived without taking it, always sees the beginning of a frame.
 */
#include "runtime/base/clock.h"
#include "runtime/comm/wire_internal.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

typedef enum {
    FRAME_WORDS = 0x6d6c7501,
    FRAME_SHARE,
    FRAME_FAILURE,
    FRAME_FAREWELL,
    FRAME_BEAT,
    FRAME_SWAP,
    FRAME_PART
} frame_kind;
typedef struct {
    uint32_t kind, sequence; /* of a beat: what its rank is at (BEAT_...) */
    uint64_t bytes;
    uint8_t proof[SEAL_BYTES]; /* of what is above */
} frame;
enum { BEAT_BUSY = 1, BEAT_WAITS = 2, BEAT_PROGRESSES = 4 };
typedef struct {
    int32_t rank, unused;
    char text[COMM_FAILURE_BYTES];
} failure_message;

enum { BEAT_TICKS = 5 }; /* of the watcher */
static const double SLICE = 0.1, FRAME_SECONDS = 20, LAST_WORD_SECONDS = 1;

comm_wire *wire_new(int count) {
    comm_wire *wire = ml_alloc(sizeof *wire);
    if (!wire) return NULL;
    wire->ends = ml_alloc((size_t)count * sizeof *wire->ends);
    if (!wire->ends) {
        ml_free(wire);
        return NULL;
    }
    wire->count = count;
    for (int i = 0; i < count; i++) wire->ends[i].fd = -1;
    pthread_mutex_init(&wire->lock, NULL);
    return wire;
}

/* The rank at the other end. */
static int rank_at(const ml_comm *comm, int connection) {
    return comm->rank == 0 ? connection : 0;
}

static bool put_frame(ml_comm *comm, int connection, frame_kind kind, const void *bytes,
                      size_t size) {
    comm_wire *wire = comm->wire;
    wire_end *end = &wire->ends[connection];
    frame f = {kind, wire->sequence, size};
    uint8_t proof[SEAL_BYTES];
    double deadline = ml_clock_now() + FRAME_SECONDS;
    if (end->fd < 0) return true;
    pthread_mutex_lock(&wire->lock);
    seal_make(&end->out, &f, offsetof(frame, proof), f.proof);
    if (size) seal_make(&end->out, bytes, size, proof);
    bool good = join_write(end->fd, &f, sizeof f, deadline) &&
                join_write(end->fd, bytes, size, deadline) &&
                (!size || join_write(end->fd, proof, sizeof proof, deadline));
    pthread_mutex_unlock(&wire->lock);
    return good;
}

/* Closing while something is unread would make the other side lose our last words too. */
static void drain(int *fd, double deadline) {
    char bytes[4096];
    while (*fd >= 0 && join_read(*fd, bytes, 1, deadline))
        while (recv(*fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0) continue;
    join_close(fd);
}

void wire_free(ml_comm *comm) {
    comm_wire *wire = comm->wire;
    if (!wire) return;
    if (comm->segment && atomic_load(&comm->segment->failed)) wire_send_failure(comm);
    for (int i = 0; i < wire->count; i++) {
        put_frame(comm, i, FRAME_FAREWELL, NULL, 0);
        if (wire->ends[i].fd >= 0) shutdown(wire->ends[i].fd, SHUT_WR);
    }
    double deadline = ml_clock_now() + LAST_WORD_SECONDS;
    for (int i = 0; i < wire->count; i++) drain(&wire->ends[i].fd, deadline);
    pthread_mutex_destroy(&wire->lock);
    ml_free(wire->ends);
    ml_free(wire);
    comm->wire = NULL;
}

/* ---- Failures -------------------------------------------------------------------------------- */

static void lost(ml_comm *comm, int connection, const char *why) {
    char text[192];
    const char *host = comm->wire->ends[connection].who.host;
    snprintf(text, sizeof text, "%s%s%s", why, *host ? ": it was on " : "", host);
    comm_record *record = &comm->segment->ranks[rank_at(comm, connection)];
    atomic_store(&record->pid, (int32_t)comm->wire->ends[connection].who.pid);
    comm_accuse(comm->segment, rank_at(comm, connection), text);
}

/* Whether the other end sent these bytes, `ahead` after what was last taken. If not, this is the
 * last that is read there. */
static bool is_genuine(ml_comm *comm, int connection, uint64_t ahead, const void *bytes,
                       size_t size, const uint8_t proof[SEAL_BYTES]) {
    wire_end *end = &comm->wire->ends[connection];
    char why[128];
    if (!end->distrusted && seal_check(&end->in, ahead, bytes, size, proof)) return true;
    end->distrusted = true;
    snprintf(
        why, sizeof why,
        "has a connection that somebody interferes with: message %llu from it is not authentic",
        (unsigned long long)(end->in.number + ahead + 1));
    lost(comm, connection, why);
    return false;
}

static bool is_genuine_head(ml_comm *comm, int connection, const frame *f) {
    return is_genuine(comm, connection, 0, f, offsetof(frame, proof), f->proof);
}

static void take_failure(ml_comm *comm, failure_message *m) {
    m->text[sizeof m->text - 1] = 0;
    if (m->rank < 0 || m->rank >= comm->world) return;
    if (comm_failure_set(comm->segment, m->rank, m->text))
        atomic_store(&comm->segment->reported, 1); /* by who sent it */
}

void wire_send_failure(ml_comm *comm) {
    failure_message m = {.rank = -1};
    if (comm->wire->failure_sent) return;
    comm->wire->failure_sent = true;
    m.rank = comm_failure_get(comm->segment, m.text);
    for (int i = 0; i < comm->wire->count; i++) put_frame(comm, i, FRAME_FAILURE, &m, sizeof m);
}

/* What a beat reports of its rank. Rank 0's says busy where any rank is, and progress where
 * any shows it: the others are not connected to one another. */
static void take_beat(ml_comm *comm, int connection, uint32_t flags) {
    comm_record *record = &comm->segment->ranks[rank_at(comm, connection)];
    uint64_t waits = flags & BEAT_WAITS ? comm_describe(COMM_OUTSIDE, 0, 0, 0) : 0;
    atomic_store(&record->pid, (int32_t)comm->wire->ends[connection].who.pid);
    atomic_store(&record->busy, flags & BEAT_BUSY);
    atomic_store(&record->waiting, waits);
    if (flags & BEAT_PROGRESSES) atomic_fetch_add(&record->progress, 1);
}

/* What comes unasked: a beat, or that a rank parts. */
static bool is_news(const frame *f) {
    return f->kind == FRAME_BEAT || f->kind == FRAME_PART;
}

static void take_news(ml_comm *comm, int connection, const frame *f) {
    comm_record *record = &comm->segment->ranks[rank_at(comm, connection)];
    if (f->kind == FRAME_BEAT) take_beat(comm, connection, f->sequence);
    if (f->kind == FRAME_PART) atomic_fetch_add(&record->parted, 1);
}

/* No beat reports it any more: what the last one said was before it ended. */
static void take_farewell(ml_comm *comm, int connection) {
    comm_record *record = &comm->segment->ranks[rank_at(comm, connection)];
    atomic_store(&record->busy, 0);
    atomic_store(&record->waiting, 0);
    atomic_store(&record->state, COMM_DONE);
}

static uint32_t beat_flags(ml_comm *comm) {
    comm_record *own = &comm->segment->ranks[comm->rank];
    comm_survey seen = {atomic_load(&own->progress), .busy = atomic_load(&own->busy) != 0};
    if (comm->rank == 0) seen = comm_look(comm);
    bool progresses = seen.progress != comm->wire->progress;
    comm->wire->progress = seen.progress;
    return (seen.busy ? BEAT_BUSY : 0u) | (atomic_load(&own->waiting) ? BEAT_WAITS : 0u) |
           (progresses ? BEAT_PROGRESSES : 0u);
}

static bool has_ended(const ml_comm *comm, int connection) {
    return atomic_load(&comm->segment->ranks[rank_at(comm, connection)].state) == COMM_DONE;
}

/* News at the head of what has arrived are taken; a failure is read but left for the main thread.
 * What piles up behind a message that the main thread has yet to take counts as a sign of life. */
static void look(ml_comm *comm, int connection, double slice) {
    wire_end *end = &comm->wire->ends[connection];
    struct {
        frame head;
        failure_message failure;
        uint8_t proof[SEAL_BYTES];
    } seen;
    ssize_t count = recv(end->fd, &seen, sizeof seen, MSG_PEEK | MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) {
        lost(comm, connection, "died or lost its connection");
        return;
    }
    bool whole = count >= (ssize_t)sizeof seen.head;
    if (whole && !is_genuine_head(comm, connection, &seen.head)) return;
    if (count == (ssize_t)sizeof seen && seen.head.kind == FRAME_FAILURE &&
        is_genuine(comm, connection, 1, &seen.failure, sizeof seen.failure, seen.proof))
        take_failure(comm, &seen.failure);
    if (whole && seen.head.kind == FRAME_FAREWELL) {
        take_farewell(comm, connection);
        return;
    }
    int unread = 0;
    ioctl(end->fd, FIONREAD, &unread);
    end->silent = unread == end->unread ? end->silent + slice : 0;
    end->unread = unread;
    while (recv(end->fd, &seen.head, sizeof seen.head, MSG_PEEK | MSG_DONTWAIT) ==
               (ssize_t)sizeof seen.head &&
           is_news(&seen.head)) {
        if (!is_genuine_head(comm, connection, &seen.head)) return;
        recv(end->fd, &seen.head, sizeof seen.head, MSG_DONTWAIT);
        end->in.number++;
        take_news(comm, connection, &seen.head);
        end->unread = 0;
        end->silent = 0;
    }
    if (end->silent > comm_stale_limit(comm->timeout))
        lost(comm, connection, "has been stopped or frozen");
}

/* A beat is left out where the other side takes nothing. */
static void beat(wire_end *end, uint32_t flags) {
    frame f = {.kind = FRAME_BEAT, .sequence = flags};
    seal next = end->out;
    seal_make(&next, &f, offsetof(frame, proof), f.proof);
    ssize_t count = send(end->fd, &f, sizeof f, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count > 0) end->out = next;
    if (count > 0 && count < (ssize_t)sizeof f)
        join_write(end->fd, (char *)&f + count, sizeof f - (size_t)count,
                   ml_clock_now() + FRAME_SECONDS);
}

void wire_watch(ml_comm *comm, double slice) {
    comm_wire *wire = comm->wire;
    if (atomic_load(&comm->segment->failed)) {
        wire_send_failure(comm);
        return;
    }
    if (pthread_mutex_trylock(&wire->lock) != 0) return;
    bool due =
        ++wire->ticks >= BEAT_TICKS || wire->ticks * slice > comm_stale_limit(comm->timeout) / 4;
    uint32_t flags = due ? beat_flags(comm) : 0;
    if (due) wire->ticks = 0;
    for (int i = 0; i < wire->count; i++) {
        if (wire->ends[i].fd < 0 || wire->ends[i].distrusted || has_ended(comm, i)) continue;
        look(comm, i, slice);
        if (due) beat(&wire->ends[i], flags);
    }
    pthread_mutex_unlock(&wire->lock);
}

/* ---- Exchanges ------------------------------------------------------------------------------- */

/* How long a message does not come. */
typedef struct {
    double seconds, last; /* without progress of others; when it was last looked at */
    uint64_t progress;
} delay;

static bool waits(const ml_comm *comm, int rank) {
    return atomic_load(&comm->segment->ranks[rank].waiting) != 0;
}

/* Accuses the rank for which this one waits for too long. Rank 0 says first who it is: of those
 * that do not wait themselves. */
static void look_at_delay(ml_comm *comm, int connection, delay *d) {
    comm_survey all = comm_look(comm);
    double now = ml_clock_now(), slice = now - d->last;
    if (all.progress != d->progress) d->seconds = 0;
    *d = (delay){d->seconds + (slice < 2 * SLICE ? slice : 2 * SLICE), now, all.progress};
    double limit = comm_late_limit(comm, all.busy);
    if (waits(comm, rank_at(comm, connection))) limit = comm_late_waiting(limit);
    if (comm->rank != 0) limit += COMM_HEARD;
    if (d->seconds <= limit) return;
    int late = connection;
    for (int i = 1; comm->rank == 0 && waits(comm, late) && i < comm->world; i++)
        if (!waits(comm, i)) late = i;
    lost(comm, late, "does not answer");
}

/* Until there is something to read, of which beats are no answer. */
static ml_status wait_for(ml_comm *comm, int connection, delay *d) {
    ml_status status = ML_OK;
    for (bool there = false; !there && status == ML_OK;) {
        there = join_wait(comm->wire->ends[connection].fd, POLLIN, ml_clock_now() + SLICE);
        look_at_delay(comm, connection, d);
        status = comm_failure_report(comm);
    }
    return status;
}

/* What follows a frame's head. */
static bool take_bytes(ml_comm *comm, int connection, void *bytes, size_t size, double deadline) {
    wire_end *end = &comm->wire->ends[connection];
    uint8_t proof[SEAL_BYTES];
    if (!join_read(end->fd, bytes, size, deadline) ||
        !join_read(end->fd, proof, sizeof proof, deadline)) {
        lost(comm, connection, "died or lost its connection");
        return false;
    }
    if (!is_genuine(comm, connection, 0, bytes, size, proof)) return false;
    end->in.number++;
    return true;
}

/* Holding the lock: the frame that begins to arrive. False: a failure, or *again where it was only
 * a beat. */
static bool take_frame(ml_comm *comm, int connection, frame_kind kind, void *bytes, size_t size,
                       bool *again) {
    wire_end *end = &comm->wire->ends[connection];
    double deadline = ml_clock_now() + FRAME_SECONDS;
    failure_message m;
    frame f;
    end->silent = 0;
    if (end->distrusted) return false;
    if (!join_read(end->fd, &f, sizeof f, deadline)) {
        lost(comm, connection, "died or lost its connection");
        return false;
    }
    if (!is_genuine_head(comm, connection, &f)) return false;
    end->in.number++;
    if (is_news(&f)) {
        take_news(comm, connection, &f);
        *again = true;
    } else if (f.kind == FRAME_FAILURE && f.bytes == sizeof m) {
        if (take_bytes(comm, connection, &m, sizeof m, deadline)) take_failure(comm, &m);
    } else if (f.kind == FRAME_FAREWELL) {
        lost(comm, connection, "has ended while others wait for it");
    } else if (f.kind != (uint32_t)kind || f.sequence != comm->wire->sequence || f.bytes != size) {
        lost(comm, connection, "is at another place of the program");
    } else {
        return take_bytes(comm, connection, bytes, size, deadline);
    }
    return false;
}

static ml_status get_frame(ml_comm *comm, int connection, frame_kind kind, void *bytes,
                           size_t size) {
    comm_record *own = &comm->segment->ranks[comm->rank];
    delay d = {.last = ml_clock_now()};
    for (bool again = true; again;) {
        atomic_store(&own->waiting, comm_describe(COMM_WORDS, 0, 0, 0));
        ml_status status = wait_for(comm, connection, &d);
        atomic_store(&own->waiting, 0);
        if (status != ML_OK) return status;
        again = false;
        pthread_mutex_lock(&comm->wire->lock);
        /* The watcher may have taken the beat that woke us. */
        bool there = join_wait(comm->wire->ends[connection].fd, POLLIN, ml_clock_now() + 0.001);
        bool good = there && take_frame(comm, connection, kind, bytes, size, &again);
        pthread_mutex_unlock(&comm->wire->lock);
        if (good) return ML_OK;
        again = again || !there;
    }
    return comm_failure_report(comm);
}

static ml_status to_all(ml_comm *comm, frame_kind kind, const void *bytes, size_t size) {
    for (int i = 1; i < comm->world; i++)
        if (!put_frame(comm, i, kind, bytes, size)) {
            lost(comm, i, "died or lost its connection");
            return comm_failure_report(comm);
        }
    return ML_OK;
}

ml_status wire_words(ml_comm *comm, uint64_t mine, uint64_t *words) {
    size_t size = (size_t)comm->world * sizeof *words;
    ml_status status = comm_failure_report(comm);
    comm->wire->sequence++;
    words[comm->rank] = mine;
    if (comm->rank != 0) {
        if (status == ML_OK && !put_frame(comm, 0, FRAME_WORDS, &mine, sizeof mine))
            lost(comm, 0, "died or lost its connection");
        return status == ML_OK ? get_frame(comm, 0, FRAME_WORDS, words, size) : status;
    }
    for (int i = 1; status == ML_OK && i < comm->world; i++)
        status = get_frame(comm, i, FRAME_WORDS, &words[i], sizeof *words);
    return status == ML_OK ? to_all(comm, FRAME_WORDS, words, size) : status;
}

ml_status wire_share(ml_comm *comm, void *bytes, size_t size) {
    ml_status status = comm_failure_report(comm);
    comm->wire->sequence++;
    if (status != ML_OK) return status;
    return comm->rank == 0 ? to_all(comm, FRAME_SHARE, bytes, size)
                           : get_frame(comm, 0, FRAME_SHARE, bytes, size);
}

/* ---- Pairs, and the end ---------------------------------------------------------------------- */

typedef struct {
    int64_t other;
    char bytes[];
} swap_message;

/* Rank 0 takes what all have for one another, and sends each what is for it. */
static ml_status swap_all(ml_comm *comm, swap_message *mine, char *room, void *theirs,
                          size_t bytes) {
    size_t size = sizeof *mine + bytes;
    ml_status status = ML_OK;
    memcpy(room, mine, size);
    for (int i = 1; status == ML_OK && i < comm->world; i++)
        status = get_frame(comm, i, FRAME_SWAP, room + (size_t)i * size, size);
    for (int i = 0; status == ML_OK && i < comm->world; i++) {
        int64_t other = ((swap_message *)(void *)(room + (size_t)i * size))->other;
        swap_message *answer = mine; /* rank 0's answer is in the room by now */
        memset(answer->bytes, 0, bytes);
        if (other >= 0 && other < comm->world)
            memcpy(answer->bytes, room + (size_t)other * size + sizeof *mine, bytes);
        if (i == 0) memcpy(theirs, answer->bytes, bytes);
        if (i > 0 && !put_frame(comm, i, FRAME_SWAP, answer->bytes, bytes))
            lost(comm, i, "died or lost its connection");
        status = comm_failure_report(comm);
    }
    return status;
}

ml_status wire_swap(ml_comm *comm, int other, const void *mine, void *theirs, size_t bytes) {
    size_t size = sizeof(swap_message) + bytes;
    size_t messages = comm->rank == 0 ? 1 + (size_t)comm->world : 1;
    ml_status status = comm_failure_report(comm);
    comm->wire->sequence++;
    if (status != ML_OK) return status;
    swap_message *message = ml_alloc(messages * size);
    if (!message) return ml_fail(ML_NO_MEMORY, "no memory for messages of pairs of ranks");
    message->other = other;
    memcpy(message->bytes, mine, bytes);
    if (comm->rank == 0) {
        status = swap_all(comm, message, (char *)message + size, theirs, bytes);
    } else {
        if (!put_frame(comm, 0, FRAME_SWAP, message, size))
            lost(comm, 0, "died or lost its connection");
        status = get_frame(comm, 0, FRAME_SWAP, theirs, bytes);
    }
    ml_free(message);
    return status;
}

/* Until the other end has parted so many times, which the watcher may receive first, or sends
 * something else, or has ended. */
static void await_parting(ml_comm *comm, int connection, uint32_t times, double deadline) {
    const comm_record *record = &comm->segment->ranks[rank_at(comm, connection)];
    int fd = comm->wire->ends[connection].fd;
    for (bool over = false; !over;) {
        over = atomic_load(&record->parted) >= times || has_ended(comm, connection) ||
               ml_clock_now() >= deadline || atomic_load(&comm->segment->failed);
        if (over || !join_wait(fd, POLLIN, ml_clock_now() + SLICE)) continue;
        frame f;
        pthread_mutex_lock(&comm->wire->lock);
        ssize_t count = recv(fd, &f, sizeof f, MSG_PEEK | MSG_DONTWAIT);
        over = count >= 0 ? count < (ssize_t)sizeof f || !is_news(&f) : errno != EAGAIN;
        if (count > 0 && !over) over = !is_genuine_head(comm, connection, &f);
        if (count > 0 && !over) {
            recv(fd, &f, sizeof f, 0);
            comm->wire->ends[connection].in.number++;
            take_news(comm, connection, &f);
        }
        pthread_mutex_unlock(&comm->wire->lock);
    }
}

void wire_part(ml_comm *comm, uint32_t times, double deadline) {
    if (comm->rank != 0) {
        if (put_frame(comm, 0, FRAME_PART, NULL, 0)) await_parting(comm, 0, times, deadline);
        return;
    }
    for (int i = 1; i < comm->world; i++) await_parting(comm, i, times, deadline);
    for (int i = 1; i < comm->world; i++) put_frame(comm, i, FRAME_PART, NULL, 0);
}
