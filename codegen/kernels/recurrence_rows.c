/* A recurrence over rows (ml_recurrence_by_rows) as one kernel: a thread a row, which holds the
 * elements of the states' short axis, too (cuda/recurrence_rows.cu). Sums over the rows are taken
 * over a block, then over the blocks (cuda/recurrence_sums.cu).
 *
 * The gradient's kernel computes the states before each position again: for POSITIONS at a time,
 * from the states that the forward kernel stored before these, by the forward step. */
#include <string.h>

#include "codegen/kernels/recurrence.h"

enum {
    RING_BYTES = 96 << 10,  /* of a multiprocessor: what covers the latency of its memory ... */
    LEAST_BYTES = 24 << 10, /* ... and of a block, whose slices of positions may be large */
    MOST_BYTES = 48 << 10,
    LEAST_STAGES = 2,
    MOST_STAGES = 8,
    MOST_THREADS = 64,
};

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    ml_recurrence r, of; /* of: what is computed again */
    ml_recurrence_rows rows;
    const ml_scan_step *scan;
    int reads, threads, stages, stage_bytes, shared_bytes, sums;
    int positions;
    recurrence_text *operands; /* by read */
    bool unrolled; /* nothing is wide: slices and histories of a stage are in registers */
    ml_text first, copy, preload, begin, save, slices, replay, work, flush, last;
} printer;

static const ml_value *value_of(const printer *p, int i) {
    return template_value(p->schedule, p->step, i);
}

static ml_dtype dtype_of(const printer *p, int i) {
    return (ml_dtype)value_of(p, i)->type.dtype;
}

static bool is_wide(const printer *p, const ml_type *type) {
    return p->rows.axis && ml_type_find(type, p->rows.axis) >= 0;
}

static int64_t rows_of(const printer *p) {
    return ml_type_elements(&p->rows.type);
}

static ml_axis last_axis(const printer *p) {
    return p->rows.type.axis[p->rows.type.rank - 1];
}

static const char *each(bool wide) {
    return wide ? "_Pragma(\"unroll\") for (int e = 0; e < N; e++) " : "";
}

/* ---- Operands ---- */

static void declare_pointer(printer *p, int i, bool written) {
    const char *type = emit_memory_type(dtype_of(p, i)), *constant = written ? "" : "const ";
    ml_text_add(&p->first, "%s%s *x%d = (%s%s *)P[%d] + %s;\n", constant, type, i, constant, type,
                i, recurrence_offset(p->text.arena, value_of(p, i), &p->rows.type, "row"));
}

/* An element of operand i at position t, behind its pointer. */
static const char *element(const printer *p, int i) {
    const ml_value *v = value_of(p, i);
    ml_text out = {.arena = p->text.arena};
    ml_text_add(&out, "x%d[t * %lldLL", i, (long long)recurrence_stride(v, p->r.axis));
    if (is_wide(p, &v->type))
        ml_text_add(&out, " + e * %lldLL", (long long)recurrence_stride(v, p->rows.axis));
    ml_text_add(&out, "]");
    return out.text;
}

static const char *slice_load(const printer *p, int i, int at, const char *index) {
    ml_arena *arena = p->text.arena;
    const char *slice = ml_arena_format(arena, "((const %s *)(slot + %d))[%s]",
                                        emit_memory_type(dtype_of(p, i)), at, index);
    return template_load(arena, dtype_of(p, i), slice);
}

/* Room for slices of operand i in a stage, and where the first row's begin in memory. */
static int ring_add(printer *p, int i, int64_t elements) {
    const char *type = emit_memory_type(dtype_of(p, i));
    int at = p->stage_bytes;
    ml_text_add(
        &p->first, "const char *from%d = (const char *)((const %s *)P[%d] + %s);\n", i, type, i,
        recurrence_offset(p->text.arena, value_of(p, i), &p->rows.type, "(row - threadIdx.x)"));
    p->stage_bytes += (int)(elements * ml_dtypes[dtype_of(p, i)].bytes);
    return at;
}

