/* Placement of blocks in an arena: best fit along time, and greedy by size. */
#define _GNU_SOURCE /* qsort_r */
#include "runtime/plan/arena_offsets.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = UINT32_MAX, FEW_BLOCKS = 4096 };

/* A range of the arena, free or used. Ranges form a list in address order without gaps; free ones
 * are also in a treap ordered by (bytes, offset), which answers "the smallest that fits". */
typedef struct {
    int64_t offset, bytes;
    uint32_t previous, next;      /* neighbours by address */
    uint32_t left, right, weight; /* the treap */
    bool free;
} place_range;

typedef struct {
    place_range *ranges;
    uint32_t root, last, spare; /* spare: list of unused range records, through `next` */
    int64_t end;
} place_heap;

static bool range_before(const place_heap *heap, uint32_t a, uint32_t b) {
    const place_range *x = &heap->ranges[a], *y = &heap->ranges[b];
    return x->bytes != y->bytes ? x->bytes < y->bytes : x->offset < y->offset;
}

static uint32_t treap_merge(place_range *ranges, uint32_t a, uint32_t b) {
    if (a == NONE) return b;
    if (b == NONE) return a;
    if (ranges[a].weight > ranges[b].weight) {
        ranges[a].right = treap_merge(ranges, ranges[a].right, b);
        return a;
    }
    ranges[b].left = treap_merge(ranges, a, ranges[b].left);
    return b;
}

/* Split `at` into what is before range `key` and the rest. */
static void treap_split(const place_heap *heap, uint32_t at, uint32_t key, uint32_t *before,
                        uint32_t *rest) {
    if (at == NONE) {
        *before = *rest = NONE;
    } else if (range_before(heap, at, key)) {
        treap_split(heap, heap->ranges[at].right, key, &heap->ranges[at].right, rest);
        *before = at;
    } else {
        treap_split(heap, heap->ranges[at].left, key, before, &heap->ranges[at].left);
        *rest = at;
    }
}

static void free_insert(place_heap *heap, uint32_t range) {
    place_range *ranges = heap->ranges, *own = &ranges[range];
    uint32_t *link = &heap->root;
    while (*link != NONE && ranges[*link].weight > own->weight)
        link = range_before(heap, *link, range) ? &ranges[*link].right : &ranges[*link].left;
    treap_split(heap, *link, range, &own->left, &own->right);
    own->free = true;
    *link = range;
}

static void free_unlink(place_heap *heap, uint32_t *link) {
    place_range *own = &heap->ranges[*link];
    own->free = false;
    *link = treap_merge(heap->ranges, own->left, own->right);
}

static void free_remove(place_heap *heap, uint32_t range) {
    place_range *ranges = heap->ranges;
    uint32_t *link = &heap->root;
    while (*link != range) {
        link = range_before(heap, *link, range) ? &ranges[*link].right : &ranges[*link].left;
    }
    free_unlink(heap, link);
}

/* What leads to the smallest free range of at least `bytes`; NULL where there is none. */
static uint32_t *free_find(place_heap *heap, int64_t bytes) {
    uint32_t *found = NULL;
    for (uint32_t *link = &heap->root; *link != NONE;) {
        place_range *at = &heap->ranges[*link];
        if (at->bytes >= bytes) {
            found = link;
            link = &at->left;
        } else {
            link = &at->right;
        }
    }
    return found;
}

/* A used range record of `bytes` at `offset` between two neighbours. */
static uint32_t range_new(place_heap *heap, int64_t offset, int64_t bytes, uint32_t previous,
                          uint32_t next) {
    uint32_t range = heap->spare;
    heap->spare = heap->ranges[range].next;
    place_range *r = &heap->ranges[range];
    r->offset = offset, r->bytes = bytes, r->previous = previous, r->next = next, r->free = false;
    if (previous != NONE) heap->ranges[previous].next = range;
    if (next != NONE)
        heap->ranges[next].previous = range;
    else
        heap->last = range;
    return range;
}

static void range_drop(place_heap *heap, uint32_t range) {
    place_range *r = &heap->ranges[range];
    if (r->previous != NONE) heap->ranges[r->previous].next = r->next;
    if (r->next != NONE)
        heap->ranges[r->next].previous = r->previous;
    else
        heap->last = r->previous;
    r->next = heap->spare;
    heap->spare = range;
}

