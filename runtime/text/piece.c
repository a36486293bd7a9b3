/* The tokens of pieces, and the cache of those that came before. */
#include <string.h>
#include <sys/mman.h>

#include "runtime/text/encoder.h"

#define HUGE_PAGE ((uintptr_t)1 << 21)

enum { FEW = 3 }; /* ids that an entry has itself */

/* The low bits depend on every bit of the key. */
static inline uint64_t key_hash(const uint64_t key[2]) {
    unsigned __int128 product =
        (unsigned __int128)(key[0] ^ 0x9E3779B97F4A7C15) * (key[1] ^ 0xD6E8FEB86659FD93);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t load8(const char *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

/* A piece, what it is looked for by, and where. */
typedef struct {
    const char *at;
    size_t bytes;
    uint64_t key[2];
    cache_entry *bucket; /* NULL: too long to be kept */
} wanted;

#define LOW(n) (UINT64_MAX >> (64 - 8 * (n)))
static const uint64_t masks[CACHE_SHORT + 1][2] = {
    {0, 0},           {LOW(1), 0},      {LOW(2), 0},      {LOW(3), 0},
    {LOW(4), 0},      {LOW(5), 0},      {LOW(6), 0},      {LOW(7), 0},
    {LOW(8), 0},      {LOW(8), LOW(1)}, {LOW(8), LOW(2)}, {LOW(8), LOW(3)},
    {LOW(8), LOW(4)}, {LOW(8), LOW(5)}, {LOW(8), LOW(6)}, {LOW(8), LOW(7)},
};

/* `room`: bytes that may be read from the piece on. */
static inline void make_wanted(const ml_encoder *e, wanted *w, const char *piece, size_t bytes,
                               size_t room) {
    char copy[16];
    w->at = piece;
    w->bytes = bytes;
    if (bytes <= CACHE_SHORT) {
        if (room < 16) piece = memcpy(copy, piece, bytes);
        w->key[0] = load8(piece) & masks[bytes][0];
        w->key[1] = (load8(piece + 8) & masks[bytes][1]) | (uint64_t)bytes << 56;
    } else if (bytes <= CACHE_LONGEST) {
        w->key[0] = ml_hash(piece, bytes, 0);
        w->key[1] = 0xFFull << 56 | (uint64_t)bytes
                                        << 32; /* + where its bytes are, which is not 0 */
    } else {
        w->bucket = NULL;
        return;
    }
    w->bucket = e->cache[key_hash(w->key) & e->cache_mask];
    __builtin_prefetch(w->bucket);
}

/* Whether an entry's tokens are in it and of the piece: no key of a longer piece is equal. */
static inline bool is_short(const cache_entry *entry, const wanted *w) {
    return entry->key[0] == w->key[0] && entry->key[1] == w->key[1] && entry->count <= FEW;
}

static bool is_entry(const ml_encoder *e, const cache_entry *entry, const wanted *w) {
    if (entry->key[0] != w->key[0]) return false;
    if (w->bytes <= CACHE_SHORT) return entry->key[1] == w->key[1];
    return (entry->key[1] ^ w->key[1]) >> 32 == 0 &&
           memcmp(e->cache_bytes.at + (uint32_t)entry->key[1], w->at, w->bytes) == 0;
}

/* The second entry of a bucket gives way; it becomes the first once it is found again. */
static void put(cache_entry bucket[2], cache_entry entry) {
    bucket[bucket[0].key[1] != 0] = entry;
}

bool piece_open_cache(ml_encoder *e, uint32_t buckets) {
    cache_entry(*old)[2] = e->cache, (*cache)[2] = ml_alloc(buckets * sizeof *cache);
    if (!cache) return false;
    uintptr_t begin = ((uintptr_t)cache + HUGE_PAGE - 1) & -HUGE_PAGE;
    uintptr_t end = (uintptr_t)(cache + buckets) & -HUGE_PAGE;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* read at random */
    for (uint32_t i = 0; old && i < 2 * (e->cache_mask + 1); i++) {
        cache_entry entry = old[i / 2][i % 2];
        uint64_t key[2] = {entry.key[0], entry.key[1]};
        if (key[1] >> 56 == 0xFF) key[1] &= ~(uint64_t)UINT32_MAX;
        if (key[1]) put(cache[key_hash(key) & (buckets - 1)], entry);
    }
    ml_free(old);
    e->cache = cache;
    e->cache_mask = buckets - 1;
    e->cache_kept = 0;
    return true;
}

/* Before pieces are looked for: more buckets where these are full, if there is memory. */
static void grow(ml_encoder *e) {
    uint32_t buckets = e->cache_mask + 1;
    if (e->cache_kept > buckets / 2 && buckets < CACHE_MOST) piece_open_cache(e, 4 * buckets);
}

/* What was kept in the pools is forgotten with all entries. */
static void forget(ml_encoder *e) {
    memset(e->cache, 0, ((size_t)e->cache_mask + 1) * sizeof *e->cache);
    e->cache_bytes.count = 0;
    e->cache_ids.count = 0;
}

static ml_status keep(ml_encoder *e, wanted *w) {
    cache_entry entry = {.count = (uint32_t)e->symbols.count};
    if (e->cache_bytes.count + w->bytes > CACHE_POOL ||
        (e->cache_ids.count + e->symbols.count) * 4 > CACHE_POOL)
        forget(e);
    if (w->bytes > CACHE_SHORT) {
        if (!e->cache_bytes.count) ML_TRY(ml_bytes_add(&e->cache_bytes, "", 1));
        w->key[1] |= e->cache_bytes.count;
        ML_TRY(ml_bytes_add(&e->cache_bytes, w->at, w->bytes));
    }
    memcpy(entry.key, w->key, sizeof entry.key);
    if (entry.count <= FEW) {
        for (uint32_t i = 0; i < entry.count; i++) entry.ids[i] = e->symbols.at[i];
    } else {
        entry.ids[0] = (uint32_t)e->cache_ids.count;
        for (uint32_t i = 0; i < entry.count; i++)
            ML_TRY(ml_ids_add(&e->cache_ids, e->symbols.at[i]));
    }
    put(w->bucket, entry);
    e->cache_kept++;
    return ML_OK;
}

/* Leaves room for a batch of pieces that have few. */
static ml_status append(ml_encoder *e, const uint32_t *ids, int64_t count) {
    ML_TRY(ml_ids_reserve(e->ids, count + FEW * SCAN_MOST));
    memcpy(e->ids->at + e->ids->count, ids, (size_t)count * sizeof *ids);
    e->ids->count += count;
    return ML_OK;
}

static inline ml_status add_few(ml_encoder *e, const cache_entry *entry) {
    memcpy(e->ids->at + e->ids->count, entry->ids, sizeof entry->ids);
    e->ids->count += entry->count;
    return ML_OK;
}

/* Of a piece that is not the first in its bucket, or has many. */
static ml_status add_other(ml_encoder *e, wanted *w) {
    bool merges = e->tokenizer->kind == MODEL_BPE;
    int64_t dropped = e->dropped;
    for (int i = 0; i < 2 && w->bucket; i++)
        if (is_entry(e, &w->bucket[i], w)) {
            cache_entry entry = w->bucket[i];
            w->bucket[i] = w->bucket[0];
            w->bucket[0] = entry;
            if (entry.count <= FEW) return add_few(e, &entry);
            return append(e, &e->cache_ids.at[entry.ids[0]], entry.count);
        }
    ML_TRY(merges ? bpe_symbols(e, w->at, w->bytes) : unigram_symbols(e, w->at, w->bytes));
    ML_TRY(append(e, e->symbols.at, e->symbols.count));
    return w->bucket && e->dropped == dropped ? keep(e, w) : ML_OK;
}

/* There is room for FEW ids. */
static inline ml_status add_tokens(ml_encoder *e, wanted *w) {
    return w->bucket && is_short(w->bucket, w) ? add_few(e, w->bucket) : add_other(e, w);
}

void piece_encode(ml_encoder *e, const char *piece, size_t bytes) {
    wanted w;
    grow(e);
    make_wanted(e, &w, piece, bytes, 0);
    e->status = ml_ids_reserve(e->ids, FEW);
    if (e->status == ML_OK) e->status = add_tokens(e, &w);
}

/* Many at once: meanwhile the processor reads the buckets of the next. */
void piece_scan(ml_encoder *e, scan_kind kind, const char *text, size_t bytes) {
    const unsigned char *at = (const unsigned char *)text, *end = at + bytes, *ends[SCAN_MOST];
    wanted pieces[SCAN_MOST];
    if (kind == SCAN_NONE) piece_encode(e, text, bytes);
    for (int count; kind != SCAN_NONE && (count = scan_ends(kind, &at, end, ends)) > 0;) {
        grow(e);
        for (int i = 0; i < count; text = (const char *)ends[i++])
            make_wanted(e, &pieces[i], text, (size_t)((const char *)ends[i] - text),
                        (size_t)((const char *)end - text));
        e->status = ml_ids_reserve(e->ids, FEW * SCAN_MOST);
        for (int i = 0; i < count && e->status == ML_OK; i++) e->status = add_tokens(e, &pieces[i]);
        if (e->status != ML_OK) return;
    }
}
