/* Unigram: of all ways to part a piece into tokens the likeliest (Viterbi). */
#include <string.h>

#include "runtime/text/encoder.h"
#include "runtime/text/unicode.h"

ml_status unknown_character(ml_encoder *e, ml_ids *to, const char *character, int bytes,
                            bool *unknown) {
    const ml_tokenizer *t = e->tokenizer;
    bool whole = t->fallback;
    for (int i = 0; i < bytes && whole; i++)
        whole = t->byte_id[(unsigned char)character[i]] != TEXT_NO_ID;
    if (whole) {
        for (int i = 0; i < bytes; i++)
            ML_TRY(ml_ids_add(to, t->byte_id[(unsigned char)character[i]]));
        *unknown = false;
    } else if (t->unknown == TEXT_NO_ID) {
        e->dropped++;
        *unknown = false; /* what is left out parts no two tokens */
    } else {
        if (!*unknown || !t->fuse) ML_TRY(ml_ids_add(to, t->unknown));
        *unknown = true;
    }
    return ML_OK;
}

/* Tokens that begin at `begin` offer themselves to the places where they end; whether one of them
 * is a single character. */
static bool offer_tokens(ml_encoder *e, const char *piece, size_t bytes, size_t begin,
                         size_t character) {
    const ml_tokenizer *t = e->tokenizer;
    uint32_t low = 0, high = t->sorted_count;
    bool single = false;
    for (size_t depth = 0; low < high; depth++) {
        const text_token *token = &t->tokens[t->sorted[low]];
        if (token->text.bytes == depth) {
            uint32_t id = t->sorted[low++];
            unigram_place *to = &e->best[begin + depth];
            double score = e->best[begin].score + t->scores[id];
            single = single || depth == character;
            if (!to->reached || score > to->score)
                *to = (unigram_place){t->rounded ? (float)score : score, (uint32_t)begin, id, true};
        }
        if (begin + depth == bytes) break;
        unsigned char byte = (unsigned char)piece[begin + depth];
        uint32_t first = low, last = high;
        while (first < last) { /* the first whose byte is not less */
            uint32_t middle = (first + last) / 2;
            bool less = (unsigned char)t->tokens[t->sorted[middle]].text.at[depth] < byte;
            if (less)
                first = middle + 1;
            else
                last = middle;
        }
        low = first;
        for (last = high; first < last;) { /* the first whose byte is greater */
            uint32_t middle = (first + last) / 2;
            bool greater = (unsigned char)t->tokens[t->sorted[middle]].text.at[depth] > byte;
            if (greater)
                last = middle;
            else
                first = middle + 1;
        }
        high = first;
    }
    return single;
}

static ml_status find_best(ml_encoder *e, const char *piece, size_t bytes) {
    if (bytes >= UINT32_MAX - 1) return ml_fail(ML_INVALID, "a piece of %zu bytes", bytes);
    if (bytes + 1 > e->best_room) {
        size_t room = 2 * bytes + 64;
        unigram_place *more = ml_realloc(e->best, e->best_room * sizeof *more, room * sizeof *more);
        if (!more) return ml_fail(ML_NO_MEMORY, "not enough host memory for %zu bytes", bytes);
        e->best = more;
        e->best_room = room;
    }
    memset(e->best, 0, (bytes + 1) * sizeof *e->best);
    const unsigned char *at = (const unsigned char *)piece, *end = at + bytes;
    int length;
    for (size_t i = 0; i < bytes; i += (size_t)length) {
        unicode_read(at + i, end, &length);
        if (offer_tokens(e, piece, bytes, i, (size_t)length)) continue;
        unigram_place *to = &e->best[i + (size_t)length];
        double score = e->best[i].score + e->tokenizer->unknown_score;
        if (e->tokenizer->rounded) score = (float)score;
        if (!to->reached || score > to->score)
            *to = (unigram_place){score, (uint32_t)i, TEXT_NO_ID, true};
    }
    return ML_OK;
}

ml_status unigram_symbols(ml_encoder *e, const char *piece, size_t bytes) {
    const ml_tokenizer *t = e->tokenizer;
    ML_TRY(find_best(e, piece, bytes));
    size_t count = 0; /* the way back is turned around in `links` */
    e->links.count = e->symbols.count = 0;
    for (size_t at = bytes; at > 0; at = e->best[at].from, count++)
        ML_TRY(ml_ids_add(&e->links, (uint32_t)at));
    bool fused = false;
    while (count-- > 0) {
        size_t end = e->links.at[count], begin = e->best[end].from;
        if (e->best[end].id != TEXT_NO_ID) {
            ML_TRY(ml_ids_add(&e->symbols, e->best[end].id));
            fused = false;
            continue;
        }
        /* Unknown characters in a row are one: their bytes together, or unknown once. */
        while (!t->fallback && count > 0 && e->best[e->links.at[count - 1]].id == TEXT_NO_ID)
            end = e->links.at[--count];
        ML_TRY(unknown_character(e, &e->symbols, piece + begin, (int)(end - begin), &fused));
    }
    return ML_OK;
}
