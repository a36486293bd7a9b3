/* See text.h. */
#include "tests/graph/text.h"
#include "runtime/ops/attention/attention.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_NODES = 512, MOST_WORDS = 64, NAME = 64, MOST_ELEMENTS = 1 << 18 };

typedef struct {
    fixture *f;
    ml_roots *roots;
    const char *line; /* that is being read, for messages */
    int count;
    char name[MOST_NODES][NAME]; /* "%3" */
    ml_ref ref[MOST_NODES];
} reader;

/* A line in parts: "NAME TYPE = WORD WORD ...  -- REMARK". */
typedef struct {
    char name[NAME], axes[256]; /* "batch=4, embed=8" */
    int dtype;                  /* -1: left out */
    bool whole;                 /* the type has axes in brackets */
    char words[MOST_WORDS][NAME];
    int count;
    const char *remark;
} parts;

_Noreturn static void refuse(const reader *r, const char *why) {
    ml_raise(ML_INTERNAL, "%s: %s", why, r->line);
}

static ml_ref find(const reader *r, const char *name) {
    for (int i = r->count; i-- > 0;)
        if (strcmp(r->name[i], name) == 0) return r->ref[i];
    refuse(r, name);
}

static int find_dtype(const char *name) {
    for (int i = 0; i < ML_DTYPE_COUNT; i++)
        if (strcmp(ml_dtypes[i].name, name) == 0) return i;
    return -1;
}

static int find_op(const reader *r, const char *name) {
    for (int i = 0; i < ML_OP_COUNT; i++)
        if (strcmp(ml_ops[i].name, name) == 0) return i;
    refuse(r, "no such op");
}

static void take_apart(const reader *r, const char *line, parts *p) {
    char type[NAME] = "";
    int used = 0;
    const char *flags = strchr(line, '('), *origin = strstr(line, "--");
    *p = (parts){.dtype = -1, .remark = line + strlen(line)};
    if (flags) p->remark = flags;
    if (origin && origin < p->remark) p->remark = origin;
    if (sscanf(line, "%63s %n", p->name, &used) != 1) refuse(r, "no name");
    line += used;
    if (*line != '=' && p->name[0] == '%') {
        if (sscanf(line, "%63[a-z0-9] %n", type, &used) != 1) refuse(r, "no type");
        p->dtype = find_dtype(type);
        if (p->dtype < 0) refuse(r, "no such dtype");
        line += strlen(type);
        if (*line == '[') {
            sscanf(line, "[%255[^]]", p->axes);
            p->whole = true;
            line = strchr(line, ']') + 1;
        }
    }
    for (; p->count < MOST_WORDS && line < p->remark; p->count++) {
        if (sscanf(line, " %63s%n", p->words[p->count], &used) != 1) break;
        line += used;
        if (line > p->remark) break;
    }
}

static ml_type read_type(const reader *r, const parts *p) {
    ml_type type = {.dtype = (uint8_t)p->dtype};
    const char *at = p->axes;
    char name[NAME];
    long long size;
    for (int used; sscanf(at, " %63[^=]=%lld%n", name, &size, &used) == 2; at += *at == ',') {
        type.axis[type.rank] = fixture_axis(r->f, name);
        type.size[type.rank++] = size;
        at += used;
    }
    return type;
}

static double *random_values(fixture *f, const ml_type *type, const char *remark) {
    int64_t count = ml_type_elements(type);
    if (count > MOST_ELEMENTS) return NULL;
    double *values = ML_NEW_ARRAY(f->arena, double, count), bound = 2;
    const char *below = strstr(remark, "(below ");
    if (below) bound = strtod(below + strlen("(below "), NULL);
    bool whole = ml_dtypes[type->dtype].kind != ML_KIND_FLOAT;
    for (int64_t i = 0; i < count; i++)
        values[i] = whole ? floor(fixture_uniform(f, 0, bound)) : fixture_uniform(f, -1, 1);
    return values;
}

static ml_ref add_leaf(reader *r, ml_op op, const parts *p, const ml_type *type) {
    fixture *f = r->f;
    const char *name = ml_arena_copy(f->arena, p->words[3], strlen(p->words[3]));
    int64_t id;
    if (p->dtype < 0 || p->count < 4) refuse(r, "a type, a number and a name are wanted");
    if (op == ML_OP_INPUT) {
        id = ml_graph_add_input(f->g, &(ml_input){.name = name, .type = *type});
        f->inputs[id] = random_values(f, type, p->remark);
        f->input_count = (int)id + 1;
    } else {
        ml_state_kind kind = strncmp(name, "sum", 3) == 0    ? ML_STATE_GRADIENT
                             : strncmp(name, "adam", 4) == 0 ? ML_STATE_OPTIMIZER
                                                             : ML_STATE_PARAMETER;
        id = ml_graph_add_state(f->g, &(ml_state){.name = name, .kind = kind, .type = *type});
        f->states[id] = random_values(f, type, p->remark);
        f->state_count = (int)id + 1;
    }
    if (id != atoi(p->words[2])) refuse(r, "numbers ascend from 0");
    ml_ref n = ml_graph_add(f->g, op, NULL, 0, &id, 1, type);
    if (op == ML_OP_INPUT) f->nodes[id] = n;
    return n;
}

