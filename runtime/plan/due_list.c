/* A list of steps by order and time (due_list.h). */
#include "runtime/plan/due_list.h"

#include <float.h>
#include <string.h>

enum { BLOCK = 64 }; /* places */

static const due_step FREE = {DBL_MAX, DUE_NONE};

static void find_earliest(due_list *list, uint32_t block) {
    const uint32_t begin = block * BLOCK, end = begin + BLOCK;
    double earliest = DBL_MAX;
    for (uint32_t i = begin; i < end && i < list->places.count; i++)
        if (list->places.at[i].when < earliest) earliest = list->places.at[i].when;
    list->earliest.at[block] = earliest;
}

static void find_all(due_list *list) {
    list->earliest.count = 0;
    for (uint32_t i = 0; i < list->places.count; i += BLOCK) {
        (void)ML_PUSH(list->arena, &list->earliest);
        find_earliest(list, i / BLOCK);
    }
}

void due_add(due_list *list, due_step step) {
    if (list->places.count % BLOCK == 0) *ML_PUSH(list->arena, &list->earliest) = DBL_MAX;
    double *earliest = &list->earliest.at[list->places.count / BLOCK];
    if (step.when < *earliest) *earliest = step.when;
    *ML_PUSH(list->arena, &list->places) = step;
    list->count++;
}

double due_earliest(const due_list *list) {
    double earliest = DBL_MAX;
    for (uint32_t b = 0; b < list->earliest.count; b++)
        if (list->earliest.at[b] < earliest) earliest = list->earliest.at[b];
    return earliest;
}

uint32_t due_find(const due_list *list, uint32_t from, double now) {
    for (uint32_t i = from; i < list->places.count;) {
        if (i % BLOCK == 0 && list->earliest.at[i / BLOCK] > now)
            i += BLOCK;
        else if (list->places.at[i].when <= now)
            return i;
        else
            i++;
    }
    return DUE_NONE;
}

uint32_t due_replace(due_list *list, uint32_t place, const due_step *by, uint32_t count) {
    list->places.at[place] = count > 0 ? by[0] : FREE;
    list->count += count - 1;
    if (count <= 1) {
        find_earliest(list, place / BLOCK);
        return place + 1;
    }
    for (uint32_t i = 1; i < count; i++) (void)ML_PUSH(list->arena, &list->places);
    due_step *at = list->places.at + place + 1;
    memmove(at + count - 1, at, sizeof *at * (list->places.count - count - place));
    memcpy(at, by + 1, sizeof *at * (count - 1));
    find_all(list);
    return place + count;
}

void due_trim(due_list *list) {
    uint32_t left = 0;
    if (list->places.count < BLOCK || list->count > list->places.count / 2) return;
    for (uint32_t i = 0; i < list->places.count; i++)
        if (list->places.at[i].step != DUE_NONE) list->places.at[left++] = list->places.at[i];
    list->places.count = left;
    find_all(list);
}
