/* Kernels of loops for the system C compiler: the schedule, and the source.
 *
 * Elementwise kernels walk a range of the linear element space in segments of the innermost loop;
 * row kernels walk a range of rows. Where there are partial reductions a unit is a chunk of that
 * range, else a unit is one row or ELEMENT_BLOCK elements. Reductions run over LANES independent
 * accumulators that are added in pairs at the end: it vectorizes, the order does not depend on the
 * machine, and rounding errors grow with columns / LANES. Sums over more than LONG_ROW columns or
 * LONG_LANE columns a lane, and over everything, accumulate in double; of columns over more than
 * LONG_CHUNK rows, in blocks of rows. */
#include "codegen/emit/emit_internal.h"

#include <string.h>

enum {
    ELEMENT_BLOCK = 1024,
    LANES = 64,
    LONG_ROW = 4096,
    LONG_LANE = 256,
    LONG_CHUNK = 512,
    STACK_BYTES = 128 << 10, /* of saved rows; longer ones are in static memory of the thread */
    BUFFER_BYTES = 16 << 20, /* beyond this a value is computed again */
    WAKE_COST = 1 << 17,     /* operations that are worth waking a thread for */
};

typedef struct c_schedule {
    emitter *e;
    bool elementwise, chunked;
    int lanes;
    int outer;           /* loops that are counted outside of the passes: 0 .. outer-1 */
    const char *counter; /* type of the innermost loop's variable */
    bool whole;          /* every segment is a multiple of `lanes` long */
    int64_t block;       /* rows of a chunk whose columns are summed apart; 0: all */
    int *buffers;        /* values that survive their pass, in the order of their buffers */
    int buffer_count;
} c_schedule;

/* A COLUMN reduction without columns is one of everything. */
static bool is_column(const c_schedule *p, const ml_inst *inst) {
    return ml_inst_reduces_partly(inst) && inst->scope == ML_SCOPE_COLUMN && !p->elementwise;
}

/* One accumulator for the whole row: an ALL reduction of values that do not change by column. */
static bool is_row_partial(const c_schedule *p, int i) {
    return ml_inst_reduces_partly(&p->e->ir->inst[i]) && !p->elementwise &&
           p->e->loop[i] < p->e->ir->row_loops;
}

static bool is_f32_sum(const ml_inst *inst) {
    return inst->kind == ML_INST_REDUCE && inst->op == ML_OP_SUM &&
           strcmp(ml_suffix(inst->dtype), "f32") == 0;
}

static bool is_wide(const c_schedule *p, const ml_inst *inst) {
    return is_f32_sum(inst) && (inst->scope != ML_SCOPE_ROW || p->e->columns > LONG_ROW ||
                                p->e->columns > (int64_t)LONG_LANE * p->lanes);
}

/* A sum of columns over so many rows that it is one of sums over blocks of rows. */
static bool is_blocked(const c_schedule *p, const ml_inst *inst) {
    return p->block > 0 && is_f32_sum(inst) && is_column(p, inst);
}

static ml_dtype accumulator_dtype(const c_schedule *p, int i) {
    const ml_inst *inst = &p->e->ir->inst[i];
    if (inst->op == ML_OP_ARGMAX) return (ml_dtype)p->e->ir->inst[inst->src[0]].dtype;
    return is_wide(p, inst) ? ML_F64 : (ml_dtype)inst->dtype;
}

static const char *index_type(const c_schedule *p) {
    return p->e->columns > INT32_MAX ? "long long" : "int";
}

/* "i1 * 64 + i2": the position among all columns. */
static const char *column_text(const c_schedule *p) {
    emitter *e = p->e;
    ml_text text = {.arena = e->arena};
    int64_t inner = e->columns;
    ml_text_add(&text, "0");
    for (int loop = e->ir->row_loops; loop <= e->inner; loop++) {
        inner /= e->ir->size[loop];
        if (e->ir->size[loop] == 1) continue;
        ml_text_add(&text, inner == 1 ? " + %s" : " + %s * %lld", e->index[loop], (long long)inner);
    }
    return text.length > 4 ? text.text + 4 : text.text;
}

