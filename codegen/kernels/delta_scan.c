/* LINEAR_SCAN and LINEAR_SCAN_GRAD with a low-rank part of rank 1, or a decay for each key, or
 * both, on Hopper (cuda/delta_scan*): 64 or 128 keys and values (forward: values in multiples of
 * 64). Kernels want keys and values innermost, in steps of 16 bytes of bf16; what lies otherwise,
 * or is f32, is moved through a workspace. */
#include "codegen/kernels/template.h"
#include "runtime/ops/linear_scan/linear_scan.h"

enum {
    CHUNK = 64,
    SUBS = 4,            /* sub-blocks of a chunk, of ... */
    SUB = CHUNK / SUBS,  /* ... so many positions */
    BLOCK = CHUNK * 128, /* bytes of 64 rows of 64 columns */
    HOPPER = 90,
    THREADS = 256,
    PART = 8,         /* elements of 16 bytes of bf16 */
    ALIGNMENT = 1024, /* of tiles */
    DECAYS = 784,     /* bytes of a chunk_decays */
    FACTORS = 512,    /* elements of a chunk's factors, 1,024 bytes */
    U = LINEAR_SCAN_FIRST_PAIR,
    W = U + 1,
    OPERANDS = 6, /* of bf16, of a gradient: q, k, v, dy, u, w */
    OUTPUTS = 5,  /* likewise: dq, dk, dv, du, dw; without a low-rank part ... */
    NO_RANK = 2   /* ... so many fewer */
};

static bool is_number(const ml_graph *g, ml_ref x) {
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, x)->dtype;
    return dtype == ML_BF16 || dtype == ML_F32;
}

bool ml_delta_scan_kernel(const ml_target *target, const ml_graph *g, ml_ref n) {
    ml_linear_scan s;
    ml_linear_scan_read(g, n, &s);
    const ml_ref *from = ml_graph_sources(g, n);
    if (target->kind != ML_TARGET_CUDA || target->arch != HOPPER || target->no_wgmma) return false;
    if (s.rank > 1 || ml_linear_scan_is_scalar(&s) || s.values == 0 || s.length == 0) return false;
    bool forward = ml_graph_node(g, n)->op == ML_OP_LINEAR_SCAN;
    if ((s.key_size != 64 && s.key_size != 128) || s.value_size % 64 != 0 ||
        (!forward && s.value_size > 128))
        return false;
    for (int i = 0; i < ml_graph_node(g, n)->source_count; i++)
        if (!is_number(g, from[i])) return false;
    /* what the others are computed from, as a rule */
    return ml_graph_type(g, from[LINEAR_SCAN_Q])->dtype == ML_BF16 &&
           ml_graph_type(g, from[LINEAR_SCAN_K])->dtype == ML_BF16 &&
           ml_graph_type(g, from[LINEAR_SCAN_STATE])->dtype == ML_F32 &&
           (s.dtype == ML_BF16 || s.dtype == ML_F32);
}

/* ---- Operands */

/* One of the step's values as the kernels see it: itself, or a workspace. */
typedef struct {
    const char *name;
    int at, place;
    ml_axis columns;
    int64_t count;
    bool wide; /* may be f32 */
} tensor;

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    ml_linear_scan scan;
    const ml_type *state;
    int64_t batches, chunks;
    int work;         /* the position of the workspace of bf16 */
    int64_t used;     /* of its elements */
    ml_kernel **next; /* where the next kernel is chained */
} printer;

/* Where the gradients of y and of the final state are among a step's values. */
static int slope_at(const printer *p, bool of_state) {
    return U + 2 * p->scan.rank + of_state;
}

static void set(printer *p, const char *name, int64_t value) {
    template_set(&p->text, name, "%lld", (long long)value);
}

static void set_long(printer *p, const char *name, int64_t value) {
    template_set(&p->text, name, "%lldLL", (long long)value);
}

static const char *named(printer *p, const char *tensor, const char *what) {
    return ml_arena_format(p->text.arena, "%s_%s", tensor, what);
}

static const ml_value *value_at(const printer *p, int at) {
    return template_value(p->schedule, p->step, at);
}