static uint32_t heap_take(place_heap *heap, int64_t bytes) {
    uint32_t *found = free_find(heap, bytes), range = found != NULL ? *found : NONE;
    if (range == NONE && heap->last != NONE && heap->ranges[heap->last].free) {
        range = heap->last; /* grow the free end of the arena */
        free_remove(heap, range);
        heap->ranges[range].bytes = bytes;
        heap->end = heap->ranges[range].offset + bytes;
        return range;
    }
    if (range == NONE) {
        range = range_new(heap, heap->end, bytes, heap->last, NONE);
        heap->end += bytes;
        return range;
    }
    free_unlink(heap, found);
    int64_t rest = heap->ranges[range].bytes - bytes;
    if (rest > 0) {
        heap->ranges[range].bytes = bytes;
        uint32_t tail = range_new(heap, heap->ranges[range].offset + bytes, rest, range,
                                  heap->ranges[range].next);
        free_insert(heap, tail);
    }
    return range;
}

static void heap_give(place_heap *heap, uint32_t range) {
    place_range *ranges = heap->ranges;
    uint32_t next = ranges[range].next, previous = ranges[range].previous;
    if (next != NONE && ranges[next].free) {
        free_remove(heap, next);
        ranges[range].bytes += ranges[next].bytes;
        range_drop(heap, next);
    }
    if (previous != NONE && ranges[previous].free) {
        free_remove(heap, previous);
        ranges[previous].bytes += ranges[range].bytes;
        range_drop(heap, range);
        range = previous;
    }
    free_insert(heap, range);
}

static void heap_reset(place_heap *heap, uint32_t count) {
    heap->root = heap->last = NONE;
    heap->end = 0;
    heap->spare = 0;
    uint64_t random = 0x9e3779b97f4a7c15u;
    for (uint32_t i = 0; i < count; i++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17; /* xorshift64 */
        heap->ranges[i].weight = (uint32_t)(random >> 32);
        heap->ranges[i].next = i + 1 < count ? i + 1 : NONE;
    }
}

/* Blocks in buckets by a step: order[start[s] .. start[s + 1]) belong to step s, largest first. */
typedef struct {
    uint32_t *start, *order;
} place_buckets;

static int larger_first(const void *a, const void *b, void *context) {
    const arena_block *blocks = context;
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    if (blocks[i].bytes != blocks[j].bytes) return blocks[i].bytes > blocks[j].bytes ? -1 : 1;
    return i < j ? -1 : i > j;
}

static place_buckets buckets_new(const arena_block *blocks, uint32_t count, uint32_t steps,
                                 bool by_last, ml_arena *scratch) {
    place_buckets b = {ML_NEW_ARRAY(scratch, uint32_t, (size_t)steps + 2),
                       ML_NEW_ARRAY(scratch, uint32_t, (size_t)count + 1)};
    uint32_t *start = b.start + 1; /* start[s] moves from the bucket's begin to its end */
    for (uint32_t i = 0; i < count; i++) {
        uint32_t step = by_last ? blocks[i].last : blocks[i].first;
        if (step + 1 < steps) start[step + 1]++;
    }
    for (uint32_t s = 1; s < steps; s++) start[s] += start[s - 1];
    for (uint32_t i = 0; i < count; i++) {
        b.order[start[by_last ? blocks[i].last : blocks[i].first]++] = i;
    }
    for (uint32_t s = 0; s < steps; s++) {
        uint32_t begin = b.start[s], end = b.start[s + 1];
        if (end - begin > 1) {
            qsort_r(b.order + begin, end - begin, sizeof *b.order, larger_first, (void *)blocks);
        }
    }
    return b;
}

typedef struct {
    place_heap heap;
    place_buckets by_first, by_last;
    uint32_t *range; /* by block */
} place_sweep;

/* Walk the steps (backwards when `reverse`), giving back what ended and placing what begins. */
static int64_t sweep_run(place_sweep *sweep, const arena_block *blocks, int64_t *offsets,
                         uint32_t count, uint32_t steps, bool reverse) {
    const place_buckets *births = reverse ? &sweep->by_last : &sweep->by_first;
    const place_buckets *deaths = reverse ? &sweep->by_first : &sweep->by_last;
    place_heap *heap = &sweep->heap;
    heap_reset(heap, 2 * count + 2);
    for (uint32_t i = 0; i < steps; i++) {
        uint32_t step = reverse ? steps - 1 - i : i;
        if (i > 0) {
            uint32_t ended = reverse ? step + 1 : step - 1;
            for (uint32_t j = deaths->start[ended]; j < deaths->start[ended + 1]; j++) {
                heap_give(heap, sweep->range[deaths->order[j]]);
            }
        }
        for (uint32_t j = births->start[step]; j < births->start[step + 1]; j++) {
            uint32_t block = births->order[j];
            uint32_t range = heap_take(heap, blocks[block].bytes);
            sweep->range[block] = range;
            offsets[block] = heap->ranges[range].offset;
        }
    }
    return heap->end;
}

