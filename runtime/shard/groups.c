/* Groups of ranks along a mesh axis. */
#include "runtime/shard/groups.h"

ml_row ml_groups_row(const ml_layout *layout, const ml_groups *groups, int64_t rank, int i) {
    bool grouped = groups && i >= groups->first && i < groups->first + groups->count;
    int axis = grouped ? groups->of : i;
    ml_row row = {.size = layout->axis[axis].size, .step = 1};
    for (int j = axis + 1; j < layout->count; j++) row.step *= layout->axis[j].size;
    row.at = ml_layout_coordinate(layout, rank, axis);
    if (!grouped) return row;
    row.size = groups->size[i - groups->first];
    row.at = row.at / groups->step[i - groups->first] % row.size;
    row.step *= groups->step[i - groups->first];
    return row;
}

bool ml_groups_layout(const ml_layout *layout, const ml_groups *groups, int64_t size,
                      ml_layout *out) {
    bool found = size == 1;
    *out = *layout;
    if (!groups->together || size > 1) out->axis[groups->of].size = 1;
    for (int k = 0; k < groups->count; k++) {
        if (groups->group[k] != size) continue;
        out->axis[groups->first + k].size = groups->size[k];
        found = true;
    }
    return found;
}

int64_t ml_groups_rank(const ml_layout *layout, const ml_groups *groups, int64_t rank,
                       const ml_layout *of_group) {
    int64_t number = 0;
    for (int i = 0; i < of_group->count; i++) {
        int64_t size = of_group->axis[i].size;
        number *= size;
        if (size > 1) number += ml_groups_row(layout, groups, rank, i).at;
    }
    return number;
}
