/* What both attention templates share: sizes, strides, masks and pasted functions as texts. */
#include "codegen/kernels/attention.h"

int64_t attention_round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

static const char *named(attention_printer *p, const char *tensor, const char *what) {
    return ml_arena_format(p->text.arena, "%s_%s", tensor, what);
}

static void set_tensor(attention_printer *p, const char *tensor, int at) {
    const ml_attention_strides *stride = &p->a->strides[at];
    ml_template_loops loops = {0};
    for (int i = 0; i < 3; i++) template_loop_add(&loops, p->a->batch[i], stride->batch[i]);
    template_set(&p->text, named(p, tensor, "at"), "%d", at);
    template_set_text(&p->text, named(p, tensor, "batch"),
                      template_offset(p->text.arena, &loops, "batch"));
    template_set(&p->text, named(p, tensor, "head"), "%lldLL", (long long)stride->head);
    template_set(&p->text, named(p, tensor, "seq"), "%lldLL", (long long)stride->seq);
    template_set(&p->text, named(p, tensor, "dim"), "%lldLL", (long long)stride->dim);
}

/* Texts of captured tensors: declarations of typed pointers at this batch and head, loads. */
static const char *set_captured(attention_printer *p, int i) {
    ml_arena *arena = p->text.arena;
    int at = p->captured_first + i;
    const ml_attention_strides *stride = &p->a->strides[at];
    ml_dtype dtype = (ml_dtype)template_value(p->schedule, p->step, at)->type.dtype;
    ml_template_loops loops = {0};
    for (int axis = 0; axis < 3; axis++)
        template_loop_add(&loops, p->a->batch[axis], stride->batch[axis]);
    const char *before = template_get(&p->text, "captures");
    template_set_text(
        &p->text, "captures",
        ml_arena_format(arena,
                        "%sconst %s *captured%d = (const %s *)${p}[%d] + %s + head * %lldLL;"
                        "\n    (void)captured%d;\n    ",
                        before, emit_memory_type(dtype), i, emit_memory_type(dtype), at,
                        template_offset(arena, &loops, "batch"), (long long)stride->head, i));
    const char *element = ml_arena_format(arena, "captured%d[qi * %lldLL + kv * %lldLL]", i,
                                          (long long)stride->seq, (long long)stride->dim);
    return ml_arena_format(arena, "(%s)", template_load(arena, dtype, element));
}

