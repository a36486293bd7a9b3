/* Kernels for CUDA: the text. emit_cuda_shape.c decides which thread does what. */
#include "codegen/emit/emit_cuda.h"

#include <string.h>

static void add_type(ml_text *out, const cuda_shape *s, int operand) {
    ml_text_add(out, "ml_pack<%s, %d>",
                emit_memory_type((ml_dtype)s->e->ir->operand[operand].dtype), s->vec);
}

void cuda_print_pack_load(const cuda_shape *s, int i, const char *to) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *type = emit_memory_type((ml_dtype)e->ir->operand[inst->operand].dtype);
    ml_text_add(&e->text, "%s = ", to);
    if (s->staged[i] && s->part == CUDA_REST) {
        ml_text_add(&e->text, "g%d[it - %d];\n", i, s->resident);
        return;
    }
    if (s->staged[i]) {
        if (s->resident < s->packs && s->part == CUDA_ALL)
            ml_text_add(&e->text, "it >= %d ? ml_load_pack<%s, %d>(%s) : ", s->resident, type,
                        s->vec, cuda_access_text(s, inst, true));
        ml_text_add(&e->text, "ml_load_pack<%s, %d>((const %s *)(%s));\n", type, s->vec, type,
                    cuda_staged_text(s, i, "slot"));
        return;
    }
    if (inst->guard != ML_NO_INST)
        ml_text_add(&e->text, "!%s ? ml_zero_pack<%s, %d>() : ", emit_name(e, inst->guard), type,
                    s->vec);
    ml_text_add(&e->text, "ml_load_pack<%s, %d>(%s);\n", type, s->vec,
                cuda_access_text(s, inst, true));
}

/* The thread's pack of this round: kept in registers, or loaded just now. */
static const char *pack_name(const cuda_shape *s, int pack) {
    const char *format = s->cached[pack] ? "q%d[it]" : s->gathers ? "q%d[j]" : "q%d";
    return ml_arena_format(s->e->arena, format, pack);
}

static void print_load(const cuda_shape *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_dtype memory = (ml_dtype)e->ir->operand[inst->operand].dtype;
    const char *type = emit_compute_type((ml_dtype)inst->dtype), *from;
    int pack = s->pack[i];
    if (s->next[i])
        from = ml_arena_format(e->arena, "w%d", i);
    else if (pack >= 0)
        from = ml_arena_format(e->arena, "%s.e[k]", pack_name(s, pack));
    else
        from = ml_arena_format(e->arena, "*(%s)", cuda_access_text(s, inst, false));
    ml_text_add(&e->text, "const %s v%d = ", type, i);
    bool guarded = inst->guard != ML_NO_INST && pack < 0;
    if (guarded) ml_text_add(&e->text, "!%s ? 0 : ", emit_name(e, inst->guard));
    if (memory == ML_BF16 && pack >= 0)
        ml_text_add(&e->text, "ml_unpack(%s, k);\n", pack_name(s, pack));
    else
        ml_text_add(&e->text, memory == ML_BF16 ? "%sml_load_bf16(%s);\n" : "(%s)%s;\n",
                    memory == ML_BF16 ? "" : type, from);
}

static void print_store(const cuda_shape *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_dtype memory = (ml_dtype)e->ir->operand[inst->operand].dtype;
    const char *value = emit_name(e, inst->src[0]);
    bool by_row = !s->elementwise && e->place[i] < e->ir->row_loops;
    if (by_row)
        ml_text_add(&e->text, "if (lane == 0%s%s) ", s->tiled ? " && tile == 0" : "",
                    cuda_meets_apart(s) ? " && own" : "");
    if (inst->guard != ML_NO_INST && !cuda_stores_pack(s, i))
        ml_text_add(&e->text, "if (%s) ", emit_name(e, inst->guard));
    if (cuda_stores_pack(s, i))
        ml_text_add(&e->text, memory == ML_BF16 ? "u%d[k] = " : "u%d.e[k] = ", i);
    else
        ml_text_add(&e->text, "*(%s) = ", cuda_access_text(s, inst, false));
    if (memory == ML_BF16 && !cuda_stores_pack(s, i))
        ml_text_add(&e->text, "ml_store_bf16((float)%s);\n", value);
    else
        ml_text_add(&e->text, "(%s)%s;\n", memory == ML_BF16 ? "float" : emit_memory_type(memory),
                    value);
}

