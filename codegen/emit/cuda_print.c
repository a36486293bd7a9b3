/* Kernels for CUDA, the source: passes over rows, and the kernel as a whole. */
#include "codegen/emit/cuda_print.h"

#include <string.h>

/* The scale from in-place values to values of the row: 2^-15, but for rows beyond f16's range. */
static void print_down(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    if (s->in_place < 0 || e->phase[s->in_place] != phase) return;
    int less = e->ir->inst[s->in_place].src[0];
    ml_text_add(&e->text, "const float down = ml_down(%s);\n",
                emit_name(e, e->ir->inst[less].src[1]));
}

/* The in-place values overwrite their elements. */
static void print_fold(const cuda_schedule *s) {
    emitter *e = s->e;
    int pack = s->in_place_pack;
    if (s->at.part == CUDA_REST)
        ml_text_add(&e->text, "g%d[it - %d] = ml_round_halves<%d>(z%d);\n", pack, s->resident,
                    s->vec, s->in_place);
    else
        ml_text_add(&e->text,
                    "ml_store_pack<ml_bf16, %d>((ml_bf16 *)(%s), ml_round_halves<%d>(z%d));\n",
                    s->vec, cuda_slot_text(s, pack, "slot"), s->vec, s->in_place);
}

/* The packs that a phase reads; of the cached ones only those that it is the first to read. */
static bool reads_pack(const cuda_schedule *s, int phase, int pack, bool cached) {
    emitter *e = s->e;
    if (s->register_pack[pack] != cached || (cached && s->first_phase[pack] != phase)) return false;
    for (int i = pack; i < e->ir->inst_count; i++)
        if (cuda_reads_pack(s, phase, i, pack)) return true;
    return false;
}

/* One pack of one row: indices are set; the thread owns it. */
static void print_pack_body(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    cuda_print_columns_outside(s, phase);
    for (int i = 0; i < ir->inst_count; i++) {
        if (s->pack[i] == i && reads_pack(s, phase, i, false)) {
            cuda_add_pack_type(&e->text, s, ir->inst[i].operand);
            cuda_print_pack_load(s, i, ml_arena_format(e->arena, " q%d", i));
            cuda_print_refill(s, i, phase);
        }
        if (!e->need[phase][i] || !cuda_stores_pack(s, i)) continue;
        if (ml_is_narrow((ml_dtype)ir->operand[ir->inst[i].operand].dtype)) {
            ml_text_add(&e->text, "float u%d[%d];\n", i, s->vec);
        } else {
            cuda_add_pack_type(&e->text, s, ir->inst[i].operand);
            ml_text_add(&e->text, " u%d;\n", i);
        }
    }
    bool folds = s->in_place >= 0 && s->online_sum < 0 && e->need[phase][s->in_place] &&
                 e->phase[s->in_place] == phase;
    if (folds) ml_text_add(&e->text, "float z%d[%d];\n", s->in_place, s->vec);
    cuda_print_elements(s, phase);
    if (folds) print_fold(s);
    for (int i = 0; i < ir->inst_count; i++)
        if (s->largest[i] >= 0 && e->need[phase][i])
            ml_text_add(&e->text, "t%d = ml_pack_max(%s, t%d);\n", i,
                        cuda_pack_name(s, s->largest[i]), i);
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        if (!e->need[phase][i] || !cuda_stores_pack(s, i)) continue;
        if (inst->guard != ML_NO_INST) ml_text_add(&e->text, "if (%s) ", emit_name(e, inst->guard));
        ml_dtype memory = (ml_dtype)ir->operand[inst->operand].dtype;
        const char *value = ml_arena_format(
            e->arena, ml_is_narrow(memory) ? "ml_round_pack<%3$s, %2$d>(u%1$d)" : "u%1$d", i,
            s->vec, emit_memory_type(memory));
        ml_text_add(&e->text, "ml_store_pack<%s, %d>(%s, %s);\n", emit_memory_type(memory), s->vec,
                    cuda_access_text(s, inst, true), value);
    }
}

/* Declare where a cached pack lives. */
static void print_register_pack(const cuda_schedule *s, int pack) {
    emitter *e = s->e;
    cuda_add_pack_type(&e->text, s, e->ir->inst[pack].operand);
    ml_text_add(&e->text, " q%d[%d];\n", pack, s->packs);
}

