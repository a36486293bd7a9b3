/* `make core` links this in place of runtime/pipeline, codegen/kernels and the golden files: the
 * core stands without them. A program that needs one of them is an error. */
#include "codegen/kernel_files.h"
#include "codegen/lower/lower.h"
#include "runtime/pipeline/plan.h"
#include "tests/test.h"

void golden_scripts_register(ml_arena *arena);
void golden_graphs_register(ml_arena *arena);

_Noreturn static void absent(const char *what) {
    test_skip("the core is linked without %s", what);
}

void ml_template_attention(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels of attention");
}
void ml_template_scatter_add(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels of scatter_add");
}
void ml_template_scan(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels of scans");
}
void ml_template_recurrence(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels of recurrences");
}
bool ml_template_recurrence_grid(ml_schedule *s, ml_step *step, const char **why) {
    (void)s, (void)step;
    *why = "the core has no kernels";
    return false;
}
bool ml_template_few_rows(ml_schedule *s, ml_step *step, const ml_few_rows *product) {
    (void)s, (void)step, (void)product;
    return false;
}
bool ml_few_rows_of_bytes(const ml_target *target, int64_t m, int64_t n, int64_t k) {
    (void)target, (void)m, (void)n, (void)k;
    return false;
}
bool ml_cached_attention_writes(ml_schedule *s, ml_step *step, const uint32_t *fresh) {
    (void)s, (void)step, (void)fresh;
    return false;
}
void ml_template_write_rows(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels that write rows");
}
void ml_template_transpose(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels that transpose");
}
void ml_template_cached_attention(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels of cached attention");
}
void ml_template_reset(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels that reset states");
}
bool ml_linear_scan_kernel(const ml_target *target, const ml_graph *g, ml_ref n) {
    (void)target, (void)g, (void)n;
    return false;
}
bool ml_delta_scan_kernel(const ml_target *target, const ml_graph *g, ml_ref n) {
    (void)target, (void)g, (void)n;
    return false;
}
void ml_template_linear_scan(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels of linear scans");
}
void ml_template_delta_scan(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels of linear scans");
}
bool ml_scaled_ragged_kernel(const ml_target *target, const ml_graph *g, ml_ref n) {
    (void)target, (void)g, (void)n;
    return false;
}
void ml_template_ragged(ml_schedule *s, ml_step *step) {
    (void)s, (void)step;
    absent("kernels of products by groups");
}
const ml_kernel_file *ml_kernel_file_find(const char *name, size_t length) {
    (void)name, (void)length;
    return NULL;
}

void pipeline_partition(ml_graph *global, const ml_roots *roots, const ml_layout *layout,
                        ml_stage_map *map, int coordinate, ml_arena *arena,
                        struct ml_pipeline_plan **out) {
    (void)global, (void)roots, (void)layout, (void)map, (void)coordinate, (void)arena, (void)out;
    absent("pipelines");
}
void pipeline_partition_free(struct ml_pipeline_plan *partition) {
    (void)partition;
}
uint64_t pipeline_hash(const struct ml_pipeline_plan *partition, uint64_t seed) {
    (void)partition;
    return seed;
}
void pipeline_plan_begin(ml_plan *plan, const struct ml_pipeline_plan *partition) {
    (void)plan, (void)partition;
    absent("pipelines");
}
ml_plan *pipeline_stage_begin(ml_plan *plan, int stage, bool once_per_step) {
    (void)plan, (void)stage, (void)once_per_step;
    absent("pipelines");
}
void pipeline_stage_split(ml_plan *plan, int stage) {
    (void)plan, (void)stage;
    absent("pipelines");
}
void pipeline_plan_end(ml_plan *plan, int coordinate) {
    (void)plan, (void)coordinate;
    absent("pipelines");
}
void pipeline_memory(ml_plan *plan, int coordinate) {
    (void)plan, (void)coordinate;
    absent("pipelines");
}
void pipeline_offload(ml_plan *plan, int coordinate, int64_t limit, bool exposed,
                      pipeline_task_offload offload_task) {
    (void)plan, (void)coordinate, (void)limit, (void)exposed, (void)offload_task;
    absent("pipelines");
}
const ml_plan *pipeline_once_per_step(const struct ml_pipeline_plan *pipeline, int stage) {
    (void)pipeline, (void)stage;
    absent("pipelines");
}
void pipeline_plan_free(struct ml_pipeline_plan *pipeline) {
    (void)pipeline;
}
void ml_pipeline_schedule_print(const ml_pipeline_problem *problem, const ml_pipeline_schedule *p,
                                ml_text *out) {
    (void)problem, (void)p, (void)out;
    absent("pipelines");
}

/* Golden files take scripts and pipelines. */
void golden_scripts_register(ml_arena *arena) {
    (void)arena;
}
void golden_graphs_register(ml_arena *arena) {
    (void)arena;
}
