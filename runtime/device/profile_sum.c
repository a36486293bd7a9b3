/* Sums over a profile, as a table and as JSON. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/profile.h"

/* ---- Sums ---- */
/* "blocks.3.attn" as "blocks.*.attn". */
static const char *fold_path(ml_arena *arena, const char *path) {
    ml_text out = {.arena = arena};
    if (path[0] == 0) return "-";
    while (path[0] != 0) {
        size_t length = strcspn(path, "."), digits = strspn(path, "0123456789");
        if (length > 0 && digits == length)
            ml_text_add(&out, "*");
        else
            ml_text_add(&out, "%.*s", (int)length, path);
        path += length;
        if (path[0] == '.') ml_text_add(&out, "."), path++;
    }
    return out.text;
}

typedef struct {
    const ml_profile *profile;
    ml_arena *arena;
    ml_profile_sums *sums;
    ml_index index; /* of module rows, by hash of the path */
    int64_t steps;
} sum_call;

static ml_profile_row *module_row(sum_call *call, const char *module) {
    const char *name = fold_path(call->arena, module);
    uint64_t hash = ml_hash(name, strlen(name), 0);
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&call->index, hash, &cursor)) != ML_INDEX_NONE)
        if (strcmp(call->sums->modules.at[at].name, name) == 0) return &call->sums->modules.at[at];
    ml_index_add(&call->index, hash, call->sums->modules.count);
    ml_profile_row *row = ML_PUSH(call->arena, &call->sums->modules);
    row->name = name;
    return row;
}

static void row_add(ml_profile_row *row, const ml_profile_step *step, double seconds,
                    double ideal) {
    row->count++;
    row->seconds += seconds;
    row->ideal += ideal;
    row->flops += step->flops;
    row->bytes += (double)step->bytes;
}

static void row_divide(ml_profile_row *row, int64_t steps) {
    row->count /= steps;
    row->seconds /= (double)steps;
    row->ideal /= (double)steps;
    row->flops /= (double)steps;
    row->bytes /= (double)steps;
}

static int by_seconds(const void *a, const void *b) {
    const ml_profile_row *x = a, *y = b;
    return x->seconds < y->seconds ? 1 : x->seconds > y->seconds ? -1 : strcmp(x->name, y->name);
}

/* A step of a program, in a step of the training that was timed by steps. */
static bool is_timed(const ml_profile_event *event) {
    return event->at < ML_EVENT_HOST && event->mode == ML_RUN_STEPS;
}
static bool is_collective(const ml_profile_event *event) {
    return event->program->steps[event->at].work == ML_WORK_COLLECTIVE;
}

/* The intervals of the mode; the last one, and how many. */
static const ml_profile_interval *intervals_of(const ml_profile *profile, ml_run_mode mode,
                                               int64_t *count) {
    const ml_profile_interval *last = NULL;
    *count = 0;
    for (uint32_t i = 0; i < profile->intervals.count; i++) {
        if (profile->intervals.at[i].mode != mode || profile->intervals.at[i].end == 0) continue;
        last = &profile->intervals.at[i];
        ++*count;
    }
    return last;
}

typedef struct {
    double begin, end;
} span;

