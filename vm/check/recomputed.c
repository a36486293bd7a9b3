/* The values that are computed again in the backward pass, or offloaded (recomputed.h). */
#include "vm/check/recomputed.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "runtime/graph/ops.h"

enum { PATH = 256 };

/* "blocks.*.mlp" of "blocks.3.mlp". */
static void layer_class(const char *module, char out[PATH]) {
    size_t length = 0;
    for (const char *at = module; *at && length + 1 < PATH;) {
        size_t word = strcspn(at, "."), digits = strspn(at, "0123456789");
        bool number = word > 0 && digits >= word;
        for (size_t i = 0; i < (number ? 1 : word) && length + 1 < PATH; i++)
            out[length++] = number ? '*' : at[i];
        at += word;
        if (*at == '.' && length + 1 < PATH) out[length++] = *at++;
    }
    out[length] = 0;
}

static json_t *find_entry(json_t *list, const char *module, const char *op, int line) {
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item) {
        if (json_integer_value(json_object_get(item, "line")) == line &&
            strcmp(json_string_value(json_object_get(item, "module")), module) == 0 &&
            strcmp(json_string_value(json_object_get(item, "op")), op) == 0)
            return item;
    }
    return NULL;
}

static void add_to(json_t *item, const char *name, int64_t more) {
    json_t *sum = json_object_get(item, name);
    json_integer_set(sum, json_integer_value(sum) + more);
}

/* One more value of an operator, at a line where `line` is not 0; its entry. */
static json_t *add_value(json_t *list, const ml_origin *origin, const char *op, int line) {
    char module[PATH];
    layer_class(origin->module ? origin->module : "", module);
    json_t *item = find_entry(list, module, op, line);
    if (item == NULL) {
        item = json_pack("{s:s, s:s, s:i, s:i}", "module", module, "op", op, "line", line, "values",
                         0);
        if (line && origin->file) json_object_set_new(item, "file", json_string(origin->file));
        json_array_append_new(list, item);
    }
    add_to(item, "values", 1);
    return item;
}

static void add_node(json_t *list, const ml_graph *g, ml_ref n) {
    const ml_op_info *info = &ml_ops[ml_graph_node(g, n)->op];
    const ml_origin *origin = ml_graph_origin(g, n);
    bool cheap = info->op_class == ML_CLASS_MAP;
    bool moves = info->op_class == ML_CLASS_MOVE || info->op_class == ML_CLASS_LEAF;
    if (moves || ml_graph_type(g, n)->rank == 0) return;
    add_value(list, origin, cheap ? "elementwise" : info->name, cheap ? 0 : origin->line);
}

json_t *recomputed_json(const ml_plan *plan) {
    json_t *list = json_array();
    for (int i = 0; i < plan->part_count; i++) {
        const ml_graph *g = plan->parts[i]->schedule->graph;
        for (ml_ref n = 1; n < ml_graph_count(g); n++) {
            unsigned flags = ml_graph_node(g, n)->flags;
            if ((flags & ML_NODE_COPY) && (flags & ML_NODE_BACKWARD)) add_node(list, g, n);
        }
    }
    return list;
}

json_t *offloaded_json(const ml_plan *plan) {
    json_t *list = json_array();
    for (int i = 0; i < plan->part_count; i++) {
        const ml_schedule *s = plan->parts[i]->schedule;
        for (uint32_t t = 0; t < s->steps.count; t++) {
            const ml_step *step = &s->steps.at[t];
            if (step->kind != ML_STEP_HOST_COPY || step->host_copy->back) continue;
            static const ml_origin none;
            bool named = step->node != 0; /* partial results and workspace are of no node */
            const ml_origin *origin = named ? ml_graph_origin(s->graph, step->node) : &none;
            const char *op =
                named ? ml_ops[ml_graph_node(s->graph, step->node)->op].name : "workspace";
            json_t *item = add_value(list, origin, op, origin->line);
            if (json_object_get(item, "bytes") == NULL)
                json_object_set_new(item, "bytes", json_integer(0));
            add_to(item, "bytes", step->host_copy->bytes);
        }
    }
    return list;
}