ml_dtype cuda_accumulator_dtype(const cuda_shape *s, int i) {
    const ml_inst *inst = &s->e->ir->inst[i];
    return (ml_dtype)(inst->op == ML_OP_ARGMAX ? s->e->ir->inst[inst->src[0]].dtype : inst->dtype);
}

void cuda_print_combine(const cuda_shape *s, int i, const char *to, const char *value) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (inst->op == ML_OP_SUM)
        ml_text_add(&e->text, "%s += %s;\n", to, value);
    else if (inst->op == ML_OP_ARGMAX)
        ml_text_add(&e->text,
                    "if (j%d < 0 || %s > %s || (%s != %s && %s == %s)) { %s = %s; j%d = c + k; }\n",
                    i, value, to, value, value, to, to, to, value, i);
    else
        ml_text_add(&e->text, "%s = ml_%s_%s(%s, %s);\n", to, inst->op == ML_OP_MAX ? "max" : "min",
                    ml_suffix(cuda_accumulator_dtype(s, i)), to, value);
}

static void print_reduce(const cuda_shape *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *to = ml_arena_format(e->arena, "a%d", i);
    if (cuda_is_column(s, inst))
        to = s->in_registers ? ml_arena_format(e->arena, "c%d[it * %d + k]", i, s->vec)
                             : ml_arena_format(e->arena, "o%d[chunk * %lldLL + c + k]",
                                               inst->operand, (long long)e->columns);
    if (cuda_is_row_partial(s, i))
        ml_text_add(&e->text, "if (lane == 0%s) ", cuda_meets_apart(s) ? " && own" : "");
    else if (ml_inst_reduces_partly(inst) && cuda_meets_apart(s))
        ml_text_add(&e->text, "if (own) ");
    if (s->long_sum[i])
        ml_text_add(&e->text, "ml_add_f32(%s, lost%d, %s);\n", to, i, emit_name(e, inst->src[0]));
    else
        cuda_print_combine(s, i, to, emit_name(e, inst->src[0]));
}

/* What makes values of the row of what is folded: 2^-15, but for rows beyond f16's range. */
static void print_down(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    if (s->folded < 0 || e->stage[s->folded] != stage) return;
    int less = e->ir->inst[s->folded].src[0];
    ml_text_add(&e->text, "const float down = ml_down(%s);\n",
                emit_name(e, e->ir->inst[less].src[1]));
}

/* h is the value times 2^15. */
static void print_folded(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    int i = s->folded;
    const ml_inst *less = &e->ir->inst[e->ir->inst[i].src[0]];
    if (e->stage[i] < stage)
        ml_text_add(&e->text, "const float h%d = ml_unpack_half(%s, k);\n", i,
                    pack_name(s, s->folded_pack));
    else
        ml_text_add(&e->text, "const float h%d = z%d[k] = ml_quick_exp_less(%s, %s, ML_UP);\n", i,
                    i, emit_name(e, less->src[0]), emit_name(e, less->src[1]));
    ml_text_add(&e->text, "const float v%d = h%d * down;\n", i, i);
}

/* The folded values take their elements' place. */
static void print_fold(const cuda_shape *s) {
    emitter *e = s->e;
    int pack = s->folded_pack;
    if (s->part == CUDA_REST)
        ml_text_add(&e->text, "g%d[it - %d] = ml_round_halves<%d>(z%d);\n", pack, s->resident,
                    s->vec, s->folded);
    else
        ml_text_add(&e->text,
                    "ml_store_pack<ml_bf16, %d>((ml_bf16 *)(%s), ml_round_halves<%d>(z%d));\n",
                    s->vec, cuda_staged_text(s, pack, "slot"), s->vec, s->folded);
}

