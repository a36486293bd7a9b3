/* LINEAR_SCAN and LINEAR_SCAN_GRAD without a low-rank part on Hopper (cuda/linear_scan_*): bf16 q,
 * k and v, one decay a position, up to 128 keys. Kernels want keys and values innermost, in steps
 * of 16 bytes; what lies otherwise, or is no bf16, is moved through a workspace. */
#include <string.h>

#include "codegen/kernels/template.h"
#include "runtime/ops/linear_scan/linear_scan.h"

enum {
    CHUNK = 64, /* positions */
    COMPUTING = 256,
    HELPING = 128, /* threads of a block */
    MOST_KEYS = 128,
    TILE = 128, /* columns of v of a block, at most */
    HOPPER = 90,
    COLUMNS_OF_16_BYTES = 8,
    ALIGNMENT = 1024,
    FEWER_REGISTERS = 40,
    DECAYS = 2 * (2 * CHUNK + 6 + 4 * 16 * 17) * 4 + 4 * CHUNK * 4, /* bytes */
};

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    ml_linear_scan scan;
    const ml_type *state;
    int64_t batches, tile;
    ml_kernel **last; /* where the next kernel is chained */
} printer;

bool ml_linear_scan_kernel(const ml_target *target, const ml_graph *g, ml_ref n) {
    ml_linear_scan s;
    ml_linear_scan_read(g, n, &s);
    const ml_ref *from = ml_graph_sources(g, n);
    for (int i = LINEAR_SCAN_Q; i <= LINEAR_SCAN_V; i++)
        if (ml_graph_type(g, from[i])->dtype != ML_BF16) return false;
    ml_dtype decay = (ml_dtype)ml_graph_type(g, from[LINEAR_SCAN_DECAY])->dtype;
    return target->kind == ML_TARGET_CUDA && target->arch == HOPPER && !target->no_wgmma &&
           ml_linear_scan_is_scalar(&s) && s.values != 0 && s.length > 0 &&
           ml_graph_type(g, from[LINEAR_SCAN_STATE])->dtype == ML_F32 &&
           (decay == ML_F32 || decay == ML_BF16) && (s.dtype == ML_BF16 || s.dtype == ML_F32) &&
           s.key_size <= MOST_KEYS && s.key_size % COLUMNS_OF_16_BYTES == 0 &&
           s.value_size % COLUMNS_OF_16_BYTES == 0;
}

/* ---- Operands */

static void set(printer *p, const char *name, int64_t value) {
    template_set(&p->text, name, "%lld", (long long)value);
}

static void set_long(printer *p, const char *name, int64_t value) {
    template_set(&p->text, name, "%lldLL", (long long)value);
}

static const char *named(printer *p, const char *tensor, const char *what) {
    return ml_arena_format(p->text.arena, "%s_%s", tensor, what);
}

static int64_t axis_stride(const ml_value *v, ml_axis axis) {
    int at = axis ? ml_type_find(&v->type, axis) : -1;
    return at < 0 ? 0 : v->stride[at];
}

static bool is_batch(const printer *p, ml_axis axis) {
    return axis != p->scan.keys && axis != p->scan.values;
}

static ml_template_loops batch_loops(const printer *p, const ml_value *v) {
    ml_template_loops loops = {0};
    for (int i = 0; i < p->state->rank; i++)
        if (is_batch(p, p->state->axis[i]))
            template_loop_add(&loops, p->state->size[i], axis_stride(v, p->state->axis[i]));
    return loops;
}

static const char *offset_text(const printer *p, const ml_template_loops *loops,
                               const char *index) {
    return template_offset(p->text.arena, loops, index);
}

static void bind_place(printer *p, const char *tensor, int at) {
    template_set(&p->text, named(p, tensor, "AT"), "%d", at);
}

static void bind_batch(printer *p, const char *tensor, const ml_value *v) {
    ml_template_loops loops = batch_loops(p, v);
    template_set_text(&p->text, named(p, tensor, "BATCH(batch)"), offset_text(p, &loops, "batch"));
}

static void bind_value(printer *p, const char *tensor, int at) {
    const ml_value *v = template_value(p->schedule, p->step, at);
    bind_place(p, tensor, at);
    bind_batch(p, tensor, v);
    set_long(p, named(p, tensor, "SEQ"), axis_stride(v, p->scan.axis));
}

