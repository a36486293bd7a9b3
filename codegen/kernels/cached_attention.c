/* CACHED_ATTENTION: parameters of its kernels (c/cached_attention*.c, cuda/cached_attention*.cu).
 * How many parts the keys of a row have depends on the shapes alone: so many that all threads, or
 * multiprocessors, have work where few rows decode. */
#include "runtime/ops/cached_attention/cached_attention.h"
#include "codegen/kernels/template.h"

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    ml_cached_attention_args args;
    ml_axis row;
    int64_t rows, fresh, heads, kv_heads, group, slots, head_dim, value_dim;
    int64_t queries, together, splits; /* of a unit: queries and heads of keys; parts of the keys */
    bool cuda, clustered;              /* the blocks of all parts are a cluster */
} printer;

static int64_t size_of(const ml_value *v, ml_axis axis) {
    int at = axis ? ml_type_find(&v->type, axis) : -1;
    return at < 0 ? 1 : v->type.size[at];
}

static int64_t stride_of(const ml_value *v, ml_axis axis) {
    int at = axis ? ml_type_find(&v->type, axis) : -1;
    return at < 0 || v->type.size[at] == 1 ? 0 : v->stride[at];
}

static int64_t round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

static void set(printer *p, const char *name, int64_t value) {
    template_set(&p->text, name, "%lld", (long long)value);
}

static void set_stride(printer *p, const char *name, int i, ml_axis axis) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    template_set(&p->text, name, "%lldLL", (long long)stride_of(v, axis));
}

static void set_strides(printer *p) {
    const ml_cached_attention_args *a = &p->args;
    const int o = p->step->read_count;
    set_stride(p, "Q_ROW", CACHED_Q, p->row), set_stride(p, "Q_SEQ", CACHED_Q, a->seq);
    set_stride(p, "Q_HEAD", CACHED_Q, a->heads), set_stride(p, "Q_DIM", CACHED_Q, a->head_dim);
    set_stride(p, "K_POOL", CACHED_K, a->pool), set_stride(p, "K_HEAD", CACHED_K, a->kv_heads);
    set_stride(p, "V_POOL", CACHED_V, a->pool), set_stride(p, "V_HEAD", CACHED_V, a->kv_heads);
    set_stride(p, "K_DIM", CACHED_K, a->head_dim), set_stride(p, "V_DIM", CACHED_V, a->head_dim);
    set_stride(p, "O_ROW", o, p->row), set_stride(p, "O_SEQ", o, a->seq);
    set_stride(p, "O_HEAD", o, a->heads), set_stride(p, "O_DIM", o, a->head_dim);
    set_stride(p, "TABLE_ROW", CACHED_TABLE, p->row);
    set_stride(p, "TABLE_COLUMN", CACHED_TABLE, a->columns);
    set_stride(p, "START_ROW", CACHED_START, p->row);
    set_stride(p, "LENGTH_ROW", CACHED_LENGTH, p->row);
    set(p, "O_AT", o);
}

static void set_sizes(printer *p) {
    const ml_value *q = template_value(p->schedule, p->step, CACHED_Q);
    const ml_value *k = template_value(p->schedule, p->step, CACHED_K);
    const ml_value *v = template_value(p->schedule, p->step, CACHED_V);
    const ml_value *table = template_value(p->schedule, p->step, CACHED_TABLE);
    p->rows = size_of(q, p->row), p->fresh = size_of(q, p->args.seq);
    p->heads = size_of(q, p->args.heads), p->kv_heads = size_of(k, p->args.kv_heads);
    p->group = p->heads / p->kv_heads;
    p->slots = p->args.block * size_of(table, p->args.columns);
    p->head_dim = size_of(q, p->args.head_dim), p->value_dim = size_of(v, p->args.head_dim);
    set(p, "ROWS", p->rows), set(p, "NEW", p->fresh), set(p, "HEADS", p->heads);
    set(p, "KV_HEADS", p->kv_heads), set(p, "GROUP", p->group), set(p, "BLOCK", p->args.block);
    set(p, "COLUMNS", size_of(table, p->args.columns)), set(p, "POOL", size_of(k, p->args.pool));
    set(p, "HEAD_DIM", p->head_dim), set(p, "VALUE_DIM", p->value_dim);
    set(p, "CAUSAL", p->args.causal);
    set(p, "WINDOW", p->args.window < INT32_MAX ? p->args.window : 0);
    template_set(&p->text, "SCALE", "%.9ef", p->args.scale);
    template_set_text(&p->text, "LOWEST", "-3e38f");
    ml_dtype query = (ml_dtype)q->type.dtype, element = (ml_dtype)k->type.dtype;
    template_set_text(&p->text, "QUERY", emit_memory_type(query));
    template_set_text(&p->text, "QUERY_LOAD", ml_dtypes[query].load);
    template_set_text(&p->text, "QUERY_STORE", ml_dtypes[query].store);
    template_set_text(&p->text, "ELEMENT", emit_memory_type(element));
    template_set_text(&p->text, "LOAD", ml_dtypes[element].load);
    template_set_text(&p->text, "REAL", "float");
    template_set_text(&p->text, "EXP", "ml_exp_f32");
}

