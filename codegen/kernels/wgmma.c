/* Products by groups of rows on Hopper's warpgroup products (wgmma), for template_ragged.c.
 *
 * A block computes 128 x 256, each of two warpgroups 64 rows of it, in steps of 64 deep. Four
 * stages: copies (cp.async, so that rows may come from anywhere) run two steps ahead of the
 * products, which run one step behind what waits for them; a stage is written again only after a
 * barrier behind the wait for its products.
 *
 * Operands lie in shared memory in 128-byte lines whose 16-byte pieces are exchanged by the line's
 * number modulo 8, as wgmma's 128-byte mode expects. Depth innermost: line r holds 64 deep of row
 * r, eight lines a core matrix, a product's depth of 16 is 32 bytes of each line. Rows or columns
 * innermost: blocks of 64 columns one after another, line d of a block is its depth d, a product's
 * depth of 16 is 16 lines. */
#include "codegen/kernels/template.h"

enum { SUMS = 128, COLUMNS = 256 };

/* Between the marks: what tests replace to run without a GPU. */
static const char copies_text[] = R"(
/* WGMMA */
static __device__ __forceinline__ void ${e}_landed() { /* all copies but those of one step */
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
)";
/* In such marks too. */
const char template_wgmma_products[] = R"(
static __device__ __forceinline__ void ${e}_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_finish() { /* all products */
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_finish_but_one() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}
static __device__ __forceinline__ void ${e}_product(float (&c)[128], unsigned long long left,
                                                    unsigned long long right) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %130, 0; "
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {${registers}}, "
                 "%128, %129, p, 1, 1, ${left_flat}, ${right_flat}; }"
                 : ${sums}
                 : "l"(left), "l"(right), "r"(1));
}
)";
static const char end_text[] = R"(
/* end of WGMMA */
)";
const char template_wgmma_operand[] = R"(
/* Of an operand in shared memory; `block` bytes from one block of columns to the next. */
static __device__ __forceinline__ unsigned long long ${e}_operand(unsigned address,
                                                                  unsigned block) {
    return 1ull << 62 | 1024ull >> 4 << 32 | (unsigned long long)(block >> 4) << 16 |
           (address & 0x3ffffu) >> 4;
}
)";
static const char place_text[] = R"(
/* Where the 16-byte piece `piece` of a line goes. */
static __device__ __forceinline__ unsigned ${e}_place(int line, int piece) {
    return line * 128 + (piece ^ line % 8) * 16;
}
)";

/* The matrix of the group, or the rows of the right operand of an outer product. */
static const char dot_stage_text[] = R"(
static __device__ __forceinline__ void ${e}_stage(const long long *row_at, unsigned to,
                                                  const ml_bf16 *left, const ml_bf16 *right,
                                                  long long d, int rows, int columns,
                                                  long long depth) {
#pragma unroll
    for (int i = threadIdx.x; i < 128 * 8; i += 256) {
        int r = i / 8, c = i % 8 * 8;
        bool valid = r < rows && d + c < depth;
        ${e}_copy(to + ${e}_place(r, i % 8), left + (valid ? row_at[r] + d + c : 0),
                  valid ? 16 : 0);
    }
    to += ${left_bytes};
#pragma unroll
    for (int i = threadIdx.x; i < 256 * 8; i += 256) {
        if (${right_deep}) {
            int r = i / 8, c = i % 8 * 8;
            bool valid = r < columns && d + c < depth;
            ${e}_copy(to + ${e}_place(r, i % 8), right + (valid ? r * ${b_col} + d + c : 0),
                      valid ? 16 : 0);
        } else {
            int r = i / 32, c = i % 32 * 8;
            bool valid = d + r < depth && c < columns;
            ${e}_copy(to + c / 64 * 8192 + ${e}_place(r, i % 8),
                      right + (valid ? (d + r) * ${b_row} + c : 0), valid ? 16 : 0);
        }
    }
}
)";

/* The same rows of both; a thread's come in ascending order. */
static const char outer_stage_text[] = R"(
static __device__ __forceinline__ void ${e}_stage(${e}_walk &walk, ${e}_arguments &a, int group,
                                                  unsigned to, const ml_bf16 *left,
                                                  const ml_bf16 *right, long long d, int rows,
                                                  int columns, long long depth) {
    for (int r = threadIdx.x / 16; r < 64; r += 16) {
        bool valid = d + r < depth;
        if (valid) ${e}_seek(walk, a, group, d + r);
        long long row = d + r - walk.first + walk.start;
        const ml_bf16 *from = left + (valid ? walk.batch * ${a_batch} + row * ${a_row} : 0);
        int c = threadIdx.x % 16 * 8;
        bool in = valid && c < rows;
        ${e}_copy(to + c / 64 * 8192 + ${e}_place(r, c / 8 % 8), from + (in ? c : 0), in ? 16 : 0);
        from = right + (valid ? walk.batch * ${b_batch} + row * ${b_row} : 0);
        for (; c < 256; c += 128) {
            in = valid && c < columns;
            ${e}_copy(to + ${left_bytes} + c / 64 * 8192 + ${e}_place(r, c / 8 % 8),
                      from + (in ? c : 0), in ? 16 : 0);
        }
    }
}
)";

