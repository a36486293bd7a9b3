/* CUMSUM, SORT and TOP_K: each row (all axes but one) on its own.
 *
 * Sorting moves keys: unsigned integers whose order is that of the elements (NaN last) with the
 * element's position in the low bits, so that any sorting network is stable; descending order
 * inverts the element's bits. Elements of 8 bytes sort pairs of key and position. Values are
 * fetched from the input by position at the end.
 *
 * CPU: merge sort, insertion for a small TOP_K. CUDA: bitonic sort of a row in shared memory, or
 * for long rows of tiles of it, with exchanges between tiles in memory (template_sort.c where the
 * elements are known); a warp a row, or a block a row, finds the largest k times over for a small
 * TOP_K. */
#include <string.h>

#include "codegen/kernels/template.h"

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    ml_op op;
    int64_t rows, size, kept; /* kept: elements written by row */
    int64_t stride;           /* of the input along the axis */
    bool wide;                /* 8-byte elements: keys are pairs */
    bool backwards;           /* CUMSUM from the end; SORT descending */
} printer;

enum {
    STACK_KEYS = 2048,  /* CPU: longer rows sort in a workspace */
    INSERTED = 64,      /* CPU: a TOP_K up to this is kept by insertion */
    SHARED_KEYS = 4096, /* CUDA: longer rows sort in memory */
    WARP_ROW = 1024,    /* CUDA: TOP_K by a warp up to this row length .. */
    WARP_KEPT = 32,     /* .. and this k */
    BLOCK_KEPT = 64,    /* CUDA: TOP_K by a block up to this k */
    LANES = 64,         /* CPU cumsum: rows side by side where they are adjacent */
    LONG_SUMS = 256,    /* cumsum: f32 running sums of more elements are kept in higher precision */
};

static int64_t stride_along(const ml_value *v, ml_axis axis) {
    return v->stride[ml_type_find(&v->type, axis)];
}

/* Row loops of an operand, in the order of the input's axes. */
static ml_template_loops row_loops(const ml_value *v, const ml_value *x, ml_axis axis) {
    ml_template_loops loops = {0};
    for (int i = 0; i < x->type.rank; i++)
        if (x->type.axis[i] != axis)
            template_loop_add(&loops, x->type.size[i], stride_along(v, x->type.axis[i]));
    return loops;
}

static const char *row_offset(printer *p, const ml_value *v, const ml_value *x, ml_axis axis) {
    ml_template_loops loops = row_loops(v, x, axis);
    return template_offset(p->text.arena, &loops, "row");
}

/* How many consecutive rows are sure to lie side by side. */
static int64_t adjacent_rows(const ml_value *v, const ml_value *x, ml_axis axis, int64_t most) {
    ml_template_loops loops = row_loops(v, x, axis);
    int last = loops.count - 1;
    if (last < 0 || loops.stride[last] != 1) return 1;
    while (loops.size[last] % most != 0) most /= 2;
    return most;
}

/* Outputs: values and i32 indices of SORT and TOP_K; either may be absent. */
static void set_outputs(printer *p, const ml_value *x, ml_axis axis, ml_axis out_axis) {
    ml_template *t = &p->text;
    template_set_text(t, "put_value", "");
    template_set_text(t, "put_index", "");
    for (int i = 0; i < p->step->write_count; i++) {
        const ml_value *y = template_value(p->schedule, p->step, p->step->read_count + i);
        bool indices =
            i == 1 || (y->node && ml_graph_node(p->schedule->graph, y->node)->op == ML_OP_OUT);
        template_set_text(t, indices ? "put_index" : "put_value",
                          ml_arena_format(t->arena, "((%s *)${p}[%d])[%s + at * %lldLL] = %s;",
                                          emit_memory_type((ml_dtype)y->type.dtype),
                                          p->step->read_count + i, row_offset(p, y, x, axis),
                                          (long long)stride_along(y, out_axis),
                                          indices ? "from" : "x[from * ${stride}]"));
    }
}