static ml_dtype dtype_at(const printer *p, int at) {
    return (ml_dtype)value_at(p, at)->type.dtype;
}

static int64_t stride_along(const ml_value *v, ml_axis axis) {
    int at = axis ? ml_type_find(&v->type, axis) : -1;
    return at < 0 ? 0 : v->stride[at];
}

static ml_template_loops batch_loops(const printer *p, const ml_value *v) {
    ml_template_loops loops = {0};
    for (int i = 0; i < p->state->rank; i++) {
        ml_axis axis = p->state->axis[i];
        if (axis != p->scan.keys && axis != p->scan.values)
            template_loop_add(&loops, p->state->size[i], stride_along(v, axis));
    }
    return loops;
}

static const char *batch_text(printer *p, const ml_value *v) {
    ml_template_loops loops = batch_loops(p, v);
    return template_offset(p->text.arena, &loops, "(batch)");
}

/* Of a tensor's first position in the scan's order, and from one to the next. */
static void bind_rows(printer *p, const char *name, int at, const char *batch, int64_t step) {
    const ml_linear_scan *s = &p->scan;
    int64_t first = s->reverse ? (s->length - 1) * step : 0;
    set(p, named(p, name, "AT"), at);
    template_set_text(&p->text, named(p, name, "OFFSET(batch)"),
                      ml_arena_format(p->text.arena, "(%s + %lldLL)", batch, (long long)first));
    set_long(p, named(p, name, "STEP"), s->reverse ? -step : step);
}

static void bind(printer *p, const char *name, const tensor *t) {
    const ml_value *v = value_at(p, t->at);
    if (t->place == t->at) {
        bind_rows(p, name, t->at, batch_text(p, v), stride_along(v, p->scan.axis));
        return;
    }
    int64_t batch = p->scan.length * t->count;
    bind_rows(p, name, t->place,
              ml_arena_format(p->text.arena, "(batch) * %lldLL", (long long)batch), t->count);
}

static void bind_state(printer *p, const char *name, int at) {
    const ml_value *v = value_at(p, at);
    set(p, named(p, name, "AT"), at);
    template_set_text(&p->text, named(p, name, "OFFSET(batch)"), batch_text(p, v));
    set_long(p, named(p, name, "KEY"), stride_along(v, p->scan.keys));
    set_long(p, named(p, name, "VALUE"), stride_along(v, p->scan.values));
}

/* Are rows contiguous, and at multiples of 16 bytes of bf16? */
static bool in_place(const printer *p, const tensor *t) {
    const ml_value *v = value_at(p, t->at);
    if (v->type.dtype != ML_BF16 && !t->wide) return false;
    if (v->offset % PART != 0) return false;
    for (int i = 0; i < v->type.rank; i++) {
        bool inner = v->type.axis[i] == t->columns;
        if (inner ? v->stride[i] != 1 : v->stride[i] % PART != 0) return false;
    }
    return true;
}

/* Workspaces come before any kernel: they are pointers of all. */
static tensor place(printer *p, const char *name, int at, ml_axis columns, int64_t count,
                    bool wide) {
    tensor t = {name, at, at, columns, count, wide};
    if (!in_place(p, &t))
        t.place = template_workspace(p->schedule, p->step, wide ? dtype_at(p, at) : ML_BF16,
                                     p->batches * p->scan.length * count);
    return t;
}

static tensor place_keys(printer *p, const char *name, int at) {
    return place(p, name, at, p->scan.keys, p->scan.key_size, false);
}

static tensor place_values(printer *p, const char *name, int at, bool wide) {
    return place(p, name, at, p->scan.values, p->scan.value_size, wide);
}

/* ---- Kernels */

static void add_kernel(printer *p, const char *file, const char *label, int64_t blocks,
                       int64_t threads, int64_t shared) {
    int pointers = p->step->read_count + p->step->write_count;
    set(p, "POINTERS", pointers);
    ml_kernel *k = template_file(&p->text, file, label, pointers);
    template_launch(k, blocks, 1, 1, (uint32_t)threads, shared);
    *p->next = k;
    p->next = &k->next;
}