/* Slices by asynchronous copies: `width` elements side by side at each position. Where they begin
 * in a stage. */
static int declare_ringed(printer *p, int i, int64_t width, const char *index) {
    const ml_value *v = value_of(p, i);
    int bytes = ml_dtypes[v->type.dtype].bytes, copies = (int)(width * bytes / RECURRENCE_COPY);
    int at = ring_add(p, i, width * p->positions);
    ml_text_add(&p->copy,
                "for (int c = threadIdx.x; c < POSITIONS * %d; c += THREADS) {\n"
                "const long long t = POSITION(c / %d);\n"
                "if (t >= 0 && t < LENGTH) copy_async(to + %d + c * 16, from%d + t * %lldLL + c %% "
                "%d * 16, 16);\n}\n",
                copies, copies, at, i, (long long)(recurrence_stride(v, p->r.axis) * bytes),
                copies);
    p->operands[i].text = slice_load(p, i, at, index);
    if (!p->unrolled) return at;
    ml_text_add(&p->first, "%s in%d[POSITIONS];\n", emit_compute_type(dtype_of(p, i)), i);
    ml_text_add(&p->preload, "in%d[u] = %s;\n", i, p->operands[i].text);
    p->operands[i].text = ml_arena_format(p->text.arena, "in%d[u]", i);
    return at;
}

/* A slice that all rows share: N elements, which a thread loads several at once. */
static void declare_shared_slice(printer *p, int i) {
    const int at = declare_ringed(p, i, p->rows.size, "u * N + e");
    if (dtype_of(p, i) != ML_BF16 && dtype_of(p, i) != ML_F32) return;
    ml_text_add(&p->slices, "float in%d[N];\nload_slice(in%d, (const %s *)(slot + %d) + u * N);\n",
                i, i, emit_memory_type(dtype_of(p, i)), at);
    p->operands[i].text = ml_arena_format(p->text.arena, "in%d[e]", i);
}

static void declare_input(printer *p, int i) {
    ml_arena *arena = p->text.arena;
    const ml_value *v = value_of(p, i);
    const ml_type *rows = &p->rows.type;
    p->operands[i].wide = is_wide(p, &v->type);
    if (!p->operands[i].wide && recurrence_copies(v, p->r.axis, rows, last_axis(p))) {
        declare_ringed(p, i, p->threads, "u * THREADS + threadIdx.x");
        return;
    }
    bool whole = p->rows.size * ml_dtypes[v->type.dtype].bytes % RECURRENCE_COPY == 0;
    if (p->operands[i].wide && whole && recurrence_stride(v, last_axis(p)) == 0 &&
        recurrence_copies(v, p->r.axis, rows, p->rows.axis)) {
        declare_shared_slice(p, i);
        return;
    }
    declare_pointer(p, i, false);
    p->operands[i].text = template_load(arena, dtype_of(p, i), element(p, i));
}

/* A value of a row that lives as long as it: from operand i, or zero. */
static recurrence_text declare_kept(printer *p, const char *name, int i, bool zero) {
    ml_arena *arena = p->text.arena;
    const ml_value *v = value_of(p, i);
    recurrence_text out = {.wide = is_wide(p, &v->type)};
    out.text = ml_arena_format(arena, out.wide ? "%s[e]" : "%s", name);
    const char *from = "0";
    if (!zero) {
        const char *at =
            ml_arena_format(arena, "x%d[%s%lldLL]", i, out.wide ? "e * " : "",
                            (long long)(out.wide ? recurrence_stride(v, p->rows.axis) : 0));
        declare_pointer(p, i, false);
        from = template_load(arena, dtype_of(p, i), at);
    }
    ml_text_add(&p->first, "%s %s%s;\n%s%s = %s;\n", emit_compute_type(dtype_of(p, i)), name,
                out.wide ? "[N]" : "", each(out.wide), out.text, from);
    return out;
}

/* The same memory, read in the same way: where an earlier read stands for this one. */
static int same_read(const printer *p, int i, int begin, int end) {
    for (int k = begin; k < end; k++)
        if (p->step->values[k] == p->step->values[i] && p->operands[k].text) return k;
    return -1;
}

