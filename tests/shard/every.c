/* Every op with its operands in every placement, over two ranks, over four, and over two times two:
 * the result and all gradients are those of one rank. First on the interpreter of all ranks in f64,
 * where each operand is checked to be placed as given; then by processes that compute in f32 and
 * talk to one another. The default is a sample: DIST_SEED draws another, DIST_ALL=1 takes all
 * placements, MANY at most of a case over a mesh; DIST_CASE=n takes that case alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/exec/program.h"
#include "tests/comm/support.h"
#include "tests/shard/cases.h"

enum { MESHES = 3, MANY = 2000, MANY_RUN = 16 /* by processes: their kernels are compiled */ };
static const char *const meshes[MESHES] = {"x2", "x4", "x2; y2"};

typedef struct {
    int op_case, mesh;
    int64_t number; /* of the placement: in what base, see read_number */
} variant;

static uint64_t seed_of_run(void) {
    return getenv("DIST_SEED") ? strtoull(getenv("DIST_SEED"), NULL, 10) : 1;
}

static bool wanted(int op_case) {
    const char *only = getenv("DIST_CASE");
    return !only || atoi(only) == op_case;
}

static shard_given given_over(int mesh) {
    return (shard_given){.mesh = mesh == 2 ? 2 : 1, .parts = mesh == 0 ? 2 : 4};
}

/* ---- All placements -------------------------------------------------------------------------- */

/* choices are those of a case that was built with none. */
static void read_number(shard_given *given, const shard_given *choices, int64_t number) {
    for (int k = 0; k < choices->count; k++)
        for (int m = 0; m < given->mesh; m++) {
            given->choice[k][m] = (int)(number % choices->choices[k]);
            number /= choices->choices[k];
        }
}

static variant current;
static shard_given choices[MESHES];

static void find_choices(fixture *f) {
    snprintf(f->label, sizeof f->label, "case %d", current.op_case);
    shard_given given = given_over(current.mesh);
    shard_case_given = &given;
    (void)shard_case_build(f, current.op_case);
    shard_case_given = NULL;
    choices[current.mesh] = given;
}

static int64_t placements(const shard_given *given) {
    int64_t count = 1;
    for (int k = 0; k < given->count; k++)
        for (int m = 0; m < given->mesh; m++) count *= given->choices[k];
    return count;
}

/* Call body for all placements of a case, or for `most` drawn ones. */
static int64_t for_placements(int op_case, int64_t most, uint64_t *random, void (*body)(void)) {
    int64_t done = 0;
    for (int mesh = 0; mesh < MESHES; mesh++) {
        current = (variant){op_case, mesh, 0};
        fixture_run(find_choices, 1);
        int64_t count = placements(&choices[mesh]);
        bool all = count <= most;
        for (int64_t i = 0; i < (all ? count : most); i++, done++) {
            current.number = all ? i : test_range(random, 0, count - 1);
            body();
        }
    }
    return done;
}

static const char *variant_text(fixture *f, const variant *v) {
    return ml_arena_format(f->arena, "%s, case %d, mesh %s, placement %lld",
                           ml_ops[shard_case_op(v->op_case)].name, v->op_case, meshes[v->mesh],
                           (long long)v->number);
}

/* ---- The interpreter ------------------------------------------------------------------------- */

static void check_placed(void *context, const ml_graph *g, ml_ref n, const ml_placements *at) {
    fixture *f = context;
    (void)g;
    for (int k = 0; k < shard_case_given->count; k++)
        for (int m = 0; m < shard_case_given->mesh && shard_case_given->placed[k] == n; m++) {
            ml_placement given = shard_case_place(f, k, m);
            bool same = given.kind == at->over[m].kind &&
                        (given.kind != ML_SPLIT || given.axis == at->over[m].axis);
            EXPECT(same, "%s: operand %d lies elsewhere over %d", f->label, k, m);
        }
}