/* ---- The score function ---------------------------------------------------------------------- */

/* The load of captured tensor i. */
static const char *captured(printer *p, int i) {
    ml_arena *arena = p->text.arena;
    const int at = CACHED_CAPTURED + i;
    const ml_value *v = template_value(p->schedule, p->step, at);
    ml_dtype dtype = (ml_dtype)v->type.dtype;
    const ml_axis axes[] = {p->row, p->args.heads, p->args.seq, p->args.kv_seq, p->args.pool};
    static const char *const indices[] = {"row", "head", "i", "kv", "pool_row"};
    ml_text element = {.arena = arena};
    ml_text_add(&element, "((const %s *)%s[%d])[0", emit_memory_type(dtype), p->cuda ? "a.p" : "p",
                at);
    for (int k = 0; k < 5; k++)
        if (stride_of(v, axes[k]))
            ml_text_add(&element, " + %s * %lldLL", indices[k], (long long)stride_of(v, axes[k]));
    ml_text_add(&element, "]");
    return ml_arena_format(arena, "(%s)", template_load(arena, dtype, element.text));
}

static const char *index_text(void *context, ml_axis axis) {
    const printer *p = context;
    if (axis == p->args.seq) return "((int)position)";
    if (axis == p->args.kv_seq) return "((int)kv)";
    if (axis == p->args.heads) return "((int)head)";
    return "((int)row)";
}

static void set_score(printer *p) {
    const int count = p->step->fresh_at ? 0 : p->step->read_count - CACHED_CAPTURED;
    set(p, "SCORED", p->args.score != 0);
    template_set_text(&p->text, "SCORE", "");
    if (!p->args.score) return;
    const char **values = ML_NEW_ARRAY(p->text.arena, const char *, count + 1);
    values[0] = "x";
    for (int i = 0; i < count; i++) values[1 + i] = captured(p, i);
    const ml_function f = {
        .g = p->schedule->graph, .values = values, .index_of = index_text, .context = p};
    ml_text score = {.arena = p->text.arena};
    ml_text_add(&score, "x = %s", ml_emit_function(&score, &f, p->args.score, "score_"));
    template_set_text(&p->text, "SCORE", score.text);
}

/* ---- Kernels --------------------------------------------------------------------------------- */

/* Parts of the keys, none of which is shorter than `shortest`, for `wanted` units of work. */
static void choose_splits(printer *p, int64_t wanted, int64_t shortest, int64_t most) {
    int64_t blocks = (p->group * p->fresh + p->queries - 1) / p->queries;
    int64_t units = p->rows * p->kv_heads / p->together * blocks, longest = p->slots;
    if (p->args.window && p->args.window + p->fresh < longest) longest = p->args.window + p->fresh;
    p->splits = p->cuda ? wanted / units : (wanted + units - 1) / units; /* on a GPU, at once */
    if (p->splits > longest / shortest) p->splits = longest / shortest;
    if (p->splits > most) p->splits = most;
    if (p->splits < 1) p->splits = 1;
}

