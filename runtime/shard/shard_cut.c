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

/* Copy row by row: `cut` from whole to part, the other way around otherwise. */
static void copy_part(const ml_layout *layout, const ml_type *global, const ml_placements *p,
                      int64_t rank, int width, char *whole, char *part, bool cut) {
    ml_type local = ml_layout_local(layout, global, p);
    int64_t at[ML_MAX_AXES] = {0}, start = 0, strides[ML_MAX_AXES], stride = width;
    for (int i = global->rank - 1; i >= 0; i--) {
        strides[i] = stride;
        start += block_of(layout, p, rank, i) * local.size[i] * stride;
        stride *= global->size[i];
    }
    int last = global->rank - 1;
    int64_t row = last >= 0 ? local.size[last] * width : width;
    int64_t rows = ml_type_elements(&local) * width / row;
    for (int64_t r = 0; r < rows; r++) {
        char *in_whole = whole + start;
        for (int i = 0; i < last; i++) in_whole += at[i] * strides[i];
        memcpy(cut ? part : in_whole, cut ? in_whole : part, (size_t)row);
        part += row;
        for (int i = last - 1; i >= 0 && ++at[i] == local.size[i]; i--) at[i] = 0;
    }
}

void ml_shard_cut(const ml_layout *layout, const ml_type *global, const ml_placements *p,
                  int64_t rank, int width, const void *whole, void *part) {
    copy_part(layout, global, p, rank, width, (char *)whole, part, true);
}

void ml_shard_paste(const ml_layout *layout, const ml_type *global, const ml_placements *p,
                    int64_t rank, int width, const void *part, void *whole) {
    copy_part(layout, global, p, rank, width, whole, (char *)part, false);
}