static const char kernel_text[] = R"(
extern "C" __global__ void __launch_bounds__(256, 1) ${e}(${e}_arguments a) {
    extern __shared__ uint4 ${e}_shared[];
    ${locate}
    unsigned stages = (${e}_address(${e}_shared) + 1023) & ~1023u;
    unsigned warpgroup = threadIdx.x / 128 * 8192;
    float sum[128] = {};
    int steps = (int)((depth + 63) / 64);
    for (int ahead = 0; ahead < 2; ahead++) {
        if (ahead < steps)
            ${e}_stage(${stage_call}, stages + ahead * ${stage_bytes}, left, right, ahead * 64LL,
                       rows, columns, depth);
        ${e}_commit();
    }
    for (int step = 0; step < steps; step++) {
        ${e}_landed();
        __syncthreads();
        unsigned lefts = stages + step % 4 * ${stage_bytes} + warpgroup;
        unsigned rights = stages + step % 4 * ${stage_bytes} + ${left_bytes};
        ${e}_begin();
#pragma unroll
        for (int k = 0; k < 4; k++)
            ${e}_product(sum, ${e}_operand(lefts + k * ${left_step}, ${left_block}),
                         ${e}_operand(rights + k * ${right_step}, ${right_block}));
        ${e}_end();
        if (step + 2 < steps)
            ${e}_stage(${stage_call}, stages + (step + 2) % 4 * ${stage_bytes}, left, right,
                       (step + 2) * 64LL, rows, columns, depth);
        ${e}_commit();
        ${e}_finish_but_one();
    }
    ${e}_finish();
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < 32; u++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = threadIdx.x / 32 * 16 + i * 8 + lane / 4, c = u * 8 + lane % 4 * 2;
            if (r >= rows || c >= columns) continue;
            ${write_pair}
        }
}
)";

/* "%0, %1, ..." and "+f"(c[0]), ... */
void template_wgmma_registers(ml_template *t) {
    ml_text registers = {.arena = t->arena}, sums = {.arena = t->arena};
    for (int i = 0; i < SUMS; i++) {
        ml_text_add(&registers, "%s%%%d", i ? ", " : "", i);
        ml_text_add(&sums, "%s\"+f\"(c[%d])", i ? ", " : "", i);
    }
    template_set_text(t, "registers", registers.text);
    template_set_text(t, "sums", sums.text);
}

ml_kernel *template_wgmma(ml_template *t, bool outer, bool right_deep, bool narrow, int pointers) {
    enum {
        LINE = 128,
        DEEP = 64,
        LEFT_BYTES = 128 * LINE,
        STAGE_BYTES = LEFT_BYTES + COLUMNS * LINE
    };
    enum { STAGES = 4, ALIGNMENT = 1024, BLOCK = DEEP * LINE, UNUSED = 16 };
    template_set_text(t, "quick", "");
    template_wgmma_registers(t);
    template_set(t, "left_flat", "%d", outer);
    template_set(t, "right_flat", "%d", !right_deep);
    template_set(t, "right_deep", "%d", right_deep);
    template_set(t, "left_step", "%d", outer ? 16 * LINE : 32);
    template_set(t, "right_step", "%d", right_deep ? 32 : 16 * LINE);
    template_set(t, "left_block", "%d", outer ? BLOCK : UNUSED);
    template_set(t, "right_block", "%d", right_deep ? UNUSED : BLOCK);
    template_set(t, "left_bytes", "%d", LEFT_BYTES);
    template_set(t, "stage_bytes", "%d", STAGE_BYTES);
    template_set_text(t, "stage_call", outer ? "walk, a, group" : "row_at");
    template_set_text(t, "out_row", outer ? "r * ${c_row}" : "out_at[r]");
    template_set_text(t, "write_pair",
                      narrow ? "*(unsigned *)(out + ${out_row} + c) = "
                               "${e}_pack(sum[u * 4 + 2 * i], sum[u * 4 + 2 * i + 1]);"
                             : "*(float2 *)(out + ${out_row} + c) = "
                               "make_float2(sum[u * 4 + 2 * i], sum[u * 4 + 2 * i + 1]);");
    const char *body =
        ml_arena_format(t->arena, "%s%s%s%s%s%s${walk}%s%s", template_mma_ptx, copies_text,
                        template_wgmma_products, end_text, template_wgmma_operand, place_text,
                        outer ? outer_stage_text : dot_stage_text, kernel_text);
    ml_kernel *kernel =
        template_kernel(t, body, outer ? "ragged_outer wgmma" : "ragged_dot wgmma", pointers);
    kernel->shared_bytes = STAGES * STAGE_BYTES + ALIGNMENT;
    return kernel;
}
