/* A recurrence whose step is elementwise, as one kernel: each element of the states is a row that
 * one thread takes over all positions, its states in registers. Operands may have any strides
 * (c/recurrence.c, cuda/recurrence.cu); where most inputs have rows side by side in memory, slices
 * of the next positions are on their way to shared memory meanwhile (cuda/recurrence_ring.cu).
 * Where few rows would wait for one position after another, and positions compose
 * (recurrence_compose.c), the warps of a block take positions of a stage side by side
 * (cuda/recurrence_parallel.cu); of fewer rows, or rows that lie apart, all threads of a block take
 * positions of one row (cuda/recurrence_positions.cu).
 *
 * A history that is the states after each position is read from there, one position off
 * (lower/recurrence.c); the step's reads after the node's sources are the states before the first
 * position of these. */
#include <string.h>

#include "codegen/kernels/recurrence.h"

enum {
    LANES = 64,         /* CPU: rows side by side, at most */
    C_GRAIN = 30000,    /* elements worth waking a thread */
    UNROLL = 8,         /* CUDA: positions of a thread whose inputs are loaded before the first is
                           computed */
    CUDA_THREADS = 128, /* of a block */
    POSITIONS = 8,      /* ring: of a stage */
    WARPS = 8,          /* parallel: of a block, each of which takes ... */
    SPAN = 8,           /* ... so many positions of a stage */
    WIDTH = 32,         /* parallel: rows of a block */
    FEW = 8,            /* positions: rows of a multiprocessor, at most: blocks that run at once */
    HASTE = 58800,      /* bytes that memory moves while a position takes 14 ns for each operand,
                           which the ring's kernel was measured to do on an H200; half as many
                           where operands are narrow, as 32 rows of them are short pieces */
    RING_BYTES = 96 << 10,  /* of a multiprocessor: what covers the latency of its memory ... */
    BLOCK_BYTES = 48 << 10, /* ... and at most that many of a block */
    MOST_STAGES = 16,
    LEAST_STAGES = 3,
};

typedef enum {
    FORM_C,
    FORM_PLAIN,
    FORM_POSITIONS,
    FORM_RING,
    FORM_PARALLEL,
} kernel_form;

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    ml_recurrence r;
    ml_type space; /* the rows: axes of every state and result */
    kernel_form form;
    int64_t lanes;     /* 0: CUDA */
    const char *lane;  /* index text of values by lane */
    int sources;       /* reads that are the node's sources */
    int *edge, *shift; /* by input: the read that has its value where it begins, and how far it is
                          off; shift 0: as it stands */
    int threads, stages, stage_bytes; /* ring; the latter: of all inputs so far */
    int width, positions;             /* ring: rows of a block, positions of a stage */
    ml_refs factors;                  /* parallel, positions: of the states, one after another */
    uint32_t max_plus;                /* likewise: which states are */
    const char **values;              /* by read: its text in the step */
    ml_text first, declare, load, work, last, copy, advance, compose, gather, begin, total;
} printer;

/* The address of an element at position `t` of operand i, behind its pointer x<i>. */
static const char *element(const printer *p, int i) {
    ml_arena *arena = p->text.arena;
    const ml_value *v = template_value(p->schedule, p->step, i);
    int64_t along = recurrence_stride(v, p->r.axis);
    int last = p->space.rank - 1;
    int64_t across = p->lanes && last >= 0 ? recurrence_stride(v, p->space.axis[last]) : 0;
    ml_text out = {.arena = arena};
    ml_text_add(&out, "x%d[", i);
    const char *t = i < p->r.inputs && p->shift[i] ? p->shift[i] < 0 ? "(t - 1)" : "(t + 1)" : "t";
    if (along) ml_text_add(&out, "%s * %lldLL", t, (long long)along);
    if (across) ml_text_add(&out, "%sl * %lldLL", along ? " + " : "", (long long)across);
    ml_text_add(&out, along || across ? "]" : "0]");
    return out.text;
}

