/* The scans of a report. */
#include "vm/check/scans.h"

#include <stdio.h>
#include <string.h>

#include "codegen/lower/lower.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/recurrence/recurrence.h"
#include "runtime/predict/predict.h"

static bool same_text(const char *a, const char *b) {
    return a == b || (a && b && strcmp(a, b) == 0);
}

/* The states of a step may have several forms: linear scans, and what is left. */
static check_scan *find(check_scans *scans, const ml_origin *origin, const char *axis,
                        bool linear) {
    for (int i = 0; i < scans->count; i++) {
        check_scan *scan = &scans->list[i];
        bool same =
            scan->origin->line == origin->line && same_text(scan->origin->file, origin->file);
        if (same && scan->linear == linear && strcmp(scan->axis, axis) == 0) return scan;
    }
    if (scans->count == CHECK_SCANS) return NULL;
    scans->list[scans->count] = (check_scan){.origin = origin, .axis = axis, .linear = linear};
    return &scans->list[scans->count++];
}

static void linear_scan_add(check_scans *scans, const ml_graph *g, ml_ref n) {
    ml_linear_scan s;
    ml_linear_scan_read(g, n, &s);
    check_scan *scan = find(scans, ml_graph_origin(g, n), ml_axis_name(g, s.axis), true);
    if (!scan) return;
    scan->count++;
    scan->length = s.length;
    scan->rank = s.rank;
}

/* Of the forward pass, which comes first. */
static void find_reason(check_scan *scan, const ml_graph *g, ml_ref n) {
    const ml_ref at = ml_recurrence_nonlinear(g, n);
    if (!at) {
        scan->refusal = ml_recurrence_refusal(g, n);
        return;
    }
    scan->op = ml_ops[ml_graph_node(g, at)->op].name;
    scan->at = ml_graph_origin(g, at);
}

/* Why a scan has no form in chunks, or its positions do not compose. */
static void print_reason(const check_scan *scan) {
    const char *what = scan->loop ? "no chunks" : "not associative";
    if (scan->op) {
        printf("\n  %s: %s of a state is not linear in it", what, scan->op);
        if (scan->at->file) printf("   %s:%d", scan->at->file, scan->at->line);
    } else if (scan->refusal)
        printf("\n  %s: %s", what, scan->refusal);
}

/* Bytes of the states after one position. */
static int64_t state_bytes(const ml_graph *g, ml_ref n, const ml_recurrence *r) {
    int64_t bytes = 0;
    for (int i = 0; i < r->states; i++) {
        ml_type type;
        ml_recurrence_type(g, n, ml_recurrence_final(r) + i, &type);
        bytes += ml_type_bytes(&type);
    }
    return bytes;
}

static void recurrence_add(check_scan *scan, const ml_plan *part, uint32_t at,
                           const ml_rates *rates) {
    const ml_step *step = &part->schedule->steps.at[at];
    ml_recurrence r;
    ml_recurrence_read(part->graph, step->node, &r);
    const predict_basis by = {.rates = rates};
    if (rates) scan->seconds += predict_step(&by, part->schedule, part->layout, at, NULL);
    if (!scan->turns && part->layout) scan->turns = ml_recurrence_turns(part->graph, step->node);
    if (scan->segment) return;
    scan->segment = ml_recurrence_segment(part->graph, step->node);
    const int64_t bytes = state_bytes(part->graph, step->node, &r);
    scan->stored = (r.length + scan->segment) * bytes;
    scan->all = r.length * scan->segment * bytes;
}

void scans_add(check_scans *scans, const ml_plan *part, const ml_rates *rates) {
    const ml_schedule *s = part->schedule;
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_step *step = &s->steps.at[i];
        ml_recurrence r;
        if (!step->node) continue;
        if (ml_op_is_linear_scan((ml_op)ml_graph_node(part->graph, step->node)->op)) {
            linear_scan_add(scans, part->graph, step->node);
            continue;
        }
        if (ml_graph_node(part->graph, step->node)->op != ML_OP_RECURRENCE) continue;
        ml_recurrence_read(part->graph, step->node, &r);
        check_scan *scan = find(scans, ml_graph_origin(part->graph, step->node),
                                ml_axis_name(part->graph, r.axis), false);
        int kernels = 0, products = 0;
        const ml_schedule *body = step->loop ? step->loop->plan->schedule : NULL;
        for (uint32_t k = 0; body && k < body->steps.count; k++) {
            kernels += body->steps.at[k].kind == ML_STEP_KERNEL;
            products += body->steps.at[k].gemm != NULL;
        }
        if (body) scans_add(scans, step->loop->plan, NULL);
        if (!scan) continue;
        recurrence_add(scan, part, i, rates);
        if (scan->count == 0) scan->algebra = ml_recurrence_algebra(part->graph, step->node);
        if (body ? !scan->loop : scan->count == 0 && !scan->algebra)
            find_reason(scan, part->graph, step->node);
        scan->count++;
        if (r.length > scan->length) scan->length = r.length;
        scan->loop = scan->loop || body;
        for (const ml_kernel *k = step->kernel; k; k = k->next) scan->resident |= k->cooperative;
        if (body && s->target->kind == ML_TARGET_CUDA) scan->why = step->loop->why;
        if (kernels > scan->kernels) scan->kernels = kernels;
        if (products > scan->products) scan->products = products;
    }
}

