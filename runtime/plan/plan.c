/* Plans as values: their parts, what they need, what they look like. */
#include "runtime/plan/plan.h"

#include <math.h>
#include <string.h>

#include "runtime/plan/plan_internal.h"

const char *const ml_memory_names[ML_MEMORY_KINDS] = {"parameters", "gradients", "optimizer",
                                                      "activations", "workspace"};

ml_plan *plan_empty(void) {
    ml_arena *arena = ml_arena_new();
    ml_plan *plan = arena != NULL ? ml_alloc(sizeof *plan) : NULL;
    if (plan == NULL) {
        if (arena != NULL) ml_arena_free(arena);
        ml_raise(ML_NO_MEMORY, "out of memory while planning a program");
    }
    plan->arena = arena;
    return plan;
}

ml_plan *plan_of_part(const ml_plan *whole, ml_graph **graph, const ml_roots *roots,
                      ml_plan **part) {
    ml_plan *part_plan = *part = plan_empty();
    part_plan->layout = whole->layout;
    part_plan->target = whole->target;
    part_plan->limit = whole->limit;
    part_plan->options = whole->options;
    part_plan->local = whole->pipeline == NULL;
    part_plan->graph = *graph;
    *graph = NULL;
    plan_roots(part_plan, roots);
    return part_plan;
}

ml_roots plan_roots_copy(ml_arena *arena, const ml_roots *from) {
    ml_roots to = *from;
    if (from->name != NULL) to.name = ml_arena_copy(arena, from->name, strlen(from->name));
    to.outputs = ML_NEW_ARRAY(arena, ml_ref, (size_t)from->output_count + 1);
    to.updates = ML_NEW_ARRAY(arena, ml_update, (size_t)from->update_count + 1);
    for (int i = 0; i < from->output_count; i++) to.outputs[i] = from->outputs[i];
    for (int i = 0; i < from->update_count; i++) to.updates[i] = from->updates[i];
    if (from->overflow_count == 0) return to;
    const ml_origin **origins = ML_NEW_ARRAY(arena, const ml_origin *, from->overflow_count);
    memcpy(origins, from->overflow_origins, sizeof *origins * (size_t)from->overflow_count);
    to.overflow_origins = origins;
    return to;
}

void plan_roots(ml_plan *plan, const ml_roots *from) {
    plan->roots = plan_roots_copy(plan->arena, from);
}

static const char *or_unnamed(const char *name) {
    return name != NULL ? name : "a state without a name";
}

ml_placements ml_plan_state_places(const ml_layout *layout, const ml_graph *g, uint32_t state) {
    const ml_state *info = ml_graph_state(g, state);
    if (info->kind == ML_STATE_CACHE) return (ml_placements){0}; /* of one rank's part */
    return ml_layout_place(layout, g, &info->type, (int)info->kind, or_unnamed(info->name));
}

ml_placements ml_plan_input_places(const ml_layout *layout, const ml_graph *g, uint32_t input) {
    const ml_input *info = ml_graph_input(g, input);
    return ml_layout_place(layout, g, &info->type, -1, info->name);
}

ml_type ml_plan_state_type(const ml_layout *layout, const ml_graph *g, uint32_t state) {
    const ml_type *type = &ml_graph_state(g, state)->type;
    if (layout == NULL) return *type;
    ml_placements places = ml_plan_state_places(layout, g, state);
    return ml_layout_local(layout, type, &places);
}

ml_type ml_plan_input_type(const ml_layout *layout, const ml_graph *g, uint32_t input) {
    const ml_type *type = &ml_graph_input(g, input)->type;
    if (layout == NULL) return *type;
    ml_placements places = ml_plan_input_places(layout, g, input);
    return ml_layout_local(layout, type, &places);
}

ml_type plan_state(const ml_plan *plan, uint32_t state) {
    return ml_plan_state_type(plan->layout, plan->graph, state);
}

void plan_free(ml_plan *plan) {
    if (plan == NULL) return;
    plan_free(plan->rebuild);
    plan_free(plan->next);
    for (uint32_t i = 0; plan->schedule != NULL && i < plan->schedule->steps.count; i++)
        if (plan->schedule->steps.at[i].loop != NULL)
            plan_free(plan->schedule->steps.at[i].loop->plan);
    if (plan->graph != NULL && !plan->borrows) ml_graph_free(plan->graph);
    ml_arena_free(plan->arena);
    ml_free(plan);
}

