/* What is recorded of runs, and what a step is: its kind, name and place in the script. */
#include "runtime/device/profile.h"
#include "runtime/base/clock.h"

#include <stdio.h>
#include <string.h>

const char *const ml_work_names[ML_WORKS] = {
    [ML_WORK_GEMM] = "GEMM",
    [ML_WORK_ATTENTION] = "attention",
    [ML_WORK_MAP] = "norm, elementwise",
    [ML_WORK_REDUCTION] = "reduction",
    [ML_WORK_LOSS] = "cross-entropy",
    [ML_WORK_OPTIMIZER] = "optimizer",
    [ML_WORK_COPY] = "copy",
    [ML_WORK_COLLECTIVE] = "collective",
};

ml_profile *ml_profile_new(bool prints) {
    ml_profile *profile = ml_alloc(sizeof *profile);
    if (profile == NULL) return NULL;
    profile->arena = ml_arena_new();
    if (profile->arena == NULL) {
        ml_free(profile);
        return NULL;
    }
    profile->prints = prints;
    return profile;
}

void ml_profile_free(ml_profile *profile) {
    if (profile == NULL) return;
    ml_arena_free(profile->arena);
    ml_free(profile);
}

ml_run_mode ml_profile_mode(const ml_profile *profile) {
    if (profile == NULL) return ML_RUN_PLAIN;
    return profile->prints && profile->mode != ML_RUN_ALONE ? ML_RUN_STEPS : profile->mode;
}

/* ---- What a step is ---- */
static bool writes_state(const ml_schedule *s, const ml_step *step) {
    for (int i = step->read_count; i < step->read_count + step->write_count; i++) {
        const ml_storage *storage = &s->storages.at[s->values.at[step->values[i]].storage];
        if (storage->kind != ML_STORAGE_STATE) continue;
        ml_state_kind kind = ml_graph_state(s->graph, storage->id)->kind;
        if (kind == ML_STATE_PARAMETER || kind == ML_STATE_OPTIMIZER) return true;
    }
    return false;
}

/* Loops that add up rows, finish partial sums, or scatter and scan. */
static bool reduces(const ml_schedule *s, const ml_step *step) {
    if (step->ir == NULL || step->ir->chunks > 0) return true;
    for (int i = 0; i < step->read_count; i++)
        if (s->values.at[step->values[i]].node == 0) return true;
    return false;
}

static bool in_scope(const char *module, const char *scope) {
    const char *dot = strrchr(module, '.');
    return strcmp(dot != NULL ? dot + 1 : module, scope) == 0;
}

static ml_work work_of(const ml_schedule *s, const ml_step *step, const char *module) {
    if (step->gemm != NULL || step->ragged != NULL) return ML_WORK_GEMM;
    if (step->attention != NULL) return ML_WORK_ATTENTION;
    if (step->kind == ML_STEP_COLLECTIVE || step->kind == ML_STEP_WAIT) return ML_WORK_COLLECTIVE;
    if (step->kind == ML_STEP_COPY || step->kind == ML_STEP_HOST_COPY) return ML_WORK_COPY;
    if (in_scope(module, ML_SCOPE_OPTIMIZER) || writes_state(s, step)) return ML_WORK_OPTIMIZER;
    if (in_scope(module, ML_SCOPE_LOSS)) return ML_WORK_LOSS;
    return reduces(s, step) ? ML_WORK_REDUCTION : ML_WORK_MAP;
}

static int64_t batches_of(const int64_t *batch) {
    return batch[0] * batch[1] * batch[2];
}

static const char *gemm_name(ml_arena *arena, const ml_gemm *g) {
    ml_text name = {.arena = arena};
    ml_text_add(&name, "gemm %lldx%lldx%lld", (long long)g->m, (long long)g->n, (long long)g->k);
    if (batches_of(g->batch) != 1) ml_text_add(&name, " x%lld", (long long)batches_of(g->batch));
    if (g->accumulate) ml_text_add(&name, " +=");
    if (g->epilogue == ML_EPILOGUE_BIAS) ml_text_add(&name, " +bias");
    return name.text;
}