static const char *access_text(const c_schedule *p, const ml_inst *inst) {
    emitter *e = p->e;
    ml_text text = {.arena = e->arena};
    ml_text_add(&text, "r%d[", inst->operand);
    size_t start = text.length;
    emit_offset(e, &text, &e->ir->operand[inst->operand], p->outer, e->inner, -1);
    if (inst->index != ML_NO_INST) ml_text_add(&text, " + %s", emit_name(e, inst->index));
    if (text.length == start) ml_text_add(&text, "0");
    ml_text_add(&text, "]");
    return text.text;
}

static void print_load(const c_schedule *p, int i) {
    emitter *e = p->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_dtype memory = (ml_dtype)e->ir->operand[inst->operand].dtype;
    const char *type = emit_compute_type((ml_dtype)inst->dtype);
    const char *place = access_text(p, inst);
    ml_text_add(&e->text, "const %s v%d = ", type, i);
    if (inst->guard != ML_NO_INST) ml_text_add(&e->text, "%s ? ", emit_name(e, inst->guard));
    if (ml_is_narrow(memory))
        ml_text_add(&e->text, "%s(%s)", ml_dtypes[memory].load, place);
    else
        ml_text_add(&e->text, "(%s)%s", type, place);
    ml_text_add(&e->text, inst->guard != ML_NO_INST ? " : 0;\n" : ";\n");
}

static void print_store(const c_schedule *p, const ml_inst *inst) {
    emitter *e = p->e;
    ml_dtype memory = (ml_dtype)e->ir->operand[inst->operand].dtype;
    const char *value = emit_name(e, inst->src[0]);
    if (inst->guard != ML_NO_INST) ml_text_add(&e->text, "if (%s) ", emit_name(e, inst->guard));
    ml_text_add(&e->text, "%s = ", access_text(p, inst));
    if (ml_is_narrow(memory))
        ml_text_add(&e->text, "%s((%s)%s);\n", ml_dtypes[memory].store, emit_compute_type(memory),
                    value);
    else
        ml_text_add(&e->text, "(%s)%s;\n", emit_memory_type(memory), value);
}

/* Combine accumulator `to` with value v; ARGMAX stores the column beside it. */
static void print_combine(const c_schedule *p, int i, const char *to, const char *column) {
    emitter *e = p->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *value = emit_name(e, inst->src[0]);
    const char *suffix = ml_suffix(accumulator_dtype(p, i));
    const char *lane = p->lanes > 1 ? "l" : "0";
    if (inst->op == ML_OP_SUM)
        ml_text_add(&e->text, "%s += %s;\n", to, value);
    else if (inst->op == ML_OP_ARGMAX)
        ml_text_add(&e->text,
                    "{ const int better = j%d[%s] < 0 | %s > %s | (%s != %s & %s == %s);\n"
                    "%s = better ? %s : %s; j%d[%s] = better ? (%s)(%s) : j%d[%s]; }\n",
                    i, lane, value, to, value, value, to, to, to, value, to, i, lane, index_type(p),
                    column, i, lane);
    else
        ml_text_add(&e->text, "%s = ml_%s_%s(%s, %s);\n", to, inst->op == ML_OP_MAX ? "max" : "min",
                    suffix, to, value);
}

static void print_reduce(const c_schedule *p, int i) {
    emitter *e = p->e;
    const ml_inst *inst = &e->ir->inst[i];
    bool one = is_row_partial(p, i) || p->lanes == 1;
    const char *to = ml_arena_format(e->arena, one ? "a%d[0]" : "a%d[l]", i);
    if (is_column(p, inst))
        to = ml_arena_format(e->arena, "%s%d[%s]", is_blocked(p, inst) ? "d" : "c", i,
                             column_text(p));
    print_combine(p, i, to, column_text(p));
}

static bool is_carried(const emitter *e, int i, int phase) {
    return e->buffered[i] && e->phase[i] < phase;
}

/* The innermost index as i32 counts in 32 bits: converting 64-bit vectors would cost more. */
static bool is_narrow_index(const c_schedule *p, const ml_inst *inst) {
    const ml_inst *from = &p->e->ir->inst[inst->src[0]];
    return inst->kind == ML_INST_MAP && inst->op == ML_OP_CAST && inst->dtype == ML_I32 &&
           from->kind == ML_INST_INDEX && from->operand == p->e->inner &&
           strcmp(p->counter, "int") == 0 && strcmp(p->e->index[p->e->inner], "0LL") != 0;
}