/* The offset of a row's elements in operand i. */
static const char *row_offset(const printer *p, int i, const char *row) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    return recurrence_offset(p->text.arena, v, &p->space, row);
}

static void declare_pointer(printer *p, int i, bool written) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    const char *type = emit_memory_type((ml_dtype)v->type.dtype);
    ml_text_add(&p->first, "%s%s *x%d = (%s%s *)P[%d] + %s;\n", written ? "" : "const ", type, i,
                written ? "" : "const ", type, i, row_offset(p, i, "row"));
}

/* Of an input: its value at the last position that the step visits is another operand's. */
static const char *at_edge(const printer *p, int i, const char *value) {
    if (i >= p->r.inputs || !p->shift[i]) return value;
    const char *where = p->shift[i] < 0 ? "0" : "LENGTH - 1";
    return ml_arena_format(p->text.arena, "t == %s ? kept%d%s : %s", where, p->edge[i], p->lane,
                           value);
}

static const char *loaded(const printer *p, int i) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    const char *value = template_load(p->text.arena, (ml_dtype)v->type.dtype, element(p, i));
    return at_edge(p, i, value);
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

/* ---- Inputs ---- */

/* Histories that are read one position off, and which operands they begin with. */
static void find_shifts(printer *p) {
    const ml_graph *g = p->schedule->graph;
    p->sources = ml_graph_node(g, p->step->node)->source_count;
    p->edge = ML_NEW_ARRAY(p->text.arena, int, p->r.inputs + 1);
    p->shift = ML_NEW_ARRAY(p->text.arena, int, p->r.inputs + 1);
    for (int i = 0, edges = 0; i < p->r.inputs; i++) {
        ml_ref source = ml_graph_source(g, p->step->node, i);
        if (p->sources + edges == p->step->read_count) break;
        if (template_value(p->schedule, p->step, i)->node == source) continue;
        ml_recurrence of;
        ml_recurrence_read(g, ml_graph_source(g, source, 0), &of);
        p->shift[i] = of.reverse ? 1 : -1;
        p->edge[i] = p->sources + edges++;
    }
}

/* Whether the rows of a block are side by side in input i, at whole copies. */
static bool is_ringed(const printer *p, int i) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    int last = p->space.rank - 1;
    return i < p->r.inputs && last >= 0 &&
           recurrence_copies(v, p->r.axis, &p->space, p->space.axis[last]);
}

static void declare_ringed(printer *p, int i) {
    ml_arena *arena = p->text.arena;
    const ml_value *v = template_value(p->schedule, p->step, i);
    const char *type = emit_memory_type(dtype_of(p, i));
    int bytes = ml_dtypes[v->type.dtype].bytes, copies = p->width * bytes / RECURRENCE_COPY;
    ml_text_add(&p->first, "const char *from%d = (const char *)((const %s *)P[%d] + %s);\n", i,
                type, i, row_offset(p, i, "(row - lane)"));
    ml_text_add(&p->copy,
                "for (int c = threadIdx.x; c < POSITIONS * %d; c += THREADS) {\n"
                "const long long t = POSITION(c / %d) + %d;\n"
                "if (t >= 0 && t < LENGTH) copy_async(to + %d + c * 16, from%d + t * %lldLL + c %% "
                "%d * 16, 16);\n}\n",
                copies, copies, p->shift[i], p->stage_bytes, i,
                (long long)(recurrence_stride(v, p->r.axis) * bytes), copies);
    const char *slice =
        ml_arena_format(arena, "((const %s *)(slot + %d))[u * WIDTH + lane]", type, p->stage_bytes);
    const char *value = template_load(arena, dtype_of(p, i), slice);
    ml_text_add(&p->work, "const %s in%d = %s;\n", emit_compute_type(dtype_of(p, i)), i,
                at_edge(p, i, value));
    p->values[i] = ml_arena_format(arena, "in%d", i);
    p->stage_bytes += p->positions * p->width * bytes;
}

