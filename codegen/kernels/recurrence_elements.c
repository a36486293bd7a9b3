/* The text of a recurrence's step by elements: where operands are, what is loaded, computed and
 * stored at a position; what positions do to the states, where they compose; states of a forward
 * recurrence that are computed again. */
#include "codegen/kernels/recurrence_elements.h"

#include <string.h>

/* The address of an element at position `t` of operand i, behind its pointer x<i>. */
static const char *element(const recurrence_elements *p, int i) {
    ml_arena *arena = p->text.arena;
    const ml_value *v = template_value(p->schedule, p->step, i);
    int64_t along = recurrence_stride(v, p->r.axis);
    int last = p->space.rank - 1;
    int64_t across = p->lanes && last >= 0 ? recurrence_stride(v, p->space.axis[last]) : 0;
    ml_text out = {.arena = arena};
    ml_text_add(&out, "x%d[", i);
    const char *t = p->shift[i] ? p->shift[i] < 0 ? "(t - 1)" : "(t + 1)" : "t";
    if (along) ml_text_add(&out, "%s * %lldLL", t, (long long)along);
    if (across) ml_text_add(&out, "%sl * %lldLL", along ? " + " : "", (long long)across);
    ml_text_add(&out, along || across ? "]" : "0]");
    return out.text;
}

int64_t elements_rows_of(const recurrence_elements *p) {
    return ml_type_elements(&p->space);
}

/* The offset of a row's elements in operand i. */
static const char *row_offset(const recurrence_elements *p, int i, const char *row) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    return recurrence_offset(p->text.arena, v, &p->space, row);
}

static void declare_pointer(recurrence_elements *p, int i, bool written) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    const char *type = emit_memory_type((ml_dtype)v->type.dtype);
    ml_text_add(&p->first, "%s%s *x%d = (%s%s *)P[%d] + %s;\n", written ? "" : "const ", type, i,
                written ? "" : "const ", type, i, row_offset(p, i, "row"));
}

/* Of an input: its value at the last position that the step visits is another operand's. */
static const char *at_edge(const recurrence_elements *p, int i, const char *value) {
    if (!p->shift[i]) return value;
    const char *where = p->shift[i] < 0 ? "0" : "LENGTH - 1";
    return ml_arena_format(p->text.arena, "t == %s ? kept%d%s : %s", where, p->edge[i], p->lane,
                           value);
}

static const char *loaded(const recurrence_elements *p, int i) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    const char *value = template_load(p->text.arena, (ml_dtype)v->type.dtype, element(p, i));
    return at_edge(p, i, value);
}

ml_dtype elements_dtype_of(const recurrence_elements *p, int i) {
    return (ml_dtype)template_value(p->schedule, p->step, i)->type.dtype;
}

/* Of rows that are computed together a value is an array. */
static const char *each_lane(const recurrence_elements *p) {
    return p->lanes ? "for (int l = 0; l < LANES; l++) " : "";
}

/* A value of a row that lives as long as it: `name`, from this text on. */
static void declare_kept(recurrence_elements *p, const char *name, ml_dtype dtype,
                         const char *from) {
    ml_text_add(&p->first, "%s %s%s;\n%s%s%s = %s;\n", emit_compute_type(dtype), name,
                p->lanes ? "[LANES]" : "", each_lane(p), name, p->lane, from);
}

/* ---- Inputs ---- */

/* The forward recurrence that is computed again, of which `source` is a result; 0: it is not. */
ml_ref elements_of_forward(const recurrence_elements *p, ml_ref source) {
    const ml_graph *g = p->schedule->graph;
    ml_ref forward = p->step->scan ? p->step->scan->forward : 0;
    bool out = forward && ml_graph_node(g, source)->op == ML_OP_OUT;
    return out && ml_graph_source(g, source, 0) == forward ? forward : 0;
}