static bool sets(const ml_plan *const *programs, int64_t count, uint32_t state) {
    for (int64_t p = 0; p < count; p++)
        for (int i = 0; i < programs[p]->roots.update_count; i++)
            if (programs[p]->roots.updates[i].state == state) return true;
    return false;
}

bool ml_plan_leaves_stale(const ml_plan *const *programs, int64_t count, const ml_plan *rebuild) {
    bool stale = false;
    for (int i = 0; i < rebuild->cache_source_count && !stale; i++)
        stale = sets(programs, count, rebuild->cache_sources[i]);
    return stale && !sets(programs, count, rebuild->roots.updates[0].state);
}

const ml_plan *ml_plan_part(const ml_plan *plan, int i) {
    if (i < plan->part_count) return plan->parts[i];
    const ml_plan *rebuild = plan->rebuild;
    for (i -= plan->part_count; i > 0 && rebuild != NULL; i--) rebuild = rebuild->next;
    return rebuild;
}

/* ---- the retry of a check ---- */
static int64_t beyond(int64_t bytes, int64_t others) {
    return bytes > others ? bytes - others : 0;
}

void plan_retry_account(ml_plan *plan) {
    const ml_plan *retry = plan->retry;
    const int64_t bytes = beyond(retry->arena_bytes, plan->arena_bytes) +
                          beyond(retry->library_bytes, plan->library_bytes) +
                          beyond(retry->buffer_bytes, plan->buffer_bytes);
    plan->kind_bytes[ML_MEMORY_WORKSPACE] += bytes;
    plan->peak_bytes += bytes;
}

void ml_plan_set_retry(ml_plan *plan, ml_plan *retry) {
    plan->retry = retry;
    plan_retry_account(plan);
}

/* Insert a part's storages into the sorted list. */
static int largest_add(const ml_plan *part, uint32_t script_inputs, bool *seen, int count,
                       int found, ml_plan_block *list) {
    const ml_schedule *s = part->schedule;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        if (storage->kind == ML_STORAGE_TEMPORARY &&
            (storage->first > part->peak_step || storage->last < part->peak_step)) {
            continue;
        }
        if (storage->kind == ML_STORAGE_INPUT && storage->id >= script_inputs)
            continue; /* memory of the caller */
        if (storage->kind == ML_STORAGE_HOST) continue;
        if (storage->kind == ML_STORAGE_STATE) { /* old and new value share their memory */
            if (seen[storage->id]) continue;
            seen[storage->id] = true;
        }
        if (found == count && storage->bytes <= list[count - 1].bytes) continue;
        int at = found < count ? found++ : count - 1;
        for (; at > 0 && list[at - 1].bytes < storage->bytes; at--) list[at] = list[at - 1];
        list[at] = (ml_plan_block){part->graph, storage->node, storage->bytes};
    }
    return found;
}

int ml_plan_largest(const ml_plan *plan, int count, ml_plan_block *list) {
    bool *seen = ML_NEW_ARRAY(plan->arena, bool, (size_t)ml_graph_state_count(plan->graph) + 1);
    int found = 0;
    for (int i = 0; i < plan->part_count && count > 0; i++)
        found = largest_add(plan->parts[i], plan->script_inputs, seen, count, found, list);
    return found;
}

static void print_origin(const ml_graph *g, ml_ref n, ml_text *out) {
    const ml_origin *origin = n ? ml_graph_origin(g, n) : NULL;
    if (origin == NULL) return;
    if (origin->name != NULL) ml_text_add(out, " %s", origin->name);
    if (origin->file != NULL) ml_text_add(out, " from %s:%d", origin->file, origin->line);
    if (origin->module != NULL && origin->module[0]) ml_text_add(out, " (%s)", origin->module);
}

enum { LARGEST = 10 };
static const double MIB = 1024.0 * 1024, GIB = 1024.0 * 1024 * 1024;

/* The least budget is rounded up, and by more than what a process takes beside plans is rounded. */
static void help_to_fit(int64_t needed, const ml_plan_limit *limit) {
    static const char *const smaller =
        "use a smaller batch, or accumulate gradients over more, smaller parts of it (accum)";
    const double least =
        ceil((double)(needed + limit->outside) / MIB) + (limit->outside > 0 ? 1 : 0);
    if (!limit->budget)
        ml_help("%s", smaller);
    else if (least * MIB < GIB)
        ml_help("--memory %.0fMiB is the least; or %s", least, smaller);
    else
        ml_help("--memory %.2fGiB is the least; or %s", ceil(100 * least * MIB / GIB) / 100,
                smaller);
}

