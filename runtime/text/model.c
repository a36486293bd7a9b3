#include "runtime/text/model.h"

#include <string.h>

#include "runtime/text/unicode.h"

text_string text_copy(ml_arena *arena, const char *at, size_t bytes) {
    return (text_string){ml_arena_copy(arena, at, bytes), bytes};
}

uint32_t text_find(const ml_tokenizer *t, const ml_index *index, bool raw, const char *at,
                   size_t bytes) {
    if (!index->capacity) return TEXT_NO_ID;
    uint64_t hash = ml_hash(at, bytes, 0);
    uint32_t cursor = 0, id;
    while ((id = ml_index_next(index, hash, &cursor)) != ML_INDEX_NONE)
        if (text_is(raw ? t->tokens[id].raw : t->tokens[id].text, at, bytes)) return id;
    return TEXT_NO_ID;
}

const text_added *text_find_added(const text_added_set *set, const char *text, size_t bytes) {
    uint32_t low = 0, high = set->list.count;
    const text_added *best = NULL;
    for (size_t depth = 0; low < high; depth++) {
        if (set->list.at[low].text.bytes == depth) best = &set->list.at[low++];
        if (depth == bytes) break;
        unsigned char byte = (unsigned char)text[depth];
        for (uint32_t end = high; low < end;) { /* the first whose byte is not less */
            uint32_t middle = (low + end) / 2;
            if ((unsigned char)set->list.at[middle].text.at[depth] < byte)
                low = middle + 1;
            else
                end = middle;
        }
        for (uint32_t begin = low; begin < high;) { /* the first whose byte is greater */
            uint32_t middle = (begin + high) / 2;
            if ((unsigned char)set->list.at[middle].text.at[depth] <= byte)
                begin = middle + 1;
            else
                high = middle;
        }
    }
    return best;
}

void text_set(ml_tokenizer *t, uint32_t id, text_string text, unsigned flags) {
    if (id >= TEXT_MOST_IDS)
        ml_raise(ML_INVALID, "the token \"%.60s\" has the id %u, and %d is the most", text.at, id,
                 TEXT_MOST_IDS - 1);
    if (id >= t->vocab) {
        int64_t room = t->vocab ? t->vocab : 1024;
        while (room <= id) room *= 2;
        text_token *more = ML_NEW_ARRAY(t->arena, text_token, room);
        if (t->vocab) memcpy(more, t->tokens, (size_t)t->vocab * sizeof *more);
        t->tokens = more;
        t->vocab = room;
    }
    t->tokens[id] = (text_token){.text = text, .raw = text, .flags = flags | TOKEN_KNOWN};
}

void text_index(ml_tokenizer *t) {
    while (t->vocab && !t->tokens[t->vocab - 1].flags) t->vocab--;
    t->by_text = (ml_index){.arena = t->arena};
    ml_index_reserve(&t->by_text, (uint32_t)t->vocab);
    for (uint32_t id = 0; id < t->vocab; id++)
        if (t->tokens[id].flags)
            ml_index_add(&t->by_text, ml_hash(t->tokens[id].text.at, t->tokens[id].text.bytes, 0),
                         id);
}

void text_reserve_merges(ml_tokenizer *t, size_t count) {
    uint32_t capacity = 16;
    while (capacity < 2 * count) capacity *= 2;
    t->merges = ML_NEW_ARRAY(t->arena, text_merge, capacity);
    for (uint32_t i = 0; i < capacity; i++) t->merges[i].id = TEXT_NO_ID;
    t->merge_mask = capacity - 1;
}

void text_add_merge(ml_tokenizer *t, text_merge merge) {
    uint64_t key = (uint64_t)merge.left << 32 | merge.right;
    uint32_t at = (uint32_t)((key * 0x9E3779B97F4A7C15) >> 32) & t->merge_mask;
    for (;; at = (at + 1) & t->merge_mask) {
        text_merge *slot = &t->merges[at];
        if (slot->id != TEXT_NO_ID && (slot->left != merge.left || slot->right != merge.right))
            continue;
        *slot = merge;
        return;
    }
}

static uint32_t find_part(const ml_tokenizer *t, const char *at, size_t bytes) {
    uint32_t id = text_find(t, &t->by_text, false, at, bytes);
    return id != TEXT_NO_ID && t->tokens[id].flags & TOKEN_VOCAB ? id : TEXT_NO_ID;
}

void text_derive_merges(ml_tokenizer *t, const uint32_t *order, uint32_t count,
                        const uint32_t *rank) {
    size_t pairs = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass) text_reserve_merges(t, pairs);
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t id = order ? order[i] : i;
            const text_string text = t->tokens[id].text;
            for (size_t cut = 1; cut < text.bytes; cut++) {
                uint32_t left = find_part(t, text.at, cut), right;
                if (left == TEXT_NO_ID) continue;
                right = find_part(t, text.at + cut, text.bytes - cut);
                if (right == TEXT_NO_ID) continue;
                if (pass) text_add_merge(t, (text_merge){left, right, rank ? rank[i] : i, id});
                pairs++;
            }
        }
    }
}

static bool is_itself(unsigned byte) {
    return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

int text_byte_character(unsigned char byte, char to[4]) {
    uint32_t c = byte;
    if (!is_itself(byte)) {
        c = 256;
        for (unsigned i = 0; i < byte; i++) c += !is_itself(i);
    }
    return unicode_write(c, to);
}

int text_character_byte(uint32_t c) {
    if (c < 256) return is_itself(c) ? (int)c : -1;
    if (c < 256 + 33) return (int)(c - 256);                 /* 0 to 32 */
    if (c < 256 + 33 + 34) return (int)(c - 256 - 33 + 127); /* 127 to 160 */
    return c == 256 + 33 + 34 ? 0xAD : -1;
}

bool text_unmap(ml_arena *arena, text_string text, text_string *raw) {
    const unsigned char *at = (const unsigned char *)text.at, *end = at + text.bytes;
    char *to = ml_arena_alloc(arena, text.bytes + 1);
    size_t bytes = 0;
    for (int length; at < end; at += length) {
        int byte = text_character_byte(unicode_read(at, end, &length));
        if (byte < 0) return false;
        to[bytes++] = (char)byte;
    }
    *raw = (text_string){to, bytes};
    return true;
}
