/* The border where environment variables become options: of the compiler, of code generation. */
#include "runtime/base/knobs.h"
#include "runtime/exec/program.h"

ml_compile_options ml_compile_options_read(void) {
    const ml_knobs_values *k = ml_knobs();
    return (ml_compile_options){
        .overlap = (ml_choice)k->overlap,
        .half_batch = (ml_choice)k->halves,
        .recompute = k->recompute == ML_RECOMPUTE_THRIFTY ? ML_WHERE_IT_PAYS : k->recompute,
        .chunk_bytes = (int64_t)k->chunk << 20,
        .no_param_cache = !k->copies,
        .no_batch = !k->batch,
        .verify = k->verify,
        .dump = k->dump,
    };
}

void ml_target_set_options(ml_target *target) {
    const ml_knobs_values *k = ml_knobs();
    target->no_fuse = k->no_fuse;
    target->no_cudnn = !k->cudnn;
    target->nondeterministic = !k->deterministic;
    target->no_wgmma = k->wgmma == 0;
    target->attention_tiles = k->wgmma > 0 ? k->wgmma - 1 : 0;
    target->no_tma = !k->tma;
}
