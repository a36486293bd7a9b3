#define _GNU_SOURCE
/* Streams, events and graphs of the emulator.
 *
 * A stream is a queue of work. The first stream of a process does its work as soon as it may; the
 * others do theirs as late as is allowed: when somebody waits for an event behind it, asks for it,
 * or nothing else can go on. So a missing wait is seen: what it should have waited for is not there
 * yet, or works with memory that others have written since. With EMULATOR_EARLY=1 the first one is
 * late instead, and the others are not. A thread makes all of it continue while the process itself
 * does something else for long. */
#include <cuda.h>

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fibers.h"

enum { STREAMS = 64 };

typedef struct {
    int (*call)(void *);
    void *data;
} work;
typedef struct {
    work *at;
    long head, room;  /* at[head] is the next one */
    long count, done; /* of all work ever put here */
    int used, late;
    int forked;          /* has joined the capture that is going on */
    long captured;       /* pieces of work in it */
    long known[STREAMS]; /* how many of each stream's come before what is put here next */
} stream;
typedef struct {
    stream *on;
    long position;
    int recorded_in_capture;
    long known[STREAMS];
    double seconds; /* when it passed, outside of graphs */
} event;
typedef struct {
    stream *on;
    work what;
} entry;
typedef struct {
    entry *at;
    int count;
} recording;

static stream streams[STREAMS];
static stream *capturing; /* the stream on which it began */
static recording now;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static unsigned long calls; /* so far: none for a while lets the thread go on */

static int advance(stream *s, long position, int others);

static void enter(void) {
    pthread_mutex_lock(&lock);
    calls++;
}
static void leave(void) {
    pthread_mutex_unlock(&lock);
}

