/* Kernels for CUDA, the source: a row's largest element and the sum of the exponentials below it in
 * one pass, where values are cached in place (see cuda_choose_in_place). The packs of a thread form
 * groups; a group's values refer to its own largest element, and are scaled by a factor of the
 * group when they are used. So a row's elements are worked on as they come, one group of copies
 * after another, and the team meets once. */
#include "codegen/emit/cuda_print.h"

static void open_loop(const cuda_schedule *s) {
    ml_text_add(&s->e->text, "#pragma unroll\nfor (int group = 0; group < %d; group++) {\n",
                cuda_groups(s));
}

/* Where a group's largest element waits for the last pass. */
static const char *reference(const cuda_schedule *s) {
    cuda_schedule resident = *s;
    resident.at.part = CUDA_RESIDENT;
    return ml_arena_format(s->e->arena, "w%d[%d + group]", s->in_place,
                           s->at.part == CUDA_REST ? cuda_groups(&resident) : 0);
}

void cuda_print_group_start(const cuda_schedule *s) {
    if (s->online_sum < 0) return;
    int largest = cuda_online_largest(s);
    open_loop(s);
    ml_text_add(&s->e->text, "const float down = ML_DOWN * ml_quick_exp_f32(%s - v%d);\n",
                reference(s), largest);
}

void cuda_print_group_end(const cuda_schedule *s) {
    if (s->online_sum < 0) return;
    if (cuda_refills(s) && s->at.part != CUDA_REST) cuda_print_commit(s);
    ml_text_add(&s->e->text, "}\n");
}

/* Groups are copied one after another, the first one first. */
static void print_wait(const cuda_schedule *s) {
    int count = cuda_groups(s);
    for (int i = 0; i < count && cuda_refills(s) && s->at.part != CUDA_REST; i++)
        ml_text_add(&s->e->text,
                    "if (group == %d) asm volatile(\"cp.async.wait_group %d;\" ::: \"memory\");\n",
                    i, count - 1 - i);
}

static void print_group(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    int pack = s->in_place_pack, largest = cuda_online_largest(s);
    open_loop(s);
    print_wait(s);
    ml_text_add(&e->text, "ml_pack<ml_bf16, %d> q%d[%d];\nml_lowest_packs(q%d);\n", s->vec, pack,
                s->rescale_packs, pack);
    cuda_print_pack_loop(s);
    cuda_print_columns_outside(s, phase);
    cuda_print_pack_load(s, pack, ml_arena_format(e->arena, "q%d[j]", pack));
    cuda_print_elements(s, phase);
    ml_text_add(&e->text,
                "}\n}\nconst float most = %s = ml_packs_max(q%d);\n"
                "ml_add_scaled(a%d, a%d, most, ml_packs_exp(q%d, most));\n",
                reference(s), pack, largest, s->online_sum, pack);
    cuda_print_pack_loop(s);
    if (s->at.part == CUDA_REST)
        ml_text_add(&e->text, "g%d[it - %d] = q%d[j];\n", pack, s->resident, pack);
    else
        ml_text_add(&e->text, "ml_store_pack<ml_bf16, %d>((ml_bf16 *)(%s), q%d[j]);\n", s->vec,
                    cuda_slot_text(s, pack, "slot"), pack);
    ml_text_add(&e->text, "}\n}\n}\n");
}

void cuda_print_online_pass(const cuda_schedule *s, int phase) {
    emitter *e = s->e;
    cuda_schedule some = *s;
    bool rest = cuda_holds_rest(s);
    some.at.grouped = some.at.gathers = true;
    some.at.part = rest ? CUDA_RESIDENT : CUDA_ALL;
    cuda_print_accumulators(s, phase);
    cuda_print_accumulators(s, phase + 1);
    ml_text_add(&e->text, "float w%d[%d];\n", s->in_place, cuda_groups(&some) + rest);
    print_group(&some, phase);
    some.at.part = CUDA_REST;
    if (rest) print_group(&some, phase);
    cuda_print_row_results(s, phase);
}
