/* The reference interpreter for all ranks at once: they go through the nodes in step, and meet at
 * the collectives. */
#include <string.h>

#include "runtime/graph/reference.h"
#include "runtime/ops/recurrence/loop.h"
#include "tests/shard/support.h"

typedef struct {
    const ml_graph *asked;
    const ml_layout *layout;
    double ***states, ***inputs;
    const ml_ref *nodes;
    int count;
    double ***results;
    ml_arena *arena;
    ml_graph *graph;
    ml_arena *scratch;
    int64_t ranks;
    reference_run *runs;     /* by rank */
    reference_run **current; /* by rank: of the program, or of the step of a recurrence */
} request;

/* The rank at `coordinate` in the group of `rank` along mesh axis i. */
static int64_t peer_of(const request *r, int64_t rank, int i, int64_t coordinate) {
    int64_t stride = 1;
    for (int inner = i + 1; inner < r->layout->count; inner++)
        stride *= r->layout->axis[inner].size;
    return rank + (coordinate - ml_layout_coordinate(r->layout, rank, i)) * stride;
}

static void combine(ml_combine how, bool is_float, reference_cell *to, const reference_cell *x) {
    if (how == ML_COMBINE_SUM && is_float)
        to->number += x->number;
    else if (how == ML_COMBINE_SUM)
        to->integer = (int64_t)((uint64_t)to->integer + (uint64_t)x->integer);
    else {
        bool larger = is_float ? x->number > to->number : x->integer > to->integer;
        bool smaller = is_float ? x->number < to->number : x->integer < to->integer;
        bool take = how == ML_COMBINE_MAX ? larger : smaller;
        if (take || (is_float && x->number != x->number)) *to = *x;
    }
}

/* A collective on one rank, at coordinate `mine` of `ranks`; from(c) are the operand's cells of the
 * rank at coordinate c, `in` and `out->type` its elements before and after. */
typedef struct {
    const request *r;
    const ml_graph *graph;
    ml_ref node;
    int64_t rank, mine, ranks, in, elements;
    reference_value *out;
} meeting;

static const reference_cell *from(const meeting *m, int64_t coordinate) {
    const request *r = m->r;
    int64_t peer = peer_of(r, m->rank, (int)ml_graph_args(m->graph, m->node)[0], coordinate);
    return r->current[peer]->values[ml_graph_source(m->graph, m->node, 0)].cells;
}

static void copy(const meeting *m, int64_t at, const reference_cell *cells, int64_t count) {
    memcpy(m->out->cells + at, cells, sizeof *cells * (size_t)count);
}

static void reduce_from(const meeting *m, int64_t at) {
    ml_combine how = (ml_combine)ml_graph_args(m->graph, m->node)[2];
    copy(m, 0, from(m, 0) + at, m->elements);
    for (int64_t c = 1; c < m->ranks; c++)
        for (int64_t i = 0; i < m->elements; i++)
            combine(how, reference_is_float(&m->out->type), &m->out->cells[i], &from(m, c)[at + i]);
}

static void all_reduce(const meeting *m) {
    reduce_from(m, 0);
}

static void reduce_scatter(const meeting *m) {
    reduce_from(m, m->mine * m->elements);
}

static void all_gather(const meeting *m) {
    for (int64_t c = 0; c < m->ranks; c++) copy(m, c * m->in, from(m, c), m->in);
}

static void all_to_all(const meeting *m) {
    int64_t block = m->in / m->ranks;
    for (int64_t c = 0; c < m->ranks; c++) copy(m, c * block, from(m, c) + m->mine * block, block);
}

static void shift(const meeting *m) {
    copy(m, 0, from(m, (m->mine + m->ranks - 1) % m->ranks), m->elements);
}

static void reverse(const meeting *m) {
    copy(m, 0, from(m, m->ranks - 1 - m->mine), m->elements);
}

static void collective(const request *r, ml_ref n, int64_t rank, reference_value *out) {
    const ml_graph *graph = r->current[rank]->graph;
    static void (*const entries[ML_COLLECTIVE_KINDS])(const meeting *) = {
#define ML_COLLECTIVE(ident, name, ...) [ML_COLLECTIVE_##ident] = name,
#include "runtime/graph/collectives.def"
#undef ML_COLLECTIVE
    };
    const int64_t *args = ml_graph_args(graph, n);
    const ml_type *operand = ml_graph_type(graph, ml_graph_source(graph, n, 0));
    entries[ml_collective_of(ml_graph_node(graph, n)->op)](
        &(meeting){.r = r,
                   .graph = graph,
                   .node = n,
                   .rank = rank,
                   .mine = ml_layout_coordinate(r->layout, rank, (int)args[0]),
                   .ranks = args[1],
                   .in = ml_type_elements(operand),
                   .elements = ml_type_elements(&out->type),
                   .out = out});
}