static void *keep_going(void *unused) {
    unsigned long seen = 0;
    (void)unused;
    for (;; usleep(5000)) {
        pthread_mutex_lock(&lock);
        for (int i = 0; seen == calls && i < STREAMS; i++)
            advance(&streams[i], streams[i].count, 0);
        seen = calls;
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

/* ---- Queues ---- */
static void put(stream *s, work what) {
    long waiting = s->count - s->done;
    if (s->head + waiting == s->room) {
        for (long i = 0; i < waiting; i++) s->at[i] = s->at[s->head + i];
        s->head = 0;
        if (2 * waiting >= s->room) {
            s->room = 2 * s->room + 16;
            s->at = realloc(s->at, (size_t)s->room * sizeof *s->at);
        }
    }
    s->at[s->head + waiting] = what;
    s->count++;
    if (!s->late) advance(s, s->count, 0);
}

/* Work off a queue up to a position; whether that is reached. Where it is not, the other streams go
 * on too if `others` says so. */
static int advance(stream *s, long position, int others) {
    while (s->done < position && s->at[s->head].call(s->at[s->head].data)) s->head++, s->done++;
    if (s->done >= position) return 1;
    for (int i = 0; others && i < STREAMS; i++)
        if (&streams[i] != s) advance(&streams[i], streams[i].count, 0);
    return 0;
}

static void wait_until(stream *s, long position) {
    for (int tries = 0;; tries++) {
        enter();
        int there = advance(s, position, tries > 0);
        leave();
        if (there) return;
        if (tries > 20)
            usleep(200);
        else
            sched_yield();
    }
}

static stream *stream_of(void *handle) {
    return handle ? handle : &streams[0];
}

static void record_entry(stream *s, work what) {
    now.at = realloc(now.at, (size_t)(now.count + 1) * sizeof *now.at);
    now.at[now.count++] = (entry){s, what};
}

void emu_enqueue(void *handle, int (*call)(void *), void *data) {
    stream *s = stream_of(handle);
    if (!capturing) {
        enter();
        put(s, (work){call, data});
        leave();
        return;
    }
    if (s != capturing && !s->forked) emu_complain("a stream that is not captured is used");
    s->captured++;
    record_entry(s, (work){call, data});
}

void emu_finish(void) {
    for (int i = 0; i < STREAMS; i++) wait_until(&streams[i], streams[i].count);
}

int emu_waits(void) {
    static int waits = -1;
    if (waits < 0) waits = getenv("EMULATOR_WAITS") != NULL;
    return waits;
}

/* ---- Events: {on, position} is what they stand for ---- */
typedef struct {
    event *what;
    stream *on;
} event_work;

/* Both run where the graph is launched or the call is made, not from the queue. */
static void note_event(event *e, stream *s) {
    e->on = s;
    e->position = s->count;
}
static int stamp(void *data) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    ((event *)data)->seconds = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    return 1;
}
static int passed(void *data) {
    const event *e = data;
    return advance(e->on, e->position, 0);
}
static void wait_for_event(stream *s, const event *e) {
    event *kept;
    if (!e->on || e->on == s) return;
    kept = malloc(sizeof *kept);
    *kept = *e;
    put(s, (work){passed, kept});
}
static int note_marker(void *data) {
    (void)data;
    return 1;
}
static int wait_marker(void *data) {
    (void)data;
    return 1;
}

static CUresult record(event *e, stream *s) {
    e->recorded_in_capture = capturing != NULL;
    if (!capturing) {
        enter();
        put(s, (work){stamp, e});
        note_event(e, s);
        leave();
        return CUDA_SUCCESS;
    }
    if (s != capturing && !s->forked) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    event_work *w = malloc(sizeof *w);
    *w = (event_work){e, s};
    e->on = s;
    s->known[s - streams] = s->captured;
    memcpy(e->known, s->known, sizeof e->known);
    record_entry(s, (work){note_marker, w});
    return CUDA_SUCCESS;
}

static CUresult wait_event(stream *s, event *e) {
    if (!capturing) {
        if (e->recorded_in_capture) return CUDA_ERROR_CAPTURED_EVENT;
        enter();
        wait_for_event(s, e);
        leave();
        return CUDA_SUCCESS;
    }
    if (!e->recorded_in_capture) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    if (s != capturing) s->forked = 1;
    for (int i = 0; i < STREAMS; i++)
        if (s->known[i] < e->known[i]) s->known[i] = e->known[i];
    event_work *w = malloc(sizeof *w);
    *w = (event_work){e, s};
    record_entry(s, (work){wait_marker, w});
    return CUDA_SUCCESS;
}

void emu_order(void *earlier, void *later) {
    const stream *s = stream_of(earlier);
    if (s == stream_of(later)) return;
    if (capturing && s != capturing && !s->forked) return; /* it has nothing in the graph */
    event *e = calloc(1, sizeof *e);
    record(e, stream_of(earlier));
    wait_event(stream_of(later), e);
}

CUresult cuEventCreate(CUevent *result, unsigned flags) {
    (void)flags;
    *result = (CUevent)calloc(1, sizeof(event));
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent e) {
    (void)e; /* graphs may still name it */
    return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent e, CUstream s) {
    return record((event *)e, stream_of(s));
}
/* In a capture: of an event that others wait for, or record, outside of the graph. */
static CUresult external(stream *s, event *e, int (*marker)(void *)) {
    if (!capturing) return CUDA_ERROR_INVALID_VALUE;
    if (s != capturing && !s->forked) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    event_work *w = malloc(sizeof *w);
    *w = (event_work){e, s};
    if (marker == note_marker) e->recorded_in_capture = 0;
    record_entry(s, (work){marker, w});
    return CUDA_SUCCESS;
}
CUresult cuEventRecordWithFlags(CUevent e, CUstream s, unsigned flags) {
    if (!(flags & CU_EVENT_RECORD_EXTERNAL)) return record((event *)e, stream_of(s));
    return external(stream_of(s), (event *)e, note_marker);
}
CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags) {
    if (!(flags & CU_EVENT_WAIT_EXTERNAL)) return wait_event(stream_of(s), (event *)e);
    return external(stream_of(s), (event *)e, wait_marker);
}
CUresult cuEventSynchronize(CUevent handle) {
    const event *e = (const event *)handle;
    if (e->on) wait_until(e->on, e->position);
    return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent handle) {
    const event *e = (const event *)handle;
    enter();
    int there = !e->on || advance(e->on, e->position, 1);
    leave();
    return there ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuEventElapsedTime(float *ms, CUevent begin, CUevent end) {
    const event *from = (const event *)begin, *to = (const event *)end;
    if (!from->on || !to->on || from->recorded_in_capture || to->recorded_in_capture)
        return CUDA_ERROR_INVALID_HANDLE;
    enter();
    int there = advance(from->on, from->position, 0) && advance(to->on, to->position, 0);
    leave();
    if (!there) return CUDA_ERROR_NOT_READY;
    *ms = (float)(1e3 * (to->seconds - from->seconds));
    return CUDA_SUCCESS;
}

/* ---- Streams ---- */
CUresult cuStreamCreate(CUstream *result, unsigned flags) {
    int i = 0;
    (void)flags;
    while (i < STREAMS && streams[i].used) i++;
    if (i == STREAMS) return CUDA_ERROR_OUT_OF_MEMORY;
    static pthread_t thread;
    if (!thread) pthread_create(&thread, NULL, keep_going, NULL);
    streams[i].used = 1;
    streams[i].late = (i > 0) != (getenv("EMULATOR_EARLY") != NULL);
    *result = (CUstream)&streams[i];
    return CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(CUstream *result, unsigned flags, int priority) {
    (void)priority;
    return cuStreamCreate(result, flags);
}
CUresult cuStreamDestroy(CUstream handle) {
    stream *s = stream_of(handle);
    wait_until(s, s->count);
    s->used = 0;
    return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream handle) {
    stream *s = stream_of(handle);
    if (capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    wait_until(s, s->count);
    return CUDA_SUCCESS;
}
CUresult cuStreamQuery(CUstream handle) {
    stream *s = stream_of(handle);
    if (capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    enter();
    int there = advance(s, s->count, 1);
    leave();
    return there ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* ---- Graphs ---- */
void emu_note(const char *what, const char *name) {
    const char *path = getenv("EMULATOR_LAUNCHES");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%s %s\n", what, name);
    fclose(file);
}

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    (void)mode;
    emu_note("capture", "");
    now = (recording){0};
    capturing = stream_of(handle);
    for (int i = 0; i < STREAMS; i++) {
        streams[i].forked = 0, streams[i].captured = 0;
        memset(streams[i].known, 0, sizeof streams[i].known);
    }
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    recording *kept = malloc(sizeof *kept);
    const stream *first = capturing;
    (void)handle;
    *kept = now;
    capturing = NULL;
    *graph = (CUgraph)kept;
    for (int i = 0; i < STREAMS; i++)
        if (&streams[i] != first && first->known[i] < streams[i].captured)
            return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    (void)flags;
    if (emu_waits()) emu_finish();
    recording *kept = malloc(sizeof *kept);
    *kept = *(recording *)graph;
    *exec = (CUgraphExec)kept;
    return CUDA_SUCCESS;
}
CUresult cuGraphUpload(CUgraphExec exec, CUstream handle) {
    (void)exec, (void)handle;
    return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle) {
    const recording *r = (const recording *)exec;
    (void)handle;
    enter();
    for (int i = 0; i < r->count; i++) {
        const entry *e = &r->at[i];
        const event_work *w = e->what.data;
        if (e->what.call == note_marker)
            note_event(w->what, w->on);
        else if (e->what.call == wait_marker)
            wait_for_event(w->on, w->what);
        else
            put(e->on, e->what);
    }
    leave();
    return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph graph) {
    free(graph);
    return CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec exec) {
    free(exec);
    return CUDA_SUCCESS;
}