static int by_begin(const void *a, const void *b) {
    const span *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Seconds in which only collectives ran: the union of their times less that of all other work. */
static double exposed_seconds(const sum_call *call) {
    const ml_profile *profile = call->profile;
    uint32_t count = 0;
    span *spans = ML_NEW_ARRAY(call->arena, span, (size_t)profile->events.count + 1);
    double covered[2] = {0}; /* by everything; by all but collectives */
    for (int only_work = 0; only_work < 2; only_work++) {
        count = 0;
        for (uint32_t i = 0; i < profile->events.count; i++) {
            const ml_profile_event *event = &profile->events.at[i];
            if (!is_timed(event)) continue;
            if (only_work && is_collective(event)) continue;
            spans[count++] = (span){event->begin, event->end};
        }
        qsort(spans, count, sizeof *spans, by_begin);
        double reached = 0;
        for (uint32_t i = 0; i < count; i++) {
            double begin = spans[i].begin > reached ? spans[i].begin : reached;
            if (spans[i].end <= begin) continue;
            covered[only_work] += spans[i].end - begin;
            reached = spans[i].end;
        }
    }
    return covered[0] - covered[1];
}

static void sum_events(sum_call *call) {
    ml_profile_sums *sums = call->sums;
    for (uint32_t i = 0; i < call->profile->events.count; i++) {
        const ml_profile_event *event = &call->profile->events.at[i];
        if (!is_timed(event)) continue;
        const ml_profile_step *step = &event->program->steps[event->at];
        double seconds = event->end - event->begin, ideal = ml_profile_ideal(call->profile, step);
        row_add(&sums->work[step->work], step, seconds, ideal);
        row_add(module_row(call, step->module), step, seconds, ideal);
        row_add(&sums->total, step, seconds, ideal);
    }
    for (int i = 0; i < ML_WORKS; i++) {
        sums->work[i].name = ml_work_names[i];
        row_divide(&sums->work[i], call->steps);
    }
    for (uint32_t i = 0; i < sums->modules.count; i++)
        row_divide(&sums->modules.at[i], call->steps);
    if (sums->modules.count > 1)
        qsort(sums->modules.at, sums->modules.count, sizeof *sums->modules.at, by_seconds);
    sums->total.name = "total";
    row_divide(&sums->total, call->steps);
    sums->collective = sums->work[ML_WORK_COLLECTIVE].seconds;
    sums->exposed = exposed_seconds(call) / (double)call->steps;
}

void ml_profile_sum(const ml_profile *profile, ml_arena *arena, ml_profile_sums *sums) {
    *sums = (ml_profile_sums){0};
    sum_call call = {.profile = profile, .arena = arena, .sums = sums, .index = {.arena = arena}};
    const ml_profile_interval *whole = intervals_of(profile, ML_RUN_WHOLE, &call.steps);
    if (whole != NULL) {
        sums->whole_step = whole->step;
        sums->whole_busy = whole->busy;
        sums->whole_wall = whole->end - whole->begin;
    }
    const ml_profile_interval *last = intervals_of(profile, ML_RUN_STEPS, &call.steps);
    if (last == NULL) return;
    sums->last = last->step;
    sums->first = last->step - call.steps + 1;
    for (uint32_t i = 0; i < profile->intervals.count; i++) {
        const ml_profile_interval *interval = &profile->intervals.at[i];
        if (interval->mode == ML_RUN_STEPS && interval->end > 0)
            sums->wall += (interval->end - interval->begin) / (double)call.steps;
    }
    sum_events(&call);
}

/* ---- For people ---- */
static void row_print(const ml_profile_row *row, const ml_profile_row *total, ml_text *out) {
    double seconds = row->seconds > 0 ? row->seconds : 1e-9;
    ml_text_add(out, "%-28s %6lld %9.3f %5.1f%% ", row->name, (long long)row->count,
                row->seconds * 1e3, 100 * row->seconds / (total->seconds > 0 ? total->seconds : 1));
    if (row->ideal > 0)
        ml_text_add(out, "%9.3f %6.2f", row->ideal * 1e3, row->seconds / row->ideal);
    else
        ml_text_add(out, "%9s %6s", "-", "-");
    ml_text_add(out, " %9.3f %8.1f\n", row->flops / seconds * 1e-12, row->bytes / seconds * 1e-9);
}

static void rows_head(const char *what, ml_text *out) {
    ml_text_add(out, "%-28s %6s %9s %6s %9s %6s %9s %8s\n", what, "calls", "ms", "share", "best ms",
                "times", "TFLOP/s", "GB/s");
}

static void print_ends(const ml_profile *profile, const ml_profile_sums *sums, ml_text *out) {
    double measured = sums->whole_wall > 0 ? sums->whole_wall : sums->wall;
    if (sums->collective > 0)
        ml_text_add(out, "collectives: %.3f ms, of which %.3f ms have no other work beside them\n",
                    sums->collective * 1e3, sums->exposed * 1e3);
    if (sums->whole_step > 0)
        ml_text_add(out, "step %lld, run whole: %.3f ms, the device busy for %.1f%% of it\n",
                    (long long)sums->whole_step, sums->whole_wall * 1e3,
                    100 * sums->whole_busy / sums->whole_wall);
    if (profile->ceilings.copy_bytes > 0)
        ml_text_add(out,
                    "best: each product and attention alone, all else at %.1f GB/s, what a copy "
                    "reaches (mlua doctor --bench measures it again)\n",
                    profile->ceilings.copy_bytes * 1e-9);
    if (sums->total.ideal > 0)
        ml_text_add(out, "sum of best times: %.3f ms, %.1f%% of the step's %.3f ms\n",
                    sums->total.ideal * 1e3, 100 * sums->total.ideal / measured, measured * 1e3);
}

void ml_profile_table(const ml_profile *profile, const ml_profile_sums *sums, ml_text *out) {
    enum { MOST_MODULES = 24 };
    if (sums->last == 0) return;
    ml_text_add(out, "profile of steps %lld to %lld, for one step on one rank (%.3f ms)\n",
                (long long)sums->first, (long long)sums->last, sums->wall * 1e3);
    rows_head("kind", out);
    for (int i = 0; i < ML_WORKS; i++)
        if (sums->work[i].count > 0) row_print(&sums->work[i], &sums->total, out);
    row_print(&sums->total, &sums->total, out);
    rows_head("module", out);
    ml_profile_row rest = {.name = "others"};
    for (uint32_t i = 0; i < sums->modules.count; i++) {
        const ml_profile_row *row = &sums->modules.at[i];
        if (i < MOST_MODULES) {
            row_print(row, &sums->total, out);
            continue;
        }
        rest.count += row->count, rest.seconds += row->seconds, rest.ideal += row->ideal;
        rest.flops += row->flops, rest.bytes += row->bytes;
    }
    if (rest.count > 0) row_print(&rest, &sums->total, out);
    print_ends(profile, sums, out);
}

/* ---- For programs ---- */
static void row_json(const ml_profile_row *row, ml_text *out) {
    ml_text_add(out, "{\"name\":");
    ml_json_text(out, row->name);
    ml_text_add(out, ",\"calls\":%lld,\"ms\":%.17g,\"roofline_ms\":", (long long)row->count,
                row->seconds * 1e3);
    if (row->ideal > 0)
        ml_text_add(out, "%.17g", row->ideal * 1e3);
    else
        ml_text_add(out, "null");
    ml_text_add(out, ",\"flops\":%.17g,\"bytes\":%.17g}", row->flops, row->bytes);
}

void ml_profile_json(const ml_profile *profile, const ml_profile_sums *sums, const char *device,
                     ml_text *out) {
    bool comma = false;
    ml_text_add(out, "{\"profile\":{\"device\":");
    ml_json_text(out, device);
    ml_text_add(out, ",\"first_step\":%lld,\"last_step\":%lld,\"step_ms\":%.17g,",
                (long long)sums->first, (long long)sums->last, sums->wall * 1e3);
    ml_text_add(out, "\"device_ms\":%.17g,\"roofline_ms\":%.17g,", sums->total.seconds * 1e3,
                sums->total.ideal * 1e3);
    ml_text_add(out, "\"collective_ms\":%.17g,\"exposed_collective_ms\":%.17g,",
                sums->collective * 1e3, sums->exposed * 1e3);
    if (sums->whole_step > 0)
        ml_text_add(out,
                    "\"whole_step\":%lld,\"whole_step_ms\":%.17g,\"whole_step_device_ms\":%.17g,",
                    (long long)sums->whole_step, sums->whole_wall * 1e3, sums->whole_busy * 1e3);
    ml_text_add(out, "\"copy_bytes_per_s\":%.17g,\"gemm_flops_per_s\":%.17g,\"kinds\":[",
                profile->ceilings.copy_bytes, profile->ceilings.gemm_flops);
    for (int i = 0; i < ML_WORKS; i++) {
        if (sums->work[i].count == 0) continue;
        ml_text_add(out, comma ? "," : "");
        row_json(&sums->work[i], out);
        comma = true;
    }
    ml_text_add(out, "],\"modules\":[");
    for (uint32_t i = 0; i < sums->modules.count; i++) {
        ml_text_add(out, i > 0 ? "," : "");
        row_json(&sums->modules.at[i], out);
    }
    ml_text_add(out, "]}}\n");
}
