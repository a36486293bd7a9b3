/* Kernels for CUDA: reductions over a team, which is part of a warp, a warp or several. */
#include "codegen/emit/emit_cuda.h"

#include <string.h>

/* Terms that a thread adds up one by one: of a row, or of its rows of a chunk. */
static int64_t terms_of(const cuda_shape *s, int i) {
    const emitter *e = s->e;
    if (s->elementwise) return e->rows / s->chunks / cuda_threads(s);
    int64_t own = cuda_is_row_partial(s, i) ? 1 : (int64_t)s->packs * s->vec;
    bool all = e->ir->inst[i].scope == ML_SCOPE_ALL;
    return all ? own * (e->rows / s->chunks / s->teams + 1) : own;
}

/* In f32 the roundings of LONG_SUM equal terms may add up to 4e-5. (Columns' sums of so many rows a
 * thread would be of tensors of 8 GB and more.) */
void cuda_find_long_sums(cuda_shape *s) {
    enum { LONG_SUM = 4096 };
    for (int i = 0; i < s->e->ir->inst_count; i++) {
        const ml_inst *inst = &s->e->ir->inst[i];
        bool sums = inst->kind == ML_INST_REDUCE && inst->op == ML_OP_SUM && i != s->online &&
                    !cuda_is_column(s, inst) && strcmp(ml_suffix(inst->dtype), "f32") == 0;
        s->long_sum[i] = sums && terms_of(s, i) > LONG_SUM;
    }
}

void cuda_print_total(const cuda_shape *s, int i) {
    if (s->long_sum[i]) ml_text_add(&s->e->text, "a%d = ml_total_f32(a%d, lost%d);\n", i, i, i);
}

static const char *combine_name(const ml_inst *inst) {
    return inst->op == ML_OP_SUM ? "ml_sum" : inst->op == ML_OP_MAX ? "ml_max" : "ml_min";
}

/* "ml_team_reduce<...>(a3, ...)" over teams of `team` threads. */
const char *cuda_reduction_text(const cuda_shape *s, int i, int team) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_dtype dtype = cuda_accumulator_dtype(s, i);
    const char *type = emit_compute_type(dtype);
    const char *which = team == cuda_threads(s) ? "0" : "team";
    const char *shared = ml_arena_format(e->arena, "(%s *)0", type), *indices = "";
    if (team > CUDA_WARP) {
        ml_text_add(&e->text, "__shared__ %s m%d[%d];\n", type, i,
                    cuda_threads(s) / team * CUDA_WARP);
        shared = ml_arena_format(e->arena, "m%d + %s * %d", i, which, CUDA_WARP);
    }
    if (inst->op == ML_OP_ARGMAX) {
        if (team > CUDA_WARP)
            ml_text_add(&e->text, "__shared__ %s n%d[%d];\n", s->integer, i,
                        cuda_threads(s) / team * CUDA_WARP);
        indices = team > CUDA_WARP ? ml_arena_format(e->arena, "n%d + %s * %d", i, which, CUDA_WARP)
                                   : ml_arena_format(e->arena, "(%s *)0", s->integer);
        return ml_arena_format(e->arena, "ml_team_argmax<%d, %d>(a%d, j%d, %s, %s, %s)", team,
                               cuda_threads(s), i, i, shared, indices, which);
    }
    ml_text identity = {.arena = e->arena};
    emit_identity(&identity, (ml_op)inst->op, dtype);
    const char *combine = combine_name(inst);
    if (team != cuda_threads(s) && s->apart > 1)
        return ml_arena_format(e->arena, "ml_apart_reduce<%s, %d>(a%d)", combine, s->apart, i);
    return ml_arena_format(e->arena, "ml_team_reduce<%s, %d, %d>(a%d, (%s)%s, %s, %s)", combine,
                           team, cuda_threads(s), i, type, identity.text, shared, which);
}

/* Whether values that teams of several warps share lie in two places by turns, so that threads of
 * one row need not wait for those that still read the row before's. */
bool cuda_takes_turns(const cuda_shape *s) {
    const ml_kernel_ir *ir = s->e->ir;
    if (s->apart > 1) return false;
    for (int i = 0; i < ir->inst_count; i++)
        if (ml_inst_reduces_row(&ir->inst[i]) && ir->inst[i].op == ML_OP_ARGMAX) return false;
    return s->chunked && s->e->stages > 1 && s->team > CUDA_WARP;
}

bool cuda_meets_apart(const cuda_shape *s) {
    return s->apart > 1 && s->warps > 1;
}

/* The results of one stage of teams whose threads lie apart in several warps. */
static void print_apart_results(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    for (int get = 0; get < 2; get++) {
        for (int i = 0; i < e->ir->inst_count; i++) {
            const ml_inst *inst = &e->ir->inst[i];
            if (!ml_inst_reduces_row(inst) || e->stage[i] != stage) continue;
            const char *type = emit_compute_type(cuda_accumulator_dtype(s, i));
            const char *combine = combine_name(inst);
            if (get)
                ml_text_add(&e->text, "const %s v%d = ml_apart_get<%s, %d>(m%d + team * %d);\n",
                            emit_compute_type((ml_dtype)inst->dtype), i, combine, s->warps, i,
                            s->warps);
            else
                ml_text_add(&e->text,
                            "__shared__ %s m%d[%d];\n"
                            "ml_apart_put<%d>(ml_apart_reduce<%s, %d>(a%d), m%d + team * %d + "
                            "threadIdx.x / 32 %% %d);\n",
                            type, i, s->teams * s->warps, s->apart, combine, s->apart, i, i,
                            s->warps, s->warps);
        }
        if (!get) ml_text_add(&e->text, "__syncthreads();\n");
    }
}