/* Largest blocks first, each into the tightest gap between the placed ones it meets in time. */
static int64_t greedy_run(const arena_block *blocks, int64_t *offsets, uint32_t count,
                          ml_arena *scratch) {
    uint32_t *order = ML_NEW_ARRAY(scratch, uint32_t, (size_t)count + 1);
    uint32_t *placed = ML_NEW_ARRAY(scratch, uint32_t, (size_t)count + 1); /* by offset */
    for (uint32_t i = 0; i < count; i++) order[i] = i;
    qsort_r(order, count, sizeof *order, larger_first, (void *)blocks);
    int64_t end = 0;
    for (uint32_t i = 0; i < count; i++) {
        const arena_block *b = &blocks[order[i]];
        int64_t top = 0, best = -1, best_gap = INT64_MAX;
        for (uint32_t j = 0; j < i; j++) {
            const arena_block *other = &blocks[placed[j]];
            if (other->last < b->first || other->first > b->last) continue;
            int64_t gap = offsets[placed[j]] - top;
            if (gap >= b->bytes && gap < best_gap) best = top, best_gap = gap;
            int64_t other_end = offsets[placed[j]] + other->bytes;
            if (other_end > top) top = other_end;
        }
        int64_t offset = best >= 0 ? best : top;
        offsets[order[i]] = offset;
        if (offset + b->bytes > end) end = offset + b->bytes;
        uint32_t at = i;
        for (; at > 0 && offsets[placed[at - 1]] > offset; at--) placed[at] = placed[at - 1];
        placed[at] = order[i];
    }
    return end;
}

int64_t arena_peak(const arena_block *blocks, uint32_t count, uint32_t steps, ml_arena *scratch,
                   uint32_t *step) {
    int64_t *change = ML_NEW_ARRAY(scratch, int64_t, (size_t)steps + 2);
    for (uint32_t i = 0; i < count; i++) {
        change[blocks[i].first] += blocks[i].bytes;
        change[blocks[i].last + 1] -= blocks[i].bytes;
    }
    int64_t load = 0, most = 0;
    *step = 0;
    for (uint32_t s = 0; s < steps; s++) {
        load += change[s];
        if (load > most) most = load, *step = s;
    }
    return most;
}

static void offsets_keep(arena_block *blocks, const int64_t *offsets, uint32_t count, int64_t size,
                         int64_t *best) {
    if (size >= *best) return;
    *best = size;
    for (uint32_t i = 0; i < count; i++) blocks[i].offset = offsets[i];
}

int64_t arena_assign_offsets(arena_block *blocks, uint32_t count, uint32_t steps,
                             ml_arena *scratch) {
    if (count == 0) return 0;
    for (uint32_t i = 0; i < count; i++) {
        blocks[i].bytes = memory_padded(blocks[i].bytes);
        if (blocks[i].bytes == 0) blocks[i].bytes = ARENA_ALIGNMENT;
    }
    uint32_t step;
    int64_t least = arena_peak(blocks, count, steps, scratch, &step), best = INT64_MAX;
    int64_t *offsets = ML_NEW_ARRAY(scratch, int64_t, count);
    place_sweep sweep = {.range = ML_NEW_ARRAY(scratch, uint32_t, count)};
    sweep.heap.ranges = ML_NEW_ARRAY(scratch, place_range, 2 * (size_t)count + 2);
    sweep.by_first = buckets_new(blocks, count, steps, false, scratch);
    sweep.by_last = buckets_new(blocks, count, steps, true, scratch);
    for (int reverse = 0; reverse < 2 && best > least; reverse++) {
        int64_t size = sweep_run(&sweep, blocks, offsets, count, steps, reverse);
        offsets_keep(blocks, offsets, count, size, &best);
    }
    if (best > least && count <= FEW_BLOCKS) {
        int64_t size = greedy_run(blocks, offsets, count, scratch);
        offsets_keep(blocks, offsets, count, size, &best);
    }
    return best;
}
