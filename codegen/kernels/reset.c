/* The start of a sum over microbatches (c/reset.c, cuda/reset.cu). The result mostly is at the
 * address of the sum, and then there is nothing to do but in the first microbatch. Operands:
 * whether it is the first one (bool), the sum so far, the result; the latter two contiguous. */
#include "codegen/kernels/template.h"

enum { C_BLOCK = 1 << 14, CUDA_BLOCKS = 1024, CUDA_THREADS = 256 };

void ml_template_reset(ml_schedule *s, ml_step *step) {
    ml_template t = template_begin(s);
    const ml_value *result = template_value(s, step, 2);
    int64_t count = ml_type_elements(&result->type);
    template_set_text(&t, "ELEMENT", emit_memory_type((ml_dtype)result->type.dtype));
    template_set_text(&t, "FLAG", emit_memory_type(ML_BOOL));
    template_set(&t, "COUNT", "%lldLL", (long long)count);
    if (s->target->kind != ML_TARGET_CUDA) {
        template_set(&t, "BLOCK", "%dLL", C_BLOCK);
        step->kernel = template_file(&t, "reset.c", "reset", 3);
        step->kernel->units = (count + C_BLOCK - 1) / C_BLOCK;
        step->kernel->grain = 4;
        return;
    }
    int64_t blocks = (count + CUDA_THREADS - 1) / CUDA_THREADS;
    if (blocks > CUDA_BLOCKS) blocks = CUDA_BLOCKS;
    template_set(&t, "THREADS", "%d", CUDA_THREADS);
    template_set(&t, "BLOCKS", "%lldLL", (long long)blocks);
    step->kernel = template_file(&t, "reset.cu", "reset", 3);
    template_launch(step->kernel, blocks, 1, 1, CUDA_THREADS, 0);
}