static void begin(printer *p, ml_schedule *s, ml_step *step) {
    *p = (printer){.schedule = s, .step = step, .text = template_begin(s)};
    ml_template *t = &p->text;
    const int64_t *args = ml_graph_args(s->graph, step->node);
    const ml_value *x = template_value(s, step, 0);
    ml_axis axis = (ml_axis)args[0];
    p->op = (ml_op)ml_graph_node(s->graph, step->node)->op;
    p->size = x->type.size[ml_type_find(&x->type, axis)];
    p->rows = ml_type_elements(&x->type) / p->size;
    p->kept = p->op == ML_OP_TOP_K ? args[1] : p->size;
    p->stride = stride_along(x, axis);
    p->backwards = p->op == ML_OP_TOP_K || args[1] != 0;
    ml_dtype dtype = (ml_dtype)x->type.dtype;
    p->wide = ml_dtypes[dtype].bytes == 8;
    bool is_float = ml_dtypes[dtype].kind == ML_KIND_FLOAT;
    template_set_text(t, "p", s->target->kind == ML_TARGET_CUDA ? "a.p" : "p");
    template_set(t, "pointers", "%d", step->read_count + step->write_count);
    template_set(t, "rows", "%lldLL", (long long)p->rows);
    template_set(t, "size", "%lld", (long long)p->size);
    template_set(t, "kept", "%lld", (long long)p->kept);
    template_set(t, "stride", "%lldLL", (long long)p->stride);
    template_set(t, "backwards", "%d", p->backwards);
    template_set_text(t, "memory", emit_memory_type(dtype));
    template_set_text(t, "real", emit_compute_type(dtype));
    const char *adder = dtype == ML_I64 ? "unsigned long long" : "unsigned";
    template_set_text(t, "adder", is_float ? emit_compute_type(dtype) : adder);
    template_set_text(t, "load", dtype == ML_BF16 ? "ml_load_bf16" : "");
    template_set_text(t, "store", dtype == ML_BF16 ? "ml_store_bf16" : "");
    template_set_text(t, "x_row", row_offset(p, x, x, axis));
    template_set_text(t, "flip", p->backwards ? "~" : "");
    if (p->op == ML_OP_CUMSUM) {
        const ml_value *y = template_value(s, step, 1);
        template_set_text(t, "y_row", row_offset(p, y, x, axis));
        template_set(t, "y_stride", "%lldLL", (long long)stride_along(y, axis));
        return;
    }
    set_outputs(p, x, axis, p->op == ML_OP_TOP_K ? (ml_axis)args[2] : axis);
    /* A float's bits in order: negative numbers inverted, others above them; -0 is 0. */
    const char *orders[] = {"(unsigned)(value) ^ 0x80000000u", "${e}_order(value)"};
    const char *wide_orders[] = {"(unsigned long long)(value) ^ 0x8000000000000000ull",
                                 "${e}_order(value)"};
    template_set_text(t, "ordered", p->wide ? wide_orders[is_float] : orders[is_float]);
    template_set_text(t, "bits", p->wide ? "unsigned long long" : "unsigned");
    template_set_text(t, "integer", p->wide ? "long long" : "int");
    template_set_text(t, "float", p->wide ? "double" : "float");
    template_set_text(t, "top", p->wide ? "0x8000000000000000ull" : "0x80000000u");
}

/* ${e}_key: what is sorted, ascending; ${e}_from: the position that it came from. */
static const char key_text[] = R"(
${inline} ${bits} ${e}_order(${float} x) {
    union { ${float} number; ${integer} signed_bits; ${bits} bits; } u;
    if (x != x) return ~(${bits})0;
    if (x == 0) return ${top};
    u.number = x;
    return u.bits & ${top} ? ~u.bits : u.bits | ${top};
}
)";

static const char narrow_key_text[] = R"(
typedef unsigned long long ${e}_key;
${inline} ${e}_key ${e}_make(${real} value, unsigned from) {
    unsigned order = ${flip}(${ordered});
    return (unsigned long long)order << 32 | from;
}
${inline} int ${e}_before(${e}_key a, ${e}_key b) { return a < b; }
${inline} unsigned ${e}_from(${e}_key a) { return (unsigned)a; }
${inline} ${e}_key ${e}_last(void) { return ~0ull; }
)";