static const char *element_text(printer *p, const tensor *t) {
    const ml_value *v = value_at(p, t->at);
    ml_template_loops loops = batch_loops(p, v);
    template_loop_add(&loops, p->scan.length, stride_along(v, p->scan.axis));
    template_loop_add(&loops, t->count, stride_along(v, t->columns));
    return template_offset(p->text.arena, &loops, "(i)");
}

static void move(printer *p, const tensor *t, bool out) {
    if (t->place == t->at) return;
    ml_template *text = &p->text;
    int from = out ? t->place : t->at, to = out ? t->at : t->place;
    int64_t elements = p->batches * p->scan.length * t->count;
    ml_dtype source = dtype_at(p, from), target = dtype_at(p, to);
    const char *outside = element_text(p, t);
    template_set_text(text, "FROM_OFFSET(i)", out ? "(i)" : outside);
    template_set_text(text, "TO_OFFSET(i)", out ? outside : "(i)");
    set(p, "FROM_AT", from);
    set(p, "TO_AT", to);
    template_set_text(text, "FROM_TYPE", emit_memory_type(source));
    template_set_text(text, "TO_TYPE", emit_memory_type(target));
    template_set_text(text, "FROM_LOAD", ml_dtypes[source].load);
    template_set_text(text, "TO_STORE", ml_dtypes[target].store);
    set_long(p, "ELEMENTS", elements);
    add_kernel(p, "delta_scan_move.cu", "linear_scan layout", (elements + THREADS - 1) / THREADS,
               THREADS, 0);
}

/* A part of the workspace with so many elements for each chunk. */
static void reserve(printer *p, const char *name, int64_t elements) {
    set_long(p, named(p, name, "WORK"), p->used);
    p->used += p->batches * p->chunks * elements;
}

static void copy_parameter(printer *p, const char *to, const char *from) {
    template_set_text(&p->text, to, template_get(&p->text, from));
}

static void bind_sizes(printer *p) {
    const ml_linear_scan *s = &p->scan;
    set(p, "LENGTH", s->length);
    set(p, "KEYS", s->key_size);
    set(p, "VALUES", s->value_size);
    set(p, "AFTER", s->after);
    set(p, "PER_KEY", s->decay_per_key);
    set(p, "RANK", s->rank);
    const ml_value *a = value_at(p, LINEAR_SCAN_DECAY);
    set_long(p, "A_KEY", stride_along(a, s->keys));
    ml_dtype dtype = (ml_dtype)a->type.dtype;
    bind_rows(p, "A", LINEAR_SCAN_DECAY, batch_text(p, a), stride_along(a, s->axis));
    template_set_text(&p->text, "A_TYPE", emit_memory_type(dtype));
    template_set_text(&p->text, "A_LOAD", ml_dtypes[dtype].load);
}

static void reserve_matrices(printer *p, bool gradient) {
    const bool low_rank = p->scan.rank > 0, per_key = p->scan.decay_per_key;
    int64_t rows = CHUNK * p->scan.key_size, square = CHUNK * CHUNK;
    int64_t state = p->scan.key_size * p->scan.value_size, values = CHUNK * p->scan.value_size;
    reserve(p, "FACTORS", FACTORS);
    reserve(p, "TW", low_rank ? rows : 0);
    reserve(p, "TB", low_rank ? square : 0);
    reserve(p, "F", gradient && !per_key ? 0 : square);
    reserve(p, "E", gradient || !low_rank ? 0 : square);
    reserve(p, "B", gradient && per_key && low_rank ? square : 0);
    reserve(p, "TU", gradient && low_rank ? rows : 0);
    reserve(p, "ET", gradient && low_rank ? square : 0);
    reserve(p, "S", gradient ? state : 0);
    reserve(p, "SLOPES", gradient ? state : 0);
    reserve(p, "Z", gradient && low_rank ? values : 0);
    reserve(p, "R", gradient && low_rank ? values : 0);
    reserve(p, "QD", per_key ? rows : 0);
    reserve(p, "KD", per_key ? rows : 0);
    reserve(p, "UD", per_key && low_rank ? rows : 0);
    reserve(p, "WD", per_key && low_rank && gradient ? rows : 0);
    p->work = template_workspace(p->schedule, p->step, ML_BF16, p->used);
    set(p, "WORK_AT", p->work);
    set(p, "GRADIENT", gradient);
}