static const char *step_name(ml_arena *arena, const ml_step *step) {
    const ml_attention_step *a = step->attention;
    const ml_ragged *r = step->ragged;
    if (step->gemm != NULL) return gemm_name(arena, step->gemm);
    if (r != NULL)
        return ml_arena_format(arena, "%s %lld groups of %lldx%lldx%lld",
                               ml_ops[ML_OP_RAGGED_DOT + r->outer].name, (long long)r->groups,
                               (long long)(r->batch * r->rows), (long long)r->n, (long long)r->k);
    if (a != NULL)
        return ml_arena_format(arena, "attention%s b%lld h%lld/%lld t%lld/%lld d%lld",
                               a->backward ? " gradient" : "", (long long)batches_of(a->batch),
                               (long long)a->heads, (long long)a->kv_heads, (long long)a->seq,
                               (long long)a->kv_seq, (long long)a->head_dim);
    if (step->collective != NULL) return ml_collectives[step->collective->kind].name;
    return ml_arena_format(arena, "%s", ml_step_label(step)); /* kernels go with their plan */
}

/* Steps of equal shape take equally long alone. */
static uint64_t shape_of(const ml_step *step, const char *name) {
    uint64_t hash = ml_hash(name, strlen(name), 0);
    if (step->gemm != NULL) {
        const ml_gemm *g = step->gemm;
        int64_t types[] = {g->a_dtype, g->b_dtype, g->c_dtype};
        hash = ml_hash(g, offsetof(ml_gemm, a_dtype), hash);
        hash = ml_hash(types, sizeof types, hash);
    } else if (step->attention != NULL || step->ragged != NULL) {
        uint64_t facts[] = {step->kernel != NULL ? step->kernel->key : 0, (uint64_t)step->bytes,
                            (uint64_t)step->flops};
        hash = ml_hash(facts, sizeof facts, hash);
    } else {
        return 0;
    }
    return hash != 0 ? hash : 1;
}

static const char *copied(ml_arena *arena, const char *text) {
    return text == NULL || text[0] == 0 ? "" : ml_arena_copy(arena, text, strlen(text));
}

typedef struct {
    ml_profile *profile;
    const ml_plan *plan;
    ml_profile_program *program;
} describe_call;

static void describe_body(void *context) {
    describe_call *call = context;
    ml_arena *arena = call->profile->arena;
    const ml_schedule *s = call->plan->schedule;
    ml_profile_program *program = ML_NEW(arena, ml_profile_program);
    program->name = copied(arena, call->plan->roots.name ? call->plan->roots.name : "program");
    program->step_count = s->steps.count;
    program->steps = ML_NEW_ARRAY(arena, ml_profile_step, (size_t)s->steps.count + 1);
    const char *file = "", *module = ""; /* neighbours often share both */
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_step *step = &s->steps.at[i];
        const ml_origin none = {0};
        const ml_origin *o = step->node != 0 ? ml_graph_origin(s->graph, step->node) : &none;
        if (strcmp(file, o->file ? o->file : "") != 0) file = copied(arena, o->file);
        if (strcmp(module, o->module ? o->module : "") != 0) module = copied(arena, o->module);
        const char *name = step_name(arena, step);
        program->steps[i] = (ml_profile_step){.work = work_of(s, step, module),
                                              .name = name,
                                              .file = file,
                                              .module = module,
                                              .line = o->line,
                                              .flops = step->flops,
                                              .bytes = step->bytes,
                                              .shape = shape_of(step, name)};
    }
    call->program = program;
}

ml_status ml_profile_describe(ml_profile *profile, const ml_plan *plan,
                              ml_profile_program **program) {
    describe_call call = {profile, plan, NULL};
    ml_status status = ml_protect(describe_body, &call);
    if (status == ML_OK) *program = call.program;
    return status;
}

typedef struct {
    ml_profile *profile;
    ml_profile_step *step;
    const char *library;
} by_call;

static void by_body(void *context) {
    by_call *call = context;
    call->step->name =
        ml_arena_format(call->profile->arena, "%s %s", call->library, call->step->name);
}