static void print_instruction(const c_schedule *p, int i, int phase) {
    emitter *e = p->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (is_carried(e, i, phase)) {
        ml_text_add(&e->text, "const %s v%d = k%d[%s];\n", emit_compute_type((ml_dtype)inst->dtype),
                    i, i, column_text(p));
        return;
    }
    switch ((ml_inst_kind)inst->kind) {
    case ML_INST_LOAD: print_load(p, i); break;
    case ML_INST_STORE: print_store(p, inst); break;
    case ML_INST_REDUCE: print_reduce(p, i); break;
    default:
        if (is_narrow_index(p, inst))
            ml_text_add(&e->text, "const int v%d = (int)b + l;\n", i);
        else
            emit_value(e, &e->text, i);
    }
    if (e->buffered[i]) ml_text_add(&e->text, "k%d[%s] = v%d;\n", i, column_text(p), i);
}

/* Instructions of a phase that belong right inside loop `place`; outer: all further out too. */
static void print_loop(const c_schedule *p, int phase, int place, bool outer) {
    emitter *e = p->e;
    for (int i = 0; i < e->ir->inst_count; i++)
        if (e->need[phase][i] && (outer ? e->loop[i] <= place : e->loop[i] == place))
            print_instruction(p, i, phase);
}

static bool has_lanes(const c_schedule *p, int phase) {
    emitter *e = p->e;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (inst->kind == ML_INST_REDUCE && e->phase[i] == phase && !is_column(p, inst) &&
            !is_row_partial(p, i))
            return true;
    }
    return false;
}

/* GCC 12 unrolls a loop of up to 16 columns inside that of rows, and then computes wrongly on
 * processors with AVX where a load has a guard: the lanes of its masks are mixed up. */
static bool must_stay_rolled(const c_schedule *p, int phase) {
    emitter *e = p->e;
    if (e->ir->size[e->inner] > 16) return false;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (e->need[phase][i] && inst->kind == ML_INST_LOAD && inst->guard != ML_NO_INST)
            return true;
    }
    return false;
}

static void print_vector_loop(const c_schedule *p, int phase, const char *low, const char *high) {
    emitter *e = p->e;
    int n = e->inner;
    if (has_lanes(p, phase) && p->lanes > 1) {
        ml_text_add(&e->text, "for (long long b = %s; b < %s; b += %d) {\n", low, high, p->lanes);
        if (p->whole)
            ml_text_add(&e->text, "enum { m = %d };\n", p->lanes);
        else
            ml_text_add(&e->text, "const int m = %s - b < %d ? (int)(%s - b) : %d;\n", high,
                        p->lanes, high, p->lanes);
    } else {
        ml_text_add(&e->text, "{\nconst long long b = %s;\nconst %s m = (%s)(%s - b);\n", low,
                    p->counter, p->counter, high);
    }
    if (must_stay_rolled(p, phase)) ml_text_add(&e->text, "#pragma GCC unroll 1\n");
    ml_text_add(&e->text,
                "#pragma GCC ivdep\nfor (%s l = 0; l < m; l++) {\nconst long long i%d = b + l;\n",
                p->counter, n);
    print_loop(p, phase, n, false);
    ml_text_add(&e->text, "}\n}\n");
}

static void print_accumulator(const c_schedule *p, int i) {
    emitter *e = p->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_dtype dtype = accumulator_dtype(p, i);
    int lanes = is_row_partial(p, i) ? 1 : p->lanes;
    ml_text identity = {.arena = e->arena};
    emit_identity(&identity, inst->op == ML_OP_ARGMAX ? ML_OP_MAX : (ml_op)inst->op, dtype);
    ml_text_add(&e->text,
                "%s a%d[%d] __attribute__((aligned(64)));\nfor (int l = 0; l < %d; l++) a%d[l] = "
                "%s;\n",
                emit_compute_type(dtype), i, lanes, lanes, i, identity.text);
    if (inst->op == ML_OP_ARGMAX)
        ml_text_add(&e->text, "%s j%d[%d];\nfor (int l = 0; l < %d; l++) j%d[l] = -1;\n",
                    index_type(p), i, lanes, lanes, i);
}

