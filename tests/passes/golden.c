/* Goldens of what passes do to small graphs: tests/ROOM/golden/NAME.txt is the test
 * golden/ROOM/NAME. A file has lines that begin with "#", "pass NAME [ARGUMENTS]", "before", a
 * graph (tests/graph/text.h), "after", and the graph as the pass leaves it, which is compared to
 * the letter (UPDATE_GOLDEN=1 rewrites it). Where a pass must keep the values of the roots, that is
 * checked by the reference interpreter, too. To add a test, add a file; to add a pass, a row of
 * `actions`. */
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codegen/lower/lower.h"
#include "runtime/ops/conv/conv.h"
#include "runtime/ops/quantize/scale_products.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/optimize/optimize.h"
#include "tests/graph/text.h"
#include "tests/pipeline/support.h"

void golden_graphs_register(ml_arena *arena);

typedef struct {
    fixture *f;
    ml_roots roots;        /* of f->g */
    const char *arguments; /* "" where there are none */
    ml_text *out;
} job;
typedef struct {
    const char *name;
    /* One of them; the first is a pass, after which the roots have the same values. */
    ml_graph *(*pass)(const ml_graph *from, ml_roots *roots);
    void (*act)(job *j);
    double tolerance; /* of values; 0: 1e-9 */
} action;

/* ---- What is done to graphs -------------------------------------------------------------------
 */

static ml_graph *decompose(const ml_graph *from, ml_roots *roots) {
    return ml_decompose(from, roots, INT64_MAX);
}
static ml_graph *chunk_logits(const ml_graph *from, ml_roots *roots) {
    return ml_chunk_logits(from, roots, 256); /* bytes */
}
static ml_graph *recompute(const ml_graph *from, ml_roots *roots) {
    static const double speeds[ML_MAX_MESH] = {1e12};
    return ml_recompute(from, roots, 0, 0, speeds, NULL);
}

static ml_graph *recompute_selective(const ml_graph *from, ml_roots *roots) {
    return ml_recompute(from, roots, 256, 1, NULL, NULL);
}
static ml_graph *half_batch_overlap(const ml_graph *from, ml_roots *roots) {
    const ml_type *type = &ml_graph_input(from, 0)->type;
    return ml_half_batches(from, roots, type->axis[0], type->size[0]);
}
static bool serves_f32_results(const void *context, const ml_graph *g, ml_ref n) {
    return context == NULL && ml_graph_type(g, n)->dtype == ML_F32;
}
static ml_graph *widen_scaled_products(const ml_graph *from, ml_roots *roots) {
    return ml_widen_scaled_products(from, roots, serves_f32_results, NULL);
}
static ml_graph *reuse_concat_slices(const ml_graph *from, ml_roots *roots) {
    static const int level[SUPPORT_INPUTS];
    return ml_reuse_concat_slices(from, roots, level);
}

/* The gradients of output 0, with respect to each parameter; these are the outputs afterwards. */
static void autodiff(job *j) {
    ml_graph *g = j->f->g;
    ml_ref wrt[SUPPORT_INPUTS], gradients[SUPPORT_INPUTS];
    int count = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->op == ML_OP_STATE) wrt[count++] = n;
    ml_autodiff(g, j->roots.outputs[0], wrt, count, gradients);
    j->roots.output_count = 0;
    for (int i = 0; i < count; i++)
        if (gradients[i]) j->roots.outputs[j->roots.output_count++] = gradients[i];
    ml_graph *simple = ml_simplify(g, &j->roots); /* without what the rules leave unused */
    ml_graph_print(simple, &j->roots, j->out);
    ml_graph_free(simple);
}

/* Arguments: a layout as shard_layout reads it. */
static void shard(job *j) {
    ml_layout layout = shard_layout(j->f, j->arguments);
    ml_roots local;
    CHECK(shard_check(j->f, &layout, &j->roots, 1e-9, false));
    ml_graph *g = shard_program(j->f, &layout, &j->roots, &local);
    ml_graph_print(g, &local, j->out);
    ml_graph_free(g);
}

