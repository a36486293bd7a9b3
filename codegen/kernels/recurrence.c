/* A recurrence whose step is elementwise, as one kernel: each element of the states is a row that
 * one thread takes over all positions, its states in registers (c/recurrence.c,
 * cuda/recurrence.cu). Operands may have any strides. */
#include <string.h>

#include "codegen/kernels/template.h"
#include "runtime/graph/recurrence.h"

enum {
    LANES = 64,         /* CPU: rows side by side, at most */
    C_GRAIN = 30000,    /* elements worth waking a thread */
    UNROLL = 8,         /* CUDA: positions whose inputs are loaded before the first is computed */
    CUDA_THREADS = 128, /* of a block */
};

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    ml_recurrence r;
    ml_type space;            /* the rows: axes of every state and result */
    int64_t lanes;            /* 0: CUDA */
    const char *lane, *input; /* index texts of values by lane, of inputs */
    const char **values;      /* by source: its text in the step */
    ml_text first, declare, load, work, last;
} printer;

static int64_t axis_stride(const ml_value *v, ml_axis axis) {
    int at = ml_type_find(&v->type, axis);
    return at < 0 ? 0 : v->stride[at];
}

/* The address of an element at position `t` of operand i, behind its pointer x<i>. */
static const char *element(const printer *p, int i) {
    ml_arena *arena = p->text.arena;
    const ml_value *v = template_value(p->schedule, p->step, i);
    int64_t along = axis_stride(v, p->r.axis);
    int last = p->space.rank - 1;
    int64_t across = p->lanes && last >= 0 ? axis_stride(v, p->space.axis[last]) : 0;
    ml_text out = {.arena = arena};
    ml_text_add(&out, "x%d[", i);
    if (along) ml_text_add(&out, "t * %lldLL", (long long)along);
    if (across) ml_text_add(&out, "%sl * %lldLL", along ? " + " : "", (long long)across);
    ml_text_add(&out, along || across ? "]" : "0]");
    return out.text;
}

static void declare_pointer(printer *p, int i, bool written) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    ml_template_loops loops = {0};
    for (int k = 0; k < p->space.rank; k++)
        template_loop_add(&loops, p->space.size[k], axis_stride(v, p->space.axis[k]));
    const char *type = emit_memory_type((ml_dtype)v->type.dtype);
    ml_text_add(&p->first, "%s%s *x%d = (%s%s *)P[%d] + %s;\n", written ? "" : "const ", type, i,
                written ? "" : "const ", type, i, template_offset(p->text.arena, &loops, "row"));
}

static const char *loaded(const printer *p, int i) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    return template_load(p->text.arena, (ml_dtype)v->type.dtype, element(p, i));
}

static ml_dtype dtype_of(const printer *p, int i) {
    return (ml_dtype)template_value(p->schedule, p->step, i)->type.dtype;
}

/* "LANES_LOOP" statements of the C kernel, which has an array for each value of a row. */
static const char *each_lane(const printer *p) {
    return p->lanes ? "for (int l = 0; l < LANES; l++) " : "";
}

/* A value of a row that lives as long as it: `name`, from this text on. */
static void declare_kept(printer *p, const char *name, ml_dtype dtype, const char *from) {
    ml_text_add(&p->first, "%s %s%s;\n%s%s%s = %s;\n", emit_compute_type(dtype), name,
                p->lanes ? "[LANES]" : "", each_lane(p), name, p->lane, from);
}

static void declare_sources(printer *p) {
    ml_arena *arena = p->text.arena;
    p->values = ML_NEW_ARRAY(arena, const char *, p->step->read_count + 1);
    for (int i = 0; i < p->step->read_count; i++) {
        declare_pointer(p, i, false);
        if (i >= p->r.inputs) {
            const char *name = ml_arena_format(arena, "kept%d", i);
            declare_kept(p, name, dtype_of(p, i), loaded(p, i));
            p->values[i] = ml_arena_format(arena, "%s%s", name, p->lane);
            continue;
        }
        const char *type = emit_compute_type(dtype_of(p, i));
        p->values[i] = ml_arena_format(arena, "in%d%s", i, p->input);
        if (p->lanes)
            ml_text_add(&p->work, "const %s in%d = %s;\n", type, i, loaded(p, i));
        else {
            ml_text_add(&p->declare, "%s in%d[UNROLL];\n", type, i);
            ml_text_add(&p->load, "%s = %s;\n", p->values[i], loaded(p, i));
        }
    }
}

static void store(const printer *p, ml_text *out, int i, const char *value) {
    ml_text_add(out, "%s = %s(%s);\n", element(p, i), ml_dtypes[dtype_of(p, i)].store, value);
}

/* Which output of the node operand i is. */
static int output_of(const printer *p, int i) {
    const ml_graph *g = p->schedule->graph;
    ml_ref node = template_value(p->schedule, p->step, i)->node;
    return ml_graph_node(g, node)->op == ML_OP_OUT ? (int)ml_graph_args(g, node)[0] : 0;
}