static int64_t units_of(const printer *p) {
    int64_t blocks = (p->group * p->fresh + p->queries - 1) / p->queries;
    return p->rows * p->kv_heads / p->together * blocks * p->splits;
}

/* After the units are chosen, before any kernel: all count the workspace. */
static void set_units(printer *p) {
    set(p, "QUERIES", p->queries), set(p, "SPLITS", p->splits), set(p, "PARTIAL_AT", 0);
    if (p->splits == 1 || p->clustered) return;
    int64_t parts = p->rows * p->heads * p->fresh * p->splits;
    set(p, "PARTIAL_AT",
        template_workspace(p->schedule, p->step, ML_F32, parts * (p->value_dim + 2)));
}

/* Whether the heads of a key lie side by side, a few of them. */
static bool heads_interleave(const printer *p) {
    enum { MOST_BYTES = 1 << 18 }; /* of all queries and sums, on the stack */
    const ml_value *k = template_value(p->schedule, p->step, CACHED_K);
    return p->kv_heads > 1 && stride_of(k, p->args.kv_heads) < stride_of(k, p->args.pool) &&
           p->heads * p->fresh * (p->head_dim + p->value_dim) * (int64_t)sizeof(float) < MOST_BYTES;
}

static void print_c(printer *p) {
    enum { SHORTEST = 128, MOST = 64, TILE = 64, INTERLEAVED = 16, PARTS_A_THREAD = 2 };
    const ml_target *target = p->schedule->target;
    int64_t vector = target->vector_bytes ? target->vector_bytes : 16, lanes = vector / 4;
    int64_t mr = vector == 64 ? 8 : 4, unit = lanes > mr ? lanes : mr, all = p->group * p->fresh;
    bool narrow = all < lanes;
    if (narrow && heads_interleave(p)) p->together = p->kv_heads;
    p->queries = narrow ? all : round_up(all < TILE ? all : TILE, unit);
    choose_splits(p, PARTS_A_THREAD * target->threads, SHORTEST, MOST);
    if (p->fresh > 1) p->splits = 1;
    set(p, "VECTOR_BYTES", vector), set(p, "LANES", lanes), set(p, "MR", mr);
    set(p, "NARROW", narrow), set(p, "TOGETHER", p->together);
    set(p, "KEYS", p->together > 1 ? INTERLEAVED : TILE);
    set(p, "HEAD_WIDTH", round_up(p->head_dim, narrow ? 2 * lanes : unit));
    set(p, "VALUE_WIDTH", round_up(p->value_dim, narrow ? 2 * lanes : unit));
    template_set_text(&p->text, "LANE_INTEGER", "int");
    set_units(p);
    int pointers = p->step->read_count + p->step->write_count;
    p->step->kernel = template_file(&p->text, "cached_attention.c", "cached_attention", pointers);
    p->step->kernel->units = units_of(p);
    if (p->splits == 1) return;
    ml_kernel *merge =
        template_file(&p->text, "cached_attention_merge.c", "cached_attention merge", pointers);
    merge->units = p->rows * p->heads * p->fresh;
    merge->grain = 1 + (1 << 14) / (p->splits * p->value_dim);
    p->step->kernel->next = merge;
}

/* Elements that a lane loads at once, of rows of `dim` in a pool: as many as keep all lanes busy
 * and are aligned. */
static int64_t lane_elements(const printer *p, int i, int64_t dim) {
    enum { LANES = 32, PACK_BYTES = 16 };
    const ml_value *v = template_value(p->schedule, p->step, i);
    int64_t stride = stride_of(v, p->args.head_dim);
    int64_t most = PACK_BYTES / ml_dtypes[v->type.dtype].bytes;
    if (stride != 1) return 1;
    for (; most > 1; most /= 2)
        if (dim >= most * LANES && dim % most == 0 && v->offset % most == 0 &&
            stride_of(v, p->args.pool) % most == 0 && stride_of(v, p->args.kv_heads) % most == 0)
            return most;
    return 1;
}

/* As many queries as the registers of a thread have room for. */
static int64_t block_queries(const printer *p) {
    enum { MOST = 8, REGISTERS = 150, LANES = 32 };
    int64_t each = (p->head_dim + p->value_dim + LANES - 1) / LANES, queries = 1;
    while (queries < MOST && queries < p->group * p->fresh && 2 * queries * each <= REGISTERS)
        queries *= 2;
    return queries;
}

