/* The parameters that all kernels of attention share: sizes, strides, masks, the score function. */
#include "codegen/kernels/attention.h"
#include "runtime/ops/attention/attention.h"

int64_t attention_divide_up(int64_t n, int64_t by) {
    return (n + by - 1) / by;
}

int64_t attention_round_up(int64_t n, int64_t to) {
    return attention_divide_up(n, to) * to;
}

void attention_set(attention_printer *p, const char *name, int64_t value) {
    template_set(&p->text, name, "%lld", (long long)value);
}

static const char *named(attention_printer *p, const char *tensor, const char *what) {
    return ml_arena_format(p->text.arena, "%s_%s", tensor, what);
}

static const char *batch_offset(attention_printer *p, const ml_attention_strides *stride) {
    ml_template_loops loops = {0};
    for (int i = 0; i < 3; i++) template_loop_add(&loops, p->a->batch[i], stride->batch[i]);
    return template_offset(p->text.arena, &loops, "batch");
}

/* Where a head begins: of queries in two pieces each head is two. */
static const char *head_offset(attention_printer *p, const ml_attention_strides *stride,
                               const char *head, bool queries) {
    if (p->pieces < 2 || !queries)
        return ml_arena_format(p->text.arena, "(%s * %lldLL)", head, (long long)stride->head);
    return ml_arena_format(p->text.arena, "(%s / 2 * %lldLL + %s %% 2 * %lldLL)", head,
                           (long long)stride->head, head, (long long)(p->a->seq * stride->seq));
}

static void bind_tensor(attention_printer *p, const char *tensor, int at, bool keys) {
    const ml_attention_strides *stride = &p->a->strides[at];
    attention_set(p, named(p, tensor, "AT"), at);
    template_set_text(&p->text, named(p, tensor, "BATCH(batch)"), batch_offset(p, stride));
    template_set_text(&p->text, named(p, tensor, "HEAD(h)"), head_offset(p, stride, "h", !keys));
    template_set(&p->text, named(p, tensor, "SEQ"), "%lldLL", (long long)stride->seq);
    template_set(&p->text, named(p, tensor, "DIM"), "%lldLL", (long long)stride->dim);
}

/* As ml_attention_key_order has it. */
static void bind_key_rows(attention_printer *p) {
    const long long ranks = p->a->args.key_ranks, size = ranks ? p->a->kv_seq / (2 * ranks) : 0;
    attention_set(p, "KEY_RUN",
                  size % (2 * ML_ATTENTION_RUN) ? ML_ATTENTION_RUN : 2 * ML_ATTENTION_RUN);
    template_set_text(&p->text, "KEY_ROW(key)", "(key)");
    if (!ranks) return;
    if (size % ML_ATTENTION_RUN)
        ml_raise(ML_INTERNAL, "attention: neighbouring keys are in several blocks of ranks");
    template_set(&p->text, "KEY_ROW(key)",
                 "((key) / %lld %% 2 ? (%lld - (key) / %lld) * %lld + (key) %% %lld : (key))", size,
                 2 * ranks, size, size, size);
}

/* A captured tensor: adds the declaration of a typed pointer at this batch and head; its load. */
static const char *captured(attention_printer *p, ml_text *declarations, int i) {
    ml_arena *arena = p->text.arena;
    int at = p->captured_first + i;
    const ml_attention_strides *stride = &p->a->strides[at];
    ml_dtype dtype = (ml_dtype)template_value(p->schedule, p->step, at)->type.dtype;
    const char *type = emit_memory_type(dtype);
    ml_text_add(declarations,
                "%sconst %s *captured%d = (const %s *)%s[%d] + %s + %s;\n"
                "(void)captured%d",
                i ? ";\n" : "", type, i, type,
                p->schedule->target->kind == ML_TARGET_CUDA ? "a.p" : "p", at,
                batch_offset(p, stride), head_offset(p, stride, "head", true), i);
    const char *element = ml_arena_format(arena, "captured%d[qi * %lldLL + kv * %lldLL]", i,
                                          (long long)stride->seq, (long long)stride->dim);
    return ml_arena_format(arena, "(%s)", template_load(arena, dtype, element));
}

