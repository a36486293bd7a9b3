/* Merges: the pair of neighbours of the lowest rank, the leftmost first, becomes one token. Short
 * pieces by looking at all pairs, long ones by lists of equal rank: n log r, r ranks at a time. */
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
    for (uint32_t i = 0; t->merges && i <= t->merge_mask; i++)
        if (t->merges[i].id != TEXT_NO_ID && t->merges[i].rank >= t->ranks)
            t->ranks = t->merges[i].rank + 1;
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

static void heap_push(uint32_t *heap, size_t count, uint32_t value) {
    size_t at = count;
    for (; at > 0 && heap[(at - 1) / 2] > value; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = value;
}

/* The least, with `count` values left. */
static uint32_t heap_pop(uint32_t *heap, size_t count) {
    uint32_t least = heap[0], value = heap[count];
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

/* Places of pairs, a list for each rank; the heap has the ranks whose list is not empty. An entry
 * is the place of the left symbol and, above it, the number of the next entry; numbers count from
 * 1, 0 is none. next and before link symbols. A place of which the pair has changed has another
 * rank now. */
typedef struct {
    const ml_tokenizer *t;
    uint32_t *ids, *next, *before;
    uint32_t *first, *last, *heap; /* first, last: entries by rank */
    uint64_t *entries;
    size_t heaped;
    uint32_t count, used;
} long_merge;

static void push_pair(long_merge *m, uint32_t at) {
    if (m->next[at] == m->count) return;
    const text_merge *merge = text_find_merge(m->t, m->ids[at], m->ids[m->next[at]]);
    if (!merge) return;
    uint32_t rank = merge->rank, entry = ++m->used;
    m->entries[entry] = at;
    if (m->last[rank])
        m->entries[m->last[rank]] |= (uint64_t)entry << 32;
    else
        m->first[rank] = entry, heap_push(m->heap, m->heaped++, rank);
    m->last[rank] = entry;
}

static uint32_t next_entry(const uint64_t *entries, uint32_t entry) {
    return (uint32_t)(entries[entry] >> 32);
}

/* Both in the order of their places; entries[0] is scratch. */
static uint32_t join_lists(uint64_t *entries, uint32_t a, uint32_t b) {
    uint32_t tail = 0;
    entries[0] = 0;
    while (a && b) {
        uint32_t *least = (uint32_t)entries[a] <= (uint32_t)entries[b] ? &a : &b;
        entries[tail] = (uint32_t)entries[tail] | (uint64_t)*least << 32;
        tail = *least;
        *least = next_entry(entries, tail);
    }
    entries[tail] = (uint32_t)entries[tail] | (uint64_t)(a ? a : b) << 32;
    return next_entry(entries, 0);
}

/* A rank's list in the order of its places. It is made of as many ascending runs as there were
 * ranks that added to it: most often one. */
static uint32_t sorted_list(uint64_t *entries, uint32_t list) {
    uint32_t joined[32] = {0}, whole = 0; /* joined[i]: of 2^i runs */
    while (list) {
        uint32_t run = list, end = list, rest;
        while ((rest = next_entry(entries, end)) &&
               (uint32_t)entries[rest] >= (uint32_t)entries[end])
            end = rest;
        entries[end] = (uint32_t)entries[end];
        if (run == list && !rest && !whole) break; /* one run */
        int i = 0;
        for (; i < 31 && joined[i]; joined[i++] = 0) run = join_lists(entries, joined[i], run);
        joined[i] = run;
        list = rest;
        whole = 1;
    }
    if (!whole) return list;
    whole = 0;
    for (int i = 0; i < 32; i++)
        if (joined[i]) whole = whole ? join_lists(entries, joined[i], whole) : joined[i];
    return whole;
}

/* The lowest rank first, its pairs from left to right. */
static void merge_ranks(long_merge *m) {
    for (uint32_t i = 0; i < m->count; i++) {
        m->next[i] = i + 1;
        m->before[i] = i - 1;
    }
    for (uint32_t i = 0; i < m->count; i++) push_pair(m, i);
    while (m->heaped) {
        uint32_t rank = heap_pop(m->heap, --m->heaped), right;
        uint32_t list = sorted_list(m->entries, m->first[rank]);
        m->first[rank] = m->last[rank] = 0;
        for (uint32_t at; list; list = next_entry(m->entries, list)) {
            at = (uint32_t)m->entries[list];
            if (m->ids[at] == TEXT_NO_ID || (right = m->next[at]) == m->count) continue;
            const text_merge *merge = text_find_merge(m->t, m->ids[at], m->ids[right]);
            if (!merge || merge->rank != rank) continue;
            m->ids[at] = merge->id;
            m->ids[right] = TEXT_NO_ID;
            m->next[at] = m->next[right];
            if (m->next[at] < m->count) m->before[m->next[at]] = at;
            if (m->before[at] != UINT32_MAX) push_pair(m, m->before[at]);
            push_pair(m, at);
        }
    }
}

static ml_status reserve_long(ml_encoder *e, size_t count) {
    const size_t room = 3 * count + 1, ranks = (size_t)e->tokenizer->ranks;
    e->links.count = 0;
    ML_TRY(ml_ids_reserve(&e->links, (int64_t)(2 * count)));
    if (!e->by_rank) e->by_rank = ml_alloc(3 * ranks * sizeof *e->by_rank + 1);
    uint64_t *more = e->entries;
    if (e->by_rank && room > e->entry_room) {
        more = ml_realloc(e->entries, e->entry_room * sizeof *more, room * sizeof *more);
        if (more) e->entries = more, e->entry_room = room;
    }
    if (e->by_rank && more) return ML_OK;
    return ml_fail(ML_NO_MEMORY, "not enough host memory to merge %zu bytes", count);
}

static ml_status merge_long(ml_encoder *e) {
    size_t count = (size_t)e->symbols.count, ranks = (size_t)e->tokenizer->ranks;
    if (count >= UINT32_MAX / 4)
        return ml_fail(ML_INVALID, "a piece of text without a place to part it has %zu bytes",
                       count);
    ML_TRY(reserve_long(e, count));
    long_merge m = {.t = e->tokenizer,
                    .ids = e->symbols.at,
                    .next = e->links.at,
                    .before = e->links.at + count,
                    .first = e->by_rank,
                    .last = e->by_rank + ranks,
                    .heap = e->by_rank + 2 * ranks,
                    .entries = e->entries,
                    .count = (uint32_t)count};
    merge_ranks(&m);
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
