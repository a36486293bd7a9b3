/* A recurrence whose step is elementwise, as one kernel: each element of the states is a row that
 * one thread takes over all positions, its states in registers. Operands may have any strides
 * (c/recurrence.c, cuda/recurrence.cu); where most inputs have rows side by side in memory, slices
 * of the next positions are on their way to shared memory meanwhile (cuda/recurrence_ring.cu).
 * Of narrow operands a thread takes several rows side by side, and the warps of a block take
 * positions of a stage side by side, where positions compose (recurrence_compose.c): else it would
 * wait for its own instructions, not for memory (cuda/recurrence_packed.cu). A gradient whose
 * states are computed again from checkpoints is such a kernel too, or one of recurrence_rows.c.
 * Where few rows would wait for one position after another, the warps of a block do the same of
 * one row a thread (cuda/recurrence_parallel.cu); of fewer rows, or rows that lie apart, all
 * threads of a block take positions of one row (cuda/recurrence_positions.cu).
 *
 * A history that is the states after each position is read from there, one position off
 * (lower/recurrence.c); the step's reads after the node's sources are the states before the first
 * position of these. */
#include "codegen/kernels/recurrence_elements.h"

enum {
    LANES = 64,         /* CPU: rows side by side, at most */
    C_GRAIN = 30000,    /* elements worth waking a thread */
    CUDA_THREADS = 128, /* of a block */
    POSITIONS = 8,      /* of a stage, whose inputs are loaded before the first is computed */
    WARPS = 8,          /* parallel: of a block, each of which takes ... */
    SPAN = 8,           /* ... so many positions of a stage */
    WIDTH = 32,         /* parallel: rows of a block */
    PACK = 4, /* packed: rows of a thread; half as many where they would be too few blocks,
                 which then are two on a multiprocessor */
    PACKED_STAGES = 4,
    PACKED_LEAST = 2,    /* of them */
    PACKED_VALUES = 192, /* of a thread that may be in registers */
    AGAIN_WARPS = 4,     /* packed, states computed again: for their registers */
    RESERVED = 1 << 10,  /* bytes of shared memory that a block takes besides */
    FEW = 8,             /* positions: rows of a multiprocessor, at most: blocks that run at once */
    HASTE = 58800,       /* bytes that memory moves while a position takes 14 ns for each operand,
                            which the ring's kernel was measured to do on an H200; half as many
                            where operands are narrow, as 32 rows of them are short pieces */
    RING_BYTES = 96 << 10,  /* of a multiprocessor: what covers the latency of its memory ... */
    BLOCK_BYTES = 48 << 10, /* ... and at most that many of a block */
    MOST_STAGES = 16,
    LEAST_STAGES = 3,
};

static const char *or_empty(const ml_text *text) {
    return text->text ? text->text : "";
}

/* Positions compose, and there are enough to take some side by side. */
static bool is_composed(recurrence_elements *p) {
    const ml_graph *g = p->schedule->graph;
    if (p->r.states == 0 || p->r.length < 4 * WARPS * SPAN) return false;
    for (int i = 1; i < p->r.states; i++)
        if (elements_dtype_of(p, p->r.inputs + i) != elements_dtype_of(p, p->r.inputs))
            return false;
    return recurrence_composes(g, p->step->node, p->text.arena, &p->max_plus, &p->factors);
}

/* All inputs come by the ring; positions take longer one after another than memory takes for them.
 */
static bool is_parallel(recurrence_elements *p) {
    const ml_graph *g = p->schedule->graph;
    int64_t bytes = 0, operands = p->r.inputs + p->r.stacked;
    for (int i = 0; i < p->r.inputs; i++) {
        if (!elements_is_ringed(p, i)) return false;
        bytes += ml_dtypes[elements_dtype_of(p, i)].bytes;
    }
    for (int i = 0; i < p->r.stacked; i++)
        bytes += ml_dtypes[ml_graph_type(g, ml_recurrence_root(g, p->step->node, p->r.states + i))
                               ->dtype]
                     .bytes;
    return elements_rows_of(p) * bytes < (bytes < 4 * operands ? HASTE / 2 : HASTE) * operands;
}

