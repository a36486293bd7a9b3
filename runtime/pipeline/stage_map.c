/* Which layer, member and stage a module path or a state's name belongs to (stage_internal.h). */
#include <string.h>

#include "runtime/pipeline/stage_internal.h"

int stage_path_number(const char *text) {
    int number = 0;
    if (*text < '1' || *text > '9') return 0;
    for (; *text >= '0' && *text <= '9'; text++)
        if (number < 100000000) number = 10 * number + (*text - '0');
    return *text == '.' || *text == 0 ? number : 0;
}

int stage_path_layer(const char *list, const char *path, const char **within) {
    size_t length = strlen(list);
    for (const char *at = path; at && *at;) {
        if (strncmp(at, list, length) == 0 && at[length] == '.') {
            int number = stage_path_number(at + length + 1);
            const char *rest = strchr(at + length + 1, '.');
            *within = rest ? rest + 1 : "";
            if (number) return number - 1;
        }
        at = strchr(at, '.');
        if (at) at++;
    }
    return -1;
}

int stage_path_member(const ml_stage_map *map, const char *within) {
    size_t length = strcspn(within, ".");
    for (int i = 0; map->member && i < map->members; i++)
        if (strncmp(map->member[i], within, length) == 0 && !map->member[i][length]) return i;
    return -1;
}

int stage_path_list(const char *path) {
    for (const char *dot = strchr(path, '.'); dot; dot = strchr(dot + 1, '.'))
        if (stage_path_number(dot + 1)) return (int)(dot - path);
    return 0;
}

int stage_of_position(const ml_stage_map *map, int position) {
    if (!map->count) return 0;
    int low = 0, high = map->count - 1; /* the last stage whose first position is not above it */
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (map->first[middle] <= position)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

int stage_by_name(const ml_graph *g, const ml_stage_map *map, uint32_t state) {
    const char *name = ml_graph_state(g, state)->name;
    if (!map->count || !name) return -1;
    const char *within;
    int layer = stage_path_layer(map->list, name, &within), member;
    if (layer < 0) return -1;
    if (layer >= map->layers) layer = map->layers - 1;
    member = stage_path_member(map, within);
    return stage_of_position(map, layer * map->members + (member < 0 ? 0 : member));
}

bool ml_stage_holds(const ml_stage_map *map, uint32_t state, int stage) {
    if (state >= map->state_count) return false;
    for (const struct ml_holder *h = map->holders[state]; h; h = h->next)
        if (h->stage == stage) return true;
    return false;
}