static void prepare(printer *p, const char *label) {
    enum { TRIANGLE = 14 * 1024 };               /* beside keys of 64; of 128: in place of others */
    enum { PAIRS = SUBS * SUB * (SUB + 1) / 2 }; /* of keys by queries in sub-blocks */
    const int64_t keys = p->scan.key_size, tiles = 4 * CHUNK * keys * 2, blocks = SUBS * keys * 4;
    const int64_t low_rank = CHUNK * keys * 4 + 2 * PAIRS * 4 + (keys == 64 ? BLOCK : 0);
    if (p->scan.decay_per_key) /* without low rank decays are in place of W and U */
        add_kernel(p, "delta_scan_keys_prepare.cu", label, p->batches * p->chunks, THREADS,
                   tiles + blocks + 2 * PAIRS * 4 + (p->scan.rank ? low_rank : 0));
    else
        add_kernel(p, "delta_scan_prepare.cu", label, p->batches * p->chunks, THREADS,
                   tiles + DECAYS + CHUNK * 4 * 4 + (keys == 64 ? TRIANGLE : 0));
}

/* What prepare wrote instead of an operand: with decays. */
static void bind_decayed(printer *p, const char *name, const char *as) {
    const int64_t rows = CHUNK * p->scan.key_size;
    set(p, named(p, name, "AT"), p->work);
    template_set_text(&p->text, named(p, name, "OFFSET(batch)"),
                      ml_arena_format(p->text.arena, "((batch) * %lldLL + %s)",
                                      (long long)(p->chunks * rows),
                                      template_get(&p->text, named(p, as, "WORK"))));
    set_long(p, named(p, name, "STEP"), p->scan.key_size);
}

/* Of the values of a block: half as many where multiprocessors would be idle. */
static int64_t tile_of(const printer *p) {
    int64_t values = p->scan.value_size, blocks = p->batches * (values / 128);
    return values % 128 != 0 || 2 * blocks <= p->schedule->target->multiprocessors ? 64 : 128;
}

static void pass(printer *p, const char *label, bool with_y, bool saved) {
    int64_t tile = tile_of(p), tiles = p->scan.value_size / tile;
    int64_t keys = p->scan.key_size * 128, values = tile * 128;
    int64_t slot = 3 * keys + values + BLOCK + FACTORS * 2;
    set(p, "WITH_Y", with_y);
    set(p, "SAVED", saved);
    set(p, "SLOTS", with_y ? 2 : 3);
    set(p, "TILES", tiles);
    set(p, "VALUES", tile);
    if (with_y) slot += keys + 2 * BLOCK;
    add_kernel(p, "delta_scan_state.cu", label, p->batches * tiles, tile * 2,
               ALIGNMENT + (with_y ? 2 : 3) * slot);
    set(p, "VALUES", p->scan.value_size);
}

/* From the first chunk to the last. */
static void bind_forward(printer *p) {
    set(p, "BACKWARD", 0);
    copy_parameter(p, "LEFT_WORK", "TW_WORK");
    copy_parameter(p, "Z_OF_V_WORK", "TB_WORK");
    copy_parameter(p, "Y_OF_Z_WORK", "E_WORK");
    copy_parameter(p, "Y_OF_V_WORK", "F_WORK");
    copy_parameter(p, "STATES_WORK", "S_WORK");
    set(p, "Y_FACTOR", 0);
    set(p, "U_FACTOR", 2);
    set(p, "K_FACTOR", 2);
    if (p->scan.decay_per_key) {
        bind_decayed(p, "K", "KD");
        bind_decayed(p, "U", "UD");
    }
    bind_state(p, "FIRST", LINEAR_SCAN_STATE);
}

