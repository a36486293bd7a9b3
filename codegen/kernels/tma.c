/* Products by groups of rows on Hopper's copy engine: tensor maps, and launch, of
 * cuda/ragged_tma.cu, for ragged.c. */
#include "codegen/kernels/template.h"

enum { HEIGHTS = 7 }; /* of boxes: 64, 32, ... 1 lines */
enum { ROWS = 128, COLUMNS = 256, DEEP = 64, SLOTS = 4, THREADS = 384, CLUSTER = 2 };
enum { BOX_BYTES = DEEP * 128, SLOT_BYTES = (ROWS + COLUMNS) / DEEP * BOX_BYTES };

static int64_t round_up(int64_t size) {
    return (size + 7) / 8 * 8;
}

/* Boxes of 64 columns and some rows of [depth][row][column], columns contiguous. */
static ml_tensor_map map_of(int pointer, const int64_t size[3], const int64_t stride[3], int rows) {
    ml_tensor_map map = {.pointer = pointer,
                         .dtype = ML_BF16,
                         .rank = 3,
                         .box = {DEEP, rows, 1},
                         .swizzle = DEEP * 2};
    for (int i = 0; i < 3; i++) {
        map.size[i] = size[i];
        /* an axis of one element has any stride, but it must be one that a map may have */
        map.stride[i] = size[i] > 1 ? stride[i] : i ? round_up(size[0]) : 1;
    }
    return map;
}

/* One for each height of boxes of rows; the right operand of an outer product has rows too. */
static void add_maps(ml_template *t, ml_kernel *kernel, const ml_ragged *r) {
    int64_t left[3] = {r->k, r->rows, r->batch}, left_stride[3] = {1, r->a_row, r->a_batch};
    int64_t right[3] = {r->n, r->rows, r->batch}, right_stride[3] = {1, r->b_row, r->b_batch};
    bool deep = !r->outer && r->b_col != 1;
    if (!r->outer) {
        right[0] = deep ? r->k : r->n, right[1] = deep ? r->n : r->k, right[2] = r->groups;
        right_stride[1] = deep ? r->b_col : r->b_row, right_stride[2] = r->b_group;
    }
    kernel->map_count = r->outer ? 2 * HEIGHTS : HEIGHTS + 1;
    ml_tensor_map *map = ML_NEW_ARRAY(t->arena, ml_tensor_map, kernel->map_count);
    kernel->maps = map;
    for (int i = 0; i < kernel->map_count; i++)
        map[i] = i < HEIGHTS ? map_of(0, left, left_stride, DEEP >> i)
                             : map_of(1, right, right_stride, DEEP >> (i - HEIGHTS));
}

bool template_tma_serves(const ml_ragged *r) {
    enum { SEGMENTS = 2048, GROUPS = 1024, WIDE_BF16 = 8, WIDE_F32 = 4 };
    int64_t wide = r->c_dtype == ML_BF16 ? WIDE_BF16 : WIDE_F32;
    if (r->groups > GROUPS || r->groups * r->batch > SEGMENTS) return false;
    if (r->a_row <= 0 || r->b_row <= 0 || r->b_col <= 0) return false;
    if (r->gated && (r->s_col != 1 || r->s_row % wide || r->s_batch % wide)) return false;
    return r->c_row % wide == 0 && r->c_group % wide == 0 && r->c_batch % wide == 0;
}

ml_kernel *template_tma(ml_template *t, const ml_ragged *r, int multiprocessors, int pointers) {
    enum { ALIGNMENT = 1024, H200 = 132, BAND = 8 };
    template_set(t, "MAPS", "%d", r->outer ? 2 * HEIGHTS : HEIGHTS + 1);
    template_set(t, "SLOTS", "%d", SLOTS);
    template_set(t, "SLOT_BYTES", "%d", SLOT_BYTES);
    template_set(t, "BAND", "%d", BAND);
    template_set(t, "WIDE", "%d", r->c_dtype == ML_BF16 ? 8 : 4);
    ml_kernel *kernel = template_file(t, "ragged_tma.cu",
                                      r->outer ? "ragged_outer tma" : "ragged_dot tma", pointers);
    add_maps(t, kernel, r);
    int blocks = (multiprocessors > 0 ? multiprocessors : H200) / CLUSTER * CLUSTER;
    template_launch(kernel, blocks, 1, 1, THREADS, SLOTS * SLOT_BYTES + ALIGNMENT);
    return kernel;
}