/* Arguments: how many stages; layers are the modules layers.1, layers.2, ... */
static void stages(job *j) {
    stage_pipeline p = stage_pipeline_of(j->f, atoi(j->arguments), 1);
    ml_stage_graphs graphs;
    ml_stage_cut(j->f->g, &j->roots, &p.layout, &p.map, j->f->arena, &graphs);
    for (int s = 0; s < graphs.count; s++) {
        ml_text_add(j->out, "stage %d\n", s);
        ml_graph_print(graphs.stages[s].graph, &graphs.stages[s].roots, j->out);
    }
    ml_stage_graphs_free(&graphs);
    p = stage_pipeline_of(j->f, atoi(j->arguments), 1);
    stage_run(&p, &j->roots); /* the values */
}

static void print_launch(const ml_schedule *s, uint32_t i, ml_text *out) {
    const ml_kernel *k = s->steps.at[i].kernel;
    if (k == NULL) return;
    ml_text_add(out, "step %u: %s, ", i, k->label);
    if (s->target->kind == ML_TARGET_CUDA)
        ml_text_add(out, "%u blocks of %u threads, %u bytes of shared memory\n", k->grid[0],
                    k->block, k->shared_bytes);
    else
        ml_text_add(out, "%lld units, a thread for %lld\n", (long long)k->units,
                    (long long)k->grain);
    ml_kernel_print_schedule(k, out);
}

/* Arguments: "cpu" or "cuda". Steps, their operands and the IR of kernels, and how these run. */
static void lower(job *j) {
    bool cuda = strcmp(j->arguments, "cuda") == 0;
    ml_target target = {.kind = cuda ? ML_TARGET_CUDA : ML_TARGET_C,
                        .threads = 2,
                        .vector_bytes = 32,
                        .arch = 90,
                        .multiprocessors = 132};
    ml_schedule *s = ml_lower(j->f->g, &j->roots, &target, j->f->arena);
    ml_lower_verify(s);
    test_checked();
    ml_lower_print(s, j->out);
    ml_text_add(j->out, "\nSCHEDULES\n");
    for (uint32_t k = 0; k < s->steps.count; k++) print_launch(s, k, j->out);
}

/* Attention may read rows of any halves. */
static ml_graph *trade_once(const ml_graph *from, ml_roots *roots) {
    return ml_trade_once(from, roots, 1);
}

/* Passes are called by their files in runtime/passes. */
static const action actions[] = {
    {"simplify", .pass = ml_simplify},
    {"drop_places", .pass = ml_drop_placements},
    {"invert_permutations", .pass = ml_invert_permutations},
    {"split_scaled_sums", .pass = ml_split_scaled_sums},
    {"split_f32_products", .pass = ml_split_f32_products, .tolerance = 1e-6},
    {"decompose_conv", .pass = ml_decompose_conv},
    {"decompose_attention", .pass = decompose},
    {"merge_products", .pass = ml_merge_products},
    {"join_collectives", .pass = ml_join_collectives},
    {"gather_together", .pass = ml_gather_together},
    {"scale_products", .pass = ml_scale_products, .tolerance = 1e-5},
    {"widen_scaled_products", .pass = widen_scaled_products},
    {"trade_once", .pass = trade_once},
    {"propagate_layout", .pass = ml_propagate_layout},
    {"half_batch_overlap", .pass = half_batch_overlap},
    {"chunk_logits", .pass = chunk_logits},
    {"split_accumulation", .pass = ml_split_accumulation},
    {"recompute", .pass = recompute},
    {"recompute_selective", .pass = recompute_selective},
    {"reuse_concat_slices", .pass = reuse_concat_slices},
    {"fuse_expert_norms", .pass = ml_fuse_expert_norms},
    {"fuse_gated_experts", .pass = ml_fuse_gated_experts},
    {"autodiff", .act = autodiff},
    {"shard", .act = shard},
    {"stages", .act = stages},
    {"lower", .act = lower},
};
enum { ACTIONS = sizeof actions / sizeof *actions };

/* ---- Files ------------------------------------------------------------------------------------
 */

typedef struct {
    const char *path;
    char *text;   /* of the file */
    size_t after; /* where the graph that the pass leaves begins */
    ml_arena *arena;
    ml_text out;
} golden;

static bool has_collectives(const ml_graph *g) {
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_ops[ml_graph_node(g, n)->op].op_class == ML_CLASS_COLLECTIVE) return true;
    return false;
}