static void print_instruction(const cuda_shape *s, int i, int stage) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const char *at = ml_arena_format(e->arena, "k%d[it * %d + k]", i, s->vec);
    if (s->hoisted[i]) {
        ml_text_add(&e->text, "const %s v%d = h%d[it * %d + k];\n",
                    emit_compute_type((ml_dtype)inst->dtype), i, i, s->vec);
        return;
    }
    if (i == s->folded) {
        print_folded(s, stage);
        return;
    }
    if (e->buffered[i] && e->stage[i] < stage) {
        ml_text_add(&e->text, "const %s v%d = %s;\n", emit_compute_type((ml_dtype)inst->dtype), i,
                    at);
        return;
    }
    if (s->largest[i] >= 0) return; /* taken from the pack */
    bool printed = cuda_print_simpler(s, i);
    if (!printed) switch ((ml_inst_kind)inst->kind) {
        case ML_INST_LOAD: print_load(s, i); break;
        case ML_INST_STORE: print_store(s, i); break;
        case ML_INST_REDUCE: print_reduce(s, i); break;
        default: emit_value(e, &e->text, i); break;
        }
    if (e->buffered[i]) ml_text_add(&e->text, "%s = v%d;\n", at, i);
}

static void print_places(const cuda_shape *s, int stage, int first, int last) {
    emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++)
        if (e->need[stage][i] && e->place[i] >= first && e->place[i] <= last)
            print_instruction(s, i, stage);
}

/* The packs that a stage reads; of the cached ones only those that it is the first to read. */
static bool reads_pack(const cuda_shape *s, int stage, int pack, bool cached) {
    emitter *e = s->e;
    if (s->cached[pack] != cached || (cached && s->first_stage[pack] != stage)) return false;
    for (int i = pack; i < e->ir->inst_count; i++)
        if (cuda_reads_pack(s, stage, i, pack)) return true;
    return false;
}

static void print_pack_elements(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    ml_text_add(&e->text, "#pragma unroll\nfor (int k = 0; k < %d; k++) {\n", s->vec);
    ml_text_add(&e->text, "const %s i%d = base + k;\n", s->column_integer, e->inner);
    print_places(s, stage, e->inner, e->inner);
    ml_text_add(&e->text, "}\n");
}

/* A pack that a comparison with the column's number hits is printed apart from all others. */
void cuda_print_elements(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    cuda_shape missed = *s;
    const char *before = "if (";
    missed.missed = true;
    for (int i = 0; i < e->ir->inst_count; i++) {
        if (s->hit[i] < 0 || !e->need[stage][i]) continue;
        const char *type = e->ir->inst[s->hit[i]].dtype == ML_I64 ? "ml_u64" : "unsigned";
        ml_text_add(&e->text, "%s(%s)%s - (%s)base < %d", before, type, emit_name(e, s->hit[i]),
                    type, s->vec);
        before = " || ";
    }
    if (strcmp(before, "if (") == 0) {
        print_pack_elements(s, stage);
        return;
    }
    ml_text_add(&e->text, ") {\n");
    print_pack_elements(s, stage);
    ml_text_add(&e->text, "} else {\n");
    print_pack_elements(&missed, stage);
    ml_text_add(&e->text, "}\n");
}

void cuda_print_columns_outside(const cuda_shape *s, int stage) {
    print_places(s, stage, s->elementwise ? -1 : s->e->ir->row_loops, s->e->inner - 1);
}