static void bind_state(printer *p, const char *tensor, int at) {
    const ml_value *v = template_value(p->schedule, p->step, at);
    bind_place(p, tensor, at);
    bind_batch(p, tensor, v);
    set_long(p, named(p, tensor, "KEY"), axis_stride(v, p->scan.keys));
    set_long(p, named(p, tensor, "VALUE"), axis_stride(v, p->scan.values));
}

/* Are rows of `columns` contiguous, and at multiples of 16 bytes of bf16? */
static bool in_place(const printer *p, int at, ml_axis columns) {
    const ml_value *v = template_value(p->schedule, p->step, at);
    if (v->offset % COLUMNS_OF_16_BYTES != 0) return false;
    for (int i = 0; i < v->type.rank; i++) {
        bool inner = v->type.axis[i] == columns;
        if (inner ? v->stride[i] != 1 : v->stride[i] % COLUMNS_OF_16_BYTES != 0) return false;
    }
    return true;
}

static ml_dtype dtype_of(const printer *p, int at) {
    return (ml_dtype)template_value(p->schedule, p->step, at)->type.dtype;
}

/* ---- Kernels, in a chain */

static int pointers(const printer *p) {
    return p->step->read_count + p->step->write_count;
}

static void add_kernel(printer *p, const char *file, int64_t blocks, uint32_t threads,
                       int64_t shared) {
    template_set(&p->text, "POINTERS", "%d", pointers(p));
    const char *label = ml_ops[ml_graph_node(p->schedule->graph, p->step->node)->op].name;
    ml_kernel *k = template_file(&p->text, file, label, pointers(p));
    template_launch(k, blocks, 1, 1, threads, shared);
    *p->last = k;
    p->last = &k->next;
}

/* Every element of an operand or result, by batch indices, positions and, if any, columns. */
static const char *element_text(printer *p, int at, ml_axis columns, int64_t count) {
    const ml_value *v = template_value(p->schedule, p->step, at);
    ml_template_loops loops = batch_loops(p, v);
    template_loop_add(&loops, p->scan.length, axis_stride(v, p->scan.axis));
    if (columns) template_loop_add(&loops, count, axis_stride(v, columns));
    return offset_text(p, &loops, "i");
}

typedef struct {
    int from, to;
    ml_axis columns; /* 0: none */
    int64_t count, parts;
    bool out; /* from a workspace, otherwise to one */
} movement;

static void move(printer *p, const movement *m) {
    ml_template *t = &p->text;
    int64_t elements = p->batches * p->scan.length * m->count;
    ml_dtype source = dtype_of(p, m->from), target = dtype_of(p, m->to);
    const char *outside = element_text(p, m->out ? m->to : m->from, m->columns, m->count);
    template_set_text(t, "FROM(i)", m->out ? "(i)" : outside);
    template_set_text(t, "TO(i)", m->out ? outside : "(i)");
    template_set(t, "FROM_AT", "%d", m->from);
    template_set(t, "TO_AT", "%d", m->to);
    template_set_text(t, "FROM_ELEMENT", emit_memory_type(source));
    template_set_text(t, "TO_ELEMENT", emit_memory_type(target));
    template_set_text(t, "FROM_LOAD(x)", template_load(t->arena, source, "x"));
    template_set(t, "TO_STORE(x)", "%s(x)", ml_dtypes[target].store);
    set_long(p, "ELEMENTS", elements);
    set(p, "PARTS", m->parts);
    set_long(p, "PART", elements);
    add_kernel(p, "linear_scan_move.cu", (elements + COMPUTING - 1) / COMPUTING, COMPUTING, 0);
}

static int64_t divide_up(int64_t n, int64_t by) {
    return (n + by - 1) / by;
}

/* What a step reads or writes, as its kernels see it. */
typedef struct {
    const char *name;
    int at, place; /* of the step's values; where kernels find it: itself or a workspace */
    ml_axis columns;
    int64_t count, parts; /* parts: tiles of values, whose sum it is */
} tensor;

/* Workspaces come before any kernel, as they are pointers of all. */
static void place(printer *p, tensor *t, ml_dtype dtype) {
    bool right = dtype_of(p, t->at) == dtype && (!t->columns || in_place(p, t->at, t->columns));
    t->place = t->at;
    if (right && t->parts == 1) return;
    t->place = template_workspace(p->schedule, p->step, dtype,
                                  t->parts * p->batches * p->scan.length * t->count);
}