static void print_register_loads(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++)
        if (s->pack[i] == i && reads_pack(s, phase, i, true))
            cuda_print_pack_load(s, i, cuda_pack_name(s, i));
}

/* Registers for what stays in them from this pass on. */
static void print_saved(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    bool loads = false;
    for (int i = 0; i < ir->inst_count; i++) {
        if (e->buffered[i] && i != s->in_place && e->phase[i] == phase)
            ml_text_add(&e->text, "%s k%d[%d];\n", emit_compute_type((ml_dtype)ir->inst[i].dtype),
                        i, s->vec * s->packs);
        if (s->pack[i] != i || !reads_pack(s, phase, i, true)) continue;
        print_register_pack(s, i);
        loads = true;
    }
    if (!loads) return;
    cuda_print_pack_loop(s);
    print_register_loads(s, phase);
    ml_text_add(&e->text, "}\n}\n");
}

/* One pass over the columns of a row. */
static void print_pass(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    if (!e->passes[phase]) return;
    cuda_print_accumulators(s, phase);
    print_saved(s, phase);
    print_down(s, phase);
    cuda_print_refill_start(s, phase);
    bool parts = cuda_holds_rest(s);
    for (int part = parts ? CUDA_RESIDENT : CUDA_ALL; part <= (parts ? CUDA_REST : CUDA_ALL);
         part++) {
        cuda_schedule some = *s;
        some.at.part = (cuda_part)part;
        some.at.grouped = s->online_sum >= 0;
        cuda_print_group_start(&some);
        cuda_print_pack_loop(&some);
        print_pack_body(&some, phase);
        ml_text_add(&e->text, "}\n}\n");
        cuda_print_group_end(&some);
    }
    cuda_print_largest_end(s, phase);
    cuda_print_row_results(s, phase);
}

static void print_row(const cuda_schedule *s) {
    emitter *e = s->e;
    cuda_print_unravel(s, "row", 0, e->ir->row_loops - 1, s->integer);
    cuda_print_pointers(s);
    for (int phase = 0; phase < e->phases; phase++) {
        cuda_print_loops(s, phase, -1, e->ir->row_loops - 1);
        if (s->online_sum >= 0 && phase + 1 == e->phase[s->in_place])
            cuda_print_online_pass(s, phase);
        else if (s->online_sum < 0 || phase != e->phase[s->in_place])
            print_pass(s, phase);
    }
}

/* The number of the block among those of its kernel: in a batch, of its member. */
static const char *block_text(const cuda_schedule *s) {
    return s->e->batch > 0 ? "block" : "blockIdx.x";
}

/* Rows (or packs) of this block's chunk: those below high from low on, or by steps. A division of
 * 64 bits takes as long as a load, and all loads wait for it. */
