/* Recording how a program is compiled. */
#include "runtime/plan/log.h"

#include <stdarg.h>
#include <stdio.h>

#include "runtime/base/clock.h"
#include "runtime/base/knobs.h"
#include "runtime/plan/plan_internal.h"

ml_compile_log *ml_compile_log_new(void) {
    ml_arena *arena = ml_arena_new();
    ml_compile_log *log = arena ? ml_alloc(sizeof *log) : NULL;
    if (log == NULL && arena != NULL) ml_arena_free(arena);
    if (log != NULL) *log = (ml_compile_log){.arena = arena, .clock = ml_clock_now()};
    return log;
}

void ml_compile_log_free(ml_compile_log *log) {
    if (log == NULL) return;
    ml_arena_free(log->arena);
    ml_free(log);
}

static ml_log_event *event_add(const ml_plan *plan, ml_log_kind kind) {
    ml_compile_log *log = plan->options->log;
    double took = ml_clock_now() - log->clock;
    ml_log_event *event = ML_PUSH(log->arena, &log->events);
    *event = (ml_log_event){.kind = kind, .took = took};
    if (plan->graph != NULL) event->nodes = ml_graph_count(plan->graph) - 1;
    return event;
}

/* Until param_cache moves them to a rebuild, a group's program has all-gathers of all ranks. */
static const ml_layout *layout_of(const ml_plan *plan, const ml_step *step) {
    const ml_collective_step *c = step->collective;
    if (step->kind != ML_STEP_COLLECTIVE) return plan->layout;
    return plan_layout_along(plan, c->mesh_axis, c->ranks);
}

static void measure(const ml_plan *plan, const ml_schedule *s, ml_log_event *event) {
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        if (step->kind == ML_STEP_WAIT) continue;
        event->steps++;
        event->bytes += (double)step->bytes;
        if (plan->target->kind == ML_TARGET_CUDA)
            event->seconds += plan_step_seconds(s, layout_of(plan, step), t);
    }
}

typedef struct {
    const ml_plan *plan;
    ml_log_event *event;
    ml_arena *arena;
} lower_call;

static void lower_body(void *context) {
    const lower_call *call = context;
    const ml_plan *plan = call->plan;
    measure(plan, ml_lower(plan->graph, &plan->roots, plan->target, call->arena), call->event);
}

/* What the graph would be as steps; unknown where it cannot be lowered yet. */
static void measure_graph(const ml_plan *plan, ml_log_event *event) {
    lower_call call = {plan, event, ml_arena_new()};
    if (call.arena == NULL) return;
    if (ml_protect(lower_body, &call) != ML_OK) event->steps = 0;
    ml_arena_free(call.arena);
}

void log_pass(const ml_plan *plan, const char *name) {
    if (plan->options->log == NULL) return;
    ml_log_event *event = event_add(plan, ML_LOG_PASS);
    event->name = name;
    if (plan->layout == NULL || plan->local) measure_graph(plan, event);
    plan->options->log->clock = ml_clock_now();
}

void log_steps(const ml_plan *plan, const char *name, const char *text) {
    ml_time_part(name);
    if (plan->options->log == NULL) return;
    ml_log_event *event = event_add(plan, ML_LOG_STEPS);
    event->name = name;
    event->text = text;
    measure(plan, plan->schedule, event);
    plan->options->log->clock = ml_clock_now();
}

void log_text(const ml_plan *plan, ml_log_kind kind, const char *format, ...) {
    if (plan->options->log == NULL) return;
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    ml_log_event *event = event_add(plan, kind);
    event->text = ml_arena_format(plan->options->log->arena, "%s", text);
    event->bytes = (double)plan->peak_bytes;
    plan->options->log->clock = ml_clock_now();
}