static const char wide_key_text[] = R"(
typedef struct { unsigned long long order; unsigned from; } ${e}_key;
${inline} ${e}_key ${e}_make(${real} value, unsigned from) {
    ${e}_key key;
    key.order = ${flip}(${ordered});
    key.from = from;
    return key;
}
${inline} int ${e}_before(${e}_key a, ${e}_key b) {
    return a.order < b.order || (a.order == b.order && a.from < b.from);
}
${inline} unsigned ${e}_from(${e}_key a) { return a.from; }
${inline} ${e}_key ${e}_last(void) {
    ${e}_key key;
    key.order = ~0ull;
    key.from = ~0u;
    return key;
}
)";

static ml_kernel *finish(printer *p, const char *const *bodies, int count, const char *label) {
    return template_kernel_of(&p->text, bodies, count, label,
                              p->step->read_count + p->step->write_count);
}

/* ---- CPU ---- */

static const char cumsum_text[] = R"(
void ${e}(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        const ${memory} *x = (const ${memory} *)p[0];
        ${memory} *y = (${memory} *)p[1];
        long long row = unit * ${lanes};
        ${adder} sum[${lanes}] = {0};
        x += ${x_row};
        y += ${y_row};
        for (long long step = 0; step < ${size}; step++) {
            long long at = ${backwards} ? ${size} - 1 - step : step;
#pragma GCC ivdep
            for (long long i = 0; i < ${lanes}; i++) {
                sum[i] += (${adder})${load}(x[i + at * ${stride}]);
                y[i + at * ${y_stride}] = ${store}((${real})sum[i]);
            }
        }
    }
}
)";

/* Bottom-up merge sort between keys and spare; the result ends in `keys`. */
static const char merge_text[] = R"(
static ${e}_key *${e}_sort(${e}_key *keys, ${e}_key *spare) {
    for (long long i = 1; i < ${size}; i++) { /* runs of 8 by insertion */
        ${e}_key key = keys[i];
        long long at = i, least = i / 8 * 8;
        for (; at > least && ${e}_before(key, keys[at - 1]); at--) keys[at] = keys[at - 1];
        keys[at] = key;
    }
    for (long long width = 8; width < ${size}; width *= 2) {
        for (long long start = 0; start < ${size}; start += 2 * width) {
            long long i = start, middle = start + width < ${size} ? start + width : ${size};
            long long j = middle, stop = middle + width < ${size} ? middle + width : ${size};
            for (long long at = start; at < stop; at++) {
                int left = i < middle && (j >= stop || !${e}_before(keys[j], keys[i]));
                spare[at] = left ? keys[i] : keys[j];
                i += left, j += !left;
            }
        }
        ${e}_key *swap = keys;
        keys = spare, spare = swap;
    }
    return keys;
}
void ${e}(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long row = begin; row < end; row++) {
        const ${memory} *x = (const ${memory} *)p[0] + ${x_row};
        ${e}_key ${scratch};
        for (long long i = 0; i < ${size}; i++)
            keys[i] = ${e}_make(${load}(x[i * ${stride}]), (unsigned)i);
        ${e}_key *sorted = ${e}_sort(keys, spare);
        for (long long at = 0; at < ${kept}; at++) {
            int from = (int)${e}_from(sorted[at]);
            ${put_value}
            ${put_index}
        }
    }
}
)";

static const char insert_text[] = R"(
void ${e}(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long row = begin; row < end; row++) {
        const ${memory} *x = (const ${memory} *)p[0] + ${x_row};
        ${e}_key best[${kept}];
        int held = 0;
        for (long long i = 0; i < ${size}; i++) {
            ${e}_key key = ${e}_make(${load}(x[i * ${stride}]), (unsigned)i);
            if (held == ${kept} && !${e}_before(key, best[${kept} - 1])) continue;
            int at = held < ${kept} ? held++ : ${kept} - 1;
            for (; at > 0 && ${e}_before(key, best[at - 1]); at--) best[at] = best[at - 1];
            best[at] = key;
        }
        for (long long at = 0; at < ${kept}; at++) {
            int from = (int)${e}_from(best[at]);
            ${put_value}
            ${put_index}
        }
    }
}
)";

