/* A profile in the Trace Event format of Chrome, one event a line: times in microseconds, a rank
 * is a process, a stream is a thread. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "runtime/base/clock.h"
#include "runtime/device/profile.h"

const char ml_trace_head[] = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
const char ml_trace_tail[] = "\n]}\n";

/* ---- Text ---- */
/* The length of the UTF-8 sequence at `text`; 0 where it is none. */
static size_t sequence_length(const unsigned char *text) {
    size_t length = text[0] < 0x80   ? 1
                    : text[0] < 0xc2 ? 0
                    : text[0] < 0xe0 ? 2
                    : text[0] < 0xf0 ? 3
                    : text[0] < 0xf5 ? 4
                                     : 0;
    for (size_t i = 1; i < length; i++)
        if ((text[i] & 0xc0) != 0x80) return 0;
    if (length == 3 && text[0] == 0xe0 && text[1] < 0xa0) return 0; /* too long */
    if (length == 3 && text[0] == 0xed && text[1] > 0x9f) return 0; /* surrogates */
    if (length == 4 && text[0] == 0xf0 && text[1] < 0x90) return 0;
    if (length == 4 && text[0] == 0xf4 && text[1] > 0x8f) return 0;
    return length;
}

void ml_json_text(ml_text *out, const char *text) {
    ml_text_add(out, "\"");
    for (const unsigned char *at = (const unsigned char *)text; *at != 0;) {
        size_t length = sequence_length(at);
        if (length == 0)
            ml_text_add(out, "?"), length = 1;
        else if (*at < 0x20)
            ml_text_add(out, "\\u%04x", *at);
        else if (*at == '"' || *at == '\\')
            ml_text_add(out, "\\%c", *at);
        else
            ml_text_add(out, "%.*s", (int)length, (const char *)at);
        at += length;
    }
    ml_text_add(out, "\"");
}

/* ---- Events ---- */
enum { THREAD_HOST, THREAD_RUNS, THREAD_STREAMS };

typedef struct {
    const ml_profile *profile;
    ml_text *out;
    int rank;
    double origin; /* what a trace's time 0 is on ml_clock_now's clock */
} trace_call;

/* Ranks of several hosts share the time of day; its last 12 days keep a double exact to the ns. */
static double trace_origin(void) {
    struct timespec now;
    double monotonic = ml_clock_now();
    clock_gettime(CLOCK_REALTIME, &now);
    return monotonic - (double)(now.tv_sec % (1 << 20)) - 1e-9 * (double)now.tv_nsec;
}

static void name_add(const trace_call *call, const char *kind, int thread, const char *name) {
    ml_text_add(call->out,
                "{\"ph\":\"M\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":", kind,
                call->rank, thread);
    ml_json_text(call->out, name);
    ml_text_add(call->out, "}}");
}

static void event_head(const trace_call *call, const char *name, const char *category, int thread,
                       const ml_profile_event *event) {
    ml_text_add(call->out, ",\n{\"ph\":\"X\",\"name\":");
    ml_json_text(call->out, name);
    ml_text_add(call->out, ",\"cat\":");
    ml_json_text(call->out, category);
    ml_text_add(call->out,
                ",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"step\":%lld",
                call->rank, thread, (event->begin - call->origin) * 1e6,
                (event->end - event->begin) * 1e6, (long long)event->step);
}

static void step_add(const trace_call *call, const ml_profile_event *event) {
    const ml_profile_step *step = &event->program->steps[event->at];
    double seconds = event->end > event->begin ? event->end - event->begin : 1e-9;
    double ideal = ml_profile_ideal(call->profile, step);
    event_head(call, step->name, ml_work_names[step->work], THREAD_STREAMS + event->stream, event);
    ml_text_add(call->out, ",\"program\":");
    ml_json_text(call->out, event->program->name);
    ml_text_add(call->out, ",\"index\":%u,\"module\":", event->at);
    ml_json_text(call->out, step->module);
    if (step->file[0] != 0) {
        ml_text_add(call->out, ",\"line\":");
        ml_text where = {.arena = call->out->arena};
        ml_text_add(&where, "%s:%d", step->file, step->line);
        ml_json_text(call->out, where.text);
    }
    ml_text_add(call->out, ",\"bytes\":%lld,\"flops\":%.17g,\"GB/s\":%.6g,\"TFLOP/s\":%.6g",
                (long long)step->bytes, step->flops, (double)step->bytes / seconds * 1e-9,
                step->flops / seconds * 1e-12);
    if (ideal > 0)
        ml_text_add(call->out, ",\"best us\":%.6g,\"share of ceiling\":%.4g", ideal * 1e6,
                    ideal / seconds);
    ml_text_add(call->out, "}}");
}

static void interval_add(const trace_call *call, const ml_profile_interval *interval) {
    static const char *const modes[] = {[ML_RUN_PLAIN] = "",
                                        [ML_RUN_WHOLE] = ", run whole",
                                        [ML_RUN_STEPS] = ", step by step",
                                        [ML_RUN_ALONE] = ", products repeated alone"};
    char name[64];
    if (interval->end == 0) return;
    snprintf(name, sizeof name, "step %lld%s", (long long)interval->step, modes[interval->mode]);
    ml_profile_event event = {
        .step = interval->step, .begin = interval->begin, .end = interval->end};
    event_head(call, name, "step", THREAD_HOST, &event);
    ml_text_add(call->out, ",\"device ms\":%.6g}}", interval->busy * 1e3);
}

static void stream_name(const ml_layout *layout, int stream, char *name, size_t size) {
    if (stream >= ML_STREAM_HOST)
        snprintf(name, size, "copies %s the host", stream > ML_STREAM_HOST ? "back from" : "to");
    else if (layout != NULL)
        snprintf(name, size, "collectives over %s", layout->axis[stream - ML_STREAM_AXIS].name);
}

void ml_profile_trace(const ml_profile *profile, int rank, const char *device,
                      const ml_layout *layout, ml_text *out) {
    trace_call call = {profile, out, rank, trace_origin()};
    char name[64 + 256];
    bool named[ML_STREAMS] = {true};
    snprintf(name, sizeof name, "rank %d: %s", rank, device);
    name_add(&call, "process_name", 0, name);
    static const char *const threads[] = {"host", "runs", "device"};
    for (int i = 0; i < 3; i++) {
        ml_text_add(out, ",\n");
        name_add(&call, "thread_name", i, threads[i]);
    }
    for (uint32_t i = 0; i < profile->intervals.count; i++)
        interval_add(&call, &profile->intervals.at[i]);
    for (uint32_t i = 0; i < profile->events.count; i++) {
        const ml_profile_event *event = &profile->events.at[i];
        if (event->at == ML_EVENT_HOST || event->at == ML_EVENT_WHOLE) {
            bool host = event->at == ML_EVENT_HOST;
            event_head(&call, host ? event->what : event->program->name, host ? "host" : "run",
                       host ? THREAD_HOST : THREAD_RUNS, event);
            ml_text_add(out, "}}");
            continue;
        }
        if (!named[event->stream]) {
            stream_name(layout, event->stream, name, sizeof name);
            ml_text_add(out, ",\n");
            name_add(&call, "thread_name", THREAD_STREAMS + event->stream, name);
            named[event->stream] = true;
        }
        step_add(&call, event);
    }
}