/* The result of the lanes, as an expression. */
static const char *fold_text(const c_schedule *p, int i) {
    emitter *e = p->e;
    const ml_inst *inst = &e->ir->inst[i];
    int lanes = is_row_partial(p, i) ? 1 : p->lanes;
    const char *name = inst->op == ML_OP_SUM ? "sum" : inst->op == ML_OP_MAX ? "max" : "min";
    return ml_arena_format(e->arena, "(%s)ml_fold_%s_%s(a%d, %d)",
                           emit_compute_type((ml_dtype)inst->dtype), name,
                           ml_suffix(accumulator_dtype(p, i)), i, lanes);
}

static void print_row_result(const c_schedule *p, int i) {
    emitter *e = p->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (inst->op != ML_OP_ARGMAX) {
        ml_text_add(&e->text, "const %s v%d = %s;\n", emit_compute_type((ml_dtype)inst->dtype), i,
                    fold_text(p, i));
        return;
    }
    ml_text_add(&e->text,
                "%s v%d = %s;\nfor (int l = 1; l < %d; l++)\nif (j%d[l] >= 0 && (j%d[0] < 0 || "
                "ml_before_%s(a%d[l], j%d[l], a%d[0], j%d[0]))) { a%d[0] = a%d[l]; j%d[0] = "
                "j%d[l]; }\nv%d = j%d[0];\n",
                emit_compute_type((ml_dtype)inst->dtype), i, "0", p->lanes, i, i,
                ml_suffix(accumulator_dtype(p, i)), i, i, i, i, i, i, i, i, i, i);
}

/* One pass over the columns of a row. */
static void print_pass(const c_schedule *p, int phase) {
    emitter *e = p->e;
    const ml_kernel_ir *ir = e->ir;
    if (!e->passes[phase]) return;
    for (int i = 0; i < ir->inst_count; i++)
        if (ml_inst_reduces_row(&ir->inst[i]) && e->phase[i] == phase) print_accumulator(p, i);
    ml_text_add(&e->text, "{\n");
    for (int loop = ir->row_loops; loop < e->inner; loop++) {
        if (ir->size[loop] > 1)
            ml_text_add(&e->text, "for (long long i%d = 0; i%d < %lld; i%d++) {\n", loop, loop,
                        (long long)ir->size[loop], loop);
        else
            ml_text_add(&e->text, "{\n");
        print_loop(p, phase, loop, false);
    }
    print_vector_loop(p, phase, "0",
                      ml_arena_format(e->arena, "%lld", (long long)ir->size[e->inner]));
    for (int loop = ir->row_loops; loop < e->inner; loop++) ml_text_add(&e->text, "}\n");
    ml_text_add(&e->text, "}\n");
    for (int i = 0; i < ir->inst_count; i++)
        if (ml_inst_reduces_row(&ir->inst[i]) && e->phase[i] == phase) print_row_result(p, i);
}

static void print_row_pointers(const c_schedule *p) {
    emitter *e = p->e;
    bool used[ML_MAX_OPERANDS] = {false};
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (inst->kind == ML_INST_LOAD || inst->kind == ML_INST_STORE) used[inst->operand] = true;
    }
    for (int k = 0; k < e->ir->operand_count; k++) {
        if (!used[k]) continue;
        ml_text_add(&e->text, "%s *const r%d = o%d",
                    emit_memory_type((ml_dtype)e->ir->operand[k].dtype), k, k);
        emit_offset(e, &e->text, &e->ir->operand[k], 0, p->outer - 1, -1);
        ml_text_add(&e->text, ";\n");
    }
}