/* A kernel after its units are chosen, and what adds up the parts. */
static void launch(printer *p, const char *file, uint32_t threads, int64_t shared_bytes) {
    enum { MERGE = 128 };
    set_units(p);
    int pointers = p->step->read_count + p->step->write_count;
    set(p, "POINTERS", pointers);
    p->step->kernel = template_file(&p->text, file, "cached_attention", pointers);
    template_launch(p->step->kernel, units_of(p), 1, 1, threads, shared_bytes);
    if (p->splits == 1 || p->clustered) return;
    ml_kernel *merge =
        template_file(&p->text, "cached_attention_merge.cu", "cached_attention merge", pointers);
    template_launch(merge, p->rows * p->heads * p->fresh, 1, 1, MERGE, 0);
    p->step->kernel->next = merge;
}

/* In bf16, rows of whole packs of 16 bytes that begin at such. */
static bool has_packs(const printer *p, int i, ml_axis last) {
    enum { PACK = 8 };
    const ml_value *v = template_value(p->schedule, p->step, i);
    if (v->type.dtype != ML_BF16 || v->offset % PACK || stride_of(v, last) != 1) return false;
    for (int k = 0; k < v->type.rank; k++)
        if (v->type.axis[k] == last ? v->type.size[k] % PACK : v->stride[k] % PACK) return false;
    return true;
}

/* Tiles of 64 or 128 queries on tensor cores; false where they do not serve, or are too few. */
static bool print_mma(printer *p) {
    enum { FEW = 16, LARGE = 128, LARGEST = 256, ARCH = 80, SHORTEST = 512, MOST = 16, PAD = 8 };
    const ml_target *target = p->schedule->target;
    const int own[] = {CACHED_Q, CACHED_K, CACHED_V, p->step->read_count};
    int64_t all = p->group * p->fresh;
    if (target->arch < ARCH || all <= FEW || p->head_dim > LARGEST || p->value_dim > LARGEST)
        return false;
    for (int i = 0; i < 4; i++)
        if (!has_packs(p, own[i], p->args.head_dim)) return false;
    bool huge = p->head_dim > LARGE || p->value_dim > LARGE;
    int64_t tiles = huge || all <= 64 ? 1 : 2, keys = huge ? 32 : 64, step = huge ? 32 : 16;
    int64_t head = round_up(p->head_dim, step), value = round_up(p->value_dim, step);
    int64_t bytes = 64 * tiles * (head + PAD) * 2 + 2 * keys * (head + value + 2 * PAD) * 2;
    if (bytes > ml_target_shared(target->arch)) return false;
    p->queries = 64 * tiles;
    choose_splits(p, 2 * (int64_t)target->multiprocessors, SHORTEST, MOST);
    set(p, "HEAD_WIDTH", head), set(p, "VALUE_WIDTH", value);
    set(p, "WARP_TILES", tiles), set(p, "KEYS", keys);
    launch(p, "cached_attention_mma.cu", 128, bytes);
    return true;
}

static bool is_input(const printer *p, int i) {
    const ml_schedule *s = p->schedule;
    return s->storages.at[template_value(s, p->step, i)->storage].kind == ML_STORAGE_INPUT;
}

/* The new position's key and value, which the step reads from fresh_at on: with each the row of the
 * pool that it is for. */
static void set_fresh(printer *p) {
    static const char *const index_at[] = {"INDEX_K_AT", "INDEX_V_AT"},
                             *const fresh_at[] = {"FRESH_K_AT", "FRESH_V_AT"},
                             *const index_row[] = {"INDEX_K_ROW", "INDEX_V_ROW"},
                             *const fresh_row[] = {"FRESH_K_ROW", "FRESH_V_ROW"},
                             *const fresh_head[] = {"FRESH_K_HEAD", "FRESH_V_HEAD"};
    const int at = p->step->fresh_at;
    set(p, "FRESH", at != 0);
    set(p, "INPUTS", is_input(p, CACHED_TABLE) && is_input(p, CACHED_START));
    for (int i = 0; i < 2; i++) {
        const int index = at ? at + 2 * i : 0, value = at ? index + 1 : 0;
        set(p, index_at[i], index), set(p, fresh_at[i], value);
        set_stride(p, index_row[i], index, at ? p->row : 0);
        set_stride(p, fresh_row[i], value, at ? p->row : 0);
        set_stride(p, fresh_head[i], value, at ? p->args.kv_heads : 0);
    }
}

