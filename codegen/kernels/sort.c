/* Sorts on CUDA of integers whose range the graph tells, for template_scan.c: nothing is compared.
 *
 * Numbers of what TOP_K or ARGMAX chose (a token's experts) are counted: a block a row, a warp a
 * part of it; each warp counts its elements of each kind, and sums over kinds and warps say where
 * they go. Elements of a kind keep their order, as a stable sort demands. Sorting the indices that
 * a SORT gave, a permutation, gives its inverse: each goes where it says. */
#include "codegen/kernels/template.h"

enum { THREADS = 1024, MOST_KINDS = 256, MOST_HELD = 32 };

static const char inverse_text[] = R"(
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    long long row = blockIdx.x / ${parts};
    int from = blockIdx.x % ${parts} * 256 + threadIdx.x;
    if (from >= ${size}) return;
    int at = ((const int *)a.p[0] + ${x_row})[from * ${stride}];
    ${e}_write(a, row, ${backwards} ? ${size} - 1 - at : at, from);
}
)";

static const char counted_text[] = R"(
static __device__ __forceinline__ unsigned ${e}_sum_before(unsigned own, unsigned *all) {
    unsigned sum = own;
    int lane = threadIdx.x % 32;
    for (int d = 1; d < 32; d *= 2) {
        unsigned other = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? other : 0;
    }
    *all = __shfl_sync(~0u, sum, 31);
    return sum - own;
}
extern "C" __global__ void __launch_bounds__(1024) ${e}(${e}_arguments a) {
    __shared__ unsigned counts[32][${kinds} + 1], first[${kinds}];
    long long row = blockIdx.x;
    const int *x = (const int *)a.p[0] + ${x_row};
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int keys[${held}]; /* a warp's elements follow one another */
#pragma unroll
    for (int j = 0; j < ${held}; j++) {
        int from = (warp * ${held} + j) * 32 + lane;
        keys[j] = from < ${size} ? x[from * ${stride}] : ${kinds};
        if (${backwards} && from < ${size}) keys[j] = ${kinds} - 1 - keys[j];
    }
    for (int i = threadIdx.x; i < 32 * (${kinds} + 1); i += 1024) (&counts[0][0])[i] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < ${held}; j++) { /* what is past the end counts as one kind more */
        unsigned same = __match_any_sync(~0u, (unsigned)keys[j]);
        if ((same & ((1u << lane) - 1)) == 0) counts[warp][keys[j]] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int kind = warp; kind < ${kinds}; kind += 32) {
        unsigned all, before = ${e}_sum_before(counts[lane][kind], &all);
        counts[lane][kind] = before;
        if (lane == 0) first[kind] = all;
    }
    __syncthreads();
    unsigned done = 0;
    for (int base = 0; warp == 0 && base < ${kinds}; base += 32) {
        int kind = base + lane;
        unsigned all, before = ${e}_sum_before(kind < ${kinds} ? first[kind] : 0, &all);
        if (kind < ${kinds}) first[kind] = done + before;
        done += all;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < ${held}; j++) {
        int from = (warp * ${held} + j) * 32 + lane;
        unsigned same = __match_any_sync(~0u, (unsigned)keys[j]);
        unsigned rank = __popc(same & ((1u << lane) - 1)), before = counts[warp][keys[j]];
        __syncwarp();
        if (rank == 0) counts[warp][keys[j]] = before + __popc(same);
        __syncwarp();
        if (from < ${size}) ${e}_write(a, row, (int)(first[keys[j]] + before + rank), from);
    }
}
)";

/* What holds the same elements at other places. */
static ml_ref unmoved(const ml_graph *g, ml_ref n) {
    for (;;) {
        switch (ml_graph_node(g, n)->op) {
        case ML_OP_PERMUTE:
        case ML_OP_RENAME:
        case ML_OP_SPLIT:
        case ML_OP_MERGE:
        case ML_OP_SLICE:
        case ML_OP_BROADCAST: n = ml_graph_source(g, n, 0); break;
        default: return n;
        }
    }
}

/* All elements are at least 0 and less than this; 0 where that is not known. */
static int64_t kinds_of(const ml_graph *g, ml_ref n) {
    n = unmoved(g, n);
    bool chosen = ml_graph_node(g, n)->op == ML_OP_OUT; /* of several: TOP_K's indices */
    if (chosen) n = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, n)->op != (chosen ? ML_OP_TOP_K : ML_OP_ARGMAX)) return 0;
    const ml_type *from = ml_graph_type(g, ml_graph_source(g, n, 0));
    return from->size[ml_type_find(from, (ml_axis)ml_graph_args(g, n)[0])];
}

/* The indices of a sort along the same axis. */
static bool is_permutation(const ml_graph *g, ml_ref n, ml_axis axis) {
    while (ml_graph_node(g, n)->op == ML_OP_PERMUTE) n = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, n)->op != ML_OP_OUT) return false;
    ml_ref sort = ml_graph_source(g, n, 0);
    return ml_graph_node(g, sort)->op == ML_OP_SORT && (ml_axis)ml_graph_args(g, sort)[0] == axis;
}

const char *template_sort_known(ml_template *t, const ml_graph *g, ml_ref sort, int64_t size,
                                template_sort_grid *grid) {
    enum { PART = 256 };
    ml_ref x = ml_graph_source(g, sort, 0);
    if (ml_graph_node(g, sort)->op != ML_OP_SORT || ml_graph_type(g, x)->dtype != ML_I32)
        return NULL;
    *grid = (template_sort_grid){(size + PART - 1) / PART, PART};
    template_set(t, "parts", "%lld", (long long)grid->blocks);
    if (is_permutation(g, x, (ml_axis)ml_graph_args(g, sort)[0])) return inverse_text;
    int64_t kinds = kinds_of(g, x), held = (size + THREADS - 1) / THREADS;
    if (kinds == 0 || kinds > MOST_KINDS || held > MOST_HELD) return NULL;
    *grid = (template_sort_grid){1, THREADS};
    template_set(t, "kinds", "%lld", (long long)kinds);
    template_set(t, "held", "%lld", (long long)held);
    return counted_text;
}