/* Set the outer loops' indices from linear position `at`. */
static void print_unravel(const c_schedule *p, const char *at) {
    emitter *e = p->e;
    ml_text_add(&e->text, "long long rest = %s;\n", at);
    for (int loop = p->outer - 1; loop >= 0; loop--) {
        if (strcmp(e->index[loop], "0LL") == 0) continue;
        if (loop == 0)
            ml_text_add(&e->text, "long long i0 = rest;\n");
        else
            ml_text_add(&e->text, "long long i%d = rest %% %lld; rest /= %lld;\n", loop,
                        (long long)e->ir->size[loop], (long long)e->ir->size[loop]);
    }
}

/* Advance the outer loops' indices by one. */
static void print_advance(const c_schedule *p) {
    emitter *e = p->e;
    int open = 0;
    for (int loop = p->outer - 1; loop >= 0; loop--) {
        if (strcmp(e->index[loop], "0LL") == 0) continue;
        if (loop == 0) {
            ml_text_add(&e->text, "i0++;\n");
            break;
        }
        ml_text_add(&e->text, "if (++i%d == %lld) {\ni%d = 0;\n", loop,
                    (long long)e->ir->size[loop], loop);
        open++;
    }
    while (open-- > 0) ml_text_add(&e->text, "}\n");
}

static void print_segments(const c_schedule *p) {
    emitter *e = p->e;
    const char *size = ml_arena_format(e->arena, "%lld", (long long)e->ir->size[e->inner]);
    if (p->outer == 0) {
        print_row_pointers(p);
        print_loop(p, 0, e->inner - 1, true);
        print_vector_loop(p, 0, "at", "stop");
        return;
    }
    ml_text_add(&e->text, "long long low = at %% %s;\n", size);
    print_unravel(p, ml_arena_format(e->arena, "at / %s", size));
    ml_text_add(&e->text,
                "while (at < stop) {\nconst long long high = %s - low < stop - at ? %s : low + "
                "(stop - at);\n",
                size, size);
    print_row_pointers(p);
    print_loop(p, 0, e->inner - 1, true);
    print_vector_loop(p, 0, "low", "high");
    ml_text_add(&e->text, "at += high - low; low = 0;\n");
    print_advance(p);
    ml_text_add(&e->text, "}\n");
}

/* The sums of a block of rows join those of their chunk. */
static void print_block_end(const c_schedule *p) {
    emitter *e = p->e;
    if (p->block == 0) return;
    ml_text_add(&e->text, "if (++rows == %lld || at + 1 == stop) {\nrows = 0;\n",
                (long long)p->block);
    for (int i = 0; i < e->ir->inst_count; i++)
        if (is_blocked(p, &e->ir->inst[i]))
            ml_text_add(
                &e->text,
                "for (long long c = 0; c < %lld; c++) { c%d[c] += d%d[c]; d%d[c] = 0.0f; }\n",
                (long long)e->columns, i, i, i);
    ml_text_add(&e->text, "}\n");
}

static void print_rows(const c_schedule *p) {
    emitter *e = p->e;
    print_unravel(p, "at");
    ml_text_add(&e->text, "for (; at < stop; at++) {\n");
    print_row_pointers(p);
    for (int phase = 0; phase < e->phases; phase++) {
        print_loop(p, phase, e->ir->row_loops - 1, true);
        print_pass(p, phase);
    }
    print_block_end(p);
    print_advance(p);
    ml_text_add(&e->text, "}\n");
}

/* Around the chunk of one unit: accumulators before, partial results after. */
static void print_partials(const c_schedule *p, bool before) {
    emitter *e = p->e;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (!ml_inst_reduces_partly(inst)) continue;
        if (inst->op == ML_OP_ARGMAX) ml_raise(ML_INTERNAL, "argmax cannot be a partial reduction");
        const char *type = emit_memory_type((ml_dtype)e->ir->operand[inst->operand].dtype);
        if (is_column(p, inst) && before) {
            ml_text identity = {.arena = e->arena};
            emit_identity(&identity, (ml_op)inst->op, (ml_dtype)inst->dtype);
            ml_text_add(&e->text,
                        "%s *const c%d = o%d + unit * %lld;\nfor (long long c = 0; c < %lld; c++) "
                        "c%d[c] = %s;\n",
                        type, i, inst->operand, (long long)e->columns, (long long)e->columns, i,
                        identity.text);
            if (is_blocked(p, inst))
                ml_text_add(&e->text,
                            "%sfloat d%d[%lld] __attribute__((aligned(64)));\nfor (long long c = "
                            "0; c < %lld; c++) d%d[c] = 0.0f;\n",
                            e->columns * 4 > STACK_BYTES ? "static __thread " : "", i,
                            (long long)e->columns, (long long)e->columns, i);
        } else if (!is_column(p, inst) && before) {
            print_accumulator(p, i);
        } else if (!is_column(p, inst)) {
            ml_text_add(&e->text, "o%d[unit] = (%s)%s;\n", inst->operand, type, fold_text(p, i));
        }
    }
}