/* One pack of one row: indices are set; the thread owns it. */
static void print_pack_body(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    cuda_print_columns_outside(s, stage);
    for (int i = 0; i < ir->inst_count; i++) {
        if (s->pack[i] == i && reads_pack(s, stage, i, false)) {
            add_type(&e->text, s, ir->inst[i].operand);
            cuda_print_pack_load(s, i, ml_arena_format(e->arena, " q%d", i));
            cuda_print_refill(s, i, stage);
        }
        if (!e->need[stage][i] || !cuda_stores_pack(s, i)) continue;
        if (ir->operand[ir->inst[i].operand].dtype == ML_BF16) {
            ml_text_add(&e->text, "float u%d[%d];\n", i, s->vec);
        } else {
            add_type(&e->text, s, ir->inst[i].operand);
            ml_text_add(&e->text, " u%d;\n", i);
        }
    }
    bool folds = s->folded >= 0 && s->online < 0 && e->need[stage][s->folded] &&
                 e->stage[s->folded] == stage;
    if (folds) ml_text_add(&e->text, "float z%d[%d];\n", s->folded, s->vec);
    cuda_print_elements(s, stage);
    if (folds) print_fold(s);
    for (int i = 0; i < ir->inst_count; i++)
        if (s->largest[i] >= 0 && e->need[stage][i])
            ml_text_add(&e->text, "t%d = ml_pack_max(%s, t%d);\n", i, pack_name(s, s->largest[i]),
                        i);
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        if (!e->need[stage][i] || !cuda_stores_pack(s, i)) continue;
        if (inst->guard != ML_NO_INST) ml_text_add(&e->text, "if (%s) ", emit_name(e, inst->guard));
        ml_dtype memory = (ml_dtype)ir->operand[inst->operand].dtype;
        const char *value = ml_arena_format(
            e->arena, memory == ML_BF16 ? "ml_round_pack<%2$d>(u%1$d)" : "u%1$d", i, s->vec);
        ml_text_add(&e->text, "ml_store_pack<%s, %d>(%s, %s);\n", emit_memory_type(memory), s->vec,
                    cuda_access_text(s, inst, true), value);
    }
}

/* Open the loop over a thread's packs: c is the first column of the pack. */
void cuda_print_pack_loop(const cuda_shape *s) {
    emitter *e = s->e;
    const char *type = s->column_integer;
    int first = s->part == CUDA_REST ? s->resident : 0;
    int end = s->part == CUDA_RESIDENT ? s->resident : s->packs;
    if (s->grouped)
        ml_text_add(&e->text,
                    "#pragma unroll\nfor (int j = 0; j < %d; j++) {\n"
                    "const int it = %d + group * %d + j;\nif (it >= %d) continue;\n",
                    s->group, first, s->group, end);
    else
        ml_text_add(&e->text, "#pragma unroll%s\nfor (int it = %d; it < %d; it++) {\n",
                    s->unroll || s->part == CUDA_REST ? ""
                    : s->apart > 1                    ? " 8"
                                                      : " 4",
                    first, end);
    ml_text_add(&e->text, "const %s c = ((%s)%s * %d + lane) * %d;\n", type, type,
                s->tiled ? "tile" : "it", s->team, s->vec);
    cuda_print_unravel(s, "c", e->ir->row_loops, e->inner, type);
    int64_t covered = (int64_t)s->team * s->vec * s->packs;
    bool whole = s->tiled ? e->columns % covered == 0 : covered == e->columns;
    if (whole)
        ml_text_add(&e->text, "{\n");
    else
        ml_text_add(&e->text, "if (c < %lld) {\n", (long long)e->columns);
}

void cuda_print_accumulator(const cuda_shape *s, int i) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_dtype dtype = cuda_accumulator_dtype(s, i);
    ml_text_add(&e->text, "%s a%d = ", emit_compute_type(dtype), i);
    emit_identity(&e->text, inst->op == ML_OP_ARGMAX ? ML_OP_MAX : (ml_op)inst->op, dtype);
    ml_text_add(&e->text, ";\n");
    if (inst->op == ML_OP_ARGMAX) ml_text_add(&e->text, "%s j%d = -1;\n", s->integer, i);
    if (s->long_sum[i]) ml_text_add(&e->text, "float lost%d = 0.0f;\n", i);
}

/* Declare where a cached pack lives. */
static void print_cached_pack(const cuda_shape *s, int pack) {
    emitter *e = s->e;
    add_type(&e->text, s, e->ir->inst[pack].operand);
    ml_text_add(&e->text, " q%d[%d];\n", pack, s->packs);
}

static void print_cached_loads(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++)
        if (s->pack[i] == i && reads_pack(s, stage, i, true))
            cuda_print_pack_load(s, i, pack_name(s, i));
}

