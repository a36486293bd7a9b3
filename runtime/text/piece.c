/* The tokens of pieces, and the cache of those that came before. */
#include <string.h>

#include "runtime/text/encoder.h"

static uint64_t key_hash(const uint64_t key[2]) {
    uint64_t mixed = (key[0] ^ key[1] * 0x9E3779B97F4A7C15) * 0xD6E8FEB86659FD93;
    return mixed ^ mixed >> 32;
}

static inline uint64_t load8(const char *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static inline uint32_t load4(const char *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

/* The bytes of a short piece, by loads that overlap and read no other byte. */
static inline void make_key(uint64_t key[2], const char *piece, size_t bytes) {
    key[1] = (uint64_t)bytes << 56;
    if (bytes > CACHE_SHORT) {
        key[0] = ml_hash(piece, bytes, 0);
        key[1] = 0xFFull << 56 | (uint64_t)bytes << 32; /* + where its bytes are */
    } else if (bytes >= 8) {
        key[0] = load8(piece);
        if (bytes > 8) key[1] |= load8(piece + bytes - 8) >> 8 * (16 - bytes);
    } else if (bytes >= 4) {
        key[0] = load4(piece) | (uint64_t)load4(piece + bytes - 4) << 8 * (bytes - 4);
    } else {
        const unsigned char *at = (const unsigned char *)piece;
        key[0] = at[0] | (uint64_t)at[bytes / 2] << 8 * (bytes / 2) |
                 (uint64_t)at[bytes - 1] << 8 * (bytes - 1);
    }
}

static bool is_entry(const ml_encoder *e, const cache_entry *entry, const uint64_t key[2],
                     const char *piece, size_t bytes) {
    if (entry->key[0] != key[0]) return false;
    if (bytes <= CACHE_SHORT) return entry->key[1] == key[1];
    return (entry->key[1] ^ key[1]) >> 32 == 0 &&
           memcmp(e->cache_bytes.at + (uint32_t)entry->key[1], piece, bytes) == 0;
}

/* What was kept in the pools is forgotten with all entries. */
static void forget(ml_encoder *e) {
    memset(e->cache, 0, CACHE_BUCKETS * sizeof *e->cache);
    e->cache_bytes.count = 0;
    e->cache_ids.count = 0;
}

static ml_status keep(ml_encoder *e, cache_entry *bucket, uint64_t key[2], const char *piece,
                      size_t bytes) {
    cache_entry entry = {.count = (uint32_t)e->symbols.count};
    if (e->cache_bytes.count + bytes > CACHE_POOL ||
        (e->cache_ids.count + e->symbols.count) * 4 > CACHE_POOL)
        forget(e);
    if (bytes > CACHE_SHORT) {
        key[1] |= e->cache_bytes.count;
        ML_TRY(ml_bytes_add(&e->cache_bytes, piece, bytes));
    }
    memcpy(entry.key, key, sizeof entry.key);
    if (entry.count <= 3) {
        for (uint32_t i = 0; i < entry.count; i++) entry.ids[i] = e->symbols.at[i];
    } else {
        entry.ids[0] = (uint32_t)e->cache_ids.count;
        for (uint32_t i = 0; i < entry.count; i++)
            ML_TRY(ml_ids_add(&e->cache_ids, e->symbols.at[i]));
    }
    bucket[1] = bucket[0];
    bucket[0] = entry;
    return ML_OK;
}

static inline ml_status append(ml_encoder *e, const uint32_t *ids, uint32_t count) {
    ml_ids *to = e->ids;
    if (to->capacity - to->count < count) ML_TRY(ml_ids_reserve(to, count));
    for (uint32_t i = 0; i < count; i++) to->at[to->count++] = ids[i];
    return ML_OK;
}

static ml_status find_tokens(ml_encoder *e, const char *piece, size_t bytes) {
    bool merges = e->tokenizer->kind == MODEL_BPE;
    return merges ? bpe_symbols(e, piece, bytes) : unigram_symbols(e, piece, bytes);
}

static ml_status piece_tokens(ml_encoder *e, const char *piece, size_t bytes) {
    if (bytes > CACHE_LONGEST || !e->cache) {
        ML_TRY(find_tokens(e, piece, bytes));
        return append(e, e->symbols.at, (uint32_t)e->symbols.count);
    }
    uint64_t key[2];
    make_key(key, piece, bytes);
    cache_entry *bucket = e->cache[key_hash(key) & (CACHE_BUCKETS - 1)];
    for (int i = 0; i < 2; i++)
        if (is_entry(e, &bucket[i], key, piece, bytes)) {
            const cache_entry *entry = &bucket[i];
            return append(e, entry->count <= 3 ? entry->ids : &e->cache_ids.at[entry->ids[0]],
                          entry->count);
        }
    int64_t dropped = e->dropped;
    ML_TRY(find_tokens(e, piece, bytes));
    ML_TRY(append(e, e->symbols.at, (uint32_t)e->symbols.count));
    return e->dropped == dropped ? keep(e, bucket, key, piece, bytes) : ML_OK;
}

void piece_encode(void *encoder, const char *piece, size_t bytes) {
    ml_encoder *e = encoder;
    if (e->status == ML_OK) e->status = piece_tokens(e, piece, bytes);
}