static int64_t row_bytes(const c_schedule *p, int i) {
    const ml_inst *inst = &p->e->ir->inst[i];
    return p->e->columns * (int64_t)(strcmp(ml_suffix(inst->dtype), "f32") ? 8 : 4);
}

/* Which values survive their pass: all that later passes need, up to BUFFER_BYTES a row. */
static void choose_buffers(c_schedule *p) {
    emitter *e = p->e;
    int64_t bytes = 0;
    p->buffers = ML_NEW_ARRAY(e->arena, int, e->ir->inst_count + 1);
    emit_needs(e);
    for (int phase = 1; phase < e->phases; phase++) {
        for (int i = 0; i < e->ir->inst_count; i++) {
            const ml_inst *inst = &e->ir->inst[i];
            bool costs = inst->kind == ML_INST_MAP && inst->saved;
            if (!e->need[phase][i] || e->phase[i] == phase || !costs) continue;
            if (e->buffered[i] || e->loop[i] != e->inner) continue;
            if (bytes + row_bytes(p, i) > BUFFER_BYTES) continue;
            bytes += row_bytes(p, i);
            e->buffered[i] = true;
            p->buffers[p->buffer_count++] = i;
        }
    }
    for (int phase = 0; phase < e->phases; phase++)
        memset(e->need[phase], 0, (size_t)e->ir->inst_count * sizeof(bool));
    emit_needs(e);
}

static void print_buffers(const c_schedule *p) {
    emitter *e = p->e;
    int64_t bytes = 0;
    for (int at = 0; at < p->buffer_count; at++) {
        int i = p->buffers[at];
        bytes += row_bytes(p, i);
        ml_text_add(&e->text, "%s%s k%d[%lld] __attribute__((aligned(64)));\n",
                    bytes > STACK_BYTES ? "static __thread " : "",
                    emit_compute_type((ml_dtype)e->ir->inst[i].dtype), i, (long long)e->columns);
    }
}

static int choose_lanes(int64_t size, bool unknown) {
    if (unknown || size >= LANES) return LANES;
    return size >= 16 ? 16 : 1;
}

/* Units, and how many of them are worth waking a thread. */
static void set_units(const c_schedule *p, ml_kernel *out) {
    const emitter *e = p->e;
    int64_t cost = 1;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (e->loop[i] < e->inner) continue;
        cost += inst->kind == ML_INST_MAP ? ml_ops[inst->op].flops : 1;
    }
    int64_t unit_cost = cost * (p->elementwise ? ELEMENT_BLOCK : e->columns);
    out->units = p->elementwise ? (e->rows + ELEMENT_BLOCK - 1) / ELEMENT_BLOCK : e->rows;
    if (p->chunked) {
        out->units = e->ir->chunks;
        unit_cost = cost * (e->rows / e->ir->chunks + 1) * e->columns;
    }
    out->grain = WAKE_COST / (unit_cost > 0 ? unit_cost : 1) + 1;
    out->scalar[0] = e->rows;
    out->scalar[1] = e->ir->chunks;
}