static void interpret(fixture *f) {
    shard_given given = given_over(current.mesh);
    read_number(&given, &choices[current.mesh], current.number);
    snprintf(f->label, sizeof f->label, "%s", variant_text(f, &current));
    shard_case_given = &given;
    ml_ref y = shard_case_build(f, current.op_case);
    ml_layout layout = shard_layout(f, meshes[current.mesh]);
    ml_ref shown = y;
    ml_roots roots = {.outputs = &shown, .output_count = 1};
    ml_graph_free(ml_shard_report(f->g, &roots, &layout, check_placed, f));
    shard_case_given = NULL;
    ml_roots all = shard_roots(f, y);
    (void)shard_check(f, &layout, &all, 1e-9, current.number % 8 == 0);
}

static void run_interpreter(void) {
    fixture_run(interpret, (uint64_t)current.number);
}

TEST(dist, every_op_interpreted) {
    uint64_t random = seed_of_run();
    int64_t done = 0;
    for (int i = 0; i < shard_case_count(); i++)
        if (wanted(i)) done += for_placements(i, test_all() ? MANY : 12, &random, run_interpreter);
    CHECK(done > 0);
    printf("%lld placements\n", (long long)done);
}

/* ---- Processes ------------------------------------------------------------------------------- */

/* Variants over one mesh, run by one program. */
enum { BATCH = 24, OUTPUTS = BATCH * (GIVEN_OPERANDS + 1) };
typedef struct {
    int mesh, count;
    variant variants[BATCH];
    shard_given choices[BATCH];
} batch;

typedef struct {
    const batch *batch;
    ml_session *session;
    fixture f;
    int count;
    ml_ref nodes[OUTPUTS]; /* results and gradients */
    int variant[OUTPUTS];  /* of which they are */
    double *expected[OUTPUTS];
    void *outputs[OUTPUTS], *inputs[SUPPORT_INPUTS];
    int wrong;
} rank_run;

static void add_node(rank_run *r, ml_ref n, int variant) {
    r->variant[r->count] = variant;
    r->nodes[r->count++] = n;
}

/* A variant's result, and the gradients of its inputs. */
static void add_variant(rank_run *r, int i) {
    fixture *f = &r->f;
    shard_given given = given_over(r->batch->mesh);
    int first = f->input_count;
    read_number(&given, &r->batch->choices[i], r->batch->variants[i].number);
    shard_case_given = &given;
    ml_ref y = shard_case_build(f, r->batch->variants[i].op_case);
    shard_case_given = NULL;
    add_node(r, y, i);
    ml_ref wrt[GIVEN_OPERANDS], gradients[GIVEN_OPERANDS];
    int count = 0;
    for (int k = first; k < f->input_count; k++)
        if (ml_graph_type(f->g, f->nodes[k])->dtype == ML_F32) wrt[count++] = f->nodes[k];
    ml_autodiff(f->g, fixture_loss(f, y), wrt, count, gradients);
    for (int k = 0; k < count; k++)
        if (gradients[k]) add_node(r, gradients[k], i);
}

/* Numbers as the dtype holds them, in host memory: and these numbers again as doubles. */
static void *store(fixture *f, const ml_type *type, double *values) {
    int64_t count = ml_type_elements(type);
    void *memory = ml_arena_alloc(f->arena, (size_t)(count * ml_dtypes[type->dtype].bytes));
    for (int64_t i = 0; i < count; i++) {
        if (type->dtype == ML_F32)
            values[i] = ((float *)memory)[i] = (float)values[i];
        else if (type->dtype == ML_I32)
            ((int32_t *)memory)[i] = (int32_t)values[i];
        else
            ((double *)memory)[i] = values[i];
    }
    return memory;
}

static double load(ml_dtype dtype, const void *memory, int64_t i) {
    switch (dtype) {
    case ML_F32: return ((const float *)memory)[i];
    case ML_I32: return ((const int32_t *)memory)[i];
    case ML_BOOL: return ((const uint8_t *)memory)[i];
    default: return ((const double *)memory)[i];
    }
}