/* Histories that are read one position off, and which operands they begin with. */
void elements_find_shifts(recurrence_elements *p) {
    const ml_graph *g = p->schedule->graph;
    p->sources = ml_graph_node(g, p->step->node)->source_count;
    p->edge = ML_NEW_ARRAY(p->text.arena, int, p->step->read_count + p->step->write_count);
    p->shift = ML_NEW_ARRAY(p->text.arena, int, p->step->read_count + p->step->write_count);
    for (int i = 0, edges = 0; i < p->r.inputs; i++) {
        ml_ref source = ml_graph_source(g, p->step->node, i);
        if (p->sources + edges == p->step->read_count) break;
        if (template_value(p->schedule, p->step, i)->node == source) continue;
        if (elements_of_forward(p, source)) continue;
        ml_recurrence of;
        ml_recurrence_read(g, ml_graph_source(g, source, 0), &of);
        p->shift[i] = of.reverse ? 1 : -1;
        p->edge[i] = p->sources + edges++;
    }
}

bool elements_is_input(const recurrence_elements *p, int i) {
    int again = p->of.length ? i - p->step->scan->forward_at : -1;
    return i < p->r.inputs || (again >= 0 && again < p->of.inputs);
}

/* Whether the rows of a block are side by side in input i, at whole copies. */
bool elements_is_ringed(const recurrence_elements *p, int i) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    int last = p->space.rank - 1;
    return elements_is_input(p, i) && last >= 0 &&
           recurrence_copies(v, p->r.axis, &p->space, p->space.axis[last]);
}

static void declare_ringed(recurrence_elements *p, int i) {
    ml_arena *arena = p->text.arena;
    const ml_value *v = template_value(p->schedule, p->step, i);
    const char *type = emit_memory_type(elements_dtype_of(p, i));
    int bytes = ml_dtypes[v->type.dtype].bytes, copies = p->width * bytes / RECURRENCE_COPY;
    ml_text_add(&p->first, "const char *from%d = (const char *)((const %s *)P[%d] + %s);\n", i,
                type, i, row_offset(p, i, p->lanes ? "(row - lane * LANES)" : "(row - lane)"));
    ml_text_add(&p->copy,
                "for (int c = threadIdx.x; c < POSITIONS * %d; c += THREADS) {\n"
                "const long long t = POSITION(c / %d) + %d;\n"
                "if (t >= 0 && t < LENGTH) copy_async(to + %d + c * 16, from%d + t * %lldLL + c %% "
                "%d * 16, 16);\n}\n",
                copies, copies, p->shift[i], p->stage_bytes, i,
                (long long)(recurrence_stride(v, p->r.axis) * bytes), copies);
    int at = p->stage_bytes;
    p->stage_bytes += p->positions * p->width * bytes;
    if (p->form == FORM_PACKED) {
        ml_text_add(&p->load,
                    "load_lanes(in%d[k], (const %s *)(slot + %d) + u * WIDTH + lane * LANES);\n", i,
                    type, at);
        const char *value = ml_arena_format(arena, "in%d[k][l]", i);
        if (p->shift[i]) ml_text_add(&p->load, "EACH_LANE %s = %s;\n", value, at_edge(p, i, value));
        return;
    }
    const char *slice =
        ml_arena_format(arena, "((const %s *)(slot + %d))[u * WIDTH + lane]", type, at);
    const char *value = template_load(arena, elements_dtype_of(p, i), slice);
    ml_text_add(&p->work, "const %s in%d = %s;\n", emit_compute_type(elements_dtype_of(p, i)), i,
                at_edge(p, i, value));
    p->values[i] = ml_arena_format(arena, "in%d", i);
}