/* What the step gives at a position, and what is left after the last. */
static void write_outputs(printer *p, const char *const *results) {
    ml_arena *arena = p->text.arena;
    const ml_recurrence *r = &p->r;
    for (int i = p->step->read_count; i < p->step->read_count + p->step->write_count; i++) {
        int output = output_of(p, i);
        int final = output - ml_recurrence_final(r), history = output - ml_recurrence_history(r);
        declare_pointer(p, i, true);
        if (history >= 0)
            store(p, &p->work, i, p->values[r->inputs + history]);
        else if (final >= 0)
            store(p, &p->last, i, p->values[r->inputs + final]);
        else if (output < r->stacked)
            store(p, &p->work, i, results[r->states + output]);
        else {
            const char *sum = ml_arena_format(arena, "sum%d", i);
            declare_kept(p, sum, dtype_of(p, i), "0");
            ml_text_add(&p->work, "%s%s += %s;\n", sum, p->lane, results[r->states + output]);
            store(p, &p->last, i, ml_arena_format(arena, "%s%s", sum, p->lane));
        }
    }
}

static const char *no_index(void *context, ml_axis axis) {
    (void)context, (void)axis;
    ml_raise(ML_INTERNAL, "a recurrence by elements counts along an axis");
}

/* States keep the digits of their dtype from position to position, as memory would. */
static void next_states(printer *p, const char *const *results) {
    for (int i = 0; i < p->r.states; i++) {
        int source = p->r.inputs + i;
        bool narrow = dtype_of(p, source) == ML_BF16;
        ml_text_add(&p->work, narrow ? "%s = ml_round_bf16(%s);\n" : "%s = %s;\n",
                    p->values[source], results[i]);
    }
}

static void print_step(printer *p) {
    const ml_graph *g = p->schedule->graph;
    int count = ml_recurrence_roots(&p->r);
    ml_ref *roots = ML_NEW_ARRAY(p->text.arena, ml_ref, count + 1);
    const char **results = ML_NEW_ARRAY(p->text.arena, const char *, count + 1);
    for (int i = 0; i < count; i++) roots[i] = ml_recurrence_root(g, p->step->node, i);
    const ml_function f = {.g = g, .values = p->values, .index_of = no_index};
    ml_emit_functions(&p->work, &f, roots, count, "v", results);
    write_outputs(p, results);
    /* a next value may be a state: all are read before the first is written */
    for (int i = 0; i < p->r.states; i++) {
        const char *name = ml_arena_format(p->text.arena, "next%d", i);
        const char *type = emit_compute_type(dtype_of(p, p->r.inputs + i));
        ml_text_add(&p->work, "const %s %s = %s;\n", type, name, results[i]);
        results[i] = name;
    }
    next_states(p, results);
}

static const char *or_empty(const ml_text *text) {
    return text->text ? text->text : "";
}

void ml_template_recurrence(ml_schedule *s, ml_step *step) {
    printer p = {.schedule = s, .step = step, .text = template_begin(s)};
    ml_template *t = &p.text;
    bool cuda = s->target->kind == ML_TARGET_CUDA;
    ml_text *texts[] = {&p.first, &p.declare, &p.load, &p.work, &p.last};
    for (int i = 0; i < 5; i++) texts[i]->arena = t->arena;
    ml_recurrence_read(s->graph, step->node, &p.r);
    p.space = *ml_graph_type(s->graph, ml_recurrence_root(s->graph, step->node, 0));
    int64_t rows = ml_type_elements(&p.space), lanes = 1;
    int last = p.space.rank - 1;
    while (last >= 0 && lanes < LANES && p.space.size[last] % (2 * lanes) == 0) lanes *= 2;
    p.lanes = cuda ? 0 : lanes;
    p.lane = cuda ? "" : "[l]";
    p.input = cuda ? "[u]" : "";
    declare_sources(&p);
    print_step(&p);
    int pointers = step->read_count + step->write_count;
    template_set(t, "POINTERS", "%d", pointers);
    template_set(t, "LENGTH", "%lldLL", (long long)p.r.length);
    template_set(t, "REVERSE", "%d", p.r.reverse);
    template_set(t, "LANES", "%lld", (long long)lanes);
    template_set(t, "ROWS", "%lldLL", (long long)rows);
    template_set(t, "UNROLL", "%d", UNROLL);
    template_set(t, "THREADS", "%d", CUDA_THREADS);
    template_set_text(t, "FIRST", or_empty(&p.first));
    template_set_text(t, "DECLARE", or_empty(&p.declare));
    template_set_text(t, "LOAD", or_empty(&p.load));
    template_set_text(t, "WORK", or_empty(&p.work));
    template_set_text(t, "LAST", or_empty(&p.last));
    step->kernel = template_file(t, cuda ? "recurrence.cu" : "recurrence.c", "scan", pointers);
    if (cuda) {
        template_launch(step->kernel, (rows + CUDA_THREADS - 1) / CUDA_THREADS, 1, 1, CUDA_THREADS,
                        0);
        return;
    }
    step->kernel->units = rows / lanes;
    step->kernel->grain = 1 + C_GRAIN / (p.r.length * lanes);
}