/* q, k, v, then dy of a gradient, then u and w; gives how many. */
static int place_operands(printer *p, bool gradient, tensor t[OPERANDS]) {
    int count = 0;
    t[count++] = place_keys(p, "Q", LINEAR_SCAN_Q);
    t[count++] = place_keys(p, "K", LINEAR_SCAN_K);
    t[count++] = place_values(p, "V", LINEAR_SCAN_V, false);
    if (gradient) t[count++] = place_values(p, "DY", slope_at(p, false), false);
    if (!p->scan.rank) return count;
    t[count++] = place_keys(p, "U", U);
    t[count++] = place_keys(p, "W", W);
    return count;
}

static void move_in(printer *p, const tensor *t, int count) {
    for (int i = 0; i < count; i++) move(p, &t[i], false);
    bind_sizes(p);
    for (int i = 0; i < count; i++) bind(p, t[i].name, &t[i]);
    if (p->scan.rank) return;
    static const char *const lacking[] = {"U", "W"};
    for (int i = 0; i < 2; i++) { /* not read */
        set(p, named(p, lacking[i], "AT"), 0);
        template_set_text(&p->text, named(p, lacking[i], "OFFSET(batch)"), "0");
        set_long(p, named(p, lacking[i], "STEP"), 0);
    }
}

static void forward(printer *p) {
    int first = p->step->read_count;
    tensor t[OPERANDS];
    int count = place_operands(p, false, t);
    tensor y = place_values(p, "Y", first, true);
    reserve_matrices(p, false);
    move_in(p, t, count);
    bind(p, "Y", &y);
    prepare(p, "linear_scan");
    bind_forward(p);
    if (p->scan.decay_per_key) bind_decayed(p, "Q", "QD");
    set(p, "Y_WIDE", dtype_at(p, y.place) == ML_F32);
    bind_state(p, "LAST", first + 1);
    pass(p, "linear_scan", true, false);
    move(p, &y, true);
}

/* From the last chunk to the first, with the operands exchanged. */
static void pass_backward(printer *p, const tensor *in, int count, int state) {
    const tensor *q = &in[0], *dy = &in[3], *w = &in[count - 1];
    set(p, "BACKWARD", 1);
    copy_parameter(p, "LEFT_WORK", "TU_WORK");
    copy_parameter(p, "Z_OF_V_WORK", "ET_WORK");
    copy_parameter(p, "STATES_WORK", "SLOPES_WORK");
    copy_parameter(p, "Z_WORK", "R_WORK");
    set(p, "U_FACTOR", 1);
    set(p, "K_FACTOR", 0);
    if (p->scan.decay_per_key) {
        bind_decayed(p, "K", "QD");
        bind_decayed(p, "U", "WD");
    } else {
        bind(p, "K", q);
        bind(p, "U", w);
    }
    bind(p, "V", dy);
    bind_state(p, "FIRST", slope_at(p, true));
    bind_state(p, "LAST", state);
    pass(p, "linear_scan_grad slopes", false, true);
}

static void add_gradients(printer *p) {
    enum { LEAST = CHUNK * CHUNK * 4 + 2 * BLOCK, DOTS = (4 * CHUNK + 8) * 4 };
    const ml_linear_scan *s = &p->scan;
    int64_t state = s->key_size * s->value_size * 2;
    int64_t items = p->batches * p->chunks, blocks = p->schedule->target->multiprocessors;
    set_long(p, "ITEMS", items);
    add_kernel(p, "delta_scan_grad.cu", "linear_scan_grad",
               blocks > 0 && blocks < items ? blocks : items, THREADS,
               ALIGNMENT + 4 * CHUNK * (s->key_size + s->value_size) * 2 + state +
                   (state > LEAST ? state : LEAST) + 2 * CHUNK * 2 * CHUNK * 2 + DECAYS + DOTS);
}

static void add_gradients_by_key(printer *p) {
    enum { SCORES = 2 * BLOCK, PRODUCTS = 4 * BLOCK, PAIRS = CHUNK * SUB * 16, SUMS = 2 * 6 };
    const ml_linear_scan *s = &p->scan;
    int64_t keys = s->key_size, state = keys * s->value_size * 2, tile = CHUNK * keys * 2;
    int64_t values = 4 * CHUNK * s->value_size * 2 + 2 * state + tile + SCORES;
    int64_t rows = 8 * tile + CHUNK * keys * 4;
    add_kernel(p, "delta_scan_keys_grad.cu", "linear_scan_grad", p->batches * p->chunks, THREADS,
               (values > rows ? values : rows) + PRODUCTS + PAIRS +
                   (2 * SUBS + SUMS + 2 * SUBS) * keys * 4);
}