ml_status ml_profile_by(ml_profile *profile, ml_profile_program *program, uint32_t step,
                        const char *library) {
    by_call call = {profile, &program->steps[step], library};
    return ml_protect(by_body, &call);
}

/* ---- Records ---- */
typedef struct {
    ml_profile *profile;
    ml_profile_event event;
    ml_profile_interval interval;
    ml_profile_best best;
} add_call;

static void event_body(void *context) {
    add_call *call = context;
    *ML_PUSH(call->profile->arena, &call->profile->events) = call->event;
}
static void interval_body(void *context) {
    add_call *call = context;
    *ML_PUSH(call->profile->arena, &call->profile->intervals) = call->interval;
}
static void run_body(void *context) {
    add_call *call = context;
    *ML_PUSH(call->profile->arena, &call->profile->runs) =
        (ml_profile_run){call->event.begin, call->event.end};
}
static void best_body(void *context) {
    add_call *call = context;
    *ML_PUSH(call->profile->arena, &call->profile->best) = call->best;
}

static ml_status event_add(ml_profile *profile, ml_profile_event event) {
    if (!profile->stores && !profile->prints) return ML_OK;
    uint32_t intervals = profile->intervals.count;
    if (intervals > 0 && profile->intervals.at[intervals - 1].end == 0)
        event.step = profile->intervals.at[intervals - 1].step;
    event.mode = profile->mode;
    add_call call = {.profile = profile, .event = event};
    return ml_protect(event_body, &call);
}

void ml_profile_end_step(ml_profile *profile) {
    profile->mode = ML_RUN_PLAIN;
    if (profile->intervals.count == 0) return;
    ml_profile_interval *last = &profile->intervals.at[profile->intervals.count - 1];
    if (last->end == 0) last->end = ml_clock_now();
}

ml_status ml_profile_begin_step(ml_profile *profile, int64_t step, ml_run_mode mode) {
    ml_profile_end_step(profile);
    profile->mode = mode;
    if (!profile->stores) return ML_OK;
    add_call call = {.profile = profile,
                     .interval = {.step = step, .mode = mode, .begin = ml_clock_now()}};
    return ml_protect(interval_body, &call);
}

ml_status ml_profile_host(ml_profile *profile, const char *what, double begin) {
    if (!profile->stores || profile->mode == ML_RUN_PLAIN) return ML_OK;
    return event_add(profile,
                     (ml_profile_event){
                         .what = what, .at = ML_EVENT_HOST, .begin = begin, .end = ml_clock_now()});
}

ml_status ml_profile_step_ran(ml_profile *profile, const ml_profile_program *program, uint32_t step,
                              int stream, double begin, double end) {
    return event_add(
        profile, (ml_profile_event){
                     .program = program, .at = step, .stream = stream, .begin = begin, .end = end});
}

void ml_profile_run_begins(ml_profile *profile) {
    profile->run_first = profile->events.count;
}

/* MLUA_DEBUG=2: a line for each step of the run that just ended, then a line for each kind. */
static void run_print(const ml_profile *profile) {
    double time[ML_WORKS] = {0}, flops[ML_WORKS] = {0}, bytes[ML_WORKS] = {0}, total = 0;
    int64_t count[ML_WORKS] = {0};
    fprintf(stderr, "%5s %9s %8s %8s  %s\n", "step", "ms", "GB/s", "GFLOP/s", "kernel");
    for (uint32_t i = profile->run_first; i < profile->events.count; i++) {
        const ml_profile_event *event = &profile->events.at[i];
        if (event->at >= ML_EVENT_HOST) continue;
        const ml_profile_step *step = &event->program->steps[event->at];
        double s = event->end > event->begin ? event->end - event->begin : 1e-9;
        fprintf(stderr, "%5u %9.4f %8.1f %8.1f  %s%s%s", event->at, s * 1e3,
                (double)step->bytes / s * 1e-9, step->flops / s * 1e-9, step->name,
                step->module[0] ? "  " : "", step->module);
        if (step->file[0]) fprintf(stderr, "  %s:%d", step->file, step->line);
        fprintf(stderr, "\n");
        time[step->work] += s, flops[step->work] += step->flops, total += s;
        bytes[step->work] += (double)step->bytes, count[step->work]++;
    }
    for (int i = 0; i < ML_WORKS; i++)
        if (count[i] > 0)
            fprintf(stderr, "%18s %6lld steps %9.3f ms %8.1f GB/s %9.1f GFLOP/s\n",
                    ml_work_names[i], (long long)count[i], time[i] * 1e3, bytes[i] / time[i] * 1e-9,
                    flops[i] / time[i] * 1e-9);
    fprintf(stderr, "total %9.3f ms\n", total * 1e3);
}

