/* The border where environment variables become options: of the compiler, of code generation. */
#include "runtime/base/knobs.h"
#include "runtime/exec/program.h"

static ml_choice choice(int knob) {
    return knob < 0 ? ML_AUTO : knob ? ML_ALWAYS : ML_NEVER;
}

ml_compile_options ml_compile_options_read(void) {
    const ml_knobs_values *k = ml_knobs();
    return (ml_compile_options){
        .overlap = choice(k->overlap),
        .half_batch = choice(k->halves),
        .recompute = choice(k->recompute),
        /* not set: 0, the default (ML_CHUNK_BYTES); 0: never */
        .chunk_bytes = k->chunk < 0    ? 0
                       : k->chunk == 0 ? INT64_MAX
                                       : (int64_t)k->chunk << 20,
        .no_param_cache = !k->param_cache,
        .no_fold = !k->fold,
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
    target->no_early = !k->early;
    if (k->host_link >= 0) target->host_bytes = (int64_t)k->host_link * 1000000000;
}