void cuda_print_accumulators(const cuda_shape *s, int stage) {
    for (int i = 0; i < s->e->ir->inst_count; i++)
        if (ml_inst_reduces_row(&s->e->ir->inst[i]) && s->e->stage[i] == stage &&
            !cuda_print_largest_start(s, i))
            cuda_print_accumulator(s, i);
}

/* Registers for what stays in them from this pass on. */
static void print_kept(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    bool loads = false;
    for (int i = 0; i < ir->inst_count; i++) {
        if (e->buffered[i] && i != s->folded && e->stage[i] == stage)
            ml_text_add(&e->text, "%s k%d[%d];\n", emit_compute_type((ml_dtype)ir->inst[i].dtype),
                        i, s->vec * s->packs);
        if (s->pack[i] != i || !reads_pack(s, stage, i, true)) continue;
        print_cached_pack(s, i);
        loads = true;
    }
    if (!loads) return;
    cuda_print_pack_loop(s);
    print_cached_loads(s, stage);
    ml_text_add(&e->text, "}\n}\n");
}

/* One pass over the columns of a row. */
static void print_pass(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    if (!e->passes[stage]) return;
    cuda_print_accumulators(s, stage);
    print_kept(s, stage);
    print_down(s, stage);
    cuda_print_refill_start(s, stage);
    bool parts = cuda_holds_rest(s);
    for (int part = parts ? CUDA_RESIDENT : CUDA_ALL; part <= (parts ? CUDA_REST : CUDA_ALL);
         part++) {
        cuda_shape some = *s;
        some.part = (cuda_part)part;
        some.grouped = s->online >= 0;
        cuda_print_group_start(&some);
        cuda_print_pack_loop(&some);
        print_pack_body(&some, stage);
        ml_text_add(&e->text, "}\n}\n");
        cuda_print_group_end(&some);
    }
    cuda_print_largest_end(s, stage);
    cuda_print_row_results(s, stage);
}

static void print_row(const cuda_shape *s) {
    emitter *e = s->e;
    cuda_print_unravel(s, "row", 0, e->ir->row_loops - 1, s->integer);
    cuda_print_pointers(s);
    for (int stage = 0; stage < e->stages; stage++) {
        print_places(s, stage, -1, e->ir->row_loops - 1);
        if (s->online >= 0 && stage + 1 == e->stage[s->folded])
            cuda_print_online_pass(s, stage);
        else if (s->online < 0 || stage != e->stage[s->folded])
            print_pass(s, stage);
    }
}

/* The number of the block among those of its kernel: in a batch, of its member. */
static const char *block_text(const cuda_shape *s) {
    return s->e->batch > 0 ? "block" : "blockIdx.x";
}

/* Rows (or packs) of this block's chunk: those below high from low on, or by steps. A division of
 * 64 bits takes as long as a load, and all loads wait for it. */
static void print_chunk(const cuda_shape *s) {
    emitter *e = s->e;
    const char *wide = s->chunk_integer;
    const char *block = block_text(s);
    if (s->tiled) {
        ml_text_add(&e->text, "const int tile = (int)(%s %% %lldu);\n", block,
                    (long long)cuda_tiles(s));
        block = ml_arena_format(e->arena, "%s / %lldu", block, (long long)cuda_tiles(s));
    }
    ml_text_add(&e->text, "const long long chunk = %s;\n", block);
    if (s->spread)
        ml_text_add(&e->text,
                    "const %s low = (%s)chunk * %d, high = (%s)a.s[0], step = (%s)a.s[1];\n",
                    s->integer, s->integer, s->teams, s->integer, s->integer);
    else
        ml_text_add(&e->text,
                    "const %s low = (%s)((%s)chunk * (%s)a.s[0] / (%s)a.s[1]), "
                    "high = (%s)((%s)(chunk + 1) * (%s)a.s[0] / (%s)a.s[1]);\n",
                    s->integer, s->integer, wide, wide, wide, s->integer, wide, wide, wide);
    cuda_print_partials(s, true);
}