static bool is_packed_type(const recurrence_elements *p, int i) {
    return elements_dtype_of(p, i) == ML_F32 || elements_dtype_of(p, i) == ML_BF16;
}

static int packed_span(const recurrence_elements *p) {
    return p->of.length ? p->step->scan->every : SPAN;
}

static int packed_warps(const recurrence_elements *p) {
    return p->of.length ? AGAIN_WARPS : WARPS;
}

static int state_bytes(const recurrence_elements *p) {
    return p->r.states && elements_dtype_of(p, p->r.inputs) == ML_F64 ? 8 : 4;
}

/* Whether a block has room for the fewest stages of its inputs, and slopes and offsets of two. */
static bool packed_fits(const recurrence_elements *p, int lanes) {
    const int64_t threads = 32 * packed_warps(p);
    int64_t bytes = (int64_t)2 * 2 * p->r.states * state_bytes(p);
    for (int i = 0; i < p->step->read_count; i++) {
        const bool again =
            i < p->r.inputs &&
            elements_of_forward(p, ml_graph_source(p->schedule->graph, p->step->node, i));
        if (!again && elements_is_ringed(p, i))
            bytes += PACKED_LEAST * packed_span(p) * ml_dtypes[elements_dtype_of(p, i)].bytes;
    }
    return bytes * threads * lanes <= ml_target_shared(p->schedule->target->arch);
}

/* Rows of a thread: as many as leave a block for three quarters of the multiprocessors, and what a
 * warp loads in registers. 0: too few rows, or too much of them. */
static int packed_lanes(const recurrence_elements *p) {
    const int64_t last = p->space.rank ? p->space.size[p->space.rank - 1] : 1;
    const int64_t processors = p->schedule->target->multiprocessors;
    for (int lanes = PACK; lanes > 1; lanes /= 2)
        if (last % (32 * lanes) == 0 && 4 * elements_rows_of(p) >= 3 * 32 * lanes * processors &&
            p->r.inputs * packed_span(p) * lanes <= PACKED_VALUES && packed_fits(p, lanes))
            return lanes;
    return 0;
}

static int packed_blocks(const recurrence_elements *p) {
    return p->lanes < PACK ? 2 : 1;
}

/* Narrow operands, of rows that lie side by side: positions take longer than memory takes for them,
 * also where all rows are computed at once. */
static bool is_packed(const recurrence_elements *p) {
    const ml_target *target = p->schedule->target;
    const ml_scan_step *scan = p->step->scan;
    const int last = p->space.rank - 1, reads = p->of.length ? scan->forward_at : p->r.inputs;
    int64_t bytes = 0, operands = 0;
    if (target->arch < 80 || packed_lanes(p) == 0) return false;
    for (int i = 0; i < p->step->read_count + p->step->write_count; i++) {
        const ml_value *v = template_value(p->schedule, p->step, i);
        if (ml_type_find(&v->type, p->r.axis) < 0 ||
            ml_type_find(&v->type, p->space.axis[last]) < 0)
            continue;
        if (i < p->r.inputs &&
            elements_of_forward(p, ml_graph_source(p->schedule->graph, p->step->node, i)))
            continue;
        if (elements_is_input(p, i) && (!is_packed_type(p, i) || !elements_is_ringed(p, i)))
            return false;
        if (i < reads || i >= p->step->read_count)
            bytes += ml_dtypes[elements_dtype_of(p, i)].bytes, operands++;
    }
    for (int i = p->r.inputs; i < p->r.inputs + p->r.states; i++)
        if (!is_packed_type(p, i)) return false;
    return bytes < 4 * operands;
}