static void declare_input(printer *p, int i) {
    ml_arena *arena = p->text.arena;
    const char *type = emit_compute_type(dtype_of(p, i));
    if (p->form >= FORM_RING && is_ringed(p, i)) {
        declare_ringed(p, i);
        return;
    }
    declare_pointer(p, i, false);
    p->values[i] = ml_arena_format(arena, "in%d%s", i, p->form == FORM_C ? "" : "[u]");
    if (p->form == FORM_C) ml_text_add(&p->work, "const %s in%d = %s;\n", type, i, loaded(p, i));
    if (p->form == FORM_PLAIN || p->form == FORM_POSITIONS) {
        ml_text_add(&p->declare, "%s in%d[UNROLL];\n", type, i);
        ml_text_add(&p->load, "in%d[u] = %s;\n", i, loaded(p, i));
    }
    if (p->form != FORM_RING) return;
    ml_text_add(&p->declare, "%s in%d[POSITIONS], later%d[POSITIONS];\n", type, i, i);
    ml_text_add(&p->load, "later%d[u] = %s;\n", i, loaded(p, i));
    ml_text_add(&p->advance, "in%d[u] = later%d[u];\n", i, i);
}

static void declare_sources(printer *p) {
    ml_arena *arena = p->text.arena;
    p->values = ML_NEW_ARRAY(arena, const char *, p->step->read_count + 1);
    for (int i = 0; i < p->step->read_count; i++) {
        if (i < p->r.inputs) {
            declare_input(p, i);
            continue;
        }
        const char *name = ml_arena_format(arena, "kept%d", i);
        declare_pointer(p, i, false);
        declare_kept(p, name, dtype_of(p, i), loaded(p, i));
        p->values[i] = ml_arena_format(arena, "%s%s", name, p->lane);
    }
}

static void store(const printer *p, ml_text *out, int i, const char *value) {
    ml_text_add(out, "%s = %s(%s);\n", element(p, i), ml_dtypes[dtype_of(p, i)].store, value);
}

/* What the step gives at a position, and what is left after the last. */
static void write_outputs(printer *p, const char *const *results) {
    ml_arena *arena = p->text.arena;
    const ml_recurrence *r = &p->r;
    int outputs = p->step->write_count - (p->step->scan ? p->step->scan->checkpoints : 0);
    for (int i = p->step->read_count; i < p->step->read_count + outputs; i++) {
        int output = recurrence_output(p->schedule, p->step, i);
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
            ml_text_add(&p->total, "%s = sum_parts(%s, (%s *)shared);\n", sum, sum,
                        emit_compute_type(dtype_of(p, i)));
            store(p, &p->last, i, ml_arena_format(arena, "%s%s", sum, p->lane));
        }
    }
}

static int greatest_divisor(int a, int b) {
    return b ? greatest_divisor(b, a % b) : a;
}

/* The states before a position from which the gradient computes those of the next ones again. A
 * stage begins at a multiple of its positions, so that most positions of an unrolled one are known
 * to have none. */