static void prepare(rank_run *r) {
    fixture *f = &r->f;
    shard_case_dtype = ML_F32;
    for (int i = 0; i < r->batch->count; i++) add_variant(r, i);
    for (int i = 0; i < f->input_count; i++)
        r->inputs[i] = store(f, &ml_graph_input(f->g, (uint32_t)i)->type, f->inputs[i]);
    for (int i = 0; i < f->state_count; i++) {
        const ml_type *type = &ml_graph_state(f->g, (uint32_t)i)->type;
        ML_CHECK(ml_session_write_state(r->session, (uint32_t)i, store(f, type, f->states[i])));
    }
    for (int i = 0; i < r->count; i++)
        r->outputs[i] =
            ml_arena_alloc(f->arena, (size_t)ml_type_bytes(ml_graph_type(f->g, r->nodes[i])));
    ml_reference(f->g, (const double *const *)f->states, (const double *const *)f->inputs, r->nodes,
                 r->count, r->expected, false, f->arena);
}

static void compare(rank_run *r, int i) {
    const ml_type *type = ml_graph_type(r->f.g, r->nodes[i]);
    int64_t count = ml_type_elements(type);
    double *actual = ML_NEW_ARRAY(r->f.arena, double, count);
    for (int64_t k = 0; k < count; k++) actual[k] = load((ml_dtype)type->dtype, r->outputs[i], k);
    double off = shard_difference(actual, r->expected[i], count);
    test_checked();
    if (off <= 1e-5) return;
    r->wrong++;
    fprintf(stderr, "%s: output %d is off by %.3g\n",
            variant_text(&r->f, &r->batch->variants[r->variant[i]]), i, off);
}

static void run_rank(void *argument) {
    rank_run *r = argument;
    ml_program *program;
    uint32_t ids[SUPPORT_INPUTS];
    const void *fed[SUPPORT_INPUTS];
    prepare(r);
    ml_roots roots = {.outputs = r->nodes, .output_count = r->count, .name = "variants"};
    ML_CHECK(ml_program_new(r->session, &roots, &program));
    int inputs = ml_program_inputs(program, ids);
    for (int i = 0; i < inputs; i++) fed[i] = r->inputs[ids[i]];
    ML_CHECK(ml_program_run(program, fed, r->outputs));
    for (int i = 0; i < r->count; i++) compare(r, i);
}

static int be_rank(ml_comm *comm, void *argument) {
    rank_run r = {.batch = argument};
    if (ml_session_new(&r.session) != ML_OK) return 1;
    ml_session_join(r.session, comm);
    r.f = (fixture){.g = ml_session_graph(r.session), .arena = ml_arena_new(), .random = 77};
    ml_layout layout = shard_layout(&r.f, meshes[r.batch->mesh]);
    ml_status status = ml_session_open(r.session, "cpu", 0);
    if (status == ML_OK) status = ml_session_lay_out(r.session, &layout, false);
    if (status == ML_OK) status = ml_protect(run_rank, &r);
    ml_session_free(r.session);
    ml_arena_free(r.f.arena);
    return status != ML_OK || r.wrong;
}

static batch batches[MESHES]; /* those that are being filled */

static void run_batch(batch *b) {
    if (b->count) comm_run(b->mesh == 0 ? 2 : 4, be_rank, b);
    b->count = 0;
}

static void put_in_batch(void) {
    batch *b = &batches[current.mesh];
    b->mesh = current.mesh;
    b->variants[b->count] = current;
    b->choices[b->count++] = choices[current.mesh];
    if (b->count == BATCH) run_batch(b);
}

/* A sample takes a few cases, others with each seed. */
TEST(dist, every_op) {
    uint64_t random = seed_of_run();
    int64_t done = 0;
    bool all = test_all();
    for (int i = 0; i < shard_case_count(); i++)
        if (wanted(i) && (all || test_range(&random, 0, 3) == 0))
            done += for_placements(i, all ? MANY_RUN : 1, &random, put_in_batch);
    for (int mesh = 0; mesh < MESHES; mesh++) run_batch(&batches[mesh]);
    CHECK(done > 0);
    printf("%lld placements\n", (long long)done);
}