void ml_plan_require(const ml_plan *plan, int64_t extra, const ml_plan_limit *limit) {
    int64_t needed = plan->peak_bytes + extra;
    if (limit->bytes <= 0 || needed <= limit->bytes) return;
    ml_plan_block list[LARGEST];
    ml_text out = {.arena = plan->arena};
    const double unit = needed < GIB ? MIB : GIB;
    const char *name = needed < GIB ? "MiB" : "GiB";
    ml_text_add(&out, "the program needs %.2f %s of memory, and %s", needed / unit, name,
                limit->device);
    if (limit->budget) ml_text_add(&out, " with --memory %.2f %s", limit->budget / unit, name);
    ml_text_add(&out, " has %.2f %s for it\n  ", limit->bytes / unit, name);
    for (int i = 0; i < ML_MEMORY_KINDS; i++) {
        ml_text_add(&out, "%s %.2f, ", ml_memory_names[i], plan->kind_bytes[i] / unit);
    }
    ml_text_add(&out, "other programs %.2f %s\n  largest tensors at the peak:", extra / unit, name);
    int found = ml_plan_largest(plan, LARGEST, list);
    for (int i = 0; i < found; i++) {
        ml_text_add(&out, "\n  %9.3f %s  ", list[i].bytes / unit, name);
        if (list[i].node == 0) {
            ml_text_add(&out, "workspace");
            continue;
        }
        ml_type_print(list[i].graph, ml_graph_type(list[i].graph, list[i].node), &out);
        print_origin(list[i].graph, list[i].node, &out);
    }
    ml_fail(ML_TOO_LARGE, "%s", out.text);
    help_to_fit(needed, limit);
    ml_raise_last();
}

static void print_value(const ml_plan *plan, uint32_t index, ml_text *out) {
    static const char *const kinds[] = {"t", "state ", "input ", "saved ", "coordinate ", "host "};
    const ml_value *value = &plan->schedule->values.at[index];
    const ml_storage *storage = &plan->schedule->storages.at[value->storage];
    bool temporary = storage->kind == ML_STORAGE_TEMPORARY;
    ml_text_add(out, " %s%u", kinds[storage->kind], temporary ? value->storage : storage->id);
    if (temporary || storage->kind == ML_STORAGE_HOST)
        ml_text_add(out, "@%lld", (long long)storage->offset);
    else if (storage->offset != 0)
        ml_text_add(out, "[%lld]", (long long)storage->offset);
    if (value->offset != 0) ml_text_add(out, "+%lld", (long long)value->offset);
    if (value->node != 0) ml_text_add(out, "=%%%u", value->node);
    if (!ml_value_contiguous(value)) ml_text_add(out, "(strided)");
}

void plan_print(const ml_plan *plan, ml_text *out) {
    const ml_schedule *s = plan->schedule;
    ml_text_add(out, "%u steps, %.3f GFLOP, arena %.3f GiB, peak %.3f GiB at step %u\n",
                s->steps.count, plan->flops * 1e-9, plan->arena_bytes / GIB, plan->peak_bytes / GIB,
                plan->peak_step);
    if (plan->host_bytes > 0)
        ml_text_add(out, "offloaded %.3f GiB to %.3f GiB of host memory\n",
                    plan->offloaded_bytes / GIB, plan->host_bytes / GIB);
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        ml_text_add(out, "%4u %s", t, ml_step_kind_name(step->kind));
        if (step->kernel != NULL) ml_text_add(out, " %s", step->kernel->label);
        if (step->collective != NULL) {
            const ml_collective_step *c = step->collective;
            ml_text_add(out, " %s over %s of %lld", ml_collectives[c->kind].name,
                        plan->layout->axis[c->mesh_axis].name, (long long)c->count);
        }
        if (step->host_copy != NULL)
            ml_text_add(out, " %s", step->host_copy->back ? "back" : "out");
        if (step->gemm != NULL) {
            const ml_gemm *gemm = step->gemm;
            ml_text_add(out, " %lldx%lldx%lld x%lld%s", (long long)gemm->m, (long long)gemm->n,
                        (long long)gemm->k,
                        (long long)(gemm->batch[0] * gemm->batch[1] * gemm->batch[2]),
                        gemm->accumulate ? " accumulate" : "");
        }
        ml_text_add(out, ":");
        for (int i = 0; i < step->read_count; i++) print_value(plan, step->values[i], out);
        ml_text_add(out, " ->");
        for (int i = 0; i < step->write_count; i++) {
            print_value(plan, step->values[step->read_count + i], out);
        }
        if (step->node != 0) print_origin(plan->graph, step->node, out);
        ml_text_add(out, "\n");
    }
}