/* Operands of a node from read `at` on: inputs, states, captured. */
static void declare_sources(printer *p, const ml_recurrence *r, int at, bool states) {
    for (int i = 0; i < r->inputs + r->states + r->captured; i++) {
        int read = at + i;
        const char *name = ml_arena_format(p->text.arena, "kept%d", read);
        bool input = i < r->inputs, state = !input && i < r->inputs + r->states;
        if (p->operands[read].text || (state && !states)) continue;
        int same = at ? input ? same_read(p, read, 0, p->r.inputs)
                              : same_read(p, read, p->r.inputs + p->r.states,
                                          p->r.inputs + p->r.states + p->r.captured)
                      : -1;
        if (same >= 0)
            p->operands[read] = p->operands[same];
        else if (input)
            declare_input(p, read);
        else
            p->operands[read] = declare_kept(p, name, read, false);
    }
}

/* ---- The states before each position ---- */

/* States of the step computed again, as `again<j>`, from checkpoints; histories of a stage are in
 * shared memory behind the ring, at `past`. */
static void declare_replay(printer *p) {
    const ml_graph *g = p->schedule->graph;
    ml_arena *arena = p->text.arena;
    if (!p->scan || !p->scan->forward) return;
    int checkpoints = p->scan->forward_at + p->of.inputs + p->of.states + p->of.captured;
    for (int j = 0; j < p->of.states; j++) {
        int i = checkpoints + j, state = p->scan->forward_at + p->of.inputs + j;
        bool wide = is_wide(p, &value_of(p, i)->type);
        int64_t slices = wide ? p->rows.size : 1;
        int bytes = ml_dtypes[dtype_of(p, i)].bytes, copies = p->threads * bytes / RECURRENCE_COPY;
        const char *type = emit_compute_type(dtype_of(p, i));
        int at = p->stage_bytes;
        ml_text_add(&p->first,
                    "const char *from%d = P[%d] + (row - threadIdx.x) * %d;\n%s again%d%s;\n", i, i,
                    bytes, type, j, wide ? "[N]" : "");
        p->stage_bytes += (int)slices * p->threads * bytes;
        ml_text_add(&p->copy,
                    "if (first < LENGTH) for (int c = threadIdx.x; c < %d; c += THREADS)\n"
                    "copy_async(to + %d + c * 16, from%d + (first / POSITIONS * %lld + c / %d) * "
                    "%lldLL + c %% %d * 16, 16);\n",
                    (int)slices * copies, at, i, (long long)slices, copies,
                    (long long)(rows_of(p) * bytes), copies);
        const char *again = ml_arena_format(arena, "again%d%s", j, wide ? "[e]" : "");
        ml_text_add(&p->begin, "%s%s = %s;\n", each(wide), again,
                    slice_load(p, i, at, wide ? "e * THREADS + threadIdx.x" : "threadIdx.x"));
        const char *past = ml_arena_format(arena, "past%d[u]", j);
        if (p->unrolled) {
            ml_text_add(&p->first, "%s past%d[POSITIONS];\n", type, j);
        } else {
            past = ml_arena_format(arena, "((%s *)(past + %d))[(u%s) * THREADS + threadIdx.x]",
                                   type, p->shared_bytes, wide ? " * N + e" : "");
            p->shared_bytes +=
                p->positions * (int)slices * p->threads * (dtype_of(p, i) == ML_F64 ? 8 : 4);
        }
        ml_text_add(&p->save, "%s%s = %s;\n", each(wide), past, again);
        p->operands[state] = (recurrence_text){again, wide};
        for (int k = 0; k < p->r.inputs; k++) {
            ml_ref source = ml_graph_source(g, p->step->node, k);
            if (ml_graph_node(g, source)->op != ML_OP_OUT) continue;
            if (ml_graph_source(g, source, 0) != p->scan->forward) continue;
            if ((int)ml_graph_args(g, source)[0] == ml_recurrence_history(&p->of) + j)
                p->operands[k] = (recurrence_text){past, wide};
        }
    }
}

