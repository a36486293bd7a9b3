/* The start of a sum over microbatches (c/reset.c, cuda/reset.cu). The result mostly is at the
 * address of the sum, and then there is nothing to do but in the first microbatch. Operands:
 * whether it is the first one (bool), the sum so far, the result; the latter two contiguous. On a
 * GPU a step may begin several sums of one dtype (`members`), all by one flag. */
#include "codegen/kernels/template.h"

enum { C_BLOCK = 1 << 14, CUDA_BLOCKS = 1024, CUDA_THREADS = 256 };

void ml_template_reset(ml_schedule *s, ml_step *step) {
    ml_template t = template_begin(s);
    int members = step->members > 0 ? step->members : 1;
    ml_text counts = {.arena = s->arena};
    int64_t count = 0, all = 0;
    for (int m = 0; m < members; m++) {
        count = ml_type_elements(&template_value(s, step, 2 * members + m)->type);
        all += count;
        ml_text_add(&counts, "%s%lldLL", m > 0 ? ", " : "", (long long)count);
    }
    const ml_dtype dtype = (ml_dtype)template_value(s, step, 2 * members)->type.dtype;
    template_set_text(&t, "ELEMENT", emit_memory_type(dtype));
    template_set_text(&t, "FLAG", emit_memory_type(ML_BOOL));
    if (s->target->kind != ML_TARGET_CUDA) {
        template_set(&t, "COUNT", "%lldLL", (long long)count);
        template_set(&t, "BLOCK", "%dLL", C_BLOCK);
        step->kernel = template_file(&t, "reset.c", "reset", 3);
        step->kernel->units = (count + C_BLOCK - 1) / C_BLOCK;
        step->kernel->grain = 4;
        return;
    }
    int64_t blocks = (all + CUDA_THREADS - 1) / CUDA_THREADS;
    if (blocks > CUDA_BLOCKS) blocks = CUDA_BLOCKS;
    template_set(&t, "MEMBERS", "%d", members);
    template_set_text(&t, "COUNTS", counts.text);
    template_set(&t, "THREADS", "%d", CUDA_THREADS);
    template_set(&t, "BLOCKS", "%lldLL", (long long)blocks);
    step->kernel = template_file(&t, "reset.cu", "reset", 3 * members);
    template_launch(step->kernel, blocks, 1, 1, CUDA_THREADS, 0);
}