static void write_checkpoints(printer *p) {
    const ml_scan_step *scan = p->step->scan;
    if (!scan || !scan->checkpoints) return;
    int stage = p->form >= FORM_RING ? p->positions : UNROLL;
    ml_text_add(&p->work,
                "if (first + u == 0 || ((LENGTH - u) %% %d == 0 && (LENGTH - first - u) %% %d == "
                "0)) {\nconst long long chunk = (LENGTH - first - u - 1) / %d;\n",
                greatest_divisor(stage, scan->every), scan->every, scan->every);
    for (int j = 0; j < scan->checkpoints; j++) {
        int i = p->step->read_count + p->step->write_count - scan->checkpoints + j;
        ml_text_add(&p->work, "((%s *)P[%d])[chunk * %lldLL + row] = %s(%s);\n",
                    emit_memory_type(dtype_of(p, i)), i, (long long)ml_type_elements(&p->space),
                    ml_dtypes[dtype_of(p, i)].store, p->values[p->r.inputs + j]);
    }
    ml_text_add(&p->work, "}\n");
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

/* What a warp's, or a thread's, positions do to the states, as slopes and offsets. */
static void print_compose(printer *p) {
    const ml_graph *g = p->schedule->graph;
    ml_arena *arena = p->text.arena;
    int states = p->r.states, count = states + (int)p->factors.count, factor = states;
    const char **values = ML_NEW_ARRAY(arena, const char *, p->step->read_count + 1);
    const char **names = ML_NEW_ARRAY(arena, const char *, count + 1);
    ml_ref *roots = ML_NEW_ARRAY(arena, ml_ref, count + 1);
    memcpy(values, p->values, sizeof *values * (size_t)p->step->read_count);
    for (int i = 0; i < states; i++) {
        values[p->r.inputs + i] = ml_arena_format(arena, "offset[%d]", i);
        roots[i] = ml_recurrence_root(g, p->step->node, i);
        ml_text_add(&p->begin, "carry[%d] = %s;\n", i, p->values[p->r.inputs + i]);
        ml_text_add(&p->gather, "%s = before[%d];\n", p->values[p->r.inputs + i], i);
        ml_text_add(&p->last, "%s = carry[%d];\n", p->values[p->r.inputs + i], i);
    }
    for (int i = states; i < count; i++) roots[i] = p->factors.at[i - states];
    ml_text_add(&p->compose, "%s", p->work.text ? p->work.text : "");
    const ml_function f = {.g = g, .values = values, .index_of = no_index};
    ml_emit_functions(&p->compose, &f, roots, count, "c", names);
    for (int i = 0; i < states; i++) {
        ml_refs own = {0};
        bool max_plus = p->max_plus >> i & 1;
        recurrence_has_form(g, roots[i], p->r.inputs + i, max_plus, arena, &own);
        const char *by = recurrence_slope(&p->compose, g, roots[i], p->r.inputs + i, max_plus,
                                          names + factor, ml_arena_format(arena, "d%d_", i));
        factor += (int)own.count;
        ml_text_add(&p->compose, "const STATE after%d = %s, by%d = %s;\n", i, names[i], i, by);
    }
    for (int i = 0; i < states; i++)
        ml_text_add(&p->compose,
                    "offset[%d] = after%d;\nslope[%d] = joined_slope(%d, by%d, slope[%d]);\n", i, i,
                    i, (int)(p->max_plus >> i & 1), i, i);
}

static void print_step(printer *p) {
    const ml_graph *g = p->schedule->graph;
    int count = ml_recurrence_roots(&p->r);
    ml_ref *roots = ML_NEW_ARRAY(p->text.arena, ml_ref, count + 1);
    const char **results = ML_NEW_ARRAY(p->text.arena, const char *, count + 1);
    for (int i = 0; i < count; i++) roots[i] = ml_recurrence_root(g, p->step->node, i);
    const ml_function f = {.g = g, .values = p->values, .index_of = no_index};
    write_checkpoints(p);
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

/* ---- Forms ---- */

static int64_t rows_of(const printer *p) {
    return ml_type_elements(&p->space);
}

/* Positions compose, and there are enough to take some side by side. */
static bool is_composed(printer *p) {
    const ml_graph *g = p->schedule->graph;
    if (p->r.states == 0 || p->r.length < 4 * WARPS * SPAN) return false;
    for (int i = 1; i < p->r.states; i++)
        if (dtype_of(p, p->r.inputs + i) != dtype_of(p, p->r.inputs)) return false;
    return recurrence_composes(g, p->step->node, p->text.arena, &p->max_plus, &p->factors);
}

/* All inputs come by the ring; positions take longer one after another than memory takes for them.
 */
static bool is_parallel(printer *p) {
    const ml_graph *g = p->schedule->graph;
    int64_t bytes = 0, operands = p->r.inputs + p->r.stacked;
    for (int i = 0; i < p->r.inputs; i++) {
        if (!is_ringed(p, i)) return false;
        bytes += ml_dtypes[dtype_of(p, i)].bytes;
    }
    for (int i = 0; i < p->r.stacked; i++)
        bytes += ml_dtypes[ml_graph_type(g, ml_recurrence_root(g, p->step->node, p->r.states + i))
                               ->dtype]
                     .bytes;
    return rows_of(p) * bytes < (bytes < 4 * operands ? HASTE / 2 : HASTE) * operands;
}

/* Threads of a block: as many as leave a block for each multiprocessor. */
static int ring_threads(const printer *p) {
    const ml_target *target = p->schedule->target;
    int64_t last = p->space.rank ? p->space.size[p->space.rank - 1] : 1;
    if (target->arch < 80 || p->r.length < 4 * POSITIONS) return 0;
    for (int threads = CUDA_THREADS; threads >= 32; threads /= 2)
        if (last % threads == 0 &&
            (threads == 32 || rows_of(p) / threads >= target->multiprocessors))
            return threads;
    return 0;
}

static int state_bytes(const printer *p) {
    return p->r.states && dtype_of(p, p->r.inputs) == ML_F64 ? 8 : 4;
}

/* Parallel: slopes and offsets of two stages. */
static int64_t composed_bytes(const printer *p) {
    return (int64_t)2 * 2 * p->r.states * p->threads * state_bytes(p);
}

/* Positions: likewise of warps, and behind them a number a thread. */
static int64_t positions_bytes(const printer *p) {
    return (int64_t)2 * 2 * p->r.states * WARPS * state_bytes(p) + 32 * WARPS * 8;
}

static void choose_form(printer *p) {
    const ml_target *target = p->schedule->target;
    int bytes = 0, last = p->space.rank - 1;
    p->form = target->kind == ML_TARGET_CUDA ? FORM_PLAIN : FORM_C;
    p->lane = "";
    if (p->form == FORM_C) {
        p->lanes = 1;
        p->lane = "[l]";
        while (last >= 0 && p->lanes < LANES && p->space.size[last] % (2 * p->lanes) == 0)
            p->lanes *= 2;
        return;
    }
    p->threads = p->width = ring_threads(p);
    p->positions = POSITIONS;
    bool composed = is_composed(p), parallel = composed && p->threads && is_parallel(p);
    if (parallel) p->threads = 32 * WARPS, p->width = WIDTH, p->positions = WARPS * SPAN;
    if (composed && !parallel && rows_of(p) <= FEW * (int64_t)target->multiprocessors) {
        p->form = FORM_POSITIONS;
        return;
    }
    for (int i = 0; i < p->r.inputs; i++)
        bytes += is_ringed(p, i) ? p->positions * p->width * ml_dtypes[dtype_of(p, i)].bytes : 0;
    if (bytes == 0) return;
    int64_t processors = target->multiprocessors > 0 ? target->multiprocessors : 1;
    int64_t blocks = (rows_of(p) / p->width + processors - 1) / processors;
    int64_t most = parallel ? RING_BYTES : BLOCK_BYTES;
    int64_t room = RING_BYTES / blocks < most ? RING_BYTES / blocks : most;
    p->stages = (int)(room / bytes);
    if (p->stages < LEAST_STAGES) p->stages = LEAST_STAGES;
    if (p->stages > MOST_STAGES) p->stages = MOST_STAGES;
    if ((int64_t)p->stages * bytes + composed_bytes(p) <= ml_target_shared(target->arch))
        p->form = parallel ? FORM_PARALLEL : FORM_RING;
}

static int threads_of(const printer *p) {
    return p->form >= FORM_RING        ? p->threads
           : p->form == FORM_POSITIONS ? 32 * WARPS
                                       : CUDA_THREADS;
}

static void set_parameters(printer *p) {
    ml_template *t = &p->text;
    template_set(t, "POINTERS", "%d", p->step->read_count + p->step->write_count);
    template_set(t, "LENGTH", "%lldLL", (long long)p->r.length);
    template_set(t, "REVERSE", "%d", p->r.reverse);
    template_set(t, "QUICK", "%d", recurrence_quick(p->schedule, p->step, p->r.axis));
    template_set(t, "LANES", "%lld", (long long)p->lanes);
    template_set(t, "ROWS", "%lldLL", (long long)rows_of(p));
    template_set(t, "UNROLL", "%d", UNROLL);
    template_set(t, "POSITIONS", "%d", p->positions);
    template_set(t, "SPAN", "%d", SPAN);
    template_set(t, "WIDTH", "%d", p->width);
    template_set(t, "STATES", "%d", p->r.states);
    template_set(t, "STATE", "%s", p->r.states ? emit_compute_type(dtype_of(p, p->r.inputs)) : "");
    template_set(t, "MAX_PLUS", "%u", p->max_plus);
    template_set_text(t, "COMPOSE", or_empty(&p->compose));
    template_set_text(t, "GATHER", or_empty(&p->gather));
    template_set_text(t, "BEGIN", or_empty(&p->begin));
    template_set_text(t, "TOTAL", or_empty(&p->total));
    template_set(t, "STAGES", "%d", p->stages);
    template_set(t, "STAGE_BYTES", "%d", p->stage_bytes);
    template_set(t, "THREADS", "%d", threads_of(p));
    template_set_text(t, "FIRST", or_empty(&p->first));
    template_set_text(t, "DECLARE", or_empty(&p->declare));
    template_set_text(t, "COPY", or_empty(&p->copy));
    template_set_text(t, "LOAD", or_empty(&p->load));
    template_set_text(t, "WORK", or_empty(&p->work));
    template_set_text(t, "ADVANCE", or_empty(&p->advance));
    template_set_text(t, "LAST", or_empty(&p->last));
}

void ml_template_recurrence(ml_schedule *s, ml_step *step) {
    if ((step->scan && step->scan->forward) || !ml_recurrence_elementwise(s->graph, step->node)) {
        recurrence_rows_kernel(s, step);
        return;
    }
    static const char *const files[] = {"recurrence.c", "recurrence.cu", "recurrence_positions.cu",
                                        "recurrence_ring.cu", "recurrence_parallel.cu"};
    printer p = {.schedule = s, .step = step, .text = template_begin(s)};
    ml_text *texts[] = {&p.first,   &p.declare, &p.load,   &p.work,  &p.last, &p.copy,
                        &p.advance, &p.compose, &p.gather, &p.begin, &p.total};
    for (int i = 0; i < (int)(sizeof texts / sizeof *texts); i++) texts[i]->arena = p.text.arena;
    ml_recurrence_read(s->graph, step->node, &p.r);
    p.space = *ml_graph_type(s->graph, ml_recurrence_root(s->graph, step->node, 0));
    find_shifts(&p);
    choose_form(&p);
    declare_sources(&p);
    if (p.form == FORM_PARALLEL || p.form == FORM_POSITIONS) print_compose(&p);
    print_step(&p);
    set_parameters(&p);
    step->kernel =
        template_file(&p.text, files[p.form], "scan", step->read_count + step->write_count);
    int64_t rows = rows_of(&p);
    if (p.form == FORM_C) {
        step->kernel->units = rows / p.lanes;
        step->kernel->grain = 1 + C_GRAIN / (p.r.length * p.lanes);
        return;
    }
    bool ring = p.form >= FORM_RING;
    int width = ring ? p.width : p.form == FORM_POSITIONS ? 1 : CUDA_THREADS;
    int64_t shared = ring ? (int64_t)p.stages * p.stage_bytes : 0;
    if (p.form == FORM_PARALLEL) shared += composed_bytes(&p);
    if (p.form == FORM_POSITIONS) shared = positions_bytes(&p);
    template_launch(step->kernel, (rows + width - 1) / width, 1, 1, (uint32_t)threads_of(&p),
                    shared);
}