/* Assign the next values of states, each rounded as memory would. */
static void assign_states(printer *p, ml_text *out, int at, int count, const recurrence_text *next,
                          const char *prefix) {
    for (int i = 0; i < count; i++)
        ml_text_add(out, "%s %s%d%s;\n%s%s%d%s = %s;\n", emit_compute_type(dtype_of(p, at + i)),
                    prefix, i, p->operands[at + i].wide ? "[N]" : "",
                    each(p->operands[at + i].wide), prefix, i,
                    p->operands[at + i].wide ? "[e]" : "", next[i].text);
    for (int i = 0; i < count; i++) {
        bool narrow = dtype_of(p, at + i) == ML_BF16, wide = p->operands[at + i].wide;
        ml_text_add(out, narrow ? "%s%s = ml_round_bf16(%s%d%s);\n" : "%s%s = %s%d%s;\n",
                    each(wide), p->operands[at + i].text, prefix, i, wide ? "[e]" : "");
    }
}

static void print_replay(printer *p) {
    const ml_graph *g = p->schedule->graph;
    if (!p->scan || !p->scan->forward) return;
    int at = p->scan->forward_at;
    ml_ref *roots = ML_NEW_ARRAY(p->text.arena, ml_ref, p->of.states + 1);
    recurrence_text *next = ML_NEW_ARRAY(p->text.arena, recurrence_text, p->of.states + 1);
    for (int i = 0; i < p->of.states; i++) roots[i] = ml_recurrence_root(g, p->scan->forward, i);
    recurrence_body_print(&p->replay, g, p->rows.axis, p->rows.size, p->operands + at, roots,
                          p->of.states, "f", next);
    assign_states(p, &p->replay, at + p->of.inputs, p->of.states, next, "follows");
}

/* ---- Results ---- */

static void store(printer *p, ml_text *out, int i, const char *at, recurrence_text value) {
    bool wide = is_wide(p, &value_of(p, i)->type);
    ml_text_add(out, "%s%s = %s(%s);\n", each(wide), at, ml_dtypes[dtype_of(p, i)].store,
                value.text);
}

/* A sum over the rows: each warp's to shared memory at `part`, a block's of a stage to a workspace.
 */
static void write_row_sum(printer *p, int i, recurrence_text value) {
    bool wide = is_wide(p, &value_of(p, i)->type);
    int k = p->sums++, width = wide ? (int)p->rows.size : 1, warps = p->threads / 32;
    const char *type = emit_compute_type(dtype_of(p, i));
    int64_t last = p->rows.type.size[p->rows.type.rank - 1];
    ml_text_add(&p->work, "{\n%s terms[%d];\n%sterms[%s] = %s;\n", type, width, each(wide),
                wide ? "e" : "0", value.text);
    ml_text_add(&p->work,
                "const %s total = sum_rows<%d>(terms);\nif (threadIdx.x %% 32 < %d) ((%s *)(past + "
                "%d))[(u * %d + threadIdx.x / 32) * %d + threadIdx.x %% 32] = total;\n}\n",
                type, width, width, type, p->shared_bytes, warps, width);
    ml_text_add(
        &p->flush,
        "for (int c = threadIdx.x; c < count * %d; c += THREADS) {\n"
        "const int u = c / %d;\nconst long long t = POSITION(u);\n%s total = 0;\n"
        "for (int w = 0; w < %d; w++) total += ((%s *)(past + %d))[(u * %d + w) * %d + c %% "
        "%d];\n((%s *)P[SUMS + %d])[((block %% %lld * LENGTH + t) * %lldLL + block / %lld) * "
        "%d + c %% %d] = total;\n}\n",
        width, width, type, warps, type, p->shared_bytes, warps, width, width, type, k,
        (long long)(last / p->threads), (long long)(rows_of(p) / last),
        (long long)(last / p->threads), width, width);
    p->shared_bytes += p->positions * warps * width * (dtype_of(p, i) == ML_F64 ? 8 : 4);
}