/* The text of an IOTA's index: batch axes are those of q but seq, heads and head_dim, in order. */
static const char *index_text(void *context, ml_axis axis) {
    attention_printer *p = context;
    const ml_attention_args *args = &p->a->args;
    if (axis == args->seq) return p->pieces ? "(qi + Q_START)" : "qi";
    if (axis == args->kv_seq) return p->pieces ? "(kv + k_start)" : "kv";
    if (axis == args->heads) return p->pieces == 2 ? "(head / 2)" : "head";
    const ml_type *q = ml_graph_type(p->a->graph, ml_graph_source(p->a->graph, p->a->node, 0));
    int64_t below = 1;
    for (int i = q->rank - 1; i >= 0; i--) {
        if (q->axis[i] == args->seq || q->axis[i] == args->heads || q->axis[i] == args->head_dim)
            continue;
        if (q->axis[i] == axis)
            return ml_arena_format(p->text.arena, "((int)(batch / %lldLL) %% %lld)",
                                   (long long)below, (long long)q->size[i]);
        below *= q->size[i];
    }
    ml_raise(ML_INTERNAL, "a score function uses the index of axis \"%s\", which attention lacks",
             ml_axis_name(p->a->graph, axis));
}

static void bind_functions(attention_printer *p) {
    ml_arena *arena = p->text.arena;
    static const char *const none[] = {"CAPTURES",   "SCORE", "SHOWN",
                                       "DERIVATIVE", "LINES", "LINE_ROWS"};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        template_set_text(&p->text, none[i], "");
    if (!p->a->args.score) return;
    const char **values = ML_NEW_ARRAY(arena, const char *, p->captured + 2);
    ml_text captures = {.arena = arena}, score = {.arena = arena}, slope = {.arena = arena};
    for (int i = 0; i < p->captured; i++) values[1 + i] = captured(p, &captures, i);
    if (p->captured) template_set_text(&p->text, "CAPTURES", captures.text);
    const ml_function f = {
        .g = p->a->graph, .values = values, .index_of = index_text, .context = p};
    values[0] = p->a->backward ? "raw" : "x";
    values[1 + p->captured] = "slope";
    ml_text_add(&score, "x = %s", ml_emit_function(&score, &f, p->a->args.score, "score_"));
    template_set_text(&p->text, "SCORE", score.text);
    attention_split_score(p, &f);
    if (!p->a->args.derivative) return;
    ml_text_add(&slope, "slope = %s",
                ml_emit_function(&slope, &f, p->a->args.derivative, "slope_"));
    template_set_text(&p->text, "DERIVATIVE", slope.text);
}

static void bind_mask(attention_printer *p) {
    const ml_attention_step *a = p->a;
    int64_t window = a->args.window, widest = p->pieces ? INT32_MAX : a->seq + a->kv_seq;
    int64_t offset = p->pieces ? a->args.offset : a->kv_seq - a->seq;
    attention_set(p, "CAUSAL", a->args.causal);
    attention_set(p, "WINDOW", window < widest ? window : 0);
    attention_set(p, "PIECES", p->pieces);
    attention_set(p, "PLACED_AT", p->pieces ? p->captured_first - p->pieces - 1 : 0);
    template_set(&p->text, "OFFSET", "(%lld)", (long long)offset);
}

static void bind_types(attention_printer *p) {
    ml_template *t = &p->text;
    ml_dtype dtype = p->a->dtype;
    bool wide = dtype == ML_F64;
    template_set_text(t, "REAL", emit_compute_type(dtype));
    template_set_text(t, "ELEMENT", emit_memory_type(dtype));
    template_set_text(t, "LSE_ELEMENT", wide ? "double" : "float");
    template_set_text(t, "LOWEST", wide ? "-1e300" : "-3e38f");
    template_set(t, "SCALE", wide ? "%.17e" : "%.9ef", p->a->args.scale);
    template_set_text(t, "LOAD", ml_dtypes[dtype].load);
    template_set_text(t, "STORE", ml_dtypes[dtype].store);
    template_set_text(t, "EXP", wide ? "ml_exp_f64" : "ml_exp_f32");
    template_set_text(t, "LOG", wide ? "ml_log_f64" : "ml_log_f32");
}

