/* Encoding: added tokens, normalizers, pre-tokenizers, the model. */
#include <string.h>

#include "runtime/text/encoder.h"
#include "runtime/text/normalize.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/unicode.h"

typedef const unsigned char *place;

static bool is_word(uint32_t c) { /* \w */
    return unicode_class(c) & (TEXT_LETTER | TEXT_MARK | TEXT_NUMBER) || c == '_' || c == 0x203F ||
           c == 0x2040 || c == 0x200C || c == 0x200D;
}

static place back_one(place at, place first) {
    do at--;
    while (at > first && (*at & 0xC0) == 0x80);
    return at;
}

static bool stands_alone(place text, place begin, place end, place last) {
    int length;
    if (begin > text && is_word(unicode_read(back_one(begin, text), last, &length))) return false;
    return end == last || !is_word(unicode_read(end, last, &length));
}

typedef ml_status part_function(ml_encoder *e, const char *text, size_t bytes, int flags);

/* The added tokens of a text; what lies between them is given to `part`. */
static ml_status find_added(ml_encoder *e, const text_added_set *set, const char *text,
                            size_t bytes, int flags, part_function *part) {
    place first = (place)text, last = first + bytes, done = first, at = first;
    int length;
    while (set->list.count && at < last) {
        if (!set->first[*at]) {
            place next = set->only < 0 ? at + 1 : memchr(at, set->only, (size_t)(last - at));
            at = next ? next : last;
            continue;
        }
        const text_added *added = text_find_added(set, (const char *)at, (size_t)(last - at));
        if (!added) {
            at++;
            continue;
        }
        place begin = at, end = at + added->text.bytes;
        at = end;
        if (added->special && flags & ML_ENCODE_PLAIN) continue;
        if (added->single_word && !stands_alone(first, begin, end, last)) continue;
        while (added->left && begin > done &&
               unicode_class(unicode_read(back_one(begin, done), last, &length)) & TEXT_SPACE)
            begin = back_one(begin, done);
        while (added->right && end < last &&
               unicode_class(unicode_read(end, last, &length)) & TEXT_SPACE)
            end += length;
        if (begin > done) ML_TRY(part(e, (const char *)done, (size_t)(begin - done), flags));
        ML_TRY(ml_ids_add(e->ids, added->id));
        done = end; /* a token within the spaces that were taken counts again, as in the library */
        e->first = false;
    }
    if (done < last) ML_TRY(part(e, (const char *)done, (size_t)(last - done), flags));
    return ML_OK;
}

static ml_status encode_pieces(ml_encoder *e, const char *text, size_t bytes, int flags) {
    (void)flags;
    split_text(e, text, bytes);
    e->first = false;
    return e->status;
}

/* U+FFFD for bytes that are no UTF-8. */
static ml_status replace_invalid(const char *text, size_t bytes, ml_bytes *to) {
    place at = (place)text, end = at + bytes, gap = at;
    int length;
    for (; at < end; at += length) {
        if (unicode_read(at, end, &length) < TEXT_NO_CHARACTER) continue;
        ML_TRY(ml_bytes_add(to, gap, (size_t)(at - gap)));
        ML_TRY(ml_bytes_add(to, "\xEF\xBF\xBD", 3));
        length = unicode_broken(at, end);
        gap = at + length;
    }
    return ml_bytes_add(to, gap, (size_t)(end - gap));
}

static ml_status encode_part(ml_encoder *e, const char *text, size_t bytes, int flags) {
    const ml_tokenizer *t = e->tokenizer;
    ml_bytes *normal = e->normal;
    int at = 0;
    if (t->normals.count) {
        ML_TRY(normalize_text(t, e->matcher, text, bytes, normal, &at));
        text = normal[at].at;
        bytes = normal[at].count;
    }
    return find_added(e, &t->added_normalized, text, bytes, flags, encode_pieces);
}

ml_status ml_encoder_encode(ml_encoder *e, const char *text, size_t bytes, int flags, ml_ids *ids) {
    const ml_tokenizer *t = e->tokenizer;
    e->ids = ids;
    e->status = ML_OK;
    e->first = true;
    if (t->kind == MODEL_BYTES) {
        ML_TRY(ml_ids_reserve(ids, (int64_t)bytes));
        for (size_t i = 0; i < bytes; i++) ids->at[ids->count++] = (unsigned char)text[i];
        return ML_OK;
    }
    if (!t->byte_level) {
        e->valid.count = 0;
        ML_TRY(replace_invalid(text, bytes, &e->valid));
        text = e->valid.at;
        bytes = e->valid.count;
    }
    for (uint32_t i = 0; flags & ML_ENCODE_FRAME && i < t->before.count; i++)
        ML_TRY(ml_ids_add(ids, t->before.at[i]));
    ML_TRY(find_added(e, &t->added, text, bytes, flags, encode_part));
    for (uint32_t i = 0; flags & ML_ENCODE_FRAME && i < t->after.count; i++)
        ML_TRY(ml_ids_add(ids, t->after.at[i]));
    return ML_OK;
}

ml_status ml_encoder_open(const ml_tokenizer *t, ml_encoder **encoder) {
    ml_encoder *e = *encoder = ml_alloc(sizeof *e);
    if (e) e->tokenizer = t;
    bool works = e && (e->matcher = regex_matcher_new());
    if (works && t->kind != MODEL_BYTES) works = piece_open_cache(e, CACHE_FIRST);
    if (works) return ML_OK;
    ml_encoder_close(e);
    *encoder = NULL;
    return ml_fail(ML_NO_MEMORY, "not enough host memory for an encoder");
}

void ml_encoder_close(ml_encoder *e) {
    if (!e) return;
    regex_matcher_free(e->matcher);
    for (int i = 0; i < STEP_COUNT; i++) ml_bytes_free(&e->step[i]);
    for (int i = 0; i < TEXT_MOST_STEPS; i++) ml_free(e->parts[i].at);
    for (int i = 0; i < 2; i++) ml_bytes_free(&e->normal[i]);
    ml_bytes_free(&e->valid);
    ml_bytes_free(&e->cache_bytes);
    ml_ids_free(&e->cache_ids);
    ml_ids_free(&e->symbols);
    ml_ids_free(&e->links);
    ml_free(e->best);
    ml_free(e->by_rank);
    ml_free(e->entries);
    ml_free(e->cache);
    ml_free(e);
}

ml_status ml_tokenizer_encode(const ml_tokenizer *t, const char *text, size_t bytes, int flags,
                              ml_ids *ids) {
    ml_encoder *encoder;
    ML_TRY(ml_encoder_open(t, &encoder));
    ml_status status = ml_encoder_encode(encoder, text, bytes, flags, ids);
    ml_encoder_close(encoder);
    return status;
}