static void write_output(printer *p, int i, const recurrence_text *results) {
    const ml_graph *g = p->schedule->graph;
    const ml_recurrence *r = &p->r;
    int output = recurrence_output(p->schedule, p->step, i);
    int final = output - ml_recurrence_final(r), history = output - ml_recurrence_history(r);
    ml_ref root =
        output < r->stacked ? ml_recurrence_root(g, p->step->node, r->states + output) : 0;
    if (root && ml_recurrence_row_sum(g, &p->rows, root)) {
        write_row_sum(p, i, results[r->states + output]);
        return;
    }
    declare_pointer(p, i, true);
    if (history >= 0)
        store(p, &p->work, i, element(p, i), p->operands[r->inputs + history]);
    else if (output < r->stacked)
        store(p, &p->work, i, element(p, i), results[r->states + output]);
    else {
        bool wide = is_wide(p, &value_of(p, i)->type);
        const char *name = ml_arena_format(p->text.arena, "sum%d", i);
        int64_t stride = wide ? recurrence_stride(value_of(p, i), p->rows.axis) : 0;
        const char *at = ml_arena_format(p->text.arena, "x%d[%s%lldLL]", i, wide ? "e * " : "",
                                         (long long)stride);
        recurrence_text kept =
            final >= 0 ? p->operands[r->inputs + final] : declare_kept(p, name, i, true);
        if (final < 0)
            ml_text_add(&p->work, "%s%s += %s;\n", each(wide), kept.text,
                        results[r->states + output].text);
        store(p, &p->last, i, at, kept);
    }
}

/* The states before a position from which the gradient begins a stage. */
static void write_checkpoints(printer *p) {
    int writes = p->step->read_count + p->step->write_count - p->scan->checkpoints;
    ml_text_add(&p->work,
                "if (first + u == 0 || (LENGTH - first - u) %% %d == 0) {\n"
                "const long long chunk = (LENGTH - first - u - 1) / %d;\n",
                p->scan->every, p->scan->every);
    for (int j = 0; j < p->scan->checkpoints; j++) {
        int i = writes + j;
        bool wide = is_wide(p, &value_of(p, i)->type);
        const char *at = ml_arena_format(p->text.arena, "((%s *)P[%d])[(chunk%s) * %lldLL + row]",
                                         emit_memory_type(dtype_of(p, i)), i,
                                         wide ? " * N + e" : "", (long long)rows_of(p));
        store(p, &p->work, i, at, p->operands[p->r.inputs + j]);
    }
    ml_text_add(&p->work, "}\n");
}

static void print_step(printer *p, int outputs) {
    const ml_graph *g = p->schedule->graph;
    int count = ml_recurrence_roots(&p->r), at = p->step->read_count;
    ml_ref *roots = ML_NEW_ARRAY(p->text.arena, ml_ref, count + 1);
    recurrence_text *results = ML_NEW_ARRAY(p->text.arena, recurrence_text, count + 1);
    bool *wanted = ML_NEW_ARRAY(p->text.arena, bool, count + 1);
    int used = 0;
    for (int i = 0; i < outputs; i++) {
        int output = recurrence_output(p->schedule, p->step, at + i);
        if (output < ml_recurrence_final(&p->r)) wanted[p->r.states + output] = true;
    }
    for (int i = 0; i < count; i++) {
        ml_ref root = ml_recurrence_root(g, p->step->node, i);
        bool stacked = i >= p->r.states && i < p->r.states + p->r.stacked;
        ml_ref sum = stacked ? ml_recurrence_row_sum(g, &p->rows, root) : 0;
        if (i < p->r.states || wanted[i]) roots[used++] = sum ? sum : root;
    }
    recurrence_text *found = ML_NEW_ARRAY(p->text.arena, recurrence_text, count + 1);
    if (p->scan && p->scan->checkpoints) write_checkpoints(p);
    recurrence_body_print(&p->work, g, p->rows.axis, p->rows.size, p->operands, roots, used, "v",
                          found);
    for (int i = 0, k = 0; i < count; i++)
        if (i < p->r.states || wanted[i]) results[i] = found[k++];
    for (int i = 0; i < outputs; i++) write_output(p, at + i, results);
    assign_states(p, &p->work, p->r.inputs, p->r.states, results, "next");
}