/* Threads of a block: as many as leave a block for each multiprocessor. */
static int ring_threads(const recurrence_elements *p) {
    const ml_target *target = p->schedule->target;
    int64_t last = p->space.rank ? p->space.size[p->space.rank - 1] : 1;
    if (target->arch < 80 || p->r.length < 4 * POSITIONS) return 0;
    for (int threads = CUDA_THREADS; threads >= 32; threads /= 2)
        if (last % threads == 0 &&
            (threads == 32 || elements_rows_of(p) / threads >= target->multiprocessors))
            return threads;
    return 0;
}

/* Parallel: slopes and offsets of two stages. */
static int64_t composed_bytes(const recurrence_elements *p) {
    return (int64_t)2 * 2 * p->r.states * p->threads * (p->lanes ? p->lanes : 1) * state_bytes(p);
}

/* Positions: likewise of warps, and behind them a number a thread. */
static int64_t positions_bytes(const recurrence_elements *p) {
    return (int64_t)2 * 2 * p->r.states * WARPS * state_bytes(p) + 32 * WARPS * 8;
}

static void choose_form(recurrence_elements *p) {
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
    if (composed && is_packed(p)) {
        p->form = FORM_PACKED;
        p->lanes = packed_lanes(p), p->lane = "[l]";
        p->warps = packed_warps(p), p->span = packed_span(p);
        p->threads = 32 * p->warps, p->width = 32 * (int)p->lanes;
        p->positions = p->warps * p->span;
        return;
    }
    if (parallel) p->threads = 32 * WARPS, p->width = WIDTH, p->positions = WARPS * SPAN;
    if (composed && !parallel && elements_rows_of(p) <= FEW * (int64_t)target->multiprocessors) {
        p->form = FORM_POSITIONS;
        return;
    }
    for (int i = 0; i < p->r.inputs; i++)
        bytes += elements_is_ringed(p, i)
                     ? p->positions * p->width * ml_dtypes[elements_dtype_of(p, i)].bytes
                     : 0;
    if (bytes == 0) return;
    int64_t processors = target->multiprocessors > 0 ? target->multiprocessors : 1;
    int64_t blocks = (elements_rows_of(p) / p->width + processors - 1) / processors;
    int64_t most = parallel ? RING_BYTES : BLOCK_BYTES;
    int64_t room = RING_BYTES / blocks < most ? RING_BYTES / blocks : most;
    p->stages = (int)(room / bytes);
    if (p->stages < LEAST_STAGES) p->stages = LEAST_STAGES;
    if (p->stages > MOST_STAGES) p->stages = MOST_STAGES;
    if ((int64_t)p->stages * bytes + composed_bytes(p) <= ml_target_shared(target->arch))
        p->form = parallel ? FORM_PARALLEL : FORM_RING;
}

/* Packed: as many as leave room for the other blocks. */
static void choose_stages(recurrence_elements *p) {
    const int64_t room = ml_target_shared(p->schedule->target->arch) / packed_blocks(p) - RESERVED;
    p->stages = (int)((room - composed_bytes(p)) / p->stage_bytes);
    if (p->stages > PACKED_STAGES) p->stages = PACKED_STAGES;
    if (p->stages < PACKED_LEAST) p->stages = PACKED_LEAST;
}

static int threads_of(const recurrence_elements *p) {
    return p->form >= FORM_RING        ? p->threads
           : p->form == FORM_POSITIONS ? 32 * WARPS
                                       : CUDA_THREADS;
}