static void print_chunk(const cuda_schedule *s) {
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
static void print_element_loop(const cuda_schedule *s) {
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

static void print_elements(const cuda_schedule *s) {
    emitter *e = s->e;
    bool loads = false;
    if (s->chunked) {
        print_chunk(s);
        ml_text_add(&e->text, "for (%s first = low + threadIdx.x; first < high; first += %d) {\n",
                    s->integer, cuda_threads(s) * s->packs);
    }
    for (int i = 0; i < e->ir->inst_count; i++) {
        if (s->pack[i] != i || !reads_pack(s, 0, i, true)) continue;
        print_register_pack(s, i);
        loads = true;
    }
    if (loads) {
        print_element_loop(s);
        print_register_loads(s, 0);
        ml_text_add(&e->text, "}\n}\n");
    }
    print_element_loop(s);
    print_pack_body(s, 0);
    ml_text_add(&e->text, "}\n}\n");
    if (!s->chunked) return;
    ml_text_add(&e->text, "}\n");
    cuda_print_partials(s, false);
}

static void print_lanes(const cuda_schedule *s) {
    ml_text *out = &s->e->text;
    if (s->lane_stride > 1)
        ml_text_add(out,
                    "const int lane = threadIdx.x / 32 %% %d * %d + threadIdx.x %% 32 / %d, "
                    "team = threadIdx.x / %d * %d + threadIdx.x %% %d;\n",
                    s->warps, CUDA_WARP / s->lane_stride, s->lane_stride, s->warps * CUDA_WARP,
                    s->lane_stride, s->lane_stride);
    else
        ml_text_add(out, "const int lane = threadIdx.x %% %d, team = threadIdx.x / %d;\n", s->team,
                    s->team);
}

/* This team's row of those from `first` on; where there is none, the last one's. */
static void print_own_row(const cuda_schedule *s, const char *first, const char *end) {
    ml_text_add(
        &s->e->text,
        "const bool own = %s + team < %s;\nconst %s row = (%s)(own ? %s + team : %s - 1);\n", first,
        end, s->integer, s->integer, first, end);
}

/* The last rows come first: caches still have of them what the kernel before wrote last. */
static void print_single_row(const cuda_schedule *s) {
    const char *block = s->e->batch > 0 ? block_text(s) : "(gridDim.x - 1 - blockIdx.x)";
    const char *first = ml_arena_format(s->e->arena, "(%s)%s * %d", s->integer, block, s->teams);
    if (cuda_predicates_rows(s))
        print_own_row(s, first, "a.s[0]");
    else
        ml_text_add(&s->e->text, "const %s row = %s + team;\nif (row >= a.s[0]) return;\n",
                    s->integer, first);
    cuda_print_step(s);
    print_row(s);
}

static void print_rows(const cuda_schedule *s) {
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
    bool predicated = cuda_predicates_rows(s);
    const char *index = predicated ? "first" : "row";
    ml_text_add(&e->text, "for (%s %s = %s; %s < high; %s += %d%s) {\n", s->integer, index,
                predicated ? "low" : "low + team", index, index, s->teams,
                s->spread ? " * step" : "");
    if (predicated) print_own_row(s, "first", "high");
    cuda_print_step(s);
    print_row(s);
    cuda_print_row_end(s);
    if (turns)
        ml_text_add(&e->text, "turn = %d - turn;\n", s->teams * CUDA_WARP);
    else if (predicated)
        ml_text_add(&e->text, "__syncthreads();\n");
    else if (e->phases > 1 && s->team > CUDA_WARP)
        ml_text_add(&e->text, "ml_team_sync<%d, %d>(team);\n", s->team, cuda_threads(s));
    ml_text_add(&e->text, "}\n");
    cuda_print_partials(s, false);
}

/* The operands' pointers. The batch's arguments are, in this order: the members' reads, their
 * writes; the number of members, each one's first block, each one's scalars. */
static void print_operands(const cuda_schedule *s) {
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
static const char *finish(const cuda_schedule *s) {
    emitter *e = s->e;
    const char *bounds = ml_arena_format(e->arena, "%d", cuda_threads(s)), *sizes = "";
    const char *scalars = ml_arena_format(e->arena, "long long s[%d]", e->scalars);
    if (s->blocks > 0) bounds = ml_arena_format(e->arena, "%s, %d", bounds, s->blocks);
    if (e->batch > 0) sizes = ml_arena_format(e->arena, "struct ml_sizes { %s; };\n", scalars);
    if (e->batch > 0)
        scalars = ml_arena_format(e->arena, "long long s[%d]", 1 + (1 + e->scalars) * e->batch);
    const char *types =
        ml_arena_format(e->arena, "struct ml_arguments { char *p[%d]; %s; };\n%s",
                        e->ir->operand_count * (e->batch > 0 ? e->batch : 1), scalars, sizes);
    return ml_arena_format(
        e->arena, "%sextern \"C\" __global__ void __launch_bounds__(%s) %s%s\n{\n%s", types, bounds,
        e->entry,
        e->batch > 0 ? "(const __grid_constant__ ml_arguments all)" : "(const ml_arguments a)",
        e->text.text);
}

const char *emit_cuda_print(emitter *e) {
    cuda_schedule s = *e->cuda;
    s.e = e;
    ml_text_add(&e->text, "kernel_begins();\n");
    print_operands(&s);
    if (s.slots > 0) ml_text_add(&e->text, "extern __shared__ uint4 shared[];\n");
    if (s.elementwise)
        print_elements(&s);
    else
        print_rows(&s);
    ml_text_add(&e->text, "}\n");
    return finish(&s);
}
