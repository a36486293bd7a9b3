/* The graph as text, a line a node. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/graph/op_interface.h"

static void print_constant(const ml_graph *g, ml_ref n, ml_text *out) {
    int64_t bits = ml_graph_args(g, n)[0];
    double value;
    ml_dtype dtype = ml_graph_type(g, n)->dtype;
    if (dtype == ML_BOOL) {
        ml_text_add(out, " %s", bits ? "true" : "false");
        return;
    }
    if (!ml_is_float(dtype)) {
        ml_text_add(out, " %lld", (long long)bits);
        return;
    }
    memcpy(&value, &bits, sizeof value);
    char text[40]; /* the shortest that reads back as the same */
    int digits = 6;
    do snprintf(text, sizeof text, "%.*g", digits, value);
    while (digits++ < 17 && strtod(text, NULL) != value);
    ml_text_add(out, " %s", text);
}

/* One of few arguments, which their order explains. */
static void print_arg(const ml_graph *g, ml_ref n, ml_arg_kind kind, int64_t value, ml_text *out) {
    if (kind == ML_ARG_BITS)
        print_constant(g, n, out);
    else if (kind == ML_ARG_AXIS_OR_0 && !value)
        ml_text_add(out, " whole");
    else if (ml_arg_is_axis(kind) || kind == ML_ARG_AXIS_OR_0)
        ml_text_add(out, " %s", ml_axis_name(g, (ml_axis)value));
    else
        ml_text_add(out, " %lld", (long long)value);
}

/* One of many, by name; nothing of those that are 0. */
static void print_named_arg(const ml_graph *g, const ml_op_arg *arg, int64_t value, ml_text *out) {
    double number;
    memcpy(&number, &value, sizeof number);
    if (value) ml_text_add(out, " %s", arg->name);
    if (!value || arg->kind == ML_ARG_FLAG) return;
    if (arg->kind == ML_ARG_BITS)
        ml_text_add(out, "=%g", number);
    else if (ml_arg_is_axis(arg->kind))
        ml_text_add(out, "=%s", ml_axis_name(g, (ml_axis)value));
    else
        ml_text_add(out, arg->kind == ML_ARG_FUNCTION ? "=%%%lld" : "=%lld", (long long)value);
}

static void print_args(const ml_graph *g, ml_ref n, ml_text *out) {
    const ml_node *node = ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    const bool many = ml_op_arg_count(node->op) > 5;
    const ml_op_interface *own = ml_op_interfaces[node->op];
    if (own && own->print) {
        own->print(g, n, out);
        return;
    }
    for (int i = 0; i < node->arg_count; i++) {
        const ml_op_arg *arg = ml_op_arg_of(node->op, i);
        if (many)
            print_named_arg(g, arg, args[i], out);
        else
            print_arg(g, n, arg->kind, args[i], out);
    }
    const char *name = NULL;
    if (node->op == ML_OP_STATE) name = ml_graph_state(g, (uint32_t)args[0])->name;
    if (node->op == ML_OP_INPUT) name = ml_graph_input(g, (uint32_t)args[0])->name;
    if (node->op == ML_OP_STATE || node->op == ML_OP_INPUT)
        ml_text_add(out, " %s", name ? name : "(unnamed)");
}

static void print_node(const ml_graph *g, ml_ref n, ml_text *out) {
    const ml_node *node = ml_graph_node(g, n);
    const ml_origin *origin = ml_graph_origin(g, n);
    ml_text_add(out, "%%%u ", n);
    ml_type_print(g, ml_graph_type(g, n), out);
    ml_text_add(out, " = %s", ml_ops[node->op].name);
    for (int i = 0; i < node->source_count; i++)
        ml_text_add(out, " %%%u", ml_graph_source(g, n, i));
    print_args(g, n, out);
    if (node->flags & ML_NODE_FUNCTION) ml_text_add(out, " (function)");
    if (node->flags & ML_NODE_COPY) ml_text_add(out, " (copy)");
    if (node->flags & ML_NODE_FP8) ml_text_add(out, " (fp8)");
    if (origin->file) ml_text_add(out, "   -- %s:%d", origin->file, origin->line);
    if (origin->file && origin->module[0]) ml_text_add(out, " %s", origin->module);
    if (node->flags & ML_NODE_BACKWARD) ml_text_add(out, " (backward)");
    ml_text_add(out, "\n");
}

/* Only what the roots reach, functions included; all nodes where roots is NULL. */
static void mark(const ml_graph *g, const ml_roots *roots, uint8_t *wanted) {
    uint32_t count = ml_graph_count(g);
    if (!roots) {
        memset(wanted, 1, count);
        return;
    }
    for (int i = 0; i < roots->output_count; i++) wanted[roots->outputs[i]] = 1;
    for (int i = 0; i < roots->update_count; i++) wanted[roots->updates[i].value] = 1;
    for (ml_ref n = count - 1; n > 0; n--) {
        if (!wanted[n]) continue;
        const ml_node *node = ml_graph_node(g, n);
        for (int i = 0; i < node->source_count; i++) wanted[ml_graph_source(g, n, i)] = 1;
        for (int i = 0; i < node->arg_count; i++)
            if (ml_op_arg_of(node->op, i)->kind == ML_ARG_FUNCTION)
                wanted[ml_graph_args(g, n)[i]] = 1;
    }
}

void ml_graph_print(const ml_graph *g, const ml_roots *roots, ml_text *out) {
    uint32_t count = ml_graph_count(g);
    uint8_t *wanted = ml_arena_alloc(out->arena, count);
    mark(g, roots, wanted);
    for (ml_ref n = 1; n < count; n++)
        if (wanted[n]) print_node(g, n, out);
    if (!roots) return;
    for (int i = 0; i < roots->output_count; i++)
        ml_text_add(out, "output %d = %%%u\n", i, roots->outputs[i]);
    for (int i = 0; i < roots->update_count; i++) {
        const ml_update *update = &roots->updates[i];
        const char *name = ml_graph_state(g, update->state)->name;
        ml_text_add(out, "state %u %s", update->state, name ? name : "(unnamed)");
        if (update->part) ml_text_add(out, " from %lld on", (long long)update->start);
        ml_text_add(out, " = %%%u\n", update->value);
    }
}