static void walk(request *r);

/* All ranks at each position of a recurrence. */
typedef struct {
    request *r;
    ml_ref node;
    reference_loop **loops; /* by rank */
} loops_call;

static void loops_run(void *argument) {
    loops_call *call = argument;
    request *r = call->r;
    reference_run **outer = r->current;
    int64_t length = 0;
    for (int64_t rank = 0; rank < r->ranks; rank++)
        call->loops[rank] = reference_loop_new(outer[rank], call->node, &length);
    for (int64_t i = 0; i < length; i++) {
        reference_run **inner = ML_NEW_ARRAY(r->scratch, reference_run *, r->ranks);
        for (int64_t rank = 0; rank < r->ranks; rank++)
            inner[rank] = reference_loop_enter(call->loops[rank], i);
        r->current = inner;
        walk(r);
        r->current = outer;
        for (int64_t rank = 0; rank < r->ranks; rank++) reference_loop_leave(call->loops[rank], i);
    }
}

static void recurrence(request *r, ml_ref n) {
    loops_call call = {r, n, ML_NEW_ARRAY(r->scratch, reference_loop *, r->ranks)};
    ml_status status = ml_protect(loops_run, &call);
    for (int64_t rank = 0; rank < r->ranks; rank++) reference_loop_free(call.loops[rank]);
    if (status != ML_OK) ml_raise_last();
}

static void walk(request *r) {
    const ml_graph *g = r->current[0]->graph;
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        if (!r->current[0]->uses[n]) continue;
        bool meets = ml_ops[ml_graph_node(g, n)->op].op_class == ML_CLASS_COLLECTIVE;
        if (ml_graph_node(g, n)->op == ML_OP_RECURRENCE) recurrence(r, n);
        for (int64_t rank = 0; rank < r->ranks; rank++) {
            if (meets)
                collective(r, n, rank, reference_begin(r->current[rank], n));
            else
                reference_compute(r->current[rank], n);
        }
        for (int64_t rank = 0; meets && rank < r->ranks; rank++)
            reference_finish(r->current[rank], n);
    }
}

static void interpret(void *argument) {
    request *r = argument;
    ml_roots roots = {.output_count = r->count};
    roots.outputs = ML_NEW_ARRAY(r->scratch, ml_ref, r->count + 1);
    for (int i = 0; i < r->count; i++) roots.outputs[i] = r->nodes[i];
    r->graph = ml_decompose(r->asked, &roots, INT64_MAX);
    r->runs = ML_NEW_ARRAY(r->scratch, reference_run, r->ranks);
    for (int64_t rank = 0; rank < r->ranks; rank++) {
        int64_t *coordinates = ML_NEW_ARRAY(r->scratch, int64_t, r->layout->count + 1);
        for (int i = 0; i < r->layout->count; i++)
            coordinates[i] = ml_layout_coordinate(r->layout, rank, i);
        r->runs[rank] = (reference_run){
            .graph = r->graph,
            .states = r->states ? (const double *const *)r->states[rank] : NULL,
            .inputs = r->inputs ? (const double *const *)r->inputs[rank] : NULL,
            .coordinates = coordinates,
            .scratch = r->scratch,
        };
        reference_start(&r->runs[rank], &roots);
    }
    r->current = ML_NEW_ARRAY(r->scratch, reference_run *, r->ranks);
    for (int64_t rank = 0; rank < r->ranks; rank++) r->current[rank] = &r->runs[rank];
    walk(r);
    for (int64_t rank = 0; rank < r->ranks; rank++)
        for (int i = 0; i < r->count; i++)
            r->results[rank][i] = reference_result(&r->runs[rank], roots.outputs[i], r->arena);
}

void shard_run_ranks(const ml_graph *g, const ml_layout *layout, double ***states, double ***inputs,
                     const ml_ref *nodes, int count, double ***results, ml_arena *arena) {
    request r = {.asked = g,
                 .layout = layout,
                 .states = states,
                 .inputs = inputs,
                 .nodes = nodes,
                 .count = count,
                 .results = results,
                 .arena = arena,
                 .ranks = ml_layout_ranks(layout),
                 .scratch = ml_arena_new()};
    if (!r.scratch) ml_raise(ML_NO_MEMORY, "no memory left for the reference interpreter");
    ml_status status = ml_protect(interpret, &r);
    for (int64_t rank = 0; r.runs && rank < r.ranks; rank++)
        if (r.runs[rank].graph) reference_end(&r.runs[rank]);
    if (r.graph) ml_graph_free(r.graph);
    ml_arena_free(r.scratch);
    if (status != ML_OK) ml_raise_last();
}
