/* Kernels for CUDA: a row's largest element and the sum of the exponentials below it in one pass,
 * where values are folded (see cuda_choose_folded). The packs of a thread form groups; a group's
 * values refer to its own largest element, and a factor for each group is made up for when they
 * are used. So a row's elements are worked on as they come, one group of copies after another, and
 * the team meets once. */
#include "codegen/emit/emit_cuda.h"

enum { MOST_GROUPS = 4 /* of a slot: as many groups of copies are under way */ };

/* The row's largest element. Those of groups are finite: they need no guard of their own. */
int cuda_online_largest(const cuda_shape *s) {
    const ml_kernel_ir *ir = s->e->ir;
    return cuda_guarded(ir, ir->inst[ir->inst[s->folded].src[0]].src[1]);
}

int cuda_groups(const cuda_shape *s) {
    return s->part == CUDA_REST ? 1 : (s->resident + s->group - 1) / s->group;
}

/* Whether an instruction of the exponentials' pass is part of them or of their sum. */
static bool belongs(const cuda_shape *s, int i, int sum) {
    const ml_kernel_ir *ir = s->e->ir;
    int less = ir->inst[s->folded].src[0], element = ir->inst[less].src[0];
    return i == s->folded || i == less || i == element || i == sum || s->pack[i] >= 0 ||
           ir->inst[i].kind == ML_INST_CONST;
}

/* Whether the pass of the largest element reads, gathers or writes anything else by packs. */
static bool has_others(const cuda_shape *s, int largest) {
    const emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++) {
        if (!e->need[e->stage[largest]][i] || i == largest) continue;
        bool reads = s->pack[i] >= 0 && s->pack[i] != s->folded_pack;
        if (s->largest[i] >= 0 || reads || cuda_stores_pack(s, i)) return true;
    }
    return false;
}

void cuda_choose_online(cuda_shape *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    /* beside a second block, what it would save is hidden, and registers lack */
    if (s->folded < 0 || s->team <= CUDA_WARP || !cuda_is_alone(s)) return;
    int stage = e->stage[s->folded], sum = -1;
    int largest = cuda_online_largest(s);
    if (e->stage[largest] + 1 != stage || stage + 2 != e->stages || has_others(s, largest)) return;
    for (int i = 0; i < ir->inst_count; i++) {
        bool adds = ml_inst_reduces_row(&ir->inst[i]) && e->stage[i] == stage;
        if (!adds) continue;
        if (sum >= 0 || ir->inst[i].op != ML_OP_SUM || ir->inst[i].src[0] != s->folded) return;
        sum = i;
    }
    for (int i = 0; i < ir->inst_count && sum >= 0; i++)
        if (e->need[stage][i] && e->place[i] >= ir->row_loops && !belongs(s, i, sum)) return;
    if (sum < 0) return;
    s->online = sum;
    s->group = (s->resident + MOST_GROUPS - 1) / MOST_GROUPS;
    if (s->packs - s->resident > s->group) s->group = s->packs - s->resident;
}

static void open_loop(const cuda_shape *s) {
    ml_text_add(&s->e->text, "#pragma unroll\nfor (int group = 0; group < %d; group++) {\n",
                cuda_groups(s));
}

/* Where a group's largest element waits for the last pass. */
static const char *reference(const cuda_shape *s) {
    cuda_shape resident = *s;
    resident.part = CUDA_RESIDENT;
    return ml_arena_format(s->e->arena, "w%d[%d + group]", s->folded,
                           s->part == CUDA_REST ? cuda_groups(&resident) : 0);
}

void cuda_print_group_start(const cuda_shape *s) {
    if (s->online < 0) return;
    int largest = cuda_online_largest(s);
    open_loop(s);
    ml_text_add(&s->e->text, "const float down = ML_DOWN * ml_quick_exp_f32(%s - v%d);\n",
                reference(s), largest);
}

void cuda_print_group_end(const cuda_shape *s) {
    if (s->online < 0) return;
    if (cuda_refills(s) && s->part != CUDA_REST) cuda_print_commit(s);
    ml_text_add(&s->e->text, "}\n");
}

/* Groups are copied one after another, the first one first. */
static void print_wait(const cuda_shape *s) {
    int count = cuda_groups(s);
    for (int i = 0; i < count && cuda_refills(s) && s->part != CUDA_REST; i++)
        ml_text_add(&s->e->text,
                    "if (group == %d) asm volatile(\"cp.async.wait_group %d;\" ::: \"memory\");\n",
                    i, count - 1 - i);
}

static void print_group(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    int pack = s->folded_pack, largest = cuda_online_largest(s);
    open_loop(s);
    print_wait(s);
    ml_text_add(&e->text, "ml_pack<ml_bf16, %d> q%d[%d];\nml_lowest_packs(q%d);\n", s->vec, pack,
                s->group, pack);
    cuda_print_pack_loop(s);
    cuda_print_columns_outside(s, stage);
    cuda_print_pack_load(s, pack, ml_arena_format(e->arena, "q%d[j]", pack));
    cuda_print_elements(s, stage);
    ml_text_add(&e->text,
                "}\n}\nconst float most = %s = ml_packs_max(q%d);\n"
                "ml_add_scaled(a%d, a%d, most, ml_packs_exp(q%d, most));\n",
                reference(s), pack, largest, s->online, pack);
    cuda_print_pack_loop(s);
    if (s->part == CUDA_REST)
        ml_text_add(&e->text, "g%d[it - %d] = q%d[j];\n", pack, s->resident, pack);
    else
        ml_text_add(&e->text, "ml_store_pack<ml_bf16, %d>((ml_bf16 *)(%s), q%d[j]);\n", s->vec,
                    cuda_staged_text(s, pack, "slot"), pack);
    ml_text_add(&e->text, "}\n}\n}\n");
}

void cuda_print_online_pass(const cuda_shape *s, int stage) {
    emitter *e = s->e;
    cuda_shape some = *s;
    bool rest = cuda_holds_rest(s);
    some.grouped = some.gathers = true;
    some.part = rest ? CUDA_RESIDENT : CUDA_ALL;
    cuda_print_accumulators(s, stage);
    cuda_print_accumulators(s, stage + 1);
    ml_text_add(&e->text, "float w%d[%d];\n", s->folded, cuda_groups(&some) + rest);
    print_group(&some, stage);
    some.part = CUDA_REST;
    if (rest) print_group(&some, stage);
    cuda_print_row_results(s, stage);
}

/* Where a team's warps leave their results. */
static const char *shared_text(const cuda_shape *s, int i) {
    return ml_arena_format(s->e->arena, "m%d + %steam * %d", i,
                           cuda_takes_turns(s) ? "turn + " : "", CUDA_WARP);
}

void cuda_print_online_put(const cuda_shape *s) {
    emitter *e = s->e;
    int largest = cuda_online_largest(s), sum = s->online;
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

void cuda_print_online_get(const cuda_shape *s) {
    emitter *e = s->e;
    int largest = cuda_online_largest(s), sum = s->online;
    ml_text_add(&e->text,
                "const float v%d = ml_team_get<ml_max, %d>(-ML_INF, %s);\n"
                "const float v%d = ML_DOWN * ml_team_get_scaled<%d>(v%d, %s, %s);\n",
                largest, s->team, shared_text(s, largest), sum, s->team, largest,
                shared_text(s, largest), shared_text(s, sum));
}