/* Open the loop over an elementwise thread's packs. */
static void print_element_loop(const cuda_shape *s) {
    emitter *e = s->e;
    int threads = cuda_threads(s);
    ml_text_add(&e->text, "#pragma unroll\nfor (int it = 0; it < %d; it++) {\n", s->packs);
    if (s->chunked)
        ml_text_add(&e->text, "const %s t = first + it * %d;\nif (t < high) {\n", s->integer,
                    threads);
    else
        ml_text_add(&e->text,
                    "const %s t = ((%s)%s * %d + it) * %d + threadIdx.x;\nif (t < a.s[0]) {\n",
                    s->integer, s->integer, block_text(s), s->packs, threads);
    cuda_print_unravel(s, "t", 0, e->inner, s->integer);
    cuda_print_pointers(s);
}

static void print_elements(const cuda_shape *s) {
    emitter *e = s->e;
    bool loads = false;
    if (s->chunked) {
        print_chunk(s);
        ml_text_add(&e->text, "for (%s first = low + threadIdx.x; first < high; first += %d) {\n",
                    s->integer, cuda_threads(s) * s->packs);
    }
    for (int i = 0; i < e->ir->inst_count; i++) {
        if (s->pack[i] != i || !reads_pack(s, 0, i, true)) continue;
        print_cached_pack(s, i);
        loads = true;
    }
    if (loads) {
        print_element_loop(s);
        print_cached_loads(s, 0);
        ml_text_add(&e->text, "}\n}\n");
    }
    print_element_loop(s);
    print_pack_body(s, 0);
    ml_text_add(&e->text, "}\n}\n");
    if (!s->chunked) return;
    ml_text_add(&e->text, "}\n");
    cuda_print_partials(s, false);
}

static void print_lanes(const cuda_shape *s) {
    ml_text *out = &s->e->text;
    if (s->apart > 1)
        ml_text_add(out,
                    "const int lane = threadIdx.x / 32 %% %d * %d + threadIdx.x %% 32 / %d, "
                    "team = threadIdx.x / %d * %d + threadIdx.x %% %d;\n",
                    s->warps, CUDA_WARP / s->apart, s->apart, s->warps * CUDA_WARP, s->apart,
                    s->apart);
    else
        ml_text_add(out, "const int lane = threadIdx.x %% %d, team = threadIdx.x / %d;\n", s->team,
                    s->team);
}

/* This team's row of those from `first` on; where there is none, the last one's. */
static void print_own_row(const cuda_shape *s, const char *first, const char *end) {
    ml_text_add(
        &s->e->text,
        "const bool own = %s + team < %s;\nconst %s row = (%s)(own ? %s + team : %s - 1);\n", first,
        end, s->integer, s->integer, first, end);
}

/* The last rows come first: caches still have of them what the kernel before wrote last. */
static void print_single_row(const cuda_shape *s) {
    const char *block = s->e->batch > 0 ? block_text(s) : "(gridDim.x - 1 - blockIdx.x)";
    const char *first = ml_arena_format(s->e->arena, "(%s)%s * %d", s->integer, block, s->teams);
    if (cuda_meets_apart(s))
        print_own_row(s, first, "a.s[0]");
    else
        ml_text_add(&s->e->text, "const %s row = %s + team;\nif (row >= a.s[0]) return;\n",
                    s->integer, first);
    cuda_print_step(s);
    print_row(s);
}

static void print_rows(const cuda_shape *s) {
    emitter *e = s->e;
    bool turns = cuda_takes_turns(s);
    print_lanes(s);
    if (!s->chunked) {
        print_single_row(s);
        return;
    }
    print_chunk(s);
    cuda_print_start(s);
    if (turns) ml_text_add(&e->text, "int turn = 0;\n");
    bool apart = cuda_meets_apart(s);
    const char *index = apart ? "first" : "row";
    ml_text_add(&e->text, "for (%s %s = %s; %s < high; %s += %d%s) {\n", s->integer, index,
                apart ? "low" : "low + team", index, index, s->teams, s->spread ? " * step" : "");
    if (apart) print_own_row(s, "first", "high");
    cuda_print_step(s);
    print_row(s);
    cuda_print_row_end(s);
    if (turns)
        ml_text_add(&e->text, "turn = %d - turn;\n", s->teams * CUDA_WARP);
    else if (apart)
        ml_text_add(&e->text, "__syncthreads();\n");
    else if (e->stages > 1 && s->team > CUDA_WARP)
        ml_text_add(&e->text, "ml_team_sync<%d, %d>(team);\n", s->team, cuda_threads(s));
    ml_text_add(&e->text, "}\n");
    cuda_print_partials(s, false);
}