static int64_t read_argument(reader *r, ml_arg_kind kind, const char *word, bool number) {
    int64_t bits;
    double value = strtod(word, NULL);
    memcpy(&bits, &value, sizeof bits);
    if (kind == ML_ARG_AXIS_OR_0 && strcmp(word, "whole") == 0) return 0;
    if (ml_arg_is_axis(kind) || kind == ML_ARG_AXIS_OR_0) return fixture_axis(r->f, word);
    if (kind == ML_ARG_BITS && number) return bits;
    return strcmp(word, "true") == 0 ? 1 : atoll(word);
}

/* Arguments by name, from word `at` on: "seq=s kv_seq=s heads=h kv_heads=h head_dim=d scale=0.5
 * causal window=3". The count. */
static int read_named(reader *r, ml_op op, const parts *p, int at, int64_t *argument) {
    const ml_op_arg *args = ml_ops[op].args;
    const int count = ml_op_arg_count(op);
    for (int i = 0; i < count; i++)
        argument[i] = args[i].kind == ML_ARG_BITS ? read_argument(r, ML_ARG_BITS, "1", true) : 0;
    for (; at < p->count; at++) {
        char key[NAME] = "", value[NAME] = "1";
        sscanf(p->words[at], "%63[^=]=%63s", key, value);
        int i = 0;
        while (i < count && strcmp(args[i].name, key) != 0) i++;
        if (i == count) refuse(r, "not read");
        argument[i] = read_argument(r, args[i].kind, value, true);
    }
    return count;
}

static ml_ref add_node(reader *r, const parts *p) {
    int sources = 0, arguments = 0;
    ml_ref source[MOST_WORDS];
    int64_t argument[MOST_WORDS];
    ml_op op = (ml_op)find_op(r, p->words[1]);
    ml_type type = read_type(r, p);
    if (op == ML_OP_INPUT || op == ML_OP_STATE) return add_leaf(r, op, p, &type);
    while (2 + sources < p->count && p->words[2 + sources][0] == '%') {
        source[sources] = find(r, p->words[2 + sources]);
        sources++;
    }
    bool number = p->dtype >= 0 && ml_dtypes[p->dtype].kind == ML_KIND_FLOAT;
    if (ml_op_attends(op))
        arguments = read_named(r, op, p, 2 + sources, argument);
    else
        for (int i = 2 + sources; i < p->count; i++, arguments++)
            argument[arguments] =
                read_argument(r, ml_op_arg_of(op, arguments)->kind, p->words[i], number);
    return ml_graph_add(r->f->g, op, source, sources, argument, arguments,
                        p->dtype < 0 ? NULL : &type);
}

/* "file.lua:3 blocks.1 (backward) (copy) (fp8)" */
static void set_origin(const reader *r, const parts *p) {
    char file[NAME] = "", module[NAME] = "";
    int line = 0;
    sscanf(p->remark, "-- %63[^: (]:%d %63[^ (]", file, &line, module);
    ml_origin origin = {.line = line};
    if (*file) origin.file = ml_arena_copy(r->f->arena, file, strlen(file));
    origin.module = ml_arena_copy(r->f->arena, module, strlen(module));
    ml_graph_set_origin(r->f->g, &origin);
    ml_graph_set_flags(r->f->g, (strstr(p->remark, "(backward)") ? ML_NODE_BACKWARD : 0) |
                                    (strstr(p->remark, "(copy)") ? ML_NODE_COPY : 0) |
                                    (strstr(p->remark, "(fp8)") ? ML_NODE_FP8 : 0));
}

/* "output 0 = %3", "state 0 w = %4" */
static void add_root(reader *r, const parts *p) {
    ml_ref n = find(r, p->words[p->count - 1]);
    if (strcmp(p->name, "output") == 0)
        r->roots->outputs[r->roots->output_count++] = n;
    else if (strcmp(p->name, "state") == 0)
        r->roots->updates[r->roots->update_count++] = (ml_update){(uint32_t)atoi(p->words[0]), n};
    else
        refuse(r, "neither a node nor a root");
}

static void read_line(reader *r, const char *line) {
    parts p;
    r->line = line;
    take_apart(r, line, &p);
    if (p.count < 2) refuse(r, "no op");
    if (p.name[0] != '%') {
        add_root(r, &p);
        return;
    }
    set_origin(r, &p);
    ml_ref n = add_node(r, &p);
    ml_type type = read_type(r, &p);
    const ml_type *inferred = ml_graph_type(r->f->g, n);
    if (p.dtype >= 0 && (p.whole ? !ml_type_equal(&type, inferred) : p.dtype != inferred->dtype))
        refuse(r, fixture_type_text(r->f, r->f->g, n));
    if (r->count == MOST_NODES) refuse(r, "too many nodes");
    memcpy(r->name[r->count], p.name, NAME);
    r->ref[r->count++] = n;
}

void graph_read(fixture *f, const char *text, ml_roots *roots) {
    reader *r = ML_NEW(f->arena, reader);
    *r = (reader){.f = f, .roots = roots};
    *roots = (ml_roots){.outputs = ML_NEW_ARRAY(f->arena, ml_ref, MOST_NODES),
                        .updates = ML_NEW_ARRAY(f->arena, ml_update, MOST_NODES)};
    while (*text) {
        size_t length = strcspn(text, "\n");
        if (strspn(text, " ") < length) read_line(r, ml_arena_copy(f->arena, text, length));
        text += length + (text[length] == '\n');
    }
    ml_graph_set_origin(f->g, &(ml_origin){.module = ""});
    ml_graph_set_flags(f->g, 0);
    ml_graph_verify(f->g, roots, "text");
}