/* Whether running sums would lose digits in f32. */
static bool is_long_sum(const printer *p) {
    const ml_value *x = template_value(p->schedule, p->step, 0);
    return p->size > LONG_SUMS && strcmp(ml_suffix(x->type.dtype), "f32") == 0;
}

static void cumsum_cpu(printer *p) {
    const ml_value *x = template_value(p->schedule, p->step, 0);
    if (is_long_sum(p)) template_set_text(&p->text, "adder", "double");
    const ml_value *y = template_value(p->schedule, p->step, 1);
    ml_axis axis = (ml_axis)ml_graph_args(p->schedule->graph, p->step->node)[0];
    int64_t lanes = adjacent_rows(x, x, axis, LANES); /* rows summed side by side */
    lanes = adjacent_rows(y, x, axis, lanes);
    template_set(&p->text, "lanes", "%lld", (long long)lanes);
    const char *const bodies[] = {cumsum_text};
    p->step->kernel = finish(p, bodies, 1, "cumsum");
    p->step->kernel->units = p->rows / lanes;
    p->step->kernel->grain = 1 + 30000 / (p->size * lanes);
}

static void sort_cpu(printer *p) {
    ml_template *t = &p->text;
    template_set_text(t, "inline", "static inline __attribute__((unused))");
    const char *keys = p->wide ? wide_key_text : narrow_key_text;
    bool insert = p->op == ML_OP_TOP_K && p->kept <= INSERTED;
    if (!insert && p->size > STACK_KEYS) {
        int at =
            template_workspace(p->schedule, p->step, ML_I64, p->rows * p->size * (p->wide ? 4 : 2));
        template_set(t, "scratch",
                     "*keys = (${e}_key *)p[%d] + row * 2 * ${size}, *spare = keys + ${size}", at);
    } else
        template_set_text(t, "scratch", "keys[${size}], spare[${size}]");
    const char *const bodies[] = {key_text, keys, insert ? insert_text : merge_text};
    p->step->kernel = finish(p, bodies, 3, p->op == ML_OP_SORT ? "sort" : "top_k");
    p->step->kernel->units = p->rows;
    p->step->kernel->grain = 1 + 5000 / p->size;
}

/* ---- CUDA ---- */

static const char cuda_arguments_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; };
)";

/* A block a row: sums of 1024 elements at a time by warps, with a carry. */
static const char cumsum_block_text[] = R"(
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    __shared__ ${adder} warps[8];
    long long row = blockIdx.x;
    const ${memory} *x = (const ${memory} *)a.p[0] + ${x_row};
    ${memory} *y = (${memory} *)a.p[1] + ${y_row};
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    ${adder} before = 0${lost};
    for (long long start = 0; start < ${size}; start += 256) {
        long long i = start + threadIdx.x, at = ${backwards} ? ${size} - 1 - i : i;
        ${adder} sum = i < ${size} ? (${adder})${load}(x[at * ${stride}]) : (${adder})0;
        for (int d = 1; d < 32; d *= 2) {
            ${adder} other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) warps[warp] = sum;
        __syncthreads();
        ${adder} below = ${below};
        for (int w = 0; w < 8; w++) {
            if (w < warp) below += warps[w];
            ${carry} += warps[w];
        }
        if (i < ${size}) y[at * ${y_stride}] = ${store}((${real})(${value}));
        ${carry_on}__syncthreads();
    }
}
)";

/* A thread a row, where neighbouring rows lie side by side. */
static const char cumsum_thread_text[] = R"(
extern "C" __global__ void __launch_bounds__(128) ${e}(${e}_arguments a) {
    long long row = blockIdx.x * 128LL + threadIdx.x;
    if (row >= ${rows}) return;
    const ${memory} *x = (const ${memory} *)a.p[0] + ${x_row};
    ${memory} *y = (${memory} *)a.p[1] + ${y_row};
    ${adder} sum = 0${lost};
#pragma unroll 8
    for (long long i = 0; i < ${size}; i++) {
        long long at = ${backwards} ? ${size} - 1 - i : i;
        ${take} (${adder})${load}(x[at * ${stride}]);
        ${carry_on}y[at * ${y_stride}] = ${store}((${real})${value});
    }
}
)";