ml_status ml_profile_run_ends(ml_profile *profile, const ml_profile_program *program, double begin,
                              double end) {
    profile->busy += end - begin;
    if (profile->intervals.count > 0) {
        ml_profile_interval *last = &profile->intervals.at[profile->intervals.count - 1];
        if (last->end == 0) last->busy += end - begin;
    }
    add_call run = {.profile = profile, .event = {.begin = begin, .end = end}};
    ml_status status = profile->lists ? ml_protect(run_body, &run) : ML_OK;
    if (status == ML_OK)
        status = event_add(
            profile, (ml_profile_event){
                         .program = program, .at = ML_EVENT_WHOLE, .begin = begin, .end = end});
    if (profile->prints) run_print(profile);
    if (!profile->stores) profile->events.count = profile->run_first = 0;
    return status;
}

/* ---- Steps alone ---- */
static const ml_profile_best *best_find(const ml_profile *profile, uint64_t shape) {
    for (uint32_t i = 0; i < profile->best.count && shape != 0; i++)
        if (profile->best.at[i].shape == shape) return &profile->best.at[i];
    return NULL;
}

bool ml_profile_wants_alone(const ml_profile *profile, const ml_profile_program *program,
                            uint32_t step) {
    uint64_t shape = program->steps[step].shape;
    return shape != 0 && best_find(profile, shape) == NULL;
}

bool ml_profile_alone_enough(int runs, double seconds) {
    enum { FEWEST = 5, MOST = 30 };
    static const double long_enough = 0.02;
    return runs >= MOST || (runs >= FEWEST && seconds >= long_enough) || seconds > 1;
}

ml_status ml_profile_alone(ml_profile *profile, const ml_profile_program *program, uint32_t step,
                           double seconds) {
    add_call call = {.profile = profile, .best = {program->steps[step].shape, seconds}};
    return ml_protect(best_body, &call);
}

int64_t ml_profile_span(const ml_value *value) {
    int64_t span = 1;
    for (int i = 0; i < value->type.rank; i++) {
        if (value->type.size[i] == 0) return 0;
        span += (value->type.size[i] - 1) * value->stride[i];
    }
    return span * ml_dtypes[value->type.dtype].bytes;
}

bool ml_profile_changes(const ml_schedule *s, const ml_step *step, void *const *pointers) {
    if (step->gemm != NULL && step->gemm->accumulate) return true;
    for (int w = step->read_count; w < step->read_count + step->write_count; w++) {
        const char *written = pointers[w];
        int64_t written_bytes = ml_profile_span(&s->values.at[step->values[w]]);
        for (int r = 0; r < step->read_count; r++) {
            const char *read = pointers[r];
            int64_t read_bytes = ml_profile_span(&s->values.at[step->values[r]]);
            if (written < read + read_bytes && read < written + written_bytes) return true;
        }
    }
    return false;
}

double ml_profile_ideal(const ml_profile *profile, const ml_profile_step *step) {
    const ml_ceilings *c = &profile->ceilings;
    if (step->work == ML_WORK_COLLECTIVE) return 0;
    const ml_profile_best *best = best_find(profile, step->shape);
    if (best != NULL) return best->seconds;
    double moving = c->copy_bytes > 0 ? (double)step->bytes / c->copy_bytes : 0;
    double products = step->shape != 0 && c->gemm_flops > 0 ? step->flops / c->gemm_flops : 0;
    return moving > products ? moving : products;
}