/* Queries in two pieces are twice as many heads of half as many rows, each with a place of its own:
 * heads that share keys are what every kernel knows. */
static const ml_attention_step *pieces_as_heads(ml_arena *arena, const ml_attention_step *a) {
    if (a->args.pieces < 2) return a;
    ml_attention_step *apart = ML_NEW(arena, ml_attention_step);
    *apart = *a;
    apart->heads *= 2;
    apart->seq /= 2;
    return apart;
}

void attention_bind(attention_printer *p, ml_schedule *s, ml_step *step) {
    *p = (attention_printer){.schedule = s, .step = step, .text = template_begin(s)};
    const ml_attention_step *a = p->a = pieces_as_heads(p->text.arena, step->attention);
    int reads = a->backward ? 6 : 3, writes = a->backward ? 3 : 2;
    p->pieces = a->args.pieces;
    p->masked_by_head = p->pieces == 2;
    p->captured_first = reads + ml_attention_places(&a->args);
    p->captured = step->read_count - p->captured_first;
    p->batches = a->batch[0] * a->batch[1] * a->batch[2];
    p->group = a->heads / a->kv_heads;
    attention_set(p, "SEQ", a->seq);
    attention_set(p, "KV_SEQ", a->kv_seq);
    attention_set(p, "HEADS", a->heads);
    attention_set(p, "KV_HEADS", a->kv_heads);
    attention_set(p, "GROUP", p->group);
    attention_set(p, "HEAD_DIM", a->head_dim);
    attention_set(p, "VALUE_DIM", a->value_dim);
    attention_set(p, "CLAMPED", p->captured > 0);
    attention_set(p, "POINTERS", step->read_count + step->write_count);
    attention_set(p, "STATES_AT", 0); /* where there are no masks */
    attention_set(p, "MASKED_BY_HEAD", 0);
    bind_types(p);
    static const char *const inputs[] = {"Q", "K", "V", "O", "LSE", "G"};
    static const char *const outputs[2][3] = {{"O", "LSE"}, {"DQ", "DK", "DV"}};
    for (int i = 0; i < reads; i++) bind_tensor(p, inputs[i], i, i == 1 || i == 2);
    for (int i = 0; i < writes; i++)
        bind_tensor(p, outputs[a->backward][i], step->read_count + i, a->backward && i > 0);
    bind_key_rows(p);
    bind_mask(p);
    bind_functions(p);
}

void attention_bind_workspace(attention_printer *p, const char *name, int at) {
    attention_set(p, name, at);
    attention_set(p, "POINTERS", p->step->read_count + p->step->write_count);
}

ml_kernel *attention_kernel(attention_printer *p, const char *file, const char *label,
                            int64_t blocks, uint32_t threads, int64_t shared_bytes) {
    ml_kernel *kernel =
        template_file(&p->text, file, label, p->step->read_count + p->step->write_count);
    template_launch(kernel, blocks, 1, 1, threads, shared_bytes);
    return kernel;
}

/* Scores are exponentiated in base 2. Without a score function the scale is part of both, if it
 * preserves the order. A row has no key so far where its largest exponent is below NO_KEY: what is
 * there, such as masks of -1e30, differs from its own rounded product by too much for exp2. */
void attention_bind_exponents(attention_printer *p, bool scored) {
    double log2e = 1.4426950408889634, scale = p->a->args.scale;
    scored = scored || scale < 0;
    attention_set(p, "SCORED", scored);
    template_set_text(&p->text, "NO_KEY", "-2e9f");
    template_set(&p->text, "SCORE_LOG2", "%.9ef", scored ? log2e : scale * log2e);
    template_set(&p->text, "SCORE_LN", "%.9ef", scored ? 1.0 : scale);
}

void attention_bind_units(attention_printer *p) {
    attention_bind_exponents(p, p->a->args.score != 0);
}