static void bind(printer *p, const tensor *t) {
    if (t->place == t->at) {
        bind_value(p, t->name, t->at);
        return;
    }
    int64_t rows = p->scan.length * t->count;
    template_set(&p->text, named(p, t->name, "AT"), "%d", t->place);
    template_set(&p->text, named(p, t->name, "BATCH(batch)"), "(batch * %lldLL)", (long long)rows);
    set_long(p, named(p, t->name, "SEQ"), t->count);
}

static void move_tensor(printer *p, const tensor *t, bool out) {
    if (t->place == t->at) return;
    move(p, &(movement){.from = out ? t->place : t->at,
                        .to = out ? t->at : t->place,
                        .columns = t->columns,
                        .count = t->count,
                        .parts = t->parts,
                        .out = out});
}

/* ---- The two steps */

typedef struct {
    int64_t key_tile, value_tile, state_tile; /* bytes */
    int64_t blocks;
} sizes;

static sizes sizes_of(const printer *p) {
    int64_t width = divide_up(p->scan.key_size, 64) * 64;
    return (sizes){.key_tile = CHUNK * width * 2,
                   .value_tile = CHUNK * p->tile * 2,
                   .state_tile = width * p->tile * 2,
                   .blocks = p->batches * divide_up(p->scan.value_size, p->tile)};
}

/* Tiles of 128 columns, unless half as wide ones fill multiprocessors that would be idle. */
static int64_t forward_tile(const printer *p) {
    int64_t wide = p->batches * divide_up(p->scan.value_size, TILE);
    bool few = 2 * wide <= p->schedule->target->multiprocessors;
    return p->scan.value_size <= TILE / 2 || few ? TILE / 2 : TILE;
}

static void bind_scan(printer *p) {
    ml_dtype decay = dtype_of(p, LINEAR_SCAN_DECAY);
    set(p, "LENGTH", p->scan.length);
    set(p, "REVERSE", p->scan.reverse);
    set(p, "AFTER", p->scan.after);
    set(p, "KEYS", p->scan.key_size);
    set(p, "VALUES", p->scan.value_size);
    set(p, "TILE_VALUES", p->tile);
    template_set_text(&p->text, "A_ELEMENT", emit_memory_type(decay));
    template_set_text(&p->text, "A_LOAD(x)", template_load(p->text.arena, decay, "x"));
}

static void set_blocks(printer *p, int slots, int resident) {
    set(p, "SLOTS", slots);
    set(p, "BLOCKS_PER_SM", resident);
    set(p, "FEWER_REGISTERS", FEWER_REGISTERS);
}

/* Small states leave registers and shared memory for two blocks of a multiprocessor. */
static int resident(const printer *p) {
    return p->scan.key_size <= 64 && p->tile == 64 ? 2 : 1;
}

static void operands(const printer *p, tensor t[3]) {
    const ml_linear_scan *s = &p->scan;
    t[0] = (tensor){"Q", LINEAR_SCAN_Q, 0, s->keys, s->key_size, 1};
    t[1] = (tensor){"K", LINEAR_SCAN_K, 0, s->keys, s->key_size, 1};
    t[2] = (tensor){"V", LINEAR_SCAN_V, 0, s->values, s->value_size, 1};
}

static void forward(printer *p) {
    enum { SLOTS = 2 };
    const ml_linear_scan *s = &p->scan;
    int y_at = p->step->read_count;
    tensor y = {"Y", y_at, 0, s->values, s->value_size, 1}, t[3];
    p->tile = forward_tile(p);
    operands(p, t);
    for (int i = 0; i < 3; i++) place(p, &t[i], ML_BF16);
    place(p, &y, dtype_of(p, y_at));
    for (int i = 0; i < 3; i++) move_tensor(p, &t[i], false);
    bind_scan(p);
    for (int i = 0; i < 3; i++) bind(p, &t[i]);
    bind_value(p, "A", LINEAR_SCAN_DECAY);
    bind_state(p, "S", LINEAR_SCAN_STATE);
    bind(p, &y);
    bind_state(p, "LAST", y_at + 1);
    template_set_text(&p->text, "Y_ELEMENT", emit_memory_type(s->dtype));
    set_blocks(p, SLOTS, resident(p));
    sizes z = sizes_of(p);
    int64_t shared = SLOTS * (2 * z.key_tile + z.value_tile) + z.state_tile + CHUNK * 128 + DECAYS;
    add_kernel(p, "linear_scan_forward.cu", z.blocks, COMPUTING + HELPING, ALIGNMENT + shared);
    move_tensor(p, &y, true);
}

