/* The shortest lists of passes (compile_passes.h): without optimizations and families of ops. */
#include "runtime/passes/passes.h"
#include "runtime/compile_passes.h"

static const compile_pass global[] = {
    {"extract", .run_with = pass_extract, .purpose = "the nodes that the results need"},
    {"drop_placements", ml_drop_placements, .when = pass_has_placements, .purpose = "of one rank"},
    {"conform_updates", .run_with = pass_conform_updates, .purpose = "types of new values"},
};
static const compile_pass rank[] = {
    {"shard", .run_with = pass_shard, .when = pass_has_layout, .purpose = "the part of one rank"},
    {"decompose", .run_with = pass_decompose, .purpose = "ops by their definitions"},
    {"simplify", ml_simplify, .purpose = "constants, movements that cancel, equal nodes"},
};
static const compile_pass choice[] = {
    {"recompute", .run_with = pass_recompute, .when = pass_recomputes, .purpose = "less memory"},
};

void (*const compile_batch_kernels)(ml_plan *plan) = NULL;
void (*const compile_join_products)(ml_plan *plan) = NULL;
void (*const compile_write_keys)(ml_plan *plan) = NULL;
void (*const compile_offload)(ml_plan *plan, int64_t limit, bool exposed) = NULL;
const compile_pass_list compile_pass_lists[PASS_LISTS] = {
    [PASSES_GLOBAL] = {global, sizeof global / sizeof *global},
    [PASSES_RANK] = {rank, sizeof rank / sizeof *rank},
    [PASSES_CHOICE] = {choice, sizeof choice / sizeof *choice},
};