static void find_gradients(printer *p, const tensor *in, int count, const tensor *out,
                           int outputs) {
    const ml_linear_scan *s = &p->scan;
    const ml_value *da = value_at(p, p->step->read_count + LINEAR_SCAN_DECAY);
    ml_dtype dtype = (ml_dtype)da->type.dtype;
    for (int i = 0; i < count; i++) bind(p, in[i].name, &in[i]);
    for (int i = 0; i < outputs; i++) bind(p, out[i].name, &out[i]);
    bind_rows(p, "DA", p->step->read_count + LINEAR_SCAN_DECAY, batch_text(p, da),
              stride_along(da, s->axis));
    set_long(p, "DA_KEY", stride_along(da, s->keys));
    template_set_text(&p->text, "DA_TYPE", emit_memory_type(dtype));
    template_set_text(&p->text, "DA_STORE", ml_dtypes[dtype].store);
    for (int i = outputs; i < OUTPUTS; i++) { /* not written */
        const char *name = i == OUTPUTS - 1 ? "DW" : "DU";
        set(p, named(p, name, "AT"), 0);
        template_set_text(&p->text, named(p, name, "OFFSET(batch)"), "0");
        set_long(p, named(p, name, "STEP"), 0);
    }
    (s->decay_per_key ? add_gradients_by_key : add_gradients)(p);
}

static void backward(printer *p) {
    int first = p->step->read_count, outputs = p->scan.rank ? OUTPUTS : OUTPUTS - NO_RANK;
    tensor in[OPERANDS], out[OUTPUTS];
    int count = place_operands(p, true, in);
    out[0] = place_keys(p, "DQ", first + LINEAR_SCAN_Q);
    out[1] = place_keys(p, "DK", first + LINEAR_SCAN_K);
    out[2] = place_values(p, "DV", first + LINEAR_SCAN_V, false);
    if (p->scan.rank) {
        out[3] = place_keys(p, "DU", first + U);
        out[4] = place_keys(p, "DW", first + W);
    }
    reserve_matrices(p, true);
    move_in(p, in, count);
    prepare(p, "linear_scan_grad");
    bind_forward(p);
    bind(p, "Y", &out[2]); /* not written, as E and F are not read */
    set(p, "Y_WIDE", 0);
    bind_state(p, "LAST", LINEAR_SCAN_STATE);
    set(p, "LAST_AT", -1);
    pass(p, "linear_scan_grad states", false, true);
    const char *z = template_get(&p->text, "Z_WORK"), *states = template_get(&p->text, "S_WORK");
    pass_backward(p, in, count, first + LINEAR_SCAN_STATE);
    template_set_text(&p->text, "Z_WORK", z);
    template_set_text(&p->text, "STATES_WORK", states);
    find_gradients(p, in, count, out, outputs);
    for (int i = 0; i < outputs; i++) move(p, &out[i], true);
}

void ml_template_delta_scan(ml_schedule *s, ml_step *step) {
    if (s->target->kind != ML_TARGET_CUDA) return; /* decomposed before */
    printer p = {.schedule = s, .step = step, .text = template_begin(s), .next = &step->kernel};
    ml_linear_scan_read(s->graph, step->node, &p.scan);
    p.state = &template_value(s, step, LINEAR_SCAN_STATE)->type;
    p.batches = 1;
    p.chunks = (p.scan.length + CHUNK - 1) / CHUNK;
    for (int i = 0; i < p.state->rank; i++)
        if (p.state->axis[i] != p.scan.keys && p.state->axis[i] != p.scan.values)
            p.batches *= p.state->size[i];
    if (ml_graph_node(s->graph, step->node)->op == ML_OP_LINEAR_SCAN)
        forward(&p);
    else
        backward(&p);
}
