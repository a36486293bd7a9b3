/* A rank's part of a global tensor, out of it and back into it. */
#include <string.h>

#include "runtime/shard/shard.h"

/* Which of the parts of the axis at `position` is this rank's: the outermost mesh axis counts most.
 */
static int64_t block_of(const ml_layout *layout, const ml_placements *p, int64_t rank,
                        int position) {
    int64_t block = 0;
    for (int within = 0; within < 2; within++)
        for (int i = 0; i < layout->count; i++)
            if (p->over[i].kind == ML_SPLIT && p->over[i].axis == position &&
                p->over[i].within == within)
                block = block * layout->axis[i].size + ml_layout_coordinate(layout, rank, i);
    return block;
}

/* How many of the part's elements along an axis the whole one has. */
static int64_t part_held(int64_t whole, int64_t part, int64_t block) {
    int64_t left = whole - block * part;
    return left < 0 ? 0 : left < part ? left : part;
}

/* Copy row by row: `cut` from whole to part, the other way around otherwise. What the whole one
 * does not have is left alone. */
static void copy_part(const ml_layout *layout, const ml_type *global, const ml_placements *p,
                      int64_t rank, int width, char *whole, char *part, bool cut) {
    ml_type local = ml_layout_local(layout, global, p);
    int64_t at[ML_MAX_AXES] = {0}, start = 0, strides[ML_MAX_AXES], stride = width;
    int64_t has[ML_MAX_AXES];
    for (int i = global->rank - 1; i >= 0; i--) {
        int64_t block = block_of(layout, p, rank, i);
        strides[i] = stride;
        has[i] = part_held(global->size[i], local.size[i], block);
        start += block * local.size[i] * stride;
        stride *= global->size[i];
    }
    int last = global->rank - 1;
    int64_t row = last >= 0 ? local.size[last] * width : width;
    int64_t filled = last >= 0 ? has[last] * width : width;
    int64_t rows = ml_type_elements(&local) * width / row;
    for (int64_t r = 0; r < rows; r++) {
        int64_t offset = start;
        bool there = filled > 0;
        for (int i = 0; i < last; i++) {
            offset += at[i] * strides[i];
            there = there && at[i] < has[i];
        }
        char *in_whole = whole + (there ? offset : 0);
        if (there) memcpy(cut ? part : in_whole, cut ? in_whole : part, (size_t)filled);
        part += row;
        for (int i = last - 1; i >= 0 && ++at[i] == local.size[i]; i--) at[i] = 0;
    }
}

void ml_shard_cut(const ml_layout *layout, const ml_type *global, const ml_placements *p,
                  int64_t rank, int width, const void *whole, void *part) {
    ml_type local = ml_layout_local(layout, global, p);
    for (int i = 0; i < global->rank; i++)
        if (ml_layout_uneven(layout, global, p, i))
            memset(part, 0, (size_t)(ml_type_elements(&local) * width));
    copy_part(layout, global, p, rank, width, (char *)whole, part, true);
}

void ml_shard_paste(const ml_layout *layout, const ml_type *global, const ml_placements *p,
                    int64_t rank, int width, const void *part, void *whole) {
    copy_part(layout, global, p, rank, width, whole, (char *)part, false);
}

void ml_shard_range(const ml_layout *layout, const ml_type *global, const ml_placements *p,
                    int64_t rank, int64_t *first, int64_t *held) {
    ml_type local = ml_layout_local(layout, global, p);
    for (int i = 0; i < global->rank; i++) {
        int64_t block = block_of(layout, p, rank, i);
        first[i] = block * local.size[i];
        held[i] = part_held(global->size[i], local.size[i], block);
    }
}
