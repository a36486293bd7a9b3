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
        .recompute = choice(k->recompute == ML_RECOMPUTE_THRIFTY ? -1 : k->recompute),
        .chunk_bytes = k->chunk ? (int64_t)k->chunk << 20 : INT64_MAX,
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
