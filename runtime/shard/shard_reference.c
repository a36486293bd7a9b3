/* The reference interpreter for all ranks at once: they go through the nodes in step, and meet at
 * the collectives. */
#include <string.h>

#include "runtime/graph/reference.h"
#include "runtime/shard/shard.h"

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
    reference_run *runs; /* by rank */
} request;

/* The rank at `coordinate` in the group of `rank` along mesh axis i. */
static int64_t peer_of(const request *r, int64_t rank, int i, int64_t coordinate) {
    int64_t stride = 1;
    for (int inner = i + 1; inner < r->layout->count; inner++)
        stride *= r->layout->axis[inner].size;
    return rank + (coordinate - ml_layout_coordinate(r->layout, rank, i)) * stride;
}

static void combine(ml_combine how, bool is_float, reference_cell *to, reference_cell x) {
    if (how == ML_COMBINE_SUM && is_float)
        to->number += x.number;
    else if (how == ML_COMBINE_SUM)
        to->integer = (int64_t)((uint64_t)to->integer + (uint64_t)x.integer);
    else {
        bool larger = is_float ? x.number > to->number : x.integer > to->integer;
        bool smaller = is_float ? x.number < to->number : x.integer < to->integer;
        bool take = how == ML_COMBINE_MAX ? larger : smaller;
        if (take || (is_float && x.number != x.number)) *to = x;
    }
}

/* The cells of source 0 on the rank at `coordinate`. */
static const reference_cell *cells_of(const request *r, ml_ref n, int64_t rank,
                                      int64_t coordinate) {
    int i = (int)ml_graph_args(r->graph, n)[0];
    int64_t peer = peer_of(r, rank, i, coordinate);
    return r->runs[peer].values[ml_graph_source(r->graph, n, 0)].cells;
}

static void collective(const request *r, ml_ref n, int64_t rank, reference_value *out) {
    const int64_t *args = ml_graph_args(r->graph, n);
    int64_t ranks = args[1], mine = ml_layout_coordinate(r->layout, rank, (int)args[0]);
    int64_t in = ml_type_elements(ml_graph_type(r->graph, ml_graph_source(r->graph, n, 0)));
    int64_t elements = ml_type_elements(&out->type);
    ml_op op = ml_graph_node(r->graph, n)->op;
    if (op == ML_OP_SHIFT || op == ML_OP_MIRROR) {
        int64_t peer = op == ML_OP_SHIFT ? (mine + ranks - 1) % ranks : ranks - 1 - mine;
        const reference_cell *from = cells_of(r, n, rank, peer);
        memcpy(out->cells, from, sizeof *from * (size_t)elements);
        return;
    }
    for (int64_t c = 0; c < ranks; c++) {
        const reference_cell *from = cells_of(r, n, rank, c);
        int64_t chunk = in / ranks;
        if (op == ML_OP_ALL_GATHER)
            memcpy(out->cells + c * in, from, sizeof *from * (size_t)in);
        else if (op == ML_OP_ALL_TO_ALL)
            memcpy(out->cells + c * chunk, from + mine * chunk, sizeof *from * (size_t)chunk);
        else {
            if (op == ML_OP_REDUCE_SCATTER) from += mine * chunk;
            for (int64_t i = 0; i < elements; i++) {
                if (c == 0)
                    out->cells[i] = from[i];
                else
                    combine((ml_combine)args[2], reference_is_float(&out->type), &out->cells[i],
                            from[i]);
            }
        }
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
    for (ml_ref n = 1; n < ml_graph_count(r->graph); n++) {
        if (!r->runs[0].uses[n]) continue;
        bool meets = ml_ops[ml_graph_node(r->graph, n)->op].op_class == ML_CLASS_COLLECTIVE;
        for (int64_t rank = 0; rank < r->ranks; rank++) {
            if (meets)
                collective(r, n, rank, reference_begin(&r->runs[rank], n));
            else
                reference_compute(&r->runs[rank], n);
        }
        for (int64_t rank = 0; meets && rank < r->ranks; rank++)
            reference_finish(&r->runs[rank], n);
    }
    for (int64_t rank = 0; rank < r->ranks; rank++)
        for (int i = 0; i < r->count; i++)
            r->results[rank][i] = reference_result(&r->runs[rank], roots.outputs[i], r->arena);
}

void ml_shard_reference(const ml_graph *g, const ml_layout *layout, double ***states,
                        double ***inputs, const ml_ref *nodes, int count, double ***results,
                        ml_arena *arena) {
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
