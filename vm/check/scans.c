/* The scans of a report. */
#include "vm/check/scans.h"

#include <stdio.h>
#include <string.h>

#include "runtime/graph/recurrence.h"

static check_scan *find(check_scans *scans, const ml_origin *origin, const char *axis) {
    for (int i = 0; i < scans->count; i++) {
        check_scan *scan = &scans->list[i];
        bool same = scan->origin->line == origin->line && scan->origin->file == origin->file;
        if (same && strcmp(scan->axis, axis) == 0) return scan;
    }
    if (scans->count == CHECK_SCANS) return NULL;
    scans->list[scans->count] = (check_scan){.origin = origin, .axis = axis};
    return &scans->list[scans->count++];
}

void scans_add(check_scans *scans, const ml_plan *part) {
    const ml_schedule *s = part->schedule;
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_step *step = &s->steps.at[i];
        ml_recurrence r;
        if (!step->node || ml_graph_node(part->graph, step->node)->op != ML_OP_RECURRENCE) continue;
        ml_recurrence_read(part->graph, step->node, &r);
        check_scan *scan = find(scans, ml_graph_origin(part->graph, step->node),
                                ml_axis_name(part->graph, r.axis));
        int kernels = 0, products = 0;
        const ml_schedule *body = step->loop ? step->loop->plan->schedule : NULL;
        for (uint32_t k = 0; body && k < body->steps.count; k++) {
            kernels += body->steps.at[k].kind == ML_STEP_KERNEL;
            products += body->steps.at[k].gemm != NULL;
        }
        if (body) scans_add(scans, step->loop->plan);
        if (!scan) continue;
        scan->count++;
        scan->length = r.length;
        scan->loop = scan->loop || body;
        if (kernels > scan->kernels) scan->kernels = kernels;
        if (products > scan->products) scan->products = products;
    }
}

/* Of a scan in chunks: along the positions of one (recurrence_chunks.c). */
static bool is_part(const check_scan *scan) {
    const char *mark = strchr(scan->axis, '\'');
    return mark != NULL && strcmp(mark, "'positions") == 0;
}

void scans_print(const check_scans *scans) {
    for (int i = 0; i < scans->count; i++) {
        const check_scan *scan = &scans->list[i];
        if (is_part(scan)) continue;
        const int stem = (int)strcspn(scan->axis, "'");
        printf("scan over %-5.*s ", stem, scan->axis);
        if (scan->axis[stem])
            printf("products over %lld chunks of positions", (long long)scan->length);
        else if (scan->loop)
            printf("loop over %lld positions, %d kernels and %d matrix products each",
                   (long long)scan->length, scan->kernels, scan->products);
        else
            printf("one kernel over %lld positions", (long long)scan->length);
        if (scan->count > 1) printf(", %d times", scan->count);
        if (scan->origin->file) printf("   %s:%d", scan->origin->file, scan->origin->line);
        printf("\n");
    }
}

void scans_json(const check_scans *scans, json_t *object) {
    if (scans->count == 0) return;
    json_t *list = json_array();
    for (int i = 0; i < scans->count; i++) {
        const check_scan *scan = &scans->list[i];
        if (is_part(scan)) continue;
        const bool chunks = strchr(scan->axis, '\'') != NULL;
        const char *file = scan->origin->file ? scan->origin->file : "";
        json_array_append_new(list, json_pack("{s:s, s:I, s:s, s:i, s:s, s:i}", "axis", scan->axis,
                                              "positions", (json_int_t)scan->length, "form",
                                              chunks       ? "chunks"
                                              : scan->loop ? "loop"
                                                           : "one kernel",
                                              "count", scan->count, "file", file, "line",
                                              scan->origin->line));
    }
    json_object_set_new(object, "scans", list);
}