/* Of a scan in chunks: along the positions of one (linear_scan/chunks.c). */
static bool is_part(const check_scan *scan) {
    const char *mark = strchr(scan->axis, '\'');
    return mark != NULL && strcmp(mark, "'positions") == 0;
}

/* The states that ranks pass on along a scan's axis (runtime/ops/recurrence/shard.c). */
static bool is_passing(const check_scan *scan) {
    const char *mark = strchr(scan->axis, '\'');
    return mark != NULL && strcmp(mark, "'parts") == 0;
}

/* Of a scan by segments: along the positions of one (recurrence/segments.c). */
static bool is_step(const check_scan *scan) {
    const char *mark = strchr(scan->axis, '\'');
    return mark != NULL && strncmp(mark, "'steps", 6) == 0;
}

static void print_bytes(int64_t bytes) {
    char text[64];
    vm_format_bytes(text, sizeof text, bytes);
    fputs(text, stdout);
}

/* How long segments are, and why there are any; that ranks wait for one another. */
static void print_choices(const check_scan *scan) {
    if (scan->segment) {
        fputs("\n  states of one segment at a time are computed again to fit in memory: ", stdout);
        print_bytes(scan->stored);
        fputs(" where those at all positions take ", stdout);
        print_bytes(scan->all);
    }
    if (!scan->turns) return;
    printf("\n  ranks take turns: %lld parts one after another", (long long)scan->turns);
    if (scan->seconds > 0) printf(", predicted %.3g ms a run", 1e3 * scan->seconds);
}

void scans_print(const check_scans *scans) {
    for (int i = 0; i < scans->count; i++) {
        const check_scan *scan = &scans->list[i];
        if (is_part(scan)) continue;
        const int stem = (int)strcspn(scan->axis, "'");
        printf("scan over %-5.*s ", stem, scan->axis);
        if (is_passing(scan))
            printf("states passed along %lld of them", (long long)scan->length);
        else if (scan->segment)
            printf("loop over %lld segments of %lld positions", (long long)scan->length,
                   (long long)scan->segment);
        else if (scan->axis[stem] && !is_step(scan))
            printf("products over %lld chunks of positions%s", (long long)scan->length,
                   scan->loop ? ", matrices from chunk to chunk" : "");
        else if (scan->linear && scan->rank)
            printf("kernels of chunks over %lld positions, transitions of rank %d",
                   (long long)scan->length, scan->rank);
        else if (scan->linear)
            printf("kernels of chunks over %lld positions", (long long)scan->length);
        else if (scan->loop)
            printf("loop over %lld positions, %d kernels and %d matrix products each",
                   (long long)scan->length, scan->kernels, scan->products);
        else if (scan->resident)
            printf("one kernel over %lld positions, products of states too",
                   (long long)scan->length);
        else
            printf("one kernel over %lld positions%s%s", (long long)scan->length,
                   scan->algebra ? ", associative: " : "", scan->algebra ? scan->algebra : "");
        if (scan->count > 1) printf(", %d times", scan->count);
        if (scan->origin->file) printf("   %s:%d", scan->origin->file, scan->origin->line);
        const bool chosen = scan->loop || (!scan->linear && !scan->resident && !scan->algebra);
        if (chosen && (!scan->axis[stem] || is_step(scan))) print_reason(scan);
        if (scan->loop && scan->why && !scan->segment) printf("\n  no kernel: %s", scan->why);
        print_choices(scan);
        printf("\n");
    }
}

void scans_json(const check_scans *scans, json_t *object) {
    if (scans->count == 0) return;
    json_t *list = json_array();
    for (int i = 0; i < scans->count; i++) {
        const check_scan *scan = &scans->list[i];
        if (is_part(scan) || is_passing(scan)) continue;
        const bool segments = scan->segment || is_step(scan);
        const bool chunks = scan->linear || (strchr(scan->axis, '\'') != NULL && !segments);
        const char *file = scan->origin->file ? scan->origin->file : "";
        json_t *one = json_pack("{s:s, s:I, s:s, s:i, s:s, s:i}", "axis", scan->axis, "positions",
                                (json_int_t)scan->length, "form",
                                chunks       ? "chunks"
                                : scan->loop ? "loop"
                                             : "one kernel",
                                "count", scan->count, "file", file, "line", scan->origin->line);
        if (scan->algebra) json_object_set_new(one, "associative", json_string(scan->algebra));
        if (scan->segment) json_object_set_new(one, "segment", json_integer(scan->segment));
        if (scan->turns) json_object_set_new(one, "turns", json_integer(scan->turns));
        json_array_append_new(list, one);
    }
    json_object_set_new(object, "scans", list);
}
