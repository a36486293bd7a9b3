/* The start of a sum over microbatches: zeros where this is the first one, else what is there. The
 * result mostly lies where the sum does, and then there is nothing to do but in the first.
 * Operands: whether to begin anew (bool), the sum so far, the result; the latter two contiguous. */
#include "codegen/kernels/template.h"

enum { C_BLOCK = 1 << 14, CUDA_BLOCKS = 1024, CUDA_THREADS = 256 };

static const char cpu_text[] = R"(
void ${e}(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    const ${memory} *from = (const ${memory} *)p[1];
    ${memory} *to = (${memory} *)p[2];
    const int anew = *(const ${flag} *)p[0] != 0;
    if (!anew && to == from) return;
    for (long long unit = begin; unit < end; unit++) {
        long long last = (unit + 1) * ${block} < ${count} ? (unit + 1) * ${block} : ${count};
        for (long long i = unit * ${block}; i < last; i++) to[i] = anew ? 0 : from[i];
    }
}
)";

static const char cuda_text[] = R"(
struct ${e}_arguments { char *p[3]; };
extern "C" __global__ void __launch_bounds__(${threads}) ${e}(${e}_arguments a) {
    const ${memory} *from = (const ${memory} *)a.p[1];
    ${memory} *to = (${memory} *)a.p[2];
    const bool anew = *(const ${flag} *)a.p[0] != 0;
    if (!anew && to == from) return;
    for (long long i = blockIdx.x * ${threads}LL + threadIdx.x; i < ${count};
         i += ${blocks} * ${threads}LL)
        to[i] = anew ? 0 : from[i];
}
)";

void ml_template_reset(ml_schedule *s, ml_step *step) {
    ml_template t = template_begin(s);
    const ml_value *result = template_value(s, step, 2);
    int64_t count = ml_type_elements(&result->type);
    template_set_text(&t, "memory", emit_memory_type((ml_dtype)result->type.dtype));
    template_set_text(&t, "flag", emit_memory_type(ML_BOOL));
    template_set(&t, "count", "%lldLL", (long long)count);
    if (s->target->kind != ML_TARGET_CUDA) {
        template_set(&t, "block", "%dLL", C_BLOCK);
        step->kernel = template_kernel(&t, cpu_text, "reset", 3);
        step->kernel->units = (count + C_BLOCK - 1) / C_BLOCK;
        step->kernel->grain = 4;
        return;
    }
    int64_t blocks = (count + CUDA_THREADS - 1) / CUDA_THREADS;
    if (blocks > CUDA_BLOCKS) blocks = CUDA_BLOCKS;
    template_set(&t, "threads", "%d", CUDA_THREADS);
    template_set(&t, "blocks", "%lldLL", (long long)blocks);
    step->kernel = template_kernel(&t, cuda_text, "reset", 3);
    template_launch(step->kernel, blocks, 1, 1, CUDA_THREADS, 0);
}
