/* What follows every pass: the old graph is freed, the new one verified and printed where that is
 * asked for. */
#include <stdio.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/plan/log.h"
#include "runtime/plan/plan_internal.h"

/* Print the graph where options->dump, PASS or PASS@PROGRAM, asks for it. */
static void dump(const ml_plan *plan, const char *pass) {
    const char *wanted = plan->options->dump, *at = wanted ? strchr(wanted, '@') : NULL;
    if (wanted == NULL) return;
    size_t length = at ? (size_t)(at - wanted) : strlen(wanted);
    if (strlen(pass) != length || strncmp(pass, wanted, length) != 0) return;
    const char *name = plan->roots.name ? plan->roots.name : "";
    if (at != NULL && strcmp(at + 1, name) != 0) return;
    ml_text out = {.arena = plan->arena};
    ml_graph_print(plan->graph, &plan->roots, &out);
    fprintf(stderr, "-- %s of program \"%s\": %u nodes\n%s", pass, name,
            ml_graph_count(plan->graph) - 1, out.text ? out.text : "");
}

void plan_graph_set(ml_plan *plan, ml_graph *graph) {
    if (graph == plan->graph) return;
    if (!plan->borrows) ml_graph_free(plan->graph);
    plan->graph = graph;
    plan->borrows = false;
}

void pass_done(ml_plan *plan, ml_graph *graph, const char *name) {
    plan_graph_set(plan, graph);
    if (plan->options->verify) ml_graph_verify(plan->graph, &plan->roots, name);
    dump(plan, name);
    log_pass(plan, name);
    ml_time_part(name);
    ml_debug(5, "%s: %u nodes\n", name, ml_graph_count(plan->graph) - 1);
}
