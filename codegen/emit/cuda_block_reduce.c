/* Kernels for CUDA, the source: reductions over a team, which is part of a warp, a warp or several.
 */
#include "codegen/emit/cuda_print.h"

static const char *combine_name(const ml_inst *inst) {
    return inst->op == ML_OP_SUM ? "ml_sum" : inst->op == ML_OP_MAX ? "ml_max" : "ml_min";
}

/* "ml_team_reduce<...>(a3, ...)" over teams of `team` threads. */
const char *cuda_reduction_text(const cuda_schedule *s, int i, int team) {
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
    if (team != cuda_threads(s) && s->lane_stride > 1)
        return ml_arena_format(e->arena, "ml_apart_reduce<%s, %d>(a%d)", combine, s->lane_stride,
                               i);
    return ml_arena_format(e->arena, "ml_team_reduce<%s, %d, %d>(a%d, (%s)%s, %s, %s)", combine,
                           team, cuda_threads(s), i, type, identity.text, shared, which);
}

/* The results of one phase of teams over adjacent rows, in several warps. */
static void print_predicated_results(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    for (int get = 0; get < 2; get++) {
        for (int i = 0; i < e->ir->inst_count; i++) {
            const ml_inst *inst = &e->ir->inst[i];
            if (!ml_inst_reduces_row(inst) || e->phase[i] != phase) continue;
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
                            type, i, s->teams * s->warps, s->lane_stride, combine, s->lane_stride,
                            i, i, s->warps, s->warps);
        }
        if (!get) ml_text_add(&e->text, "__syncthreads();\n");
    }
}

/* Where a team's warps leave their parts of a result. */
static const char *parts_text(const cuda_schedule *s, int i) {
    return ml_arena_format(s->e->arena, "m%d + %steam * %d", i,
                           cuda_takes_turns(s) ? "turn + " : "", CUDA_WARP);
}

/* What each warp has of a result, or of a pair of them (pair >= 0). */
static void print_team_put(const cuda_schedule *s, int i, int pair) {
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
static void print_team_get(const cuda_schedule *s, int i, int pair) {
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

/* Where a team's warps leave their results. */
static const char *shared_text(const cuda_schedule *s, int i) {
    return ml_arena_format(s->e->arena, "m%d + %steam * %d", i,
                           cuda_takes_turns(s) ? "turn + " : "", CUDA_WARP);
}

static void print_online_put(const cuda_schedule *s) {
    emitter *e = s->e;
    int largest = cuda_online_largest(s), sum = s->online_sum;
    int slots = cuda_threads(s) / s->team * CUDA_WARP * (cuda_takes_turns(s) ? 2 : 1);
    ml_text_add(&e->text,
                "__shared__ float m%d[%d], m%d[%d];\n"
                "const float top = ml_warp_reduce<ml_max, %d>(a%d);\n"
                "ml_team_put<%d>(top, %s);\n"
                "ml_team_put<%d>(ml_warp_reduce<ml_sum, %d>(a%d * ml_quick_exp_f32(a%d - top)), "
                "%s);\n",
                largest, slots, sum, slots, s->team, largest, s->team, shared_text(s, largest),
                s->team, s->team, sum, largest, shared_text(s, sum));
}

static void print_online_get(const cuda_schedule *s) {
    emitter *e = s->e;
    int largest = cuda_online_largest(s), sum = s->online_sum;
    ml_text_add(&e->text,
                "const float v%d = ml_team_get<ml_max, %d>(-ML_INF, %s);\n"
                "const float v%d = ML_DOWN * ml_team_get_scaled<%d>(v%d, %s, %s);\n",
                largest, s->team, shared_text(s, largest), sum, s->team, largest,
                shared_text(s, largest), shared_text(s, sum));
}

/* The results of one phase of teams of several warps, which meet once for all of them but argmax.
 */
static void print_team_results(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    int largest = s->online_sum >= 0 ? cuda_online_largest(s) : -1;
    for (int get = 0; get < 2; get++) {
        for (int i = 0; i < e->ir->inst_count; i++) {
            const ml_inst *inst = &e->ir->inst[i];
            if (!ml_inst_reduces_row(inst) || e->phase[i] != phase || i == largest) continue;
            if (inst->op == ML_OP_ARGMAX) continue;
            int pair = cuda_pair_of(s, i);
            if (pair >= 0 && pair < i) continue;
            (get ? print_team_get : print_team_put)(s, i, pair);
        }
        if (largest >= 0 && get) print_online_get(s);
        if (largest >= 0 && !get) print_online_put(s);
        if (!get) ml_text_add(&e->text, "ml_team_sync<%d, %d>(team);\n", s->team, cuda_threads(s));
    }
}

/* Each by itself; of argmax alone, where the others have been printed. */
static void print_results_apart(const cuda_schedule *s, int phase, bool argmax_alone) {
    emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (!ml_inst_reduces_row(inst) || e->phase[i] != phase) continue;
        if (argmax_alone && inst->op != ML_OP_ARGMAX) continue;
        const char *result = cuda_reduction_text(s, i, s->team);
        ml_text_add(&e->text, "const %s v%d = %s;\n", emit_compute_type((ml_dtype)inst->dtype), i,
                    result);
    }
}

void cuda_print_row_results(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    bool any = false, argmax = false;
    const bool online = s->online_sum >= 0 && e->phase[cuda_online_largest(s)] == phase;
    for (int i = 0; i < e->ir->inst_count; i++) {
        const ml_inst *inst = &e->ir->inst[i];
        if (!ml_inst_reduces_row(inst) || e->phase[i] != phase) continue;
        any = true;
        cuda_print_total(s, i);
        argmax = argmax || inst->op == ML_OP_ARGMAX;
    }
    if (any && online && argmax) {
        print_team_results(s, phase);
        print_results_apart(s, phase, true);
    } else if (any && !argmax && (cuda_predicates_rows(s) || s->team > CUDA_WARP)) {
        (cuda_predicates_rows(s) ? print_predicated_results : print_team_results)(s, phase);
    } else {
        print_results_apart(s, phase, false);
    }
}