/* The operands' pointers. The batch's arguments are, in this order: the members' reads, their
 * writes; the number of members, each one's first block, each one's scalars. */
static void print_operands(const cuda_shape *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    int reads = 0, half = 1;
    while (reads < ir->operand_count && !ir->operand[reads].written) reads++;
    while (half * 2 < e->batch) half *= 2;
    if (e->batch > 0) {
        ml_text_add(&e->text,
                    "const int members = (int)all.s[0];\nint m = 0;\n"
                    "for (int half = %d; half > 0; half /= 2)\n"
                    "if (m + half < members && blockIdx.x >= all.s[1 + m + half]) m += half;\n"
                    "const unsigned block = blockIdx.x - (unsigned)all.s[1 + m];\n"
                    "const ml_sizes a = {{",
                    half);
        for (int i = 0; i < e->scalars; i++)
            ml_text_add(&e->text, "%sall.s[%d + %d * m]", i ? ", " : "", e->batch + 1 + i,
                        e->scalars);
        ml_text_add(&e->text, "}};\n");
    }
    for (int k = 0; k < ir->operand_count; k++) {
        const char *type = emit_memory_type((ml_dtype)ir->operand[k].dtype);
        const char *at = ml_arena_format(e->arena, "a.p[%d]", k);
        if (e->batch > 0 && k < reads)
            at = ml_arena_format(e->arena, "all.p[m * %d + %d]", reads, k);
        else if (e->batch > 0)
            at = ml_arena_format(e->arena, "all.p[members * %d + m * %d + %d]", reads,
                                 ir->operand_count - reads, k - reads);
        ml_text_add(&e->text, "%s *const o%d = (%s *)%s;\n", type, k, type, at);
    }
}

/* The body, with what comes before it. */
static const char *finish(const cuda_shape *s) {
    emitter *e = s->e;
    const char *bounds = ml_arena_format(e->arena, "%d", cuda_threads(s)), *sizes = "";
    const char *scalars = ml_arena_format(e->arena, "long long s[%d]", e->scalars);
    const char *quick = s->quick ? "#define ml_exp_f32 ml_quick_exp_f32\n"
                                   "#define ml_sigmoid_f32 ml_quick_sigmoid_f32\n"
                                   "#define ml_tanh_f32 ml_quick_tanh_f32\n"
                                 : "";
    if (s->blocks > 0) bounds = ml_arena_format(e->arena, "%s, %d", bounds, s->blocks);
    if (e->batch > 0) sizes = ml_arena_format(e->arena, "struct ml_sizes { %s; };\n", scalars);
    if (e->batch > 0)
        scalars = ml_arena_format(e->arena, "long long s[%d]", 1 + (1 + e->scalars) * e->batch);
    const char *types =
        ml_arena_format(e->arena, "struct ml_arguments { char *p[%d]; %s; };\n%s",
                        e->ir->operand_count * (e->batch > 0 ? e->batch : 1), scalars, sizes);
    return ml_arena_format(
        e->arena, "%s%sextern \"C\" __global__ void __launch_bounds__(%s) %s%s\n{\n%s", quick,
        types, bounds, e->entry,
        e->batch > 0 ? "(const __grid_constant__ ml_arguments all)" : "(const ml_arguments a)",
        e->text.text);
}

const char *emit_cuda_print(emitter *e) {
    cuda_shape s = *e->cuda;
    s.e = e;
    print_operands(&s);
    if (s.slots > 0) ml_text_add(&e->text, "extern __shared__ uint4 shared[];\n");
    if (s.elementwise)
        print_elements(&s);
    else
        print_rows(&s);
    ml_text_add(&e->text, "}\n");
    return finish(&s);
}
