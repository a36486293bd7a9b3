/* Loops for CUDA. */
#include "codegen/emit.h"

void emit_cuda(emitter *e) {
    ml_raise(ML_INTERNAL, "the CUDA printer has no form for %d loops yet", e->ir->loop_count);
}