static void set_parameters(recurrence_elements *p) {
    ml_template *t = &p->text;
    template_set(t, "POINTERS", "%d", p->step->read_count + p->step->write_count);
    template_set(t, "LENGTH", "%lldLL", (long long)p->r.length);
    template_set(t, "REVERSE", "%d", p->r.reverse);
    template_set(t, "QUICK", "%d", recurrence_quick(p->schedule, p->step, p->r.axis));
    template_set(t, "LANES", "%lld", (long long)p->lanes);
    template_set(t, "ROWS", "%lldLL", (long long)elements_rows_of(p));
    template_set(t, "UNROLL", "%d", POSITIONS);
    template_set(t, "POSITIONS", "%d", p->positions);
    template_set(t, "SPAN", "%d", p->span ? p->span : SPAN);
    template_set(t, "WARPS", "%d", p->warps);
    template_set(t, "BLOCKS", "%d", packed_blocks(p));
    template_set_text(t, "READY", or_empty(&p->ready));
    template_set_text(t, "KEPT", or_empty(&p->kept));
    template_set_text(t, "AGAIN", or_empty(&p->restart));
    template_set_text(t, "REPLAY", or_empty(&p->replay));
    template_set_text(t, "SAVE", or_empty(&p->save));
    template_set_text(t, "STORE", or_empty(&p->store));
    template_set(t, "WIDTH", "%d", p->width);
    template_set(t, "STATES", "%d", p->r.states);
    template_set(t, "STATE", "%s",
                 p->r.states ? emit_compute_type(elements_dtype_of(p, p->r.inputs)) : "");
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

/* Which form; whether there is one. */
static bool begin_step(recurrence_elements *p) {
    const ml_graph *g = p->schedule->graph;
    ml_step *step = p->step;
    ml_text *texts[] = {&p->first,   &p->declare, &p->load,   &p->work,  &p->last,  &p->copy,
                        &p->advance, &p->compose, &p->gather, &p->begin, &p->total, &p->restart,
                        &p->replay,  &p->save,    &p->store,  &p->ready, &p->kept};
    for (int i = 0; i < (int)(sizeof texts / sizeof *texts); i++) texts[i]->arena = p->text.arena;
    ml_recurrence_read(g, step->node, &p->r);
    if (step->scan && step->scan->forward) ml_recurrence_read(g, step->scan->forward, &p->of);
    p->space = *ml_graph_type(g, ml_recurrence_root(g, step->node, 0));
    p->values = ML_NEW_ARRAY(p->text.arena, const char *, step->read_count + 1);
    elements_find_shifts(p);
    choose_form(p);
    return p->of.length == 0 || p->form == FORM_PACKED;
}

void ml_template_recurrence(ml_schedule *s, ml_step *step) {
    static const char *const files[] = {
        "recurrence.c",       "recurrence.cu",          "recurrence_positions.cu",
        "recurrence_ring.cu", "recurrence_parallel.cu", "recurrence_packed.cu"};
    recurrence_elements p = {.schedule = s, .step = step, .text = template_begin(s)};
    if (!ml_recurrence_elementwise(s->graph, step->node) || !begin_step(&p)) {
        recurrence_rows_kernel(s, step);
        return;
    }
    if (p.of.length)
        for (int j = 0; j < p.of.states; j++) elements_declare_again(&p, j);
    elements_declare_sources(&p);
    if (p.of.length) elements_declare_again_sources(&p), elements_print_replay(&p);
    if (p.form == FORM_PACKED) elements_fix_inputs(&p, &p.kept, step->node, &p.r, p.values);
    if (p.form == FORM_PARALLEL || p.form == FORM_POSITIONS || p.form == FORM_PACKED)
        elements_print_compose(&p);
    elements_print_step(&p);
    if (p.form == FORM_PACKED) choose_stages(&p);
    set_parameters(&p);
    step->kernel =
        template_file(&p.text, files[p.form], "scan", step->read_count + step->write_count);
    int64_t rows = elements_rows_of(&p);
    if (p.form == FORM_C) {
        step->kernel->units = rows / p.lanes;
        step->kernel->grain = 1 + C_GRAIN / (p.r.length * p.lanes);
        return;
    }
    bool ring = p.form >= FORM_RING;
    int width = ring ? p.width : p.form == FORM_POSITIONS ? 1 : CUDA_THREADS;
    int64_t shared = ring ? (int64_t)p.stages * p.stage_bytes : 0;
    if (p.form >= FORM_PARALLEL) shared += composed_bytes(&p);
    if (p.form == FORM_POSITIONS) shared = positions_bytes(&p);
    template_launch(step->kernel, (rows + width - 1) / width, 1, 1, (uint32_t)threads_of(&p),
                    shared);
}