static const char write_text[] = R"(
static __device__ __forceinline__ void ${e}_write(const ${e}_arguments &a, long long row, int at,
                                                  int from) {
    const ${memory} *x = (const ${memory} *)a.p[0] + ${x_row};
    (void)x;
    ${put_value}
    ${put_index}
}
)";

/* Bitonic sort of rows of ${padded} keys in shared memory, ${block_rows} rows a block. */
static const char bitonic_text[] = R"(
extern "C" __global__ void __launch_bounds__(${threads}) ${e}(${e}_arguments a) {
    __shared__ ${e}_key keys[${block_rows} * ${padded}];
    long long first = blockIdx.x * ${block_rows}LL;
    for (int i = threadIdx.x; i < ${block_rows} * ${padded}; i += ${threads}) {
        long long row = first + i / ${padded};
        int at = i % ${padded};
        keys[i] = ${e}_last();
        if (row < ${rows} && at < ${size})
            keys[i] = ${e}_make(
                ${load}(((const ${memory} *)a.p[0] + ${x_row})[at * ${stride}]), at);
    }
    __syncthreads();
    for (int width = 2; width <= ${padded}; width *= 2)
        for (int apart = width / 2; apart > 0; apart /= 2) {
            for (int i = threadIdx.x; i < ${block_rows} * ${padded} / 2; i += ${threads}) {
                int low = i / apart * 2 * apart + i % apart, high = low + apart;
                bool up = (low & width & (${padded} - 1)) == 0;
                ${e}_key left = keys[low], right = keys[high];
                if (${e}_before(right, left) == up) keys[low] = right, keys[high] = left;
            }
            __syncthreads();
        }
    for (int i = threadIdx.x; i < ${block_rows} * ${kept}; i += ${threads}) {
        long long row = first + i / ${kept};
        int at = i % ${kept};
        int from = (int)${e}_from(keys[i / ${kept} * ${padded} + at]);
        if (row < ${rows}) ${e}_write(a, row, at, from);
    }
}
)";

/* Long rows: keys in memory, of which a block sorts or merges a tile of ${tile} in shared memory.
 * s[0] .. s[1]: widths of the bitonic network whose exchanges within a tile are made; width 2 makes
 * the keys first, the last width writes the results. */
static const char long_arguments_text[] = R"(
struct ${e}_arguments { char *p[${pointers}]; long long s[3]; };
)";
static const char long_tile_text[] = R"(
enum { ${e}_own = ${tile} / 1024 }; /* keys of a thread, neighbours, in registers */
/* The lesser or the greater of `key` and `other`: `least` of them. */
static __device__ __forceinline__ void ${e}_keep(${e}_key &key, ${e}_key other, bool least) {
    if (${e}_before(other, key) == least) key = other;
}
extern "C" __global__ void __launch_bounds__(1024) ${e}(${e}_arguments a) {
    __shared__ ${e}_key shared[${tile}];
    const int own = ${e}_own;
    long long first = blockIdx.x * ${tile}LL, row = first / ${padded};
    int thread = threadIdx.x, start = (int)(first % ${padded}) + thread * own;
    ${e}_key *all = (${e}_key *)a.p[${keys}] + first + thread * own, keys[own];
#pragma unroll
    for (int j = 0; j < own; j++) {
        if (a.s[0] > 2) keys[j] = all[j];
        else if (start + j >= ${size}) keys[j] = ${e}_last();
        else
            keys[j] = ${e}_make(
                ${load}(((const ${memory} *)a.p[0] + ${x_row})[(start + j) * ${stride}]),
                start + j);
    }
    for (int width = (int)a.s[0]; width <= (int)a.s[1]; width *= 2) {
        int apart = (width < ${tile} ? width : ${tile}) / 2;
        bool up = (start & width & (${padded} - 1)) == 0; /* of all of them from width 2 own on */
        for (; apart >= 32 * own; apart /= 2) {
            __syncthreads();
#pragma unroll
            for (int j = 0; j < own; j++) shared[j * 1024 + thread] = keys[j];
            __syncthreads();
#pragma unroll
            for (int j = 0; j < own; j++)
                ${e}_keep(keys[j], shared[j * 1024 + (thread ^ (apart / own))],
                          ((thread & (apart / own)) == 0) == up);
        }
        for (; apart >= own; apart /= 2)
#pragma unroll
            for (int j = 0; j < own; j++)
                ${e}_keep(keys[j], ${e}_shuffle(keys[j], apart / own),
                          ((thread & (apart / own)) == 0) == up);
#pragma unroll
        for (int half = own / 2; half > 0; half /= 2)
#pragma unroll
            for (int j = 0; j < own; j++) {
                if ((j & half) || half * 2 > width) continue;
                bool rises = ((start + j) & width & (${padded} - 1)) == 0;
                ${e}_key left = keys[j], right = keys[j + half];
                if (${e}_before(right, left) == rises) keys[j] = right, keys[j + half] = left;
            }
    }
#pragma unroll
    for (int j = 0; j < own; j++) {
        if (a.s[1] < ${padded}) all[j] = keys[j];
        else if (start + j < ${kept}) ${e}_write(a, row, start + j, (int)${e}_from(keys[j]));
    }
}
)";
/* Exchanges of width s[0] between tiles: of N keys that lie s[1] apart all that this width makes.
 */