/* Queries and parts of the keys of a block. Parts that are few, of few rows, are clusters. */
static void choose_parts(printer *p) {
    enum { SHORTEST = 64, MOST = 64, BLOCKS_A_PROCESSOR = 4, CLUSTERS = 90 };
    enum { PARTS = 8, LONG = 1024 }; /* of a cluster: blocks, and keys that each may have */
    const ml_target *target = p->schedule->target;
    p->queries = block_queries(p);
    choose_splits(p, BLOCKS_A_PROCESSOR * (int64_t)target->multiprocessors, SHORTEST, MOST);
    const int64_t splits = p->splits, parts = splits < PARTS ? splits : PARTS;
    p->splits = parts;
    p->clustered = parts > 1 && target->arch >= CLUSTERS && p->slots <= PARTS * LONG &&
                   units_of(p) <= target->multiprocessors;
    if (!p->clustered) p->splits = splits;
}

static void print_cuda(printer *p) {
    enum { WARPS = 4 };
    if (print_mma(p)) return;
    choose_parts(p);
    const int64_t warps = p->clustered ? 2 * WARPS : WARPS;
    set(p, "K_VEC", lane_elements(p, CACHED_K, p->head_dim));
    set(p, "V_VEC", lane_elements(p, CACHED_V, p->value_dim));
    set(p, "WARPS", warps);
    set(p, "CLUSTER", p->clustered ? p->splits : 1);
    set_fresh(p);
    const int64_t sent = p->clustered ? 3 * (p->queries * p->value_dim + p->splits) : 0;
    launch(p, "cached_attention.cu", (uint32_t)(32 * warps),
           (warps * p->queries * (p->value_dim + 2) + sent) * (int64_t)sizeof(float));
}

static printer begin(ml_schedule *s, ml_step *step) {
    printer p = {.schedule = s, .step = step, .text = template_begin(s), .together = 1};
    p.cuda = s->target->kind == ML_TARGET_CUDA;
    ml_cached_attention_read(s->graph, step->node, &p.args);
    p.row = ml_cached_attention_row(s->graph, ml_graph_sources(s->graph, step->node));
    set_sizes(&p);
    return p;
}

bool ml_cached_attention_writes(ml_schedule *s, ml_step *step, const uint32_t *fresh) {
    enum { PACK = 8, FEW = 16 };
    printer p = begin(s, step);
    const int pools[] = {CACHED_K, CACHED_V};
    if (!p.cuda || p.fresh != 1 || !p.args.causal || step->read_count != CACHED_CAPTURED)
        return false;
    choose_parts(&p);
    if (p.group > p.queries || p.group > FEW || (p.splits > 1 && !p.clustered)) return false;
    for (int i = 0; i < 2; i++) {
        const ml_value *v = &s->values.at[fresh[i]], *pool = template_value(s, step, pools[i]);
        if (v->type.dtype != pool->type.dtype || v->offset % PACK) return false;
        if (ml_type_elements(&v->type) * ml_type_size(&pool->type, p.args.pool) !=
            p.rows * ml_type_elements(&pool->type)) /* queries may be of the last position alone */
            return false;
        for (int axis = 0; axis < v->type.rank; axis++) {
            const bool last = v->type.axis[axis] == p.args.head_dim;
            if (v->type.size[axis] > 1 && (last ? v->stride[axis] != 1 : v->stride[axis] % PACK))
                return false;
        }
    }
    return true;
}

void ml_template_cached_attention(ml_schedule *s, ml_step *step) {
    printer p = begin(s, step);
    set_strides(&p);
    set_score(&p);
    if (p.cuda)
        print_cuda(&p);
    else
        print_c(&p);
}