static void states(printer *p, const sizes *z) {
    enum { SLOTS = 3 };
    set_blocks(p, SLOTS, resident(p));
    add_kernel(p, "linear_scan_states.cu", z->blocks, COMPUTING,
               ALIGNMENT + SLOTS * (z->key_tile + z->value_tile) + DECAYS);
}

static void gradient(printer *p, const sizes *z, int64_t tiles, const tensor out[4]) {
    enum { SLOTS = 2, H_BYTES = CHUNK * CHUNK * 4, SUMS = (11 * CHUNK + COMPUTING / 32) * 4 };
    int64_t h = z->value_tile >= H_BYTES ? 0 : H_BYTES;
    int64_t part = p->batches * p->scan.length;
    ml_dtype decay = dtype_of(p, out[3].place);
    template_set_text(&p->text, "SUM_ELEMENT", emit_memory_type(dtype_of(p, out[0].place)));
    template_set_text(&p->text, "DECAY_ELEMENT", emit_memory_type(decay));
    template_set(&p->text, "DECAY_STORE(x)", "%s(x)", ml_dtypes[decay].store);
    set_long(p, "DQ_TILE", tiles > 1 ? part * p->scan.key_size : 0);
    set_long(p, "DK_TILE", tiles > 1 ? part * p->scan.key_size : 0);
    set_long(p, "DA_TILE", tiles > 1 ? part : 0);
    set_blocks(p, SLOTS, 1);
    add_kernel(p, "linear_scan_grad.cu", z->blocks, COMPUTING + HELPING,
               ALIGNMENT + SLOTS * 2 * (z->key_tile + z->value_tile) + 2 * z->state_tile + h +
                   2 * CHUNK * 128 + DECAYS + SUMS);
}

static void backward(printer *p) {
    enum { DY = LINEAR_SCAN_FIRST_PAIR, DLAST };
    const ml_linear_scan *s = &p->scan;
    int first = p->step->read_count;
    p->tile = s->value_size <= TILE / 2 ? TILE / 2 : TILE;
    int64_t tiles = divide_up(s->value_size, p->tile);
    sizes z = sizes_of(p);
    tensor in[4] = {[3] = {"DY", DY, 0, s->values, s->value_size, 1}};
    tensor out[4] = {{"DQ", first, 0, s->keys, s->key_size, tiles},
                     {"DK", first + 1, 0, s->keys, s->key_size, tiles},
                     {"DV", first + 2, 0, s->values, s->value_size, 1},
                     {"DA", first + 3, 0, 0, 1, tiles}};
    operands(p, in);
    for (int i = 0; i < 4; i++) place(p, &in[i], ML_BF16);
    for (int i = 0; i < 4; i++)
        place(p, &out[i], out[i].parts > 1 ? ML_F32 : dtype_of(p, out[i].at));
    int64_t chunks = divide_up(s->length, CHUNK);
    int at =
        template_workspace(p->schedule, p->step, ML_BF16, z.blocks * chunks * z.state_tile / 2);
    for (int i = 0; i < 4; i++) move_tensor(p, &in[i], false);
    bind_scan(p);
    for (int i = 0; i < 4; i++) bind(p, &in[i]), bind(p, &out[i]);
    bind_value(p, "A", LINEAR_SCAN_DECAY);
    bind_state(p, "S", LINEAR_SCAN_STATE);
    bind_state(p, "DLAST", DLAST);
    bind_state(p, "DS", first + LINEAR_SCAN_STATE);
    set(p, "STATES_AT", at);
    states(p, &z);
    gradient(p, &z, tiles, out);
    for (int i = 0; i < 4; i++) move_tensor(p, &out[i], true);
}

void ml_template_linear_scan(ml_schedule *s, ml_step *step) {
    if (s->target->kind != ML_TARGET_CUDA) return; /* decomposed before */
    printer p = {.schedule = s, .step = step, .text = template_begin(s), .last = &step->kernel};
    ml_linear_scan_read(s->graph, step->node, &p.scan);
    p.state = &template_value(s, step, LINEAR_SCAN_STATE)->type;
    p.batches = 1;
    for (int i = 0; i < p.state->rank; i++)
        if (is_batch(&p, p.state->axis[i])) p.batches *= p.state->size[i];
    if (ml_graph_node(s->graph, step->node)->op == ML_OP_LINEAR_SCAN)
        forward(&p);
    else
        backward(&p);
}