static const char long_exchange_text[] = R"(
template <int N> static __device__ __forceinline__ void ${e}_exchange(const ${e}_arguments &a) {
    long long i = blockIdx.x * 256LL + threadIdx.x, apart = a.s[1];
    if (i >= ${rows} * (${padded} / N)) return;
    long long first = (i - (i & (apart - 1))) * N + (i & (apart - 1));
    bool up = (first & a.s[0] & (${padded}LL - 1)) == 0;
    ${e}_key *keys = (${e}_key *)a.p[${keys}] + first, held[N];
#pragma unroll
    for (int j = 0; j < N; j++) held[j] = keys[j * apart];
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2)
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (j & half) continue;
            ${e}_key left = held[j], right = held[j + half];
            if (${e}_before(right, left) == up) held[j] = right, held[j + half] = left;
        }
#pragma unroll
    for (int j = 0; j < N; j++) keys[j * apart] = held[j];
}
extern "C" __global__ void __launch_bounds__(256) ${e}(${e}_arguments a) {
    if (a.s[2] == 2) ${e}_exchange<2>(a);
    else if (a.s[2] == 4) ${e}_exchange<4>(a);
    else ${e}_exchange<8>(a);
}
)";

/* TOP_K by a warp a row: every lane holds ${held} keys; the first of all is taken k times. */
static const char top_warp_text[] = R"(
extern "C" __global__ void __launch_bounds__(128) ${e}(${e}_arguments a) {
    long long row = blockIdx.x * 4LL + threadIdx.x / 32;
    int lane = threadIdx.x & 31;
    if (row >= ${rows}) return;
    const ${memory} *x = (const ${memory} *)a.p[0] + ${x_row};
    ${e}_key held[${held}];
#pragma unroll
    for (int i = 0; i < ${held}; i++) {
        int at = i * 32 + lane;
        held[i] = at < ${size} ? ${e}_make(${load}(x[at * ${stride}]), at) : ${e}_last();
    }
    int mine = 0;
    for (int at = 0; at < ${kept}; at++) {
        ${e}_key best = held[0];
#pragma unroll
        for (int i = 1; i < ${held}; i++)
            if (${e}_before(held[i], best)) best = held[i];
        best = ${e}_least(best);
        if (lane == at) mine = (int)${e}_from(best);
#pragma unroll
        for (int i = 0; i < ${held}; i++)
            if (${e}_from(held[i]) == ${e}_from(best)) held[i] = ${e}_last();
    }
    if (lane < ${kept}) ${e}_write(a, row, lane, mine);
}
)";