/* ---- The kernel ---- */

static const char *or_empty(const ml_text *text) {
    return text->text ? text->text : "";
}

static void set_parameters(printer *p, int64_t blocks) {
    ml_template *t = &p->text;
    int sums = p->step->read_count + p->step->write_count - p->sums;
    template_set(t, "POINTERS", "%d", p->step->read_count + p->step->write_count);
    template_set(t, "SUMS", "%d", sums);
    template_set(t, "LENGTH", "%lldLL", (long long)p->r.length);
    template_set(t, "REVERSE", "%d", p->r.reverse);
    template_set(t, "QUICK", "%d", recurrence_quick(p->schedule, p->step, p->r.axis));
    template_set(t, "N", "%lld", (long long)p->rows.size);
    template_set(t, "UNROLL", "%d", p->unrolled ? p->positions : 1);
    template_set(t, "POSITIONS", "%d", p->positions);
    template_set(t, "STAGES", "%d", p->stages);
    template_set(t, "STAGE_BYTES", "%d", p->stage_bytes);
    template_set(t, "THREADS", "%d", p->threads);
    template_set(t, "REPLAYS", "%d", p->scan && p->scan->forward);
    template_set_text(t, "FIRST", or_empty(&p->first));
    template_set_text(t, "COPY", or_empty(&p->copy));
    template_set_text(t, "PRELOAD", or_empty(&p->preload));
    template_set_text(t, "BEGIN", or_empty(&p->begin));
    template_set_text(t, "SAVE", or_empty(&p->save));
    template_set_text(t, "SLICES", or_empty(&p->slices));
    template_set_text(t, "REPLAY", or_empty(&p->replay));
    template_set_text(t, "WORK", or_empty(&p->work));
    template_set_text(t, "FLUSH", or_empty(&p->flush));
    template_set_text(t, "LAST", or_empty(&p->last));
    ml_kernel *k =
        template_file(t, "recurrence_rows.cu", "scan", p->step->read_count + p->step->write_count);
    template_launch(k, blocks, 1, 1, (uint32_t)p->threads,
                    (int64_t)p->stages * p->stage_bytes + p->shared_bytes);
    p->step->kernel = k;
}

/* Sums over the blocks of operand i, whose parts are workspace k. */
static ml_kernel *sum_kernel(printer *p, int i, int k) {
    ml_template t = template_begin(p->schedule);
    const ml_value *v = value_of(p, i);
    int64_t last = p->rows.type.size[p->rows.type.rank - 1];
    int pointers = p->step->read_count + p->step->write_count;
    ml_template_loops loops = {0};
    template_loop_add(&loops, p->r.length, recurrence_stride(v, p->r.axis));
    for (int a = 0; a + 1 < p->rows.type.rank; a++)
        template_loop_add(&loops, p->rows.type.size[a], recurrence_stride(v, p->rows.type.axis[a]));
    if (is_wide(p, &v->type))
        template_loop_add(&loops, p->rows.size, recurrence_stride(v, p->rows.axis));
    int64_t total = ml_type_elements(&v->type);
    template_set(&t, "POINTERS", "%d", pointers);
    template_set(&t, "TOTAL", "%lldLL", (long long)total);
    template_set(&t, "BLOCKS", "%lld", (long long)(last / p->threads));
    template_set(&t, "PARTS", "%d", pointers - p->sums + k);
    template_set(&t, "RESULT", "%d", i);
    template_set(&t, "PART", "%s", emit_compute_type(dtype_of(p, i)));
    template_set(&t, "MEMORY", "%s", emit_memory_type(dtype_of(p, i)));
    template_set(&t, "STORE(x)", "%s(x)", ml_dtypes[dtype_of(p, i)].store);
    template_set_text(&t, "AT", template_offset(t.arena, &loops, "i"));
    ml_kernel *kernel = template_file(&t, "recurrence_sums.cu", "scan sums", pointers);
    template_launch(kernel, (total + 255) / 256, 1, 1, 256, 0);
    return kernel;
}