/* The first of a stage's results from `from` on that is reduced like instruction `like`; or -1. */
static int next_alike(const cuda_shape *s, int from, int like) {
    const ml_inst *inst = s->e->ir->inst;
    for (int i = from; i < s->e->ir->inst_count; i++)
        if (ml_inst_reduces_row(&inst[i]) && s->e->stage[i] == s->e->stage[like] &&
            inst[i].op == inst[like].op &&
            cuda_accumulator_dtype(s, i) == cuda_accumulator_dtype(s, like))
            return i;
    return -1;
}

/* Results that are reduced alike share their exchanges, two by two: the other one of a pair. */
static int pair_of(const cuda_shape *s, int i) {
    int first = -1, second = -1;
    if (s->team > CUDA_MAX_THREADS / 2 || s->online >= 0) return -1;
    do {
        first = next_alike(s, second + 1, i);
        second = next_alike(s, first + 1, i);
    } while (first != i && second >= 0 && second < i);
    return first == i ? second : second == i ? first : -1;
}

int64_t cuda_results_bytes(const cuda_shape *s) {
    int64_t bytes = 0, turns = cuda_takes_turns(s) ? 2 : 1;
    for (int i = 0; i < s->e->ir->inst_count; i++) {
        const ml_inst *inst = &s->e->ir->inst[i];
        if (inst->kind != ML_INST_REDUCE || cuda_is_column(s, inst)) continue;
        int64_t each = CUDA_WARP * (ml_dtypes[cuda_accumulator_dtype(s, i)].bytes > 4 ? 8 : 4);
        if (inst->op == ML_OP_ARGMAX) each += CUDA_WARP * (int64_t)sizeof(int64_t);
        if (!ml_inst_reduces_row(inst)) {
            bytes += each;
        } else if (s->team > CUDA_WARP) {
            int pair = pair_of(s, i);
            if (pair < 0 || pair > i) bytes += turns * s->teams * each;
        }
    }
    return bytes;
}

/* Where a team's warps leave their parts of a result. */
static const char *parts_text(const cuda_shape *s, int i) {
    return ml_arena_format(s->e->arena, "m%d + %steam * %d", i,
                           cuda_takes_turns(s) ? "turn + " : "", CUDA_WARP);
}

/* What each warp has of a result, or of a pair of them (pair >= 0). */
static void print_team_put(const cuda_shape *s, int i, int pair) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    int slots = cuda_threads(s) / s->team * CUDA_WARP * (cuda_takes_turns(s) ? 2 : 1);
    ml_text_add(&e->text, "__shared__ %s m%d[%d];\n",
                emit_compute_type(cuda_accumulator_dtype(s, i)), i, slots);
    if (pair >= 0)
        ml_text_add(&e->text, "ml_team_put_pair<%s, %d>(a%d, a%d, %s);\n", combine_name(inst),
                    s->team, i, pair, parts_text(s, i));
    else
        ml_text_add(&e->text, "ml_team_put<%d>(ml_warp_reduce<%s, %d>(a%d), %s);\n", s->team,
                    combine_name(inst), s->team, i, parts_text(s, i));
}

/* The team having met. */
static void print_team_get(const cuda_shape *s, int i, int pair) {
    emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    ml_dtype dtype = cuda_accumulator_dtype(s, i);
    const char *type = emit_compute_type(dtype);
    if (pair >= 0)
        ml_text_add(&e->text, "%s v%d, v%d;\nml_team_get_pair<%s, %d>(v%d, v%d, (%s)", type, i,
                    pair, combine_name(inst), s->team, i, pair, type);
    else
        ml_text_add(&e->text, "const %s v%d = ml_team_get<%s, %d>((%s)",
                    emit_compute_type((ml_dtype)inst->dtype), i, combine_name(inst), s->team, type);
    emit_identity(&e->text, (ml_op)inst->op, dtype);
    ml_text_add(&e->text, ", %s);\n", parts_text(s, i));
}

/* The results of one stage of teams of several warps, which meet once for all of them. */
static void print_team_results(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    int largest = s->online >= 0 ? cuda_online_largest(s) : -1;
    for (int get = 0; get < 2; get++) {
        for (int i = 0; i < e->ir->inst_count; i++) {
            const ml_inst *inst = &e->ir->inst[i];
            if (!ml_inst_reduces_row(inst) || e->stage[i] != stage || i == largest) continue;
            int pair = pair_of(s, i);
            if (pair >= 0 && pair < i) continue;
            (get ? print_team_get : print_team_put)(s, i, pair);
        }
        if (largest >= 0 && get) cuda_print_online_get(s);
        if (largest >= 0 && !get) cuda_print_online_put(s);
        if (!get) ml_text_add(&e->text, "ml_team_sync<%d, %d>(team);\n", s->team, cuda_threads(s));
    }
}

void cuda_print_row_results(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    bool any = false, argmax = false;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (!ml_inst_reduces_row(inst) || e->stage[i] != stage) continue;
        any = true;
        cuda_print_total(s, i);
        argmax = argmax || inst->op == ML_OP_ARGMAX;
    }
    if (any && !argmax && (cuda_meets_apart(s) || s->team > CUDA_WARP)) {
        (cuda_meets_apart(s) ? print_apart_results : print_team_results)(s, stage);
        return;
    }
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (!ml_inst_reduces_row(inst) || e->stage[i] != stage) continue;
        const char *result = cuda_reduction_text(s, i, s->team);
        ml_text_add(&e->text, "const %s v%d = %s;\n", emit_compute_type((ml_dtype)inst->dtype), i,
                    result);
    }
}