/* The text of an IOTA's index: batch axes are those of q but seq, heads and head_dim, in order. */
static const char *index_text(void *context, ml_axis axis) {
    attention_printer *p = context;
    const ml_attention_args *args = &p->a->args;
    if (axis == args->seq) return p->placed ? "(qi + q_start)" : "qi";
    if (axis == args->kv_seq) return p->placed ? "(kv + k_start)" : "kv";
    if (axis == args->heads) return "head";
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

static void set_functions(attention_printer *p) {
    ml_arena *arena = p->text.arena;
    template_set_text(&p->text, "captures", "");
    template_set_text(&p->text, "score", "");
    template_set_text(&p->text, "derivative", "");
    if (!p->a->args.score) return;
    const char **values = ML_NEW_ARRAY(arena, const char *, p->captured + 2);
    for (int i = 0; i < p->captured; i++) values[1 + i] = set_captured(p, i);

    ml_text score = {.arena = arena}, slope = {.arena = arena};
    const ml_function f = {
        .g = p->a->graph, .values = values, .index_of = index_text, .context = p};
    values[0] = p->a->backward ? "raw" : "x";
    values[1 + p->captured] = "slope";
    ml_text_add(&score, "x = %s;", ml_emit_function(&score, &f, p->a->args.score, "score_"));
    template_set_text(&p->text, "score", score.text);
    attention_split_score(p, &f);
    if (!p->a->args.derivative) return;
    ml_text_add(&slope, "slope = %s;",
                ml_emit_function(&slope, &f, p->a->args.derivative, "slope_"));
    template_set_text(&p->text, "derivative", slope.text);
}

/* query qi has the index of key qi + shift. */
static void set_places(attention_printer *p) {
    const ml_attention_step *a = p->a;
    template_set_text(&p->text, "places", "");
    template_set(&p->text, "shift", "(%lld)", (long long)(a->kv_seq - a->seq));
    if (!p->placed) return;
    int at = p->captured_first - 2;
    template_set_text(&p->text, "shift", "shift");
    template_set(&p->text, "places",
                 "const int q_start = *(const int *)${p}[%d], k_start = *(const int *)${p}[%d];\n"
                 "    const int shift = q_start - k_start + (%lld);\n"
                 "    (void)q_start, (void)k_start, (void)shift;",
                 at, at + 1, (long long)a->args.offset);
}

static void set_masks(attention_printer *p) {
    const ml_attention_step *a = p->a;
    long long window = a->args.window, widest = p->placed ? INT32_MAX : a->seq + a->kv_seq;
    if (window >= widest) window = 0; /* wider than everything */
    bool causal = a->args.causal;
    template_set(&p->text, "causal", "%d", causal);
    template_set(&p->text, "window", "%lld", window);
    const char *masks[] = {"1", "kv <= qi + ${shift}", "qi + ${shift} - kv < ${window}",
                           "kv <= qi + ${shift} && qi + ${shift} - kv < ${window}"};
    template_set_text(&p->text, "visible", masks[causal + 2 * (window > 0)]);
    /* Does a tile of queries query .. last_query and keys key .. key + keys - 1 need the mask? */
    const char *crosses[] = {
        "0", "key + keys - 1 > query + ${shift}", "last_query + ${shift} - key >= ${window}",
        "key + keys - 1 > query + ${shift} || last_query + ${shift} - key >= ${window}"};
    template_set_text(&p->text, "crosses", crosses[causal + 2 * (window > 0)]);
    /* Does it hide all of that tile? */
    const char *hides[] = {"0", "key > last_query + ${shift}",
                           "query + ${shift} - (key + keys - 1) >= ${window}",
                           "key > last_query + ${shift} || "
                           "query + ${shift} - (key + keys - 1) >= ${window}"};
    template_set_text(&p->text, "hides", hides[causal + 2 * (window > 0)]);
    /* Keys that queries query .. last_query see: first_key .. end_key - 1; queries that see keys
     * key .. last_key: first_query .. end_query - 1. May be empty, with end < first. */
    template_set_text(
        &p->text, "first_key",
        window ? "(query + ${shift} >= ${window} ? query + ${shift} - ${window} + 1 : 0)" : "0");
    template_set_text(&p->text, "end_key",
                      causal ? "(last_query + ${shift} + 1 < ${kv_seq} ? "
                               "last_query + ${shift} + 1 : ${kv_seq})"
                             : "${kv_seq}");
    template_set_text(&p->text, "first_query",
                      causal ? "(key > ${shift} ? key - ${shift} : 0)" : "0");
    template_set_text(&p->text, "end_query",
                      window ? "(last_key + ${window} - ${shift} < ${seq} ? "
                               "last_key + ${window} - ${shift} : ${seq})"
                             : "${seq}");
}

void attention_begin(attention_printer *p, ml_schedule *s, ml_step *step) {
    const ml_attention_step *a = step->attention;
    *p = (attention_printer){.schedule = s, .step = step, .a = a, .text = template_begin(s)};
    ml_template *t = &p->text;
    int reads = a->backward ? 6 : 3;
    p->placed = a->args.placed;
    p->captured_first = reads + 2 * p->placed;
    p->captured = step->read_count - p->captured_first;
    p->batches = a->batch[0] * a->batch[1] * a->batch[2];
    p->group = a->heads / a->kv_heads;
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {
        {"seq", a->seq},
        {"kv_seq", a->kv_seq},
        {"heads", a->heads},
        {"kv_heads", a->kv_heads},
        {"group", p->group},
        {"head_dim", a->head_dim},
        {"value_dim", a->value_dim},
        {"batches", p->batches},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        template_set(t, sizes[i].name, "%lld", (long long)sizes[i].value);
    const char *suffix = a->dtype == ML_F64 ? "f64" : "f32";
    template_set_text(t, "suffix", suffix);
    template_set_text(t, "real", emit_compute_type(a->dtype));
    template_set_text(t, "memory", emit_memory_type(a->dtype));
    template_set_text(t, "lse_memory", a->dtype == ML_F64 ? "double" : "float");
    template_set_text(t, "lowest", a->dtype == ML_F64 ? "-1e300" : "-3e38f");
    template_set(t, "scale", a->dtype == ML_F64 ? "%.17e" : "%.9ef", a->args.scale);
    template_set_text(t, "load", ml_dtypes[a->dtype].load);
    template_set_text(t, "store", ml_dtypes[a->dtype].store);
    template_set_text(t, "p", s->target->kind == ML_TARGET_CUDA ? "a.p" : "p");
    template_set(t, "pointers", "%d", step->read_count + step->write_count);
    const char *const forward[] = {"o", "lse"}, *const backward[] = {"dq", "dk", "dv"};
    const char *const inputs[] = {"q", "k", "v", "o", "lse", "g"};
    for (int i = 0; i < reads; i++) set_tensor(p, inputs[i], i);
    for (int i = 0; i < (a->backward ? 3 : 2); i++)
        set_tensor(p, a->backward ? backward[i] : forward[i], step->read_count + i);
    set_functions(p);
    set_places(p);
    set_masks(p);
}

void ml_template_attention(ml_schedule *s, ml_step *step) {
    if (s->target->kind == ML_TARGET_CUDA)
        template_attention_cuda(s, step);
    else
        template_attention_c(s, step);
}