/* Memory for the blocks' sums, after all that the step writes. */
static void add_workspaces(printer *p, int outputs) {
    const ml_graph *g = p->schedule->graph;
    int64_t last = p->rows.type.size[p->rows.type.rank - 1];
    for (int i = 0; i < outputs; i++) {
        int at = p->step->read_count + i, output = recurrence_output(p->schedule, p->step, at);
        if (output >= p->r.stacked) continue;
        ml_ref root = ml_recurrence_root(g, p->step->node, p->r.states + output);
        if (!ml_recurrence_row_sum(g, &p->rows, root)) continue;
        ml_dtype dtype = dtype_of(p, at) == ML_F64 ? ML_F64 : ML_F32;
        int64_t elements = ml_type_elements(&value_of(p, at)->type);
        template_workspace(p->schedule, p->step, dtype, elements * (last / p->threads));
    }
}

/* Of a block: its share where few blocks are on a multiprocessor. */
static int ring_bytes(const printer *p) {
    int processors = p->schedule->target->multiprocessors;
    int64_t blocks = rows_of(p) / p->threads / (processors > 0 ? processors : 1) + 1;
    int64_t share = RING_BYTES / blocks;
    return (int)(share < LEAST_BYTES ? LEAST_BYTES : share > MOST_BYTES ? MOST_BYTES : share);
}

void recurrence_rows_kernel(ml_schedule *s, ml_step *step) {
    printer p = {.schedule = s, .step = step, .text = template_begin(s), .scan = step->scan};
    ml_text *texts[] = {&p.first,  &p.copy,   &p.preload, &p.begin, &p.save,
                        &p.slices, &p.replay, &p.work,    &p.flush, &p.last};
    for (int i = 0; i < (int)(sizeof texts / sizeof *texts); i++) texts[i]->arena = p.text.arena;
    ml_recurrence_read(s->graph, step->node, &p.r);
    ml_recurrence_by_rows(s->graph, step->node, &p.rows);
    int64_t last = p.rows.type.size[p.rows.type.rank - 1];
    int outputs = step->write_count - (p.scan ? p.scan->checkpoints : 0);
    p.unrolled = p.rows.axis == 0;
    p.threads = last % MOST_THREADS == 0 ? MOST_THREADS : 32;
    p.positions = p.scan ? p.scan->every : 16;
    p.operands = ML_NEW_ARRAY(p.text.arena, recurrence_text, step->read_count + 1);
    bool replays = p.scan && p.scan->forward;
    if (replays) ml_recurrence_read(s->graph, p.scan->forward, &p.of);
    declare_replay(&p);
    declare_sources(&p, &p.r, 0, true);
    if (replays) declare_sources(&p, &p.of, p.scan->forward_at, false);
    print_replay(&p);
    print_step(&p, outputs);
    if (p.sums) add_workspaces(&p, outputs);
    if (p.stage_bytes == 0) p.stage_bytes = RECURRENCE_COPY;
    p.stages = ring_bytes(&p) / p.stage_bytes;
    if (p.stages < LEAST_STAGES) p.stages = LEAST_STAGES;
    if (p.stages > MOST_STAGES) p.stages = MOST_STAGES;
    set_parameters(&p, rows_of(&p) / p.threads);
    ml_kernel *end = step->kernel;
    for (int i = 0, k = 0; i < outputs && k < p.sums; i++) {
        int at = step->read_count + i, output = recurrence_output(s, step, at);
        if (output >= p.r.stacked) continue;
        ml_ref root = ml_recurrence_root(s->graph, step->node, p.r.states + output);
        if (ml_recurrence_row_sum(s->graph, &p.rows, root))
            end = end->next = sum_kernel(&p, at, k++);
    }
}