static void compare_values(fixture *f, const ml_roots *before, const ml_graph *g,
                           const ml_roots *after, double tolerance) {
    if (has_collectives(g)) return;
    for (int i = 0; i < before->output_count + before->update_count; i++) {
        int u = i - before->output_count;
        ml_ref old = u < 0 ? before->outputs[i] : before->updates[u].value;
        ml_ref new = u < 0 ? after->outputs[i] : after->updates[u].value;
        CHECK_TEXT(fixture_type_text(f, g, new), fixture_type_text(f, f->g, old));
        const double *a = fixture_value(f, f->g, old), *b = fixture_value(f, g, new);
        int64_t count = ml_type_elements(ml_graph_type(f->g, old));
        for (int64_t k = 0; k < count; k++) CHECK_NEAR(b[k], a[k], tolerance);
    }
}

static void run_pass(job *j, const action *a) {
    ml_roots roots = j->roots;
    roots.outputs = ML_NEW_ARRAY(j->f->arena, ml_ref, roots.output_count + 1);
    roots.updates = ML_NEW_ARRAY(j->f->arena, ml_update, roots.update_count + 1);
    memcpy(roots.outputs, j->roots.outputs, sizeof *roots.outputs * (size_t)roots.output_count);
    memcpy(roots.updates, j->roots.updates, sizeof *roots.updates * (size_t)roots.update_count);
    ml_graph *g = a->pass(j->f->g, &roots);
    ml_graph_verify(g, &roots, a->name);
    ml_graph_print(g, &roots, j->out);
    compare_values(j->f, &j->roots, g, &roots, a->tolerance ? a->tolerance : 1e-9);
    ml_graph_free(g);
}

static golden *current; /* a fixture's body has no argument */

static void body(fixture *f) {
    golden *t = current;
    job j = {.f = f, .out = &t->out, .arguments = ""};
    char name[64] = "", arguments[256] = "";
    const char *line = strstr(t->text, "\npass "), *before = strstr(t->text, "\nbefore\n");
    const char *after = strstr(t->text, "\nafter\n");
    if (!line || !before || !after) ml_raise(ML_INTERNAL, "no pass, before or after");
    sscanf(line, "\npass %63s%*[ ]%255[^\n]", name, arguments);
    j.arguments = arguments;
    snprintf(f->label, sizeof f->label, "%s", t->path);
    t->after = (size_t)(after - t->text) + strlen("\nafter\n");
    before += strlen("\nbefore\n");
    const action *a = actions;
    while (a < actions + ACTIONS && strcmp(a->name, name) != 0) a++;
    if (a == actions + ACTIONS) ml_raise(ML_INTERNAL, "no pass \"%s\"", name);
    graph_read(f, ml_arena_copy(f->arena, before, (size_t)(after - before)), &j.roots);
    if (a->pass)
        run_pass(&j, a);
    else
        a->act(&j);
}

static void run(const void *path) {
    golden t = {.path = path, .arena = ml_arena_new()};
    t.out.arena = t.arena;
    t.text = test_read_file(t.arena, path);
    current = &t;
    if (t.text) fixture_run(body, 1);
    if (t.text && t.after) {
        const char *made = t.out.text ? t.out.text : "";
        test_compare_file(t.arena, path,
                          ml_arena_format(t.arena, "%.*s%s", (int)t.after, t.text, made));
    }
    ml_arena_free(t.arena);
}

void golden_graphs_register(ml_arena *arena) {
    static const char *const rooms[] = {"graph", "passes", "shard", "pipeline", "lower"};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) {
        DIR *folder = opendir(ml_arena_format(arena, "tests/%s/golden", rooms[i]));
        for (struct dirent *entry; folder && (entry = readdir(folder));) {
            size_t length = strlen(entry->d_name);
            if (length < 5 || strcmp(entry->d_name + length - 4, ".txt") != 0) continue;
            char *name = ml_arena_copy(arena, entry->d_name, length - 4);
            test_register(ml_arena_format(arena, "golden/%s/%s", rooms[i], name), run,
                          ml_arena_format(arena, "tests/%s/golden/%s.txt", rooms[i], name));
        }
        if (folder) closedir(folder);
    }
}