static void declare_input(recurrence_elements *p, int i) {
    ml_arena *arena = p->text.arena;
    const char *type = emit_compute_type(elements_dtype_of(p, i));
    if (p->form == FORM_PACKED) {
        ml_text_add(&p->declare, "%s in%d[SPAN][LANES];\n", type, i);
        p->values[i] = ml_arena_format(arena, "in%d[k][l]", i);
    }
    if (p->form >= FORM_RING && elements_is_ringed(p, i)) {
        declare_ringed(p, i);
        return;
    }
    declare_pointer(p, i, false);
    if (p->form == FORM_PACKED) {
        ml_text_add(&p->load, "EACH_LANE %s = %s;\n", p->values[i], loaded(p, i));
        return;
    }
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

/* States before the first position, captured values. */
static void declare_captured(recurrence_elements *p, int i) {
    const char *name = ml_arena_format(p->text.arena, "kept%d", i);
    declare_pointer(p, i, false);
    declare_kept(p, name, elements_dtype_of(p, i), loaded(p, i));
    p->values[i] = ml_arena_format(p->text.arena, "%s%s", name, p->lane);
}

void elements_declare_sources(recurrence_elements *p) {
    int reads = p->of.length ? p->step->scan->forward_at : p->step->read_count;
    for (int i = 0; i < reads; i++) {
        if (i < p->r.inputs) {
            if (!p->values[i]) declare_input(p, i);
            continue;
        }
        declare_captured(p, i);
    }
}

/* ---- Results ---- */

static void store(const recurrence_elements *p, ml_text *out, int i, const char *value) {
    ml_text_add(out, "%s = %s(%s);\n", element(p, i), ml_dtypes[elements_dtype_of(p, i)].store,
                value);
}

/* Of a position: rows of a thread side by side, at once where they may be. */
static void store_stacked(recurrence_elements *p, int i, const char *value) {
    const ml_value *v = template_value(p->schedule, p->step, i);
    const int last = p->space.rank - 1;
    const bool packs = elements_dtype_of(p, i) == ML_BF16 || elements_dtype_of(p, i) == ML_F32;
    if (p->form != FORM_PACKED || !packs ||
        !recurrence_copies(v, p->r.axis, &p->space, p->space.axis[last])) {
        store(p, &p->work, i, value);
        return;
    }
    ml_text_add(&p->declare, "float out%d[LANES];\n", i);
    ml_text_add(&p->work, "out%d[l] = %s;\n", i, value);
    ml_text_add(&p->store, "store_lanes(x%d + t * %lldLL, out%d);\n", i,
                (long long)recurrence_stride(v, p->r.axis), i);
}

/* What the step gives at a position, and what is left after the last. */
static void write_outputs(recurrence_elements *p, const char *const *results) {
    ml_arena *arena = p->text.arena;
    const ml_recurrence *r = &p->r;
    int outputs = p->step->write_count - (p->step->scan ? p->step->scan->checkpoints : 0);
    for (int i = p->step->read_count; i < p->step->read_count + outputs; i++) {
        int output = recurrence_output(p->schedule, p->step, i);
        int final = output - ml_recurrence_final(r), history = output - ml_recurrence_history(r);
        declare_pointer(p, i, true);
        if (history >= 0)
            store_stacked(p, i, p->values[r->inputs + history]);
        else if (final >= 0)
            store(p, &p->last, i, p->values[r->inputs + final]);
        else if (output < r->stacked)
            store_stacked(p, i, results[r->states + output]);
        else {
            const char *sum = ml_arena_format(arena, "sum%d", i);
            declare_kept(p, sum, elements_dtype_of(p, i), "0");
            ml_text_add(&p->work, "%s%s += %s;\n", sum, p->lane, results[r->states + output]);
            const char *each = p->form == FORM_PACKED ? "EACH_LANE " : "";
            ml_text_add(&p->total, "%s%s%s = sum_parts(%s%s, (%s *)shared);\n", each, sum, p->lane,
                        sum, p->lane, emit_compute_type(elements_dtype_of(p, i)));
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
static void write_checkpoints(recurrence_elements *p) {
    const ml_scan_step *scan = p->step->scan;
    if (!scan || !scan->checkpoints) return;
    const bool packed = p->form == FORM_PACKED;
    ml_text *out = packed ? &p->save : &p->work;
    const int stage = packed ? p->span : p->positions;
    ml_text_add(out,
                "if (first + u == 0 || ((LENGTH - %s) %% %d == 0 && (LENGTH - first - u) %% %d == "
                "0)) {\nconst long long chunk = (LENGTH - first - u - 1) / %d;\n",
                packed ? "k" : "u", greatest_divisor(stage, scan->every), scan->every, scan->every);
    for (int j = 0; j < scan->checkpoints; j++) {
        int i = p->step->read_count + p->step->write_count - scan->checkpoints + j;
        const char *type = emit_memory_type(elements_dtype_of(p, i));
        const long long rows = (long long)ml_type_elements(&p->space);
        if (packed)
            ml_text_add(out, "store_lanes((%s *)P[%d] + chunk * %lldLL + row, kept%d);\n", type, i,
                        rows, p->r.inputs + j);
        else
            ml_text_add(out, "((%s *)P[%d])[chunk * %lldLL + row] = %s(%s);\n", type, i, rows,
                        ml_dtypes[elements_dtype_of(p, i)].store, p->values[p->r.inputs + j]);
    }
    ml_text_add(out, "}\n");
}

static const char *no_index(void *context, ml_axis axis) {
    (void)context, (void)axis;
    ml_raise(ML_INTERNAL, "a recurrence by elements counts along an axis");
}

/* States keep the digits of their dtype from position to position, as memory would. */
static void next_states(recurrence_elements *p, const char *const *results) {
    for (int i = 0; i < p->r.states; i++) {
        int source = p->r.inputs + i;
        bool narrow = elements_dtype_of(p, source) == ML_BF16;
        ml_text_add(&p->work, narrow ? "%s = ml_round_bf16(%s);\n" : "%s = %s;\n",
                    p->values[source], results[i]);
    }
}

/* ---- Values that do not depend on states ---- */

static const char *fixed_text(void *context, ml_ref n) {
    const recurrence_elements *p = context;
    for (uint32_t i = 0; i < p->fixed.count; i++)
        if (p->fixed.at[i].node == n) return p->fixed.at[i].name;
    return NULL;
}

static ml_function function_of(recurrence_elements *p, const char *const *values) {
    return (ml_function){.g = p->schedule->graph,
                         .values = values,
                         .index_of = no_index,
                         .special = fixed_text,
                         .context = p};
}

static void fix(recurrence_elements *p, ml_text *out, const char *const *values, ml_ref n) {
    ml_arena *arena = p->text.arena;
    const ml_graph *g = p->schedule->graph;
    const ml_function f = function_of(p, values);
    ml_text text = {.arena = arena};
    n = ml_function_strip(&f, n);
    const ml_op op = (ml_op)ml_graph_node(g, n)->op;
    if (!ml_op_is_function(op) || op == ML_OP_CAST || fixed_text(p, n)) return;
    const char *name = ml_emit_function(&text, &f, n, "e");
    for (uint32_t i = 0; i < p->fixed.count; i++) {
        if (strcmp(p->fixed.at[i].made, text.text) != 0) continue;
        *ML_PUSH(arena, &p->fixed) = (fixed_value){n, text.text, p->fixed.at[i].name};
        return;
    }
    const uint32_t k = p->fixed.count;
    ml_text_add(&p->declare, "%s fixed%u[SPAN][LANES];\n",
                emit_compute_type((ml_dtype)ml_graph_type(g, n)->dtype), k);
    ml_text_add(out, "{\n%sfixed%u[k][l] = %s;\n}\n", text.text, k, name);
    *ML_PUSH(arena, &p->fixed) =
        (fixed_value){n, text.text, ml_arena_format(arena, "fixed%u[k][l]", k)};
}

/* Of what the next states are computed of, all that does not depend on states. */
void elements_fix_inputs(recurrence_elements *p, ml_text *out, ml_ref n, const ml_recurrence *r,
                         const char *const *values) {
    const ml_graph *g = p->schedule->graph;
    for (int i = 0; i < r->states; i++) {
        ml_refs body = {0};
        graph_reach(g, ml_recurrence_root(g, n, i), p->text.arena, &body);
        bool *depends = ML_NEW_ARRAY(p->text.arena, bool, ml_graph_count(g));
        for (uint32_t k = 0; k < body.count; k++) {
            const ml_node *node = ml_graph_node(g, body.at[k]);
            const int64_t parameter =
                node->op == ML_OP_PARAM ? ml_graph_args(g, body.at[k])[0] - r->inputs : -1;
            bool *own = &depends[body.at[k]];
            *own = parameter >= 0 && parameter < r->states;
            for (int j = 0; j < node->source_count; j++)
                *own |= depends[ml_graph_source(g, body.at[k], j)];
            for (int j = 0; *own && j < node->source_count; j++)
                if (!depends[ml_graph_source(g, body.at[k], j)])
                    fix(p, out, values, ml_graph_source(g, body.at[k], j));
        }
    }
}

/* What a warp's, or a thread's, positions do to the states, as slopes and offsets. */
void elements_print_compose(recurrence_elements *p) {
    const ml_graph *g = p->schedule->graph;
    ml_arena *arena = p->text.arena;
    int states = p->r.states, count = states + (int)p->factors.count, factor = states;
    const char **values = ML_NEW_ARRAY(arena, const char *, p->step->read_count + 1);
    const char **names = ML_NEW_ARRAY(arena, const char *, count + 1);
    ml_ref *roots = ML_NEW_ARRAY(arena, ml_ref, count + 1);
    memcpy(values, p->values, sizeof *values * (size_t)p->step->read_count);
    for (int i = 0; i < states; i++) {
        const char *state = p->values[p->r.inputs + i];
        values[p->r.inputs + i] = ml_arena_format(arena, "offset[%d]%s", i, p->lane);
        roots[i] = ml_recurrence_root(g, p->step->node, i);
        ml_text_add(&p->begin, "carry[%d]%s = %s;\n", i, p->lane, state);
        ml_text_add(&p->gather, "%s = before[%d]%s;\n", state, i, p->lane);
        ml_text_add(&p->last, "%s = carry[%d]%s;\n", state, i, p->lane);
    }
    for (int i = states; i < count; i++) roots[i] = p->factors.at[i - states];
    ml_text_add(&p->compose, "%s", p->work.text ? p->work.text : "");
    const ml_function f = function_of(p, values);
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
                    "offset[%d]%s = after%d;\nslope[%d]%s = joined_slope(%d, by%d, slope[%d]%s);\n",
                    i, p->lane, i, i, p->lane, (int)(p->max_plus >> i & 1), i, i, p->lane);
}

/* ---- States that are computed again ---- */

/* The states before the last position of each warp's, which are checkpoints, by the ring; those
 * before the others are kept as `past<j>` of positions. */
void elements_declare_again(recurrence_elements *p, int j) {
    ml_arena *arena = p->text.arena;
    const ml_graph *g = p->schedule->graph;
    const int at = p->step->scan->forward_at, states = at + p->of.inputs;
    const int i = states + p->of.states + p->of.captured + j,
              bytes = ml_dtypes[elements_dtype_of(p, i)].bytes;
    const int copies = p->width * bytes / RECURRENCE_COPY;
    const char *type = emit_memory_type(elements_dtype_of(p, i));
    ml_text_add(&p->first, "const char *from%d = P[%d] + (row - lane * LANES) * %d;\n", i, i,
                bytes);
    ml_text_add(
        &p->copy,
        "for (int c = threadIdx.x; c < WARPS * %d; c += THREADS) {\n"
        "const long long chunk = first / SPAN + c / %d;\n"
        "if (chunk * SPAN < LENGTH) copy_async(to + %d + c * 16, from%d + chunk * %lldLL + c %% "
        "%d * 16, 16);\n}\n",
        copies, copies, p->stage_bytes, i, (long long)(elements_rows_of(p) * bytes), copies);
    ml_text_add(&p->restart,
                "float again%d[LANES], past%d[SPAN][LANES];\n"
                "load_lanes(again%d, (const %s *)(slot + %d) + warp * WIDTH + lane * LANES);\n",
                j, j, j, type, p->stage_bytes);
    ml_text_add(&p->replay, "past%d[k][l] = again%d[l];\n", j, j);
    p->stage_bytes += p->warps * p->width * bytes;
    p->values[states + j] = ml_arena_format(arena, "again%d[l]", j);
    for (int k = 0; k < p->r.inputs; k++) {
        const ml_ref source = ml_graph_source(g, p->step->node, k);
        if (elements_of_forward(p, source) &&
            (int)ml_graph_args(g, source)[0] == ml_recurrence_history(&p->of) + j)
            p->values[k] = ml_arena_format(arena, "past%d[k][l]", j);
    }
}

/* Operands of the recurrence that is computed again, which may be read for the step anyway. */
void elements_declare_again_sources(recurrence_elements *p) {
    const int at = p->step->scan->forward_at, captured = p->of.inputs + p->of.states;
    for (int i = at; i < at + captured + p->of.captured; i++) {
        for (int k = 0; k < at && !p->values[i]; k++)
            if (p->step->values[k] == p->step->values[i] &&
                (k < p->r.inputs) == (i < at + p->of.inputs) && !p->shift[k])
                p->values[i] = p->values[k];
        if (p->values[i]) continue;
        if (i < at + p->of.inputs)
            declare_input(p, i);
        else
            declare_captured(p, i);
    }
}

void elements_print_replay(recurrence_elements *p) {
    const ml_graph *g = p->schedule->graph;
    ml_ref *roots = ML_NEW_ARRAY(p->text.arena, ml_ref, p->of.states + 1);
    const char **next = ML_NEW_ARRAY(p->text.arena, const char *, p->of.states + 1);
    const char *const *values = p->values + p->step->scan->forward_at;
    elements_fix_inputs(p, &p->ready, p->step->scan->forward, &p->of, values);
    const ml_function f = function_of(p, values);
    for (int j = 0; j < p->of.states; j++)
        roots[j] = ml_recurrence_root(g, p->step->scan->forward, j);
    ml_emit_functions(&p->replay, &f, roots, p->of.states, "f", next);
    for (int j = 0; j < p->of.states; j++)
        ml_text_add(&p->replay, "const float follows%d = %s;\n", j, next[j]);
    for (int j = 0; j < p->of.states; j++)
        ml_text_add(&p->replay,
                    elements_dtype_of(p, p->step->scan->forward_at + p->of.inputs + j) == ML_BF16
                        ? "again%d[l] = ml_round_bf16(follows%d);\n"
                        : "again%d[l] = follows%d;\n",
                    j, j);
}

void elements_print_step(recurrence_elements *p) {
    const ml_graph *g = p->schedule->graph;
    int count = ml_recurrence_roots(&p->r);
    ml_ref *roots = ML_NEW_ARRAY(p->text.arena, ml_ref, count + 1);
    const char **results = ML_NEW_ARRAY(p->text.arena, const char *, count + 1);
    for (int i = 0; i < count; i++) roots[i] = ml_recurrence_root(g, p->step->node, i);
    const ml_function f = function_of(p, p->values);
    write_checkpoints(p);
    ml_emit_functions(&p->work, &f, roots, count, "v", results);
    write_outputs(p, results);
    /* a next value may be a state: all are read before the first is written */
    for (int i = 0; i < p->r.states; i++) {
        const char *name = ml_arena_format(p->text.arena, "next%d", i);
        const char *type = emit_compute_type(elements_dtype_of(p, p->r.inputs + i));
        ml_text_add(&p->work, "const %s %s = %s;\n", type, name, results[i]);
        results[i] = name;
    }
    next_states(p, results);
}
