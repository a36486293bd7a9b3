/* Merges: the pair of neighbours of the lowest rank, the leftmost first, becomes one token. Short
 * pieces by looking at all pairs, long ones by a heap: n log n. */
#include <string.h>

#include "runtime/text/encoder.h"
#include "runtime/text/unicode.h"

enum { SHORT = 64 };

/* The tokens of single bytes or characters. */
static ml_status symbols_of(ml_encoder *e, const char *piece, size_t bytes) {
    const ml_tokenizer *t = e->tokenizer;
    const unsigned char *at = (const unsigned char *)piece, *end = at + bytes;
    bool unknown = false;
    e->symbols.count = 0;
    ML_TRY(ml_ids_reserve(&e->symbols, (int64_t)bytes));
    for (int length; at < end; at += length) {
        uint32_t id;
        length = 1;
        if (t->byte_level) {
            id = t->byte_id[*at];
        } else {
            unicode_read(at, end, &length);
            id = text_find(t, &t->by_text, false, (const char *)at, (size_t)length);
            if (id != TEXT_NO_ID && !(t->tokens[id].flags & TOKEN_VOCAB)) id = TEXT_NO_ID;
        }
        if (id == TEXT_NO_ID) {
            ML_TRY(unknown_character(e, &e->symbols, (const char *)at, length, &unknown));
        } else {
            e->symbols.at[e->symbols.count++] = id;
            unknown = false;
        }
    }
    return ML_OK;
}

static uint64_t find_pair(const ml_tokenizer *t, uint32_t left, uint32_t right) {
    const text_merge *merge = text_find_merge(t, left, right);
    return merge ? (uint64_t)merge->rank << 32 | merge->id : UINT64_MAX;
}

void bpe_prepare(ml_tokenizer *t) {
    bool all = t->byte_level && t->kind == MODEL_BPE;
    for (int i = 0; i < 256 && all; i++) all = t->byte_id[i] != TEXT_NO_ID;
    if (!all) return;
    t->byte_pairs = ML_NEW_ARRAY(t->arena, uint64_t, 1 << 16);
    for (int i = 0; i < 1 << 16; i++)
        t->byte_pairs[i] = find_pair(t, t->byte_id[i >> 8], t->byte_id[i & 255]);
}

static int64_t merge_short(const ml_tokenizer *t, const char *piece, uint32_t *ids, int64_t count) {
    const unsigned char *bytes = (const unsigned char *)piece;
    uint64_t pairs[SHORT];
    for (int64_t i = 0; i + 1 < count; i++)
        pairs[i] = t->byte_pairs ? t->byte_pairs[bytes[i] << 8 | bytes[i + 1]]
                                 : find_pair(t, ids[i], ids[i + 1]);
    while (count > 1) {
        int64_t best = 0;
        for (int64_t i = 1; i + 1 < count; i++) best = pairs[i] < pairs[best] ? i : best;
        if (pairs[best] == UINT64_MAX) break;
        ids[best] = (uint32_t)pairs[best];
        count--;
        for (int64_t i = best + 1; i < count; i++) ids[i] = ids[i + 1];
        for (int64_t i = best; i + 1 < count; i++) pairs[i] = pairs[i + 1];
        if (best) pairs[best - 1] = find_pair(t, ids[best - 1], ids[best]);
        if (best + 1 < count) pairs[best] = find_pair(t, ids[best], ids[best + 1]);
    }
    return count;
}

static void heap_push(uint64_t *heap, size_t count, uint64_t value) {
    size_t at = count;
    for (; at > 0 && heap[(at - 1) / 2] > value; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = value;
}

/* The least, with `count` values left. */
static uint64_t heap_pop(uint64_t *heap, size_t count) {
    uint64_t least = heap[0], value = heap[count];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < count) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= value) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = value;
    return least;
}

/* The heap has a pair's rank and the place of its left symbol; next and before link symbols. A pair
 * that is no more has another rank: ranks of merges are unique. */
typedef struct {
    const ml_tokenizer *t;
    uint32_t *ids, *next, *before;
    uint64_t *heap;
    size_t heaped;
    uint32_t count;
} long_merge;

static void push_pair(long_merge *m, uint32_t at) {
    if (m->next[at] == m->count) return;
    const text_merge *merge = text_find_merge(m->t, m->ids[at], m->ids[m->next[at]]);
    if (merge) heap_push(m->heap, m->heaped++, (uint64_t)merge->rank << 32 | at);
}

static void merge_heap(long_merge *m) {
    for (uint32_t i = 0; i < m->count; i++) {
        m->next[i] = i + 1;
        m->before[i] = i - 1;
    }
    for (uint32_t i = 0; i < m->count; i++) push_pair(m, i);
    while (m->heaped) {
        uint64_t least = heap_pop(m->heap, --m->heaped);
        uint32_t at = (uint32_t)least, right;
        if (m->ids[at] == TEXT_NO_ID || (right = m->next[at]) == m->count) continue;
        const text_merge *merge = text_find_merge(m->t, m->ids[at], m->ids[right]);
        if (!merge || merge->rank != least >> 32) continue;
        m->ids[at] = merge->id;
        m->ids[right] = TEXT_NO_ID;
        m->next[at] = m->next[right];
        if (m->next[at] < m->count) m->before[m->next[at]] = at;
        push_pair(m, at);
        if (m->before[at] != UINT32_MAX) push_pair(m, m->before[at]);
    }
}

static ml_status merge_long(ml_encoder *e) {
    size_t count = (size_t)e->symbols.count, room = 3 * count;
    if (count >= UINT32_MAX / 4)
        return ml_fail(ML_INVALID, "a piece of text without a place to part it has %zu bytes",
                       count);
    e->links.count = 0;
    ML_TRY(ml_ids_reserve(&e->links, (int64_t)(2 * count)));
    if (room > e->heap_room) {
        uint64_t *more = ml_realloc(e->heap, e->heap_room * sizeof *more, room * sizeof *more);
        if (!more) return ml_fail(ML_NO_MEMORY, "not enough host memory to merge %zu bytes", count);
        e->heap = more;
        e->heap_room = room;
    }
    long_merge m = {e->tokenizer,   e->symbols.at, e->links.at, e->links.at + count, e->heap, 0,
                    (uint32_t)count};
    merge_heap(&m);
    e->symbols.count = 0;
    for (uint32_t i = 0; i < m.count; i = m.next[i]) e->symbols.at[e->symbols.count++] = m.ids[i];
    return ML_OK;
}

/* The tokens of a piece, in e->symbols. */
ml_status bpe_symbols(ml_encoder *e, const char *piece, size_t bytes) {
    const ml_tokenizer *t = e->tokenizer;
    if (t->whole) {
        uint32_t id =
            text_find(t, t->byte_level ? &t->by_raw : &t->by_text, t->byte_level, piece, bytes);
        if (id != TEXT_NO_ID && t->tokens[id].flags & TOKEN_VOCAB) {
            e->symbols.count = 0;
            return ml_ids_add(&e->symbols, id);
        }
    }
    ML_TRY(symbols_of(e, piece, bytes));
    if (e->symbols.count > SHORT) return merge_long(e);
    e->symbols.count = merge_short(t, piece, e->symbols.at, e->symbols.count);
    return ML_OK;
}