/* TOP_K by a block a row: k passes, each for the first key behind the one before. */
static const char top_block_text[] = R"(
extern "C" __global__ void __launch_bounds__(512) ${e}(${e}_arguments a) {
    __shared__ ${e}_key warps[16];
    long long row = blockIdx.x;
    const ${memory} *x = (const ${memory} *)a.p[0] + ${x_row};
    ${e}_key taken = ${e}_last();
    for (int at = 0; at < ${kept}; at++) {
        ${e}_key best = ${e}_last();
        for (int i = threadIdx.x; i < ${size}; i += 512) {
            ${e}_key key = ${e}_make(${load}(x[i * ${stride}]), i);
            if ((at == 0 || ${e}_before(taken, key)) && ${e}_before(key, best)) best = key;
        }
        best = ${e}_least(best);
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
        __syncthreads();
        for (int w = 0; w < 16; w++)
            if (${e}_before(warps[w], best)) best = warps[w];
        __syncthreads();
        taken = best;
        if (threadIdx.x == 0) ${e}_write(a, row, at, (int)${e}_from(best));
    }
}
)";

static const char narrow_least_text[] = R"(
static __device__ __forceinline__ ${e}_key ${e}_shuffle(${e}_key key, int lanes) {
    return __shfl_xor_sync(~0u, key, lanes);
}
static __device__ __forceinline__ ${e}_key ${e}_least(${e}_key key) {
    for (int d = 16; d > 0; d /= 2) {
        ${e}_key other = ${e}_shuffle(key, d);
        if (other < key) key = other;
    }
    return key;
}
)";
static const char wide_least_text[] = R"(
static __device__ __forceinline__ ${e}_key ${e}_shuffle(${e}_key key, int lanes) {
    ${e}_key other;
    other.order = __shfl_xor_sync(~0u, key.order, lanes);
    other.from = __shfl_xor_sync(~0u, key.from, lanes);
    return other;
}
static __device__ __forceinline__ ${e}_key ${e}_least(${e}_key key) {
    for (int d = 16; d > 0; d /= 2) {
        ${e}_key other = ${e}_shuffle(key, d);
        if (${e}_before(other, key)) key = other;
    }
    return key;
}
)";

static int64_t power_of_two(int64_t n) {
    int64_t power = 1;
    while (power < n) power *= 2;
    return power;
}

/* A long sum keeps what it loses to rounding (Knuth's two-sum), until it is infinite. */
#define NEXT_SUM(sum)                                                                              \
    "const float next = " sum " + total, part = next - " sum "; "                                  \
    "lost += (" sum " - (next - part)) + (total - part); " sum " = next; "
#define LOST "(lost - lost == 0 ? lost : 0.0f)"

static void cumsum_cuda(printer *p) {
    const ml_value *x = template_value(p->schedule, p->step, 0);
    ml_axis axis = (ml_axis)ml_graph_args(p->schedule->graph, p->step->node)[0];
    bool aside =
        p->size <= 32 || (p->stride != 1 && p->rows >= 4096 && adjacent_rows(x, x, axis, 32) == 32);
    bool keeps = is_long_sum(p);
    const char *value = aside ? "sum" : "below + sum";
    const char *kept_value = aside ? "(sum + " LOST ")" : "before + (below + sum)";
    template_set_text(&p->text, "lost", keeps ? ", lost = 0" : "");
    template_set_text(&p->text, "below", keeps ? LOST ", total = 0" : "before");
    template_set_text(&p->text, "carry", keeps ? "total" : "before");
    template_set_text(&p->text, "take", keeps ? "const float total =" : "sum +=");
    template_set_text(&p->text, "value", keeps ? kept_value : value);
    const char *next = aside ? NEXT_SUM("sum") : NEXT_SUM("before");
    template_set_text(&p->text, "carry_on", keeps ? next : "");
    const char *const bodies[] = {cuda_arguments_text,
                                  aside ? cumsum_thread_text : cumsum_block_text};
    p->step->kernel = finish(p, bodies, 2, "cumsum");
    if (aside)
        template_launch(p->step->kernel, (p->rows + 127) / 128, 1, 1, 128, 0);
    else
        template_launch(p->step->kernel, p->rows, 1, 1, 256, 0);
}

/* Append a launch of `kernel` with scalars of its own to a chain. */
static ml_kernel **add_launch(printer *p, ml_kernel **at, const ml_kernel *kernel, int64_t blocks,
                              uint32_t threads, int64_t width, int64_t second, int64_t third) {
    *at = ML_NEW(p->text.arena, ml_kernel);
    **at = *kernel;
    template_launch(*at, blocks, 1, 1, threads, 0);
    (*at)->scalar[0] = width, (*at)->scalar[1] = second, (*at)->scalar[2] = third;
    return &(*at)->next;
}