static void print_body(const c_schedule *p) {
    emitter *e = p->e;
    for (int k = 0; k < e->ir->operand_count; k++) {
        const char *type = emit_memory_type((ml_dtype)e->ir->operand[k].dtype);
        ml_text_add(&e->text, "%s *const o%d = (%s *)p[%d];\n", type, k, type, k);
    }
    print_buffers(p);
    if (p->chunked) {
        ml_text_add(&e->text,
                    "for (long long unit = begin; unit < end; unit++) {\nlong long at = unit * "
                    "s[0] / s[1];\nconst long long stop = (unit + 1) * s[0] / s[1];\n");
        print_partials(p, true);
        if (p->block > 0) ml_text_add(&e->text, "long long rows = 0;\n");
    } else if (p->elementwise) {
        ml_text_add(&e->text,
                    "long long at = begin * %d;\nconst long long stop = end * %d < s[0] ? end * "
                    "%d : s[0];\n",
                    ELEMENT_BLOCK, ELEMENT_BLOCK, ELEMENT_BLOCK);
    } else {
        ml_text_add(&e->text, "long long at = begin;\nconst long long stop = end;\n");
    }
    if (p->elementwise)
        print_segments(p);
    else
        print_rows(p);
    if (p->chunked) {
        print_partials(p, false);
        ml_text_add(&e->text, "}\n");
    }
    ml_text_add(&e->text, "}\n");
}

/* GCC 12 makes wrong code of max and min over integers that are casts of booleans, where it joins
 * straight lines into vectors: it takes the masks of comparisons, where true is -1, for 1. */
static bool joins_masks(const ml_kernel_ir *ir) {
    bool extreme = false, cast = false;
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        bool op = inst->op == ML_OP_MAX || inst->op == ML_OP_MIN || inst->op == ML_OP_MAXIMUM ||
                  inst->op == ML_OP_MINIMUM;
        bool works = inst->kind == ML_INST_MAP || inst->kind == ML_INST_REDUCE;
        extreme |= works && op && ml_dtypes[inst->dtype].kind != ML_KIND_FLOAT;
        cast |= works && inst->op == ML_OP_CAST && inst->from_dtype == ML_BOOL;
    }
    return extreme && cast;
}

/* Blocks of about as many rows as a chunk has blocks. */
static int64_t choose_block(const c_schedule *p) {
    const ml_kernel_ir *ir = p->e->ir;
    int64_t rows = p->chunked ? p->e->rows / ir->chunks : 0, block = LONG_CHUNK / 4;
    bool any = false;
    for (int i = 0; i < ir->inst_count; i++)
        any = any || (is_f32_sum(&ir->inst[i]) && is_column(p, &ir->inst[i]));
    if (!any || rows <= LONG_CHUNK) return 0;
    while (block * block < rows) block *= 2;
    return block;
}

void emit_c_choose(emitter *e, ml_kernel *out) {
    const ml_kernel_ir *ir = e->ir;
    c_schedule *p = ML_NEW(e->arena, c_schedule);
    p->e = e;
    p->elementwise = ir->row_loops == ir->loop_count;
    p->chunked = ir->chunks > 0;
    p->outer = p->elementwise ? ir->loop_count - 1 : ir->row_loops;
    p->lanes = choose_lanes(ir->size[e->inner], p->elementwise && p->outer == 0);
    bool far = (p->elementwise && p->outer == 0) || ir->size[e->inner] > INT32_MAX;
    p->counter = far ? "long long" : "int";
    p->whole = !p->elementwise && ir->size[e->inner] % p->lanes == 0;
    p->block = choose_block(p);
    choose_buffers(p);
    set_units(p, out);
    e->c = p;
}

void emit_c_print_schedule(const emitter *e, ml_text *out) {
    const c_schedule *p = e->c;
    ml_text_add(out, "    a unit is %s, innermost loop by %d lanes, counted as %s\n",
                p->chunked       ? "a chunk of rows"
                : p->elementwise ? "a range of elements"
                                 : "a row",
                p->lanes, p->counter);
    if (p->block > 0)
        ml_text_add(out, "    columns are summed by blocks of %lld rows\n", (long long)p->block);
    emit_print_marked(out, "row buffers hold", e->buffered, e->ir->inst_count);
}

const char *emit_c_print(emitter *e) {
    c_schedule p = *e->c;
    p.e = e;
    print_body(&p);
    return ml_arena_format(
        e->arena,
        "%svoid %s(char *const *p, const long long *s, long long begin, long long end)\n{\n%s",
        joins_masks(e->ir) ? "__attribute__((optimize(\"no-tree-slp-vectorize\"))) " : "", e->entry,
        e->text.text);
}