static void sort_long(printer *p, const char *keys_text, const char *least_text) {
    int64_t padded = power_of_two(p->size), all = p->rows * padded;
    int64_t tile = p->wide ? SHARED_KEYS / 2 : SHARED_KEYS;
    int keys = template_workspace(p->schedule, p->step, ML_I64, all * (p->wide ? 2 : 1));
    template_set(&p->text, "keys", "%d", keys);
    template_set(&p->text, "padded", "%lld", (long long)padded);
    template_set(&p->text, "tile", "%lld", (long long)tile);
    template_set(&p->text, "pointers", "%d", p->step->read_count + p->step->write_count);
    const char *const tiles[] = {long_arguments_text, key_text,   keys_text,
                                 least_text,          write_text, long_tile_text};
    const char *const exchanges[] = {long_arguments_text, key_text, keys_text, long_exchange_text};
    ml_kernel *sort = finish(p, tiles, 6, "sort keys"), **at = &p->step->kernel;
    ml_kernel *exchange = finish(p, exchanges, 4, "sort exchange");
    sort->scalar_count = exchange->scalar_count = 3;
    at = add_launch(p, at, sort, all / tile, 1024, 2, tile, 0);
    for (int64_t width = 2 * tile; width <= padded; width *= 2) {
        for (int64_t span = width; span > tile;) {
            int64_t together = span / tile < 8 ? span / tile : 8;
            span /= together;
            at = add_launch(p, at, exchange, (all / together + 255) / 256, 256, width, span,
                            together);
        }
        at = add_launch(p, at, sort, all / tile, 1024, width, width, 0);
    }
}

static void sort_cuda(printer *p) {
    ml_template *t = &p->text;
    template_set_text(t, "inline", "static __device__ __forceinline__");
    const char *keys = p->wide ? wide_key_text : narrow_key_text;
    const char *least = p->wide ? wide_least_text : narrow_least_text;
    const char *label = p->op == ML_OP_SORT ? "sort" : "top_k", *body = NULL;
    int64_t padded = power_of_two(p->size), grid = p->rows;
    uint32_t threads = 512;
    bool top = p->op == ML_OP_TOP_K;
    template_sort_grid known;
    const char *counted =
        template_sort_known(t, p->schedule->graph, p->step->node, p->size, &known);
    if (counted) {
        body = counted, keys = least = "", grid = p->rows * known.blocks, threads = known.threads;
    } else if (top && p->kept <= WARP_KEPT && p->size <= WARP_ROW) {
        body = top_warp_text, threads = 128, grid = (p->rows + 3) / 4;
        template_set(t, "held", "%lld", (long long)(p->size + 31) / 32);
    } else if (top && p->kept <= BLOCK_KEPT) {
        body = top_block_text;
    } else if (p->size > (p->wide ? SHARED_KEYS / 2 : SHARED_KEYS)) {
        sort_long(p, keys, least);
        return;
    } else {
        int64_t block_rows = padded >= 512 ? 1 : 512 / padded;
        threads = padded >= 2048 ? 1024 : 256;
        body = bitonic_text, least = "", grid = (p->rows + block_rows - 1) / block_rows;
        template_set(t, "padded", "%lld", (long long)padded);
        template_set(t, "block_rows", "%lld", (long long)block_rows);
        template_set(t, "threads", "%u", threads);
    }
    const char *const bodies[] = {
        cuda_arguments_text, counted ? "" : key_text, keys, least, write_text, body};
    p->step->kernel = finish(p, bodies, 6, label);
    template_launch(p->step->kernel, grid, 1, 1, threads, 0);
}

void ml_template_scan(ml_schedule *s, ml_step *step) {
    printer p;
    begin(&p, s, step);
    bool cuda = s->target->kind == ML_TARGET_CUDA;
    if (p.op == ML_OP_CUMSUM)
        (cuda ? cumsum_cuda : cumsum_cpu)(&p);
    else
        (cuda ? sort_cuda : sort_cpu)(&p);
}
